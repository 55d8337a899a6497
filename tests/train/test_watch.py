"""What the watch says of a waiting rank, on a clock and a card that the test lets run."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from tests.support.fake_card import FakeCard
from tests.support.project import parse_plan, run_config
from yuan_train.parallel.activity import Activity, during, observed_by
from yuan_train.parallel.device import Mark
from yuan_train.parallel.grid import Grid
from yuan_train.schedule.step import Step
from yuan_train.train.ending import Watch, watching

BACKWARD = Step("backward", 0, 4)
GRADIENT = Activity("wait", Step("receive_gradient", 0, 4))
WAITS = "rank 0 (pipeline 0, stage 0) has waited"


class Card:
    """Runs what the host has enqueued, but only as far as the test lets it."""

    def __init__(self) -> None:
        self.enqueued = self.done = 0

    def mark(self) -> CardMark:
        self.enqueued += 1
        return CardMark(self, self.enqueued)


class CardMark(Mark):
    def __init__(self, card: Card, number: int) -> None:
        self.card, self.number = card, number

    def query(self) -> bool:
        return self.number <= self.card.done


class Watched:
    """A rank, its clock, and what is said of it."""

    def __init__(
        self, grid: Grid, rank: int = 0, *, card: Card | None = None, timeout: float = 600.0
    ) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.watch = Watch(
            grid,
            grid.coords[rank],
            timeout_seconds=timeout,
            say=self.said.append,
            advice=lambda: "the advice",
            mark=card.mark if card else None,
            now=lambda: self.now,
        )

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass, with a look every second."""
        for _ in range(round(seconds)):
            self.now += 1
            self.watch.check()


@pytest.fixture(scope="module")
def grid(run_file: Path) -> Grid:
    return Grid(parse_plan(run_config(run_file), "1x4: 3@0 | 3@1 / 1x4: 3@2,3 | 3@4"))


def test_the_host_of_a_cpu_says_whom_it_waits_for_ever_less_often(grid: Grid) -> None:
    rank = Watched(grid)
    with observed_by(rank.watch), during(Activity("training_step", number=12)):
        rank.pass_seconds(1000)
        with during(GRADIENT):
            rank.pass_seconds(500)
        rank.pass_seconds(1000)
    what = "in the backward of micro-batch 4 for rank 1's gradient"
    assert rank.said == [f"step 12: {WAITS} {seconds} s {what}" for seconds in (60, 120, 240, 480)]


def test_who_waits_for_the_work_of_others_has_no_timeout(grid: Grid) -> None:
    """So that nothing is about to end it, which is what the last notice says of a collective."""
    for kind, is_ended in (("idle", False), ("collective", True)):
        rank = Watched(grid, card=Card(), timeout=100)
        with observed_by(rank.watch), during(Activity(kind, what="rank 1's scores", ranks=(0, 1))):  # type: ignore[arg-type]
            rank.pass_seconds(500)
        assert f"{WAITS} 25 s in rank 1's scores for rank 1" in rank.said[0]
        assert rank.said[-1].endswith("the advice") == is_ended


def test_short_waits_are_not_worth_a_word_however_many(grid: Grid) -> None:
    rank = Watched(grid)
    with observed_by(rank.watch):
        for _ in range(100):
            with during(GRADIENT):
                rank.pass_seconds(50)
    assert not rank.said


def test_a_short_timeout_is_noticed_in_time(grid: Grid) -> None:
    rank = Watched(grid, timeout=20.0)
    with observed_by(rank.watch), during(GRADIENT):
        rank.pass_seconds(20)
    assert [text.partition("waited ")[2][:4] for text in rank.said] == ["5 s ", "10 s"]


