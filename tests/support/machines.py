"""Twenty machines as `discover` sees them: what the system's tools print and /sys holds, in their form."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GIB = 1 << 30
LEGEND = (
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between "
    "NUMA nodes (e.g., QPI/UPI)\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)
NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the latest "
    "NVIDIA driver is installed and running.\n"
)
A100, A100_40 = "NVIDIA A100-SXM4-80GB, 81920", "NVIDIA A100-SXM4-40GB, 40960"
RTX_4090, RTX_3090 = "NVIDIA GeForce RTX 4090, 24564", "NVIDIA GeForce RTX 3090, 24576"
V100_32, V100_16 = "Tesla V100-SXM2-32GB, 32768", "Tesla V100-PCIE-16GB, 16384"


@dataclass(frozen=True, kw_only=True)
class FakeMachine:
    """A machine's hardware, and what its cluster file must say."""

    cards: tuple[tuple[str, str], ...] = ()
    """Name with MiB of memory; and `MIG mode, PCIe generation, lanes, compute capability`."""
    pairs: dict[str, str] = field(default_factory=dict[str, str])
    """The link of two cards, by `0-1`; of all others `others`."""
    others: str = "SYS"
    nics: int = 0
    """InfiniBand adapters that `topo -m` lists beside the cards."""
    nvlink: str | None = None
    mig: str = ""
    fault: str | None = None
    """What nvidia-smi says in place of an answer; with `cards` on the bus."""
    has_tool: bool = True
    old_driver: bool = False
    net: dict[str, int | None] = field(default_factory=lambda: {"eth0": 1000})
    down: tuple[str, ...] = ()
    infiniband: tuple[tuple[str, str], ...] = ()
    disks: dict[str, tuple[int, str]] = field(default_factory=lambda: {"nvme0n1": (3_750_748_848, "0")})
    """Sectors, and whether it turns."""
    memory: int = 512 * GIB
    limit: int | None = None
    torch_cards: tuple[dict[str, Any], ...] | None = None
    """None: as many as `cards`, of the same names."""
    types: tuple[str, ...]
    link: float | None = None
    """GB/s."""
    network: float
    """Gb/s."""
    host: float
    """GiB."""
    notes: tuple[str, ...] = ()
    """Parts of the notes, all of which must be there, one each."""


def card(name: str, rest: str, count: int) -> tuple[tuple[str, str], ...]:
    return ((name, rest),) * count


DGX1 = {
    "0-1": "NV1", "0-2": "NV1", "0-3": "NV2", "0-4": "NV2", "1-2": "NV2", "1-3": "NV1",
    "1-5": "NV2", "2-3": "NV2", "2-6": "NV1", "3-7": "NV1", "4-5": "NV1", "4-6": "NV1",
    "4-7": "NV2", "5-6": "NV2", "5-7": "NV1", "6-7": "NV2",
}  # fmt: skip
"""The hybrid cube of a DGX-1: links of one or two, and pairs without."""
EIGHT_HDR = (("InfiniBand", "200 Gb/sec (4X HDR)"),) * 8
AMPERE, ADA, VOLTA, HOPPER = (
    "Disabled, 4, 16, 8.0",
    "[N/A], 4, 16, 8.9",
    "[N/A], 3, 16, 7.0",
    "Disabled, 5, 16, 9.0",
)

