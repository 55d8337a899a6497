"""Whether a move repays itself, whether a fault will not end, and a journal that a crash has cut short."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from yuan_train.config.run import SuperviseConfig
from yuan_train.report.lines import FILE, Journal, read_entries
from yuan_train.supervise import agent as agents
from yuan_train.supervise.agent import Start, repeats, weigh_move
from yuan_train.supervise.room import Agent, Directive

SETTINGS = SuperviseConfig(horizon=1000.0, gain=0.05)


@pytest.mark.parametrize(
    ("after", "measured", "steps_left", "move_seconds", "is_worth_it"),
    [
        (0.5, None, 10_000, 60.0, True),  # 500 s of the horizon's 1000
        (0.5, None, 100, 60.0, False),  # 50 s of the 100 that are left
        (0.5, 2.0, 100, 60.0, True),  # a step really takes 2 s: 100 s of 200
        (0.96, None, 10_000, 1.0, False),  # 4 % is below supervise.gain
        (0.9, None, 10_000, 101.0, False),  # no more than the horizon counts
        (0.9, None, 10_000, 99.0, True),
        (1.1, None, 10_000, 0.0, False),
    ],
)
def test_a_move_has_to_repay_itself(
    after: float, measured: float | None, steps_left: int, move_seconds: float, is_worth_it: bool
) -> None:
    found = weigh_move(
        1.0, after, measured=measured, steps_left=steps_left, move_seconds=move_seconds, settings=SETTINGS
    )
    assert found.is_worth_it == is_worth_it, found.reason
    assert "in place of 1 s" in found.reason


def test_a_fault_repeats_whatever_its_numbers_are() -> None:
    starts = [Start(f"rank {n}: port {29500 + n} is taken", step=7) for n in range(3)]
    assert repeats(starts, 3)
    assert not repeats(starts, 4)
    assert repeats([Start(starts[0].fault, 9), *starts[1:]], 3)
    assert repeats([Start("a loss of nan (on a)", 7), Start("a loss of nan (on b)", 7)], 2)
    assert not repeats([*starts, Start("rank 1: no space left", 7)], 3)
    assert not repeats([starts[0], Start(starts[1].fault, 8), starts[2]], 3)


def test_a_journal_outlives_damage(tmp_path: Path) -> None:
    """A line that is cut short costs itself; the next one begins anew."""
    Journal(tmp_path).write("started", "a, b are here", nodes=("a", "b"), forecast_after=0.5)
    path = tmp_path / FILE
    with path.open("ab") as file:
        file.write(b'{"time": 3, "event": "mov\xff')
    Journal(tmp_path).write("finished", "all done", step=9)
    with path.open("a") as file:
        file.write('{"time": "soon", "event": "moved", "reason": "x"}\n[]\n{}\n')
    assert [(e.event, e.step, e.nodes) for e in read_entries(tmp_path)[0]] == [
        ("started", 0, ["a", "b"]),
        ("finished", 9, []),
    ]
    assert read_entries(tmp_path / "nowhere")[0] == []


class WaitingRanks:
    """Ranks that wait for others, until they are asked to end."""

    def __init__(self) -> None:
        self.code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def ask_to_end(self, within: float) -> None:
        assert within == agents.HOPELESS_SECONDS
        self.code = 1

    def kill(self) -> None:
        pass

    cut = 0.0

    def fault(self, node: str) -> str:
        return "was ended"

    def follow(self) -> bool:
        return False

    def obstacle(self) -> str:
        return ""


@pytest.mark.parametrize("has_ranks", [True, False])
def test_a_start_without_its_lead_ends(monkeypatch: pytest.MonkeyPatch, has_ranks: bool) -> None:
    """Ranks that have not met wait for those of the lead's node, and nobody else would tell them."""
    looks = iter([False, False, True, True])
    current: Any = SimpleNamespace(
        stop_reason=lambda: None,
        moved_order=lambda: None,
        any_done=lambda: False,
        has_verdict=lambda: False,
        is_abandoned=lambda: next(looks),
        is_past=lambda: False,
        is_hopeless=lambda: False,
    )
    room: Any = SimpleNamespace(is_halted=lambda: False)
    monkeypatch.setattr(agents, "_start", lambda *_: WaitingRanks() if has_ranks else None)
    monkeypatch.setattr(agents, "POLL_SECONDS", 0.0)
    no_job: Any = None
    one = Agent("b", "token", "127.0.0.1", 1)
    done = agents._run_ranks(no_job, room, current, one, Directive("plan"), None, agents._Signals())
    assert (done.code, done.fault) == ((1, "was ended") if has_ranks else (0, ""))
