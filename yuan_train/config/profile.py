"""Profiles: seconds and bytes measured by `yuan-train profile` or by another tool (an external profile)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import Ge, Gt, Le, MinLen

from yuan_train.config.cluster import Cluster
from yuan_train.config.devices import find_card
from yuan_train.config.errors import ConfigError, Violation
from yuan_train.config.load import build, read_document
from yuan_train.config.run import Recompute

Seconds = Annotated[float, Ge(0), Le(1e15)]
Bytes = Annotated[float, Ge(0), Le(1e18)]
Rate = Annotated[float, Ge(1), Le(1e18)]
"""Bytes a second."""


@dataclass(frozen=True, kw_only=True)
class UnitProfile:
    """One unit of the model (embedding, layer or head): seconds and bytes of one micro-batch on one card."""

    forward_seconds: Seconds
    backward_seconds: Seconds
    state_bytes: Bytes
    """Weights, gradients and optimizer state that stay on the card."""
    activation_bytes: Bytes
    """Kept per micro-batch from its forward to its backward."""
    output_bytes: Bytes
    """Of the message to the next stage."""
    transient_bytes: Bytes | None = None
    """Held in addition at the peak of forward or backward. None, in external profiles: the bytes above are
    exact; a stage takes reserved + states + activations times micro-batches in flight."""


@dataclass(frozen=True, kw_only=True)
class StageStart:
    """What a stage takes for each micro-batch besides its units, however many layers it has: caches that have
    gone cold since its last work, and the first launch on a card."""

    forward_seconds: Seconds = 0.0
    backward_seconds: Seconds = 0.0


@dataclass(frozen=True, kw_only=True)
class ProfileEntry:
    """The units of a model on one type of card."""

    device_type: str
    tensor_parallel: Annotated[int, Gt(0)] = 1
    micro_batch_size: Annotated[int, Gt(0)] = 1
    recompute: Recompute = "none"
    embedding: UnitProfile
    layers: Annotated[tuple[UnitProfile, ...], MinLen(1)]
    """One per layer, or one for all layers."""
    head: UnitProfile
    start: StageStart = StageStart()
    """Of a stage, which its units' seconds do not include; nothing, in profiles that do not measure it."""
    bare_layer: UnitProfile | None = None
    """A layer without any of its experts, as a card has it that shares them and holds none; None: estimated
    from the others."""
    reserved_bytes: Bytes | None = None
    """What a process holds before it creates a model; None: `reserved` of the cluster file."""

    @property
    def is_whole(self) -> bool:
        """Whether its bytes are exact, as in an external profile: no unit has `transient_bytes`."""
        return all(unit.transient_bytes is None for unit in (self.embedding, *self.layers, self.head))

    def layer(self, index: int) -> UnitProfile:
        """The profile of layer `index`."""
        return self.layers[0] if len(self.layers) == 1 else self.layers[index]


@dataclass(frozen=True, kw_only=True)
class LinkProfile:
    """One direction between two cards (`a100-0/0`): seconds by size of message."""

    from_: str
    to: str
    message_bytes: Annotated[tuple[Bytes, ...], MinLen(1)]
    seconds: Annotated[tuple[Seconds, ...], MinLen(1)]
    compute_seconds_per_byte: Seconds = 0.0
    """What a byte that a reduction sends over it takes from the compute of either card beside it: copies and
    sums run on the same cores, or on multiprocessors of the card."""
    like: tuple[str, ...] | None = None
    """The measured pairs of cards (`a100-0/0 - a100-0/7`) whose mean this is; None: it is measured itself."""


@dataclass(frozen=True, kw_only=True)
class NodeLinkProfile:
    """One direction between two nodes: what all cards of one send at once to those of the other."""

    from_: str
    to: str
    bytes_per_second: Rate
    """Of all messages together. One alone may be slower, where it does not fill the NIC."""
    like: tuple[str, ...] | None = None
    """The measured pairs of nodes (`a100-0 - a100-7`) whose mean this is; None: it is measured itself."""


@dataclass(frozen=True, kw_only=True)
class HostProfile:
    """What a card of a type gets of its host while all cards of the node are at it."""

    device_type: str
    host_link_down: Rate
    """From the card to its host, while as much goes up."""
    host_link_up: Rate
    host_step_bytes_per_second: Rate
    """Of what AdamW's step moves in the host's memory."""


