"""Tiny models of every architecture, for tests that all of them must pass."""

from typing import Any

from yuan_train.config.model import ModelConfig, RopeScaling

VARIANTS: dict[str, dict[str, Any]] = {
    "yuan": {},
    "yuan-plain": {"attention": "plain"},
    "yuan-m32": {"head_dim": 24, "rotary_dim": 8, "num_experts": 5, "experts_per_token": 2,
                 "expert_ffn_hidden_size": 48},
    "llama": {"architecture": "llama", "num_key_value_heads": 2, "tie_embeddings": False,
              "rope_scaling": RopeScaling(rope_type="llama3", factor=8.0, original_max_position_embeddings=32,
                                          high_freq_factor=4.0)},
    "qwen2": {"architecture": "qwen", "num_key_value_heads": 2, "qkv_bias": True},
    "qwen3": {"architecture": "qwen", "num_key_value_heads": 4, "num_attention_heads": 8, "head_dim": 16,
              "query_key_norm": True},
    "mixtral": {"architecture": "llama", "num_key_value_heads": 2, "num_experts": 4, "experts_per_token": 2},
    "qwen3-moe": {"architecture": "qwen", "head_dim": 16, "query_key_norm": True, "num_experts": 6,
                  "experts_per_token": 3, "expert_ffn_hidden_size": 48, "norm_topk_prob": False,
                  "balance": "sequence", "balance_rate": 0.1},
}  # fmt: skip
"""By name: what differs from the tiny model."""


def tiny_model(variant: str, **changes: Any) -> ModelConfig:
    """A model of a few thousand parameters; tensor-parallel width 2 divides it."""
    sizes: dict[str, Any] = {
        "name": variant,
        "num_layers": 4,
        "hidden_size": 64,
        "num_attention_heads": 4,
        "ffn_hidden_size": 128,
        "vocab_size": 256,
    }
    return ModelConfig(**(sizes | VARIANTS[variant] | changes))
