"""Measures forward and backward of embedding, layer and head on this machine's card, and what they hold in
memory; with a run of reinforcement learning its generation too. `yuan-train plan --profile` then needs no
estimates for it. Under torchrun, one process per card, all cards are measured at the same time, and so are
tensor-parallel groups, the links between some pairs of each kind, by message size, and what all cards of a
node get of its network at once. For a --cluster of simulated cards this command starts the processes itself,
with --hosts, --hostfile or --slurm those of all machines."""

from __future__ import annotations

import argparse
import io
import itertools
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, get_args

from yuan_train.cli.launch_hosts import (
    Errand,
    add_host_options,
    files_of_model,
    files_of_run,
    is_ours,
    meeting_address,
    names_hosts,
    place,
    read_hosts,
    run_errand,
)
from yuan_train.cli.main import file_to_write
from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.devices import CATALOGUE, Backend
from yuan_train.config.errors import ConfigError, HostMemoryError, YuanError
from yuan_train.config.load import as_plain, locate_cluster, write_text
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import Node, RankPlan
from yuan_train.config.profile import (
    BatchProfile,
    GenerationProfile,
    HostProfile,
    Profile,
    ProfileEntry,
    load_profile,
    merge_profiles,
)
from yuan_train.config.rl import RLConfig, is_rl_run, load_rl, policy_run
from yuan_train.config.run import LONGEST_DEFAULT_SEQUENCE, Recompute, RunConfig, load_run
from yuan_train.machine.hosts import fetch
from yuan_train.parallel.environment import free_port, set_rank_defaults
from yuan_train.supervise.launched import NodeFaults, start_ranks, telling_other_nodes

if TYPE_CHECKING:
    from yuan_train.parallel.device import Device
    from yuan_train.profile.units import ProfileCase
    from yuan_train.train.job import Position

T = TypeVar("T")

