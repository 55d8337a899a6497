"""The reference: the policy's weights at step 0, on the host; put in their place for a forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import Device
from yuan_train.parallel.groups import as_training_error


class Reference:
    """A copy on the host of the weights as they are when it is made; the cards hold no second model."""

    def __init__(self, runtime: RankRuntime, device: Device) -> None:
        finish_weight_sync(runtime)
        self._runtime = runtime
        self._device = device
        self._weights = [_on_host(bucket.weights, device) for bucket in runtime.buckets]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the reference's weights; afterwards the policy's, bit for bit."""
        finish_weight_sync(self._runtime)
        policy = [_on_host(bucket.weights, self._device) for bucket in self._runtime.buckets]
        _put(self._runtime, self._weights)
        try:
            yield
        finally:
            _put(self._runtime, policy)


def finish_weight_sync(runtime: RankRuntime) -> None:
    """Wait for stepped weights that are on their way to this rank."""
    with as_training_error(runtime.coord):
        for state in runtime.states:
            state.finish_weight_sync()


def _on_host(weights: torch.Tensor, device: Device) -> torch.Tensor:
    return device.host_empty(tuple(weights.shape), weights.dtype).copy_(weights)


def _put(runtime: RankRuntime, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for bucket, kept in zip(runtime.buckets, weights, strict=True):
            bucket.weights.copy_(kept)
