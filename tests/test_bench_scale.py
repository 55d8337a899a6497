"""One rank among many, on a fake process group: its groups, its set-up, and steps without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tools.bench.scale import Shape, fake_ranks, make_plan, measure, measure_index, write_index
from yuan_train.parallel.device import CPU
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import make_groups


@pytest.mark.parametrize(
    ("shape", "rank", "library", "num_groups", "num_reductions"),
    [
        # The world; two edges; owners of layers and of the embedding; its tensor group; two levels of tree.
        # Reductions and weight sync, of 8 owners and of 4.
        ((4, 2, 8), 0, "gloo", 1 + 2 + 2 + 1 + 2, 2 * (8 + 4)),
        # The second rank of a group sends nothing to other stages, and is at the bottom of the tree.
        # Equal ranges are reduced in one operation.
        ((4, 2, 8), 33, "nccl", 1 + 0 + 2 + 1 + 1, 2 * (1 + 1)),
        # In the middle of a pipeline of single cards: four edges; its owners; below 32 ranks no tree.
        # Two owners reduce in one operation too.
        ((2, 4, 1), 5, "gloo", 1 + 4 + 1, 1 + 2),
    ],
)
def test_a_rank_is_in_few_groups(
    tmp_path: Path, shape: tuple[int, int, int], rank: int, library: str, num_groups: int, num_reductions: int
) -> None:
    row = measure(Shape(*shape, num_micro_batches=2), rank, tmp_path, library=library, steps=2)
    assert (row["groups"], row["operations"]) == (num_groups, num_reductions)
    assert row["rest ms"] > 0 and row["micro-batches ms"] > 0


def test_a_group_has_one_name_on_all_its_ranks() -> None:
    """Under its name, which is a number, its ranks find each other; each rank makes only its own groups."""
    grid = Grid(make_plan(Shape(3, 2, 2, num_micro_batches=2)))
    names: dict[tuple[object, tuple[int, ...]], list[str]] = {}
    for rank in range(12):
        with fake_ranks(12, rank):
            groups = make_groups(grid, device=CPU, timeout_seconds=1)
            found: dict[object, Any] = {**groups.edges, **groups.owners, "tensor": groups.replica}
            for key, transport in found.items():
                ranks = transport._ranks
                if rank in ranks:
                    names.setdefault((key, ranks), []).append(transport._group.group_name)
    # Two edges a pipeline, six replicas, and the owners of each stage's layers and of the tied embedding.
    assert len(names) == 6 + 6 + 3 * 2
    assert all(len(given) == len(ranks) for (_, ranks), given in names.items())
    assert all(len(set(given)) == 1 for given in names.values())
    assert len({given[0] for given in names.values()}) == len(names)


def test_an_index_is_measured(tmp_path: Path) -> None:
    write_index(tmp_path / "corpus", 100_000)
    for _ in range(2):
        row = measure_index(tmp_path / "corpus")
        assert row["first batch s"] > 0 and row["private MiB"] < 50
    assert {path.name.partition("-")[0] for path in (tmp_path / "corpus.cache").iterdir()} >= {
        "checked",
        "order",
    }
