"""The ranks of one node: forked, each a process; waited for, ended, and blamed.

They are forked from a launcher that has imported what they run, so they start in milliseconds instead of
seconds. What forks never touches a card: CUDA does not work in a process whose parent has used it. Beside an
agent a nursery forks launchers in turn.

The launcher tells the other nodes what its ranks have not come to tell them by themselves (`NodeFaults`).
Before its ranks have met the others, nobody notices that one is missing: a typo in a node's run file, or a
rank that is killed while it imports torch, would leave the others waiting for `train.startup_timeout`.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import math
import multiprocessing
import os
import runpy
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from typing import IO

from yuan_train.config.errors import CAUSE, INTERRUPTED, TrainingError, YuanError, hearing, say
from yuan_train.config.plan import Node
from yuan_train.parallel.environment import (
    THREADS,
    TOLD,
    count_cores,
    end_with_parent,
    has_told,
    is_host_name,
    is_this_machine,
    network_defaults,
    rank_defaults,
    running_seconds,
    set_rank_defaults,
)

# --- forks --------------------------------------------------------------------------------------------------


_HEARD = (signal.SIGTERM, signal.SIGINT)


def import_modules(names: Sequence[str], variables: Mapping[str, str]) -> None:
    """Import what forked processes need, where that can be done, with these variables set. No thread starts:
    a forked process has none of its parent's, but their locks."""
    before = dict(os.environ)
    # numpy's OpenBLAS else starts its threads at once.
    os.environ.update({"OPENBLAS_NUM_THREADS": "1", **variables})
    for name in names:
        # Torch's compiler asks for a folder of files (TORCHINDUCTOR_CACHE_DIR), which not every run needs.
        # Whoever is told of the end by way of a torch that is half imported may crash.
        with suppress(ModuleNotFoundError, OSError), _deaf():
            importlib.import_module(name)
    _set_environment(before)
    # One that collects garbage would look through all of it, and so copy each page.
    gc.collect()
    gc.freeze()


@contextmanager
def _deaf() -> Iterator[None]:
    """Inside, SIGTERM and Ctrl-C wait."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


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
    with _deaf():
        process.start()
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


# --- ranks --------------------------------------------------------------------------------------------------


GRACE_SECONDS = 8.0
"""How long the other ranks may take to notice that one has failed, and to say so, before they are killed."""

STOPPED_SECONDS = 2.0
"""How much longer than its time-out a rank may be stopped: until then the others may say that it is."""

TERMINAL_SECONDS = 1.0
"""In which a rank that a terminal's Ctrl-C has reached takes no notice of a second one any more."""

_TRAINING = (
    *("torch._dynamo", "torch.distributed.checkpoint._fsspec_filesystem"),
    *("yuan_train.cli.train", "yuan_train.train.build", "yuan_train.train.run"),
)
_ROLES = ("yuan_train.cli.rl", "yuan_train.rl.apart", "yuan_train.rl.loop", "yuan_train.rl.roles")
RANK_MODULES = {"train": _TRAINING, "rl": (*_TRAINING, *_ROLES)}
"""What the ranks of a command import, also late, which takes seconds; by name: not every process does it."""

_SIGNALS = tuple(-number for number in signal.valid_signals())
"""Exit codes of a process that a signal has ended."""
_OWN_CODES = (0, 1, 2, 3, INTERRUPTED)
"""Exit codes with which a rank has said why."""


@dataclass
class _Child:
    """The process of a rank."""

    rank: int
    process: BaseProcess
    output: IO[bytes] | None
    """Its captured output; None if it writes to this process's streams."""
    stopped_at: float | None = None
    """Since when it is seen stopped by a signal; None: it runs."""

    @property
    def code(self) -> int:
        """With which it has ended; negative: the signal that has ended it."""
        return self.process.exitcode or 0


