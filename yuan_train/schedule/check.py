"""Checks a schedule before it runs: it is complete, messages pair up, and no rank program deadlocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from yuan_train.schedule.schedules import receive_for
from yuan_train.schedule.step import Kind, RankProgram, Schedule, Step, Workers, one_worker_each, worker_of

_PRODUCERS: dict[Kind, tuple[Kind, ...]] = {
    "send_activation": ("forward",),
    "send_gradient": ("backward", "backward_input"),
}
_RECEIVE_OF: dict[Kind, tuple[Kind, int]] = {
    "send_activation": ("receive_activation", 1),
    "send_gradient": ("receive_gradient", -1),
}


def check_schedule(schedule: Schedule, workers: Workers | None = None, *, window: int = 0) -> None:
    """Raise ValueError, listing every fault, unless the schedule is complete and free of deadlock.

    Complete: each stage takes each step of every micro-batch once, on the worker that `workers` gives (by
    default stage s on worker s), forwards before backwards, sends after what they send; each send has its
    receive at the neighbour, in the same order at both ends. Free of deadlock even on a transport that
    buffers at most `window` messages of an edge whose receives are not yet posted; with `window` 0 a send
    blocks its worker until the receive is posted.
    """
    if workers is None:
        workers = one_worker_each(len(schedule))
    faults = [*_step_faults(schedule, workers), *_message_faults(schedule, workers)]
    if not faults:
        faults = list(_deadlocks(schedule, workers, window))
    if faults:
        raise ValueError("\n".join(faults))


def peak_in_flight(program: RankProgram, stage: int | None = None) -> int:
    """The most micro-batches in flight at once: forward begun, backward (weights' part included) not ended.

    With `stage`, counts one virtual stage alone; else a micro-batch counts once per stage of the program.
    """
    ends: Kind = "backward_weight" if any(step.kind == "backward_weight" for step in program) else "backward"
    alive = peak = 0
    for step in program:
        if stage is not None and step.stage != stage:
            continue
        if step.kind == "forward":
            alive += 1
            peak = max(peak, alive)
        elif step.kind == ends:
            alive -= 1
    return peak


def _step_faults(schedule: Schedule, workers: Workers) -> Iterator[str]:
    steps = [step for program in schedule for step in program]
    kinds = {step.kind for step in steps}
    micro_batches = {step.micro_batch for step in steps if step.kind == "forward"}
    for worker, program in enumerate(schedule):
        done: set[Step] = set()
        for step in program:
            if step.stage >= len(workers) or worker_of(workers, step.stage, step.micro_batch) != worker:
                yield f"the program of worker {worker} holds a {step}"
            if step in done:
                yield f"the {step} appears twice"
            yield from _order_faults(step, done)
            done.add(step)
    done_by_kind = {
        kind: Counter((step.stage, step.micro_batch) for step in steps if step.kind == kind) for kind in kinds
    }
    for stage in range(len(workers)):
        forwards = {m for s, m in done_by_kind.get("forward", ()) if s == stage}
        for kind in kinds & {"backward", "backward_input", "backward_weight"}:
            backwards = {m for s, m in done_by_kind[kind] if s == stage}
            if forwards != backwards:
                yield (
                    f"stage {stage}: micro-batches {sorted(forwards ^ backwards)} have a forward or a "
                    "backward, not both"
                )
        if missing := micro_batches - forwards:
            yield f"stage {stage}: no forward of micro-batches {sorted(missing)}, which other stages have"


def _order_faults(step: Step, done: set[Step]) -> Iterator[str]:
    if (
        step.kind in ("backward", "backward_input")
        and Step("forward", step.stage, step.micro_batch) not in done
    ):
        yield f"the {step} comes before its forward"
    if step.kind == "backward_weight" and Step("backward_input", step.stage, step.micro_batch) not in done:
        yield f"the {step} comes before its backward input"
    producers = _PRODUCERS.get(step.kind, ())
    if producers and not any(Step(kind, step.stage, step.micro_batch) in done for kind in producers):
        yield f"the {step} comes before the {producers[0]} whose result it sends"


def _message_faults(schedule: Schedule, workers: Workers) -> Iterator[str]:
    sent, received = _messages(schedule, workers, _RECEIVE_OF), _messages(schedule, workers, _send_of())
    for edge in sorted(sent.keys() | received.keys()):
        kind, stage, sender, receiver = edge
        orders = sent.get(edge, []), received.get(edge, [])
        where = f"{kind} of stage {stage} from worker {sender} to worker {receiver}"
        if Counter(orders[0]) != Counter(orders[1]):
            yield f"{where}: sent {orders[0]}, received {orders[1]}"
        elif orders[0] != orders[1]:
            yield f"{where}: sent in the order {orders[0]}, received in the order {orders[1]}"
    for program in schedule:
        seen: set[Step] = set()
        all_steps = set(program)
        for step in program:
            seen.add(step)
            needed = receive_for(step, workers)
            if needed is not None and needed not in all_steps:
                yield f"the {step} has no receive for its input"
            elif needed is not None and needed not in seen:
                yield f"the {needed} is posted after the {step} that needs it"


def _send_of() -> dict[Kind, tuple[Kind, int]]:
    return {receive: (send, -offset) for send, (receive, offset) in _RECEIVE_OF.items()}


def _messages(
    schedule: Schedule, workers: Workers, kinds: dict[Kind, tuple[Kind, int]]
) -> dict[tuple[str, int, int, int], list[int]]:
    """Micro-batches by edge (kind of send, sending stage, sending worker, receiving worker), in order.

    `kinds` maps the kinds to collect to the kind at the other end and its stage offset. A message beyond the
    first or last stage has worker -1 at the missing end.
    """
    found: dict[tuple[str, int, int, int], list[int]] = {}
    for worker, program in enumerate(schedule):
        for step in program:
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
    """The steps taken so far, on a transport that buffers `window` unreceived messages of an edge."""

    schedule: Schedule
    workers: Workers
    window: int
    posted: set[Step] = field(default_factory=set[Step])
    done: set[Step] = field(default_factory=set[Step])
    under_way: dict[tuple[Kind, int, int], list[Step]] = field(
        default_factory=dict[tuple[Kind, int, int], list[Step]]
    )

    def waits_for(self, step: Step, worker: int) -> Step | None:
        """The step that must happen before a worker can take `step`; None if it can take it now."""
        if step.kind in _RECEIVE_OF:
            pending = [
                s for s in self.under_way.get((step.kind, step.stage, worker), ()) if self._is_unmatched(s)
            ]
            pending = [*pending, step] if self._is_unmatched(step) else pending
            return self._receive_of(pending[0]) if len(pending) > self.window else None
        if step.kind == "forward" and step.stage > 0:
            source: tuple[Kind, Kind, int] = ("send_activation", "forward", step.stage - 1)
        elif step.kind in ("backward", "backward_input") and step.stage < len(self.workers) - 1:
            source = ("send_gradient", step.kind, step.stage + 1)
        else:
            return None
        send, compute, stage = source
        crosses = receive_for(step, self.workers) is not None
        needed = Step(send if crosses else compute, stage, step.micro_batch)
        return None if needed in self.done else needed

    def take(self, step: Step, worker: int) -> None:
        if step.kind.startswith("receive"):
            self.posted.add(step)
        else:
            self.done.add(step)
        if step.kind in _RECEIVE_OF:
            edge = (step.kind, step.stage, worker)
            self.under_way[edge] = [s for s in self.under_way.get(edge, ()) if self._is_unmatched(s)] + [step]

    def _is_unmatched(self, send: Step) -> bool:
        return self._receive_of(send) not in self.posted

    def _receive_of(self, send: Step) -> Step:
        kind, offset = _RECEIVE_OF[send.kind]
        return Step(kind, send.stage + offset, send.micro_batch)


def _deadlocks(schedule: Schedule, workers: Workers, window: int) -> Iterator[str]:
    position = [0] * len(schedule)
    progress = _Progress(schedule, workers, window)
    advanced = True
    while advanced:
        advanced = False
        for worker, program in enumerate(schedule):
            while position[worker] < len(program) and not progress.waits_for(
                program[position[worker]], worker
            ):
                progress.take(program[position[worker]], worker)
                position[worker] += 1
                advanced = True
    for worker, program in enumerate(schedule):
        if position[worker] < len(program):
            step = program[position[worker]]
            yield f"deadlock: the {step} waits forever for the {progress.waits_for(step, worker)}"
