"""Checks a schedule before it runs: it is complete, messages pair up, and no rank program deadlocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from yuan_train.schedule.copies import IN_PARTS, Key, Offload, Offloads, Paging, by_group, kept_by
from yuan_train.schedule.schedules import receive_for
from yuan_train.schedule.step import (
    COMPUTE,
    COPIES,
    PAGING,
    RECEIVE_OF,
    SEND_OF,
    Kind,
    RankProgram,
    Schedule,
    Step,
    Workers,
    one_worker_each,
    receive_of,
    send_of,
    worker_of,
)

_PRODUCERS: dict[Kind, tuple[Kind, ...]] = {
    "send_activation": ("forward",),
    "send_gradient": ("backward", "backward_input"),
}


def check_schedule(schedule: Schedule, workers: Workers | None = None) -> None:
    """Raise ValueError, listing every fault, unless the schedule is complete and cannot deadlock.

    Complete: each stage takes each step of every micro-batch once, on the worker that `workers` gives (by
    default stage s on worker s), forwards before backwards, sends after what they send; each send has its
    receive at the neighbour, in the same order at both ends.

    It cannot deadlock if it runs to its end when every step blocks its worker: a send until its receive is
    posted and the message moved, a receive until its message has arrived. On a real transport a posted
    receive or an open send may hold up what its worker does next (by a device-wide synchronisation, a
    hardware queue that streams share, a full buffer), but nothing waits for a later step of its own worker.
    So every wait of a device is one of the blocking run too, and where that has no cycle, no device has one.
    A fault names the cycle.
    """
    if workers is None:
        workers = one_worker_each(len(schedule))
    faults = [*_step_faults(schedule, workers), *_message_faults(schedule, workers)]
    if not faults:
        faults = list(_deadlock(schedule, workers))
    if faults:
        raise ValueError("\n".join(faults))


def check_copies(program: RankProgram, offloads: Offloads) -> None:
    """Raise ValueError, listing every fault, unless a worker's program in parts keeps its activations.

    The parts of a step follow each other, a backward's from the last. What the forward of a part that leaves
    kept is in one place at every step: on the card, on its way down (from its offload to its evict), on the
    host (to its fetch), or on its way up (to its backward). On the card, either way included, are never more
    than `resident` parts of a stage.
    """
    faults = [*_part_faults(program, offloads), *_place_faults(program, offloads)]
    faults += _resident_faults(program, offloads)
    if faults:
        raise ValueError("\n".join(faults))


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
    sent, received = _messages(schedule, workers, RECEIVE_OF), _messages(schedule, workers, SEND_OF)
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


def _deadlock(schedule: Schedule, workers: Workers) -> Iterator[str]:
    """Run the schedule with every step blocking its worker; if it gets stuck, name a cycle of steps."""
    run = _BlockingRun(schedule, workers)
    run.run()
    stuck = [worker for worker in range(len(schedule)) if run.next_step(worker) is not None]
    if not stuck:
        return
    path = [stuck[0]]
    while (awaited := run.waits_for(path[-1])[0]) not in path:
        path.append(awaited)
    cycle = path[path.index(awaited) :]
    waits = [
        f"the {run.next_step(worker)} waits for the {run.waits_for(worker)[1]}, "
        f"which comes after the {run.next_step(run.waits_for(worker)[0])}"
        for worker in cycle
    ]
    yield f"deadlock: {'; '.join(waits)}"


class _BlockingRun:
    """A run of a schedule in which a send and its receive happen when both are their workers' next steps."""

    def __init__(self, schedule: Schedule, workers: Workers) -> None:
        self._schedule, self._workers = schedule, workers
        self._position = [0] * len(schedule)
        self._done: set[Step] = set()
        """Compute steps whose result another stage of the same worker takes."""

    def run(self) -> None:
        """Take steps until all programs have ended or every worker waits."""
        ready = list(range(len(self._schedule)))
        while ready:
            worker = ready.pop()
            while (step := self.next_step(worker)) is not None:
                peer, awaited = self.waits_for(worker)
                if awaited is None:
                    self._done.add(step)
                elif not step.is_compute and self.next_step(peer) == awaited:
                    self._position[peer] += 1
                    ready.append(peer)
                else:
                    break
                self._position[worker] += 1

    def next_step(self, worker: int) -> Step | None:
        """The step that a worker is about to take; None at the end of its program."""
        program, position = self._schedule[worker], self._position[worker]
        return program[position] if position < len(program) else None

    def waits_for(self, worker: int) -> tuple[int, Step | None]:
        """What a worker's next step waits for, and on which worker; None if it can be taken.

        A message waits for its other end, compute for the result of another stage of the same worker.
        """
        step = self.next_step(worker)
        assert step is not None
        if not step.is_compute:
            other = receive_of(step) if step.kind in RECEIVE_OF else send_of(step)
            return worker_of(self._workers, other.stage, other.micro_batch), other
        source = -1
        if step.kind == "forward":
            source = step.stage - 1
        elif step.kind in ("backward", "backward_input"):
            source = step.stage + 1
        if not 0 <= source < len(self._workers) or receive_for(step, self._workers) is not None:
            return worker, None
        needed = Step(step.kind, source, step.micro_batch)
        return worker, None if needed in self._done else needed


def _part_faults(program: RankProgram, offloads: Offloads) -> Iterator[str]:
    expected: list[Step] = []
    for step in program:
        if step.kind not in COMPUTE:
            continue
        offload = offloads.get(step.stage)
        if expected:
            if step != expected[0]:
                yield f"the {step} comes where the {expected[0]} should"
            expected = expected[1:]
        elif offload is not None and step.kind in IN_PARTS:
            parts = range(offload.num_parts)
            order = parts if step.kind == "forward" else parts[::-1]
            if step.part != order[0]:
                yield f"the {step} comes before the parts that it follows"
            expected = [step._replace(part=part) for part in order[1:]]


