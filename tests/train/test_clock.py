"""The clock of the steps, on a device that works behind the host's back; and what a run charges to a step."""

from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.support.ranks import Case, run_alone
from yuan_train.parallel.device import CPU, CudaDevice, peak_footprint_bytes, peak_memory_bytes
from yuan_train.train import run, step
from yuan_train.train.trace import StepClock


class AsynchronousDevice:
    """A device that the host only enqueues to, as CUDA: a wait in a stream does not block the host."""

    def __init__(self) -> None:
        self.now = self.done_at = 0.0

    def host(self, seconds: float) -> None:
        self.now += seconds

    def enqueue(self, seconds: float) -> None:
        self.done_at = max(self.now, self.done_at) + seconds

    def synchronise(self) -> None:
        self.now = max(self.now, self.done_at)


def one_step(device: AsynchronousDevice) -> None:
    """0.5 s of host; on the device 2 s of forward and backward, read by the host, and 3 s of optimizer."""
    device.host(0.5)
    device.enqueue(2.0)
    device.synchronise()
    device.enqueue(3.0)


def test_the_tail_of_a_step_is_in_its_own_time() -> None:
    device = AsynchronousDevice()
    clock = StepClock(device.synchronise, now=lambda: device.now)
    laps: list[float] = []
    for _ in range(3):
        host_start = device.now
        one_step(device)
        assert device.now - host_start == 2.5, "negative control: the host's own clock misses the tail"
        laps.append(clock.lap())
        device.host(0.25)
    assert laps == [5.5, 5.75, 5.75]
    assert sum(laps) + 0.25 == device.now, "no second is lost"


def test_what_a_pause_enqueues_is_in_no_step() -> None:
    device = AsynchronousDevice()
    clock = StepClock(device.synchronise, now=lambda: device.now)
    one_step(device)
    with clock.paused():
        device.host(10.0)
        device.enqueue(100.0)
    device.host(1.0)
    assert clock.lap() == 6.5
    with clock.paused():
        device.enqueue(100.0)
    one_step(device)
    assert clock.lap() == 5.5


def test_no_step_is_charged_with_validation_or_saving(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Clock:
        """In place of `time`: a millisecond passes with each look at it."""

        now = 0.0

        def perf_counter(self) -> float:
            self.now += 1e-3
            return self.now

    clock = Clock()

    def long(module: ModuleType, name: str, result: object) -> None:
        def function(*arguments: object, **options: object) -> object:
            clock.now += 1000.0
            return result

        monkeypatch.setattr(module, name, function)

    monkeypatch.setattr(run, "device_clock", lambda device: StepClock(lambda: None, now=clock.perf_counter))
    long(step, "validation_loss", 1.0)
    long(run, "save_progress", None)
    changes = ("train.steps=6", "validation.every=2", f"checkpoint.directory={tmp_path / 'ck'}")
    lines = run_alone(Case(run_file, tmp_path / "log", None, (*changes, "checkpoint.every=3")))
    assert [line["validation_loss"] for line in lines] == [None, 1.0] * 3
    assert clock.now > 5000 and max(line["step_seconds"] for line in lines) < 1.0
    tokens = 8 * 24
    assert [line["tokens_per_second"] for line in lines] == [tokens / line["step_seconds"] for line in lines]


def test_the_footprint_of_a_card_is_counted_as_in_the_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    GIB = 1 << 30
    card = CudaDevice(0)
    for name, value in {
        "max_memory_allocated": 5 * GIB,
        "max_memory_reserved": 7 * GIB,
        "memory_reserved": 6 * GIB,
        "mem_get_info": (15 * GIB, 24 * GIB),
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda device, value=value: value)
    # 9 GiB of the card are taken, 6 of them by the allocator: 3 are context and communicators.
    assert peak_footprint_bytes(card) == 10 * GIB
    assert peak_memory_bytes(card) == 5 * GIB, "what the profiler takes differences of"
    assert peak_footprint_bytes(CPU) >= peak_memory_bytes(CPU) > 0
