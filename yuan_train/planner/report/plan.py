"""The search result as a table for the terminal, as one object for --json, and as one HTML page.

What a person asks of a plan is answered first: how long, how fast, how full, for how much, and what next. The
page is one file without network access or scripts: inline SVG, light and dark, a pattern as well as colours,
and the plan's own text, so that plan.yaml can be recovered from the page.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

from yuan_train.config.cluster import Sends
from yuan_train.config.express import to_blocks, to_layout
from yuan_train.config.load import as_plain, dump
from yuan_train.config.plan import MemoryForecast, StagePlan
from yuan_train.config.units import show_bytes, show_duration, show_seconds
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.simulator import Simulation
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.prove import Bound
from yuan_train.planner.search.search import LeftOut, SearchResult
from yuan_train.planner.search.what_if import LIMITS, Change, OtherPrecision, Rent, Rented
from yuan_train.report.html import bullets, key, svg, table, whole_page, whole_picture

BILLION = 1e9


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The figures of a plan that matter to whoever runs it."""

    measured: bool
    """Whether the times come from a profile of these cards."""
    step_seconds: float
    tokens_per_step: int
    num_steps: int | None
    """Of the run; None without a run file."""
    mfu: float
    """Model FLOP/s over the peak of the cards that work."""
    fullest: StageCost
    """The stage whose cards have the least room left."""
    price_per_hour: float | None
    """Of the nodes that the plan uses, all their cards; None without prices in the cluster file."""
    other: OtherPrecision | None

    @property
    def tokens_per_second(self) -> float:
        """Of all cards together."""
        return self.tokens_per_step / self.step_seconds

    @property
    def run_seconds(self) -> float | None:
        """Of all steps; None without a run file."""
        return None if self.num_steps is None else self.num_steps * self.step_seconds

    @property
    def headroom_bytes(self) -> float:
        """What the plan leaves free of the card that it fills most."""
        return self.fullest.card_bytes - self.fullest.memory.total


def find_answer(
    result: SearchResult, problem: PlanProblem, *, num_steps: int | None, other: OtherPrecision | None
) -> Answer:
    """The figures of the best plan."""
    cost, cluster = result.best.cost, problem.cluster
    return Answer(
        measured=cost.source == "measured",
        step_seconds=cost.step_seconds,
        tokens_per_step=problem.global_batch_size * problem.sequence_length,
        num_steps=num_steps,
        mfu=mfu_of(cost, problem),
        fullest=min(cost.stages, key=lambda stage: stage.card_bytes - stage.memory.total),
        price_per_hour=cluster.nodes_price({card.node for stage in cost.stages for card in stage.cards}),
        other=other,
    )


def mfu_of(cost: PlanCost, problem: PlanProblem) -> float:
    """Model FLOP/s over the peak of the cards that work, all of which have the precision."""
    types = [card.type for card in {card for stage in cost.stages for card in stage.cards}]
    peak = math.fsum(problem.cluster.device_type(name).peak(problem.precision) or 0.0 for name in types)
    tokens = problem.global_batch_size * problem.sequence_length
    flops = tokens * problem.model.training_flops(problem.sequence_length)
    return flops / cost.step_seconds / peak


def answer_lines(answer: Answer, *, measure: str | None = None, next_command: str | None = None) -> list[str]:
    """The answer in words; `measure` is the command that measures, `next_command` what to type next."""
    lines = [] if answer.measured else [estimated_words(measure)]
    speed = f"{answer.tokens_per_second:,.0f} tokens/s"
    lines.append(f"{_time_words(answer)} at {speed}, {answer.mfu:.0%} of the cards' peak (MFU)")
    stage = answer.fullest
    lines.append(
        f"memory: {show_bytes(answer.headroom_bytes)} left on the fullest card "
        f"({stage.card.type} {stage.card.name}: {show_bytes(stage.memory.total)} of "
        f"{show_bytes(stage.card_bytes)})"
    )
    if answer.price_per_hour is not None:
        what = "the run" if answer.run_seconds else "a billion tokens"
        seconds = answer.run_seconds or BILLION / answer.tokens_per_second
        lines.append(rent_words(answer.price_per_hour, seconds, what))
    if answer.other is not None:
        lines.append(_other_words(answer, answer.other))
    return [*lines, *([f"next: {next_command}"] if next_command else [])]


def estimated_words(measure: str | None) -> str:
    """That nothing was measured, and the command that measures."""
    how = f"; measure: {measure}" if measure else ""
    return f"not measured, times are estimated from the catalogue of cards{how}"


def rent_words(price_per_hour: float, seconds: float, what: str) -> str:
    """What nodes cost, an hour and for what takes so many seconds."""
    return f"rent: {price_per_hour:.6g} an hour, {price_per_hour * seconds / 3600:,.2f} for {what}"


def answer_values(answer: Answer) -> dict[str, Any]:
    """The same for --json."""
    figures = ("num_steps", "run_seconds", "tokens_per_second", "mfu", "headroom_bytes", "price_per_hour")
    other = answer.other and asdict(answer.other)
    if other is not None:
        other["refusal"] = other["refusal"] or None
    return values_of(answer, "measured", *figures) | {"other_precision": other}


def values_of(value: object, *names: str) -> dict[str, Any]:
    """Some of a value's fields and properties, for --json."""
    return {name: getattr(value, name) for name in names}


