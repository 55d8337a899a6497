"""What leaves the card between two of its uses, as the rank program says: activations, and pages of weights.

Activations leave between a forward and its backward. The copies of a program stand between the parts of its
steps. The model says when a part begins (`Parts`), and autograd when the backward of one has ended: then the
gradient of what the part was given is complete. Graphs are not cut, so gradients are added in the order in
which they would be.

Weights are recognised by their storage and never leave; neither does what several parts share, nor what is
small. A storage that several ops save leaves once.

Weights and gradients are on the card only around their use (`ParameterPages`). A page is the bucket of a
layer, whose flat buffers lie in host memory. Its parameters are views of them or, while the page is on the
card, of a slot: memory for the weights and the gradient of the largest page, taken once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from yuan_train.parallel.device import (
    ALIGNMENT,
    Device,
    HostLinks,
    HostSlab,
    Transfer,
    begin_copies,
    begin_copy,
    piece_bytes,
)
from yuan_train.parallel.gradients import FlatBucket, master_dtype
from yuan_train.parallel.grid import Grid, RankCoord, unit_of
from yuan_train.parallel.shard import Shard
from yuan_train.schedule.check import check_pages
from yuan_train.schedule.copies import (
    Key,
    Offloads,
    PagedGroups,
    Paging,
    PartSteps,
    by_group,
    group_copies,
    paging_of,
    with_pages,
)
from yuan_train.schedule.step import Kind, RankProgram, Step

PAGE = 4096
SMALLEST_BLOCK = 1 << 20
"""Bytes by which the pool grows, at least."""


@dataclass(frozen=True)
class HostRange:
    """Bytes [start, start + flat.numel()) of a block of the pool."""

    block: int
    start: int
    flat: torch.Tensor


class HostPool:
    """Grows by a slab when nothing fits, and never shrinks: after a step it has all that it needs, and no
    more than what was ever taken at once, as long as sizes come back."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self._blocks: list[torch.Tensor] = []
        self._free: list[tuple[int, int, int]] = []
        """(block, start, length), sorted; neighbours are merged."""
        self.num_bytes = 0

    def take(self, num_bytes: int) -> HostRange:
        """A range of that many bytes. Raises HostMemoryError if the host has no more."""
        size = -(-num_bytes // PAGE) * PAGE
        # The tightest: what is larger is for what is larger.
        fitting = [(length, i) for i, (_, _, length) in enumerate(self._free) if length >= size]
        _, at = min(fitting, default=(0, None))
        if at is None:
            self._grow(size)
            return self.take(num_bytes)
        block, start, length = self._free.pop(at)
        if length > size:
            self._free.insert(at, (block, start + size, length - size))
        return HostRange(block, start, self._blocks[block][start : start + num_bytes])

    def give(self, taken: HostRange) -> None:
        """Give a range back."""
        size = -(-taken.flat.numel() // PAGE) * PAGE
        self._free.append((taken.block, taken.start, size))
        self._free.sort()
        merged: list[tuple[int, int, int]] = []
        for block, start, length in self._free:
            if merged and merged[-1][0] == block and sum(merged[-1][1:]) == start:
                block, start, length = block, merged[-1][1], merged.pop()[2] + length
            merged.append((block, start, length))
        self._free = merged

    def _grow(self, num_bytes: int) -> None:
        more = max(num_bytes, SMALLEST_BLOCK)
        slab = HostSlab(more, device=self.device, what="activation_offload")
        self._blocks.append(slab.take(more, torch.uint8))
        self._free.append((len(self._blocks) - 1, 0, more))
        self.num_bytes += more


SMALLEST = 4096
"""Bytes of a storage that is worth a copy."""


class _Kept:
    """One storage that a backward needs: on the card, in host memory, or in both while it moves."""

    __slots__ = ("flat", "host", "num_bytes")

    def __init__(self, storage: torch.UntypedStorage) -> None:
        empty = torch.empty(0, dtype=torch.uint8, device=storage.device)
        self.flat: Tensor | None = empty.set_(storage)
        self.host: Tensor | None = None
        self.num_bytes = storage.nbytes()


class _View:
    """One saved use of a storage."""

    __slots__ = ("_dtype", "_kept", "_offset", "_size", "_stride")

    def __init__(self, kept: _Kept, tensor: Tensor) -> None:
        self._kept = kept
        self._dtype = tensor.dtype
        self._size, self._stride, self._offset = tensor.size(), tensor.stride(), tensor.storage_offset()

    def tensor(self) -> Tensor:
        flat = self._kept.flat
        assert flat is not None, "the rank program fetches nothing before this backward"
        empty = torch.empty(0, dtype=self._dtype, device=flat.device)
        return empty.set_(flat.untyped_storage(), self._offset, self._size, self._stride)


class _Part:
    """What the forward of one part of a micro-batch kept."""

    __slots__ = ("coming", "going", "host", "kept")

    def __init__(self) -> None:
        self.host: HostRange | None = None
        """Of all that is kept: parts of a kind are of one size, so that a range serves the next of them."""
        self.kept: dict[int, _Kept] = {}
        """By address of the storage, which is not used again before the part is evicted."""
        self.going: Transfer | None = None
        self.coming: Transfer | None = None

    @property
    def num_bytes(self) -> int:
        return sum(kept.num_bytes for kept in self.kept.values())


class ActivationTiers:
    """Copies the activations of one worker's stages to the host and back, step by step of its program.

    `program` is in parts, with copies; `weights` are tensors that stay.
    """

    def __init__(
        self,
        program: RankProgram,
        offloads: Offloads,
        weights: Iterable[Tensor],
        links: HostLinks,
        *,
        device: Device,
    ) -> None:
        self._groups = group_copies(program)
        self._offloads = offloads
        self._stays = {tensor.untyped_storage().data_ptr() for tensor in weights}
        self._links = links
        self._pool = HostPool(device)
        self._split = any(step.kind == "backward_weight" for step in program)
        self._parts: dict[Key, _Part] = {}
        self._backward: _Walk | None = None
        self._parts_here = dict.fromkeys(offloads, 0)
        self._bytes_here = 0
        """Of what leaves: on the card, on its way down, or on its way up; so the parts above."""
        self.most_bytes_here = 0

    @contextmanager
    def forward(self, stage: int, micro_batch: int) -> Iterator[_Walk | None]:
        """Around the forward of a micro-batch: what follows its parts; None if the stage offloads nothing."""
        walk = self._walk("forward", stage, micro_batch)
        if stage in self._offloads:
            yield walk
        else:
            walk.next_part()
            yield None
        walk.leave()

    @contextmanager
    def backward(self, stage: int, micro_batch: int, *, split: bool) -> Iterator[None]:
        """Around a backward; if `split`, around the part of it that computes the gradients of inputs."""
        walk = self._walk("backward_input" if split else "backward", stage, micro_batch)
        self._backward = walk
        self._need(walk, walk.next_part())
        yield
        self._end(walk)
        walk.leave()
        self._backward = None

    @contextmanager
    def backward_weight(self, stage: int, micro_batch: int) -> Iterator[None]:
        """Around the weights' part of a split backward, after which nothing of the micro-batch is needed."""
        walk = self._walk("backward_weight", stage, micro_batch)
        walk.next_part()
        yield
        for key in [key for key in self._parts if key[:2] == (stage, micro_batch)]:
            self._drop(key)
        walk.leave()

    def part_has_ended(self, stage: int, micro_batch: int, part: int) -> None:
        """The backward of a part has ended, inside `backward`; the one of the part before it begins."""
        walk = self._backward
        assert walk is not None and walk.key == (stage, micro_batch, part), "parts run in another order"
        self._end(walk)
        self._need(walk, walk.next_part())

    def keep(self, key: Key, tensor: Tensor, shared: set[int]) -> Any:
        """What autograd keeps of a tensor that a part saves: the tensor, or a view that can leave."""
        storage = tensor.untyped_storage()
        address = storage.data_ptr()
        stays = storage.nbytes() < SMALLEST or address in self._stays or address in shared
        if stays or key[2] >= self._offloads[key[0]].num_leaving:
            return tensor
        if key not in self._parts:
            self._parts[key] = _Part()
            self._count(key[0], 1, 0)
        part = self._parts[key]
        if address not in part.kept:
            part.kept[address] = _Kept(storage)
            self._count(key[0], 0, storage.nbytes())
        return _View(part.kept[address], tensor)

    def copy(self, step: Step) -> None:
        """Take an offload, an evict or a fetch of the program."""
        part = self._parts.get((step.stage, step.micro_batch, step.part))
        if part is None:
            # All that it kept is too small to leave.
            return
        if step.kind == "offload":
            self._offload(part)
        elif step.kind == "evict":
            assert part.going is not None
            self._links.wait(step, part.going)
            part.going = None
            for kept in part.kept.values():
                kept.flat = None
            self._count(step.stage, -1, -part.num_bytes)
        else:
            self._count(step.stage, 1, part.num_bytes)
            self._fetch(part)

    def _walk(self, kind: Kind, stage: int, micro_batch: int) -> _Walk:
        step = Step(kind, stage, micro_batch)
        return _Walk(self, step, self._groups[step])

    def _need(self, walk: _Walk, part: int) -> None:
        """Wait until what the backward of a part needs is there."""
        kept = self._parts.get((walk.step.stage, walk.step.micro_batch, part))
        if kept is not None and kept.coming is not None:
            self._links.wait(walk.step._replace(kind="fetch", part=part), kept.coming)
            kept.coming = None

    def _end(self, walk: _Walk) -> None:
        if walk.key in self._parts and not self._split:
            self._drop(walk.key)

    def _drop(self, key: Key) -> None:
        part = self._parts.pop(key)
        self._count(key[0], -1, -part.num_bytes)
        if part.host is not None:
            self._pool.give(part.host)

    def _offload(self, part: _Part) -> None:
        sizes = [-(-kept.num_bytes // ALIGNMENT) * ALIGNMENT for kept in part.kept.values()]
        part.host = self._pool.take(sum(sizes))
        moved: list[tuple[Tensor, Tensor]] = []
        for kept, piece in zip(part.kept.values(), part.host.flat.split(sizes), strict=True):
            assert kept.flat is not None
            kept.host = piece[: kept.num_bytes]
            moved.append((kept.flat, kept.host))
        part.going = begin_copies(self._links.down, moved)

    def _fetch(self, part: _Part) -> None:
        moved: list[tuple[Tensor, Tensor]] = []
        for kept in part.kept.values():
            assert kept.host is not None
            # Taken here, on the stream of the compute, which frees it again.
            kept.flat = torch.empty(kept.num_bytes, dtype=torch.uint8, device=self._pool.device.torch)
            moved.append((kept.host, kept.flat))
        part.coming = begin_copies(self._links.up, moved)

    def _count(self, stage: int, num_parts: int, num_bytes: int) -> None:
        self._parts_here[stage] += num_parts
        assert 0 <= self._parts_here[stage] <= self._offloads[stage].resident, "more than the plan allows"
        self._bytes_here += num_bytes
        self.most_bytes_here = max(self.most_bytes_here, self._bytes_here)


class _Walk:
    """One step of the program, part by part; a forward is followed by it (`models.layers.Parts`)."""

    def __init__(self, tiers: ActivationTiers, step: Step, group: PartSteps) -> None:
        self.step, self._tiers, self._group = step, tiers, group
        self._position = -1
        self._shared: set[int] = set()

    @property
    def key(self) -> Key:
        """Stage, micro-batch and part that is running."""
        return self.step.stage, self.step.micro_batch, self._group.parts[self._position]

    def next_part(self) -> int:
        """Take the copies before the next part; its number."""
        self._position += 1
        for copy in self._group.before[self._position]:
            self._tiers.copy(copy)
        return self._group.parts[self._position]

    def leave(self) -> None:
        """Take the copies after the last part."""
        assert self._position + 1 == len(self._group.parts), f"{self.step}: not all parts have run"
        for copy in self._group.after:
            self._tiers.copy(copy)

    def share(self, *tensors: Tensor | None) -> None:
        self._shared |= {t.untyped_storage().data_ptr() for t in tensors if t is not None}

    def enter(self, hidden: Tensor) -> None:
        part, step, ended = self.next_part(), self.step, self._tiers.part_has_ended
        if part > 0:
            # A hook of a tensor runs when its gradient is complete: all that follows it has run backward.
            hidden.register_hook(lambda _: ended(step.stage, step.micro_batch, part))

    def pack(self, tensor: Tensor) -> Any:
        return self._tiers.keep(self.key, tensor, self._shared)

    def unpack(self, packed: Any) -> Tensor:
        return packed.tensor() if isinstance(packed, _View) else packed


class _Slot:
    """Memory of the card for one page: weights and gradient, flat [n]."""

    __slots__ = ("gradient", "weights")

    def __init__(self, num_elements: int, bucket: FlatBucket, device: Device) -> None:
        self.weights = torch.empty(num_elements, dtype=bucket.weights.dtype, device=device.torch)
        self.gradient = torch.empty(num_elements, dtype=bucket.gradient.dtype, device=device.torch)


class _Page:
    """One page: where it is, and what is under way."""

    __slots__ = ("bucket", "coming", "going", "is_ready", "is_summed", "slot")

    def __init__(self, bucket: FlatBucket) -> None:
        self.bucket = bucket
        self.slot: _Slot | None = None
        self.coming: list[Transfer] = []
        self.going: Transfer | None = None
        self.is_summed = False
        """Some group's gradient is on the host, or on its way."""
        self.is_ready = False
        """The slot's gradient is what the next backward adds to."""


class ParameterPages:
    """Copies the pages of one stage between its host and the card, step by step of its program.

    `buckets` are the pages, in the order of layers.
    """

    def __init__(
        self, buckets: Sequence[FlatBucket], num_slots: int, links: HostLinks, *, device: Device
    ) -> None:
        self._pages = [_Page(bucket) for bucket in buckets]
        largest = max(bucket.weights.numel() for bucket in buckets)
        self._free = [_Slot(largest, buckets[0], device) for _ in range(min(num_slots, len(buckets)))]
        self._links = links
        self.most_pages_here = 0

    def take(self, step: Step) -> None:
        """Take a copy of the program."""
        page = self._pages[step.part]
        if step.kind == "page_in":
            assert page.slot is None, "the page is on the card"
            page.slot = self._free.pop()
            page.is_ready = False
            self._up(page, page.bucket.weights, page.slot.weights)
            here = sum(other.slot is not None for other in self._pages)
            self.most_pages_here = max(self.most_pages_here, here)
        elif step.kind == "gradient_up":
            assert page.slot is not None and page.is_summed
            self._up(page, page.bucket.gradient, page.slot.gradient)
            page.is_ready = True
        elif step.kind == "gradient_down":
            assert page.slot is not None and page.is_ready
            host = page.bucket.gradient
            page.going = begin_copy(self._links.down, page.slot.gradient[: host.numel()], host)
            page.is_summed = True
        else:
            self._page_out(step, page)

    def need(self, step: Step) -> None:
        """A forward or backward of a part begins: wait for its page, and use its slot."""
        page = self._pages[step.part]
        assert page.slot is not None, "the program fetches nothing before this part"
        for transfer in page.coming:
            self._links.wait(step._replace(kind="page_in"), transfer)
        page.coming.clear()
        if step.kind == "backward" and not page.is_ready:
            page.slot.gradient.zero_()
            page.is_ready = True
        _place(page.bucket, page.slot.weights, page.slot.gradient)

    def finish(self) -> None:
        """A pass has ended: wait until the host may read all gradients; the next pass sums anew."""
        for page in self._pages:
            assert page.slot is None, "the program leaves a page on the card"
            if page.going is not None:
                with self._links.pause():
                    page.going.finish()
            page.going = None
            page.is_summed = False

    def _up(self, page: _Page, host: torch.Tensor, slot: torch.Tensor) -> None:
        page.coming.append(begin_copy(self._links.up, host, slot[: host.numel()]))

    def _page_out(self, step: Step, page: _Page) -> None:
        assert page.slot is not None and not page.coming
        if page.going is not None:
            # Whatever takes the slot, or fetches the sum again, begins after what is enqueued here.
            self._links.wait(step, page.going)
        _place(page.bucket, page.bucket.weights, page.bucket.gradient)
        self._free.append(page.slot)
        page.slot = None


def _place(bucket: FlatBucket, weights: torch.Tensor, gradient: torch.Tensor) -> None:
    """Let the parameters of a bucket be views of these flat buffers."""
    for name, parameter in bucket.parameters.items():
        # Without its gradient: one on another device than the weights is refused.
        parameter.grad = None
        parameter.data = bucket.view(weights, name)
        own = bucket.view(gradient, name)
        parameter.main_gradient = own  # pyright: ignore[reportAttributeAccessIssue]
        if not bucket.is_low_precision:
            parameter.grad = own


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
