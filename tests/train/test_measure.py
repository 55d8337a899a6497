"""Profiles measured on this machine: their entries and bytes, never their seconds."""

import gc
import itertools
import json
import math
from argparse import Namespace
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.planner.by_hand import entry, unit
from tests.support.fake_card import FakeCard
from tests.support.project import MODEL, run_config
from tests.support.spawn import start_command
from yuan_train.cli import profile as profile_command
from yuan_train.cli.main import main
from yuan_train.cli.plan import problem_of
from yuan_train.config.cluster import load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.profile import ProfileEntry, StageStart, load_profile
from yuan_train.parallel.device import CPU, Device, can_track_memory
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.profile import units
from yuan_train.train import job

ROOT = Path(__file__).parents[2]
CLUSTER = """
name: two
nodes:
  - {name: fast, device: Fast, network: {bandwidth: 1 GB/s}}
  - {name: slow, device: Slow, devices: 2, link: {bandwidth: 1 GB/s}, network: {bandwidth: 1 GB/s}}
device_types:
  Fast: {memory: 1 GiB, reserved: 0 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s, slowdown: 1}
  Slow: {memory: 1 GiB, reserved: 0 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s, slowdown: 3}
"""


@pytest.fixture(autouse=True, scope="module")
def few_objects() -> None:
    """Each case collects garbage several times: what tests before have made is left out of it, as in the
    command."""
    gc.collect()
    gc.freeze()


def short_case(dtype: torch.dtype, *, seconds_per_unit: float) -> units.ProfileCase:
    """Two sequences of eight tokens of the project's model, on the CPU."""
    return units.ProfileCase(
        model=ModelConfig(**MODEL),
        sequence_length=8,
        micro_batch_size=2,
        recompute="none",
        dtype=dtype,
        device=CPU,
        seconds_per_unit=seconds_per_unit,
    )


def test_a_profile_of_simulated_cards(run_file: Path, tmp_path: Path) -> None:
    run = run_config(run_file)
    model = tmp_path / "model.yaml"
    model.write_text(json.dumps({k: v for k, v in vars(run.model).items()}))
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    out = tmp_path / "profile.json"
    options = ["--model", str(model), "--config", str(run_file), "--cluster", str(tmp_path / "cluster.yaml")]
    words = ["profile", *options, "--seconds", "0.01", "--out", str(out), "search.recompute=[none]"]
    # It forks its ranks, and these tests' process has used threads.
    code, said = start_command(words, tmp_path / "stderr", environment={}).wait(within_seconds=120)
    assert code == 0, said
    profile = load_profile(out)
    assert profile.sequence_length == run.data.sequence_length
    assert profile.generation == () and profile.batch is None, "of reinforcement learning alone"
    entries = {(e.device_type, e.tensor_parallel, e.recompute): e for e in profile.entries}
    # Only the slow node has two cards for a tensor-parallel group.
    assert set(entries) == {("Fast", 1, "none"), ("Slow", 1, "none"), ("Slow", 2, "none")}
    assert {(link.from_, link.to) for link in profile.links} == set(
        itertools.permutations(("fast/0", "slow/0", "slow/1"), 2)
    )
    # The slow node has two cards, which share its network.
    assert [(link.from_, link.to) for link in profile.node_links] == [("fast", "slow"), ("slow", "fast")]
    assert all(0 < link.bytes_per_second < 1e12 for link in profile.node_links)
    # Simulated cards have the links of the cluster file, or slower ones.
    assert {host.device_type for host in profile.hosts} == {"Fast", "Slow"}
    assert all(0 < min(h.host_link_down, h.host_link_up) < 1.01 * 16e9 for h in profile.hosts)
    assert all(0 < host.host_step_bytes_per_second < 1e12 for host in profile.hosts)
    # Copies and sums of a reduction run on the cores that compute; how long depends on who else does.
    assert all(0 <= link.compute_seconds_per_byte < math.inf for link in profile.links)
    fast, half = entries["Fast", 1, "none"], entries["Slow", 2, "none"]
    # fp32: weights, gradients and two states of four bytes each.
    assert fast.layers[0].state_bytes == 16 * run.model.layer_parameters
    assert fast.head.state_bytes == 16 * run.model.head_parameters
    assert fast.layers[0].state_bytes / 2 < half.layers[0].state_bytes < 0.6 * fast.layers[0].state_bytes
    assert fast.layers[0].output_bytes == 24 * 32 * 4 and fast.head.output_bytes == 0
    # What a process holds besides the model is at least Python and torch.
    assert fast.reserved_bytes is not None and 50e6 < fast.reserved_bytes < 4e9
    assert not profile.is_whole
    costs = make_costs(problem_of(run, load_cluster(tmp_path / "cluster.yaml"), profile))
    assert costs.problem.cluster.device_type("Fast").reserved == math.ceil(fast.reserved_bytes)


