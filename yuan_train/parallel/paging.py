"""What a rank's stages keep in pages of the host, and when they copy them: from a plan and its programs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from yuan_train.parallel.device import Device
from yuan_train.parallel.gradients import FlatBucket, master_dtype
from yuan_train.parallel.grid import Grid, RankCoord, unit_of
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.tiers.slab import HostSlab, piece_bytes
from yuan_train.schedule.check import check_pages
from yuan_train.schedule.pages import PagedGroups, Paging, by_group, paging_of, with_pages
from yuan_train.schedule.step import RankProgram


@dataclass(frozen=True)
class StagePages:
    """The pages of one stage."""

    paging: Paging
    buckets: tuple[FlatBucket, ...]
    """In the order of layers."""
    training: PagedGroups
    evaluation: PagedGroups
    """What is done with each group of micro-batches."""


def stage_pages(
    grid: Grid, coord: RankCoord, programs: tuple[RankProgram, RankProgram], buckets: Sequence[FlatBucket]
) -> dict[int, StagePages]:
    """By stage of a rank, its pages; stages without are left out. `programs`: of training and evaluation."""
    pipeline = grid.pipeline(coord)
    of_unit = {unit_of(next(iter(bucket.parameters))): bucket for bucket in buckets if bucket.is_paged}
    found: dict[int, StagePages] = {}
    for number in coord.stages:
        stage = pipeline.stages[number]
        paging = paging_of(stage, group=pipeline.page_group)
        if paging is None:
            continue
        in_pages = [with_pages(program, paging) for program in programs]
        for program in in_pages:
            check_pages(program, paging)
        first = int(stage.layers[0])
        found[number] = StagePages(
            paging=paging,
            buckets=tuple(of_unit[f"layers.{first + i}"] for i in range(paging.num_pages)),
            training=by_group(in_pages[0]),
            evaluation=by_group(in_pages[1]),
        )
    return found


def page_slab(
    parameters: Mapping[str, torch.nn.Parameter],
    shards: Mapping[str, Shard],
    units: frozenset[str],
    device: Device,
) -> HostSlab | None:
    """Host memory for the weights and gradients of the parameters in `units`; None if there are none.

    Raises HostMemoryError if the host has not so much.
    """
    sizes: dict[str, int] = {}
    dtypes = {unit_of(name): parameter.dtype for name, parameter in parameters.items()}
    for name in parameters:
        if (unit := unit_of(name)) in units:
            sizes[unit] = sizes.get(unit, 0) + math.prod(shards[name].local_shape)
    if not sizes:
        return None
    needed = sum(
        piece_bytes(n, dtypes[unit]) + piece_bytes(n, master_dtype(dtypes[unit])) for unit, n in sizes.items()
    )
    return HostSlab(needed, device=device, what="parameter_offload")
