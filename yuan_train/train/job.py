"""The job of a rank: reads and checks everything a run needs, before the ranks connect to each other.

From top to bottom: this process's rank (`find_position`), the job (`prepare`), then what it is made of: the
device and the data. A rank takes its card by type (`choose_card`), and refuses one that the plan does not
mean (`check_card`, `check_processor`), by what torch and the driver tell of the cards that the process sees
(`CardFacts`). What all ranks' cards must have in common is said in `agreement.py`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import socket
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.cuda import nccl

from yuan_train.checkpoint.load import Checkpoint, find_checkpoints
from yuan_train.config.devices import CATALOGUE, DeviceType, find_card
from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.express import check_engine
from yuan_train.config.plan import Plan, RankPlan, is_real_card, node_of, single_card_plan
from yuan_train.config.plan_constraints import check_compile, check_plan_of_run, check_precision, check_tiers
from yuan_train.config.run import RunConfig
from yuan_train.config.units import show_bytes
from yuan_train.data.loader import Blend, Samples, SampleSpec, open_corpora, sample_rules
from yuan_train.data.prompts import read_pairs
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models import transformer
from yuan_train.parallel.device import CPU, CardFacts, Device, cuda_of_driver, visible_cards
from yuan_train.parallel.grid import Grid
from yuan_train.train.metrics import check_trackers


@dataclass(frozen=True)
class Position:
    """Global and local rank of this process, and the numbers of processes; by default a single process."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    types: tuple[str, ...] = ()
    """Of this machine's processes, the types of cards that the plan gives them, by local rank; empty: it is
    not known which are here."""


def find_position() -> Position:
    """The position that the launcher's environment variables (RANK, WORLD_SIZE, ...) give.

    Raises ConfigError for a variable that is not a number, and for a rank that there is not.
    """
    rank, world_size = _read_number("RANK", 0), _read_number("WORLD_SIZE", 1)
    if rank >= world_size:
        raise ConfigError(
            f"environment variable RANK: {rank}; wanted less than WORLD_SIZE, {world_size}; "
            "the launcher sets both: unset RANK where nothing has started several processes"
        )
    return Position(
        rank, world_size, _read_number("LOCAL_RANK", rank), _read_number("LOCAL_WORLD_SIZE", world_size)
    )


def _read_number(name: str, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdigit():
        raise ConfigError(f"environment variable {name}: wanted a number, got {text!r}; the launcher sets it")
    return int(text)


@dataclass(frozen=True)
class Job:
    """Everything a run needs, checked; the ranks are not connected yet."""

    run: RunConfig
    plan: Plan
    position: Position
    device: Device
    train: Samples
    validation: Blend | None
    tokenizer: Tokenizer | None
    checkpoint: Checkpoint | None
    start: Checkpoint | None = None
    """Weights to begin with, if there is no checkpoint to resume from."""

    def validates_after(self, step: int) -> bool:
        """Whether the loss on the validation data is due after a step."""
        every = self.run.validation.every
        return self.validation is not None and every > 0 and step % every == 0


def prepare(run: RunConfig, plan: Plan | None, position: Position) -> Job:
    """Check all files of a run and return its job; without a plan, one process runs the whole model.

    Succeeds or fails on every rank alike. Raises YuanError.
    """
    plan = plan or single_card_plan(run)
    check_plan_of_run(plan, run)
    if position.rank == 0:
        check_trackers(run.log)
    run = wait_for_steps(run, plan)
    device, tokenizer = check_position(run, plan, position)
    train, validation = open_data(run, tokenizer)
    # Of several ranks one looks for all, once they are connected: see `agreement.find_resume_together`.
    alone = position.world_size == 1
    checkpoint, start = find_checkpoints(run) if alone else (None, None)
    return Job(run, plan, position, device, train, validation, tokenizer, checkpoint, start)


def wait_for_steps(run: RunConfig, plan: Plan) -> RunConfig:
    """The run with a `train.timeout` of at least two steps as the plan forecasts them: a rank that is one
    step behind is slow, and not lost."""
    seconds = 2 * plan.forecast.step_seconds if plan.forecast is not None else 0.0
    if seconds <= run.train.timeout:
        return run
    return replace(run, train=replace(run.train, timeout=seconds))


def check_position(run: RunConfig, plan: Plan, position: Position) -> tuple[Device, Tokenizer | None]:
    """The device of this process under a plan of the run, and the run's tokenizer. Raises YuanError."""
    check_precision(plan, run)
    check_compile(plan, run)
    check_engine(plan, run)
    check_tiers(plan, run)
    Grid(plan).check_resident_parts()
    if plan.world_size != position.world_size:
        raise PlanError(
            f"the plan has {plan.world_size} ranks, but {position.world_size} "
            f"{'process was' if position.world_size == 1 else 'processes were'} started; start one per rank "
            "(yuan-train launch), or make a plan for the available cards"
        )
    device = choose_planned(run.train.device, plan.ranks, position, plan.find_type)
    run_beside(device)
    card = device.facts()
    if card is not None and run.train.precision == "bf16" and not card.has_bf16:
        raise ConfigError(
            f"train.precision: bf16, but {card.name} has no bf16 units; set train.precision: fp16"
        )
    if run.train.compile:
        check_compiler(device.torch)
    device_type = plan.device_type(position.rank)
    if device.is_card and device_type is not None and device_type.slowdown:
        raise PlanError(
            f"rank {position.rank} is a simulated card (slowdown), which runs on a CPU: set train.device=cpu"
        )
    tokenizer = Tokenizer.load(run.data.tokenizer) if run.data.tokenizer else None
    if tokenizer is not None and tokenizer.vocab_size > run.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size: {run.model.vocab_size} rows, but tokenizer {run.data.tokenizer} has "
            f"{tokenizer.vocab_size} pieces; use a larger vocab_size, or the tokenizer of this model"
        )
    return device, tokenizer


