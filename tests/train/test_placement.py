"""The cores next to a card, as Linux tells them."""

import os
from pathlib import Path

import pytest

from tests.support.fake_card import FakeCard
from yuan_train.parallel.device import CPU
from yuan_train.train import job


@pytest.fixture
def host(tmp_path: Path) -> Path:
    """A host whose second NUMA node has four cores and a card; where another card is it does not say."""
    for address, node in (("0000:3b:00.0", "1\n"), ("0000:af:00.0", "-1\n")):
        (tmp_path / "pci" / address).mkdir(parents=True)
        (tmp_path / "pci" / address / "numa_node").write_text(node)
    (tmp_path / "nodes" / "node1").mkdir(parents=True)
    (tmp_path / "nodes" / "node1" / "cpulist").write_text("2-3,6,7\n")
    return tmp_path


def test_the_node_and_the_cores_of_a_card(host: Path) -> None:
    assert job.numa_node("0000:3b:00.0", host / "pci") == 1
    assert job.numa_node("0000:af:00.0", host / "pci") is None
    assert job.numa_node("0000:00:00.0", host / "pci") is None
    assert job.cores_of(1, host / "nodes") == {2, 3, 6, 7}
    assert job.cores_of(0, host / "nodes") == job.cores_of(None, host / "nodes") == set()


@pytest.mark.parametrize(
    ("own", "near", "chosen"),
    [
        (range(8), {2, 3, 6, 7}, {2, 3, 6, 7}),
        (range(4), {2, 3, 6, 7}, None),  # something has chosen four of eight cores
        (range(8), set(), None),  # the node is not known
    ],
)
def test_a_rank_runs_beside_its_card_unless_its_cores_were_chosen(
    monkeypatch: pytest.MonkeyPatch, own: range, near: set[int], chosen: set[int] | None
) -> None:
    found: list[set[int]] = []
    monkeypatch.setattr(job, "numa_node", {"0000:3b:00.0": 1}.__getitem__)
    monkeypatch.setattr(job, "cores_of", lambda node: near)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(own))
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: found.append(cores))
    job.run_beside(CPU)
    assert not found
    job.run_beside(FakeCard(pci_address="0000:3b:00.0"))
    assert found == ([] if chosen is None else [chosen])
