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

from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config.plan import Forecast, Plan, StageForecast
from yuan_train.planner.costs.grad_reduce import bucket_costs, tied_embedding_seconds
from yuan_train.planner.costs.owners import PlacedPlan, check_alike, place_plan, state_shares
from yuan_train.planner.costs.plan_problem import Replica
from yuan_train.planner.costs.unit_costs import Costs, Source
from yuan_train.planner.evaluate.flows import (
    MessageFlow,
    exposed_weight_sync_seconds,
    grad_reduce_end,
    message_flows,
    send_seconds,
)
from yuan_train.planner.evaluate.memory import pipeline_copies, pipeline_pages
from yuan_train.planner.evaluate.simulator import Simulation, StageTimes, program_shape, simulate_schedule
from yuan_train.planner.evaluate.stage_cost import StageCost, stage_cost, sum_over_cards
from yuan_train.schedule.schedules import ProgramShape
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


def _simulate(costs: Costs, plan: Plan, p: int, shape: ProgramShape, times: StageTimes) -> Simulation:
    """A step of pipeline p, its copies among it."""
    pipeline = plan.pipelines[p]
    leaves = any(stage.activation_offload for stage in pipeline.stages)
    return simulate_schedule(
        shape,
        times,
        sends=costs.problem.send_mode,
        copies=pipeline_copies(plan, p, shape) if leaves else None,
        pages=pipeline_pages(pipeline, shape),
    )


def cost_plan(costs: Costs, plan: Plan) -> PlanCost:
    """The cost of any valid plan. Raises PlanError if a card is not in the cluster, has another type there,
    or lacks the precision; and for pipelines that divide the experts of a layer differently, which are not
    priced."""
    check_alike(plan)
    costs = costs.for_plan(plan)
    placed = place_plan(costs, plan)
    shapes = [program_shape(plan, p) for p in range(len(plan.pipelines))]
    rows = _stage_rows(costs, placed, shapes)
    sends = send_seconds(costs.topology, rows)
    times = [_stage_times(row, *own) for row, own in zip(rows, sends, strict=True)]
    simulations: list[Simulation] = []
    simulated: dict[tuple[object, ...], Simulation] = {}
    for p, pipeline in enumerate(plan.pipelines):
        leaves = any(stage.activation_offload or stage.parameter_offload for stage in pipeline.stages)
        key = (times[p], shapes[p], p if leaves else -1)
        if key not in simulated:
            simulated[key] = _simulate(costs, plan, p, shapes[p], times[p])
        simulations.append(simulated[key])
    stages = [stage for row in rows for stage in row]
    compute = max(simulation.step_seconds for simulation in simulations)
    buckets = bucket_costs(costs, placed)

    def messages(after: float) -> list[MessageFlow]:
        if not any(bucket.crossing for bucket in buckets):
            return []
        return message_flows(costs.topology, plan, placed.cards, simulations, after=after)

    reduce_end = grad_reduce_end(plan, buckets, stages, simulations, messages)
    return PlanCost(
        stages=tuple(stages),
        simulations=tuple(simulations),
        times=tuple(times),
        workers=tuple(pipeline.workers for pipeline in plan.pipelines),
        compute_seconds=compute,
        grad_reduce_seconds=reduce_end - compute,
        tied_embedding_seconds=tied_embedding_seconds(
            costs,
            _owners_of_ends(placed, 0),
            _owners_of_ends(placed, -1) if costs.ties else [],
            sharded=plan.optimizer_sharding,
        ),
        update_seconds=max(stage.update_seconds for stage in stages),
        weight_sync_seconds=exposed_weight_sync_seconds(buckets, stages, simulations),
    )


def cost_stages(costs: Costs, plan: Plan) -> list[StageCost]:
    """The costs of a plan's stages, memory included, without a simulation of its step."""
    costs = costs.for_plan(plan)
    shapes = [program_shape(plan, p) for p in range(len(plan.pipelines))]
    return [stage for row in _stage_rows(costs, place_plan(costs, plan), shapes) for stage in row]


def _stage_rows(costs: Costs, placed: PlacedPlan, shapes: Sequence[ProgramShape]) -> list[list[StageCost]]:
    plan, shares = placed.plan, state_shares(costs, placed)
    rows: list[list[StageCost]] = []
    for p, pipeline in enumerate(plan.pipelines):
        row = [
            stage_cost(costs, plan, own, p, s, shares=shares[p, s], shape=shapes[p])
            for s, own in enumerate(placed.cards[p])
        ]
        rows.append(sum_over_cards(plan, pipeline, row))
    return rows


def _owners_of_ends(placed: PlacedPlan, s: int) -> list[Replica]:
    """The replicas of stage s of all pipelines; each card by itself where each has all but experts whole."""
    replicas = [replica for row in placed.cards for replica in row[s]]
    whole = placed.plan.divides_experts
    return [(card,) for replica in replicas for card in replica] if whole else replicas


def _stage_times(
    stages: Sequence[StageCost], activation_seconds: tuple[float, ...], gradient_seconds: tuple[float, ...]
) -> StageTimes:
    """What the simulator needs of a pipeline: its stages' compute, and the messages between them."""
    parts = tuple(stage.leaving and stage.leaving.times for stage in stages)
    pages = tuple(stage.pages and stage.pages.times for stage in stages)
    return StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in stages),
        backward_seconds=tuple(stage.backward_seconds for stage in stages),
        weight_seconds=tuple(stage.weight_seconds for stage in stages),
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
