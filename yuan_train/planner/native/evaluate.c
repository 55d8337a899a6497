/* The whole step of a draft: messages between stages, pipelines in virtual time, buckets of gradients and of weights.
 * As `evaluate/plan_cost.py`. */
#include "evaluate.h"

#include <math.h>

#include "evaluator.h"

/* --- messages between stages ------------------------------------------------------------------------------ */

static int32_t pool_of(const struct draft_stage *stage, int32_t i)
{
    return stage->pools[i % stage->num_replicas];
}

/* Which replica sends to which: as many pairs as it takes for all to have sent and received. */
static int32_t num_pairs(const struct draft_stage *a, const struct draft_stage *b)
{
    return common_multiple(a->num_replicas, b->num_replicas);
}

/* The messages over an edge of all pipelines, out of each node and into it. Equal pipelines run in step. */
static void count_flows(struct evaluator *evaluator, const struct draft *draft, int32_t s, int is_activation)
{
    const struct problem *problem = evaluator->problem;
    memset(evaluator->leaving, 0, sizeof(int32_t) * (size_t)problem->num_nodes);
    memset(evaluator->entering, 0, sizeof(int32_t) * (size_t)problem->num_nodes);
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        if (pipeline->num_stages <= s + 1)
            continue;
        const struct draft_stage *from = &draft->stages[pipeline->first_stage + s], *to = from + 1;
        int32_t pairs = num_pairs(from, to);
        for (int32_t i = 0; i < pairs; i++) {
            int32_t a = problem->pools[pool_of(is_activation ? from : to, i)].node;
            int32_t b = problem->pools[pool_of(is_activation ? to : from, i)].node;
            evaluator->leaving[a] += a != b;
            evaluator->entering[b] += a != b;
        }
    }
}

/* Seconds of a message from the first card of a group to the others. */
static double broadcast_seconds(const struct problem *problem, int32_t place, int32_t step, int32_t width, double bytes)
{
    double slowest = 0.0;
    for (int32_t i = 1; i < width; i++) {
        const struct route *route = &problem->routes[place * problem->num_places + place + i * step];
        slowest = max_of(slowest, message_seconds(route, bytes, 1));
        if (!step)
            break;
    }
    return slowest;
}

static double edge_seconds(const struct evaluator *evaluator, const struct draft *draft, int32_t p, int32_t s,
                           int is_activation)
{
    const struct problem *problem = evaluator->problem;
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
    const struct draft_stage *from = is_activation ? stage : stage + 1, *to = is_activation ? stage + 1 : stage;
    const int32_t *first = &evaluator->first_replica[pipeline->first_stage + s];
    const int32_t *sources = evaluator->place_of + first[!is_activation];
    const int32_t *targets = evaluator->place_of + first[is_activation];
    const struct stage_price *price = &evaluator->prices[pipeline->first_stage + s];
    double bytes = problem->hidden_bytes[pipeline->size], slowest = 0.0;
    if (first[0] == first[1])
        return 0.0; /* The same cards. */
    if (price->first_unit < price->end_unit) {
        /* The first replica's last unit, which is recomputed if all layers are. */
        int is_part = stage->num_recomputed == 0 || stage->num_recomputed == stage->layers;
        int32_t kind = is_part ? stage->recompute : 0;
        bytes = table_of(problem, evaluator->place_of[first[0]], stage->width, pipeline->size, kind)
                    ->output[price->end_unit - 1];
    }
    for (int32_t i = 0, pairs = num_pairs(from, to); i < pairs; i++) {
        int32_t a = sources[i % from->num_replicas], b = targets[i % to->num_replicas];
        int32_t x = problem->pools[pool_of(from, i)].node, y = problem->pools[pool_of(to, i)].node;
        int32_t sharers = evaluator->leaving[x] > evaluator->entering[y] ? evaluator->leaving[x]
                                                                         : evaluator->entering[y];
        double own = message_seconds(&problem->routes[a * problem->num_places + b], bytes, x == y ? 1 : sharers);
        own += broadcast_seconds(problem, b, problem->pools[pool_of(to, i)].place_step, to->width, bytes);
        slowest = own > slowest ? own : slowest;
    }
    return slowest;
}

static void price_messages(struct evaluator *evaluator, const struct draft *draft)
{
    int32_t longest = 0;
    for (int32_t p = 0; p < draft->num_pipelines; p++)
        if (draft->pipelines[p].num_stages > longest)
            longest = draft->pipelines[p].num_stages;
    for (int32_t s = 0; s + 1 < longest; s++)
        for (int is_activation = 0; is_activation < 2; is_activation++) {
            count_flows(evaluator, draft, s, is_activation);
            double *seconds = is_activation ? evaluator->send_activation : evaluator->send_gradient;
            for (int32_t p = 0; p < draft->num_pipelines; p++)
                if (draft->pipelines[p].num_stages > s + 1)
                    seconds[draft->pipelines[p].first_stage + s] =
                        edge_seconds(evaluator, draft, p, s, is_activation);
        }
}

/* --- pipelines in virtual time ---------------------------------------------------------------------------- */

static void number_workers(struct evaluator *evaluator, const struct draft *draft,
                           const struct draft_pipeline *pipeline)
{
    evaluator->first[0] = 0;
    for (int32_t s = 0; s < pipeline->num_stages; s++)
        evaluator->first[s + 1] = evaluator->first[s] + draft->stages[pipeline->first_stage + s].num_replicas;
}

static void forget(struct evaluator *evaluator, struct known *known)
{
    evaluator->num_operations -= known->schedule ? known->schedule->num_operations : 0;
    free_schedule(known->schedule);
    free(known->key);
    *known = (struct known){NULL, NULL};
}