def _time_words(answer: Answer) -> str:
    step = f"a step of {answer.tokens_per_step:,} tokens takes {show_seconds(answer.step_seconds)}"
    if answer.num_steps is None or answer.run_seconds is None:
        billion = show_duration(BILLION / answer.tokens_per_second)
        return f"{step}, a billion tokens {billion}"
    steps = f"{answer.num_steps:,} step{'s' * (answer.num_steps != 1)}"
    return f"the run takes {show_duration(answer.run_seconds)} ({steps}; {step}),"


def _other_words(answer: Answer, other: OtherPrecision) -> str:
    """What the precision costs: both ways side by side."""
    *most, last = [f"{count} {name}" for name, count in other.fp16_only.items()]
    cards = f"{', '.join(most)} and {last}" if most else last
    ours = f"{answer.tokens_per_second:,.0f} tokens/s"
    lacking = "has" if sum(other.fp16_only.values()) == 1 else "have"
    if other.tokens_per_second is None:
        return f"{cards} {lacking} no bf16 units; in {other.precision} no plan was found: {other.refusal}"
    more = other.tokens_per_second / answer.tokens_per_second - 1.0
    theirs = f"{other.tokens_per_second:,.0f} tokens/s ({more:+.0%})"
    ways = f"bf16 without them {ours}, fp16, which they have, {theirs}"
    advice = "train.precision=fp16 may take them; it needs a loss scale, and models made in bf16 may overflow"
    if other.precision == "bf16":
        ways = f"fp16, which they have, {ours}, bf16 without them {theirs}"
        advice = "models made in bf16 may overflow in fp16; train.precision=bf16 leaves these cards out"
    return f"{cards} {lacking} no bf16 units: {ways}; {advice}"


# --- what bounds, prices and planning again say ---------------------------------------------------------

LEAST_GAIN = 0.001
"""Changes that gain less are as good as none."""

MEASURED_CARDS, TEN_TIMES_GAIN = 54, 0.012
"""Cards of the largest of the random clusters of docs/benchmarks-planner.md, and the part by which ten times
the normal effort shortened their steps in the mean."""


def bound_words(bound: Bound, step_seconds: float, num_cards: int) -> list[str]:
    """What no plan beats, what the bound knows, and what more effort gained on so many cards, if measured."""
    covered = f"{'/'.join(bound.schedules)}, micro-batches of {'/'.join(map(str, bound.sizes))}"
    words = [
        f"no plan takes less than {show_seconds(bound.seconds)} ({covered}); the step is "
        f"{step_seconds / bound.seconds - 1.0:.1%} longer",
        "the bound knows work, memory and filling alone: no plan need come near it",
    ]
    if num_cards <= MEASURED_CARDS:
        gain = f"by {TEN_TIMES_GAIN:.1%} in the mean"
        words.append(f"ten times the normal effort shortened plans of up to {MEASURED_CARDS} cards {gain}")
    return words


def bound_values(bound: Bound | None) -> dict[str, Any] | None:
    """The same for --json; None if the plan is proven fastest."""
    if bound is None:
        return None
    sizes = list(bound.sizes)
    return {"seconds": bound.seconds, "schedules": list(bound.schedules), "micro_batch_sizes": sizes}


def rent_lines(rent: Rent) -> list[str]:
    """The rent of the plan, then the plans that no other beats in both seconds and price."""
    fastest = rent.pareto[0]
    lines = [f"rent {_rent_words(rent.chosen)}"]
    for part in rent.pareto:
        slower = part.step_seconds / fastest.step_seconds - 1.0
        cheaper = part.price_per_step / fastest.price_per_step - 1.0
        more = f" and {len(part.left_out) - 4} more" if len(part.left_out) > 4 else ""
        what = f"without {', '.join(part.left_out[:4])}{more}" if part.left_out else "all nodes"
        words = _rent_words(part) + (" (chosen)" if part is rent.chosen else "")
        lines.append(f"{what}: step {slower:+.1%}, price of a step {cheaper:+.1%}; {words}")
    return [*lines, *["search.time_limit ended the search for other nodes to leave out"] * rent.stopped]


def rent_values(rent: Rent) -> list[dict[str, Any]]:
    figures = ("step_seconds", "price_per_hour", "price_per_step", "tokens_per_price")
    return [
        {"left_out": list(part.left_out), **values_of(part, *figures), "chosen": part is rent.chosen}
        for part in rent.pareto
    ]


def _rent_words(part: Rented) -> str:
    return f"{part.price_per_hour:.6g} an hour, {part.tokens_per_price:,.0f} tokens for 1"


def change_lines(changes: Sequence[Change]) -> list[str]:
    """What limits the plan and what would help most, then each change with its gain."""
    head = "limited by the cards themselves: no other change would gain 0.1 %"
    first = next((own for own in changes if own.gain > LEAST_GAIN and own.limit != "cards"), None)
    if first is not None:
        head = f"limited most by {LIMITS[first.limit]}: {first.what} would gain {first.gain:.1%}"
    gains = (f"{own.gain:+.1%}" if own.tokens_per_second is not None else "no plan fits" for own in changes)
    return [head, *(f"{own.what}: {gain}" for own, gain in zip(changes, gains, strict=True))]


