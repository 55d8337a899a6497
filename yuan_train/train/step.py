"""Our own engine: one rank's trainer, its training step and its passes over data without one.

In a checked step each message has a checksum, and each stage computes a micro-batch twice. Weights that
several ranks hold are compared with each other (`check_weights`); a gradient or a message has one owner, so
it is compared with itself. A stage computes its first micro-batch again as soon as that has been through its
backward, from an empty gradient, and compares all bits. That finds what a core or its memory does to a
forward or a backward now and then. It does not find what they do each time alike, nor what happens to a
gradient after that backward.

Bits are equal where kernels add in one order: on processors. Some of a card's do not; cards check messages
alone. The step ends with AdamW over flat buckets (`Optimizer`).

Owners of a bucket step the same elements, or send each other what one of them has stepped; the ranks of a
tensor-parallel group hold the same norms, biases and routers. All that keeps them equal is that all compute
alike: a bit that flips in memory, a faulty kernel, or unlike cards that each step all of the weights make
them drift apart, and no loss tells. So all ranks compare checksums of what several hold: of each slice of a
bucket, and of what is whole on each rank. Only if some differ do they compare those of single parameters.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
import torch.distributed as dist
from torch.optim.adamw import adamw

from yuan_train.checkpoint.load import WEIGHTS, LocalShard
from yuan_train.config.errors import CheckpointError, TrainingError
from yuan_train.config.load import write_text
from yuan_train.config.plan import Plan
from yuan_train.config.run import OptimizerConfig
from yuan_train.config.units import written_words
from yuan_train.data.loader import Samples
from yuan_train.data.prompts import Pairs
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import Device
from yuan_train.parallel.executor import Executor, Stopwatch, checksum, same_bits
from yuan_train.parallel.gradients import FlatBucket, Slice
from yuan_train.parallel.grid import Bucket, Grid, RankCoord
from yuan_train.parallel.groups import (
    as_training_error,
    gather_objects,
    guard_world_collective,
    sum_over_world,
)
from yuan_train.parallel.optimizer_state import DiskChunk, DiskFile, HostChunk, OptimizerShard
from yuan_train.parallel.shard import TensorBox
from yuan_train.parallel.zero import STATES, OwnedState, State, weight_boxes
from yuan_train.train.agreement import agreeing
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
from yuan_train.train.stage import (
    Objective,
    PagedRunner,
    PairLoss,
    Passes,
    Repeat,
    RowScores,
    StageRunner,
    TokenLoss,
)

NUMBERS = "reference.npy"
"""fp64 [pairs, 2], in the order of the file of pairs: of the chosen and of the rejected answer."""
FACTS = "reference.json"


def find_reference(
    job: Job, progress: Progress, pairs: Pairs, score: Callable[[], torch.Tensor]
) -> tuple[torch.Tensor, str | None]:
    """The reference of a run on pairs, and what there is to say of it; collective over all ranks.

    At step 0 `score`, a forward pass over all pairs, makes it; later it is read. Raises CheckpointError if
    the log directory has none, or one of other pairs.
    """
    directory = None if job.run.log.directory is None else Path(job.run.log.directory)
    if progress.step:
        return _read_together(directory, pairs), None
    found = score()
    with agreeing():
        if directory is not None and job.position.rank == 0:
            _write(directory, found, pairs)
    return found, f"reference: log-probabilities of {len(pairs)} pairs under the weights at step 0"


def _write(directory: Path, reference: torch.Tensor, pairs: Pairs) -> None:
    temporary = directory / f".{NUMBERS}.tmp"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with temporary.open("wb") as file:
            np.save(file, reference.view(-1, 2).numpy())
        temporary.replace(directory / NUMBERS)
        write_text(directory / FACTS, json.dumps({"version": 1, "pairs": pairs.fingerprints}) + "\n")
    except OSError as error:
        raise CheckpointError(f"{directory / NUMBERS}: cannot be written: {error}") from None


def _read_together(directory: Path | None, pairs: Pairs) -> torch.Tensor:
    """Rank 0 reads, all get it."""
    reference = torch.zeros(2 * len(pairs), dtype=torch.float64)
    with agreeing():
        if not dist.is_initialized() or dist.get_rank() == 0:
            reference.copy_(_read(directory, pairs))
    if dist.is_initialized():
        dist.broadcast(reference, 0)
    return reference


def _read(directory: Path | None, pairs: Pairs) -> torch.Tensor:
    what_to_do = (
        "a DPO run is resumed with the log.directory that it began with; to begin a new one from trained "
        "weights give them as start.checkpoint"
    )
    if directory is None:
        raise CheckpointError(f"log.directory: none, so no {NUMBERS} to resume with; {what_to_do}")
    path = directory / NUMBERS
    try:
        numbers: Any = np.load(path, allow_pickle=False)
        facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}; {what_to_do}") from None
    if not isinstance(facts, dict) or facts.get("pairs") != pairs.fingerprints:
        raise CheckpointError(
            f"{path}: is of other pairs than data.pairs; give the file that the run began with"
        )
    if numbers.shape != (len(pairs), 2) or not np.isfinite(numbers).all():
        raise CheckpointError(f"{path}: holds {numbers.shape}; wanted {(len(pairs), 2)} finite numbers")
    return torch.from_numpy(numbers.astype(np.float64)).flatten()


@dataclass(frozen=True)
class Trainer:
    """One rank's runtime, stage runners and optimizer: our own engine."""

    runtime: RankRuntime
    runners: Mapping[int, StageRunner]
    """By stage."""
    optimizer: Optimizer
    stopwatch: Stopwatch
    executor: Executor
    feed: Passes
    expert_load: ExpertLoad | None
    """None for a model without experts."""
    device: Device
    pair_loss: PairLoss | None = None
    """The objective of a run on preference pairs, shared by this rank's stages."""
    faults: list[str] = field(default_factory=list[str])
    """What this rank has found in steps that were checked."""

    @property
    def loss(self) -> torch.Tensor:
        """This rank's share of the batch's mean loss, an fp64 scalar.

        Only tensor rank 0 of a replica counts it; the other tensor ranks return 0.
        """
        total = torch.zeros((), dtype=torch.float64, device=self.device.torch)
        if self.runtime.coord.tensor_rank == 0:
            total += sum(runner.loss for runner in self.runners.values())
        return total

    @property
    def measures(self) -> torch.Tensor:
        """This rank's term of `PairLoss.measures` of the batch; counted as `loss` is."""
        assert self.pair_loss is not None
        return self.pair_loss.measures * (self.runtime.coord.tensor_rank == 0)

    # --- as an engine of the loop, see `engine.Engine` ---

    @property
    def world(self) -> RankRuntime:
        return self.runtime

    def reading(self) -> AbstractContextManager[object]:
        return self.feed

    def prepare(self, job: Job, progress: Progress) -> str | None:
        notes: list[str | None] = []
        if job.run.objective.kind == "dpo":
            assert isinstance(job.train, Pairs) and self.pair_loss is not None
            score = partial(score_all_rows, self, job.train, num_pairs=len(job.train))
            self.pair_loss.reference, said = find_reference(job, progress, job.train, score)
            self.stopwatch.read()
            notes.append(said)
        notes.append(disk_note(job.plan, self.runtime))
        return "; ".join(filter(None, notes)) or None

    def step(self, request: StepRequest) -> StepResult:
        return train_step(self, request)

    def finite(self) -> tuple[bool, bool]:
        outputs = all(bool(runner.finite) for runner in self.runners.values())
        return outputs, all(bool(torch.isfinite(bucket.gradient).all()) for bucket in self.runtime.buckets)

    def update(self, request: StepRequest, grad_norm: float) -> None:
        clip = request.clip
        factor = (clip / (grad_norm + 1e-6) if clip and grad_norm > clip else 1.0) / request.scale
        with as_training_error(self.runtime.coord):
            self.optimizer.step(request.lr, factor=factor)

    def evaluate(self, job: Job, step: int) -> float | None:
        if job.validation is None or not job.validates_after(step):
            return None
        loss = validation_loss(self, job.validation, num_batches=job.run.validation.batches)
        self.stopwatch.read()
        return loss

    def describe(self, job: Job, record: StepRecord) -> StepMetrics:
        return step_metrics(job, record)

    @property
    def kept_step(self) -> int | None:
        return None

    def compute_seconds(self) -> float:
        return self.stopwatch.read()

    def take_expert_tokens(self) -> list[list[int]] | None:
        return self.expert_load.take() if self.expert_load is not None else None

    def tensors(
        self, which: Literal["written", "held"] = "written", kinds: Sequence[State] = STATES
    ) -> dict[str, LocalShard]:
        """What a checkpoint stores or fills of this rank, by global name; `weights` are the masters, and of
        what is frozen the weights themselves.

        `which`: `written` for a save, `held` for a load.
        """
        self.optimizer.settle()
        found: dict[str, list[TensorBox]] = {}
        for kind in kinds:
            prefix = WEIGHTS if kind == "master" else kind
            boxes = [state.boxes(kind, written=which == "written") for state in self.runtime.states]
            if kind == "master":
                boxes += [weight_boxes(frozen, written=which == "written") for frozen in self.runtime.frozen]
            for name, box in itertools.chain(*boxes):
                found.setdefault(f"{prefix}.{name}", []).append(box)
        shapes = {name: torch.Size(shard.shape) for name, shard in self.runtime.shards.items()}
        biases = self.expert_load.biases() if self.expert_load is not None else {}
        for name, bias in biases.items():
            found[f"{WEIGHTS}.{name}"] = [TensorBox((0,), tuple(bias.shape), bias)]
            shapes[name] = bias.shape
        return {key: LocalShard(shapes[key.partition(".")[2]], tuple(boxes)) for key, boxes in found.items()}

    def state(self) -> Mapping[str, Any]:
        return {}

    def finish(self) -> None:
        for state in self.runtime.states:
            state.finish_weight_sync()
        self.stopwatch.tell_overruns()

    def check_bits(self) -> None:
        self.finish()
        runtime = self.runtime
        raise_faults(runtime.coord, self.faults)
        check_weights(runtime.grid, runtime.coord, runtime.buckets, runtime.frozen)


