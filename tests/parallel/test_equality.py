"""The loss curve does not depend on the plan: partitions of the model against one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.project import difference, make_plan, make_project, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases

CUTS = {
    "1-4-1": [[1, 4, 1]],
    "embedding alone": [[0, 3, 3]],
    "head alone": [[3, 3, 0]],
    "an empty stage": [[3, 0, 3]],
    "two pipelines": [[2, 4], [2, 4]],
    "four pipelines": [[6], [6], [6], [6]],
}
TOLERANCE = {"fp32": 1e-5, "fp64": 1e-12}


ALL = ("validation.every=5",)
STEPS = 5
FEW = (*ALL, f"train.steps={STEPS}", "optimizer.decay_steps=20")
"""The first steps of the run of 20."""
LONG = ("two pipelines",)
"""The partitions that take all 20 steps in fp32."""


@pytest.fixture(scope="module")
def alone(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict]:
    """The curve of one process in fp32, over 20 steps."""
    return run_alone(Case(run_file, tmp_path_factory.mktemp("alone"), None, ALL))


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
def test_every_partition_gives_the_curve_of_one_process(
    run_file: Path, tmp_path: Path, alone: list[dict], precision: str
) -> None:
    kind = (f"train.precision={precision}",)
    run = run_config(run_file, *kind)
    # fp32 for a whole run; what a cut may get wrong shows in fp64.
    long = LONG if precision == "fp32" else ()
    cases = [
        Case(run_file, tmp_path / name, make_plan(run, CUTS[name]), (*kind, *(ALL if long else FEW)))
        for name in long or CUTS
    ]
    if precision == "fp64":
        alone = run_alone(Case(run_file, tmp_path / "alone", None, (*kind, *FEW)))
    run_cases(cases)
    for case in cases:
        curve = read_metrics(case.folder)
        reference = alone[: len(curve)]
        assert difference(curve, reference) < TOLERANCE[precision], case.folder.name
        assert difference(curve, reference, "grad_norm") < 10 * TOLERANCE[precision], case.folder.name
        assert curve[-1]["validation_loss"] == pytest.approx(
            reference[-1]["validation_loss"], rel=TOLERANCE[precision]
        )
    if precision == "fp32":
        assert len(alone) == 20
        assert alone[-1]["loss"] < alone[0]["loss"] - 0.5


def test_schedule_recompute_and_micro_batch_size_do_not_change_the_curve(
    run_file: Path, tmp_path: Path, alone: list[dict]
) -> None:
    run = run_config(run_file)
    plans = {
        "gpipe": make_plan(run, [[1, 2, 3]], schedule="gpipe"),
        "recompute": make_plan(run, [[1, 2, 3]], recompute="full"),
        "micro-batches of two": make_plan(run, [[1, 2, 3]], micro_batch_size=2),
        "fewer micro-batches than stages": make_plan(run, [[1, 2, 2, 1]], micro_batch_size=4),
    }
    cases = [Case(run_file, tmp_path / name, plan, FEW) for name, plan in plans.items()]
    run_cases(cases)
    for case in cases:
        curve = read_metrics(case.folder)
        assert difference(curve, alone[:STEPS]) < TOLERANCE["fp32"], case.folder.name


def test_an_untied_head_with_plain_attention_and_all_resets(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    folder.mkdir()
    run_file = make_project(folder, model={"tie_embeddings": False, "attention": "plain"})
    overrides = (*FEW, "data.reset_attention=true", "data.reset_filter=true")
    run = run_config(run_file, *overrides)
    case = Case(run_file, tmp_path / "cut", make_plan(run, [[1, 5], [1, 5]]), overrides)
    reference = run_alone(Case(run_file, tmp_path / "alone", None, overrides))
    run_cases([case])
    assert difference(read_metrics(case.folder), reference) < TOLERANCE["fp32"]


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


def test_without_the_gradient_all_reduce_the_curve_differs(
    run_file: Path, tmp_path: Path, alone: list[dict]
) -> None:
    # The negative control of the tests above: a tied embedding, or two pipelines, need the all-reduce.
    run = run_config(run_file)
    cases = [
        Case(run_file, tmp_path / cut, make_plan(run, CUTS[cut]), FEW, without="grad_all_reduce")
        for cut in ("1-4-1", "two pipelines")
    ]
    run_cases(cases)
    for case in cases:
        assert difference(read_metrics(case.folder), alone[:STEPS]) > 1e-4, case.folder.name
