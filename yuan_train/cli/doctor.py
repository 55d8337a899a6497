"""Says in a line what this machine is ready for, what it is not, and why. With --verbose also what may go
wrong, what is installed, what is missing and what does not work without it, the cards, which implementation
each op uses on them, and why not a faster one."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import platform
import re
import resource
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from yuan_train import __version__
from yuan_train.config.errors import INSTALL, TESTED, ConfigError, DiskError
from yuan_train.machine.hosts import ask_json, run_tool, ssh_words

if TYPE_CHECKING:
    from yuan_train.parallel.device import Device

Facts = dict[str, Any]

SYS = Path("/sys")


@dataclass(frozen=True, kw_only=True)
class Package:
    """An optional package."""

    name: str
    module: str
    without: str
    """What does not work, or works worse, without it."""
    attribute: str | None = None
    """Attribute of `module` that other packages of the same name lack; None: no such package is known."""
    mistaken_for: str = ""
    """Note if the attribute is missing: which other package, or broken installation, was found."""


PACKAGES = (
    Package(
        name="triton",
        module="triton",
        without="filter, norms and cross-entropy run as torch operations on CUDA cards: slower",
    ),
    Package(
        name="tensorboard",
        module="tensorboard",
        without="no TensorBoard files (extra [report]); metrics.jsonl holds everything",
    ),
    Package(
        name="megatron-core", module="megatron.core", without=f"`engine: megatron` is not possible; {INSTALL}"
    ),
    Package(name="pyarrow", module="pyarrow", without="preprocess reads no Parquet files (extra [parquet])"),
    Package(
        name="apex",
        module="apex.normalization.fused_layer_norm",
        attribute="fused_rms_norm_affine",
        mistaken_for="an `apex` without apex.normalization.fused_layer_norm.fused_rms_norm_affine: PyPI's is "
        "another project, not NVIDIA's; uninstall it",
        without="nothing: our norms are already fused",
    ),
    Package(
        name="TransformerEngine",
        module="transformer_engine.pytorch.cpp_extensions",
        attribute="rmsnorm_fwd",
        mistaken_for="transformer_engine without its PyTorch part, or it cannot be imported",
        without="nothing: our norms are already fused",
    ),
)

FUSED_ADAM = (("TransformerEngine", "transformer_engine.pytorch.optimizers"), ("apex", "apex.optimizers"))
"""Where megatron-core looks for a fused AdamW, in its order; PyPI's apex has no such module."""

LOCAL_FILE_SYSTEMS = ("btrfs", "ext2", "ext3", "ext4", "overlay", "ramfs", "tmpfs", "xfs", "zfs")
"""Types of /proc/mounts that other nodes see only if this machine exports them."""

CORE = ("torch", "numpy", "sentencepiece", "tokenizers", "jinja2", "PyYAML", "pydantic", "safetensors")


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--hidden-size", type=int, default=2048, metavar="H", help="of the model (2048)")
    add("--config", metavar="FILE", help="a run file: checks its directories of checkpoints and of state")
    add("--plan", metavar="FILE", help="its plan, with --config: the nodes that must share it")
    add("--nodes", metavar="A,B,C", help="ask these machines over ssh, and say where they differ")
    add("--ssh", default="ssh", metavar="CMD", help="with --nodes: called as CMD HOST COMMAND... (ssh)")
    add("--verbose", action="store_true", help="print everything that was found")
    add("--json", action="store_true", help="print one JSON object, with everything")


def run(arguments: argparse.Namespace) -> int:
    """Print what was found. A missing package is no error."""
    if arguments.plan and not arguments.config:
        raise ConfigError("--plan: needs --config F too, the run whose checkpoint directory is checked")
    if arguments.nodes:
        return _run_nodes(arguments)
    of_run: Facts = {}
    if arguments.config:
        from yuan_train.config.run import load_run

        of_run["checkpoints"] = _checkpoint_facts(arguments.config, arguments.plan)
        of_run["disk"] = disk_facts(load_run(arguments.config).memory.disk_directory)
    facts = examine(hidden=arguments.hidden_size) | of_run
    if arguments.json:
        print(json.dumps(facts, ensure_ascii=False))
        return 0
    print(facts["summary"])
    if arguments.verbose:
        print("\n".join([*(f"  {finding['words']}" for finding in facts["findings"]), "", *_lines(facts)]))
    elif arguments.config:
        print("\n".join(_run_lines(facts)))
    return 0