WIDTHS = (1, 2, 4, 8, 16)
"""Tensor-parallel sizes that are measured without `search.tensor`, up to the number of cards of a node."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add(
        "--model",
        metavar="FILE",
        help="a model file, a name of configs/model, a config.json or its folder, or a "
        "checkpoint; needed without --config",
    )
    add("--out", type=file_to_write, required=True, metavar="FILE", help="profile to write (JSON)")
    add("--config", metavar="FILE", help="the run: sequence length, micro-batch size, precision")
    add("--cluster", metavar="FILE", help="its cards by rank; simulated ones are slowed down")
    add("--device-type", metavar="NAME", help="the card's type in the cluster file")
    add("--merge", nargs="+", metavar="FILE", help="measure nothing; merge these profiles into one")
    add("--of-run", metavar="LOG", help="measure nothing; take what a run in this log directory has measured")
    add(
        "--seconds", type=float, default=1.5, metavar="S", help="how long each unit is repeated (default 1.5)"
    )
    add(
        "--all-links",
        action="store_true",
        help="measure the link of every pair of cards, and not only of two pairs of each kind",
    )
    add("--json", action="store_true", help="print the profile on stdout too")
    add("--this-node", metavar="NAME", help="start a process for each of this node's cards")
    add("--rendezvous", metavar="HOST[:PORT]", help="where the processes of all nodes meet")
    add_host_options(parser)
    add("overrides", nargs="*", metavar="key=value", help="changes to the run")


def run(arguments: argparse.Namespace) -> int:
    """Measure, or merge, and write. Raises ConfigError for wrong input."""
    with telling_other_nodes(lambda: _faults_of(arguments)):
        return _run(arguments)


def _faults_of(arguments: argparse.Namespace) -> NodeFaults | None:
    """What is known of the machines that are measured, whose files may be wrong; None: no others."""
    if arguments.this_node is None or arguments.rendezvous is None:
        return None
    ranks: tuple[int, ...] = ()
    size = 0
    with suppress(YuanError):
        cluster = load_cluster(arguments.cluster)
        ranks, size = _ranks_of(cluster).get(arguments.this_node, ()), len(cluster.cards)
    with suppress(YuanError):
        return NodeFaults(arguments.this_node, ranks, size, meeting_address(arguments.rendezvous))
    return None


def _ranks_of(cluster: Cluster) -> dict[str, tuple[int, ...]]:
    """The processes that measure the cards of each machine."""
    ranks: dict[str, tuple[int, ...]] = {}
    for rank, card in enumerate(cluster.cards):
        ranks[card.node] = (*ranks.get(card.node, ()), rank)
    return ranks


def _run(arguments: argparse.Namespace) -> int:
    if arguments.merge:
        profile = merge_profiles([(path, load_profile(path)) for path in arguments.merge])
        _write(profile, arguments)
        return 0
    if arguments.of_run:
        _write(_of_run(arguments.of_run), arguments)
        return 0
    if not 0 < arguments.seconds < math.inf:
        raise ConfigError(
            f"--seconds {arguments.seconds:g}: wanted a positive number of seconds, such as 1.5"
        )
    rl = _read_rl(arguments)
    config = policy_run(rl) if rl else _read_config(arguments)
    model = config.model if config else load_model(arguments.model)
    if model.output == "value":
        raise ConfigError(
            f"model {model.name}: output is value; profile it with the vocabulary's head (its layers are the "
            "same), or plan from estimates, without a profile"
        )
    cluster = load_cluster(arguments.cluster) if arguments.cluster else None
    if names_hosts(arguments) or arguments.this_node is not None:
        return _start_nodes(cluster, arguments)
    if cluster is not None and "WORLD_SIZE" not in os.environ:
        if all(cluster.device_type(card.type).slowdown is not None for card in cluster.cards):
            # Simulated cards are measured as `launch` runs them: a process each, all at once on this machine.
            size = len(cluster.cards)
            node, address = Node("all", tuple(range(size))), ("127.0.0.1", free_port())
            return start_ranks(node, _words(arguments), world_size=size, address=address)
    set_rank_defaults()
    profile, rank = _measure_here(model, config, rl, cluster, arguments)
    if rank == 0:
        _write(profile, arguments)
    return 0


def _of_run(directory: str) -> Profile:
    """What a run has measured of its cards. Raises ConfigError."""
    from yuan_train.profile.of_run import profile_of_run
    from yuan_train.report.run_log import read_run

    found = read_run(directory)
    if found.plan is None:
        raise ConfigError(f"{directory}: has no plan.yaml; wanted the log directory of a run under a plan")
    seconds = {share.rank: share.seconds for share in found.ranks if share.seconds}
    precision = found.config.get("train", {}).get("precision", "bf16")
    profile = profile_of_run(found.plan, seconds, precision=precision)
    return replace(profile, machine=f"the run in {directory}")


def _start_nodes(cluster: Cluster | None, arguments: argparse.Namespace) -> int:
    """Measure on several machines at once: start all of them, or be one and start its processes.

    From all of them, the profile is brought here from the first. Raises ConfigError.
    """
    if cluster is None:
        raise ConfigError("give --cluster F: it says which machine has which cards")
    ranks = _ranks_of(cluster)
    nodes = [Node(name, own) for name, own in ranks.items()]
    if arguments.this_node is None:
        places = place(read_hosts(arguments), nodes)
        errand = Errand(
            words=[word for word in _words(arguments) if word != "--json"],
            files=_files(arguments),
            rendezvous=arguments.rendezvous,
            copy=arguments.copy,
        )
        code = run_errand(places, errand)
        if code == 0:
            text = fetch(places[0][0], Path.cwd() / arguments.out).decode()
            write_text(arguments.out, text)
            if arguments.json:
                print(text, end="")
            print(f"{arguments.out}: brought from {places[0][0].address}", file=sys.stderr)
        return code
    if arguments.this_node not in ranks or arguments.rendezvous is None:
        raise ConfigError(
            f"--this-node {arguments.this_node}: wanted one of {', '.join(ranks)}, and --rendezvous HOST:PORT"
        )
    node = Node(arguments.this_node, ranks[arguments.this_node])
    address = meeting_address(arguments.rendezvous)
    return start_ranks(node, _words(arguments), world_size=len(cluster.cards), address=address)


def _words(arguments: argparse.Namespace) -> list[str]:
    """The command of a process, or of a node."""
    words = ["profile"]
    for name in ("model", "out", "config", "cluster", "seconds"):
        value = getattr(arguments, name)
        words += [f"--{name}", str(value)] if value is not None else []
    return words + ["--all-links"] * arguments.all_links + ["--json"] * arguments.json + arguments.overrides


def _files(arguments: argparse.Namespace) -> list[str]:
    """The files that each machine needs: of the cluster, the run and its model."""
    cluster = locate_cluster(arguments.cluster)
    files = [] if is_ours(cluster) else [str(cluster)]
    if arguments.config is not None:
        files += files_of_run(arguments.config, arguments.overrides, data=False)
    if arguments.model is not None:
        files += files_of_model(arguments.model)
    return list(dict.fromkeys(files))


def _read_rl(arguments: argparse.Namespace) -> RLConfig | None:
    """The run of reinforcement learning that is given; None if another run is, or none."""
    if arguments.config is None or not is_rl_run(arguments.config):
        return None
    found = load_rl(arguments.config, tuple(arguments.overrides))
    _check_model(found, arguments)
    return found


def _check_model(config: RunConfig | RLConfig, arguments: argparse.Namespace) -> None:
    if config.model.lora is not None:
        raise ConfigError(
            f"{arguments.config}: lora: all parameters are trained where a model is measured; plan this run "
            "without a profile"
        )
    if arguments.model is not None and config.model != load_model(arguments.model):
        raise ConfigError(
            f"{arguments.model} is not the model of {arguments.config}; profile the model of the run"
        )


def _read_config(arguments: argparse.Namespace) -> RunConfig | None:
    """The run file with its overrides; None if only the model file is given."""
    if arguments.config is None:
        if arguments.model is None:
            raise ConfigError("give --model F, or --config F (a run file, which names its model)")
        if arguments.overrides:
            raise ConfigError("overrides change the run; give --config as well")
        return None
    config = load_run(arguments.config, tuple(arguments.overrides))
    _check_model(config, arguments)
    return config


def _write(profile: Profile, arguments: argparse.Namespace) -> None:
    text = json.dumps(as_plain(profile), indent=1)
    write_text(arguments.out, text + "\n")
    if arguments.json:
        print(text)
    words = f"{len(profile.entries)} entries, {len(profile.links)} links, {profile.machine}"
    print(f"wrote {arguments.out}: {words}", file=sys.stderr)
    alike = sum(link.like is not None for link in profile.links)
    if alike:
        print(
            f"{alike} of the links are taken to be like measured ones between the same types of cards and "
            "networks (`like` names them; --all-links measures all)",
            file=sys.stderr,
        )


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What this process measures: its card, and the groups of ranks that are measured together."""

    model: ModelConfig
    config: RunConfig | None
    rl: RLConfig | None
    """The run whose policy `config` is."""
    position: Position
    device: Device
    device_type: str
    backend: Backend
    """Of its messages to other cards."""
    slowdown: float
    host_link: float | None
    """Bytes a second of a simulated card's link to its host; None for a real one."""
    seconds_per_unit: float
    tensor_groups: Mapping[int, Sequence[tuple[int, ...]]]
    """By tensor-parallel size, the groups of ranks that are measured."""
    all_links: bool
    """Whether the link of every pair is measured, and not only some of each class."""

    @property
    def timeout_seconds(self) -> float:
        """Of the process groups' collectives."""
        return self.config.train.timeout if self.config else 600.0


