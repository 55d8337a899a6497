"""How the compiled core is built, and that it reads and writes nothing but its own memory."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import random
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.planner.native.test_price import random_problem
from yuan_train.config.errors import ConfigError
from yuan_train.config.run import SearchConfig
from yuan_train.planner.native import core, library
from yuan_train.planner.search.search import search_plan

ROOT = Path(__file__).parents[3]
RANDOM_PLANS = """
import ctypes, random, sys
from tests.planner.native import test_price, test_prove
from yuan_train.planner.native import core

core.load_library = lambda: ctypes.CDLL(sys.argv[1])
draw = random.Random(1)
for _ in range(150):
    name, stages, count = draw.choice(core.NAMES), draw.randint(1, 8), draw.randint(1, 40)
    wide = draw.randint(1, stages)
    if name in ("interleaved_1f1b", "zero_bubble") and draw.random() < 0.5:
        workers = tuple((s % wide,) for s in range(stages))
    else:
        replicas = [draw.choice((1, 1, 2, 3)) for _ in range(stages)]
        numbers = iter(range(sum(replicas)))
        workers = tuple(tuple(next(numbers) for _ in range(n)) for n in replicas)
    times = [[draw.random() for _ in range(n)] for n in (stages, stages, stages, stages - 1, stages - 1)]
    made = core.native_schedule(name, workers, count, None)
    made.operations(), made.held
    core.run_schedule(made, times, blocking=draw.random() < 0.5)
    depths = tuple(sorted((draw.randint(1, 12) for _ in range(stages)), reverse=True))
    core.run_rounds(depths, draw.choice((count, 10 * count)), times)
test_price.test_the_core_prices_a_step_as_it_is_defined(0)
test_price.test_profiles_and_other_libraries_are_priced_as_defined(100)
test_price.test_profiles_and_other_libraries_are_priced_as_defined(101)
test_price.test_found_drafts_are_lawful_plans_of_the_price_they_say(1, 0b1111, True, 24, None)
test_price.test_found_drafts_are_lawful_plans_of_the_price_they_say(7, 0b1001, False, 24, 0.15)
for schedule in ("1f1b", "gpipe", "zero_bubble"):
    test_prove.test_what_is_proven_is_the_fastest_of_all(1, schedule)
print("done")
"""
PLAINLY = ("-O0",)
"""A compiler is five times as fast with it, and of what is built little is run."""


@pytest.mark.skipif(
    shutil.which("gcc") is None or not sys.platform.startswith("linux"), reason="needs gcc's sanitizers"
)
def test_sanitizers_find_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "gcc")
    flags = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    built = library.build(tmp_path, flags=(*PLAINLY, *flags))
    runtime = subprocess.run(
        ["gcc", "-print-file-name=libasan.so"], capture_output=True, text=True, check=True
    ).stdout.strip()
    environment = {**os.environ, "LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    ran = subprocess.run(
        [sys.executable, "-c", RANDOM_PLANS, str(built)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        cwd=ROOT,
    )
    assert ran.returncode == 0 and ran.stdout.strip() == "done", ran.stderr[-3000:]


def test_without_a_compiler_it_is_said_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(library.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no compiler.*apt-get install gcc; anywhere: pip install ziglang"):
        library.load_library.__wrapped__()


@pytest.mark.slow
def test_where_there_is_no_compiler_the_package_ziglang_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build step of an installation, on a PATH that holds nothing; the core then finds the same plan."""
    pytest.importorskip("ziglang")
    pytest.importorskip("setuptools", minversion="77")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path), "--build-temp"]
    ran = subprocess.run(
        [*command, str(tmp_path / "temp")], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    (built,) = tmp_path.glob("yuan_train/planner/native/core-*.so")
    assert built.name == library.library_name()
    problem, search = random_problem(random.Random(3)), SearchConfig(effort="quick", time_limit=600.0)
    own = search_plan(problem, search, micro_batch_size=1, thorough=False).best.plan
    monkeypatch.setattr(core, "load_library", lambda: ctypes.CDLL(str(built)))
    assert search_plan(problem, search, micro_batch_size=1, thorough=False).best.plan == own


def test_an_installation_asks_for_ziglang_only_where_there_is_no_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("setuptools", minversion="77")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # as in the environment of a build
    backend = runpy.run_path(str(ROOT / "tools/packaging/build_backend.py"))
    monkeypatch.setenv("CC", sys.executable)
    assert backend["_compiler"]() == []
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert backend["_compiler"]() == [backend["COMPILER"]]


def test_a_changed_source_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for path in library.sources():
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(library, "FOLDER", tmp_path)
    first = library.build(tmp_path, flags=PLAINLY)
    assert library.library_name() == first.name
    with (tmp_path / "rounds.c").open("a") as file:
        file.write("/* changed */\n")
    second = library.build(tmp_path, flags=PLAINLY)
    assert second.name != first.name
    assert [path.name for path in tmp_path.glob("*.so")] == [second.name]
    (tmp_path / "rounds.c").write_text("no C\n")
    with pytest.raises(RuntimeError, match="could not compile the planner's core"):
        library.build(tmp_path, flags=PLAINLY)
    assert [path.name for path in tmp_path.glob("*.so")] == [second.name]
