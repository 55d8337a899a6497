"""How much of a gradient reduction the backward hides, on two slow links; needs root.

Two equal nodes are made on this machine (tools/testbed/nodes.py), each with one pipeline of one stage, so
that both reduce all gradients.
"""

from __future__ import annotations

import signal
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.project import read_metrics
from tools.bench.harness import Row, case
from tools.testbed.nodes import Node, NodeSpec, Task, make_nodes, run_together
from tools.testbed.run import (
    TRAIN_SECONDS,
    WARM_UP_STEPS,
    cluster_of,
    measure_profile,
    rank_environment,
    replay,
    warn_of_load,
    with_random_data,
)
from yuan_train.cli.plan import problem_of
from yuan_train.config.cluster import Cluster
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.shapes import PipelineCut, assemble_plan

CONFIG = Path(__file__).parents[1] / "testbed/run.yaml"
NETWORKS = {"1 Gb/s": 125e6, "100 Mb/s": 12.5e6}
SHARE = 0.5
"""Of the backward that the reduction takes."""
CPU = 0.95
"""Of a core for each node; the rest is for the machine's other programs."""
ONE_BUCKET = 10**12


@dataclass(frozen=True)
class Step:
    """A measured step; alone, of the node that took longer."""

    seconds: float
    busy: tuple[float, ...]
    """Compute seconds of each node."""

    @property
    def waited(self) -> float:
        """Seconds in which the slower node did not compute."""
        return self.seconds - max(self.busy)


@dataclass(frozen=True)
class Measured:
    """A way of reducing gradients on a network, and its steps of all rounds."""

    bucket_size: int
    cost: PlanCost | None
    """The forecast; None for the nodes alone."""
    steps: list[Step]

    @property
    def median(self) -> float:
        return statistics.median(step.seconds for step in self.steps)

    @property
    def waited(self) -> float:
        return statistics.median(step.waited for step in self.steps)

    def replayed_error(self, plan: Plan) -> float:
        """How far the forecast is off with each step's compute as it was measured."""
        assert self.cost is not None
        return statistics.median(replay(plan, self.cost, step.busy) / step.seconds - 1 for step in self.steps)


