"""What the training loop knows of an engine, and what the ranks of any engine do at the end of a step.

An engine computes a step's loss and gradients, and steps weights; the loop (`run.py`), its log and its
checkpoints are the same for our own engine (`step.py`), megatron-core's and the policy of a run of
reinforcement learning (`rl/loop.py`).

The load of the experts: tokens of each, over all ranks, and the biases that even it.

With balance `bias` (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2), each
step moves the bias of every expert against its load in that step:

    b_i <- b_i + balance_rate sign(mean load - load of i)

Loads are integers summed over all ranks, so that every plan moves the biases alike.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist

from yuan_train.checkpoint.load import LocalShard
from yuan_train.config.errors import NotFinite
from yuan_train.config.load import as_plain
from yuan_train.config.model import ModelConfig
from yuan_train.config.run import LossScaleConfig, RunConfig
from yuan_train.data.loader import Samples
from yuan_train.models.experts import Router
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import peak_footprint_bytes
from yuan_train.parallel.grid import Grid, RankCoord
from yuan_train.parallel.groups import Groups, gather_on_first, guard_world_collective, sum_over_world
from yuan_train.train.job import Job
from yuan_train.train.metrics import Moved, StepMetrics, is_logged, peak_flops
from yuan_train.train.stage import Passes
from yuan_train.train.trace import StepClock


class World(Protocol):
    """Where a rank stands among all."""

    @property
    def grid(self) -> Grid: ...

    @property
    def coord(self) -> RankCoord: ...

    @property
    def groups(self) -> Groups:
        """For the sums and gathers over all ranks."""
        ...


@dataclass(frozen=True)
class LossScaler:
    """The current loss scale, and the number of consecutive steps without overflow since it was set."""

    scale: float
    good_steps: int = 0

    def after(self, config: LossScaleConfig, *, skipped: bool) -> LossScaler:
        """The scaler after one more step.

        A skipped step halves the scale, down to the minimum; `growth_interval` good steps in a row double it.
        """
        if skipped:
            return LossScaler(max(self.scale / 2, config.minimum))
        if self.good_steps + 1 == config.growth_interval:
            return LossScaler(self.scale * 2)
        return LossScaler(self.scale, self.good_steps + 1)


@dataclass(frozen=True)
class Progress:
    """Steps done, and the samples they consumed. A skipped step counts, and consumes its samples.

    There is no generator state: every random number is a function of the seed and a name or a position.
    """

    step: int = 0
    sequences: int = 0
    tokens: int = 0
    skipped: int = 0
    """Steps that left the weights as they were."""
    scaler: LossScaler | None = None
    """None if the loss is not scaled."""

    @staticmethod
    def initial(run: RunConfig) -> Progress:
        """The progress of a new run, before its first step."""
        return Progress(scaler=_new_scaler(run))

    @staticmethod
    def from_state(state: Mapping[str, Any], run: RunConfig) -> Progress:
        """That in a checkpoint's state.json. The scaler is a new one if the saved run did not scale."""
        scaler, saved = _new_scaler(run), state.get("scaler")
        if scaler is not None and saved is not None:
            scaler = LossScaler(saved["scale"], saved["good_steps"])
        return Progress(
            step=state["step"],
            sequences=state["sequences"],
            tokens=state["tokens"],
            skipped=state.get("skipped", 0),
            scaler=scaler,
        )

    def state(self, run: RunConfig) -> dict[str, Any]:
        """The content of a checkpoint's state.json: plain JSON values."""
        return {"version": 1, **asdict(self), "run": as_plain(run)}

    def advance(self, run: RunConfig, result: StepResult) -> Progress:
        """The progress after one more step."""
        batch, config, tokens = run.train.global_batch_size, run.train.scaling, result.tokens
        if tokens is None:
            tokens = batch * run.data.sequence_length
        scaler = self.scaler.after(config, skipped=result.skipped) if self.scaler and config else None
        return Progress(
            step=self.step + 1,
            sequences=self.sequences + batch,
            tokens=self.tokens + tokens,
            skipped=self.skipped + (not result.is_stepped),
            scaler=scaler,
        )


def _new_scaler(run: RunConfig) -> LossScaler | None:
    return LossScaler(run.train.scaling.initial) if run.train.scaling else None


@dataclass(frozen=True)
class StepRequest:
    """What the loop asks of an engine: one optimizer step on a global batch."""

    samples: Samples
    first_sample: int
    """The batch is samples [first_sample, first_sample + global batch)."""
    lr: float
    clip: float
    """Gradients are clipped to this global norm; 0: no clipping."""
    scale: float = 1.0
    """The backward runs on so many times the loss."""
    may_skip: bool = False
    """Whether a step of which only the gradient norm is not finite is skipped, instead of an error."""
    check: bool = False
    """Messages and gradients are checked in the step, the same on all ranks; see `Engine.check_bits`."""
    stop: bool = False
    """This rank requests a stop of all ranks after the step."""


