"""A shape as an `Instance`: the partitioning problem that the solver solves, in arrays."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.grad_reduce import (
    bucket_units,
    grad_reduce_seconds,
    half_parts,
    ring_sharers,
    tied_embedding_seconds,
    unit_parameters,
    weight_sync_seconds,
)
from yuan_train.planner.costs.links import broadcast_seconds, message_seconds
from yuan_train.planner.costs.plan_problem import Costs, Replica
from yuan_train.planner.costs.topology import find_route
from yuan_train.planner.costs.workload import STATE_BYTES
from yuan_train.planner.search.offload import offload_bytes
from yuan_train.planner.search.shapes import Options, Shape, Slot
from yuan_train.planner.solver.instance import Halves, Hosts, Instance

FAR = 1e4
"""Times the model's size: a ring's seconds of that much are latency + bytes / bandwidth."""


Numbers = Callable[[str], np.ndarray]
"""[C, D, U]: a field of the costs of each unit on each slot, by choice of recompute."""


def make_instance(costs: Costs, shape: Shape, options: Options) -> Instance:
    """The partitioning problem of a shape. Units: embedding, layers, head; choices: options.recompute."""
    problem, slots = costs.problem, shape.slots
    tied = costs.ties
    table = [
        [costs.of_replica(slot[0][0], shape.micro_batch_size, recompute) for slot in slots]
        for recompute in options.recompute
    ]
    distinct = {id(card): card for row in table for card in row}
    number = {key: i for i, key in enumerate(distinct)}
    which = np.array([[number[id(card)] for card in row] for row in table])

    def numbers(name: str) -> np.ndarray:
        rows = [[getattr(unit, name) for unit in card.units] for card in distinct.values()]
        return np.array(rows, dtype=float)[which]

    owners = np.array([shape.peers * shape.num_pipelines * len(slot[0]) for slot in slots], dtype=float)
    held = _held(costs, shape, numbers, owners)
    starts = np.array([(c.start.forward_seconds, c.start.backward_seconds) for c in distinct.values()])[which]
    types = [{card.type for card in _cards(slot)} for slot in slots]
    seconds, message_of = _message_table(costs, shape)
    forward, backward = numbers("forward_seconds"), numbers("backward_seconds")
    (grad_reduce, start), (weight_sync, sync_start) = _bucket_seconds(costs, shape)
    update = _update_table(costs, shape, owners if shape.sharded else np.ones(len(slots)))
    ends = _tied_embedding_matrix(costs, shape) if tied else np.zeros((len(slots), len(slots)))
    if _holds_once(costs):
        # A slot with the first and the last unit holds the tied embedding once and updates it once.
        ends -= np.diag(update[:, 0])
    # An embedding or a head that costs nothing cannot form a stage alone.
    has_work = (forward + backward + held.resident).max(axis=(0, 1)) > 0
    has_work[1:-1] = True
    room = offload_bytes(costs, shape, options)
    return Instance(
        schedule=shape.schedule,
        num_micro_batches=shape.num_micro_batches,
        sends=problem.send_mode,
        forward_seconds=forward,
        backward_seconds=backward,
        forward_start_seconds=starts[..., 0],
        backward_start_seconds=starts[..., 1],
        weight_seconds=numbers("weight_seconds"),
        resident_bytes=held.resident,
        activation_bytes=numbers("activation_bytes"),
        transient_bytes=held.transient,
        capacity_bytes=np.array([min(map(problem.room_bytes, row)) for row in types]),
        whole_model_saving_bytes=held.saving,
        boundary_bytes=np.array([card.boundary_bytes for card in table[0]]),
        message_seconds=seconds,
        message_of=message_of,
        bucket_starts=_bucket_starts(costs),
        grad_reduce_seconds=grad_reduce,
        grad_reduce_start_seconds=start,
        weight_sync_seconds=weight_sync,
        weight_sync_start_seconds=sync_start,
        update_seconds=update,
        ends_seconds=ends,
        order=tuple(range(len(slots))) if options.fixed_order else None,
        use_all=options.use_all_devices,
        replicas=np.array([len(slot[0]) for slot in slots], dtype=np.int64),
        has_work=has_work,
        halves=_halves(costs),
        hosts=None
        if room is None
        else Hosts(
            state_bytes=held.optimizer[0],
            whole_model_saving_bytes=held.optimizer[0, :, 0] if _holds_once(costs) else np.zeros(len(slots)),
            capacity_bytes=room,
        ),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Held:
    """Bytes that a slot holds of each unit; see `Instance`."""

    resident: np.ndarray
    """[C, D, U]"""
    transient: np.ndarray
    """[C, D, U]"""
    optimizer: np.ndarray
    """[C, D, U]: of the resident ones."""
    saving: np.ndarray
    """[D]: what a stage of the whole model holds less."""


def _held(costs: Costs, shape: Shape, numbers: Numbers, owners: np.ndarray) -> _Held:
    """`owners` [D] of each slot's units share their optimizer state, if the shape shards it."""
    transient = numbers("transient_bytes")
    optimizer = numbers("optimizer_bytes")
    if shape.sharded:
        optimizer /= owners[None, :, None]
    own = numbers("own_gradient_bytes")
    copies = own * costs.problem.reduce_copy_share * _is_reduced(costs, owners)
    resident = numbers("parameter_bytes") + numbers("gradient_bytes") + copies + optimizer
    once = _holds_once(costs)
    tied_share = numbers("tied_share")[0, :, 0] if once else np.zeros(len(owners))
    saving = tied_share * (resident - copies)[0, :, 0] + (copies[0, :, 0] if once else 0.0)
    # A stage with both ends of a tied model that has no other owner reduces nothing.
    saving += np.where(owners > 1, 0.0, copies[0].sum(axis=1) - (copies[0, :, 0] if once else 0.0))
    # The head's transient bytes add to the largest of the other units'; see `costs.memory.stage_memory`.
    resident[:, :, -1] += transient[:, :, -1]
    transient[:, :, -1] = 0.0
    return _Held(resident=resident, transient=transient, optimizer=optimizer, saving=saving)


