"""What the system's own tools tell `yuan-train doctor` of cards, links between them, networks and disks.

nvidia-smi sees cards that torch does not: where torch is built without CUDA, or some are hidden. Plain
values, as all that the doctor finds; None where a tool is missing or says nothing.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

SYS = Path("/sys")
NVIDIA_SMI = "nvidia-smi"
TOOL_SECONDS = 20.0
"""In which a tool answers: nvidia-smi takes seconds where no process keeps the driver awake."""
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
    return {
        "cards": cards,
        "fault": fault,
        "on_the_bus": sum(1 for _ in _displays(tree)),
        "mig": [found.groupdict() for line in listing.splitlines() if (found := _MIG.match(line))],
        "pairs": dict(_read_matrix(matrix)),
        "nvlink_gigabytes": _slowest_nvlink(lines),
        "networks": list(_see_networks(tree)),
        "disks": list(_see_disks(tree)),
        "memory_limit_bytes": _read_limit(tree),
        "free_bytes": shutil.disk_usage(Path.cwd()).free,
    }


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


def _slowest_nvlink(text: str) -> float | None:
    """Of `nvidia-smi nvlink -s`: what one NVLink gives per direction, in GB/s."""
    return min((float(rate) for rate in re.findall(r"Link \d+: ([\d.]+) GB/s", text)), default=None)


def _displays(tree: Path) -> Iterator[Path]:
    for device in sorted((tree / "bus/pci/devices").glob("*")):
        is_display = (read_line(device / "class") or "").startswith(DISPLAYS)
        if is_display and read_line(device / "vendor") == NVIDIA:
            yield device


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


def _read_limit(tree: Path) -> int | None:
    """Host memory that the control group (v2) of a container or job allows; None without a limit."""
    limit = read_line(tree / "fs/cgroup/memory.max") or ""
    return int(limit) if limit.isdigit() else None


def read_line(path: Path) -> str | None:
    """What a file of the kernel says; None where it is missing or says nothing."""
    # The rate of an interface that is down cannot be read: EINVAL.
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
