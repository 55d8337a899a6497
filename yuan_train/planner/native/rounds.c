/* 1F1B in virtual time, without its schedule, and without the rounds that repeat.
 *
 * Before its backward k, stage s has run its forwards up to k + K_s - 1, K_s its depth. So in each round k everything
 * awaited is known if forwards run from the first stage on, then backwards from the last one on. What a round adds to
 * the times of the one before is a sum of constants and maxima of them (a max-plus linear map): if some rounds have
 * added the same number of seconds to all of them, so will as many rounds after them, until a stage has no forward left.
 */
#include <math.h>

#include "memory.h"
#include "pipeline.h"

/* Times are the same up to this part of the longest of them. */
static const double SAME = 1e-12, NEARLY_SAME = 1e-9;

struct rounds {
    int32_t num_stages, count;
    const int32_t *depths;
    const struct times *times;
    struct figures *figures;
    double *free, *link, *back_link; /* [stages]: when the worker, and each link down and up, is free */
    int32_t *done;                   /* [stages]: forwards */
    double *arrived;                 /* [stages, room]: when the input of a forward is there; see `input_of` */
    double *spare;                   /* [room] */
    int32_t room;                    /* inputs of a stage that may wait */
    double *before;                  /* [stages, row_size]: the times after the last rounds */
    int32_t *row_sizes;              /* [stages]: of the rows of `before` */
    size_t row_size;
    int32_t num_before, newest;
};

/* Where the input of a stage's forward is noted. */
static double *input_of(const struct rounds *run, int32_t stage, int32_t m)
{
    return run->arrived + (size_t)stage * run->room + m % run->room;
}

static void run_forwards(struct rounds *run, int32_t stage, int32_t k)
{
    int32_t upto = k + run->depths[stage] < run->count ? k + run->depths[stage] : run->count;
    for (int32_t m = run->done[stage]; m < upto; m++) {
        double now = run->free[stage], ready = stage ? *input_of(run, stage, m) : 0.0;
        now = ready > now ? ready : now;
        if (!m)
            run->figures->stage_start[stage] = now;
        run->free[stage] = now = now + run->times->forward[stage];
        if (stage + 1 < run->num_stages) {
            double start = run->link[stage] > now ? run->link[stage] : now;
            double end = start + run->times->send_activation[stage];
            run->link[stage] = *input_of(run, stage + 1, m) = end;
            log_message(run->figures, start, end, stage, stage + 1);
        }
    }
    if (upto > run->done[stage])
        run->done[stage] = upto;
}

static void run_round(struct rounds *run, int32_t k)
{
    for (int32_t stage = 0; stage < run->num_stages; stage++)
        run_forwards(run, stage, k);
    double ready = 0.0;
    for (int32_t stage = run->num_stages - 1; stage >= 0; stage--) {
        double now = run->free[stage];
        run->free[stage] = now = (ready > now ? ready : now) + run->times->backward[stage];
        if (stage) {
            double start = run->back_link[stage] > now ? run->back_link[stage] : now;
            run->back_link[stage] = ready = start + run->times->send_gradient[stage - 1];
            log_message(run->figures, start, ready, stage, stage - 1);
        }
    }
}

/* All times after a round, into `row`; how many. The ends of the first and of the last stage stand first: they soon
 * show the most of all differences. */
static int32_t write_row(const struct rounds *run, double *row)
{
    int32_t n = run->num_stages, size = 2;
    row[0] = run->free[0];
    row[1] = run->free[n - 1];
    for (int32_t stage = 0; stage < n; stage++) {
        row[size + stage] = run->free[stage];
        row[size + n + stage] = run->link[stage];
        row[size + 2 * n + stage] = run->back_link[stage];
    }
    size += 3 * n;
    for (int32_t stage = 1; stage < n; stage++)
        for (int32_t m = run->done[stage]; m < run->done[stage - 1]; m++)
            row[size++] = *input_of(run, stage, m);
    return size;
}

