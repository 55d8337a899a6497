/* Activations that leave the card between a forward and its backward: where `schedule/copies.py` places their copies,
 * and the time that `evaluate/simulator.py` says they take. A part is half of a layer. */
#ifndef YUAN_COPIES_H
#define YUAN_COPIES_H

#include "programs.h"

/* What a stage sends away: as `Offload` in `schedule/copies.py`. */
struct sending {
    int32_t parts, leaving, resident, ahead;
};

/* The most bytes of what leaves that are on card and host at once. */
struct kept_bytes {
    double card, host;
};

/* The steps of a worker in parts, and the copies between them. */
struct placement {
    struct sending what;
    int32_t num_steps, num_positions, num_copies, fits;
    struct step *steps;            /* [steps]: micro-batches by their number among the worker's own */
    int32_t *first;                /* [steps]: position of its first part */
    int32_t *forwards, *backwards; /* [micro-batches]: the same of these */
    int32_t *step_at, *ends;       /* [positions]: its step; end of the copies before it */
    int32_t *copies;               /* kind of copy, and what it copies */
    int32_t *state, *queue;        /* [micro-batches, leaving]: scratch */
    struct kept_bytes kept;        /* what `find_kept` said last, of these bytes */
    double *kept_of;               /* [leaving]; 0 before */
    void *memory;
    size_t room;
    int64_t used; /* when */
};

enum { NUM_PLACED = 512 };

/* Placements that were made, and when they were used; those from `kept` on are not made anew. */
struct placements {
    struct placement made[NUM_PLACED];
    int64_t used, kept, num_positions; /* all that were placed, summed or run */
    size_t room;                       /* of all */
};

/* The two links of a worker in a run. */
struct copy_clock {
    const struct placement *placement;        /* NULL: nothing leaves */
    const double *forward, *backward, *bytes; /* [parts]: shares of a step; [leaving] */
    double *down, *up;                        /* [micro-batches, leaving]: when copies end */
    double rate, down_free, up_free;
    int32_t step, copy; /* the next ones */
};

/* What a worker's steps send away; `fits` says whether `resident` parts are enough. NULL without memory. */
struct placement *find_placement(struct placements *all, const struct sending *what, const struct step *steps,
                                       int32_t num_steps);
void free_placements(struct placements *all);
/* How many copies each way a run may have. */
size_t num_leaving(const struct placement *placement);
struct kept_bytes find_kept(struct placement *placement, const double *bytes);
/* The end of the worker's next step. */
double run_parts(struct copy_clock *clock, double start, double seconds);

#endif
