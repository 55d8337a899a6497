"""Of a run that has lost a node: each card with its state, who waits, the rent, plans and their reasons."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.logs import BEGAN, LAST, write_run
from yuan_train.cli.main import main
from yuan_train.config.plan_constraints import load_plan, save_plan
from yuan_train.report.run_log import RunLog, card_rows, read_run, rent, waits_for
from yuan_train.report.run_page import plan_marks, run_lines, timeline


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("run"))


@pytest.fixture
def run(log: Path, monkeypatch: pytest.MonkeyPatch) -> RunLog:
    """While it goes on: ten seconds after its last step."""
    monkeypatch.setattr("yuan_train.report.run_log.time.time", lambda: LAST + 10)
    return read_run(log)


def changed(log: Path, folder: Path, **lines: list[str]) -> Path:
    """A copy of a log directory in which some files have other lines."""
    (folder / "plans").mkdir(parents=True)
    for path in (*log.glob("*.*"), *log.glob("plans/*")):
        (folder / path.relative_to(log)).write_bytes(path.read_bytes())
    for name, own in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(line + "\n" for line in own))
    os.utime(folder / "metrics.jsonl", (LAST, LAST))
    return folder


def test_each_card_has_a_state(run: RunLog) -> None:
    assert [(row.name, row.node, row.type, row.state) for row in card_rows(run)] == [
        ("card/0", "card", "card", "computes"),
        ("card/1", "card", "card", "computes"),
        ("card/2", "card", "card", "not used"),
        ("gone/0", "gone", "card", "lost"),
        ("more/0", "more", "card", "waits to be let in"),
    ]
    assert {row.limit_bytes for row in card_rows(run)} == {8 * 2**30}


def test_states_follow_the_log(log: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A card that slows, a run that is silent, that lies between two starts, and that has ended."""
    monkeypatch.setattr("yuan_train.report.run_log.time.time", lambda: LAST + 10)
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    slow = [json.dumps(line | {"stage_seconds": [0.4, 0.48]}) for line in lines[:40]]
    states = [row.state for row in card_rows(read_run(changed(log, tmp_path / "a", metrics=slow)))]
    assert states[:3] == ["computes", "slow, 2.0 times", "not used"]
    journal = (log / "supervise.jsonl").read_text().splitlines()
    for event, state in (
        *(("finished", "finished"), ("gave_up", "gave up"), ("stopped", "stopped")),
        *(("fault", "between two starts"), ("waits", "between two starts")),
    ):
        last = json.dumps({"time": LAST, "event": event, "reason": "so", "nodes": ["card"], "step": 60})
        other = read_run(changed(log, tmp_path / event, supervise=[*journal, last]))
        assert [row.state for row in card_rows(other)][:2] == [state] * 2
    monkeypatch.setattr("yuan_train.report.run_log.time.time", lambda: LAST + 200)
    assert card_rows(read_run(log))[0].state == "no step for 3.3 minutes"


def test_who_waits_for_whom(run: RunLog) -> None:
    """The first computes 0.4 of 0.5 s, as forecast; the second 0.3, of 0.24 that were forecast."""
    first, second = run.ranks
    assert (first.forecast_waits, second.forecast_waits) == pytest.approx((0.2, 0.52))
    assert (first.waits, second.waits) == pytest.approx((0.2, 0.4))
    assert waits_for(run) == {1: 0}
    assert (
        "waits        30% of the cards' time (36% by the forecast); rank 0 (card/0) computes longest, 80% of"
        in ("\n".join(run_lines(run)))
    )
    assert run.use_of_cards is not None and run.forecast_use_of_cards is not None
    # A card's rate is its work over its time, so the second one's is higher by the forecast.
    assert run.forecast_use_of_cards < run.use_of_cards < 0.8


def test_the_rent(run: RunLog, log: Path, tmp_path: Path) -> None:
    """Three cards at 0.5 an hour, for an hour and a half; and for half an hour one at 0.4."""
    paid = rent(run, 100.0)
    assert paid is not None and paid.per_hour == 1.5
    assert paid.so_far == pytest.approx(1.5 * 1.5 + 0.5 * 0.4)
    assert paid.per_million == pytest.approx(1.5 / 3600 * 1e4)
    assert paid.forecast_per_million == pytest.approx(1.5 / 3600 * 1e6 / 125)
    said = "rent         1.5 an hour; 4.17 for a million tokens (3.33 by the forecast); 2.45 so far"
    assert said in run_lines(run)
    alone = changed(log, tmp_path / "alone")
    (alone / "supervise.jsonl").unlink()
    paid = rent(read_run(alone), 100.0)
    assert paid is not None and paid.so_far == pytest.approx(60 * 0.5 * 1.5 / 3600)
    (alone / "cluster.yaml").write_text((log / "cluster.yaml").read_text().replace("price: 0.5", ""))
    assert rent(read_run(alone), 100.0) is None
    (alone / "cluster.yaml").unlink()
    assert rent(read_run(alone), 100.0) is None
    assert [row.name for row in card_rows(read_run(alone))] == ["card/0", "card/1"]


