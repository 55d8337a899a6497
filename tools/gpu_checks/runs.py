"""Small runs for the checks of tools/gpu_day.py: a project, a curve on a device, how far two are apart."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.project import make_plan, make_project, run_config
from tests.support.ranks import Case, disabled, run_alone
from tools.gpu_checks.bench import Bench
from yuan_train.config.plan import Plan

Curve = list[tuple[float, float]]
"""Loss and gradient norm of each step."""

MODELS: dict[str, dict[str, Any]] = {
    "Yuan": {},
    "Llama, 2 groups": {
        "architecture": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "tie_embeddings": False,
    },
    "M32": {"num_layers": 2, "num_experts": 4, "experts_per_token": 2, "router": "attention"},
}
"""Changes to the tests' model of 6 layers and 32 hidden units."""


def project(bench: Bench, model: dict[str, Any] | None = None) -> Path:
    """The run file of a small project in a folder of its own."""
    return make_project(new_folder(bench), model=model)


def new_folder(bench: Bench) -> Path:
    """An empty folder."""
    return Path(tempfile.mkdtemp(dir=bench.folder))


def curve(
    bench: Bench, run_file: Path, device: str, *words: str, plan: Plan | None = None, **case: Any
) -> Curve:
    """Train in this process, and return what each step had."""
    overrides = (f"train.device={device}", "validation.every=0", *words)
    with disabled(bench.without):
        lines = run_alone(Case(run_file, new_folder(bench), plan, overrides, **case))
    return [(line["loss"], line["grad_norm"]) for line in lines]


def one_stage(run_file: Path, *words: str, recompute: str = "none") -> Plan:
    """All layers on one card."""
    run = run_config(run_file, *words)
    return make_plan(run, [[run.model.num_layers]], recompute=recompute)


def on_tiers(plan: Plan, **keys: Any) -> Plan:
    """The plan of one stage with these keys of the stage."""
    (pipeline,) = plan.pipelines
    stages = tuple(replace(stage, **keys) for stage in pipeline.stages)
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def apart(found: Curve, wanted: Curve) -> tuple[float, float]:
    """The greatest relative differences of losses and of norms. Raises ValueError if lengths differ."""
    pairs = list(zip(found, wanted, strict=True))
    if not pairs:
        raise ValueError("the curves have no steps")
    return tuple(max(abs(a[i] / b[i] - 1) for a, b in pairs) for i in (0, 1))  # pyright: ignore


@contextmanager
def environment(**changes: str) -> Iterator[None]:
    """Context with these environment variables."""
    before = dict(os.environ)
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def worst(rows: Sequence[tuple[float, float]]) -> str:
    """The greatest differences of several comparisons, in words."""
    return f"losses {max(row[0] for row in rows):.1e}, norms {max(row[1] for row in rows):.1e}"
