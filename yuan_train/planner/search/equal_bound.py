"""Seconds that no plan of equal pipelines can beat.

Equal pipelines fix their number, and with it the batch and the cards of each; a time T is excluded if no
number of them, micro-batch size and schedule allows a pipeline that ends within T (`mixtures`).
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.host import host_step_seconds
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.card_limits import CardLimits, card_limits
from yuan_train.planner.search.edge_bound import Edges, least_edges
from yuan_train.planner.search.mixtures import Memory, Stages, Work, excludes_mixtures
from yuan_train.planner.search.pipeline_bound import stage_ways
from yuan_train.planner.search.shapes import Options
from yuan_train.planner.search.stage_moves import Limits, Schedules, StageWays
from yuan_train.planner.search.stage_parts import (
    Floats,
    Kind,
    StageParts,
    list_kinds,
    stage_parts,
    type_names,
)
from yuan_train.planner.search.stage_table import StageTable, stage_table

WORK_PER_KIND = 20_000
"""Of a table of stages."""
HOST_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1.0)
"""Ends of ranges of the hosts' seconds, as shares of a step."""


CLASSES: dict[ScheduleName, Schedules] = {
    "1f1b": "plain",
    "gpipe": "plain",
    "zero_bubble": "split",
    "interleaved_1f1b": "any",
}


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The plans that a bound covers."""

    schedules: tuple[ScheduleName, ...]
    sizes: tuple[int, ...]
    any_replicas: bool
    uneven_shares: bool
    """Whether unlike pipelines may hold unlike shares of the optimizer's state."""

    @property
    def classes(self) -> tuple[Schedules, ...]:
        """The classes of its schedules."""
        return tuple(dict.fromkeys(CLASSES[name] for name in self.schedules))


@dataclass(frozen=True)
class Family:
    """Plans of so many equal pipelines, of one micro-batch size and one class of schedules."""

    count: int
    size: int
    schedules: Schedules


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """What all bounds of a problem share."""

    costs: Costs
    cards: Sequence[Card]
    options: Options
    scope: Scope
    kinds: Sequence[Kind]
    card_limits: CardLimits
    longest_seconds: float
    """A step that is known to be possible."""
    update_seconds: float
    """Of the optimizer's step, at least."""
    tables: dict[tuple[int, float, float], StageTable] = field(
        default_factory=dict[tuple[int, float, float], StageTable]
    )
    parts: dict[int, StageParts] = field(default_factory=dict[int, StageParts])
    """By micro-batch size."""
    edges: dict[int, Edges] = field(default_factory=dict[int, Edges])
    """By micro-batch size."""
    known_ways: dict[tuple[int, bool], StageWays] = field(default_factory=dict[tuple[int, bool], StageWays])
    """By micro-batches, and whether of one replica only."""
    sums: dict[tuple[int, str], Floats] = field(default_factory=dict[tuple[int, str], Floats])
    """Of layers; see `stage_parts`."""
    reductions: dict[tuple[int, Schedules, int], Floats] = field(
        default_factory=dict[tuple[int, Schedules, int], Floats]
    )
    """By micro-batch size, schedules and owners; see `reduce_seconds`."""

    @property
    def num_layers(self) -> int:
        return self.costs.problem.model.num_layers

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.costs.problem.global_batch_size

    def table(self, size: int, owner_share: float, host_seconds: float, work: Work) -> StageTable:
        """Stages that hold such a share of their optimizer state; see `stage_table`."""
        key = (size, owner_share, host_seconds)
        if size not in self.parts:
            self.parts[size] = stage_parts(self.costs, self.kinds, self.options, size=size, sums=self.sums)
        if key not in self.tables:
            work.left -= WORK_PER_KIND * len(self.kinds)
            self.tables[key] = stage_table(
                self.costs,
                self.kinds,
                self.options,
                self.parts[size],
                owner_share=owner_share,
                host_seconds=host_seconds,
                most_in_flight=min(self.num_layers + 2, len(self.cards), 160),
            )
        return self.tables[key]

    def limits(
        self,
        table: StageTable,
        size: int,
        schedules: Schedules,
        *,
        compute_seconds: float,
        num_micro_batches: int,
        most_cards: int,
        owners: int,
    ) -> Limits:
        """Of pipelines with so many micro-batches of a size, whose gradients have so many owners."""
        if size not in self.edges:
            self.edges[size] = least_edges(self.costs, self.cards, self.kinds, size)
        key = (size, schedules, owners)
        if key not in self.reductions:
            self.reductions[key] = reduce_seconds(self, table, schedules, owners)
        return Limits(
            compute_seconds=compute_seconds,
            num_micro_batches=num_micro_batches,
            schedules=schedules,
            edges=self.edges[size],
            half_layers=self.options.half_layers,
            most_cards=most_cards,
            reduce_seconds=self.reductions[key],
        )

    def ways(self, limits: Limits) -> StageWays:
        """The stages that are told apart."""
        key = limits.num_micro_batches, limits.is_looped
        if key not in self.known_ways:
            self.known_ways[key] = stage_ways(self.kinds, self.card_limits, key[0], one=key[1])
        return self.known_ways[key]


