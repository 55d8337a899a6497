"""Looks at this machine, at --hosts over ssh, or at the machines of the Slurm job that it runs in, and writes
a commented cluster file: cards and memory, links between cards, networks, host memory, disks. What was not
found is said. A machine without a GPU counts as one card: its processor."""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shlex
import socket
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from yuan_train.cli.main import file_to_write
from yuan_train.config.devices import CATALOGUE, GIB, MIB, PCIE_BYTES_PER_SECOND, DeviceType, find_card
from yuan_train.config.errors import ConfigError

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
    add("--out", type=file_to_write, required=True, metavar="FILE", help="the cluster file to write")


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
    shown = f"yuan-train inspect {shlex.quote(arguments.out)}"
    print(f"written: {path}; `{shown}` shows what it says", file=sys.stderr)
    return 0


def _ask(arguments: argparse.Namespace) -> dict[str, Facts | str]:
    """What the doctor finds on each machine, by the name that its node gets."""
    from yuan_train.cli.doctor import ask_nodes, examine
    from yuan_train.machine.hosts import parse_hosts

    if arguments.hosts is not None:
        hosts = parse_hosts(arguments.hosts, arguments.ssh)
        found = ask_nodes([host.name for host in hosts], arguments.ssh, hidden=HIDDEN)
        return dict(zip([host.address for host in hosts], found.values(), strict=True))
    if "SLURM_JOB_ID" in os.environ:
        return _ask_slurm()
    return {socket.gethostname(): examine(hidden=HIDDEN)}


def _ask_slurm() -> dict[str, Facts | str]:
    """The machines of the job; of a heterogeneous one, those of each of its components in turn."""
    from yuan_train.cli.doctor import ask_nodes
    from yuan_train.machine.hosts import SRUN, slurm_parts

    found: dict[str, Facts | str] = {}
    for group, names in slurm_parts():
        found |= ask_nodes(names, shlex.join([*SRUN, "--cpus-per-task=1", *group, "-w"]), hidden=HIDDEN)
    return found


def cluster_text(name: str, found: Mapping[str, Facts]) -> tuple[str, list[str]]:
    """A cluster file of the machines, by name of their node, and what a person should know of them."""
    from yuan_train.cli.doctor import difference_words, differences

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


NVLINK_GIGABYTES = {6: 20.0, 7: 25.0, 8: 25.0, 9: 26.5}
"""What one NVLink gives per direction, by major compute capability, where nvidia-smi is silent (NVIDIA)."""
BRIDGE_GIGABYTES = 14.0
"""The same of the bridges of GeForce and RTX cards (compute capability 8.6)."""
SWITCHED, THROUGH_HOST = 0.8, 0.5
"""Of a card's PCIe rate: to a card behind the same PCIe switch, and to another through the host."""
LATENCY = {"NV": "3 us", "PIX": "10 us", "PXB": "10 us"}
HOST_LATENCY = "15 us"
DISK_RATES = {
    "NVMe": "{read: 3 GB/s, write: 1.5 GB/s",
    "SSD": "{read: 500 MB/s, write: 400 MB/s",
    "virtual disk": "{read: 500 MB/s, write: 400 MB/s",
    "turning disk": "{read: 150 MB/s, write: 130 MB/s",
}
"""What disks of a kind usually give; of several, the fastest kind."""
SLICES = {"A30": 4}
"""Parts into which MIG divides the multiprocessors of a card; 7 of all others."""
HOST_SHARE = 8 * GIB
"""What is left to the host where its processor is the card, as `memory.host_reserved`; at most half."""


@dataclass(kw_only=True)
class NodeText:
    """A node of a cluster file, line by line."""

    name: str
    lines: list[str] = field(default_factory=list[str])
    device_types: dict[str, str] = field(default_factory=dict[str, str])
    """Entries of the types that the catalogue lacks, by name."""
    notes: list[str] = field(default_factory=list[str])
    """What was not found, or should be mended."""


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """A card as nvidia-smi, or else torch, sees it."""

    index: int
    name: str
    memory: float
    capability: float | None = None
    pcie: float | None = None
    """Bytes a second of its link to the host."""


