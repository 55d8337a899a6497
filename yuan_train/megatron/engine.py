"""megatron-core behind the training loop's `Engine`: its schedule, messages, gradients and optimizer.

A checkpoint has its masters and moments as boxes of global tensors. Each parameter has its optimizer state on
this rank as a run [start, end) of its elements: all of them, or under the distributed optimizer this rank's
part, which may be none. It stands alone because no other engine needs megatron-core.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from yuan_train.checkpoint.load import (
    OPTIMIZER_STATES,
    WEIGHTS,
    LocalShard,
    holds_optimizer_state,
    load_tensors,
)
from yuan_train.config.errors import TESTED, LostRank
from yuan_train.config.express import Expression, express, renumber
from yuan_train.config.run import RunConfig
from yuan_train.data.loader import Samples
from yuan_train.megatron import core
from yuan_train.megatron.model import (
    Batches,
    Chunk,
    LayerInputs,
    Named,
    build_chunks,
    named_parameters,
    routers_of,
    sum_head_norms,
    unwrap,
)
from yuan_train.models.attention import DocumentResets, rotary_tables
from yuan_train.models.layers import DropoutSeed
from yuan_train.models.transformer import initial_rows
from yuan_train.parallel.device import Device
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.grid import Grid, RankCoord
from yuan_train.parallel.groups import Groups, enter_world_as, make_world_groups, sum_over_world
from yuan_train.parallel.shard import TensorBox, box_views
from yuan_train.parallel.transport import is_lost_connection, without_frames
from yuan_train.train.agreement import settle_forms
from yuan_train.train.build import DTYPES
from yuan_train.train.engine import (
    ExpertLoad,
    Progress,
    RankTerms,
    StepRecord,
    StepRequest,
    StepResult,
    end_step,
    num_terms,
    step_metrics,
)
from yuan_train.train.job import Job
from yuan_train.train.metrics import StepMetrics
from yuan_train.train.stage import Feed, MicroBatch, Share, resets_after

KINDS = (WEIGHTS, *OPTIMIZER_STATES)


@dataclass(frozen=True)
class Held:
    """The optimizer state of a parameter that this rank holds: fp32 [end - start] each, in place."""

    named: Named
    start: int
    end: int
    tensors: Mapping[str, torch.Tensor]
    """By kind; `weights` is the master."""

    def boxes(self, kind: str) -> Iterator[TensorBox]:
        """The boxes of the global tensor, as views."""
        return box_views(self.named.shard, self.tensors[kind], self.start)


def hold_states(optimizer: Any, parameters: list[Named]) -> list[Held]:
    """What this rank holds of each parameter's state; moments that are not there yet are made, zero."""
    found: list[Held] = []
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        inner = part.optimizer
        steps_in_groups = _is_fused(inner)
        for named in parameters:
            place = _master(part, named.parameter)
            if place is None or not place[1].numel():
                continue
            start, master = place
            state = inner.state[master]
            for kind in OPTIMIZER_STATES:
                state.setdefault(kind, torch.zeros_like(master, memory_format=torch.contiguous_format))
            if not steps_in_groups:
                state.setdefault("step", torch.zeros((), dtype=torch.float32))
            tensors = {kind: state[kind].view(-1) for kind in OPTIMIZER_STATES}
            tensors[WEIGHTS] = master.detach().view(-1)
            found.append(Held(named, start, start + master.numel(), tensors))
    return found


def _is_fused(inner: Any) -> bool:
    """Whether it is TransformerEngine's or apex's FusedAdam, which counts its steps in its groups."""
    return type(inner).__module__.partition(".")[0] in ("transformer_engine", "apex")


def _master(part: Any, parameter: Any) -> tuple[int, torch.Tensor] | None:
    """The master of a parameter on this rank, and the element of the parameter that it begins with."""
    places = getattr(part, "model_param_group_index_map", None)
    if places is None:
        return 0, getattr(parameter, "main_param", parameter)
    if parameter not in places:
        return None
    group, order = places[parameter]
    run = part._get_model_param_range_map(parameter)["param"]
    return run.start, part.optimizer.param_groups[group]["params"][order]


def set_steps(optimizer: Any, step: int) -> None:
    """Set the step count, for the correction of AdamW's bias."""
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        if _is_fused(part.optimizer):
            for group in part.optimizer.param_groups:
                group["step"] = step
        else:
            for state in part.optimizer.state.values():
                state["step"].fill_(step)


