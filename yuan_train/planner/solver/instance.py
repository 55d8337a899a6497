"""The partitioning problem as numbers, and its answers.

An `Instance` is the whole problem: D slots (a slot runs one stage: it is one card, or one card of each equal
pipeline), U units in the model's order, C choices of recompute. A `Cut` is an answer: which slots, in which
order, and where the sequence of units is cut. Each stage has at least one unit; embedding and head are units,
so a stage may hold no layer at all. Nothing here knows a plan or a cluster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yuan_train.planner.evaluate.simulator import Sends

Floats = NDArray[np.float64]

Integers = NDArray[np.integer]


@dataclass(frozen=True, kw_only=True, eq=False)
class Hosts:
    """What of the resident bytes may lie on the slots' hosts."""

    state_bytes: Floats
    """[D, U]: summed over a stage."""
    whole_model_saving_bytes: Floats
    """[D]: of that, what a stage with all units does not have; see `Instance`."""
    capacity_bytes: Floats
    """[D]: what a host may hold of them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Halves:
    """Which units are two buckets, attention and feed-forward, and what the attention takes of both."""

    units: NDArray[np.bool_]
    """[U]"""
    seconds: float
    """Of a unit's compute."""
    parameters: float


@dataclass(frozen=True, kw_only=True, eq=False)
class Instance:
    """What one micro-batch costs on each slot. C choices of recompute, D slots, U units, M message sizes."""

    schedule: str
    num_micro_batches: int
    sends: Sends
    """Who waits for a message: only the compute that needs it, or its sender, or sender and receiver."""
    forward_seconds: Floats
    """[C, D, U]"""
    backward_seconds: Floats
    """[C, D, U]"""
    forward_start_seconds: Floats
    """[C, D]: of a stage, besides its units'."""
    backward_start_seconds: Floats
    """[C, D]"""
    weight_seconds: Floats
    """[C, D, U]: the weight-gradient part of the backward, for schedules that split it."""
    resident_bytes: Floats
    """[C, D, U]: held all the time, summed over a stage."""
    activation_bytes: Floats
    """[C, D, U]: held for each micro-batch in flight, summed over a stage."""
    transient_bytes: Floats
    """[C, D, U]: temporary; a stage needs the largest of its units', once."""
    capacity_bytes: Floats
    """[D]: what all of these together may take."""
    whole_model_saving_bytes: Floats
    """[D]: what a stage with all units saves (it holds a tied embedding once, not twice)."""
    boundary_bytes: Floats
    """[D]: a stage's output, held for each micro-batch in flight and for each message under way."""
    message_seconds: Floats
    """[M, D, D]: a message of each size from slot i to slot j."""
    message_of: Integers
    """[U]: index of the size of the message after each unit; its gradient has the same size."""
    bucket_starts: Integers
    """[U+1]: first unit of the bucket that ends before each unit, unless the stage begins later."""
    grad_reduce_seconds: Floats
    """[D, U]: gradient reduction, summed over a bucket."""
    grad_reduce_start_seconds: Floats
    """[D]: latency of that reduction, once per bucket."""
    weight_sync_seconds: Floats
    """[D, U]: the stepped weights' way back from a sharded optimizer, summed over a bucket."""
    weight_sync_start_seconds: Floats
    """[D]: latency of that, once per bucket."""
    update_seconds: Floats
    """[D, U]: optimizer step after all reductions, summed over a stage; the slowest stage counts."""
    ends_seconds: Floats
    """[D, D]: reduction of the tied embedding where slot i has the first and slot j the last unit; it runs
    between the gradient reductions and the optimizer steps."""
    order: tuple[int, ...] | None
    """Slots in the order that the stages must keep; None: any order."""
    use_all: bool
    """Whether every slot must have a stage."""
    replicas: Integers
    """[D]: replicas of a slot's stage, n; micro-batch m runs on replica m mod n."""
    has_work: NDArray[np.bool_]
    """[U]: whether a stage of this unit alone has any work; an embedding without cost has none."""
    halves: Halves | None = None
    """None: no unit is divided among two buckets."""
    hosts: Hosts | None = None
    """None: nothing lies on hosts."""

    @property
    def overlap(self) -> bool:
        """Whether sends run beside the compute; otherwise they block at least the sender."""
        return self.sends == "overlapped"

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


SPLIT_SCHEDULES = ("zero_bubble",)
"""Schedules that split the backward: its weight-gradient part runs in the bubble of the filling pipeline."""
