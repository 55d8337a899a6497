"""Profiles of a run of reinforcement learning: measured on this machine, and planned with."""

from pathlib import Path

import pytest
import torch

from tests.support.commands import Ask
from tests.support.rl import write_rl
from yuan_train.cli.main import main
from yuan_train.config.profile import load_profile
from yuan_train.config.rl import load_rl
from yuan_train.config.rl_plan import load_rl_plan
from yuan_train.parallel.device import CPU
from yuan_train.profile.generation import measure_generation
from yuan_train.profile.units import ProfileCase

CLUSTER = """\
name: one
nodes:
  - {name: half, device: Half, devices: 2, link: {bandwidth: 1 GB/s}, network: {bandwidth: 1 GB/s}}
device_types:
  Half: {memory: 4 GiB, reserved: 0 GiB, fp32: 80 GFLOP/s, memory_bandwidth: 10 GB/s, slowdown: 1.5}
"""
CHANGES = (
    "train.precision=fp32",
    "search.policy={schedule: [1f1b], tensor: [1, 2], recompute: [none], micro_batch_size: [2]}",
    "search.modes=[sync]",
)


def test_rounds_and_readings_of_the_real_engine(tmp_path: Path) -> None:
    run = load_rl(write_rl(tmp_path), ("train.precision=fp32",))
    case = ProfileCase(
        model=run.model,
        sequence_length=run.sequence_length,
        micro_batch_size=2,
        recompute="none",
        dtype=torch.float32,
        device=CPU,
        seconds_per_unit=0.01,
    )
    own = measure_generation(case, run, device_type="Half")
    assert (own.device_type, own.tensor_parallel) == ("Half", 1)
    assert (own.group, own.prompt_tokens) == (4, 6)
    assert own.slots == (4, 8) and own.prompts == (1, 2)
    # A layer is the difference of two noisy times, which may be nothing on a busy machine.
    rounds = zip(own.layer_seconds, own.engine_seconds, own.head_seconds, strict=True)
    readings = zip(own.prompt_layer_seconds, own.prompt_engine_seconds, strict=True)
    assert all(0 < layer + engine for row, engine, _ in rounds for layer in row)
    assert all(0 < layer + engine for layer, engine in readings) and all(0 < one for one in own.head_seconds)


@pytest.mark.slow
def test_generation_is_measured_and_planned_with(tmp_path: Path, ask: Ask) -> None:
    run, cluster, out = write_rl(tmp_path), tmp_path / "cluster.yaml", tmp_path / "profile.json"
    cluster.write_text(CLUSTER)
    given = ["--config", str(run), "--cluster", str(cluster)]
    assert main(["profile", *given, "--seconds", "0.01", "--out", str(out), *CHANGES]) == 0
    profile = load_profile(out)
    own = {(one.device_type, one.tensor_parallel): one for one in profile.generation}
    assert set(own) == {("Half", 1), ("Half", 2)}
    for one in own.values():
        assert (one.group, one.prompt_tokens) == (4, 6)
        assert one.slots == (4, 8) and one.prompts == (1, 2)
        rounds = [
            4 * layer + engine + head
            for row, engine, head in zip(one.layer_seconds, one.engine_seconds, one.head_seconds, strict=True)
            for layer in row
        ]
        assert all(1e-5 < seconds for seconds in rounds)
    assert profile.batch is not None and profile.batch.samples == 8
    assert profile.batch.scoring_seconds > 0 and profile.batch.packing_seconds > 0
    assert len(ask("inspect", out)["generation"]) == 2
    plan = tmp_path / "plan.yaml"
    for more, source in ((("--profile", str(out)), "measured"), ((), "estimated")):
        assert main(["plan", *given, *more, "--out", str(plan), "--json", *CHANGES]) == 0
        forecast = load_rl_plan(plan).forecast
        assert forecast is not None and forecast.source == source
        assert (forecast.scoring_seconds > 0) == (source == "measured")
