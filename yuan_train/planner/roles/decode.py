"""Seconds and bytes of generation: a round draws one token for each of the slots of a stage.

A round of b slots whose contexts are l tokens long, on w cards that share each layer:

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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from yuan_train.config.cluster import Card
from yuan_train.config.devices import Precision
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import StagePlan
from yuan_train.config.profile import GenerationProfile, Profile
from yuan_train.planner.costs.links import Topology, allreduce_seconds
from yuan_train.planner.costs.unit_costs import MEMORY_EFFICIENCY, UNIT_OVERHEAD_SECONDS, matrix_efficiency
from yuan_train.planner.costs.workload import ELEMENT_BYTES, TensorGroup, TokenRows, model_work
from yuan_train.planner.evaluate.stage_cost import StageCost

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
