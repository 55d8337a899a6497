"""Twenty machines as `discover` sees them: what the system's tools print and /sys holds, in their form."""

import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

GIB = 1 << 30
LEGEND = (
    "\nLegend:\n\n  X    = Self\n  SYS  = Connection traversing PCIe as well as the SMP interconnect between "
    "NUMA nodes (e.g., QPI/UPI)\n  NV#  = Connection traversing a bonded set of # NVLinks\n"
)


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
    mig: tuple[str, ...] = ()
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


CARDS = {
    "A100": ("NVIDIA A100-SXM4-80GB, 81920", "Disabled, 4, 16, 8.0"),
    "A100-MIG": ("NVIDIA A100-SXM4-80GB, 81920", "Enabled, 4, 16, 8.0"),
    "A100-40": ("NVIDIA A100-SXM4-40GB, 40960", "Disabled, 4, 16, 8.0"),
    "V100": ("Tesla V100-SXM2-32GB, 32768", "[N/A], 3, 16, 7.0"),
    "V100-16": ("Tesla V100-PCIE-16GB, 16384", "[N/A], 3, 16, 7.0"),
    "H100": ("NVIDIA H100 80GB HBM3, 81559", "Disabled, 5, 16, 9.0"),
    "H100-PCIe": ("NVIDIA H100 PCIe, 81559", "Disabled, 5, 16, 9.0"),
    "H200": ("NVIDIA H200, 143771", "Disabled, 5, 16, 9.0"),
    "4090": ("NVIDIA GeForce RTX 4090, 24564", "[N/A], 4, 16, 8.9"),
    "3090": ("NVIDIA GeForce RTX 3090, 24576", "[N/A], 4, 16, 8.6"),
    "3090-x8": ("NVIDIA GeForce RTX 3090, 24576", "[N/A], 4, 8, 8.6"),
    "6000": ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition, 97887", "Disabled, 5, 16, 12.0"),
    "T4": ("Tesla T4, 15360", "[N/A], 3, 16, 7.5"),
    "L40S": ("NVIDIA L40S, 46068", "[N/A], 4, 16, 8.9"),
}
RATES = {"HDR": "200 Gb/sec (4X HDR)", "EDR": "100 Gb/sec (4X EDR)", "NDR": "400 Gb/sec (4X NDR)"}

