"""What the commands say and do about the second engine, without it."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.project import parse_plan, run_config
from tests.support.spawn import process_of
from yuan_train.cli.main import main
from yuan_train.cli.plan import price_words
from yuan_train.config.plan_constraints import save_plan
from yuan_train.supervise import launched


def test_what_the_restriction_costs() -> None:
    assert price_words(1.0, 1.0).startswith("search.engine=[megatron] costs nothing; both")
    assert "costs 25.0% of the step (1 s without it)" in price_words(1.25, 1.0)


def test_the_rank_that_logs_is_heard(run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """megatron-core's rank 0 is the first stage's, whatever its number in the plan."""
    save_plan(tmp_path / "plan.yaml", parse_plan(run_config(run_file), "1x8: 4@1 | 2@0"))
    heard: list[int] = []

    def start(command: Any, rank: int, environment: Any, *, inherits_output: bool) -> Any:
        heard.extend([rank] * inherits_output)
        return launched._Child(rank, process_of("true"), None)

    monkeypatch.setattr(launched, "_start_rank", start)
    words = ["launch", "--config", str(run_file), "--plan", str(tmp_path / "plan.yaml")]
    assert main(words) == 0 and main([*words, "--engine", "megatron"]) == 0
    assert heard == [0, 1]
