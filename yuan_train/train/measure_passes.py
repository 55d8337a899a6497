"""A profile's cases are measured in passes over all of them; the entry of a case is made of its passes."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace

from yuan_train.config.profile import ProfileEntry, StageStart, UnitProfile
from yuan_train.train.measure import MeasuredCase, ProfileCase, num_layers_in_a_row

PASS_SECONDS, MOST_PASSES = 0.5, 3
"""A CPU's speed may change from one second to the next, most of all a virtual one's. There a unit's time is
divided into passes over all cases, so that all see the same changes."""


def num_passes(case: ProfileCase) -> int:
    """Passes over all cases in which the units' seconds are measured."""
    if case.device.is_card:
        return 1
    return max(1, min(MOST_PASSES, int(case.seconds_per_unit / PASS_SECONDS)))


def of_pass(case: ProfileCase, passes: int) -> ProfileCase:
    """A case's part of a pass."""
    repeats = max(2, case.least_repeats // passes)
    return replace(case, seconds_per_unit=case.seconds_per_unit / passes, least_repeats=repeats)


def make_entry(case: ProfileCase, passes: Sequence[MeasuredCase]) -> ProfileEntry:
    """The mean seconds of a case's passes, and the first one's bytes.

    n layers in a row take a stage's start and n layers, a single one the start and one layer.
    """
    entries = [measured.entry for measured in passes]
    bare = [entry.bare_layer for entry in entries if entry.bare_layer is not None]
    count = num_layers_in_a_row(case)
    row = _mean([entry.layers[0] for entry in entries])
    single = [
        statistics.fmean(seconds) for seconds in zip(*(one.single_layer for one in passes), strict=True)
    ]
    start = StageStart(
        forward_seconds=_start_seconds(single[0], row.forward_seconds, count),
        backward_seconds=_start_seconds(single[1], row.backward_seconds, count),
    )
    return replace(
        entries[0],
        embedding=_without_start(_mean([entry.embedding for entry in entries]), start, 1),
        layers=(_without_start(row, start, count),),
        head=_without_start(_mean([entry.head for entry in entries]), start, 1),
        start=start,
        bare_layer=_without_start(_mean(bare), start, count) if bare else None,
    )


def _start_seconds(single: float, mean: float, count: int) -> float:
    """What a stage takes besides its layers, from the seconds of a single one and the mean of several."""
    return max(single - mean, 0.0) * count / (count - 1) if count > 1 else 0.0


def _without_start(unit: UnitProfile, start: StageStart, count: int) -> UnitProfile:
    """The mean of `count` units in a row without their share of a stage's start."""
    return replace(
        unit,
        forward_seconds=max(unit.forward_seconds - start.forward_seconds / count, 0.0),
        backward_seconds=max(unit.backward_seconds - start.backward_seconds / count, 0.0),
    )


def _mean(units: Sequence[UnitProfile]) -> UnitProfile:
    return replace(
        units[0],
        forward_seconds=statistics.fmean(unit.forward_seconds for unit in units),
        backward_seconds=statistics.fmean(unit.backward_seconds for unit in units),
    )
