"""The shapes that a plan may have, which the searches begin with or prove.

A shape fixes the number of equal pipelines, the micro-batches, the schedule, the tensor-parallel width and
the replicas of each type of card, and which cards each pipeline gets. Slot i holds the stage groups in the
same position of every pipeline, all of one type of card, so one partition suits all pipelines.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, get_args

from yuan_train.config.cluster import Card
from yuan_train.config.errors import ConfigError
from yuan_train.config.express import narrowed
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.profile import Profile, ProfileEntry
from yuan_train.config.run import Effort, Recompute, ScheduleName, SearchConfig
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.costs.workload import Replica, plan_on_cards

StageGroup = tuple[Replica, ...]
"""The replicas of one stage of one pipeline."""
Slot = tuple[StageGroup, ...]
"""The stage groups in the same position of every equal pipeline."""

WIDTHS = (1, 2, 4, 8, 16)
"""Tensor-parallel widths that are tried if neither `search.tensor` nor a profile names any."""
ALL_SIZES = (1, 2, 3, 4, 6, 8, 12, 16)
"""Micro-batch sizes that are searched if `search.micro_batch_size` names none."""
ALL_SCHEDULES: tuple[ScheduleName, ...] = ("1f1b", "zero_bubble", "interleaved_1f1b")
"""Schedules that are searched if `search.schedule` names none."""
MAX_REPLICATED_CARDS = 48
"""Cards up to which stages with several replicas are tried without `search.replicas`."""
MAX_MIXES, MAX_MIXES_OF_THOUSANDS, THOUSANDS = 256, 64, 2048
"""Most ways to give each type of card a width or a number of replicas, and the same for more than THOUSANDS
cards; if there are more ways, only equal values and single exceptions are tried."""

MOST_LEFT_OUT = 4
"""Types of cards up to which plans for megatron-core are also searched without some of them."""

EFFORTS: dict[Effort, float] = {"quick": 1 / 3, "normal": 1.0, "thorough": 10.0}

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The search keys, restricted to what the engine runs."""

    recompute: tuple[Recompute, ...]
    schedules: tuple[ScheduleName, ...]
    """Of the shapes."""
    all_schedules: tuple[ScheduleName, ...]
    """Schedules that a plan may have."""
    pipelines: tuple[int, ...] | None
    num_micro_batches: tuple[int, ...] | None
    micro_batch_sizes: tuple[int, ...]
    """Of the shapes."""
    all_sizes: tuple[int, ...]
    """Micro-batch sizes that a plan may have."""
    tensor: tuple[int, ...]
    replicas: tuple[int, ...]
    any_replicas: bool
    """Whether a plan may have any number of replicas."""
    sharded: tuple[bool, ...]
    tied: bool
    """Whether the first and the last stage share the ownership of a tied embedding."""
    fixed_order: bool
    use_all_devices: bool
    half_layers: bool
    divide_experts: bool
    expert_widths: tuple[int, ...]
    """Cards of a group that divides experts; empty: any number."""
    offload: bool
    """Whether a stage's optimizer state may lie on the host."""
    keeps_to_cards: bool = False
    """Whether what plans use beside the cards must gain `simplicity.WORTH_LEAVING`: `search.offload` is not
    given."""
    expressible: bool = False
    """Only plans that megatron-core has words for."""
    offload_activations: bool = False
    """Whether activations may lie on the host, where a plan would else recompute."""
    offload_parameters: bool = False
    """Whether layers may be pages of the host, in single pipelines of single cards."""
    offload_disk: bool = False
    """Whether optimizer state may lie on the disks that the cluster file names, where hosts have no room."""
    simplicity: float = 0.0
    """Part of the fastest step within which the simplest plan is taken."""
    effort: float = 1.0
    """How much is tried, in parts of what normally is."""
    searches_again: bool = True
    """Whether few cards are searched until the fastest plan is found twice."""
    plain: bool = False
    """Plans as an external profile can tell them, without warm-ups of their own."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Equal pipelines of equal micro-batches, and their cards."""

    schedule: ScheduleName
    micro_batch_size: int
    num_micro_batches: int
    slots: tuple[Slot, ...]
    """In the cluster's order."""
    sharded: bool = False
    """Whether the owners of a unit shard its optimizer state among them."""

    @property
    def num_pipelines(self) -> int:
        return len(self.slots[0])


