/* Schedules of a pipeline and their run in virtual time: what `yuan_train/schedule` and `evaluate/simulator.py`
 * define, to the bit, for a search that prices thousands of plans a second.
 *
 * Words as there: a stage is a part of the model, a worker a rank (or a group of them) that runs it; replica r of
 * n runs the micro-batches m with m mod n = r. Times are seconds.
 */
#ifndef YUAN_PIPELINE_H
#define YUAN_PIPELINE_H

#include <stdint.h>
#include <string.h>

enum kind { FORWARD, BACKWARD, BACKWARD_INPUT, BACKWARD_WEIGHT, SEND_ACTIVATION, SEND_GRADIENT };
enum schedule_name { ONE_F_ONE_B, GPIPE, INTERLEAVED, ZERO_BUBBLE };
enum sends { OVERLAPPED, BLOCKING };

/* Workers of each stage: those of stage s are workers[first[s]] to workers[first[s + 1] - 1]. */
struct layout {
    int32_t num_stages, num_workers, num_micro_batches, name;
    const int32_t *first;
    const int32_t *workers;
    const int32_t *depths; /* of each stage under 1F1B; NULL: as many as workers from it to the end */
};

/* A step of the simulation: compute, or the sending of a message. */
struct operation {
    int32_t kind, stage, micro_batch, worker;
    int32_t peer;  /* that receives the message; -1 for compute */
    int32_t waits; /* whether compute waits for a message, or a message for its receiver */
    int32_t link;  /* of a message: the number of its directed pair of workers */
};

/* Operations in an order in which each follows what it waits for. */
struct schedule {
    int32_t num_stages, num_workers, num_micro_batches, num_operations, num_links, num_messages;
    struct operation *operations; /* NULL until its messages are placed */
    int32_t *held; /* [stages]: the most micro-batches in flight on one of its workers */
    /* Where workers have several stages: micro-batches that one has in flight of each at once, [peaks, stages], but for
     * peaks with fewer of each; and its number. */
    int32_t *peaks, *peak_workers, num_peaks;
};

struct copy_clock;

/* Seconds of a micro-batch: compute of each stage; messages over edge s, between stages s and s + 1. */
struct times {
    const double *forward, *backward, *weight, *send_activation, *send_gradient;
    struct copy_clock *clocks; /* [workers]: of what they copy to hosts, see `copies.h`; NULL: nothing */
};

struct message {
    double start, end;
    int32_t worker, peer;
};

struct figures {
    double *stage_start, *stage_end; /* [stages]: start of the first forward, end of the last compute */
    double *busy, *worker_end;       /* [workers] */
    struct message *sent;            /* the last messages */
    int32_t room, num_sent;          /* room for so many, at least 2; 0: none are wanted */
    double sent_from;                /* `sent` has all messages that arrive later */
};

/* Keep a message; without room, let go of the older half of those that are kept. */
static inline void log_message(struct figures *figures, double start, double end, int32_t worker, int32_t peer)
{
    if (!figures->room)
        return;
    if (figures->num_sent == figures->room) {
        int32_t half = figures->room / 2;
        for (int32_t i = 0; i < half; i++)
            if (figures->sent[i].end > figures->sent_from)
                figures->sent_from = figures->sent[i].end;
        figures->num_sent -= half;
        memmove(figures->sent, figures->sent + half, (size_t)figures->num_sent * sizeof(struct message));
    }
    struct message message = {start, end, worker, peer};
    figures->sent[figures->num_sent++] = message;
}

/* NULL without memory, or if steps wait for each other in a circle; `counts` what is in flight alone, which takes a
 * tenth of the time. */
struct schedule *make_schedule(const struct layout *layout, int counts);
void free_schedule(struct schedule *schedule);

/* 0, or -1 without memory. */
int run_schedule(const struct schedule *schedule, const struct times *times, int sends,
                 struct figures *figures);
/* 1F1B with a worker for each stage, whose messages leave when their steps have ended; see `rounds.c`. */
int run_rounds(int32_t num_stages, int32_t num_micro_batches, const int32_t *depths,
               const struct times *times, struct figures *figures);

/* The same with replicas, those of stage s being workers first[s] to first[s + 1] - 1; 1 where a message leaves later,
 * so that it takes the schedule. */
int run_replicated_rounds(int32_t num_stages, int32_t num_micro_batches, const int32_t *first, const int32_t *depths,
                          const struct times *times, struct figures *figures);

#endif
