"""Bytes that a part of the model saves for its backward under each recompute, and the FLOP of its layers:
exactly the planner's count."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.support.memory import kept_bytes
from tests.support.models import VARIANTS, tiny_model
from yuan_train.config.model import LoraConfig, ModelConfig, is_trained, sharding_of
from yuan_train.models.experts import Choice, Router
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel import tensor
from yuan_train.parallel.apply import apply_expert_parallel
from yuan_train.parallel.gradients import DeferredGrads, add_weight_grads
from yuan_train.parallel.tensor import ShardSpec, apply_tensor_parallel, shard_parameters
from yuan_train.planner.costs.workload import TensorGroup, TokenRows, model_work

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


def kept_by(part: Transformer, dtype: torch.dtype = torch.float32) -> int:
    """Bytes kept by a part without embedding and head, for two sequences of 48 tokens.

    The count includes the output, which may be as large as the input, and not the input.
    """
    hidden_BSH = torch.randn(2, 48, 64).to(dtype).requires_grad_()
    return kept_bytes(lambda: part(hidden_BSH), beside=[hidden_BSH, *part.parameters()])


def sharded(model: ModelConfig, spec: ShardSpec, recompute: str) -> Transformer:
    """Such a part with the weights of one rank."""
    with torch.device("meta"):
        part = Transformer(model, embedding=False, head=False, recompute=recompute)
    shard_parameters(part, spec, device=torch.device("cpu"))
    for parameter in part.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    return part


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp64"])
@pytest.mark.parametrize(
    ("recompute", "layers"),
    [("none", None), ("selective", None), ("full", None), ("selective", 3), ("full", 1)],
)
def test_kept_bytes_equal_the_planners(variant, precision, recompute, layers):
    model = tiny_model(variant)
    work = model_work(model, TokenRows(2, 48, precision), logit_rows=48)
    count = 4 if layers is None else layers
    expected = count * work.layer.kept_bytes(recompute) + (4 - count) * work.layer.kept_bytes("none")
    # The rotary tables, cosine and sine, are computed once for all layers.
    tables = 48 * model.rotary_size * (8 if precision == "fp64" else 4)
    dtype = DTYPES[precision]
    part = Transformer(
        model, embedding=False, head=False, recompute=recompute, recompute_layers=layers, dtype=dtype
    )
    init_weights(part, seed=0)
    for block in part.blocks.values():
        if block.has_experts:
            block.router.loss_scale = 0.5  # as in training, where the load is to be evened by a loss
    assert kept_by(part, dtype) == expected + tables


@pytest.mark.parametrize("variant", ["yuan", "yuan-plain", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kept_bytes_of_adapters_on_a_frozen_base(variant, recompute):
    """As the engine runs it: frozen linears and filters keep nothing that only their gradients need."""
    model = replace(tiny_model(variant), lora=LoraConfig(rank=3))
    part = Transformer(model, embedding=False, head=False, recompute=recompute, dtype=torch.float32)
    init_weights(part, seed=0)
    for name, parameter in part.named_parameters():
        parameter.requires_grad_(is_trained(model, name))
    add_weight_grads(part, DeferredGrads(), sharding_of(model)[0])
    work = model_work(model, TokenRows(2, 48, "fp32"), logit_rows=48)
    assert kept_by(part) == 4 * work.layer.kept_bytes(recompute) + 48 * model.rotary_size * 4
    assert sum(p.numel() for p in part.parameters()) == 4 * work.layer.parameters
    trained = sum(p.numel() for p in part.parameters() if p.requires_grad)
    assert trained == 4 * work.layer.trained == sum(model.trained_unit_parameters)
    for kind in ("parameters", "trained"):
        assert sum(getattr(half, kind) for half in work.halves) == getattr(work.layer, kind)


@pytest.mark.parametrize("variant", ["yuan", "yuan-plain", "llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("divided", [False, True])
def test_kept_bytes_of_a_rank_of_a_tensor_parallel_group(variant, recompute, divided, monkeypatch):
    """As one of two that have the whole hidden state each, or a part of its tokens between products."""
    model = tiny_model(variant)
    spec = ShardSpec(*sharding_of(model), index=1, count=2, splits_tokens=divided)
    part = sharded(model, spec, recompute)
    apply_tensor_parallel(part, spec, None)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(tensor, "_run_beside", lambda *_: None)
    work = model_work(model, TokenRows(2, 48, "fp32"), logit_rows=48, group=TensorGroup(2, divided))
    tables = 48 * model.rotary_size * 4
    # What comes out is whole; without a division it is as large as the input, which is not counted.
    whole = 2 * 48 * 64 * 4 if divided else 0
    assert kept_by(part) == 4 * work.layer.kept_bytes(recompute) + tables + whole


@pytest.mark.parametrize("held", [0, 1, 3])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_kept_bytes_of_a_rank_that_shares_experts(held, recompute, monkeypatch):
    """For the most rows that it can be given: each token chooses the first two experts."""
    model = tiny_model("yuan-m32")
    part = sharded(model, ShardSpec(*sharding_of(model), experts=(0, held)), recompute)
    apply_expert_parallel(part, None, first_expert=0)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(tensor, "_all_reduce", lambda part, *_: part.contiguous().clone())
    choice = torch.arange(2).repeat(96, 1)
    chosen = Choice(choice, choice.flatten().argsort(stable=True), (96, 96, 0, 0, 0))
    monkeypatch.setattr(Router, "_choose", lambda *_: replace(chosen, **fresh(chosen)))
    work = model_work(model, TokenRows(2, 48, "fp32"), logit_rows=48, experts=held)
    tables = 48 * model.rotary_size * 4
    assert kept_by(part) == 4 * work.layer.kept_bytes(recompute) + tables
    assert sum(p.numel() for p in part.parameters()) == 4 * work.layer.parameters
    assert sum(half.parameters for half in work.halves) == work.layer.parameters


def fresh(choice: Choice) -> dict[str, torch.Tensor]:
    """Tensors of its own, as a router makes them for each layer."""
    return {"chosen_TK": choice.chosen_TK.clone(), "order": choice.order.clone()}


def test_selective_recompute_frees_three_tenths():
    """H = P, F = 4H: of 23 hidden states 16 are kept, in any precision."""
    for precision in ("bf16", "fp32"):
        model = tiny_model("yuan", ffn_hidden_size=256)
        layer = model_work(model, TokenRows(1, 48, precision), logit_rows=48).layer
        e = {"bf16": 2, "fp32": 4}[precision]
        assert layer.activation_bytes == 48 * (e * 23 * 64 + 4 * 3 + 4 * 4)
        assert 0.68 < layer.selective_bytes / layer.activation_bytes < 0.71


# --- FLOP ------------------------------------------------------------------------------------------------


TOKENS = 32


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_that_torch_counts(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the definitions: torch sees not into our kernels. It counts all of the causal scores, we half."""
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    config = tiny_model(variant, num_layers=1)
    work = model_work(config, TokenRows(1, TOKENS, "fp32"), logit_rows=TOKENS).layer
    scores = 2 * TOKENS * TOKENS * sum(half.scores for half in config.spec.sublayers(config))
    part = Transformer(config, embedding=False, head=False)
    init_weights(part, seed=0)
    hidden = torch.randn(1, TOKENS, config.hidden_size, requires_grad=True)
    # Of its forms of attention, torch counts on a CPU the one that multiplies batches of matrices.
    with sdpa_kernel(SDPBackend.MATH):
        with FlopCounterMode(display=False) as forward:
            output = part(hidden)
        with FlopCounterMode(display=False) as backward:
            output.sum().backward()
    assert forward.get_total_flops() - attention(forward) == work.forward_flops - scores
    assert attention(forward) == 2 * scores
    assert backward.get_total_flops() - attention(backward) == work.backward_flops - 2 * scores


@pytest.mark.parametrize("variant", ["yuan", "llama"])
def test_flops_of_the_head(variant: str) -> None:
    config = tiny_model(variant, num_layers=1)
    model = Transformer(config, layers=(0, 0), embedding=False)
    hidden = torch.randn(1, TOKENS, config.hidden_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model.logits(hidden)
    assert counter.get_total_flops() == TOKENS * config.head_forward_flops


def attention(counter: FlopCounterMode) -> int:
    """FLOP of scores and weighted values."""
    counts: dict[Any, int] = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counts.items() if "bmm" in str(op))
