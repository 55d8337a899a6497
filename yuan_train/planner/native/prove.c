/* Whether a plan of equal pipelines is the fastest of its kind: branch and bound over the number of stages, their
 * groups of cards and their layers, from the last stage to the first, so that what is in flight is known.
 *
 * A stage does the work of its micro-batches after the first one has come through the stages before it, and the last
 * one's gradient goes back through these; between its last forward before the first backward, and its last forward and
 * the last backward, it idles as long as the stages after it take for a micro-batch and what is in flight does not
 * fill. Stages before the known ones take what the fastest cards would, and must have time for their layers.
 * What is left is priced whole. The search counts its nodes and looks at no clock. */
#include "prove.h"

#include <math.h>

#include "search.h"

enum { NUM_WAYS = 2 }; /* of a stage: with its optimizer's state on its card, and some of it on its host */

/* A stage with some units on some cards: the least that it takes in one of the pipelines. */
struct entry {
    int32_t state; /* 0: not known yet; 1: fits; 2: does not */
    double forward, backward, weight, update;
};

/* What the stages from some one on take. */
struct tail {
    double chain;   /* of a micro-batch there and back */
    double round;   /* from the first forward of the first of them to its last backward, at least */
    double forward; /* to the end of all its work */
    double update;
    int32_t rest, depth; /* replicas; micro-batches in flight under 1F1B, as `realise_draft` makes them */
};

struct proof {
    struct search search;
    const struct proof_shape *shape;
    struct proof_state *state;
    int32_t units, num_stages, most_depth, is_split;
    size_t num_entries;
    struct entry *entries;     /* [slots, units + 1, units + 1, most_depth + 1, ways] */
    double *forward, *both;    /* [units + 1]: of the units before, where each is fastest */
    double *messages;          /* [slots, slots, units]: from one to another after each unit */
    double message;            /* the least of them */
    double *layer_seconds;     /* [slots]: of all micro-batches of the layer that takes least */
    int32_t *in_flight;        /* [stages]: under schedules that have no formula for it */
    int32_t *caps;             /* [slots]: scratch */
    uint8_t *used;             /* [slots] */
    int32_t *slot_of, *layers, *ways; /* [stages] */
    struct draft draft, priced;
};

static const struct proof_slot *slot_at(const struct proof *proof, int32_t i)
{
    return &proof->shape->slots[i];
}

static int32_t pool_at(const struct proof *proof, int32_t i, int32_t p, int32_t r)
{
    const struct proof_slot *slot = slot_at(proof, i);
    return slot->pools[p * slot->num_replicas + r];
}

static int32_t rounds_of(const struct proof *proof, const struct proof_slot *slot)
{
    return (proof->shape->num_micro_batches + slot->num_replicas - 1) / slot->num_replicas;
}

/* The table of a group of a slot under a kind of recompute, NULL if there is none or the kind is not allowed. */
static const struct unit_table *table_at(const struct proof *proof, int32_t i, int32_t p, int32_t r, int32_t kind)
{
    const struct problem *problem = proof->search.problem;
    if (!(proof->search.space->recomputes >> kind & 1))
        return NULL;
    return table_of(problem, problem->pools[pool_at(proof, i, p, r)].first_place, slot_at(proof, i)->width,
                    proof->shape->size, kind);
}

/* The least seconds of a unit on a slot: forward, and backward without or with the gradients of weights. */
static void least_of_unit(const struct proof *proof, int32_t i, int32_t u, double *forward, double *back, double *both)
{
    *forward = *back = *both = INFINITY;
    for (int32_t p = 0; p < proof->shape->num_pipelines; p++)
        for (int32_t r = 0; r < slot_at(proof, i)->num_replicas; r++)
            for (int32_t kind = 0; kind < NUM_RECOMPUTES; kind++) {
                const struct unit_table *table = table_at(proof, i, p, r, kind);
                if (!table)
                    continue;
                double own = table->backward[u + 1] - table->backward[u], f = table->forward[u + 1] - table->forward[u];
                *forward = min_of(*forward, f);
                *both = min_of(*both, f + own);
                *back = min_of(*back, proof->is_split ? own - (table->weight[u + 1] - table->weight[u]) : own);
            }
}

