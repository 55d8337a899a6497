"""python -m tools.testbed.cuts: forecast against measurement for cuts over nodes that share network cards.

Makes two nodes of two simulated cards each (tools/testbed/nodes.py; needs root), whose cards share the node's
throttled NIC. Profiles them, all at the same time, and then, cut by cut, forecasts a hand-made plan from that
profile, trains a few steps under it, and prints step time and peak memory beside the forecast. The cards
sleep most of the time, so that they do not wait for each other's cores.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tools.testbed.nodes import NodeSpec, ended_well, make_nodes
from tools.testbed.run import (
    CORE,
    PROFILE_SECONDS,
    WARM_UP_STEPS,
    Round,
    train,
    warn_of_load,
    with_random_data,
    yuan_train,
)
from yuan_train.cli.plan import problem_of
from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan, ScheduleName
from yuan_train.config.profile import load_profile
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.shapes import PipelineCut, assemble_plan
from yuan_train.profile.units import machine_name

CONFIG = Path(__file__).parent / "run.yaml"
CHANGES = ("model.num_layers=8", "model.vocab_size=1024", "train.global_batch_size=8", "search.tensor=[1]")
CARDS_PER_NODE = 2
CPU = 0.95
"""Of a core for each node: its two cards use less than half of it."""


@dataclass(frozen=True)
class Cut:
    """A plan by hand: the cards of each stage and their layers, pipeline by pipeline."""

    name: str
    schedule: ScheduleName
    pipelines: tuple[tuple[tuple[int, int], ...], ...]
    """(rank, layers) of each stage. Ranks 0 and 1 are the faster cards, and share a
    NIC; so do 2 and 3."""
    sharded: bool = False

    @property
    def words(self) -> str:
        """`0:2 1:2 | 2:2 3:2`."""
        return " \\| ".join(
            " ".join(f"{rank}:{layers}" for rank, layers in pipeline) for pipeline in self.pipelines
        )


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


@dataclass(frozen=True)
class Row(Round):
    """A cut's training."""

    cut: Cut

    @property
    def forecast_bytes(self) -> list[float]:
        """Forecast peak memory of each rank."""
        found = [0.0] * len(self.plan.ranks)
        for stage in self.cost.stages:
            for rank in self.plan.pipelines[stage.pipeline].stages[stage.stage].ranks:
                found[rank] = max(found[rank], stage.memory.total)
        return found


@ended_well
def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=6, help=f"steps, {WARM_UP_STEPS} of them warm-up")
    parser.add_argument("--network", type=float, default=100.0, metavar="MBIT", help="rate of a NIC, Mb/s")
    parser.add_argument(
        "--slowdown",
        type=float,
        nargs=2,
        default=(4.0, 6.0),
        help="of the left node's cards, and of the right one's",
    )
    parser.add_argument(
        "--cuts", default=",".join(map(str, range(len(CUTS)))), help="which, by number (default: all)"
    )
    parser.add_argument("--seconds", type=float, default=1.5, help="how long the profile repeats a unit")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="one that --keep kept; measure none")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep profile, plans and logs here")
    options = parser.parse_args()
    cuts = chosen(options.cuts)
    if options.steps <= WARM_UP_STEPS or options.network <= 0 or min(options.slowdown) <= 1:
        raise ConfigError(f"wanted more than {WARM_UP_STEPS} steps, --network above 0, --slowdown above 1")
    warn_of_load()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.keep or Path(scratch)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        print("\n".join(head()))
        rows: list[Row] = []
        for row in measure(cuts, options, folder):
            rows.append(row)
            print(line_of(row), flush=True)
        mean = statistics.mean(abs(row.error) for row in rows)
        print(f"\nOff by {mean:.1%} in the mean over {len(rows)} cuts.")
    return 0


def chosen(words: str) -> list[Cut]:
    """The cuts that `--cuts` names. Raises ConfigError."""
    try:
        return [CUTS[int(word)] for word in words.split(",")]
    except (ValueError, IndexError):
        raise ConfigError(f"--cuts {words}: wanted numbers from 0 to {len(CUTS) - 1}, as in 0,2") from None


