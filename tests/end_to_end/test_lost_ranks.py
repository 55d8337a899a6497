"""A rank is killed, or a link fails: the other ranks stop in time and report who waited for whom, in what.

The ranks are started one by one, without a launcher, which would kill them before they report. A simulated
slow card in the middle makes its neighbours wait for it nearly all the time.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tests.support.project import make_plan, make_project, read_metrics, run_config
from tests.support.spawn import free_port, patience, start_ranks
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan_constraints import save_plan

TIMEOUT_SECONDS = 8
SLOW = DeviceType(memory=2**30, fp32=1e9, memory_bandwidth=1e9, slowdown=20.0)


@dataclass(frozen=True)
class Host:
    """Where a rank runs: the prefix of its command line, and environment variables for the network."""

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
    options: Sequence[str], log: Path, hosts: Sequence[Host]
) -> Iterator[list[subprocess.Popen[str]]]:
    """One process per host, yielded after at least two training steps; killed at the end if still running."""
    port = str(free_port())
    line = [sys.executable, "-m", "yuan_train", "train", *options, f"log.directory={log}"]
    processes: list[subprocess.Popen[str]] = []
    for rank, host in enumerate(hosts):
        ranks = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(len(hosts)), "LOCAL_WORLD_SIZE": "1"}
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **ranks, "MASTER_PORT": port, **host.environment}
        processes.append(
            subprocess.Popen([*host.prefix, *line], stderr=subprocess.PIPE, text=True, env=environment)
        )
    try:
        wait_for_steps(log, lambda: all(process.poll() is None for process in processes))
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.wait()
            assert process.stderr is not None
            process.stderr.close()


def wait_for_steps(log: Path, all_run: Callable[[], bool]) -> None:
    """Wait for at least two training steps."""
    for _ in range(1200):
        if (log / "metrics.jsonl").exists() and len(read_metrics(log)) >= 2:
            return
        assert all_run(), "a rank exited early"
        time.sleep(0.1)
    raise AssertionError(f"{log} did not reach step 2")


def error_of(process: subprocess.Popen[str], *, within_seconds: float) -> str:
    """The stderr of a rank, which must exit in time with an error and without a traceback."""
    _, stderr = process.communicate(timeout=patience(within_seconds))
    assert process.returncode == 1 and "Traceback" not in stderr, stderr
    return stderr


def lost_peer(rank: int, peer: int) -> re.Pattern[str]:
    """The message of `rank`: its coordinates, the operation that failed, and the missing `peer`."""
    who = rf"rank {rank} \(pipeline 0, stage {rank}\)"
    return re.compile(rf"{who}: the \w+ \w+ of micro-batch \d+ on stage {rank} failed; rank {peer} is gone")


def test_neighbours_name_a_killed_rank(options: list[str], tmp_path: Path) -> None:
    line = ["train", *options, f"log.directory={tmp_path}"]
    with start_ranks(line, tmp_path, 3) as ranks:
        wait_for_steps(tmp_path, lambda: all(rank.process.is_alive() for rank in ranks))
        ranks[1].process.kill()
        for rank in (0, 2):
            code, error = ranks[rank].wait(within_seconds=TIMEOUT_SECONDS + 60)
            assert code == 1 and "Traceback" not in error, error
            assert lost_peer(rank, peer=1).search(error), error


@contextmanager
def three_hosts() -> Iterator[list[Host]]:
    """Three network namespaces, each with a link `eth0` to a bridge; skips if they cannot be created."""
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
            pytest.skip(f"network namespaces cannot be created here (ip netns, as root): {error}")
        network = {"MASTER_ADDR": "10.99.0.1", "GLOO_SOCKET_IFNAME": "eth0"}
        yield [Host(("ip", "netns", "exec", name), network) for name in names]
    finally:
        for name in (*names, hub):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


def ip(*words: str) -> None:
    """Run the `ip` command."""
    subprocess.run(["ip", *words], capture_output=True, check=True)


def test_both_ends_of_a_failed_link_name_each_other(options: list[str], tmp_path: Path) -> None:
    with three_hosts() as hosts, running(options, tmp_path, hosts) as ranks:
        ip("-n", hosts[2].prefix[3], "link", "set", "eth0", "down")
        for rank, peer in ((1, 2), (2, 1), (0, 1)):
            error = error_of(ranks[rank], within_seconds=TIMEOUT_SECONDS + 60)
            assert lost_peer(rank, peer).search(error), error