def train_step(trainer: Trainer, request: StepRequest) -> StepResult:
    """Forward, backward, gradient reduction, clipping, AdamW, balance; see `Engine.step`.

    The gradient reduction of a bucket starts as soon as this rank's gradient is complete, inside its last
    backward. Stepped weights are on their way to their other owners when it returns: the next forward waits
    for them, layer by layer.
    """
    runtime = trainer.runtime
    for bucket in runtime.buckets:
        # The first sum of a page replaces what is there.
        if not bucket.is_paged:
            bucket.gradient.zero_()
    first = request.first_sample
    following = first + runtime.grid.plan.global_batch_size
    begin_pass(trainer, request.samples, first_sample=first, then=following, scale=request.scale)
    runtime.reducer.begin()
    checks = checking(runtime, trainer.runners, trainer.stopwatch, trainer.faults)
    with as_training_error(runtime.coord), checks if request.check else nullcontext():
        trainer.executor.run(
            runtime.program, before_step=runtime.reducer.before_step, after_step=runtime.reducer.after_step
        )
        square = _finish_reductions(runtime, trainer.device.torch)
    square, loss = trainer.device.to_host(torch.stack([square, trainer.loss])).split(1)
    measures = None if trainer.pair_loss is None else trainer.device.to_host(trainer.measures)
    result = end_step(trainer, request, RankTerms(square, loss, request.scale, measures))
    if trainer.expert_load is not None:
        trainer.expert_load.balance(moves=result.is_stepped)
    return result


