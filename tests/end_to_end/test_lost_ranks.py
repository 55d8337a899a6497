"""A rank killed, a link cut: the others stop in time and say who waited for whom, and for what.

The ranks are started one by one, without a launcher that would end them before they speak. A simulated slow
card in the middle makes its neighbours wait for it nearly all the time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.project import make_plan, make_project, read_metrics, run_config
from tests.support.spawn import free_port
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import save_plan

TIMEOUT_SECONDS = 15
SLOW = DeviceType(memory=2**30, fp32=1e9, memory_bandwidth=1e9, slowdown=20.0)


@dataclass(frozen=True)
class Home:
    """Where a rank runs: words before its command line, and what it must know of the network."""

    prefix: tuple[str, ...]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A run of three stages whose middle card is slow."""
    folder = tmp_path_factory.mktemp("project")
    run_file = make_project(folder)
    plan = make_plan(run_config(run_file), [[2, 2, 2]])
    cards = (plan.ranks[0], replace(plan.ranks[1], type="slow"), plan.ranks[2])
    save_plan(folder / "plan.yaml", replace(plan, ranks=cards, device_types={"slow": SLOW}))
    files = ("--config", str(run_file), "--plan", str(folder / "plan.yaml"))
    return [*files, "train.steps=100000", "validation.every=0", f"train.timeout={TIMEOUT_SECONDS} s"]


@contextmanager
def running(
    options: Sequence[str], log: Path, homes: Sequence[Home]
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process per home, trained for at least two steps; killed at the end if it still runs."""
    port = str(free_port())
    line = [sys.executable, "-m", "yuan_train", "train", *options, f"log.directory={log}"]
    processes: list[subprocess.Popen[str]] = []
    for rank, home in enumerate(homes):
        place = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(homes)), "LOCAL_WORLD_SIZE": "1"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **place, "MASTER_PORT": port, **home.environment}
        processes.append(
            subprocess.Popen([*home.prefix, *line], stderr=subprocess.PIPE, text=True, env=environment)
        )
    try:
        for _ in range(1200):
            if (log / "metrics.jsonl").exists() and len(read_metrics(log)) >= 2:
                break
            assert all(process.poll() is None for process in processes), "a rank ended before its time"
            time.sleep(0.1)
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def last_words(process: subprocess.Popen[str], *, within_seconds: float) -> str:
    """What a rank says at its end, which must come in time, as an error and without a traceback."""
    _, said = process.communicate(timeout=within_seconds)
    assert process.returncode == 1 and "Traceback" not in said, said
    return said


def blames(rank: int, peer: int) -> re.Pattern[str]:
    """Who speaks, of what stage, of which operation, and whom it misses."""
    who = rf"rank {rank} \(pipeline 0, stage {rank}\)"
    return re.compile(rf"{who}: the \w+ \w+ of micro-batch \d+ on stage {rank} failed; rank {peer} is gone")


def test_a_killed_rank_is_named_by_its_neighbours(options: list[str], tmp_path: Path) -> None:
    home = Home((), {"MASTER_ADDR": "127.0.0.1"})
    with running(options, tmp_path, [home] * 3) as ranks:
        os.kill(ranks[1].pid, signal.SIGKILL)
        for rank in (0, 2):
            said = last_words(ranks[rank], within_seconds=TIMEOUT_SECONDS + 60)
            assert blames(rank, peer=1).search(said), said


@contextmanager
def three_hosts() -> Iterator[list[Home]]:
    """Three network namespaces, each with a link `eth0` into a hub; skips where they cannot be made."""
    names = [f"yt{os.getpid()}-{i}" for i in range(3)]
    hub = f"yt{os.getpid()}-hub"
    try:
        try:
            for name in (*names, hub):
                ip("netns", "add", name)
            ip("-n", hub, "link", "add", "hub", "type", "bridge")
            ip("-n", hub, "link", "set", "hub", "up")
            for i, name in enumerate(names):
                end = ("peer", "name", f"port{i}", "netns", hub)
                ip("link", "add", "eth0", "netns", name, "type", "veth", *end)
                ip("-n", hub, "link", "set", f"port{i}", "master", "hub", "up")
                ip("-n", name, "address", "add", f"10.99.0.{i + 1}/24", "dev", "eth0")
                ip("-n", name, "link", "set", "eth0", "up")
                ip("-n", name, "link", "set", "lo", "up")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"network namespaces cannot be made here (ip netns, as root): {error}")
        network = {"MASTER_ADDR": "10.99.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        yield [Home(("ip", "netns", "exec", name), network) for name in names]
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], capture_output=True, check=True)


def test_a_cut_link_is_named_at_both_ends(options: list[str], tmp_path: Path) -> None:
    with three_hosts() as homes, running(options, tmp_path, homes) as ranks:
        ip("-n", homes[2].prefix[3], "link", "set", "eth0", "down")
        for rank, peer in ((1, 2), (2, 1), (0, 1)):
            said = last_words(ranks[rank], within_seconds=TIMEOUT_SECONDS + 60)
            assert blames(rank, peer).search(said), said