/* What no unit and no stage takes less than. */
static void find_least(struct proof *proof)
{
    int32_t layers = proof->units - 2;
    for (int32_t i = 0; i < proof->shape->num_slots; i++)
        proof->layer_seconds[i] = INFINITY;
    for (int32_t u = 0; u < proof->units; u++) {
        double forward = INFINITY, back = INFINITY;
        for (int32_t i = 0; i < proof->shape->num_slots; i++) {
            double f, b, both;
            least_of_unit(proof, i, u, &f, &b, &both);
            forward = min_of(forward, f);
            back = min_of(back, b);
            if (u >= 1 && u <= layers)
                proof->layer_seconds[i] = min_of(proof->layer_seconds[i], both * rounds_of(proof, slot_at(proof, i)));
        }
        proof->forward[u + 1] = proof->forward[u] + forward;
        proof->both[u + 1] = proof->both[u] + forward + back;
    }
}

/* The least seconds of a message after unit u from slot i to slot j, in any pipeline, between any replicas. */
static double least_message(const struct proof *proof, int32_t i, int32_t j, int32_t u)
{
    const struct problem *problem = proof->search.problem;
    double least = INFINITY;
    for (int32_t p = 0; p < proof->shape->num_pipelines; p++) {
        double bytes = INFINITY;
        for (int32_t kind = 0; kind < NUM_RECOMPUTES; kind++)
            for (int32_t r = 0; r < slot_at(proof, i)->num_replicas; r++)
                if (table_at(proof, i, p, r, kind))
                    bytes = min_of(bytes, table_at(proof, i, p, r, kind)->output[u]);
        for (int32_t r = 0; r < slot_at(proof, i)->num_replicas; r++)
            for (int32_t q = 0; q < slot_at(proof, j)->num_replicas; q++) {
                int32_t a = problem->pools[pool_at(proof, i, p, r)].first_place;
                int32_t b = problem->pools[pool_at(proof, j, p, q)].first_place;
                const struct route *there = &problem->routes[a * problem->num_places + b];
                const struct route *back = &problem->routes[b * problem->num_places + a];
                least = min_of(least, min_of(message_seconds(there, bytes, 1), message_seconds(back, bytes, 1)));
            }
    }
    return least;
}

static void find_messages(struct proof *proof)
{
    int32_t slots = proof->shape->num_slots;
    proof->message = INFINITY;
    for (int32_t i = 0; i < slots; i++)
        for (int32_t j = 0; j < slots; j++)
            for (int32_t u = 0; u < proof->units - 1 && i != j; u++) {
                double own = least_message(proof, i, j, u);
                proof->messages[(i * slots + j) * proof->units + u] = own;
                proof->message = min_of(proof->message, own);
            }
}

/* Stages `first` to the last one on their slots, and any others on those that are free before them. */
static void write_draft(struct proof *proof, int32_t first)
{
    const struct proof_shape *shape = proof->shape;
    struct draft *draft = &proof->draft;
    int32_t rest = proof->units - 2, next = 0;
    for (int32_t s = proof->num_stages - 1; s >= first; s--)
        rest -= proof->layers[s];
    for (int32_t s = 0; s < first; s++, next++) {
        while (proof->used[next])
            next++;
        proof->slot_of[s] = next;
        proof->layers[s] = s ? 0 : rest;
        proof->ways[s] = 0;
    }
    draft->schedule = shape->schedule;
    draft->is_sharded = shape->is_sharded;
    draft->num_pipelines = shape->num_pipelines;
    draft->num_stages = shape->num_pipelines * proof->num_stages;
    for (int32_t p = 0; p < shape->num_pipelines; p++) {
        draft->pipelines[p] =
            (struct draft_pipeline){shape->size, shape->num_micro_batches, p * proof->num_stages, proof->num_stages};
        for (int32_t s = 0; s < proof->num_stages; s++) {
            const struct proof_slot *slot = slot_at(proof, proof->slot_of[s]);
            struct draft_stage *stage = &draft->stages[p * proof->num_stages + s];
            *stage = (struct draft_stage){.layers = (int16_t)proof->layers[s], .width = (int16_t)slot->width,
                                          .num_replicas = (int16_t)slot->num_replicas, .resident = 1, .share = 1.0,
                                          .may_offload = (int16_t)proof->ways[s]};
            for (int32_t r = 0; r < slot->num_replicas; r++)
                stage->pools[r] = slot->pools[p * slot->num_replicas + r];
        }
    }
}

