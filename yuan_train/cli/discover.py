"""Looks at this machine, at --hosts over ssh, or at the machines of the Slurm job that it runs in, and writes
a commented cluster file: cards and memory, links between cards, networks, host memory, disks. What was not
found is said. A machine without a GPU counts as one card: its processor."""

from __future__ import annotations

import argparse
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from yuan_train.cli.preflight import ask_nodes, difference_words, differences
from yuan_train.config.errors import ConfigError
from yuan_train.machine.hosts import SRUN, parse_hosts, slurm_parts
from yuan_train.machine.node_text import describe

Facts = dict[str, Any]

HIDDEN = 2048
"""Length of the rows with which the doctor tests its ops; nothing of that is used here."""
HEAD = """\
# Written by `yuan-train discover`. Cards, memory and rates of ports are as the machines tell them; rates of
# links are what such links usually give. What `yuan-train profile` measures takes the place of figures here.
"""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--hosts", metavar="A,B,C", help="the machines; this one is left out unless it is named")
    add("--ssh", default="ssh", metavar="CMD", help="called as CMD HOST COMMAND... (ssh)")
    add("--out", required=True, metavar="FILE", help="the cluster file to write")


def run(arguments: argparse.Namespace) -> int:
    """Ask, describe, check, write. Raises ConfigError if a machine does not answer, or the file is there."""
    path = Path(arguments.out)
    if path.exists():
        raise ConfigError(
            f"{path}: is there already, perhaps with changes by hand; wanted another name (--out F), or "
            "remove it"
        )
    found = _ask(arguments)
    lost = [f"{host}: {why}" for host, why in found.items() if isinstance(why, str)]
    if lost:
        raise ConfigError(
            f"--hosts: no answer of {len(lost)} of {len(found)} machines, and nothing is written: "
            f"{'; '.join(lost)}. Each needs a login without a password and yuan-train at the path of here "
            f"({sys.executable})"
        )
    facts = {host: one for host, one in found.items() if not isinstance(one, str)}
    text, notes = cluster_text(path.stem, facts)
    _write_checked(path, text)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    print(f"written: {path}; `yuan-train inspect {path}` shows what it says", file=sys.stderr)
    return 0


def _ask(arguments: argparse.Namespace) -> dict[str, Facts | str]:
    """What the doctor finds on each machine, by the name that its node gets."""
    if arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts, arguments.ssh)
        found = ask_nodes([host.name for host in hosts], arguments.ssh, hidden=HIDDEN)
        return dict(zip([host.address for host in hosts], found.values(), strict=True))
    if "SLURM_JOB_ID" in os.environ:
        return _ask_slurm()
    from yuan_train.cli.doctor import examine

    return {socket.gethostname(): examine(hidden=HIDDEN)}


def _ask_slurm() -> dict[str, Facts | str]:
    """The machines of the job; of a heterogeneous one, those of each of its components in turn."""
    found: dict[str, Facts | str] = {}
    for group, names in slurm_parts():
        found |= ask_nodes(names, shlex.join([*SRUN, "--cpus-per-task=1", *group, "-w"]), hidden=HIDDEN)
    return found


def cluster_text(name: str, found: Mapping[str, Facts]) -> tuple[str, list[str]]:
    """A cluster file of the machines, by name of their node, and what a person should know of them."""
    nodes = [describe(host, facts, several=len(found) > 1) for host, facts in found.items()]
    types: dict[str, str] = {}
    for node in nodes:
        types |= node.device_types
    lines = [HEAD + f"name: {name}", "nodes:", *(line for node in nodes for line in node.lines)]
    if types:
        lines += ["device_types:", *(line for text in types.values() for line in text.splitlines())]
    notes = [difference_words(*unlike) for unlike in differences(found).items()]
    notes += [f"{node.name}: {note}" for node in nodes for note in node.notes]
    lines += ["# What to know of these machines:", *(f"# - {note}" for note in notes)] if notes else []
    return "\n".join(lines) + "\n", notes


def _write_checked(path: Path, text: str) -> None:
    """Write what `load_cluster` reads, or nothing. Raises ConfigError."""
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.load import write_text

    draft = path.with_name(f".{path.stem}.{os.getpid()}.yaml")
    write_text(draft, text)
    try:
        load_cluster(draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
