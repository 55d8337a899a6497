"""What a plan costs: seconds and bytes of each stage, and of the step, from the simulation of its schedule.

A step is the forwards and backwards of every pipeline; then each stage sums its gradients with the same stage
of the other pipelines, as soon as it is done; then the tied table is summed between first and last stage;
then every card updates its parameters:

    step = max over pipelines and stages (last backward + gradient sum) + tied sum + slowest update
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card, Cluster
from yuan_train.config.devices import Precision
from yuan_train.config.errors import PlanError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Forecast, MemoryForecast, Plan, StageForecast, StagePlan
from yuan_train.config.profile import Profile
from yuan_train.config.run import Recompute
from yuan_train.planner.communication import message_seconds, ring_seconds
from yuan_train.planner.memory import in_flight, stage_memory
from yuan_train.planner.simulator import Simulation, StageTimes, simulate_schedule
from yuan_train.planner.timing import CardCosts, Source, card_costs, check_profile
from yuan_train.planner.topology import Topology, find_route, make_topology
from yuan_train.planner.workload import ELEMENT_BYTES, STATE_BYTES


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is given: cards, model, batch, and how the numbers are known."""

    cluster: Cluster
    model: ModelConfig
    sequence_length: int
    global_batch_size: int
    precision: Precision
    profile: Profile | None = None
    overlap: bool = True


@dataclass(frozen=True)
class Costs:
    """Card costs and links of a setting, each looked up once."""

    setting: Setting
    topology: Topology
    cards: dict[str, Card]
    known: dict[tuple[str, int, Recompute], CardCosts]
    """What has been looked up."""

    def of(self, type_name: str, micro_batch_size: int, recompute: Recompute) -> CardCosts:
        """Every unit's cost on a type of card."""
        key = (type_name, micro_batch_size, recompute)
        if key not in self.known:
            self.known[key] = card_costs(
                self.setting.model,
                sequence_length=self.setting.sequence_length,
                micro_batch_size=micro_batch_size,
                precision=self.setting.precision,
                recompute=recompute,
                type_name=type_name,
                device=self.setting.cluster.device_type(type_name),
                profile=self.setting.profile,
            )
        return self.known[key]

    def boundary_bytes(self, micro_batch_size: int) -> float:
        """One hidden state between two stages."""
        setting = self.setting
        tokens = micro_batch_size * setting.sequence_length
        return float(tokens * setting.model.hidden_size * ELEMENT_BYTES[setting.precision])


def make_costs(setting: Setting) -> Costs:
    """Raises ConfigError if the profile does not belong to the setting."""
    if setting.profile is not None:
        check_profile(
            setting.profile,
            setting.model,
            sequence_length=setting.sequence_length,
            precision=setting.precision,
        )
    cards = {card.name: card for card in setting.cluster.cards}
    return Costs(setting, make_topology(setting.cluster, setting.profile), cards, {})


@dataclass(frozen=True, kw_only=True)
class StageCost:
    """One stage of one pipeline."""

    pipeline: int
    stage: int
    card: Card
    layers: tuple[int, int]
    embedding: bool
    head: bool
    recompute: Recompute
    forward_seconds: float
    backward_seconds: float
    sync_seconds: float
    update_seconds: float
    memory: MemoryForecast
    capacity_bytes: float
    one_more_layer_bytes: float
    """What another layer would add."""
    source: Source
    note: str

    @property
    def fits(self) -> bool:
        return self.memory.total <= self.capacity_bytes


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan costs, by its parts."""

    stages: tuple[StageCost, ...]
    simulations: tuple[Simulation, ...]
    """One per pipeline."""
    times: tuple[StageTimes, ...]
    compute_seconds: float
    """Until the last backward of any pipeline."""
    sync_seconds: float
    """What the gradient sums add to that."""
    tied_seconds: float
    update_seconds: float

    @property
    def step_seconds(self) -> float:
        return self.compute_seconds + self.sync_seconds + self.tied_seconds + self.update_seconds

    @property
    def fits(self) -> bool:
        return all(stage.fits for stage in self.stages)

    @property
    def source(self) -> Source:
        return "measured" if all(stage.source == "measured" for stage in self.stages) else "estimated"

    @property
    def bubble_fraction(self) -> float:
        """Share of the cards' step in which they do no forward or backward."""
        busy = sum(sum(simulation.busy_seconds) for simulation in self.simulations)
        return 1.0 - busy / (self.step_seconds * len(self.stages))


