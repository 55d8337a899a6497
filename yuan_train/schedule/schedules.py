"""Pipeline schedules as data: one rank program (the steps of a worker, in order) per worker.

The planner runs a schedule in virtual time, the trainer on devices: what was forecast is what runs. A
schedule follows from its name, the workers of the stages and the number of micro-batches alone. To the
compute steps `with_messages` adds sends and receives.

On a card a receive that waits for its sender is a running kernel, and so is a send that waits for its
receiver. Any compute step may have to wait for all of them: the allocator frees memory, a kernel is loaded,
streams share a hardware queue. So a receive must not be posted before a compute step on which its sender
depends, and both ends of all messages must stand so that no such waits form a cycle.

`with_messages` finds such places by a virtual run of the compute steps in which every step blocks its worker:
a worker goes on when its messages have been taken over by the receivers. The order of events in a run that
ends is free of cycles by construction, and each rank program is a part of that order.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from yuan_train.schedule.step import (
    RECEIVE_OF,
    SEND_OF,
    Kind,
    RankProgram,
    Schedule,
    Step,
    Workers,
    num_workers,
    one_worker_each,
    receive_of,
    send_of,
    worker_of,
)

MESSAGES_PER_EDGE = 2
"""Buffers besides those of the micro-batches in flight: one message being sent, one being received."""


def in_flight(
    schedule: str,
    *,
    stage: int,
    num_stages: int,
    num_micro_batches: int,
    replicas: Sequence[int] = (),
    depths: Sequence[int] | None = None,
) -> int:
    """The most micro-batches in flight (forward begun, backward not ended) on a replica of stage s = `stage`.

    For P stages and m micro-batches: 1F1B min(P - s, m), GPipe m, zero bubble min(P, m). With `replicas`, the
    number of each stage's replicas, P - s is the number of replicas from s to the end, P that of all, and a
    stage's replicas share it and m, rounded up. `depths` gives the 1F1B depth of each stage instead of P - s.
    """
    num_replicas = replicas[stage] if replicas else 1
    per_replica = -(-num_micro_batches // num_replicas)
    if schedule == "gpipe":
        return per_replica
    if schedule == "zero_bubble":
        return min(sum(replicas) if replicas else num_stages, per_replica)
    assert schedule == "1f1b", f"no closed form for schedule {schedule!r}"
    depth = sum(replicas[stage:]) if replicas else num_stages - stage
    depth = depths[stage] if depths else depth
    return min(-(-depth // num_replicas), per_replica)


_DURATIONS: dict[Kind, int] = {"forward": 1, "backward": 2, "backward_input": 1, "backward_weight": 1}


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


@dataclass(frozen=True)
class _Limits:
    """Memory limits and priorities of the list scheduler."""

    caps: tuple[int, ...]
    """Per worker: the most activations of virtual stages that it may hold at once."""
    split: bool
    """Whether the backward is split into `backward_input` and `backward_weight`."""
    group: int | None
    """Forwards run in groups of this many micro-batches, stage by stage; None: the deepest stage first."""


class _ListScheduler:
    """Makes compute steps: when each worker is free, which steps are ready, how many activations it holds."""

    def __init__(self, workers: Workers, num_micro_batches: int, limits: _Limits) -> None:
        self._workers, self._limits = workers, limits
        count = num_workers(workers)
        self._caps = list(limits.caps)
        self._num_alive = [0] * count
        self._programs: list[list[Step]] = [[] for _ in range(count)]
        self._free_at = [0] * count
        self._ready_backwards, self._ready_forwards, self._ready_weights = (
            [list[tuple[tuple[int, ...], Step]]() for _ in range(count)] for _ in range(3)
        )
        self._completions: list[tuple[int, int, Step]] = []
        self._num_completions = 0
        self._num_remaining = num_micro_batches * len(workers) * (3 if limits.split else 2)
        for m in range(num_micro_batches):
            self._make_ready(Step("forward", 0, m))

    def run(self) -> tuple[RankProgram, ...]:
        """The programs without messages: the clock advances from completion to completion until every step is
        taken."""
        now = 0
        while self._num_remaining:
            for worker in range(len(self._programs)):
                if self._free_at[worker] <= now:
                    self._take(worker, now)
            if not self._completions:
                # Every worker with a ready forward is blocked by its cap.
                for w, forwards in enumerate(self._ready_forwards):
                    self._caps[w] += bool(forwards)
                continue
            now = self._completions[0][0]
            while self._completions and self._completions[0][0] == now:
                self._complete(heapq.heappop(self._completions)[2])
        return tuple(tuple(program) for program in self._programs)

    def _take(self, worker: int, now: int) -> None:
        if self._ready_backwards[worker]:
            _, step = heapq.heappop(self._ready_backwards[worker])
        elif self._ready_forwards[worker] and self._num_alive[worker] < self._caps[worker]:
            _, step = heapq.heappop(self._ready_forwards[worker])
            self._num_alive[worker] += 1
        elif self._ready_weights[worker]:
            _, step = heapq.heappop(self._ready_weights[worker])
        else:
            return
        self._programs[worker].append(step)
        self._free_at[worker] = now + _DURATIONS[step.kind]
        self._num_completions += 1
        heapq.heappush(self._completions, (self._free_at[worker], self._num_completions, step))
        self._num_remaining -= 1

    def _complete(self, step: Step) -> None:
        """Make the steps ready that depend on `step`, and release what it held."""
        last = len(self._workers) - 1
        backward: Kind = "backward_input" if self._limits.split else "backward"
        if step.kind == "forward":
            at_end = step.stage == last
            self._make_ready(
                Step(backward if at_end else "forward", step.stage + (not at_end), step.micro_batch)
            )
            return
        if step.kind in ("backward", "backward_input") and step.stage > 0:
            self._make_ready(Step(backward, step.stage - 1, step.micro_batch))
        if step.kind == "backward_input":
            self._make_ready(Step("backward_weight", step.stage, step.micro_batch))
        else:
            self._num_alive[worker_of(self._workers, step.stage, step.micro_batch)] -= 1

    def _make_ready(self, step: Step) -> None:
        worker = worker_of(self._workers, step.stage, step.micro_batch)
        m, stage = step.micro_batch, step.stage
        if step.kind == "forward":
            group = self._limits.group
            priority = (-stage, m) if group is None else (m // group, stage, m)
            heapq.heappush(self._ready_forwards[worker], (priority, step))
        elif step.kind == "backward_weight":
            heapq.heappush(self._ready_weights[worker], ((m, -stage), step))
        else:
            group = self._limits.group
            priority = (m, -stage) if group is None else (m // group, -stage, m)
            heapq.heappush(self._ready_backwards[worker], (priority, step))


SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
"""The names that `make_schedule` accepts."""


class ProgramShape(NamedTuple):
    """What makes the programs of a pipeline: the arguments of `make_schedule`."""

    schedule: str
    workers: Workers
    num_micro_batches: int
    in_flight: tuple[int, ...] | None = None
    group: int = 1


@functools.lru_cache(maxsize=64)
def make_schedule(
    schedule: str,
    *,
    workers: Workers,
    num_micro_batches: int,
    in_flight: tuple[int, ...] | None = None,
    group: int = 1,
) -> Schedule:
    """The schedule of the given name, messages included.

    `in_flight` is for 1f1b alone. With `group`, so many micro-batches in a row pass each stage together, on
    stages of one replica. Raises ValueError for a name that is not in SCHEDULES, and for virtual stages under
    1f1b and gpipe.
    """
    if group > 1:
        count = -(-num_micro_batches // group)
        depths = None if in_flight is None else tuple(-(-depth // group) for depth in in_flight)
        of_groups = make_schedule(schedule, num_micro_batches=count, workers=workers, in_flight=depths)
        return in_groups(of_groups, workers, group=group, num_micro_batches=num_micro_batches)
    if schedule == "1f1b":
        return one_forward_one_backward(
            workers=workers, num_micro_batches=num_micro_batches, in_flight=in_flight
        )
    assert in_flight is None, f"schedule {schedule} decides by itself how many micro-batches a stage holds"
    if schedule == "gpipe":
        return gpipe(workers=workers, num_micro_batches=num_micro_batches)
    if schedule == "interleaved_1f1b":
        return interleaved(workers=workers, num_micro_batches=num_micro_batches)
    if schedule == "zero_bubble":
        return zero_bubble(workers=workers, num_micro_batches=num_micro_batches)
    raise ValueError(f"unknown schedule {schedule!r}; use one of {', '.join(SCHEDULES)}")


def one_forward_one_backward(
    *, workers: Workers, num_micro_batches: int, in_flight: tuple[int, ...] | None = None
) -> Schedule:
    """1F1B (PipeDream-Flush, Narayanan et al., ICML 2021): warm up, alternate forward and backward, drain.

    Stage s of P keeps at most min(P - s, m) micro-batches in flight, however large their number m; with
    replicas, as many as there are workers from s to the end, shared among the replicas of s. With equal
    stages (f and b seconds of forward and backward) and free messages a step takes (m + P - 1)(f + b).

    `in_flight` gives every stage s its own count K_s instead; rounded up to whole rounds of its replicas, it
    must not be less than the next stage's. Before a slow link K_s = P - s is too small: with messages of cf
    and cb seconds between adjacent stages s and t, a micro-batch takes
    (w_s + w_t + cf + cb) / (K_s - K_t + 1), w = f + b; ceil((cf + cb) / max w) more micro-batches on every
    stage before the link hide the messages.
    """
    _reject_virtual_stages(workers, "1f1b")
    programs: list[RankProgram] = [()] * num_workers(workers)
    defaults = [sum(map(len, workers[stage:])) for stage in range(len(workers))]
    depths = in_flight or tuple(defaults)
    for stage, (replicas, depth) in enumerate(zip(workers, depths, strict=True)):
        for r, worker in enumerate(replicas):
            own = range(r, num_micro_batches, len(replicas))
            # This replica's part of the first `depth` micro-batches, minus the one that alternates.
            num_warmup = min(max(len(range(r, depth, len(replicas))) - 1, 0), len(own))
            program = [Step("forward", stage, m) for m in own[:num_warmup]]
            for forward, backward in zip(own[num_warmup:], own, strict=False):
                program += [Step("forward", stage, forward), Step("backward", stage, backward)]
            program += [Step("backward", stage, m) for m in own[len(own) - num_warmup :]]
            programs[worker] = tuple(program)
    # A deeper warm-up than needed is there for messages that take long.
    is_deep = any(depth > default for depth, default in zip(depths, defaults, strict=True))
    return with_messages(programs, workers, message_units=SLOW_MESSAGE if is_deep else FAST_MESSAGE)


def gpipe(*, workers: Workers, num_micro_batches: int) -> Schedule:
    """GPipe (Huang et al. 2019): all forwards, then all backwards; every micro-batch is in flight at once."""
    _reject_virtual_stages(workers, "gpipe")
    programs: list[RankProgram] = [()] * num_workers(workers)
    for stage, replicas in enumerate(workers):
        for r, worker in enumerate(replicas):
            own = range(r, num_micro_batches, len(replicas))
            programs[worker] = (
                *(Step("forward", stage, m) for m in own),
                *(Step("backward", stage, m) for m in own),
            )
    return with_messages(programs, workers)


def interleaved(*, workers: Workers, num_micro_batches: int) -> Schedule:
    """Interleaved 1F1B (Narayanan et al., SC 2021): virtual stages, any number of them per worker.

    Micro-batches run in groups as large as the number of workers. Worker r of P with v virtual stages keeps
    at most (v - 1) P + 2 (P - 1 - r) + 1 activations of virtual stages. If every worker has equally many
    stages, one in each round (0 1 2 0 1 2), and the groups are full, the rank programs have a closed form;
    otherwise list scheduling makes them.
    """
    count = num_workers(workers)
    looped = workers == tuple((stage % count,) for stage in range(len(workers)))
    if looped and len(workers) % count == 0 and num_micro_batches % count == 0:
        return with_messages(_looped_programs(count, len(workers) // count, num_micro_batches), workers)
    stages_of = [sum(worker in replicas for replicas in workers) for worker in range(count)]
    caps = tuple((stages_of[worker] - 1) * count + 2 * (count - 1 - worker) + 1 for worker in range(count))
    limits = _Limits(caps=caps, split=False, group=count)
    return with_messages(_ListScheduler(workers, num_micro_batches, limits).run(), workers)


def _looped_programs(num_workers: int, num_rounds: int, num_micro_batches: int) -> list[RankProgram]:
    programs: list[RankProgram] = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * num_rounds, num_workers)
        steps = [(stage, m) for stage in stages for m in range(num_micro_batches)]
        forwards = sorted(steps, key=lambda step: (step[1] // num_workers, step[0], step[1]))
        backwards = sorted(steps, key=lambda step: (step[1] // num_workers, -step[0], step[1]))
        num_warmup = min(2 * (num_workers - worker - 1) + (num_rounds - 1) * num_workers, len(steps))
        program = [Step("forward", *step) for step in forwards[:num_warmup]]
        for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
            program += [Step("forward", *forward), Step("backward", *backward)]
        program += [Step("backward", *step) for step in backwards[len(steps) - num_warmup :]]
        programs.append(tuple(program))
    return programs


def zero_bubble(*, workers: Workers, num_micro_batches: int) -> Schedule:
    """Zero bubble (Qi et al. 2023): weight gradients fill the time in which a worker would be idle.

    One stage per worker gives their ZB-H1, two per worker in a V (0 1 2 2 1 0) their ZB-V. In both a worker
    keeps at most P micro-batches' activations of all its stages, as much as the first stage of 1F1B.
    """
    count = num_workers(workers)
    stages_of = [sum(worker in replicas for replicas in workers) for worker in range(count)]
    limits = _Limits(caps=tuple(number * count for number in stages_of), split=True, group=None)
    return with_messages(_ListScheduler(workers, num_micro_batches, limits).run(), workers)


def in_groups(of_groups: Schedule, workers: Workers, *, group: int, num_micro_batches: int) -> Schedule:
    """The schedule of micro-batches from one of groups of them: every step becomes those of its members, one
    after another, so that a stage has received a group before it begins, and sends it when it has ended.

    The last group may be smaller. Messages keep their order at both ends, so that nothing waits that did not.
    """
    assert all(len(replicas) == 1 for replicas in workers), "groups need stages of one replica"
    return tuple(
        tuple(
            step._replace(micro_batch=m)
            for step in program
            for m in range(step.micro_batch * group, min((step.micro_batch + 1) * group, num_micro_batches))
        )
        for program in of_groups
    )


def forward_only(*, workers: Workers, num_micro_batches: int, group: int = 1) -> Schedule:
    """The schedule of an evaluation: every stage forwards every micro-batch, `group` of them together."""
    if group > 1:
        of_groups = forward_only(num_micro_batches=-(-num_micro_batches // group), workers=workers)
        return in_groups(of_groups, workers, group=group, num_micro_batches=num_micro_batches)
    programs: list[list[Step]] = [[] for _ in range(num_workers(workers))]
    count = len(programs)
    for first in range(0, num_micro_batches, count):
        # A worker of several stages runs one stage for so many micro-batches before the next stage.
        for stage in range(len(workers)):
            for m in range(first, min(first + count, num_micro_batches)):
                programs[worker_of(workers, stage, m)].append(Step("forward", stage, m))
    return with_messages(map(tuple, programs), workers)


def _reject_virtual_stages(workers: Workers, schedule: str) -> None:
    named = [worker for replicas in workers for worker in replicas]
    if len(set(named)) != len(named):
        raise ValueError(f"schedule {schedule} gives a worker one stage; use interleaved_1f1b or zero_bubble")


# --- messages -----------------------------------------------------------------------------------------------


_UNITS: dict[Kind, int] = {"forward": 2, "backward": 4, "backward_input": 2, "backward_weight": 2}
"""Durations in the virtual run."""

FAST_MESSAGE, SLOW_MESSAGE = 1, 3
"""Units of a message: over most links, and over those that a deeper warm-up is for. More than 0: the receiver
is then behind the sender, as on devices, so that receives are posted before the step that the receiver runs
when the message is sent."""


def with_messages(
    compute: Iterable[RankProgram], workers: Workers | None = None, *, message_units: int = FAST_MESSAGE
) -> Schedule:
    """Add the sends and receives that rank programs of compute steps need.

    The result runs even if every step blocks its worker until it has ended, a send and its receive at the
    same time. So it runs with any number of hardware queues, with device-wide synchronisations anywhere, and
    on a transport that buffers nothing; `schedule.check` proves it.

    A send follows its compute step. A receive is posted when the virtual run sends its message, but not
    before the compute step that uses the previous message of the same stage and direction: at most two
    buffers of them wait at a time. Where a sender must not wait for a receiver that is so far behind, it
    sends after a later compute step. `message_units` is how long a message takes in the virtual run, where a
    forward takes 2 and a backward 4.
    """
    programs = tuple(compute)
    return _VirtualRun(programs, workers or one_worker_each(len(programs)), message_units).schedule()


def post_early(
    program: RankProgram, workers: Workers, holds_up_nothing: Callable[[Step], bool]
) -> RankProgram:
    """A rank program with the receives for which `holds_up_nothing` holds moved forward, in the same order.

    On gloo a posted receive holds up neither host nor device, and messages move only when their receive is
    posted. So there each is posted before the compute step that uses the one before it, and a message does
    not wait where devices are not as even as in the virtual run.
    """
    used_at = {receive_for(step, workers): i for i, step in enumerate(program)}
    before: dict[int, list[Step]] = {}
    moved: set[Step] = set()
    previous: dict[tuple[Kind, int], int] = {}
    for i, step in enumerate(program):
        if step.kind not in SEND_OF:
            continue
        edge = step.kind, step.stage
        if previous.get(edge, i) < i and holds_up_nothing(step):
            before.setdefault(previous[edge], []).append(step)
            moved.add(step)
        previous[edge] = used_at[step]
    steps: list[Step] = []
    for i, step in enumerate(program):
        steps += before.get(i, [])
        if step not in moved:
            steps.append(step)
    return tuple(steps)


def arrivals_proven(schedule: Schedule, workers: Workers, worker: int) -> dict[Step, tuple[Step, ...]]:
    """Which sends of a worker have arrived when it takes a message, by receive, and were not proven before.

    The sender of that message had used them in an earlier compute step of its program. Activations that prove
    activations (virtual stages) are left out: gradients prove these too.
    """
    proven: dict[Step, tuple[Step, ...]] = {}
    for peer, program in enumerate(schedule):
        used: list[Step] = []
        for step in program if peer != worker else ():
            if step.kind in RECEIVE_OF:
                receive = receive_of(step)
                if worker_of(workers, receive.stage, receive.micro_batch) != worker or not used:
                    continue
                by_activation = receive.kind == "receive_activation"
                shown = [send for send in used if not (by_activation and send.kind == "send_activation")]
                if shown:
                    proven[receive] = tuple(shown)
                used = [send for send in used if send not in shown]
            elif step.is_compute and (receive := receive_for(step, workers)) is not None:
                send = send_of(receive)
                if worker_of(workers, send.stage, send.micro_batch) == worker:
                    used.append(send)
    return proven


def receive_for(step: Step, workers: Workers) -> Step | None:
    """The receive that a compute step waits for; None if its input does not come from another worker."""
    if step.kind == "forward" and _crosses(workers, step.stage - 1, step.stage, step.micro_batch):
        return Step("receive_activation", step.stage, step.micro_batch)
    backward = step.kind in ("backward", "backward_input")
    if backward and _crosses(workers, step.stage, step.stage + 1, step.micro_batch):
        return Step("receive_gradient", step.stage, step.micro_batch)
    return None


def send_after(step: Step, workers: Workers) -> Step | None:
    """The send of a compute step's result; None if no other worker needs it."""
    if step.kind == "forward" and _crosses(workers, step.stage, step.stage + 1, step.micro_batch):
        return Step("send_activation", step.stage, step.micro_batch)
    backward = step.kind in ("backward", "backward_input")
    if backward and _crosses(workers, step.stage - 1, step.stage, step.micro_batch):
        return Step("send_gradient", step.stage, step.micro_batch)
    return None


