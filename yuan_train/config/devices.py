"""The catalogue of cards: peaks and bandwidths as vendors state them, memory as torch reports it; names.

Peaks are dense; sparse figures are halved. A card without `bf16` has no bf16 matrix units.
Sources: vendor datasheets, and pytorch/torchtitan torchtitan/tools/utils.py (vendor links inside).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le

from yuan_train.config.units import Unit

Precision = Literal["bf16", "fp16", "fp32", "fp64"]
Backend = Literal["nccl", "rccl", "hccl", "gloo"]
Bytes = Annotated[int, Gt(0), Unit("bytes")]
BytesPerSecond = Annotated[float, Gt(0), Unit("bytes/s")]
Flops = Annotated[float, Gt(0), Unit("FLOP/s")]

GIB = 2**30
"""Bytes of a GiB."""
MIB = 2**20
"""Bytes of a MiB."""


@dataclass(frozen=True)
class Simulated:
    """How long a piece of work lasts where a process simulates a card."""

    slowdown: float = 1.0
    """Of the processor time that it used, or pieces of its kind did at first; 1 on a real card."""
    piece_seconds: float | None = None
    """In place of that; None: as `slowdown` says."""

    @property
    def is_simulated(self) -> bool:
        """Whether a process waits after its work."""
        return self.slowdown > 1 or self.piece_seconds is not None


REAL = Simulated()
"""Of a card that nobody simulates."""


@dataclass(frozen=True, kw_only=True)
class DeviceType:
    """A type of card: memory, peak rates and bandwidths. A peak of None: the card lacks that precision."""

    memory: Bytes
    """As torch reports it: `torch.cuda.get_device_properties(...).total_memory`."""
    reserved: Annotated[int, Ge(0), Unit("bytes")] = GIB
    """Not available to training: the driver's context, communicators and fragmentation."""
    fp32: Flops
    """Peak of dense fp32 products."""
    bf16: Flops | None = None
    """Peak of dense bf16 products; None: the card has no units for them."""
    fp16: Flops | None = None
    """Peak of dense fp16 products; None: the card has no units for them."""
    memory_bandwidth: BytesPerSecond
    """Between the card's processors and its own memory."""
    host_link: BytesPerSecond = 16e9
    """Between the card and host memory, per direction."""
    host_memory_bandwidth: BytesPerSecond = 25e9
    """The card's share of the bandwidth of host memory; offloaded optimizer state is stepped at this rate."""
    backend: Backend = "nccl"
    """Communication backend of the card's processes. Messages between cards of different backends go over
    gloo, via host memory, and so do those of cards whose backend is gloo."""
    slowdown: Annotated[float, Ge(1), Le(10**6)] | None = None
    """Only for cards simulated by a CPU process: after each computation the process waits, so that it takes
    this many times as long as the processor's time for it. From the 17th piece of a kind of work on, such as
    a round of generation, that is the median of the first 16. Other work on the machine then changes no
    figure, unless a piece takes longer by itself, of which a note tells."""
    piece_seconds: Annotated[float, Gt(0), Unit("seconds")] | None = None
    """Likewise: each piece of work, such as the forward of a micro-batch or a round of generation, lasts so
    long, whatever it took; one that takes longer lasts as long as it takes. Figures then repeat on a machine
    with other work. None: as `slowdown` says, by which `profile` goes in any case."""
    capability: Annotated[float, Gt(0)] | None = None
    """NVIDIA's compute capability, `8.6`; None: another vendor's card, or not known."""
    price: Annotated[float, Gt(0), Le(10**9)] | None = None
    """Rent of a card for an hour, in any currency; a node's own `price` takes precedence."""

    @property
    def simulated(self) -> Simulated:
        """How long work lasts on the card, if a process simulates it."""
        return Simulated(self.slowdown or 1.0, self.piece_seconds if self.slowdown is not None else None)

    def peak(self, precision: Precision) -> float | None:
        """Peak FLOP/s in a precision, divided by a simulated card's slowdown; None if the card lacks it."""
        rate = {"bf16": self.bf16, "fp16": self.fp16, "fp32": self.fp32, "fp64": self.fp32 / 2}[precision]
        return rate / (self.slowdown or 1.0) if rate else None


