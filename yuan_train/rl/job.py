"""The job of a rank in a run of reinforcement learning: everything it needs, read and checked."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

from yuan_train.checkpoint.load import Checkpoint, check_same_model, find_checkpoint, find_checkpoints
from yuan_train.config.errors import ConfigError, DataError, PlanError
from yuan_train.config.load import dump
from yuan_train.config.plan import Plan, single_card_plan
from yuan_train.config.plan_constraints import check_plan_of_run
from yuan_train.config.rl import SKIPS_IN_TURN, HttpGeneration, Mode, RLConfig, policy_run
from yuan_train.config.rl_plan import RlForecast, RlPlan, ScoringRole
from yuan_train.data.prompts import Prompt, Prompts, read_prompts
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.rl.experience import Answers
from yuan_train.rl.passes import find_reading_model
from yuan_train.rl.servers import check_servers
from yuan_train.train.job import Job, Position, check_position
from yuan_train.train.metrics import check_trackers

MOST_SLOTS = 128
"""Slots of an engine, unless the run says how many."""


@dataclass(frozen=True)
class RLJob:
    """A run, and the training job of its policy; the ranks are not connected yet."""

    run: RLConfig
    policy: Job
    prompts: Prompts
    evaluation: tuple[Prompt, ...]
    """To be measured; empty if none are."""
    roles: RlPlan | None = None
    """Where some roles have cards of their own; None: the policy's cards do everything."""
    reading_model: Checkpoint | None = None
    """That of `reward.reader`: a reward model, or a teacher."""
    critic_start: Checkpoint | None = None
    """Whose weights the critic begins with; None: the policy's."""
    forecast: RlForecast | None = None
    """What an RL plan says of a step."""

    @property
    def http(self) -> HttpGeneration | None:
        """The servers that draw the answers, if some do."""
        return self.run.roles.generation

    @property
    def generates_apart(self) -> bool:
        """Whether engines on other cards, or servers, draw the answers."""
        return self.http is not None or (self.roles is not None and not self.roles.roles.generation.is_shared)

    @property
    def begun(self) -> dict[str, str]:
        """`start`: the name of the checkpoint that the run began with (empty: none); of checkpoints."""
        policy = self.policy
        if policy.checkpoint is None:
            return {"start": policy.start.path.name if policy.start is not None else ""}
        # None: another version has saved it.
        return {key: value for key, value in policy.checkpoint.state.get("rl", {}).items() if key == "start"}

    def has_apart(self, role: ScoringRole) -> bool:
        """Whether a role scores on cards of its own."""
        return self.roles is not None and role in self.roles.plans

    @property
    def mode(self) -> Mode:
        """Whether batches are drawn while others are trained."""
        if self.http is not None:
            return "async" if self.run.schedule.mode == "async" else "sync"
        return "sync" if self.roles is None else self.roles.mode

    @property
    def staleness(self) -> int:
        """Batches that the weights of an answer may be older than its own."""
        if self.mode == "sync":
            return 0
        if self.http is None and self.roles is not None:
            return self.roles.staleness
        return self.run.schedule.staleness or 0

    @property
    def shares(self) -> tuple[float, ...]:
        """What part of the prompts each pipeline answers: its share of the batch."""
        plan = self.policy.plan
        return tuple(p.num_sequences / plan.global_batch_size for p in plan.pipelines)

    def slots(self, pipeline: int) -> int:
        """Answers that a pipeline writes at a time: without a number in the run, those of its prompts."""
        group = self.run.algorithm.group
        if self.run.generation.slots is not None:
            return self.run.generation.slots
        plan, prompts = self.policy.plan, self.run.train.prompts_per_step
        # Rounded up: where one prompt has no slots, all the others' rounds are made twice.
        own = -(-prompts * plan.pipelines[pipeline].num_sequences // plan.global_batch_size)
        return max(group, min(own * group, MOST_SLOTS) // group * group)

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer."""
        given = frozenset(self.run.generation.stop_ids)
        tokenizer = self.policy.tokenizer
        return given or (tokenizer.stop_ids if tokenizer is not None else given)


def prepare_rl(
    run: RLConfig,
    plan: Plan | None,
    position: Position,
    *,
    roles: RlPlan | None = None,
    forecast: RlForecast | None = None,
) -> RLJob:
    """Check all files of a run and return its job; without a plan, one process does everything.

    With `roles`, some of them have cards of their own: `plan` and `position` are the policy's. A `forecast`
    is logged beside the measured steps.

    Succeeds or fails on every rank alike. Raises YuanError.
    """
    check_supported(run, plan, roles)
    length = run.sequence_length
    if plan is not None and plan.sequence_length < length:
        raise PlanError(
            f"sequence_length: the plan was made for {plan.sequence_length}, but a prompt of "
            f"{run.data.max_prompt_tokens} tokens (data.max_prompt_tokens) and an answer of "
            f"{run.generation.max_new_tokens} (generation.max_new_tokens) take {length}; plan again"
        )
    policy = policy_run(run, sequence_length=plan.sequence_length if plan is not None else None)
    plan = plan or single_card_plan(policy)
    check_plan_of_run(plan, policy)
    if position.rank == 0:
        check_trackers(run.log)
    device, tokenizer = check_position(policy, plan, position)
    files = [read_file(source.file, run, tokenizer) for source in run.data.prompts]
    weights = [source.weight for source in run.data.prompts]
    prompts = Prompts(files, weights, seed=run.train.seed, order=run.data.order)
    evaluation: list[Prompt] = []
    if run.data.evaluation is not None:
        evaluation = read_file(run.data.evaluation, run, tokenizer)[: run.evaluation.prompts]
    checkpoint, start = find_checkpoints(policy) if position.world_size == 1 else (None, None)
    answers = Answers([*prompts.fingerprints, _digest(run)])
    job = Job(policy, plan, position, device, answers, None, tokenizer, checkpoint, start)
    reading_model = find_reading_model(run, tokenizer)
    start_of_critic = _critic_start(run)
    if run.roles.generation is not None and position.rank == 0:
        check_servers(run.roles.generation, run)
    return RLJob(run, job, prompts, tuple(evaluation), roles, reading_model, start_of_critic, forecast)


def check_supported(run: RLConfig, plan: Plan | None, roles: RlPlan | None = None) -> None:
    """Raise YuanError for what a run or a plan may ask for, and this release cannot do."""
    faults: list[str] = []
    servers = run.roles.generation
    if servers is not None and roles is not None and roles.roles.generation.plan is not None:
        faults.append(
            "roles.generation.http: servers draw the answers, but the plan has cards for that; plan again, "
            "or leave it out"
        )
    if servers is None and run.schedule.mode == "async" and (roles is None or roles.mode != "async"):
        faults.append(
            "schedule.mode: async is not there yet without an RL plan of roles apart, or servers over HTTP; "
            "make one (yuan-train plan), set sync, or leave it out"
        )
    if run.schedule.mode == "sync" and roles is not None and roles.mode != "sync":
        faults.append("schedule.mode: sync, but the plan is async; plan again, or leave it out")
    if run.data.skip_solved and roles is not None and roles.mode != "sync":
        faults.append(f"data.skip_solved: {run.data.skip_solved}, but {SKIPS_IN_TURN}, and plan again")
    if run.generation.weights == "in_flight" and (roles is None or roles.mode != "async"):
        faults.append(
            "generation.weights: in_flight, but no engine draws while the policy trains; give an RL plan of "
            "mode async, or leave it out"
        )
    has_others = roles is not None and not roles.roles.generation.is_shared and len(roles.engine_shares) > 1
    has_others |= servers is not None and len(servers.http) > 1
    if run.generation.on_lost_engine == "go_on" and not has_others:
        faults.append(
            "generation.on_lost_engine: go_on, but no other engine would be left; give an RL plan of several "
            "engines on cards of their own, or several servers, or leave it out"
        )
    if run.model.num_experts and run.critic is not None:
        faults.append("model.num_experts: a critic with experts is not there yet; use grpo")
    if run.model.balance == "bias" and roles is not None:
        faults.append(
            "model.balance: bias, but roles on cards of their own are not sent it; set sequence, or none"
        )
    scaling = run.model.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        faults.append(
            "model.rope_scaling: dynamic changes with the length, so draws would not be those trained"
        )
    if faults:
        raise ConfigError("\n".join(faults))
    for p, s, stage in plan.numbered_stages if plan is not None else ():
        away = (stage.optimizer_offload, stage.activation_offload, stage.parameter_offload)
        if run.critic is not None and any(away):
            raise PlanError(
                f"pipelines[{p}].stages[{s}]: what a critic's stage keeps on the host is not there yet; "
                "plan again without memory tiers in search.policy, or use grpo"
            )
        if any(edge % 1 for edge in stage.layers):
            raise PlanError(
                f"pipelines[{p}].stages[{s}].layers: {list(stage.layers)}: half a layer does not "
                "generate; plan again with search.policy.half_layers: false"
            )


def read_file(file: str, run: RLConfig, tokenizer: Tokenizer | None) -> list[Prompt]:
    """The prompts of a file of a run. Raises DataError."""
    found = read_prompts(
        file,
        tokenizer,
        template=run.data.template,
        max_tokens=run.data.max_prompt_tokens,
        vocab_size=run.model.vocab_size,
    )
    compared = [f.label for f in run.reward.functions if f.name in ("exact", "number", "math", "regex")]
    without = sum(prompt.answer is None for prompt in found)
    if compared and without:
        raise DataError(
            f"{file}: {without} of {len(found)} prompts have no `answer`, with which reward function "
            f"{compared[0]} compares; give one to each"
        )
    return found


def _critic_start(run: RLConfig) -> Checkpoint | None:
    """The checkpoint of `critic.checkpoint`, or None. Raises CheckpointError if it holds another model."""
    if run.critic is None or run.critic.checkpoint is None:
        return None
    found = find_checkpoint(run.critic.checkpoint)
    check_same_model(found, replace(run.model, output="value"), as_start=True)
    return found


def _digest(run: RLConfig) -> str:
    """What ranks compare of the run beyond the policy's: all that has no path."""
    data = replace(run.data, prompts=(), evaluation=None, tokenizer=None)
    critic = None
    if run.critic is not None:
        critic = replace(run.critic, checkpoint=None if run.critic.checkpoint is None else "given")
    servers = run.roles.generation and replace(run.roles.generation, folder=None)
    parts = [data, run.generation, run.reward, run.algorithm, critic, run.schedule, run.evaluation, servers]
    plain = dump(parts)
    return f"reinforcement learning {hashlib.sha256(plain.encode()).hexdigest()[:16]}"
