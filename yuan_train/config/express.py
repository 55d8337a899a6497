"""A plan in megatron-core's words, or all the reasons why it has none for it.

megatron-core has one tensor-parallel width, pipelines that are cut alike and take equal shares of the batch,
and ranks that are numbered tensor first, then data, then pipeline.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import TypeVar

from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import RunConfig, SearchConfig

T = TypeVar("T")

_SAID = set(
    "replicas layers embedding head recompute recompute_layers optimizer_share in_flight experts "
    "optimizer_offload optimizer_disk activation_offload resident_parts fetch_ahead".split()
)
"""Keys of a stage that the reasons below look at; any other one is refused unless it has its default."""


@dataclass(frozen=True, kw_only=True)
class Expression:
    """A plan in megatron-core's words."""

    tensor: int
    """Ranks of a tensor-parallel group."""
    data: int
    """Pipelines."""
    pipeline: int
    """Workers of a pipeline."""
    virtual: int
    """Stages of a worker."""
    layout: str
    """The cut, as --pipeline-model-parallel-layout."""
    rank_of: tuple[int, ...]
    """For each rank of the plan, its number in megatron-core's order."""


def express(plan: Plan) -> Expression:
    """The plan in megatron-core's words. Raises PlanError with all reasons why it has none for it."""
    _raise(plan_reasons(plan))
    first = plan.pipelines[0]
    workers = list(dict.fromkeys(stage.replicas[0] for stage in first.stages))
    tensor, data = len(workers[0]), len(plan.pipelines)
    ranks = {
        rank: t + tensor * (d + data * (s % len(workers)))
        for d, pipeline in enumerate(plan.pipelines)
        for s, stage in enumerate(pipeline.stages)
        for t, rank in enumerate(stage.replicas[0])
    }
    return Expression(
        tensor=tensor,
        data=data,
        pipeline=len(workers),
        virtual=len(first.stages) // len(workers),
        layout=to_layout(first),
        rank_of=tuple(ranks[rank] for rank in range(plan.world_size)),
    )


def check_engine(plan: Plan, run: RunConfig) -> None:
    """Raise PlanError, with all reasons, unless the run's engine can run the plan."""
    if run.engine == "megatron":
        _raise((*plan_reasons(plan), *run_reasons(run)))


def renumber(plan: Plan, rank_of: tuple[int, ...]) -> Plan:
    """The same plan with rank r as rank `rank_of[r]`."""

    def renamed(stage: StagePlan) -> StagePlan:
        return replace(stage, replicas=tuple(tuple(rank_of[r] for r in group) for group in stage.replicas))

    return replace(
        plan,
        ranks=tuple(
            sorted(
                (replace(entry, rank=rank_of[entry.rank]) for entry in plan.ranks), key=lambda one: one.rank
            )
        ),
        pipelines=tuple(
            replace(pipeline, stages=tuple(map(renamed, pipeline.stages))) for pipeline in plan.pipelines
        ),
    )


def is_expressible(plan: Plan) -> bool:
    """Whether megatron-core has words for a plan."""
    return next(plan_reasons(plan), None) is None


def plan_reasons(plan: Plan) -> Iterator[str]:
    """Yield every reason why megatron-core cannot run a plan."""
    stages = plan.stages
    widths = sorted({len(replica) for stage in stages for replica in stage.replicas})
    if len(widths) > 1:
        words = " and ".join(map(str, widths))
        yield f"tensor-parallel groups of {words} ranks; megatron-core has one width"
    if any(len(stage.replicas) > 1 for stage in stages):
        yield "a stage of several replicas; megatron-core replicates whole pipelines"
    if plan.divided_layers:
        yield "a stage that ends in the middle of a layer; megatron-core has whole layers"
    if len({tuple(stage.layers for stage in pipeline.stages) for pipeline in plan.pipelines}) > 1:
        yield "pipelines that are cut unlike each other; megatron-core has one cut for all"
    if len({(p.micro_batch_size, p.num_micro_batches) for p in plan.pipelines}) > 1:
        yield "pipelines with unequal shares of the batch; megatron-core gives all the same"
    if plan.sequence_parallel:
        yield "sequence_parallel; megatron-core's norms on CPUs do not divide tokens"
    yield from _stage_reasons(stages)
    yield from _schedule_reasons(plan)
    yield from _expert_reasons(plan, widths)
    cards = [plan.device_type(entry.rank) for entry in plan.ranks]
    backends = sorted({card.backend if card is not None else "nccl" for card in cards})
    if len(backends) > 1:
        yield f"cards of the backends {' and '.join(backends)}; megatron-core's groups need one for all"


