"""What a card holds while it trains by reinforcement, in TRL and in our engine; whether that fits, and what
would help.

A step has phases that follow each other: answers are generated, the model is trained on them, the optimizer
steps. What lasts from step to step is there in all of them; the peak is the largest phase's.

And the bytes of every role of a plan on its cards, from the plan alone (`plan_memory`): they depend on the
types of cards, which a plan knows, and on no link. All of it is also there as text for the terminal, and as
plain values for --json; GB are 1e9 bytes. It stands alone because the command's help needs no planner.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.devices import CATALOGUE, MEMORY_FRACTION, DeviceType, Precision, usable_bytes
from yuan_train.config.errors import PlanError
from yuan_train.config.model import LoraConfig, ModelConfig, adaptable
from yuan_train.config.plan import MemoryForecast, Plan
from yuan_train.config.rl_plan import RlPlan
from yuan_train.config.run import Recompute
from yuan_train.estimate.shape import ModelShape
from yuan_train.planner.costs.grad_reduce import cards_of
from yuan_train.planner.costs.unit_costs import CardCosts, Costs, card_costs, make_costs, value_model
from yuan_train.planner.costs.workload import PlanProblem, TokenRows
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.stage_cost import Ends, StageCost, StateShares, scoring_bytes, stage_memory
from yuan_train.planner.roles.engines import PREFILL_CHUNK, Decoder, DecodeStage, Writing, num_groups
from yuan_train.planner.roles.placement import scoring_on


@dataclass(frozen=True, kw_only=True)
class GroupShape:
    """The samples that a card trains on at once: answers to one prompt."""

    group: int
    """Answers to the prompt."""
    prompt: int
    """Tokens of the prompt."""
    new: int
    """Tokens of an answer; the longest, to which the others are padded."""

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return self.prompt + self.new

    @property
    def tokens(self) -> int:
        """Tokens of all samples, their prompts repeated."""
        return self.group * self.length


@dataclass(frozen=True, kw_only=True)
class PhaseBytes:
    """Bytes on one card. Categories are in the order in which they are shown."""

    states: Mapping[str, float]
    """There in all phases: weights, reference, gradients, optimizer."""
    phases: Mapping[str, Mapping[str, float]]
    """What each phase holds beside them."""
    reserved: float
    """Not available to tensors: the driver's context."""

    @property
    def peak_phase(self) -> str:
        """The phase that holds most."""
        return max(self.phases, key=self.of_phase)

    @property
    def peak(self) -> int:
        """Peak bytes, rounded up."""
        return math.ceil(self.of_phase(self.peak_phase))

    def of_phase(self, name: str) -> float:
        """All bytes that are held in a phase."""
        return math.fsum((*self.states.values(), *self.phases[name].values(), self.reserved))


# --- TRL 0.14 ----------------------------------------------------------------------------------------------
#
# Peak bytes of GRPO in TRL 0.14 on one card: weights in bf16 under bf16 autocast, flash attention.
#
# Counted in the code, no number fitted: trl v0.14.0 (`GRPOTrainer.compute_loss`), transformers' Llama and
# Qwen 2, peft's LoRA layer, bitsandbytes' 8-bit Adam. What autograd keeps of a layer equals a count with
# `saved_tensors_hooks` (docs/estimate.md).
#
# h = hidden size, L = layers, f = feed-forward width, q = width of queries, k = width of keys, V = words,
# N = parameters, E = those of the embedding, G = group, P = prompt, C = new tokens, T = G (P + C),
# e = G C V elements of logits.

Method = Literal["full", "adam8", "adam8+recompute", "lora"]

CONTEXT_BYTES = 5e8
"""CUDA's context and kernels."""
LORA_RANK = 16
"""Of adapters on the projections q, k, o, up and down, with dropout."""