def describe(name: str, facts: Facts, *, several: bool) -> NodeText:
    """The entry of a machine, whose node gets `name`; with `several` nodes a network is needed."""
    node = NodeText(name=name)
    versions = (("torch", facts["versions"].get("torch")), ("NVIDIA driver", facts["driver"]))
    told = [f"{what} {version or 'not found'}" for what, version in (*versions, ("NCCL", facts["nccl"]))]
    node.lines.append(f"  - name: {_quoted(name)}    # {', '.join(told)}")
    cards, types = _cards(node, facts)
    if cards:
        _add_cards(node, cards, types)
        if len(cards) > 1:
            _add_link(node, cards, facts["tools"])
    else:
        _add_processor(node, facts)
    _add_network(node, facts, of_cards=bool(cards), several=several)
    _add_host(node, facts, cards)
    _add_disk(node, facts["tools"])
    return node


def _quoted(name: str) -> str:
    """A host's name, which may be a number to YAML."""
    return name if re.fullmatch(r"[A-Za-z_][\w.-]*", name) else f"'{name}'"


def _cards(node: NodeText, facts: Facts) -> tuple[list[_Seen], list[str]]:
    """The machine's cards that processes can use, and their types; what cannot be used is noted."""
    tools, by_torch = facts["tools"], facts["devices"][1:]
    whole = [card for card in tools["cards"] if card["mig"] != "Enabled"]
    divided = [card for card in tools["cards"] if card["mig"] == "Enabled"]
    if divided:
        _note_divided(node, whole, divided, tools["mig"])
    cards = [_seen(card) for card in whole]
    types = [_type_of(node, card) for card in cards]
    if divided and tools["mig"] and not whole:
        cards, types = _slice(node, _seen(divided[0]), tools["mig"][0])
    if not tools["cards"]:
        cards = [
            _Seen(index=i, name=card["name"], memory=card["memory_bytes"]) for i, card in enumerate(by_torch)
        ]
        types = [card["type"] or _type_of(node, seen) for card, seen in zip(by_torch, cards, strict=True)]
    if not cards and tools["on_the_bus"]:
        node.notes.append(
            f"{tools['on_the_bus']} NVIDIA cards are on the PCI bus, but no driver shows them "
            f"({tools['fault']}): install or mend the driver and discover again; until then "
            "its processor is the card"
        )
    elif cards and len(by_torch) < len(cards):
        why = f" ({facts['no_card']})" if facts["no_card"] else ""
        node.notes.append(f"torch sees {len(by_torch)} of the {len(cards)} cards{why}; runs need all of them")
    node.notes += [f"{card['device']}: {card['fault']}" for card in by_torch if card.get("fault")]
    return cards, types


def _seen(card: Facts) -> _Seen:
    generation, lanes = card["pcie_generation"], card["pcie_lanes"]
    pcie = None
    if isinstance(generation, float) and isinstance(lanes, float):
        pcie = PCIE_BYTES_PER_SECOND[4] * 2 ** (generation - 4)
        pcie = PCIE_BYTES_PER_SECOND.get(int(generation), pcie) * lanes / 16
    capability = card["capability"] if isinstance(card["capability"], float) else None
    memory = card["memory_mib"] * MIB if isinstance(card["memory_mib"], float) else 0.0
    name = str(card["name"])
    return _Seen(index=int(card["index"]), name=name, memory=memory, capability=capability, pcie=pcie)


def _note_divided(node: NodeText, whole: list[Facts], divided: list[Facts], parts: Sequence[Facts]) -> None:
    which = ", ".join(f"{card['index']:g}" for card in divided)
    use = (
        "the other cards stand here" if whole else f"{'one instance stands' if parts else 'none stands'} here"
    )
    node.notes.append(
        f"MIG is on on card {which} ({len(parts)} instances): a process sees a single instance, and NCCL "
        f"joins none, so {use}. Whole: sudo nvidia-smi -i {which.replace(' ', '')} -mig 0"
    )


def _slice(node: NodeText, card: _Seen, part: Facts) -> tuple[list[_Seen], list[str]]:
    """The one instance of MIG that a process sees, as a card of a type of its own."""
    whole = find_card(card.name, card.memory)
    base = CATALOGUE[whole] if whole else _stand_in(card)[1]
    share, memory = (
        int(part["slices"]) / SLICES.get(whole or "", 7),
        round(float(part["gigabytes"]) * 0.95 * 1024) * MIB,
    )
    kind = replace(
        base,
        memory=memory,
        fp32=base.fp32 * share,
        bf16=base.bf16 * share if base.bf16 else None,
        fp16=base.fp16 * share if base.fp16 else None,
        memory_bandwidth=base.memory_bandwidth * min(1.0, memory / base.memory),
    )
    name = f"{whole or _slug(card.name)}-MIG-{part['profile']}"
    node.device_types[name] = _type_text(name, kind, f"an instance of {card.name}: its share of the rates")
    return [replace(card, memory=memory)], [name]