# Lists of like things are written with their number: `8 A100`.
TABLE = """
dgx-a100:
  {cards: 8 A100, others: NV12, nics: 8, nvlink: "25", infiniband: [8 InfiniBand, HDR], memory: 2015,
   net: {eno1: 1000, ib0: 200000, docker0: null}, types: 8 A100-80G, link: 300, network: 1600, host: 2015}
dgx-a100-40:
  {cards: 8 A100-40, others: NV12, nvlink: "25", types: 8 A100-40G, link: 300, network: 1, host: 512}
dgx1-v100:
  # The hybrid cube: links of one or two, and pairs without.
  {cards: 8 V100, pairs: {0-1: NV1, 0-2: NV1, 0-3: NV2, 0-4: NV2, 1-2: NV2, 1-3: NV1, 1-5: NV2, 2-3: NV2,
   2-6: NV1, 3-7: NV1, 4-5: NV1, 4-6: NV1, 4-7: NV2, 5-6: NV2, 5-7: NV1, 6-7: NV2}, nvlink: "25.781",
   old_driver: true, infiniband: [4 InfiniBand, EDR], types: 8 V100-32G, link: 6.25, network: 400, host: 512}
v100-pcie:
  {cards: 4 V100-16, others: PHB, types: 4 V100-16G, link: 6.25, network: 25, host: 244, net: {ens5: 25000},
   memory: 244}
dgx-h100:
  {cards: 8 H100, others: NV18, nvlink: "26.562", infiniband: [8 InfiniBand, NDR], memory: 2063,
   types: 8 H100-80G, link: 478.116, network: 3200, host: 2063}
h100-pcie:
  {cards: 2 H100-PCIe, others: NV12, nvlink: "26.562", types: 2 H100-PCIe, link: 318.744, network: 1,
   host: 512}
h200-roce:
  {cards: 8 H200, others: NV18, infiniband: [8 Ethernet, NDR], types: 8 H200, link: 477, network: 3200,
   host: 512}
gamer-4090:
  {cards: 4 4090, pairs: {0-1: PHB, 2-3: PHB}, net: {enp5s0: 10000}, memory: 256, types: 4 RTX-4090,
   link: 12.5, network: 10, host: 256}
mixed-box:
  {cards: "2 4090, 1 3090-x8", others: PHB, net: {eth0: 2500}, memory: 128, types: "2 RTX-4090, 1 RTX-3090",
   link: 6.25, network: 2.5, host: 128}
bridged-3090:
  {cards: 4 3090, pairs: {0-1: NV4, 2-3: NV4}, others: PXB, nvlink: "14.062", types: 4 RTX-3090, link: 20,
   network: 1, host: 512}
cpu-only:
  {has_tool: false, memory: 64, disks: {sda: [1953525168, "1"]}, types: 1 CPU-cpu-only, network: 1, host: 8}
cpu-small:
  {has_tool: false, memory: 6, net: {eth0: null}, disks: {}, types: 1 CPU-cpu-small, network: 1, host: 3,
   notes: ["the rate of eth0 was not found; 1 Gb/s is assumed", no disk was found]}
driver-missing:
  {cards: 4 A100, torch_cards: [], memory: 64, types: 1 CPU-driver-missing, network: 1, host: 8,
   fault: "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure that the
     latest NVIDIA driver is installed and running.\\n",
   notes: ["4 NVIDIA cards are on the PCI bus, but no driver shows them (nvidia-smi: NVIDIA"]}
cpu-torch:
  {cards: 1 3090, torch_cards: [], types: 1 RTX-3090, network: 1, host: 512,
   notes: ["torch sees 0 of the 1 cards (torch 2.8.0+cpu is built without CUDA)"]}
mig-all:
  {cards: 1 A100-MIG, mig: [3g.40gb, 3g.40gb], types: 1 A100-80G-MIG-3g.40gb, network: 1, host: 512,
   notes: ["MIG is on on card 0 (2 instances): a process sees a single instance"]}
mig-some:
  {cards: "1 A100-MIG, 2 A100", others: NV12, nvlink: "25", mig: [1g.10gb], torch_cards: [{}, {}],
   types: 2 A100-80G, link: 300, network: 1, host: 512, notes: [MIG is on on card 0 (1 instances)]}
new-card:
  {cards: 2 6000, others: NODE, types: 2 RTX-PRO-6000-Blackwell-Workstation-Edition, link: 26, network: 1,
   host: 512, notes: [is not in the catalogue; its rates are taken from RTX-5090]}
amd:
  {has_tool: false, types: 2 MI300X,
   torch_cards: [&a {name: AMD Instinct MI300X, type: MI300X, memory_bytes: 206141652992}, *a],
   link: 12.5, network: 1, host: 512,
   notes: [what joins its cards was not found; taken to be PCIe through the host]}
container: {cards: 1 T4, net: {veth12: 10000, eth0: 10000}, limit: 48, types: 1 T4, network: 10, host: 48}
both-fabrics:
  {cards: 2 L40S, others: PIX, infiniband: [1 InfiniBand, HDR, 1 Ethernet, EDR],
   net: {bond0: 25000, eth1: 100000}, down: [eth1], types: 2 L40S, link: 20, network: 200, host: 512}
"""


def _each(text: str) -> tuple[str, ...]:
    """The names in a text such as `2 A100, 1 T4`, each as often as it says."""
    parts = (part.split() for part in text.split(","))
    return tuple(name for count, name in parts for _ in range(int(count)))


def _machine(keys: dict[str, Any]) -> FakeMachine:
    ports = iter(keys.pop("infiniband", ()))
    found: dict[str, Any] = {
        "types": _each(keys.pop("types")),
        "cards": tuple(CARDS[name] for name in _each(keys.pop("cards", "0 none"))),
        "infiniband": tuple(
            (kind, RATES[rate]) for some, rate in zip(ports, ports, strict=True) for kind in _each(some)
        ),
    }
    found |= {name: keys.pop(name) * GIB for name in ("memory", "limit") if name in keys}
    lists: dict[str, Any] = {name: tuple(value) for name, value in keys.items() if isinstance(value, list)}
    return FakeMachine(**(keys | lists | found))


MACHINES = {name: _machine(keys) for name, keys in yaml.safe_load(TABLE).items()}


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
    listing += [f"  MIG {name}     Device  {i}: (UUID: MIG-{i})\n" for i, name in enumerate(machine.mig)]
    texts = {"rows": "".join(rows), "list": "".join(listing), "topo": matrix_text(machine)}
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
