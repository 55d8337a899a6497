"""Benchmarks of whole trainings on this machine, started by `yuan-train`: forecasts against measurement."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.support.project import make_plan
from tools.bench.harness import MISSED, Row, case
from tools.testbed.run import with_random_data
from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.devices import DeviceType
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import load_profile
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.shapes import PipelineCut, assemble_plan

WARM_UP_STEPS = 3
LAPTOP, TINY = "configs/cluster/laptop.yaml", "configs/run/tiny.yaml"
"""Three simulated cards, and the quick start's run, whose data must be there."""
SMALL = ("num_layers=6", "hidden_size=256", "num_attention_heads=4", "head_dim=64", "ffn_hidden_size=1024")
CUTS = ("4,1,1", "3,2,1", "2,3,1")
"""Layers of each stage, fast card first."""
SLOWER = 4 / 3
"""Of the simulated cards, so that their processes do not wait for each other's cores."""


def yuan_train(*words: str | Path) -> None:
    """Run a `yuan-train` command. Raises SystemExit with what it said if it fails."""
    command = [sys.executable, "-m", "yuan_train", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])


def train(run_file: str | Path, plan: Plan, folder: Path, *changes: str) -> list[dict[str, Any]]:
    """The metrics of each step of a run under a plan, in as many processes as it has ranks."""
    save_plan(folder / "plan.yaml", plan)
    log = folder / "log"
    (log / "metrics.jsonl").unlink(missing_ok=True)
    own = (f"log.directory={log}", "log.every=1", "checkpoint.directory=", "validation.every=0")
    yuan_train("launch", "--config", run_file, "--plan", folder / "plan.yaml", *own, *changes)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def problem_of(run: RunConfig, cluster: Cluster, profile: Path) -> PlanProblem:
    """What to plan, with the times of a profile."""
    return PlanProblem(
        cluster=cluster,
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        precision=run.train.precision,
        profile=load_profile(profile),
    )


