"""The RL plan: a plan for each role of a reinforcement-learning job, and how the roles take turns.

Each role has ranks of its own, counted from 0; the ranks of the job run role by role in the order of ROLES.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, MinLen

from yuan_train.config.errors import PlanError, Violation
from yuan_train.config.load import Document, Keys, build, dump, is_mapping, key_of, write_text
from yuan_train.config.plan import Plan, RankPlan
from yuan_train.config.plan_constraints import read_plan, validate_plan
from yuan_train.config.rl import RLConfig

RoleName = Literal["policy", "generation", "reference", "reward", "critic"]
ScoringRole = Literal["reference", "reward"]
"""Roles that only score what others write."""
Mode = Literal["sync", "async"]
ROLES: tuple[RoleName, ...] = ("policy", "generation", "reference", "reward", "critic")
Share = Annotated[float, Gt(0), Le(1)]
SHARE_TOLERANCE = 1e-6


@dataclass(frozen=True, kw_only=True)
class RolePlan:
    """A role on cards of its own."""

    plan: Plan
    """Of its cards, ranks counted from 0."""


@dataclass(frozen=True, kw_only=True)
class GenerationPlan:
    """Engines on cards of their own (`plan`, `shares`), the policy's cards (`with: policy`, `slots`), or
    servers over HTTP (`with: servers`, `shares`), which the run names.

    A pipeline of the plan is an engine: its micro_batch_size is the slots of a group, its num_micro_batches
    the groups in flight; sequence_length is prompt and answer.
    """

    with_: Literal["policy", "servers"] | None = None
    """None: on cards of its own."""
    shares: Annotated[tuple[Share, ...], MinLen(1)] | None = None
    """Of the prompts, for each engine; they sum to 1. None: in proportion to the engines' slots."""
    slots: Annotated[int, Gt(0)] | None = None
    """Samples that each of the policy's pipelines generates at once; only with the policy."""
    plan: Plan | None = None
    """Of the engines' cards; None: the policy's generate, or servers."""

    @property
    def is_shared(self) -> bool:
        """Whether the policy's cards generate."""
        return self.with_ == "policy"


@dataclass(frozen=True, kw_only=True)
class ReferencePlan:
    """Where the reference is: on the policy's hosts, swapped in, or on cards of its own."""

    where: Literal["host"] | None = None
    """None: on cards of its own."""
    plan: Plan | None = None
    """Of its cards; None: it is on the policy's hosts."""


@dataclass(frozen=True, kw_only=True)
class CriticPlan:
    """Where PPO's critic is trained: on the policy's cards under its plan, or on cards of its own."""

    with_: Literal["policy"] | None = None
    """None: on cards of its own."""
    plan: Plan | None = None
    """Of its cards; None: it has the policy's."""


@dataclass(frozen=True, kw_only=True)
class RolePlans:
    """The roles of a job; what is None is not there."""

    policy: RolePlan
    """The model that is trained."""
    generation: GenerationPlan
    reference: ReferencePlan | None = None
    reward: RolePlan | None = None
    """A reward model or a teacher, on cards of its own; None: there is none, or it is on the policy's."""
    critic: CriticPlan | None = None
    """None: there is none, or the plan was made without regard to it."""


@dataclass(frozen=True, kw_only=True)
class RoleMemory:
    """Forecast bytes on each card of a stage of a role."""

    pipeline: Annotated[int, Ge(0)]
    """Its number in the role's plan, from 0."""
    stage: Annotated[int, Ge(0)]
    """Its number in the pipeline, from 0."""
    peak_memory_bytes: float
    """The sum of `categories`."""
    categories: dict[str, float]
    """Bytes by what they are for."""


