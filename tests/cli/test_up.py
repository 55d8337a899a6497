"""`up`: which commands it types, what it makes of names of models and data, and what it keeps."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.cases import table
from tests.support.commands import Refuse
from tests.support.hosts import Machines
from tests.support.project import MODEL, WORDS
from tests.support.spawn import free_port
from yuan_train.cli import up
from yuan_train.cli.main import main
from yuan_train.cli.up import find_aim, run_text
from yuan_train.config.cluster import load_cluster
from yuan_train.config.model import load_model
from yuan_train.config.run import load_run
from yuan_train.data.indexed import preprocess
from yuan_train.data.tokenizer import train_tokenizer

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_attention_heads": 2, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 400,
    "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip
CLUSTER = """\
name: two
nodes:
  - {name: a, device: KIND-A, devices: 1, network: {bandwidth: 1 Gb/s, latency: 100 us}}
  - {name: b, device: KIND-B, devices: 1, network: {bandwidth: 1 Gb/s, latency: 100 us}}
device_types:
  KIND-A: {memory: 8 GiB, fp32: 50 GFLOP/s, bf16: 50 GFLOP/s, memory_bandwidth: 10 GB/s}
  KIND-B: {memory: 8 GiB, fp32: 50 GFLOP/s, memory_bandwidth: 10 GB/s}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model, text, chats, a published model and its tokenizer."""
    monkeypatch.chdir(tmp_path)
    Path("small.yaml").write_text(yaml.safe_dump(MODEL))
    Path("texts").mkdir()
    for i in range(3):
        Path(f"texts/{i}.txt").write_text("\n".join(" ".join(WORDS[i:]) for _ in range(40)))
    Path("texts/notes.pdf").write_text("no text")
    Path("chats.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "hi"}]}) + "\n")
    Path("llama").mkdir()
    Path("llama/config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def lines_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[list[str]]:
    assert main(["up", "--hosts", "a,me@b", "--dry-run", *words]) == 0
    return [shlex.split(line) for line in capsys.readouterr().out.splitlines()]


def test_the_commands_from_a_model_file_and_text(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--model", "small.yaml", "--data", "texts", "--copy", "train.seed=3")
    lines = lines_of(capsys, *words, "--ssh", "my ssh")
    assert [line[1] for line in lines] == ["discover", "tokenizer", "preprocess", "profile", "plan", "launch"]
    reach = ["--hosts", "a,me@b", "--ssh", "my ssh"]
    assert lines[0][2:] == [*reach, "--out", "up/cluster.yaml"]
    texts = [f"texts/{i}.txt" for i in range(3)]
    assert lines[1][2:] == ["--input", *texts, "--vocab-size", "512", "--or-fewer", "--out", "up/tokenizer"]
    assert lines[2][2:] == ["--input", *texts, "--tokenizer", "up/tokenizer", "--out", "up/data"]
    files = ["--cluster", "up/cluster.yaml", "--config", "up/run.yaml"]
    assert lines[3][2:] == [*files, "--out", "up/profile.json", *reach, "--copy", "train.seed=3"]
    assert lines[4][2:8] == [*files, "--profile", "up/profile.json"] and lines[4][-1] == "train.seed=3"
    plan = ["--config", "up/run.yaml", "--plan", "up/plan.yaml"]
    assert lines[5][2:] == [*plan, *reach, "--copy", "train.seed=3"]
    assert not Path("up").exists()


def test_a_published_model_is_imported_and_brings_its_tokenizer(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without weights it is trained from the first step; chats are read as chats."""
    train_tokenizer(["texts/0.txt"], 300, "llama")
    words = ("--model", "llama", "--data", "chats.jsonl")
    lines = lines_of(capsys, *words)
    assert [line[1] for line in lines] == ["discover", "preprocess", "profile", "plan", "launch"]
    assert lines[1][-6:] == ["--tokenizer", "llama", "--out", "up/data", "--messages-key", "messages"]
    Path("llama/model.safetensors").write_bytes(b"")
    lines = lines_of(capsys, *words, "--out", "there")
    assert lines[1][1:] == ["import-hf", "llama", "--out", "there/model"]
    aim = find_aim("llama", "chats.jsonl", None, Path("there"))
    assert (aim.model, aim.start, aim.are_chats) == (None, "there/model", True)


