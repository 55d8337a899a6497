"""Every constraint on an RL plan, with its message; and the commands that know such a plan."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_express import run
from tests.support.commands import Ask
from tests.support.project import on_devices, parse_plan
from yuan_train.cli.launch_hosts import nodes_of, torchrun_lines
from yuan_train.cli.main import main
from yuan_train.config.errors import PlanError
from yuan_train.config.load import dump
from yuan_train.config.rl_plan import (
    GenerationPlan,
    ReferencePlan,
    RlPlan,
    RolePlan,
    RolePlans,
    load_rl_plan,
    save_rl_plan,
)

RUN = run(num_layers=4)
POLICY = on_devices(parse_plan(RUN, "2x4: 2@0 | 2@1"), "a/0", "a/1")
ENGINES = on_devices(parse_plan(RUN, "2x2: 4@0 / 2x2: 4@1"), "a/2", "b/0")
APART = RlPlan(
    mode="async",
    staleness=1,
    roles=RolePlans(
        policy=RolePlan(plan=POLICY),
        generation=GenerationPlan(shares=(0.25, 0.75), plan=ENGINES),
        reference=ReferencePlan(where="host"),
    ),
)
SHARED = RlPlan(
    mode="sync",
    roles=RolePlans(policy=RolePlan(plan=POLICY), generation=GenerationPlan(with_="policy", slots=8)),
)


def with_engines(**changes: Any) -> RlPlan:
    return with_generation(plan=replace(ENGINES, **changes))


def with_generation(**changes: Any) -> RlPlan:
    generation = replace(APART.roles.generation, **changes)
    return replace(APART, roles=replace(APART.roles, generation=generation))


def with_stage(**changes: Any) -> RlPlan:
    first, second = ENGINES.pipelines
    changed = replace(first, stages=(replace(first.stages[0], **changes),))
    return with_engines(pipelines=(changed, second))


def test_a_plan_is_read_back_as_it_was_written(tmp_path: Path) -> None:
    for plan in (APART, SHARED):
        save_rl_plan(tmp_path / "plan.yaml", plan)
        assert load_rl_plan(tmp_path / "plan.yaml") == plan
    assert "with: policy" in dump(SHARED)


def test_ranks_run_role_by_role() -> None:
    assert APART.role_ranks == {"policy": range(0, 2), "generation": range(2, 4)}
    wanted = [(0, "a/0"), (1, "a/1"), (2, "a/2"), (3, "b/0")]
    assert [(entry.rank, entry.device) for entry in APART.ranks] == wanted
    assert (APART.world_size, SHARED.world_size) == (4, 2)
    assert APART.engine_shares == (0.25, 0.75)
    assert with_generation(shares=None).engine_shares == (0.5, 0.5)


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (replace(APART, version=2), "version: wanted 1, got 2"),
        (replace(APART, mode="sync"), "staleness: 1, but mode sync has none"),
        (replace(SHARED, mode="async"), "mode: async, but generation shares the policy's cards"),
        (with_generation(shares=(0.5, 0.6)), r"roles.generation.shares: sum to 1.1"),
        (with_generation(shares=(1.0,)), "1 shares for 2 engines"),
        (with_generation(slots=4), "roles.generation.slots: the plan's micro-batches are the slots"),
        (with_generation(plan=None, shares=None), "roles.generation.plan: missing"),
        (with_generation(with_="policy"), "with: policy takes slots alone"),
        (with_generation(with_="servers"), "with: servers takes shares, and them alone"),
        (with_generation(with_="servers", plan=None, shares=None), "give a share of each server"),
        (with_generation(with_="servers", plan=None, shares=(0.5, 0.4)), "shares: sum to 0.9"),
        (with_engines(schedule="gpipe"), "roles.generation.plan.schedule: wanted 1f1b, got gpipe"),
        (with_engines(optimizer_sharding=True), "optimizer_sharding: true: optimizer steps"),
        (with_engines(sequence_length=32), "sequence_length: 32, but the policy has 24"),
        (with_engines(model=replace(RUN.model, rope_base=5.0)), "rope_base: not the policy's"),
        (with_stage(recompute="full"), r"pipelines\[0\].stages\[0\].recompute: full: backwards"),
        (with_stage(optimizer_offload=0.5), r"stages\[0\].optimizer_offload: 0.5"),
        (
            with_stage(parameter_offload=1, page_slots=1, recompute="full"),
            r"parameter_offload: 1: pages are written for pretraining alone",
        ),
        (with_engines(global_batch_size=9), "roles.generation.plan.global_batch_size: 9, but the pipelines"),
        (
            with_engines(ranks=(ENGINES.ranks[0], replace(ENGINES.ranks[1], device="a/0"))),
            r"roles.generation.plan.ranks\[1\].device: card 'a/0' works for policy already",
        ),
        (
            replace(APART, roles=replace(APART.roles, reference=ReferencePlan())),
            "roles.reference: neither of where and plan",
        ),
    ],
)
def test_violations(plan: RlPlan, message: str, tmp_path: Path) -> None:
    save_rl_plan(tmp_path / "plan.yaml", plan)
    with pytest.raises(PlanError, match=message):
        load_rl_plan(tmp_path / "plan.yaml")


def test_inspect_shows_roles(tmp_path: Path, ask: Ask) -> None:
    save_rl_plan(tmp_path / "plan.yaml", APART)
    facts = ask("inspect", tmp_path / "plan.yaml")
    keys = ("kind", "mode", "placement", "reference")
    assert [facts[key] for key in keys] == ["rl_plan", "async", "apart", "host"]
    stages = [(stage["role"], stage["ranks"]) for stage in facts["stages"]]
    assert stages == [("policy", "0-1")] * 2 + [("generation", "2-3")] * 2
    assert [engine["slots"] for engine in facts["engines"]] == [4, 4]
    (tmp_path / "plan.yaml").write_text("kind: rl\nmode: sync\n")
    assert main(["inspect", str(tmp_path / "plan.yaml")]) == 2


def test_launch_names_the_ranks_of_each_node() -> None:
    nodes = nodes_of(APART)
    assert [(node.name, node.ranks) for node in nodes] == [("a", (0, 1, 2)), ("b", (3,))]
    assert "--nproc-per-node=3" in torchrun_lines(nodes, ["rl"], rendezvous=None)[0]
    apart = with_engines(
        ranks=(replace(ENGINES.ranks[0], device="b/1"), replace(ENGINES.ranks[1], device="a/2"))
    )
    assert [node.ranks for node in nodes_of(apart)] == [(0, 1, 3), (2,)]
    with pytest.raises(PlanError, match=r"node a has \[0, 1, 3\]"):
        torchrun_lines(nodes_of(apart), ["rl"], rendezvous=None)
