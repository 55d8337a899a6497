"""`launch --hosts a,b,c`, `--hostfile F`, `--slurm`: from one machine, starts `launch` on each of a plan.

Before anything starts, every machine is asked for its files, its yuan-train and the names it knows; what is
missing there is said, or copied with --copy. `profile` goes through the same door. Also here: the machines of
a plan and their ranks, where these meet, and the torchrun line of each machine.
"""

from __future__ import annotations

import argparse
import ipaddress
import itertools
import os
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

from yuan_train import __version__
from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.load import CONFIGS, Document, Keys, is_list, is_mapping, override, read_document
from yuan_train.config.model import STATE, locate_model
from yuan_train.config.plan import Node, Plan, node_of
from yuan_train.config.rl import is_rl_run, load_rl
from yuan_train.config.rl_plan import RlPlan
from yuan_train.config.run import load_run
from yuan_train.machine.hosts import (
    Facts,
    Print,
    RemoteHost,
    Task,
    look_at,
    on_each,
    parse_hosts,
    prints,
    read_hostfile,
    run_together,
    send,
    slurm_hosts,
)


def batch_script(
    plan: Plan | RlPlan, nodes: Sequence[Node], words: Sequence[str], *, name: str, options: str
) -> str:
    """A script for sbatch: a component for adjacent nodes with the same cards, and `yuan-train WORDS` in the
    first of them. `options` are those of sbatch for every component."""
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name={name}"]
    types = {entry.rank: entry.type for entry in plan.ranks}
    components = itertools.groupby(nodes, lambda node: [types[rank] for rank in node.ranks])
    for number, (own, alike) in enumerate(components):
        if number:
            lines.append("#SBATCH hetjob")
        kinds, names = " + ".join(dict.fromkeys(own)), [node.name for node in alike]
        lines.append(f"# {kinds}: {', '.join(names)}")
        cards = f" --gpus-per-node={len(own)}" if not kinds.startswith("CPU") else ""
        more = f" {options}" if options else ""
        lines.append(f"#SBATCH --nodes={len(names)} --ntasks-per-node=1{cards}{more}")
    lines += ["set -euo pipefail", 'cd "$SLURM_SUBMIT_DIR"', f"exec {shlex.join(['yuan-train', *words])}"]
    return "\n".join(lines) + "\n"


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


PASSED_ON = ("NCCL_", "GLOO_", "TORCH_", "YUAN_")
"""How the variables begin that ranks elsewhere get from this machine's environment, besides their own."""
SHOWN = 6
"""Files that a message names for one machine; of more the number."""
Place = tuple[RemoteHost, Node]


@dataclass(frozen=True, kw_only=True)
class Errand:
    """What is started on the machines."""

    words: Sequence[str]
    """The command of a node, without `yuan-train`, --this-node and --rendezvous."""
    files: Sequence[str]
    """Files and folders that each machine must have."""
    rendezvous: str | None
    copy: bool
    shared: str | None = None
    """A folder that all machines must see, if there are several."""
    spare: Sequence[int] = ()
    """Ranks that the others may go on without."""


def place(hosts: Sequence[RemoteHost], nodes: Sequence[Node]) -> list[Place]:
    """The host of each node, in the order of nodes: as the hostfile says, else by name, else in order.

    Raises ConfigError if a node has none, or a host has fewer slots than the node ranks.
    """
    names = [node.name for node in nodes]
    for host in hosts:
        if host.node is not None and host.node not in names:
            raise ConfigError(
                f"{host.where}: {host.node}: no node of the plan, which has {', '.join(names)}; wanted one"
            )
    by_node = {host.node: host for host in hosts if host.node is not None}
    unsaid = [host for host in hosts if host.node is None]
    for host in unsaid:
        for name in names:
            if name not in by_node and name in (host.address, host.address.partition(".")[0]):
                by_node[name] = host
                break
    in_order = not by_node or (len(by_node) < len(nodes) and not any(host.has_shell for host in hosts))
    if in_order and len(unsaid) == len(nodes):
        # Slurm gives a job the machines that it likes, in the order of the job's components.
        by_node = dict(zip(names, unsaid, strict=True))
    missing = [name for name in names if name not in by_node]
    if missing:
        raise ConfigError(
            f"no machine for {', '.join(missing)} of the plan's nodes {', '.join(names)} among "
            f"{', '.join(host.name for host in hosts)}; wanted machines of these names, or as many in this "
            "order, or in a hostfile lines of HOST NODE"
        )
    places = [(by_node[node.name], node) for node in nodes]
    for host, node in places:
        if host.slots is not None and host.slots < len(node.ranks):
            raise ConfigError(
                f"{host.where}: {host.name}: slots={host.slots}, but the plan has {len(node.ranks)} ranks on "
                f"{node.name}; wanted a plan for fewer cards there, or slots={len(node.ranks)}"
            )
    idle = [host.name for host in hosts if host not in by_node.values()]
    if idle:
        print(f"note: {', '.join(idle)}: the plan has no ranks there", file=sys.stderr)
    return places


