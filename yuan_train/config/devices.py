"""The catalogue of cards: dense peaks, memory and bandwidths as vendors state them.

Peaks are dense; sparse figures are halved. A card without `bf16` has no bf16 matrix units.
Sources: vendor datasheets, and pytorch/torchtitan torchtitan/tools/utils.py (vendor links inside).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt

from yuan_train.config.renamed import Renamed
from yuan_train.config.units import Unit

Precision = Literal["bf16", "fp16", "fp32", "fp64"]
Backend = Literal["nccl", "rccl", "hccl", "gloo"]
Bytes = Annotated[int, Gt(0), Unit("bytes")]
BytesPerSecond = Annotated[float, Gt(0), Unit("bytes/s")]
Flops = Annotated[float, Gt(0), Unit("FLOP/s")]

GIB = 2**30
"""Bytes of a GiB."""


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """A type of card: memory, peak rates and bandwidths. A peak of None: the card lacks that precision."""

    memory: Bytes
    reserved: Annotated[int, Ge(0), Unit("bytes")] = GIB
    """Not available to training: the driver's context, communicators and fragmentation."""
    fp32: Flops
    bf16: Flops | None = None
    fp16: Flops | None = None
    memory_bandwidth: BytesPerSecond
    host_link: BytesPerSecond = 16e9
    """Between the card and host memory, per direction."""
    host_memory_bandwidth: BytesPerSecond = 25e9
    """The card's share of the bandwidth of host memory; offloaded optimizer state is stepped at this rate."""
    backend: Backend = "nccl"
    """Communication backend of the card's processes. Messages between cards of different backends go over
    gloo, via host memory, and so do those of cards whose backend is gloo."""
    slowdown: Annotated[float, Ge(1)] | None = None
    """Only for cards simulated by a CPU process: after each computation the process waits, so that it takes
    this many times as long."""
    price: Annotated[float, Gt(0)] | None = None
    """Rent of a card for an hour, in any currency; a node's own `price` takes precedence."""

    RENAMED: ClassVar[Mapping[str, Renamed]] = {"library": Renamed("backend", {"none": "gloo"})}

    def peak(self, precision: Precision) -> float | None:
        """Peak FLOP/s in a precision, divided by a simulated card's slowdown; None if the card lacks it."""
        rate = {"bf16": self.bf16, "fp16": self.fp16, "fp32": self.fp32, "fp64": self.fp32 / 2}[precision]
        return rate / (self.slowdown or 1.0) if rate else None


def _card(
    memory_gb: float,
    bandwidth_gbs: float,
    fp32: float,
    half: float,
    *,
    bf16: bool = True,
    host: float = 32,
    binary: bool = True,
    backend: Backend = "nccl",
) -> DeviceType:
    """A catalogue entry: memory in GiB as drivers count it (GB if not `binary`), rates in GB/s, TFLOP/s."""
    memory = round(memory_gb * (GIB if binary else 1e9))
    return DeviceType(
        memory=memory,
        reserved=2 * GIB if memory_gb >= 24 else GIB,
        fp32=fp32 * 1e12,
        bf16=half * 1e12 if bf16 else None,
        fp16=half * 1e12,
        memory_bandwidth=bandwidth_gbs * 1e9,
        host_link=host * 1e9,
        backend=backend,
    )


CATALOGUE: dict[str, DeviceType] = {
    "P100": _card(16, 732, 10.6, 21.2, bf16=False, host=16),
    "V100-16G": _card(16, 900, 15.7, 125, bf16=False, host=16),
    "V100-32G": _card(32, 900, 15.7, 125, bf16=False, host=16),
    "T4": _card(15, 320, 8.1, 65, bf16=False, host=16),
    "RTX-2080": _card(8, 448, 10, 42, bf16=False, host=16),
    "RTX-2080Ti": _card(11, 616, 13, 57, bf16=False, host=16),
    "Titan-RTX": _card(24, 672, 16, 130, bf16=False, host=16),
    "A10": _card(24, 600, 31.2, 125),
    "A30": _card(24, 933, 10.3, 165),
    "A40": _card(48, 696, 37.4, 149.7),
    "A100-40G": _card(40, 1555, 19.5, 312),
    "A100-80G": _card(80, 2039, 19.5, 312),
    "A800-80G": _card(80, 2039, 19.5, 312),
    "RTX-3080": _card(10, 760, 29.8, 59.5),
    "RTX-3090": _card(24, 936, 35.6, 71),
    "RTX-4090": _card(24, 1008, 82.6, 165.2),
    "RTX-6000Ada": _card(48, 960, 91.1, 364),
    "L20": _card(48, 864, 59.8, 119.5),
    "L40S": _card(48, 864, 91.6, 362),
    "H100-80G": _card(80, 3350, 67, 989, host=64),
    "H100-PCIe": _card(80, 2039, 51, 756, host=64),
    "H800-80G": _card(80, 3350, 67, 989, host=64),
    "H20": _card(96, 4000, 44, 148, host=64, binary=False),
    "H200": _card(141, 4800, 67, 989, host=64, binary=False),
    "MI250X-GCD": _card(64, 1638, 23.9, 191.5, backend="rccl"),
    "MI300X": _card(192, 5300, 163.4, 1307, host=64, backend="rccl"),
    "Ascend-910B2": _card(64, 1600, 94, 376, backend="hccl"),
    "Ascend-910B3": _card(64, 1600, 78, 313, backend="hccl"),
    "Ascend-910B4": _card(32, 800, 70, 280, backend="hccl"),
}
