"""What the search keys, the constraints of plans and the engine that runs them ask of a plan."""

from __future__ import annotations

from yuan_train.config.express import is_expressible
from yuan_train.config.plan import Plan, divides_experts, unlike_owners
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.search.shapes import Options


def is_wanted(plan: Plan, options: Options) -> bool:
    """Whether a plan keeps the search keys and violates no constraint, no weights are stepped by unlike
    owners unless nothing else is asked for or cards share experts, and the engine that the options name can
    run it."""
    if not _keeps_keys(plan, options) or next(validate_plan(plan), None) is not None:
        return False
    spared = _has_pages(plan) or divides_experts(plan)
    if True in options.sharded and not spared and unlike_owners(plan) is not None:
        return False
    return not options.expressible or is_expressible(plan)


def _keeps_keys(plan: Plan, options: Options) -> bool:
    """Whether a plan has only what the search keys allow; hosts, disks and idle cards are not asked for."""
    counts, stages = options.num_micro_batches, [stage for p in plan.pipelines for stage in p.stages]
    widths = {len(replica) for stage in stages for replica in stage.replicas}
    return (
        (divides_experts(plan) or widths <= set(options.tensor))
        and (options.any_replicas or {len(stage.replicas) for stage in stages} <= set(options.replicas))
        and {stage.recompute for stage in stages if stage.num_blocks} <= set(options.recompute)
        and plan.schedule in options.all_schedules
        and (options.pipelines is None or len(plan.pipelines) in options.pipelines)
        and {p.micro_batch_size for p in plan.pipelines} <= set(options.all_sizes)
        and (counts is None or {p.num_micro_batches for p in plan.pipelines} <= set(counts))
    )


def _has_pages(plan: Plan) -> bool:
    """Whether layers are pages of a host, with which no state is sharded."""
    return any(stage.parameter_offload for pipeline in plan.pipelines for stage in pipeline.stages)
