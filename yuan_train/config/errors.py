"""Errors that a user can cause, each with the exit code of the command line, and signals, which end it too.

A message says where, what came, what was wanted and what to do. Programming errors are `assert`s.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import traceback
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType

NOT_IN_PLACE = "not moved in place: "
"""Begins what the ranks of a supervised run say where they end for a restart in place of a move."""
CAUSE = "the run ends: "
"""What a rank prints before another rank's error that ends it."""
INTERRUPTED = 130
"""Exit code after Ctrl-C."""
INSTALL = "pip install -e '.[megatron]' in the checkout"
"""What installs megatron-core."""
TESTED = ("0.16.1",)
"""Versions of megatron-core that the tests run with."""


@dataclass(frozen=True)
class Violation:
    """One violated constraint: the path of the value, and a message that says what to do."""

    path: tuple[str | int, ...]
    message: str


class YuanError(ValueError):
    """An error that the user can fix; the command line prints its message and exits with `exit_code`."""

    exit_code = 2


class ConfigError(YuanError):
    """A cluster, model, run or profile file, or an override, is wrong."""


class NoDriver(ConfigError):
    """A machine has no driver of any card, and the plan has cards there."""


class PlanError(YuanError):
    """A plan violates a constraint, or does not belong to this model, run or world size."""


class NoPlanFits(PlanError):
    """No plan fits the cards; the message describes the plan that comes closest."""

    exit_code = 3


class SearchStopped(NoPlanFits):
    """The time limit ended the search before it found a plan that fits; there may be one."""


class DataError(YuanError):
    """Text, tokenizer or token files are missing, incomplete or in another format."""


class CheckpointError(YuanError):
    """A checkpoint is missing, incomplete, of another model shape, or could not be written."""


class HostMemoryError(YuanError):
    """A host has not the memory that a plan puts there, or may not pin it."""


class DiskError(YuanError):
    """A disk cannot take the optimizer state that a plan puts there."""


class TrainingError(YuanError):
    """Training failed: a loss that is not finite, no memory left, or a rank that stopped responding."""

    exit_code = 1


class NotFinite(TrainingError):
    """The loss or its gradient is not finite: all ranks find it out together, and all are there."""


class LostRank(TrainingError):
    """A rank stopped responding to this one, which has no fault of its own."""


def why_unread(error: OSError | UnicodeDecodeError) -> str:
    """Why a file of text cannot be read, without numbers of errors, codecs and a second path."""
    if isinstance(error, IsADirectoryError):
        return "it is a folder; wanted a file"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no text (byte {error.start} is not UTF-8)"
    return (error.strerror or str(error)).lower()


def say(error: BaseException) -> None:
    """Print an error to stderr, unless it was said before: the message of a YuanError, else the traceback."""
    if not getattr(error, "is_said", False):
        if isinstance(error, YuanError):
            for line in str(error).splitlines():
                print(f"error: {line}", file=sys.stderr)
        else:
            # A bug: its traceback is worth more than a one-line message.
            traceback.print_exception(error)
        sys.stderr.flush()
    mark_as_said(error)


def mark_as_said(error: BaseException) -> None:
    """Have an error not printed by `say`, for what it says is printed."""
    error.is_said = True  # pyright: ignore[reportAttributeAccessIssue]


PR_SET_PDEATHSIG = 1
"""Option of Linux's prctl: the signal a process gets when its parent dies."""
Handler = Callable[[int, FrameType | None], object] | signal.Handlers


@contextmanager
def hearing(handlers: Mapping[signal.Signals, Handler]) -> Generator[None]:
    """Inside, these handlers take the signals; behind it, who took them before. Of the main thread only."""
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            # None: whoever took it is not Python's, and cannot be set again.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """In a process that is being started: get a signal if the starting one is killed (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)
