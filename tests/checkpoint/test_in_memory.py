"""Checkpoints in the memory of nodes: equal to those on disk, had from a neighbour, and not trusted blindly.

The nodes are those of the plan; each has a folder of its own, and what one lacks comes as a message.
"""

import json
import shutil
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from tests.support.project import difference, make_plan, make_project, on_devices, read_metrics, run_config
from tests.support.ranks import Case, run_alone, same_saved
from tests.support.spawn import Around, as_rank, free_port, spawn, start_ranks
from yuan_train.checkpoint import in_memory
from yuan_train.checkpoint.in_memory import DRAFT, NodeMemory, remove_copies, run_folder
from yuan_train.checkpoint.load import LocalShard, load_tensors, step_name
from yuan_train.config.errors import CheckpointError
from yuan_train.config.plan_constraints import save_plan
from yuan_train.parallel.shard import TensorBox
from yuan_train.train import run, saver

STEPS, CUT_OFF = 6, 5
SECONDS = 120


@contextmanager
def cut_off() -> Iterator[None]:
    """The run ends as if it were killed behind its last step: nothing is saved then, and nothing dropped."""

    def save(job: Any, engine: Any, progress: Any, saver: Any) -> None:
        if progress.step < job.run.train.steps:
            save_progress(job, engine, progress, saver)

    save_progress = run.save_progress
    dropped = patch.multiple(saver, remove_copies=lambda *_: None, forget_copies=lambda *_: None)
    with patch.object(run, "save_progress", save), dropped:
        yield


def _trust(self: NodeMemory, manifest: Any) -> tuple[list[str], list[str]]:
    return [name for name in manifest.files if (self.folder / manifest.name / name).exists()], []


@contextmanager
def trusting() -> Iterator[None]:
    """Negative control: no file is compared with its hash."""
    with patch.object(NodeMemory, "_checked", _trust):
        yield


@dataclass(frozen=True)
class Project:
    """A run file, its plans, and the losses of a run that nothing disturbs."""

    folder: Path
    run_file: Path

    def plan(self, nodes: str, cuts: Sequence[Sequence[int]]) -> Path:
        """A plan with a card on each of the nodes, which are called by a letter."""
        plan = on_devices(make_plan(run_config(self.run_file), cuts), *(f"{node}/0" for node in nodes))
        path = self.folder / f"plan-{nodes}.yaml"
        save_plan(path, plan)
        return path

    def train(
        self, plan: Path, ranks: int, at: Path, *more: str, around: Around | None = None, code: int = 0
    ) -> str:
        """Run to the end; what all ranks have said, the first one first."""
        words = ["train", "--config", self.run_file, "--plan", plan, *COMMON, f"log.directory={at / 'log'}"]
        words += [f"checkpoint.directory={at / 'ck'}", f"train.steps={STEPS}", *more]
        arounds = {} if around is None else dict.fromkeys(range(ranks), around)
        at.mkdir(exist_ok=True)
        with start_ranks(words, at, ranks, around=arounds) as commands:
            ended = [command.wait(within_seconds=SECONDS) for command in commands]
        said = "\n".join(text for _, text in ended)
        assert [found for found, _ in ended] == [code] * ranks, said
        return said


COMMON = ("optimizer.decay_steps=20", "validation.every=0")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Project:
    folder = tmp_path_factory.mktemp("project")
    return Project(folder, make_project(folder))


@pytest.fixture(scope="module")
def whole(project: Project) -> Path:
    """A run that nothing disturbs, without copies."""
    project.train(project.plan("abc", [[2, 2, 2]]), 3, project.folder / "whole", "checkpoint.every=4")
    return project.folder / "whole"


@pytest.fixture(scope="module")
def killed(project: Project) -> Iterator[Path]:
    """A run that ended behind step 5, with step 4 in memory, and steps 2 and 4 on disk."""
    at = project.folder / "killed"
    more = ("checkpoint.in_memory=4", "checkpoint.every=2", f"train.steps={CUT_OFF}")
    said = project.train(project.plan("abc", [[2, 2, 2]]), 3, at, *more, around=cut_off)
    assert "kept step 4 in memory, on each node and a neighbour of 3 nodes" in said
    yield at
    shutil.rmtree(run_folder(at / "ck"))


