"""What all ranks of a run agree on, or none goes on: before anything is built, and on the forms of its ops.

Each rank reads run, plan and corpora by itself. A stale file on one node would train garbage
without an error, for owners of the same layers never compare their weights. So the ranks compare hashes of
all that they have read, tell each other which cards they have, and check that they see one checkpoint
directory. A difference ends the run on all ranks, with a message that names the rank, its host, and what
differs. Then they find the checkpoint from which all go on, on disk or in the memory of their nodes.

Which implementation of each op they use is chosen when they build, alike where they must round alike. A
choice tests kernels and compiles them. In a forward it would be inside of what torch's checkpoint runs
again, and ranks would wait for each other's compilers in the first step.

The ranks of a tensor-parallel group compute norms and routers each by itself, from equal inputs: with unlike
forms their gradients would round unlike, and the weights would drift apart. Owners of the same weights on
like cards should differ in nothing either. Where a kernel has failed its test on one of them, all use the
form that every card has. Owners on unlike cards keep what is best on each: before they step, their gradients
are added up.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import socket
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from yuan_kernels import ops

import yuan_train
from yuan_train.checkpoint.in_memory import NodeMemory, forget_copies
from yuan_train.checkpoint.load import check_same_model, find_checkpoints
from yuan_train.checkpoint.save import SEEN, remove_leftovers
from yuan_train.config.errors import CheckpointError, ConfigError, PlanError, YuanError
from yuan_train.config.load import as_plain
from yuan_train.config.plan import Plan, RankPlan, copied_bytes, node_of
from yuan_train.config.run import HostCopies, RunConfig
from yuan_train.config.units import show_bytes
from yuan_train.models.transformer import choose_ops
from yuan_train.parallel.device import CardFacts, CardMemory, Device, available_bytes
from yuan_train.parallel.environment import LEASE_SECONDS, holding
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import gather_objects, share_object
from yuan_train.train.job import Job, driver_version, machine_id, nccl_version, type_of

logger = logging.getLogger(__name__)

NODE_LOCAL = (
    "data.train",
    "data.pairs",
    "data.validation",
    "data.tokenizer",
    "log.directory",
    "checkpoint.directory",
    "start.checkpoint",
    "train.device",
)
"""Keys of a run that may differ from node to node: paths, whose contents are compared instead."""

MAX_LISTED = 4
"""Ranks, and differences of each, that a message lists."""

SEEN_WITHIN_SECONDS = 10.0
"""A network file system may show another node's new file only after some seconds."""


def raise_together(error: YuanError | None) -> None:
    """Raise, on all ranks, what any rank has found wrong by itself; collective over all ranks.

    An error that all ranks have is raised as it is; one of some ranks alone is preceded by their names.
    """
    if not dist.is_initialized():
        if error is not None:
            raise error
        return
    if not _any_rank(error is not None):
        return
    mine = None if error is None else (type(error), str(error))
    found = [(rank, host, kind, text) for rank, host, (kind, text) in _gather(mine)]
    texts = {text for _, _, _, text in found}
    kinds = [kind for _, _, kind, _ in found]
    if len(found) == dist.get_world_size() and len(texts) == 1:
        raise kinds[0](found[0][3])
    lines = [f"rank {rank} ({host}): {text}" for rank, host, _, text in found[:MAX_LISTED]]
    raise kinds[0]("\n".join([*lines, *_more(len(found))]))


@contextlib.contextmanager
def agreeing() -> Iterator[None]:
    """Around what each rank does by itself: `raise_together` a YuanError of it. Collective over all ranks."""
    fault: YuanError | None = None
    try:
        yield
    except YuanError as error:
        fault = error
    raise_together(fault)


@contextlib.contextmanager
def holding_directories(job: Job) -> Iterator[None]:
    """Inside, no other run writes where this one does: rank 0 sees to it; collective over all ranks.

    Raises ConfigError, on all ranks, if one does already.
    """
    wanted = (job.run.log.directory, job.run.checkpoint.directory) if job.position.rank == 0 else ()
    within = min(LEASE_SECONDS, job.run.train.timeout / 2)
    with contextlib.ExitStack() as held:
        with agreeing():
            for directory in sorted({os.path.realpath(path) for path in wanted if path is not None}):
                held.enter_context(holding(directory, ".in-use", "another run", within))
        yield


