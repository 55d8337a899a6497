"""python tools/bench_forecast.py: forecast against truth at three uneven cuts over simulated cards.

Profiles this machine, forecasts three hand-made cuts from the profile, trains a few steps under each, and
sets step time and peak memory of every process beside the forecast. Needs the quick start's data.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.plan import Plan, save_plan
from yuan_train.config.profile import load_profile
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.candidates import PipelineCut, assemble_plan
from yuan_train.planner.cost import Costs, PlanCost, Setting, cost_plan, make_costs
from yuan_train.train.measure import machine_name

WARM_UP_STEPS = 3
MODEL = ("num_layers=6", "hidden_size=256", "num_attention_heads=4", "head_dim=64", "ffn_hidden_size=1024")
CUTS = ((4, 1, 1), (3, 2, 1), (2, 3, 1))
"""Layers of each stage, fast card first."""


@dataclass(frozen=True)
class Row:
    """One cut: what was forecast, and what was measured."""

    layers: tuple[int, ...]
    cost: PlanCost
    seconds: float
    peak_bytes: list[int]


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", default="configs/cluster/laptop.yaml", metavar="FILE")
    parser.add_argument("--config", default="configs/run/tiny.yaml", metavar="FILE")
    parser.add_argument("--steps", type=int, default=10, help="steps per cut, three of them warm-up")
    options = parser.parse_args()
    changes = [*(f"model.{word}" for word in MODEL), "train.device=cpu"]
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, changes, Path(folder))
    print("\n".join(table(rows)))
    return 0


def measure(options: argparse.Namespace, changes: list[str], folder: Path) -> list[Row]:
    """Profile, then forecast and train each cut."""
    profile = folder / "profile.json"
    files = ["--config", options.config, "--cluster", options.cluster]
    yuan_train("profile", *files, "--out", profile, *changes)
    run = load_run(options.config, tuple(changes))
    costs = make_costs(_setting(run, load_cluster(options.cluster), profile))
    rows: list[Row] = []
    for layers in CUTS:
        plan = cut_plan(costs, run, layers)
        seconds, peaks = train(plan, options, changes, folder)
        rows.append(Row(layers, cost_plan(costs, plan), seconds, peaks))
    return rows


def cut_plan(costs: Costs, run: RunConfig, layers: tuple[int, ...]) -> Plan:
    """One pipeline over the cluster's cards in their order, so many layers each."""
    bounds = [0, *(1 + sum(layers[: s + 1]) for s in range(len(layers)))]
    bounds[-1] += 1
    cut = PipelineCut(
        micro_batch_size=run.train.micro_batch_size,
        num_micro_batches=run.train.global_batch_size // run.train.micro_batch_size,
        places=tuple(((card,),) for card in costs.setting.cluster.cards),
        bounds=tuple(bounds),
        recompute=("none",) * len(layers),
    )
    return assemble_plan(costs, [cut], schedule="1f1b")


def train(
    plan: Plan, options: argparse.Namespace, changes: list[str], folder: Path
) -> tuple[float, list[int]]:
    """Median step time after the warm-up, and each process's peak memory."""
    save_plan(folder / "plan.yaml", plan)
    log = folder / "log"
    (log / "metrics.jsonl").unlink(missing_ok=True)
    own = [f"train.steps={options.steps}", f"log.directory={log}", "log.every=1", "checkpoint.directory="]
    command = ["launch", "--config", options.config, "--plan", folder / "plan.yaml"]
    yuan_train(*command, *changes, *own, "validation.every=0")
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return statistics.median(line["step_seconds"] for line in lines[WARM_UP_STEPS:]), lines[-1][
        "peak_memory_bytes"
    ]


def _setting(run: RunConfig, cluster: Cluster, profile: Path) -> Setting:
    return Setting(
        cluster=cluster,
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        precision=run.train.precision,
        profile=load_profile(profile),
    )


def yuan_train(*arguments: str | Path) -> None:
    """Run a command; its words are shown only if it fails."""
    command = [sys.executable, "-m", "yuan_train", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        sys.exit(done.stderr)


def table(rows: list[Row]) -> list[str]:
    """Markdown: step time and memory, forecast and measured."""
    lines = [
        f"Machine: {machine_name()}",
        "",
        "| layers | forecast s | measured s | off by | peak memory forecast, MiB | measured, MiB | off by |",
        "|---|--:|--:|--:|---|---|---|",
    ]
    for row in rows:
        forecast = row.cost.step_seconds
        peaks = [stage.memory.total for stage in row.cost.stages]
        pairs = list(zip(peaks, row.peak_bytes, strict=True))
        lines.append(
            f"| {', '.join(map(str, row.layers))} | {forecast:.3f} | {row.seconds:.3f} "
            f"| {forecast / row.seconds - 1:+.1%} | {', '.join(f'{p / 2**20:.0f}' for p in peaks)} "
            f"| {', '.join(f'{m / 2**20:.0f}' for m in row.peak_bytes)} "
            f"| {', '.join(f'{p / m - 1:+.1%}' for p, m in pairs)} |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
