"""Runs of reinforcement learning: prompts, generation, rewards, algorithm. See docs/rl.md.

A run file with the key `algorithm` is one. `policy_run` is the training run of the policy inside it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args
from urllib.parse import urlsplit

from annotated_types import Ge, Gt, Le, MinLen

from yuan_train.config.errors import ConfigError, Violation
from yuan_train.config.load import build, read_document
from yuan_train.config.model import LoraConfig, ModelConfig, is_rl_document, with_overrides
from yuan_train.config.run import (
    MOST_SEQUENCES,
    CheckpointConfig,
    Count,
    Counts,
    DataConfig,
    LogConfig,
    MemoryConfig,
    OptimizerConfig,
    RunConfig,
    SearchConfig,
    StartConfig,
    TrainConfig,
    validate_run,
)
from yuan_train.config.units import Unit

AlgorithmName = Literal["grpo", "dr_grpo", "rloo", "reinforce_baseline", "reinforce_plus_plus", "ppo"]
AdvantageKind = Literal["group", "mean", "leave_one_out", "return", "gae"]
Scale = Literal["group", "batch", "none"]
NormaliseKind = Literal["sequence", "token", "constant"]
EstimatorKind = Literal["k1", "k2", "k3"]
Correction = Literal["auto", "aipo", "decoupled", "none"]
RewardName = Literal["exact", "number", "math", "regex", "format"]
EnvironmentName = Literal["calculator", "python", "search"]
Mode = Literal["sync", "async"]
OnLostEngine = Literal["stop", "go_on"]
Placement = Literal["shared", "apart"]
ServerKind = Literal["auto", "yuan_train", "vllm", "sglang"]
NotNegative = Annotated[float, Ge(0)]
LEAST_TEMPERATURE = 1e-3
"""Of a draw: below it, and above 0, logits divided by the temperature are not finite in fp32."""
LARGEST_REWARD = 1e12
"""Rewards beyond it, plus or minus, have squares and sums that do not tell answers apart, or overflow."""
Reward = Annotated[float, Ge(-LARGEST_REWARD), Le(LARGEST_REWARD)]

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
    order: Literal["shuffled", "file"] = "shuffled"
    """Of each file's prompts: drawn anew for every epoch, or as the file has them, again and again."""
    skip_solved: Annotated[int, Ge(0)] = 0
    """Epochs of its file that leave out a prompt whose answers all passed, by the first reward function, or
    without one the environment: it gave 1 or more. 0: none. For mode sync alone."""


