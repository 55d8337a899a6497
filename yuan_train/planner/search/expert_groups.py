"""Plans whose stages divide the experts of their layers over several cards, unlike ones included.

A stage on a group of cards takes as long as its slowest card, and fits if each card's memory suffices. For a
group and a number of layers the counts that make it fastest are exact (`count_experts`). Layers are divided
over the groups of a pipeline by dynamic programming over the slowest stage; the best divisions are costed in
full. Equal pipelines have equal groups, for all that hold a layer must divide its experts alike. It stands
alone because such plans have a search of their own.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.devices import Backend
from yuan_train.config.plan import PipelinePlan, Plan, share_only_gloo
from yuan_train.config.run import Recompute, ScheduleName
from yuan_train.planner.costs.unit_costs import CardCosts, Costs
from yuan_train.planner.costs.workload import Replica
from yuan_train.planner.evaluate.stage_cost import Ends, StateShares, stage_memory
from yuan_train.planner.search import local
from yuan_train.planner.search.candidate import Candidate, Space, judge
from yuan_train.planner.search.shapes import Options, Shape, equal_parts, make_plan
from yuan_train.schedule.schedules import in_flight

MAX_FREELY_GROUPED = 6
"""Cards of a pipeline up to which every way to group neighbours is tried, across nodes too."""
WIDTHS = (2, 3, 4, 6, 8, 16)
"""Cards of a group inside a node that are tried for more cards."""
MAX_ORDERED = 4
"""Groups up to which every order of the stages is tried; of more, the cluster's."""
MAX_STAGES = 20_000
"""Stages that are costed in one search; the other divisions are left out."""
NUM_COSTED, NUM_IMPROVED = 12, 4
"""Divisions that are costed in full, and the fastest of these, which are improved."""
LEAST_HOPE = 1.25
"""Divisions are costed if their estimate is within this multiple of the best step: it knows neither deeper
warm-ups nor partial recompute."""

Grouping = tuple[tuple[Replica, ...], ...]
"""The groups of each stage: one in each pipeline."""


def expert_plans(space: Space, known: Sequence[Candidate]) -> list[Candidate]:
    """The best plans with groups, improved by moves; none that seem far slower than the fastest."""
    if not may_divide_experts(space):
        return []
    costs, options = space.costs, space.options
    limit = LEAST_HOPE * known[0].step_seconds if known else math.inf
    search = _Search(costs, options)
    divisions: list[_Division] = []
    for grouping in _groupings(space.cards, options, costs):
        for schedule, size, count in _batches(costs, options, len(grouping[0])):
            if search.num_stages > MAX_STAGES or space.is_over():
                break
            for order in _orders(grouping, options):
                found = search.divide(order, schedule, size, count)
                if found is not None and found.seconds < limit:
                    divisions.append(found)
    best = sorted(divisions, key=lambda division: division.seconds)[:NUM_COSTED]
    judged = (judge(space, _plan_of(costs, division), division.shape) for division in best)
    costed = [one for one in judged if one is not None]
    costed.sort(key=lambda one: one.step_seconds)
    moves = functools.partial(_moves, options=options)
    improved = [local.descend(space, one, moves) for one in costed[:NUM_IMPROVED]]
    return [*improved, *costed]


def _moves(plan: Plan, *, options: Options) -> Iterator[Plan]:
    yield from local.move_layers(plan)
    yield from local.move_experts(plan)
    yield from local.move_depths(plan)
    yield from local.move_batches(plan, options)
    yield from local.move_schedule(plan, options)


def may_divide_experts(space: Space) -> bool:
    """Whether plans with groups are searched."""
    allowed = space.options.divide_experts and space.options.expert_widths != (1,)
    return allowed and space.costs.problem.model.num_experts > 0 and len(space.cards) > 1


