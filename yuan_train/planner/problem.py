"""A shape as a cutting problem: what partition and orders solve, in arrays."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.planner.candidates import Options, Shape, Slot
from yuan_train.planner.communication import broadcast_seconds, message_seconds
from yuan_train.planner.partition import Instance
from yuan_train.planner.setting import Costs
from yuan_train.planner.sums import ring_sharers, sum_seconds, tied_seconds, unit_parameters
from yuan_train.planner.topology import find_route
from yuan_train.planner.workload import STATE_BYTES


def make_instance(costs: Costs, shape: Shape, options: Options) -> Instance:
    """The cutting problem of a shape: units are embedding, layers, head; choices are options.recompute."""
    setting, slots = costs.setting, shape.slots
    # Another tool's profile knows nothing of the optimizer's step: it must not decide.
    plain = setting.is_schema_profile and shape.num_pipelines == 1 and len(slots[0][0]) == 1
    tied = setting.model.tie_embeddings and not plain
    table = [
        [costs.of_replica(slot[0][0], shape.micro_batch_size, recompute) for slot in slots]
        for recompute in options.recompute
    ]

    def numbers(name: str) -> np.ndarray:
        distinct = {id(card): [getattr(unit, name) for unit in card.units] for row in table for card in row}
        return np.array([[distinct[id(card)] for card in row] for row in table], dtype=float)

    transient = numbers("transient_bytes")
    owners = np.array([shape.peers * shape.num_pipelines * len(slot[0]) for slot in slots], dtype=float)
    optimizer = numbers("optimizer_bytes")
    if shape.sharded:
        optimizer /= owners[None, :, None]
    resident = numbers("parameter_bytes") + numbers("gradient_bytes") + optimizer
    once = setting.model.tie_embeddings and not setting.is_schema_profile
    saving = resident[0, :, 0].copy() if once else np.zeros(len(slots))
    # The head's transient stands beside the other units', it does not share their place; see memory.py.
    resident[:, :, -1] += transient[:, :, -1]
    transient[:, :, -1] = 0.0
    devices = [[setting.cluster.device_type(c.type) for c in _cards(slot)] for slot in slots]
    seconds, message_of = _message_table(costs, shape)
    forward, backward = numbers("forward_seconds"), numbers("backward_seconds")
    sync, start = _sync_table(costs, shape)
    update = _update_table(costs, shape, owners if shape.sharded else np.ones(len(slots)))
    ends = _ends_matrix(costs, shape) if tied else np.zeros((len(slots), len(slots)))
    if once and not plain:
        # Both ends on one slot are one table, stepped once.
        ends -= np.diag(update[:, 0])
    # A stage of nothing but an embedding that costs nothing would be no stage.
    counts = (forward + backward + resident).max(axis=(0, 1)) > 0
    counts[1:-1] = True
    return Instance(
        schedule=shape.schedule,
        num_micro_batches=shape.num_micro_batches,
        overlap=setting.overlap,
        forward_seconds=forward,
        backward_seconds=backward,
        weight_seconds=numbers("weight_seconds"),
        resident_bytes=resident,
        activation_bytes=numbers("activation_bytes"),
        transient_bytes=transient,
        capacity_bytes=np.array([float(min(d.memory - d.reserved for d in row)) for row in devices]),
        whole_model_saving_bytes=saving,
        boundary_bytes=np.array([card.boundary_bytes for card in table[0]]),
        message_seconds=seconds,
        message_of=message_of,
        sync_seconds=sync,
        sync_start_seconds=start,
        update_seconds=np.zeros_like(update) if plain else update,
        ends_seconds=ends,
        order=tuple(range(len(slots))) if options.fixed_order else None,
        use_all=options.use_all_devices,
        replicas=np.array([len(slot[0]) for slot in slots], dtype=np.int64),
        counts=counts,
    )


def is_faithful(costs: Costs, shape: Shape, options: Options) -> bool:
    """Whether the cutting problem costs every cut exactly as `cost_plan` does.

    It takes the slowest pipeline's messages for all, counts every slot's gradient sum on the network, and
    sums unit by unit; so it errs, on the slow side, where equal pipelines have unlike links, where slots that
    sum over a shared network card may stay idle, and on measured links.
    """
    if shape.num_pipelines == 1 and max(len(slot[0]) for slot in shape.slots) == 1:
        return True
    if costs.topology.measured or max(len(slot[0]) for slot in shape.slots) > 1:
        return False
    sizes = [costs.hidden_bytes(shape.micro_batch_size)]
    messages = _pipeline_messages(costs, shape, sizes)[0]
    crowded = max(ring_sharers([_leads(slot) for slot in shape.slots])) > 1
    same = bool((messages.min(axis=0) == messages.max(axis=0)).all())
    return same and not (crowded and not options.use_all_devices)


def _cards(slot: Slot) -> list[Card]:
    return [card for place in slot for replica in place for card in replica]


def _leads(slot: Slot) -> list[Card]:
    """The first card of each replica, over all pipelines: what sums gradients."""
    return [replica[0] for place in slot for replica in place]


def _message_table(costs: Costs, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """([M, D, D] seconds from slot to slot for each size of message, [U] which size follows each unit).

    Sizes are those of the first slot that has them measured: a hidden state is as large on every card.
    """
    unlike = [costs.of_replica(slot[0][0], shape.micro_batch_size, "none").units for slot in shape.slots]
    outputs = np.array([[unit.output_bytes for unit in units] for units in unlike]).max(axis=0)
    sizes, message_of = np.unique(outputs[:-1], return_inverse=True)
    seconds = _pipeline_messages(costs, shape, sizes.tolist()).max(axis=1)
    return seconds, np.append(message_of.reshape(-1), 0).astype(np.int64)


def _pipeline_messages(costs: Costs, shape: Shape, sizes: Sequence[float]) -> np.ndarray:
    """[M, pipelines, D, D]: messages from slot i to slot j in each pipeline, by size.

    Equal routes are asked for once: what counts is the two nodes, and how many flows share them.
    """
    slots, count = shape.slots, shape.num_pipelines
    leads = [[slot[d][0][0] for slot in slots] for d in range(count)]
    names = {node: i for i, node in enumerate(dict.fromkeys(card.node for row in leads for card in row))}
    nodes = np.array([[names[card.node] for card in row] for row in leads])
    seconds = np.zeros((len(sizes), count, len(slots), len(slots)))
    fans = [_fan_seconds(costs, slots, d, sizes) for d in range(count)]
    for d in range(count):
        crowd = _sharers(nodes, d)
        if costs.topology.measured:
            keys = np.arange(len(slots) ** 2)
        else:
            pair = nodes[d][:, None] * len(names) + nodes[d][None, :]
            keys = (pair * (int(crowd.max()) + 1) + crowd).ravel()
        _, places, which = np.unique(keys, return_index=True, return_inverse=True)
        times = np.zeros((len(sizes), len(places)))
        for k, place in enumerate(places.tolist()):
            i, j = divmod(place, len(slots))
            if i == j and len(slots) > 1 and not costs.topology.measured:
                # Two cards of one node may share this key with a card and itself.
                i, j = _another(nodes[d], i)
            if i != j:
                route = find_route(costs.topology, leads[d][i], leads[d][j])
                sharers = int(crowd[i, j])
                times[:, k] = [message_seconds(route, size, sharers=sharers) for size in sizes]
        seconds[:, d] = times[:, which.reshape(-1)].reshape(len(sizes), len(slots), len(slots))
        seconds[:, d] += fans[d][:, None, :]
        seconds[:, d, np.arange(len(slots)), np.arange(len(slots))] = 0.0
    return seconds


def _another(nodes: np.ndarray, i: int) -> tuple[int, int]:
    """A slot and another of the same node; the slot itself if it is alone there."""
    same = np.flatnonzero(nodes == nodes[i])
    return (int(same[0]), int(same[1])) if len(same) > 1 else (i, i)


def _fan_seconds(costs: Costs, slots: Sequence[Slot], d: int, sizes: Sequence[float]) -> np.ndarray:
    """[M, D]: handing a message on inside the group that got it."""
    rows = [
        [broadcast_seconds(costs.topology, slot[d][0], size) for slot in slots]
        if any(len(slot[d][0]) > 1 for slot in slots)
        else [0.0] * len(slots)
        for size in sizes
    ]
    return np.array(rows)


def _sharers(nodes: np.ndarray, d: int) -> np.ndarray:
    """[D, D]: flows of the same edge of all pipelines through the busier network card of pipeline d's."""
    same = nodes == nodes[d]
    away = nodes[:, :, None] != nodes[:, None, :]
    leaving = (same[:, :, None] & away).sum(axis=0)
    entering = (same[:, None, :] & away).sum(axis=0)
    return np.where(away[d], np.maximum(leaving, entering), 1)