def _finish_reductions(runtime: RankRuntime, device: torch.device) -> torch.Tensor:
    """Wait for the gradient reductions; this rank's share of the squared global norm, fp64.

    In the order in which they started: the norms of those that have ended are taken while the last ones are
    on their way. Added up in the model's order.
    """
    squares: list[torch.Tensor] = []
    for number, state in reversed(list(enumerate(runtime.states))):
        with during(Activity("finish_grad_reduce", number=number)):
            squares.append(state.finish_grad_reduce())
    return sum(reversed(squares), torch.zeros((), dtype=torch.float64, device=device))


def validation_loss(trainer: Trainer, samples: Samples, *, num_batches: int) -> float:
    """Mean loss over the first `num_batches` global batches of the validation data, in nats per token.

    Collective over all ranks.
    """
    runtime = trainer.runtime
    batch_size = runtime.grid.plan.global_batch_size
    total, num_counted = torch.zeros((), dtype=torch.float64, device=trainer.device.torch), 0
    for batch in range(num_batches):
        then = (batch + 1) * batch_size if batch + 1 < num_batches else None
        num_counted += forward_pass(trainer, samples, first_sample=batch * batch_size, then=then) > 0
        total += trainer.loss
    total = trainer.device.to_host(total)
    sum_over_world(runtime.groups, runtime.coord, total, "the all-reduce of the validation loss")
    return total.item() / num_counted if num_counted else math.nan


