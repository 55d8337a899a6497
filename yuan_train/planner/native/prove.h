/* Branch and bound over the cuts of equal pipelines; see `prove.c`. */
#ifndef YUAN_PROVE_H
#define YUAN_PROVE_H

#include "evaluate.h"

/* Cards that are a stage, in each pipeline. */
struct proof_slot {
    int32_t num_replicas, width;
    int32_t alike;             /* the same for slots of the same pools */
    int32_t block, block_kind; /* slots that share nodes; of a kind if nothing but names tells them apart */
    const int16_t *pools;      /* [pipelines, replicas] */
};

struct proof_shape {
    int32_t schedule, size, num_micro_batches, num_pipelines, is_sharded;
    int32_t needs_first, needs_last; /* whether the first and the last stage must have a layer */
    int32_t num_slots;
    const struct proof_slot *slots;
};

/* How far a proof is: nothing is proven any more from when all of the budget is spent. */
struct proof_state {
    int64_t budget, spent; /* stages that are tried */
    int64_t num_priced;
    double best;         /* seconds that a plan must take less than; once one was found, those of `draft` */
    struct draft draft;  /* with room for `most_stages`, and as many pipelines as the problem has cards */
};

/* Look for a faster plan of a shape, until there is none or the budget is spent; 0, or -1 without memory. */
int prove_shape(struct evaluator *evaluator, const struct space *space, const struct proof_shape *shape,
                struct proof_state *state);

#endif
