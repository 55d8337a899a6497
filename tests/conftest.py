"""What all tests share."""

from hypothesis import HealthCheck, settings

# Several processes on a busy machine: how long an example takes says nothing about the code.
settings.register_profile(
    "yuan", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("yuan")
