"""Optimizer state: whole on every owner, or shared out among the owners of a slice (ZeRO-1).

Shared out, a rank holds masters and AdamW's two averages for its range of each of its slices. Gradients are
summed to the range's holder, and the stepped weights come back from it; both go owner by owner, for ranges
are unequal and gloo has no uneven all-gather.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.parallel.gradients import FlatBucket, Slice, squared_norm, sum_of_squares
from yuan_train.parallel.groups import Groups, meeting

STATES = ("master", "exp_avg", "exp_avg_sq")
"""What is kept per element."""


@dataclass(frozen=True)
class OptimizerShard:
    """A run of elements that this rank steps: flat buffers [k], matrices first."""

    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    num_matrix_elements: int


class WholeState:
    """The state of a bucket, all of it here."""

    def __init__(self, bucket: FlatBucket, groups: Groups) -> None:
        self._bucket = bucket
        self._groups = groups
        self._under_way: list[tuple[Slice, torch.Tensor, dist.Work]] = []
        # Weights in full precision are their own master.
        low = bucket.is_low_precision
        master = bucket.weights.to(bucket.master_dtype) if low else bucket.weights
        self.shards = [
            OptimizerShard(
                master,
                bucket.gradient,
                torch.zeros_like(master),
                torch.zeros_like(master),
                bucket.num_matrix_elements,
            )
        ]

    def begin_sum(self) -> None:
        """Start to add up gradients over owners, slice by slice; does not wait."""
        for part in self._bucket.slices:
            if len(part.group) > 1:
                packed = self._bucket.pack(self._bucket.gradient, part)
                work = dist.all_reduce(packed, group=self._groups.owners[part.group], async_op=True)
                assert work is not None
                self._under_way.append((part, packed, work))

    def end_sum(self) -> None:
        """Wait until every owner has the whole sum."""
        for part, packed, work in self._under_way:
            with meeting("the sum of gradients over owners", part.group):
                work.wait()
            self._bucket.unpack(packed, part, self._bucket.gradient)
        self._under_way.clear()

    def squared_norm(self) -> torch.Tensor:
        """Share of the squared global gradient norm, fp64."""
        return squared_norm([self._bucket], device=self._bucket.gradient.device)

    def publish(self) -> None:
        """Bring the model's weights up to the master."""
        if self._bucket.is_low_precision:
            self._bucket.weights.copy_(self.shards[0].master)

    def gather(self) -> dict[str, dict[str, torch.Tensor]]:
        """By state and global name: this rank's part of every tensor, as views."""
        shard = self.shards[0]
        return {
            state: {name: self._bucket.view(getattr(shard, state), name) for name in self._bucket.parameters}
            for state in STATES
        }

    def load(self, tensors: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """The reverse of `gather`; its views may have been filled in place."""
        for state, named in self.gather().items():
            for name, view in named.items():
                if view.data_ptr() != tensors[state][name].data_ptr():
                    view.copy_(tensors[state][name])
        self.publish()


class SharedState:
    """The state of a bucket, shared out among its owners in proportion to `shares`, by rank."""

    def __init__(self, bucket: FlatBucket, groups: Groups, shares: Sequence[float]) -> None:
        self._bucket = bucket
        self._groups = groups
        self._packed: list[torch.Tensor] = []
        self._under_way: list[tuple[Slice, dist.Work]] = []
        self._ranges = [_ranges(part, shares) for part in bucket.slices]
        self.shards = [self._new_shard(part, i) for i, part in enumerate(bucket.slices)]

    def _new_shard(self, part: Slice, index: int) -> OptimizerShard:
        start, end = self._ranges[index][self._bucket.rank]
        master = self._bucket.pack(self._bucket.weights, part)[start:end].to(
            self._bucket.master_dtype, copy=True
        )
        matrices = min(max(part.num_matrix_elements - start, 0), end - start)
        return OptimizerShard(
            master, torch.zeros_like(master), torch.zeros_like(master), torch.zeros_like(master), matrices
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

    def end_sum(self) -> None:
        """Wait for the sums of this rank's ranges."""
        for part, work in self._under_way:
            with meeting("the sum of gradients over owners", part.group):
                work.wait()
        for shard, packed, ranges in zip(self.shards, self._packed, self._ranges, strict=True):
            start, end = ranges[self._bucket.rank]
            shard.gradient.copy_(packed[start:end])
        self._under_way.clear()
        self._packed.clear()

    def squared_norm(self) -> torch.Tensor:
        """Share of the squared global gradient norm, fp64: every range counts at its holder."""
        total = torch.zeros((), dtype=torch.float64, device=self._bucket.gradient.device)
        for part, shard, ranges in zip(self._bucket.slices, self.shards, self._ranges, strict=True):
            start = ranges[self._bucket.rank][0]
            counted = shard.gradient[: max(part.num_counted_elements - start, 0)]
            total += sum_of_squares(counted)
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
            for part, shard, ranges in zip(self._bucket.slices, self.shards, self._ranges, strict=True):
                start, end = ranges[self._bucket.rank]
                getattr(shard, state).copy_(self._bucket.pack(flat, part)[start:end])
        self.publish()

    def _assemble(self, state: str, flat: torch.Tensor) -> None:
        """Put every holder's range of a state into a flat buffer [n], in the buffer's precision."""
        packed = [self._bucket.pack(flat, part) for part in self._bucket.slices]
        works: list[tuple[Slice, dist.Work]] = []
        for part, buffer, shard, ranges in zip(
            self._bucket.slices, packed, self.shards, self._ranges, strict=True
        ):
            start, end = ranges[self._bucket.rank]
            buffer[start:end].copy_(getattr(shard, state))
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
