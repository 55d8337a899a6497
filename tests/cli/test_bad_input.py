"""Bad input: exit code 2, one clear message, no traceback, nothing half-written."""

import resource
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from tests.support.commands import Refuse
from tests.support.project import make_plan, run_config
from tests.support.rl import write_rl
from tests.support.spawn import free_port
from yuan_train.checkpoint.load import step_name
from yuan_train.cli import launch
from yuan_train.cli.main import main
from yuan_train.config.load import as_plain
from yuan_train.config.plan_constraints import save_plan
from yuan_train.data.indexed import IndexedWriter
from yuan_train.train import ending
from yuan_train.train.job import why_no_card

STEPS = "train.steps=2"


@pytest.fixture(scope="module")
def trained(run_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("trained") / "ck"
    code = main(
        ["train", "--config", str(run_file), STEPS, f"checkpoint.directory={folder}", "checkpoint.every=1"]
    )
    assert code == 0
    return folder


def edit_plan(run_file: Path, path: Path, change: Callable[[dict], object]) -> Path:
    """Write the plan [2, 4] with a change."""
    plan = as_plain(make_plan(run_config(run_file), [[2, 4]]))
    change(plan)
    path.write_text(yaml.safe_dump(plan, sort_keys=False))
    return path


def test_what_is_read_is_not_written_over(run_file: Path, tmp_path: Path, refuse: Refuse) -> None:
    cluster, page = tmp_path / "c.yaml", tmp_path / "x.html"
    cluster.write_text("name: c\nnodes: [{name: a, device: T4}]\n")
    words = ("plan", "--cluster", cluster, "--config", run_file)
    for out in (cluster, tmp_path / "." / ".." / tmp_path.name / "c.yaml", run_file):
        assert "wanted another file" in refuse(*words, "--out", out)
    assert f"--report: {page} is that of --out too" in refuse(*words, "--out", page, "--report", page)
    for profiles in (page, f"{tmp_path / 'a.json'},{page}"):
        assert "that of --profile too" in refuse(*words, "--profile", profiles, "--out", page)
    plan = edit_plan(run_file, tmp_path / "plan.yaml", lambda p: None)
    assert "--trace" in refuse("simulate", "--plan", plan, "--trace", plan)
    assert cluster.read_text().startswith("name: c")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda p: p["model"].update(hidden_size=64, head_dim=32), "another run"),
        (lambda p: p.update(global_batch_size=9), "take 8 sequences"),
        (lambda p: None, "2 ranks, but 1 process was started"),
    ],
    ids=["another model", "another batch", "another number of processes"],
)
def test_plans(
    change: Callable[[dict], object], expected: str, run_file: Path, tmp_path: Path, refuse: Refuse
) -> None:
    plan = edit_plan(run_file, tmp_path / "plan.yaml", change)
    assert expected in refuse("train", "--config", run_file, "--plan", plan)


@pytest.mark.parametrize(
    ("precision", "device", "usable"),
    [("bf16", "V100-32G", "fp16"), ("fp16", "Old", "fp32"), ("bf16", "Old", "fp32")],
)
def test_a_card_without_the_precision(
    precision: str, device: str, usable: str, run_file: Path, tmp_path: Path, refuse: Refuse
) -> None:
    def change(plan: dict) -> None:
        plan["ranks"][1]["type"] = device
        plan["device_types"] = {
            "Old": {"memory": "8 GiB", "fp32": "5 TFLOP/s", "memory_bandwidth": "100 GB/s"}
        }

    config = tmp_path / "run.yaml"
    config.write_text(run_file.read_text().replace("precision: fp32", f"precision: {precision}"))
    plan = edit_plan(run_file, tmp_path / "plan.yaml", change)
    message = refuse("train", "--config", config, "--plan", plan)
    assert f"train.precision: {precision}, but the plan uses card/1 ({device}) without" in message
    assert f"set train.precision: {usable}" in message


