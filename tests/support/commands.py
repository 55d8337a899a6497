"""Command lines run in this process; conftest.py makes the last two fixtures of all tests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from yuan_train.cli.main import main

Ask = Callable[..., Any]
Refuse = Callable[..., str]


def command(*words: object) -> int:
    """The exit code of a command line."""
    return main(list(map(str, words)))


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Runs a command line with --json; returns the object that it prints."""

    def run(*words: object) -> Any:
        capsys.readouterr()
        assert command(*words, "--json") == 0
        return json.loads(capsys.readouterr().out)

    return run


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Refuse:
    """Runs a command line that must be refused with nothing written; returns its messages."""

    def run(*words: object) -> str:
        before = sorted(tmp_path.rglob("*"))
        capsys.readouterr()
        code = command(*words)
        said = capsys.readouterr()
        assert code == 2, said.err
        assert "error: " in said.err and "Traceback" not in said.err and not said.out
        assert sorted(tmp_path.rglob("*")) == before
        return said.err

    return run