def score_all_rows(trainer: Trainer, pairs: Samples, *, num_pairs: int) -> torch.Tensor:
    """Log-probabilities of all answers under the weights as they are: fp64 [2 * pairs] on the host, by place.

    One forward pass without dropout; collective over all ranks.
    """
    runtime, recorder = trainer.runtime, RowScores(num_pairs)
    batch_size = runtime.grid.plan.global_batch_size
    firsts = range(0, 2 * num_pairs, batch_size)
    with recording(trainer, recorder):
        for first in firsts:
            then = first + batch_size if first + batch_size < firsts.stop else None
            forward_pass(trainer, pairs, first_sample=first, then=then)
    # Each rank of a tensor-parallel group has recorded the same.
    totals = torch.cat([recorder.scores, recorder.counts]) * (runtime.coord.tensor_rank == 0)
    sum_over_world(runtime.groups, runtime.coord, totals, "the sum of the reference's log-probabilities")
    scores, counts = totals.chunk(2)
    return scores / counts


@contextmanager
def recording(trainer: Trainer, recorder: Objective) -> Iterator[None]:
    """Inside, what is forwarded goes to a recorder in place of the trainer's objective."""
    kept = {stage: runner.objective for stage, runner in trainer.runners.items()}
    for runner in trainer.runners.values():
        runner.objective = recorder
    yield
    for stage, runner in trainer.runners.items():
        runner.objective = kept[stage]


def forward_pass(trainer: Trainer, samples: Samples, *, first_sample: int, then: int | None) -> int:
    """Forward a global batch without a step; as `begin_pass`. Collective over all ranks."""
    terms = begin_pass(trainer, samples, first_sample=first_sample, then=then)
    with as_training_error(trainer.runtime.coord):
        trainer.executor.run(trainer.runtime.evaluation_program)
    return terms


def begin_pass(
    trainer: Trainer, samples: Samples, *, first_sample: int, then: int | None, scale: float = 1.0
) -> int:
    """Point the stage runners at their pipeline's share of the batch; that of batch `then` is read ahead.

    Returns the number of terms that the batch's loss is a mean of.
    """
    runtime = trainer.runtime
    trainer.feed.begin(samples, first_sample, then=then)
    terms = num_terms(trainer.feed, runtime, samples, first_sample)
    if trainer.pair_loss is not None:
        trainer.pair_loss.measures.zero_()
    for runner in trainer.runners.values():
        runner.begin(
            first_sample=first_sample + runtime.grid.first_sequence(runtime.coord),
            num_terms=max(terms, 1),
            num_sequences=runtime.grid.plan.global_batch_size,
            scale=scale,
        )
    return terms


