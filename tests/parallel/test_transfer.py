"""Slices between unlike plans, in one process: bits, bytes, and tables with a fault."""

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parallel.test_grid import run_of
from tests.support.models import VARIANTS, tiny_model
from tests.support.project import parse_plan, stage_text
from yuan_train.config.model import ModelConfig, sharding_of
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel.shard import Shard, part_of
from yuan_train.parallel.tensor import ShardSpec, shard_parameters
from yuan_train.parallel.transfer import (
    BLOCK,
    WHOLE,
    Holdings,
    Move,
    decode,
    encode,
    local_slices,
    make_buckets,
    message_sizes,
    pack,
    plan_holdings,
    transfer_table,
    unpack,
    view_of,
)
from yuan_train.train.build import build_part

NUM_PAIRS = 64
NUM_LAYERS = 3


def draw_plan(model: ModelConfig, draw: random.Random) -> Plan:
    """A plan of up to three unlike pipelines of up to three stages, widths and replicas as they come."""
    rank, texts, experts = 0, list[str](), list[tuple[int, int] | None]()
    sizes = [] if model.num_experts else model.spec.tensor_sizes(model).values()
    widths = [w for w in (1, 2, 4) if all(size % w == 0 for size in sizes)]
    widths = [1, 2] if model.num_experts else widths
    for _ in range(draw.choice((1, 1, 2, 3))):
        halves = [0.5 * n for n in range(1, 2 * model.num_layers)]
        cuts = sorted(
            draw.sample(halves if draw.random() < 0.3 else range(1, model.num_layers), draw.choice((0, 1, 2)))
        )
        stages = list[str]()
        for first, last in itertools.pairwise([0, *cuts, model.num_layers]):
            width, replicas = draw.choice(widths), draw.choice((1, 1, 2))
            divides = model.num_experts and width > 1 and draw.random() < 0.5
            few = draw.randrange(model.num_experts + 1) if divides else 0
            experts.append((few, model.num_experts - few) if divides else None)
            stages.append(stage_text(last - first, rank, width, replicas))
            rank += width * replicas
        texts.append("1x2: " + " | ".join(stages))
    plan = parse_plan(run_of(model.num_layers, 2 * len(texts)), " / ".join(texts), experts=experts)
    plan = replace(plan, model=model)
    assert not list(validate_plan(plan))
    return plan


@cache
def whole(variant: str) -> dict[str, torch.Tensor]:
    model = Transformer(tiny_model(variant, num_layers=NUM_LAYERS), dtype=torch.float32)
    init_weights(model, seed=3)
    return {name: p.detach() for name, p in model.named_parameters()}


def part(tensor: torch.Tensor, shard: Shard) -> torch.Tensor:
    if shard.rows is not None:
        return tensor[slice(*shard.rows)].clone()
    return part_of(tensor, shard, shard.index, shard.count).reshape(shard.local_shape).clone()


def elements_of(targets: Holdings) -> int:
    """Of the targets' parts: no table that fills them moves fewer."""
    return sum(math.prod(shard.local_shape) for held in targets.values() for shard in held.values())


