"""Seconds that no plan of equal pipelines can beat.

Equal pipelines fix their number, and with it the batch and the cards of each; a time T is excluded if no
number of them, micro-batch size and schedule allows a pipeline that ends within T (`pipeline_bound`). With
prices p of the cards, L layers and N_t cards of type t for a pipeline, there is none if

    max over pipelines (layers - sum_t p_t cards_t) + sum_t p_t N_t < L

for any p >= 0. The prices are those of the best mixture of the pipelines found so far (column
generation); once
a mixture holds all layers no prices can exclude T.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.host import host_step_seconds
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.edge_bound import Edges, least_edges
from yuan_train.planner.search.pipeline_bound import Limits, PipelineBound, Schedules, replica_steps
from yuan_train.planner.search.shapes import Options
from yuan_train.planner.search.small_program import best_mixture
from yuan_train.planner.search.stage_parts import (
    Floats,
    Kind,
    StageParts,
    list_kinds,
    stage_parts,
    type_names,
)
from yuan_train.planner.search.stage_table import StageTable, stage_table

Memory = dict[object, Floats]
"""Prices that excluded a shorter time, by what they were for: a start for the next."""
MAX_STEPS = 40
"""Subgradient steps for a family of pipelines."""
Grid = tuple[int, float]
COARSE, FINE = (4, 1.25), (8, 1.1)
"""Cells and growth of `pipeline_bound.Limits`."""
WORK_PER_KIND = 20_000
"""Of a table of stages."""
HOST_SHARES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1.0)
"""Ends of ranges of the hosts' seconds, as shares of a step."""


@dataclass
class Work:
    """What is left of a budget, in units of about 10 ns: a count, not a clock."""

    left: float

    @property
    def is_over(self) -> bool:
        return self.left <= 0


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
    numbers: Floats
    """[T]: cards of each type."""
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
    sums: dict[tuple[int, str], Floats] = field(default_factory=dict[tuple[int, str], Floats])
    """Of layers; see `stage_parts`."""

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
        grid: Grid,
    ) -> Limits:
        """Of pipelines with so many micro-batches of a size, whose gradients have so many owners."""
        if size not in self.edges:
            self.edges[size] = least_edges(self.costs, self.cards, self.kinds, size)
        return Limits(
            compute_seconds=compute_seconds,
            num_micro_batches=num_micro_batches,
            schedules=schedules,
            edges=self.edges[size],
            half_layers=self.options.half_layers,
            most_cards=most_cards,
            reduce_seconds=reduce_seconds(self, table, schedules, owners),
            cells=grid[0],
            growth=grid[1],
        )


def make_setting(
    costs: Costs, cards: Sequence[Card], options: Options, scope: Scope, longest_seconds: float
) -> Setting:
    """The setting of a problem, with a plan of `longest_seconds`."""
    numbers = Counter(card.type for card in cards)
    return Setting(
        costs=costs,
        cards=cards,
        options=options,
        scope=scope,
        kinds=list_kinds(costs, cards, options, any_replicas=scope.any_replicas),
        numbers=np.array([float(numbers[name]) for name in type_names(cards)]),
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
    return sum(costs.problem.model.unit_parameters[1:]) / rate


def excludes_hosts(setting: Setting, excludes: Callable[[float, float], bool]) -> bool:
    """Whether `excludes` (least, most seconds that the hosts step) holds for all that hosts may step: all at
    once, else range by range."""
    if not setting.options.offload:
        return excludes(0.0, 0.0)
    longest = setting.longest_seconds
    ends = [0.0, *(longest * share for share in HOST_SHARES)]
    ranges = [(0.0, 0.0), *itertools.pairwise(ends)]
    return excludes(0.0, longest) or all(excludes(*one) for one in ranges)


def excludes_equal(
    setting: Setting, family: Family, seconds: float, memory: Memory, work: Work, *, grid: Grid = FINE
) -> bool:
    """Whether no plan of a family takes `seconds` or less."""
    count, size = family.count, family.size
    numbers = np.floor(setting.numbers / count)

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
            most_cards=int(numbers.sum()),
            owners=count,
            grid=grid,
        )
        return excludes(setting, table, limits, numbers, memory, (family, most, grid), work)

    return excludes_hosts(setting, excluded)


