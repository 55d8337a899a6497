"""The published Hugging Face formats of Qwen 2 and 2.5 (model_type `qwen2`) and of Qwen 3 (`qwen3`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from yuan_train.config.model import ModelConfig
from yuan_train.models.llama.hf import MODEL_CODE, STORES_TIED_HEAD, published_layout, resets_of
from yuan_train.models.published_config import DEFAULTS, decoder_config, decoder_from_config

__all__ = ["MODEL_CODE", "STORES_TIED_HEAD", "published_layout", "resets_of"]

MODEL_TYPES = ("qwen2", "qwen3")


def model_from_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
    """The model that a `config.json` describes. Raises CheckpointError, naming `where`."""
    absent = {**DEFAULTS, "max_position_embeddings": 32768, "num_key_value_heads": 32}
    if config["model_type"] == "qwen3":
        absent["head_dim"] = 128
    fields = {
        "architecture": "qwen",
        "qkv_bias": config["model_type"] == "qwen2",
        "query_key_norm": config["model_type"] == "qwen3",
    }
    return decoder_from_config(config, name=name, where=where, absent=absent, fields=fields)


def published_config(
    model: ModelConfig,
    *,
    dtype: str,
    original: Mapping[str, Any] | None = None,
    resets: Mapping[str, bool] | None = None,
    token_ids: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """The `config.json` of a model, which transformers reads by itself; `resets` it has no word for."""
    release = 3 if model.query_key_norm else 2
    derived = {
        "model_type": f"qwen{release}",
        "architectures": [f"Qwen{release}ForCausalLM"],
        "use_sliding_window": False,
    }
    if release == 3:
        derived["attention_bias"] = False
    return decoder_config(model, dtype=dtype, original=original, token_ids=token_ids, derived=derived)
