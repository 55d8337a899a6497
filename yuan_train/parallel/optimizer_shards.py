"""Where the optimizer state of consecutive weights lies: on the card, in host memory, on a disk."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from yuan_train.config.units import DISK_STATES
from yuan_train.parallel.gradients import FlatBucket, Slice, master_dtype
from yuan_train.parallel.tiers.disk import file_bytes
from yuan_train.parallel.tiers.host_state import HostChunk, HostPlace, chunk_ranges, disk_chunks
from yuan_train.parallel.tiers.slab import HostSlab, piece_bytes
from yuan_train.parallel.transport import Ranges


@dataclass(frozen=True)
class OptimizerShard:
    """Consecutive elements that this rank steps: flat buffers [k], k = end - start, matrices first.

    They are [start, end) of a slice of a bucket; of the bucket, if the state is not sharded. On the host,
    `chunks` are copied and stepped one after another. On a disk, masters and moments are those of the file,
    mapped, for checkpoints; `gradient` is empty.
    """

    start: int
    end: int
    master: torch.Tensor
    gradient: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    num_matrix_elements: int
    chunks: tuple[HostChunk, ...] = ()

    @property
    def on_host(self) -> bool:
        """Whether the host steps them."""
        return bool(self.chunks)


@dataclass(frozen=True)
class Away:
    """What a rank does not keep on its card of its state of a bucket."""

    share: float = 0.0
    """Fraction of the state that the host steps."""
    on_disk: float = 0.0
    """Fraction of that which lies on the disk."""

    def cuts(self, n: int, num_matrix_elements: int) -> tuple[int, int]:
        """How many of `n` elements are on the card; and on the card or in host memory."""
        on_card = _split(n, num_matrix_elements, self.share)
        return on_card, max(on_card, _split(n, num_matrix_elements, self.share * self.on_disk))


HERE = Away()
"""All of it is on the card."""

NUM_BUFFERS = 4
"""Master, gradient and AdamW's two moments."""

_VECTOR = 64
"""Elements; a multiple of what any processor steps at a time. AdamW rounds the remainder after the last full
vector differently, so splitting at another element would change bits."""


def _split(n: int, num_matrix_elements: int, share: float) -> int:
    """How many of `n` elements are before the last `share` of them."""
    split = n - round(n * share)
    if split < n:
        split -= (split if split < num_matrix_elements else split - num_matrix_elements) % _VECTOR
    return split


def owner_ranges(part: Slice, shares: Sequence[float]) -> Ranges:
    """The range of a slice that each rank of its group holds, in proportion to its share.

    Equal shares of what does not divide are equal but for the last one. Borders are multiples of 64 elements
    where the slice is not small: 128 bytes in 16 bits, of which NCCL moves whole vectors.
    """
    weights, n = [shares[rank] for rank in part.group], part.num_elements
    count, total = len(weights), sum(weights)
    if len(set(weights)) == 1:
        each = n // count
        if n % count:
            each -= each % _VECTOR if each >= _VECTOR else 0
        return Ranges((*[each] * (count - 1), n - each * (count - 1)))
    unit = _VECTOR if n >= _VECTOR * count else 1
    done, start = 0.0, 0
    sizes: list[int] = []
    for number, weight in enumerate(weights):
        done += weight
        end = n if number == count - 1 else round(n * done / total / unit) * unit
        sizes.append(end - start)
        start = end
    return Ranges(tuple(sizes))


def own_ranges(bucket: FlatBucket, shares: Sequence[float] | None) -> list[tuple[int, int]]:
    """By slice: the range that this rank owns; none if the state is not sharded."""
    if shares is None:
        return []
    return [owner_ranges(part, shares).of(part.group.index(bucket.rank)) for part in bucket.slices]


def matrix_elements(part: Slice, own: tuple[int, int]) -> int:
    """How many elements of a range of a slice are of matrices: the first ones."""
    start, end = own
    return min(max(part.num_matrix_elements - start, 0), end - start)


@dataclass(frozen=True)
class AwayBytes:
    """What a rank's state takes away from the card."""

    host: int
    """Of a slab."""
    disk: int
    """Of the rank's file."""