def disk_note(plan: Plan, runtime: RankRuntime) -> str | None:
    """How much a step writes to all disks, and whether through the page cache; None without such state.
    Collective over all ranks."""
    if not any(stage.optimizer_disk for stage in plan.stages):
        return None
    file = _file(runtime)
    totals = torch.zeros(2, dtype=torch.float64)
    if file is not None:
        totals += torch.tensor([float(file.num_bytes), float(not file.is_direct)])
    sum_over_world(runtime.groups, runtime.coord, totals, "the sum of what ranks write to disks")
    num_bytes, cached = totals.tolist()
    step_seconds = plan.forecast.step_seconds if plan.forecast else None
    note = f"optimizer state on disk: {written_words(num_bytes, step_seconds)}"
    if cached:
        note += f"; {cached:.0f} ranks through the page cache: their file system takes no direct requests"
    return note


def _file(runtime: RankRuntime) -> DiskFile | None:
    chunks = (chunk for state in runtime.states for chunk in state.host_chunks)
    return next((chunk.store.file for chunk in chunks if isinstance(chunk, DiskChunk)), None)


MOST_NAMED = 3
"""Parameters that a message lists."""


@contextmanager
def checking(
    runtime: RankRuntime, runners: Mapping[int, StageRunner], stopwatch: Stopwatch, faults: list[str]
) -> Iterator[None]:
    """Around the rank program of a step that all ranks check; `faults` gets what this rank finds."""
    for stage, runner in runners.items():
        micro_batch = _to_repeat(runtime, stage, runner)
        if micro_batch is not None:
            compare = partial(_compare, runtime, stage, runner, stopwatch, faults)
            runner.repeat = Repeat(micro_batch, compare)
    bridge = runtime.bridge
    if bridge is not None:
        bridge.checks = True
    try:
        yield
    finally:
        for runner in runners.values():
            runner.repeat = None
        if bridge is not None:
            bridge.checks = False
            faults += bridge.faults
            bridge.faults.clear()


def _to_repeat(runtime: RankRuntime, stage: int, runner: StageRunner) -> int | None:
    """The first micro-batch of a stage's backwards; None if it cannot be computed again.

    What copies parameters or activations has copied them back; a split backward is in two places; the last
    backward has started reductions; and other objectives count more than a loss.
    """
    backwards = [step for step in runtime.program if step.stage == stage and step.kind == "backward"]
    if len(backwards) < 2 or isinstance(runner, PagedRunner) or runtime.copies is not None:
        return None
    # Not asked of its parameters: a stage may hold none.
    if runner.loss.device.type != "cpu" or not isinstance(runner.objective, TokenLoss):
        return None
    return backwards[0].micro_batch


