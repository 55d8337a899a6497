"""python -m tools.bench_overlap: how much of a gradient reduction the backward hides, on two slow links.

Makes two equal nodes on this machine (tools/testbed/nodes.py; needs root), each with one pipeline of one
stage, so that both reduce all gradients. The micro-batch is chosen so that the reduction takes about half of
the backward. Trains three ways: in buckets that start inside the backward, in one bucket that starts when
the backward has ended, and each node alone without a reduction; in `--rounds` one way after the other, so
that all see the machine alike when it changes its speed. Prints a Markdown table with the forecasts. Exposed
is what a user waits: the median step less that of the nodes alone, in parts of the reduction.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.testbed.nodes import Node, NodeSpec, Task, make_nodes, run_together
from tools.testbed.run import (
    TRAIN_SECONDS,
    WARM_UP_STEPS,
    cluster_of,
    make_problem,
    measure_profile,
    rank_environment,
    warn_of_load,
    with_random_data,
)
from yuan_train.config.document import Document
from yuan_train.config.dump import dump, write_text
from yuan_train.config.errors import YuanError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_files import save_plan
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.costs.plan_problem import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.shapes import PipelineCut, assemble_plan
from yuan_train.train.measure import machine_name

CONFIG = Path(__file__).parent / "testbed" / "run.yaml"
NETWORKS = {"1 Gb/s": 125e6, "100 Mb/s": 12.5e6}
SHARE = 0.5
"""Of the backward that the reduction takes."""
CPU = 0.95
"""Of a core for each node; the rest is for the machine's other programs."""
ONE_BUCKET = 10**12


@dataclass(frozen=True)
class Measured:
    """A way of reducing gradients on a network: forecast and measured step seconds."""

    forecast: float | None
    seconds: list[float]
    """Of the steps of all rounds."""

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def main() -> int:
    """Measure and print. The exit code is 2 where there can be no testbed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=12, help=f"steps, {WARM_UP_STEPS} of them warm-up")
    parser.add_argument("--rounds", type=int, default=1, help="of trainings, each in all ways")
    parser.add_argument("--layers", type=int, default=12, help="of the model")
    parser.add_argument("--network", choices=NETWORKS, action="append", help="default: all")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    print(f"Machine: {machine_name()}\n")
    print(
        "| network | backward s | reduction s | alone s | one bucket s | exposed | two buckets a layer s "
        "| exposed | off by |"
    )
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    try:
        warn_of_load()
        for name in options.network or NETWORKS:
            with tempfile.TemporaryDirectory() as folder:
                print(measure(name, NETWORKS[name], options, Path(folder).resolve()), flush=True)
    except YuanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def measure(name: str, rate: float, options: argparse.Namespace, folder: Path) -> str:
    """A row of the table: profile, choose the micro-batch, profile it, and train three ways."""
    specs = tuple(NodeSpec(name=node, cpu=CPU, network=rate) for node in ("left", "right"))
    cluster = cluster_of(specs)
    write_text(folder / "cluster.yaml", dump(cluster))
    run = with_random_data(
        load_run(CONFIG, (f"model.num_layers={options.layers}", "model.vocab_size=512")), folder
    )
    with make_nodes(specs) as nodes:
        size = 1
        for number in range(2):
            run = _with_micro_batches(run, size)
            write_text(folder / "run.yaml", dump(run))
            profile = measure_profile(nodes, folder, number)
            problem = make_problem(cluster, run, profile)
            halves = make_costs(replace(problem, bucket_size=run.model.layer_parameters // 2))
            whole = make_costs(replace(problem, bucket_size=ONE_BUCKET))
            plan = _plan(halves, run)
            costs = cost_plan(whole, plan)
            if number == 0:
                size = max(1, round(costs.grad_reduce_seconds / (SHARE * costs.stages[0].backward_seconds)))
        save_plan(folder / "plan.yaml", plan)
        alone, one, many = (
            Measured(None if costs is None else cost_plan(costs, plan).step_seconds, [])
            for costs in (None, whole, halves)
        )
        for number in range(options.rounds):
            ways = (
                (alone, None, ONE_BUCKET),
                (one, plan, ONE_BUCKET),
                (many, plan, halves.problem.bucket_size),
            )
            for way, followed, bucket_size in ways:
                training = f"{'alone' if followed is None else 'buckets'}-{bucket_size}-{number}"
                way.seconds.extend(
                    _train(
                        nodes, folder, training, options.steps, run, plan=followed, bucket_size=bucket_size
                    )
                )
    return _row(name, cost_plan(whole, plan), alone, one, many)


def _row(name: str, cost: PlanCost, alone: Measured, one: Measured, many: Measured) -> str:
    assert one.forecast is not None and many.forecast is not None
    reduction = cost.grad_reduce_seconds
    return (
        f"| {name} | {cost.stages[0].backward_seconds:.3f} | {reduction:.3f} | {alone.median:.3f} "
        f"| {one.forecast:.3f}, {one.median:.3f} | {(one.median - alone.median) / reduction:.0%} "
        f"| {many.forecast:.3f}, {many.median:.3f} | {(many.median - alone.median) / reduction:.0%} "
        f"| {many.forecast / many.median - 1:+.1%} |"
    )


def _with_micro_batches(run: RunConfig, size: int) -> RunConfig:
    """The run with one micro-batch of `size` sequences on each of the two nodes."""
    return replace(
        run,
        train=replace(run.train, global_batch_size=2 * size, micro_batch_size=size),
        search=replace(run.search, micro_batch_size=(size,)),
    )


def _plan(costs: Costs, run: RunConfig) -> Plan:
    """Two pipelines of one stage, one micro-batch each."""
    units = run.model.num_layers + 2
    cuts = [
        PipelineCut(
            micro_batch_size=run.train.micro_batch_size,
            num_micro_batches=1,
            stage_groups=(((card,),),),
            bounds=(0, units),
            recompute=("none",),
        )
        for card in costs.problem.cluster.cards
    ]
    return assemble_plan(costs, cuts, schedule="1f1b")


def _train(
    nodes: Sequence[Node],
    folder: Path,
    name: str,
    steps: int,
    run: RunConfig,
    *,
    plan: Plan | None,
    bucket_size: int = ONE_BUCKET,
) -> list[float]:
    """Step seconds after the warm-up, of the slower node; without a plan each node trains half the batch."""
    tasks: list[Task] = []
    logs: list[Path] = []
    for rank, node in enumerate(nodes):
        log = folder / f"{name}-{rank}"
        logs.append(log)
        command = ["train", "--config", folder / "run.yaml", f"train.steps={steps}", "log.every=1"]
        command += [f"log.directory={log}", f"optimizer.bucket_size={bucket_size}", "checkpoint.directory="]
        if plan is not None:
            command += ["--plan", folder / "plan.yaml"]
            environment = rank_environment(rank, nodes)
        else:
            command.append(f"train.global_batch_size={run.train.micro_batch_size}")
            environment = rank_environment(0, [node])
        tasks.append(Task(node, [sys.executable, "-m", "yuan_train", *map(str, command)], environment))
    (folder / name).mkdir()
    print(name, file=sys.stderr)
    run_together(tasks, folder / name, timeout_seconds=TRAIN_SECONDS)
    found: list[list[Document]] = [
        [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()][WARM_UP_STEPS:]
        for log in logs
        if (log / "metrics.jsonl").exists()
    ]
    return [max(line["step_seconds"] for line in lines) for lines in zip(*found, strict=True)]  # pyright: ignore


if __name__ == "__main__":
    sys.exit(main())