def read_options(
    search: SearchConfig,
    *,
    micro_batch_size: int,
    model: ModelConfig,
    profile: Profile | None = None,
    num_cards: int = 1,
) -> Options:
    """The search keys, restricted to what the engine runs.

    With a profile, only the widths that it has measured are tried, and the micro-batch sizes that it has of
    every type, unless the search keys name others: estimates must not compete with measurements. An external
    one says nothing of split backwards, replicas that take turns or hosts, which a key has to name. Values
    that cannot run are dropped from a list; raises ConfigError for a key that has no others.
    """
    entries, is_external = profile.entries if profile else (), profile is not None and profile.is_whole
    measured = tuple(sorted({entry.tensor_parallel for entry in entries}))
    expressible = search.engine is not None and "yuan" not in search.engine
    if expressible:
        search = narrowed(search)
    widths = tuple(search.tensor or measured or WIDTHS)
    divided = model.spec.tensor_sizes(model).values()
    even = tuple(w for w in sorted(set(widths)) if all(size % w == 0 for size in divided))
    tensor = _allowed("tensor", search.tensor, even, "1")
    replicas = search.replicas or ((1,) if is_external or num_cards > MAX_REPLICATED_CARDS else (1, 2))
    kinds: tuple[Recompute, ...] = get_args(Recompute)
    schedules: tuple[ScheduleName, ...] = get_args(ScheduleName)
    given = search.schedule or schedules[:1]
    named: tuple[ScheduleName, ...] = _allowed("schedule", given, schedules, ", ".join(schedules))
    sizes = tuple(dict.fromkeys(search.micro_batch_size or (micro_batch_size,)))
    may_leave = search.tiers if search.offload is not None or not is_external else ()
    return Options(
        recompute=_allowed("recompute", search.recompute, kinds, ", ".join(kinds)),
        # Shapes are of one schedule where they can be; the searches that begin with them try others.
        schedules=("1f1b",) if "1f1b" in named else named,
        all_schedules=named if search.schedule or is_external else ALL_SCHEDULES,
        pipelines=search.pipelines,
        num_micro_batches=search.num_micro_batches,
        micro_batch_sizes=sizes,
        all_sizes=search.micro_batch_size or tuple(sorted({*sizes, *_measured_sizes(entries)})),
        tensor=tensor,
        replicas=tuple(sorted(set(replicas))),
        any_replicas=search.replicas is None and not is_external,
        sharded=_allowed("optimizer_sharding", search.optimizer_sharding, (True, False), "false"),
        tied=model.tie_embeddings,
        fixed_order=search.device_order == "fixed",
        use_all_devices=search.use_all_devices,
        half_layers=search.half_layers,
        divide_experts=search.divide_experts,
        expert_widths=tuple(sorted(set(search.tensor or ()))),
        offload="optimizer" in may_leave,
        keeps_to_cards=search.offload is None,
        expressible=expressible,
        offload_activations="activations" in may_leave,
        offload_parameters="parameters" in may_leave,
        offload_disk="disk" in may_leave,
        plain=is_external,
        simplicity=0.0 if is_external else search.simplicity,
        effort=EFFORTS[search.effort],
    )


def _measured_sizes(entries: Sequence[ProfileEntry]) -> Collection[int]:
    """Micro-batch sizes that a profile has of every type of card; without a profile, ALL_SIZES."""
    sizes: dict[str, set[int]] = {}
    for entry in entries:
        sizes.setdefault(entry.device_type, set()).add(entry.micro_batch_size)
    return set[int].intersection(*sizes.values()) if sizes else ALL_SIZES


