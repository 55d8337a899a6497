"""yuan-train profile --model F --out profile.json: measures this machine's card."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Sequence
from dataclasses import replace

from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import as_plain, write_text
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import RUNNABLE_RECOMPUTE
from yuan_train.config.profile import LinkProfile, Profile, ProfileEntry, load_profile
from yuan_train.config.run import RunConfig, load_run


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's card",
        description="Measures forward and backward of embedding, layer and head on this machine's card, and "
        "what they keep in memory. `yuan-train plan --profile` then needs no estimates for it. Under "
        "torchrun, one process per card, also the links between all pairs, by size of message.",
    )
    parser.add_argument("--model", metavar="FILE", help="the model file; needed without --config")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the profile goes (JSON)")
    parser.add_argument(
        "--config", metavar="FILE", help="the run: sequence length, micro-batch size, precision"
    )
    parser.add_argument("--cluster", metavar="FILE", help="also give entries for its simulated cards")
    parser.add_argument("--device-type", metavar="NAME", help="what the card is called in the cluster file")
    parser.add_argument(
        "--merge", nargs="+", metavar="FILE", help="measure nothing: make one profile of several"
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
    config = _read_config(arguments)
    model = config.model if config else load_model(arguments.model)
    cluster = load_cluster(arguments.cluster) if arguments.cluster else None
    profile, rank = _measure_all(model, config, cluster, arguments.device_type)
    if rank == 0:
        _write(profile, arguments)
    return 0


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


def _measure_all(
    model: ModelConfig, config: RunConfig | None, cluster: Cluster | None, device_type: str | None
) -> tuple[Profile, int]:
    """The profile and this process's rank. Under torchrun one rank of each kind of card measures it, in
    turn, and then all measure the links."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        return _measure(model, config, cluster, device_type), 0
    import torch.distributed as dist

    from yuan_train.parallel.groups import join, leave
    from yuan_train.train.loop import Position, choose_device
    from yuan_train.train.measure import measure_links, name_of

    numbers = [int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]
    position = Position(*numbers)
    device = choose_device(config.train.device if config else "auto", position)
    join(device=device, timeout_seconds=config.train.timeout if config else 600.0)
    try:
        kinds: list[str] = [""] * world_size
        dist.all_gather_object(kinds, device_type or name_of(device))
        parts: list[Profile | None] = [None] * world_size
        mine: Profile | None = None
        for rank in sorted(kinds.index(kind) for kind in set(kinds)):
            if rank == position.rank:
                mine = _measure(model, config, cluster, device_type)
            dist.barrier()
        dist.all_gather_object(parts, mine)
        known = [(f"rank {r}", part) for r, part in enumerate(parts) if part is not None]
        links = measure_links(_card_names(cluster, position.local_rank, world_size), device=device)
        return replace(merge_profiles(known), links=links), position.rank
    finally:
        leave()


def _card_names(cluster: Cluster | None, local_rank: int, world_size: int) -> list[str]:
    """What the ranks are called: the cluster's cards in their order, else host and number."""
    import torch.distributed as dist

    if cluster is not None:
        cards = [card.name for card in cluster.cards]
        if len(cards) != world_size:
            raise ConfigError(
                f"--cluster has {len(cards)} cards, but {world_size} processes were started; "
                "start one per card"
            )
        return cards
    names: list[str] = [""] * world_size
    dist.all_gather_object(names, f"{platform.node()}/{local_rank}")
    return names


def _measure(
    model: ModelConfig, config: RunConfig | None, cluster: Cluster | None, device_type: str | None
) -> Profile:
    from yuan_train.train.loop import DTYPES, Position, choose_device
    from yuan_train.train.measure import OWN_SOURCE, Setting, machine_name, measure_entry, name_of

    device = choose_device(config.train.device if config else "auto", Position())
    precision = config.train.precision if config else "bf16"
    length = config.data.sequence_length if config else model.max_sequence_length
    entries: list[ProfileEntry] = []
    for size in _sizes(config):
        for recompute in (config.search.recompute if config else None) or RUNNABLE_RECOMPUTE:
            if recompute not in RUNNABLE_RECOMPUTE:
                continue
            setting = Setting(
                model=model,
                sequence_length=length,
                micro_batch_size=size,
                recompute=recompute,
                dtype=DTYPES[precision],
                device=device,
            )
            print(f"measuring micro-batches of {size}, recompute {recompute}", file=sys.stderr)
            entry = measure_entry(setting, device_type=device_type or name_of(device))
            entries += _with_simulated(entry, cluster)
    return Profile(
        source=OWN_SOURCE,
        sequence_length=length,
        model=model.name,
        machine=name_of(device) if device.type == "cuda" else machine_name(),
        precision=precision,
        entries=tuple(entries),
    )


def _sizes(config: RunConfig | None) -> tuple[int, ...]:
    if config is None:
        return (1,)
    return config.search.micro_batch_size or (config.train.micro_batch_size,)


def _with_simulated(entry: ProfileEntry, cluster: Cluster | None) -> list[ProfileEntry]:
    """The measured entry, or those of the cluster's simulated cards, which are this one slowed down."""
    from yuan_train.train.measure import scale_entry

    types = {group.device: cluster.device_type(group.device) for group in cluster.nodes} if cluster else {}
    simulated = {name: device.slowdown for name, device in types.items() if device.slowdown is not None}
    if not simulated:
        return [entry]
    return [scale_entry(entry, device_type=name, slowdown=factor) for name, factor in simulated.items()]


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
