"""A teacher: what it adds to advantages, under plans and on cards of its own, and that it teaches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.rl.test_rl_scoring import plan_of
from tests.support.project import parse_plan
from tests.support.rl import RLCase, assert_close, facts, roles_of, run_rl, run_rl_cases, write_rl
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.config.errors import CheckpointError, ConfigError, PlanError
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.config.rl_plan import RolePlan, check_rl_plan_of_run
from yuan_train.models.transformer import Transformer
from yuan_train.rl.experience import Group
from yuan_train.rl.job import prepare_rl
from yuan_train.rl.updates import Updater
from yuan_train.train.evaluate import load_trained
from yuan_train.train.job import Position

LARGER = ("model.num_layers=5", "model.hidden_size=48", "model.ffn_hidden_size=80")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """A run file, and checkpoints of a larger teacher and of the policy: each likes other tokens."""
    folder = tmp_path_factory.mktemp("teacher")
    path = write_rl(folder)
    teacher, policy = folder / "teacher", folder / "policy"
    fast = ("train.steps=6", "optimizer.learning_rate=3e-2")
    run_rl(RLCase(path, folder / "t", None, (*LARGER, *fast, f"checkpoint.directory={teacher}")))
    run_rl(RLCase(path, folder / "p", None, ("train.steps=1", f"checkpoint.directory={policy}")))
    return path, teacher, policy


def taught_by(teacher: Path, *, weight: float = 1.0) -> str:
    return f"reward={{teacher: {{checkpoint: '{teacher}', weight: {weight}}}}}"


def test_a_token_gains_what_the_teacher_gives_it_above_the_policy(
    project: tuple[Path, Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The gradient is that of the mean over answers of the mean over tokens of -(log teacher - log policy)
    log policy, each answer read by itself."""
    path, teacher, policy = project
    seen: list[Group] = []
    make_parts = Updater._parts

    def note(self: Updater, groups: list[Group], **more: int) -> object:
        seen.extend(groups)
        return make_parts(self, groups, **more)

    monkeypatch.setattr(Updater, "_parts", note)
    overrides = (taught_by(teacher, weight=2.0), "train.steps=1", f"start.checkpoint={policy}")
    line = run_rl(RLCase(path, tmp_path, None, overrides))[0]
    own, other = (load_trained(find_checkpoint(p), dtype=torch.float64).model for p in (policy, teacher))
    answers = [(group.prompt.ids, sample.ids) for group in seen for sample in group.samples]
    assert len({len(ids) for _, ids in answers}) > 1
    losses, gaps = [], list[Tensor]()
    for prompt, ids in answers:
        mine = log_probs(own, prompt, ids)
        with torch.no_grad():
            gaps.append(log_probs(other, prompt, ids) - mine)
        losses.append(-(2.0 * gaps[-1] * mine).mean())
    loss = torch.stack(losses).mean()
    loss.backward()
    norm = torch.stack([p.grad.norm() for p in own.parameters() if p.grad is not None]).norm()
    assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-9)
    assert line["teacher_kl"] == pytest.approx(-float(torch.cat(gaps).mean()), rel=1e-9)
    assert line["reward"] == 0 and line["rewards"] == {}


def log_probs(model: Transformer, prompt: tuple[int, ...], ids: tuple[int, ...]) -> Tensor:
    """Of each token of an answer: [T]."""
    read = torch.tensor([[*prompt, *ids[:-1]]])
    targets = torch.tensor([[-100] * (len(prompt) - 1) + list(ids)])
    return -model.loss(model(read), targets, reduction="none")[0, len(prompt) - 1 :]


def test_a_teacher_teaches_the_same_wherever_it_is(project: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """Beside a function, with several passes: one process, resumed, an uneven plan, cards of its own."""
    path, teacher, _ = project
    functions = f"reward.functions=[{{python: '{path.parent / 'rewards.py'}:evenness'}}]"
    overrides = (functions, f"reward.teacher={{checkpoint: '{teacher}'}}", "algorithm.epochs=2")
    alone = run_rl(RLCase(path, tmp_path / "alone", None, overrides))
    saved = (*overrides, f"checkpoint.directory={tmp_path / 'c'}")
    run_rl(RLCase(path, tmp_path / "parts", None, (*saved, "train.steps=1")))
    run_rl(RLCase(path, tmp_path / "parts", None, saved))
    assert facts(tmp_path / "parts") == facts(tmp_path / "alone")
    run = policy_run(load_rl(path))
    plan = parse_plan(run, "2x3: 1@0 | 3@1,2 / 2x1: 4@3", schedule="1f1b", optimizer_sharding=True)
    roles = roles_of(path, staleness=0, policy="2x4: 4@0", engines="8x1: 4@0")
    own = RolePlan(plan=plan_of(path, "1x3: 5@0 / 2x1: 5@1", "r", scores=teacher))
    roles = replace(roles, roles=replace(roles.roles, reward=own))
    plans = {"plan": plan, "apart": roles}
    run_rl_cases([RLCase(path, tmp_path / name, own, overrides) for name, own in plans.items()])
    for name in plans:
        assert_close(tmp_path / name, alone, "loss", "grad_norm", "reward", "teacher_kl")
    without = run_rl(RLCase(path, tmp_path / "without", None, (functions, "algorithm.epochs=2")))
    assert without[0]["reward"] == alone[0]["reward"] and without[0]["teacher_kl"] is None
    assert without[0]["grad_norm"] != pytest.approx(alone[0]["grad_norm"], rel=1e-3)


def test_the_policy_comes_to_write_like_its_teacher(project: tuple[Path, Path, Path], tmp_path: Path) -> None:
    path, teacher, _ = project
    more = ("train.steps=30", "train.prompts_per_step=4", "optimizer.learning_rate=1e-2")
    lines = run_rl(RLCase(path, tmp_path, None, (taught_by(teacher), *more)))
    first, last = (sum(line["teacher_kl"] for line in part) / 5 for part in (lines[:5], lines[-5:]))
    assert last < first / 3, (first, last)


def test_what_cannot_teach(project: tuple[Path, Path, Path]) -> None:
    path, teacher, _ = project

    def refused(kind: type[Exception], message: str, *overrides: str) -> None:
        with pytest.raises(kind, match=message):
            prepare_rl(load_rl(path, overrides), None, Position())

    own = taught_by(teacher)
    refused(CheckpointError, "vocabulary of 64, the policy one of 128", own, "model.vocab_size=128")
    refused(ConfigError, "drops groups of equal rewards", own, "algorithm.filter=zero_variance")
    both = f"reward={{teacher: {{checkpoint: '{teacher}'}}, model: {{checkpoint: '{teacher}'}}}}"
    refused(ConfigError, "one model that reads the policy's answers", both)
    refused(ConfigError, "pass@1 counts", own, f"data.evaluation={path.parent / 'prompts.jsonl'}")
    assert not load_rl(path, (own,)).reward.functions
    roles = roles_of(path, staleness=0, policy="2x4: 4@0", engines="8x1: 4@0")
    reader = RolePlan(plan=plan_of(path, "2x4: 5@0", "r", scores=teacher))
    roles = replace(roles, roles=replace(roles.roles, reward=reader))
    check_rl_plan_of_run(roles, load_rl(path, (own,)))
    scores = load_rl(path, (f"reward.model={{checkpoint: '{teacher}'}}",))
    with pytest.raises(PlanError, match="model.output: vocabulary, and the run's .* has value"):
        check_rl_plan_of_run(roles, scores)
    with pytest.raises(CheckpointError, match="a language model, which has no score"):
        prepare_rl(scores, None, Position())
