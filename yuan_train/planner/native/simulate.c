/* A schedule in virtual time, as `evaluate/simulator.py` defines it. */
#include <math.h>

#include "copies.h"
#include "memory.h"
#include "pipeline.h"

/* What a run keeps of workers, links and messages: the time when each is free, or there. */
struct clock {
    double *free, *links;
    double *activations, *gradients; /* [stages, micro-batches]: when the input of a step arrives */
};

static struct clock take_clock(const struct schedule *schedule, struct arena *arena)
{
    size_t inputs = (size_t)schedule->num_stages * schedule->num_micro_batches;
    struct clock clock = {
        TAKE(arena, schedule->num_workers, double), TAKE(arena, schedule->num_links, double),
        TAKE(arena, inputs, double), TAKE(arena, inputs, double),
    };
    return clock;
}

static double seconds_of(const struct times *times, const struct operation *operation)
{
    int32_t stage = operation->stage;
    switch (operation->kind) {
    case FORWARD:
        return times->forward[stage];
    case BACKWARD:
        return times->backward[stage];
    case BACKWARD_INPUT:
        return times->backward[stage] - times->weight[stage];
    case BACKWARD_WEIGHT:
        return times->weight[stage];
    case SEND_ACTIVATION:
        return times->send_activation[stage];
    default:
        return times->send_gradient[stage - 1];
    }
}

static void run_compute(const struct schedule *schedule, const struct operation *operation, struct clock *clock,
                        double seconds, struct copy_clock *copies, struct figures *figures)
{
    int32_t stage = operation->stage, worker = operation->worker;
    double start = clock->free[worker];
    if (operation->waits) {
        const double *inputs = operation->kind == FORWARD ? clock->activations : clock->gradients;
        double arrived = inputs[(size_t)stage * schedule->num_micro_batches + operation->micro_batch];
        start = arrived > start ? arrived : start;
    }
    double end = copies && copies[worker].placement ? run_parts(&copies[worker], start, seconds) : start + seconds;
    clock->free[worker] = figures->worker_end[worker] = end;
    figures->busy[worker] += seconds;
    if (end > figures->stage_end[stage])
        figures->stage_end[stage] = end;
    if (start < figures->stage_start[stage])
        figures->stage_start[stage] = start;
}

static void run_send(const struct schedule *schedule, const struct operation *operation,
                     struct clock *clock, double seconds, int sends, struct figures *figures)
{
    double start = clock->free[operation->worker], *link = &clock->links[operation->link];
    start = *link > start ? *link : start;
    if (operation->waits && clock->free[operation->peer] > start)
        start = clock->free[operation->peer];
    double end = start + seconds;
    *link = end;
    int is_activation = operation->kind == SEND_ACTIVATION;
    size_t target = (size_t)(operation->stage + (is_activation ? 1 : -1));
    double *inputs = is_activation ? clock->activations : clock->gradients;
    inputs[target * schedule->num_micro_batches + operation->micro_batch] = end;
    if (sends != OVERLAPPED)
        clock->free[operation->worker] = end;
    if (operation->waits)
        clock->free[operation->peer] = end;
    log_message(figures, start, end, operation->worker, operation->peer);
}

static void run_operations(const struct schedule *schedule, const struct times *times, int sends,
                           struct clock *clock, struct figures *figures)
{
    for (int32_t stage = 0; stage < schedule->num_stages; stage++) {
        figures->stage_start[stage] = INFINITY;
        figures->stage_end[stage] = 0.0;
    }
    for (int32_t worker = 0; worker < schedule->num_workers; worker++)
        clock->free[worker] = figures->busy[worker] = figures->worker_end[worker] = 0.0;
    for (int32_t link = 0; link < schedule->num_links; link++)
        clock->links[link] = 0.0;
    for (int32_t i = 0; i < schedule->num_operations; i++) {
        const struct operation *operation = &schedule->operations[i];
        double seconds = seconds_of(times, operation);
        if (operation->peer < 0)
            run_compute(schedule, operation, clock, seconds, times->clocks, figures);
        else
            run_send(schedule, operation, clock, seconds, sends, figures);
    }
}

int run_schedule(const struct schedule *schedule, const struct times *times, int sends,
                 struct figures *figures)
{
    struct arena arena = {.blocks = NULL};
    if (setjmp(arena.failed)) {
        release(&arena);
        return -1;
    }
    struct clock clock = take_clock(schedule, &arena);
    figures->num_sent = 0;
    figures->sent_from = -1.0;
    run_operations(schedule, times, sends, &clock, figures);
    release(&arena);
    return 0;
}
