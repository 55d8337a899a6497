"""Processes forked from one that has imported what they run, which start in milliseconds instead of seconds.

What forks never touches a card: CUDA does not work in a process whose parent has used it. A module of its
own because two fork: a launcher its ranks, and beside an agent the nursery its launchers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path

from yuan_train.config.errors import TrainingError
from yuan_train.parallel.environment import THREADS, end_with_parent, rank_defaults

_HEARD = (signal.SIGTERM, signal.SIGINT)


def import_modules(names: Sequence[str], variables: Mapping[str, str]) -> None:
    """Import what forked processes need, where it is installed, with these variables set. No thread starts:
    a forked process has none of its parent's, but their locks."""
    before = dict(os.environ)
    # numpy's OpenBLAS else starts its threads at once.
    os.environ.update({"OPENBLAS_NUM_THREADS": "1", **variables})
    for name in names:
        with suppress(ModuleNotFoundError):
            importlib.import_module(name)
    _set_environment(before)
    # One that collects garbage would look through all of it, and so copy each page.
    gc.collect()
    gc.freeze()


def _set_environment(variables: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(variables)


@dataclass(frozen=True)
class Output:
    """Where a forked process writes: open files, by number; None: where this one does."""

    stdout: int | None = None
    stderr: int | None = None


def fork(words: Sequence[str], environment: Mapping[str, str], output: Output) -> BaseProcess:
    """Start `yuan-train WORDS` with these variables: as a new interpreter would, but with all modules."""
    sys.stdout.flush()
    sys.stderr.flush()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=_run, args=(tuple(words), dict(environment), output, os.getpid()))
    # It shall not hear a signal before it has its own way to take it.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process


def _run(words: Sequence[str], environment: Mapping[str, str], output: Output, parent: int) -> None:
    """Be what `fork` has started: never returns."""
    for number in (*_HEARD, signal.SIGUSR1):
        # What was ignored stays so, as it does for a program that is started.
        if callable(signal.getsignal(number)):
            is_interrupt = number == signal.SIGINT
            signal.signal(number, signal.default_int_handler if is_interrupt else signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
    end_with_parent()
    if os.getppid() != parent:
        sys.exit(1)
    _take_over(output)
    line = [sys.executable, "-m", "yuan_train", *words]
    own = {name: value for name, value in environment.items() if os.environ.get(name) != value}
    # What is its own comes first, for there may be no room for all.
    _set_environment(environment)
    _show_as(line, own | dict(environment))
    threads = environment.get(THREADS, "").partition(",")[0]
    if threads.isdigit() and int(threads) and "torch" in sys.modules:
        # The libraries have read the variable when they were loaded, which was before it was set.
        importlib.import_module("torch").set_num_threads(int(threads))
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    sys.argv = line[2:]
    runpy.run_module("yuan_train", run_name="__main__")


def _take_over(output: Output) -> None:
    """Read nothing, write to `output`, and leave all other files to the process that this is forked from."""
    empty = os.open(os.devnull, os.O_RDONLY)
    for file, own in ((empty, 0), (output.stdout, 1), (output.stderr, 2)):
        if file is not None:
            os.dup2(file, own)
    # One by one: of a container there may be a thousand million numbers, which old kernels close in turn.
    for number in map(int, os.listdir("/dev/fd")):
        if number > 2:
            with suppress(OSError):
                os.close(number)
    # The parent's may be other files, as under a test that reads what is printed.
    by_line = 1 if os.environ.get("PYTHONUNBUFFERED") else -1
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", by_line, closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    logging.getLogger().handlers.clear()


def _show_as(line: Sequence[str], environment: Mapping[str, str]) -> None:
    """Have `ps` and /proc show this process by its own words and variables, as far as they find room.

    A forked process shows what its parent was started with. Linux reads both out of its memory, where they
    are replaced (proc(5): arg_start to env_end of /proc/self/stat). Nothing reads them there any more.
    """
    with suppress(OSError, ValueError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end, variables, last = map(int, fields[45:49])
        pairs = [f"{name}={value}" for name, value in environment.items()]
        for at, size, words in ((start, end - start, line), (variables, last - variables, pairs)):
            text = b"".join(os.fsencode(word) + b"\0" for word in words)
            if at and size > 0:
                ctypes.memmove(at, text[: size - 1].ljust(size, b"\0"), size)


class Forked:
    """A process that a nursery has forked; of subprocess.Popen's methods those that are needed. Safe to be
    used by several threads."""

    def __init__(self, connection: Connection, pid: int) -> None:
        """`connection` gives the exit code."""
        self._connection, self.pid = connection, pid
        self._code: int | None = None
        self._lock = threading.RLock()

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        with self._lock:
            if self._code is None and self._connection.poll():
                self.wait()
            return self._code

    def wait(self) -> int:
        """Wait for the exit code; that of a kill, if the nursery is gone that would tell it."""
        with self._lock:
            if self._code is None:
                try:
                    self._code = self._connection.recv()
                except (EOFError, ConnectionError):
                    self._code = -signal.SIGKILL
                    with suppress(ProcessLookupError):
                        os.kill(self.pid, signal.SIGKILL)
            assert self._code is not None
            return self._code

    def send_signal(self, number: int) -> None:
        """Send a signal, if it still runs."""
        with self._lock:
            if self.poll() is None:
                os.kill(self.pid, number)


class Nursery:
    """A process that has this one's modules, and of which commands are forked, one after another.

    To be made before this process has threads. Where it is ended from outside, so is what it has forked.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        import_modules(modules, rank_defaults(os.environ, local_ranks=1, num_cores=1))
        self._connection, theirs = multiprocessing.Pipe()
        process = multiprocessing.get_context("fork").Process(target=_nurse, args=(theirs, self._connection))
        process.start()
        theirs.close()
        assert process.pid is not None
        self._process, self.pid = process, process.pid

    def fork(self, words: Sequence[str], environment: Mapping[str, str], stderr: int) -> Forked:
        """Start `yuan-train WORDS` with these variables; `stderr` is an open file for what it says.

        Raises TrainingError if the nursery is gone.
        """
        try:
            self._connection.send((tuple(words), dict(environment)))
            send_handle(self._connection, stderr, self.pid)
            return Forked(self._connection, self._connection.recv())
        except (EOFError, OSError):
            raise TrainingError("the process that starts this node's ranks is gone: killed?") from None

    def close(self) -> None:
        """End it; what it has forked hears of that as of the end of a parent."""
        self._connection.close()
        self._process.kill()
        self._process.join()


def _nurse(connection: Connection, others: Connection) -> None:
    """Be a nursery: fork what is asked for, and tell its number and its exit code, until nobody asks."""
    others.close()
    for number in _HEARD:
        # What is forked hears these too, and has to end in its own time.
        signal.signal(number, lambda *_: None)
    with suppress(EOFError, ConnectionError):
        while True:
            words, environment = connection.recv()
            stderr = recv_handle(connection)
            process = fork(words, environment, Output(stderr=stderr))
            os.close(stderr)
            connection.send(process.pid)
            if process.sentinel not in wait([connection, process.sentinel]):
                # Nobody reads the exit code any more: the other end is closed.
                break
            process.join()
            connection.send(process.exitcode)
    # Not by way of the interpreter's end, which would wait for what was forked.
    os._exit(0)
