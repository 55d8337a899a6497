"""What the bounds, the prices and planning again say about a plan, in words and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yuan_train.config.units import show_seconds
from yuan_train.planner.report.answer import values_of
from yuan_train.planner.search.bounds import Bound
from yuan_train.planner.search.what_if import LIMITS, Change, Rent, Rented

LEAST_GAIN = 0.001
"""Changes that gain less are as good as none."""

MEASURED_CARDS, TEN_TIMES_GAIN = 54, 0.011
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