def _run_nodes(arguments: argparse.Namespace) -> int:
    """Ask other machines. Exit code 2 unless all of them answer, and can run one job."""
    nodes = list(dict.fromkeys(name.strip() for name in arguments.nodes.split(",") if name.strip()))
    if not nodes:
        raise ConfigError("--nodes: wanted names of machines, such as a,b,c")
    found = ask_nodes(nodes, arguments.ssh, hidden=arguments.hidden_size)
    if arguments.json:
        print(json.dumps({"nodes": found, "obstacles": obstacles(found)}, ensure_ascii=False))
    else:
        print("\n".join(node_lines(found)))
    return 2 if obstacles(found) else 0


def examine(*, hidden: int) -> Facts:
    """Versions, packages, devices and ops; `hidden` is the length of a row."""
    import torch
    import torch.distributed as dist
    from yuan_kernels import ops

    from yuan_train.train.job import compiler_fault, driver_version, nccl_version, why_no_card

    devices = _devices()
    found: Facts = {
        "versions": {
            "yuan-train": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in CORE},
        },
        "packages": [_package_facts(package) for package in PACKAGES],
        "communication": {
            "gloo": dist.is_available() and dist.is_gloo_available(),
            "nccl": dist.is_available() and dist.is_nccl_available(),
        },
        "cuda": torch.version.cuda,
        "driver": driver_version(),
        "nccl": nccl_version(),
        "devices": devices,
        "no_card": None if len(devices) > 1 else why_no_card(),
        "host": host_facts(),
        "tools": see_tools(),
        "ops": [fact for device in devices for fact in _op_facts(device, hidden)],
        # After the ops, whose tests wake the cards' links up.
        "surroundings": see_host([card["pci_address"] for card in devices[1:] if card["pci_address"]]),
        "fp32_products": ops.fp32_products(),
        "bf16_products": ops.bf16_products(),
        # What torch.compile (`train.compile`) lacks on each device; None: it has all that it needs.
        "compile": [
            {"device": name, "fault": compiler_fault(name.partition(":")[0])}
            for name in (device["device"] for device in devices)
        ],
        "megatron": _megatron_facts(),
    }
    findings = check(found)
    return {
        "summary": summary(found, findings),
        "findings": [asdict(finding) | {"words": words(finding)} for finding in findings],
        **found,
    }


def _checkpoint_facts(config: str, plan: str | None) -> Facts:
    """Where a run saves, whether this process may write there, and the nodes that must share it.

    `directory` and the rest are None if the run saves no checkpoints, `file_system` where it is not known.
    """
    from yuan_train.cli.launch_hosts import nodes_of
    from yuan_train.config.plan_constraints import load_plan
    from yuan_train.config.run import load_run

    directory = load_run(config).checkpoint.directory
    nodes = [node.name for node in nodes_of(load_plan(plan))] if plan else None
    if directory is None:
        return {"directory": None, "writable": None, "file_system": None, "nodes": nodes}
    path = Path(directory).absolute()
    there = next(folder for folder in (path, *path.parents) if folder.exists())
    return {
        "directory": str(path),
        "writable": there.is_dir() and os.access(there, os.W_OK | os.X_OK),
        "file_system": _file_system(there.resolve()),
        "nodes": nodes,
    }


def _file_system(path: Path, mounts: Path = Path("/proc/self/mounts")) -> str | None:
    """The type of the file system that a path lies on; None if this machine does not tell."""
    if not mounts.exists():
        return None
    found: dict[Path, str] = {}
    for line in mounts.read_text(encoding="utf-8", errors="replace").splitlines():
        _, point, kind, *_ = line.split()
        found[Path(point.replace("\\040", " "))] = kind
    return next((found[folder] for folder in (path, *path.parents) if folder in found), None)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _package_facts(package: Package) -> Facts:
    """Version and state of a package. Imported only if another may have its name: it may take seconds."""
    top = package.module.partition(".")[0]
    facts: Facts = {"name": package.name, "version": None, "installed": False, "note": package.without}
    try:
        found = importlib.util.find_spec(package.module if package.attribute is None else top) is not None
    except ImportError:
        found = False
    if not found:
        return facts
    if package.attribute is not None and not _has_attribute(package.module, package.attribute):
        return facts | {"note": package.mistaken_for}
    return facts | {"version": _version(package.name), "installed": True, "note": ""}


