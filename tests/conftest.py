"""What all tests share."""

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.commands import ask, refuse  # noqa: F401
from yuan_train.parallel.environment import NAME_LOOKUPS

# An interpreter that a test starts would else compile the whole package, a second for each.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# Ranks that tests spawn have no launcher that sets it.
os.environ.setdefault(*NAME_LOOKUPS)
# The background of a shell ignores it: a test that interrupts its own process would wait for ever there.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Several processes on a busy machine: how long an example takes says nothing about the code.
settings.register_profile(
    "yuan", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("yuan")

LONGEST = ("test_gpu_day.py", "test_pages.py", "test_plans.py", "test_move.py", "test_lost_ranks.py")
"""Files whose tests take longest and wait most: begun last, they would leave a core idle at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests; the others stay in their order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    """Half a million objects that all tests share cost each collection of garbage a third of a second."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of a small project, whose files nobody changes."""
    from tests.support.project import make_project

    return make_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(autouse=True)
def leaves_signals() -> Iterator[None]:
    """Whoever takes signals gives them back: else a later test would be heard by this one's."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
    before = [signal.getsignal(number) for number in numbers]
    yield
    after = [signal.getsignal(number) for number in numbers]
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)
    assert after == before
