"""Gives the optimizer state of a rank its places: card, host memory and disk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.units import DISK_STATES
from yuan_train.parallel.device import CPU, Device
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.optimizer_shards import Away, away_bytes, page_state_bytes
from yuan_train.parallel.tiers.disk import DiskFile, DiskStore
from yuan_train.parallel.tiers.host_state import HostPlace, chunk_elements, make_host_place
from yuan_train.parallel.tiers.slab import HostSlab
from yuan_train.parallel.zero import OwnedState


@dataclass(frozen=True)
class TierOptions:
    """What a run, and not its plan, says about state that is not on the card."""

    disk_directory: str | None = None
    disk_timeout_seconds: float = 600.0
    """How long the disk may take for one request."""


PLAIN = TierOptions()
"""Nothing is on a disk."""


def make_states(
    plan: Plan,
    buckets: Sequence[FlatBucket],
    groups: Groups,
    stages: Sequence[Sequence[StagePlan]],
    reduce_dtype: torch.dtype | None,
    options: TierOptions,
    device: Device,
) -> tuple[OwnedState, ...]:
    """The optimizer state of each bucket, which `stages` of this rank hold; one slab and one file for all but
    pages, which are stepped where they lie, on the host, in a slab that no card copies to or from.

    Raises HostMemoryError and DiskError if these have not enough room.
    """
    shares = plan.optimizer_shares if plan.optimizer_sharding else None
    aways = [
        Away() if bucket.is_paged else _away(holding) for bucket, holding in zip(buckets, stages, strict=True)
    ]
    host: HostPlace | None = None
    if any(away.share for away in aways):
        bills = [away_bytes(bucket, shares, away) for bucket, away in zip(buckets, aways, strict=True)]
        host = make_host_place(
            sum(bill.host for bill in bills),
            device=device,
            disk=_disk(sum(bill.disk for bill in bills), buckets[0], options, device),
        )
    of_pages = sum(page_state_bytes(bucket) for bucket in buckets if bucket.is_paged)
    slab = HostSlab(of_pages, device=CPU, what="parameter_offload") if of_pages else None
    return tuple(
        OwnedState(
            bucket,
            groups,
            shares,
            away=away,
            host=host,
            slab=slab if bucket.is_paged else None,
            reduce_dtype=reduce_dtype,
        )
        for bucket, away in zip(buckets, aways, strict=True)
    )


def _away(holding: Sequence[StagePlan]) -> Away:
    """Of a bucket that several stages hold, the most that one of them puts away."""
    most = max(holding, key=lambda stage: (stage.optimizer_offload, stage.optimizer_disk))
    return Away(most.optimizer_offload, most.optimizer_disk)


def _disk(num_bytes: int, bucket: FlatBucket, options: TierOptions, device: Device) -> DiskStore | None:
    if not num_bytes:
        return None
    assert options.disk_directory is not None, "the plan was not checked with its run"
    dtype = bucket.gradient.dtype
    return DiskStore(
        DiskFile(options.disk_directory, num_bytes),
        dtype=dtype,
        chunk=chunk_elements(num_bytes // (DISK_STATES * dtype.itemsize)),
        device=device,
        timeout_seconds=options.disk_timeout_seconds,
    )
