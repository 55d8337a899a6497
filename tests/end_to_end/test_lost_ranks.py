"""A rank is killed, or a link fails: the other ranks stop in time and report who waited for whom, in what.

The ranks are started one by one, without a launcher, which would kill them before they report. A simulated
slow card in the middle makes its neighbours wait for it nearly all the time.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from tests.support.networks import entered, three_hosts
from tests.support.project import make_plan, make_project, run_config
from tests.support.spawn import Around, Command, start_ranks, wait_for_step
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan_constraints import save_plan

TIMEOUT_SECONDS = 8
SLOW = DeviceType(memory=2**30, fp32=1e9, memory_bandwidth=1e9, slowdown=20.0)


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


def lost_peer(rank: int, peer: int) -> re.Pattern[str]:
    """The message of `rank`: its coordinates, the operation that failed, and the missing `peer`."""
    who = rf"rank {rank} \(pipeline 0, stage {rank}\)"
    return re.compile(rf"{who}: the \w+ \w+ of micro-batch \d+ on stage {rank} failed; rank {peer} is gone")


@contextmanager
def running(
    options: Sequence[str], log: Path, around: Mapping[int, Around] | None = None
) -> Iterator[list[Command]]:
    """Three ranks, once they have taken two steps."""
    with start_ranks(["train", *options, f"log.directory={log}"], log, 3, around=around) as ranks:
        wait_for_step(log, 2, lambda: all(rank.process.is_alive() for rank in ranks))
        yield ranks


def name_each_other(ranks: Sequence[Command], *pairs: tuple[int, int]) -> None:
    """Of each pair the first rank must exit in time, and say that the second one is gone."""
    for rank, peer in pairs:
        code, error = ranks[rank].wait(within_seconds=TIMEOUT_SECONDS + 60)
        assert code == 1 and "Traceback" not in error, error
        assert lost_peer(rank, peer).search(error), error


def test_neighbours_name_a_killed_rank(options: list[str], tmp_path: Path) -> None:
    with running(options, tmp_path) as ranks:
        ranks[1].process.kill()
        name_each_other(ranks, (0, 1), (2, 1))


def test_both_ends_of_a_failed_link_name_each_other(options: list[str], tmp_path: Path) -> None:
    with three_hosts() as hosts:
        around = {rank: partial(entered, host) for rank, host in enumerate(hosts)}
        with running(options, tmp_path, around) as ranks:
            hosts[2].pull("eth0")
            name_each_other(ranks, (1, 2), (2, 1), (0, 1))
