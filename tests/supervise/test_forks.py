"""Processes that are forked: as a new interpreter's, but for what they have in memory."""

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import IO

import pytest

from tests.support.spawn import spawn
from yuan_train.config.errors import TrainingError, hearing
from yuan_train.config.plan import Node
from yuan_train.supervise import launched
from yuan_train.supervise.launched import RANK_MODULES, Forked, NodeFaults, Nursery, telling_other_nodes

LOOK = """
import json, os, runpy, signal, sys
from pathlib import Path

import torch

from yuan_train.supervise import launched

SIGNALS = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1

def ask(*_):
    raise AssertionError("asked for a card before the fork")

def look(*_, **__):
    import torch
    proc = Path("/proc/self")
    words, variables = ((proc / name).read_text().split(chr(0)) for name in ("cmdline", "environ"))
    print(json.dumps({
        "words": words, "argv": sys.argv, "shown": variables, "has": sorted(os.environ),
        "files": sorted(os.listdir(proc / "fd")), "threads": torch.get_num_threads(),
        "signals": [str(signal.getsignal(number)) for number in SIGNALS],
        "blocked": len(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    }), flush=True)
    sys.exit(7)

before = dict(os.environ)
torch.cuda.is_available = torch.cuda.device_count = ask
launched.import_modules(MODULES, {"OMP_NUM_THREADS": "1"})
assert dict(os.environ) == before
assert len(os.listdir("/proc/self/task")) == 1, "a thread was started before the fork"
runpy.run_module = look
signal.signal(signal.SIGTERM, lambda *_: None)
signal.signal(signal.SIGUSR1, signal.SIG_IGN)
held = open(os.devnull)
environment = {**before, "OMP_NUM_THREADS": "3", "LOCAL_RANK": "1", "RANK": "5"}
environment.pop("GONE")
process = launched.fork(["train", "--config", "a.yaml"], environment, launched.Output())
process.join()
sys.exit(process.exitcode)
"""


def test_a_forked_rank_is_as_one_that_was_started() -> None:
    """Its words, variables, signals, files and threads are its own; nobody has asked for a card before."""
    assert {*RANK_MODULES["train"]} < {*RANK_MODULES["rl"]}
    text = LOOK.replace("MODULES", repr(RANK_MODULES["rl"]))
    environment = {**os.environ, "GONE": "x" * 200}
    ran = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=environment)
    assert ran.returncode == 7, ran.stderr
    found = json.loads(ran.stdout)
    line = ["-m", "yuan_train", "train", "--config", "a.yaml"]
    # There is as much room as this command line has.
    assert found["words"][1 : 1 + len(line)] == line and found["argv"] == line[1:]
    assert found["shown"][:3] == ["OMP_NUM_THREADS=3", "LOCAL_RANK=1", "RANK=5"]
    assert not any(variable.startswith("GONE=") for variable in found["shown"])
    assert set(found["has"]) == {*environment, "OMP_NUM_THREADS", "LOCAL_RANK", "RANK"} - {"GONE"}
    assert found["threads"] == 3 and found["blocked"] == 0
    assert found["signals"][0] == str(signal.SIG_DFL) and found["signals"][2] == str(signal.SIG_IGN)
    assert "default_int_handler" in found["signals"][1]
    # And the folder that is listed.
    assert found["files"] == ["0", "1", "2", "3"]


def test_what_ranks_import_is_there() -> None:
    for name in RANK_MODULES["rl"]:
        importlib.import_module(name)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_ends_a_launcher_that_imports_is_heard(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """There is no rank yet that could hear it; the other nodes, whose ranks would wait, are told."""
    told: list[str] = []
    monkeypatch.setattr(NodeFaults, "tell", lambda _, text, *__, **___: told.append(text))
    monkeypatch.setattr(launched, "import_modules", lambda *_: os.kill(os.getpid(), number))
    monkeypatch.setattr(launched, "fork", None)
    faults = NodeFaults("b", (1,), 2, ("127.0.0.1", 1))
    with pytest.raises((TrainingError, KeyboardInterrupt)), telling_other_nodes(lambda: faults):
        launched.start_ranks(Node("b", (1,)), ["train"], world_size=2, address=faults.address)
    (text,) = told
    assert text.startswith("interrupted" if number == signal.SIGINT else "b was ended by SIGTERM before")
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_who_ends_an_import_is_heard_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch crashes where its import is broken off, and is begun again to tell the other nodes."""
    (tmp_path / "halves.py").write_text(
        "import signal, threading\nsignal.pthread_kill(threading.get_ident(), 15)\nis_whole = True\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    heard: list[bool] = []
    with hearing({signal.SIGTERM: lambda *_: heard.append(hasattr(sys.modules["halves"], "is_whole"))}):
        launched.import_modules(["halves"], {})
    assert heard == [True]


# --- nurseries, each beside a process without threads ----------------------------------------------------


def start(nursery: Nursery, *words: str) -> tuple[Forked, IO[str]]:
    read_end, write_end = os.pipe()
    process = nursery.fork(words, os.environ, write_end)
    os.close(write_end)
    return process, os.fdopen(read_end)


def start_waiting(nursery: Nursery, folder: Path) -> tuple[Forked, IO[str]]:
    """A command that waits for its run file for ever."""
    os.mkfifo(folder / "waits.yaml")
    process, said = start(nursery, "train", "--config", str(folder / "waits.yaml"))
    assert process.poll() is None
    return process, said


def ends_as_a_command(nursery: Nursery) -> None:
    process, said = start(nursery, "train", "--config", "nowhere.yaml")
    with said:
        assert "nowhere.yaml" in said.read()
    assert process.wait() == process.poll() == 2
    # Too late, and no harm.
    process.send_signal(signal.SIGKILL)


def is_gone(rank: int, folder: Path) -> None:
    """What came of it is not left behind."""
    with closing(Nursery(["yuan_train.cli.train"])) as nursery:
        process, said = start_waiting(nursery, folder)
        os.kill(nursery.pid, signal.SIGKILL)
        assert process.wait() < 0
        with said:
            # Until the last that could write to it is gone.
            assert said.read() == ""
        with pytest.raises(TrainingError, match="is gone"):
            start(nursery, "train", "--config", "nowhere.yaml")


def hears_signals(rank: int, folder: Path) -> None:
    """Of a terminal, or of who ends a whole group: the command ends as it likes, and its end is told."""
    with closing(Nursery(["yuan_train.cli.train"])) as nursery:
        process, said = start_waiting(nursery, folder)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(nursery.pid, number)
        process.send_signal(signal.SIGTERM)
        with said:
            assert said.read() == ""
        assert process.wait() == -signal.SIGTERM
        ends_as_a_command(nursery)


def is_closed(rank: int, folder: Path) -> None:
    """With what it has forked, which gets SIGTERM as if its parent had been killed."""
    with closing(Nursery(["yuan_train.cli.train"])) as nursery:
        _, said = start_waiting(nursery, folder)
    with said:
        assert said.read() == ""


@pytest.mark.parametrize("body", [is_gone, hears_signals, is_closed])
def test_a_nursery(body: Callable[..., None], tmp_path: Path) -> None:
    spawn(body, 1, tmp_path)
