/* Copies of activations: see `copies.h`. */
#include "copies.h"

#include <math.h>
#include <stdlib.h>

enum copy { OFFLOAD, EVICT, FETCH };
/* Of what leaves: its copy to the host has begun; it has left; it stays after all. */
enum state { HERE, PENDING, AWAY };

static int is_in_parts(int32_t kind)
{
    return kind != BACKWARD_WEIGHT;
}

static int is_backward(int32_t kind)
{
    return kind == BACKWARD || kind == BACKWARD_INPUT;
}

/* --- placing ---------------------------------------------------------------------------------------------- */

/* Forget those that were not used for longest until there is room for more; placements of large batches are large. */
static void keep_within(struct placements *all, size_t more)
{
    enum { MOST_BYTES = 128 << 20 };
    while (all->room + more > MOST_BYTES) {
        struct placement *oldest = NULL;
        for (int32_t i = 0; i < NUM_PLACED; i++) {
            struct placement *own = &all->made[i];
            if (own->room && own->used < all->kept && (!oldest || own->used < oldest->used))
                oldest = own;
        }
        if (!oldest)
            return;
        free(oldest->memory);
        all->room -= oldest->room;
        oldest->memory = NULL;
        oldest->room = 0;
    }
}

/* Room for so many steps; 0, or -1 without memory. */
static int take_room(struct placements *all, struct placement *own, int32_t num_steps)
{
    size_t steps = (size_t)num_steps, batches = (steps + 1) / 2, positions = steps * (size_t)own->what.parts;
    size_t keys = batches * (size_t)own->what.leaving;
    size_t bytes = (size_t)own->what.leaving * sizeof(double) + steps * sizeof(struct step) +
                   (1 + steps + 2 * batches + 2 * positions + 8 * keys) * sizeof(int32_t);
    if (bytes > own->room) {
        free(own->memory);
        all->room -= own->room;
        own->room = 0;
        keep_within(all, bytes);
        own->memory = malloc(bytes);
        if (!own->memory)
            return -1;
        own->room = bytes;
        all->room += bytes;
    }
    own->kept_of = own->memory;
    memset(own->kept_of, 0, (size_t)own->what.leaving * sizeof(double));
    own->kept = (struct kept_bytes){0.0, 0.0};
    own->steps = (struct step *)(own->kept_of + own->what.leaving);
    own->first = (int32_t *)(own->steps + steps);
    own->forwards = own->first + steps;
    own->backwards = own->forwards + batches;
    own->step_at = own->backwards + batches;
    own->ends = own->step_at + positions;
    own->copies = own->ends + positions;
    own->state = own->copies + 6 * keys;
    own->queue = own->state + keys;
    for (size_t i = 0; i < keys; i++)
        own->state[i] = HERE;
    return 0;
}

/* Number the parts of the steps. */
static void find_positions(struct placement *own)
{
    own->num_positions = 0;
    for (int32_t i = 0; i < own->num_steps; i++) {
        int32_t kind = own->steps[i].kind, batch = own->steps[i].micro_batch;
        int32_t parts = is_in_parts(kind) ? own->what.parts : 1;
        own->first[i] = own->num_positions;
        if (kind == FORWARD)
            own->forwards[batch] = own->num_positions;
        else if (is_backward(kind))
            own->backwards[batch] = own->num_positions;
        for (int32_t j = 0; j < parts; j++)
            own->step_at[own->num_positions++] = i;
    }
}

static int32_t part_at(const struct placement *own, int32_t position)
{
    int32_t step = own->step_at[position], i = position - own->first[step];
    return own->steps[step].kind == FORWARD ? i : own->what.parts - 1 - i;
}

/* Whether a part's backward is so far from its forward that a copy each way has time. */
static int is_long(const struct placement *own, int32_t batch, int32_t part)
{
    int32_t backward = own->backwards[batch] + own->what.parts - 1 - part;
    return backward - (own->forwards[batch] + part) > 2 * own->what.ahead + 2;
}

static void add_copy(struct placement *own, enum copy copy, int32_t key)
{
    own->copies[2 * own->num_copies] = copy;
    own->copies[2 * own->num_copies++ + 1] = key;
}

/* The leaving parts that are on the card, and the queue of those whose copy to the host has begun. */
struct on_card {
    int32_t count, begun, end;
};