def _has_attribute(module: str, attribute: str) -> bool:
    try:
        return hasattr(importlib.import_module(module), attribute)
    except Exception:  # A package for another CUDA, or another torch, may raise anything.
        return False


def _devices() -> list[Facts]:
    """The CPU, then the cards."""
    import torch

    from yuan_train.parallel.device import visible_cards
    from yuan_train.profile.units import machine_name

    capabilities = getattr(torch.cpu, "get_capabilities", dict)()
    fast = [name for name in ("amx_bf16", "avx512_bf16") if capabilities.get(name)]
    cpu: Facts = {
        "device": "cpu",
        "name": machine_name(),
        "bf16": bool(fast),
        "fp32_flops": cpu_flops(),
        "note": f"bf16 by {fast[0]}" if fast else "bf16 is computed in fp32: no faster, half the memory",
    }
    return [cpu, *map(_card, visible_cards())]


def _card(card: Device) -> Facts:
    from yuan_train.train.job import architecture_fault, driver_fault, numa_node, type_of

    facts = card.facts()
    assert facts is not None
    return {
        "device": str(card.torch),
        "name": facts.name,
        "type": type_of(facts),
        "memory_bytes": facts.memory,
        "pci_address": facts.pci_address,
        "numa_node": numa_node(facts.pci_address),
        "capability": f"{facts.capability[0]}.{facts.capability[1]}",
        "bf16": facts.has_bf16,
        "fault": driver_fault(facts.cuda, facts.driver) or architecture_fault(facts),
        "note": "" if facts.has_bf16 else "no bf16: train with precision fp16",
    }


def _op_facts(device: Facts, hidden: int) -> Iterator[Facts]:
    """The implementation of each op, in the precision of training on this device."""
    import torch
    from yuan_kernels import ops

    if device.get("fault") is not None:
        # No test of an op would run.
        return
    without_bf16 = torch.float32 if device["device"] == "cpu" else torch.float16
    precision = torch.bfloat16 if device["bf16"] else without_bf16
    for choice in ops.choices(torch.device(device["device"]), precision, hidden=hidden):
        yield {
            "op": choice.op,
            "device": choice.device,
            "dtype": str(choice.dtype).removeprefix("torch."),
            "implementation": choice.implementation,
            "reason": choice.reason,
        }


def _megatron_facts() -> Facts:
    """What `engine: megatron` would run. It chooses its optimizer by itself, as here."""
    found = (name for name, module in FUSED_ADAM if _has_attribute(module, "FusedAdam"))
    fused = next(found, None)
    return {
        "version": _version("megatron-core"),
        "tested_versions": list(TESTED),
        "optimizer_step": "torch's AdamW" if fused is None else f"{fused}'s FusedAdam",
    }


# --- as text -----------------------------------------------------------------------------------------------


