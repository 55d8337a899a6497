"""What `docs/architecture.md` says that additions look like: each diff fits the tree, what it adds works."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/architecture.md").read_text()
DIFFS = re.findall(r"^```diff\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
MOST_FILES = 2
"""Of an addition: what takes more lives in too many places."""

USE = """
import torch
from pathlib import Path
from types import SimpleNamespace
from yuan_kernels import ops
from yuan_train.config.model import load_model
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.objectives.losses import preference_loss
from yuan_train.schedule.check import check_schedule
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import one_worker_each
from yuan_train.train.metrics import OPENERS

keys = ("architecture=mine", "attention=plain", "qkv_bias=true", "num_layers=2", "vocab_size=64")
model = load_model("tiny", keys)
part = Transformer(model)
init_weights(part, seed=0)
tokens = torch.arange(8).view(1, 8)
part.loss(part(tokens), tokens).backward()
assert part.layers["0"].attention.query.bias.grad.any()

assert ops.squared_relu(torch.tensor([-1.0, 2.0])).tolist() == [0.0, 4.0]

workers = one_worker_each(3)
programs = make_schedule("in_turn", num_micro_batches=4, workers=one_worker_each(3))
check_schedule(programs, workers)
kinds = [step.kind for step in programs[0] if step.is_compute]
assert kinds == ["forward", "backward"] * 4

assert preference_loss(torch.tensor([5.0, 20.0]), beta=0.1, loss="hinge").tolist() == [0.5, 0.0]

tracker = OPENERS["lines"](SimpleNamespace(directory=Path(".")))
tracker.write(3, {"loss": 2.5})
tracker.close()
assert Path("figures.jsonl").read_text() == '{"step": 3, "loss": 2.5}\\n'
"""


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources with all additions."""
    folder = tmp_path_factory.mktemp("tree")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    for name in ("yuan_train", "kernels", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    (folder / "yuan_kernels").symlink_to("kernels")
    for diff in DIFFS:
        done = subprocess.run(
            ["git", "apply", "-"], input=diff, cwd=folder, capture_output=True, text=True, env=alone()
        )
        assert done.returncode == 0, f"{done.stderr}\n{diff}"
    return folder


def alone(**more: str) -> dict[str, str]:
    """The environment, without the repository that the test itself may run in."""
    return {name: value for name, value in os.environ.items() if not name.startswith("GIT_")} | more


def test_there_is_one_of_each_kind() -> None:
    assert len(DIFFS) == 7
    assert all(diff.count("\n+++ ") <= MOST_FILES for diff in DIFFS)


def test_what_they_add_works(tree: Path) -> None:
    environment = alone(PYTHONPATH=str(tree), OMP_NUM_THREADS="1")
    for words in (["-c", USE], ["-m", "yuan_train", "count", "tiny"]):
        done = subprocess.run(
            [sys.executable, *words], cwd=tree, env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
    assert done.stdout == "2,297,344\n"


def test_the_move_compiles(tree: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no compiler")
    words = [compiler, "-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only", "moves.c"]
    folder = tree / "yuan_train/planner/native"
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    table = re.search(r"\} MOVES\[\] = \{(.*?)\};", (folder / "moves.c").read_text(), re.DOTALL)
    assert table is not None and sum(map(int, re.findall(r"\{(\d+),", table[1]))) == 100


def test_twenty_questions_have_an_answer() -> None:
    rows = re.findall(r"^\| .+\? \| `([\w/.]+)`: `([^`]+)` \|$", PAGE, re.MULTILINE)
    assert len(rows) >= 20
    assert not [f"{file}: {text}" for file, text in rows if text not in (ROOT / file).read_text()]
