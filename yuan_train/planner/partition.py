"""Cutting a line of units over an ordered line of cards: exact dynamic programming, and proof by enumeration.

An `Instance` is the whole problem as numbers: D slots (a slot is one card, or one card of each equal
pipeline), U units in the model's order, C choices of recompute. A `Cut` is an answer: which slots, in which
order, and where the line is cut. Each stage has at least one unit; embedding and head are units, so that a
stage may hold no layer at all.

What a stage costs is a table over [first unit, end unit) for each kind of slot and each number of
micro-batches in flight; 1F1B's in-flight count is min(stages to the end, m), so a table belongs to a distance
from the end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yuan_train.planner.memory import MESSAGES_PER_EDGE, in_flight
from yuan_train.planner.simulator import simulate_many
from yuan_train.schedule.step import Workers

Floats = NDArray[np.float64]
Integers = NDArray[np.integer]

SIMULATION_ROWS = 20_000
"""Plans simulated at a time: bounds the memory of a batch."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """What one micro-batch costs on each slot. C choices, D slots, U units, M sizes of message."""

    schedule: str
    num_micro_batches: int
    overlap: bool
    forward_seconds: Floats
    """[C, D, U]"""
    backward_seconds: Floats
    """[C, D, U]"""
    weight_seconds: Floats
    """[C, D, U]: what of the backward is the weights' part, where the schedule splits it."""
    resident_bytes: Floats
    """[C, D, U]: held all the time, summed over a stage."""
    activation_bytes: Floats
    """[C, D, U]: times the micro-batches in flight, summed over a stage."""
    transient_bytes: Floats
    """[C, D, U]: the largest of a stage counts, once."""
    capacity_bytes: Floats
    """[D]: what the above may take together."""
    whole_model_saving_bytes: Floats
    """[D]: what a stage with all units holds less (a tied table is there once)."""
    boundary_bytes: Floats
    """[D]: what leaves a stage, for each micro-batch in flight, and each message on the way."""
    message_seconds: Floats
    """[M, D, D]: from slot i to slot j."""
    message_of: Integers
    """[U]: size of the message behind each unit; its gradient has the same."""
    sync_seconds: Floats
    """[D, U]: after the last backward, summed over a stage."""
    sync_start_seconds: Floats
    """[D]: the same, once a stage."""
    update_seconds: Floats
    """[D, U]: after all that, the slowest stage counts."""
    ends_seconds: Floats
    """[D, D]: between both, where slot i has the first and j the last unit."""
    order: tuple[int, ...] | None
    """Slots in the order of the stages; None: any order."""
    use_all: bool
    """Whether every slot must have a stage."""
    replicas: Integers
    """[D]: micro-batches that a slot works on side by side, m mod n on each of its n replicas."""
    counts: NDArray[np.bool_]
    """[U]: whether a stage of this unit alone has work to do; an embedding without cost has none."""

    @property
    def num_slots(self) -> int:
        return self.forward_seconds.shape[1]

    @property
    def num_units(self) -> int:
        return self.forward_seconds.shape[2]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Stage s runs units [bounds[s], bounds[s + 1]) on slot order[s] with recompute choice choices[s]."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]
    choices: tuple[int, ...]
    step_seconds: float


@dataclass(frozen=True, kw_only=True)
class Shortfall:
    """The stage that misses its card's memory by most in the cut that misses it by least."""

    order: tuple[int, ...]
    bounds: tuple[int, ...]
    stage: int
    choice: int
    needed_bytes: float
    capacity_bytes: float


