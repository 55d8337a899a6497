"""What a plan costs: seconds and bytes of each stage, and of the step, from the simulation of its schedule.

A step is the forwards and backwards of every pipeline. The owners of the same part of the model reduce its
gradients bucket by bucket while the last backward still runs and other stages drain, so that only what
outlasts all compute counts. Then the tied embedding is reduced over all that hold it, and every card runs its
optimizer step. With a sharded optimizer each owner updates its share, and the weights come back bucket by
bucket while the next step's forward begins, which waits where they come too late:

    step = compute + gradient reductions that outlast it
           + tied embedding + slowest optimizer step + longest wait for weights

`evaluate/flows.py` says which parts are hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config.plan import Forecast, Plan, StageForecast, divides_experts
from yuan_train.planner.costs.expert_costs import check_alike
from yuan_train.planner.costs.grad_reduce import bucket_costs, tied_embedding_seconds
from yuan_train.planner.costs.owners import PlanCards, state_shares
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.unit_costs import Source
from yuan_train.planner.evaluate.flows import (
    EdgeFlows,
    MessageFlow,
    edge_seconds,
    exposed_weight_sync_seconds,
    grad_reduce_end,
    message_flows,
    plan_edge_flows,
)
from yuan_train.planner.evaluate.simulator import Simulation, StageTimes, simulate_schedule
from yuan_train.planner.evaluate.stage_cost import StageCost, cards_of, stage_cost, sum_over_cards
from yuan_train.planner.evaluate.tiers import pipeline_copies, pipeline_pages
from yuan_train.schedule.step import Workers


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan costs, part by part."""

    stages: tuple[StageCost, ...]
    simulations: tuple[Simulation, ...]
    """One per pipeline."""
    times: tuple[StageTimes, ...]
    workers: tuple[Workers, ...]
    compute_seconds: float
    """Until the last backward of any pipeline ends."""
    grad_reduce_seconds: float
    """What the gradient reductions add to that."""
    tied_embedding_seconds: float
    """Gradient reduction of the tied embedding; with a sharded optimizer its weights' way back too."""
    update_seconds: float
    """The slowest card's optimizer step."""
    weight_sync_seconds: float
    """How long forwards wait for the weights of a sharded optimizer."""

    @property
    def step_seconds(self) -> float:
        return (
            self.compute_seconds
            + self.grad_reduce_seconds
            + self.tied_embedding_seconds
            + self.update_seconds
            + self.weight_sync_seconds
        )

    @property
    def stall_seconds(self) -> float:
        """The longest that a worker waits for copies, as part of `compute_seconds`."""
        return max(max(simulation.stall_seconds) for simulation in self.simulations)

    @property
    def disk_bytes(self) -> float:
        """What all cards write to disks in a step, and read."""
        cards: dict[str, float] = {}
        for stage in self.stages:
            cards |= {card.name: stage.disk_bytes for card in stage.cards}
        return sum(cards.values())

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def source(self) -> Source:
        """`measured` if the costs of all stages are."""
        return "measured" if all(stage.source == "measured" for stage in self.stages) else "estimated"

    @property
    def bubble_fraction(self) -> float:
        """Share of the workers' step time in which they run no forward or backward."""
        busy = sum(sum(simulation.busy_seconds) for simulation in self.simulations)
        count = sum(len(simulation.busy_seconds) for simulation in self.simulations)
        return 1.0 - busy / (self.step_seconds * count) if self.step_seconds else 0.0


def _simulate(costs: Costs, plan: Plan, p: int, times: StageTimes) -> Simulation:
    """A step of pipeline p, its copies among it."""
    pipeline = plan.pipelines[p]
    leaves = any(stage.activation_offload for stage in pipeline.stages)
    return simulate_schedule(
        plan.schedule,
        times,
        num_micro_batches=pipeline.num_micro_batches,
        workers=pipeline.workers,
        in_flight=pipeline.depths(plan.schedule),
        sends=costs.problem.send_mode,
        copies=pipeline_copies(plan, p) if leaves else None,
        group=pipeline.page_group,
        pages=pipeline_pages(plan, p),
    )


