/* Where the sends of a schedule stand, and its operations in an order in which each follows what it waits for:
 * `yuan_train/schedule/schedules.py` and `evaluate/simulator.py`.
 *
 * A virtual run of the compute steps, in which every step blocks its worker: a worker goes on when its messages have
 * been taken over by their receivers.
 */
#include "programs.h"

static const int32_t units_of[] = {[FORWARD] = 2, [BACKWARD] = 4, [BACKWARD_INPUT] = 2, [BACKWARD_WEIGHT] = 2};

/* One message; positions are indices into the compute steps of a worker. */
struct letter {
    int32_t receiver, post_from; /* the first step before which its receive may be posted */
    int32_t kind, stage, micro_batch, sender; /* of the send */
    int32_t is_sent, arrives_at;
};

/* A send that stands before compute step `position` of its worker. */
struct placed {
    int32_t position, letter;
};

struct mail {
    const struct layout *layout;
    const struct program *programs;
    int32_t message_units;
    struct letter *letters;
    int32_t **inputs, **outputs; /* by worker and position, a letter; -1: none */
    int32_t *next, *is_running, *ends_at, *unsent; /* [workers] */
    int32_t **expected, *num_expected;             /* by receiver: letters made and not taken over */
    struct placed **placed;                        /* by sender, in the order of their times */
    int32_t *num_placed;
    uint64_t *due; /* [TURNS, words]: a bit for each worker whose step ends, or message arrives, at such a time */
    int32_t words;
};

/* Times of events that lie ahead: more than any step or message takes. */
enum { TURNS = 8 };

/* Whether two adjacent stages have different workers for a micro-batch, so that a message is sent. */
static int crosses(const struct layout *layout, int32_t left, int32_t micro_batch)
{
    if (left < 0 || left + 1 >= layout->num_stages)
        return 0;
    return worker_of(layout, left, micro_batch) != worker_of(layout, left + 1, micro_batch);
}

/* The number of a message: that of an activation into a stage, or of a gradient into it. */
static int32_t letter_number(const struct layout *layout, int is_activation, int32_t stage, int32_t m)
{
    return ((is_activation ? 0 : layout->num_stages) + stage) * layout->num_micro_batches + m;
}

static int32_t input_of(const struct layout *layout, struct step step)
{
    if (step.kind == FORWARD && crosses(layout, step.stage - 1, step.micro_batch))
        return letter_number(layout, 1, step.stage, step.micro_batch);
    int is_backward = step.kind == BACKWARD || step.kind == BACKWARD_INPUT;
    if (is_backward && crosses(layout, step.stage, step.micro_batch))
        return letter_number(layout, 0, step.stage, step.micro_batch);
    return -1;
}

static int32_t output_of(const struct layout *layout, struct step step)
{
    if (step.kind == FORWARD && crosses(layout, step.stage, step.micro_batch))
        return letter_number(layout, 1, step.stage + 1, step.micro_batch);
    int is_backward = step.kind == BACKWARD || step.kind == BACKWARD_INPUT;
    if (is_backward && crosses(layout, step.stage - 1, step.micro_batch))
        return letter_number(layout, 0, step.stage - 1, step.micro_batch);
    return -1;
}

static void find_letters(struct mail *mail, struct arena *arena)
{
    const struct layout *layout = mail->layout;
    int32_t *last_use = TAKE(arena, 2 * layout->num_stages, int32_t);
    for (int32_t worker = 0; worker < layout->num_workers; worker++) {
        struct program program = mail->programs[worker];
        memset(last_use, 0, sizeof(int32_t) * 2 * (size_t)layout->num_stages);
        mail->inputs[worker] = TAKE(arena, program.count, int32_t);
        mail->outputs[worker] = TAKE(arena, program.count, int32_t);
        int32_t received = 0, sent = 0;
        for (int32_t i = 0; i < program.count; i++) {
            struct step step = program.steps[i];
            int32_t input = mail->inputs[worker][i] = input_of(layout, step);
            int32_t output = mail->outputs[worker][i] = output_of(layout, step);
            if (input >= 0) {
                int32_t *last = &last_use[input / layout->num_micro_batches];
                mail->letters[input].receiver = worker;
                mail->letters[input].post_from = *last;
                *last = i;
                received++;
            }
            if (output >= 0) {
                struct letter *letter = &mail->letters[output];
                letter->kind = step.kind == FORWARD ? SEND_ACTIVATION : SEND_GRADIENT;
                letter->stage = step.stage;
                letter->micro_batch = step.micro_batch;
                letter->sender = worker;
                sent++;
            }
        }
        mail->expected[worker] = TAKE(arena, received, int32_t);
        mail->placed[worker] = TAKE(arena, sent, struct placed);
    }
}

