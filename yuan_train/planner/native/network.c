/* Messages, rings and buckets on their way at the same time: `costs/links.py`, `costs/grad_reduce.py` and
 * `evaluate/plan_cost.py`. */
#include <math.h>

#include "evaluator.h"

/* Linear between measured sizes; below them the smallest one's time, above them the last slope. */
static double interpolate(const struct route *route, double bytes)
{
    const double *sizes = route->sizes, *seconds = route->seconds;
    int32_t last = route->num_sizes - 1, after = 0;
    if (bytes <= sizes[0])
        return seconds[0];
    if (!last)
        return sizes[0] > 0.0 ? seconds[0] * bytes / sizes[0] : seconds[0];
    while (after < last && sizes[after] < bytes)
        after++;
    double slope = (seconds[after] - seconds[after - 1]) / (sizes[after] - sizes[after - 1]);
    if (bytes > sizes[last])
        return seconds[last] + max_of(slope, 0.0) * (bytes - sizes[last]);
    return seconds[after - 1] + slope * (bytes - sizes[after - 1]);
}

static double wire_seconds(const struct route *route, double bytes, int32_t sharers)
{
    int32_t flows = route->is_shared && sharers > 1 ? sharers : 1;
    double start = route->latency, alone = start + bytes / route->stream_rate, together;
    if (route->num_sizes) {
        alone = interpolate(route, bytes);
        start = min_of(alone, route->seconds[0]);
    }
    if (flows == 1)
        return alone;
    if (route->shared_rate > 0.0)
        together = bytes * flows / route->shared_rate;
    else
        together = min_of((alone - start) * flows, bytes * flows / route->rate);
    return start + max_of(alone - start, together);
}

double message_seconds(const struct route *route, double bytes, int32_t sharers)
{
    double seconds = wire_seconds(route, bytes, sharers);
    return route->num_sizes ? seconds : seconds + bytes * route->copy_seconds;
}

static double slowest_link(const struct ring *ring, int32_t way, double bytes, int32_t sharers)
{
    const struct route **routes = ring->routes + way * ring->num_routes;
    double slowest = 0.0;
    for (int32_t i = 0; i < ring->num_routes; i++) {
        double own = wire_seconds(routes[i], bytes, sharers);
        slowest = own > slowest ? own : slowest;
    }
    return slowest;
}

/* As libraries reduce, or gather: see `costs/links.py`. */
static double wire_of_ring(const struct ring *ring, int32_t way, enum collective collective, double bytes,
                           int32_t sharers)
{
    static const double GLOO_REDUCED_ONCE = 1.8e6;
    double k = ring->all_cards;
    if (collective == REDUCE_SCATTER && ring->is_gloo && ring->all_cards > 2) {
        double again = max_of(0.0, bytes / k - GLOO_REDUCED_ONCE * k);
        return k * slowest_link(ring, way, ((k * k - 1) / (k * k) * bytes + again) / k, sharers);
    }
    double around = (k - 1) * slowest_link(ring, way, bytes / k, sharers);
    if (collective == ALL_GATHER || (collective == REDUCE_SCATTER && !ring->is_gloo))
        return around;
    if (ring->all_nodes == 1 || ring->is_gloo)
        return 2 * around;
    int32_t levels = 0;
    while (((int64_t)1 << levels) < ring->all_nodes)
        levels++;
    int32_t hops = levels + ring->most_in_node - 1;
    double last = slowest_link(ring, way, bytes, sharers), start = slowest_link(ring, way, 0.0, sharers);
    return min_of(2 * around, 2 * (last + (hops - 1) * start));
}

double ring_seconds(const struct problem *problem, const struct ring *ring, enum collective collective,
                    double parameters, int32_t sharers)
{
    double each = collective == ALL_GATHER ? problem->weight_bytes : problem->reduce_bytes;
    double bytes = parameters * each / ring->num_rings, slowest = 0.0;
    if (ring->all_cards < 2 || bytes <= 0.0)
        return 0.0;
    for (int32_t way = 0; way < ring->num_ways; way++) {
        double own = wire_of_ring(ring, way, collective, bytes, sharers);
        int has_measured = 0;
        for (int32_t i = 0; problem->is_measured && i < ring->num_routes; i++)
            has_measured |= ring->routes[way * ring->num_routes + i]->num_sizes > 0;
        if (ring->is_gloo && !has_measured)
            own += 2 * bytes * ring->copy_seconds;
        slowest = own > slowest ? own : slowest;
    }
    return slowest;
}

