"""An RL plan together with its run."""

from __future__ import annotations

from dataclasses import replace

from yuan_train.config.errors import PlanError
from yuan_train.config.rl import RLConfig
from yuan_train.config.rl_plan import RlPlan


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
    if (plan.roles.reference is not None) != run.needs_reference:
        has = "has" if plan.roles.reference is not None else "has no"
        coefficient = run.algorithm.kl.coefficient
        faults.append(f"roles.reference: the plan {has} one, and algorithm.kl.coefficient is {coefficient:g}")
    scoring = plan.roles.reward
    if scoring is not None and run.reward.model is None:
        faults.append("roles.reward: the plan has one, and reward.model is null; plan again")
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
