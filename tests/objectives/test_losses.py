"""Losses against TRL's own numbers (`tools/check_trl.sh` makes them), closed forms and gradients."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from yuan_train.objectives.losses import (
    BatchTotals,
    aggregate,
    aipo_loss,
    clipped_loss,
    decoupled_loss,
    divergence,
    log_ratio_margin,
    loss_penalty,
    preference_loss,
    reward_loss,
    reward_penalty,
    sample_lengths,
)
from yuan_train.rl.updates import dr_grpo, grpo

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/trl_losses.json").read_text())


def given(name: str) -> torch.Tensor:
    return torch.tensor(GOLDEN[name], dtype=torch.float64)


def policy_loss(case: dict[str, Any], log_probs: torch.Tensor) -> torch.Tensor:
    advantage = grpo if case["trl"] in ("grpo", "dapo") else dr_grpo
    advantages = advantage(given("rewards")).reshape(-1, 1)
    mask, clip = given("mask").bool(), tuple(case["clip"])
    if case["trl"] == "cispo":
        losses = aipo_loss(log_probs, given("old"), advantages, rho=clip[1])
    else:
        losses = clipped_loss(log_probs, given("old"), advantages, clip=clip, dual_clip=case["dual_clip"])
    if case["beta"]:
        losses = losses + loss_penalty(log_probs, given("reference"), "k3", coefficient=case["beta"])
    totals = BatchTotals(len(mask), int(mask.sum()), GOLDEN["max_new_tokens"])
    return aggregate(losses, mask, sample_lengths(mask), case["normalise"], totals)


@pytest.mark.parametrize("case", GOLDEN["policy"], ids=lambda case: f"{case['trl']}-{case['beta']}")
def test_policy_losses_are_trls(case: dict[str, Any]) -> None:
    log_probs = given("log_probs").requires_grad_()
    loss = policy_loss(case, log_probs)
    loss.backward()
    assert loss.item() == pytest.approx(case["loss"], abs=1e-9)
    torch.testing.assert_close(
        log_probs.grad, torch.tensor(case["gradient"], dtype=torch.float64), rtol=0, atol=1e-9
    )


@pytest.mark.parametrize("case", GOLDEN["preference"], ids=lambda case: f"{case['loss']}-{case['smoothing']}")
def test_preference_losses_are_trls(case: dict[str, Any]) -> None:
    # TRL's ipo was made of answers of one length.
    mask = torch.ones_like(given("mask")) if case["loss"] == "ipo" else given("mask")
    log_probs = given("log_probs").requires_grad_()
    chosen, rejected = (log_probs * mask).sum(1).chunk(2)
    margin = log_ratio_margin(chosen, rejected, *(given("reference") * mask).sum(1).chunk(2))
    terms = {key: case[key] for key in ("loss", "beta", "smoothing")}
    loss = preference_loss(margin, **terms).mean()
    loss.backward()
    assert loss.item() == pytest.approx(case["value"], rel=1e-9)
    torch.testing.assert_close(
        log_probs.grad, torch.tensor(case["gradient"], dtype=torch.float64), rtol=1e-7, atol=1e-9
    )


def test_aggregation_does_not_depend_on_the_parts() -> None:
    """Each rank's share by global totals: the same sum, however rows are divided; a mean of means is not."""
    mask = given("mask").bool()
    losses = given("log_probs")
    totals = BatchTotals(len(mask), int(mask.sum()), 9)
    for normalise in ("sequence", "token", "constant"):
        whole = aggregate(losses, mask, sample_lengths(mask), normalise, totals)
        parts = [
            aggregate(losses[rows], mask[rows], sample_lengths(mask[rows]), normalise, totals)
            for rows in (slice(0, 1), slice(1, 7), slice(7, None))
        ]
        torch.testing.assert_close(sum(parts), whole, rtol=1e-12, atol=0)
    # Two samples packed into one row: the lengths are those of the samples.
    packed = torch.tensor([[1.0, 1.0, 1.0, 5.0, 0.0]])
    inside = torch.tensor([[True, True, True, True, False]])
    lengths = torch.tensor([[3, 3, 3, 1, 0]])
    assert aggregate(packed, inside, lengths, "sequence", BatchTotals(2, 4)).item() == 3.0
    with pytest.raises(ValueError, match="max_new_tokens"):
        aggregate(packed, inside, lengths, "constant", BatchTotals(2, 4))


