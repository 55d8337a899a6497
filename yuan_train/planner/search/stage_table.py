"""The least seconds of a stage by kind, layers and micro-batches in flight: what time and memory allow.

A kind of stage is a type of card, a tensor-parallel width and a number of replicas. What a plan may choose
beside these is chosen for the best, and what is not known is left out, so that no stage of any plan takes
less: nodes with the fastest links, the cheapest neighbouring layers, no more recomputed layers than memory
requires, no buffers of gradient reductions. Activations that leave take neither memory nor time, and a single
card that may have its parameters in pages takes any stage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.away import most_away
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.unit_costs import CardCosts, UnitCost
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.shapes import Options
from yuan_train.schedule.in_flight import MESSAGES_PER_EDGE

Floats = NDArray[np.float64]

ROLES = ((False, False), (True, False), (False, True), (True, True))
"""Whether a stage has the embedding, and the head."""
MIDDLE, FIRST, LAST, ONLY = range(4)
REPLICA_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of replicas are taken together up to each of these: the price of the fewest, the speed of most."""
ROUNDING = 1 + 1e-9


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Stages of one type of card, one width, and `fewest` to `most` replicas."""

    type_index: int
    width: int
    fewest: int
    most: int
    examples: tuple[Replica, ...]
    """A replica on each kind of node."""

    @property
    def cards(self) -> int:
        """The fewest cards of such a stage."""
        return self.width * self.fewest


@dataclass(frozen=True, kw_only=True, eq=False)
class StageTable:
    """Least seconds of stages, of one micro-batch size."""

    layers: Floats
    """[X]: layers of a stage; half a layer counts as its share of the layer's seconds."""
    seconds: Floats
    """[4, N, X, K]: of a forward and a backward, by role, kind, entry of `layers`, and micro-batches in
    flight less one; inf where none fits."""
    parameters: Floats
    """[N, X]: of the layers, on each card."""
    forward_share: float
    """Least part of a stage's seconds that is forward."""


def type_names(cards: Sequence[Card]) -> tuple[str, ...]:
    """The types of the cards, in their order."""
    return tuple(dict.fromkeys(card.type for card in cards))