@dataclass(frozen=True, kw_only=True)
class RlForecast:
    """Forecast of one step, that is of one batch: generated, scored, trained on, published."""

    step_seconds: float
    """Of a batch, all of its parts."""
    generation_seconds: float
    """Of a batch, all engines together."""
    scoring_seconds: float
    """By the reward model or reward functions."""
    training_seconds: float
    """Forward passes for old log-probabilities and the reference included."""
    sync_seconds: float
    """Weights from the policy to all engines."""
    sync_bytes: float
    """Of these weights."""
    idle: dict[str, float]
    """Share of the step in which a role's cards wait, by role."""
    tail_seconds: float = 0.0
    """From the end of an engine's full load to the end of the batch's last sample."""
    sync_mode_seconds: float
    """The same placement in sync mode."""
    lower_bound_seconds: float
    """No placement of the roles takes less."""
    source: Literal["measured", "estimated"]
    """Whether all times come from profiles."""
    critic_seconds: float | None = None
    """Of training the critic's: values, and its optimizer steps; None: there is none."""
    roles: dict[str, tuple[RoleMemory, ...]] = field(default_factory=dict[str, tuple[RoleMemory, ...]])
    """Memory by stage, by role."""


@dataclass(frozen=True, kw_only=True)
class RlPlan:
    """Which role runs on which cards, and whether they take turns or run at the same time."""

    version: int = 1
    """Of the format."""
    kind: Literal["rl"] = "rl"
    """Tells it from a plan of one model."""
    cluster: str = ""
    """The name of the cluster that it was made for."""
    mode: Mode
    """Whether roles take turns (sync), or generate the next batch while training on one (async)."""
    staleness: Annotated[int, Ge(0)] = 0
    """How many batches older than the trained weights a sample's weights may be."""
    roles: RolePlans
    forecast: RlForecast | None = None
    """What the planner expects of a step; None in a plan written by hand."""

    @property
    def plans(self) -> dict[RoleName, Plan]:
        """The plan of each role that has cards of its own, in the order of the job's ranks."""
        roles = self.roles
        owners = (roles.policy, roles.generation, roles.reference, roles.reward, roles.critic)
        found = zip(ROLES, owners, strict=True)
        return {name: own.plan for name, own in found if own is not None and own.plan is not None}

    @property
    def role_ranks(self) -> dict[RoleName, range]:
        """The ranks of the job of each role that has cards of its own."""
        first, found = 0, dict[RoleName, range]()
        for name, plan in self.plans.items():
            found[name] = range(first, first + plan.world_size)
            first += plan.world_size
        return found

    @property
    def ranks(self) -> tuple[RankPlan, ...]:
        """The ranks of the job."""
        entries = (entry for plan in self.plans.values() for entry in plan.ranks)
        return tuple(replace(entry, rank=rank) for rank, entry in enumerate(entries))

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return sum(plan.world_size for plan in self.plans.values())

    @property
    def engine_shares(self) -> tuple[float, ...]:
        """The share of the prompts of each engine."""
        generation = self.roles.generation
        plan = self.roles.policy.plan if generation.plan is None else generation.plan
        if generation.shares is not None:
            return generation.shares
        # Of shared cards: each pipeline answers its part of the batch.
        slots = [pipeline.num_sequences for pipeline in plan.pipelines]
        return tuple(number / sum(slots) for number in slots)


def validate_rl_plan(plan: RlPlan) -> Iterator[Violation]:
    """Yield every violated constraint of an RL plan."""
    if plan.version != 1:
        yield Violation(("version",), f"wanted 1, got {plan.version}; plan again with this release")
    for name, own in plan.plans.items():
        for violation in validate_plan(own):
            yield replace(violation, path=("roles", name, "plan", *violation.path))
        pages = {"parameter_offload": "pages are written for pretraining alone; leave it out"}
        yield from _set_by_stages(("roles", name, "plan"), own, pages)
    yield from _mode_constraints(plan)
    yield from _card_constraints(plan)
    yield from _generation_constraints(plan.roles.generation)
    yield from _model_constraints(plan)
    for name in ("reference", "reward"):
        if name in plan.plans:
            yield from _untrained(("roles", name, "plan"), plan.plans[name])
    critic = plan.roles.critic
    for name, field_name, place in (("reference", "where", "host"), ("critic", "with_", "policy")):
        role, key = getattr(plan.roles, name), key_of(field_name)
        if role is not None and (getattr(role, field_name) is None) == (role.plan is None):
            given = "both" if role.plan is not None else "neither"
            yield Violation(
                ("roles", name), f"{given} of {key} and plan; give `{key}: {place}`, or a plan of its own"
            )
    if critic is not None and critic.with_ is not None:
        # What a policy's stage keeps on its host a critic's would keep there too, which is not there yet.
        why = "a critic's stage keeps nothing on the host; leave it out"
        on_hosts: Mapping[str, str] = {"optimizer_offload": why, "activation_offload": why}
        yield from _set_by_stages(("roles", "policy", "plan"), plan.roles.policy.plan, on_hosts)


