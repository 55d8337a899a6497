"""Llama 3 (arXiv 2407.21783): grouped-query attention, SwiGLU, RMSNorm, scaled rotary embedding.

With experts it is Mixtral (arXiv 2401.04088).
"""

from __future__ import annotations

from yuan_train.config.architecture import ModelSpec, Normal, ParameterSpec, SublayerWork
from yuan_train.config.model import EXPERT_FIELDS, ModelConfig
from yuan_train.models import sizes


def layer(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The parameters of a layer, drawn from N(0, init_std) as transformers does."""
    return (*sizes.grouped_attention(model), *sizes.feed_forward(model, out=Normal(model.init_std)))


def sublayers(model: ModelConfig) -> tuple[SublayerWork, SublayerWork]:
    """The work of attention and of the feed-forward."""
    attention = sizes.parameters_of(sizes.grouped_attention(model))
    feed_forward = sizes.parameters_of(sizes.feed_forward(model, out=Normal(model.init_std)))
    return sizes.grouped_attention_work(model, attention), sizes.feed_forward_work(model, feed_forward)


SPEC = ModelSpec(
    title="Llama 3",
    takes=frozenset(("num_key_value_heads", "rope_scaling", *EXPERT_FIELDS)),
    defaults={"attention": "plain"},
    constraints=lambda model: iter(()),
    layer=layer,
    sublayers=sublayers,
    tensor_sizes=sizes.tensor_sizes,
    held_experts=sizes.held_experts_work,
)
