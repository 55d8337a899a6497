"""Earlier names of keys: accepted for one release, with a warning, at any depth."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from yuan_train.config.cluster import load_cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.run import load_run

CLUSTER = """
name: one
nodes: [{name: n, device: Own}]
device_types:
  Own: {memory: 1 GiB, reserved: 0 GiB, fp32: 1 TFLOP/s, memory_bandwidth: 1 GB/s, LIBRARY}
"""


def cluster_with(folder: Path, text: str) -> Path:
    path = folder / "cluster.yaml"
    path.write_text(CLUSTER.replace("LIBRARY", text))
    return path


@pytest.mark.parametrize(
    ("written", "backend"),
    [
        ("library: rccl", "rccl"),
        ("library: none", "gloo"),
        ("backend: gloo", "gloo"),
        ("slowdown: 1", "nccl"),
    ],
)
def test_both_names_are_accepted(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, written: str, backend: str
) -> None:
    with caplog.at_level(logging.WARNING):
        cluster = load_cluster(cluster_with(tmp_path, written))
    assert cluster.device_type("Own").backend == backend
    warnings = [record.getMessage() for record in caplog.records]
    if written.startswith("library"):
        assert len(warnings) == 1
        assert "cluster.yaml:5: device_types.Own.library is now called 'backend'" in warnings[0]
    else:
        assert not warnings


def test_both_names_at_once_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown key 'library'"):
        load_cluster(cluster_with(tmp_path, "library: rccl, backend: rccl"))


def test_a_wrong_value_under_the_earlier_name_is_found_at_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cluster.yaml:5: device_types.Own.backend: wanted"):
        load_cluster(cluster_with(tmp_path, "library: mpi"))


def test_an_override_may_use_the_earlier_name(caplog: pytest.LogCaptureFixture) -> None:
    tiny = Path(__file__).parents[2] / "configs/run/tiny.yaml"
    with caplog.at_level(logging.WARNING):
        run = load_run(tiny, ("train.loss_scale={growth_steps: 7}",))
    assert run.train.loss_scale is not None and run.train.loss_scale.growth_interval == 7
    assert "train.loss_scale.growth_steps is now called 'growth_interval'" in caplog.text
