"""Checkpoints written while training goes on: the same files, and the same end when one cannot be written."""

from __future__ import annotations

import multiprocessing
import os
import resource
import time
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from tests.support.project import make_plan, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, _run_cases, run_alone  # pyright: ignore[reportPrivateUsage]
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.checkpoint import save as save_module
from yuan_train.checkpoint.load import find_checkpoint, find_latest, load_tensors
from yuan_train.checkpoint.names import LATEST, step_name
from yuan_train.cli.main import main
from yuan_train.config.plan import save_plan
from yuan_train.train import loop
from yuan_train.train.saver import Saver

BEFORE, LAST = 2, 4
"""Steps with a save; steps."""


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_project(tmp_path_factory.mktemp("project"))


def overrides(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        f"train.steps={LAST}",
        "validation.every=0",
        f"checkpoint.every={BEFORE}",
        f"checkpoint.directory={folder / 'ck'}",
        *more,
    )


def tensors_of(folder: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint."""
    found = find_checkpoint(folder / "ck" / step_name(step))
    entries = FileSystemReader(found.path).read_metadata().state_dict_metadata
    tensors = {name: torch.empty(entry.size) for name, entry in entries.items()}  # pyright: ignore
    load_tensors(found, tensors)
    return tensors


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def wait_until(what: Any) -> None:
    for _ in range(1200):
        if what():
            return
        time.sleep(0.1)
    raise AssertionError("waited in vain")


def has_step(folder: Path, step: int) -> bool:
    """Whether the run has reported a step. The last line may be in the writing."""
    log = folder / "metrics.jsonl"
    return log.exists() and log.read_text().count("\n") >= step


def write_late(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Begin to write no checkpoint before the run has reported the last step."""
    at_once = loop.save_checkpoint

    def late(*arguments: Any, **options: Any) -> Path:
        wait_until(lambda: has_step(folder, LAST))
        return at_once(*arguments, **options)

    patch.setattr(loop, "save_checkpoint", late)


def run_in_turn(rank: int, cases: list[Case]) -> None:
    """As `run_cases`; asynchronous ones write late."""
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            if "checkpoint.asynchronous=true" in case.overrides:
                write_late(case.folder, patch)
            _run_cases(rank, [case])


def test_the_files_are_those_of_the_synchronous_save(run_file: Path, tmp_path: Path) -> None:
    """Two pipelines of unlike cuts, one with a wide stage, optimizer state shared out; and resumed from."""
    plan = parse_plan(run_config(run_file), "1x4: 2@0,1 | 4@2 / 1x4: 6@3", optimizer_sharding=True)
    here, there, again = (tmp_path / name for name in ("here", "there", "again"))
    case = Case(run_file, here, plan, overrides(here))
    late = Case(run_file, there, plan, overrides(there, "checkpoint.asynchronous=true"))
    resume = f"checkpoint.resume={there / 'ck' / step_name(BEFORE)}"
    resumed = Case(run_file, again, plan, overrides(again, resume))
    spawn(run_in_turn, plan.world_size, [case, late, resumed])
    for step in (BEFORE, LAST):
        ours, theirs = (folder / "ck" / step_name(step) for folder in (there, here))
        names = sorted(path.name for path in theirs.glob("*.distcp"))
        assert len(names) == plan.world_size
        assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)
        assert same(tensors_of(there, step), tensors_of(here, step))
    assert not same(tensors_of(here, BEFORE), tensors_of(here, LAST))

    assert same(tensors_of(again, LAST), tensors_of(here, LAST))
    assert [line["loss"] for line in read_metrics(again)] == [
        line["loss"] for line in read_metrics(here)[BEFORE:]
    ]


@pytest.mark.parametrize("copied", [True, False])
def test_what_is_written_is_the_copy(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    """Without it the checkpoint would be that of a later step."""
    here, there = tmp_path / "here", tmp_path / "there"
    run_alone(Case(run_file, here, None, overrides(here)))
    if not copied:
        monkeypatch.setattr(loop, "snapshot", lambda tensors: tensors)
    write_late(there, monkeypatch)
    run_alone(Case(run_file, there, None, overrides(there, "checkpoint.asynchronous=true")))
    assert same(tensors_of(there, BEFORE), tensors_of(here, BEFORE)) == copied
    assert same(tensors_of(there, LAST), tensors_of(here, LAST))


def train_in_little_space(rank: int, line: list[str], folder: Path, port: int) -> None:
    """Rank 1 cannot write a file of more than 16 KiB, and knows at once when a save is over."""
    as_rank(rank, 2, port)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
        look = Saver.failed

        def look_when_over(self: Saver) -> bool:
            if self._under_way is not None:  # pyright: ignore[reportPrivateUsage]
                futures.wait([self._under_way], timeout=120)  # pyright: ignore[reportPrivateUsage]
            return look(self)

        Saver.failed = look_when_over
    errors = os.open(folder / f"errors-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    code = main(line)
    (folder / f"code-{rank}").write_text(str(code))


def test_a_failure_in_the_background_ends_all_ranks_with_2(run_file: Path, tmp_path: Path) -> None:
    """One rank's disk is full. The run does not go on to the next save, but ends in the next step."""
    save_plan(tmp_path / "plan.yaml", make_plan(run_config(run_file), [[2, 4]]))
    line = ["train", "--config", str(run_file), "--plan", str(tmp_path / "plan.yaml")]
    late = ("train.steps=100000", "checkpoint.every=5", "checkpoint.asynchronous=true")
    line.append(f"log.directory={tmp_path / 'log'}")
    spawn(train_in_little_space, 2, [*line, *overrides(tmp_path), *late], tmp_path, free_port())
    for rank in range(2):
        said = (tmp_path / f"errors-{rank}").read_text()
        assert (tmp_path / f"code-{rank}").read_text() == "2", said
        assert "step-00000005: cannot be written" in said and "(rank 1)" in said, said
        assert "Traceback" not in said and "SIGTERM" not in said, said
    assert len(read_metrics(tmp_path / "log")) == 6
    assert find_latest(tmp_path / "ck") is None


def train_and_stick(case: Case, stuck: Path) -> None:
    """The second save stops with all tensors written, and the rest not."""
    whole = save_module.finish

    def finish(aside: Path, final: Path, *rest: Any) -> None:
        if final.name != step_name(BEFORE):
            stuck.touch()
            time.sleep(10_000)
        whole(aside, final, *rest)

    save_module.finish = finish
    run_alone(case)


def test_a_kill_while_one_is_written_leaves_the_one_before(run_file: Path, tmp_path: Path) -> None:
    case = Case(run_file, tmp_path, None, overrides(tmp_path, "checkpoint.asynchronous=true"))
    longer = replace(case, overrides=(*case.overrides, f"train.steps={LAST + 1}"))
    stuck = tmp_path / "stuck"
    process = multiprocessing.get_context("spawn").Process(target=train_and_stick, args=(longer, stuck))
    process.start()
    try:
        wait_until(lambda: stuck.exists() and has_step(tmp_path, LAST + 1))
    finally:
        process.kill()
        process.join()
    assert (tmp_path / "ck" / LATEST).read_text().strip() == step_name(BEFORE)
    found = find_latest(tmp_path / "ck")
    assert found is not None and found.step == BEFORE and not found.notes
    assert list((tmp_path / "ck").glob(".step-*.tmp"))
    run_alone(case)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, LAST + 1))
    assert find_checkpoint(tmp_path / "ck").step == LAST
    assert not list((tmp_path / "ck").glob(".step-*"))