def away_bytes(bucket: FlatBucket, shares: Sequence[float] | None, away: Away) -> AwayBytes:
    """What this rank's state of a bucket takes of host memory and of a disk."""
    if shares is None:
        layouts = [(bucket.weights.numel(), bucket.num_matrix_elements)]
    else:
        owned = zip(bucket.slices, own_ranges(bucket, shares), strict=True)
        layouts = [(own[1] - own[0], matrix_elements(part, own)) for part, own in owned]
    dtype = bucket.gradient.dtype
    host = disk = 0
    for n, num_matrix in layouts:
        on_card, in_memory = away.cuts(n, num_matrix)
        host += NUM_BUFFERS * piece_bytes(in_memory - on_card, dtype)
        disk += sum(
            DISK_STATES * file_bytes(last - first, dtype)
            for first, last, _ in disk_parts(n, num_matrix, in_memory)
        )
    return AwayBytes(host, disk)


def page_state_bytes(bucket: FlatBucket) -> int:
    """What the state of a bucket that is a page takes of a slab, beside its weights and gradient."""
    dtype = master_dtype(bucket.weights.dtype)
    return (2 + bucket.is_low_precision) * piece_bytes(bucket.weights.numel(), dtype)


def disk_parts(n: int, num_matrix_elements: int, first: int) -> Iterator[tuple[int, int, bool]]:
    """What lies on the disk, [first, n): (first, last, whether weights decay); matrices before vectors."""
    border = min(max(num_matrix_elements, first), n)
    for start, end, decays in ((first, border, True), (border, n, False)):
        if start < end:
            yield start, end, decays


def make_shards(
    weights: torch.Tensor,
    gradient: torch.Tensor | None,
    *,
    num_matrix_elements: int,
    away: Away,
    host: HostPlace | None,
    layout: int = 0,
    start: int = 0,
    own_master: bool = True,
    slab: HostSlab | None = None,
) -> list[OptimizerShard]:
    """The shards of consecutive weights [n]: the part on the card, then those in host memory and on the disk.

    Without `gradient` [n] each shard gets a gradient buffer of its own; without `own_master` the weights on
    the card are their own master. Of weights that lie on the host, the first part is on the host too, in
    pieces of `slab`, and is stepped there.
    """
    n, dtype = weights.numel(), master_dtype(weights.dtype)
    split, in_memory = away.cuts(n, num_matrix_elements)
    shards: list[OptimizerShard] = []
    if split or not n:
        own = weights[:split]

        def zeros() -> torch.Tensor:
            return own.new_zeros(split, dtype=dtype) if slab is None else slab.take(split, dtype)

        master = zeros().copy_(own) if own_master else own
        shards.append(
            OptimizerShard(
                start=start,
                end=start + split,
                master=master,
                gradient=torch.zeros_like(master) if gradient is None else gradient[:split],
                exp_avg=zeros(),
                exp_avg_sq=zeros(),
                num_matrix_elements=min(num_matrix_elements, split),
            )
        )
    if split < n:
        assert host is not None
        if split < in_memory:
            num_matrix = min(max(num_matrix_elements - split, 0), in_memory - split)
            own = weights[split:in_memory].to(dtype)
            shards.append(_host_shard(own, host, layout, start + split, num_matrix))
        for first, last, decays in disk_parts(n, num_matrix_elements, in_memory):
            shards.append(_disk_shard(weights[first:last].to(dtype), host, layout, start + first, decays))
    return shards


def _host_shard(
    weights: torch.Tensor, host: HostPlace, layout: int, start: int, num_matrix_elements: int
) -> OptimizerShard:
    """The shard of weights [k], in the master's precision, in host memory."""
    n = weights.numel()
    buffers = [host.slab.take(n, weights.dtype) for _ in range(NUM_BUFFERS)]
    buffers[0].copy_(weights)
    chunks = [
        HostChunk(layout, start + first, *(b[first:last] for b in buffers), decays=decays, links=host.links)
        for first, last, decays in chunk_ranges(n, num_matrix_elements)
    ]
    return OptimizerShard(
        start, start + n, *buffers, num_matrix_elements=num_matrix_elements, chunks=tuple(chunks)
    )


def _disk_shard(
    weights: torch.Tensor, host: HostPlace, layout: int, start: int, decays: bool
) -> OptimizerShard:
    """The shard of weights [k], all matrices or none, in the master's precision, on the disk."""
    assert host.disk is not None
    n = weights.numel()
    states = tuple(host.disk.file.take(n, weights.dtype) for _ in range(DISK_STATES))
    master, *averages = (state.tensor for state in states)
    master.copy_(weights)
    return OptimizerShard(
        start,
        start + n,
        master,
        weights.new_empty(0),
        *averages,
        num_matrix_elements=n if decays else 0,
        chunks=disk_chunks(states, host.disk, host.links, layout=layout, start=start, decays=decays),
    )
