"""What a person asks of a plan, answered first: how long, how fast, how full, for how much, and what next."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from yuan_train.config.units import show_bytes, show_duration, show_seconds
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.search.bounds import Bound
from yuan_train.planner.search.search_result import SearchResult
from yuan_train.planner.search.what_if import LIMITS, Change, OtherPrecision, Rent, Rented

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
    if other.precision == "fp16":
        ways = f"bf16 without them {ours}, fp16 on all cards {theirs}"
        advice = (
            "train.precision=fp16 takes them; it needs a loss scale, and models made in bf16 may overflow"
        )
    else:
        ways = f"fp16 on all cards {ours}, bf16 without them {theirs}"
        advice = "models made in bf16 may overflow in fp16; train.precision=bf16 leaves these cards out"
    return f"{cards} {lacking} no bf16 units: {ways}; {advice}"


# --- what bounds, prices and planning again say ---------------------------------------------------------

LEAST_GAIN = 0.001
"""Changes that gain less are as good as none."""

MEASURED_CARDS, TEN_TIMES_GAIN = 54, 0.014
"""Cards of the largest of the random clusters of docs/benchmarks-planner.md, and the part by which ten times
the normal effort shortened their steps in the mean."""


def bound_words(bound: Bound, step_seconds: float, num_cards: int) -> list[str]:
    """What no plan beats, what the bound knows, and what more effort gained on so many cards, if measured."""
    sizes = "/".join(map(str, bound.sizes))
    covered = f"{'/'.join(bound.schedules)}, micro-batches of {sizes}"
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
        chosen = " (chosen)" if part is rent.chosen else ""
        lines.append(
            f"{what}: step {slower:+.1%}, price of a step {cheaper:+.1%}; {_rent_words(part)}{chosen}"
        )
    if rent.stopped:
        lines.append("search.time_limit ended the search for other nodes to leave out")
    return lines


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