def _set_by_stages(path: Keys, plan: Plan, faults: Mapping[str, str]) -> Iterator[Violation]:
    """Yield the keys that a stage sets, of some that it may not: with what is wrong with each."""
    for p, s, stage in plan.numbered_stages:
        for key, fault in faults.items():
            if (value := getattr(stage, key)) not in (0, "none"):
                shown = value if isinstance(value, str) else f"{value:g}"
                yield Violation((*path, "pipelines", p, "stages", s, key), f"{shown}: {fault}")


def _mode_constraints(plan: RlPlan) -> Iterator[Violation]:
    if plan.mode == "sync" and plan.staleness:
        yield Violation(
            ("staleness",), f"{plan.staleness}, but mode sync has none; set it to 0, or mode: async"
        )
    if plan.mode == "async" and plan.roles.generation.is_shared:
        yield Violation(
            ("mode",),
            "async, but generation shares the policy's cards, which do one thing at a time; set mode: sync, "
            "or give generation a plan of its own",
        )


def _card_constraints(plan: RlPlan) -> Iterator[Violation]:
    owner: dict[str, str] = {}
    for name, own in plan.plans.items():
        for entry in own.ranks:
            first = owner.setdefault(entry.device, name)
            if first != name:
                yield Violation(
                    ("roles", name, "plan", "ranks", entry.rank, "device"),
                    f"card {entry.device!r} works for {first} already; a card has one role",
                )


def _generation_constraints(generation: GenerationPlan) -> Iterator[Violation]:
    path, plan = ("roles", "generation"), generation.plan
    if generation.with_ == "servers":
        if plan is not None or generation.slots is not None or generation.shares is None:
            yield Violation(path, "with: servers takes shares, and them alone; give a share of each server")
        elif abs(sum(generation.shares) - 1) > SHARE_TOLERANCE:
            yield _sum_of_shares(generation.shares)
        return
    if generation.is_shared:
        if plan is not None or generation.shares is not None:
            yield Violation(path, "with: policy takes slots alone; leave plan and shares out")
        if generation.slots is None:
            yield Violation((*path, "slots"), "missing; with: policy says how many samples run at once")
        return
    if generation.slots is not None:
        yield Violation((*path, "slots"), "the plan's micro-batches are the slots; leave it out")
    if plan is None:
        yield Violation((*path, "plan"), "missing; give one, or `with: policy` and slots")
        return
    if generation.shares is not None:
        if len(generation.shares) != len(plan.pipelines):
            counts = f"{len(generation.shares)} shares for {len(plan.pipelines)} engines"
            yield Violation((*path, "shares"), f"{counts} (pipelines of the plan); give one for each")
        elif abs(sum(generation.shares) - 1) > SHARE_TOLERANCE:
            yield _sum_of_shares(generation.shares)
    if plan.schedule != "1f1b":
        yield Violation((*path, "plan", "schedule"), f"wanted 1f1b, got {plan.schedule}: nothing is trained")
    yield from _untrained((*path, "plan"), plan)


def _sum_of_shares(shares: Sequence[float]) -> Violation:
    return Violation(("roles", "generation", "shares"), f"sum to {sum(shares):g}; they must sum to 1")


def _untrained(path: Keys, plan: Plan) -> Iterator[Violation]:
    """What only training has: recompute, and the optimizer's keys."""
    idle = "which this role does not do; leave it out"
    if plan.optimizer_sharding:
        yield Violation((*path, "optimizer_sharding"), f"true: optimizer steps, {idle}")
    if plan.sequence_parallel:
        yield Violation((*path, "sequence_parallel"), f"true: less for backwards, {idle}")
    faults = dict.fromkeys(("recompute", "activation_offload"), f"backwards, {idle}")
    yield from _set_by_stages(path, plan, faults | {"optimizer_offload": f"optimizer steps, {idle}"})


