"""Runs with optimizer state on disks."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parallel.test_plans import overrides
from tests.support.project import parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases, same_saved
from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.plan import Plan
from yuan_train.parallel.optimizer_state import HostChunk
from yuan_train.train.job import Position, prepare
from yuan_train.train.step import Optimizer

TEXT = "1x4: 6@0,1 / 1x4: 2@2 | 4@3"
SHARDED = {"optimizer_sharding": True, "optimizer_share": [1, 3, 2]}


def test_disks_change_no_bit(run_file: Path, tmp_path: Path) -> None:
    run = run_config(run_file, *overrides("bf16"))
    here = parse_plan(run, TEXT, **SHARDED)
    on_disk = parse_plan(
        run, TEXT, optimizer_offload=[0.6, 1.0, 0.5], optimizer_disk=[0.5, 1.0, 1.0], **SHARDED
    )
    alone = parse_plan(run, "1x8: 6@0", optimizer_offload=[1.0], optimizer_disk=[1.0])

    def case(name: str, plan: Plan, steps: int, *changes: str, saves: str | None = None) -> Case:
        keys = (
            "validation.every=0",
            "optimizer.decay_steps=10",
            f"train.steps={steps}",
            f"memory.disk_directory={tmp_path / 'disks'}",
        )
        folder = tmp_path / (saves or name) / "ck"
        return Case(run_file, tmp_path / name, plan, (*overrides("bf16", folder), *keys, *changes))

    def half_way(name: str) -> Path:
        return tmp_path / name / "ck" / "step-00000002"

    run_cases(
        [
            case("here", here, 4),
            case("first half on disk", on_disk, 2, saves="on disk"),
            # Saved by several ranks, sharded; loaded by one, all of it on its disk, and saved without a step.
            case("alone", alone, 2, f"checkpoint.resume={half_way('on disk')}"),
            case("on disk", on_disk, 4),
        ]
    )
    assert same_saved(tmp_path / "on disk" / "ck", tmp_path / "here" / "ck")
    assert same_saved(half_way("on disk"), half_way("alone"))
    assert not list((tmp_path / "disks").iterdir())


def test_a_killed_run_leaves_nothing_on_its_disk_and_resumes_to_the_bit(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_config(run_file)
    plan = parse_plan(run, "1x8: 6@0", optimizer_offload=[1.0], optimizer_disk=[0.5])
    disks = tmp_path / "disks"

    def case(name: str, folder: str) -> Case:
        keys = ("train.precision=bf16", "train.steps=4", "validation.every=0", "checkpoint.every=2")
        own = (f"memory.disk_directory={disks}", f"checkpoint.directory={tmp_path / folder / 'ck'}")
        return Case(run_file, tmp_path / name, plan, (*keys, *own))

    def die_in_step_three() -> None:
        step, taken = Optimizer._step_on_host, []  # pyright: ignore[reportPrivateUsage]

        def step_or_die(self: Optimizer, chunk: HostChunk, *rest: Any) -> None:
            if int(self._host_steps) == 2:  # pyright: ignore[reportPrivateUsage]
                taken.append(chunk)
            if len(taken) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            step(self, chunk, *rest)

        monkeypatch.setattr(Optimizer, "_step_on_host", step_or_die)
        run_alone(case("killed", "killed"))

    process = torch.multiprocessing.get_context("fork").Process(target=die_in_step_three)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL and not list(disks.iterdir())
    assert [line["step"] for line in read_metrics(tmp_path / "killed")] == [1, 2]
    run_alone(case("resumed", "killed"))
    run_alone(case("whole", "whole"))
    assert same_saved(tmp_path / "killed" / "ck", tmp_path / "whole" / "ck")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            ("checkpoint.asynchronous=true", "memory.disk_directory=disk"),
            "would fill the host's memory; set false",
        ),
        ((), "memory.disk_directory is not given; give a directory on a local disk"),
    ],
)
def test_options_that_do_not_suit_the_plan_are_refused(
    run_file: Path, changes: tuple[str, ...], message: str
) -> None:
    run = run_config(run_file, *changes)
    with pytest.raises((ConfigError, PlanError), match=message):
        prepare(run, parse_plan(run, "1x8: 6@0", optimizer_offload=[1.0], optimizer_disk=[0.5]), Position())
