"""A reference and a reward model on cards of their own: the run of one process, to the bit."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.support.project import parse_plan
from tests.support.ranks import Case, run_alone
from tests.support.rl import (
    RLCase,
    assert_close,
    assert_same_run,
    facts,
    read_lines,
    roles_of,
    run_cases_of_rank,
    run_rl,
    with_names,
    write_rl,
)
from tests.support.spawn import spawn
from tests.train.test_preference import REWARD, write_run
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.config.rl_plan import (
    GenerationPlan,
    ReferencePlan,
    RlPlan,
    RolePlan,
    RolePlans,
    check_rl_plan_of_run,
    validate_rl_plan,
)
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.transfer import Outlet
from yuan_train.rl.roles import prepare_scoring
from yuan_train.train.job import Position

KL = "algorithm.kl.coefficient=0.1"


@pytest.fixture(scope="module")
def scores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of a reward model."""
    folder = tmp_path_factory.mktemp("scores")
    saved = folder / "c"
    run_alone(Case(write_run(folder), folder / "log", None, (REWARD, f"checkpoint.directory={saved}")))
    return saved


def plan_of(path: Path, text: str, node: str, *, scores: Path | None = None) -> Plan:
    run = policy_run(load_rl(path))
    if scores is not None:
        run = replace(run, model=find_checkpoint(scores).model)
    plan = parse_plan(run, text)
    rows = sum(pipeline.num_sequences for pipeline in plan.pipelines)
    return with_names(replace(plan, global_batch_size=rows), node)


def shared_with(path: Path, scores: Path, *, reference: str, reward: str) -> RlPlan:
    """The policy's card draws and trains; the other two roles have plans of their own."""
    roles = RolePlans(
        policy=RolePlan(plan=plan_of(path, "2x4: 4@0", "p")),
        generation=GenerationPlan(with_="policy", slots=8),
        reference=ReferencePlan(plan=plan_of(path, reference, "f")),
        reward=RolePlan(plan=plan_of(path, reward, "r", scores=scores)),
    )
    return RlPlan(mode="sync", roles=roles)


def test_scores_of_other_cards_are_those_of_the_policys(tmp_path: Path, scores: Path) -> None:
    """fp32: metrics, samples and weights of one process, resumed; another reference's differ. In
    fp64, tensor-parallel and under unlike pipelines, beside engines: to rounding."""
    path = write_rl(tmp_path)
    model = f"reward.model={{checkpoint: '{scores}', weight: -2.0}}"
    fp32 = (KL, model, "train.precision=fp32", "train.steps=3", "algorithm.updates=2", "checkpoint.every=1")

    def case(name: str, plan: RlPlan | None, *more: str) -> RLCase:
        folder = tmp_path / name
        return RLCase(path, folder, plan, (*more, f"checkpoint.directory={folder / 'c'}"))

    same = shared_with(path, scores, reference="2x4: 1@0 | 3@1", reward="2x4: 3@0 | 1@1")
    beside = roles_of(path, staleness=0, policy="2x4: 4@0", engines="8x1: 4@0")
    beside = replace(
        beside,
        roles=replace(
            beside.roles,
            reference=ReferencePlan(plan=plan_of(path, "2x2: 4@0,1", "f")),
            reward=RolePlan(plan=plan_of(path, "1x3: 4@0 / 2x1: 4@1", "r", scores=scores)),
        ),
    )
    for roles in (same, beside):
        assert not list(validate_rl_plan(roles))
    cases = [
        case("same", same, *fp32, "train.steps=2"),
        case("same", same, *fp32),
        case("other", same, *fp32, "train.steps=1"),
        case("beside", beside, KL, model),
    ]
    spawn(run_with_other_weights, 6, cases)
    run_rl(case("alone", None, *fp32))
    assert_same_run(tmp_path / "same", tmp_path / "alone", "c/step-00000003")
    found, expected = (facts(tmp_path / name)[0] for name in ("other", "alone"))
    assert found["rewards"] == expected["rewards"] and found["kl"] != expected["kl"]
    run_rl(RLCase(path, tmp_path / "fp64", None, (KL, model)))
    assert read_lines(tmp_path / "beside", "samples.jsonl")[0]["rewards"] == pytest.approx(
        read_lines(tmp_path / "fp64", "samples.jsonl")[0]["rewards"], rel=1e-9
    )
    assert_close(tmp_path / "beside", tmp_path / "fp64", "loss", "grad_norm", "reward", "kl")
    assert facts(tmp_path / "fp64")[1]["kl"] > 0


def test_what_is_refused(tmp_path: Path, scores: Path) -> None:
    path = write_rl(tmp_path)
    roles = shared_with(path, scores, reference="2x4: 4@0", reward="2x4: 4@0")
    model = f"reward.model={{checkpoint: '{scores}', weight: -2.0}}"
    with pytest.raises(
        PlanError, match="roles.reward: the plan has one, and the run has neither reward.model nor"
    ):
        check_rl_plan_of_run(roles, load_rl(path, (KL,)))
    reward = roles.roles.reward
    assert reward is not None
    other = replace(reward.plan, model=replace(reward.plan.model, max_sequence_length=17))
    roles = replace(roles, roles=replace(roles.roles, reward=RolePlan(plan=other)))
    with pytest.raises(PlanError, match=r"roles.reward.plan.model: not that of .*scores"):
        prepare_scoring(load_rl(path, (KL, model)), roles, "reward", Position())
    stage = replace(reward.plan.pipelines[0].stages[0], recompute="full")
    costly = replace(reward.plan, pipelines=(replace(reward.plan.pipelines[0], stages=(stage,)),))
    roles = replace(roles, roles=replace(roles.roles, reward=RolePlan(plan=costly)))
    assert any("backwards, which this role does not do" in v.message for v in validate_rl_plan(roles))


def run_with_other_weights(rank: int, cases: list[RLCase]) -> None:
    """In the folder `other` the reference is not the policy."""
    post = Outlet.post

    def post_others(self: Outlet, tensors: Mapping[str, Tensor], shards: Mapping[str, Shard]) -> Any:
        return post(self, {name: 1.1 * weight for name, weight in tensors.items()}, shards)

    for case in cases:
        Outlet.post = post_others if case.folder.name == "other" else post
        run_cases_of_rank(rank, [case])
