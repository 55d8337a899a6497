"""tools/launch: the commands that the scripts print (dry run) or run, with stubs for them."""

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.project import make_plan
from yuan_train.config.plan import RankPlan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.run import load_run

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "tools" / "launch").glob("*_yuan2_*.sh"))
NODES = {"big-0": 2, "big-1": 2, "small": 1}


@pytest.fixture
def plan(run_file: Path, tmp_path: Path) -> Path:
    """Five ranks on three nodes of two kinds."""
    made = make_plan(load_run(run_file), [[1, 1, 2, 1, 1]])
    devices = [f"{node}/{card}" for node, cards in NODES.items() for card in range(cards)]
    ranks = (
        RankPlan(rank=rank, device=device, type="A100-80G" if device.startswith("big") else "T4")
        for rank, device in enumerate(devices)
    )
    save_plan(tmp_path / "plan.yaml", replace(made, ranks=tuple(ranks)))
    return tmp_path / "plan.yaml"


@pytest.fixture
def stubs(tmp_path: Path) -> Path:
    """Stubs that log their calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    log = tmp_path / "calls"
    bodies = {"yuan-train": f'echo "yuan-train $*" >>{log}', "sbatch": f'echo "sbatch $*" >>{log}'}
    for name, body in bodies.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (folder / name).chmod(0o755)
    log.touch()
    return folder


def call(
    script: str, *words: object, stubs: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    path = f"{stubs}:{os.environ['PATH']}" if stubs else os.environ["PATH"]
    return subprocess.run(
        ["bash", ROOT / "tools" / "launch" / f"{script}.sh", *map(str, words)],
        capture_output=True,
        text=True,
        env=os.environ | {"PATH": path, **variables},
    )


def test_there_is_one_for_each_published_size() -> None:
    sizes = [
        f"{kind}_yuan2_{size}" for kind in ("finetune", "pretrain") for size in ("102b", "2b", "51b", "m32")
    ]
    assert [path.stem for path in SCRIPTS] == sizes


@pytest.mark.parametrize("script", [path.stem for path in SCRIPTS])
def test_plans_first_then_starts(script: str, plan: Path, tmp_path: Path) -> None:
    missing = tmp_path / "new" / "plan.yaml"
    result = call(script, "--cluster", "C.yaml", "--plan", missing, "--dry-run", "train.seed=3")
    assert result.returncode == 0, result.stderr
    kind, _, size = script.partition("_")
    own = {"finetune_yuan2_m32": "yuan2-m32-sft"}  # another length and rotary base than its pre-training
    config = f"configs/run/{own.get(script, size.replace('_', '-'))}.yaml"
    assert f"+ yuan-train plan --cluster C.yaml --config {config} --out {missing} " in result.stdout
    assert "train.seed=3" in result.stdout and not missing.parent.exists()
    result = call(script, "--plan", plan, "--dry-run", "train.seed=3")
    (line,) = result.stdout.splitlines()
    words = shlex.split(line.removeprefix("+ "))
    wanted = ["yuan-train", "launch", "--config", config, "--plan", str(plan), "--this-node", "all"]
    assert words[: len(wanted)] == wanted and words[-1] == "train.seed=3"
    assert ("data.loss_after_separator=true" in words) == (kind == "finetune")
    assert ("data.fim_rate=0.5" in words) == (kind == "pretrain")
    # The overrides of the script must give a valid run.
    keys = tuple(word for word in words[len(wanted) :])
    run = load_run(ROOT / config, keys)
    assert run.train.seed == 3 and run.checkpoint.resume == "auto"


def test_starting_from_an_imported_model(run_file: Path, plan: Path) -> None:
    corpus = run_file.parent / "corpus"
    words = ("--plan", plan, "--dry-run", "--data", corpus, "--tokenizer", "data/yuan", "--epochs", 4)
    result = call("finetune_yuan2_2b", *words, "--from", "runs/imported", "train.global_batch_size=2")
    assert result.returncode == 0, result.stderr
    printed = shlex.split(result.stdout.removeprefix("+ "))
    assert "checkpoint.resume=runs/imported" in printed and "data.tokenizer=data/yuan" in printed
    assert f"data.train=[{{prefix: {corpus}}}]" in printed
    tokens = 4 * (corpus.with_suffix(".bin").stat().st_size // 2)
    assert f"train.steps={round(tokens / (2 * 4096))}" in printed


def test_over_ssh_the_command_of_all_machines_is_called(plan: Path, stubs: Path, tmp_path: Path) -> None:
    words = ("--plan", plan, "--hostfile", tmp_path / "hosts")
    result = call("pretrain_yuan2_2b", *words, "--dry-run", stubs=stubs)
    assert result.returncode == 0 and (tmp_path / "calls").read_text() == ""
    result = call("pretrain_yuan2_2b", *words, "data.train=[{prefix: a b}]", stubs=stubs)
    assert result.returncode == 0, result.stderr
    (line,) = (tmp_path / "calls").read_text().splitlines()
    assert line.startswith("yuan-train launch --config configs/run/yuan2-2b.yaml --plan ")
    assert f"--hostfile {tmp_path / 'hosts'} " in line and line.endswith("data.train=[{prefix: a b}]")


def test_a_batch_job_is_what_launch_prints(plan: Path, stubs: Path, tmp_path: Path) -> None:
    words = ("--plan", plan, "--slurm", "--sbatch", "--partition=gpu --time=1:00", "--dry-run")
    result = call("pretrain_yuan2_2b", *words, stubs=stubs)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("+ sbatch runs/yuan2-2b/job.sbatch")
    (line,) = (tmp_path / "calls").read_text().splitlines()
    assert line.startswith("yuan-train launch --slurm --print --sbatch=--partition=gpu --time=1:00 --config")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--plan", "/nowhere/plan.yaml"), "does not exist: give --cluster FILE"),
        (("--bogus",), "unknown option --bogus"),
        (("word",), "word: wanted key=value"),
        (("--plan",), "--plan: wanted a value"),
        (("--plan", "/x", "--epochs", "3"), "--epochs: needs --data PREFIX"),
    ],
)
def test_wrong_arguments(words: tuple[str, ...], message: str) -> None:
    result = call("pretrain_yuan2_102b", "--dry-run", *words)
    assert result.returncode == 2 and message in result.stderr


def test_help() -> None:
    result = call("finetune_yuan2_102b", "--help")
    assert (
        result.returncode == 0
        and "--hostfile FILE" in result.stdout
        and "sourced" not in result.stdout.lower()
    )
