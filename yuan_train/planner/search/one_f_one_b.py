"""1F1B in virtual time, without its schedule: to judge a change of depth, layers or recompute at once.

Making a schedule, with every message in its place, takes ten times as long as running it. The order in which
a worker computes under 1F1B follows from the depths alone, and a message normally leaves when its step has
ended; so a pipeline can be run without its schedule. The simulator has the last word.
"""

from __future__ import annotations

from collections.abc import Sequence

from yuan_train.planner.evaluate.simulator import StageTimes
from yuan_train.planner.evaluate.steady import Rounds


def one_f_one_b_seconds(
    times: StageTimes, num_micro_batches: int, depths: Sequence[int], replicas: Sequence[int]
) -> float | None:
    """End of the last backward, in seconds, with overlapped sends; None if that takes the simulator, as it
    does for some mixes of replicas."""
    if max(replicas) > 1:
        return _with_replicas(times, num_micro_batches, depths, replicas)
    rounds = Rounds(times, num_micro_batches, depths)
    rounds.run()
    return max(rounds.free)


def _with_replicas(
    times: StageTimes, count: int, depths: Sequence[int], replicas: Sequence[int]
) -> float | None:
    """The same where micro-batch k of a stage of n replicas runs on replica k mod n, each with its part of
    the depth and links of its own."""
    last = len(depths) - 1
    forward, backward = times.forward_seconds, times.backward_seconds
    sends, returns = (*times.send_activation_seconds, 0.0), (0.0, *times.send_gradient_seconds)
    free = [[0.0] * n for n in replicas]
    held = [
        [max(len(range(r, depth, n)), 1) for r in range(n)] for depth, n in zip(depths, replicas, strict=True)
    ]
    links: dict[tuple[int, int, int], float] = {}
    back_links: dict[tuple[int, int, int], float] = {}
    done = [list(range(n)) for n in replicas]
    """The next forward of each replica."""
    arrived: list[list[float]] = [[-1.0 if s else 0.0] * count for s in range(last + 1)]
    for k in range(count):
        for s, n in enumerate(replicas):
            for r in range(n):
                # Its next backward is the first of its own from k on.
                upto = k + (r - k) % n + held[s][r] * n
                upto = upto if upto < count else count
                for j in range(done[s][r], upto, n):
                    now, ready = free[s][r], arrived[s][j]
                    if ready < 0.0:
                        return None
                    now = (ready if ready > now else now) + forward[s]
                    free[s][r] = now
                    if s < last:
                        edge = s, r, j % replicas[s + 1]
                        busy = links.get(edge, 0.0)
                        links[edge] = now = (busy if busy > now else now) + sends[s]
                        arrived[s + 1][j] = now
                    done[s][r] = j + n
        ready = 0.0
        for s in range(last, -1, -1):
            r = k % replicas[s]
            now = free[s][r]
            now = (ready if ready > now else now) + backward[s]
            free[s][r] = now
            if s:
                edge = s, r, k % replicas[s - 1]
                busy = back_links.get(edge, 0.0)
                back_links[edge] = ready = (busy if busy > now else now) + returns[s]
    return max(map(max, free))
