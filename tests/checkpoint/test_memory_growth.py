"""Resident memory at the first save and at resume, and the bytes that each owner writes. Linux only."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import make_plan, make_project, run_config
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.plan import Plan
from yuan_train.train import build, run
from yuan_train.train.job import Position, prepare

MODEL = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 1536}
MIB = 2**20


def resident_bytes(key: str) -> int:
    """A line of this process's status in bytes: VmRSS, or VmHWM for the most since `forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(key)) * 1024


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def measured(function: Callable[..., Any], growth: dict[str, int], key: str) -> Callable[..., Any]:
    """`function`, noting how far its peak lies above what is held before and after it."""

    def call(*arguments: Any) -> Any:
        before = resident_bytes("VmRSS")
        forget_peak()
        result = function(*arguments)
        growth.setdefault(key, resident_bytes("VmHWM") - max(before, resident_bytes("VmRSS")))
        return result

    return call


def body(rank: int, run_file: Path, plan: Plan, folder: Path, ports: list[int]) -> None:
    growth: dict[str, int] = {}
    run.save_progress = measured(run.save_progress, growth, "save")
    build.restore = measured(build.restore, growth, "resume")
    position = Position(rank, plan.world_size, rank, plan.world_size)
    for steps, port in zip((1, 2), ports, strict=True):
        as_rank(rank, plan.world_size, port)
        words = (f"train.steps={steps}", f"checkpoint.directory={folder / 'ck'}", "checkpoint.resume=auto")
        run.train(
            prepare(
                run_config(run_file, *words, "validation.every=0", f"log.directory={folder / 'log'}"),
                plan,
                position,
            )
        )
    (folder / f"{rank}.json").write_text(json.dumps(growth))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_saving_and_resuming_takes_no_memory_beside_the_state(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    run_file = make_project(tmp_path / "project", model=MODEL)
    config = run_config(run_file)
    plan = make_plan(config, [[4]] * 4)
    plan = Plan(**{**vars(plan), "optimizer_sharding": True})
    spawn(body, 4, run_file, plan, tmp_path, [free_port(), free_port()])
    parameters = config.model.parameters
    held = parameters * (4 + 4) + parameters * 3 * 4 / 4
    # All three states of every element, as a gather would need: far above the limit.
    assert 12 * parameters > 2 * (0.05 * held + 64 * MIB)
    for rank in range(4):
        growth = json.loads((tmp_path / f"{rank}.json").read_text())
        for key in ("save", "resume"):
            assert growth[key] < 0.05 * held + 64 * MIB, (rank, key, growth)
    written = sorted(file.stat().st_size for file in (tmp_path / "ck").glob("step-*1/*.distcp"))
    assert len(written) == 4 and written[-1] < 1.1 * written[0]
