"""python tools/bench_tier_plans.py: what the planner finds with and without hosts, where memory is short.

Catalogue rates, 4,096 tokens, bf16; 20 GB/s within a node, 3 GB/s between nodes, 10 and 20 us. Each case is
planned without offload and with what the search may offload by default. Beside it, what a host that is
smaller by a GiB than the plan needs changes. Exits with 1 if a bar is missed: all cases get a plan, what fits
without hosts by itself stays there, a smaller host gives another plan or none, and 51B takes EXPECTED seconds
within MOST_OFF of them.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Cluster, Host, Link, NodeGroup, load_cluster
from yuan_train.config.devices import GIB
from yuan_train.config.errors import NoPlanFits
from yuan_train.config.model import load_model
from yuan_train.config.plan import Plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.search_result import SearchResult

LENGTH, RESERVED = 4096, 8 * GIB
EXPECTED, MOST_OFF = 166.8, 0.03
"""Of a step of 51B, by a prototype of the search."""


@dataclass(frozen=True)
class Case:
    """A model on cards of these types, one list for each node."""

    name: str
    model: str
    sequences: int
    nodes: tuple[tuple[str, int], ...] = ()
    cluster: str = ""
    """A file, instead of nodes."""
    fits_without: bool = False

    def problem(self, hosts: Sequence[float] = ()) -> PlanProblem:
        """What to plan; `hosts`: bytes of each node's, if that is to be checked."""
        if self.cluster:
            cluster = load_cluster(self.cluster)
        else:
            nodes = tuple(
                NodeGroup(
                    name=f"n{i}",
                    device=device,
                    devices=count,
                    link=Link(bandwidth=20e9, latency=10e-6),
                    network=Link(bandwidth=3e9, latency=20e-6),
                    host=Host(memory=int(hosts[i])) if hosts else None,
                )
                for i, (device, count) in enumerate(self.nodes)
            )
            cluster = Cluster(name="case", nodes=nodes)
        return PlanProblem(
            cluster=cluster,
            model=load_model(f"configs/model/{self.model}.yaml"),
            sequence_length=LENGTH,
            global_batch_size=self.sequences,
            precision="bf16",
            host_reserved=RESERVED,
        )


CASES = (
    Case("2B, one A100-80G", "yuan2-2b", 64, (("A100-80G", 1),), fits_without=True),
    Case("2B, one A100-40G", "yuan2-2b", 64, (("A100-40G", 1),)),
    Case("2B, one RTX-3090", "yuan2-2b", 64, (("RTX-3090", 1),)),
    Case("2B, RTX-4090 and RTX-3080", "yuan2-2b", 64, (("RTX-4090", 1), ("RTX-3080", 1))),
    Case("2B, 4 RTX-3080", "yuan2-2b", 64, (("RTX-3080", 4),)),
    Case("51B, a800-a100", "yuan2-51b", 256, cluster="configs/cluster/a800-a100.yaml"),
)


def main() -> int:
    """Plan every case, or those whose names have a word; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", metavar="WORD")
    parser.add_argument("--seconds", type=float, default=300.0, help="time limit of each search (300)")
    options = parser.parse_args()
    missed: list[str] = []
    print("| case | sequences | without | with | optimizer state on the host | planned in |")
    print("|---|--:|--:|--:|--:|--:|")
    for case in CASES:
        if options.only in case.name:
            missed += [f"{case.name}: {fault}" for fault in _run(case, options.seconds)]
    for fault in missed:
        print(f"missed: {fault}")
    return int(bool(missed))


def _run(case: Case, seconds: float) -> list[str]:
    """Print a case's line; the bars that it misses."""
    plain = _plan(case.problem(), SearchConfig(offload=(), time_limit=seconds))
    began = time.perf_counter()
    found = _plan(case.problem(), SearchConfig(time_limit=seconds))
    took = time.perf_counter() - began
    words = ["no plan" if one is None else f"{one.best.step_seconds:.1f} s" for one in (plain, found)]
    away = "" if found is None else _fractions(found.best.plan)
    print(f"| {case.name} | {case.sequences} | {words[0]} | {words[1]} | {away} | {took:.0f} s |", flush=True)
    if found is None:
        return ["no plan"]
    faults: list[str] = []
    stages = found.best.cost.stages
    if case.fits_without and any(stage.host_bytes for stage in stages):
        faults.append("something is on a host, where everything fits")
    if case.cluster and abs(found.best.step_seconds / EXPECTED - 1) > MOST_OFF:
        faults.append(f"{found.best.step_seconds:.1f} s, expected {EXPECTED}")
    if any(stage.host_bytes for stage in stages) and not case.cluster:
        faults += _with_smaller_hosts(case, found, seconds)
    return faults


def _with_smaller_hosts(case: Case, found: SearchResult, seconds: float) -> list[str]:
    """Plan with hosts that have just what the plan takes, and with a GiB less on each that has that much."""
    needed = [0.0] * len(case.nodes)
    for stage in found.best.cost.stages:
        for card in stage.cards:
            node = int(card.node.removeprefix("n"))
            # The cards of a node share it equally.
            needed[node] = max(needed[node], stage.host_bytes * case.nodes[node][1])
    hosts = [RESERVED + max(own, 2 * GIB) + 2**20 for own in needed]
    enough = _plan(case.problem(hosts), SearchConfig(time_limit=seconds))
    fewer = [own - GIB for own in hosts]
    less = _plan(case.problem(fewer), SearchConfig(time_limit=seconds))
    words = "no plan" if less is None else f"{less.best.step_seconds:.1f} s, {_fractions(less.best.plan)}"
    sizes = " and ".join(f"{own / GIB:.1f}" for own in hosts)
    print(f"| with a GiB less than {sizes} GiB on its host | {case.sequences} | | {words} | | |", flush=True)
    faults: list[str] = []
    if enough is None or enough.best.step_seconds > found.best.step_seconds * (1 + 1e-9):
        faults.append("a host that has just enough gives a slower plan")
    if less is not None and _stages(less.best.plan) == _stages(found.best.plan):
        faults.append("a host that is too small by a GiB changes nothing")
    return faults


def _plan(problem: PlanProblem, search: SearchConfig) -> SearchResult | None:
    try:
        return search_plan(problem, search, micro_batch_size=1)
    except NoPlanFits:
        return None


def _stages(plan: Plan) -> list[object]:
    return [replace(pipeline) for pipeline in plan.pipelines]


def _fractions(plan: Plan) -> str:
    """What stages have on their hosts: of the optimizer state in hundredths, and layers' activations."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    shares = dict.fromkeys(f"{100 * stage.optimizer_offload:.0f}" for stage in stages)
    away = sum(stage.activation_offload for stage in stages)
    return f"{', '.join(shares)} %" + (f", activations of {away} layers" if away else "")


if __name__ == "__main__":
    sys.exit(main())
