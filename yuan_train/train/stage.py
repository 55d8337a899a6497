"""Runs one stage's part of the model on micro-batches, for the executor (its `StageWork`)."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from yuan_train.config.plan import PipelinePlan
from yuan_train.config.run import DataConfig
from yuan_train.data.loader import Blend
from yuan_train.model.documents import find_resets
from yuan_train.model.dropout import DropoutSeed
from yuan_train.model.transformer import Transformer
from yuan_train.parallel.deferred import DeferredWeightGrads


@dataclass(frozen=True)
class _MicroBatch:
    """What a forward needs of its samples, on the device."""

    first_sample: int
    tokens_BS: torch.Tensor | None
    """None without the embedding."""
    targets_BS: torch.Tensor | None
    """None without the head."""
    resets: dict[str, Any]
    """The model's arguments for what the run resets at document ends."""


class StageRunner:
    """Reads the micro-batches of one pipeline and runs one stage's part of the model on them.

    `loss` accumulates the stage's share of the batch's mean loss: its sum over tokens divided by the *global*
    number of trained tokens, so that pipelines with different shares of the batch need no weights. The
    backward runs on `scale` times that. `finite` stays true while every output is finite.
    """

    def __init__(
        self,
        model: Transformer,
        pipeline: PipelinePlan,
        data: DataConfig,
        *,
        seed: int,
        eod_id: int | None,
        device: torch.device,
        deferred: DeferredWeightGrads,
    ) -> None:
        self._model = model
        self._deferred = deferred
        self._micro_batch_size = pipeline.micro_batch_size
        self._data = data
        self._seed = seed
        self._eod_id = eod_id
        self._device = device
        self._blend: Blend | None = None
        self._first_sample = 0
        self._trained_tokens = 1
        self._scale = 1.0
        self._loaded: dict[int, _MicroBatch] = {}
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.finite = torch.ones((), dtype=torch.bool, device=device)

    def begin(self, blend: Blend, *, first_sample: int, trained_tokens: int, scale: float) -> None:
        """Start on this pipeline's samples, from `first_sample` on, and reset `loss` and `finite`.

        `trained_tokens` is the number of trained tokens of the global batch.
        """
        self._blend = blend
        self._first_sample = first_sample
        self._trained_tokens = trained_tokens
        self._scale = scale
        self._loaded.clear()
        self.loss.zero_()
        self.finite.fill_(True)

    def load(self, micro_batch: int) -> None:
        """Read a micro-batch and copy to the device what this stage needs of it, unless that is done."""
        if micro_batch in self._loaded:
            return
        assert self._blend is not None
        first = self._first_sample + micro_batch * self._micro_batch_size
        batch = self._blend.batch(first, self._micro_batch_size)
        tokens_BS = torch.from_numpy(batch.inputs)
        self._loaded[micro_batch] = _MicroBatch(
            first_sample=first,
            tokens_BS=tokens_BS.to(self._device) if self._model.has_embedding else None,
            targets_BS=torch.from_numpy(batch.targets).to(self._device) if self._model.has_head else None,
            resets=self._resets(tokens_BS),
        )

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        """Hidden state [B, S, H]; on the last stage the micro-batch's share of the mean loss, times `scale`.

        `hidden_BSH` is the output of the stage before; None on the first stage. `load` must have been called.
        """
        batch = self._loaded.pop(micro_batch)
        output = self._model(
            batch.tokens_BS if hidden_BSH is None else hidden_BSH,
            # Validation runs without gradients and without dropout.
            dropout_seed=DropoutSeed(self._seed, batch.first_sample) if torch.is_grad_enabled() else None,
            **batch.resets,
        )
        if batch.targets_BS is not None:
            gradient_scale = self._scale / self._trained_tokens
            output = self._model.loss(output, batch.targets_BS, gradient_scale=gradient_scale)
            output = output / self._trained_tokens
            self.loss += output.detach()
        self.finite &= torch.isfinite(output.detach()).all()
        return output * self._scale if self._model.has_head else output

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[None]:
        """Around a backward: if `split`, weight gradients are deferred until `backward_weight`."""
        return self._deferred.splitting(micro_batch, split)

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the deferred weight gradients of a micro-batch whose backward was split."""
        self._deferred.flush(micro_batch)

    def _resets(self, tokens_BS: torch.Tensor) -> dict[str, Any]:
        """The model's arguments for what the run resets at document ends."""
        resets = find_resets(
            tokens_BS,
            eod_id=self._eod_id if self._data.resets else None,
            reset_position_ids=self._data.reset_position_ids,
            reset_attention=self._data.reset_attention,
            reset_filter=self._data.reset_filter,
        )
        return resets.on(self._device)
