"""Writing and finding checkpoints of one process; across plans: tests/end_to_end/test_resume.py."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.project import MODEL
from yuan_train.checkpoint.load import describe, find_checkpoint, find_latest, load_tensors
from yuan_train.checkpoint.names import LATEST, MANIFEST, STATE, step_name, steps_in
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.config.errors import CheckpointError


def tensors() -> dict[str, torch.Tensor]:
    return {"weights.a": torch.arange(6.0).view(2, 3), "exp_avg.a": torch.full((2, 3), 0.5)}


def save(folder: Path, step: int, **changes: Any) -> Path:
    state = {"step": step, "sequences": 8 * step, "tokens": 64 * step, "run": {"model": MODEL}}
    return save_checkpoint(folder, **{"step": step, "tensors": tensors(), "state": state, **changes})


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    place = save(tmp_path, 100)
    assert place.name == "step-00000100" and (tmp_path / LATEST).read_text().strip() == place.name
    found = find_checkpoint(tmp_path)
    assert found.step == 100 and found.model.num_layers == 6 and not found.notes
    loaded = {name: torch.zeros(2, 3) for name in tensors()}
    load_tensors(found, loaded)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in tensors().items())
    facts = describe(tmp_path)
    assert facts["whole"] and facts["step"] == 100 and facts["parameters"] == found.model.parameters


def test_loading_into_part_of_a_buffer(tmp_path: Path) -> None:
    save(tmp_path, 1)
    flat = torch.zeros(10)
    load_tensors(find_checkpoint(tmp_path), {"weights.a": flat[2:8].view(2, 3)})
    assert flat.tolist() == [0, 0, 0, 1, 2, 3, 4, 5, 0, 0]


def test_keep_counts_whole_ones_and_spares_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / step_name(9)).mkdir()  # torn: newer by number, and no reason to drop a whole one
    (tmp_path / ".step-00000004.tmp").mkdir()
    save(tmp_path, 4, keep=2)
    assert steps_in(tmp_path) == [9, 4, 3]
    assert not list(tmp_path.glob(".step-*"))


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 1)
    place = save(tmp_path, 1, tensors={"weights.a": torch.ones(2, 3)})
    loaded = {"weights.a": torch.zeros(2, 3)}
    load_tensors(find_checkpoint(place), loaded)
    assert torch.equal(loaded["weights.a"], torch.ones(2, 3))


@pytest.mark.parametrize("victim", ["__0_0.distcp", ".metadata", STATE, MANIFEST])
@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_torn_checkpoint_gives_way_with_a_note(tmp_path: Path, victim: str, damage: str) -> None:
    save(tmp_path, 1)
    path = save(tmp_path, 2) / victim
    path.write_bytes(path.read_bytes()[:20]) if damage == "cut" else path.unlink()
    found = find_latest(tmp_path)
    assert found is not None and found.step == 1 and "torn" in found.notes[0] and victim in found.notes[0]
    with pytest.raises(CheckpointError, match="torn"):
        find_checkpoint(tmp_path / step_name(2))


def test_nothing_there(tmp_path: Path) -> None:
    assert find_latest(tmp_path / "nowhere") is None
    with pytest.raises(CheckpointError, match="no such directory"):
        find_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no checkpoint here"):
        find_checkpoint(tmp_path)
    (tmp_path / step_name(1)).mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint here is whole"):
        find_latest(tmp_path)


def test_names_and_shapes_must_be_those_asked_for(tmp_path: Path) -> None:
    save(tmp_path, 1)
    wanted = {"weights.a": torch.zeros(3, 2), "weights.b": torch.zeros(1)}
    with pytest.raises(
        CheckpointError, match=r"weights.a: has shape \[2, 3\], wanted \[3, 2\]; weights.b: missing"
    ):
        load_tensors(find_checkpoint(tmp_path), wanted)


class Bomb:
    """A pickle that would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, ("exploded",))


class Attribute:
    """A pickle that would take any attribute of anything."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (torch.Size, "__init__"))


@pytest.mark.parametrize("content", [Bomb(), Attribute()])
def test_code_in_metadata_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: object
) -> None:
    monkeypatch.chdir(tmp_path)
    place = save(tmp_path / "ck", 1)
    metadata = place / ".metadata"
    size = metadata.stat().st_size
    metadata.write_bytes(pickle.dumps(content).ljust(size, b"\0"))
    with pytest.raises(CheckpointError, match="does not belong into a checkpoint"):
        load_tensors(find_checkpoint(place), tensors())
    assert not (tmp_path / "exploded").exists()


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a directory")
    with pytest.raises(CheckpointError, match="cannot be written"):
        save(tmp_path / "file", 1)