@dataclass(frozen=True, kw_only=True)
class GenerationProfile:
    """What an engine of a run of reinforcement learning takes on a type of card.

    A round draws a token for each of its slots; a reading takes some prompts in, and draws the first token of
    the `group` answers to each.
    """

    device_type: str
    tensor_parallel: Annotated[int, Gt(0)] = 1
    group: Annotated[int, Gt(0)]
    prompt_tokens: Annotated[int, Gt(0)]
    """Of each prompt that was read."""
    slots: Annotated[tuple[Annotated[int, Gt(0)], ...], MinLen(1)]
    contexts: Annotated[tuple[Annotated[float, Gt(0), Le(1e18)], ...], MinLen(1)]
    """Mean tokens before the one that is drawn."""
    layer_seconds: tuple[tuple[Seconds, ...], ...]
    """Of a layer in a round: a row for each number of slots, in it one for each context."""
    engine_seconds: tuple[Seconds, ...]
    """By slots: of the embedding in a round, and of what the engine does beside the model."""
    head_seconds: tuple[Seconds, ...]
    """By slots: of the last norm, the logits and the draw."""
    prompts: Annotated[tuple[Annotated[int, Gt(0)], ...], MinLen(1)]
    prompt_layer_seconds: tuple[Seconds, ...]
    """By prompts: of a layer in a reading, and of copying what it has to the slots."""
    prompt_engine_seconds: tuple[Seconds, ...]
    """By prompts: of the embedding in a reading, and of what the engine does beside the model."""


@dataclass(frozen=True, kw_only=True)
class BatchProfile:
    """What a run of reinforcement learning does with a batch beside its model, on the policy's rank 0."""

    samples: Annotated[int, Gt(0)]
    scoring_seconds: Seconds
    """Of the reward functions' processes, for answers of random tokens."""
    packing_seconds: Seconds
    """Until the rows that are trained are made of the answers."""


