/* What the parts of the evaluator share. */
#ifndef YUAN_EVALUATOR_H
#define YUAN_EVALUATOR_H

#include "copies.h"
#include "evaluate.h"
#include "memory.h"

/* Steps of drafts that do not fit are above this, and of those that cannot be, or are too long, above all. */
#define MISFIT 1e9
#define IMPOSSIBLE 1e30

/* One card of each owner of a bucket, by node as communication libraries go: what its links are. There are as many
 * rings as the narrowest owner has cards, and as many ways as rings that may take unlike times. */
struct ring {
    int32_t num_cards, num_nodes, most_in_node, num_routes, num_rings, num_ways, is_gloo;
    int32_t all_cards, all_nodes; /* those of other islands among them */
    double copy_seconds, compute_seconds; /* of a byte: the slowest card's copy to its host; of the compute beside it */
    int32_t *nodes;              /* that it passes, each once */
    const struct route **routes; /* [num_ways, num_routes] of its links; where none was measured, those alike once */
};

/* A bucket on its way between its owners. */
struct transfer {
    const struct ring *ring;
    double parameters, early, compute; /* `compute`: seconds that it takes of its owners' work while that hides it */
    int32_t first_unit, end_unit;
    double ready, start, end;
    const int32_t *replicas; /* of the draft: its owners, `ring->num_cards` of them */
};

/* A change in the flows through a node's NIC. */
struct change {
    double time;
    int32_t change, node;
};

/* How a pipeline runs. */
struct played {
    struct message *messages; /* that arrive later than `from` */
    int32_t num_messages, room, alike; /* `alike`: an earlier pipeline that runs the same; -1: none */
    double from;
};

/* Schedules that were made, by what makes them. */
struct known {
    struct schedule *schedule;
    int32_t *key; /* schedule, micro-batches, stages, replicas of each */
};

enum { NUM_KNOWN = 1024 };

struct evaluator {
    const struct problem *problem;
    struct arena arena;
    int64_t num_played;                   /* drafts that were simulated */
    int recompute_costs;                  /* whether no unit takes less time where it is recomputed */
    int is_searching;                     /* refuse pipelines under 1F1B whose schedule would have to be made */
    struct stage_price *prices;           /* [stages], `most_stages` as all below that say stages */
    int32_t *stage_of;                    /* [pipelines, units] */
    int32_t *first_replica, num_replicas; /* [stages]; of all stages, those of several stages once */
    int32_t *pool_of, *place_of, *width_of; /* [replicas] */
    int32_t *taken;                       /* [pools]: cards */
    double *slowed, *work_end; /* [replicas]: seconds that reductions take of their work; its end without these */
    int32_t *holders, *slices;            /* [units]: replicas; least common multiple of their widths */
    double *weights;                      /* [units]: of the owners, together */
    double *forward, *backward, *weight;  /* [stages]: seconds, as the simulation takes them */
    double *send_activation, *send_gradient, *start, *end; /* [stages] */
    double *busy, *worker_end;            /* [cards]: scratch */
    double *complete, *complete_early, *needed; /* [units] */
    int32_t *depths, *first, *workers;    /* [stages + 1]: scratch of one pipeline */
    double *part_forward, *part_backward, *part_bytes; /* [2 units]: of the parts of one pipeline's layers */
    struct placements *placed;
    struct step *steps;                   /* of one worker: scratch */
    double *copy_ends;                    /* of one pipeline's copies, in a run */
    size_t room_for_steps, room_for_copies;
    struct copy_clock *clocks;            /* [cards]: of one pipeline's workers */
    struct played *played;                /* [pipelines] */
    struct known known[NUM_KNOWN];
    int64_t num_operations;               /* of all that are known */
    uint32_t oldest;                      /* about, of these */
    struct change *changes;
    int32_t num_changes, room_for_changes;
    int32_t *leaving, *entering, *counts, *flows; /* [nodes] */
    struct ring *rings;                   /* [units + 1] */
    struct transfer *transfers;           /* [2 units] */
    int32_t num_transfers, num_rings;
    int32_t *owners, num_owners;          /* of all transfers, one after another */
    int32_t *ring_nodes, num_ring_nodes, num_ring_routes;
    const struct route **ring_routes;
    struct run *run;
};

