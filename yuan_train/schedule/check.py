"""Proof, before anything runs, that a table can run: messages pair up, and nothing waits for ever."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from yuan_train.schedule.step import Kind, Lane, Step, Table, Workers, one_worker_each, worker_of
from yuan_train.schedule.tables import receive_for

_MADE_BY: dict[Kind, tuple[Kind, ...]] = {
    "send_activation": ("forward",),
    "send_gradient": ("backward", "backward_input"),
}
_PAIRS: dict[Kind, tuple[Kind, int]] = {
    "send_activation": ("receive_activation", 1),
    "send_gradient": ("receive_gradient", -1),
}


def check_table(table: Table, workers: Workers | None = None, *, window: int = 0) -> None:
    """Raise ValueError, with every fault, unless the table is whole and free of deadlock.

    Whole: each stage takes each step of every micro-batch once, on the worker that `workers` says (by
    default stage s on worker s), forwards before backwards, sends after what they send; each send has its
    receive at the neighbour, in the same order at both ends. Free of deadlock even on a transport that holds
    no more than `window` messages of an edge whose receive is not yet posted; with 0 a send holds its worker
    until the receive is posted.
    """
    if workers is None:
        workers = one_worker_each(len(table))
    faults = [*_step_faults(table, workers), *_message_faults(table, workers)]
    if not faults:
        faults = list(_deadlocks(table, workers, window))
    if faults:
        raise ValueError("\n".join(faults))


def peak_in_flight(lane: Lane, stage: int | None = None) -> int:
    """Most micro-batches (of one virtual stage, if given) whose forward has begun and whose backward has not
    ended, the weights' part included."""
    ends: Kind = "backward_weight" if any(step.kind == "backward_weight" for step in lane) else "backward"
    alive = peak = 0
    for step in lane:
        if stage is not None and step.stage != stage:
            continue
        if step.kind == "forward":
            alive += 1
            peak = max(peak, alive)
        elif step.kind == ends:
            alive -= 1
    return peak


def _step_faults(table: Table, workers: Workers) -> Iterator[str]:
    steps = [step for lane in table for step in lane]
    ways = {step.kind for step in steps}
    micro_batches = {step.micro_batch for step in steps if step.kind == "forward"}
    for worker, lane in enumerate(table):
        done: set[Step] = set()
        for step in lane:
            if step.stage >= len(workers) or worker_of(workers, step.stage, step.micro_batch) != worker:
                yield f"lane {worker} holds a {step}"
            if step in done:
                yield f"the {step} stands twice"
            yield from _order_faults(step, done)
            done.add(step)
    done_by_kind = {
        kind: Counter((step.stage, step.micro_batch) for step in steps if step.kind == kind) for kind in ways
    }
    for stage in range(len(workers)):
        forwards = {m for s, m in done_by_kind.get("forward", ()) if s == stage}
        for kind in ways & {"backward", "backward_input", "backward_weight"}:
            backwards = {m for s, m in done_by_kind[kind] if s == stage}
            if forwards != backwards:
                yield f"stage {stage}: micro-batches {sorted(forwards ^ backwards)} go only one way"
        if missing := micro_batches - forwards:
            yield f"stage {stage}: no forward of micro-batches {sorted(missing)}, which other stages have"


def _order_faults(step: Step, done: set[Step]) -> Iterator[str]:
    if (
        step.kind in ("backward", "backward_input")
        and Step("forward", step.stage, step.micro_batch) not in done
    ):
        yield f"the {step} stands before its forward"
    if step.kind == "backward_weight" and Step("backward_input", step.stage, step.micro_batch) not in done:
        yield f"the {step} stands before its backward input"
    makers = _MADE_BY.get(step.kind, ())
    if makers and not any(Step(kind, step.stage, step.micro_batch) in done for kind in makers):
        yield f"the {step} stands before the {makers[0]} whose result it sends"


