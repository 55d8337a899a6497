"""Weights and gradients in flat buffers, gradients summed over owners, and their global norm."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist

from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.groups import Groups

_LOW_PRECISION = (torch.bfloat16, torch.float16)


class FlatBucket:
    """The parameters of one bucket, laid end to end: matrices first, then vectors.

    `master` holds the weights in fp32 (fp64 for fp64 models), `gradient` the gradient summed over
    micro-batches, both [n]. Under bf16 and fp16 the model's weights are a rounded copy of the master; else
    they *are* the master.
    """

    def __init__(self, bucket: Bucket, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.owners = bucket.owners
        ordered = sorted(parameters.items(), key=lambda item: item[1].dim() < 2)
        self.parameters = dict(ordered)
        first = next(iter(self.parameters.values()))
        low = first.dtype in _LOW_PRECISION
        total = sum(p.numel() for p in self.parameters.values())
        dtype = torch.float32 if low else first.dtype
        self.num_matrix_elements = sum(p.numel() for p in self.parameters.values() if p.dim() >= 2)
        self.master = torch.empty(total, dtype=dtype, device=first.device)
        self.gradient = torch.zeros_like(self.master)
        self._rounded = torch.empty(total, dtype=first.dtype, device=first.device) if low else None
        weights = self.master if self._rounded is None else self._rounded
        self._places = _places(self.parameters)
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                self.view(self.master, name).copy_(parameter)
                parameter.data = self.view(weights, name)
                self._gather_gradient(name, parameter)
        self.publish()

    def view(self, flat: torch.Tensor, name: str) -> torch.Tensor:
        """The part of a flat buffer [n] that belongs to a parameter, in the parameter's shape."""
        start, shape = self._places[name]
        return flat[start : start + shape.numel()].view(shape)

    def publish(self) -> None:
        """Bring the model's weights up to the master."""
        if self._rounded is not None:
            self._rounded.copy_(self.master)

    def _gather_gradient(self, name: str, parameter: torch.nn.Parameter) -> None:
        """Let autograd add into the flat buffer, in the master's precision."""
        view = self.view(self.gradient, name)
        if self._rounded is None:
            parameter.grad = view
            return

        def add(p: torch.Tensor) -> None:
            assert p.grad is not None
            view.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(add)


def _places(parameters: Mapping[str, torch.nn.Parameter]) -> dict[str, tuple[int, torch.Size]]:
    places: dict[str, tuple[int, torch.Size]] = {}
    start = 0
    for name, parameter in parameters.items():
        places[name] = (start, parameter.shape)
        start += parameter.numel()
    return places


def sum_over_owners(buckets: list[FlatBucket], groups: Groups) -> None:
    """Add up the gradients of every bucket over the ranks that hold it."""
    works = [
        dist.all_reduce(bucket.gradient, group=groups.owners[bucket.owners], async_op=True)
        for bucket in buckets
        if len(bucket.owners) > 1
    ]
    for work in works:
        assert work is not None
        work.wait()


def squared_norm(buckets: list[FlatBucket], rank: int, *, device: torch.device) -> torch.Tensor:
    """This rank's share of the squared global gradient norm, fp64: each bucket counts at its first owner."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets:
        if bucket.owners[0] == rank:
            total += torch.linalg.vector_norm(bucket.gradient, dtype=torch.float64) ** 2
    return total
