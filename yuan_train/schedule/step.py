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
"""A `backward` is whole; or it is split into `backward_input`, whose result the stage before waits for, and
`backward_weight`, which nobody waits for."""


@dataclass(frozen=True, slots=True)
class Step:
    """What `stage` does with `micro_batch`.

    A receive only opens the door: it is posted and does not wait. The compute step that needs the message
    waits for it. A send starts when the compute before it has ended, and does not wait either.
    """

    kind: Kind
    stage: int
    micro_batch: int

    @property
    def is_compute(self) -> bool:
        return self.kind in COMPUTE

    def __str__(self) -> str:
        return f"{self.kind.replace('_', ' ')} of micro-batch {self.micro_batch} on stage {self.stage}"


Lane = tuple[Step, ...]
"""The steps of one worker, in the order in which it takes them."""

Table = tuple[Lane, ...]
"""One lane per worker: the whole schedule of a pipeline, as data."""

Workers = tuple[tuple[int, ...], ...]
"""For each stage its workers, one per replica, numbered from 0 over the pipeline.

Micro-batch m runs on worker m mod n of a stage's n. A worker of several stages has virtual stages; between
two of its own there is no message.
"""


def one_worker_each(num_stages: int) -> Workers:
    """The usual pipeline: stage s has worker s alone."""
    return tuple((stage,) for stage in range(num_stages))


def worker_of(workers: Workers, stage: int, micro_batch: int) -> int:
    """The worker that runs a micro-batch on a stage."""
    replicas = workers[stage]
    return replicas[micro_batch % len(replicas)]


def num_workers(workers: Workers) -> int:
    """Workers of a pipeline."""
    return 1 + max(worker for replicas in workers for worker in replicas)
