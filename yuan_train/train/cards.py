"""Which card a rank has, and whether it is the card that its plan means.

Rules about values: what torch and the driver tell of the cards that a process sees (`CardFacts`), and what
the plan says. A rank takes its card by type (`choose_card`) and refuses one that the plan does not mean
(`check_card`, `check_processor`); what all ranks' cards must have in common is said in `agreement.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sysconfig
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

from yuan_train.config.devices import CATALOGUE, DeviceType, find_card
from yuan_train.config.errors import ConfigError
from yuan_train.config.plan import RankPlan, is_real_card
from yuan_train.config.units import show_bytes
from yuan_train.models import compiled
from yuan_train.parallel.device import CardFacts, cuda_of_driver

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose among a machine's cards, and number those anew."""

DRIVER_VERSION, BOOT = Path("/proc/driver/nvidia/version"), Path("/proc/sys/kernel/random/boot_id")
WHEELS = "install torch from PyTorch's own index of its {} builds (its Get Started page gives the command)"


def type_of(card: CardFacts) -> str | None:
    """The catalogue's name of a card; None if the catalogue does not have it."""
    return find_card(card.name, card.memory)


def choose_card(
    wanted: Sequence[str], local_rank: int, num_processes: int, cards: Sequence[CardFacts]
) -> int:
    """The number of a process's card among those that it sees.

    `wanted` are the types that the plan gives to the processes of this machine, by local rank; empty: no plan
    says. Each takes the first card of its type that none before it takes, and then those of types that the
    catalogue does not have take what is left. Where a launcher shows each process a single card (srun
    --gpus-per-task=1), that is it. Raises ConfigError if there are fewer cards than processes.
    """
    hidden = hidden_by()
    if len(cards) == 1 and (num_processes == 1 or hidden is not None):
        return 0
    if num_processes > len(cards):
        words = f" that {hidden} shows" if hidden else ""
        raise ConfigError(
            f"this machine has {len(cards)} cards{words}, but {num_processes} processes; start one per card"
        )
    if not wanted:
        return local_rank
    left = list(range(len(cards)))
    chosen: dict[int, int] = {}
    for rank, name in enumerate(wanted):
        number = next((n for n in left if type_of(cards[n]) == name), None)
        if number is not None:
            chosen[rank] = number
            left.remove(number)
    for rank in range(len(wanted)):
        if rank not in chosen:
            chosen[rank] = left.pop(0)
    return chosen[local_rank]


def check_card(entry: RankPlan, number: int, cards: Sequence[CardFacts]) -> None:
    """Raise ConfigError unless card `number` is of the type that the plan gives to a rank, and torch has code
    for it.

    A type that only the cluster file describes cannot be compared with a name, nor can a card that the
    catalogue does not have.
    """
    card = cards[number]
    fault = architecture_fault(card)
    if fault is not None:
        raise ConfigError(f"{_name(entry)}: {fault}")
    found = type_of(card)
    if entry.type not in CATALOGUE or found in (None, entry.type):
        return
    seen = ", ".join(type_of(other) or other.name for other in cards)
    hidden = hidden_by()
    raise ConfigError(
        f"{_name(entry)}: the plan has a card of type {entry.type} there, but cuda:{number} is {found} "
        f"({card.name}, {show_bytes(card.memory)}; this process sees {seen}"
        f"{f' with {hidden}' if hidden else ''}). Let CUDA_VISIBLE_DEVICES show it the right card "
        "(CUDA_DEVICE_ORDER=PCI_BUS_ID numbers them as nvidia-smi does), start the rank on the node that the "
        "plan means, or plan for the cards that are here"
    )


def check_processor(entry: RankPlan, described: DeviceType | None) -> None:
    """Raise ConfigError if a rank is meant to have a card, where this process has only a processor.

    `described` is the type of the rank's card, if anything describes it.
    """
    if not is_real_card(entry.type, described):
        return
    raise ConfigError(
        f"{_name(entry)}: the plan has a card of type {entry.type} there, but torch finds none on this "
        f"machine: {why_no_card()}. Start the rank where its card is, or set train.device=cpu, and it "
        "computes on the CPU"
    )


def _name(entry: RankPlan) -> str:
    return f"rank {entry.rank} ({entry.device})"


def hidden_by() -> str | None:
    """The variable that chooses among the machine's cards, with its value; None: all are visible."""
    return next((f"{name}={os.environ[name]}" for name in VISIBLE if name in os.environ), None)


