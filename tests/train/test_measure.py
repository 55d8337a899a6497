"""Profiles measured on this machine: their entries and bytes, never their seconds."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace
from pathlib import Path

import torch

from tests.support.project import make_project, run_config
from yuan_train.cli.main import main
from yuan_train.config.cluster import load_cluster
from yuan_train.config.profile import ProfileEntry, UnitProfile, load_profile
from yuan_train.planner.costs.plan_problem import PlanProblem, make_costs
from yuan_train.train import measure
from yuan_train.train.footprint import can_track_memory

CLUSTER = """
name: two
nodes:
  - {name: fast, device: Fast, network: {bandwidth: 1 GB/s}}
  - {name: slow, device: Slow, devices: 2, link: {bandwidth: 1 GB/s}, network: {bandwidth: 1 GB/s}}
device_types:
  Fast: {memory: 1 GiB, reserved: 0 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s, slowdown: 1}
  Slow: {memory: 1 GiB, reserved: 0 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s, slowdown: 3}
"""


def short_case(tmp_path: Path, dtype: torch.dtype, *, seconds_per_unit: float) -> measure.ProfileCase:
    """Two sequences of eight tokens of the project's model, on the CPU."""
    return measure.ProfileCase(
        model=run_config(make_project(tmp_path)).model,
        sequence_length=8,
        micro_batch_size=2,
        recompute="none",
        dtype=dtype,
        device=torch.device("cpu"),
        seconds_per_unit=seconds_per_unit,
    )


def test_a_profile_of_simulated_cards(tmp_path: Path) -> None:
    run_file = make_project(tmp_path)
    run = run_config(run_file)
    model = tmp_path / "model.yaml"
    model.write_text(json.dumps({k: v for k, v in vars(run.model).items()}))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    out = tmp_path / "profile.json"
    options = ["--model", str(model), "--config", str(run_file), "--cluster", str(tmp_path / "cluster.yaml")]
    assert (
        main(["profile", *options, "--seconds", "0.01", "--out", str(out), "search.recompute=[none,full]"])
        == 0
    )
    profile = load_profile(out)
    assert profile.sequence_length == run.data.sequence_length
    entries = {(e.device_type, e.tensor_parallel, e.recompute): e for e in profile.entries}
    # Only the slow node has two cards for a tensor-parallel group.
    kinds = (("Fast", 1), ("Slow", 1), ("Slow", 2))
    assert set(entries) == {(*kind, r) for kind in kinds for r in ("none", "full")}
    assert {(link.from_, link.to) for link in profile.links} == set(
        itertools.permutations(("fast/0", "slow/0", "slow/1"), 2)
    )
    # The slow node has two cards, which share its network.
    assert [(link.from_, link.to) for link in profile.node_links] == [("fast", "slow"), ("slow", "fast")]
    assert all(1e6 < link.bytes_per_second < 1e12 for link in profile.node_links)
    # Simulated cards have the links of the cluster file, or slower ones.
    assert {host.device_type for host in profile.hosts} == {"Fast", "Slow"}
    assert all(1e6 < min(h.host_link_down, h.host_link_up) < 1.01 * 16e9 for h in profile.hosts)
    assert all(1e6 < host.host_step_bytes_per_second < 1e12 for host in profile.hosts)
    # Copies and sums of a reduction run on the cores that compute: less than a second for a megabyte.
    takes = [link.compute_seconds_per_byte for link in profile.links]
    assert all(0 <= seconds < 1e-6 for seconds in takes)
    fast, half = entries["Fast", 1, "none"], entries["Slow", 2, "none"]
    # fp32: weights, gradients and two states of four bytes each.
    assert fast.layers[0].state_bytes == 16 * run.model.layer_parameters
    assert fast.head.state_bytes == 16 * run.model.head_parameters
    assert fast.layers[0].state_bytes / 2 < half.layers[0].state_bytes < 0.6 * fast.layers[0].state_bytes
    assert fast.layers[0].output_bytes == 24 * 32 * 4 and fast.head.output_bytes == 0
    # What a process holds besides the model is at least Python and torch.
    assert fast.reserved_bytes is not None and 50e6 < fast.reserved_bytes < 4e9
    assert not profile.is_whole
    device_type = make_costs(
        PlanProblem(
            cluster=load_cluster(tmp_path / "cluster.yaml"),
            model=run.model,
            sequence_length=run.data.sequence_length,
            global_batch_size=run.train.global_batch_size,
            precision=run.train.precision,
            profile=profile,
        )
    ).problem.cluster.device_type("Fast")
    assert device_type.reserved == math.ceil(fast.reserved_bytes)