@case(
    "training/overlap",
    formats=dict.fromkeys(("backward s", "reduction s", "alone s"), ".3f"),
    network=tuple(NETWORKS),
    layers=(12,),
    slowdown=(1.0,),
    steps=(12,),
    rounds=(1,),
)
def overlap(network: str, layers: int, slowdown: float, steps: int, rounds: int) -> Row:
    """Trained in buckets that start inside the backward, in one that starts behind it, and each node alone.

    The micro-batch is chosen so that the reduction takes about half of the backward. `rounds`: of these
    trainings, one way after the other, so that all see the machine alike when it changes its speed. Exposed
    is what a user pays: the median step less that of the nodes alone, in parts of the reduction. Waited is
    what is left of it when a machine changes its speed between trainings: the step less the compute of its
    slower node, less the same of the nodes alone. "Off by" is the forecast against the median step, from the
    profile and with each step's compute as it was measured.

    With a `slowdown` the cards are simulated ones that many times slower than their core. They sleep for the
    rest of the time, which leaves the core to the network's work, as the host of a GPU is left to it.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    warn_of_load()
    with tempfile.TemporaryDirectory() as name:
        return measure(network, layers, slowdown, steps, rounds, Path(name).resolve())


def measure(network: str, layers: int, slowdown: float, steps: int, rounds: int, folder: Path) -> Row:
    """Profile, choose the micro-batch, profile it, and train three ways."""
    specs = tuple(NodeSpec(name=node, cpu=CPU, network=NETWORKS[network]) for node in ("left", "right"))
    cluster = _slowed(cluster_of(specs), slowdown)
    write_text(folder / "cluster.yaml", dump(cluster))
    run = with_random_data(load_run(CONFIG, (f"model.num_layers={layers}", "model.vocab_size=512")), folder)
    with make_nodes(specs) as nodes:
        size = 1
        for number in range(2):
            run = _with_micro_batches(run, size)
            write_text(folder / "run.yaml", dump(run))
            profile = measure_profile(nodes, folder, number)
            problem = problem_of(run, cluster, profile)
            halves = make_costs(replace(problem, bucket_size=run.model.layer_parameters // 2))
            whole = make_costs(replace(problem, bucket_size=ONE_BUCKET))
            plan = _plan(halves, run)
            costs = cost_plan(whole, plan)
            if number == 0:
                size = max(1, round(costs.grad_reduce_seconds / (SHARE * costs.stages[0].backward_seconds)))
        save_plan(folder / "plan.yaml", plan)
        for node, single in zip(nodes, cluster.nodes, strict=True):
            lone = replace(problem, cluster=replace(cluster, nodes=(single,)), global_batch_size=size)
            save_plan(folder / f"{node.spec.name}.yaml", _plan(make_costs(lone), run))
        alone, one, many = (
            Measured(costs.problem.bucket_size, None if way == "alone" else cost_plan(costs, plan), [])
            for way, costs in (("alone", whole), ("one bucket", whole), ("buckets", halves))
        )
        for number in range(rounds):
            for way in (alone, one, many):
                training = f"{'alone' if way is alone else 'buckets'}-{way.bucket_size}-{number}"
                way.steps.extend(
                    _train(
                        nodes,
                        folder / training,
                        steps,
                        bucket_size=way.bucket_size,
                        alone_with=size if way is alone else None,
                    )
                )
    return _row(network, plan, alone, (one, many))


def _row(network: str, plan: Plan, alone: Measured, ways: Sequence[Measured]) -> Row:
    cost = ways[0].cost
    assert cost is not None
    reduction = cost.grad_reduce_seconds
    row: Row = {"network": network, "backward s": cost.stages[0].backward_seconds, "reduction s": reduction}
    row["alone s"] = alone.median
    for name, way in zip(("one bucket", "two a layer"), ways, strict=True):
        assert way.cost is not None
        row[f"{name} s"] = f"{way.cost.step_seconds:.3f}, {way.median:.3f}"
        row[f"{name}, exposed"] = f"{(way.median - alone.median) / reduction:.0%}"
        row[f"{name}, waited"] = f"{(way.waited - alone.waited) / reduction:.0%}"
        off = way.cost.step_seconds / way.median - 1, way.replayed_error(plan)
        row[f"{name}, off by"] = ", ".join(f"{part:+.1%}" for part in off)
    return row


def _slowed(cluster: Cluster, slowdown: float) -> Cluster:
    """The cluster with simulated cards, `slowdown` times slower; itself if that is 1."""
    if slowdown == 1:
        return cluster
    types = {name: replace(device, slowdown=slowdown) for name, device in cluster.device_types.items()}
    return replace(cluster, device_types=types)


def _with_micro_batches(run: RunConfig, size: int) -> RunConfig:
    """The run with one micro-batch of `size` sequences on each of the two nodes."""
    return replace(
        run,
        train=replace(run.train, global_batch_size=2 * size, micro_batch_size=size),
        search=replace(run.search, micro_batch_size=(size,)),
    )


def _plan(costs: Costs, run: RunConfig) -> Plan:
    """A pipeline of one stage on each card, one micro-batch each."""
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
    nodes: Sequence[Node], folder: Path, steps: int, *, bucket_size: int, alone_with: int | None
) -> list[Step]:
    """Steps after the warm-up; of each node alone, if it is said with how many of the batch's sequences."""
    tasks: list[Task] = []
    logs: list[Path] = []
    for rank, node in enumerate(nodes):
        log = folder / node.spec.name
        logs.append(log)
        command = ["train", "--config", folder.parent / "run.yaml", f"train.steps={steps}", "log.every=1"]
        command += [f"log.directory={log}", f"optimizer.bucket_size={bucket_size}", "checkpoint.directory="]
        if alone_with is None:
            command += ["--plan", folder.parent / "plan.yaml"]
            environment = rank_environment(rank, nodes)
        else:
            command += ["--plan", folder.parent / f"{node.spec.name}.yaml"]
            command.append(f"train.global_batch_size={alone_with}")
            environment = rank_environment(0, [node])
        tasks.append(Task(node, [sys.executable, "-m", "yuan_train", *map(str, command)], environment))
    folder.mkdir()
    print(folder.name, file=sys.stderr)
    run_together(tasks, folder, timeout_seconds=TRAIN_SECONDS)
    found = [
        [
            Step(line["step_seconds"], tuple(line["stage_seconds"]))
            for line in read_metrics(log)[WARM_UP_STEPS:]
        ]
        for log in logs
        if (log / "metrics.jsonl").exists()
    ]
    return [max(steps, key=lambda step: step.seconds) for steps in zip(*found, strict=True)]
