"""Plans that are no single cutting problem: unlike pipelines side by side, and virtual stages."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.planner.candidates import (
    Options,
    PipelineCut,
    Place,
    Shape,
    assemble_plan,
    stage_recompute,
)
from yuan_train.planner.orders import MAX_SMALL_SLOTS, seed_orders, sketch, slot_classes
from yuan_train.planner.outlook import HOPELESS, outlook_seconds
from yuan_train.planner.partition import Cut, StageTables, make_cut, simulate_cuts, threshold_bounds
from yuan_train.planner.problem import make_instance
from yuan_train.planner.setting import Costs

MAX_GROUPS = 16
"""Pipelines of unlike cards that are tried at most."""
NUM_ROUNDS = 2
"""How often the batch is shared out again after the pipelines were cut for their shares."""
CHUNKS = (2, 3)
"""Virtual stages per worker that are tried."""


# --- unlike pipelines ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """One pipeline to be, cut for some number of micro-batches."""

    places: tuple[Place, ...]
    cut: Cut
    period_seconds: float
    fill_seconds: float

    def seconds(self, num_micro_batches: int) -> float:
        return self.fill_seconds + (num_micro_batches - 1) * self.period_seconds


def mix_pipelines(
    costs: Costs, cards: Sequence[Card], options: Options, *, limit_seconds: float
) -> Iterator[Plan]:
    """Plans whose pipelines have unlike cards, each cut for itself, the batch shared by their speed; none in
    which a stage alone has work for longer than the limit."""
    for parts in deal_unlike(costs, cards, options):
        if _outlook(costs, parts, options) > HOPELESS * limit_seconds:
            continue
        shared = _share_out(costs, parts, options)
        if shared is not None and shared[0] < limit_seconds:
            yield shared[1]


def deal_unlike(costs: Costs, cards: Sequence[Card], options: Options) -> Iterator[tuple[Shape, ...]]:
    """Ways to make unlike pipelines: the shape of each, the batch shared out evenly but for the rest."""
    allowed = options.pipelines
    for schedule, size in itertools.product(options.schedules, options.micro_batch_sizes):
        total, rest = divmod(costs.setting.global_batch_size, size)
        if rest or schedule == "interleaved_1f1b" or options.num_micro_batches is not None:
            continue
        for deal in _deals(cards, options):
            if len(deal) > min(total, MAX_GROUPS) or (allowed is not None and len(deal) not in allowed):
                continue
            yield tuple(
                Shape(
                    schedule=schedule,
                    micro_batch_size=size,
                    num_micro_batches=total // len(deal) + (i < total % len(deal)),
                    slots=tuple((place,) for place in places),
                    sharded=options.sharded[0],
                    peers=len(deal),
                )
                for i, places in enumerate(deal)
            )


def _deals(cards: Sequence[Card], options: Options) -> list[list[list[Place]]]:
    """Ways to deal cards to unlike pipelines: by type, by node, and round, so that none is left over."""
    types: dict[str, list[Card]] = {}
    nodes: dict[str, list[Card]] = {}
    for card in cards:
        types.setdefault(card.type, []).append(card)
        nodes.setdefault(card.node, []).append(card)
    ways: list[list[list[Card]]] = [list(types.values()), list(nodes.values())]
    for count in options.pipelines or (2, 3, 4):
        turn = [list(cards[i::count]) for i in range(count)]
        ways.append([part for part in turn if part])
    result: list[list[list[Place]]] = []
    for way in ways:
        for width in options.tensor:
            deal = [_grouped(part, width, use_all=options.use_all_devices) for part in way]
            if len(deal) > 1 and all(deal) and deal not in result:
                result.append(deal)
    return result


def _grouped(cards: Sequence[Card], width: int, *, use_all: bool) -> list[Place]:
    places: list[Place] = []
    for _, node in itertools.groupby(cards, key=lambda card: (card.node, card.type)):
        members = list(node)
        whole = len(members) // width
        if use_all and whole * width != len(members):
            return []
        places += [(tuple(members[i * width : (i + 1) * width]),) for i in range(whole)]
    return places


def _outlook(costs: Costs, parts: Sequence[Shape], options: Options) -> float:
    """About the step if the batch is shared by the pipelines' speeds, as each promises by itself."""
    rates = [part.num_micro_batches / max(outlook_seconds(costs, part, options), 1e-300) for part in parts]
    return sum(part.num_micro_batches for part in parts) / max(sum(rates), 1e-300)