def _holds_once(costs: Costs) -> bool:
    """Whether a stage of the whole model holds one matrix for embedding and head."""
    return costs.ties


def _cards(slot: Slot) -> list[Card]:
    return [card for group in slot for replica in group for card in replica]


def _owners(slot: Slot) -> list[Replica]:
    """The replicas of all pipelines, whose rings reduce the gradients of the slot's units."""
    return [replica for group in slot for replica in group]


def _message_table(costs: Costs, shape: Shape) -> tuple[np.ndarray, np.ndarray]:
    """(seconds [M, D, D] from slot to slot for each message size, index [U] of the size after each unit).

    The size after a unit is the largest over the slots; a hidden state has the same size on every card.
    """
    mixed = [costs.of_replica(slot[0][0], shape.micro_batch_size, "none").units for slot in shape.slots]
    outputs = np.array([[unit.output_bytes for unit in units] for units in mixed]).max(axis=0)
    sizes, message_of = np.unique(outputs[:-1], return_inverse=True)
    seconds = _pipeline_messages(costs, shape, sizes.tolist()).max(axis=1)
    return seconds, np.append(message_of.reshape(-1), 0).astype(np.int64)


def _pipeline_messages(costs: Costs, shape: Shape, sizes: Sequence[float]) -> np.ndarray:
    """[M, pipelines, D, D]: seconds of a message from slot i to slot j in each pipeline, by size.

    Each distinct route is looked up once; it depends on the two nodes and on how many flows share their NICs.
    """
    slots, count = shape.slots, shape.num_pipelines
    leads = [[slot[d][0][0] for slot in slots] for d in range(count)]
    names = {node: i for i, node in enumerate(dict.fromkeys(card.node for row in leads for card in row))}
    nodes = np.array([[names[card.node] for card in row] for row in leads])
    seconds = np.zeros((len(sizes), count, len(slots), len(slots)))
    broadcasts = [_group_broadcast_seconds(costs, slots, d, sizes) for d in range(count)]
    leaving = _leaving(nodes)
    for d in range(count):
        away = nodes[d][:, None] != nodes[d][None, :]
        sharers = np.where(away, np.maximum(leaving[d], leaving[d].T), 1)
        if costs.topology.measured:
            keys = np.arange(len(slots) ** 2)
        else:
            pair = nodes[d][:, None] * len(names) + nodes[d][None, :]
            keys = (pair * (int(sharers.max()) + 1) + sharers).ravel()
        _, firsts, which = np.unique(keys, return_index=True, return_inverse=True)
        times = np.zeros((len(sizes), len(firsts)))
        for k, first in enumerate(firsts.tolist()):
            i, j = divmod(first, len(slots))
            if i == j and len(slots) > 1 and not costs.topology.measured:
                # The pair of a slot with itself has the same key as two slots of its node.
                i, j = _pair_in_node(nodes[d], i)
            if i != j:
                route = find_route(costs.topology, leads[d][i], leads[d][j])
                flows = int(sharers[i, j])
                times[:, k] = [message_seconds(route, size, sharers=flows) for size in sizes]
        seconds[:, d] = times[:, which.reshape(-1)].reshape(len(sizes), len(slots), len(slots))
        seconds[:, d] += broadcasts[d][:, None, :]
        seconds[:, d, np.arange(len(slots)), np.arange(len(slots))] = 0.0
    return seconds


