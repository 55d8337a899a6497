"""Activations that leave the card: where copies are placed, and what the checker refuses."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.schedule import copies
from yuan_train.schedule.check import check_copies
from yuan_train.schedule.copies import (
    Offload,
    TooFewResident,
    group_copies,
    in_parts,
    kept_bytes,
    with_copies,
)
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import COPIES, RankProgram, Step, Workers, one_worker_each

PIPELINES: tuple[tuple[str, Workers], ...] = (
    ("1f1b", one_worker_each(1)),
    ("1f1b", one_worker_each(4)),
    ("1f1b", ((0, 1), (2,))),
    ("gpipe", one_worker_each(2)),
    ("interleaved_1f1b", ((0,), (1,), (0,), (1,))),
    ("zero_bubble", one_worker_each(3)),
    ("zero_bubble", ((0,), (1,), (1,), (0,))),
)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(PIPELINES),
    st.integers(1, 9),
    st.integers(1, 6),
    st.integers(1, 5),
    st.integers(1, 40),
    st.integers(1, 5),
)
def test_what_is_kept_never_exceeds_what_may_be(
    pipeline: tuple[str, Workers], micro_batches: int, parts: int, leaving: int, resident: int, ahead: int
) -> None:
    schedule, workers = pipeline
    for worker, program in enumerate(
        make_schedule(schedule, num_micro_batches=micro_batches, workers=workers)
    ):
        own = [s for s in range(len(workers)) if worker in workers[s]]
        offload = Offload(num_parts=parts, num_leaving=min(leaving, parts), resident=resident, ahead=ahead)
        offloads = dict.fromkeys(own, offload)
        try:
            found = with_copies(program, offloads)
        except ValueError as error:
            assert "set resident_parts" in str(error)
            continue
        check_copies(found, offloads)
        assert tuple(step for step in found if step.kind not in COPIES) == in_parts(program, offloads)
        for stage in own:
            assert kept_bytes(found, {stage: [1.0] * offload.num_leaving})[0] <= resident
        # The executor takes whole steps, and each of their parts with the copies around it.
        groups = group_copies(found)
        assert list(groups) == [step for step in program if step.is_compute]
        copies = [
            copy
            for group in groups.values()
            for copy in (*(c for before in group.before for c in before), *group.after)
        ]
        assert copies == [step for step in found if step.kind in COPIES]


def lane(resident: int = 4) -> tuple[RankProgram, dict[int, Offload]]:
    program = make_schedule("gpipe", num_micro_batches=3, workers=one_worker_each(1))[0]
    offloads = {0: Offload(num_parts=3, num_leaving=2, resident=resident, ahead=1)}
    return with_copies(program, offloads), offloads


def test_the_oldest_leaves_and_comes_back_before_its_backward() -> None:
    program, _ = lane()
    first = Step("forward", 0, 0, 0)
    places = [program.index(first._replace(kind=kind)) for kind in ("offload", "evict", "fetch", "backward")]
    assert places == sorted(places)
    # Of two parts, one backward ahead: those of the last micro-batch are still there.
    assert Step("evict", 0, 2, 1) not in program
    assert kept_bytes(program, {0: [2.0, 3.0]}) == (3.0 + 3 * 3.0 - 1.0, 3 * 2.0 + 2 * 3.0 - 2.0)


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(PIPELINES), st.integers(1, 9), st.integers(1, 6), st.integers(1, 5))
def test_what_would_do_is_the_least_that_does(
    pipeline: tuple[str, Workers], micro_batches: int, leaving: int, ahead: int
) -> None:
    """As found by trying one number after another."""
    schedule, workers = pipeline
    program = make_schedule(schedule, num_micro_batches=micro_batches, workers=workers)[0]
    stage = next(s for s in range(len(workers)) if 0 in workers[s])
    texts: list[str] = []
    for resident in range(1, micro_batches * leaving + 1):
        offload = Offload(num_parts=leaving, num_leaving=leaving, resident=resident, ahead=ahead)
        try:
            with_copies(program, {stage: offload})
            break
        except TooFewResident as error:
            texts.append(str(error))
    assert all(text.endswith(f"set resident_parts: {len(texts) + 1} or more") for text in texts)


def test_what_would_do_is_sought_when_the_text_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    sought: list[int] = []
    monkeypatch.setattr(copies, "_least_resident", lambda *_: sought.append(1) or 7)
    with pytest.raises(TooFewResident) as raised:
        lane(resident=1)
    assert not sought
    wanted = r"stage 0: resident_parts: 1 is .* set resident_parts: 7 or more"
    assert re.search(wanted, str(raised.value)) and sought


@pytest.mark.parametrize(
    ("removed", "fault"),
    [
        (Step("offload", 0, 0, 0), "evict of part 0 of micro-batch 0 .* on the card, not on its way down"),
        (Step("evict", 0, 0, 0), "fetch of part 0 .* on its way down, not on the host"),
        (Step("fetch", 0, 0, 0), "backward of part 0 .* that it needs are on the host"),
        (Step("backward", 0, 0, 0), "still on its way up at the end"),
        (Step("forward", 0, 1, 1), "comes where the forward of part 1 of micro-batch 1"),
    ],
)
def test_a_program_that_loses_activations_is_refused(removed: Step, fault: str) -> None:
    program, offloads = lane()
    check_copies(program, offloads)
    assert removed in program
    with pytest.raises(ValueError, match=fault):
        check_copies(tuple(step for step in program if step != removed), offloads)


def test_more_than_may_be_is_refused() -> None:
    program, offloads = lane()
    fewer = {0: Offload(num_parts=3, num_leaving=2, resident=3, ahead=1)}
    with pytest.raises(ValueError, match="4 parts are on the card, and 3 may be"):
        check_copies(program, fewer)
    with pytest.raises(ValueError, match="this part's activations do not leave"):
        check_copies((*program, Step("offload", 0, 0, 2)), offloads)
