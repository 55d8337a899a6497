"""Training runs of tests, in several processes or in this one, and their negative controls."""

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal
from unittest.mock import patch

import torch

from tests.support.decisions import decisions
from tests.support.project import read_metrics, run_config
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.checkpoint.load import find_checkpoint, load_tensors
from yuan_train.config.plan import Plan
from yuan_train.models import transformer
from yuan_train.models.layers import _RecomputeFn  # pyright: ignore[reportPrivateUsage]
from yuan_train.parallel import apply, tensor, transport
from yuan_train.parallel.copies import ActivationTiers, ParameterPages
from yuan_train.parallel.device import CudaDevice, Device
from yuan_train.parallel.gradients import GradReducer
from yuan_train.parallel.optimizer_state import HostChunk
from yuan_train.parallel.zero import OwnedState
from yuan_train.schedule.step import Step
from yuan_train.train.job import Job, Position, prepare
from yuan_train.train.run import train


@dataclass(frozen=True)
class Case:
    """One training run under one plan (None: a single rank), with its log in `folder`."""

    run_file: Path
    folder: Path
    plan: Plan | None = None
    overrides: tuple[str, ...] = ()
    without: str = ""
    """Negative control: the key of what to disable; see `disabled`."""
    record: Path | None = None
    """File for the experts that the run chooses."""
    replay: Path | None = None
    """File of the experts that it is made to choose; see `decisions`."""
    port: int = field(default_factory=free_port)

    @property
    def num_ranks(self) -> int:
        return self.plan.world_size if self.plan else 1


def run_cases(cases: list[Case]) -> None:
    """Run the cases one after another in one set of processes, because starting processes is slow."""
    spawn(_run_cases, max(case.num_ranks for case in cases), cases)


def run_forked_cases(cases: list[Case]) -> None:
    """As `run_cases`, in processes forked from one that has imported megatron-core: that takes seconds."""
    spawn(_fork_cases, 1, cases)


def _fork_cases(_: int, cases: list[Case]) -> None:
    fork_cases(cases)


def fork_cases(cases: list[Case]) -> None:
    """As `run_cases`, in processes forked from this one, which keep what it has patched."""
    importlib.import_module("yuan_train.megatron.engine")
    num_ranks = max(case.num_ranks for case in cases)
    torch.multiprocessing.start_processes(_run_cases, (cases,), num_ranks, start_method="fork")


def run_alone(case: Case, device: Device | None = None) -> list[dict]:
    """Run a case in this process, and return its metrics; on `device`, if the run's own is not meant."""
    torch.set_num_threads(1)
    with decisions(record=case.record, replay=case.replay):
        _train(prepare(_config(case), case.plan, Position()), device)
    return read_metrics(case.folder)