def trl_memory(shape: ModelShape, method: Method, samples: GroupShape) -> PhaseBytes:
    """Bytes of one card that holds the policy and its reference, and trains all samples at once."""
    layers, tokens = shape.num_layers, samples.tokens
    logits = samples.group * samples.new * shape.vocab_size
    generation = {
        "cache": 4.0 * shape.key_value_size * layers * tokens,
        "logits": 8.0 * samples.group * shape.vocab_size,
    }
    return PhaseBytes(
        states=_states(shape, method),
        phases={
            "training": _training(shape, method, tokens, logits),
            "generation": generation,
            # torch's AdamW over many tensors holds a copy of the weights' size.
            "optimizer_step": {"temporaries": 2.0 * shape.parameters if method == "full" else 0.0},
        },
        reserved=CONTEXT_BYTES,
    )


def _states(shape: ModelShape, method: Method) -> dict[str, float]:
    """Weights and reference in bf16, gradients in bf16, Adam's moments in bf16 as torch keeps them.

    8-bit Adam has a byte for each moment, but the Trainer keeps those of the embedding in fp32. Under LoRA
    the adapters alone are trained, in fp32, and the reference is the policy without them.
    """
    n = float(shape.parameters)
    if method == "lora":
        adapters = float(lora_parameters(shape))
        return {
            "weights": 2 * n + 4 * adapters,
            "reference": 0.0,
            "gradients": 4 * adapters,
            "optimizer": 8 * adapters,
        }
    embedding = shape.embedding_parameters
    optimizer = 4 * n if method == "full" else 2 * (n - embedding) + 8 * embedding
    return {"weights": 2 * n, "reference": 2 * n, "gradients": 2 * n, "optimizer": optimizer}


def lora_parameters(shape: ModelShape) -> int:
    """Parameters of the adapters: rank times the inputs and outputs of five projections, in each layer."""
    h, q, k, f = shape.hidden_size, shape.query_size, shape.key_value_size, shape.ffn_hidden_size
    return shape.num_layers * LORA_RANK * ((h + q) + (h + k) + (q + h) + 2 * (h + f))


def kept_per_token(shape: ModelShape, *, lora: bool) -> int:
    """Bytes of a token that autograd keeps of a layer.

    A norm keeps its input in fp32 (4h), what it normed (2h) and its output (2h); attention q, its output, k
    and v in bf16; SwiGLU gate, silu, up and their product (8f). Head norms keep what the others keep, less
    the output, which the rotary embedding replaces. With the base frozen, a norm keeps its input alone, and
    SwiGLU 6f; an adapter keeps its input again, behind dropout (2 bytes, and 1 of the mask).
    """
    h, q, k, f = shape.hidden_size, shape.query_size, shape.key_value_size, shape.ffn_hidden_size
    attention = 4 * q + 4 * k
    heads = (q + k) * shape.query_key_norm
    if lora:
        return 8 * h + attention + 4 * heads + 6 * f + 3 * (3 * h + q) + 3 * f
    return 16 * h + attention + 6 * heads + 8 * f


def _training(shape: ModelShape, method: Method, tokens: int, logits: int) -> dict[str, float]:
    """Activations of the policy's forward, and what is largest beside them.

    The policy's log-softmax in fp32 (4) stands while the reference's logits are made, in bf16 (2) and then in
    fp32, to which accelerate widens outputs (4): 10 bytes an element; its backward needs 8. The reference's
    own layer holds gate, up and product.
    """
    h, layers = shape.hidden_size, shape.num_layers
    kept = float(kept_per_token(shape, lora=method == "lora") * tokens)
    last_hidden = 2.0 * h * tokens
    if method == "adam8+recompute":
        # While a layer is computed again, the logits' are gone.
        layer = kept + 2 * last_hidden
        return {"activations": last_hidden * layers, "logits_or_layer": max(10.0 * logits, layer)}
    reference_layer = 6.0 * shape.ffn_hidden_size * tokens
    return {
        "activations": kept * layers + last_hidden,
        "logits_or_layer": max(10.0 * logits, reference_layer),
    }


# --- our engine --------------------------------------------------------------------------------------------
#
# Peak bytes of reinforcement learning in our own engine, the whole model on one card.
#
# The same weights generate and train; a reference stays on the host. Samples are trained one after the other,
# a row of prompt and answer each, so that the group matters to generation alone. Training is what the planner
# forecasts for a stage that holds all units (`stage_memory`). PPO's critic is trained in turn with the
# policy; a reward model is on the card while it scores, and on the host else.


