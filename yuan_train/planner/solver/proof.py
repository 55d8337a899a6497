"""Orders and cuts of an instance that may still beat a limit, by lower bounds on every 1F1B step.

Orders grow from the last stage backwards, all of one length at a time, so that each stage's distance from the
end, and with it its micro-batches in flight, is known. Each partial order keeps how late its first stage may
start; one whose first stage cannot start that early is dropped. Here the start of stage s is
sum_{j<s} (w_j + c_j): forward and backward of one micro-batch on every stage before it, and the messages
both ways.

The slack of an order is a time in seconds: how much later than needed it may start and still meet the limit.
More slack is more promising; below 0 the order is excluded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.instance import Floats, Instance, Integers
from yuan_train.planner.solver.ranges import prefix_sums, range_sums
from yuan_train.schedule.schedules import in_flight

MAX_CELLS = 2_000_000
"""Array elements of a block of partial orders; bounds the memory."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """Complete orders that a limit does not exclude, the most promising first."""

    orders: tuple[tuple[int, ...], ...]
    slack_seconds: tuple[float, ...]
    """Slack of each order, descending: by how much its bound is below the limit; more is better."""
    complete: bool
    """Whether every other order is excluded; False if partial orders were dropped because of their number."""
    num_partial: int
    """Partial orders that were built."""


@dataclass(frozen=True)
class _Partial:
    """N partial orders: the last k stages of each."""

    orders: Integers
    """[N, k], in the order of the stages."""
    latest: Floats
    """[N, U+1]: how late the first of them may start if it begins at unit u; -inf: not at all."""
    limits: Floats
    """[N]: seconds that the step may take, less the least reduction of the tied embedding."""
    used: Integers
    """[N, classes]: slots of each class that are used."""


def promising_orders(
    tables: CostTables, classes: Integers, lengths: range, limit_seconds: float, *, max_rows: int
) -> Orders:
    """Every order of an allowed length that may beat a limit; interchangeable slots are not told apart.

    Of each length at most `max_rows` partial orders are kept, those with the most slack. `classes` [D] has
    the same number for interchangeable slots.
    """
    grower = _Grower(tables, classes, limit_seconds)
    found: list[tuple[float, tuple[int, ...]]] = []
    complete, count = True, 0
    part: _Partial | None = None
    for length in range(1, max(lengths, default=0) + 1):
        blocks = list(grower.grow(part, length))
        if not blocks:
            break
        part = _concatenated(blocks)
        count += len(part.orders)
        if length in lengths:
            slack = part.latest[:, 0]
            for i in np.flatnonzero(slack >= 0.0).tolist():
                found.append((float(slack[i]), tuple(part.orders[i].tolist())))
        slack = grower.slack(part, remaining=max(lengths) - length if tables.instance.use_all else 1)
        kept = np.flatnonzero(slack >= 0.0)
        if len(kept) > max_rows:
            complete = False
            kept = np.sort(kept[np.argsort(-slack[kept], kind="stable")[:max_rows]])
        part = _Partial(part.orders[kept], part.latest[kept], part.limits[kept], part.used[kept])
        if not len(kept):
            break
    found.sort(key=lambda item: (-item[0], item[1]))
    return Orders(
        orders=tuple(order for _, order in found),
        slack_seconds=tuple(slack for slack, _ in found),
        complete=complete,
        num_partial=count,
    )


def _concatenated(parts: Sequence[_Partial]) -> _Partial:
    def joined(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    return _Partial(joined("orders"), joined("latest"), joined("limits"), joined("used"))


class _Grower:
    """Extends partial orders by one stage in front."""

    def __init__(self, tables: CostTables, classes: Integers, limit_seconds: float) -> None:
        x = tables.instance
        self.tables, self.instance = tables, x
        self.limit = limit_seconds * (1 + 1e-12) if math.isfinite(limit_seconds) else 1e300
        ids = np.arange(x.num_slots) if x.order is not None else classes
        self.members = [np.flatnonzero(ids == first) for first in np.unique(ids)]
        self.position = np.full(x.num_slots, -1)
        for i, slot in enumerate(x.order or ()):
            self.position[slot] = i
        self.size_before = np.concatenate(([0], x.message_of))
        """[U+1]: index of the size of the message at the cut before each unit."""
        work = (x.forward_seconds + x.backward_seconds).min(axis=0)
        rate = work / x.replicas[:, None]
        self.share = 1.0 / np.maximum(rate.sum(axis=1), 1e-300)
        self.share /= self.share.sum()
        self.needed = x.num_micro_batches * prefix_sums((self.share[:, None] * rate).min(axis=0))
        """[U+1]: a lower bound of the weighted work of all units before each; see `area_bound`."""
        self.fastest = prefix_sums(work.min(axis=0))
        """[U+1]: one micro-batch through all units before each, every unit on its fastest slot."""
        self.update = x.update_seconds.min(axis=0)

    def grow(self, part: _Partial | None, length: int) -> Iterator[_Partial]:
        """Every partial order of this length, by class of the slot in front. `part` has those one stage
        shorter; None for length 1."""
        x, units = self.instance, self.instance.num_units
        for number, members in enumerate(self.members):
            if part is None:
                if x.order is not None and self.position[members[0]] < 0:
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
                    free &= self.position[members[0]] >= 0
                    free &= self.position[members[0]] < self.position[part.orders[:, 0]]
                chosen = np.flatnonzero(free)
                if not len(chosen):
                    continue
                rows = _Partial(
                    part.orders[chosen], part.latest[chosen], part.limits[chosen], part.used[chosen]
                )
                slot = members[rows.used[:, number]]
            yield from self._prepend(rows, slot, number)

    def _prepend(self, rows: _Partial, slots: Integers, number: int) -> Iterator[_Partial]:
        """The rows with slots [N] of class `number` in front, in blocks of at most MAX_CELLS elements."""
        cells = (self.instance.num_units + 1) ** 2
        size = max(MAX_CELLS // cells, 1)
        in_flight = self._in_flights(rows, slots)
        for count in np.unique(in_flight).tolist():
            group = np.flatnonzero(in_flight == count)
            for block in (group[i : i + size] for i in range(0, len(group), size)):
                part = _Partial(rows.orders[block], rows.latest[block], rows.limits[block], rows.used[block])
                yield self._prepend_stage(part, slots[block], number, count)

    def _in_flights(self, rows: _Partial, slots: Integers) -> Integers:
        """[N]: micro-batches in flight on a stage on each slot in front of each row."""
        x = self.instance
        own = x.replicas[slots]
        downstream = x.replicas[rows.orders].sum(axis=1)
        known: dict[tuple[int, int], int] = {}
        result = np.zeros(len(slots), dtype=np.int64)
        for i, key in enumerate(zip(own.tolist(), downstream.tolist(), strict=True)):
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

    def _prepend_stage(self, rows: _Partial, slots: Integers, number: int, in_flight: int) -> _Partial:
        """The rows with one more stage in front, on slots [N] of class `number`."""
        x = self.instance
        slot = int(self.members[number][0])
        table = self.tables.stage(slot, in_flight)[0]
        fits = np.isfinite(table)
        seconds = np.where(fits, table, 0.0)
        micro_batches = self.tables.micro_batches_per_replica(slot)
        own = micro_batches * seconds + np.maximum(range_sums(self.update), 0.0)
        downstream = rows.latest[:, None, :]
        if rows.orders.shape[1]:
            forward_sends, backward_sends = self._edges(slots, rows.orders[:, 0])
            downstream = downstream - (forward_sends + backward_sends)[:, None, :]
            if not x.overlap:
                own = own[None] + (micro_batches * forward_sends)[:, None, :]
        own = own if own.ndim == 3 else own[None]
        if not x.overlap:
            own = own + ((micro_batches - 1) * self._fastest_gradient(slot))[None, :, None]
        by_end = np.minimum(rows.limits[:, None, None] - own, downstream - seconds[None])
        latest = np.where(fits[None], by_end, -np.inf).max(axis=2)
        used = rows.used.copy()
        used[:, number] += 1
        return _Partial(np.concatenate((slots[:, None], rows.orders), axis=1), latest, rows.limits, used)

    def _edges(self, sources: Integers, targets: Integers) -> tuple[Floats, Floats]:
        """[N, U+1] each: seconds of an activation and of a gradient, by the unit after the cut."""
        x, size = self.instance, self.size_before
        forward_sends = x.message_seconds[size[None, :], sources[:, None], targets[:, None]]
        backward_sends = x.message_seconds[size[None, :], targets[:, None], sources[:, None]]
        return forward_sends, backward_sends

    def _fastest_gradient(self, slot: int) -> Floats:
        """[U+1]: least seconds of a gradient from a slot that begins at unit u to any other; 0 for u = 0."""
        x = self.instance
        others = [d for d in range(x.num_slots) if d != slot]
        if not others:
            return np.zeros(x.num_units + 1)
        least = x.message_seconds[self.size_before[:, None], slot, np.array(others)[None, :]].min(axis=1)
        least[0] = 0.0
        return least

    def slack(self, part: _Partial, *, remaining: int) -> Floats:
        """[N]: seconds by which each partial order may start later than needed; more is more promising.

        Below 0 where no stages in front of it are fast enough, not even all unused slots together;
        `remaining` is the least number of units in front.
        """
        free = np.full(len(part.used), 0.0)
        for number, members in enumerate(self.members):
            free += (len(members) - part.used[:, number]) * self.share[members[0]]
        margin = part.latest - self.fastest[None, :]
        possible = self.needed[None, :] <= part.limits[:, None] * free[:, None] * (1 + 1e-12)
        possible[:, : max(remaining, 1)] = False
        return np.where(possible, margin, -np.inf).max(axis=1)


@dataclass(frozen=True)
class Cuts:
    """R cuts of some of N orders of P stages."""

    order_of: Integers
    """[R]: index of each cut's order."""
    bounds: Integers
    """[R, P + 1]"""
    complete: bool
    """Whether every other cut of the orders is excluded; False if there were too many."""