_LEAVES_FROM: dict[Kind, str] = {"offload": "on the card", "evict": "on its way down", "fetch": "on the host"}
_BRINGS_TO: dict[Kind, str] = {"offload": "on its way down", "evict": "on the host", "fetch": "on its way up"}


def _place_faults(program: RankProgram, offloads: Offloads) -> Iterator[str]:
    places: dict[Key, str] = {}
    for step in program:
        key = kept_by(step)
        if step.kind in COPIES:
            place = places.get(key, "not there")
            if step.stage not in offloads or step.part >= offloads[step.stage].num_leaving:
                yield f"the {step}: this part's activations do not leave"
            elif place != _LEAVES_FROM[step.kind]:
                yield f"the {step}: they are {place}, not {_LEAVES_FROM[step.kind]}"
            places[key] = _BRINGS_TO[step.kind]
        elif _is_leaving(step, offloads.get(step.stage)):
            if step.kind == "forward":
                places[key] = "on the card"
            elif (place := places.pop(key, "not there")) in ("on the host", "not there"):
                yield f"the {step}: the activations that it needs are {place}"
    for key, place in places.items():
        yield f"the activations of the {Step('forward', *key)} are still {place} at the end"


def _resident_faults(program: RankProgram, offloads: Offloads) -> Iterator[str]:
    here = dict.fromkeys(offloads, 0)
    split = any(step.kind == "backward_weight" for step in program)
    for step in program:
        offload = offloads.get(step.stage)
        if offload is None:
            continue
        if step.kind == "backward_weight":
            # Split, a backward's second part still needs the activations of all parts.
            here[step.stage] -= offload.num_leaving
        elif step.kind == "evict" or (step.kind == "backward" and not split and _is_leaving(step, offload)):
            here[step.stage] -= 1
        elif step.kind == "fetch" or (step.kind == "forward" and _is_leaving(step, offload)):
            here[step.stage] += 1
        if here[step.stage] > offload.resident:
            yield f"at the {step}: {here[step.stage]} parts are on the card, and {offload.resident} may be"


def _is_leaving(step: Step, offload: Offload | None) -> bool:
    return offload is not None and step.kind in IN_PARTS and step.part < offload.num_leaving


def check_pages(program: RankProgram, paging: Paging) -> None:
    """Raise ValueError, listing every fault, unless a worker's program keeps its pages.

    Every group passes all parts in order, a backward from the last. A page is in one place at every step: on
    the host, on the card (from its page_in), or on its way down (from its gradient_down to its page_out); at
    the end, on the host. On the card, either way included, are never more than `slots`. A part runs with its
    page on the card; the sum of the groups before has come up when a backward adds to it, and no gradient is
    left behind.
    """
    faults = [*_page_order_faults(program, paging), *_page_place_faults(program, paging)]
    if faults:
        raise ValueError("\n".join(faults))


def _page_order_faults(program: RankProgram, paging: Paging) -> Iterator[str]:
    for (kind, last), group in by_group(program).items():
        parts = range(paging.num_pages + 1)
        order = parts if kind == "forward" else parts[::-1]
        expected = [(part, m) for part in order for m in group.micro_batches]
        found = [(step.part, step.micro_batch) for step in group.steps if step.kind in COMPUTE]
        if found != expected or len(group.micro_batches) > paging.group:
            yield f"the {kind} of the group of micro-batch {last} takes (part, micro-batch) {found}"


def _page_place_faults(program: RankProgram, paging: Paging) -> Iterator[str]:
    place = dict.fromkeys(range(paging.num_pages), "on the host")
    summed: set[int] = set()
    """Pages with a sum on the host."""
    open_sums: set[int] = set()
    """Pages on the card with a sum that is not on the host."""
    ready: set[int] = set()
    """Pages on the card that have what earlier groups have summed."""
    for step in program:
        page = step.part
        if page not in place:
            if step.kind in PAGING:
                yield f"the {step}: the stage has no such page"
            continue
        at, sums, fault = place[page], _sum_of(page, summed, ready, open_sums), False
        if step.kind == "page_in":
            fault = at != "on the host"
            place[page] = "on the card"
            if page not in summed:
                ready.add(page)
        elif step.kind == "gradient_up":
            fault = at != "on the card" or page not in summed or page in ready
            ready.add(page)
        elif step.kind == "gradient_down":
            fault = at != "on the card" or page not in open_sums
            open_sums.discard(page)
            ready.discard(page)
            summed.add(page)
            place[page] = "on its way down"
        elif step.kind == "page_out":
            fault = at == "on the host" or page in open_sums
            ready.discard(page)
            place[page] = "on the host"
        else:
            fault = at != "on the card" or (step.kind == "backward" and page not in ready)
            if step.kind == "backward":
                open_sums.add(page)
        if fault:
            yield f"the {step}: its page is {at}{sums}"
        count = sum(where != "on the host" for where in place.values())
        if count > paging.slots:
            yield f"at the {step}: {count} pages are on the card, and {paging.slots} may be"
    for page, where in place.items():
        if where != "on the host":
            yield f"page {page} is still {where} at the end"


def _sum_of(page: int, summed: set[int], ready: set[int], open_sums: set[int]) -> str:
    if page in open_sums:
        return ", with a gradient that is not on the host"
    return ", without the sum of the groups before" if page in summed and page not in ready else ""
