"""1F1B in virtual time, without its schedule: to judge a change of depth, layers or recompute at once.

Making a schedule, with every message in its place, takes ten times as long as running it. The order in which
a worker computes under 1F1B follows from the depths alone, and a message normally leaves when its step has
ended; so a pipeline can be run without its schedule. The simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence

from yuan_train.planner.evaluate.simulator import StageTimes


def one_f_one_b_seconds(
    times: StageTimes,
    num_micro_batches: int,
    depths: Sequence[int],
    replicas: Sequence[int],
    *,
    overlap: bool = True,
) -> float | None:
    """End of the last backward, in seconds; None if replicas or blocking sends need the simulator.

    Before its backward k, stage s has run its forwards up to k + K_s - 1, K_s its depth. That gives each
    round k an order in which everything awaited is known: forwards from the first stage on, then backwards
    from the last one on.
    """
    if not overlap or max(replicas) > 1:
        return None
    count = num_micro_batches
    last = len(depths) - 1
    forward, backward = times.forward_seconds, times.backward_seconds
    sends, returns = (*times.send_activation_seconds, 0.0), (0.0, *times.send_gradient_seconds)
    free = [0.0] * (last + 1)
    """When each stage's worker has ended its steps so far."""
    link, back_link = free[:], free[:]
    done = [0] * (last + 1)
    """Forwards that each stage has run."""
    arrived: list[list[float]] = [[0.0] * count, *([] for _ in range(last))]
    stages, backwards = range(last + 1), range(last, -1, -1)
    for k in range(count):
        for s in stages:
            upto = k + depths[s]
            upto = upto if upto < count else count
            for j in range(done[s], upto):
                now, ready = free[s], arrived[s][j]
                now = (ready if ready > now else now) + forward[s]
                free[s] = now
                if s < last:
                    busy = link[s]
                    link[s] = now = (busy if busy > now else now) + sends[s]
                    arrived[s + 1].append(now)
            done[s] = upto
        ready = 0.0
        for s in backwards:
            now = free[s]
            now = (ready if ready > now else now) + backward[s]
            free[s] = now
            busy = back_link[s]
            back_link[s] = ready = (busy if busy > now else now) + returns[s]
    return max(free)
