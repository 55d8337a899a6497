"""Forecast against measurement on nodes made on this machine (tools/testbed/nodes.py); needs root.

A machine that is shared, or a virtual one, changes its speed within minutes. So each round of the planned cut
and the even split profiles again before it trains, and is compared with its own profile.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from tests.support.project import read_metrics
from tools.bench.harness import Row, case
from tools.bench.problems import hand_plan
from tools.testbed.nodes import MOUNTS, Node, NodeSpec, find_quotas, load_nodes, make_nodes, write_ssh
from tools.testbed.run import (
    CORE,
    HERE,
    PROFILE_SECONDS,
    TRAIN_SECONDS,
    WARM_UP_STEPS,
    Round,
    begin,
    cluster_of,
    forecast_busy,
    measure_profile,
    train,
    with_random_data,
    yuan_train,
)
from yuan_train.cli.plan import problem_of
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.errors import TrainingError
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan, ScheduleName, node_of
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.profile import load_profile
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.search import search_plan

CONFIG = str(HERE / "run.yaml")
FORMATS = {"forecast s": ".3f", "measured s": ".3f", "sums s": ".3f"}


@contextmanager
def _files(run: RunConfig, cluster: Cluster, steps: int, keep: str) -> Iterator[tuple[Path, RunConfig]]:
    """A folder with the run, on random tokens, and the cluster; `keep`: its name, if it is to stay."""
    begin()
    if steps <= WARM_UP_STEPS:
        raise SystemExit(f"steps={steps}: wanted more than {WARM_UP_STEPS}, which are warm-up")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(keep or scratch).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        run = with_random_data(run, folder)
        write_text(folder / "run.yaml", dump(run))
        write_text(folder / "cluster.yaml", dump(cluster))
        yield folder, run


def _row(name: str, rounds: Sequence[Round]) -> Row:
    """Step times of a cut; the last column gives the simulator each card's compute as measured."""
    seconds = [seconds for one in rounds for seconds in one.seconds]
    errors = [one.error for one in rounds]
    replayed = [error for one in rounds for error in one.replayed_errors]
    row: Row = {"cut": name, "forecast s": statistics.median(one.cost.step_seconds for one in rounds)}
    row["measured s"] = statistics.median(seconds)
    row["min to max"] = f"{min(seconds):.3f} to {max(seconds):.3f}"
    row |= {"off by": f"{statistics.median(errors):+.1%} ({_listed(errors, '+.1%')})"}
    return row | {"with measured compute": f"{statistics.median(replayed):+.1%}"}


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    """Of each column."""
    return [statistics.median(column) for column in zip(*rows, strict=True)]


def _listed(values: Sequence[float], form: str) -> str:
    return ", ".join(format(value, form) for value in values)


@case(
    "testbed/planned",
    formats=FORMATS,
    nodes=(str(HERE / "nodes.yaml"),),
    config=(CONFIG,),
    steps=(8,),
    rounds=(3,),
    keep=("",),
)
def planned(nodes: str, config: str, steps: int, rounds: int, keep: str) -> Iterator[Row]:
    """The planned cut and the even split of unequal nodes: steps, and of each node compute seconds and the
    share of the step in which it is idle, forecast and measured. `keep`: a folder for what is written."""
    specs = load_nodes(nodes)
    cluster = cluster_of(specs)
    with _files(load_run(config), cluster, steps, keep) as (folder, run), make_nodes(specs) as made:
        named, plans = {node.spec.name: node for node in made}, dict[str, Plan]()
        found: dict[str, list[Round]] = {"planned": [], "even": []}
        for number in range(rounds):
            problem = problem_of(run, cluster, measure_profile(made, folder, number))
            if not plans:
                best = search_plan(problem, run.search, micro_batch_size=run.train.micro_batch_size)
                if best.even_split is None:
                    raise SystemExit("there is no even split of this model over these nodes: more layers")
                plans = {"planned": best.best.plan, "even": best.even_split.plan}
            for name, plan in plans.items():
                used = [named[node_of(entry)] for entry in plan.ranks]
                lines = train(used, plan, folder / f"{name}-{number}", f"train.steps={steps}")
                found[name].append(Round(plan, cost_plan(make_costs(problem), plan), lines))
    for name, own in found.items():
        yield {**_row(name, own), **_of_nodes(own)}


