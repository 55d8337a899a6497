"""A search for the plans of one engine: only what megatron-core has words for, and keys that leave some."""

from __future__ import annotations

from typing import Any

import pytest

from tests.planner.search.test_search import TWO_SPEEDS, card, cluster, find, problem
from yuan_train.config.errors import ConfigError
from yuan_train.config.express import is_expressible

MEGATRON: dict[str, Any] = {"engine": ("megatron",)}
EVERY = ("1f1b", "interleaved_1f1b", "zero_bubble", "gpipe")


def test_every_plan_shown_is_one_that_megatron_core_runs() -> None:
    given = problem(TWO_SPEEDS, global_batch_size=12)
    free = find(given, schedule=EVERY)
    found = find(given, schedule=EVERY, **MEGATRON)
    assert all(is_expressible(c.plan) for c in (found.best, *found.runners_up))
    # Else the restriction would not be seen here.
    assert not all(is_expressible(c.plan) for c in (free.best, *free.runners_up))
    assert free.best.step_seconds <= found.best.step_seconds
    both = find(given, schedule=EVERY, engine=("yuan", "megatron"))
    assert both.best.step_seconds == free.best.step_seconds


def test_cards_of_another_backend_are_left_out() -> None:
    other = card(speed=0.5)
    cards = cluster(Fast=(2, card(speed=3.0)), Other=(1, type(other)(**{**vars(other), "backend": "rccl"})))
    found = find(problem(cards), **MEGATRON)
    assert {entry.type for entry in found.best.plan.ranks} == {"Fast"}
    assert [left.card.type for left in found.left_out] == ["Other"]


def test_keys_that_leave_no_plan_for_it() -> None:
    with pytest.raises(
        ConfigError, match=r"search.recompute: \[selective\], but megatron-core .* has only none"
    ):
        find(problem(TWO_SPEEDS), recompute=("selective",), **MEGATRON)
