"""The kinds of stages, and what each takes and holds: the parts of a table of their least seconds.

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
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.unit_costs import CardCosts, UnitCost
from yuan_train.planner.search.shapes import Options
from yuan_train.schedule.in_flight import MESSAGES_PER_EDGE

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

ROLES = ((False, False), (True, False), (False, True), (True, True))
"""Whether a stage has the embedding, and the head."""
MIDDLE, FIRST, LAST, ONLY = range(4)
REPLICA_STEPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of replicas are taken together up to each of these: the price of the fewest, the speed of most."""


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


@dataclass(frozen=True, eq=False)
class StageWay:
    """One way of V stages to keep a micro-batch: all of one recompute, or as few recomputed layers as fit."""

    base: Floats
    """[4, V, X]: seconds of a forward and a backward without what is recomputed, by role; inf: no such."""
    kept: Floats
    """[4, V, X]: bytes of a micro-batch in flight, of which nothing is recomputed."""
    free: Floats
    """[4, V, X]: bytes for them, beside the optimizer's state."""
    saved: Floats
    """[V]: the most bytes that recomputing a layer saves of a micro-batch; 0 where none is."""
    added: Floats
    """[V]: the least seconds that this takes."""


@dataclass(frozen=True, kw_only=True, eq=False)
class StageParts:
    """What all tables of a micro-batch size share."""

    layers: Floats
    """[X]: layers of a stage; half a layer counts as its share of the layer's seconds."""
    blocks: Floats
    """[X]: layers, whole or half."""
    halves: Floats
    """[X]: half layers."""
    ways: tuple[StageWay, ...]
    optimizer: Floats
    """[4, V, X]: bytes of the optimizer's state."""
    variants: Integers
    """[N, E]: of each kind, the V that it may be: one by kind of node, some of them twice."""
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


# --- the parts -------------------------------------------------------------------------------------------


def stage_parts(
    costs: Costs,
    kinds: Sequence[Kind],
    options: Options,
    *,
    size: int,
    sums: dict[tuple[int, str], Floats],
) -> StageParts:
    """The parts of a micro-batch size; `sums` keeps what sizes have in common."""
    parts = _Parts(costs, options, _pieces(costs, options, kinds[0], size), size, sums)
    known: dict[object, _Variant] = {}
    found: list[_Variant] = []
    variants: list[list[int]] = []
    for kind in kinds:
        own = {parts.key(replica): replica for replica in kind.examples}
        for key, replica in own.items():
            known[key] = known.get(key) or parts.variant(replica)
        made = [known[key] for key in own]
        if options.offload_parameters and kind.width == kind.fewest == 1:
            # Everything may lie on the host, and the planner's plans with pages are of such stages.
            made = [parts.unlimited(kind.examples)]
        variants.append(list(range(len(found), len(found) + len(made))))
        found += made
    most = max(map(len, variants))
    return StageParts(
        layers=np.array([piece.layers for piece in parts.pieces]),
        blocks=np.array([p.whole + (p.half is not None) for p in parts.pieces], dtype=np.float64),
        halves=np.array([float(p.half is not None) for p in parts.pieces]),
        ways=tuple(map(_stack, zip(*(one.ways for one in found), strict=True))),
        optimizer=np.stack([one.optimizer for one in found], axis=1),
        variants=np.array([row + row[:1] * (most - len(row)) for row in variants], dtype=np.int64),
        parameters=np.array([parts.parameters(kind.examples[0]) for kind in kinds]),
        forward_share=min(parts.forward_share(kind.examples[0]) for kind in kinds),
    )


def _stack(ways: Sequence[StageWay]) -> StageWay:
    """The same way of several stages."""
    return StageWay(
        *(np.stack([getattr(way, name) for way in ways], axis=1) for name in ("base", "kept", "free")),
        saved=np.concatenate([way.saved for way in ways]),
        added=np.concatenate([way.added for way in ways]),
    )


