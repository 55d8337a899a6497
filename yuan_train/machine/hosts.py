"""Machines by name: from an option, a hostfile or a Slurm job, and the command by which each is reached.

So are questions to them, over ssh or srun, and files to and from them. What a machine does there for another
one is here too: python -m yuan_train.machine.hosts run | look | receive.

`run COMMAND...` runs a command that another machine started. Its standard input is the rope to the starter:
words on it are what to do, and its end is the end of the starter or of the way to it, so that nothing is left
running where nobody sees it.

`look QUESTION` says what a starter of ranks must know of a machine, as JSON. The question is JSON: `folder`
to work in, `paths` of files and folders, `names` to resolve, `port` to try, and a file in a folder that may
be shared: to make (`mark`), to look for (`seen`), to `remove`.

`receive FOLDER` writes the files of a tar stream, each whole or not at all.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import os
import re
import selectors
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, TypeVar

from yuan_train import __version__
from yuan_train.config.errors import INTERRUPTED, ConfigError, end_with_parent, hearing

SSH_OPTIONS = ("BatchMode=yes", "ConnectTimeout=15", "ServerAliveInterval=10", "ServerAliveCountMax=3")
"""Of the program `ssh` and no other: it never asks, and notices within half a minute that a machine is gone.
They stand behind the words of the user, which count where both say something."""
SRUN = ("srun", "--overlap", "--nodes=1", "--ntasks=1")
WHOLE = ("--cpu-bind=none", "--kill-on-bad-exit=1", "--unbuffered")
"""Of a step that trains: all cores of the machine, and its output line by line."""
HOST_WORDS = "HOST [NODE] [slots=N]"
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]*[A-Za-z0-9_])?")
_USER = re.compile(r"[A-Za-z0-9_][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class RemoteHost:
    """A machine, and how a command is run there."""

    name: str
    """As it was given, USER@ included."""
    reach: tuple[str, ...]
    """The words before the command: of `ssh` and the name."""
    node: str | None = None
    """The node of the plan that it is, if that was said."""
    slots: int | None = None
    """Ranks that may run there, if that was said."""
    where: str = ""
    """What names it: a line of a hostfile, or an option."""
    has_shell: bool = True
    """Whether a shell there reads the command, as with ssh; srun takes its words as they are."""

    @property
    def address(self) -> str:
        """The name or address alone."""
        return self.name.rpartition("@")[2]

    def command(self, script: str) -> list[str]:
        """The words that run a line of shell there."""
        return [*self.reach, "sh", "-c", shlex.quote(script) if self.has_shell else script]


def ssh_words(ssh: str) -> tuple[str, ...]:
    """The words of `--ssh CMD`; `ssh` also gets what keeps it from asking and from waiting.

    Raises ConfigError if it is empty or its quotes do not match.
    """
    try:
        words = shlex.split(ssh)
    except ValueError as error:
        raise ConfigError(
            f"--ssh {ssh!r}: {error}; wanted a command, called as CMD HOST COMMAND..."
        ) from None
    if not words:
        raise ConfigError("--ssh is empty; wanted a command, called as CMD HOST COMMAND...")
    if words[0] != "ssh":
        return tuple(words)
    return (*words, *(word for option in SSH_OPTIONS for word in ("-o", option)))


def parse_hosts(text: str, ssh: str) -> list[RemoteHost]:
    """The hosts of `--hosts a,b,c`. Raises ConfigError with every name that is wrong."""
    lines = [(f"--hosts {text}", part.strip()) for part in text.split(",") if part.strip()]
    if not lines:
        raise ConfigError(f"--hosts {text!r}: wanted names of machines, such as a,b,c")
    return _parse(lines, ssh)


def read_hostfile(path: str | Path, ssh: str) -> list[RemoteHost]:
    """The hosts of a file: on each line HOST [NODE] [slots=N], from `#` on a comment.

    Raises ConfigError with every line that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: {why}; wanted a line for each machine: {HOST_WORDS}") from None
    lines = [(f"{path}:{i}", line.partition("#")[0].strip()) for i, line in enumerate(text.splitlines(), 1)]
    lines = [(where, line) for where, line in lines if line]
    if not lines:
        raise ConfigError(f"{path}: names no machine; wanted a line for each: {HOST_WORDS}")
    return _parse(lines, ssh)


