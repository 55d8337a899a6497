"""Memory: what a plan's forecast asks of it, what a process takes, and what a rank that ran out says."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from yuan_train.config.errors import PlanError, TrainingError
from yuan_train.config.plan import MemoryForecast, Plan, RankPlan, StagePlan, copied_bytes, node_of
from yuan_train.config.run import HostCopies
from yuan_train.config.units import show_bytes
from yuan_train.parallel.activity import activity_of
from yuan_train.parallel.device import CardFacts, CardMemory, Device
from yuan_train.parallel.grid import Grid, RankCoord

_WORDS = re.compile(r"out of memory|allocate memory", re.IGNORECASE)
"""What says so in errors without a class of their own: of torch's allocator on the CPU, and of NCCL."""
_ALLOCATOR = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_IN_PIECES = "expandable_segments:True"
MAX_FOREIGN = 256 << 20
"""Bytes beyond a card's `reserved` that others than the allocator may hold without a word."""


@dataclass(frozen=True)
class Needs:
    """What a plan's forecast says that a rank takes: bytes."""

    card: float
    """At the peak, with what is reserved."""
    reserved: float
    """Of these, for the context, communicators and fragmentation."""
    host: float


def needs_of(plan: Plan, rank: int) -> Needs | None:
    """What a rank takes with all its stages; None without a forecast of them."""
    if plan.forecast is None:
        return None
    own = {(p, s) for p, s, stage in plan.numbered_stages if rank in stage.ranks}
    stages = [stage for stage in plan.forecast.stages if (stage.pipeline, stage.stage) in own]
    if not stages:
        return None
    reserved = max(stage.memory.reserved for stage in stages)
    return Needs(
        card=reserved + sum(stage.peak_memory_bytes - stage.memory.reserved for stage in stages),
        reserved=reserved,
        host=sum(stage.host_memory_bytes for stage in stages),
    )


def check_card_memory(entry: RankPlan, needs: Needs, memory: CardMemory, card: CardFacts) -> str | None:
    """A note where what is free of a card is less than the forecast; None where it is enough.

    Raises PlanError if the whole card is.
    """
    name = f"rank {entry.rank} ({entry.device})"
    if needs.card > memory.total:
        raise PlanError(
            f"{name}: the plan's forecast is {show_bytes(needs.card)} at its peak, and {card.name} "
            f"has {show_bytes(memory.total)} in all; plan again for what the card has (`memory` of its type, "
            "under device_types in the cluster file)"
        )
    wanted = needs.card - needs.reserved
    # What is reserved is taken already, at least in part.
    free = memory.free + memory.reserved - memory.allocated
    if wanted <= free:
        return None
    users = ", ".join(card_users(card.pci_address)) or "the driver does not tell whose"
    return (
        f"{name}: the plan's forecast takes {show_bytes(wanted)} of {card.name} beside what is "
        f"reserved, but {show_bytes(free)} of {show_bytes(memory.total)} are free; others are on it: {users}"
    )


def host_note(
    plan: Plan, entry: RankPlan, available: float, *, copies: HostCopies | None = None
) -> str | None:
    """A note of the first rank of a node whose ranks put more on the host than is available there; `copies`
    are those of saves."""
    node = node_of(entry)
    own = [other for other in plan.ranks if node_of(other) == node]
    if own[0] != entry:
        return None
    forecast = sum(needs.host for other in own if (needs := needs_of(plan, other.rank)) is not None)
    copies = copies or HostCopies()
    copied = copied_bytes(plan, node, copies)
    if forecast + copied <= available:
        return None
    saves = f" and saves copy {show_bytes(copied)} there ({copies.keys})" if copied else ""
    return (
        f"node {node}: by the plan's forecast its {len(own)} ranks put {show_bytes(forecast)} on the "
        f"host{saves}, of which {show_bytes(available)} are available now"
    )


