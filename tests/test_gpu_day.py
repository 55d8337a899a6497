"""tools/gpu_day.py on the CPU: all checks in tiny sizes; what fails, hangs or crashes ends nothing else."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tools import gpu_day
from tools.gpu_checks.bench import Bench, Verdict

ROOT = Path(__file__).parents[1]
OWN = gpu_day.Check("held", "right", "tests.test_gpu_day", 20, "whether a runner keeps its word")
NEED_A_CARD = {check.name for check in gpu_day.CHECKS if check.on_card_only}


def held(bench: Bench) -> Verdict:
    return True, "held"


def failed(bench: Bench) -> Verdict:
    bench.note(seen=3)
    raise ValueError("two lines\nand more")


def hung(bench: Bench) -> Verdict:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    bench.note(child=child.pid, runs=runs(child.pid))
    time.sleep(600)
    return True, "not reached"


def crashed(bench: Bench) -> Verdict:
    os.kill(os.getpid(), signal.SIGSEGV)
    return True, "not reached"


def lacking(bench: Bench) -> Verdict:
    raise ModuleNotFoundError("No module named 'megatron.core'", name="megatron.core")


def runs(pid: int) -> bool:
    """Whether a process still runs; one that only waits for its parent to ask does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True).stdout
    return state.strip()[:1] not in ("", "Z")


def lines(folder: Path) -> dict[str, dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "checks.jsonl").read_text().splitlines()]
    assert all(set(line) == {"check", "ok", "figure", "seconds", "detail"} for line in found)
    return {line["check"]: line for line in found}


def test_all_checks_run_on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Their seconds are those of a card that does nothing else.
    patient = tuple(replace(check, seconds=10 * check.seconds) for check in gpu_day.CHECKS)
    monkeypatch.setattr(gpu_day, "CHECKS", patient)
    code = gpu_day.main(["all", "--device", "cpu", "--out", str(tmp_path), "--budget", "3600"])
    found = lines(tmp_path)
    assert code == 0, [line for line in found.values() if line["ok"] is False]
    assert list(found) == [check.name for check in gpu_day.CHECKS]
    for name, line in found.items():
        missing = line["figure"].endswith("is not installed")
        assert line["ok"] is (None if missing or name in NEED_A_CARD else True), line
        assert line["figure"] and (missing or (name not in NEED_A_CARD) == bool(line["detail"])), line
    table = (tmp_path / "table.md").read_text()
    assert all(f"| {name}: " in table for name in found) and "torch " in table.splitlines()[0]


def test_a_check_fails_where_what_it_rests_on_is_disabled(tmp_path: Path) -> None:
    words = ["streams", "--device", "cpu", "--out", str(tmp_path), "--only", "tiers"]
    assert gpu_day.main([*words, "--without", "activation_fetch"]) == 1
    line = lines(tmp_path)["tiers"]
    assert line["ok"] is False and "activations on the host" in line["figure"], line


@pytest.mark.parametrize("together", ["1", "3"])
def test_what_fails_hangs_or_crashes_is_told_and_ends_nothing(
    together: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = ("failed", "hung", "crashed", "lacking", "held")
    own = [replace(OWN, name=name, seconds=2 if name == "hung" else 20) for name in names]
    monkeypatch.setattr(gpu_day, "CHECKS", (gpu_day.CHECKS[0], *own))
    words = ["right", "--device", "cpu", "--out", str(tmp_path), "--together", together]
    assert gpu_day.main(words) == 1
    found = lines(tmp_path)
    assert [found[name]["ok"] for name in names] == [False, False, False, None, True]
    figures = [found[name]["figure"] for name in names]
    assert figures[0] == "ValueError: two lines" and found["failed"]["detail"] == {"seen": 3}
    assert "ended after 2 s" in figures[1] and "SIGSEGV" in figures[2]
    assert figures[3] == "megatron is not installed"
    # What a check has started ends with it.
    assert found["hung"]["detail"]["runs"] and not runs(found["hung"]["detail"]["child"])
    printed = capsys.readouterr()
    told = [json.loads(line)["check"] for line in printed.out.splitlines()]
    assert told[0] == "versions" and sorted(told[1:]) == sorted(names)
    assert together != "1" or told[1:] == list(names)
    assert "| **no** | ValueError: two lines |" in printed.err


def test_when_the_seconds_of_a_part_are_over_the_rest_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["right", "--device", "cpu", "--out", str(tmp_path)]
    monkeypatch.setattr(gpu_day, "CHECKS", (gpu_day.CHECKS[0], OWN))
    assert gpu_day.main([*words, "--budget", "1e-9"]) == 0
    assert all(line["ok"] is None and "seconds" in line["figure"] for line in lines(tmp_path).values())
    # What is cut short by its part has not failed.
    monkeypatch.setattr(gpu_day, "CHECKS", (gpu_day.CHECKS[0], replace(OWN, name="hung", seconds=600)))
    assert gpu_day.main([*words, "--budget", "3"]) == 0
    assert lines(tmp_path)["hung"]["ok"] is None
    assert (tmp_path / "table.md").exists()


def test_no_checks_at_a_time_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        gpu_day.main(["all", "--out", str(tmp_path), "--together", "0"])
    assert refused.value.code == 2 and "--together 0: wanted at least 1" in capsys.readouterr().err
