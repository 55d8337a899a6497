"""Linear programs of a few rows: the best mixture of columns under limits, and the prices of the limits."""

from __future__ import annotations

import numpy as np

from yuan_train.planner.search.stage_parts import Floats

MAX_PIVOTS = 200
TINY = 1e-12


def best_mixture(
    values: Floats, uses: Floats, limits: Floats, *, limited: bool = True
) -> tuple[float, Floats]:
    """(value, prices [T]) of: maximize sum_j x_j values[j] so that sum_j x_j uses[j, t] <= limits[t] and, if
    it is `limited`, sum_j x_j <= 1; x >= 0. Values and limits are not negative.

    Dense simplex from x = 0. Pivots that go on too long end it early: callers check what prices prove.
    """
    num_rows, num_columns = len(limits) + 1, len(values)
    tableau = np.zeros((num_rows + 1, num_columns + num_rows + 1))
    tableau[:-2, :num_columns] = uses.T
    tableau[-2, :num_columns] = float(limited)
    tableau[:-1, num_columns:-1] = np.eye(num_rows)
    tableau[:-2, -1] = limits
    tableau[-2, -1] = 1.0
    tableau[-1, :num_columns] = -values
    for pivot in range(MAX_PIVOTS):
        costs = tableau[-1, :-1]
        # Bland's rule after a while: it never cycles.
        column = int(costs.argmin()) if pivot < MAX_PIVOTS // 2 else int((costs < -TINY).argmax())
        if costs[column] >= -TINY:
            break
        entries, right = tableau[:-1, column], tableau[:-1, -1]
        ratios = np.where(entries > TINY, right / np.where(entries > TINY, entries, 1.0), np.inf)
        row = int(ratios.argmin())
        if not np.isfinite(ratios[row]):
            break
        tableau[row] /= tableau[row, column]
        factors = tableau[:, column].copy()
        factors[row] = 0.0
        tableau -= factors[:, None] * tableau[row]
    return float(tableau[-1, -1]), np.maximum(tableau[-1, num_columns:-2], 0.0)
