"""Run files: data, steps and batch sizes, optimizer, checkpoints, log, and constraints on the planner."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, Lt, MinLen

from yuan_train.config.cluster import Cluster, Sends
from yuan_train.config.devices import GIB, MEMORY_FRACTION, Precision
from yuan_train.config.errors import ConfigError, Violation
from yuan_train.config.load import build, read_document
from yuan_train.config.model import LoraConfig, ModelConfig, is_rl_document, validate_model, with_overrides
from yuan_train.config.units import Unit

ObjectiveKind = Literal["language_model", "dpo", "reward"]

DEFAULTS: dict[str, dict[str, Any]] = {
    "language_model": {},
    "dpo": {"beta": 0.1, "smoothing": 0.0, "loss": "sigmoid"},
    "reward": {"margin": 0.0},
}
"""The fields that each kind takes, and their defaults."""


@dataclass(frozen=True, kw_only=True)
class ObjectiveConfig:
    """The loss of a run; see `docs/rl.md`. `language_model` reads `data.train`, the others `data.pairs`."""

    kind: ObjectiveKind = "language_model"
    """Next token, direct preference optimisation, or a reward model's ranking of pairs."""
    beta: Annotated[float, Gt(0)] | None = None
    """Of `dpo`: how much a preference weighs against the distance from the reference; None: 0.1."""
    smoothing: Annotated[float, Ge(0), Lt(0.5)] | None = None
    """Of `dpo`: the probability that a pair's label is wrong (cDPO); None: 0."""
    loss: Literal["sigmoid", "ipo"] | None = None
    """Of `dpo`; None: sigmoid."""
    margin: Annotated[float, Ge(0)] | None = None
    """Of `reward`: by how much the chosen answer's score should be greater; None: 0."""

    def __post_init__(self) -> None:
        for name, value in DEFAULTS.get(self.kind, {}).items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    @property
    def reads_pairs(self) -> bool:
        """Whether rows 2i and 2i + 1 of a micro-batch are the chosen and the rejected answer of one pair."""
        return self.kind != "language_model"


@dataclass(frozen=True, kw_only=True)
class StartConfig:
    """What a run begins with; a run that is resumed goes on with its own checkpoint instead."""

    checkpoint: str | None = None
    """Weights, of a checkpoint or of the newest in a folder of them; the optimizer begins anew, at step 0.
    None draws them from train.seed. A reward model takes all but the head of a language model."""


Count = Annotated[int, Gt(0)]
Counts = Annotated[tuple[Count, ...], MinLen(1)]
MOST_SEQUENCES = 2**17
"""Of a batch: the planner simulates each micro-batch of a step, and keeps when it ran."""
Sequences = Annotated[Count, Le(MOST_SEQUENCES)]
Share = Annotated[float, Ge(0), Le(1)]
ScheduleName = Literal["1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"]


SearchObjective = Literal["step_time", "tokens_per_price", "price_under_deadline"]


Recompute = Literal["none", "selective", "full"]
Tier = Literal["optimizer", "activations", "parameters", "disk"]
"""What a plan can put in host memory; `disk`: optimizer state that the host has no room for."""
TIERS: tuple[Tier, ...] = ("optimizer", "activations")
"""What the search may put there without `search.offload`."""
ReduceDtype = Literal["fp32", "bf16"]
EngineName = Literal["yuan", "megatron"]
"""Who trains: our own engine, or megatron-core."""
Effort = Literal["quick", "normal", "thorough"]
TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]