MEMORY_FRACTION = 0.95
"""Of a card's memory, what is filled unless a run file says otherwise (`search.memory_fraction`)."""


def usable_bytes(device: DeviceType, fraction: float) -> float:
    """What a plan may fill of a card, its `reserved` bytes included: a fraction of what torch reports.

    The rest is for what no forecast counts, first of all the allocator's fragments: measured peaks are 1 to
    4 % over the forecast.
    """
    return device.memory * fraction


def _card(
    memory_mib: float,
    bandwidth_gbs: float,
    fp32: float,
    half: float,
    *,
    capability: float | None = None,
    pcie: int = 4,
    backend: Backend = "nccl",
) -> DeviceType:
    """A catalogue entry: memory in MiB, as torch reports it; rates in GB/s and TFLOP/s."""
    return DeviceType(
        memory=round(memory_mib * MIB),
        reserved=2 * GIB if memory_mib >= 20e3 else GIB,
        fp32=fp32 * 1e12,
        bf16=half * 1e12 if capability is None or capability >= 8.0 else None,
        fp16=half * 1e12,
        memory_bandwidth=bandwidth_gbs * 1e9,
        host_link=PCIE_BYTES_PER_SECOND[pcie],
        backend=backend,
        capability=capability,
    )


PCIE_BYTES_PER_SECOND = {3: 12.5e9, 4: 25e9, 5: 52e9}
"""What a copy of pinned memory gets over 16 lanes of a PCIe generation: about 0.8 of the rate on the wire."""

