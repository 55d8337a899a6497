"""Which orders and cuts of a cutting problem can still beat a limit: bounds that no 1F1B step goes below.

Orders grow from the last stage, all of one length at a time, so that the stages' distance from the end, and
with it their micro-batches in flight, is known. What is kept of a partial order is how late its first stage
may start; what cannot be reached so early any more is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from yuan_train.planner.memory import in_flight
from yuan_train.planner.partition import Floats, Instance, Integers, StageTables

MAX_CELLS = 2_000_000
"""Numbers of a block of partial orders: bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Whole orders that a limit does not exclude, the most hopeful first."""

    orders: tuple[tuple[int, ...], ...]
    slack_seconds: tuple[float, ...]
    """By how much each stays below the limit, falling."""
    complete: bool
    """Whether every other order is excluded; False where too many partial ones had to be dropped."""
    num_partial: int


@dataclass(frozen=True)
class _Partial:
    """N partial orders of k last stages."""

    orders: Integers
    """[N, k], in the order of the stages."""
    latest: Floats
    """[N, U + 1]: how late the first of them may get its first input when it begins at unit u."""
    limits: Floats
    """[N]: seconds that the step may take."""
    used: Integers
    """[N, C]: slots of each class that are taken."""


def promising_orders(
    tables: StageTables, classes: Integers, lengths: range, limit_seconds: float, *, max_rows: int
) -> Orders:
    """Every order of an allowed length that may beat a limit, once for all that differ in swappable slots.

    At most `max_rows` partial orders of each length are followed, the most hopeful.
    """
    grower = _Grower(tables, classes, limit_seconds)
    found: list[tuple[float, tuple[int, ...]]] = []
    whole, count = True, 0
    part: _Partial | None = None
    for length in range(1, max(lengths, default=0) + 1):
        blocks = list(grower.grow(part, length))
        if not blocks:
            break
        part = _joined(blocks)
        count += len(part.orders)
        if length in lengths:
            slack = part.latest[:, 0]
            for i in np.flatnonzero(slack >= 0.0).tolist():
                found.append((float(slack[i]), tuple(part.orders[i].tolist())))
        hope = grower.hope(part, remaining=max(lengths) - length if tables.instance.use_all else 1)
        kept = np.flatnonzero(hope >= 0.0)
        if len(kept) > max_rows:
            whole = False
            kept = np.sort(kept[np.argsort(-hope[kept], kind="stable")[:max_rows]])
        part = _Partial(part.orders[kept], part.latest[kept], part.limits[kept], part.used[kept])
        if not len(kept):
            break
    found.sort(key=lambda item: (-item[0], item[1]))
    return Orders(
        orders=tuple(order for _, order in found),
        slack_seconds=tuple(slack for slack, _ in found),
        complete=whole,
        num_partial=count,
    )


def _joined(parts: Sequence[_Partial]) -> _Partial:
    def together(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return _Partial(together("orders"), together("latest"), together("limits"), together("used"))


class _Grower:
    """Puts one more stage in front of partial orders."""

    def __init__(self, tables: StageTables, classes: Integers, limit_seconds: float) -> None:
        x = tables.instance
        self.tables, self.instance = tables, x
        self.limit = limit_seconds * (1 + 1e-12) if math.isfinite(limit_seconds) else 1e300
        ids = np.arange(x.num_slots) if x.order is not None else classes
        self.members = [np.flatnonzero(ids == first) for first in np.unique(ids)]
        self.place = np.full(x.num_slots, -1)
        for position, slot in enumerate(x.order or ()):
            self.place[slot] = position
        self.size_behind = np.concatenate(([0], x.message_of))
        work = (x.forward_seconds + x.backward_seconds).min(axis=0)
        rate = work / x.replicas[:, None]
        self.share = 1.0 / np.maximum(rate.sum(axis=1), 1e-300)
        self.share /= self.share.sum()
        self.needed = x.num_micro_batches * _prefix((self.share[:, None] * rate).min(axis=0))
        self.alone = _prefix(work.min(axis=0))
        self.update = x.update_seconds.min(axis=0)

    def grow(self, part: _Partial | None, length: int) -> Iterator[_Partial]:
        """Every partial order of this length, class by class of the slot in front."""
        x, units = self.instance, self.instance.num_units
        for number, members in enumerate(self.members):
            if part is None:
                if x.order is not None and self.place[members[0]] < 0:
                    continue
                start = np.full((1, units + 1), -np.inf)
                start[0, units] = np.inf
                used = np.zeros((1, len(self.members)), dtype=np.int64)
                slot = members[:1]
                limits = self.limit - x.ends_seconds[:, slot[0]].min(keepdims=True)
                rows = _Partial(np.zeros((1, 0), dtype=np.int64), start, limits, used)
            else:
                free = part.used[:, number] < len(members)
                if x.order is not None:
                    free &= self.place[members[0]] >= 0
                    free &= self.place[members[0]] < self.place[part.orders[:, 0]]
                chosen = np.flatnonzero(free)
                if not len(chosen):
                    continue
                rows = _Partial(
                    part.orders[chosen], part.latest[chosen], part.limits[chosen], part.used[chosen]
                )
                slot = members[rows.used[:, number]]
            yield from self._in_front(rows, slot, number)

    def _in_front(self, rows: _Partial, slots: Integers, number: int) -> Iterator[_Partial]:
        cells = (self.instance.num_units + 1) ** 2
        size = max(MAX_CELLS // cells, 1)
        alive = self._in_flights(rows, slots)
        for count in np.unique(alive).tolist():
            group = np.flatnonzero(alive == count)
            for block in (group[i : i + size] for i in range(0, len(group), size)):
                part = _Partial(rows.orders[block], rows.latest[block], rows.limits[block], rows.used[block])
                yield self._stage(part, slots[block], number, count)

    def _in_flights(self, rows: _Partial, slots: Integers) -> Integers:
        x = self.instance
        own = x.replicas[slots]
        behind = x.replicas[rows.orders].sum(axis=1)
        known: dict[tuple[int, int], int] = {}
        result = np.zeros(len(slots), dtype=np.int64)
        for i, key in enumerate(zip(own.tolist(), behind.tolist(), strict=True)):
            if key not in known:
                counts = [key[0], *[1] * key[1]]
                known[key] = in_flight(
                    x.schedule,
                    stage=0,
                    num_stages=len(counts),
                    num_micro_batches=x.num_micro_batches,
                    replicas=counts,
                )
            result[i] = known[key]
        return result

    def _stage(self, rows: _Partial, slots: Integers, number: int, alive: int) -> _Partial:
        """The rows with one more stage, which holds `alive` micro-batches, on these slots of one class."""
        x = self.instance
        slot = int(self.members[number][0])
        line = self.tables.stage(slot, alive)[0]
        fits = np.isfinite(line)
        seconds = np.where(fits, line, 0.0)
        turns = self.tables.turns(slot)
        own = turns * seconds + _range_sums(self.update)
        behind = rows.latest[:, None, :]
        if rows.orders.shape[1]:
            there, back = self._edges(slots, rows.orders[:, 0])
            behind = behind - (there + back)[:, None, :]
            if not x.overlap:
                own = own[None] + (turns * there)[:, None, :]
        own = own if own.ndim == 3 else own[None]
        if not x.overlap:
            own = own + ((turns - 1) * self._least_back(slot))[None, :, None]
        earliest = np.minimum(rows.limits[:, None, None] - own, behind - seconds[None])
        latest = np.where(fits[None], earliest, -np.inf).max(axis=2)
        used = rows.used.copy()
        used[:, number] += 1
        return _Partial(np.concatenate((slots[:, None], rows.orders), axis=1), latest, rows.limits, used)

    def _edges(self, sources: Integers, targets: Integers) -> tuple[Floats, Floats]:
        """[N, U + 1] each: an activation and a gradient between two slots, by the unit behind the cut."""
        x, size = self.instance, self.size_behind
        there = x.message_seconds[size[None, :], sources[:, None], targets[:, None]]
        back = x.message_seconds[size[None, :], targets[:, None], sources[:, None]]
        return there, back

    def _least_back(self, slot: int) -> Floats:
        """[U + 1]: the fastest gradient from a slot that begins at unit u to any other; 0 without one."""
        x = self.instance
        others = [d for d in range(x.num_slots) if d != slot]
        if not others:
            return np.zeros(x.num_units + 1)
        least = x.message_seconds[self.size_behind[:, None], slot, np.array(others)[None, :]].min(axis=1)
        least[0] = 0.0
        return least

    def hope(self, part: _Partial, *, remaining: int) -> Floats:
        """[N]: how much later than needed the partial orders may start; below 0 where nothing in front of
        them, not even all the other slots at once, is as fast as that."""
        free = np.full(len(part.used), 0.0)
        for number, members in enumerate(self.members):
            free += (len(members) - part.used[:, number]) * self.share[members[0]]
        late = part.latest - self.alone[None, :]
        able = self.needed[None, :] <= part.limits[:, None] * free[:, None] * (1 + 1e-12)
        able[:, : max(remaining, 1)] = False
        return np.where(able, late, -np.inf).max(axis=1)


def _prefix(values: Floats) -> Floats:
    return np.concatenate(([0.0], values.cumsum()))


def _range_sums(values: Floats) -> Floats:
    """[U] to [U+1, U+1]: the sum over [first, end), 0 where end < first."""
    total = _prefix(values)
    return np.maximum(total[None, :] - total[:, None], 0.0)


# --- cuts ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cuts:
    """R cuts of some of N orders."""

    order_of: Integers
    """[R]: number of each cut's order."""
    bounds: Integers
    """[R, P + 1]"""
    complete: bool
    """Whether every other cut of the orders is excluded; False where there were too many."""


