"""python -m tools.bench_experts: experts divided by the planner against an even division, on unlike cards.

Three simulated cards of speeds 1, 1/2 and 1/4, each a process, share the experts of a small mixture in one
stage. Profiles them, lets the planner count, then trains some steps under its counts and under even ones, on
random tokens. The expert part of a step is what it takes more than the same plan with experts of width 8. The
cards are slowed further (`--slower`), so that no process waits for another's core, which a plan does not
model. Profiles anew in each round, because a virtual machine changes its speed within minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from tools.testbed.run import with_random_data
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import load_profile
from yuan_train.config.run import RunConfig, SearchConfig, load_run
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.expert_groups import expert_plans
from yuan_train.planner.search.shapes import read_options
from yuan_train.profile.units import machine_name

SPEEDS = {"Full": 1.0, "Half": 0.5, "Quarter": 0.25}
WARM_UP_STEPS = 2
THIN = 8
"""Width of experts that take about no time."""
LOOPBACK = Link(bandwidth=2e9, latency=100e-6)


@dataclass(frozen=True)
class Measured:
    """Some steps under one division of the experts."""

    counts: tuple[int, ...]
    forecast: float
    """Seconds of a step."""
    seconds: float
    thin_seconds: float
    """The same with thin experts."""
    shares: list[float]
    """Of the tokens, by card."""

    @property
    def expert_seconds(self) -> float:
        """The expert part of a step."""
        return self.seconds - self.thin_seconds


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6, help=f"{WARM_UP_STEPS} of them warm-up")
    parser.add_argument("--slower", type=float, default=3.0, help="factor for all three cards")
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096, help="of an expert")
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS or options.rounds < 1:
        parser.error(f"wanted more than {WARM_UP_STEPS} steps, and at least one round")
    rounds: list[tuple[Measured, Measured]] = []
    with tempfile.TemporaryDirectory() as name:
        for _ in range(options.rounds):
            rounds.append(measure(options, Path(name)))
    print("\n".join(table(rounds)))
    return 0


def measure(options: argparse.Namespace, folder: Path) -> tuple[Measured, Measured]:
    """Profile and plan; then train under the planned counts, and under even ones."""
    cluster = simulated_cards(options.slower)
    write_text(folder / "cluster.yaml", dump(cluster))
    run, thin = (make_run(folder, options, width) for width in (options.width, THIN))
    profile = folder / "profile.json"
    files = ["--config", folder / "run.yaml", "--cluster", folder / "cluster.yaml", "--out", profile]
    yuan_train("profile", *files, "--seconds", "2")
    costs = make_costs(
        PlanProblem(
            cluster=cluster,
            model=run.model,
            sequence_length=run.data.sequence_length,
            global_batch_size=run.train.global_batch_size,
            precision=run.train.precision,
            profile=load_profile(profile),
        )
    )
    planned = plan_group(costs, run)
    done: list[Measured] = []
    for plan in (planned, with_counts(planned, even_counts(options.experts, len(SPEEDS)))):
        seconds, tokens = train(folder, run, plan, options.steps)
        thin_seconds, _ = train(folder, thin, replace(plan, model=thin.model), options.steps)
        counts = plan.pipelines[0].stages[0].experts or ()
        done.append(
            Measured(
                counts=counts,
                forecast=cost_plan(costs, plan).step_seconds,
                seconds=seconds,
                thin_seconds=thin_seconds,
                shares=shares_of(counts, tokens),
            )
        )
    return done[0], done[1]


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


def make_run(folder: Path, options: argparse.Namespace, width: int) -> RunConfig:
    """The run of a small mixture with random tokens; its file is run.yaml, or thin.yaml for thin experts."""
    path = folder / ("thin.yaml" if width == THIN else "run.yaml")
    model = {
        "name": "mixture",
        "num_layers": 2,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "ffn_hidden_size": 512,
        "vocab_size": 512,
        "num_experts": options.experts,
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
            "sequence_length": options.tokens,
            "reset_position_ids": False,
        },
        "train": {
            "steps": options.steps,
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
    cards = costs.problem.cluster.cards
    found = expert_plans(costs, cards, options, [], stopped=lambda: False)
    return min(found, key=lambda candidate: candidate.step_seconds).plan


def with_counts(plan: Plan, counts: tuple[int, ...]) -> Plan:
    """The plan of one stage with these counts."""
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, experts=counts) for stage in pipeline.stages)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def even_counts(experts: int, cards: int) -> tuple[int, ...]:
    """As even as possible, the first ones one more."""
    return tuple(experts // cards + (card < experts % cards) for card in range(cards))


def train(folder: Path, run: RunConfig, plan: Plan, steps: int) -> tuple[float, list[int]]:
    """Median seconds of a step after the warm-up, and the tokens of each expert, over all layers."""
    thin = run.model.expert_ffn_hidden_size == THIN
    save_plan(folder / "plan.yaml", plan)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    files = ["--config", folder / ("thin.yaml" if thin else "run.yaml"), "--plan", folder / "plan.yaml"]
    yuan_train("launch", *files, f"train.steps={steps}", f"log.directory={folder}")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    tokens = [sum(layer) for line in lines for layer in zip(*line["expert_tokens"], strict=True)]
    experts = run.model.num_experts
    totals = [sum(tokens[e::experts]) for e in range(experts)]
    return statistics.median(line["step_seconds"] for line in lines[WARM_UP_STEPS:]), totals


def shares_of(counts: tuple[int, ...], tokens: list[int]) -> list[float]:
    """Part of the tokens that each card's experts were given."""
    found: list[float] = []
    first = 0
    for count in counts:
        found.append(sum(tokens[first : first + count]) / sum(tokens))
        first += count
    return found


def yuan_train(*arguments: str | Path) -> None:
    """Run a `yuan-train` command; its output is shown only if it fails."""
    command = [sys.executable, "-m", "yuan_train", *map(str, arguments)]
    print(f"{time.strftime('%X')} yuan-train {arguments[0]}", file=sys.stderr, flush=True)
    done = subprocess.run(
        command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)


def table(rounds: list[tuple[Measured, Measured]]) -> list[str]:
    """Markdown: a row for each division and round."""
    lines = [
        f"Machine: {machine_name()}",
        "",
        "| counts | experts on speeds 1, 1/2, 1/4 | tokens | forecast s | measured s | off by "
        "| no experts s | expert part s |",
        "|---|---|---|--:|--:|--:|--:|--:|",
    ]
    for pair in rounds:
        for name, one in zip(("planned", "even"), pair, strict=True):
            shares = ", ".join(f"{share:.0%}" for share in one.shares)
            lines.append(
                f"| {name} | {', '.join(map(str, one.counts))} | {shares} | {one.forecast:.3f} "
                f"| {one.seconds:.3f} | {one.forecast / one.seconds - 1:+.1%} | {one.thin_seconds:.3f} "
                f"| {one.expert_seconds:.3f} |"
            )
    ratios = [
        (even.expert_seconds / planned.expert_seconds, even.seconds / planned.seconds)
        for planned, even in rounds
    ]
    words = "; ".join(f"expert part {part:.2f}, step {step:.2f}" for part, step in ratios)
    return [*lines, "", f"Even over planned: {words}."]


if __name__ == "__main__":
    sys.exit(main())
