"""The errors a user can cause, each with the exit code that the command line gives it.

A message says where, what came, what was wanted and what to do. Programming errors stay `assert`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Problem:
    """One broken rule: the path of the value it is about, and what to do."""

    path: tuple[str | int, ...]
    message: str


class YuanError(ValueError):
    """Something the user can mend; the command line prints the message and exits with `exit_code`."""

    exit_code = 2


class ConfigError(YuanError):
    """A cluster, model, run or profile file, or an override, is wrong."""


class PlanError(YuanError):
    """A plan breaks a law of plans, or does not belong to this model, run or world size."""


class NoPlanFits(PlanError):
    """No plan fits the cards; the message holds the nearest miss."""

    exit_code = 3


class DataError(YuanError):
    """Text, tokenizer or token files are missing, torn or of another kind."""


class CheckpointError(YuanError):
    """A checkpoint is missing, torn, of another shape, or could not be written."""


class TrainingError(YuanError):
    """Training itself went wrong: a loss that is not finite, a rank that stopped answering."""

    exit_code = 1