const struct schedule *find_schedule(struct evaluator *evaluator, const struct draft *draft,
                                     const struct draft_pipeline *pipeline, int with_operations)
{
    enum { MOST_OPERATIONS = 4 << 20 }; /* those of large batches have many */
    int32_t stages = pipeline->num_stages, size = 3 + 2 * stages;
    const struct draft_stage *own = &draft->stages[pipeline->first_stage];
    int32_t key[3 + 2 * stages];
    uint32_t hash = 2166136261u;
    key[0] = draft->schedule;
    key[1] = pipeline->num_micro_batches;
    key[2] = stages;
    for (int32_t s = 0; s < stages; s++) {
        key[3 + 2 * s] = own[s].num_replicas;
        key[4 + 2 * s] = draft->schedule == ONE_F_ONE_B ? evaluator->depths[s] : own[s].worker;
    }
    for (int32_t i = 0; i < size; i++)
        hash = (hash ^ (uint32_t)key[i]) * 16777619u;
    struct known *known = &evaluator->known[hash % NUM_KNOWN];
    int is_same = known->schedule && known->key[2] == stages && !memcmp(known->key, key, sizeof key);
    if (is_same && (!with_operations || known->schedule->operations))
        return known->schedule;
    number_workers(evaluator, draft, pipeline);
    const int32_t *replicas = evaluator->first_replica + pipeline->first_stage;
    int32_t count = 0;
    for (int32_t s = 0; s < stages; s++)
        for (int32_t r = 0; r < own[s].num_replicas; r++) {
            int32_t worker = replicas[s] - replicas[0] + r;
            evaluator->workers[evaluator->first[s] + r] = worker;
            count = worker < count ? count : worker + 1;
        }
    struct layout layout = {
        stages, count, pipeline->num_micro_batches, draft->schedule,
        evaluator->first, evaluator->workers,
        draft->schedule == ONE_F_ONE_B ? evaluator->depths : NULL,
    };
    forget(evaluator, known);
    for (; evaluator->num_operations > MOST_OPERATIONS; evaluator->oldest++)
        forget(evaluator, &evaluator->known[evaluator->oldest % NUM_KNOWN]);
    known->schedule = make_schedule(&layout, !with_operations);
    known->key = malloc(sizeof key);
    if (!known->schedule || !known->key) {
        free_schedule(known->schedule);
        known->schedule = NULL;
        return NULL;
    }
    evaluator->num_operations += known->schedule->num_operations;
    memcpy(known->key, key, sizeof key);
    return known->schedule;
}

void find_depths(struct evaluator *evaluator, const struct draft *draft, const struct draft_pipeline *pipeline)
{
    int32_t rest = 0;
    for (int32_t s = pipeline->num_stages - 1; s >= 0; s--) {
        const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
        rest += stage->num_replicas;
        evaluator->depths[s] = stage->depth ? stage->depth : rest;
    }
}

/* Whether all messages leave when their steps have ended, so that the rounds alone are the schedule: found by trying,
 * see `simulator.PROMPT_DEPTHS`. */
static int is_prompt(const struct evaluator *evaluator, const struct draft *draft,
                     const struct draft_pipeline *pipeline)
{
    enum { PROMPT_DEPTHS = 4 };
    if (draft->schedule != ONE_F_ONE_B || sends_away(draft, pipeline) || evaluator->problem->sends != OVERLAPPED)
        return 0;
    for (int32_t s = 0; s < pipeline->num_stages; s++) {
        int32_t n = draft->stages[pipeline->first_stage + s].num_replicas;
        int32_t more = s + 1 < pipeline->num_stages ? evaluator->depths[s] - evaluator->depths[s + 1] : 0;
        if (more < 0 || more > PROMPT_DEPTHS + n - 1)
            return 0;
    }
    return 1;
}

/* Whether two stages with as many layers away copy the same at the same rate. */
static int copy_alike(const struct evaluator *evaluator, const struct draft *draft, int32_t a, int32_t b)
{
    const struct pool *pools = evaluator->problem->pools;
    const struct draft_stage *x = &draft->stages[a], *y = &draft->stages[b];
    const struct stage_price *own = &evaluator->prices[a], *other = &evaluator->prices[b];
    return x->resident == y->resident && x->ahead == y->ahead && x->layers == y->layers && x->width == y->width &&
           x->recompute == y->recompute && x->num_recomputed == y->num_recomputed &&
           own->first_unit == other->first_unit && pools[own->slowest].kind == pools[other->slowest].kind;
}

static int is_alike(const struct evaluator *evaluator, const struct draft *draft, int32_t p, int32_t q)
{
    const struct draft_pipeline *a = &draft->pipelines[p], *b = &draft->pipelines[q];
    size_t edges = sizeof(double) * (size_t)(a->num_stages - 1), stages = edges + sizeof(double);
    int32_t i = a->first_stage, j = b->first_stage;
    if (a->num_stages != b->num_stages || a->num_micro_batches != b->num_micro_batches ||
        memcmp(evaluator->forward + i, evaluator->forward + j, stages) ||
        memcmp(evaluator->backward + i, evaluator->backward + j, stages) ||
        memcmp(evaluator->weight + i, evaluator->weight + j, stages) ||
        memcmp(evaluator->send_activation + i, evaluator->send_activation + j, edges) ||
        memcmp(evaluator->send_gradient + i, evaluator->send_gradient + j, edges))
        return 0;
    for (int32_t s = 0; s < a->num_stages; s++) {
        const struct draft_stage *x = &draft->stages[i + s], *y = &draft->stages[j + s];
        if (x->num_replicas != y->num_replicas || x->depth != y->depth || x->worker != y->worker || x->away != y->away)
            return 0;
        if (x->away && !copy_alike(evaluator, draft, i + s, j + s))
            return 0;
    }
    return 1;
}

