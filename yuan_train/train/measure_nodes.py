"""Measures what a node's network gives to all of its cards at once, for a profile.

A single message may not fill a NIC (cards of several queues, TCP), and the messages of a node's cards share
it. So between two nodes all cards of one send at once, and the time until the last message is there counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from yuan_train.config.plan import share_only_gloo
from yuan_train.config.profile import NodeLinkProfile
from yuan_train.parallel.device import Device
from yuan_train.parallel.groups import make_pair
from yuan_train.parallel.transport import GroupTransport
from yuan_train.train.link_classes import LinkEnd, LinkFigures, MeasuredLinks, Pair, measure_classes
from yuan_train.train.measure import now

SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 23
"""Of each message; the difference in seconds is that of the bytes, without start and barrier."""
REPEATS = 3
LEAST_SECONDS = 1e-9
"""Replaces a difference that the clock does not see."""


def measure_node_links(
    ends: Sequence[LinkEnd],
    *,
    device: Device,
    timeout_seconds: float = 600.0,
    all_pairs: bool = False,
) -> tuple[NodeLinkProfile, ...]:
    """The shared rate of every direction between two nodes of which one has several cards; collective over
    all ranks.

    `ends` are the ranks' cards; of pairs of nodes that are alike some are measured, unless `all_pairs`. Card
    i of the sending node sends to card i of the other, which has fewer: to i modulo their number, and some
    cards get several messages.
    """
    nodes: dict[str, list[int]] = {}
    for rank, end in enumerate(ends):
        nodes.setdefault(end.node, []).append(rank)
    held = list(nodes.values())
    # A node as the end of a link: its kind tells its cards.
    of_nodes = [replace(ends[ranks[0]], name=f"{node}/", type="") for node, ranks in nodes.items()]

    def measure(pair: Pair) -> LinkFigures:
        flows = _make_flows(ends, (held[pair[0]], held[pair[1]]), device, timeout_seconds)
        back = [flow._replace(sender=flow.receiver, receiver=flow.sender) for flow in flows]
        seconds: list[float] = []
        for one_way in (flows, back):
            small, large = (_all_at_once(one_way, size, device) for size in (SMALL_BYTES, LARGE_BYTES))
            num_bytes = len(flows) * (LARGE_BYTES - SMALL_BYTES)
            seconds.append(max(large - small, LEAST_SECONDS) / num_bytes)
        for flow in flows:
            if dist.get_rank() in (flow.sender, flow.receiver):
                flow.transport.free()
        return LinkFigures(there=(seconds[0],), back=(seconds[1],))

    shared = [
        pair for pair in itertools.combinations(range(len(held)), 2) if any(len(held[n]) > 1 for n in pair)
    ]
    found = measure_classes(of_nodes, shared, measure, all_pairs=all_pairs)
    return tuple(_profiles(list(nodes), shared, found))


def _profiles(names: Sequence[str], pairs: Sequence[Pair], found: MeasuredLinks) -> Iterator[NodeLinkProfile]:
    """Both directions of every pair of nodes."""
    for pair in pairs:
        figures = found.figures[pair]
        like = tuple(f"{names[i]} - {names[j]}" for i, j in found.stand_ins.get(pair, ())) or None
        for (source, target), (seconds,) in ((pair, figures.there), (pair[::-1], figures.back)):
            yield NodeLinkProfile(
                from_=names[source], to=names[target], bytes_per_second=1 / seconds, like=like
            )


def _make_flows(
    ends: Sequence[LinkEnd], pair: tuple[list[int], list[int]], device: Device, timeout_seconds: float
) -> list[_Flow]:
    """The messages that go at once from the ranks of a node to those of another; collective over all."""
    sources, targets = pair
    flows: list[_Flow] = []
    for i in range(max(len(sources), len(targets))):
        ranks = sources[i % len(sources)], targets[i % len(targets)]
        via_host = share_only_gloo(ends[rank].backend for rank in ranks)
        transport = make_pair(ranks, device=device, via_host=via_host, timeout_seconds=timeout_seconds)
        flows.append(_Flow(*ranks, transport))
    return flows


class _Flow(NamedTuple):
    """A message between two ranks."""

    sender: int
    receiver: int
    transport: GroupTransport


def _all_at_once(flows: Sequence[_Flow], size: int, device: Device) -> float:
    """Median seconds until messages of `size` bytes, which begin at once, have all arrived; the same on all
    ranks."""
    rank = dist.get_rank()
    message = torch.randint(255, (size,), dtype=torch.uint8, device=device.torch)
    times: list[float] = []
    for _ in range(1 + REPEATS):
        dist.barrier()
        start = now(device)
        received = [
            flow.transport.post((size,), torch.uint8, flow.sender) for flow in flows if flow.receiver == rank
        ]
        sent = [flow.transport.send(message, flow.receiver) for flow in flows if flow.sender == rank]
        for pending in received:
            pending.take()
        for pending in sent:
            pending.wait()
        took = torch.tensor([now(device) - start], dtype=torch.float64)
        dist.all_reduce(took, op=dist.ReduceOp.MAX)
        times.append(took.item())
    return statistics.median(times[1:])
