"""Pages say what is so: those made of the code are fresh, their commands run, links lead somewhere.

A block of commands is run as it stands (end_to_end/test_pages.py), or has `<!-- not run: WHY -->` above it.
Either way its commands of ours must be ones that the command line takes. Rules for lines: test_structure.py.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.pages import blocks, commands, ours
from tools import make_reference
from yuan_train.cli.main import COMMANDS, command_parser
from yuan_train.config.run import CONFLICTS, TURN_OFF

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
NAMES = [path.name for path in PAGES]
MAX_WORDS = 35


def test_the_pages_made_of_the_docstrings_are_fresh(capsys: pytest.CaptureFixture[str]) -> None:
    code = make_reference.main(["--check"])
    assert code == 0, f"{capsys.readouterr().out}: run python tools/make_reference.py"


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_commands_are_ones_that_the_command_line_takes(page: Path) -> None:
    for block, _ in blocks(page.read_text()):
        for command in commands(block):
            if words := ours(command):
                assert words[0] in COMMANDS, command
                parsed = command_parser(words[0])[0].parse_args(words)
                assert all("=" in override for override in getattr(parsed, "overrides", [])), command


def test_pages_that_are_not_run_say_why() -> None:
    run = {page.name for page in PAGES for _, is_run in blocks(page.read_text()) if is_run}
    assert run == {"finetune.md", "seven_steps.md"}


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page's prose: no code, tables, headings or pictures."""
    text = re.sub(r"^ *```.*?^ *```", "\n", text, flags=re.MULTILINE | re.DOTALL)
    kept = ["\n" if line.lstrip().startswith(("|", "#", "<", "!")) else line for line in text.splitlines()]
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(kept)):
        block = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", block.replace("\n", " ")))
        yield from re.split(r"(?<=[.!?])\s+(?=[A-Z*\[(\"0-9-]|code)", block)


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_sentences_are_short(page: Path) -> None:
    counted = ((len(re.findall(r"\S*\w\S*", text)), text.strip()) for text in sentences(page.read_text()))
    long = [f"{count} words: {text}" for count, text in counted if count > MAX_WORDS]
    assert not long, "\n".join(long)


def test_the_site_is_built_without_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each page is in the navigation, each link and anchor leads somewhere."""
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    monkeypatch.setenv("NO_MKDOCS_2_WARNING", "1")
    done = subprocess.run(
        ["mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert (tmp_path / "seven_steps.html").is_file()


def test_the_table_of_what_does_not_go_together_is_that_of_the_code() -> None:
    text = (make_reference.ROOT / "docs/troubleshooting.md").read_text()
    rows = [f"| {conflict.other} | {conflict.why} |" for conflict in CONFLICTS]
    assert [row for row in rows if row not in text] == []
    features = {conflict.other for conflict in CONFLICTS} | {conflict.feature for conflict in CONFLICTS}
    assert set(TURN_OFF) <= features, "each feature of a run can be turned off"
