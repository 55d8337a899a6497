"""Published Hugging Face formats: what they have in common, and which architecture reads which. No torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from yuan_train.config.architecture import find_format, find_module
from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TensorMapping:
    """One of our tensors, and the published tensors (`parts`) that it is the row-wise concatenation of.

    `name` and `shape` are ours. All parts have `part_shape`, with equal numbers of rows; a Conv2d's ends
    in a dimension of size 1 that ours does not have. `stacked` parts lack our first dim: each is one entry of
    it, as a matrix of one expert, or equal rows of one, as an expert's gate and up.
    """

    name: str
    shape: tuple[int, ...]
    parts: tuple[str, ...]
    conv2d: bool = False
    stacked: bool = False

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of each published part."""
        if self.stacked:
            return (self.shape[0] * self.shape[1] // len(self.parts), *self.shape[2:])
        rows = self.shape[0] // len(self.parts)
        return (rows, *self.shape[1:], *((1,) if self.conv2d else ()))


Layer = Callable[[ModelConfig, str, str], Iterator[TensorMapping]]
"""Yields the tensors of a layer, given the prefixes of our names and of the published ones."""


def decoder_layout(model: ModelConfig, layer: Layer) -> Iterator[TensorMapping]:
    """Yield every tensor of a decoder, in the model's order; a tied output head is left out."""
    hidden = model.hidden_size
    yield TensorMapping("embedding.weight", (model.vocab_size, hidden), (EMBEDDING,))
    for i in range(model.num_layers):
        yield from layer(model, f"layers.{i}", f"model.layers.{i}")
    yield TensorMapping("final_norm.weight", (hidden,), ("model.norm.weight",))
    if not model.tie_embeddings:
        yield TensorMapping("head.weight", (model.vocab_size, hidden), (HEAD,))


def refuse_bias(model: ModelConfig) -> None:
    """Raise CheckpointError for a model whose router chooses by a bias, for which a format has no place."""
    if model.balance == "bias":
        raise CheckpointError("balance bias: the published format has no bias of experts in the choice")


def rotary_buffer(layer: int) -> str:
    """Published name of a layer's rotary frequencies [rotary_size / 2], which files need not store."""
    return f"model.layers.{layer}.self_attn.rotary_emb.inv_freq"


class PublishedFormat(Protocol):
    """What an architecture's `hf.py` has."""

    MODEL_TYPES: tuple[str, ...]
    """`model_type` of the configs that it reads."""
    MODEL_CODE: tuple[str, ...]
    """Files of `hf_export` that transformers needs beside the weights; none where it has the model itself."""
    STORES_TIED_HEAD: bool
    """Whether published files hold a copy of a tied output head."""

    def published_layout(self, model: ModelConfig) -> Iterator[TensorMapping]:
        """Yield every tensor of a model, in the model's order; a tied output head is left out."""
        ...

    def model_from_config(self, config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
        """The model that a `config.json` describes. Raises CheckpointError, naming `where`."""
        ...

    def resets_of(self, config: Mapping[str, Any]) -> dict[str, bool]:
        """What a model with this `config.json` resets at document ends: keys of a run's `data`."""
        ...

    def published_config(
        self,
        model: ModelConfig,
        *,
        dtype: str,
        original: Mapping[str, Any] | None = None,
        resets: Mapping[str, bool] | None = None,
        token_ids: Mapping[str, int] | None = None,
    ) -> dict[str, Any]:
        """The `config.json` of a model, with the keys of `original` that say nothing of sizes."""
        ...


def format_of(architecture: str) -> PublishedFormat:
    """The published format of an architecture."""
    return cast(PublishedFormat, find_module(architecture, "hf"))


def format_for(config: Mapping[str, Any], *, where: str) -> PublishedFormat:
    """The format that reads a `config.json`, by its `model_type`. Raises CheckpointError for another one."""
    return cast(PublishedFormat, find_format(config, where=where))