def _parse(lines: Iterable[tuple[str, str]], ssh: str) -> list[RemoteHost]:
    reach, hosts, faults = ssh_words(ssh), list[RemoteHost](), list[str]()
    for where, line in lines:
        try:
            host = _parse_line(where, line.split(), reach)
        except ConfigError as error:
            faults.append(str(error))
            continue
        same = [one for one in hosts if host.address == one.address]
        nodes = [one for one in hosts if host.node is not None and host.node == one.node]
        if same:
            faults.append(f"{where}: {host.name}: named before, at {same[0].where}; wanted each machine once")
        elif nodes:
            faults.append(f"{where}: node {host.node} is {nodes[0].name} already, at {nodes[0].where}")
        hosts.append(host)
    if faults:
        raise ConfigError("\n".join(faults))
    return hosts


def _parse_line(where: str, words: Sequence[str], reach: Sequence[str]) -> RemoteHost:
    name = _check_name(where, words[0])
    host = RemoteHost(name=name, reach=(*reach, name), where=where)
    for word in words[1:]:
        key, equals, value = word.partition("=")
        if not equals and host.node is None and host.slots is None:
            host = replace(host, node=word)
        elif key == "slots" and host.slots is None:
            if not value.isdecimal() or int(value) == 0:
                raise ConfigError(f"{where}: {word}: wanted a number of ranks from 1 on, such as slots=4")
            host = replace(host, slots=int(value))
        else:
            again = " twice" if key == "slots" else ""
            raise ConfigError(f"{where}: {word!r}{again}: unknown word; wanted {HOST_WORDS}")
    return host


def _check_name(where: str, text: str) -> str:
    """USER@HOST as ssh takes it: an IPv6 address without brackets. Raises ConfigError."""
    user, at, host = text.rpartition("@")
    if at and not _USER.fullmatch(user):
        raise ConfigError(f"{where}: {text}: wanted USER@HOST, got the user {user!r}")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if ":" in bare or host != bare:
        try:
            ipaddress.IPv6Address(bare)
        except ValueError:
            front, _, count = host.partition(":")
            hint = f"; a number of ranks is written: {front} slots={count}" if count.isdecimal() else ""
            raise ConfigError(f"{where}: {text}: no name and no IPv6 address{hint}") from None
    elif not _NAME.fullmatch(bare):
        raise ConfigError(f"{where}: {text}: wanted a name or an address, such as node1 or 10.0.0.7")
    return f"{user}{at}{bare}"


def slurm_parts(environment: Mapping[str, str] = os.environ) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """The machines of the Slurm job around this process: of each component srun's option for it, and names.

    Raises ConfigError outside a job, or if scontrol does not tell them.
    """
    if "SLURM_JOB_ID" not in environment:
        raise ConfigError(
            "--slurm: this is no job of Slurm's (SLURM_JOB_ID is not set); wanted a call inside salloc or "
            "sbatch; `launch --slurm --print` prints a batch script for the plan"
        )
    parts = int(environment.get("SLURM_HET_SIZE", "0"))
    for part in range(parts) if parts else (None,):
        name = "SLURM_JOB_NODELIST" + ("" if part is None else f"_HET_GROUP_{part}")
        text, fault = run_tool("scontrol", "show", "hostnames", environment.get(name, ""))
        if fault is not None or not text.split():
            raise ConfigError(
                f"{name}: the job's machines are not known: {fault or 'it is empty'}; use --hosts"
            )
        yield () if part is None else (f"--het-group={part}",), text.split()


