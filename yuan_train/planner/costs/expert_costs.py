"""A card among several that share the experts of each layer.

Each of them has everything else whole, and computes it whole; of the experts each has a contiguous range. So
a card's seconds and bytes are those of a card alone, with another feed-forward.
"""

from __future__ import annotations

import math
from dataclasses import replace

from yuan_train.config.devices import DeviceType
from yuan_train.config.errors import PlanError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan, StagePlan, expert_parameters, expert_ranges, stage_unit_range
from yuan_train.config.profile import Profile
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.unit_costs import STATES, CardCosts, UnitCost, estimate_units, logit_rows
from yuan_train.planner.costs.workload import TokenRows, UnitWork, half_shares, has_flash, model_work


def divides_alike(plan: Plan) -> bool:
    """Whether all pipelines divide the experts of each layer alike."""
    counts: dict[int, tuple[int, ...]] = {}
    for stage in plan.stages:
        own = stage_experts(plan, stage)
        if any(counts.setdefault(unit, own) != own for unit in stage_unit_range(plan, stage)):
            return False
    return True


def check_alike(plan: Plan) -> None:
    """Raise PlanError if pipelines divide the experts of a layer differently, which is not priced."""
    if not divides_alike(plan):
        raise PlanError(
            "the pipelines divide the experts of a layer differently: such plans run, but are not simulated "
            "yet; train with the plan as it is, or divide them alike"
        )


def bare_profile(profile: Profile | None) -> Profile | None:
    """The profile with bare layers in place of whole ones; None if it has none."""
    every = profile.entries if profile is not None else ()
    entries = tuple(replace(one, layers=(one.bare_layer,)) for one in every if one.bare_layer is not None)
    return replace(profile, entries=entries) if profile is not None and entries else None


def expert_card_costs(
    whole: CardCosts,
    bare: CardCosts | None,
    model: ModelConfig,
    experts: int,
    rows: TokenRows,
    *,
    recompute: Recompute,
    device: DeviceType,
) -> CardCosts:
    """Every unit's cost on a card with `experts` of each layer's experts, collectives not included.

    `whole` are the costs of a card alone, `bare` those of a layer without experts, where both are measured.
    Estimated, a unit is estimated anew. Measured, seconds are on the line from the bare layer to the whole
    one; without a bare one, they are scaled by the ratio of the estimates, as bytes are.
    """
    counts, flash = (experts, model.num_experts), has_flash(device)
    held, alone = (
        model_work(model, rows, logit_rows=logit_rows(device), experts=n, flash=flash) for n in counts
    )
    units = estimate_units(held, device, rows.precision, recompute)
    if whole.source == "measured":
        both = held.layer, alone.layer
        estimates = units[1], estimate_units(alone, device, rows.precision, recompute)[1]
        layers = [_scaled(unit, both, estimates) for unit in whole.units[1:-1]]
        if bare is not None and bare.source == "measured":
            share = experts / model.num_experts
            triples = zip(layers, bare.units[1:-1], whole.units[1:-1], strict=True)
            layers = [_on_line(unit, low, high, share) for unit, low, high in triples]
        units = (whole.units[0], *layers, whole.units[-1])
    return replace(whole, units=units, halves=half_shares(held, recompute))


def _scaled(
    layer: UnitCost, works: tuple[UnitWork, UnitWork], estimates: tuple[UnitCost, UnitCost]
) -> UnitCost:
    """A measured layer with fewer experts; works and estimates are the held and the whole layer's."""

    def ratio(name: str) -> float:
        few, all_ = (getattr(estimate, name) for estimate in estimates)
        return few / all_ if all_ else 0.0

    states = works[0].parameters / works[1].parameters
    names = ("forward_seconds", "backward_seconds", "activation_bytes", "transient_bytes")
    return replace(
        layer,
        **{name: getattr(layer, name) * ratio(name) for name in names},
        **{name: getattr(layer, name) * states for name in STATES},
        weight_seconds=layer.weight_seconds * ratio("backward_seconds"),
        parameters=works[0].trained,
        forward_collectives=estimates[0].forward_collectives,
        backward_collectives=estimates[0].backward_collectives,
    )


def _on_line(layer: UnitCost, bare: UnitCost, whole: UnitCost, share: float) -> UnitCost:
    """The layer with seconds between those of a bare and a whole one."""

    names = ("forward_seconds", "backward_seconds", "weight_seconds")
    ends = {name: (getattr(bare, name), getattr(whole, name)) for name in names}
    return replace(layer, **{name: low + max(high - low, 0.0) * share for name, (low, high) in ends.items()})


def stage_experts(plan: Plan, stage: StagePlan) -> tuple[int, ...]:
    """Experts of each layer that each rank of a stage's replicas holds, in a plan that divides them."""
    ranges = expert_ranges(plan.model, stage) or ((0, plan.model.num_experts),)
    return tuple(last - first for first, last in ranges)


def held_expert_parameters(plan: Plan, stage: StagePlan, experts: int) -> int:
    """Parameters of the experts of a stage's layers on a rank that holds so many of each."""
    layers = max(math.floor(stage.layers[1]) - math.ceil(stage.layers[0] - 0.5), 0)
    return layers * experts * expert_parameters(plan.model) // max(plan.model.num_experts, 1)
