"""Slots of engines: as many as fit, with all that is held while they are run."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.bench.roles import drawn
from yuan_train.planner.costs.workload import TokenRows, model_work
from yuan_train.planner.roles.engines import (
    DRAWN_ELEMENTS,
    PREFILL_CHUNK,
    DecodeStage,
    Writing,
    engine_memory,
    with_slots,
)
from yuan_train.planner.roles.search import RolesSearch

SEARCH = RolesSearch(drawn(0, most_cards=4))
RATES = SEARCH.ways.rates
LOAD = RATES.load
CARDS = SEARCH.problem.policy.cluster.cards


def writing(**changes: object) -> Writing:
    """Two answers each to prompts of 64 tokens, on both layers of a model."""
    whole = {
        "model": replace(LOAD.model, num_layers=2),
        "num_layers": 2,
        "head": True,
        "width": 1,
        "group": 2,
        "prompt": 64,
        "length": 96,
        "precision": "bf16",
    }
    return Writing(**(whole | changes))  # pyright: ignore[reportArgumentType]


def test_slots_and_the_prompts_cache() -> None:
    keys = LOAD.model.key_value_size
    assert LOAD.model.attention == "plain"
    assert writing().group_cache_bytes == 2 * 2 * 2 * keys * (2 * 97 + 65)
    assert writing(width=2).group_cache_bytes == writing().group_cache_bytes / 2


def test_a_group_reads_as_many_prompts_at_once_as_it_has_answers_for() -> None:
    one = model_work(writing().model, TokenRows(1, 64, "bf16"), logit_rows=1).layer.activation_bytes
    assert writing(head=False, length=65).lane_bytes(2) == one
    assert writing(head=False, length=65).lane_bytes(16) == 8 * one
    # Of a long prompt a chunk; all answers to one prompt share its reading.
    assert writing(head=False, prompt=10_000).chunk_bytes == writing(prompt=PREFILL_CHUNK).chunk_bytes
    assert writing(head=False, group=4, length=65).lane_bytes(4) == one


def test_logits_are_drawn_in_fp64() -> None:
    words = 4 * LOAD.model.vocab_size
    assert words < DRAWN_ELEMENTS
    assert writing(prompt=1).lane_bytes(4) == 32 * words
    many = 2**12 * LOAD.model.vocab_size
    assert many > 4 * DRAWN_ELEMENTS
    assert writing(prompt=1, length=2).lane_bytes(2**12) == 16 * many


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_an_engine_fits_and_a_group_of_samples_more_would_not(data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, min(2, len(CARDS))))
    ends = [round(LOAD.model.num_layers * (s + 1) / num_stages) for s in range(num_stages)]
    stages = [
        DecodeStage(cards=(card,), layers=(first, end), embedding=first == 0, head=end == ends[-1])
        for card, first, end in zip(CARDS, (0, *ends), ends, strict=False)
    ]
    capacities = [RATES.topology.types[stage.cards[0].type].memory for stage in stages]
    held = [data.draw(st.floats(0.5, 1.0)) * capacity for capacity in capacities]
    limit = data.draw(st.integers(1, 100_000))
    engine = with_slots(RATES, stages, limit=limit, held_bytes=held)
    if engine is None:
        return
    assert engine.slots <= limit and engine.slots % LOAD.group == 0

    def free(slots_per_group: int) -> float:
        found = engine_memory(RATES, replace(engine, slots_per_group=slots_per_group))
        taken = [math.fsum(own[name] for name in ("slots", "buffers")) for own in found]
        return min(c - h - t for c, h, t in zip(capacities, held, taken, strict=True))

    assert free(engine.slots_per_group) >= 0
    if num_stages == 1 and engine.slots + LOAD.group <= limit:
        assert free(engine.slots_per_group + LOAD.group) < 0


def test_without_what_a_lane_holds_too_many_slots_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = DecodeStage(cards=CARDS[:1], layers=(0, LOAD.model.num_layers), embedding=True, head=True)
    held = [0.9 * RATES.topology.types[CARDS[0].type].memory]
    right = with_slots(RATES, [stage], limit=10**6, held_bytes=held)
    monkeypatch.setattr(Writing, "lane_bytes", lambda self, slots: 0.0)
    wrong = with_slots(RATES, [stage], limit=10**6, held_bytes=held)
    monkeypatch.undo()
    assert right is not None and wrong is not None and wrong.slots > right.slots
    assert sum(engine_memory(RATES, wrong)[0][name] for name in ("slots", "buffers")) > held[0] / 9