def start_ranks(
    node: Node,
    command: Sequence[str],
    *,
    world_size: int,
    address: tuple[str, int],
    speaker: int = 0,
    spare: Sequence[int] = (),
    timeout_seconds: float = math.inf,
) -> int:
    """Run the ranks of a node until they exit; returns 0, or the exit code of the rank at fault.

    Each rank runs `yuan-train COMMAND`, forked from this process, which imports for all of them.
    The rank `speaker`, or on another node the first, writes to this process's streams. `address` is the
    rendezvous, host and port. The ranks get SIGTERM and SIGUSR1 that this process gets. A rank of `spare`
    that fails once its links stand leaves the others as they are. A rank that is stopped for longer than
    `timeout_seconds`, in which the others give it up, is killed: it would never hear of the end.

    Raises TrainingError if this process gets SIGTERM before it has started one.
    """
    children: list[_Child] = []
    faults = NodeFaults(node.name, node.ranks, world_size, address)

    def forward_signal(signum: int, frame: object) -> None:
        if not children:
            raise TrainingError(f"{node.name} was ended by {signal.Signals(signum).name} before it had ranks")
        for child in children:
            _send_signal(child, signum)

    told = tempfile.TemporaryDirectory(prefix="yuan-train-")
    heard = ExitStack()
    heard.enter_context(hearing({signal.SIGTERM: forward_signal}))
    try:
        import_modules(RANK_MODULES.get(command[0], ("torch",)), _own_defaults(node))
        for local_rank, rank in enumerate(node.ranks):
            environment = _environment(node, rank, local_rank, world_size, *address)
            environment[TOLD] = told.name
            speaks = rank == (speaker if speaker in node.ranks else node.ranks[0])
            children.append(_start_rank(command, rank, environment, inherits_output=speaks))
        # Only now: ranks are born deaf to it if this process is, until they can hear it.
        heard.enter_context(hearing({signal.SIGUSR1: forward_signal}))
        patience = timeout_seconds + STOPPED_SECONDS
        return _wait(
            children,
            lambda child: child.rank in spare and has_told(told.name, child.rank, "linked"),
            lambda child: has_told(told.name, child.rank, "tells") or _tell_end(child, faults),
            patience,
        )
    except KeyboardInterrupt:
        _interrupt(children)
        if not children or not all(has_told(told.name, child.rank, "tells") for child in children):
            faults.tell("interrupted (Ctrl-C)", INTERRUPTED)
        raise
    finally:
        _kill(children)
        told.cleanup()
        heard.close()
        for child in children:
            if child.output is not None:
                child.output.close()


def _environment(
    node: Node, rank: int, local_rank: int, world_size: int, host: str, port: int
) -> dict[str, str]:
    """The environment of a rank, with the variables that torchrun sets."""
    return {
        **os.environ,
        **_own_defaults(node),
        **(network_defaults(os.environ, host) if len(node.ranks) < world_size else {}),
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(len(node.ranks)),
        "MASTER_ADDR": host,
        "MASTER_PORT": str(port),
    }


def _own_defaults(node: Node) -> dict[str, str]:
    return rank_defaults(os.environ, local_ranks=len(node.ranks), num_cores=count_cores())


def _start_rank(
    command: Sequence[str], rank: int, environment: dict[str, str], *, inherits_output: bool
) -> _Child:
    """Start the process of a rank; unless it inherits our streams, its output goes to a temporary file."""
    output = None if inherits_output else tempfile.TemporaryFile()
    file = None if output is None else output.fileno()
    process = fork(command, environment, Output(stdout=file, stderr=file))
    return _Child(rank, process, output)


def _wait(
    children: list[_Child],
    is_spared: Callable[[_Child], bool],
    tell: Callable[[_Child], object],
    patience: float,
) -> int:
    """Wait for all ranks and return the exit code; `tell` has the other nodes hear of the first failure.

    After a failure the other ranks get a grace period and are then killed; the failure is printed last. One
    that is spared is printed at once, and the others go on; if they end well, so has the job.
    """
    deadline = None
    spared: list[_Child] = []
    runs = True
    while runs:
        # Once more when the last one has ended, which may be the first that fails.
        runs = any(child.process.exitcode is None for child in children)
        for child in children:
            _end_if_stopped(child, patience)
            if child not in spared and child.process.exitcode in (1, *_SIGNALS) and is_spared(child):
                spared.append(child)
                _report(child)
        ended = [child for child in children if child not in spared and child.process.exitcode]
        if deadline is None and ended:
            tell(ended[0])
            deadline = time.monotonic() + GRACE_SECONDS
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(0.05 if runs else 0.0)
    failed = [child for child in children if child.process.exitcode not in (None, 0)]
    others = [child for child in children if child not in spared]
    _kill(children)
    if not failed or (others and not any(child in failed for child in others)):
        return 0
    culprit = min(failed, key=_blame_order)
    _report(culprit)
    return max(culprit.code, 1)


def _end_if_stopped(child: _Child, patience: float) -> None:
    """Kill a rank that SIGSTOP or a like signal has stopped for more than `patience` seconds, and say so."""
    if not _is_stopped(child):
        child.stopped_at = None
    elif child.stopped_at is None:
        child.stopped_at = time.monotonic()
    elif time.monotonic() > child.stopped_at + patience:
        print(
            f"error: rank {child.rank} was stopped by a signal (SIGSTOP or like it) for longer than "
            "train.timeout, and is killed",
            file=sys.stderr,
        )
        child.process.kill()
        child.process.join()


def _is_stopped(child: _Child) -> bool:
    pid = child.process.pid
    if child.process.exitcode is not None or pid is None:
        return False
    try:
        return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        # It has ended just now.
        return False


def _blame_order(child: _Child) -> tuple[int, bool, int]:
    """Sort key: ranks with bad input first, then ranks that were killed; the others fail because of these,
    those last that say so."""
    code = child.code
    follows = any(line.startswith(f"error: {CAUSE}") for line in _captured(child))
    return (0 if code in (2, 3) else 1 if code < 0 else 2), follows, child.rank