def _lines(facts: Facts) -> Iterator[str]:
    yield "versions"
    yield from _columns([[name, version or "MISSING"] for name, version in facts["versions"].items()])
    yield "\noptional packages"
    yield from _columns(
        [
            [p["name"], (p["version"] or "installed") if p["installed"] else "-", p["note"]]
            for p in facts["packages"]
        ]
    )
    yield "\ndevices"
    yield from _columns(
        [[d["device"], d["name"], d["note"] or "bf16", _node_words(d)] for d in facts["devices"]]
    )
    yield f"  {host_line(facts['host'])}"
    if facts["no_card"] is not None:
        yield f"  no card was found: {facts['no_card']}"
    elif facts["cuda"] is not None:
        yield f"  driver {facts['driver']}, CUDA {facts['cuda']}, NCCL {facts['nccl']}"
    for link in facts["surroundings"]["card_links"]:
        lanes, speed = (f"{link[f'current_link_{x}']} of {link[f'max_link_{x}']}" for x in ("width", "speed"))
        yield f"  link of the card at {link['address']}: lanes {lanes}, {speed} (an idle card slows it down)"
    backends = [name for name, available in facts["communication"].items() if available]
    yield f"  communication backends: {' and '.join(backends) or 'none'}"
    yield "\nseveral nodes"
    here = facts["surroundings"]
    yield f"  {here['name']} is {', '.join(here['addresses'] or ('not known to any resolver',))}"
    yield f"  interfaces that are up: {', '.join(here['interfaces']) or 'none'}"
    ports = [f"{port['device']} ({port['link']}, {port['rate']})" for port in here["infiniband"]]
    yield f"  active ports of RDMA: {', '.join(ports) or 'none'}"
    yield from _run_lines(facts)
    yield "\nops"
    yield from _columns(
        [[o["op"], o["device"], o["dtype"], o["implementation"], o["reason"]] for o in facts["ops"]]
    )
    yield f"  large fp32 products on the CPU go through {facts['fp32_products']} (tested just now)"
    yield f"  bf16 products on the CPU go through {facts['bf16_products']}"
    for fact in facts["compile"]:
        state = f"is not possible: {fact['fault']}" if fact["fault"] else "has the compilers that it needs"
        yield f"  train.compile on {fact['device']} {state}"
    yield "\nengine: megatron"
    yield from _megatron_lines(facts["megatron"])


def _run_lines(facts: Facts) -> Iterator[str]:
    """What a run needs of this machine's file systems."""
    yield from _shared_lines(facts.get("checkpoints"))
    if "disk" in facts:
        yield f"  {disk_line(facts['disk'])}"


def _megatron_lines(found: Facts) -> Iterator[str]:
    version, tested = found["version"], ", ".join(found["tested_versions"])
    if version is None:
        yield f"  not possible: megatron-core is not installed ({INSTALL}; tested with {tested})"
        return
    yield f"  megatron-core {version}; tested with {tested}"
    step = found["optimizer_step"]
    yield f"  optimizer step: {step}; TransformerEngine's FusedAdam, else NVIDIA apex's, replaces torch's"
    yield "  filter, norms, rotary embedding, attention: ours, as above; no other package replaces them"
    yield "  linears, feed-forward, embedding, cross-entropy: megatron-core's"


def _node_words(device: Facts) -> str:
    if "numa_node" not in device:
        return ""
    node = device["numa_node"]
    return "NUMA node not known" if node is None else f"NUMA node {node}"


def _shared_lines(saving: Facts | None) -> Iterator[str]:
    """What the nodes of a run must share, and for a given run, how it is with that on this machine."""
    yield "  checkpoint.directory must be one directory that all nodes mount; the rest may be copies on each"
    if saving is None:
        yield "  `yuan-train doctor --config RUN --plan PLAN` looks at a run's on this machine"
        return
    if saving["directory"] is None:
        yield "  the run saves no checkpoints: checkpoint.directory is not set"
        return
    writable, kind, nodes = saving["writable"], saving["file_system"], saving["nodes"]
    words = "writable" if writable else "NOT WRITABLE"
    yield f"  {saving['directory']}: {words} here, on {kind or 'an unknown file system'}"
    if nodes is not None and len(nodes) > 1:
        local = f"; but {kind} is a disk of this machine" if kind in LOCAL_FILE_SYSTEMS else ""
        yield f"  the plan's nodes share it: {', '.join(nodes)}{local}"


