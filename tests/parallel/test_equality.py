"""The loss curve of a whole run does not depend on the plan; what a plan may get wrong shows in `test_plans`
after a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project import difference, make_plan, make_project, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases

TOLERANCE = 1e-5
ALL = ("validation.every=5",)
STEPS = 5
FEW = (*ALL, f"train.steps={STEPS}", "optimizer.decay_steps=20")
"""The first steps of the run of 20."""


@pytest.fixture(scope="module")
def alone(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The curve of one process in fp32, over 20 steps."""
    return run_alone(Case(run_file, tmp_path_factory.mktemp("alone"), None, ALL))


def test_two_pipelines_give_the_curve_of_one_process(
    run_file: Path, tmp_path: Path, alone: list[dict]
) -> None:
    run_cases([Case(run_file, tmp_path, make_plan(run_config(run_file), [[2, 4], [2, 4]]), ALL)])
    curve = read_metrics(tmp_path)
    assert difference(curve, alone) < TOLERANCE
    assert difference(curve, alone, "grad_norm") < 10 * TOLERANCE
    assert curve[-1]["validation_loss"] == pytest.approx(alone[-1]["validation_loss"], rel=TOLERANCE)
    assert len(alone) == 20
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.5


def test_an_untied_head_with_plain_attention_and_all_resets(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    run_file = make_project(folder, model={"tie_embeddings": False, "attention": "plain"})
    overrides = (*FEW, "data.reset_attention=true", "data.reset_filter=true")
    run = run_config(run_file, *overrides)
    case = Case(run_file, tmp_path / "cut", make_plan(run, [[1, 5], [1, 5]]), overrides)
    reference = run_alone(Case(run_file, tmp_path / "alone", None, overrides))
    run_cases([case])
    assert difference(read_metrics(case.folder), reference) < TOLERANCE


def test_bf16_keeps_fp32_masters_under_any_partition(
    run_file: Path, tmp_path: Path, alone: list[dict]
) -> None:
    # The partition does not change bf16 rounding, because each micro-batch is computed the same way.
    overrides = ("train.precision=bf16", *FEW)
    run = run_config(run_file, *overrides)
    case = Case(run_file, tmp_path / "cut", make_plan(run, [[2, 3, 1]]), overrides)
    reference = run_alone(Case(run_file, tmp_path / "alone", None, overrides))
    run_cases([case])
    assert difference(read_metrics(case.folder), reference) < 2e-3
    assert 1e-6 < difference(reference, alone[:STEPS]) < 2e-2