def slurm_hosts() -> list[RemoteHost]:
    """The machines of the Slurm job around this process, each reached by a step of srun."""
    return [
        RemoteHost(
            name=name, reach=(*SRUN, *WHOLE, *group, "-w", name), where="the Slurm job", has_shell=False
        )
        for group, names in slurm_parts()
        for name in names
    ]


T = TypeVar("T")

Facts = dict[str, Any]

LOOK_SECONDS = 120.0
"""In which a machine answers; prints of large files take a while."""


def ask_json(command: Sequence[str], seconds: float) -> Facts | str:
    """The object that a command prints as its last line that is one, or why there is none."""
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=seconds, check=False,
        )  # fmt: skip
    except OSError as error:
        return str(error)
    except subprocess.TimeoutExpired:
        return f"no answer within {seconds:g} s"
    # A login may print its greeting before.
    lines = [line for line in ran.stdout.splitlines() if line.startswith("{")]
    if ran.returncode == 0 and lines:
        try:
            return json.loads(lines[-1])
        except ValueError:
            return f"its answer is not JSON: {lines[-1][:200]}"
    said = [line.strip() for line in (ran.stderr or ran.stdout).splitlines() if line.strip()]
    return f"{said[-1] if said else 'it said nothing'} (exit code {ran.returncode})"


def look_at(hosts: Sequence[RemoteHost], question: Mapping[str, Any]) -> dict[str, Facts]:
    """What `look` finds on each host, by its address. Raises ConfigError unless all answer."""
    words = shlex.join([sys.executable, "-m", "yuan_train.machine.hosts", "look", json.dumps(question)])
    found = on_each(hosts, lambda host: ask_json(host.command(words), LOOK_SECONDS))
    lost = [f"{name}: {why}" for name, why in found.items() if isinstance(why, str)]
    if lost:
        raise ConfigError(
            f"no answer of {len(lost)} of {len(hosts)} machines, and nothing was started:\n"
            + "\n".join(lost)
            + f"\neach needs a login without a password and yuan-train at the path of here ({sys.executable})"
        )
    return {name: facts for name, facts in found.items() if not isinstance(facts, str)}


def on_each(hosts: Sequence[RemoteHost], call: Callable[[RemoteHost], T]) -> dict[str, T]:
    """What a call gives for each host, all at once, by address."""
    with ThreadPoolExecutor(max(1, len(hosts))) as pool:
        return dict(zip([host.address for host in hosts], pool.map(call, hosts), strict=True))


