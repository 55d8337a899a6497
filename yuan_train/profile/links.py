"""Measures links for a profile: those between cards, and what a card gets of its host.

All ranks measure together, so that the cards of a node share its memory and links as they do in a step. The
copies between card and host go through the engine's own links, both ways at once, and AdamW steps there. It
stands alone because units measure one card each.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import torch
import torch.distributed as dist

from yuan_train.config.cluster import Cluster
from yuan_train.config.devices import Backend, Simulated
from yuan_train.config.plan import share_only_gloo
from yuan_train.config.profile import HostProfile, LinkProfile, NodeLinkProfile
from yuan_train.parallel.device import Device, HostSlab, Transfer, begin_copy, make_link
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.groups import make_pair
from yuan_train.parallel.transport import Transport
from yuan_train.profile.units import now

Pair = tuple[int, int]
"""Two ranks, the lower first."""

ALIKE = 1.5
"""Most that the seconds of a class's two representatives may differ by, as a ratio."""


@dataclass(frozen=True, kw_only=True)
class LinkEnd:
    """A rank's card, as far as its links go."""

    name: str
    type: str
    backend: Backend
    kind: str
    """Of its node: nodes of the same kind are taken to have the same links and the same network."""

    @property
    def node(self) -> str:
        """The name of its node."""
        return self.name.rpartition("/")[0]

    @property
    def number(self) -> str:
        """Its own in the node."""
        return self.name.rpartition("/")[2]


@dataclass(frozen=True, kw_only=True)
class LinkFigures:
    """What is measured of a pair of ranks."""

    there: tuple[float, ...]
    """Seconds by size of message from the first to the second."""
    back: tuple[float, ...]
    compute_seconds_per_byte: float = 0.0


@dataclass(frozen=True)
class MeasuredLinks:
    """Figures of every pair, and for one that was not measured, the pairs whose mean it takes."""

    figures: dict[Pair, LinkFigures]
    stand_ins: dict[Pair, tuple[Pair, ...]]


def link_ends(
    names: Sequence[str], types: Sequence[str], backends: Sequence[Backend], cluster: Cluster | None
) -> list[LinkEnd]:
    """The ends that ranks are, by the names of their cards (`a100-0/3`).

    A cluster file says which nodes are of one kind: those with the same links; one with a dedicated link is
    like no other. Without a file, nodes with the same cards are.
    """
    nodes = [name.rpartition("/")[0] for name in names]
    dedicated = set[str]() if cluster is None else {end for x in cluster.links for end in (x.from_, x.to)}
    kinds: dict[str, str] = {}
    for node in dict.fromkeys(nodes):
        kinds[node] = " ".join(sorted(own for own, where in zip(types, nodes, strict=True) if where == node))
        group = cluster.groups.get(node) if cluster is not None else None
        if group is not None:
            kinds[node] += f" {group.link} {group.network}"
        if node in dedicated:
            kinds[node] += f" {node}"
    return [
        LinkEnd(name=name, type=type_name, backend=backend, kind=kinds[node])
        for name, type_name, backend, node in zip(names, types, backends, nodes, strict=True)
    ]


def measure_classes(
    ends: Sequence[LinkEnd],
    pairs: Iterable[Pair],
    measure: Callable[[Pair], LinkFigures],
    *,
    all_pairs: bool = False,
) -> MeasuredLinks:
    """Figures of all `pairs`, of which `measure` gives those of one.

    All ranks go through the same pairs, if `measure` gives all of them the same figures.
    """
    classes: dict[Hashable, list[Pair]] = {}
    for pair in pairs:
        classes.setdefault(pair if all_pairs else _class_of(ends, pair), []).append(pair)
    found = MeasuredLinks({}, {})
    for alike in classes.values():
        # The first, and the one whose ranks are farthest apart.
        chosen = list(dict.fromkeys((alike[0], max(alike, key=lambda pair: (pair[1] - pair[0], pair)))))
        measured = {pair: measure(pair) for pair in chosen}
        found.figures.update(measured)
        if len(chosen) < 2 or _are_alike(*(_turn(ends, chosen[0], p, measured[p]) for p in chosen)):
            _fill(ends, found, alike, chosen)
            continue
        parts: dict[Hashable, list[Pair]] = {}
        for pair in alike:
            parts.setdefault(_part_of(ends, pair), []).append(pair)
        for part in parts.values():
            own = [pair for pair in part if pair in measured] or part[:1]
            found.figures.update({pair: measure(pair) for pair in own if pair not in measured})
            _fill(ends, found, part, own)
    return found


