"""The schedule table on devices: the second of its two interpreters (the first is `planner/simulator.py`)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from yuan_train.parallel.bridge import Bridge
from yuan_train.schedule.step import Kind, Lane, Step


class StageWork(Protocol):
    """What a stage does with one micro-batch; the executor knows nothing else of the model."""

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        """The hidden state for the next stage [B, S, H], or on the last stage the loss (a scalar).

        `hidden_BSH` is what the stage before sent; None on the first stage.
        """
        ...


class Stopwatch:
    """Seconds that a device spends on compute.

    A simulated slow card (`slowdown`) waits after each piece of work, until the work has taken that many
    times the processor time it used.
    """

    def __init__(self, device: torch.device, *, slowdown: float = 1.0) -> None:
        self._cuda = device.type == "cuda"
        self._slowdown = slowdown
        self._seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def running(self) -> Iterator[None]:
        """Count what happens inside."""
        if self._cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            yield
            end.record()
            self._events.append((start, end))
            return
        began, worked = time.perf_counter(), time.thread_time()
        yield
        if self._slowdown > 1:
            due = began + self._slowdown * (time.thread_time() - worked)
            time.sleep(max(0.0, due - time.perf_counter()))
        self._seconds += time.perf_counter() - began

    def read(self) -> float:
        """Seconds since the last reading; waits for the device."""
        if self._events:
            torch.cuda.synchronize()
            self._seconds += sum(start.elapsed_time(end) for start, end in self._events) / 1e3
            self._events.clear()
        seconds, self._seconds = self._seconds, 0.0
        return seconds


class Executor:
    """Runs the lane of one rank.

    Outputs are kept by micro-batch, never by position, from a forward to its backward; nothing else is, so
    memory follows the in-flight depth of the table and not the number of micro-batches.
    """

    def __init__(self, work: StageWork, bridge: Bridge | None, stopwatch: Stopwatch) -> None:
        self._work = work
        self._bridge = bridge
        self._stopwatch = stopwatch
        self._kept: dict[int, tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._gradients: dict[int, torch.Tensor] = {}

    @property
    def num_kept(self) -> int:
        """Micro-batches whose output is kept now."""
        return len(self._kept)

    def run(self, lane: Lane) -> None:
        """Take every step of the lane; gradients accumulate in the parameters.

        A lane without backwards (evaluation) keeps nothing.
        """
        for _ in self.steps(lane):
            pass

    def steps(self, lane: Lane) -> Iterator[Step]:
        """Yield every step of the lane just before it is taken."""
        training = any(step.kind == "backward" for step in lane)
        kinds: set[Kind] = {step.kind for step in lane}
        for step in lane:
            yield step
            with torch.set_grad_enabled(training):
                self._take(step, kinds, training=training)
        if self._bridge is not None:
            self._bridge.drain()
        assert not self._kept and not self._gradients

    def _take(self, step: Step, kinds: set[Kind], *, training: bool) -> None:
        if step.kind == "forward":
            self._forward(step, receives="receive_activation" in kinds, keep=training)
        elif step.kind == "backward":
            self._backward(step, receives="receive_gradient" in kinds)
        elif step.kind in ("receive_activation", "receive_gradient"):
            self._need_bridge().post(step)
        elif step.kind == "send_activation":
            self._need_bridge().send(step, self._outgoing(step, kept=training))
        else:
            self._need_bridge().send(step, self._gradients.pop(step.micro_batch))

    def _forward(self, step: Step, *, receives: bool, keep: bool) -> None:
        hidden_BSH = None
        if receives:
            arrival = Step("receive_activation", step.stage, step.micro_batch)
            hidden_BSH = self._need_bridge().take(arrival).requires_grad_(keep)
        with self._stopwatch.running():
            output = self._work.forward(step.micro_batch, hidden_BSH)
        self._kept[step.micro_batch] = (hidden_BSH, output)
        if not keep and output.dim() == 0:
            del self._kept[step.micro_batch]

    def _outgoing(self, step: Step, *, kept: bool) -> torch.Tensor:
        return (self._kept[step.micro_batch] if kept else self._kept.pop(step.micro_batch))[1]

    def _backward(self, step: Step, *, receives: bool) -> None:
        gradient_BSH = None
        if receives:
            gradient_BSH = self._need_bridge().take(Step("receive_gradient", step.stage, step.micro_batch))
        hidden_BSH, output = self._kept.pop(step.micro_batch)
        with self._stopwatch.running():
            torch.autograd.backward(output, gradient_BSH)
        if hidden_BSH is not None:
            assert hidden_BSH.grad is not None
            self._gradients[step.micro_batch] = hidden_BSH.grad

    def _need_bridge(self) -> Bridge:
        assert self._bridge is not None, "a table with messages needs a bridge"
        return self._bridge
