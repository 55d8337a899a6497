"""Scores of answers, made in processes of their own, and the rewards that follow from them."""

from __future__ import annotations

import itertools
import json
import logging
import os
import queue
import selectors
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any, Self

from yuan_train.config.errors import ConfigError
from yuan_train.config.rl import RewardConfig
from yuan_train.data.prompts import text_of
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.rl.experience import Sample, Ticket

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
"""How long a process may take to load the functions: a file may import what takes long."""
READ_BYTES = 1 << 16


@dataclass(frozen=True)
class Scores:
    """Of the answers to one prompt: a number per `RewardConfig.labels` of each, None where a function says
    that an answer is not its own; or why there are none."""

    of_answers: tuple[tuple[float | None, ...], ...] = ()
    error: str | None = None


def reward_of(
    scores: Sequence[float | None], sample: Sample, config: RewardConfig, *, max_new_tokens: int
) -> float:
    """The reward of an answer: the weighted sum and what an environment gave, clipped; less the penalty of
    its length.

    Linear from 0 at `max_new_tokens - buffer` to `penalty` at `max_new_tokens`: DAPO, Yu et al. 2025
    (arXiv 2503.14476, eq. 13). With `truncated`, that is the reward of an answer that reached the limit.
    """
    if config.truncated is not None and sample.ended == "limit":
        return config.truncated
    pairs = zip(config.weights, scores, strict=True)
    total = sum(weight * score for weight, score in pairs if score is not None) + (sample.given or 0.0)
    if config.clip is not None:
        total = min(max(total, config.clip[0]), config.clip[1])
    buffer = config.overlong.buffer
    over = len(sample.ids) - (max_new_tokens - buffer)
    return total - (config.overlong.penalty * over / buffer if buffer and over > 0 else 0.0)


