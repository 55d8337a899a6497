"""AdamW over flat buckets, and the curve of the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from yuan_train.config.run import OptimizerConfig
from yuan_train.parallel.zero import BucketState, OptimizerShard


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
    """AdamW (Loshchilov and Hutter 2019) on the masters that this rank holds.

    Matrices decay, vectors (norms and biases) do not, as in the published runs.
    """

    def __init__(self, states: Sequence[BucketState], config: OptimizerConfig) -> None:
        self.states = states
        self._adamw: torch.optim.AdamW | None = None
        runs = [run for state in states for shard in state.shards for run in _runs(shard)]
        if not runs:
            return
        groups = [
            {"params": [run.master], "weight_decay": config.weight_decay if run.decays else 0.0}
            for run in runs
        ]
        betas = (config.beta1, config.beta2)
        self._adamw = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)
        for run in runs:
            run.master.grad = run.gradient
            # Made at once, so that a checkpoint can be read into it.
            self._adamw.state[run.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=run.master.device),
                "exp_avg": run.exp_avg,
                "exp_avg_sq": run.exp_avg_sq,
            }

    def step(self, lr: float) -> None:
        """Move the masters by their gradients, and the model's weights with them; collective over owners."""
        if self._adamw is not None:
            for group in self._adamw.param_groups:
                group["lr"] = lr
            self._adamw.step()
        for state in self.states:
            state.publish()

    def set_step(self, step: int) -> None:
        """Continue after `step` steps."""
        for state in self._adamw.state.values() if self._adamw else ():
            state["step"].fill_(step)


@dataclass(frozen=True)
class _Run:
    """Flat elements with one rule of decay."""

    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    decays: bool


def _runs(shard: OptimizerShard) -> Iterator[_Run]:
    """The matrices and the vectors of a shard; an empty run is left out."""
    buffers = (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
    cuts = [buffer.tensor_split([shard.num_matrix_elements]) for buffer in buffers]
    for number, decays in ((0, True), (1, False)):
        master, gradient, exp_avg, exp_avg_sq = (cut[number] for cut in cuts)
        if master.numel():
            yield _Run(master, gradient, exp_avg, exp_avg_sq, decays)
