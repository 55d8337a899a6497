"""What fits: the boundary is exact, and what is said to help does."""

from typing import get_args

import pytest

from yuan_train.config.devices import CATALOGUE, MEMORY_FRACTION
from yuan_train.config.model import load_model
from yuan_train.estimate.memory import (
    METHODS,
    GroupShape,
    Length,
    MemoryCase,
    StageBytes,
    largest_fitting,
    memory_of,
    remedies,
    roles_memory_text,
    with_length,
)
from yuan_train.estimate.shape import PUBLISHED_SHAPES, to_model

SAMPLES = GroupShape(group=4, prompt=256, new=786)


def case(name: str, method: str = "full", card: str = "H100-80G", *, ours: bool = False) -> MemoryCase:
    shape = PUBLISHED_SHAPES[name]
    return MemoryCase(
        model=to_model(shape) if ours else shape,
        method=method,  # pyright: ignore[reportArgumentType]
        samples=SAMPLES,
        card=card,
    )


@pytest.mark.parametrize("length", get_args(Length))
@pytest.mark.parametrize("card", ["RTX-4090", "H100-80G"])
def test_the_largest_fits_and_one_more_does_not(length: Length, card: str) -> None:
    cases = [case(name, method, card) for name in PUBLISHED_SHAPES for method in METHODS]
    cases += [case(name, card=card, ours=True) for name in ("Qwen2.5-0.5B", "Llama-3.2-1B", "Llama-3.2-3B")]
    found = [largest_fitting(one, length) for one in cases]
    for one, value in zip(cases, found, strict=True):
        assert value == 0 or with_length(one, length, value).fits
        assert not with_length(one, length, value + 1).fits
    assert 0 in found and max(found) > 3


def test_remedies_fit_and_name_the_smallest_card() -> None:
    ways = remedies(case("Qwen2.5-7B"))
    wanted = [("method", "adam8+recompute"), ("method", "lora"), ("card", "H200")]
    assert [(way.change, way.value) for way in ways] == wanted
    assert all(way.case.fits for way in ways)
    assert not remedies(case("Llama-3.1-405B"))


def test_our_engine_recomputes_or_moves_the_optimizer() -> None:
    ways = remedies(case("Llama-3.2-3B", card="A40", ours=True))
    assert ("optimizer_offload", 1.0) in [(way.change, way.value) for way in ways]
    assert all(way.case.fits for way in ways)


def test_our_engine_trains_row_by_row_and_keeps_no_reference() -> None:
    one = case("Qwen2.5-1.5B", ours=True)
    few, many = memory_of(one), memory_of(with_length(one, "group", 64))
    assert few.phases["training"] == many.phases["training"]
    assert few.states["reference"] == 0
    # 2 bytes of bf16, 4 of fp32 gradients, 12 of fp32 master and moments.
    assert sum(few.states.values()) == 18 * 1_543_714_304
    assert few.reserved == CATALOGUE["H100-80G"].reserved
    # Keys and values in bf16: 28 layers, 2 heads of 128. The prompt is read once, and copied to each answer.
    for memory, group in ((few, 4), (many, 64)):
        assert memory.phases["generation"]["cache"] == (group * 1043 + SAMPLES.prompt + 1) * 28 * 2 * 256 * 2


def test_the_filters_state_is_in_the_cache() -> None:
    model = load_model("configs/model/yuan2-2b.yaml")
    memory = memory_of(MemoryCase(model=model, method="full", samples=SAMPLES, card="H100-80G"))
    per_layer = 2 * (
        2 * (4 * 1043 + SAMPLES.prompt + 1) * model.projection_size + 5 * 1.5 * model.hidden_size
    )
    assert memory.phases["generation"]["cache"] == model.num_layers * per_layer


def test_a_role_fits_what_a_plan_may_fill_of_its_card() -> None:
    def held(part: float) -> StageBytes:
        own = {"weights": part * 1e9}
        return StageBytes(role="policy", pipeline=0, stage=0, card="T4", categories=own, capacity=10**9)

    assert held(MEMORY_FRACTION).fits and not held(MEMORY_FRACTION + 0.01).fits
    assert "1.0 of 1.0, more than 95% of it: does not fit (" in roles_memory_text([held(0.96)])