/* Transfers at a time of their run; see `_Run` in `evaluate/plan_cost.py`. */
struct run {
    int32_t num_waiting, num_active, next_change;
    double now;
    int32_t *before;          /* transfers before each, on its replicas, that are not through */
    int32_t *waiting, *active, *through;
    double *due;              /* of those that wait: when they may start */
    double *remaining, *done; /* of those under way */
    double *seconds;          /* of each, with so many `sharers`; 0: not known yet */
    int32_t *sharers;
    int32_t *last;            /* [replicas, 2]: the last transfer of each, inside of a node and out of it; -1 */
    int32_t *seen;            /* the last transfer that was told to follow each */
    int32_t *first_edge, *edge_target, *next_edge, num_edges, room_for_edges;
};

struct run *make_run(const struct problem *problem, struct arena *arena)
{
    int32_t most = 2 * problem->num_units;
    struct run *run = TAKE(arena, 1, struct run);
    run->before = TAKE(arena, most, int32_t);
    run->waiting = TAKE(arena, most, int32_t);
    run->active = TAKE(arena, most, int32_t);
    run->through = TAKE(arena, most, int32_t);
    run->due = TAKE(arena, most, double);
    run->remaining = TAKE(arena, most, double);
    run->done = TAKE(arena, most, double);
    run->seconds = TAKE(arena, most, double);
    run->sharers = TAKE(arena, most, int32_t);
    run->seen = TAKE(arena, most, int32_t);
    run->first_edge = TAKE(arena, most, int32_t);
    run->last = TAKE(arena, 2 * problem->num_cards, int32_t);
    return run;
}

void free_run(struct run *run)
{
    if (run) {
        free(run->edge_target);
        free(run->next_edge);
    }
}

static int add_edge(struct run *run, int32_t from, int32_t to)
{
    if (run->num_edges == run->room_for_edges) {
        int32_t room = 2 * run->room_for_edges + 256;
        int32_t *targets = realloc(run->edge_target, sizeof(int32_t) * (size_t)room);
        if (targets)
            run->edge_target = targets;
        int32_t *next = realloc(run->next_edge, sizeof(int32_t) * (size_t)room);
        if (next)
            run->next_edge = next;
        if (!targets || !next)
            return -1;
        run->room_for_edges = room;
    }
    run->edge_target[run->num_edges] = to;
    run->next_edge[run->num_edges] = run->first_edge[from];
    run->first_edge[from] = run->num_edges++;
    return 0;
}

/* Each follows, on each of its replicas, the last one before it that takes the same kind of links. */
static int find_followers(struct evaluator *evaluator)
{
    struct run *run = evaluator->run;
    for (int32_t i = 0; i < 2 * evaluator->num_replicas; i++)
        run->last[i] = -1;
    run->num_edges = 0;
    for (int32_t i = 0; i < evaluator->num_transfers; i++) {
        const struct transfer *transfer = &evaluator->transfers[i];
        int32_t leaves = transfer->ring->all_nodes > 1;
        run->before[i] = 0;
        run->seen[i] = run->first_edge[i] = -1;
        for (int32_t c = 0; c < transfer->ring->num_cards; c++) {
            int32_t *last = &run->last[2 * transfer->replicas[c] + leaves];
            if (*last >= 0 && *last != i && run->seen[*last] != i) {
                run->seen[*last] = i;
                run->before[i]++;
                if (add_edge(run, *last, i))
                    return -1;
            }
            *last = i;
        }
    }
    return 0;
}

static void add_flows(struct evaluator *evaluator, const struct transfer *transfer, int32_t sign)
{
    const struct ring *ring = transfer->ring;
    for (int32_t i = 0; ring->all_nodes > 1 && i < ring->num_nodes; i++)
        evaluator->flows[ring->nodes[i]] += sign * ring->num_rings;
}

/* What a transfer that is through took of its owners' compute, as far as that hid it. */
static void slow_down(struct evaluator *evaluator, const struct transfer *transfer)
{
    double seconds = transfer->end - transfer->start;
    if (transfer->compute <= 0.0 || seconds <= 0.0)
        return;
    for (int32_t c = 0; c < transfer->ring->num_cards; c++) {
        int32_t replica = transfer->replicas[c];
        double *slowed = &evaluator->slowed[replica];
        double hidden = seconds - max_of(0.0, transfer->end - evaluator->work_end[replica] - *slowed);
        *slowed += transfer->compute * max_of(0.0, hidden) / seconds;
    }
}