BUCKET_SIZE = 40_000_000
"""Megatron-LM's default (`DistributedDataParallelConfig.bucket_size`: at least 40M parameters)."""
LONGEST_DEFAULT_SEQUENCE = 8192
"""Tokens of a sequence where no run says, at most: few cards hold what recent models were made for."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One corpus: `prefix.bin` and `prefix.idx`, and its share of the samples, relative to other corpora."""

    prefix: str
    """Path of the token files without `.bin` and `.idx`."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the samples, relative to the other corpora."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Corpora, and the treatment of documents that end inside a sample."""

    train: tuple[Source, ...] = ()
    """Corpora to train on; a sample is drawn from one of them by weight."""
    pairs: str | None = None
    """A .jsonl file of preference pairs, for objectives that read them instead of `train`; see docs/rl.md."""
    validation: tuple[Source, ...] = ()
    """Corpora for validation only; or give `split`."""
    split: tuple[Share, Share] | None = None
    """Shares of the training corpora's documents for training and for validation."""
    tokenizer: str | None = None
    """Directory with tokenizer.model; required for resets, fill-in-the-middle and masks, for its special
    tokens."""
    sequence_length: Count
    """Tokens of a sample."""
    reset_position_ids: bool = True
    """Rotary positions restart at each document, as in the published runs."""
    reset_attention: bool = False
    """Attention does not see earlier documents of the sample."""
    reset_filter: bool = False
    """The localized filter does not see earlier documents of the sample."""
    fim_rate: Share = 0.0
    """Share of the documents in a sample that are rearranged to fill-in-the-middle (published runs: 0.5)."""
    fim_spm_rate: Share = 0.5
    """Of these, the share in suffix-prefix-middle order; the others are in prefix-suffix-middle order."""
    loss_after_separator: bool = False
    """Fine-tuning: in a document with a `<sep>`, only the tokens from the first one on have a loss."""
    loss_on_answers: bool = False
    """Fine-tuning: only the tokens that `preprocess --messages-key` marked as answers have a loss."""
    mask_loss_after_eod: bool = False
    """The first token of a document has no loss: no context predicts it."""

    @property
    def resets(self) -> bool:
        """Whether anything is reset at document ends."""
        return self.reset_position_ids or self.reset_attention or self.reset_filter

    @property
    def masks(self) -> bool:
        """Whether some tokens of a sample have no loss."""
        return self.loss_after_separator or self.loss_on_answers or self.mask_loss_after_eod


@dataclass(frozen=True, kw_only=True)
class LossScaleConfig:
    """Dynamic loss scale: multiplies the loss before the backward, so that fp16 gradients do not underflow.

    Powers of two, because these change no digit of a gradient. A step whose gradients overflow is skipped and
    halves the scale.
    """

    initial: Annotated[float, Ge(1)] = 65536.0
    """The scale of the first step, a power of two."""
    growth_interval: Annotated[int, Ge(0)] = 1000
    """Consecutive steps without overflow after which the scale doubles; 0: it never grows."""
    minimum: Annotated[float, Ge(1)] = 1.0
    """If gradients overflow at this scale, the run ends with an error."""


