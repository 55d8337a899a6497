"""tools/bench: rows, records, what is slower than before, and the tables of the docs."""

import json
from pathlib import Path
from typing import Any

import pytest

from tools.bench import harness
from tools.bench.harness import CASES, MISSED, Row, case, main
from tools.bench.scale import Shape, fake_ranks, make_plan, measure, measure_index, write_index
from yuan_train.parallel.device import CPU
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import make_groups


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of records in which cases are measured in this process; and one case."""
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(harness, "measure_apart", harness.measure_here)
    monkeypatch.setitem(CASES, "a/sum", CASES.get("a/sum"))

    @case("a/sum", formats={"s": ".1f"}, costs={"s": 0.1}, size=(1, 2), kind=("x",))
    def measured(size: int, kind: str) -> Row:
        """A sum."""
        return {"size": size, "kind": kind, "s": 2.0 * size, MISSED: "too large" if size > 9 else ""}

    return tmp_path


def test_a_case_is_measured_for_all_combinations(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["a/sum", "kind=[x, y]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2:] == [
        *("| size | kind | s |", "|--:|--:|--:|"),
        *("| 1 | x | 2.0 |", "| 1 | y | 2.0 |", "| 2 | x | 4.0 |", "| 2 | y | 4.0 |"),
    ]
    assert main(["a/sum", "size=10"]) == 1
    assert "missed: too large" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="a/sum has no 'length'; wanted size, kind"):
        main(["a/sum", "length=3"])


def test_what_is_slower_than_the_newest_record_of_the_machine_is_marked(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["a/sum", "--record"]) == 0
    path = here / "results/a-sum.jsonl"
    (line,) = map(json.loads, path.read_text().splitlines())
    assert line["rows"][1]["s"] == 4.0 and line["machine"] and line["date"]
    line["rows"][1]["s"] = 3.0
    other = {**line, "machine": "another", "rows": [{**row, "s": 0.1} for row in line["rows"]]}
    path.write_text(f"{json.dumps(line)}\n{json.dumps(other)}\n")
    capsys.readouterr()
    main(["a/sum"])
    shown = capsys.readouterr().out
    assert "| 1 | x | 2.0 |" in shown and "| 2 | x | **4.0, +33%** |" in shown


def test_the_tables_of_the_docs_have_the_newest_record(here: Path) -> None:
    page = here / "page.md"
    page.write_text("before\n<!-- bench: a/sum -->\nold\n<!-- end -->\nafter\n")
    with pytest.raises(SystemExit, match="a/sum has no record"):
        main(["--docs", str(page)])
    main(["a/sum", "size=1", "--record"])
    main(["a/sum", "size=2", "--record", "--docs", str(page)])
    text = page.read_text()
    assert text.startswith("before\n<!-- bench: a/sum -->\n| size |") and text.endswith(
        "<!-- end -->\nafter\n"
    )
    assert "| 2 | x | 4.0 |" in text and "| 1 | x" not in text and "commit" in text and "old" not in text


def test_a_process_of_its_own_measures_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    (row,) = harness.measure_apart("planner/choice", {"seed": 3, "chains": 1, "external": False})
    assert row["seed"] == 3 and row["slower by"] <= 1e-6 and row["CPU s"] > 0


# --- at scale --------------------------------------------------------------------------------------------


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
