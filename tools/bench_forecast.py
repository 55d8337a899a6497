"""python tools/bench_forecast.py: forecast against measurement for three uneven cuts over simulated cards.

Profiles this machine, forecasts three hand-made cuts from the profile, trains a few steps under each, and
prints step time and peak memory of every process beside the forecast. Each round profiles again, because a
virtual machine changes its speed within minutes. The cards are slowed further (`--slower`), so that their
processes do not wait for each other's cores, which a plan does not model. Needs the quick start's data.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import load_profile
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.shapes import PipelineCut, assemble_plan
from yuan_train.profile.units import machine_name

WARM_UP_STEPS = 3
MODEL = ("num_layers=6", "hidden_size=256", "num_attention_heads=4", "head_dim=64", "ffn_hidden_size=1024")
CUTS = ((4, 1, 1), (3, 2, 1), (2, 3, 1))
"""Layers of each stage, fast card first."""


@dataclass(frozen=True)
class Round:
    """One training: what was forecast from its profile, and what was measured."""

    cost: PlanCost
    seconds: float
    peak_bytes: list[int]

    @property
    def time_error(self) -> float:
        """How far the forecast step time is off; -0.1: 10 % low."""
        return self.cost.step_seconds / self.seconds - 1

    @property
    def memory_errors(self) -> list[float]:
        """How far the forecast peak memory of each process is off."""
        pairs = zip(self.cost.stages, self.peak_bytes, strict=True)
        return [stage.memory.total / peak - 1 for stage, peak in pairs]


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", default="configs/cluster/laptop.yaml", metavar="FILE")
    parser.add_argument("--config", default="configs/run/tiny.yaml", metavar="FILE")
    parser.add_argument("--steps", type=int, default=10, help="steps per cut, three of them warm-up")
    parser.add_argument(
        "--slower",
        type=float,
        default=4 / 3,
        help="factor by which simulated cards are slowed down (4/3: the quick start's to 1/2, 1/4 and 1/8)",
    )
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], default="cpu", help="cuda: of the cluster's cards"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds: profile, then the three cuts")
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS or options.rounds < 1 or not 0 < options.slower < math.inf:
        parser.error(f"wanted more than {WARM_UP_STEPS} steps, at least one round, --slower above 0")
    changes = [*(f"model.{word}" for word in MODEL), f"train.device={options.device}"]
    rounds: dict[tuple[int, ...], list[Round]] = {layers: [] for layers in CUTS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(options.rounds):
            measure(options, changes, Path(folder), rounds)
    print("\n".join(table(rounds)))
    return 0


def measure(
    options: argparse.Namespace,
    changes: list[str],
    folder: Path,
    rounds: dict[tuple[int, ...], list[Round]],
) -> None:
    """Profile, then forecast and train each cut; adds a round for each to `rounds`."""
    profile, cluster_file = folder / "profile.json", folder / "cluster.yaml"
    cluster = slow_down(load_cluster(options.cluster), options.slower)
    write_text(cluster_file, dump(cluster))
    files = ["--config", options.config, "--cluster", cluster_file]
    yuan_train("profile", *files, "--out", profile, *changes)
    run = load_run(options.config, tuple(changes))
    costs = make_costs(_make_problem(run, cluster, profile))
    for layers, done in rounds.items():
        plan = cut_plan(costs, run, layers)
        seconds, peaks = train(plan, options, changes, folder)
        done.append(Round(cost_plan(costs, plan), seconds, peaks))


def slow_down(cluster: Cluster, times: float) -> Cluster:
    """The cluster with its simulated cards `times` times slower."""
    types = {
        name: replace(device, slowdown=times * device.slowdown) if device.slowdown else device
        for name, device in cluster.device_types.items()
    }
    return replace(cluster, device_types=types)


def cut_plan(costs: Costs, run: RunConfig, layers: tuple[int, ...]) -> Plan:
    """One pipeline over the cluster's cards in their order, `layers[s]` layers on card s."""
    bounds = [0, *(1 + sum(layers[: s + 1]) for s in range(len(layers)))]
    bounds[-1] += 1
    cut = PipelineCut(
        micro_batch_size=run.train.micro_batch_size,
        num_micro_batches=run.train.global_batch_size // run.train.micro_batch_size,
        stage_groups=tuple(((card,),) for card in costs.problem.cluster.cards),
        bounds=tuple(bounds),
        recompute=("none",) * len(layers),
    )
    return assemble_plan(costs, [cut], schedule="1f1b")


def train(
    plan: Plan, options: argparse.Namespace, changes: list[str], folder: Path
) -> tuple[float, list[int]]:
    """Median step time after the warm-up in seconds, and each process's peak memory in bytes."""
    save_plan(folder / "plan.yaml", plan)
    log = folder / "log"
    (log / "metrics.jsonl").unlink(missing_ok=True)
    own_changes = [
        f"train.steps={options.steps}",
        f"log.directory={log}",
        "log.every=1",
        "checkpoint.directory=",
    ]
    command = ["launch", "--config", options.config, "--plan", folder / "plan.yaml"]
    yuan_train(*command, *changes, *own_changes, "validation.every=0")
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_seconds"] for line in lines[WARM_UP_STEPS:]), lines[-1][
        "peak_memory_bytes"
    ]


def _make_problem(run: RunConfig, cluster: Cluster, profile: Path) -> PlanProblem:
    return PlanProblem(
        cluster=cluster,
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        precision=run.train.precision,
        profile=load_profile(profile),
    )


def yuan_train(*arguments: str | Path) -> None:
    """Run a `yuan-train` command; its output is shown only if it fails."""
    command = [sys.executable, "-m", "yuan_train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(done.stderr)


def table(rounds: dict[tuple[int, ...], list[Round]]) -> list[str]:
    """Markdown: step time and peak memory, forecast and measured, medians of the rounds."""
    lines = [
        f"Machine: {machine_name()}",
        "",
        "| layers | forecast s | measured s | off by, median of rounds (each) "
        "| peak memory forecast, MiB | measured, MiB | off by |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    for layers, done in rounds.items():
        forecast = statistics.median(one.cost.step_seconds for one in done)
        measured = statistics.median(one.seconds for one in done)
        errors = [one.time_error for one in done]
        peaks = _by_rank([[stage.memory.total for stage in one.cost.stages] for one in done])
        measured_peaks = _by_rank([one.peak_bytes for one in done])
        off = _by_rank([one.memory_errors for one in done])
        lines.append(
            f"| {', '.join(map(str, layers))} | {forecast:.3f} | {measured:.3f} "
            f"| {statistics.median(errors):+.1%} ({', '.join(f'{error:+.1%}' for error in errors)}) "
            f"| {', '.join(f'{peak / 2**20:.0f}' for peak in peaks)} "
            f"| {', '.join(f'{peak / 2**20:.0f}' for peak in measured_peaks)} "
            f"| {', '.join(f'{error:+.1%}' for error in off)} |"
        )
    return lines


def _by_rank(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Each rank's median over the rounds."""
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


if __name__ == "__main__":
    sys.exit(main())