static int is_repeated(const double *then, const double *now, int32_t size, double most, double added)
{
    /* A link that there is not stays at 0. */
    for (int32_t i = 1; i < size; i++)
        if (!(fabs(now[i] - then[i] - added) <= most) && now[i] != 0.0)
            return 0;
    return 1;
}

/* The least number of rounds that have added the same to all times, and what they added; 0 if none have. */
static int32_t repeated_rounds(const struct rounds *run, const double *now, int32_t size, double *added)
{
    double longest = 0.0;
    for (int32_t i = 0; i < run->num_before; i++) {
        int32_t row = (run->newest + run->num_stages - i) % run->num_stages;
        const double *then = run->before + row * run->row_size;
        if (run->row_sizes[row] != size)
            return 0;
        *added = now[0] - then[0];
        if (fabs(now[1] - then[1] - *added) > NEARLY_SAME * now[0])
            continue;
        for (int32_t j = 0; j < size; j++)
            longest = now[j] > longest ? now[j] : longest;
        if (is_repeated(then, now, size, SAME * longest, *added))
            return i + 1;
    }
    return 0;
}

/* The inputs that wait, which become those of later forwards. */
static void shift_inputs(struct rounds *run, int32_t stage, int32_t rounds, double seconds)
{
    int32_t first = run->done[stage], count = stage ? run->done[stage - 1] - first : 0;
    for (int32_t i = 0; i < count; i++)
        run->spare[i] = *input_of(run, stage, first + i) + seconds;
    for (int32_t i = 0; i < count; i++)
        *input_of(run, stage, first + rounds + i) = run->spare[i];
}

/* Add so many rounds, of so many seconds in all. */
static void repeat(struct rounds *run, int32_t rounds, double seconds)
{
    for (int32_t stage = 0; stage < run->num_stages; stage++) {
        shift_inputs(run, stage, rounds, seconds);
        run->free[stage] += seconds;
        run->link[stage] += seconds;
        run->back_link[stage] += seconds;
    }
    run->figures->num_sent = 0;
    run->figures->sent_from = 0.0;
    for (int32_t stage = 0; stage < run->num_stages; stage++) {
        run->done[stage] += rounds;
        run->figures->sent_from = max_of(run->figures->sent_from, max_of(run->link[stage], run->back_link[stage]));
    }
}

static void run_all(struct rounds *run)
{
    int32_t deepest = 0;
    for (int32_t stage = 0; stage < run->num_stages; stage++)
        deepest = run->depths[stage] > deepest ? run->depths[stage] : deepest;
    for (int32_t k = 0, last_full = run->count - deepest; k < run->count; k++) {
        run_round(run, k);
        if (k >= last_full)
            continue;
        int32_t row = (run->newest + 1) % run->num_stages;
        /* A row more than is compared: the new one. */
        double *now = run->before + run->num_stages * run->row_size, added = 0.0;
        int32_t size = write_row(run, now), rounds = repeated_rounds(run, now, size, &added);
        int32_t times = rounds ? (last_full - k) / rounds : 0;
        if (times) {
            repeat(run, times * rounds, times * added);
            k += times * rounds;
            run->num_before = 0;
            continue;
        }
        memcpy(run->before + row * run->row_size, now, (size_t)size * sizeof(double));
        run->row_sizes[row] = size;
        run->newest = row;
        run->num_before += run->num_before < run->num_stages;
    }
}

