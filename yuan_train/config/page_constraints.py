"""Constraints on the pages of a plan: what `parameter_offload` goes together with."""

from __future__ import annotations

from collections.abc import Iterator

from yuan_train.config.errors import Violation
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan


def page_constraints(pipeline: PipelinePlan, plan: Plan) -> Iterator[Violation]:
    """Every violated constraint of a pipeline's pages; paths begin at the pipeline."""
    paged = {s: stage for s, stage in enumerate(pipeline.stages) if stage.parameter_offload}
    for s, stage in enumerate(pipeline.stages):
        if stage.page_slots is not None and s not in paged:
            yield Violation(
                ("stages", s, "page_slots"),
                "given, but no parameters leave; set parameter_offload too, or leave this out",
            )
        if stage.in_flight is not None and pipeline.page_group > 1:
            yield Violation(
                ("stages", s, "in_flight"),
                f"{stage.in_flight}, but page_group: {pipeline.page_group} sets it; leave it out",
            )
    if pipeline.page_group > 1 and not paged:
        yield Violation(
            ("page_group",),
            f"{pipeline.page_group}, but no stage has pages; set parameter_offload, or leave this out",
        )
    if pipeline.page_group > pipeline.num_micro_batches:
        yield Violation(
            ("page_group",),
            f"{pipeline.page_group}, but the pipeline has {pipeline.num_micro_batches} micro-batches; "
            "use as many or fewer",
        )
    for s, stage in paged.items():
        path = ("stages", s, "parameter_offload")
        for fault in (*_stage_faults(stage), *_plan_faults(pipeline, plan)):
            yield Violation(path, fault)
        if stage.page_slots is None:
            yield Violation(
                ("stages", s, "page_slots"),
                "missing: how many of these layers may be on the card at a time; 3 is a start",
            )


def _stage_faults(stage: StagePlan) -> Iterator[str]:
    count = stage.parameter_offload
    if count > stage.num_blocks:
        yield f"{count} layers, but the stage holds {stage.num_blocks}"
    if any(border % 1 for border in stage.layers):
        yield "not with half a layer: a page is a whole layer; move the stage's borders to whole layers"
    if stage.recompute != "full" or stage.num_recomputed < count:
        yield (
            "what a layer keeps for its backward holds on to its weights, which leave; "
            "set recompute: full for these layers"
        )
    if stage.optimizer_disk:
        yield "not with optimizer_disk: pages are stepped on their host; leave optimizer_disk out"
    if stage.activation_offload:
        yield "not with activation_offload: full recompute leaves it nothing to do; leave that out"


def _plan_faults(pipeline: PipelinePlan, plan: Plan) -> Iterator[str]:
    if plan.schedule not in ("1f1b", "gpipe"):
        yield f"not under schedule {plan.schedule}; use 1f1b or gpipe"
    if any(len(stage.replicas[0]) > 1 for stage in pipeline.stages):
        yield "not in a pipeline with tensor parallelism; use replicas of one rank"
    if len(plan.pipelines) > 1 or any(len(stage.replicas) > 1 for stage in pipeline.stages):
        yield (
            "not with data parallelism, whose reductions need gradients on the card; use one pipeline of "
            "stages with one replica each"
        )
    if plan.optimizer_sharding:
        yield "not with optimizer_sharding, for a layer has one owner; set it to false"
    if plan.model.num_experts:
        yield "not for a model with experts; leave it out"
