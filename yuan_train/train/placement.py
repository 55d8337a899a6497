"""Where a rank runs on its host: on the cores next to its card.

Memory is taken on the NUMA node of the core that touches it first, so that a slab lies next to the card that
copies it. Memory itself is not bound: a node that is full then takes it from another, where a strict binding
would end the process.
"""

from __future__ import annotations

import os
from pathlib import Path

from yuan_train.parallel.device import Device

PCI = Path("/sys/bus/pci/devices")
NODES = Path("/sys/devices/system/node")


def run_beside(device: Device) -> None:
    """Keep this process to the cores of its card's NUMA node, and the threads that it starts from now on.

    Nothing to do on a CPU, where the node is not known, or if something (taskset, a batch system) has chosen
    among the cores before.
    """
    card = device.facts()
    if card is None or not hasattr(os, "sched_setaffinity"):
        return
    own = os.sched_getaffinity(0)
    near = own & cores_of(numa_node(card.pci_address))
    if near and len(own) == os.cpu_count():
        os.sched_setaffinity(0, near)


def numa_node(address: str | None, pci: Path = PCI) -> int | None:
    """The NUMA node of the card at a PCI address; None if the system does not say."""
    path = pci / (address or "unknown") / "numa_node"
    number = int(path.read_text(encoding="ascii")) if path.exists() else -1
    return number if number >= 0 else None


def cores_of(node: int | None, nodes: Path = NODES) -> set[int]:
    """The cores of a NUMA node; none if the node or its cores are not known."""
    path = nodes / f"node{node}" / "cpulist"
    if node is None or not path.exists():
        return set()
    cores: set[int] = set()
    for part in filter(None, path.read_text(encoding="ascii").strip().split(",")):
        first, _, last = part.partition("-")
        cores |= set(range(int(first), int(last or first) + 1))
    return cores