@dataclass(frozen=True, kw_only=True)
class TraceConfig:
    """Training steps of which each rank writes a trace file, for `yuan-train trace`."""

    first_step: Count = 10
    """The first traced step; the steps before it fill caches and buffers."""
    steps: Count = 2
    """How many steps are traced."""
    kernels: bool = False
    """Adds what torch.profiler records: operators, and on a card its kernels and copies. It slows the traced
    steps, and the files grow by megabytes."""

    @property
    def last_step(self) -> int:
        """The last traced step."""
        return self.first_step + self.steps - 1


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batch sizes, seed, precision and device."""

    steps: Count
    """Optimizer steps of the whole run."""
    global_batch_size: Sequences
    """Sequences per optimizer step."""
    micro_batch_size: Sequences = 1
    """Sequences that one process computes at once without a plan; the least of a search for one."""
    seed: Annotated[int, Ge(0)] = 1234
    """Of initial weights, the order of the data and dropout."""
    precision: Precision = "bf16"
    """Of weights and activations; under bf16 and fp16 the optimizer keeps fp32 master weights."""
    loss_scale: LossScaleConfig | None = None
    """None: fp16 uses the defaults of `LossScaleConfig`; other precisions do not scale the loss."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto`: cuda if there is a card, else cpu; but a rank must find the card that the plan gives it, unless
    that is a simulated one, or this is `cpu`."""
    startup_timeout: Annotated[float, Gt(0), Unit("seconds")] = 300.0
    """How long a rank waits at the start for all others to connect."""
    timeout: Annotated[float, Gt(0), Unit("seconds")] = 600.0
    """How long a rank waits for another before the run stops: at least two steps as the plan forecasts."""
    check_every: Annotated[int, Ge(0)] = 0
    """Steps between two checks that all ranks which hold the same weights have the same bits; 0: never. The
    step's messages are checked too and, on processors, gradients: see docs/supervise.md. It costs a few
    passes over the weights, and a micro-batch. A difference ends the run, and the ranks are named."""
    links_every: Annotated[int, Ge(0)] = 10
    """Steps between two measurements of what a message takes over each link between nodes, of which `show`
    names the slow ones; 0: never. Half a MiB goes each way, between two steps. Not with megatron-core."""
    trace: TraceConfig | None = None
    """None: no trace."""
    compile: bool = False
    """torch.compile of the layers, in training steps (not in validation). It needs a C++ compiler, and takes
    up to minutes in the first step. Weight gradients of linears and filters are then rounded to `precision`
    before they are added up in fp32. Not with zero_bubble, tensor parallelism or data.reset_attention."""

    @property
    def scaling(self) -> LossScaleConfig | None:
        """The loss scale in use; None if the loss is not scaled."""
        return self.loss_scale or (LossScaleConfig() if self.precision == "fp16" else None)


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its learning-rate schedule."""

    learning_rate: Annotated[float, Gt(0)]
    """The highest, reached after the warm-up."""
    minimum_learning_rate: Annotated[float, Ge(0)] = 0.0
    """What the schedule ends at."""
    warmup_steps: Annotated[int, Ge(0)] = 0
    """Steps in which the learning rate rises from 0 in a straight line."""
    decay_steps: Count | None = None
    """Step at which the learning rate reaches its minimum; None: the last step of the run."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """The form of the way down from the highest learning rate."""
    beta1: Annotated[float, Ge(0), Lt(1)] = 0.9
    """How much of the mean of the gradients is kept in a step."""
    beta2: Annotated[float, Ge(0), Lt(1)] = 0.95
    """How much of the mean of their squares is kept in a step."""
    epsilon: Annotated[float, Gt(0)] = 1e-8
    """Added to the root of the mean of squares."""
    weight_decay: Annotated[float, Ge(0)] = 0.1
    """Pulls matrices to 0 by learning rate times this in a step; norms and biases have none."""
    clip_grad_norm: Annotated[float, Ge(0)] = 1.0
    """Largest global gradient norm; 0 disables clipping."""
    reduce_dtype: ReduceDtype = "fp32"
    """Of gradients on their way between owners. bf16 halves the bytes, and rounds each owner's gradient and
    every partial sum to 8 bits; fp32 is what gradients are accumulated in (fp64 for fp64 models)."""
    bucket_size: Count = BUCKET_SIZE
    """The most parameters whose gradients are reduced in one operation. Smaller buckets start earlier in the
    backward, each at the cost of one latency; a larger layer is two, attention and feed-forward."""


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
    """None: no checkpoints."""
    every: Annotated[int, Ge(0)] = 0
    """Steps between two checkpoints; 0: only at the end and on SIGTERM."""
    keep: Annotated[int, Ge(0)] = 0
    """How many of the newest checkpoints are kept; 0: all."""
    in_memory: Annotated[int, Ge(0)] = 0
    """Steps between two checkpoints in the hosts' memory, each node's also in its neighbour's: a lost node
    costs at most so many steps. 0: none. See docs/supervise.md."""
    asynchronous: bool = False
    """Training continues while a checkpoint is written from a copy in host memory: 12 bytes per parameter on
    the rank that writes it. The next save and the end of the run wait for the save in progress."""
    timeout: Annotated[float, Gt(0), Unit("seconds")] = 1800.0
    """How long a rank waits for the others while a checkpoint is written; disks may differ in speed."""
    resume: str = "auto"
    """`auto`: from the latest complete checkpoint, if there is one; `never`; or a checkpoint's directory."""
    export: Annotated[int, Ge(0)] = 0
    """Steps between two checkpoints that are exported too, as `export-hf` does, to hf-step-N beside them, by
    a process beside the run: a multiple of `every`; 0: none. The newest `keep` are kept."""


@dataclass(frozen=True, kw_only=True)
class LogConfig:
    """Metrics and progress of the run."""

    directory: str | None = None
    """For metrics.jsonl, config.yaml (resolved), plan.yaml (another plan that is there stays, and this one is
    plan.step-N.yaml) and the files of `to`; None: no files."""
    every: Count = 1
    """Steps between two progress lines on stderr, and between two lines of metrics.jsonl that have
    measurements of every rank (peak_memory_bytes, stage_seconds)."""
    to: tuple[TrackerName, ...] | None = None
    """Where figures are sent besides; each is an optional package. None: tensorboard, if it is installed."""
    project: Annotated[str, MinLen(1)] = "yuan_train"
    """What wandb and trackio call the project, and mlflow the experiment."""
    name: str | None = None
    """What they call the run; None: the last folder of `directory`."""