def _compare(
    runtime: RankRuntime,
    stage: int,
    runner: StageRunner,
    stopwatch: Stopwatch,
    faults: list[str],
    first: Repeat,
) -> None:
    """Compute a micro-batch again whose backward has ended, and note what differs; gradients stay as they
    were."""
    with stopwatch.paused(), torch.no_grad():
        part = cast(Transformer, runtime.parts[stage])
        gradients = {
            name: cast(torch.Tensor, parameter.main_gradient)  # pyright: ignore[reportAttributeAccessIssue]
            for name, parameter in part.named_parameters()
            if parameter.requires_grad
        }
        kept = {name: gradient.clone() for name, gradient in gradients.items()}
        for gradient in gradients.values():
            gradient.zero_()
        output, input_gradient = runner.compute_again(first)
        unlike = [] if same_bits(first.output, output) else ["the output"]
        given = first.input_gradient
        if given is not None and input_gradient is not None and not same_bits(given, input_gradient):
            unlike.append("the gradient of its input")
        names = _alone(runtime, stage)
        odd = [name for name in gradients if name in names and not same_bits(kept[name], gradients[name])]
        for name, gradient in gradients.items():
            gradient.copy_(kept[name])
    if odd:
        more = f" and {len(odd) - MOST_NAMED} more" if len(odd) > MOST_NAMED else ""
        unlike.append(f"the gradient of {', '.join(odd[:MOST_NAMED])}{more}")
    if unlike:
        faults.append(
            f"{runtime.grid.label(runtime.coord)}: micro-batch {first.micro_batch} on stage {stage}, "
            f"computed twice, has other bits in {', '.join(unlike)}"
        )


def _alone(runtime: RankRuntime, stage: int) -> Collection[str]:
    """The parameters whose gradients hold nothing but the first micro-batch's when its backward ends."""
    part = cast(Transformer, runtime.parts[stage])
    kinds = [step.kind for step in runtime.program if step.stage == stage and step.is_compute]
    # The head adds its gradient in the forward, so that all forwards until then are in it.
    several = part.has_head and kinds.index("backward") > 1
    others = {
        name
        for number, other in runtime.parts.items()
        if number != stage
        for name, _ in other.named_parameters()
    }
    return [
        name
        for name, parameter in part.named_parameters()
        if name not in others and not (several and parameter is part.output_weight)
    ]


class Optimizer:
    """AdamW (Loshchilov and Hutter 2019) on the masters that this rank holds.

    Weight decay applies to matrices and not to vectors (norms and biases), as in the published runs. What is
    on the host is stepped there, chunk by chunk, while the card steps its own part.
    """

    def __init__(self, states: Sequence[OwnedState], config: OptimizerConfig) -> None:
        self.states, self._config = states, config
        on_card = [s for state in states for s in state.shards if not s.on_host]
        self._gradients = [shard.gradient for shard in on_card]
        found = [_parts(on_card, decay=decay) for decay in (True, False)]
        self._on_card = [parts for parts in found if parts.masters]
        on_host = any(True for state in states for _ in state.host_chunks)
        # Weights that were stepped on the host are sent while the host steps those of the next state.
        self._rounds = [[state] for state in states] if on_host else [states]
        self._host_steps = torch.zeros((), dtype=torch.float32)

    def step(self, lr: float, *, factor: float = 1.0) -> None:
        """Step the masters by `factor` times their gradients, and start to sync the model's weights;
        collective over owners.

        The first layers' weights are sent first, because the next forward waits for them first.
        """
        with during(Activity("optimizer")):
            if factor != 1.0:
                for gradient in self._gradients:
                    gradient.mul_(factor)
            # Enqueued first: a card steps its part while the host steps the other.
            for parts in self._on_card:
                self._adamw(parts, lr)
        for states in self._rounds:
            for state, chunk in ((s, c) for s in states for c in s.host_chunks):
                with during(Activity("optimizer")):
                    chunk.finish_gradient()
                    self._step_on_host(chunk, lr, factor)
                    state.start_host_weights(chunk)
            with during(Activity("weight_sync")):
                for state in states:
                    state.start_weight_sync()
        self._host_steps += 1

    def settle(self) -> None:
        """Wait until masters and moments have every update, and may be saved."""
        for state in self.states:
            for chunk in state.host_chunks:
                chunk.settle()

    def _step_on_host(self, chunk: HostChunk, lr: float, factor: float) -> None:
        if factor != 1.0:
            chunk.gradient.mul_(factor)
        # It counts the step in the tensor that it is given.
        moments = [chunk.exp_avg], [chunk.exp_avg_sq]
        steps = [self._host_steps.clone()]
        self._adamw(_Parts([chunk.master], [chunk.gradient], *moments, steps, chunk.decays), lr)

    @torch.no_grad()
    def _adamw(self, parts: _Parts, lr: float) -> None:
        """Torch's function: its class takes the host several times as long to say the same."""
        config = self._config
        adamw(
            parts.masters,
            parts.gradients,
            parts.exp_avgs,
            parts.exp_avg_sqs,
            [],
            parts.steps,
            fused=True,
            amsgrad=False,
            beta1=config.beta1,
            beta2=config.beta2,
            lr=lr,
            weight_decay=config.weight_decay if parts.decay else 0.0,
            eps=config.epsilon,
            maximize=False,
        )

    def set_step(self, step: int) -> None:
        """Set AdamW's step count, for its bias correction, after loading a checkpoint."""
        self._host_steps.fill_(step)
        for steps in (steps for parts in self._on_card for steps in parts.steps):
            steps.fill_(step)


