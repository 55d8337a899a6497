"""Roles with worlds of their own, weights over a link between unlike plans, and the loss of a rank."""

import math
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.parallel.test_grid import run_of
from tests.parallel.test_transfer import elements_of, part, whole
from tests.support.models import tiny_model
from tests.support.project import parse_plan
from tests.support.spawn import as_rank, free_port, patience, spawn
from yuan_train.config.plan import Plan
from yuan_train.parallel.board import join_role
from yuan_train.parallel.device import CPU
from yuan_train.parallel.groups import enter_role
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.transfer import (
    Outlet,
    RankLink,
    make_buckets,
    plan_holdings,
    take_weights,
    transfer_table,
)
from yuan_train.parallel.transport import LostPeer


def plan_of(text: str) -> Plan:
    return replace(parse_plan(run_of(3, text.count("/") + 1), text), model=tiny_model("yuan", num_layers=3))


POLICY = plan_of("1x1: 1.5@0,1 | 1.5@2")
ENGINES = plan_of("1x1: 1@0 | 2@1,2 / 1x1: 3@3")


def scattered(local: torch.Tensor, shard: Shard) -> torch.Tensor:
    """With another bit in each element whose place in the whole tensor says so, 1 of 100."""
    places = part(torch.arange(math.prod(shard.shape)).view(shard.shape), shard)
    return torch.where(places % 100 == 7, local.bfloat16() * 1.01, local)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int16)


def run_roles(rank: int, port: int, folder: Path) -> None:
    """Policy and engines move weights; then a rank of an engine is gone."""
    policy, engines = POLICY, ENGINES
    roles = {
        "policy": range(policy.world_size),
        "generation": range(policy.world_size, policy.world_size + engines.world_size),
    }
    as_rank(rank, roles["generation"].stop, port)
    position = join_role(roles, startup_seconds=60)
    enter_role(position, device=CPU, timeout_seconds=20)
    token = torch.ones(1)
    dist.all_reduce(token)
    assert token.item() == dist.get_world_size() == len(roles[position.role])
    assert dist.get_rank() == position.rank
    link = RankLink("weights", range(roles["generation"].stop), position, timeout_seconds=20)
    holdings = plan_holdings(policy) | plan_holdings(engines, first_rank=policy.world_size)
    targets = {r: holdings[r] for r in roles["generation"]}
    table = transfer_table({r: holdings[r] for r in roles["policy"]}, targets)
    own = holdings[rank]
    weights = {name: part(tensor, own[name]) for name, tensor in whole("yuan").items() if name in own}
    tensors = {name: torch.zeros(w.shape, dtype=torch.bfloat16) for name, w in weights.items()}
    buckets = make_buckets(table, itemsize=2, limit=20_000)
    common = {"link": link, "dtype": torch.bfloat16}
    outlet = Outlet(buckets, **common, by_difference=True)
    for version in range(4):
        if version == 2:
            # A few elements of each, and in version 3 all.
            weights = {name: scattered(w, own[name]) for name, w in weights.items()}
        elif version == 3:
            weights = {name: -w for name, w in weights.items()}
        if rank in roles["policy"]:
            sent, waits = outlet.post(weights, own)
            (folder / f"sent-{version}-{rank}").write_text(str(sent))
            for wait in waits:
                wait()
        else:
            take_weights(buckets, tensors, own, **common)
            assert all(torch.equal(bits(tensors[n]), bits(w.bfloat16())) for n, w in weights.items())
    lost = roles["generation"].stop - 1
    if rank == lost:
        os._exit(0)
    if rank == 0:
        began = time.monotonic()
        with pytest.raises(LostPeer, match=f"generation rank {len(targets) - 1} .rank {lost} of the job"):
            link.receive(torch.empty(1), lost)()
        assert time.monotonic() - began < patience(10)
    if rank in roles["policy"]:
        dist.all_reduce(token)
        assert token.item() == len(roles["policy"]) ** 2
    (folder / f"done-{rank}").touch()


def test_roles_move_weights_and_see_a_loss(tmp_path: Path) -> None:
    spawn(run_roles, POLICY.world_size + ENGINES.world_size, free_port(), tmp_path)
    sent = [sum(int(p.read_text()) for p in tmp_path.glob(f"sent-{version}-*")) for version in range(4)]
    whole_bytes = 2 * elements_of(plan_holdings(ENGINES))
    assert sent[0] == sent[3] == whole_bytes
    assert sent[1] < 0.01 * whole_bytes < sent[2] < 0.05 * whole_bytes
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(POLICY.world_size))