def _pair_in_node(nodes: np.ndarray, i: int) -> tuple[int, int]:
    """Two slots of the node of slot i; (i, i) if it is alone there."""
    same = np.flatnonzero(nodes == nodes[i])
    return (int(same[0]), int(same[1])) if len(same) > 1 else (i, i)


def _group_broadcast_seconds(
    costs: Costs, slots: Sequence[Slot], d: int, sizes: Sequence[float]
) -> np.ndarray:
    """[M, D]: broadcast of a message inside the tensor-parallel group that received it, in pipeline d."""
    rows = [
        [broadcast_seconds(costs.topology, slot[d][0], size) for slot in slots]
        if any(len(slot[d][0]) > 1 for slot in slots)
        else [0.0] * len(slots)
        for size in sizes
    ]
    return np.array(rows)


def _leaving(nodes: np.ndarray) -> np.ndarray:
    """[pipelines, D, D]: messages from slot i to slot j, of all pipelines, that leave the node of slot i of
    this pipeline; from slot j to slot i as many enter it."""
    away = nodes[:, :, None] != nodes[:, None, :]
    count = np.empty(away.shape, dtype=np.int32)
    for i in range(nodes.shape[1]):
        own, which = np.unique(nodes[:, i], return_inverse=True)
        if len(own) == len(nodes):
            count[:, i] = away[:, i]
            continue
        which = which.reshape(-1)
        order = np.argsort(which, kind="stable")
        starts = np.searchsorted(which[order], np.arange(len(own)))
        count[:, i] = np.add.reduceat(away[order, i], starts, axis=0, dtype=np.int32)[which]
    return count


def _is_reduced(costs: Costs, owners: np.ndarray) -> np.ndarray:
    """[D, U]: whether a unit's gradient is reduced over other owners, of `owners` [D] owners of each slot's
    units; a tied embedding's always, unless one stage has both ends."""
    model = costs.problem.model
    reduced = np.repeat((owners > 1)[:, None], model.num_layers + 2, axis=1)
    if model.tie_embeddings:
        reduced[:, [0, -1]] = True
    return reduced


def _bucket_starts(costs: Costs) -> np.ndarray:
    """[U+1]: first unit of the bucket that ends before each unit, in a stage that begins early enough."""
    num_units = costs.problem.model.num_layers + 2
    starts = [bucket_units(costs, [0] * end)[-1].start for end in range(1, num_units + 1)]
    return np.array([0, *starts], dtype=np.int64)


def _halves(costs: Costs) -> Halves | None:
    """The layers that are two buckets; slots with one owner reduce nothing, whatever their buckets."""
    sizes = np.array(unit_parameters(costs))
    halved = sizes > costs.problem.bucket_size
    halved[[0, -1]] = False
    if not halved.any():
        return None
    attention = half_parts(costs)
    return Halves(units=halved, seconds=attention.seconds, parameters=attention.parameters)