def _sync_table(costs: Costs, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """([D, U], [D]) gradient sums of each unit over its owners, and what each stage waits once for links."""
    parameters = unit_parameters(costs.setting.model)
    rings = [_leads(slot) for slot in shape.slots]
    zeros = np.zeros((len(rings), len(parameters)))
    if max(map(len, rings)) == 1:
        return zeros, np.zeros(len(rings))
    known: dict[tuple[object, ...], tuple[list[float], float]] = {}
    rows: list[tuple[list[float], float]] = []
    for slot, ring, crowd in zip(shape.slots, rings, ring_sharers(rings), strict=True):
        measured = tuple(card.name for card in ring) if costs.topology.measured else None
        key = (tuple(card.node for card in ring), len(slot[0][0]), crowd, measured)
        if key not in known:
            known[key] = _ring_line(costs, ring, [n / len(slot[0][0]) for n in parameters], crowd, shape)
        rows.append(known[key])
    return np.array([row for row, _ in rows]), np.array([start for _, start in rows])


def _ring_line(
    costs: Costs, ring: Sequence[Card], parameters: Sequence[float], crowd: int, shape: Shape
) -> tuple[list[float], float]:
    def seconds(count: float) -> float:
        return sum_seconds(costs, ring, count, sharded=shape.sharded, sharers=crowd)

    whole = sum(parameters)
    # The line through two sizes: exact for latency + bytes / bandwidth.
    slope = (seconds(whole) - seconds(whole / 2)) / (whole / 2)
    return [slope * count for count in parameters], max(seconds(whole) - slope * whole, 0.0)


def _update_table(costs: Costs, shape: Shape, owners: np.ndarray) -> np.ndarray:
    """[D, U]: the optimizer step of each unit."""
    traffic = STATE_BYTES[costs.setting.precision].update_traffic
    rows: list[list[float]] = []
    for slot, share in zip(shape.slots, owners.tolist(), strict=True):
        card = costs.of_replica(slot[0][0], shape.micro_batch_size, "none")
        rate = card.update_bytes_per_second * share
        rows.append([unit.parameters * traffic / rate for unit in card.units])
    return np.array(rows)


def _ends_matrix(costs: Costs, shape: Shape) -> np.ndarray:
    """[D, D]: sum of the tied table where slot i is first and slot j last."""
    leads = [_leads(slot) for slot in shape.slots]
    keys = [tuple(card.node for card in row) for row in leads]
    measured = bool(costs.topology.measured)
    known: dict[tuple[object, ...], float] = {}
    result = np.zeros((len(leads), len(leads)))
    for i, j in itertools.product(range(len(leads)), repeat=2):
        key = (i, j) if measured else (keys[i], keys[j], i == j)
        if key not in known:
            width = min(len(shape.slots[i][0][0]), len(shape.slots[j][0][0]))
            known[key] = tied_seconds(costs, leads[i], leads[j], width=width, sharded=shape.sharded)
        result[i, j] = known[key]
    return result
