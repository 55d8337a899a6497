"""The shapes of a plan as cutting problems, and their cuts as plans.

A shape fixes the number of equal pipelines, the micro-batches, the schedule, the tensor-parallel width and
the replicas of each type of card, and how the cards are dealt. Slot i holds what stands in the same place of
each pipeline: replicas of one type, so one cut suits all.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar, get_args

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import (
    PipelinePlan,
    Plan,
    RankPlan,
    StagePlan,
    own_device_types,
    shared_sizes,
)
from yuan_train.config.run import Recompute, Schedule, SearchConfig
from yuan_train.planner.communication import broadcast_seconds, message_seconds
from yuan_train.planner.cost import Costs, Replica, ring_sharers, sum_seconds, tied_seconds, unit_parameters
from yuan_train.planner.partition import Instance
from yuan_train.planner.topology import find_route
from yuan_train.planner.workload import STATE_BYTES

Place = tuple[Replica, ...]
"""The replicas of one stage of one pipeline."""
Slot = tuple[Place, ...]
"""One place of each pipeline."""

WIDTHS = (1, 2, 4, 8, 16)
"""Tensor-parallel widths that are tried without a search key."""
MAX_REPLICATED_CARDS = 8
"""Cards up to which stages of several replicas are tried without a search key."""
MAX_WIDTH_MIXES = 81
"""Ways to give each type of card a width; with more, only equal widths and single exceptions."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The search keys, narrowed to what the engine runs."""

    recompute: tuple[Recompute, ...]
    schedules: tuple[Schedule, ...]
    pipelines: tuple[int, ...] | None
    num_micro_batches: tuple[int, ...] | None
    micro_batch_sizes: tuple[int, ...]
    tensor: tuple[int, ...]
    replicas: tuple[int, ...]
    sharded: tuple[bool, ...]
    tied: bool
    """Whether the first and the last stage own a table together."""
    fixed_order: bool
    use_all_devices: bool


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Equal pipelines of equal micro-batches over dealt cards."""

    schedule: Schedule
    micro_batch_size: int
    num_micro_batches: int
    slots: tuple[Slot, ...]
    sharded: bool = False
    """Whether the owners of a part of the model share its optimizer state."""

    @property
    def num_pipelines(self) -> int:
        return len(self.slots[0])

    @property
    def cards(self) -> frozenset[Card]:
        return frozenset(
            card for slot in self.slots for place in slot for replica in place for card in replica
        )


def read_options(
    search: SearchConfig,
    *,
    micro_batch_size: int,
    model: ModelConfig,
    measured_widths: tuple[int, ...] = (),
    num_cards: int = 1,
) -> Options:
    """Narrow the search keys to what the engine runs.

    With a profile, only widths that it has measured are tried unless search.tensor names others: guesses must
    not compete with measurements. Raises ConfigError for a key that allows nothing that runs; of a list with
    something of it the rest is left out.
    """

    def words(values: Sequence[str]) -> str:
        return ", ".join(values)

    widths = tuple(search.tensor or measured_widths or WIDTHS)
    tensor = _only(
        "tensor", search.tensor, tuple(w for w in sorted(set(widths)) if _can_share(model, w)), "1"
    )
    many = search.replicas or ((1,) if measured_widths or num_cards > MAX_REPLICATED_CARDS else (1, 2))
    kinds: tuple[Recompute, ...] = get_args(Recompute)
    schedules: tuple[Schedule, ...] = get_args(Schedule)
    allowed: tuple[Recompute, ...] = _only("recompute", search.recompute, kinds, words(kinds))
    named: tuple[Schedule, ...] = _only(
        "schedule", search.schedule or schedules[:1], schedules, words(schedules)
    )
    return Options(
        recompute=allowed,
        schedules=named,
        pipelines=search.pipelines,
        num_micro_batches=search.num_micro_batches,
        micro_batch_sizes=tuple(dict.fromkeys(search.micro_batch_size or (micro_batch_size,))),
        tensor=tensor,
        replicas=tuple(sorted(set(many))),
        sharded=_only("optimizer_sharding", search.optimizer_sharding, (True, False), "false"),
        tied=model.tie_embeddings,
        fixed_order=search.device_order == "fixed",
        use_all_devices=search.use_all_devices,
    )


def _can_share(model: ModelConfig, width: int) -> bool:
    return all(size % width == 0 for size in shared_sizes(model).values())


def _only(key: str, given: Sequence[T] | None, known: tuple[T, ...], add: str) -> tuple[T, ...]:
    """The known values that were asked for, in our order; all of them if the key was not given."""
    kept = tuple(value for value in known if given is None or value in given)
    if not kept:
        words = ", ".join(
            str(value).lower() if isinstance(value, bool) else str(value) for value in given or ()
        )
        raise ConfigError(
            f"search.{key}: [{words}] asks for what training cannot run yet, or not with this model; "
            f"add {add} to the list, or leave the key out"
        )
    return kept


# --- dealing cards ---------------------------------------------------------------------------------------


def list_shapes(cards: Sequence[Card], options: Options, *, global_batch_size: int) -> Iterator[Shape]:
    """Every shape that the options allow."""
    # Interleaved stages are split from a cut for 1F1B.
    bases: list[Schedule] = ["1f1b" if name == "interleaved_1f1b" else name for name in options.schedules]
    for schedule in dict.fromkeys(bases):
        for widths in _mixes(_most_per_node(cards), options.tensor):
            groups = {name: len(own) // widths[name] for name, own in _by_type(cards).items()}
            for replicas in _mixes(groups, options.replicas):
                places = _places(cards, widths, replicas, use_all=options.use_all_devices)
                for num_pipelines in _pipeline_counts(places, options):
                    yield from _batches(schedule, num_pipelines, places, options, global_batch_size)


def _batches(
    schedule: Schedule,
    num_pipelines: int,
    places: dict[str, list[Place]],
    options: Options,
    global_batch_size: int,
) -> Iterator[Shape]:
    most = max(len(group[0]) for group in places.values())
    for size in options.micro_batch_sizes:
        count, rest = divmod(global_batch_size, num_pipelines * size)
        allowed = options.num_micro_batches
        if rest or count < most or (allowed is not None and count not in allowed):
            continue
        for slots in deal(places, num_pipelines, use_all=options.use_all_devices):
            shared = num_pipelines * most > 1 or (options.tied and len(slots) > 1)
            yield Shape(
                schedule=schedule,
                micro_batch_size=size,
                num_micro_batches=count,
                slots=slots,
                sharded=options.sharded[0] if shared else options.sharded[-1],
            )


def _mixes(limits: dict[str, int], values: Sequence[int]) -> Iterator[dict[str, int]]:
    """Ways to give each type of card one of the values, up to its limit."""
    own = {name: [v for v in values if v <= most] or [min(values)] for name, most in limits.items()}
    ways = list(itertools.islice(itertools.product(*own.values()), MAX_WIDTH_MIXES + 1))
    if len(ways) <= MAX_WIDTH_MIXES:
        yield from (dict(zip(own, mix, strict=True)) for mix in ways)
        return
    for value in values:
        common = {name: max(v for v in few if v <= max(value, few[0])) for name, few in own.items()}
        yield common
        for name, few in own.items():
            yield from (common | {name: other} for other in few if other != common[name])


def _most_per_node(cards: Sequence[Card]) -> dict[str, int]:
    """Cards of each type in the node that has most of them."""
    return {name: max(Counter(card.node for card in own).values()) for name, own in _by_type(cards).items()}


def _places(
    cards: Sequence[Card], widths: dict[str, int], replicas: dict[str, int], *, use_all: bool
) -> dict[str, list[Place]]:
    """The cards of each type in groups inside a node, and so many groups side by side; empty if a type lacks
    them or, where all cards must work, has some over."""
    result: dict[str, list[Place]] = {}
    for name, own in _by_type(cards).items():
        width, count = widths[name], replicas[name]
        groups: list[Replica] = []
        for _, node in itertools.groupby(own, key=lambda card: card.node):
            members = list(node)
            whole = len(members) // width
            groups += [tuple(members[i * width : (i + 1) * width]) for i in range(whole)]
        places = [tuple(groups[i : i + count]) for i in range(0, len(groups) - count + 1, count)]
        if use_all and len(places) * count * width != len(own):
            return {}
        if places:
            result[name] = places
    return result


def _pipeline_counts(places: dict[str, list[Place]], options: Options) -> list[int]:
    counts = [len(group) for group in places.values()]
    most = max(counts, default=0)
    wanted = range(1, most + 1) if options.pipelines is None else sorted(set(options.pipelines))
    if not options.use_all_devices:
        return [d for d in wanted if d <= most]
    return [d for d in wanted if counts and all(count % d == 0 for count in counts)]


def deal(places: dict[str, list[Place]], num_pipelines: int, *, use_all: bool) -> list[tuple[Slot, ...]]:
    """Ways to deal the places of each type to equal pipelines, as slots in the cluster's order.

    In runs: a pipeline gets neighbours, so its messages stay inside a node and the gradient sums cross nodes;
    in turn: neighbours get the same place in the pipelines, the other way round. Places that do not divide
    are left out (the last ones of their type), which `use_all` forbids.
    """
    runs: list[Slot] = []
    turns: list[Slot] = []
    for group in places.values():
        each = len(group) // num_pipelines
        if use_all and len(group) % num_pipelines:
            return []
        runs += [tuple(group[i + d * each] for d in range(num_pipelines)) for i in range(each)]
        turns += [tuple(group[i * num_pipelines : (i + 1) * num_pipelines]) for i in range(each)]
    where = {id(place): i for i, place in enumerate(p for group in places.values() for p in group)}
    ways = [tuple(sorted(slots, key=lambda slot: where[id(slot[0])])) for slots in (runs, turns)]
    return [way for i, way in enumerate(ways) if way and way not in ways[:i]]


def _by_type(cards: Sequence[Card]) -> dict[str, list[Card]]:
    groups: dict[str, list[Card]] = {}
    for card in cards:
        groups.setdefault(card.type, []).append(card)
    return groups


# --- a shape as a cutting problem ------------------------------------------------------------------------


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
    owners = np.array([shape.num_pipelines * len(slot[0]) for slot in slots], dtype=float)
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
        ends_seconds=_ends_matrix(costs, shape) if tied else np.zeros((len(slots), len(slots))),
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


# --- a cut as a plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """One pipeline to be: places in the order of its stages, and units [bounds[s], bounds[s + 1])."""

    micro_batch_size: int
    num_micro_batches: int
    places: tuple[Place, ...]
    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...]


def make_plan(
    costs: Costs,
    shape: Shape,
    *,
    order: Sequence[int],
    bounds: Sequence[int],
    recompute: Sequence[Recompute],
) -> Plan:
    """The plan whose stage s has units [bounds[s], bounds[s + 1]) on slot order[s], in every pipeline."""
    cuts = [
        PipelineCut(
            micro_batch_size=shape.micro_batch_size,
            num_micro_batches=shape.num_micro_batches,
            places=tuple(shape.slots[slot][d] for slot in order),
            bounds=tuple(bounds),
            recompute=tuple(recompute),
        )
        for d in range(shape.num_pipelines)
    ]
    return assemble_plan(costs, cuts, schedule=shape.schedule, sharded=shape.sharded)


def assemble_plan(
    costs: Costs, cuts: Sequence[PipelineCut], *, schedule: Schedule, sharded: bool = False
) -> Plan:
    """The plan of any pipelines. Ranks are numbered node by node, as the cluster file has them, over the
    cards that work."""
    setting = costs.setting
    used = {card for cut in cuts for place in cut.places for replica in place for card in replica}
    working = [card for card in setting.cluster.cards if card in used]
    rank_of = {card: rank for rank, card in enumerate(working)}
    return Plan(
        cluster=setting.cluster.name,
        model=setting.model,
        sequence_length=setting.sequence_length,
        global_batch_size=setting.global_batch_size,
        schedule=schedule,
        optimizer_sharding=sharded,
        ranks=tuple(RankPlan(rank=r, device=c.name, type=c.type) for r, c in enumerate(working)),
        pipelines=tuple(_pipeline_of(cut, rank_of, setting.model.num_layers) for cut in cuts),
        device_types=own_device_types(setting.cluster, {card.type for card in working}),
    )


def _pipeline_of(cut: PipelineCut, rank_of: dict[Card, int], num_layers: int) -> PipelinePlan:
    last = len(cut.places) - 1
    return PipelinePlan(
        micro_batch_size=cut.micro_batch_size,
        num_micro_batches=cut.num_micro_batches,
        stages=tuple(
            StagePlan(
                replicas=tuple(tuple(rank_of[card] for card in replica) for replica in place),
                layers=(min(max(cut.bounds[s] - 1, 0), num_layers), min(cut.bounds[s + 1] - 1, num_layers)),
                embedding=s == 0,
                head=s == last,
                recompute=cut.recompute[s],
            )
            for s, place in enumerate(cut.places)
        ),
    )
