"""Bodies for `spawn`: what the ranks of a test do."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.support.project import read_metrics, run_config
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.plan import Plan
from yuan_train.model.recompute import _Recipe  # pyright: ignore[reportPrivateUsage]
from yuan_train.parallel import bridge, collectives
from yuan_train.parallel.apply import Worker
from yuan_train.parallel.zero import SharedState, WholeState
from yuan_train.schedule.step import Step
from yuan_train.train.loop import Position, prepare, train


@dataclass(frozen=True)
class Case:
    """One training run under one plan, its log and perhaps its checkpoints in `folder`."""

    run_file: Path
    folder: Path
    plan: Plan | None = None
    overrides: tuple[str, ...] = ()
    without: str = ""
    """Negative control: what to leave out; see `_leaving_out`."""
    port: int = field(default_factory=free_port)

    @property
    def num_ranks(self) -> int:
        return self.plan.world_size if self.plan else 1


def run_cases(cases: list[Case]) -> None:
    """Run the cases one after the other, all in one set of processes: starting these is what takes time."""
    spawn(_run_cases, max(case.num_ranks for case in cases), cases)


def run_alone(case: Case) -> list[dict]:
    """Run a case in this very process, and return its metrics."""
    torch.set_num_threads(1)
    train(prepare(_config(case), case.plan, Position()))
    return read_metrics(case.folder)


def _run_cases(rank: int, cases: list[Case]) -> None:
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    for case in cases:
        if rank < case.num_ranks:
            as_rank(rank, case.num_ranks, case.port)
            _run_case(rank, case)


def _run_case(rank: int, case: Case) -> None:
    position = Position(rank, case.num_ranks, rank, case.num_ranks)
    with _leaving_out(case.without):
        train(prepare(_config(case), case.plan, position))


@contextmanager
def _leaving_out(what: str) -> Iterator[None]:
    """Switch a synchronisation, or what else makes the computation right, off for a negative control; or put
    it off to the end (`early_sums`)."""
    if not what:
        yield
        return
    owner, name, stand_in = {
        "gradient_sum": (WholeState, "begin_sum", lambda self: None),
        "shared_gradient_sum": (SharedState, "begin_sum", _keep_own_gradient),
        "stepped_weights": (SharedState, "publish", lambda self: None),
        "host_weights": (WholeState, "publish", lambda self: None),
        "host_copy": (bridge, "_host_copy", torch.zeros_like),
        "early_sums": (Worker, "begin_sums", _begin_sums_at_the_end),
        "tensor_sum": (collectives.dist, "all_reduce", _pass_small(collectives.dist.all_reduce)),
        "remaking": (_Recipe, "make", _zeros_instead(_Recipe.make)),
        "norm_sum": (collectives.dist, "all_reduce", _keep_own_square(collectives.dist.all_reduce)),
        "hand_on": (collectives.dist, "broadcast", lambda *a, **k: None),
    }[what]
    before = getattr(owner, name)
    setattr(owner, name, stand_in)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _keep_own_gradient(self: SharedState) -> None:
    self._packed += [self._bucket.pack(self._bucket.gradient, part) for part in self._bucket.slices]


def _begin_sums_at_the_end(self: Worker, taken: Step) -> None:
    if taken == self.lane[-1]:
        for state in reversed(self.states):
            state.begin_sum()


def _pass_small(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Sum numbers, as the norm and the loss need; leave activations and their gradients alone."""
    return lambda tensor, *a, **k: whole(tensor, *a, **k) if tensor.dim() < 3 else None


def _zeros_instead(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda self: torch.zeros_like(make(self))


def _keep_own_square(whole: Callable[..., Any]) -> Callable[..., Any]:
    """Of the totals of a step (squared norm, loss, stop), leave the norm to each rank."""

    def reduce(tensor: torch.Tensor, *a: Any, **k: Any) -> Any:
        own = tensor[0].clone() if tensor.shape == (3,) else None
        work = whole(tensor, *a, **k)
        if own is not None:
            tensor[0] = own
        return work

    return reduce


def _config(case: Case):
    return run_config(case.run_file, f"log.directory={case.folder}", "log.every=1000", *case.overrides)
