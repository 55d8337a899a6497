"""Optimizer state: replicated on every owner, or sharded over the owners of a slice (ZeRO-1).

Sharded (Rajbhandari et al. 2020, stage 1), a rank holds masters and AdamW's two moments for its range of each
of its slices. Gradients are reduced to the rank that holds the range, and the stepped weights are broadcast
from it. Both take one operation per rank instead of a reduce-scatter and an all-gather: ranges are unequal,
and gloo has no uneven all-gather. A part of what a rank holds may be offloaded to the host, and is stepped
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.parallel.gradients import FlatBucket, Slice, master_dtype, squared_norm, sum_of_squares
from yuan_train.parallel.groups import Groups, blame_peers

STATES = ("master", "exp_avg", "exp_avg_sq")
"""What is kept per element: the master weight and AdamW's moments."""


@dataclass(frozen=True)
class OptimizerShard:
    """Consecutive elements that this rank steps: flat buffers [k], k = end - start, matrices first.

    They are [start, end) of a slice of a bucket (of the bucket, if the state is replicated). On the host, the
    gradient is a copy, and the weights on the card are copied from the master.
    """

    start: int
    end: int
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    num_matrix_elements: int
    on_host: bool = False


class ReplicatedState:
    """The full optimizer state of a bucket, on every owner; the fraction `offload` of it on the host.

    Gradients are all-reduced over the owners.
    """

    def __init__(self, bucket: FlatBucket, groups: Groups, *, offload: float = 0.0) -> None:
        self._bucket = bucket
        self._groups = groups
        self._under_way: list[tuple[Slice, torch.Tensor, dist.Work]] = []
        # Weights in fp32 or fp64 are their own master.
        low = bucket.is_low_precision
        self.shards = _make_shards(
            bucket.weights,
            bucket.gradient,
            num_matrix_elements=bucket.num_matrix_elements,
            offload=offload,
            own_master=low,
        )

    def start_grad_reduce(self) -> None:
        """Start the all-reduce of the gradient over owners, slice by slice; does not wait."""
        for part in self._bucket.slices:
            if len(part.group) > 1:
                packed = self._bucket.pack(self._bucket.gradient, part)
                work = dist.all_reduce(packed, group=self._groups.owners[part.group], async_op=True)
                assert work is not None
                self._under_way.append((part, packed, work))

    def finish_grad_reduce(self) -> torch.Tensor:
        """Wait for the all-reduces; return this rank's term of the squared global norm, a scalar, fp64.

        Raises LostPeer if an owner is lost.
        """
        for part, packed, work in self._under_way:
            with blame_peers("the gradient all-reduce over owners", part.group):
                work.wait()
            self._bucket.unpack(packed, part, self._bucket.gradient)
        self._under_way.clear()
        for shard in self.shards:
            _copy(self._bucket.gradient[shard.start : shard.end], shard.gradient)
        return squared_norm([self._bucket], device=self._bucket.gradient.device)

    def sync_weights(self) -> None:
        """Copy the stepped masters into the model's weights."""
        for shard in self.shards:
            _copy(shard.master, self._bucket.weights[shard.start : shard.end])

    def full_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's part of every tensor, by state and global name; views, unless a part is on the host."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for state in STATES:
            flat = getattr(self.shards[0], state)
            if len(self.shards) > 1 or self.shards[0].on_host:
                flat = torch.empty_like(self._bucket.gradient)
                for shard in self.shards:
                    flat[shard.start : shard.end].copy_(getattr(shard, state))
            found[state] = {name: self._bucket.view(flat, name) for name in self._bucket.parameters}
        return found

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load what `full_state` returns, possibly the same views, filled in place; then sync the weights."""
        flat = torch.empty_like(self._bucket.gradient)
        for state, named in tensors.items():
            for name, tensor in named.items():
                self._bucket.view(flat, name).copy_(tensor)
            for shard in self.shards:
                getattr(shard, state).copy_(flat[shard.start : shard.end])
        self.sync_weights()


class ShardedState:
    """The optimizer state of a bucket, sharded over its owners in proportion to `shares`, by rank (ZeRO-1).

    Each rank keeps the fraction `offload` of its own shard on the host.
    """

    def __init__(
        self, bucket: FlatBucket, groups: Groups, shares: Sequence[float], *, offload: float = 0.0
    ) -> None:
        self._bucket = bucket
        self._groups = groups
        self._packed: list[torch.Tensor] = []
        self._under_way: list[tuple[Slice, dist.Work]] = []
        self._ranges = [_ranges(part, shares) for part in bucket.slices]
        self._shards_by_slice = [self._new_shards(part, i, offload) for i, part in enumerate(bucket.slices)]
        """This rank's shards, by slice."""
        self.shards = [shard for own_shards in self._shards_by_slice for shard in own_shards]

    def _new_shards(self, part: Slice, index: int, offload: float) -> list[OptimizerShard]:
        start, end = self._ranges[index][self._bucket.rank]
        bucket, single_slice = self._bucket, len(self._bucket.slices) == 1
        return _make_shards(
            bucket.pack(bucket.weights, part)[start:end],
            # With a single slice, a range is part of the bucket's own buffer.
            bucket.gradient[start:end] if single_slice else None,
            start=start,
            num_matrix_elements=min(max(part.num_matrix_elements - start, 0), end - start),
            offload=offload,
            own_master=bucket.is_low_precision or not single_slice,
        )

    def start_grad_reduce(self) -> None:
        """Start to reduce each range of the gradient to the rank that holds it; does not wait."""
        for part, ranges in zip(self._bucket.slices, self._ranges, strict=True):
            packed = self._bucket.pack(self._bucket.gradient, part)
            self._packed.append(packed)
            for rank, (start, end) in ranges.items():
                if len(part.group) > 1 and end > start:
                    group = self._groups.owners[part.group]
                    work = dist.reduce(packed[start:end], rank, group=group, async_op=True)
                    assert work is not None
                    self._under_way.append((part, work))

    def finish_grad_reduce(self) -> torch.Tensor:
        """Wait for the reductions; return this rank's term of the squared global norm, a scalar, fp64.

        Raises LostPeer if an owner is lost.
        """
        for part, work in self._under_way:
            with blame_peers("the gradient reduction over owners", part.group):
                work.wait()
        total = torch.zeros((), dtype=torch.float64, device=self._bucket.gradient.device)
        for part, own_shards, packed, ranges in zip(
            self._bucket.slices, self._shards_by_slice, self._packed, self._ranges, strict=True
        ):
            for shard in own_shards:
                _copy(packed[shard.start : shard.end], shard.gradient)
            start, end = ranges[self._bucket.rank]
            counted = packed[start : max(min(end, part.num_counted_elements), start)]
            total += sum_of_squares(counted)
        self._under_way.clear()
        self._packed.clear()
        return total

    def sync_weights(self) -> None:
        """Broadcast the stepped masters from their ranks into every owner's weights; collective."""
        self._broadcast_state("master", self._bucket.weights)

    def full_state(self) -> dict[str, dict[str, torch.Tensor]]:
        """This rank's part of every tensor, by state and name, gathered from all owners; collective."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for state in STATES:
            flat = torch.empty_like(self._bucket.gradient)
            self._broadcast_state(state, flat)
            found[state] = {name: self._bucket.view(flat, name) for name in self._bucket.parameters}
        return found

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Load this rank's ranges from what `full_state` returns, then sync the weights; collective."""
        flat = torch.empty_like(self._bucket.gradient)
        for state, named in tensors.items():
            for name, tensor in named.items():
                self._bucket.view(flat, name).copy_(tensor)
            for part, own_shards in zip(self._bucket.slices, self._shards_by_slice, strict=True):
                packed = self._bucket.pack(flat, part)
                for shard in own_shards:
                    getattr(shard, state).copy_(packed[shard.start : shard.end])
        self.sync_weights()

    def _broadcast_state(self, state: str, flat: torch.Tensor) -> None:
        """Broadcast every rank's range of a state into a flat buffer [n], in the buffer's precision."""
        packed = [self._bucket.pack(flat, part) for part in self._bucket.slices]
        works: list[tuple[Slice, dist.Work]] = []
        for part, buffer, own_shards, ranges in zip(
            self._bucket.slices, packed, self._shards_by_slice, self._ranges, strict=True
        ):
            for shard in own_shards:
                _copy(getattr(shard, state), buffer[shard.start : shard.end])
            if len(part.group) > 1:
                for rank, (first, last) in ranges.items():
                    if last > first:
                        group = self._groups.owners[part.group]
                        work = dist.broadcast(buffer[first:last], rank, group=group, async_op=True)
                        assert work is not None
                        works.append((part, work))
        for part, work in works:
            with blame_peers(f"the broadcast of {state} to all owners", part.group):
                work.wait()
        for part, buffer in zip(self._bucket.slices, packed, strict=True):
            self._bucket.unpack(buffer, part, flat)


