"""What of the gradient reductions, and of the weights' way back, the compute of a step does not hide."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan, num_units
from yuan_train.planner.costs.grad_reduce import BucketCost
from yuan_train.planner.costs.owners import units_by_stage
from yuan_train.planner.costs.unit_costs import UnitCost
from yuan_train.planner.evaluate.flows import MessageFlow, Transfer, run_transfers
from yuan_train.planner.evaluate.simulator import Simulation
from yuan_train.planner.evaluate.stage_cost import StageCost


def grad_reduce_end(
    plan: Plan,
    buckets: Sequence[BucketCost],
    stages: Sequence[StageCost],
    simulations: Sequence[Simulation],
    messages: Callable[[float], Sequence[MessageFlow]] = lambda after: (),
) -> float:
    """End of the last gradient reduction or backward, in seconds from the step's start.

    The last backward of a stage completes its gradients unit by unit, the last unit first, and of a layer the
    feed-forward first; under zero_bubble the last weight-gradient part does. A bucket can start when its
    lowest unit, or its half of one, is complete on all owners; and buckets start in the reverse of the
    model's order, on each card one after the other. Those under way at the same time share NICs, also with
    the `messages` that are on their way after a time. What a reduction takes of the compute that hides it
    makes that compute end later.
    """
    latest = max(simulation.step_seconds for simulation in simulations)
    if not buckets:
        return latest
    split = plan.schedule == "zero_bubble"

    def seconds(unit: UnitCost) -> float:
        return unit.weight_seconds if split else unit.backward_seconds

    def completions(early: float) -> list[float]:
        """When each unit, but for a share of its backward, is complete on all its owners."""
        complete, units = [0.0] * num_units(plan), units_by_stage(plan)
        for stage in stages:
            end = simulations[stage.pipeline].stage_end_seconds[stage.stage]
            own = units[stage.pipeline, stage.stage]
            for u, unit, below in zip(own, stage.units, _before(stage, seconds), strict=False):
                complete[u] = max(complete[u], end - below - early * seconds(unit))
        return complete

    complete = {early: completions(early) for early in {bucket.early for bucket in buckets}}
    ends = _compute_ends(stages, simulations)
    slowed = dict.fromkeys(ends, 0.0)
    order = buckets[::-1]
    transfers = [
        Transfer(
            cards=bucket.cards,
            crossing=bucket.crossing,
            seconds=bucket.reduce_seconds,
            ready=max(complete[bucket.early][u] for u in bucket.units),
        )
        for bucket in order
    ]

    def later(i: int) -> float:
        return max(slowed[card] for card in order[i].cards)

    def ended(i: int, start: float, end: float) -> None:
        bucket, seconds = order[i], end - start
        for card in bucket.cards if bucket.compute_seconds and seconds else ():
            hidden = seconds - max(0.0, end - ends[card] - slowed[card])
            slowed[card] += bucket.compute_seconds * max(0.0, hidden) / seconds

    first = min(transfer.ready for transfer in transfers)
    through = run_transfers(transfers, messages(first), later=later, ended=ended)
    return max(latest, *through, *(end + slowed[card] for card, end in ends.items()))


def _compute_ends(stages: Sequence[StageCost], simulations: Sequence[Simulation]) -> dict[Card, float]:
    """By card, when its last backward ends; in seconds from the step's start."""
    ends: dict[Card, float] = {}
    for stage in stages:
        end = simulations[stage.pipeline].stage_end_seconds[stage.stage]
        ends |= {card: max(ends.get(card, 0.0), end) for card in stage.cards}
    return ends


def exposed_weight_sync_seconds(
    plan: Plan, buckets: Sequence[BucketCost], stages: Sequence[StageCost], simulations: Sequence[Simulation]
) -> float:
    """Seconds by which a step starts later because forwards wait for stepped weights. The buckets' weights
    come back in the model's order, on each card one after the other, from the end of the optimizer step on;
    the next step's forwards begin at the same time, and each unit's waits for its weights."""
    if not any(bucket.weight_sync_seconds for bucket in buckets):
        return 0.0
    needed, units = [float("inf")] * num_units(plan), units_by_stage(plan)
    for stage in stages:
        start = simulations[stage.pipeline].stage_start_seconds[stage.stage]
        before = _before(stage, lambda unit: unit.forward_seconds)
        for u, earlier in zip(units[stage.pipeline, stage.stage], before, strict=False):
            needed[u] = min(needed[u], start + earlier)
    ends = run_transfers(
        [
            Transfer(cards=bucket.cards, crossing=bucket.crossing, seconds=bucket.sync_seconds, ready=0.0)
            for bucket in buckets
        ]
    )
    waits = (end - needed[u] for bucket, end in zip(buckets, ends, strict=True) for u in bucket.units)
    return max(0.0, *waits)


def _before(stage: StageCost, seconds: Callable[[UnitCost], float]) -> Iterator[float]:
    """Seconds of the stage's units before each of them, and of all."""
    return itertools.accumulate(map(seconds, stage.units), initial=0.0)
