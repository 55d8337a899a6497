"""`discover`: cluster files of twenty machines from what their tools print; hosts by a stand-in for ssh."""

import json
import os
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Refuse, command
from tests.support.hosts import SCONTROL, answering_ssh
from tests.support.machines import GIB, MACHINES, FakeMachine, build_tools
from yuan_train.cli.discover import cluster_text
from yuan_train.cli.doctor import see_tools
from yuan_train.cli.main import main
from yuan_train.config.cluster import Cluster, load_cluster
from yuan_train.config.plan import is_real_card

ROOT = Path(__file__).parents[2]


def facts_of(machine: FakeMachine, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the doctor finds on a machine: torch's part as given, the tools' part from the tools."""
    build_tools(machine, folder)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", f"{folder / 'bin'}:/usr/bin:/bin")
        tools = see_tools(folder / "sys")
    names = [{"name": name.partition(",")[0], "type": None, "memory_bytes": 1} for name, _ in machine.cards]
    seen = names if machine.torch_cards is None else machine.torch_cards
    cards = [{"device": f"cuda:{i}", "fault": None, **card} for i, card in enumerate(seen)]
    ports = [{"device": f"mlx5_{i}", "link": x, "rate": y} for i, (x, y) in enumerate(machine.infiniband)]
    return {
        "versions": {"torch": "2.8.0" if cards else "2.8.0+cpu"},
        "cuda": "12.6" if cards else None,
        "driver": "550.54.15" if cards else None,
        "nccl": "2.27.3" if cards else None,
        "no_card": None if cards else "torch 2.8.0+cpu is built without CUDA",
        "devices": [
            {"device": "cpu", "name": "EPYC, 32 cores", "bf16": False, "fp32_flops": 9.87e11},
            *cards,
        ],
        "surroundings": {"infiniband": ports, "total_memory_bytes": machine.memory},
        "tools": tools,
    }


def read(text: str, folder: Path) -> Cluster:
    path = folder / "cluster.yaml"
    path.write_text(text)
    return load_cluster(path)


@pytest.mark.parametrize("name", MACHINES)
def test_a_machine(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every field is right; what was not found is said, and nothing else."""
    machine = MACHINES[name]
    facts = facts_of(machine, tmp_path, monkeypatch)
    text, notes = cluster_text("one", {name: json.loads(json.dumps(facts))})
    cluster = read(text, tmp_path)
    (node,) = cluster.nodes
    assert node.name == name and node.types == machine.types
    assert node.network is not None and node.network.bandwidth * 8 / 1e9 == pytest.approx(machine.network)
    if machine.link is None:
        assert node.link is None
    else:
        assert node.link is not None and node.link.bandwidth / 1e9 == pytest.approx(machine.link, rel=0.01)
    assert node.host is not None and node.host.memory / GIB == pytest.approx(machine.host, rel=1e-3)
    assert (node.disk is None) == (not machine.disks)
    assert len(notes) == len(machine.notes) and all(
        any(part in note for note in notes) for part in machine.notes
    ), notes
    assert all(note in text for note in notes)
    for kind in set(node.types):
        assert is_real_card(kind, cluster.device_types.get(kind)) == (not kind.startswith("CPU-"))


def test_there_are_twenty() -> None:
    assert len(MACHINES) == 20


def test_types_that_the_catalogue_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("mig-all", "new-card", "cpu-only")
    found = {name: facts_of(MACHINES[name], tmp_path / name, monkeypatch) for name in names}
    types = read(cluster_text("three", found)[0], tmp_path).device_types
    sliced = types["A100-80G-MIG-3g.40gb"]
    assert sliced.bf16 == pytest.approx(312e12 * 3 / 7) and sliced.memory == 38 * GIB
    new = types["RTX-PRO-6000-Blackwell-Workstation-Edition"]
    assert new.capability == 12.0 and new.memory == pytest.approx(0.98 * (97887 << 20), rel=1e-4)
    processor = types["CPU-cpu-only"]
    assert processor.backend == "gloo" and processor.fp32 == 9.87e11 and processor.memory == 56 * GIB


def test_where_machines_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {x: facts_of(MACHINES[x], tmp_path / x, monkeypatch) for x in ("gamer-4090", "cpu-only")}
    text, notes = cluster_text("two", found)
    assert "torch differs: 2.8.0 on gamer-4090; 2.8.0+cpu on cpu-only" in notes
    assert [node.name for node in read(text, tmp_path).nodes] == ["gamer-4090", "cpu-only"]


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file with what the doctor of this machine answers."""
    path = tmp_path_factory.mktemp("doctor") / "answer.json"
    with path.open("w") as file, redirect_stdout(file):
        main(["doctor", "--json", "--hidden-size", "64"])
    return path


@pytest.fixture
def ssh(tmp_path: Path, answer: Path) -> str:
    """A stand-in for ssh with which all but 10.0.0.2 run the command here."""
    (tmp_path / "10.0.0.2.json").write_text(answer.read_text())
    return answering_ssh(tmp_path)


def test_hosts_over_ssh(ssh: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], refuse: Refuse) -> None:
    """The very doctor of each host answers; its file is one that `plan` takes."""
    out = tmp_path / "new" / "cluster.yaml"
    assert main(["discover", "--hosts", "me@n1, 10.0.0.2", "--ssh", ssh, "--out", str(out)]) == 0
    assert f"written: {out}" in capsys.readouterr().err
    assert [node.name for node in load_cluster(out).nodes] == ["n1", "10.0.0.2"]
    assert list(out.parent.iterdir()) == [out]
    plan = ("plan", "--cluster", out, "--config", ROOT / "configs/run/tiny.yaml", "search.effort=quick")
    assert command(*plan, "--out", tmp_path / "plan.yaml") == 0
    before = out.read_text()
    assert "is there already" in refuse("discover", "--hosts", "n1", "--ssh", ssh, "--out", out)
    assert out.read_text() == before


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        (
            "lost,lost2",
            "no answer of 2 of 2 machines, and nothing is written: lost: ssh: connect to host lost",
        ),
        (" , ", "wanted names of machines"),
        ("a@n,b@n", "b@n: named before, at"),
    ],
)
def test_hosts_that_do_not_answer(hosts: str, words: str, ssh: str, tmp_path: Path, refuse: Refuse) -> None:
    out = tmp_path / "out" / "cluster.yaml"
    assert words in refuse("discover", "--hosts", hosts, "--ssh", ssh, "--out", out)


def test_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    out = tmp_path / "cluster.yaml"
    assert main(["discover", "--out", str(out)]) == 0
    assert [node.name for node in load_cluster(out).nodes] == [os.uname().nodename]


def test_the_machines_of_a_slurm_job(
    answer: Path, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A heterogeneous job: each component is asked by srun with its number."""
    (tmp_path / "scontrol").write_text(SCONTROL)
    log = tmp_path / "log"
    (tmp_path / "srun").write_text(f'#!/bin/sh\necho "$@" >>{log}\ncat {answer}\n')
    for name in ("scontrol", "srun"):
        (tmp_path / name).chmod(0o755)
    for name, value in (("JOB_ID", "7"), ("HET_SIZE", "2"), ("JOB_NODELIST_HET_GROUP_0", "a1"),
                        ("JOB_NODELIST_HET_GROUP_1", "b1")):  # fmt: skip
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    out = tmp_path / "cluster.yaml"
    assert main(["discover", "--out", str(out)]) == 0
    assert [node.name for node in load_cluster(out).nodes] == ["a1", "b1"]
    doctor = f"{sys.executable} -m yuan_train doctor --json"
    for group, name, asked in zip("01", "ab", log.read_text().splitlines(), strict=True):
        assert f"--het-group={group} -w {name}1 {doctor}" in asked
    monkeypatch.setenv("SLURM_JOB_NODELIST_HET_GROUP_1", "")
    assert "SLURM_JOB_NODELIST_HET_GROUP_1" in refuse("discover", "--out", tmp_path / "other.yaml")
