"""AdamW over flat buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from yuan_train.config.run import OptimizerConfig
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.tiers.optimizer import HostChunk, OptimizerShard
from yuan_train.parallel.zero import OwnedState


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on the masters that this rank holds.

    Weight decay applies to matrices and not to vectors (norms and biases), as in the published runs. What is
    on the host is stepped there, chunk by chunk, while the card steps its own part.
    """

    def __init__(self, states: Sequence[OwnedState], config: OptimizerConfig) -> None:
        self.states = states
        self._config = config
        on_card = [s for state in states for s in state.shards if not s.on_host]
        self._gradients = [shard.gradient for shard in on_card]
        found = [_parts(on_card, decay=decay) for decay in (True, False)]
        self._on_card = [parts for parts in found if parts.masters]
        on_host = any(True for state in states for _ in state.host_chunks)
        # Weights that were stepped on the host are sent while the host steps those of the next state.
        self._rounds = [[state] for state in states] if on_host else [states]
        self._host_steps = torch.zeros((), dtype=torch.float32)

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        """Step the masters by `factor` times their gradients, and start to sync the model's weights;
        collective over owners.

        The first layers' weights are sent first, because the next forward waits for them first.
        """
        with during(Activity("optimizer")):
            if factor != 1.0:
                for gradient in self._gradients:
                    gradient.mul_(factor)
            # Enqueued first: a card steps its part while the host steps the other.
            for parts in self._on_card:
                self._adamw(parts, lr)
        for states in self._rounds:
            for state, chunk in ((s, c) for s in states for c in s.host_chunks):
                with during(Activity("optimizer")):
                    chunk.finish_gradient()
                    self._step_on_host(chunk, lr, factor)
                    state.start_host_weights(chunk)
            with during(Activity("weight_sync")):
                for state in states:
                    state.start_weight_sync()
        self._host_steps += 1

    def settle(self) -> None:
        """Wait until masters and moments have every update, and may be saved."""
        for state in self.states:
            for chunk in state.host_chunks:
                chunk.settle()

    def _step_on_host(self, chunk: HostChunk, lr: float, factor: float) -> None:
        if factor != 1.0:
            chunk.gradient.mul_(factor)
        # It counts the step in the tensor that it is given.
        moments = [chunk.exp_avg], [chunk.exp_avg_sq]
        steps = [self._host_steps.clone()]
        self._adamw(_Parts([chunk.master], [chunk.gradient], *moments, steps, chunk.decays), lr)

    @torch.no_grad()
    def _adamw(self, parts: _Parts, lr: float) -> None:
        """Torch's function: its class takes the host several times as long to say the same."""
        config = self._config
        adamw(
            parts.masters,
            parts.gradients,
            parts.exp_avgs,
            parts.exp_avg_sqs,
            [],
            parts.steps,
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=config.weight_decay if parts.decay else 0.0,
            eps=config.epsilon,
            maximize=False,
        )

    def set_step(self, step: int) -> None:
        """Set AdamW's step count, for its bias correction, after loading a checkpoint."""
        self._host_steps.fill_(step)
        for steps in (steps for parts in self._on_card for steps in parts.steps):
            steps.fill_(step)


@dataclass(frozen=True)
class _Parts:
    """What one call of AdamW steps: flat buffers, and of each the steps so far, on its device."""

    masters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]
    decay: bool


def _parts(shards: Sequence[OptimizerShard], *, decay: bool) -> _Parts:
    """The matrices of all shards, which decay, or their vectors, which do not."""
    rows: list[list[torch.Tensor]] = []
    for shard in shards:
        buffers = (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
        row = [buffer.tensor_split([shard.num_matrix_elements])[not decay] for buffer in buffers]
        if row[0].numel():
            rows.append(row)
    masters, gradients, exp_avgs, exp_avg_sqs = ([row[i] for row in rows] for i in range(4))
    steps = [torch.zeros((), dtype=torch.float32, device=master.device) for master in masters]
    return _Parts(masters, gradients, exp_avgs, exp_avg_sqs, steps, decay)
