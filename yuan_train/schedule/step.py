"""One step of a schedule: a piece of compute, or one end of a message."""

from __future__ import annotations

from typing import Literal, NamedTuple

Kind = Literal[
    "forward",
    "backward",
    "backward_input",
    "backward_weight",
    "send_activation",
    "receive_activation",
    "send_gradient",
    "receive_gradient",
    "offload",
    "evict",
    "fetch",
    "page_in",
    "gradient_up",
    "gradient_down",
    "page_out",
]
COMPUTE: frozenset[Kind] = frozenset({"forward", "backward", "backward_input", "backward_weight"})
"""A `backward` computes all gradients. Split, it becomes `backward_input`, whose result the previous stage
waits for, and `backward_weight`, which no other step waits for."""
COPIES: frozenset[Kind] = frozenset({"offload", "evict", "fetch"})
"""Of what the forward of a part keeps, between the card and its host; see `copies.py`."""
PAGING: frozenset[Kind] = frozenset({"page_in", "gradient_up", "gradient_down", "page_out"})
"""Of the weights and gradients of a layer, between the card and its host; see `copies.py`."""


class Step(NamedTuple):
    """What `stage` does with `micro_batch`. A tuple, for steps are looked up with every one that is run.

    A receive is posted and does not wait; the compute step that needs the message waits for it. A send starts
    when the compute step before it has ended, and does not wait either.
    """

    kind: Kind
    stage: int
    micro_batch: int
    part: int = -1
    """Of the stage, where a program is in parts: a forward or backward of it, or a copy; -1: the whole."""

    @property
    def is_compute(self) -> bool:
        """Whether the step is a forward, a backward or a part of one, not a message."""
        return self.kind in COMPUTE

    def __str__(self) -> str:
        part = f"part {self.part} of " if self.part >= 0 else ""
        return f"{self.kind.replace('_', ' ')} of {part}micro-batch {self.micro_batch} on stage {self.stage}"


RECEIVE_OF: dict[Kind, tuple[Kind, int]] = {
    "send_activation": ("receive_activation", 1),
    "send_gradient": ("receive_gradient", -1),
}
"""The other end of each kind of send: the kind of receive, and the offset of its stage."""

SEND_OF: dict[Kind, tuple[Kind, int]] = {
    receive: (send, -offset) for send, (receive, offset) in RECEIVE_OF.items()
}
"""The same for each kind of receive."""


def receive_of(send: Step) -> Step:
    """The receive at the other end of a send."""
    kind, offset = RECEIVE_OF[send.kind]
    return Step(kind, send.stage + offset, send.micro_batch)


def send_of(receive: Step) -> Step:
    """The send at the other end of a receive."""
    kind, offset = SEND_OF[receive.kind]
    return Step(kind, receive.stage + offset, receive.micro_batch)


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
