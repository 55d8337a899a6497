"""python tools/bench_choice.py [--clusters N]: whether more choice ever makes the planner's plan slower.

Plans N random small clusters (2 to 12 cards, 1 to 3 types, from --seed on) with every key of the search left
open, and again with fewer schedules, widths, micro-batch sizes, kinds of recompute, pipelines, replicas or
tiers of memory: on each cluster --chains of the chains below, by chance. Prints each narrower search whose
plan is faster than that of a wider one.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections.abc import Iterator
from typing import Any

from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import GIB, DeviceType
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.model import ModelConfig
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan

WIDEST: dict[str, Any] = {"offload": ("optimizer", "activations")}
CHAINS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"schedule": ("1f1b",)}, {"schedule": ("1f1b", "zero_bubble")}),
    ({"schedule": ("zero_bubble",)}, {"schedule": ("1f1b", "zero_bubble")}),
    ({"tensor": (1,)}, {"tensor": (1, 2)}),
    ({"tensor": (2,)}, {"tensor": (1, 2)}),
    ({"micro_batch_size": (1,)}, {"micro_batch_size": (1, 2)}),
    ({"micro_batch_size": (2,)}, {"micro_batch_size": (1, 2)}),
    ({"recompute": ("none",)}, {"recompute": ("none", "full")}),
    ({"offload": ()}, {"offload": ("optimizer",)}),
    ({"pipelines": (1,)}, {"pipelines": (1, 2)}),
    ({"replicas": (1,)}, {"replicas": (1, 2)}),
    (
        {"schedule": ("1f1b",), "micro_batch_size": (1,), "offload": ()},
        {"schedule": ("1f1b",), "offload": ()},
    ),
)
"""Keys from narrow to wide; the widest search of all, with the keys left open, ends each."""


def main() -> int:
    """Print the violations, and their number and worst; exit code 1 if there are any."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clusters", type=int, default=60, help="random clusters")
    parser.add_argument("--seed", type=int, default=0, help="of the first cluster")
    parser.add_argument("--chains", type=int, default=2, help="of keys from narrow to wide, on each cluster")
    options = parser.parse_args()
    compared = 0
    found: list[float] = []
    for seed in range(options.seed, options.seed + options.clusters):
        started = time.process_time()
        chosen = tuple(random.Random(seed).sample(CHAINS, min(options.chains, len(CHAINS))))
        problem = small_problem(seed)
        for keys, wider, loss in violations(problem, chosen):
            compared += 1
            if loss > 1e-6:
                found.append(loss)
                print(f"seed {seed}: {keys} is {loss:.2%} faster than {wider}", flush=True)
        seconds = time.process_time() - started
        print(f"seed {seed}: {len(problem.cluster.cards)} cards, {seconds:.1f} CPU s", flush=True)
    print(f"{len(found)} of {compared} wider searches are slower, by {max(found, default=0.0):.2%} at most")
    return 1 if found else 0


def violations(
    problem: PlanProblem, chains: tuple[tuple[dict[str, Any], ...], ...]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], float]]:
    """(keys, wider keys, part of its step by which the wider search's plan is slower; 0 or less if it is
    not), of all neighbours in the chains."""
    known: dict[str, float] = {}

    def seconds(keys: dict[str, Any]) -> float:
        if repr(keys) not in known:
            known[repr(keys)] = step_seconds(problem, WIDEST | keys)
        return known[repr(keys)]

    for chain in chains:
        for keys, wider in zip(chain, (*chain[1:], {}), strict=True):
            narrow, wide = seconds(keys), seconds(wider)
            yield keys, wider, 0.0 if math.isinf(narrow) else wide / narrow - 1.0


def step_seconds(problem: PlanProblem, keys: dict[str, Any]) -> float:
    """The step of the plan that these search keys lead to; inf if none fits or can be made."""
    search = SearchConfig(time_limit=600.0, simplicity=0.0, **keys)
    try:
        return search_plan(problem, search, micro_batch_size=1).best.step_seconds
    except (ConfigError, NoPlanFits):
        return math.inf


def small_problem(seed: int) -> PlanProblem:
    """2 to 12 cards of 1 to 3 types with little memory, and a model of 4 to 8 layers."""
    chance = random.Random(seed)
    model = ModelConfig(
        name="small",
        num_layers=chance.randint(4, 8),
        hidden_size=512,
        num_attention_heads=8,
        ffn_hidden_size=2048,
        vocab_size=8192,
        max_sequence_length=512,
        tie_embeddings=chance.random() < 0.5,
    )
    state = 16 * sum(model.unit_parameters)
    counts = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    counts[0] += sum(counts) < 2
    types: dict[str, DeviceType] = {}
    nodes: list[NodeGroup] = []
    for i, count in enumerate(counts):
        name = f"Card{i}"
        rate = chance.choice((5e12, 1e13, 3e13))
        memory = state * chance.choice((0.4, 0.8, 2.0, 8.0)) + 0.1 * GIB
        types[name] = DeviceType(
            memory=int(memory), reserved=0, fp32=rate / 2, bf16=rate, fp16=rate, memory_bandwidth=rate / 20
        )
        near = Link(bandwidth=chance.choice((5e9, 5e10)), latency=1e-5)
        far = Link(bandwidth=chance.choice((5e8, 2e9, 1e10)), latency=3e-5)
        nodes.append(NodeGroup(name=name.lower(), device=name, devices=count, link=near, network=far))
    return PlanProblem(
        cluster=Cluster(name=f"small-{seed}", nodes=tuple(nodes), device_types=types),
        model=model,
        sequence_length=512,
        global_batch_size=chance.choice((6, 8, 12)),
        precision="bf16",
    )


if __name__ == "__main__":
    raise SystemExit(main())