@dataclass(frozen=True, kw_only=True)
class SearchConfig:
    """The values that the planner's search may choose. None does not constrain it, except where stated."""

    tensor: Counts | None = None
    """Tensor-parallel widths; None: those of the profile, else 1, 2, 4, 8 and 16."""
    pipelines: Counts | None = None
    """Numbers of pipelines."""
    num_micro_batches: Counts | None = None
    """Micro-batches per pipeline; excludes mixed pipelines."""
    micro_batch_size: Annotated[tuple[Sequences, ...], MinLen(1)] | None = None
    """Sequences per micro-batch; None: any, from train.micro_batch_size on; with a profile those measured."""
    replicas: Counts | None = None
    """Replicas per stage; None: any number, with an external profile 1."""
    optimizer_sharding: tuple[bool, ...] | None = None
    """Whether the owners of the same layers divide their optimizer state (ZeRO-1)."""
    sequence_parallel: Annotated[tuple[bool, ...], MinLen(1)] = (False,)
    """Whether tensor-parallel groups divide the tokens between products; [false, true] searches both."""
    recompute: Annotated[tuple[Recompute, ...], MinLen(1)] | None = None
    """What is computed again in the backward in place of being kept."""
    schedule: Annotated[tuple[ScheduleName, ...], MinLen(1)] | None = None
    """None: 1f1b, and where that gains zero_bubble and interleaved_1f1b; with an external profile 1f1b."""
    device_order: Literal["fixed", "free"] = "free"
    """`fixed`: stages take the cards in the order of the cluster file."""
    use_all_devices: bool = False
    """Only plans that use every card."""
    offload: tuple[Tier, ...] | None = None
    """What stages may put on their hosts where that makes a plan possible or faster; None: the first two.
    `activations` are tried instead of recompute, on the fastest plans that recompute, once these are cut.
    `parameters` are in pages, in single pipelines of single cards. `disk` takes optimizer state that its host
    has no room for, if the cluster file gives the node a `disk`, and the run a `memory.disk_directory`."""
    memory_fraction: Annotated[float, Gt(0), Le(1)] = MEMORY_FRACTION
    """Plans fill at most so much of a card's memory as torch reports it, the card's `reserved` included."""
    simplicity: Annotated[float, Ge(0), Lt(1)] = 0.005
    """Of plans whose step is within this part of the fastest one's the simplest is taken; a plan that is
    proven to be the fastest is."""
    effort: Effort = "normal"
    """How much is tried, by a count and not by a clock: `quick` a third of it, `thorough` ten times as much;
    the time limit ends either. On up to 56 cards `thorough` begins with a normal search, and is no slower."""
    half_layers: bool = False
    """Stages may also end in the middle of a layer, between attention and feed-forward."""
    divide_experts: bool = True
    """Of a model with experts: stages may be groups of cards that divide the experts of each layer; if
    `tensor` is given, of so many cards."""
    overlap: bool = True
    """Sends overlap computation; false: as `sends: blocking`."""
    sends: Sends | None = None
    """How messages between stages are sent, whatever `overlap` and the cluster's `library` say: `overlapped`
    or `blocking`; None: as they say."""
    engine: Annotated[tuple[EngineName, ...], MinLen(1)] | None = None
    """Only plans that one of these engines runs; ours runs all. None: the run's `engine`."""
    time_limit: Annotated[float, Gt(0), Unit("seconds")] = 60.0
    """Ends the search; the best plan so far is kept."""
    objective: SearchObjective = "step_time"
    """`tokens_per_price` and `price_under_deadline` need prices in the cluster file; docs/planning.md."""
    deadline: Annotated[float, Gt(0), Unit("seconds")] | None = None
    """Of all steps of the run (train.steps), for price_under_deadline."""

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """`offload`, or its default."""
        return TIERS if self.offload is None else self.offload

    @property
    def send_mode(self) -> Sends | None:
        """How messages are sent; None: as the cluster's library has it."""
        return self.sends or (None if self.overlap else "blocking")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What training may take of the memory beside the cards."""

    host_reserved: Annotated[int, Ge(0), Unit("bytes")] = 8 * GIB
    """Host memory of each node that is left to other programs."""
    disk_directory: str | None = None
    """On a local disk of each machine, for plans that keep optimizer state there (`optimizer_disk`)."""


@dataclass(frozen=True, kw_only=True)
class SuperviseConfig:
    """How `supervise` goes on when cards come and go."""

    grace: Annotated[float, Gt(0), Unit("seconds")] = 5.0
    """How long nodes wait for others that may answer before they go on with those that do."""
    horizon: Annotated[float, Gt(0), Unit("seconds")] = 3600.0
    """A change of plan must repay the move within so long a time of running."""
    gain: Annotated[float, Ge(0), Lt(1)] = 0.05
    """The least share of a step that another plan must save."""
    slow: Annotated[float, Gt(1)] = 1.3
    """How many times as long as forecast, beside the others, a card computes before a plan is weighed that
    counts its pace."""
    attempts: Count = 3
    """The same fault so many times without a step in between, and without a lost node, ends the run."""


@dataclass(frozen=True)
class HostCopies:
    """How often hosts have in memory what their ranks write of a checkpoint, and what that is."""

    snapshots: int = 0
    """On the own host, by saves in the background."""
    kept: int = 0
    """On the own host and a neighbour's each, by checkpoint.in_memory."""
    trained_bytes: int = 12
    """Of a trained parameter: the master and both means."""
    frozen_bytes: int = 4
    """Of any other one."""

    @property
    def keys(self) -> str:
        """The keys of the run that ask for them."""
        names = {"checkpoint.asynchronous": self.snapshots, "checkpoint.in_memory": self.kept}
        return ", ".join(name for name, number in names.items() if number)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """One training run, including its model."""

    model: ModelConfig
    """What is trained; beside start.checkpoint it may be left out, and is that checkpoint's."""
    data: DataConfig
    train: TrainConfig
    optimizer: OptimizerConfig
    engine: EngineName = "yuan"
    """`megatron`: megatron-core trains, which not every plan suits; see docs/megatron.md."""
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    start: StartConfig = field(default_factory=StartConfig)
    lora: LoraConfig | None = None
    """Train adapters alone; None: the model's, if it has some, else all parameters."""
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    supervise: SuperviseConfig = field(default_factory=SuperviseConfig)

    def __post_init__(self) -> None:
        if self.objective.kind == "reward" and self.model.output != "value":
            object.__setattr__(self, "model", replace(self.model, output="value"))
        if self.lora is not None:
            object.__setattr__(self, "model", replace(self.model, lora=self.lora))

    @property
    def host_copies(self) -> HostCopies:
        """What checkpoints take of the hosts' memory: masters and both means, of fp32 at least.

        On cards those of saves in the background are pinned at the first save, and kept.
        """
        if self.checkpoint.directory is None:
            return HostCopies()
        size = {"fp64": 8, "fp32": 4}.get(self.train.precision, 2)
        return HostCopies(
            snapshots=int(self.checkpoint.asynchronous),
            # The newest whole one, and the one that is being written.
            kept=2 if self.checkpoint.in_memory else 0,
            trained_bytes=3 * max(size, 4),
            frozen_bytes=size,
        )

    @property
    def feasible_search(self) -> SearchConfig:
        """`search`, without what the run's features exclude; see `CONFLICTS`."""
        search = replace(self.search, engine=self.search.engine or (self.engine,))
        out = excluded_by(features_of_run(self))
        if not {f"offload: {tier}" for tier in TIERS}.isdisjoint(out):
            search = replace(search, offload=tuple(t for t in search.tiers if f"offload: {t}" not in out))
        if "half_layers" in out:
            search = replace(search, half_layers=False)
        if "zero_bubble" in out:
            search = replace(search, schedule=search.schedule or ("1f1b", "interleaved_1f1b"))
        return replace(search, tensor=(1,)) if "tensor" in out else search

    @property
    def decay_steps(self) -> int:
        """Step at which the learning rate reaches its minimum; a short trial run may end in the warm-up."""
        return self.optimizer.decay_steps or max(self.train.steps, self.optimizer.warmup_steps + 1)


