"""Optimizer state, owned in ranges: each owner of a bucket steps all of it, or a range of its own (ZeRO-1).

Sharded (Rajbhandari et al. 2020, stage 1), a rank holds masters and AdamW's two moments for its range of
each of its slices. Gradients are reduced to the rank that holds the range, and the stepped weights are sent
from it while the next forward begins. Equal ranges take one reduce-scatter and one all-gather on NCCL;
unequal ones an operation per owner, because gloo has no uneven all-gather (`transport.py`). Not sharded,
gradients are all-reduced, and every owner steps everything. A part of what a rank holds may be offloaded to
the host, and is stepped there, chunk by chunk: a bucket's gradients begin to go down as soon as they are
reduced. `optimizer_state.py` says which elements lie where.

Checkpoints store and fill what a rank holds as boxes of the global tensors, in place: nothing is gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch

from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.run import BUCKET_SIZE
from yuan_train.config.units import DISK_STATES
from yuan_train.parallel.device import CPU, Device, HostSlab, make_links
from yuan_train.parallel.gradients import FlatBucket, Piece, Slice, squared_norm, sum_of_squares
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.optimizer_state import (
    HERE,
    Away,
    DiskFile,
    DiskStore,
    HostChunk,
    HostPlace,
    OptimizerShard,
    Owned,
    away_bytes,
    chunk_elements,
    make_shards,
    owned_by,
    owner_ranges,
    page_state_bytes,
)
from yuan_train.parallel.shard import TensorBox, box_views
from yuan_train.parallel.transport import Pending


@dataclass(frozen=True)
class EngineOptions:
    """What a run, and not its plan, says about how ranks compute together."""

    dtype: torch.dtype
    """Of the messages between stages."""
    timeout_seconds: float = 600.0
    """How long a rank waits for another, and for a request of the disk."""
    startup_timeout_seconds: float | None = None
    """How long in the first use of a link or a group; None: the same."""
    bucket_size: int = BUCKET_SIZE
    """Parameters whose gradients are reduced together, at most."""
    reduce_dtype: torch.dtype | None = None
    """Of gradients while they are reduced; None: as they are accumulated."""
    disk_directory: str | None = None
    trained: bool = True
    """False: the parts only run forward, and have neither gradients nor optimizer state."""


def make_states(
    plan: Plan,
    buckets: Sequence[FlatBucket],
    groups: Groups,
    stages: Sequence[Sequence[StagePlan]],
    options: EngineOptions,
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
        of_host, of_disk = map(sum, zip(*bills, strict=True))
        disk = _disk(of_disk, buckets[0], options, device)
        memory = HostSlab(of_host, device=device, what="optimizer_offload")
        host = HostPlace(memory, make_links(device), disk)
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
            reduce_dtype=options.reduce_dtype,
        )
        for bucket, away in zip(buckets, aways, strict=True)
    )


def _away(holding: Sequence[StagePlan]) -> Away:
    """Of a bucket that several stages hold, the most that one of them puts away."""
    most = max(holding, key=lambda stage: (stage.optimizer_offload, stage.optimizer_disk))
    return Away(most.optimizer_offload, most.optimizer_disk)


def _disk(num_bytes: int, bucket: FlatBucket, options: EngineOptions, device: Device) -> DiskStore | None:
    if not num_bytes:
        return None
    assert options.disk_directory is not None, "the plan was not checked with its run"
    dtype = bucket.gradient.dtype
    return DiskStore(
        DiskFile(options.disk_directory, num_bytes),
        dtype=dtype,
        chunk=chunk_elements(num_bytes // (DISK_STATES * dtype.itemsize)),
        device=device,
        timeout_seconds=options.timeout_seconds,
    )


State = Literal["master", "exp_avg", "exp_avg_sq"]
STATES: tuple[State, ...] = ("master", "exp_avg", "exp_avg_sq")
"""What is kept per element."""


class OwnedState:
    """The optimizer state that this rank owns of a bucket, and the collectives that keep owners equal.

    `shares`, by rank, are the parts in which the owners of a slice share its state; None: each owner holds
    all of it. Of its own part a rank keeps `away` on the host and its disk. Gradients travel in
    `reduce_dtype` (None: as they are accumulated).
    """

    def __init__(
        self,
        bucket: FlatBucket,
        groups: Groups,
        shares: Sequence[float] | None,
        *,
        away: Away = HERE,
        host: HostPlace | None = None,
        slab: HostSlab | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        """`host`: where what it offloads goes. `slab`: of a page."""
        self._bucket, self._groups = bucket, groups
        self._reduce_dtype = reduce_dtype or bucket.gradient.dtype
        self._packed: list[torch.Tensor] = []
        self._pending: list[Pending] = []
        self._norm: torch.Tensor | None = None
        """Of the reduced gradient, once it was taken."""
        self._synced: list[torch.Tensor] = []
        """By slice, the buffers in which weights are on their way to this rank."""
        self._syncing: list[Pending] = []
        self.pause: Callable[[], AbstractContextManager[object]] = nullcontext
        """Around a wait for stepped weights, which a forward makes: it is no compute."""
        self._ranges = None if shares is None else [owner_ranges(part, shares) for part in bucket.slices]
        """By slice: the range of each owner."""
        self._own = owned_by(bucket, shares)
        self._held = [self._make_shards(i, own, away, host, slab) for i, own in enumerate(self._own)]
        """By slice; one entry for the whole bucket where the state is not sharded."""
        self.shards = [shard for held in self._held for shard in held]

    @property
    def host_chunks(self) -> Iterator[HostChunk]:
        """The chunks of all shards on the host, in the layouts' order."""
        return (chunk for shard in self.shards for chunk in shard.chunks)

    def _make_shards(
        self, number: int, own: Owned, away: Away, host: HostPlace | None, slab: HostSlab | None
    ) -> list[OptimizerShard]:
        bucket = self._bucket
        # Of several slices each is packed: its range does not lie in the bucket itself.
        packed = isinstance(own.part, Slice) and len(bucket.slices) > 1
        weights = bucket.pack(bucket.weights, own.part) if isinstance(own.part, Slice) else bucket.weights
        return make_shards(
            weights[own.start : own.end],
            None if packed else bucket.gradient[own.start : own.end],
            own,
            layout=number,
            away=away,
            host=host,
            slab=slab,
        )

    # --- gradients and weights ---------------------------------------------------------------------------

    def start_grad_reduce(self) -> None:
        """Start to reduce the gradient over owners, slice by slice; does not wait."""
        for i, part in enumerate(self._bucket.slices):
            packed = self._bucket.pack(self._bucket.gradient, part)
            if len(part.group) > 1:
                packed = packed.to(self._reduce_dtype)
                group = self._groups.owners[part.group]
                if self._ranges is None:
                    self._pending.append(group.all_reduce(packed, GRAD_REDUCE))
                else:
                    self._pending.append(group.reduce_ranges(packed, self._ranges[i], GRAD_REDUCE))
            self._packed.append(packed)

    def take_if_reduced(self) -> None:
        """If the reduction is known to have ended, begin to bring down what the host steps.

        Where it steps nothing, there is no hurry: the norm is taken when compute would wait.
        """
        if not self._packed or self._norm is not None or not any(True for _ in self.host_chunks):
            return
        if all(pending.is_done() for pending in self._pending):
            self._take()

    def finish_grad_reduce(self) -> torch.Tensor:
        """Wait until this rank's shards have the reduced gradient, or it is on its way to the host; return
        their share of its squared global norm, fp64."""
        norm = self._take() if self._norm is None else self._norm
        self._norm = None
        self._packed.clear()
        return norm

    def _take(self) -> torch.Tensor:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        self._norm = self._take_all() if self._ranges is None else self._take_ranges()
        return self._norm

    def _take_all(self) -> torch.Tensor:
        for part, packed in zip(self._bucket.slices, self._packed, strict=True):
            self._bucket.unpack(packed, part, self._bucket.gradient)
        for chunk in self.host_chunks:
            chunk.start_gradient(self._bucket.gradient)
        return squared_norm(self._bucket)

    def _take_ranges(self) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self._bucket.gradient.device)
        for part, held, packed, own in zip(
            self._bucket.slices, self._held, self._packed, self._own, strict=True
        ):
            for shard in held:
                for chunk in shard.chunks:
                    chunk.start_gradient(packed)
                if not shard.on_host:
                    _copy(packed[shard.start : shard.end], shard.gradient)
            last = max(min(own.end, part.num_counted_elements), own.start)
            total += sum_of_squares(packed[own.start : last])
        return total

    def start_host_weights(self, chunk: HostChunk) -> None:
        """Begin to bring the weights of a stepped chunk up, to where `start_weight_sync` wants them."""
        chunk.start_weights(self._sync_buffers()[chunk.layout])

    def start_weight_sync(self) -> None:
        """Set the model's weights from the masters; sharded, start to send them from their owners to all.

        Until `finish_weight_sync` the weights must not be used.
        """
        for held, buffer in zip(self._held, self._sync_buffers(), strict=True):
            for shard in held:
                for chunk in shard.chunks:
                    chunk.start_weights(buffer)
                if not shard.on_host:
                    _copy(shard.master, buffer[shard.start : shard.end])
        if self._ranges is None:
            return
        for i, (part, buffer) in enumerate(zip(self._bucket.slices, self._synced, strict=True)):
            for chunk in (chunk for shard in self._held[i] for chunk in shard.chunks):
                chunk.finish_weights()
            if len(part.group) > 1:
                group = self._groups.owners[part.group]
                self._syncing.append(group.gather_ranges(buffer, self._ranges[i], WEIGHT_SYNC))

    def _sync_buffers(self) -> list[torch.Tensor]:
        """By `_held`, the weights that are set: the model's own, or sharded those of a slice."""
        if self._ranges is None:
            return [self._bucket.weights]
        if not self._synced:
            self._synced = [self._bucket.pack(self._bucket.weights, part) for part in self._bucket.slices]
        return self._synced

    def finish_weight_sync(self) -> None:
        """Wait until the model's weights are those of the last step; nothing to do if they are."""
        going = [chunk for chunk in self.host_chunks if chunk.is_going]
        if going or self._syncing:
            with self.pause():
                for chunk in going:
                    chunk.finish_weights()
                for pending in self._syncing:
                    pending.wait()
        for part, buffer in zip(self._bucket.slices, self._synced, strict=False):
            self._bucket.unpack(buffer, part, self._bucket.weights)
        self._syncing.clear()
        self._synced.clear()

    # --- checkpoints -------------------------------------------------------------------------------------

    def boxes(self, state: State, *, written: bool) -> Iterator[tuple[str, TensorBox]]:
        """What this rank holds of a state, or if `written` what it writes of that into a checkpoint: names,
        and boxes of the global tensors, as views.

        Over all owners each element of the model is written once. Sharded, a rank writes its own ranges. Else
        the owners, whose states are equal, share the writing equally; owners of different widths hold
        overlapping parts, of which the first one writes all.
        """
        for own, held in zip(self._own, self._held, strict=True):
            layout = _layout_of(self._bucket, own)
            for shard in held:
                yield from layout.boxes(getattr(shard, state), shard.start, written=written)


