"""yuan-train profile --model F --out profile.json: measures this machine's card."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from yuan_train.cli.launch import Node, free_port, start_ranks
from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import as_plain, write_text
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import shared_sizes
from yuan_train.config.profile import LinkProfile, Profile, ProfileEntry, load_profile
from yuan_train.config.run import Recompute, RunConfig, load_run

if TYPE_CHECKING:
    import torch

    from yuan_train.train.loop import Position
    from yuan_train.train.measure import Setting

T = TypeVar("T")

WIDTHS = (1, 2, 4, 8, 16)
"""Tensor-parallel widths that are measured without `search.tensor`, as far as a node's cards go."""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's card",
        description="Measures forward and backward of embedding, layer and head on this machine's card, and "
        "what they hold in memory. `yuan-train plan --profile` then needs no estimates for it. Under "
        "torchrun, one process per card, all cards work at the same time, and tensor-parallel groups and the "
        "links between all pairs, by size of message, are measured too. For a --cluster of simulated cards "
        "such processes are started here.",
    )
    parser.add_argument("--model", metavar="FILE", help="the model file; needed without --config")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the profile goes (JSON)")
    parser.add_argument(
        "--config", metavar="FILE", help="the run: sequence length, micro-batch size, precision"
    )
    parser.add_argument("--cluster", metavar="FILE", help="its cards by rank; simulated ones keep their pace")
    parser.add_argument("--device-type", metavar="NAME", help="what the card is called in the cluster file")
    parser.add_argument(
        "--merge", nargs="+", metavar="FILE", help="measure nothing: make one profile of several"
    )
    parser.add_argument(
        "--seconds", type=float, default=1.5, metavar="S", help="how long each unit is repeated (default 1.5)"
    )
    parser.add_argument("--json", action="store_true", help="print the profile on stdout too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure, or merge, and write."""
    if arguments.merge:
        profile = merge_profiles([(path, load_profile(path)) for path in arguments.merge])
        _write(profile, arguments)
        return 0
    if not 0 < arguments.seconds < math.inf:
        raise ConfigError(
            f"--seconds {arguments.seconds:g}: wanted a positive number of seconds, such as 1.5"
        )
    config = _read_config(arguments)
    model = config.model if config else load_model(arguments.model)
    cluster = load_cluster(arguments.cluster) if arguments.cluster else None
    if cluster is not None and _is_simulated(cluster) and "WORLD_SIZE" not in os.environ:
        return _start_cards(cluster, arguments)
    profile, rank = _measure_here(model, config, cluster, arguments)
    if rank == 0:
        _write(profile, arguments)
    return 0


def _is_simulated(cluster: Cluster) -> bool:
    return all(cluster.device_type(card.type).slowdown is not None for card in cluster.cards)


def _start_cards(cluster: Cluster, arguments: argparse.Namespace) -> int:
    """Measure simulated cards as `launch` runs them: a process for each, all at once on this machine."""
    words = ["profile"]
    for name in ("model", "out", "config", "cluster", "seconds"):
        value = getattr(arguments, name)
        words += [f"--{name}", str(value)] if value is not None else []
    words += ["--json"] * arguments.json + arguments.overrides
    node = Node("all", tuple(range(len(cluster.cards))))
    return start_ranks(node, words, world_size=len(node.ranks), host="127.0.0.1", port=free_port())


def _read_config(arguments: argparse.Namespace) -> RunConfig | None:
    if arguments.config is None:
        if arguments.model is None:
            raise ConfigError("give --model F, or --config F (a run file, which names its model)")
        if arguments.overrides:
            raise ConfigError("overrides change the run; give --config as well")
        return None
    config = load_run(arguments.config, tuple(arguments.overrides))
    if arguments.model is not None and config.model != load_model(arguments.model):
        raise ConfigError(
            f"{arguments.model} is not the model of {arguments.config}; profile the one that is run"
        )
    return config


def _write(profile: Profile, arguments: argparse.Namespace) -> None:
    text = json.dumps(as_plain(profile), indent=1)
    write_text(arguments.out, text + "\n")
    if arguments.json:
        print(text)
    words = f"{len(profile.entries)} entries, {len(profile.links)} links, {profile.machine}"
    print(f"wrote {arguments.out}: {words}", file=sys.stderr)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What this process measures: its card, and the ranks that it measures it with."""

    model: ModelConfig
    config: RunConfig | None
    position: Position
    device: torch.device
    device_type: str
    slowdown: float
    seconds_per_unit: float
    teams: Mapping[int, Sequence[tuple[int, ...]]]
    """By tensor-parallel width, the ranks that are measured as a group."""

    @property
    def timeout_seconds(self) -> float:
        return self.config.train.timeout if self.config else 600.0


def _measure_here(
    model: ModelConfig, config: RunConfig | None, cluster: Cluster | None, arguments: argparse.Namespace
) -> tuple[Profile, int]:
    """The profile and this process's rank. Under torchrun all ranks measure their cards at the same time, as
    they work in training, then the links between them."""
    from yuan_train.parallel.groups import join, leave
    from yuan_train.train.loop import choose_device, find_position

    position = find_position()
    device = choose_device(config.train.device if config else "auto", position)
    if cluster is not None and position.world_size not in (1, len(cluster.cards)):
        raise ConfigError(
            f"--cluster has {len(cluster.cards)} cards, but {position.world_size} processes were started; "
            "start one per card"
        )
    if position.world_size > 1:
        join(device=device, timeout_seconds=config.train.timeout if config else 600.0)
    try:
        return _gather(_make_bench(model, config, cluster, arguments, position, device), cluster)
    finally:
        leave()


def _make_bench(
    model: ModelConfig,
    config: RunConfig | None,
    cluster: Cluster | None,
    arguments: argparse.Namespace,
    position: Position,
    device: torch.device,
) -> Bench:
    from yuan_train.train.measure import name_of

    card = cluster.cards[position.rank] if cluster else None
    slowdown = cluster.device_type(card.type).slowdown if cluster and card else None
    kind = card.type if card and slowdown is not None else arguments.device_type or name_of(device)
    places = _from_all((card.node if card and position.world_size > 1 else platform.node(), kind), position)
    widths = (config.search.tensor if config else None) or WIDTHS
    fitting = [w for w in widths if all(size % w == 0 for size in shared_sizes(model).values())]
    return Bench(
        model=model,
        config=config,
        position=position,
        device=device,
        device_type=kind,
        slowdown=slowdown or 1.0,
        seconds_per_unit=arguments.seconds,
        teams={width: teams for width in fitting if (teams := _teams(places, width))},
    )


def _teams(places: Sequence[tuple[str, str]], width: int) -> list[tuple[int, ...]]:
    """Ranks of one node and kind, so many together; what is left over has no team."""
    alike: dict[tuple[str, str], list[int]] = {}
    for rank, place in enumerate(places):
        alike.setdefault(place, []).append(rank)
    whole = [ranks[: len(ranks) - len(ranks) % width] for ranks in alike.values()]
    return [tuple(ranks[i : i + width]) for ranks in whole for i in range(0, len(ranks), width)]


def _gather(bench: Bench, cluster: Cluster | None) -> tuple[Profile, int]:
    """All ranks' entries, of a key the first rank's, and the links."""
    from yuan_train.train.measure import measure_links

    position = bench.position
    parts = _from_all(_measure_card(bench), position)
    profile = merge_profiles([(f"rank {rank}", part) for rank, part in enumerate(parts)])
    if position.world_size == 1:
        return profile, 0
    names = _from_all(f"{platform.node()}/{position.local_rank}", position)
    if cluster is not None:
        names = [card.name for card in cluster.cards]
    return replace(profile, links=measure_links(names, device=bench.device)), position.rank


def _from_all(mine: T, position: Position) -> list[T]:
    """What every rank has, by rank."""
    if position.world_size == 1:
        return [mine]
    import torch.distributed as dist

    everywhere: list[Any] = [None] * position.world_size
    dist.all_gather_object(everywhere, mine)
    return everywhere


def _measure_card(bench: Bench) -> Profile:
    """The entries that this rank takes part in."""
    import torch.distributed as dist

    from yuan_train.train.loop import DTYPES
    from yuan_train.train.measure import Setting, machine_name, measure_entry, measure_reserved, name_of

    config, model = bench.config, bench.model
    precision = config.train.precision if config else "bf16"
    base = Setting(
        model=model,
        sequence_length=config.data.sequence_length if config else model.max_sequence_length,
        micro_batch_size=1,
        recompute="none",
        dtype=DTYPES[precision],
        device=bench.device,
        slowdown=bench.slowdown,
        seconds_per_unit=bench.seconds_per_unit,
        data=config.data if config else None,
    )
    reserved = measure_reserved(base)
    entries: list[ProfileEntry] = []
    for setting in _settings(bench, base):
        if dist.is_initialized():
            dist.barrier()
        if setting is None:
            continue
        if bench.position.rank == 0:
            print(
                f"measuring micro-batches of {setting.micro_batch_size}, recompute {setting.recompute}, "
                f"tensor-parallel width {setting.width}",
                file=sys.stderr,
            )
        entry = measure_entry(setting, device_type=bench.device_type)
        entries.append(replace(entry, reserved_bytes=reserved))
    return Profile(
        sequence_length=base.sequence_length,
        model=model.name,
        machine=name_of(bench.device) if bench.device.type == "cuda" else machine_name(),
        precision=precision,
        entries=tuple(entries),
    )


def _settings(bench: Bench, base: Setting) -> Iterator[Setting | None]:
    """What is measured, in the same order on all ranks; None where this rank has no part in it."""
    from yuan_train.parallel.groups import make_tensor_groups

    config, rank = bench.config, bench.position.rank
    sizes = (config.search.micro_batch_size or (config.train.micro_batch_size,)) if config else (1,)
    wanted = (config.search.recompute if config else None) or get_args(Recompute)
    for width, teams in bench.teams.items():
        groups = make_tensor_groups(teams, timeout_seconds=bench.timeout_seconds) if width > 1 else {}
        team = next((team for team in teams if rank in team), None)
        for size, recompute in itertools.product(sizes, wanted):
            yield (
                None
                if team is None
                else replace(
                    base,
                    micro_batch_size=size,
                    recompute=recompute,
                    width=width,
                    position=team.index(rank),
                    group=groups.get(team),
                )
            )


def merge_profiles(named: Sequence[tuple[str, Profile]]) -> Profile:
    """All entries and links, of a key the first. Raises ConfigError unless length, precision, model and
    source agree."""
    (first_name, first), *others = named
    entries: dict[tuple[object, ...], ProfileEntry] = {}
    links: dict[tuple[str, str], LinkProfile] = {}
    for name, profile in [(first_name, first), *others]:
        for what in ("sequence_length", "precision", "model", "source"):
            mine, wanted = getattr(profile, what), getattr(first, what)
            if mine != wanted:
                raise ConfigError(
                    f"{name}: {what} {mine!r}, but {first_name} has {wanted!r}; merge profiles of one run"
                )
        for entry in profile.entries:
            key = (entry.device_type, entry.tensor_parallel, entry.micro_batch_size, entry.recompute)
            entries.setdefault(key, entry)
        for link in profile.links:
            links.setdefault((link.from_, link.to), link)
    machines = dict.fromkeys(profile.machine for _, profile in named if profile.machine)
    return replace(
        first,
        machine=" and ".join(machines) or None,
        entries=tuple(entries.values()),
        links=tuple(links.values()),
    )
