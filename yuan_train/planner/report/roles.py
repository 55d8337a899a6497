"""The placement of roles as text for the terminal, as one object for --json, and as one HTML page.

It stands alone because its three forms say the same of a placement.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

from yuan_train.config.cluster import Card
from yuan_train.config.load import as_plain, dump
from yuan_train.config.plan import node_of
from yuan_train.config.rl_plan import RlPlan
from yuan_train.config.units import show_bytes, show_duration, show_seconds
from yuan_train.planner.report.plan import estimated_words, rent_words, values_of
from yuan_train.planner.roles.engines import EnginePlan, Generation
from yuan_train.planner.roles.placement import Placement, RolesProblem
from yuan_train.planner.roles.search import RolesResult
from yuan_train.report.html import bullets, key, svg, table, whole_page


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
        f"answers takes {show_seconds(step)}), at {float(f'{problem.load.samples / step:.3g}'):,g} answers/s"
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
    shares = [round(share, 3) for share in generation.shares]
    same = Counter(zip(engines_words(generation), shares, strict=True))
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


# --- page -------------------------------------------------------------------------------------------------

FILLS = {"generate": "var(--c0)", "score": "var(--c4)", "train": "var(--c3)", "publish": "var(--c2)"}
WORDS = {"generate": "generates", "score": "scores", "train": "trains", "publish": "sends weights"}
SHOWN_STEPS = 5
"""Steps that the timeline shows, once all roles are busy."""


def roles_html(result: RolesResult, problem: RolesProblem, plan: RlPlan) -> str:
    """One file without network access or scripts, with the plan's own text inside."""
    best = result.best
    title = f"Roles of {problem.load.model.name} on {problem.policy.cluster.name}"
    lines = [describe(best), step_words(best, problem), idle_words(best), proof_words(result)]
    sections = [
        ("Summary", "".join(f"<p>{escape(line)}</p>" for line in lines)),
        ("Sync beside async", _modes_html(result)),
        ("Timelines of the roles", _timeline_svg(best)),
        ("Idle shares", table(("role", "idle"), [(role, f"{own:.1%}") for role, own in best.idle.items()])),
        ("Roles and engines", _engines_html(best, plan)),
        ("Memory of every role", _memory_html(plan)),
        ("What else was tried", bullets(other_lines(result))),
        ("Assumptions", bullets(_assumptions(problem, best))),
        ("plan.yaml", f'<pre id="plan">{escape(dump(plan))}</pre>'),
    ]
    return whole_page(title, sections)


def _modes_html(result: RolesResult) -> str:
    """A bar for each mode and way to share cards: the best of each that was priced."""
    best = result.best
    rows = [(f"{_kind(best)}: chosen", best.step_seconds)]
    if best.mode == "async":
        rows.append(("the same cards in sync mode", best.sync_mode_seconds))
    firsts = {_kind(other): other.step_seconds for other in reversed(result.others)}
    kinds = dict.fromkeys(map(_kind, result.others))
    rows += [(kind, firsts[kind]) for kind in kinds if kind != _kind(best)]
    scale = 600 / max(seconds for _, seconds in rows)
    shapes = [
        f'<text x="0" y="{22 * i + 13}">{escape(name)}</text>'
        f'<rect x="260" y="{22 * i}" width="{seconds * scale:.1f}" height="16" fill="var(--c{min(i, 1)})"/>'
        f'<text x="{266 + seconds * scale:.1f}" y="{22 * i + 13}">{show_seconds(seconds)}</text>'
        for i, (name, seconds) in enumerate(rows)
    ]
    return svg(1060, 22 * len(rows), "seconds of a step by mode", shapes)


def _kind(placement: Placement) -> str:
    return f"{placement.mode}, {'cards shared in turns' if placement.shared else 'roles apart'}"


def _timeline_svg(placement: Placement) -> str:
    """A row for each role or engine, some steps of the flow as it was played."""
    play = placement.play
    last = max(span.step.batch for span in play.spans)
    first = max(last - SHOWN_STEPS, 0)
    ends = [span.end for span in play.spans if span.step.batch == last]
    starts = [span.start for span in play.spans if span.step.batch == first]
    begin, end = min(starts), max(ends)
    scale = 880 / max(end - begin, 1e-12)
    shapes: list[str] = []
    for row, actor in enumerate(play.busy_seconds):
        y = 24 * row
        shapes.append(f'<text x="0" y="{y + 13}">{escape(actor)}</text>')
        shapes.append(f'<rect class="rest" x="150" y="{y}" width="880" height="16"/>')
        for span in play.spans:
            if span.actor != actor or span.end <= begin or span.end == span.start:
                continue
            left = max(span.start, begin)
            x, width = 150 + (left - begin) * scale, (span.end - left) * scale
            shapes.append(
                f'<rect x="{x:.2f}" y="{y}" width="{max(width, 0.5):.2f}" height="16" '
                f'fill="{FILLS[span.step.kind]}" stroke="var(--paper)" stroke-width=".5">'
                f"<title>{escape(str(span.step))}: {show_seconds(span.end - span.start)}</title></rect>"
            )
    height = 24 * len(play.busy_seconds)
    shapes += [
        f'<text x="{150 + 220 * i}" y="{height + 12}" text-anchor="middle">'
        f"{show_seconds((end - begin) * i / 4)}</text>"
        for i in range(5)
    ]
    done = {span.step.kind for span in play.spans if span.end > span.start}
    keys = "".join(key(FILLS[kind], words) for kind, words in WORDS.items() if kind in done)
    keys += key("var(--soft)", "waits")
    return f"<p>{keys}</p>" + svg(1060, height + 20, "timelines of the roles", shapes)


def _engines_html(placement: Placement, plan: RlPlan) -> str:
    made = placement.generation
    own = zip(engines_words(made), made.samples_per_second, made.shares, strict=True)
    rows = [(str(e), said, f"{rate:.3g}", f"{share:.1%}") for e, (said, rate, share) in enumerate(own)]
    return bullets(role_lines(placement, plan)) + table(("engine", "cards", "samples/s", "prompts"), rows)


def _memory_html(plan: RlPlan) -> str:
    forecast = plan.forecast
    assert forecast is not None
    rows = [
        (
            role,
            str(entry.pipeline),
            str(entry.stage),
            show_bytes(entry.peak_memory_bytes),
            ", ".join(f"{name} {show_bytes(size)}" for name, size in entry.categories.items() if size),
        )
        for role, entries in forecast.roles.items()
        for entry in entries
    ]
    return table(("role", "pipeline", "stage", "peak of a card", "of which"), rows)


CRITIC = (
    "the critic follows the policy's plan on its cards: a pass for values, and as many optimizer steps; "
    "what it keeps of a micro-batch is not there at the same time as the policy's"
)


def _assumptions(problem: RolesProblem, placement: Placement) -> list[str]:
    load = problem.load
    rows = math.ceil(problem.packed_rows)
    return [
        f"{load.prompts} prompts a step, {load.group} answers each; prompts of {load.prompt_tokens} tokens, "
        f"answers of {load.expected_new_tokens:.0f} on average and {load.new_tokens} at most",
        f"trained in {rows} rows of {load.length} tokens, {problem.forward_passes} forward passes beside it",
        *([] if placement.policy.critic_seconds is None else [CRITIC]),
        source_words(placement),
        "a round that no profile has reads the stage's weights, and the keys and values of its slots, at "
        "three quarters of the memory bandwidth",
        "weights go from the policy to each engine by exact slices; the busiest card or NIC decides",
    ]
