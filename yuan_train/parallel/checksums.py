"""Whether ranks that hold the same weights have the same bits.

Owners of a bucket step the same elements, or send each other what one of them has stepped; the ranks of a
tensor-parallel group hold the same norms, biases and routers. All that keeps them equal is that all compute
alike: a bit that flips in memory, a faulty kernel, or unlike cards that each step all of the weights make
them drift apart, and no loss tells. So all ranks compare checksums of what several hold: of each slice of a
bucket, and of what is whole on each rank. Only if some differ do they compare those of single parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from yuan_train.config.errors import TrainingError
from yuan_train.parallel.gradients import FlatBucket, Slice, blocks_of
from yuan_train.parallel.grid import Bucket, Grid, RankCoord
from yuan_train.parallel.groups import gather_objects, guard_world_collective

_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
"""By bytes of an element, the integers that its bits are."""

_MAX_LISTED = 4
"""Parameters that a message lists."""


def checksum(weights: torch.Tensor) -> torch.Tensor:
    """Sum and sum of squares, modulo 2^64, of the bits of weights as integers: int64 [2], on their device.

    Whatever their order; it takes a block at a time.
    """
    flat = weights.detach().reshape(-1)
    total = torch.zeros(2, dtype=torch.int64, device=flat.device)
    for block in blocks_of(flat.view(_BITS[flat.element_size()])):
        wide = block.long()
        total += torch.stack([wide.sum(), (wide * wide).sum()])
    return total


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of a shape and a dtype have the same bits."""
    bits = _BITS[one.element_size()]
    return torch.equal(one.detach().contiguous().view(bits), other.detach().contiguous().view(bits))


def check_weights(
    grid: Grid, coord: RankCoord, trained: Sequence[FlatBucket], frozen: Sequence[FlatBucket]
) -> None:
    """Raise TrainingError, on all ranks, unless the weights that several ranks hold have the same bits on all
    of them; it names ranks and parameters. Collective over all ranks."""
    if not dist.is_initialized():
        return
    first_rows, count = _first_rows(grid)
    shared = [
        entry
        for number, buckets in enumerate((trained, frozen))
        for bucket in buckets
        for entry in _shared(bucket, number * count + first_rows[bucket.bucket])
    ]
    extremes = torch.iinfo(torch.int64)
    least = torch.full((2 * count, 2), extremes.max, dtype=torch.int64)
    most = torch.full((2 * count, 2), extremes.min, dtype=torch.int64)
    if shared:
        rows = torch.tensor([entry.row for entry in shared])
        least[rows] = most[rows] = torch.stack([entry.checksum() for entry in shared]).cpu()
    with guard_world_collective(coord, "the check of weights"):
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    is_held, is_unlike = (least <= most).all(dim=1), (least != most).any(dim=1)
    unlike = set(torch.nonzero(is_held & is_unlike).flatten().tolist())
    if not unlike:
        return
    mine = {
        (entry.row, name): tuple(checksum(weights).tolist())
        for entry in shared
        if entry.row in unlike
        for name, weights in entry.weights()
    }
    with guard_world_collective(coord, "the search for weights that differ"):
        raise TrainingError(_message(grid, gather_objects(mine)))


def raise_faults(coord: RankCoord, faults: Sequence[str]) -> None:
    """Raise TrainingError, on all ranks, with what some rank has found wrong with messages or gradients.
    Collective over all ranks."""
    with guard_world_collective(coord, "the search for bits that differ"):
        found = [fault for own in gather_objects(list(faults)) for fault in own]
    if found:
        more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise TrainingError(
            f"{'; '.join(found[:_MAX_LISTED])}{more}. Test the memory of that card and its host, and for a "
            "message the link's; go on from a checkpoint that was saved before"
        )


@dataclass(frozen=True)
class _Shared:
    """Weights that several ranks hold: a slice of a bucket, or (None) what is whole on each rank."""

    row: int
    """Its number among all of the model's."""
    bucket: FlatBucket
    part: Slice | None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's part, by name."""
        bucket = self.bucket
        for piece in bucket.pieces:
            if self.part is not None:
                yield piece.name, bucket.slice_view(bucket.weights, piece.name, self.part)
            elif piece.shard.dim is None:
                yield piece.name, bucket.view(bucket.weights, piece.name)

    def checksum(self) -> torch.Tensor:
        """That of all of it."""
        if self.part is not None:
            return checksum(self.bucket.pack(self.bucket.weights, self.part))
        sums = [checksum(weights) for _, weights in self.weights()]
        return torch.stack([*sums, torch.zeros_like(checksum(self.bucket.weights[:0]))]).sum(dim=0)


def _shared(bucket: FlatBucket, row: int) -> Iterator[_Shared]:
    """What other ranks hold too of a bucket whose first number is `row`."""
    for part in bucket.slices:
        if len(part.group) > 1:
            yield _Shared(row + part.index, bucket, part)
    if bucket.num_slices > 1:
        yield _Shared(row + bucket.num_slices, bucket, None)


def _first_rows(grid: Grid) -> tuple[dict[Bucket, int], int]:
    """The number of each bucket's first slice, after which those of its others and of what is whole follow;
    and how many there are."""
    found: dict[Bucket, int] = {}
    count = 0
    for bucket in grid.buckets:
        found[bucket] = count
        count += bucket.num_slices + 1
    return found, count


def _message(grid: Grid, told: Sequence[dict[tuple[int, str], tuple[int, ...]]]) -> str:
    """Which ranks have other weights than most that hold them, of which parameters, and what to do."""
    found: dict[str, list[str]] = {}
    for row, name in dict.fromkeys(key for mine in told for key in mine):
        sums = {rank: mine[row, name] for rank, mine in enumerate(told) if (row, name) in mine}
        (common, votes), *others = Counter(sums.values()).most_common()
        if not others:
            continue
        odd = [rank for rank, own in sums.items() if own != common]
        if votes == others[0][1]:
            who = f"{_ranks(grid, list(sums))} have unlike weights"
        else:
            verb = "has" if len(odd) == 1 else "have"
            same = [rank for rank in sums if rank not in odd]
            who = f"{_ranks(grid, odd)} {verb} other weights than {_ranks(grid, same)}"
        found.setdefault(who, []).append(name)
    lines = [f"{who}: {_listed(list(dict.fromkeys(names)))}" for who, names in found.items()]
    advice = (
        "They should be the same to the bit. Test the memory of that card; if cards of unlike types each "
        "step all of the weights, set optimizer_sharding: true in the plan; and go on from a checkpoint that "
        "was saved while they were"
    )
    return "; ".join(lines[:_MAX_LISTED]) + f". {advice}"


def _ranks(grid: Grid, ranks: Sequence[int]) -> str:
    """Some ranks for people; one alone with its place and card."""
    if len(ranks) == 1:
        return grid.label(grid.coords[ranks[0]])
    shown = ", ".join(map(str, ranks[: 2 * _MAX_LISTED]))
    return f"ranks {shown}" + (", ..." if len(ranks) > 2 * _MAX_LISTED else "")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more parameters" if more > 0 else "")
