"""Plans that the compiled core finds: a problem in its tables, its drafts as plans, and the search for them.

The core prices what a search makes by the thousand: whole layers, and replicas of cards of one type inside a
node. `make_tables` says of which problems that is all there is; of others, and of all that is special in a
plan, `cost_plan` is the price. Where links were measured the cards of a node are not alike: a draft's
replicas take the next cards of their pools in order, and are priced by the links of these.

The search is one over all that a plan may be, by the core's own price of a step. `native/search.c` draws
random drafts, changes layers, depths, shares of the batch, order, widths, replicas, stages, pipelines,
schedule, sharding and state on hosts, and keeps what is faster, and for a while what is not (annealing;
Kirkpatrick et al. 1983). It counts the drafts that it prices instead of looking at a clock, so that equal
input gives equal plans. `cost_plan` has the last word on what it finds.
"""

from __future__ import annotations

import ctypes
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from ctypes import c_double, c_int32, c_uint8
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from yuan_train.config.cluster import Card, Sends
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.grad_reduce import half_parts, unit_parameters
from yuan_train.planner.costs.links import Route, copy_seconds_per_byte, find_route
from yuan_train.planner.costs.unit_costs import CardCosts, Costs
from yuan_train.planner.costs.workload import (
    STATE_BYTES,
    PlanProblem,
    disk_bytes,
    disk_step_seconds,
    host_bytes,
    host_step_seconds,
    plan_on_cards,
    slot_bytes,
)
from yuan_train.planner.native import core
from yuan_train.planner.search.candidate import Candidate, Space, TimeLimit, judge
from yuan_train.planner.search.paged import with_disks
from yuan_train.planner.search.shapes import Options, Shape

# --- tables -------------------------------------------------------------------------------------------------


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
        for row in _rows(draft, line):
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
    rows, first = _rows(draft, line), 0
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


# --- the search ---------------------------------------------------------------------------------------------


FEW_CARDS = 56
"""Cards up to which more are searched longer: on more still, a draft takes as much longer to price."""
BUDGET_PER_CARD, LEAST_BUDGET = 20_000, 600_000
"""Of a search, for each card, and at least: a draft that is priced whole takes 4 of it, one that is longer
than wanted for certain 1."""
BUDGET_PER_SECOND = 30_000
"""At most, for each second of `search.time_limit`; 4 of it take 10 to 50 us."""
LONG_BATCH = 4096
"""Sequences of a batch from which on a draft takes as much longer to price as there are more."""
NUM_RESTARTS, MORE_RESTARTS, RESTART = 6, 16, 1 / 40
"""Searches under each set of schedules that know nothing of each other, those that follow under the better
set, and the part of the budget that each takes."""
SMALL_CARDS, NUM_SMALL = 8, 9
"""Cards up to which as many searches begin in each part of the space, half as long, and as many follow: with
one pipeline, with two and with any number, each under 1F1B, under others and under all. Of eight cards whose
best plan has two pipelines one search of 84 in all parts met it, and nine of 120 among plans with two."""
NUM_VIRTUAL = 12
"""Short searches of virtual stages on so few cards: most of them end in slower plans than the best one."""
AGAIN_CARDS, MOST_TIMES, EQUAL = 12, 4, 1e-3
"""Cards up to which all is searched again until the fastest draft is found twice, how often at most, and
which steps count as equal: one search in twelve of so few cards misses it, and it takes a second or two."""
GOING_ON, LEAST_ROUNDS, MOST_ROUNDS, LEAST_GAIN = 1 / 4, 2, 5, 1e-3
"""Part of the budget that goes on from the fastest drafts in a round, how many rounds there are, and what one
must gain for there to be a further one."""
NUM_CROSSED, OF_CROSSED, MOST_PARTS, MOST_CROSSED = 40, 1 / 16, 400, 24
"""Drafts of pipelines of several others that a round begins with, and their part of the budget; how many
pipelines are looked at, those of the fastest drafts, and how many a draft has at most."""
PROMISING_VIRTUAL, PROMISING_BESIDE = 1.02, 0.99
"""A part of the space that few plans gain by is searched further if a short search has found a step of at
most this multiple of the fastest one's: virtual stages, and what is preferred only if it gains much."""
OF_SHAPES, MOST_SHAPES = 1 / 8, 400
"""Part of the budget of a search that begins with shapes, and how many of these."""
NUM_GIVEN = 6
"""Of the fastest drafts that are known, which a search begins with."""
NUM_JUDGED, NEAR = 20, 1.004
"""Drafts that are priced once more, as long as their step is within this multiple of the fastest one's."""
NUM_JUDGED_BESIDE = 5
"""The same of those with something on hosts, of which `cost_plan` places copy after copy."""
FIRST_SEED = 300
"""Of the random numbers of the searches, which count on from it; docs/benchmarks-planner.md tried three."""
PLAIN, VIRTUAL = 1 << core.NAMES.index("1f1b"), 1 << core.NAMES.index("interleaved_1f1b")
ANY = 2**64 - 1
"""The set of all counts."""


