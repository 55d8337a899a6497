"""Who may import whom: reads the imports of every file, and runs none of them."""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGINE = {"torch", "yuan_kernels"}

BELOW_TRAIN = {"config", "schedule", "yuan_kernels", "models", "data", "objectives", "parallel", "checkpoint"}
MAY_IMPORT = {
    "config": set[str](),
    "schedule": set[str](),
    "report": {"config"},
    "planner": {"config", "schedule", "report"},
    "estimate": {"config", "planner"},
    "machine": {"config"},
    "models": {"config", "yuan_kernels"},
    "data": {"config"},
    "objectives": {"config"},
    "parallel": {"config", "schedule", "yuan_kernels"},
    "checkpoint": {"config", "models", "parallel"},
    "train": BELOW_TRAIN,
    "megatron": {"config", "yuan_kernels", "models", "data", "parallel", "checkpoint", "train"},
    "rl": {"config", "schedule", "models", "data", "objectives", "parallel", "checkpoint", "train"},
    "profile": BELOW_TRAIN | {"train", "rl", "planner"},
    "serve": {"config", "models", "data", "parallel", "checkpoint", "train", "rl"},
    "supervise": {"config", "report", "checkpoint", "parallel", "train"},
    "cli": BELOW_TRAIN
    | {"train", "rl", "megatron", "profile", "serve", "supervise"}
    | {"machine", "report", "planner", "estimate"},
}
"""Folders of ours that each folder may import, besides itself; lower floors stand first."""

NEVER = {
    "config": ENGINE,
    "machine": ENGINE,
    "schedule": ENGINE | {"yaml", "pydantic", "numpy"},
    "planner": ENGINE,
    "estimate": ENGINE,
    "report": ENGINE,
    "data": ENGINE,
    "models": {"torch.distributed"},
    "objectives": {"torch.distributed"},
    "kernels": {"torch.distributed", "yuan_train"},
}
"""Modules that a folder never imports, wherever in a file."""

PLANNER_FLOORS = ("native", "costs", "evaluate", "search", "roles", "report")
"""Folders of the planner; each may import those before it."""

PYDANTIC = {"config/load.py", "config/units.py", "serve/protocol.py"}
# Its parser alone: a third of the time of the standard library's.
PYDANTIC |= {"report/lines.py"}
PLANNER = {"cli/plan.py", "cli/simulate.py", "cli/trace.py", "cli/supervise.py", "profile/of_run.py"}
PLANNER |= {"estimate/memory.py"}
CHECKPOINT_OF_PARALLEL = {"yuan_train.parallel.shard"}


@dataclass(frozen=True)
class Import:
    """One import: `module` as far as it can be told, and whether only a type checker sees it."""

    file: str
    line: int
    module: str
    typing_only: bool

    @property
    def folder(self) -> str:
        """The folder of ours that holds the importing file."""
        return self.file.partition("/")[0]

    @property
    def target(self) -> str | None:
        """The folder of ours that is imported; None for anybody else's module."""
        parts = self.module.split(".")
        if parts[0] == "yuan_kernels":
            return "yuan_kernels"
        return parts[1] if parts[0] == "yuan_train" and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: imports {self.module}"