def weight_boxes(bucket: FlatBucket, *, written: bool) -> Iterator[tuple[str, TensorBox]]:
    """As `OwnedState.boxes`, of the weights of a bucket that is not trained, which are all its state."""
    (own,) = owned_by(bucket, None)
    return _layout_of(bucket, own).boxes(bucket.weights, 0, written=written)


@dataclass(frozen=True)
class _Layout:
    """Parameters in a flat layout: all that a rank holds of a bucket, or of a slice of it."""

    pieces: tuple[Piece, ...]
    place: tuple[int, int] | tuple[None, None]
    """(index, count) of the part that is held of each global tensor; None: the shard's own."""
    written: tuple[int, int]
    """The elements that this rank writes."""
    writes_replicated: bool
    """Whether these owners write what is whole in every slice."""

    def boxes(self, flat: torch.Tensor, begin: int, *, written: bool) -> Iterator[tuple[str, TensorBox]]:
        """The boxes of a buffer that holds the elements from `begin` on, or of what is `written` of it."""
        start, end = begin, begin + flat.numel()
        if written:
            start, end = max(start, self.written[0]), min(end, self.written[1])
        for piece in self.pieces:
            first, last = max(start, piece.start), min(end, piece.start + piece.length)
            skipped = written and piece.shard.dim is None and not self.writes_replicated
            if first >= last or skipped:
                continue
            index, count = self.place
            own = flat[first - begin : last - begin]
            for box in box_views(piece.shard, own, first - piece.start, index=index, count=count):
                yield piece.name, box


def _layout_of(bucket: FlatBucket, own: Owned) -> _Layout:
    part, start, end = own.part, own.start, own.end
    if isinstance(part, Slice):
        place = part.index, bucket.num_slices
        return _Layout(part.pieces, place, (start, end), writes_replicated=part.index == 0)
    if bucket.owners_are_alike:
        group = bucket.slices[0].group
        place = group.index(bucket.rank)
        start, end = end * place // len(group), end * (place + 1) // len(group)
    elif not bucket.is_first_owner:
        end = 0
    first_slice = bucket.slices[0].index
    return _Layout(bucket.pieces, (None, None), (start, end), writes_replicated=first_slice == 0)


GRAD_REDUCE = "the gradient reduction over owners"
WEIGHT_SYNC = "the sending of stepped weights to all owners"


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy into another precision; nothing to do if both are the same tensor."""
    if source.data_ptr() != target.data_ptr():
        target.copy_(source)