def yuan_memory(case: MemoryCase, model: ModelConfig, device: DeviceType, precision: Precision) -> PhaseBytes:
    """Bytes on a card of this type, which must have a peak in `precision`, of a case of our engine with its
    model."""
    samples = case.samples

    def costs_of(model: ModelConfig, recompute: Recompute) -> CardCosts:
        return card_costs(
            model,
            TokenRows(1, samples.length, precision),
            recompute=recompute,
            type_name="card",
            device=device,
            profile=None,
        )

    def memory_of(model: ModelConfig, costs: CardCosts) -> MemoryForecast:
        return stage_memory(
            costs.units,
            Ends(embedding=True, head=True, head_holds_embedding=model.tie_embeddings),
            in_flight=1,
            boundary_bytes=costs.boundary_bytes,
            reserved_bytes=float(device.reserved),
            shares=StateShares(optimizer=1.0 - case.optimizer_offload),
        )

    memory = memory_of(model, costs_of(model, case.recompute))
    states = {
        "weights": memory.parameters,
        "reference": 0.0,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
    }
    phases = {"training": _of_backward(memory), "generation": _generation(model, samples, precision)}
    if case.critic:
        values = value_model(model)
        own = memory_of(values, costs_of(values, case.recompute))
        states["critic"] = own.parameters + own.gradients + own.optimizer
        phases["critic"] = _of_backward(own)
    if case.reward_model is not None:
        scoring = scoring_bytes(case.reward_model, costs_of(case.reward_model, "none"), precision)
        phases["scoring"] = {"reward model": scoring["weights"], "layer": scoring["activations"]}
    return PhaseBytes(states=states, phases=phases, reserved=memory.reserved)


def _of_backward(memory: MemoryForecast) -> dict[str, float]:
    return {"activations": memory.activations, "logits": memory.logits, "buffers": memory.buffers}


def _generation(model: ModelConfig, samples: GroupShape, precision: Precision) -> dict[str, float]:
    """All answers of a group at once."""
    writing = Writing(
        model=model,
        num_layers=model.num_layers,
        head=True,
        width=1,
        group=samples.group,
        prompt=samples.prompt,
        length=samples.length,
        precision=precision,
    )
    return {"cache": writing.group_cache_bytes, "logits or layer": writing.lane_bytes(samples.group)}


METHODS: tuple[Method, ...] = get_args(Method)
LORA_TARGETS = ("query", "key", "query_key", "out", "up", "down")
"""Of TRL's method `lora`; Yuan's layer has queries and keys in one matrix."""
Length = Literal["group", "new"]


@dataclass(frozen=True, kw_only=True)
class MemoryCase:
    """One model, method and group on one card."""

    model: ModelShape | ModelConfig
    """A shape is trained by TRL, a model by our engine."""
    method: Method
    samples: GroupShape
    card: str
    """In the catalogue."""
    recompute: Recompute = "none"
    """Of our engine; so the next."""
    optimizer_offload: float = 0.0
    critic: bool = False
    """Whether PPO's critic is trained on the card too."""
    reward_model: ModelConfig | None = None
    """Scores on the card; None: functions score."""

    @property
    def engine(self) -> str:
        """Whose code trains: `trl-0.14` or `yuan`."""
        return "trl-0.14" if isinstance(self.model, ModelShape) else "yuan"

    @property
    def device(self) -> DeviceType:
        """The card."""
        return CATALOGUE[self.card]

    @property
    def usable_bytes(self) -> float:
        """What may be filled of the card."""
        return usable_bytes(self.device, MEMORY_FRACTION)

    @property
    def fits(self) -> bool:
        """Whether the peak is at most that."""
        return memory_of(self).peak <= self.usable_bytes


@dataclass(frozen=True, kw_only=True)
class Remedy:
    """One change after which a case fits."""

    change: str
    """`method`, `recompute`, `optimizer_offload`, `group`, `new` or `card`."""
    value: str | int | float
    case: MemoryCase


