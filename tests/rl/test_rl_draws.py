"""Hashed draws of tokens: the right distribution, the same on any cut of the vocabulary."""

import math
from functools import partial
from typing import Any

import pytest
import torch

from tests.support.memory import most_bytes
from yuan_train.models import generate
from yuan_train.models.generate import draw, draw_keys
from yuan_train.models.transformer import VocabularyPart
from yuan_train.planner.roles import engines
from yuan_train.planner.roles.engines import drawing_bytes

WORDS = 48


class Head:
    """A model that gives some words of known logits."""

    def __init__(self, logits_RV: torch.Tensor, part: VocabularyPart | None = None) -> None:
        self._logits_RV = logits_RV
        self.vocabulary_part = part

    def logits(self, hidden_RH: torch.Tensor) -> torch.Tensor:
        return self._logits_RV * hidden_RH[:, :1]


def drawn(head: Head, count: int, **changes: Any) -> torch.Tensor:
    keys = [draw_keys(5, "ticket", n, 0) for n in range(count)]
    hidden_RH = torch.ones(2, 3, dtype=torch.float64)
    return draw(head, hidden_RH, [n % 2 for n in range(count)], keys, **{"temperature": 1.0} | changes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def logits_RV() -> torch.Tensor:
    return 2 * torch.randn(2, WORDS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_distribution(logits_RV: torch.Tensor, temperature: float) -> None:
    """Chi-square of 8,000 draws, by its normal approximation (Wilson and Hilferty 1931): p above 1e-3."""
    count = 16_000
    found_N2 = drawn(Head(logits_RV), count, temperature=temperature)
    expected_V = (logits_RV[0] / temperature).softmax(0)
    words_N = found_N2[::2, 0].long()
    observed_V = torch.bincount(words_N, minlength=WORDS).double()
    often = expected_V * count / 2 > 5
    expected = expected_V[often] * count / 2
    chi = float(((observed_V[often] - expected) ** 2 / expected).sum())
    degrees = int(often.sum()) - 1
    z = ((chi / degrees) ** (1 / 3) - (1 - 2 / (9 * degrees))) / math.sqrt(2 / (9 * degrees))
    assert degrees > 10 and abs(z) < 3.29
    assert torch.allclose(found_N2[::2, 1], expected_V[words_N].log())


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_cut_vocabulary_draws_the_same(logits_RV: torch.Tensor, ranks: int) -> None:
    whole = drawn(Head(logits_RV), 100)
    width = WORDS // ranks
    parts: list[torch.Tensor] = []
    # For the loss, which nobody asks for.
    part = partial(VocabularyPart, copy=torch.detach, exchange=lambda one, other: lambda: (one, other))

    def keep(local: torch.Tensor) -> torch.Tensor:
        parts.append(local)
        return torch.stack([local] * ranks)

    for rank in range(ranks):
        own = logits_RV[:, rank * width : (rank + 1) * width]
        drawn(Head(own, part(rank * width, keep)), 100)
    together = part(0, lambda local: torch.stack(parts))
    found = drawn(Head(logits_RV[:, :width], together), 100)
    assert torch.equal(found[:, 0], whole[:, 0])
    assert torch.allclose(found[:, 1], whole[:, 1], atol=1e-14)


def test_greedy_is_the_most_probable_word(logits_RV: torch.Tensor) -> None:
    found = drawn(Head(logits_RV), 4, greedy=True)
    assert found[:, 0].tolist() == logits_RV.argmax(1).tolist() * 2


def test_a_draw_follows_from_its_place_alone(logits_RV: torch.Tensor) -> None:
    assert (
        len({draw_keys(5, 1, 2, 3), draw_keys(5, 1, 3, 2), draw_keys(5, 2, 1, 3), draw_keys(6, 1, 2, 3)}) == 4
    )
    assert torch.equal(drawn(Head(logits_RV), 20)[:10], drawn(Head(logits_RV), 10))


@pytest.mark.parametrize("words", [1 << 12, 1 << 15])
@pytest.mark.parametrize("parts", [0.5, 1, 1.25, 2, 4, 8])
def test_a_draw_holds_the_bytes_that_are_forecast(
    monkeypatch: pytest.MonkeyPatch, words: int, parts: float
) -> None:
    rows = 4
    monkeypatch.setattr(generate, "CACHED_ELEMENTS", rows * words)
    monkeypatch.setattr(engines, "DRAWN_ELEMENTS", rows * words)
    draws = round(parts * rows)
    head = Head(torch.randn(draws, words))
    keys = [draw_keys(5, "ticket", n, 0) for n in range(draws)]

    def run() -> None:
        # Not in the order of rows: logits are copied.
        order = [*range(1, draws), 0]
        draw(head, torch.ones(draws, 1), order, keys, temperature=1.0)  # type: ignore[arg-type]

    held = most_bytes(run)
    assert held == pytest.approx(drawing_bytes(draws, words), rel=0.01)
    if parts == 2:
        # Negative control: without the copy, a fifth would be missed.
        assert 8 * words * (draws + 2 * rows) < 0.87 * held


def test_the_planner_knows_how_many_words_are_drawn_at_once() -> None:
    assert engines.DRAWN_ELEMENTS == generate.NOISE_ELEMENTS
