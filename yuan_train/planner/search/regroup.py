"""Neighbours of a plan with cards in other pipelines, or with another number of pipelines.

Drafts as in `restructure`. Layers are divided in proportion to what the stages had; whoever takes a draft
cuts it anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from yuan_train.planner.search.restructure import (
    Draft,
    PipelineDraft,
    StageDraft,
    alike_drafts,
    is_lawful,
)
from yuan_train.planner.search.shapes import Options

MAX_EXCHANGED = 32
"""Exchanges of stages between two pipelines, and stages handed over, that are tried at most."""


def regrouped(draft: Draft, options: Options) -> Iterator[Draft]:
    """Drafts that the options allow with pipelines joined and parted, and with stages exchanged between
    pipelines or handed over."""
    if options.fixed_order or options.num_micro_batches is not None:
        return
    ways = (_joined(draft), _parted(draft), _exchanged(draft), _handed_over(draft))
    for changed in itertools.chain.from_iterable(ways):
        count = len(changed.pipelines)
        stages = [stage for pipeline in changed.pipelines for stage in pipeline.stages]
        counted = options.any_replicas or {len(stage.group) for stage in stages} <= set(options.replicas)
        if (
            (count == len(draft.pipelines) or options.pipelines is None or count in options.pipelines)
            and {stage.width for stage in stages} <= set(options.tensor)
            and counted
            and all(is_lawful(stage.group) for stage in stages)
        ):
            yield changed


def _joined(draft: Draft) -> Iterator[Draft]:
    """Two pipelines as one, with the sequences of both: of every kind, in pairs, and of two kinds."""
    kinds = alike_drafts(draft)
    pairings = [list(zip(own[::2], own[1::2], strict=True)) for own in kinds if len(own) % 2 == 0]
    pairings += [
        list(zip(a, b, strict=True)) for a, b in itertools.combinations(kinds, 2) if len(a) == len(b)
    ]
    pairings += [[(own[0], own[1])] for own in kinds if len(own) > 2]
    for pairs in pairings:
        pipelines: dict[int, PipelineDraft] = dict(enumerate(draft.pipelines))
        for a, b in pairs:
            first, second = pipelines[a], pipelines.pop(b)
            count, rest = divmod(first.num_sequences + second.num_sequences, first.micro_batch_size)
            if rest:
                break
            turns = itertools.zip_longest(first.stages, second.stages)
            stages = [stage for both in turns for stage in both if stage is not None]
            pipelines[a] = _leveled(replace(first, num_micro_batches=count), stages)
        else:
            yield replace(draft, pipelines=tuple(pipelines.values()))


def _parted(draft: Draft) -> Iterator[Draft]:
    """Each pipeline of a kind as two: every other stage, half of each stage's replicas, or half of the cards
    of each group."""
    for members in alike_drafts(draft):
        own = draft.pipelines[members[0]]
        if own.num_micro_batches < 2:
            continue
        for how in ("stages", "replicas", "cards"):
            pipelines: list[PipelineDraft] = []
            for p, pipeline in enumerate(draft.pipelines):
                halves = _halves(pipeline, how) if p in members else [list(pipeline.stages)]
                rest = pipeline.num_micro_batches
                for i, stages in enumerate(halves):
                    count = -(-rest // (len(halves) - i))
                    rest -= count
                    pipelines.append(_leveled(replace(pipeline, num_micro_batches=count), stages))
            if all(pipeline.stages for pipeline in pipelines):
                yield replace(draft, pipelines=tuple(pipelines))


def _halves(pipeline: PipelineDraft, how: str) -> list[list[StageDraft]]:
    """The stages of two pipelines; none if the stages cannot be divided so."""
    if how == "stages":
        return [list(pipeline.stages[::2]), list(pipeline.stages[1::2])]
    halves: list[list[StageDraft]] = [[], []]
    for stage in pipeline.stages:
        count = len(stage.group) if how == "replicas" else stage.width
        if count % 2:
            return [[], []]
        for half, part in zip(halves, (slice(0, count // 2), slice(count // 2, None)), strict=True):
            group = (
                stage.group[part] if how == "replicas" else tuple(replica[part] for replica in stage.group)
            )
            half.append(replace(stage, group=group))
    return halves


def _exchanged(draft: Draft) -> Iterator[Draft]:
    """Two stages of unlike cards, of two pipelines, in each other's place."""
    ways = (
        (a, b, s, t)
        for a, b in _two_pipelines(draft)
        if a < b
        for s, first in enumerate(draft.pipelines[a].stages)
        for t, second in enumerate(draft.pipelines[b].stages)
        if _types(first) != _types(second)
    )
    for a, b, s, t in itertools.islice(ways, MAX_EXCHANGED):
        left, right = list(draft.pipelines[a].stages), list(draft.pipelines[b].stages)
        left[s], right[t] = (
            replace(left[s], group=right[t].group),
            replace(right[t], group=left[s].group),
        )
        yield _with_stages(draft, {a: left, b: right})


def _handed_over(draft: Draft) -> Iterator[Draft]:
    """A stage of one pipeline as a further stage of another: beside those of its kind, else at the ends."""

    def places(a: int, b: int, s: int) -> Sequence[int]:
        stages = draft.pipelines[b].stages
        kind = _types(draft.pipelines[a].stages[s])
        beside = [t for t, stage in enumerate(stages) if _types(stage) == kind]
        return beside or (0, len(stages))

    ways = (
        (a, b, s, t)
        for a, b in _two_pipelines(draft)
        if len(draft.pipelines[a].stages) > 1
        for s in range(len(draft.pipelines[a].stages))
        for t in places(a, b, s)
    )
    for a, b, s, t in itertools.islice(ways, MAX_EXCHANGED):
        left, right = list(draft.pipelines[a].stages), list(draft.pipelines[b].stages)
        right.insert(t, left.pop(s))
        yield _with_stages(draft, {a: left, b: right})


def _two_pipelines(draft: Draft) -> Iterator[tuple[int, int]]:
    """Pairs of pipelines, the first and the last of each kind."""
    ends = sorted({p for members in alike_drafts(draft) for p in (members[0], members[-1])})
    return itertools.permutations(ends, 2)


def _types(stage: StageDraft) -> object:
    return tuple(tuple(card.type for card in replica) for replica in stage.group)


def _with_stages(draft: Draft, changed: dict[int, list[StageDraft]]) -> Draft:
    pipelines = list(draft.pipelines)
    for p, stages in changed.items():
        pipelines[p] = _leveled(pipelines[p], stages)
    return replace(draft, pipelines=tuple(pipelines))


def _leveled(pipeline: PipelineDraft, stages: Sequence[StageDraft]) -> PipelineDraft:
    """The pipeline of these stages, with all layers of the model; depths are 1F1B's own where stages came or
    went."""
    wanted = sum(stage.layers for stage in pipeline.stages)
    given = sum(stage.layers for stage in stages)
    same = len(stages) == len(pipeline.stages)
    ends = itertools.accumulate(stage.layers if given else 1 for stage in stages)
    total = given or len(stages)
    borders = [0, *(end * wanted // total for end in ends)]
    return replace(
        pipeline,
        stages=tuple(
            replace(stage, layers=end - first, deeper=stage.deeper if same else 0)
            for stage, first, end in zip(stages, borders, borders[1:], strict=False)
        ),
    )
