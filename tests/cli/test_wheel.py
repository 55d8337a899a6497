"""The wheel: built, installed and used from an empty folder, it has what a checkout has by name."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("configs", "kernels", "tools/packaging", "yuan_train", "README.md", "pyproject.toml", "setup.py")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package is installed in."""
    pytest.importorskip("setuptools", minversion="77")
    source, wheels, target = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "target"))
    for name in PARTS:
        place = source / name
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, place, ignore=shutil.ignore_patterns("__pycache__", "*.so", ".build-*")
            )
        else:
            shutil.copy(ROOT / name, place)
    # The core is built five times as fast without optimisation, and little of it is run.
    compiler = source / "plain-cc"
    compiler.write_text('#!/bin/sh\nexec cc "$@" -O0\n')
    compiler.chmod(0o755)
    more = {"CC": str(compiler)} if shutil.which("cc") else {}
    words = ("-q", "--no-deps", "--no-build-isolation", "-w", str(wheels), str(source))
    run("-m", "pip", "wheel", *words, folder=None, path=None, **more)
    (wheel,) = wheels.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("model/qwen2.5-1.5b.yaml", "cluster/rtx-mix.yaml", "init/grpo.yaml", "schema/run.json"):
        assert f"yuan_train/configs/{name}" in names
    run("-m", "pip", "install", "-q", "--no-deps", "--target", str(target), str(wheel))
    return target


def run(*words: str, folder: Path | None = None, path: Path | None = None, **more: str) -> str:
    """What Python prints, run in a folder with the modules of another, and `more` variables."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | more
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    done = subprocess.run(
        [sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_an_installed_package_has_models_clusters_and_files_by_name(installed: Path, tmp_path: Path) -> None:
    def command(*words: str) -> str:
        return run("-m", "yuan_train", *words, folder=tmp_path, path=installed)

    where = run("-c", "import yuan_train; print(yuan_train.__file__)", folder=tmp_path, path=installed)
    assert Path(where.strip()).is_relative_to(installed)
    quick = ("search.effort=quick", "data.sequence_length=1024", "train.precision=fp16")
    text = command("plan", "--cluster", "rtx-mix", "--model", "qwen2.5-1.5b", *quick, "--out", "plan.yaml")
    assert "Plan: " in text and (tmp_path / "plan.yaml").is_file()
    command("init", "pretrain")
    first = (tmp_path / "pretrain.yaml").read_text().splitlines()[0]
    schema = Path(first.partition("$schema=")[2])
    assert schema.is_file() and schema.is_relative_to(installed.resolve())
    assert "qwen2.5-0.5b" in command("inspect", "pretrain.yaml")
    assert "optimizer.learning_rate" in command("keys", "run", "optimizer")