def _crosses(workers: Workers, left: int, right: int, micro_batch: int) -> bool:
    """Whether two adjacent stages have different workers for a micro-batch, so that a message is sent."""
    if left < 0 or right >= len(workers):
        return False
    # `worker_of`, inlined: a large schedule calls this a million times.
    sources, targets = workers[left], workers[right]
    return sources[micro_batch % len(sources)] != targets[micro_batch % len(targets)]


@dataclass(slots=True)
class _Message:
    """One message; positions are indices into the compute steps of the worker."""

    receive: Step
    receiver: int
    used_at: int
    """The step that waits for it."""
    post_from: int
    """The first step before which its receive may be posted."""
    send: Step | None = None
    """None until its sender is found, which a complete schedule has."""
    sender: int = -1
    made_at: int = -1
    is_sent: bool = False
    arrives_at: int = 0


class _VirtualRun:
    """The compute steps in virtual time; a worker goes on when its messages have been taken over."""

    def __init__(self, programs: tuple[RankProgram, ...], workers: Workers, message_units: int) -> None:
        self._programs, self._message_units = programs, message_units
        count = len(programs)
        self._next = [0] * count
        """The first step of each worker that has not ended."""
        self._is_running = [False] * count
        self._unsent: list[list[_Message]] = [[] for _ in range(count)]
        """Messages by sender, and the same by receiver, that have been made and not taken over."""
        self._expected: list[list[_Message]] = [[] for _ in range(count)]
        self._events: list[tuple[int, int]] = []
        """Times at which a worker may go on: its step ends, or a message arrives."""
        self._ends_at = [0] * count
        self._before: list[list[list[Step]]] = [[[] for _ in range(len(p) + 1)] for p in programs]
        """By worker and position, the messages that stand before that compute step."""
        self._inputs: list[list[_Message | None]] = []
        self._outputs: list[list[_Message | None]] = []
        self._find_messages(workers)

    def _find_messages(self, workers: Workers) -> None:
        found: dict[Step, _Message] = {}
        for worker, program in enumerate(self._programs):
            last_use: dict[tuple[Kind, int], int] = {}
            inputs: list[_Message | None] = []
            for i, step in enumerate(program):
                receive = receive_for(step, workers)
                if receive is None:
                    inputs.append(None)
                    continue
                edge = receive.kind, receive.stage
                message = _Message(receive, worker, i, last_use.get(edge, 0))
                last_use[edge] = i
                found[receive] = message
                inputs.append(message)
            self._inputs.append(inputs)
        for worker, program in enumerate(self._programs):
            outputs: list[_Message | None] = []
            for i, step in enumerate(program):
                send = send_after(step, workers)
                message = None if send is None else found.get(receive_of(send))
                if message is not None:
                    message.send, message.sender, message.made_at = send, worker, i
                elif send is not None:
                    # Nobody receives it; `check_schedule` says so.
                    self._before[worker][i + 1].append(send)
                outputs.append(message)
            self._outputs.append(outputs)

    def schedule(self) -> Schedule:
        """Run to the end, and return the rank programs with their messages."""
        for worker in range(len(self._programs)):
            self._go_on(worker, 0)
        now = 0
        # If all workers wait, the last one that only waits for a receiver takes its next step.
        last_first = range(len(self._programs))[::-1]
        while self._events or any(self._go_on(worker, now, overrun=True) for worker in last_first):
            if not self._events:
                continue
            now, worker = heapq.heappop(self._events)
            if self._is_running[worker] and self._ends_at[worker] == now:
                self._end_step(worker, now)
            self._go_on(worker, now)
        self._place_the_rest()
        return tuple(map(self._merged, range(len(self._programs))))

    def _end_step(self, worker: int, now: int) -> None:
        self._is_running[worker] = False
        made = self._outputs[worker][self._next[worker]]
        self._next[worker] += 1
        if made is not None:
            self._unsent[worker].append(made)
            self._expected[made.receiver].append(made)
            self._take_over(made.receiver, now)
        self._take_over(worker, now)

    def _take_over(self, receiver: int, now: int) -> None:
        """Start the messages to a worker whose receives may be posted by now."""
        waiting = self._expected[receiver]
        if not waiting:
            return
        left: list[_Message] = []
        for message in waiting:
            if message.post_from > self._next[receiver]:
                left.append(message)
                continue
            assert message.send is not None
            message.is_sent = True
            message.arrives_at = now + self._message_units
            self._before[message.sender][self._next[message.sender]].append(message.send)
            self._before[receiver][self._next[receiver]].append(message.receive)
            self._unsent[message.sender].remove(message)
            heapq.heappush(self._events, (message.arrives_at, receiver))
            # The sender may go on at once.
            heapq.heappush(self._events, (now, message.sender))
        self._expected[receiver] = left

    def _go_on(self, worker: int, now: int, *, overrun: bool = False) -> bool:
        """Start a worker's next step if it can start, and say so; with `overrun` although it has messages."""
        position = self._next[worker]
        program = self._programs[worker]
        if self._is_running[worker] or position == len(program) or (self._unsent[worker] and not overrun):
            return False
        needed = self._inputs[worker][position]
        if needed is not None and (not needed.is_sent or needed.arrives_at > now):
            return False
        self._is_running[worker] = True
        self._ends_at[worker] = now + _UNITS[program[position].kind]
        heapq.heappush(self._events, (self._ends_at[worker], worker))
        return True

    def _place_the_rest(self) -> None:
        """Messages of steps that wait forever: at their compute steps, for `check_schedule` to name."""
        for messages in self._inputs:
            for message in messages:
                if message is None or message.is_sent:
                    continue
                self._before[message.receiver][message.used_at].append(message.receive)
                if message.send is not None:
                    self._before[message.sender][message.made_at + 1].append(message.send)

    def _merged(self, worker: int) -> RankProgram:
        steps: list[Step] = []
        for messages, step in zip(self._before[worker], self._programs[worker], strict=False):
            steps += [*messages, step]
        return (*steps, *self._before[worker][-1])
