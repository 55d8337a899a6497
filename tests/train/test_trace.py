"""A traced run of three processes, its merged file, and what cannot be merged."""

import json
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import Refuse
from tests.support.fake_card import FakeCard
from tests.support.project import make_project, parse_plan, run_config, with_forecast
from tests.support.ranks import Case, run_cases
from yuan_train.cli.main import main
from yuan_train.cli.trace import draw_step, read_traces
from yuan_train.config.errors import ConfigError
from yuan_train.config.plan_constraints import keep_plan, load_plan, save_plan
from yuan_train.parallel.activity import Activity, during, observed_by
from yuan_train.parallel.apply import pipeline_schedule
from yuan_train.parallel.grid import Grid
from yuan_train.schedule.step import Step
from yuan_train.train.trace import Recorder, bound_offset

TRACED = (3, 4)
TRACE = "train.trace={first_step: 3, steps: 2, kernels: true}"


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log directory of a run of two pipelines, the first of two stages, that share gradients."""
    folder = tmp_path_factory.mktemp("traced")
    run_file = make_project(folder, model={"num_layers": 3})
    plan = parse_plan(run_config(run_file), "1x4: 1@0 | 2@1 / 1x4: 3@2", optimizer_sharding=True)
    changes = ("train.steps=5", "validation.every=3", TRACE)
    plan = with_forecast(plan, seconds=[(2e-3, 3e-3)], step_seconds=1000.0)
    run_cases([Case(run_file, folder / "log", plan, changes)])
    return folder / "log"


@pytest.fixture(scope="module")
def merged(traced: Path) -> list[dict[str, Any]]:
    """The events of the merged file."""
    out = traced.parent / "merged.json"
    assert main(["trace", str(traced), "--out", str(out)]) == 0
    return json.loads(out.read_text())["traceEvents"]


def spans(events: list[dict[str, Any]], **wanted: object) -> list[dict[str, Any]]:
    return [e for e in events if e["ph"] == "X" and all(e[key] == value for key, value in wanted.items())]


def threads(events: list[dict[str, Any]]) -> dict[tuple[int, str], int]:
    """The tid of each thread, by pid and name."""
    return {(e["pid"], e["args"]["name"]): e["tid"] for e in events if e["name"] == "thread_name"}


def test_each_rank_is_a_process_with_its_threads(merged: list[dict[str, Any]]) -> None:
    names = {e["pid"]: e["args"]["name"] for e in merged if e["name"] == "process_name"}
    assert names == {
        0: "rank 0 (pipeline 0, stage 0) on card/0",
        1: "rank 1 (pipeline 0, stage 1) on card/1",
        2: "rank 2 (pipeline 1, stage 0) on card/2",
    }
    for rank in names:
        own = {name for pid, name in threads(merged) if pid == rank}
        assert own >= {"measured", "messages", "reductions", "forecast"}
        assert any(name.startswith("operators") for name in own), "torch.profiler's (kernels: true)"
    tids = list(threads(merged).values())
    assert len(set(tids)) == len(tids)


def test_spans_have_times_and_nest(merged: list[dict[str, Any]]) -> None:
    rows: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for span in spans(merged):
        assert span["ts"] >= 0 and span["dur"] >= 0
        if span["tid"] % 1000 < 500:
            rows[span["pid"], span["tid"]].append((span["ts"], round(span["ts"] + span["dur"], 3)))
    for row in rows.values():
        open_until: list[float] = []
        for start, end in sorted(row, key=lambda times: (times[0], -times[1])):
            while open_until and open_until[-1] <= start:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "spans of a thread overlap and do not nest"
            open_until.append(end)


def test_the_measured_steps_are_those_of_the_schedule_and_of_the_forecast(
    traced: Path, merged: list[dict[str, Any]]
) -> None:
    plan = load_plan(traced / "plan.yaml")
    for coord in Grid(plan).coords:
        program = pipeline_schedule(plan, coord.pipeline)[coord.worker]
        compute = [(s.kind, s.stage, s.micro_batch) for s in program if s.is_compute]
        for name in ("measured", "forecast"):
            # A forecast of 1000 s overlaps the one of the next step, and so has two rows.
            rows = [tid for (pid, text), tid in threads(merged).items() if pid == coord.rank and name in text]
            own = [span for tid in rows for span in spans(merged, tid=tid)]
            assert len(rows) == (2 if name == "forecast" else 1)
            outer = sorted((e for e in own if e["name"].startswith("step ")), key=lambda e: e["ts"])
            assert [e["args"]["step"] for e in outer] == list(TRACED)
            for step in outer:
                end = step["ts"] + step["dur"]
                found = [
                    (e["cat"], e["args"]["stage"], e["args"]["micro_batch"])
                    for e in sorted(spans(own, tid=step["tid"]), key=lambda e: e["ts"])
                    if "micro_batch" in e["args"] and e["cat"] != "load" and step["ts"] <= e["ts"] < end
                ]
                assert found == compute
    starts = {e["args"]["step"]: e["ts"] for e in spans(merged, cat="forecast", pid=0)}
    measured = {e["args"]["step"]: e["ts"] for e in spans(merged, cat="training_step", pid=0)}
    assert all(starts[step] <= measured[step] for step in TRACED)
    assert {e["dur"] for e in spans(merged, cat="forecast")} == {1e9}


def test_messages_reductions_and_the_optimizer_are_there(merged: list[dict[str, Any]]) -> None:
    def count(rank: int, category: str) -> int:
        return len(spans(merged, pid=rank, cat=category))

    # 4 micro-batches in each of 2 steps; rank 2 has no neighbour.
    assert [count(rank, "wait") for rank in range(3)] == [8, 8, 0]
    assert [count(rank, "send_activation") for rank in range(3)] == [8, 0, 0]
    assert [count(rank, "send_gradient") for rank in range(3)] == [0, 8, 0]
    assert sum(e["ph"] == "i" and e["cat"] == "post" for e in merged) == 16
    for rank in range(3):
        assert count(rank, "optimizer") == count(rank, "weight_sync") == 2
        assert count(rank, "grad_reduce") == count(rank, "finish_grad_reduce") >= 2
        assert [s["args"]["sender"] for s in spans(merged, pid=rank, cat="wait")] == [1 - rank] * count(
            rank, "wait"
        )


def test_every_message_has_both_ends_of_its_arrow(merged: list[dict[str, Any]]) -> None:
    begins = {e["id"]: e for e in merged if e["ph"] == "s"}
    ends = {e["id"]: e for e in merged if e["ph"] == "f"}
    assert len(begins) == 16 and begins.keys() == ends.keys()
    for key, begin in begins.items():
        assert {begin["pid"], ends[key]["pid"]} == {0, 1}
        # A microsecond for rounding; the ranks' clocks are one, so their error is not needed.
        assert ends[key]["ts"] > begin["ts"] - 100_000


def test_clocks_of_one_machine_agree_within_their_bounds(traced: Path) -> None:
    """All processes of a machine read one clock, so the true offset is 0."""
    about = [json.loads((traced / "trace" / f"rank-{r}.json").read_text())["otherData"] for r in range(3)]
    assert about[0]["clock_error_seconds"] == 0 < about[1]["clock_error_seconds"] < 1
    assert len({one["token"] for one in about}) == 1


def test_the_bounds_of_a_clock_hold_the_offset() -> None:
    # The own clock is 5 s ahead; messages take 1 s there and 3 s back, in the second round 0.5 s each.
    reference = torch.tensor([[0.0, 4.0], [10.0, 11.0]], dtype=torch.float64)
    own = torch.tensor([[6.0, 8.0], [15.25, 15.75]], dtype=torch.float64)
    offset, error = bound_offset(own, reference)
    assert abs(offset - 5) <= error == 0.75


def copied(traced: Path, folder: Path) -> Path:
    target = folder / "log"
    (target / "trace").mkdir(parents=True)
    (target / "plan.yaml").write_text((traced / "plan.yaml").read_text())
    for path in (traced / "trace").glob("*.json"):
        (target / "trace" / path.name).write_text(path.read_text())
    return target


def edit(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def apply(log: Path) -> None:
        path = log / "trace" / name
        document = json.loads(path.read_text())
        change(document)
        path.write_text(json.dumps(document))

    return apply


def test_the_forecast_is_that_of_the_plan_that_ran(traced: Path, tmp_path: Path) -> None:
    """Also where plan.yaml is another one, which the run has left alone."""
    log = copied(traced, tmp_path)
    plan = load_plan(log / "plan.yaml")
    assert read_traces(log)[0] == plan
    assert plan.forecast is not None
    other = replace(plan, forecast=replace(plan.forecast, step_seconds=7.0))
    save_plan(log / "plan.yaml", other)
    assert keep_plan(log, plan, step=2).name == "plan.step-2.yaml"
    assert read_traces(log)[0] == plan
    assert load_plan(log / "plan.yaml") == other


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "another directory": (lambda log: (log / "plan.yaml").unlink(), "wanted the log directory of a run"),
    "another plan": (
        lambda log: save_plan(log / "plan.yaml", replace(load_plan(log / "plan.yaml"), forecast=None)),
        r"rank-0.json: written under a plan that is not here \(here: plan.yaml\); copy the plan of that run",
    ),
    "no traces": (lambda log: [p.unlink() for p in (log / "trace").iterdir()], "has written no trace files"),
    "a rank is missing": (
        lambda log: (log / "trace" / "rank-1.json").unlink(),
        "no trace file of ranks 1 \\(of 3\\).*copy rank-N.json",
    ),
    "half a file": (
        lambda log: (log / "trace" / "rank-2.json").write_text('{"traceEvents": ['),
        "rank-2.json: wanted a trace file",
    ),
    "another file": (edit("rank-2.json", lambda d: d.pop("otherData")), "rank-2.json: wanted a trace file"),
    "no steps": (edit("rank-0.json", lambda d: d["traceEvents"].clear()), "it has no training step"),
    "another run": (
        edit("rank-1.json", lambda d: d["otherData"].update(token=1)),
        "rank-1.json: written by another run than rank-0.json",
    ),
    "another size": (
        edit("rank-0.json", lambda d: d["otherData"].update(world_size=4)),
        "of a run of 4 ranks, but plan.yaml has 3",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_cannot_be_merged_is_refused(fault: str, traced: Path, tmp_path: Path, refuse: Refuse) -> None:
    log = copied(traced, tmp_path)
    change, message = FAULTS[fault]
    change(log)
    error = refuse("trace", log, "--out", tmp_path / "out.json")
    assert re.search(message, error.replace("\n", " ")), error


def test_a_directory_that_does_not_exist(tmp_path: Path, refuse: Refuse) -> None:
    said = refuse("trace", tmp_path / "nothing", "--out", tmp_path / "out.json")
    assert "there is no such directory" in said


@pytest.mark.parametrize(
    ("trace", "log", "message"),
    [
        ("{first_step: 20, steps: 2}", "runs/x", "20 to 21 are to be traced, but the run ends at step 20"),
        ("{first_step: 0}", "runs/x", "greater than 0"),
        ("{first_step: 3}", "null", "written to log.directory"),
    ],
)
def test_what_to_trace_is_checked(run_file: Path, trace: str, log: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(run_file, f"train.trace={trace}", f"log.directory={log}")


def test_on_a_card_spans_are_on_the_streams_time() -> None:
    card = FakeCard(tick=0.0)
    card.host_seconds = 50.0
    recorder = Recorder(card)
    wait = Activity("wait", Step("receive_activation", 1, 0))
    compute = Activity("compute", Step("forward", 1, 0))
    with observed_by(recorder), during(Activity("training_step", number=7)):
        for activity, seconds in ((wait, 0.03), (compute, 0.02)):
            with during(activity):
                card.compute(seconds)
    found = {one.activity.kind: (one.start_seconds, one.end_seconds) for one in recorder.recorded()}
    assert found["wait"] == pytest.approx((50.0, 50.03)) and found["compute"] == pytest.approx((50.03, 50.05))
    assert found["training_step"] == pytest.approx((50.0, 50.05))


def test_the_picture_of_a_step(merged: list[dict[str, Any]]) -> None:
    svg = draw_step(merged, step=TRACED[0])
    for row in ("rank 2 (pipeline 1, stage 0) on card/2", "measured", "messages", "reductions", "forecast"):
        assert row in svg
    # Forwards and backwards of 4 micro-batches of 3 ranks, measured and forecast.
    assert svg.count("<title>forward ") == svg.count("<title>backward ") == 24
