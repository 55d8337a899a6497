"""A training run: data, lengths, optimizer, checkpoints, log; and what the planner may choose from."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from yuan_train.config.devices import Precision
from yuan_train.config.errors import ConfigError, Problem
from yuan_train.config.load import Document, build, graft, is_mapping, override, read_document
from yuan_train.config.model import ModelConfig, model_laws
from yuan_train.config.units import Unit

Count = Annotated[int, Gt(0)]
Counts = Annotated[tuple[Count, ...], MinLen(1)]
Share = Annotated[float, Ge(0), Le(1)]
Schedule = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"]
Recompute = Literal["none", "selective", "full"]


@dataclass(frozen=True, kw_only=True)
class Source:
    """One corpus: `prefix.bin` and `prefix.idx`, and its share of the samples relative to the others."""

    prefix: str
    weight: Annotated[float, Gt(0)] = 1.0


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read, and what happens where a document ends inside a sample."""

    train: Annotated[tuple[Source, ...], MinLen(1)]
    validation: tuple[Source, ...] = ()
    """Corpora of their own; or give `split`."""
    split: tuple[Share, Share] | None = None
    """Shares of the training corpora's documents for training and for validation."""
    tokenizer: str | None = None
    """Directory with tokenizer.model; needed for any reset, for it knows the end-of-document token."""
    sequence_length: Count
    reset_position_ids: bool = True
    """Rotary positions start again at each document, as in the published runs."""
    reset_attention: bool = False
    """Attention does not look into older documents."""
    reset_filter: bool = False
    """The localized filter does not look into older documents."""
    fim_rate: Share = 0.0
    """Share of the documents in a sample that are turned into fill-in-the-middle (published runs: 0.5)."""
    fim_spm_rate: Share = 0.5
    """Of these, the share in the order suffix, prefix, middle; the others have prefix, suffix, middle."""
    loss_after_separator: bool = False
    """Fine-tuning: of a document with a `<sep>`, only the tokens from there to its end are trained."""
    mask_loss_after_eod: bool = False
    """The first token of a document is not trained: nothing before it tells what it is."""

    @property
    def resets(self) -> bool:
        """Whether document ends matter at all."""
        return self.reset_position_ids or self.reset_attention or self.reset_filter

    @property
    def masks(self) -> bool:
        """Whether some tokens of a sample are not trained."""
        return self.loss_after_separator or self.mask_loss_after_eod


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """What the loss is multiplied by before the backward, so that small gradients do not vanish in fp16.

    Powers of two, for these change no digit of a gradient. A step whose gradients overflow is skipped, and
    halves the scale.
    """

    initial: Annotated[float, Ge(1)] = 65536.0
    growth_steps: Annotated[int, Ge(0)] = 1000
    """Steps in a row without overflow after which it doubles; 0: it never grows."""
    minimum: Annotated[float, Ge(1)] = 1.0
    """Gradients that overflow at this scale end the run."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Lengths, batch and numbers."""

    steps: Count
    global_batch_size: Count
    """Sequences per optimizer step."""
    micro_batch_size: Count = 1
    seed: Annotated[int, Ge(0)] = 1234
    precision: Precision = "bf16"
    """Of weights and activations; under bf16 and fp16 the optimizer keeps fp32 masters."""
    loss_scale: LossScaleConfig | None = None
    """By default fp16 scales the loss as `LossScaleConfig` says, and other precisions do not."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda where there is one."""
    timeout: Annotated[float, Gt(0), Unit("seconds")] = 600.0
    """How long a rank waits for another before the run stops."""

    @property
    def scaling(self) -> LossScaleConfig | None:
        """How the loss is scaled, if at all."""
        return self.loss_scale or (LossScaleConfig() if self.precision == "fp16" else None)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate curve."""

    learning_rate: Annotated[float, Gt(0)]
    minimum_learning_rate: Annotated[float, Ge(0)] = 0.0
    warmup_steps: Annotated[int, Ge(0)] = 0
    decay_steps: Count | None = None
    """Step at which the minimum is reached; by default the last step of the run."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    epsilon: Annotated[float, Gt(0)] = 1e-8
    weight_decay: Annotated[float, Ge(0)] = 0.1
    clip_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Largest global gradient norm; 0 switches clipping off."""


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How often the loss on the validation data is measured, and on how much."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between two measurements; 0: never."""
    batches: Count = 8
    """Global batches per measurement."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Where and how often the state is saved."""

    directory: str | None = None
    """None: nothing is saved."""
    every: Annotated[int, Ge(0)] = 0
    """Steps between two checkpoints; 0: only at the end and on SIGTERM."""
    keep: Annotated[int, Ge(0)] = 0
    """How many of the newest are kept; 0: all."""
    asynchronous: bool = False
    """Training goes on while a checkpoint is written, from a copy in host memory: 12 bytes per parameter, on
    the rank that writes it. The next save, and the end of the run, wait for the one under way."""
    resume: str = "auto"
    """`auto`: from the latest whole one when there is one; `never`; or a checkpoint's directory."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """metrics.jsonl, config.yaml (resolved) and TensorBoard events go here."""

    directory: str | None = None
    every: Count = 1


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """Constraints for the planner; what is None is the planner's to choose."""

    tensor: Counts | None = None
    pipelines: Counts | None = None
    num_micro_batches: Counts | None = None
    micro_batch_size: Counts | None = None
    replicas: Counts | None = None
    optimizer_sharding: tuple[bool, ...] | None = None
    recompute: Annotated[tuple[Recompute, ...], MinLen(1)] | None = None
    schedule: Annotated[tuple[Schedule, ...], MinLen(1)] | None = None
    device_order: Literal["fixed", "free"] = "free"
    use_all_devices: bool = False
    overlap: bool = True
    """Sends overlap compute; false: the sender waits."""
    time_limit: Annotated[float, Gt(0), Unit("seconds")] = 60.0
    objective: Literal["step_time"] = "step_time"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, the model included."""

    model: ModelConfig
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    search: SearchConfig = field(default_factory=SearchConfig)

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum; a short trial run may end in the warm-up."""
        return self.optimizer.decay_steps or max(self.train.steps, self.optimizer.warmup_steps + 1)


