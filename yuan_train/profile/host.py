"""Measures what a card gets of its host, for a profile: the link both ways at once, and AdamW's step there.

All ranks measure together, so that the cards of a node share its memory and links as they do in a step. The
copies go through the engine's own links, between the card and memory as offloaded state has it.
"""

from __future__ import annotations

import itertools
import statistics
import time

import torch
import torch.distributed as dist

from yuan_train.config.profile import HostProfile
from yuan_train.parallel.device import Device
from yuan_train.parallel.tiers.link import Transfer, begin_copy, make_link
from yuan_train.parallel.tiers.slab import HostSlab

COPIED_BYTES, COPIES = 8 << 20, 4
"""Of each copy, and the copies each way that are in flight."""
SLOW_SECONDS = 0.1
"""About the longest that the copies of a simulated card's slow link take."""
STEP_ELEMENTS = 1 << 21
STEP_TRAFFIC = 28
"""Bytes of a step in fp32, an element: weight, gradient, moments are read, all but the gradient written."""
REPEATS = 3


def host_room(device: Device) -> HostSlab:
    """Memory of the host for `measure_host`. Raises HostMemoryError if there is none that can be pinned."""
    return HostSlab(2 * COPIED_BYTES, device=device, what="profile")


def measure_host(
    room: HostSlab,
    *,
    device: Device,
    device_type: str,
    bytes_per_second: float | None = None,
) -> HostProfile:
    """The rates of this rank's card; collective over all ranks.

    `bytes_per_second` is that of a simulated card's link. Without a card, copies are the processor's.
    """
    copied = COPIED_BYTES
    if bytes_per_second is not None:
        copied = max(4096, min(copied, int(bytes_per_second * SLOW_SECONDS / COPIES)))
    low, high = (room.take(copied, torch.uint8) for _ in range(2))
    down, up = _seconds_both_ways(low, high, device, bytes_per_second)
    return HostProfile(
        device_type=device_type,
        host_link_down=COPIES * copied / down,
        host_link_up=COPIES * copied / up,
        host_step_bytes_per_second=_step_rate(),
    )


def _seconds_both_ways(
    low: torch.Tensor, high: torch.Tensor, device: Device, rate: float | None
) -> tuple[float, float]:
    """(down, up): until COPIES of [n] bytes have gone that way, as many of the other way having begun too."""
    source, target = (torch.ones_like(low, device=device.torch) for _ in range(2))
    links = [make_link(device, bytes_per_second=rate) for _ in range(2)]
    ways = ((source, low), (high, target))
    seconds: list[list[float]] = [[], []]
    for _ in range(1 + REPEATS):
        _together()
        began = time.perf_counter()
        transfers: list[list[Transfer]] = [[], []]
        for _, way in itertools.product(range(COPIES), range(2)):
            transfers[way].append(begin_copy(links[way], *ways[way]))
        for own, found in zip(transfers, seconds, strict=True):
            own[-1].finish()
            found.append(time.perf_counter() - began)
    # The first time touches the pages.
    down, up = (statistics.median(found[1:]) for found in seconds)
    return down, up


def _step_rate() -> float:
    """Bytes a second that AdamW moves in the host's memory."""
    master = torch.zeros(STEP_ELEMENTS)
    master.grad = torch.ones(STEP_ELEMENTS)
    adamw = torch.optim.AdamW([master], lr=1e-3, fused=True)
    seconds: list[float] = []
    for _ in range(1 + REPEATS):
        _together()
        began = time.perf_counter()
        adamw.step()
        seconds.append(time.perf_counter() - began)
    return STEP_TRAFFIC * STEP_ELEMENTS / statistics.median(seconds[1:])


def _together() -> None:
    if dist.is_initialized():
        dist.barrier()
