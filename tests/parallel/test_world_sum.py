"""Sums over all ranks through a tree of groups: those of a ring, on every rank the same."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist

from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.parallel import groups
from yuan_train.parallel.device import CPU
from yuan_train.parallel.groups import Groups, gather_on_first, init_distributed, shutdown, sum_over_world

NUM_RANKS = 5
"""In groups of two: a tree of three levels, whose last groups have one rank only."""


def _sum(rank: int, port: int) -> None:
    as_rank(rank, NUM_RANKS, port)
    # As on many ranks: those of the world connect when they first exchange something.
    groups.LAZY_FROM = groups.RING_UP_TO = 1
    groups.TREE_WIDTH = 2
    init_distributed(device=CPU, timeout_seconds=60)
    coord = cast(Any, SimpleNamespace(rank=rank))
    tree = Groups({}, {}, tree=groups._make_tree(timeout_seconds=60))
    assert len(tree.tree) == {0: 3, 1: 1, 2: 2, 3: 1, 4: 1}[rank]
    own = torch.tensor([1.0, rank, 2.0**-60 * 3**rank], dtype=torch.float64)
    for held in (tree, Groups({}, {})):
        total = own.clone()
        sum_over_world(held, coord, total, "the sum")
        assert total.tolist() == [5, 10, 2.0**-60 * (1 + 3 + 9 + 27 + 81)]
        found = gather_on_first(held, coord, own, "the gather")
        assert found == ([[1.0, r, 2.0**-60 * 3**r] for r in range(NUM_RANKS)] if rank == 0 else None)
    total = own / 3
    sum_over_world(tree, coord, total, "the sum")
    same = [torch.empty_like(total) for _ in range(NUM_RANKS)]
    dist.all_gather(same, total)
    assert all(torch.equal(other, total) for other in same)
    shutdown()


def test_a_tree_sums_and_gathers_as_a_ring_does() -> None:
    spawn(_sum, NUM_RANKS, free_port())
