"""What no plan beats, and whether a plan is the fastest: a lower bound of all plans, and branch and bound.

The bound is of work, memory and filling. The proof is of plans of equal pipelines: `native/prove.c` goes
through the orders of stages and cuts of layers of every shape, each stage with what `realise.c` finds for its
memory, under the schedules' own warm-ups. It counts the stages that it tries and looks at no clock.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from ctypes import c_int16
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yuan_train.config.cluster import Card
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.unit_costs import CardCosts, Costs, UnitCost, share_of_layer
from yuan_train.planner.native.core import MAX_REPLICAS, NAMES, ProofShape, ProofSlot
from yuan_train.planner.search.candidate import Candidate, Space, judge
from yuan_train.planner.search.drafts import Tables, draft_space, make_tables, plan_of
from yuan_train.planner.search.shapes import Options, Shape, Slot

Floats = NDArray[np.float64]
Integers = NDArray[np.integer]
SPLIT_SCHEDULES = ("zero_bubble",)
"""Schedules that split the backward: its weight-gradient part runs in the bubble of the filling pipeline."""
PRECISION = 1e-6
"""Bisection ends at this ratio less one."""


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Seconds that no plan under these schedules, of micro-batches of these sizes, can beat."""

    seconds: float
    schedules: tuple[ScheduleName, ...]
    sizes: tuple[int, ...]


def lower_bound(costs: Costs, cards: Sequence[Card], options: Options) -> Bound:
    """What no plan beats that has any pipelines of any of the cards, under the schedules and sizes that the
    options allow; inf if none fits.

    In a step of T seconds a card in a stage that begins at unit a idles until its first micro-batch has
    passed all units before a, and after its last one's backward has left, until that has passed them again:
    W_a seconds. What it works is within T - W_a. A card of type d that holds unit u holds all from a to u, so
    its memory gives the least a: each unit's work w_du, of all B sequences, counts as w_du / (T - W_a) of a
    card. For weights l_d that sum to 1 over the cards,

        sum_u B min_d l_d w_du / (T - W_a(d, u)) <= 1

    (linear-programming duality). Here l_d is proportional to the type's speed; w_du is that of the fastest
    width, recompute and size. Also, one micro-batch takes at least its units' fastest times.
    """
    schedules, sizes = options.all_schedules, options.all_sizes
    types = Counter(card.type for card in cards)
    ways = [_Ways(costs, list(types), options, size) for size in sizes]
    chain = min(float(way.round_trip(schedules, whole=True)[-1]) for way in ways)
    work = [np.concatenate([way.work[name] for way in ways]) for name in types]
    waits = [np.concatenate([way.waits(name, schedules) for way in ways]) for name in types]
    fastest = np.array([rows.min(axis=0).sum() for rows in work])
    weights = 1.0 / np.maximum(fastest, 1e-300)
    weights /= weights @ np.array(list(types.values()))
    batch = costs.problem.global_batch_size

    def needs_more(seconds: float) -> bool:
        with np.errstate(divide="ignore", invalid="ignore"):
            shares = [
                weight * np.where(wait < seconds, rows / np.maximum(seconds - wait, 0.0), np.inf).min(axis=0)
                for weight, rows, wait in zip(weights, work, waits, strict=True)
            ]
        return batch * float(np.min(shares, axis=0).sum()) > 1.0

    if np.isinf(np.min([wait.min(axis=0) for wait in waits], axis=0)).any():
        return Bound(seconds=math.inf, schedules=schedules, sizes=sizes)
    least = np.min([w * rows.min(axis=0) for w, rows in zip(weights, work, strict=True)], axis=0)
    low = high = batch * float(least.sum())
    # 0 if each unit takes no time on some card or in some way: a profile's clock was too coarse.
    while low > 0.0 and needs_more(high):
        low, high = high, 2.0 * high
    while high > low * (1.0 + PRECISION):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if needs_more(middle) else (low, middle)
    return Bound(seconds=max(low, chain), schedules=schedules, sizes=sizes)


