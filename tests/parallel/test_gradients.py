"""The norm of a flat gradient, and what is added to it."""

import pytest
import torch

from tests.support.models import tiny_model
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel.gradients import (
    BLOCK,
    FlatBucket,
    add_embedding_rows,
    adds_up_in_fp64,
    sum_of_squares,
    wide_norm,
)
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.shard import Shard

CACHE = 1 << 20
"""Bytes that stay in a core's cache: a block's copy in 8 bytes each on a processor."""
CARD_BYTES = 64 << 20
"""What the norm may take of a card, whatever the size of a bucket: it is in no forecast."""
LAUNCHES = 200
"""For a bucket of 500 million elements: blocks on a card must not be as small as on a processor either."""


@pytest.mark.parametrize(
    ("device", "most", "count"), [("cpu", CACHE, 1 << 22), ("meta", CARD_BYTES, 1 << 29)]
)
def test_the_norm_takes_a_block_at_a_time(
    device: str, most: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch copies what it is given to fp64. `meta` stands for a card, and needs no memory."""
    copied: list[int] = []
    real = torch.linalg.vector_norm

    def record(x: torch.Tensor, **options: object) -> torch.Tensor:
        copied.append(x.numel() * torch.float64.itemsize)
        return real(x, **options)

    monkeypatch.setattr(torch.linalg, "vector_norm", record)
    for extra in (0, 1, 5):
        copied.clear()
        sum_of_squares(torch.empty(count + extra, device=device))
        blocks = copied[:-1]
        assert sum(blocks) == (count + extra) * torch.float64.itemsize and max(copied) <= most
        assert len(blocks) <= LAUNCHES


def test_the_norm_is_that_of_fp64() -> None:
    flat = torch.randn(5 * BLOCK + 3, generator=torch.Generator().manual_seed(0))
    exact = flat.double().square().sum()
    torch.testing.assert_close(sum_of_squares(flat), exact, rtol=1e-12, atol=0)
    torch.testing.assert_close(wide_norm(flat) ** 2, exact, rtol=1e-12, atol=0)


@pytest.mark.parametrize("found", ["in fp32", "of fp32", "refused"])
def test_a_norm_of_lists_that_is_not_of_fp64_is_not_used(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def foreach_norm(tensors: list[torch.Tensor], order: int, *, dtype: torch.dtype) -> list[torch.Tensor]:
        if found == "refused":
            raise RuntimeError("not implemented")
        norms = [torch.linalg.vector_norm(x, order) for x in tensors]
        return norms if found == "in fp32" else [norm.to(dtype) for norm in norms]

    adds_up_in_fp64.cache_clear()
    assert adds_up_in_fp64(torch.device("cpu"))
    adds_up_in_fp64.cache_clear()
    monkeypatch.setattr(torch, "_foreach_norm", foreach_norm)
    assert not adds_up_in_fp64(torch.device("cpu"))
    adds_up_in_fp64.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_card_adds_up_in_fp64() -> None:
    assert adds_up_in_fp64(torch.device("cuda"))


# --- rows of the embedding ---------------------------------------------------------------------------------


def embedding_gradient(dtype: torch.dtype, *, by_rows: bool) -> torch.Tensor:
    """What two micro-batches of 300 equal tokens and a few others leave in the bucket, of ones."""
    part = Transformer(tiny_model("yuan"), layers=(0, 0), head=False, dtype=dtype)
    init_weights(part, seed=0)
    weight = part.embedding.weight
    shards = {"embedding.weight": Shard(tuple(weight.shape))}
    bucket = FlatBucket(Bucket(("embedding",), ((0,),)), dict(part.named_parameters()), shards, rank=0)
    if by_rows:
        add_embedding_rows(part)
    told: list[bool] = []
    weight.register_post_accumulate_grad_hook(lambda p: told.append(p.grad is None))
    tokens = torch.full((2, 155), 7)
    tokens[:, 150:] = torch.arange(5)
    for _ in range(2):
        hidden = part(tokens)
        hidden.backward(torch.ones_like(hidden))
    assert len(told) == 2, "the reducer hears of each"
    return bucket.view(bucket.gradient, "embedding.weight")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_rows_of_the_embedding_are_added_in_the_precision_of_the_bucket(dtype: torch.dtype) -> None:
    gradient = embedding_gradient(dtype, by_rows=True)
    assert gradient[7].unique().tolist() == [600.0] and gradient[3].unique().tolist() == [4.0]
    assert not gradient[8:].any()
    dense = embedding_gradient(dtype, by_rows=False)
    # The control: a whole matrix in bf16 counts no further than to 256.
    assert torch.equal(dense, gradient) == (dtype != torch.bfloat16)


def test_a_frozen_embedding_has_no_gradient() -> None:
    part = Transformer(tiny_model("yuan"), layers=(0, 0), head=False)
    add_embedding_rows(part)
    assert part(torch.zeros(1, 3, dtype=torch.int64)).requires_grad
    part.embedding.weight.requires_grad_(False)
    assert not part(torch.zeros(1, 3, dtype=torch.int64)).requires_grad


def test_no_matrix_is_made_for_the_rows() -> None:
    """Of a vocabulary of many rows, the backward allocates only those of its tokens."""
    weight = torch.zeros(50_000, 64, dtype=torch.bfloat16, requires_grad=True)
    weight.main_gradient = torch.zeros(50_000, 64)  # pyright: ignore[reportAttributeAccessIssue]
    part = Transformer(tiny_model("yuan"), layers=(0, 0), head=False)
    add_embedding_rows(part)
    hidden = part.embedding.op(torch.arange(40)[None], weight)
    with torch.profiler.profile(profile_memory=True) as profile:
        hidden.backward(torch.ones_like(hidden))
    allocated = sum(max(e.self_cpu_memory_usage, 0) for e in profile.events() or ())
    assert allocated < 40 * 64 * 32 and weight.main_gradient.sum() == 40 * 64  # pyright: ignore