def agree_on_job(job: Job) -> Job:
    """Check that all ranks were given the same job; with the checkpoint that all of them resume from.
    Collective."""
    check_same_job(job)
    check_cards(job)
    if (directory := job.run.checkpoint.directory) is not None:
        check_same_directory(directory)
    job = find_resume_together(job)
    if directory is not None and job.position.rank == 0:
        remove_leftovers(Path(directory))  # Else those of the last save would stay for ever.
    return find_in_memory(job)


def check_same_job(job: Job) -> None:
    """Raise ConfigError, on all ranks, unless all have read the same; collective over all ranks."""
    if not dist.is_initialized():
        return
    facts = job_facts(job)
    digest = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).digest()
    # Whether some rank has another digest: two numbers instead of one from each rank.
    own = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    least, most = own.clone(), own.clone()
    dist.all_reduce(least, dist.ReduceOp.MIN)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if torch.equal(least, most):
        return
    digests = gather_objects(digest)
    # What most ranks have; of equals, what the lowest rank has.
    reference = Counter(digests).most_common(1)[0][0]
    source = digests.index(reference)
    shared = share_object(facts, source=source)
    odd = _gather(compare_facts(facts, shared) if digest != reference else None)
    lines = [
        f"rank {rank} ({host}) has another job than rank {source}: {found}"
        for rank, host, found in odd[:MAX_LISTED]
    ]
    advice = "give every node the same run file, overrides, plan, corpora, tokenizer and release"
    raise ConfigError("\n".join([*lines, *_more(len(odd)), advice]))


def check_cards(job: Job) -> None:
    """Raise ConfigError, on all ranks, where the ranks' cards do not go together; collective over all ranks.

    Rank 0 logs the cards of each node, and all logs what the forecast asks of memory that is not free.
    """
    own, notes = _tell_card(job), list[str]()
    with agreeing():
        notes += _memory_notes(job)
    told: list[Any] = [(own, notes)]
    if dist.is_initialized():
        if not _any_rank(own is not None or bool(notes)):
            return
        is_first = dist.get_rank() == 0
        told = [None] * dist.get_world_size() if is_first else []
        dist.gather_object((own, notes), told if is_first else None)
    with agreeing():
        cards = [card for card, _ in told if card is not None]
        for line in node_lines(cards):
            logger.info("%s", line)
        for note in (note for _, notes in told for note in notes):
            logger.warning("%s", note)
        if (found := find_fault(cards)) is not None:
            raise ConfigError(found)


@dataclass(frozen=True, kw_only=True)
class RankCard:
    """What a rank tells all others of its card."""

    rank: int
    host: str
    machine: str
    """What tells machines of one host name apart: each has it from its last start."""
    device: str
    """Its name in the plan."""
    facts: CardFacts
    uses_nccl: bool
    """Whether its messages go over NCCL, which refuses two ranks on a card."""
    driver: str | None
    nccl: str | None


def _tell_card(job: Job) -> RankCard | None:
    """What this rank tells of its card; None if it has none."""
    facts, entry = job.device.facts(), job.plan.ranks[job.position.rank]
    if facts is None:
        return None
    uses_nccl = job.device.library == "nccl" and not job.plan.via_host((entry.rank,))
    return RankCard(
        rank=entry.rank,
        host=socket.gethostname(),
        machine=machine_id(),
        device=entry.device,
        facts=facts,
        uses_nccl=uses_nccl,
        driver=driver_version(),
        nccl=nccl_version(),
    )


def find_fault(cards: Sequence[RankCard]) -> str | None:
    """What is wrong with the cards of all ranks together; None: nothing."""
    taken: dict[tuple[str, str], RankCard] = {}
    for card in cards:
        address = card.facts.pci_address
        # Slices of a card (MIG) have its address.
        if not card.uses_nccl or address is None or " MIG " in card.facts.name:
            continue
        other = taken.setdefault((card.machine, address), card)
        if other is not card:
            return (
                f"ranks {other.rank} ({other.device}) and {card.rank} ({card.device}) of {card.host} have "
                f"the same card, {card.facts.name} at {address}; start one rank per card, and let "
                "CUDA_VISIBLE_DEVICES show all of a node's cards to all its ranks, or to each its own"
            )
    return _versions_fault([card for card in cards if card.uses_nccl])