class _Ways:
    """Units on each type of card by tensor-parallel width and recompute, in micro-batches of one size."""

    def __init__(self, costs: Costs, types: Sequence[str], options: Options, size: int) -> None:
        self.costs, self.options, self.size = costs, options, size
        ways = list(itertools.product(options.tensor, options.recompute))
        units = {name: [(w, self._units(costs.of(name, size, r, w))) for w, r in ways] for name in types}
        stays = 0.0 if options.offload_activations else 1.0
        works = 0.0 if options.divide_experts and costs.problem.model.num_experts else 1.0

        def each(figure: Callable[[int, int, UnitCost], float]) -> dict[str, Floats]:
            """[W, U] of each type."""
            return {
                name: np.array([[figure(w, i, u) for i, u in enumerate(row)] for w, row in own])
                for name, own in units.items()
            }

        self.work = each(lambda w, _, u: w * u.seconds / size)
        """Seconds of all cards of a group for one sequence of each unit."""
        self.held = each(lambda _, i, u: self._state_bytes(u, i))
        """Bytes on each card that leave it under no key."""
        self.kept = each(lambda _, i, u: stays * u.activation_bytes + works * u.transient_bytes)
        """Of one micro-batch in flight, and what its unit works with."""
        rows = [row for own in units.values() for _, row in own]
        self.forward = np.min([[u.forward_seconds for u in row] for row in rows], axis=0)
        self.both = np.min([[u.seconds for u in row] for row in rows], axis=0)
        """[U]: of a micro-batch, where each is fastest."""

    def round_trip(self, schedules: Sequence[ScheduleName], *, whole: bool = False) -> Floats:
        """[U + 1]: seconds of the units before each, of a micro-batch's way there and back. Where a backward
        is split, its weight gradients may come later; where cards have several stages (not if it is the
        `whole` way), they may work on another one meanwhile."""
        split = any(name in SPLIT_SCHEDULES for name in schedules)
        several = "interleaved_1f1b" in schedules and not whole
        each = 0.0 * self.both if several else self.forward if split else self.both
        return np.concatenate([[0.0], np.cumsum(each)])

    def waits(self, name: str, schedules: Sequence[ScheduleName]) -> Floats:
        """[W, U]: the least seconds that a card with a unit idles, for what its memory holds."""
        before = self.round_trip(schedules)
        room = self.costs.problem.room_bytes(name) * (1.0 + 1e-9)
        result: list[Floats] = []
        for held, kept in zip(self.held[name], self.kept[name], strict=True):
            sums = np.concatenate([[0.0], np.cumsum(held)])
            # The first unit a with sums[u + 1] - sums[a] + kept[u] <= room; if not even u has room, no stage
            # has it.
            wanted: Floats = sums[1:] + kept - room
            first: Integers = np.searchsorted(sums, wanted)
            result.append(
                np.where(first <= np.arange(len(held)), before[np.minimum(first, len(held))], np.inf)
            )
        return np.array(result)

    def _units(self, part: CardCosts) -> list[UnitCost]:
        if not self.options.half_layers:
            return list(part.units)
        first, *layers, last = part.units
        halves = [share_of_layer(layer, half) for layer in layers for half in part.halves]
        return [first, *halves, last]

    def _state_bytes(self, unit: UnitCost, number: int) -> float:
        options, problem = self.options, self.costs.problem
        # Groups of cards hold a share of each layer's experts, pages none of a layer; a tied matrix is there
        # once.
        divided = options.divide_experts and problem.model.num_experts > 0
        if divided or options.offload_parameters or (number == 0 and self.costs.ties):
            return 0.0
        moves = options.offload or options.offload_disk or True in options.sharded
        return unit.parameter_bytes + unit.gradient_bytes + (0.0 if moves else unit.optimizer_bytes)


