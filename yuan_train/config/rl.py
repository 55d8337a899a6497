"""Runs of reinforcement learning: prompts, generation, rewards, algorithm. See docs/rl.md.

A run file with the key `algorithm` is one. `policy_run` is the training run of the policy inside it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal

from annotated_types import Ge, Gt, Le, MinLen

from yuan_train.config.lora import LoraConfig
from yuan_train.config.model import ModelConfig
from yuan_train.config.objective import StartConfig
from yuan_train.config.run import (
    CheckpointConfig,
    Count,
    Counts,
    DataConfig,
    LogConfig,
    MemoryConfig,
    OptimizerConfig,
    RunConfig,
    SearchConfig,
    TrainConfig,
)
from yuan_train.config.units import Unit

AlgorithmName = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline", "reinforce_plus_plus", "ppo"]
AdvantageKind = Literal["group", "mean", "leave_one_out", "return", "gae"]
Scale = Literal["group", "batch", "none"]
NormaliseKind = Literal["sequence", "token", "constant"]
EstimatorKind = Literal["k1", "k2", "k3"]
Correction = Literal["auto", "aipo", "decoupled", "none"]
RewardName = Literal["exact", "number", "regex", "format"]
Mode = Literal["sync", "async"]
OnLostEngine = Literal["stop", "go_on"]
Placement = Literal["shared", "apart"]
NotNegative = Annotated[float, Ge(0)]
Bounds = tuple[float, float]

SCALE_OF: dict[str, Scale] = {
    "group": "group",
    "mean": "none",
    "leave_one_out": "none",
    "return": "batch",
    "gae": "batch",
}
"""Unless `scale` is given."""

ALGORITHMS: dict[AlgorithmName, tuple[AdvantageKind, Scale, NormaliseKind]] = {
    "grpo": ("group", "group", "sequence"),
    "dr_grpo": ("mean", "none", "constant"),
    "rloo": ("leave_one_out", "none", "token"),
    "reinforce_baseline": ("mean", "batch", "token"),
    "reinforce_plus_plus": ("return", "batch", "token"),
    "ppo": ("gae", "batch", "token"),
}
"""What a name stands for: advantage, scale, normalise."""


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """One file of prompts, and its share of the prompts, relative to other files."""

    file: str
    """A .jsonl file: {"prompt": "..." or messages, or "prompt_ids": [...], "answer": anything}."""
    weight: Annotated[float, Gt(0)] = 1.0
    """Share of the prompts, relative to the other files."""


@dataclass(frozen=True, kw_only=True)
class RLData:
    """Prompts, and how they become tokens."""

    prompts: Annotated[tuple[PromptSource, ...], MinLen(1)]
    """Files of prompts; they are drawn by weight."""
    evaluation: str | None = None
    """A .jsonl file of prompts that are measured and not trained."""
    tokenizer: str | None = None
    """Directory; needed for prompts of text. Without it a text is its token ids, with spaces between."""
    template: str = "{prompt}"
    """What is read of a prompt of text; special tokens in it are recognised."""
    max_prompt_tokens: Count = 512
    """Longer prompts are refused at the start."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers are drawn."""

    max_new_tokens: Count
    """The most tokens of an answer."""
    temperature: Annotated[float, Gt(0)] = 1.0
    """Of the draw, and of the log-probabilities that are trained."""
    stop_ids: tuple[Annotated[int, Ge(0)], ...] = ()
    """Tokens that end an answer; none: those of the tokenizer, if there is one."""
    slots: Count | None = None
    """Answers that a pipeline writes at a time; None: those of a step, at most 128."""
    prefill_chunk: Count = 512
    """Tokens of a prompt that are read at a time."""
    weights: Literal["between_batches", "in_flight"] = "between_batches"
    """When engines of their own take new weights: when the answers of a batch are written, or between two
    tokens; `in_flight` is not there yet."""
    on_lost_engine: OnLostEngine = "stop"
    """When an engine of several on cards of their own is lost: end the run, or go on with the others."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A score of an answer: built in (`name`), or of a Python file (`python: "file.py:function"`)."""

    name: RewardName | None = None
    """One of those built in; or give `python`."""
    python: str | None = None
    """`file.py:function`, whose parameters say what it is given; see docs/rl.md."""
    pattern: str | None = None
    """Of `regex`, whose first group is compared with the answer; and of `format`, which a text matches."""
    weight: float = 1.0
    """Of the score, in the reward."""

    @property
    def label(self) -> str:
        """Its name in metrics."""
        return self.name or (self.python or "").rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A trained reward model, whose score is added."""

    checkpoint: str
    """Of a run with `objective: {kind: reward}`."""
    weight: float = 1.0
    """Of the score, in the reward."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """A penalty of long answers, linear within the last `buffer` tokens (arXiv 2503.14476, eq. 13)."""

    buffer: Annotated[int, Ge(0)] = 0
    """The last tokens before max_new_tokens in which the penalty rises; 0: no penalty."""
    penalty: NotNegative = 1.0
    """What an answer of max_new_tokens loses."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards: the weighted sum of functions, and what is done to it."""

    functions: tuple[RewardFunction, ...] = (RewardFunction(name="exact"),)
    """Functions of an answer; the reward is their weighted sum."""
    model: RewardModelConfig | None = None
    """A reward model whose score is added; None: none."""
    workers: Count = 2
    """Processes that score."""
    timeout: Annotated[float, Gt(0), Unit("seconds")] = 10.0
    """Longest time for the answers to one prompt, imports not counted; then the process is ended."""
    on_error: Literal["drop", "stop"] = "drop"
    """If a function raises, hangs or returns no number: drop the group and count it, or stop the run."""
    clip: Bounds | None = None
    """Smallest and largest reward."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    truncated: float | None = None
    """The reward of an answer that reached max_new_tokens, whatever it says; None: as it scores."""

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the scores of an answer: the functions', then `model` if a reward model scores."""
        return (*(f.label for f in self.functions), *(() if self.model is None else ("model",)))

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the scores, in the order of `labels`."""
        return (*(f.weight for f in self.functions), *(() if self.model is None else (self.model.weight,)))


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """What keeps the policy near its reference, the weights at step 0."""

    coefficient: NotNegative = 0.0
    """Weight of the divergence; 0: no reference is kept."""
    estimator: EstimatorKind = "k3"
    """How the divergence is estimated from the tokens drawn (Schulman 2020)."""
    where: Literal["loss", "reward"] = "loss"
    """Whether it is a part of the loss, or is subtracted from the reward of each token."""


@dataclass(frozen=True, kw_only=True)
class AlgorithmConfig:
    """Advantages and loss; `name` sets `advantage`, `scale` and `normalise` where they are not given."""

    name: AlgorithmName = "grpo"
    """Sets advantage, scale and normalise as published under this name."""
    advantage: AdvantageKind | None = None
    """`group` and `mean`: less the group's mean; they differ in the scale that goes with them."""
    scale: Scale | None = None
    """Divided by the group's standard deviation, whitened over the batch's tokens, or neither."""
    normalise: NormaliseKind | None = None
    """What a batch's loss is the mean over: answers, tokens, or answers by max_new_tokens."""
    kl: KLConfig = field(default_factory=KLConfig)
    group: Count = 8
    """Answers to each prompt."""
    clip: tuple[NotNegative, NotNegative] = (0.2, 0.2)
    """How far the ratio of new to old probability may go below and above 1 and still gain."""
    dual_clip: Annotated[float, Gt(1)] | None = None
    """The most that the ratio counts where the advantage is negative; None: no limit."""
    correction: Correction = "auto"
    """For answers that older weights drew; auto: none in sync mode, aipo in async."""
    rho: Annotated[float, Gt(0)] = 4.0
    """Largest weight of a token under `aipo` and `decoupled`."""
    updates: Count = 1
    """Optimizer steps for a batch, each on its part of the groups."""
    filter: Literal["none", "zero_variance"] = "none"
    """`zero_variance`: groups of equal rewards are replaced by those of further prompts."""
    max_refill: Count = 4
    """Batches of prompts that are tried for one batch."""

    def __post_init__(self) -> None:
        advantage, scale, normalise = ALGORITHMS.get(self.name, ("group", "group", "sequence"))
        if self.advantage is not None and self.advantage != advantage:
            scale = SCALE_OF.get(self.advantage, scale)
        for name, value in (("advantage", advantage), ("scale", scale), ("normalise", normalise)):
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)


