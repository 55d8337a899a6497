"""What the executor counts as compute, and the pace of simulated cards. Its steps: see test_streams.py."""

import random
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import pytest
import torch

from tests.support.fake_card import FakeCard
from yuan_train.config.devices import Simulated
from yuan_train.parallel.device import CPU, begin_copy, make_link
from yuan_train.parallel.executor import WARM_UP_PIECES, Executor, Stopwatch
from yuan_train.schedule.schedules import forward_only, make_schedule
from yuan_train.schedule.step import one_worker_each


class Scale:
    """The only stage, which multiplies by a weight and sums to a loss."""

    weight = torch.ones((), dtype=torch.float64, requires_grad=True)

    def load(self, micro_batch: int) -> None:
        pass

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        return (torch.ones((1, 1, 2), dtype=torch.float64) * self.weight).sum()

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[None]:
        assert not split
        return nullcontext()

    def backward_weight(self, micro_batch: int) -> None:
        raise AssertionError


class Clock:
    """Stands in for the `time` module; time passes only in `work` and `sleep`."""

    def __init__(self) -> None:
        self.now = self.worked = 0.0

    def perf_counter(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.worked

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def work(self, *, processor: float, waiting: float = 0.0) -> None:
        self.worked += processor
        self.now += processor + waiting


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr("yuan_train.parallel.executor.time", found)
    return found


def test_a_simulated_card_sleeps_to_its_slowdown(clock: Clock) -> None:
    watch = Stopwatch(CPU, simulated=Simulated(4.0))
    with watch.running():
        clock.work(processor=1.0, waiting=0.5)
    assert watch.read() == 4.0
    # If other processes have delayed the work for longer than that, no sleep is added.
    with watch.running():
        clock.work(processor=1.0, waiting=9.0)
    assert watch.read() == 10.0 and watch.read() == 0.0
    # What a piece of work starts half-way starts when a card of that speed would have come so far.
    watch.catch_up()
    began = clock.now
    with watch.running():
        clock.work(processor=1.0)
        watch.catch_up()
        assert clock.now - began == 4.0
        clock.work(processor=1.0)
    assert watch.read() == 8.0


def test_a_simulated_card_keeps_the_pace_of_its_first_pieces(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    watch = Stopwatch(CPU, simulated=Simulated(4.0))

    def piece(processor: float, *kind: str, waiting: float = 0.0, half: str = "") -> float:
        with watch.running(*kind):
            clock.work(processor=processor / 2)
            watch.catch_up()
            with watch.paused():
                clock.work(processor=7.0)
            clock.work(processor=processor / 2, waiting=waiting)
            if half:
                watch.is_of(half)
        return watch.read()

    # Cold first, then 1 or 3 s; a piece whose median is another is of another kind.
    first = [9.0, *[1.0, 3.0, 2.0] * ((WARM_UP_PIECES - 1) // 3)]
    assert [piece(used, "forward") for used in first] == [4 * used for used in first]
    assert [piece(used, "forward", half="long") for used in first] == [4 * used for used in first]
    assert [piece(used, "forward") for used in (0.5, 2.0, 3.0)] == [8.0] * 3
    assert piece(0.5, "backward") == 2.0 and piece(0.5) == 2.0
    watch.tell_overruns()
    assert not capsys.readouterr().err
    # What takes longer by itself lasts as long as it takes, and is told of.
    assert piece(1.0, "forward", waiting=11.0) == 13.5 and piece(1.0, "forward", waiting=4.0) == 8.0
    watch.tell_overruns()
    told = capsys.readouterr().err
    assert "note: of 2 pieces" in told and " 1 took longer than its pace, by 5.500 s in all" in told
    # The pace of pieces of no kind is never known; that of a card that says it is, from the first on.
    assert [piece(1.0) for _ in range(WARM_UP_PIECES + 1)] == [4.0] * (WARM_UP_PIECES + 1)
    watch = Stopwatch(CPU, simulated=Simulated(1.0, piece_seconds=3.0))
    assert [piece(used) for used in (0.5, 1.0, 5.0)] == [3.0, 3.0, 5.0]


def test_a_frozen_piece_of_work_starts_things_half_way(clock: Clock) -> None:
    watch = Stopwatch(CPU, simulated=Simulated(4.0))
    found: list[tuple[float, float]] = []
    for processor in (*[1.0] * WARM_UP_PIECES, 0.5, 1.25, 2.5):
        began = clock.now
        with watch.running("backward"):
            clock.work(processor=processor / 2)
            watch.catch_up()
            half = clock.now - began
            clock.work(processor=processor / 2)
        found.append((half, clock.now - began))
    # As far as the processor says, and no later than the end of it.
    assert found == [(2.0, 4.0)] * WARM_UP_PIECES + [(1.0, 4.0), (2.5, 4.0), (4.0, 5.25)]


def test_forwards_and_backwards_have_paces_of_their_own(clock: Clock) -> None:
    draw = random.Random(0)

    class Timed(Scale):
        def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
            clock.work(processor=draw.choice((1.0, 1.0, 1.0, 2.0)))
            return super().forward(micro_batch, hidden_BSH)

        @contextmanager
        def splitting(self, micro_batch: int, split: bool) -> Iterator[None]:
            clock.work(processor=3.0)
            yield

    watch = Stopwatch(CPU, simulated=Simulated(4.0))
    training = make_schedule("1f1b", workers=one_worker_each(1), num_micro_batches=WARM_UP_PIECES)[0]
    evaluation = forward_only(workers=one_worker_each(1), num_micro_batches=WARM_UP_PIECES)[0]
    executor = Executor({0: Timed()}, None, watch)
    found: list[float] = []
    for program in (training, training, evaluation, training, evaluation):
        executor.run(program)
        found.append(watch.read() / WARM_UP_PIECES)
    assert found[0] > found[1] == found[3] == 16.0
    assert found[2] > found[4] == 4.0


def test_reading_data_is_not_compute(clock: Clock) -> None:

    class Timed(Scale):
        def load(self, micro_batch: int) -> None:
            clock.work(processor=100.0)

        def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
            clock.work(processor=1.0)
            return super().forward(micro_batch, hidden_BSH)

    watch = Stopwatch(CPU)
    (program,) = forward_only(workers=one_worker_each(1), num_micro_batches=3)
    Executor({0: Timed()}, None, watch).run(program)
    assert watch.read() == 3.0


def test_on_a_card_the_waits_inside_a_piece_of_work_are_not_counted() -> None:
    card = FakeCard(bytes_per_second=1e3)
    watch, link = Stopwatch(card), make_link(card)
    target = torch.zeros(2000, dtype=torch.uint8)
    with watch.running():
        card.compute(1.0)
        coming = begin_copy(link, card.host_empty((2000,), torch.uint8), target)
        card.compute(0.5)
        with watch.paused():
            coming.wait()
        card.compute(0.25)
    # The copy takes two seconds, a half of one of which is hidden; the host has waited for nothing.
    assert card.compute_seconds == 3.25 and card.host_seconds == 0.0
    assert watch.read() == 1.75
    with watch.running():
        card.compute(0.125)
    assert watch.read() == 0.125
