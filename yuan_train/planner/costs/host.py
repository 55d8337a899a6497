"""What a card has of its node's host and disk: room, bandwidth, and the seconds of an optimizer step there.

The cards of a node share its host and its disk equally. An offloaded part of the optimizer step copies
gradients down, steps on the host and copies weights up, chunk by chunk and so side by side; the card steps
its own part meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from yuan_train.config.cluster import Disk, NodeGroup
from yuan_train.config.devices import DeviceType, Precision
from yuan_train.config.profile import HostProfile
from yuan_train.config.units import DISK_CHUNK, DISK_SLOTS, DISK_STATES
from yuan_train.planner.costs.workload import STATE_BYTES

ASSUMED_DISK = Disk(read=2e9, write=1e9)
"""Of a node whose cluster file says nothing: a modest NVMe disk."""


@dataclass(frozen=True, kw_only=True)
class HostShare:
    """A card's share of its node's host and disk."""

    memory_bytes: float
    link_bytes_per_second: float
    memory_bytes_per_second: float
    disk_bytes: float
    """Inf if the cluster file does not say."""
    disk_read_bytes_per_second: float
    disk_write_bytes_per_second: float


def host_share(
    device: DeviceType,
    group: NodeGroup,
    *,
    total_bytes: float,
    reserved_bytes: float,
    measured: HostProfile | None = None,
) -> HostShare:
    """The share in its host, which has `total_bytes`, and in its disk of a card of such a node;
    `reserved_bytes` are left to other programs. Rates that were `measured`, with all cards of a node at once,
    are its own already."""
    host, disk, count = group.host, group.disk or ASSUMED_DISK, group.num_cards
    link, rate = device.host_link, device.host_memory_bandwidth
    if measured is not None:
        link = min(measured.host_link_down, measured.host_link_up)
        rate = measured.host_step_bytes_per_second
    elif host is not None:
        link = min(link, host.link_bandwidth / count if host.link_bandwidth else math.inf)
        rate = host.bandwidth / count if host.bandwidth else rate
    return HostShare(
        memory_bytes=max(0.0, total_bytes - reserved_bytes) / count,
        link_bytes_per_second=link,
        memory_bytes_per_second=rate,
        disk_bytes=disk.capacity / count if disk.capacity else math.inf,
        disk_read_bytes_per_second=disk.read / count,
        disk_write_bytes_per_second=disk.write / count,
    )


def host_step_seconds(share: HostShare, precision: Precision) -> float:
    """Seconds by parameter of an optimizer step on the host: of the slowest of gradients on their way down,
    the step itself, and weights on their way up. A link takes both directions at once."""
    state = STATE_BYTES[precision]
    return max(
        state.gradients / share.link_bytes_per_second,
        state.update_traffic / share.memory_bytes_per_second,
        state.parameters / share.link_bytes_per_second,
    )


def host_bytes(precision: Precision) -> float:
    """Bytes by parameter on a host, in the gradient's precision: master, gradient, AdamW's two moments."""
    return 4.0 * STATE_BYTES[precision].gradients


def disk_bytes(precision: Precision) -> float:
    """Bytes by parameter on a disk: its master and AdamW's two moments. Each step reads and writes them."""
    return float(DISK_STATES * STATE_BYTES[precision].gradients)


def disk_step_seconds(share: HostShare, precision: Precision) -> float:
    """Seconds by parameter in which a disk reads and writes; it does one of the two at a time."""
    each = disk_bytes(precision)
    return each / share.disk_read_bytes_per_second + each / share.disk_write_bytes_per_second


def slot_bytes(precision: Precision, num_parameters: float) -> float:
    """Host memory of the chunks in flight of so many parameters on a disk."""
    return DISK_SLOTS * host_bytes(precision) * min(DISK_CHUNK, num_parameters)
