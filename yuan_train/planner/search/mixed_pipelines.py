"""Plans that are not a cut of one instance: mixed pipelines."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.instances import make_instance
from yuan_train.planner.search.relaxation import PRUNE_FACTOR, relaxed_seconds
from yuan_train.planner.search.shapes import (
    Options,
    PipelineCut,
    Shape,
    StageGroup,
    assemble_plan,
    stage_recompute,
)
from yuan_train.planner.solver.cost_tables import CostTables, make_cut
from yuan_train.planner.solver.dynamic_program import threshold_bounds
from yuan_train.planner.solver.estimate import simulate_cuts
from yuan_train.planner.solver.instance import Cut
from yuan_train.planner.solver.seeds import seed_orders, slot_classes
from yuan_train.planner.solver.sketch import sketch
from yuan_train.planner.solver.solve import MAX_SMALL_SLOTS

MAX_MIXED_PIPELINES = 16
"""Most mixed pipelines of a plan that are tried."""
NUM_ROUNDS = 2
"""How often the pipelines are cut for their shares of the batch and the batch is then divided again."""


@dataclass(frozen=True)
class _CutPipeline:
    """One pipeline of a mixed plan, cut for some number of micro-batches."""

    groups: tuple[StageGroup, ...]
    cut: Cut
    period_seconds: float
    fill_seconds: float

    def seconds(self, num_micro_batches: int) -> float:
        """Estimated step seconds for so many micro-batches."""
        return self.fill_seconds + (num_micro_batches - 1) * self.period_seconds


def mix_pipelines(
    costs: Costs, cards: Sequence[Card], options: Options, *, limit_seconds: float
) -> Iterator[Plan]:
    """Plans whose pipelines have different cards: each pipeline is cut separately, and the batch is divided
    in proportion to their speeds. Plans with a stage that is busy for `limit_seconds` or longer are left
    out."""
    for shapes in deal_mixed(costs, cards, options):
        if _relaxed_seconds(costs, shapes, options) > PRUNE_FACTOR * limit_seconds:
            continue
        divided = _divide_batch(costs, shapes, options)
        if divided is not None and divided[0] < limit_seconds:
            yield divided[1]


def deal_mixed(costs: Costs, cards: Sequence[Card], options: Options) -> Iterator[tuple[Shape, ...]]:
    """Ways to make mixed pipelines: the shape of each, with an even share of the batch; the first ones get
    one micro-batch more if it does not divide."""
    allowed = options.pipelines
    for schedule, size in itertools.product(options.schedules, options.micro_batch_sizes):
        total, rest = divmod(costs.problem.global_batch_size, size)
        if rest or schedule == "interleaved_1f1b" or options.num_micro_batches is not None:
            continue
        for pipelines in _deals(cards, options):
            if len(pipelines) > min(total, MAX_MIXED_PIPELINES) or (
                allowed is not None and len(pipelines) not in allowed
            ):
                continue
            yield tuple(
                Shape(
                    schedule=schedule,
                    micro_batch_size=size,
                    num_micro_batches=total // len(pipelines) + (i < total % len(pipelines)),
                    slots=tuple((group,) for group in groups),
                    sharded=options.sharded[0],
                    peers=len(pipelines),
                )
                for i, groups in enumerate(pipelines)
            )


def _deals(cards: Sequence[Card], options: Options) -> list[list[list[StageGroup]]]:
    """Ways to assign the cards to mixed pipelines: by type, by node, and round-robin.

    Each way lists the stage groups of every pipeline.
    """
    types: dict[str, list[Card]] = {}
    nodes: dict[str, list[Card]] = {}
    for card in cards:
        types.setdefault(card.type, []).append(card)
        nodes.setdefault(card.node, []).append(card)
    ways: list[list[list[Card]]] = [list(types.values()), list(nodes.values())]
    for count in options.pipelines or (2, 3, 4):
        turns = [list(cards[i::count]) for i in range(count)]
        ways.append([own for own in turns if own])
    result: list[list[list[StageGroup]]] = []
    for way in ways:
        for width in options.tensor:
            pipelines = [_single_groups(own, width, use_all=options.use_all_devices) for own in way]
            if len(pipelines) > 1 and all(pipelines) and pipelines not in result:
                result.append(pipelines)
    return result


def _single_groups(cards: Sequence[Card], width: int, *, use_all: bool) -> list[StageGroup]:
    """Stage groups of one replica each, inside a node; none if `use_all` is set and cards are left over."""
    groups: list[StageGroup] = []
    for _, node in itertools.groupby(cards, key=lambda card: (card.node, card.type)):
        members = list(node)
        num_whole = len(members) // width
        if use_all and num_whole * width != len(members):
            return []
        groups += [(tuple(members[i * width : (i + 1) * width]),) for i in range(num_whole)]
    return groups


def _relaxed_seconds(costs: Costs, shapes: Sequence[Shape], options: Options) -> float:
    """Estimated step seconds if the batch is divided by the speeds of the pipelines' relaxed estimates."""
    rates = [
        shape.num_micro_batches / max(relaxed_seconds(costs, shape, options), 1e-300) for shape in shapes
    ]
    return sum(shape.num_micro_batches for shape in shapes) / max(sum(rates), 1e-300)


