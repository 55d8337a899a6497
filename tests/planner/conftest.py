"""Searches of the planner's tests polish little and bound coarsely: both have tests of their own."""

from functools import partial

import pytest

from yuan_train.planner.search import search


@pytest.fixture(autouse=True)
def little_polish(monkeypatch):
    """A small part of the budgets."""
    monkeypatch.setattr("yuan_train.planner.search.drafts.BUDGET_PER_SECOND", 300)
    monkeypatch.setattr("yuan_train.planner.search.finalists.POLISH_WORK", 200_000)
    monkeypatch.setattr("yuan_train.planner.search.finalists.RESTRUCTURE_WORK", 150_000)


@pytest.fixture(autouse=True)
def coarse_bounds(request, monkeypatch):
    """Bounds as where a search's time is over; a test marked `bounds` has the fine ones."""
    if "bounds" not in request.keywords:
        monkeypatch.setattr(search, "bound_plans", partial(_bound_at_once, search.bound_plans))


def _bound_at_once(whole, *arguments, **keys):
    return whole(*arguments, **keys | {"stopped": lambda: True})