static int32_t in_flight_of(const struct proof *proof, int32_t s, int32_t depth)
{
    const struct proof_slot *slot = slot_at(proof, proof->slot_of[s]);
    int32_t own = (depth + slot->num_replicas - 1) / slot->num_replicas, all = rounds_of(proof, slot);
    if (proof->shape->schedule == ONE_F_ONE_B)
        return own < all ? own : all;
    return proof->shape->schedule == GPIPE ? all : proof->in_flight[s];
}

/* Find what stage s takes in every pipeline, the stages after it being known. */
static void fill_entry(struct proof *proof, int32_t s, int32_t depth, struct entry *entry)
{
    struct evaluator *evaluator = proof->search.evaluator;
    struct draft *draft = &proof->draft;
    int32_t held = in_flight_of(proof, s, depth), moved = 0;
    *entry = (struct entry){2, INFINITY, INFINITY, 0.0, 0.0};
    write_draft(proof, s);
    if (find_holders(evaluator, draft))
        return;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        struct stage_price *price = &evaluator->prices[p * proof->num_stages + s];
        price->in_flight = held;
        if (fit_stage(&proof->search, draft, p, s) || price_stage(evaluator, draft, p, s) ||
            price->memory > price->capacity || price->host_bytes > price->host_capacity)
            return;
        moved |= draft->stages[p * proof->num_stages + s].offload > 0.0;
        entry->forward = min_of(entry->forward, price->forward);
        entry->backward = min_of(entry->backward, price->backward);
        entry->weight = max_of(entry->weight, price->weight);
        entry->update = max_of(entry->update, price->update);
    }
    /* What moves nothing to hosts is the other way. */
    entry->state = proof->ways[s] && !moved ? 2 : 1;
}

static const struct entry *find_entry(struct proof *proof, int32_t s, int32_t first, int32_t end, int32_t depth)
{
    size_t units = (size_t)proof->units + 1;
    size_t i = (((size_t)proof->slot_of[s] * units + first) * units + end) * (proof->most_depth + 1) + depth;
    struct entry *entry = &proof->entries[i * NUM_WAYS + proof->ways[s]];
    if (!entry->state)
        fill_entry(proof, s, depth, entry);
    return entry;
}

/* The stages from s on, of those after it and its own; `rest` and `depth` are its own already. */
static struct tail put_before(const struct proof *proof, int32_t s, int32_t end, const struct entry *entry,
                              const struct tail *after)
{
    const struct proof_slot *slot = slot_at(proof, proof->slot_of[s]);
    double f = entry->forward, b = entry->backward, own = proof->is_split ? b - entry->weight : b, message = 0.0;
    int32_t rounds = rounds_of(proof, slot), held = in_flight_of(proof, s, after->depth);
    if (s < proof->num_stages - 1) {
        int32_t edge = proof->slot_of[s] * proof->shape->num_slots + proof->slot_of[s + 1];
        message = proof->messages[edge * proof->units + end - 1];
    }
    double down = after->chain + 2.0 * message, work = rounds * (f + own);
    if (!proof->is_split) {
        double begin = max_of(0.0, down - (held - 1) * f), last = max_of(0.0, down - (held - 1) * b);
        work += rounds > held ? begin + last : max_of(begin, last);
    }
    struct tail tail = {.chain = down + f + own, .update = max_of(after->update, entry->update),
                        .rest = after->rest, .depth = after->depth};
    tail.round = max_of(max_of(work, tail.chain), after->round > 0.0 ? after->round + 2.0 * message + f + own : 0.0);
    tail.forward = max_of(rounds * (f + b), after->forward > 0.0 ? after->forward + message + f : 0.0);
    return tail;
}

/* Seconds that no plan takes less than whose last stages these are, the first of them from unit `first` on. */
static double bound_of(const struct proof *proof, const struct tail *tail, int32_t s, int32_t first)
{
    double there = proof->forward[first] + s * proof->message;
    double both = proof->both[first] + 2.0 * s * proof->message;
    return max_of(tail->round + (s ? both : 0.0), tail->forward + (s ? there : 0.0)) + tail->update;
}

