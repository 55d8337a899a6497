/* Seconds and bytes of the stages of a draft, as `evaluate/stage_cost.py` has them. */
#include <math.h>

#include "evaluator.h"

enum { MESSAGES_PER_EDGE = 2 };

static int32_t place_of_width(int32_t width)
{
    int32_t place = 0;
    while (1 << place < width)
        place++;
    return place;
}

const struct unit_table *table_of(const struct problem *problem, int32_t place, int32_t width, int32_t size,
                                  int32_t recompute)
{
    int32_t exponent = place_of_width(width);
    if (exponent >= NUM_WIDTHS || 1 << exponent != width)
        return NULL;
    int32_t index = ((place * NUM_WIDTHS + exponent) * NUM_SIZES + size) * NUM_RECOMPUTES + recompute;
    int32_t table = problem->table_of[index];
    return table < 0 ? NULL : &problem->tables[table];
}

int32_t common_multiple(int32_t a, int32_t b)
{
    int32_t x = a, y = b;
    while (y) {
        int32_t rest = x % y;
        x = y;
        y = rest;
    }
    return a / x * b;
}

/* The next cards of its pool for each replica of a stage; 1 if there are none. */
static int take_cards(struct evaluator *evaluator, const struct draft_stage *stage, int32_t first)
{
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        int32_t number = stage->pools[r], taken = evaluator->taken[number];
        const struct pool *pool = &evaluator->problem->pools[number];
        evaluator->pool_of[first + r] = number;
        evaluator->place_of[first + r] = pool->first_place + taken * pool->place_step;
        evaluator->width_of[first + r] = stage->width;
        evaluator->taken[number] += stage->width;
        if (evaluator->taken[number] > pool->count)
            return 1;
    }
    return 0;
}

int has_both_ends(const struct evaluator *evaluator, const struct draft_pipeline *pipeline)
{
    const int32_t *first = evaluator->first_replica + pipeline->first_stage;
    return first[0] == first[pipeline->num_stages - 1];
}

/* The share of its gradients that a stage has in common with other owners. */
static double reduced_share(const struct evaluator *evaluator, const struct draft *draft,
                            const struct stage_price *price)
{
    const struct problem *problem = evaluator->problem;
    int32_t last = problem->num_units - 1, ends = 0;
    for (int32_t p = 0; problem->is_tied && p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        const struct draft_stage *stage = &draft->stages[pipeline->first_stage];
        ends += stage->num_replicas;
        if (!has_both_ends(evaluator, pipeline))
            ends += stage[pipeline->num_stages - 1].num_replicas;
    }
    double all = 0.0, several = 0.0;
    for (int32_t u = price->first_unit; u < price->end_unit; u++) {
        all += problem->held[u];
        if (evaluator->holders[u] > 1 || (ends * problem->num_islands > 1 && (u == 0 || u == last)))
            several += problem->held[u];
    }
    return several / (all > 1.0 ? all : 1.0);
}

static void find_shares(const struct evaluator *evaluator, const struct draft *draft,
                        const struct draft_stage *stage, struct stage_price *price)
{
    int needs_copy = 0;
    double most = 0.0;
    for (int32_t u = price->first_unit; u < price->end_unit; u++) {
        double share = stage->share / evaluator->weights[u];
        most = share > most ? share : most;
        needs_copy |= evaluator->slices[u] > stage->width;
    }
    if (!draft->is_sharded || price->first_unit >= price->end_unit)
        most = 1.0;
    price->optimizer_share = most;
    price->packed_share = draft->is_sharded && needs_copy ? most : 0.0;
    price->copied_share = 0.0;
    if (evaluator->problem->reduce_copy_share)
        price->copied_share = evaluator->problem->reduce_copy_share * reduced_share(evaluator, draft, price);
    price->packed_share += price->copied_share;
}

