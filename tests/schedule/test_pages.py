"""Pages of parameters: the copies of a program, and the faults that its checker finds."""

import itertools

import pytest

from yuan_train.schedule.check import check_pages, check_schedule
from yuan_train.schedule.copies import Paging, by_group, with_pages
from yuan_train.schedule.schedules import forward_only, make_schedule, peak_in_flight
from yuan_train.schedule.step import Step, one_worker_each


def paging(pages: int, slots: int, group: int) -> Paging:
    return Paging(num_pages=pages, slots=slots, group=group)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
def test_every_program_of_groups_runs_and_keeps_its_slots(name):
    for stages, count, group in itertools.product((1, 2, 4), (1, 5, 8), (1, 2, 3, 8)):
        schedule = make_schedule(name, num_micro_batches=count, workers=one_worker_each(stages), group=group)
        evaluation = forward_only(num_micro_batches=count, workers=one_worker_each(stages), group=group)
        check_schedule(schedule)
        check_schedule(evaluation)
        most = count if name == "gpipe" else min(count, stages * group)
        assert peak_in_flight(schedule[0]) == most
        for pages, slots in itertools.product((1, 2, 5), (1, 2, 3, 4)):
            own = paging(pages, slots, group)
            for program in (schedule[-1], evaluation[0]):
                check_pages(with_pages(program, own), own)


def test_a_page_comes_twice_a_group_and_its_sum_goes_down_once():
    program = make_schedule("1f1b", num_micro_batches=4, workers=one_worker_each(1), group=2)[0]
    steps = with_pages(program, paging(4, 3, 2))
    counts = {
        kind: sum(step.kind == kind for step in steps) for kind in ("page_in", "gradient_up", "gradient_down")
    }
    # Two groups of four pages, up in the forward and, but for the last, which stays, in the backward. The
    # second group adds to the sums of the first.
    assert counts == {"page_in": 2 * (4 + 3), "gradient_up": 4, "gradient_down": 2 * 4}
    groups = by_group(steps)
    assert [(*key, group.micro_batches) for key, group in groups.items()] == [
        ("forward", 1, (0, 1)),
        ("backward", 1, (0, 1)),
        ("forward", 3, (2, 3)),
        ("backward", 3, (2, 3)),
    ]
    assert sum((group.steps for group in groups.values()), ()) == steps


def test_the_next_page_is_fetched_before_the_running_one_with_three_slots():
    program = make_schedule("1f1b", num_micro_batches=2, workers=one_worker_each(1), group=2)[0]
    steps = with_pages(program, paging(4, 3, 2))
    for page in (1, 2, 3):
        assert steps.index(Step("page_in", 0, 0, page)) < steps.index(Step("forward", 0, 0, page - 1))


def changed(steps, old, *new):
    at = steps.index(old)
    return (*steps[:at], *new, *steps[at + 1 :])


def test_faults_are_named():
    program = make_schedule("1f1b", num_micro_batches=4, workers=one_worker_each(1), group=2)[0]
    own = paging(3, 2, 2)
    steps = with_pages(program, own)
    faults = {
        "its page is on the host": changed(steps, Step("page_in", 0, 0, 1)),
        "3 pages are on the card, and 2 may be": (Step("page_in", 0, 0, 2), *steps),
        "without the sum of the groups before": changed(steps, Step("gradient_up", 0, 2, 0)),
        "with a gradient that is not on the host": changed(steps, Step("gradient_down", 0, 0, 1)),
        "still on its way down at the end": steps[:-1],
        "the stage has no such page": (Step("page_in", 0, 0, 7), *steps),
        "takes .part, micro-batch.": changed(steps, Step("forward", 0, 1, 1)),
    }
    for fault, faulty in faults.items():
        with pytest.raises(ValueError, match=fault):
            check_pages(faulty, own)
