"""Neighbours of a plan with another structure: micro-batch size, shares, schedule, stages, cards.

A draft is a plan without ranks, so that cards and stages can change places freely. Pipelines that are drafted
alike change together.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.run import ScheduleName
from yuan_train.planner.costs.plan_problem import Costs, plan_on_cards
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.search.descent import lawful_depths
from yuan_train.planner.search.shapes import Options, StageGroup

MOST_MOVED = 3
"""Micro-batches that change their pipeline at a time, at most."""
MAX_POSITIONS = 12
"""Stages of a pipeline up to which stages change places and unused cards are tried everywhere."""


@dataclass(frozen=True)
class StageDraft:
    """A stage: its cards, its layers, and how much deeper than 1F1B's own its warm-up is."""

    group: StageGroup
    layers: int
    deeper: int = 0
    optimizer_share: float = 1.0

    @property
    def width(self) -> int:
        return len(self.group[0])

    @property
    def cards(self) -> tuple[Card, ...]:
        return tuple(card for replica in self.group for card in replica)


@dataclass(frozen=True)
class PipelineDraft:
    """A pipeline: its share of the batch and its stages."""

    micro_batch_size: int
    num_micro_batches: int
    stages: tuple[StageDraft, ...]

    @property
    def num_sequences(self) -> int:
        return self.micro_batch_size * self.num_micro_batches


@dataclass(frozen=True)
class Draft:
    """A plan without ranks and recompute."""

    schedule: ScheduleName
    sharded: bool
    pipelines: tuple[PipelineDraft, ...]


Change = Callable[[PipelineDraft, int], PipelineDraft | None]
"""Another draft of a pipeline; the number says which of the pipelines that change together it is."""


def draft_of(plan: Plan, cost: PlanCost) -> Draft:
    """The draft of a plan of whole layers without virtual stages."""
    groups = {(stage.pipeline, stage.stage): stage.replicas for stage in cost.stages}
    pipelines: list[PipelineDraft] = []
    for p, pipeline in enumerate(plan.pipelines):
        rest = sum(len(stage.replicas) for stage in pipeline.stages)
        stages: list[StageDraft] = []
        for s, stage in enumerate(pipeline.stages):
            deeper = (stage.in_flight or rest) - rest
            stages.append(StageDraft(groups[p, s], int(stage.num_layers), deeper, stage.optimizer_share))
            rest -= len(stage.replicas)
        pipelines.append(PipelineDraft(pipeline.micro_batch_size, pipeline.num_micro_batches, tuple(stages)))
    return Draft(plan.schedule, plan.optimizer_sharding, tuple(pipelines))


def plan_of(costs: Costs, draft: Draft) -> Plan:
    """The plan of a draft, without recompute. Ranks number the used cards in the cluster's order."""
    used = {card for pipeline in draft.pipelines for stage in pipeline.stages for card in stage.cards}
    return plan_on_cards(
        costs.problem,
        used,
        lambda rank_of: (_pipeline_of(own, rank_of, draft) for own in draft.pipelines),
        schedule=draft.schedule,
        sharded=draft.sharded,
    )


def _pipeline_of(own: PipelineDraft, rank_of: Mapping[Card, int], draft: Draft) -> PipelinePlan:
    stages: list[StagePlan] = []
    first, last = 0, len(own.stages) - 1
    replicas = [len(stage.group) for stage in own.stages]
    defaults = [sum(replicas[s:]) for s in range(len(replicas))]
    deeper = [default + stage.deeper for default, stage in zip(defaults, own.stages, strict=True)]
    depths = lawful_depths(deeper, replicas)
    for s, stage in enumerate(own.stages):
        stages.append(
            StagePlan(
                replicas=tuple(tuple(rank_of[card] for card in replica) for replica in stage.group),
                layers=(first, first + stage.layers),
                embedding=s == 0,
                head=s == last,
                in_flight=depths[s] if draft.schedule == "1f1b" and depths[s] != defaults[s] else None,
                optimizer_share=stage.optimizer_share if draft.sharded else 1.0,
            )
        )
        first += stage.layers
    return PipelinePlan(
        micro_batch_size=own.micro_batch_size,
        num_micro_batches=own.num_micro_batches,
        stages=tuple(stages),
    )


