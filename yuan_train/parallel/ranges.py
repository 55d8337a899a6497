"""A flat tensor divided among the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Ranges:
    """A flat tensor [n] divided among the ranks of a group: the elements of each, in the group's order."""

    sizes: tuple[int, ...]

    @cached_property
    def are_equal(self) -> bool:
        """Whether all ranks have as many elements."""
        return len(set(self.sizes)) == 1

    def of(self, index: int) -> tuple[int, int]:
        """The range [start, end) of the rank at a position of the group."""
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]
