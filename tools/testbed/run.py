"""python -m tools.testbed.run: profile, plan and train on unequal nodes, forecast beside measurement.

Makes the nodes of a testbed file on this machine (tools/testbed/nodes.py; needs root), measures cards and
links on them, all at the same time, plans from the measured profile, trains under the planned cut and under
the even split, and prints Markdown tables. Each round measures again before it trains, and its trainings are
compared with its own profile, because a machine that is shared, or a virtual one, changes its speed within
minutes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.project import read_metrics
from tools.testbed.nodes import Node, NodeSpec, Task, ended_well, load_nodes, make_nodes, run_together
from yuan_train.cli.plan import problem_of
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan, node_of
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import Profile, load_profile
from yuan_train.config.run import RunConfig, Source, load_run
from yuan_train.data.indexed import IndexedWriter, token_dtype
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.evaluate.simulator import program_shape, simulate_schedule
from yuan_train.planner.search.search import search_plan
from yuan_train.profile.units import machine_name

HERE = Path(__file__).parent
WARM_UP_STEPS = 2
PORT = 29500
"""Of the rendezvous. Free, because no other program is on the nodes' network."""
PROFILE_SECONDS, TRAIN_SECONDS = 600.0, 1800.0
"""Limits; a node that takes longer is taken to hang."""
CORE = DeviceType(memory=2**32, reserved=2**28, fp32=80e9, bf16=80e9, memory_bandwidth=10e9, backend="gloo")
"""A whole core, roughly; measurements take precedence."""


@dataclass(frozen=True)
class Round:
    """One training: what was forecast from its profile, and the metrics of its steps after the warm-up."""

    plan: Plan
    cost: PlanCost
    lines: list[dict[str, Any]]

    @property
    def seconds(self) -> list[float]:
        """Of each step."""
        return [line["step_seconds"] for line in self.lines]

    @property
    def busy(self) -> list[list[float]]:
        """Compute seconds of each rank, by step."""
        return [line["stage_seconds"] for line in self.lines]

    @property
    def error(self) -> float:
        """How far the forecast is off; -0.1: 10 % low."""
        return self.cost.step_seconds / statistics.median(self.seconds) - 1

    @property
    def replayed_errors(self) -> list[float]:
        """Likewise of each step, if the simulator is given each rank's compute seconds as measured."""
        steps = zip(self.busy, self.seconds, strict=True)
        return [replay(self.plan, self.cost, busy) / took - 1 for busy, took in steps]


@dataclass(frozen=True)
class Row:
    """One cut, and its rounds."""

    name: str
    plan: Plan
    rounds: list[Round]

    @property
    def forecast(self) -> float:
        return statistics.median(round_.cost.step_seconds for round_ in self.rounds)

    @property
    def seconds(self) -> list[float]:
        return [seconds for round_ in self.rounds for seconds in round_.seconds]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


@ended_well
def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default=HERE / "nodes.yaml", metavar="FILE", help="the unequal nodes")
    parser.add_argument(
        "--config", default=HERE / "run.yaml", metavar="FILE", help="the run; its data are random tokens"
    )
    parser.add_argument("--steps", type=int, default=8, help="steps per round, two of them warm-up")
    parser.add_argument("--rounds", type=int, default=3, help="rounds: profile, then the two cuts")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep profile, plans and logs here")
    options = parser.parse_args()
    if options.steps <= WARM_UP_STEPS or options.rounds < 1:
        raise ConfigError(f"wanted more than {WARM_UP_STEPS} steps and at least one round")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        print("\n".join(measure(options, folder.resolve())))
    return 0


def measure(options: argparse.Namespace, folder: Path) -> list[str]:
    """Profile, plan in the first round, and train both cuts, `rounds` times; the tables."""
    specs = load_nodes(options.nodes)
    warn_of_load()
    run = with_random_data(load_run(options.config), folder)
    cluster = cluster_of(specs)
    write_text(folder / "run.yaml", dump(run))
    write_text(folder / "cluster.yaml", dump(cluster))
    with make_nodes(specs) as nodes:
        rows: list[Row] = []
        for number in range(options.rounds):
            profile = measure_profile(nodes, folder, number)
            problem = problem_of(run, cluster, profile)
            rows = rows or _plan(problem, run)
            costs = make_costs(problem)
            for row in rows:
                training = folder / f"{row.name}-{number}"
                named = {node.spec.name: node for node in nodes}
                used = [named[node_of(entry)] for entry in row.plan.ranks]
                lines = train(used, row.plan, training, f"train.steps={options.steps}")
                row.rounds.append(Round(row.plan, cost_plan(costs, row.plan), lines))
    return [*table(rows), "", *stage_table(rows), "", *link_table(profile)]


