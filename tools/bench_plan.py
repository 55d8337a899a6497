"""python tools/bench_plan.py: the planned uneven cut against the even split, forecast and measured.

Profiles this machine, plans for the simulated cards of a cluster, trains a few steps under the two cuts in
turn, and prints forecast and measured step times. Needs the quick start's data.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from yuan_train.config.cluster import load_cluster
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import load_profile
from yuan_train.config.run import load_run
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import Candidate, search_plan
from yuan_train.profile.units import machine_name

WARM_UP_STEPS = 3


@dataclass(frozen=True)
class Row:
    """One cut: the planned candidate with its forecast, and the step times of all rounds."""

    name: str
    candidate: Candidate
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cluster", default="configs/cluster/laptop.yaml", metavar="FILE")
    parser.add_argument("--model", default="configs/model/tiny.yaml", metavar="FILE")
    parser.add_argument("--config", default="configs/run/tiny.yaml", metavar="FILE")
    parser.add_argument("--steps", type=int, default=12, help="steps per round, three of them warm-up")
    parser.add_argument("--rounds", type=int, default=3, help="rounds, the two cuts in turn")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(options, Path(folder))
    print("\n".join(table(rows)))
    return 0


def measure(options: argparse.Namespace, folder: Path) -> list[Row]:
    """Profile, plan, and train under both cuts in turn."""
    profile = folder / "profile.json"
    yuan_train(
        "profile",
        "--model",
        options.model,
        "--config",
        options.config,
        "--cluster",
        options.cluster,
        "--out",
        profile,
    )
    run = load_run(options.config)
    problem = PlanProblem(
        cluster=load_cluster(options.cluster),
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        precision=run.train.precision,
        profile=load_profile(profile),
    )
    found = search_plan(problem, run.search, micro_batch_size=run.train.micro_batch_size)
    if found.even_split is None:
        sys.exit("error: there is no even split of this model over these cards")
    rows = [Row("planned", found.best, []), Row("even", found.even_split, [])]
    for _ in range(options.rounds):
        for row in rows:
            row.seconds.extend(train(row.candidate.plan, options, folder))
    return rows


def train(plan: Plan, options: argparse.Namespace, folder: Path) -> list[float]:
    """Seconds of each step under a plan, after the warm-up."""
    save_plan(folder / "plan.yaml", plan)
    log = folder / "log"
    (log / "metrics.jsonl").unlink(missing_ok=True)
    changes = (
        f"train.steps={options.steps}",
        f"log.directory={log}",
        "checkpoint.directory=",
        "validation.every=0",
    )
    yuan_train("launch", "--config", options.config, "--plan", folder / "plan.yaml", *changes)
    lines = (log / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["step_seconds"] for line in lines[WARM_UP_STEPS:]]


def yuan_train(*arguments: str | Path) -> None:
    """Run a `yuan-train` command; its output is shown only if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "yuan_train", *map(str, arguments)], capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(done.stderr)


def table(rows: list[Row]) -> list[str]:
    """Markdown: cut, layers, forecast, measured, and the ratios."""
    lines = [
        f"Machine: {machine_name()}",
        "",
        "| cut | cards and layers | forecast s | measured s, median (min to max) | forecast off by |",
        "|---|---|--:|--:|--:|",
    ]
    for row in rows:
        plan, forecast = row.candidate.plan, row.candidate.step_seconds
        types = {entry.rank: entry.type for entry in plan.ranks}
        cut = ", ".join(f"{types[stage.ranks[0]]} {stage.num_layers}" for stage in plan.pipelines[0].stages)
        lines.append(
            f"| {row.name} | {cut} | {forecast:.3f} | {row.median:.3f} ({min(row.seconds):.3f} to "
            f"{max(row.seconds):.3f}) | {forecast / row.median - 1:+.1%} |"
        )
    planned, even = rows
    simulated = even.candidate.step_seconds / planned.candidate.step_seconds
    return [
        *lines,
        "",
        f"Even over planned: {simulated:.2f} in the simulator, {even.median / planned.median:.2f} measured.",
    ]


if __name__ == "__main__":
    sys.exit(main())
