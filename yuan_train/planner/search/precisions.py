"""What the other 16-bit precision would give, on clusters where some cards have units for fp16 alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from yuan_train.config.devices import Precision
from yuan_train.config.errors import YuanError
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.search.search import search_plan


@dataclass(frozen=True, kw_only=True)
class OtherPrecision:
    """The fastest plan in the precision that the run does not have."""

    precision: Precision
    fp16_only: Mapping[str, int]
    """Cards without units for bf16, by type."""
    tokens_per_second: float | None
    """None if there is no such plan."""
    refusal: str
    """Why there is none; else empty."""


def other_precision(
    problem: PlanProblem, search: SearchConfig, *, micro_batch_size: int
) -> OtherPrecision | None:
    """Plan again in fp16 for bf16, or in bf16 for fp16; None where all cards are alike in that."""
    types = Counter(card.type for card in problem.cluster.cards)
    kinds = {name: problem.cluster.device_type(name) for name in types}
    fp16_only = {name: types[name] for name, kind in kinds.items() if kind.bf16 is None and kind.fp16}
    some_have_bf16 = any(kind.bf16 is not None for kind in kinds.values())
    if problem.precision not in ("bf16", "fp16") or not fp16_only or not some_have_bf16:
        return None
    precision: Precision = "fp16" if problem.precision == "bf16" else "bf16"
    speed, refusal = None, ""
    try:
        found = search_plan(replace(problem, precision=precision), search, micro_batch_size=micro_batch_size)
        speed = problem.global_batch_size * problem.sequence_length / found.best.step_seconds
    except YuanError as error:
        refusal = str(error).partition("\n")[0]
    return OtherPrecision(precision=precision, fp16_only=fp16_only, tokens_per_second=speed, refusal=refusal)
