"""Measures what a node's network gives to all of its cards at once, for a profile.

A single message may not fill a NIC (cards of several queues, TCP), and the messages of a node's cards share
it. So between two nodes all cards of one send at once, and the time until the last message is there counts.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from yuan_train.config.devices import Backend
from yuan_train.config.plan import share_only_gloo
from yuan_train.config.profile import NodeLinkProfile
from yuan_train.parallel.groups import make_pair
from yuan_train.parallel.transport import GroupTransport
from yuan_train.train.measure import now

SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 23
"""Of each message; the difference in seconds is that of the bytes, without start and barrier."""
REPEATS = 3
LEAST_SECONDS = 1e-9
"""Replaces a difference that the clock does not see."""


def measure_node_links(
    names: Sequence[str], *, device: torch.device, backends: Sequence[Backend], timeout_seconds: float = 600.0
) -> tuple[NodeLinkProfile, ...]:
    """The shared rate of every direction between two nodes of which one has several cards; collective over
    all ranks.

    `names` are those of the ranks' cards (`a100-0/3`), `backends` theirs. Card i of the sending node sends to
    card i of the other, which has fewer: to i modulo their number, and some cards get several messages.
    """
    nodes: dict[str, list[int]] = {}
    for rank, name in enumerate(names):
        nodes.setdefault(name.rpartition("/")[0], []).append(rank)
    found: list[NodeLinkProfile] = []
    for source, target in itertools.combinations(nodes, 2):
        number = max(len(nodes[source]), len(nodes[target]))
        if number == 1:
            continue
        flows: list[_Flow] = []
        for i in range(number):
            pair = nodes[source][i % len(nodes[source])], nodes[target][i % len(nodes[target])]
            via_host = share_only_gloo(backends[end] for end in pair)
            transport = make_pair(pair, device=device, via_host=via_host, timeout_seconds=timeout_seconds)
            flows.append(_Flow(*pair, transport))
        back = [flow._replace(sender=flow.receiver, receiver=flow.sender) for flow in flows]
        for from_, to, one_way in ((source, target, flows), (target, source, back)):
            small, large = (_all_at_once(one_way, size, device) for size in (SMALL_BYTES, LARGE_BYTES))
            rate = number * (LARGE_BYTES - SMALL_BYTES) / max(large - small, LEAST_SECONDS)
            found.append(NodeLinkProfile(from_=from_, to=to, bytes_per_second=rate))
        for flow in flows:
            if dist.get_rank() in (flow.sender, flow.receiver):
                flow.transport.free()
    return tuple(found)


class _Flow(NamedTuple):
    """A message between two ranks."""

    sender: int
    receiver: int
    transport: GroupTransport


def _all_at_once(flows: Sequence[_Flow], size: int, device: torch.device) -> float:
    """Median seconds until messages of `size` bytes, which begin at once, have all arrived; the same on all
    ranks."""
    rank = dist.get_rank()
    message = torch.randint(255, (size,), dtype=torch.uint8, device=device)
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
