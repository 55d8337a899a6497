"""Layers in pages of the hosts, for models larger than the cards (`search.offload: [parameters]`).

What the engine runs: one pipeline of single cards with full recompute, without a sharded optimizer. For some
sets and orders of the cards, the layers are dealt by speed and moved, one at a time, from stage to stage as
long as that first lets more fit, then makes the step shorter. Each stage has the fewest pages with which it
fits, with the smallest fraction of the other state on its host. Nothing here is proven.

Of any plan, `with_disks` moves optimizer state to the disks of nodes whose hosts have no room for it.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.costs.workload import PlanProblem, slot_bytes
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan, cost_stages
from yuan_train.planner.evaluate.stage_cost import StageCost, change_stage
from yuan_train.planner.search.candidate import Candidate, Space
from yuan_train.planner.search.shapes import Options, PipelineCut, Shape, assemble_plan, deal_layers

MOST_CARDS, FEW_CARDS = 16, 3
"""Cards beyond which no pages are tried; up to the second, every order of every set of types is."""
SLOTS = (3, 2, 1)
STEPS = 1000
"""Fractions of state on hosts and disks are multiples of one over this."""
GROUPS = (1, 1 / 2, 1 / 4, 0)
"""Of a pipeline's micro-batches; 0: one micro-batch."""

Worth = tuple[float, float]
"""Bytes that do not fit, and seconds; less is better."""


@dataclass(frozen=True)
class _Priced:
    plan: Plan
    cost: PlanCost | None
    """None if some stage does not fit."""
    worth: Worth


def check_pages(problem: PlanProblem, options: Options) -> None:
    """Raises ConfigError, with every fault, if `search.offload` names parameters that no plan may page."""
    if not options.offload_parameters:
        return
    faults = [fault for fault, is_one in _faults(problem, options) if is_one]
    if faults:
        raise ConfigError(
            "search.offload: parameters, but pages are written for dense models in one pipeline of single "
            f"cards with full recompute, and {'; '.join(faults)}; leave parameters out, or change that"
        )


def _faults(problem: PlanProblem, options: Options) -> Iterator[tuple[str, bool]]:
    yield f"the model has {problem.model.num_experts} experts", bool(problem.model.num_experts)
    yield "search.recompute has no full", "full" not in options.recompute
    yield "search.pipelines has no 1", options.pipelines is not None and 1 not in options.pipelines
    yield "search.tensor has no 1", 1 not in options.tensor
    yield "search.replicas has no 1", 1 not in options.replicas
    yield "search.schedule has no 1f1b", "1f1b" not in options.all_schedules
    yield "search.optimizer_sharding has no false", False not in options.sharded
    yield "train.compile makes each layer one piece", problem.compile
    yield "the profile is of another program", options.plain


def paged_plans(space: Space, known: Sequence[Candidate]) -> list[Candidate]:
    """Plans with pages that are faster than those known: the best of each order and micro-batch size."""
    costs, cards, options = space.costs, space.cards, space.options
    found: list[Candidate] = []
    limit_seconds = known[0].step_seconds if known else math.inf
    if not options.offload_parameters or len(cards) > MOST_CARDS:
        return found
    for order, size in itertools.product(_orders(cards, options), options.micro_batch_sizes):
        count, rest = divmod(costs.problem.global_batch_size, size)
        wanted = options.num_micro_batches is None or count in options.num_micro_batches
        if space.is_over() or rest or not wanted or len(order) > costs.problem.model.num_layers:
            continue
        # Of a micro-batch's layers, perfectly shared.
        least = costs.problem.model.num_layers / sum(_speeds(costs, order, size))
        if least * count >= limit_seconds:
            continue
        best = _best_of(space, order, size, count)
        if best is not None and best.cost is not None and best.cost.step_seconds < limit_seconds:
            slots = tuple((((card,),),) for card in order)
            shape = Shape(schedule="1f1b", micro_batch_size=size, num_micro_batches=count, slots=slots)
            stages = best.plan.pipelines[0].stages
            # Without pages it is another search's, which asks what hosts may hold.
            if any(stage.parameter_offload for stage in stages):
                found.append(Candidate(plan=best.plan, cost=best.cost, shape=shape))
    return found


def pages_fit(costs: Costs, cards: Sequence[Card], options: Options) -> bool:
    """Whether some plan with pages fits all of the cards: with one slot each and micro-batches one by one,
    which takes the least memory, and the layers dealt by speed, by memory or alike. False if pages do not go
    with the model or the other search keys."""
    order, size = tuple(cards), min(options.micro_batch_sizes)
    count, rest = divmod(costs.problem.global_batch_size, size)
    asked = replace(options, offload_parameters=True)
    num_layers = costs.problem.model.num_layers
    refused = any(is_one for _, is_one in _faults(costs.problem, asked))
    if refused or rest or len(order) > min(MOST_CARDS, num_layers):
        return False
    memory = [costs.problem.usable_bytes(card.type) for card in order]
    speeds = _speeds(costs, order, size)
    dealt = (deal_layers(num_layers, weights) for weights in (memory, speeds, [1.0] * len(order)))
    plans = (_plan(costs, order, layers, size, count) for layers in dealt)
    return any(_price(costs, plan, 1, 1).cost is not None for plan in plans)


def _orders(cards: Sequence[Card], options: Options) -> list[tuple[Card, ...]]:
    """Sets of the cards in orders that differ by types."""
    orders = [tuple(cards)] if options.fixed_order else [tuple(cards), tuple(reversed(cards))]
    if len(cards) <= FEW_CARDS and not options.fixed_order:
        least = len(cards) if options.use_all_devices else 1
        counts = range(len(cards), least - 1, -1)
        orders = [order for count in counts for order in itertools.permutations(cards, count)]
    distinct = {tuple((card.type, card.node) for card in order): order for order in reversed(orders)}
    return list(distinct.values())[::-1]