/* Whether the fastest free slots have time for so many layers in `count` stages. */
static int have_time(const struct proof *proof, int32_t count, int32_t layers, double update)
{
    int32_t *caps = proof->caps, num_free = 0, sum = 0;
    for (int32_t i = 0; i < proof->shape->num_slots; i++) {
        if (proof->used[i])
            continue;
        double most = (proof->state->best - update) * (1.0 + 1e-9) / max_of(proof->layer_seconds[i], 1e-300);
        int32_t cap = most < layers ? (int32_t)max_of(most, 0.0) : layers, j = num_free++;
        for (; j > 0 && caps[j - 1] < cap; j--)
            caps[j] = caps[j - 1];
        caps[j] = cap;
    }
    for (int32_t i = 0; i < count && i < num_free; i++)
        sum += caps[i];
    return num_free >= count && sum >= layers;
}

/* Whether a plan with the same step was tried before, with an earlier slot or block of slots in this one's place. */
static int is_repeated(const struct proof *proof, int32_t i)
{
    const struct proof_slot *slot = slot_at(proof, i);
    int touched = 0;
    for (int32_t j = 0; j < proof->shape->num_slots; j++)
        touched |= proof->used[j] && slot_at(proof, j)->block == slot->block;
    for (int32_t j = 0; j < i; j++) {
        const struct proof_slot *other = slot_at(proof, j);
        if (!proof->used[j] && other->alike == slot->alike)
            return 1;
        if (touched || other->block == slot->block || other->block_kind != slot->block_kind)
            continue;
        int free = 1;
        for (int32_t k = 0; k < proof->shape->num_slots; k++)
            free &= !(proof->used[k] && slot_at(proof, k)->block == other->block);
        if (free)
            return 1;
    }
    return 0;
}

static void price_leaf(struct proof *proof)
{
    write_draft(proof, 0);
    copy_draft(&proof->priced, &proof->draft);
    double step = step_of(&proof->search, &proof->priced, proof->state->best);
    proof->state->num_priced++;
    if (step < proof->state->best && step < MISFIT) {
        proof->state->best = step;
        copy_draft(&proof->state->draft, &proof->priced);
    }
}

static void place_stage(struct proof *proof, int32_t s, int32_t end, const struct tail *after);

/* Try stage s with the units from `first` to `end`; 0 if it takes too long or does not fit, however many more. */
static int try_units(struct proof *proof, int32_t s, int32_t first, int32_t end, const struct tail *after)
{
    int goes_on = 0;
    proof->layers[s] = (end < proof->units - 1 ? end : proof->units - 1) - (first > 1 ? first : 1);
    for (int32_t way = 0; way <= (proof->search.space->may_offload != 0); way++) {
        if (proof->state->spent++ >= proof->state->budget)
            return 0;
        proof->ways[s] = way;
        const struct entry *entry = find_entry(proof, s, first, end, after->depth);
        if (entry->state == 2)
            continue;
        struct tail tail = put_before(proof, s, end, entry, after);
        if (bound_of(proof, &tail, s, first) >= proof->state->best)
            continue;
        goes_on = 1;
        if (s == 0)
            price_leaf(proof);
        else if (have_time(proof, s, first - 1, tail.update))
            place_stage(proof, s - 1, first, &tail);
    }
    return goes_on;
}

/* Try all cards and layers of stage s, whose last unit is before `end`. */
static void place_stage(struct proof *proof, int32_t s, int32_t end, const struct tail *after)
{
    const struct proof_shape *shape = proof->shape;
    int32_t is_last = s == proof->num_stages - 1;
    int32_t least = s ? s + (shape->needs_first ? 1 : 0) : 0;
    int32_t most = is_last && shape->needs_last ? end - 2 : end - 1;
    for (int32_t i = 0; i < shape->num_slots && proof->state->spent < proof->state->budget; i++) {
        int is_late = proof->search.space->is_ordered && !is_last && i > proof->slot_of[s + 1];
        if (proof->used[i] || is_late || (!proof->search.space->is_ordered && is_repeated(proof, i)))
            continue;
        struct tail tail = *after;
        int32_t n = slot_at(proof, i)->num_replicas, whole = (after->depth + n - 1) / n * n;
        tail.rest += n;
        tail.depth = whole > tail.rest ? whole : tail.rest;
        proof->used[i] = 1;
        proof->slot_of[s] = i;
        for (int32_t first = s ? most : 0; first >= least && try_units(proof, s, first, end, &tail);)
            first--;
        proof->used[i] = 0;
    }
}