Named = TypeVar("Named", ProfileEntry, HostProfile, GenerationProfile)


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Measurements of cards and links for one model shape and sequence length."""

    version: int = 1
    source: str = "measured"
    sequence_length: Annotated[int, Gt(0)]
    model: str | None = None
    machine: str | None = None
    precision: str | None = None
    compile: bool = False
    """Whether the layers were compiled (`train.compile`)."""
    entries: tuple[ProfileEntry, ...] = ()
    links: tuple[LinkProfile, ...] = ()
    node_links: tuple[NodeLinkProfile, ...] = ()
    hosts: tuple[HostProfile, ...] = ()
    """One for each type of card: the slowest that was measured."""
    generation: tuple[GenerationProfile, ...] = ()
    """One for each type of card and width; of a run of reinforcement learning."""
    batch: BatchProfile | None = None
    """Of a run of reinforcement learning."""

    @property
    def is_whole(self) -> bool:
        """Whether the bytes of all entries are exact; such a profile does not cover the optimizer step."""
        return bool(self.entries) and all(entry.is_whole for entry in self.entries)

    def host(self, device_type: str) -> HostProfile | None:
        """What such a card gets of its host; None if not measured."""
        return next((host for host in self.hosts if host.device_type == device_type), None)

    def reserved_bytes(self, device_type: str) -> float | None:
        """Most bytes that a process on such a card held before any model; None if not measured."""
        known = [
            entry.reserved_bytes
            for entry in self.entries
            if entry.device_type == device_type and entry.reserved_bytes is not None
        ]
        return max(known, default=None)


def for_cluster(profile: Profile, cluster: Cluster) -> Profile:
    """The profile with its cards called as the cluster calls them: a driver's name, or another spelling, is
    replaced by the catalogue's if the cluster has such cards.

    Raises ConfigError if it has entries, but of no type of card that the cluster has.
    """
    types = dict.fromkeys(card.type for card in cluster.cards)

    def named(own: Named) -> Named:
        known = None if own.device_type in types else find_card(own.device_type)
        return replace(own, device_type=known) if known in types else own

    found = replace(
        profile,
        entries=tuple(map(named, profile.entries)),
        hosts=tuple(map(named, profile.hosts)),
        generation=tuple(map(named, profile.generation)),
    )
    measured = dict.fromkeys(entry.device_type for entry in found.entries)
    if measured and not measured.keys() & types.keys():
        raise ConfigError(
            f"profile: measured on {', '.join(measured)}, but cluster {cluster.name!r} has "
            f"{', '.join(types)}: all times would be estimates. Measure these cards (yuan-train profile "
            "--device-type NAME gives a card the cluster's name for it), or plan without --profile"
        )
    return found


def validate_profile(profile: Profile) -> Iterator[Violation]:
    """Yield the violated constraints between the parts of a profile."""
    if profile.version != 1:
        yield Violation(("version",), f"wanted 1, got {profile.version}; measure again with this release")
    seen: set[tuple[object, ...]] = set()
    for i, entry in enumerate(profile.entries):
        key = (entry.device_type, entry.tensor_parallel, entry.micro_batch_size, entry.recompute)
        if key in seen:
            yield Violation(("entries", i), "measured twice: " + ", ".join(map(str, key)) + "; keep one")
        seen.add(key)
    for i, link in enumerate(profile.links):
        if len(link.message_bytes) != len(link.seconds):
            yield Violation(
                ("links", i),
                f"{len(link.message_bytes)} message sizes but {len(link.seconds)} times; give one per size",
            )
        if list(link.message_bytes) != sorted(set(link.message_bytes)):
            yield Violation(("links", i, "message_bytes"), "sizes must increase")
    yield from _generation_violations(profile)


def _generation_violations(profile: Profile) -> Iterator[Violation]:
    seen: set[tuple[str, int]] = set()
    for i, own in enumerate(profile.generation):
        key = (own.device_type, own.tensor_parallel)
        if key in seen:
            yield Violation(("generation", i), f"measured twice: {key[0]}, {key[1]}; keep one")
        seen.add(key)
        for name in ("slots", "contexts", "prompts"):
            numbers = list(getattr(own, name))
            if numbers != sorted(set(numbers)):
                yield Violation(("generation", i, name), "numbers must increase")
        counts = dict.fromkeys(("layer_seconds", "engine_seconds", "head_seconds"), "slots")
        counts |= dict.fromkeys(("prompt_layer_seconds", "prompt_engine_seconds"), "prompts")
        for name, of in counts.items():
            have, wanted = len(getattr(own, name)), len(getattr(own, of))
            if have != wanted:
                yield Violation(("generation", i, name), f"{have}, but {wanted} {of}; give one for each")
        for j, row in enumerate(own.layer_seconds):
            if len(row) != len(own.contexts):
                words = f"{len(row)} times, but {len(own.contexts)} contexts"
                yield Violation(("generation", i, "layer_seconds", j), f"{words}; give one for each")


def load_profile(path: str | Path) -> Profile:
    """Read a profile (JSON). Raises ConfigError with every violation."""
    return build(read_document(path, "Profile"), Profile, validate=validate_profile)


L = TypeVar("L", LinkProfile, NodeLinkProfile)


def merge_profiles(named: Sequence[tuple[str, Profile]]) -> Profile:
    """All entries and links of the profiles, the first one of each key. Raises ConfigError unless length,
    precision, model and source agree."""
    (first_name, first), *others = named
    entries: dict[tuple[object, ...], ProfileEntry] = {}
    hosts: dict[str, HostProfile] = {}
    generation: dict[tuple[str, int], GenerationProfile] = {}
    links: dict[tuple[str, str], LinkProfile] = {}
    node_links: dict[tuple[str, str], NodeLinkProfile] = {}
    for name, profile in [(first_name, first), *others]:
        for what in ("sequence_length", "precision", "compile", "model", "source"):
            value, wanted = getattr(profile, what), getattr(first, what)
            if value != wanted:
                raise ConfigError(
                    f"{name}: {what} {value!r}, but {first_name} has {wanted!r}; merge profiles of one run"
                )
        for entry in profile.entries:
            key = (entry.device_type, entry.tensor_parallel, entry.micro_batch_size, entry.recompute)
            entries.setdefault(key, entry)
        for host in profile.hosts:
            # All cards of a type must have what the planner counts on.
            hosts[host.device_type] = min(
                (host, hosts.get(host.device_type, host)),
                key=lambda own: (min(own.host_link_down, own.host_link_up), own.host_step_bytes_per_second),
            )
        for own in profile.generation:
            generation.setdefault((own.device_type, own.tensor_parallel), own)
        for link in profile.links:
            _take(links, (link.from_, link.to), link)
        for node_link in profile.node_links:
            _take(node_links, (node_link.from_, node_link.to), node_link)
    machines = dict.fromkeys(profile.machine for _, profile in named if profile.machine)
    return replace(
        first,
        machine=" and ".join(machines) or None,
        entries=tuple(entries.values()),
        links=tuple(links.values()),
        node_links=tuple(node_links.values()),
        hosts=tuple(hosts.values()),
        generation=tuple(generation.values()),
        batch=next((profile.batch for _, profile in named if profile.batch is not None), None),
    )


def _take(links: dict[tuple[str, str], L], ends: tuple[str, str], link: L) -> None:
    """Keep the first measured link, or else the first that others stand for."""
    known = links.get(ends)
    if known is None or (known.like is not None and link.like is None):
        links[ends] = link


def read_profiles(paths: str | None, cluster: Cluster) -> Profile | None:
    """The profiles of a comma-separated list of files, merged, with the cluster's names of cards; None
    without a list.

    Raises ConfigError if they are not of the same run, or of no card of the cluster.
    """
    if not paths:
        return None
    return merge_profiles([(path, for_cluster(load_profile(path), cluster)) for path in paths.split(",")])
