"""Bodies for `spawn`: what the ranks of a test do."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch

from tests.support.project import read_metrics, run_config
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.plan import Plan
from yuan_train.parallel import gradients
from yuan_train.train.loop import Position, prepare, train


@dataclass(frozen=True)
class Case:
    """One training run under one plan, its log and perhaps its checkpoints in `folder`."""

    run_file: Path
    folder: Path
    plan: Plan | None = None
    overrides: tuple[str, ...] = ()
    without: str = ""
    """Negative control: the synchronisation to leave out (`gradient_sum`)."""
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
    whole = gradients.sum_over_owners
    if case.without == "gradient_sum":
        import yuan_train.train.step as step

        step.sum_over_owners = lambda buckets, groups: None
    try:
        train(prepare(_config(case), case.plan, position))
    finally:
        if case.without:
            import yuan_train.train.step as step

            step.sum_over_owners = whole


def _config(case: Case):
    return run_config(case.run_file, f"log.directory={case.folder}", "log.every=1000", *case.overrides)