# Memory is `torch.cuda.get_device_properties(...).total_memory`, less than what is printed on the card: the
# driver keeps a part, ECC on GDDR takes a sixteenth, and newer drivers keep more. Reports differ by 1 %, so
# the smallest that was found stands here. `reported`: by that card's owner, in an out-of-memory error ("total
# capacity of") or as `_CudaDeviceProperties`; the issue is named where the report is one. `derived`: from
# another card with the same chips of memory, or from nvidia-smi's figure.
CATALOGUE: dict[str, DeviceType] = {
    "P100": _card(16280, 732, 10.6, 21.2, pcie=3, capability=6.0),  # reported
    "V100-16G": _card(16130, 900, 15.7, 125, pcie=3, capability=7.0),  # reported
    # reported: liucongg/ChatGLM-Finetuning#73, 31.74 GiB
    "V100-32G": _card(32502, 900, 15.7, 125, pcie=3, capability=7.0),
    # reported: 14.56 GiB with newer drivers, 15,079 to 15,109 MiB with older ones
    "T4": _card(14909, 320, 8.1, 65, pcie=3, capability=7.5),
    "RTX-2080": _card(7974, 448, 10, 42, pcie=3, capability=7.5),  # derived: RTX 2060 SUPER
    # reported: RenYurui/StructureFlow#35, 10.76 GiB
    "RTX-2080Ti": _card(11018, 616, 13, 57, pcie=3, capability=7.5),
    "Titan-RTX": _card(24114, 672, 16, 130, pcie=3, capability=7.5),  # derived: RTX A5000
    "A10": _card(22517, 600, 31.2, 125, capability=8.6),  # reported: zai-org/CogVLM#236, 21.99 GiB
    "A30": _card(24094, 933, 10.3, 165, capability=8.0),  # reported: google/RB-Modulation#5, 23.53 GiB
    "A40": _card(45416, 696, 37.4, 149.7, capability=8.6),  # reported
    "A100-40G": _card(40326, 1555, 19.5, 312, capability=8.0),  # reported
    # reported: 79.15 GiB; 79.25 GiB in HiDream-ai/VAREdit#6
    "A100-80G": _card(81049, 2039, 19.5, 312, capability=8.0),
    "A800-80G": _card(81049, 2039, 19.5, 312, capability=8.0),  # derived: A100
    "RTX-3060": _card(11931, 360, 12.7, 25.5, capability=8.6),  # reported
    "RTX-3080": _card(10014, 760, 29.8, 59.5, capability=8.6),  # reported: zai-org/CogVideo#34, 9.78 GiB
    # derived: RTX 3090 Ti under driver 590; 23.70 GiB with older ones, Lightning-AI/lit-llama#137
    "RTX-3090": _card(24114, 936, 35.6, 71, capability=8.6),
    "RTX-A5000": _card(24114, 768, 27.8, 111, capability=8.6),  # reported
    "RTX-A6000": _card(48676, 768, 38.7, 155, capability=8.6),  # reported, without ECC
    # derived: RTX 4070 Ti SUPER; a 4080 was reported with 16,049 MiB
    "RTX-4080": _card(15934, 717, 48.7, 97.5, capability=8.9),
    # reported: Soul-AILab/SoulX-FlashTalk#5, 23.52 GiB; 23.64 GiB in ali-vilab/VGen#104
    "RTX-4090": _card(24084, 1008, 82.6, 165.2, capability=8.9),
    # reported: TrajectoryCrafter/TrajectoryCrafter#20, 31.36 GiB
    "RTX-5090": _card(32112, 1792, 104.8, 209.5, pcie=5, capability=12.0),
    # reported with ECC: DINGYANB/MTVCrafter#21, 44.43 GiB
    "RTX-6000-Ada": _card(45496, 960, 91.1, 364, capability=8.9),
    "L4": _card(22558, 300, 30.3, 121, capability=8.9),  # derived: 22.03 GiB, of 23,034 MiB by nvidia-smi
    "L20": _card(45465, 864, 59.8, 119.5, capability=8.9),  # derived: L40S
    "L40S": _card(45465, 864, 91.6, 362, capability=8.9),  # reported: vllm-project/vllm#23230, 44.40 GiB
    "H100-80G": _card(80998, 3350, 67, 989, pcie=5, capability=9.0),  # reported: huggingface/trl#2688
    "H100-PCIe": _card(81008, 2039, 51, 756, pcie=5, capability=9.0),  # reported
    "H100-NVL": _card(95324, 3938, 60, 835, pcie=5, capability=9.0),  # derived: 93.09 GiB
    "H800-80G": _card(80998, 3350, 67, 989, pcie=5, capability=9.0),  # derived: H100
    # reported: modelscope/DiffSynth-Studio#1238, 95.00 GiB
    "H20": _card(97280, 4000, 44, 148, pcie=5, capability=9.0),
    "H200": _card(143073, 4800, 67, 989, pcie=5, capability=9.0),  # reported: 139.72 to 139.81 GiB
    # derived: H20, whose 97,871 MiB by nvidia-smi it shares; its link to the host is NVLink-C2C, much faster
    "GH200": _card(97280, 4000, 67, 989, pcie=5, capability=9.0),
    "B200": _card(182630, 7700, 75, 2250, pcie=5, capability=10.0),  # reported: 178.35 GiB
    "MI250X-GCD": _card(65520, 1638, 23.9, 191.5, backend="rccl"),  # reported
    "MI300X": _card(196592, 5300, 163.4, 1307, pcie=5, backend="rccl"),  # reported
    "Ascend-910B2": _card(62689, 1600, 94, 376, backend="hccl"),  # reported of a 64 GB card: 61.22 GiB
    "Ascend-910B3": _card(62689, 1600, 78, 313, backend="hccl"),
    "Ascend-910B4": _card(31344, 800, 70, 280, backend="hccl"),  # derived: half of that
}

_FILLERS = frozenset(
    "nvidia amd geforce tesla quadro instinct rtx generation graphics dgxs gcd vf".split()
    # Of a GH200, 480 GB and 120 GB are those of its processor.
    + ["480gb", "120gb"]
)
"""Words of vendors and of forms that do not tell two catalogued cards apart."""
_FORM = re.compile(r"(sxm\d?|hbm\d?e?)")
_SIZE = re.compile(r"(\d+)(gib|gb|g)")