def count_experts(
    num_experts: int, fixed: Sequence[float], each: Sequence[float], most: Sequence[int]
) -> tuple[int, ...] | None:
    """How many experts each card of a group takes, so that the slowest is as fast as can be; None if they
    cannot hold all.

    Card r takes fixed[r] + n each[r] seconds for n experts, and holds most[r] of them. In the smallest time t
    in which the cards together do all, card r does those n_r that end by t: sorted by the time at which a
    card's n-th expert ends, the first `num_experts` are taken. Of equal times, the first card's.
    """
    ends = sorted(
        (base + n * seconds, r, n)
        for r, (base, seconds, limit) in enumerate(zip(fixed, each, most, strict=True))
        for n in range(1, min(limit, num_experts) + 1)
    )
    if len(ends) < num_experts:
        return None
    taken = Counter(r for _, r, _ in ends[:num_experts])
    return tuple(taken[r] for r in range(len(fixed)))


# --- groups of cards -------------------------------------------------------------------------------------


def _groupings(cards: Sequence[Card], options: Options, costs: Costs) -> Iterator[Grouping]:
    """Ways to make equal pipelines of groups, at least one of them of several cards."""
    for pipelines in _alike(cards, options):
        for ends in _cuts(pipelines[0], options):
            stages = tuple(
                tuple(tuple(own[first:end]) for own in pipelines) for first, end in itertools.pairwise(ends)
            )
            groups = [group for stage in stages for group in stage]
            if all(_may_group(group, options, costs) for group in groups):
                yield stages