@dataclass(frozen=True)
class StepResult:
    """The outcome of a step, the same on all ranks."""

    loss: float
    """Mean loss of the batch, in nats per trained token; of pairs, per pair."""
    grad_norm: float
    """Global norm before clipping."""
    stop: bool
    """Some rank requested a stop."""
    skipped: bool = False
    """The gradients overflowed on some rank, so no rank stepped its weights."""
    is_empty: bool = False
    """No token of the batch had a loss, so no rank stepped its weights: momentum and decay alone would."""
    preference: tuple[float, float] | None = None
    """Of pairs: the share in which the chosen answer is ahead, and by how much on average."""
    tokens: int | None = None
    """Read in the step; None: a global batch of whole sequences."""

    @property
    def is_stepped(self) -> bool:
        """Whether all ranks have stepped their weights."""
        return not (self.skipped or self.is_empty)


@dataclass(frozen=True)
class Measured:
    """What is measured of a step."""

    step_seconds: float
    of_ranks: list[list[float]] | None
    """By rank, seconds of compute and bytes of peak memory; on rank 0, if they were gathered."""
    expert_tokens: list[list[int]] | None
    """Tokens of each layer's experts since they were counted last, if they were counted now."""
    end: float
    """When the step had ended on all ranks, on this process's `time.perf_counter`."""
    links: Mapping[str, float] | None = None
    """Seconds that a message takes over each link between nodes, if they were measured after the step."""
    moved: Moved | None = None
    """Before the step."""


@dataclass(frozen=True)
class StepRecord:
    """A step that has ended, for the log."""

    progress: Progress
    """After the step."""
    request: StepRequest
    result: StepResult
    measured: Measured
    evaluation: Any
    """What `Engine.evaluate` found."""


class Engine(Protocol):
    """Computes steps of the loop; every method is called by all ranks, at the same points."""

    @property
    def world(self) -> World: ...

    def reading(self) -> AbstractContextManager[object]:
        """While inside, this rank's data is read ahead."""
        ...

    def prepare(self, job: Job, progress: Progress) -> str | None:
        """What is left to do before the first step, and what the log is to say of it. Collective."""
        ...

    def step(self, request: StepRequest) -> StepResult:
        """One training step; collective over all ranks.

        Raises NotFinite, with the weights of the step before still in place, if the loss or the gradient norm
        is not finite; TrainingError if a rank is lost.
        """
        ...

    def evaluate(self, job: Job, step: int) -> Any:
        """What is measured of the weights after a step in which that is due, else None. Collective."""
        ...

    def describe(self, job: Job, record: StepRecord) -> StepMetrics:
        """The metrics of a step, on rank 0."""
        ...

    @property
    def kept_step(self) -> int | None:
        """The step whose checkpoint is made out of turn and kept; None: there is none."""
        ...

    def compute_seconds(self) -> float:
        """Seconds of compute since the last call; waits for the device."""
        ...

    def take_expert_tokens(self) -> list[list[int]] | None:
        """Tokens of each layer's experts since the last call; None if they are not counted. Collective."""
        ...

    def tensors(self) -> dict[str, LocalShard]:
        """What this rank writes into a checkpoint, by global name."""
        ...

    def state(self) -> Mapping[str, Any]:
        """What a checkpoint's state.json holds of it beside the progress: plain JSON values."""
        ...

    def finish(self) -> None:
        """Wait for what the last step has left under way; collective over all ranks."""
        ...

    def check_bits(self) -> None:
        """Raise TrainingError, on all ranks, unless messages and gradients of the last step, if that was
        checked, were sound, and ranks that hold the same weights have the same bits. Collective over all
        ranks."""
        ...


BuildEngine = Callable[[Job], tuple[Job, Engine, Progress]]
"""Builds the engine of a job, with initial weights or those of a checkpoint; collective over all ranks.

Also returns the job, whose ranks the engine may number otherwise, and the progress to start from.
"""


class Stepping(Protocol):
    """What the end of a step needs of an engine, on this rank."""

    @property
    def world(self) -> World: ...

    @property
    def feed(self) -> Passes: ...

    def finite(self) -> tuple[bool, bool]:
        """Whether all outputs of the step, and all its gradients, are finite."""
        ...

    def update(self, request: StepRequest, grad_norm: float) -> None:
        """Clip and step the weights."""
        ...