def _message_faults(table: Table, workers: Workers) -> Iterator[str]:
    sent, received = _messages(table, workers, _PAIRS), _messages(table, workers, _receives())
    for edge in sorted(sent.keys() | received.keys()):
        kind, stage, sender, receiver = edge
        there = sent.get(edge, []), received.get(edge, [])
        where = f"{kind} of stage {stage} from worker {sender} to worker {receiver}"
        if Counter(there[0]) != Counter(there[1]):
            yield f"{where}: sent {there[0]}, received {there[1]}"
        elif there[0] != there[1]:
            yield f"{where}: sent in the order {there[0]}, received in the order {there[1]}"
    for lane in table:
        before: set[Step] = set()
        whole = set(lane)
        for step in lane:
            before.add(step)
            needed = receive_for(step, workers)
            if needed is not None and needed not in whole:
                yield f"the {step} has no message to work on"
            elif needed is not None and needed not in before:
                yield f"the {needed} is posted after the {step} that needs it"


def _receives() -> dict[Kind, tuple[Kind, int]]:
    return {receive: (send, -offset) for send, (receive, offset) in _PAIRS.items()}


def _messages(
    table: Table, workers: Workers, kinds: dict[Kind, tuple[Kind, int]]
) -> dict[tuple[str, int, int, int], list[int]]:
    """Micro-batches by edge (kind of send, sending stage, sending worker, receiving worker), in order."""
    found: dict[tuple[str, int, int, int], list[int]] = {}
    for worker, lane in enumerate(table):
        for step in lane:
            if step.kind not in kinds:
                continue
            other, offset = kinds[step.kind]
            peer_stage = step.stage + offset
            inside = 0 <= peer_stage < len(workers)
            peer = worker_of(workers, peer_stage, step.micro_batch) if inside else -1
            if step.kind.startswith("send"):
                edge = (step.kind, step.stage, worker, peer)
            else:
                edge = (other, peer_stage, peer, worker)
            found.setdefault(edge, []).append(step.micro_batch)
    return found


@dataclass
class _Progress:
    """How far each lane has come on a transport that holds `window` messages of an edge."""

    table: Table
    workers: Workers
    window: int
    posted: set[Step] = field(default_factory=set[Step])
    done: set[Step] = field(default_factory=set[Step])
    under_way: dict[tuple[Kind, int, int], list[Step]] = field(
        default_factory=dict[tuple[Kind, int, int], list[Step]]
    )

    def waits_for(self, step: Step, worker: int) -> Step | None:
        """What must happen before a worker can take a step; None if nothing."""
        if step.kind in _PAIRS:
            pending = [s for s in self.under_way.get((step.kind, step.stage, worker), ()) if self._open(s)]
            pending = [*pending, step] if self._open(step) else pending
            return self._receive_of(pending[0]) if len(pending) > self.window else None
        if step.kind == "forward" and step.stage > 0:
            before: tuple[Kind, Kind, int] = ("send_activation", "forward", step.stage - 1)
        elif step.kind in ("backward", "backward_input") and step.stage < len(self.workers) - 1:
            before = ("send_gradient", step.kind, step.stage + 1)
        else:
            return None
        send, made, stage = before
        crosses = receive_for(step, self.workers) is not None
        needed = Step(send if crosses else made, stage, step.micro_batch)
        return None if needed in self.done else needed

    def take(self, step: Step, worker: int) -> None:
        if step.kind.startswith("receive"):
            self.posted.add(step)
        else:
            self.done.add(step)
        if step.kind in _PAIRS:
            edge = (step.kind, step.stage, worker)
            self.under_way[edge] = [s for s in self.under_way.get(edge, ()) if self._open(s)] + [step]

    def _open(self, send: Step) -> bool:
        return self._receive_of(send) not in self.posted

    def _receive_of(self, send: Step) -> Step:
        kind, offset = _PAIRS[send.kind]
        return Step(kind, send.stage + offset, send.micro_batch)


def _deadlocks(table: Table, workers: Workers, window: int) -> Iterator[str]:
    position = [0] * len(table)
    progress = _Progress(table, workers, window)
    moved = True
    while moved:
        moved = False
        for worker, lane in enumerate(table):
            while position[worker] < len(lane) and not progress.waits_for(lane[position[worker]], worker):
                progress.take(lane[position[worker]], worker)
                position[worker] += 1
                moved = True
    for worker, lane in enumerate(table):
        if position[worker] < len(lane):
            step = lane[position[worker]]
            yield f"deadlock: the {step} waits for ever for the {progress.waits_for(step, worker)}"