def memory_of(case: MemoryCase) -> PhaseBytes:
    """The bytes of a case, by phase and category."""
    if isinstance(case.model, ModelShape):
        return trl_memory(case.model, case.method, case.samples)
    model = case.model if case.method == "full" else with_adapters(case.model)
    # The same bytes; cards from before bf16 train in fp16.
    return yuan_memory(case, model, case.device, "bf16" if case.device.bf16 else "fp16")


def with_adapters(model: ModelConfig) -> ModelConfig:
    """The model with the adapters that TRL's method `lora` has, as far as it has such matrices."""
    words = [name.rpartition(".")[2] for name in adaptable(model)]
    targets = tuple(word for word in words if word in LORA_TARGETS)
    return (
        model if model.lora is not None else replace(model, lora=LoraConfig(rank=LORA_RANK, targets=targets))
    )


def with_length(case: MemoryCase, length: Length, value: int) -> MemoryCase:
    """The case with another group, or another number of new tokens."""
    samples = case.samples
    changed = replace(samples, group=value) if length == "group" else replace(samples, new=value)
    return replace(case, samples=changed)


def largest_fitting(case: MemoryCase, length: Length) -> int:
    """The largest group, or number of new tokens, that fits, all else as it is; 0 if not even 1 does.

    Memory grows with both, so that the answer lies between two powers of two.
    """
    if not with_length(case, length, 1).fits:
        return 0
    beyond = 2
    while with_length(case, length, beyond).fits:
        beyond *= 2
    fitting = beyond // 2
    while beyond - fitting > 1:
        middle = (fitting + beyond) // 2
        if with_length(case, length, middle).fits:
            fitting = middle
        else:
            beyond = middle
    return fitting


def remedies(case: MemoryCase) -> list[Remedy]:
    """What would make a case fit, each alone; the last is the smallest card that does."""
    found = [remedy for remedy in _other_ways(case) if remedy.case.fits]
    for length in get_args(Length):
        value = largest_fitting(case, length)
        if value:
            found.append(Remedy(change=length, value=value, case=with_length(case, length, value)))
    larger = [
        Remedy(change="card", value=name, case=replace(case, card=name))
        for name, device in sorted(CATALOGUE.items(), key=lambda item: item[1].memory)
        if device.memory > case.device.memory
    ]
    return found + [remedy for remedy in larger if remedy.case.fits][:1]


def _other_ways(case: MemoryCase) -> Iterator[Remedy]:
    """TRL has other methods, our engine has recompute, adapters and a place for the optimizer's state."""
    if isinstance(case.model, ModelShape):
        for method in METHODS:
            if method != case.method:
                yield Remedy(change="method", value=method, case=replace(case, method=method))
        return
    yield Remedy(change="recompute", value="full", case=replace(case, recompute="full"))
    if case.method == "full" and not case.model.num_experts:
        yield Remedy(change="method", value="lora", case=replace(case, method="lora"))
    if case.method == "lora" or case.critic:
        # What adapters or a critic have stays on the card.
        return
    yield Remedy(change="optimizer_offload", value=1.0, case=replace(case, optimizer_offload=1.0))
    both = replace(case, recompute="full", optimizer_offload=1.0)
    yield Remedy(change="optimizer_offload", value="1.0 with recompute full", case=both)


ANY_LINK = Link(bandwidth=1e9)
LASTING = ("parameters", "gradients", "optimizer", "critic", "reserved")
"""Categories that are there from step to step."""


@dataclass(frozen=True, kw_only=True)
class StageBytes:
    """Bytes on each card of a stage of a role."""

    role: str
    pipeline: int
    stage: int
    card: str
    """Type of its cards."""
    categories: dict[str, float]
    """Of the phase that holds most."""
    capacity: int
    """Of a card, as torch reports it."""

    @property
    def peak(self) -> float:
        """Bytes of all categories."""
        return math.fsum(self.categories.values())

    @property
    def fits(self) -> bool:
        """Whether they are at most what a plan may fill of the card."""
        return self.peak <= self.capacity * MEMORY_FRACTION


