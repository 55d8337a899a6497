"""Seconds that no plan of equal pipelines can beat.

Equal pipelines fix their number, and with it the batch and the cards of each; a time T is excluded if no
number of them, micro-batch size and schedule allows a pipeline that ends within T (`pipeline_bound`). With
prices p of the cards, L layers and N_t cards of type t for a pipeline, there is none if

    max over pipelines (layers - sum_t p_t cards_t) + sum_t p_t N_t < L

for any p >= 0; Polyak's subgradient steps look for such prices.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.host import host_step_seconds
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.pipeline_bound import Limits, PipelineBound, Schedules
from yuan_train.planner.search.shapes import Options
from yuan_train.planner.search.stage_table import (
    Floats,
    Kind,
    StageTable,
    list_kinds,
    stage_table,
    type_names,
)

Memory = dict[object, Floats]
"""Prices that excluded a shorter time, by what they were for: a start for the next."""
MAX_STEPS = 40
"""Subgradient steps for a family of pipelines."""
Grid = tuple[int, float]
COARSE, FINE = (4, 1.25), (8, 1.1)
"""Cells and growth of `pipeline_bound.Limits`."""
OVERSHOOT = 0.005
"""Steps aim at so much less than the layers that a pipeline must hold."""
HOST_SHARES = (1 / 16, 1 / 4, 1.0)
"""Ends of ranges of the hosts' seconds, as shares of a step."""


@dataclass
class Work:
    """What is left of a budget: cells of dynamic programming."""

    left: float

    @property
    def is_over(self) -> bool:
        return self.left <= 0


@dataclass(frozen=True, kw_only=True)
class Scope:
    """The plans that a bound covers."""

    schedules: tuple[ScheduleName, ...]
    sizes: tuple[int, ...]
    any_replicas: bool
    uneven_shares: bool
    """Whether unlike pipelines may hold unlike shares of the optimizer's state."""

    @property
    def largest_batch(self) -> float:
        """The largest micro-batch, in smallest ones; not whole if some size is no multiple of it."""
        least = min(self.sizes)
        if any(size % least for size in self.sizes):
            return math.ceil(max(self.sizes) / least) + 0.5
        return max(self.sizes) / least

    @property
    def together(self) -> Schedules:
        """The least class of schedules that has all of them."""
        if "interleaved_1f1b" in self.schedules:
            return "any"
        return "split" if "zero_bubble" in self.schedules else "plain"


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
    tables: dict[tuple[float, float], StageTable] = field(
        default_factory=dict[tuple[float, float], StageTable]
    )

    sums: dict[tuple[int, str], Floats] = field(default_factory=dict[tuple[int, str], Floats])
    """Of layers; see `stage_table`."""

    @property
    def num_layers(self) -> int:
        return self.costs.problem.model.num_layers

    @property
    def batch(self) -> int:
        """Sequences of a step, in micro-batches of the smallest size."""
        return self.costs.problem.global_batch_size // min(self.scope.sizes)

    def table(self, owner_share: float, host_seconds: float) -> StageTable:
        """Stages that hold such a share of their optimizer state; see `stage_table`."""
        key = (owner_share, host_seconds)
        if key not in self.tables:
            self.tables[key] = stage_table(
                self.costs,
                self.kinds,
                self.options,
                sizes=self.scope.sizes,
                owner_share=owner_share,
                host_seconds=host_seconds,
                most_in_flight=min(self.num_layers + 2, len(self.cards), 160),
                sums=self.sums,
            )
        return self.tables[key]


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
    """All cards step all parameters once, perfectly shared; each on itself or on its host."""
    precision = costs.problem.precision
    traffic = STATE_BYTES[precision].update_traffic
    rate = 0.0
    for card in cards:
        own = costs.of(card.type, options.micro_batch_sizes[0], "none").update_bytes_per_second / traffic
        host = 1.0 / host_step_seconds(costs.host_of(card), precision) if options.offload else 0.0
        rate += max(own, host)
    return sum(costs.problem.model.unit_parameters[1:]) / rate