@dataclass(frozen=True)
class _Words:
    """A name of a card, taken apart."""

    model: frozenset[str]
    """`{"2080", "ti"}`; with `pcie` and `nvl`, which name cards of their own."""
    gigabytes: int | None
    """Of memory, if the name says it."""
    form: bool
    """Whether it says `SXM4` or `HBM3`: the form without a word in the catalogue's names."""


@cache
def _take_apart(name: str) -> _Words:
    """Split a name at spaces, dashes and between words that people write together: `RTX4090`, `3080Ti`."""
    text = name.lower().replace("mi250x/mi250", "mi250x")
    text = re.sub(r"(rtx|gtx|titan|ascend)(?=\w)", r"\1 ", text)
    text = re.sub(r"(?<=\d)(?=pcie|nvl|sxm)", " ", text)
    text = re.sub(r"(\d{4})(?=ti\b|super\b|ada\b|d\b)", r"\1 ", text)
    words = [word for word in re.split(r"[^a-z0-9]+", text) if word and word not in _FILLERS]
    sizes = [int(found[1]) for word in words if (found := _SIZE.fullmatch(word))]
    model = frozenset(w for w in words if not _SIZE.fullmatch(w) and not _FORM.fullmatch(w))
    return _Words(model, sizes[0] if sizes else None, any(_FORM.fullmatch(word) for word in words))


def find_card(name: str, memory: float | None = None) -> str | None:
    """The catalogue's name of a card that a person, torch or nvidia-smi calls `name`; None if it has none.

    Case, spaces, dashes and vendors' words do not matter: "NVIDIA GeForce RTX 4090", "rtx4090". Of cards that
    differ in memory the name's size decides ("A100-SXM4-80GB"), or `memory`, in bytes as torch reports it.
    None as well where several cards are meant: "H100" is one of three. A word that no entry has names another
    card: "RTX 4090 Laptop GPU", "RTX 4090 D".
    """
    if name in CATALOGUE:
        return name
    wanted = _take_apart(name)
    entries = {known: _take_apart(known) for known in CATALOGUE}
    near = {
        known
        for known, entry in entries.items()
        if _agrees(known, entry, wanted.gigabytes, memory) and wanted.model and entry.model >= wanted.model
    }
    exact = [known for known in near if entries[known].model == wanted.model]
    if not exact and "pcie" in wanted.model:
        plain = wanted.model - {"pcie"}
        exact = [
            known
            for known, entry in entries.items()
            if entry.model == plain and _agrees(known, entry, wanted.gigabytes, memory)
        ]
        near = set(exact)
    if len(exact) != 1:
        return None
    open_question = entries[exact[0]].gigabytes is not None and len(near) > 1
    return None if open_question and wanted.gigabytes is None and not wanted.form else exact[0]


def _agrees(known: str, entry: _Words, gigabytes: int | None, memory: float | None) -> bool:
    """Whether a catalogue entry may have the memory that a name and a driver tell."""
    own = CATALOGUE[known].memory
    if memory is not None and abs(own - memory) > 0.08 * own:
        return False
    if gigabytes is None:
        return True
    if entry.gigabytes is not None:
        return entry.gigabytes == gigabytes
    return 0.88 <= own / (gigabytes * 1e9) <= 1.08


def suggest_cards(name: str, own: Iterable[str] = ()) -> str:
    """What a person may have meant by the name of an unknown card: "A100-40G or A100-80G", or "".

    Cards of the same family come first, then the name that is spelt most alike; `own` are the names of a
    cluster file's `device_types`.
    """
    wanted = _take_apart(name)
    family = [known for known in CATALOGUE if wanted.model and _take_apart(known).model >= wanted.model]
    if not family:
        spelt = {known.lower(): known for known in (*own, *CATALOGUE)}
        close = difflib.get_close_matches(name.lower(), spelt, n=1, cutoff=0.6)
        family = [spelt[word] for word in close]
    return " or ".join([", ".join(family[:-1]), family[-1]] if len(family) > 1 else family)
