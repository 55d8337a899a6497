"""Engines that generate: their slots, how fast they answer, and how long new weights take to reach them.

A round draws one token for each of the slots of a stage. One of b slots whose contexts are l tokens long, on
w cards that share each layer, takes seconds:

    max(W e / (w B), 2 b W / (w F))     the stage's weights are read once, and multiplied with b vectors
    + 2 b l P e layers / (w B)          keys and values of the context are read
    + all-reduces of b H e bytes        two a layer, in a tensor-parallel group
    + overhead                          of launching each unit

W = parameters of the stage's matrices (the lookup of an embedding reads b rows), P = width of all keys,
H = hidden size, e = bytes of an element, B and F = memory bandwidth and peak of a card times what a
well-tuned model reaches of them. Where a profile has the generation of this type of card, its seconds take
the place of all but the all-reduces; a group wider than any that was measured divides what one card takes.
A layer's seconds are affine in b and in b l where either the weights' bytes or the products decide: between
the measured numbers, and beyond them, each number of slots is a line in the context, and each context a line
in the slots, through the two nearest measured.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from yuan_train.config.cluster import Card
from yuan_train.config.devices import Precision, usable_bytes
from yuan_train.config.model import ModelConfig, is_trained, is_whole_adapter, layer_table
from yuan_train.config.plan import StagePlan
from yuan_train.config.profile import GenerationProfile, Profile
from yuan_train.planner.costs.links import Topology, allreduce_seconds, find_route, message_seconds
from yuan_train.planner.costs.unit_costs import MEMORY_EFFICIENCY, UNIT_OVERHEAD_SECONDS, matrix_efficiency
from yuan_train.planner.costs.workload import ELEMENT_BYTES, TensorGroup, TokenRows, model_work
from yuan_train.planner.evaluate.simulator import StageTimes, simulate
from yuan_train.planner.evaluate.stage_cost import StageCost
from yuan_train.schedule.schedules import forward_only
from yuan_train.schedule.step import one_worker_each

PartSeconds = tuple[float, float, float]
"""Of a pass over slots, or prompts: of a layer, of the embedding and beside the model, and of the head."""
Measured = Mapping[tuple[str, int], GenerationProfile]
"""By type of card, and cards of a tensor-parallel group."""
PREFILL_CHUNK = 512
"""Prompt tokens that generation reads at once."""
DRAWN_ELEMENTS = 1 << 22
"""Logits whose noise is in memory at once: `NOISE_ELEMENTS` of yuan_train/models/generate.py."""


@dataclass(frozen=True, kw_only=True)
class DecodeStage:
    """Layers of the model on the cards of one tensor-parallel group, that generate."""

    cards: tuple[Card, ...]
    layers: tuple[float, float]
    embedding: bool
    head: bool

    @classmethod
    def of(cls, stage: StagePlan | StageCost, cards: Sequence[Card]) -> DecodeStage:
        """The stage of a plan on one of its replicas."""
        return cls(cards=tuple(cards), layers=stage.layers, embedding=stage.embedding, head=stage.head)

    @property
    def width(self) -> int:
        return len(self.cards)

    @property
    def num_layers(self) -> float:
        return self.layers[1] - self.layers[0]


def held_parameters(model: ModelConfig, stage: DecodeStage) -> float:
    """Parameters of a stage, over all its cards; a tied matrix once."""
    held = stage.num_layers * model.layer_parameters
    if stage.embedding:
        held += model.embedding_parameters
    if stage.head:
        held += model.head_parameters
        if stage.embedding and model.tie_embeddings:
            held -= model.embedding_parameters
    return held


def _met_parameters(model: ModelConfig, stage: DecodeStage, slots: int) -> tuple[float, float]:
    """Parameters that a round reads, and those that a token is multiplied with. Of a layer's experts the
    slots together choose a part: each is missed by a token with probability 1 - chosen / all."""
    head = model.head_parameters if stage.head else 0
    multiplied = stage.num_layers * model.layer_parameters
    read = multiplied
    if model.num_experts:
        experts = sum(p.size for p in model.spec.layer(model) if p.sharding == "expert")
        share = model.experts_per_token / model.num_experts
        multiplied -= stage.num_layers * experts * (1.0 - share)
        read -= stage.num_layers * experts * (1.0 - share) ** slots
    return read + head, multiplied + head


@dataclass(frozen=True)
class CardRates:
    """What a group of cards reaches, by its slowest card."""

    flops_per_second: float
    bytes_per_second: float


def profiles_of(measured: Measured, stage: DecodeStage) -> list[GenerationProfile]:
    """What a profile has of the generation of a stage's types of card; empty if it lacks one of them."""
    types = {card.type for card in stage.cards}
    found = [measured.get((name, stage.width)) or measured.get((name, 1)) for name in types]
    own = [one for one in found if one is not None]
    return own if len(own) == len(types) else []