@dataclass(frozen=True, kw_only=True)
class GenerationConfig:
    """How answers are drawn."""

    max_new_tokens: Count
    """The most tokens of an answer."""
    temperature: Annotated[float, Ge(LEAST_TEMPERATURE)] = 1.0
    """Of the draw, and of the log-probabilities that are trained."""
    stop_ids: tuple[Annotated[int, Ge(0)], ...] = ()
    """Tokens that end an answer; none: those of the tokenizer, if there is one."""
    slots: Count | None = None
    """Answers that a pipeline writes at a time; None: those of a step, at most 128."""
    prefill_chunk: Count = 512
    """Tokens of a prompt that are read at a time."""
    weights: Literal["between_batches", "in_flight"] = "between_batches"
    """When engines of their own take new weights in async mode: when the answers of a batch are written; or
    between two tokens, with the next batch's prompts in slots as they become free."""
    on_lost_engine: OnLostEngine = "stop"
    """When an engine of several on cards of their own is lost: end the run, or go on with the others."""


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A score of an answer: built in (`name`), of a Python file (`python: "file.py:function"`), or of a
    server (`url`)."""

    name: RewardName | None = None
    """One of those built in; or give `python` or `url`."""
    python: str | None = None
    """`file.py:function`, whose parameters say what it is given; see docs/rl.md."""
    url: str | None = None
    """Of a server that is sent the answers to a prompt, as JSON, and answers {"rewards": [...]}."""
    pattern: str | None = None
    """Of `regex`, whose first group is compared with the answer; and of `format`, which a text matches."""
    batch: bool = False
    """The function gets all answers to a prompt at once, each parameter as a list, and returns a list."""
    weight: Reward = 1.0
    """Of the score, in the reward."""

    @property
    def label(self) -> str:
        """Its name in metrics."""
        if self.url is not None:
            return urlsplit(self.url).path.strip("/").replace("/", ".") or "url"
        return self.name or (self.python or "").rpartition(":")[2]


@dataclass(frozen=True, kw_only=True)
class RewardModelConfig:
    """A trained reward model, whose score is added."""

    checkpoint: str
    """Of a run with `objective: {kind: reward}`."""
    weight: Reward = 1.0
    """Of the score, in the reward."""


@dataclass(frozen=True, kw_only=True)
class TeacherConfig:
    """A language model of the policy's tokens, often a larger one, that the policy learns to write like.

    What its log-probability of a drawn token has above the policy's own is added to the token's advantage: on
    the mean the divergence KL(policy || teacher) falls (on-policy distillation; arXiv 2306.13649, section 3).
    """

    checkpoint: str
    """Of a run that trains a language model, or of `import-hf`."""
    weight: Annotated[float, Gt(0), Le(LARGEST_REWARD)] = 1.0
    """Of these differences, beside the advantages that come of rewards."""


@dataclass(frozen=True, kw_only=True)
class OverlongConfig:
    """A penalty of long answers, linear within the last `buffer` tokens (arXiv 2503.14476, eq. 13)."""

    buffer: Annotated[int, Ge(0)] = 0
    """The last tokens before max_new_tokens in which the penalty rises; 0: no penalty."""
    penalty: Annotated[float, Ge(0), Le(LARGEST_REWARD)] = 1.0
    """What an answer of max_new_tokens loses."""


DEFAULT_FUNCTIONS = (RewardFunction(name="exact"),)
"""As a value of its own, so that it is known from functions that were given."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """Rewards: the weighted sum of functions, and what is done to it."""

    functions: tuple[RewardFunction, ...] = DEFAULT_FUNCTIONS
    """Functions of an answer; the reward is their weighted sum. Beside an environment or a teacher none,
    unless some are given."""
    model: RewardModelConfig | None = None
    """A reward model whose score is added; None: none."""
    teacher: TeacherConfig | None = None
    """A language model that the policy learns to write like, where it has no reward model; None: none."""
    workers: Count = 2
    """Processes that score: beside rank 0, or beside the first rank of each engine on cards of its own."""
    concurrency: Count = 1
    """Answers that a process scores at once, in threads: for functions that wait for something."""
    timeout: Annotated[float, Gt(0), Unit("seconds")] = 10.0
    """Longest time for the answers to one prompt, imports not counted; then the process is ended."""
    on_error: Literal["drop", "stop"] = "drop"
    """If a function raises, hangs or returns no number: drop the group and count it, or stop the run."""
    clip: tuple[Reward, Reward] | None = None
    """Smallest and largest reward."""
    overlong: OverlongConfig = field(default_factory=OverlongConfig)
    truncated: Reward | None = None
    """The reward of an answer that reached max_new_tokens, whatever it says; None: as it scores."""

    @property
    def reader(self) -> RewardModelConfig | TeacherConfig | None:
        """The model that reads answers beside the policy: what has the role `reward` of a plan."""
        return self.model or self.teacher

    @property
    def wanted_output(self) -> str:
        """What that model computes: `ModelConfig.output`."""
        return "value" if self.model is not None else "vocabulary"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the scores of an answer: the functions', then `model` if a reward model scores."""
        return (*(f.label for f in self.functions), *(() if self.model is None else ("model",)))

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of the scores, in the order of `labels`."""
        return (*(f.weight for f in self.functions), *(() if self.model is None else (self.model.weight,)))


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """What answers the policy's turns: built in (`name`), or a class of a Python file."""

    name: EnvironmentName | None = None
    """One of those built in; or give `python`."""
    python: str | None = None
    """`file.py:Class`, with reset and step; see docs/rl.md."""
    folder: str | None = None
    """Of `search`: its .txt and .md files are what is searched."""
    turns: Count = 8
    """The most turns of the policy in an answer."""
    timeout: Annotated[float, Gt(0), Unit("seconds")] = 30.0
    """Longest time of a reset or a step; then the environments of that process are ended."""
    workers: Count = 2
    """Processes that environments live in: beside the first rank of each pipeline that generates."""


