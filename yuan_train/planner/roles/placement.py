"""Roles on cards: what a placement of policy, generation and reward takes, part by part."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card, Cluster, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan, Plan
from yuan_train.config.profile import BatchProfile
from yuan_train.config.run import Counts, SearchConfig
from yuan_train.planner.costs.links import Topology
from yuan_train.planner.costs.unit_costs import CardCosts, Costs, Source, card_costs, critic_of
from yuan_train.planner.costs.workload import ELEMENT_BYTES, STATE_BYTES, PlanProblem, TensorGroup, TokenRows
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.evaluate.simulator import simulate
from yuan_train.planner.evaluate.stage_cost import StageCost, scoring_bytes
from yuan_train.planner.roles import engines
from yuan_train.planner.roles.engines import DecodeStage, measured_rounds
from yuan_train.planner.search.what_if import with_nodes
from yuan_train.schedule.flow import FlowTimes, Play, play
from yuan_train.schedule.schedules import forward_only


@dataclass(frozen=True, kw_only=True)
class RolesProblem:
    """What to place: the policy's training, and the samples that it is trained on."""

    policy: PlanProblem
    """Its batch is the samples of a step, each a row of its own; its cluster is the whole one."""
    load: engines.Workload
    micro_batch_size: int
    policy_search: SearchConfig
    packed_rows: int
    """Rows that the samples of a step fill, several to a row."""
    updates: int = 1
    """Optimizer steps of a pass over a batch."""
    epochs: int = 1
    """Passes over a batch."""
    reference: bool = False
    """Whether a reference scores the samples: on the policy's hosts, swapped in."""
    reward_model: ModelConfig | None = None
    """Scores on cards of its own; None: functions score."""
    tensor: Counts | None = None
    """Widths that engines may have; None: any."""
    slots: Counts | None = None
    """Slots that an engine may have; None: any."""
    most_slots: int | None = None
    """Of an engine; None: as many as fit and are filled."""
    modes: tuple[str, ...] = ("sync", "async")
    placements: tuple[str, ...] = ("shared", "apart")
    staleness: int = 1
    """In async mode."""
    in_flight: bool = False
    """Whether engines then go on over the border of batches."""
    servers: tuple[float, ...] = ()
    """Tokens a second of servers that draw the answers, as measured; then all cards are for other roles."""
    sync_share: float = 1.0
    """Of the bytes of all weights, those that engines are sent after a batch."""
    time_limit: float = 60.0

    @property
    def batch(self) -> BatchProfile | None:
        """What was measured of a batch beside the model; None: its time is not counted."""
        return self.policy.profile.batch if self.policy.profile is not None else None

    @property
    def function_seconds(self) -> float:
        """Of the reward functions' processes, for a batch."""
        return self.batch.scoring_seconds * self.load.samples / self.batch.samples if self.batch else 0.0

    @property
    def packing_seconds(self) -> float:
        """Until the rows of a batch are made."""
        return self.batch.packing_seconds * self.load.samples / self.batch.samples if self.batch else 0.0

    @property
    def forward_passes(self) -> int:
        """Passes of the policy's plan beside training: with old weights, with the reference's."""
        return int(self.updates * self.epochs > 1) + int(self.reference)


def part_of_cluster(cluster: Cluster, cards: Sequence[Card]) -> Cluster:
    """The cluster of the first cards of some of its nodes; a host is shared as it was by all of them."""
    counts = Counter(card.node for card in cards)
    return with_nodes(
        cluster, {node: _part_of(group, node, counts[node]) for node, group in cluster.groups.items()}
    )


def _part_of(group: NodeGroup, node: str, count: int) -> NodeGroup | None:
    if not count:
        return None
    host, share = group.host, count / group.num_cards
    if host is not None:
        host = replace(
            host,
            memory=max(int(host.memory * share), 1),
            bandwidth=host.bandwidth and host.bandwidth * share,
            link_bandwidth=host.link_bandwidth and host.link_bandwidth * share,
        )
    return replace(group, host=host).with_cards(group.types[:count], name=node)


def engine_rates(problem: RolesProblem, topology: Topology) -> engines.EngineRates:
    """What engines of a problem take, with what its profile has measured."""
    policy = problem.policy
    measured = measured_rounds(policy.profile)
    return engines.EngineRates(topology, problem.load, measured, memory_fraction=policy.memory_fraction)


