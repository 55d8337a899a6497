"""Starts ranks and commands on this machine; ranks meet over gloo and the loopback interface.

They are forked from a server process that has imported torch and the trainer: one starts in milliseconds,
where a new interpreter takes seconds of imports, and finds nothing that another one has left behind.
"""

import importlib
import itertools
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp

TIMEOUT_SECONDS = 600
FIRST_PORT, PORTS_PER_WORKER = 12_000, 2_000
"""Below the ports that the system gives to connections: one of those could take a port before it is used."""
_ports = itertools.count()


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at the moment, and that no other worker of these tests takes."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for _ in range(PORTS_PER_WORKER):
        port = FIRST_PORT + worker % 10 * PORTS_PER_WORKER + (os.getpid() + next(_ports)) % PORTS_PER_WORKER
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                continue
    raise AssertionError("no free port")


def patience(seconds: float) -> float:
    """`seconds`, or more on a busy machine: as many times them as there are programs for each core."""
    return seconds * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))


def wait_until(is_so: Callable[[], bool], runs: Callable[[], bool] = lambda: True) -> None:
    """Wait until something is so, for two minutes at most (`patience`), while what brings it about runs."""
    end = time.monotonic() + patience(120)
    while not is_so():
        assert runs(), "it ended early"
        assert time.monotonic() < end, "it did not come true"
        time.sleep(0.02)


def wait_for_step(log: Path, step: int, runs: Callable[[], bool] = lambda: True) -> None:
    """Wait until a run has logged a step."""
    path = log / "metrics.jsonl"
    wait_until(lambda: path.exists() and path.read_text().count("\n") >= step, runs)


def spawn(body: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Run `body(rank, *arguments)` in `num_ranks` processes; raise the traceback of a rank that fails.

    `body` must be importable (a function of a module). It calls `as_rank` before it initialises
    torch.distributed. Fails after TIMEOUT_SECONDS, and kills what still runs.
    """
    start_server()
    context = mp.start_processes(
        _run_body, (dict(os.environ), body, arguments), num_ranks, join=False, start_method="forkserver"
    )
    assert context is not None
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"{num_ranks} ranks did not end within {TIMEOUT_SECONDS} s"
    finally:
        for process in context.processes:
            assert process is not None
            if process.is_alive():
                process.kill()
            process.join()


def start_server() -> ForkServerContext:
    """The context whose processes are forked from the server, which is started if it does not run yet."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    # The server finds modules through the environment alone; a rank gets this process's whole path.
    given = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    try:
        forkserver.ensure_running()
    finally:
        if given is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = given
    return context


def _run_body(rank: int, environment: dict[str, str], body: Callable[..., None], arguments: Any) -> None:
    """`body` in the environment that this process's parent has now, not when the server was started."""
    os.environ.clear()
    os.environ.update(environment)
    body(rank, *arguments)


Around = Callable[[], AbstractContextManager[object]]
"""A function of a module, whose context is around a command; to break something in it."""


@dataclass(frozen=True)
class Command:
    """A running `yuan-train` command, whose stderr goes to a file."""

    process: BaseProcess
    stderr: Path

    def wait(self, *, within_seconds: float) -> tuple[int, str]:
        """Exit code (negative: the signal that killed it) and stderr, once the command has ended; of seconds
        there are more on a busy machine (`patience`)."""
        self.process.join(patience(within_seconds))
        code = self.process.exitcode
        assert code is not None, f"still running after {within_seconds} s:\n{self.stderr.read_text()}"
        return code, self.stderr.read_text()

    def kill(self) -> None:
        """Kill the command if it still runs."""
        self.process.kill()
        self.process.join()


def start_command(
    words: Sequence[str | Path],
    stderr: Path,
    *,
    environment: Mapping[str, str],
    stdout: Path = Path(os.devnull),
    cwd: Path | None = None,
    constants: Mapping[str, float] | None = None,
    around: Around | None = None,
) -> Command:
    """Start `yuan-train WORDS` with these changes to the environment; `stderr` is the file it writes to.

    `constants` are other values of constants of the program, such as a shorter grace period, by dotted name.
    """
    changes = dict(constants or {}), around or nullcontext
    process = start_server().Process(
        target=_run_command,
        args=([*map(str, words)], (stdout, stderr), {**os.environ, **environment}, cwd, *changes),
    )
    process.start()
    return Command(process, stderr)


@contextmanager
def start_ranks(
    words: Sequence[str | Path],
    folder: Path,
    num_ranks: int,
    *,
    more: Mapping[int, Sequence[str]] | None = None,
    cwds: Sequence[Path] | None = None,
    constants: Mapping[str, float] | None = None,
    around: Mapping[int, Around] | None = None,
) -> Iterator[list[Command]]:
    """Every rank of `yuan-train WORDS`, without a launcher, as if on a node of its own; killed at the end.

    `folder` gets their stderr. `more`: further words of some ranks. `cwds`: the working directory of each.
    `around`: what is around the command of some ranks.
    """
    port = str(free_port())
    ranks: list[Command] = []
    try:
        for rank in range(num_ranks):
            environment = {
                **{"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(num_ranks)},
                **{"LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port},
                "OMP_NUM_THREADS": "1",
            }
            ranks.append(
                start_command(
                    [*words, *((more or {}).get(rank, ()))],
                    folder / f"stderr-{rank}",
                    environment=environment,
                    cwd=cwds[rank] if cwds else None,
                    constants=constants,
                    around=(around or {}).get(rank),
                )
            )
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()


def _run_command(
    words: list[str],
    outputs: tuple[Path, Path],
    environment: dict[str, str],
    cwd: Path | None,
    constants: dict[str, float],
    around: Around,
) -> None:
    import torch

    from yuan_train.cli.main import program

    torch.set_num_threads(1)
    # Else a command ignores Ctrl-C where these tests run in the background of a shell.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    for name, value in constants.items():
        module, _, constant = name.rpartition(".")
        assert hasattr(importlib.import_module(module), constant)
        setattr(importlib.import_module(module), constant, value)
    if cwd is not None:
        os.chdir(cwd)
    for number, path in enumerate(outputs, 1):
        # Both may be one file, in which neither shall write over the other.
        os.dup2(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND), number)
    with around():
        program(words)


def process_of(command: str) -> BaseProcess:
    """A process that runs a command of the shell."""
    process = multiprocessing.get_context("fork").Process(
        target=os.execvp, args=("sh", ["sh", "-c", command])
    )
    process.start()
    return process


def as_rank(rank: int, num_ranks: int, port: int) -> None:
    """Set the environment variables that a launcher would set, and one thread for torch."""
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