@dataclass(frozen=True, kw_only=True)
class CriticConfig:
    """The critic of `name: ppo`: the policy's model with one number for a head, trained beside it."""

    checkpoint: str | None = None
    """Weights to begin with: a reward model's, or the body of a language model; None: start.checkpoint."""
    learning_rate: Annotated[float, Gt(0)] | None = None
    """At the height of the policy's schedule, which it follows; None: the policy's."""
    value_clip: Annotated[float, Gt(0)] | None = 0.5
    """How far a value may move within a batch before its loss stops falling; None: any distance."""
    gamma: Annotated[float, Gt(0), Le(1)] = 1.0
    """The discount of a token's reward for each token before it."""
    lam: Annotated[float, Ge(0), Le(1)] = 0.95
    """1: advantages of whole returns; 0: of one token and the critic's value behind it."""


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Whether answers are drawn and trained in turn, or at once by cards of their own."""

    mode: Literal["auto", "sync", "async"] = "auto"
    """auto: the plan's; sync without one."""
    staleness: Annotated[int, Ge(0)] | None = None
    """Batches that may be trained between an answer's first token and its own; None: 1; 0 in sync mode."""

    def __post_init__(self) -> None:
        if self.staleness is None:
            object.__setattr__(self, "staleness", 0 if self.mode == "sync" else 1)


