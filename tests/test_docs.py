"""Pages that are made of the code are as the code is; rules for all pages are in test_structure.py."""

from __future__ import annotations

import pytest

from tools import make_reference


def test_the_pages_made_of_the_docstrings_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    code = make_reference.main(["--check"])
    assert code == 0, f"{capsys.readouterr().out}: run python tools/make_reference.py"
