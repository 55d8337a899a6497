"""AdamW over flat buffers: weights, both averages, and the rounded copy of the weights, in one pass.

    g = clip_factor gradient
    m = beta1 m + (1 - beta1) g        v = beta2 v + (1 - beta2) g^2
    w = (1 - lr weight_decay) w - lr / (1 - beta1^step) m / (sqrt(v / (1 - beta2^step)) + epsilon)

(Loshchilov and Hutter 2019, algorithm 2.) The clip factor is a tensor: nobody waits for the gradient's
norm to reach the host. On a CPU torch's fused AdamW already makes one pass; block by block, the rounded copy
is made while the weights are in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from yuan_kernels import dispatch, reference
from yuan_kernels.reference import AdamWStep

_BLOCK = 1 << 18
"""Weights of a block on a CPU: 4.5 MB with their state."""


def adamw_step(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    step: AdamWStep,
    clip_factor: Tensor,
) -> None:
    """One step in place; arguments as in `ops.adamw_step`."""
    arguments = master, gradient, exp_avg, exp_avg_sq, rounded, step, clip_factor
    form = dispatch.flat_implementation("adamw", master)
    with torch.no_grad():
        if form == "reference":
            reference.adamw_step(*arguments)
        elif form == "triton":
            from yuan_kernels import triton_forms

            triton_forms.adamw_step(*arguments)
        else:
            _torch_step(*arguments)


def _torch_step(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    rounded: Tensor | None,
    step: AdamWStep,
    clip_factor: Tensor,
) -> None:
    # torch counts its steps itself, in a tensor, from the one before, and divides by its scale.
    done = torch.tensor(float(step.number - 1), device=master.device)
    scale = clip_factor.to(torch.float32).reciprocal()
    block = _BLOCK if master.device.type == "cpu" and rounded is not None else max(1, master.numel())
    for first in range(0, master.numel(), block):
        part = slice(first, first + block)
        adamw(
            [master[part]],
            [gradient[part]],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            [done.clone()],
            fused=True,
            grad_scale=scale,
            amsgrad=False,
            beta1=step.beta1,
            beta2=step.beta2,
            lr=step.lr,
            weight_decay=step.weight_decay,
            eps=step.epsilon,
            maximize=False,
        )
        if rounded is not None:
            rounded[part].copy_(master[part])
