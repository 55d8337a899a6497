"""Two ranks that do not run the same job: both end with exit code 2, and say which rank and what differs. And
which of several looks for the checkpoint to resume from."""

import logging
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.commands import Refuse
from tests.support.fake_card import FakeCard
from tests.support.project import make_plan, make_project, run_config, with_forecast
from tests.support.spawn import as_rank, free_port, spawn, start_ranks
from yuan_train.checkpoint.load import Checkpoint
from yuan_train.cli import launch
from yuan_train.config.devices import CATALOGUE, GIB
from yuan_train.config.errors import CheckpointError, ConfigError, YuanError
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.run import RunConfig
from yuan_train.parallel.device import CPU
from yuan_train.parallel.environment import SUPERVISED, holding
from yuan_train.parallel.groups import init_distributed, shutdown
from yuan_train.train import agreement
from yuan_train.train.job import Position, prepare

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
    first: tuple[str, ...] = (),
    second: tuple[str, ...] = (),
    folders: tuple[Path, Path] | None = None,
) -> list[tuple[int, str]]:
    """Exit code and stderr of both ranks; each as if on a node of its own. `first`, `second`: overrides of
    rank 0 and rank 1."""
    words = ["train", "--config", project / "run.yaml", "--plan", project / "plan.yaml"]
    words += ["train.steps=2", "validation.every=0"]
    with start_ranks(
        words, logs, 2, more={0: first, 1: second}, cwds=folders or (project, project), constants=WAIT
    ) as ranks:
        return [rank.wait(within_seconds=120) for rank in ranks]


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
    text = (project / "run.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text + "checkpoint: {directory: ck}\n")
    shutil.copy(project / "plan.yaml", tmp_path / "plan.yaml")
    for code, said in run_both(tmp_path, tmp_path, folders=folders):
        assert code == 2, said
        assert "rank 1 (" in said and str(folders[1] / "ck") in said and "all nodes share" in said
    assert not list(folders[0].rglob("step-*")) and not list(folders[0].rglob(".seen*"))


@contextmanager
def with_an_old_driver() -> Iterator[None]:
    launch.has_driver = lambda: True
    yield


def test_a_checkpoint_directory_that_cannot_be_written(project: Path, tmp_path: Path, refuse: Refuse) -> None:
    """Found before the first step, by one process too; at its first save hours might be lost."""
    (tmp_path / "file").write_text("")
    words = ("train.steps=1", f"checkpoint.directory={tmp_path / 'file'}")
    alone = refuse("train", "--config", project / "run.yaml", *words)
    for code, said in (*run_both(project, tmp_path, first=words, second=words), (2, alone)):
        assert code == 2 and "checkpoint.directory: " in said and "file cannot be written: " in said, said
        assert "Traceback" not in said and "step 1/1" not in said


HOLD = """
import socket, sys
from yuan_train.parallel.environment import holding
socket.gethostname = lambda: sys.argv[2]
with holding(sys.argv[1], ".in-use", "another run"):
    print(flush=True)
    sys.stdin.read()
"""


@contextmanager
def held_by_another(folder: Path, host: str) -> Iterator[None]:
    """Inside, a process of a host has a directory, until it is killed."""
    words = [sys.executable, "-c", HOLD, str(folder), host]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield
        process.kill()


def test_a_directory_of_another_run(project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs would remove each other's checkpoints; one that was killed is in nobody's way."""
    monkeypatch.setitem(WAIT, "yuan_train.parallel.environment.ENDING_SECONDS", 0.2)
    words = (f"log.directory={tmp_path / 'log'}", f"checkpoint.directory={tmp_path / 'ck'}")
    with held_by_another(tmp_path / "ck", socket.gethostname()):
        for code, said in run_both(project, tmp_path, first=words, second=words):
            assert code == 2 and "ck is in use by another run: process " in said, said
            assert f" of {socket.gethostname()}, since 20" in said and "Traceback" not in said
    assert not (tmp_path / "log").exists()
    for code, said in run_both(project, tmp_path, first=words, second=words):
        assert code == 0, said
    assert not list(tmp_path.rglob(".in-use"))


def test_a_directory_of_a_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A network file system keeps its lock for a while; the agents of its own supervised run know better."""
    monkeypatch.setenv(SUPERVISED, "a:29400")
    with held_by_another(tmp_path, "lost"):
        monkeypatch.setenv(SUPERVISED, "b:29400")
        with (
            pytest.raises(ConfigError, match=r"of lost, since .* \(supervised, --meet a:29400\)\. Wait"),
            holding(tmp_path, ".in-use", "another run", within=0.2),
        ):
            pass
        monkeypatch.setenv(SUPERVISED, "a:29400")
        with holding(tmp_path, ".in-use", "another run"):
            assert f" of {socket.gethostname()}, since " in (tmp_path / ".in-use").read_text()
        monkeypatch.delenv(SUPERVISED)
        with holding(tmp_path, ".in-use", "another run", within=0.0):
            pass
    with (
        held_by_another(tmp_path, "lost"),
        pytest.raises(
            ConfigError, match=r"another run: process \d+ of lost, since .*; if it is gone with its"
        ),
        holding(tmp_path, ".in-use", "another run", within=0.2),
    ):
        pass


def test_a_rank_without_its_card(project: Path, tmp_path: Path) -> None:
    """One of two nodes has a driver that is too old for torch: its rank would compute on its processor."""
    plan = make_plan(run_config(project / "run.yaml"), [[2, 4]])
    simulated = replace(CATALOGUE["RTX-4090"], backend="gloo", slowdown=1.0)
    ranks = (replace(plan.ranks[0], type="Slow"), replace(plan.ranks[1], device="b/0", type="A100-80G"))
    save_plan(tmp_path / "plan.yaml", replace(plan, ranks=ranks, device_types={"Slow": simulated}))
    words = ["train", "--config", project / "run.yaml", "--plan", tmp_path / "plan.yaml"]
    around = {1: with_an_old_driver}
    with start_ranks([*words, "train.device=auto"], tmp_path, 2, constants=WAIT, around=around) as ranks:
        found = [rank.wait(within_seconds=60) for rank in ranks]
    for code, said in found:
        assert code == 2, said
        assert "rank 1 (b/0): the plan has a card of type A100-80G" in said and "train.device=cpu" in said


def test_cards_that_do_not_go_together(project: Path) -> None:
    """On fake cards, two ranks in one set of processes; each case with its control."""
    spawn(_tell_cards, 2, project / "run.yaml", free_port())


def _tell_cards(rank: int, run_file: Path, port: int) -> None:
    as_rank(rank, 2, port)
    run = run_config(run_file)
    plan = with_forecast(make_plan(run, [[2, 4]]), memory={"parameters": GIB})
    job = prepare(run, plan, Position(rank, 2, rank, 2))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    agreement.logger.addHandler(handler)
    agreement.logger.setLevel(logging.INFO)
    init_distributed(device=CPU, timeout_seconds=60)

    def fault(
        *, bus: tuple[int, int] = (1, 2), memory: int = 80 << 30, library: Any = "nccl", nccl: str = "2"
    ) -> str:
        """What is raised with these cards; `memory` and `nccl` are rank 1's."""
        said.clear()
        card = FakeCard(memory=memory if rank else 80 << 30, pci_address=f"0000:0{bus[rank]}:00.0")
        card.library = library
        agreement.nccl_version = lambda: nccl if rank else "2"
        try:
            agreement.check_cards(replace(job, device=card))
        except YuanError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    assert fault() == ""
    if rank == 0:
        assert [line.partition(": ranks 0, 1: 2 x A100-80G (")[0] for line in said] == [socket.gethostname()]
    assert "ConfigError: rank 0 (" in fault(bus=(1, 1)) and "have the same card" in fault(bus=(1, 1))
    assert fault(bus=(1, 1), library="gloo") == ""
    assert "NCCL is 2 on rank 0" in fault(nccl="3") and fault(nccl="3", library="gloo") == ""
    short = fault(memory=GIB // 2)
    assert short.startswith("PlanError: rank 1 (") and "1.0 GiB at its peak" in short and "512.0 MiB" in short
    shutdown()


# --- the checkpoint of all -------------------------------------------------------------------------------


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
