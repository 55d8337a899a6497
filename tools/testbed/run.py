"""Trainings on the nodes of a testbed: what they are planned for, how they are run, and what was forecast."""

from __future__ import annotations

import os
import signal
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tests.support.project import read_metrics
from tools.testbed.nodes import Node, NodeSpec, Task, run_together
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import Profile, load_profile
from yuan_train.config.run import RunConfig, Source
from yuan_train.data.indexed import IndexedWriter, token_dtype
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.simulator import program_shape, simulate_schedule

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
    def waited(self) -> float:
        """Seconds of a step in which the slowest rank does not compute."""
        steps = zip(self.seconds, self.busy, strict=True)
        return statistics.median(took - max(busy) for took, busy in steps)

    @property
    def error(self) -> float:
        """How far the forecast is off; -0.1: 10 % low."""
        return self.cost.step_seconds / statistics.median(self.seconds) - 1

    @property
    def replayed_errors(self) -> list[float]:
        """Likewise of each step, if the simulator is given each rank's compute seconds as measured."""
        steps = zip(self.busy, self.seconds, strict=True)
        return [_replay(self.plan, self.cost, busy) / took - 1 for busy, took in steps]


def begin() -> None:
    """Have SIGTERM end this as Ctrl-C does, so that no node is left behind; say so if other programs keep the
    machine busy."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
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
    alone: bool = False,
) -> None:
    """Run the command of each node on so many cards of it, or each as a run `alone`, with the variables that
    torchrun would set: its own agents would use part of the quotas."""
    folder.mkdir(exist_ok=True)
    print(f"{folder.name}: {', '.join(node.spec.name for node in nodes)}", file=sys.stderr)
    tasks: list[Task] = []
    for rank in range(len(nodes) * cards):
        node, words = nodes[rank // cards], map(str, commands[rank // cards])
        name = f"{node.spec.name}-{rank % cards}" if cards > 1 else ""
        environment = rank_environment(0, [node]) if alone else rank_environment(rank, nodes, cards)
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


def forecast_busy(plan: Plan, cost: PlanCost) -> list[float]:
    """Forecast compute seconds of each rank in a step."""
    busy = [0.0] * len(plan.ranks)
    for p, pipeline in enumerate(plan.pipelines):
        for stage, workers in zip(pipeline.stages, cost.workers[p], strict=True):
            for replica, worker in zip(stage.replicas, workers, strict=True):
                for rank in replica:
                    busy[rank] = cost.simulations[p].busy_seconds[worker]
    return busy


def _replay(plan: Plan, cost: PlanCost, busy: Sequence[float]) -> float:
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
