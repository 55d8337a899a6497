"""AdamW over flat buckets, and the learning-rate schedule."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from yuan_train.config.run import OptimizerConfig
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.tiers.host_state import HostChunk
from yuan_train.parallel.zero import OptimizerShard, OwnedState


def learning_rate(step: int, config: OptimizerConfig, *, decay_steps: int) -> float:
    """Learning rate of optimizer step `step`, counted from 0.

    Linear warm-up, then cosine (Yuan 2.0 paper, section 4.1) or linear decay to the minimum at
    `decay_steps`, then the minimum. With schedule `constant` there is no decay.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.learning_rate
    progress = min(1.0, (step + 1 - config.warmup_steps) / (decay_steps - config.warmup_steps))
    factor = 0.5 * (1 + math.cos(math.pi * progress)) if config.schedule == "cosine" else 1 - progress
    return config.minimum_learning_rate + factor * (config.learning_rate - config.minimum_learning_rate)


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on the masters that this rank holds.

    Weight decay applies to matrices and not to vectors (norms and biases), as in the published runs. What is
    on the host is stepped there, chunk by chunk, while the card steps its own part.
    """

    def __init__(self, states: Sequence[OwnedState], config: OptimizerConfig) -> None:
        self.states = states
        self._config = config
        self._adamw: torch.optim.AdamW | None = None
        self._on_card = [s for state in states for s in state.shards if not s.on_host]
        on_host = any(True for state in states for _ in state.host_chunks)
        # Weights that were stepped on the host are sent while the host steps those of the next state.
        self._rounds = [[state] for state in states] if on_host else [states]
        self._host_steps = torch.zeros((), dtype=torch.float32)
        groups = [group for shard in self._on_card for group in _param_groups(shard)]
        if not groups:
            return
        param_groups = [
            {"params": [group.master], "weight_decay": config.weight_decay if group.decays else 0.0}
            for group in groups
        ]
        betas = (config.beta1, config.beta2)
        self._adamw = torch.optim.AdamW(param_groups, lr=0.0, betas=betas, eps=config.epsilon, fused=True)
        for group in groups:
            group.master.grad = group.gradient
            # Created here and not in the first step, so that a checkpoint can be loaded into it.
            self._adamw.state[group.master] = {
                "step": torch.zeros((), dtype=torch.float32, device=group.master.device),
                "exp_avg": group.exp_avg,
                "exp_avg_sq": group.exp_avg_sq,
            }

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        """Step the masters by `factor` times their gradients, and start to sync the model's weights;
        collective over owners.

        The first layers' weights are sent first, because the next forward waits for them first.
        """
        with during(Activity("optimizer")):
            if factor != 1.0:
                for shard in self._on_card:
                    shard.gradient.mul_(factor)
            if self._adamw is not None:
                for group in self._adamw.param_groups:
                    group["lr"] = lr
                # Enqueued first: a card steps its part while the host steps the other.
                self._adamw.step()
        for states in self._rounds:
            for state, chunk in ((s, c) for s in states for c in s.host_chunks):
                with during(Activity("optimizer")):
                    chunk.finish_gradient()
                    if factor != 1.0:
                        chunk.gradient.mul_(factor)
                    self._step_on_host(chunk, lr)
                    state.start_host_weights(chunk)
            with during(Activity("weight_sync")):
                for state in states:
                    state.start_weight_sync()
        self._host_steps += 1

    @torch.no_grad()
    def _step_on_host(self, chunk: HostChunk, lr: float) -> None:
        config = self._config
        # It counts the step in the tensor that it is given.
        adamw(
            [chunk.master],
            [chunk.gradient],
            [chunk.exp_avg],
            [chunk.exp_avg_sq],
            [],
            [self._host_steps.clone()],
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=config.weight_decay if chunk.decays else 0.0,
            eps=config.epsilon,
            maximize=False,
        )

    def set_step(self, step: int) -> None:
        """Set AdamW's step count, for its bias correction, after loading a checkpoint."""
        self._host_steps.fill_(step)
        for state in self._adamw.state.values() if self._adamw else ():
            state["step"].fill_(step)


@dataclass(frozen=True)
class _ParamGroup:
    """Elements of an optimizer shard that all decay, or all do not: flat buffers [k]."""

    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    decays: bool


def _param_groups(shard: OptimizerShard) -> Iterator[_ParamGroup]:
    """The matrices and the vectors of a shard; an empty group is left out."""
    buffers = (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
    splits = [buffer.tensor_split([shard.num_matrix_elements]) for buffer in buffers]
    for number, decays in ((0, True), (1, False)):
        master, gradient, exp_avg, exp_avg_sq = (split[number] for split in splits)
        if master.numel():
            yield _ParamGroup(master, gradient, exp_avg, exp_avg_sq, decays)