def _stage_reasons(stages: Sequence[StagePlan]) -> Iterator[str]:
    if any(stage.in_flight for stage in stages):
        yield "in_flight; megatron-core's schedule decides how many micro-batches are in flight"
    if any(stage.optimizer_share != 1 for stage in stages):
        yield "optimizer_share; megatron-core shards the optimizer's state equally"
    if any(stage.optimizer_offload for stage in stages):
        yield "optimizer_offload; not written for megatron-core's optimizers"
    if any(stage.activation_offload for stage in stages):
        yield "activation_offload; what sends activations to the host is our engine's"
    if any(stage.recompute == "selective" for stage in stages):
        yield "recompute: selective; megatron-core's makes other tensors again (none and full are the same)"
    further = {
        field.name
        for field in fields(StagePlan)
        if field.name not in _SAID and any(getattr(stage, field.name) != _default(field) for stage in stages)
    }
    for name in sorted(further):
        yield f"{name}; megatron-core knows nothing like it"


def _default(field: object) -> object:
    default, factory = getattr(field, "default", MISSING), getattr(field, "default_factory", MISSING)
    return factory() if default is MISSING and callable(factory) else default


def _schedule_reasons(plan: Plan) -> Iterator[str]:
    if plan.schedule not in ("1f1b", "interleaved_1f1b"):
        yield f"schedule {plan.schedule}; megatron-core has 1f1b and interleaved_1f1b"
        return
    if not all(map(_goes_round, plan.pipelines)):
        yield "virtual stages that do not go round the workers in turn, all as often (0 1 2 0 1 2)"
        return
    if len({len(pipeline.worker_replicas) for pipeline in plan.pipelines}) > 1:
        yield "pipelines on unequal numbers of workers; megatron-core has one number for all"
        return
    first = plan.pipelines[0]
    workers = len({stage.replicas[0] for stage in first.stages})
    if len(first.stages) > workers and workers == 1:
        yield "virtual stages of a single worker; megatron-core interleaves several"
    elif len(first.stages) > workers and first.num_micro_batches % workers:
        yield (
            f"{first.num_micro_batches} micro-batches of virtual stages on {workers} workers; megatron-core "
            "needs a multiple"
        )