int run_rounds(int32_t num_stages, int32_t num_micro_batches, const int32_t *depths, const struct times *times,
               struct figures *figures)
{
    struct arena arena = {.blocks = NULL};
    if (setjmp(arena.failed)) {
        release(&arena);
        return -1;
    }
    /* Inputs that wait: as many as a stage is deeper than the next one. */
    size_t row_size = 2 + 3 * (size_t)num_stages + (size_t)depths[0];
    struct rounds run = {
        .num_stages = num_stages, .count = num_micro_batches, .depths = depths, .times = times,
        .figures = figures, .row_size = row_size,
        .free = TAKE(&arena, num_stages, double), .link = TAKE(&arena, num_stages, double),
        .back_link = TAKE(&arena, num_stages, double), .done = TAKE(&arena, num_stages, int32_t),
        .arrived = TAKE(&arena, (size_t)num_stages * (depths[0] + 1), double),
        .spare = TAKE(&arena, depths[0] + 1, double), .room = depths[0] + 1,
        .before = TAKE(&arena, (num_stages + 1) * row_size, double),
        .row_sizes = TAKE(&arena, num_stages, int32_t),
    };
    figures->num_sent = 0;
    figures->sent_from = -1.0;
    run_all(&run);
    for (int32_t stage = 0; stage < num_stages; stage++) {
        figures->stage_end[stage] = figures->worker_end[stage] = run.free[stage];
        figures->busy[stage] = num_micro_batches * (times->forward[stage] + times->backward[stage]);
    }
    release(&arena);
    return 0;
}

/* --- stages of several replicas ----------------------------------------------------------------------------- */

/* Micro-batch k of a stage of n replicas runs on replica k mod n, each with its part of the depth and links of its
 * own. All rounds are run. */
struct replicated {
    int32_t num_stages, count;
    const int32_t *first, *depths;
    const struct times *times;
    struct figures *figures;
    double *free;      /* [workers] */
    int32_t *done;     /* [workers]: the next forward of each */
    int32_t *held;     /* [workers]: micro-batches that it may have in flight */
    int32_t *peer;     /* [workers]: the replica of the next stage that gets its next activation */
    int32_t *turn;     /* [stages]: the replica whose backward is next */
    double *links;     /* by edge, worker and peer */
    double *back_links;
    int32_t *edges;    /* [stages]: where the links of an edge begin */
    double *arrived;   /* [stages, count]; -1: not yet */
};

static double *link_of(const struct replicated *run, double *links, int32_t stage, int32_t r, int32_t peer)
{
    int32_t next = run->first[stage + 2] - run->first[stage + 1];
    return &links[run->edges[stage] + r * next + peer];
}

/* The forwards of a replica up to its depth, where `next` is its next backward; 0 if one waits for a message that is not
 * there. */
static int run_own_forwards(struct replicated *run, int32_t stage, int32_t r, int32_t next)
{
    int32_t n = run->first[stage + 1] - run->first[stage], worker = run->first[stage] + r;
    int32_t upto = next + run->held[worker] * n;
    int32_t peers = stage + 1 < run->num_stages ? run->first[stage + 2] - run->first[stage + 1] : 1;
    for (int32_t m = run->done[worker]; m < upto && m < run->count; m += n) {
        double now = run->free[worker], ready = run->arrived[(size_t)stage * run->count + m];
        if (ready < 0.0)
            return 0;
        now = ready > now ? ready : now;
        if (now < run->figures->stage_start[stage])
            run->figures->stage_start[stage] = now;
        run->free[worker] = now = now + run->times->forward[stage];
        run->done[worker] = m + n;
        if (stage + 1 == run->num_stages)
            continue;
        int32_t peer = run->peer[worker];
        double *link = link_of(run, run->links, stage, r, peer), start = *link > now ? *link : now;
        *link = start + run->times->send_activation[stage];
        run->arrived[(size_t)(stage + 1) * run->count + m] = *link;
        log_message(run->figures, start, *link, worker, run->first[stage + 1] + peer);
        for (peer += n; peer >= peers;)
            peer -= peers;
        run->peer[worker] = peer;
    }
    return 1;
}