def _allowed(key: str, given: Sequence[T] | None, known: tuple[T, ...], add: str) -> tuple[T, ...]:
    """The known values that are given, in their order; all if the key is not given. Raises ConfigError, with
    the advice to add `add`, if none is left."""
    kept = tuple(value for value in known if given is None or value in given)
    if not kept:
        words = ", ".join(str(own).lower() if isinstance(own, bool) else str(own) for own in given or ())
        raise ConfigError(
            f"search.{key}: [{words}] asks for what training cannot run yet, or not with this model; "
            f"add {add} to the list, or leave the key out"
        )
    return kept


def groups_of(cards: Sequence[Card], width: int) -> Iterator[tuple[Card, ...]]:
    """Groups of `width` cards of one node and type, in order; what is left over is idle."""
    for _, same in itertools.groupby(cards, key=lambda card: (card.node, card.type)):
        own = list(same)
        for first in range(0, len(own) - width + 1, width):
            yield tuple(own[first : first + width])


def equal_parts(things: Sequence[T], count: int) -> list[tuple[T, ...]]:
    """Neighbouring things, in so many equal parts, which they divide into."""
    size = len(things) // count
    return [tuple(things[d * size : (d + 1) * size]) for d in range(count)]


def deal_layers(num_layers: int, weights: Sequence[float]) -> list[int]:
    """Layers of each stage in proportion to weights, one at least."""
    ends = [round(num_layers * share / sum(weights)) for share in itertools.accumulate(weights)]
    ends = [max(end, s + 1) for s, end in enumerate(ends)]
    ends = [min(end, num_layers - (len(ends) - 1 - s)) for s, end in enumerate(ends)]
    return [end - first for first, end in itertools.pairwise([0, *ends])]


# --- assigning cards -------------------------------------------------------------------------------------


def wanted_shapes(cards: Sequence[Card], options: Options, *, global_batch_size: int) -> Iterator[Shape]:
    """Every shape that the options allow; for megatron-core of one width, and without some types of cards
    too: these may have another backend, or no place at this width."""
    if not options.expressible:
        yield from list_shapes(cards, options, global_batch_size=global_batch_size)
        return
    types = list(dict.fromkeys(card.type for card in cards))
    all_of_them = options.use_all_devices or len(types) > MOST_LEFT_OUT
    for count in range(len(types), len(types) - 1 if all_of_them else 0, -1):
        for some in itertools.combinations(types, count):
            own = [card for card in cards if card.type in some]
            for shape in list_shapes(own, options, global_batch_size=global_batch_size):
                if len({len(replica) for slot in shape.slots for group in slot for replica in group}) == 1:
                    yield shape


