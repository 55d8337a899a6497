"""Optimizer state: whole on every owner, or shared out among the owners of a slice (ZeRO-1).

Shared out, a rank holds masters and AdamW's two averages for its range of each of its slices. Gradients are
summed to the range's holder, and the stepped weights come back from it; both go owner by owner, for ranges
are unequal and gloo has no uneven all-gather. Part of what a rank holds may lie on the host, and is stepped
there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.parallel.gradients import FlatBucket, Slice, master_dtype, squared_norm, sum_of_squares
from yuan_train.parallel.groups import Groups, meeting

STATES = ("master", "exp_avg", "exp_avg_sq")
"""What is kept per element."""


@dataclass(frozen=True)
class OptimizerShard:
    """A run of elements that this rank steps: flat buffers [k], matrices first.

    It is [start, end) of its slice of a bucket (of the bucket, where the state is whole). On the host, the
    gradient is a copy and the weights are brought up from the master.
    """

    start: int
    end: int
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    num_matrix_elements: int
    on_host: bool = False


class WholeState:
    """The state of a bucket, all of it here; the fraction `offload` of it on the host."""

    def __init__(self, bucket: FlatBucket, groups: Groups, *, offload: float = 0.0) -> None:
        self._bucket = bucket
        self._groups = groups
        self._under_way: list[tuple[Slice, torch.Tensor, dist.Work]] = []
        # Weights in full precision are their own master.
        low = bucket.is_low_precision
        self.shards = _make_shards(
            bucket.weights,
            bucket.gradient,
            num_matrix_elements=bucket.num_matrix_elements,
            offload=offload,
            own_master=low,
        )

    def begin_sum(self) -> None:
        """Start to add up gradients over owners, slice by slice; does not wait."""
        for part in self._bucket.slices:
            if len(part.group) > 1:
                packed = self._bucket.pack(self._bucket.gradient, part)
                work = dist.all_reduce(packed, group=self._groups.owners[part.group], async_op=True)
                assert work is not None
                self._under_way.append((part, packed, work))

    def end_sum(self) -> torch.Tensor:
        """Wait until every owner has the whole sum; the share of its squared global norm, fp64."""
        for part, packed, work in self._under_way:
            with meeting("the sum of gradients over owners", part.group):
                work.wait()
            self._bucket.unpack(packed, part, self._bucket.gradient)
        self._under_way.clear()
        for shard in self.shards:
            _copy(self._bucket.gradient[shard.start : shard.end], shard.gradient)
        return squared_norm([self._bucket], device=self._bucket.gradient.device)

    def publish(self) -> None:
        """Bring the model's weights up to the master."""
        for shard in self.shards:
            _copy(shard.master, self._bucket.weights[shard.start : shard.end])

    def gather(self) -> dict[str, dict[str, torch.Tensor]]:
        """By state and global name: this rank's part of every tensor, as views if all lie together."""
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
        """The reverse of `gather`; its views may have been filled in place."""
        flat = torch.empty_like(self._bucket.gradient)
        for state, named in tensors.items():
            for name, tensor in named.items():
                self._bucket.view(flat, name).copy_(tensor)
            for shard in self.shards:
                getattr(shard, state).copy_(flat[shard.start : shard.end])
        self.publish()


