"""Experts divided by the planner against an even division, on unlike simulated cards, each a process."""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tools.bench.harness import Row, case
from tools.bench.problems import endless
from tools.bench.training import problem_of, train, yuan_train
from tools.testbed.run import with_random_data
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan
from yuan_train.config.run import RunConfig, SearchConfig, load_run
from yuan_train.planner.costs.plan_problem import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.expert_groups import expert_plans
from yuan_train.planner.search.shapes import read_options

SPEEDS = {"Full": 1.0, "Half": 0.5, "Quarter": 0.25}
WARM_UP_STEPS = 2
THIN = 8
"""Width of experts that take about no time."""
LOOPBACK = Link(bandwidth=2e9, latency=100e-6)


@case(
    "training/experts",
    formats={
        **{"forecast s": ".3f", "measured s": ".3f", "off by": "+.1%"},
        **{"no experts s": ".3f", "expert part s": ".3f"},
    },
    steps=(6,),
    slower=(3.0,),
    num_experts=(16,),
    width=(4096,),
    tokens=(128,),
    round=(1,),
)
def experts(
    steps: int, slower: float, num_experts: int, width: int, tokens: int, round: int
) -> Iterator[Row]:
    """Three cards of speeds 1, 1/2 and 1/4 share the experts of a small mixture in one stage.

    The expert part of a step is what it takes more than the same plan with experts of width 8. The cards are
    `slower`, so that no process waits for another's core. `round=[1,2]` profiles anew in each.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, cluster = Path(name), simulated_cards(slower)
        write_text(folder / "cluster.yaml", dump(cluster))
        run, thin = (make_run(folder, num_experts, own, tokens) for own in (width, THIN))
        files = ("--config", folder / "run.yaml", "--cluster", folder / "cluster.yaml")
        yuan_train("profile", *files, "--out", folder / "profile.json", "--seconds", "2")
        costs = make_costs(problem_of(run, cluster, folder / "profile.json"))
        planned = plan_group(costs, run)
        even = tuple(num_experts // len(SPEEDS) + (c < num_experts % len(SPEEDS)) for c in range(len(SPEEDS)))
        for kind, plan in (("planned", planned), ("even", with_counts(planned, even))):
            few = f"train.steps={steps}"
            lines = train(folder / "run.yaml", plan, folder, few)
            thin_lines = train(folder / "thin.yaml", replace(plan, model=thin.model), folder, few)
            seconds, without = (
                statistics.median(line["step_seconds"] for line in own[WARM_UP_STEPS:])
                for own in (lines, thin_lines)
            )
            counts = plan.pipelines[0].stages[0].experts or ()
            shares = shares_of(counts, tokens_of(lines, num_experts))
            forecast = cost_plan(costs, plan).step_seconds
            yield {
                "round": round,
                "counts": kind,
                "on speeds 1, 1/2, 1/4": ", ".join(map(str, counts)),
                "tokens": ", ".join(f"{share:.0%}" for share in shares),
                "forecast s": forecast,
                "measured s": seconds,
                "off by": forecast / seconds - 1,
                "no experts s": without,
                "expert part s": seconds - without,
            }


def simulated_cards(slower: float) -> Cluster:
    """A node for each card; rates are rough values of a core, which the profile replaces."""
    types = {
        name: DeviceType(
            memory=4 << 30, reserved=300 << 20, fp32=6e10, memory_bandwidth=1e10, slowdown=slower / speed
        )
        for name, speed in SPEEDS.items()
    }
    nodes = tuple(NodeGroup(name=name.lower(), device=name, network=LOOPBACK) for name in types)
    return Cluster(name="three", nodes=nodes, device_types=types)


def make_run(folder: Path, num_experts: int, width: int, tokens: int) -> RunConfig:
    """The run of a small mixture with random tokens; its file is run.yaml, or thin.yaml for thin experts."""
    path = folder / ("thin.yaml" if width == THIN else "run.yaml")
    model = {
        "name": "mixture",
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 512,
        "vocab_size": 512,
        "num_experts": num_experts,
        "experts_per_token": 2,
        "expert_ffn_hidden_size": width,
        # At the start, an attention router prefers some experts; this one spreads random tokens evenly.
        "router": "softmax",
        "init_std": 0.1,
        "tie_embeddings": False,
    }
    run = {
        "model": model,
        "data": {
            "train": [{"prefix": "given below"}],
            "sequence_length": tokens,
            "reset_position_ids": False,
        },
        "train": {
            "steps": 1,
            "global_batch_size": 2,
            "precision": "fp32",
            "device": "cpu",
        },
        "optimizer": {"learning_rate": 1e-6},
        "validation": {"every": 0},
        "search": {"recompute": ["none"]},
        "log": {"every": 1},
    }
    path.write_text(yaml.safe_dump(run))
    made = with_random_data(load_run(path), folder)
    write_text(path, dump(made))
    return made


def plan_group(costs: Costs, run: RunConfig) -> Plan:
    """The planner's best plan of one stage over all three cards."""
    options = read_options(
        SearchConfig(tensor=(1, len(SPEEDS)), recompute=("none",)), micro_batch_size=1, model=run.model
    )
    found = expert_plans(endless(costs, options), [])
    return min(found, key=lambda candidate: candidate.step_seconds).plan


def with_counts(plan: Plan, counts: tuple[int, ...]) -> Plan:
    """The plan of one stage with these counts."""
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, experts=counts) for stage in pipeline.stages)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def tokens_of(lines: list[dict[str, Any]], num_experts: int) -> list[int]:
    """The tokens of each expert, over all layers and steps."""
    found = [sum(layer) for line in lines for layer in zip(*line["expert_tokens"], strict=True)]
    return [sum(found[e::num_experts]) for e in range(num_experts)]


def shares_of(counts: tuple[int, ...], tokens: list[int]) -> list[float]:
    """Part of the tokens that each card's experts were given."""
    found: list[float] = []
    first = 0
    for count in counts:
        found.append(sum(tokens[first : first + count]) / sum(tokens))
        first += count
    return found