# --- the neighbourhood -----------------------------------------------------------------------------------


def neighbours(costs: Costs, draft: Draft, cards: Sequence[Card], options: Options) -> Iterator[Draft]:
    """Drafts one change away that the options allow, those that most often gain first."""
    yield from _other_sizes(draft, options)
    yield from _other_shares(draft, options)
    for name in options.polished_schedules:
        if name not in (draft.schedule, "interleaved_1f1b"):
            yield replace(draft, schedule=name)
    used = {card for pipeline in draft.pipelines for stage in pipeline.stages for card in stage.cards}
    spare = [card for card in cards if card not in used]
    kinds = alike_drafts(draft)
    for members in [*kinds, *(own[:1] for own in kinds if len(own) > 1)]:
        for change in _changes(draft.pipelines[members[0]], len(members), spare, options):
            changed = _apply(draft, members, change)
            if changed is not None and _is_allowed(changed, options):
                yield changed
    if len(used) > 1 or options.tied:
        for sharded in options.sharded:
            if sharded != draft.sharded:
                yield replace(draft, sharded=sharded)
    if draft.sharded and len(draft.pipelines) > 1:
        yield from _other_optimizer_shares(draft)


def alike_drafts(draft: Draft) -> list[list[int]]:
    """The pipelines that differ in their cards' names alone, together."""
    groups: dict[object, list[int]] = {}
    for p, pipeline in enumerate(draft.pipelines):
        stages = tuple(
            (
                tuple(tuple(card.type for card in replica) for replica in stage.group),
                stage.layers,
                stage.deeper,
            )
            for stage in pipeline.stages
        )
        groups.setdefault((pipeline.micro_batch_size, pipeline.num_micro_batches, stages), []).append(p)
    return list(groups.values())


def _apply(draft: Draft, members: Sequence[int], change: Change) -> Draft | None:
    pipelines = list(draft.pipelines)
    for i, p in enumerate(members):
        changed = change(pipelines[p], i)
        if changed is None or not all(is_lawful(stage.group) for stage in changed.stages):
            return None
        pipelines[p] = changed
    return replace(draft, pipelines=tuple(pipelines))


def _is_allowed(draft: Draft, options: Options) -> bool:
    """Whether the search keys allow the stages' widths and numbers of replicas."""
    stages = [stage for pipeline in draft.pipelines for stage in pipeline.stages]
    counts = {len(stage.group) for stage in stages}
    widths = {stage.width for stage in stages}
    return widths <= set(options.tensor) and (options.any_replicas or counts <= set(options.replicas))


def _other_sizes(draft: Draft, options: Options) -> Iterator[Draft]:
    """Another micro-batch size in all pipelines; if they differ, also in those of one kind."""
    everywhere = list(range(len(draft.pipelines)))
    kinds = alike_drafts(draft)
    for members in [everywhere, *(kinds if len(kinds) > 1 else [])]:
        for size in options.polished_sizes:
            changed = _apply(draft, members, lambda own, _, size=size: _with_size(own, size, options))
            if changed is not None and changed != draft:
                yield changed


def _with_size(own: PipelineDraft, size: int, options: Options) -> PipelineDraft | None:
    count, rest = divmod(own.num_sequences, size)
    allowed = options.num_micro_batches
    if rest or (allowed is not None and count not in allowed):
        return None
    return replace(own, micro_batch_size=size, num_micro_batches=count)


def _other_shares(draft: Draft, options: Options) -> Iterator[Draft]:
    """A few micro-batches from one pipeline to another."""
    if options.num_micro_batches is not None:
        return
    kinds = alike_drafts(draft)
    ends = sorted({p for members in kinds for p in (members[0], members[-1])})
    for by in range(1, MOST_MOVED + 1):
        for a, b in itertools.permutations(ends, 2):
            source, target = draft.pipelines[a], draft.pipelines[b]
            moved = by * max(source.micro_batch_size, target.micro_batch_size)
            if moved % source.micro_batch_size or moved % target.micro_batch_size:
                continue
            pipelines = list(draft.pipelines)
            pipelines[a] = replace(
                source, num_micro_batches=source.num_micro_batches - moved // source.micro_batch_size
            )
            pipelines[b] = replace(
                target, num_micro_batches=target.num_micro_batches + moved // target.micro_batch_size
            )
            if pipelines[a].num_micro_batches > 0:
                yield replace(draft, pipelines=tuple(pipelines))