def _model_constraints(plan: RlPlan) -> Iterator[Violation]:
    """Roles with the policy's weights have its model and length; a critic computes one number."""
    policy = plan.roles.policy.plan
    for name, own in plan.plans.items():
        path = ("roles", name, "plan")
        if name in ("reward", "critic"):
            if name == "critic" and own.model.output != "value":
                yield Violation((*path, "model", "output"), f"wanted value, got {own.model.output}")
            continue
        fields = (key for key in type(own.model).__dataclass_fields__ if key != "name")
        differences = [key for key in fields if getattr(own.model, key) != getattr(policy.model, key)]
        if differences:
            yield Violation(
                (*path, "model"), f"{', '.join(differences)}: not the policy's; {name} has the same model"
            )
        if own.sequence_length != policy.sequence_length:
            yield Violation(
                (*path, "sequence_length"),
                f"{own.sequence_length}, but the policy has {policy.sequence_length}; make them equal",
            )


def is_rl_plan(document: Document) -> bool:
    """Whether a document is an RL plan, by its keys; its constraints may be violated."""
    return is_mapping(document.value) and (document.value.get("kind") == "rl" or "roles" in document.value)


def load_rl_plan(path: str | Path) -> RlPlan:
    """Read an RL plan. Raises PlanError with every violated constraint."""
    return build(read_plan(path), RlPlan, validate=validate_rl_plan, error=PlanError)


def names_rl_plan(path: str | Path) -> bool:
    """Whether a file is an RL plan. Raises PlanError if it cannot be read."""
    return is_rl_plan(read_plan(path))


def save_rl_plan(path: str | Path, plan: RlPlan) -> None:
    """Write an RL plan atomically. Raises ConfigError if it fails."""
    write_text(path, dump(plan))


def check_rl_plan_of_run(plan: RlPlan, run: RLConfig) -> None:
    """Raise PlanError with every difference unless the plan was made for this run."""
    faults: list[str] = []
    policy = plan.roles.policy.plan
    pairs = {
        "sequence_length": (policy.sequence_length, run.sequence_length),
        "global_batch_size": (policy.global_batch_size, run.samples_per_step),
        "model": (replace(policy.model, name=""), replace(run.model, name="")),
    }
    for key, (planned, wanted) in pairs.items():
        if planned != wanted:
            values = "" if key == "model" else f" (planned {planned}, wanted {wanted})"
            faults.append(f"roles.policy.plan.{key}: not the run's{values}; plan again")
    generation, group = plan.roles.generation, run.algorithm.group
    slots = [generation.slots] if generation.slots is not None else []
    slots += [pipeline.num_sequences for pipeline in generation.plan.pipelines] if generation.plan else []
    odd = [number for number in slots if number % group]
    if odd:
        faults.append(
            f"roles.generation: {odd[0]} slots are no multiple of algorithm.group, {group}; plan again"
        )
    servers = 0 if run.roles.generation is None else len(run.roles.generation.http)
    if generation.with_ == "servers" and len(plan.engine_shares) != servers:
        faults.append(
            f"roles.generation: planned for {len(plan.engine_shares)} servers, and roles.generation.http of "
            f"the run names {servers}; plan again"
        )
    if (plan.roles.reference is not None) != run.needs_reference:
        has = "one" if plan.roles.reference is not None else "none"
        coefficient = f"algorithm.kl.coefficient is {run.algorithm.kl.coefficient:g}"
        faults.append(f"roles.reference: the plan has {has}, and {coefficient}; plan again")
    scoring = plan.roles.reward
    if scoring is not None and run.reward.reader is None:
        faults.append(
            "roles.reward: the plan has one, and the run has neither reward.model nor reward.teacher; plan "
            "again"
        )
    elif scoring is not None and scoring.plan.model.output != run.reward.wanted_output:
        faults.append(
            f"roles.reward.plan.model.output: {scoring.plan.model.output}, and the run's model that reads "
            f"answers has {run.reward.wanted_output}; plan again"
        )
    if scoring is not None and scoring.plan.sequence_length < run.sequence_length:
        planned = scoring.plan.sequence_length
        faults.append(
            f"roles.reward.plan.sequence_length: a prompt and its answer may have {run.sequence_length} "
            f"(planned {planned}); plan again"
        )
    if plan.roles.critic is not None and run.critic is None:
        faults.append(
            f"roles.critic: the plan has one, and algorithm.name is {run.algorithm.name}; plan again"
        )
    if faults:
        raise PlanError("\n".join(faults))