def test_a_units_time_is_divided_into_passes_on_a_cpu(tmp_path: Path) -> None:
    case = short_case(tmp_path, torch.float32, seconds_per_unit=1.5)
    assert measure.num_passes(case) == 3
    assert measure.num_passes(replace(case, seconds_per_unit=0.9)) == 1
    assert measure.num_passes(replace(case, device=torch.device("cuda"))) == 1
    part = measure.of_pass(case, 3)
    assert (part.seconds_per_unit, part.least_repeats) == (0.5, 2)
    assert measure.of_pass(case, 1) == case


def test_a_case_takes_the_mean_seconds_of_its_passes_and_the_bytes_of_the_first() -> None:
    def unit(seconds: float, size: float) -> UnitProfile:
        return UnitProfile(
            forward_seconds=seconds,
            backward_seconds=2 * seconds,
            state_bytes=size,
            activation_bytes=size,
            output_bytes=size,
        )

    def entry(seconds: float, size: float) -> ProfileEntry:
        one = unit(seconds, size)
        return ProfileEntry(device_type="A", embedding=one, layers=(one,), head=one, bare_layer=one)

    found = measure.mean_entry([entry(1.0, 5.0), entry(3.0, 7.0)])
    assert found == entry(2.0, 5.0)
    assert measure.mean_entry([replace(entry(1.0, 5.0), bare_layer=None)] * 2).bare_layer is None


def test_activation_and_transient_bytes_of_a_layer(tmp_path: Path) -> None:
    """Measured memory is at least what autograd saves; a recomputed layer needs transient memory."""
    run = run_config(make_project(tmp_path))
    case = measure.ProfileCase(
        model=replace(
            run.model, num_layers=2, hidden_size=256, ffn_hidden_size=1024, num_attention_heads=4, head_dim=64
        ),
        sequence_length=256,
        micro_batch_size=2,
        recompute="none",
        dtype=torch.float32,
        device=torch.device("cpu"),
        seconds_per_unit=0.01,
    )
    hidden_bytes = 2 * 256 * 256 * 4
    (kept,) = measure.measure_entry(case, device_type="here").layers
    (recomputed,) = measure.measure_entry(replace(case, recompute="full"), device_type="here").layers
    assert hidden_bytes <= recomputed.activation_bytes < 0.5 * kept.activation_bytes
    if can_track_memory(case.device):
        # For its backward, a recomputed layer holds everything again that it did not keep.
        assert recomputed.transient_bytes is not None and recomputed.transient_bytes > 8 * hidden_bytes


def test_state_bytes_under_bf16(tmp_path: Path) -> None:
    case = short_case(tmp_path, torch.bfloat16, seconds_per_unit=0.01)
    entry = measure.measure_entry(case, device_type="here")
    assert entry.layers[0].state_bytes == 18 * case.model.layer_parameters


def test_profiles_of_two_machines_are_merged(tmp_path: Path) -> None:
    run_file = make_project(tmp_path)
    parts = []
    for name in ("A", "B"):
        parts.append(str(tmp_path / f"{name}.json"))
        words = ["--config", str(run_file), "--device-type", name, "--seconds", "0.01", "--out", parts[-1]]
        assert main(["profile", *words]) == 0
    merged = tmp_path / "whole.json"
    assert main(["profile", "--merge", *parts, "--out", str(merged)]) == 0
    assert {entry.device_type for entry in load_profile(merged).entries} == {"A", "B"}
    assert main(["profile", "--out", str(merged)]) == 2