def reduce_seconds(setting: Setting, table: StageTable, schedules: Schedules, owners: int) -> Floats:
    """[N, X]: at least, of the gradients of a stage's layers over so many owners."""
    costs, cards, options = setting.costs, setting.cards, setting.options
    result = np.zeros(table.parts.parameters.shape)
    if costs.topology.measured or schedules == "any":
        # Virtual stages of a card end apart, and may reduce their gradients meanwhile.
        return result
    sizes = Counter((card.node, card.type) for card in cards)
    groups = costs.topology.groups
    for i, kind in enumerate(setting.kinds):
        count = owners * kind.fewest
        name = type_names(cards)[kind.type_index]
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


def excludes(
    setting: Setting,
    table: StageTable,
    limits: Limits,
    numbers: Floats,
    memory: Memory,
    key: object,
    work: Work,
) -> bool:
    """Whether no pipeline of these cards holds the model."""
    needed = setting.num_layers * (1 - 1e-9)
    density = densities(setting, table, limits)
    if density @ numbers < needed:
        return True
    bound = PipelineBound(table, setting.kinds, limits, len(numbers))
    work.left -= bound.work
    own = memory.get(key)
    if own is None or len(own) != len(bound.low):
        own = np.tile(np.maximum(density, 1e-12), (len(bound.low), 1))
    masters = [_Master(numbers, prices) for prices in own]
    buckets = np.arange(len(masters))
    for _ in range(MAX_STEPS):
        done = bound.work
        prices = np.array([masters[b].prices for b in buckets])
        best = bound.best(prices, np.ones(len(buckets)), buckets, needed - prices @ numbers)
        work.left -= bound.work - done
        left = best.worth >= needed - prices @ numbers
        if not left.any():
            memory[key] = np.array([master.prices for master in masters])
            return True
        if work.is_over:
            return False
        for i in np.flatnonzero(left).tolist():
            master = masters[int(buckets[i])]
            if master.add(float(best.worth[i]), float(best.layers[i]), best.cards[i]) >= needed:
                return False
        buckets = buckets[left]
    return False


@dataclass(eq=False)
class _Master:
    """The pipelines of a bucket that were found so far, and the prices to try next."""

    numbers: Floats
    prices: Floats
    columns: list[tuple[float, Floats]] = field(default_factory=list[tuple[float, Floats]])
    lowest: float = math.inf
    best: Floats | None = None
    """The prices that bound the layers lowest."""

    def add(self, worth: float, layers: float, cards: Floats) -> float:
        """With one more pipeline, worth so much at these prices; the most layers of any mixture."""
        total = worth + float(self.prices @ self.numbers)
        if total < self.lowest:
            self.lowest, self.best = total, self.prices
        self.columns.append((layers, cards))
        values = np.array([column[0] for column in self.columns])
        uses = np.array([column[1] for column in self.columns])
        most, prices = best_mixture(values, uses, self.numbers)
        # Between the two, or the prices swing from one end to the other.
        near = prices if self.best is None else (prices + self.best) / 2
        self.prices = near if total <= self.lowest else (prices + 3 * near) / 4
        return most


def densities(setting: Setting, table: StageTable, limits: Limits) -> Floats:
    """[T]: the most layers that a card of each type may hold."""
    result = np.zeros(len(setting.numbers))
    least = table.least_seconds.min(axis=0)
    for k, kind in enumerate(setting.kinds):
        for fewest, batches in replica_steps(kind, limits.num_micro_batches):
            fits = batches * least[k] <= limits.compute_seconds * (1 + 1e-9)
            held = float(table.layers[fits].max(initial=0.0)) / (kind.width * fewest)
            result[kind.type_index] = max(result[kind.type_index], held)
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