static int make_room(struct played *played, int32_t room)
{
    if (room <= played->room)
        return 0;
    struct message *messages = realloc(played->messages, sizeof(struct message) * (size_t)room);
    if (!messages)
        return -1;
    played->messages = messages;
    played->room = room;
    return 0;
}

/* Run pipeline p by its schedule, every message kept; 0, 1 if it has no schedule, -1 without memory. */
static int play_schedule(struct evaluator *evaluator, const struct draft *draft, int32_t p,
                         const struct times *times, struct figures *figures)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    struct played *played = &evaluator->played[p];
    const struct schedule *schedule = find_schedule(evaluator, draft, pipeline, 1);
    if (!schedule)
        return 1;
    if (make_room(played, schedule->num_messages + 2))
        return -1;
    figures->sent = played->messages;
    figures->room = played->room;
    return run_schedule(schedule, times, evaluator->problem->sends, figures);
}

/* Run pipeline p, if it can be without its schedule and if that keeps the messages that are wanted. */
static int play(struct evaluator *evaluator, const struct draft *draft, int32_t p, int all_messages)
{
    enum { ROUNDS_KEPT = 4 };
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    struct played *played = &evaluator->played[p];
    int32_t i = pipeline->first_stage, stages = pipeline->num_stages;
    struct times times = {evaluator->forward + i, evaluator->backward + i, evaluator->weight + i,
                          evaluator->send_activation + i, evaluator->send_gradient + i, NULL};
    struct figures figures = {evaluator->start + i, evaluator->end + i, evaluator->busy, evaluator->worker_end,
                              NULL, 0, 0, 0.0};
    int failed = 1;
    find_depths(evaluator, draft, pipeline);
    if (!all_messages && is_prompt(evaluator, draft, pipeline)) {
        number_workers(evaluator, draft, pipeline);
        int32_t count = pipeline->num_micro_batches, kept = ROUNDS_KEPT * evaluator->depths[0];
        if (make_room(played, 2 * (stages - 1) * (kept < count ? kept : count) + 2))
            return -1;
        figures.sent = played->messages;
        figures.room = played->room;
        if (evaluator->first[stages] == stages)
            failed = run_rounds(stages, count, evaluator->depths, &times, &figures);
        else
            failed = run_replicated_rounds(stages, count, evaluator->first, evaluator->depths, &times, &figures);
    }
    if (sends_away(draft, pipeline)) {
        if ((failed = set_clocks(evaluator, draft, p)))
            return failed;
        times.clocks = evaluator->clocks;
        failed = 1;
    }
    int is_prompt_alone = evaluator->is_searching && draft->schedule == ONE_F_ONE_B && !times.clocks;
    if (failed == 1 && !(is_prompt_alone && evaluator->problem->sends == OVERLAPPED))
        failed = play_schedule(evaluator, draft, p, &times, &figures);
    played->num_messages = figures.num_sent;
    played->from = figures.sent_from;
    return failed;
}

static int play_all(struct evaluator *evaluator, const struct draft *draft)
{
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        struct played *played = &evaluator->played[p];
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        played->alike = -1;
        for (int32_t q = 0; q < p && played->alike < 0; q++)
            if (evaluator->played[q].alike < 0 && is_alike(evaluator, draft, p, q))
                played->alike = q;
        int failed = 0;
        if (played->alike < 0) {
            failed = play(evaluator, draft, p, 0);
        } else {
            size_t bytes = sizeof(double) * (size_t)pipeline->num_stages;
            int32_t from = draft->pipelines[played->alike].first_stage;
            memcpy(evaluator->start + pipeline->first_stage, evaluator->start + from, bytes);
            memcpy(evaluator->end + pipeline->first_stage, evaluator->end + from, bytes);
        }
        if (failed)
            return failed;
    }
    return 0;
}

/* --- buckets ---------------------------------------------------------------------------------------------- */

/* The links of rings that were measured: of each ring all of them, node by node. */
static void add_measured(struct evaluator *evaluator, const int32_t *replicas, struct ring *ring)
{
    const struct problem *problem = evaluator->problem;
    int32_t *order = evaluator->workers, count = 0;
    for (int32_t n = 0; n < ring->num_nodes; n++)
        for (int32_t i = 0; i < ring->num_cards; i++)
            if (problem->pools[evaluator->pool_of[replicas[i]]].node == ring->nodes[n])
                order[count++] = replicas[i];
    ring->num_ways = ring->num_rings;
    ring->num_routes = count;
    for (int32_t way = 0; way < ring->num_ways; way++)
        for (int32_t i = 0; i < count; i++) {
            int32_t places[4] = {order[i], order[(i + 1) % count], replicas[i], replicas[(i + 1) % count]};
            for (int32_t k = 0; k < 4; k++) {
                int32_t slice = way * evaluator->width_of[places[k]] / ring->num_rings;
                places[k] = evaluator->place_of[places[k]] + slice;
            }
            ring->routes[way * count + i] = &problem->routes[places[0] * problem->num_places + places[1]];
            /* What a reduction takes of the compute goes by the owners' order. */
            double own = problem->routes[places[2] * problem->num_places + places[3]].compute_seconds;
            ring->compute_seconds = max_of(ring->compute_seconds, count > 1 ? own : 0.0);
        }
}

/* Whether its library is gloo, and what that copies. */
static void find_library(const struct evaluator *evaluator, const int32_t *replicas, struct ring *ring)
{
    const struct pool *pools = evaluator->problem->pools, *first = &pools[evaluator->pool_of[replicas[0]]];
    int has_two = 0, is_simulated = 1;
    for (int32_t i = 0; i < ring->num_cards; i++) {
        const struct pool *pool = &pools[evaluator->pool_of[replicas[i]]];
        has_two |= pool->backend != first->backend;
        is_simulated &= pool->is_simulated;
        ring->copy_seconds = max_of(ring->copy_seconds, pool->copy_seconds);
    }
    ring->is_gloo = is_simulated || has_two || !first->backend;
}