def validate_run(run: RunConfig) -> Iterator[Violation]:
    """Yield the violated constraints between the parts of a run."""
    for violation in validate_model(run.model):
        yield replace(violation, path=("model", *violation.path))
    data, train, optimizer = run.data, run.train, run.optimizer
    if data.sequence_length > run.model.max_sequence_length:
        yield Violation(
            ("data", "sequence_length"),
            f"{data.sequence_length} tokens, but the model allows {run.model.max_sequence_length} "
            "(model.max_sequence_length)",
        )
    if train.global_batch_size % train.micro_batch_size:
        yield Violation(
            ("train", "global_batch_size"),
            f"{train.global_batch_size} sequences do not divide into micro-batches of "
            f"{train.micro_batch_size} (train.micro_batch_size)",
        )
    yield from _loss_scale_constraints(train)
    yield from (*memory_copy_constraints(run.checkpoint), *export_constraints(run))
    yield from objective_constraints(run)
    yield from log_constraints(run)
    yield from deadline_constraints(run.search.objective, run.search.deadline)
    yield from tier_constraints(run)
    yield from conflicts_of_run(run)
    if optimizer.minimum_learning_rate > optimizer.learning_rate:
        yield Violation(("optimizer", "minimum_learning_rate"), "greater than learning_rate; make it smaller")
    if optimizer.decay_steps is not None and optimizer.warmup_steps >= optimizer.decay_steps:
        yield Violation(
            ("optimizer", "warmup_steps"),
            f"{optimizer.warmup_steps} warm-up steps leave none of the {optimizer.decay_steps} decay steps",
        )
    if data.resets and data.tokenizer is None and not run.objective.reads_pairs:
        yield Violation(
            ("data", "tokenizer"),
            "resets at document ends need the tokenizer's end-of-document token; give a tokenizer, or set "
            "reset_position_ids, reset_attention and reset_filter to false",
        )
    if (data.fim_rate or data.masks) and data.tokenizer is None:
        yield Violation(
            ("data", "tokenizer"),
            "fim_rate and masks of the loss need the tokenizer's special tokens; "
            "give the tokenizer that the corpora were made with",
        )
    if data.fim_rate and (data.loss_after_separator or data.loss_on_answers):
        yield Violation(
            ("data", "fim_rate"),
            "fill-in-the-middle would separate questions from their answers; set it to 0 for fine-tuning "
            "(loss_after_separator, loss_on_answers)",
        )
    if data.split is not None:
        if not data.split[0] or not data.split[1] or abs(sum(data.split) - 1) > 1e-6:
            shares = list(data.split)
            yield Violation(("data", "split"), f"wanted two shares above 0 that sum to 1, got {shares}")
        if data.validation:
            yield Violation(("data", "split"), "give either split or validation, not both")
    if run.validation.every and not data.validation and data.split is None:
        what_to_do = "give data.validation or data.split"
        yield Violation(("validation", "every"), f"there is no validation data; {what_to_do}")


