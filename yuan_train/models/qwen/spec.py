"""Qwen 2.5 (arXiv 2412.15115) and Qwen 3 (arXiv 2505.09388): Llama's layer with biases or head norms.

With experts, which have head norms, it is Qwen 3's mixture.
"""

from __future__ import annotations

from collections.abc import Iterator

from yuan_train.config.architecture import ModelSpec
from yuan_train.config.errors import Violation
from yuan_train.config.model import EXPERT_FIELDS, ModelConfig
from yuan_train.models import sizes
from yuan_train.models.llama.spec import layer, sublayers


def _constraints(model: ModelConfig) -> Iterator[Violation]:
    if model.qkv_bias == model.query_key_norm:
        yield Violation(
            ("query_key_norm",), "Qwen 2.5 has qkv_bias, Qwen 3 has query_key_norm; give exactly one of them"
        )


SPEC = ModelSpec(
    title="Qwen",
    takes=frozenset(("num_key_value_heads", "rope_scaling", "qkv_bias", "query_key_norm", *EXPERT_FIELDS)),
    defaults={"attention": "plain"},
    constraints=_constraints,
    layer=layer,
    sublayers=sublayers,
    tensor_sizes=sizes.tensor_sizes,
    held_experts=sizes.held_experts_work,
)