@dataclass(frozen=True)
class RankTerms:
    """A rank's terms of what all ranks sum at the end of a step, on the host in fp64."""

    square: torch.Tensor
    """[1]: of the squared gradient norm."""
    loss: torch.Tensor
    """[1]: of the batch's mean loss."""
    scale: float = 1.0
    """What the gradients are still multiplied by."""
    measures: torch.Tensor | None = None
    """[2]: of `PairLoss.measures`; None without pairs."""


def end_step(engine: Stepping, request: StepRequest, terms: RankTerms) -> StepResult:
    """Sum loss and norm over all ranks; then step the weights, skip that, or blame a rank. Collective.

    One all-reduce has everything, on the CPU: not all cards share a communication backend, but all ranks
    share gloo. Errors as those of `Engine.step`.
    """
    world, feed, samples = engine.world, engine.feed, request.samples
    size = world.grid.plan.global_batch_size
    next_sample = request.first_sample + size
    totals = [terms.square, terms.loss, torch.tensor([float(request.stop)], dtype=torch.float64)]
    if terms.measures is not None:
        totals.append(terms.measures)
    elif samples.masks:
        totals.append(count_trained(feed, world, samples, next_sample))
    summed = torch.cat(totals)
    sum_over_world(world.groups, world.coord, summed, "the all-reduce of loss and gradient norm")
    square, loss, stops, *rest = summed.tolist()
    preference, trained = None, None
    if terms.measures is not None:
        pairs = samples.known_terms(size)
        preference = (rest[0] / pairs, rest[1] / pairs)
    elif rest:
        trained = feed.batch_tokens.pop((samples, request.first_sample), None)
        feed.batch_tokens[samples, next_sample] = round(rest[0])
    if trained == 0:
        return StepResult(math.nan, 0.0, stop=stops > 0, is_empty=True)
    grad_norm = math.sqrt(square) / terms.scale if square >= 0 else math.nan
    skipped = request.may_skip and math.isfinite(loss) and not math.isfinite(grad_norm)
    if not skipped:
        if not math.isfinite(loss) or not math.isfinite(grad_norm):
            raise NotFinite(f"loss {loss}, gradient norm {grad_norm}: {blame(world, *engine.finite())}")
        engine.update(request, grad_norm)
    return StepResult(loss, grad_norm, stop=stops > 0, skipped=skipped, preference=preference)


def measure_step(job: Job, engine: Engine, step: int, clock: StepClock) -> Measured:
    """Wait until all ranks have finished a step, which ends it, and gather their measurements on rank 0.

    Collective over all ranks. Many ranks' measurements are gathered only where a progress line is due.
    """
    # This waits for the device, so that the gathering waits for all of them.
    compute_seconds = engine.compute_seconds()
    world, of_ranks = engine.world, None
    if not world.groups.tree or is_logged(step, job.run):
        # To ask the system for the peak takes the host longer than to send a message.
        local = torch.tensor([compute_seconds, peak_footprint_bytes(job.device)], dtype=torch.float64)
        of_ranks = gather_on_first(world.groups, world.coord, local, "the gather of measurements")
    expert_tokens = engine.take_expert_tokens() if is_logged(step, job.run) else None
    return Measured(clock.lap(), of_ranks, expert_tokens, end=time.perf_counter())


def step_metrics(job: Job, record: StepRecord) -> StepMetrics:
    """The metrics of a step of any engine, on rank 0."""
    run, plan, measured = job.run, job.plan, record.measured
    result, progress = record.result, record.progress
    seconds, of_ranks = measured.step_seconds, measured.of_ranks
    tokens = result.tokens
    if tokens is None:
        tokens = run.train.global_batch_size * run.data.sequence_length
    peak = peak_flops(plan, run.train.precision)
    flops = tokens * run.model.training_flops(run.data.sequence_length)
    scaled = progress.scaler is not None
    return StepMetrics(
        step=progress.step,
        loss=result.loss,
        lr=record.request.lr,
        grad_norm=result.grad_norm,
        tokens=progress.tokens,
        step_seconds=seconds,
        tokens_per_second=tokens / seconds,
        mfu=flops / seconds / peak if peak else None,
        peak_memory_bytes=[int(rank[1]) for rank in of_ranks] if of_ranks else None,
        forecast_step_seconds=plan.forecast.step_seconds if plan.forecast else None,
        stage_seconds=[rank[0] for rank in of_ranks] if of_ranks else None,
        expert_tokens=measured.expert_tokens,
        link_seconds=dict(measured.links) if measured.links else None,
        moved=measured.moved,
        validation_loss=record.evaluation,
        loss_scale=record.request.scale if scaled else None,
        skipped_steps=progress.skipped if scaled else None,
        accuracy=None if result.preference is None else result.preference[0],
        margin=None if result.preference is None else result.preference[1],
    )