def objective_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield the violated constraints between a run's objective and the rest of it."""
    objective, data = run.objective, run.data
    for name in ("beta", "smoothing", "loss", "margin"):
        if getattr(objective, name) is not None and name not in DEFAULTS[objective.kind]:
            kind = next(kind for kind, fields in DEFAULTS.items() if name in fields)
            yield Violation(
                ("objective", name), f"goes with kind: {kind}, not {objective.kind}; leave it out"
            )
    if objective.loss == "ipo" and objective.smoothing:
        yield Violation(("objective", "smoothing"), "goes with loss: sigmoid; set it to 0 for ipo")
    if objective.kind != "reward" and run.model.output == "value":
        yield Violation(("model", "output"), "value needs objective.kind: reward; set it to vocabulary")
    if not objective.reads_pairs:
        if data.pairs is not None:
            kinds = "objective.kind: dpo or reward"
            yield Violation(("data", "pairs"), f"is read with {kinds}; give data.train instead")
        if not data.train:
            yield Violation(("data", "train"), "wanted at least one, got none")
        return
    if data.pairs is None:
        wanted = 'a .jsonl file of {"prompt": ..., "chosen": ..., "rejected": ...}'
        yield Violation(("data", "pairs"), f"missing; objective.kind {objective.kind} reads {wanted}")
    for name in ("train", "validation", "split"):
        if getattr(data, name):
            what_to_do = "leave it out; `yuan-train evaluate --pairs` measures held-out pairs"
            yield Violation(("data", name), f"is not read with objective.kind {objective.kind}; {what_to_do}")
    for name in ("fim_rate", "loss_after_separator", "loss_on_answers", "mask_loss_after_eod"):
        if getattr(data, name):
            yield Violation(("data", name), "is for documents; pairs have a loss on their answers alone")
    sizes = {("train", "micro_batch_size"): (run.train.micro_batch_size,)}
    sizes |= {("search", "micro_batch_size"): run.search.micro_batch_size or ()}
    for path, found in sizes.items():
        if any(size % 2 for size in found):
            shown = ", ".join(map(str, found))
            yield Violation(path, f"{shown}: rows 2i and 2i + 1 are one pair; wanted even numbers")
    if objective.kind == "dpo" and run.checkpoint.directory is not None and run.log.directory is None:
        what = "the reference's log-probabilities are kept there (reference.npy) for a run that is resumed"
        yield Violation(("log", "directory"), f"missing; {what}")