def _of_nodes(rounds: Sequence[Round]) -> Row:
    """What each node has, computes and waits."""
    plan = rounds[0].plan
    step = statistics.median(one.cost.step_seconds for one in rounds)
    took = statistics.median(seconds for one in rounds for seconds in one.seconds)
    forecast = _medians([forecast_busy(plan, one.cost) for one in rounds])
    measured = _medians([busy for one in rounds for busy in one.busy])
    ranks = range(len(plan.ranks))
    layers = [sum(s.num_layers for s in plan.stages if rank in s.ranks) for rank in ranks]
    nodes = (f"{node_of(entry)} {count:g}" for entry, count in zip(plan.ranks, layers, strict=True))
    row: Row = {"nodes and layers": ", ".join(nodes), "compute forecast s": _listed(forecast, ".3f")}
    row |= {"compute measured s": _listed(measured, ".3f")}
    row |= {"idle forecast": _listed([1 - busy / step for busy in forecast], ".0%")}
    return row | {"idle measured": _listed([1 - busy / took for busy in measured], ".0%")}


# --- cuts over nodes that share network cards --------------------------------------------------------------

CHANGES = ("model.num_layers=8", "model.vocab_size=1024", "train.global_batch_size=8", "search.tensor=[1]")
CARDS_PER_NODE = 2
CPU = 0.95
"""Of a core for each node; the rest is for the machine's other programs."""


@dataclass(frozen=True)
class Cut:
    """A plan by hand: the cards of each stage and their layers, pipeline by pipeline."""

    name: str
    schedule: ScheduleName
    pipelines: tuple[tuple[tuple[int, int], ...], ...]
    """(rank, layers) of each stage. Ranks 0 and 1 are the faster cards, and share a NIC; so do 2 and 3."""
    sharded: bool = False

    @property
    def words(self) -> str:
        """`0:2 1:2 | 2:2 3:2`."""
        return " | ".join(" ".join(f"{rank}:{layers}" for rank, layers in own) for own in self.pipelines)


IN_TURN = (((0, 3), (1, 2), (2, 2), (3, 1)),)
CUTS = (
    Cut("node by node", "1f1b", IN_TURN),
    Cut("to and fro", "1f1b", (((0, 3), (2, 2), (1, 2), (3, 1)),)),
    Cut("zero bubble", "zero_bubble", IN_TURN),
    Cut("interleaved", "interleaved_1f1b", (tuple((rank, 1) for rank in (0, 1, 2, 3) * 2),)),
    Cut("sums of two rings", "1f1b", (((0, 4), (1, 4)), ((2, 4), (3, 4)))),
    Cut("sums and messages", "1f1b", (((0, 5), (3, 3)), ((2, 3), (1, 5))), sharded=True),
    Cut("gpipe", "gpipe", IN_TURN),
    Cut("zero bubble, sums", "zero_bubble", (((0, 4), (1, 4)), ((2, 4), (3, 4)))),
)


@case(
    "testbed/cuts",
    formats=FORMATS,
    cuts=(tuple(range(len(CUTS))),),
    steps=(6,),
    megabits=(100.0,),
    slowdown=((4.0, 6.0),),
    seconds=(1.5,),
    profile=("",),
    keep=("",),
)
def cuts(
    cuts: Sequence[int],
    steps: int,
    megabits: float,
    slowdown: Sequence[float],
    seconds: float,
    profile: str,
    keep: str,
) -> Iterator[Row]:
    """Plans by hand over two nodes of two simulated cards, which share the node's NIC: steps and peak memory.

    All are profiled once, all cards at the same time; `profile`: a file that was kept, instead. The cards
    sleep most of the time, by their `slowdown`, so that they do not wait for each other's cores.
    """
    cluster = make_cluster(megabits * 1e6 / 8, slowdown)
    specs = [NodeSpec(name=group.name, cpu=CPU, network=megabits * 1e6 / 8) for group in cluster.nodes]
    changes = f"train.steps={steps}", f"train.trace={{first_step: {steps - 1}, steps: 1}}"
    with _files(load_run(CONFIG, CHANGES), cluster, steps, keep) as (folder, run), make_nodes(specs) as nodes:
        path = Path(profile or folder / "profile.json")
        if not profile:
            words = ["profile", "--config", folder / "run.yaml", "--cluster", folder / "cluster.yaml"]
            commands = [[*words, "--out", path, "--seconds", seconds]] * len(nodes)
            yuan_train(nodes, commands, folder / "profile", PROFILE_SECONDS, cards=CARDS_PER_NODE)
        costs = make_costs(problem_of(run, cluster, load_profile(path)))
        for cut in (CUTS[number] for number in cuts):
            plan = plan_of(costs, run, cut)
            training = folder / cut.name.replace(",", "").replace(" ", "-")
            lines = train(nodes, plan, training, *changes, cards=CARDS_PER_NODE)
            yield _cut_row(cut, Round(plan, cost_plan(costs, plan), lines))