class _Block:
    """Costs of N orders of P stages each that have the same numbers of replicas, stage by stage."""

    def __init__(self, tables: CostTables, orders: Integers, limit_seconds: float) -> None:
        x = tables.instance
        self.instance, self.orders = x, orders
        self.num_stages = orders.shape[1]
        self.in_flights = tables.in_flights(orders[0].tolist())
        self.micro_batches = [tables.micro_batches_per_replica(int(slot)) for slot in orders[0]]
        self.tables = tables
        self.kinds = tables.number_of[orders]
        self.limits = limit_seconds - x.ends_seconds[orders[:, 0], orders[:, -1]]
        size = np.concatenate(([0], x.message_of))[None, :]
        self.forward_sends = [x.message_seconds[size, a[:, None], b[:, None]] for a, b in self._pairs()]
        self.backward_sends = [x.message_seconds[size, b[:, None], a[:, None]] for a, b in self._pairs()]
        self.update = tables.prefix("update_seconds")

    def _pairs(self) -> Iterator[tuple[Integers, Integers]]:
        for s in range(self.num_stages - 1):
            yield self.orders[:, s], self.orders[:, s + 1]

    def seconds(self, s: int, rows: Integers, first: Integers | None = None) -> Floats:
        """Seconds of one micro-batch on stage s of orders `rows` [R]: [R, U+1, U+1], or [R, U+1] where
        `first` [R] has each stage's first unit."""
        table = self.tables.stages(self.in_flights[s])[0]
        return table[self.kinds[rows, s]] if first is None else table[self.kinds[rows, s], first]

    def own(self, s: int, rows: Integers, seconds: Floats, first: Integers | None = None) -> Floats:
        """Seconds that stage s itself is busy in a step, of the same shape as `seconds`: its compute, its
        optimizer step and, where sends block, its activations and all but the last of its gradients."""
        update = self.update[self.orders[rows, s]]
        if first is None:
            start, end = update[:, :, None], update[:, None, :]
        else:
            start, end = update[np.arange(len(rows)), first][:, None], update
        result = self.micro_batches[s] * seconds + np.maximum(end - start, 0.0)
        if self.instance.overlap:
            return result
        if s < self.num_stages - 1:
            activations = self.micro_batches[s] * self.forward_sends[s][rows]
            result += activations[:, None, :] if first is None else activations
        if s:
            gradients = (self.micro_batches[s] - 1) * self.backward_sends[s - 1][rows]
            result += (
                gradients[:, :, None] if first is None else gradients[np.arange(len(rows)), first][:, None]
            )
        return result

    def edge(self, s: int, rows: Integers) -> Floats:
        """[R, U+1]: seconds of activation plus gradient over the edge after stage s; 0 after the last."""
        if s == self.num_stages - 1:
            return np.zeros((len(rows), self.instance.num_units + 1))
        return self.forward_sends[s][rows] + self.backward_sends[s][rows]


