"""Processes forked from one that has imported what they run, which start in milliseconds instead of seconds.

What forks never touches a card: CUDA does not work in a process whose parent has used it. A module of its
own because two fork: a launcher its ranks, and beside an agent the nursery its launchers.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from types import FrameType

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
    _set_environment(environment)
    _show_as(line, own | dict(environment))
    threads = environment.get(THREADS, "").partition(",")[0]
    if threads.isdigit() and "torch" in sys.modules:
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
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)


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
    """A process that a nursery has forked; of subprocess.Popen's methods those that are needed."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._code: int | None = None
        try:
            self.pid: int = connection.recv()
        except (EOFError, ConnectionError):
            raise TrainingError(
                "the process that starts this node's ranks has ended; it may have said why"
            ) from None

    def poll(self) -> int | None:
        """The exit code; None while it runs."""
        if self._code is None and self._connection.poll():
            self.wait()
        return self._code

    def wait(self) -> int:
        """Wait for the exit code; that of a kill, if the nursery is gone that would tell it."""
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
        if self.poll() is None:
            os.kill(self.pid, number)


class Nursery:
    """A process beside this one that has modules in memory, of which commands are forked, one after another.

    Where it has been ended, there is another one with the next command.
    """

    def __init__(self, modules: Sequence[str]) -> None:
        self._modules = tuple(modules)
        self._process, self._connection = self._start()

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def fork(self, words: Sequence[str], environment: Mapping[str, str], stderr: int) -> Forked:
        """Start `yuan-train WORDS` with these variables; it writes its errors to an open file of this
        process."""
        if self._process.poll() is not None:
            self.close()
            self._process, self._connection = self._start()
        self._connection.send((tuple(words), dict(environment)))
        send_handle(self._connection, stderr, self._process.pid)
        return Forked(self._connection)

    def close(self) -> None:
        """End it; what it has forked hears of that as of the end of a parent."""
        self._connection.close()
        self._process.kill()
        self._process.wait()

    def _start(self) -> tuple[subprocess.Popen[bytes], Connection]:
        ours, theirs = multiprocessing.Pipe()
        file = theirs.fileno()
        line = [sys.executable, "-m", __name__, str(file), *self._modules]
        process = subprocess.Popen(line, stdin=subprocess.DEVNULL, pass_fds=[file])
        theirs.close()
        return process, ours


def _serve(connection: Connection) -> None:
    """Be a nursery: fork what is asked for, and tell its number and its exit code, until nobody asks."""
    while True:
        words, environment = connection.recv()
        stderr = recv_handle(connection)
        process = fork(words, environment, Output(stderr=stderr))
        os.close(stderr)
        connection.send(process.pid)
        if process.sentinel not in wait([connection, process.sentinel]):
            # This end of the connection is closed, so there is nobody any more who would read the exit code.
            return
        process.join()
        connection.send(process.exitcode)


def _take_no_notice(number: int, frame: FrameType | None) -> None:
    """What is forked hears the signal too, and has to end in its own time."""


if __name__ == "__main__":
    for heard in _HEARD:
        signal.signal(heard, _take_no_notice)
    import_modules(sys.argv[2:], rank_defaults(os.environ, local_ranks=1, num_cores=1))
    with suppress(EOFError, ConnectionError):
        _serve(Connection(int(sys.argv[1])))
    # Not by way of the interpreter's end, which would wait for what was forked.
    os._exit(0)
