"""Layers, warm-up depths and recompute of one pipeline of a plan, improved one and two changes at a time.

Recompute is no choice of its own: a stage takes the fastest kind and number of layers that fits beside the
micro-batches it holds in flight. So a change of layers or of depth changes it along, where memory demands or
allows it. Every change is judged by running the pipeline alone in virtual time; what the rest of the step
takes is known from the plan. Whoever takes the result prices the whole plan again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate

from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.plan_problem import Costs
from yuan_train.planner.evaluate.plan_cost import PlanCost
from yuan_train.planner.evaluate.simulator import StageTimes, simulate_schedule
from yuan_train.planner.evaluate.stage_cost import StageCost, change_stage

LEAST_GAIN = 1e-5
"""Part of the step; a change that gains less is not kept."""
NUM_PAIRED = 12
"""Single changes, those that cost least, that are tried together with each other change."""
MOST_SHIFTED = 3
"""Layers that change their stage at a time, at most."""


@dataclass(frozen=True)
class Cut:
    """Borders and depths of a pipeline's stages."""

    borders: tuple[int, ...]
    """Stage s holds layers [borders[s], borders[s + 1])."""
    depths: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class _Fitted:
    """A stage in the fastest recompute that fits, and its seconds."""

    recompute: Recompute
    recompute_layers: int | None
    forward: float
    backward: float
    weight: float
    update: float
    work: float
    """Forward and backward."""


@dataclass
class Budget:
    """What a polish may still spend, in steps of a schedule run in virtual time; other work counts as many
    steps as take about as long. A count, not a clock: the same input gives the same plan."""

    work: float
    stopped: Callable[[], bool]
    fitted: dict[tuple[int, int, int, int], _Fitted | None] = field(
        default_factory=dict[tuple[int, int, int, int], "_Fitted | None"]
    )
    """Stages that were fitted so far, by all that their cost depends on."""
    numbers: dict[tuple[object, ...], int] = field(default_factory=dict[tuple[object, ...], int])
    """What a stage's cost depends on beside layers and depth, numbered: numbers are looked up at once."""

    def part(self, work: float) -> Budget:
        """A budget of its own that knows the same stages."""
        return Budget(work, self.stopped, self.fitted, self.numbers)

    @property
    def is_over(self) -> bool:
        return self.work <= 0 or self.stopped()


Move = Callable[[Cut], Cut | None]