@dataclass(frozen=True)
class _Parts:
    """What one call of AdamW steps: flat buffers, and of each the steps so far, on its device."""

    masters: list[torch.Tensor]
    gradients: list[torch.Tensor]
    exp_avgs: list[torch.Tensor]
    exp_avg_sqs: list[torch.Tensor]
    steps: list[torch.Tensor]
    decay: bool


def _parts(shards: Sequence[OptimizerShard], *, decay: bool) -> _Parts:
    """The matrices of all shards, which decay, or their vectors, which do not."""
    rows: list[list[torch.Tensor]] = []
    for shard in shards:
        buffers = (shard.master, shard.gradient, shard.exp_avg, shard.exp_avg_sq)
        row = [buffer.tensor_split([shard.num_matrix_elements])[not decay] for buffer in buffers]
        if row[0].numel():
            rows.append(row)
    masters, gradients, exp_avgs, exp_avg_sqs = ([row[i] for row in rows] for i in range(4))
    steps = [torch.zeros((), dtype=torch.float32, device=master.device) for master in masters]
    return _Parts(masters, gradients, exp_avgs, exp_avg_sqs, steps, decay)


_MAX_LISTED = 4
"""Parameters that a message lists."""


def check_weights(
    grid: Grid, coord: RankCoord, trained: Sequence[FlatBucket], frozen: Sequence[FlatBucket]
) -> None:
    """Raise TrainingError, on all ranks, unless the weights that several ranks hold have the same bits on all
    of them; it names ranks and parameters. Collective over all ranks."""
    if not dist.is_initialized():
        return
    first_rows, count = _first_rows(grid)
    shared = [
        entry
        for number, buckets in enumerate((trained, frozen))
        for bucket in buckets
        for entry in _shared(bucket, number * count + first_rows[bucket.bucket])
    ]
    extremes = torch.iinfo(torch.int64)
    least = torch.full((2 * count, 2), extremes.max, dtype=torch.int64)
    most = torch.full((2 * count, 2), extremes.min, dtype=torch.int64)
    if shared:
        rows = torch.tensor([entry.row for entry in shared])
        least[rows] = most[rows] = torch.stack([entry.checksum() for entry in shared]).cpu()
    with guard_world_collective(coord, "the check of weights"):
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    is_held, is_unlike = (least <= most).all(dim=1), (least != most).any(dim=1)
    unlike = set(torch.nonzero(is_held & is_unlike).flatten().tolist())
    if not unlike:
        return
    mine = {
        (entry.row, name): tuple(checksum(weights).tolist())
        for entry in shared
        if entry.row in unlike
        for name, weights in entry.weights()
    }
    with guard_world_collective(coord, "the search for weights that differ"):
        raise TrainingError(_message(grid, gather_objects(mine)))