def _columns(rows: list[list[str]]) -> Iterator[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    for row in rows:
        yield ("  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))).rstrip()


NUMA_NODES = Path("/sys/devices/system/node")


def host_facts() -> Facts:
    """What stages may put on this host: bytes, None without a limit."""
    from yuan_train.parallel.device import MAX_SHARE, available_bytes

    available, (locked, _) = available_bytes(), resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return {
        "available_bytes": None if math.isinf(available) else MAX_SHARE * available,
        "memlock_bytes": None if locked == resource.RLIM_INFINITY else locked,
        "numa_nodes": len(list(NUMA_NODES.glob("node[0-9]*"))) or None,
    }


def cpu_flops(size: int = 512, repeats: int = 4) -> float:
    """FLOP/s of fp32 matrix products on the threads that torch has here: the best of a few."""
    import torch

    left = torch.ones(size, size)
    seconds: list[float] = []
    for _ in range(repeats):
        start = time.perf_counter()
        torch.mm(left, left)
        seconds.append(time.perf_counter() - start)
    return 2.0 * size**3 / min(seconds)


def host_line(host: Facts) -> str:
    """How much stages may put on this host, and whether it may be pinned."""
    from yuan_train.config.units import show_bytes

    available, locked, nodes = host["available_bytes"], host["memlock_bytes"], host["numa_nodes"]
    room = "not known" if available is None else f"at most {show_bytes(available)} now"
    limit = "no limit of locked memory"
    if locked is not None:
        limit = f"locked memory is limited to {show_bytes(locked)} (`ulimit -l`): CUDA may not pin it"
    where = "NUMA nodes not known" if nodes is None else f"{nodes} NUMA node{'s' * (nodes > 1)}"
    tiers = "optimizer_offload, activation_offload and parameter_offload"
    return f"host memory for {tiers}: {room}; {limit}; {where}"


def disk_facts(directory: str | None) -> Facts:
    """Of `memory.disk_directory`: whether a rank could keep its state there now, and how."""
    from yuan_train.parallel.optimizer_state import PAGE, DiskFile

    facts: Facts = {"directory": directory, "fault": None, "is_direct": None, "free_bytes": None}
    if directory is None:
        return facts
    own = Path(directory).absolute()
    # A run makes the directory; here the nearest one that is there is tried, and nothing stays behind.
    there = next(folder for folder in (own, *own.parents) if folder.is_dir())
    facts["free_bytes"] = shutil.disk_usage(there).free
    try:
        facts["is_direct"] = DiskFile(there, PAGE).is_direct
    except DiskError as error:
        facts["fault"] = str(error)
    return facts


def disk_line(disk: Facts) -> str:
    """The same as text."""
    from yuan_train.config.units import show_bytes

    if disk["directory"] is None:
        return "the run puts no state on disks: memory.disk_directory is not set"
    if disk["fault"] is not None:
        return f"NOT USABLE for optimizer_disk: {disk['fault']}"
    way = "direct requests work"
    if not disk["is_direct"]:
        way = "no direct requests (O_DIRECT): the page cache keeps a copy, and takes memory"
    free = show_bytes(disk["free_bytes"])
    return f"{disk['directory']}: writable, {free} free, room can be reserved (fallocate), {way}"


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


NVIDIA_SMI = "nvidia-smi"
FIELDS = {
    "index": "index",
    "name": "name",
    "memory_mib": "memory.total",
    "pci_address": "pci.bus_id",
    "driver": "driver_version",
    "mig": "mig.mode.current",
    "pcie_generation": "pcie.link.gen.max",
    "pcie_lanes": "pcie.link.width.max",
    "capability": "compute_cap",
}
"""What is asked of each card; drivers before 510 do not know the last one, and answer nothing with it."""
NVIDIA, DISPLAYS = "0x10de", ("0x0300", "0x0302")
"""Of PCI: the maker, and how the classes of its cards begin."""
NO_DISKS = ("loop", "ram", "zram", "dm-", "md", "sr", "fd", "nbd")
"""How the names of block devices begin that are no disk of their own."""
VIRTUAL = ("docker", "veth", "br-", "virbr", "cni", "flannel", "cali", "tun", "tap")
"""How the names of interfaces begin that reach no other machine."""
SECTOR = 512
"""Bytes in which the kernel counts the size of a disk, whatever its own sectors are."""
_MIG = re.compile(r"\s*MIG\s+(?P<profile>(?:\d+c\.)?(?P<slices>\d+)g\.(?P<gigabytes>\d+)gb\S*)\s+Device")


def see_tools(tree: Path = SYS) -> Facts:
    """Cards by nvidia-smi, the kind of link of each pair, rates of networks, disks; `tree` is /sys."""
    listing, fault = run_tool(NVIDIA_SMI, "-L")
    cards = _see_cards() if fault is None else []
    matrix, _ = run_tool(NVIDIA_SMI, "topo", "-m") if len(cards) > 1 else ("", None)
    lines, _ = run_tool(NVIDIA_SMI, "nvlink", "-s") if "NV" in matrix else ("", None)
    displays = [
        device
        for device in (tree / "bus/pci/devices").glob("*")
        if (read_line(device / "class") or "").startswith(DISPLAYS) and read_line(device / "vendor") == NVIDIA
    ]
    # What one NVLink gives per direction, in GB/s.
    rates = [float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", lines)]
    # Host memory that the control group (v2) of a container or job allows.
    limit = read_line(tree / "fs/cgroup/memory.max") or ""
    return {
        "cards": cards,
        "fault": fault,
        "on_the_bus": len(displays),
        "mig": [found.groupdict() for line in listing.splitlines() if (found := _MIG.match(line))],
        "pairs": dict(_read_matrix(matrix)),
        "nvlink_gigabytes": min(rates, default=None),
        "networks": list(_see_networks(tree)),
        "disks": list(_see_disks(tree)),
        "memory_limit_bytes": int(limit) if limit.isdigit() else None,
        "free_bytes": shutil.disk_usage(Path.cwd()).free,
    }


def _see_cards() -> list[Facts]:
    """What nvidia-smi tells of each card; fields that a driver does not know are None."""
    for names in (tuple(FIELDS), tuple(FIELDS)[:-1], tuple(FIELDS)[:5]):
        query = ",".join(FIELDS[name] for name in names)
        text, fault = run_tool(NVIDIA_SMI, f"--query-gpu={query}", "--format=csv,noheader,nounits")
        rows = [[cell.strip() for cell in line.split(",")] for line in text.splitlines() if line.strip()]
        if fault is None and all(len(row) == len(names) for row in rows):
            blank: Facts = dict.fromkeys(FIELDS)
            return [blank | dict(zip(names, map(_value, row), strict=True)) for row in rows]
    return []


def _value(cell: str) -> str | float | None:
    """A field: a number where it is one, None where it is `[N/A]` or `[Not Supported]`."""
    if cell.startswith("["):
        return None
    with suppress(ValueError):
        return float(cell)
    return cell


def _read_matrix(text: str) -> Iterator[tuple[str, str]]:
    """Of `nvidia-smi topo -m`: by pair of cards (`0-1`) what joins them: NV4, PIX, PXB, PHB, NODE or SYS."""
    rows = [re.sub(r"\x1b\[\d*m", "", line).split("\t") for line in text.splitlines()]
    names: list[str] = []
    for cells in rows:
        cells = [cell.strip() for cell in cells]
        if not names and "GPU0" in cells[1:]:
            names = cells[1:]
        elif names and re.fullmatch(r"GPU\d+", cells[0]):
            for name, kind in zip(names, cells[1:], strict=False):
                if re.fullmatch(r"GPU\d+", name) and int(name[3:]) > int(cells[0][3:]):
                    yield f"{cells[0][3:]}-{name[3:]}", kind


def _see_networks(tree: Path) -> Iterator[Facts]:
    """Every interface, with its rate in Mb/s; None where it is not told, as in many virtual machines."""
    for path in sorted((tree / "class/net").glob("*")):
        speed = read_line(path / "speed") or ""
        megabits = int(speed) if speed.isdigit() and int(speed) > 0 else None
        is_port = (path / "device").exists() or (path / "bonding").exists()
        state = read_line(path / "operstate")
        yield {"name": path.name, "megabits": megabits, "is_port": is_port, "state": state}


def _see_disks(tree: Path) -> Iterator[Facts]:
    for path in sorted((tree / "block").glob("*")):
        size = read_line(path / "size") or ""
        if path.name.startswith(NO_DISKS) or not size.isdigit() or int(size) == 0:
            continue
        yield {"name": path.name, "bytes": SECTOR * int(size), "kind": _disk_kind(path)}


def _disk_kind(path: Path) -> str:
    # Disks of virtual machines are told to turn, whatever they are.
    if path.name.startswith(("vd", "xvd")):
        return "virtual disk"
    turns = read_line(path / "queue/rotational") == "1"
    return "NVMe" if path.name.startswith("nvme") else "turning disk" if turns else "SSD"


def read_line(path: Path) -> str | None:
    """What a file of the kernel says; None where it is missing or says nothing."""
    # The rate of an interface that is down cannot be read: EINVAL.
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
