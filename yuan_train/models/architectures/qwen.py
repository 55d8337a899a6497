"""Qwen 2.5 (arXiv 2412.15115) and Qwen 3 (arXiv 2505.09388): Llama's layer with biases or head norms.

With experts, which have head norms, it is Qwen 3's mixture. The published Hugging Face formats are those of
Qwen 2 and 2.5 (model_type `qwen2`) and of Qwen 3 (`qwen3`, and `qwen3_moe` with experts).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from yuan_train.config.errors import CheckpointError, Violation
from yuan_train.config.model import ModelConfig
from yuan_train.models.architectures.llama import MODEL_CODE, STORES_TIED_HEAD, published_layout, resets_of
from yuan_train.models.architectures.llama import SPEC as LLAMA
from yuan_train.models.decoder import DEFAULTS, Publishing, decoder_config, decoder_from_config, refuse

__all__ = ["MODEL_CODE", "STORES_TIED_HEAD", "published_layout", "resets_of"]


def _constraints(model: ModelConfig) -> Iterator[Violation]:
    if model.qkv_bias == model.query_key_norm:
        yield Violation(
            ("query_key_norm",), "Qwen 2.5 has qkv_bias, Qwen 3 has query_key_norm; give exactly one of them"
        )


SPEC = replace(
    LLAMA, title="Qwen", takes=LLAMA.takes | {"qkv_bias", "query_key_norm"}, constraints=_constraints
)


# --- the published format ---------------------------------------------------------------------------------

MODEL_TYPES = ("qwen2", "qwen3", "qwen3_moe")


def model_from_config(config: Mapping[str, Any], *, name: str, where: str) -> ModelConfig:
    """The model that a `config.json` describes. Raises CheckpointError, naming `where`."""
    absent = {**DEFAULTS, "max_position_embeddings": 32768, "num_key_value_heads": 32}
    if config["model_type"] == "qwen3":
        absent["head_dim"] = 128
    fields: dict[str, Any] = {
        "architecture": "qwen",
        "qkv_bias": config["model_type"] == "qwen2",
        "query_key_norm": config["model_type"] != "qwen2",
    }
    if config["model_type"] == "qwen3_moe":
        absent["num_key_value_heads"] = 4
        refuse(config, where, ("mlp_only_layers", "shared_expert_intermediate_size", "n_shared_experts"))
        if config.get("decoder_sparse_step", 1) != 1:
            step = config["decoder_sparse_step"]
            raise CheckpointError(f"{where}: decoder_sparse_step {step!r}; only 1, experts in every layer")
        fields |= {
            "num_experts": config.get("num_experts", 128),
            "experts_per_token": config.get("num_experts_per_tok", 8),
            "expert_ffn_hidden_size": config.get("moe_intermediate_size", 768),
            "norm_topk_prob": config.get("norm_topk_prob", False),
            "router": "softmax",
        }
    return decoder_from_config(config, name=name, where=where, absent=absent, fields=fields)


def published_config(model: ModelConfig, how: Publishing) -> dict[str, Any]:
    """The `config.json` of a model, which transformers reads by itself; it has no word for resets."""
    release = 3 if model.query_key_norm else 2
    plain = {
        "model_type": f"qwen{release}",
        "architectures": [f"Qwen{release}ForCausalLM"],
        "use_sliding_window": False,
        **({"attention_bias": False} if release == 3 else {}),
    }
    return decoder_config(model, how, _mixture(model) if model.num_experts else plain)


def _mixture(model: ModelConfig) -> dict[str, Any]:
    """What the config of a Qwen 3 with experts has of its own. Raises CheckpointError for a Qwen 2.5."""
    if not model.query_key_norm:
        raise CheckpointError(
            "num_experts: of Qwen's mixtures Qwen 3's, with query_key_norm, has a format here"
        )
    return {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "use_sliding_window": False,
        "attention_bias": False,
        "num_experts": model.num_experts,
        "num_experts_per_tok": model.experts_per_token,
        "moe_intermediate_size": model.expert_width,
        "norm_topk_prob": model.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