/* Who holds each unit, and the shares of it; 1 if the stages of a pipeline do not make up the model. */
int find_holders(struct evaluator *evaluator, const struct draft *draft)
{
    int32_t units = evaluator->problem->num_units, replicas = 0;
    memset(evaluator->taken, 0, sizeof(int32_t) * (size_t)evaluator->problem->num_pools);
    for (int32_t u = 0; u < units; u++) {
        evaluator->holders[u] = 0;
        evaluator->weights[u] = 0.0;
        evaluator->slices[u] = 1;
    }
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        int32_t next = 1;
        for (int32_t s = 0; s < pipeline->num_stages; s++) {
            const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
            struct stage_price *price = &evaluator->prices[pipeline->first_stage + s];
            price->first_unit = s ? next : 0;
            evaluator->first_replica[pipeline->first_stage + s] =
                stage->worker ? evaluator->first_replica[pipeline->first_stage + stage->worker - 1] : replicas;
            if (!stage->worker && take_cards(evaluator, stage, replicas))
                return 1;
            replicas += stage->worker ? 0 : stage->num_replicas;
            next += stage->layers;
            price->end_unit = s == pipeline->num_stages - 1 ? units : next;
            if (stage->layers < 0 || next >= units)
                return 1;
            for (int32_t u = price->first_unit; u < price->end_unit; u++) {
                evaluator->stage_of[(size_t)p * units + u] = pipeline->first_stage + s;
                evaluator->holders[u] += stage->num_replicas;
                evaluator->weights[u] += stage->num_replicas * stage->share;
                if (evaluator->slices[u] != stage->width)
                    evaluator->slices[u] = common_multiple(evaluator->slices[u], stage->width);
            }
        }
        if (next != units - 1)
            return 1;
    }
    for (int32_t u = 0; u < units; u++) {
        evaluator->holders[u] *= evaluator->problem->num_islands;
        evaluator->weights[u] *= evaluator->problem->num_islands;
    }
    evaluator->num_replicas = replicas;
    for (int32_t s = 0; s < draft->num_stages; s++)
        find_shares(evaluator, draft, &draft->stages[s], &evaluator->prices[s]);
    return 0;
}

/* The units of a stage in two parts: up to `kept` of `part`, the others of `plain`. */
struct stage_units {
    const struct unit_table *part, *plain;
    int32_t first, kept, end;
};

static int find_units(const struct problem *problem, int32_t size, const struct draft_stage *stage,
                      const struct stage_price *price, int32_t place, struct stage_units *units)
{
    units->part = units->plain = table_of(problem, place, stage->width, size, stage->recompute);
    if (stage->num_recomputed && stage->num_recomputed < stage->layers)
        units->plain = table_of(problem, place, stage->width, size, 0);
    if (!units->part || !units->plain)
        return 1;
    /* Layers are recomputed from the first one on; the embedding counts before them. */
    int32_t first_layer = price->first_unit ? price->first_unit : 1;
    units->first = price->first_unit;
    units->end = price->end_unit;
    units->kept = units->part == units->plain ? price->end_unit : first_layer + stage->num_recomputed;
    return 0;
}

static double sum_of(const double *part, const double *plain, const struct stage_units *units)
{
    return part[units->kept] - part[units->first] + (plain[units->end] - plain[units->kept]);
}

#define SUM(name, units) sum_of((units)->part->name, (units)->plain->name, units)

/* What a head with the embedding's matrix counts for both. */
static double stored(double sum, const double *sums, int is_twice)
{
    return is_twice ? sum - (sums[1] - sums[0]) : sum;
}

static double most_transient(const struct stage_units *units, int32_t first, int32_t end)
{
    double most = 0.0;
    for (int32_t u = first; u < end; u++) {
        double own = (u < units->kept ? units->part : units->plain)->transient[u];
        most = own > most ? own : most;
    }
    return most;
}

/* What a critic's states take more than they would as the policy's: its embedding is its own, and what a reduction packs
 * of it is not there while the policy's is. */
static double critic_bytes(const struct draft_stage *stage, const struct stage_units *units, int is_twice,
                           const struct stage_price *price)
{
    const struct unit_table *table = units->part;
    if (!table->critic_gradients)
        return 0.0;
    double gradients = stored(SUM(critic_gradients, units), table->critic_gradients, is_twice);
    double more = -price->copied_share * gradients;
    if (is_twice)
        more += table->critic_parameters[1] +
                (1.0 + price->packed_share - price->copied_share) * table->critic_gradients[1] +
                price->optimizer_share * (1.0 - stage->offload) * table->critic_optimizer[1];
    return more;
}

