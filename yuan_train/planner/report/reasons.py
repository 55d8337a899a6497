"""What the bounds, the prices and planning again say about a plan, in words and as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from yuan_train.config.units import show_seconds
from yuan_train.planner.search.explain import LIMITS, Change
from yuan_train.planner.search.lower_bounds import Bounds
from yuan_train.planner.search.rent import Rent, Rented

LEAST_GAIN = 0.001
"""Changes that gain less are as good as none."""


def bound_words(bounds: Bounds, step_seconds: float) -> list[str]:
    """What no plan beats, of which plans, and what the bound does not know."""
    sizes = "/".join(map(str, bounds.scope.sizes))
    covered = f"{'/'.join(bounds.scope.schedules)}, micro-batches of {sizes}"
    if not bounds.any_seconds:
        return [f"no bound was found ({covered})"]
    gap = step_seconds / bounds.any_seconds - 1.0
    any_words = f"no plan takes less than {show_seconds(bounds.any_seconds)} (gap {gap:.1%})"
    if not bounds.knows_memory:
        return [f"{any_words}; the bound knows neither memory nor messages ({covered})"]
    equal_gap = step_seconds / bounds.equal_seconds - 1.0
    equal = f"none of equal pipelines less than {show_seconds(bounds.equal_seconds)} (gap {equal_gap:.1%})"
    lines = [f"{any_words}, {equal}; {covered}"]
    if len(bounds.under) > 1:
        lines.append("of equal pipelines, by schedule: " + ", ".join(_under_words(bounds, step_seconds)))
    lines.append(
        "the bounds know memory in each stage's depth, whole layers, filling, messages between nodes, "
        "reductions and the optimizer step, not which nodes a pipeline is on, nor links that several share"
    )
    return lines


def _under_words(bounds: Bounds, step_seconds: float) -> list[str]:
    """The gap of each kind of schedule alone."""
    return [
        f"{'/'.join(bound.schedules)} {show_seconds(bound.equal_seconds)} "
        f"(gap {step_seconds / bound.equal_seconds - 1.0:.1%})"
        for bound in bounds.under
    ]


def bound_values(bounds: Bounds | None, step_seconds: float) -> dict[str, Any] | None:
    """The same for --json; None if the plan is proven fastest."""
    if bounds is None:
        return None
    return {
        "any_seconds": bounds.any_seconds,
        "equal_seconds": bounds.equal_seconds,
        "gap_any": _gap(bounds.any_seconds, step_seconds),
        "gap_equal": _gap(bounds.equal_seconds, step_seconds),
        "schedules": list(bounds.scope.schedules),
        "by_schedule": [
            {
                "schedules": list(bound.schedules),
                "any_seconds": bound.any_seconds,
                "equal_seconds": bound.equal_seconds,
            }
            for bound in bounds.under
        ],
        "micro_batch_sizes": list(bounds.scope.sizes),
        "knows_memory": bounds.knows_memory,
    }


def _gap(bound_seconds: float, step_seconds: float) -> float | None:
    """By how much a step is longer than a bound; None where the search ended before it had one."""
    return step_seconds / bound_seconds - 1.0 if bound_seconds else None


def rent_lines(rent: Rent) -> list[str]:
    """The rent of the plan, then the plans that no other beats in both seconds and price."""
    fastest = rent.pareto[0]
    lines = [f"rent {_rent_words(rent.chosen)}"]
    for part in rent.pareto:
        slower = part.step_seconds / fastest.step_seconds - 1.0
        cheaper = part.price_per_step / fastest.price_per_step - 1.0
        what = f"without {_names(part.left_out)}" if part.left_out else "all nodes"
        chosen = " (chosen)" if part is rent.chosen else ""
        lines.append(
            f"{what}: step {slower:+.1%}, price of a step {cheaper:+.1%}; {_rent_words(part)}{chosen}"
        )
    if rent.stopped:
        lines.append("search.time_limit ended the search for other nodes to leave out")
    return lines


def rent_values(rent: Rent) -> list[dict[str, Any]]:
    """The Pareto list for --json."""
    return [
        {
            "left_out": list(part.left_out),
            "step_seconds": part.step_seconds,
            "price_per_hour": part.price_per_hour,
            "price_per_step": part.price_per_step,
            "tokens_per_price": part.tokens_per_price,
            "chosen": part is rent.chosen,
        }
        for part in rent.pareto
    ]


def _rent_words(part: Rented) -> str:
    return f"{part.price_per_hour:.6g} an hour, {part.tokens_per_price:,.0f} tokens for 1"


def _names(nodes: Sequence[str]) -> str:
    return ", ".join(nodes[:4]) + (f" and {len(nodes) - 4} more" if len(nodes) > 4 else "")


def change_lines(changes: Sequence[Change]) -> list[str]:
    """What limits the plan and what would help most, then each change with its gain."""
    helpful = [change for change in changes if change.gain > LEAST_GAIN and change.limit != "cards"]
    if helpful:
        first = helpful[0]
        head = f"limited most by {LIMITS[first.limit]}: {first.what} would gain {first.gain:.1%}"
    else:
        head = "limited by the cards themselves: no other change would gain 0.1 %"
    lines = [head]
    for change in changes:
        words = "no plan fits" if change.tokens_per_second is None else f"{change.gain:+.1%}"
        lines.append(f"{change.what}: {words}")
    return lines


def change_values(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """The same for --json."""
    return [
        {
            "change": change.what,
            "limit": change.limit,
            "tokens_per_second": change.tokens_per_second,
            "gain": change.gain,
        }
        for change in changes
    ]