class SharedState:
    """The state of a bucket, shared out among its owners in proportion to `shares`, by rank; of its own share
    each keeps the fraction `offload` on the host."""

    def __init__(
        self, bucket: FlatBucket, groups: Groups, shares: Sequence[float], *, offload: float = 0.0
    ) -> None:
        self._bucket = bucket
        self._groups = groups
        self._packed: list[torch.Tensor] = []
        self._under_way: list[tuple[Slice, dist.Work]] = []
        self._ranges = [_ranges(part, shares) for part in bucket.slices]
        self._held = [self._new_shards(part, i, offload) for i, part in enumerate(bucket.slices)]
        """By slice."""
        self.shards = [shard for held in self._held for shard in held]

    def _new_shards(self, part: Slice, index: int, offload: float) -> list[OptimizerShard]:
        start, end = self._ranges[index][self._bucket.rank]
        bucket, whole = self._bucket, len(self._bucket.slices) == 1
        return _make_shards(
            bucket.pack(bucket.weights, part)[start:end],
            # A range of a slice that is not packed lies in the bucket itself.
            bucket.gradient[start:end] if whole else None,
            start=start,
            num_matrix_elements=min(max(part.num_matrix_elements - start, 0), end - start),
            offload=offload,
            own_master=bucket.is_low_precision or not whole,
        )

    def begin_sum(self) -> None:
        """Start to sum each range of the gradient to its holder; does not wait."""
        for part, ranges in zip(self._bucket.slices, self._ranges, strict=True):
            packed = self._bucket.pack(self._bucket.gradient, part)
            self._packed.append(packed)
            for rank, (start, end) in ranges.items():
                if len(part.group) > 1 and end > start:
                    group = self._groups.owners[part.group]
                    work = dist.reduce(packed[start:end], rank, group=group, async_op=True)
                    assert work is not None
                    self._under_way.append((part, work))

    def end_sum(self) -> torch.Tensor:
        """Wait for the sums of this rank's ranges; their share of the squared global norm, fp64."""
        for part, work in self._under_way:
            with meeting("the sum of gradients over owners", part.group):
                work.wait()
        total = torch.zeros((), dtype=torch.float64, device=self._bucket.gradient.device)
        for part, held, packed, ranges in zip(
            self._bucket.slices, self._held, self._packed, self._ranges, strict=True
        ):
            for shard in held:
                _copy(packed[shard.start : shard.end], shard.gradient)
            start, end = ranges[self._bucket.rank]
            counted = packed[start : max(min(end, part.num_counted_elements), start)]
            total += sum_of_squares(counted)
        self._under_way.clear()
        self._packed.clear()
        return total

    def publish(self) -> None:
        """Send the stepped weights from their holders to every owner."""
        self._assemble("master", self._bucket.weights)

    def gather(self) -> dict[str, dict[str, torch.Tensor]]:
        """By state and global name: this rank's part of every tensor, put together; collective."""
        found: dict[str, dict[str, torch.Tensor]] = {}
        for state in STATES:
            flat = torch.empty_like(self._bucket.gradient)
            self._assemble(state, flat)
            found[state] = {name: self._bucket.view(flat, name) for name in self._bucket.parameters}
        return found

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Take this rank's ranges out of its part of every tensor."""
        flat = torch.empty_like(self._bucket.gradient)
        for state, named in tensors.items():
            for name, tensor in named.items():
                self._bucket.view(flat, name).copy_(tensor)
            for part, held in zip(self._bucket.slices, self._held, strict=True):
                packed = self._bucket.pack(flat, part)
                for shard in held:
                    getattr(shard, state).copy_(packed[shard.start : shard.end])
        self.publish()

    def _assemble(self, state: str, flat: torch.Tensor) -> None:
        """Put every holder's range of a state into a flat buffer [n], in the buffer's precision."""
        packed = [self._bucket.pack(flat, part) for part in self._bucket.slices]
        works: list[tuple[Slice, dist.Work]] = []
        for part, buffer, held, ranges in zip(
            self._bucket.slices, packed, self._held, self._ranges, strict=True
        ):
            for shard in held:
                _copy(getattr(shard, state), buffer[shard.start : shard.end])
            if len(part.group) > 1:
                for rank, (first, last) in ranges.items():
                    if last > first:
                        group = self._groups.owners[part.group]
                        work = dist.broadcast(buffer[first:last], rank, group=group, async_op=True)
                        assert work is not None
                        works.append((part, work))
        for part, work in works:
            with meeting(f"handing the {state} to all owners", part.group):
                work.wait()
        for part, buffer in zip(self._bucket.slices, packed, strict=True):
            self._bucket.unpack(buffer, part, flat)


BucketState = WholeState | SharedState


def _ranges(part: Slice, shares: Sequence[float]) -> dict[int, tuple[int, int]]:
    """Each holder's range of a slice, in proportion to its share."""
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
"""Elements: more than any processor steps at a time. AdamW rounds the odd ones behind the last whole vector
another way, so that a cut elsewhere would change bits."""


def _make_shards(
    weights: torch.Tensor,
    gradient: torch.Tensor | None,
    *,
    num_matrix_elements: int,
    offload: float,
    start: int = 0,
    own_master: bool = True,
) -> list[OptimizerShard]:
    """The state of a run of weights [n]: first what stays on the card, then the fraction `offload` of it.

    Without `gradient` [n] each shard gets a buffer for its own; without `own_master` the weights on the card
    are their own master.
    """
    n = weights.numel()
    cut = n - round(n * offload)
    if cut < n:
        cut -= (cut if cut < num_matrix_elements else cut - num_matrix_elements) % _VECTOR
    shards: list[OptimizerShard] = []
    for first, last, on_host in ((0, cut, False), (cut, n, True)):
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
                gradient=_zeros_beside(master) if gradient is None or on_host else gradient[first:last],
                exp_avg=_zeros_beside(master),
                exp_avg_sq=_zeros_beside(master),
                num_matrix_elements=min(max(num_matrix_elements - first, 0), last - first),
                on_host=on_host,
            )
        )
    return shards


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, pinned where a card copies to and from it."""
    pinned = tensor.device.type == "cuda"
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned).copy_(tensor)


def _zeros_beside(tensor: torch.Tensor) -> torch.Tensor:
    """As `zeros_like`, pinned where the tensor is."""
    return torch.zeros(
        tensor.shape,
        dtype=tensor.dtype,
        device=tensor.device,
        pin_memory=tensor.device.type == "cpu" and tensor.is_pinned(),
    )


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Into another precision or memory; nothing where they are one tensor."""
    if source.device != target.device:
        source = source.to(target.dtype)
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