/* Bytes on the tightest card of a stage. */
static void price_memory(const struct problem *problem, const struct draft_stage *stage,
                         const struct stage_units *units, int is_twice, struct stage_price *price)
{
    int has_head = price->end_unit == problem->num_units, has_embedding = price->first_unit == 0;
    const struct pool *tightest = NULL;
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        const struct pool *pool = &problem->pools[stage->pools[r]];
        if (!tightest || pool->limit - pool->reserved < tightest->limit - tightest->reserved)
            tightest = pool;
    }
    double parameters = stored(SUM(parameter_bytes, units), units->part->parameter_bytes, is_twice);
    double gradients = stored(SUM(gradient_bytes, units), units->part->gradient_bytes, is_twice);
    double optimizer = stored(SUM(optimizer_bytes, units), units->part->optimizer_bytes, is_twice);
    int32_t edges = !has_embedding + !has_head;
    double logits = has_head ? most_transient(units, units->end - 1, units->end) : 0.0;
    double buffers = most_transient(units, units->first, units->end - has_head) +
                     units->part->boundary_bytes *
                         ((has_head ? 0 : price->in_flight) + edges * MESSAGES_PER_EDGE);
    price->activations = price->in_flight * SUM(activation_bytes, units);
    price->reserved = tightest->reserved;
    price->memory = parameters + (1.0 + price->packed_share) * gradients +
                    price->optimizer_share * (1.0 - stage->offload) * optimizer +
                    price->activations + logits + buffers + price->reserved +
                    critic_bytes(stage, units, is_twice, price);
    price->capacity = tightest->limit;
}

/* The optimizer step of a stage: beside what its hosts step, on its slowest replica. */
static void price_update(const struct problem *problem, int32_t size,
                         const struct draft_stage *stage, const struct stage_units *units, int is_twice,
                         struct stage_price *price)
{
    double parameters = stored(SUM(parameters, units), units->part->parameters, is_twice);
    double owned = parameters * price->optimizer_share, slowest = 0.0, host = 0.0, x = stage->offload;
    price->host_bytes = price->disk_seconds = price->disk_slots = 0.0;
    price->host_capacity = price->disk_bytes = INFINITY;
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        int32_t number = stage->pools[r];
        const struct pool *pool = &problem->pools[number];
        double own = table_of(problem, pool->first_place, stage->width, size, 0)->update_seconds;
        slowest = own > slowest ? own : slowest;
        host = pool->host_seconds > host ? pool->host_seconds : host;
        if (x > 0.0 && pool->host_bytes < price->host_capacity)
            price->host_capacity = pool->host_bytes;
        if (x > 0.0)
            price->host_bytes = owned * x * pool->host_bytes_each;
        price->disk_bytes = min_of(price->disk_bytes, pool->disk_bytes);
        price->disk_seconds = max_of(price->disk_seconds, pool->disk_seconds);
        price->disk_slots = pool->disk_slots;
    }
    price->disk_bytes = min_of(price->disk_bytes, price->host_bytes);
    price->update = owned * (x > 0.0 ? max_of((1.0 - x) * slowest, x * host) : slowest);
}

/* Seconds of the parts of a stage as shares of a step, and the bytes that those that leave keep: into the evaluator's
 * parts, from place `first` on. */
static void find_parts(struct evaluator *evaluator, const struct draft_stage *stage,
                       const struct stage_units *units, int32_t first)
{
    int32_t last = evaluator->problem->num_units - 1, first_layer = units->first ? units->first : 1, next = first;
    double *forward = evaluator->part_forward, *backward = evaluator->part_backward, sums[2] = {0.0, 0.0};
    for (int32_t u = units->first; u < units->end; u++) {
        const struct unit_table *table = u < units->kept ? units->part : units->plain;
        int starts = u == units->end - 1, is_layer = u > 0 && u < last;
        double seconds[2] = {table->forward[u + 1] - table->forward[u], table->backward[u + 1] - table->backward[u]};
        seconds[0] += starts ? units->part->start_forward : 0.0;
        seconds[1] += starts ? units->part->start_backward : 0.0;
        sums[0] += seconds[0];
        sums[1] += seconds[1];
        if (u == last) {
            forward[next - 1] += seconds[0];
            backward[next - 1] += seconds[1];
        }
        for (int32_t half = 0; is_layer && half < 2; half++, next++) {
            double share = table->half_seconds[half];
            forward[next] = seconds[0] * share;
            backward[next] = seconds[1] * share;
            if (u < first_layer + stage->away)
                evaluator->part_bytes[next] = (table->activation_bytes[u + 1] - table->activation_bytes[u]) *
                                              table->half_activations[half];
        }
    }
    if (units->first == 0) {
        forward[first] += units->part->forward[1] - units->part->forward[0];
        backward[first] += units->part->backward[1] - units->part->backward[0];
    } else {
        /* What the stage received stays: its gradient is sent back. */
        evaluator->part_bytes[first] = max_of(0.0, evaluator->part_bytes[first] - units->part->boundary_bytes);
    }
    for (int32_t i = first; i < next; i++) {
        forward[i] /= sums[0];
        backward[i] /= sums[1];
    }
}