def gradient(loss: Any, at: torch.Tensor) -> torch.Tensor:
    leaf = at.clone().requires_grad_()
    loss(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_aipo_keeps_a_gradient_where_it_clips() -> None:
    """rho A grad l. A clamped ratio that is not detached has none there: the negative control."""
    sampled = torch.tensor([-3.0, -1.0, -1.0], dtype=torch.float64)
    now = torch.tensor([-0.5, -0.9, -2.0], dtype=torch.float64)
    advantages = torch.tensor([1.5, -2.0, 1.0], dtype=torch.float64)
    weights = torch.tensor([4.0, math.exp(0.1), math.exp(-1.0)], dtype=torch.float64)
    found = gradient(lambda x: aipo_loss(x, sampled, advantages, rho=4.0), now)
    torch.testing.assert_close(found, -weights * advantages, rtol=0, atol=1e-12)
    attached = gradient(lambda x: -(x - sampled).exp().clamp(max=4.0) * advantages, now)
    assert attached[0] == 0 and found[0] == -6.0


def test_the_corrections_agree_on_policy() -> None:
    """At the batch's start: clip, AIPO and the decoupled clip have the gradient -A of plain REINFORCE."""
    now = given("log_probs")
    advantages = grpo(given("rewards")).reshape(-1, 1).expand_as(now)
    for loss in (
        lambda x: clipped_loss(x, now, advantages),
        lambda x: aipo_loss(x, now, advantages, rho=4.0),
        lambda x: decoupled_loss(x, now, now, advantages, rho=4.0),
    ):
        torch.testing.assert_close(gradient(loss, now), -advantages, rtol=0, atol=1e-12)


def test_decoupled_is_aipo_for_one_update() -> None:
    """With o = l, detached: whatever drew the tokens, and where its weight is clipped too."""
    now, sampled = given("log_probs"), given("old")
    advantages = dr_grpo(given("rewards")).reshape(-1, 1).expand_as(now)
    aipo = gradient(lambda x: aipo_loss(x, sampled, advantages, rho=1.2), now)
    decoupled = gradient(lambda x: decoupled_loss(x, x.detach(), sampled, advantages, rho=1.2), now)
    torch.testing.assert_close(decoupled, aipo, rtol=0, atol=1e-12)
    assert ((now - sampled).exp() > 1.2).any()


def test_estimates_of_a_divergence() -> None:
    """Over all words: the expectations of k1 and k3 are the KL; the gradient of k2's is the KL's."""
    logits = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64).requires_grad_()
    reference = torch.tensor([0.1, 0.4, 1.0], dtype=torch.float64).log_softmax(0)
    log_probs = logits.log_softmax(0)
    kl = (log_probs.exp() * (log_probs - reference)).sum()
    for estimator in ("k1", "k3"):
        mean = (log_probs.exp() * divergence(log_probs, reference, estimator)).sum()
        torch.testing.assert_close(mean, kl)
    drawn = log_probs.detach().exp()

    def mean_gradient(estimate: torch.Tensor) -> torch.Tensor:
        return torch.autograd.grad((drawn * estimate).sum(), logits, retain_graph=True)[0]

    (of_kl,) = torch.autograd.grad(kl, logits, retain_graph=True)
    of_k1, of_k2 = (mean_gradient(divergence(log_probs, reference, name)) for name in ("k1", "k2"))
    torch.testing.assert_close(of_k2, of_kl)
    torch.testing.assert_close(of_k1, torch.zeros(3, dtype=torch.float64), rtol=0, atol=1e-15)
    with pytest.raises(ValueError, match="mean gradient of zero"):
        loss_penalty(log_probs, reference, "k1", coefficient=0.1)
    penalty = reward_penalty(log_probs, reference, "k1", coefficient=0.1)
    assert not penalty.requires_grad
    torch.testing.assert_close(penalty, 0.1 * (log_probs - reference).detach())


def test_preference_in_closed_form() -> None:
    margin = torch.tensor([0.0, 2.0, -800.0], dtype=torch.float64)
    dpo = preference_loss(margin, beta=0.5)
    torch.testing.assert_close(dpo[0].item(), math.log(2))
    torch.testing.assert_close(dpo[1].item(), math.log(1 + math.exp(-1.0)))
    assert dpo[2].item() == pytest.approx(400.0)  # no overflow
    # A label that is wrong half of the time says nothing: the minimum is at no preference.
    flat = gradient(lambda x: preference_loss(x, beta=0.5, smoothing=0.5), margin[:1])
    assert flat.item() == pytest.approx(0.0, abs=1e-15)
    assert preference_loss(torch.tensor([5.0]), beta=0.1, loss="ipo").item() == 0.0
    found = reward_loss(torch.tensor([3.0]), torch.tensor([1.0]), margin=2.0)
    assert found.item() == pytest.approx(math.log(2))