@dataclass(frozen=True)
class PipelineScreen:
    """Prices cuts of pipeline `p` of a plan and, with it, of all pipelines that are cut alike."""

    costs: Costs
    plan: Plan
    cost: PlanCost
    p: int
    recompute: Sequence[Recompute]
    budget: Budget
    may_deepen: bool = True
    """Whether a plan may name warm-up depths."""
    numbers: list[int] = field(init=False)
    """Of what the cost of each stage depends on, beside layers and depth; see `Budget.numbers`."""
    replicas: tuple[int, ...] = field(init=False)
    messages: tuple[float, ...] = field(init=False)
    """Seconds of the messages of one micro-batch over the link behind each stage: there, and under 1F1B
    back."""
    own: list[StageCost] = field(init=False)
    """Its stages, as those of `alone`."""
    alone: Plan = field(init=False)
    """The plan with this pipeline only: quicker to change."""
    alike: tuple[int, ...] = field(init=False)
    """The pipelines that are cut alike, this one included."""
    others_seconds: float = field(init=False)
    """Compute of the slowest pipeline that is cut otherwise."""
    rest_seconds: float = field(init=False)
    """What the step takes beside compute and the optimizer step."""

    def __post_init__(self) -> None:
        def keep(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        keep("own", [replace(own, pipeline=0) for own in self.cost.stages if own.pipeline == self.p])
        keep("alone", replace(self.plan, pipelines=(self.plan.pipelines[self.p],), forecast=None))
        alike = alike_pipelines(self.plan, self.cost, self.p)
        keep("alike", alike)
        others = (s.step_seconds for q, s in enumerate(self.cost.simulations) if q not in alike)
        keep("others_seconds", max(others, default=0.0))
        pipeline = self.alone.pipelines[0]
        keep("replicas", tuple(len(stage.replicas) for stage in pipeline.stages))
        known = self.budget.numbers
        keep("numbers", [known.setdefault(self._key(s), len(known)) for s in range(len(self.own))])
        keep("messages", self._message_seconds())
        cost = self.cost
        keep("rest_seconds", cost.step_seconds - cost.compute_seconds - cost.update_seconds)

    @property
    def cut(self) -> Cut:
        """The pipeline's cut in the plan."""
        pipeline = self.alone.pipelines[0]
        borders = [int(stage.layers[0]) for stage in pipeline.stages] + [self.plan.model.num_layers]
        return Cut(tuple(borders), pipeline.depths("1f1b") or ())

    @property
    def deepens(self) -> bool:
        """Whether warm-up depths may change."""
        return self.may_deepen and self.plan.schedule == "1f1b"

    def fitted(self, cut: Cut) -> list[_Fitted] | None:
        """Every stage with the fastest recompute that fits; None if one does not fit."""
        found: list[_Fitted] = []
        first = 0
        for s, depth in enumerate(cut.depths):
            end = cut.borders[s + 1]
            fitted = self.fit(s, first, end, depth)
            if fitted is None:
                return None
            found.append(fitted)
            first = end
        return found

    def seconds(self, cut: Cut, limit: float = math.inf) -> float:
        """Step seconds of the plan with this cut; inf if it does not fit or surely takes `limit` or more."""
        stages = self.fitted(cut)
        if stages is None:
            return math.inf
        beside = self.rest_seconds + max(stage.update for stage in stages)
        if max(self._least_compute(stages, cut), self.others_seconds) + beside >= limit:
            return math.inf
        self.budget.work -= 2 * self.alone.pipelines[0].num_micro_batches * len(stages)
        return max(self._compute_seconds(stages, cut), self.others_seconds) + beside

    def _least_compute(self, stages: Sequence[_Fitted], cut: Cut) -> float:
        """No run of the schedule takes less: before its own work a stage waits for the first micro-batch, and
        1F1B sends the last one back after it; a stage holds no more micro-batches than its depth."""
        count = self.alone.pipelines[0].num_micro_batches
        least = before = 0.0
        for stage, n, message in zip(stages, self.replicas, self.messages, strict=True):
            least = max(least, before + stage.work * -(-count // n))
            before += (stage.work if self.deepens else stage.forward) + message
        if self.deepens and max(self.replicas) == 1:
            held = 0.0
            for stage, depth, message in zip(
                reversed(stages), reversed(cut.depths), reversed(self.messages), strict=True
            ):
                held += stage.work + message
                least = max(least, before - held + -(-count // depth) * held)
        return least

    def _message_seconds(self) -> tuple[float, ...]:
        times = self.cost.times[self.p]
        there, back = times.send_activation_seconds, times.send_gradient_seconds
        one_way = (a + (b if self.deepens else 0.0) for a, b in zip(there, back, strict=True))
        return (*one_way, 0.0)

    def stages(self, cut: Cut) -> tuple[StagePlan, ...]:
        """The pipeline's stages under a cut that fits."""
        stages = self.fitted(cut)
        assert stages is not None, "only cuts that fit are taken"
        defaults = [sum(self.replicas[s:]) for s in range(len(stages))]
        return tuple(
            replace(
                old,
                layers=(cut.borders[s], cut.borders[s + 1]),
                recompute=fitted.recompute,
                recompute_layers=fitted.recompute_layers,
                in_flight=cut.depths[s] if self.deepens and cut.depths[s] != defaults[s] else None,
            )
            for s, (old, fitted) in enumerate(zip(self.alone.pipelines[0].stages, stages, strict=True))
        )

    def _compute_seconds(self, stages: Sequence[_Fitted], cut: Cut) -> float:
        pipeline, times = self.alone.pipelines[0], self.cost.times[self.p]
        times = StageTimes(
            forward_seconds=tuple(stage.forward for stage in stages),
            backward_seconds=tuple(stage.backward for stage in stages),
            weight_seconds=tuple(stage.weight for stage in stages),
            send_activation_seconds=times.send_activation_seconds,
            send_gradient_seconds=times.send_gradient_seconds,
        )
        sends = self.costs.problem.send_mode
        if not self.deepens or sends != "overlapped":
            # These took longer when the budget was set; it keeps its meaning.
            self.budget.work -= 6 * pipeline.num_micro_batches * len(stages)
        return simulate_schedule(
            self.plan.schedule,
            times,
            num_micro_batches=pipeline.num_micro_batches,
            workers=pipeline.workers,
            in_flight=cut.depths if self.deepens else None,
            sends=sends,
        ).step_seconds

    def fit(self, s: int, first: int, end: int, depth: int) -> _Fitted | None:
        """Stage s with these layers and depth, in the fastest recompute that fits; None if none does."""
        # Only a profile knows layers apart.
        key = (self.numbers[s], first if self.costs.problem.profile is not None else -1, end - first, depth)
        known = self.budget.fitted
        if key not in known:
            known[key] = self._fit(s, first, end, depth)
        return known[key]

    def _key(self, s: int) -> tuple[object, ...]:
        old, pipeline = self.own[s], self.alone.pipelines[0]
        look = [tuple((card.type, card.node) for card in replica) for replica in old.replicas]
        if self.costs.topology.measured:
            look = [tuple(card.name for card in replica) for replica in old.replicas]
        # How many micro-batches other schedules hold depends on all stages.
        held = None if self.deepens else (self.plan.schedule, s, self.replicas)
        size = (pipeline.micro_batch_size, pipeline.num_micro_batches)
        stage = pipeline.stages[s]
        kept = (old.shares, stage.optimizer_offload, stage.experts)
        return (tuple(look), old.embedding, old.head, size, kept, held)

    def _fit(self, s: int, first: int, end: int, depth: int) -> _Fitted | None:
        bare = replace(
            self.alone.pipelines[0].stages[s],
            layers=(first, end),
            recompute="none",
            recompute_layers=None,
            in_flight=depth if self.deepens else None,
        )
        ways: list[_Fitted] = []
        if "none" in self.recompute or first == end:
            plain = self._fits(s, bare)
            if plain is not None:
                return plain
        for kind in self.recompute if end > first else ():
            if kind == "none":
                continue
            least = self._least_recompute(s, bare, kind) if "none" in self.recompute else end - first
            found = self._fits(s, recomputing(bare, kind, least)) if least is not None else None
            if found is not None:
                ways.append(found)
        return min(ways, key=lambda way: way.work, default=None)

    def _least_recompute(self, s: int, bare: StagePlan, kind: Recompute) -> int | None:
        """The fewest layers to recompute for the stage to fit; None if all are not enough."""
        low, high = 1, bare.num_blocks
        if self._fits(s, recomputing(bare, kind, high)) is None:
            return None
        while low < high:
            middle = (low + high) // 2
            if self._fits(s, recomputing(bare, kind, middle)) is None:
                low = middle + 1
            else:
                high = middle
        return low

    def _fits(self, s: int, stage: StagePlan) -> _Fitted | None:
        """The stage and its seconds; None if it does not fit."""
        self.budget.work -= 200
        new = change_stage(self.costs, self.alone, self.own[s], stage)
        if not new.fits:
            return None
        return _Fitted(
            stage.recompute,
            stage.recompute_layers,
            new.forward_seconds,
            new.backward_seconds,
            new.weight_seconds,
            new.update_seconds,
            new.forward_seconds + new.backward_seconds,
        )


def recomputing(stage: StagePlan, kind: Recompute, count: int) -> StagePlan:
    """The stage with its first `count` layers recomputed in this kind."""
    if not count:
        return replace(stage, recompute="none", recompute_layers=None)
    return replace(stage, recompute=kind, recompute_layers=count if count < stage.num_blocks else None)


def alike_pipelines(plan: Plan, cost: PlanCost, p: int) -> tuple[int, ...]:
    """The pipelines that are cut like pipeline p, on cards that cost the same: one cut suits them all."""

    def look(q: int) -> object:
        pipeline = plan.pipelines[q]
        own = [stage for stage in cost.stages if stage.pipeline == q]
        return (
            pipeline.micro_batch_size,
            pipeline.num_micro_batches,
            cost.times[q],
            [[card.type for card in stage.cards] for stage in own],
            [stage.shares for stage in own],
            [replace(stage, replicas=((0,),)) for stage in pipeline.stages],
        )

    wanted = look(p)
    return tuple(q for q in range(len(plan.pipelines)) if q == p or look(q) == wanted)


def descend(screen: PipelineScreen, start: Cut, *, pairs: bool) -> list[Cut]:
    """Cuts from `start` on, each faster than the one before: a change that gains is kept, and with `pairs` so
    are two changes that only gain together. Only `start` if nothing gains."""
    moves = list(_moves(screen, MOST_SHIFTED if pairs else 1))
    cut = start
    best = screen.seconds(cut)
    path = [cut]
    while True:
        costs: list[tuple[float, int]] = []
        since = i = 0
        while since < len(moves) and not screen.budget.is_over:
            changed = moves[i % len(moves)](cut)
            seconds = math.inf if changed is None else screen.seconds(changed, best * (1.1 if pairs else 1.0))
            since += 1
            if seconds < best * (1.0 - LEAST_GAIN):
                assert changed is not None
                cut, best, since, costs = changed, seconds, 0, []
                path.append(cut)
            elif seconds < math.inf:
                costs.append((seconds, i % len(moves)))
            i += 1
        found = _pair(screen, moves, cut, best, sorted(costs)[:NUM_PAIRED]) if pairs else None
        if found is None:
            return path
        cut, best = found
        path.append(cut)


def balanced_cut(screen: PipelineScreen) -> Cut | None:
    """The layers divided so that the slowest stage takes least, for the screen's depths; None if they do not
    fit the pipeline at all."""
    num_layers, depths = screen.plan.model.num_layers, screen.cut.depths
    stages = range(len(screen.own))

    def seconds(s: int, count: int) -> float:
        first = num_layers - count if s == len(stages) - 1 else 0
        fitted = screen.fit(s, first, first + count, depths[s])
        return math.inf if fitted is None else fitted.work / screen.replicas[s]

    counts = [0] * len(stages)
    if any(math.isinf(seconds(s, 0)) for s in stages):
        return None
    for _ in range(num_layers):
        # Each layer goes where the stage is then least busy.
        least, s = min((seconds(s, counts[s] + 1), s) for s in stages)
        if math.isinf(least):
            return None
        counts[s] += 1
    return Cut((0, *accumulate(counts)), depths)


def _pair(
    screen: PipelineScreen, moves: Sequence[Move], cut: Cut, best: float, singles: Sequence[tuple[float, int]]
) -> tuple[Cut, float] | None:
    """The first two changes that gain together; None if no two do."""
    for _, first in singles:
        half = moves[first](cut)
        for move in moves if half is not None else ():
            if screen.budget.is_over:
                return None
            changed = move(half) if half is not None else None
            if changed is None:
                continue
            seconds = screen.seconds(changed, best * (1.0 - LEAST_GAIN))
            if seconds < best * (1.0 - LEAST_GAIN):
                return changed, seconds
    return None


def _moves(screen: PipelineScreen, most_shifted: int) -> Iterator[Move]:
    """Changes of a cut: deeper and shallower warm-ups, then up to so many layers from stage to stage."""
    num_stages = len(screen.own)
    most = max(screen.alone.pipelines[0].num_micro_batches, *screen.cut.depths) if num_stages > 1 else 1
    for by in (1, 2, -1) if screen.deepens else ():
        for last in range(num_stages):
            yield _deepen(screen.replicas, range(last + 1), by, most)
            if last:
                yield _deepen(screen.replicas, range(last, last + 1), by, most)
    for by in range(1, most_shifted + 1):
        for distance in range(1, num_stages):
            for a in range(num_stages - distance):
                yield _shift(a, a + distance, by)
                yield _shift(a + distance, a, by)


def _deepen(replicas: tuple[int, ...], stages: range, by: int, most: int) -> Move:
    """So many more micro-batches in flight in these stages, and as many as needed in those before."""

    def move(cut: Cut) -> Cut | None:
        depths = [depth + by * (s in stages) for s, depth in enumerate(cut.depths)]
        depths = lawful_depths(depths, replicas)
        if depths == cut.depths or depths[0] > max(most, cut.depths[0]):
            return None
        return Cut(cut.borders, depths)

    return move


def lawful_depths(depths: Sequence[int], replicas: Sequence[int]) -> tuple[int, ...]:
    """The depths, raised where a stage must hold more: one in each replica, and as many as the next stage in
    whole rounds of its replicas."""
    lawful: list[int] = []
    after = 0
    for depth, count in zip(reversed(depths), reversed(replicas), strict=True):
        after = max(depth, count, -(-after // count) * count)
        # The whole rounds within a depth decide; one that falls short of the next stage's is raised above.
        lawful.append(after)
    return tuple(reversed(lawful))


def _shift(a: int, b: int, by: int) -> Move:
    """So many layers from stage a to stage b; those between pass them on."""

    def move(cut: Cut) -> Cut | None:
        counts = [end - first for first, end in zip(cut.borders, cut.borders[1:], strict=False)]
        if counts[a] < by:
            return None
        counts[a] -= by
        counts[b] += by
        return Cut((0, *accumulate(counts)), cut.depths)

    return move
