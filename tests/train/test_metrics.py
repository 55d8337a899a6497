"""The progress line, metrics.jsonl, and the peak FLOP/s of a plan."""

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.project import make_plan, run_config
from yuan_train.config.plan import RankPlan
from yuan_train.train.metrics import Log, StepMetrics, is_logged, peak_flops, progress_line

METRICS = StepMetrics(
    step=7,
    loss=2.5,
    lr=3e-4,
    grad_norm=0.7,
    tokens=7168,
    step_seconds=0.5,
    tokens_per_second=20480.0,
    mfu=0.31,
    peak_memory_bytes=[1, 2],
    forecast_step_seconds=0.48,
    stage_seconds=[0.4, 0.3],
)


def test_the_progress_line_has_loss_speed_mfu_forecast_and_eta() -> None:
    line = progress_line(METRICS, total_steps=127)
    for part in (
        "step   7/127",
        "loss 2.5000",
        "20.5k tok/s",
        "MFU 31.0%",
        "0.500 s (forecast 0.480 s)",
        "ETA 1:00",
    ):
        assert part in line
    bare = progress_line(replace(METRICS, mfu=None, forecast_step_seconds=None), total_steps=7)
    assert "MFU -" in bare and "forecast" not in bare


def test_metrics_jsonl_has_a_line_per_step_and_no_infinities(run_file: Path, tmp_path: Path) -> None:
    run = run_config(run_file, f"log.directory={tmp_path / 'log'}", "log.every=5")
    stream = io.StringIO()
    log = Log(run, first_step=1, stream=stream)
    for step in range(1, 8):
        of_all = {} if is_logged(step, run) else {"peak_memory_bytes": None, "stage_seconds": None}
        log.write(replace(METRICS, step=step, grad_norm=float("inf"), **of_all))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 8)) and lines[0]["grad_norm"] is None
    assert len(stream.getvalue().splitlines()) == 1
    assert [line["step"] for line in lines if "stage_seconds" in line or "peak_memory_bytes" in line] == [5]
    assert is_logged(run.train.steps, run), "and the last"


def test_peak_flops_of_mixed_cards_add_up(run_file: Path) -> None:
    plan = make_plan(run_config(run_file), [[3, 3]])
    assert peak_flops(plan, "bf16") is None
    ranks = (RankPlan(rank=0, device="a/0", type="A100-80G"), RankPlan(rank=1, device="b/0", type="RTX-4090"))
    assert peak_flops(replace(plan, ranks=ranks), "bf16") == pytest.approx(312e12 + 165.2e12)
    old = (ranks[0], RankPlan(rank=1, device="b/0", type="V100-32G"))
    assert peak_flops(replace(plan, ranks=old), "bf16") is None
    assert peak_flops(replace(plan, ranks=old), "fp32") == pytest.approx(19.5e12 + 15.7e12)
