"""The search for plans that megatron-core has words for: one width, one backend, pipelines alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from yuan_train.config.cluster import Card
from yuan_train.config.express import is_expressible
from yuan_train.config.plan import Plan, divides_experts, unlike_owners
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.planner.search.shapes import Options, Shape, list_shapes

MOST_LEFT_OUT = 4
"""Types of cards up to which plans are also searched without some of them."""


def is_wanted(plan: Plan, options: Options) -> bool:
    """Whether a plan keeps the search keys and violates no constraint, no weights are stepped by unlike
    owners unless nothing else is asked for or cards share experts, and the engine that the options name can
    run it."""
    if not _keeps_keys(plan, options) or next(validate_plan(plan), None) is not None:
        return False
    spared = _has_pages(plan) or divides_experts(plan)
    if True in options.sharded and not spared and unlike_owners(plan) is not None:
        return False
    return not options.expressible or is_expressible(plan)


def _keeps_keys(plan: Plan, options: Options) -> bool:
    """Whether a plan has only what the search keys allow; hosts, disks and idle cards are not asked for."""
    counts, stages = options.num_micro_batches, [stage for p in plan.pipelines for stage in p.stages]
    widths = {len(replica) for stage in stages for replica in stage.replicas}
    return (
        (divides_experts(plan) or widths <= set(options.tensor))
        and (options.any_replicas or {len(stage.replicas) for stage in stages} <= set(options.replicas))
        and {stage.recompute for stage in stages if stage.num_blocks} <= set(options.recompute)
        and plan.schedule in options.all_schedules
        and (options.pipelines is None or len(plan.pipelines) in options.pipelines)
        and {p.micro_batch_size for p in plan.pipelines} <= set(options.all_sizes)
        and (counts is None or {p.num_micro_batches for p in plan.pipelines} <= set(counts))
    )


def _has_pages(plan: Plan) -> bool:
    """Whether layers are pages of a host, with which no state is sharded."""
    return any(stage.parameter_offload for pipeline in plan.pipelines for stage in pipeline.stages)


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
