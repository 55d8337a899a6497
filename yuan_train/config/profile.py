"""Measured seconds and bytes, as `yuan-train profile` or another tool writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge, Gt, MinLen

from yuan_train.config.errors import Problem
from yuan_train.config.load import build, read_document
from yuan_train.config.run import Recompute

Seconds = Annotated[float, Ge(0)]
Bytes = Annotated[float, Ge(0)]


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """One unit of the model (embedding, layer or head): one micro-batch on one card."""

    forward_seconds: Seconds
    backward_seconds: Seconds
    state_bytes: Bytes
    """Weights, gradients and optimizer state that stay on the card."""
    activation_bytes: Bytes
    """Kept per micro-batch from its forward to its backward."""
    output_bytes: Bytes
    """Message to the next stage."""
    transient_bytes: Bytes | None = None
    """Held for a moment beside, at the peak of forward or backward. None: the bytes above are the whole
    truth; a stage takes reserved + states + activations times micro-batches in flight, to the byte."""


@dataclass(frozen=True, kw_only=True)
class ProfileEntry:
    """The units of a model on one type of card."""

    device_type: str
    tensor_parallel: Annotated[int, Gt(0)] = 1
    micro_batch_size: Annotated[int, Gt(0)] = 1
    recompute: Recompute = "none"
    embedding: UnitProfile
    layers: Annotated[tuple[UnitProfile, ...], MinLen(1)]
    """One per layer, or one that stands for all."""
    head: UnitProfile
    reserved_bytes: Bytes | None = None
    """What a process holds before it holds anything of a model; None: as the cluster says."""

    @property
    def is_whole(self) -> bool:
        """Whether its bytes are the whole truth, as another tool's: no unit tells what it holds beside."""
        return all(unit.transient_bytes is None for unit in (self.embedding, *self.layers, self.head))

    def layer(self, index: int) -> UnitProfile:
        """The profile of layer `index`."""
        return self.layers[0] if len(self.layers) == 1 else self.layers[index]


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """One direction between two cards (`a100-0/0`), measured by size of message."""

    from_: str
    to: str
    message_bytes: Annotated[tuple[Bytes, ...], MinLen(1)]
    seconds: Annotated[tuple[Seconds, ...], MinLen(1)]


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of cards and links for one model shape and sequence length."""

    version: int = 1
    source: str = "measured"
    sequence_length: Annotated[int, Gt(0)]
    model: str | None = None
    machine: str | None = None
    precision: str | None = None
    entries: tuple[ProfileEntry, ...] = ()
    links: tuple[LinkProfile, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the bytes of its entries are the whole truth; such a profile knows no optimizer's step."""
        return bool(self.entries) and all(entry.is_whole for entry in self.entries)

    def reserved_bytes(self, device_type: str) -> float | None:
        """The most that a process on such a card was seen to hold before any model."""
        known = [
            entry.reserved_bytes
            for entry in self.entries
            if entry.device_type == device_type and entry.reserved_bytes is not None
        ]
        return max(known, default=None)


def profile_laws(profile: Profile) -> Iterator[Problem]:
    """Yield what is wrong between the parts of a profile."""
    if profile.version != 1:
        yield Problem(("version",), f"wanted 1, got {profile.version}; measure again with this release")
    seen: set[tuple[object, ...]] = set()
    for i, entry in enumerate(profile.entries):
        key = (entry.device_type, entry.tensor_parallel, entry.micro_batch_size, entry.recompute)
        if key in seen:
            yield Problem(("entries", i), "measured twice: " + ", ".join(map(str, key)) + "; keep one")
        seen.add(key)
    for i, link in enumerate(profile.links):
        if len(link.message_bytes) != len(link.seconds):
            yield Problem(
                ("links", i),
                f"{len(link.message_bytes)} message sizes but {len(link.seconds)} times; one each",
            )
        if list(link.message_bytes) != sorted(set(link.message_bytes)):
            yield Problem(("links", i, "message_bytes"), "sizes must increase")


def load_profile(path: str | Path) -> Profile:
    """Read a profile (JSON). Raises ConfigError with all its faults."""
    return build(read_document(path), Profile, laws=profile_laws)