def _tell_end(child: _Child, faults: NodeFaults) -> None:
    """Tell the other nodes the end of a rank that has not come to tell it by itself."""
    code, said = child.code, _captured(child)
    why = _why_ended(code) or (said[-1].removeprefix("error: ") if said else f"ended with exit code {code}")
    faults.tell("interrupted (Ctrl-C)" if code == INTERRUPTED else why, max(code, 1), rank=child.rank)


def _why_ended(code: int) -> str | None:
    """What has ended a rank, if it cannot have said so."""
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    if code not in _OWN_CODES:
        return f"was ended with exit code {code}, by something that has not said why"
    return None


def _report(child: _Child) -> None:
    """Print why a rank failed: the signal, and the end of its captured output."""
    why = _why_ended(child.code)
    if why is not None:
        print(f"error: rank {child.rank} {why}", file=sys.stderr)
    for line in _captured(child)[-30:]:
        print(f"rank {child.rank}: {line}", file=sys.stderr)


def _interrupt(children: list[_Child]) -> None:
    """Have the ranks end after Ctrl-C, and tell those on other nodes whose end it was; another one kills.

    A terminal has interrupted them too; those that do not end by that are asked here.
    """
    for seconds in (TERMINAL_SECONDS, GRACE_SECONDS):
        deadline = time.monotonic() + seconds
        while any(child.process.exitcode is None for child in children) and time.monotonic() < deadline:
            time.sleep(0.05)
        for child in children:
            if seconds == TERMINAL_SECONDS:
                _send_signal(child, signal.SIGINT)


def _send_signal(child: _Child, number: int) -> None:
    """Send a signal to a rank that still runs."""
    if child.process.exitcode is None and child.process.pid is not None:
        os.kill(child.process.pid, number)


def _captured(child: _Child) -> list[str]:
    """The lines of a rank's output, if it is captured."""
    if child.output is None:
        return []
    child.output.seek(0)
    return child.output.read().decode(errors="replace").splitlines()


def _kill(children: list[_Child]) -> None:
    """Kill the ranks that still run, and wait for all."""
    for child in children:
        if child.process.exitcode is None:
            child.process.kill()
        child.process.join()


FIND_SECONDS = 5.0
"""In which one who does not know whether it is the first node finds the store of another."""
TELL_SECONDS = 4.0
"""For which it waits for the others, who were started with it, and have as much to import."""
IMPORTS, MOST_SECONDS = 3.0, 30.0
"""And as often as this the time since this process has started, at most so long: most of it goes into the
import of torch, and as slow may that be there."""


@dataclass(frozen=True)
class NodeFaults:
    """The ranks of a run, as the launcher of one of its nodes knows them."""

    name: str | None
    """This node, by the plan; None: it is not known."""
    ranks: tuple[int, ...]
    """Those of this node; none: they are not known."""
    world_size: int
    """0: it is not known."""
    address: tuple[str, int]
    """Where the ranks meet."""

    def tell(self, text: str, exit_code: int, *, rank: int | None = None) -> None:
        """Tell the ranks of other nodes a fault of this one, or of a rank of it, if they come in time."""
        if len(self.ranks) == self.world_size > 0 or not is_host_name(self.address[0]):
            return
        # Torch holds the store, and speaks its language; where it cannot be imported, nobody can be told.
        set_rank_defaults()
        with suppress(ImportError, OSError):
            from yuan_train.parallel.board import Fault, Meeting
            from yuan_train.train.ending import tell_for_node

            slow = min(IMPORTS * running_seconds(), MOST_SECONDS)
            node = f"{self.name} on {socket.gethostname()}" if self.name else socket.gethostname()
            where = f"launch of {node}" if rank is None else f"rank {rank} ({node})"
            # Its ranks hear of nothing: they are not started, or are ended with it. This process does.
            silent = max(len(self.ranks) - 1, 0)
            for own in self.ranks[:1] or ((0,) if is_this_machine(self.address[0]) else (-1, 0)):
                meeting = Meeting(*self.address, own, self.world_size, "0", is_agents=False)
                fault = Fault(own if rank is None else rank, where, text, exit_code, silent)
                seconds = slow + (FIND_SECONDS if own < 0 else TELL_SECONDS)
                print(f"telling the other nodes, for at most {seconds:.0f} s", file=sys.stderr)
                if tell_for_node(meeting, fault, seconds):
                    return


@contextmanager
def telling_other_nodes(known: Callable[[], NodeFaults | None]) -> Iterator[None]:
    """Around what a launcher does before its ranks run: what it finds wrong is said, and told to the other
    nodes, which would wait for it. `known` says what is known of them then; None: there are none."""
    try:
        yield
    except YuanError as error:
        say(error)
        faults = known()
        if faults is not None:
            faults.tell(str(error), error.exit_code)
        raise