def cost_plan(costs: Costs, plan: Plan) -> PlanCost:
    """The cost of a plan with one card per stage.

    Raises PlanError if a card is not in the cluster, a stage has several cards, or a card lacks the
    precision.
    """
    cards = [[_card_of(costs, plan, stage) for stage in pipeline.stages] for pipeline in plan.pipelines]
    stages: list[StageCost] = []
    times: list[StageTimes] = []
    simulations: list[Simulation] = []
    for p, pipeline in enumerate(plan.pipelines):
        own = [_stage_cost(costs, plan, cards, p, s) for s in range(len(pipeline.stages))]
        sends = [
            [_edge_seconds(costs, plan, cards, p, s, onward=onward) for s in range(len(own) - 1)]
            for onward in (True, False)
        ]
        times.append(
            StageTimes(
                forward_seconds=tuple(stage.forward_seconds for stage in own),
                backward_seconds=tuple(stage.backward_seconds for stage in own),
                send_activation_seconds=tuple(sends[0]),
                send_gradient_seconds=tuple(sends[1]),
            )
        )
        simulations.append(
            simulate_schedule(
                plan.schedule,
                times[-1],
                num_micro_batches=pipeline.num_micro_batches,
                overlap=costs.setting.overlap,
            )
        )
        stages += own
    compute = max(simulation.step_seconds for simulation in simulations)
    ends = [end for simulation in simulations for end in simulation.stage_end_seconds]
    synced = max(end + stage.sync_seconds for end, stage in zip(ends, stages, strict=True))
    return PlanCost(
        stages=tuple(stages),
        simulations=tuple(simulations),
        times=tuple(times),
        compute_seconds=compute,
        sync_seconds=synced - compute,
        tied_seconds=tied_seconds(
            costs,
            [row[0] for row in cards],
            [row[-1] for row in cards] if costs.setting.model.tie_embeddings else [],
        ),
        update_seconds=max(stage.update_seconds for stage in stages),
    )


def make_forecast(costs: Costs, cost: PlanCost, *, lower_bound_seconds: float) -> Forecast:
    """The forecast that a plan carries."""
    setting = costs.setting
    return Forecast(
        step_seconds=cost.step_seconds,
        tokens_per_second=setting.global_batch_size * setting.sequence_length / cost.step_seconds,
        bubble_fraction=cost.bubble_fraction,
        lower_bound_seconds=min(lower_bound_seconds, cost.step_seconds),
        source=cost.source,
        stages=tuple(
            StageForecast(
                pipeline=stage.pipeline,
                stage=stage.stage,
                forward_seconds=stage.forward_seconds,
                backward_seconds=stage.backward_seconds,
                peak_memory_bytes=stage.memory.total,
                memory=stage.memory,
            )
            for stage in cost.stages
        ),
    )


# --- parts that the search shares ------------------------------------------------------------------------


def flow_sharers(edges: Sequence[tuple[Card, Card]]) -> list[int]:
    """How many of these messages go through the same network card at a time, for each.

    Equal pipelines run in step, so the same edge of all of them is busy together; unlike edges of a pipeline
    take turns. Both ends count: what leaves a node and what enters one.
    """
    away = [(a, b) for a, b in edges if a.node != b.node]
    leaving, entering = Counter(a.node for a, _ in away), Counter(b.node for _, b in away)
    return [max(leaving[a.node], entering[b.node]) if a.node != b.node else 1 for a, b in edges]


def ring_sharers(rings: Sequence[Sequence[Card]]) -> list[int]:
    """How many of these rings leave through the busiest network card of each; all are busy together."""
    nodes = [{card.node for card in ring} for ring in rings]
    crossing = Counter(node for places in nodes if len(places) > 1 for node in places)
    return [max((crossing[node] for node in places), default=1) if len(places) > 1 else 1 for places in nodes]


def unit_gradient_bytes(costs: Costs) -> list[float]:
    """Gradients that the pipelines sum, by unit; a tied table is summed apart, over all that hold it."""
    model, state = costs.setting.model, STATE_BYTES[costs.setting.precision]
    ends = (
        (0, model.hidden_size)
        if model.tie_embeddings
        else (model.embedding_parameters, model.head_parameters)
    )
    counts = [ends[0], *[model.layer_parameters] * model.num_layers, ends[1]]
    return [float(count * state.gradients) for count in counts]


def tied_seconds(costs: Costs, firsts: Sequence[Card], lasts: Sequence[Card]) -> float:
    """Sum of the tied table's gradient over all that hold it; 0 without `lasts` or for a single card."""
    if not lasts:
        return 0.0
    owners = list(dict.fromkeys([*firsts, *lasts]))
    model, state = costs.setting.model, STATE_BYTES[costs.setting.precision]
    return ring_seconds(costs.topology, owners, float(model.embedding_parameters * state.gradients))