def _versions_fault(cards: Sequence[RankCard]) -> str | None:
    """The ranks with another NCCL than rank 0's, between which no message would arrive."""
    odd = [card for card in cards if card.nccl != cards[0].nccl]
    if not odd:
        return None
    listed = ", ".join(f"rank {c.rank} ({c.host}) {c.nccl}" for c in odd[:MAX_LISTED])
    first = cards[0]
    return (
        f"NCCL is {first.nccl} on rank {first.rank} ({first.host}), but {listed}"
        f"{', ...' if len(odd) > MAX_LISTED else ''}; install the same torch, which brings its NCCL, on "
        "every node, and unset LD_PRELOAD and LD_LIBRARY_PATH where they bring another"
    )


def node_lines(cards: Sequence[RankCard]) -> Iterator[str]:
    """A line for each machine: its ranks' cards, driver, CUDA and NCCL."""
    machines: dict[str, list[RankCard]] = {}
    for card in cards:
        machines.setdefault(card.machine, []).append(card)
    for own in machines.values():
        names: dict[str, int] = {}
        for card in own:
            facts = card.facts
            code = "" if facts.cuda is None else ", sm_{}{}".format(*facts.capability)
            words = f"{type_of(facts) or facts.name} ({show_bytes(facts.memory)}{code})"
            names[words] = names.get(words, 0) + 1
        held = " and ".join(f"{count} x {words}" for words, count in names.items())
        first, ranks = own[0], ", ".join(str(card.rank) for card in own)
        known = {"driver": first.driver, "CUDA": first.facts.cuda, "NCCL": first.nccl}
        versions = ", ".join(f"{name} {version}" for name, version in known.items() if version is not None)
        yield f"{first.host}: rank{'s' * (len(own) > 1)} {ranks}: {held}; {versions}"


def _memory_notes(job: Job) -> Iterator[str]:
    """What is short for the plan's forecast on this rank's card and host. Raises PlanError if a card is."""
    entry, memory, facts = job.plan.ranks[job.position.rank], job.device.memory(), job.device.facts()
    needs = needs_of(job.plan, entry.rank)
    if needs is None:
        return
    if memory is not None and facts is not None:
        note = check_card_memory(entry, needs, memory, facts)
        if note is not None:
            yield note
    copies = job.run.host_copies
    if needs.host or copies.keys:
        note = host_note(job.plan, entry, available_bytes(), copies=copies)
        if note is not None:
            yield note


@dataclass(frozen=True)
class Needs:
    """What a plan's forecast says that a rank takes: bytes."""

    card: float
    """At the peak, with what is reserved."""
    reserved: float
    """Of these, for the context, communicators and fragmentation."""
    host: float


def needs_of(plan: Plan, rank: int) -> Needs | None:
    """What a rank takes; None without a forecast. Of its stages each has what the whole card holds."""
    if plan.forecast is None:
        return None
    own = {(p, s) for p, s, stage in plan.numbered_stages if rank in stage.ranks}
    stages = [stage for stage in plan.forecast.stages if (stage.pipeline, stage.stage) in own]
    if not stages:
        return None
    return Needs(
        card=max(stage.peak_memory_bytes for stage in stages),
        reserved=max(stage.memory.reserved for stage in stages),
        host=max(stage.host_memory_bytes for stage in stages),
    )


def check_card_memory(entry: RankPlan, needs: Needs, memory: CardMemory, card: CardFacts) -> str | None:
    """A note where what is free of a card is less than the forecast; None where it is enough.

    Raises PlanError if the whole card is.
    """
    name = f"rank {entry.rank} ({entry.device})"
    if needs.card > memory.total:
        raise PlanError(
            f"{name}: the plan's forecast is {show_bytes(needs.card)} at its peak, and {card.name} "
            f"has {show_bytes(memory.total)} in all; plan again for what the card has (`memory` of its type, "
            "under device_types in the cluster file)"
        )
    wanted = needs.card - needs.reserved
    # What is reserved is taken already, at least in part.
    free = memory.free + memory.reserved - memory.allocated
    if wanted <= free:
        return None
    users = ", ".join(card_users(card.pci_address)) or "the driver does not tell whose"
    return (
        f"{name}: the plan's forecast takes {show_bytes(wanted)} of {card.name} beside what is "
        f"reserved, but {show_bytes(free)} of {show_bytes(memory.total)} are free; others are on it: {users}"
    )


