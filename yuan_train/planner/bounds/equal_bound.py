"""Seconds that no plan of equal pipelines can beat.

Equal pipelines fix their number, and with it the batch and the cards of each; a time T is excluded if no
number of them, micro-batch size and schedule allows a pipeline that ends within T (`pipeline_bound`). With
prices p of the cards, L layers and N_t cards of type t for a pipeline, there is none if

    max over pipelines (layers - sum_t p_t cards_t) + sum_t p_t N_t < L

for any p >= 0; Polyak's subgradient steps look for such prices.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.planner.bounds.pipeline_bound import Best, Limits, Mode, PipelineBound
from yuan_train.planner.bounds.stage_table import (
    MIDDLE,
    Floats,
    Kind,
    StageTable,
    list_kinds,
    stage_table,
    type_names,
)
from yuan_train.planner.costs.host import host_step_seconds
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.shapes import Options

MAX_STEPS = 40
"""Subgradient steps for a family of pipelines."""
HOST_STEPS = 6
"""Ranges of the hosts' seconds, each twice as long as the one before."""


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

    modes: tuple[Mode, ...]
    sizes: tuple[int, ...]
    any_replicas: bool


@dataclass(frozen=True, kw_only=True)
class Family:
    """Equal pipelines of one number, micro-batch size and schedule."""

    num_pipelines: int
    size: int
    mode: Mode


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

    sums: dict[tuple[int, str], Floats] = field(default_factory=dict[tuple[int, str], Floats])
    """Of layers; see `stage_table`."""

    @property
    def num_layers(self) -> int:
        return self.costs.problem.model.num_layers

    def table(self, size: int, owner_share: float, host_seconds: float) -> StageTable:
        key = (size, owner_share, host_seconds)
        if key not in self.tables:
            self.tables[key] = stage_table(
                self.costs,
                self.kinds,
                self.options,
                size=size,
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


def families(setting: Setting) -> Iterator[Family]:
    """All families that the options allow."""
    options, batch = setting.options, setting.costs.problem.global_batch_size
    for count, size, mode in itertools.product(
        range(1, len(setting.cards) + 1), setting.scope.sizes, setting.scope.modes
    ):
        each, rest = divmod(batch, count * size)
        allowed = options.num_micro_batches
        if rest or not each or (options.pipelines is not None and count not in options.pipelines):
            continue
        if allowed is None or each in allowed:
            yield Family(num_pipelines=count, size=size, mode=mode)


def host_ranges(setting: Setting) -> Iterator[tuple[float, float]]:
    """(least, most) seconds that the hosts step, all ranges together without a gap."""
    yield 0.0, 0.0
    if setting.options.offload:
        ends = [0.0, *(setting.longest_seconds / 2**i for i in range(HOST_STEPS, -1, -1))]
        yield from itertools.pairwise(ends)


def excludes_equal(setting: Setting, family: Family, seconds: float, prices: dict[object, Floats], work: Work) -> bool:
    """Whether no plan of a family takes `seconds` or less."""
    m = setting.costs.problem.global_batch_size // (family.num_pipelines * family.size)
    numbers = np.floor(setting.numbers / family.num_pipelines)
    share = 1.0 / family.num_pipelines
    owners = family.num_pipelines
    for least, most in host_ranges(setting):
        compute = seconds - max(setting.update_seconds, least)
        if compute <= 0:
            continue
        table = setting.table(family.size, share, most)
        limits = Limits(
            compute_seconds=compute,
            num_micro_batches=m,
            mode=family.mode,
            most_cards=int(numbers.sum()),
            reduce_seconds=reduce_seconds(setting, table, owners),
        )
        if not excludes(setting, table, limits, numbers, prices, (family, most), work):
            return False
    return True


def reduce_seconds(setting: Setting, table: StageTable, owners: int) -> Floats:
    """[N, X]: at least, of the gradients of a stage's layers over so many owners."""
    costs, cards, options = setting.costs, setting.cards, setting.options
    result = np.zeros(table.parameters.shape)
    if costs.topology.measured:
        return result
    rounds = (owners - 1) / owners if any(options.sharded) else 2 * (owners - 1) / owners
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
            result[i] = rounds * num_bytes / max(rates)
    return result


def excludes(
    setting: Setting,
    table: StageTable,
    limits: Limits,
    numbers: Floats,
    prices: dict[object, Floats],
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
    own = prices.get(key, scale)
    for _ in range(MAX_STEPS):
        done = bound.work
        best = bound.best(own)
        work.left -= bound.work - done
        if best is None:
            return True
        total = best.value + float(own @ numbers)
        if total < needed:
            prices[key] = own
            return True
        step = (numbers - best.cards) * scale
        length = float(step @ step)
        if length < 1e-9 or work.is_over or _is_possible(best, numbers, needed):
            return False
        own = np.maximum(own - (total - 0.995 * needed) / length * step * scale, 0.0)
    return False


def _is_possible(best: Best, numbers: Floats, needed: float) -> bool:
    return bool(best.layers >= needed and (best.cards <= numbers).all())


def densities(setting: Setting, table: StageTable, limits: Limits) -> Floats:
    """[T]: the most layers that a card of each type may hold."""
    result = np.zeros(len(setting.numbers))
    batches = np.array([-(-limits.num_micro_batches // kind.most) for kind in setting.kinds])
    least = table.seconds[MIDDLE, :, :, 0]
    fits = np.isfinite(least) & (
        batches[:, None] * np.where(np.isfinite(least), least, 0.0) <= limits.compute_seconds * (1 + 1e-9)
    )
    held = np.where(fits, table.layers, 0.0).max(axis=1)
    for kind, layers in zip(setting.kinds, held, strict=True):
        result[kind.type_index] = max(result[kind.type_index], layers / kind.cards)
    return result
