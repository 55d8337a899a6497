"""`yuan-train init`: each file is valid as it is written, and trains after what its comments say."""

import json
import random
import re
from pathlib import Path

import pytest

from tests.support.commands import Refuse
from tests.support.hf_decoders import write_tokenizer
from tests.support.project import MODEL, WORDS, write_lines
from yuan_train.cli.init import KINDS
from yuan_train.cli.main import main
from yuan_train.config.cluster import load_cluster
from yuan_train.config.load import Document, build, dump
from yuan_train.config.model import ModelConfig
from yuan_train.config.rl import load_rl
from yuan_train.config.run import load_run

FILL_IN = re.compile(r"FILL IN:")
SMALL = ("train.steps=2", "train.precision=fp32", "train.device=cpu")
MODEL_KEYS = MODEL | {"vocab_size": 320, "max_sequence_length": 4096, "architecture": "llama"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template, token files of texts and chats, pairs, prompts, a model file."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "tokenizer").mkdir()
    write_tokenizer(folder / "tokenizer")
    draw = random.Random(0)
    texts = [" ".join(draw.choices(WORDS, k=20)) for _ in range(60)]
    chats = [
        [{"role": "user", "content": text[:20]}, {"role": "assistant", "content": text[20:40]}]
        for text in texts
    ]
    pairs = [{"prompt": t[:10], "chosen": t[10:20], "rejected": t[20:30]} for t in texts]
    write_lines(folder / "texts.jsonl", [{"text": text} for text in texts])
    write_lines(folder / "chats.jsonl", [{"messages": chat} for chat in chats])
    write_lines(folder / "pairs.jsonl", pairs)
    write_lines(folder / "prompts.jsonl", [{"prompt": [chat[0]], "answer": "7"} for chat in chats])
    model = build(Document("model", MODEL_KEYS, {}), ModelConfig)
    (folder / "model.yaml").write_text(dump(model))
    for name, more in (("texts", []), ("chats", ["--messages-key", "messages"])):
        words = ["--input", str(folder / f"{name}.jsonl"), "--tokenizer", str(folder / "tokenizer"), *more]
        assert main(["preprocess", *words, "--out", str(folder / name)]) == 0
    return folder


def fill_in(path: Path, values: dict[str, str], directory: Path) -> None:
    """Replace the values of the lines that are to be filled in, all of them, and the runs' directories."""
    filled: list[str] = []
    used: set[str] = set()
    for line in path.read_text().splitlines():
        if FILL_IN.search(line):
            (found,) = [old for old in values if old in line]
            line = line.replace(found, values[found])
            used.add(found)
        filled.append(line.replace("runs/", f"{directory}/"))
    assert used == set(values)
    path.write_text("\n".join(filled) + "\n")


def test_every_file_is_valid_as_it_is_written(tmp_path: Path, folder: Path) -> None:
    for kind in KINDS:
        path = tmp_path / f"{kind}.yaml"
        assert main(["init", kind, "--out", str(path)]) == 0
        schema = re.match(r"# yaml-language-server: \$schema=(.*)", path.read_text())
        assert schema is not None and Path(schema[1]).is_file()
        model = (f"model={folder / 'model.yaml'}",)
        if kind == "cluster":
            assert len(load_cluster(path).cards) == 8
        elif kind == "grpo":
            assert load_rl(path, model).algorithm.name == "grpo"
        else:
            run = load_run(path, model if kind != "pretrain" else ())
            assert run.checkpoint.directory == f"runs/{kind}/checkpoints"


@pytest.mark.slow
def test_each_run_trains_after_what_its_comments_say(folder: Path, tmp_path: Path) -> None:
    """One after another: SFT and what follows begin with the checkpoint of the run before."""
    tokenizer = str(folder / "tokenizer")
    pretrained, tuned = str(tmp_path / "pretrain/checkpoints"), str(tmp_path / "sft/checkpoints")
    model, texts, chats = (str(folder / name) for name in ("model.yaml", "texts", "chats"))
    pairs, prompts = (str(folder / f"{name}.jsonl") for name in ("pairs", "prompts"))
    begun = {"runs/sft/checkpoints": tuned, "runs/imported": tokenizer}
    values: dict[str, dict[str, str]] = {
        "pretrain": {"qwen2.5-0.5b": model, "data/corpus": texts, "data/tokenizer": tokenizer},
        "sft": {"runs/imported": pretrained, "data/chats": chats},
        "dpo": {"data/pairs.jsonl": pairs, **begun},
        "grpo": {"data/prompts.jsonl": prompts, "{name: number,": "{name: exact,", **begun},
    }
    smaller = {
        "pretrain": ("train.global_batch_size=4", "data.sequence_length=64"),
        "sft": ("train.global_batch_size=4", "data.sequence_length=64"),
        "dpo": ("train.global_batch_size=4", "data.sequence_length=128"),
        "grpo": ("train.prompts_per_step=2", "generation.max_new_tokens=8", "data.max_prompt_tokens=128"),
    }
    for kind, filled in values.items():
        path = tmp_path / f"{kind}.yaml"
        assert main(["init", kind, "--out", str(path)]) == 0
        fill_in(path, filled, tmp_path)
        command = "rl" if kind == "grpo" else "train"
        assert main([command, "--config", str(path), *SMALL, *smaller[kind]]) == 0
        metrics = (tmp_path / kind / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in metrics] == [1, 2]
        assert main(["show", str(tmp_path / kind)]) == 0


def test_a_file_that_is_there_is_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refuse: Refuse
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text("name: mine\n")
    assert "cluster.yaml: is there already" in refuse("init", "cluster")
    assert "is a file; wanted" in refuse("init", "cluster", "--out", "cluster.yaml/below_a_file.yaml")
    assert Path("cluster.yaml").read_text() == "name: mine\n"
