"""How much optimizer state each rank holds. All ranks are built in one process, without communication."""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch

from tests.parallel.test_grid import run_of
from tests.support.project import parse_plan
from yuan_train.config.model import sharding_of
from yuan_train.config.plan import Plan
from yuan_train.config.run import RunConfig
from yuan_train.models.transformer import initial_rows
from yuan_train.parallel.apply import ModelParts, RankRuntime, parallelize
from yuan_train.parallel.device import CPU
from yuan_train.parallel.gradients import Piece, Slice
from yuan_train.parallel.optimizer_state import owner_ranges
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.zero import EngineOptions, OwnedState
from yuan_train.train.build import build_part


def runtimes_of(plan: Plan) -> list[RankRuntime]:
    build = partial(build_part, plan.model, torch.float64)
    parts = ModelParts(build, partial(initial_rows, plan.model, seed=1), *sharding_of(plan.model))
    options = EngineOptions(torch.float64)
    return [parallelize(plan, rank, parts, device=CPU, options=options) for rank in range(plan.world_size)]


@pytest.fixture
def run() -> RunConfig:
    return run_of(6, 8)


def held(runtime: RankRuntime) -> int:
    """Elements of optimizer state that a rank holds."""
    return sum(shard.exp_avg.numel() for state in runtime.states for shard in state.shards)


def slice_of(n: int, count: int) -> Slice:
    return Slice(0, 0, tuple(range(count)), (Piece("", Shard((n,)), 0, n),), n, n)


@pytest.mark.parametrize(
    ("n", "shares", "sizes", "each"),
    [
        (1000, (1, 1), (500, 500), 500),
        (1002, (1, 1, 1), (334, 334, 334), 334),
        (1000, (1, 1, 1), (320, 320, 360), 320),
        (1000, (3, 1), (768, 232), 0),
        (1000, (1, 99), (0, 1000), 0),
        (1000, (1, 2, 4), (128, 320, 552), 0),
        (100, (3, 1), (75, 25), 0),
        (20, (1, 1, 1), (6, 6, 8), 6),
        (2, (1, 1, 1), (0, 0, 2), 0),
    ],
)
def test_borders_of_ranges_are_those_of_vectors(
    n: int, shares: Sequence[float], sizes: tuple[int, ...], each: int
) -> None:
    ranges = owner_ranges(slice_of(n, len(shares)), shares)
    assert (ranges.sizes, ranges.each) == (sizes, each) and sum(sizes) == n


