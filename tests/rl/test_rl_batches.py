"""Rows of answers, advantages, and the gradient of a whole batch against autograd on single answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.rl import RLCase, run_rl, write_rl
from yuan_train.config.rl import AlgorithmConfig, load_rl
from yuan_train.data.prompts import Prompt, Prompts
from yuan_train.models.transformer import IGNORE_INDEX, Transformer, init_weights
from yuan_train.parallel.device import CPU
from yuan_train.rl import updates
from yuan_train.rl.collect import Collector
from yuan_train.rl.experience import Group, Sample, make_rows
from yuan_train.rl.passes import RowFeed
from yuan_train.rl.updates import token_advantages


def group(ticket: int, prompt: int, *answers: int, rewards: tuple[float, ...] = ()) -> Group:
    """A group with a prompt and answers of so many tokens."""
    samples = tuple(
        Sample(ticket, n, tuple(range(10 * n + 1, 10 * n + 1 + length)), (-1.0,) * length, "stop")
        for n, length in enumerate(answers)
    )
    found = rewards or tuple(map(float, range(len(answers))))
    return Group(ticket, Prompt((9,) * prompt, "", None), samples, tuple((r,) for r in found), found)


def test_rows() -> None:
    groups = [group(0, 2, 3, 1), group(1, 1, 2, 5)]
    rows = make_rows(groups, length=8, packed=True)
    # Inputs of 4, 2, 2 and 5 tokens: first-fit decreasing puts 5 + 2 and 4 + 2 together.
    assert rows.count == 2 and rows.used == 13 and rows.shared
    assert rows.tokens[0].tolist() == [9, 11, 12, 13, 14, 9, 9, 0]
    assert rows.targets[0].tolist() == [11, 12, 13, 14, 15, IGNORE_INDEX, 11, IGNORE_INDEX]
    assert rows.place[0].tolist() == [6, 7, 8, 9, 10, -1, 3, -1]
    assert rows.starts[0].nonzero().flatten().tolist() == [0, 5, 7]
    assert sorted(rows.place[rows.place >= 0].tolist()) == list(range(11))
    apart = make_rows(groups, length=8, packed=False)
    assert apart.count == 4 and not apart.shared
    feed = RowFeed(micro_batch_size=2, device=CPU)
    feed.use(apart, first=2)
    taken = feed.take(1)
    assert taken.places_B is not None and taken.places_B.tolist() == [-1, -1]
    assert taken.targets_BS is not None and (taken.targets_BS == IGNORE_INDEX).all()


def test_advantages_of_tokens() -> None:
    groups = [group(0, 1, 2, 3, rewards=(1.0, 0.0)), group(1, 1, 1, 2, rewards=(0.5, 0.5))]
    rewards_QG = torch.tensor([[1.0, 0.0], [0.5, 0.5]], dtype=torch.float64)
    lengths = torch.tensor([2, 3, 1, 2])
    grpo = token_advantages(groups, AlgorithmConfig())
    assert torch.equal(grpo, updates.grpo(rewards_QG).flatten().repeat_interleave(lengths))
    assert not grpo[5:].any(), "exactly 0 where all rewards are equal"
    rloo = token_advantages(groups, AlgorithmConfig(name="rloo"))
    assert rloo.tolist() == [1, 1, -1, -1, -1, 0, 0, 0]
    mask_BT = torch.arange(3) < lengths.unsqueeze(1)
    penalty_N = torch.arange(8, dtype=torch.float64)
    penalty_BT = torch.zeros(4, 3, dtype=torch.float64)
    penalty_BT[mask_BT] = penalty_N
    found = token_advantages(groups, AlgorithmConfig(name="reinforce_plus_plus"), penalty_N=penalty_N)
    expected_BT = updates.reinforce_plus_plus(rewards_QG.flatten(), penalty_BT, mask_BT)
    assert torch.equal(found, expected_BT[mask_BT])
    whitened = token_advantages(groups, AlgorithmConfig(name="reinforce_baseline"))
    assert torch.equal(whitened, updates.reinforce_baseline(rewards_QG, mask_BT)[mask_BT])
    lost = token_advantages(groups, AlgorithmConfig(name="dr_grpo"), penalty_N=penalty_N)
    assert lost[0] == pytest.approx((1 - 1) - ((1 - 1) + (0 - 9)) / 2)


def test_the_gradient_is_that_of_single_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rl(tmp_path)
    seen: list[Group] = []
    collect = Collector.collect

    def record(self: Collector, ticket: int) -> Any:
        found = collect(self, ticket)
        seen.extend(found.groups)
        return found

    monkeypatch.setattr(Collector, "collect", record)
    line = run_rl(RLCase(path, tmp_path / "log", None, ("train.steps=1", "generation.temperature=0.8")))[0]
    run = load_rl(path)
    model = Transformer(run.model, dtype=torch.float64)
    init_weights(model, seed=run.train.seed)
    total = torch.zeros((), dtype=torch.float64)
    for members in seen:
        found_G = updates.grpo(torch.tensor([members.rewards], dtype=torch.float64))[0]
        for sample, advantage in zip(members.samples, found_G, strict=True):
            ids = torch.tensor([[*members.prompt.ids, *sample.ids]])
            logits_SV = model.logits(model(ids[:, :-1]))[0, len(members.prompt.ids) - 1 :] / 0.8
            log_probs = logits_SV.log_softmax(-1).gather(1, torch.tensor(sample.ids).unsqueeze(1)).squeeze(1)
            assert log_probs.tolist() == pytest.approx(sample.log_probs, abs=1e-12)
            total = total - ((log_probs - log_probs.detach()).exp() * advantage).mean() / 8
    total.backward()
    total = total.detach()
    norm = torch.stack([p.grad.square().sum() for p in model.parameters() if p.grad is not None]).sum().sqrt()
    assert line["loss"] == pytest.approx(float(total), abs=1e-12)
    assert line["grad_norm"] == pytest.approx(float(norm), rel=1e-10)


def test_the_order_of_prompts() -> None:
    files = [[Prompt((i,), "", None) for i in range(4)], [Prompt((10,), "", None)]]
    prompts = Prompts(files, [3.0, 1.0], seed=1)
    order = [prompts[ticket].ids[0] for ticket in range(32)]
    assert order.count(10) == 8
    first = [number for number in order if number < 10]
    assert sorted(first[:4]) == [0, 1, 2, 3] == sorted(first[4:8])
    again = Prompts(files, [3.0, 1.0], seed=1)
    assert again[31].ids[0] == order[31]
    assert [Prompts(files, [3.0, 1.0], seed=2)[t].ids[0] for t in range(32)] != order


def test_prompts_as_a_file_has_them_and_prompts_that_rest() -> None:
    """A solved prompt is left out of two epochs; a state is all that tickets behind it depend on."""
    files = [[Prompt((i,), "", None) for i in range(4)], [Prompt((10,), "", None)]]

    def make() -> Prompts:
        return Prompts(files, [4.0, 1.0], seed=1, order="file")

    prompts = make()
    first = [prompts[ticket].ids[0] for ticket in range(10)]
    assert [number for number in first if number < 10] == [0, 1, 2, 3] * 2
    for ticket in range(5, 10):
        if first[ticket] in (1, 2, 10):
            prompts.rest(ticket, 2)
    state = json.loads(json.dumps(prompts.state(10)))
    later = [prompts[ticket].ids[0] for ticket in range(10, 30)]
    assert [number for number in later if number < 10][:8] == [0, 3, 0, 3, 0, 1, 2, 3]
    assert later.count(10) == 4, "a file whose prompts all rest begins again"
    again = make()
    again.restore(state)
    assert [again[ticket].ids[0] for ticket in range(10, 30)] == later
    other = Prompts(files[:1], [1.0], seed=1, order="file")
    other.restore(state)
    assert [other[ticket].ids[0] for ticket in range(4)] == [0, 1, 2, 3]
