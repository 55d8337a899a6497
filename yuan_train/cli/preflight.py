"""What `yuan-train doctor` says first: what machines are ready for, and what they are not, with the reason.

`see_host` looks at what lies around a run (shared memory, open files, names, networks, links of cards), and
`check` judges it together with what torch sees. With `--nodes a,b,c` the doctor of each machine is asked over
ssh, and told is where they differ. All are plain values, which `doctor --json` prints.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from yuan_train.machine.hosts import ask_json, ssh_words
from yuan_train.machine.tools import SYS, VIRTUAL, read_line

Facts = dict[str, Any]

LEAST_SHARED_MEMORY = 1 << 30
"""Bytes of /dev/shm: NCCL's segments, of some ten megabytes for each pair of cards, and torch's."""
LEAST_OPEN_FILES = 4096
"""Sockets of gloo and NCCL grow with the ranks; 1,024 are enough for some 32."""
SHARED_MEMORY = Path("/dev/shm")
CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Variables that name the network interfaces to use."""

Purpose = Literal["cpu", "cards", "several cards", "several nodes"]
PURPOSES: dict[Purpose, str] = {
    "cpu": "planning, and training on the CPU",
    "cards": "training on a card",
    "several cards": "several cards of this machine",
    "several nodes": "several machines",
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is wrong, or may be."""

    what: str
    advice: str = ""
    """What to do about it."""
    hinders: tuple[Purpose, ...] = ()
    """What it makes impossible; nothing: a warning."""


def see_host(addresses: Sequence[str]) -> Facts:
    """What lies around a run on this machine; `addresses` are those of its cards on the PCI bus."""
    own = socket.gethostname()
    try:
        found = sorted({str(entry[4][0]) for entry in socket.getaddrinfo(own, None)})
    except OSError:
        found = None
    there = SHARED_MEMORY.exists()
    return {
        "name": own,
        "addresses": found,
        "shared_memory_bytes": shutil.disk_usage(SHARED_MEMORY).total if there else None,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "interfaces": list(see_interfaces()),
        "chosen_interfaces": {name: os.environ[name] for name in CHOICES if name in os.environ},
        "infiniband": [] if os.environ.get("NCCL_IB_DISABLE") == "1" else list(see_infiniband()),
        "card_links": [see_card_link(address) for address in addresses],
        "total_memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def see_interfaces(tree: Path = SYS) -> Iterator[str]:
    """The network interfaces that are up and may reach other machines."""
    for path in sorted((tree / "class/net").glob("*")):
        state = read_line(path / "operstate")
        if path.name != "lo" and not path.name.startswith(VIRTUAL) and state in ("up", "unknown"):
            yield path.name


def see_infiniband(tree: Path = SYS) -> Iterator[Facts]:
    """Active ports of RDMA: `link` is InfiniBand or Ethernet (RoCE)."""
    for port in sorted((tree / "class/infiniband").glob("*/ports/*")):
        if (read_line(port / "state") or "").endswith("ACTIVE"):
            rate = read_line(port / "rate")
            yield {"device": port.parent.parent.name, "link": read_line(port / "link_layer"), "rate": rate}


def see_card_link(address: str, tree: Path = SYS) -> Facts:
    """The link of a card to its host: lanes and speed, now and at most. An idle card slows it down."""
    names = ("current_link_width", "max_link_width", "current_link_speed", "max_link_speed")
    card = tree / "bus/pci/devices" / address
    return {"address": address, **{name: read_line(card / name) for name in names}}


def check(facts: Facts) -> list[Finding]:
    """All findings about what `doctor` has examined."""
    parts = (_check_cards, _check_card_links, _check_compilers, _check_machine, _check_network)
    return [finding for part in parts for finding in part(facts)]


def _check_cards(facts: Facts) -> Iterator[Finding]:
    cards = [device for device in facts["devices"] if device["device"] != "cpu"]
    if not cards:
        yield Finding(what=facts["no_card"], hinders=("cards", "several cards"))
        return
    for card in cards:
        if card["fault"] is not None:
            yield Finding(what=f"{card['device']}: {card['fault']}", hinders=("cards", "several cards"))
    if not facts["communication"]["nccl"]:
        yield Finding(what="torch is built without NCCL", hinders=("several cards",))
    if not any(package["name"] == "triton" and package["installed"] for package in facts["packages"]):
        yield Finding(
            what="triton is missing, so filter, norms and cross-entropy are slower",
            advice="pip install triton",
        )
    total = sum(card["memory_bytes"] for card in cards)
    if facts["surroundings"]["total_memory_bytes"] < total:
        yield Finding(
            what="the host has less memory than its cards have together, little for optimizer_offload and "
            "checkpoints under way",
            advice="state it in the cluster file, `host: {memory: ...}`",
        )


def _check_card_links(facts: Facts) -> Iterator[Finding]:
    for link in facts["surroundings"]["card_links"]:
        now, most = link["current_link_width"], link["max_link_width"]
        if now is not None and most is not None and now.isdigit() and 0 < int(now) < int(most):
            yield Finding(
                what=f"the card at {link['address']} has {now} of {most} PCIe lanes",
                advice="another slot or riser may give it all",
            )
        speed, fastest = (_number(link[f"{when}_link_speed"]) for when in ("current", "max"))
        if 0 < speed < fastest:
            yield Finding(
                what=f"the link of the card at {link['address']} runs at {speed:g} of {fastest:g} GT/s",
                advice="an idle card slows it down; if it stays so under load, look at slot, riser and BIOS",
            )


def _number(speed: str | None) -> float:
    """Of `16.0 GT/s PCIe`; 0 where it is not known."""
    first = (speed or "").partition(" ")[0]
    return float(first) if first.replace(".", "", 1).isdigit() else 0.0


def _check_compilers(facts: Facts) -> Iterator[Finding]:
    for fact in facts["compile"]:
        if fact["fault"] is not None:
            yield Finding(what=f"train.compile is not possible on {fact['device']}: {fact['fault']}")


def _check_machine(facts: Facts) -> Iterator[Finding]:
    here = facts["surroundings"]
    shared = here["shared_memory_bytes"]
    if shared is not None and shared < LEAST_SHARED_MEMORY:
        yield Finding(
            what=f"/dev/shm has {shared >> 20} MiB, and NCCL needs 1 GiB",
            advice="docker run --shm-size=8g, or --ipc=host",
            hinders=("several cards",),
        )
    if 0 <= here["open_files"] < LEAST_OPEN_FILES:
        yield Finding(
            what=f"{here['open_files']} open files are allowed, enough for some {here['open_files'] // 32} "
            "ranks",
            advice="ulimit -n 65536",
        )


def _check_network(facts: Facts) -> Iterator[Finding]:
    here = facts["surroundings"]
    chosen: dict[str, str] = here["chosen_interfaces"]
    gloo = chosen.get("GLOO_SOCKET_IFNAME")
    advice = "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface that the machines share"
    loopback = here["addresses"] is None or all(
        address.startswith("127.") or address == "::1" for address in here["addresses"]
    )
    if loopback and gloo is None:
        where = "does not resolve" if here["addresses"] is None else f"is {', '.join(here['addresses'])}"
        yield Finding(
            what=f"its own name {here['name']} {where}, where no other machine reaches it",
            advice=f"{advice}, or mend /etc/hosts",
            hinders=("several nodes",),
        )
    for name in (word for word in (gloo or "").split(",") if word):
        if name not in here["interfaces"]:
            has = ", ".join(here["interfaces"]) or "none"
            yield Finding(
                what=f"GLOO_SOCKET_IFNAME={gloo}, but no interface {name} is up",
                advice=f"name one of: {has}",
                hinders=("several nodes",),
            )
    if len(here["interfaces"]) > 1 and not chosen:
        yield Finding(what=f"several interfaces are up: {', '.join(here['interfaces'])}", advice=advice)
    kinds = {port["link"] for port in here["infiniband"]}
    if len(kinds) > 1:
        ports = ", ".join(f"{port['device']} {port['link']}" for port in here["infiniband"])
        yield Finding(
            what=f"ports of InfiniBand and of Ethernet are active ({ports}), and all pairs of cards must use "
            "one kind",
            advice="choose with NCCL_IB_HCA, alike on every node",
        )


def summary(facts: Facts, findings: Sequence[Finding]) -> str:
    """One line: what this machine is ready for, and what it is not, with the first reason and its remedy."""
    reasons: dict[Purpose, str] = {}
    for finding in findings:
        for purpose in finding.hinders:
            reasons.setdefault(purpose, words(finding))
    cards = [device for device in facts["devices"] if device["device"] != "cpu"]
    asked: list[Purpose] = [p for p in PURPOSES if p != "several cards" or len(cards) > 1]
    ready = [_aim(purpose, cards) for purpose in asked if purpose not in reasons]
    because: dict[str, list[str]] = {}
    for purpose in asked:
        if purpose in reasons:
            because.setdefault(reasons[purpose], []).append(PURPOSES[purpose])
    line = f"ready for: {'; '.join(ready)}"
    if because:
        told = (f"{' and '.join(purposes)}, because {why}" for why, purposes in because.items())
        line += f"; not for: {'; '.join(told)}"
    notes = sum(not finding.hinders for finding in findings)
    return f"{line}. {notes} note{'s' * (notes > 1)}: --verbose" if notes else line


def words(finding: Finding) -> str:
    """What is found, and in brackets what to do."""
    return f"{finding.what} ({finding.advice})" if finding.advice else finding.what


def _aim(purpose: Purpose, cards: Sequence[Facts]) -> str:
    """A purpose, with the cards that serve it."""
    if purpose != "cards":
        return PURPOSES[purpose]
    names = ", ".join(dict.fromkeys(card["type"] or card["name"] for card in cards))
    return f"training on {len(cards)} card{'s' * (len(cards) > 1)} ({names})"


# --- several machines ---------------------------------------------------------------------------------------

TIMEOUT_SECONDS = 120.0
"""In which a machine answers; its ops are tested meanwhile."""
RDMA = "RDMA"
MUST_AGREE = {
    "yuan-train": "install the same release everywhere",
    "torch": "install the same wheel everywhere",
    "CUDA of torch": "install the same wheel everywhere",
    "NCCL": "install the same torch, which brings its NCCL",
    RDMA: "all pairs of cards must use one kind: NCCL_IB_DISABLE=1 everywhere, or choose with NCCL_IB_HCA",
}
"""What the machines of a job must have in common, and what to do where they have not."""


def ask_nodes(nodes: Sequence[str], ssh: str, *, hidden: int) -> dict[str, Facts | str]:
    """What the doctor of each machine finds, or why it was not asked.

    `ssh` is a command, called as `SSH HOST COMMAND...`; the command is this interpreter's, at the same path.
    """
    words = [sys.executable, "-m", "yuan_train", "doctor", "--json", "--hidden-size", str(hidden)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        found = pool.map(lambda node: _ask([*ssh_words(ssh), node, *map(shlex.quote, words)]), nodes)
        return dict(zip(nodes, found, strict=True))


def _ask(command: Sequence[str]) -> Facts | str:
    found = ask_json(command, TIMEOUT_SECONDS)
    if not isinstance(found, str) and "summary" not in found:
        return f"its yuan-train is another release ({found.get('versions', {}).get('yuan-train')})"
    return found


def differences(found: Mapping[str, Facts]) -> dict[str, dict[str, list[str]]]:
    """By what differs, the machines of each value."""
    values: dict[str, dict[str, list[str]]] = {}
    for node, facts in found.items():
        for name, value in _compared(facts):
            values.setdefault(name, {}).setdefault(value, []).append(node)
    return {name: by_value for name, by_value in values.items() if len(by_value) > 1}


def _compared(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, version in facts["versions"].items():
        yield name, str(version)
    yield "CUDA of torch", str(facts["cuda"])
    yield "NCCL", str(facts["nccl"])
    yield "NVIDIA driver", str(facts["driver"])
    kinds = {port["link"] for port in facts["surroundings"]["infiniband"]}
    yield RDMA, " and ".join(sorted(map(str, kinds))) or "none"


def obstacles(found: Mapping[str, Facts | str]) -> list[str]:
    """Why the machines cannot run one job together; empty if they can."""
    reached = {node: facts for node, facts in found.items() if not isinstance(facts, str)}
    told = [f"{node} is not reached: {why}" for node, why in found.items() if isinstance(why, str)]
    unlike = differences(reached)
    told += [f"{name} differs" for name in MUST_AGREE if name in unlike]
    if len(found) > 1:
        told += [
            f"{node}: {finding['words']}"
            for node, facts in reached.items()
            for finding in facts["findings"]
            if "several nodes" in finding["hinders"]
        ]
    return told


def node_lines(found: Mapping[str, Facts | str]) -> Iterator[str]:
    """First what the machines are ready for together, then each by itself, then where they differ."""
    names, why = ", ".join(found), obstacles(found)
    yield (
        f"not for: a job over {names}, because {'; '.join(why)}" if why else f"ready for: a job over {names}"
    )
    for node, facts in found.items():
        yield f"{node}: {f'not reached: {facts}' if isinstance(facts, str) else facts['summary']}"
    reached = {node: facts for node, facts in found.items() if not isinstance(facts, str)}
    for name, by_value in differences(reached).items():
        yield difference_words(name, by_value) + (f" ({MUST_AGREE[name]})" if name in MUST_AGREE else "")


def difference_words(name: str, by_value: Mapping[str, Sequence[str]]) -> str:
    """What differs, with the machines of each value."""
    return f"{name} differs: " + "; ".join(f"{value} on {', '.join(on)}" for value, on in by_value.items())