MACHINES: dict[str, FakeMachine] = {
    "dgx-a100": FakeMachine(
        cards=card(A100, AMPERE, 8),
        others="NV12",
        nics=8,
        nvlink="25",
        infiniband=EIGHT_HDR,
        net={"eno1": 1000, "ib0": 200_000, "docker0": None},
        memory=2015 * GIB,
        types=("A100-80G",) * 8,
        link=300,
        network=1600,
        host=2015,
    ),
    "dgx-a100-40": FakeMachine(
        cards=card(A100_40, AMPERE, 8),
        others="NV12",
        nvlink="25",
        types=("A100-40G",) * 8,
        link=300,
        network=1,
        host=512,
    ),
    "dgx1-v100": FakeMachine(
        cards=card(V100_32, VOLTA, 8),
        pairs=DGX1,
        nvlink="25.781",
        old_driver=True,
        infiniband=(("InfiniBand", "100 Gb/sec (4X EDR)"),) * 4,
        types=("V100-32G",) * 8,
        link=6.25,
        network=400,
        host=512,
    ),
    "v100-pcie": FakeMachine(
        cards=card(V100_16, VOLTA, 4),
        others="PHB",
        types=("V100-16G",) * 4,
        link=6.25,
        network=25,
        host=244,
        net={"ens5": 25_000},
        memory=244 * GIB,
    ),
    "dgx-h100": FakeMachine(
        cards=card("NVIDIA H100 80GB HBM3, 81559", HOPPER, 8),
        others="NV18",
        nvlink="26.562",
        infiniband=(("InfiniBand", "400 Gb/sec (4X NDR)"),) * 8,
        memory=2063 * GIB,
        types=("H100-80G",) * 8,
        link=478.116,
        network=3200,
        host=2063,
    ),
    "h100-pcie": FakeMachine(
        cards=card("NVIDIA H100 PCIe, 81559", HOPPER, 2),
        others="NV12",
        nvlink="26.562",
        types=("H100-PCIe",) * 2,
        link=318.744,
        network=1,
        host=512,
    ),
    "h200-roce": FakeMachine(
        cards=card("NVIDIA H200, 143771", HOPPER, 8),
        others="NV18",
        nvlink=None,
        infiniband=(("Ethernet", "400 Gb/sec (4X NDR)"),) * 8,
        types=("H200",) * 8,
        link=477,
        network=3200,
        host=512,
    ),
    "gamer-4090": FakeMachine(
        cards=card(RTX_4090, ADA, 4),
        pairs={"0-1": "PHB", "2-3": "PHB"},
        others="SYS",
        net={"enp5s0": 10_000},
        memory=256 * GIB,
        types=("RTX-4090",) * 4,
        link=12.5,
        network=10,
        host=256,
    ),
    "mixed-box": FakeMachine(
        cards=card(RTX_4090, ADA, 2) + card(RTX_3090, "[N/A], 4, 8, 8.6", 1),
        others="PHB",
        net={"eth0": 2500},
        memory=128 * GIB,
        types=("RTX-4090", "RTX-4090", "RTX-3090"),
        link=6.25,
        network=2.5,
        host=128,
    ),
    "bridged-3090": FakeMachine(
        cards=card(RTX_3090, "[N/A], 4, 16, 8.6", 4),
        pairs={"0-1": "NV4", "2-3": "NV4"},
        others="PXB",
        nvlink="14.062",
        types=("RTX-3090",) * 4,
        link=20,
        network=1,
        host=512,
    ),
    "cpu-only": FakeMachine(
        has_tool=False,
        memory=64 * GIB,
        disks={"sda": (1_953_525_168, "1")},
        types=("CPU-cpu-only",),
        network=1,
        host=8,
    ),
    "cpu-small": FakeMachine(
        has_tool=False,
        memory=6 * GIB,
        net={"eth0": None},
        disks={},
        types=("CPU-cpu-small",),
        network=1,
        host=3,
        notes=("the rate of eth0 was not found; 1 Gb/s is assumed", "no disk was found"),
    ),
    "driver-missing": FakeMachine(
        cards=card(A100, AMPERE, 4),
        fault=NO_DRIVER,
        torch_cards=(),
        memory=64 * GIB,
        types=("CPU-driver-missing",),
        network=1,
        host=8,
        notes=("4 NVIDIA cards are on the PCI bus, but no driver shows them (nvidia-smi: NVIDIA",),
    ),
    "cpu-torch": FakeMachine(
        cards=card(RTX_3090, "[N/A], 4, 16, 8.6", 1),
        torch_cards=(),
        types=("RTX-3090",),
        network=1,
        host=512,
        notes=("torch sees 0 of the 1 cards (torch 2.8.0+cpu is built without CUDA)",),
    ),
    "mig-all": FakeMachine(
        cards=card(A100, "Enabled, 4, 16, 8.0", 1),
        mig="  MIG 3g.40gb     Device  0: (UUID: MIG-a)\n  MIG 3g.40gb     Device  1: (UUID: MIG-b)\n",
        types=("A100-80G-MIG-3g.40gb",),
        network=1,
        host=512,
        notes=("MIG is on on card 0 (2 instances): a process sees a single instance",),
    ),
    "mig-some": FakeMachine(
        cards=card(A100, "Enabled, 4, 16, 8.0", 1) + card(A100, AMPERE, 2),
        others="NV12",
        nvlink="25",
        mig="  MIG 1g.10gb     Device  0: (UUID: MIG-a)\n",
        torch_cards=({}, {}),
        types=("A100-80G",) * 2,
        link=300,
        network=1,
        host=512,
        notes=("MIG is on on card 0 (1 instances)",),
    ),
    "new-card": FakeMachine(
        cards=card("NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887", "Disabled, 5, 16, 12.0", 2),
        others="NODE",
        types=("RTX-PRO-6000-Blackwell-Workstation-Edition",) * 2,
        link=26,
        network=1,
        host=512,
        notes=("is not in the catalogue; its rates are taken from RTX-5090",),
    ),
    "amd": FakeMachine(
        has_tool=False,
        torch_cards=({"name": "AMD Instinct MI300X", "type": "MI300X", "memory_bytes": 196592 << 20},) * 2,
        types=("MI300X",) * 2,
        link=12.5,
        network=1,
        host=512,
        notes=("what joins its cards was not found; taken to be PCIe through the host",),
    ),
    "container": FakeMachine(
        cards=card("Tesla T4, 15360", "[N/A], 3, 16, 7.5", 1),
        net={"veth12": 10_000, "eth0": 10_000},
        limit=48 * GIB,
        types=("T4",),
        network=10,
        host=48,
    ),
    "both-fabrics": FakeMachine(
        cards=card("NVIDIA L40S, 46068", ADA, 2),
        others="PIX",
        infiniband=(("InfiniBand", "200 Gb/sec (4X HDR)"), ("Ethernet", "100 Gb/sec (4X EDR)")),
        net={"bond0": 25_000, "eth1": 100_000},
        down=("eth1",),
        types=("L40S",) * 2,
        link=20,
        network=200,
        host=512,
    ),
}


