"""The cards of a run, each with its state: those of the plan, those that it leaves out, and lost ones.

It stands alone because it puts together what plan, cluster, journal and measurements each say of a card.
"""

from __future__ import annotations

from dataclasses import dataclass

from yuan_train.config.plan import RankPlan, node_of
from yuan_train.config.run import SuperviseConfig
from yuan_train.report.journal import Entry
from yuan_train.report.run_log import RankShare, RunLog, measured_pace

SLOW = SuperviseConfig().slow
"""From which pace on a card is told to be slow."""
NEAR = 0.02
"""Of a step: ranks that compute so much longer than another are not waited for."""
ENDS = ("stopped", "finished", "gave_up")
MILLION = 1e6


@dataclass(frozen=True, kw_only=True)
class CardRow:
    """A card, and what is known of it."""

    name: str
    node: str
    type: str
    share: RankShare | None
    """What its rank has of the plan, and what was measured of it; None: the plan leaves it out."""
    limit_bytes: float | None
    """Its memory."""
    state: str
    waits_for: int | None
    """The rank for which it waits most; None: for none, or not known."""


def card_rows(run: RunLog) -> tuple[CardRow, ...]:
    """All cards of the cluster, or else of the plan, in this order; then nodes of which no more is known."""
    shares = {share.card: share for share in run.ranks if share.card}
    own = {entry.device: entry.type for entry in run.plan.ranks} if run.plan is not None else {}
    cards = [(name, node_of(RankPlan(rank=0, device=name, type=kind)), kind) for name, kind in own.items()]
    if run.cluster is not None:
        cards = [(card.name, card.node, card.type) for card in run.cluster.cards]
    elif not cards:
        return tuple(_row(run, ("", "", ""), share, {}, {}) for share in run.ranks)
    known = {node for _, node, _ in cards}
    seen = dict.fromkeys(node for entry in run.journal for node in (*entry.nodes, *entry.waiting))
    cards += [(node, node, "") for node in seen if node not in known]
    pace, waits = _pace(run), waits_for(run)
    return tuple(_row(run, card, shares.get(card[0]), pace, waits) for card in cards)


def _row(
    run: RunLog,
    card: tuple[str, str, str],
    share: RankShare | None,
    pace: dict[int, float],
    waits: dict[int, int],
) -> CardRow:
    name, node, kind = card
    found = run.plan.find_type(kind) if run.plan is not None else None
    if run.cluster is not None and kind:
        found = run.cluster.device_type(kind)
    return CardRow(
        name=name,
        node=node,
        type=kind,
        share=share,
        limit_bytes=found.memory if found is not None else None,
        state=_state(run, node, share, pace),
        waits_for=waits.get(share.rank) if share is not None else None,
    )


def _state(run: RunLog, node: str, share: RankShare | None, pace: dict[int, float]) -> str:
    """`lost`, `waits to be let in`, `not used`, `slow, 2.1 times`, or the state of the run."""
    if run.journal:
        last = run.journal[-1]
        if node in last.waiting:
            return "waits to be let in"
        if node not in last.nodes:
            was_here = any(node in entry.nodes for entry in run.journal)
            return "lost" if was_here else "was never here"
    if share is None:
        return "not used"
    if run.state == "goes on":
        times = pace.get(share.rank, 1.0)
        return f"slow, {times:.1f} times" if times >= SLOW else "computes"
    return run.state


def _pace(run: RunLog) -> dict[int, float]:
    return measured_pace(run.plan, run.measured) if run.plan is not None and run.plan_ran else {}


def slow_ranks(run: RunLog) -> dict[int, float]:
    """By rank, how many times as long as forecast it computes beside the others; the slowest first."""
    slow = {rank: times for rank, times in _pace(run).items() if times >= SLOW}
    return dict(sorted(slow.items(), key=lambda item: -item[1]))


def waits_for(run: RunLog) -> dict[int, int]:
    """By rank, the one for which it waits most: the one of its pipeline that computes longest in a step, or
    if that is itself, the one of all pipelines, for whose gradients the others wait at the end of a step.

    This is told from how long each computes, since a wait has no name of its own.
    """
    seconds = {share.rank: share.seconds for share in run.ranks if share.seconds}
    if run.plan is None or not seconds:
        return {}
    found: dict[int, int] = {}
    longest = max(seconds, key=seconds.__getitem__)
    for pipeline in run.plan.pipelines:
        own = pipeline.ranks & seconds.keys()
        slowest = max(own, key=seconds.__getitem__, default=longest)
        for rank in own:
            for other in (slowest, longest):
                if seconds[other] - seconds[rank] > NEAR * run.step_seconds:
                    found[rank] = other
                    break
    return found


@dataclass(frozen=True, kw_only=True)
class Paid:
    """The rent of a run, in the currency of the cluster file."""

    per_hour: float
    """Of the nodes that take part now, all their cards."""
    per_million: float | None
    """Tokens, as measured."""
    forecast_per_million: float | None
    so_far: float | None
    """None: a node of an earlier plan has no price."""


def rent(run: RunLog, tokens_per_second: float | None) -> Paid | None:
    """What the run costs; None without prices for all nodes that take part.

    Of a supervised run the time is that of the journal, waits and starts included, up to the newest step. Of
    others it is that of the steps alone, under the newest plan's cards.
    """
    if run.cluster is None or run.plan is None:
        return None
    nodes = run.journal[-1].nodes if run.journal else {node_of(entry) for entry in run.plan.ranks}
    per_hour = run.cluster.nodes_price(nodes)
    if not per_hour:
        return None
    if run.journal:
        spans = [(run.cluster.nodes_price(e.nodes), end - start) for e, start, end in entry_spans(run)]
    else:
        spans = [(per_hour, run.steps.seconds)]
    paid = [None if price is None else price * seconds / 3600 for price, seconds in spans]
    forecast = run.plan.forecast.tokens_per_second if run.plan.forecast is not None else None
    return Paid(
        per_hour=per_hour,
        per_million=_per_million(per_hour, tokens_per_second),
        forecast_per_million=_per_million(per_hour, forecast),
        so_far=None if None in paid else sum(own or 0.0 for own in paid),
    )


def _per_million(per_hour: float, tokens_per_second: float | None) -> float | None:
    return per_hour / 3600 * MILLION / tokens_per_second if tokens_per_second else None


def entry_spans(run: RunLog) -> list[tuple[Entry, float, float]]:
    """Each entry of the journal after which the run went on, and from when to when it was the newest."""
    ends = [entry.time for entry in run.journal[1:]] + [max(run.written_at, run.journal[-1].time)]
    both = zip(run.journal, ends, strict=True)
    return [(entry, entry.time, max(end, entry.time)) for entry, end in both if entry.event not in ENDS]
