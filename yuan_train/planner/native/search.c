/* A search for the fastest draft: random starts, the best of them annealed, and the best of these once more.
 *
 * It counts the drafts that it prices, draws its own random numbers, and calls no function of the mathematical library
 * that rounds differently elsewhere: equal arguments give equal drafts on all machines, unless the time is over before. */
#define _POSIX_C_SOURCE 199309L /* for clock_gettime */
#include "search.h"

#include <math.h>
#include <time.h>

int32_t draw(struct search *search, int32_t n)
{
    /* xorshift64*; Vigna 2016. */
    search->random ^= search->random >> 12;
    search->random ^= search->random << 25;
    search->random ^= search->random >> 27;
    uint32_t high = (uint32_t)((search->random * 2685821657736338717ull) >> 32);
    return n < 2 ? 0 : (int32_t)(((uint64_t)high * (uint64_t)n) >> 32);
}

double draw_share(struct search *search)
{
    return (draw(search, INT32_MAX) + 0.5) / INT32_MAX;
}

/* The natural logarithm of a number between 0 and 1, by additions and products alone. */
static double logarithm(double x)
{
    static const double LN2 = 0.69314718055994530942;
    int exponent = 0;
    while (x < 0.5) {
        x *= 2.0;
        exponent--;
    }
    double z = (x - 1.0) / (x + 1.0), square = z * z, sum = 0.0;
    for (int32_t n = 19; n >= 1; n -= 2)
        sum = sum * square + 1.0 / n;
    return 2.0 * z * sum + exponent * LN2;
}

struct draft take_draft(const struct problem *problem, struct arena *arena)
{
    struct draft draft = {0};
    draft.pipelines = TAKE(arena, problem->num_cards + 1, struct draft_pipeline);
    draft.stages = TAKE(arena, most_stages(problem) + 1, struct draft_stage);
    return draft;
}

void copy_draft(struct draft *to, const struct draft *from)
{
    struct draft own = *from;
    own.pipelines = to->pipelines;
    own.stages = to->stages;
    *to = own;
    memcpy(to->pipelines, from->pipelines, sizeof(struct draft_pipeline) * (size_t)from->num_pipelines);
    memcpy(to->stages, from->stages, sizeof(struct draft_stage) * (size_t)from->num_stages);
}

int is_allowed(const struct search *search, const struct draft *draft)
{
    const struct space *space = search->space;
    int32_t sequences = 0, cards = 0;
    if (!(space->pipelines >> (draft->num_pipelines < 63 ? draft->num_pipelines : 63) & 1))
        return 0;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        sequences += pipeline->num_micro_batches * search->problem->sizes[pipeline->size];
        for (int32_t s = 0; s < pipeline->num_stages; s++) {
            const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
            /* Of more replicas than micro-batches some would idle. */
            if (stage->num_replicas > pipeline->num_micro_batches || !(space->replicas >> stage->num_replicas & 1))
                return 0;
            cards += stage->num_replicas * stage->width;
        }
    }
    return sequences == search->problem->global_batch_size && keeps_form(search, draft) &&
           (!space->uses_all || cards == search->problem->num_cards);
}

/* Whether two replicas with the same units have cards of unlike types, or unlike parts of the state on their hosts. */
static int has_unlike_owners(const struct search *search, const struct draft *draft)
{
    const struct evaluator *evaluator = search->evaluator;
    const struct pool *pools = search->problem->pools;
    int32_t units = search->problem->num_units;
    for (int32_t u = 0; u < units; u++) {
        const struct draft_stage *first = &draft->stages[evaluator->stage_of[u]];
        int32_t tied = u == 0 && search->space->like_owners > 1;
        for (int32_t p = 0; p < draft->num_pipelines * (1 + tied); p++) {
            size_t own = (size_t)(p % draft->num_pipelines) * units + (p < draft->num_pipelines ? u : units - 1);
            const struct draft_stage *stage = &draft->stages[evaluator->stage_of[own]];
            if (stage->offload != first->offload)
                return 1;
            for (int32_t r = 0; r < stage->num_replicas; r++)
                if (pools[stage->pools[r]].type != pools[first->pools[0]].type)
                    return 1;
        }
    }
    return 0;
}

