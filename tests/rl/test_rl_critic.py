"""PPO's critic: values, advantages and losses against their definitions, under plans, and resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_zero import runtimes_of
from tests.support.commands import Refuse
from tests.support.project import parse_plan
from tests.support.rl import (
    RLCase,
    assert_close,
    assert_same_run,
    read_lines,
    roles_of,
    run_rl,
    run_rl_cases,
    with_names,
    write_rl,
)
from yuan_train.checkpoint.load import find_checkpoint, load_tensors
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.errors import CheckpointError, PlanError
from yuan_train.config.plan import MemoryForecast, Plan
from yuan_train.config.rl import RLConfig, load_rl, policy_run
from yuan_train.config.rl_plan import CriticPlan, ReferencePlan, RlPlan, check_rl_plan_of_run, save_rl_plan
from yuan_train.models.transformer import Transformer
from yuan_train.objectives.losses import explained_variance, value_loss
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import CPU
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.rl import updates
from yuan_train.rl.job import check_supported, prepare_rl
from yuan_train.rl.passes import RowFeed
from yuan_train.rl.updates import Critic
from yuan_train.train.job import Position

PPO = ("algorithm.name=ppo", "critic={learning_rate: 0.01, gamma: 0.9, lam: 0.8, value_clip: 0.05}")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rl(tmp_path_factory.mktemp("critic"))


def saved_in(folder: Path) -> str:
    return f"checkpoint.directory={folder / 'c'}"


def tensors_of(folder: Path, prefix: str) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint by the rest of their names."""
    checkpoint = find_checkpoint(folder)
    with torch.device("meta"):
        reader = Transformer(checkpoint.model)
    shapes = {name: p.shape for name, p in reader.named_parameters()} | {
        "score.weight": torch.Size([checkpoint.model.hidden_size])
    }
    found = {
        name: torch.empty(shapes[name.removeprefix(prefix)], dtype=torch.float64)
        for name in checkpoint.entries
        if name.startswith(prefix)
    }
    load_tensors(checkpoint, found, no_dist=True)
    return {name.removeprefix(prefix): tensor for name, tensor in found.items()}


