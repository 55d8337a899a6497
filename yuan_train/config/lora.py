"""Adapters of low rank (LoRA, Hu et al. 2021, arXiv 2106.09685): the only tensors that a run trains.

    y = x W^T + alpha / r (x A^T) B^T      W [out, in] frozen, A [r, in], B [out, r]

B begins with zeros, so that step 1 computes what the base model computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from annotated_types import Gt, Lt

from yuan_train.config.architecture import adaptable
from yuan_train.config.errors import Violation

if TYPE_CHECKING:
    from yuan_train.config.model import ModelConfig
    from yuan_train.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Which matrices of each layer have adapters, and of what rank."""

    rank: Annotated[int, Gt(0)]
    """Rows of A and columns of B in each adapter."""
    alpha: Annotated[float, Gt(0), Lt(math.inf)] | None = None
    """Adapters are scaled by alpha / rank; None: the rank, as in the paper."""
    targets: tuple[str, ...] = ()
    """Last words of the names of linear maps: `query`, `value`, `out`, `up`, `down`, ...; empty: all."""

    def __post_init__(self) -> None:
        if self.alpha is None:
            object.__setattr__(self, "alpha", float(self.rank))

    @property
    def scale(self) -> float:
        """alpha / rank."""
        assert self.alpha is not None
        return self.alpha / self.rank


def lora_violations(model: ModelConfig) -> Iterator[Violation]:
    """Yield what is wrong with a model's adapters."""
    lora = model.lora
    if lora is None:
        return
    if model.num_experts:
        yield Violation(("lora",), "a model with experts has no adapters yet; wanted a dense model")
        return
    words = [name.rpartition(".")[2] for name in adaptable(model)]
    for i, target in enumerate(lora.targets):
        if target not in words:
            yield Violation(
                ("lora", "targets", i), f"{target!r} is no matrix of a layer (has: {', '.join(words)})"
            )


def lora_run_violations(run: RunConfig) -> Iterator[Violation]:
    """Yield what of a training run does not go with adapters."""
    if run.model.lora is None:
        return
    if run.engine == "megatron":
        yield Violation(("engine",), "megatron, which trains no adapters (lora); set yuan, or leave lora out")
    if run.search.half_layers:
        yield Violation(
            ("search", "half_layers"), "true: layers with adapters (lora) are not cut in half yet; set false"
        )
    if "megatron" in (run.search.engine or ()):
        yield Violation(("search", "engine"), "megatron trains no adapters (lora); leave it out")
    for tier in run.search.offload or ():
        yield Violation(
            ("search", "offload"),
            f"{tier}: a run with adapters (lora) keeps nothing on hosts yet; leave it out",
        )
