"""The profile of a card: shapes and sizes, never times."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from tests.support.project import make_project, run_config
from yuan_train.cli.main import main
from yuan_train.config.profile import load_profile
from yuan_train.train import measure

CLUSTER = """
name: two
nodes:
  - {name: fast, device: Fast, network: {bandwidth: 1 GB/s}}
  - {name: slow, device: Slow, network: {bandwidth: 1 GB/s}}
device_types:
  Fast: {memory: 1 GiB, reserved: 0 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s, slowdown: 1}
  Slow: {memory: 1 GiB, reserved: 0 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s, slowdown: 3}
"""


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "SECONDS_PER_UNIT", 0.01)


def test_a_profile_of_simulated_cards(tmp_path: Path) -> None:
    run_file = make_project(tmp_path)
    run = run_config(run_file)
    model = tmp_path / "model.yaml"
    model.write_text(json.dumps({k: v for k, v in vars(run.model).items()}))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    out = tmp_path / "profile.json"
    options = ["--model", str(model), "--config", str(run_file), "--cluster", str(tmp_path / "cluster.yaml")]
    assert main(["profile", *options, "--out", str(out)]) == 0
    profile = load_profile(out)
    assert profile.sequence_length == run.data.sequence_length
    entries = {(entry.device_type, entry.recompute): entry for entry in profile.entries}
    assert set(entries) == {(d, r) for d in ("Fast", "Slow") for r in ("none", "selective", "full")}
    fast, slow = entries["Fast", "none"], entries["Slow", "none"]
    assert slow.head.forward_seconds == pytest.approx(3 * fast.head.forward_seconds)
    # fp32: weights, gradients and two states of four bytes each.
    assert fast.layers[0].state_bytes == 16 * run.model.layer_parameters
    assert fast.head.state_bytes == 16 * run.model.head_parameters
    assert fast.layers[0].output_bytes == 24 * 32 * 4 and fast.head.output_bytes == 0
    # Recomputed, a layer keeps little more than its input.
    assert entries["Fast", "full"].layers[0].activation_bytes < 0.5 * fast.layers[0].activation_bytes


def test_states_under_bf16(tmp_path: Path) -> None:
    run = run_config(make_project(tmp_path))
    setting = measure.Setting(
        model=run.model,
        sequence_length=8,
        micro_batch_size=2,
        recompute="none",
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
    )
    entry = measure.measure_entry(setting, device_type="here")
    assert entry.layers[0].state_bytes == 18 * run.model.layer_parameters


def test_planner_knows_its_own_profiles() -> None:
    from yuan_train.planner.timing import OWN_SOURCE

    assert measure.OWN_SOURCE == OWN_SOURCE


def test_profiles_of_two_machines_become_one(tmp_path: Path) -> None:
    run_file = make_project(tmp_path)
    parts = []
    for name in ("A", "B"):
        parts.append(str(tmp_path / f"{name}.json"))
        words = ["--config", str(run_file), "--device-type", name, "--out", parts[-1]]
        assert main(["profile", *words]) == 0
    whole = tmp_path / "whole.json"
    assert main(["profile", "--merge", *parts, "--out", str(whole)]) == 0
    assert {entry.device_type for entry in load_profile(whole).entries} == {"A", "B"}
    assert main(["profile", "--out", str(whole)]) == 2