def make_setting(
    costs: Costs, cards: Sequence[Card], options: Options, scope: Scope, longest_seconds: float
) -> Setting:
    """The setting of a problem, with a plan of `longest_seconds`."""
    return Setting(
        costs=costs,
        cards=cards,
        options=options,
        scope=scope,
        kinds=list_kinds(costs, cards, options, any_replicas=scope.any_replicas),
        card_limits=card_limits(cards, options.tensor),
        longest_seconds=longest_seconds,
        update_seconds=_update_seconds(costs, cards, options),
    )


def _update_seconds(costs: Costs, cards: Sequence[Card], options: Options) -> float:
    """All cards step all parameters once, perfectly shared; each on itself and on its host, side by side."""
    precision = costs.problem.precision
    traffic = STATE_BYTES[precision].update_traffic
    rate, has_host = 0.0, options.offload or options.offload_parameters
    for card in cards:
        own = costs.of(card.type, options.micro_batch_sizes[0], "none").update_bytes_per_second / traffic
        host = 1.0 / host_step_seconds(costs.host_of(card), precision) if has_host else 0.0
        rate += own + host
    return sum(costs.problem.model.trained_unit_parameters[1:]) / rate


def excludes_hosts(
    setting: Setting, excludes: Callable[[float, float], bool], *, in_parts: bool = True
) -> bool:
    """Whether `excludes` (least, most seconds that the hosts step) holds for all that hosts may step: all at
    once, else (`in_parts`) range by range."""
    if not setting.options.offload:
        return excludes(0.0, 0.0)
    longest = setting.longest_seconds
    ends = [0.0, *(longest * share for share in HOST_SHARES)]
    ranges = [(0.0, 0.0), *itertools.pairwise(ends)]
    return excludes(0.0, longest) or (in_parts and all(excludes(*one) for one in ranges))


def excludes_equal(setting: Setting, family: Family, seconds: float, memory: Memory, work: Work) -> bool:
    """Whether no plan of a family takes `seconds` or less."""
    count, size = family.count, family.size
    limits_of_cards = setting.card_limits
    numbers = limits_of_cards.of_each(count)

    def excluded(least: float, most: float) -> bool:
        compute = seconds - max(setting.update_seconds, least)
        if compute <= 0:
            return True
        table = setting.table(size, 1.0 / count, most, work)
        limits = setting.limits(
            table,
            size,
            family.schedules,
            compute_seconds=compute,
            num_micro_batches=setting.batch // (count * size),
            most_cards=int(limits_of_cards.total(numbers)),
            owners=count,
        )
        stages = Stages(table, setting.kinds, setting.ways(limits), limits, limits_of_cards)
        return excludes_mixtures(stages, numbers, memory, family, work)

    return excludes_hosts(setting, excluded)


def reduce_seconds(setting: Setting, table: StageTable, schedules: Schedules, owners: int) -> Floats:
    """[N, X]: at least, of the gradients of a stage's layers over so many owners."""
    costs, cards, options = setting.costs, setting.cards, setting.options
    result = np.zeros(table.parts.parameters.shape)
    if costs.topology.measured or schedules == "any":
        # Virtual stages of a card end apart, and may reduce their gradients meanwhile.
        return result
    sizes, names = Counter((card.node, card.type) for card in cards), type_names(cards)
    groups = costs.topology.groups
    for i, kind in enumerate(setting.kinds):
        count = owners * kind.fewest
        name = names[kind.type_index]
        own = [(node, size) for (node, kind_name), size in sizes.items() if kind_name == name]
        rates = [link.bandwidth * kind.width for link in setting.costs.problem.cluster.links]
        for node, size in own:
            group = groups[node]
            inside = group.link.bandwidth * kind.width if group.link else 0.0
            across = group.network.bandwidth if group.network else 0.0
            rates.append(max(inside, across) if count * kind.width <= size else across)
        if count > 1 and max(rates) > 0:
            num_bytes = table.parts.parameters[i] * kind.width * costs.problem.reduce_bytes
            rounds = (count - 1) / count * (1 if any(options.sharded) else 2)
            result[i] = rounds * num_bytes / max(rates)
    return result


def equal_families(setting: Setting) -> list[Family]:
    """The families that the options and the batch allow, those of few pipelines first."""
    options, batch = setting.options, setting.batch
    found: list[Family] = []
    counts = range(1, min(len(setting.cards), batch) + 1)
    for count in (n for n in counts if options.pipelines is None or n in options.pipelines):
        for size in setting.scope.sizes:
            number, rest = divmod(batch, count * size)
            if not rest and (options.num_micro_batches is None or number in options.num_micro_batches):
                found += [Family(count, size, schedules) for schedules in setting.scope.classes]
    return found