def _other_optimizer_shares(draft: Draft) -> Iterator[Draft]:
    """Twice or half the optimizer state on one stage of the pipelines of one kind."""
    for members in alike_drafts(draft):
        for s, factor in itertools.product(range(len(draft.pipelines[members[0]].stages)), (0.5, 2.0)):

            def change(own: PipelineDraft, _: int, s: int = s, factor: float = factor) -> PipelineDraft:
                stage = own.stages[s]
                return _replaced(own, s, replace(stage, optimizer_share=stage.optimizer_share * factor))

            changed = _apply(draft, members, change)
            if changed is not None and len(members) < len(draft.pipelines):
                yield changed


def _changes(first: PipelineDraft, count: int, spare: Sequence[Card], options: Options) -> Iterator[Change]:
    """Changes of stages and cards of `count` pipelines that are drafted like `first`."""
    num_stages = len(first.stages)
    for s in range(num_stages):
        for group in _regrouped(first.stages[s], options):
            width = len(group[0])
            yield lambda own, _, s=s, width=width: _replaced(
                own, s, replace(own.stages[s], group=_grouped(own.stages[s].cards, width))
            )
    for s in range(num_stages - 1):
        yield lambda own, _, s=s: _joined(own, s, options, wider=False)
        yield lambda own, _, s=s: _joined(own, s, options, wider=True)
    for s in range(num_stages):
        yield lambda own, _, s=s: _divided(own, s, len(own.stages[s].group) // 2)
        if len(first.stages[s].group) > 2:
            yield lambda own, _, s=s: _divided(own, s, 1)
    for a, b in itertools.permutations(range(num_stages), 2):
        if abs(a - b) == 1 and _kind(first.stages[a].group[:1]) == _kind(first.stages[b].group[:1]):
            yield lambda own, _, a=a, b=b: _passed_on(own, a, b)
    if not options.fixed_order and num_stages <= MAX_POSITIONS:
        for a, b in itertools.combinations(range(num_stages), 2):
            if _kind(first.stages[a].group) != _kind(first.stages[b].group):
                yield lambda own, _, a=a, b=b: _swapped(own, a, b)
        for a, b in itertools.permutations(range(num_stages), 2):
            if abs(a - b) > 1:
                yield lambda own, _, a=a, b=b: _moved(own, a, b)
    if not options.use_all_devices:
        for s in range(num_stages if num_stages > 1 else 0):
            yield lambda own, _, s=s: _left_out(own, s)
    yield from _with_spare(first, count, spare, options)


def _with_spare(
    first: PipelineDraft, count: int, spare: Sequence[Card], options: Options
) -> Iterator[Change]:
    """Unused cards as another stage of every pipeline, or in the place of a stage's own."""
    nodes: dict[tuple[str, str], list[Card]] = {}
    for card in spare:
        nodes.setdefault((card.type, card.node), []).append(card)
    num_stages = len(first.stages)
    offers: dict[tuple[str, int], list[StageGroup]] = {}
    for (kind, _), own in nodes.items():
        for width in options.tensor:
            groups = [(tuple(own[i : i + width]),) for i in range(0, len(own) - width + 1, width)]
            offers.setdefault((kind, width), []).extend(groups)
    positions = range(num_stages + 1) if num_stages <= MAX_POSITIONS else (0, num_stages)
    for groups in offers.values():
        if len(groups) < count or options.fixed_order:
            continue
        for s in positions:
            yield lambda own, i, s=s, groups=groups: _inserted(own, s, groups[i])
        for s in range(num_stages):
            if _kind(first.stages[s].group) != _kind(groups[0]):
                yield lambda own, i, s=s, groups=groups: _replaced(
                    own, s, replace(own.stages[s], group=groups[i])
                )


def _kind(group: StageGroup) -> object:
    return tuple(tuple(card.type for card in replica) for replica in group)


def _replaced(own: PipelineDraft, s: int, stage: StageDraft) -> PipelineDraft:
    return replace(own, stages=(*own.stages[:s], stage, *own.stages[s + 1 :]))


def _regrouped(stage: StageDraft, options: Options) -> Iterator[StageGroup]:
    """The stage's cards in groups of another width, as more or fewer replicas."""
    for width in options.tensor:
        if width != stage.width and len(stage.cards) % width == 0:
            yield _grouped(stage.cards, width)


def _grouped(cards: Sequence[Card], width: int) -> StageGroup:
    return tuple(tuple(cards[i : i + width]) for i in range(0, len(cards), width))


def is_lawful(group: StageGroup) -> bool:
    """Whether each group of cards is of one type and inside a node."""
    return all(len({(card.type, card.node) for card in replica}) == 1 for replica in group)


def _joined(own: PipelineDraft, s: int, options: Options, *, wider: bool) -> PipelineDraft | None:
    """Stages s and s + 1 as one: of wider groups, or of more replicas."""
    a, b = own.stages[s], own.stages[s + 1]
    cards = (*a.cards, *b.cards)
    width = len(cards) // len(a.group) if wider else a.width
    group = _grouped(cards, width) if wider else (*a.group, *b.group)
    if width not in options.tensor or (not wider and a.width != b.width):
        return None
    if wider and len(a.group) != len(b.group):
        return None
    joined = StageDraft(group, a.layers + b.layers, b.deeper, a.optimizer_share)
    return replace(own, stages=(*own.stages[:s], joined, *own.stages[s + 2 :]))


def _divided(own: PipelineDraft, s: int, first: int) -> PipelineDraft | None:
    """Stage s as two: its first so many replicas and the others, or, of one replica, half its cards each."""
    stage = own.stages[s]
    count, rest = divmod(len(stage.cards), 2)
    if not stage.layers or (len(stage.group) == 1 and rest):
        return None
    if len(stage.group) > 1:
        parts = (stage.group[:first], stage.group[first:])
    else:
        parts = ((stage.cards[:count],), (stage.cards[count:],))
    layers = (stage.layers - stage.layers // 2, stage.layers // 2)
    pair = (StageDraft(g, n, stage.deeper, stage.optimizer_share) for g, n in zip(parts, layers, strict=True))
    return replace(own, stages=(*own.stages[:s], *pair, *own.stages[s + 1 :]))


def _passed_on(own: PipelineDraft, a: int, b: int) -> PipelineDraft | None:
    """A replica of stage a as one of its neighbour b."""
    source, target = own.stages[a], own.stages[b]
    if len(source.group) < 2:
        return None
    # The replica next to the neighbour's: cards of a node stay together.
    moved, kept = (source.group[-1:], source.group[:-1]) if a < b else (source.group[:1], source.group[1:])
    group = (*moved, *target.group) if a < b else (*target.group, *moved)
    changed = _replaced(own, a, replace(source, group=kept))
    return _replaced(changed, b, replace(target, group=group))


def _swapped(own: PipelineDraft, a: int, b: int) -> PipelineDraft:
    """The cards of two stages, with their layers, in each other's place."""
    stages = list(own.stages)
    stages[a], stages[b] = stages[b], stages[a]
    return replace(own, stages=tuple(stages))


def _moved(own: PipelineDraft, a: int, b: int) -> PipelineDraft:
    """Stage a at position b."""
    stages = list(own.stages)
    stages.insert(b, stages.pop(a))
    return replace(own, stages=tuple(stages))


def _left_out(own: PipelineDraft, s: int) -> PipelineDraft:
    """Without the cards of stage s; its layers are divided among its neighbours."""
    stages, layers = list(own.stages), own.stages[s].layers
    del stages[s]
    near = [i for i in (s - 1, s) if 0 <= i < len(stages)]
    for i, n in zip(near, (layers - layers // 2, layers // 2) if len(near) > 1 else (layers,), strict=True):
        stages[i] = replace(stages[i], layers=stages[i].layers + n)
    return replace(own, stages=tuple(stages))


def _inserted(own: PipelineDraft, s: int, group: StageGroup) -> PipelineDraft:
    """A further stage s, which takes half the layers of its neighbour."""
    stages = list(own.stages)
    near = min(s, len(stages) - 1)
    taken = stages[near].layers // 2
    stages[near] = replace(stages[near], layers=stages[near].layers - taken)
    stages.insert(s, StageDraft(group, taken))
    return replace(own, stages=tuple(stages))
