"""The placement of roles as one HTML page: who does what when, who waits, and what else was tried.

Like the page of a plan: one file without network access or scripts, and the plan's own text inside.
"""

from __future__ import annotations

import math
from html import escape

from yuan_train.config.load import dump
from yuan_train.config.rl_plan import RlPlan
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.planner.report import roles_text
from yuan_train.planner.roles.placement import Placement, RolesProblem
from yuan_train.planner.roles.search import RolesResult
from yuan_train.report.html import bullets, key, svg, table, whole_page

FILLS = {"generate": "var(--c0)", "score": "var(--c4)", "train": "var(--c3)", "publish": "var(--c2)"}
WORDS = {"generate": "generates", "score": "scores", "train": "trains", "publish": "sends weights"}
SHOWN_STEPS = 5
"""Steps that the timeline shows, once all roles are busy."""


def roles_html(result: RolesResult, problem: RolesProblem, plan: RlPlan) -> str:
    best = result.best
    title = f"Roles of {problem.load.model.name} on {problem.policy.cluster.name}"
    lines = [
        roles_text.describe(best),
        roles_text.step_words(best, problem),
        roles_text.idle_words(best),
        roles_text.proof_words(result),
    ]
    sections = [
        ("Summary", "".join(f"<p>{escape(line)}</p>" for line in lines)),
        ("Sync beside async", _modes_html(result)),
        ("Timelines of the roles", _timeline_svg(best)),
        ("Idle shares", table(("role", "idle"), [(role, f"{own:.1%}") for role, own in best.idle.items()])),
        ("Roles and engines", _engines_html(best, plan)),
        ("Memory of every role", _memory_html(plan)),
        ("What else was tried", bullets(roles_text.other_lines(result))),
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
    own = zip(roles_text.engines_words(made), made.samples_per_second, made.shares, strict=True)
    rows = [(str(e), said, f"{rate:.3g}", f"{share:.1%}") for e, (said, rate, share) in enumerate(own)]
    return bullets(roles_text.role_lines(placement, plan)) + table(
        ("engine", "cards", "samples/s", "prompts"), rows
    )


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
        roles_text.source_words(placement),
        "a round that no profile has reads the stage's weights, and the keys and values of its slots, at "
        "three quarters of the memory bandwidth",
        "weights go from the policy to each engine by exact slices; the busiest card or NIC decides",
    ]
