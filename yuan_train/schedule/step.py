"""One step of a schedule: a piece of compute, or one end of a message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
]
COMPUTE: frozenset[Kind] = frozenset({"forward", "backward", "backward_input", "backward_weight"})
"""A `backward` computes all gradients. Split, it becomes `backward_input`, whose result the previous stage
waits for, and `backward_weight`, which no other step waits for."""


@dataclass(frozen=True, slots=True)
class Step:
    """What `stage` does with `micro_batch`.

    A receive is posted and does not wait; the compute step that needs the message waits for it. A send starts
    when the compute step before it has ended, and does not wait either.
    """

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def is_compute(self) -> bool:
        """Whether the step is a forward, a backward or a part of one, not a message."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} of micro-batch {self.micro_batch} on stage {self.stage}"


RankProgram = tuple[Step, ...]
"""The steps of one worker, in the order in which it takes them."""

Schedule = tuple[RankProgram, ...]
"""The rank program of every worker of a pipeline, by worker."""

Workers = tuple[tuple[int, ...], ...]
"""For each stage its workers, one per replica, numbered from 0 over the pipeline.

Micro-batch m runs on worker m mod n of a stage's n. A worker with several stages runs virtual stages; between
two of them no message is sent.
"""


def one_worker_each(num_stages: int) -> Workers:
    """The workers of a pipeline whose stage s runs on worker s alone."""
    return tuple((stage,) for stage in range(num_stages))


def worker_of(workers: Workers, stage: int, micro_batch: int) -> int:
    """The worker that runs a micro-batch on a stage."""
    replicas = workers[stage]
    return replicas[micro_batch % len(replicas)]


def num_workers(workers: Workers) -> int:
    """The number of workers of a pipeline."""
    return 1 + max(worker for replicas in workers for worker in replicas)