def test_token_files_are_taken_as_they_are(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(["texts/0.txt"], 300, "tokens")
    preprocess(["texts/0.txt"], "tokens", "ready")
    for name in ("ready", "ready.bin"):
        lines = lines_of(capsys, "--model", "small.yaml", "--data", name)
        assert [line[1] for line in lines] == ["discover", "profile", "plan", "launch"]


@table(r"""
model | data | words
small.yaml | nowhere | --data nowhere: no such file or folder, and no nowhere.idx
small.yaml | llama | no file in this folder ends in .jsonl
none.yaml | texts | none.yaml: no such file
qwen2.5-0.5b | texts | a vocabulary of 151936 and no tokenizer beside it; wanted --tokenizer DIR
""")
def test_models_and_data_that_are_not_there(
    model: str, data: str, words: str, here: Path, refuse: Refuse
) -> None:
    assert words in refuse("up", "--hosts", "a", "--model", model, "--data", data)
    said = refuse("up", "--hosts", "a", "--model", "small.yaml", "--data", "texts", "--steps", 0)
    assert "--steps 0: wanted a number of steps from 1 on" in said


@pytest.mark.parametrize(
    ("change", "precision", "batch"),
    [
        (("KIND-", "CPU-"), "fp32", 16),
        (("", ""), "fp16", 64),
        (("device: KIND-B", "device: KIND-A"), "bf16", 64),
    ],
)
def test_the_run_suits_the_cards(change: tuple[str, str], precision: str, batch: int, here: Path) -> None:
    train_tokenizer(["texts/0.txt"], 300, "tokens")
    preprocess(["texts/0.txt"], "tokens", "ready")
    Path("cluster.yaml").write_text(CLUSTER.replace(*change))
    aim = find_aim("small.yaml", "ready", "tokens", Path("up"))
    Path("run.yaml").write_text(
        run_text(aim, load_cluster("cluster.yaml"), out=Path("up"), steps=None, saves=None)
    )
    run = load_run("run.yaml")
    assert run.model == load_model("small.yaml")
    assert (run.train.precision, run.data.sequence_length) == (precision, 64)
    assert run.train.global_batch_size == batch and run.train.steps == 10
    assert run.checkpoint.directory is None


def test_a_journal_knows_what_is_fresh(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    source.write_text("1")

    def step(word: str = "x") -> up.UpStep:
        return up.UpStep(words=["plan", word], reads=(str(source),), makes=(str(target),))

    journal = up._Journal(tmp_path / "steps.json")
    assert not journal.has(step())
    target.write_text("made")
    journal.note("plan", up._entry(step()))
    journal = up._Journal(tmp_path / "steps.json")
    assert journal.has(step()) and not journal.has(step("y"))
    source.write_text("12")
    assert not journal.has(step())
    (tmp_path / "steps.json").write_text("torn")
    assert not up._Journal(tmp_path / "steps.json").has(step())


def test_it_stops_at_the_first_step_that_fails(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ["up", "--hosts", "a,lost", "--ssh", "false", "--model", "small.yaml", "--data", "texts"]
    assert main(words) == 2
    said = capfd.readouterr().err
    assert "[1/6, 0 s] $ yuan-train discover --hosts a,lost --ssh false --out up/cluster.yaml" in said
    assert "error: step 1/6, discover, failed (exit code 2)" in said and "tokenizer" not in said


@pytest.mark.slow
def test_from_names_to_a_run(tmp_path: Path) -> None:
    """Two machines in folders of their own; what is there is not made again, and a change by hand stays."""
    machines = Machines(tmp_path)
    (machines.here / "text.txt").write_text("\n".join(" ".join(WORDS) for _ in range(2000)))
    (machines.here / "small.yaml").write_text(yaml.safe_dump(MODEL | {"vocab_size": 340}))
    line = [sys.executable, "-m", "yuan_train", "up", "--hosts", "a,b", "--ssh", machines.ssh, "--copy"]
    line += ["--rendezvous", f"127.0.0.1:{free_port()}", "--model", "small.yaml", "--data", "text.txt"]
    line += ["--steps", "2", "search.micro_batch_size=[4]", "search.recompute=[none]", "search.effort=quick"]

    def call() -> str:
        ran = subprocess.run(
            line, cwd=machines.here, env=machines.environment, capture_output=True, text=True, timeout=400
        )
        assert ran.returncode == 0, ran.stderr
        return ran.stderr

    said = call()
    assert "step 2/2" in said and "note: up/checkpoints of a is not seen by b, so nothing is saved" in said
    assert (machines.here / "up/plan.html").exists() and not list(machines.root.rglob("latest"))
    metrics = list(machines.hosts.rglob("metrics.jsonl"))
    assert len(metrics) == 1
    run_file = machines.here / "up/run.yaml"
    run: dict[str, Any] = yaml.safe_load(run_file.read_text())
    run["train"]["steps"] = 3
    run_file.write_text(yaml.safe_dump(run))
    again = call()
    assert again.count("] kept: ") == 3 and "kept: up/run.yaml, as it was changed by hand" in again
    assert "replacing what differs: up/run.yaml" in again and "step 3/3" in again


@table(r"""
words | message
--hosts a | give --cluster F: it says which machine has which cards
--cluster two.yaml --hosts a,x | no machine for b of the plan's nodes a, b among a, x
--cluster two.yaml --this-node c --rendezvous h | --this-node c: wanted one of a, b
--cluster two.yaml --this-node a | --this-node a: wanted one of a, b, and --rendezvous
--cluster two.yaml --hosts a,b --slurm | --hosts and --slurm: both name the machines
""")
def test_profiles_of_several_machines_are_refused_early(
    words: str, message: str, here: Path, refuse: Refuse
) -> None:
    Path("two.yaml").write_text(CLUSTER)
    assert message in refuse("profile", "--model", "small.yaml", "--out", "profile.json", *words.split())