def _type_of(node: NodeText, card: _Seen) -> str:
    """The catalogue's name; else that of an entry of its own, with the rates of a card that is like it."""
    known = find_card(card.name, card.memory or None)
    if known is not None:
        return known
    like, base = _stand_in(card)
    name = _slug(card.name)
    # Torch sees some 2 % less than nvidia-smi.
    kind = replace(
        base, memory=round(0.98 * card.memory / MIB) * MIB or base.memory, capability=card.capability
    )
    node.device_types[name] = _type_text(name, kind, f"rates are those of {like}: put its own, or profile")
    note = f"{card.name} is not in the catalogue; its rates are taken from {like}: put its own, or profile"
    if note not in node.notes:
        node.notes.append(note)
    return name


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9]+", "-", name.removeprefix("NVIDIA ")).strip("-")


def _stand_in(card: _Seen) -> tuple[str, DeviceType]:
    """The catalogue's card of the nearest compute capability, then of the nearest memory."""

    def distance(entry: tuple[str, DeviceType]) -> tuple[float, float]:
        known = entry[1].capability
        apart = 99.0 if known is None else abs(known - (card.capability or 8.0))
        return apart, abs(entry[1].memory - card.memory)

    return min(CATALOGUE.items(), key=distance)


def _type_text(name: str, kind: DeviceType, comment: str) -> str:
    from yuan_train.config.load import as_plain

    plain = {key: value for key, value in as_plain(kind).items() if value is not None}
    return f"  # {comment}\n  {name}: {{{', '.join(f'{key}: {value}' for key, value in plain.items())}}}"


def _add_cards(node: NodeText, cards: Sequence[_Seen], types: Sequence[str]) -> None:
    names = " and ".join(dict.fromkeys(card.name for card in cards))
    if len(set(types)) == 1:
        node.lines += [f"    device: {types[0]}    # {names}", f"    devices: {len(types)}"]
        return
    runs = [f"{{type: {kind}, count: {len(list(own))}}}" for kind, own in itertools.groupby(types)]
    node.lines.append(f"    devices: [{', '.join(runs)}]    # {names}, as nvidia-smi numbers them")


def _add_link(node: NodeText, cards: Sequence[_Seen], tools: Facts) -> None:
    """The slowest pair of cards stands for all; a profile measures each kind."""
    here = {card.index for card in cards}
    kinds = [
        kind for pair, kind in tools["pairs"].items() if here.issuperset(int(end) for end in pair.split("-"))
    ]
    if not kinds:
        kinds = ["unknown"]
        node.notes.append("what joins its cards was not found; taken to be PCIe through the host")
    rates = {kind: _pair_rate(kind, cards, tools["nvlink_gigabytes"]) for kind in kinds}
    slowest = min(kinds, key=rates.__getitem__)
    latency = LATENCY.get("NV" if slowest.startswith("NV") else slowest, HOST_LATENCY)
    counts = ", ".join(f"{number} {kind}" for kind, number in Counter(kinds).most_common())
    words = f"pairs of cards: {counts}"
    if len(rates) > 1:
        words += f"; {slowest}, the slowest, stands here: a profile measures each kind"
    node.lines.append(f"    link: {{bandwidth: {_rate(rates[slowest])}, latency: {latency}}}    # {words}")


def _pair_rate(kind: str, cards: Sequence[_Seen], nvlink_gigabytes: float | None) -> float:
    """Bytes a second per direction of a pair of cards, by what `nvidia-smi topo -m` calls their link."""
    if kind.startswith("NV") and kind[2:].isdigit():
        capability = max((card.capability or 0.0) for card in cards)
        usual = BRIDGE_GIGABYTES if capability == 8.6 else NVLINK_GIGABYTES.get(int(capability), 25.0)
        return int(kind[2:]) * (nvlink_gigabytes or usual) * 1e9
    pcie = min(card.pcie or PCIE_BYTES_PER_SECOND[4] for card in cards)
    return pcie * (SWITCHED if kind in ("PIX", "PXB") else THROUGH_HOST)


def _rate(value: float) -> str:
    return f"{value / 1e9:.3g} GB/s"