def num_terms(feed: Passes, world: World, blend: Samples, first_sample: int) -> int:
    """Tokens with a loss in a whole global batch, or pairs: every rank divides by the same number.

    With a mask only the last stages know, each of its own share. Their sum over the ranks is known since the
    step before, in whose all-reduce it was; if there was none, collective over all ranks.
    """
    if not blend.masks:
        return blend.known_terms(world.grid.plan.global_batch_size)
    known = feed.batch_tokens
    if (blend, first_sample) not in known:
        total = count_trained(feed, world, blend, first_sample)
        sum_over_world(world.groups, world.coord, total, "the all-reduce of the tokens with a loss")
        known[blend, first_sample] = round(total.item())
    return known[blend, first_sample]


def count_trained(feed: Passes, world: World, blend: Samples, first_sample: int) -> torch.Tensor:
    """This rank's term of the tokens with a loss in a batch that is begun or announced: fp64 [1], exact."""
    counts = world.coord.tensor_rank == 0
    number = feed.count_trained(blend, first_sample) if counts else 0
    return torch.tensor([number], dtype=torch.float64)


def blame(world: World, finite_output: bool, finite_gradient: bool) -> str:
    """A message that names the first rank, in the model's order, whose output or gradient was not finite.

    Collective over all ranks; the arguments are this rank's.
    """
    local = torch.tensor([float(finite_output), float(finite_gradient)])
    flags = [local]
    if dist.is_initialized():
        flags = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        with guard_world_collective(world.coord, "the search for the first value that is not finite"):
            dist.all_gather(flags, local)
    order = sorted(world.grid.coords, key=lambda coord: (coord.stages, coord.pipeline))
    for what, index in (("output", 0), ("gradient", 1)):
        for coord in order:
            if not flags[coord.rank][index]:
                return f"the first {what} that is not finite came from {coord}"
    return "every rank's outputs and gradients were finite; their sum was not"


class ExpertLoad:
    """Counts the tokens of each layer's experts over all ranks, and moves the biases of a model with some."""

    def __init__(self, model: ModelConfig, world: World, routers: Iterable[tuple[int, Router]]) -> None:
        """`routers`: this rank's, with their layers."""
        self._model, self._world = model, world
        self._routers = list(routers)
        self._counted = self._zeros()

    def biases(self) -> dict[str, torch.Tensor]:
        """This rank's biases [N] by global name; empty without balance `bias`."""
        return {f"layers.{i}.router.bias": r.bias for i, r in self._routers if r.bias is not None}

    @torch.no_grad()
    def balance(self, *, moves: bool) -> None:
        """Count the load of the step that has ended, and move the biases by it; collective over all ranks."""
        if self._model.balance != "bias":
            return
        load_LN = self._sum()
        self._counted += load_LN
        if not moves:
            return
        # The total against N times the load: both are whole numbers.
        move_LN = (load_LN.sum(dim=1, keepdim=True) - load_LN * self._model.num_experts).sign()
        for layer, router in self._routers:
            assert router.bias is not None
            router.bias += self._model.balance_rate * move_LN[layer].to(router.bias)

    def take(self) -> list[list[int]]:
        """Tokens of each layer's experts in training since the last call; collective over all ranks."""
        if self._model.balance != "bias":
            self._counted += self._sum()
        taken, self._counted = self._counted, self._zeros()
        return taken.long().tolist()

    def _sum(self) -> torch.Tensor:
        """Tokens [layers, N] since the last sum, fp64: whole numbers, exact in any order."""
        load_LN = self._zeros()
        for layer, router in self._routers:
            load = torch.tensor(router.take_load(), dtype=torch.float64)
            # The ranks of a replica decide alike.
            if self._world.coord.tensor_rank == 0:
                load_LN[layer] += load
        groups, coord = self._world.groups, self._world.coord
        sum_over_world(groups, coord, load_LN.view(-1), "the sum of the experts' tokens")
        return load_LN

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._model.num_layers, self._model.num_experts, dtype=torch.float64)


def routers_of(runtime: RankRuntime) -> list[tuple[int, Router]]:
    """The routers of our engine's parts of the model on a rank, with their layers."""
    return [
        (layer, block.router)
        for part in runtime.parts.values()
        for layer, block in cast(Transformer, part).blocks.items()
        if block.has_experts
    ]
