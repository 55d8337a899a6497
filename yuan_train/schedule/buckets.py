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
    parameters. A unit is never divided: a larger one is a bucket of its own. `owners` and `parameters`
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
