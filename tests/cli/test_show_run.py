"""tools/show_run.py: the last lines of the quick start."""

import json
from pathlib import Path

import pytest

from tools.show_run import main


def test_losses_and_forecast(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    steps = [
        {"step": i, "loss": 8.0 - i, "step_seconds": 9.0 if i < 4 else 0.5, "forecast_step_seconds": 0.4}
        for i in range(1, 8)
    ]
    text = "\n".join(json.dumps(step) for step in [*steps, {"step": 7, "event": "saved"}])
    (tmp_path / "metrics.jsonl").write_text(text + "\n")
    assert main([str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "steps        1 to 7",
        "loss         7.000 -> 1.000",
        "step time    0.500 s measured (median)",
        "             0.400 s forecast, 20% below",
    ]


@pytest.mark.parametrize("text", [None, "", "{torn"])
def test_no_finished_step(tmp_path: Path, text: str | None, capsys: pytest.CaptureFixture[str]) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_text(text)
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"error: {tmp_path / 'metrics.jsonl'}: ")
