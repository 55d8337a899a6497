"""The six advantages against closed forms."""

import pytest
import torch

from yuan_train.rl.updates import (
    dr_grpo,
    gae,
    grpo,
    reinforce_baseline,
    reinforce_plus_plus,
    rloo,
    whiten,
)

REWARDS_QG = torch.tensor([[1.0, 0.0, 0.0, 2.0], [5.0, 5.0, 5.0, 5.0]], dtype=torch.float64)
MASK_BS = torch.tensor([[1, 1, 1, 0], [0, 1, 1, 0]], dtype=torch.bool)


def test_of_groups() -> None:
    # Mean 3/4; squared deviations (1 + 9 + 9 + 25) / 16, over G - 1 = 3.
    deviations = torch.tensor([0.25, -0.75, -0.75, 1.25], dtype=torch.float64)
    std = (44 / 16 / 3) ** 0.5
    torch.testing.assert_close(dr_grpo(REWARDS_QG)[0], deviations)
    torch.testing.assert_close(grpo(REWARDS_QG)[0], deviations / (std + 1e-4))
    # Each less the mean of the other three.
    others = torch.tensor([2 / 3, 1.0, 1.0, 1 / 3], dtype=torch.float64)
    torch.testing.assert_close(rloo(REWARDS_QG)[0], REWARDS_QG[0] - others)


@pytest.mark.parametrize("advantage", [grpo, dr_grpo, rloo])
def test_a_group_of_equal_rewards_teaches_nothing(advantage: object) -> None:
    """Exactly: the mean of equal numbers may be off in the last digit."""
    equal = torch.full((1, 7), 0.1)
    assert (equal - equal.mean()).abs().max() != 0, "the sum rounds, so this test can fail"
    assert torch.equal(advantage(equal), torch.zeros(1, 7))  # pyright: ignore


def test_a_group_of_one_is_refused() -> None:
    with pytest.raises(ValueError, match="2 or more answers"):
        rloo(torch.zeros(4, 1))


def test_baseline_is_whitened_over_tokens() -> None:
    """Three tokens of the first answer and two of the second: weights 3/5 and 2/5."""
    rewards_QG = torch.tensor([[1.0, 0.0]], dtype=torch.float64)
    found = reinforce_baseline(rewards_QG, MASK_BS)
    std = (0.6 * 0.4**2 + 0.4 * 0.6**2) ** 0.5
    expected = torch.tensor([[0.4] * 4, [-0.6] * 4], dtype=torch.float64) / std * MASK_BS
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_returns_carry_the_penalties_that_follow() -> None:
    rewards_B = torch.tensor([1.0, 2.0], dtype=torch.float64)
    penalty_BS = torch.tensor([[0.1, 0.2, 0.3, 9.0], [9.0, 0.5, 0.25, 9.0]], dtype=torch.float64)
    returns = torch.tensor([[0.4, 0.5, 0.7, 0.0], [0.0, 1.25, 1.75, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(
        reinforce_plus_plus(rewards_B, penalty_BS, MASK_BS), whiten(returns, MASK_BS), rtol=0, atol=1e-12
    )


def test_generalised_advantages() -> None:
    """Against the sum of discounted temporal differences, written out, for tokens that follow each other."""
    gamma, lam = 0.9, 0.8
    mask = MASK_BS[:1]
    values = torch.tensor([[0.3, 0.5, 0.2, 7.0]], dtype=torch.float64)
    penalty = torch.tensor([[0.1, 0.0, 0.2, 9.0]], dtype=torch.float64)
    d = [-0.1 + gamma * 0.5 - 0.3, gamma * 0.2 - 0.5, 1.0 - 0.2 - 0.2]
    k = gamma * lam
    raw = torch.tensor([[d[0] + k * d[1] + k * k * d[2], d[1] + k * d[2], d[2], 0.0]], dtype=torch.float64)
    rewards = torch.ones(1, dtype=torch.float64)
    found, returns = gae(rewards, penalty, values, mask, gamma=gamma, lam=lam)
    torch.testing.assert_close(found, whiten(raw, mask), rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, (raw + values) * mask, rtol=0, atol=1e-12)


def test_a_gap_in_an_answer_is_passed_over() -> None:
    """Tokens of a tool between those of the model change nothing."""
    rewards = torch.tensor([1.0])
    dense = [torch.tensor([[0.1, 0.2, 0.3]]), torch.tensor([[0.5, 0.6, 0.7]]), torch.ones(1, 3).bool()]
    gaps = torch.tensor([0, 2, 4])
    sparse = [torch.full((1, 5), 8.0).index_copy(1, gaps, x.float()) for x in dense]
    sparse[2] = torch.zeros(1, 5).index_fill(1, gaps, 1).bool()
    for a, b in zip(gae(rewards, *dense, lam=0.7), gae(rewards, *sparse, lam=0.7), strict=True):
        torch.testing.assert_close(a, b[:, gaps])
        assert not b[:, [1, 3]].any()


def test_nothing_to_whiten() -> None:
    equal = torch.full((1, 3), 0.1, dtype=torch.float64)
    assert equal.mean() != 0.1, "rounded"
    assert torch.equal(whiten(equal, torch.ones(1, 3).bool()), torch.zeros(1, 3, dtype=torch.float64))
    assert torch.equal(whiten(torch.ones(1, 2), torch.zeros(1, 2).bool()), torch.zeros(1, 2))