def list_kinds(costs: Costs, cards: Sequence[Card], options: Options, *, any_replicas: bool) -> list[Kind]:
    """Every kind of stage that the options allow on these cards."""
    kinds: list[Kind] = []
    for index, name in enumerate(type_names(cards)):
        sizes = Counter(card.node for card in cards if card.type == name)
        for width in options.tensor:
            count = sum(size // width for size in sizes.values())
            examples = tuple(_examples(costs, cards, name, width))
            for fewest, most in _replica_steps(count, options, any_replicas=any_replicas):
                kinds.append(Kind(type_index=index, width=width, fewest=fewest, most=most, examples=examples))
    return kinds


def _examples(costs: Costs, cards: Sequence[Card], name: str, width: int) -> Iterator[Replica]:
    """A replica on each kind of node that has so many cards of a type."""
    nodes: dict[str, list[Card]] = {}
    for card in cards:
        if card.type == name:
            nodes.setdefault(card.node, []).append(card)
    seen: set[str] = set()
    for node, members in nodes.items():
        group = costs.topology.groups[node].name
        if len(members) >= width and group not in seen:
            seen.add(group)
            yield tuple(members[:width])


def _replica_steps(count: int, options: Options, *, any_replicas: bool) -> Iterator[tuple[int, int]]:
    """(fewest, most) of numbers of replicas that are taken together, up to `count`."""
    if not any_replicas:
        yield from ((n, n) for n in options.replicas if n <= count)
        return
    before = 0
    for most in (*REPLICA_STEPS, count):
        if before < min(most, count):
            yield before + 1, min(most, count)
            before = most


# --- the table -------------------------------------------------------------------------------------------


def stage_table(
    costs: Costs,
    kinds: Sequence[Kind],
    options: Options,
    *,
    size: int,
    owner_share: float,
    host_seconds: float,
    most_in_flight: int,
    sums: dict[tuple[int, str], Floats],
) -> StageTable:
    """The table of a micro-batch size.

    An owner of the optimizer's state holds at least `owner_share` of it, divided by the stage's replicas;
    hosts may step for so long. `sums` keeps what tables have in common.
    """
    parts = _Parts(costs, options, _pieces(costs, options, kinds[0], size), size, sums)
    return StageTable(
        layers=np.array([piece.layers for piece in parts.pieces]),
        seconds=np.stack(
            [_kind_seconds(parts, kind, owner_share, host_seconds, most_in_flight) for kind in kinds], axis=1
        ),
        parameters=np.array([parts.parameters(kind.examples[0]) for kind in kinds]),
        forward_share=min(parts.forward_share(kind.examples[0]) for kind in kinds),
    )


def _kind_seconds(parts: _Parts, kind: Kind, owner_share: float, host_seconds: float, most: int) -> Floats:
    """[4, X, K]: the least of all nodes."""
    options = parts.options
    if options.offload_parameters and kind.width == kind.fewest == 1:
        # Everything may lie on the host, and the planner's plans with pages are of such stages.
        return np.stack([parts.unlimited_seconds(kind.examples, role, most) for role in ROLES])
    share = owner_share / kind.most if any(options.sharded) else 1.0
    room = 0.0
    if options.offload:
        room = _host_room(parts.costs, kind, host_seconds, on_disk=options.offload_disk)
    return np.stack(
        [
            np.min([parts.seconds(replica, role, share, room, most) for replica in kind.examples], axis=0)
            for role in ROLES
        ]
    )


def _host_room(costs: Costs, kind: Kind, host_seconds: float, *, on_disk: bool) -> float:
    """Bytes of optimizer state that a card of a kind may have stepped by its host in so many seconds."""
    precision = costs.problem.precision
    rooms = (most_away(costs, replica[0], host_seconds, on_disk=on_disk) for replica in kind.examples)
    return max(rooms) * STATE_BYTES[precision].optimizer


@dataclass(frozen=True)
class _Piece:
    """So many whole layers of a stage, and perhaps half of another."""

    whole: int
    half: int | None
    layers: float


def _pieces(costs: Costs, options: Options, kind: Kind, size: int) -> list[_Piece]:
    num_layers = costs.problem.model.num_layers
    found = [_Piece(n, None, float(n)) for n in range(num_layers + 1)]
    if options.half_layers:
        halves = _part(costs, kind.examples[0], size, options.recompute[0]).halves
        found += [_Piece(n, h, n + halves[h].seconds) for n in range(num_layers) for h in (0, 1)]
    return found


def _part(costs: Costs, replica: Replica, size: int, recompute: str) -> CardCosts:
    if costs.topology.measured and len(replica) > 1:
        # Which cards of a node a group has decides on its links: left out.
        return costs.of(replica[0].type, size, recompute, len(replica))  # type: ignore[arg-type]
    return costs.of_replica(replica, size, recompute)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Parts:
    """Sums over the pieces that a stage may hold."""

    costs: Costs
    options: Options
    pieces: Sequence[_Piece]
    size: int
    sums: dict[tuple[int, str], Floats]
    """What `of` and `_once` have looked up. The parts are kept by `Costs`."""

    def of(self, part: CardCosts, name: str) -> Floats:
        """[X]: the least sum of a value over so many neighbouring layers."""
        key = (id(part), name)
        if key not in self.sums:
            value, share = _VALUES[name]
            self.sums[key] = self._least_sums(part, np.array(list(map(value, part.units[1:-1]))), share)
        return self.sums[key]

    def _least_sums(self, part: CardCosts, values: Floats, share: str) -> Floats:
        ends = np.concatenate([[0.0], np.cumsum(values)])
        least = float(values.min())
        if least == values.max():
            sums = least * np.arange(len(ends))
        else:
            sums = np.array([(ends[n:] - ends[: len(ends) - n]).min() for n in range(len(ends))])
        halves = [least * float(getattr(half, share)) for half in part.halves]
        return np.array([sums[p.whole] + (0.0 if p.half is None else halves[p.half]) for p in self.pieces])

    def parameters(self, replica: Replica) -> Floats:
        """[X]: of the layers, on each card."""
        part = _part(self.costs, replica, self.size, self.options.recompute[0])
        return self.of(part, "parameters")

    def forward_share(self, replica: Replica) -> float:
        """The least part of a unit's seconds that is forward; of those that a stage before has."""
        shares = [1.0]
        for recompute in self.options.recompute:
            for unit in _part(self.costs, replica, self.size, recompute).units[:-1]:
                seconds = unit.forward_seconds + unit.backward_seconds
                shares += [unit.forward_seconds / seconds] if seconds > 0 else []
        return min(shares)

    def seconds(
        self, replica: Replica, role: tuple[bool, bool], share: float, room: float, most: int
    ) -> Floats:
        """[X, K]: least seconds of a stage on such a replica, for 1 to `most` micro-batches in flight."""
        recompute = self.options.recompute
        plain = _part(self.costs, replica, self.size, "none")
        in_flight = np.arange(1, most + 1, dtype=np.float64)
        found: list[Floats] = []
        base = self._terms(plain, role)
        for name in recompute:
            part = plain if name == "none" else _part(self.costs, replica, self.size, name)
            own = base if name == "none" else self._terms(part, role)
            free = self._free(part, own, replica, role, share, room)
            if name == "none" or "none" not in recompute:
                needed = in_flight * own.kept[:, None]
                fits = needed <= free[:, None] + abs(free[:, None]) * 1e-9
                found.append(np.where(fits, own.seconds[:, None], np.inf))
                continue
            # As few recomputed layers as fit; what is half a layer may not count as one.
            saved = self._saved(plain, part)
            over = in_flight * base.kept[:, None] - free[:, None] * ROUNDING
            blocks = np.array([p.whole + (p.half is not None) for p in self.pieces], dtype=np.float64)
            count = np.ceil(np.maximum(over, 0.0) / np.maximum(in_flight * saved, 1e-300) - 1e-9)
            halves = np.array([p.half is not None for p in self.pieces])
            added = self._added(plain, part) * np.maximum(count - halves[:, None], 0.0)
            fits = (count <= blocks[:, None]) & (free[:, None] >= 0)
            found.append(np.where(fits, base.seconds[:, None] + added, np.inf))
        if self.options.offload_activations:
            free = self._free(plain, base, replica, role, share, room)
            # What a stage was sent stays, and so do its own messages; how long copies take is left out.
            stays = sum(unit.activation_bytes for unit in _ends(plain, role))
            stays += plain.boundary_bytes * (2 - role[0] - role[1])
            fits = in_flight * stays <= free[:, None] * ROUNDING
            found.append(np.where(fits, base.seconds[:, None], np.inf))
        return np.min(found, axis=0)

    def unlimited_seconds(self, replicas: Sequence[Replica], role: tuple[bool, bool], most: int) -> Floats:
        """[X, K]: least seconds of a stage on one of such replicas, whatever it holds."""
        names = dict.fromkeys(("none", *self.options.recompute))
        parts = [_part(self.costs, replica, self.size, name) for replica in replicas for name in names]
        least = np.min([self._terms(part, role).seconds for part in parts], axis=0)
        return np.repeat(least[:, None], most, axis=1)

    def _terms(self, part: CardCosts, role: tuple[bool, bool]) -> _Terms:
        ends = _ends(part, role)
        seconds = self.of(part, "seconds") + sum(map(_seconds, ends))
        kept = self.of(part, "activations")
        kept = kept + sum(unit.activation_bytes for unit in ends) + part.boundary_bytes * (not role[1])
        return _Terms(seconds, kept)

    def _free(
        self,
        part: CardCosts,
        own: _Terms,
        replica: Replica,
        role: tuple[bool, bool],
        share: float,
        room: float,
    ) -> Floats:
        """[X]: bytes that are left for micro-batches in flight."""
        problem = self.costs.problem
        device = problem.cluster.device_type(replica[0].type)
        stored = _ends(part, role)
        if role == (True, True) and problem.model.tie_embeddings and not problem.has_external_profile:
            stored = stored[1:]
        static = self.of(part, "static")
        static = static + sum(unit.parameter_bytes + unit.gradient_bytes for unit in stored)
        optimizer = self.of(part, "optimizer")
        optimizer = share * (optimizer + sum(unit.optimizer_bytes for unit in stored))
        static = static + optimizer - np.minimum(optimizer, room)
        has_layers = np.array([p.layers > 0 for p in self.pieces])
        transient = self._once(part, "transient", lambda: min(map(_transient, part.units[1:-1])))
        transient *= min(half.transient for half in part.halves) if self.options.half_layers else 1.0
        buffers = np.maximum(
            np.where(has_layers, transient, 0.0), part.units[0].transient_bytes if role[0] else 0.0
        )
        logits = part.units[-1].transient_bytes if role[1] else 0.0
        edges = (2 - role[0] - role[1]) * MESSAGES_PER_EDGE * part.boundary_bytes
        return float(device.memory - device.reserved) - static - buffers - logits - edges

    def _saved(self, plain: CardCosts, part: CardCosts) -> float:
        """Most bytes that recomputing a layer saves of a micro-batch."""
        pairs = zip(plain.units[1:-1], part.units[1:-1], strict=True)
        return self._once(
            part, "saved", lambda: max(a.activation_bytes - b.activation_bytes for a, b in pairs)
        )

    def _added(self, plain: CardCosts, part: CardCosts) -> float:
        """Least seconds that recomputing a layer takes."""
        pairs = zip(plain.units[1:-1], part.units[1:-1], strict=True)
        return self._once(part, "added", lambda: max(0.0, min(_seconds(b) - _seconds(a) for a, b in pairs)))

    def _once(self, part: CardCosts, name: str, find: Callable[[], float]) -> float:
        """A figure over the layers of a part, found for its first table; they are many."""
        key = (id(part), name)
        if key not in self.sums:
            self.sums[key] = np.array(find())
        return float(self.sums[key])


@dataclass(frozen=True)
class _Terms:
    seconds: Floats
    """[X]"""
    kept: Floats
    """[X]: bytes of each micro-batch in flight."""


def _ends(part: CardCosts, role: tuple[bool, bool]) -> list[UnitCost]:
    return [unit for unit, has in zip((part.units[0], part.units[-1]), role, strict=True) if has]


def _transient(unit: UnitCost) -> float:
    return unit.transient_bytes


def _seconds(unit: UnitCost) -> float:
    return unit.forward_seconds + unit.backward_seconds


_VALUES: dict[str, tuple[Callable[[UnitCost], float], str]] = {
    "seconds": (_seconds, "seconds"),
    "parameters": (lambda unit: float(unit.parameters), "parameters"),
    "static": (lambda unit: float(unit.parameter_bytes + unit.gradient_bytes), "parameters"),
    "optimizer": (lambda unit: float(unit.optimizer_bytes), "parameters"),
    "activations": (lambda unit: float(unit.activation_bytes), "activations"),
}
"""Values of a layer, and which of its halves' shares they follow."""
