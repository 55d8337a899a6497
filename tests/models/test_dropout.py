"""Hashed dropout: its hashes, its gradients, and equal masks under every plan."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.project import difference, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases
from yuan_train.config.errors import ConfigError
from yuan_train.models import layers
from yuan_train.models.layers import DropoutSeed, hashes, hidden_dropout

RATES = (0.1, 0.5)
COUNT = 1 << 18


def triple32(index: int, keys: tuple[int, int, int]) -> int:
    """The definition, in Python integers."""
    for (shift, factor), key in zip(
        ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB)), keys, strict=True
    ):
        index ^= key
        index = (index ^ index >> shift) * factor & 0xFFFFFFFF
    return index ^ index >> 14


def sigmas(a: torch.Tensor, b: torch.Tensor) -> float:
    """Correlation of two 0/1 sequences, in standard deviations of the correlation of independent ones."""
    a, b = a - a.mean(), b - b.mean()
    return abs(float((a * b).mean() / (a.std() * b.std()))) * math.sqrt(a.numel())


def test_the_hash_is_triple32() -> None:
    keys = DropoutSeed(7, 3).keys(0, 2, "attention")
    assert all(0 <= key < 1 << 32 for key in keys)
    assert hashes(2000, keys).tolist() == [triple32(index, keys) for index in range(2000)]


@pytest.mark.parametrize("rate", RATES)
def test_masks_look_independent(rate: float) -> None:
    """Means, neighbours, and masks of different seeds, samples, layers or sites, within 5 sigma."""
    cases = [(seed, sample, layer, site) for seed in (1, 2) for sample in (0, 1, 8) for layer in (0, 1)
             for site in ("attention", "feed_forward")]  # fmt: skip
    masks = [
        (hashes(COUNT, DropoutSeed(seed, sample).keys(0, layer, site)) >= round(rate * 2**32)).double()
        for seed, sample, layer, site in cases
    ]
    spread = math.sqrt(rate * (1 - rate) / COUNT)
    for mask in masks:
        assert abs(1 - float(mask.mean()) - rate) < 5 * spread
        for distance in (1, 2, 32, 64, 2048):
            assert sigmas(mask[:-distance], mask[distance:]) < 5
    for i, mask in enumerate(masks):
        for other in masks[:i]:
            assert sigmas(mask, other) < 5


def test_a_sample_has_its_mask_in_any_micro_batch() -> None:
    x = torch.ones(4, 8, 16, dtype=torch.float64)

    def drop(x: torch.Tensor, sample: int, tokens: tuple[int, int]) -> torch.Tensor:
        seed = DropoutSeed(5, 10 + sample)
        return hidden_dropout(x, "attention", rate=0.3, dropout_seed=seed, layer=1, tokens=tokens)

    together = drop(x, 0, (0, 8))
    for sample in range(4):
        assert torch.equal(drop(x[:1], sample, (0, 8))[0], together[sample])
    # And so has each part of the tokens, of one sample or of several, the last one padded.
    for first, last in ((0, 3), (5, 8), (6, 19), (27, 34)):
        part = drop(torch.ones(last - first, 16, dtype=torch.float64), 0, (first, 8))
        assert torch.equal(part[: 32 - first], together.flatten(0, 1)[first:last])
    assert set(together.unique().tolist()) == {0.0, 1 / (1 - 0.3)}


def test_the_gradient_has_the_mask_of_the_forward() -> None:
    x = torch.randn(2, 3, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def drop(x: torch.Tensor) -> torch.Tensor:
        return hidden_dropout(
            x, "feed_forward", rate=0.5, dropout_seed=DropoutSeed(1, 0), layer=0, tokens=(0, 3)
        )

    assert torch.autograd.gradcheck(drop, (x.requires_grad_(),))
    # The upstream gradient may be permuted in memory.
    out = drop(x)
    out.backward(torch.ones(4, 3, 2, dtype=torch.float64).permute(2, 1, 0))
    assert x.grad is not None and torch.equal(x.grad != 0, out != 0)


def test_attention_dropout_is_refused(run_file: Path) -> None:
    with pytest.raises(ConfigError, match="attention_dropout: wanted 0, got 0.1: .* use hidden_dropout"):
        run_config(run_file, "model.attention_dropout=0.1")


PLANS: dict[str, dict] = {
    "mixed pipelines, micro-batches and widths": {"text": "1x4: 2@0,1 | 4@2 / 2x2: 6@3"},
    "full recompute": {"text": "1x8: 2@0 | 4@1", "recompute": "full"},
    "selective recompute": {"text": "2x4: 6@0", "recompute": "selective"},
    "tokens divided": {"text": "2x4: 2@0,1 | 4@2,3 full", "sequence_parallel": True},
}
OVERRIDES = ("train.precision=fp64", "train.steps=2", "validation.every=2", "model.hidden_dropout=0.2")


def test_no_plan_changes_a_mask(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_config(run_file, *OVERRIDES)
    curve = run_alone(Case(run_file, tmp_path / "alone", None, OVERRIDES))
    without = run_alone(Case(run_file, tmp_path / "none", None, (*OVERRIDES, "model.hidden_dropout=0")))
    assert difference(curve, without, "loss") > 1e-5
    cases = {
        name: Case(run_file, tmp_path / name, parse_plan(run, **plan), OVERRIDES)
        for name, plan in PLANS.items()
    }
    run_cases(list(cases.values()))
    for name, case in cases.items():
        ours = read_metrics(case.folder)
        assert difference(ours, curve, "loss") < 1e-12, name
        assert difference(ours, curve, "grad_norm") < 1e-11, name
        # Validation has no dropout: its masks would depend on the position in the data.
        assert ours[-1]["validation_loss"] == pytest.approx(curve[-1]["validation_loss"], rel=1e-12), name
    # Control: masks that depend on the position in the micro-batch instead of the position in the data.
    keys = DropoutSeed.keys

    def by_micro_batch(dropout_seed: DropoutSeed, sample: int, layer: int, site: str) -> layers.Keys:
        return keys(DropoutSeed(dropout_seed.seed, 0), sample, layer, site)

    monkeypatch.setattr(DropoutSeed, "keys", by_micro_batch)
    sizes = [
        run_alone(Case(run_file, tmp_path / f"size {n}", None, (*OVERRIDES, f"train.micro_batch_size={n}")))
        for n in (1, 2)
    ]
    assert difference(sizes[0], sizes[1], "loss") > 1e-5