def stage_units(plan_stage: StagePlan, num_layers: int) -> slice:
    """The stage's units among embedding, layers, head."""
    first, end = plan_stage.layers
    return slice(0 if plan_stage.embedding else first + 1, num_layers + 2 if plan_stage.head else end + 1)


# --- stages ----------------------------------------------------------------------------------------------


def _card_of(costs: Costs, plan: Plan, stage: StagePlan) -> Card:
    if len(stage.ranks) != 1:
        raise PlanError(
            f"replicas {[list(r) for r in stage.replicas]}: forecasts know one card per stage yet; "
            "give each stage one"
        )
    entry = plan.ranks[stage.ranks[0]]
    card = costs.cards.get(entry.device)
    if card is None:
        raise PlanError(
            f"card {entry.device!r} of the plan is not in cluster {costs.setting.cluster.name!r}; "
            f"give the cluster that the plan was made for ({plan.cluster or 'unnamed'})"
        )
    if card.type != entry.type:
        raise PlanError(
            f"card {entry.device!r} is a {entry.type} in the plan and a {card.type} in the cluster; "
            "plan again"
        )
    precision = costs.setting.precision
    if costs.setting.cluster.device_type(card.type).peak(precision) is None:
        raise PlanError(f"card {card.name!r} ({card.type}) has no {precision}; use another precision or card")
    return card


def _stage_cost(costs: Costs, plan: Plan, cards: Sequence[Sequence[Card]], p: int, s: int) -> StageCost:
    pipeline, model = plan.pipelines[p], plan.model
    stage, card = pipeline.stages[s], cards[p][s]
    device = costs.setting.cluster.device_type(card.type)
    all_units = costs.of(card.type, pipeline.micro_batch_size, stage.recompute)
    where = stage_units(stage, model.num_layers)
    units = all_units.units[where]
    alive = in_flight(
        plan.schedule,
        stage=s,
        num_stages=len(pipeline.stages),
        num_micro_batches=pipeline.num_micro_batches,
    )
    layer = all_units.units[1]
    traffic = STATE_BYTES[costs.setting.precision].update_traffic
    return StageCost(
        pipeline=p,
        stage=s,
        card=card,
        layers=stage.layers,
        embedding=stage.embedding,
        head=stage.head,
        recompute=stage.recompute,
        forward_seconds=sum(unit.forward_seconds for unit in units),
        backward_seconds=sum(unit.backward_seconds for unit in units),
        sync_seconds=_sync_seconds(costs, cards, s, where) if len(plan.pipelines) > 1 else 0.0,
        update_seconds=sum(unit.parameters for unit in units) * traffic / all_units.update_bytes_per_second,
        memory=stage_memory(
            units,
            has_embedding=stage.embedding,
            has_head=stage.head,
            tied=model.tie_embeddings,
            in_flight=alive,
            boundary_bytes=costs.boundary_bytes(pipeline.micro_batch_size),
            reserved_bytes=float(device.reserved),
        ),
        capacity_bytes=float(device.memory),
        one_more_layer_bytes=layer.state_bytes + alive * layer.activation_bytes,
        source=all_units.source,
        note=all_units.note,
    )


def _sync_seconds(costs: Costs, cards: Sequence[Sequence[Card]], s: int, where: slice) -> float:
    """Gradient sum of a stage over equal pipelines; each unit is a bucket."""
    rings = [[row[i] for row in cards] for i in range(len(cards[0]))]
    sharers = ring_sharers(rings)[s]
    return sum(
        ring_seconds(costs.topology, rings[s], size, sharers=sharers)
        for size in unit_gradient_bytes(costs)[where]
    )


def _edge_seconds(
    costs: Costs, plan: Plan, cards: Sequence[Sequence[Card]], p: int, s: int, *, onward: bool
) -> float:
    """A hidden state from stage s to s + 1, or its gradient back."""
    ends = (s, s + 1) if onward else (s + 1, s)
    edges = [(row[ends[0]], row[ends[1]]) for row in cards if len(row) > s + 1]
    source, target = cards[p][ends[0]], cards[p][ends[1]]
    sharers = flow_sharers(edges)[edges.index((source, target))]
    route = find_route(costs.topology, source, target)
    size = costs.boundary_bytes(plan.pipelines[p].micro_batch_size)
    return message_seconds(route, size, sharers=sharers)