# --- the policy ------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PolicyWork:
    """A plan of the policy, and what a batch takes under it."""

    plan: Plan
    cost: PlanCost
    """Of the worst case, a row for each sample."""
    training_seconds: float
    """Of packed rows, and of packing; with the forward passes beside it, and the critic's part."""
    critic_seconds: float | None = None
    """Of these the critic's: values, and its optimizer steps; None: there is none."""

    @property
    def holders(self) -> list[engines.Holder]:
        """What its cards hold, for those who get weights from them."""
        found: list[engines.Holder] = []
        for p in range(len(self.plan.pipelines)):
            stages = [stage for stage in self.cost.stages if stage.pipeline == p]
            # The first replica of each stage fixes the ranges; the others hold the same.
            own = engines.holders_of(
                self.plan.model, [DecodeStage.of(stage, stage.replicas[0]) for stage in stages]
            )
            ranges = {holder.card.name: holder for holder in own}
            for stage in stages:
                for replica in stage.replicas:
                    found += [
                        replace(ranges[first.name], card=card)
                        for first, card in zip(stage.replicas[0], replica, strict=True)
                    ]
        return found


def policy_work(problem: RolesProblem, costs: Costs, plan: Plan, cost: PlanCost) -> PolicyWork:
    """What a batch takes under a plan of the policy: its rows packed, forward passes, more optimizer steps.
    The reference is read from the hosts once a batch. A critic follows the same plan on the same rows: a pass
    for values, and as many optimizer steps."""
    seconds = problem.packing_seconds
    seconds += _model_seconds(problem, costs, plan, cost, passes=problem.forward_passes)
    critic_seconds = None
    if problem.policy.critic:
        own = critic_of(costs)
        critic = replace(plan, model=own.problem.model, forecast=None)
        critic_seconds = _model_seconds(problem, own, critic, None, passes=1)
        seconds += critic_seconds
    if problem.reference:
        seconds += max(
            _reference_bytes(problem, stage) / costs.host_of(card).link_bytes_per_second
            for stage in cost.stages
            for card in stage.cards
        )
    return PolicyWork(plan=plan, cost=cost, training_seconds=seconds, critic_seconds=critic_seconds)


def _model_seconds(
    problem: RolesProblem, costs: Costs, plan: Plan, cost: PlanCost | None, *, passes: int
) -> float:
    """Seconds of training on a batch and of forward passes; `cost`, if known, is of a row for each sample."""
    rows = problem.packed_rows
    if rows < plan.global_batch_size:
        cost = cost_plan(costs, _with_rows(plan, rows))
    elif cost is None:
        cost = cost_plan(costs, plan)
    seconds = cost.step_seconds + (problem.updates - 1) * (cost.step_seconds - cost.compute_seconds)
    seconds *= problem.epochs
    return seconds + passes * _forward_seconds(plan, cost, rows)


def _reference_bytes(problem: RolesProblem, stage: StageCost) -> float:
    """What a card reads of the reference: its weights, or of a policy with adapters these."""
    if problem.load.model.lora is None:
        return stage.memory.parameters
    state = STATE_BYTES[problem.load.precision]
    return float(state.parameters * sum(unit.parameters for unit in stage.units))


def _with_rows(plan: Plan, rows: int) -> Plan:
    """The plan with lanes of fewer micro-batches, at least one for each replica of a stage."""
    share = rows / plan.global_batch_size
    pipelines: list[PipelinePlan] = []
    for own in plan.pipelines:
        count = max(math.ceil(own.num_micro_batches * share), *(len(s.replicas) for s in own.stages), 1)
        pipelines.append(replace(own, num_micro_batches=count))
    total = sum(pipeline.num_sequences for pipeline in pipelines)
    return replace(plan, pipelines=tuple(pipelines), global_batch_size=total)


def _forward_seconds(plan: Plan, cost: PlanCost, rows: int) -> float:
    """Of a forward-only lane over all rows: the slowest pipeline's."""
    latest = 0.0
    packed = _with_rows(plan, rows) if rows < plan.global_batch_size else plan
    for pipeline, times, workers in zip(packed.pipelines, cost.times, cost.workers, strict=True):
        lane = forward_only(workers=workers, num_micro_batches=pipeline.num_micro_batches)
        latest = max(latest, *(end for _, end in simulate(lane, times, workers=workers).spans))
    return latest


# --- a reward model --------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class RewardWork:
    """A reward model, whole on groups of cards that share the samples."""

    groups: tuple[tuple[Card, ...], ...]
    scoring_seconds: float
    memory: dict[str, float]
    """Bytes on each card, by category."""
    apart: bool = True
    """Whether the cards are its own, and not the policy's, between whose phases it scores."""


def scoring_on(
    device: DeviceType, model: ModelConfig, rows: TokenRows, *, width: int = 1
) -> tuple[CardCosts, dict[str, float]]:
    """(costs, bytes by category) of a reward model on a card of a group of `width`, a sample at a time."""
    group = TensorGroup(width)
    own = card_costs(model, rows, recompute="none", type_name="", device=device, profile=None, group=group)
    return own, scoring_bytes(model, own, rows.precision, width=width)


