"""Machines by name: from an option, a hostfile or a Slurm job, and the command by which each is reached."""

from __future__ import annotations

import ipaddress
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from yuan_train.config.errors import ConfigError
from yuan_train.machine.tools import run_tool

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
