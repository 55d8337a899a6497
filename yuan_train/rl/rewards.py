"""Scores of answers, made in processes of their own, and the rewards that follow from them."""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import IO, Any, Self

from yuan_train.config.errors import ConfigError
from yuan_train.config.rl import RewardConfig
from yuan_train.rl.tickets import Sample

START_SECONDS = 120.0
"""How long a process may take to load the functions: a file may import what takes long."""
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Scores:
    """Of the answers to one prompt: a number per `RewardConfig.labels` of each; or why there are none."""

    of_answers: tuple[tuple[float, ...], ...] = ()
    error: str | None = None


def reward_of(scores: Sequence[float], sample: Sample, config: RewardConfig, *, max_new_tokens: int) -> float:
    """The reward of an answer: the weighted sum, clipped; less the penalty of its length.

    Linear from 0 at `max_new_tokens - buffer` to `penalty` at `max_new_tokens`: DAPO, Yu et al. 2025
    (arXiv 2503.14476, eq. 13). With `truncated`, that is the reward of an answer that reached the limit.
    """
    if config.truncated is not None and sample.ended == "limit":
        return config.truncated
    total = sum(weight * score for weight, score in zip(config.weights, scores, strict=True))
    if config.clip is not None:
        total = min(max(total, config.clip[0]), config.clip[1])
    buffer = config.overlong.buffer
    over = len(sample.ids) - (max_new_tokens - buffer)
    return total - (config.overlong.penalty * over / buffer if buffer and over > 0 else 0.0)


@dataclass
class _Worker:
    """A process that scores, and the group that it is at."""

    process: subprocess.Popen[bytes]
    task: int | None = None
    deadline: float = 0.0
    unread: bytearray = field(default_factory=bytearray)
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout


class Scorers:
    """The processes that score; as a context manager, they end with it.

    A process whose functions take too long for a group is ended, and another takes its place.
    """

    def __init__(self, config: RewardConfig) -> None:
        """Start one process, which loads the functions. Raises ConfigError if it cannot."""
        self._config = config
        self._workers: list[_Worker] = []
        self._functions = json.dumps(
            [
                {"name": f.name, "python": f.python, "pattern": f.pattern, "label": f.label}
                for f in config.functions
            ]
        )

    def __enter__(self) -> Self:
        try:
            self._workers.append(self._start())
        except _Failed as error:
            raise ConfigError(f"reward.functions: {error}") from None
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for worker in self._workers:
            _end(worker)
        self._workers.clear()

    def score(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Scores]:
        """Score groups of answers, each given as the fields of `reward_worker.FIELDS`; in their order."""
        waiting = deque(range(len(groups)))
        found: dict[int, Scores] = {}
        while len(found) < len(groups):
            self._hand_out(waiting, groups, found)
            self._collect(found)
        return [found[number] for number in range(len(groups))]

    def _hand_out(
        self, waiting: deque[int], groups: Sequence[Sequence[Mapping[str, Any]]], found: dict[int, Scores]
    ) -> None:
        """Give each idle process a group; start processes while there is more to do than they are at."""
        while waiting:
            idle = next((w for w in self._workers if w.task is None), None)
            if idle is None:
                if len(self._workers) >= self._config.workers:
                    return
                try:
                    idle = self._start()
                except _Failed as error:
                    found[waiting.popleft()] = Scores(error=str(error))
                    continue
                self._workers.append(idle)
            idle.task = waiting.popleft()
            idle.deadline = time.monotonic() + self._config.timeout
            idle.unsent = memoryview(json.dumps(list(groups[idle.task])).encode() + b"\n")

    def _collect(self, found: dict[int, Scores]) -> None:
        """Wait until something is written, is read, or takes too long."""
        busy = [worker for worker in self._workers if worker.task is not None]
        if not busy:
            return
        with selectors.DefaultSelector() as selector:
            for worker in busy:
                selector.register(worker.output, selectors.EVENT_READ, worker)
                if worker.unsent:
                    selector.register(worker.input, selectors.EVENT_WRITE, worker)
            soonest = min(worker.deadline for worker in busy)
            ready = selector.select(max(0.0, soonest - time.monotonic()))
        for key, events in ready:
            worker: _Worker = key.data
            if worker.task is None:
                continue
            if events & selectors.EVENT_WRITE:
                self._write(worker, found)
            elif (line := self._read(worker, found)) is not None and worker.task is not None:
                found[worker.task] = _scores(line)
                worker.task = None
        for worker in busy:
            if worker.task is not None and time.monotonic() >= worker.deadline:
                self._give_up(worker, found, f"took longer than reward.timeout ({self._config.timeout:g} s)")

    def _write(self, worker: _Worker, found: dict[int, Scores]) -> None:
        try:
            sent = os.write(worker.input.fileno(), worker.unsent[:READ_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._give_up(worker, found, f"ended its process ({error})")
            return
        worker.unsent = worker.unsent[sent:]

    def _read(self, worker: _Worker, found: dict[int, Scores]) -> bytes | None:
        """A whole line of a process, if there is one now."""
        part = os.read(worker.output.fileno(), READ_BYTES)
        if not part:
            self._give_up(worker, found, f"ended its process (exit code {worker.process.wait()})")
            return None
        worker.unread += part
        line, newline, rest = bytes(worker.unread).partition(b"\n")
        if not newline:
            return None
        worker.unread = bytearray(rest)
        return line

    def _give_up(self, worker: _Worker, found: dict[int, Scores], why: str) -> None:
        assert worker.task is not None
        found[worker.task] = Scores(error=f"the reward functions: {why}")
        self._workers.remove(worker)
        _end(worker)

    def _start(self) -> _Worker:
        """A process that has loaded the functions. Raises _Failed."""
        process = subprocess.Popen(
            [sys.executable, "-m", "yuan_train.rl.reward_worker", self._functions],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        worker = _Worker(process)
        os.set_blocking(worker.input.fileno(), False)
        with selectors.DefaultSelector() as selector:
            selector.register(worker.output, selectors.EVENT_READ)
            if not selector.select(START_SECONDS):
                _end(worker)
                raise _Failed(f"were not loaded within {START_SECONDS:g} s")
        line = worker.output.readline()
        told: Any = json.loads(line) if line else {"error": f"ended with exit code {process.wait()}"}
        if "error" in told:
            _end(worker)
            raise _Failed(str(told["error"]))
        return worker


class _Failed(Exception):
    """A process did not load the functions."""


def _scores(line: bytes) -> Scores:
    told: Any = json.loads(line)
    if "error" in told:
        return Scores(error=str(told["error"]))
    return Scores(tuple(tuple(row) for row in told["scores"]))


def _end(worker: _Worker) -> None:
    """End a process, and what it has started."""
    try:
        os.killpg(worker.process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        if pipe is not None:
            try:
                pipe.close()
            except OSError:
                pass