def shape_bound(costs: Costs, shape: Shape, options: Options) -> float:
    """Seconds that no plan of the shape can beat: `_area_bound`, without building the shape's instance."""
    kinds: Counter[tuple[int, int]] = Counter()
    rows: dict[int, Floats] = {}
    measured, names = costs.topology.measured, costs.topology.groups
    firsts = [slot[0] for slot in shape.slots]
    # Replicas on nodes of a group are alike, unless their links were measured.
    places = [
        id(g) if measured else (names[g[0][0].node].name, g[0][0].type, len(g[0]), len(g)) for g in firsts
    ]
    example = dict(zip(places, firsts, strict=True))
    for place, number in Counter(places).items():
        group = example[place]
        row = costs.fastest_of(group[0], shape.micro_batch_size, options.recompute)
        rows[id(row)] = row
        kinds[id(row), len(group)] += number
    work, replicas = np.array([rows[row] for row, _ in kinds]), np.array([count for _, count in kinds])
    split = shape.schedule in SPLIT_SCHEDULES
    return _area_bound(work, np.array(list(kinds.values())), replicas, shape.num_micro_batches, split=split)


def _area_bound(
    work: Floats, numbers: Integers, replicas: Integers, num_micro_batches: int, *, split: bool = False
) -> float:
    """Seconds that no step can beat, all its work divided perfectly, fractions of units allowed.

    `work` [K, U] holds the seconds of each unit on each of K kinds of slot; there are `numbers` [K] slots of
    each kind, with `replicas` [K] each.

    In a step of T seconds, stage s (from 0) has at most (T / m) (1 - 1/m)^s for each micro-batch, because
    sum_{j<s} w_j + m * w_s <= T; with n replicas at most n T / m. For weights l_d that sum to 1, all stages
    together satisfy sum_d l_d w_d >= sum_u min_d l_d w_du (linear-programming duality), and the left side is
    largest with the largest weights first. Here l_d is proportional to 1 / W_d, the slot's speed; memory and
    messages are ignored. The second bound: one micro-batch takes at least its units' fastest times. With
    `split` (a schedule that splits the backward) the filling of the pipeline and half of the second bound do
    not count.
    """
    m, num_units = num_micro_batches, work.shape[1]
    one_micro_batch = float(work.min(axis=0).sum()) * (0.5 if split else 1.0)
    rate = work / replicas[:, None]
    whole_model = np.maximum(rate.sum(axis=1), 1e-300)
    share = (1.0 / whole_model) / (numbers / whole_model).sum()
    needed = float((share[:, None] * rate).min(axis=0).sum())
    fastest = np.argsort(-share, kind="stable")
    first = np.repeat(share[fastest], np.minimum(numbers[fastest], num_units))[:num_units]
    fill = 1.0 - 1.0 / m if (replicas == 1).all() and not split else 1.0
    available = float((first * fill ** np.arange(len(first))).sum())
    return max(m * needed / available, one_micro_batch)


# --- the proof ----------------------------------------------------------------------------------------------


MOST_SLOTS, MOST_CARDS = 12, 56
"""Of a shape and of all cards, up to which a proof is tried."""
BUDGET = 1_000_000
"""Stages that are tried for all shapes together; a million takes about a second."""
NEAR = 1.0 + 1e-7
"""What is known must be met once more: a plan of its step is looked for, not only a faster one."""


@dataclass(frozen=True, kw_only=True)
class Proof:
    """What branch and bound found of all shapes."""

    found: tuple[Candidate, ...]
    """The fastest plan of them; none if one that was known before is faster."""
    exact: bool
    """Whether no plan of them is faster than this one, or than the known one where there is none."""
    num_priced: int


NOTHING_PROVEN = Proof(found=(), exact=False, num_priced=0)


def is_provable(shapes: Sequence[Shape], cards: Sequence[Card]) -> bool:
    """Whether so few stages and cards are there that a proof is tried."""
    slots = [slot for shape in shapes for slot in shape.slots]
    few = len(cards) <= MOST_CARDS and max((len(shape.slots) for shape in shapes), default=0) <= MOST_SLOTS
    return few and 0 < len(slots) and max(len(slot[0]) for slot in slots) <= MAX_REPLICAS