/* Where a stage has its parts. */
static int32_t first_part(const struct stage_price *price)
{
    return 2 * (price->first_unit ? price->first_unit : 1);
}

static int take_steps(struct evaluator *evaluator, int32_t count)
{
    if ((size_t)count <= evaluator->room_for_steps)
        return 0;
    struct step *steps = realloc(evaluator->steps, sizeof *steps * (size_t)count);
    if (!steps)
        return -1;
    evaluator->steps = steps;
    evaluator->room_for_steps = (size_t)count;
    return 0;
}

/* The steps of replica r of a stage, by the numbers of its own micro-batches: how many, or -1 without memory or
 * schedule. Under 1F1B they are those of a pipeline of that replica alone, as deep as it is. */
static int32_t list_steps(struct evaluator *evaluator, const struct draft *draft, int32_t p, int32_t s, int32_t r)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    int32_t n = draft->stages[pipeline->first_stage + s].num_replicas, all = pipeline->num_micro_batches, count = 0;
    if (take_steps(evaluator, 3 * all))
        return -1;
    find_depths(evaluator, draft, pipeline);
    if (draft->schedule == ONE_F_ONE_B) {
        int32_t depth = evaluator->depths[s], first[2] = {0, 1}, worker = 0;
        depth = depth > r ? (depth - r + n - 1) / n : 0;
        struct layout layout = {1, 1, all > r ? (all - r + n - 1) / n : 0, ONE_F_ONE_B, first, &worker, &depth};
        struct arena arena = {.blocks = NULL};
        if (setjmp(arena.failed)) {
            release(&arena);
            return -1;
        }
        const struct program *program = compute_programs(&layout, &arena);
        memcpy(evaluator->steps, program->steps, sizeof(struct step) * (size_t)program->count);
        int32_t made = program->count;
        release(&arena);
        return made;
    }
    const struct schedule *schedule = find_schedule(evaluator, draft, pipeline, 1);
    int32_t worker = evaluator->first_replica[pipeline->first_stage + s] + r -
                     evaluator->first_replica[pipeline->first_stage];
    for (int32_t i = 0; schedule && i < schedule->num_operations; i++) {
        const struct operation *operation = &schedule->operations[i];
        if (operation->peer < 0 && operation->worker == worker)
            evaluator->steps[count++] = (struct step){operation->kind, 0, operation->micro_batch / n};
    }
    return schedule ? count : -1;
}

/* The copies of replica r of a stage; NULL if it has none: no schedule, too few parts that may stay, no memory. */
static struct placement *place_replica(struct evaluator *evaluator, const struct draft *draft, int32_t p,
                                             int32_t s, int32_t r)
{
    const struct draft_stage *stage = &draft->stages[draft->pipelines[p].first_stage + s];
    struct sending what = {2 * stage->layers, 2 * stage->away, stage->resident, stage->ahead};
    int32_t count = list_steps(evaluator, draft, p, s, r);
    struct placement *placement =
        count < 0 ? NULL : find_placement(evaluator->placed, &what, evaluator->steps, count);
    return placement && placement->fits ? placement : NULL;
}

/* What leaves a stage: its cards hold less, its hosts more. */
static int price_away(struct evaluator *evaluator, const struct draft *draft, int32_t p, int32_t s,
                      const struct stage_units *units)
{
    int32_t number = draft->pipelines[p].first_stage + s;
    const struct draft_stage *stage = &draft->stages[number];
    struct stage_price *price = &evaluator->prices[number];
    const double *bytes = evaluator->part_bytes + first_part(price);
    struct kept_bytes most = {0.0, 0.0};
    double all = 0.0, kept = price->in_flight * SUM(activation_bytes, units);
    find_parts(evaluator, stage, units, first_part(price));
    for (int32_t i = 0; i < 2 * stage->away; i++)
        all += bytes[i];
    evaluator->placed->kept = INT64_MAX;
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        struct placement *placement = place_replica(evaluator, draft, p, s, r);
        if (!placement)
            return 1;
        struct kept_bytes own = find_kept(placement, bytes);
        evaluator->placed->num_positions += placement->num_positions;
        most.card = max_of(most.card, own.card);
        most.host = max_of(most.host, own.host);
        price->host_capacity =
            min_of(price->host_capacity, evaluator->problem->pools[stage->pools[r]].host_bytes);
    }
    price->memory -= min_of(kept, price->in_flight * all - most.card);
    price->host_bytes += most.host;
    return 0;
}