def plan_memory(
    plan: RlPlan, *, prompt: int | None = None, group: int = 1, reward_model: ModelConfig | None = None
) -> list[StageBytes]:
    """The bytes of every role by stage, in bf16 (fp16 where a card has none).

    `prompt` is the length of a prompt; None: a whole chunk is read at a time. `group` is the answers to a
    prompt: so many slots share the reading of one. A `reward_model` scores on the policy's cards. Raises
    PlanError for a card of unknown type.
    """
    found: list[StageBytes] = []
    generation, read = plan.roles.generation, _Read(prompt or PREFILL_CHUNK, group)
    for role, own in plan.plans.items():
        critic = role == "policy" and plan.roles.critic is not None and plan.roles.critic.plan is None
        costs = _costs_of(own, critic=critic)
        if role == "policy":
            for stage in cost_plan(costs, own).stages:
                slots = generation.slots if generation.is_shared else None
                found.append(_training_stages(costs, own, stage, slots, read, reward_model))
        else:
            found += _forward_only(role, costs, own, read)
    return found


@dataclass(frozen=True)
class _Read:
    """What a plan does not say: tokens of a prompt, and answers to it."""

    prompt: int
    group: int


def _costs_of(plan: Plan, *, critic: bool) -> Costs:
    """The costs of a plan's own cards, a node for each."""
    groups: list[NodeGroup] = []
    nodes: dict[str, dict[int, str]] = {}
    for entry in plan.ranks:
        if plan.find_type(entry.type) is None:
            raise PlanError(f"ranks[{entry.rank}].type: {entry.type!r} is neither in the catalogue nor here")
        node, _, number = entry.device.rpartition("/")
        if not node or not number.isdecimal():
            raise PlanError(f"ranks[{entry.rank}].device: wanted NODE/NUMBER, got {entry.device!r}")
        nodes.setdefault(node, {})[int(number)] = entry.type
    for node, own in nodes.items():
        # Cards that the plan leaves out are of any type.
        types = [own.get(i, next(iter(own.values()))) for i in range(max(own) + 1)]
        groups.append(NodeGroup(name=node, link=ANY_LINK, network=ANY_LINK).with_cards(types))
    cluster = Cluster(name=plan.cluster, nodes=tuple(groups), device_types=plan.device_types)
    has_bf16 = all(cluster.device_type(entry.type).bf16 for entry in plan.ranks)
    return make_costs(
        PlanProblem(
            cluster=cluster,
            model=plan.model,
            sequence_length=plan.sequence_length,
            global_batch_size=plan.global_batch_size,
            precision="bf16" if has_bf16 else "fp16",
            critic=critic,
        )
    )