def choose_planned(
    wanted: str, ranks: Sequence[RankPlan], position: Position, find_type: Callable[[str], DeviceType | None]
) -> Device:
    """The device of a rank of a plan, as `choose_device` finds it; `find_type` describes types of cards.

    A simulated card is a processor, unless `wanted` is cuda. Raises ConfigError unless the device is what the
    plan means: a card of that type, which torch has code for, or a processor where `wanted` is cpu.
    """
    entry = ranks[position.rank]
    described = find_type(entry.type)
    if wanted == "auto" and described is not None and described.slowdown is not None:
        return CPU
    if not position.types:
        position = replace(position, types=types_here(ranks, position))
    device = choose_device(wanted, position, entry)
    if not device.is_card and wanted != "cpu":
        check_processor(entry, described)
    return device


def types_here(ranks: Sequence[RankPlan], position: Position) -> tuple[str, ...]:
    """`Position.types`, if `ranks` are those of all processes of the job.

    The ranks of a node by the plan, if as many run here; or else those beside this one, as torchrun numbers
    them.
    """
    rank, local, number = position.rank, position.local_rank, position.local_world_size
    node = node_of(ranks[rank])
    named = [entry for entry in ranks if node_of(entry) == node]
    beside = ranks[rank - local : rank - local + number] if rank >= local else ()
    for own in (named, beside):
        if len(own) == number and own[local].rank == rank:
            return tuple(entry.type for entry in own)
    return ()


def choose_device(
    wanted: str,
    position: Position,
    entry: RankPlan | None = None,
    *,
    cards: Callable[[], Sequence[Device]] = visible_cards,
) -> Device:
    """The device of this process: one of the `cards` that it sees, by type or by local rank, or the CPU.

    `wanted` is cuda, cpu or auto (a card if there is one). Raises ConfigError if `cuda` is wanted and torch
    finds no card, if more processes than cards run on this machine, or if the card is not what the plan has
    for its rank (`entry`).
    """
    found = () if wanted == "cpu" else cards()
    if wanted == "cuda" and not found:
        raise ConfigError(f"train.device: cuda, but torch finds no card: {why_no_card()}; use cpu or auto")
    if not found:
        return CPU
    facts = [card for one in found if (card := one.facts()) is not None]
    number = choose_card(position.types, position.local_rank, position.local_world_size, facts)
    if entry is not None:
        check_card(entry, number, facts)
    found[number].use()
    return found[number]


def open_data(run: RunConfig, tokenizer: Tokenizer | None) -> tuple[Samples, Blend | None]:
    """Training samples, and validation samples if the run has any. Raises DataError."""
    data = run.data
    if data.pairs is not None:
        return read_pairs(
            data.pairs,
            tokenizer,
            sequence_length=data.sequence_length,
            seed=run.train.seed,
            vocab_size=run.model.vocab_size,
            trained="end" if run.objective.kind == "reward" else "answer",
        ), None
    spec = SampleSpec(
        sequence_length=data.sequence_length,
        seed=run.train.seed,
        vocab_size=run.model.vocab_size,
        rules=sample_rules(data, tokenizer),
        loss_on_answers=data.loss_on_answers,
    )
    sources = [(source.prefix, source.weight) for source in data.train]
    train = open_corpora(sources, spec, split=data.split)
    if data.split is not None:
        return train, open_corpora(sources, spec, split=data.split, part="validation")
    if not data.validation:
        return train, None
    held_out = [(source.prefix, source.weight) for source in data.validation]
    return train, open_corpora(held_out, spec, part="validation")


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
    try:
        function = torch.compile(torch.nn.functional.silu, backend=transformer.BACKEND, dynamic=False)
        function(torch.ones(64, device=device))
    except Exception as error:  # Compilers, linkers and file systems may raise anything.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return f"it fails on this machine ({type(error).__name__}: {' '.join(lines[:3])}): repair that"
    return None