def run_errand(places: Sequence[Place], errand: Errand) -> int:
    """Check the machines, copy to them if that is wished, and start all. Returns the exit code.

    Raises ConfigError before anything starts.
    """
    hosts = [host for host, _ in places]
    address, port = _where_to_meet(places, errand)
    mark = Path(errand.shared) / f".seen-{uuid4().hex[:8]}" if errand.shared and len(hosts) > 1 else None
    question = {
        "folder": os.getcwd(),
        "paths": list(errand.files),
        "names": [address] if len(hosts) > 1 else [],
    }
    first = look_at(
        hosts[:1], {**question, "port": port or DEFAULT_PORT, "mark": str(mark) if mark else None}
    )
    try:
        others = look_at(hosts[1:], {**question, "seen": str(mark)} if mark else question)
    finally:
        if mark:
            on_each(hosts[:1], lambda host: _remove(host, mark))
    found = {**first, **others}
    _check_versions(found)
    if len(hosts) > 1:
        address = _meeting_point(address, found, given=errand.rendezvous is not None)
    _check_files(hosts, found, errand)
    if mark:
        _check_shared(found, errand.shared or "")
    own = next(iter(first.values()))["port"]
    if port is None and own != DEFAULT_PORT:
        print(f"note: port {DEFAULT_PORT} of {hosts[0].address} is taken; {own} it is", file=sys.stderr)
    elif port is not None and own != port:
        raise ConfigError(
            f"--rendezvous {address}:{port}: the port is taken on {hosts[0].address}; wanted one that is free"
        )
    return run_together(_tasks(places, errand, f"{_bracketed(address)}:{own}"))


def _where_to_meet(places: Sequence[Place], errand: Errand) -> tuple[str, int | None]:
    """Host and port as given, else the first machine, which is by itself on the loopback."""
    alone = "127.0.0.1" if len(places) == 1 else _bracketed(places[0][0].address)
    return parse_address(errand.rendezvous or alone)


def _tasks(places: Sequence[Place], errand: Errand, rendezvous: str, *, by_hand: bool = False) -> list[Task]:
    given = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith(PASSED_ON)]
    program = [sys.executable, "-m", "yuan_train"]
    agent = [] if by_hand else [sys.executable, "-m", "yuan_train.machine.hosts", "run"]
    front = [*(["env", *given] if given else []), *agent, *program]
    tasks: list[Task] = []
    for host, node in places:
        words = [*front, *errand.words, "--this-node", node.name, "--rendezvous", rendezvous]
        script = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(words)}"
        spare = bool(errand.spare) and all(rank in errand.spare for rank in node.ranks)
        tasks.append(Task(host=host, script=script, is_spare=spare))
    return tasks


def blind_hosts(hosts: Sequence[RemoteHost], folder: str) -> list[str]:
    """The machines that do not see in a folder what the first one writes there; all if it cannot write.

    Raises ConfigError if one does not answer.
    """
    mark = Path(folder) / f".seen-{uuid4().hex[:8]}"
    question = {"folder": os.getcwd()}
    try:
        (made,) = look_at(hosts[:1], {**question, "mark": str(mark)}).values()
        others = look_at(hosts[1:], {**question, "seen": str(mark)})
    finally:
        _remove(hosts[0], mark)
    if made["mark"] is not None:
        return [host.address for host in hosts]
    return [name for name, facts in others.items() if not facts["seen"]]


def _remove(host: RemoteHost, mark: Path) -> None:
    look_at([host], {"folder": os.getcwd(), "remove": str(mark)})


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