static void run_backwards(struct replicated *run)
{
    double ready = 0.0;
    for (int32_t stage = run->num_stages - 1; stage >= 0; stage--) {
        int32_t r = run->turn[stage], worker = run->first[stage] + r;
        double now = run->free[worker];
        run->free[worker] = now = (ready > now ? ready : now) + run->times->backward[stage];
        if (!stage)
            break;
        int32_t peer = run->turn[stage - 1];
        double *link = link_of(run, run->back_links, stage - 1, peer, r), start = *link > now ? *link : now;
        *link = ready = start + run->times->send_gradient[stage - 1];
        log_message(run->figures, start, ready, worker, run->first[stage - 1] + peer);
    }
}

static void prepare(struct replicated *run, struct arena *arena)
{
    int32_t stages = run->num_stages, links = 0;
    for (int32_t stage = 0; stage < stages; stage++) {
        int32_t n = run->first[stage + 1] - run->first[stage];
        run->edges[stage] = links;
        int32_t peers = stage + 1 < stages ? run->first[stage + 2] - run->first[stage + 1] : 0;
        links += n * peers;
        run->figures->stage_start[stage] = INFINITY;
        for (int32_t r = 0; r < n; r++) {
            int32_t held = run->depths[stage] > r ? (run->depths[stage] - r + n - 1) / n : 0;
            run->held[run->first[stage] + r] = held > 1 ? held : 1;
            run->done[run->first[stage] + r] = r;
            run->peer[run->first[stage] + r] = peers ? r % peers : 0;
        }
        for (int32_t m = 0; m < run->count; m++)
            run->arrived[(size_t)stage * run->count + m] = stage ? -1.0 : 0.0;
    }
    run->links = TAKE(arena, links, double);
    run->back_links = TAKE(arena, links, double);
}

static void read_figures(const struct replicated *run)
{
    for (int32_t stage = 0; stage < run->num_stages; stage++) {
        int32_t n = run->first[stage + 1] - run->first[stage];
        run->figures->stage_end[stage] = 0.0;
        for (int32_t r = 0; r < n; r++) {
            int32_t worker = run->first[stage] + r, own = run->count > r ? (run->count - r + n - 1) / n : 0;
            run->figures->worker_end[worker] = run->free[worker];
            run->figures->stage_end[stage] = max_of(run->figures->stage_end[stage], run->free[worker]);
            run->figures->busy[worker] = own * (run->times->forward[stage] + run->times->backward[stage]);
        }
    }
}

int run_replicated_rounds(int32_t num_stages, int32_t num_micro_batches, const int32_t *first, const int32_t *depths,
                          const struct times *times, struct figures *figures)
{
    struct arena arena = {.blocks = NULL};
    if (setjmp(arena.failed)) {
        release(&arena);
        return -1;
    }
    int32_t workers = first[num_stages], failed = 0;
    struct replicated run = {
        .num_stages = num_stages, .count = num_micro_batches, .first = first, .depths = depths, .times = times,
        .figures = figures, .free = TAKE(&arena, workers, double), .done = TAKE(&arena, workers, int32_t),
        .held = TAKE(&arena, workers, int32_t), .peer = TAKE(&arena, workers, int32_t),
        .turn = TAKE(&arena, num_stages, int32_t), .edges = TAKE(&arena, num_stages, int32_t),
        .arrived = TAKE(&arena, (size_t)num_stages * num_micro_batches, double),
    };
    prepare(&run, &arena);
    figures->num_sent = 0;
    figures->sent_from = -1.0;
    for (int32_t k = 0; k < num_micro_batches && !failed; k++) {
        for (int32_t stage = 0; stage < num_stages; stage++) {
            int32_t n = first[stage + 1] - first[stage], last = run.turn[stage];
            for (int32_t r = 0; !k && r < n; r++)
                failed |= !run_own_forwards(&run, stage, r, r);
            /* After the first round there is more to do for the replica alone whose backward was the last. */
            if (k) {
                failed |= !run_own_forwards(&run, stage, last, k - 1 + n);
                run.turn[stage] = last + 1 < n ? last + 1 : 0;
            }
        }
        run_backwards(&run);
    }
    read_figures(&run);
    release(&arena);
    return failed;
}