def list_shapes(cards: Sequence[Card], options: Options, *, global_batch_size: int) -> Iterator[Shape]:
    """Every shape that the options allow."""
    # Interleaved plans are made from 1F1B plans, by splitting their stages.
    bases: list[ScheduleName] = ["1f1b" if name == "interleaved_1f1b" else name for name in options.schedules]
    most = MAX_MIXES if len(cards) <= THOUSANDS else MAX_MIXES_OF_THOUSANDS
    types = by_type(cards)
    nodes = {name: Counter(card.node for card in own) for name, own in types.items()}
    per_node = {name: max(own.values()) for name, own in nodes.items()}
    # By identity, each card's place in the cluster's order; cards of one type may stand apart there.
    places = {id(card): i for i, card in enumerate(cards)}
    known: dict[tuple[str, int, int], list[StageGroup] | None] = {}
    seen: set[object] = set()
    for schedule in dict.fromkeys(bases):
        for widths in _mixes(per_node, options.tensor, most=most):
            num_replicas = {name: len(own) // widths[name] for name, own in types.items()}
            for replicas in _mixes(num_replicas, options.replicas, most=most):
                groups = _stage_groups(types, widths, replicas, known, use_all=options.use_all_devices)
                for num_pipelines in _pipeline_counts(groups, options):
                    if all(global_batch_size % (num_pipelines * size) for size in options.micro_batch_sizes):
                        continue
                    # A type with fewer groups than pipelines is left out, whatever its width and replicas.
                    enough = {name for name, own in groups.items() if len(own) >= num_pipelines}
                    kinds = tuple((name, widths[name], replicas[name]) for name in sorted(enough))
                    without = num_replicas.keys() - enough
                    fewest = all(replicas[name] == min(options.replicas) for name in without)
                    if fewest and (schedule, num_pipelines, kinds) not in seen:
                        seen.add((schedule, num_pipelines, kinds))
                        yield from _batches(
                            schedule, num_pipelines, groups, places, options, global_batch_size
                        )


def _batches(
    schedule: ScheduleName,
    num_pipelines: int,
    groups: dict[str, list[StageGroup]],
    places: dict[int, int],
    options: Options,
    global_batch_size: int,
) -> Iterator[Shape]:
    """The shapes of so many equal pipelines over these stage groups, by micro-batch size."""
    most = max(len(own[0]) for own in groups.values())
    for size in options.micro_batch_sizes:
        count, rest = divmod(global_batch_size, num_pipelines * size)
        allowed = options.num_micro_batches
        if rest or count < most or (allowed is not None and count not in allowed):
            continue
        for slots in _deal(groups, num_pipelines, places, options):
            shared = num_pipelines * most > 1 or (options.tied and len(slots) > 1)
            yield Shape(
                schedule=schedule,
                micro_batch_size=size,
                num_micro_batches=count,
                slots=slots,
                sharded=options.sharded[0] if shared else options.sharded[-1],
            )


def _mixes(limits: dict[str, int], values: Sequence[int], *, most: int) -> Iterator[dict[str, int]]:
    """Ways to give each type one of the values, to its limit; of too many, equal ones with one exception."""
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


def _stage_groups(
    types: dict[str, list[Card]],
    widths: dict[str, int],
    replicas: dict[str, int],
    known: dict[tuple[str, int, int], list[StageGroup] | None],
    *,
    use_all: bool,
) -> dict[str, list[StageGroup]]:
    """The stage groups of each type of card, by name. A type with too few cards is missing; if all cards must
    be used and some are left over, there are none. `known` keeps what was made."""
    result: dict[str, list[StageGroup]] = {}
    for name, own in types.items():
        key = (name, widths[name], replicas[name])
        if key not in known:
            members, count = list(groups_of(own, widths[name])), replicas[name]
            starts = range(0, len(members) - count + 1, count)
            groups = [tuple(members[i : i + count]) for i in starts]
            has_all = len(groups) * widths[name] * count == len(own)
            known[key] = groups if has_all or not use_all else None
        groups = known[key]
        if groups is None:
            return {}
        if groups:
            result[name] = groups
    return result


def _pipeline_counts(groups: dict[str, list[StageGroup]], options: Options) -> list[int]:
    """Numbers of equal pipelines that the stage groups allow."""
    counts = [len(own) for own in groups.values()]
    most = max(counts, default=0)
    wanted = range(1, most + 1) if options.pipelines is None else sorted(set(options.pipelines))
    fill = options.use_all_devices
    return [d for d in wanted if d <= most and not (fill and any(count % d for count in counts))]


def _deal(
    groups: dict[str, list[StageGroup]], num_pipelines: int, places: dict[int, int], options: Options
) -> list[tuple[Slot, ...]]:
    """Ways to assign the stage groups of each type to equal pipelines. The slots of a way are in the order of
    the cluster's cards (`places`); in a fixed order, this holds for every pipeline, else for the first.

    In runs: a pipeline gets neighbouring groups, so its messages stay inside a node and gradient reductions
    cross nodes. In turn: neighbouring groups get the same position in different pipelines, so reductions stay
    inside a node. Groups left over by the division (the last ones of their type) are not used; if all cards
    must be used, there is then no way.
    """
    runs: list[Slot] = []
    turns: list[Slot] = []
    for own in groups.values():
        each = len(own) // num_pipelines
        if options.use_all_devices and len(own) % num_pipelines:
            return []
        used = each * num_pipelines
        runs += [tuple(own[i:used:each]) for i in range(each)]
        turns += [tuple(own[i : i + num_pipelines]) for i in range(0, used, num_pipelines)]

    def place(group: StageGroup) -> int:
        return places[id(group[0][0])]

    ways = [tuple(sorted(slots, key=lambda slot: place(slot[0]))) for slots in (runs, turns)]
    if options.fixed_order:
        columns = ((way, zip(*way, strict=True)) for way in ways)
        ways = [way for way, own in columns if all(list(p) == sorted(p, key=place) for p in own)]
    return [way for i, way in enumerate(ways) if way and way not in ways[:i]]


def by_type(cards: Sequence[Card]) -> dict[str, list[Card]]:
    groups: dict[str, list[Card]] = {}
    for card in cards:
        groups.setdefault(card.type, []).append(card)
    return groups


# --- a cut as a plan -------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PipelineCut:
    """A pipeline: stage s runs units [bounds[s], bounds[s + 1]), halves of layers too, on stage_groups[s]."""

    micro_batch_size: int
    num_micro_batches: int
    stage_groups: tuple[StageGroup, ...]
    bounds: tuple[float, ...]
    recompute: tuple[Recompute, ...]


def make_plan(
    costs: Costs, shape: Shape, *, order: Sequence[int], bounds: Sequence[int], recompute: Sequence[Recompute]
) -> Plan:
    """The plan whose stage s has units [bounds[s], bounds[s + 1]) on slot order[s], in every pipeline."""
    cut = PipelineCut(
        micro_batch_size=shape.micro_batch_size,
        num_micro_batches=shape.num_micro_batches,
        stage_groups=(),
        bounds=tuple(bounds),
        recompute=tuple(recompute),
    )
    groups = (tuple(shape.slots[slot][d] for slot in order) for d in range(shape.num_pipelines))
    cuts = [replace(cut, stage_groups=own) for own in groups]
    return assemble_plan(costs, cuts, schedule=shape.schedule, sharded=shape.sharded)


def assemble_plan(
    costs: Costs, cuts: Sequence[PipelineCut], *, schedule: ScheduleName, sharded: bool = False
) -> Plan:
    """The plan of any pipelines. Ranks number the used cards node by node, in the cluster file's order."""
    used = {card for cut in cuts for group in cut.stage_groups for replica in group for card in replica}
    layers = costs.problem.model.num_layers
    return plan_on_cards(
        costs.problem,
        used,
        lambda rank_of: (_pipeline_of(cut, rank_of, layers) for cut in cuts),
        schedule=schedule,
        sharded=sharded,
    )


def _pipeline_of(cut: PipelineCut, rank_of: Mapping[Card, int], num_layers: int) -> PipelinePlan:
    last = len(cut.stage_groups) - 1
    return PipelinePlan(
        micro_batch_size=cut.micro_batch_size,
        num_micro_batches=cut.num_micro_batches,
        stages=tuple(
            StagePlan(
                replicas=tuple(tuple(rank_of[card] for card in replica) for replica in group),
                layers=(min(max(cut.bounds[s] - 1, 0), num_layers), min(cut.bounds[s + 1] - 1, num_layers)),
                embedding=s == 0,
                head=s == last,
                recompute=cut.recompute[s],
            )
            for s, group in enumerate(cut.stage_groups)
        ),
    )