def raise_faults(coord: RankCoord, faults: Sequence[str]) -> None:
    """Raise TrainingError, on all ranks, with what some rank has found wrong with messages or gradients.
    Collective over all ranks."""
    with guard_world_collective(coord, "the search for bits that differ"):
        found = [fault for own in gather_objects(list(faults)) for fault in own]
    if found:
        more = f"; and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        raise TrainingError(
            f"{'; '.join(found[:_MAX_LISTED])}{more}. Test the memory of that card and its host, and for a "
            "message the link's; go on from a checkpoint that was saved before"
        )


@dataclass(frozen=True)
class _Shared:
    """Weights that several ranks hold: a slice of a bucket, or (None) what is whole on each rank."""

    row: int
    """Its number among all of the model's."""
    bucket: FlatBucket
    part: Slice | None

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each parameter's part, by name."""
        bucket = self.bucket
        for piece in bucket.pieces:
            if self.part is not None:
                yield piece.name, bucket.slice_view(bucket.weights, piece.name, self.part)
            elif piece.shard.dim is None:
                yield piece.name, bucket.view(bucket.weights, piece.name)

    def checksum(self) -> torch.Tensor:
        """That of all of it."""
        if self.part is not None:
            return checksum(self.bucket.pack(self.bucket.weights, self.part))
        sums = [checksum(weights) for _, weights in self.weights()]
        return torch.stack([*sums, torch.zeros_like(checksum(self.bucket.weights[:0]))]).sum(dim=0)


def _shared(bucket: FlatBucket, row: int) -> Iterator[_Shared]:
    """What other ranks hold too of a bucket whose first number is `row`."""
    for part in bucket.slices:
        if len(part.group) > 1:
            yield _Shared(row + part.index, bucket, part)
    if bucket.num_slices > 1:
        yield _Shared(row + bucket.num_slices, bucket, None)


def _first_rows(grid: Grid) -> tuple[dict[Bucket, int], int]:
    """The number of each bucket's first slice, after which those of its others and of what is whole follow;
    and how many there are."""
    found: dict[Bucket, int] = {}
    count = 0
    for bucket in grid.buckets:
        found[bucket] = count
        count += bucket.num_slices + 1
    return found, count


def _message(grid: Grid, told: Sequence[dict[tuple[int, str], tuple[int, ...]]]) -> str:
    """Which ranks have other weights than most that hold them, of which parameters, and what to do."""
    found: dict[str, list[str]] = {}
    for row, name in dict.fromkeys(key for mine in told for key in mine):
        sums = {rank: mine[row, name] for rank, mine in enumerate(told) if (row, name) in mine}
        (common, votes), *others = Counter(sums.values()).most_common()
        if not others:
            continue
        odd = [rank for rank, own in sums.items() if own != common]
        if votes == others[0][1]:
            who = f"{_ranks(grid, list(sums))} have unlike weights"
        else:
            verb = "has" if len(odd) == 1 else "have"
            same = [rank for rank in sums if rank not in odd]
            who = f"{_ranks(grid, odd)} {verb} other weights than {_ranks(grid, same)}"
        found.setdefault(who, []).append(name)
    lines = [f"{who}: {_listed(list(dict.fromkeys(names)))}" for who, names in found.items()]
    advice = (
        "They should be the same to the bit. Test the memory of that card; if cards of unlike types each "
        "step all of the weights, set optimizer_sharding: true in the plan; and go on from a checkpoint that "
        "was saved while they were"
    )
    return "; ".join(lines[:_MAX_LISTED]) + f". {advice}"


def _ranks(grid: Grid, ranks: Sequence[int]) -> str:
    """Some ranks for people; one alone with its place and card."""
    if len(ranks) == 1:
        return grid.label(grid.coords[ranks[0]])
    shown = ", ".join(map(str, ranks[: 2 * _MAX_LISTED]))
    return f"ranks {shown}" + (", ..." if len(ranks) > 2 * _MAX_LISTED else "")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _MAX_LISTED
    return ", ".join(names[:_MAX_LISTED]) + (f" and {more} more parameters" if more > 0 else "")