@dataclass(frozen=True, kw_only=True)
class KLConfig:
    """What keeps the policy near its reference: the weights at step 0, or with `renew` later ones."""

    coefficient: NotNegative = 0.0
    """Weight of the divergence; 0: no reference is kept."""
    estimator: EstimatorKind = "k3"
    """How the divergence is estimated from the tokens drawn (Schulman 2020)."""
    where: Literal["loss", "reward"] = "loss"
    """Whether it is a part of the loss, or is subtracted from the reward of each token."""
    renew: Annotated[int, Ge(0)] = 0
    """Steps after which the reference becomes the policy as it is then, again and again; 0: never."""


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
    """For answers that older weights drew, or another program; auto: aipo in async mode and with servers over
    HTTP, else none."""
    rho: Annotated[float, Gt(0)] = 4.0
    """Largest weight of a token under `aipo` and `decoupled`."""
    updates: Count = 1
    """Optimizer steps for a batch, each on its part of the groups."""
    epochs: Annotated[int, Gt(0), Le(1000)] = 1
    """Passes over a batch, each of so many updates; ratios are to the policy at the batch's start."""
    mask_truncated: bool = False
    """Answers that reached max_new_tokens count in the comparison of rewards and not in the loss."""
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
class HttpGeneration:
    """Servers over HTTP that draw the answers; the policy gives them its weights through a folder."""

    http: Annotated[tuple[str, ...], MinLen(1)]
    """Their addresses, such as http://10.0.0.5:8000. If one is lost, the others answer its prompts."""
    model: str
    """The name that each of them has for the policy, in its /v1/models."""
    folder: str | None = None
    """Where the weights of each batch are put, in Hugging Face's format: a folder of its own, which all
    servers see under this path; None: `weights` in log.directory."""
    kind: ServerKind = "auto"
    """Which program they are; auto: as /v1/models says."""
    tokens_per_second: tuple[Annotated[float, Gt(0)], ...] | None = None
    """Of answers, by each server, as `engine_tokens_per_second` in metrics.jsonl has them. Prompts are shared
    out so, and the plan counts on them. None: equal shares, and the plan is as if the policy drew."""
    concurrency: Count = 32
    """Prompts that each is asked at a time."""
    timeout: Annotated[float, Gt(0), Unit("seconds")] = 600.0
    """Longest time for the answers to a prompt, or to take weights; then the server counts as lost."""

    @property
    def parts(self) -> tuple[float, ...]:
        """The share of the prompts that each is given; their sum is 1."""
        rates = self.tokens_per_second or (1.0,) * len(self.http)
        return tuple(rate / sum(rates) for rate in rates)


@dataclass(frozen=True, kw_only=True)
class RolesConfig:
    """Roles that others than this run's ranks have."""

    generation: HttpGeneration | None = None
    """Who draws the answers; None: the ranks of this run."""


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
    at_start: bool = False
    """Measure the weights before the first step too."""
    keep_best: bool = False
    """Save a checkpoint where pass_1 (of equals, mean_reward) is the best so far, and keep the last of these
    beside those of checkpoint.keep."""


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
    sync_share: Annotated[float, Gt(0), Le(1)] = 1.0
    """Of the bytes of all weights, those that engines of their own are sent after a batch: sync_bytes of a
    run's later steps over those of the first, in metrics.jsonl."""
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
    environment: EnvironmentConfig | str | None = None
    """What answers the policy's turns: "file.py:Class", a name of those built in, or keys; None: an answer is
    one turn. Its rewards are added to those of functions."""
    algorithm: AlgorithmConfig
    critic: CriticConfig | None = None
    """Of an algorithm with advantage gae, which has one with the defaults; of no other."""
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    """Whether answers are drawn and trained in turn, or at once."""
    roles: RolesConfig = field(default_factory=RolesConfig)
    """Roles that others than this run's ranks have."""
    train: RLTrainConfig
    evaluation: RLEvaluationConfig = field(default_factory=RLEvaluationConfig)
    optimizer: OptimizerConfig
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    sync: Literal["changed", "full"] = "changed"
    """What engines of their own are sent of new weights: the elements whose bits have changed since, which
    keeps a copy of what was sent on the policy's hosts; or all. They have the same weights after either."""
    search: RLSearchConfig = field(default_factory=RLSearchConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)

    def __post_init__(self) -> None:
        if self.lora is not None:
            object.__setattr__(self, "model", replace(self.model, lora=self.lora))
        if self.critic is None and self.algorithm.advantage == "gae":
            object.__setattr__(self, "critic", CriticConfig())
        if isinstance(self.environment, str):
            key = "name" if self.environment in get_args(EnvironmentName) else "python"
            object.__setattr__(self, "environment", EnvironmentConfig(**{key: cast(Any, self.environment)}))
        has_other = self.environment is not None or self.reward.teacher is not None
        if has_other and self.reward.functions is DEFAULT_FUNCTIONS:
            object.__setattr__(self, "reward", replace(self.reward, functions=()))

    @property
    def sequence_length(self) -> int:
        """Tokens of the longest prompt and the longest answer: the least length of a plan."""
        return self.data.max_prompt_tokens + self.generation.max_new_tokens

    @property
    def turns(self) -> EnvironmentConfig | None:
        """The environment, with its keys."""
        return cast("EnvironmentConfig | None", self.environment)

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
        """Whether a reference must be kept."""
        return self.algorithm.kl.coefficient > 0

    def correction(self, mode: Mode) -> Literal["aipo", "decoupled", "none"]:
        """What is done about answers that older weights drew."""
        given = self.algorithm.correction
        differs = mode == "async" or self.roles.generation is not None
        return given if given != "auto" else "aipo" if differs else "none"