def imports_of(path: Path, *, file: str, package: str) -> Iterator[Import]:
    """Every import of a file, also those inside functions. `from a import b` may import a module a.b."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    hidden = {
        id(inner)
        for node in nodes
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in nodes:
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            names = [f"{module}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(file, node.lineno, name, id(node) in hidden)  # type: ignore[attr-defined]


@functools.cache
def imports() -> list[Import]:
    """Of the package and the kernels, once a test asks for them: each worker reads this file."""
    found: list[Import] = []
    for top, name in (("yuan_train", "yuan_train"), ("kernels", "yuan_kernels")):
        for path in sorted((ROOT / top).rglob("*.py")):
            file = (
                path.relative_to(ROOT / "yuan_train").as_posix()
                if top == "yuan_train"
                else f"kernels/{path.name}"
            )
            package = ".".join([name, *path.parent.relative_to(ROOT / top).parts])
            found += imports_of(path, file=file, package=package)
    return found


def refused(wrong: list[Import]) -> None:
    assert not wrong, "\n".join(map(str, wrong))


def within(module: str, names: set[str]) -> bool:
    return any(module == name or module.startswith(f"{name}.") for name in names)


def test_there_is_something_to_look_at() -> None:
    assert len(imports()) > 100
    assert {"config", "schedule", "cli", "kernels"} <= {item.folder for item in imports()}
    assert set(MAY_IMPORT) == {
        path.name for path in (ROOT / "yuan_train").iterdir() if (path / "__init__.py").exists()
    }


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_a_folder_imports_only_floors_below_it(folder: str) -> None:
    allowed = MAY_IMPORT[folder] | {folder, "__version__"}
    refused([i for i in imports() if i.folder == folder and i.target is not None and i.target not in allowed])


@pytest.mark.parametrize("folder", NEVER)
def test_a_folder_never_imports(folder: str) -> None:
    refused([i for i in imports() if i.folder == folder and within(i.module, NEVER[folder])])


@pytest.mark.parametrize("floor", range(len(PLANNER_FLOORS)))
def test_a_folder_of_the_planner_imports_only_floors_below_it(floor: int) -> None:
    folder, below = PLANNER_FLOORS[floor], PLANNER_FLOORS[: floor + 1]
    own = [i for i in imports() if i.file.startswith(f"planner/{folder}/") and i.target == "planner"]
    assert own or folder == "native", "there is something to look at"
    refused([i for i in own if i.module.split(".")[2] not in below])


def test_the_planner_has_no_rooms_but_its_floors() -> None:
    planner = ROOT / "yuan_train/planner"
    rooms = {path.name for path in planner.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert rooms == set(PLANNER_FLOORS)
    assert [path.name for path in planner.glob("*.py")] == ["__init__.py"]


def test_kernels_are_entered_by_their_ops_alone() -> None:
    outside = [i for i in imports() if i.target == "yuan_kernels" and i.folder != "kernels"]
    refused([i for i in outside if not within(i.module, {"yuan_kernels.ops"})])


def test_checkpoints_know_parallel_by_its_shards_alone() -> None:
    entered = [i for i in imports() if i.folder == "checkpoint" and i.target == "parallel"]
    refused([i for i in entered if not within(i.module, CHECKPOINT_OF_PARALLEL)])


def test_pydantic_stays_at_the_edge() -> None:
    refused(
        [i for i in imports() if within(i.module, {"pydantic", "pydantic_core"}) and i.file not in PYDANTIC]
    )


def test_pydantic_is_imported_lazily() -> None:
    loaded = "import sys, yuan_train.config.run, yuan_train.config.plan; print(sorted(sys.modules))"
    modules = subprocess.run(
        [sys.executable, "-c", loaded], capture_output=True, text=True, check=True
    ).stdout
    assert "'pydantic'" not in modules
    assert "'yuan_train.config.load'" in modules


def test_few_commands_plan_or_simulate() -> None:
    refused(
        [i for i in imports() if i.target == "planner" and i.folder != "planner" and i.file not in PLANNER]
    )


def test_only_train_reaches_the_second_engine() -> None:
    inside = [i for i in imports() if i.folder == "megatron" and within(i.module, {"yuan_train.megatron"})]
    entered = [i for i in imports() if i.target == "megatron" and i.folder != "megatron"]
    assert inside and {i.file for i in entered} == {"cli/train.py"}
    refused([i for i in imports() if within(i.module, {"megatron"})])


def test_nobody_imports_the_command_line() -> None:
    refused([i for i in imports() if i.target == "cli" and i.folder not in ("cli", "__main__.py")])


def test_nobody_imports_tools_or_tests() -> None:
    refused([i for i in imports() if within(i.module, {"tools", "tests", "kernels"})])


def test_no_circles_between_folders() -> None:
    arrows = {
        folder: {i.target for i in imports() if i.folder == folder and i.target} for folder in MAY_IMPORT
    }
    below: set[str] = {"yuan_kernels"}
    waiting = set(MAY_IMPORT)
    while waiting:
        free = {folder for folder in waiting if arrows[folder] - {folder, "__version__"} <= below}
        assert free, f"these folders import each other: {sorted(waiting)}"
        below |= free
        waiting -= free


def module_arrows(*, types: bool = False) -> dict[str, set[str]]:
    """For each module of ours the modules of ours that it imports; `types`: those for a type checker too."""
    files = {
        path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".")
        for path in ROOT.glob("yuan_train/**/*.py")
    }
    arrows: dict[str, set[str]] = {file: set() for file in files}
    for item in imports():
        if (item.typing_only and not types) or item.folder == "kernels":
            continue
        source = "yuan_train." + item.file.removesuffix(".py").replace("/", ".")
        module = item.module if item.module in files else item.module.rpartition(".")[0]
        if module in files and module != source:
            arrows[source].add(module)
    return arrows


def test_no_circles_between_files() -> None:
    arrows = module_arrows(types=True)
    files = set(arrows)
    done: set[str] = set()
    while waiting := files - done:
        free = {file for file in waiting if arrows[file] <= done}
        assert free, f"these files import each other: {sorted(waiting)}"
        done |= free


def test_a_module_with_one_importer_says_why_it_stands_alone() -> None:
    """Except commands, architectures and exported files, which are found by their names, and programs."""
    importers = Counter(itertools.chain(*module_arrows(types=True).values()))
    silent = []
    for module in (module for module, count in importers.items() if count == 1):
        path = (ROOT / module.replace(".", "/")).with_suffix(".py")
        if path.exists() and path.parts[-2] not in ("cli", "architectures", "hf_export"):
            text = path.read_text()
            words = " ".join((ast.get_docstring(ast.parse(text)) or "").split())
            if "It stands alone because" not in words and '__name__ == "__main__"' not in text:
                silent.append(module)
    assert not silent


def test_light_commands_do_without_torch(tmp_path: Path) -> None:
    """One after another in a process; to print help none needs numpy or pydantic either."""
    plan = tmp_path / "plan.yaml"
    commands = [
        *("--help", "plan --help", "simulate --help", "inspect --help", "inspect configs/run/tiny.yaml"),
        "estimate --model Qwen2.5-0.5B --json",
        f"plan --cluster laptop --config configs/run/tiny.yaml search.effort=quick --out {plan}",
        f"simulate --plan {plan}",
    ]
    look = (
        "import sys; from yuan_train.cli.main import main; HEAVY = 'torch', 'numpy', 'pydantic', 'rich'\n"
        "for words in sys.argv[1:]:\n"
        "    code = main(words.split())\n"
        "    print(code, *(name for name in HEAVY if name in sys.modules), words, sep='|', file=sys.stderr)"
    )
    ran = subprocess.run([sys.executable, "-c", look, *commands], capture_output=True, text=True, cwd=ROOT)
    told = [line for line in ran.stderr.splitlines() if line.endswith(tuple(commands))]
    assert len(told) == len(commands), ran.stderr
    for line in told:
        assert line.startswith("0|") and "torch" not in line, line
        assert line.startswith(f"0|{line.rpartition('|')[2]}") or "--help" not in line, line


def test_the_reader_of_imports(tmp_path: Path) -> None:
    path = tmp_path / "file.py"
    path.write_text(
        "import torch.nn as nn\nfrom yuan_train.config import plan\n"
        "from . import load\nfrom ..schedule.step import Step\n"
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import yuan_train.cli\n"
        "def f():\n    import yuan_kernels.ops\n"
    )
    found = list(imports_of(path, file="models/file.py", package="yuan_train.models"))
    assert {i.module: i.target for i in found} == {
        "torch.nn": None,
        "yuan_train.config.plan": "config",
        "yuan_train.models.load": "models",
        "yuan_train.schedule.step.Step": "schedule",
        "typing.TYPE_CHECKING": None,
        "yuan_train.cli": "cli",
        "yuan_kernels.ops": "yuan_kernels",
    }
    assert [i.module for i in found if i.typing_only] == ["yuan_train.cli"]


def test_no_room_of_the_search_knows_more_than_six_others() -> None:
    folder = "yuan_train/planner/search"
    known = {
        path.stem: set(re.findall(r"^from yuan_train\.planner\.search\.(\w+) import", path.read_text(), re.M))
        for path in sorted((ROOT / folder).glob("*.py"))
    }
    assert {name: rooms for name, rooms in known.items() if len(rooms) > 6} == {}