def memory_copy_constraints(checkpoint: CheckpointConfig) -> Iterator[Violation]:
    """Yield what checkpoints in the hosts' memory lack."""
    if checkpoint.in_memory and checkpoint.directory is None:
        yield Violation(
            ("checkpoint", "in_memory"),
            f"{checkpoint.in_memory}, but there is no checkpoint.directory, from which a run goes on when "
            "copies are lost; give one, or set in_memory: 0",
        )


def export_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield what a run that exports its checkpoints cannot have."""
    config, where = run.checkpoint, ("checkpoint", "export")
    if not config.export:
        return
    if config.directory is None:
        yield Violation(where, f"{config.export}, but nothing is saved; give checkpoint.directory")
    if not config.every or config.export % config.every:
        yield Violation(
            where,
            f"{config.export}: what is exported is a checkpoint, and one is saved every {config.every} steps "
            "(checkpoint.every; 0: only the last); wanted a multiple of it",
        )
    if run.model.output == "value":
        yield Violation(where, f"{config.export}, but a reward model has no published format; leave it out")


def _loss_scale_constraints(train: TrainConfig) -> Iterator[Violation]:
    scale = train.loss_scale
    if scale is None:
        return
    for key, value in (("initial", scale.initial), ("minimum", scale.minimum)):
        below = 2.0 ** math.floor(math.log2(value))
        if value != below:
            yield Violation(
                ("train", "loss_scale", key), f"wanted a power of two, such as {below:g}, got {value:g}"
            )
    if scale.minimum > scale.initial:
        yield Violation(
            ("train", "loss_scale", "minimum"), f"greater than initial ({scale.initial:g}); make it smaller"
        )


def deadline_constraints(objective: SearchObjective, deadline: float | None) -> Iterator[Violation]:
    """Yield a violation unless there is a deadline where the objective has one, and only there."""
    path = ("search", "deadline")
    if objective == "price_under_deadline" and deadline is None:
        yield Violation(path, "missing; price_under_deadline needs it: give the run's time, such as 72 h")
    if objective != "price_under_deadline" and deadline is not None:
        yield Violation(
            path, f"{objective} has none; leave it out, or set search.objective: price_under_deadline"
        )


def check_prices(cluster: Cluster, objective: SearchObjective) -> None:
    """Raise ConfigError if an objective needs prices and a card has none."""
    if objective == "step_time":
        return
    faults = [
        f"cluster {cluster.name!r}: nodes[{i}] ({group.name}): {name} has no price, and "
        f"search.objective: {objective} needs one for every card; add price: (for a card and hour) to the "
        f"node or to device_types.{name}, or set search.objective: step_time"
        for i, group in enumerate(cluster.nodes)
        for name in dict.fromkeys(group.types)
        if cluster.price(group, name) is None
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def log_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield what is wrong with where figures go, and with the steps to be traced."""
    if run.log.to and run.log.directory is None:
        yield Violation(
            ("log", "to"),
            f"{', '.join(run.log.to)} write into log.directory, or keep there which of their runs this is; "
            "give one",
        )
    trace = run.train.trace
    if trace is None:
        return
    if trace.last_step > run.train.steps:
        yield Violation(
            ("train", "trace"),
            f"steps {trace.first_step} to {trace.last_step} are to be traced, but the run ends at step "
            f"{run.train.steps} (train.steps); trace earlier steps, or fewer",
        )
    if run.log.directory is None:
        yield Violation(("train", "trace"), "trace files are written to log.directory; give one")


@dataclass(frozen=True)
class Conflict:
    """Two features that one run cannot have; runs, searches, plans and docs/troubleshooting.md read it."""

    feature: str
    """Of the run: `train.compile`, `lora` or `megatron`."""
    other: str
    """Of the run, of what its search may use, or of its plan."""
    why: str
    """What `other` does, as it follows a word for it."""


_ON_HOSTS = "keeps something on hosts, and a model with adapters keeps nothing there yet"

