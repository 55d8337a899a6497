"""The published Hugging Face format of this architecture."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import ModelConfig
from yuan_train.models.published import TensorMapping

MODEL_TYPES = ("qwen2", "qwen3")
MODEL_CODE: tuple[str, ...] = ()


def published_layout(model: ModelConfig) -> Iterator[TensorMapping]:
    """Yield every tensor of a model, in the model's order; a tied output head is left out."""
    raise CheckpointError(f"architecture {model.architecture}: its published format is not supported yet")


def model_from_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
    """The model that a `config.json` describes."""
    raise CheckpointError(f"{where}: model_type {config['model_type']!r} cannot be imported yet")


def published_config(
    model: ModelConfig,
    *,
    dtype: str,
    original: Mapping[str, Any] | None = None,
    resets: Mapping[str, bool] | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The `config.json` of a model."""
    raise CheckpointError(f"architecture {model.architecture}: its published format is not supported yet")
