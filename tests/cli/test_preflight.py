"""`doctor` as a preflight: its first line, what is wrong with a machine, and several machines over ssh."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import Ask
from tests.support.hosts import answering_ssh
from yuan_train.cli import doctor
from yuan_train.cli.main import main

ROOT = Path(__file__).parents[2]

CARD = {"device": "cuda:0", "name": "NVIDIA A100-SXM4-80GB", "type": "A100-80G", "memory_bytes": 80 << 30}


def card_link(**changes: str) -> dict[str, str]:
    link = {"address": "0000:01:00.0", "current_link_width": "16", "max_link_width": "16"}
    return link | {"current_link_speed": "16.0 GT/s PCIe", "max_link_speed": "16.0 GT/s PCIe"} | changes


def machine(**around: Any) -> dict[str, Any]:
    """What the doctor finds of a good machine with two cards, with other surroundings."""
    cards = [{**CARD, "device": f"cuda:{i}", "fault": None} for i in range(2)]
    here = {
        "name": "a",
        "addresses": ["10.0.0.1"],
        "shared_memory_bytes": 8 << 30,
        "open_files": 65536,
        "interfaces": ["eth0"],
        "chosen_interfaces": {},
        "infiniband": [],
        "card_links": [card_link()],
        "total_memory_bytes": 512 << 30,
    }
    return {
        "versions": {"yuan-train": "0.1.0", "torch": "2.13.0+cu130"},
        "cuda": "13.0",
        "driver": "580.65",
        "nccl": "2.28.9",
        "no_card": None,
        "devices": [{"device": "cpu", "name": "EPYC"}, *cards],
        "communication": {"gloo": True, "nccl": True},
        "packages": [{"name": "triton", "installed": True}],
        "compile": [{"device": "cpu", "fault": None}],
        "surroundings": here | around,
    }


def judged(facts: dict[str, Any]) -> tuple[str, list[doctor.Finding]]:
    findings = doctor.check(facts)
    return doctor.summary(facts, findings), findings


def test_a_good_machine_is_ready_for_all() -> None:
    line, findings = judged(machine())
    assert not findings
    assert line == (
        "ready for: planning, and training on the CPU; training on 2 cards (A100-80G); several cards of this "
        "machine; several machines"
    )


@pytest.mark.parametrize(
    ("around", "hindered", "what"),
    [
        ({"shared_memory_bytes": 64 << 20}, "several cards", "/dev/shm has 64 MiB"),
        ({"addresses": ["127.0.1.1"]}, "several nodes", "its own name a is 127.0.1.1"),
        ({"addresses": None}, "several nodes", "its own name a does not resolve"),
        ({"chosen_interfaces": {"GLOO_SOCKET_IFNAME": "ib0"}}, "several nodes", "no interface ib0 is up"),
        ({"open_files": 1024}, None, "1024 open files are allowed, enough for some 32 ranks"),
        ({"interfaces": ["eth0", "eth1"]}, None, "several interfaces are up: eth0, eth1"),
        (
            {"infiniband": [{"device": "mlx5_0", "link": x} for x in ("InfiniBand", "Ethernet")]},
            None,
            "ports of InfiniBand and of Ethernet",
        ),
        ({"card_links": [card_link(current_link_width="4")]}, None, "has 4 of 16 PCIe lanes"),
        ({"card_links": [card_link(current_link_speed="8.0 GT/s PCIe")]}, None, "runs at 8 of 16 GT/s"),
        ({"total_memory_bytes": 64 << 30}, None, "the host has less memory than its cards"),
    ],
)
def test_what_is_wrong_with_a_machine(around: dict[str, Any], hindered: str | None, what: str) -> None:
    line, (finding,) = judged(machine(**around))
    assert what in finding.what and finding.advice
    assert finding.hinders == ((hindered,) if hindered else ())
    ready, _, not_ready = line.partition("; not for: ")
    if hindered:
        purpose = doctor.PURPOSES[finding.hinders[0]]
        assert not_ready == f"{purpose}, because {finding.what} ({finding.advice})" and purpose not in ready
    else:
        # What may be wrong is told on request.
        assert line.endswith(". 1 note: --verbose") and not not_ready


def test_a_chosen_interface_does_without_a_name() -> None:
    _, findings = judged(machine(addresses=["127.0.1.1"], chosen_interfaces={"GLOO_SOCKET_IFNAME": "eth0"}))
    assert not findings


def test_cards_that_torch_cannot_use() -> None:
    facts = machine()
    facts["devices"][1]["fault"] = "torch has no code for it"
    line, _ = judged(facts)
    assert (
        "not for: training on a card and several cards of this machine, because cuda:0: torch has no" in line
    )
    facts["compile"][0]["fault"] = "there is no C++ compiler"
    line, findings = judged(facts)
    assert line.endswith(". 1 note: --verbose")
    assert "train.compile is not possible on cpu: there is no C++ compiler" in [f.what for f in findings]
    facts["compile"][0]["fault"] = None
    facts["devices"][1:] = []
    line, _ = judged(facts | {"no_card": "no driver is loaded"})
    assert line.endswith("not for: training on a card, because no driver is loaded")


def test_what_sysfs_tells(tmp_path: Path) -> None:
    files = {
        "class/net/lo/operstate": "unknown",
        "class/net/eth0/operstate": "up",
        "class/net/eth1/operstate": "down",
        "class/net/docker0/operstate": "up",
        "class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand",
        "class/infiniband/mlx5_0/ports/1/rate": "200 Gb/sec (4X HDR)",
        "class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "bus/pci/devices/0000:01:00.0/current_link_width": "8",
        "bus/pci/devices/0000:01:00.0/max_link_width": "16",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert list(doctor.see_interfaces(tmp_path)) == ["eth0"]
    (port,) = doctor.see_infiniband(tmp_path)
    assert port == {"device": "mlx5_0", "link": "InfiniBand", "rate": "200 Gb/sec (4X HDR)"}
    link = doctor.see_card_link("0000:01:00.0", tmp_path)
    assert (link["current_link_width"], link["max_link_width"], link["max_link_speed"]) == ("8", "16", None)


def test_one_line_unless_more_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("ready for: planning, and training on the CPU")
    assert main(["doctor", "--verbose"]) == 0
    first, *details = capsys.readouterr().out.splitlines()
    assert first == line and "optional packages" in details


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    unlike = machine(infiniband=[{"device": "mlx5_0", "link": "InfiniBand"}])
    unlike["versions"] = unlike["versions"] | {"torch": "2.12.0+cu126"}
    for name, facts in (("a", machine()), ("b", machine()), ("c", unlike)):
        line, _ = judged(facts)
        (tmp_path / f"{name}.json").write_text(json.dumps(facts | {"summary": line, "findings": []}))
    (tmp_path / "old.json").write_text('{"versions": {"yuan-train": "0.0.9"}}')
    (tmp_path / "cut.json").write_text('{"versions": {"yuan')
    return answering_ssh(tmp_path)


def test_machines_that_are_alike(ssh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nodes", "a,b", "--ssh", ssh]) == 0
    first, *others = capsys.readouterr().out.splitlines()
    assert first == "ready for: a job over a, b"
    assert [line.partition(": ready for: planning")[0] for line in others] == ["a", "b"]


def test_machines_that_differ_or_are_not_reached(ssh: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--nodes", "a,b,c,lost", "--ssh", ssh]) == 2
    out = capsys.readouterr().out
    first, *others = out.splitlines()
    assert first.startswith("not for: a job over a, b, c, lost, because lost is not reached: ssh: connect to")
    assert "No route to host" in first and "torch differs" in first and "RDMA differs" in first
    assert "torch differs: 2.13.0+cu130 on a, b; 2.12.0+cu126 on c (install the same wheel everywhere)" in out
    assert "RDMA differs: none on a, b; InfiniBand on c" in out and "NCCL_IB_DISABLE=1" in out
    assert any(line.startswith("lost: not reached: ssh: connect") for line in others)


def test_the_command_that_a_machine_runs(ssh: str, ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a greeting comes what the doctor says here."""
    monkeypatch.chdir(ROOT)
    answer = ask("doctor", "--nodes", "real", "--ssh", ssh)
    assert answer["obstacles"] == []
    facts = answer["nodes"]["real"]
    assert facts["summary"].startswith("ready for: ") and facts["surroundings"]["open_files"] > 0


def test_answers_that_cannot_be_compared(ssh: str) -> None:
    found = doctor.ask_nodes(["old", "cut", "a"], ssh, hidden=64)
    assert found["old"] == "its yuan-train is another release (0.0.9)"
    assert str(found["cut"]).startswith("its answer is not JSON")
    assert len(doctor.obstacles(found)) == 2


def test_an_ssh_that_is_not_there() -> None:
    found = doctor.ask_nodes(["a"], "/no/such/ssh", hidden=64)
    assert "No such file" in str(found["a"])
    assert main(["doctor", "--nodes", ","]) == 2
