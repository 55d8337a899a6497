"""Measures the links between cards, for a profile."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from yuan_train.config.plan import share_only_gloo
from yuan_train.config.profile import LinkProfile
from yuan_train.parallel.device import Device
from yuan_train.parallel.groups import make_pair
from yuan_train.parallel.transport import Transport
from yuan_train.train.link_classes import LinkEnd, LinkFigures, MeasuredLinks, Pair, measure_classes
from yuan_train.train.measure import now
from yuan_train.train.measure_overlap import compute_seconds_per_byte

LINK_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of a message."""
LINK_REPEATS = 15


def measure_links(
    ends: Sequence[LinkEnd],
    *,
    device: Device,
    sizes: Sequence[int] = LINK_SIZES,
    slowdown: float = 1.0,
    timeout_seconds: float = 600.0,
    all_pairs: bool = False,
) -> tuple[LinkProfile, ...]:
    """Seconds of every directed link between the ranks, by size of message; collective over all ranks.

    `ends` are the ranks' cards. Of pairs that are alike some are measured, unless `all_pairs`. Messages go as
    they go in training, over host memory between cards without a common backend. `slowdown` is this rank's,
    if simulated. Raises LostPeer if a rank does not answer in `timeout_seconds`.
    """

    def measure(pair: Pair) -> LinkFigures:
        via_host = share_only_gloo(ends[rank].backend for rank in pair)
        transport = make_pair(pair, device=device, via_host=via_host, timeout_seconds=timeout_seconds)
        there, back = (_measure(transport, way, sizes, device) for way in (pair, (pair[1], pair[0])))
        compute = compute_seconds_per_byte(transport, pair, device=device, slowdown=slowdown)
        if dist.get_rank() in pair:
            transport.free()
        return LinkFigures(there=there, back=back, compute_seconds_per_byte=compute)

    every = itertools.combinations(range(len(ends)), 2)
    found = measure_classes(ends, every, measure, all_pairs=all_pairs)
    return tuple(_profiles([end.name for end in ends], found, sizes))


def _profiles(names: Sequence[str], found: MeasuredLinks, sizes: Sequence[int]) -> Iterator[LinkProfile]:
    """Both directions of every pair, by rank."""
    for source, target in itertools.permutations(range(len(names)), 2):
        pair = min(source, target), max(source, target)
        figures = found.figures[pair]
        seconds = figures.there if pair == (source, target) else figures.back
        like = found.stand_ins.get(pair, ())
        yield LinkProfile(
            from_=names[source],
            to=names[target],
            message_bytes=tuple(map(float, sizes)),
            seconds=tuple(itertools.accumulate(seconds[::-1], min))[::-1],
            compute_seconds_per_byte=figures.compute_seconds_per_byte,
            like=tuple(f"{names[first]} - {names[second]}" for first, second in like) or None,
        )


def _measure(
    transport: Transport, way: tuple[int, int], sizes: Sequence[int], device: Device
) -> tuple[float, ...]:
    """Seconds by size of a message from one rank to another, known to all ranks, of which the others wait.

    Half a round trip of one byte is subtracted, with which the receiver answers each message.
    """
    dist.barrier()
    times = torch.zeros(len(sizes), dtype=torch.float64)
    if dist.get_rank() in way:
        one_byte = _round_trip(transport, 1, *way, device)
        times = torch.tensor([_round_trip(transport, size, *way, device) for size in sizes])
        times = (times - one_byte / 2).clamp(min=one_byte / 2).to(torch.float64)
    # Of host memory, over gloo, which all ranks share.
    dist.broadcast(times, way[0])
    return tuple(times.tolist())


def _round_trip(transport: Transport, size: int, source: int, target: int, device: Device) -> float:
    """Median seconds of a message of `size` bytes to the target, and the byte it answers."""
    message = torch.randint(255, (size,), dtype=torch.uint8, device=device.torch)
    answer = torch.zeros(1, dtype=torch.uint8, device=device.torch)
    times: list[float] = []
    for _ in range(2 + LINK_REPEATS):
        start = now(device)
        if dist.get_rank() == source:
            sent = transport.send(message, target)
            transport.post((1,), torch.uint8, target).take()
        else:
            transport.post((size,), torch.uint8, source).take()
            sent = transport.send(answer, source)
        sent.wait()
        times.append(now(device) - start)
    return statistics.median(times[2:])