/* A pool of another node, as the next island's node is; the pool itself if there is none. */
static int32_t far_pool(const struct problem *problem, int32_t pool)
{
    for (int32_t i = 0; i < problem->num_pools; i++)
        if (problem->pools[i].node != problem->pools[pool].node)
            return i;
    return pool;
}

/* The links of a ring of these replicas' cards, node by node. */
static void make_ring(struct evaluator *evaluator, const int32_t *replicas, int32_t count,
                      int32_t narrowest, struct ring *ring)
{
    const struct problem *problem = evaluator->problem;
    int32_t *counts = evaluator->counts, *nodes = evaluator->ring_nodes + evaluator->num_ring_nodes;
    *ring = (struct ring){.num_cards = count, .all_cards = count * problem->num_islands, .num_rings = narrowest, .num_ways = 1, .nodes = nodes,
                          .routes = evaluator->ring_routes + evaluator->num_ring_routes};
    for (int32_t i = 0; i < count; i++) {
        const struct pool *pool = &problem->pools[evaluator->pool_of[replicas[i]]];
        if (!counts[pool->node]++)
            nodes[ring->num_nodes++] = evaluator->pool_of[replicas[i]];
        if (counts[pool->node] > ring->most_in_node)
            ring->most_in_node = counts[pool->node];
    }
    ring->all_nodes = ring->num_nodes * problem->num_islands;
    for (int32_t i = 0; !problem->is_measured && i < ring->num_nodes; i++) {
        int32_t pool = nodes[i], next = nodes[(i + 1) % ring->num_nodes];
        next = next == pool ? far_pool(problem, pool) : next;
        if (counts[problem->pools[pool].node] > 1)
            ring->routes[ring->num_routes++] = &problem->routes[pool * problem->num_pools + pool];
        if (ring->all_nodes > 1)
            ring->routes[ring->num_routes++] = &problem->routes[pool * problem->num_pools + next];
    }
    for (int32_t i = 0; i < ring->num_nodes; i++) {
        nodes[i] = problem->pools[nodes[i]].node;
        counts[nodes[i]] = 0;
    }
    find_library(evaluator, replicas, ring);
    if (problem->is_measured)
        add_measured(evaluator, replicas, ring);
    evaluator->num_ring_nodes += ring->num_nodes;
    evaluator->num_ring_routes += ring->num_ways * ring->num_routes;
}

/* Seconds of its owners' compute that the reduction of so many parameters takes while it is hidden behind it. */
static double compute_beside(const struct problem *problem, const struct draft *draft, const struct ring *ring,
                             double parameters)
{
    int32_t k = ring->all_cards, is_whole = !draft->is_sharded || (k == 2 && ring->is_gloo);
    double bytes = parameters * problem->reduce_bytes / ring->num_rings;
    return (is_whole ? 2.0 : 1.0) * (k - 1) / k * bytes * ring->compute_seconds;
}

/* A bucket of units [first, end), in one transfer or in two halves. */
static void add_bucket(struct evaluator *evaluator, const struct draft *draft, int32_t first, int32_t end,
                       double parameters, int can_halve)
{
    const struct problem *problem = evaluator->problem;
    int32_t *owners = evaluator->owners + evaluator->num_owners, count = 0, narrowest = INT32_MAX;
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        int32_t number = evaluator->stage_of[(size_t)p * problem->num_units + first];
        const struct draft_stage *stage = &draft->stages[number];
        narrowest = stage->width < narrowest ? stage->width : narrowest;
        for (int32_t r = 0; r < stage->num_replicas; r++)
            owners[count++] = evaluator->first_replica[number] + r;
    }
    struct ring *ring = &evaluator->rings[evaluator->num_rings++];
    make_ring(evaluator, owners, count, narrowest, ring);
    evaluator->num_owners += count;
    struct transfer transfer = {.ring = ring, .parameters = parameters, .first_unit = first, .end_unit = end,
                                .replicas = owners};
    if (can_halve && parameters > problem->bucket_size) {
        double attention = rint(parameters * problem->half_parameters);
        transfer.parameters = parameters - attention;
        transfer.compute = compute_beside(problem, draft, ring, transfer.parameters);
        transfer.early = problem->half_seconds;
        evaluator->transfers[evaluator->num_transfers++] = transfer;
        transfer.parameters = attention;
        transfer.early = 0.0;
    }
    transfer.compute = compute_beside(problem, draft, ring, transfer.parameters);
    evaluator->transfers[evaluator->num_transfers++] = transfer;
}

static int starts_run(const struct evaluator *evaluator, const struct draft *draft, int32_t u)
{
    int32_t units = evaluator->problem->num_units;
    if (u == 0 || (evaluator->problem->is_tied && u == 1))
        return 1;
    const int32_t *first = evaluator->first_replica, *stage_of = evaluator->stage_of;
    for (int32_t p = 0; p < draft->num_pipelines; p++)
        if (first[stage_of[(size_t)p * units + u - 1]] != first[stage_of[(size_t)p * units + u]])
            return 1;
    return 0;
}