static int make_room(struct placement *own, struct on_card *here)
{
    for (; here->count >= own->what.resident; here->count--) {
        while (here->begun < here->end && own->state[own->queue[here->begun]] != PENDING)
            here->begun++;
        if (here->begun == here->end)
            return 0;
        int32_t key = own->queue[here->begun++];
        own->state[key] = AWAY;
        add_copy(own, EVICT, key);
    }
    here->count++;
    return 1;
}

/* Fetch what the backward at a position needs, if that is away; 0 if there is no room. A long part is never so near
 * to its forward that it would be fetched before. */
static int fetch(struct placement *own, int32_t position, struct on_card *here)
{
    if (position >= own->num_positions)
        return 1;
    int32_t step = own->step_at[position], batch = own->steps[step].micro_batch, part = part_at(own, position);
    if (!is_backward(own->steps[step].kind) || part >= own->what.leaving || !is_long(own, batch, part))
        return 1;
    int32_t key = batch * own->what.leaving + part;
    if (own->state[key] == PENDING) {
        own->state[key] = HERE;
        return 1;
    }
    if (!make_room(own, here))
        return 0;
    add_copy(own, FETCH, key);
    return 1;
}

static int place(struct placement *own)
{
    struct on_card here = {0, 0, 0};
    own->num_copies = 0;
    for (int32_t i = 0; i < own->num_positions; i++) {
        int32_t step = own->step_at[i], kind = own->steps[step].kind, batch = own->steps[step].micro_batch;
        int32_t part = part_at(own, i), leaves = is_in_parts(kind) && part < own->what.leaving;
        if (!fetch(own, i + own->what.ahead, &here))
            return 0;
        if (kind == FORWARD && leaves && !make_room(own, &here))
            return 0;
        own->ends[i] = own->num_copies;
        if (kind == FORWARD && leaves && is_long(own, batch, part)) {
            int32_t key = batch * own->what.leaving + part;
            add_copy(own, OFFLOAD, key);
            own->state[key] = PENDING;
            own->queue[here.end++] = key;
        }
        if (kind == BACKWARD_WEIGHT)
            here.count -= own->what.leaving;
        else if (kind == BACKWARD && leaves)
            here.count--;
    }
    return 1;
}

/* A copy of what stays after all would be for nothing. */
static void drop_idle(struct placement *own)
{
    int32_t next = 0, kept = 0;
    for (int32_t i = 0; i < own->num_positions; i++) {
        for (; next < own->ends[i]; next++) {
            int32_t copy = own->copies[2 * next], key = own->copies[2 * next + 1];
            if (copy == OFFLOAD && own->state[key] != AWAY)
                continue;
            own->copies[2 * kept] = copy;
            own->copies[2 * kept++ + 1] = key;
        }
        own->ends[i] = kept;
    }
    own->num_copies = kept;
}

static int is_placed(const struct placement *own, const struct sending *what, const struct step *steps,
                     int32_t num_steps)
{
    return own->memory && own->num_steps == num_steps && !memcmp(&own->what, what, sizeof *what) &&
           !memcmp(own->steps, steps, sizeof *steps * (size_t)num_steps);
}

/* A place among those made: of the same steps, or else the one that was not used for longest. */
static struct placement *choose_place(struct placements *all, const struct sending *what, const struct step *steps,
                                      int32_t num_steps)
{
    enum { TRIED = 8 };
    struct placement *chosen = NULL;
    uint32_t hash = 2166136261u;
    const int32_t sizes[] = {what->parts, what->leaving, what->resident, what->ahead, num_steps};
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++)
        hash = (hash ^ (uint32_t)sizes[i]) * 16777619u;
    for (int32_t i = 0; i < num_steps; i++)
        hash = (hash ^ (uint32_t)(4 * steps[i].micro_batch + steps[i].kind)) * 16777619u;
    for (uint32_t i = 0; i < NUM_PLACED && (i < TRIED || !chosen); i++) {
        struct placement *own = &all->made[((hash >> 8) + i) % NUM_PLACED];
        if (is_placed(own, what, steps, num_steps))
            return own;
        if (own->used < all->kept && (!chosen || own->used < chosen->used))
            chosen = own;
    }
    return chosen;
}