def build_tools(machine: FakeMachine, folder: Path) -> None:
    """`folder/bin/nvidia-smi` and `folder/sys` of a machine."""
    (folder / "bin").mkdir(parents=True)
    if machine.has_tool:
        _write_nvidia_smi(machine, folder)
    tree = folder / "sys"
    for i, _ in enumerate(machine.cards):
        _write(tree / f"bus/pci/devices/0000:{i:02x}:00.0", vendor="0x10de", **{"class": "0x030200"})
        _write(tree / f"bus/pci/devices/0000:{i:02x}:00.1", vendor="0x10de", **{"class": "0x040300"})
    for name, megabits in {**machine.net, "lo": None}.items():
        state = "down" if name in machine.down else "unknown" if name == "lo" else "up"
        _write(tree / "class/net" / name, operstate=state, speed=str(megabits or -1))
        if name not in ("lo", "docker0"):
            (tree / "class/net" / name / ("bonding" if name.startswith("bond") else "device")).mkdir()
    for name, (sectors, turns) in {**machine.disks, "loop0": (8, "0"), "sr0": (0, "1")}.items():
        _write(tree / "block" / name, size=str(sectors))
        _write(tree / "block" / name / "queue", rotational=turns)
    _write(tree / "fs/cgroup", **{"memory.max": str(machine.limit or "max")})


def _write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def _write_nvidia_smi(machine: FakeMachine, folder: Path) -> None:
    """A program that answers as nvidia-smi does: columns as they are asked for, in our order."""
    rows = [
        f"{i}, {name}, 00000000:{i:02X}:00.0, 550.54.15, {rest}\n"
        for i, (name, rest) in enumerate(machine.cards)
    ]
    listing = [
        f"GPU {i}: {name.partition(',')[0]} (UUID: GPU-{i})\n" for i, (name, _) in enumerate(machine.cards)
    ]
    nvlink = "".join(f"GPU {i}: X\n\t Link 0: {machine.nvlink} GB/s\n" for i in range(len(rows)))
    texts = {"rows": "".join(rows), "list": "".join(listing) + machine.mig, "topo": matrix_text(machine)}
    texts |= {"nvlink": nvlink if machine.nvlink else ""}
    for name, text in texts.items():
        (folder / name).write_text(text)
    here = shlex.quote(str(folder))
    fault = f"printf %s {shlex.quote(machine.fault)}; exit 9" if machine.fault else ":"
    said = 'Field "compute_cap" is not a valid field to query.'
    unknown = f'case "$1" in *compute_cap*) echo {shlex.quote(said)}; exit 2;; esac'
    program = folder / "bin/nvidia-smi"
    program.write_text(
        f"#!/bin/sh\n{fault}\n{unknown if machine.old_driver else ':'}\n"
        f'case "$*" in\n-L) cat {here}/list;;\n"topo -m") cat {here}/topo;;\n'
        f'"nvlink -s") cat {here}/nvlink;;\n'
        '--query-gpu=*) commas=$(printf %s "${1}" | tr -cd , | wc -c)\n'
        f"cut -d, -f1-$((commas + 1)) {here}/rows;;\n*) exit 1;;\nesac\n"
    )
    program.chmod(0o755)


def matrix_text(machine: FakeMachine) -> str:
    """What `nvidia-smi topo -m` prints: tabs, an underlined first line, adapters, affinities, the legend."""
    size = len(machine.cards)
    nics = [f"NIC{i}" for i in range(machine.nics)]
    names = [*(f"GPU{i}" for i in range(size)), *nics, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"]
    lines = ["\t" + "\t".join(f"\x1b[4m{name}" for name in names) + "\x1b[0m"]
    for i in range(size):
        kinds = [
            " X " if i == j else machine.pairs.get(f"{min(i, j)}-{max(i, j)}", machine.others)
            for j in range(size)
        ]
        lines.append("\t".join([f"GPU{i}", *kinds, *("SYS" for _ in nics), "0-63", "0", "N/A"]))
    lines += ["\t".join([nic, *("SYS" for _ in range(size + len(nics)))]) for nic in nics]
    return "\n".join(lines) + "\n" + LEGEND