def _bucket_seconds(
    costs: Costs, shape: Shape
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Of gradient reductions, and of the weights' way back: (seconds [D, U] of each unit over its owners,
    latency [D] once per bucket)."""
    parameters = unit_parameters(costs)
    owners = [_owners(slot) for slot in shape.slots]
    nothing = np.zeros((len(owners), len(parameters))), np.zeros(len(owners))
    if max(map(len, owners)) == 1:
        return nothing, nothing
    sharers = ring_sharers(owners)

    def table(seconds: Callable[[Sequence[Replica], float, int], float]) -> tuple[np.ndarray, np.ndarray]:
        known: dict[tuple[object, ...], tuple[list[float], float]] = {}
        rows: list[tuple[list[float], float]] = []
        for replicas, flows in zip(owners, sharers, strict=True):
            key = (_places(costs, replicas), flows)
            if key not in known:
                known[key] = _as_line(
                    lambda n, replicas=replicas, flows=flows: seconds(replicas, n, flows),
                    parameters,
                    far=not costs.topology.measured,
                )
            rows.append(known[key])
        return np.array([row for row, _ in rows]), np.array([start for _, start in rows])

    reduce = table(
        lambda owners, n, flows: grad_reduce_seconds(costs, owners, n, sharded=shape.sharded, sharers=flows)
    )
    if not shape.sharded:
        return reduce, nothing
    return reduce, table(lambda owners, n, flows: weight_sync_seconds(costs, owners, n, sharers=flows))


def _places(costs: Costs, replicas: Sequence[Replica]) -> tuple[object, ...]:
    """What tells the rings of a set of owners apart from those of others: which of their nodes are the same,
    and these nodes' groups; the nodes where some have links of their own, on measured links the cards."""
    topology = costs.topology
    if topology.measured:
        return tuple(replicas)
    if topology.dedicated or topology.shared_rates:
        return tuple(tuple(card.node for card in replica) for replica in replicas)
    nodes: dict[str, tuple[int, str]] = {}
    for replica in replicas:
        for card in replica:
            if card.node not in nodes:
                nodes[card.node] = len(nodes), topology.groups[card.node].name
    return tuple(
        (len(replica), replica[0].type, nodes[replica[0].node])
        if replica[0].node == replica[-1].node
        else tuple((card.type, nodes[card.node]) for card in replica)
        for replica in replicas
    )


def _as_line(
    seconds: Callable[[float], float], sizes: Sequence[float], *, far: bool
) -> tuple[list[float], float]:
    """(seconds of each size, latency): a line through two sizes, exact for latency + bytes / bandwidth.

    `far`: through sizes so large that a ring is faster than a tree.
    """
    total = sum(sizes) * (FAR if far else 1.0)
    slope = (seconds(total) - seconds(total / 2)) / (total / 2)
    return [slope * size for size in sizes], max(seconds(total) - slope * total, 0.0)


def _update_table(costs: Costs, shape: Shape, owners: np.ndarray) -> np.ndarray:
    """[D, U]: seconds of the optimizer step of each unit, shared by `owners` [D]."""
    traffic = STATE_BYTES[costs.problem.precision].update_traffic
    rows: list[list[float]] = []
    for slot, share in zip(shape.slots, owners.tolist(), strict=True):
        card = costs.of_replica(slot[0][0], shape.micro_batch_size, "none")
        rate = card.update_bytes_per_second * share
        rows.append([unit.parameters * traffic / rate for unit in card.units])
    return np.array(rows)


def _tied_embedding_matrix(costs: Costs, shape: Shape) -> np.ndarray:
    """[D, D]: seconds of the tied embedding's reduction; slot i has the first stage and slot j the last."""
    owners = [_owners(slot) for slot in shape.slots]
    numbers: dict[object, int] = {}
    kinds = [numbers.setdefault(_places(costs, row), len(numbers)) for row in owners]
    meets = _share_nodes(owners)
    known: dict[tuple[object, ...], float] = {}
    result = np.zeros((len(owners), len(owners)))
    for i, j in itertools.product(range(len(owners)), repeat=2):
        # Owners that have no node in common with the others are like any of their kind.
        key: tuple[object, ...] = (kinds[i], kinds[j], i == j)
        if i != j and meets[i, j]:
            key = _places(costs, [*owners[i], *owners[j]])
        if key not in known:
            known[key] = tied_embedding_seconds(costs, owners[i], owners[j], sharded=shape.sharded)
        result[i, j] = known[key]
    return result


def _share_nodes(owners: Sequence[Sequence[Replica]]) -> np.ndarray:
    """[D, D]: whether two sets of owners have a node in common."""
    names = [{card.node for replica in row for card in replica} for row in owners]
    number = {node: i for i, node in enumerate(dict.fromkeys(node for row in names for node in row))}
    has = np.zeros((len(owners), len(number)), dtype=np.float32)
    for i, row in enumerate(names):
        has[i, [number[node] for node in row]] = 1.0
    return has @ has.T > 0