CONFLICTS = (
    Conflict("train.compile", "experts", "tell the host only while a layer runs how many tokens each has"),
    Conflict(
        "train.compile",
        "data.reset_attention",
        "gives each micro-batch other ranges, for which layers are compiled anew",
    ),
    Conflict(
        "train.compile", "zero_bubble", "splits backwards, and the backward of a compiled layer is one piece"
    ),
    Conflict("train.compile", "tensor", "shares each layer, and the collectives inside cannot be compiled"),
    Conflict(
        "train.compile",
        "offload: activations",
        "works on halves of layers, and a compiled layer is one piece",
    ),
    Conflict(
        "train.compile",
        "offload: parameters",
        "moves weights, and a compiled layer expects them where they were",
    ),
    Conflict("megatron", "sequence_parallel", "is not asked of megatron-core"),
    Conflict("lora", "megatron", "trains no adapters"),
    Conflict("lora", "half_layers", "cuts layers in half, which those with adapters are not yet"),
    Conflict("lora", "offload: optimizer", _ON_HOSTS),
    Conflict("lora", "offload: activations", _ON_HOSTS),
    Conflict("lora", "offload: parameters", _ON_HOSTS),
    Conflict("lora", "offload: disk", _ON_HOSTS),
)
"""What excludes what."""
TURN_OFF = {
    "train.compile": "set train.compile: false",
    "lora": "train without adapters (lora)",
    "megatron": "set engine: yuan",
}
"""How a run goes without a feature."""

Used = tuple[str, tuple[str | int, ...], str]
"""A feature that is used, the key that says so, and a word for it there."""


def features_of_run(run: RunConfig) -> Iterator[Used]:
    """The features of a run that stand in `CONFLICTS`, without those of its search."""
    if run.train.compile:
        yield "train.compile", ("train", "compile"), "train.compile"
    if run.model.lora is not None:
        yield "lora", ("lora",), "lora"
    if run.model.num_experts:
        yield "experts", ("train", "compile"), "true, but experts"
    if run.data.reset_attention:
        yield "data.reset_attention", ("train", "compile"), "true, but data.reset_attention"
    if run.engine == "megatron":
        yield "megatron", ("engine",), "megatron"


def features_searched(search: SearchConfig) -> Iterator[Used]:
    """The features in `CONFLICTS` that a search is told to use."""
    if "zero_bubble" in (search.schedule or ()):
        yield "zero_bubble", ("search", "schedule"), "zero_bubble"
    if search.tensor is not None and set(search.tensor) != {1}:
        yield "tensor", ("search", "tensor"), str(list(search.tensor))
    if search.half_layers:
        yield "half_layers", ("search", "half_layers"), "true"
    if True in search.sequence_parallel:
        yield "sequence_parallel", ("search", "sequence_parallel"), "true"
    if "megatron" in (search.engine or ()):
        yield "megatron", ("search", "engine"), "megatron"
    for tier in search.offload or ():
        yield f"offload: {tier}", ("search", "offload"), tier


def excluded_by(used: Iterable[Used]) -> dict[str, list[Conflict]]:
    """What does not go with some features, and the conflicts that say so."""
    found: dict[str, list[Conflict]] = {}
    names = {name for name, _, _ in used}
    for conflict in CONFLICTS:
        if conflict.feature in names:
            found.setdefault(conflict.other, []).append(conflict)
    return found


def conflicts_of_run(run: RunConfig) -> Iterator[Violation]:
    """Yield what of a run, or of what its search is told to use, does not go with its features."""
    out = excluded_by(features_of_run(run))
    for other, path, shown in (*features_of_run(run), *features_searched(run.search)):
        for conflict in out.get(other, ()):
            what_to_do = TURN_OFF[conflict.feature]
            if path[0] == "search":
                what_to_do = f"leave it out, or {what_to_do}"
            yield Violation(path, f"{shown} {conflict.why} ({conflict.feature}); {what_to_do}")


def tier_constraints(run: RunConfig) -> Iterator[Violation]:
    """Yield what state on disks excludes."""
    if "disk" not in run.search.tiers:
        return
    if run.memory.disk_directory is None:
        what = "disk, but memory.disk_directory is not given; give a directory on a local disk"
    elif run.checkpoint.asynchronous:
        what = "disk, but checkpoint.asynchronous would copy what is there to host memory; set it to false"
    elif run.checkpoint.in_memory:
        what = "disk, but checkpoint.in_memory would copy what is there to host memory; set it to 0"
    elif "optimizer" not in run.search.tiers:
        what = "disk holds what hosts have no room for: name optimizer too"
    else:
        return
    yield Violation(("search", "offload"), what + ", or leave disk out")


def load_run(path: str | Path, overrides: tuple[str, ...] = ()) -> RunConfig:
    """Read a run file and the model that it names. Raises ConfigError with every violation."""
    document = read_document(path, "RunConfig")
    if is_rl_document(document):
        raise ConfigError(f"{path}: a run of reinforcement learning (it has `algorithm`): `yuan-train rl`")
    return build(with_overrides(document, overrides), RunConfig, validate=validate_run)