def _measure_here(
    model: ModelConfig,
    config: RunConfig | None,
    rl: RLConfig | None,
    cluster: Cluster | None,
    arguments: argparse.Namespace,
) -> tuple[Profile, int]:
    """The profile and this process's rank. Under torchrun all ranks measure their cards at the same time, as
    they run in training, then the links between them."""
    from yuan_train.parallel.groups import init_distributed, shutdown
    from yuan_train.train.job import check_compiler, find_position

    position = find_position()
    if cluster is not None and position.world_size not in (1, len(cluster.cards)):
        raise ConfigError(
            f"--cluster has {len(cluster.cards)} cards, but {position.world_size} processes were started; "
            "start one per card"
        )
    device = _choose_device(config.train.device if config else "auto", position, cluster)
    if config is not None and config.train.compile:
        check_compiler(device.torch)
    if position.world_size > 1:
        init_distributed(device=device, timeout_seconds=config.train.timeout if config else 600.0)
    try:
        bench = _make_bench(model, config, rl, cluster, arguments, position, device)
        return _gather_profile(bench, cluster)
    finally:
        shutdown()


def _choose_device(wanted: str, position: Position, cluster: Cluster | None) -> Device:
    """The device of this process: where each card of the cluster has one, by the type that the file gives it.

    Raises ConfigError if it is another, or a processor where the file has a card and `wanted` is not cpu.
    """
    from yuan_train.train.job import choose_device, choose_planned

    if cluster is None or position.world_size != len(cluster.cards):
        return choose_device(wanted, position)
    ranks = [RankPlan(rank=i, device=card.name, type=card.type) for i, card in enumerate(cluster.cards)]
    return choose_planned(wanted, ranks, position, cluster.device_type)


def _name_type(
    cluster: Cluster | None, position: Position, device: Device, arguments: argparse.Namespace
) -> str:
    """The type under which this process's card stands in the profile.

    The cluster file's for a simulated card, and where each of its cards has a process; then --device-type;
    then the catalogue's name of the card.
    """
    from yuan_train.profile.units import name_of

    if cluster is not None:
        planned = cluster.cards[position.rank].type
        is_simulated = cluster.device_type(planned).slowdown is not None
        if is_simulated or (position.world_size == len(cluster.cards) and arguments.device_type is None):
            return planned
    return arguments.device_type or name_of(device)