def warn_of_load() -> None:
    """Say on stderr that figures will be rough, if other programs keep the machine busy."""
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load > 0.5 * cores:
        print(f"note: the load is {load:.1f} on {cores} cores; figures will be rough", file=sys.stderr)


def cluster_of(specs: Sequence[NodeSpec]) -> Cluster:
    """The nodes as the planner sees them: one card each, whose type is given by its share of a core."""
    types = {
        _type_name(spec): replace(
            CORE,
            fp32=CORE.fp32 * spec.cpu,
            bf16=CORE.fp32 * spec.cpu,
            memory_bandwidth=CORE.memory_bandwidth * spec.cpu,
        )
        for spec in specs
    }
    nodes = tuple(
        NodeGroup(name=spec.name, device=_type_name(spec), network=Link(bandwidth=spec.network))
        for spec in specs
    )
    return Cluster(name="testbed", nodes=nodes, device_types=types)


def _type_name(spec: NodeSpec) -> str:
    return f"core-{100 * spec.cpu:g}%"


def with_random_data(run: RunConfig, folder: Path) -> RunConfig:
    """The run on random tokens: step times do not depend on what they are."""
    tokens = 2 * run.train.global_batch_size * (run.data.sequence_length + 1)
    dtype = token_dtype(run.model.vocab_size)
    with IndexedWriter(folder / "random", dtype=dtype) as writer:
        writer.add(np.random.default_rng(0).integers(run.model.vocab_size, size=tokens).astype(dtype))
    sources = (Source(prefix=str(folder / "random")),)
    return replace(run, data=replace(run.data, train=sources, validation=(), split=None, tokenizer=None))


# --- on the nodes ----------------------------------------------------------------------------------------


def measure_profile(nodes: Sequence[Node], folder: Path, number: int) -> Profile:
    """Run `yuan-train profile` on all nodes together; returns the profile."""
    out = folder / f"profile-{number}.json"
    files = ["--config", folder / "run.yaml", "--cluster", folder / "cluster.yaml", "--out", out]
    commands = [["profile", *files, "--device-type", _type_name(node.spec)] for node in nodes]
    yuan_train(nodes, commands, out.with_suffix(""), PROFILE_SECONDS)
    return load_profile(out)


def _plan(problem: PlanProblem, run: RunConfig) -> list[Row]:
    found = search_plan(problem, run.search, micro_batch_size=run.train.micro_batch_size)
    if found.even_split is None:
        raise ConfigError("there is no even split of this model over these nodes; give it more layers")
    return [Row("planned", found.best.plan, []), Row("even", found.even_split.plan, [])]


def train(
    nodes: Sequence[Node], plan: Plan, folder: Path, *changes: str, cards: int = 1
) -> list[dict[str, Any]]:
    """Train the run beside a folder under a plan, on so many cards of each node; the metrics of the steps
    after the warm-up."""
    folder.mkdir(exist_ok=True)
    save_plan(folder / "plan.yaml", plan)
    (folder / "metrics.jsonl").unlink(missing_ok=True)
    command = ["train", "--config", folder.parent / "run.yaml", "--plan", folder / "plan.yaml", *changes]
    command += [f"log.directory={folder}", "log.every=1", "checkpoint.directory="]
    yuan_train(nodes, [command] * len(nodes), folder, TRAIN_SECONDS, cards=cards)
    return read_metrics(folder)[WARM_UP_STEPS:]