def _cut_row(cut: Cut, one: Round) -> Row:
    """Beside the steps, sums that are exposed, and the peak memory of each rank."""
    forecast = [0.0] * len(one.plan.ranks)
    for stage in one.cost.stages:
        for rank in one.plan.pipelines[stage.pipeline].stages[stage.stage].ranks:
            forecast[rank] = max(forecast[rank], stage.memory.total)
    measured = one.lines[-1]["peak_memory_bytes"]
    off = [expected / peak - 1 for expected, peak in zip(forecast, measured, strict=True)]
    row = _row(cut.name, [one]) | {"schedule": cut.schedule, "card:layers": cut.words}
    row["sums s"] = one.cost.grad_reduce_seconds + one.cost.weight_sync_seconds
    row["peak forecast, MiB"] = _listed([peak / 2**20 for peak in forecast], ".0f")
    row["measured, MiB"] = _listed([peak / 2**20 for peak in measured], ".0f")
    return row | {"memory off by": _listed(off, "+.1%")}


def make_cluster(bytes_per_second: float, slowdowns: Sequence[float]) -> Cluster:
    """Two nodes of two cards, whose cards have a type and share a NIC."""
    types = {f"core-{slowdown:g}": replace(CORE, slowdown=slowdown) for slowdown in slowdowns}
    link, network = Link(bandwidth=1e9, latency=1e-4), Link(bandwidth=bytes_per_second, latency=1e-4)
    nodes = tuple(
        NodeGroup(name=name, device=device, devices=CARDS_PER_NODE, link=link, network=network)
        for name, device in zip(("left", "right"), types, strict=True)
    )
    return Cluster(name="shared-nics", nodes=nodes, device_types=types)


def plan_of(costs: Costs, run: RunConfig, cut: Cut) -> Plan:
    """The cut's plan; micro-batches are divided equally over its pipelines."""
    keys = {"micro_batch_size": run.train.micro_batch_size, "sharded": cut.sharded}
    return hand_plan(costs, cut.pipelines, schedule=cut.schedule, **keys)


# --- from addresses to a run --------------------------------------------------------------------------------

STEP = re.compile(r"\| step +1/")
STARTED = re.compile(r"^\[\d+/\d+, \d+ s\] \$ yuan-train (\w[\w-]*)")


@case("testbed/up", formats={"first step s": ".0f"}, nodes=(str(HERE / "nodes.yaml"),), words=((),))
def up(nodes: str, words: Sequence[str]) -> Row:
    """`yuan-train up` on unequal nodes, from their addresses alone through a stand-in for ssh: seconds to the
    first logged step, and of the steps before. `words`: further ones of `up`."""
    begin()
    with (
        tempfile.TemporaryDirectory() as scratch,
        make_nodes(load_nodes(nodes)) as made,
        ExitStack() as cleanup,
    ):
        # The machine to start from competes with other programs as little as the nodes do.
        group = find_quotas(MOUNTS).add(f"yt{os.getpid()}-starter", 1.0, cleanup)
        ssh = Path(scratch) / "ssh-to-testbed"
        write_ssh(made, ssh)
        own = ["--hosts", ",".join(node.address for node in made), "--ssh", str(ssh), "--steps", "3"]
        own += ["--out", str(Path(scratch) / "up"), "--model", "tiny", "--data", "README.md", *words]
        found = _seconds_of_up(own, group / "cgroup.procs")
    first = found.pop("first step")
    return {"first step s": first, **{f"{name} s": f"{took:.0f}" for name, took in found.items()}}