def test_a_real_card_where_there_is_none(
    run_file: Path, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank without its card would train on its processor, without a word; its peers would wait for it."""
    one = make_plan(run_config(run_file), [[6]])
    ranks = (replace(one.ranks[0], device="gpu-box/0", type="RTX-4090"),)
    save_plan(tmp_path / "plan.yaml", replace(one, ranks=ranks))
    files = ("--config", run_file, "--plan", tmp_path / "plan.yaml", f"log.directory={tmp_path / 'log'}")
    monkeypatch.setattr(launch, "has_driver", lambda: False)
    for command in ("launch", "train"):
        message = refuse(command, *files, "train.device=auto")
        assert "rank 0 (gpu-box/0: RTX-4090)" in message and "no driver" in message
        assert "train.device=cpu" in message
    # A driver that is too old, or a torch without CUDA, is found by torch.
    monkeypatch.setattr(launch, "has_driver", lambda: True)
    message = refuse("train", *files, "train.device=auto")
    assert "rank 0 (gpu-box/0)" in message and "a card of type RTX-4090" in message
    assert why_no_card() in message and "train.device=cpu" in message
    # Whoever says so gets it, and a run without a plan takes what the machine has.
    assert main(["train", *map(str, files), "train.steps=1", "validation.every=0"]) == 0
    assert main(["train", *map(str, (*files[:2], files[4])), "train.device=auto", "train.steps=1"]) == 0


def test_a_fault_of_a_rank_is_said_before_torch_is_imported(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which takes seconds, or minutes from a slow disk; only then can the others be told."""
    for name, value in {"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    said: list[str] = []
    monkeypatch.setattr(ending, "fail_together", lambda *_: said.append(capsys.readouterr().err))
    main(["train", "--config", str(run_file), "data.tokenizer=nowhere"])
    assert len(said) == 1 and said[0].count("nowhere: no tokenizer") == 1


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ("RANK=1", "RANK: 1; wanted less than WORLD_SIZE, 1; the launcher sets both: unset RANK"),
        ("RANK=2 WORLD_SIZE=2", "RANK: 2; wanted less than WORLD_SIZE, 2"),
        ("RANK=one", "RANK: wanted a number, got 'one'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=x", "MASTER_PORT: wanted 1 to 65535, got 'x'"),
        ("RANK=0 WORLD_SIZE=2 MASTER_PORT=65536", "MASTER_PORT: wanted 1 to 65535, got '65536'"),
        (
            "RANK=0 WORLD_SIZE=2 MASTER_ADDR=",
            "MASTER_ADDR is not set: start the ranks with `yuan-train launch`",
        ),
        ("RANK=0 WORLD_SIZE=2 MASTER_ADDR=nowhere.invalid", "'nowhere.invalid' is no host name here, so the"),
    ],
)
def test_variables_of_a_launcher(
    variables: str,
    expected: str,
    run_file: Path,
    tmp_path: Path,
    refuse: Refuse,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some systems set some of them for processes that are no ranks."""
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    for variable in variables.split():
        monkeypatch.setenv(*variable.split("="))
    plan = edit_plan(run_file, tmp_path / "plan.yaml", lambda p: None)
    more = ("--plan", plan) if "WORLD_SIZE" in variables else ()
    assert expected in refuse("train", "--config", run_file, *more)


@pytest.mark.parametrize("command", ["train", "rl"])
def test_ranks_without_their_cards_end_by_themselves(
    run_file: Path, tmp_path: Path, refuse: Refuse, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Where all ranks are here, each finds it before it imports torch, and nobody has to be met."""
    config = run_file if command == "train" else write_rl(tmp_path / "rl")
    plan = make_plan(run_config(run_file), [[3, 3]])
    ranks = tuple(replace(r, device=f"gpu-box/{r.rank}", type="RTX-4090") for r in plan.ranks)
    save_plan(tmp_path / "plan.yaml", replace(plan, ranks=ranks))
    for name, value in {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(launch, "has_driver", lambda: False)
    monkeypatch.setattr(ending, "fail_together", None)
    words = (command, "--config", config, "--plan", tmp_path / "plan.yaml", "train.device=auto")
    assert "rank 0 (gpu-box/0: RTX-4090), rank 1 (gpu-box/1: RTX-4090): the plan has" in refuse(*words)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("model.num_layer=4", "did you mean 'num_layers'"),
        ("data.tokenizer=/nowhere", "nowhere"),
        ("model.vocab_size=100", "has 400 pieces"),
        ("train.loss_scale={initial: 1000}", "train.loss_scale.initial: wanted a power of two, such as 512"),
        ("train.loss_scale={initial: 2, minimum: 4}", "minimum: greater than initial"),
        ("train.device=cuda", "no card"),
        ("checkpoint.resume=/nowhere", "no such directory"),
    ],
)
def test_overrides(override: str, expected: str, run_file: Path, refuse: Refuse) -> None:
    assert expected in refuse("train", "--config", run_file, override)