def send(host: RemoteHost, folder: Path, names: Sequence[str]) -> None:
    """Copy files to a host, under the names that they have here. Raises ConfigError unless all arrive."""
    script = shlex.join([sys.executable, "-m", "yuan_train.machine.hosts", "receive", str(folder)])
    with subprocess.Popen(
        host.command(script), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdin is not None
        with suppress(BrokenPipeError), tarfile.open(fileobj=process.stdin, mode="w|") as archive:
            for name in names:
                with open(name, "rb") as file:
                    member = archive.gettarinfo(arcname=name, fileobj=file)
                    # tarfile takes the slash from absolute names; the other end wants them as they are.
                    member.name = name
                    archive.addfile(member, file)
        output, said = process.communicate()
    if process.returncode or output.split()[-1:] != [str(len(names)).encode()]:
        lines = [line for line in said.decode(errors="replace").splitlines() if line.strip()]
        why = lines[-1] if lines else f"exit code {process.returncode}"
        raise ConfigError(f"{host.address}: {len(names)} files were to be copied there: {why}")


def fetch(host: RemoteHost, path: Path) -> bytes:
    """The bytes of a file on a host. Raises ConfigError."""
    ran = subprocess.run(
        host.command(f"cat {shlex.quote(str(path))}"),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    if ran.returncode:
        said = ran.stderr.decode(errors="replace").strip() or f"exit code {ran.returncode}"
        raise ConfigError(f"{host.address}: {path} could not be fetched: {said}")
    return ran.stdout


OWN_END_SECONDS = 4.0
"""In which the others may end by themselves once one has failed, and say what they saw."""
KILL_SECONDS = 2.0
"""How much later the ways to machines that still run are cut."""
NOT_REACHED = 255
"""With which ssh ends where it has not reached a machine, or has lost it."""
_OWN_CODES = (1, 2, 3, INTERRUPTED)


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one machine does."""

    host: RemoteHost
    script: str
    """A line of shell, which ends in `exec` of an agent."""
    is_spare: bool = False
    """Whether the others may go on if it fails."""


@dataclass
class _Way:
    """The process that reaches a machine."""

    task: Task
    process: subprocess.Popen[bytes]
    readers: list[threading.Thread] = field(default_factory=list[threading.Thread])

    @property
    def name(self) -> str:
        return self.task.host.address

    def say(self, word: bytes) -> None:
        """Write to the agent there."""
        assert self.process.stdin is not None
        with suppress(OSError, ValueError):
            self.process.stdin.write(word)
            self.process.stdin.flush()


class _Printer:
    """Writes whole lines of all machines to this process's streams, each behind its machine's name."""

    def __init__(self, names: Iterable[str]) -> None:
        self._lock = threading.Lock()
        self._width = max(map(len, names))

    def read(self, name: str, source: IO[bytes], target: IO[str]) -> None:
        with source:
            for line in iter(source.readline, b""):
                text = line.decode(errors="replace").rstrip("\r\n")
                with self._lock, suppress(OSError, ValueError):
                    target.write(f"{name:<{self._width}} | {text}\n")
                    target.flush()


def run_together(tasks: Sequence[Task]) -> int:
    """Run all tasks until all have ended; returns 0, or the exit code of the machine at fault.

    When one fails the others are ended, within 10 s. Ctrl-C and SIGTERM go to all;
    a second Ctrl-C ends them at once.
    """
    ways: list[_Way] = []
    printer = _Printer(task.host.address for task in tasks)
    with hearing({signal.SIGTERM: lambda *_: _tell(ways, TERMINATE)}):
        try:
            for task in tasks:
                ways.append(_start(task, printer))
            culprit = _wait(ways)
        except KeyboardInterrupt:
            _interrupt(ways)
            raise
        finally:
            _cut(ways)
        return 0 if culprit is None else _report(culprit)


def _start(task: Task, printer: _Printer) -> _Way:
    process = subprocess.Popen(
        task.host.command(task.script),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # A terminal's Ctrl-C is for this process alone, which tells it to the agents.
        start_new_session=True,
    )
    way = _Way(task, process)
    way.say(HELLO)
    for source, target in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        reader = threading.Thread(target=printer.read, args=(way.name, source, target), daemon=True)
        reader.start()
        way.readers.append(reader)
    return way


def _tell(ways: Sequence[_Way], word: bytes) -> None:
    for way in ways:
        if way.process.poll() is None:
            way.say(word)


def _wait(ways: Sequence[_Way]) -> _Way | None:
    """Wait for all; returns the machine at fault, after the others are ended."""
    spared: list[_Way] = []
    failed: list[_Way] = []
    deadline, is_told = float("inf"), False
    while any(way.process.poll() is None for way in ways):
        for way in ways:
            if not way.process.poll() or way in (*failed, *spared):
                continue
            if way.task.is_spare:
                spared.append(way)
                print(f"note: {_why(way)}; the others go on without it", file=sys.stderr)
                continue
            if not failed:
                deadline = time.monotonic() + OWN_END_SECONDS
            failed.append(way)
        if time.monotonic() > deadline:
            if is_told:
                break
            _tell(ways, END)
            deadline, is_told = time.monotonic() + KILL_SECONDS, True
        time.sleep(0.05)
    codes = [way for way in ways if way.process.poll() and way not in (*failed, *spared)]
    failed += [way for way in codes if not is_told or way.process.poll() in (2, 3)]
    if not failed and spared and len(spared) == len(ways):
        failed = spared
    # One that says why has the word; else who was first.
    return min(failed, key=_blame_order) if failed else None


def _blame_order(way: _Way) -> int:
    """Bad input first, then what was killed or lost; the others fail because of these."""
    code = way.process.poll() or 0
    return 0 if code in (2, 3) else 1 if code not in _OWN_CODES else 2


def _why(way: _Way) -> str:
    code = way.process.poll() or 0
    if code == NOT_REACHED:
        return f"{way.name} was not reached, or its connection broke (exit code {code})"
    number = -code if code < 0 else code - 128
    if number in set(signal.valid_signals()) and code != INTERRUPTED:
        return f"{way.name} was killed by {signal.Signals(number).name}"
    return f"{way.name} failed (exit code {code})"


def _report(way: _Way) -> int:
    code = way.process.poll() or 0
    print(f"error: {_why(way)}; what it said is above, and the others were ended", file=sys.stderr)
    return code if code in _OWN_CODES else 1


def _interrupt(ways: Sequence[_Way]) -> None:
    """Have all end as after a Ctrl-C of their own; another one ends the wait."""
    _tell(ways, INTERRUPT)
    deadline = time.monotonic() + 2 * OWN_END_SECONDS
    while any(way.process.poll() is None for way in ways) and time.monotonic() < deadline:
        time.sleep(0.05)


def _cut(ways: Sequence[_Way]) -> None:
    """End what still runs: first by a word, then by cutting the way to it."""
    _tell(ways, END)
    deadline = time.monotonic() + KILL_SECONDS
    while any(way.process.poll() is None for way in ways) and time.monotonic() < deadline:
        time.sleep(0.05)
    for way in ways:
        if way.process.poll() is None:
            way.process.kill()
        way.process.wait()
        for reader in way.readers:
            reader.join(timeout=1.0)
        assert way.process.stdin is not None
        with suppress(OSError):
            way.process.stdin.close()


TOOL_SECONDS = 20.0
"""In which a tool answers: nvidia-smi takes seconds where no process keeps the driver awake."""


def run_tool(*words: str) -> tuple[str, str | None]:
    """What a tool prints, and why it failed; nothing is raised."""
    try:
        ran = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=TOOL_SECONDS, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        return "", f"there is no {words[0]}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return "", f"{words[0]}: {error}"
    if ran.returncode == 0:
        return ran.stdout, None
    said = " ".join((ran.stdout + ran.stderr).split())
    return "", f"{words[0]}: {said[:200] or f'exit code {ran.returncode}'}"


# --- on the other machine -----------------------------------------------------------------------------------


HELLO, INTERRUPT, TERMINATE, END = b"hello\n", b"interrupt\n", b"terminate\n", b"end\n"
"""What the starter writes: first HELLO; then as a Ctrl-C, as a SIGTERM, and to end within END_SECONDS."""
END_SECONDS = 1.5
SAVE_SECONDS = 120.0
"""What a command has to save and exit, once the starter is gone."""


class _Agent:
    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self.deadline: float | None = None
        self.has_starter = False

    def end(self, seconds: float) -> None:
        """Ask the command to end, and kill it when `seconds` are over."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + seconds)

    def hear(self, words: bytes) -> None:
        """Do what stands on the input; nothing there: it has ended."""
        if not words and self.has_starter:
            self.end(SAVE_SECONDS)
        for word in words.splitlines(keepends=True):
            if word == HELLO:
                self.has_starter = True
            elif word == END:
                self.end(END_SECONDS)
            elif self.child.poll() is None and word in (INTERRUPT, TERMINATE):
                self.child.send_signal(signal.SIGINT if word == INTERRUPT else signal.SIGTERM)

    def wait(self) -> int:
        """Listen until the command has ended; returns its exit code, 128 + N after signal N."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            while self.child.poll() is None:
                for _ in selector.select(0.1) if selector.get_map() else ():
                    words = os.read(0, 4096)
                    self.hear(words)
                    if not words:
                        selector.unregister(0)
                if not selector.get_map():
                    time.sleep(0.05)
                if self.deadline is not None and time.monotonic() > self.deadline:
                    self.kill()
        self.kill()
        code = self.child.wait()
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """Kill the command and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)


def run(command: Sequence[str]) -> int:
    """Run a command until it ends, or the starter has it ended. Returns its exit code."""
    agent = _Agent(command)
    signal.signal(signal.SIGINT, lambda *_: agent.hear(INTERRUPT))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.end(SAVE_SECONDS))
    return agent.wait()


