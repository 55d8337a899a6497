"""A flat tensor divided among the ranks of a group."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Ranges:
    """A flat tensor [n] divided among the ranks of a group: the elements of each, in the group's order."""

    sizes: tuple[int, ...]

    @cached_property
    def each(self) -> int:
        """Elements that every rank has, if all have as many but the last one, which may have more; else 0.

        An operation for all ranks then does for the leading ones, and another for the last one's rest.
        """
        first = self.sizes[0]
        return first if set(self.sizes[:-1]) <= {first} and self.sizes[-1] >= first else 0

    def of(self, index: int) -> tuple[int, int]:
        """The range [start, end) of the rank at a position of the group."""
        start = sum(self.sizes[:index])
        return start, start + self.sizes[index]
