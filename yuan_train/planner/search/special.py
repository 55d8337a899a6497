"""Plans that the compiled core does not price: each kind is found from the plans that are known so far.

Three kinds have rooms of their own. The fourth is here: attention on one type of card and feed-forwards on
another, as virtual stages. Old cards may have the memory for experts and lack the speed for attention, new
ones the reverse. Cards of the two types are paired; each pair has consecutive layers, and a micro-batch goes
to and fro between its cards, half a layer at a time (HeterMoE, arXiv 2504.03871). A layer may also lie on one
of the two as a whole: as many do as balance the pair. It stands alone because a further kind is added here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.unit_costs import Costs
from yuan_train.planner.search.candidate import Candidate, Space, judge, rank
from yuan_train.planner.search.expert_groups import expert_plans, may_divide_experts
from yuan_train.planner.search.local import half_layer_plans
from yuan_train.planner.search.paged import check_pages, paged_plans
from yuan_train.planner.search.shapes import Options, PipelineCut, assemble_plan, by_type, equal_parts

NUM_COSTED = 6
"""Plans with the least work on their busiest card, which are costed in full, for each kind of recompute: the
fastest kind may not fit."""


@dataclass(frozen=True)
class _Pairing:
    """The cards of each pair, by pipeline: pairs[d][i] = (cards for attention, cards for feed-forwards)."""

    pairs: tuple[tuple[tuple[tuple[Card, ...], tuple[Card, ...]], ...], ...]
    micro_batch_size: int
    num_micro_batches: int
    split: int
    """Layers of a pair that are divided between its cards."""
    whole_first: bool
    """Whether the pair's other layers lie on its first card, before these; else on its second, after them."""
    recompute: Recompute


def alternating_plans(space: Space, known: Sequence[Candidate]) -> list[Candidate]:
    """The most promising ones that fit; none unless half layers and virtual stages are searched."""
    del known
    costs, cards, options = space.costs, space.cards, space.options
    if not options.half_layers or "interleaved_1f1b" not in options.all_schedules:
        return []
    pairings = sorted(_pairings(costs, cards, options), key=lambda pairing: _busiest(costs, pairing))
    kinds = ([p for p in pairings if p.recompute == kind][:NUM_COSTED] for kind in options.recompute)
    found: list[Candidate] = []
    for pairing in itertools.chain.from_iterable(kinds):
        if not space.is_over() and (one := judge(space, _plan_of(costs, pairing, options))) is not None:
            found.append(one)
    return found


def _pairings(costs: Costs, cards: Sequence[Card], options: Options) -> Iterator[_Pairing]:
    types = by_type(cards)
    for first, second in itertools.permutations(types, 2):
        if options.use_all_devices and len(types) > 2:
            return
        for num_pairs in _divisors(math.gcd(len(types[first]), len(types[second]))):
            parts = (equal_parts(types[name], num_pairs) for name in (first, second))
            pairs = list(zip(*parts, strict=True))
            for num_pipelines in options.pipelines or _divisors(num_pairs):
                yield from _of_pairs(costs, pairs, num_pipelines, options)


def _of_pairs(
    costs: Costs,
    pairs: Sequence[tuple[tuple[Card, ...], tuple[Card, ...]]],
    num_pipelines: int,
    options: Options,
) -> Iterator[_Pairing]:
    depth, rest = divmod(len(pairs), num_pipelines)
    num_layers = costs.problem.model.num_layers
    if rest or depth > num_layers:
        return
    dealt = tuple(tuple(pairs[d * depth : (d + 1) * depth]) for d in range(num_pipelines))
    replicas = {len(group) for pair in pairs for group in pair}
    if not options.any_replicas and not replicas <= set(options.replicas):
        return
    for size, recompute in itertools.product(options.micro_batch_sizes, options.recompute):
        count, odd = divmod(costs.problem.global_batch_size, num_pipelines * size)
        allowed = options.num_micro_batches
        if odd or not count or max(replicas) > count or (allowed is not None and count not in allowed):
            continue
        for split, whole_first in itertools.product(range(1, -(-num_layers // depth) + 1), (True, False)):
            yield _Pairing(dealt, size, count, split, whole_first, recompute)


def _divisors(number: int) -> tuple[int, ...]:
    return tuple(d for d in range(1, number + 1) if number % d == 0)


def _layers_of(num_layers: int, depth: int) -> list[tuple[int, int]]:
    """Layers [first, end) of each pair, as even as possible."""
    borders = [num_layers * i // depth for i in range(depth + 1)]
    return list(itertools.pairwise(borders))


def _busiest(costs: Costs, pairing: _Pairing) -> float:
    """Seconds of the busiest card's work in a step, embedding and head left out."""
    halves: list[list[float]] = []
    counts = [end - first for first, end in _layers_of(costs.problem.model.num_layers, len(pairing.pairs[0]))]
    for place in (0, 1):
        group = pairing.pairs[0][0][place]
        card = costs.of(group[0].type, pairing.micro_batch_size, pairing.recompute)
        share = pairing.num_micro_batches / len(group)
        halves.append([share * card.layer.seconds * half.seconds for half in card.halves])
    most = max(counts)
    split = min(pairing.split, most)
    whole = [most - split, 0] if pairing.whole_first else [0, most - split]
    return max(split * halves[place][place] + whole[place] * sum(halves[place]) for place in (0, 1))


def _plan_of(costs: Costs, pairing: _Pairing, options: Options) -> Plan:
    """The plan of a pairing: stages [a, a + 0.5), [a + 0.5, a + 1) ... on the two cards of a pair in turn."""
    cuts: list[PipelineCut] = []
    num_layers = costs.problem.model.num_layers
    layers = _layers_of(num_layers, len(pairing.pairs[0]))
    borders: list[float] = [0.0]
    for first, end in layers:
        split = min(pairing.split, end - first)
        start = end - split if pairing.whole_first else first
        halves = [start + half / 2 for half in range(1, 2 * split + 1)]
        borders += halves[:-1] + [float(end)]
    for pairs in pairing.pairs:
        groups: list[tuple[tuple[Card, ...], ...]] = []
        for (first, end), pair in zip(layers, pairs, strict=True):
            split = min(pairing.split, end - first)
            groups += [tuple((card,) for card in pair[place]) for _ in range(split) for place in (0, 1)]
        cuts.append(
            PipelineCut(
                micro_batch_size=pairing.micro_batch_size,
                num_micro_batches=pairing.num_micro_batches,
                stage_groups=tuple(groups),
                bounds=tuple(1.0 + border for border in borders),
                recompute=(pairing.recompute,) * len(groups),
            )
        )
    return assemble_plan(costs, cuts, schedule="interleaved_1f1b", sharded=options.sharded[0])


# --- the kinds ----------------------------------------------------------------------------------------------


KINDS = (expert_plans, alternating_plans, half_layer_plans, paged_plans)


def with_special_plans(space: Space, known: Sequence[Candidate]) -> list[Candidate]:
    """The known plans and those of each kind that is searched, fastest first."""
    ranked = list(known)
    for find in KINDS:
        ranked = rank([*ranked, *find(space, ranked)])
    return ranked


def check_special(space: Space) -> None:
    """Raise ConfigError if the search keys ask for plans of a kind that the problem cannot have."""
    check_pages(space.costs.problem, space.options)


def may_be_special(space: Space) -> bool:
    """Whether some kind is searched."""
    return space.options.half_layers or space.options.offload_parameters or may_divide_experts(space)
