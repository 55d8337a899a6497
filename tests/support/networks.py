"""Machines with networks of their own: Linux network namespaces, each with a link to a bridge. Needs root."""

import ctypes
import os
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest


@dataclass(frozen=True)
class Host:
    """Where a command runs: the prefix of its command line, and environment variables for the network."""

    prefix: tuple[str, ...]
    environment: Mapping[str, str]
    address: str = "127.0.0.1"
    ends: Mapping[str, str] = field(default_factory=dict)
    """Of its link, the interfaces at both ends, by the namespace of each."""

    def pull(self, end: str) -> None:
        """Take one end of the link down: `eth0`, which this host sees, or the port, which it does not."""
        ip("-n", self.ends[end], "link", "set", end, "down")

    def plug(self, end: str) -> None:
        """Take it up again."""
        ip("-n", self.ends[end], "link", "set", end, "up")


@contextmanager
def hosts_on_a_bridge(count: int) -> Iterator[list[Host]]:
    """So many hosts, each with a link `eth0` to a bridge, and behind them the bridge's own, which has none.

    Raises OSError or CalledProcessError if there cannot be namespaces here.
    """
    names = [f"yt{os.getpid()}-{i}" for i in range(count)]
    hub = f"yt{os.getpid()}-hub"
    try:
        for name in (*names, hub):
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
        ip("-n", hub, "link", "add", "hub", "type", "bridge")
        ip("-n", hub, "address", "add", f"10.99.0.{count + 1}/24", "dev", "hub")
        ip("-n", hub, "link", "set", "hub", "up")
        for i, name in enumerate(names):
            end = ("peer", "name", f"port{i}", "netns", hub)
            ip("link", "add", "eth0", "netns", name, "type", "veth", *end)
            ip("-n", hub, "link", "set", f"port{i}", "master", "hub", "up")
            ip("-n", name, "address", "add", f"10.99.0.{i + 1}/24", "dev", "eth0")
            ip("-n", name, "link", "set", "eth0", "up")
        network = {"MASTER_ADDR": "10.99.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        yield [
            Host(
                ("ip", "netns", "exec", name),
                network if i < count else {},
                f"10.99.0.{i + 1}",
                {"eth0": name, f"port{i}": hub} if i < count else {},
            )
            for i, name in enumerate((*names, hub))
        ]
    finally:
        for name in (*names, hub):
            with suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)


@contextmanager
def three_hosts() -> Iterator[list[Host]]:
    """Three hosts on a bridge; skips a test if they cannot be created."""
    with ExitStack() as stack:
        try:
            hosts = stack.enter_context(hosts_on_a_bridge(3))
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be created here (ip netns, as root): {error}")
        yield hosts[:-1]


def ip(*words: str) -> None:
    """Run the `ip` command."""
    # Ctrl-C does not reach it: neither making a network nor taking it away stops half-way.
    subprocess.run(["ip", *words], capture_output=True, check=True, start_new_session=True)


@contextmanager
def entered(host: Host) -> Iterator[None]:
    """In this process: the network of a host."""
    with Path("/run/netns", host.prefix[3]).open() as file:
        assert ctypes.CDLL(None).setns(file.fileno(), 0) == 0
    os.environ |= host.environment
    yield