def _check_versions(found: dict[str, Facts]) -> None:
    unlike = {
        name: facts["yuan-train"] for name, facts in found.items() if facts["yuan-train"] != __version__
    }
    if unlike:
        told = ", ".join(f"{version} on {name}" for name, version in unlike.items())
        raise ConfigError(f"yuan-train is {__version__} here, and {told}; wanted the same release everywhere")


def _check_files(hosts: Sequence[RemoteHost], found: dict[str, Facts], errand: Errand) -> None:
    """Raise ConfigError unless all machines have the same files; with --copy, copy those of here."""
    here = dict(prints(errand.files))
    files: dict[str, Print] = {}
    for one in (here, *(facts["files"] for facts in found.values())):
        files = {**one, **files}
    nowhere = [
        name for name in errand.files
        if name not in files and not any(Path(name) in Path(file).parents for file in files)
    ]  # fmt: skip
    if nowhere:
        raise ConfigError(f"{_listed(nowhere)}: on none of {', '.join(found)}, and not here either")
    lacking = {name: [file for file in files if file not in facts["files"]] for name, facts in found.items()}
    unlike = {
        name: [file for file, value in files.items() if facts["files"].get(file, value) != value]
        for name, facts in found.items()
    }
    faults = [
        *(f"{name}: no {_listed(lost)}" for name, lost in lacking.items() if lost),
        *(f"{name}: another {_listed(other)}" for name, other in unlike.items() if other),
    ]
    if not faults:
        return
    if not errand.copy:
        raise ConfigError(
            "\n".join(faults) + f"\nwanted the same files on every machine, in {os.getcwd()} as here: copy "
            "them there, or give --copy"
        )
    absent = [file for file in files if file not in here]
    if absent:
        raise ConfigError("\n".join(faults) + f"\n--copy: {_listed(absent)} cannot be copied: not here")
    _copy(hosts, lacking, unlike)


def _copy(hosts: Sequence[RemoteHost], lacking: dict[str, list[str]], unlike: dict[str, list[str]]) -> None:
    """Copy to each host what it lacks, or has otherwise; what is replaced is said before."""
    for name in lacking:
        for words, names in (("copying", lacking[name]), ("replacing what differs", unlike[name])):
            if names:
                size = sum(Path(file).stat().st_size for file in names)
                print(f"{name}: {words}: {_listed(names)} ({size / 1e6:.3g} MB)", file=sys.stderr)
    wanted = [host for host in hosts if lacking[host.address] or unlike[host.address]]
    folder = Path.cwd()
    on_each(wanted, lambda host: send(host, folder, [*lacking[host.address], *unlike[host.address]]))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return f"{', '.join(names[:SHOWN])}{more}"


def _check_shared(found: dict[str, Facts], folder: str) -> None:
    (first, facts), *others = found.items()
    if facts.get("mark"):
        raise ConfigError(f"checkpoint.directory: {first} cannot write there: {facts['mark']}")
    blind = [name for name, other in others if not other.get("seen")]
    if blind:
        raise ConfigError(
            f"checkpoint.directory: {folder} of {first} is not seen by {', '.join(blind)}; wanted a folder "
            "on a file system that all machines share, or checkpoint.directory=null to save nothing"
        )


