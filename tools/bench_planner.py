"""python tools/bench_planner.py [--irregular] [CARDS ...]: time and gap of the planner on large clusters.

With `--irregular`, nodes have 8, 4 and 2 cards and the types unequal shares (seeded); else nodes have eight.
Each size runs in its own process, on one thread. Times are CPU seconds, which other work on the machine does
not change. The gap is to a lower bound that no plan can beat, not to the optimum.
"""

from __future__ import annotations

import json
import os
import random
import resource
import subprocess
import sys
import time

from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.model import ModelConfig
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan

TYPES = ("A100-80G", "A100-40G", "RTX-4090", "H100-80G")
CASES = {64: (3, 48, 256), 256: (4, 84, 1024), 1024: (4, 126, 1024)}
"""By number of cards: types of card, layers, sequences per step."""
CARDS_PER_NODE = 8
NODE_SIZES = (8, 8, 4, 4, 2)
"""Of the irregular clusters, drawn for each node."""


def _regular_nodes(num_cards: int) -> list[tuple[str, int, int]]:
    """(type, nodes, cards of each node): nodes of eight cards, the first type has what does not divide."""
    num_types = CASES[num_cards][0]
    nodes = num_cards // CARDS_PER_NODE
    each = nodes // num_types
    return [
        (name, each if i else nodes - each * (num_types - 1), CARDS_PER_NODE)
        for i, name in enumerate(TYPES[:num_types])
    ]


def _irregular_nodes(num_cards: int) -> list[tuple[str, int, int]]:
    """(type, nodes, cards of each node): sizes of nodes and shares of types are drawn, with a fixed seed."""
    rng = random.Random(num_cards)
    names = TYPES[: CASES[num_cards][0]]
    counts: dict[tuple[str, int], int] = {}
    left = num_cards
    while left:
        size = min(rng.choice(NODE_SIZES), left)
        name = rng.choices(names, weights=range(1, len(names) + 1))[0]
        counts[name, size] = counts.get((name, size), 0) + 1
        left -= size
    return [(name, count, size) for (name, size), count in sorted(counts.items())]


def make_problem(num_cards: int, *, irregular: bool) -> PlanProblem:
    """Nodes connected by InfiniBand, and a model of Yuan 2.0's shape."""
    _, num_layers, batch = CASES[num_cards]
    groups = tuple(
        NodeGroup(
            name=f"{name}-x{size}".lower(),
            device=name,
            count=count,
            devices=size,
            link=Link(bandwidth=300e9, latency=3e-6),
            network=Link(bandwidth=25e9, latency=1e-5),
        )
        for name, count, size in (_irregular_nodes if irregular else _regular_nodes)(num_cards)
    )
    model = ModelConfig(
        name="bench",
        num_layers=num_layers,
        hidden_size=8192,
        num_attention_heads=64,
        ffn_hidden_size=32768,
        vocab_size=135_040,
    )
    return PlanProblem(
        cluster=Cluster(name="bench", nodes=groups),
        model=model,
        sequence_length=4096,
        global_batch_size=batch,
        precision="bf16",
    )


def measure(num_cards: int, *, irregular: bool) -> dict[str, float | int]:
    """Run one search in this process; a row of the table."""
    started = time.process_time()
    found = search_plan(
        make_problem(num_cards, irregular=irregular), SearchConfig(time_limit=600.0), micro_batch_size=1
    )
    return {
        "cards": num_cards,
        "types": CASES[num_cards][0],
        "layers": CASES[num_cards][1],
        "cpu_seconds": time.process_time() - started,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "step_seconds": found.best.step_seconds,
        "gap": found.best.step_seconds / found.lower_bound_seconds - 1,
        "used": found.best.plan.world_size,
        "pipelines": len(found.best.plan.pipelines),
        "stages": len(found.best.plan.pipelines[0].stages),
    }


def main() -> int:
    """Print a Markdown table."""
    words = [word for word in sys.argv[1:] if word != "--irregular"]
    irregular = len(words) < len(sys.argv) - 1
    if words[:1] == ["--one"]:
        print(json.dumps(measure(int(words[1]), irregular=irregular)))
        return 0
    sizes = [int(word) for word in words] or list(CASES)
    kind = ["--irregular"] * irregular
    columns = ["cards", "types", "layers", "CPU s", "peak MiB", "step s", "gap to the bound", "cards used"]
    columns.append("pipelines x stages")
    print(f"| {' | '.join(columns)} |")
    print("|" + "--:|" * len(columns))
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    for size in sizes:
        done = subprocess.run(
            [sys.executable, __file__, *kind, "--one", str(size)],
            capture_output=True,
            text=True,
            env=environment,
        )
        if done.returncode:
            sys.exit(done.stderr)
        row = json.loads(done.stdout)
        print(
            f"| {row['cards']} | {row['types']} | {row['layers']} | {row['cpu_seconds']:.1f} "
            f"| {row['peak_mib']:.0f} | {row['step_seconds']:.1f} | {row['gap']:.0%} | {row['used']} "
            f"| {row['pipelines']} x {row['stages']} |",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
