"""What a checked step does besides: each message has a checksum, and each stage computes a micro-batch twice.

Weights that several ranks hold are compared with each other (`parallel/checksums.py`); a gradient or a
message has one owner, so it is compared with itself. A stage computes its first micro-batch again as soon as
that has been through its backward, from an empty gradient, and compares all bits. That finds what a core or
its memory does to a forward or a backward now and then. It does not find what they do each time alike, nor
what happens to a gradient after that backward.

Bits are equal where kernels add in one order: on processors. Some of a card's do not; cards check messages
alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import cast

import torch

from yuan_train.models.transformer import Transformer
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.checksums import same_bits
from yuan_train.parallel.executor import Stopwatch
from yuan_train.train.objective import TokenLoss
from yuan_train.train.stage import PagedRunner, Repeat, StageRunner

MOST_NAMED = 3
"""Parameters that a message lists."""


@contextmanager
def checking(
    runtime: RankRuntime, runners: Mapping[int, StageRunner], stopwatch: Stopwatch, faults: list[str]
) -> Iterator[None]:
    """Around the rank program of a step that all ranks check; `faults` gets what this rank finds."""
    for stage, runner in runners.items():
        micro_batch = _to_repeat(runtime, stage, runner)
        if micro_batch is not None:
            compare = partial(_compare, runtime, stage, runner, stopwatch, faults)
            runner.repeat = Repeat(micro_batch, compare)
    bridge = runtime.bridge
    if bridge is not None:
        bridge.checks = True
    try:
        yield
    finally:
        for runner in runners.values():
            runner.repeat = None
        if bridge is not None:
            bridge.checks = False
            faults += bridge.faults
            bridge.faults.clear()


def _to_repeat(runtime: RankRuntime, stage: int, runner: StageRunner) -> int | None:
    """The first micro-batch of a stage's backwards; None if it cannot be computed again.

    What copies parameters or activations has copied them back; a split backward is in two places; the last
    backward has started reductions; and other objectives count more than a loss.
    """
    backwards = [step for step in runtime.program if step.stage == stage and step.kind == "backward"]
    if len(backwards) < 2 or isinstance(runner, PagedRunner) or runtime.copies is not None:
        return None
    device = next(runtime.parts[stage].parameters()).device
    if device.type != "cpu" or not isinstance(runner.objective, TokenLoss):
        return None
    return backwards[0].micro_batch


def _compare(
    runtime: RankRuntime,
    stage: int,
    runner: StageRunner,
    stopwatch: Stopwatch,
    faults: list[str],
    first: Repeat,
) -> None:
    """Compute a micro-batch again whose backward has ended, and note what differs; gradients stay as they
    were."""
    with stopwatch.paused(), torch.no_grad():
        part = cast(Transformer, runtime.parts[stage])
        gradients = {
            name: cast(torch.Tensor, parameter.main_gradient)  # pyright: ignore[reportAttributeAccessIssue]
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient.zero_()
        output, input_gradient = runner.compute_again(first)
        unlike = [] if same_bits(first.output, output) else ["the output"]
        given = first.input_gradient
        if given is not None and input_gradient is not None and not same_bits(given, input_gradient):
            unlike.append("the gradient of its input")
        names = _alone(runtime, stage)
        odd = [name for name in gradients if name in names and not same_bits(kept[name], gradients[name])]
        for name, gradient in gradients.items():
            gradient.copy_(kept[name])
    if odd:
        more = f" and {len(odd) - MOST_NAMED} more" if len(odd) > MOST_NAMED else ""
        unlike.append(f"the gradient of {', '.join(odd[:MOST_NAMED])}{more}")
    if unlike:
        faults.append(
            f"{runtime.grid.label(runtime.coord)}: micro-batch {first.micro_batch} on stage {stage}, "
            f"computed twice, has other bits in {', '.join(unlike)}"
        )


def _alone(runtime: RankRuntime, stage: int) -> Collection[str]:
    """The parameters whose gradients hold nothing but the first micro-batch's when its backward ends."""
    part = cast(Transformer, runtime.parts[stage])
    kinds = [step.kind for step in runtime.program if step.stage == stage and step.is_compute]
    # The head adds its gradient in the forward, so that all forwards until then are in it.
    several = part.has_head and kinds.index("backward") > 1
    others = {
        name
        for number, other in runtime.parts.items()
        if number != stage
        for name, _ in other.named_parameters()
    }
    return [
        name
        for name, parameter in part.named_parameters()
        if name not in others and not (several and parameter is part.output_weight)
    ]
