"""The options of commands that start ranks on other machines: which machines, and how they are reached."""

from __future__ import annotations

import argparse

from yuan_train.config.errors import ConfigError
from yuan_train.machine.hosts import RemoteHost, parse_hosts, read_hostfile, slurm_hosts


def add_host_options(parser: argparse.ArgumentParser) -> None:
    """Add what `read_hosts` reads, and --copy."""
    group = parser.add_argument_group("other machines", "started from this one, which may be one of them")
    group.add_argument("--hosts", metavar="A,B,C", help="the machines, by name or address")
    group.add_argument(
        "--hostfile", metavar="F", help="a file with a line for each machine: HOST [NODE] [slots=N]"
    )
    group.add_argument("--slurm", action="store_true", help="the machines of the Slurm job around this call")
    group.add_argument("--ssh", default="ssh", metavar="CMD", help="called as CMD HOST COMMAND... (ssh)")
    group.add_argument(
        "--copy",
        action="store_true",
        help="copy the files that a machine lacks, or has otherwise, from here; each is named",
    )


def names_hosts(arguments: argparse.Namespace) -> bool:
    """Whether other machines are named. Raises ConfigError for several sources of them, or --copy alone."""
    given = [name for name in ("hosts", "hostfile", "slurm") if getattr(arguments, name) not in (None, False)]
    if len(given) > 1:
        raise ConfigError(f"--{given[0]} and --{given[1]}: both name the machines; wanted one of them")
    if not given and arguments.copy:
        raise ConfigError("--copy: to which machines? Give --hosts A,B,C, --hostfile F or --slurm")
    return bool(given)


def read_hosts(arguments: argparse.Namespace) -> list[RemoteHost]:
    """The machines that are named. Raises ConfigError for wrong names."""
    if arguments.slurm:
        return slurm_hosts()
    if arguments.hosts is not None:
        return parse_hosts(arguments.hosts, arguments.ssh)
    return read_hostfile(arguments.hostfile, arguments.ssh)
