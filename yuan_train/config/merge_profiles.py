"""Several profiles of one run as one: of other types of cards, or measured at other times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from yuan_train.config.cluster import Cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.profile import (
    GenerationProfile,
    HostProfile,
    LinkProfile,
    NodeLinkProfile,
    Profile,
    ProfileEntry,
    for_cluster,
    load_profile,
)

L = TypeVar("L", LinkProfile, NodeLinkProfile)


def merge_profiles(named: Sequence[tuple[str, Profile]]) -> Profile:
    """All entries and links of the profiles, the first one of each key. Raises ConfigError unless length,
    precision, model and source agree."""
    (first_name, first), *others = named
    entries: dict[tuple[object, ...], ProfileEntry] = {}
    hosts: dict[str, HostProfile] = {}
    generation: dict[tuple[str, int], GenerationProfile] = {}
    links: dict[tuple[str, str], LinkProfile] = {}
    node_links: dict[tuple[str, str], NodeLinkProfile] = {}
    for name, profile in [(first_name, first), *others]:
        for what in ("sequence_length", "precision", "compile", "model", "source"):
            value, wanted = getattr(profile, what), getattr(first, what)
            if value != wanted:
                raise ConfigError(
                    f"{name}: {what} {value!r}, but {first_name} has {wanted!r}; merge profiles of one run"
                )
        for entry in profile.entries:
            key = (entry.device_type, entry.tensor_parallel, entry.micro_batch_size, entry.recompute)
            entries.setdefault(key, entry)
        for host in profile.hosts:
            # All cards of a type must have what the planner counts on.
            slowest = min(host, hosts.get(host.device_type, host), key=_host_rate)
            hosts[host.device_type] = slowest
        for own in profile.generation:
            generation.setdefault((own.device_type, own.tensor_parallel), own)
        for link in profile.links:
            _take(links, (link.from_, link.to), link)
        for node_link in profile.node_links:
            _take(node_links, (node_link.from_, node_link.to), node_link)
    machines = dict.fromkeys(profile.machine for _, profile in named if profile.machine)
    return replace(
        first,
        machine=" and ".join(machines) or None,
        entries=tuple(entries.values()),
        links=tuple(links.values()),
        node_links=tuple(node_links.values()),
        hosts=tuple(hosts.values()),
        generation=tuple(generation.values()),
        batch=next((profile.batch for _, profile in named if profile.batch is not None), None),
    )


def _take(links: dict[tuple[str, str], L], ends: tuple[str, str], link: L) -> None:
    """Keep the first measured link, or else the first that others stand for."""
    known = links.get(ends)
    if known is None or (known.like is not None and link.like is None):
        links[ends] = link


def _host_rate(host: HostProfile) -> tuple[float, float]:
    return min(host.host_link_down, host.host_link_up), host.host_step_bytes_per_second


def read_profiles(paths: str | None, cluster: Cluster) -> Profile | None:
    """The profiles of a comma-separated list of files, merged, with the cluster's names of cards; None
    without a list.

    Raises ConfigError if they are not of the same run, or of no card of the cluster.
    """
    if not paths:
        return None
    return merge_profiles([(path, for_cluster(load_profile(path), cluster)) for path in paths.split(",")])