def _goes_round(pipeline: PipelinePlan) -> bool:
    """Whether the stages go round the workers, each round in the same order."""
    replicas = [stage.replicas[0] for stage in pipeline.stages]
    workers = list(dict.fromkeys(replicas))
    return replicas == workers * (len(replicas) // len(workers))


def _expert_reasons(plan: Plan, widths: list[int]) -> Iterator[str]:
    if not plan.model.num_experts:
        return
    if widths != [1]:
        yield "ranks that divide a layer's experts; not written for megatron-core"
    if plan.model.balance is not None:
        yield f"balance: {plan.model.balance}; the experts' load is evened by our engine alone"
    if any(stage.num_recomputed for stage in plan.stages):
        yield "recompute of layers with experts; megatron-core would choose a token's experts again"


def narrowed(search: SearchConfig) -> SearchConfig:
    """The search keys without what megatron-core has no words for. Raises ConfigError if a key then has no
    value left."""
    return replace(
        search,
        replicas=_kept("replicas", search.replicas, (1,)),
        recompute=_kept("recompute", search.recompute, ("none", "full")),
        schedule=_kept("schedule", search.schedule, ("1f1b", "interleaved_1f1b")),
        offload=(),
        half_layers=False,
        divide_experts=False,
    )


def _kept(key: str, given: tuple[T, ...] | None, known: tuple[T, ...]) -> tuple[T, ...]:
    """The known values that are given; all of them if the key is not given."""
    kept = tuple(value for value in known if given is None or value in given)
    if not kept:
        words = ", ".join(map(str, given or ()))
        raise ConfigError(
            f"search.{key}: [{words}], but megatron-core (search.engine) has only "
            f"{' and '.join(map(str, known))}; add one, or search.engine: [yuan]"
        )
    return kept


def run_reasons(run: RunConfig) -> Iterator[str]:
    """Yield every reason why megatron-core cannot do what a run asks for, whatever the plan."""
    train = run.train
    if train.precision == "fp64":
        yield "train.precision: fp64; megatron-core has fp32, bf16 and fp16"
    if train.scaling is not None and train.precision != "fp16":
        yield f"train.loss_scale with {train.precision}; megatron-core scales under fp16 alone"
    if train.check_every:
        yield f"train.check_every: {train.check_every}; the weights that it compares are our engine's"
    if train.compile:
        yield "train.compile; the compiled layers are our engine's"
    if train.trace is not None:
        yield "train.trace; megatron-core's schedule does not say what it is doing"
    if run.objective.kind != "language_model" or run.model.output != "vocabulary":
        yield f"objective.kind: {run.objective.kind}; the loss on megatron-core is the next token's"
    if run.optimizer.reduce_dtype != "fp32":
        yield f"optimizer.reduce_dtype: {run.optimizer.reduce_dtype}; gradients are reduced in fp32 there"


def _raise(reasons: tuple[str, ...] | Iterator[str]) -> None:
    found = list(reasons)
    if found:
        raise PlanError(
            "\n".join(f"engine: megatron cannot run this: {reason}" for reason in found)
            + "\nuse engine: yuan, which runs every plan, or plan again with search.engine=[megatron]"
        )


def to_layout(pipeline: PipelinePlan) -> str:
    """The cut as megatron-core's --pipeline-model-parallel-layout. Raises PlanError if it divides layers."""
    words: list[str] = []
    for s, stage in enumerate(pipeline.stages):
        if any(border % 1 for border in stage.layers):
            first, end = stage.layers
            raise PlanError(
                f"stage {s} holds layers [{first}, {end}), which cuts a layer in two; Megatron-LM's layouts "
                "have whole layers only: use the plan itself"
            )
        layers = "t" if stage.num_layers == 1 else f"t*{stage.num_layers}" if stage.num_layers else ""
        parts = [part for part in ("E" * stage.embedding, layers, "L" * stage.head) if part]
        words.append("".join(parts) if len(parts) < 2 or "*" not in layers else ",".join(parts))
    return "|".join(words)


# --- hand-made cuts -----------------------------------------------------------------------------------------
#
# Megatron-LM's layout  Ettt|tt|ttL      E embedding, t layer, L loss; t*3 for ttt
# Yuan 2.0's blocks     3,2,2            layers of each stage, embedding and head at the ends

_PART = re.compile(r"([EtL])(?:\*(\d{1,5}))?")  # No model has more layers.


def to_blocks(pipeline: PipelinePlan) -> str:
    """The cut as Yuan 2.0's --pipeline-model-parallel-blocks."""
    return ",".join(str(stage.num_layers) for stage in pipeline.stages)


def read_layout(text: str, *, num_layers: int) -> tuple[int, ...]:
    """Layers of each stage of a Megatron-LM layout. Raises PlanError if it is no layout, or does not have
    `num_layers` layers."""
    stages = [_expand(part, text) for part in text.replace(" ", "").split("|")]
    joined = "".join(stages)
    if not re.fullmatch(r"Et*L", joined):
        raise PlanError(
            f"layout {text!r}: wanted one E (embedding) at the beginning and one L (loss) at the end, with "
            "layers t between, such as 'Ettt|tt|ttL'"
        )
    return _checked([stage.count("t") for stage in stages], f"layout {text!r}", num_layers)


def read_blocks(text: str, *, num_layers: int) -> tuple[int, ...]:
    """Layers of each stage of a Yuan 2.0 list. Raises PlanError if it is no list of numbers, or does
    not have `num_layers` layers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and len(word) <= 5 for word in words):
        raise PlanError(f"blocks {text!r}: wanted numbers with commas, such as 2,3,1")
    return _checked([int(word) for word in words], f"blocks {text!r}", num_layers)


def _expand(part: str, text: str) -> str:
    """`E,t*3` as `Ettt`."""
    compact = part.replace(",", "")
    if _PART.sub("", compact):
        raise PlanError(f"layout {text!r}: {part!r} is not made of E, t, t*N and L, with | between stages")
    return "".join(kind * int(number or 1) for kind, number in _PART.findall(compact))


def _checked(counts: Sequence[int], what: str, num_layers: int) -> tuple[int, ...]:
    if sum(counts) != num_layers:
        raise PlanError(
            f"{what}: {sum(counts)} layers, but the model has {num_layers}; assign every layer once"
        )
    return tuple(counts)
