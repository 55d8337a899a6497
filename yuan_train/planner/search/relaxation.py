"""A relaxed estimate of a shape's best step: memory and whole layers count, messages do not.

The lower bound of a shape's work (`bounds.shape_bound`) is far off where memory is short or stages hold few
layers. The relaxation treats a shape as blocks of equal slots, one after the other in any order. Each stage
holds as many whole layers as a time limit and its memory allow; the estimate follows from the smallest limit
at which all stages together hold the model. On large clusters it comes within a few percent of the cut that
is found later, at a thousandth of the cost, so it decides which shapes are cut at all. It proves nothing.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.costs.unit_costs import UnitCost
from yuan_train.planner.search.offload import offload_bytes
from yuan_train.planner.search.shapes import Options, Shape
from yuan_train.schedule.schedules import MESSAGES_PER_EDGE

Floats = NDArray[np.float64]
Integers = NDArray[np.integer]

PRUNE_FACTOR = 1.1
"""With many cards, a shape is pruned if its estimate exceeds this multiple of the best step found so far; so
are mixed pipelines, with any number of cards."""
MAX_BLOCKS, MAX_ORDERED_SLOTS = 4, 32
"""Blocks and slots of which every order of the blocks is tried; of more, only the cluster's order, by memory
and by speed."""
LEAST = 1e-300
"""Replaces 0 as a divisor."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Blocks:
    """Costs of K kinds of slot under each of C choices of recompute; all layers cost the same."""

    numbers: Integers
    """[K]: slots of each kind."""
    kind_of: Integers
    """[D]: kind of each slot, in the cluster's order."""
    replicas: Integers
    """[K]"""
    layer_seconds: Floats
    """[C, K]: of one micro-batch, divided by the replicas."""
    layer_bytes: Floats
    """[C, K]: held all the time."""
    layer_activations: Floats
    """[C, K]: held for each micro-batch in flight."""
    transient_bytes: Floats
    """[C, K]"""
    boundary_bytes: Floats
    """[K]"""
    head_seconds: Floats
    """[K]: of one micro-batch, divided by the replicas."""
    head_bytes: Floats
    """[K]"""
    embedding_bytes: Floats
    """[K]"""
    capacity_bytes: Floats
    """[K]"""
    layer_offloadable_bytes: Floats
    """[K]: of a layer, what the host may hold, as far as `offload_bytes` goes."""
    offload_bytes: Floats
    """[K]"""


def relaxed_seconds(costs: Costs, shape: Shape, options: Options) -> float:
    """Estimated step seconds of a shape's best plan; inf where none seems to fit. Less is more promising."""
    blocks = _blocks(costs, shape, options)
    num_layers, m = costs.problem.model.num_layers, shape.num_micro_batches
    orders = _orders(blocks, fixed=options.fixed_order)
    head = np.zeros(orders.shape)
    head[:, 0] = blocks.head_seconds[orders[:, 0]]
    layer = blocks.layer_seconds[:, orders]
    max_layers = np.minimum(_layers_by_memory(blocks, orders, shape), num_layers)

    def layers(limit: float) -> Floats:
        """[C, N, P]: layers that a stage can hold if one micro-batch may take `limit` seconds on it."""
        return np.minimum(np.floor((limit * (1 + 1e-9) - head) / layer).clip(0), max_layers)

    counts = np.arange(num_layers + 1)[:, None]
    ends = (np.zeros_like(blocks.head_seconds), blocks.head_seconds)
    times = [(counts * row + end).ravel() for row in blocks.layer_seconds for end in ends]
    limits = np.unique(np.concatenate(times))
    found = _first_enough(limits, lambda t: layers(t).max(axis=0).sum(axis=1).max() >= num_layers)
    if found is None:
        return math.inf
    held = layers(found)
    choice, most = held.argmax(axis=0)[None], held.max(axis=0)
    enough = most.sum(axis=1) >= num_layers
    work = (most * np.take_along_axis(layer, choice, axis=0)[0]).sum(axis=1)[enough]
    fill = work * num_layers / most.sum(axis=1)[enough] + head[enough, 0]
    return float((m - 1) * found + fill.min())