def saved_tensors(checkpoints: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint, by name: weights and both moments."""
    from torch.distributed.checkpoint import FileSystemReader

    found = find_checkpoint(checkpoints)
    entries = FileSystemReader(found.path).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)  # pyright: ignore
        for name, entry in entries.items()
    }
    load_tensors(found, tensors)
    return tensors


def same_saved(a: Path, b: Path) -> bool:
    """Whether the newest checkpoints of two folders hold the same tensors, to the bit."""
    ours, theirs = saved_tensors(a), saved_tensors(b)
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def _run_cases(rank: int, cases: list[Case]) -> None:
    os.environ.pop("TORCHELASTIC_RESTART_COUNT", None)
    for case in cases:
        if rank < case.num_ranks:
            as_rank(rank, case.num_ranks, case.port)
            _run_case(rank, case)


def _run_case(rank: int, case: Case) -> None:
    position = Position(rank, case.num_ranks, rank, case.num_ranks)
    with disabled(case.without), decisions(record=case.record, replay=case.replay):
        _train(prepare(_config(case), case.plan, position))


class SharedCard(CudaDevice):
    """A card of several ranks, which NCCL refuses: they meet over gloo, by way of pinned memory."""

    library: Literal["gloo", "nccl"] = "gloo"


def _train(job: Job, device: Device | None = None) -> None:
    """Train with the engine that the run names, which is imported only then. With YUAN_TEST_DEVICE=cuda all
    ranks of all runs are on the first card."""
    if device is None and os.environ.get("YUAN_TEST_DEVICE") == "cuda":
        device = SharedCard(0)
    if device is not None:
        device.use()
        job = replace(job, device=device)
    if job.run.engine == "megatron":
        from yuan_train.megatron.engine import build

        train(job, build)
    else:
        train(job)


@contextmanager
def disabled(key: str) -> Iterator[None]:
    """Disable a synchronisation, or another part that the result depends on, for a negative control.

    `inductor` only saves the time in which compiled layers become code.
    """
    if not key:
        yield
        return
    owner, name, replacement = {
        "grad_all_reduce": (OwnedState, "start_grad_reduce", _keep_own_gradient),
        "sharded_grad_reduce": (OwnedState, "start_grad_reduce", _keep_own_gradient),
        "sharded_weight_sync": (OwnedState, "start_weight_sync", lambda self: None),
        "host_weight_sync": (HostChunk, "start_weights", lambda self, weights: None),
        "operation_per_owner": (transport, "GlooTransport", _Coalescing),
        "page_gradient_up": (ParameterPages, "take", _forget_sums),
        "activation_fetch": (ActivationTiers, "_fetch", _fetch_nothing),
        "host_copy": (transport, "_host_copy", lambda tensor, device: torch.zeros_like(tensor)),
        "complete_gradients": (GradReducer, "before_step", _start_before_the_last_backward),
        "tensor_all_reduce": (tensor.dist, "all_reduce", _skip_activations(tensor.dist.all_reduce)),
        "expert_all_reduce": (apply, "reduce_from_tp", lambda part, group: part),
        "head_norm_reduce": (apply, "reduce_partial", lambda *a: None),
        "recompute": (_RecomputeFn, "recompute", _zeros_of(_RecomputeFn.recompute)),
        "token_reduce_scatter": (tensor, "_REDUCE_SCATTER", _keep_own_tokens),
        "norm_all_reduce": (tensor.dist, "all_reduce", _skip_norm(tensor.dist.all_reduce)),
        "inductor": (transformer, "BACKEND", "aot_eager"),
        "tensor_broadcast": (transport.Transport, "broadcast", _keep_own_tensor),
    }[key]
    original = getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        setattr(owner, name, original)


class _Coalescing(transport.GlooTransport):
    """Equal ranges take one reduce-scatter and one all-gather, as on nccl."""

    _coalesces = True
    reduce_ranges = transport.Transport.reduce_ranges


def _forget_sums(self: Any, step: Step, take: Any = ParameterPages.take) -> None:
    """Leave what earlier groups have summed on the host."""
    if step.kind != "gradient_up":
        take(self, step)


def _fetch_nothing(self: Any, part: Any, fetch: Any = ActivationTiers._fetch) -> None:  # pyright: ignore
    """Bring zeros back."""
    fetch(self, part)
    for kept in part.kept.values():
        kept.flat.zero_()


def _keep_own_gradient(self: OwnedState) -> None:
    self._packed += [self._bucket.pack(self._bucket.gradient, part) for part in self._bucket.slices]


def _keep_own_tensor(self: transport.Transport, tensor: torch.Tensor, root: int, what: str) -> Any:
    """Zeros where it should have come: what memory held before may be anything, NaN too, which ends a run."""
    if torch.distributed.get_rank() != root:
        tensor.zero_()
    return self._pending(None, (tensor,), what)


def _keep_own_tokens(own: torch.Tensor, whole: torch.Tensor, *, group: Any, async_op: bool) -> Any:
    """The part that this rank would get, of its own sum alone."""
    own.copy_(whole.chunk(group.size())[group.rank()])
    return SimpleNamespace(wait=lambda: None)


def _start_before_the_last_backward(self: GradReducer, step: Step) -> None:
    if self._closing.get(step.stage) == step:
        with patch.object(OwnedState, "start_grad_reduce", _start_with_a_copy):
            self._complete(lambda stage, name: stage == step.stage)


def _start_with_a_copy(self: OwnedState, start: Any = OwnedState.start_grad_reduce) -> None:
    """Of the gradients as they are now: how much of what comes later is reduced too would be left to time."""
    bucket = self._bucket
    self._bucket = copy(bucket)
    self._bucket.gradient = bucket.gradient.clone()
    start(self)
    self._bucket = bucket


def _skip_activations(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """An all-reduce that skips activations and their gradients, but reduces vectors such as norm and loss."""
    ended = SimpleNamespace(wait=lambda: True)
    return lambda tensor, *a, **k: all_reduce(tensor, *a, **k) if tensor.dim() < 3 else ended


def _zeros_of(recompute: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda self: torch.zeros_like(recompute(self))


def _skip_norm(all_reduce: Callable[..., Any]) -> Callable[..., Any]:
    """An all-reduce that leaves the squared norm, of a step's totals (norm, loss, stop), to each rank."""

    def reduce(tensor: torch.Tensor, *a: Any, **k: Any) -> Any:
        own = tensor[0].clone() if tensor.shape == (3,) else None
        work = all_reduce(tensor, *a, **k)
        if own is not None:
            tensor[0] = own
        return work

    return reduce


def _config(case: Case):
    return run_config(case.run_file, f"log.directory={case.folder}", "log.every=1000", *case.overrides)
