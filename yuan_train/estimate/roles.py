"""Bytes of every role of an RL plan on its cards, from the plan alone.

Memory depends on the types of cards, which a plan knows, and on no link.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.errors import PlanError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.rl_plan import RlPlan
from yuan_train.planner.costs.owners import cards_of
from yuan_train.planner.costs.plan_problem import PlanProblem
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.costs.workload import TokenRows
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.planner.roles.decode import PREFILL_CHUNK, Decoder, DecodeStage, Writing
from yuan_train.planner.roles.engines import num_groups
from yuan_train.planner.roles.placement import scoring_on

ANY_LINK = Link(bandwidth=1e9)
LASTING = ("parameters", "gradients", "optimizer", "critic", "reserved")
"""Categories that are there from step to step."""


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes on each card of a stage of a role."""

    role: str
    pipeline: int
    stage: int
    card: str
    """Type of its cards."""
    categories: dict[str, float]
    """Of the phase that holds most."""
    capacity: int

    @property
    def peak(self) -> float:
        """Bytes of all categories."""
        return math.fsum(self.categories.values())

    @property
    def fits(self) -> bool:
        """Whether they are at most the card's memory."""
        return self.peak <= self.capacity


def plan_memory(
    plan: RlPlan, *, prompt: int | None = None, group: int = 1, reward_model: ModelConfig | None = None
) -> list[StageBytes]:
    """The bytes of every role by stage, in bf16 (fp16 where a card has none).

    `prompt` is the length of a prompt; None: a whole chunk is read at a time. `group` is the answers to a
    prompt: so many slots share the reading of one. A `reward_model` scores on the policy's cards. Raises
    PlanError for a card of unknown type.
    """
    found: list[StageBytes] = []
    generation, read = plan.roles.generation, _Read(prompt or PREFILL_CHUNK, group)
    for role, own in plan.plans.items():
        critic = role == "policy" and plan.roles.critic is not None and plan.roles.critic.plan is None
        costs = _costs_of(own, critic=critic)
        if role == "policy":
            for stage in cost_plan(costs, own).stages:
                slots = generation.slots if generation.is_shared else None
                found.append(_training(costs, own, stage, slots, read, reward_model))
        else:
            found += _forward_only(role, costs, own, read)
    return found


@dataclass(frozen=True)
class _Read:
    """What a plan does not say: tokens of a prompt, and answers to it."""

    prompt: int
    group: int


def _costs_of(plan: Plan, *, critic: bool) -> Costs:
    """The costs of a plan's own cards, a node for each."""
    groups: list[NodeGroup] = []
    nodes: dict[str, dict[int, str]] = {}
    for entry in plan.ranks:
        if plan.find_type(entry.type) is None:
            raise PlanError(f"ranks[{entry.rank}].type: {entry.type!r} is neither in the catalogue nor here")
        node, _, number = entry.device.rpartition("/")
        if not node or not number.isdecimal():
            raise PlanError(f"ranks[{entry.rank}].device: wanted NODE/NUMBER, got {entry.device!r}")
        nodes.setdefault(node, {})[int(number)] = entry.type
    for node, own in nodes.items():
        # Cards that the plan leaves out are of any type.
        types = [own.get(i, next(iter(own.values()))) for i in range(max(own) + 1)]
        groups.append(NodeGroup(name=node, link=ANY_LINK, network=ANY_LINK).with_cards(types))
    cluster = Cluster(name=plan.cluster, nodes=tuple(groups), device_types=plan.device_types)
    has_bf16 = all(cluster.device_type(entry.type).bf16 for entry in plan.ranks)
    return make_costs(
        PlanProblem(
            cluster=cluster,
            model=plan.model,
            sequence_length=plan.sequence_length,
            global_batch_size=plan.global_batch_size,
            precision="bf16" if has_bf16 else "fp16",
            critic=critic,
        )
    )


def _training(
    costs: Costs,
    plan: Plan,
    stage: StageCost,
    slots: int | None,
    read: _Read,
    reward_model: ModelConfig | None,
) -> StageBytes:
    """What training holds; instead, where that is more, generation on shared cards, or scoring."""
    training = stage.memory.categories
    phases = [training]
    kept = {name: training[name] for name in LASTING if name in training}
    if reward_model is not None:
        phases.append(kept | _whole_scoring(costs, plan, stage, reward_model))
    if slots is not None:
        own = DecodeStage.of(stage, stage.replicas[0])
        groups = max(num_groups(len(plan.pipelines[stage.pipeline].stages), slots // read.group), 1)
        drawn = _drawing(costs, plan, own, slots // groups, groups, read)
        phases.append(kept | {name: drawn[name] for name in ("slots", "buffers")})
    return StageBytes(
        role="policy",
        pipeline=stage.pipeline,
        stage=stage.stage,
        card=stage.card.type,
        categories=max(phases, key=lambda phase: math.fsum(phase.values())),
        capacity=round(stage.capacity_bytes),
    )


def _whole_scoring(costs: Costs, plan: Plan, stage: StageCost, model: ModelConfig) -> dict[str, float]:
    """Of a reward model that every card has whole while it scores."""
    device = costs.problem.cluster.device_type(stage.card.type)
    rows = TokenRows(1, plan.sequence_length, costs.problem.precision)
    _, scoring = scoring_on(device, model, rows)
    return {"reward model": scoring["weights"], "buffers": scoring["activations"]}


def _forward_only(role: str, costs: Costs, plan: Plan, read: _Read) -> list[StageBytes]:
    found: list[StageBytes] = []
    for p, s, stage in plan.numbered_stages:
        cards = cards_of(costs, plan, stage)[0]
        own = DecodeStage.of(stage, cards)
        if role == "generation":
            slots, groups = plan.pipelines[p].micro_batch_size, plan.pipelines[p].num_micro_batches
            categories = _drawing(costs, plan, own, slots, groups, read)
        else:
            categories = _scoring(costs, plan, own)
        found.append(
            StageBytes(
                role=role,
                pipeline=p,
                stage=s,
                card=cards[0].type,
                categories=categories,
                capacity=min(costs.problem.cluster.device_type(card.type).memory for card in cards),
            )
        )
    return found


def _drawing(
    costs: Costs, plan: Plan, stage: DecodeStage, slots: int, groups: int, read: _Read
) -> dict[str, float]:
    """Of a stage that generates on `slots` slots of each group."""
    decoder = _decoder(costs, plan)
    return decoder.bytes_on(stage, _writing(decoder, plan, stage, read), slots=slots, num_groups=groups)


def _scoring(costs: Costs, plan: Plan, stage: DecodeStage) -> dict[str, float]:
    """Of a role that reads a sample at once, and keeps no keys and values."""
    decoder = _decoder(costs, plan)
    fixed = decoder.fixed_bytes(stage)
    chunk = _writing(decoder, plan, stage, _Read(plan.sequence_length, 1)).chunk_bytes
    return {"weights": fixed["weights"], "buffers": chunk, "reserved": fixed["reserved"]}


def _decoder(costs: Costs, plan: Plan) -> Decoder:
    return Decoder(costs.topology, plan.model, costs.problem.precision)


def _writing(decoder: Decoder, plan: Plan, stage: DecodeStage, read: _Read) -> Writing:
    return decoder.writing_on(stage, group=read.group, prompt=read.prompt, length=plan.sequence_length)
