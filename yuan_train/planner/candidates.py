"""The shapes that a plan may have, and their cuts as plans; `problem.py` has the cutting itself.

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
from yuan_train.planner.setting import Costs, Replica

Place = tuple[Replica, ...]
"""The replicas of one stage of one pipeline."""
Slot = tuple[Place, ...]
"""One place of each pipeline."""

WIDTHS = (1, 2, 4, 8, 16)
"""Tensor-parallel widths that are tried without a search key."""
MAX_REPLICATED_CARDS = 48
"""Cards up to which stages of several replicas are tried without a search key."""
MAX_MIXES, MAX_MIXES_OF_THOUSANDS, THOUSANDS = 256, 64, 2048
"""Ways to give each type of card a width, and from so many cards on; with more ways, only equal widths and
single exceptions."""

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
    peers: int = 1
    """Unlike pipelines that own the same model, these among them."""

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
    most = MAX_MIXES if len(cards) <= THOUSANDS else MAX_MIXES_OF_THOUSANDS
    seen: set[object] = set()
    for schedule in dict.fromkeys(bases):
        for widths in _mixes(_most_per_node(cards), options.tensor, most=most):
            groups = {name: len(own) // widths[name] for name, own in _by_type(cards).items()}
            for replicas in _mixes(groups, options.replicas, most=most):
                places = _places(cards, widths, replicas, use_all=options.use_all_devices)
                for num_pipelines in _pipeline_counts(places, options):
                    # A type too few for the pipelines is left out, whatever its width and replicas.
                    enough = {name for name, group in places.items() if len(group) >= num_pipelines}
                    kinds = tuple((name, widths[name], replicas[name]) for name in sorted(enough))
                    without = groups.keys() - enough
                    fewest = all(replicas[name] == min(options.replicas) for name in without)
                    if fewest and (schedule, num_pipelines, kinds) not in seen:
                        seen.add((schedule, num_pipelines, kinds))
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


def _mixes(limits: dict[str, int], values: Sequence[int], *, most: int) -> Iterator[dict[str, int]]:
    """Ways to give each type of card one of the values, up to its limit."""
    own = {name: [v for v in values if v <= limit] or [min(values)] for name, limit in limits.items()}
    ways = list(itertools.islice(itertools.product(*own.values()), most + 1))
    if len(ways) <= most:
        yield from (dict(zip(own, mix, strict=True)) for mix in ways)
        return
    found: dict[tuple[int, ...], dict[str, int]] = {}
    for value in values:
        common = {name: max(v for v in few if v <= max(value, few[0])) for name, few in own.items()}
        others = (common | {name: other} for name, few in own.items() for other in few)
        found |= {tuple(mix.values()): mix for mix in (common, *others)}
    yield from found.values()


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


# --- a cut as a plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """One pipeline to be: places in the order of its stages, and units [bounds[s], bounds[s + 1])."""

    micro_batch_size: int
    num_micro_batches: int
    places: tuple[Place, ...]
    bounds: tuple[int, ...]
    recompute: tuple[Recompute, ...]


def stage_recompute(
    bounds: Sequence[int], choices: Sequence[int], recompute: Sequence[Recompute], num_layers: int
) -> tuple[Recompute, ...]:
    """Each stage's choice as a word of `recompute`; none for a stage without layers."""
    words: list[Recompute] = []
    for choice, first, end in zip(choices, bounds, bounds[1:], strict=False):
        has_layers = min(end - 1, num_layers) > max(first - 1, 0)
        words.append(recompute[choice] if has_layers else "none")
    return tuple(words)


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