def _divide_batch(costs: Costs, shapes: Sequence[Shape], options: Options) -> tuple[float, Plan] | None:
    """Cut each pipeline for its share of the batch, then divide the batch again by their speeds.

    Returns (seconds of work of the busiest stage, plan), or None if a pipeline does not fit.
    """
    total = sum(shape.num_micro_batches for shape in shapes)
    shares = [total // len(shapes)] * len(shapes)
    parts: list[_CutPipeline] = []
    for _ in range(NUM_ROUNDS):
        known: dict[tuple[object, ...], _CutPipeline | None] = {}
        parts = []
        for shape, share in zip(shapes, shares, strict=True):
            groups = tuple(slot[0] for slot in shape.slots)
            key = (tuple((g[0][0].type, g[0][0].node, len(g[0])) for g in groups), share)
            if key not in known or known[key] is None:
                known[key] = _cut(costs, replace(shape, num_micro_batches=share), options)
            part = known[key]
            if part is None:
                return None
            parts.append(replace(part, groups=groups))
        shares = _shares(parts, total)
    cuts = [
        PipelineCut(
            micro_batch_size=shapes[0].micro_batch_size,
            num_micro_batches=share,
            stage_groups=tuple(part.groups[slot] for slot in part.cut.order),
            bounds=part.cut.bounds,
            recompute=stage_recompute(
                part.cut.bounds, part.cut.choices, options.recompute, costs.problem.model.num_layers
            ),
        )
        for part, share in zip(parts, shares, strict=True)
    ]
    busiest = max(share * part.period_seconds for part, share in zip(parts, shares, strict=True))
    return busiest, assemble_plan(costs, cuts, schedule=shapes[0].schedule, sharded=shapes[0].sharded)


def _cut(costs: Costs, shape: Shape, options: Options) -> _CutPipeline | None:
    """The best cut of a shape of one pipeline, sketched if it is large; None if none fits."""
    groups, share = tuple(slot[0] for slot in shape.slots), shape.num_micro_batches
    instance = make_instance(costs, shape, options)
    if len(groups) > MAX_SMALL_SLOTS or instance.num_units > 64:
        sketched = sketch(instance)
        if not sketched.plain:
            return None
        tables = sketched.tables
        (order, bounds), seconds = next(iter(sketched.plain.items()))
        best = make_cut(tables, order, bounds, seconds)
    else:
        tables = CostTables(instance)
        found = _by_thresholds(tables)
        if found is None:
            return None
        best = found
    spans = zip(tables.stage_seconds(best.order), best.bounds, best.bounds[1:], strict=False)
    work = [float(table[a, b]) for table, a, b in spans]
    period = max(max(work), 1e-12)
    return _CutPipeline(groups, best, period, max(best.step_seconds - (share - 1) * period, sum(work)))


def _by_thresholds(tables: CostTables) -> Cut | None:
    """The fastest simulated cut of the first seed orders, by `threshold_bounds`; None if none fits."""
    best: Cut | None = None
    for order in seed_orders(tables, slot_classes(tables.instance))[:24]:
        bounds = threshold_bounds(tables, order, limit=6)
        if not bounds:
            continue
        seconds = simulate_cuts(tables, np.tile(np.array(order), (len(bounds), 1)), np.array(bounds))
        i = int(seconds.argmin())
        if best is None or float(seconds[i]) < best.step_seconds * (1 - 1e-12):
            best = make_cut(tables, order, bounds[i], float(seconds[i]))
    return best


def _shares(parts: Sequence[_CutPipeline], total: int) -> list[int]:
    """Micro-batches of each pipeline, so that the last pipeline ends as early as possible: each further one
    goes to the pipeline that would then end first."""
    shares = [1] * len(parts)
    for _ in range(total - len(parts)):
        i = min(range(len(parts)), key=lambda i: (parts[i].seconds(shares[i] + 1), i))
        shares[i] += 1
    return shares
