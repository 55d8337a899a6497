"""How cards can be engines: widths, stages and slots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.planner.costs.decode import DecodeStage, card_rates
from yuan_train.planner.evaluate.engines import (
    Engine,
    EngineRates,
    Generation,
    deal,
    with_slots,
    without_idle_slots,
)
from yuan_train.planner.evaluate.roles import PolicyWork, RolesProblem
from yuan_train.planner.search.shapes import WIDTHS

MAX_WAYS = 256
"""Combinations of engines over the groups; if there are more, each group has its best by itself."""
MAX_STAGES = 8


@dataclass(frozen=True)
class EngineWays:
    """The engines of a problem."""

    problem: RolesProblem
    rates: EngineRates

    def list_generations(self, groups: Sequence[Sequence[Card]]) -> list[Generation]:
        """The ways in which the cards of each group can be engines; empty if the model does not fit them."""
        ways = [list(self._ways(cards)) or [()] for cards in groups]
        if math.prod(map(len, ways)) > MAX_WAYS:
            ways = [[max(own, key=self._rate)] for own in ways]
        found: list[Generation] = []
        for choice in itertools.product(*ways):
            engines = tuple(engine for own in choice for engine in own)
            if engines:
                found.append(Generation(engines, self.rates))
        if not found:
            chain = self._chain([card for cards in groups for card in cards])
            found = [Generation((chain,), self.rates)] if chain is not None else []
        return [without_idle_slots(generation) for generation in found]

    def _rate(self, engines: Sequence[Engine]) -> float:
        return math.fsum(self.rates.samples_per_second(engine) for engine in engines)

    def _ways(self, cards: Sequence[Card]) -> Iterator[tuple[Engine, ...]]:
        """Equal engines on cards of one group, by width; of several stages only where one does not hold."""
        for width in self._widths():
            groups = list(groups_of(cards, width))
            for num_stages in range(1, min(len(groups), MAX_STAGES) + 1):
                chunks = [
                    groups[i : i + num_stages] for i in range(0, len(groups) - num_stages + 1, num_stages)
                ]
                engines = [self._engine(chunk, [1.0] * num_stages) for chunk in chunks]
                if engines and all(engine is not None for engine in engines):
                    yield tuple(engine for engine in engines if engine is not None)
                    break

    def _widths(self) -> list[int]:
        model = self.problem.load.model
        if model.num_experts:
            return [1]
        sizes = model.spec.tensor_sizes(model).values()
        given = self.problem.tensor or WIDTHS
        return [width for width in sorted(set(given)) if all(size % width == 0 for size in sizes)]

    def _engine(self, groups: Sequence[tuple[Card, ...]], weights: Sequence[float]) -> Engine | None:
        num_layers = self.problem.load.model.num_layers
        if len(groups) > num_layers:
            return None
        total = math.fsum(weights)
        ends = [round(num_layers * w / total) for w in itertools.accumulate(weights)]
        # Each stage has a layer at least.
        for i in range(len(ends)):
            ends[i] = min(max(ends[i], i + 1), num_layers - (len(ends) - 1 - i))
        stages = [
            DecodeStage(cards=group, layers=(first, end), embedding=first == 0, head=end == num_layers)
            for group, first, end in zip(groups, (0, *ends), ends, strict=False)
        ]
        return self._slotted(stages)

    def _slotted(
        self, stages: Sequence[DecodeStage], held_bytes: Sequence[float] = (), *, limit: int | None = None
    ) -> Engine | None:
        problem = self.problem
        most = problem.load.samples if limit is None else limit
        limits = [min(problem.most_slots or most, most)]
        if problem.slots is not None:
            limits = sorted(problem.slots, reverse=True)
        for limit in limits:
            engine = with_slots(self.rates, stages, limit=limit, held_bytes=held_bytes)
            if engine is not None and (problem.slots is None or engine.slots == limit):
                return engine
        return None

    def _chain(self, cards: Sequence[Card]) -> Engine | None:
        """One engine over cards of all groups, layers by what their memories can be read at."""
        if not cards:
            return None
        for width in self._widths():
            groups = list(groups_of(cards, width))
            if not groups or len(groups) * width < len(cards):
                continue
            precision = self.problem.load.precision
            rates = [card_rates(self.rates.topology, group, precision) for group in groups]
            engine = self._engine(groups, [rate.bytes_per_second for rate in rates])
            if engine is not None:
                return engine
        return None

    def shared_generation(self, work: PolicyWork) -> Generation | None:
        """The policy's pipelines as engines, in the memory that training leaves; None if a group does not
        fit, or if a card has several stages.

        Each answers its part of the batch, and all have as many slots as the largest part fills.
        """
        shares = tuple(p.num_sequences / work.plan.global_batch_size for p in work.plan.pipelines)
        limit = max(deal(self.problem.load.prompts, shares)) * self.problem.load.group
        most = self._shared_slots(work, limit)
        engines = self._pipelines(work, most) if most else None
        return Generation(engines, self.rates, shares) if engines is not None else None

    def _shared_slots(self, work: PolicyWork, limit: int) -> int:
        """The most slots that every pipeline has room for; 0 if there are none."""
        found = self._pipelines(work, limit)
        return min(engine.slots for engine in found) if found else 0

    def _pipelines(self, work: PolicyWork, limit: int) -> tuple[Engine, ...] | None:
        """The policy's pipelines as engines of at most so many slots."""
        engines: list[Engine] = []
        for p, pipeline in enumerate(work.plan.pipelines):
            replicas = [replica for stage in pipeline.stages for replica in stage.replicas]
            if len(set(replicas)) < len(replicas):
                return None
            costs = [stage for stage in work.cost.stages if stage.pipeline == p]
            stages = [
                DecodeStage(
                    cards=stage.replicas[0], layers=stage.layers, embedding=stage.embedding, head=stage.head
                )
                for stage in costs
            ]
            engine = self._slotted(stages, [stage.memory.lasting for stage in costs], limit=limit)
            if engine is None:
                return None
            engines.append(engine)
        return tuple(engines)


def groups_of(cards: Sequence[Card], width: int) -> Iterator[tuple[Card, ...]]:
    """Groups of `width` cards of one node and type, in order; what is left over is idle."""
    for _, same in itertools.groupby(cards, key=lambda card: (card.node, card.type)):
        own = list(same)
        for first in range(0, len(own) - width + 1, width):
            yield tuple(own[first : first + width])