def _share_out(costs: Costs, shapes: Sequence[Shape], options: Options) -> tuple[float, Plan] | None:
    """Cut each pipeline for its share of the batch, share again by their speeds: (seconds of work of the
    busiest stage, plan); None if a pipeline does not fit."""
    total = sum(shape.num_micro_batches for shape in shapes)
    shares = [total // len(shapes)] * len(shapes)
    parts: list[_Part] = []
    for _ in range(NUM_ROUNDS):
        known: dict[tuple[object, ...], _Part | None] = {}
        parts = []
        for shape, share in zip(shapes, shares, strict=True):
            places = tuple(slot[0] for slot in shape.slots)
            key = (tuple((p[0][0].type, p[0][0].node, len(p[0])) for p in places), share)
            if key not in known or known[key] is None:
                known[key] = _cut(costs, replace(shape, num_micro_batches=share), options)
            part = known[key]
            if part is None:
                return None
            parts.append(replace(part, places=places))
        shares = _shares(parts, total)
    cuts = [
        PipelineCut(
            micro_batch_size=shapes[0].micro_batch_size,
            num_micro_batches=share,
            places=tuple(part.places[slot] for slot in part.cut.order),
            bounds=part.cut.bounds,
            recompute=stage_recompute(
                part.cut.bounds, part.cut.choices, options.recompute, costs.setting.model.num_layers
            ),
        )
        for part, share in zip(parts, shares, strict=True)
    ]
    busiest = max(share * part.period_seconds for part, share in zip(parts, shares, strict=True))
    return busiest, assemble_plan(costs, cuts, schedule=shapes[0].schedule, sharded=shapes[0].sharded)


def _cut(costs: Costs, shape: Shape, options: Options) -> _Part | None:
    places, share = tuple(slot[0] for slot in shape.slots), shape.num_micro_batches
    instance = make_instance(costs, shape, options)
    if len(places) > MAX_SMALL_SLOTS or instance.num_units > 64:
        drawn = sketch(instance)
        if not drawn.plain:
            return None
        tables = drawn.tables
        (order, bounds), seconds = next(iter(drawn.plain.items()))
        best = make_cut(tables, order, bounds, seconds)
    else:
        tables = StageTables(instance)
        found = _by_thresholds(tables)
        if found is None:
            return None
        best = found
    spans = zip(tables.lines(best.order), best.bounds, best.bounds[1:], strict=False)
    work = [float(line[a, b]) for line, a, b in spans]
    period = max(max(work), 1e-12)
    return _Part(places, best, period, max(best.step_seconds - (share - 1) * period, sum(work)))


def _by_thresholds(tables: StageTables) -> Cut | None:
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


def _shares(parts: Sequence[_Part], total: int) -> list[int]:
    """Micro-batches of each pipeline, so that the last one is done as early as can be: one at a time to the
    pipeline that would then be done first."""
    shares = [1] * len(parts)
    for _ in range(total - len(parts)):
        i = min(range(len(parts)), key=lambda i: (parts[i].seconds(shares[i] + 1), i))
        shares[i] += 1
    return shares


# --- virtual stages --------------------------------------------------------------------------------------


def split_stages(plan: Plan) -> Iterator[Plan]:
    """The same cards under interleaved_1f1b: each worker's layers in several chunks, in rounds."""
    for chunks in CHUNKS:
        pipelines = [_split(pipeline, chunks) for pipeline in plan.pipelines]
        whole = [pipeline for pipeline in pipelines if pipeline is not None]
        if len(whole) == len(pipelines):
            yield replace(plan, schedule="interleaved_1f1b", pipelines=tuple(whole), forecast=None)


def _split(pipeline: PipelinePlan, chunks: int) -> PipelinePlan | None:
    if len(pipeline.stages) < 2 or any(len(stage.replicas) > 1 for stage in pipeline.stages):
        return None
    stages: list[StagePlan] = []
    first = 0
    last = len(pipeline.stages) - 1
    for chunk in range(chunks):
        for s, stage in enumerate(pipeline.stages):
            size, rest = divmod(stage.num_layers, chunks)
            count = size + (chunk < rest)
            ends = (s == 0 and chunk == 0) or (s == last and chunk == chunks - 1)
            if not count and not ends:
                return None
            stages.append(
                replace(
                    stage,
                    layers=(first, first + count),
                    embedding=s == 0 and chunk == 0,
                    head=s == last and chunk == chunks - 1,
                )
            )
            first += count
    return replace(pipeline, stages=tuple(stages))
