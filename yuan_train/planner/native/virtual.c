/* Drafts whose workers have several virtual stages. A search holds them folded, a stage for each worker, so that all
 * moves do; they are priced and returned unfolded: the workers in rounds, each round with a part of their layers. */
#include <math.h>

#include "search.h"

/* Virtual stages of a worker of a pipeline: there is nothing to hide in a pipeline of one. */
static int32_t num_rounds(const struct draft *draft, const struct draft_pipeline *pipeline)
{
    return pipeline->num_stages > 1 ? draft->rounds : 1;
}

/* Of the layers of a worker, those of one round: as many in each, the first ones one more where they do not come out
 * even, and `tilt` from the last round to the first. */
static int32_t layers_of_round(const struct draft_stage *stage, int32_t rounds, int32_t round)
{
    int32_t layers = stage->layers / rounds + (round < stage->layers % rounds);
    if (rounds > 1)
        layers += (round == 0) * stage->tilt - (round == rounds - 1) * stage->tilt;
    return layers;
}

int unfold_draft(const struct draft *draft, struct draft *unfolded)
{
    int32_t count = 0, is_virtual = 0;
    struct draft_stage *stages = unfolded->stages;
    struct draft_pipeline *pipelines = unfolded->pipelines;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        int32_t rounds = num_rounds(draft, pipeline), last = pipeline->num_stages - 1;
        is_virtual |= rounds > 1;
        pipelines[p] = *pipeline;
        pipelines[p].first_stage = count;
        pipelines[p].num_stages *= rounds;
        for (int32_t round = 0; round < rounds; round++)
            for (int32_t s = 0; s <= last; s++) {
                struct draft_stage *stage = &stages[count++];
                int has_end = (!round && !s) || (round == rounds - 1 && s == last);
                *stage = draft->stages[pipeline->first_stage + s];
                stage->layers = (int16_t)layers_of_round(&draft->stages[pipeline->first_stage + s], rounds, round);
                stage->worker = (int16_t)(round ? 1 + s : 0);
                stage->away = 0;
                if (stage->layers < !has_end && rounds > 1)
                    return 1;
            }
    }
    *unfolded = *draft;
    unfolded->stages = stages;
    unfolded->pipelines = pipelines;
    unfolded->num_stages = count;
    return !is_virtual;
}

/* The workers of a pipeline and their rounds; 0 where it does not go in rounds. */
static int32_t count_rounds(const struct draft *draft, const struct draft_pipeline *pipeline)
{
    const struct draft_stage *stages = draft->stages + pipeline->first_stage;
    int32_t workers = 0;
    while (workers < pipeline->num_stages && !stages[workers].worker)
        workers++;
    for (int32_t s = workers; s < pipeline->num_stages; s++)
        if (stages[s].worker != 1 + s % workers)
            return 0;
    return pipeline->num_stages % workers ? 0 : pipeline->num_stages / workers;
}

int fold_draft(const struct draft *draft, struct draft *folded)
{
    int32_t count = 0, rounds = 1;
    struct draft own = *draft;
    own.pipelines = folded->pipelines;
    own.stages = folded->stages;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        const struct draft_stage *from = draft->stages + pipeline->first_stage;
        int32_t here = count_rounds(draft, pipeline);
        if (!here || here > MAX_ROUNDS || (rounds > 1 && here != rounds && pipeline->num_stages > 1))
            return 1;
        rounds = here > rounds ? here : rounds;
        own.pipelines[p] = *pipeline;
        own.pipelines[p].first_stage = count;
        own.pipelines[p].num_stages /= here;
        for (int32_t s = 0; s < own.pipelines[p].num_stages; s++) {
            struct draft_stage *stage = &own.stages[count++];
            *stage = from[s];
            for (int32_t s_of_round = s + own.pipelines[p].num_stages; s_of_round < pipeline->num_stages;
                 s_of_round += own.pipelines[p].num_stages)
                stage->layers = (int16_t)(stage->layers + from[s_of_round].layers);
            stage->tilt = 0;
            stage->tilt = (int16_t)(from[s].layers - layers_of_round(stage, here, 0));
        }
    }
    own.num_stages = count;
    own.rounds = rounds;
    *folded = own;
    return 0;
}

int32_t expected_depth(const struct draft *draft, const struct draft_pipeline *pipeline, int32_t s, int32_t rest,
                       int32_t all)
{
    int32_t rounds = num_rounds(draft, pipeline), n = draft->stages[pipeline->first_stage + s].num_replicas;
    int32_t deeper = draft->stages[pipeline->first_stage + s].deeper;
    switch (draft->schedule) {
    case ONE_F_ONE_B:
        return rest + deeper > n ? rest + deeper : n;
    case GPIPE:
        return pipeline->num_micro_batches;
    case INTERLEAVED:
        /* Parts of layers that the warm-up begins, in whole stages. */
        return (2 * (rest - n) + (rounds - 1) * all + 1 + rounds - 1) / rounds;
    default:
        return all;
    }
}

/* --- what a worker takes ---------------------------------------------------------------------------------- */

/* A worker with several stages, of a draft that is realised. */
struct worker {
    struct draft *draft;
    int32_t p, leader;
    const struct schedule *schedule;
    double memory, capacity, seconds;
};

static int is_own(const struct search *search, const struct worker *worker, int32_t s)
{
    const int32_t *first = search->evaluator->first_replica + worker->draft->pipelines[worker->p].first_stage;
    return first[s] == first[worker->leader];
}

