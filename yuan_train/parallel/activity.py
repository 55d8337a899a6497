"""What a rank is doing, or waiting for, told to its observers: the trace and the watch over waiting ranks.

The scope is dynamic, like that of `torch.no_grad`: observers hear of the activities of the thread that opened
`observed_by`, and of no other thread's. Unobserved, an activity costs a lookup.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Literal, NamedTuple, Protocol

from yuan_train.schedule.step import Step

ActivityKind = Literal[
    "training_step",
    "load",
    "compute",
    "post",
    "send",
    "wait",
    "wait_copy",
    "drain",
    "start_grad_reduce",
    "finish_grad_reduce",
    "optimizer",
    "weight_sync",
    "collective",
    "idle",
]


class Activity(NamedTuple):
    """One thing that a rank does; activities nest. A tuple, for several are made with every message."""

    kind: ActivityKind
    step: Step | None = None
    """The step of the rank program: that is computed or loaded for, the receive or the send, or the copy."""
    number: int = 0
    """Of the training step, or of the bucket whose gradient is reduced."""
    what: str = ""
    """The operation, of a collective; or for what it waits that others work on."""
    ranks: tuple[int, ...] = ()
    """Who takes part in a collective."""

    def __str__(self) -> str:
        """For people: `the backward of micro-batch 4 on stage 1`."""
        if self.step is not None:
            return f"{'reading data for ' if self.kind == 'load' else ''}the {self.step}"
        return self.what or _NAMES.get(self.kind, f"the {self.kind.replace('_', ' ')}")


_NAMES: dict[ActivityKind, str] = {
    "start_grad_reduce": "the start of a gradient reduction",
    "finish_grad_reduce": "the end of a gradient reduction",
    "optimizer": "the optimizer step",
}


class Observer(Protocol):
    """Hears of activities as the host begins and ends them; one that raises an error does not end."""

    def begin(self, activity: Activity) -> None: ...

    def end(self, activity: Activity) -> None: ...


_OBSERVERS: ContextVar[tuple[Observer, ...]] = ContextVar("_OBSERVERS", default=())


@contextmanager
def observed_by(observer: Observer) -> Iterator[None]:
    """Tell `observer`, too, of what this thread does inside."""
    token = _OBSERVERS.set((*_OBSERVERS.get(), observer))
    try:
        yield
    finally:
        _OBSERVERS.reset(token)


def is_observed() -> bool:
    """Whether anyone hears of what this thread does."""
    return bool(_OBSERVERS.get())


class during:  # noqa: N801 (reads as the context manager that it is)
    """Around an activity: tell the observers of its begin and its end."""

    __slots__ = ("_activity", "_observers")

    def __init__(self, activity: Activity) -> None:
        self._activity = activity
        self._observers = _OBSERVERS.get()

    def __enter__(self) -> None:
        for observer in self._observers:
            observer.begin(self._activity)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            for observer in self._observers:
                observer.end(self._activity)
        elif activity_of(error) is None:
            error.activity = self._activity  # pyright: ignore[reportAttributeAccessIssue]


def activity_of(error: BaseException) -> Activity | None:
    """The innermost activity that an error has ended, if it has ended any."""
    return getattr(error, "activity", None)
