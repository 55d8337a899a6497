"""tools/bench: rows, records, what is slower than before, and the tables of the docs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tools.bench import harness
from tools.bench.harness import CASES, MISSED, Row, case, main


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
    (row,) = harness.measure_apart("planner/choice", {"seed": 3, "chains": 1})
    assert row["seed"] == 3 and row["slower by"] <= 1e-6 and row["CPU s"] > 0