def _training_stages(
    costs: Costs,
    plan: Plan,
    stage: StageCost,
    slots: int | None,
    read: _Read,
    reward_model: ModelConfig | None,
) -> StageBytes:
    """What training holds; instead, where that is more, generation on shared cards, or scoring."""
    training = stage.memory.categories
    phases = [training]
    kept = {name: training[name] for name in LASTING if name in training}
    if reward_model is not None:
        phases.append(kept | _whole_scoring(costs, plan, stage, reward_model))
    if slots is not None:
        own = DecodeStage.of(stage, stage.replicas[0])
        groups = max(num_groups(len(plan.pipelines[stage.pipeline].stages), slots // read.group), 1)
        drawn = _drawing(costs, plan, own, slots // groups, groups, read)
        phases.append(kept | {name: drawn[name] for name in ("slots", "buffers")})
    return StageBytes(
        role="policy",
        pipeline=stage.pipeline,
        stage=stage.stage,
        card=stage.card.type,
        categories=max(phases, key=lambda phase: math.fsum(phase.values())),
        capacity=round(stage.capacity_bytes),
    )


def _whole_scoring(costs: Costs, plan: Plan, stage: StageCost, model: ModelConfig) -> dict[str, float]:
    """Of a reward model that every card has whole while it scores."""
    device = costs.problem.cluster.device_type(stage.card.type)
    rows = TokenRows(1, plan.sequence_length, costs.problem.precision)
    _, scoring = scoring_on(device, model, rows)
    return {"reward model": scoring["weights"], "buffers": scoring["activations"]}


def _forward_only(role: str, costs: Costs, plan: Plan, read: _Read) -> list[StageBytes]:
    found: list[StageBytes] = []
    for p, s, stage in plan.numbered_stages:
        cards = cards_of(costs, plan, stage)[0]
        own = DecodeStage.of(stage, cards)
        if role == "generation":
            slots, groups = plan.pipelines[p].micro_batch_size, plan.pipelines[p].num_micro_batches
            categories = _drawing(costs, plan, own, slots, groups, read)
        else:
            categories = _scoring(costs, plan, own)
        found.append(
            StageBytes(
                role=role,
                pipeline=p,
                stage=s,
                card=cards[0].type,
                categories=categories,
                capacity=min(costs.problem.cluster.device_type(card.type).memory for card in cards),
            )
        )
    return found


def _drawing(
    costs: Costs, plan: Plan, stage: DecodeStage, slots: int, groups: int, read: _Read
) -> dict[str, float]:
    """Of a stage that generates on `slots` slots of each group."""
    decoder = _decoder(costs, plan)
    return decoder.bytes_on(stage, _writing(decoder, plan, stage, read), slots=slots, num_groups=groups)


def _scoring(costs: Costs, plan: Plan, stage: DecodeStage) -> dict[str, float]:
    """Of a role that reads a sample at once, and keeps no keys and values."""
    decoder = _decoder(costs, plan)
    fixed = decoder.fixed_bytes(stage)
    chunk = _writing(decoder, plan, stage, _Read(plan.sequence_length, 1)).chunk_bytes
    return {"weights": fixed["weights"], "buffers": chunk, "reserved": fixed["reserved"]}


def _decoder(costs: Costs, plan: Plan) -> Decoder:
    return Decoder(costs.topology, plan.model, costs.problem.precision)


def _writing(decoder: Decoder, plan: Plan, stage: DecodeStage, read: _Read) -> Writing:
    prompt, length = min(read.prompt, plan.sequence_length), plan.sequence_length
    return decoder.writing_on(stage, group=read.group, prompt=prompt, length=length)


# --- as text and as plain values ----------------------------------------------------------------------------


def estimate_text(case: MemoryCase, length: Length | None) -> str:
    """Bytes by phase and category, the verdict, and what would make it fit; the largest of `length`."""
    memory = memory_of(case)
    lines = [
        heading(case),
        f"  always          {_categories(memory.states)} | reserved {_gb(memory.reserved)}",
    ]
    for name, categories in memory.phases.items():
        mark = "  <- peak" if name == memory.peak_phase else ""
        words = f"{name.replace('_', ' '):<15} {_categories(categories)}"
        lines.append(f"  {words:<75} {_gb(memory.of_phase(name)):>7}{mark}")
    lines.append(f"  peak {verdict(case)}")
    if not case.fits:
        ways = [
            f"{way.change.replace('_', ' ')} {way.value} ({_gb(memory_of(way.case).peak)} GB)"
            for way in remedies(case)
        ]
        lines += [f"  would fit: {way}" for way in ways]
        if not ways:
            lines.append("  no one change makes it fit: divide the model over cards with `yuan-train plan`")
    if length is not None:
        lines.append(f"  {_largest_words(case, length)}")
    return "\n".join(lines)


def heading(case: MemoryCase) -> str:
    """Model, method, engine and lengths in a line."""
    samples = case.samples
    return (
        f"{case.model.name} ({case.model.parameters:,} parameters), {case.method}, {case.engine}"
        f"{', with a critic' if case.critic else ''}: "
        f"group {samples.group}, prompt {samples.prompt}, new {samples.new}"
    )


def verdict(case: MemoryCase) -> str:
    """`98.4 GB of 80.7 GB (95% of an H100-80G): does not fit`."""
    words = "fits" if case.fits else "does not fit"
    usable = f"{_gb(case.usable_bytes)} GB ({MEMORY_FRACTION:.0%} of an {case.card})"
    return f"{_gb(memory_of(case).peak)} GB of {usable}: {words}"


def methods_text(cases: Sequence[MemoryCase]) -> str:
    """A line for each method of one model."""
    samples = cases[0].samples
    lines = [
        f"{cases[0].model.name} ({cases[0].model.parameters:,} parameters), {cases[0].engine}: "
        f"group {samples.group}, prompt {samples.prompt}, new {samples.new}"
    ]
    return "\n".join([*lines, *(f"  {case.method:<16} {verdict(case)}" for case in cases)])


def estimate_json(case: MemoryCase, length: Length | None) -> dict[str, Any]:
    """The same as plain values, in bytes; `largest` only if it was asked for."""
    memory = memory_of(case)
    found: dict[str, Any] = {
        **_cell_json(case),
        "parameters": case.model.parameters,
        "engine": case.engine,
        "algorithm": "ppo" if case.critic else "grpo",
        **_lengths_json(case),
        "states": dict(memory.states),
        "reserved": memory.reserved,
        "phases": {
            name: {"bytes": memory.of_phase(name), "categories": dict(categories)}
            for name, categories in memory.phases.items()
        },
        "peak_phase": memory.peak_phase,
        "remedies": []
        if case.fits
        else [
            {"change": remedy.change, "value": remedy.value, "bytes": memory_of(remedy.case).peak}
            for remedy in remedies(case)
        ],
    }
    if length is not None:
        value = largest_fitting(case, length)
        found["largest"] = {
            "of": length,
            "value": value,
            "bytes": memory_of(with_length(case, length, value)).peak if value else None,
            "bytes_with_one_more": memory_of(with_length(case, length, value + 1)).peak,
        }
    return found


def methods_json(cases: Sequence[MemoryCase]) -> dict[str, Any]:
    """A cell for each method of one model."""
    return {
        "parameters": cases[0].model.parameters,
        "engine": cases[0].engine,
        **_lengths_json(cases[0]),
        "cells": [_cell_json(case) for case in cases],
    }


def _cell_json(case: MemoryCase) -> dict[str, Any]:
    return {"model": case.model.name, "method": case.method, "bytes": memory_of(case).peak, "fits": case.fits}


def _lengths_json(case: MemoryCase) -> dict[str, Any]:
    samples = case.samples
    return {
        "group": samples.group,
        "prompt": samples.prompt,
        "new": samples.new,
        "card": case.card,
        "capacity_bytes": case.device.memory,
        "usable_bytes": case.usable_bytes,
    }


def _largest_words(case: MemoryCase, length: Length) -> str:
    value = largest_fitting(case, length)
    beyond = _gb(memory_of(with_length(case, length, value + 1)).peak)
    if not value:
        return f"largest {length}: none; 1 needs {beyond} GB"
    needed = _gb(memory_of(with_length(case, length, value)).peak)
    return f"largest {length} that fits: {value} ({needed} GB; {value + 1} needs {beyond} GB)"


def _categories(values: Mapping[str, float]) -> str:
    return " | ".join(f"{name.replace('_', ' ')} {_gb(value)}" for name, value in values.items())


def _gb(value: float) -> str:
    return f"{value / 1e9:.1f}"


def roles_memory_text(stages: Sequence[StageBytes]) -> str:
    """A line for each stage of each role; equal ones together."""
    lines: dict[str, int] = {}
    for stage in stages:
        verdict = "fits" if stage.fits else f"more than {MEMORY_FRACTION:.0%} of it: does not fit"
        line = (
            f"{stage.role:<10} stage {stage.stage} on {stage.card}: {_gb(stage.peak)} of "
            f"{_gb(stage.capacity)}, {verdict} ({_categories(stage.categories)})"
        )
        lines[line] = lines.get(line, 0) + 1
    return "\n".join(line + (f" x {count}" if count > 1 else "") for line, count in lines.items())


def roles_memory_json(stages: Sequence[StageBytes]) -> dict[str, Any]:
    """The same as plain values."""
    return {
        "roles": [
            {
                **{name: getattr(stage, name) for name in ("role", "pipeline", "stage", "card")},
                "bytes": stage.peak,
                "capacity_bytes": stage.capacity,
                "usable_bytes": stage.capacity * MEMORY_FRACTION,
                "fits": stage.fits,
                "categories": stage.categories,
            }
            for stage in stages
        ]
    }