def policy_run(run: RLConfig, *, sequence_length: int | None = None) -> RunConfig:
    """The training run of the policy: every sample a row of `sequence_length` tokens, its worst case.

    The planner places it, and the trainer's parts are made of it. It reads no data of its own.
    """
    train: dict[str, Any] = {
        item.name: getattr(run.train, item.name) for item in fields(TrainConfig) if item.init
    }
    train["global_batch_size"] = run.samples_per_step
    # With experts every stage is told those with which its tokens were drawn.
    resets = run.train.pack or bool(run.model.num_experts)
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


OF_A_TRAINING_RUN = ("model", "train", "optimizer", "checkpoint", "log")
"""Sections of which the constraints are those of a training run."""


SKIPS_IN_TURN = (
    "in async mode prompts are drawn before it is known which were solved; leave it out, or set "
    "schedule.mode: sync"
)
"""Of data.skip_solved."""


def validate_rl(run: RLConfig) -> Iterator[Violation]:
    """Yield the violated constraints between the parts of a run."""
    for violation in validate_run(policy_run(run)):
        if violation.path[0] in OF_A_TRAINING_RUN and violation.path[1:] not in _SAID_BELOW:
            yield violation
        elif run.model.lora is not None and violation.path[0] == "search":
            yield replace(violation, path=("search", "policy", *violation.path[1:]))
    yield from _sizes(run)
    yield from _algorithm(run)
    yield from _rewards(run)
    yield from _environment(run)
    if run.roles.generation is not None:
        yield from _servers(run, run.roles.generation)
    if run.schedule.mode == "sync" and run.schedule.staleness:
        yield Violation(
            ("schedule", "staleness"),
            f"{run.schedule.staleness}, but in sync mode no answer is older than its batch; leave it out, or "
            "set mode: async",
        )
    if run.schedule.mode == "sync" and run.generation.weights == "in_flight":
        yield Violation(
            ("generation", "weights"),
            "in_flight, but in sync mode engines wait for the weights of each batch; leave it out, or set "
            "schedule.mode: async",
        )
    if run.checkpoint.in_memory:
        yield Violation(
            ("checkpoint", "in_memory"),
            f"{run.checkpoint.in_memory}: is for training, not yet for reinforcement learning; set it to 0",
        )
    is_async = run.schedule.mode == "async" or run.generation.weights == "in_flight"
    if is_async and run.data.skip_solved:
        yield Violation(("data", "skip_solved"), f"{run.data.skip_solved}, but {SKIPS_IN_TURN}")
    evaluation = run.evaluation
    for key in ("every", "at_start"):
        if getattr(evaluation, key) and run.data.evaluation is None:
            yield Violation(("evaluation", key), "there is nothing to measure; give data.evaluation")
    if evaluation.keep_best and not (evaluation.every and run.checkpoint.directory):
        yield Violation(
            ("evaluation", "keep_best"),
            "true: wanted evaluation.every, by which the best is found, and checkpoint.directory for it",
        )
    if 0 < evaluation.temperature < LEAST_TEMPERATURE:
        yield Violation(
            ("evaluation", "temperature"),
            f"{evaluation.temperature:g}; wanted 0 (the most probable token), or {LEAST_TEMPERATURE} or more",
        )
    if evaluation.samples > 1 and not evaluation.temperature:
        yield Violation(
            ("evaluation", "samples"),
            f"{evaluation.samples} answers to a prompt are all the same at temperature 0; set "
            "evaluation.temperature above 0, or samples: 1",
        )


