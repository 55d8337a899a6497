"""Search over splits of unlike cards over roles: how many of each node group train, generate and score.

For every split the engines are priced at once, and the policy's plan by a bound. The splits are then taken
from the lowest bound on: the policy's cards get a plan, and the step is played. The search ends when the next
bound is no better than the best step, so that no split is missed by it. Sharing the cards in turns competes
on equal terms.

Of each group of nodes the policy has the first cards, then come generation and reward model, so that the
ranks of a node follow each other as far as can be.
"""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from yuan_train.config.cluster import Card, Cluster
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.planner.costs.unit_costs import Costs, critic_of, make_costs, value_model
from yuan_train.planner.costs.workload import ELEMENT_BYTES, STATE_BYTES
from yuan_train.planner.roles import placement as placing
from yuan_train.planner.roles.engines import (
    DecodeStage,
    EnginePlan,
    EngineRates,
    Generation,
    deal,
    with_slots,
    without_idle_slots,
)
from yuan_train.planner.search.prove import lower_bound
from yuan_train.planner.search.search import search_plan, usable_cards
from yuan_train.planner.search.shapes import WIDTHS, deal_layers, groups_of, read_options

Split = tuple[tuple[int, int, int], ...]
"""Cards of each group of nodes for policy, generation and reward."""

MAX_COUNTS = 8
"""Of a group of more cards, so many numbers are tried for a role: multiples of an eighth."""
LEAST_SECONDS = 2.0
"""Of a search for the policy's plan, however little time is left."""
MAX_WAYS = 256
"""Combinations of engines over the groups; if there are more, each group has its best by itself."""
MAX_STAGES = 8


@dataclass(frozen=True, kw_only=True)
class RolesResult:
    """The placement found, and what the report says about it."""

    best: placing.Placement
    others: tuple[placing.Placement, ...]
    """The best of each other mode and way to share cards that was priced, then further splits."""
    lower_bound_seconds: float
    exact: bool
    """Whether every split was priced or ruled out by its bound, and no search for a plan was stopped."""
    stopped: bool
    num_splits: int
    num_priced: int