int sends_away(const struct draft *draft, const struct draft_pipeline *pipeline)
{
    for (int32_t s = pipeline->first_stage; s < pipeline->first_stage + pipeline->num_stages; s++)
        if (draft->stages[s].away)
            return 1;
    return 0;
}

/* Room for the copies of a pipeline's clocks; 0, or -1 without memory. */
static int take_copy_ends(struct evaluator *evaluator, int32_t num_workers)
{
    size_t all = 0, next = 0;
    for (int32_t worker = 0; worker < num_workers; worker++)
        if (evaluator->clocks[worker].placement)
            all += 2 * num_leaving(evaluator->clocks[worker].placement);
    if (all > evaluator->room_for_copies) {
        double *ends = realloc(evaluator->copy_ends, sizeof *ends * all);
        if (!ends)
            return -1;
        evaluator->copy_ends = ends;
        evaluator->room_for_copies = all;
    }
    for (int32_t worker = 0; worker < num_workers; worker++) {
        struct copy_clock *clock = &evaluator->clocks[worker];
        if (!clock->placement)
            continue;
        size_t count = num_leaving(clock->placement);
        clock->down = evaluator->copy_ends + next;
        clock->up = clock->down + count;
        memset(clock->down, 0, 2 * count * sizeof(double));
        next += 2 * count;
        evaluator->placed->num_positions += clock->placement->num_positions;
    }
    return 0;
}

int set_clocks(struct evaluator *evaluator, const struct draft *draft, int32_t p)
{
    const struct problem *problem = evaluator->problem;
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    struct copy_clock *clock = evaluator->clocks;
    evaluator->placed->kept = evaluator->placed->used + 1;
    for (int32_t s = 0; s < pipeline->num_stages; s++) {
        const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
        const struct stage_price *price = &evaluator->prices[pipeline->first_stage + s];
        int32_t first = first_part(price);
        struct stage_units units;
        if (stage->away && find_units(problem, pipeline->size, stage, price, price->place, &units))
            return 1;
        if (stage->away)
            find_parts(evaluator, stage, &units, first);
        for (int32_t r = 0; r < stage->num_replicas; r++, clock++) {
            *clock = (struct copy_clock){.placement = NULL};
            if (!stage->away)
                continue;
            *clock = (struct copy_clock){
                .placement = place_replica(evaluator, draft, p, s, r),
                .forward = evaluator->part_forward + first, .backward = evaluator->part_backward + first,
                .bytes = evaluator->part_bytes + first, .rate = problem->pools[price->slowest].host_link};
            if (!clock->placement)
                return 1;
        }
    }
    return take_copy_ends(evaluator, (int32_t)(clock - evaluator->clocks));
}

int price_stage(struct evaluator *evaluator, const struct draft *draft, int32_t p, int32_t s)
{
    const struct problem *problem = evaluator->problem;
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
    struct stage_price *price = &evaluator->prices[pipeline->first_stage + s];
    struct stage_units units = {0}, own;
    double most = -1.0;
    if (stage->away > stage->layers)
        return 1;
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        int32_t place = evaluator->place_of[evaluator->first_replica[pipeline->first_stage + s] + r];
        if (find_units(problem, pipeline->size, stage, price, place, &own))
            return 1;
        double forward = own.part->start_forward + SUM(forward, &own);
        double backward = own.part->start_backward + SUM(backward, &own);
        if (forward + backward <= most)
            continue;
        most = forward + backward;
        units = own;
        price->slowest = stage->pools[r];
        price->place = place;
        price->forward = forward;
        price->backward = backward;
        price->weight = SUM(weight, &own);
    }
    int is_twice = problem->is_tied && s == 0 && has_both_ends(evaluator, pipeline);
    price_memory(problem, stage, &units, is_twice, price);
    price_update(problem, pipeline->size, stage, &units, is_twice, price);
    return stage->away ? price_away(evaluator, draft, p, s, &units) : 0;
}

int find_in_flight(struct evaluator *evaluator, const struct draft *draft, const struct draft_pipeline *pipeline)
{
    int has_formula = draft->schedule == ONE_F_ONE_B || draft->schedule == GPIPE;
    const struct schedule *schedule = has_formula ? NULL : find_schedule(evaluator, draft, pipeline, 0);
    if (!has_formula && !schedule)
        return 1;
    find_depths(evaluator, draft, pipeline);
    for (int32_t s = 0; s < pipeline->num_stages; s++) {
        int32_t n = draft->stages[pipeline->first_stage + s].num_replicas;
        int32_t own = (evaluator->depths[s] + n - 1) / n, all = (pipeline->num_micro_batches + n - 1) / n;
        if (draft->schedule == GPIPE || own > all)
            own = all;
        evaluator->prices[pipeline->first_stage + s].in_flight = has_formula ? own : schedule->held[s];
    }
    return 0;
}