def check_moves(table: Sequence[Move], sources: Holdings, targets: Holdings) -> None:
    """Each move is of what both its ranks hold, and every element of every target's part comes once."""
    arrived = {
        (rank, name): torch.zeros(shard.local_shape, dtype=torch.int32)
        for rank, held in targets.items()
        for name, shard in held.items()
    }
    for move in table:
        local_slices(sources[move.source][move.name], move)
        arrived[move.target, move.name][local_slices(targets[move.target][move.name], move)] += 1
    assert all(bool((times == 1).all()) for times in arrived.values())


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_drawn_pairs_of_plans_move_every_bit_once(variant: str) -> None:
    """NUM_PAIRS over all architectures; some in bf16 from fp32, in small messages and in one. Then again by
    difference, when a few elements have changed."""
    draw = random.Random(variant)
    model, weights = tiny_model(variant, num_layers=NUM_LAYERS), whole(variant)
    for _ in range(-(-NUM_PAIRS // len(VARIANTS))):
        policy, engines = draw_plan(model, draw), draw_plan(model, draw)
        dtype = draw.choice((torch.float32, torch.bfloat16))
        sources, targets = plan_holdings(policy), plan_holdings(engines, first_rank=policy.world_size)
        table = transfer_table(sources, targets)
        check_moves(table, sources, targets)
        buckets = make_buckets(table, itemsize=dtype.itemsize, limit=draw.choice((20_000, 1 << 30)))
        held = {r: {n: part(weights[n], s) for n, s in own.items()} for r, own in sources.items()}
        got = {
            r: {n: torch.full(s.local_shape, float("nan"), dtype=dtype) for n, s in own.items()}
            for r, own in targets.items()
        }
        sent: list[torch.Tensor] = []
        for bucket in buckets:
            sent.append(pack(bucket, view_of(held[bucket.source], sources[bucket.source]), dtype=dtype))
            unpack(bucket, sent[-1], view_of(got[bucket.target], targets[bucket.target]))
        assert sum(flat.numel() for flat in sent) == elements_of(targets)
        assert all(
            torch.equal(got[rank][name], part(weights[name], shard).to(dtype))
            for rank, own in targets.items()
            for name, shard in own.items()
        )
        newer = {name: torch.where(torch.rand(w.shape) < 0.02, -w, w) for name, w in weights.items()}
        held = {r: {n: part(newer[n], s) for n, s in own.items()} for r, own in sources.items()}
        for bucket, before in zip(buckets, sent, strict=True):
            flat = pack(bucket, view_of(held[bucket.source], sources[bucket.source]), dtype=dtype)
            count, message = encode(flat, before)
            here = pack(bucket, view_of(got[bucket.target], targets[bucket.target]), dtype=dtype)
            assert count != WHOLE and message.nbytes < 0.3 * flat.nbytes or flat.numel() < 100
            if count == WHOLE:
                here.copy_(flat)
            else:
                decode(count, here, message)
            unpack(bucket, here, view_of(got[bucket.target], targets[bucket.target]))
        assert all(
            torch.equal(got[rank][name], part(newer[name], shard).to(dtype))
            for rank, own in targets.items()
            for name, shard in own.items()
        )


@given(
    dtype=st.sampled_from((torch.bfloat16, torch.float32, torch.float64)),
    size=st.sampled_from((0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)),
    share=st.sampled_from((0.0, 1e-4, 0.01, 0.2, 1.0)),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_what_has_changed_makes_the_new_bits_of_the_old(
    dtype: torch.dtype, size: int, share: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    # Any bits: NaN of all kinds, and zeros of both signs.
    old, other = (torch.randint(-(2**15), 2**15, (size,), generator=generator).to(bits) for _ in range(2))
    new = torch.where(torch.rand(size, generator=generator) < share, other, old)
    for sent in (old.view(dtype), None):
        count, message = encode(new.view(dtype), sent)
        assert count == WHOLE if sent is None else count in (WHOLE, int((new != old).sum()))
        if count == WHOLE:
            assert torch.equal(message.view(bits), new)
            continue
        assert message.nbytes == sum(message_sizes(count, new.view(dtype))) < new.nbytes
        found = old.view(dtype).clone()
        decode(count, found, message.clone())
        assert torch.equal(found.view(bits), new)
    count, message = encode(new.view(dtype), old.view(dtype))
    if size > BLOCK and share <= 0.01:
        assert count != WHOLE and message.nbytes < 0.03 * new.nbytes


@pytest.mark.parametrize("variant", ["yuan", "llama", "mixtral"])
def test_holdings_are_what_ranks_build(variant: str) -> None:
    draw, model = random.Random(5), tiny_model(variant)
    for _ in range(4):
        plan = draw_plan(model, draw)
        holdings = plan_holdings(plan)
        for stage in (stage for pipeline in plan.pipelines for stage in pipeline.stages):
            for index, rank in enumerate(stage.replicas[0]):
                assert holdings[rank] == built(model, plan, stage, index)


def built(model: ModelConfig, plan: Plan, stage: StagePlan, index: int) -> Mapping[str, Shard]:
    """The shards of a rank as `parallelize` makes them, of modules on the meta device."""
    from yuan_train.parallel.apply import _experts_of  # pyright: ignore[reportPrivateUsage]

    module = build_part(model, torch.float32, stage)
    spec = ShardSpec(*sharding_of(model), index, len(stage.replicas[0]))
    experts = _experts_of(plan, stage, index)
    shards = shard_parameters(module, replace(spec, experts=experts), device=torch.device("meta"))
    return {name: shard for name, shard in shards.items() if 0 not in shard.local_shape}


def test_a_parameter_that_no_source_holds_is_named() -> None:
    draw, model = random.Random(1), tiny_model("yuan")
    with pytest.raises(KeyError, match="no rank of the sources holds"):
        transfer_table({0: {}}, plan_holdings(draw_plan(model, draw)))


def test_the_nearest_and_the_least_loaded_send() -> None:
    sources = plan_holdings(parse_plan(run_of(4, 2), "1x1: 4@0 / 1x1: 4@1"))
    targets = plan_holdings(parse_plan(run_of(4, 1), "1x1: 4@0"), first_rank=2)
    sent = {0: 0, 1: 0}
    for move in transfer_table(sources, targets):
        sent[move.source] += move.num_elements
    assert max(sent.values()) < 0.6 * sum(sent.values())
    near = transfer_table(sources, targets, node_of=lambda rank: "b" if rank else "a")
    assert {move.source for move in near} == {1}