def _seconds_of_up(words: Sequence[str], group: Path) -> dict[str, float]:
    """Seconds of each step of `up` but the last, and `first step`, all together until one is logged.

    `group` takes the process that starts all. Raises TrainingError if `up` fails.
    """
    began = since = time.monotonic()
    join = ["sh", "-c", 'echo $$ > "$0" && exec "$@"', str(group)]
    line = [*join, sys.executable, "-m", "yuan_train", "up", *words]
    found: dict[str, float] = {}
    name = ""
    with subprocess.Popen(line, stderr=subprocess.PIPE, text=True) as process:
        for text in process.stderr or ():
            print(text, end="", file=sys.stderr, flush=True)
            now = time.monotonic()
            if started := STARTED.match(text):
                found |= {name: now - since} if name else {}
                name, since = started[1], now
            if STEP.search(text):
                found.setdefault("first step", now - began)
    if process.returncode or "first step" not in found:
        raise TrainingError(f"`up` ended with exit code {process.returncode}")
    return found


# --- how much of a gradient reduction the backward hides -----------------------------------------------

NETWORKS = {"1 Gb/s": 125e6, "100 Mb/s": 12.5e6}
SHARE = 0.5
"""Of the backward that the reduction takes."""
ONE_BUCKET = 10**12


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
    begin()
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
        ways = {
            way: (costs, Round(plan, cost_plan(costs, plan), []))
            for way, costs in (("alone", whole), ("one-bucket", whole), ("two-a-layer", halves))
        }
        for number in range(rounds):
            for way, (costs, found) in ways.items():
                changes = [f"train.steps={steps}", f"optimizer.bucket_size={costs.problem.bucket_size}"]
                changes += [f"train.global_batch_size={size}"] if way == "alone" else []
                found.lines.extend(_train(nodes, folder / f"{way}-{number}", changes, alone=way == "alone"))
    return _overlap_row(network, *(found for _, found in ways.values()))


def _overlap_row(network: str, alone: Round, one: Round, many: Round) -> Row:
    reduction, seconds = one.cost.grad_reduce_seconds, statistics.median(alone.seconds)
    row: Row = {"network": network, "backward s": one.cost.stages[0].backward_seconds}
    row |= {"reduction s": reduction, "alone s": seconds}
    for name, way in (("one bucket", one), ("two a layer", many)):
        took = statistics.median(way.seconds)
        row[f"{name} s"] = f"{way.cost.step_seconds:.3f}, {took:.3f}"
        row[f"{name}, exposed"] = f"{(took - seconds) / reduction:.0%}"
        row[f"{name}, waited"] = f"{(way.waited - alone.waited) / reduction:.0%}"
        off = way.error, statistics.median(way.replayed_errors)
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
    stages = [[(card, run.model.num_layers)] for card, _ in enumerate(costs.problem.cluster.cards)]
    return hand_plan(costs, stages, micro_batch_size=run.train.micro_batch_size)


def _train(nodes: Sequence[Node], folder: Path, changes: Sequence[str], *, alone: bool) -> list[Row]:
    """Metrics of the steps after the warm-up, of the node that took longer; each `alone` has its own plan."""
    commands = [
        ["train", "--config", folder.parent / "run.yaml", "--plan", folder.parent / f"{plan}.yaml", *changes]
        + [f"log.directory={folder / node.spec.name}", "log.every=1", "checkpoint.directory="]
        for node in nodes
        for plan in [node.spec.name if alone else "plan"]
    ]
    yuan_train(nodes, commands, folder, TRAIN_SECONDS, alone=alone)
    logs = [read_metrics(path.parent)[WARM_UP_STEPS:] for path in sorted(folder.glob("*/metrics.jsonl"))]
    return [max(lines, key=lambda line: line["step_seconds"]) for lines in zip(*logs, strict=True)]
