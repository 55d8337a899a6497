"""Measured seconds of generation at any number of slots, context and prompts.

A round of b slots whose contexts are l tokens long takes, in a layer, what is affine in b and in b l where
either the weights' bytes or the products decide: between the measured numbers, and beyond them, each number
of slots is a line in the context, and each context a line in the slots, through the two nearest measured.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from yuan_train.config.profile import GenerationProfile, Profile

Measured = Mapping[tuple[str, int], GenerationProfile]
"""By type of card, and cards of a tensor-parallel group."""


@dataclass(frozen=True, kw_only=True)
class PartSeconds:
    """Of a pass over some slots, or prompts: of a layer, and of what is there once."""

    layer: float
    engine: float
    """Of the embedding, and beside the model."""
    head: float


def measured_rounds(profile: Profile | None) -> Measured:
    """What a profile has of generation."""
    found = profile.generation if profile is not None else ()
    return {(own.device_type, own.tensor_parallel): own for own in found}


def round_parts(own: GenerationProfile, *, slots: int, context: float) -> PartSeconds:
    """Seconds of a round, on the cards that were measured."""
    by_slots = [line_through(own.contexts, row, context) for row in own.layer_seconds]
    return PartSeconds(
        layer=line_through(own.slots, by_slots, slots),
        engine=line_through(own.slots, own.engine_seconds, slots),
        head=line_through(own.slots, own.head_seconds, slots),
    )


def reading_parts(own: GenerationProfile, *, prompts: int, tokens: int) -> PartSeconds:
    """Seconds of a reading of so many prompts of so many tokens, which draws `group` tokens for each."""
    share = tokens / own.prompt_tokens
    return PartSeconds(
        layer=share * line_through(own.prompts, own.prompt_layer_seconds, prompts),
        engine=line_through(own.prompts, own.prompt_engine_seconds, prompts),
        head=line_through(own.slots, own.head_seconds, prompts * own.group),
    )


def line_through(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """The value at a place, on the line through those of the two nearest places, and not below 0; with one
    place, what is there."""
    if len(places) == 1:
        return values[0]
    after = min(max(bisect.bisect(places, place), 1), len(places) - 1)
    share = (place - places[after - 1]) / (places[after] - places[after - 1])
    return max(0.0, values[after - 1] + share * (values[after] - values[after - 1]))
