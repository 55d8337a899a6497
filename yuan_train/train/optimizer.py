"""AdamW over flat buckets, and the curve of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from yuan_train.config.run import OptimizerConfig
from yuan_train.parallel.gradients import FlatBucket


def learning_rate(step: int, config: OptimizerConfig, *, decay_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up, then cosine (Yuan 2.0 paper, section 4.1) or linear decay to the minimum at
    `decay_steps`, and the minimum from there on.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step + 1 - config.warmup_steps) / (decay_steps - config.warmup_steps))
    share = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.minimum_learning_rate + share * (config.learning_rate - config.minimum_learning_rate)


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on the masters of the buckets.

    Matrices decay, vectors (norms and biases) do not, as in the published runs. State is made at once, so
    that a checkpoint can be read into it.
    """

    def __init__(self, buckets: list[FlatBucket], config: OptimizerConfig) -> None:
        self._buckets = buckets
        segments = [segment for bucket in buckets for segment in _segments(bucket)]
        groups = [
            {"params": [weights], "weight_decay": config.weight_decay if decays else 0.0}
            for weights, _, decays in segments
        ]
        self._adamw: torch.optim.AdamW | None = None
        self._states = [(torch.zeros_like(b.master), torch.zeros_like(b.master)) for b in buckets]
        if not groups:
            return
        betas = (config.beta1, config.beta2)
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)
        exp_avgs = [s for b, state in zip(buckets, self._states, strict=True) for s in _cut(b, state[0])]
        exp_avg_sqs = [s for b, state in zip(buckets, self._states, strict=True) for s in _cut(b, state[1])]
        for (weights, gradient, _), exp_avg, exp_avg_sq in zip(segments, exp_avgs, exp_avg_sqs, strict=True):
            weights.grad = gradient
            self._adamw.state[weights] = {
                "step": torch.zeros((), dtype=torch.float32, device=weights.device),
                "exp_avg": exp_avg,
                "exp_avg_sq": exp_avg_sq,
            }

    def step(self, lr: float) -> None:
        """Move the masters by their gradients, and the model's weights with them."""
        if self._adamw is None:
            return
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        for bucket in self._buckets:
            bucket.publish()

    def set_step(self, step: int) -> None:
        """Continue after `step` steps."""
        for state in self._adamw.state.values() if self._adamw else ():
            state["step"].fill_(step)

    def flat_states(self) -> list[torch.Tensor]:
        """The buffers of the state, each flat."""
        return [buffer for state in self._states for buffer in state]

    def named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Views of weights and state by global name: what a checkpoint stores and fills."""
        for bucket, (exp_avg, exp_avg_sq) in zip(self._buckets, self._states, strict=True):
            for name in bucket.parameters:
                yield f"weights.{name}", bucket.view(bucket.master, name)
                yield f"exp_avg.{name}", bucket.view(exp_avg, name)
                yield f"exp_avg_sq.{name}", bucket.view(exp_avg_sq, name)


def _segments(bucket: FlatBucket) -> Iterator[tuple[torch.Tensor, torch.Tensor, bool]]:
    """(weights, gradient, decays) of the bucket's matrices and of its vectors, each flat."""
    decays = [True] if bucket.num_matrix_elements else []
    if bucket.num_matrix_elements < bucket.master.numel():
        decays.append(False)
    yield from zip(_cut(bucket, bucket.master), _cut(bucket, bucket.gradient), decays, strict=True)


def _cut(bucket: FlatBucket, flat: torch.Tensor) -> list[torch.Tensor]:
    """The matrices' and the vectors' part of a flat buffer; an empty part is left out."""
    return [segment for segment in flat.tensor_split([bucket.num_matrix_elements]) if segment.numel()]
