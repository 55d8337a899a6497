/* The compute steps of the named schedules, as `yuan_train/schedule/schedules.py` and `list_scheduling.py` have
 * them. */
#include "programs.h"

/* Units of a message in the virtual run that places it, as in `schedule/schedules.py`. */
enum { FAST_MESSAGE = 1, SLOW_MESSAGE = 3 };

static int32_t least(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static void add_step(struct program *program, int32_t kind, int32_t stage, int32_t micro_batch)
{
    struct step step = {kind, stage, micro_batch};
    program->steps[program->count++] = step;
}

/* Empty programs with room for all steps. */
static struct program *take_programs(const struct layout *layout, int32_t steps_each, struct arena *arena)
{
    struct program *programs = TAKE(arena, layout->num_workers, struct program);
    int32_t *counts = TAKE(arena, layout->num_workers, int32_t);
    for (int32_t stage = 0; stage < layout->num_stages; stage++)
        for (int32_t r = 0; r < num_replicas(layout, stage); r++) {
            int32_t own = (layout->num_micro_batches - r + num_replicas(layout, stage) - 1) /
                          num_replicas(layout, stage);
            counts[layout->workers[layout->first[stage] + r]] += own > 0 ? own * steps_each : 0;
        }
    for (int32_t worker = 0; worker < layout->num_workers; worker++)
        programs[worker].steps = TAKE(arena, counts[worker], struct step);
    return programs;
}

/* Forwards of a replica up to its depth, then one forward and one backward in turns; with `depth` of all
 * micro-batches, GPipe. */
static void warm_up_and_alternate(const struct layout *layout, int32_t stage, int32_t r, int32_t depth,
                                  struct program *program)
{
    int32_t n = num_replicas(layout, stage), m = layout->num_micro_batches;
    int32_t own = m > r ? (m - r + n - 1) / n : 0, begun = depth > r ? (depth - r + n - 1) / n : 0;
    int32_t warm_up = least(begun > 1 ? begun - 1 : 0, own);
    for (int32_t i = 0; i < warm_up; i++)
        add_step(program, FORWARD, stage, r + i * n);
    for (int32_t i = 0; i < own - warm_up; i++) {
        add_step(program, FORWARD, stage, r + (warm_up + i) * n);
        add_step(program, BACKWARD, stage, r + i * n);
    }
    for (int32_t i = own - warm_up; i < own; i++)
        add_step(program, BACKWARD, stage, r + i * n);
}

static struct program *one_f_one_b(const struct layout *layout, struct arena *arena)
{
    struct program *programs = take_programs(layout, 2, arena);
    for (int32_t stage = 0; stage < layout->num_stages; stage++) {
        int32_t depth = layout->depths ? layout->depths[stage]
                                       : layout->first[layout->num_stages] - layout->first[stage];
        for (int32_t r = 0; r < num_replicas(layout, stage); r++)
            warm_up_and_alternate(layout, stage, r, depth,
                                  &programs[layout->workers[layout->first[stage] + r]]);
    }
    return programs;
}

static struct program *gpipe(const struct layout *layout, struct arena *arena)
{
    struct program *programs = take_programs(layout, 2, arena);
    for (int32_t kind = FORWARD; kind <= BACKWARD; kind++)
        for (int32_t stage = 0; stage < layout->num_stages; stage++)
            for (int32_t m = 0; m < layout->num_micro_batches; m++)
                add_step(&programs[worker_of(layout, stage, m)], kind, stage, m);
    return programs;
}

/* Step i of a worker with one stage in each round: micro-batches in groups as many as workers. */
static struct step looped_step(const struct layout *layout, int32_t worker, int32_t i, int32_t kind)
{
    int32_t count = layout->num_workers, rounds = layout->num_stages / count;
    int32_t group = i / (count * rounds), round = i % (count * rounds) / count;
    if (kind == BACKWARD)
        round = rounds - 1 - round;
    struct step step = {kind, worker + round * count, group * count + i % count};
    return step;
}

static struct program *looped(const struct layout *layout, struct arena *arena)
{
    struct program *programs = take_programs(layout, 2, arena);
    int32_t count = layout->num_workers, rounds = layout->num_stages / count;
    int32_t steps = rounds * layout->num_micro_batches;
    for (int32_t worker = 0; worker < count; worker++) {
        struct step *next = programs[worker].steps;
        int32_t warm_up = least(2 * (count - worker - 1) + (rounds - 1) * count, steps);
        for (int32_t i = 0; i < steps + warm_up; i++) {
            if (i < steps)
                *next++ = looped_step(layout, worker, i, FORWARD);
            if (i >= warm_up)
                *next++ = looped_step(layout, worker, i - warm_up, BACKWARD);
        }
        programs[worker].count = 2 * steps;
    }
    return programs;
}

/* One run of the list scheduler: whenever a worker is free, it takes the most urgent step that is ready. */
struct scheduler {
    const struct layout *layout;
    struct program *programs;
    struct heap *forwards, *backwards, *weights; /* [workers]: keys of steps that are ready */
    int32_t *caps, *alive;                       /* [workers]: activations that it may hold, and holds */
    int32_t *free_at, *is_running;               /* [workers] */
    int32_t group, is_split;                     /* micro-batches of a group; 0: the deepest stage first */
};

static int64_t forward_key(const struct scheduler *run, int32_t stage, int32_t m)
{
    int64_t stages = run->layout->num_stages, count = run->layout->num_micro_batches;
    if (!run->group)
        return (stages - 1 - stage) * count + m;
    return (m / run->group * stages + stage) * count + m;
}

static int64_t backward_key(const struct scheduler *run, int32_t stage, int32_t m)
{
    int64_t stages = run->layout->num_stages, count = run->layout->num_micro_batches;
    if (!run->group)
        return m * stages + stages - 1 - stage;
    return (m / run->group * stages + stages - 1 - stage) * count + m;
}

static struct step pop_step(struct scheduler *run, int32_t worker, int32_t kind)
{
    int32_t stages = run->layout->num_stages, count = run->layout->num_micro_batches;
    struct step step = {kind, 0, 0};
    if (kind == FORWARD) {
        int64_t key = pop(&run->forwards[worker]);
        step.micro_batch = (int32_t)(key % count);
        step.stage = (int32_t)(key / count % stages);
        if (!run->group)
            step.stage = stages - 1 - step.stage;
    } else if (kind == BACKWARD_WEIGHT || !run->group) {
        int64_t key = pop(kind == BACKWARD_WEIGHT ? &run->weights[worker] : &run->backwards[worker]);
        step.micro_batch = (int32_t)(key / stages);
        step.stage = (int32_t)(stages - 1 - key % stages);
    } else {
        int64_t key = pop(&run->backwards[worker]);
        step.micro_batch = (int32_t)(key % count);
        step.stage = (int32_t)(stages - 1 - key / count % stages);
    }
    return step;
}

/* The step that a free worker takes, if there is one. */
static int take_step(struct scheduler *run, int32_t worker, int32_t now)
{
    int32_t kind;
    if (run->backwards[worker].count)
        kind = run->is_split ? BACKWARD_INPUT : BACKWARD;
    else if (run->forwards[worker].count && run->alive[worker] < run->caps[worker])
        kind = FORWARD;
    else if (run->weights[worker].count)
        kind = BACKWARD_WEIGHT;
    else
        return 0;
    struct program *program = &run->programs[worker];
    program->steps[program->count++] = pop_step(run, worker, kind);
    run->alive[worker] += kind == FORWARD;
    run->free_at[worker] = now + (kind == BACKWARD ? 2 : 1);
    run->is_running[worker] = 1;
    return 1;
}

/* Make the steps ready that depend on a worker's last one, and release what it held. */
static void complete(struct scheduler *run, int32_t worker)
{
    const struct layout *layout = run->layout;
    struct step step = run->programs[worker].steps[run->programs[worker].count - 1];
    int32_t stage = step.stage, m = step.micro_batch;
    run->is_running[worker] = 0;
    if (step.kind == FORWARD) {
        if (stage == layout->num_stages - 1)
            push(&run->backwards[worker], backward_key(run, stage, m));
        else
            push(&run->forwards[worker_of(layout, stage + 1, m)], forward_key(run, stage + 1, m));
        return;
    }
    if (step.kind != BACKWARD_WEIGHT && stage > 0)
        push(&run->backwards[worker_of(layout, stage - 1, m)], backward_key(run, stage - 1, m));
    if (step.kind == BACKWARD_INPUT)
        push(&run->weights[worker],
             (int64_t)m * layout->num_stages + layout->num_stages - 1 - stage);
    else
        run->alive[worker]--;
}

static int32_t first_completion(const struct scheduler *run)
{
    int32_t now = INT32_MAX;
    for (int32_t worker = 0; worker < run->layout->num_workers; worker++)
        if (run->is_running[worker])
            now = least(now, run->free_at[worker]);
    return now;
}

static void run_scheduler(struct scheduler *run)
{
    const struct layout *layout = run->layout;
    int64_t remaining = (int64_t)layout->num_stages * layout->num_micro_batches * (run->is_split ? 3 : 2);
    for (int32_t now = 0; remaining;) {
        int32_t running = 0;
        for (int32_t worker = 0; worker < layout->num_workers; worker++) {
            if (!run->is_running[worker])
                remaining -= take_step(run, worker, now);
            running += run->is_running[worker];
        }
        if (!running) {
            /* Every worker is held up by its cap: raise those with a forward that is ready. */
            for (int32_t worker = 0; worker < layout->num_workers; worker++)
                run->caps[worker] += run->forwards[worker].count > 0;
            continue;
        }
        now = first_completion(run);
        for (int32_t worker = 0; worker < layout->num_workers; worker++)
            if (run->is_running[worker] && run->free_at[worker] == now)
                complete(run, worker);
    }
}

/* How many stages each worker has. */
static int32_t *stages_of_workers(const struct layout *layout, struct arena *arena)
{
    int32_t *counts = TAKE(arena, layout->num_workers, int32_t);
    for (int32_t i = 0; i < layout->first[layout->num_stages]; i++)
        counts[layout->workers[i]]++;
    return counts;
}

static struct program *list_scheduled(const struct layout *layout, int32_t is_split, int32_t group,
                                      int32_t *caps, struct arena *arena)
{
    int32_t count = layout->num_workers, steps_each = is_split ? 3 : 2;
    struct scheduler run = {
        .layout = layout, .caps = caps, .group = group, .is_split = is_split,
        .programs = take_programs(layout, steps_each, arena),
        .forwards = TAKE(arena, count, struct heap), .backwards = TAKE(arena, count, struct heap),
        .weights = TAKE(arena, count, struct heap),  .alive = TAKE(arena, count, int32_t),
        .free_at = TAKE(arena, count, int32_t),      .is_running = TAKE(arena, count, int32_t),
    };
    int32_t *stages_of = stages_of_workers(layout, arena);
    for (int32_t worker = 0; worker < count; worker++) {
        int32_t most = stages_of[worker] * layout->num_micro_batches;
        run.forwards[worker] = take_heap(arena, most);
        run.backwards[worker] = take_heap(arena, most);
        run.weights[worker] = take_heap(arena, is_split ? most : 0);
    }
    for (int32_t m = 0; m < layout->num_micro_batches; m++)
        push(&run.forwards[worker_of(layout, 0, m)], forward_key(&run, 0, m));
    run_scheduler(&run);
    return run.programs;
}

static struct program *zero_bubble(const struct layout *layout, struct arena *arena)
{
    int32_t *caps = stages_of_workers(layout, arena);
    for (int32_t worker = 0; worker < layout->num_workers; worker++)
        caps[worker] *= layout->num_workers;
    return list_scheduled(layout, 1, 0, caps, arena);
}

static struct program *interleaved(const struct layout *layout, struct arena *arena)
{
    int32_t count = layout->num_workers;
    int is_looped = layout->num_stages % count == 0 && layout->num_micro_batches % count == 0;
    for (int32_t stage = 0; stage < layout->num_stages; stage++)
        is_looped = is_looped && num_replicas(layout, stage) == 1 &&
                    layout->workers[layout->first[stage]] == stage % count;
    if (is_looped)
        return looped(layout, arena);
    int32_t *caps = stages_of_workers(layout, arena);
    for (int32_t worker = 0; worker < count; worker++)
        caps[worker] = (caps[worker] - 1) * count + 2 * (count - 1 - worker) + 1;
    return list_scheduled(layout, 0, count, caps, arena);
}

struct program *compute_programs(const struct layout *layout, struct arena *arena)
{
    switch (layout->name) {
    case ONE_F_ONE_B:
        return one_f_one_b(layout, arena);
    case GPIPE:
        return gpipe(layout, arena);
    case INTERLEAVED:
        return interleaved(layout, arena);
    default:
        return zero_bubble(layout, arena);
    }
}

/* Whether a stage is deeper than 1F1B needs, which is there for messages that take long. */
static int is_deep(const struct layout *layout)
{
    for (int32_t stage = 0; layout->depths && stage < layout->num_stages; stage++)
        if (layout->depths[stage] > layout->first[layout->num_stages] - layout->first[stage])
            return 1;
    return 0;
}

/* Whether a peak of a worker has at least as many micro-batches of each stage in flight; peaks that have fewer go. */
static int is_below_peak(struct schedule *schedule, int32_t worker, const int32_t *alive)
{
    int32_t stages = schedule->num_stages, left = schedule->num_peaks;
    /* Those of this worker are the last ones. */
    while (left > 0 && schedule->peak_workers[left - 1] == worker)
        left--;
    for (int32_t i = left; i < schedule->num_peaks; i++) {
        int32_t *peak = schedule->peaks + (size_t)i * stages, more = 0, fewer = 0;
        for (int32_t s = 0; s < stages; s++) {
            more |= alive[s] > peak[s];
            fewer |= alive[s] < peak[s];
        }
        if (!more)
            return 1;
        if (fewer)
            memmove(schedule->peaks + (size_t)left++ * stages, peak, sizeof(int32_t) * (size_t)stages);
    }
    schedule->num_peaks = left;
    return 0;
}

static void add_peak(struct schedule *schedule, int32_t worker, const int32_t *alive, struct arena *arena)
{
    if (is_below_peak(schedule, worker, alive))
        return;
    size_t count = (size_t)schedule->num_peaks, stages = (size_t)schedule->num_stages;
    int32_t *peaks = realloc(schedule->peaks, sizeof(int32_t) * (count + 1) * stages);
    if (peaks)
        schedule->peaks = peaks;
    int32_t *workers = realloc(schedule->peak_workers, sizeof(int32_t) * (count + 1));
    if (workers)
        schedule->peak_workers = workers;
    if (!peaks || !workers)
        longjmp(arena->failed, 1);
    memcpy(peaks + count * stages, alive, sizeof(int32_t) * stages);
    workers[schedule->num_peaks++] = worker;
}

/* The most micro-batches in flight on a worker of each stage: forward begun, backward not ended. Where workers have
 * several stages, also what each has of all of them before it turns from forwards to backwards. */
static void count_held(struct schedule *schedule, const struct layout *layout, const struct program *programs,
                       struct arena *arena)
{
    int32_t *alive = TAKE(arena, layout->num_stages, int32_t), *held = schedule->held;
    int is_virtual = layout->first[layout->num_stages] > layout->num_workers;
    int32_t last = layout->name == ZERO_BUBBLE ? BACKWARD_WEIGHT : BACKWARD;
    for (int32_t worker = 0; worker < layout->num_workers; worker++)
        for (int32_t i = 0; i < programs[worker].count; i++) {
            struct step step = programs[worker].steps[i];
            alive[step.stage] += (step.kind == FORWARD) - (step.kind == last);
            if (alive[step.stage] > held[step.stage])
                held[step.stage] = alive[step.stage];
            if (is_virtual && step.kind == FORWARD && programs[worker].steps[i + 1].kind != FORWARD)
                add_peak(schedule, worker, alive, arena);
        }
}

static void fill(struct schedule *schedule, const struct layout *layout, int counts, struct arena *arena)
{
    schedule->num_stages = layout->num_stages;
    schedule->num_workers = layout->num_workers;
    schedule->num_micro_batches = layout->num_micro_batches;
    schedule->held = calloc((size_t)layout->num_stages, sizeof(int32_t));
    if (!schedule->held)
        longjmp(arena->failed, 1);
    struct program *programs = compute_programs(layout, arena);
    count_held(schedule, layout, programs, arena);
    if (counts)
        return;
    if (place_messages(layout, programs, is_deep(layout) ? SLOW_MESSAGE : FAST_MESSAGE, schedule, arena))
        longjmp(arena->failed, 1);
    number_links(schedule, arena);
}

struct schedule *make_schedule(const struct layout *layout, int counts)
{
    struct arena arena = {.blocks = NULL};
    struct schedule *volatile made = calloc(1, sizeof(struct schedule));
    if (!made)
        return NULL;
    if (setjmp(arena.failed)) {
        release(&arena);
        free_schedule(made);
        return NULL;
    }
    fill(made, layout, counts, &arena);
    release(&arena);
    return made;
}

void free_schedule(struct schedule *schedule)
{
    if (schedule) {
        free(schedule->operations);
        free(schedule->held);
        free(schedule->peaks);
        free(schedule->peak_workers);
        free(schedule);
    }
}
