"""The finalists of a search: candidates are ranked, and the most promising ones are polished."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.search.candidate import Candidate
from yuan_train.planner.search.descent import Budget
from yuan_train.planner.search.drafts import searches_drafts
from yuan_train.planner.search.polish import (
    FEW_CARDS,
    Realised,
    polish_plan,
    polished_estimate,
    restructure_plan,
    under_schedule,
)
from yuan_train.planner.search.shapes import Options, Shape

MAX_FINALISTS = 100
"""Fastest candidates that are kept when candidates are ranked."""
NUM_POLISHED, NUM_PROMISING = 4, 12
"""Plans that are polished: the fastest ones, and those with the best `polished_estimate`."""
PROMISING_FACTOR = 1.05
"""A plan may be polished if its estimate is within this multiple of the best step: estimates are a few
percent high, because they count the stages after the slowest one in full."""
MAX_RESTRUCTURED_CARDS = 56
"""Cards up to which the structure of plans is changed, and the larger budget below holds."""
POLISH_WORK, POLISH_WORK_PER_CARD = 4_000_000, 4_000
"""Budget of all polishes on few cards, and for each card of more; see `descent.Budget`."""
RESTRUCTURE_WORK = 12_000_000
"""Budget of all changes of structure, with the polishes that they bring, on few cards; twice that on more,
for each plan goes two ways there."""
NUM_RESTRUCTURED, MOST_RESTRUCTURED = 3, 6
"""Polished plans whose structure is changed; the same on few cards, with the fastest of other kinds."""
WORTH_LEAVING = 0.03
"""What a plan must gain by default to use what has not run on CUDA yet (docs/ran_on.md): copies to hosts and
disks, and steps there."""
WORTH_RESTRUCTURING = 1.2
"""These others take at most this multiple of the best step."""


def improve(
    costs: Costs,
    ranked: Sequence[Candidate],
    cards: Sequence[Card],
    options: Options,
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """The candidates, the most promising ones polished, fastest first; as they are where drafts are searched
    from them."""
    if not ranked or searches_drafts(cards, options):
        return list(ranked)
    return rank(costs, _with_polished(costs, ranked, cards, options, stopped))


def _reshaped(shape: Shape, plan: Plan) -> Shape:
    """The shape from which a polish came to the plan, with its schedule and, if all pipelines have the same
    one, its share of the batch. The cards are those that the shape assigns, used or not."""
    (size, count), *others = dict.fromkeys(
        (pipeline.micro_batch_size, pipeline.num_micro_batches) for pipeline in plan.pipelines
    )
    reshaped = replace(shape, schedule=plan.schedule)
    if others or len(plan.pipelines) != shape.num_pipelines:
        return reshaped
    return replace(reshaped, micro_batch_size=size, num_micro_batches=count)


def _with_polished(
    costs: Costs,
    ranked: Sequence[Candidate],
    cards: Sequence[Card],
    options: Options,
    stopped: Callable[[], bool],
) -> list[Candidate]:
    """The candidates, the most promising ones polished and the best of these restructured. None is where
    the options are plain."""
    if options.plain:
        return list(ranked)
    result = list(ranked)
    # Virtual stages are not polished, and take no other plan's place.
    plain = [i for i, candidate in enumerate(ranked) if candidate.plan.schedule != "interleaved_1f1b"]
    if not plain:
        return result
    estimates = {i: polished_estimate(ranked[i].plan, ranked[i].cost) for i in plain}
    promising = sorted(plain, key=lambda i: (estimates[i], i))[:NUM_PROMISING]
    first = plain[:NUM_POLISHED]
    best = ranked[first[0]].step_seconds
    few = len(costs.problem.cluster.cards) <= MAX_RESTRUCTURED_CARDS
    work = POLISH_WORK if few else POLISH_WORK_PER_CARD * len(costs.problem.cluster.cards)
    most = work / NUM_POLISHED
    polished: list[int] = []
    for i in dict.fromkeys([*first, *promising]):
        share = min(work, most)
        budget = Budget(share, stopped)
        if not budget.is_over and (i in first or estimates[i] < PROMISING_FACTOR * best):
            plan, cost = polish_plan(costs, ranked[i].plan, ranked[i].cost, options, budget)
            work -= share - budget.work
            result[i] = replace(ranked[i], plan=plan, cost=cost)
            best = min(best, cost.step_seconds)
            polished.append(i)
    fastest = sorted(polished, key=lambda i: (result[i].step_seconds, i))
    restructures = few and options.restructures
    starts = [result[i] for i in _restructured(fastest, result, len(cards))] if restructures else []
    knowing, known = Budget(0.0, stopped), Realised()
    if starts and len(cards) <= FEW_CARDS:
        starts += _under_other_schedules(costs, starts[0], options, knowing, known)
    ways = 1 if len(cards) <= FEW_CARDS else 2
    for start in starts:
        budget = knowing.part(ways * RESTRUCTURE_WORK / NUM_RESTRUCTURED)
        plan, cost = restructure_plan(costs, start.plan, start.cost, cards, options, budget, known)
        result.append(Candidate(plan=plan, cost=cost, shape=_reshaped(start.shape, plan)))
    return result


def _restructured(fastest: Sequence[int], result: Sequence[Candidate], num_cards: int) -> list[int]:
    """Those of the polished plans whose structure is changed: the fastest, and on few cards the fastest of
    each kind, so that plans of one kind that cannot become faster take no other kind's place."""
    looks: set[object] = set()
    # Plans that differ in the names of their cards alone lead to the same.
    distinct = [i for i in fastest if not (_look(result[i]) in looks or looks.add(_look(result[i])))]
    chosen = distinct[:NUM_RESTRUCTURED]
    kinds = {_kind(result[i]) for i in chosen}
    for i in distinct[NUM_RESTRUCTURED:] if num_cards <= FEW_CARDS else ():
        near = result[i].step_seconds < WORTH_RESTRUCTURING * result[fastest[0]].step_seconds
        if near and _kind(result[i]) not in kinds and len(chosen) < MOST_RESTRUCTURED:
            kinds.add(_kind(result[i]))
            chosen.append(i)
    return chosen