def test_definitions_and_resumption(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Step 2 from the weights that step 1 saved, answer by answer; and the same run, stopped between."""
    seen: list[tuple[Any, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    define = updates.critic_advantages

    def record(groups: Any, values_N: torch.Tensor, critic: Any, **more: Any) -> Any:
        found = define(groups, values_N, critic, **more)
        seen.append((groups, values_N, *found))
        return found

    monkeypatch.setattr(updates, "critic_advantages", record)
    whole = tmp_path / "whole"
    lines = run_rl(RLCase(project, whole, None, (*PPO, saved_in(whole), "checkpoint.every=1")))
    monkeypatch.undo()
    groups, values_N, advantages_N, returns_N = seen[1]

    policy = load_rl(project).model
    model = Transformer(type(policy)(**{**vars(policy), "output": "value"}), dtype=torch.float64).eval()
    model.load_state_dict(tensors_of(whole / "c" / "step-00000001", "critic.weights."))
    values: list[float] = []
    raw: list[float] = []
    for group in groups:
        for sample, reward in zip(group.samples, group.rewards, strict=True):
            ids = torch.tensor([[*group.prompt.ids, *sample.ids]])
            with torch.no_grad():
                own = model.scores(model(ids))[0, len(group.prompt.ids) - 1 : -1].tolist()
            deltas = [0.9 * after - now for now, after in zip(own, [*own[1:], 0.0], strict=True)]
            deltas[-1] += reward
            values += own
            raw += [
                sum((0.9 * 0.8) ** (k - t) * deltas[k] for k in range(t, len(own))) for t in range(len(own))
            ]
    expected, gains = (torch.tensor(x, dtype=torch.float64) for x in (values, raw))
    close: dict[str, Any] = {"rtol": 0, "atol": 1e-10}
    torch.testing.assert_close(values_N, expected, **close)
    torch.testing.assert_close(returns_N, gains + expected, **close)
    white = (gains - gains.mean()) / (gains.var(correction=0) + 1e-8).sqrt()
    torch.testing.assert_close(advantages_N, white, **close)
    # Values are those at the batch's start in its only update, so nothing is clipped.
    assert lines[1]["value_loss"] == pytest.approx(float(gains.square().mean() / 2), abs=1e-10)
    assert lines[1]["explained_variance"] == pytest.approx(
        1 - float(gains.var() / (gains + expected).var()), abs=1e-10
    )
    assert not torch.allclose(values_N, seen[0][1][: len(values_N)].mean(), atol=1e-3), "values differ"

    parts = tmp_path / "parts"
    run_rl(RLCase(project, parts, None, (*PPO, saved_in(parts), "train.steps=1")))
    run_rl(RLCase(project, parts, None, (*PPO, saved_in(parts))))
    assert_same_run(parts, whole, "c/step-00000002")

    # A critic that begins with another checkpoint's body; so small a rate leaves it as it was.
    begun, critic = tmp_path / "begun", f"critic={{checkpoint: '{whole / 'c'}', learning_rate: 1e-300}}"
    run_rl(RLCase(project, begun, None, (PPO[0], critic, saved_in(begun), "train.steps=1")))
    body, start = tensors_of(begun / "c", "critic.weights."), tensors_of(whole / "c", "weights.")
    assert body.keys() == {*start, "score.weight"}
    assert all(torch.equal(body[name], tensor) for name, tensor in start.items())


def test_the_loss_of_values() -> None:
    generator = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 200, dtype=torch.float64, generator=generator)
    for clip in (0.3, None):
        found = value_loss(values.requires_grad_(), old, returns, clip=clip)
        for v, o, r, loss in zip(*(x.tolist() for x in (values, old, returns, found)), strict=True):
            near = v if clip is None else min(max(v, o - clip), o + clip)
            assert loss == pytest.approx(0.5 * max((v - r) ** 2, (near - r) ** 2), abs=1e-12)
    assert explained_variance(returns, returns) == 1
    assert explained_variance(values.detach(), torch.ones(200)) is None


def roles_with_reference(path: Path) -> RlPlan:
    """A policy of two stages, and engines on other cards; the reference is on the policy's hosts."""
    roles = roles_of(path, staleness=0)
    return replace(roles, roles=replace(roles.roles, reference=ReferencePlan(where="host")))


def test_the_plan_changes_nothing(project: Path, tmp_path: Path) -> None:
    """Two stages, two pipelines that share optimizer states, and a policy beside engines on other cards;
    without the sum of gradients the critic is another."""
    kl = "algorithm.kl={coefficient: 0.1, where: reward}"
    overrides = (*PPO, "algorithm.updates=2", kl, "train.steps=1")
    run = policy_run(load_rl(project), sequence_length=16)
    stages = parse_plan(run, "2x4: 1@0 | 3@1", schedule="1f1b")
    pipelines = parse_plan(run, "2x3: 4@0 / 2x1: 4@1", schedule="1f1b", optimizer_sharding=True)
    run_rl_cases(
        [
            RLCase(project, tmp_path / "stages", stages, overrides),
            RLCase(project, tmp_path / "pipelines", pipelines, overrides),
            RLCase(project, tmp_path / "broken", pipelines, overrides, without="sharded_grad_reduce"),
            RLCase(project, tmp_path / "apart", roles_with_reference(project), overrides),
        ]
    )
    alone = run_rl(RLCase(project, tmp_path / "alone", None, overrides))
    keys = ("loss", "grad_norm", "reward", "value_loss", "explained_variance")
    for name in ("stages", "pipelines", "apart"):
        assert_close(tmp_path / name, alone, *keys)
    broken = read_lines(tmp_path / "broken")[0]
    assert broken["reward"] == alone[0]["reward"]
    assert broken["value_loss"] != pytest.approx(alone[0]["value_loss"], rel=1e-6)


def state_bytes(runtime: RankRuntime) -> int:
    """Bytes of weights, gradients and optimizer state that a rank holds, each memory once."""
    buffers = [buffer for bucket in runtime.buckets for buffer in (bucket.weights, bucket.gradient)]
    for shard in (shard for state in runtime.states for shard in state.shards):
        buffers += [shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq]
    storages = (buffer.untyped_storage() for buffer in buffers)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def forecast_of(run: RLConfig, plan: Plan) -> list[MemoryForecast]:
    """The planner's, of each stage of a plan on A10."""
    link = Link(bandwidth=1e9)
    node = NodeGroup(name="a", device="A10", devices=8, link=link, network=link)
    cards = tuple(replace(entry, device=f"a/{entry.rank}", type="A10") for entry in plan.ranks)
    problem = PlanProblem(
        cluster=Cluster(name=plan.cluster, nodes=(node,)),
        model=run.model,
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        precision=run.train.precision,
        critic=True,
    )
    return [stage.memory for stage in cost_plan(make_costs(problem), replace(plan, ranks=cards)).stages]


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
def test_the_planner_counts_what_the_critic_holds(project: Path, precision: str) -> None:
    job = prepare_rl(load_rl(project, (*PPO, f"train.precision={precision}")), None, Position())
    critic = Critic(job, RowFeed(micro_batch_size=2, device=CPU))
    (stage,) = forecast_of(job.run, job.policy.plan)
    held = state_bytes(critic._lanes.trainer.runtime)
    assert held == stage.critic
    # The policy's embedding is its head as well, a critic's is not.
    assert job.run.model.tie_embeddings and held > stage.parameters + stage.gradients + stage.optimizer


def test_the_planner_counts_what_a_stage_of_the_critic_holds(project: Path) -> None:
    run = load_rl(project, PPO)
    model = replace(run.model, output="value")
    own = policy_run(run, sequence_length=16)
    for text, sharding in (("2x4: 1@0 | 3@1", False), ("2x3: 4@0 / 2x1: 4@1", True)):
        plan = parse_plan(own, text, schedule="1f1b", optimizer_sharding=sharding)
        wanted = [stage.critic for stage in forecast_of(run, plan)]
        held = [state_bytes(runtime) for runtime in runtimes_of(replace(plan, model=model))]
        assert held == pytest.approx(wanted, rel=1e-3 if sharding else 0, abs=0)
        if not sharding:
            # The last stage's head has one number, the policy's the matrix of the embedding.
            assert held[-1] < 0.99 * state_bytes(runtimes_of(plan)[-1])


def test_what_is_refused(project: Path, tmp_path: Path, refuse: Refuse) -> None:
    run = load_rl(project, PPO)
    roles = roles_of(project, staleness=0)
    value = replace(roles.roles.policy.plan, model=replace(run.model, output="value"))
    critic = with_names(value, "c")
    own = replace(roles, roles=replace(roles.roles, critic=CriticPlan(plan=critic)))
    with pytest.raises(PlanError, match="the plan has one, and algorithm.name is grpo"):
        check_rl_plan_of_run(own, load_rl(project))
    save_rl_plan(tmp_path / "plan.yaml", own)
    said = refuse("rl", "--config", project, "--plan", tmp_path / "plan.yaml", *PPO)
    assert "roles.critic: cards of its own do not run yet; leave it out" in said
    offload = parse_plan(
        policy_run(run, sequence_length=16), "2x4: 4@0", schedule="1f1b", optimizer_offload=(0.5,)
    )
    with pytest.raises(PlanError, match=r"stages\[0\]: what a critic's stage keeps on the host"):
        check_supported(run, offload)
    run_rl(RLCase(project, tmp_path, None, ("train.steps=1", saved_in(tmp_path))))
    with pytest.raises(CheckpointError, match="holds no critic, so the run before was not of name: ppo"):
        run_rl(RLCase(project, tmp_path, None, (*PPO, saved_in(tmp_path))))
    other = load_rl(project, (PPO[0], f"critic={{checkpoint: '{tmp_path / 'c'}'}}", "model.num_layers=2"))
    with pytest.raises(CheckpointError, match="num_layers 4 there, 2 here"):
        prepare_rl(other, None, Position())