@torch.no_grad()
def publish(optimizer: Any) -> None:
    """Make the model's weights of the masters; collective over the owners.

    Never the other way, as `reload_model_params` does: what is left of a master in bf16 is not the master.
    """
    for part in optimizer.chained_optimizers:
        if not part.is_stub_optimizer and hasattr(part, "_copy_main_params_to_model_params"):
            part._copy_main_params_to_model_params()
        for chunk in getattr(part, "model_chunks", ()):
            chunk.start_param_sync()


def as_shards(
    held: list[Held], kinds: tuple[str, ...], *, written_by: int | None = None
) -> dict[str, LocalShard]:
    """What this rank holds, by key of a checkpoint.

    With `written_by`, this rank's place in its tensor-parallel group: only what it writes, so that each
    element is written once over the group and over both copies of a tied embedding.
    """
    boxes: dict[str, list[TensorBox]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for one in held:
        named = one.named
        if written_by is not None and (named.is_copy or (named.shard.dim is None and written_by)):
            continue
        for kind in kinds:
            key = f"{kind}.{named.name}"
            shapes[key] = named.shard.shape
            boxes.setdefault(key, []).extend(one.boxes(kind))
    return {key: LocalShard(torch.Size(shapes[key]), tuple(found)) for key, found in boxes.items()}


def fill(job: Job, optimizer: Any, held: list[Held]) -> Progress:
    """Fill masters and moments, publish the weights, and return the progress to start from; collective.

    Raises CheckpointError if a checkpoint cannot be read.
    """
    if job.checkpoint is not None:
        kinds = KINDS if holds_optimizer_state(job.checkpoint) else KINDS[:1]
        load_tensors(job.checkpoint, as_shards(held, kinds))
        progress = Progress.from_state(job.checkpoint.state, job.run)
        set_steps(optimizer, progress.step - progress.skipped)
        publish(optimizer)
        return progress
    given = frozenset[str]() if job.start is None else job.start.entries
    for one in held:
        if f"{WEIGHTS}.{one.named.name}" not in given:
            _draw(job, one)
    if job.start is not None:
        shards = as_shards(held, KINDS[:1])
        load_tensors(job.start, {name: shard for name, shard in shards.items() if name in given})
    publish(optimizer)
    return Progress.initial(job.run)


@torch.no_grad()
def _draw(job: Job, held: Held) -> None:
    """Draw a parameter, one at a time, and keep this rank's run of it."""
    shard = held.named.shard
    whole = torch.empty(shard.local_shape, dtype=torch.float32)
    rows = initial_rows(
        job.run.model, held.named.name, shard.shape, seed=job.run.train.seed, wanted=shard.holds_rows
    )
    for first, block in rows:
        shard.fill_rows(whole, first, block)
    held.tensors[WEIGHTS].copy_(whole.view(-1)[held.start : held.end])


_COMPUTE = ("forward-compute", "backward-compute")


class Timers:
    """Lets our stopwatch run while megatron-core computes, so that simulated cards are slow here too."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch
        self._running: AbstractContextManager[None] | None = None

    def __call__(self, name: str, log_level: int | None = None) -> Any:
        """What is called `start` and `stop` on."""
        return self if name in _COMPUTE else _Other()

    def start(self, barrier: bool = False) -> None:
        """Compute begins."""
        self._running = self._stopwatch.running()
        self._running.__enter__()

    def stop(self, barrier: bool = False) -> None:
        """Compute ends."""
        if self._running is not None:
            self._running.__exit__(None, None, None)
            self._running = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Around what is no compute, in the middle of it."""
        was_running = self._running is not None
        self.stop()
        yield
        if was_running:
            self.start()


class _Other:
    def start(self, barrier: bool = False) -> None:
        """Of a part that we do not measure."""

    def stop(self, barrier: bool = False) -> None:
        """See `start`."""


@dataclass(frozen=True)
class MegatronWorld:
    """See `engine.World`."""

    grid: Grid
    coord: RankCoord
    groups: Groups


def build(job: Job) -> tuple[Job, MegatronEngine, Progress]:
    """Build the engine of a job; see `engine.BuildEngine`. Raises PlanError if it cannot run the plan."""
    run, expression = job.run, express(job.plan)
    core.install()
    position = replace(job.position, rank=expression.rank_of[job.position.rank])
    job = replace(job, plan=renumber(job.plan, expression.rank_of), position=position)
    enter_world_as(position.rank, device=job.device, timeout_seconds=run.train.timeout)
    if core.parallel_state.model_parallel_is_initialized():
        core.parallel_state.destroy_model_parallel()
    core.parallel_state.initialize_model_parallel(
        expression.tensor,
        expression.pipeline,
        virtual_pipeline_model_parallel_size=expression.virtual if expression.virtual > 1 else None,
        distributed_timeout_minutes=run.train.timeout / 60,
        create_gloo_process_groups=False,
    )
    core.seed_all(run.train.seed)
    grid = Grid(job.plan)
    world = MegatronWorld(
        grid, grid.coords[position.rank], make_world_groups(timeout_seconds=run.train.timeout)
    )
    settle_forms(grid, position.rank, device=job.device, dtype=DTYPES[run.train.precision])
    engine = _make_engine(job, world, expression)
    return job, engine, fill(job, engine.optimizer, engine.held)


def _make_engine(job: Job, world: MegatronWorld, expression: Expression) -> MegatronEngine:
    run, coord = job.run, world.coord
    stopwatch = Stopwatch(job.device, simulated=world.grid.simulated(coord.rank))
    batches, timers = Batches(), Timers(stopwatch)
    resets = job.tokenizer is not None and run.data.resets
    chunks = build_chunks(job.plan, coord, expression, batches, precision=run.train.precision, timers=timers)
    optimizer = core.get_megatron_optimizer(
        _optimizer_config(run, job.plan.optimizer_sharding),
        [chunk.module for chunk in chunks],
        use_gloo_process_groups=False,
    )
    parameters = [
        named
        for chunk in chunks
        for named in named_parameters(
            chunk.module, job.plan, chunk.stage, coord.tensor_rank, expression.tensor
        )
    ]
    engine = MegatronEngine(
        run=run,
        world=world,
        chunks=chunks,
        optimizer=optimizer,
        held=hold_states(optimizer, parameters),
        batches=batches,
        feed=Feed(_share(job, world, chunks, resets=resets)),
        stopwatch=stopwatch,
        timers=timers,
        device=job.device,
        resets=resets,
        expert_load=ExpertLoad(run.model, world, routers_of(chunks)) if run.model.num_experts else None,
    )
    for chunk in chunks:
        chunk.model.config.finalize_model_grads_func = engine.finalize
        if run.train.scaling is not None:
            chunk.model.config.grad_scale_func = optimizer.scale_loss
    return engine


def _optimizer_config(run: RunConfig, sharded: bool) -> Any:
    o, precision = run.optimizer, run.train.precision
    return core.OptimizerConfig(
        optimizer="adam",
        lr=o.learning_rate,
        adam_beta1=o.beta1,
        adam_beta2=o.beta2,
        adam_eps=o.epsilon,
        weight_decay=o.weight_decay,
        # The norm is needed also where nothing is clipped, so clipping is ours to call.
        clip_grad=0.0,
        use_distributed_optimizer=sharded,
        bf16=precision == "bf16",
        fp16=precision == "fp16",
        params_dtype=DTYPES[precision],
        # Constant for megatron-core: the scale is the run's, and set before each step.
        loss_scale=run.train.scaling.initial if run.train.scaling else None,
    )


def _share(job: Job, world: MegatronWorld, chunks: tuple[Chunk, ...], *, resets: bool) -> Share:
    """What this rank reads of each batch."""
    pipeline = world.grid.pipeline(world.coord)
    micro_batches = range(pipeline.num_micro_batches)
    takers = sum(chunk.stage.embedding or chunk.stage.head or resets for chunk in chunks)
    has_head = any(chunk.stage.head for chunk in chunks)
    return Share(
        first_sequence=world.grid.first_sequence(world.coord),
        micro_batch_size=pipeline.micro_batch_size,
        takers=Counter(dict.fromkeys(micro_batches, takers) if takers else {}),
        with_tokens=any(chunk.stage.embedding for chunk in chunks),
        with_targets=frozenset(micro_batches if has_head else ()),
        resets=resets_after(job.run.data, job.tokenizer.eod_id if job.tokenizer and resets else None),
        device=job.device,
    )


@dataclass(eq=False, kw_only=True)
class MegatronEngine:
    """One rank of megatron-core; see `engine.Engine`."""

    run: RunConfig
    world: MegatronWorld
    chunks: tuple[Chunk, ...]
    optimizer: Any
    held: list[Held]
    batches: Batches
    feed: Feed
    stopwatch: Stopwatch
    timers: Timers
    device: Device
    resets: bool
    """The run resets something at document ends."""
    expert_load: ExpertLoad | None
    _pass: _Pass = field(default_factory=lambda: _Pass())

    def reading(self) -> AbstractContextManager[object]:
        return self.feed

    def prepare(self, job: Job, progress: Progress) -> str | None:
        return f"engine: megatron-core {core.VERSION}" + (
            "" if core.VERSION in TESTED else f" (tested with {', '.join(TESTED)})"
        )

    def step(self, request: StepRequest) -> StepResult:
        for chunk in self.chunks:
            chunk.module.train()
            chunk.module.zero_grad_buffer()
        self.optimizer.zero_grad()
        if self.run.train.scaling is not None:
            for part in self.optimizer.chained_optimizers:
                part.grad_scaler._scale.fill_(request.scale)
        following = request.first_sample + self.world.grid.plan.global_batch_size
        with self._named_faults("step"):
            loss = self._run_pass(request.samples, request.first_sample, then=following, dropout=True)
            overflow = bool(self.optimizer.prepare_grads())
            grad_norm = math.inf if overflow else float(self.optimizer.get_grad_norm())
        # All ranks have the whole norm, so that one of them is enough; its square is exact in fp64.
        square = grad_norm**2 if self.world.coord.rank == 0 else 0.0
        terms = torch.tensor([square, loss], dtype=torch.float64)
        return end_step(self, request, RankTerms(terms[:1], terms[1:]))

    def finite(self) -> tuple[bool, bool]:
        parameters = (parameter for chunk in self.chunks for parameter in chunk.module.parameters())
        gradients = all(bool(torch.isfinite(parameter.main_grad).all()) for parameter in parameters)
        return self._pass.is_finite, gradients

    def update(self, request: StepRequest, grad_norm: float) -> None:
        with self._named_faults("optimizer step"):
            for group in self.optimizer.param_groups:
                group["lr"] = request.lr
                group["weight_decay"] = self.run.optimizer.weight_decay * group.get("wd_mult", 1.0)
            for part in self.optimizer.chained_optimizers:
                parameters = [] if part.is_stub_optimizer else part.get_parameters()
                if request.clip and parameters:
                    core.clip_grads(parameters, max_norm=request.clip, total_norm=grad_norm)
            self.optimizer.step_with_ready_grads()

    def evaluate(self, job: Job, step: int) -> float | None:
        if job.validation is None or not job.validates_after(step):
            return None
        num_batches = job.run.validation.batches
        size, num_counted = self.world.grid.plan.global_batch_size, 0
        total = torch.zeros((), dtype=torch.float64)
        for chunk in self.chunks:
            chunk.module.eval()
        for batch in range(num_batches):
            then = (batch + 1) * size if batch + 1 < num_batches else None
            with torch.no_grad(), self._named_faults("validation"):
                total += self._run_pass(job.validation, batch * size, then=then, dropout=False)
            num_counted += self._pass.num_terms > 0
        sum_over_world(self.world.groups, self.world.coord, total, "the all-reduce of the validation loss")
        self.stopwatch.read()
        return total.item() / num_counted if num_counted else math.nan

    def describe(self, job: Job, record: StepRecord) -> StepMetrics:
        return step_metrics(job, record)

    @property
    def kept_step(self) -> int | None:
        return None

    def compute_seconds(self) -> float:
        return self.stopwatch.read()

    def take_expert_tokens(self) -> list[list[int]] | None:
        return self.expert_load.take() if self.expert_load is not None else None

    def tensors(self) -> dict[str, LocalShard]:
        return as_shards(self.held, KINDS, written_by=self.world.coord.tensor_rank)

    def state(self) -> Mapping[str, Any]:
        return {}

    def finish(self) -> None:
        """Nothing: weights are gathered in the step."""

    def check_bits(self) -> None:
        raise AssertionError("runs with this engine have no train.check_every")

    def finalize(self, models: list[Any], num_tokens: Any = None, **options: Any) -> None:
        """The end of the last backward: reduce the gradients, which are of the batch's mean already."""
        core.finalize_model_grads(models, None, **options)
        sum_head_norms(self.chunks)

    def _run_pass(self, samples: Samples, first_sample: int, *, then: int | None, dropout: bool) -> float:
        """A forward over a global batch, with its backward where gradients are recorded.

        Returns this rank's share of the mean loss; only tensor rank 0 counts it.
        """
        pipeline, coord = self.world.grid.pipeline(self.world.coord), self.world.coord
        self.feed.begin(samples, first_sample, then=then)
        self.batches.clear()
        self._pass = _Pass(
            first_sample=first_sample + self.world.grid.first_sequence(coord),
            num_terms=num_terms(self.feed, self.world, samples, first_sample),
            dropout=dropout,
            finite=torch.ones((), dtype=torch.bool, device=self.device.torch),
        )
        losses = core.get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=[iter(range(pipeline.num_micro_batches)) for _ in self.chunks],
            model=[chunk.module for chunk in self.chunks],
            num_microbatches=pipeline.num_micro_batches,
            seq_length=self.world.grid.plan.sequence_length,
            micro_batch_size=pipeline.micro_batch_size,
            forward_only=not torch.is_grad_enabled(),
        )
        if not losses or coord.tensor_rank:
            return 0.0
        return float(torch.stack([loss.double() for loss in losses]).sum())

    def _forward(self, micro_batches: Iterator[int], module: Any) -> tuple[torch.Tensor, Any]:
        """What megatron-core's schedule calls: the output of a chunk, and what makes the loss of it."""
        number, model = next(micro_batches), unwrap(module)
        found = self._take(number, model)
        if number not in self.batches.inputs:
            self.batches.inputs[number] = self.layer_inputs(number, found.resets)
        tokens = self._on_device(found.tokens_BS) if model.pre_process else None
        labels = self._on_device(found.targets_BS) if model.post_process else None
        clamped = None if labels is None else labels.clamp(min=0)
        output = module(tokens, None, self.batches.mask(number), labels=clamped)
        self._pass.finite &= torch.isfinite(output.detach()).all()
        return output, None if labels is None else partial(self._loss, labels)

    def _take(self, number: int, model: Any) -> MicroBatch:
        """A micro-batch; waiting for it is not compute. A stage in the middle may need nothing of it."""
        if not (model.pre_process or model.post_process or self.resets):
            return MicroBatch(None, None, DocumentResets(), 0)
        with self.timers.paused():
            return self.feed.take(number)

    def _on_device(self, tensor: torch.Tensor | None) -> torch.Tensor:
        assert tensor is not None, "the stage reads it"
        return self.device.upload(tensor)

    def layer_inputs(self, number: int, found: DocumentResets) -> LayerInputs:
        """What the layers need of a micro-batch of this pass, besides the hidden state."""
        plan, micro = self.world.grid.plan, self.world.grid.pipeline(self.world.coord).micro_batch_size
        resets = found.placed(self.device.upload)
        positions = resets.positions
        if positions is None:
            positions = torch.arange(plan.sequence_length, device=self.device.torch).unsqueeze(0)
        dtype = DTYPES[self.run.train.precision]
        first = self._pass.first_sample + number * micro
        return LayerInputs(
            rotary=rotary_tables(plan.model, positions, length=plan.sequence_length, dtype=dtype),
            document_start=resets.document_start,
            document_ranges=resets.document_ranges,
            dropout=DropoutSeed(self.run.train.seed, first) if self._pass.dropout else None,
        )

    def _loss(self, labels: torch.Tensor, losses_BS: torch.Tensor) -> tuple[torch.Tensor, Any, torch.Tensor]:
        """(the micro-batch's share of the mean loss, tokens that megatron-core ignores, the share again)."""
        share = (losses_BS * (labels >= 0)).sum() / max(self._pass.num_terms, 1)
        return share, torch.tensor(0, dtype=torch.int), share.detach()

    @contextmanager
    def _named_faults(self, what: str) -> Iterator[None]:
        """Raise a lost connection inside megatron-core as a LostRank."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            raise LostRank(f"{self.world.coord}: megatron-core's {what}: {without_frames(error)}") from error


@dataclass(eq=False, kw_only=True)
class _Pass:
    """A forward over one global batch."""

    first_sample: int = 0
    """Of this pipeline's share."""
    num_terms: int = 1
    dropout: bool = False
    finite: torch.Tensor = field(default_factory=lambda: torch.ones((), dtype=torch.bool))

    @property
    def is_finite(self) -> bool:
        """Whether every output was."""
        return bool(self.finite)