_SAID_BELOW = (("global_batch_size",), ("compile",), ("trace",), ("output",))


def _sizes(run: RLConfig) -> Iterator[Violation]:
    model, train, generation, group = run.model, run.train, run.generation, run.algorithm.group
    if "{prompt}" not in run.data.template:
        yield Violation(("data", "template"), f"{run.data.template!r} has no {{prompt}}; say where it goes")
    if run.sequence_length > model.max_sequence_length:
        yield Violation(
            ("generation", "max_new_tokens"),
            f"{generation.max_new_tokens} tokens after a prompt of {run.data.max_prompt_tokens} "
            f"(data.max_prompt_tokens), but the model allows {model.max_sequence_length} in all "
            "(model.max_sequence_length)",
        )
    if model.hidden_dropout:
        yield Violation(
            ("model", "hidden_dropout"),
            f"{model.hidden_dropout}: the policy that trains would not be the one that drew; set it to 0",
        )
    if model.output != "vocabulary":
        yield Violation(("model", "output"), "a policy draws words; set it to vocabulary")
    if train.compile:
        yield Violation(("train", "compile"), "layers are not compiled here yet; leave it out")
    if train.trace is not None:
        yield Violation(("train", "trace"), "steps are not traced here yet; leave it out")
    for tier in ("parameters", "disk"):
        if tier in run.search.policy.tiers:
            yield Violation(
                ("search", "policy", "offload"), f"{tier}: written for pretraining alone; leave it out"
            )
    if run.samples_per_step > MOST_SEQUENCES:
        words = (
            f"{train.prompts_per_step} groups of {group} (algorithm.group); wanted at most {MOST_SEQUENCES}"
        )
        yield Violation(("train", "prompts_per_step"), f"{words} answers in a step")
    if train.prompts_per_step % run.algorithm.updates:
        yield Violation(
            ("train", "prompts_per_step"),
            f"{train.prompts_per_step} groups do not divide into {run.algorithm.updates} updates "
            "(algorithm.updates)",
        )
    elif train.prompts_per_step // run.algorithm.updates * group % train.micro_batch_size:
        rows = train.prompts_per_step // run.algorithm.updates * group
        yield Violation(
            ("train", "micro_batch_size"),
            f"{rows} answers of an update do not divide into micro-batches of {train.micro_batch_size}",
        )
    if generation.slots is not None and generation.slots % group:
        yield Violation(
            ("generation", "slots"),
            f"{generation.slots}, but a prompt's {group} answers (algorithm.group) are written together; "
            f"wanted a multiple of {group}",
        )
    for stop in generation.stop_ids:
        if stop >= model.vocab_size:
            yield Violation(
                ("generation", "stop_ids"), f"{stop} is no token of a vocabulary of {model.vocab_size}"
            )


