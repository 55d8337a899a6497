"""The structure as a reader meets it: sizes of files, nothing dead, docs that name what is there."""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCS = sorted([*ROOT.glob("docs/*.md"), *ROOT.glob("*.md")])
MAX_FUNCTION_LINES = 60
MAX_DOC_COLUMNS = 120
LONGER_FUNCTIONS = {
    # transformers' own form: every key of the configuration is an argument.
    "yuan_train/hf_export/configuration_yuan.py: __init__": 73
}
"""What is longer today, and how long it may be at most: these numbers only fall."""
MAX_PARAMETERS = 7
MORE_PARAMETERS = {
    # transformers' own form: every key of the configuration is an argument.
    "yuan_train/hf_export/configuration_yuan.py: __init__": 32,
    "yuan_train/hf_export/modeling_yuan.py: forward": 9,
}
"""What takes more today, besides self and cls: these numbers only fall."""
ROOMS = {
    "checkpoint": (7, 3027),  # which one a run begins with, which train asked
    "cli": (29, 7411),  # a terminal view of a run, and its cluster; a variable that is wrong is refused
    "config": (14, 6397),  # experts that a rank holds, asked of a plan
    "data": (7, 3086),  # what is no text is named; bytes of pieces
    "estimate": (3, 998),  # What `estimate` counts left the planner, which does not ask for it.
    "hf_export": (3, 632),
    "machine": (2, 691),
    "megatron": (4, 1117),
    "models": (11, 3403),
    "objectives": (2, 196),
    "parallel": (17, 7555),  # directories that a run has for itself
    "planner": (35, 11964),  # few cards searched again, and even splits of the whole batch
    "profile": (5, 1388),
    "report": (5, 1730),  # cards with their state, plans over time, logs that grow
    "rl": (15, 7209),  # environments of what servers draw: a request a turn
    "schedule": (7, 2094),  # what makes programs is a value; programs with copies, which the planner had
    "serve": (5, 1763),  # what is reset at document ends goes with the weights
    "supervise": (4, 2004),  # rounds without a meeting, seats, leases, wrong input of who comes
    "train": (13, 6468),  # it is noted how long a rank stood still
}
"""The most files and lines of each folder: these numbers only fall. A folder in which
something new is built has room for it; whoever is done takes back what is left."""
WORD = re.compile(r"[A-Za-z_]\w*")

ENTERED_FROM_OUTSIDE = {
    # transformers calls these by the names that its own classes have.
    "yuan_train/hf_export"
}
CALLED_BY_LIBRARIES = {
    # torch.distributed.checkpoint's planners override these.
    "set_up_planner": 1,
    "create_local_plan": 1,
}

OPTIONAL = {"pyarrow", "triton", "fastapi", "starlette", "uvicorn", "huggingface_hub"}
"""Packages that are imported where they are used, with something to fall back on or a message."""
MODULES = {
    "PyYAML": ["yaml"],
    "annotated-types": ["annotated_types"],
    "pydantic": ["pydantic", "pydantic_core"],
}
"""What a package is imported as, where that is not its name alone."""


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if "types" not in path.parts)


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Names and lines of the functions of a file, those inside of others too."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            assert node.end_lineno is not None
            yield node.name, node.end_lineno - node.lineno + 1


@pytest.mark.parametrize("folder", sorted(ROOT.glob("yuan_train/*/")), ids=lambda folder: folder.name)
def test_functions_stay_short(folder: Path) -> None:
    """A file ends where its thought ends, a function where a reader's memory does."""
    long = [
        f"{name}: {lines} lines"
        for path in sorted(folder.rglob("*.py"))
        for own, lines in functions(path)
        for name in [f"{path.relative_to(ROOT)}: {own}"]
        if lines > LONGER_FUNCTIONS.get(name, MAX_FUNCTION_LINES)
    ]
    assert not long