@pytest.fixture
def again(killed: Path, tmp_path: Path) -> Iterator[Path]:
    """A copy of the run that was killed, without step 4 on disk."""
    at = tmp_path / "again"
    shutil.copytree(killed, at)
    shutil.rmtree(at / "ck" / step_name(4))
    shutil.copytree(run_folder(killed / "ck"), run_folder(at / "ck"))
    yield at
    shutil.rmtree(run_folder(at / "ck"), ignore_errors=True)


def copy_of(at: Path, node: str) -> Path:
    """The one checkpoint that a node has in memory."""
    (found,) = (run_folder(at / "ck") / node).iterdir()
    return found


def flip(path: Path) -> None:
    """Flip a bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_copy_is_the_checkpoint_on_disk(killed: Path) -> None:
    """Each node has its own file and that of the node before it, byte for byte; and the same state."""
    disk = killed / "ck" / step_name(4)
    for i, node in enumerate("abc"):
        found = copy_of(killed, node)
        files = {path.name for path in found.iterdir()}
        own = {f"__{i}_0.distcp", f"__{(i - 1) % 3}_0.distcp"}
        assert files == own | {".metadata", "manifest.json"}
        assert all((found / name).read_bytes() == (disk / name).read_bytes() for name in own)
        state = json.loads((found / "manifest.json").read_text())["state"]
        assert state | {"run": None} == json.loads((disk / "state.json").read_text()) | {"run": None}


def test_the_same_plan_goes_on_to_the_bit(project: Project, whole: Path, again: Path) -> None:
    said = project.train(project.plan("abc", [[2, 2, 2]]), 3, again, "checkpoint.in_memory=4")
    assert "note: the newest checkpoint is in the memory of a, b, c; that on disk is of step 2" in said
    assert f"resumed from {run_folder(again / 'ck')}/a/{step_name(4)}" in said
    lines, wanted = read_metrics(again / "log"), read_metrics(whole / "log")
    assert [line["loss"] for line in lines] == [line["loss"] for line in wanted]
    assert same_saved(again / "ck", whole / "ck")
    assert not run_folder(again / "ck").exists(), "at the run's proper end nothing stays"


def test_a_lost_node_costs_no_read_of_the_disk(project: Project, whole: Path, again: Path) -> None:
    """Two nodes go on under a plan of their own; what the lost one had comes from its neighbour."""
    shutil.rmtree(run_folder(again / "ck") / "b")
    said = project.train(project.plan("ac", [[4, 2]]), 2, again, "checkpoint.in_memory=4")
    assert "in the memory of a, c; that on disk is of step 2" in said and "after step 4" in said
    assert difference(read_metrics(again / "log"), read_metrics(whole / "log")) < 1e-5


@pytest.mark.slow
def test_megatrons_engine_goes_on_to_the_bit(project: Project, tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    plan, killed, whole = project.plan("ab", [[3, 3]]), tmp_path / "killed", tmp_path / "whole"
    more = ("engine=megatron", "checkpoint.in_memory=4")
    project.train(plan, 2, whole, more[0])
    try:
        project.train(plan, 2, killed, *more, f"train.steps={CUT_OFF}", around=cut_off)
        said = project.train(plan, 2, killed, *more)
    finally:
        shutil.rmtree(run_folder(killed / "ck"), ignore_errors=True)
    assert "in the memory of a, b; there is none on disk" in said and "after step 4" in said
    assert same_saved(killed / "ck", whole / "ck")


def test_a_byte_that_has_changed_is_found(project: Project, whole: Path, again: Path) -> None:
    flip(copy_of(again, "a") / "__0_0.distcp")
    said = project.train(project.plan("abc", [[2, 2, 2]]), 3, again, "checkpoint.in_memory=4")
    assert "of step 4 in the memory of a, __0_0.distcp has other bytes than were written, and is not" in said
    assert "after step 4" in said and same_saved(again / "ck", whole / "ck")


def test_without_a_whole_copy_the_disk_is_read(project: Project, whole: Path, again: Path) -> None:
    for node in "ab":
        flip(copy_of(again, node) / "__0_0.distcp")
    said = project.train(project.plan("abc", [[2, 2, 2]]), 3, again, "checkpoint.in_memory=4")
    assert "step 4 cannot be had from the memory of a, b, c: no whole copy of __0_0.distcp" in said
    assert f"resumed from {again / 'ck' / step_name(2)} after step 2" in said
    lines, wanted = read_metrics(again / "log"), read_metrics(whole / "log")
    assert [line["loss"] for line in lines] == [line["loss"] for line in wanted]


def test_what_arrives_with_other_bytes_is_not_loaded(project: Project, whole: Path, again: Path) -> None:
    """The copies are dropped, and the next start reads the disk."""
    plan = project.plan("ac", [[4, 2]])
    flip(copy_of(again, "c") / "__1_0.distcp")
    said = project.train(plan, 2, again, "checkpoint.in_memory=4", around=trusting, code=1)
    assert (
        "__1_0.distcp of rank 1 has arrived with other bytes; these copies are dropped: start again" in said
    )
    said = project.train(plan, 2, again, "checkpoint.in_memory=4")
    assert f"resumed from {again / 'ck' / step_name(2)} after step 2" in said
    assert difference(read_metrics(again / "log"), read_metrics(whole / "log")) < 1e-5


def test_another_run_in_the_directory_uses_no_copies(project: Project, again: Path) -> None:
    """Whoever begins anew, or empties the directory, does not get the old run back."""
    plan = project.plan("abc", [[2, 2, 2]])
    for change in (("checkpoint.resume=never",), ()):
        shutil.copytree(
            run_folder(project.folder / "killed/ck"), run_folder(again / "ck"), dirs_exist_ok=True
        )
        if not change:
            shutil.rmtree(again / "ck")
        said = project.train(plan, 3, again, "checkpoint.in_memory=4", "train.steps=1", *change)
        assert "resumed" not in said and [line["step"] for line in read_metrics(again / "log")] == [1]


# --- one process ------------------------------------------------------------------------------------------


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[NodeMemory]:
    """That of a single process, on a node of its own."""
    found = NodeMemory(tmp_path / "ck", ("a", "machine"))
    assert found.begin(disk_step=None) == (None, [])
    yield found
    remove_copies(tmp_path / "ck", "a")
    assert not run_folder(tmp_path / "ck").exists()


TENSORS = {"weights.w": torch.arange(6.0)}


def keep(memory: NodeMemory, *steps: int) -> None:
    for step in steps:
        memory.keep(step, TENSORS, {"step": step})


def test_the_newest_one_alone_stays(memory: NodeMemory) -> None:
    keep(memory, 2, 4)
    (memory.folder / DRAFT).mkdir()
    found, notes = memory.begin(disk_step=4)
    assert found is not None and (found.step, found.disk_step, notes) == (4, 4, [])
    assert [path.name for path in memory.folder.iterdir()] == [found.path.name]
    loaded = {"weights.w": torch.zeros(6)}
    load_tensors(found, loaded)
    assert torch.equal(loaded["weights.w"], TENSORS["weights.w"])


def test_a_newer_one_on_disk_is_preferred(memory: NodeMemory) -> None:
    keep(memory, 4)
    assert memory.begin(disk_step=5) == (None, [])


def test_a_node_that_was_away_brings_back_no_steps_that_are_not_the_runs(memory: NodeMemory) -> None:
    """The run has gone on from an older step without it, and has not come as far yet."""
    keep(memory, 20)
    here = next(memory.folder.iterdir())
    away = here.rename(memory.folder.parent / "away")
    for _ in range(2):
        assert memory.begin(disk_step=10) == (None, [])
        # As long as nothing else is kept, it does.
        shutil.copytree(away, here)
        found, _ = memory.begin(disk_step=10)
        assert found is not None and found.step == 20
        shutil.rmtree(here)
    keep(memory, 12)
    away.rename(here)
    found, notes = memory.begin(disk_step=10)
    assert found is not None and (found.step, notes) == (12, []) and not here.exists()


def test_a_start_that_keeps_nothing_leaves_the_copies_to_the_next(memory: NodeMemory) -> None:
    keep(memory, 4)
    for _ in range(3):
        found, _ = memory.begin(disk_step=None)
        assert found is not None and found.step == 4


@pytest.mark.parametrize("change", [("}", ""), ('"step": 4', '"step": 5')], ids=["torn", "altered"])
def test_a_manifest_of_other_bytes_is_not_used(memory: NodeMemory, change: tuple[str, str]) -> None:
    keep(memory, 4)
    (path,) = memory.folder.glob("step-*/manifest.json")
    path.write_text(path.read_text().replace(*change))
    found, notes = memory.begin(disk_step=None)
    assert found is None and notes == [f"{path.parent.name} in the memory of a has no whole manifest"]


NO_ROOM = OSError(28, "No space left on device")
NOT_WRITTEN = CheckpointException("a save", {0: (NO_ROOM, traceback.StackSummary())})
"""As torch says it, on all ranks."""


@pytest.mark.parametrize(
    ("name", "error"),
    [("write_tensors", NOT_WRITTEN), ("make_empty_directory", NO_ROOM), ("file_digest", NO_ROOM)],
    ids=["tensors", "folder", "digest"],
)
def test_the_copy_before_outlives_one_that_fails(memory: NodeMemory, name: str, error: Exception) -> None:
    keep(memory, 4)
    fails = patch.object(in_memory, name, side_effect=error)
    with fails, pytest.raises(CheckpointError, match="No space left on device"):
        keep(memory, 6)
    found, notes = memory.begin(disk_step=None)
    assert found is not None and (found.step, notes) == (4, [])


def test_a_host_without_room_is_said_and_the_run_goes_on(
    project: Project, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    more = ("checkpoint.in_memory=1", f"checkpoint.directory={tmp_path / 'ck'}", "train.steps=2")
    case = Case(project.run_file, tmp_path / "log", overrides=(*COMMON, *more))
    with patch.object(in_memory, "write_tensors", side_effect=NOT_WRITTEN):
        assert len(run_alone(case)) == 2
    said = capfd.readouterr().err
    assert said.count("is not kept in memory") == 1
    assert "note: step 1 is not kept in memory (none is): [Errno 28] No space left on device" in said


def test_a_host_without_room_for_what_it_fetches(memory: NodeMemory) -> None:
    keep(memory, 4)
    with patch.object(NodeMemory, "_add_head", side_effect=NO_ROOM):
        found, notes = memory.begin(disk_step=2)
    assert found is None
    assert notes == ["step 4 cannot be had from the memory of a: a: [Errno 28] No space left on device"]


def test_a_host_without_such_a_file_system(tmp_path: Path) -> None:
    with (
        patch.object(in_memory, "MEMORY", tmp_path / "shm"),
        pytest.raises(CheckpointError, match="checkpoint.in_memory: .*/shm, where Linux has files in memory"),
    ):
        NodeMemory(tmp_path / "ck", ("a", "machine"))


# --- a keep that is cut in two ----------------------------------------------------------------------------


def _cut_in_two(rank: int, directory: Path, port: int) -> None:
    as_rank(rank, 3, port)
    dist.init_process_group("gloo")
    memory = NodeMemory(directory, ("abc"[rank], "machine"))
    memory.begin(disk_step=None)
    rows = torch.full((2,), float(rank))
    tensors = {"weights.w": LocalShard(torch.Size((6,)), (TensorBox((2 * rank,), (2,), rows),))}
    memory.keep(4, tensors, {"step": 4})
    rows += 1
    # The others were killed just before.
    rename = patch.object(Path, "rename", lambda self, to: self) if rank else nullcontext()
    with rename, patch.object(NodeMemory, "_drop_others"), suppress(FileNotFoundError):
        memory.keep(8, tensors, {"step": 8})
    found, notes = memory.begin(disk_step=None)
    assert found is not None and found.step == 4
    assert len(notes) == 1 and notes[0].startswith(
        "step 8 cannot be had from the memory of a, b, c: no whole"
    )
    loaded = {"weights.w": torch.zeros(6)}
    load_tensors(found, loaded)
    assert loaded["weights.w"].tolist() == [0, 0, 1, 1, 2, 2]
    dist.destroy_process_group()


def test_a_keep_that_is_cut_in_two_is_not_used(tmp_path: Path) -> None:
    """One node has the newer step under its name, and the others do not: all go back to the older one."""
    try:
        spawn(_cut_in_two, 3, tmp_path / "ck", free_port())
    finally:
        shutil.rmtree(run_folder(tmp_path / "ck"), ignore_errors=True)