def _fill(
    ends: Sequence[LinkEnd], found: MeasuredLinks, pairs: Sequence[Pair], measured: Sequence[Pair]
) -> None:
    """Give the mean of the `measured` ones to the others."""
    for pair in pairs:
        if pair in found.figures:
            continue
        like = [_turn(ends, pair, other, found.figures[other]) for other in measured]
        found.figures[pair] = LinkFigures(
            there=tuple(map(fmean, zip(*(one.there for one in like), strict=True))),
            back=tuple(map(fmean, zip(*(one.back for one in like), strict=True))),
            compute_seconds_per_byte=fmean(one.compute_seconds_per_byte for one in like),
        )
        found.stand_ins[pair] = tuple(measured)


def _class_of(ends: Sequence[LinkEnd], pair: Pair) -> Hashable:
    first, second = (ends[rank] for rank in pair)
    return first.node == second.node, *sorted((end.kind, end.type) for end in (first, second))


def _part_of(ends: Sequence[LinkEnd], pair: Pair) -> Hashable:
    """What divides a class whose pairs are not alike: cards by number in a node, or nodes."""
    first, second = (ends[rank] for rank in pair)
    return (first.number, second.number) if first.node == second.node else (first.node, second.node)


def _turn(ends: Sequence[LinkEnd], wanted: Pair, pair: Pair, figures: LinkFigures) -> LinkFigures:
    """The figures of `pair` in the direction of `wanted`, which is of its class."""
    own, other = ((ends[p[0]].kind, ends[p[0]].type) for p in (wanted, pair))
    return figures if own == other else replace(figures, there=figures.back, back=figures.there)


def _are_alike(one: LinkFigures, other: LinkFigures) -> bool:
    """Whether large messages take about as long."""
    sums = [figures.there[-1] + figures.back[-1] for figures in (one, other)]
    return max(sums) <= ALIKE * min(sums)


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
            transport.close()
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


SMALL_BYTES, LARGE_BYTES = 1 << 10, 1 << 23
"""Of each message; the difference in seconds is that of the bytes, without start and barrier."""
NODE_REPEATS = 3
LEAST_SECONDS = 1e-9
"""Replaces a difference that the clock does not see."""


def measure_node_links(
    ends: Sequence[LinkEnd], *, device: Device, timeout_seconds: float = 600.0, all_pairs: bool = False
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
                flow.transport.close()
        return LinkFigures(there=(seconds[0],), back=(seconds[1],))

    shared = [
        pair for pair in itertools.combinations(range(len(held)), 2) if any(len(held[n]) > 1 for n in pair)
    ]
    found = measure_classes(of_nodes, shared, measure, all_pairs=all_pairs)
    return tuple(_node_profiles(list(nodes), shared, found))


def _node_profiles(
    names: Sequence[str], pairs: Sequence[Pair], found: MeasuredLinks
) -> Iterator[NodeLinkProfile]:
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
    transport: Transport


def _all_at_once(flows: Sequence[_Flow], size: int, device: Device) -> float:
    """Median seconds until messages of `size` bytes, which begin at once, have all arrived; the same on all
    ranks."""
    rank = dist.get_rank()
    message = torch.randint(255, (size,), dtype=torch.uint8, device=device.torch)
    times: list[float] = []
    for _ in range(1 + NODE_REPEATS):
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


NUM_ELEMENTS = {False: 1 << 20, True: 1 << 24}
"""Of the fp32 sum, on a CPU and on a card: enough that it takes much longer than its start."""
OVERLAP_WIDTH = 384
"""Of the products that are computed beside it."""
SUMS_HIDDEN = 2
"""How many times as long as a sum the products take, so that they hide all of it."""
OVERLAP_REPEATS = 5


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
        found += _measure_overlap(transport, device, slowdown)
    dist.broadcast(found, pair[0])
    return found.item()


def _measure_overlap(transport: Transport, device: Device, slowdown: float) -> float:
    gradient = torch.zeros(NUM_ELEMENTS[device.is_card], dtype=torch.float32, device=device.torch)
    products = _Products(device, slowdown)
    products.seconds(1)
    number = math.ceil(SUMS_HIDDEN * _sum_seconds(transport, gradient, device) / products.seconds(1))
    lost: list[float] = []
    for _ in range(OVERLAP_REPEATS):
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
        self._stopwatch = Stopwatch(device, simulated=Simulated(slowdown))
        self._factor = torch.full((OVERLAP_WIDTH, OVERLAP_WIDTH), 1 / OVERLAP_WIDTH, device=device.torch)
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
    for _ in range(OVERLAP_REPEATS):
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
    room: HostSlab, *, device: Device, device_type: str, bytes_per_second: float | None = None
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