/* The buckets that several owners hold, the last of the model first; see `schedule/flow.py`. */
static void make_buckets(struct evaluator *evaluator, const struct draft *draft)
{
    const struct problem *problem = evaluator->problem;
    int32_t end = problem->num_units;
    double size = 0.0, largest = 0.0;
    for (int32_t u = 0; u < problem->num_units; u++)
        largest = max_of(largest, problem->reduced[u]);
    evaluator->num_transfers = evaluator->num_rings = evaluator->num_owners = 0;
    evaluator->num_ring_nodes = evaluator->num_ring_routes = 0;
    for (int32_t u = problem->num_units - 1; u >= 0; u--) {
        size += problem->reduced[u];
        if (!starts_run(evaluator, draft, u) && size + problem->reduced[u - 1] <= problem->bucket_size)
            continue;
        int is_layer = u > 0 && u < problem->num_units - 1;
        if (evaluator->holders[u] > 1 && size > 0.0)
            add_bucket(evaluator, draft, u, end, size, is_layer && largest > problem->bucket_size);
        end = u;
        size = 0.0;
    }
}

/* The table that a unit of a stage is costed by. */
static const struct unit_table *table_of_unit(const struct problem *problem, const struct draft_pipeline *pipeline,
                                              const struct draft_stage *stage, const struct stage_price *price,
                                              int32_t u)
{
    int32_t first_layer = price->first_unit ? price->first_unit : 1;
    int is_part = stage->num_recomputed == 0 || stage->num_recomputed == stage->layers ||
                  u < first_layer + stage->num_recomputed;
    return table_of(problem, price->place, stage->width, pipeline->size, is_part ? stage->recompute : 0);
}

/* When each unit, and the feed-forward of each layer, is complete on all its owners; and when forwards need it. */
static void find_times_of_units(struct evaluator *evaluator, const struct draft *draft)
{
    const struct problem *problem = evaluator->problem;
    for (int32_t u = 0; u < problem->num_units; u++) {
        evaluator->complete[u] = evaluator->complete_early[u] = 0.0;
        evaluator->needed[u] = INFINITY;
    }
    for (int32_t p = 0; p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        for (int32_t s = pipeline->first_stage; s < pipeline->first_stage + pipeline->num_stages; s++) {
            const struct stage_price *price = &evaluator->prices[s];
            double below = 0.0, earlier = 0.0;
            for (int32_t u = price->first_unit; u < price->end_unit; u++) {
                const struct unit_table *table =
                    table_of_unit(problem, pipeline, &draft->stages[s], price, u);
                const double *sums = draft->schedule == ZERO_BUBBLE ? table->weight : table->backward;
                double seconds = sums[u + 1] - sums[u], end = evaluator->end[s] - below;
                evaluator->complete[u] = max_of(evaluator->complete[u], end);
                end -= problem->half_seconds * seconds;
                evaluator->complete_early[u] = max_of(evaluator->complete_early[u], end);
                evaluator->needed[u] = min_of(evaluator->needed[u], evaluator->start[s] + earlier);
                below += seconds;
                earlier += table->forward[u + 1] - table->forward[u];
            }
        }
    }
}

static int compare_changes(const void *a, const void *b)
{
    double x = ((const struct change *)a)->time, y = ((const struct change *)b)->time;
    return (x > y) - (x < y);
}

static int add_change(struct evaluator *evaluator, double time, int32_t change, int32_t node)
{
    if (!evaluator->counts[node])
        return 0;
    if (evaluator->num_changes == evaluator->room_for_changes) {
        int32_t room = 2 * evaluator->room_for_changes + 1024;
        struct change *changes = realloc(evaluator->changes, sizeof(struct change) * (size_t)room);
        if (!changes)
            return -1;
        evaluator->changes = changes;
        evaluator->room_for_changes = room;
    }
    struct change added = {time, change, node};
    evaluator->changes[evaluator->num_changes++] = added;
    return 0;
}

/* The messages of pipeline p over NICs that rings pass too, as far as they arrive after a time. */
static int add_messages(struct evaluator *evaluator, const struct draft *draft, int32_t p, double after)
{
    const struct problem *problem = evaluator->problem;
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    int32_t source = evaluator->played[p].alike >= 0 ? evaluator->played[p].alike : p;
    const struct played *played = &evaluator->played[source];
    if (played->from > after && play(evaluator, draft, source, 1))
        return -1;
    /* Workers are the pipeline's replicas, in order. */
    const int32_t *pools = evaluator->pool_of + evaluator->first_replica[pipeline->first_stage];
    const int32_t *places = evaluator->place_of + evaluator->first_replica[pipeline->first_stage];
    for (int32_t i = 0; i < played->num_messages; i++) {
        const struct message *message = &played->messages[i];
        int32_t a = pools[message->worker], b = pools[message->peer];
        if (message->end <= after || message->end <= message->start ||
            !problem->routes[places[message->worker] * problem->num_places + places[message->peer]].is_shared)
            continue;
        int32_t nodes[2] = {problem->pools[a].node, problem->pools[b].node};
        for (int end = 0; end < 2; end++)
            if (add_change(evaluator, message->start, 1, nodes[end]) ||
                add_change(evaluator, message->end, -1, nodes[end]))
                return -1;
    }
    return 0;
}

static int find_changes(struct evaluator *evaluator, const struct draft *draft, double after)
{
    evaluator->num_changes = 0;
    int crosses = 0, failed = 0;
    for (int32_t i = 0; i < evaluator->num_rings; i++)
        for (int32_t j = 0; evaluator->rings[i].all_nodes > 1 && j < evaluator->rings[i].num_nodes; j++)
            crosses = evaluator->counts[evaluator->rings[i].nodes[j]] = 1;
    for (int32_t p = 0; crosses && !failed && p < draft->num_pipelines; p++)
        failed = add_messages(evaluator, draft, p, after);
    memset(evaluator->counts, 0, sizeof(int32_t) * (size_t)evaluator->problem->num_nodes);
    if (evaluator->num_changes)
        qsort(evaluator->changes, (size_t)evaluator->num_changes, sizeof(struct change), compare_changes);
    return failed;
}