@dataclass
class RolesSearch:
    """One search: the costs of the whole cluster, and what was looked up already."""

    problem: placing.RolesProblem
    clock: Callable[[], float] = time.monotonic
    costs: Costs = field(init=False)
    ways: EngineWays = field(init=False)
    stopped: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        self.costs = make_costs(self.problem.policy)
        rates = placing.engine_rates(self.problem, self.costs.topology)
        self.ways = EngineWays(self.problem, rates)
        self._started = self.clock()
        self._policies: dict[tuple[tuple[int, ...], bool], list[placing.PolicyWork]] = {}
        self._bounds: dict[tuple[int, ...], float] = {}
        self._generations: dict[tuple[int, ...], list[Generation]] = {}
        groups: dict[str, list[Card]] = {}
        for card in usable_cards(self.problem.policy, use_all=False)[0]:
            groups.setdefault(self.problem.policy.cluster.groups[card.node].name, []).append(card)
        self.groups = list(groups.values())
        self.refusal = ""
        """Why the policy did not fit the last cards that it was tried on."""

    def splits(self, *, shared: bool = False) -> Iterator[Split]:
        """Every split of cards over roles; `shared`: all but a reward model's train and generate in turns."""
        scores, apart = self.problem.reward_model is not None, not (shared or self.problem.servers)
        for counts in itertools.product(*(self._shares(len(cards)) for cards in self.groups)):
            policy, generation, reward = (sum(part) for part in zip(*counts, strict=True))
            if policy and bool(generation) == apart and bool(reward) == scores:
                yield counts

    def _shares(self, count: int) -> list[tuple[int, int, int]]:
        step = max(count // MAX_COUNTS, 1)
        numbers = sorted({*range(0, count + 1, step), count})
        rewards = numbers if self.problem.reward_model is not None else [0]
        return [
            (count - generation - reward, generation, reward)
            for reward in rewards
            for generation in numbers
            if generation + reward <= count
        ]

    def cards_of(self, split: Split, role: int) -> list[list[Card]]:
        """The cards of a role, of each group: 0 policy, 1 generation, 2 reward."""
        found: list[list[Card]] = []
        for cards, counts in zip(self.groups, split, strict=True):
            first = sum(counts[:role])
            found.append(cards[first : first + counts[role]])
        return found

    def generations(self, split: Split) -> list[Generation]:
        """The ways in which the cards of generation can be engines, or the servers; empty if none fits."""
        if self.problem.servers:
            return [Generation((), self.ways.rates, served=self.problem.servers)]
        key = tuple(counts[0] for counts in split) + tuple(counts[1] for counts in split)
        if key not in self._generations:
            self._generations[key] = self.ways.list_generations(self.cards_of(split, 1))
        return self._generations[key]

    def policies(self, split: Split, *, thorough: bool = True) -> list[placing.PolicyWork]:
        """Plans of the policy on its cards, the fastest first; empty if none fits."""
        key = tuple(counts[0] for counts in split), thorough
        if key not in self._policies:
            self._policies[key] = self._search_policy(split, thorough=thorough)
        return self._policies[key]

    def _search_policy(self, split: Split, *, thorough: bool) -> list[placing.PolicyWork]:
        problem = self.problem
        own = replace(problem.policy, cluster=self._policy_cluster(split))
        left = problem.time_limit - (self.clock() - self._started)
        limit = min(problem.policy_search.time_limit, max(left / 2, LEAST_SECONDS))
        search = replace(problem.policy_search, time_limit=limit)
        try:
            result = search_plan(own, search, micro_batch_size=problem.micro_batch_size, thorough=thorough)
        except (NoPlanFits, ConfigError) as error:
            self.refusal = str(error)
            return []
        self.stopped = self.stopped or result.stopped
        costs = make_costs(own)
        found = (
            placing.policy_work(problem, costs, one.plan, one.cost)
            for one in (result.best, *result.runners_up)
        )
        return sorted(found, key=lambda work: work.training_seconds)

    def _policy_cluster(self, split: Split) -> Cluster:
        cards = [card for group in self.cards_of(split, 0) for card in group]
        return placing.part_of_cluster(self.problem.policy.cluster, cards)

    def training_bound(self, split: Split) -> float:
        """Seconds that no plan of the policy's cards beats; inf if they cannot hold weights and gradients."""
        key = tuple(counts[0] for counts in split)
        if key not in self._bounds:
            self._bounds[key] = self._training_bound(split)
        return self._bounds[key]

    def _training_bound(self, split: Split) -> float:
        problem = self.problem
        cards = [card for group in self.cards_of(split, 0) for card in group]
        types = [problem.policy.cluster.device_type(card.type) for card in cards]
        state = STATE_BYTES[problem.load.precision]
        model = problem.load.model
        models = [model, value_model(model)] if problem.policy.critic else [model]
        needed = sum(
            own.parameters * state.parameters + sum(own.trained_unit_parameters) * state.gradients
            for own in models
        )
        room = [problem.policy.usable_bytes(card.type) for card in cards]
        if needed > sum(own - device.reserved for own, device in zip(room, types, strict=True)):
            return math.inf
        own = replace(
            problem.policy, cluster=self._policy_cluster(split), global_batch_size=problem.packed_rows
        )
        try:
            options = read_options(
                problem.policy_search,
                micro_batch_size=problem.micro_batch_size,
                model=problem.load.model,
                num_cards=len(cards),
            )
        except ConfigError as error:
            self.refusal = str(error)
            return math.inf
        costs = make_costs(own)
        bound = lower_bound(costs, cards, options).seconds
        if problem.policy.critic:
            bound += lower_bound(critic_of(costs), cards, options).seconds
        return bound

    def reward(self, split: Split) -> placing.RewardWork | None:
        """The reward model on its cards, as narrow as it fits; None if there is none, or none fits."""
        model = self.problem.reward_model
        if model is None:
            return None
        cards = [card for group in self.cards_of(split, 2) for card in group]
        for width in [1] if model.num_experts else WIDTHS:
            groups = list(groups_of(cards, width))
            if groups and all(size % width == 0 for size in model.spec.tensor_sizes(model).values()):
                work = placing.reward_work(self.problem, model, groups)
                if work is not None:
                    return work
        return None

    def bound(self, split: Split, *, shared: bool) -> float:
        """Seconds of a step that no placement of this split can beat."""
        training = self.training_bound(split)
        if math.isinf(training):
            return math.inf
        scoring = 0.0
        if self.problem.reward_model is not None:
            work = self.reward(split)
            if work is None:
                return math.inf
            scoring = work.scoring_seconds
        if shared:
            return training + scoring + self._generation_roofline(split)
        ways = self.generations(split)
        if not ways:
            return math.inf
        generation = min(way.batch_seconds for way in ways)
        bounds: list[float] = []
        if "sync" in self.problem.modes:
            bounds.append(generation + scoring + training)
        if "async" in self.problem.modes:
            if self.problem.in_flight:
                generation = min(way.steady_seconds for way in ways)
            bounds.append(max(generation, scoring, training))
        return min(bounds, default=math.inf)

    def _generation_roofline(self, split: Split) -> float:
        """All cards multiply at their peaks, and read keys and values; 0 if some rounds are measured."""
        load = self.problem.load
        cards = [card for group in self.cards_of(split, 0) for card in group]
        if {card.type for card in cards} & {name for name, _ in self.ways.rates.measured}:
            return 0.0
        rates = [self.ways.rates.decoder.rates([card]) for card in cards]
        # The first token of each is drawn where its prompt is read.
        tokens = load.samples * (load.expected_new_tokens - 1)
        layers = load.model.num_layers
        flops = 2.0 * tokens * load.model.active_parameters * 0.5
        cache = 2.0 * tokens * load.prompt_tokens * load.model.key_value_size * ELEMENT_BYTES[load.precision]
        return max(
            flops / math.fsum(rate.flops_per_second for rate in rates),
            cache * layers / math.fsum(rate.bytes_per_second for rate in rates),
        )

    def placements(self, split: Split, *, shared: bool, thorough: bool = True) -> list[placing.Placement]:
        """The best placement of a split in each mode; empty if a role does not fit its cards."""
        reward = self.reward(split)
        if self.problem.reward_model is not None and reward is None:
            return []
        works, modes = self.policies(split, thorough=thorough), self.problem.modes
        pairs = [(work, way) for work in works[:1] if not shared for way in self.generations(split)]
        if shared:
            pairs = [(work, way) for work in works if (way := self.ways.shared_generation(work)) is not None]
            modes = ("sync",)
        put = functools.partial(placing.place, self.problem, split=split, reward=reward, shared=shared)
        placed = ([put(mode=mode, policy=work, generation=way) for work, way in pairs] for mode in modes)
        return [min(own, key=lambda placement: placement.step_seconds) for own in placed if own]


def search_roles(problem: placing.RolesProblem, search: RolesSearch | None = None) -> RolesResult:
    """The fastest placement that fits; `search` may have looked up some costs already. Raises NoPlanFits,
    naming the role in the way, if none fits."""
    search = search or RolesSearch(problem)
    clock, began = search.clock, search.clock()
    waiting: list[tuple[float, Split, bool]] = []
    ways = ["apart" in problem.placements, "shared" in problem.placements and "sync" in problem.modes]
    for shared in (shared for shared in (False, True) if ways[shared]):
        waiting += [(search.bound(own, shared=shared), own, shared) for own in search.splits(shared=shared)]
    num_splits = len(waiting)
    waiting = sorted((item for item in waiting if math.isfinite(item[0])), key=lambda item: item[0])
    lowest = waiting[0][0] if waiting else math.inf
    found: list[placing.Placement] = []
    tried: list[tuple[float, float, Split, bool]] = []
    best, priced, stopped = math.inf, 0, False
    # First all splits in short, then thoroughly, the most promising ones first.
    for bound, split, shared in waiting:
        if bound >= best * (1 - 1e-9):
            break
        if found and clock() - began > problem.time_limit:
            stopped = True
            break
        priced += 1
        placed = search.placements(split, shared=shared, thorough=False)
        if placed:
            found += placed
            least = min(placement.step_seconds for placement in placed)
            tried.append((least, bound, split, shared))
            best = min(best, least)
    for _, bound, split, shared in sorted(tried):
        if bound >= best * (1 - 1e-9):
            continue
        if clock() - began > problem.time_limit:
            stopped = True
            break
        placed = search.placements(split, shared=shared)
        found += placed
        best = min(best, *(placement.step_seconds for placement in placed))
    if not found:
        raise NoPlanFits(_why_nothing_fits(search))
    ranked = _fastest_of_each(found)
    return RolesResult(
        best=ranked[0],
        others=_others(ranked),
        lower_bound_seconds=min(lowest, ranked[0].step_seconds),
        exact=not stopped and not search.stopped,
        stopped=stopped or search.stopped,
        num_splits=num_splits,
        num_priced=priced,
    )


def _fastest_of_each(found: Sequence[placing.Placement]) -> list[placing.Placement]:
    """Of each split and mode the fastest placement, the fastest first."""
    fastest: dict[tuple[Split, str, bool], placing.Placement] = {}
    for placement in sorted(found, key=lambda placement: placement.step_seconds):
        fastest.setdefault((placement.split, placement.mode, placement.shared), placement)
    return list(fastest.values())


def _others(ranked: Sequence[placing.Placement]) -> tuple[placing.Placement, ...]:
    """The best of each other mode and way, then the next best splits; six at most."""
    firsts = {(placement.mode, placement.shared): placement for placement in reversed(ranked)}
    new = {id(placement) for placement in firsts.values()}
    others = sorted(ranked[1:], key=lambda placement: id(placement) not in new)
    return tuple(sorted(others[:6], key=lambda placement: placement.step_seconds))


def _why_nothing_fits(search: RolesSearch) -> str:
    """The role that fits no split."""
    apart, shared = list(search.splits()), search.splits(shared=True)
    if not any([math.isfinite(search.training_bound(split)) for split in (*apart, *shared)]):
        beside = "and its critic" if search.problem.policy.critic else "alone"
        return (
            f"no split fits: weights and gradients of the policy {beside} are more than the cards' memory; "
            + (search.refusal or "allow more cards")
        )
    if search.refusal:
        return f"no split fits: the policy has no plan on its cards: {search.refusal}"
    if not any(search.generations(split) for split in apart):
        load = search.problem.load
        return (
            f"no split fits: no cards hold the weights and one group of {load.group} samples of "
            f"{load.length} tokens; allow a smaller algorithm.group, shorter answers, or more cards"
        )
    return "no split fits: generation and policy do not fit beside each other; allow more cards"


# --- ways to be engines ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineWays:
    """The engines of a problem."""

    problem: placing.RolesProblem
    rates: EngineRates

    def list_generations(self, groups: Sequence[Sequence[Card]]) -> list[Generation]:
        """The ways in which the cards of each group can be engines; empty if the model does not fit them."""
        ways = [list(self._ways(cards)) or [()] for cards in groups]
        if math.prod(map(len, ways)) > MAX_WAYS:
            speed = self.rates.samples_per_second
            ways = [[max(own, key=lambda engines: math.fsum(map(speed, engines)))] for own in ways]
        found = [tuple(itertools.chain(*choice)) for choice in itertools.product(*ways)]
        if not any(found):
            chain = self._chain([card for cards in groups for card in cards])
            found = [(chain,)] if chain is not None else []
        return [without_idle_slots(Generation(engines, self.rates)) for engines in found if engines]

    def _ways(self, cards: Sequence[Card]) -> Iterator[tuple[EnginePlan, ...]]:
        """Equal engines on cards of one group, by width; of several stages only where one does not hold."""
        for width in self._widths():
            groups = list(groups_of(cards, width))
            for num_stages in range(1, min(len(groups), MAX_STAGES) + 1):
                starts = range(0, len(groups) - num_stages + 1, num_stages)
                made = (self._engine(groups[i : i + num_stages], [1.0] * num_stages) for i in starts)
                engines = tuple(itertools.takewhile(bool, made))
                if len(engines) == len(starts):
                    yield tuple(engine for engine in engines if engine is not None)
                    break

    def _widths(self) -> list[int]:
        model = self.problem.load.model
        if model.num_experts:
            return [1]
        sizes = model.spec.tensor_sizes(model).values()
        given = self.problem.tensor or WIDTHS
        return [width for width in sorted(set(given)) if all(size % width == 0 for size in sizes)]

    def _engine(self, groups: Sequence[tuple[Card, ...]], weights: Sequence[float]) -> EnginePlan | None:
        num_layers = self.problem.load.model.num_layers
        if len(groups) > num_layers:
            return None
        ends = list(itertools.accumulate(deal_layers(num_layers, weights)))
        stages = [
            DecodeStage(cards=group, layers=(first, end), embedding=first == 0, head=end == num_layers)
            for group, first, end in zip(groups, (0, *ends), ends, strict=False)
        ]
        return self._slotted(stages)

    def _slotted(
        self, stages: Sequence[DecodeStage], held_bytes: Sequence[float] = (), *, limit: int | None = None
    ) -> EnginePlan | None:
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

    def _chain(self, cards: Sequence[Card]) -> EnginePlan | None:
        """One engine over cards of all groups, layers by what their memories can be read at."""
        if not cards:
            return None
        for width in self._widths():
            groups = list(groups_of(cards, width))
            weights = [self.rates.decoder.rates(group).bytes_per_second for group in groups]
            whole = groups and len(groups) * width == len(cards)
            if whole and (engine := self._engine(groups, weights)) is not None:
                return engine
        return None

    def shared_generation(self, work: placing.PolicyWork) -> Generation | None:
        """The policy's pipelines as engines, in the memory that training leaves; None if a group does not
        fit, or if a card has several stages. Each answers its part of the batch, and all have as many slots
        as the largest part fills."""
        shares = tuple(p.num_sequences / work.plan.global_batch_size for p in work.plan.pipelines)
        limit = max(deal(self.problem.load.prompts, shares)) * self.problem.load.group
        found = self._pipelines(work, limit)
        engines = found and self._pipelines(work, min(engine.slots for engine in found))
        return Generation(engines, self.rates, shares) if engines else None

    def _pipelines(self, work: placing.PolicyWork, limit: int) -> tuple[EnginePlan, ...] | None:
        """The policy's pipelines as engines of at most so many slots."""
        engines: list[EnginePlan] = []
        for p, pipeline in enumerate(work.plan.pipelines):
            replicas = [replica for stage in pipeline.stages for replica in stage.replicas]
            if len(set(replicas)) < len(replicas):
                return None
            costs = [stage for stage in work.cost.stages if stage.pipeline == p]
            stages = [DecodeStage.of(stage, stage.replicas[0]) for stage in costs]
            engine = self._slotted(stages, [stage.memory.lasting for stage in costs], limit=limit)
            if engine is None:
                return None
            engines.append(engine)
        return tuple(engines)
