"""A run that is stopped and resumed, under the same plan or another, gives the same losses."""

from dataclasses import replace
from pathlib import Path

from tests.support.project import difference, make_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases, same_saved
from yuan_train.checkpoint.load import step_name
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan, plans_in, save_plan


def case(run_file: Path, folder: Path, plan: Plan | None, *, steps: int, checkpoints: Path) -> Case:
    """A run of `steps` steps, with the learning-rate schedule of 20 steps."""
    overrides = (
        f"train.steps={steps}",
        "optimizer.decay_steps=20",
        f"checkpoint.directory={checkpoints}",
        "validation.every=0",
    )
    return Case(run_file, folder, plan, overrides)


def test_a_resumed_run_matches_an_uninterrupted_one(run_file: Path, tmp_path: Path) -> None:
    """Bitwise under the same plan, up to rounding under another."""
    run = run_config(run_file)
    plan = make_plan(run, [[1, 3, 2]])
    full = case(run_file, tmp_path / "full", plan, steps=4, checkpoints=tmp_path / "full-ck")
    first = case(run_file, tmp_path / "halves", plan, steps=2, checkpoints=tmp_path / "halves-ck")
    rest = case(run_file, tmp_path / "halves", plan, steps=4, checkpoints=tmp_path / "halves-ck")
    # The same first half, continued by two pipelines.
    two_pipelines = case(
        run_file, tmp_path / "two", make_plan(run, [[4, 2], [4, 2]]), steps=4, checkpoints=tmp_path / "two-ck"
    )
    resume = f"checkpoint.resume={tmp_path / 'halves-ck' / step_name(2)}"
    two_pipelines = replace(two_pipelines, overrides=(*two_pipelines.overrides, resume))
    save_plan(two_pipelines.folder / "plan.yaml", plan)
    run_cases([full, first, rest, two_pipelines])
    expected = read_metrics(full.folder)
    resumed = read_metrics(rest.folder)
    assert [line["step"] for line in resumed] == list(range(1, 5))
    assert [line["loss"] for line in resumed] == [line["loss"] for line in expected]
    assert same_saved(tmp_path / "halves-ck" / step_name(4), tmp_path / "full-ck" / step_name(4))

    # Of each plan that a run has had there is one file; another one that was there stays.
    assert [path.name for path in plans_in(rest.folder)] == ["plan.yaml"]
    assert {path.name: load_plan(path) for path in plans_in(two_pipelines.folder)} == {
        "plan.yaml": plan,
        "plan.step-2.yaml": two_pipelines.plan,
    }

    two = read_metrics(two_pipelines.folder)
    assert [line["step"] for line in two] == list(range(3, 5))
    assert difference(two, expected[2:]) < 1e-5


def test_metrics_of_repeated_steps_are_replaced(run_file: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "ck"
    run_alone(case(run_file, tmp_path / "log", None, steps=4, checkpoints=checkpoints))
    # As if the run had died after step 6, two steps past its last checkpoint.
    log = tmp_path / "log" / "metrics.jsonl"
    log.write_text(log.read_text() + '{"step": 5, "loss": 1.0}\n{"step": 6, "loss": 1.0}\n{"step": 7, "lo')
    lines = run_alone(case(run_file, tmp_path / "log", None, steps=6, checkpoints=checkpoints))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert all(line["loss"] > 2 for line in lines)