def change_values(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The same for --json."""
    return [{"change": own.what, **values_of(own, "limit", "tokens_per_second", "gain")} for own in changes]


CATEGORIES = tuple(name for name in MemoryForecast.__dataclass_fields__ if name != "critic")
"""Of a plan's memory; a critic is beside the policy of an RL plan alone."""
GIB = 2.0**30
MAX_STAGE_ROWS = 16
"""Rows of stages in the table, over all kinds of pipelines; each kind has at least four."""
MAX_KINDS = 6
MAX_WORDS = 90
"""Characters of one thing in which a runner-up differs."""


def plan_table(
    result: SearchResult, problem: PlanProblem, *, answer: Sequence[str] = (), verbose: bool = False
) -> str:
    """At most a screen of plain text: the answer, then stages, even split, idle cards and notes. `verbose`
    adds bounds, runners-up, the cut in other tools' notations, and the source of every cost."""
    best, cost = result.best, result.best.cost
    lines = [step_words(result, problem)]
    left_out = [f"left out: {line}" for line in left_out_lines(result.left_out)]
    if verbose:
        lines += [cut_words(best), *best_reasons(result), *memory_lines(cost, problem)]
        lines += [f"runner-up: {line}" for line in runner_lines(result)]
        lines += [*left_out, f"{cost.source}: " + "; ".join(result.notes)]
    else:
        catalogued = tuple(f"{card.type}: " for stage in cost.stages for card in stage.cards)
        kept = (own for own in result.notes if cost.source != "estimated" or not own.startswith(catalogued))
        lines += [*memory_lines(cost, problem)[1:], *left_out, *(f"note: {note}" for note in kept)]
        lines.append("--verbose: bounds, runners-up, the cut as Megatron-LM writes it, sources of all times")
    head = [*answer, f"Plan: {describe_shape(best)}" + even_words(result)]
    return "\n".join([*head, *(f" {line}" for line in (*_stage_rows(best), *lines))])


def plan_json(result: SearchResult, *, path: str | None) -> dict[str, Any]:
    """The same as plain values, for --json; `path` is where the plan is written, if it is."""
    best, even = result.best, result.even_split
    assert best.plan.forecast is not None
    batches = [values_of(own, "micro_batch_size", "num_micro_batches") for own in best.plan.pipelines]
    return {
        "plan": path,
        "forecast": as_plain(best.plan.forecast),
        "num_pipelines": len(batches),
        "schedule": best.plan.schedule,
        **batches[0],
        "pipelines": batches,
        **values_of(best.plan, "optimizer_sharding", "sequence_parallel"),
        "stages": [_stage_json(stage) for stage in best.cost.stages],
        "exact": result.exact,
        "stopped_by_time_limit": result.stopped,
        "gap": best.step_seconds / result.lower_bound_seconds - 1.0,
        "bound": bound_values(result.bound),
        "plans_simulated": result.num_simulated,
        "even_split": even and {"step_seconds": even.step_seconds, "fits": even.cost.fits},
        "no_even_split": result.no_even_split or None,
        "runners_up": [
            {
                "step_seconds": c.step_seconds,
                "layers": layer_list(c),
                "differs": differences(c, best),
                "why": slower_because(c.cost, best.cost),
            }
            for c in result.runners_up
        ],
        "left_out": [{"card": item.card.name, "reason": item.reason} for item in result.left_out],
        "notes": list(result.notes),
    }


def describe_shape(candidate: Candidate) -> str:
    """`2 pipelines x 3 stages, 16 micro-batches of 1, 1f1b`."""
    plan = candidate.plan
    stages = sorted({len(pipeline.stages) for pipeline in plan.pipelines})
    counts = sorted({pipeline.num_micro_batches for pipeline in plan.pipelines})
    sizes = sorted({pipeline.micro_batch_size for pipeline in plan.pipelines})
    words = [
        f"{_count(len(plan.pipelines), 'pipeline')} x {_range(stages, 'stage')}",
        f"{_range(counts, 'micro-batch', 'micro-batches')} of {_range(sizes)}",
        plan.schedule,
    ]
    widths = sorted({len(r) for stage in plan.stages for r in stage.replicas})
    if widths != [1]:
        what = "experts over" if plan.divides_experts else "tensor width"
        words.append(f"{what} {'/'.join(map(str, widths))}" + " cards" * plan.divides_experts)
    words += ["tokens divided"] * plan.sequence_parallel + ["optimizer sharded"] * plan.optimizer_sharding
    return ", ".join(words)


def _range(values: Sequence[int], word: str = "", plural: str | None = None) -> str:
    most = _count(values[-1], word, plural) if word else str(values[-1])
    return most if len(values) == 1 else f"{values[0]} to {most}"


def step_words(result: SearchResult, problem: PlanProblem) -> str:
    """`step 1.02 s | 32.1k tok/s | MFU ... | bubble ... | ...`."""
    cost, step = result.best.cost, result.best.step_seconds
    tokens = problem.global_batch_size * problem.sequence_length
    parts = [
        f"step {show_seconds(step)}",
        f"{tokens / step:,.0f} tok/s",
        f"MFU {mfu_of(cost, problem):.0%} of the combined peak",
        f"bubble {cost.bubble_fraction:.0%}",
        f"gradient reduction {(cost.grad_reduce_seconds + cost.tied_embedding_seconds) / step:.0%}",
        f"optimizer step {cost.update_seconds / step:.0%}",
    ]
    parts += [f"weight sync {cost.weight_sync_seconds / step:.0%}"] * result.best.plan.optimizer_sharding
    return " | ".join(parts)


def best_reasons(result: SearchResult) -> list[str]:
    """Whether the plan is proven fastest, or its gap to the lower bound."""
    stopped = "; stopped by search.time_limit" if result.stopped else ""
    simulated = f"{stopped} ({_count(result.num_simulated, 'plan')} simulated)"
    if result.bound is None:
        return [f"proven fastest of the searched plans, in the simulation{simulated}"]
    first, *rest = bound_words(result.bound, result.best.step_seconds, result.best.plan.world_size)
    return [f"best found, not proven{simulated}; {first}", *rest]


def runner_lines(result: SearchResult) -> list[str]:
    """Each runner-up: how much slower it is, in what it differs from the plan, and where its time goes."""
    best = result.best
    return [
        f"+{candidate.step_seconds / best.step_seconds - 1:.1%} {differences(candidate, best)}: "
        f"{slower_because(candidate.cost, best.cost)}"
        for candidate in result.runners_up
    ]


def differences(candidate: Candidate, best: Candidate) -> str:
    """What a plan has otherwise than the best one: `layers 4,9 | 13; micro-batches 8 of 4`."""
    own, others = _looks(candidate), _looks(best)
    words = [f"{name} {own[name]}".strip() for name in own if own[name] != others[name]]
    words = [text if len(text) <= MAX_WORDS else f"{text[: MAX_WORDS - 3]}..." for text in words]
    return "; ".join(words) or "the same on other cards of these types"


def _looks(candidate: Candidate) -> dict[str, str]:
    """What may differ between plans, in words: by stage, and once where all have the same."""
    plan = candidate.plan

    def each(value: Callable[[StagePlan], object]) -> str:
        rows = [[str(value(stage)) for stage in pipeline.stages] for pipeline in plan.pipelines]
        values = {text for row in rows for text in row}
        return values.pop() if len(values) == 1 else " | ".join(dict.fromkeys(map(",".join, rows)))

    batches = (f"{p.num_micro_batches} of {p.micro_batch_size}" for p in plan.pipelines)
    return {
        "": plan.schedule,
        "cards": describe_cards(candidate),
        "layers": layer_list(candidate),
        "micro-batches": " | ".join(dict.fromkeys(batches)),
        "tensor width": each(lambda stage: len(stage.replicas[0])),
        "replicas": each(lambda stage: len(stage.replicas)),
        "recompute": each(lambda stage: f"{stage.num_recomputed} {stage.recompute}".removeprefix("0 ")),
        "in flight": each(lambda stage: stage.in_flight or "least"),
        "tokens": "divided" if plan.sequence_parallel else "whole",
        "optimizer": "sharded" if plan.optimizer_sharding else "whole",
        "optimizer on hosts": each(lambda stage: f"{stage.optimizer_offload:.2g}"),
        "layers with activations on hosts": each(lambda stage: stage.activation_offload),
        "pages": each(lambda stage: stage.parameter_offload),
    }


def slower_because(cost: PlanCost, best: PlanCost) -> str:
    """The parts of the step that differ most from those of `best`, those that are shorter among them."""
    parts, best_parts = _parts(cost), _parts(best)
    growth = {name: parts[name] - best_parts[name] for name in parts}
    most = max(map(abs, growth.values()))
    named = [name for name in growth if abs(growth[name]) >= max(most / 4, 1e-6)]
    named.sort(key=lambda name: -abs(growth[name]))
    signs = {name: "+" if growth[name] > 0 else "-" for name in named}
    return ", ".join(f"{name} {signs[name]}{show_seconds(abs(growth[name]))}" for name in named) or "as fast"


def left_out_lines(left_out: Sequence[LeftOut]) -> list[str]:
    """The cards that are left out, by type, one line per reason."""
    found: dict[str, dict[str, list[str]]] = {}
    for item in left_out:
        found.setdefault(item.reason, {}).setdefault(item.card.type, []).append(item.card.name)
    return [
        ", ".join(f"{len(names)} {name} ({_some(names)})" for name, names in types.items()) + f": {reason}"
        for reason, types in found.items()
    ]


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")


def layer_list(candidate: Candidate) -> str:
    """Layers per stage, as Yuan 2.0's scripts write them; unlike pipelines with ` | ` between."""
    return " | ".join(dict.fromkeys(map(to_blocks, candidate.plan.pipelines)))


def cut_words(candidate: Candidate) -> str:
    """The layers, and the cut as Megatron-LM writes it unless it divides some or pipelines are cut unlike."""
    layouts = set[str]() if candidate.plan.divided_layers else set(map(to_layout, candidate.plan.pipelines))
    layout = f"; Megatron layout {layouts.pop()}" if len(layouts) == 1 else ""
    return f"layers {layer_list(candidate)}{layout}"


def describe_cards(candidate: Candidate) -> str:
    """`4 A100-80G > 2 T4`: a pipeline's cards in the order of its stages; of several `2 x (...) + ...`."""
    types: list[list[str]] = [[] for _ in candidate.plan.pipelines]
    for stage in candidate.cost.stages:
        types[stage.pipeline] += [card.type for card in stage.cards]
    runs = (((name, len(list(own))) for name, own in itertools.groupby(row)) for row in types)
    counts = Counter(" > ".join(f"{count} {name}" for name, count in row) for row in runs)
    return " + ".join(f"{count} x ({words})" if count > 1 else words for words, count in counts.items())


def limited_by(stages: Sequence[StageCost], cost: PlanCost) -> str:
    """What keeps a stage, or one of alike pipelines' stages, from taking another layer. The slowest stages
    are those of the worker that is busiest in a step: replicas divide the micro-batches among them, and
    unlike pipelines have unlike numbers of these."""
    words: list[str] = []
    busy = max(_busy_seconds(cost, stage.pipeline, stage.stage) for stage in stages)
    if busy >= _most_busy_seconds(cost) * (1 - 1e-9):
        words.append("time, the slowest")
    if any(stage.memory.total + stage.one_more_layer_bytes > stage.capacity_bytes for stage in stages):
        words.append("MEMORY")
    return " and ".join(words) or "-"


def even_words(result: SearchResult) -> str:
    """How the even split compares, to append to a line."""
    even = result.even_split
    if even is None:
        return f"     no even split: {result.no_even_split}"
    ratio = even.step_seconds / result.best.step_seconds
    return f"     even split: {ratio:.2f}x the time" + ("" if even.cost.fits else ", and it does not fit")


def _stage_rows(best: Candidate) -> list[str]:
    """A row for each stage of each kind of pipeline; several kinds have a heading each."""
    kinds = _kinds(best)
    rows = [("stage", "cards", "layers", "fwd+bwd", "busy", "memory of card, GiB", "limited by")]
    headings: dict[int, str] = {}
    for numbers in kinds[:MAX_KINDS]:
        if len(kinds) > 1:
            headings[len(rows)] = _kind_words(best, numbers)
        count = len(best.plan.pipelines[numbers[0]].stages)
        of_kind = [_stage_row(best.cost, numbers, s) for s in range(count)]
        most = max(MAX_STAGE_ROWS // min(len(kinds), MAX_KINDS), 4)
        if len(of_kind) > most:
            left_out = ("...", f"{len(of_kind) - most} more", "", "", "", "", "")
            of_kind = [*of_kind[: most // 2], left_out, *of_kind[-(most - most // 2) :]]
        rows += of_kind
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines: list[str] = []
    for number, row in enumerate(rows):
        lines += [headings[number]] if number in headings else []
        lines.append("  ".join(map(str.ljust, row, widths)).rstrip())
    if len(kinds) > MAX_KINDS:
        lines.append(f"... and {len(kinds) - MAX_KINDS} more kinds of pipelines; --report F.html shows all")
    return lines


def _kinds(best: Candidate) -> list[list[int]]:
    """Numbers of the pipelines that are alike in types of cards, layers and share of the batch."""
    looks: list[list[object]] = [[p.micro_batch_size, p.num_micro_batches] for p in best.plan.pipelines]
    for stage in best.cost.stages:
        types = tuple(card.type for card in stage.cards)
        looks[stage.pipeline].append((types, len(stage.replicas), layer_words(stage), stage.experts))
    found: dict[object, list[int]] = {}
    for number, look in enumerate(looks):
        found.setdefault(tuple(look), []).append(number)
    return list(found.values())


def _kind_words(best: Candidate, numbers: Sequence[int]) -> str:
    """`pipelines 0, 2: 5 micro-batches of 6 each, 60 of 80 sequences`: the share of a kind of pipeline."""
    pipeline = best.plan.pipelines[numbers[0]]
    share = len(numbers) * pipeline.micro_batch_size * pipeline.num_micro_batches
    names = ", ".join(map(str, numbers[:8])) + (", ..." if len(numbers) > 8 else "")
    return (
        f"pipeline{'s' * (len(numbers) > 1)} {names}: "
        f"{_count(pipeline.num_micro_batches, 'micro-batch', 'micro-batches')} of {pipeline.micro_batch_size}"
        f"{' each' * (len(numbers) > 1)}, {share} of the batch's {best.plan.global_batch_size} sequences"
    )


def _stage_row(cost: PlanCost, numbers: Sequence[int], s: int) -> tuple[str, ...]:
    """A stage of some alike pipelines, with its slowest time and its tightest memory in these."""
    same = [stage for stage in cost.stages if stage.stage == s and stage.pipeline in numbers]
    worst = max(same, key=lambda stage: (stage.memory.total / stage.capacity_bytes, -stage.pipeline))
    busy = max(_busy_seconds(cost, number, s) for number in numbers) / cost.step_seconds
    return (
        str(s),
        _cards_words(same),
        layer_words(worst),
        show_seconds(max(stage.forward_seconds + stage.backward_seconds for stage in same)),
        "#" * round(10 * busy) + "." * (10 - round(10 * busy)) + f" {busy:.0%}",
        f"{worst.memory.total / GIB:.1f} / {worst.card_bytes / GIB:.1f} "
        f"({worst.memory.total / worst.card_bytes:.0%})",
        limited_by(same, cost),
    )


def _busy_seconds(cost: PlanCost, pipeline: int, s: int) -> float:
    """Seconds of a step in which the busiest worker of a stage computes, over all stages of that worker."""
    return max(cost.simulations[pipeline].busy_seconds[worker] for worker in cost.workers[pipeline][s])


def _most_busy_seconds(cost: PlanCost) -> float:
    return max(busy for simulation in cost.simulations for busy in simulation.busy_seconds)


def layer_words(stage: StageCost | StagePlan) -> str:
    """`0-9 +emb`, `none +head`; `recompute` if all layers are recomputed, `recompute 3` if the first three
    are; under selective recompute `selective` instead of `recompute`."""
    first, end = stage.layers
    words = [f"{first:g}-{end - 1:g}" if end > first + 1 else f"{first:g}" if end > first else "none"]
    words = [f"{first:g} to {end:g}"] if first % 1 or end % 1 else words
    words += ["+emb"] * stage.embedding + ["+head"] * stage.head
    if stage.num_recomputed:
        words += ["selective" if stage.recompute == "selective" else "recompute"]
        words += [str(stage.num_recomputed)] * (stage.num_recomputed < end - first)
    return " ".join(words)


def _cards_words(stages: Sequence[StageCost]) -> str:
    first = stages[0]
    width = f"tensor {len(first.replicas[0])}" if len(first.replicas[0]) > 1 else ""
    words = " ".join(filter(None, (group_types(first), first.card.name, expert_words(first) or width)))
    words += f" replicas {len(first.replicas)}" * (len(first.replicas) > 1)
    return words + (f" x{len(stages)}" if len(stages) > 1 else "")


def group_types(stage: StageCost) -> str:
    """The types of the cards of a stage's replica, in order: unlike ones joined by `+`."""
    return "+".join(dict.fromkeys(card.type for card in stage.replicas[0]))


def expert_words(stage: StageCost) -> str:
    """`experts 19/9/4`: experts of each layer on each card of a replica; nothing if no cards share them."""
    return f"experts {'/'.join(map(str, stage.experts))}" if len(stage.experts) > 1 else ""


def _parts(cost: PlanCost) -> dict[str, float]:
    """Seconds of the step by cause."""
    work = _most_busy_seconds(cost)
    return {
        "slowest stage": work,
        "bubble and waiting": cost.compute_seconds - work,
        "gradient reduction": cost.grad_reduce_seconds + cost.tied_embedding_seconds,
        "optimizer step": cost.update_seconds,
        "weight sync": cost.weight_sync_seconds,
    }


def memory_lines(cost: PlanCost, problem: PlanProblem) -> list[str]:
    """How far cards may be filled; and what the hosts hold, by type of card, if they hold something."""
    lines = [
        f"memory: at most {problem.memory_fraction:.0%} of what torch reports of a card "
        f"(search.memory_fraction: {problem.memory_fraction:g})"
    ]
    most: dict[str, StageCost] = {}
    for stage in cost.stages:
        if stage.host_bytes > most.get(stage.card.type, stage).host_bytes or stage.card.type not in most:
            most[stage.card.type] = stage
    for name, stage in most.items():
        if stage.host_bytes:
            of = f"of {show_bytes(stage.host_capacity_bytes)}"
            if problem.cluster.groups[stage.card.node].host is None:
                key = problem.cluster.host_key(stage.card.node)
                of += f", assumed: as much as the cards have together; state {key}"
            what = "optimizer state" if stage.leaving is None else "optimizer state and activations"
            what = what if stage.pages is None else f"parameters in pages, {what}"
            lines.append(f"{what} on the host: at most {show_bytes(stage.host_bytes)} per {name} ({of})")
    return lines


def _stage_json(stage: StageCost) -> dict[str, Any]:
    return {
        **values_of(stage, "pipeline", "stage"),
        "card": stage.card.name,
        "cards": [[card.name for card in replica] for replica in stage.replicas],
        "type": stage.card.type,
        "layers": list(stage.layers),
        "experts": list(stage.experts) if len(stage.experts) > 1 else None,
        "recompute": stage.recompute,
        "recomputed_layers": stage.num_recomputed,
        **values_of(stage, "in_flight", "forward_seconds", "backward_seconds"),
        "peak_memory_bytes": stage.memory.total,
        "capacity_bytes": stage.card_bytes,
        "usable_bytes": stage.capacity_bytes,
        **values_of(stage, "host_bytes", "source"),
    }


def _count(number: int, word: str, plural: str | None = None) -> str:
    return f"{number} {word if number == 1 else plural or word + 's'}"


SENDS: dict[Sends, str] = {
    "overlapped": "sends overlap compute",
    "blocking": "the sender waits for its messages",
}
"""How messages are sent, in words."""

MAX_DRAWN_PIPELINES = 8

_MEMORY_KEYS = {f"var(--c{i})": name for i, name in enumerate(CATEGORIES)}
_TIMELINE_KEYS = {
    "var(--f)": "forward",
    "var(--b)": "backward",
    "var(--soft)": "warm-up, drain, gradient reduction, optimizer step and weight sync",
    "url(#hatch)": "waiting for a neighbour or a message",
}
"""Fills, and what they mean."""


def plan_html(
    result: SearchResult,
    problem: PlanProblem,
    *,
    reasons: Mapping[str, Sequence[str]] | None = None,
    answer: Sequence[str] = (),
) -> str:
    """The report page; `reasons` are further sections, each a list of lines, and `answer` comes first."""
    best = result.best
    title = f"Plan for {problem.model.name} on {problem.cluster.name}"
    sections = [
        ("Summary", _summary_html(result, problem, answer)),
        ("Cluster", svg(*_cluster_drawing(result, problem))),
        ("Stages", _stages_html(best)),
        ("Memory on each card", _keys(_MEMORY_KEYS) + svg(*_memory_drawing(best.cost))),
        ("Timeline of one step", _keys(_TIMELINE_KEYS) + svg(*_timeline_drawing(best.cost))),
        *((name, bullets(lines)) for name, lines in (reasons or {}).items()),
        ("How good the plan is", bullets([*best_reasons(result), cut_words(best)])),
        ("Runners-up and what was left out", _runners_up_html(result)),
        ("Assumptions", _assumptions_html(result, problem)),
        ("plan.yaml", f'<pre id="plan">{escape(dump(best.plan))}</pre>'),
    ]
    return whole_page(title, sections)


def plan_picture(result: SearchResult, problem: PlanProblem) -> str:
    """The cards and their stages, and the timeline of one step, as one SVG file."""
    best, step = result.best, show_seconds(result.best.step_seconds)
    title = f"Plan for {problem.model.name} on {problem.cluster.name}: {step} a step"
    names = ("cards and their stages", "one step: blue forward, yellow backward, hatched waiting")
    drawn = (_cluster_drawing(result, problem), _timeline_drawing(best.cost))
    return whole_picture(
        title,
        [(name, width, height, parts) for name, (width, height, _, parts) in zip(names, drawn, strict=True)],
    )


def _summary_html(result: SearchResult, problem: PlanProblem, answer: Sequence[str]) -> str:
    lines = [*answer, describe_shape(result.best) + even_words(result).replace("     ", "; ")]
    lines += [step_words(result, problem), *memory_lines(result.best.cost, problem)]
    return "".join(f"<p>{escape(line)}</p>" for line in lines)


Drawing = tuple[int, int, str, list[str]]
"""Width, height, what it shows, and its shapes."""


def _cluster_drawing(result: SearchResult, problem: PlanProblem) -> Drawing:
    """Nodes as rows of cards; each card with the stage that it runs, idle ones dashed."""
    cluster = problem.cluster
    working = {card.name: stage for stage in result.best.cost.stages for card in stage.cards}
    rows: list[str] = []
    y = 0
    for node, group in cluster.groups.items():
        cards = [card for card in cluster.cards if card.node == node]
        cards_of_types = " + ".join(f"{n} x {name}" for name, n in Counter(group.types).items())
        words = f"{node}: {cards_of_types}"
        for where, link in (("inside", group.link), ("network", group.network)):
            if link is not None:
                words += f", {where} {link.bandwidth / 1e9:.3g} GB/s {show_seconds(link.latency)}"
        rows.append(f'<text x="0" y="{y + 12}">{escape(words)}</text>')
        for i, card in enumerate(cards):
            x, top = 130 * (i % 8), y + 18 + 42 * (i // 8)
            stage = working.get(card.name)
            label = f"p{stage.pipeline} s{stage.stage}: {layer_words(stage)}" if stage else "left out"
            label += f", {expert_words(stage)}" if stage and expert_words(stage) else ""
            short = label if len(label) <= 19 else label[:18] + "…"
            kind = "card" if stage else "card idle"
            rows.append(
                f'<rect class="{kind}" x="{x}" y="{top}" width="124" height="36" rx="4"/>'
                f'<text x="{x + 6}" y="{top + 15}">{escape(card.name)}</text>'
                f'<text x="{x + 6}" y="{top + 29}">{escape(short)}<title>{escape(label)}</title></text>'
            )
        y += 30 + 42 * (-(-len(cards) // 8))
    for link in cluster.links:
        words = f"{link.from_} {'<->' if link.both_ways else '->'} {link.to}: {link.bandwidth / 1e9:.3g} GB/s"
        rows.append(f'<text x="0" y="{y + 12}">{escape(words)}</text>')
        y += 16
    return 1040, y, "cards and their stages", rows


def _stages_html(best: Candidate) -> str:
    times = ("forward", "backward", "peak", "of the card's", "limited by", "source")
    rows = [
        (
            str(stage.pipeline),
            str(stage.stage),
            f"{stage.card.name} ({group_types(stage)})",
            " ".join(filter(None, (layer_words(stage), expert_words(stage)))),
            show_seconds(stage.forward_seconds),
            show_seconds(stage.backward_seconds),
            show_bytes(stage.memory.total),
            show_bytes(stage.card_bytes),
            limited_by([stage], best.cost),
            stage.source,
        )
        for stage in best.cost.stages
    ]
    return table(("pipeline", "stage", "card", "layers", *times), rows)


def _memory_drawing(cost: PlanCost) -> Drawing:
    """A bar per stage's card, stacked by category, against the card's limit; beyond it the host's part."""
    scale = 760 / max(max(s.capacity_bytes, s.memory.total) + s.host_bytes for s in cost.stages)
    shapes: list[str] = []
    for row, stage in enumerate(cost.stages):
        y, x = 22 * row, 200.0
        shapes.append(
            f'<text x="0" y="{y + 13}">{escape(stage.card.name)} ({escape(stage.card.type)})</text>'
        )
        for i, category in enumerate(CATEGORIES):
            size = getattr(stage.memory, category)
            width = size * scale
            shapes.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="16" fill="var(--c{i})">'
                f"<title>{category}: {show_bytes(size)}</title></rect>"
            )
            x += width
        limit = 200 + stage.capacity_bytes * scale
        if stage.host_bytes:
            first, width = max(x, limit) + 2, stage.host_bytes * scale
            x = first + width
            shapes.append(
                f'<rect class="host" x="{first:.2f}" y="{y + 4}" width="{width:.2f}" height="8">'
                f"<title>on the host: {show_bytes(stage.host_bytes)}</title></rect>"
            )
        shapes.append(f'<line class="limit" x1="{limit:.2f}" x2="{limit:.2f}" y1="{y - 1}" y2="{y + 17}"/>')
        shapes.append(
            f'<text x="{max(x, limit) + 6:.2f}" y="{y + 13}">{stage.memory.total / GIB:.1f} / '
            f"{stage.card_bytes / GIB:.1f} GiB"
            + (f", {stage.host_bytes / GIB:.1f} GiB on the host" if stage.host_bytes else "")
            + "</text>"
        )
    return 1080, 22 * len(cost.stages), "memory", shapes


def _timeline_drawing(cost: PlanCost) -> Drawing:
    """A row per worker, to scale: forward, backward, and the time between in grey, by reason."""
    step, width = cost.step_seconds, 880.0
    scale = width / step
    shapes: list[str] = []
    y = 0
    for p, simulation in enumerate(cost.simulations):
        if p >= MAX_DRAWN_PIPELINES:
            shapes.append(f'<text x="0" y="{y + 13}">and {len(cost.simulations) - p} more pipelines</text>')
            y += 22
            break
        stage_costs = {s: stage for s, stage in enumerate(q for q in cost.stages if q.pipeline == p)}
        for worker, shape in enumerate(_timeline_rows(simulation, step, scale)):
            worker_stages = [s for s, row in enumerate(cost.workers[p]) if worker in row]
            first = stage_costs[worker_stages[0]]
            card = first.replicas[cost.workers[p][worker_stages[0]].index(worker)][0]
            label = f"p{p} s{','.join(map(str, worker_stages))} {card.name}"
            shapes.append(
                f'<text x="0" y="{y + 13}">{escape(label)}</text>'
                f'<g transform="translate(150 {y})">{shape}</g>'
            )
            y += 22
        y += 6
    axis = "".join(
        f'<line class="grid" x1="{150 + width * i / 8:.1f}" x2="{150 + width * i / 8:.1f}" y1="0" y2="{y}"/>'
        f'<text x="{150 + width * i / 8:.0f}" y="{y + 12}" text-anchor="middle">'
        f"{show_seconds(step * i / 8)}</text>"
        for i in range(9)
    )
    return 1060, y + 20, "one step", [*shapes, axis]


def _timeline_rows(simulation: Simulation, step_seconds: float, scale: float) -> list[str]:
    """The SVG shapes of each worker's row: a background bar, then a path of waits, forwards, backwards."""
    boxes: list[dict[str, list[str]]] = [{"wait": [], "f": [], "b": []} for _ in simulation.busy_seconds]
    ends: dict[int, float] = {}
    for operation, (start, end) in zip(simulation.operations, simulation.spans, strict=True):
        if operation.peer >= 0:
            continue
        worker = operation.worker
        spans = {"wait": (ends.get(worker, start), start), operation.kind[0]: (start, end)}
        for name, (a, b) in spans.items():
            if name != "wait" or b > a:
                box = f"M{a * scale:.2f} 0h{(b - a) * scale:.2f}v16h{(a - b) * scale:.2f}z"
                boxes[worker][name].append(box)
        ends[worker] = end
    rest = f'<rect class="rest" width="{step_seconds * scale:.2f}" height="16"/>'
    return [
        rest + "".join(f'<path class="{name}" d="{"".join(own)}"/>' for name, own in row.items())
        for row in boxes
    ]


def _runners_up_html(result: SearchResult) -> str:
    items = [*runner_lines(result), *(f"left out: {line}" for line in left_out_lines(result.left_out))]
    even = result.even_split
    if even is not None:
        items.append(
            f"even split over the cluster's order, layers {layer_list(even)}: "
            f"{show_seconds(even.step_seconds)}" + ("" if even.cost.fits else ", does not fit the memory")
        )
    return bullets(items)


def _keys(meanings: Mapping[str, str]) -> str:
    limit = "<span class=key>| limit</span>" if meanings is _MEMORY_KEYS else ""
    return f"<p>{''.join(key(fill, name) for fill, name in meanings.items())}{limit}</p>"


def _assumptions_html(result: SearchResult, problem: PlanProblem) -> str:
    items = [
        *result.notes,
        f"precision {problem.precision}, sequence length {problem.sequence_length}, global batch "
        f"{problem.global_batch_size} sequences",
        SENDS[problem.send_mode],
        "messages: latency + bytes / bandwidth, first in first out on each link; equal pipelines share a "
        "node's NIC, and so do all rings of the gradient reductions that are under way at the same time",
    ]
    return bullets(items)
