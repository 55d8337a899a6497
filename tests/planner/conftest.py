"""Searches of the planner's tests polish little: that has tests of its own."""

import pytest


@pytest.fixture(autouse=True)
def little_polish(monkeypatch):
    """A small part of the budgets."""
    monkeypatch.setattr("yuan_train.planner.search.drafts.BUDGET_PER_SECOND", 1_000)
    monkeypatch.setattr("yuan_train.planner.search.finalists.POLISH_WORK", 200_000)
    monkeypatch.setattr("yuan_train.planner.search.finalists.RESTRUCTURE_WORK", 150_000)
