"""The ops, one public function each; `dispatch.py` chooses the implementation.

The environment variable `YUAN_KERNELS` is read at each call: `reference` selects the definitions in
`reference.py`. Unset or empty selects our fast implementations; any other value is a ValueError.

The ops are registered with torch.library (namespace `yuan`) and so support torch.compile, fake tensors and
autograd. While torch.compile is tracing, norms, rotary embedding and SwiGLU are their definitions, which it
fuses with their neighbours; products, filter, attention and cross-entropy stay whole. Exception:
cross-entropy with a main gradient or a sharded vocabulary, which calls back into Python, is not registered
and breaks the graph under torch.compile.

B = sequences, S = tokens of a sequence, T = tokens, H = hidden size, N = heads, D = size of a head,
F = feed-forward width, V = vocabulary, K = experts of a token, R = rows of all experts.
"""

# Names the ops: what is imported is for others.
# ruff: noqa: F401

from __future__ import annotations

import torch
from yuan_kernels import attention
from yuan_kernels.attention import DocumentRanges, causal_attention, masked_attention
from yuan_kernels.cross_entropy import Exchange, linear_cross_entropy
from yuan_kernels.dispatch import Choice, choices, choose_all, fall_back, forget_fallbacks, variable_held
from yuan_kernels.expert_rows import combine_rows, expert_rows
from yuan_kernels.grouped_linear import add_grouped_products_, grouped_linear
from yuan_kernels.linear import linear, wide_linear
from yuan_kernels.localized_filter import (
    localized_filter,
    localized_filter_data_gradient,
    localized_filter_forward,
    localized_filter_state,
    localized_filter_step,
    localized_filter_weight_gradient,
)
from yuan_kernels.products import add_product_, bf16_products, fp32_products
from yuan_kernels.reference import FilterState
from yuan_kernels.rms_norm import add_rms_norm, rms_norm
from yuan_kernels.rotary import rotary
from yuan_kernels.router import attention_router_weights, attention_scores
from yuan_kernels.swiglu import swiglu


def prepare_compile() -> None:
    """Make the ops ready for torch.compile: to be called before, as often as one likes.

    The compiler then takes the outcome of the tests that choose an implementation; it cannot trace them.
    """
    torch.compiler.assume_constant_result(attention.whole_form)