def _add_processor(node: NodeText, facts: Facts) -> None:
    from yuan_train.config.plan import PROCESSOR

    cpu, name = facts["devices"][0], f"{PROCESSOR}-{node.name}"
    total = _host_bytes(facts)
    flops = float(f"{cpu['fp32_flops']:.3g}")
    kind = DeviceType(
        memory=(total - min(HOST_SHARE, total // 2)) // MIB * MIB,
        reserved=300 * MIB,
        fp32=flops,
        bf16=flops,
        memory_bandwidth=10e9,
        host_link=10e9,
        host_memory_bandwidth=10e9,
        backend="gloo",
    )
    comment = f"{cpu['name']}: matrix products as measured just now; rates of memory are assumed"
    node.device_types[name] = _type_text(name, kind, comment)
    node.lines += [f"    device: {_quoted(name)}    # no GPU: the processor, {cpu['name']}", "    devices: 1"]


def _host_bytes(facts: Facts) -> int:
    """Memory of the machine, or what its control group leaves of it where that is less."""
    total: int = facts["surroundings"]["total_memory_bytes"]
    limit = facts["tools"]["memory_limit_bytes"]
    return min(total, limit) if limit else total


def _add_network(node: NodeText, facts: Facts, *, of_cards: bool, several: bool) -> None:
    """RDMA, all ports together as NCCL uses them; else, and for processors, the fastest interface."""
    from yuan_train.cli.doctor import VIRTUAL

    ports = [port for port in facts["surroundings"]["infiniband"] if _gigabits(port["rate"])]
    fast = [port for port in ports if port["link"] == "InfiniBand"] or ports
    if fast and of_cards:
        total = sum(_gigabits(port["rate"]) for port in fast)
        words = f"{len(fast)} x {fast[0]['link']} of {_gigabits(fast[0]['rate']):g} Gb/s, all at once"
        node.lines.append(f"    network: {{bandwidth: {total:g} Gb/s, latency: 10 us}}    # {words}")
        return
    up = [
        one for one in facts["tools"]["networks"]
        if one["name"] != "lo" and not one["name"].startswith(VIRTUAL) and one["state"] in ("up", "unknown")
    ]  # fmt: skip
    up = [one for one in up if one["is_port"]] or up
    known = [one for one in up if one["megabits"]]
    if known:
        best = max(known, key=lambda one: one["megabits"])
        latency = "30 us" if best["megabits"] >= 10_000 else "100 us"
        rate = best["megabits"] / 1000
        node.lines.append(
            f"    network: {{bandwidth: {rate:g} Gb/s, latency: {latency}}}    # {best['name']}"
        )
    elif up or several:
        where = f"the rate of {', '.join(one['name'] for one in up)}" if up else "a network that is up"
        node.notes.append(f"{where} was not found; 1 Gb/s is assumed: put its own, or profile")
        node.lines.append("    network: {bandwidth: 1 Gb/s, latency: 100 us}    # ASSUMED: no rate was found")


def _gigabits(rate: str | None) -> float:
    """Of `200 Gb/sec (4X HDR)`; 0 where it is not told."""
    found = re.match(r"([\d.]+) Gb/s", rate or "")
    return float(found[1]) if found else 0.0


def _add_host(node: NodeText, facts: Facts, cards: Sequence[_Seen]) -> None:
    total = _host_bytes(facts)
    extra, words = "", ""
    lanes = [card.pcie for card in cards if card.pcie]
    if cards and len(lanes) == len(cards):
        extra = f", link_bandwidth: {_rate(sum(lanes))}"
        words = "    # link_bandwidth: PCIe of all cards"
    if not cards:
        total, words = min(HOST_SHARE, total // 2), "    # beside what the processor has as a card"
    node.lines.append(f"    host: {{memory: {total / GIB:.4g} GiB{extra}}}{words}")


def _add_disk(node: NodeText, tools: Facts) -> None:
    disks = tools["disks"]
    if not disks:
        node.notes.append("no disk was found; a plan that puts state on disks assumes a modest NVMe disk")
        return
    listed = ", ".join(f"{one['name']} ({one['kind']}, {one['bytes'] / 1e12:.3g} TB)" for one in disks[:8])
    rates = next(DISK_RATES[kind] for kind in DISK_RATES if any(one["kind"] == kind for one in disks))
    room = f"capacity: {tools['free_bytes'] / GIB:.4g} GiB}}"
    node.lines.append(
        f"    # Disks: {listed}; rates are usual ones, the capacity is free in the working directory"
    )
    node.lines.append(f"    disk: {rates}, {room}")