def _algorithm(run: RLConfig) -> Iterator[Violation]:
    algorithm = run.algorithm
    of_groups = ("group", "mean", "leave_one_out")
    if algorithm.group < 2 and algorithm.advantage in of_groups:
        yield Violation(
            ("algorithm", "group"),
            f"{algorithm.group}: advantage {algorithm.advantage} compares the answers to a prompt; "
            "wanted 2 or more",
        )
    if algorithm.filter == "zero_variance" and algorithm.group < 2:
        yield Violation(
            ("algorithm", "filter"), "zero_variance would drop every group of 1; set group to 2 or more"
        )
    if algorithm.scale == "group" and algorithm.advantage not in of_groups:
        yield Violation(
            ("algorithm", "scale"),
            f"group, but advantage {algorithm.advantage} is of tokens; wanted batch or none",
        )
    if algorithm.advantage == "gae" and algorithm.name != "ppo":
        yield Violation(
            ("algorithm", "advantage"), f"gae needs the critic of name: ppo; {algorithm.name} has none"
        )
    if algorithm.advantage == "gae" and algorithm.scale != "batch":
        yield Violation(("algorithm", "scale"), f"{algorithm.scale}, but gae is whitened; wanted batch")
    if run.critic is not None and algorithm.advantage != "gae":
        yield Violation(
            ("critic",), f"advantage {algorithm.advantage} has none; leave it out, or set algorithm.name: ppo"
        )
    if run.critic is not None and run.train.precision == "fp16":
        yield Violation(
            ("train", "precision"), "fp16: a critic's loss is not scaled yet; wanted bf16, fp32 or fp64"
        )
    kl = algorithm.kl
    if kl.coefficient and kl.where == "loss" and kl.estimator == "k1":
        yield Violation(
            ("algorithm", "kl", "estimator"),
            "k1 in the loss has a mean gradient of zero; wanted k2 or k3, or where: reward",
        )
    if kl.renew and not kl.coefficient:
        yield Violation(
            ("algorithm", "kl", "renew"),
            f"{kl.renew}, but there is no reference without a coefficient above 0; give one, or leave it out",
        )
    if algorithm.dual_clip is not None and algorithm.correction == "aipo":
        yield Violation(("algorithm", "dual_clip"), "aipo does not clip; leave it out")
    if algorithm.clip[0] >= 1:
        yield Violation(
            ("algorithm", "clip", 0), f"{algorithm.clip[0]:g}: a ratio is never below 0; wanted less than 1"
        )


def _rewards(run: RLConfig) -> Iterator[Violation]:
    reward = run.reward
    if not reward.functions and reward.reader is None and run.environment is None:
        yield Violation(
            ("reward", "functions"),
            "nothing gives a reward; wanted a function, reward.model, reward.teacher, or an environment",
        )
    if reward.teacher is not None and reward.model is not None:
        yield Violation(
            ("reward", "teacher"),
            "beside reward.model, but a run has one model that reads the policy's answers; leave one out",
        )
    if reward.teacher is not None and run.algorithm.filter == "zero_variance":
        yield Violation(
            ("algorithm", "filter"),
            "zero_variance drops groups of equal rewards, of which reward.teacher teaches too; wanted none",
        )
    labels = [function.label for function in reward.functions]
    for i, function in enumerate(reward.functions):
        where = ("reward", "functions", i)
        for message in _faults(function):
            yield Violation(where, message)
        if function.label in labels[:i]:
            yield Violation(where, f"a second {function.label!r}; metrics go by name, so keep one")
    if reward.model is not None and "model" in labels:
        yield Violation(
            ("reward", "functions", labels.index("model")),
            "'model' is the name of reward.model's score; give the function another",
        )
    labels = [*labels, "environment"] if run.environment is not None else labels
    if "environment" in labels[:-1]:
        yield Violation(
            ("reward", "functions", labels.index("environment")),
            "'environment' is the name of the environment's rewards; give the function another",
        )
    if not labels and reward.reader is not None and run.data.skip_solved:
        yield Violation(
            ("data", "skip_solved"),
            f"{run.data.skip_solved}, but no reward function says what is solved; give one (weight: 0 leaves "
            "the reward as it is), or leave it out",
        )
    if not labels and reward.reader is not None and run.data.evaluation is not None:
        yield Violation(
            ("data", "evaluation"),
            "pass@1 counts answers that the first reward function gives 1, and there is none; give one "
            "(weight: 0 leaves the reward as it is), or leave the evaluation out",
        )
    if reward.clip is not None and reward.clip[0] >= reward.clip[1]:
        yield Violation(("reward", "clip"), f"wanted [smallest, largest], got {list(reward.clip)}")
    if reward.overlong.buffer > run.generation.max_new_tokens:
        yield Violation(
            ("reward", "overlong", "buffer"),
            f"{reward.overlong.buffer} tokens of answers of at most {run.generation.max_new_tokens} "
            "(generation.max_new_tokens); make it smaller",
        )


