"""What a card holds while it trains by reinforcement: bytes by phase and category.

A step has phases that follow each other: answers are generated, the model is trained on them, the optimizer
steps. What lasts from step to step is there in all of them; the peak is the largest phase's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Samples:
    """The samples that a card trains on at once: answers to one prompt."""

    group: int
    """Answers to the prompt."""
    prompt: int
    """Tokens of the prompt."""
    new: int
    """Tokens of an answer; the longest, to which the others are padded."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt + self.new

    @property
    def tokens(self) -> int:
        """Tokens of all samples, their prompts repeated."""
        return self.group * self.length


@dataclass(frozen=True, kw_only=True)
class PhaseBytes:
    """Bytes on one card. Categories are in the order in which they are shown."""

    states: Mapping[str, float]
    """There in all phases: weights, reference, gradients, optimizer."""
    phases: Mapping[str, Mapping[str, float]]
    """What each phase holds beside them."""
    reserved: float
    """Not available to tensors: the driver's context."""

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=self.of_phase)

    @property
    def peak(self) -> int:
        """Peak bytes, rounded up."""
        return math.ceil(self.of_phase(self.peak_phase))

    def of_phase(self, name: str) -> float:
        """All bytes that are held in a phase."""
        return math.fsum((*self.states.values(), *self.phases[name].values(), self.reserved))