class StageTables:
    """Stage costs over [first, end) by slot and micro-batches in flight, computed when first asked for."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance
        self.kind_of = _kinds(instance)
        self.kinds = np.unique(self.kind_of).tolist()
        self.number_of = np.searchsorted(self.kinds, self.kind_of)
        """Number of each slot's kind among `kinds`."""
        self._seconds: dict[int, tuple[Floats, Integers]] = {}
        self._prefix: dict[str, Floats] = {}
        self._bytes: dict[int, tuple[Floats, Floats]] = {}
        self._work: dict[int, Floats] = {}
        units = instance.num_units
        first, end = np.meshgrid(np.arange(units + 1), np.arange(units + 1), indexing="ij")
        self._leaving = (end < units).astype(float)
        self._edges = (first > 0) + self._leaving
        worth = np.concatenate(([0], instance.counts.cumsum()))
        self._empty = worth[end] <= worth[first]
        self._whole = (first == 0) & (end == units)

    def stage(self, slot: int, in_flight: int) -> tuple[Floats, Integers]:
        """(seconds [U+1, U+1], choice [U+1, U+1]) of one micro-batch; inf where the stage is empty or too
        big.

        The choice is the fastest that fits; of equals, the first.
        """
        seconds, choices = self.stages(in_flight)
        number = self.number_of[slot]
        return seconds[number], choices[number]

    def stages(self, in_flight: int) -> tuple[Floats, Integers]:
        """The same for every kind of slot: [K, U+1, U+1] each, kinds numbered as in `number_of`."""
        if in_flight not in self._seconds:
            rows: list[Floats] = []
            picks: list[Integers] = []
            for kind in self.kinds:
                fits = self.needed_bytes(kind, in_flight) <= self.instance.capacity_bytes[kind]
                seconds = np.where(fits, self.work(kind), np.inf)
                seconds[:, self._empty] = np.inf
                picks.append(seconds.argmin(axis=0))
                rows.append(seconds.min(axis=0))
            self._seconds[in_flight] = (np.stack(rows), np.stack(picks).astype(np.int8))
        return self._seconds[in_flight]

    def needed_bytes(self, slot: int, in_flight: int) -> Floats:
        """Bytes beyond the reserve, [C, U+1, U+1]; inf for an empty stage."""
        x, kind = self.instance, int(self.kind_of[slot])
        if kind not in self._bytes:
            held = _range_sums(x.resident_bytes[:, slot]) + _range_maxima(x.transient_bytes[:, slot])
            self._bytes[kind] = (held, _range_sums(x.activation_bytes[:, slot]))
        held, each = self._bytes[kind]
        needed = held + in_flight * each
        needed += x.boundary_bytes[slot] * (self._leaving * in_flight + self._edges * MESSAGES_PER_EDGE)
        needed -= x.whole_model_saving_bytes[slot] * self._whole
        needed[:, self._empty] = np.inf
        return needed

    def work(self, slot: int) -> Floats:
        """Forward and backward seconds, [C, U+1, U+1], whether it fits or not."""
        x, kind = self.instance, int(self.kind_of[slot])
        if kind not in self._work:
            self._work[kind] = _range_sums(x.forward_seconds[:, slot] + x.backward_seconds[:, slot])
        return self._work[kind]

    def periods(self, order: Sequence[int]) -> Floats:
        """Every number of seconds per micro-batch that a stage of these slots can have, rising."""
        rates: list[Floats] = []
        for kind in sorted({int(self.kind_of[slot]) for slot in order}):
            work = self.work(kind)[:, ~self._empty] / self.instance.replicas[kind]
            rates.append(work.ravel())
        values = np.concatenate(rates)
        scale = float(values.max()) or 1.0
        # Differences of running sums carry noise in the last digits; a limit just above loses nothing.
        return np.unique(np.round(values / scale, 11)) * (scale * (1 + 1e-10)) + scale * 1e-11

    def prefix(self, name: str) -> Floats:
        """Sums of the instance's field `name` up to each unit: [..., U + 1]."""
        if name not in self._prefix:
            values: Floats = getattr(self.instance, name)
            zeros = np.zeros((*values.shape[:-1], 1))
            self._prefix[name] = np.concatenate((zeros, values.cumsum(axis=-1)), axis=-1)
        return self._prefix[name]

    def in_flight(self, stage: int, num_stages: int) -> int:
        """Micro-batches in flight on a stage of one replica among such; `memory.in_flight` says the same."""
        return in_flight(
            self.instance.schedule,
            stage=stage,
            num_stages=num_stages,
            num_micro_batches=self.instance.num_micro_batches,
        )

    def in_flights(self, order: Sequence[int]) -> list[int]:
        """Micro-batches in flight on each stage of an order."""
        replicas = self.instance.replicas[list(order)].tolist()
        m = self.instance.num_micro_batches
        return [
            in_flight(
                self.instance.schedule,
                stage=s,
                num_stages=len(replicas),
                num_micro_batches=m,
                replicas=replicas,
            )
            for s in range(len(replicas))
        ]

    def turns(self, slot: int) -> int:
        """Micro-batches that one replica of a slot works on."""
        return -(-self.instance.num_micro_batches // int(self.instance.replicas[slot]))

    def lines(self, order: Sequence[int]) -> list[Floats]:
        """Seconds tables of the stages of an order."""
        return [self.stage(slot, n)[0] for slot, n in zip(order, self.in_flights(order), strict=True)]

    def edges(self, order: Sequence[int]) -> tuple[list[Floats], list[Floats]]:
        """Seconds of activation and of gradient over each edge, [U+1] by the unit that follows the cut."""
        x = self.instance
        size = np.concatenate(([0], x.message_of))
        there = [x.message_seconds[size, a, b] for a, b in zip(order, order[1:], strict=False)]
        back = [x.message_seconds[size, b, a] for a, b in zip(order, order[1:], strict=False)]
        return there, back


# --- simulating ------------------------------------------------------------------------------------------


def simulate_cuts(tables: StageTables, orders: Integers, bounds: Integers) -> Floats:
    """Step seconds [N] of cuts: orders [N, P], bounds [N, P + 1]; inf where one does not fit."""
    seconds = np.zeros(len(orders))
    if not len(orders):
        return seconds
    for rows in _same_replicas(tables.instance, orders):
        workers = replicated_workers(tables.instance.replicas[orders[rows[0]]].tolist())
        for part in (rows[j : j + SIMULATION_ROWS] for j in range(0, len(rows), SIMULATION_ROWS)):
            seconds[part] = _simulate_batch(tables, orders[part], bounds[part], workers)
    return seconds


def _same_replicas(instance: Instance, orders: Integers) -> list[Integers]:
    """Rows of `orders` whose stages have the same numbers of replicas, together."""
    if len(orders) and (instance.replicas == instance.replicas[0]).all():
        return [np.arange(len(orders))]
    patterns, of_row = np.unique(instance.replicas[orders], axis=0, return_inverse=True)
    return [np.flatnonzero(of_row.reshape(-1) == i) for i in range(len(patterns))]


def replicated_workers(replicas: Sequence[int]) -> Workers:
    """Workers of stages with so many replicas each, numbered in order."""
    starts = [0]
    for count in replicas:
        starts.append(starts[-1] + count)
    return tuple(tuple(range(a, b)) for a, b in zip(starts, starts[1:], strict=False))


def make_cut(tables: StageTables, order: Sequence[int], bounds: Sequence[int], step_seconds: float) -> Cut:
    """The cut with its choices of recompute filled in."""
    choices = (
        int(tables.stage(slot, n)[1][bounds[s], bounds[s + 1]])
        for s, (slot, n) in enumerate(zip(order, tables.in_flights(order), strict=True))
    )
    return Cut(
        order=tuple(int(slot) for slot in order),
        bounds=tuple(int(b) for b in bounds),
        choices=tuple(choices),
        step_seconds=float(step_seconds),
    )


@dataclass(frozen=True, kw_only=True)
class _Times:
    """What N cuts of P stages cost, by stage [N, P] and by edge [N, P - 1]."""

    forward: Floats
    backward: Floats
    weight: Floats
    there: Floats
    back: Floats
    sync: Floats
    after: Floats
    """[N]: the tied sum and the slowest update."""
    fits: NDArray[np.bool_]


def _times(tables: StageTables, orders: Integers, bounds: Integers) -> _Times:
    x = tables.instance
    count, stages = orders.shape
    choice = np.zeros((count, stages), dtype=np.int64)
    fits = np.ones(count, dtype=bool)
    alive = np.array(tables.in_flights(orders[0].tolist()))
    numbers = tables.number_of[orders]
    for s in range(stages):
        seconds, choices = tables.stages(int(alive[s]))
        where = (numbers[:, s], bounds[:, s], bounds[:, s + 1])
        fits &= np.isfinite(seconds[where])
        choice[:, s] = choices[where]
    first, end = bounds[:, :-1], bounds[:, 1:]

    def ranges(name: str, *index: Integers) -> Floats:
        prefix = tables.prefix(name)
        return prefix[(*index, end)] - prefix[(*index, first)]

    size = x.message_of[bounds[:, 1:-1] - 1]
    there = x.message_seconds[size, orders[:, :-1], orders[:, 1:]]
    update = ranges("update_seconds", orders).max(axis=1)
    return _Times(
        forward=ranges("forward_seconds", choice, orders),
        backward=ranges("backward_seconds", choice, orders),
        weight=ranges("weight_seconds", choice, orders),
        there=there,
        back=x.message_seconds[size, orders[:, 1:], orders[:, :-1]],
        sync=ranges("sync_seconds", orders) + x.sync_start_seconds[orders],
        after=x.ends_seconds[orders[:, 0], orders[:, -1]] + update,
        fits=fits,
    )


def _simulate_batch(tables: StageTables, orders: Integers, bounds: Integers, workers: Workers) -> Floats:
    x, times = tables.instance, _times(tables, orders, bounds)
    ends = simulate_many(
        x.schedule,
        num_micro_batches=x.num_micro_batches,
        forward_seconds=times.forward,
        backward_seconds=times.backward,
        weight_seconds=times.weight,
        send_activation_seconds=times.there,
        send_gradient_seconds=times.back,
        workers=workers,
        overlap=x.overlap,
    )
    step = (ends + times.sync).max(axis=1) + times.after
    return np.where(times.fits, step, np.inf)


def may_hide(instance: Instance) -> bool:
    """Whether deeper warm-ups could hide transfers; see `refine.deeper_warm_up`."""
    plain = instance.schedule == "1f1b" and instance.overlap
    return plain and bool((instance.replicas == 1).all())


def estimate_cuts(tables: StageTables, orders: Integers, bounds: Integers, *, hidden: bool = False) -> Floats:
    """About the step seconds [N] of cuts without simulating them: sum + (m - 1) * period.

    The period is that of 1F1B with one replica each, over single stages and pairs of neighbours (planning
    notes, section 2), or with transfers `hidden` by deeper warm-ups, over single stages and transfers; inf
    where a cut does not fit. For screening only.
    """
    result = np.zeros(len(orders))
    for rows in _same_replicas(tables.instance, orders):
        result[rows] = _estimate_batch(tables, orders[rows], bounds[rows], hidden=hidden)
    return result


def _estimate_batch(tables: StageTables, orders: Integers, bounds: Integers, *, hidden: bool) -> Floats:
    x, times = tables.instance, _times(tables, orders, bounds)
    work = times.forward + times.backward
    rate = work / x.replicas[orders]
    edge = times.there + times.back
    period = rate.max(axis=1)
    if edge.shape[1]:
        slowest = np.maximum(times.there, times.back).max(axis=1)
        if not hidden:
            slowest = np.maximum(slowest, ((rate[:, :-1] + rate[:, 1:] + edge) / 2).max(axis=1))
        waiting = rate.copy()
        waiting[:, :-1] += times.there
        waiting[:, 1:] += times.back
        blocked = waiting.max(axis=1)
        period = np.maximum(period, slowest if x.overlap else blocked)
    fill = work.sum(axis=1) + edge.sum(axis=1)
    step = fill + (x.num_micro_batches - 1) * period + times.sync[:, 0] + times.after
    return np.where(times.fits, step, np.inf)


# --- a fixed order ---------------------------------------------------------------------------------------


def threshold_bounds(tables: StageTables, order: Sequence[int], *, limit: int = 24) -> list[tuple[int, ...]]:
    """Cuts of an order that minimise sum(stages + messages) under rising limits on the slowest stage or link.

    Step time is about sum + (m - 1) * period (planning notes, section 5), and the period is at least the
    slowest stage and the slowest message. For each limit t the smallest sum is found by dynamic programming;
    t rises from the smallest that is possible, and stops where (m - 1) * t alone exceeds the best. At most
    `limit` values of t are tried. Exact for this objective if no value had to be left out; the objective
    itself is only what the simulation is later asked about. Empty if nothing fits.
    """
    m = tables.instance.num_micro_batches
    lines, edges = tables.lines(order), _edge_seconds(tables, order)
    rates = [1.0 / int(tables.instance.replicas[slot]) for slot in order]
    values = tables.periods(order)
    least = _smallest(values, lambda t: _minimal_sum(lines, edges, rates, t) is not None)
    if least is None:
        return []
    found: dict[tuple[int, ...], None] = {}
    best = math.inf
    for t in _spread(values[least:], limit):
        if (m - 1) * t > best:
            break
        answer = _minimal_sum(lines, edges, rates, float(t))
        if answer is None:
            continue
        total, bounds = answer
        found[bounds] = None
        spans = zip(lines, rates, bounds, bounds[1:], strict=False)
        slowest = max(line[a, b] * rate for line, rate, a, b in spans)
        best = min(best, total + (m - 1) * slowest)
    return list(found)


def _spread(values: Floats, limit: int) -> Floats:
    """At most `limit` of the rising values, the first ones dense: a period near the least wins mostly."""
    if len(values) <= limit:
        return values
    picks = np.unique((np.linspace(0, 1, limit) ** 2 * (len(values) - 1)).astype(int))
    return values[picks]


def _edge_seconds(tables: StageTables, order: Sequence[int]) -> list[Floats]:
    """Both ways over each edge, summed."""
    there, back = tables.edges(order)
    return [a + b for a, b in zip(there, back, strict=True)]


def _smallest(values: Floats, feasible: Callable[[float], bool]) -> int | None:
    """Index of the smallest value for which a monotone test holds; None if none does."""
    if not len(values) or not feasible(float(values[-1])):
        return None
    low, high = 0, len(values) - 1
    while low < high:
        middle = (low + high) // 2
        if feasible(float(values[middle])):
            high = middle
        else:
            low = middle + 1
    return low


def _minimal_sum(
    lines: Sequence[Floats], edges: Sequence[Floats], rates: Sequence[float], threshold: float
) -> tuple[float, tuple[int, ...]] | None:
    """Smallest sum of stages and messages with every stage within the threshold, and its bounds."""
    num_units = lines[0].shape[0] - 1
    best = np.full(num_units + 1, np.inf)
    best[num_units] = 0.0
    steps: list[Integers] = []
    for s in range(len(lines) - 1, -1, -1):
        behind = best if s == len(lines) - 1 else best + edges[s]
        total = np.where(lines[s] * rates[s] <= threshold, lines[s], np.inf) + behind
        steps.append(total.argmin(axis=1))
        best = total.min(axis=1)
    if not np.isfinite(best[0]):
        return None
    bounds = [0]
    for choice in reversed(steps):
        bounds.append(int(choice[bounds[-1]]))
    return float(best[0]), tuple(bounds)


# --- bounds ----------------------------------------------------------------------------------------------


def area_bound_seconds(instance: Instance) -> float:
    """No plan of this instance can take less: see `area_bound`."""
    x = instance
    work = (x.forward_seconds + x.backward_seconds).min(axis=0)
    numbers = np.ones(len(work), dtype=np.int64)
    split = x.schedule in SPLIT_SCHEDULES
    bound = area_bound(work, numbers, x.replicas, x.num_micro_batches, split=split)
    return bound + max(float(x.ends_seconds.min()), 0.0)


SPLIT_SCHEDULES = ("zero_bubble",)
"""Their weights' part of the backward fills the time in which the pipeline fills."""


def area_bound(
    work: Floats, numbers: Integers, replicas: Integers, num_micro_batches: int, *, split: bool = False
) -> float:
    """All the work of a step, shared out perfectly and in fractions: `work` [K, U] seconds of each unit on
    each of K kinds of slot, `numbers` [K] of them, `replicas` [K] in each.

    In a step of T seconds, stage s (from 0) has at most (T / m) (1 - 1/m)^s for each micro-batch, because
    sum_{j<s} w_j + m * w_s <= T; with n replicas at most n T / m. For shares l_d that sum to 1, all stages
    together satisfy sum_d l_d w_d >= sum_u min_d l_d w_du (linear-programming duality), and the left side is
    largest with the largest shares first. Here l_d = 1/W_d, the slot's speed; memory and messages are left
    out. Beside it: one micro-batch alone takes at least its fastest units. With `split` backwards filling
    and half of the backward are left out.
    """
    m, num_units = num_micro_batches, work.shape[1]
    alone = float(work.min(axis=0).sum()) * (0.5 if split else 1.0)
    rate = work / replicas[:, None]
    whole = np.maximum(rate.sum(axis=1), 1e-300)
    share = (1.0 / whole) / (numbers / whole).sum()
    needed = float((share[:, None] * rate).min(axis=0).sum())
    fastest = np.argsort(-share, kind="stable")
    first = np.repeat(share[fastest], np.minimum(numbers[fastest], num_units))[:num_units]
    fill = 1.0 - 1.0 / m if (replicas == 1).all() and not split else 1.0
    room = float((first * fill ** np.arange(len(first))).sum())
    return max(m * needed / room, alone)


# --- nothing fits ----------------------------------------------------------------------------------------


def find_shortfall(tables: StageTables, order: Sequence[int]) -> Shortfall:
    """Of all cuts of an order, the one whose worst stage needs the smallest multiple of its card's memory."""
    x = tables.instance
    alive = tables.in_flights(order)
    needed = [tables.needed_bytes(slot, n) for slot, n in zip(order, alive, strict=True)]
    ratio = [n.min(axis=0) / max(x.capacity_bytes[slot], 1.0) for n, slot in zip(needed, order, strict=True)]
    best = np.full(x.num_units + 1, np.inf)
    best[x.num_units] = 0.0
    steps: list[Integers] = []
    for table in reversed(ratio):
        total = np.maximum(table, best)
        steps.append(total.argmin(axis=1))
        best = total.min(axis=1)
    bounds = [0]
    for choice in reversed(steps):
        bounds.append(int(choice[bounds[-1]]))
    worst = max(range(len(order)), key=lambda s: (ratio[s][bounds[s], bounds[s + 1]], -s))
    options = needed[worst][:, bounds[worst], bounds[worst + 1]]
    return Shortfall(
        order=tuple(order),
        bounds=tuple(bounds),
        stage=worst,
        choice=int(options.argmin()),
        needed_bytes=float(options.min()),
        capacity_bytes=float(x.capacity_bytes[order[worst]]),
    )


# --- helpers ---------------------------------------------------------------------------------------------


def _kinds(instance: Instance) -> Integers:
    """Number of the first slot with the same costs and memory."""
    rows = [
        (
            *(
                values[:, d].tobytes()
                for values in (
                    instance.forward_seconds,
                    instance.backward_seconds,
                    instance.resident_bytes,
                    instance.activation_bytes,
                    instance.transient_bytes,
                )
            ),
            float(instance.capacity_bytes[d]),
            float(instance.whole_model_saving_bytes[d]),
            float(instance.boundary_bytes[d]),
            int(instance.replicas[d]),
        )
        for d in range(instance.num_slots)
    ]
    first: dict[object, int] = {}
    return np.array([first.setdefault(row, d) for d, row in enumerate(rows)], dtype=np.int64)


def _range_sums(values: Floats) -> Floats:
    """[C, U] to [C, U+1, U+1]: the sum over [first, end)."""
    prefix = np.concatenate((np.zeros((len(values), 1)), values.cumsum(axis=1)), axis=1)
    return prefix[:, None, :] - prefix[:, :, None]


def _range_maxima(values: Floats) -> Floats:
    """[C, U] to [C, U+1, U+1]: the maximum over [first, end), 0 for an empty range."""
    count, units = values.shape
    result = np.zeros((count, units + 1, units + 1))
    for first in range(units):
        result[:, first, first + 1 :] = np.maximum.accumulate(values[:, first:], axis=1)
    return result
