"""The names of cards that people, torch and nvidia-smi use, and what memory each has."""

from pathlib import Path

import pytest

from yuan_train.config.cluster import load_cluster
from yuan_train.config.devices import CATALOGUE, find_card, suggest_cards

# As torch names cards, with the bytes that it reports.
REPORTED = [
    ("Tesla V100-SXM2-32GB", 34.08e9, "V100-32G"),
    ("Tesla V100-SXM2-16GB", 16.9e9, "V100-16G"),
    ("Tesla T4", 15.83e9, "T4"),
    ("NVIDIA GeForce RTX 2080 Ti", 11.5e9, "RTX-2080Ti"),
    ("NVIDIA GeForce RTX 2080", 8.36e9, "RTX-2080"),
    ("NVIDIA GeForce RTX 3060", 12.5e9, "RTX-3060"),
    ("NVIDIA GeForce RTX 3080", 10.5e9, "RTX-3080"),
    ("NVIDIA GeForce RTX 3090", 25.3e9, "RTX-3090"),
    ("NVIDIA GeForce RTX 4080", 16.8e9, "RTX-4080"),
    ("NVIDIA GeForce RTX 4090", 25.25e9, "RTX-4090"),
    ("NVIDIA GeForce RTX 5090", 33.7e9, "RTX-5090"),
    ("NVIDIA A100-SXM4-80GB", 85.1e9, "A100-80G"),
    ("NVIDIA A100 80GB PCIe", 85.1e9, "A100-80G"),
    ("NVIDIA A100-PCIE-40GB", 42.4e9, "A100-40G"),
    ("NVIDIA A100-SXM4-40GB", 42.4e9, "A100-40G"),
    ("NVIDIA A800-SXM4-80GB", 85.1e9, "A800-80G"),
    ("NVIDIA H100 80GB HBM3", 85.0e9, "H100-80G"),
    ("NVIDIA H100 PCIe", 85.0e9, "H100-PCIe"),
    ("NVIDIA H100 NVL", 100e9, "H100-NVL"),
    ("NVIDIA H800", 85.0e9, "H800-80G"),
    ("NVIDIA H20", 102.0e9, "H20"),
    ("NVIDIA H200", 150.7e9, "H200"),
    ("NVIDIA GH200 480GB", 102.0e9, "GH200"),
    ("NVIDIA B200", 191.5e9, "B200"),
    ("NVIDIA L4", 23.7e9, "L4"),
    ("NVIDIA L20", 47.7e9, "L20"),
    ("NVIDIA L40S", 47.7e9, "L40S"),
    ("NVIDIA A10", 23.8e9, "A10"),
    ("NVIDIA A30", 25.3e9, "A30"),
    ("NVIDIA A40", 47.7e9, "A40"),
    ("NVIDIA RTX A5000", 25.3e9, "RTX-A5000"),
    ("NVIDIA RTX A6000", 51.0e9, "RTX-A6000"),
    ("NVIDIA RTX 6000 Ada Generation", 51.0e9, "RTX-6000-Ada"),
    ("NVIDIA TITAN RTX", 25.3e9, "Titan-RTX"),
    ("Tesla P100-PCIE-16GB", 17.0e9, "P100"),
    ("AMD Instinct MI300X", 206e9, "MI300X"),
    ("AMD Instinct MI250X/MI250", 68.7e9, "MI250X-GCD"),
]


@pytest.mark.parametrize(("name", "memory", "card"), REPORTED)
def test_what_torch_calls_a_card(name: str, memory: float, card: str) -> None:
    assert find_card(name, memory) == card


@pytest.mark.parametrize("name", ["RTX-4090", "rtx-4090", "RTX4090", "RTX 4090", "GeForce RTX 4090", "4090"])
def test_spelling_does_not_matter(name: str) -> None:
    assert find_card(name) == "RTX-4090"


@pytest.mark.parametrize("name", sorted(CATALOGUE))
def test_every_name_of_the_catalogue_is_its_own(name: str) -> None:
    memory = CATALOGUE[name].memory
    assert find_card(name) == find_card(name.replace("-", " ").lower(), memory) == name


@pytest.mark.parametrize(
    ("name", "memory"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 17.2e9),
        ("NVIDIA GeForce RTX 4090 D", 25.25e9),
        ("NVIDIA GeForce RTX 3080 Ti", 12.6e9),
        ("NVIDIA GeForce RTX 3080", 12.6e9),  # the later form, with another memory bus
        ("NVIDIA H100", None),  # one of three
        ("NVIDIA A100", None),
        ("Quadro RTX 6000", 25.3e9),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42e9),
        ("NVIDIA A100-SXM4-80GB", 42e9),
        ("", None),
    ],
)
def test_another_card_is_not_taken_for_one_of_the_catalogue(name: str, memory: float | None) -> None:
    assert find_card(name, memory) is None


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("A100", "A100-40G or A100-80G"),
        ("V100", "V100-16G or V100-32G"),
        ("H100", "H100-80G, H100-PCIe or H100-NVL"),
        ("A100-80", "A100-80G"),
        ("MI300", "MI300X"),
        ("quantum", ""),
    ],
)
def test_suggestions(name: str, meant: str) -> None:
    assert suggest_cards(name) == meant


def test_a_cluster_file_may_call_a_card_as_torch_does(tmp_path: Path) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text("name: c\nnodes: [{name: a, device: NVIDIA GeForce RTX 4090}]\n", encoding="utf-8")
    cluster = load_cluster(path)
    assert [card.type for card in cluster.cards] == ["RTX-4090"]


@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("RTX-4090", 24),
        ("RTX-3090", 24),
        ("RTX-5090", 32),
        ("A100-40G", 40),
        ("A100-80G", 80),
        ("H100-80G", 80),
    ]
    + [("T4", 16), ("P100", 16), ("V100-16G", 16), ("V100-32G", 32), ("L40S", 48), ("A10", 24)],
)
def test_memory_is_what_torch_reports(name: str, printed: int) -> None:
    """Less than what is printed on the card, in GiB, by 0.5 to 10 %."""
    assert 0.9 < CATALOGUE[name].memory / (printed * 2**30) < 0.995


def test_capability() -> None:
    named = {
        card: CATALOGUE[card].capability for card in ("V100-32G", "T4", "A100-80G", "RTX-4090", "MI300X")
    }
    assert named == {"V100-32G": 7.0, "T4": 7.5, "A100-80G": 8.0, "RTX-4090": 8.9, "MI300X": None}
