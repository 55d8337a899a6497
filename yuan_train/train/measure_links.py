"""Measures the links between cards, for a profile."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence

import torch
import torch.distributed as dist

from yuan_train.config.devices import Backend
from yuan_train.config.plan import share_only_gloo
from yuan_train.config.profile import LinkProfile
from yuan_train.parallel.groups import make_pair
from yuan_train.parallel.transport import Transport
from yuan_train.train.measure import now
from yuan_train.train.measure_overlap import compute_seconds_per_byte

LINK_SIZES = (1 << 10, 1 << 16, 1 << 20, 1 << 23)
"""Bytes of a message."""
LINK_REPEATS = 15


def measure_links(
    names: Sequence[str],
    *,
    device: torch.device,
    backends: Sequence[Backend],
    sizes: Sequence[int] = LINK_SIZES,
    slowdown: float = 1.0,
    timeout_seconds: float = 600.0,
) -> tuple[LinkProfile, ...]:
    """Seconds of every directed link between the ranks, by size of message; collective over all ranks.

    `backends` are those of the ranks' cards: messages go as they go in training, over host memory between
    cards without a common one. `slowdown` is this rank's, if simulated. One pair of ranks at a time, in a
    group that is freed after it, while the others wait. Half a round trip of one byte is subtracted, with
    which the receiver answers each message. Raises LostPeer if a rank does not within `timeout_seconds`.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    measured: dict[tuple[int, int], torch.Tensor] = {}
    computes: dict[tuple[int, int], float] = {}
    for pair in itertools.combinations(range(world_size), 2):
        via_host = share_only_gloo(backends[end] for end in pair)
        transport = make_pair(pair, device=device, via_host=via_host, timeout_seconds=timeout_seconds)
        for source, target in (pair, pair[::-1]):
            dist.barrier()
            times = torch.zeros(len(sizes), dtype=torch.float64)
            if rank in pair:
                one_byte = _round_trip(transport, 1, source, target, device)
                times = torch.tensor([_round_trip(transport, size, source, target, device) for size in sizes])
                times = (times - one_byte / 2).clamp(min=one_byte / 2).to(torch.float64)
            # Of host memory, over gloo, which all ranks share.
            dist.broadcast(times, source)
            measured[source, target] = times
        compute = compute_seconds_per_byte(transport, pair, device=device, slowdown=slowdown)
        computes[pair] = computes[pair[1], pair[0]] = compute
        if rank in pair:
            transport.free()
    return tuple(
        LinkProfile(
            from_=names[source],
            to=names[target],
            message_bytes=tuple(map(float, sizes)),
            seconds=tuple(measured[source, target].flip(0).cummin(0).values.flip(0).tolist()),
            compute_seconds_per_byte=computes[source, target],
        )
        for source, target in sorted(measured)
    )


def _round_trip(transport: Transport, size: int, source: int, target: int, device: torch.device) -> float:
    """Median seconds of a message of `size` bytes to the target, and the byte it answers."""
    message = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    answer = torch.zeros(1, dtype=torch.uint8, device=device)
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