/* The price of a worker that recomputes so many of its layers, the first ones, in a way; 1 if it cannot be. */
static int price_worker(struct search *search, struct worker *worker, int32_t kind, int32_t count, double offload)
{
    const struct draft_pipeline *pipeline = &worker->draft->pipelines[worker->p];
    const struct stage_price *prices = search->evaluator->prices + pipeline->first_stage;
    worker->seconds = 0.0;
    for (int32_t s = worker->leader; s < pipeline->num_stages; s++) {
        struct draft_stage *stage = &worker->draft->stages[pipeline->first_stage + s];
        if (!is_own(search, worker, s))
            continue;
        stage->num_recomputed = (int16_t)(count < stage->layers ? count : stage->layers);
        stage->recompute = (int16_t)(stage->num_recomputed ? kind : 0);
        stage->offload = offload;
        count -= stage->num_recomputed;
        if (price_stage(search->evaluator, worker->draft, worker->p, s))
            return 1;
        worker->seconds += prices[s].forward + prices[s].backward;
    }
    worker->memory = memory_of_worker(search->evaluator, pipeline, worker->schedule, worker->leader);
    worker->capacity = prices[worker->leader].capacity;
    return 0;
}

/* The fewest layers that are recomputed in a way so that the worker fits, of all its `layers` of which it is known. */
static int32_t least_recomputed(struct search *search, struct worker *worker, int32_t kind, int32_t layers,
                                double offload)
{
    int32_t low = 1, high = layers;
    while (low < high && (search->space->recomputes & 1)) {
        int32_t middle = (low + high) / 2;
        price_worker(search, worker, kind, middle, offload);
        if (worker->memory <= worker->capacity)
            high = middle;
        else
            low = middle + 1;
    }
    return high;
}

/* The fastest way in which a worker fits, if it does in any: state on its hosts first, as stages have it. */
static int fit_worker(struct search *search, struct worker *worker)
{
    const struct draft_pipeline *pipeline = &worker->draft->pipelines[worker->p];
    int32_t layers = 0, best = 0, count = 0;
    double fastest = INFINITY, offload = 0.0;
    for (int32_t s = worker->leader; s < pipeline->num_stages; s++)
        layers += is_own(search, worker, s) ? worker->draft->stages[pipeline->first_stage + s].layers : 0;
    if (price_worker(search, worker, 0, 0, 0.0))
        return 1;
    double over = worker->memory - worker->capacity, all = worker->memory;
    const struct draft_stage *leader = &worker->draft->stages[pipeline->first_stage + worker->leader];
    if (over > 0.0 && leader->may_offload && search->space->may_offload) {
        price_worker(search, worker, 0, 0, 1.0);
        all -= worker->memory;
        offload = all <= 0.0 ? 0.0 : over < all ? min_of(1.0, ceil(1000.0 * over / all) / 1000.0) : 1.0;
        price_worker(search, worker, 0, 0, offload);
    }
    if (worker->memory <= worker->capacity && (search->space->recomputes & 1))
        return 0;
    for (int32_t kind = 1; kind < NUM_RECOMPUTES && layers; kind++) {
        if (!(search->space->recomputes >> kind & 1) || price_worker(search, worker, kind, layers, offload) ||
            worker->memory > worker->capacity)
            continue;
        int32_t own = least_recomputed(search, worker, kind, layers, offload);
        if (price_worker(search, worker, kind, own, offload) || worker->seconds >= fastest)
            continue;
        fastest = worker->seconds;
        best = kind;
        count = own;
    }
    return price_worker(search, worker, best, count, offload);
}

int fit_workers(struct search *search, struct draft *draft, int32_t p)
{
    struct worker worker = {.draft = draft, .p = p};
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    worker.schedule = find_schedule(search->evaluator, draft, pipeline, 0);
    for (; worker.schedule && worker.leader < pipeline->num_stages; worker.leader++)
        if (!draft->stages[pipeline->first_stage + worker.leader].worker && fit_worker(search, &worker))
            return 1;
    return worker.schedule == NULL;
}

/* --- moves ------------------------------------------------------------------------------------------------ */

/* Move layers of a worker, or of all from or up to it, between its first round and its last. */
int tilt(struct search *search, struct draft *draft, int32_t p, int32_t count)
{
    int32_t s = draw(search, draft->pipelines[p].num_stages), how = draw(search, 3), by = draw(search, 2) ? 1 : -1;
    for (int32_t i = 0; i < count; i++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[search->members[i]];
        int32_t first = how == 1 ? 0 : s, last = how == 2 ? pipeline->num_stages - 1 : s;
        for (int32_t t = first; t <= last; t++) {
            struct draft_stage *stage = &draft->stages[pipeline->first_stage + t];
            stage->tilt = (int16_t)(stage->tilt + by);
        }
    }
    return 1;
}

int change_rounds(struct search *search, struct draft *draft)
{
    int32_t before = draft->rounds;
    draft->rounds = 2 + draw(search, MAX_ROUNDS - 1);
    for (int32_t s = 0; s < draft->num_stages; s++)
        draft->stages[s].tilt = 0;
    return draft->rounds != before;
}

int draw_schedule(struct search *search, struct draft *draft, uint32_t others)
{
    int32_t found = -1, count = 0;
    for (int32_t name = 0; name <= ZERO_BUBBLE; name++)
        if ((others >> name & 1) && (++count == 1 || draw(search, count) == 0))
            found = name;
    if (found < 0)
        return 0;
    draft->schedule = found;
    if (found == INTERLEAVED)
        change_rounds(search, draft);
    return 1;
}
