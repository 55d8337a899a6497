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

from yuan_train.parallel.gradients import FlatBucket, Slice, squared_norm, sum_of_squares, sum_over_owners
from yuan_train.parallel.groups import Groups

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

    def sum_gradients(self) -> None:
        """Add up over owners; every owner has the whole sum."""
        sum_over_owners([self._bucket], self._groups)

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

    def sum_gradients(self) -> None:
        """Sum each range to its holder."""
        packed = [self._bucket.pack(self._bucket.gradient, part) for part in self._bucket.slices]
        works: list[dist.Work | None] = []
        for part, flat, ranges in zip(self._bucket.slices, packed, self._ranges, strict=True):
            if len(part.group) > 1:
                for rank, (start, end) in ranges.items():
                    if end > start:
                        group = self._groups.owners[part.group]
                        works.append(dist.reduce(flat[start:end], rank, group=group, async_op=True))
        for work in works:
            assert work is not None
            work.wait()
        for shard, flat, ranges in zip(self.shards, packed, self._ranges, strict=True):
            start, end = ranges[self._bucket.rank]
            shard.gradient.copy_(flat[start:end])

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
        works: list[dist.Work | None] = []
        for part, buffer, shard, ranges in zip(
            self._bucket.slices, packed, self.shards, self._ranges, strict=True
        ):
            start, end = ranges[self._bucket.rank]
            buffer[start:end].copy_(getattr(shard, state))
            if len(part.group) > 1:
                for rank, (first, last) in ranges.items():
                    if last > first:
                        group = self._groups.owners[part.group]
                        works.append(dist.broadcast(buffer[first:last], rank, group=group, async_op=True))
        for work in works:
            assert work is not None
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
