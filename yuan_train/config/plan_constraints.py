"""Constraints on a plan, by the planner or by hand, and on a plan together with its run."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from yuan_train.config.errors import ConfigError, PlanError, Violation
from yuan_train.config.load import (
    Document,
    as_plain,
    build,
    dump,
    format_keys,
    is_list,
    is_mapping,
    read_document,
    write_text,
)
from yuan_train.config.model import ONLY_IN_TRAINING, ModelConfig, validate_model
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import TURN_OFF, RunConfig, ScheduleName, Used, excluded_by


def validate_plan(plan: Plan) -> Iterator[Violation]:
    """Yield every violated constraint of a plan."""
    if plan.version != 1:
        yield Violation(("version",), f"wanted 1, got {plan.version}; plan again with this release")
    for violation in validate_model(plan.model):
        yield replace(violation, path=("model", *violation.path))
    yield from _batch_constraints(plan)
    yield from _rank_constraints(plan)
    for p, pipeline in enumerate(plan.pipelines):
        checks = (
            _layer_constraints(pipeline, plan.model),
            _recompute_constraints(pipeline),
            _activation_constraints(pipeline, plan),
            disk_constraints(pipeline),
            page_constraints(pipeline, plan),
            _depth_constraints(pipeline, plan.schedule),
            _replica_constraints(pipeline, plan),
            _share_constraints(pipeline, plan),
        )
        for violation in itertools.chain(*checks):
            yield replace(violation, path=("pipelines", p, *violation.path))
    yield from _expert_constraints(plan)
    yield from _token_constraints(plan)
    if plan.model.lora is not None:
        for other, path, shown in features_planned(plan):
            for conflict in excluded_by([("lora", (), "")]).get(other, ()):
                yield Violation(path, f"{shown} {conflict.why} (lora); leave this out")


def _token_constraints(plan: Plan) -> Iterator[Violation]:
    """Cards that share experts, or that have no group, have nothing that divides the tokens."""
    widths = {len(stage.replicas[0]) for stage in plan.stages}
    if not plan.sequence_parallel:
        return
    path, length = ("sequence_parallel",), plan.sequence_length
    if widths == {1} or plan.divides_experts:
        yield Violation(path, "true, but no stage is a tensor-parallel group; leave it out")
    if length < max(widths):
        fewer = f"fewer than a group of {max(widths)} has ranks"
        yield Violation(path, f"true, but sequences have {length} tokens, {fewer}; leave it out")


def _batch_constraints(plan: Plan) -> Iterator[Violation]:
    total = sum(pipeline.num_sequences for pipeline in plan.pipelines)
    if total != plan.global_batch_size:
        yield Violation(
            ("global_batch_size",),
            f"{plan.global_batch_size}, but the pipelines take {total} sequences "
            "(micro_batch_size * num_micro_batches, summed); they must be equal",
        )
    if plan.sequence_length > plan.model.max_sequence_length:
        yield Violation(
            ("sequence_length",),
            f"{plan.sequence_length} tokens, but the model allows {plan.model.max_sequence_length}",
        )


def _rank_constraints(plan: Plan) -> Iterator[Violation]:
    for i, entry in enumerate(plan.ranks):
        if entry.rank != i:
            yield Violation(
                ("ranks", i, "rank"), f"wanted {i}, got {entry.rank}; list each rank once, in order, from 0"
            )
    for device, times in Counter(entry.device for entry in plan.ranks).items():
        if times > 1:
            yield Violation(("ranks",), f"card {device!r} is named {times} times; one rank per card")
    virtual = plan.schedule in ("interleaved_1f1b", "zero_bubble")
    stage_of: dict[int, tuple[int, int]] = {}
    for p, pipeline in enumerate(plan.pipelines):
        for s, stage in enumerate(pipeline.stages):
            path, ranks = ("pipelines", p, "stages", s, "replicas"), stage.ranks
            for rank in ranks:
                if rank >= plan.world_size:
                    yield Violation(path, f"there is no rank {rank}; ranks has {plan.world_size}, from 0")
            counts = Counter(ranks) if len(set(ranks)) < len(ranks) else Counter[int]()
            for rank in sorted(rank for rank, times in counts.items() if times > 1):
                yield Violation(
                    path, f"rank {rank} is named twice in this stage; a rank works in one replica"
                )
            for rank in sorted(rank for rank in set(ranks) if rank in stage_of):
                first = stage_of[rank]
                if first[0] != p:
                    other = f"it works in pipeline {first[0]} already"
                    yield Violation(path, f"rank {rank} is named twice: {other}")
                elif virtual and not _same_replica(pipeline, first[1], s, rank):
                    yield Violation(
                        path,
                        f"rank {rank} works in stage {first[1]} in another group; virtual stages of a rank "
                        "must have the same replica, rank for rank",
                    )
                elif not virtual:
                    yield Violation(
                        path,
                        f"rank {rank} is named twice: stage {first[1]} has it already, and schedule "
                        f"{plan.schedule} gives a rank one stage",
                    )
            stage_of |= dict.fromkeys(ranks, (p, s))
    for rank in range(plan.world_size):
        if rank not in stage_of:
            yield Violation(("ranks", rank), f"rank {rank} works in no stage; leave it out or give it one")


def _same_replica(pipeline: PipelinePlan, a: int, b: int, rank: int) -> bool:
    groups = [next(r for r in pipeline.stages[s].replicas if rank in r) for s in (a, b)]
    return groups[0] == groups[1]


def _layer_constraints(pipeline: PipelinePlan, model: ModelConfig) -> Iterator[Violation]:
    """Every layer exactly once and in order; embedding first, head last."""
    last = len(pipeline.stages) - 1
    expected = 0
    for s, stage in enumerate(pipeline.stages):
        first, end = stage.layers
        path = ("stages", s, "layers")
        if end < first:
            yield Violation(path, f"[{first}, {end}] ends before it begins; layers are [first, end)")
            continue
        if first < expected:
            yield Violation(path, f"layer {first} is held twice; this stage must begin at layer {expected}")
        elif first > expected:
            dropped = f"layer {expected}" if first == expected + 1 else f"layers {expected} to {first - 1}"
            if expected % 1 or first % 1:
                dropped = f"layers [{expected}, {first})"
            what_to_do = f"this stage must begin at layer {expected}"
            yield Violation(path, f"{dropped} dropped: no stage holds it; {what_to_do}")
        expected = end
        if stage.embedding != (s == 0):
            rule = "the first stage must hold the embedding" if s == 0 else "only the first stage may hold it"
            yield Violation(("stages", s, "embedding"), f"{rule}; set embedding: {str(s == 0).lower()}")
        if stage.head != (s == last):
            rule = "the last stage must hold the head" if s == last else "only the last stage may hold it"
            yield Violation(("stages", s, "head"), f"{rule}; set head: {str(s == last).lower()}")
    if expected != model.num_layers:
        yield Violation(
            ("stages", last, "layers"),
            f"the stages hold layers up to {expected}, but the model has {model.num_layers}; "
            f"the last stage must end at {model.num_layers}",
        )


def _recompute_constraints(pipeline: PipelinePlan) -> Iterator[Violation]:
    for s, stage in enumerate(pipeline.stages):
        count, path = stage.recompute_layers, ("stages", s, "recompute_layers")
        if count is None:
            continue
        if stage.recompute == "none":
            yield Violation(
                path, f"{count} layers, but recompute is none; set recompute, or leave the key out"
            )
        elif count > stage.num_blocks:
            yield Violation(
                path,
                f"{count} layers, but the stage holds {stage.num_blocks}; leave the key out to recompute all",
            )


def _activation_constraints(pipeline: PipelinePlan, plan: Plan) -> Iterator[Violation]:
    for s, stage in enumerate(pipeline.stages):
        path, count = ("stages", s, "activation_offload"), stage.activation_offload
        for key in ("resident_parts", "fetch_ahead") if not count else ():
            if getattr(stage, key) is not None:
                yield Violation(
                    ("stages", s, key), "given, but no activations leave; set activation_offload too"
                )
        if not count:
            continue
        if count > stage.num_blocks:
            yield Violation(path, f"{count} layers, but the stage holds {stage.num_blocks}")
        if stage.resident_parts is None:
            yield Violation(
                ("stages", s, "resident_parts"),
                "missing: how many halves of these layers may be on the card at a time; 4 is a start",
            )
        if stage.recompute == "full":
            yield Violation(
                path, "with recompute: full nothing is kept that could leave; use none or selective"
            )
        if plan.divides_experts:
            yield Violation(path, "not where cards share experts: how much they keep varies; leave it out")


def _depth_constraints(pipeline: PipelinePlan, schedule: ScheduleName) -> Iterator[Violation]:
    """A stage that holds fewer micro-batches than the next waits for a gradient that the next cannot compute
    yet. The replica with the fewest decides: each of n replicas holds at least K // n of a stage's K."""
    depths = pipeline.depths(schedule)
    for s, stage in enumerate(pipeline.stages):
        path = ("stages", s, "in_flight")
        if depths is None:
            if stage.in_flight is not None:
                yield Violation(path, f"{stage.in_flight}, but schedule {schedule} sets it; leave it out")
        elif depths[s] < len(stage.replicas):
            yield Violation(path, f"{depths[s]}, but each of {len(stage.replicas)} replicas must hold one")
        elif s + 1 < len(depths) and depths[s] // len(stage.replicas) * len(stage.replicas) < depths[s + 1]:
            enough = -(-depths[s + 1] // len(stage.replicas)) * len(stage.replicas)
            yield Violation(
                path,
                f"stage {s} holds {depths[s]} micro-batches and stage {s + 1} holds {depths[s + 1]}; "
                f"set in_flight: {enough} or more here",
            )


def _replica_constraints(pipeline: PipelinePlan, plan: Plan) -> Iterator[Violation]:
    # Where ranks share experts, all else is whole on each of them.
    sizes = {} if plan.model.num_experts else plan.model.spec.tensor_sizes(plan.model)
    for s, stage in enumerate(pipeline.stages):
        for i, replica in enumerate(stage.replicas):
            if len(replica) > 1 and all(map(plan.has_rank, replica)) and plan.via_host(replica):
                names = " and ".join(sorted({entry.type for entry in plan.ranks if entry.rank in replica}))
                yield Violation(
                    ("stages", s, "replicas", i),
                    f"{names} cards have no common backend beside gloo, which a tensor-parallel group "
                    "needs; group cards of one kind that has one",
                )
        lengths = {len(replica) for replica in stage.replicas}
        if len(lengths) > 1:
            mixed = f"replicas of different widths {sorted(lengths)}"
            yield Violation(("stages", s, "replicas"), f"{mixed}; make them equal")
        for i, replica in enumerate(stage.replicas):
            for what, number in sizes.items():
                if number % len(replica):
                    widths = range(1, 2 * len(replica))
                    fitting = [str(w) for w in widths if all(n % w == 0 for n in sizes.values())]
                    use = f"use {' or '.join(fitting)} ranks"
                    yield Violation(
                        ("stages", s, "replicas", i),
                        f"{len(replica)} ranks cannot share {number} {what}; {use}",
                    )
                    break
        if len(stage.replicas) > pipeline.num_micro_batches:
            yield Violation(
                ("stages", s, "replicas"),
                f"{len(stage.replicas)} replicas for {pipeline.num_micro_batches} micro-batches; "
                "some would idle; use fewer",
            )


def _expert_constraints(plan: Plan) -> Iterator[Violation]:
    """Each replica of a stage has all experts."""
    num_experts = plan.model.num_experts
    for p, s, stage in plan.numbered_stages:
        counts, width, path = stage.experts, len(stage.replicas[0]), ("pipelines", p, "stages", s, "experts")
        if counts is None:
            continue
        if not num_experts:
            yield Violation(path, f"{list(counts)}, but the model has no experts; leave this out")
        elif len(counts) != width:
            yield Violation(
                path, f"{len(counts)} counts for replicas of {width} ranks; give one for each rank"
            )
        elif sum(counts) != num_experts:
            total = f"{list(counts)} are {sum(counts)} experts, but each layer has {num_experts}"
            yield Violation(path, f"{total}; give counts that sum to {num_experts}")


def _share_constraints(pipeline: PipelinePlan, plan: Plan) -> Iterator[Violation]:
    first: dict[int, int] = {}
    for s, stage in enumerate(pipeline.stages):
        path, share = ("stages", s, "optimizer_share"), stage.optimizer_share
        if share != 1 and not plan.optimizer_sharding:
            unsharded = "but optimizer_sharding is false: nothing is sharded"
            yield Violation(path, f"{share:g}, {unsharded}; set optimizer_sharding: true, or leave this out")
        for rank in stage.ranks:
            # All stages of a rank are in the memory of one card.
            before = first.setdefault(rank, s)
            other = pipeline.stages[before].optimizer_share
            if other != share:
                earlier = f"rank {rank} has {other:g} in stage {before}"
                yield Violation(path, f"{share:g}, but {earlier}; give all stages of a rank the same")
                break


def check_plan_of_run(plan: Plan, run: RunConfig) -> None:
    """Raise PlanError with every difference unless the plan was made for this run."""
    pairs = {
        f"model.{key}": (getattr(plan.model, key), getattr(run.model, key))
        for key in ModelConfig.__dataclass_fields__
        if key not in ("name", *ONLY_IN_TRAINING)
    }
    pairs["sequence_length"] = (plan.sequence_length, run.data.sequence_length)
    pairs["global_batch_size"] = (plan.global_batch_size, run.train.global_batch_size)
    differences = [
        f"{key}: the plan was made for {planned!r}, the run has {wanted!r}"
        for key, (planned, wanted) in pairs.items()
        if planned != wanted
    ]
    odd = [p for p, pipeline in enumerate(plan.pipelines) if pipeline.micro_batch_size % 2]
    if run.objective.reads_pairs and odd:
        sizes = ", ".join(f"pipelines[{p}].micro_batch_size" for p in odd)
        raise PlanError(f"{sizes}: rows 2i and 2i + 1 are one pair; wanted even numbers; plan again")
    if differences:
        raise PlanError(
            "\n".join(f"the plan belongs to another run: {line}; plan again" for line in differences)
        )


def restart_reason(before: Plan, after: Plan, run: RunConfig) -> str | None:
    """Why the processes that run one plan cannot go on under another as they are; None: they can."""
    cards = [[(entry.device, entry.type) for entry in plan.ranks] for plan in (before, after)]
    if cards[0] != cards[1]:
        left_out = [entry.device for entry in before.ranks if (entry.device, entry.type) not in cards[1]]
        return (
            f"the plan leaves out {', '.join(left_out)}" if left_out else "the plan numbers cards otherwise"
        )
    if run.engine == "megatron":
        return "megatron-core's ranks keep their plan"
    if run.train.compile:
        return "layers are compiled (train.compile)"
    for plan in (before, after):
        for stage in plan.stages:
            for key in ("optimizer_offload", "activation_offload", "parameter_offload"):
                if getattr(stage, key):
                    return f"the plan puts something on hosts ({key})"
    return None


def features_planned(plan: Plan) -> Iterator[Used]:
    """The features in `CONFLICTS` that a plan uses, each with its place and a word for it there."""
    if plan.schedule == "zero_bubble":
        yield "zero_bubble", ("schedule",), "zero_bubble"
    if plan.sequence_parallel:
        yield "sequence_parallel", ("sequence_parallel",), "true"
    for p, s, stage in plan.numbered_stages:
        path = ("pipelines", p, "stages", s)
        for tier in ("optimizer", "activation", "parameter"):
            if count := getattr(stage, f"{tier}_offload"):
                name = tier if tier == "optimizer" else f"{tier}s"
                yield f"offload: {name}", (*path, f"{tier}_offload"), f"{count:g}: {tier}_offload"
        if len(stage.replicas[0]) > 1:
            yield "tensor", (*path, "replicas"), f"a replica of {len(stage.replicas[0])} ranks"


def check_compile(plan: Plan, run: RunConfig) -> None:
    """Raise PlanError, with every fault, if the run compiles layers and the plan asks too much of them."""
    if not run.train.compile:
        return
    out = excluded_by([("train.compile", (), "")])
    faults = [
        f"{format_keys(path)}: {shown} {conflict.why} (train.compile is true); "
        f"plan again with this run, or {TURN_OFF[conflict.feature]}"
        for other, path, shown in features_planned(plan)
        for conflict in out.get(other, ())
    ]
    if faults:
        raise PlanError("\n".join(faults))


def check_precision(plan: Plan, run: RunConfig) -> None:
    """Raise ConfigError if a card of the plan lacks the run's precision. Cards of unknown type pass."""
    precision = run.train.precision
    cards = {entry: plan.device_type(entry.rank) for entry in plan.ranks}
    lacking = [entry for entry, card in cards.items() if card is not None and card.peak(precision) is None]
    if lacking:
        others = all(card is None or card.fp16 is not None for card in cards.values())
        usable = "fp16" if precision == "bf16" and others else "fp32"
        names = ", ".join(f"{entry.device} ({entry.type})" for entry in lacking)
        raise ConfigError(
            f"train.precision: {precision}, but the plan uses {names} without {precision} units; "
            f"set train.precision: {usable}, or plan again: the planner leaves such cards out"
        )


_KEPT = re.compile(r"plan(?:\.step-(\d+)(?:\.(\d+))?)?\.yaml")
"""Plans in a log directory: `plan.yaml`, and of later ones the step from which on they ran."""


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises PlanError with every violated constraint."""
    return build(read_plan(path), Plan, validate=validate_plan, error=PlanError)


def read_plan(path: str | Path) -> Document:
    """The keys of a plan of one model or of several roles. Raises PlanError if it cannot be read."""
    try:
        return read_document(path, "Plan")
    except ConfigError as error:
        raise PlanError(str(error)) from None


def save_plan(path: str | Path, plan: Plan) -> None:
    """Write a plan atomically. Raises ConfigError if it fails."""
    write_text(path, dump(plan))


def keep_plan(directory: str | Path, plan: Plan, *, step: int) -> Path:
    """Write the plan that runs from `step` on into a run's log directory; the file that holds it.

    Another plan that is found there stays: it may be the user's own, or what steps before this one ran with.
    Raises ConfigError if it cannot be written.
    """
    directory, text = Path(directory), dump(plan)
    found = plans_in(directory)
    for path in found:
        with contextlib.suppress(PlanError, OSError):
            # A plan by hand is written otherwise; reading one of thousands of ranks takes seconds.
            if path.read_bytes() == text.encode() or load_plan(path) == plan:
                return path
    taken = {path.name for path in found}
    names = (f"plan.step-{step}.{number}.yaml" for number in range(2, len(found) + 3))
    names = itertools.chain(["plan.yaml", f"plan.step-{step}.yaml"], names)
    path = directory / next(name for name in names if name not in taken)
    write_text(path, text)
    return path


def plans_in(directory: str | Path) -> list[Path]:
    """The plans in a run's log directory: `plan.yaml`, and those of later steps in their order."""
    found = {path: _KEPT.fullmatch(path.name) for path in Path(directory).glob("plan*.yaml")}
    order = {path: (int(match[1] or -1), int(match[2] or 0)) for path, match in found.items() if match}
    return sorted(order, key=order.__getitem__)


def plan_digest(plan: Plan) -> str:
    """What tells a plan from others: 16 hexadecimal digits of all that it says; 1 and 1.0 are the same."""
    return hashlib.sha256(json.dumps(_with_floats(as_plain(plan))).encode()).hexdigest()[:16]


def _with_floats(plain: Any) -> Any:
    if is_mapping(plain):
        return {key: _with_floats(value) for key, value in plain.items()}
    if is_list(plain):
        return [_with_floats(item) for item in plain]
    return float(plain) if type(plain) is int else plain


def disk_constraints(pipeline: PipelinePlan) -> Iterator[Violation]:
    """Yield what is wrong with the state of a pipeline's stages on disks."""
    for s, stage in enumerate(pipeline.stages):
        if stage.optimizer_disk and not stage.optimizer_offload:
            yield Violation(
                ("stages", s, "optimizer_disk"),
                f"{stage.optimizer_disk:g} of the offloaded state, but optimizer_offload is 0; set it too",
            )


def check_tiers(plan: Plan, run: RunConfig) -> None:
    """Check the run's options for state that is not on the card. Raises ConfigError, or PlanError for a plan
    that needs a disk without a directory on one."""
    on_disk = any(stage.optimizer_disk for stage in plan.stages)
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
