"""What a person asks of a plan, answered first: how long, how fast, how full, for how much, and what next."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from yuan_train.config.units import show_bytes, show_duration, show_seconds
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.search.search_result import SearchResult
from yuan_train.planner.search.what_if import OtherPrecision

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