def _speeds(costs: Costs, order: Sequence[Card], size: int) -> list[float]:
    """Layers a second of each card."""
    return [1.0 / costs.of_replica((card,), size, "full").layer.seconds for card in order]


def _best_of(space: Space, order: Sequence[Card], size: int, count: int) -> _Priced | None:
    """The best plan of the cards in this order, over groups and slots."""
    costs = space.costs
    best: _Priced | None = None
    speeds = _speeds(costs, order, size)
    layers = deal_layers(costs.problem.model.num_layers, speeds)
    for share, slots in itertools.product(GROUPS, SLOTS):
        if space.is_over():
            break
        group = max(1, round(share * count))

        def price(layers: Sequence[int], group: int = group, slots: int = slots) -> _Priced:
            return _price(costs, _plan(costs, order, layers, size, count), group, slots)

        found = price(layers)
        while not space.is_over():
            moves = (price(moved) for moved in _moves(_layers(found.plan)))
            nearer = min(moves, key=lambda one: one.worth, default=found)
            if nearer.worth >= found.worth:
                break
            found = nearer
        if best is None or found.worth < best.worth:
            best, layers = found, _layers(found.plan)
    return best


def _moves(layers: Sequence[int]) -> Iterator[list[int]]:
    """One layer from one stage to another."""
    for giver, taker in itertools.permutations(range(len(layers)), 2):
        if layers[giver] > 1:
            yield [n - (s == giver) + (s == taker) for s, n in enumerate(layers)]


def _layers(plan: Plan) -> list[int]:
    return [stage.num_blocks for stage in plan.pipelines[0].stages]


def _plan(costs: Costs, order: Sequence[Card], layers: Sequence[int], size: int, count: int) -> Plan:
    ends = list(itertools.accumulate(layers))
    cut = PipelineCut(
        micro_batch_size=size,
        num_micro_batches=count,
        stage_groups=tuple(((card,),) for card in order),
        bounds=(0, *(end + 1 for end in ends[:-1]), ends[-1] + 2),
        recompute=("full",) * len(order),
    )
    return assemble_plan(costs, [cut], schedule="1f1b")


def _price(costs: Costs, plan: Plan, group: int, slots: int) -> _Priced:
    """The plan with the fewest pages with which each stage fits."""
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], page_group=group),))
    stages: list[StagePlan] = []
    over = 0.0
    for old in cost_stages(costs, plan):
        stage, excess = _fewest_pages(costs, plan, old, slots)
        stages.append(stage)
        over += excess
    plan = replace(plan, pipelines=(replace(plan.pipelines[0], stages=tuple(stages)),))
    # Without any page a plan takes no groups: the search has it already.
    if over or any(True for _ in validate_plan(plan)):
        return _Priced(plan, None, (over or math.inf, math.inf))
    cost = cost_plan(costs, plan)
    return _Priced(plan, cost if cost.fits else None, (0.0, cost.step_seconds if cost.fits else math.inf))


def _fewest_pages(costs: Costs, plan: Plan, old: StageCost, slots: int) -> tuple[StagePlan, float]:
    """The stage with the fewest pages with which it fits, or all, and the bytes that do not fit then."""
    counts = range(plan.pipelines[0].stages[old.stage].num_blocks)
    fewest = bisect.bisect_left(
        counts, True, key=lambda count: not _with_fraction(costs, plan, old, count, slots)[1]
    )
    return _with_fraction(costs, plan, old, fewest, slots)


def _with_fraction(
    costs: Costs, plan: Plan, old: StageCost, count: int, slots: int
) -> tuple[StagePlan, float]:
    """The stage with so many pages and the least other state on its host that fits, and bytes that do not."""
    stage = plan.pipelines[0].stages[old.stage]
    if count:
        stage = replace(stage, parameter_offload=count, page_slots=min(slots, count))
    cost = change_stage(costs, plan, old, stage)
    over = cost.memory.total - cost.capacity_bytes
    if over > 0 and cost.memory.optimizer > 0:
        fraction = min(STEPS, math.ceil(STEPS * over / cost.memory.optimizer)) / STEPS
        stage = replace(stage, optimizer_offload=fraction)
        cost = change_stage(costs, plan, old, stage)
    on_card = max(0.0, cost.memory.total - cost.capacity_bytes)
    return stage, on_card + max(0.0, cost.host_bytes - cost.host_capacity_bytes)


def with_disks(costs: Costs, plan: Plan) -> Plan:
    """The plan with the least of each host's state on its node's disk, if any, with which the rest fits."""
    pipelines = [list(pipeline.stages) for pipeline in plan.pipelines]
    slots = slot_bytes(costs.problem.precision, math.inf)
    for cost in cost_stages(costs, plan):
        own = pipelines[cost.pipeline]
        over = cost.host_bytes - cost.host_capacity_bytes
        state = cost.host_bytes - (cost.leaving.host_bytes if cost.leaving else 0.0)
        if over > 0 and state > 0 and all(map(costs.has_disk, cost.cards)):
            over += slots * sum(other.replicas == own[cost.stage].replicas for other in own)
            fraction = min(STEPS, math.ceil(STEPS * over / state)) / STEPS
            own[cost.stage] = replace(own[cost.stage], optimizer_disk=fraction)
    pairs = zip(plan.pipelines, pipelines, strict=True)
    changed = tuple(replace(pipeline, stages=tuple(stages)) for pipeline, stages in pairs)
    return replace(plan, pipelines=changed)