@dataclass(frozen=True)
class FoundDrafts:
    """Plans that fit, and whether some fits under a schedule that the search keys may not name."""

    candidates: tuple[Candidate, ...]
    any_fits: bool
    num_priced: int


def search_drafts(space: Space, shapes: Sequence[Shape]) -> FoundDrafts:
    """The fastest plans that the core finds, from shapes and random drafts; none where it has no tables."""
    costs, options = space.costs, space.options
    sizes, found = options.all_sizes, list[Candidate]()
    any_fits, num_priced, num_cards = False, 0, len(space.cards)
    most = max(BUDGET_PER_CARD * min(num_cards, FEW_CARDS), LEAST_BUDGET)
    # More effort begins with a normal search, so that it ends in no slower plan.
    efforts = sorted({min(options.effort, 1.0), options.effort})
    # The core has room for so many sizes at a time.
    for first, effort in itertools.product(range(0, len(sizes), core.NUM_SIZES), efforts):
        own = effort * most * min(1.0, FEW_CARDS / num_cards)
        pace = BUDGET_PER_SECOND * min(1.0, LONG_BATCH / costs.problem.global_batch_size)
        budget = int(min(own, pace * space.limit.seconds))
        some = sizes[first : first + core.NUM_SIZES]
        tables = make_tables(costs, some, options.tensor, on_disk=options.offload_disk)
        if tables is None:
            continue
        search = _Search(tables, budget, space.limit)
        # At most so many of the shapes, in even steps.
        count = min(len(shapes), MOST_SHAPES)
        drafts = [draft_of_shape(tables, shapes[i * len(shapes) // count]) for i in range(count)]
        shaped = [(0.0, draft) for draft in drafts if draft is not None]
        wanted = draft_space(options, costs.problem)
        times = MOST_TIMES if options.searches_again and num_cards <= AGAIN_CARDS and effort == 1.0 else 1
        pools = search_again(search, wanted, shaped, keeps_to_cards=options.keeps_to_cards, times=times)
        # Those that keep to the cards, or but for state, may be preferred to faster ones.
        counts = (NUM_JUDGED, NUM_JUDGED_BESIDE, NUM_JUDGED_BESIDE)
        for pool, n in zip(pools, counts, strict=True):
            found += _judged(space, tables, pool[:n])
        any_fits, num_priced = any_fits or search.any_fits, num_priced + sum(search.priced)
    return FoundDrafts(tuple(found), any_fits=any_fits, num_priced=num_priced)


def _judged(space: Space, tables: Tables, top: Sequence[_Known]) -> Iterator[Candidate]:
    """Plans of the fastest of these drafts; one alone when the time is over."""
    for draft in (draft for step, draft in top if step <= NEAR * top[0][0]):
        plan = plan_of(tables, draft)
        if space.options.offload_disk:
            plan = with_disks(space.costs, plan)
        if (one := judge(space, plan)) is not None:
            yield one
            if space.is_over():
                return


def draft_of_shape(tables: Tables, shape: Shape) -> core.DraftTable | None:
    """Equal pipelines of a shape's slots, without layers; None if a draft cannot have them."""
    rows: list[core.StageRow] = []
    for d, slot in itertools.product(range(shape.num_pipelines), shape.slots):
        group = slot[d]
        if len(group) > core.MAX_REPLICAS:
            return None
        row = core.StageRow(width=len(group[0]), num_replicas=len(group), share=1.0)
        for r, replica in enumerate(group):
            row.pools[r] = tables.pool_of[replica[0].name]
        rows.append(row)
    if shape.micro_batch_size not in tables.sizes:
        return None
    size, stages = tables.sizes.index(shape.micro_batch_size), len(shape.slots)
    count = shape.num_micro_batches
    lines = [core.PipelineRow(size, count, d * stages, stages) for d in range(shape.num_pipelines)]
    return make_draft(core.NAMES.index(shape.schedule), shape.sharded, lines, rows)


def make_draft(
    schedule: int, is_sharded: int, lines: Sequence[core.PipelineRow], rows: Sequence[core.StageRow]
) -> core.DraftTable:
    """A draft of these pipelines and stages."""
    draft = core.DraftTable(schedule=schedule, is_sharded=is_sharded)
    draft.num_pipelines, draft.num_stages = len(lines), len(rows)
    draft.pipelines = (core.PipelineRow * len(lines))(*lines)
    draft.stages = (core.StageRow * len(rows))(*rows)
    return draft


def is_short(tables: Tables, draft: core.DraftTable) -> bool:
    """Whether a draft recomputes, or leaves a card out, which it may do for want of memory."""
    rows: list[core.StageRow] = draft.stages[: draft.num_stages]
    used = sum(row.num_replicas * row.width for row in rows if not row.worker)
    return used < tables.problem.num_cards or any(row.num_recomputed for row in rows)


def sends_away(draft: core.DraftTable) -> bool:
    """Whether activations of a stage lie on its hosts."""
    return any(row.away for row in draft.stages[: draft.num_stages])


_Known = tuple[float, core.DraftTable]
"""A draft, and its step in seconds."""
_Begin = tuple[core.SpaceTable, Sequence[_Known]]
"""What a search may choose, and what it begins with."""


class _Pools(NamedTuple):
    """Drafts, the fastest first."""

    on_cards: list[_Known]
    """That keep to the cards."""
    beside: list[_Known]
    """With something beside them."""
    with_state: list[_Known]
    """With state alone beside them, where those before have more than that."""


class _Search:
    """Searches of the core, each with its own random numbers, as many at a time as there are processors."""

    def __init__(self, tables: Tables, budget: int, limit: TimeLimit) -> None:
        self.tables, self.budget, self.limit = tables, budget, limit
        self.num_searches, self.any_fits, self.priced = 0, False, list[int]()

    def run(self, begins: Sequence[_Begin], share: float, part: int = core.WHOLE) -> list[list[_Known]]:
        """The fastest drafts of each of several that take, whole or in part, that share of the budget."""
        first = FIRST_SEED + self.num_searches + 1
        self.num_searches += len(begins)
        one = partial(self._run_one, budget=int(self.budget * share), part=part)
        # Those of many cards would take too much memory together.
        most = core.MOST_THREADS if self.tables.problem.num_cards <= FEW_CARDS else 1
        return core.run_together(one, begins, itertools.count(first), most=most)

    def _run_one(self, begin: _Begin, seed: int, *, budget: int, part: int) -> list[_Known]:
        space, given = begin[0], [draft for _, draft in begin[1]]
        left = self.limit.left()
        if (left < 0 and self.any_fits) or (part != core.WHOLE and not given):
            return []
        found = self.tables.evaluator.search(
            space, given, budget=budget, seed=seed, room=NUM_JUDGED, part=part, seconds=left
        )
        self.priced.append(found.num_priced)
        self.any_fits = self.any_fits or bool(found.steps)
        return _fastest(list(zip(found.steps, found.drafts, strict=True)))


def search_again(
    search: _Search, space: core.SpaceTable, shaped: Sequence[_Known], *, keeps_to_cards: bool, times: int
) -> _Pools:
    """What searches of a space find: so many, or fewer if two of them have found the fastest draft."""
    pools, steps = _Pools([], [], []), list[float]()
    while len(steps) < times:
        more = search_space(search, space, shaped, keeps_to_cards=keeps_to_cards)
        pools = _Pools(*(_fastest([*own, *new]) for own, new in zip(pools, more, strict=True)))
        steps.append(min((step for pool in more for step, _ in pool[:1]), default=math.inf))
        least = min(steps)
        if math.isinf(least) or sum(step <= least * (1 + EQUAL) for step in steps) == 2:
            break
    return pools


def search_space(
    search: _Search, space: core.SpaceTable, shaped: Sequence[_Known], *, keeps_to_cards: bool
) -> _Pools:
    """The fastest drafts that one search of a space finds.

    Single searches end in unlike structures, whose steps differ by some percent: the fastest of several is
    worth more than one that is longer, and the last one goes on from it. Some run under 1F1B alone: under
    another schedule nearly all plans may be faster, and none the fastest.
    """
    # Plans with virtual stages alone are split from others.
    others, only = space.schedules & ~VIRTUAL or PLAIN, not space.schedules & ~VIRTUAL
    sets = list(dict.fromkeys((others & PLAIN or others, others)))
    spaces = [space.changed(schedules=schedules, may_offload=0, may_send=0) for schedules in sets]
    hosts, later = space.changed(schedules=others), list[list[_Known]]()
    found, beside = _restarted(search, spaces), list[_Known]()
    found += search.run([(spaces[0], shaped)], OF_SHAPES, core.DEALS)
    on_cards = _continued(search, spaces[-1], found)
    if space.may_offload or space.may_send:
        found = [_annealed(search, hosts, RESTART, on_cards)]
        short = not on_cards or is_short(search.tables, on_cards[0][1])
        short = short or _wants_memory(search, spaces[-1], on_cards)
        if short:
            found += _restarted(search, [space.changed(schedules=schedules) for schedules in sets])
            for row in (row for _, draft in shaped for row in draft.stages[: draft.num_stages]):
                row.may_offload = space.may_offload
            found += search.run([(hosts, shaped)], OF_SHAPES, core.DEALS)
        beside = _fastest(list(itertools.chain(*found)))
        most = PROMISING_BESIDE if keeps_to_cards and on_cards else 1.0
        if beside and (not on_cards or beside[0][0] < most * on_cards[0][0]):
            beside = _continued(search, hosts, [*found, on_cards])
        elif short:
            later = [*found, on_cards]
    if space.schedules & VIRTUAL:
        own = space.changed(schedules=VIRTUAL, may_send=0, may_offload=space.may_offload * (not on_cards))
        known = _fastest([*on_cards, *beside])
        small = search.tables.problem.num_cards <= SMALL_CARDS
        runs = search.run([(own, known[:NUM_GIVEN])] * (NUM_VIRTUAL if small else 1), RESTART)
        split = _fastest(list(itertools.chain(*runs)))
        if split and (only or split[0][0] < PROMISING_VIRTUAL * known[0][0]):
            split = _continued(search, own, runs)
        on_cards = split if only else _fastest([*on_cards, *split])
    # Where memory is short, a short search of hosts says little of a long one.
    if later and not only:
        beside = _continued(search, hosts, later)
    if only or not beside or not sends_away(beside[0][1]):
        return _Pools(on_cards, [] if only else beside, [])
    alone = _fastest([one for run in (*found, beside) for one in run if not sends_away(one[1])])
    return _Pools(on_cards, beside, _annealed(search, hosts.changed(may_send=0), RESTART, alone))


def _restarted(search: _Search, spaces: Sequence[core.SpaceTable]) -> list[list[_Known]]:
    """What searches of each space find, and more of the one whose drafts are faster."""
    num, more, share = NUM_RESTARTS, MORE_RESTARTS, RESTART
    if search.tables.problem.num_cards <= SMALL_CARDS:
        num, more, share, spaces = NUM_SMALL, NUM_SMALL, RESTART / 2, _parts(spaces)
    runs = search.run([(own, ()) for own in spaces for _ in range(num)], share)
    found = [runs[i : i + num] for i in range(0, len(runs), num)]
    steps = [min((step for run in own for step, _ in run), default=math.inf) for own in found]
    better = spaces[steps.index(min(steps))]
    return [*runs, *search.run([(better, ())] * more, share)]


def _parts(spaces: Sequence[core.SpaceTable]) -> list[core.SpaceTable]:
    """The spaces and the last one without 1F1B; of each, plans of one pipeline, of two, and of any number."""
    last = spaces[-1]
    if beside := last.schedules & ~PLAIN:
        spaces = spaces if beside == last.schedules else [*spaces, last.changed(schedules=beside)]
    return [
        own.changed(pipelines=own.pipelines & some)
        for own in spaces
        for some in (1 << 1, 1 << 2, ANY)
        if own.pipelines & some or some == ANY
    ]


def _wants_memory(search: _Search, space: core.SpaceTable, known: Sequence[_Known]) -> bool:
    """Whether a short search finds faster drafts if cards' memory does not end; hosts can gain no more."""
    roomy = _Search(without_limits(search.tables), search.budget, search.limit)
    # What it finds need not fit, so that it ends with the time.
    roomy.any_fits = True
    found = _annealed(roomy, space, RESTART, known)
    search.priced += roomy.priced
    return bool(found) and found[0][0] < PROMISING_BESIDE * known[0][0]


def _continued(search: _Search, space: core.SpaceTable, found: Sequence[list[_Known]]) -> list[_Known]:
    """The fastest drafts after rounds that go on from the fastest one of each search, while they gain."""
    runs = [run for run in found if run]
    for number in range(1, MOST_ROUNDS + 1 if runs else 1):
        # Those of one search are much alike.
        fastest = _fastest([run[0] for run in runs])[0][0]
        if search.tables.problem.num_cards > AGAIN_CARDS:
            crossed = cross_drafts(search.tables, space, runs)
            runs += search.run([(space, crossed)], OF_CROSSED, core.DEALS) if crossed else []
        runs.append(_annealed(search, space, GOING_ON, _fastest([run[0] for run in runs if run])))
        gains = bool(runs[-1]) and runs[-1][0][0] <= fastest * (1 - LEAST_GAIN)
        runs = [run for run in runs if run]
        if number >= LEAST_ROUNDS and not gains:
            break
    return _fastest(list(itertools.chain(*runs)))


class _Part(NamedTuple):
    """A pipeline of a draft."""

    rate: float
    """Sequences that it takes in a second there."""
    draft: core.DraftTable
    line: core.PipelineRow
    cards: Mapping[int, int]
    """How many of each pool."""


def cross_drafts(tables: Tables, space: core.SpaceTable, runs: Sequence[list[_Known]]) -> list[_Known]:
    """Drafts of the pipelines of several (crossover; Holland 1975): of each, with the fastest others that the
    cards suffice for. Those of one draft are known."""
    parts, made = _fast_parts(tables, space, runs), dict[float, list[_Part]]()
    for first in parts:
        own = _with_fastest(tables, first, parts)
        if len({id(part.draft) for part in own}) > 1 and len(own) <= MOST_CROSSED:
            made[sum(part.rate for part in own)] = own
    fastest = [made[rate] for rate in sorted(made, reverse=True)[:NUM_CROSSED]]
    drafts = [_draft_of_parts(tables, own) for own in fastest]
    return [(0.0, draft) for draft in drafts if draft is not None]


def _with_fastest(tables: Tables, first: _Part, parts: Sequence[_Part]) -> list[_Part]:
    """One, and the fastest others under its schedule, again and again while cards are left."""
    own, left = [first], [len(pool) - first.cards.get(number, 0) for number, pool in enumerate(tables.pools)]
    for part in (part for part in parts if part.draft.schedule == first.draft.schedule):
        while all(left[pool] >= n for pool, n in part.cards.items()):
            own.append(part)
            for pool, n in part.cards.items():
                left[pool] -= n
    return own


def _fast_parts(tables: Tables, space: core.SpaceTable, runs: Sequence[list[_Known]]) -> list[_Part]:
    """The pipelines of the fastest drafts, of those with equal cards the fastest one; the fastest first."""
    found: dict[object, _Part] = {}
    for step, draft in sorted(itertools.chain(*runs), key=lambda known: known[0]):
        lines: list[core.PipelineRow] = draft.pipelines[: draft.num_pipelines]
        for line in lines:
            rows, cards = _rows(draft, line), Counter[int]()
            for row in rows:
                for pool in row.pools[: row.num_replicas]:
                    cards[pool] += row.width
            rate = line.num_micro_batches * tables.sizes[line.size] / step
            key = (draft.schedule, line.size, frozenset(cards.items()))
            is_own = space.schedules >> draft.schedule & 1 and not any(row.worker for row in rows)
            if is_own and len(found) < MOST_PARTS and (key not in found or found[key].rate < rate):
                found[key] = _Part(rate, draft, line, cards)
    return sorted(found.values(), key=lambda part: -part.rate)


def _rows(draft: core.DraftTable, line: core.PipelineRow) -> list[core.StageRow]:
    """The stages of a pipeline."""
    return draft.stages[line.first_stage : line.first_stage + line.num_stages]


def _draft_of_parts(tables: Tables, parts: Sequence[_Part]) -> core.DraftTable | None:
    """The batch is shared by their rates; None if it does not divide so."""
    left, rate = tables.problem.global_batch_size, sum(part.rate for part in parts)
    first, lines, rows = parts[0].draft, list[core.PipelineRow](), list[core.StageRow]()
    # What is left over goes to small micro-batches.
    for part in sorted(parts, key=lambda part: -part.line.size):
        size = tables.sizes[part.line.size]
        count = max(round(left * part.rate / rate / size), 1)
        lines.append(core.PipelineRow(part.line.size, count, len(rows), part.line.num_stages))
        rows += _rows(part.draft, part.line)
        left, rate = left - count * size, rate - part.rate
    return None if left else make_draft(first.schedule, first.is_sharded, lines, rows)


def _annealed(search: _Search, space: core.SpaceTable, share: float, given: Sequence[_Known]) -> list[_Known]:
    """The fastest drafts after the given ones are annealed, ever fewer and ever colder."""
    firsts, found = given, list[_Known]()
    for part, own, most in ((core.HOT, 3 / 8, NUM_GIVEN), (core.WARM, 1 / 2, 3), (core.COLD, 1 / 8, 1)):
        begins = [(space, [one]) for one in firsts[:most]]
        runs = search.run(begins, share * own / max(len(begins), 1), part)
        firsts = _fastest([run[0] for run in runs if run])
        found += itertools.chain(*runs)
    return _fastest(found)


def _fastest(found: Sequence[_Known]) -> list[_Known]:
    """The NUM_JUDGED fastest of drafts and their steps, of several with equal steps one."""
    kept: list[_Known] = []
    for step, draft in sorted(found, key=lambda item: item[0]):
        if not kept or step - kept[-1][0] > 1e-7 * step:
            kept.append((step, draft))
    return kept[:NUM_JUDGED]


def draft_space(options: Options, problem: PlanProblem) -> core.SpaceTable:
    """The search keys."""
    allowed, batch = options.num_micro_batches, problem.global_batch_size
    each = None if allowed is None else (c_uint8 * (batch + 1))(*(n in allowed for n in range(batch + 1)))
    schedules = sum(1 << core.NAMES.index(name) for name in options.all_schedules)
    listed = [n for n in options.replicas if n <= core.MAX_REPLICAS]
    replicas = ANY if options.any_replicas else sum(1 << n for n in listed)
    counts = ANY if options.pipelines is None else sum(1 << n for n in options.pipelines if n < 63)
    recompute = sum(1 << RECOMPUTES.index(kind) for kind in options.recompute)
    return core.SpaceTable(
        recompute,
        schedules,
        sum(1 << int(sharded) for sharded in options.sharded),
        counts,
        replicas,
        int(options.offload),
        int(options.offload_activations and not problem.compile),
        int(options.use_all_devices),
        int(True in options.sharded) * (1 + problem.model.tie_embeddings),
        int(options.fixed_order),
        int(options.expressible),
        int(options.plain),
        each,
    )
