"""Which of several ranks looks for the checkpoint to resume from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.project import make_plan, run_config
from yuan_train.checkpoint.load import Checkpoint
from yuan_train.config.errors import CheckpointError
from yuan_train.config.run import RunConfig
from yuan_train.train import agreement
from yuan_train.train.job import Position, prepare


def test_rank_zero_looks_for_the_checkpoint_of_all(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of several ranks, on a fake process group, does not look by itself; rank 0 does, for all."""
    run = run_config(run_file, f"checkpoint.directory={tmp_path / 'ck'}")
    looked: list[RunConfig] = []
    found = Checkpoint(Path("/elsewhere/step-00000007"), {"step": 7})
    monkeypatch.setattr(agreement, "find_checkpoints", lambda run: looked.append(run) or (found, None))
    job = prepare(run, make_plan(run, [[2, 4]]), Position(0, 2, 0, 2))
    assert job.checkpoint is None and agreement.find_resume_together(job) is job
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        with pytest.raises(CheckpointError, match=r"ck/step-00000007: rank 0 resumes from it, but it is"):
            agreement.find_resume_together(job)
        (tmp_path / "ck/step-00000007").mkdir(parents=True)
        (tmp_path / "ck/step-00000007/.metadata").touch()
        resumed = agreement.find_resume_together(job)
        assert resumed.checkpoint is not None and resumed.checkpoint.path == tmp_path / "ck/step-00000007"
        assert resumed.checkpoint.step == 7 and len(looked) == 2
    finally:
        dist.destroy_process_group()
