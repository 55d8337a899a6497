"""A plan problem in the tables of the compiled core, and its drafts as plans.

The core prices what a search makes by the thousand: whole layers, and replicas of cards of one type inside a
node. `make_tables` says of which problems that is all there is; of others, and of all that is special in a
plan, `cost_plan` is the price.

Where links were measured the cards of a node are not alike: a draft's replicas take the next cards of their
pools in order, and are priced by the links of these.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import c_double, c_int32
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card, Sends
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.grad_reduce import half_parts, unit_parameters
from yuan_train.planner.costs.links import Route, copy_seconds_per_byte, find_route
from yuan_train.planner.costs.unit_costs import CardCosts, Costs
from yuan_train.planner.costs.workload import (
    STATE_BYTES,
    disk_bytes,
    disk_step_seconds,
    host_bytes,
    host_step_seconds,
    plan_on_cards,
    slot_bytes,
)
from yuan_train.planner.native import core

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
"""Kinds of recompute, by their numbers in the core."""
NO_LIMIT = 2.0**60
"""Bytes of a card; sums over all cards are exact."""
SENDS: tuple[Sends, ...] = ("overlapped", "blocking")
"""The same of `enum sends`."""
SUMS = {
    **{name: f"{name}_seconds" for name in ("forward", "backward", "weight")},
    **{name: name for name in ("parameters", "parameter_bytes", "gradient_bytes", "optimizer_bytes")},
    "activation_bytes": "activation_bytes",
}
"""Of a unit table, what are sums of which figures of the units before."""


@dataclass(frozen=True)
class Tables:
    """A problem in the core, and what its numbers mean."""

    costs: Costs
    pools: tuple[tuple[Card, ...], ...]
    """The cards of each pool: of one type, in one node."""
    pool_of: dict[str, int]
    """By name of a card."""
    sizes: tuple[int, ...]
    problem: core.ProblemTable
    evaluator: core.Evaluator


def make_tables(
    costs: Costs,
    sizes: Sequence[int],
    widths: Sequence[int],
    *,
    num_islands: int = 1,
    on_disk: bool = False,
    apart: bool = False,
) -> Tables | None:
    """The tables of a problem for these micro-batch sizes and tensor-parallel widths; None for a problem that
    the core does not price whole. With several islands they are those of one, and prices those of all;
    `on_disk`: state that hosts have no room for is priced as if it lay on the disks of the cluster file.
    Pools of cards that stand `apart` have one card each: a draft then says which."""
    problem, topology = costs.problem, costs.topology
    devices = {card.type: problem.cluster.device_type(card.type) for card in problem.cluster.cards}
    cards = [card for card in problem.cluster.cards if devices[card.type].peak(problem.precision) is not None]
    if len(sizes) > core.NUM_SIZES or not cards:
        return None
    alike = itertools.groupby(cards, key=lambda card: (card.node, card.type, card.name if apart else ""))
    pools = tuple(tuple(own) for _, own in alike)
    table = core.ProblemTable()
    table.num_units, table.num_pools = problem.model.num_layers + 2, len(pools)
    table.num_nodes, table.num_cards = len({card.node for card in cards}), len(cards)
    table.global_batch_size, table.is_tied = problem.global_batch_size, costs.ties
    table.sends, table.is_measured = SENDS.index(problem.send_mode), bool(topology.measured)
    table.num_places = table.num_cards if table.is_measured else table.num_pools
    table.num_islands = num_islands
    table.sizes[: len(sizes)] = list(sizes)
    table.hidden_bytes[: len(sizes)] = [costs.hidden_bytes(size) for size in sizes]
    _fill_pools(costs, pools, table, on_disk=on_disk)
    _fill_units(costs, pools, sizes, widths, table)
    _fill_routes(costs, pools, table)
    _fill_reductions(costs, problem.model, table)
    pool_of = {card.name: i for i, pool in enumerate(pools) for card in pool}
    return Tables(costs, pools, pool_of, tuple(sizes), table, core.Evaluator(table))


def without_limits(tables: Tables) -> Tables:
    """The same problem on cards whose memory does not end. It refers to the tables it is made of, which have
    to last as long."""
    table = core.ProblemTable.from_buffer_copy(tables.problem)
    rows = (core.Pool * len(tables.pools))(*tables.problem.pools[: len(tables.pools)])
    for row in rows:
        row.limit = NO_LIMIT
    table.pools = rows
    return replace(tables, problem=table, evaluator=core.Evaluator(table))


def _fill_pools(
    costs: Costs, pools: Sequence[Sequence[Card]], table: core.ProblemTable, *, on_disk: bool
) -> None:
    problem, precision = costs.problem, costs.problem.precision
    rows = (core.Pool * len(pools))()
    kinds: dict[object, int] = {}
    types: dict[str, int] = {}
    nodes: dict[str, int] = {}
    backends: dict[str, int] = {"gloo": 0}
    place = 0
    for row, (card, *others) in zip(rows, pools, strict=True):
        device, host = problem.cluster.device_type(card.type), costs.host_of(card)
        group = costs.topology.groups[card.node]
        # Nodes of a group, or alike ones, differ in nothing but their names and dedicated links.
        kind = (card.type, len(others), repr((group.link, group.network, host, group.disk)))
        row.kind = kinds.setdefault(kind, len(kinds))
        row.type = types.setdefault(card.type, len(types))
        row.node, row.count = nodes.setdefault(card.node, len(nodes)), 1 + len(others)
        row.first_place, row.place_step = place, table.is_measured
        place += row.count if table.is_measured else 1
        row.backend = backends.setdefault(device.backend, len(backends))
        row.is_simulated = device.slowdown is not None
        row.copy_seconds = copy_seconds_per_byte(costs.topology, [card])
        row.limit = problem.usable_bytes(card.type)
        row.reserved = float(device.reserved)
        row.host_bytes = host.memory_bytes
        row.host_seconds = host_step_seconds(host, precision)
        row.host_bytes_each = host_bytes(precision)
        row.host_link = host.link_bytes_per_second
        if on_disk and costs.has_disk(card):
            row.disk_bytes = host.disk_bytes / disk_bytes(precision) * row.host_bytes_each
            row.disk_seconds = disk_step_seconds(host, precision) / row.host_bytes_each
            row.disk_slots = slot_bytes(precision, math.inf)
    table.pools = rows


def _doubles(values: Iterable[float]) -> ctypes.Array[c_double]:
    own = tuple(values)
    return (c_double * len(own))(*own)


def _sums(values: Iterable[float]) -> ctypes.Array[c_double]:
    return _doubles(itertools.accumulate(values, initial=0.0))


def _unit_table(costs: Costs, part: CardCosts) -> core.UnitTable:
    units, row = part.units, core.UnitTable()
    for field, name in SUMS.items():
        setattr(row, field, _sums(float(getattr(unit, name)) for unit in units))
    row.transient = _doubles(unit.transient_bytes for unit in units)
    row.output = _doubles(unit.output_bytes for unit in units)
    row.start_forward, row.start_backward = part.start.forward_seconds, part.start.backward_seconds
    row.boundary_bytes = part.boundary_bytes
    traffic = STATE_BYTES[costs.problem.precision].update_traffic
    row.update_seconds = traffic / part.update_bytes_per_second
    critics = [unit.critic for unit in units if unit.critic is not None]
    if critics:
        row.critic_parameters = _sums(critic.parameter_bytes for critic in critics)
        row.critic_gradients = _sums(critic.gradient_bytes for critic in critics)
        row.critic_optimizer = _sums(critic.optimizer_bytes for critic in critics)
    row.half_seconds[:] = [half.seconds for half in part.halves]
    row.half_activations[:] = [half.activations for half in part.halves]
    return row


def _fill_units(
    costs: Costs,
    pools: Sequence[Sequence[Card]],
    sizes: Sequence[int],
    widths: Sequence[int],
    table: core.ProblemTable,
) -> None:
    found: dict[int, tuple[int, CardCosts]] = {}
    shape = (table.num_places, core.NUM_WIDTHS, core.NUM_SIZES, core.NUM_RECOMPUTES)
    rows = (c_int32 * math.prod(shape))(*[-1] * math.prod(shape))
    # Of experts, which wider groups divide, cards alone.
    single = [1] if costs.problem.model.num_experts else widths
    widths = [width for width in single if width.bit_count() == 1 and width < 1 << core.NUM_WIDTHS]
    wanted = itertools.product(_places(pools, table), widths, enumerate(sizes), enumerate(RECOMPUTES))
    for (p, mates), width, (b, size), (r, kind) in wanted:
        if width > len(mates) or (width > 1 and costs.topology.types[mates[0].type].backend == "gloo"):
            continue
        part = costs.of_replica(tuple(mates[:width]), size, kind)
        number, _ = found.setdefault(id(part), (len(found), part))
        rows[((p * shape[1] + width.bit_length() - 1) * shape[2] + b) * shape[3] + r] = number
    tables = [_unit_table(costs, part) for _, part in found.values()]
    table.tables = (core.UnitTable * max(len(tables), 1))(*tables)
    table.table_of = rows


def _places(pools: Sequence[Sequence[Card]], table: core.ProblemTable) -> list[tuple[int, Sequence[Card]]]:
    """Each place, and the cards from there on in its pool."""
    each = (pool[i:] for pool in pools for i in range(len(pool) if table.is_measured else 1))
    return list(enumerate(each))


def _fill_routes(costs: Costs, pools: Sequence[Sequence[Card]], table: core.ProblemTable) -> None:
    rows = (core.RouteTable * table.num_places**2)()
    mates: dict[str, list[Card]] = {}
    for pool in pools:
        mates.setdefault(pool[0].node, []).extend(pool)
    places = _places(pools, table)
    for (i, (source, *_)), (j, (target, *_)) in itertools.product(places, places):
        if i == j:
            others = [card for card in mates[source.node] if card != source]
            if table.is_measured or not others:
                continue
            target = others[0]
        _fill_route(find_route(costs.topology, source, target), rows[i * len(places) + j])
    table.routes = rows


def _fill_route(route: Route, row: core.RouteTable) -> None:
    row.latency, row.stream_rate = route.latency_seconds, route.stream_bytes_per_second
    row.rate, row.is_shared = route.bytes_per_second, route.shared
    row.shared_rate, row.copy_seconds = route.shared_bytes_per_second or 0.0, route.copy_seconds_per_byte
    if route.measured is not None:
        sizes, seconds = route.measured.message_bytes, route.measured.seconds
        row.num_sizes, row.compute_seconds = len(sizes), route.measured.compute_seconds_per_byte
        row.sizes, row.seconds = _doubles(sizes), _doubles(seconds)


def _fill_reductions(costs: Costs, model: ModelConfig, table: core.ProblemTable) -> None:
    problem, state = costs.problem, STATE_BYTES[costs.problem.precision]
    frozen, halves = model.lora is not None, half_parts(costs)
    table.reduced = _doubles(unit_parameters(costs))
    *held, head = model.trained_unit_parameters
    table.held = _doubles((*held, head if frozen else model.head_parameters))
    table.bucket_size = float(problem.bucket_size)
    table.half_parameters, table.half_seconds = halves.parameters, halves.seconds
    table.embedding_parameters = 0.0 if frozen else float(model.embedding_parameters)
    table.reduce_bytes, table.weight_bytes = float(problem.reduce_bytes), float(state.parameters)
    table.reduce_copy_share = problem.reduce_copy_share


def plan_of(tables: Tables, draft: core.DraftTable) -> Plan:
    """A realised draft as a plan: each group takes the next free cards of its pool."""
    free = [iter(pool) for pool in tables.pools]
    taken: list[list[list[tuple[Card, ...]]]] = []
    lines: list[core.PipelineRow] = draft.pipelines[: draft.num_pipelines]
    for line in lines:
        own: list[list[tuple[Card, ...]]] = []
        rows: list[core.StageRow] = draft.stages[line.first_stage : line.first_stage + line.num_stages]
        for row in rows:
            pools: list[int] = row.pools[: row.num_replicas] if not row.worker else []
            groups = [tuple(itertools.islice(free[pool], row.width)) for pool in pools]
            own.append(own[row.worker - 1] if row.worker else groups)
        taken.append(own)
    used = {card for own in taken for groups in own for group in groups for card in group}

    def pipelines(rank_of: Mapping[Card, int]) -> Iterator[PipelinePlan]:
        for line, own in zip(lines, taken, strict=True):
            yield PipelinePlan(
                micro_batch_size=tables.sizes[line.size],
                num_micro_batches=line.num_micro_batches,
                stages=tuple(_stages_of(draft, line, own, rank_of)),
            )

    schedule, sharded = core.NAMES[draft.schedule], bool(draft.is_sharded)
    return plan_on_cards(tables.costs.problem, used, pipelines, schedule=schedule, sharded=sharded)


def _stages_of(
    draft: core.DraftTable,
    line: core.PipelineRow,
    groups: Sequence[Sequence[tuple[Card, ...]]],
    rank_of: Mapping[Card, int],
) -> Iterator[StagePlan]:
    rows: list[core.StageRow] = draft.stages[line.first_stage : line.first_stage + line.num_stages]
    first = 0
    for s, (row, replicas) in enumerate(zip(rows, groups, strict=True)):
        recomputed = row.num_recomputed
        yield StagePlan(
            replicas=tuple(tuple(rank_of[card] for card in replica) for replica in replicas),
            layers=(first, first + row.layers),
            embedding=s == 0,
            head=s == line.num_stages - 1,
            recompute=RECOMPUTES[row.recompute] if recomputed else "none",
            recompute_layers=recomputed if 0 < recomputed < row.layers else None,
            in_flight=row.depth or None,
            optimizer_offload=row.offload,
            optimizer_share=row.share if draft.is_sharded else 1.0,
            activation_offload=row.away,
            resident_parts=row.resident if row.away else None,
            fetch_ahead=row.ahead if row.away else None,
        )
        first += row.layers
