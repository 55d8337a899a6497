"""What is given, and what every part of the model costs on every card, each looked up once."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card, Cluster
from yuan_train.config.devices import Precision
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import StagePlan
from yuan_train.config.profile import Profile
from yuan_train.config.run import Recompute
from yuan_train.planner.communication import ring_seconds
from yuan_train.planner.timing import CardCosts, UnitCost, card_costs, check_profile
from yuan_train.planner.topology import Topology, make_topology
from yuan_train.planner.workload import ELEMENT_BYTES

Replica = tuple[Card, ...]
"""The cards of a tensor-parallel group, in order."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What is given: cards, model, batch, and how the numbers are known."""

    cluster: Cluster
    model: ModelConfig
    sequence_length: int
    global_batch_size: int
    precision: Precision
    profile: Profile | None = None
    overlap: bool = True

    @property
    def is_schema_profile(self) -> bool:
        """Whether another tool's profile gives the numbers, which knows nothing of the optimizer's step."""
        return self.profile is not None and self.profile.is_whole


@dataclass(frozen=True)
class Costs:
    """Card costs and links of a setting, each looked up once."""

    setting: Setting
    topology: Topology
    cards: dict[str, Card]
    known: dict[tuple[str, int, Recompute, int], CardCosts]
    """What has been looked up."""
    groups: dict[tuple[object, ...], CardCosts]
    """The same for tensor-parallel groups, their collectives counted."""

    def of(
        self, type_name: str, micro_batch_size: int, recompute: Recompute, tensor_parallel: int = 1
    ) -> CardCosts:
        """Every unit's cost on a type of card, collectives not counted."""
        key = (type_name, micro_batch_size, recompute, tensor_parallel)
        if key not in self.known:
            self.known[key] = card_costs(
                self.setting.model,
                sequence_length=self.setting.sequence_length,
                micro_batch_size=micro_batch_size,
                precision=self.setting.precision,
                recompute=recompute,
                type_name=type_name,
                device=self.setting.cluster.device_type(type_name),
                profile=self.setting.profile,
                tensor_parallel=tensor_parallel,
            )
        return self.known[key]

    def of_replica(self, replica: Replica, micro_batch_size: int, recompute: Recompute) -> CardCosts:
        """Every unit's cost on each card of a group: the slowest card's, and the collectives."""
        width = len(replica)
        types = tuple(dict.fromkeys(card.type for card in replica))
        if width == 1:
            return self.of(types[0], micro_batch_size, recompute)
        where = replica if self.topology.measured else tuple(card.node for card in replica)
        place = (where, types, micro_batch_size, recompute)
        if place not in self.groups:
            self.groups[place] = self._of_group(replica, types, micro_batch_size, recompute)
        return self.groups[place]

    def _of_group(
        self, replica: Replica, types: tuple[str, ...], micro_batch_size: int, recompute: Recompute
    ) -> CardCosts:
        """One object for all groups of these types with links as fast."""
        width = len(replica)
        ring = ring_seconds(self.topology, replica, self.hidden_bytes(micro_batch_size))
        key = (types, width, micro_batch_size, recompute, ring)
        if key not in self.groups:
            parts = [self.of(name, micro_batch_size, recompute, width) for name in types]
            slowest = max(parts, key=lambda part: sum(u.forward_seconds for u in part.units))
            self.groups[key] = replace(slowest, units=tuple(_with_sums(u, ring) for u in slowest.units))
        return self.groups[key]

    def of_stage(self, replica: Replica, micro_batch_size: int, stage: StagePlan) -> CardCosts:
        """The same with the recompute of a stage: of all its layers, or of the first ones."""
        part = self.of_replica(replica, micro_batch_size, stage.recompute)
        if stage.num_recomputed in (0, stage.num_layers):
            return part
        plain = self.of_replica(replica, micro_batch_size, "none")
        # Units count the embedding before the layers.
        first_kept = 1 + stage.layers[0] + stage.num_recomputed
        return replace(
            part,
            units=(*part.units[:first_kept], *plain.units[first_kept:]),
            source=part.source if plain.source == "measured" else "estimated",
        )

    def hidden_bytes(self, micro_batch_size: int) -> float:
        """One hidden state, as it goes between stages and inside a tensor-parallel group."""
        setting = self.setting
        tokens = micro_batch_size * setting.sequence_length
        return float(tokens * setting.model.hidden_size * ELEMENT_BYTES[setting.precision])


def _with_sums(unit: UnitCost, ring_seconds: float) -> UnitCost:
    return replace(
        unit,
        forward_seconds=unit.forward_seconds + unit.forward_collectives * ring_seconds,
        backward_seconds=unit.backward_seconds + unit.backward_collectives * ring_seconds,
    )


def make_costs(setting: Setting) -> Costs:
    """Raises ConfigError if the profile does not belong to the setting."""
    if setting.profile is not None:
        check_profile(
            setting.profile,
            setting.model,
            sequence_length=setting.sequence_length,
            precision=setting.precision,
        )
        setting = replace(setting, cluster=_with_measured_reserve(setting.cluster, setting.profile))
    cards = {card.name: card for card in setting.cluster.cards}
    return Costs(setting, make_topology(setting.cluster, setting.profile), cards, {}, {})


def _with_measured_reserve(cluster: Cluster, profile: Profile) -> Cluster:
    """The cluster, its cards' `reserved` as the profile has it where it was measured."""
    types = dict(cluster.device_types)
    for name in {group.device for group in cluster.nodes}:
        measured = profile.reserved_bytes(name)
        if measured is not None:
            types[name] = replace(cluster.device_type(name), reserved=math.ceil(measured))
    return replace(cluster, device_types=types)


def stage_units(plan_stage: StagePlan, num_layers: int) -> slice:
    """The stage's units among embedding, layers, head."""
    first, end = plan_stage.layers
    return slice(0 if plan_stage.embedding else first + 1, num_layers + 2 if plan_stage.head else end + 1)