def test_a_units_time_is_divided_into_passes_on_a_cpu() -> None:
    case = short_case(torch.float32, seconds_per_unit=1.5)
    assert units.num_passes(case) == 3
    assert units.num_passes(replace(case, seconds_per_unit=0.9)) == 1
    assert units.num_passes(replace(case, device=FakeCard())) == 1
    part = units.of_pass(case, 3)
    assert (part.seconds_per_unit, part.least_repeats) == (0.5, 2)
    assert units.of_pass(case, 1) == case


def test_a_case_takes_the_mean_seconds_of_its_passes_and_the_bytes_of_the_first() -> None:
    case = short_case(torch.float32, seconds_per_unit=1.5)

    def measured(seconds: float, size: float) -> ProfileEntry:
        one = unit(seconds, 2 * seconds, state=size, kept=size, output=size)
        return entry("A", one, bare_layer=one)

    # A single layer takes as long as each of several in a row: a stage has no start.
    passes = [units.MeasuredCase(measured(x, y), (x, 2 * x)) for x, y in ((1.0, 5.0), (3.0, 7.0))]
    assert units.make_entry(case, passes) == measured(2.0, 5.0)
    plain = units.MeasuredCase(replace(passes[0].entry, bare_layer=None), (1.0, 2.0))
    assert units.make_entry(case, [plain] * 2).bare_layer is None


@pytest.mark.parametrize(
    ("gigabytes", "micro_batch", "layers"), [(80, 1, 4), (80, 2, 4), (24, 2, 2), (16, 8, 1), (80, 64, 1)]
)
def test_so_many_layers_run_in_a_row_as_a_card_holds_with_what_they_keep(
    gigabytes: int, micro_batch: int, layers: int
) -> None:
    """By itself a layer of a fast card takes the time of its host, which else works ahead."""
    model = load_model(ROOT / "configs/model/yuan2-2b.yaml")
    card = FakeCard(memory=gigabytes << 30)
    card.use()
    case = short_case(torch.bfloat16, seconds_per_unit=1.5)
    case = replace(case, model=model, sequence_length=4096, micro_batch_size=micro_batch, device=card)
    assert units.num_layers_in_a_row(case) == layers


def test_what_a_stage_takes_besides_its_layers_is_no_part_of_any_unit() -> None:
    case = short_case(torch.float32, seconds_per_unit=1.5)
    count = units.num_layers_in_a_row(case)
    assert count > 1

    # Starts of 0.3 and 0.5, layers of 1 and 2, a head of 4 and 0.1.
    row = unit(1.0 + 0.3 / count, 2.0 + 0.5 / count)
    own = replace(entry("A", row, bare_layer=row), embedding=unit(0.2, 0.6), head=unit(4.3, 0.6))
    found = units.make_entry(case, [units.MeasuredCase(own, (1.3, 2.5))])
    assert (found.start.forward_seconds, found.start.backward_seconds) == pytest.approx((0.3, 0.5))
    for got, wanted in (
        (found.layers[0], unit(1.0, 2.0)),
        (found.bare_layer, unit(1.0, 2.0)),
        (found.head, unit(4.0, 0.1)),
        (found.embedding, unit(0.0, 0.1)),
    ):
        assert got is not None
        assert got.forward_seconds == pytest.approx(wanted.forward_seconds)
        assert got.backward_seconds == pytest.approx(wanted.backward_seconds)
    # A single layer that took longer than the whole row has met other load: each layer keeps time.
    busy = units.make_entry(case, [units.MeasuredCase(own, (9.0 * count, 2.5))])
    assert busy.layers[0].forward_seconds == pytest.approx(0.1 * row.forward_seconds)
    # The model's only layer is all that is measured.
    single = replace(case, model=replace(case.model, num_layers=1))
    assert units.make_entry(single, [units.MeasuredCase(own, (1.3, 2.5))]).start == StageStart()


