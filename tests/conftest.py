"""What all tests share."""

from hypothesis import settings

# Two processes on a busy machine: how long an example takes says nothing about the code.
settings.register_profile("yuan", deadline=None, max_examples=50)
settings.load_profile("yuan")