@dataclass(frozen=True, kw_only=True)
class RLTrainConfig(TrainConfig):
    """As in a training run; a global batch is prompts_per_step groups of answers."""

    global_batch_size: int = field(init=False, default=0)
    prompts_per_step: Count
    """Prompts of a batch, each with algorithm.group answers."""
    pack: bool = True
    """Several answers share a row, each with its prompt; else each has a row of its own."""


@dataclass(frozen=True, kw_only=True)
class RLEvaluationConfig:
    """How often, and with how many answers, the prompts of data.evaluation are measured."""

    every: Annotated[int, Ge(0)] = 0
    """Steps between two measurements; 0: never."""
    samples: Count = 1
    """Answers to each prompt."""
    temperature: NotNegative = 0.0
    """0: the most probable token."""
    prompts: Count = 256
    """The first so many of the file."""


@dataclass(frozen=True, kw_only=True)
class GenerationSearch:
    """Widths and slots of engines that the search may choose; None: any."""

    tensor: Counts | None = None
    """Tensor-parallel widths of an engine."""
    slots: Counts | None = None
    """Answers that an engine writes at a time."""


@dataclass(frozen=True, kw_only=True)
class RLSearchConfig:
    """Constraints on the search for a plan."""

    modes: Annotated[tuple[Mode, ...], MinLen(1)] = ("sync", "async")
    """Whether plans may take turns (sync), run roles at once (async), or both."""
    placement: Annotated[tuple[Placement, ...], MinLen(1)] = ("shared", "apart")
    """Whether generation may share the policy's cards, have its own, or both."""
    policy: SearchConfig = field(default_factory=SearchConfig)
    generation: GenerationSearch = field(default_factory=GenerationSearch)
    expected_new_tokens: Count | None = None
    """Mean length of an answer; None: max_new_tokens."""
    time_limit: Annotated[float, Gt(0), Unit("seconds")] = 60.0
    """Ends the search; the best plan so far is kept."""


@dataclass(frozen=True, kw_only=True)
class RLConfig:
    """One run of reinforcement learning, including its model."""

    model: ModelConfig
    """What is trained; beside start.checkpoint it may be left out, and is that checkpoint's."""
    start: StartConfig = field(default_factory=StartConfig)
    lora: LoraConfig | None = None
    """Train adapters alone; None: the model's, if it has some, else all parameters."""
    data: RLData
    generation: GenerationConfig
    reward: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig
    critic: CriticConfig | None = None
    """Of an algorithm with advantage gae, which has one with the defaults; of no other."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Whether answers are drawn and trained in turn, or at once."""
    train: RLTrainConfig
    evaluation: RLEvaluationConfig = field(default_factory=RLEvaluationConfig)
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    search: RLSearchConfig = field(default_factory=RLSearchConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        if self.lora is not None:
            object.__setattr__(self, "model", replace(self.model, lora=self.lora))
        if self.critic is None and self.algorithm.advantage == "gae":
            object.__setattr__(self, "critic", CriticConfig())

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest prompt and the longest answer: the least length of a plan."""
        return self.data.max_prompt_tokens + self.generation.max_new_tokens

    @property
    def samples_per_step(self) -> int:
        """Answers of a batch."""
        return self.train.prompts_per_step * self.algorithm.group

    @property
    def expected_new_tokens(self) -> int:
        """Mean length of an answer, as a plan counts on it."""
        return self.search.expected_new_tokens or self.generation.max_new_tokens

    @property
    def shares_rows(self) -> bool:
        """Whether answers of that length share rows."""
        return self.train.pack and self.expected_new_tokens < self.generation.max_new_tokens

    @property
    def needs_reference(self) -> bool:
        """Whether the policy at step 0 must be kept."""
        return self.algorithm.kl.coefficient > 0

    def correction(self, mode: Mode) -> Literal["aipo", "decoupled", "none"]:
        """What is done about answers that older weights drew."""
        given = self.algorithm.correction
        return given if given != "auto" else "aipo" if mode == "async" else "none"


def policy_run(run: RLConfig, *, sequence_length: int | None = None) -> RunConfig:
    """The training run of the policy: every sample a row of `sequence_length` tokens, its worst case.

    The planner places it, and the trainer's parts are made of it. It reads no data of its own.
    """
    train: dict[str, Any] = {
        item.name: getattr(run.train, item.name) for item in fields(TrainConfig) if item.init
    }
    train["global_batch_size"] = run.samples_per_step
    resets = run.train.pack
    return RunConfig(
        model=run.model,
        data=DataConfig(
            tokenizer=run.data.tokenizer,
            sequence_length=sequence_length or run.sequence_length,
            reset_position_ids=resets,
            reset_attention=resets,
            reset_filter=resets,
        ),
        train=TrainConfig(**train),
        optimizer=run.optimizer,
        start=run.start,
        checkpoint=run.checkpoint,
        log=run.log,
        search=run.search.policy,
        memory=run.memory,
    )
