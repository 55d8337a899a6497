"""What `yuan-train doctor` says of this machine's host memory and disk, where stages may put their state."""

from __future__ import annotations

import math
import resource
import shutil
import time
from pathlib import Path
from typing import Any

Facts = dict[str, Any]

NUMA_NODES = Path("/sys/devices/system/node")


def host_facts() -> Facts:
    """What stages may put on this host: bytes, None without a limit."""
    from yuan_train.parallel.tiers.slab import MAX_SHARE, available_bytes

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
    from yuan_train.config.errors import DiskError
    from yuan_train.parallel.tiers.disk import PAGE, DiskFile

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
