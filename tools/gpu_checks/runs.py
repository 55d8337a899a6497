"""Small runs for the checks of tools/gpu_day.py: a project, a curve on a device, how far two are apart."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import yaml

from tests.support.project import make_plan, make_project, run_config
from tests.support.ranks import Case, disabled, run_alone
from tools.gpu_checks.bench import ROOT, Bench
from yuan_train.cli.main import main
from yuan_train.config.plan import Plan
from yuan_train.data.indexed import IndexedWriter
from yuan_train.parallel.device import CPU, CudaDevice, Device
from yuan_train.profile.units import name_of

LENGTH = 4096
"""Tokens of a sequence of the large project."""

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

MODELS: dict[str, dict[str, Any]] = {
    "Yuan": {},
    "Llama, 2 groups": {"num_attention_heads": 4, "num_key_value_heads": 2}
    | {"architecture": "llama", "tie_embeddings": False},
    "M32": {"num_layers": 2, "num_experts": 4, "experts_per_token": 2, "router": "attention"},
}
"""Changes to the tests' model of 6 layers and 32 hidden units."""


def project(bench: Bench, model: dict[str, Any] | None = None) -> Path:
    """The run file of a small project in a folder of its own."""
    return make_project(new_folder(bench), model=model)


def new_folder(bench: Bench) -> Path:
    """An empty folder."""
    return Path(tempfile.mkdtemp(dir=bench.scratch))


def curve(
    bench: Bench,
    run_file: Path,
    kind: str,
    *words: str,
    plan: Plan | None = None,
    device: Device | None = None,
    **case: Any,
) -> Curve:
    """Train in this process on a `kind` of device, or on this `device`, and return what each step had."""
    overrides = (f"train.device={kind}", "validation.every=0", *words)
    with disabled(bench.without):
        lines = run_alone(Case(run_file, new_folder(bench), plan, overrides, **case), device)
    return [(line["loss"], line["grad_norm"]) for line in lines]


def one_stage(run_file: Path, *words: str, recompute: str = "none") -> Plan:
    """All layers on one card."""
    run = run_config(run_file, *words)
    return make_plan(run, [[run.model.num_layers]], recompute=recompute)


def apart(found: Curve, wanted: Curve) -> tuple[float, float]:
    """The greatest relative differences of losses and of norms. Raises ValueError if lengths differ."""
    pairs = list(zip(found, wanted, strict=True))
    if not pairs:
        raise ValueError("the curves have no steps")
    return tuple(max(abs(a[i] / b[i] - 1) for a, b in pairs) for i in (0, 1))  # pyright: ignore


def worst(rows: Sequence[tuple[float, float]]) -> str:
    """The greatest differences of several comparisons, in words."""
    return f"losses {max(row[0] for row in rows):.1e}, norms {max(row[1] for row in rows):.1e}"


def large_project(bench: Bench, **changes: Any) -> Path:
    """On a card Yuan2-2B with `changes`, and enough tokens; on a CPU two layers of the small project."""
    if not bench.on_card:
        return project(bench, {"num_layers": 2})
    model = yaml.safe_load((ROOT / "configs/model/yuan2-2b.yaml").read_text()) | changes
    run_file = project(bench, model)
    run = yaml.safe_load(run_file.read_text())
    run["data"] |= {"sequence_length": LENGTH, "train": [{"prefix": str(run_file.parent / "long")}]}
    run["train"] |= {"steps": 12, "precision": "bf16", "device": "cuda"}
    run["optimizer"] |= {"learning_rate": 1e-4, "minimum_learning_rate": 1e-5}
    run_file.write_text(yaml.safe_dump(run, sort_keys=False))
    generator = np.random.default_rng(0)
    with IndexedWriter(run_file.parent / "long", dtype=np.dtype("<i4")) as writer:
        for _ in range(200):
            writer.add(generator.integers(5, model["vocab_size"], size=2000, dtype=np.int32))
    return run_file


def card_type(bench: Bench) -> str:
    """The catalogue's name of this card; of a CPU one that no card has."""
    return name_of(device_of(bench)) if bench.on_card else "this CPU"


def cluster_of_one(bench: Bench) -> Path:
    """A cluster file of this card, or of this CPU as a card."""
    node = {"name": "here", "device": card_type(bench), "devices": 1}
    cluster: dict[str, Any] = {"name": "here", "nodes": [node | {"network": {"bandwidth": "1 GB/s"}}]}
    if not bench.on_card:
        rates = {"fp32": "80 GFLOP/s", "bf16": "80 GFLOP/s", "memory_bandwidth": "10 GB/s"}
        card = {"memory": "4 GiB", "reserved": "300 MiB", "backend": "gloo", "slowdown": 1, **rates}
        cluster["device_types"] = {card_type(bench): card}
    path = bench.scratch / "cluster.yaml"
    path.write_text(yaml.safe_dump(cluster))
    return path


def yuan_train(*words: str | Path) -> None:
    """Run a command in this process, as its only rank. Raises RuntimeError if it fails."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with patch.dict(os.environ, alone):
        code = main([str(word) for word in words])
    if code:
        raise RuntimeError(f"yuan-train {words[0]}: exit code {code}")


def device_of(bench: Bench) -> Device:
    """Where a rank of this process computes."""
    return CudaDevice(0) if bench.on_card else CPU
