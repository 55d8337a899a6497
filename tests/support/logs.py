"""The log directory of a supervised run that has lost a node, without a run: its files, whole."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from tests.support.project import make_plan, make_project, run_config, with_forecast, write_lines
from yuan_train.config.devices import DeviceType
from yuan_train.config.load import dump
from yuan_train.config.plan_constraints import save_plan

STEPS = 60
BEGAN, MOVED, LOOKED, LAST = 1_700_000_000.0, 1_700_001_800.0, 1_700_003_600.0, 1_700_005_400.0
"""When it started, when it moved, when a node waited, and when its last step was written."""
CARD = {"memory": "8 GiB", "fp32": "1 TFLOP/s", "memory_bandwidth": "10 GB/s", "price": 0.5}
LINK = {"bandwidth": "1 GB/s"}
PRICES = {"gone": 0.4, "more": 0.25}
OF_RL = {
    **{"reward": 0.5, "rewards": {"exact": 0.5, "format": None}, "answer_tokens": {"mean": 12.0, "max": 20}},
    **{"entropy_estimate": 1.0, "kl": 0.01, "generation_seconds": 0.2, "evaluation": {"pass_1": 0.25}},
}


def write_run(folder: Path) -> Path:
    """Of `card`, whose third card no plan uses; `gone`, which is lost; `more`, which waits. And `rl.jsonl`,
    steps of another kind of run."""
    run = run_config(make_project(folder), f"train.steps={2 * STEPS}")
    log = folder / "log"
    (log / "plans").mkdir(parents=True)
    forecast: dict[str, Any] = {"step_seconds": 0.5, "tokens_per_second": 125.0}
    plan = with_forecast(make_plan(run, [[4, 2]]), seconds=[(0.01, 0.04), (0.01, 0.02)], **forecast)
    card = DeviceType(memory=8 * 2**30, fp32=1e12, memory_bandwidth=1e10)
    plan = replace(plan, device_types={"card": card})
    for name in ("plan.yaml", "plans/plan-1.yaml", "plans/plan-2.yaml"):
        save_plan(log / name, plan)
    (log / "config.yaml").write_text(dump(run))
    nodes = [{"name": "card", "device": "card", "devices": 3, "link": LINK, "network": LINK}]
    nodes += [{"name": name, "device": "card", "price": PRICES[name], "network": LINK} for name in PRICES]
    cluster = {"name": "some", "nodes": nodes, "device_types": {"card": CARD}}
    (log / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    plans = [str(log / f"plans/plan-{number}.yaml") for number in (1, 2)]
    all_ = {"step": 0, "forecast_before": None, "forecast_after": 0.5}
    entries = [
        {"time": BEGAN, "event": "started", "reason": "all are here", "nodes": ["card", "gone"], **all_},
        {"time": MOVED, "event": "moved", "reason": "gone went", "nodes": ["card"], **all_},
        {"time": LOOKED, "event": "stays", "reason": "more waits: no gain", "nodes": ["card"], **all_},
    ]
    entries[0]["plan"], entries[1]["plan"], entries[1]["step"] = *plans, 20
    entries[2] |= {"waiting": ["more"], "step": 40}
    lines = [_step(i) for i in range(1, STEPS + 1)]
    samples = [{"step": i, "prompt": "1 + 1", "text": "2", "reward": 1.0} for i in (1, 9)]
    for name, values in (
        *(("supervise.jsonl", entries), ("samples.jsonl", samples), ("metrics.jsonl", lines)),
        ("rl.jsonl", [line | OF_RL for line in lines]),
    ):
        write_lines(log / name, values)
    os.utime(log / "metrics.jsonl", (LAST, LAST))
    return log


def _step(i: int) -> dict[str, object]:
    return {
        **{"step": i, "loss": 9.0 - i / 20, "step_seconds": 0.5, "forecast_step_seconds": 0.5, "mfu": 0.1},
        **{"tokens_per_second": 100.0, "grad_norm": 1.0, "tokens": 100 * i, "link_seconds": {"a -> b": 0.01}},
        **{"stage_seconds": [0.4, 0.3], "peak_memory_bytes": [2**30, 2**29]},
        "validation_loss": 8.0 if i % 20 == 0 else None,
    }