def _latest(block: _Block, rows: Integers) -> list[Floats]:
    """[P][R, U+1]: how late stage s may start if it begins at unit u, so that the step of each order in
    `rows` can meet the block's limit; negative where it cannot.

    From  step >= sum_{j<s} (w_j + c_j) + m * w_s  for every stage s, with c_j the messages both ways after
    stage j. It holds for every schedule with one stage per card: micro-batch 0 must pass all stages before s,
    and the gradient of micro-batch m - 1 must pass them on its way back.
    """
    latest = np.full((len(rows), block.instance.num_units + 1), -np.inf)
    latest[:, -1] = np.inf
    result: list[Floats] = []
    for s in range(block.num_stages - 1, -1, -1):
        seconds = block.seconds(s, rows)
        fits = np.isfinite(seconds)
        seconds = np.where(fits, seconds, 0.0)
        own = block.limits[rows, None, None] - block.own(s, rows, seconds)
        downstream = (latest - block.edge(s, rows))[:, None, :] - seconds
        latest = np.where(fits, np.minimum(own, downstream), -np.inf).max(axis=2)
        result.append(latest)
    return result[::-1]


def promising_cuts(tables: CostTables, orders: Integers, limit_seconds: float, *, max_rows: int) -> Cuts:
    """Cuts of the orders [N, P] whose lower bounds are all within a limit; of more than `max_rows` partial
    cuts of one length the rest is dropped."""
    x = tables.instance
    block = _Block(tables, orders, limit_seconds)
    tolerance = 1e-12 * abs(limit_seconds) if math.isfinite(limit_seconds) else 0.0
    latest = _latest(block, np.arange(len(orders)))
    order_of = np.flatnonzero(latest[0][:, 0] >= -tolerance)
    bounds = np.zeros((len(order_of), 1), dtype=np.int64)
    started = np.zeros((len(order_of), 0))
    work = np.zeros((len(order_of), 0))
    arrival = np.zeros(len(order_of))
    complete = True
    chained = x.schedule == "1f1b" and bool((x.replicas[orders[0]] == 1).all())
    for s in range(block.num_stages):
        first = bounds[:, -1]
        seconds = block.seconds(s, order_of, first)
        limits = block.limits[order_of, None] + tolerance
        good = np.isfinite(seconds)
        good &= arrival[:, None] + block.own(s, order_of, seconds, first) <= limits
        onward = arrival[:, None] + seconds + block.edge(s, order_of)
        if s < block.num_stages - 1:
            good &= onward <= latest[s + 1][order_of] + tolerance
        else:
            good[:, :-1] = False
        for first_stage in range(s if chained else 0):
            bound = _round_trip_bound(x, (block.num_stages, first_stage, s), started, work, arrival, seconds)
            good &= bound <= limits
        picked, ends = np.nonzero(good)
        if len(picked) > max_rows:
            picked, ends, complete = picked[:max_rows], ends[:max_rows], False
        order_of = order_of[picked]
        bounds = np.concatenate((bounds[picked], ends[:, None]), axis=1)
        started = np.concatenate((started[picked], arrival[picked, None]), axis=1)
        work = np.concatenate((work[picked], seconds[picked, ends][:, None]), axis=1)
        arrival = onward[picked, ends]
    return Cuts(order_of, bounds, complete)


