"""What is searched, and plans found there: whether they are wanted, their cost, and which is taken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.errors import PlanError
from yuan_train.config.express import is_expressible
from yuan_train.config.plan import Plan, StagePlan, unlike_owners
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.shapes import Options, Shape

MAX_FINALISTS = 100
"""Fastest candidates that are kept when candidates are ranked."""


@dataclass(frozen=True)
class TimeLimit:
    """When the search has to end."""

    clock: Callable[[], float]
    started: float
    seconds: float

    def left(self) -> float:
        """Seconds; negative when it is over."""
        return self.seconds - (self.clock() - self.started)


@dataclass(frozen=True)
class Space:
    """What is searched, and until when."""

    costs: Costs
    cards: Sequence[Card]
    """That may be used."""
    options: Options
    limit: TimeLimit

    def is_over(self, share: float = 1.0) -> bool:
        """Whether that share of the time for it is."""
        return self.limit.clock() - self.limit.started > share * self.limit.seconds


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, its cost, and the shape that it is a cut of."""

    plan: Plan
    cost: PlanCost
    shape: Shape

    @property
    def step_seconds(self) -> float:
        return self.cost.step_seconds


def shape_of_plan(plan: Plan, cost: PlanCost) -> Shape:
    """The shape of a plan's pipelines, or of the first one where they are not of as many stages and alike."""
    first = plan.pipelines[0]
    kinds = {(own.micro_batch_size, own.num_micro_batches, len(own.stages)) for own in plan.pipelines}
    count = len(plan.pipelines) if len(kinds) == 1 else 1
    groups = [[tuple(own.replicas) for own in cost.stages if own.pipeline == d] for d in range(count)]
    return Shape(
        schedule=plan.schedule,
        micro_batch_size=first.micro_batch_size,
        num_micro_batches=first.num_micro_batches,
        slots=tuple(zip(*groups, strict=True)),
        sharded=plan.optimizer_sharding,
    )


def judge(space: Space, plan: Plan, shape: Shape | None = None) -> Candidate | None:
    """The plan with cost and shape (else its first pipeline's); None if it is not wanted or does not fit."""
    if not is_wanted(plan, space.options):
        return None
    cost = cost_plan(space.costs, plan)
    return Candidate(plan=plan, cost=cost, shape=shape or shape_of_plan(plan, cost)) if cost.fits else None


def is_wanted(plan: Plan, options: Options) -> bool:
    """Whether a plan keeps the search keys and violates no constraint, no weights are stepped by unlike
    owners unless nothing else is asked for or cards share experts, and the engine that the options name can
    run it."""
    if not _keeps_keys(plan, options) or next(validate_plan(plan), None) is not None:
        return False
    # With pages of a host no state is sharded.
    spared = bool(plan.paged_layers) or plan.divides_experts
    if True in options.sharded and not spared and unlike_owners(plan) is not None:
        return False
    return not options.expressible or is_expressible(plan)


def _keeps_keys(plan: Plan, options: Options) -> bool:
    """Whether a plan has only what the search keys allow; hosts, disks and idle cards are not asked for."""
    counts, stages = options.num_micro_batches, plan.stages
    widths = {len(replica) for stage in stages for replica in stage.replicas}
    return (
        (plan.divides_experts or widths <= set(options.tensor))
        and (options.any_replicas or {len(stage.replicas) for stage in stages} <= set(options.replicas))
        and {stage.recompute for stage in stages if stage.num_blocks} <= set(options.recompute)
        and plan.schedule in options.all_schedules
        and (options.pipelines is None or len(plan.pipelines) in options.pipelines)
        and {p.micro_batch_size for p in plan.pipelines} <= set(options.all_sizes)
        and (counts is None or {p.num_micro_batches for p in plan.pipelines} <= set(counts))
    )


def beside_cards(plan: Plan) -> int:
    """What a plan uses beside cards: 0 nothing, 1 state on hosts, 2 activations too, 3 pages or disks."""
    tiers = (
        any(stage.optimizer_offload for stage in plan.stages),
        any(stage.activation_offload for stage in plan.stages),
        any(stage.parameter_offload or stage.optimizer_disk for stage in plan.stages),
    )
    return max(number * used for number, used in enumerate(tiers, 1))


