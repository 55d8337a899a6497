"""Sums of bits, by which ranks that hold the same weights compare them: see tests/train/test_recheck.py."""

from pathlib import Path

import pytest
import torch

from tests.support.project import parse_plan, run_config
from yuan_train.config.errors import PlanError
from yuan_train.config.express import check_engine
from yuan_train.parallel.executor import checksum
from yuan_train.parallel.gradients import BLOCK


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
