"""Checkpoints written in the background: the same files as synchronous ones, and the same errors."""

import os
import resource
import time
from concurrent import futures
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import make_plan, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, _run_cases, run_alone, same_saved  # pyright: ignore
from tests.support.spawn import as_rank, free_port, spawn, start_server, wait_for_step, wait_until
from yuan_train.checkpoint import save as save_module
from yuan_train.checkpoint.load import LATEST, find_checkpoint, newest_in, step_name
from yuan_train.cli.main import main
from yuan_train.config.plan_constraints import save_plan
from yuan_train.train import saver as saver_module
from yuan_train.train.saver import Saver, Snapshots

FIRST_SAVE, LAST = 1, 2
"""Step of the first save; last step, which is saved too."""


def overrides(folder: Path, *more: str) -> tuple[str, ...]:
    return (
        f"train.steps={LAST}",
        "validation.every=0",
        f"checkpoint.every={FIRST_SAVE}",
        f"checkpoint.directory={folder / 'ck'}",
        *more,
    )


def saved(folder: Path, step: int) -> Path:
    return folder / "ck" / step_name(step)


def write_late(folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Delay every save until the run has logged its last step."""
    save_now = saver_module.save_checkpoint

    def late(*arguments: Any, **options: Any) -> Path:
        wait_for_step(folder, LAST)
        return save_now(*arguments, **options)

    patch.setattr(saver_module, "save_checkpoint", late)


def run_in_turn(rank: int, cases: list[Case]) -> None:
    """As `run_cases`, with asynchronous saves delayed by `write_late`."""
    for case in cases:
        with pytest.MonkeyPatch.context() as patch:
            if "checkpoint.asynchronous=true" in case.overrides:
                write_late(case.folder, patch)
            _run_cases(rank, [case])


def test_an_asynchronous_save_writes_the_files_of_a_synchronous_one(run_file: Path, tmp_path: Path) -> None:
    """Two different pipelines, one with a tensor-parallel stage, sharded optimizer; and resumed from."""
    plan = parse_plan(run_config(run_file), "1x4: 2@0,1 | 4@2 / 1x4: 6@3", optimizer_sharding=True)
    sync, background, resumed = (tmp_path / name for name in ("sync", "background", "resumed"))
    sync_case = Case(run_file, sync, plan, overrides(sync))
    background_case = Case(run_file, background, plan, overrides(background, "checkpoint.asynchronous=true"))
    resume = f"checkpoint.resume={saved(background, FIRST_SAVE)}"
    resumed_case = Case(run_file, resumed, plan, overrides(resumed, resume))
    spawn(run_in_turn, plan.world_size, [sync_case, background_case, resumed_case])
    for step in (FIRST_SAVE, LAST):
        ours, theirs = saved(background, step), saved(sync, step)
        names = sorted(path.name for path in theirs.glob("*.distcp"))
        assert len(names) == plan.world_size
        assert all((ours / name).read_bytes() == (theirs / name).read_bytes() for name in names)
        assert same_saved(ours, theirs)
    assert not same_saved(saved(sync, FIRST_SAVE), saved(sync, LAST))
    assert same_saved(saved(resumed, LAST), saved(sync, LAST))
    assert [line["loss"] for line in read_metrics(resumed)] == [
        line["loss"] for line in read_metrics(sync)[FIRST_SAVE:]
    ]


def test_without_a_copy_a_background_save_has_the_tensors_of_a_later_step(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, background = tmp_path / "sync", tmp_path / "background"
    run_alone(Case(run_file, sync, None, overrides(sync)))
    monkeypatch.setattr(Snapshots, "take", lambda self, tensors: tensors)
    write_late(background, monkeypatch)
    run_alone(Case(run_file, background, None, overrides(background, "checkpoint.asynchronous=true")))
    assert not same_saved(saved(background, FIRST_SAVE), saved(sync, FIRST_SAVE))
    assert same_saved(saved(background, LAST), saved(sync, LAST))


def train_with_a_full_disk(rank: int, line: list[str], folder: Path, port: int) -> None:
    """Train; rank 1 cannot write files of more than 16 KiB, and notices at once when a save is over."""
    as_rank(rank, 2, port)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**14, resource.RLIM_INFINITY))
        failed = Saver.failed

        def failed_when_over(self: Saver) -> bool:
            if self._pending is not None:  # pyright: ignore[reportPrivateUsage]
                futures.wait([self._pending], timeout=120)  # pyright: ignore[reportPrivateUsage]
            return failed(self)

        Saver.failed = failed_when_over
    errors = os.open(folder / f"errors-{rank}", os.O_CREAT | os.O_WRONLY)
    os.dup2(errors, 2)
    code = main(line)
    (folder / f"code-{rank}").write_text(str(code))


def test_a_failed_background_save_ends_all_ranks_with_exit_code_2(run_file: Path, tmp_path: Path) -> None:
    """One rank's disk is full. The run ends in the next step, and not only at the next save."""
    save_plan(tmp_path / "plan.yaml", make_plan(run_config(run_file), [[2, 4]]))
    line = ["train", "--config", str(run_file), "--plan", str(tmp_path / "plan.yaml")]
    more = ("train.steps=100000", "checkpoint.every=5", "checkpoint.asynchronous=true")
    line.append(f"log.directory={tmp_path / 'log'}")
    spawn(train_with_a_full_disk, 2, [*line, *overrides(tmp_path), *more], tmp_path, free_port())
    for rank in range(2):
        stderr = (tmp_path / f"errors-{rank}").read_text()
        assert (tmp_path / f"code-{rank}").read_text() == "2", stderr
        assert "step-00000005: cannot be written" in stderr and "(rank 1)" in stderr, stderr
        assert "Traceback" not in stderr and "SIGTERM" not in stderr, stderr
    assert len(read_metrics(tmp_path / "log")) == 6
    assert newest_in(tmp_path / "ck") is None


def train_and_hang(case: Case, hanging: Path) -> None:
    """Train; the second save hangs when its tensors are written, and touches the file `hanging`."""
    real_finish = save_module.finish

    def finish(temporary: Path, final: Path, *rest: Any) -> None:
        if final.name != step_name(FIRST_SAVE):
            hanging.touch()
            time.sleep(10_000)
        real_finish(temporary, final, *rest)

    save_module.finish = finish
    run_alone(case)


def test_a_kill_during_a_save_leaves_the_previous_checkpoint(run_file: Path, tmp_path: Path) -> None:
    case = Case(run_file, tmp_path, None, overrides(tmp_path, "checkpoint.asynchronous=true"))
    longer = replace(case, overrides=(*case.overrides, f"train.steps={LAST + 1}"))
    hanging = tmp_path / "hanging"
    process = start_server().Process(target=train_and_hang, args=(longer, hanging))
    process.start()
    try:
        wait_until(hanging.exists)
        wait_for_step(tmp_path, LAST + 1)
    finally:
        process.kill()
        process.join()
    assert (tmp_path / "ck" / LATEST).read_text().strip() == step_name(FIRST_SAVE)
    found = find_checkpoint(tmp_path / "ck")
    assert found.step == FIRST_SAVE and not found.notes
    assert list((tmp_path / "ck").glob(".step-*.tmp"))
    run_alone(case)
    assert [line["step"] for line in read_metrics(tmp_path)] == list(range(1, LAST + 1))
    assert find_checkpoint(tmp_path / "ck").step == LAST
    # A kill during the last save or at a start leaves these, and no other save comes.
    (tmp_path / "ck" / f".{step_name(LAST)}.old").mkdir()
    for name in (".latest.tmp", ".seen-by-all-1"):
        (tmp_path / "ck" / name).touch()
    run_alone(case)
    assert not list((tmp_path / "ck").glob(".*"))