/* The end of the last reduction or backward; 0, or as `run_transfers`. */
static int reduce_gradients(struct evaluator *evaluator, const struct draft *draft, double latest, double *end)
{
    double first = INFINITY;
    for (int32_t i = 0; i < evaluator->num_transfers; i++) {
        struct transfer *transfer = &evaluator->transfers[i];
        const double *complete = transfer->early > 0.0 ? evaluator->complete_early : evaluator->complete;
        transfer->ready = 0.0;
        for (int32_t u = transfer->first_unit; u < transfer->end_unit; u++)
            transfer->ready = max_of(transfer->ready, complete[u]);
        first = min_of(first, transfer->ready);
    }
    memset(evaluator->work_end, 0, sizeof(double) * (size_t)evaluator->num_replicas);
    for (int32_t s = 0; s < draft->num_stages; s++)
        for (int32_t r = 0; r < draft->stages[s].num_replicas; r++)
            evaluator->work_end[evaluator->first_replica[s] + r] =
                max_of(evaluator->work_end[evaluator->first_replica[s] + r], evaluator->end[s]);
    if (find_changes(evaluator, draft, first))
        return -1;
    int failed = run_transfers(evaluator, draft->is_sharded ? REDUCE_SCATTER : ALL_REDUCE, latest);
    if (failed)
        return failed;
    for (int32_t i = 0; i < evaluator->num_transfers; i++)
        *end = max_of(*end, evaluator->transfers[i].end);
    for (int32_t i = 0; i < evaluator->num_replicas; i++)
        *end = max_of(*end, evaluator->work_end[i] + evaluator->slowed[i]);
    return 0;
}

/* The longest that a forward waits for stepped weights, which come back in the model's order. */
static int gather_weights(struct evaluator *evaluator, double *wait)
{
    int32_t count = evaluator->num_transfers;
    for (int32_t i = 0; i < count / 2; i++) {
        struct transfer other = evaluator->transfers[i];
        evaluator->transfers[i] = evaluator->transfers[count - 1 - i];
        evaluator->transfers[count - 1 - i] = other;
    }
    for (int32_t i = 0; i < count; i++)
        evaluator->transfers[i].ready = evaluator->transfers[i].compute = 0.0;
    evaluator->num_changes = 0;
    if (run_transfers(evaluator, ALL_GATHER, INFINITY))
        return -1;
    for (int32_t i = 0; i < count; i++) {
        const struct transfer *transfer = &evaluator->transfers[i];
        for (int32_t u = transfer->first_unit; u < transfer->end_unit; u++)
            *wait = max_of(*wait, transfer->end - evaluator->needed[u]);
    }
    return 0;
}

/* The tied embedding, over the first and the last stages of all pipelines. */
static double tied_seconds(struct evaluator *evaluator, const struct draft *draft)
{
    const struct problem *problem = evaluator->problem;
    int32_t *owners = evaluator->owners, count = 0, narrowest = INT32_MAX;
    if (!problem->is_tied || problem->embedding_parameters <= 0.0)
        return 0.0;
    for (int end = 0; end < 2; end++)
        for (int32_t p = 0; p < draft->num_pipelines; p++) {
            const struct draft_pipeline *pipeline = &draft->pipelines[p];
            if (end && has_both_ends(evaluator, pipeline))
                continue;
            int32_t number = pipeline->first_stage + (end ? pipeline->num_stages - 1 : 0);
            const struct draft_stage *stage = &draft->stages[number];
            narrowest = stage->width < narrowest ? stage->width : narrowest;
            for (int32_t r = 0; r < stage->num_replicas; r++)
                owners[count++] = evaluator->first_replica[number] + r;
        }
    struct ring *ring = &evaluator->rings[0];
    evaluator->num_ring_nodes = evaluator->num_ring_routes = 0;
    make_ring(evaluator, owners, count, narrowest, ring);
    int32_t sharers = ring->all_nodes > 1 ? narrowest : 1;
    double size = problem->embedding_parameters;
    if (!draft->is_sharded)
        return ring_seconds(problem, ring, ALL_REDUCE, size, sharers);
    return ring_seconds(problem, ring, REDUCE_SCATTER, size, sharers) +
           ring_seconds(problem, ring, ALL_GATHER, size, sharers);
}

/* At least so long is a pipeline of these times: a stage's first forward waits for those before it, and all its work
 * follows; its last gradient passes the stages before it, but where backwards are split. */
static double least_seconds(const struct evaluator *evaluator, const struct draft *draft, int32_t p)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    double longest = 0.0, before = 0.0;
    for (int32_t s = pipeline->first_stage; s < pipeline->first_stage + pipeline->num_stages; s++) {
        int32_t n = draft->stages[s].num_replicas, own = (pipeline->num_micro_batches + n - 1) / n;
        double work = evaluator->forward[s] + evaluator->backward[s];
        longest = max_of(longest, before + own * work);
        before += draft->schedule == ZERO_BUBBLE ? evaluator->forward[s] : work;
    }
    return longest;
}

/* The same of a pipeline whose messages and depths are known: a stage waits for its first gradient with no more forwards
 * than it has micro-batches in flight, and after its last forward with no more backwards. */