/* Its owners are free: it may start when its gradients are complete. */
static void wait_until(struct run *run, const struct evaluator *evaluator, int32_t i)
{
    const struct transfer *transfer = &evaluator->transfers[i];
    double slowed = 0.0;
    for (int32_t c = 0; evaluator->problem->is_measured && c < transfer->ring->num_cards; c++)
        slowed = max_of(slowed, evaluator->slowed[transfer->replicas[c]]);
    double ready = transfer->ready + slowed;
    run->due[run->num_waiting] = run->now > ready ? run->now : ready;
    run->waiting[run->num_waiting++] = i;
}

static void start_ready(struct evaluator *evaluator)
{
    struct run *run = evaluator->run;
    if (!run->num_active) {
        double first = INFINITY;
        for (int32_t i = 0; i < run->num_waiting; i++)
            first = min_of(first, run->due[i]);
        run->now = max_of(run->now, first);
    }
    int32_t left = 0;
    for (int32_t i = 0; i < run->num_waiting; i++) {
        int32_t number = run->waiting[i];
        if (run->due[i] > run->now) {
            run->due[left] = run->due[i];
            run->waiting[left++] = number;
            continue;
        }
        run->active[run->num_active++] = number;
        run->remaining[number] = 1.0;
        run->sharers[number] = 0;
        evaluator->transfers[number].start = run->now;
        add_flows(evaluator, &evaluator->transfers[number], 1);
    }
    run->num_waiting = left;
    for (; run->next_change < evaluator->num_changes; run->next_change++) {
        const struct change *change = &evaluator->changes[run->next_change];
        if (change->time > run->now)
            break;
        evaluator->flows[change->node] += change->change;
    }
}

static double end_of(struct evaluator *evaluator, enum collective collective, int32_t number)
{
    struct run *run = evaluator->run;
    const struct transfer *transfer = &evaluator->transfers[number];
    int32_t sharers = 1;
    if (transfer->ring->all_nodes > 1) {
        sharers = 0;
        for (int32_t i = 0; i < transfer->ring->num_nodes; i++) {
            int32_t flows = evaluator->flows[transfer->ring->nodes[i]];
            sharers = flows > sharers ? flows : sharers;
        }
    }
    if (run->sharers[number] != sharers) {
        run->sharers[number] = sharers;
        run->seconds[number] =
            ring_seconds(evaluator->problem, transfer->ring, collective, transfer->parameters, sharers);
    }
    return run->now + run->remaining[number] * run->seconds[number];
}

/* Go on to the next event; how many transfers are through. */
static int32_t advance(struct evaluator *evaluator, enum collective collective)
{
    struct run *run = evaluator->run;
    double until = INFINITY;
    for (int32_t i = 0; i < run->num_active; i++) {
        run->done[i] = end_of(evaluator, collective, run->active[i]);
        until = min_of(until, run->done[i]);
    }
    for (int32_t i = 0; i < run->num_waiting; i++)
        until = min_of(until, run->due[i]);
    if (run->next_change < evaluator->num_changes)
        until = min_of(until, evaluator->changes[run->next_change].time);
    int32_t left = 0, active = run->num_active, through = 0;
    double before = run->now;
    run->now = until;
    for (int32_t i = 0; i < active; i++) {
        int32_t number = run->active[i];
        if (run->done[i] > until) {
            run->remaining[number] -= (until - before) / run->seconds[number];
            run->active[left++] = number;
            continue;
        }
        evaluator->transfers[number].end = until;
        add_flows(evaluator, &evaluator->transfers[number], -1);
        slow_down(evaluator, &evaluator->transfers[number]);
        run->through[through++] = number;
    }
    for (int32_t i = 0; i < through; i++)
        for (int32_t edge = run->first_edge[run->through[i]]; edge >= 0; edge = run->next_edge[edge])
            if (!--run->before[run->edge_target[edge]])
                wait_until(run, evaluator, run->edge_target[edge]);
    run->num_active = left;
    return through;
}

int run_transfers(struct evaluator *evaluator, enum collective collective, double latest)
{
    struct run *run = evaluator->run;
    memset(evaluator->flows, 0, sizeof(int32_t) * (size_t)evaluator->problem->num_nodes);
    memset(evaluator->slowed, 0, sizeof(double) * (size_t)evaluator->num_replicas);
    run->num_waiting = run->num_active = run->next_change = 0;
    run->now = 0.0;
    if (find_followers(evaluator))
        return -1;
    for (int32_t i = 0; i < evaluator->num_transfers; i++)
        if (!run->before[i])
            wait_until(run, evaluator, i);
    for (int32_t left = evaluator->num_transfers; left;) {
        start_ready(evaluator);
        left -= advance(evaluator, collective);
        if (run->now > latest)
            return 2;
    }
    return 0;
}