/* What is in flight under a schedule that has no formula; 1 without one. */
static int find_held(struct proof *proof)
{
    struct evaluator *evaluator = proof->search.evaluator;
    if (!proof->is_split)
        return 0;
    memset(proof->used, 0, (size_t)proof->shape->num_slots);
    write_draft(proof, proof->num_stages);
    if (find_holders(evaluator, &proof->draft))
        return 1;
    if (find_in_flight(evaluator, &proof->draft, &proof->draft.pipelines[0]))
        return 1;
    for (int32_t s = 0; s < proof->num_stages; s++)
        proof->in_flight[s] = evaluator->prices[s].in_flight;
    return 0;
}

static int is_uniform(const struct proof_shape *shape)
{
    for (int32_t i = 1; i < shape->num_slots; i++)
        if (shape->slots[i].num_replicas != shape->slots[0].num_replicas)
            return 0;
    return 1;
}

static void run_proof(struct proof *proof)
{
    const struct proof_shape *shape = proof->shape;
    struct tail nothing = {0};
    int32_t most = shape->num_slots < proof->units ? shape->num_slots : proof->units;
    find_least(proof);
    find_messages(proof);
    for (int32_t n = proof->search.space->uses_all ? shape->num_slots : 1; n <= most; n++) {
        proof->num_stages = n;
        memset(proof->entries, 0, sizeof(struct entry) * proof->num_entries);
        if (find_held(proof)) {
            proof->state->budget = proof->state->spent;
            return;
        }
        place_stage(proof, n - 1, proof->units, &nothing);
    }
}

int prove_shape(struct evaluator *evaluator, const struct space *space, const struct proof_shape *shape,
                struct proof_state *state)
{
    const struct problem *problem = evaluator->problem;
    enum { MOST_ENTRIES = 4000000 };
    struct proof proof = {.shape = shape, .state = state, .units = problem->num_units};
    struct arena *arena = &proof.search.arena;
    size_t slots = (size_t)shape->num_slots, units = (size_t)problem->num_units + 1;
    proof.search.evaluator = evaluator;
    proof.search.problem = problem;
    proof.search.space = space;
    proof.is_split = shape->schedule == ZERO_BUBBLE;
    for (int32_t i = 0; i < shape->num_slots; i++)
        proof.most_depth += 2 * shape->slots[i].num_replicas;
    proof.num_entries = units * units * slots * (size_t)(proof.most_depth + 1) * NUM_WAYS;
    /* Then what a stage holds depends on the replicas of others. */
    int depends = !is_uniform(shape) && (proof.is_split || (problem->is_tied && shape->is_sharded));
    if (depends || proof.num_entries > MOST_ENTRIES || shape->schedule == INTERLEAVED) {
        state->spent = state->budget;
        return 0;
    }
    if (setjmp(arena->failed)) {
        release(arena);
        return -1;
    }
    proof.entries = TAKE(arena, proof.num_entries, struct entry);
    proof.forward = TAKE(arena, units, double);
    proof.both = TAKE(arena, units, double);
    proof.messages = TAKE(arena, slots * slots * units, double);
    proof.layer_seconds = TAKE(arena, slots, double);
    proof.in_flight = TAKE(arena, slots + 1, int32_t);
    proof.caps = TAKE(arena, slots, int32_t);
    proof.used = TAKE(arena, slots + 1, uint8_t);
    proof.slot_of = TAKE(arena, slots + 1, int32_t);
    proof.layers = TAKE(arena, slots + 1, int32_t);
    proof.ways = TAKE(arena, slots + 1, int32_t);
    proof.draft = take_draft(problem, arena);
    proof.priced = take_draft(problem, arena);
    proof.search.unfolded = take_draft(problem, arena);
    run_proof(&proof);
    release(arena);
    return 0;
}
