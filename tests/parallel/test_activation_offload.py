"""Activations that leave the card: the same bits as if they had stayed, and no more than may be on it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.planner.search.test_search import card, cluster, problem
from tests.support.project import parse_plan, read_metrics, run_config, with_stages
from tests.support.ranks import Case, run_alone, run_cases, same_saved
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import check_compile, validate_plan
from yuan_train.parallel.copies import ActivationTiers
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.simulator import program_shape
from yuan_train.planner.evaluate.stage_cost import leaving_activations
from yuan_train.train import build
from yuan_train.train.job import Position, prepare

OVERRIDES = ("train.steps=2", "data.sequence_length=48", "validation.every=2", "optimizer.bucket_size=1")
STAYS = {"activation_offload": 0, "resident_parts": None, "fetch_ahead": None}

PLANS = {
    "one card": ({"text": "1x8: 6@0", "in_flight": [4]}, [(3, 4, None)], ("train.precision=bf16",)),
    "wide, with selective recompute": (
        {"text": "1x8: 2.5@0,1 selective | 3.5@2", "schedule": "gpipe"},
        [(2, 5, 3), (4, 4, 1)],
        ("model.hidden_dropout=0.1",),
    ),
    "interleaved": (
        {"text": "1x8: 1@0 | 1@1 | 2@0 | 2@1", "schedule": "interleaved_1f1b"},
        [(1, 2, 1), (0, None, None), (2, 3, None), (1, 2, 1)],
        ("data.reset_attention=true", "data.reset_filter=true"),
    ),
    "zero bubble, sharded": (
        {"text": "1x4: 2@0 | 4@1 / 1x4: 3@2 | 3@3", "schedule": "zero_bubble", "optimizer_sharding": True},
        [(1, 3, 1), (0, None, None), (2, 6, 1), (0, None, None)],
        (),
    ),
    # All that some parts keep is below the smallest that is copied.
    "too small to leave": (
        {"text": "1x8: 6@0", "in_flight": [2]},
        [(3, 3, None)],
        ("train.precision=bf16", "data.sequence_length=24"),
    ),
}


def resident(plan: Plan) -> Plan:
    """The plan without activation offload."""
    pipelines = tuple(
        replace(pipeline, stages=tuple(replace(stage, **STAYS) for stage in pipeline.stages))
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines)


def test_activations_that_leave_change_no_bit(run_file: Path, tmp_path: Path) -> None:
    cases: list[Case] = []
    for name, (keys, offloads, more) in PLANS.items():
        overrides = (*OVERRIDES, *more)
        columns: dict[str, Any] = dict(zip(STAYS, map(list, zip(*offloads, strict=True)), strict=True))
        plan = parse_plan(run_config(run_file, *overrides), **keys, **columns)
        for kind, own in (("away", plan), ("here", resident(plan))):
            folder = tmp_path / name / kind
            cases.append(Case(run_file, folder, own, (*overrides, f"checkpoint.directory={folder / 'ck'}")))
    control = replace(
        cases[0], folder=tmp_path / "control", overrides=cases[0].overrides[:-1], without="activation_fetch"
    )
    run_cases([*cases, control])
    for away, here in zip(cases[::2], cases[1::2], strict=True):
        ours, theirs = read_metrics(away.folder), read_metrics(here.folder)
        assert [(m["loss"], m["grad_norm"]) for m in ours] == [(m["loss"], m["grad_norm"]) for m in theirs]
        assert same_saved(away.folder / "ck", here.folder / "ck"), away
    assert read_metrics(control.folder)[-1]["loss"] != read_metrics(cases[0].folder)[-1]["loss"]


@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_card_keeps_what_was_forecast(
    run_file: Path, tmp_path: Path, recompute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ActivationTiers] = []

    def recorded(*arguments: Any, **keys: Any) -> ActivationTiers:
        made.append(ActivationTiers(*arguments, **keys))
        return made[-1]

    monkeypatch.setattr(build, "ActivationTiers", recorded)
    sizes = {"hidden_size": 64, "ffn_hidden_size": 128}
    overrides = ("train.steps=1", "validation.every=0", "data.sequence_length=64")
    overrides += tuple(f"model.{key}={size}" for key, size in sizes.items())
    run = run_config(run_file, *overrides)
    keys: dict[str, Any] = {"activation_offload": [3], "resident_parts": [4], "fetch_ahead": [1]}
    plan = parse_plan(run, "1x8: 6@0", schedule="gpipe", recompute=recompute, **keys)
    cards = cluster(Card=(1, card()))
    given = problem(cards, model=run.model, sequence_length=64, global_batch_size=8, precision="fp32")
    costs, (one,) = make_costs(given), cards.cards
    units = costs.of_stage(plan, (one,), 1, plan.stages[0])
    shape = program_shape(plan, 0)
    forecast = leaving_activations(plan, 0, 0, shape, units, [costs.host_of(one)])
    assert forecast is not None
    run_alone(Case(run_file, tmp_path, plan, overrides))
    # What is too small to leave is forecast too.
    assert 0.98 * forecast.card_bytes < made[0].most_bytes_here <= forecast.card_bytes


FAULTS = {
    "missing: how many halves": {"activation_offload": 1},
    "no activations leave": {"resident_parts": 3},
    "4 layers, but the stage holds 3": {"activation_offload": 4, "resident_parts": 3},
    "with recompute: full nothing is kept": {
        "activation_offload": 1,
        "resident_parts": 3,
        "recompute": "full",
    },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_plan_that_cannot_offload_is_refused(run_file: Path, fault: str) -> None:
    plan = parse_plan(run_config(run_file), "1x8: 3@0 | 3@1")
    first, last = plan.pipelines[0].stages
    faulty = with_stages(plan, replace(first, **FAULTS[fault]), last)
    (violation,) = validate_plan(faulty)
    assert fault in violation.message and violation.path[:4] == ("pipelines", 0, "stages", 0)


def test_too_few_resident_parts_are_found_by_every_rank(run_file: Path) -> None:
    """Before they meet: also by the ranks of other stages."""
    run = run_config(run_file)
    plan = parse_plan(run, "1x8: 3@0 | 3@1", activation_offload=[2, 0], resident_parts=[1, None])
    with pytest.raises(PlanError, match=r"pipelines\[0\]: stage 0: resident_parts: 1 .*: 3 or more"):
        prepare(run, plan, Position(1, 2, 1, 2))


def test_compiled_layers_have_no_halves(run_file: Path) -> None:
    run = run_config(run_file, "train.compile=true")
    plan = parse_plan(run, "1x8: 6@0", activation_offload=[1], resident_parts=[3])
    with pytest.raises(PlanError, match="activation_offload works on halves of layers"):
        check_compile(plan, run)