/* The draft as it is priced: its virtual stages unfolded, all realised; NULL if it cannot be. */
static struct draft *realised(struct search *search, struct draft *draft)
{
    if (draft->schedule == INTERLEAVED && unfold_draft(draft, &search->unfolded))
        return NULL;
    struct draft *whole = draft->schedule == INTERLEAVED ? &search->unfolded : draft;
    return realise_draft(search, whole) ? NULL : whole;
}

/* Whether a stage of a draft, which is realised, passes on alone what it gets: other stages warm up as deep without. */
static int has_idle_stage(const struct search *search, const struct draft *draft)
{
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        for (int32_t s = pipeline->first_stage; s < pipeline->first_stage + pipeline->num_stages; s++) {
            const struct stage_price *price = &search->evaluator->prices[s];
            const struct unit_table *table =
                table_of(search->problem, price->place, draft->stages[s].width, pipeline->size, 0);
            int32_t first = price->first_unit, end = price->end_unit;
            if (table->forward[end] - table->forward[first] + table->backward[end] - table->backward[first] <= 0.0)
                return 1;
        }
    }
    return 0;
}

/* Seconds of a clock that nobody sets. */
static double seconds_now(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Parts of a price: what a draft takes whose step is longer than wanted for certain, and what its simulation takes. */
enum { REALISED = 1, PLAYED = 3, PARTS_PLAYED = 256 };

double step_of(struct search *search, struct draft *draft, double limit)
{
    static const int64_t ALL = (int64_t)1 << 60;
    struct price price;
    if (!is_allowed(search, draft))
        return IMPOSSIBLE;
    if (search->found && search->found->count && search->spent < ALL && seconds_now() > search->end)
        search->spent = ALL;
    int64_t played = search->evaluator->num_played, parts = search->evaluator->placed->num_positions;
    search->spent += REALISED;
    struct draft *whole = draft->schedule == INTERLEAVED ? &search->unfolded : draft;
    if (draft->schedule == INTERLEAVED && unfold_draft(draft, whole))
        return IMPOSSIBLE;
    if (limit < INFINITY && least_step(search->evaluator, whole) > limit)
        return IMPOSSIBLE;
    if (realise_draft(search, whole))
        return IMPOSSIBLE;
    if (has_idle_stage(search, whole))
        return IMPOSSIBLE;
    if (!draft->is_sharded && search->space->like_owners && has_unlike_owners(search, whole))
        return IMPOSSIBLE;
    int failed = price_realised(search->evaluator, whole, limit, &price);
    search->spent +=
        PLAYED * (draft->schedule == INTERLEAVED ? draft->rounds : 1) * (search->evaluator->num_played - played) +
        (search->evaluator->placed->num_positions - parts) / PARTS_PLAYED;
    if (failed)
        return IMPOSSIBLE;
    return price.over > 0.0 ? MISFIT * (1.0 + price.over * 1e-12) + price.step : price.step;
}

/* Keep a draft among others, if it is fast enough and not known. */
static void add_draft(struct found *found, const struct draft *draft, double step)
{
    int32_t slowest = 0;
    for (int32_t i = 0; i < found->count; i++) {
        if (fabs(found->steps[i] - step) < 1e-7 * step)
            return;
        if (found->steps[i] > found->steps[slowest])
            slowest = i;
    }
    if (found->count < found->room)
        slowest = found->count++;
    else if (step >= found->steps[slowest])
        return;
    found->steps[slowest] = step;
    copy_draft(&found->drafts[slowest], draft);
}

/* The first `count` in the order of their steps. */
static void sort_drafts(struct found *found, int32_t count)
{
    for (int32_t i = 0; i < count; i++)
        for (int32_t j = i + 1; j < count; j++)
            if (found->steps[j] < found->steps[i]) {
                struct draft draft = found->drafts[i];
                double step = found->steps[i];
                found->drafts[i] = found->drafts[j];
                found->steps[i] = found->steps[j];
                found->drafts[j] = draft;
                found->steps[j] = step;
            }
}

/* Keep a draft that fits among those found. */
static void keep(struct search *search, struct draft *draft, double step)
{
    const struct draft *whole = draft->schedule == INTERLEAVED ? realised(search, draft) : draft;
    if (whole && step < MISFIT)
        add_draft(search->found, whole, step);
}

/* Take small moves that do not make a draft slower; its step. */
static double descend(struct search *search, struct draft *draft, double step, int32_t tries)
{
    struct draft *other = &search->other;
    for (int32_t i = 0; i < tries; i++) {
        copy_draft(other, draft);
        int moved = move_little(search, other);
        if (moved && draw(search, 4) == 0)
            moved = move_little(search, other);
        if (!moved)
            continue;
        double found = step_of(search, other, step);
        if (found <= step) {
            step = found;
            copy_draft(draft, other);
        }
    }
    return step;
}

/* A draft near another one, its small moves taken; its step, or a longer one than `limit`, which is drawn: how long it
 * may be. Small moves, which gain less, are taken at half of the temperature. */
static double neighbour(struct search *search, struct draft *draft, double step, double temperature, int32_t tries,
                        double *limit)
{
    int is_little = draw(search, 100) < 60;
    double heat = is_little ? temperature / 2.0 : temperature;
    *limit = step < MISFIT ? step - heat * step * logarithm(draw_share(search)) : step;
    if (is_little) {
        int moved = move_little(search, draft);
        for (int32_t more = draw(search, 3); moved && more; more--)
            moved = move_little(search, draft);
        if (!moved)
            return IMPOSSIBLE;
        return step_of(search, draft, *limit);
    }
    int moved = move_much(search, draft);
    if (moved && draw(search, 3) == 0)
        moved = move_much(search, draft);
    if (!moved)
        return IMPOSSIBLE;
    double most = step < MISFIT ? 1.25 * step : INFINITY, found = step_of(search, draft, most);
    if (found < IMPOSSIBLE && found > step && found < most)
        found = descend(search, draft, found, tries);
    return found;
}

/* The temperatures, as parts of the step, between which a search anneals, and its small moves after a large one. */
static const struct heat {
    double hottest, coldest;
    int32_t tries;
} HEATS[] = {[HOT] = {0.02, 2e-4, 12}, [WARM] = {0.01, 2e-5, 20}, [COLD] = {1e-4, 1e-7, 20}};

/* Anneal a draft: longer steps are taken with a probability that falls with the temperature, a part of the step. */
static double anneal(struct search *search, struct draft *draft, double step, int64_t budget, enum part part)
{
    enum { EPOCHS = 64 };
    const struct heat *heat = &HEATS[part];
    double fastest = step, temperature = heat->hottest, factor = heat->coldest / heat->hottest;
    int64_t begun = search->spent, epoch = 0;
    struct draft *candidate = &search->candidate, *best = &search->best;
    for (int32_t i = EPOCHS; i > 1; i /= 2)
        factor = sqrt(factor);
    copy_draft(best, draft);
    for (int64_t idle = 0; search->spent - begun < budget && idle < 50 * budget + 1000; idle++) {
        for (; epoch < (search->spent - begun) * EPOCHS / budget; epoch++)
            temperature *= factor;
        copy_draft(candidate, draft);
        double limit, found = neighbour(search, candidate, step, temperature, heat->tries, &limit);
        if (found > limit)
            continue;
        step = found;
        copy_draft(draft, candidate);
        if (step < fastest * (1.0 - 1e-9)) {
            fastest = step;
            copy_draft(best, draft);
            keep(search, draft, step);
        }
    }
    copy_draft(draft, best);
    return fastest;
}

/* Drafts that a search begins with, anneals, and anneals once more. */
enum { NUM_STARTS = 24, NUM_ANNEALED = 12, NUM_FINALISTS = 3 };

/* Whether a start is so much slower than those known that it is not worth a descent. */
static int is_hopeless(const struct found *starts, double step)
{
    double slowest = 0.0;
    for (int32_t i = 0; i < starts->count; i++)
        slowest = max_of(slowest, starts->steps[i]);
    return starts->count == NUM_STARTS && (step > 1.6 * slowest || (step >= MISFIT && slowest < MISFIT));
}

/* A draft, and what small moves make of it. */
static void take_start(struct search *search, struct found *starts, struct draft *draft, int32_t tries)
{
    double step = step_of(search, draft, INFINITY);
    if (step >= IMPOSSIBLE)
        return;
    keep(search, draft, step);
    step = descend(search, draft, step, tries);
    keep(search, draft, step);
    add_draft(starts, draft, step);
}

/* The drafts that were given; where their schedule is not searched, with virtual stages. */
static void take_given(struct search *search, struct found *starts, const struct wish *wish)
{
    struct draft *draft = &search->candidate;
    for (int32_t i = 0; i < wish->num_given; i++) {
        if (fold_draft(&wish->given[i], draft))
            continue;
        if (search->space->schedules >> draft->schedule & 1) {
            take_start(search, starts, draft, 60);
            continue;
        }
        for (int32_t rounds = 2; (search->space->schedules >> INTERLEAVED & 1) && rounds <= MAX_ROUNDS; rounds++) {
            fold_draft(&wish->given[i], draft);
            draft->schedule = INTERLEAVED;
            draft->rounds = rounds;
            take_start(search, starts, draft, 60);
        }
    }
}

/* A start, and what few small moves make of it, unless it is hopeless. */
static void try_start(struct search *search, struct found *starts, struct draft *draft)
{
    double step = step_of(search, draft, INFINITY);
    if (step >= IMPOSSIBLE || is_hopeless(starts, step))
        return;
    step = descend(search, draft, step, 30);
    keep(search, draft, step);
    add_draft(starts, draft, step);
}

/* Random starts; or the given ones, to which layers are dealt first. */
static void find_starts(struct search *search, struct found *starts, const struct wish *wish)
{
    struct draft *draft = &search->candidate;
    int64_t budget = wish->budget / 5;
    for (int32_t i = 0; wish->part == DEALS && i < wish->num_given; i++) {
        copy_draft(draft, &wish->given[i]);
        for (int32_t p = 0; p < draft->num_pipelines; p++)
            deal_layers(search, draft, p);
        try_start(search, starts, draft);
    }
    for (int64_t tries = 0; wish->part == WHOLE && search->spent < budget && tries < 4 * budget + 1000; tries++)
        if (draw_start(search, draft))
            try_start(search, starts, draft);
}

static void run_search(struct search *search, struct found *starts, const struct wish *wish)
{
    if (wish->part == WHOLE)
        take_given(search, starts, wish);
    find_starts(search, starts, wish);
    int64_t left = wish->budget - search->spent;
    sort_drafts(starts, starts->count);
    int32_t count = starts->count < NUM_ANNEALED ? starts->count : NUM_ANNEALED;
    for (int32_t i = 0; i < count; i++)
        starts->steps[i] = anneal(search, &starts->drafts[i], starts->steps[i], left * 3 / 8 / count, HOT);
    sort_drafts(starts, count);
    int32_t finalists = count < NUM_FINALISTS ? count : NUM_FINALISTS;
    for (int32_t i = 0; i < finalists; i++)
        starts->steps[i] = anneal(search, &starts->drafts[i], starts->steps[i], left / 2 / finalists, WARM);
    sort_drafts(starts, finalists);
    if (finalists)
        anneal(search, &starts->drafts[0], starts->steps[0], left / 8, COLD);
}

/* Take moves of whole types, one or two at a time, that make a draft faster, until so much is spent; its step. */
static double descend_by_types(struct search *search, struct draft *draft, double step, int64_t until)
{
    struct draft *other = &search->other;
    for (int32_t i = 0; search->spent < until && i < 1000; i++) {
        copy_draft(other, draft);
        int moved = move_type(search, other);
        if (moved && draw(search, 2))
            moved = move_type(search, other);
        double found = moved ? step_of(search, other, INFINITY) : IMPOSSIBLE;
        if (found < step) {
            step = found;
            copy_draft(draft, other);
        }
    }
    return step;
}

/* What the memory of all cards suffices for: copies of parameters and gradients, one at least, and all state once.
 * On few cards, where searches are long, drafts are drawn by it only if it does not suffice for that. */
static void measure_memory(struct search *search)
{
    const struct problem *problem = search->problem;
    const struct unit_table *own = NULL;
    int32_t units = problem->num_units;
    double room = 0.0, copy = 0.0, optimizer = 0.0;
    for (int32_t i = 0; i < problem->num_pools; i++)
        room += problem->pools[i].count * (problem->pools[i].limit - problem->pools[i].reserved);
    for (int32_t width = 1; !own && width < 1 << NUM_WIDTHS; width *= 2)
        if ((own = table_of(problem, problem->pools[0].first_place, width, 0, 0)) != NULL) {
            copy = width * (own->parameter_bytes[units] + own->gradient_bytes[units]);
            optimizer = width * own->optimizer_bytes[units] / problem->num_islands;
        }
    search->fills_cards = copy + optimizer > room;
    if (search->fills_cards || is_large(problem))
        search->most_copies = room < copy * problem->num_cards ? (int32_t)max_of(room / copy, 1.0) : problem->num_cards;
}

/* On many cards random drafts differ more than descents gain: many are priced, and few annealed. */
static void run_large_search(struct search *search, struct found *starts, const struct wish *wish)
{
    enum { ANNEALED = 5, BY_TYPES = 8 };
    int64_t budget = wish->budget;
    struct draft *draft = &search->candidate;
    if (wish->part == DEALS)
        find_starts(search, starts, wish);
    else
        take_given(search, starts, wish);
    int64_t most_tries = wish->part == DEALS ? 0 : 4 * budget + 1000;
    for (int64_t tries = 0; search->spent < budget / 5 && tries < most_tries; tries++) {
        if (!draw_start(search, draft))
            continue;
        double step = step_of(search, draft, INFINITY);
        if (step < IMPOSSIBLE)
            add_draft(starts, draft, step);
    }
    sort_drafts(starts, starts->count);
    int64_t begun = search->spent;
    for (int32_t i = 0; i < starts->count && i < BY_TYPES; i++)
        starts->steps[i] = descend_by_types(search, &starts->drafts[i], starts->steps[i],
                                            begun + budget * (i + 1) / (4 * BY_TYPES));
    for (int32_t i = 0; i < starts->count; i++) {
        starts->steps[i] = descend(search, &starts->drafts[i], starts->steps[i], 20);
        keep(search, &starts->drafts[i], starts->steps[i]);
    }
    sort_drafts(starts, starts->count);
    int32_t count = starts->count < ANNEALED ? starts->count : ANNEALED;
    for (int32_t i = 0; i < count; i++)
        starts->steps[i] = anneal(search, &starts->drafts[i], starts->steps[i], budget / 4 / count, HOT);
    sort_drafts(starts, count);
    if (count)
        anneal(search, &starts->drafts[0], starts->steps[0], budget * 3 / 10, WARM);
}

/* Anneal the drafts that are given. */
static void run_part(struct search *search, struct draft *draft, const struct wish *wish)
{
    for (int32_t i = 0; i < wish->num_given; i++) {
        if (fold_draft(&wish->given[i], draft))
            continue;
        double step = step_of(search, draft, INFINITY);
        keep(search, draft, step);
        if (step < IMPOSSIBLE)
            anneal(search, draft, step, (wish->budget - search->spent) / (wish->num_given - i), wish->part);
    }
}

int search_drafts(struct evaluator *evaluator, const struct space *space, const struct wish *wish,
                  struct found *found)
{
    const struct problem *problem = evaluator->problem;
    struct search search = {.evaluator = evaluator, .problem = problem, .space = space,
                            .random = wish->seed * 2654435761u + 88172645463325252ull, .found = found,
                            .end = seconds_now() + wish->seconds};
    struct arena *arena = &search.arena;
    if (setjmp(arena->failed)) {
        release(arena);
        return -1;
    }
    size_t cards = (size_t)problem->num_cards + 1;
    search.free = TAKE(arena, problem->num_pools, int32_t);
    search.members = TAKE(arena, cards, int32_t);
    search.touched = TAKE(arena, cards, int32_t);
    search.groups = TAKE(arena, cards, int32_t);
    search.group_widths = TAKE(arena, cards, int32_t);
    search.speeds = TAKE(arena, cards, double);
    search.dealt = take_bytes(arena, size_of_dealt() * cards);
    search.fits = take_bytes(arena, size_of_fits());
    search.candidate = take_draft(problem, arena);
    search.other = take_draft(problem, arena);
    search.best = take_draft(problem, arena);
    search.unfolded = take_draft(problem, arena);
    struct found starts = {.room = NUM_STARTS, .steps = TAKE(arena, NUM_STARTS, double),
                           .drafts = TAKE(arena, NUM_STARTS, struct draft)};
    for (int32_t i = 0; i < NUM_STARTS; i++)
        starts.drafts[i] = take_draft(problem, arena);
    found->count = 0;
    int64_t played = evaluator->num_played;
    evaluator->is_searching = 1;
    measure_memory(&search);
    if (wish->part > DEALS)
        run_part(&search, &starts.drafts[0], wish);
    else if (is_large(problem))
        run_large_search(&search, &starts, wish);
    else
        run_search(&search, &starts, wish);
    evaluator->is_searching = 0;
    sort_drafts(found, found->count);
    found->num_priced = evaluator->num_played - played;
    release(arena);
    return 0;
}