def equal_counts(setting: Setting) -> Iterator[int]:
    """Numbers of equal pipelines that the options and the batch allow."""
    options, batch = setting.options, setting.costs.problem.global_batch_size
    for count in range(1, min(len(setting.cards), batch) + 1):
        batches = {batch // (count * size) for size in setting.scope.sizes if batch % (count * size) == 0}
        if options.num_micro_batches is not None:
            batches &= set(options.num_micro_batches)
        if batches and (options.pipelines is None or count in options.pipelines):
            yield count


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
    setting: Setting, count: int, seconds: float, memory: Memory, work: Work, *, grid: Grid = FINE
) -> bool:
    """Whether no plan of so many equal pipelines takes `seconds` or less."""
    numbers = np.floor(setting.numbers / count)

    def excluded(least: float, most: float) -> bool:
        compute = seconds - max(setting.update_seconds, least)
        if compute <= 0:
            return True
        table = setting.table(1.0 / count, most)
        limits = Limits(
            compute_seconds=compute,
            num_micro_batches=setting.batch // count,
            schedules=setting.scope.together,
            largest_batch=setting.scope.largest_batch,
            most_cards=int(numbers.sum()),
            reduce_seconds=reduce_seconds(setting, table, count),
            cells=grid[0],
            growth=grid[1],
        )
        return excludes(setting, table, limits, numbers, memory, (count, most, grid), work)

    return excludes_hosts(setting, excluded)


def reduce_seconds(setting: Setting, table: StageTable, owners: int) -> Floats:
    """[N, X]: at least, of the gradients of a stage's layers over so many owners."""
    costs, cards, options = setting.costs, setting.cards, setting.options
    result = np.zeros(table.parameters.shape)
    if costs.topology.measured or setting.scope.together == "any":
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
            num_bytes = table.parameters[i] * kind.width * costs.problem.reduce_bytes
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
    work.left -= 4 * bound.work
    scale = np.maximum(density, 1e-12)
    buckets = np.arange(len(bound.low))
    own = memory.get(key)
    if own is None or len(own) != len(buckets):
        own = np.tile(scale, (len(buckets), 1))
    own = own.copy()
    for _ in range(MAX_STEPS):
        done = bound.work
        best = bound.best(own[buckets], np.ones(len(buckets)), buckets)
        work.left -= bound.work - done
        total = best.worth + own[buckets] @ numbers
        left = total >= needed
        if not left.any():
            memory[key] = own
            return True
        buckets, total, cards, layers = buckets[left], total[left], best.cards[left], best.layers[left]
        possible = (layers >= needed) & (cards <= numbers).all(axis=1)
        step = (numbers - cards) * scale
        length = np.maximum((step * step).sum(axis=1), 1e-12)
        if possible.any() or work.is_over:
            return False
        change = ((total - (1 - OVERSHOOT) * needed) / length)[:, None] * step * scale
        own[buckets] = np.maximum(own[buckets] - change, 0.0)
    return False


def densities(setting: Setting, table: StageTable, limits: Limits) -> Floats:
    """[T]: the most layers that a card of each type may hold."""
    result = np.zeros(len(setting.numbers))
    batches = np.array([-(-limits.num_micro_batches // kind.most) for kind in setting.kinds])
    least = table.seconds[:, :, :, 0].min(axis=0)
    fits = np.isfinite(least) & (
        batches[:, None] * np.where(np.isfinite(least), least, 0.0) <= limits.compute_seconds * (1 + 1e-9)
    )
    held = np.where(fits, table.layers, 0.0).max(axis=1)
    for kind, layers in zip(setting.kinds, held, strict=True):
        result[kind.type_index] = max(result[kind.type_index], layers / kind.cards)
    return result
