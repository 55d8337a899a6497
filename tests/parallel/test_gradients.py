"""The norm of a flat gradient, and what is added to it."""

from __future__ import annotations

import pytest
import torch

from yuan_train.parallel.gradients import CARD_NORM_BLOCK, NORM_BLOCK, sum_of_squares


@pytest.mark.parametrize(("device", "block"), [("cpu", NORM_BLOCK), ("meta", CARD_NORM_BLOCK)])
def test_the_norm_takes_a_block_at_a_time(device: str, block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch copies what it is given to fp64. `meta` stands for a card, and needs no memory."""
    given: list[int] = []
    real = torch.linalg.vector_norm

    def record(x: torch.Tensor, **options: object) -> torch.Tensor:
        given.append(x.numel())
        return real(x, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", record)
    for extra in (0, 1, 5):
        sum_of_squares(torch.empty(3 * block + extra, device=device))
    assert max(given) == block and sum(given) > 9 * block


def test_the_norm_is_that_of_fp64() -> None:
    flat = torch.randn(5 * NORM_BLOCK + 3, generator=torch.Generator().manual_seed(0))
    exact = flat.double().square().sum()
    torch.testing.assert_close(sum_of_squares(flat), exact, rtol=1e-12, atol=0)