def reward_work(
    problem: RolesProblem, model: ModelConfig, groups: Sequence[tuple[Card, ...]]
) -> RewardWork | None:
    """What these groups, equally wide, take to score a batch; None if the model does not fit them."""
    load, width = problem.load, len(groups[0])
    forward, found = 0.0, dict[str, float]()
    for cards in groups:
        device = problem.policy.cluster.device_type(cards[0].type)
        own, found = scoring_on(device, model, TokenRows(1, load.length, load.precision), width=width)
        forward = max(forward, math.fsum(unit.forward_seconds for unit in own.units))
        found["reserved"] = float(device.reserved)
        if math.fsum(found.values()) > problem.policy.usable_bytes(cards[0].type):
            return None
    seconds = forward * math.ceil(load.samples / len(groups))
    return RewardWork(groups=tuple(groups), scoring_seconds=seconds, memory=found)


# --- a placement -----------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Roles on cards in a mode, and what a step takes."""

    mode: str
    staleness: int
    shared: bool
    split: tuple[tuple[int, int, int], ...]
    """Cards of each group of nodes: policy's, generation's, reward's."""
    policy: PolicyWork
    generation: engines.Generation
    reward: RewardWork | None
    function_seconds: float
    """Of the reward functions, for a batch; 0 if they were not measured."""
    has_batch: bool
    """Whether they were, and packing."""
    sync_seconds: float
    sync_bytes: float
    sync_mode_seconds: float
    """A step of the same placement in sync mode."""
    play: Play

    @property
    def step_seconds(self) -> float:
        return self.play.step_seconds

    @property
    def generation_seconds(self) -> float:
        """Of a batch, without the tail."""
        return self.generation.steady_seconds

    @property
    def tail_seconds(self) -> float:
        """What a batch takes longer if the engines begin and end empty."""
        return max(self.generation.batch_seconds - self.generation.steady_seconds, 0.0)

    @property
    def scoring_seconds(self) -> float:
        """Of a batch: the reward functions', as far as they are measured, and the reward model's."""
        return self.function_seconds + (self.reward.scoring_seconds if self.reward else 0.0)

    @property
    def source(self) -> Source:
        """`measured` if a profile has the policy's layers, the engines' rounds and what a batch takes beside;
        a reward model's scores are estimated."""
        rates, engines = self.generation.rates, self.generation.engines
        whole = self.has_batch and all(rates.are_measured(engine) for engine in engines)
        return self.policy.cost.source if whole and self.reward is None else "estimated"

    @property
    def idle(self) -> dict[str, float]:
        """Share of the step in which a role's cards wait, by role."""
        found = {"policy": self.play.idle("policy")}
        if not self.shared:
            count = len(self.generation.engine_batch_seconds)
            found["generation"] = math.fsum(self.play.idle(f"engine {e}") for e in range(count)) / count
        if self.reward and self.reward.apart:
            found["reward"] = self.play.idle("scoring")
        return found


def place(
    problem: RolesProblem,
    *,
    mode: str,
    split: tuple[tuple[int, int, int], ...],
    policy: PolicyWork,
    generation: engines.Generation,
    reward: RewardWork | None,
    shared: bool,
) -> Placement:
    """Price and play a placement."""
    moved = moved_bytes = 0.0
    if not shared:
        model, precision = problem.load.model, problem.load.precision
        targets = [
            holder for engine in generation.engines for holder in engines.holders_of(model, engine.stages)
        ]
        synced = model.parameters if model.lora is None else sum(model.trained_unit_parameters)
        bytes_ = problem.sync_share * synced * ELEMENT_BYTES[precision]
        moved = engines.sync_seconds(generation.rates.topology, policy.holders, targets, bytes_)
        moved_bytes = problem.sync_share * engines.sync_bytes(model, generation.engines, precision)
    staleness = problem.staleness if mode == "async" else 0

    def played(staleness: int) -> Play:
        """Engines begin each batch empty; with staleness, they take new weights between two while the policy
        goes on. In flight they are never empty, and draw as many prompts as each can answer."""
        score = problem.function_seconds + (reward.scoring_seconds if reward else 0.0)
        stops = moved if staleness else 0.0
        generate = tuple(seconds + stops for seconds in generation.engine_batch_seconds)
        if shared:
            generate = (generation.batch_seconds,)
        elif stops and problem.in_flight:
            generate = (generation.steady_seconds + stops,) * len(generation.engines)
        times = FlowTimes(generate=generate, score=score, train=policy.training_seconds, publish=moved)
        apart = reward is not None and reward.apart
        return play(times, staleness=staleness, shared=shared, scores_apart=apart)

    sync = played(0)
    return Placement(
        mode=mode,
        staleness=staleness,
        shared=shared,
        split=split,
        policy=policy,
        generation=generation,
        reward=reward,
        function_seconds=problem.function_seconds,
        has_batch=problem.batch is not None,
        sync_seconds=moved,
        sync_bytes=moved_bytes,
        sync_mode_seconds=sync.step_seconds,
        play=played(staleness) if staleness else sync,
    )