def run_laws(run: RunConfig) -> Iterator[Problem]:
    """Yield what is wrong between the parts of a run."""
    for problem in model_laws(run.model):
        yield replace(problem, path=("model", *problem.path))
    data, train, optimizer = run.data, run.train, run.optimizer
    if data.sequence_length > run.model.max_sequence_length:
        yield Problem(
            ("data", "sequence_length"),
            f"{data.sequence_length} tokens, but the model allows {run.model.max_sequence_length} "
            "(model.max_sequence_length)",
        )
    if train.global_batch_size % train.micro_batch_size:
        yield Problem(
            ("train", "global_batch_size"),
            f"{train.global_batch_size} sequences do not divide into micro-batches of "
            f"{train.micro_batch_size} (train.micro_batch_size)",
        )
    yield from _loss_scale_laws(train)
    if optimizer.minimum_learning_rate > optimizer.learning_rate:
        yield Problem(("optimizer", "minimum_learning_rate"), "greater than learning_rate; make it smaller")
    if optimizer.decay_steps is not None and optimizer.warmup_steps >= optimizer.decay_steps:
        yield Problem(
            ("optimizer", "warmup_steps"),
            f"{optimizer.warmup_steps} warm-up steps leave none of the {optimizer.decay_steps} decay steps",
        )
    if data.resets and data.tokenizer is None:
        yield Problem(
            ("data", "tokenizer"),
            "resets at document ends need the tokenizer's end-of-document token; give a tokenizer, or set "
            "reset_position_ids, reset_attention and reset_filter to false",
        )
    if (data.fim_rate or data.masks) and data.tokenizer is None:
        yield Problem(
            ("data", "tokenizer"),
            "fim_rate, loss_after_separator and mask_loss_after_eod need the tokenizer's special tokens; "
            "give the tokenizer that the corpora were made with",
        )
    if data.fim_rate and data.loss_after_separator:
        yield Problem(
            ("data", "fim_rate"),
            "filling in the middle would cut questions from their answers; set it to 0 for fine-tuning "
            "(loss_after_separator)",
        )
    if data.split is not None:
        if not data.split[0] or not data.split[1] or sum(data.split) > 1 + 1e-9:
            shares = list(data.split)
            yield Problem(
                ("data", "split"), f"wanted two shares above 0, of at most 1 together, got {shares}"
            )
        if data.validation:
            yield Problem(("data", "split"), "give either split or validation, not both")
    if run.validation.every and not data.validation and data.split is None:
        what_to_do = "give data.validation or data.split"
        yield Problem(("validation", "every"), f"there is no validation data; {what_to_do}")


def _loss_scale_laws(train: TrainConfig) -> Iterator[Problem]:
    scale = train.loss_scale
    if scale is None:
        return
    for key, value in (("initial", scale.initial), ("minimum", scale.minimum)):
        below = 2.0 ** math.floor(math.log2(value))
        if value != below:
            yield Problem(("train", "loss_scale", key), f"wanted a power of two, as {below:g}, got {value:g}")
    if scale.minimum > scale.initial:
        yield Problem(
            ("train", "loss_scale", "minimum"), f"greater than initial ({scale.initial:g}); make it smaller"
        )


def load_run(path: str | Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a run file, and the model file that it names. Raises ConfigError with all their faults."""
    document = read_document(path)
    for assignment in overrides:
        document = override(_with_model(document), assignment)
    return build(_with_model(document), RunConfig, laws=run_laws)


def _with_model(document: Document) -> Document:
    """Put the model in place of its path, which is relative to the run file."""
    name = document.value.get("model") if is_mapping(document.value) else None
    if not isinstance(name, str):
        return document
    where = document.source(("model",))
    place = Path() if where.startswith("command line") else Path(document.name).parent
    try:
        model = read_document(place / name)
    except ConfigError as error:
        raise ConfigError(f"{where}: model: {error}") from None
    return graft(document, ("model",), model)
