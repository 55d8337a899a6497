"""Step seconds of cuts: simulated, or estimated by a closed form of 1F1B's period."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yuan_train.planner.evaluate.simulator import simulate_many
from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.instance import Floats, Instance, Integers
from yuan_train.schedule.step import Workers

SIMULATION_ROWS = 20_000
"""Cuts that are simulated at a time; bounds the memory of a batch."""


def simulate_cuts(tables: CostTables, orders: Integers, bounds: Integers) -> Floats:
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
    """Rows of `orders`, grouped by the numbers of replicas of their stages."""
    if len(orders) and (instance.replicas == instance.replicas[0]).all():
        return [np.arange(len(orders))]
    patterns, of_row = np.unique(instance.replicas[orders], axis=0, return_inverse=True)
    return [np.flatnonzero(of_row.reshape(-1) == i) for i in range(len(patterns))]


def replicated_workers(replicas: Sequence[int]) -> Workers:
    """Workers of each stage for stages with the given numbers of replicas, numbered in order."""
    starts = [0]
    for count in replicas:
        starts.append(starts[-1] + count)
    return tuple(tuple(range(a, b)) for a, b in zip(starts, starts[1:], strict=False))


@dataclass(frozen=True, kw_only=True)
class _CutTimes:
    """Seconds of N cuts of P stages, by stage [N, P] and by edge [N, P - 1]."""

    forward: Floats
    backward: Floats
    weight: Floats
    forward_sends: Floats
    backward_sends: Floats
    grad_reduce: Floats
    """After the stage's last backward."""
    after: Floats
    """[N]: reduction of the tied embedding, slowest optimizer step, longest wait for its weights."""
    fits: NDArray[np.bool_]
    """[N]"""


def _cut_times(tables: CostTables, orders: Integers, bounds: Integers) -> _CutTimes:
    x = tables.instance
    count, stages = orders.shape
    choice = np.zeros((count, stages), dtype=np.int64)
    fits = np.ones(count, dtype=bool)
    in_flight = np.array(tables.in_flights(orders[0].tolist()))
    numbers = tables.number_of[orders]
    for s in range(stages):
        seconds, choices = tables.stages(int(in_flight[s]))
        where = (numbers[:, s], bounds[:, s], bounds[:, s + 1])
        fits &= np.isfinite(seconds[where])
        choice[:, s] = choices[where]
    first, end = bounds[:, :-1], bounds[:, 1:]

    def ranges(name: str, *index: Integers) -> Floats:
        prefix = tables.prefix(name)
        return prefix[(*index, end)] - prefix[(*index, first)]

    size = x.message_of[bounds[:, 1:-1] - 1]
    forward_sends = x.message_seconds[size, orders[:, :-1], orders[:, 1:]]
    update = ranges("update_seconds", orders).max(axis=1)
    forward = ranges("forward_seconds", choice, orders) + x.forward_start_seconds[choice, orders]
    exposed = (choice, tables.ring_of[orders], first, end)
    arrival = np.zeros((count, stages))
    # The first micro-batch passes all stages unhindered.
    arrival[:, 1:] = (forward[:, :-1] + forward_sends).cumsum(axis=1)
    weight_sync = (tables.exposed_weight_sync[exposed] - arrival).max(axis=1)
    return _CutTimes(
        forward=forward,
        backward=ranges("backward_seconds", choice, orders) + x.backward_start_seconds[choice, orders],
        weight=ranges("weight_seconds", choice, orders),
        forward_sends=forward_sends,
        backward_sends=x.message_seconds[size, orders[:, 1:], orders[:, :-1]],
        grad_reduce=tables.exposed_grad_reduce[exposed],
        after=x.ends_seconds[orders[:, 0], orders[:, -1]] + update + np.maximum(weight_sync, 0.0),
        fits=fits,
    )


def _simulate_batch(tables: CostTables, orders: Integers, bounds: Integers, workers: Workers) -> Floats:
    x, times = tables.instance, _cut_times(tables, orders, bounds)
    ends = simulate_many(
        x.schedule,
        num_micro_batches=x.num_micro_batches,
        forward_seconds=times.forward,
        backward_seconds=times.backward,
        weight_seconds=times.weight,
        send_activation_seconds=times.forward_sends,
        send_gradient_seconds=times.backward_sends,
        workers=workers,
        sends=x.sends,
    )
    step = (ends + times.grad_reduce).max(axis=1) + times.after
    return np.where(times.fits, step, np.inf)


def may_hide(instance: Instance) -> bool:
    """Whether deeper warm-ups could hide transfers; see `polish.deeper_warm_up`."""
    plain = instance.schedule == "1f1b" and instance.overlap
    return plain and bool((instance.replicas == 1).all())


def estimate_cuts(tables: CostTables, orders: Integers, bounds: Integers, *, hidden: bool = False) -> Floats:
    """Step seconds [N] of cuts, estimated as sum + (m - 1) * period; inf where one does not fit.

    The period is that of 1F1B, each stage's seconds w divided by its replicas: the slowest stage or transfer,
    or the slowest pair of neighbours, (w_s + w_{s+1} + messages both ways) / 2, for stage s holds only one
    micro-batch more than stage s + 1. With transfers `hidden` by deeper warm-ups the pairs do not count; with
    sends that block, a stage's own sends add to its seconds instead. For screening
    only.
    """
    result = np.zeros(len(orders))
    for rows in _same_replicas(tables.instance, orders):
        result[rows] = _estimate_batch(tables, orders[rows], bounds[rows], hidden=hidden)
    return result


def _estimate_batch(tables: CostTables, orders: Integers, bounds: Integers, *, hidden: bool) -> Floats:
    x, times = tables.instance, _cut_times(tables, orders, bounds)
    work = times.forward + times.backward
    rate = work / x.replicas[orders]
    edge = times.forward_sends + times.backward_sends
    period = rate.max(axis=1)
    if edge.shape[1]:
        slowest = np.maximum(times.forward_sends, times.backward_sends).max(axis=1)
        if not hidden:
            slowest = np.maximum(slowest, ((rate[:, :-1] + rate[:, 1:] + edge) / 2).max(axis=1))
        with_sends = rate.copy()
        with_sends[:, :-1] += times.forward_sends
        with_sends[:, 1:] += times.backward_sends
        slowest_blocked = with_sends.max(axis=1)
        period = np.maximum(period, slowest if x.overlap else slowest_blocked)
    fill = work.sum(axis=1) + edge.sum(axis=1)
    # A stage has its last backward earlier than the first stage by what the last gradient still has to pass.
    earlier = np.zeros(work.shape)
    earlier[:, 1:] = (times.backward[:, :-1] + times.backward_sends).cumsum(axis=1)
    grad_reduce = (times.grad_reduce - earlier).max(axis=1)
    step = fill + (x.num_micro_batches - 1) * period + grad_reduce + times.after
    return np.where(times.fits, step, np.inf)
