/* The compute steps of every worker, in order, before their messages are placed. */
#ifndef YUAN_PROGRAMS_H
#define YUAN_PROGRAMS_H

#include "memory.h"
#include "pipeline.h"

struct step {
    int32_t kind, stage, micro_batch;
};

struct program {
    struct step *steps;
    int32_t count;
};

static inline int32_t num_replicas(const struct layout *layout, int32_t stage)
{
    return layout->first[stage + 1] - layout->first[stage];
}

static inline int32_t worker_of(const struct layout *layout, int32_t stage, int32_t micro_batch)
{
    return layout->workers[layout->first[stage] + micro_batch % num_replicas(layout, stage)];
}

/* [workers] */
struct program *compute_programs(const struct layout *layout, struct arena *arena);
/* The operations, messages among them, into `schedule`; 0, or -1 if steps wait for each other in a circle. */
int place_messages(const struct layout *layout, const struct program *programs, int32_t message_units,
                   struct schedule *schedule, struct arena *arena);
/* Numbers the links of the operations, and counts their messages. */
void number_links(struct schedule *schedule, struct arena *arena);

#endif
