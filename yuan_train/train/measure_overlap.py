"""Measures what a reduction over a link takes of the compute that goes on beside it, for a profile.

On a processor its copies and sums run on the cores that compute; on a card nccl's kernels take
multiprocessors and memory bandwidth.
"""

from __future__ import annotations

import math
import statistics
import time

import torch
import torch.distributed as dist

from yuan_train.parallel.device import Device
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.transport import Transport

NUM_ELEMENTS = {False: 1 << 20, True: 1 << 24}
"""Of the fp32 sum, on a CPU and on a card: enough that it takes much longer than its start."""
WIDTH = 384
"""Of the products that are computed beside it."""
SUMS_HIDDEN = 2
"""How many times as long as a sum the products take, so that they hide all of it."""
REPEATS = 5


def compute_seconds_per_byte(
    transport: Transport, pair: tuple[int, int], *, device: Device, slowdown: float
) -> float:
    """Seconds of compute that a sum takes from a card that hides it, by byte that the card sends.

    The mean of a pair of ranks, whose `transport` it is; collective over all ranks, of which the others wait.
    `slowdown` is that of a simulated card. The same products are computed alone and beside a sum.
    """
    dist.barrier()
    found = torch.zeros(1, dtype=torch.float64)
    if dist.get_rank() in pair:
        found += _measure(transport, device, slowdown)
    dist.broadcast(found, pair[0])
    return found.item()


def _measure(transport: Transport, device: Device, slowdown: float) -> float:
    gradient = torch.zeros(NUM_ELEMENTS[device.is_card], dtype=torch.float32, device=device.torch)
    products = _Products(device, slowdown)
    products.seconds(1)
    number = math.ceil(SUMS_HIDDEN * _sum_seconds(transport, gradient, device) / products.seconds(1))
    lost: list[float] = []
    for _ in range(REPEATS):
        alone = products.seconds(number)
        _mean(transport, 0.0, device)  # both begin
        pending = transport.all_reduce(gradient, "a sum beside products")
        lost.append(products.seconds(number) - alone)
        pending.wait()
    # Each of two ranks sends as much as it sums.
    num_bytes = gradient.numel() * gradient.element_size()
    return max(0.0, _mean(transport, statistics.median(lost), device)) / num_bytes


class _Products:
    """Products of matrices, as long as one wants."""

    def __init__(self, device: Device, slowdown: float) -> None:
        self._stopwatch = Stopwatch(device, slowdown=slowdown)
        self._factor = torch.full((WIDTH, WIDTH), 1 / WIDTH, device=device.torch)
        self._product = torch.empty_like(self._factor)

    def seconds(self, number: int) -> float:
        """Seconds of so many products."""
        for _ in range(number):
            with self._stopwatch.running():
                torch.mm(self._factor, self._factor, out=self._product)
        return self._stopwatch.read()


def _sum_seconds(transport: Transport, gradient: torch.Tensor, device: Device) -> float:
    """Seconds of a sum with nothing beside it; the mean of both ranks."""
    times: list[float] = []
    for _ in range(REPEATS):
        _mean(transport, 0.0, device)
        start = time.perf_counter()
        transport.all_reduce(gradient, "a sum").wait()
        _mean(transport, 0.0, device)
        times.append(time.perf_counter() - start)
    return _mean(transport, statistics.median(times), device)


def _mean(transport: Transport, value: float, device: Device) -> float:
    """The mean of a value of both ranks, which wait for each other, as the host does for them."""
    total = torch.tensor([value], dtype=torch.float64, device=device.torch)
    transport.all_reduce(total, "a mean of measurements").wait()
    return total.item() / 2
