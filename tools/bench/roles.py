"""Placement of roles: against every split on drawn clusters, and on 4 H800 beside 4 H20. Without cards."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from tools.bench.harness import MISSED, Row, case, cost
from tools.bench.problems import make_problem, node
from yuan_train.config.cluster import Cluster
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.run import SearchConfig
from yuan_train.planner.report.roles import describe
from yuan_train.planner.roles.engines import Workload
from yuan_train.planner.roles.placement import RolesProblem
from yuan_train.planner.roles.plan import make_rl_plan
from yuan_train.planner.roles.search import RolesSearch, search_roles

TYPES = ("H800-80G", "H20", "A100-40G", "RTX-4090", "L40S")


def cluster_of(cards: dict[str, int]) -> Cluster:
    nodes = (
        node(name.lower(), name, count, near=(100e9, 5e-6), far=(25e9, 1e-5)) for name, count in cards.items()
    )
    return Cluster(name="unlike", nodes=tuple(nodes))


def problem_of(
    cluster: Cluster, model: ModelConfig, *, prompts: int, group: int, prompt: int, new: int, **changes: Any
) -> RolesProblem:
    drawn = {"prompt_tokens": prompt, "new_tokens": new, "expected_new_tokens": new}
    load = Workload(model=model, precision="bf16", prompts=prompts, group=group, **drawn)
    base = make_problem(cluster, model, prompts * group, sequence_length=prompt + new)
    one_cut = SearchConfig(schedule=("1f1b",), tensor=(1,), recompute=("none",), replicas=(1,))
    found = RolesProblem(
        policy=base, load=load, micro_batch_size=1, policy_search=one_cut, packed_rows=load.samples
    )
    return replace(found, **changes)


def drawn(seed: int, *, most_cards: int, fewest_cards: int = 0) -> RolesProblem:
    """A cluster of two or three types, a model and samples of some size."""
    draw = random.Random(seed)
    names = draw.sample(TYPES, draw.choice((2, 2, 3)))
    counts: dict[str, int] = {name: 1 for name in names}
    for _ in range(draw.randint(max(fewest_cards - len(names), 0), most_cards - len(names))):
        counts[draw.choice(names)] += 1
    model = load_model("configs/model/qwen2.5-0.5b.yaml")
    model = replace(model, num_layers=draw.choice((4, 6)))
    return problem_of(
        cluster_of(counts),
        model,
        prompts=draw.choice((2, 4)),
        group=draw.choice((2, 4)),
        prompt=draw.choice((64, 256)),
        new=draw.choice((64, 512)),
        reference=draw.random() < 0.5,
        staleness=draw.choice((1, 2)),
        time_limit=1e6,
    )


def beside_critic(problem: RolesProblem) -> RolesProblem:
    """The problem of a policy with a critic, which keeps nothing on hosts."""
    search = replace(problem.policy_search, offload=())
    return replace(problem, policy=replace(problem.policy, critic=True), policy_search=search)


def brute_force(search: RolesSearch) -> float:
    """The fastest step of all splits, ways and modes, each of them priced."""
    steps = [
        placement.step_seconds
        for shared, splits in ((False, search.splits()), (True, search.splits(shared=True)))
        for split in splits
        for placement in search.placements(split, shared=shared)
    ]
    return min(steps)


H800_H20 = {"H800-80G": 4, "H20": 4}
SPLITS = {"H20 generate": ((4, 0, 0), (0, 4, 0)), "swapped": ((0, 4, 0), (4, 0, 0))}


def on_h800_and_h20(name: str, seconds: float, search: SearchConfig | None = None) -> RolesProblem:
    """512 samples of 256 + 2048 tokens of a Qwen 2.5, as the prototype had them."""
    cluster, model = cluster_of(H800_H20), load_model(f"configs/model/qwen2.5-{name}.yaml")
    found = problem_of(cluster, model, prompts=32, group=16, prompt=256, new=2048, time_limit=seconds)
    return replace(found, policy_search=search or SearchConfig())


def fixed_step(problem: RolesProblem, name: str) -> float:
    """Seconds of a step of one of SPLITS, asynchronous."""
    placed = RolesSearch(replace(problem, modes=("async",))).placements(SPLITS[name], shared=False)
    return placed[0].step_seconds if placed else float("inf")


@case(
    "roles/drawn",
    formats={"step s": ".4f", "brute force s": ".4f"},
    seed=tuple(range(30)),
    fewest=(6,),
    cards=(8,),
    critic=(False,),
)
def beside_brute_force(seed: int, fewest: int, cards: int, critic: bool) -> Row:
    """The search beside brute force over splits, engines, modes and placements, on drawn clusters of two or
    three types and so many cards; with a critic, of PPO."""
    problem = drawn(seed, most_cards=cards, fewest_cards=min(fewest, cards))
    problem = beside_critic(problem) if critic else problem
    search, row = RolesSearch(problem), Row(seed=seed, cards=len(problem.policy.cluster.cards))
    with cost(row):
        result = search_roles(problem, search)
    best, wanted = result.best.step_seconds, brute_force(search)
    row |= {"splits": result.num_splits, "priced": result.num_priced, "step s": best, "brute force s": wanted}
    plan = make_rl_plan(problem, result)
    assert plan.forecast is not None and result.best.policy.cost.fits
    for role, entries in plan.forecast.roles.items():
        for entry in entries:
            ranks = plan.plans[role].pipelines[entry.pipeline].stages[entry.stage].ranks  # type: ignore[index]
            types = [plan.plans[role].device_type(rank) for rank in ranks]  # type: ignore[index]
            assert all(kind and entry.peak_memory_bytes <= kind.memory for kind in types)
    if abs(best - wanted) > 1e-9 * wanted:
        row[MISSED] = f"seed {seed}: {best} s, and {wanted} s by brute force"
    return row


@case("roles/h800", formats={"step s": ".1f", "sync s": ".1f"}, name=("1.5b", "7b", "14b"), seconds=(60.0,))
def beside_fixed(name: str, seconds: float) -> Row:
    """The best placement beside the policy on all H800, and beside the roles swapped."""
    problem, row = on_h800_and_h20(name, seconds), Row(name=name)
    with cost(row):
        result = search_roles(problem)
    best = result.best
    row |= {"step s": best.step_seconds, "found": describe(best), "sync s": best.sync_mode_seconds}
    row |= {"splits": result.num_splits, "priced": result.num_priced}
    for key in SPLITS:
        fixed = fixed_step(problem, key)
        row[key] = f"{fixed:.1f} s, {fixed / best.step_seconds:.2f} x"
    return row
