"""How many cards a pipeline may have, by type and by the width of their groups.

A tensor-parallel group is within a node. So of a type whose nodes have 8, 4 and 2 cards, groups of 8 cards
have those of the first nodes only; each width that leaves out cards gives a limit of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yuan_train.config.cluster import Card
from yuan_train.planner.search.stage_parts import Floats, Integers, type_names


@dataclass(frozen=True, eq=False)
class CardLimits:
    """R limits: of the cards of a type in groups of some width or more."""

    types: Integers
    """[R]: index of the type."""
    widths: Integers
    """[R]: least width of the groups."""
    units: Integers
    """[R]: what such groups have a multiple of."""
    most: Floats
    """[R]: cards in all."""

    def uses(self, types: Integers, widths: Integers, cards: Integers) -> Floats:
        """[M, R]: what stages take of the limits."""
        counts = (types[:, None] == self.types) & (widths[:, None] >= self.widths)
        return np.where(counts, cards[:, None], 0).astype(np.float64)

    def of_each(self, count: int) -> Floats:
        """[R]: of each of so many equal pipelines."""
        units = self.units.astype(np.float64)
        return np.floor(self.most / (count * units)) * units

    def total(self, most: Floats) -> float:
        """Cards of all types, of limits [R]."""
        return float(most[self._is_first].sum())

    @property
    def _is_first(self) -> NDArray[np.bool_]:
        return np.concatenate([[True], self.types[1:] != self.types[:-1]])

    def at_types(self, values: Floats) -> Floats:
        """[T]: of values [R], those at the limits of all cards of a type."""
        return values[self._is_first]

    def of_types(self, values: Floats) -> Floats:
        """[R]: a value of each type at the limit of all its cards, 0 at the others."""
        return np.where(self._is_first, values[self.types], 0.0)


def card_limits(cards: Sequence[Card], widths: Sequence[int]) -> CardLimits:
    """The limits of these cards: first that of all cards of a type, then those of wider groups."""
    rows: list[tuple[int, int, int, int]] = []
    for index, name in enumerate(type_names(cards)):
        sizes = Counter(card.node for card in cards if card.type == name)
        before = math.inf
        for width in sorted({1, *widths}):
            wider = [w for w in widths if w >= width]
            unit = math.gcd(*wider) if width > 1 else 1
            most = sum(_most_in_groups(size, wider) if width > 1 else size for size in sizes.values())
            if 0 < most < before:
                rows.append((index, width, unit, most))
            before = most
    types, least, units, most = (np.array(column, dtype=np.int64) for column in zip(*rows, strict=True))
    return CardLimits(types, least, units, most.astype(np.float64))


def _most_in_groups(size: int, widths: Sequence[int]) -> int:
    """The most of so many cards that groups of these widths have."""
    reached = {0}
    for number in range(1, size + 1):
        if any(number - width in reached for width in widths):
            reached.add(number)
    return max(reached)
