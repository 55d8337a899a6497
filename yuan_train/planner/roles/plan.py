"""The problem of placing the roles of a run, and the plan of a placement."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Literal

from yuan_train.config import rl_plan
from yuan_train.config.cluster import Card, Cluster
from yuan_train.config.errors import ConfigError, PlanError, Violation
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.profile import Profile
from yuan_train.config.rl import Mode, Placement, RLConfig, policy_run
from yuan_train.planner.costs.grad_reduce import cards_of
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.costs.workload import PlanProblem, plan_on_cards
from yuan_train.planner.evaluate.plan_cost import cost_plan, make_forecast
from yuan_train.planner.roles import placement as placing
from yuan_train.planner.roles.engines import (
    DecodeStage,
    EnginePlan,
    Generation,
    Workload,
    engine_memory,
    num_groups,
)
from yuan_train.planner.roles.search import RolesResult

PACKED_SHARE = 0.9
"""Of a row that samples of unlike lengths fill, the longest first; policy, not measured."""


def roles_problem(
    run: RLConfig, cluster: Cluster, profile: Profile | None, *, reward_model: ModelConfig | None = None
) -> placing.RolesProblem:
    """The problem of a run. Raises ConfigError for what no plan may have, or if every mode is excluded."""
    if run.critic is not None:
        _check_critic(run)
    policy = policy_run(run)
    # Activations only if they are asked for: sampling wants its hosts' memory too.
    offload = ("optimizer",) if run.search.policy.offload is None else run.search.policy.offload
    # What adapters have stays on the cards, and so does what a critic has.
    offload = offload if run.model.lora is None and run.critic is None else ()
    expected = run.expected_new_tokens
    servers = (run.roles.generation.tokens_per_second or ()) if run.roles.generation is not None else ()
    placement: Placement = "apart" if servers else "shared"
    if expected > run.generation.max_new_tokens:
        most = run.generation.max_new_tokens
        raise ConfigError(f"search.expected_new_tokens: {expected}, but generation.max_new_tokens is {most}")
    return placing.RolesProblem(
        policy=PlanProblem(
            cluster=cluster,
            model=run.model,
            sequence_length=run.sequence_length,
            global_batch_size=run.samples_per_step,
            precision=run.train.precision,
            profile=profile,
            sends=run.search.policy.send_mode,
            reduce_dtype=run.optimizer.reduce_dtype,
            bucket_size=run.optimizer.bucket_size,
            memory_fraction=run.search.policy.memory_fraction,
            host_reserved=run.memory.host_reserved,
            critic=run.critic is not None,
        ),
        load=Workload(
            model=run.model,
            precision=run.train.precision,
            prompts=run.train.prompts_per_step,
            group=run.algorithm.group,
            prompt_tokens=run.data.max_prompt_tokens,
            new_tokens=run.generation.max_new_tokens,
            expected_new_tokens=float(expected),
        ),
        micro_batch_size=policy.train.micro_batch_size,
        policy_search=replace(policy.feasible_search, offload=offload),
        packed_rows=_packed_rows(run, expected),
        updates=run.algorithm.updates,
        epochs=run.algorithm.epochs,
        reference=run.needs_reference,
        reward_model=reward_model,
        tensor=run.search.generation.tensor,
        slots=run.search.generation.slots,
        most_slots=run.generation.slots,
        modes=_modes(run),
        # Of servers whose speed is not known the plan is as if the policy drew.
        placements=run.search.placement if run.roles.generation is None else (placement,),
        servers=servers,
        staleness=run.schedule.staleness or 0,
        in_flight=run.generation.weights == "in_flight",
        sync_share=run.search.sync_share,
        time_limit=run.search.time_limit,
    )


def _modes(run: RLConfig) -> tuple[Mode, ...]:
    """The modes that a plan may have. Raises ConfigError if search keys and schedule exclude all of them."""
    if run.roles.generation is not None:
        is_async = run.schedule.mode == "async" and run.roles.generation.tokens_per_second is not None
        return ("async",) if is_async else ("sync",)
    wanted: Mode | Literal["auto"] = run.schedule.mode
    why = "schedule.mode"
    if wanted == "auto" and run.generation.weights == "in_flight":
        wanted, why = "async", "with generation.weights: in_flight it"
    if wanted == "auto" and run.data.skip_solved:
        wanted, why = "sync", "with data.skip_solved it"
    modes: tuple[Mode, ...] = tuple(mode for mode in run.search.modes if wanted in ("auto", mode))
    if not modes:
        raise ConfigError(f"search.modes: {list(run.search.modes)}, but {why} is {wanted}; change one")
    if modes == ("async",) and "apart" not in run.search.placement:
        raise ConfigError("search.placement: shared cards cannot be async; add apart, or allow mode sync")
    return modes


def _check_critic(run: RLConfig) -> None:
    """Raise ConfigError for what a policy with a critic cannot have."""
    if run.search.policy.offload:
        raise ConfigError(
            f"search.policy.offload: {list(run.search.policy.offload)}, but what a critic's stage keeps on "
            "the host is not there yet; leave it out, or use grpo"
        )
    if run.model.num_experts:
        raise ConfigError("model.num_experts: a critic with experts is not there yet; use grpo")


def _packed_rows(run: RLConfig, expected: int) -> int:
    """Rows that the samples of a step fill, to PACKED_SHARE where they share rows."""
    samples = run.samples_per_step
    length, mean = run.sequence_length, run.data.max_prompt_tokens + expected
    if not run.shares_rows:
        return samples
    return min(math.ceil(samples * mean / (length * PACKED_SHARE)), samples)


def make_rl_plan(problem: placing.RolesProblem, result: RolesResult) -> rl_plan.RlPlan:
    """The plan of the best placement, with its forecast."""
    best = result.best
    if best.shared:
        generation = rl_plan.GenerationPlan(
            with_="policy", slots=min(e.slots for e in best.generation.engines)
        )
    else:
        shares = [round(share, 6) for share in best.generation.shares[:-1]]
        shares.append(1.0 - math.fsum(shares))
        engines = None if problem.servers else engines_plan(problem, best.generation.engines)
        who = "servers" if engines is None else None
        generation = rl_plan.GenerationPlan(with_=who, shares=tuple(shares), plan=engines)
    reward = None
    if best.reward is not None and problem.reward_model is not None:
        reward = rl_plan.RolePlan(plan=reward_plan(problem, problem.reward_model, best.reward))
    found = rl_plan.RlPlan(
        cluster=problem.policy.cluster.name,
        mode="async" if best.mode == "async" else "sync",
        staleness=best.staleness,
        roles=rl_plan.RolePlans(
            policy=rl_plan.RolePlan(plan=_policy_plan(problem, best)),
            generation=generation,
            reference=rl_plan.ReferencePlan(where="host") if problem.reference else None,
            reward=reward,
            critic=rl_plan.CriticPlan(with_="policy") if problem.policy.critic else None,
        ),
        forecast=rl_forecast(problem, best, lower_bound_seconds=result.lower_bound_seconds),
    )
    violations: list[Violation] = list(rl_plan.validate_rl_plan(found))
    assert not violations, f"the planner made a plan that violates constraints: {violations}"
    return found


def _policy_plan(problem: placing.RolesProblem, placement: placing.Placement) -> Plan:
    plan, cost = placement.policy.plan, placement.policy.cost
    if plan.forecast is not None:
        return plan
    cards = [card for stage in cost.stages for card in stage.cards]
    own = replace(problem.policy, cluster=placing.part_of_cluster(problem.policy.cluster, cards))
    forecast = make_forecast(make_costs(own), plan, cost, lower_bound_seconds=cost.step_seconds)
    return replace(plan, forecast=forecast)


def placement_of(problem: placing.RolesProblem, plan: rl_plan.RlPlan) -> placing.Placement:
    """The price of a valid RL plan. Raises PlanError if it is another run's, or has other cards."""
    unpriced = [name for name in ("reference", "critic") if name in plan.plans]
    if unpriced:
        raise PlanError(
            f"roles.{unpriced[0]}: cards of its own run, but are not priced yet; plans without them "
            "have a forecast"
        )
    costs = make_costs(problem.policy)
    own, load = plan.roles.policy.plan, problem.load
    cost = cost_plan(costs, own)
    work = placing.policy_work(problem, costs, own, cost)
    rates = placing.engine_rates(problem, costs.topology)
    generation = plan.roles.generation
    source = own if generation.plan is None else generation.plan
    engines: list[EnginePlan] = []
    served = problem.servers if generation.with_ == "servers" else ()
    if generation.with_ == "servers" and not served:
        raise PlanError(
            "roles.generation: servers draw; give roles.generation.tokens_per_second in the run, as measured"
        )
    for pipeline in source.pipelines if not served else ():
        stages = tuple(DecodeStage.of(stage, cards_of(costs, source, stage)[0]) for stage in pipeline.stages)
        groups = pipeline.num_micro_batches
        slots = pipeline.micro_batch_size
        if generation.slots is not None:
            groups = num_groups(len(stages), generation.slots // load.group)
            slots = generation.slots // groups // load.group * load.group
        engines.append(EnginePlan(stages=stages, slots_per_group=slots, num_groups=groups))
    reward = None
    if plan.roles.reward is not None:
        scoring = plan.roles.reward.plan
        cards = [cards_of(costs, scoring, pipeline.stages[0])[0] for pipeline in scoring.pipelines]
        reward = placing.reward_work(problem, scoring.model, cards)
        if reward is None:
            raise PlanError("roles.reward: the reward model does not fit its cards; plan again")
    elif problem.reward_model is not None:
        reward = _reward_on_policy(problem, costs, problem.reward_model, work)
    names = {entry.device: role for role, part in plan.plans.items() for entry in part.ranks}
    split: dict[str, list[int]] = {}
    for card in problem.policy.cluster.cards:
        counts = split.setdefault(problem.policy.cluster.groups[card.node].name, [0, 0, 0])
        if card.name in names:
            counts[("policy", "generation", "reward").index(names[card.name])] += 1
    return placing.place(
        replace(problem, staleness=plan.staleness),
        mode=plan.mode,
        split=tuple((counts[0], counts[1], counts[2]) for counts in split.values()),
        policy=work,
        generation=Generation(tuple(engines), rates, plan.engine_shares, served=served),
        reward=reward,
        shared=generation.is_shared,
    )


def _reward_on_policy(
    problem: placing.RolesProblem, costs: Costs, model: ModelConfig, policy: placing.PolicyWork
) -> placing.RewardWork:
    """A reward model whole on each of the policy's cards, which share the samples: its weights come from the
    host for each batch, and go back. Raises PlanError if it does not fit beside what lasts there."""
    cards = {card.name: (card, stage) for stage in policy.cost.stages for card in stage.cards}
    work = placing.reward_work(problem, model, [(card,) for card, _ in cards.values()])
    copies = 0.0
    for card, stage in cards.values():
        beside = 0.0 if work is None else work.memory["weights"] + work.memory["activations"]
        if work is None or stage.memory.lasting + beside > problem.policy.usable_bytes(card.type):
            raise PlanError(
                f"the reward model does not fit card {card.name!r} beside the policy, where it scores; give "
                "it cards of its own (roles.reward)"
            )
        link = costs.host_of(card).link_bytes_per_second
        copies = max(copies, 2 * work.memory["weights"] / link)
    assert work is not None
    return replace(work, scoring_seconds=work.scoring_seconds + copies, apart=False)


def rl_forecast(
    problem: placing.RolesProblem, placement: placing.Placement, *, lower_bound_seconds: float
) -> rl_plan.RlForecast:
    policy = placement.policy
    same = ("step", "generation", "tail", "scoring", "sync", "sync_mode")
    return rl_plan.RlForecast(
        **{f"{name}_seconds": getattr(placement, f"{name}_seconds") for name in same},
        training_seconds=policy.training_seconds,
        critic_seconds=policy.critic_seconds,
        sync_bytes=placement.sync_bytes,
        idle=placement.idle,
        lower_bound_seconds=min(lower_bound_seconds, placement.step_seconds),
        source=placement.source,
        roles=role_memory(placement),
    )


def role_memory(placement: placing.Placement) -> dict[str, tuple[rl_plan.RoleMemory, ...]]:
    """Bytes on the cards of every stage of every role; on shared cards those of the phase that has most."""
    generation, reward = placement.generation, placement.reward
    found: dict[str, list[rl_plan.RoleMemory]] = {"policy": []}

    def add(role: str, p: int, s: int, own: dict[str, float]) -> None:
        peak = math.fsum(own.values())
        memory = rl_plan.RoleMemory(pipeline=p, stage=s, peak_memory_bytes=peak, categories=own)
        found.setdefault(role, []).append(memory)

    for stage in placement.policy.cost.stages:
        phases = [own := stage.memory.categories]
        if placement.shared:
            drawn = engine_memory(generation.rates, generation.engines[stage.pipeline])[stage.stage]
            lasting = {name: own[name] for name in own if name not in ("activations", "logits", "buffers")}
            phases.append(lasting | {name: drawn[name] for name in ("slots", "buffers")})
        add("policy", stage.pipeline, stage.stage, max(phases, key=lambda own: math.fsum(own.values())))
    for e, engine in enumerate(() if placement.shared else generation.engines):
        for s, own in enumerate(engine_memory(generation.rates, engine)):
            add("generation", e, s, own)
    for p in range(len(reward.groups) if reward else 0):
        add("reward", p, 0, reward.memory if reward else {})
    return {role: tuple(own) for role, own in found.items()}


# --- plans -----------------------------------------------------------------------------------------------


def engines_plan(problem: placing.RolesProblem, engines: Sequence[EnginePlan]) -> Plan:
    """The plan of engines on cards of their own: a pipeline each."""

    def pipelines(rank_of: Mapping[Card, int]) -> Iterator[PipelinePlan]:
        for engine in engines:
            yield PipelinePlan(
                micro_batch_size=engine.slots_per_group,
                num_micro_batches=engine.num_groups,
                stages=tuple(
                    StagePlan(
                        replicas=(tuple(rank_of[card] for card in stage.cards),),
                        layers=stage.layers,
                        embedding=stage.embedding,
                        head=stage.head,
                    )
                    for stage in engine.stages
                ),
            )

    cards = {card for engine in engines for card in engine.cards}
    return _role_plan(problem, problem.load.model, cards, pipelines)


def reward_plan(problem: placing.RolesProblem, model: ModelConfig, work: placing.RewardWork) -> Plan:
    """The plan of a reward model: a pipeline of one stage for each group."""
    each, rest = divmod(problem.load.samples, len(work.groups))

    def pipelines(rank_of: Mapping[Card, int]) -> Iterator[PipelinePlan]:
        for i, group in enumerate(work.groups):
            ranks = tuple(rank_of[card] for card in group)
            stage = StagePlan(replicas=(ranks,), layers=(0, model.num_layers), embedding=True, head=True)
            number = max(each + (i < rest), 1)
            yield PipelinePlan(micro_batch_size=1, num_micro_batches=number, stages=(stage,))

    return _role_plan(problem, model, {card for group in work.groups for card in group}, pipelines)


def _role_plan(
    problem: placing.RolesProblem,
    model: ModelConfig,
    cards: Set[Card],
    pipelines: Callable[[Mapping[Card, int]], Iterable[PipelinePlan]],
) -> Plan:
    own = replace(problem.policy, model=model, sequence_length=problem.load.length)
    plan = plan_on_cards(own, cards, pipelines, schedule="1f1b", sharded=False)
    return replace(plan, global_batch_size=sum(pipeline.num_sequences for pipeline in plan.pipelines))