def test_plans_over_time(run: RunLog) -> None:
    """`card` has both plans, `gone` the first alone, `more` is here at the end; each entry has a mark."""
    picture = timeline(run)
    titles = re.findall(r"<title>(.*?)</title>", picture)
    assert titles == [
        *("card: plan-1, 30 minutes", "gone: plan-1, 30 minutes", "card: plan-2, 60 minutes"),
        "more: waits, 30 minutes",
    ]
    assert len(set(re.findall(r'fill="(var\(--c\d\))"><title>', picture))) == 2
    assert picture.count('fill="url(#hatch)"><title>') == 1
    assert [int(i) for i in re.findall(r'text-anchor="middle">(\d+)<', picture)] == [1, 2, 3]
    assert plan_marks(run) == {20: "plan-2"}
    *_, first, second, third = run_lines(run)
    assert re.search(r"\+0 s +step 0 +started +plan-1 +all are here +500 ms a step$", first)
    assert re.search(r"\+30 minutes +step 20 +moved +plan-2 +gone went +500 ms a step$", second)
    assert re.search(r"\+60 minutes +step 40 +stays +more waits: no gain", third)


def test_a_long_journal_is_cut_and_says_so(log: Path, tmp_path: Path) -> None:
    own = (log / "supervise.jsonl").read_text().splitlines()
    entry = json.loads(own[2])
    many = [json.dumps(entry | {"time": BEGAN + 10 * i}) for i in range(5000)]
    other = read_run(changed(log, tmp_path / "many", supervise=[own[0], *many]))
    assert "... and 4989 before" in run_lines(other)
    assert len(timeline(other)) < 5_000


def test_what_was_measured_is_that_of_the_newest_plan(log: Path, tmp_path: Path) -> None:
    """Steps of a plan before it are in the curves, and in no median."""
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    before = {"forecast_step_seconds": 2.0, "step_seconds": 3.0, "stage_seconds": [2.0, 1.0, 1.0]}
    before |= {"peak_memory_bytes": [2**33] * 3}
    both = [json.dumps(line | before if line["step"] <= 40 else line) for line in lines]
    found = read_run(changed(log, tmp_path / "both", metrics=both))
    assert found.step_seconds == 0.5 and [share.seconds for share in found.ranks] == [0.4, 0.3]
    assert [share.peak_bytes for share in found.ranks] == [2**30, 2**29]
    assert max(y for _, y in found.curve("step_seconds").points) == 3.0
    # Just after a move nothing is measured yet.
    moved = read_run(changed(log, tmp_path / "moved", metrics=both[:40]))
    assert [(share.seconds, share.forecast_seconds) for share in moved.ranks] == [
        (None, pytest.approx(0.4)),
        (None, pytest.approx(0.24)),
    ]


def test_the_view_of_a_terminal_is_drawn_until_it_is_ended(
    log: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waits: list[float] = []

    def wait(self: object, seconds: float) -> bool:
        waits.append(seconds)
        return len(waits) == 2

    monkeypatch.setattr("threading.Event.wait", wait)
    assert main(["watch", str(log), "--terminal"]) == 0
    assert capsys.readouterr().out.count("60 of 120") == 2 and waits == [10, 10]


def test_half_a_layer_is_as_much_work_as_that_half(log: Path, tmp_path: Path) -> None:
    """Both ranks are as busy as before, in whose time they do unlike halves of the fifth layer."""
    copy = changed(log, tmp_path)
    plan = load_plan(copy / "plan.yaml")
    (own,) = plan.pipelines
    first, second = own.stages
    stages = (replace(first, layers=(0, 4.5)), replace(second, layers=(4.5, 6)))
    for name in ("plan.yaml", "plans/plan-1.yaml", "plans/plan-2.yaml"):
        save_plan(copy / name, replace(plan, pipelines=(replace(own, stages=stages),)))
    run = read_run(copy)
    assert [share.layers for share in run.ranks] == ["0 to 4.5 +emb", "4.5 to 6 +head"]
    attention, rest = (
        half.forward_flops(plan.sequence_length) for half in plan.model.spec.sublayers(plan.model)
    )
    assert attention != rest
    work = (5 * attention + 4 * rest, attention + 2 * rest + plan.model.head_forward_flops)
    (one, two), step = [share.seconds for share in run.ranks], run.step_seconds
    assert one and two
    wanted = sum(work) / step / (work[0] / one + work[1] / two)
    assert run.use_of_cards == pytest.approx(wanted)
