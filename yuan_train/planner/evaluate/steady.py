"""1F1B in virtual time, without its schedule, and without the rounds that repeat.

Making a schedule, with every message in its place, takes ten times as long as running it. The order in which
a worker computes under 1F1B follows from the depths alone, and a message normally leaves when its step has
ended; so a pipeline can be run round by round. What a round adds to the times of the one before is a sum of
constants and maxima of them (a max-plus linear map): if some rounds have added the same number of seconds to
all of them, so will as many rounds after them, until a stage has no forward left.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yuan_train.planner.evaluate.simulator import StageTimes

SAME = 1e-12
"""Times are the same up to this part of the longest of them."""


Sent = tuple[float, float, int, int]
"""A message: start and end, in seconds from the step's start, and the stages of sender and receiver."""


class Rounds:
    """A pipeline of P stages, each with one worker, under 1F1B with overlapped sends.

    Before its backward k, stage s has run its forwards up to k + K_s - 1, K_s its depth. So in each round k
    everything awaited is known if forwards run from the first stage on, then backwards from the last one on.
    """

    def __init__(self, times: StageTimes, num_micro_batches: int, depths: Sequence[int]) -> None:
        self.count, self.depths, self.last = num_micro_batches, depths, len(depths) - 1
        self.forward, self.backward = times.forward_seconds, times.backward_seconds
        self.sends = (*times.send_activation_seconds, 0.0)
        self.returns = (0.0, *times.send_gradient_seconds)
        self.starts = [0.0] * (self.last + 1)
        """Of each stage's first forward."""
        self.free = [0.0] * (self.last + 1)
        """When each stage's worker, and each link down and up, has ended what it had to do so far."""
        self.link, self.back_link = self.free[:], self.free[:]
        self.done = [0] * (self.last + 1)
        """Forwards of each stage."""
        self.arrived: list[deque[float]] = [deque() for _ in depths]
        """When the inputs of its next forwards are there."""
        self.sent: list[Sent] = []
        """All messages that arrive later than `sent_from`."""
        self.sent_from = -1.0

    def run(self) -> None:
        """Run all rounds."""
        k, last_full = 0, self.count - max(self.depths)
        before: deque[list[float]] = deque(maxlen=len(self.depths))
        while k < self.count:
            self._run_round(k)
            if k < last_full:
                now = [*self.free, *self.link, *self.back_link, *(t for row in self.arrived for t in row)]
                num_rounds, seconds = _repeated(before, now)
                times = (last_full - k) // num_rounds if num_rounds else 0
                if times:
                    self._repeat(times * num_rounds, times * seconds)
                    k += times * num_rounds
                    before.clear()
                else:
                    before.appendleft(now)
            k += 1

    def _run_round(self, k: int) -> None:
        free, link, back_link, sent = self.free, self.link, self.back_link, self.sent
        for s, depth in enumerate(self.depths):
            upto = min(k + depth, self.count)
            for j in range(self.done[s], upto):
                now, ready = free[s], self.arrived[s].popleft() if s else 0.0
                now = ready if ready > now else now
                if not j:
                    self.starts[s] = now
                free[s] = now = now + self.forward[s]
                if s < self.last:
                    start = link[s] if link[s] > now else now
                    link[s] = end = start + self.sends[s]
                    self.arrived[s + 1].append(end)
                    sent.append((start, end, s, s + 1))
            self.done[s] = max(upto, self.done[s])
        ready = 0.0
        for s in range(self.last, -1, -1):
            now = free[s]
            free[s] = now = (ready if ready > now else now) + self.backward[s]
            if s:
                start = back_link[s] if back_link[s] > now else now
                back_link[s] = ready = start + self.returns[s]
                sent.append((start, ready, s, s - 1))

    def _repeat(self, num_rounds: int, seconds: float) -> None:
        """Add so many rounds, of so many seconds in all."""
        for row in (self.free, self.link, self.back_link, *self.arrived):
            for i, time in enumerate(row):
                row[i] = time + seconds
        self.done = [done + num_rounds for done in self.done]
        self.sent, self.sent_from = [], max(*self.link, *self.back_link)


def _repeated(before: Iterable[Sequence[float]], now: Sequence[float]) -> tuple[int, float]:
    """The least number of rounds that have added the same to all times, and what they added; 0 if none have.
    `before`: the times of the rounds before, the last one first."""
    most = SAME * max(now)
    for num_rounds, then in enumerate(before, start=1):
        added = now[0] - then[0]
        # A link that there is not stays at 0.
        if len(then) == len(now) and all(
            abs(b - a - added) <= most or not b for a, b in zip(then, now, strict=True)
        ):
            return num_rounds, added
    return 0, 0.0