def _blocks(costs: Costs, shape: Shape, options: Options) -> _Blocks:
    kinds: dict[tuple[object, ...], int] = {}
    kind_of: list[int] = []
    for slot in shape.slots:
        plain = costs.of_replica(slot[0][0], shape.micro_batch_size, "none")
        kind_of.append(kinds.setdefault((id(plain), slot[0][0][0].type, len(slot[0])), len(kinds)))
    first = [kind_of.index(kind) for kind in range(len(kinds))]
    replicas = np.array([len(shape.slots[i][0]) for i in first])
    names = [shape.slots[i][0][0][0].type for i in first]
    cards = [
        [costs.of_replica(shape.slots[i][0][0], shape.micro_batch_size, r) for i in first]
        for r in options.recompute
    ]
    layers = [[card.layer for card in row] for row in cards]
    heads, embeddings = ([card.units[end] for card in cards[0]] for end in (-1, 0))
    owners = shape.peers * shape.num_pipelines * replicas
    share = 1.0 / owners if shape.sharded else np.ones(len(first))

    copies = costs.problem.reduce_copy_share * (owners > 1)

    def resident(units: Sequence[UnitCost]) -> Floats:
        fixed = _numbers(units, lambda u: u.parameter_bytes)
        fixed += _numbers(units, lambda u: u.gradient_bytes)
        fixed += copies * _numbers(units, lambda u: u.own_gradient_bytes)
        return fixed + _numbers(units, lambda u: u.optimizer_bytes) * share

    of_slots = offload_bytes(costs, shape, options)
    room = np.zeros(len(first)) if of_slots is None else of_slots[first]

    def on_host(units: Sequence[UnitCost]) -> Floats:
        return np.minimum(_numbers(units, lambda u: u.optimizer_bytes) * share, room)

    def table(value: Callable[[UnitCost], float]) -> Floats:
        return np.array([_numbers(row, value) for row in layers])

    return _Blocks(
        numbers=np.bincount(kind_of),
        kind_of=np.array(kind_of),
        replicas=replicas,
        layer_seconds=np.maximum(table(_seconds) / replicas, LEAST),
        layer_bytes=np.array([resident(row) for row in layers]),
        layer_activations=table(lambda u: u.activation_bytes),
        transient_bytes=table(lambda u: u.transient_bytes),
        boundary_bytes=np.array([card.boundary_bytes for card in cards[0]]),
        head_seconds=_numbers(heads, _seconds) / replicas,
        head_bytes=resident(heads) - on_host(heads) + _numbers(heads, lambda u: u.transient_bytes),
        embedding_bytes=resident(embeddings) - on_host(embeddings),
        capacity_bytes=np.array([costs.problem.room_bytes(name) for name in names]),
        layer_offloadable_bytes=_numbers(layers[0], lambda u: u.optimizer_bytes) * share,
        offload_bytes=room,
    )


def _numbers(units: Sequence[UnitCost], value: Callable[[UnitCost], float]) -> Floats:
    return np.array([value(unit) for unit in units])


def _seconds(unit: UnitCost) -> float:
    return unit.forward_seconds + unit.backward_seconds


def _orders(blocks: _Blocks, *, fixed: bool) -> Integers:
    """[N, P]: kinds of the stages from the last one backwards: in the cluster's order, and as blocks."""
    cluster = blocks.kind_of[::-1]
    if fixed:
        return cluster[None]
    count = len(blocks.numbers)
    if count <= MAX_BLOCKS and len(cluster) <= MAX_ORDERED_SLOTS:
        found = [np.array(order) for order in itertools.permutations(range(count))]
    else:
        memory, speed = blocks.capacity_bytes, blocks.layer_seconds.min(axis=0)
        found = [np.argsort(key, kind="stable") for key in (memory, -memory, speed, -speed)]
    return np.array([cluster, *(np.repeat(order, blocks.numbers[order]) for order in found)])


def _layers_by_memory(blocks: _Blocks, orders: Integers, shape: Shape) -> Floats:
    """[C, N, P]: layers that a stage has memory for, with the micro-batches in flight of its position."""
    own = blocks.replicas[orders]
    per_replica = -(-shape.num_micro_batches // own)
    to_end = np.cumsum(own, axis=1)
    depth = {"gpipe": per_replica * own, "zero_bubble": np.broadcast_to(to_end[:, -1:], own.shape)}
    in_flight = np.minimum(-(-depth.get(shape.schedule, to_end) // own), per_replica)
    free = blocks.capacity_bytes[orders] - blocks.boundary_bytes[orders] * (in_flight + 2 * MESSAGES_PER_EDGE)
    free[:, 0] -= blocks.head_bytes[orders[:, 0]]
    free[:, -1] -= blocks.embedding_bytes[orders[:, -1]]
    each = blocks.layer_bytes[:, orders] + in_flight * blocks.layer_activations[:, orders]
    free = free - blocks.transient_bytes[:, orders]
    # The host takes its room, or the whole state of few layers.
    with_room = (free + blocks.offload_bytes[orders]) / np.maximum(each, LEAST)
    rest = each - blocks.layer_offloadable_bytes[orders]
    return np.floor(np.minimum(with_room, free / np.maximum(rest, LEAST))).clip(0)


def _first_enough(limits: Floats, enough: Callable[[float], bool]) -> float | None:
    """The smallest of the ascending limits that is enough; None if none is."""
    if not enough(float(limits[-1])):
        return None
    return float(limits[bisect.bisect_left(limits, True, key=lambda limit: enough(float(limit)))])
