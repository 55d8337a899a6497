"""Two ranks that do not run the same job: both end with exit code 2, and say which rank and what differs."""

from __future__ import annotations

import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.project import make_plan, make_project, run_config
from tests.support.spawn import start_ranks
from yuan_train.config.devices import CATALOGUE
from yuan_train.config.plan_files import save_plan
from yuan_train.train.agreement import flatten

WAIT = {"yuan_train.train.agreement.SEEN_WITHIN_SECONDS": 0.5}
"""How long a rank waits to see another one's file: here, files are seen at once."""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    run_file = make_project(folder)
    save_plan(folder / "plan.yaml", make_plan(run_config(run_file), [[2, 4]]))
    return folder


def run_both(
    project: Path,
    logs: Path,
    *,
    second: tuple[str, ...] = (),
    folders: tuple[Path, Path] | None = None,
) -> list[tuple[int, str]]:
    """Exit code and stderr of both ranks; each as if on a node of its own. `second`: overrides of rank 1."""
    words = ["train", "--config", project / "run.yaml", "--plan", project / "plan.yaml"]
    words += ["train.steps=2", "validation.every=0"]
    with start_ranks(
        words, logs, 2, more={1: second}, cwds=folders or (project, project), constants=WAIT
    ) as ranks:
        return [rank.wait(within_seconds=120) for rank in ranks]


def test_the_same_job_trains(project: Path, tmp_path: Path) -> None:
    """The control: without a difference nothing is refused."""
    (tmp_path / "a").mkdir()
    for code, said in run_both(project, tmp_path, folders=(tmp_path / "a", tmp_path / "a")):
        assert code == 0, said


def test_another_learning_rate(project: Path, tmp_path: Path) -> None:
    for code, said in run_both(project, tmp_path, second=("optimizer.learning_rate=0.001",)):
        assert code == 2, said
        assert "rank 1 (" in said and "another job than rank 0" in said
        assert "optimizer.learning_rate is 0.001, there 0.003" in said
        assert "Traceback" not in said


def test_another_corpus_under_the_same_keys(project: Path, tmp_path: Path) -> None:
    for end in (".bin", ".idx"):
        shutil.copy(project / f"corpus{end}", tmp_path / f"corpus{end}")
    with (tmp_path / "corpus.bin").open("r+b") as file:
        file.write(b"\x07\x00\x09\x00")
    other = (f"data.train=[{{prefix: {tmp_path / 'corpus'}}}]",)
    for code, said in run_both(project, tmp_path, second=other):
        assert code == 2, said
        assert "rank 1 (" in said and "corpora.train[0] is" in said


def test_a_file_that_one_rank_alone_misses(project: Path, tmp_path: Path) -> None:
    found = run_both(project, tmp_path, second=(f"data.tokenizer={tmp_path / 'nowhere'}",))
    for code, said in found:
        assert code == 2, said
        assert "nowhere: no tokenizer" in said and "Traceback" not in said
    assert "rank 1 (" in found[0][1] and found[1][1].count("no tokenizer") == 1


def test_a_checkpoint_directory_that_is_not_shared(project: Path, tmp_path: Path) -> None:
    """Two working directories, as two nodes without a common file system have them."""
    folders = (tmp_path / "node0", tmp_path / "node1")
    for folder in folders:
        folder.mkdir()
    shared = run_both(project, tmp_path, second=("checkpoint.directory=ck",), folders=folders)
    # Rank 0 saves nothing: then the ranks have different jobs.
    assert [code for code, _ in shared] == [2, 2]
    text = (project / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text + "checkpoint: {directory: ck}\n")
    shutil.copy(project / "plan.yaml", tmp_path / "plan.yaml")
    for code, said in run_both(tmp_path, tmp_path, folders=folders):
        assert code == 2, said
        assert "rank 1 (" in said and str(folders[1] / "ck") in said and "all nodes share" in said
    assert not list(folders[0].rglob("step-*")) and not list(folders[0].rglob(".seen*"))


def test_a_rank_without_its_card(project: Path, tmp_path: Path) -> None:
    """One of two nodes has no driver, or one too old for torch: its rank would compute on its processor."""
    plan = make_plan(run_config(project / "run.yaml"), [[2, 4]])
    simulated = replace(CATALOGUE["RTX-4090"], backend="gloo", slowdown=1.0)
    ranks = (replace(plan.ranks[0], type="Slow"), replace(plan.ranks[1], device="b/0", type="A100-80G"))
    save_plan(tmp_path / "plan.yaml", replace(plan, ranks=ranks, device_types={"Slow": simulated}))
    words = ["train", "--config", project / "run.yaml", "--plan", tmp_path / "plan.yaml"]
    started = time.monotonic()
    with start_ranks([*words, "train.device=auto"], tmp_path, 2, constants=WAIT) as ranks:
        found = [rank.wait(within_seconds=60) for rank in ranks]
    assert time.monotonic() - started < 10
    for code, said in found:
        assert code == 2, said
        assert "rank 1 (b/0): the plan has a card of type A100-80G" in said and "train.device=cpu" in said


def test_flatten() -> None:
    assert flatten({"a": {"b": [1, {"c": 2}]}, "d": [], "e": None}) == {
        "a.b[0]": 1,
        "a.b[1].c": 2,
        "d": [],
        "e": None,
    }
