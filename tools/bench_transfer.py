"""Weights between unlike plans: the table of a 51B model, and messages in buckets against one a tensor.

    python tools/bench_transfer.py [--ranks 2 3 4] [--layers 8] [--hidden 512]

The ranks are processes of this machine over gloo: the first half holds the policy, one pipeline of uneven
stages, the others hold an engine each. Times are the best of five.
"""

from __future__ import annotations

import argparse
import os
import socket
import time
from dataclasses import replace

import torch
import torch.multiprocessing as mp

from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan
from yuan_train.parallel.device import CPU
from yuan_train.parallel.links import Link, enter_role, join_role, move_weights
from yuan_train.parallel.transfer import (
    Bucket,
    bound_elements,
    check_table,
    make_buckets,
    plan_holdings,
    transfer_table,
)

REPEATS = 5


def plan_of(model: ModelConfig, pipelines: list[list[tuple[int, int]]]) -> Plan:
    """A plan of pipelines of (layers, width) for each stage."""
    rank, made = 0, list[PipelinePlan]()
    for stages in pipelines:
        first, parts = 0, list[StagePlan]()
        for layers, width in stages:
            parts.append(
                StagePlan(
                    replicas=(tuple(range(rank, rank + width)),),
                    layers=(first, first + layers),
                    embedding=first == 0,
                    head=first + layers == model.num_layers,
                )
            )
            first, rank = first + layers, rank + width
        made.append(PipelinePlan(micro_batch_size=1, num_micro_batches=1, stages=tuple(parts)))
    ranks = tuple(RankPlan(rank=r, device=f"node-{r // 8}/{r % 8}", type="A100-80G") for r in range(rank))
    return Plan(
        model=model, sequence_length=8, global_batch_size=len(made), ranks=ranks, pipelines=tuple(made)
    )


def table_of_51b() -> None:
    """2 pipelines of 4 uneven stages of width 8, to 16 engines of width 4."""
    model = load_model("configs/model/yuan2-51b.yaml")
    policy = plan_of(model, [[(11, 8), (11, 8), (10, 8), (10, 8)]] * 2)
    engines = plan_of(model, [[(42, 4)]] * 16)
    began = time.process_time()
    sources, targets = plan_holdings(policy), plan_holdings(engines, first_rank=policy.world_size)
    table = transfer_table(sources, targets)
    seconds = time.process_time() - began
    began = time.process_time()
    check_table(table, sources, targets)
    moved = sum(move.num_elements for move in table)
    load: dict[int, int] = {}
    for move in table:
        load[move.source] = load.get(move.source, 0) + 2 * move.num_elements
    pairs = len({(move.source, move.target) for move in table})
    bound = 2 * bound_elements(targets) / 1e9
    print(
        f"{model.name}, 64 to 64: {len(table)} moves in {pairs} pairs, {2 * moved / 1e9:.1f} GB in bf16, "
        f"bound {bound:.1f} GB; busiest sender {max(load.values()) / 1e9:.2f} GB, idlest "
        f"{min(load.values()) / 1e9:.2f}; table in {seconds:.1f} CPU s, checked in "
        f"{time.process_time() - began:.1f} s"
    )


def run_rank(rank: int, num_ranks: int, model: ModelConfig, port: int) -> None:
    """One process: move the weights in buckets, then box by box."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    num_policy = max(num_ranks // 2, 1)
    cut = [model.num_layers * 2 // 3, model.num_layers - model.num_layers * 2 // 3]
    policy = plan_of(model, [[(cut[0], 1), (cut[1], 1)] if num_policy == 2 else [(model.num_layers, 1)]])
    engines = plan_of(model, [[(model.num_layers, 1)]] * (num_ranks - num_policy))
    roles = {"policy": range(num_policy), "generation": range(num_policy, num_ranks)}
    position = join_role(roles, startup_seconds=60)
    enter_role(position, device=CPU, timeout_seconds=60)
    link = Link("weights", range(num_ranks), position, timeout_seconds=60)
    sources, targets = plan_holdings(policy), plan_holdings(engines, first_rank=num_policy)
    table = transfer_table(sources, targets)
    own = (sources | targets)[rank]
    tensors = {name: torch.ones(shard.local_shape) for name, shard in own.items()}
    ways = {
        "buckets": [make_buckets(table, itemsize=4)],
        "a tensor at a time": [[Bucket(move.source, move.target, (move,))] for move in table],
    }
    seconds: dict[str, float] = {}
    for name, parts in ways.items():
        for _ in range(REPEATS):
            barrier(link, rank, num_ranks)
            began = time.perf_counter()
            for buckets in parts:
                move_weights(buckets, tensors, own, link=link, job_rank=rank, dtype=torch.float32)
            barrier(link, rank, num_ranks)
            seconds[name] = min(seconds.get(name, 1e9), time.perf_counter() - began)
    if rank == 0:
        bytes_ = 4 * bound_elements(targets)
        source = torch.ones(bytes_ // 4)
        copy = min(timed_copy(source) for _ in range(REPEATS))
        ratio = seconds["a tensor at a time"] / seconds["buckets"]
        ways_words = ", ".join(f"{name} {1e3 * value:.0f} ms" for name, value in seconds.items())
        print(
            f"{num_policy} to {num_ranks - num_policy} ranks over gloo, {len(table)} boxes, "
            f"{bytes_ / 1e6:.0f} MB: {ways_words} ({ratio:.2f} x); one copy in memory {1e3 * copy:.0f} ms, "
            f"{copy / seconds['buckets']:.0%} of the buckets' time"
        )


def timed_copy(source: torch.Tensor) -> float:
    """Seconds of one copy."""
    target = torch.empty_like(source)
    began = time.perf_counter()
    target.copy_(source)
    return time.perf_counter() - began


def barrier(link: Link, rank: int, num_ranks: int) -> None:
    """Wait for all ranks of a link."""
    token = torch.zeros(1)
    for other in range(1, num_ranks):
        if rank == 0:
            link.receive(token, other)()
            link.send(token, other)()
        elif rank == other:
            link.send(token, 0)()
            link.receive(token, 0)()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 3, 4])
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--hidden", type=int, default=256)
    arguments = parser.parse_args()
    table_of_51b()
    model = load_model("configs/model/tiny.yaml")
    hidden = arguments.hidden
    model = replace(model, num_layers=arguments.layers, hidden_size=hidden, ffn_hidden_size=4 * hidden)
    model = replace(model, head_dim=hidden // model.num_attention_heads)
    for num_ranks in arguments.ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        mp.spawn(run_rank, (num_ranks, model, port), num_ranks)


if __name__ == "__main__":
    main()