def host_note(
    plan: Plan, entry: RankPlan, available: float, *, copies: HostCopies | None = None
) -> str | None:
    """A note of the first rank of a node whose ranks put more on the host than is available there; `copies`
    are those of saves."""
    node = node_of(entry)
    own = [other for other in plan.ranks if node_of(other) == node]
    if own[0] != entry:
        return None
    forecast = sum(needs.host for other in own if (needs := needs_of(plan, other.rank)) is not None)
    copies = copies or HostCopies()
    copied = copied_bytes(plan, node, copies)
    if forecast + copied <= available:
        return None
    saves = f" and saves copy {show_bytes(copied)} there ({copies.keys})" if copied else ""
    return (
        f"node {node}: by the plan's forecast its {len(own)} ranks put {show_bytes(forecast)} on the "
        f"host{saves}, of which {show_bytes(available)} are available now"
    )


def card_users(address: str | None) -> list[str]:
    """The processes on a card, as nvidia-smi tells; empty where it does not."""
    query = ["nvidia-smi", "--query-compute-apps=gpu_bus_id,pid,process_name,used_memory"]
    try:
        ran = subprocess.run(
            [*query, "--format=csv,noheader"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    found: list[str] = []
    for line in ran.stdout.splitlines():
        bus, *words = (word.strip() for word in line.split(","))
        # nvidia-smi writes eight digits of the domain, sysfs four.
        own = address is None or bus.lower().endswith(address.lower())
        if own and len(words) == 3 and words[0] != str(os.getpid()):
            found.append(f"process {words[0]} ({words[1]}, {words[2]})")
    return found


@dataclass(frozen=True)
class RankForms:
    """What a rank tells the others."""

    card: str
    """Its type, for what is expected to be alike."""
    choices: tuple[ops.Choice, ...]
    """In the order of the ops, the same on all ranks that do not compute with the definitions."""

    @property
    def is_reference(self) -> bool:
        """Whether the rank computes with the definitions (`YUAN_KERNELS=reference`)."""
        return all(choice.implementation == "reference" for choice in self.choices)


def settle_forms(grid: Grid, rank: int, *, device: Device, dtype: torch.dtype) -> None:
    """Choose the implementation of each op of a plan's model, alike in each group; collective over all ranks.

    Raises ConfigError, on all ranks, if some of a group compute with the definitions and others do not.
    """
    ops.forget_fallbacks()
    if dtype == torch.float16:
        keep_wide_sums()
    card = device.facts()
    # What kind of device it is, by the name that its driver has for it.
    kind = device.torch.type if card is None else card.name
    mine = RankForms(kind, tuple(choose_ops(grid.plan.model, device.torch, dtype)))
    if not dist.is_initialized():
        return
    told = gather_objects(mine)
    for group in alike_groups(grid, [forms.card for forms in told]):
        for number, odd in unlike(group, told):
            if rank not in group:
                continue
            choice, fault = mine.choices[number], told[odd].choices[number]
            ops.fall_back(choice, f"as on rank {odd}, which has {fault.implementation}: {fault.reason}")
            if rank == group[0]:
                logger.warning(
                    "%s: rank %d has %s (%s), so ranks %s use what every card has",
                    choice.op,
                    odd,
                    fault.implementation,
                    fault.reason,
                    ", ".join(map(str, group)),
                )


def keep_wide_sums() -> None:
    """Let CUDA add up the parts of a product of fp16 in fp32 alone: what is beyond 65504 overflows in fp16.

    That is torch's setting of a process. In bf16, whose range is that of fp32, parts are rounded at most, and
    torch's default stays.
    """
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def alike_groups(grid: Grid, cards: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks that must round alike, in groups: those of tensor parallelism, owners on like cards, and who
    is connected through others."""
    groups = {rank: {rank} for rank in range(len(cards))}

    def join(ranks: Sequence[int]) -> None:
        joined = set[int]().union(*(groups[rank] for rank in ranks))
        groups.update(dict.fromkeys(joined, joined))

    for p in range(len(grid.plan.pipelines)):
        for replica in grid.replicas(p):
            join(replica)
    for owners in {bucket.owners for bucket in grid.buckets}:
        ranks = [rank for owner in owners for rank in owner]
        for card in {cards[rank] for rank in ranks}:
            join([rank for rank in ranks if cards[rank] == card])
    return sorted({tuple(sorted(group)) for group in groups.values()})


def unlike(group: Sequence[int], told: Sequence[RankForms]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the choices in which ranks of a group differ, each with the first odd rank.

    Raises ConfigError if some of them compute with the definitions and others do not.
    """
    defined = [rank for rank in group if told[rank].is_reference]
    if defined and len(defined) < len(group):
        others = next(rank for rank in group if rank not in defined)
        raise ConfigError(
            f"YUAN_KERNELS=reference is set on rank {defined[0]} and not on rank {others}, which must round "
            "alike; set it on all nodes, or on none"
        )
    for number in range(len(told[group[0]].choices)):
        names = {rank: told[rank].choices[number].implementation for rank in group}
        common = Counter(names.values()).most_common(1)[0][0]
        odd = next((rank for rank, name in names.items() if name != common), None)
        if odd is not None:
            yield number, odd


def check_same_directory(directory: str | Path) -> None:
    """Raise CheckpointError, on all ranks, unless all see the same directory; collective over all ranks.

    Rank 0 writes a file of a random name there, which every other rank must see. So a process alone finds at
    the start, and not at its first save, that it cannot write there.
    """
    directory, is_first = Path(directory), not dist.is_initialized() or dist.get_rank() == 0
    token = directory / share_object(f"{SEEN}{uuid.uuid4().hex}")
    try:
        with agreeing():
            try:
                if is_first:
                    directory.mkdir(parents=True, exist_ok=True)
                    token.write_text("every rank of a run must see this file\n", encoding="utf-8")
            except OSError as error:
                text = f"checkpoint.directory: {directory} cannot be written: {error}"
                raise CheckpointError(text) from None
        host = share_object(socket.gethostname())
        with agreeing():
            if not _appears(token):
                raise CheckpointError(
                    f"checkpoint.directory: {directory.absolute()} is not the directory that rank 0 ({host}) "
                    "writes to; give a directory on a file system that all nodes share"
                )
    finally:
        with contextlib.suppress(OSError):
            if is_first:
                token.unlink()


def find_resume_together(job: Job) -> Job:
    """The job with the checkpoint to resume from or to begin with, if any; collective over all ranks.

    Rank 0 looks at the files, of which there are as many as ranks, and tells the others. Raises
    CheckpointError, on all ranks, if it is incomplete, holds another model, or is not seen by all.
    """
    if not dist.is_initialized():
        return job
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = find_checkpoints(job.run)
        except YuanError as error:
            told[1] = (type(error), str(error))
    both, fault = share_object(told)
    if fault is not None:
        raise fault[0](fault[1])
    found, start = both
    if found is None and start is None:
        return job
    if found is None:
        _raise_unless_seen(start.path, "begins with its weights")
        return replace(job, start=start)
    directory = job.run.checkpoint.directory
    if job.run.checkpoint.resume == "auto" and directory is not None:
        # Each node may have the shared directory under a path of its own.
        found = replace(found, path=Path(directory) / found.path.name)
    _raise_unless_seen(found.path, "resumes from it")
    return replace(job, checkpoint=found)


def _raise_unless_seen(path: Path, what: str) -> None:
    """Raise CheckpointError, on all ranks, unless all see a checkpoint; collective over all ranks."""
    missing = f"{path}: rank 0 {what}, but it is not here; all nodes must share it"
    raise_together(None if (path / ".metadata").is_file() else CheckpointError(missing))


def find_in_memory(job: Job) -> Job:
    """The job with the checkpoint in the memory of its nodes, if that is not older than the one on disk.

    Only with `checkpoint.resume: auto`: otherwise another run begins, which has no copies yet. Collective
    over all ranks. Raises CheckpointError, on all ranks, if it holds another model.
    """
    config, disk = job.run.checkpoint, job.checkpoint
    if config.directory is None:
        return job
    if not config.in_memory:
        if job.position.rank == 0:
            forget_copies(config.directory)
        return job
    memory = NodeMemory(config.directory, place_of(job))
    anew = config.resume != "auto"
    found, notes = memory.begin(disk_step=disk.step if disk is not None else None, anew=anew)
    if job.position.rank == 0:
        for note in notes:
            logger.warning("note: %s", note)
    if found is None:
        return job
    check_same_model(found, job.run.model)
    return replace(job, checkpoint=found, start=None)


def place_of(job: Job) -> tuple[str, str]:
    """A rank's node by the plan, and the machine that it is."""
    return node_of(job.plan.ranks[job.position.rank]), machine_id()


def job_facts(job: Job) -> dict[str, Any]:
    """All that must be the same on every rank, as plain values."""
    data = {
        part: blend.fingerprints
        for part, blend in (("train", job.train), ("validation", job.validation))
        if blend is not None
    }
    return run_facts(job.run) | {
        "plan": as_plain(job.plan),
        "saves checkpoints": job.run.checkpoint.directory is not None,
        "corpora": data,
        "tokenizer": None if job.tokenizer is None else job.tokenizer.digest,
    }


def run_facts(run: RunConfig) -> dict[str, Any]:
    """What of these is known before any file of the run is read."""
    versions = {"yuan_train": yuan_train.__version__, "torch": torch.__version__}
    return {"run": _without(as_plain(run), NODE_LOCAL), **versions}


def flatten(value: Any, path: str = "") -> dict[str, Any]:
    """Nested plain values by dotted path: `run.optimizer.learning_rate`."""
    if isinstance(value, Mapping) and value:
        return {k: v for key, item in value.items() for k, v in flatten(item, _joined(path, key)).items()}
    if isinstance(value, list) and value:
        return {k: v for i, item in enumerate(value) for k, v in flatten(item, f"{path}[{i}]").items()}
    return {path: value}


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def compare_facts(mine: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """How nested plain values differ from others, for people; empty: they do not."""
    here, there = flatten(mine), flatten(reference)
    # Of a run its keys are known by themselves, as on the command line.
    found = [
        f"{path.removeprefix('run.')} is {_shown(here, path)}, there {_shown(there, path)}"
        for path in dict.fromkeys([*there, *here])
        if _shown(here, path) != _shown(there, path)
    ]
    more = [f"and {len(found) - MAX_LISTED} more differences"] if len(found) > MAX_LISTED else []
    return "; ".join([*found[:MAX_LISTED], *more])


def _shown(facts: Mapping[str, Any], path: str) -> str:
    return repr(facts[path]) if path in facts else "absent"


def _without(plain: Any, paths: tuple[str, ...]) -> Any:
    """Nested plain values without some dotted paths."""
    for path in paths:
        section, _, key = path.partition(".")
        plain = {
            name: {k: v for k, v in item.items() if k != key}
            if name == section and isinstance(item, dict)
            else item
            for name, item in plain.items()
        }
    return plain


def _appears(token: Path) -> bool:
    """Whether a file is there, or comes to be seen within a while."""
    deadline = time.monotonic() + SEEN_WITHIN_SECONDS
    while not token.exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
        with contextlib.suppress(OSError):
            # Listing a directory makes a network file system look again.
            os.listdir(token.parent)
    return True


def _any_rank(flag: bool) -> bool:
    votes = torch.tensor(int(flag))
    dist.all_reduce(votes, dist.ReduceOp.MAX)
    return bool(votes)


def _gather(mine: Any | None) -> list[tuple[int, str, Any]]:
    """(rank, host, what it says) of every rank that says something; collective."""
    said = gather_objects(None if mine is None else (socket.gethostname(), mine))
    return [(rank, *entry) for rank, entry in enumerate(said) if entry is not None]


def _more(count: int) -> list[str]:
    return [f"and {count - MAX_LISTED} more ranks"] if count > MAX_LISTED else []
