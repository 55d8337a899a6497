"""The shapes of a plan that the engine runs today, as cutting problems, and their cuts as plans.

A shape fixes the number of equal pipelines, the micro-batches, the schedule, and how the cards are dealt.
Slot i holds the cards that stand in the same place of each pipeline; they are of one type, so one cut suits
all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan, own_device_types
from yuan_train.config.run import Recompute, Schedule, SearchConfig
from yuan_train.planner.communication import message_seconds, ring_seconds
from yuan_train.planner.cost import (
    Costs,
    flow_sharers,
    ring_sharers,
    tied_seconds,
    unit_gradient_bytes,
)
from yuan_train.planner.partition import Instance
from yuan_train.planner.topology import find_route
from yuan_train.planner.workload import STATE_BYTES

Slot = tuple[Card, ...]

RECOMPUTE: tuple[Recompute, ...] = ("none", "full")
SCHEDULES: tuple[Schedule, ...] = ("1f1b", "gpipe")
"""What the engine runs; without a search key, both kinds of recompute and the first schedule are tried."""

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The search keys, narrowed to what the engine runs."""

    recompute: tuple[Recompute, ...]
    schedules: tuple[Schedule, ...]
    pipelines: tuple[int, ...] | None
    num_micro_batches: tuple[int, ...] | None
    micro_batch_sizes: tuple[int, ...]
    fixed_order: bool
    use_all_devices: bool


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Equal pipelines of equal micro-batches over dealt cards."""

    schedule: Schedule
    micro_batch_size: int
    num_micro_batches: int
    slots: tuple[Slot, ...]

    @property
    def num_pipelines(self) -> int:
        return len(self.slots[0])


def read_options(search: SearchConfig, *, micro_batch_size: int) -> Options:
    """Narrow the search keys to what the engine runs.

    Raises ConfigError for a key that allows nothing of it; of a list with something of it the rest is left
    out.
    """
    _only("tensor", search.tensor, (1,), "stages cut over several cards are")
    _only("replicas", search.replicas, (1,), "stages of several replicas are")
    _only("optimizer_sharding", search.optimizer_sharding, (False,), "a sharded optimizer state is")
    recompute: tuple[Recompute, ...] | None = _only(
        "recompute", search.recompute, RECOMPUTE, "selective recompute is"
    )
    schedules: tuple[Schedule, ...] | None = _only(
        "schedule", search.schedule, SCHEDULES, "other schedules are"
    )
    return Options(
        recompute=recompute or RECOMPUTE,
        schedules=schedules or SCHEDULES[:1],
        pipelines=search.pipelines,
        num_micro_batches=search.num_micro_batches,
        micro_batch_sizes=tuple(dict.fromkeys(search.micro_batch_size or (micro_batch_size,))),
        fixed_order=search.device_order == "fixed",
        use_all_devices=search.use_all_devices,
    )


def _only(key: str, given: tuple[T, ...] | None, known: tuple[T, ...], missing: str) -> tuple[T, ...] | None:
    """The given values that are known, in our order; None if the key was not given."""
    if given is None:
        return None
    kept = tuple(value for value in known if value in given)
    if not kept:
        words = ", ".join(_word(value) for value in known)
        raise ConfigError(
            f"search.{key}: [{', '.join(_word(v) for v in given)}] asks for what training cannot run yet "
            f"({missing} not there); add {words} to the list, or leave the key out"
        )
    return kept


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


# --- dealing cards ---------------------------------------------------------------------------------------


def list_shapes(cards: Sequence[Card], options: Options, *, global_batch_size: int) -> Iterator[Shape]:
    """Every shape that the options allow, each once."""
    for schedule in options.schedules:
        for num_pipelines in _pipeline_counts(cards, options):
            for size in options.micro_batch_sizes:
                count, rest = divmod(global_batch_size, num_pipelines * size)
                allowed = options.num_micro_batches
                if rest or not count or (allowed is not None and count not in allowed):
                    continue
                for slots in deal(cards, num_pipelines, use_all=options.use_all_devices):
                    yield Shape(
                        schedule=schedule, micro_batch_size=size, num_micro_batches=count, slots=slots
                    )


def _pipeline_counts(cards: Sequence[Card], options: Options) -> list[int]:
    counts = list(_by_type(cards).values())
    most = max((len(group) for group in counts), default=0)
    wanted = range(1, most + 1) if options.pipelines is None else sorted(set(options.pipelines))
    if not options.use_all_devices:
        return [d for d in wanted if d <= most]
    return [d for d in wanted if all(len(group) % d == 0 for group in counts)]


def deal(cards: Sequence[Card], num_pipelines: int, *, use_all: bool) -> list[tuple[Slot, ...]]:
    """Ways to deal the cards of each type to equal pipelines, as slots in the cluster's order.

    In runs: a pipeline gets neighbours, so its messages stay inside a node and the gradient sums cross nodes;
    in turn: neighbours get the same place in the pipelines, the other way round. Cards that do not divide are
    left out (the last ones of their type), which `use_all` forbids.
    """
    runs: list[Slot] = []
    turns: list[Slot] = []
    for group in _by_type(cards).values():
        per_pipeline = len(group) // num_pipelines
        if use_all and len(group) % num_pipelines:
            return []
        runs += [
            tuple(group[i + d * per_pipeline] for d in range(num_pipelines)) for i in range(per_pipeline)
        ]
        turns += [tuple(group[i * num_pipelines : (i + 1) * num_pipelines]) for i in range(per_pipeline)]
    place = {card: i for i, card in enumerate(cards)}
    ways = [tuple(sorted(slots, key=lambda slot: place[slot[0]])) for slots in (runs, turns)]
    return [way for way in dict.fromkeys(ways) if way]


def _by_type(cards: Sequence[Card]) -> dict[str, list[Card]]:
    groups: dict[str, list[Card]] = {}
    for card in cards:
        groups.setdefault(card.type, []).append(card)
    return groups


# --- a shape as a cutting problem ------------------------------------------------------------------------


def make_instance(costs: Costs, shape: Shape, options: Options) -> Instance:
    """The cutting problem of a shape: units are embedding, layers, head; choices are options.recompute."""
    setting, slots = costs.setting, shape.slots
    tied = setting.model.tie_embeddings
    table = [
        [costs.of(slot[0].type, shape.micro_batch_size, recompute).units for slot in slots]
        for recompute in options.recompute
    ]

    def numbers(name: str) -> np.ndarray:
        return np.array(
            [[[getattr(unit, name) for unit in units] for units in row] for row in table], dtype=float
        )

    resident, transient = numbers("state_bytes"), numbers("transient_bytes")
    saving = resident[0, :, 0].copy() if tied else np.zeros(len(slots))
    # The head's transient stands beside the other units', it does not share their place; see memory.py.
    resident[:, :, -1] += transient[:, :, -1]
    transient[:, :, -1] = 0.0
    types = [setting.cluster.device_type(slot[0].type) for slot in slots]
    return Instance(
        schedule=shape.schedule,
        num_micro_batches=shape.num_micro_batches,
        overlap=setting.overlap,
        forward_seconds=numbers("forward_seconds"),
        backward_seconds=numbers("backward_seconds"),
        resident_bytes=resident,
        activation_bytes=numbers("activation_bytes") + numbers("logit_bytes"),
        transient_bytes=transient,
        capacity_bytes=np.array([float(device.memory - device.reserved) for device in types]),
        whole_model_saving_bytes=saving,
        boundary_bytes=costs.boundary_bytes(shape.micro_batch_size),
        message_seconds=_message_seconds(costs, shape).max(axis=0)[None],
        message_of=np.zeros(setting.model.num_layers + 2, dtype=np.int64),
        sync_seconds=_sync_table(costs, shape),
        update_seconds=_update_table(costs, shape),
        ends_seconds=_ends_matrix(costs, shape) if tied else np.zeros((len(slots), len(slots))),
        order=tuple(range(len(slots))) if options.fixed_order else None,
        use_all=options.use_all_devices,
    )


def is_faithful(costs: Costs, shape: Shape, options: Options) -> bool:
    """Whether the cutting problem costs every cut exactly as `cost_plan` does.

    It takes the slowest pipeline's messages for all, and counts every slot's gradient sum on the network; so
    it errs, on the slow side, where equal pipelines have unlike links or where slots that sum over a shared
    network card may stay idle.
    """
    if shape.num_pipelines == 1:
        return True
    messages = _message_seconds(costs, shape)
    idle_slots_matter = not options.use_all_devices and max(ring_sharers(shape.slots)) > 1
    return bool((messages.min(axis=0) == messages.max(axis=0)).all()) and not idle_slots_matter


def _message_seconds(costs: Costs, shape: Shape) -> np.ndarray:
    """[pipelines, D, D]: a hidden state from slot i to slot j in each pipeline."""
    slots, size = shape.slots, costs.boundary_bytes(shape.micro_batch_size)
    seconds = np.zeros((shape.num_pipelines, len(slots), len(slots)))
    for i, sources in enumerate(slots):
        for j, targets in enumerate(slots):
            if i == j:
                continue
            edges = list(zip(sources, targets, strict=True))
            for d, ((a, b), sharers) in enumerate(zip(edges, flow_sharers(edges), strict=True)):
                seconds[d, i, j] = message_seconds(find_route(costs.topology, a, b), size, sharers=sharers)
    return seconds


def _sync_table(costs: Costs, shape: Shape) -> np.ndarray:
    """[D, U]: gradient sum of each unit over the pipelines, every slot at work."""
    sizes = unit_gradient_bytes(costs)
    if shape.num_pipelines == 1:
        return np.zeros((len(shape.slots), len(sizes)))
    sharers = ring_sharers(shape.slots)
    rows: list[list[float]] = []
    for slot, crowd in zip(shape.slots, sharers, strict=True):
        known = {size: ring_seconds(costs.topology, slot, size, sharers=crowd) for size in set(sizes)}
        rows.append([known[size] for size in sizes])
    return np.array(rows)


def _update_table(costs: Costs, shape: Shape) -> np.ndarray:
    """[D, U]: the optimizer step of each unit."""
    traffic = STATE_BYTES[costs.setting.precision].update_traffic
    rows: list[list[float]] = []
    for slot in shape.slots:
        card = costs.of(slot[0].type, shape.micro_batch_size, "none")
        rows.append([unit.parameters * traffic / card.update_bytes_per_second for unit in card.units])
    return np.array(rows)


def _ends_matrix(costs: Costs, shape: Shape) -> np.ndarray:
    """[D, D]: sum of the tied table where slot i is first and slot j last."""
    return np.array([[tied_seconds(costs, first, last) for last in shape.slots] for first in shape.slots])


# --- a cut as a plan -------------------------------------------------------------------------------------


def make_plan(
    costs: Costs,
    shape: Shape,
    *,
    order: Sequence[int],
    bounds: Sequence[int],
    recompute: Sequence[Recompute],
) -> Plan:
    """The plan whose stage s has units [bounds[s], bounds[s + 1]) on slot order[s], in every pipeline.

    Ranks are numbered node by node, as the cluster file has them, over the cards that work.
    """
    setting, num_layers = costs.setting, costs.setting.model.num_layers
    used = {card for slot in order for card in shape.slots[slot]}
    working = [card for card in setting.cluster.cards if card in used]
    rank_of = {card: rank for rank, card in enumerate(working)}
    last = len(order) - 1
    pipelines = [
        PipelinePlan(
            micro_batch_size=shape.micro_batch_size,
            num_micro_batches=shape.num_micro_batches,
            stages=tuple(
                StagePlan(
                    replicas=((rank_of[shape.slots[slot][d]],),),
                    layers=(max(bounds[s] - 1, 0), min(bounds[s + 1] - 1, num_layers)),
                    embedding=s == 0,
                    head=s == last,
                    recompute=recompute[s],
                )
                for s, slot in enumerate(order)
            ),
        )
        for d in range(shape.num_pipelines)
    ]
    return Plan(
        cluster=setting.cluster.name,
        model=setting.model,
        sequence_length=setting.sequence_length,
        global_batch_size=setting.global_batch_size,
        schedule=shape.schedule,
        ranks=tuple(RankPlan(rank=r, device=c.name, type=c.type) for r, c in enumerate(working)),
        pipelines=tuple(pipelines),
        device_types=own_device_types(setting.cluster, {card.type for card in working}),
    )
