"""Parameters and work of the parts that architectures share; no torch.

H = hidden size, P = heads * head size, K = the same of keys or values, F = feed-forward width, N = heads,
D = head size.
"""

from __future__ import annotations

from yuan_train.config.model import (
    Constant,
    Kept,
    ModelConfig,
    Normal,
    ParameterSpec,
    Sharding,
    SublayerWork,
    norm,
)


def feed_forward(model: ModelConfig, *, out: Normal) -> tuple[ParameterSpec, ...]:
    """A norm and the SwiGLU feed-forward, or the experts of a model that has them.

    `up` stacks z0 and z1, and a rank needs the same rows of both.
    """
    if model.num_experts:
        return _experts(model, out=out)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    return (
        norm("feed_forward_norm.weight", hidden),
        linear("feed_forward.up", (2 * ffn, hidden), "column", Normal(model.init_std), blocks=2),
        linear("feed_forward.down", (hidden, ffn), "row", out),
    )


def linear(
    name: str, shape: tuple[int, int], sharding: Sharding, initial: Normal, *, blocks: int = 1
) -> ParameterSpec:
    """The weight [out, in] of a linear map."""
    return ParameterSpec(
        name=f"{name}.weight", shape=shape, sharding=sharding, initial=initial, blocks=blocks
    )


def feed_forward_work(model: ModelConfig, parameters: int) -> SublayerWork:
    """The SwiGLU feed-forward with its norm: it keeps 2H + 3F elements, or H + 2F under selective recompute.

    Kept: the norm's input and output, `up` (2F) and its product. Of experts with their router.
    """
    if model.num_experts:
        # The most rows there can be: all K of a token. On one card all is there, so nothing is divided.
        return _work_of_rows(model, parameters, model.experts_per_token, collectives=0)
    hidden, ffn = model.hidden_size, model.ffn_hidden_size
    return SublayerWork(
        parameters=parameters,
        products=3 * hidden * ffn,
        replicated=Kept(2 * hidden, 1),
        sharded=Kept(3 * ffn),
        selective_replicated=Kept(hidden, 1),
        selective_sharded=Kept(2 * ffn),
        gathered=hidden,
        # A norm reads and writes a hidden state; SwiGLU reads `up` and writes the product.
        recomputed=2 * hidden + 3 * ffn,
        # Gradients of `up` and of its product, of two hidden states.
        held=Kept(3 * ffn + 2 * hidden, 2 * hidden),
        largest_weight=2 * ffn * hidden,
    )


def _experts(model: ModelConfig, *, out: Normal) -> tuple[ParameterSpec, ...]:
    """A norm, the router and the experts, SwiGLU feed-forwards stacked along dim 0.

    The attention router has the rows of N queries, then of N keys and of N values; the softmax router N rows.
    """
    hidden, count, width = model.hidden_size, model.num_experts, model.expert_width
    drawn = Normal(model.init_std)

    def stacked(name: str, rows: int, columns: int, initial: Normal) -> ParameterSpec:
        shape = (count, rows, columns)
        return ParameterSpec(name=f"experts.{name}.weight", shape=shape, sharding="expert", initial=initial)

    return (
        norm("feed_forward_norm.weight", hidden),
        linear("router", (router_rows(model), hidden), "whole", drawn),
        stacked("up", 2 * width, hidden, drawn),
        stacked("down", hidden, width, out),
    )


def router_rows(model: ModelConfig) -> int:
    """Rows of the router's weight: queries, keys and values of every expert, or their scores."""
    return model.num_experts * (1 if model.router == "softmax" else 3)


def held_experts_work(model: ModelConfig, experts: int, rows: int) -> SublayerWork:
    """The same on a rank that holds `experts` of a layer's experts, and is given `rows` rows of each token.

    One all-reduce adds up the ranks' outputs, one their input's
    gradients; the small one of the gradients of the chosen experts' weights is not among `collectives`.
    """
    parameters = parameters_of(_experts(model, out=Normal(model.init_std)))
    away = model.num_experts - experts
    each = 3 * model.hidden_size * model.expert_width
    return _work_of_rows(model, parameters - away * each, rows, collectives=1)