def _environment(run: RLConfig) -> Iterator[Violation]:
    environment = run.turns
    if environment is None:
        return
    where = ("environment",)
    if (environment.name is None) == (environment.python is None):
        yield Violation(where, 'wanted either name (calculator, python, search) or python: "file.py:Class"')
        return
    if environment.python is not None:
        file, colon, name = environment.python.rpartition(":")
        if not colon or not file.endswith(".py") or not name.isidentifier():
            names = ", ".join(get_args(EnvironmentName))
            yield Violation(where, f'wanted "file.py:Class" or one of {names}; got {environment.python!r}')
    if (environment.name == "search") != (environment.folder is not None):
        yield Violation(
            (*where, "folder"),
            "wanted for search, which looks into its .txt and .md files"
            if environment.folder is None
            else "of search alone; leave it out",
        )
    if not run.generation.stop_ids and run.data.tokenizer is None:
        yield Violation(
            ("generation", "stop_ids"), "none, and no data.tokenizer has some: wanted what ends a turn"
        )


def _servers(run: RLConfig, servers: HttpGeneration) -> Iterator[Violation]:
    where = ("roles", "generation")
    for i, url in enumerate(servers.http):
        fault = _fault_of_address(url)
        if fault is not None:
            yield Violation((*where, "http", i), f"{url!r}: {fault}")
        elif url.rstrip("/") in [other.rstrip("/") for other in servers.http[:i]]:
            yield Violation((*where, "http", i), f"{url!r} is there twice; give each server once")
    rates = servers.tokens_per_second
    if rates is not None and len(rates) != len(servers.http):
        yield Violation(
            (*where, "tokens_per_second"), f"{len(rates)} of {len(servers.http)} servers; give each its own"
        )
    if servers.folder is None and run.log.directory is None:
        yield Violation(
            (*where, "folder"), "nothing says where weights are put; give it, or log.directory, to all nodes"
        )
    if run.model.num_experts:
        yield Violation(
            ("model", "num_experts"),
            f"{run.model.num_experts}, but servers over HTTP do not say which experts drew; leave roles out",
        )
    if run.generation.weights == "in_flight":
        yield Violation(
            ("generation", "weights"),
            "in_flight, but servers over HTTP take weights between two batches; leave it out",
        )


def _fault_of_address(url: str) -> str | None:
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole, parts = False, urlsplit("")
    if not is_whole or parts.query or parts.fragment or parts.username is not None or not url.isprintable():
        return "wanted an address such as http://10.0.0.5:8000"
    if parts.path.rstrip("/").endswith("/v1"):
        return "wanted the address before /v1; leave that out"
    return None


def _faults(function: RewardFunction) -> Iterator[str]:
    if function.batch and function.python is None:
        yield "batch: true is for functions of a Python file; leave it out"
    if [function.name, function.python, function.url].count(None) != 2:
        names = ", ".join(get_args(RewardName))
        yield f'wanted one of name ({names}), python: "file.py:function" and url: "http://..."'
        return
    if function.url is not None:
        parts = urlsplit(function.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            yield f'url: wanted "http://host:port/path", got {function.url!r}'
    if function.python is not None:
        file, colon, name = function.python.rpartition(":")
        if not colon or not file.endswith(".py") or not name.isidentifier():
            yield f'python: wanted "file.py:function", got {function.python!r}'
    if function.pattern is None:
        if function.name in ("regex", "format"):
            yield f"{function.name} needs a pattern"
        return
    if function.name not in ("regex", "format"):
        yield f"{function.label} takes no pattern; leave it out"
        return
    try:
        groups = re.compile(function.pattern).groups
    except re.error as error:
        yield f"pattern {function.pattern!r}: {error}"
        return
    if function.name == "regex" and groups < 1:
        yield f"pattern {function.pattern!r} has no group (...) to compare with the answer"


def is_rl_run(path: str | Path) -> bool:
    """Whether a file is the run file of reinforcement learning. Raises ConfigError if it cannot be read."""
    return is_rl_document(read_document(path, "RunConfig"))


def load_rl(path: str | Path, overrides: tuple[str, ...] = ()) -> RLConfig:
    """Read a run file and the model that it names. Raises ConfigError with every violation."""
    document = read_document(path, "RunConfig")
    if not is_rl_document(document):
        raise ConfigError(
            f"{path}: no run of reinforcement learning, which has the key `algorithm`: `yuan-train train`"
        )
    return build(with_overrides(document, overrides), RLConfig, validate=validate_rl)