def card_users(address: str | None) -> list[str]:
    """The processes on a card, as nvidia-smi tells; empty where it does not."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_bus_id,pid,process_name,used_memory"]
    try:
        ran = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found: list[str] = []
    for line in ran.stdout.splitlines():
        bus, *words = (word.strip() for word in line.split(","))
        # nvidia-smi writes eight digits of the domain, sysfs four.
        own = address is None or bus.lower().endswith(address.lower())
        if own and len(words) == 3 and words[0] != str(os.getpid()):
            found.append(f"process {words[0]} ({words[1]}, {words[2]})")
    return found


@contextmanager
def explaining_memory(plan: Plan, rank: int, device: Device) -> Iterator[None]:
    """Raise out of memory as a TrainingError that says what to do. A rank's plan is that of its role."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and not _WORDS.search(str(error)):
            raise
        raise TrainingError(
            _explain(error, plan, Grid(plan).coords[rank], device.memory(), device.largest_free_block())
        ) from error


def _explain(
    error: BaseException, plan: Plan, coord: RankCoord, memory: CardMemory | None, block: int
) -> str:
    """`memory` and the largest free `block` are the card's, if there is one."""
    where = activity_of(error)
    card = plan.ranks[coord.rank]
    # What else the driver says is below, and its advice is for those who have no plan.
    reason = str(error).partition("\n")[0].partition(" GPU ")[0].strip()[:300]
    place = card.device if card.type == "unknown" else f"{card.type} {card.device}"
    lines = [f"{coord}, {place}: out of memory in {where or 'a step'} ({reason or type(error).__name__})"]
    forecast = _forecast_of(plan, coord)
    lines.append("forecast: " + (_parts(forecast) if forecast is not None else "none in this plan"))
    if memory is not None:
        lines.append(_taken(memory, block))
    lines.append(f"what would help: {'; '.join(_remedies(plan, coord, forecast, memory, block))}")
    return "\n".join(lines)


def _forecast_of(plan: Plan, coord: RankCoord) -> MemoryForecast | None:
    """What the plan has for the rank's card; of several virtual stages that with the most."""
    stages = plan.forecast.stages if plan.forecast is not None else ()
    own = [s.memory for s in stages if s.pipeline == coord.pipeline and s.stage in coord.stages]
    return max(own, key=lambda memory: memory.total, default=None)


def _parts(forecast: MemoryForecast) -> str:
    """`21.3 GiB: parameters 3.1 GiB, ...`."""
    parts = ", ".join(f"{name} {show_bytes(value)}" for name, value in forecast.categories.items() if value)
    return f"{show_bytes(forecast.total)}: {parts}"


def _taken(memory: CardMemory, block: int) -> str:
    return (
        f"taken: allocated {show_bytes(memory.allocated)} (most {show_bytes(memory.most_allocated)}), "
        f"reserved {show_bytes(memory.reserved)}, {show_bytes(_foreign(memory))} outside of torch, free "
        f"{show_bytes(memory.free)} of {show_bytes(memory.total)}; largest free block {show_bytes(block)}"
    )


def _foreign(memory: CardMemory) -> int:
    """Bytes that others than the allocator hold: context, communicators, other processes."""
    return max(0, memory.total - memory.free - memory.reserved)


