"""Constraints between `log`, `train.trace`, `train.compile`, disks and the rest of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from yuan_train.config.errors import Violation

if TYPE_CHECKING:
    from yuan_train.config.run import RunConfig


def log_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield what is wrong with where figures go, and with the steps to be traced."""
    if run.log.to and run.log.directory is None:
        yield Violation(
            ("log", "to"),
            f"{', '.join(run.log.to)} write into log.directory, or keep there which of their runs this is; "
            "give one",
        )
    trace = run.train.trace
    if trace is None:
        return
    if trace.last_step > run.train.steps:
        yield Violation(
            ("train", "trace"),
            f"steps {trace.first_step} to {trace.last_step} are to be traced, but the run ends at step "
            f"{run.train.steps} (train.steps); trace earlier steps, or fewer",
        )
    if run.log.directory is None:
        yield Violation(("train", "trace"), "trace files are written to log.directory; give one")


def compile_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield what compiled layers exclude."""
    search = run.search
    if run.model.num_experts:
        yield Violation(
            ("train", "compile"),
            "true, but the numbers of tokens of a layer's experts are known to the host only while it runs; "
            "set train.compile: false",
        )
    if run.data.reset_attention:
        yield Violation(
            ("train", "compile"),
            "true, but data.reset_attention gives every micro-batch other ranges, for which the layers would "
            "be compiled again; set one of the two to false",
        )
    if "zero_bubble" in (search.schedule or ()):
        yield Violation(
            ("search", "schedule"),
            "zero_bubble splits backwards, and the backward of a compiled layer (train.compile) is one "
            "piece; leave it out, or set train.compile: false",
        )
    for tier in ("activations", "parameters"):
        if tier in (search.offload or ()):
            yield Violation(
                ("search", "offload"),
                f"{tier}, which leave layer by layer, and a compiled layer (train.compile) is one piece; "
                "leave them out, or set train.compile: false",
            )
    if search.tensor is not None and set(search.tensor) != {1}:
        yield Violation(
            ("search", "tensor"),
            f"{list(search.tensor)}, but compiled layers (train.compile) are not sharded; set [1], or set "
            "train.compile: false",
        )


def tier_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield what state on disks excludes."""
    if "disk" in run.search.tiers:
        yield from _disk_constraints(run)


def _disk_constraints(run: RunConfig) -> Iterator[Violation]:
    if run.memory.disk_directory is None:
        what = "disk, but memory.disk_directory is not given; give a directory on a local disk"
    elif run.checkpoint.asynchronous:
        what = "disk, but checkpoint.asynchronous would copy what is there to host memory; set it to false"
    elif "optimizer" not in run.search.tiers:
        what = "disk holds what hosts have no room for: name optimizer too"
    else:
        return
    yield Violation(("search", "offload"), what + ", or leave disk out")
