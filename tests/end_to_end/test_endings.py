"""Whatever happens to one rank: all ranks end within seconds, and each one's log names the culprit."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_card import FakeCard, FakeNcclTransport
from tests.support.project import make_plan, make_project, on_devices, run_config
from tests.support.spawn import Around, patience, start_ranks, wait_for_step
from yuan_train.cli import launch
from yuan_train.config.errors import INTERRUPTED
from yuan_train.config.plan_constraints import load_plan, save_plan
from yuan_train.parallel import groups, transport
from yuan_train.parallel.board import Board
from yuan_train.train import ending, job, run

SECONDS = 10.0
"""In which all ranks must have ended after the first one."""


@contextmanager
def breaking_step(break_it: Callable[[], None]) -> Iterator[None]:
    """The third training step of this process begins with a fault."""
    step, count = run._step, 0  # pyright: ignore[reportPrivateUsage]

    def broken(*a: Any, **k: Any) -> Any:
        nonlocal count
        count += 1
        if count == 3:
            break_it()
        return step(*a, **k)

    run._step = broken  # pyright: ignore[reportPrivateUsage]
    yield


def fail() -> None:
    raise KeyError("no such sample")


def with_a_bug() -> Any:
    return breaking_step(fail)


def stuck_for_ever() -> Any:
    """As the main thread of a rank whose NCCL waits for what will not come: nothing is raised there."""
    return breaking_step(lambda: time.sleep(1000))


def killed() -> Any:
    return breaking_step(lambda: os.kill(os.getpid(), signal.SIGKILL))


@contextmanager
def killed_while_groups_are_made() -> Iterator[None]:
    """All ranks have met, and the others wait for the addresses of this one's connections."""
    groups.dist.init_process_group = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
    yield


