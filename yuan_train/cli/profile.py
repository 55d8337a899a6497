"""yuan-train profile --model F --out profile.json: measures this machine's card."""

from __future__ import annotations

import argparse
import json
import os
import sys

from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import as_plain, write_text
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.profile import Profile, ProfileEntry
from yuan_train.config.run import RunConfig, load_run


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "profile",
        help="measure this machine's card",
        description="Measures forward and backward of embedding, layer and head on this machine's card, and "
        "what they keep in memory. `yuan-train plan --profile` then needs no estimates for it.",
    )
    parser.add_argument("--model", required=True, metavar="FILE", help="the model file")
    parser.add_argument("--out", required=True, metavar="FILE", help="where the profile goes (JSON)")
    parser.add_argument(
        "--config", metavar="FILE", help="the run: sequence length, micro-batch size, precision"
    )
    parser.add_argument("--cluster", metavar="FILE", help="also give entries for its simulated cards")
    parser.add_argument("--device-type", metavar="NAME", help="what the card is called in the cluster file")
    parser.add_argument("--json", action="store_true", help="print the profile on stdout too")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="changes to the run")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Measure and write."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("profile measures one card, alone; links between ranks are not measured yet")
    if arguments.overrides and not arguments.config:
        raise ConfigError("overrides change the run; give --config as well")
    model = load_model(arguments.model)
    config = load_run(arguments.config, tuple(arguments.overrides)) if arguments.config else None
    if config is not None and config.model != model:
        raise ConfigError(
            f"{arguments.model} is not the model of {arguments.config}; profile the one that is run"
        )
    cluster = load_cluster(arguments.cluster) if arguments.cluster else None
    profile = _measure(model, config, cluster, arguments.device_type)
    text = json.dumps(as_plain(profile), indent=1)
    write_text(arguments.out, text + "\n")
    if arguments.json:
        print(text)
    print(f"wrote {arguments.out}: {len(profile.entries)} entries, {profile.machine}", file=sys.stderr)
    return 0


def _measure(
    model: ModelConfig, config: RunConfig | None, cluster: Cluster | None, device_type: str | None
) -> Profile:
    from yuan_train.train.loop import DTYPES, Position, choose_device
    from yuan_train.train.measure import Setting, machine_name, measure_entry, name_of

    device = choose_device(config.train.device if config else "auto", Position())
    precision = config.train.precision if config else "bf16"
    length = config.data.sequence_length if config else model.max_sequence_length
    entries: list[ProfileEntry] = []
    for size in _sizes(config):
        for recompute in (config.search.recompute if config else None) or ("none", "full"):
            if recompute == "selective":
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