def _make_bench(
    model: ModelConfig,
    config: RunConfig | None,
    rl: RLConfig | None,
    cluster: Cluster | None,
    arguments: argparse.Namespace,
    position: Position,
    device: Device,
) -> Bench:
    card = cluster.cards[position.rank] if cluster else None
    slowdown = cluster.device_type(card.type).slowdown if cluster and card else None
    device_type = _name_type(cluster, position, device, arguments)
    node = card.node if card and position.world_size > 1 else platform.node()
    nodes_and_types = _all_gather((node, device_type))
    widths = (config.feasible_search.tensor if config else None) or WIDTHS
    fitting = [w for w in widths if all(size % w == 0 for size in model.spec.tensor_sizes(model).values())]
    return Bench(
        model=model,
        config=config,
        rl=rl,
        position=position,
        device=device,
        device_type=device_type,
        backend=_backend_of(device_type, cluster),
        slowdown=slowdown or 1.0,
        host_link=cluster.device_type(card.type).host_link if cluster and card and slowdown else None,
        seconds_per_unit=arguments.seconds,
        all_links=arguments.all_links,
        tensor_groups={
            width: groups for width in fitting if (groups := _tensor_groups(nodes_and_types, width))
        },
    )


def _tensor_groups(nodes_and_types: Sequence[tuple[str, str]], width: int) -> list[tuple[int, ...]]:
    """Groups of `width` ranks of the same node and type of card; ranks that are left over are in none."""
    ranks_by_key: dict[tuple[str, str], list[int]] = {}
    for rank, node_and_type in enumerate(nodes_and_types):
        ranks_by_key.setdefault(node_and_type, []).append(rank)
    grouped = [ranks[: len(ranks) - len(ranks) % width] for ranks in ranks_by_key.values()]
    return [tuple(ranks[i : i + width]) for ranks in grouped for i in range(0, len(ranks), width)]


def _gather_profile(bench: Bench, cluster: Cluster | None) -> tuple[Profile, int]:
    """All ranks' entries (the first rank's where several have the same key) and the links; and this rank."""
    from yuan_train.profile.links import link_ends, measure_links, measure_node_links

    position = bench.position
    parts = _all_gather(_measure_card(bench))
    profile = merge_profiles([(f"rank {rank}", part) for rank, part in enumerate(parts)])
    if position.world_size == 1:
        return profile, 0
    names = _all_gather(f"{platform.node()}/{position.local_rank}")
    if cluster is not None:
        names = [card.name for card in cluster.cards]
    types, backends = zip(*_all_gather((bench.device_type, bench.backend)), strict=True)
    ends = link_ends(names, types, backends, cluster)
    how = {"device": bench.device, "timeout_seconds": bench.timeout_seconds, "all_pairs": bench.all_links}
    links = measure_links(ends, slowdown=bench.slowdown, **how)
    node_links = measure_node_links(ends, **how)
    return replace(profile, links=links, node_links=node_links), position.rank


def _backend_of(device_type: str, cluster: Cluster | None) -> Backend:
    """The communication backend of a type of card; nccl if neither cluster nor catalogue describes it."""
    described = cluster.device_types if cluster is not None else {}
    card = described.get(device_type) or CATALOGUE.get(device_type)
    return card.backend if card is not None else "nccl"


def _all_gather(value: T) -> list[T]:
    """Every rank's value, by rank."""
    from yuan_train.parallel.groups import gather_objects

    return gather_objects(value)


def _measure_card(bench: Bench) -> Profile:
    """A profile of the entries that this rank takes part in."""
    from yuan_train.parallel.device import long_lived_objects
    from yuan_train.profile.units import ProfileCase, machine_name, measure_reserved, name_of
    from yuan_train.train.build import DTYPES

    config, model = bench.config, bench.model
    precision = config.train.precision if config else "bf16"
    base = ProfileCase(
        model=model,
        sequence_length=config.data.sequence_length
        if config
        else min(model.max_sequence_length, LONGEST_DEFAULT_SEQUENCE),
        micro_batch_size=1,
        recompute="none",
        dtype=DTYPES[precision],
        device=bench.device,
        slowdown=bench.slowdown,
        seconds_per_unit=bench.seconds_per_unit,
        # Rows of one answer reset nothing.
        data=config.data if config and (bench.rl is None or bench.rl.shares_rows) else None,
        compile=config is not None and config.train.compile,
    )
    kind = bench.backend if bench.device.library == "nccl" and bench.backend != "gloo" else ""
    reserved = measure_reserved(base, _all_gather(kind))
    with long_lived_objects():
        measured = list(_measure_cases(bench, base))
    return Profile(
        sequence_length=base.sequence_length,
        model=model.name,
        machine=name_of(bench.device) if bench.device.is_card else machine_name(),
        precision=precision,
        compile=base.compile,
        entries=tuple(replace(entry, reserved_bytes=reserved) for entry, _ in measured),
        hosts=_measure_host(bench),
        generation=tuple(generation for _, generation in measured if generation is not None),
        batch=_measure_batch(bench),
    )


