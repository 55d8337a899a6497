"""Which units of the model share a bucket: one rule for the engine that reduces gradients and the planner
that prices it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence


def group_units(
    owners: Sequence[Hashable], parameters: Sequence[float], *, bucket_size: int
) -> tuple[range, ...]:
    """The buckets of a model's units, in the model's order, each as a range of unit numbers.

    A bucket is a run of adjacent units with the same owners. Gradients become complete from the last unit to
    the first, so a run is divided from its end: a bucket takes units as long as it has at most `bucket_size`
    parameters. A larger unit is a bucket of its own, or two; see `is_halved`. `owners` and `parameters`
    (elements; 0 for a unit that holds none) are by unit.
    """
    buckets: list[range] = []
    end = len(owners)
    size = 0.0
    for unit in reversed(range(len(owners))):
        size += parameters[unit]
        starts_run = unit == 0 or owners[unit - 1] != owners[unit]
        if starts_run or size + parameters[unit - 1] > bucket_size:
            buckets.append(range(unit, end))
            end, size = unit, 0.0
    return tuple(reversed(buckets))


def is_halved(parameters: float, *, num_owners: int, bucket_size: int) -> bool:
    """Whether the halves of a layer of so many parameters are buckets of their own.

    In the backward the gradients of its feed-forward are complete before those of its attention, and hide
    behind them: of the first layer, whose reduction comes last, less is left when the backward has ended.
    """
    return num_owners > 1 and parameters > bucket_size