@pytest.mark.parametrize("seconds", ["0", "-1.5", "nan", "inf"])
def test_profile_seconds_must_be_positive_and_finite(
    seconds: str, run_file: Path, tmp_path: Path, refuse: Refuse
) -> None:
    command = ("profile", "--config", run_file, "--out", tmp_path / "profile.json")
    assert f"--seconds {seconds}: wanted" in refuse(*command, f"--seconds={seconds}")


def test_token_files(run_file: Path, tmp_path: Path, refuse: Refuse) -> None:
    prefix = run_file.parent / "corpus"
    source = "data.train=[{prefix: %s}]"
    bin_bytes, idx_bytes = (prefix.with_suffix(s).read_bytes() for s in (".bin", ".idx"))
    (tmp_path / "cut.bin").write_bytes(bin_bytes[:-10])
    (tmp_path / "cut.idx").write_bytes(idx_bytes)
    assert "bytes" in refuse("train", "--config", run_file, source % (tmp_path / "cut"))
    assert "missing" in refuse("train", "--config", run_file, source % (tmp_path / "missing"))


def test_a_token_beyond_the_vocabulary(run_file: Path, tmp_path: Path, refuse: Refuse) -> None:
    with IndexedWriter(tmp_path / "big", dtype=np.dtype("int32")) as writer:
        for _ in range(20):
            writer.add([5, 6, 7, 100_000, 8, 9] * 20)
    message = refuse("train", "--config", run_file, "data.train=[{prefix: %s}]" % (tmp_path / "big"))
    assert "100000" in message and "512" in message


def test_a_checkpoint_of_another_shape(run_file: Path, trained: Path, refuse: Refuse) -> None:
    options = ("train", "--config", run_file, f"checkpoint.directory={trained}")
    assert "num_layers 6 there, 4 here" in refuse(*options, "model.num_layers=4")


def test_a_torn_checkpoint_falls_back_to_the_one_before(
    run_file: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], refuse: Refuse
) -> None:
    copy = tmp_path / "ck"
    shutil.copytree(trained, copy)
    torn = copy / step_name(2) / "__0_0.distcp"
    torn.write_bytes(torn.read_bytes()[:1000])
    options = ["train", "--config", str(run_file), STEPS, f"checkpoint.directory={copy}"]
    assert main(options) == 0
    stderr = capsys.readouterr().err
    assert "is torn" in stderr and "after step 1" in stderr
    # A torn checkpoint that is given explicitly is refused rather than replaced.
    torn.write_bytes(torn.read_bytes()[:1000])
    assert "is torn" in refuse("generate", "--checkpoint", copy / step_name(2), "--prompt", "the")
    assert main(["inspect", str(copy / step_name(2))]) == 2


def test_a_full_disk_keeps_the_old_checkpoint(
    run_file: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "ck"
    shutil.copytree(trained, copy)
    options = ["train", "--config", str(run_file), "train.steps=3", f"checkpoint.directory={copy}"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        assert main(options) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    stderr = capsys.readouterr().err
    assert "cannot be written" in stderr and "Traceback" not in stderr
    assert sorted(path.name for path in copy.iterdir()) == ["latest", step_name(1), step_name(2)]
    assert main(options) == 0
    assert "after step 2" in capsys.readouterr().err


def test_a_second_engine_that_is_not_installed_or_cannot_run_the_plan(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        # Another test may have imported parts of it.
        for name in list(sys.modules):
            if name.startswith(("megatron.", "yuan_train.megatron.")):
                patch.delitem(sys.modules, name)
        patch.setitem(sys.modules, "megatron", None)
        assert main(["train", "--config", str(run_file), STEPS, "engine=megatron"]) == 2
    assert "pip install -e '.[megatron]' in the checkout, or use engine: yuan" in capsys.readouterr().err
    plan = make_plan(run_config(run_file), [[2, 4], [3, 3]], recompute="selective")
    save_plan(tmp_path / "plan.yaml", plan)
    words = ["--config", str(run_file), "--plan", str(tmp_path / "plan.yaml")]
    assert main(["launch", *words, "--engine", "megatron", "--print"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert [("cut unlike" in line, "selective" in line, "use engine: yuan" in line) for line in lines] == [
        (True, False, False),
        (False, True, False),
        (False, False, True),
    ]
    assert main(["launch", *words, "--engine", "yuan", "--print"]) == 0
    assert "engine=yuan" in capsys.readouterr().out