def test_activation_and_transient_bytes_of_a_layer() -> None:
    """Measured memory is at least what autograd saves; a recomputed layer needs transient memory."""
    case = short_case(torch.float32, seconds_per_unit=0.01)
    sizes = {"hidden_size": 256, "ffn_hidden_size": 1024, "num_attention_heads": 4, "head_dim": 64}
    case = replace(case, model=replace(case.model, num_layers=4, **sizes), sequence_length=64)
    hidden_bytes = 2 * 64 * 256 * 4
    (kept,) = units.measure_case(case, device_type="here").entry.layers
    (recomputed,) = units.measure_case(replace(case, recompute="full"), device_type="here").entry.layers
    # A sixth of it; but what the heap has in pieces counts too, and another test may have left it so.
    assert hidden_bytes <= recomputed.activation_bytes < 0.75 * kept.activation_bytes
    if can_track_memory(case.device):
        # For its backward, a recomputed layer holds everything again that it did not keep.
        assert recomputed.transient_bytes is not None and recomputed.transient_bytes > 8 * hidden_bytes


def test_state_bytes_under_bf16() -> None:
    case = short_case(torch.bfloat16, seconds_per_unit=0.01)
    entry = units.measure_case(case, device_type="here").entry
    assert entry.layers[0].state_bytes == 18 * case.model.layer_parameters


def test_what_is_reserved_on_a_card() -> None:
    """All that is not free once the model has gone: here what others than torch hold."""
    case = short_case(torch.float32, seconds_per_unit=0.01)
    for outside in (0, 700 << 20):
        found = units.measure_reserved(replace(case, device=FakeCard(outside=outside)))
        assert found == outside


def test_the_type_under_which_a_card_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.yaml").write_text(
        """
name: box
nodes:
  - {name: box, devices: [{type: RTX-4090, count: 1}, {type: Mine, count: 1}], link: {bandwidth: 1 GB/s}}
device_types: {Mine: {memory: 24 GiB, fp32: 80 TFLOP/s, memory_bandwidth: 1000 GB/s}}
"""
    )
    cluster = load_cluster(tmp_path / "cluster.yaml")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    names = ("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090")
    box = [FakeCard(name=name, memory=int(23.6 * 2**30), capability=(8, 6)) for name in names]
    monkeypatch.setattr(job, "choose_device", partial(job.choose_device, cards=lambda: box))
    asked = Namespace(device_type=None)
    for rank, (number, name) in enumerate([(1, "RTX-4090"), (0, "Mine")]):
        position = job.Position(rank, 2, rank, 2)
        device = profile_command._choose_device("auto", position, cluster)
        assert device is box[number]
        # Of a cluster whose cards all have a process, the file's name, which the driver need not know.
        assert profile_command._name_type(cluster, position, device, asked) == name
    # Of a card alone its own, unless another is given.
    assert profile_command._name_type(cluster, job.Position(), box[0], asked) == "RTX-3090"
    assert profile_command._name_type(None, job.Position(), box[0], Namespace(device_type="A")) == "A"
    # The processor of a machine without cards is no card.
    monkeypatch.setattr(job, "choose_device", partial(job.choose_device, cards=list[Device]))
    with pytest.raises(ConfigError, match=r"rank 0 \(box/0\): .* RTX-4090 there, but torch finds none"):
        profile_command._choose_device("auto", job.Position(0, 2, 0, 2), cluster)
    assert not profile_command._choose_device("cpu", job.Position(0, 2, 0, 2), cluster).is_card


def test_profiles_of_two_machines_are_merged(run_file: Path, tmp_path: Path) -> None:
    one, other, merged = (tmp_path / f"{name}.json" for name in ("one", "other", "whole"))
    words = ["--config", str(run_file), "--device-type", "A", "--seconds", "0.01", "--out", str(one)]
    assert main(["profile", *words]) == 0
    other.write_text(one.read_text().replace('"A"', '"B"'))
    assert main(["profile", "--merge", str(one), str(other), "--out", str(merged)]) == 0
    assert {entry.device_type for entry in load_profile(merged).entries} == {"A", "B"}
    assert main(["profile", "--out", str(merged)]) == 2


def test_a_card_by_its_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by all that torch tells of it; a card that the catalogue does not have keeps its driver's name."""
    for name, memory, known in (
        ("NVIDIA H100 80GB HBM3", 85_000_000_000, "H100-80G"),
        ("NVIDIA Imaginary 7", 8_000_000_000, "NVIDIA Imaginary 7"),
    ):
        card = Namespace(total_memory=memory)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _, name=name: name)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, card=card: card)
        assert units.name_of(torch.device("cuda", 0)) == known
    assert units.name_of(torch.device("cpu")) == units.name_of(CPU) == "CPU"