def _of_stage(stage: DecodeStage, own: GenerationProfile, parts: PartSeconds, sums_seconds: float) -> float:
    """Seconds of a stage, of those of its parts; a group that was not measured divides its products."""
    narrower = own.tensor_parallel < stage.width
    divisor = stage.width if narrower else 1
    layer, engine, head = parts
    seconds = stage.num_layers * layer / divisor + (sums_seconds if narrower else 0.0)
    if stage.head:
        seconds += head / divisor
    return seconds + (engine if stage.embedding else 0.0)


@dataclass(frozen=True)
class Decoder:
    """A model that stages generate with, and what is known of their cards."""

    topology: Topology
    model: ModelConfig
    precision: Precision
    measured: Measured = field(default_factory=dict[tuple[str, int], GenerationProfile])

    def rates(self, cards: Sequence[Card]) -> CardRates:
        """The rates of the slowest of these cards; each has a peak in this precision."""
        types = [self.topology.types[name] for name in {card.type for card in cards}]
        peaks = [device.peak(self.precision) for device in types]
        assert all(peaks), "a card without this precision gets no work"
        return CardRates(
            matrix_efficiency(self.model.hidden_size) * min(peak for peak in peaks if peak),
            MEMORY_EFFICIENCY * min(device.memory_bandwidth / (device.slowdown or 1.0) for device in types),
        )

    def _sum_seconds(self, stage: DecodeStage, tokens: int) -> float:
        """Of an all-reduce of the hidden states of so many tokens; 0 for one card."""
        hidden = float(tokens * self.model.hidden_size * ELEMENT_BYTES[self.precision])
        return allreduce_seconds(self.topology, stage.cards, hidden) if stage.width > 1 else 0.0

    def round_seconds(self, stage: DecodeStage, *, slots: int, context: float) -> float:
        """Seconds of a round of a stage, of `slots` samples with contexts of `context` tokens on average."""
        sums = (2.0 * stage.num_layers + stage.embedding) * self._sum_seconds(stage, slots)
        if owns := profiles_of(self.measured, stage):
            parts = [round_parts(own, slots=slots, context=context) for own in owns]
            return max(_of_stage(stage, own, part, sums) for own, part in zip(owns, parts, strict=True))
        rates, e, w = self.rates(stage.cards), ELEMENT_BYTES[self.precision], stage.width
        read, multiplied = _met_parameters(self.model, stage, slots)
        weights = max(
            read * e / (w * rates.bytes_per_second), 2.0 * slots * multiplied / (w * rates.flops_per_second)
        )
        kept = 2.0 * slots * context * self.model.key_value_size * e * stage.num_layers
        cache = kept / (w * rates.bytes_per_second)
        return (
            weights + cache + sums + UNIT_OVERHEAD_SECONDS * (stage.num_layers + stage.embedding + stage.head)
        )

    def prefill_seconds(self, stage: DecodeStage, *, tokens: int, prompts: int = 1) -> float:
        """Seconds in which a stage reads so many prompts of so many tokens; measured: all at once."""
        chunks = -(-tokens // PREFILL_CHUNK)
        sums = chunks * 2.0 * stage.num_layers * self._sum_seconds(stage, min(tokens, PREFILL_CHUNK))
        if owns := profiles_of(self.measured, stage):
            pairs = [(own, reading_parts(own, prompts=prompts, tokens=tokens)) for own in owns]
            return max(_of_stage(stage, own, part, prompts * sums) for own, part in pairs)
        rates = self.rates(stage.cards)
        _, multiplied = _met_parameters(self.model, stage, 1)
        attention = stage.num_layers * tokens * tokens * 2.0 * self.model.projection_size
        flops = 2.0 * tokens * multiplied + attention
        return prompts * (
            flops / (stage.width * rates.flops_per_second)
            + sums
            + chunks * UNIT_OVERHEAD_SECONDS * (stage.num_layers + stage.embedding + stage.head)
        )

    def writing_on(self, stage: DecodeStage, *, group: int, prompt: int, length: int) -> Writing:
        """What samples take of a stage's cards, `group` to a prompt."""
        return Writing(
            model=self.model,
            num_layers=stage.num_layers,
            head=stage.head,
            width=stage.width,
            group=group,
            prompt=prompt,
            length=length,
            precision=self.precision,
        )

    def fixed_bytes(self, stage: DecodeStage) -> dict[str, float]:
        """Bytes on each card of a generating stage beside what it writes, by category."""
        return {
            "weights": held_parameters(self.model, stage) * ELEMENT_BYTES[self.precision] / stage.width,
            "reserved": float(max(self.topology.types[card.type].reserved for card in stage.cards)),
        }

    def bytes_on(
        self, stage: DecodeStage, writing: Writing, *, slots: int, num_groups: int
    ) -> dict[str, float]:
        """Of a stage with so many slots in each of its groups, by category."""
        fixed = self.fixed_bytes(stage)
        return {
            "weights": fixed["weights"],
            "slots": slots * num_groups / writing.group * writing.group_cache_bytes,
            "buffers": writing.lane_bytes(slots),
            "reserved": fixed["reserved"],
        }


def most_slots(free_bytes: float, writing: Writing, *, limit: int, num_groups: int) -> int:
    """The most slots that fit, at most `limit`, for whole prompts; `num_groups` groups of them take turns."""

    def held(count: int) -> float:
        slots = count * writing.group
        return count * writing.group_cache_bytes + writing.lane_bytes(-(-slots // num_groups))

    return bisect.bisect_right(range(1, limit // writing.group + 1), free_bytes, key=held) * writing.group


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What is written on a stage of so many layers, which `width` cards share: samples of `length` tokens,
    `prompt` of them read, `group` to a prompt. A prompt is read once, into a cache of its own that is copied
    to each of its answers' slots; every cache has a place for padding."""

    model: ModelConfig
    num_layers: float
    head: bool
    width: int
    group: int
    prompt: int
    length: int
    precision: Precision

    @cached_property
    def group_cache_bytes(self) -> float:
        """Of the slots for the answers to a prompt, and of the prompt, on each card: keys and values of every
        token, and the localized filter's state of u (H) and of its first convolution (H/2)."""
        e, model = ELEMENT_BYTES[self.precision], self.model
        state = 1.5 * model.hidden_size if model.attention == "localized_filter" else 0.0
        places = self.group * (self.length + 1) + self.prompt + 1
        per_layer = e * (2 * places * model.key_value_size / self.width + (self.group + 1) * state)
        return self.num_layers * per_layer

    def lane_bytes(self, slots: int) -> float:
        """Beside the caches, while a group of so many slots is run, on each card the largest of

        - a chunk of its prompts: at most what a layer would keep of it for a backward,
        - a layer's keys and values, repeated for each query head, where heads share them (a masked
          attention),
        - a draw (`drawing_bytes`).
        """
        model = self.model
        shared = model.key_value_size < model.projection_size
        repeated = 2.0 * ELEMENT_BYTES[self.precision] * slots * self.length * model.projection_size
        return max(
            -(-slots // self.group) * self.chunk_bytes if self.num_layers else 0.0,
            repeated / self.width if shared and self.num_layers else 0.0,
            drawing_bytes(slots, model.vocab_size / self.width) if self.head else 0.0,
        )

    @cached_property
    def chunk_bytes(self) -> float:
        """Of a chunk of one prompt in one layer."""
        rows = TokenRows(1, min(self.prompt, PREFILL_CHUNK), self.precision)
        group = TensorGroup(1 if self.model.num_experts else self.width)
        return model_work(self.model, rows, logit_rows=1, group=group).layer.activation_bytes


def drawing_bytes(draws: int, words: float) -> float:
    """Most bytes at once while so many tokens are drawn, each of `words` logits. The logits are in fp64, and
    beside them the larger of their exponentials (logsumexp) and, of DRAWN_ELEMENTS of them at a time (on a
    CPU fewer), in whole rows, a copy and two more while their noise is made."""
    rows = min(max(int(DRAWN_ELEMENTS // words), 1), draws)
    return 8.0 * words * (draws + max(draws, 3 * rows))


# --- what a profile has measured -------------------------------------------------------------------------


def measured_rounds(profile: Profile | None) -> Measured:
    """What a profile has of generation."""
    found = profile.generation if profile is not None else ()
    return {(own.device_type, own.tensor_parallel): own for own in found}


def round_parts(own: GenerationProfile, *, slots: int, context: float) -> PartSeconds:
    """Seconds of a round, on the cards that were measured."""
    by_slots = [line_through(own.contexts, row, context) for row in own.layer_seconds]
    layer, engine, head = (
        line_through(own.slots, row, slots) for row in (by_slots, own.engine_seconds, own.head_seconds)
    )
    return layer, engine, head


def reading_parts(own: GenerationProfile, *, prompts: int, tokens: int) -> PartSeconds:
    """Seconds of a reading of so many prompts of so many tokens, which draws `group` tokens for each."""
    layer = tokens / own.prompt_tokens * line_through(own.prompts, own.prompt_layer_seconds, prompts)
    engine = line_through(own.prompts, own.prompt_engine_seconds, prompts)
    return layer, engine, line_through(own.slots, own.head_seconds, prompts * own.group)


def line_through(places: Sequence[float], values: Sequence[float], place: float) -> float:
    """The value at a place on the line through the two nearest, at least 0; of one place what is there."""
    if len(places) == 1:
        return values[0]
    after = min(max(bisect.bisect(places, place), 1), len(places) - 1)
    share = (place - places[after - 1]) / (places[after] - places[after - 1])
    return max(0.0, values[after - 1] + share * (values[after] - values[after - 1]))


GROUPS_PER_STAGE = 4
"""Micro-batches of slots for each stage of an engine: an uneven pipeline drains once a round."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """The samples of a step."""

    model: ModelConfig
    precision: Precision
    prompts: int
    group: int
    """Samples of a prompt."""
    prompt_tokens: int
    new_tokens: int
    """Of the longest answer."""
    expected_new_tokens: float
    """Of an answer, on average."""

    @property
    def samples(self) -> int:
        return self.prompts * self.group

    @property
    def length(self) -> int:
        """Tokens of the longest sample."""
        return self.prompt_tokens + self.new_tokens


@dataclass(frozen=True, kw_only=True)
class EnginePlan:
    """A pipeline of stages that generates, with its slots."""

    stages: tuple[DecodeStage, ...]
    slots_per_group: int
    num_groups: int
    """Micro-batches of slots that are under way at once."""

    @property
    def slots(self) -> int:
        """Samples that it generates at once."""
        return self.slots_per_group * self.num_groups

    @property
    def cards(self) -> tuple[Card, ...]:
        """Its cards, stage by stage."""
        return tuple(card for stage in self.stages for card in stage.cards)


@dataclass(frozen=True)
class EngineRates:
    """What engines of a workload take; looked up once for engines on equal cards."""

    topology: Topology
    load: Workload
    measured: Measured = field(default_factory=dict[tuple[str, int], GenerationProfile])
    memory_fraction: float = 1.0
    """Of a card's memory, what an engine may fill."""

    @cached_property
    def decoder(self) -> Decoder:
        """What the workload's model takes on a stage."""
        return Decoder(self.topology, self.load.model, self.load.precision, self.measured)

    def writing(self, stage: DecodeStage) -> Writing:
        """What samples of the workload take of a stage's cards."""
        load = self.load
        return self.decoder.writing_on(stage, group=load.group, prompt=load.prompt_tokens, length=load.length)

    def are_measured(self, engine: EnginePlan) -> bool:
        """Whether a profile has the generation of all its cards."""
        return all(profiles_of(self.measured, stage) for stage in engine.stages)

    def rounds(self, engine: EnginePlan, slots: int) -> float:
        """Seconds of a round in which so many samples get a token each, with contexts of mean length. A group
        of slots runs whole, however many of them are in use."""
        context = self.load.prompt_tokens + self.load.expected_new_tokens / 2
        per_group = engine.slots_per_group
        groups = min(engine.num_groups, -(-slots // per_group))
        seconds = tuple(
            self.decoder.round_seconds(stage, slots=per_group, context=context) for stage in engine.stages
        )
        if len(seconds) == 1:
            return groups * seconds[0]
        # The forward-only lane of a round, and the tokens' way back to the first stage.
        hidden = float(per_group * self.load.model.hidden_size * ELEMENT_BYTES[self.load.precision])
        pairs = itertools.pairwise(stage.cards[0] for stage in engine.stages)
        routes = [find_route(self.topology, a, b) for a, b in pairs]
        zeros = (0.0,) * len(seconds)
        times = StageTimes(
            forward_seconds=seconds,
            backward_seconds=zeros,
            send_activation_seconds=tuple(message_seconds(route, hidden) for route in routes),
            send_gradient_seconds=zeros[1:],
        )
        workers = one_worker_each(len(seconds))
        lane = simulate(forward_only(workers=workers, num_micro_batches=groups), times, workers=workers)
        return lane.step_seconds + sum(route.latency_seconds for route in routes)

    def prefill(self, engine: EnginePlan, prompts: int) -> float:
        """Seconds that so many prompts take from the rounds: the slowest stage's, group by group."""
        at_once, tokens = min(-(-engine.slots_per_group // self.load.group), prompts), self.load.prompt_tokens
        full, rest = divmod(prompts, at_once)

        def seconds(size: int) -> float:
            own = (self.decoder.prefill_seconds(s, tokens=tokens, prompts=size) for s in engine.stages)
            return max(own)

        return full * seconds(at_once) + (seconds(rest) if rest else 0.0)

    def samples_per_second(self, engine: EnginePlan) -> float:
        """With all slots in use: each is refilled when its sample ends."""
        return engine.slots / self.wave_seconds(engine, engine.slots)

    def wave_seconds(self, engine: EnginePlan, slots: int) -> float:
        """Seconds of `slots` mean samples that begin together; reading prompts draws their first tokens."""
        rounds = (self.load.expected_new_tokens - 1) * self.rounds(engine, slots)
        return rounds + self.prefill(engine, -(-slots // self.load.group))

    def batch_seconds(self, engine: EnginePlan, samples: int) -> float:
        """Seconds of samples on an engine that begins and ends empty: waves, rest, the longest's rounds."""
        if not samples:
            return 0.0
        full, rest = divmod(samples, engine.slots)
        seconds = full * self.wave_seconds(engine, engine.slots)
        if rest:
            seconds += self.wave_seconds(engine, rest)
        longest = self.load.new_tokens - self.load.expected_new_tokens
        return seconds + longest * self.rounds(engine, min(self.load.group, samples))


@dataclass(frozen=True)
class Generation:
    """The engines of a placement, or servers, and how the prompts are shared among them."""

    engines: tuple[EnginePlan, ...]
    rates: EngineRates
    given_shares: tuple[float, ...] | None = None
    """Of the prompts, where the policy's pipelines generate: those of the batch. None: by the rates."""
    served: tuple[float, ...] = ()
    """Tokens a second of servers that generate in place of engines, as measured."""

    @cached_property
    def samples_per_second(self) -> tuple[float, ...]:
        if self.served:
            return tuple(rate / self.rates.load.expected_new_tokens for rate in self.served)
        return tuple(self.rates.samples_per_second(engine) for engine in self.engines)

    @property
    def shares(self) -> tuple[float, ...]:
        if self.given_shares is not None:
            return self.given_shares
        total = math.fsum(self.samples_per_second)
        return tuple(rate / total for rate in self.samples_per_second)

    @property
    def steady_seconds(self) -> float:
        """Of a batch where the next one fills the slots that are free."""
        return self.rates.load.samples / math.fsum(self.samples_per_second)

    @property
    def batch_seconds(self) -> float:
        """Of a batch for which all engines begin empty, until the last sample ends."""
        return max(self.engine_batch_seconds)

    @cached_property
    def engine_batch_seconds(self) -> tuple[float, ...]:
        """The same of each engine or server, which gets whole prompts."""
        counts, group = deal(self.rates.load.prompts, self.shares), self.rates.load.group
        if self.served:
            return tuple(group * n / rate for n, rate in zip(counts, self.samples_per_second, strict=True))
        return tuple(
            self.rates.batch_seconds(e, group * n) for e, n in zip(self.engines, counts, strict=True)
        )


def deal(count: int, shares: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers that sum to `count`, as near to the shares of it as can be (largest remainders)."""
    exact = [count * share for share in shares]
    whole = [math.floor(value + 1e-9) for value in exact]
    order = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in order[: count - sum(whole)]:
        whole[i] += 1
    return tuple(whole)


# --- slots -----------------------------------------------------------------------------------------------


def with_slots(
    rates: EngineRates, stages: Sequence[DecodeStage], *, limit: int, held_bytes: Sequence[float] = ()
) -> EnginePlan | None:
    """An engine of these stages with as many slots as fit, at most `limit`; None if not one group fits.
    `held_bytes`, if given, is what each stage's cards hold of other phases, weights and reserve included."""
    group = rates.load.group
    rooms: list[tuple[float, Writing]] = []
    for s, stage in enumerate(stages):
        types = [rates.topology.types[card.type] for card in stage.cards]
        capacity = min(usable_bytes(device, rates.memory_fraction) for device in types)
        fixed = math.fsum(rates.decoder.fixed_bytes(stage).values())
        rooms.append((capacity - (held_bytes[s] if held_bytes else fixed), rates.writing(stage)))

    def fitting(groups: int) -> int:
        return min(most_slots(free, own, limit=limit, num_groups=groups) for free, own in rooms)

    groups = max(num_groups(len(stages), limit // group), 1)
    slots = fitting(groups)
    while 0 < slots // group < groups:
        # With fewer groups, each is larger, and holds more while it is run.
        groups = slots // group
        slots = fitting(groups)
    if slots < group:
        return None
    per_group = slots // groups // group * group
    return EnginePlan(stages=tuple(stages), slots_per_group=per_group, num_groups=groups)


def num_groups(num_stages: int, prompts: int) -> int:
    """Micro-batches of slots of an engine with slots for so many prompts."""
    return 1 if num_stages == 1 else min(GROUPS_PER_STAGE * num_stages, prompts)


def without_idle_slots(generation: Generation) -> Generation:
    """The engines with no more slots than their shares of a batch fill."""
    load = generation.rates.load
    prompts = deal(load.prompts, generation.shares)
    engines: list[EnginePlan] = []
    for engine, count in zip(generation.engines, prompts, strict=True):
        most = max(count, 1) * load.group
        if engine.slots > most:
            groups = min(engine.num_groups, max(count, 1))
            per_group = max(count // groups, 1) * load.group
            engine = replace(engine, slots_per_group=per_group, num_groups=groups)
        engines.append(engine)
    return Generation(tuple(engines), generation.rates)


def engine_memory(rates: EngineRates, engine: EnginePlan) -> list[dict[str, float]]:
    """Bytes on each card of each stage of an engine, by category."""
    slots, groups = engine.slots_per_group, engine.num_groups
    return [
        rates.decoder.bytes_on(stage, rates.writing(stage), slots=slots, num_groups=groups)
        for stage in engine.stages
    ]


# --- weights ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Holder:
    """A card, and the range of the model's parameters (of 1) that it holds a part of."""

    card: Card
    first: float
    last: float
    width: int
    """Cards that share the range."""


def sync_seconds(
    topology: Topology, sources: Sequence[Holder], targets: Sequence[Holder], weight_bytes: float
) -> float:
    """Seconds in which the targets get the weights that they hold: the busiest card or NIC decides. Each
    range comes from all sources that hold it, in equal parts, from those of the target's node if there are
    some. A card sends and receives at the rate of its route, a NIC carries what its node's cards do."""
    lines: dict[tuple[str, str], float] = defaultdict(float)
    latency = 0.0
    for target in targets:
        near = [source for source in sources if source.card.node == target.card.node]
        covered = _covered(near, target) if near else 0.0
        pool = near if covered >= target.last - target.first - 1e-9 else sources
        for source in pool:
            overlap = min(source.last, target.last) - max(source.first, target.first)
            if overlap <= 0:
                continue
            owners = _owners(pool, max(source.first, target.first), min(source.last, target.last))
            bytes_ = weight_bytes * overlap / target.width / owners
            route = find_route(topology, source.card, target.card)
            latency = max(latency, route.latency_seconds)
            seconds = bytes_ / route.stream_bytes_per_second + bytes_ * route.copy_seconds_per_byte
            lines["out", source.card.name] += seconds
            lines["in", target.card.name] += seconds
            if source.card.node != target.card.node and route.shared:
                lines["NIC out", source.card.node] += bytes_ / route.bytes_per_second
                lines["NIC in", target.card.node] += bytes_ / route.bytes_per_second
    return latency + max(lines.values(), default=0.0)


def _covered(holders: Sequence[Holder], target: Holder) -> float:
    """How much of the target's range these hold."""
    end, covered = target.first, 0.0
    for holder in sorted(holders, key=lambda holder: holder.first):
        first, last = max(holder.first, end), min(holder.last, target.last)
        if last > first:
            covered += last - first
            end = last
    return covered


def _owners(holders: Sequence[Holder], first: float, last: float) -> float:
    """How many hold a range, on average over it; each card of a group counts as its part."""
    total = math.fsum(max(min(h.last, last) - max(h.first, first), 0.0) for h in holders)
    return max(total / (last - first), 1.0)


def holders_of(model: ModelConfig, stages: Sequence[DecodeStage]) -> list[Holder]:
    """What a pipeline's cards hold of what is sent after each batch, as ranges of the model's parameters."""
    found: list[Holder] = []
    total = math.fsum(sent_parameters(model, stage) for stage in stages)
    first = 0.0
    for stage in stages:
        last = first + sent_parameters(model, stage) / total
        found += [Holder(card, first, last, stage.width) for card in stage.cards]
        first = last
    return found


def sent_parameters(model: ModelConfig, stage: DecodeStage) -> float:
    """Parameters of a stage that are sent to it after each batch: all, or those of adapters."""
    if model.lora is None:
        return held_parameters(model, stage)
    return stage.num_layers * model.adapter_parameters


def sync_bytes(model: ModelConfig, engines: Sequence[EnginePlan], precision: Precision) -> float:
    """Bytes that all engines get after each batch; what each card of a group holds whole counts for each."""
    e = ELEMENT_BYTES[precision]
    table = [p for p in layer_table(model) if is_trained(model, p.name)]
    whole = sum(p.size for p in table if p.sharding in ("whole", "head_norm") or is_whole_adapter(p))
    stages = [stage for engine in engines for stage in engine.stages]
    sent = (e * (sent_parameters(model, own) + (own.width - 1) * own.num_layers * whole) for own in stages)
    return float(sum(sent))
