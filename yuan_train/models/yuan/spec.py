"""Yuan 2.0 (arXiv 2311.15786): attention whose queries and keys see a localized filter; `plain` is its twin.

    layer:  u = RMSNorm(x);  x += attention(u, filter(u));  x += feed_forward(RMSNorm(x))

In Yuan 2.0-M32 (arXiv 2405.17976) the feed-forward is a mixture of experts.

H = hidden size, P = heads * head size, N = heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from yuan_train.config.architecture import (
    Kept,
    ModelSpec,
    Normal,
    ParameterSpec,
    SublayerWork,
    Uniform,
    norm,
)
from yuan_train.config.errors import Violation
from yuan_train.config.model import EXPERT_FIELDS, ModelConfig
from yuan_train.models import sizes


def _constraints(model: ModelConfig) -> Iterator[Violation]:
    if model.attention == "localized_filter" and model.hidden_size % 2:
        yield Violation(
            ("hidden_size",), f"{model.hidden_size} is odd; the localized filter has hidden_size / 2 channels"
        )


def _filter(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The localized filter, 2H^2 + 2.5H parameters, its norm included; drawn as PyTorch's Conv2d default."""
    if model.attention == "plain":
        return ()
    hidden, half = model.hidden_size, model.hidden_size // 2

    def convolution(name: str, out_size: int, in_size: int) -> Iterator[ParameterSpec]:
        bound = Uniform(1.0 / math.sqrt(2 * in_size))
        for kind, shape in (("weight", (out_size, in_size, 2)), ("bias", (out_size,))):
            yield ParameterSpec(name=f"{name}.{kind}", shape=shape, sharding="filter", initial=bound)

    return (
        *convolution("filter.conv1", half, hidden),
        *convolution("filter.conv2", hidden, half),
        norm("filter.norm.weight", hidden),
    )


def _attention(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """The norm, the filter and attention; the rows of `query_key` are interleaved per head, so that
    contiguous rows hold whole heads."""
    hidden, projection = model.hidden_size, model.projection_size
    return (
        norm("attention_norm.weight", hidden),
        *_filter(model),
        sizes.linear("attention.value", (projection, hidden), "column", Normal(model.init_std)),
        sizes.linear("attention.query_key", (2 * projection, hidden), "column", Normal(model.init_std)),
        sizes.linear("attention.out", (hidden, projection), "row", _out(model)),
    )


def _out(model: ModelConfig) -> Normal:
    """Of the maps back to the hidden state: N(0, init_std / sqrt(2 * num_layers)), as published."""
    return Normal(model.init_std / math.sqrt(2 * model.num_layers))


def _feed_forward(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    return sizes.feed_forward(model, out=_out(model))


def _sublayers(model: ModelConfig) -> tuple[SublayerWork, SublayerWork]:
    feed_forward = sizes.parameters_of(_feed_forward(model))
    return _attention_work(model), sizes.feed_forward_work(model, feed_forward)


def _attention_work(model: ModelConfig) -> SublayerWork:
    """What autograd saves in the model's code (equal to a count with `saved_tensors_hooks`):

    the norms (attention, filter)         the input, and 1/rms
    u (also the filter's input), f        H each
    taps of the filter's convolutions     H
    q, k, v, heads' output                P each, and N log-sum-exps

    Plain attention has neither the filter's norm nor taps, and f is u. No attention scores are stored. A
    frozen filter (the model has adapters) keeps no taps: they are for its weights' gradients.
    """
    hidden, projection = model.hidden_size, model.projection_size
    filters = 1 if model.attention == "localized_filter" else 0
    taps = filters if model.lora is None else 0
    sharded = Kept(4 * projection + taps * hidden, model.num_attention_heads)
    return SublayerWork(
        parameters=sizes.parameters_of(_attention(model)),
        products=4 * hidden * projection + filters * 2 * hidden * hidden,
        scores=projection,
        replicated=Kept((2 + 2 * filters) * hidden, 1 + filters),
        sharded=sharded,
        selective_replicated=Kept((1 + filters) * hidden, 1 + filters),
        selective_sharded=sharded,
        gathered=(1 + filters) * hidden,
        # The filter's shift and residual add a pass.
        shifted=3 * hidden * filters,
        recomputed=(1 + filters) * 2 * hidden,
        held=Kept(4 * projection + 2 * hidden, 2 * hidden),
        largest_weight=2 * projection * hidden,
        collectives=1 + filters,
    )


def _tensor_sizes(model: ModelConfig) -> dict[str, int]:
    found = sizes.tensor_sizes(model)
    del found["key-value heads"]
    return found if model.attention == "plain" else found | {"filter channels": model.hidden_size // 2}


SPEC = ModelSpec(
    title="Yuan 2.0",
    takes=frozenset(("attention", "rotary_dim", "rotary_form", *EXPERT_FIELDS)),
    defaults={"attention": "localized_filter"},
    constraints=_constraints,
    layer=lambda model: (*_attention(model), *_feed_forward(model)),
    sublayers=_sublayers,
    tensor_sizes=_tensor_sizes,
    held_experts=sizes.held_experts_work,
)
