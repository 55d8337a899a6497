"""A lower bound of an instance's step: all the work, divided perfectly, fractions of units allowed."""

from __future__ import annotations

import numpy as np

from yuan_train.planner.solver.instance import SPLIT_SCHEDULES, Floats, Instance, Integers


def area_bound_seconds(instance: Instance) -> float:
    """Seconds that no cut of this instance can beat: see `area_bound`."""
    x = instance
    work = (x.forward_seconds + x.backward_seconds).min(axis=0)
    numbers = np.ones(len(work), dtype=np.int64)
    split = x.schedule in SPLIT_SCHEDULES
    bound = area_bound(work, numbers, x.replicas, x.num_micro_batches, split=split)
    return bound + max(float(x.ends_seconds.min()), 0.0)


def area_bound(
    work: Floats, numbers: Integers, replicas: Integers, num_micro_batches: int, *, split: bool = False
) -> float:
    """Seconds that no step can beat, all its work divided perfectly, fractions of units allowed.

    `work` [K, U] holds the seconds of each unit on each of K kinds of slot; there are `numbers` [K] slots of
    each kind, with `replicas` [K] each.

    In a step of T seconds, stage s (from 0) has at most (T / m) (1 - 1/m)^s for each micro-batch, because
    sum_{j<s} w_j + m * w_s <= T; with n replicas at most n T / m. For weights l_d that sum to 1, all stages
    together satisfy sum_d l_d w_d >= sum_u min_d l_d w_du (linear-programming duality), and the left side is
    largest with the largest weights first. Here l_d is proportional to 1 / W_d, the slot's speed; memory and
    messages are ignored. The second bound: one micro-batch takes at least its units' fastest times. With
    `split` (a schedule that splits the backward) the filling of the pipeline and half of the second bound do
    not count.
    """
    m, num_units = num_micro_batches, work.shape[1]
    one_micro_batch = float(work.min(axis=0).sum()) * (0.5 if split else 1.0)
    rate = work / replicas[:, None]
    whole_model = np.maximum(rate.sum(axis=1), 1e-300)
    share = (1.0 / whole_model) / (numbers / whole_model).sum()
    needed = float((share[:, None] * rate).min(axis=0).sum())
    fastest = np.argsort(-share, kind="stable")
    first = np.repeat(share[fastest], np.minimum(numbers[fastest], num_units))[:num_units]
    fill = 1.0 - 1.0 / m if (replicas == 1).all() and not split else 1.0
    available = float((first * fill ** np.arange(len(first))).sum())
    return max(m * needed / available, one_micro_batch)