static double least_run(const struct evaluator *evaluator, const struct draft *draft, int32_t p)
{
    const struct draft_pipeline *pipeline = &draft->pipelines[p];
    int32_t begin = pipeline->first_stage, last = begin + pipeline->num_stages - 1;
    int waits = draft->schedule == ONE_F_ONE_B || draft->schedule == GPIPE, is_split = draft->schedule == ZERO_BUBBLE;
    const double *forward = evaluator->forward, *backward = evaluator->backward;
    const double *there = evaluator->send_activation, *back = evaluator->send_gradient;
    double longest = 0.0, before = 0.0, down = 0.0;
    for (int32_t s = begin; s < last; s++)
        before += forward[s] + there[s] + (is_split ? 0.0 : backward[s] + back[s]);
    for (int32_t s = last; s >= begin; s--) {
        int32_t n = draft->stages[s].num_replicas, rounds = (pipeline->num_micro_batches + n - 1) / n;
        int32_t others = evaluator->prices[s].in_flight - 1;
        double first = max_of(0.0, down - others * forward[s]), end = max_of(0.0, down - others * backward[s]);
        double idle = !waits ? 0.0 : rounds > others + 1 ? first + end : max_of(first, end);
        longest = max_of(longest, before + rounds * (forward[s] + backward[s]) + idle);
        if (s == begin)
            break;
        before -= forward[s - 1] + there[s - 1] + (is_split ? 0.0 : backward[s - 1] + back[s - 1]);
        down += forward[s] + backward[s] + there[s - 1] + back[s - 1];
    }
    /* Sums in another order than a run's. */
    return longest * (1.0 - 1e-9);
}

/* Seconds of a stage's units, without recompute, on the replica that takes most; 1 if it cannot be. */
static int find_least_times(struct evaluator *evaluator, const struct draft_stage *stage, int32_t size, int32_t first,
                            int32_t end, int32_t number)
{
    const struct problem *problem = evaluator->problem;
    double forward = INFINITY, work = 0.0;
    for (int32_t r = 0; r < stage->num_replicas; r++) {
        int32_t place = problem->pools[stage->pools[r]].first_place;
        const struct unit_table *table = table_of(problem, place, stage->width, size, 0);
        if (!table)
            return 1;
        double own = table->forward[end] - table->forward[first];
        forward = min_of(forward, own);
        work = max_of(work, own + (table->backward[end] - table->backward[first]));
    }
    evaluator->forward[number] = forward;
    evaluator->backward[number] = work - forward;
    return 0;
}

double least_step(struct evaluator *evaluator, const struct draft *draft)
{
    int32_t units = evaluator->problem->num_units;
    double longest = 0.0;
    for (int32_t p = 0; evaluator->recompute_costs && p < draft->num_pipelines; p++) {
        const struct draft_pipeline *pipeline = &draft->pipelines[p];
        int32_t first = 0, next = 1, last = pipeline->num_stages - 1;
        for (int32_t s = 0; s <= last; s++, first = next) {
            const struct draft_stage *stage = &draft->stages[pipeline->first_stage + s];
            next += stage->layers;
            if (stage->layers < 0 || next >= units ||
                find_least_times(evaluator, stage, pipeline->size, first, s == last ? units : next,
                                 pipeline->first_stage + s))
                return INFINITY;
        }
        longest = max_of(longest, least_seconds(evaluator, draft, p));
    }
    /* Sums in another order than a price's. */
    return longest * (1.0 - 1e-9);
}

/* --- the step --------------------------------------------------------------------------------------------- */

/* Put state that the hosts of a stage have no room for on their disks: they are read and written beside the step. */
static void put_on_disks(struct stage_price *price)
{
    double over = price->host_bytes - price->host_capacity;
    if (over <= 0.0 || price->disk_bytes <= 0.0)
        return;
    double moved = min_of(over + price->disk_slots, price->disk_bytes);
    price->host_bytes += price->disk_slots - moved;
    price->update = max_of(price->update, moved * price->disk_seconds);
}

static void sum_up(struct evaluator *evaluator, const struct draft *draft, struct price *price)
{
    price->compute = price->update = price->over = 0.0;
    for (int32_t s = 0; s < draft->num_stages; s++) {
        struct stage_price *own = &evaluator->prices[s];
        put_on_disks(own);
        price->compute = max_of(price->compute, evaluator->end[s]);
        price->update = max_of(price->update, own->update);
        double over = max_of(0.0, own->memory - own->capacity) + max_of(0.0, own->host_bytes - own->host_capacity);
        price->over += over * draft->stages[s].num_replicas;
    }
}

int price_realised(struct evaluator *evaluator, const struct draft *draft, double limit, struct price *price)
{
    price->stages = evaluator->prices;
    price->reduce = price->sync = price->tied = 0.0;
    int failed = sum_over_workers(evaluator, draft), does_not_fit = 0;
    double update = 0.0;
    if (failed)
        return failed;
    for (int32_t s = 0; s < draft->num_stages; s++) {
        const struct stage_price *own = &evaluator->prices[s];
        does_not_fit |= own->memory > own->capacity;
        update = max_of(update, own->update);
        evaluator->forward[s] = own->forward;
        evaluator->backward[s] = own->backward;
        evaluator->weight[s] = own->weight;
    }
    for (int32_t p = 0; limit < INFINITY && p < draft->num_pipelines; p++)
        if (least_seconds(evaluator, draft, p) > limit)
            return 2;
    evaluator->num_played++;
    if (does_not_fit && limit < MISFIT)
        return 2;
    price_messages(evaluator, draft);
    for (int32_t p = 0; limit < MISFIT && p < draft->num_pipelines; p++)
        if (least_run(evaluator, draft, p) + update > limit)
            return 2;
    if ((failed = play_all(evaluator, draft)))
        return failed;
    sum_up(evaluator, draft, price);
    price->step = price->compute + price->update;
    if (price->step > limit && price->over == 0.0)
        return 2;
    make_buckets(evaluator, draft);
    if (evaluator->num_transfers) {
        /* Sums in another order than the step's. */
        double end = price->compute, latest = price->over == 0.0 ? (limit - price->update) * (1.0 + 1e-9) : INFINITY;
        find_times_of_units(evaluator, draft);
        if ((failed = reduce_gradients(evaluator, draft, latest, &end)))
            return failed;
        price->reduce = end - price->compute;
        if (draft->is_sharded && gather_weights(evaluator, &price->sync))
            return -1;
    }
    price->tied = tied_seconds(evaluator, draft);
    price->step = price->compute + price->reduce + price->tied + price->update + price->sync;
    return 0;
}