def _meeting_point(name: str, found: dict[str, Facts], *, given: bool) -> str:
    """The name where ranks meet, as every machine resolves it; else its address by that of one.

    Raises ConfigError if a machine knows neither, or takes it for itself.
    """
    first, *others = found
    known = {host: facts["names"][name] for host, facts in found.items()}
    lost = [host for host in others if not known[host]]
    own = [host for host in others if known[host] and all(_is_loopback(one) for one in known[host])]
    if own and not given:
        raise ConfigError(
            f"{name}, where the ranks would meet, is {', '.join(own)} itself on {', '.join(own)} (a loopback "
            "address); wanted a name or an address that all machines reach: --rendezvous HOST[:PORT]"
        )
    if not lost:
        return name
    outside = [one for host in found for one in known[host] if not _is_loopback(one)]
    if outside:
        print(f"note: {', '.join(lost)} does not know {name}; all meet at {outside[0]}", file=sys.stderr)
        return outside[0]
    raise ConfigError(
        f"{name}, where the ranks would meet, is no host name on {', '.join(lost)}, and {first} has no "
        "address for it; give the first machine by its address, or --rendezvous HOST[:PORT]"
    )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def launch_on(
    plan: Plan | RlPlan, nodes: Sequence[Node], arguments: argparse.Namespace, *, spare: Sequence[int]
) -> int:
    """`launch` with hosts: start all nodes of a plan, or print what does. Returns the exit code.

    Raises ConfigError before anything starts.
    """
    if arguments.this_node is not None:
        raise ConfigError("--this-node: names one machine, and others are named; wanted one or the other")
    engine = ["--engine", arguments.engine] if arguments.engine else []
    words = ["launch", "--config", arguments.config, "--plan", arguments.plan, *engine, *arguments.overrides]
    if arguments.slurm and arguments.print:
        copy = ["--copy"] if arguments.copy else []
        name, options = Path(arguments.plan).resolve().parent.name, arguments.sbatch or ""
        print(batch_script(plan, nodes, [*words, "--slurm", *copy], name=name, options=options), end="")
        return 0
    overrides = tuple(arguments.overrides)
    run = (load_rl if is_rl_run(arguments.config) else load_run)(arguments.config, overrides)
    errand = Errand(
        words=words,
        files=[*files_of_run(arguments.config, overrides), arguments.plan],
        rendezvous=arguments.rendezvous,
        copy=arguments.copy,
        shared=run.checkpoint.directory,
        spare=spare,
    )
    places = place(read_hosts(arguments), nodes)
    if arguments.print:
        host, port = _where_to_meet(places, errand)
        for task in _tasks(places, errand, f"{_bracketed(host)}:{port or DEFAULT_PORT}", by_hand=True):
            print(shlex.join([*task.host.reach, task.script]))
        return 0
    return run_errand(places, errand)


OUTPUTS = (("checkpoint",), ("log",), ("memory",))
"""Sections whose paths the run writes; `checkpoint.resume` names one that it reads."""
ANYWHERE = ("prefix", "file", "pairs", "tokenizer", "evaluation")
"""Keys of paths that must be there on the machines, though perhaps not on this one."""
SUFFIXES = (".bin", ".idx", ".answers.bin", ".answers.idx")
"""Of the token files of one prefix; the last two only of chats."""


def files_of_run(path: str, overrides: Sequence[str], *, data: bool = True) -> list[str]:
    """The run file and the files and folders that it names, as it names them; none that the package brings.

    A key's string counts if it is a file here, or if such a key always names one; without `data` only what
    tells the model. Raises ConfigError.
    """
    document = read_document(path)
    for assignment in overrides:
        if not assignment.startswith("model."):
            document = override(document, assignment)
    found = [path, *_model(document), *(_paths(document.value, ()) if data else ())]
    return list(dict.fromkeys(found))


def _model(document: Document) -> Iterator[str]:
    """The file of the model, by its name or by that of the checkpoint to start from."""
    run = document.value if is_mapping(document.value) else {}
    name, start = run.get("model"), run.get("start")
    if isinstance(name, str):
        on_line = document.source(("model",)).startswith("command line")
        yield from files_of_model(name, [Path()] if on_line else [Path(document.name).parent, Path()])
    elif name is None and is_mapping(start) and isinstance(start.get("checkpoint"), str):
        yield from files_of_model(start["checkpoint"], [Path()])


def files_of_model(name: str, folders: Sequence[Path] = (Path(),)) -> Iterator[str]:
    """What tells a model that is named: of a folder of Hugging Face's its config, of a checkpoint its state.

    Nothing for a model that the package brings. Raises ConfigError if there is none.
    """
    found = locate_model(name, folders)
    if found.is_dir() and (found / "config.json").is_file():
        yield str(found / "config.json")
    elif found.is_dir():
        yield from (str(step) if step.name == "latest" else str(step / STATE) for step in _newest(found))
    elif not is_ours(found):
        yield str(found)


def is_ours(path: Path) -> bool:
    """Whether a file comes with the package, so that every machine has it."""
    return path.resolve().is_relative_to(CONFIGS.resolve())


def _paths(value: Any, keys: Keys) -> Iterator[str]:
    if is_mapping(value):
        for key, item in value.items():
            if keys or key != "model":
                yield from _paths(item, (*keys, key))
    elif is_list(value):
        for item in value:
            yield from _paths(item, keys)
    elif isinstance(value, str) and value:
        yield from _named(value, keys)