def prove_shapes(space: Space, shapes: Sequence[Shape], *, best_seconds: float) -> Proof:
    """Look for a plan of the shapes that takes no longer than the known one of `best_seconds`."""
    costs, options = space.costs, space.options
    apart = bool(costs.topology.measured)
    if apart and any(_width(slot) > 1 for shape in shapes for slot in shape.slots):
        return NOTHING_PROVEN
    tables = make_tables(costs, options.micro_batch_sizes, options.tensor, apart=apart)
    if tables is None:
        return NOTHING_PROVEN
    wanted = draft_space(options, costs.problem)
    state = tables.evaluator.proof_state(best=best_seconds * NEAR, budget=BUDGET)
    found: Shape | None = None
    bounded = sorted((shape_bound(costs, shape, options), i) for i, shape in enumerate(shapes))
    for bound, i in bounded:
        if state.spent >= state.budget or space.is_over():
            return NOTHING_PROVEN
        if bound >= state.best:
            continue
        before = state.best
        tables.evaluator.prove(wanted, _proof_shape(tables, shapes[i]), state)
        found = shapes[i] if state.best < before else found
    if state.spent >= state.budget:
        return NOTHING_PROVEN
    best = None if found is None else judge(space, plan_of(tables, state.draft), found)
    return Proof(found=() if best is None else (best,), exact=True, num_priced=state.num_priced)


def _width(slot: Slot) -> int:
    return len(slot[0][0])


def _proof_shape(tables: Tables, shape: Shape) -> ProofShape:
    slots = (ProofSlot * len(shape.slots))()
    alike: dict[object, int] = {}
    pools = [[tables.pool_of[replica[0].name] for group in slot for replica in group] for slot in shape.slots]
    blocks, kinds = _blocks(tables, shape, pools)
    for i, (row, slot, own) in enumerate(zip(slots, shape.slots, pools, strict=True)):
        row.num_replicas, row.width = len(slot[0]), _width(slot)
        row.alike = alike.setdefault((tuple(own), row.width, row.num_replicas), len(alike))
        row.block, row.block_kind = blocks[i], kinds[i]
        row.pools = (c_int16 * len(own))(*own)
    # Whether the embedding, and the head, are no work for a stage of its own.
    ends = [tables.costs.of_replica(slot[0][0], shape.micro_batch_size, "none").units for slot in shape.slots]
    first, last = (not any(units[i].seconds + units[i].state_bytes for units in ends) for i in (0, -1))
    return ProofShape(
        NAMES.index(shape.schedule),
        tables.sizes.index(shape.micro_batch_size),
        shape.num_micro_batches,
        shape.num_pipelines,
        shape.sharded,
        first,
        last,
        len(shape.slots),
        slots,
    )


def _blocks(tables: Tables, shape: Shape, pools: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """(block of each slot, kind of its block): slots that share no node with others are a block of their own,
    and blocks are of a kind whose cards and nodes nothing but names tells apart."""
    topology, rows = tables.costs.topology, tables.problem.pools
    nodes = [{rows[pool].node for pool in own} for own in pools]
    block = list(range(len(pools)))
    for i, j in itertools.combinations(range(len(pools)), 2):
        if block[i] != block[j] and nodes[i] & nodes[j]:
            block = [block[i] if other == block[j] else other for other in block]
    if topology.measured or topology.dedicated or topology.shared_rates:
        return block, block
    kinds: dict[object, int] = {}
    kind_of: dict[int, int] = {}
    for number in Counter(block):
        names: dict[int, int] = {}
        looks = tuple(
            (
                len(slot[0]),
                _width(slot),
                *((rows[pool].kind, names.setdefault(rows[pool].node, len(names))) for pool in own),
            )
            for slot, own, other in zip(shape.slots, pools, block, strict=True)
            if other == number
        )
        kind_of[number] = kinds.setdefault(looks, len(kinds))
    return block, [kind_of[number] for number in block]