def extra(runtime: RankRuntime) -> int:
    """Elements that the optimizer holds in memory of its own, outside the model's weights and gradients."""
    storages = {
        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() // buffer.itemsize
        for state in runtime.states
        for shard in state.shards
        for buffer in (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
    }
    for bucket in runtime.buckets:
        for buffer in (bucket.weights, bucket.gradient):
            storages.pop(buffer.untyped_storage().data_ptr(), None)
    return sum(storages.values())


def test_a_shard_is_a_view_of_the_bucket_where_possible(run: RunConfig) -> None:
    whole = parse_plan(run, "1x4: 6@0 / 1x4: 6@1", optimizer_sharding=True)
    assert [extra(runtime) for runtime in runtimes_of(whole)] == [2 * held(r) for r in runtimes_of(whole)]
    # A slice is not contiguous in the bucket of a narrower owner.
    slices = parse_plan(run, "1x4: 6@0 / 1x4: 6@1,2", optimizer_sharding=True)
    each = [held(runtime) for runtime in runtimes_of(slices)]
    assert [extra(r) for r in runtimes_of(slices)] == [4 * each[0], 2 * each[1], 2 * each[2]]


def test_ranges_of_different_widths_cover_every_slice_once(run: RunConfig) -> None:
    plan = parse_plan(
        run, "1x4: 2@0,1 | 4@2 / 1x4: 3@3 | 3@4,5", optimizer_sharding=True, optimizer_share=[1, 3, 7, 1]
    )
    seen: dict[tuple[str, int], set[tuple[int, ...]]] = {}
    shares = plan.optimizer_shares
    for runtime in runtimes_of(plan):
        for state, bucket in zip(runtime.states, runtime.buckets, strict=True):
            assert isinstance(state, OwnedState) and state._ranges is not None
            for part, ranges in zip(bucket.slices, state._ranges, strict=True):
                assert len(ranges.sizes) == len(part.group) and sum(ranges.sizes) == part.num_elements
                total = sum(shares[rank] for rank in part.group)
                for rank, size in zip(part.group, ranges.sizes, strict=True):
                    assert size == pytest.approx(part.num_elements * shares[rank] / total, abs=64)
                seen.setdefault((next(iter(bucket.parameters)), part.index), set()).add(ranges.sizes)
    assert seen and all(len(views) == 1 for views in seen.values()), "owners disagree about the ranges"


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(
    "text",
    [
        "1x8: 6@0",
        "1x2: 6@0 / 1x2: 6@1 / 1x2: 6@2 / 1x2: 6@3",
        "1x4: 6@0,1 / 1x4: 6@2,3",
        "1x4: 2@0,1 | 4@2 / 1x4: 3@3 | 3@4,5",
        "1x8: 2@0 | 3@1;2 | 1@3",
    ],
)
@pytest.mark.parametrize("offload", [0.0, 0.4])
def test_a_checkpoint_holds_every_element_once(
    run: RunConfig, text: str, sharded: bool, offload: float
) -> None:
    """What all ranks write covers each global tensor once; what they hold covers it, at the same places."""
    num_stages = text.count("|") + text.count("/") + 1
    plan = parse_plan(run, text, optimizer_sharding=sharded, optimizer_offload=[offload] * num_stages)
    written: dict[str, torch.Tensor] = {}
    held: dict[str, torch.Tensor] = {}
    for runtime in runtimes_of(plan):
        for state, (counts, is_written) in itertools.product(
            runtime.states, ((written, True), (held, False))
        ):
            for name, box in state.boxes("exp_avg", written=is_written):
                count = counts.setdefault(name, torch.zeros(runtime.shards[name].shape))
                assert tuple(box.tensor.shape) == box.sizes
                index = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                count[index] += 1
    assert written and written.keys() == held.keys()
    assert all(bool((count == 1).all()) for count in written.values())
    assert all(bool((count >= 1).all()) for count in held.values())


@pytest.mark.parametrize("sharded", [False, True])
def test_owners_share_the_writing(run: RunConfig, sharded: bool) -> None:
    plan = parse_plan(run, "1x2: 6@0 / 1x2: 6@1 / 1x2: 6@2 / 1x2: 6@3", optimizer_sharding=sharded)
    sizes = [
        sum(box.tensor.nbytes for state in runtime.states for _, box in state.boxes("master", written=True))
        for runtime in runtimes_of(plan)
    ]
    assert max(sizes) <= 1.1 * min(sizes)


@pytest.mark.parametrize("sharded", [False, True])
def test_the_fraction_on_the_host(run: RunConfig, sharded: bool) -> None:
    shares: dict[str, Any] = {"optimizer_share": [2, 1, 1]} if sharded else {}
    plan = parse_plan(
        run,
        "1x4: 6@0 / 1x4: 3@1 | 3@2,3",
        optimizer_sharding=sharded,
        optimizer_offload=[0.25, 1, 0],
        **shares,
    )
    for runtime, fraction in zip(runtimes_of(plan), (0.25, 1, 0, 0), strict=True):
        shards = [shard for state in runtime.states for shard in state.shards]
        on_host = sum(shard.exp_avg.numel() for shard in shards if shard.on_host)
        # The split is rounded down to a full vector, so up to 64 elements more of each bucket.
        assert on_host == pytest.approx(fraction * held(runtime), abs=65 * len(shards))
        if fraction in (0, 1):
            assert on_host == fraction * held(runtime)
        for shard in shards:
            kept = {shard.master.numel(), shard.gradient.numel(), shard.exp_avg.numel()}
            assert kept == {shard.end - shard.start}