def why_no_card() -> str:
    """Why torch finds no card here, as far as can be told."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    hidden = hidden_by()
    if hidden is not None and hidden.partition("=")[2].strip() in ("", "-1"):
        return f"{hidden} hides all cards"
    known = cuda_of_driver()
    if known is None:
        return "no driver is loaded"
    return driver_fault(torch.version.cuda, known) or f"the driver (for CUDA {known}) shows none"


def driver_fault(cuda: str | None, known: str | None) -> str | None:
    """What is wrong with a driver that knows CUDA up to `known` for a torch that is built for `cuda`.

    None: nothing, or it cannot be told. Any minor version runs on the driver of its major version (NVIDIA,
    CUDA compatibility).
    """
    if cuda is None or known is None or int(known.partition(".")[0]) >= int(cuda.partition(".")[0]):
        return None
    return (
        f"the driver knows CUDA up to {known}, and torch {torch.__version__} is built for CUDA {cuda}; "
        f"update the driver, or on every node (driver 525 is enough for it) {WHEELS.format('cu126')}"
    )


def has_code_for(capability: tuple[int, int], architectures: Sequence[str]) -> bool:
    """Whether a torch of these architectures runs on a card.

    Code for a card (`sm_86`) runs on those of the same major version and at least its minor one, and with a
    letter on that very card alone (`f`: its family). PTX (`compute_90`) is translated for all later cards.
    True where torch tells nothing, and for cards of other makers (`gfx942`).
    """
    known = [re.fullmatch(r"(sm|compute)_(\d+)(\d)([a-z]?)", name) for name in architectures]
    if not known or None in known:
        return True
    for kind, major, minor, letter in (found.groups() for found in known if found is not None):
        own = int(major), int(minor)
        if letter == "a":
            fits = own == capability
        elif kind == "compute" and not letter:
            fits = own <= capability
        else:
            fits = own[0] == capability[0] and own[1] <= capability[1]
        if fits:
            return True
    return False


def architecture_fault(card: CardFacts) -> str | None:
    """What to install where torch has no code for a card; None if it has."""
    if has_code_for(card.capability, card.architectures):
        return None
    major, minor = card.capability
    # Since torch 2.11 the wheels of later CUDA versions begin with sm_75.
    wheel = "cu126" if card.capability < (7, 5) else "cu130"
    return (
        f"torch {torch.__version__} has no code for {card.name} (sm_{major}{minor}), only for "
        f"{', '.join(card.architectures)}. On every node of the job {WHEELS.format(wheel)}"
    )


def driver_version(path: Path = DRIVER_VERSION) -> str | None:
    """The version of NVIDIA's driver that the kernel has loaded; None without one."""
    if not path.exists():
        return None
    found = re.search(r"Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", path.read_text(encoding="utf-8"))
    return found[1] if found else None


def machine_id(path: Path = BOOT) -> str:
    """What no other machine has, whatever its name: Linux draws it at each start; elsewhere the name."""
    return path.read_text(encoding="ascii").strip() if path.exists() else socket.gethostname()


def nccl_version() -> str | None:
    """The version of NCCL that torch uses; None if it is built without."""
    if not dist.is_nccl_available():
        return None
    return ".".join(map(str, nccl.version()))


def check_compiler(device: torch.device) -> None:
    """Raise ConfigError unless torch.compile works on a device: the run asks for it (`train.compile`)."""
    fault = compiler_fault(device.type) or _trial_fault(device)
    if fault is not None:
        raise ConfigError(f"train.compile: true, but {fault}; or set train.compile: false")


def compiler_fault(device_type: str) -> str | None:
    """What torch.compile needs for a type of device and this machine lacks, with what to do; else None."""
    if device_type == "cuda":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed, which compiles for cards: install it"
        if _find(os.environ.get("CC"), "gcc", "clang") is None:
            return "there is no C compiler, with which triton starts its kernels: install gcc (or set CC)"
    elif _find(os.environ.get("CXX"), "g++") is None:
        return f"there is no C++ compiler ({os.environ.get('CXX', 'g++')}): install g++ (or set CXX)"
    if not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        return "Python's headers (Python.h) are not there: install them (python3-dev)"
    return None


def _find(*names: str | None) -> str | None:
    """The path of the first of some programs; only the first name counts if it is given."""
    if names[0]:
        return shutil.which(names[0])
    return next((path for name in names[1:] if name and (path := shutil.which(name))), None)


def _trial_fault(device: torch.device) -> str | None:
    """What a small function's compilation fails with; None if it does not."""
    function = torch.compile(torch.nn.functional.silu, backend=compiled.BACKEND, dynamic=False)
    try:
        function(torch.ones(64, device=device))
    except Exception as error:  # Compilers, linkers and file systems may raise anything.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"it fails on this machine ({type(error).__name__}: {' '.join(lines[:3])}): repair that"
    return None