def interrupt() -> None:
    """Ctrl-C, also where these tests run in the background of a shell, which ignores it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.raise_signal(signal.SIGINT)


def interrupted() -> Any:
    return breaking_step(interrupt)


@contextmanager
def interrupted_before_it_has_met() -> Iterator[None]:
    Board.wait_for_all = lambda self, seconds: interrupt()
    yield


@contextmanager
def killed_before_the_ring() -> Iterator[None]:
    """It has come; nobody has a connection to it."""
    Board.join_ring = lambda self: os.kill(os.getpid(), signal.SIGKILL)
    yield


@contextmanager
def on_a_full_card() -> Iterator[None]:
    """This process has a card that somebody else fills before the third step."""
    card, held = FakeCard(), list[torch.Tensor]()

    def fill() -> None:
        held.append(torch.empty(card.reserved - card.allocated - 4096, dtype=torch.uint8))
        card.outside = card.total - card.reserved

    job.choose_device = lambda *_: card  # pyright: ignore[reportAttributeAccessIssue]
    with card.counting(), breaking_step(fill):
        yield


@contextmanager
def on_cards_of_nccl(break_it: Callable[[], None]) -> Iterator[None]:
    """This process has a card whose library says nccl, as those of the others must."""
    card = FakeCard()
    card.library = "nccl"
    transport._kind_of = lambda *_, **__: FakeNcclTransport  # pyright: ignore
    groups.world_backend = lambda _: "gloo"
    job.choose_device = lambda *_: card  # pyright: ignore[reportAttributeAccessIssue]
    groups.shutdown = ending.shutdown = lambda: time.sleep(1000)  # pyright: ignore
    with card.counting(), breaking_step(break_it):
        yield


def with_a_bug_on_nccl() -> Any:
    return on_cards_of_nccl(fail)


def that_waits_on_nccl() -> Any:
    """The host stands in a synchronisation with its card, which waits for another one."""
    return on_cards_of_nccl(lambda: time.sleep(1000))


@contextmanager
def with_a_full_disk() -> Iterator[None]:
    def save(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    from yuan_train.train import saver

    saver.save_checkpoint = save  # pyright: ignore[reportAttributeAccessIssue]
    yield


@contextmanager
def that_may_not_read() -> Iterator[None]:
    def load(_: object) -> None:
        raise PermissionError(13, "Permission denied", "tokenizer")

    job.Tokenizer.load = load  # pyright: ignore[reportAttributeAccessIssue]
    yield


@contextmanager
def that_cannot_build() -> Iterator[None]:
    def build(*_: object, **__: object) -> None:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    from yuan_train.cli import train

    train._engine = lambda _: build  # pyright: ignore
    yield


@dataclass(frozen=True)
class Ending:
    culprit: int
    said: str
    """What every log says of it, as a pattern."""
    around: dict[int, Around]
    words: tuple[str, ...] = ()
    codes: frozenset[int] = frozenset({1})


GONE = "does not answer: killed, crashed, stopped or cut off"
ENDINGS = {
    "bug of the first": Ending(0, "KeyError: 'no such sample'", {0: with_a_bug}),
    "bug, others hang": Ending(1, "KeyError", {0: stuck_for_ever, 1: with_a_bug, 2: stuck_for_ever}),
    "bug, on nccl": Ending(
        1, "KeyError", {0: that_waits_on_nccl, 1: with_a_bug_on_nccl, 2: that_waits_on_nccl}
    ),
    "killed": Ending(2, GONE, {2: killed}, codes=frozenset({1, -9})),
    "killed, nobody notices": Ending(
        1, GONE, {0: stuck_for_ever, 1: killed, 2: stuck_for_ever}, codes=frozenset({1, -9})
    ),
    "killed at the start": Ending(1, GONE, {1: killed_while_groups_are_made}, codes=frozenset({1, -9})),
    "killed before the ring": Ending(1, GONE, {1: killed_before_the_ring}, codes=frozenset({1, -9})),
    "first killed": Ending(
        0, "is gone, and with it the ranks' meeting point", {0: killed}, codes=frozenset({1, -9})
    ),
    "disk": Ending(2, "No space left on device", {2: with_a_full_disk}, ("checkpoint.every=3",)),
    "prepare": Ending(1, "PermissionError: .*tokenizer", {1: that_may_not_read}),
    "build": Ending(1, "RuntimeError: mat1 and mat2", {1: that_cannot_build}),
    "interrupted at the start": Ending(
        1, r"interrupted \(Ctrl-C\)", {1: interrupted_before_it_has_met}, codes=frozenset({INTERRUPTED})
    ),
    "interrupted": Ending(1, r"interrupted \(Ctrl-C\)", {1: interrupted}, codes=frozenset({1, 130})),
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    run_file = make_project(folder)
    plan = make_plan(run_config(run_file), [[2, 2, 2]])
    save_plan(folder / "plan.yaml", on_devices(plan, "a/0", "a/1", "b/0"))
    return folder


def test_a_stopped_rank_is_named_after_the_timeout(project: Path, tmp_path: Path) -> None:
    """The first, which holds the meeting point too. The last only waits for the one between."""
    words = ["train", "--config", project / "run.yaml", "--plan", project / "plan.yaml", "validation.every=0"]
    words += ["train.steps=1000", "train.timeout=3 s", f"log.directory={tmp_path}"]
    with start_ranks(words, tmp_path, 3) as ranks:
        wait_for_step(tmp_path, 2, lambda: all(rank.process.is_alive() for rank in ranks))
        assert ranks[0].process.pid is not None
        os.kill(ranks[0].process.pid, signal.SIGSTOP)
        for rank in ranks[1:]:
            code, said = rank.wait(within_seconds=3 + SECONDS)
            assert (
                code == 1 and "error: the run ends: rank 0: does not answer at the ranks' meeting" in said
            ), said


@pytest.mark.parametrize("name", ENDINGS)
def test_all_ranks_end_in_time_and_name_the_culprit(project: Path, tmp_path: Path, name: str) -> None:
    wanted = ENDINGS[name]
    words = ["train", "--config", project / "run.yaml", "--plan", project / "plan.yaml", "validation.every=0"]
    words += ["train.steps=1000", f"checkpoint.directory={tmp_path / 'c'}", *wanted.words]
    with start_ranks(words, tmp_path, 3, around=wanted.around) as ranks:
        first = None
        deadline = time.monotonic() + 120
        while any(rank.process.is_alive() for rank in ranks):
            if first is None and not all(rank.process.is_alive() for rank in ranks):
                first = time.monotonic()
            assert time.monotonic() < min(deadline, (first or deadline) + patience(SECONDS)), [
                rank.stderr.read_text() for rank in ranks
            ]
            time.sleep(0.02)
        told = [rank.wait(within_seconds=1) for rank in ranks]
    for number, (code, said) in enumerate(told):
        assert code in wanted.codes, said
        if code == -9:
            continue
        assert re.search(wanted.said, said), said
        named = re.search(rf"error: the run ends: rank {wanted.culprit}( \((\w/\d on )?.*\))?: ", said)
        assert (named is None) == (number == wanted.culprit), said


@contextmanager
def without_a_driver() -> Iterator[None]:
    launch.has_driver = lambda: False
    yield


def test_a_node_without_its_card_ends_the_others(project: Path, tmp_path: Path) -> None:
    """Of three nodes one has a card by the plan; the others, which compute on processors, need not wait."""
    plan = load_plan(project / "plan.yaml")
    types = ("unknown", "unknown", "RTX-4090")
    ranks = tuple(replace(rank, type=kind) for rank, kind in zip(plan.ranks, types, strict=True))
    save_plan(tmp_path / "plan.yaml", replace(plan, ranks=ranks))
    words = ["train", "--config", project / "run.yaml", "--plan", tmp_path / "plan.yaml"]
    began = time.monotonic()
    with start_ranks(
        [*words, "train.device=auto"], tmp_path, 3, around=dict.fromkeys(range(3), without_a_driver)
    ) as started:
        told = [rank.wait(within_seconds=60) for rank in started]
    assert time.monotonic() - began < patience(SECONDS)
    assert [code for code, _ in told] == [2, 2, 2]
    assert all("(b/0: RTX-4090): the plan has cards there" in said for _, said in told), told
    assert told[2][1].count("error:") == 1