def measure(cuts: Sequence[Cut], options: argparse.Namespace, folder: Path) -> Iterator[Row]:
    """Profile once, then forecast and train each cut, and yield it."""
    cluster = make_cluster(options.network * 1e6 / 8, options.slowdown)
    run = with_random_data(load_run(CONFIG, CHANGES), folder)
    write_text(folder / "run.yaml", dump(run))
    write_text(folder / "cluster.yaml", dump(cluster))
    specs = [NodeSpec(name=group.name, cpu=CPU, network=options.network * 1e6 / 8) for group in cluster.nodes]
    with make_nodes(specs) as nodes:
        profile = options.profile or folder / "profile.json"
        if options.profile is None:
            words = ["profile", "--config", folder / "run.yaml", "--cluster", folder / "cluster.yaml"]
            words += ["--out", profile, "--seconds", options.seconds]
            commands = [words] * len(nodes)
            yuan_train(nodes, commands, folder / "profile", PROFILE_SECONDS, cards=CARDS_PER_NODE)
        costs = make_costs(problem_of(run, cluster, load_profile(profile)))
        changes = (
            f"train.steps={options.steps}",
            f"train.trace={{first_step: {options.steps - 1}, steps: 1}}",
        )
        for cut in cuts:
            plan = plan_of(costs, run, cut)
            training = folder / cut.name.replace(",", "").replace(" ", "-")
            lines = train(nodes, plan, training, *changes, cards=CARDS_PER_NODE)
            yield Row(plan, cost_plan(costs, plan), lines, cut)


def make_cluster(bytes_per_second: float, slowdowns: Sequence[float]) -> Cluster:
    """Two nodes of two cards, whose cards have a type and share a NIC."""
    types = {f"core-{slowdown:g}": replace(CORE, slowdown=slowdown) for slowdown in slowdowns}
    link, network = Link(bandwidth=1e9, latency=1e-4), Link(bandwidth=bytes_per_second, latency=1e-4)
    return Cluster(
        name="shared-nics",
        nodes=tuple(
            NodeGroup(
                name=name, device=f"core-{slowdown:g}", devices=CARDS_PER_NODE, link=link, network=network
            )
            for name, slowdown in zip(("left", "right"), slowdowns, strict=True)
        ),
        device_types=types,
    )


def plan_of(costs: Costs, run: RunConfig, cut: Cut) -> Plan:
    """The cut's plan; micro-batches are divided equally over its pipelines."""
    cards = costs.problem.cluster.cards
    cuts: list[PipelineCut] = []
    for pipeline in cut.pipelines:
        ends = [1 + sum(layers for _, layers in pipeline[: s + 1]) for s in range(len(pipeline))]
        cuts.append(
            PipelineCut(
                micro_batch_size=run.train.micro_batch_size,
                num_micro_batches=run.train.global_batch_size
                // run.train.micro_batch_size
                // len(cut.pipelines),
                stage_groups=tuple(((cards[rank],),) for rank, _ in pipeline),
                bounds=(0, *ends[:-1], ends[-1] + 1),
                recompute=("none",) * len(pipeline),
            )
        )
    return assemble_plan(costs, cuts, schedule=cut.schedule, sharded=cut.sharded)


def head() -> list[str]:
    """Markdown: the table's head, and the machine above it."""
    return [
        f"Machine: {machine_name()}",
        "",
        "| cut | schedule | card:layers | forecast s | sums s | measured s (min to max) | off by "
        "| with measured compute | peak forecast, MiB | measured, MiB | off by |",
        "|---|---|---|--:|--:|--:|--:|--:|---|---|---|",
    ]


def line_of(row: Row) -> str:
    """Markdown: step time and peak memory of each rank, forecast and measured; of sums, what is exposed."""
    forecast = row.forecast_bytes
    measured = row.lines[-1]["peak_memory_bytes"]
    off = [expected / peak - 1 for expected, peak in zip(forecast, measured, strict=True)]
    exposed = row.cost.grad_reduce_seconds + row.cost.weight_sync_seconds
    return (
        f"| {row.cut.name} | {row.cut.schedule} | {row.cut.words} | {row.cost.step_seconds:.3f} "
        f"| {exposed:.3f} | {statistics.median(row.seconds):.3f} ({min(row.seconds):.3f} to "
        f"{max(row.seconds):.3f}) | {row.error:+.1%} | {statistics.median(row.replayed_errors):+.1%} "
        f"| {', '.join(f'{peak / 2**20:.0f}' for peak in forecast)} "
        f"| {', '.join(f'{peak / 2**20:.0f}' for peak in measured)} "
        f"| {', '.join(f'{error:+.1%}' for error in off)} |"
    )


if __name__ == "__main__":
    sys.exit(main())
