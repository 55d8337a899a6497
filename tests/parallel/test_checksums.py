"""Ranks that hold the same weights compare their bits; one that differs is found, and named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.support.project import parse_plan, run_config
from tests.support.spawn import free_port, spawn
from tests.train.test_recheck import flipping, train_and_tell
from yuan_train.config.errors import PlanError
from yuan_train.config.express import check_engine
from yuan_train.config.plan import Plan
from yuan_train.parallel.checksums import checksum
from yuan_train.parallel.gradients import BLOCK

NORM, MATRIX = "layers.2.attention_norm.weight", "layers.2.feed_forward.up.weight"
LORA = "model.lora={rank: 4}"


@dataclass(frozen=True)
class Flip:
    """A bit that flips in a rank's weights after the second step."""

    name: str
    rank: int
    parameter: str
    text: str
    said: tuple[str, ...]
    sharded: bool = False
    overrides: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)


OWNERS, PAIR, WIDE = "1x3: 6@0 / 1x3: 6@1 / 1x2: 6@2", "1x4: 6@0 / 1x4: 6@1", "1x4: 6@0,1 / 1x4: 6@2"
FLIPS = [
    Flip("none", -1, "", OWNERS, ()),
    Flip("none, sharded", -1, "", WIDE, (), sharded=True),
    Flip("the odd one of three", 1, MATRIX, OWNERS, ("rank 1 (pipeline 1, stage 0) on ",)),
    Flip("of two both", 1, NORM, PAIR, ("ranks 0, 1 have unlike weights: " + NORM,)),
    Flip("sharded", 2, MATRIX, WIDE, ("ranks 0, 2 have unlike weights: " + MATRIX,), sharded=True),
    Flip("a norm in a group", 1, NORM, "1x8: 6@0,1", ("ranks 0, 1 have unlike weights: " + NORM,)),
    Flip("frozen", 2, MATRIX, OWNERS, ("rank 2 (pipeline 2",), overrides=(LORA,)),
]


def given(run_file: Path, flip: Flip, folder: Path):
    steps = "train.steps=3", "validation.every=0", "train.precision=bf16", "train.check_every=2"
    return run_config(run_file, f"log.directory={folder}", *steps, *flip.overrides)


def plan_of(run_file: Path, flip: Flip) -> Plan:
    return parse_plan(given(run_file, flip, Path()), flip.text, optimizer_sharding=flip.sharded)


def test_a_flipped_bit_is_found_and_its_rank_named(run_file: Path, tmp_path: Path) -> None:
    plans = [plan_of(run_file, flip) for flip in FLIPS]
    spawn(_run_all, 3, run_file, tmp_path, FLIPS, plans)
    for flip, plan in zip(FLIPS, plans, strict=True):
        for rank in range(plan.world_size):
            text = (tmp_path / flip.name / str(rank)).read_text()
            for words in flip.said:
                assert words in text, (flip.name, text)
            assert bool(text) == bool(flip.said), (flip.name, text)
            if text:
                assert text.startswith("after step 2: ") and "(last after the start)" in text
                assert "ranks 0, 2" in text or flip.name != "the odd one of three"
                other = {MATRIX: NORM, NORM: MATRIX}[flip.parameter]
                assert other not in text, "no other parameter is blamed"


def _run_all(rank: int, run_file: Path, folder: Path, flips: list[Flip], plans: list[Plan]) -> None:
    for flip, plan in zip(flips, plans, strict=True):
        if rank < plan.world_size:
            run = given(run_file, flip, folder / flip.name / "log")
            with flipping("weight" if rank == flip.rank else "", flip.parameter):
                train_and_tell(rank, plan, run, folder / flip.name / str(rank), flip.port)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_every_bit_counts(dtype: torch.dtype) -> None:
    weights = torch.randn(2 * BLOCK + 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    before = checksum(weights)
    assert torch.equal(checksum(weights.flip(0)), before), "the order does not"
    bits = weights.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weights.element_size()])
    for place in (0, BLOCK, 2 * BLOCK + 4):
        for bit in range(8 * weights.element_size() - 1):
            bits[place] ^= 1 << bit
            assert not torch.equal(checksum(weights), before)
            bits[place] ^= 1 << bit
    # What one sum would not see: two changes that make up for each other.
    bits[:2] += torch.tensor([1, -1], dtype=bits.dtype)
    after = checksum(weights)
    assert after[0] == before[0] and after[1] != before[1]


def test_megatron_core_has_no_check(run_file: Path) -> None:
    run = run_config(run_file, "engine=megatron", "train.check_every=5")
    with pytest.raises(PlanError, match="train.check_every: 5; the weights that it compares"):
        check_engine(parse_plan(run, "1x8: 6@0"), run)
