"""What is drawn on a terminal while a command works, and nothing anywhere else."""

import io
import time

import pytest

from yuan_train.cli import main
from yuan_train.cli.main import working


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_is_drawn_over_itself_and_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "PERIOD", 0.005)
    terminal = Terminal()
    with working("measuring", 4, terminal) as bar:
        bar.step("micro-batches of 2")
        for _ in range(1000):
            if "1/4" in terminal.getvalue():
                break
            time.sleep(0.005)
    drawn = terminal.getvalue()
    assert "[######------------------] 1/4  micro-batches of 2" in drawn
    assert drawn.endswith("\r\x1b[K") and "\n" not in drawn


def test_seconds_are_counted_where_the_end_is_not_known() -> None:
    assert main.Bar("planning", None, io.StringIO()).line() == "planning ... 0 s"


def test_nothing_is_written_to_what_is_no_terminal() -> None:
    stream = io.StringIO()
    with working("planning", None, stream) as bar:
        bar.step()
    assert stream.getvalue() == ""
