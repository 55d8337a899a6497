"""The structure as a reader meets it: sizes of files, nothing dead, docs that name what is there."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
MAX_FILE_LINES = 450
MAX_DOC_COLUMNS = 120
WORD = re.compile(r"[A-Za-z_]\w*")

ENTERED_FROM_OUTSIDE = {
    # transformers calls these by the names that its own classes have.
    "yuan_train/hf_export",
}
CALLED_BY_LIBRARIES = {
    # torch.distributed.checkpoint's planners override these.
    "set_up_planner": 1,
    "create_local_plan": 1,
}


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if "types" not in path.parts)


@pytest.mark.parametrize("path", sources("yuan_train"), ids=lambda path: str(path.relative_to(ROOT)))
def test_files_stay_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_lines_of_docs_fit_a_screen(path: Path) -> None:
    long = [i for i, line in enumerate(path.read_text().splitlines(), 1) if len(line) > MAX_DOC_COLUMNS]
    assert not long, f"lines {long} are longer than {MAX_DOC_COLUMNS} characters"


def public_definitions(path: Path) -> Iterator[str]:
    """Names of the public functions, classes and methods of a file."""
    tree = ast.parse(path.read_text())
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node.name
        for inner in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(inner, ast.FunctionDef) and not inner.name.startswith("_"):
                yield inner.name


def words_of(path: Path) -> Counter[str]:
    """The words of a file, its docstrings and comments left out."""
    text = path.read_text()
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            value = body[0].value
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                value.value = ""
    return Counter(WORD.findall(ast.unparse(tree)))


def test_every_public_name_is_used_outside_tests_or_shown_in_docs() -> None:
    used: Counter[str] = Counter()
    for path in sources("yuan_train", "kernels", "tools"):
        used += words_of(path)
    used.update(CALLED_BY_LIBRARIES)
    shown = set(WORD.findall("\n".join(path.read_text() for path in DOCS)))
    dead = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sources("yuan_train", "kernels")
        if not any(str(path.relative_to(ROOT)).startswith(folder) for folder in ENTERED_FROM_OUTSIDE)
        for name in public_definitions(path)
        # Its own definition is one use.
        if used[name] < 2 and name not in shown
    ]
    assert not dead, "neither used outside tests nor shown in docs:\n" + "\n".join(dead)


def test_the_paths_of_a_stranger_lead_somewhere() -> None:
    """`docs/architecture.md` names, for each jump, a file and a line of it; the line must be there."""
    text = (ROOT / "docs/architecture.md").read_text()
    jumps = re.findall(r"^\d\. `([\w/]+\.py)`: `([^`]+)`", text, re.MULTILINE)
    assert len(jumps) == 10, "two paths of five jumps"
    missing = [f"{file}: {line}" for file, line in jumps if line not in (ROOT / file).read_text()]
    assert not missing


def test_files_that_the_docs_name_exist() -> None:
    names = {
        (path.name, name)
        for path in DOCS
        if path.name != "CHANGELOG.md"
        for name in re.findall(r"`((?:yuan_train|kernels|tests|configs)/[\w/.*-]+)`", path.read_text())
    }
    missing = [f"{doc}: {name}" for doc, name in sorted(names) if not any(ROOT.glob(name.rstrip("/")))]
    assert not missing, missing
