"""Searches of the planner's tests try little: what more finds is for benchmarks."""

import pytest


@pytest.fixture(autouse=True)
def little_effort(monkeypatch):
    """A small part of the budget."""
    monkeypatch.setattr("yuan_train.planner.search.drafts.LEAST_BUDGET", 60_000)
    monkeypatch.setattr("yuan_train.planner.search.drafts.BUDGET_PER_CARD", 0)
