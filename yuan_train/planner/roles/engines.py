"""Engines that generate: their slots, how fast they answer, and how long new weights take to reach them."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from yuan_train.config.architecture import is_whole_adapter
from yuan_train.config.cluster import Card
from yuan_train.config.devices import Precision, usable_bytes
from yuan_train.config.model import ModelConfig, is_trained, layer_table
from yuan_train.config.profile import GenerationProfile
from yuan_train.planner.costs.links import Topology, find_route, message_seconds
from yuan_train.planner.costs.workload import ELEMENT_BYTES
from yuan_train.planner.evaluate.simulator import StageTimes, simulate
from yuan_train.planner.roles import decode
from yuan_train.schedule.schedules import forward_only
from yuan_train.schedule.step import one_worker_each

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

    stages: tuple[decode.DecodeStage, ...]
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
    measured: decode.Measured = field(default_factory=dict[tuple[str, int], GenerationProfile])
    memory_fraction: float = 1.0
    """Of a card's memory, what an engine may fill."""

    @cached_property
    def decoder(self) -> decode.Decoder:
        """What the workload's model takes on a stage."""
        return decode.Decoder(self.topology, self.load.model, self.load.precision, self.measured)

    def writing(self, stage: decode.DecodeStage) -> decode.Writing:
        """What samples of the workload take of a stage's cards."""
        load = self.load
        return self.decoder.writing_on(stage, group=load.group, prompt=load.prompt_tokens, length=load.length)

    def are_measured(self, engine: EnginePlan) -> bool:
        """Whether a profile has the generation of all its cards."""
        return all(decode.profiles_of(self.measured, stage) for stage in engine.stages)

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
    rates: EngineRates, stages: Sequence[decode.DecodeStage], *, limit: int, held_bytes: Sequence[float] = ()
) -> EnginePlan | None:
    """An engine of these stages with as many slots as fit, at most `limit`; None if not one group fits.
    `held_bytes`, if given, is what each stage's cards hold of other phases, weights and reserve included."""
    group = rates.load.group
    rooms: list[tuple[float, decode.Writing]] = []
    for s, stage in enumerate(stages):
        types = [rates.topology.types[card.type] for card in stage.cards]
        capacity = min(usable_bytes(device, rates.memory_fraction) for device in types)
        fixed = math.fsum(rates.decoder.fixed_bytes(stage).values())
        rooms.append((capacity - (held_bytes[s] if held_bytes else fixed), rates.writing(stage)))

    def fitting(groups: int) -> int:
        return min(decode.most_slots(free, own, limit=limit, num_groups=groups) for free, own in rooms)

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


def holders_of(model: ModelConfig, stages: Sequence[decode.DecodeStage]) -> list[Holder]:
    """What a pipeline's cards hold of what is sent after each batch, as ranges of the model's parameters."""
    found: list[Holder] = []
    total = math.fsum(sent_parameters(model, stage) for stage in stages)
    first = 0.0
    for stage in stages:
        last = first + sent_parameters(model, stage) / total
        found += [Holder(card, first, last, stage.width) for card in stage.cards]
        first = last
    return found


def sent_parameters(model: ModelConfig, stage: decode.DecodeStage) -> float:
    """Parameters of a stage that are sent to it after each batch: all, or those of adapters."""
    if model.lora is None:
        return decode.held_parameters(model, stage)
    return stage.num_layers * model.adapter_parameters


def sync_bytes(model: ModelConfig, engines: Sequence[EnginePlan], precision: Precision) -> float:
    """Bytes that all engines get after each batch; what each card of a group holds whole counts for each."""
    e = ELEMENT_BYTES[precision]
    table = [p for p in layer_table(model) if is_trained(model, p.name)]
    whole = sum(p.size for p in table if p.sharding in ("whole", "head_norm") or is_whole_adapter(p))
    stages = [stage for engine in engines for stage in engine.stages]
    sent = (e * (sent_parameters(model, own) + (own.width - 1) * own.num_layers * whole) for own in stages)
    return float(sum(sent))