def test_functions_take_few_parameters() -> None:
    """What belongs together is handed on as one value."""
    many = []
    for path in sources("yuan_train"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            own = node.args.posonlyargs + node.args.args + node.args.kwonlyargs
            count = sum(argument.arg not in ("self", "cls") for argument in own)
            name = f"{path.relative_to(ROOT)}: {node.name}"
            if count > MORE_PARAMETERS.get(name, MAX_PARAMETERS):
                many.append(f"{name}: {count} parameters")
    assert not many


def test_a_public_class_has_a_name_of_its_own() -> None:
    """A reader who searches for a name finds one meaning."""
    found: Counter[str] = Counter(
        node.name
        for path in sources("yuan_train")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in found.items() if count > 1] == []


@pytest.mark.parametrize("folder", ROOMS)
def test_rooms_do_not_grow(folder: str) -> None:
    """Before a room gets larger, look for the mechanism in it that should carry what is new."""
    files = list(sources(f"yuan_train/{folder}"))
    lines = sum(len(path.read_text().splitlines()) for path in files)
    most_files, most_lines = ROOMS[folder]
    assert len(files) <= most_files and lines <= most_lines, f"{len(files)} files of {lines} lines"


def test_every_room_is_counted() -> None:
    rooms = {path.parent.name for path in ROOT.glob("yuan_train/*/*.py")}
    assert rooms == {*ROOMS}


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
    used: Counter[str] = Counter(CALLED_BY_LIBRARIES)
    for path in sources("yuan_train", "kernels", "tools"):
        used.update(words_of(path))
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


def setup_lists() -> tuple[set[str], dict[str, set[str]]]:
    """What setup.py requires, and each extra's packages, by name alone."""
    call = next(
        node.value
        for node in ast.parse((ROOT / "setup.py").read_text()).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    given = {word.arg: word.value for word in call.keywords}

    def names(value: ast.expr) -> set[str]:
        return {re.split(r"[<>=!; ]", text)[0] for text in ast.literal_eval(value)}

    extras = given["extras_require"]
    assert isinstance(extras, ast.Dict)
    found = {
        ast.literal_eval(key): names(value)
        for key, value in zip(extras.keys, extras.values, strict=True)
        if key
    }
    return names(given["install_requires"]), found


def test_a_package_that_is_imported_is_required_or_named_optional() -> None:
    """The quick start installs what is required and nothing else; each command must run with that."""
    imported = {
        name.partition(".")[0]
        for path in sources("yuan_train", "kernels")
        if not any(str(path.relative_to(ROOT)).startswith(folder) for folder in ENTERED_FROM_OUTSIDE)
        for node in ast.walk(ast.parse(path.read_text()))
        for name in (
            [alias.name for alias in node.names]
            if isinstance(node, ast.Import)
            else [node.module]
            if isinstance(node, ast.ImportFrom) and node.module
            else []
        )
    }
    required = {module for name in setup_lists()[0] for module in MODULES.get(name, [name])}
    foreign = imported - set(sys.stdlib_module_names) - {"yuan_train", "yuan_kernels"}
    assert foreign - required == OPTIONAL
    assert {"tokenizers", "jinja2"} <= foreign


def test_what_docs_and_messages_say_to_install_can_be_installed() -> None:
    """There is no package of our name to install from; an extra is one of setup.py."""
    extras = setup_lists()[1]
    texts = {path: path.read_text() for path in [*DOCS, *sources("yuan_train", "kernels", "tools")]}
    elsewhere = [
        str(path) for path, text in texts.items() if re.search(r"pip install ['\"]?yuan.train", text)
    ]
    assert not elsewhere
    named = {
        name
        for text in texts.values()
        for found in re.findall(r"pip install [^`\n]*'?\.\[([\w,]+)\]|extra `?\[(\w+)\]", text)
        for name in ",".join(found).strip(",").split(",")
    }
    assert {"megatron", "parquet", "report"} <= named <= set(extras)


def test_files_that_the_docs_name_exist() -> None:
    names = {
        (path.name, name)
        for path in DOCS
        if path.name != "CHANGELOG.md"
        for name in re.findall(r"`((?:yuan_train|kernels|tests|configs)/[\w/.*-]+)`", path.read_text())
    }
    missing = [f"{doc}: {name}" for doc, name in sorted(names) if not any(ROOT.glob(name.rstrip("/")))]
    assert not missing, missing


ASKS_CUDA = {
    "yuan_train/parallel/device.py",
    # Versions of what is installed, before there is a device.
    "yuan_train/train/job.py",
    # megatron-core asks it in many places; without a card the shim answers.
    "yuan_train/megatron/core.py",
    "yuan_train/megatron/model.py",
}


def test_one_module_asks_cuda() -> None:
    """What asks anywhere else runs on no fake card, so that no test sees it."""
    found = {
        str(path.relative_to(ROOT))
        for path in sources("yuan_train")
        for node in ast.walk(ast.parse(path.read_text()))
        if (isinstance(node, ast.Attribute) and node.attr == "cuda" and ast.unparse(node) == "torch.cuda")
        or (isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.cuda"))
    }
    assert found == ASKS_CUDA