def test_a_card_is_where_it_stands_and_not_where_the_host_is(grid: Grid) -> None:
    card = Card()
    rank = Watched(grid, card=card)
    with observed_by(rank.watch), during(Activity("training_step", number=3)):
        # The host enqueues all of the step, and nothing raises.
        with during(Activity("compute", Step("forward", 0, 5))):
            pass
        with during(GRADIENT):
            pass
        with during(Activity("compute", BACKWARD)):
            pass
        rank.pass_seconds(30)
        card.done = 1
        with during(Activity("collective", what="the all-reduce of loss", ranks=tuple(range(5)))):
            rank.pass_seconds(601)
    what = "in the backward of micro-batch 4 for rank 1's gradient"
    assert rank.said[0] == f"step 3: {WAITS} 60 s {what}"
    assert rank.said[-1] == f"step 3: {WAITS} 540 s {what}; the advice", (
        "before the watchdog, which acts at 600 s"
    )
    assert len(rank.said) == 5


def test_a_card_that_has_done_all_leaves_the_host_to_be_named(grid: Grid) -> None:
    card = Card()
    rank = Watched(grid, card=card)
    with observed_by(rank.watch), during(Activity("training_step", number=3)):
        with during(GRADIENT):
            pass
        card.done = 1
        with during(Activity("collective", what="the all-reduce of loss", ranks=(0, 1, 2))):
            rank.pass_seconds(61)
    assert rank.said == [f"step 3: {WAITS} 60 s in the all-reduce of loss for ranks 1, 2"]


def test_a_groups_broadcast_does_not_hide_the_message_before_it(grid: Grid) -> None:
    """On a card, the first of a group enqueues the message and the group's broadcast without waiting."""
    card = Card()
    wait = Activity("wait", Step("receive_gradient", 0, 1))
    for rank_number, whom in (
        (2, "rank 4's gradient"),
        (3, "rank 2, which receives rank 4's gradient for the tensor-parallel group"),
    ):
        rank = Watched(grid, rank_number, card=card)
        with observed_by(rank.watch):
            with during(wait), during(Activity("collective", what="the broadcast", ranks=(2, 3))):
                pass
            rank.pass_seconds(61)
        (said,) = rank.said
        assert said.endswith(f"has waited 60 s in the backward of micro-batch 1 for {whom}")


@pytest.mark.parametrize(
    ("rank", "activity", "text"),
    [
        (0, Activity("compute", BACKWARD), "has been 60 s in the backward of micro-batch 4 on stage 0"),
        # Of a wide stage, with those that compute with it.
        (2, Activity("compute", BACKWARD), "in the backward of micro-batch 4 on stage 0, with rank 3"),
        (
            0,
            Activity("load", Step("forward", 0, 2)),
            "has been 60 s in reading data for the forward of micro-batch 2 on stage 0",
        ),
        (
            0,
            Activity("send", Step("send_activation", 0, 2)),
            "has been 60 s in the send activation of micro-batch 2 on stage 0",
        ),
        (0, Activity("drain"), "has waited 60 s until its last messages are received"),
        (0, Activity("optimizer"), "has been 60 s in the optimizer step"),
        (
            0,
            Activity("collective", what="a sum", ranks=tuple(range(20))),
            "waited 60 s in a sum for 19 other ranks",
        ),
    ],
)
def test_every_activity_has_words(grid: Grid, rank: int, activity: Activity, text: str) -> None:
    watched = Watched(grid, rank)
    with observed_by(watched.watch), during(activity):
        watched.pass_seconds(61)
    (said,) = watched.said
    assert said.endswith(text)


def test_an_activity_that_fails_does_not_end(grid: Grid) -> None:
    card = Card()
    rank = Watched(grid, card=card)
    with observed_by(rank.watch), pytest.raises(RuntimeError), during(GRADIENT):
        raise RuntimeError("the link is down")
    assert card.enqueued == 0


def test_the_watch_asks_the_card_of_its_rank(grid: Grid) -> None:
    """A thread that has not chosen its card makes a context on the first one, whichever the rank uses."""
    asked = threading.Event()

    class Asked(FakeCard):
        def check_thread(self, what: str) -> None:
            super().check_thread(what)
            if what == "a query":
                asked.set()

    card = Asked()
    with watching(grid, grid.coords[0], card, timeout_seconds=0.5, last_good=lambda: ""):
        with during(Activity("optimizer")):
            pass
        assert asked.wait(60)
    assert card.faults == []
