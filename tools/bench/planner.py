"""Benchmarks of the planner: search time, what effort gains, whether choice makes plans slower, tiers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tools.bench.harness import MISSED, Row, case, cost
from tools.bench.problems import (
    NAMED,
    SIZES,
    TIER_CASES,
    TierCase,
    large_problem,
    mixed_problem,
    small_problem,
    with_external_profile,
)
from yuan_train.config.devices import GIB
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.plan import Plan
from yuan_train.config.run import Effort, SearchConfig
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.search.search import SearchResult, search_plan

EXPECTED, MOST_OFF = 166.8, 0.03
"""Seconds of a step of 51B, by a prototype of the search."""
WIDEST: dict[str, Any] = {"offload": ("optimizer", "activations")}
WIDEST_EXTERNAL: dict[str, Any] = WIDEST | {
    "schedule": ("1f1b", "zero_bubble", "interleaved_1f1b"),
    "tensor": (1, 2, 4),
    "micro_batch_size": (1, 2, 3, 4, 6, 8, 12),
    "replicas": tuple(range(1, 13)),
}
"""With an external profile keys that are left open allow less, so that all are named."""
CHAINS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"schedule": ("1f1b",)}, {"schedule": ("1f1b", "zero_bubble")}),
    ({"schedule": ("zero_bubble",)}, {"schedule": ("1f1b", "zero_bubble")}),
    ({"tensor": (1,)}, {"tensor": (1, 2)}),
    ({"tensor": (2,)}, {"tensor": (1, 2)}),
    ({"micro_batch_size": (1,)}, {"micro_batch_size": (1, 2)}),
    ({"micro_batch_size": (2,)}, {"micro_batch_size": (1, 2)}),
    ({"recompute": ("none",)}, {"recompute": ("none", "full")}),
    ({"offload": ()}, {"offload": ("optimizer",)}),
    ({"pipelines": (1,)}, {"pipelines": (1, 2)}),
    ({"replicas": (1,)}, {"replicas": (1, 2)}),
    (
        {"schedule": ("1f1b",), "micro_batch_size": (1,), "offload": ()},
        {"schedule": ("1f1b",), "offload": ()},
    ),
)
"""Keys from narrow to wide; the widest search of all ends each."""


@case(
    "planner/time",
    formats={"step s": ".1f", "gap": ".0%"},
    costs={"CPU s": 0.15, "step s": 0.002},
    cards=tuple(SIZES),
    irregular=(False, True),
)
def search_time(cards: int, irregular: bool) -> Row:
    """Time, memory and gap of one search. The gap is to a bound that no plan can beat, not to the optimum."""
    row: Row = {"cards": cards, "irregular": irregular}
    with cost(row):
        problem = large_problem(cards, irregular=irregular)
        found = search_plan(problem, SearchConfig(time_limit=600.0), micro_batch_size=1)
    best = found.best
    row |= {"step s": best.step_seconds, "gap": best.step_seconds / found.lower_bound_seconds - 1}
    plan = best.plan
    shape = f"{len(plan.pipelines)} x {len(plan.pipelines[0].stages)}"
    return row | {"cards used": plan.world_size, "pipelines x stages": shape}


@case(
    "planner/effort",
    formats={"CPU s": ".1f", "step s": ".4g", "gain": ".2%"},
    costs={"CPU s": 0.15, "step s": 0.002},
    cluster=tuple(NAMED),
    effort=("normal",),
)
def effort(cluster: str | int, effort: Effort) -> Row:
    """The plan of a mixed cluster, named or the random one of a seed, and what more effort gains
    (`cluster=[200,201] effort=thorough`: beside one of normal effort)."""
    problem = mixed_problem(cluster)

    def found(effort: Effort) -> float:
        plan = _plan(problem, SearchConfig(time_limit=3600.0, simplicity=0.0, effort=effort))
        return plan.best.step_seconds if plan else math.inf

    row: Row = {"cluster": cluster, "effort": effort, "cards": len(problem.cluster.cards)}
    with cost(row):
        row["step s"] = found(effort)
    return row if effort == "normal" else row | {"gain": 1 - row["step s"] / found("normal")}


@case(
    "planner/choice",
    formats={"slower by": ".2%", "CPU s": ".1f"},
    seed=tuple(range(60)),
    chains=(2,),
    external=(False, True),
)
def choice(seed: int, chains: int, external: bool) -> Row:
    """Whether more choice makes the plan slower: random clusters, by estimates and with times that another
    program measured, with every key open and with fewer."""
    problem = small_problem(seed)
    if external:
        problem = with_external_profile(problem, seed)
    chosen = random.Random(seed).sample(CHAINS, min(chains, len(CHAINS)))
    row: Row = {"seed": seed, "external": external, "cards": len(problem.cluster.cards)}
    with cost(row):
        found = list(violations(problem, chosen))
    keys, wider, loss = max(found, key=lambda one: one[2])
    row |= {"compared": len(found), "slower by": max(loss, 0.0)}
    return row | ({MISSED: f"seed {seed}: {keys} is {loss:.2%} faster than {wider}"} if loss > 1e-6 else {})


def violations(
    problem: PlanProblem, chains: Sequence[tuple[dict[str, Any], ...]]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], float]]:
    """(keys, wider keys, part of its step by which the wider search's plan is slower; 0 or less if it is
    not), of all neighbours in the chains."""
    known: dict[str, float] = {}
    is_external = problem.profile is not None and problem.profile.is_whole
    widest = WIDEST_EXTERNAL if is_external else WIDEST

    def seconds(keys: dict[str, Any]) -> float:
        if repr(keys) not in known:
            search = SearchConfig(time_limit=600.0, simplicity=0.0, **(widest | keys))
            found = _plan(problem, search)
            known[repr(keys)] = found.best.step_seconds if found else math.inf
        return known[repr(keys)]

    for chain in chains:
        for keys, wider in zip(chain, (*chain[1:], {}), strict=True):
            narrow, wide = seconds(keys), seconds(wider)
            yield keys, wider, 0.0 if math.isinf(narrow) else wide / narrow - 1.0


@case("planner/tiers", formats={"planned in s": ".0f"}, name=tuple(TIER_CASES), seconds=(300.0,))
def tiers(name: str, seconds: float) -> Iterator[Row]:
    """What is found with and without hosts where memory is short, and with hosts smaller by a GiB."""
    given = TIER_CASES[name]
    plain = _plan(given.problem(), SearchConfig(offload=(), time_limit=seconds))
    began = time.perf_counter()
    found = _plan(given.problem(), SearchConfig(time_limit=seconds))
    row: Row = {"case": name, "sequences": given.sequences, "without": _words(plain), "with": _words(found)}
    row["on hosts"] = _fractions(found.best.plan) if found else ""
    row["planned in s"] = time.perf_counter() - began
    if found is None:
        yield row | {MISSED: f"{name}: no plan"}
        return
    away = any(stage.host_bytes for stage in found.best.cost.stages)
    if given.fits_without and away:
        row[MISSED] = f"{name}: something is on a host, where everything fits"
    if given.cluster and abs(found.best.step_seconds / EXPECTED - 1) > MOST_OFF:
        row[MISSED] = f"{name}: {found.best.step_seconds:.1f} s, expected {EXPECTED}"
    yield row
    if away and not given.cluster:
        yield _with_smaller_hosts(name, given, found, seconds)


def _with_smaller_hosts(name: str, given: TierCase, found: SearchResult, seconds: float) -> Row:
    """Plan with hosts that have just what the plan takes, and with a GiB less on each that has that much."""
    needed = [0.0] * len(given.nodes)
    for stage in found.best.cost.stages:
        for card in stage.cards:
            node = int(card.node.removeprefix("n"))
            # The cards of a node share it equally.
            needed[node] = max(needed[node], stage.host_bytes * given.nodes[node][1])
    hosts = [given.reserved + max(own, 2 * GIB) + 2**20 for own in needed]
    enough = _plan(given.problem(hosts), SearchConfig(time_limit=seconds))
    less = _plan(given.problem([own - GIB for own in hosts]), SearchConfig(time_limit=seconds))
    sizes = " and ".join(f"{own / GIB:.1f}" for own in hosts)
    row: Row = {"case": f"{name}, a GiB less than {sizes} GiB on its host", "sequences": given.sequences}
    row |= {"with": _words(less), "on hosts": _fractions(less.best.plan) if less else ""}
    if enough is None or enough.best.step_seconds > found.best.step_seconds * (1 + 1e-9):
        row[MISSED] = f"{name}: a host that has just enough gives a slower plan"
    if less is not None and less.best.plan.pipelines == found.best.plan.pipelines:
        row[MISSED] = f"{name}: a host that is too small by a GiB changes nothing"
    return row


def _plan(problem: PlanProblem, search: SearchConfig) -> SearchResult | None:
    try:
        return search_plan(problem, search, micro_batch_size=1)
    except (ConfigError, NoPlanFits):
        return None


def _words(found: SearchResult | None) -> str:
    return "no plan" if found is None else f"{found.best.step_seconds:.1f} s"


def _fractions(plan: Plan) -> str:
    """What stages have on their hosts: of the optimizer state in hundredths, and layers' activations."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    shares = dict.fromkeys(f"{100 * stage.optimizer_offload:.0f}" for stage in stages)
    away = sum(stage.activation_offload for stage in stages)
    return f"{', '.join(shares)} %" + (f", activations of {away} layers" if away else "")