enum collective { ALL_REDUCE, REDUCE_SCATTER, ALL_GATHER };

/* Who holds each unit; 1 if the stages of a pipeline do not make up the model. */
int find_holders(struct evaluator *evaluator, const struct draft *draft);
int32_t common_multiple(int32_t a, int32_t b);
/* Whether the first and the last stage have the same cards. Holders must be found. */
int has_both_ends(const struct evaluator *evaluator, const struct draft_pipeline *pipeline);
/* Whether a worker of the pipeline has several stages. */
int has_virtual_stages(const struct draft *draft, const struct draft_pipeline *pipeline);
/* Bytes of the worker whose first stage is `leader`, by the prices of its stages. */
double memory_of_worker(const struct evaluator *evaluator, const struct draft_pipeline *pipeline,
                        const struct schedule *schedule, int32_t leader);
/* Let the price of each stage have what all stages of its worker take together, as `stage_cost.sum_over_cards`; 0, or 1
 * for a draft that has no schedule. */
int sum_over_workers(struct evaluator *evaluator, const struct draft *draft);
/* Micro-batches in flight of the stages of a pipeline, of 1F1B and GPipe by formula, see `schedule/schedules.py`; 1 if it
 * has no schedule. */
int find_in_flight(struct evaluator *evaluator, const struct draft *draft, const struct draft_pipeline *pipeline);
/* Of one stage, whose holders and micro-batches in flight are known; 1 if one of its groups cannot be, or if too few
 * parts may stay on its cards; -1 without memory. */
int price_stage(struct evaluator *evaluator, const struct draft *draft, int32_t p, int32_t s);
/* How deep the stages of a pipeline are under 1F1B, into `depths`. */
void find_depths(struct evaluator *evaluator, const struct draft *draft, const struct draft_pipeline *pipeline);
int sends_away(const struct draft *draft, const struct draft_pipeline *pipeline);
/* The clocks of a pipeline's workers, into `clocks`; 0, or as `price_stage`. */
int set_clocks(struct evaluator *evaluator, const struct draft *draft, int32_t p);
/* A schedule of the pipeline's shape, made once, its operations only if they are wanted; NULL without memory. `depths`
 * must be found under 1F1B. */
const struct schedule *find_schedule(struct evaluator *evaluator, const struct draft *draft,
                                     const struct draft_pipeline *pipeline, int with_operations);
/* 0, or 1 for a draft that has no price. */
int price_stages(struct evaluator *evaluator, const struct draft *draft);
/* Of a group whose first card is at this place. */
const struct unit_table *table_of(const struct problem *problem, int32_t place, int32_t width, int32_t size,
                                  int32_t recompute);
/* What a draft's step takes at least, before it is realised; infinite for one that cannot be. */
double least_step(struct evaluator *evaluator, const struct draft *draft);
/* As `price_draft`, of a draft that was realised last: its stages are priced already. */
int price_realised(struct evaluator *evaluator, const struct draft *draft, double limit, struct price *price);
double message_seconds(const struct route *route, double bytes, int32_t sharers);
double ring_seconds(const struct problem *problem, const struct ring *ring, enum collective collective,
                    double parameters, int32_t sharers);
struct run;
struct run *make_run(const struct problem *problem, struct arena *arena);
void free_run(struct run *run);
/* The ends of the evaluator's transfers, in the order in which they stand; 0, 2 if not all end by `latest`, or -1 without
 * memory. */
int run_transfers(struct evaluator *evaluator, enum collective collective, double latest);

#endif