def cost_plan(costs: Costs, plan: Plan) -> PlanCost:
    """The cost of any valid plan. Raises PlanError if a card is not in the cluster, has another type there,
    or lacks the precision; and for pipelines that divide the experts of a layer differently, which are not
    priced."""
    if divides_experts(plan):
        check_alike(plan)
    costs = costs.for_plan(plan)
    cards = _cards(costs, plan)
    rows = _stage_rows(costs, plan, cards)
    stages: list[StageCost] = []
    times: list[StageTimes] = []
    simulations: list[Simulation] = []
    workers = [pipeline.workers for pipeline in plan.pipelines]
    simulated: dict[tuple[object, ...], Simulation] = {}
    # The messages of all pipelines, by edge and whether they are activations.
    edges = itertools.product(range(max(map(len, cards)) - 1), (True, False))
    flows = {(s, kind): plan_edge_flows(cards, s, is_activation=kind) for s, kind in edges}
    for p, (pipeline, pipeline_stages) in enumerate(zip(plan.pipelines, rows, strict=True)):
        times.append(_stage_times(costs, plan, cards, p, pipeline_stages, flows))
        leaves = any(stage.activation_offload or stage.parameter_offload for stage in pipeline.stages)
        depths = pipeline.depths(plan.schedule)
        key = (times[-1], workers[p], pipeline.num_micro_batches, depths, p if leaves else -1)
        if key not in simulated:
            simulated[key] = _simulate(costs, plan, p, times[-1])
        simulations.append(simulated[key])
        stages += pipeline_stages
    compute = max(simulation.step_seconds for simulation in simulations)
    buckets = bucket_costs(costs, plan, cards)
    whole = divides_experts(plan)

    def messages(after: float) -> list[MessageFlow]:
        if not any(bucket.crossing for bucket in buckets):
            return []
        return message_flows(costs, plan, cards, simulations, after=after)

    reduce_end = grad_reduce_end(plan, buckets, stages, simulations, messages)
    return PlanCost(
        stages=tuple(stages),
        simulations=tuple(simulations),
        times=tuple(times),
        workers=tuple(workers),
        compute_seconds=compute,
        grad_reduce_seconds=reduce_end - compute,
        tied_embedding_seconds=tied_embedding_seconds(
            costs,
            _owners_of_ends(cards, 0, whole=whole),
            _owners_of_ends(cards, -1, whole=whole) if costs.ties else [],
            sharded=plan.optimizer_sharding,
        ),
        update_seconds=max(stage.update_seconds for stage in stages),
        weight_sync_seconds=exposed_weight_sync_seconds(plan, buckets, stages, simulations),
    )


def cost_stages(costs: Costs, plan: Plan) -> list[StageCost]:
    """The costs of a plan's stages, memory included, without a simulation of its step."""
    costs = costs.for_plan(plan)
    return [stage for row in _stage_rows(costs, plan, _cards(costs, plan)) for stage in row]


def _cards(costs: Costs, plan: Plan) -> PlanCards:
    return [[cards_of(costs, plan, stage) for stage in pipeline.stages] for pipeline in plan.pipelines]


def _stage_rows(costs: Costs, plan: Plan, cards: PlanCards) -> list[list[StageCost]]:
    shares = state_shares(plan, cards, reduce_copy_share=costs.problem.reduce_copy_share, ties=costs.ties)
    rows: list[list[StageCost]] = []
    for p, pipeline in enumerate(plan.pipelines):
        row = [stage_cost(costs, plan, own, p, s, shares=shares[p, s]) for s, own in enumerate(cards[p])]
        rows.append(sum_over_cards(plan, pipeline, row))
    return rows


def _owners_of_ends(cards: PlanCards, s: int, *, whole: bool) -> list[Replica]:
    """The replicas of stage s of all pipelines; each card by itself if each has it `whole`."""
    replicas = [replica for row in cards for replica in row[s]]
    return [(card,) for replica in replicas for card in replica] if whole else replicas


def _stage_times(
    costs: Costs,
    plan: Plan,
    cards: PlanCards,
    p: int,
    pipeline_stages: Sequence[StageCost],
    flows: dict[tuple[int, bool], EdgeFlows],
) -> StageTimes:
    """What the simulator needs of pipeline p: its stages' compute, and the messages between them."""
    activation_seconds, gradient_seconds = (
        tuple(
            edge_seconds(costs, plan, cards, p, s, flows[s, is_activation], is_activation=is_activation)
            for s in range(len(pipeline_stages) - 1)
        )
        for is_activation in (True, False)
    )
    parts = tuple(stage.leaving and stage.leaving.times for stage in pipeline_stages)
    pages = tuple(stage.pages and stage.pages.times for stage in pipeline_stages)
    return StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in pipeline_stages),
        backward_seconds=tuple(stage.backward_seconds for stage in pipeline_stages),
        weight_seconds=tuple(stage.weight_seconds for stage in pipeline_stages),
        parts=parts if any(parts) else (),
        pages=pages if any(pages) else (),
        send_activation_seconds=activation_seconds,
        send_gradient_seconds=gradient_seconds,
    )


def make_forecast(costs: Costs, plan: Plan, cost: PlanCost, *, lower_bound_seconds: float) -> Forecast:
    """The forecast to store in a plan; the bound is at most the plan's own step."""
    problem, splits = costs.problem, plan.schedule == "zero_bubble"
    return Forecast(
        step_seconds=cost.step_seconds,
        tokens_per_second=problem.global_batch_size * problem.sequence_length / cost.step_seconds,
        bubble_fraction=cost.bubble_fraction,
        lower_bound_seconds=min(lower_bound_seconds, cost.step_seconds),
        source=cost.source,
        stages=tuple(
            StageForecast(
                pipeline=stage.pipeline,
                stage=stage.stage,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                weight_seconds=stage.weight_seconds if splits else None,
                peak_memory_bytes=stage.memory.total,
                memory=stage.memory,
                host_memory_bytes=stage.host_bytes,
                disk_bytes=stage.disk_bytes,
                # The longest that one of its workers waits for copies.
                stall_seconds=max(
                    cost.simulations[stage.pipeline].stall_seconds[worker]
                    for worker in cost.workers[stage.pipeline][stage.stage]
                ),
            )
            for stage in cost.stages
        ),
    )
