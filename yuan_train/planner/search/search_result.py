"""What a search found: the plan with its forecast, the next best ones, and what the report says of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.links import unmeasured
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, make_forecast
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.search.bounds import Bound
from yuan_train.planner.search.candidate import Candidate

NUM_RUNNERS_UP = 4


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A card that the plan does not use, and why."""

    card: Card
    reason: str


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The plan found, and what the report says about it."""

    best: Candidate
    """Its plan carries the forecast."""
    runners_up: tuple[Candidate, ...]
    even_split: Candidate | None
    """The naive plan: all cards in the cluster's order, layers divided evenly; None if there is none."""
    no_even_split: str
    """Why there is no even split; empty if there is one."""
    left_out: tuple[LeftOut, ...]
    lower_bound_seconds: float
    """No plan that the search might make takes less."""
    bound: Bound | None
    """How that is known; None if the plan is proven fastest."""
    exact: bool
    """Whether it is proven that no other plan of the searched space is faster in the simulation."""
    stopped: bool
    """Whether the time limit ended the search."""
    num_simulated: int
    notes: tuple[str, ...]
    """Sources of the numbers, one line per type of card."""


def runners_up(ranked: Sequence[Candidate]) -> tuple[Candidate, ...]:
    """The next best: one plan of each other `_family`, then other cuts of the same families."""
    families: dict[object, dict[object, Candidate]] = {}
    for candidate in ranked:
        cut = tuple(stage.layers for stage in candidate.plan.pipelines[0].stages)
        families.setdefault(_family(candidate), {}).setdefault(cut, candidate)
    (_, *cuts), *others = (list(own.values()) for own in families.values())
    rest = {id(one) for own in (cuts, *(own[1:] for own in others)) for one in own}
    distinct = [*(own[0] for own in others), *(one for one in ranked if id(one) in rest)]
    return tuple(sorted(distinct[:NUM_RUNNERS_UP], key=lambda c: c.step_seconds))


def _family(candidate: Candidate) -> object:
    """Schedule, pipelines, micro-batch size, and the first pipeline's stages by type and number of cards."""
    shape = candidate.shape
    return (
        shape.schedule,
        len(candidate.plan.pipelines),
        shape.micro_batch_size,
        tuple((s.card.type, len(s.cards)) for s in candidate.cost.stages if s.pipeline == 0),
    )


def with_forecast(costs: Costs, candidate: Candidate, lower_bound_seconds: float) -> Candidate:
    """The candidate, its plan with the forecast."""
    forecast = make_forecast(costs, candidate.plan, candidate.cost, lower_bound_seconds=lower_bound_seconds)
    return replace(candidate, plan=replace(candidate.plan, forecast=forecast))


def idle_cards(cards: Sequence[Card], best: Candidate) -> list[LeftOut]:
    """The cards that the best plan does not use, and why."""
    used = {entry.device for entry in best.plan.ranks}
    idle = [card for card in cards if card.name not in used]
    reasons = {name: _why_idle(name, cards, idle, best) for name in {card.type for card in idle}}
    return [LeftOut(card=card, reason=reasons[card.type]) for card in idle]


def _why_idle(name: str, cards: Sequence[Card], idle: Sequence[Card], best: Candidate) -> str:
    """Why some cards of a type are left: a remainder of the division, or no gain."""
    count = len(best.plan.pipelines)
    replicas = (stage.replicas[0] for stage in best.cost.stages if stage.card.type == name)
    width = max(map(len, replicas), default=1)
    number, left = (sum(card.type == name for card in some) for some in (cards, idle))
    if left > number % (width * count):
        return "not in the fastest plan found"
    groups = f"groups of {width} within their nodes, in " if width > 1 else ""
    return f"the {name}s do not divide into {groups}{count} equal pipelines"


def notes_of(costs: Costs, cost: PlanCost) -> tuple[str, ...]:
    """Where the numbers of each type of card come from, and of links where some were measured."""
    notes = (
        f"{name}: {stage.note}{_width_note(stage)}"
        for stage in cost.stages
        for name in dict.fromkeys(card.type for card in stage.cards)
    )
    return (*dict.fromkeys(notes), *_link_notes(costs, cost))


def _link_notes(costs: Costs, cost: PlanCost) -> list[str]:
    cards = {card for stage in cost.stages for card in stage.cards}
    alike, unknown = unmeasured(costs.topology, cards)
    of = f"of {len(cards) * (len(cards) - 1)} pairs of cards"
    words = {
        f"links {of}: {alike} not measured, taken as another pair's of the same nodes": alike,
        f"links {of}: {unknown} not measured, taken as the cluster file states them": unknown,
    }
    return [text for text, number in words.items() if number]


def _width_note(stage: StageCost) -> str:
    width, estimated = len(stage.replicas[0]), stage.source == "estimated"
    if width == 1 or estimated == bool(stage.experts):
        return ""
    return ", of fewer experts scaled" if stage.experts else f", tensor_parallel {width}"
