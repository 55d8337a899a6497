"""Schedules as tables: one list of steps per stage.

The planner runs a table in virtual time, the trainer on devices: what was forecast is what runs.
"""

from __future__ import annotations

from collections.abc import Iterable

from yuan_train.schedule.step import Lane, Step, Table

SCHEDULES = ("1f1b", "gpipe")
"""Names that `make_table` knows."""


def make_table(schedule: str, *, num_stages: int, num_micro_batches: int) -> Table:
    """The table of a named schedule, messages included.

    Raises ValueError for a name that is not in SCHEDULES.
    """
    if schedule == "1f1b":
        return one_forward_one_backward(num_stages=num_stages, num_micro_batches=num_micro_batches)
    if schedule == "gpipe":
        return gpipe(num_stages=num_stages, num_micro_batches=num_micro_batches)
    raise ValueError(f"there is no table for schedule {schedule!r} yet; use one of {', '.join(SCHEDULES)}")


def one_forward_one_backward(*, num_stages: int, num_micro_batches: int) -> Table:
    """1F1B: fill the pipe, then alternate, then drain.

    Stage s of P keeps at most min(P - s, micro-batches) activations alive, however many micro-batches there
    are. With equal stages and free messages a step takes (m + P - 1)(f + b).
    """
    lanes: list[Lane] = []
    for stage in range(num_stages):
        num_warmup = min(num_stages - stage - 1, num_micro_batches)
        lane = [Step("forward", stage, m) for m in range(num_warmup)]
        for m in range(num_micro_batches - num_warmup):
            lane += [Step("forward", stage, num_warmup + m), Step("backward", stage, m)]
        lane += [Step("backward", stage, m) for m in range(num_micro_batches - num_warmup, num_micro_batches)]
        lanes.append(tuple(lane))
    return with_messages(lanes)


def gpipe(*, num_stages: int, num_micro_batches: int) -> Table:
    """GPipe (Huang et al. 2019): every forward, then every backward; all activations are alive at once."""
    micro_batches = range(num_micro_batches)
    return with_messages(
        (
            *(Step("forward", stage, m) for m in micro_batches),
            *(Step("backward", stage, m) for m in micro_batches),
        )
        for stage in range(num_stages)
    )


def forward_only(*, num_stages: int, num_micro_batches: int) -> Table:
    """Evaluation: every stage forwards every micro-batch."""
    return with_messages(
        tuple(Step("forward", stage, m) for m in range(num_micro_batches)) for stage in range(num_stages)
    )


def with_messages(compute: Iterable[Lane]) -> Table:
    """Add to lanes of compute steps the sends and receives that they need.

    A send follows its compute at once. A receive is posted one compute step ahead, so that the message can
    arrive while the stage still works on the step before; its buffer lives from there to its use.
    """
    lanes = tuple(compute)
    return tuple(_lane_with_messages(lane, num_stages=len(lanes)) for lane in lanes)


def _lane_with_messages(lane: Lane, *, num_stages: int) -> Lane:
    steps: list[Step] = [receive for step in lane[:1] if (receive := _receive_for(step, num_stages))]
    for step, following in zip(lane, (*lane[1:], None), strict=True):
        if following is not None and (receive := _receive_for(following, num_stages)):
            steps.append(receive)
        steps.append(step)
        if send := _send_after(step, num_stages):
            steps.append(send)
    return tuple(steps)


def _receive_for(step: Step, num_stages: int) -> Step | None:
    if step.kind == "forward" and step.stage > 0:
        return Step("receive_activation", step.stage, step.micro_batch)
    if step.kind == "backward" and step.stage < num_stages - 1:
        return Step("receive_gradient", step.stage, step.micro_batch)
    return None


def _send_after(step: Step, num_stages: int) -> Step | None:
    if step.kind == "forward" and step.stage < num_stages - 1:
        return Step("send_activation", step.stage, step.micro_batch)
    if step.kind == "backward" and step.stage > 0:
        return Step("send_gradient", step.stage, step.micro_batch)
    return None
