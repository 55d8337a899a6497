"""Small problems for the tests, and a brute force that shares no code with the planner."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CASES: dict[str, Any] = {
    entry["case"]["name"]: entry
    for entry in json.loads((Path(__file__).parents[1] / "golden" / "planner_cases.json").read_text())[
        "cases"
    ]
}


def random_case(seed: int) -> dict[str, Any]:
    """A small random case in the schema of planner_cases.json; its links range from free to slower than the
    compute."""
    rng = np.random.default_rng(seed)
    num_devices, num_layers = int(rng.integers(1, 5)), int(rng.integers(4, 9))
    kinds = ["X", "Y", "Z"][: int(rng.integers(1, 4))]
    speed = {kind: float(rng.uniform(0.3, 3.0)) for kind in kinds}
    layers = []
    for _ in range(num_layers):
        seconds = float(rng.uniform(0.5, 2.0))
        ratio = float(rng.uniform(1.0, 3.0))
        layers.append(
            {
                "fwd": {kind: seconds / speed[kind] for kind in kinds},
                "bwd": {kind: seconds * ratio / speed[kind] for kind in kinds},
                "weight_bytes": int(rng.integers(1, 40)),
                "act_bytes": int(rng.integers(1, 10)),
                "out_bytes": int(rng.integers(1, 10)),
            }
        )
    slowness = float(rng.choice([0.0, 0.05, 0.5]))
    links = rng.uniform(0.0, 1.0, size=(2, num_devices, num_devices))
    tight = float(rng.choice([0.6, 1.2, 10.0]))
    total = sum(layer["weight_bytes"] + 3 * layer["act_bytes"] for layer in layers)
    return {
        "num_microbatches": int(rng.integers(1, 9)),
        "layers": layers,
        "devices": [
            {
                "type": str(rng.choice(kinds)),
                "mem_bytes": int(tight * total / num_devices * rng.uniform(0.7, 1.5)) + 5,
                "reserved_bytes": 5,
            }
            for _ in range(num_devices)
        ],
        "links": {
            "latency": (slowness * links[0]).tolist(),
            "bandwidth": (5.0 / (slowness + 1e-6) * (0.1 + links[1])).tolist(),
        },
        "order": rng.permutation(num_devices).tolist() if rng.random() < 0.2 else None,
        "use_all_devices": bool(rng.random() < 0.5) or num_devices > num_layers,
        "overlap": bool(rng.random() < 0.7),
    }


def brute_force(case: dict[str, Any]) -> float | None:
    """Step seconds of the fastest plan that fits, by trying all of them; None if none fits."""
    plans = (plan for plan in _all_plans(case) if _fits(case, *plan))
    return min((event_simulation(case, *plan) for plan in plans), default=None)


def _all_plans(case: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    num_devices, num_layers = len(case["devices"]), len(case["layers"])
    devices = case["order"] or range(num_devices)
    for length in [num_devices] if case["use_all_devices"] else range(1, num_devices + 1):
        orders = (
            itertools.combinations(devices, length)
            if case["order"]
            else itertools.permutations(devices, length)
        )
        for order in orders:
            for cuts in itertools.combinations(range(1, num_layers), length - 1):
                ends = (0, *cuts, num_layers)
                yield order, tuple(b - a for a, b in itertools.pairwise(ends))


def _fits(case: dict[str, Any], order: tuple[int, ...], counts: tuple[int, ...]) -> bool:
    first = 0
    for stage, (device, count) in enumerate(zip(order, counts, strict=True)):
        layers = case["layers"][first : first + count]
        first += count
        in_flight = min(len(order) - stage, case["num_microbatches"])
        card = case["devices"][device]
        needed = card["reserved_bytes"] + sum(x["weight_bytes"] + in_flight * x["act_bytes"] for x in layers)
        if needed > card["mem_bytes"]:
            return False
    return True


def event_simulation(case: dict[str, Any], order: tuple[int, ...], counts: tuple[int, ...]) -> float:
    """Step seconds of 1F1B, simulated independently: each stage is a list of operations, run until all are
    done."""
    m, stages = case["num_microbatches"], len(order)
    ends = list(itertools.accumulate(counts, initial=0))
    types = [case["devices"][device]["type"] for device in order]
    parts = [case["layers"][a:b] for a, b in itertools.pairwise(ends)]
    seconds = {
        kind: [sum(layer[kind][t] for layer in part) for part, t in zip(parts, types, strict=True)]
        for kind in ("fwd", "bwd")
    }

    def link(a: int, b: int) -> float:
        size = case["layers"][ends[min(a, b) + 1] - 1]["out_bytes"]
        i, j = order[a], order[b]
        return case["links"]["latency"][i][j] + size / case["links"]["bandwidth"][i][j]

    todo: list[list[tuple[str, int]]] = []
    for s in range(stages):
        warm = min(stages - 1 - s, m)
        work = [("fwd", k) for k in range(warm)]
        for k in range(m - warm):
            work += [("fwd", warm + k), ("bwd", k)]
        todo.append(work + [("bwd", k) for k in range(m - warm, m)])
    arrived = {("fwd", 0, k): 0.0 for k in range(m)} | {("bwd", stages - 1, k): 0.0 for k in range(m)}
    clock, last, wire = [0.0] * stages, [0.0] * stages, dict[tuple[int, int], float]()
    while any(todo):
        for s in range(stages):
            while todo[s] and (todo[s][0][0], s, todo[s][0][1]) in arrived:
                kind, k = todo[s].pop(0)
                clock[s] = last[s] = max(clock[s], arrived[kind, s, k]) + seconds[kind][s]
                target = s + 1 if kind == "fwd" else s - 1
                if 0 <= target < stages:
                    arrival = max(clock[s], wire.get((s, target), 0.0)) + link(s, target)
                    wire[s, target] = arrived[kind, target, k] = arrival
                    if not case["overlap"]:
                        clock[s] = arrival
    return max(last)