@dataclass(eq=False)
class Worker:
    """A process that loads what a run names, and then reads and writes lines."""

    process: subprocess.Popen[bytes]
    deadline: float
    """Of loading."""
    is_ready: bool = False
    """Whether it has said that all is loaded."""
    unread: bytearray = field(default_factory=bytearray)

    @classmethod
    def start(cls, module: str, order: str) -> Self:
        """Start a module with an order."""
        process = subprocess.Popen(
            [sys.executable, "-m", module, order],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        return cls(process, time.monotonic() + START_SECONDS)

    @property
    def input(self) -> IO[bytes]:
        assert self.process.stdin is not None
        return self.process.stdin

    @property
    def output(self) -> IO[bytes]:
        assert self.process.stdout is not None
        return self.process.stdout

    def read(self) -> list[bytes] | None:
        """The lines that are whole now; None if it has ended."""
        part = os.read(self.output.fileno(), READ_BYTES)
        *lines, rest = bytes(self.unread + part).split(b"\n")
        self.unread = bytearray(rest)
        return lines if part else None

    def end(self) -> None:
        """End the process, and what it has started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.process.wait()
        for pipe in (self.input, self.output):
            try:
                pipe.close()
            except OSError:
                pass


@dataclass(eq=False)
class _Scorer(Worker):
    """A process that scores, and the group that it is at; its deadline is then that of the group, and in the
    past while it waits for one."""

    task: int | None = None
    unsent: memoryview = field(default_factory=lambda: memoryview(b""))

    @property
    def is_idle(self) -> bool:
        """Whether it waits for a group."""
        return self.is_ready and self.task is None


class Scorers:
    """The processes that score; as a context manager, they end with it.

    A process whose functions take too long for a group is ended, and another takes its place. While one loads
    the functions, those that have them go on: how long a file's imports take costs no group its time.
    """

    def __init__(self, config: RewardConfig, columns: Sequence[str] = ()) -> None:
        """`columns`: what each prompt has beside `reward_worker.FIELDS`. Raises ConfigError, when entered, if
        a first process cannot load the functions."""
        self._config = config
        self._workers: list[_Scorer] = []
        self._did_not_load = False
        """Of this batch: whether a process could not load the functions, as the first one could."""
        functions = [
            {key: getattr(f, key) for key in ("name", "python", "url", "pattern", "label", "batch")}
            for f in config.functions
        ]
        order = {"functions": functions, "columns": list(columns), "concurrency": config.concurrency}
        self._order = json.dumps(order)

    def __enter__(self) -> Self:
        self._start()
        try:
            while not self._workers[0].is_ready:
                self._collect({})
        except _Failed as error:
            raise ConfigError(f"reward.functions: {error}") from None
        return self

    def __exit__(self, *failure: object) -> None:
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def score(self, groups: Sequence[Sequence[Mapping[str, Any]]]) -> list[Scores]:
        """Score groups of answers, each given as its fields (`answer_fields`); in their order.

        Raises OSError if no process can load the functions any more: no group is at fault.
        """
        waiting = deque(range(len(groups)))
        found: dict[int, Scores] = {}
        self._did_not_load = False
        try:
            while len(found) < len(groups):
                self._hand_out(waiting, groups)
                self._collect(found)
        except _Failed as error:
            raise OSError(str(error)) from None
        return [found[number] for number in range(len(groups))]

    def _hand_out(self, waiting: deque[int], groups: Sequence[Sequence[Mapping[str, Any]]]) -> None:
        """Give each idle process a group; start processes while more groups wait than load the functions."""
        for worker in [w for w in self._workers if w.is_idle and w.process.poll() is not None]:
            # Ended between two batches, by the system or by a thread of the functions.
            self._drop(worker)
        for worker in self._workers:
            if waiting and worker.is_idle:
                worker.task = waiting.popleft()
                # Its own time begins when it has the whole group.
                worker.deadline = time.monotonic() + START_SECONDS
                worker.unsent = memoryview(json.dumps(list(groups[worker.task])).encode() + b"\n")
        if self._did_not_load and self._workers:
            return
        loading = sum(not worker.is_ready for worker in self._workers)
        for _ in range(min(self._config.workers - len(self._workers), len(waiting) - loading)):
            self._start()

    def _collect(self, found: dict[int, Scores]) -> None:
        """Wait until something is written, is read, or takes too long. Raises _Failed."""
        busy = [worker for worker in self._workers if not worker.is_idle]
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
            worker: _Scorer = key.data
            if worker not in self._workers or worker.is_idle:
                continue
            if events & selectors.EVENT_WRITE:
                self._write(worker, found)
            elif (line := self._read(worker, found)) is None:
                continue
            elif worker.task is not None:
                found[worker.task] = _scores(line)
                worker.task = None
            else:
                self._see_ready(worker, line, found)
        for worker in busy:
            if worker not in self._workers or worker.is_idle or time.monotonic() < worker.deadline:
                continue
            if not worker.is_ready:
                self._give_up(worker, found, f"were not loaded within {START_SECONDS:g} s")
            elif worker.unsent:
                self._give_up(worker, found, f"did not read a group within {START_SECONDS:g} s")
            else:
                timeout = f"reward.timeout ({self._config.timeout:g} s)"
                self._give_up(worker, found, f"took longer than {timeout}")

    def _see_ready(self, worker: _Scorer, line: bytes, found: dict[int, Scores]) -> None:
        """Take the first line of a process."""
        told: Any = json.loads(line)
        if "error" in told:
            self._give_up(worker, found, str(told["error"]))
        else:
            worker.is_ready = True

    def _write(self, worker: _Scorer, found: dict[int, Scores]) -> None:
        try:
            sent = os.write(worker.input.fileno(), worker.unsent[:READ_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._give_up(worker, found, f"ended its process ({error})")
            return
        worker.unsent = worker.unsent[sent:]
        if not worker.unsent:
            worker.deadline = time.monotonic() + self._config.timeout

    def _read(self, worker: _Scorer, found: dict[int, Scores]) -> bytes | None:
        """A whole line of a process, if there is one now."""
        lines = worker.read()
        if lines is None:
            self._give_up(worker, found, f"ended its process (exit code {worker.process.wait()})")
        return lines[0] if lines else None

    def _give_up(self, worker: _Scorer, found: dict[int, Scores], why: str) -> None:
        """End a process; its group is lost. Without one, it has not loaded the functions: raises _Failed
        if it was the last."""
        self._drop(worker)
        if worker.task is not None:
            found[worker.task] = Scores(error=f"the reward functions: {why}")
            return
        self._did_not_load = True
        if not self._workers:
            raise _Failed(why)
        logger.warning("a process less scores, whose reward functions could not be loaded: %s", why)

    def _drop(self, worker: _Scorer) -> None:
        self._workers.remove(worker)
        worker.end()

    def _start(self) -> None:
        """Start a process, which begins to load the functions."""
        worker = _Scorer.start("yuan_train.rl.reward_worker", self._order)
        os.set_blocking(worker.input.fileno(), False)
        self._workers.append(worker)


class ScoringThread:
    """Scores groups beside the thread that gives them, as they come: some at a time, one for each process."""

    def __init__(self, scorers: Scorers, at_once: int) -> None:
        """As a context manager, it ends with it; what was not scored by then is dropped."""
        self._scorers = scorers
        self._at_once = at_once
        self._given: queue.SimpleQueue[_Given | None] = queue.SimpleQueue()
        self._ends = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._ends = True
        self._given.put(None)
        if kind is None:
            self._thread.join()

    def score(
        self, groups: Sequence[Sequence[Mapping[str, Any]]], then: Callable[[list[Scores] | str], None]
    ) -> None:
        """Have groups scored; `then` gets the scores in their order, in the other thread, or what is wrong
        if no process can load the functions any more."""
        self._given.put((groups, then))

    def _run(self) -> None:
        while not self._ends and (first := self._given.get()) is not None:
            given, count = [first], len(first[0])
            while count < self._at_once and not self._given.empty():
                if (more := self._given.get()) is None:
                    return
                given.append(more)
                count += len(more[0])
            groups = [group for own, _ in given for group in own]
            try:
                scores = self._scorers.score(groups)
            except OSError as error:
                for _, then in given:
                    then(f"the reward functions' processes cannot be used: {error}")
                continue
            for own, then in given:
                then(scores[: len(own)])
                scores = scores[len(own) :]


_Given = tuple[Sequence[Sequence[Mapping[str, Any]]], Callable[[list[Scores] | str], None]]


class _Failed(Exception):
    """A process did not load the functions."""


def _scores(line: bytes) -> Scores:
    told: Any = json.loads(line)
    if "error" in told:
        return Scores(error=str(told["error"]))
    return Scores(tuple(tuple(row) for row in told["scores"]))


def turns_of(sample: Sample, tokenizer: Tokenizer | None) -> list[str]:
    """The texts of an answer, the policy's and the environment's by turns, without what ends a turn."""
    drawn = set(sample.drawn)
    texts: list[str] = []
    for is_drawn, group in itertools.groupby(range(len(sample.ids)), key=drawn.__contains__):
        places = list(group)
        is_whole = places[-1] + 1 < len(sample.ids) or sample.ended == "stop"
        last = places[-1] if is_drawn and is_whole else places[-1] + 1
        texts.append(text_of(sample.ids[places[0] : last], tokenizer))
    return texts


def answer_fields(
    ticket: Ticket, samples: Sequence[Sample], tokenizer: Tokenizer | None
) -> list[Mapping[str, Any]]:
    """What reward functions get of each answer."""
    prompt = ticket.prompt
    assert prompt is not None
    return [
        {
            **prompt.columns,
            "prompt": prompt.text,
            "completion": text_of(sample.said, tokenizer),
            "answer": prompt.answer,
            "prompt_ids": prompt.ids,
            "completion_ids": sample.ids,
            "ended": sample.ended,
            "ticket": sample.ticket,
            "sample": sample.number,
            "turns": turns_of(sample, tokenizer),
        }
        for sample in samples
    ]