BucketState = ReplicatedState | ShardedState


def _ranges(part: Slice, shares: Sequence[float]) -> dict[int, tuple[int, int]]:
    """The range [start, end) of a slice that each rank holds, in proportion to its share."""
    weights = [shares[rank] for rank in part.group]
    total, done, start = sum(weights), 0.0, 0
    ranges: dict[int, tuple[int, int]] = {}
    for rank, weight in zip(part.group, weights, strict=True):
        done += weight
        end = round(part.num_elements * done / total)
        ranges[rank] = (start, end)
        start = end
    return ranges


_VECTOR = 64
"""Elements; a multiple of what any processor steps at a time. AdamW rounds the remainder after the last full
vector differently, so splitting at another element would change bits."""


def _make_shards(
    weights: torch.Tensor,
    gradient: torch.Tensor | None,
    *,
    num_matrix_elements: int,
    offload: float,
    start: int = 0,
    own_master: bool = True,
) -> list[OptimizerShard]:
    """The shards of consecutive weights [n]: the part on the card, then the fraction `offload` on the host.

    Without `gradient` [n] each shard gets a gradient buffer of its own; without `own_master` the weights on
    the card are their own master.
    """
    n = weights.numel()
    split = n - round(n * offload)
    if split < n:
        split -= (split if split < num_matrix_elements else split - num_matrix_elements) % _VECTOR
    shards: list[OptimizerShard] = []
    for first, last, on_host in ((0, split, False), (split, n, True)):
        if last == first and not (n == 0 and not on_host):
            continue
        part, dtype = weights[first:last], master_dtype(weights.dtype)
        if on_host:
            master = _host_copy(part.to(dtype))
        else:
            master = part.to(dtype, copy=True) if own_master else part
        shards.append(
            OptimizerShard(
                start=start + first,
                end=start + last,
                master=master,
                gradient=_zeros_like(master) if gradient is None or on_host else gradient[first:last],
                exp_avg=_zeros_like(master),
                exp_avg_sq=_zeros_like(master),
                num_matrix_elements=min(max(num_matrix_elements - first, 0), last - first),
                on_host=on_host,
            )
        )
    return shards


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in host memory, pinned if a card copies to and from it."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)


def _zeros_like(tensor: torch.Tensor) -> torch.Tensor:
    """As `torch.zeros_like`, but pinned if the tensor is."""
    return torch.zeros(
        tensor.shape,
        dtype=tensor.dtype,
        device=tensor.device,
        pin_memory=tensor.device.type == "cpu" and tensor.is_pinned(),
    )


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy into another precision or memory; nothing to do if both are the same tensor."""
    if source.device != target.device:
        source = source.to(target.dtype)
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