int price_stages(struct evaluator *evaluator, const struct draft *draft)
{
    if (find_holders(evaluator, draft))
        return 1;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        int failed = find_in_flight(evaluator, draft, pipeline);
        for (int32_t s = 0; s < pipeline->num_stages && !failed; s++)
            failed = price_stage(evaluator, draft, p, s);
        if (failed)
            return failed;
    }
    return 0;
}

/* --- workers with several stages -------------------------------------------------------------------------- */

int has_virtual_stages(const struct draft *draft, const struct draft_pipeline *pipeline)
{
    int has = 0;
    for (int32_t s = 0; s < pipeline->num_stages; s++)
        has |= draft->stages[pipeline->first_stage + s].worker > 0;
    return has;
}

/* The activations of all stages of a worker at the time when there are most. */
static double activations_of_worker(const struct evaluator *evaluator, const struct draft_pipeline *pipeline,
                                    const struct schedule *schedule, int32_t leader)
{
    const struct stage_price *prices = evaluator->prices + pipeline->first_stage;
    const int32_t *first = evaluator->first_replica + pipeline->first_stage, *peak;
    int32_t worker = first[leader] - first[0], stages = pipeline->num_stages, begin = 0, end;
    double most = 0.0, each[stages];
    /* Peaks stand worker by worker. */
    while (begin < schedule->num_peaks && schedule->peak_workers[begin] != worker)
        begin++;
    for (end = begin; end < schedule->num_peaks && schedule->peak_workers[end] == worker;)
        end++;
    for (int32_t s = 0; s < stages; s++) {
        int32_t held = 1;
        for (int32_t i = begin; i < end; i++) {
            peak = schedule->peaks + (size_t)i * stages;
            held = peak[s] > held ? peak[s] : held;
        }
        each[s] = prices[s].activations / held;
    }
    for (int32_t i = begin; i < end; i++) {
        double sum = 0.0;
        peak = schedule->peaks + (size_t)i * stages;
        for (int32_t s = 0; s < stages; s++)
            sum += peak[s] * each[s];
        most = max_of(most, sum);
    }
    return most;
}

double memory_of_worker(const struct evaluator *evaluator, const struct draft_pipeline *pipeline,
                        const struct schedule *schedule, int32_t leader)
{
    const struct stage_price *prices = evaluator->prices + pipeline->first_stage;
    const int32_t *first = evaluator->first_replica + pipeline->first_stage;
    double memory = prices[leader].reserved + activations_of_worker(evaluator, pipeline, schedule, leader);
    for (int32_t s = leader; s < pipeline->num_stages; s++)
        if (first[s] == first[leader])
            memory += prices[s].memory - prices[s].activations - prices[s].reserved;
    return memory;
}

static void sum_over_worker(struct evaluator *evaluator, const struct draft_pipeline *pipeline,
                            const struct schedule *schedule, int32_t leader)
{
    struct stage_price *prices = evaluator->prices + pipeline->first_stage;
    const int32_t *first = evaluator->first_replica + pipeline->first_stage;
    double memory = memory_of_worker(evaluator, pipeline, schedule, leader), update = 0.0, host = 0.0, disk = 0.0;
    for (int32_t s = leader; s < pipeline->num_stages; s++)
        if (first[s] == first[leader]) {
            update += prices[s].update;
            host += prices[s].host_bytes;
            disk += prices[s].disk_bytes;
        }
    for (int32_t s = leader; s < pipeline->num_stages; s++)
        if (first[s] == first[leader]) {
            prices[s].memory = memory;
            prices[s].update = update;
            prices[s].host_bytes = host;
            prices[s].disk_bytes = disk;
        }
}

int sum_over_workers(struct evaluator *evaluator, const struct draft *draft)
{
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        if (!has_virtual_stages(draft, pipeline))
            continue;
        const struct schedule *schedule = find_schedule(evaluator, draft, pipeline, 0);
        if (!schedule)
            return 1;
        for (int32_t s = 0; s < pipeline->num_stages; s++)
            if (!draft->stages[pipeline->first_stage + s].worker)
                sum_over_worker(evaluator, pipeline, schedule, s);
    }
    return 0;
}