int price_draft(struct evaluator *evaluator, const struct draft *draft, double limit, struct price *price)
{
    int failed = price_stages(evaluator, draft);
    return failed ? failed : price_realised(evaluator, draft, limit, price);
}

static void take_memory(struct evaluator *evaluator)
{
    const struct problem *problem = evaluator->problem;
    struct arena *arena = &evaluator->arena;
    int32_t cards = problem->num_cards + 1, units = problem->num_units + 1, nodes = problem->num_nodes;
    int32_t stages = most_stages(problem) + 1;
    double **rows[] = {&evaluator->forward, &evaluator->backward, &evaluator->weight, &evaluator->send_activation,
                       &evaluator->send_gradient, &evaluator->start, &evaluator->end, &evaluator->busy,
                       &evaluator->worker_end, &evaluator->slowed, &evaluator->work_end};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        *rows[i] = TAKE(arena, stages, double);
    double **of_units[] = {&evaluator->weights, &evaluator->complete, &evaluator->complete_early,
                           &evaluator->needed};
    for (size_t i = 0; i < sizeof of_units / sizeof *of_units; i++)
        *of_units[i] = TAKE(arena, units, double);
    int32_t **of_nodes[] = {&evaluator->leaving, &evaluator->entering, &evaluator->counts, &evaluator->flows};
    for (size_t i = 0; i < sizeof of_nodes / sizeof *of_nodes; i++)
        *of_nodes[i] = TAKE(arena, nodes, int32_t);
    int32_t **of_stages[] = {&evaluator->depths, &evaluator->first, &evaluator->workers,
                             &evaluator->first_replica, &evaluator->pool_of, &evaluator->place_of,
                             &evaluator->width_of};
    for (size_t i = 0; i < sizeof of_stages / sizeof *of_stages; i++)
        *of_stages[i] = TAKE(arena, stages, int32_t);
    evaluator->taken = TAKE(arena, problem->num_pools, int32_t);
    evaluator->prices = TAKE(arena, stages, struct stage_price);
    evaluator->part_forward = TAKE(arena, 2 * units, double);
    evaluator->part_backward = TAKE(arena, 2 * units, double);
    evaluator->part_bytes = TAKE(arena, 2 * units, double);
    evaluator->placed = TAKE(arena, 1, struct placements);
    evaluator->clocks = TAKE(arena, stages, struct copy_clock);
    evaluator->stage_of = TAKE(arena, (size_t)cards * units, int32_t);
    evaluator->holders = TAKE(arena, units, int32_t);
    evaluator->slices = TAKE(arena, units, int32_t);
    evaluator->played = TAKE(arena, cards, struct played);
    evaluator->rings = TAKE(arena, units, struct ring);
    evaluator->transfers = TAKE(arena, 2 * units, struct transfer);
    /* A unit has at most one owner a card; a ring passes each node of theirs once, over two links, or has one a card. */
    evaluator->owners = TAKE(arena, (size_t)units * cards, int32_t);
    evaluator->ring_nodes = TAKE(arena, (size_t)units * nodes, int32_t);
    int32_t links = problem->is_measured ? cards : 2 * nodes;
    evaluator->ring_routes = TAKE(arena, (size_t)units * links, const struct route *);
    evaluator->run = make_run(problem, arena);
}

/* Whether no unit takes less time under any recompute than without; measured times may. */
static int recompute_costs(const struct problem *problem)
{
    int32_t rows = problem->num_places * NUM_WIDTHS * NUM_SIZES;
    for (int32_t i = 0; i < rows * NUM_RECOMPUTES; i++) {
        int32_t own = problem->table_of[i], plain = problem->table_of[i / NUM_RECOMPUTES * NUM_RECOMPUTES];
        if (own < 0 || own == plain)
            continue;
        if (plain < 0)
            return 0;
        const struct unit_table *a = &problem->tables[own], *b = &problem->tables[plain];
        for (int32_t u = 0; u < problem->num_units; u++) {
            double there = a->forward[u + 1] - a->forward[u], back = a->backward[u + 1] - a->backward[u];
            if (there < (b->forward[u + 1] - b->forward[u]) * (1.0 - 1e-9) ||
                back < (b->backward[u + 1] - b->backward[u]) * (1.0 - 1e-9))
                return 0;
        }
    }
    return 1;
}

struct evaluator *make_evaluator(const struct problem *problem)
{
    struct evaluator *volatile made = calloc(1, sizeof(struct evaluator));
    if (!made)
        return NULL;
    made->problem = problem;
    if (setjmp(made->arena.failed)) {
        free_evaluator(made);
        return NULL;
    }
    take_memory(made);
    made->recompute_costs = recompute_costs(problem);
    return made;
}

void free_evaluator(struct evaluator *evaluator)
{
    if (!evaluator)
        return;
    for (int32_t p = 0; evaluator->played && p < evaluator->problem->num_cards + 1; p++)
        free(evaluator->played[p].messages);
    if (evaluator->placed)
        free_placements(evaluator->placed);
    free(evaluator->steps);
    free(evaluator->copy_ends);
    for (int32_t i = 0; i < NUM_KNOWN; i++)
        forget(evaluator, &evaluator->known[i]);
    free(evaluator->changes);
    free_run(evaluator->run);
    release(&evaluator->arena);
    free(evaluator);
}