class _Line:
    """N orders of P stages each, whose stages have the same numbers of replicas, ready to be cut."""

    def __init__(self, tables: StageTables, orders: Integers, limit_seconds: float) -> None:
        x = tables.instance
        self.instance, self.orders = x, orders
        self.num_stages = orders.shape[1]
        self.alive = tables.in_flights(orders[0].tolist())
        self.turns = [tables.turns(int(slot)) for slot in orders[0]]
        self.tables = tables
        self.kinds = tables.number_of[orders]
        self.limits = limit_seconds - x.ends_seconds[orders[:, 0], orders[:, -1]]
        size = np.concatenate(([0], x.message_of))[None, :]
        self.there = [x.message_seconds[size, a[:, None], b[:, None]] for a, b in self._pairs()]
        self.back = [x.message_seconds[size, b[:, None], a[:, None]] for a, b in self._pairs()]
        self.update = tables.prefix("update_seconds")

    def _pairs(self) -> Iterator[tuple[Integers, Integers]]:
        for s in range(self.num_stages - 1):
            yield self.orders[:, s], self.orders[:, s + 1]

    def seconds(self, s: int, rows: Integers, first: Integers | None = None) -> Floats:
        """Stage s of some orders: [R, U+1, U+1], or [R, U+1] from a first unit each."""
        line = self.tables.stages(self.alive[s])[0]
        return line[self.kinds[rows, s]] if first is None else line[self.kinds[rows, s], first]

    def own(self, s: int, rows: Integers, seconds: Floats, first: Integers | None = None) -> Floats:
        """What stage s does by itself in a step and its update, of the same shape as `seconds`: its work,
        and where sends block its m activations and all but the last of its gradients."""
        update = self.update[self.orders[rows, s]]
        if first is None:
            start, end = update[:, :, None], update[:, None, :]
        else:
            start, end = update[np.arange(len(rows)), first][:, None], update
        result = self.turns[s] * seconds + np.maximum(end - start, 0.0)
        if self.instance.overlap:
            return result
        if s < self.num_stages - 1:
            onward = self.turns[s] * self.there[s][rows]
            result += onward[:, None, :] if first is None else onward
        if s:
            upward = (self.turns[s] - 1) * self.back[s - 1][rows]
            result += upward[:, :, None] if first is None else upward[np.arange(len(rows)), first][:, None]
        return result

    def edge(self, s: int, rows: Integers) -> Floats:
        """Both ways over the edge behind stage s, [R, U + 1]; 0 behind the last one."""
        if s == self.num_stages - 1:
            return np.zeros((len(rows), self.instance.num_units + 1))
        return self.there[s][rows] + self.back[s][rows]