def rank(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The fastest MAX_FINALISTS, fastest first; equals (to 9 digits) by fewer cards, then by their text. The
    fastest that uses no more beside the cards than some number (`beside_cards`) stays, however slow."""
    ordered = sorted(candidates, key=lambda c: c.step_seconds)
    finalists = ordered[:MAX_FINALISTS]
    for candidate in ordered[MAX_FINALISTS:]:
        if beside_cards(candidate.plan) < min(beside_cards(one.plan) for one in finalists):
            finalists.append(candidate)
    return sorted(finalists, key=lambda c: (float(f"{c.step_seconds:.8e}"), len(c.plan.ranks), _text(c.plan)))


def _text(plan: Plan) -> str:
    """A text that identifies a plan within a search."""
    return repr((plan.schedule, plan.optimizer_sharding, [r.device for r in plan.ranks], plan.pipelines))


# --- near ties --------------------------------------------------------------------------------------------

WORTH_LEAVING = 0.03
"""What a plan must gain by default to use what has not run on CUDA yet (docs/ran_on.md): copies to hosts and
disks, and steps there."""
NAMES = (
    "kinds of pipelines",
    "stages that pass on alone",
    "schedules beside 1f1b",
    "stages with state or activations on hosts",
    "unlike widths of a type",
    "unequal shares",
    "warm-ups of their own",
    "cards",
)
"""What plans are compared by, the first that differs."""


def keep_to_cards(ranked: Sequence[Candidate]) -> tuple[list[Candidate], Candidate | None]:
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


def burdens(plan: Plan) -> tuple[int, ...]:
    """How much a plan has of each of NAMES."""
    stages = plan.stages
    types = [entry.type for entry in plan.ranks]
    kinds = {
        tuple((s.layers, tuple(types[rank] for rank in s.ranks), len(s.replicas)) for s in pipeline.stages)
        for pipeline in plan.pipelines
    }
    widths = {(types[replica[0]], len(replica)) for stage in stages for replica in stage.replicas}
    batches = {(pipeline.micro_batch_size, pipeline.num_micro_batches) for pipeline in plan.pipelines}
    away = (s.optimizer_offload or s.activation_offload or s.parameter_offload for s in stages)
    return (
        len(kinds),
        sum(not stage.num_layers and not stage.embedding and not stage.head for stage in stages),
        int(plan.schedule != "1f1b"),
        sum(map(bool, away)),
        len(widths) - len({name for name, _ in widths}),
        len(batches) - 1 + len(set(plan.optimizer_shares)) - 1,
        sum(stage.in_flight is not None for stage in stages),
        len(plan.ranks),
    )


def prefer_simple(costs: Costs, ranked: Sequence[Candidate], options: Options) -> list[Candidate]:
    """The plans, first the simplest within `options.simplicity` of the fastest, then those slower than it."""
    limit = ranked[0].step_seconds * (1.0 + options.simplicity)
    near = [candidate for candidate in ranked if candidate.step_seconds <= limit]
    near += _without(costs, min(near, key=_burden), options, limit)
    best = min(near, key=_burden)
    return [best, *(other for other in ranked if other.step_seconds > best.step_seconds)]


def _burden(candidate: Candidate) -> tuple[tuple[int, ...], float]:
    return burdens(candidate.plan), candidate.step_seconds


def _without(costs: Costs, start: Candidate, options: Options, limit: float) -> Iterator[Candidate]:
    """Plans made of one by leaving out what it has more than it must, one thing after the other, each as long
    as it is lawful, fits and takes at most `limit` seconds."""
    changes: list[Callable[[StagePlan], StagePlan]] = [
        lambda stage: replace(stage, activation_offload=0, resident_parts=None, fetch_ahead=None),
        lambda stage: replace(stage, optimizer_offload=0.0, optimizer_disk=0.0),
        lambda stage: replace(stage, optimizer_share=1.0),
        lambda stage: replace(stage, in_flight=None),
    ]
    for change in changes:
        pipelines = (replace(own, stages=tuple(map(change, own.stages))) for own in start.plan.pipelines)
        plan = replace(start.plan, pipelines=tuple(pipelines))
        if plan == start.plan or not is_wanted(plan, options):
            continue
        try:
            cost = cost_plan(costs, plan)
        except PlanError:  # such as too few resident parts at the schedule's own depths
            continue
        if cost.fits and cost.step_seconds <= limit:
            start = replace(start, plan=plan, cost=cost)
            yield start


def simplicity_note(best: Candidate, fastest: Candidate) -> tuple[str, ...]:
    """What the fastest plan has more of than the one that is taken, and what it would gain."""
    if best.step_seconds <= fastest.step_seconds:
        return ()
    pairs = zip(NAMES, burdens(fastest.plan), burdens(best.plan), strict=True)
    more = (f"{name} {theirs} instead of {own}" for name, theirs, own in pairs if theirs > own)
    gain = f"{best.step_seconds / fastest.step_seconds - 1:.2%}"
    if gain == f"{0:.2%}":
        return ()
    return (f"{gain} faster with {', '.join(more)}; search.simplicity: 0 takes it",)


def passed_over(best: Candidate, faster: Candidate | None) -> tuple[str, ...]:
    """What a plan gains that was not chosen for what it uses beside the cards, and the key that allows it."""
    if faster is None:
        return ()
    gain = f"{best.step_seconds / faster.step_seconds - 1:.1%}"
    if gain == f"{0:.1%}":
        return ()
    level = beside_cards(faster.plan)
    tiers = ("optimizer", "activations", "parameters", "disk")[: level if level < 3 else 4]
    return (
        f"{gain} faster with more beside the cards, which has not run on CUDA (docs/ran_on.md) and is "
        f"chosen only where it is needed or gains {WORTH_LEAVING:.0%}; search.offload: "
        f"[{', '.join(tiers)}] takes it",
    )
