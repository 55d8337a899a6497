"""The schedule table on devices: the second of its two interpreters (the first is `planner/simulator.py`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
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

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[object]:
        """Around a backward: if `split`, the weights' part is put off until `backward_weight`."""
        ...

    def backward_weight(self, micro_batch: int) -> None:
        """The weights' part of a backward that was split."""
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
    """Runs the lane of one worker.

    Outputs are kept by stage and micro-batch, never by position, from a forward to its backward; nothing else
    is, so memory follows the in-flight depth of the table and not the number of micro-batches.
    """

    def __init__(self, works: Mapping[int, StageWork], bridge: Bridge | None, stopwatch: Stopwatch) -> None:
        self._works = works
        self._bridge = bridge
        self._stopwatch = stopwatch
        self._kept: dict[tuple[int, int], tuple[torch.Tensor | None, torch.Tensor]] = {}
        self._handed: dict[Step, torch.Tensor] = {}
        """Activations and gradients on their way to a message, or to another stage of this worker."""

    @property
    def num_kept(self) -> int:
        """Outputs kept now."""
        return len(self._kept)

    def run(self, lane: Lane, taken: Callable[[Step], None] | None = None) -> None:
        """Take every step of the lane, and tell `taken` of each; gradients accumulate in the parameters.

        A lane without backwards (evaluation) keeps nothing.
        """
        for _ in self.steps(lane, taken):
            pass

    def steps(self, lane: Lane, taken: Callable[[Step], None] | None = None) -> Iterator[Step]:
        """Yield every step of the lane just before it is taken."""
        training = any(step.kind in ("backward", "backward_input") for step in lane)
        whole = frozenset(lane)
        for step in lane:
            yield step
            with torch.set_grad_enabled(training):
                self._take(step, whole, training=training)
            if taken is not None:
                taken(step)
        if self._bridge is not None:
            self._bridge.drain()
        assert not self._kept and not self._handed

    def _take(self, step: Step, lane: frozenset[Step], *, training: bool) -> None:
        if step.kind == "forward":
            self._forward(step, lane, training=training)
        elif step.kind in ("backward", "backward_input"):
            self._backward(step, lane)
        elif step.kind == "backward_weight":
            with self._stopwatch.running():
                self._works[step.stage].backward_weight(step.micro_batch)
        elif step.kind in ("receive_activation", "receive_gradient"):
            self._need_bridge().post(step)
        else:
            self._need_bridge().send(step, self._handed.pop(step))

    def _forward(self, step: Step, lane: frozenset[Step], *, training: bool) -> None:
        hidden_BSH = self._incoming(Step("receive_activation", step.stage, step.micro_batch), lane)
        if hidden_BSH is not None and training:
            hidden_BSH.requires_grad_()
        with self._stopwatch.running():
            output = self._works[step.stage].forward(step.micro_batch, hidden_BSH)
        if training:
            self._kept[step.stage, step.micro_batch] = (hidden_BSH, output)
        if output.dim() > 0:
            self._hand_on(Step("send_activation", step.stage, step.micro_batch), output, lane)

    def _backward(self, step: Step, lane: frozenset[Step]) -> None:
        gradient_BSH = self._incoming(Step("receive_gradient", step.stage, step.micro_batch), lane)
        hidden_BSH, output = self._kept.pop((step.stage, step.micro_batch))
        work = self._works[step.stage]
        with self._stopwatch.running(), work.splitting(step.micro_batch, step.kind == "backward_input"):
            torch.autograd.backward(output, gradient_BSH)
        if hidden_BSH is not None:
            assert hidden_BSH.grad is not None
            self._hand_on(Step("send_gradient", step.stage, step.micro_batch), hidden_BSH.grad, lane)

    def _incoming(self, arrival: Step, lane: frozenset[Step]) -> torch.Tensor | None:
        """A message, or what another stage of this worker left; None at the model's ends."""
        if arrival in lane:
            return self._need_bridge().take(arrival)
        return self._handed.pop(arrival, None)

    def _hand_on(self, departure: Step, tensor: torch.Tensor, lane: frozenset[Step]) -> None:
        """Lay a result where its send finds it, or, without one, the next stage of this worker."""
        if departure in lane:
            self._handed[departure] = tensor
            return
        onward = departure.kind == "send_activation"
        kind: Kind = "receive_activation" if onward else "receive_gradient"
        stage = departure.stage + (1 if onward else -1)
        self._handed[Step(kind, stage, departure.micro_batch)] = tensor.detach()

    def _need_bridge(self) -> Bridge:
        assert self._bridge is not None, "a table with messages needs a bridge"
        return self._bridge