@case(
    "training/planned",
    formats={"forecast s": ".3f", "measured s": ".3f", "off by": "+.1%", "over planned": ".2f"},
    costs={"measured s": 0.15},
    cluster=(LAPTOP,),
    config=(TINY,),
    steps=(12,),
    rounds=(3,),
)
def planned(cluster: str, config: str, steps: int, rounds: int) -> Iterator[Row]:
    """The planned uneven cut against the even split of simulated cards, forecast and measured, in turns."""
    run = load_run(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "profile.json"
        yuan_train("profile", "--config", config, "--cluster", cluster, "--out", profile)
        problem = problem_of(run, load_cluster(cluster), profile)
        found = search_plan(problem, run.search, micro_batch_size=run.train.micro_batch_size)
        if found.even_split is None:
            raise SystemExit("there is no even split of this model over these cards")
        plans = {"planned": found.best, "even": found.even_split}
        seconds: dict[str, list[float]] = {cut: [] for cut in plans}
        for _ in range(rounds):
            for cut, candidate in plans.items():
                lines = train(config, candidate.plan, folder, f"train.steps={steps}")
                seconds[cut] += [line["step_seconds"] for line in lines[WARM_UP_STEPS:]]
    medians = {cut: statistics.median(own) for cut, own in seconds.items()}
    for cut, candidate in plans.items():
        types = {entry.rank: entry.type for entry in candidate.plan.ranks}
        stages = candidate.plan.pipelines[0].stages
        yield {
            "cut": cut,
            "cards and layers": ", ".join(f"{types[s.ranks[0]]} {s.num_layers}" for s in stages),
            "forecast s": candidate.step_seconds,
            "measured s": medians[cut],
            "min to max": f"{min(seconds[cut]):.3f} to {max(seconds[cut]):.3f}",
            "off by": candidate.step_seconds / medians[cut] - 1,
            "over planned": medians[cut] / medians["planned"],
        }


@case(
    "training/forecast",
    formats={"forecast s": ".3f", "measured s": ".3f", "off by": "+.1%"},
    cluster=(LAPTOP,),
    config=(TINY,),
    steps=(10,),
    rounds=(3,),
    device=("cpu",),
)
def forecast(cluster: str, config: str, steps: int, rounds: int, device: str) -> Iterator[Row]:
    """Step time and peak memory of three hand-made cuts beside the forecast; each round profiles anew."""
    changes = [*(f"model.{word}" for word in SMALL), f"train.device={device}"]
    cards, run = _slowed(load_cluster(cluster)), load_run(config, tuple(changes))
    pairs: dict[str, list[tuple[PlanCost, float, list[int]]]] = {cut: [] for cut in CUTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "cluster.yaml", dump(cards))
        files = ("--config", config, "--cluster", folder / "cluster.yaml")
        for _ in range(rounds):
            yuan_train("profile", *files, "--out", folder / "profile.json", *changes)
            costs = make_costs(problem_of(run, cards, folder / "profile.json"))
            for cut, done in pairs.items():
                plan = _cut_plan(costs, run, [int(word) for word in cut.split(",")])
                lines = train(config, plan, folder, *changes, f"train.steps={steps}")
                took = statistics.median(line["step_seconds"] for line in lines[WARM_UP_STEPS:])
                done.append((cost_plan(costs, plan), took, lines[-1]["peak_memory_bytes"]))
    for cut, done in pairs.items():
        errors = [one.step_seconds / took - 1 for one, took, _ in done]
        wanted = _by_rank([[stage.memory.total for stage in one.stages] for one, _, _ in done])
        found = _by_rank([peaks for _, _, peaks in done])
        yield {
            "layers": cut,
            "forecast s": statistics.median(one.step_seconds for one, _, _ in done),
            "measured s": statistics.median(took for _, took, _ in done),
            "off by": statistics.median(errors),
            "each": ", ".join(f"{error:+.1%}" for error in errors),
            "peak forecast, MiB": ", ".join(f"{peak / 2**20:.0f}" for peak in wanted),
            "peak measured, MiB": ", ".join(f"{peak / 2**20:.0f}" for peak in found),
            "memory off by": ", ".join(f"{a / b - 1:+.1%}" for a, b in zip(wanted, found, strict=True)),
        }


def _slowed(cluster: Cluster) -> Cluster:
    types = {
        name: replace(device, slowdown=SLOWER * device.slowdown) if device.slowdown else device
        for name, device in cluster.device_types.items()
    }
    return replace(cluster, device_types=types)


def _cut_plan(costs: Costs, run: RunConfig, layers: Sequence[int]) -> Plan:
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


def _by_rank(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Each rank's median over the rounds."""
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


@case("training/llama", layers=(4,), vocabulary=(16384,), tokens=(128,), steps=(3,))
def llama(layers: int, vocabulary: int, tokens: int, steps: int) -> Iterator[Row]:
    """A slice of Llama-3.2-1B in bf16, alone and cut over two processes: losses, seconds, memory.

    Its widths, random tokens, two sequences a step. Four of the 16 layers take about 5 GB of state.
    """
    model = {"name": "slice", "architecture": "llama", "num_layers": layers, "hidden_size": 2048}
    model |= {"num_attention_heads": 32, "num_key_value_heads": 8, "ffn_hidden_size": 8192}
    model |= {"vocab_size": vocabulary, "rope_base": 500000.0, "norm_epsilon": 1e-5}
    data = {"train": [{"prefix": "none"}], "sequence_length": tokens, "reset_position_ids": False}
    settings = {"steps": steps, "global_batch_size": 2, "precision": "bf16", "device": "cpu"}
    given = {"model": model, "data": data, "train": settings, "optimizer": {"learning_rate": 1e-4}}
    card = DeviceType(memory=24 << 30, bf16=1e12, fp16=1e12, fp32=1e12, memory_bandwidth=1e10, backend="gloo")
    first: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "given.yaml").write_text(yaml.safe_dump(given))
        run = with_random_data(load_run(folder / "given.yaml"), folder)
        write_text(folder / "run.yaml", dump(run))
        last = max(layers // 3, 1)
        for cut in ([layers], [layers - last, last]):
            plan = replace(make_plan(run, [cut]), device_types={"card": card})
            lines = train(folder / "run.yaml", plan, folder)
            losses = [line["loss"] for line in lines]
            worst = max((abs(a / b - 1) for a, b in zip(losses, first, strict=False)), default=0.0)
            first = first or losses
            yield {
                "layers": " + ".join(map(str, cut)),
                "parameters": f"{run.model.parameters:,}",
                "losses": ", ".join(f"{loss:.6f}" for loss in losses),
                "seconds": ", ".join(f"{line['step_seconds']:.1f}" for line in lines),
                "peak GB": ", ".join(f"{peak / 1e9:.2f}" for peak in lines[-1]["peak_memory_bytes"]),
                MISSED: f"the losses are {worst:.1e} apart" if not worst <= 1e-3 or math.isnan(worst) else "",
            }