def _alike(cards: Sequence[Card], options: Options) -> Iterator[list[list[Card]]]:
    """The cards of each of several equal pipelines: whole nodes, or equal parts of each node."""
    nodes = [list(own) for _, own in itertools.groupby(cards, key=lambda card: (card.node, card.type))]
    for count in options.pipelines or range(1, len(cards) // 2 + 1):
        kinds: dict[tuple[str, ...], list[list[Card]]] = {}
        for own in nodes:
            kinds.setdefault(tuple(card.type for card in own), []).append(own)
        if all(len(same) % count == 0 for same in kinds.values()):
            shares = [equal_parts(same, count) for same in kinds.values()]
            yield [[card for own in shares for node in own[d] for card in node] for d in range(count)]
        elif all(len(own) % count == 0 for own in nodes):
            shares = [equal_parts(own, count) for own in nodes]
            yield [[card for own in shares for card in own[d]] for d in range(count)]


def _cuts(cards: Sequence[Card], options: Options) -> list[tuple[int, ...]]:
    """Where the groups of a pipeline's cards begin and end, with at least one group of several cards."""
    count = len(cards)
    if count <= MAX_FREELY_GROUPED:
        inner = (c for n in range(count - 1) for c in itertools.combinations(range(1, count), n))
        return [(0, *borders, count) for borders in inner]
    found: dict[tuple[int, ...], None] = {}
    types = list(dict.fromkeys(card.type for card in cards))
    grouped = [kinds for n in range(1, len(types) + 1) for kinds in itertools.combinations(types, n)]
    for width, kinds in itertools.product(options.expert_widths or WIDTHS, grouped[:16]):
        borders = [0]
        for (_, kind), own in itertools.groupby(cards, key=lambda card: (card.node, card.type)):
            left = len(list(own))
            while left:
                step = min(width if kind in kinds else 1, left)
                borders.append(borders[-1] + step)
                left -= step
        if len(borders) <= count:
            found[tuple(borders)] = None
    return list(found)


def _may_group(group: Replica, options: Options, costs: Costs) -> bool:
    """Whether the cards have a common backend, and their number is allowed and no more than the experts."""
    if len(group) == 1:
        return True
    if options.expert_widths and len(group) not in options.expert_widths:
        return False
    backends: list[Backend] = [costs.problem.cluster.device_type(card.type).backend for card in group]
    return len(group) <= costs.problem.model.num_experts and not share_only_gloo(backends)


def _orders(grouping: Grouping, options: Options) -> Iterator[Grouping]:
    """Orders of the stages, of alike groups one."""
    if options.fixed_order or len(grouping) > MAX_ORDERED:
        yield grouping
        return
    seen: set[object] = set()
    for order in itertools.permutations(grouping):
        kind = tuple(tuple((card.type, card.node) for card in stage[0]) for stage in order)
        if kind not in seen:
            seen.add(kind)
            yield order


def _batches(costs: Costs, options: Options, num_pipelines: int) -> Iterator[tuple[ScheduleName, int, int]]:
    """(schedule, micro-batch size, micro-batches) of each of so many equal pipelines."""
    names: list[ScheduleName] = [name for name in options.schedules if name != "interleaved_1f1b"]
    for schedule, size in itertools.product(names, options.micro_batch_sizes):
        count, rest = divmod(costs.problem.global_batch_size, num_pipelines * size)
        allowed = options.num_micro_batches
        if count and not rest and (allowed is None or count in allowed):
            yield schedule, size, count


# --- layers and experts of each stage --------------------------------------------------------------------


@dataclass(frozen=True)
class _Stage:
    """What a group does with some layers."""

    seconds: float
    recompute: Recompute
    counts: tuple[int, ...]


@dataclass(frozen=True)
class _Division:
    """Layers and experts of each stage, and the estimated step."""

    shape: Shape
    bounds: tuple[int, ...]
    stages: tuple[_Stage, ...]
    seconds: float


@dataclass(frozen=True)
class _Place:
    """Where a stage is in its pipeline, and what its memory depends on."""

    micro_batch_size: int
    num_pipelines: int
    in_flight: int
    first: bool
    last: bool
    sharded: bool


class _Search:
    """Stages that were costed, each once."""

    def __init__(self, costs: Costs, options: Options) -> None:
        self.costs, self.options = costs, options
        self.num_stages = 0
        self._stages: dict[object, _Stage | None] = {}
        self._most: dict[object, int] = {}

    def divide(self, grouping: Grouping, schedule: ScheduleName, size: int, count: int) -> _Division | None:
        """The layers of each stage, so that the slowest is fastest, then their sum; None if nothing fits."""
        depth, num_layers = len(grouping), self.costs.problem.model.num_layers
        if depth > num_layers:
            return None
        sharded = self.options.sharded[0]
        # By end: seconds of the slowest stage and of all, and the ends and stages that take them.
        best: dict[int, tuple[tuple[float, float], tuple[int, ...], tuple[_Stage, ...]]]
        best = {0: ((0.0, 0.0), (), ())}
        longest = num_layers - depth + 1
        for s, groups in enumerate(grouping):
            deep = in_flight(schedule, stage=s, num_stages=depth, num_micro_batches=count)
            place = _Place(size, len(groups), deep, s == 0, s == depth - 1, sharded)
            rows = [None, *(self._stage(groups, place, layers) for layers in range(1, longest + 1))]
            after: dict[int, tuple[tuple[float, float], tuple[int, ...], tuple[_Stage, ...]]] = {}
            for end in range(s + 1, num_layers + 1):
                for layers in range(1, min(end - s, longest) + 1):
                    stage, before = rows[layers], best.get(end - layers)
                    if stage is None or before is None:
                        continue
                    (slowest, total), ends, stages = before
                    seconds = max(slowest, stage.seconds), total + stage.seconds
                    if end not in after or seconds < after[end][0]:
                        after[end] = seconds, (*ends, end), (*stages, stage)
            best = after
        if num_layers not in best:
            return None
        (slowest, total), ends, stages = best[num_layers]
        shape = Shape(
            schedule=schedule,
            micro_batch_size=size,
            num_micro_batches=count,
            slots=tuple(tuple((group,) for group in groups) for groups in grouping),
            sharded=sharded,
        )
        # Units count the embedding before the layers.
        bounds = (0, *(end + 1 for end in ends[:-1]), num_layers + 2)
        return _Division(shape, bounds, stages, (count - 1) * slowest + total)

    def _stage(self, groups: tuple[Replica, ...], place: _Place, layers: int) -> _Stage | None:
        """The fastest recompute and counts of a stage with so many layers; None if none fits."""
        kinds = tuple(tuple((card.type, card.node) for card in group) for group in groups)
        key = (kinds, place, layers)
        if key not in self._stages:
            self.num_stages += 1
            made = (self._with_recompute(groups, place, layers, kind) for kind in self.options.recompute)
            fitting = [stage for stage in made if stage is not None]
            self._stages[key] = min(fitting, key=lambda stage: stage.seconds, default=None)
        return self._stages[key]

    def _with_recompute(
        self, groups: tuple[Replica, ...], place: _Place, layers: int, recompute: Recompute
    ) -> _Stage | None:
        model, group = self.costs.problem.model, groups[0]
        fixed: list[float] = []
        each: list[float] = []
        for card in group:
            none, whole = (self._of(card, place, recompute, experts) for experts in (0, model.num_experts))
            ends = [none.units[0]] * place.first + [none.units[-1]] * place.last
            fixed.append(layers * none.layer.seconds + sum(u.seconds for u in ends))
            each.append(layers * (whole.layer.seconds - none.layer.seconds) / model.num_experts)
        most = [self._most_experts(card, len(group), place, layers, recompute) for card in group]
        if min(most) < 0:
            return None
        counts = count_experts(model.num_experts, fixed, each, most)
        if counts is None:
            return None
        slowest = max(base + n * seconds for base, n, seconds in zip(fixed, counts, each, strict=True))
        rings = [self.costs.expert_ring_seconds(own, place.micro_batch_size) for own in groups]
        return _Stage(
            slowest + layers * max(2 * hidden + small for hidden, small in rings), recompute, counts
        )

    def _of(self, card: Card, place: _Place, recompute: Recompute, experts: int) -> CardCosts:
        return self.costs.of_experts(card.type, place.micro_batch_size, recompute, experts)

    def _most_experts(self, card: Card, width: int, place: _Place, layers: int, recompute: Recompute) -> int:
        """The most experts of each of so many layers that fit on a card of a group; -1 if no layer fits."""
        key = (card.type, width, place, layers, recompute)
        if key not in self._most:
            counts = range(self.costs.problem.model.num_experts + 1)
            over = functools.partial(self._is_over, card, width, place, layers, recompute)
            self._most[key] = bisect.bisect_left(counts, True, key=over) - 1
        return self._most[key]

    def _is_over(
        self, card: Card, width: int, place: _Place, layers: int, recompute: Recompute, experts: int
    ) -> bool:
        own, none = (self._of(card, place, recompute, n) for n in (experts, 0))
        device = self.costs.problem.cluster.device_type(card.type)
        units = [own.units[0]] * place.first + [own.layer] * layers + [own.units[-1]] * place.last
        away = layers * (own.layer.optimizer_bytes - none.layer.optimizer_bytes)
        total = sum(unit.optimizer_bytes for unit in units)
        owners = place.num_pipelines if place.sharded else 1
        others = owners * width if place.sharded else 1
        is_tied = self.costs.problem.model.tie_embeddings
        copied = self.costs.problem.reduce_copy_share if place.num_pipelines * width > 1 else 0.0
        optimizer = ((total - away) / others + away / owners) / total if total else 1.0
        memory = stage_memory(
            units,
            Ends(place.first, place.last, place.first and place.last and is_tied),
            in_flight=place.in_flight,
            boundary_bytes=own.boundary_bytes,
            reserved_bytes=float(device.reserved),
            shares=StateShares(optimizer=optimizer, packed=copied),
        )
        return memory.total > self.costs.problem.usable_bytes(card.type)


def _plan_of(costs: Costs, division: _Division) -> Plan:
    """The plan of a division, the counts of each group in it."""
    kinds: list[Recompute] = [stage.recompute for stage in division.stages]
    order = range(len(kinds))
    plan = make_plan(costs, division.shape, order=order, bounds=division.bounds, recompute=kinds)
    pipelines: list[PipelinePlan] = []
    for pipeline in plan.pipelines:
        counts = (own.counts if len(own.counts) > 1 else None for own in division.stages)
        stages = zip(pipeline.stages, counts, strict=True)
        pipelines.append(replace(pipeline, stages=tuple(replace(s, experts=own) for s, own in stages)))
    return replace(plan, pipelines=tuple(pipelines))