def _look(candidate: Candidate) -> object:
    """The plan without the names of its cards, and its step."""
    plan = candidate.plan
    stages = [
        (
            replace(stage, replicas=((0,),)),
            [[plan.ranks[rank].type for rank in replica] for replica in stage.replicas],
        )
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    ]
    batches = [(p.micro_batch_size, p.num_micro_batches, len(p.stages)) for p in plan.pipelines]
    step = f"{candidate.step_seconds:.8e}"
    return repr((step, plan.schedule, plan.optimizer_sharding, batches, stages))


def _kind(candidate: Candidate) -> object:
    """Number of pipelines, widest group, most replicas."""
    stages = candidate.cost.stages
    widest = max(len(stage.replicas[0]) for stage in stages)
    return len(candidate.plan.pipelines), widest, max(len(stage.replicas) for stage in stages)


def _under_other_schedules(
    costs: Costs, start: Candidate, options: Options, knowing: Budget, known: Realised
) -> list[Candidate]:
    """A plan under the other schedules that the polish may choose."""
    found: list[Candidate] = []
    for schedule in options.polished_schedules:
        if schedule == "interleaved_1f1b":
            continue
        budget = knowing.part(RESTRUCTURE_WORK / NUM_RESTRUCTURED)
        priced = under_schedule(costs, start.plan, start.cost, schedule, options, budget, known)
        if priced is not None:
            found.append(Candidate(plan=priced[0], cost=priced[1], shape=_reshaped(start.shape, priced[0])))
    return found


def beside_cards(plan: Plan) -> int:
    """How much of the engine beside the cards a plan uses: 0 nothing, 1 optimizer state on hosts, 2
    activations too, 3 pages of parameters or disks."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    if any(stage.parameter_offload or stage.optimizer_disk for stage in stages):
        return 3
    if any(stage.activation_offload for stage in stages):
        return 2
    return int(any(stage.optimizer_offload for stage in stages))


def keep_to_cards(costs: Costs, ranked: Sequence[Candidate]) -> tuple[list[Candidate], Candidate | None]:
    """The plans without those that gain less than WORTH_LEAVING by what they use beside the cards, so that
    the fastest of the rest comes first; and the fastest plan, if it is not that one."""
    firsts: dict[int, Candidate] = {}
    for candidate in ranked:
        firsts.setdefault(beside_cards(candidate.plan), candidate)
    most = 0
    for level in sorted(firsts):
        seconds = firsts[level].step_seconds
        if most not in firsts or seconds * (1 + WORTH_LEAVING) <= firsts[most].step_seconds:
            most = level
    kept = [candidate for candidate in ranked if beside_cards(candidate.plan) <= most]
    return kept, None if not ranked or kept[0] is ranked[0] else ranked[0]


def rank(costs: Costs, candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest MAX_FINALISTS, fastest first; equals (to 9 digits) by fewer cards, then by `_text`. The
    fastest that uses no more beside the cards than some number (`beside_cards`) stays, however slow."""

    def seconds(candidate: Candidate) -> float:
        return candidate.step_seconds

    ordered = sorted(candidates, key=seconds)
    finalists = ordered[:MAX_FINALISTS]
    for candidate in ordered[MAX_FINALISTS:]:
        if beside_cards(candidate.plan) < min(beside_cards(one.plan) for one in finalists):
            finalists.append(candidate)
    return sorted(
        finalists,
        key=lambda c: (float(f"{seconds(c):.8e}"), len(c.plan.ranks), _text(c.plan)),
    )


def _text(plan: Plan) -> str:
    """A text that identifies a plan within a search."""
    return repr((plan.schedule, plan.optimizer_sharding, [r.device for r in plan.ranks], plan.pipelines))