static void push_event(struct mail *mail, int32_t time, int32_t worker)
{
    mail->due[time % TURNS * mail->words + worker / 64] |= 1ull << worker % 64;
}

/* The first worker that has an event from a time on, which becomes that of the event; -1: there is none. */
static int32_t pop_event(struct mail *mail, int32_t *now)
{
    for (int32_t time = *now; time < *now + TURNS; time++) {
        uint64_t *row = mail->due + time % TURNS * mail->words;
        for (int32_t word = 0; word < mail->words; word++)
            if (row[word]) {
                int32_t bit = __builtin_ctzll(row[word]);
                row[word] &= row[word] - 1;
                *now = time;
                return 64 * word + bit;
            }
    }
    return -1;
}

/* Start the messages to a worker whose receives may be posted by now. */
static void take_over(struct mail *mail, int32_t receiver, int32_t now)
{
    int32_t left = 0, *expected = mail->expected[receiver];
    for (int32_t i = 0; i < mail->num_expected[receiver]; i++) {
        struct letter *letter = &mail->letters[expected[i]];
        if (letter->post_from > mail->next[receiver]) {
            expected[left++] = expected[i];
            continue;
        }
        int32_t sender = letter->sender;
        letter->is_sent = 1;
        letter->arrives_at = now + mail->message_units;
        struct placed placed = {mail->next[sender], expected[i]};
        mail->placed[sender][mail->num_placed[sender]++] = placed;
        mail->unsent[sender]--;
        push_event(mail, letter->arrives_at, receiver);
        /* The sender may go on at once. */
        push_event(mail, now, sender);
    }
    mail->num_expected[receiver] = left;
}

static void end_step(struct mail *mail, int32_t worker, int32_t now)
{
    mail->is_running[worker] = 0;
    int32_t made = mail->outputs[worker][mail->next[worker]++];
    if (made >= 0) {
        int32_t receiver = mail->letters[made].receiver;
        mail->unsent[worker]++;
        mail->expected[receiver][mail->num_expected[receiver]++] = made;
        take_over(mail, receiver, now);
    }
    take_over(mail, worker, now);
}

/* Start a worker's next step if it can start, and say so; with `overrun` although it has messages. */
static int go_on(struct mail *mail, int32_t worker, int32_t now, int overrun)
{
    int32_t position = mail->next[worker];
    if (mail->is_running[worker] || position == mail->programs[worker].count ||
        (mail->unsent[worker] && !overrun))
        return 0;
    int32_t needed = mail->inputs[worker][position];
    if (needed >= 0 && (!mail->letters[needed].is_sent || mail->letters[needed].arrives_at > now))
        return 0;
    mail->is_running[worker] = 1;
    mail->ends_at[worker] = now + units_of[mail->programs[worker].steps[position].kind];
    push_event(mail, mail->ends_at[worker], worker);
    return 1;
}

/* All workers wait: let the last one that only waits for a receiver take its next step. */
static int overrun(struct mail *mail, int32_t now)
{
    for (int32_t worker = mail->layout->num_workers - 1; worker >= 0; worker--)
        if (go_on(mail, worker, now, 1))
            return 1;
    return 0;
}

static void run_virtually(struct mail *mail)
{
    int32_t now = 0;
    for (int32_t worker = 0; worker < mail->layout->num_workers; worker++)
        go_on(mail, worker, 0, 0);
    for (;;) {
        int32_t worker = pop_event(mail, &now);
        if (worker < 0 && !overrun(mail, now))
            return;
        if (worker < 0)
            continue;
        if (mail->is_running[worker] && mail->ends_at[worker] == now)
            end_step(mail, worker, now);
        go_on(mail, worker, now, 0);
    }
}

/* The walk through the programs that puts their operations in order. */
struct walk {
    const struct mail *mail;
    struct schedule *schedule;
    int32_t *position, *sends; /* [workers]: the next compute step, the next of `placed` */
    int32_t *ready, num_ready, *is_ready;
    char *is_sent; /* [letters] */
};

static void add_operation(struct schedule *schedule, struct operation operation)
{
    schedule->operations[schedule->num_operations++] = operation;
}

