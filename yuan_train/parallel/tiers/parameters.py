"""Weights and gradients in host memory, a page for each layer: on the card only around their use.

A page is a bucket whose flat buffers lie on the host. Its parameters are views of them or, while the page is
on the card, of a slot: memory for the weights and the gradient of the largest page, taken once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from yuan_train.parallel.device import Device, HostLinks, HostSlab, Transfer, begin_copy, piece_bytes
from yuan_train.parallel.gradients import FlatBucket, master_dtype
from yuan_train.parallel.grid import Grid, RankCoord, unit_of
from yuan_train.parallel.shard import Shard
from yuan_train.schedule.check import check_pages
from yuan_train.schedule.copies import PagedGroups, Paging, by_group, paging_of, with_pages
from yuan_train.schedule.step import RankProgram, Step


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
        self,
        buckets: Sequence[FlatBucket],
        num_slots: int,
        links: HostLinks,
        *,
        device: Device,
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
