"""Sums and maxima over all ranges of units."""

from __future__ import annotations

import numpy as np

from yuan_train.planner.solver.instance import Floats


def prefix_sums(values: Floats) -> Floats:
    """[..., U] to [..., U+1]: the sum of the values before each unit."""
    zeros = np.zeros((*values.shape[:-1], 1))
    return np.concatenate((zeros, values.cumsum(axis=-1)), axis=-1)


def range_sums(values: Floats) -> Floats:
    """[..., U] to [..., U+1, U+1]: the sum over [first, end), negative where end < first."""
    prefix = prefix_sums(values)
    return prefix[..., None, :] - prefix[..., :, None]


def range_maxima(values: Floats) -> Floats:
    """[C, U] to [C, U+1, U+1]: the maximum over [first, end), 0 for an empty range."""
    count, units = values.shape
    result = np.zeros((count, units + 1, units + 1))
    for first in range(units):
        result[:, first, first + 1 :] = np.maximum.accumulate(values[:, first:], axis=1)
    return result