static void send_letter(struct walk *walk, int32_t worker)
{
    int32_t number = walk->mail->placed[worker][walk->sends[worker]++].letter;
    struct letter letter = walk->mail->letters[number];
    struct operation send = {letter.kind, letter.stage, letter.micro_batch, worker, letter.receiver, 0, 0};
    add_operation(walk->schedule, send);
    walk->is_sent[number] = 1;
    if (!walk->is_ready[letter.receiver]) {
        walk->is_ready[letter.receiver] = 1;
        walk->ready[walk->num_ready++] = letter.receiver;
    }
}

/* Go through a worker's program up to a message that was not sent yet. */
static void walk_on(struct walk *walk, int32_t worker)
{
    const struct mail *mail = walk->mail;
    for (;;) {
        int32_t *position = &walk->position[worker];
        if (walk->sends[worker] < mail->num_placed[worker] &&
            mail->placed[worker][walk->sends[worker]].position <= *position) {
            send_letter(walk, worker);
            continue;
        }
        if (*position == mail->programs[worker].count)
            return;
        struct step step = mail->programs[worker].steps[*position];
        int32_t input = mail->inputs[worker][*position];
        if (input >= 0 && !walk->is_sent[input])
            return;
        struct operation compute = {step.kind, step.stage, step.micro_batch, worker, -1, input >= 0, 0};
        add_operation(walk->schedule, compute);
        ++*position;
    }
}

static int put_in_order(const struct mail *mail, struct schedule *schedule, struct arena *arena)
{
    int32_t count = mail->layout->num_workers, total = 0;
    struct walk walk = {
        mail, schedule, TAKE(arena, count, int32_t), TAKE(arena, count, int32_t),
        TAKE(arena, count, int32_t), count, TAKE(arena, count, int32_t),
        TAKE(arena, 2 * mail->layout->num_stages * mail->layout->num_micro_batches, char),
    };
    for (int32_t worker = 0; worker < count; worker++) {
        walk.ready[worker] = worker;
        walk.is_ready[worker] = 1;
        total += mail->programs[worker].count + mail->num_placed[worker];
    }
    schedule->operations = malloc((size_t)total * sizeof(struct operation) + 1);
    if (!schedule->operations)
        return -1;
    while (walk.num_ready) {
        int32_t worker = walk.ready[--walk.num_ready];
        walk.is_ready[worker] = 0;
        walk_on(&walk, worker);
    }
    for (int32_t worker = 0; worker < count; worker++)
        if (walk.position[worker] < mail->programs[worker].count)
            return -1;
    return 0;
}

int place_messages(const struct layout *layout, const struct program *programs, int32_t message_units,
                   struct schedule *schedule, struct arena *arena)
{
    int32_t count = layout->num_workers, letters = 2 * layout->num_stages * layout->num_micro_batches;
    int32_t words = (count + 63) / 64;
    struct mail mail = {
        .layout = layout, .programs = programs, .message_units = message_units,
        .letters = TAKE(arena, letters, struct letter),
        .inputs = TAKE(arena, count, int32_t *),     .outputs = TAKE(arena, count, int32_t *),
        .next = TAKE(arena, count, int32_t),         .is_running = TAKE(arena, count, int32_t),
        .ends_at = TAKE(arena, count, int32_t),      .unsent = TAKE(arena, count, int32_t),
        .expected = TAKE(arena, count, int32_t *),   .num_expected = TAKE(arena, count, int32_t),
        .placed = TAKE(arena, count, struct placed *), .num_placed = TAKE(arena, count, int32_t),
        .due = TAKE(arena, TURNS * words, uint64_t), .words = words,
    };
    find_letters(&mail, arena);
    run_virtually(&mail);
    return put_in_order(&mail, schedule, arena);
}

void number_links(struct schedule *schedule, struct arena *arena)
{
    int32_t count = schedule->num_workers;
    int32_t *numbers = TAKE(arena, (size_t)count * count, int32_t);
    schedule->num_links = schedule->num_messages = 0;
    for (int32_t i = 0; i < schedule->num_operations; i++) {
        struct operation *operation = &schedule->operations[i];
        if (operation->peer < 0)
            continue;
        int32_t *number = &numbers[(size_t)operation->worker * count + operation->peer];
        if (!*number)
            *number = ++schedule->num_links;
        operation->link = *number - 1;
        schedule->num_messages++;
    }
}
