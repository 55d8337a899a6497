"""The job of a rank: reads and checks everything a run needs, before the ranks connect to each other.

From top to bottom: this process's rank (`find_position`), the job (`prepare`), then what it is made of: the
device and the data.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from yuan_train.checkpoint.load import Checkpoint, find_checkpoints
from yuan_train.config.devices import DeviceType
from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.express import check_engine
from yuan_train.config.plan import Plan, RankPlan, node_of, single_card_plan
from yuan_train.config.plan_constraints import check_compile, check_plan_of_run, check_precision, check_tiers
from yuan_train.config.run import RunConfig
from yuan_train.data.loader import Blend, Samples, SampleSpec, open_corpora
from yuan_train.data.pairs import read_pairs
from yuan_train.data.rules import sample_rules
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.parallel.device import CPU, Device, visible_cards
from yuan_train.train.cards import check_card, check_compiler, check_processor, choose_card, why_no_card
from yuan_train.train.trackers import check_trackers


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

    Raises ConfigError for a variable that is not a number.
    """
    rank, world_size = _read_number("RANK", 0), _read_number("WORLD_SIZE", 1)
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