def yuan_train(
    nodes: Sequence[Node],
    commands: Sequence[Sequence[object]],
    folder: Path,
    timeout_seconds: float,
    *,
    cards: int = 1,
) -> None:
    """Run the command of each node on so many cards of it, with the variables that torchrun would set: its
    own agents would use part of the quotas."""
    folder.mkdir(exist_ok=True)
    print(f"{folder.name}: {', '.join(node.spec.name for node in nodes)}", file=sys.stderr)
    tasks: list[Task] = []
    for rank in range(len(nodes) * cards):
        node, words = nodes[rank // cards], map(str, commands[rank // cards])
        name = f"{node.spec.name}-{rank % cards}" if cards > 1 else ""
        environment = rank_environment(rank, nodes, cards)
        tasks.append(Task(node, [sys.executable, "-m", "yuan_train", *words], environment, name))
    run_together(tasks, folder, timeout_seconds=timeout_seconds)


def rank_environment(rank: int, nodes: Sequence[Node], cards: int = 1) -> dict[str, str]:
    """What torchrun would set for a rank of a run with so many on each of `nodes`."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(len(nodes) * cards),
        "LOCAL_RANK": str(rank % cards),
        "LOCAL_WORLD_SIZE": str(cards),
        "MASTER_ADDR": nodes[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": "eth0",
        # Two threads would share a node's quota and wait for each other.
        "OMP_NUM_THREADS": "1",
    }


# --- tables ----------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[str]:
    """Markdown: step times of both cuts, and what the plan gains."""
    lines = [
        f"Machine: {machine_name()}",
        "",
        "| cut | nodes and layers | forecast s | measured s, median (min to max) "
        "| forecast off by, median of rounds (each) | with the compute as measured |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        errors = [round_.error for round_ in row.rounds]
        replayed = [error for round_ in row.rounds for error in round_.replayed_errors]
        lines.append(
            f"| {row.name} | {_cut(row.plan)} | {row.forecast:.3f} | {row.median:.3f} "
            f"({min(row.seconds):.3f} to {max(row.seconds):.3f}) | {statistics.median(errors):+.1%} "
            f"({', '.join(f'{error:+.1%}' for error in errors)}) | {statistics.median(replayed):+.1%} |"
        )
    planned, even = rows
    simulated = even.forecast / planned.forecast
    return [
        *lines,
        "",
        f"Even over planned: {simulated:.2f} in the simulator, {even.median / planned.median:.2f} measured.",
    ]


def _cut(plan: Plan) -> str:
    nodes = [node_of(entry) for entry in plan.ranks]
    return "; ".join(
        ", ".join(
            f"{'+'.join(nodes[rank] for rank in stage.ranks)} {stage.num_layers}" for stage in pipeline.stages
        )
        for pipeline in plan.pipelines
    )


def forecast_busy(plan: Plan, cost: PlanCost) -> list[float]:
    """Forecast compute seconds of each rank in a step."""
    busy = [0.0] * len(plan.ranks)
    for p, pipeline in enumerate(plan.pipelines):
        for stage, workers in zip(pipeline.stages, cost.workers[p], strict=True):
            for replica, worker in zip(stage.replicas, workers, strict=True):
                for rank in replica:
                    busy[rank] = cost.simulations[p].busy_seconds[worker]
    return busy


def replay(plan: Plan, cost: PlanCost, busy: Sequence[float]) -> float:
    """The simulated step, in seconds, if each rank's compute takes as long as measured (`busy`): what is left
    of the error is due to links, gradient reduction and the executor."""
    expected = forecast_busy(plan, cost)
    ends: list[float] = []
    for p, (pipeline, times) in enumerate(zip(plan.pipelines, cost.times, strict=True)):
        factors = [
            statistics.mean(busy[rank] / expected[rank] for replica in stage.replicas for rank in replica)
            for stage in pipeline.stages
        ]

        def scaled(seconds: Sequence[float], factors: Sequence[float] = factors) -> tuple[float, ...]:
            return tuple(factor * value for factor, value in zip(factors, seconds, strict=True))

        measured = replace(
            times,
            forward_seconds=scaled(times.forward_seconds),
            backward_seconds=scaled(times.backward_seconds),
            weight_seconds=scaled(times.weight_seconds) if times.weight_seconds else (),
        )
        simulation = simulate_schedule(program_shape(plan, p), measured)
        ends.append(simulation.step_seconds)
    return max(ends) + cost.step_seconds - cost.compute_seconds


def stage_table(rows: Sequence[Row]) -> list[str]:
    """Markdown: compute of each rank in a step, and the share of the step in which it is idle."""
    lines = [
        "| cut | node | layers | compute forecast s | measured s | off by | idle forecast | idle measured |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        plan, expected = row.plan, [forecast_busy(row.plan, round_.cost) for round_ in row.rounds]
        for rank, entry in enumerate(plan.ranks):
            layers = sum(stage.num_layers for stage in plan.stages if rank in stage.ranks)
            forecast = statistics.median(busy[rank] for busy in expected)
            measured = statistics.median(step[rank] for round_ in row.rounds for step in round_.busy)
            idle = 1 - forecast / row.forecast
            lines.append(
                f"| {row.name} | {entry.device.rpartition('/')[0]} | {layers} | {forecast:.3f} "
                f"| {measured:.3f} | {forecast / measured - 1:+.1%} | {idle:.0%} "
                f"| {1 - measured / row.median:.0%} |"
            )
    return lines


def link_table(profile: Profile) -> list[str]:
    """Markdown: milliseconds of every directed link by message size."""
    sizes = profile.links[0].message_bytes
    heads = [f"{size / 1024:g} KiB, ms" for size in sizes]
    lines = [f"| link | {' | '.join(heads)} |", f"|---|{'--:|' * len(sizes)}"]
    for link in profile.links:
        times = " | ".join(f"{1e3 * seconds:.2f}" for seconds in link.seconds)
        lines.append(f"| {link.from_.rpartition('/')[0]} to {link.to.rpartition('/')[0]} | {times} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