WHOLE_BYTES = 64 << 20
"""Files up to here are compared by all their bytes, larger ones by size and three parts."""
PART_BYTES = 1 << 20
Print = list[Any]
"""Size in bytes, and the SHA-256 of what is compared."""


def look(question: dict[str, Any]) -> dict[str, Any]:
    """The answer to a question."""
    folder = Path(question["folder"])
    there = folder.is_dir()
    if there:
        os.chdir(folder)
    found: dict[str, Any] = {"yuan-train": __version__, "folder": there}
    found["names"] = {name: _addresses(name) for name in question.get("names", ())}
    if question.get("port") is not None:
        found["port"] = usable_port(question["port"])
    found["files"] = dict(prints(question.get("paths", ()))) if there else {}
    if question.get("mark"):
        found["mark"] = _make_mark(folder / question["mark"])
    if question.get("remove"):
        (folder / question["remove"]).unlink(missing_ok=True)
    if question.get("seen"):
        path = folder / question["seen"]
        # Listing a folder makes a network file system look again.
        found["seen"] = path.parent.is_dir() and path.name in os.listdir(path.parent)
    return found


def prints(paths: Sequence[str]) -> Iterator[tuple[str, Print]]:
    """Each file that is there, of folders all within, with its print."""
    for name in paths:
        path = Path(name)
        if path.is_dir():
            for one in sorted(path.rglob("*")):
                if one.is_file():
                    yield str(one), _print(one)
        elif path.is_file():
            yield name, _print(path)


