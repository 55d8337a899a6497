"""What an architecture says of a layer, without torch: its parameters and its work; and where it is said.

An architecture is a file of `yuan_train/models/architectures`: it has a `ModelSpec` (`config/model.py`), and
the published format (`models/published.py`), if there is one.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from yuan_train.config.errors import CheckpointError

FOLDER = "yuan_train.models.architectures"

Sharding = Literal["column", "row", "filter", "vocabulary", "head_norm", "expert", "whole"]
"""How a tensor-parallel group shards a module's parameters:

column      weight [out, in] and bias [out] by rows: each rank computes a part of the output
row         weight [out, in] by columns: each rank reads a part of the input, and the outputs are all-reduced
filter      the C = H/2 channels between both convolutions: conv1.weight [C, H, 2] and conv1.bias [C] by
            dim 0, conv2.weight [H, C, 2] by dim 1; conv2.bias is replicated, and added once, after the
            all-reduce
vocabulary  weight [V, H] by rows
expert      weight [experts, out, in] by experts: each rank holds a contiguous range of them (`experts` of a
            stage), and all else of a model with experts is whole on every rank
head_norm   replicated, but each rank applies it to its own heads: the gradients are all-reduced
whole       replicated on every rank, which computes the same gradient
"""


@dataclass(frozen=True)
class Normal:
    """Drawn from N(0, std)."""

    std: float


@dataclass(frozen=True)
class Uniform:
    """Drawn from U(-bound, bound)."""

    bound: float


@dataclass(frozen=True)
class Constant:
    """All of this value; nothing is drawn."""

    value: float


@dataclass(frozen=True, kw_only=True)
class ParameterSpec:
    """One parameter of a layer, or of the ends of a model."""

    name: str
    """Inside the layer (`attention.out.weight`), or the model (`embedding.weight`)."""
    shape: tuple[int, ...]
    sharding: Sharding
    initial: Normal | Uniform | Constant
    blocks: int = 1
    """Matrices stacked in a column-sharded weight; each of them is sharded by itself."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Kept:
    """What is kept per token: elements of the model's dtype, statistics in fp32 (fp64 for fp64), integers."""

    elements: int
    statistics: int = 0
    integers: int = 0
    """Of 64 bits."""

    def __add__(self, other: Kept) -> Kept:
        return Kept(
            self.elements + other.elements,
            self.statistics + other.statistics,
            self.integers + other.integers,
        )


@dataclass(frozen=True, kw_only=True)
class SublayerWork:
    """Half of a layer, attention or feed-forward with its norm and residual; per token of one forward."""

    parameters: int
    products: int
    """Weights of the matrix products that a token meets, two FLOP each."""
    scores: int = 0
    """Width of all heads: causal scores and their weighted values cost 2 S FLOP for each of it."""
    replicated: Kept
    """Kept for the backward by every card of a tensor-parallel group."""
    sharded: Kept
    """Kept for the backward, and divided by tensor parallelism."""
    selective_replicated: Kept
    """Of `replicated`, what is kept under selective recompute; so the next."""
    selective_sharded: Kept
    gathered: int = 0
    """Elements of `replicated` that products read: kept in full without recompute where the rest of it is
    divided too (sequence parallelism), and gathered again with it."""
    shifted: int = 0
    """Elements that pass through memory beside those kept."""
    recomputed: int
    """Elements that pass through memory in the backward to recompute what selective recompute drops."""
    held: Kept
    """Held at once while the backward runs."""
    decided: int = 0
    """Integers (64 bits) per token that full recompute keeps too: what was decided is not decided again."""
    largest_weight: int
    """Elements of the largest weight gradient."""
    collectives: int = 1
    """All-reduces of a hidden state over the tensor-parallel group, in the forward as in the backward."""

    def forward_flops(self, sequence_length: int) -> int:
        """Forward FLOP per token: causal attention covers S/2 earlier tokens on average."""
        return 2 * self.products + 2 * sequence_length * self.scores


@functools.cache
def architectures() -> tuple[str, ...]:
    """The names of all architectures."""
    return tuple(
        sorted(found.name for found in pkgutil.iter_modules(importlib.import_module(FOLDER).__path__))
    )


def find_module(architecture: str) -> ModuleType:
    """The file of an architecture."""
    return importlib.import_module(f"{FOLDER}.{architecture}")


def find_format(config: Mapping[str, Any], *, where: str) -> ModuleType:
    """The architecture that reads a `config.json`, by its `model_type`: see `models/published.py`.

    Raises CheckpointError, naming `where`, for another one.
    """
    wanted = config.get("model_type", "yuan")
    known = model_types()
    if not isinstance(wanted, str) or wanted not in known:
        raise CheckpointError(f"{where}: model_type {wanted!r}; wanted one of {', '.join(known)}")
    return find_module(known[wanted])


def model_types() -> dict[str, str]:
    """The architecture that reads a `config.json`, by its `model_type`; one without a published format has
    none."""
    return {kind: own for own in architectures() for kind in getattr(find_module(own), "MODEL_TYPES", ())}


ADAPTERS = ("lora_a", "lora_b")
"""The last words of the names of adapters, which are named beside their matrix's `weight`."""


WHOLE_ADAPTERS = (("column", "lora_a"), ("row", "lora_b"))
"""By sharding: the adapter that every rank of a tensor-parallel group has in full. Each computes a part of
its gradient: of the rows, or of the columns, that it holds."""


def is_whole_adapter(parameter: ParameterSpec) -> bool:
    """Whether every rank of a tensor-parallel group has this adapter in full: the one that neither reads a
    part of the input nor makes a part of the output."""
    kind = parameter.name.rpartition(".")[2]
    return (parameter.sharding, kind) in WHOLE_ADAPTERS


HALVES: tuple[Literal["attention"], Literal["feed_forward"]] = ("attention", "feed_forward")
"""Of a layer, in the order in which they run."""


def half_of(module: str) -> Literal["attention", "feed_forward"]:
    """The half of a layer that a module of it belongs to, by its name inside the layer."""
    first = module.partition(".")[0]
    return "attention" if first in ("attention_norm", "filter", "attention") else "feed_forward"
