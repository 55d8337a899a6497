/* The price of a whole step of a plan, as `evaluate/plan_cost.py` defines it, for plans that a search makes by the
 * thousand: whole layers, replicas inside a node.
 *
 * Bytes, seconds and parameters are double. Units are the embedding, the layers and the head; arrays of `units + 1`
 * sums have at u what the units before u take together.
 */
#ifndef YUAN_EVALUATE_H
#define YUAN_EVALUATE_H

#include "pipeline.h"

enum { NUM_WIDTHS = 6, NUM_SIZES = 8, NUM_RECOMPUTES = 3 };

/* What the units cost on one kind of tensor-parallel group: `CardCosts`, in sums. */
struct unit_table {
    const double *forward, *backward, *weight; /* [units + 1] */
    const double *parameters, *parameter_bytes, *gradient_bytes, *optimizer_bytes, *activation_bytes;
    const double *transient, *output; /* [units] */
    double start_forward, start_backward; /* of a stage, besides its units */
    double boundary_bytes;
    double update_seconds; /* of a parameter, on the card itself */
    const double *critic_parameters, *critic_gradients, *critic_optimizer; /* [units + 1]: bytes of the above; or NULL */
    double half_seconds[2], half_activations[2]; /* what attention and feed-forward take of a layer */
};

/* Cards of one type in one node. */
struct pool {
    int32_t node, count;
    int32_t kind; /* the same for pools that differ in their names alone */
    int32_t type; /* of the cards */
    int32_t first_place, place_step; /* place of card i: first_place + i place_step; a step of 0: all are one place */
    int32_t backend, is_simulated;   /* backend 0 is gloo */
    double reserved;
    double limit;      /* bytes that a plan may fill, those that are reserved among them */
    double host_bytes; /* of a card's share of the host; infinite if not known */
    double host_seconds, host_bytes_each; /* of a parameter whose optimizer state is on the host */
    double host_link;    /* bytes per second, each way */
    /* Of what a host has no room for: bytes of it that the disk takes (0: there is none), seconds of each of these, and
     * bytes that the host keeps for all of them. */
    double disk_bytes, disk_seconds, disk_slots;
    double copy_seconds; /* of a byte between a card and its host, for groups without a library of their own */
};

struct route {
    double latency, stream_rate, rate; /* bytes per second of one message, and of all together */
    double shared_rate;  /* bytes per second that all flows between the two nodes were measured to get; 0: not known */
    double copy_seconds; /* of a byte of a message between cards without a common library */
    double compute_seconds;        /* that a byte of a reduction takes from the compute beside it */
    const double *sizes, *seconds; /* [num_sizes]: what messages were measured to take */
    int32_t num_sizes, is_shared;
};

/* Places tell links apart: pools, or where links were measured cards. */
struct problem {
    int32_t num_units, num_pools, num_nodes, num_cards, global_batch_size, is_tied;
    int32_t num_places, sends, is_measured;
    int32_t sizes[NUM_SIZES]; /* micro-batch sizes, in the order of the tables; 0: none */
    const struct pool *pools;
    const struct unit_table *tables;
    const int32_t *table_of; /* [places, widths, sizes, recomputes] of the first card: a table, or -1; width 2^i: i */
    const struct route *routes; /* [places, places]; on the diagonal between two cards of a pool */
    const double *reduced;      /* [units]: parameters that owners reduce; 0 for a tied embedding */
    const double *held;         /* [units]: parameters that are held, for shares of a packed reduction */
    double bucket_size, half_parameters, half_seconds, embedding_parameters;
    double reduce_bytes, weight_bytes; /* of a parameter on its way between owners: gradient, weight */
    double reduce_copy_share;          /* of the gradients that a reduction in another dtype holds again */
    double hidden_bytes[NUM_SIZES];
    int32_t num_islands; /* that run each draft, with a batch each: all cards are this many times those of the tables */
};

enum { MAX_REPLICAS = 16 };

/* State on hosts in place of recompute, or what all recompute still leaves over. */
enum offloads { NO_OFFLOAD, BEFORE_RECOMPUTE, AFTER_RECOMPUTE, NUM_OFFLOADS };

