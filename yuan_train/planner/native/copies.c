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

/* The next step of a worker from operation i on; NULL after the last one. */
static const struct operation *next_step(const struct schedule *schedule, int32_t worker, int32_t *i)
{
    for (; *i < schedule->num_operations; ++*i) {
        const struct operation *operation = &schedule->operations[*i];
        if (operation->peer < 0 && operation->worker == worker)
            return &schedule->operations[(*i)++];
    }
    return NULL;
}

/* Whether the worker's steps are those that the copies are placed in; how many there are into `count`. */
static int has_steps(const struct placement *own, const struct schedule *schedule, int32_t worker, int32_t n,
                     int32_t *count)
{
    const struct operation *step;
    int32_t i = 0, same = 1;
    for (*count = 0; (step = next_step(schedule, worker, &i)); ++*count)
        same = same && *count < own->num_steps && own->steps[2 * *count] == step->kind &&
               own->steps[2 * *count + 1] == step->micro_batch / n;
    return same && *count == own->num_steps;
}

/* Room for so many steps; 0, or -1 without memory. */
static int take_room(struct placement *own, int32_t num_steps)
{
    size_t steps = (size_t)num_steps, batches = (steps + 1) / 2, positions = steps * (size_t)own->what.parts;
    size_t keys = batches * (size_t)own->what.leaving;
    size_t integers = 3 * steps + 2 * batches + 2 * positions + 8 * keys;
    size_t bytes = 2 * keys * sizeof(double) + (integers + 1) * sizeof(int32_t);
    if (bytes > own->room) {
        free(own->memory);
        own->room = 0;
        own->memory = malloc(bytes);
        if (!own->memory)
            return -1;
        own->room = bytes;
    }
    own->down = own->memory;
    own->up = own->down + keys;
    own->steps = (int32_t *)(own->up + keys);
    own->first = own->steps + 2 * steps;
    own->forwards = own->first + steps;
    own->backwards = own->forwards + batches;
    own->step_at = own->backwards + batches;
    own->ends = own->step_at + positions;
    own->copies = own->ends + positions;
    own->state = own->copies + 6 * keys;
    own->queue = own->state + keys;
    for (size_t i = 0; i < keys; i++) {
        own->down[i] = own->up[i] = 0.0;
        own->state[i] = HERE;
    }
    return 0;
}

/* Number the parts of the steps. */
static void find_positions(struct placement *own)
{
    own->num_positions = 0;
    for (int32_t i = 0; i < own->num_steps; i++) {
        int32_t kind = own->steps[2 * i], batch = own->steps[2 * i + 1];
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
    return own->steps[2 * step] == FORWARD ? i : own->what.parts - 1 - i;
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
    int32_t step = own->step_at[position], batch = own->steps[2 * step + 1], part = part_at(own, position);
    if (!is_backward(own->steps[2 * step]) || part >= own->what.leaving || !is_long(own, batch, part))
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
        int32_t step = own->step_at[i], kind = own->steps[2 * step], batch = own->steps[2 * step + 1];
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

int place_copies(struct placement *own, const struct sending *what, const struct schedule *schedule,
                 int32_t worker, int32_t n)
{
    int32_t count, i = 0;
    int has_them = has_steps(own, schedule, worker, n, &count);
    if (has_them && own->memory && !memcmp(&own->what, what, sizeof *what))
        return 0;
    own->what = *what;
    own->num_steps = 0;
    if (take_room(own, count))
        return -1;
    for (const struct operation *step; (step = next_step(schedule, worker, &i)); own->num_steps++) {
        own->steps[2 * own->num_steps] = step->kind;
        own->steps[2 * own->num_steps + 1] = step->micro_batch / n;
    }
    find_positions(own);
    own->fits = place(own);
    if (own->fits)
        drop_idle(own);
    return 0;
}

/* --- what stays, and a run -------------------------------------------------------------------------------- */

struct kept_bytes find_kept(const struct placement *own, const double *bytes)
{
    struct kept_bytes most = {0.0, 0.0}, now = {0.0, 0.0};
    double all = 0.0;
    int32_t next = 0, splits = 0;
    for (int32_t part = 0; part < own->what.leaving; part++)
        all += bytes[part];
    for (int32_t i = 0; i < own->num_steps; i++)
        splits |= own->steps[2 * i] == BACKWARD_WEIGHT;
    for (int32_t i = 0; i < own->num_positions; i++) {
        for (; next < own->ends[i]; next++) {
            int32_t copy = own->copies[2 * next], key = own->copies[2 * next + 1];
            double size = bytes[key % own->what.leaving];
            now.card += copy == FETCH ? size : copy == EVICT ? -size : 0.0;
            now.host += copy == OFFLOAD ? size : 0.0;
            most.card = fmax(most.card, now.card);
            most.host = fmax(most.host, now.host);
        }
        int32_t step = own->step_at[i], kind = own->steps[2 * step], part = part_at(own, i);
        if (kind == BACKWARD_WEIGHT) {
            now.card -= all;
        } else if (part < own->what.leaving) {
            int32_t key = own->steps[2 * step + 1] * own->what.leaving + part;
            now.card += kind == FORWARD ? bytes[part] : splits ? 0.0 : -bytes[part];
            now.host -= kind != FORWARD && own->state[key] == AWAY ? bytes[part] : 0.0;
            most.card = fmax(most.card, now.card);
        }
    }
    return most;
}

/* Begin a copy, or wait for one. */
static double run_copy(struct copy_clock *clock, int32_t copy, int32_t key, double now)
{
    struct placement *own = clock->placement;
    double seconds = clock->bytes[key % own->what.leaving] / clock->rate;
    if (copy == EVICT)
        return fmax(now, own->down[key]);
    if (copy == OFFLOAD)
        own->down[key] = clock->down_free = fmax(clock->down_free, now) + seconds;
    else
        own->up[key] = clock->up_free = fmax(clock->up_free, now) + seconds;
    return now;
}

double run_parts(struct copy_clock *clock, double now, double seconds)
{
    const struct placement *own = clock->placement;
    int32_t step = clock->step++, kind = own->steps[2 * step], batch = own->steps[2 * step + 1];
    int32_t parts = is_in_parts(kind) ? own->what.parts : 1;
    for (int32_t i = 0; i < parts; i++) {
        int32_t position = own->first[step] + i, part = part_at(own, position);
        for (; clock->copy < own->ends[position]; clock->copy++)
            now = run_copy(clock, own->copies[2 * clock->copy], own->copies[2 * clock->copy + 1], now);
        if (is_backward(kind) && part < own->what.leaving)
            now = fmax(now, own->up[batch * own->what.leaving + part]);
        if (is_in_parts(kind))
            now += seconds * (kind == FORWARD ? clock->forward : clock->backward)[part];
        else
            now += seconds;
    }
    return now;
}