struct placement *find_placement(struct placements *all, const struct sending *what, const struct step *steps,
                                       int32_t num_steps)
{
    struct placement *own = choose_place(all, what, steps, num_steps);
    if (!own)
        return NULL;
    own->used = ++all->used;
    if (is_placed(own, what, steps, num_steps))
        return own;
    own->what = *what;
    own->num_steps = 0;
    if (take_room(all, own, num_steps))
        return NULL;
    own->num_steps = num_steps;
    memcpy(own->steps, steps, sizeof *steps * (size_t)num_steps);
    find_positions(own);
    own->fits = place(own);
    if (own->fits)
        drop_idle(own);
    return own;
}

void free_placements(struct placements *all)
{
    for (int32_t i = 0; i < NUM_PLACED; i++)
        free(all->made[i].memory);
}

size_t num_leaving(const struct placement *own)
{
    return (size_t)(own->num_steps + 1) / 2 * (size_t)own->what.leaving;
}

/* --- what stays, and a run -------------------------------------------------------------------------------- */

struct kept_bytes find_kept(struct placement *own, const double *bytes)
{
    struct kept_bytes most = {0.0, 0.0}, now = {0.0, 0.0};
    size_t size_of_bytes = (size_t)own->what.leaving * sizeof(double);
    if (!memcmp(own->kept_of, bytes, size_of_bytes))
        return own->kept;
    double all = 0.0;
    int32_t next = 0, splits = 0;
    for (int32_t part = 0; part < own->what.leaving; part++)
        all += bytes[part];
    for (int32_t i = 0; i < own->num_steps; i++)
        splits |= own->steps[i].kind == BACKWARD_WEIGHT;
    for (int32_t i = 0; i < own->num_positions; i++) {
        for (; next < own->ends[i]; next++) {
            int32_t copy = own->copies[2 * next], key = own->copies[2 * next + 1];
            double size = bytes[key % own->what.leaving];
            now.card += copy == FETCH ? size : copy == EVICT ? -size : 0.0;
            now.host += copy == OFFLOAD ? size : 0.0;
            most.card = max_of(most.card, now.card);
            most.host = max_of(most.host, now.host);
        }
        int32_t step = own->step_at[i], kind = own->steps[step].kind, part = part_at(own, i);
        if (kind == BACKWARD_WEIGHT) {
            now.card -= all;
        } else if (part < own->what.leaving) {
            int32_t key = own->steps[step].micro_batch * own->what.leaving + part;
            now.card += kind == FORWARD ? bytes[part] : splits ? 0.0 : -bytes[part];
            now.host -= kind != FORWARD && own->state[key] == AWAY ? bytes[part] : 0.0;
            most.card = max_of(most.card, now.card);
        }
    }
    memcpy(own->kept_of, bytes, size_of_bytes);
    return own->kept = most;
}

/* Begin a copy, or wait for one. */
static double run_copy(struct copy_clock *clock, int32_t copy, int32_t key, double now)
{
    const struct placement *own = clock->placement;
    double seconds = clock->bytes[key % own->what.leaving] / clock->rate;
    if (copy == EVICT)
        return max_of(now, clock->down[key]);
    if (copy == OFFLOAD)
        clock->down[key] = clock->down_free = max_of(clock->down_free, now) + seconds;
    else
        clock->up[key] = clock->up_free = max_of(clock->up_free, now) + seconds;
    return now;
}

double run_parts(struct copy_clock *clock, double now, double seconds)
{
    const struct placement *own = clock->placement;
    int32_t step = clock->step++, kind = own->steps[step].kind, batch = own->steps[step].micro_batch;
    int32_t parts = is_in_parts(kind) ? own->what.parts : 1;
    for (int32_t i = 0; i < parts; i++) {
        int32_t position = own->first[step] + i, part = part_at(own, position);
        for (; clock->copy < own->ends[position]; clock->copy++)
            now = run_copy(clock, own->copies[2 * clock->copy], own->copies[2 * clock->copy + 1], now);
        if (is_backward(kind) && part < own->what.leaving)
            now = max_of(now, clock->up[batch * own->what.leaving + part]);
        if (is_in_parts(kind))
            now += seconds * (kind == FORWARD ? clock->forward : clock->backward)[part];
        else
            now += seconds;
    }
    return now;
}