def _remedies(
    plan: Plan, coord: RankCoord, forecast: MemoryForecast | None, memory: CardMemory | None, block: int
) -> list[str]:
    """What to change, the likeliest first; keys of the run file, with which to plan again."""
    found: list[str] = []
    expected = 0.0 if forecast is None else forecast.reserved
    if memory is not None and _foreign(memory) > expected + MAX_FOREIGN:
        found.append(
            f"others hold {show_bytes(_foreign(memory))} of the card, {show_bytes(expected)} were expected: "
            "end other processes there (nvidia-smi), or raise `reserved` of its type in the cluster file"
        )
    unused = 0 if memory is None else memory.reserved - memory.allocated
    if (
        unused > MAX_FOREIGN
        and block < unused / 2
        and not any(_IN_PIECES in os.environ.get(name, "") for name in _ALLOCATOR)
    ):
        found.append(f"{_ALLOCATOR[0]}={_IN_PIECES}, for what is free is in pieces")
    pipeline = plan.pipelines[coord.pipeline]
    stages = [pipeline.stages[stage] for stage in coord.stages]
    if plan.forecast is not None:
        found.append("plan again with a smaller search.memory_fraction")
    if pipeline.micro_batch_size > 1:
        key = "micro_batch_size" if plan.world_size > 1 else "train.micro_batch_size"
        found.append(f"{key} below {pipeline.micro_batch_size}")
    found += _of_stages(stages, is_card=memory is not None)
    found.append("a shorter data.sequence_length")
    return found


def _of_stages(stages: list[StagePlan], *, is_card: bool) -> list[str]:
    """What the stages do not use yet."""
    found: list[str] = []
    if any(stage.num_recomputed < stage.num_blocks for stage in stages):
        found.append("recompute: full of more layers (search.recompute)")
    if is_card and any(stage.optimizer_offload < 1 for stage in stages):
        found.append("more optimizer_offload (search.offload: [optimizer])")
    if is_card and not any(stage.activation_offload for stage in stages):
        found.append("activation_offload (search.offload: [activations])")
    return found


_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Options of glibc's mallopt."""
_LARGEST_KEPT = 32 << 20
"""Bytes: the largest M_MMAP_THRESHOLD that glibc accepts; it maps larger blocks from the system each time."""

STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_memory_bytes(device: Device) -> int:
    """Peak bytes held since the process started, or since `reset_peak_memory`; on CUDA by tensors."""
    if (card := device.memory()) is not None:
        return card.most_allocated
    if STATUS.exists():
        return _resident("VmHWM")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def peak_footprint_bytes(device: Device) -> int:
    """Peak bytes taken of a device since the process started, in the terms of a plan's memory forecast.

    On CUDA that is more than tensors: the allocator's blocks at their peak, with what fragmentation wastes,
    and what is outside of it now (context, kernels, communicators), which the forecast calls `reserved`. The
    driver does not say whose that is, so other processes on the card count too. On a CPU as
    `peak_memory_bytes`.
    """
    card = device.memory()
    return peak_memory_bytes(device) if card is None else card.most_reserved + _foreign(card)


def can_track_memory(device: Device) -> bool:
    """Whether `held_bytes` and `reset_peak_memory` work here: on CUDA, and on Linux."""
    return device.is_card or (STATUS.exists() and CLEAR.exists())


def held_bytes(device: Device) -> int:
    """Bytes held now."""
    card = device.memory()
    return _resident("VmRSS") if card is None else card.allocated


def reset_peak_memory(device: Device) -> None:
    """Start a new peak from what is held now."""
    if device.is_card:
        device.reset_peak_memory()
    else:
        CLEAR.write_text("5")


def keep_freed_memory(device: Device) -> None:
    """Let the CPU allocator keep freed memory for the next micro-batch. Nothing on CUDA, or without glibc.

    Returned to the system, every page would have to be cleared again: a tenth of a small layer's time.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if not device.is_card else None
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _LARGEST_KEPT)
        mallopt(_TRIM_THRESHOLD, -1)


@contextmanager
def long_lived_objects() -> Iterator[None]:
    """Take all objects of the process as lasting, so that a collection looks through the new ones alone.

    A process with torch has hundreds of thousands: each collection takes a tenth of a second over them.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def release_free_memory(device: Device) -> None:
    """Return free memory to the card or the system, as far as the allocator can."""
    gc.collect()
    if device.is_card:
        device.empty_cache()
        return
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _resident(field: str) -> int:
    """A field of /proc/self/status, in bytes."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", STATUS.read_text(), re.MULTILINE)
    assert found is not None, f"{STATUS} has no {field}"
    return int(found[1]) * 1024
