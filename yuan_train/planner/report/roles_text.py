"""The placement of roles as text for the terminal, and as one object for --json."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from yuan_train.config.cluster import Card
from yuan_train.config.load import as_plain
from yuan_train.config.plan import node_of
from yuan_train.config.rl_plan import RlPlan
from yuan_train.config.units import show_bytes, show_duration, show_seconds
from yuan_train.planner.report.answer import estimated_words, rent_words, values_of
from yuan_train.planner.roles.engines import EnginePlan, Generation
from yuan_train.planner.roles.placement import Placement, RolesProblem
from yuan_train.planner.roles.search import RolesResult


def roles_table(
    result: RolesResult, problem: RolesProblem, plan: RlPlan, *, answer: Sequence[str] = ()
) -> str:
    """At most a screen of text: the answer, roles and their cards, engines, the step, what else was tried."""
    best = result.best
    lines = [*role_lines(best, plan), step_words(best, problem), idle_words(best), proof_words(result)]
    lines += [*(f"instead: {line}" for line in other_lines(result)), source_words(best)]
    return "\n".join([*answer, f"RL plan: {describe(best)}", *(f" {line}" for line in lines)])


def roles_answer(
    result: RolesResult,
    problem: RolesProblem,
    plan: RlPlan,
    *,
    num_steps: int,
    measure: str | None = None,
    next_command: str | None = None,
) -> list[str]:
    """What a person asks first: how long and how fast, how full, for how much, and what to type next."""
    step, cluster = result.best.step_seconds, problem.policy.cluster
    lines = [] if result.best.source == "measured" else [estimated_words(measure)]
    steps = f"{num_steps:,} step{'s' * (num_steps != 1)}"
    lines.append(
        f"the run takes {show_duration(num_steps * step)} ({steps}; a step of {problem.load.samples:,} "
        f"answers takes {show_seconds(step)}), at {problem.load.samples / step:.3g} answers/s"
    )
    full = [
        (cluster.device_type(own.ranks[rank].type).memory, name, own.ranks[rank], entry)
        for name, own in plan.plans.items()
        for entry in (plan.forecast.roles.get(name, ()) if plan.forecast else ())
        for rank in own.pipelines[entry.pipeline].stages[entry.stage].ranks
    ]
    if full:
        memory, name, card, entry = min(full, key=lambda item: item[0] - item[-1].peak_memory_bytes)
        left = memory - entry.peak_memory_bytes
        lines.append(
            f"memory: {show_bytes(left)} left on the fullest card ({card.type} {card.device}, {name}: "
            f"{show_bytes(entry.peak_memory_bytes)} of {show_bytes(memory)})"
        )
    price = cluster.nodes_price({node_of(card) for card in plan.ranks})
    if price is not None:
        lines.append(rent_words(price, num_steps * step, "the run"))
    return [*lines, *([f"next: {next_command}"] if next_command else [])]


def describe(placement: Placement) -> str:
    """`async, staleness 1: policy 3 x H800-80G; generation 4 x H20`."""
    mode = placement.mode + (f", staleness {placement.staleness}" if placement.staleness else "")
    policy = cards_words(dict.fromkeys(card for own in placement.policy.cost.stages for card in own.cards))
    roles = [f"the same cards train and generate: {policy}" if placement.shared else f"policy {policy}"]
    if placement.generation.served:
        roles.append(f"generation by servers ({len(placement.generation.served)})")
    elif not placement.shared:
        cards = [card for engine in placement.generation.engines for card in engine.cards]
        roles.append(f"generation {cards_words(cards)}")
    if placement.reward is not None:
        groups = placement.reward.groups
        roles.append(f"reward {cards_words(card for group in groups for card in group)}")
    return f"{mode}: " + "; ".join(roles)


def cards_words(cards: Iterable[Card]) -> str:
    """`4 x H20 + 1 x H800-80G`."""
    counts = Counter(card.type for card in cards)
    return " + ".join(f"{count} x {name}" for name, count in counts.items())


def role_lines(placement: Placement, plan: RlPlan) -> list[str]:
    """Each role: its ranks, its cut, and the memory of its tightest card."""
    lines: list[str] = []
    if placement.policy.critic_seconds is not None:
        lines.append("critic     on the policy's cards, under its plan")
    memory = plan.forecast.roles if plan.forecast else {}
    for name, own in plan.plans.items():
        ranks = plan.role_ranks[name]
        peak = max((entry.peak_memory_bytes for entry in memory.get(name, ())), default=0.0)
        words = f"{len(own.pipelines)} pipeline" + ("s" if len(own.pipelines) > 1 else "")
        stages = "+".join(str(len(pipeline.stages)) for pipeline in own.pipelines[:4])
        lines.append(
            f"{name:<10} ranks {ranks.start}-{ranks.stop - 1}  {words} of {stages}"
            f"{'...' if len(own.pipelines) > 4 else ''} stages, peak {show_bytes(peak)} a card"
        )
    generation = placement.generation
    same = Counter(
        zip(engines_words(generation), (round(share, 3) for share in generation.shares), strict=True)
    )
    what = "server" if generation.served else "engine"
    lines += [
        f"{count} x {what}: {words}, {share:.1%} of the prompts" for (words, share), count in same.items()
    ]
    return lines


def engines_words(generation: Generation) -> list[str]:
    """Each engine, or server: `900 tokens/s`."""
    if generation.served:
        return [f"{rate:,.4g} tokens/s" for rate in generation.served]
    return [_engine_words(engine) for engine in generation.engines]


def _engine_words(engine: EnginePlan) -> str:
    """`2 x H20 as one stage of width 2, 304 slots`."""
    stages, width = len(engine.stages), engine.stages[0].width
    cut = f"{stages} stages" if stages > 1 else "one stage"
    return f"{cards_words(engine.cards)}, {cut} of width {width}, {engine.slots} slots"


def step_words(placement: Placement, problem: RolesProblem) -> str:
    """`step 43.5 s | 11.8 samples/s | generation 41.8 s | ...`."""
    step = placement.step_seconds
    parts = [
        f"step {show_seconds(step)}",
        f"{problem.load.samples / step:.3g} samples/s",
        f"generation {show_seconds(placement.generation_seconds)}"
        f" + tail {show_seconds(placement.tail_seconds)}",
        f"training {show_seconds(placement.policy.training_seconds)}",
    ]
    if placement.policy.critic_seconds is not None:
        parts[-1] += f", of it the critic {show_seconds(placement.policy.critic_seconds)}"
    if placement.scoring_seconds:
        parts.append(f"scoring {show_seconds(placement.scoring_seconds)}")
    if placement.generation.served:
        parts.append("weights by way of a folder, not counted")
    elif not placement.shared:
        parts.append(f"weights {show_seconds(placement.sync_seconds)} ({show_bytes(placement.sync_bytes)})")
    return " | ".join(parts)


def idle_words(placement: Placement) -> str:
    """`idle: policy 0 %, generation 3 %; the same cards in sync mode: 87.2 s`."""
    idle = ", ".join(f"{role} {share:.0%}" for role, share in placement.idle.items())
    sync = ""
    if placement.mode == "async":
        sync = f"; the same cards in sync mode: {show_seconds(placement.sync_mode_seconds)}"
    return f"idle: {idle}{sync}"


def source_words(placement: Placement) -> str:
    """`measured: ...`, or which parts of the step are estimated."""
    rates, engines = placement.generation.rates, placement.generation.engines
    measured = sum(rates.are_measured(engine) for engine in engines)
    rounds = "rounds of generation by memory bandwidth"
    if placement.generation.served:
        rounds = "tokens/s of servers as given"
    elif measured:
        rounds = f"rounds of {measured} of {len(engines)} engines as profiled"
    batch = "reward functions as profiled" if placement.has_batch else "reward functions take no time"
    training = f"training ({placement.policy.cost.source}) as in a plan of its own"
    return f"{placement.source}: {rounds}; {batch}; {training}"


def proof_words(result: RolesResult) -> str:
    """What the search did."""
    counts = f"{result.num_splits} splits, {result.num_priced} priced"
    if result.exact:
        return f"{counts}, the others ruled out by their bounds"
    stopped = "; stopped by search.time_limit" if result.stopped else ""
    bound = show_seconds(result.lower_bound_seconds)
    return f"{counts}; not proven, no split takes less than {bound}{stopped}"


def other_lines(result: RolesResult) -> list[str]:
    """The best of other modes and splits: how much slower, and their cards."""
    best = result.best.step_seconds
    return [
        f"{show_seconds(other.step_seconds)} (+{other.step_seconds / best - 1:.0%}), {describe(other)}"
        for other in result.others
    ]


def roles_json(result: RolesResult, plan: RlPlan, *, path: str | None) -> dict[str, Any]:
    """The same as plain values; `path` is where the plan is written, if it is."""
    assert plan.forecast is not None
    engines = result.best.generation
    return {
        "plan": path,
        "kind": "rl",
        **values_of(plan, "mode", "staleness"),
        "placement": "shared" if result.best.shared else "servers" if engines.served else "apart",
        "forecast": as_plain(plan.forecast),
        "roles": {
            name: {"ranks": [ranks.start, ranks.stop], "cards": plan.plans[name].cards_by_type}
            for name, ranks in plan.role_ranks.items()
        },
        "engines": [
            {"slots": own.slots, "stages": len(own.stages), "width": own.stages[0].width, "share": share}
            for own, share in zip(engines.engines, engines.shares, strict=False)
        ]
        or [
            {"tokens_per_second": r, "share": s} for r, s in zip(engines.served, engines.shares, strict=True)
        ],
        "exact": result.exact,
        "stopped_by_time_limit": result.stopped,
        "splits": result.num_splits,
        "splits_priced": result.num_priced,
        "others": [values_of(own, "step_seconds", "mode", "shared", "split") for own in result.others],
    }
