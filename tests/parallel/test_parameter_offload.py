"""Parameters in pages of the host: the same bits as if they stayed, and no more on the card than may be."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import parse_plan, read_metrics, run_config, with_stages
from tests.support.ranks import Case, run_alone, run_cases, same_saved
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import check_compile, validate_plan
from yuan_train.parallel import copies, zero
from yuan_train.parallel.copies import ParameterPages
from yuan_train.parallel.device import HostSlab
from yuan_train.train import build

OVERRIDES = (
    *("train.steps=2", "data.sequence_length=32", "validation.every=2", "optimizer.schedule=constant"),
    *("optimizer.warmup_steps=1", "optimizer.bucket_size=1"),
)
STAYS = {"parameter_offload": 0, "page_slots": None}

PLANS = {
    # The last of three groups is smaller. The rest of the stage is a layer and the head.
    "one card": ({"text": "1x8: 6@0", "schedule": "gpipe"}, 3, [(5, 2)], ()),
    "two stages": (
        {"text": "1x8: 3@0 | 3@1"},
        2,
        [(3, 3), (2, 1)],
        ("train.precision=bf16", "model.hidden_dropout=0.1", "data.reset_attention=true"),
    ),
}


def paged(run_file: Path, keys: dict[str, Any], group: int, pages: Any, *more: str) -> Plan:
    columns: dict[str, Any] = dict(zip(STAYS, map(list, zip(*pages, strict=True)), strict=True))
    run = run_config(run_file, *OVERRIDES, *more)
    return parse_plan(run, recompute="full", page_group=group, **keys, **columns)


def resident(plan: Plan) -> Plan:
    """The plan without pages."""
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, **STAYS) for stage in pipeline.stages)
    return replace(plan, pipelines=(replace(pipeline, stages=stages, page_group=1),))


def numbers(folder: Path) -> list[tuple[float, float]]:
    return [(m["loss"], m["grad_norm"]) for m in read_metrics(folder)]


def test_parameters_in_pages_change_no_bit(run_file: Path, tmp_path: Path) -> None:
    cases: list[Case] = []
    for name, (keys, group, pages, more) in PLANS.items():
        plan = paged(run_file, keys, group, pages, *more)
        for kind, own in (("away", plan), ("here", resident(plan))):
            folder = tmp_path / name / kind
            overrides = (*OVERRIDES, *more, f"checkpoint.directory={folder / 'ck'}")
            cases.append(Case(run_file, folder, own, overrides))
    # Each goes on from the checkpoint of the other.
    further = [
        replace(case, plan=other.plan, overrides=(*case.overrides, "train.steps=3"))
        for case, other in ((cases[0], cases[1]), (cases[1], cases[0]))
    ]
    control = replace(
        cases[0],
        folder=tmp_path / "control",
        overrides=(*OVERRIDES, f"checkpoint.directory={tmp_path / 'control' / 'ck'}"),
        without="page_gradient_up",
    )
    run_cases([*cases, control, *further])
    for away, here in zip(cases[::2], cases[1::2], strict=True):
        ours, theirs = numbers(away.folder), numbers(here.folder)
        assert ours == theirs and same_saved(away.folder / "ck", here.folder / "ck")
    assert len(numbers(cases[0].folder)) == 3 and len(numbers(cases[2].folder)) == 2
    assert numbers(control.folder)[0] != numbers(cases[0].folder)[0]


def test_no_more_pages_are_on_the_card_than_may_be(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[ParameterPages] = []
    slabs: list[int] = []

    def recorded(*arguments: Any, **keys: Any) -> ParameterPages:
        made.append(ParameterPages(*arguments, **keys))
        return made[-1]

    def slab(num_bytes: int, **keys: Any) -> HostSlab:
        slabs.append(num_bytes)
        return HostSlab(num_bytes, **keys)

    monkeypatch.setattr(build, "ParameterPages", recorded)
    for module in (copies, zero):
        monkeypatch.setattr(module, "HostSlab", slab)
    more = ("train.steps=1", "validation.every=0", "optimizer.bucket_size=1000000")
    keys = {"text": "1x8: 6@0"}
    run_alone(Case(run_file, tmp_path, paged(run_file, keys, 4, [(6, 3)]), (*OVERRIDES, *more)))
    assert made[0].most_pages_here == 3
    # All of their state is in slabs: 18 bytes a parameter, or in fp32 16, as the forecast has it.
    run = run_config(run_file, *OVERRIDES, *more)
    each = {"bf16": 18, "fp32": 16}[run.train.precision]
    assert sum(slabs) == pytest.approx(each * sum(run.model.unit_parameters[1:-1]), rel=0.01)


FAULTS = {
    "missing: how many of these layers": {"page_slots": None},
    "4 layers, but the stage holds 3": {"parameter_offload": 4, "recompute_layers": None},
    "set recompute: full for these layers": {"recompute": "selective"},
    "given, but no parameters leave": {"parameter_offload": 0},
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_stage_that_cannot_have_pages_is_refused(run_file: Path, fault: str) -> None:
    plan = paged(run_file, {"text": "1x8: 3@0 | 3@1"}, 1, [(2, 3), (2, 3)])
    first, last = plan.pipelines[0].stages
    faulty = with_stages(plan, replace(first, **FAULTS[fault]), last)
    assert list(validate_plan(plan)) == []
    assert [v.path[:4] for v in validate_plan(faulty) if fault in v.message] == [
        ("pipelines", 0, "stages", 0)
    ]


REFUSED = {
    "not under schedule zero_bubble": {"text": "1x8: 3@0 | 3@1", "schedule": "zero_bubble"},
    "not in a pipeline with tensor parallelism": {"text": "1x8: 3@0 | 3@1,2"},
    "not with data parallelism": {"text": "1x8: 3@0 | 3@1;2"},
    "not with optimizer_sharding": {"text": "1x8: 3@0 | 3@1", "optimizer_sharding": True},
    "not with half a layer": {"text": "1x8: 2.5@0 | 3.5@1"},
}


@pytest.mark.parametrize("fault", REFUSED)
def test_what_does_not_go_with_pages_is_refused_by_name(run_file: Path, fault: str) -> None:
    plan = paged(run_file, REFUSED[fault], 1, [(2, 3), (0, None)])
    (violation,) = validate_plan(plan)
    assert violation.message.startswith(fault)
    assert violation.path == ("pipelines", 0, "stages", 0, "parameter_offload")


def test_a_group_without_pages_and_compiled_layers_are_refused(run_file: Path) -> None:
    plan = paged(run_file, {"text": "1x8: 6@0"}, 9, [(6, 3)])
    assert "the pipeline has 8 micro-batches" in [v.message for v in validate_plan(plan)][0]
    (pipeline,) = resident(plan).pipelines
    idle = replace(plan, pipelines=(replace(pipeline, page_group=2),))
    assert [v.message for v in validate_plan(idle)] == [
        "2, but no stage has pages; set parameter_offload, or leave this out"
    ]
    with pytest.raises(PlanError, match="parameter_offload moves weights"):
        check_compile(plan, run_config(run_file, "train.compile=true"))