def _work_of_rows(model: ModelConfig, parameters: int, rows: int, *, collectives: int) -> SublayerWork:
    """Norm, router and experts, of which each token meets `rows`.

    Kept: the norm's input and output; the router's products (or their softmax over all, where the weights are
    taken from it), the K weights and two integers for each, the chosen expert and, if there are rows, the
    slot of each; for each row a token's copy (H), `up` (2F), its product (F) and the expert's output (H).
    Selective recompute keeps neither the norm's output nor the copies nor the products of the gates.
    """
    hidden, width, chosen = model.hidden_size, model.expert_width, model.experts_per_token
    # A loss of the shares among all needs the products beside them.
    twice = model.balance == "sequence" and not model.norm_topk_prob
    routing = Kept(0, router_rows(model) * (1 + twice) + chosen, (2 if rows else 1) * chosen)
    return SublayerWork(
        parameters=parameters,
        products=router_rows(model) * hidden + rows * 3 * hidden * width,
        replicated=Kept(2 * hidden + rows * (2 * hidden + 3 * width), 1) + routing,
        sharded=Kept(0),
        selective_replicated=Kept(hidden + rows * (hidden + 2 * width), 1) + routing,
        selective_sharded=Kept(0),
        # The norm twice, for the router and the copies; a copy reads and writes, as SwiGLU does.
        recomputed=2 * hidden + rows * (2 * hidden + 3 * width),
        held=Kept(rows * (3 * width + 2 * hidden) + 2 * hidden, 2 * hidden),
        decided=2 * chosen,
        # Gradients of the experts are added to the bucket one by one.
        largest_weight=2 * width * hidden if rows else router_rows(model) * hidden,
        collectives=collectives,
    )


def grouped_attention(model: ModelConfig) -> tuple[ParameterSpec, ...]:
    """A norm and grouped-query attention (Ainslie et al. 2023), biases and norms of the heads where asked."""
    hidden, projection, narrow = model.hidden_size, model.projection_size, model.key_value_size
    drawn = Normal(model.init_std)
    table = [norm("attention_norm.weight", hidden)]
    for name, rows in (("query", projection), ("key", narrow), ("value", narrow)):
        table.append(linear(f"attention.{name}", (rows, hidden), "column", drawn))
        if model.qkv_bias:
            table.append(
                ParameterSpec(
                    name=f"attention.{name}.bias", shape=(rows,), sharding="column", initial=Constant(0.0)
                )
            )
    if model.query_key_norm:
        table += [
            ParameterSpec(
                name=f"attention.{name}_norm.weight",
                shape=(model.head_dim,),
                sharding="head_norm",
                initial=Constant(1.0),
            )
            for name in ("query", "key")
        ]
    return (*table, linear("attention.out", (hidden, projection), "row", drawn))


def grouped_attention_work(model: ModelConfig, parameters: int) -> SublayerWork:
    """Grouped-query attention with its norm: it keeps 2H + 2P + 2K elements, P + K more with head norms.

    Kept: the norm's input and output; queries, keys, values, the heads' outputs; a log-sum-exp per head; the
    inputs of the head norms.
    """
    hidden, projection, narrow = model.hidden_size, model.projection_size, model.key_value_size
    sharded = Kept(2 * projection + 2 * narrow, model.num_attention_heads)
    if model.query_key_norm:
        sharded += Kept(projection + narrow, model.num_attention_heads + model.key_value_heads)
    return SublayerWork(
        parameters=parameters,
        products=2 * hidden * (projection + narrow),
        scores=projection,
        replicated=Kept(2 * hidden, 1),
        sharded=sharded,
        selective_replicated=Kept(hidden, 1),
        selective_sharded=sharded,
        gathered=hidden,
        recomputed=2 * hidden,
        held=Kept(2 * projection + 2 * narrow + 2 * hidden, 2 * hidden),
        largest_weight=hidden * projection,
    )


def tensor_sizes(model: ModelConfig) -> dict[str, int]:
    """The sizes that a tensor-parallel group shards in every decoder."""
    halves = {"feed-forward columns": model.ffn_hidden_size}
    if model.num_experts:
        halves = {"set of experts (no tensor parallelism for a model with experts)": 1}
    return {
        "heads": model.num_attention_heads,
        "key-value heads": model.key_value_heads,
        **halves,
        "vocabulary rows": model.vocab_size,
    }


def parameters_of(table: tuple[ParameterSpec, ...]) -> int:
    """Parameters of a part."""
    return sum(parameter.size for parameter in table)
