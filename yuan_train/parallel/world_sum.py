"""A few numbers of all ranks: their sums, or all of them on rank 0, through a tree of small groups.

Gloo's all-reduce is a ring: 2 (N - 1) messages one after another, whatever their size. In a tree each group
of eight, on one node if ranks are numbered node by node, gathers at its first rank, these ranks in groups of
eight again, and so on; a sum goes back the same way. That is about 4 log8(N) messages one after another: 20
instead of 16,382 at 8,192 ranks. All ranks get the same bits.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.groups import (
    TREE_WIDTH,
    Groups,
    as_training_error,
    blame_peers,
    guard_world_collective,
)
from yuan_train.parallel.transport import rooted


def sum_over_world(groups: Groups, coord: RankCoord, totals: torch.Tensor, what: str) -> None:
    """Add up a tensor [n] on the CPU over all ranks, in place; collective over all ranks.

    Raises TrainingError, naming `what` and the ranks that may be lost.
    """
    if not dist.is_initialized():
        return
    if not groups.tree:
        with guard_world_collective(coord, what):
            dist.all_reduce(totals)
        return
    with as_training_error(coord):
        joined: list[tuple[tuple[int, ...], dist.ProcessGroup]] = []
        for ranks, group in groups.tree:
            joined.append((ranks, group))
            gathered = _gather(coord, totals, ranks, group, what)
            if gathered is None:
                break
            totals.copy_(gathered.sum(0))
        for ranks, group in reversed(joined):
            with blame_peers(what, ranks):
                group.broadcast([totals], _FROM_FIRST).wait()


def gather_on_first(
    groups: Groups, coord: RankCoord, local: torch.Tensor, what: str
) -> list[list[float]] | None:
    """The numbers [n] of all ranks, by rank, on rank 0; None elsewhere. Collective over all ranks.

    Raises TrainingError, naming `what` and the ranks that may be lost.
    """
    if not dist.is_initialized():
        return [local.tolist()]
    world_size = dist.get_world_size()
    tree = groups.tree or [(tuple(range(world_size)), None)]
    rows = local.unsqueeze(0)
    with as_training_error(coord):
        for ranks, group in tree:
            gathered = _gather(coord, rows, ranks, group, what)
            if gathered is None:
                return None
            # The last group may be short, but in the next one all send as much.
            rows = torch.zeros(len(rows) * TREE_WIDTH if groups.tree else world_size, len(local)).to(local)
            rows[: gathered.shape[0] * gathered.shape[1]] = gathered.flatten(0, 1)
    return rows[:world_size].tolist()


def _gather(
    coord: RankCoord,
    local: torch.Tensor,
    ranks: tuple[int, ...],
    group: dist.ProcessGroup | None,
    what: str,
) -> torch.Tensor | None:
    """The tensors [...] of a group's ranks on its first one, as one [ranks, ...]; None elsewhere."""
    gathered = torch.zeros(len(ranks), *local.shape, dtype=local.dtype) if coord.rank == ranks[0] else None
    parts = [] if gathered is None else [list(gathered.unbind())]
    group = group or dist.group.WORLD
    assert group is not None
    with blame_peers(what, ranks):
        group.gather(parts, [local], _ON_FIRST).wait()
    return gathered


# The groups' own methods: torch.distributed's functions of the same names find a rank's number in its group
# and check what they are given each time, which takes the host longer than all else of a sum.
_FROM_FIRST, _ON_FIRST = rooted(dist.BroadcastOptions(), 0), rooted(dist.GatherOptions(), 0)
