"""Constraints on where a plan puts optimizer state, alone and together with its run."""

from __future__ import annotations

from collections.abc import Iterator

from yuan_train.config.errors import ConfigError, PlanError, Violation
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan, Plan
from yuan_train.config.run import RunConfig


def disk_constraints(pipeline: PipelinePlan) -> Iterator[Violation]:
    """Yield what is wrong with the state of a pipeline's stages on disks."""
    for s, stage in enumerate(pipeline.stages):
        if stage.optimizer_disk and not stage.optimizer_offload:
            yield Violation(
                ("stages", s, "optimizer_disk"),
                f"{stage.optimizer_disk:g} of the offloaded state, but optimizer_offload is 0; set it too",
            )


def adapter_constraints(pipeline: PipelinePlan, model: ModelConfig) -> Iterator[Violation]:
    """Yield what stages put on hosts although the model has adapters, of which all stays on cards."""
    for s, stage in enumerate(pipeline.stages if model.lora is not None else ()):
        for key in ("optimizer_offload", "activation_offload", "parameter_offload"):
            if getattr(stage, key):
                yield Violation(
                    ("stages", s, key),
                    f"{getattr(stage, key):g}, but a model with adapters (lora) keeps nothing on hosts yet; "
                    "leave this out",
                )


def check_tiers(plan: Plan, run: RunConfig) -> None:
    """Check the run's options for state that is not on the card. Raises ConfigError, or PlanError for a plan
    that needs a disk without a directory on one."""
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    on_disk = any(stage.optimizer_disk for stage in stages)
    if on_disk and run.memory.disk_directory is None:
        raise PlanError(
            "optimizer_disk: the plan puts optimizer state on disks, but memory.disk_directory is not given; "
            "give a directory on a local disk, or leave optimizer_disk out of the plan"
        )
    if on_disk and run.checkpoint.asynchronous:
        raise ConfigError(
            "checkpoint.asynchronous: true, but the plan puts optimizer state on disks, of which a copy "
            "would fill the host's memory; set false, or leave optimizer_disk out of the plan"
        )