def _measure_batch(bench: Bench) -> BatchProfile | None:
    """What rank 0 does with a batch beside the model; None on other ranks, and in other runs."""
    from yuan_train.data.tokenizer import Tokenizer
    from yuan_train.profile.generation import measure_batch
    from yuan_train.rl.job import read_file

    run = bench.rl
    if run is None or bench.position.rank > 0:
        return None
    tokenizer = Tokenizer.load(run.data.tokenizer) if run.data.tokenizer else None
    prompts = [prompt for one in run.data.prompts for prompt in read_file(one.file, run, tokenizer)]
    return measure_batch(run, prompts, tokenizer)


def _measure_host(bench: Bench) -> tuple[HostProfile, ...]:
    """What this rank's card gets of its host; nothing if some rank has no host memory for that."""
    from yuan_train.profile.links import host_room, measure_host

    room, fault = None, ""
    try:
        room = host_room(bench.device)
    except HostMemoryError as error:
        fault = str(error)
    faults = [other for other in _all_gather(fault) if other]
    if faults or room is None:
        if bench.position.rank == 0:
            print(f"links to hosts are not measured: {faults[0]}", file=sys.stderr)
        return ()
    found = measure_host(
        room, device=bench.device, device_type=bench.device_type, bytes_per_second=bench.host_link
    )
    return (found,)


def _measure_cases(
    bench: Bench, base: ProfileCase
) -> Iterator[tuple[ProfileEntry, GenerationProfile | None]]:
    """The entry of each case that this rank takes part in, and with the first of a width its generation."""
    import torch.distributed as dist

    from yuan_train.cli.main import working
    from yuan_train.profile.generation import measure_generation
    from yuan_train.profile.units import MeasuredCase, make_entry, measure_case, num_passes, of_pass

    cases, passes = list(_cases(bench, base)), num_passes(base)
    measured: list[list[MeasuredCase]] = [[] for _ in cases]
    is_first = bench.position.rank == 0
    with working("measuring", passes * len(cases), sys.stderr if is_first else io.StringIO()) as bar:
        for number, (own, case) in itertools.product(range(passes), enumerate(cases)):
            if dist.is_initialized():
                dist.barrier()
            if case is None:
                bar.step()
                continue
            what = f"micro-batches of {case.micro_batch_size}, recompute {case.recompute}, width {case.width}"
            bar.step(what)
            if is_first and not number and not sys.stderr.isatty():
                print(f"measuring {what}", file=sys.stderr)
            measured[own].append(measure_case(of_pass(case, passes), device_type=bench.device_type))
    widths: set[int] = set()
    for own, case in zip(measured, cases, strict=True):
        if dist.is_initialized():
            dist.barrier()
        if case is None:
            continue
        generation = None
        # Cards do not share experts in generation.
        shares_experts = case.width > 1 and bool(case.model.num_experts)
        if bench.rl is not None and case.width not in widths and not shares_experts:
            generation = measure_generation(case, bench.rl, device_type=bench.device_type)
        widths.add(case.width)
        yield make_entry(case, own), generation


def _cases(bench: Bench, base: ProfileCase) -> Iterator[ProfileCase | None]:
    """The cases to measure, in the same order on all ranks; None for a case without this rank."""
    from yuan_train.parallel.groups import make_tensor_groups

    config, rank = bench.config, bench.position.rank
    sizes = (config.search.micro_batch_size or (config.train.micro_batch_size,)) if config else (1,)
    recomputes = (config.search.recompute if config else None) or get_args(Recompute)
    for width, groups in bench.tensor_groups.items():
        process_groups = (
            make_tensor_groups(groups, timeout_seconds=bench.timeout_seconds) if width > 1 else {}
        )
        ranks = next((ranks for ranks in groups if rank in ranks), None)
        for size, recompute in itertools.product(sizes, recomputes):
            yield (
                None
                if ranks is None
                else replace(
                    base,
                    micro_batch_size=size,
                    recompute=recompute,
                    width=width,
                    position=ranks.index(rank),
                    group=process_groups.get(ranks),
                )
            )
