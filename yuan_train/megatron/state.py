"""Masters and moments of megatron-core's optimizers as boxes of global tensors.

Each parameter has its optimizer state on this rank as a run [start, end) of its elements: all of them, or
under the distributed optimizer this rank's part, which may be none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from yuan_train.checkpoint.load import holds_optimizer_state, load_tensors, tensor_names
from yuan_train.checkpoint.local_shards import LocalShard
from yuan_train.checkpoint.names import OPTIMIZER_STATES, WEIGHTS
from yuan_train.megatron.model import Named
from yuan_train.models.initial import initial_rows
from yuan_train.parallel.shard import TensorBox, global_boxes
from yuan_train.train.job import Job
from yuan_train.train.state import Progress, from_state

KINDS = (WEIGHTS, *OPTIMIZER_STATES)


@dataclass(frozen=True)
class Held:
    """The optimizer state of a parameter that this rank holds: fp32 [end - start] each, in place."""

    named: Named
    start: int
    end: int
    tensors: Mapping[str, torch.Tensor]
    """By kind; `weights` is the master."""

    def boxes(self, kind: str) -> Iterator[TensorBox]:
        """The boxes of the global tensor, as views."""
        shard, flat = self.named.shard, self.tensors[kind]
        for box in global_boxes(shard, shard.index, shard.count, self.start, self.end):
            view = flat[box.start : box.start + box.num_elements].view(box.sizes)
            yield TensorBox(box.offsets, box.sizes, view)


def hold_states(optimizer: Any, parameters: list[Named]) -> list[Held]:
    """What this rank holds of each parameter's state; moments that are not there yet are made, zero."""
    found: list[Held] = []
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        inner = part.optimizer
        steps_in_groups = _is_fused(inner)
        for named in parameters:
            place = _master(part, named.parameter)
            if place is None or not place[1].numel():
                continue
            start, master = place
            state = inner.state[master]
            for kind in OPTIMIZER_STATES:
                state.setdefault(kind, torch.zeros_like(master, memory_format=torch.contiguous_format))
            if not steps_in_groups:
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
            tensors = {kind: state[kind].view(-1) for kind in OPTIMIZER_STATES}
            tensors[WEIGHTS] = master.detach().view(-1)
            found.append(Held(named, start, start + master.numel(), tensors))
    return found


def _is_fused(inner: Any) -> bool:
    """Whether it is TransformerEngine's or apex's FusedAdam, which counts its steps in its groups."""
    return type(inner).__module__.partition(".")[0] in ("transformer_engine", "apex")


def _master(part: Any, parameter: Any) -> tuple[int, torch.Tensor] | None:
    """The master of a parameter on this rank, and the element of the parameter that it begins with."""
    places = getattr(part, "model_param_group_index_map", None)
    if places is None:
        return 0, getattr(parameter, "main_param", parameter)
    if parameter not in places:
        return None
    group, order = places[parameter]
    run = part._get_model_param_range_map(parameter)["param"]
    return run.start, part.optimizer.param_groups[group]["params"][order]


def set_steps(optimizer: Any, step: int) -> None:
    """Set the step count, for the correction of AdamW's bias."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if _is_fused(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = step
        else:
            for state in part.optimizer.state.values():
                state["step"].fill_(step)


@torch.no_grad()
def publish(optimizer: Any) -> None:
    """Make the model's weights of the masters; collective over the owners.

    Never the other way, as `reload_model_params` does: what is left of a master in bf16 is not the master.
    """
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
        for chunk in getattr(part, "model_chunks", ()):
            chunk.start_param_sync()


def as_shards(
    held: list[Held], kinds: tuple[str, ...], *, written_by: int | None = None
) -> dict[str, LocalShard]:
    """What this rank holds, by key of a checkpoint.

    With `written_by`, this rank's place in its tensor-parallel group: only what it writes, so that each
    element is written once over the group and over both copies of a tied embedding.
    """
    boxes: dict[str, list[TensorBox]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for one in held:
        named = one.named
        if written_by is not None and (named.is_copy or (named.shard.dim is None and written_by)):
            continue
        for kind in kinds:
            key = f"{kind}.{named.name}"
            shapes[key] = named.shard.shape
            boxes.setdefault(key, []).extend(one.boxes(kind))
    return {key: LocalShard(torch.Size(shapes[key]), tuple(found)) for key, found in boxes.items()}


def fill(job: Job, optimizer: Any, held: list[Held]) -> Progress:
    """Fill masters and moments, publish the weights, and return the progress to start from; collective.

    Raises CheckpointError if a checkpoint cannot be read.
    """
    if job.checkpoint is not None:
        kinds = KINDS if holds_optimizer_state(job.checkpoint) else KINDS[:1]
        load_tensors(job.checkpoint, as_shards(held, kinds))
        progress = from_state(job.checkpoint.state, job.run)
        set_steps(optimizer, progress.step - progress.skipped)
        publish(optimizer)
        return progress
    given = frozenset[str]() if job.start is None else tensor_names(job.start)
    for one in held:
        if f"{WEIGHTS}.{one.named.name}" not in given:
            _draw(job, one)
    if job.start is not None:
        shards = as_shards(held, KINDS[:1])
        load_tensors(job.start, _only(shards, given))
    publish(optimizer)
    return Progress.initial(job.run)


def _only(shards: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    return {name: shard for name, shard in shards.items() if name in names}


@torch.no_grad()
def _draw(job: Job, held: Held) -> None:
    """Draw a parameter, one at a time, and keep this rank's run of it."""
    shard = held.named.shard
    whole = torch.empty(shard.local_shape, dtype=torch.float32)
    rows = initial_rows(
        job.run.model, held.named.name, shard.shape, seed=job.run.train.seed, wanted=shard.holds_rows
    )
    for first, block in rows:
        shard.fill_rows(whole, first, block)
    held.tensors[WEIGHTS].copy_(whole.view(-1)[held.start : held.end])