@dataclass(frozen=True)
class _Variant:
    """Stages on one replica: their ways, [4, X] each, and bytes of the optimizer's state."""

    ways: list[StageWay]
    optimizer: Floats


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

    def key(self, replica: Replica) -> object:
        """Replicas that take the same have the same."""
        names = dict.fromkeys(("none", *self.options.recompute))
        return replica[0].type, *(id(_part(self.costs, replica, self.size, name)) for name in names)

    def variant(self, replica: Replica) -> _Variant:
        """The stages on such a replica. The optimizer's state is the same of all ways."""
        recompute = self.options.recompute
        plain = _part(self.costs, replica, self.size, "none")
        base, ways = self._terms(plain), list[StageWay]()
        for name in recompute:
            part = plain if name == "none" else _part(self.costs, replica, self.size, name)
            own, free = self._terms(part), self._free(part, replica)
            if name == "none" or "none" not in recompute:
                ways.append(StageWay(own.seconds, own.kept, free, np.zeros(1), np.zeros(1)))
                continue
            saved, added = np.array([self._saved(plain, part)]), np.array([self._added(plain, part)])
            ways.append(StageWay(base.seconds, base.kept, free, np.maximum(saved, 1e-300), added))
        if self.options.offload_activations:
            # What a stage was sent stays, and so do its own messages; how long copies take is left out.
            stays = _of_ends(plain, lambda unit: unit.activation_bytes)
            stays = stays + plain.boundary_bytes * np.array([2 - sum(role) for role in ROLES])
            kept = np.repeat(stays[:, None], len(self.pieces), axis=1)
            free = self._free(plain, replica)
            ways.append(StageWay(base.seconds, kept, free, np.zeros(1), np.zeros(1)))
        return _Variant(ways, self._optimizer(plain, replica))

    def unlimited(self, replicas: Sequence[Replica]) -> _Variant:
        """The stages on one of such replicas, whatever it holds."""
        names = dict.fromkeys(("none", *self.options.recompute))
        parts = [_part(self.costs, replica, self.size, name) for replica in replicas for name in names]
        least = np.min([self._terms(part).seconds for part in parts], axis=0)
        nothing, count = np.zeros(least.shape), len(self.options.recompute)
        ways = [StageWay(least, nothing, nothing, np.zeros(1), np.zeros(1))]
        ways += [StageWay(nothing + np.inf, nothing, nothing, np.zeros(1), np.zeros(1))] * (
            count - 1 + self.options.offload_activations
        )
        return _Variant(ways, nothing)

    def _terms(self, part: CardCosts) -> _Terms:
        sent = part.boundary_bytes * np.array([not role[1] for role in ROLES])
        return _Terms(
            self.of(part, "seconds") + _of_ends(part, _seconds)[:, None],
            self.of(part, "activations")
            + (_of_ends(part, lambda unit: unit.activation_bytes) + sent)[:, None],
        )

    def _stored(self, part: CardCosts, replica: Replica, value: Callable[[UnitCost], float]) -> Floats:
        """[4]: of the ends whose parameters a stage holds."""
        result = _of_ends(part, value)
        problem = self.costs.problem
        if problem.model.tie_embeddings and not problem.has_external_profile:
            result[ONLY] -= value(part.units[0]) * part.units[0].tied_share
        return result

    def _optimizer(self, part: CardCosts, replica: Replica) -> Floats:
        """[4, X]"""
        ends = self._stored(part, replica, lambda unit: unit.optimizer_bytes)
        return self.of(part, "optimizer") + ends[:, None]

    def _free(self, part: CardCosts, replica: Replica) -> Floats:
        """[4, X]: bytes for micro-batches in flight and the optimizer's state."""
        ends = self._stored(part, replica, lambda unit: unit.parameter_bytes + unit.gradient_bytes)
        static = self.of(part, "static") + ends[:, None]
        has_layers = np.array([p.layers > 0 for p in self.pieces])
        transient = self._once(part, "transient", lambda: min(map(_transient, part.units[1:-1])))
        transient *= min(half.transient for half in part.halves) if self.options.half_layers else 1.0
        own = np.where(has_layers, transient, 0.0)
        first, last = (np.array([float(role[i]) for role in ROLES])[:, None] for i in (0, 1))
        buffers = np.maximum(own, first * part.units[0].transient_bytes)
        logits = last * part.units[-1].transient_bytes
        edges = (2 - first - last) * MESSAGES_PER_EDGE * part.boundary_bytes
        room = self.costs.problem.room_bytes(replica[0].type)
        return room - static - buffers - logits - edges

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
    """[4, X]"""
    kept: Floats
    """[4, X]: bytes of each micro-batch in flight."""


def _of_ends(part: CardCosts, value: Callable[[UnitCost], float]) -> Floats:
    """[4]: the embedding's and the head's value, of those that stages of each role have."""
    first, last = value(part.units[0]), value(part.units[-1])
    return np.array([first * role[0] + last * role[1] for role in ROLES], dtype=np.float64)


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
