"""Schedules as tables: one list of steps per worker.

The planner runs a table in virtual time, the trainer on devices: what was forecast is what runs. A table
follows from the schedule's name, the workers of the stages and the number of micro-batches alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from yuan_train.schedule.listing import Limits, list_schedule
from yuan_train.schedule.step import (
    Kind,
    Lane,
    Step,
    Table,
    Workers,
    num_workers,
    one_worker_each,
    worker_of,
)

SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")
"""Names that `make_table` knows."""


@functools.lru_cache(maxsize=64)
def make_table(
    schedule: str,
    *,
    num_micro_batches: int,
    num_stages: int | None = None,
    workers: Workers | None = None,
    in_flight: tuple[int, ...] | None = None,
) -> Table:
    """The table of a named schedule, messages included.

    Give either `num_stages`, for one worker per stage, or `workers`; `in_flight` is for 1f1b alone. Raises
    ValueError for a name that is not in SCHEDULES, and for virtual stages under 1f1b and gpipe.
    """
    if workers is None:
        assert num_stages is not None
        workers = one_worker_each(num_stages)
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
    raise ValueError(f"there is no table for schedule {schedule!r} yet; use one of {', '.join(SCHEDULES)}")


def one_forward_one_backward(
    *,
    num_micro_batches: int,
    num_stages: int | None = None,
    workers: Workers | None = None,
    in_flight: tuple[int, ...] | None = None,
) -> Table:
    """1F1B: fill the pipe, then alternate, then drain.

    Stage s of P keeps at most min(P - s, micro-batches) activations alive, however many micro-batches there
    are; with replicas, as many as there are workers from it to the end, shared by its own. With equal stages
    and free messages a step takes (m + P - 1)(f + b).

    `in_flight` gives every stage its own count K_s instead, in whole rounds of its replicas never fewer than
    the next stage's. Before a slow link K_s = P - s is too few: with messages of cf and cb seconds between
    stages s and t, a micro-batch takes (w_s + w_t + cf + cb) / (K_s - K_t + 1), w = f + b; on every stage
    before the link ceil((cf + cb) / max w) more hide them.
    """
    workers = _workers(num_stages, workers)
    _refuse_virtual_stages(workers, "1f1b")
    lanes: list[Lane] = [()] * num_workers(workers)
    for stage, replicas in enumerate(workers):
        depth = in_flight[stage] if in_flight else sum(map(len, workers[stage:]))
        for r, worker in enumerate(replicas):
            mine = range(r, num_micro_batches, len(replicas))
            # Of the first `depth` micro-batches those that are this replica's, less the one that alternates.
            num_warmup = min(max(len(range(r, depth, len(replicas))) - 1, 0), len(mine))
            lane = [Step("forward", stage, m) for m in mine[:num_warmup]]
            for forward, backward in zip(mine[num_warmup:], mine, strict=False):
                lane += [Step("forward", stage, forward), Step("backward", stage, backward)]
            lane += [Step("backward", stage, m) for m in mine[len(mine) - num_warmup :]]
            lanes[worker] = tuple(lane)
    return with_messages(lanes, workers)


def gpipe(*, num_micro_batches: int, num_stages: int | None = None, workers: Workers | None = None) -> Table:
    """GPipe (Huang et al. 2019): every forward, then every backward; all activations are alive at once."""
    workers = _workers(num_stages, workers)
    _refuse_virtual_stages(workers, "gpipe")
    lanes: list[Lane] = [()] * num_workers(workers)
    for stage, replicas in enumerate(workers):
        for r, worker in enumerate(replicas):
            mine = range(r, num_micro_batches, len(replicas))
            lanes[worker] = (
                *(Step("forward", stage, m) for m in mine),
                *(Step("backward", stage, m) for m in mine),
            )
    return with_messages(lanes, workers)


def interleaved(*, workers: Workers, num_micro_batches: int) -> Table:
    """Interleaved 1F1B (Narayanan et al. 2021): virtual stages, any number of them per worker.

    Micro-batches go in groups as large as there are workers. Rank r of P with v virtual stages keeps at most
    (v - 1) P + 2 (P - 1 - r) + 1 activations of a virtual stage. Where every worker has as many stages, one
    in each round (0 1 2 0 1 2), and the groups are full, the lanes have a closed form; else they are listed.
    """
    count = num_workers(workers)
    looped = workers == tuple((stage % count,) for stage in range(len(workers)))
    if looped and len(workers) % count == 0 and num_micro_batches % count == 0:
        return with_messages(_looped_lanes(count, len(workers) // count, num_micro_batches), workers)
    stages_of = [sum(worker in replicas for replicas in workers) for worker in range(count)]
    caps = tuple((stages_of[worker] - 1) * count + 2 * (count - 1 - worker) + 1 for worker in range(count))
    limits = Limits(caps=caps, split=False, group=count)
    return with_messages(list_schedule(workers, num_micro_batches, limits), workers)


def _looped_lanes(num_workers: int, num_rounds: int, num_micro_batches: int) -> list[Lane]:
    lanes: list[Lane] = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * num_rounds, num_workers)
        steps = [(stage, m) for stage in stages for m in range(num_micro_batches)]
        forwards = sorted(steps, key=lambda step: (step[1] // num_workers, step[0], step[1]))
        backwards = sorted(steps, key=lambda step: (step[1] // num_workers, -step[0], step[1]))
        num_warmup = min(2 * (num_workers - worker - 1) + (num_rounds - 1) * num_workers, len(steps))
        lane = [Step("forward", *step) for step in forwards[:num_warmup]]
        for forward, backward in zip(forwards[num_warmup:], backwards, strict=False):
            lane += [Step("forward", *forward), Step("backward", *backward)]
        lane += [Step("backward", *step) for step in backwards[len(steps) - num_warmup :]]
        lanes.append(tuple(lane))
    return lanes


def zero_bubble(*, workers: Workers, num_micro_batches: int) -> Table:
    """Zero bubble (Qi et al. 2023): the backward of the weights fills what would be idle.

    One stage per worker gives their ZB-H1, two per worker in a V (0 1 2 2 1 0) their ZB-V; either keeps the
    activations of at most P whole workers, the memory of 1F1B's first stage.
    """
    count = num_workers(workers)
    stages_of = [sum(worker in replicas for replicas in workers) for worker in range(count)]
    limits = Limits(caps=tuple(number * count for number in stages_of), split=True, group=None)
    return with_messages(list_schedule(workers, num_micro_batches, limits), workers)


def forward_only(
    *, num_micro_batches: int, num_stages: int | None = None, workers: Workers | None = None
) -> Table:
    """Evaluation: every stage forwards every micro-batch."""
    workers = _workers(num_stages, workers)
    lanes: list[list[Step]] = [[] for _ in range(num_workers(workers))]
    group = len(lanes)
    for first in range(0, num_micro_batches, group):
        # A worker of several stages takes a group through one before it turns to the next.
        for stage in range(len(workers)):
            for m in range(first, min(first + group, num_micro_batches)):
                lanes[worker_of(workers, stage, m)].append(Step("forward", stage, m))
    return with_messages(map(tuple, lanes), workers)


def with_messages(compute: Iterable[Lane], workers: Workers | None = None) -> Table:
    """Add to lanes of compute steps the sends and receives that they need.

    A send follows its compute at once. A receive is posted when the one before it, of the same stage and
    direction, is taken, and one compute step ahead at the latest. So one is always open, and a link that
    needs as long as a whole turn of the worker (forward and backward) is never idle, though a transport may
    start to move a message only when its receive is posted. Its buffer lives from there to its use.
    """
    lanes = tuple(compute)
    if workers is None:
        workers = one_worker_each(len(lanes))
    return tuple(_lane_with_messages(lane, workers) for lane in lanes)


def _lane_with_messages(lane: Lane, workers: Workers) -> Lane:
    posted: list[list[Step]] = [[] for _ in lane]
    taken: dict[tuple[Kind, int], int] = {}
    for i, step in enumerate(lane):
        if receive := receive_for(step, workers):
            before = taken.get((receive.kind, receive.stage), i)
            posted[min(before, max(i - 1, 0))].append(receive)
            taken[receive.kind, receive.stage] = i
    steps: list[Step] = []
    for step, receives in zip(lane, posted, strict=True):
        steps += [*receives, step]
        if send := send_after(step, workers):
            steps.append(send)
    return tuple(steps)


def receive_for(step: Step, workers: Workers) -> Step | None:
    """The receive that a compute step waits for, if it needs a message."""
    if step.kind == "forward" and _crosses(workers, step.stage - 1, step.stage, step.micro_batch):
        return Step("receive_activation", step.stage, step.micro_batch)
    backward = step.kind in ("backward", "backward_input")
    if backward and _crosses(workers, step.stage, step.stage + 1, step.micro_batch):
        return Step("receive_gradient", step.stage, step.micro_batch)
    return None


def send_after(step: Step, workers: Workers) -> Step | None:
    """The send of a compute step's result, if another worker needs it."""
    if step.kind == "forward" and _crosses(workers, step.stage, step.stage + 1, step.micro_batch):
        return Step("send_activation", step.stage, step.micro_batch)
    backward = step.kind in ("backward", "backward_input")
    if backward and _crosses(workers, step.stage - 1, step.stage, step.micro_batch):
        return Step("send_gradient", step.stage, step.micro_batch)
    return None


def _crosses(workers: Workers, left: int, right: int, micro_batch: int) -> bool:
    """Whether two adjacent stages have unlike workers for a micro-batch, so that a message goes between."""
    if left < 0 or right >= len(workers):
        return False
    # `worker_of`, written out: a large table asks a million times.
    sources, targets = workers[left], workers[right]
    return sources[micro_batch % len(sources)] != targets[micro_batch % len(targets)]


def _workers(num_stages: int | None, workers: Workers | None) -> Workers:
    if workers is not None:
        return workers
    assert num_stages is not None
    return one_worker_each(num_stages)


def _refuse_virtual_stages(workers: Workers, schedule: str) -> None:
    named = [worker for replicas in workers for worker in replicas]
    if len(set(named)) != len(named):
        raise ValueError(f"schedule {schedule} gives a worker one stage; use interleaved_1f1b or zero_bubble")
