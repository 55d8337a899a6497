"""Writing and finding checkpoints in one process; under other plans: tests/end_to_end/test_resume.py."""

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.project import MODEL
from yuan_train.checkpoint import save as saving
from yuan_train.checkpoint.load import (
    LATEST,
    MANIFEST,
    STATE,
    describe,
    find_checkpoint,
    load_tensors,
    newest_in,
    step_name,
    steps_in,
)
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.config.errors import CheckpointError


def tensors() -> dict[str, torch.Tensor]:
    return {"weights.a": torch.arange(6.0).view(2, 3), "exp_avg.a": torch.full((2, 3), 0.5)}


def save(folder: Path, step: int, **changes: Any) -> Path:
    state = {"step": step, "sequences": 8 * step, "tokens": 64 * step, "run": {"model": MODEL}}
    return save_checkpoint(folder, **{"step": step, "tensors": tensors(), "state": state, **changes})


def test_saved_tensors_are_loaded(tmp_path: Path) -> None:
    path = save(tmp_path, 100)
    assert path.name == "step-00000100" and (tmp_path / LATEST).read_text().strip() == path.name
    found = find_checkpoint(tmp_path)
    assert found.step == 100 and found.model.num_layers == 6 and not found.notes
    loaded = {name: torch.zeros(2, 3) for name in tensors()}
    load_tensors(found, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    facts = describe(tmp_path)
    assert facts["whole"] and facts["step"] == 100 and facts["parameters"] == found.model.parameters


def test_keep_counts_complete_checkpoints_and_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / step_name(9)).mkdir()  # incomplete: a higher step, but it does not count
    (tmp_path / ".step-00000004.tmp").mkdir()
    save(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [9, 4, 3]
    assert not list(tmp_path.glob(".step-*"))


def test_half_of_an_old_checkpoint_does_not_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process is killed while it removes one: the next save removes the rest."""
    for step in (1, 2):
        save(tmp_path, step)

    class Killed(BaseException):
        pass

    def remove_half(path: Path, **_: Any) -> None:
        for file in path.glob("*.distcp"):
            file.unlink()
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(saving.shutil, "rmtree", remove_half)
        save(tmp_path, 3, keep=2)
    save(tmp_path, 4, keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == [LATEST, step_name(3), step_name(4)]


@pytest.mark.parametrize("change", ["removed", "shortened"])
def test_a_file_that_a_writer_says_is_there_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """As on two nodes with a directory each: the writer reports success, and rank 0 does not see its file."""
    save(tmp_path, 1)
    save(tmp_path, 2)
    write_tensors = saving.write_tensors

    def write_elsewhere(temporary: Path, *arguments: Any) -> None:
        write_tensors(temporary, *arguments)
        (file,) = temporary.glob("*.distcp")
        if change == "removed":
            file.unlink()
        else:
            os.truncate(file, file.stat().st_size // 2)

    monkeypatch.setattr(saving, "write_tensors", write_elsewhere)
    with pytest.raises(CheckpointError, match=r"step-00000003: cannot be written: __0_0\.distcp"):
        save(tmp_path, 3, keep=1)
    assert steps_in(tmp_path) == [2, 1] and find_checkpoint(tmp_path).step == 2
    assert not list(tmp_path.glob(".step-*"))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 1, tensors={"weights.a": torch.ones(2, 3)})
    loaded = {"weights.a": torch.zeros(2, 3)}
    load_tensors(find_checkpoint(path), loaded)
    assert torch.equal(loaded["weights.a"], torch.ones(2, 3))


@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata", STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_an_incomplete_checkpoint_is_passed_over_with_a_note(
    tmp_path: Path, victim: str, damage: str
) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / victim
    path.write_bytes(path.read_bytes()[:20]) if damage == "truncated" else path.unlink()
    found = find_checkpoint(tmp_path)
    assert found.step == 1 and "torn" in found.notes[0] and victim in found.notes[0]
    assert found.notes[0].endswith("; falling back to the previous one")
    with pytest.raises(CheckpointError, match="torn"):
        find_checkpoint(tmp_path / step_name(2))


def test_no_checkpoint(tmp_path: Path) -> None:
    assert newest_in(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="no such directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path)
    (tmp_path / step_name(1)).mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint here is complete") as caught:
        newest_in(tmp_path)
    assert "falling back" not in str(caught.value)


def test_names_and_shapes_must_match(tmp_path: Path) -> None:
    save(tmp_path, 1)
    wanted = {"weights.a": torch.zeros(3, 2), "weights.b": torch.zeros(1)}
    with pytest.raises(
        CheckpointError, match=r"weights.a: has shape \[2, 3\], wanted \[3, 2\]; weights.b: missing"
    ):
        load_tensors(find_checkpoint(tmp_path), wanted)


class Bomb:
    """A pickle that would call a function."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


class Attribute:
    """A pickle that would get an arbitrary attribute."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (torch.Size, "__init__"))


@pytest.mark.parametrize("content", [Bomb(), Attribute()])
def test_code_in_metadata_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object
) -> None:
    monkeypatch.chdir(tmp_path)
    path = save(tmp_path / "ck", 1)
    metadata = path / ".metadata"
    size = metadata.stat().st_size
    metadata.write_bytes(pickle.dumps(content).ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match="does not belong in a checkpoint"):
        load_tensors(find_checkpoint(path), tensors())
    assert not (tmp_path / "exploded").exists()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file", 1)
