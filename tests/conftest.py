"""What all tests share."""

import pytest
from hypothesis import HealthCheck, settings

# Several processes on a busy machine: how long an example takes says nothing about the code.
settings.register_profile(
    "yuan", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("yuan")

LONGEST = ("test_gpu_day.py", "test_pages.py", "test_plans.py", "test_tiers.py", "test_lost_ranks.py")
"""Files whose tests take longest and wait most: begun last, they would leave a core idle at the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests; the others stay in their order."""
    items.sort(key=lambda item: item.path.name not in LONGEST)
