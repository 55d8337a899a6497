"""Searches of the planner's tests polish little: the polish has tests of its own."""

import pytest


@pytest.fixture(autouse=True)
def little_polish(monkeypatch):
    """A small part of the budgets."""
    monkeypatch.setattr("yuan_train.planner.search.search.POLISH_WORK", 200_000)
    monkeypatch.setattr("yuan_train.planner.search.search.RESTRUCTURE_WORK", 150_000)