def _print(path: Path) -> Print:
    size, found = path.stat().st_size, hashlib.sha256()
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while part := file.read(PART_BYTES):
                found.update(part)
        else:
            for start in (0, size // 2, size - PART_BYTES):
                file.seek(start)
                found.update(file.read(PART_BYTES))
    return [size, found.hexdigest()]


def _addresses(name: str) -> list[str]:
    try:
        return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None)})
    except (OSError, UnicodeError):
        return []


def usable_port(wanted: int) -> int:
    """The port if it is free on this machine, else another that is."""
    for port in (wanted, 0):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return probe.getsockname()[1]
    return wanted


def _make_mark(path: Path) -> str | None:
    """Make a file, and its folder; returns what is wrong."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    except OSError as error:
        return f"{path.parent}: {error.strerror}"
    return None


def receive(stream: IO[bytes], folder: Path) -> int:
    """Write the files of the stream; names are relative to the folder, or absolute. Returns their number."""
    count = 0
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            source = archive.extractfile(member)
            assert source is not None, "the sender packs files alone"
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                with draft.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                draft.chmod(member.mode)
                os.utime(draft, (member.mtime, member.mtime))
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
            count += 1
    return count


def main(what: str, words: Sequence[str]) -> int:
    """Do what another machine asks for; returns the exit code."""
    if what == "run":
        return run(words)
    print(
        json.dumps(look(json.loads(words[0])))
        if what == "look"
        else receive(sys.stdin.buffer, Path(words[0]))
    )
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