def _round_trip_bound(
    x: Instance,
    stages: tuple[int, int, int],
    started: Floats,
    work: Floats,
    arrival: Floats,
    seconds: Floats,
) -> Floats:
    """[R, U+1]: a lower bound of the step from 1F1B's round trips through stages s to t of P.

    `stages` is (P, s, t). `started` and `work` [R, t] are start and seconds per micro-batch of each stage
    before t; `arrival` [R] and `seconds` [R, U+1] those of stage t, the latter by the unit where it ends.

    Forward k + (t - s + 1) on stage s waits for backward k - W_t on stage s (W_t = P - 1 - t warm-up forwards
    on stage t), which waits for forward k on stage t, which waits for forward k on stage s. So t - s + 1
    micro-batches take a full round trip: the work of stages s to t and the messages between them. Before the
    first round trip, micro-batch 0 reaches stage s, which runs W_t forwards; after the last, stage s runs W_t
    backwards, and a gradient goes back to the first stage.
    """
    num_stages, s, t = stages
    m, warm_up = x.num_micro_batches, num_stages - 1 - t
    if m < num_stages - s:
        return np.zeros((len(started), 1))
    num_rounds = (m - 1 - warm_up) // (t - s + 1) + 1
    round_trip = arrival[:, None] - started[:, s, None] + seconds
    return started[:, s, None] + warm_up * work[:, s, None] + num_rounds * round_trip
