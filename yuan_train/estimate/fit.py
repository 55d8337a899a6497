"""Whether reinforcement learning fits a card, the largest group or answer that does, and what would help."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

from yuan_train.config.architecture import adaptable
from yuan_train.config.devices import CATALOGUE, MEMORY_FRACTION, DeviceType, usable_bytes
from yuan_train.config.model import LoraConfig, ModelConfig
from yuan_train.config.run import Recompute
from yuan_train.estimate.memory import LORA_RANK, Method, PhaseBytes, Samples, trl_memory, yuan_memory
from yuan_train.estimate.shape import ModelShape

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
    samples: Samples
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
    return yuan_memory(
        case.model if case.method == "full" else with_adapters(case.model),
        case.samples,
        case.device,
        # The same bytes; cards from before bf16 train in fp16.
        precision="bf16" if case.device.bf16 else "fp16",
        recompute=case.recompute,
        optimizer_offload=case.optimizer_offload,
        critic=case.critic,
        reward_model=case.reward_model,
    )


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