def latest_starts(tables: StageTables, orders: Integers, limit_seconds: float) -> list[Floats]:
    """How late stage s may get its first input when it begins at unit u, [P][N, U+1], for a step of each
    order [N, P] to beat a limit.

    From  step >= sum_{j<s}(w_j + c_j) + m * w_s  for every stage s, which no schedule with one stage per card
    can beat: micro-batch 0 must come down and micro-batch m-1's gradient go back up. Negative: it cannot.
    """
    line = _Line(tables, orders, limit_seconds)
    return _latest(line, np.arange(len(orders)))


def _latest(line: _Line, rows: Integers) -> list[Floats]:
    latest = np.full((len(rows), line.instance.num_units + 1), -np.inf)
    latest[:, -1] = np.inf
    result: list[Floats] = []
    for s in range(line.num_stages - 1, -1, -1):
        seconds = line.seconds(s, rows)
        fits = np.isfinite(seconds)
        seconds = np.where(fits, seconds, 0.0)
        own = line.limits[rows, None, None] - line.own(s, rows, seconds)
        behind = (latest - line.edge(s, rows))[:, None, :] - seconds
        latest = np.where(fits, np.minimum(own, behind), -np.inf).max(axis=2)
        result.append(latest)
    return result[::-1]


def promising_cuts(tables: StageTables, orders: Integers, limit_seconds: float, *, max_rows: int) -> Cuts:
    """Cuts of the orders [N, P] whose lower bounds are all within a limit."""
    x = tables.instance
    line = _Line(tables, orders, limit_seconds)
    slack = 1e-12 * abs(limit_seconds) if math.isfinite(limit_seconds) else 0.0
    latest = _latest(line, np.arange(len(orders)))
    order_of = np.flatnonzero(latest[0][:, 0] >= -slack)
    bounds = np.zeros((len(order_of), 1), dtype=np.int64)
    started = np.zeros((len(order_of), 0))
    work = np.zeros((len(order_of), 0))
    arrival = np.zeros(len(order_of))
    whole = True
    chained = x.schedule == "1f1b" and bool((x.replicas[orders[0]] == 1).all())
    for s in range(line.num_stages):
        first = bounds[:, -1]
        seconds = line.seconds(s, order_of, first)
        limits = line.limits[order_of, None] + slack
        good = np.isfinite(seconds)
        good &= arrival[:, None] + line.own(s, order_of, seconds, first) <= limits
        behind = arrival[:, None] + seconds + line.edge(s, order_of)
        if s < line.num_stages - 1:
            good &= behind <= latest[s + 1][order_of] + slack
        else:
            good[:, :-1] = False
        for back_to in range(s if chained else 0):
            around = _round_seconds(x, (line.num_stages, back_to, s), started, work, arrival, seconds)
            good &= around <= limits
        picked, ends = np.nonzero(good)
        if len(picked) > max_rows:
            picked, ends, whole = picked[:max_rows], ends[:max_rows], False
        order_of = order_of[picked]
        bounds = np.concatenate((bounds[picked], ends[:, None]), axis=1)
        started = np.concatenate((started[picked], arrival[picked, None]), axis=1)
        work = np.concatenate((work[picked], seconds[picked, ends][:, None]), axis=1)
        arrival = behind[picked, ends]
    return Cuts(order_of, bounds, whole)


def _round_seconds(
    x: Instance,
    stages: tuple[int, int, int],
    started: Floats,
    work: Floats,
    arrival: Floats,
    seconds: Floats,
) -> Floats:
    """[R, U+1]: a bound of the step by the round that 1F1B makes through stages s to t of P.

    Forward k + (t - s + 1) on stage s waits for backward k - W_t there (W_t = P - 1 - t forwards come first
    on stage t), which waits for forward k on stage t, which waits for forward k on stage s. So every
    t - s + 1 micro-batches take a whole round of the stages' work and the messages between. Before the first
    round micro-batch 0 comes down and stage s does W_t forwards; behind the last one it does W_t backwards,
    and a gradient goes up.
    """
    num_stages, s, t = stages
    m, ahead = x.num_micro_batches, num_stages - 1 - t
    if m < num_stages - s:
        return np.zeros((len(started), 1))
    rounds = (m - 1 - ahead) // (t - s + 1) + 1
    around = arrival[:, None] - started[:, s, None] + seconds
    return started[:, s, None] + ahead * work[:, s, None] + rounds * around
