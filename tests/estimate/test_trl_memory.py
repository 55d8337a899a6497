"""GRPO's bytes in TRL, counted by hand and against the article's twenty cells."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.estimate.oxen_table import mean_error, oxen_table
from tests.estimate.test_shape import shape
from yuan_train.estimate.memory import Method, Samples, kept_per_token, trl_memory
from yuan_train.estimate.shape import PUBLISHED_SHAPES

TINY = shape()


def test_bytes_kept_of_a_token_as_hooks_count_them() -> None:
    # transformers 4.57.3, saved_tensors_hooks under bf16 autocast: 7208 full, 5544 with the base frozen; of
    # these 40 are statistics, 512 a mask that only a CPU keeps and 768 keys and values repeated for it.
    assert kept_per_token(TINY, lora=False) == 7208 - 40 - 512 - 768
    adapters = 3 * (3 * 128 + 256) + 3 * 320
    assert kept_per_token(TINY, lora=True) - adapters == 5544 - 40 - 512 - 768
    # Qwen 3: 9168, with 80 of statistics.
    normed = replace(TINY, query_key_norm=True)
    assert kept_per_token(normed, lora=False) == 9168 - 80 - 512 - 768


def test_a_small_case_by_hand() -> None:
    # N = 64 * 128 + 3 * (2 * 128 * 256 + 2 * 128 * 64 + 3 * 128 * 320 + 256) + 128 = 623,488; T = 2 * 10.
    memory = trl_memory(TINY, "full", Samples(group=2, prompt=4, new=6))
    n = 623_488
    assert memory.states == {"weights": 2 * n, "reference": 2 * n, "gradients": 2 * n, "optimizer": 4 * n}
    training = memory.phases["training"]
    assert training["activations"] == 3 * 5888 * 20 + 2 * 128 * 20
    assert training["logits_or_layer"] == max(10 * 2 * 6 * 64, 6 * 320 * 20)
    assert memory.phases["generation"] == {"cache": 4 * 64 * 3 * 20, "logits": 8 * 2 * 64}
    assert (memory.peak_phase, memory.peak) == ("optimizer_step", 12 * n + 5e8)


@pytest.mark.parametrize("method", ["full", "adam8", "adam8+recompute", "lora"])
def test_memory_grows_with_every_length(method: Method) -> None:
    shape, base = PUBLISHED_SHAPES["Llama-3.2-1B"], Samples(group=4, prompt=256, new=786)
    peak = trl_memory(shape, method, base).peak
    for longer in (replace(base, group=5), replace(base, prompt=257), replace(base, new=787)):
        assert trl_memory(shape, method, longer).peak > peak


def test_the_articles_twenty_cells() -> None:
    cells = oxen_table("H100-80G")
    assert len(cells) == 20
    assert [cell.case.method for cell in cells if not cell.right] == ["lora"]
    assert mean_error(cells) == pytest.approx(0.157, abs=0.001)
