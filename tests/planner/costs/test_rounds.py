"""Rounds of generation that a profile has: at any slots and context, against closed forms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.planner.by_hand import entry, unit
from tests.planner.search.test_roles import ONE_CUT
from tools.bench.roles import cluster_of, problem_of
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import load_model
from yuan_train.config.profile import BatchProfile, GenerationProfile, Profile, merge_profiles
from yuan_train.planner.costs.links import allreduce_seconds, make_topology
from yuan_train.planner.report.roles import roles_table
from yuan_train.planner.roles.engines import (
    Decoder,
    DecodeStage,
    EnginePlan,
    EngineRates,
    line_through,
    measured_rounds,
)
from yuan_train.planner.roles.placement import RolesProblem
from yuan_train.planner.roles.plan import make_rl_plan, placement_of
from yuan_train.planner.roles.search import RolesSearch, search_roles

MODEL = replace(load_model("configs/model/qwen2.5-0.5b.yaml"), num_layers=4)
CLUSTER = cluster_of({"H800-80G": 2, "H20": 2})
FIRST = next(card for card in CLUSTER.cards if card.type == "H800-80G")
OTHER = next(card for card in CLUSTER.cards if card.type == "H20")


def layer(slots: float, context: float) -> float:
    """Affine in the slots, and in the tokens of their contexts."""
    return 1e-3 + 2e-4 * slots + 3e-6 * slots * context


def generation(device_type: str = "H800-80G", *, width: int = 1, factor: float = 1.0) -> GenerationProfile:
    slots, contexts = (4, 8), (64.0, 128.0)
    return GenerationProfile(
        device_type=device_type,
        tensor_parallel=width,
        group=4,
        prompt_tokens=64,
        slots=slots,
        contexts=contexts,
        layer_seconds=tuple(tuple(factor * layer(b, context) for context in contexts) for b in slots),
        engine_seconds=tuple(factor * (5e-3 + 1e-4 * b) for b in slots),
        head_seconds=tuple(factor * (7e-3 + 2e-4 * b) for b in slots),
        prompts=(1, 2),
        prompt_layer_seconds=(factor * 0.01, factor * 0.018),
        prompt_engine_seconds=(factor * 0.003, factor * 0.004),
    )


def profile(*own: GenerationProfile, **changes: object) -> Profile:
    return replace(Profile(sequence_length=128, generation=own), **changes)  # pyright: ignore[reportArgumentType]


def stage_of(*cards: object, layers: tuple[float, float] = (0, 4), **ends: bool) -> DecodeStage:
    both = {"embedding": True, "head": True} | ends
    return DecodeStage(cards=cards, layers=layers, **both)  # pyright: ignore[reportArgumentType]


def decoder(*own: GenerationProfile) -> Decoder:
    return Decoder(make_topology(CLUSTER), MODEL, "bf16", measured_rounds(profile(*own)))


def seconds(stage: DecodeStage, *own: GenerationProfile, slots: int = 6, context: float = 90.0) -> float:
    return decoder(*own).round_seconds(stage, slots=slots, context=context)


@pytest.mark.parametrize(("slots", "context"), [(4, 64.0), (6, 90.0), (8, 128.0), (32, 500.0), (2, 10.0)])
def test_a_measured_round_is_its_parts(slots: int, context: float) -> None:
    ends = 5e-3 + 1e-4 * slots, 7e-3 + 2e-4 * slots
    whole = 4 * layer(slots, context) + sum(ends)
    assert seconds(stage_of(FIRST), generation(), slots=slots, context=context) == pytest.approx(whole)
    part = stage_of(FIRST, layers=(0, 2.5), head=False)
    own = 2.5 * layer(slots, context) + ends[0]
    assert seconds(part, generation(), slots=slots, context=context) == pytest.approx(own)


def test_another_type_of_card_has_the_formula() -> None:
    formula = seconds(stage_of(OTHER))
    assert seconds(stage_of(OTHER), generation()) == formula
    assert seconds(stage_of(FIRST), generation()) != seconds(stage_of(FIRST))
    # Nor has a group with a card that was not measured.
    assert seconds(stage_of(FIRST, OTHER), generation()) == seconds(stage_of(FIRST, OTHER))
    slower = seconds(stage_of(FIRST, OTHER), generation(width=2), generation("H20", width=2, factor=3.0))
    assert slower == pytest.approx(seconds(stage_of(OTHER), generation("H20", factor=3.0)))


def test_a_wider_group_divides_what_one_card_takes() -> None:
    both = [card for card in CLUSTER.cards if card.type == "H800-80G"]
    sums = (2 * 4 + 1) * allreduce_seconds(make_topology(CLUSTER), both, 6 * MODEL.hidden_size * 2.0)
    divided = (4 * layer(6, 90.0) + 7e-3 + 2e-4 * 6) / 2 + 5e-3 + 1e-4 * 6
    assert seconds(stage_of(*both), generation()) == pytest.approx(divided + sums)
    # A width that was measured has its sums in it.
    assert seconds(stage_of(*both), generation(), generation(width=2, factor=0.7)) == pytest.approx(
        0.7 * (4 * layer(6, 90.0) + 12e-3 + 3e-4 * 6)
    )


def test_measured_prompts() -> None:
    found = decoder(generation()).prefill_seconds(stage_of(FIRST), tokens=96, prompts=3)
    # Twelve first tokens; half as many tokens more than were measured in each prompt.
    assert found == pytest.approx(4 * 1.5 * 0.026 + 0.005 + 7e-3 + 2e-4 * 12)


def test_lines() -> None:
    assert line_through((4,), (2.0,), 9) == 2.0
    assert line_through((1, 2, 4), (1.0, 2.0, 8.0), 3) == 5.0
    assert line_through((1, 2, 4), (1.0, 2.0, 8.0), 6) == 14.0
    assert line_through((2, 4), (1.0, 3.0), 0.5) == 0.0


def test_a_wave_is_a_reading_and_a_round_less_than_tokens() -> None:
    problem = problem_of(CLUSTER, MODEL, prompts=2, group=4, prompt=64, new=64)
    rates = EngineRates(make_topology(CLUSTER), problem.load, measured_rounds(profile(generation())))
    engine = EnginePlan(stages=(stage_of(FIRST),), slots_per_group=8, num_groups=1)
    reading = 4 * 0.018 + 0.004 + 7e-3 + 2e-4 * 8
    round_ = 4 * layer(8, 64 + 32) + 12e-3 + 3e-4 * 8
    assert rates.are_measured(engine)
    assert rates.wave_seconds(engine, 8) == pytest.approx(reading + 63 * round_)
    # All slots run, however many are in use.
    assert rates.rounds(engine, 4) == pytest.approx(round_)
    other = EnginePlan(stages=(stage_of(OTHER),), slots_per_group=8, num_groups=1)
    assert not rates.are_measured(other)


def test_merging_keeps_the_first_of_each() -> None:
    batch = BatchProfile(samples=8, scoring_seconds=0.2, packing_seconds=0.1)
    one, other = profile(generation()), profile(generation(factor=2.0), generation("H20"), batch=batch)
    merged = merge_profiles([("one", one), ("other", other)])
    assert merged.generation == (generation(), generation("H20"))
    assert merged.batch == batch
    with pytest.raises(ConfigError, match="sequence_length"):
        merge_profiles([("one", one), ("other", replace(other, sequence_length=64))])


def measured_problem(*, samples: int = 8) -> RolesProblem:
    """Both types measured, units and rounds; scoring and packing take 4 and 2 seconds of 8 samples."""
    own = unit(0.01, 0.02, kept=1e6, output=1e5, transient_bytes=0)
    problem = problem_of(CLUSTER, MODEL, prompts=2, group=4, prompt=64, new=64)
    given = profile(
        generation(),
        generation("H20", factor=2.0),
        entries=tuple(entry(name, own) for name in ("H800-80G", "H20")),
        precision="bf16",
        batch=BatchProfile(samples=samples, scoring_seconds=4.0, packing_seconds=2.0),
    )
    return replace(problem, policy=replace(problem.policy, profile=given), policy_search=ONE_CUT, tensor=(1,))


def test_a_forecast_says_what_it_is_made_of() -> None:
    problem = measured_problem()
    result = search_roles(problem)
    plan = make_rl_plan(problem, result)
    assert plan.forecast is not None and plan.forecast.source == "measured"
    assert plan.forecast.scoring_seconds == 4.0
    assert "measured: rounds of" in roles_table(result, problem, plan)
    assert placement_of(problem, plan).step_seconds == pytest.approx(result.best.step_seconds, rel=0.02)
    # Half of it for half the samples; less by packing without it.
    half = search_roles(measured_problem(samples=16)).best
    assert half.scoring_seconds == 2.0
    assert half.policy.training_seconds == pytest.approx(result.best.policy.training_seconds - 1.0)
    policy = problem.policy
    assert policy.profile is not None
    without = replace(policy.profile, generation=(generation(),))
    result = search_roles(replace(problem, policy=replace(policy, profile=without)))
    used = {card.type for engine in result.best.generation.engines for card in engine.cards}
    assert (result.best.source == "measured") == (used == {"H800-80G"})


def test_no_split_is_ruled_out_wrongly() -> None:
    problem = measured_problem()
    search = RolesSearch(problem)
    best = search_roles(problem, search).best.step_seconds
    steps = [
        placement.step_seconds
        for shared, splits in ((False, search.splits()), (True, search.splits(shared=True)))
        for split in splits
        for placement in search.placements(split, shared=shared)
    ]
    assert best <= min(steps) * (1 + 1e-9)