def _named(text: str, keys: Keys) -> Iterator[str]:
    key = keys[-1] if keys else ""
    if key == "prefix":
        plain = text.removesuffix(".bin").removesuffix(".idx")
        yield from (f"{plain}{suffix}" for suffix in SUFFIXES[:2])
        yield from (f"{plain}{suffix}" for suffix in SUFFIXES[2:] if Path(f"{plain}{suffix}").is_file())
    elif key in ("checkpoint", "resume") and text not in ("auto", "never"):
        yield from map(str, _newest(Path(text)))
    elif keys[:1] in OUTPUTS:
        return
    elif ".py:" in text:
        yield text.rpartition(":")[0]
    elif key in ANYWHERE or ("/" in text or "." in text) and Path(text).is_file():
        yield text


def _newest(path: Path) -> Iterator[Path]:
    """The folder of a checkpoint; of a folder of several that of the newest, and what says so."""
    latest = path / "latest"
    if (path / STATE).is_file() or not latest.is_file():
        yield path
        return
    yield latest
    yield path / latest.read_text(encoding="utf-8").strip()


DEFAULT_PORT = 29500


def nodes_of(plan: Plan | RlPlan) -> list[Node]:
    """The machines of a plan, in the order of ranks; one node `all` if all cards are simulated.

    Raises PlanError if the ranks of a node are not consecutive, which those of several roles need not be.
    """
    plans = plan.plans.values() if isinstance(plan, RlPlan) else (plan,)
    types = [own.device_type(entry.rank) for own in plans for entry in own.ranks]
    if all(device is not None and device.slowdown is not None for device in types):
        return [Node("all", tuple(range(plan.world_size)))]
    return named_nodes(plan)


def named_nodes(plan: Plan | RlPlan) -> list[Node]:
    """As `nodes_of`, by their names also if all cards are simulated."""
    nodes: dict[str, list[int]] = {}
    for entry in plan.ranks:
        nodes.setdefault(node_of(entry), []).append(entry.rank)
    for name, ranks in nodes.items():
        if not isinstance(plan, RlPlan) and not _follow_each_other(ranks):
            raise PlanError(f"ranks: node {name} has ranks {ranks}; ranks must be numbered node by node")
    return [Node(name, tuple(ranks)) for name, ranks in nodes.items()]


def torchrun_lines(nodes: Sequence[Node], command: Sequence[str], *, rendezvous: str | None) -> list[str]:
    """The torchrun command for each node; nodes may have different numbers of cards.

    `rendezvous` is HOST[:PORT]; None: the first node, or the loopback with one node. Raises PlanError if the
    ranks of a node are not consecutive, as torchrun numbers them.
    """
    for node in nodes:
        if not _follow_each_other(node.ranks):
            raise PlanError(
                f"torchrun numbers the ranks of a node one after the other, but node {node.name} has "
                f"{list(node.ranks)}: its roles' cards are apart; run this on each node without --print"
            )
    host, port = meeting_address(rendezvous or ("127.0.0.1" if len(nodes) == 1 else nodes[0].name))
    return [
        f"torchrun --nnodes={len(nodes)} --node-rank={i} --nproc-per-node={len(node.ranks)} "
        f"--master-addr={host} --master-port={port} -m yuan_train {shlex.join(command)}"
        + ("" if len(nodes) == 1 else f"    # on {node.name}")
        for i, node in enumerate(nodes)
    ]


def _follow_each_other(ranks: Sequence[int]) -> bool:
    return list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))


def meeting_address(rendezvous: str) -> tuple[str, int]:
    """Host and port of HOST[:PORT], where ranks meet. Raises ConfigError."""
    host, port = parse_address(rendezvous)
    return host, port or DEFAULT_PORT


def parse_address(address: str) -> tuple[str, int | None]:
    """Host and, if it is given, port of HOST[:PORT]; an IPv6 address in brackets. Raises ConfigError."""
    found = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d+))?", address)
    port = int(found["port"]) if found is not None and found["port"] else None
    if found is None or port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"--rendezvous: wanted HOST:PORT, with a port of 1 to 65535, got {address!r}")
    return found["six"] or found["host"], port
