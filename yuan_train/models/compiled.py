"""torch.compile of a model's layers, for training.

One graph for the forward of a layer and one for its backward serve all layers of a part: the weights are
inputs. The graphs have no side effects. So torch accumulates all weight gradients, as it does those of norms
and embedding, and modules keep their names and hooks: a layer's `forward` is replaced, not the layer. Without
gradients (validation, generation) the plain forward runs, which needs no compilation of its own.

What a compiled layer saves for its backward is decided in the graph. `selective` saves the results of
products, filter and attention, and recomputes everything else; `full` saves the layer's input; with `none`
the compiler chooses, which recomputes what is cheaper to compute than to read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from yuan_kernels import ops

from yuan_train.models.attention import DocumentRanges, RotaryTables
from yuan_train.models.layers import SAVE_ALL, LayerDropout, RecomputePolicy, Tokens, traceable_dropout
from yuan_train.models.transformer import Block, Transformer

BACKEND = "inductor"
"""torch.compile's own: C++ on CPUs, Triton on cards."""

_EXPENSIVE = (
    "aten::mm",
    "aten::addmm",
    "aten::bmm",
    "aten::_scaled_dot_product",
    "yuan::linear",
    "yuan::localized_filter",
    "yuan::causal_attention",
)
"""Beginnings of the names of the ops whose results `selective` saves."""


def compile_blocks(model: Transformer) -> None:
    """Compile the training forward and backward of a model's layers, in place; at their first use.

    The layers must be neither sharded nor hooked inside, and take no `document_ranges`.
    """
    ops.prepare_compile()
    logging.getLogger("torch._higher_order_ops.wrap").addFilter(_concerns_us)
    compiled = torch.compile(_run_block, backend=BACKEND, dynamic=False, fullgraph=True)
    for i, block in enumerate(model.blocks.values()):
        block.forward = _forward(block, model.recompute_of(i), compiled)
    # What is saved for the backward is decided where a block is compiled.
    model.recompute = "none"


def _forward(block: Block, recompute: str, compiled: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The forward of a compiled block, with the arguments of `Block.forward`."""

    def forward(
        x_BSH: Tensor,
        rotary: RotaryTables,
        document_start: Tensor | None = None,
        document_ranges: DocumentRanges | None = None,
        policy: RecomputePolicy = SAVE_ALL,
        drop: LayerDropout | None = None,
    ) -> Tensor:
        if not torch.is_grad_enabled():
            return Block.forward(block, x_BSH, rotary, document_start, document_ranges, policy, drop)
        assert document_ranges is None and policy is SAVE_ALL, "they would be compiled for every micro-batch"
        rate, keys = (0.0, None) if drop is None else (drop.rate, drop.key_tensors(x_BSH))
        return compiled(block, recompute, rate, x_BSH, rotary, document_start, keys)

    return forward


def _run_block(
    block: Block,
    recompute: str,
    rate: float,
    x_BSH: Tensor,
    rotary: RotaryTables,
    document_start: Tensor | None,
    keys: dict[str, Tensor] | None,
) -> Tensor:
    """What is compiled."""

    def run(x_BSH: Tensor) -> Tensor:
        drop = None if keys is None else partial(_drop, rate, keys)
        return Block.forward(block, x_BSH, rotary, document_start, drop=drop)

    if recompute == "none":
        return run(x_BSH)
    options: dict[str, Any] = {}
    if recompute == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _saves)
    return cast(Tensor, checkpoint(run, x_BSH, use_reentrant=False, preserve_rng_state=False, **options))


def _drop(rate: float, keys: dict[str, Tensor], x_BSH: Tensor, site: str, _: Tokens) -> Tensor:
    return traceable_dropout(x_BSH, rate, keys[site])


def _concerns_us(record: logging.LogRecord) -> bool:
    """Not torch's advice against operations in place: of what `_saves` names, none is changed in place."""
    return "context_fn is passed" not in record.getMessage()


def _saves(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    expensive = str(op.name()).startswith(_EXPENSIVE)
    return CheckpointPolicy.MUST_SAVE if expensive else CheckpointPolicy.PREFER_RECOMPUTE