struct draft_stage {
    int16_t layers, width, num_replicas;
    int16_t depth;                     /* micro-batches in flight under 1F1B; 0: as it comes */
    int16_t recompute, num_recomputed; /* kind, and of how many layers, the first ones */
    int16_t away, resident, ahead;     /* layers whose activations leave, the first ones; see `schedule/copies.py` */
    int16_t pools[MAX_REPLICAS];       /* of each replica */
    double offload, share;             /* of the optimizer state on hosts; weight among its owners */
    /* What `realise_draft` makes `depth`, `offload` and `away` of: `sends` is one more than the kind of recompute of a
     * stage whose activations leave, 0 where none do. */
    int16_t deeper, may_offload, sends; /* `may_offload`: see `enum offloads` */
    int16_t worker; /* 0: replicas of its own; k: those of stage k - 1 of its pipeline, which is before it */
    int16_t tilt;   /* layers of the last round that the first one has, while it is folded */
};

struct draft_pipeline {
    int32_t size, num_micro_batches, first_stage, num_stages; /* `size`: a place among the problem's sizes */
};

struct draft {
    int32_t schedule, is_sharded, num_pipelines, num_stages;
    int32_t rounds; /* while a search holds it folded: virtual stages of each worker; see `virtual.c` */
    struct draft_pipeline *pipelines;
    struct draft_stage *stages; /* of one pipeline after the other */
};

/* What a stage takes; as `StageCost`. */
struct stage_price {
    double forward, backward, weight, update;
    double memory, capacity; /* bytes on its tightest card: forecast, and what may be filled */
    double host_bytes, host_capacity;
    double disk_bytes, disk_seconds, disk_slots; /* as of a pool, of its replica with the least; 0: nothing may go there */
    double optimizer_share, packed_share;
    double activations, reserved; /* of `memory` */
    double copied_share;          /* of `packed_share`, what a reduction in another dtype packs */
    int32_t in_flight, first_unit, end_unit;
    int32_t slowest, place; /* the pool and the place of its slowest replica */
};

struct price {
    double step, compute, reduce, tied, update, sync;
    double over; /* bytes that do not fit, of all replicas together */
    struct stage_price *stages;
};

/* What a search may choose. */
struct space {
    int32_t recomputes, schedules, shardings; /* sets of numbers: bit i for number i */
    uint64_t pipelines, replicas;             /* sets of counts, up to 63 */
    int32_t may_offload, may_send, uses_all;
    int32_t like_owners; /* whether only owners that compute alike may step what is not sharded; 2: of a tied table too,
                          * also where costs count it as two */
    int32_t is_ordered;  /* whether the stages of a pipeline are in the order of the pools */
    int32_t is_even;     /* one width, a replica a stage, pipelines cut alike with equal shares, no depths */
    int32_t is_plain;      /* schedules at their own depths; of a stage's layers all are recomputed or none */
    const uint8_t *counts; /* [batch + 1]: whether a pipeline may have so many micro-batches; NULL: any number */
};

/* Stages of a draft, and replicas of all of them, that there is memory for: workers may have several stages. */
static inline int32_t most_stages(const struct problem *problem)
{
    return 4 * problem->num_cards + 2 * problem->num_units;
}

struct evaluator; /* a problem, and memory to price its drafts */

/* NULL without memory. The problem must live as long. */
struct evaluator *make_evaluator(const struct problem *problem);
void free_evaluator(struct evaluator *evaluator);
/* 0; 1: no such group, or a schedule without end; 2: its step is longer than `limit`, and `price` has a part of it;
 * -1 without memory. */
int price_draft(struct evaluator *evaluator, const struct draft *draft, double limit, struct price *price);

/* The drafts that a search found, fastest first. */
struct found {
    int32_t count, room;
    int64_t num_priced;
    double *steps;
    struct draft *drafts; /* each with room for `most_stages`, and as many pipelines as the problem has cards */
};

/* A whole search, from random drafts and the given ones or from these alone after layers are dealt to their stages; or
 * a part of one: the first, second or third annealing of what is given. */
enum part { WHOLE = 0, DEALS = 1, HOT = 2, WARM = 3, COLD = 4 };

/* What a search begins with, besides random drafts, and how long it lasts. */
struct wish {
    int64_t budget; /* four for each draft that is priced whole, one for others */
    uint64_t seed;
    int32_t num_given;
    const struct draft *given; /* drafts that are known */
    int32_t part;
    double seconds; /* after which it ends once it has found a draft */
};

/* The same drafts for the same arguments on all machines. 0, or -1 without memory. */
int search_drafts(struct evaluator *evaluator, const struct space *space, const struct wish *wish,
                  struct found *found);

#endif
