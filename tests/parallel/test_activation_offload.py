"""Activations that leave the card: the same bits as if they had stayed, and no more than may be on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.parallel.test_plans import weights_in
from tests.support.project import make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_cases
from yuan_train.config.plan import Plan

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
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


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
        columns = dict(zip(STAYS, map(list, zip(*offloads, strict=True)), strict=True))
        plan = parse_plan(run_config(run_file, *overrides), **keys, **columns)
        for kind, own in (("away", plan), ("here", resident(plan))):
            folder = tmp_path / name / kind
            cases.append(Case(run_file, folder, own, (*overrides, f"checkpoint.directory={folder / 'ck'}")))
    control = replace(cases[0], folder=tmp_path / "control", without="activation_fetch")
    run_cases([*cases, control])
    for away, here in zip(cases[::2], cases[1::2], strict=True):
        ours, theirs = read_metrics(away.folder), read_metrics(here.folder)
        assert [(m["loss"], m["grad_norm"]) for m in ours] == [(m["loss"], m["grad_norm"]) for m in theirs]
        before, after = weights_in(here.folder / "ck"), weights_in(away.folder / "ck")
        assert before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before), away
    assert read_metrics(control.folder)[-1]["loss"] != read_metrics(cases[0].folder)[-1]["loss"]
