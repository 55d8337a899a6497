"""Who holds how much of the optimizer state. Every rank is built here in turn; none meets another."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from tests.parallel.test_grid import run_of
from tests.support.project import parse_plan
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.run import RunConfig
from yuan_train.model.sharding import ROW_BLOCKS, SHARDING
from yuan_train.model.transformer import Transformer, initial_weight
from yuan_train.parallel.apply import ModelParts, Worker, parallelize
from yuan_train.parallel.zero import SharedState


def workers_of(plan: Plan) -> list[Worker]:
    def build(stage: StagePlan) -> Transformer:
        return Transformer(
            plan.model,
            layers=stage.layers,
            embedding=stage.embedding,
            head=stage.head,
            recompute=stage.recompute,
            device="meta",
            dtype=torch.float64,
        )

    parts = ModelParts(build, partial(initial_weight, plan.model, seed=1), SHARDING, ROW_BLOCKS)
    return [
        parallelize(plan, rank, parts, device=torch.device("cpu"), dtype=torch.float64)
        for rank in range(plan.world_size)
    ]


@pytest.fixture
def run() -> RunConfig:
    return run_of(6, 8)


def held(worker: Worker) -> int:
    """Elements of optimizer state on a rank."""
    return sum(shard.exp_avg.numel() for state in worker.states for shard in state.shards)


def test_unequal_owners_hold_in_proportion(run: RunConfig) -> None:
    plan = parse_plan(run, "1x4: 6@0 / 1x4: 6@1", optimizer_sharding=True, optimizer_share=[3, 1])
    most, least = map(held, workers_of(plan))
    assert most + least == plan.model.parameters
    assert most == pytest.approx(3 * least, abs=4)


def beside(worker: Worker) -> int:
    """Elements that the optimizer holds beside the model's weights and gradients."""
    mine = {
        buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() // buffer.itemsize
        for state in worker.states
        for shard in state.shards
        for buffer in (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
    }
    for bucket in worker.buckets:
        for buffer in (bucket.weights, bucket.gradient):
            mine.pop(buffer.untyped_storage().data_ptr(), None)
    return sum(mine.values())


def test_a_shard_lies_in_the_bucket_where_it_can(run: RunConfig) -> None:
    whole = parse_plan(run, "1x4: 6@0 / 1x4: 6@1", optimizer_sharding=True)
    assert [beside(worker) for worker in workers_of(whole)] == [2 * held(w) for w in workers_of(whole)]
    # The slice of a wider owner lies scattered over the bucket.
    slices = parse_plan(run, "1x4: 6@0 / 1x4: 6@1,2", optimizer_sharding=True)
    each = [held(worker) for worker in workers_of(slices)]
    assert [beside(w) for w in workers_of(slices)] == [4 * each[0], 2 * each[1], 2 * each[2]]


def test_ranges_of_unlike_widths_cover_every_slice_once(run: RunConfig) -> None:
    plan = parse_plan(
        run,
        "1x4: 2@0,1 | 4@2 / 1x4: 3@3 | 3@4,5",
        optimizer_sharding=True,
        optimizer_share=[1, 3, 7, 1],
    )
    seen: dict[tuple[str, int], set[tuple[tuple[int, int], ...]]] = {}
    shares = plan.optimizer_shares
    for worker in workers_of(plan):
        for state, bucket in zip(worker.states, worker.buckets, strict=True):
            assert isinstance(state, SharedState)
            for part, ranges in zip(bucket.slices, state._ranges, strict=True):
                assert ranges.keys() == set(part.group) and worker.place.rank in ranges
                ends = tuple(ranges.values())
                assert ends[0][0] == 0 and ends[-1][1] == part.num_elements
                assert all(a[1] == b[0] for a, b in zip(ends[:-1], ends[1:], strict=True))
                total = sum(shares[rank] for rank in part.group)
                for rank, (start, end) in ranges.items():
                    assert end - start == pytest.approx(part.num_elements * shares[rank] / total, abs=1)
                seen.setdefault((next(iter(bucket.parameters)), part.index), set()).add(ends)
    assert seen and all(len(views) == 1 for views in seen.values()), "owners disagree about the ranges"


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
    for worker, fraction in zip(workers_of(plan), (0.25, 1, 0, 0), strict=True):
        shards = [shard for state in worker.states for shard in state.shards]
        away = sum(shard.exp_avg.numel() for shard in shards if shard.on_host)
        # Cut where a vector begins, so up to 64 elements more of each bucket.
        assert away == pytest.approx(fraction * held(worker), abs=65 * len(shards))
        if fraction in (0, 1):
            assert away == fraction * held(worker)
        for shard in shards:
            kept = {shard.master.numel(), shard.gradient.numel(), shard.exp_avg.numel()}
            assert kept == {shard.end - shard.start}
