"""import-hf, generate, evaluate and export-hf on a Llama with a tokenizer.json and a chat template."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from tests.support.commands import Ask, Refuse, command
from tests.support.hf_decoders import write_llama
from tests.support.project import write_lines
from tests.support.yuan_hf import read_published, same_bits
from yuan_train.checkpoint.load import find_checkpoint, load_weights
from yuan_train.data.indexed import IndexedDataset, preprocess
from yuan_train.data.tokenizer import Tokenizer, train_tokenizer
from yuan_train.models.transformer import Transformer

BEGIN, END, EOT, START = range(256, 260)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def imported(folder: Path) -> Path:
    assert command("import-hf", folder, "--out", folder.parent / "checkpoints") == 0
    return folder.parent / "checkpoints"


def generate(imported: Path, *words: object) -> tuple[object, ...]:
    return ("generate", "--checkpoint", imported, "--temperature", 0, "--max-new-tokens", 3, *words)


def test_tokenizer_and_configs_go_along(folder: Path, imported: Path, tmp_path: Path) -> None:
    assert command("export-hf", imported, "--out", tmp_path / "hf") == 0
    assert same_bits(read_published(tmp_path / "hf"), read_published(folder))
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in (tmp_path / "hf").iterdir()} == names
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        assert (tmp_path / "hf" / name).read_bytes() == (folder / name).read_bytes(), name
    for name in ("config.json", "tokenizer_config.json"):
        wanted = json.loads((folder / name).read_text())
        wanted.pop("auto_map", None)  # the name of code, which does not go along
        assert json.loads((tmp_path / "hf" / name).read_text()) == wanted


def test_another_rotary_base_goes_along(folder: Path, tmp_path: Path) -> None:
    assert command("import-hf", folder, "--out", tmp_path / "ck", "--rope-base", 4e5) == 0
    assert command("export-hf", tmp_path / "ck", "--out", tmp_path / "hf") == 0
    assert command("import-hf", tmp_path / "hf", "--out", tmp_path / "again") == 0
    assert [find_checkpoint(tmp_path / name).model.rope_base for name in ("ck", "again")] == [4e5, 4e5]


def test_the_tokenizer_knows_what_begins_and_ends(imported: Path) -> None:
    tokenizer = Tokenizer.load(imported / "step-00000000" / "tokenizer")
    assert (tokenizer.eod_id, tokenizer.prefix_ids) == (END, [BEGIN])
    assert tokenizer.stop_ids == {END, EOT}
    assert tokenizer.role_id("bos_token") == BEGIN and tokenizer.role_id("pad_token") is None


def test_the_tokenizer_of_a_checkpoint_is_named_by_it(imported: Path) -> None:
    """As the folder of checkpoints, or one of them."""
    wanted = Tokenizer.load(imported / "step-00000000" / "tokenizer").digest
    assert Tokenizer.load(imported).digest == Tokenizer.load(imported / "step-00000000").digest == wanted


def test_sentencepiece_tokenizers(imported: Path, tmp_path: Path, ask: Ask) -> None:
    """Llama 2's has a config of its own, which goes along; one of ours gets code that reads it."""
    train_tokenizer([Path(json.__file__).parent / "decoder.py"], 380, tmp_path / "mine")
    shutil.copytree(tmp_path / "mine", tmp_path / "llama2")
    config = {"tokenizer_class": "LlamaTokenizer", "add_bos_token": True, "eos_token": "</s>"}
    (tmp_path / "llama2" / "tokenizer_config.json").write_text(json.dumps(config))
    for name, prefix, stops in (("mine", [], [3]), ("llama2", [1], [2, 3])):
        facts = ask("inspect", tmp_path / name)
        assert (facts["prefix_ids"], facts["stop_ids"], facts["chat_template"]) == (prefix, stops, False)
        out = tmp_path / f"{name}-hf"
        assert command("export-hf", imported, "--out", out, "--tokenizer", tmp_path / name) == 0
        assert (out / "tokenization_yuan.py").exists() == (name == "mine")
        written = json.loads((out / "tokenizer_config.json").read_text())
        assert (written == config) == (name == "llama2")


def test_prompts_begin_as_in_training(imported: Path, ask: Ask) -> None:
    tokenizer = Tokenizer.load(imported / "step-00000000" / "tokenizer")
    assert ask(*generate(imported, "--prompt", "ab"))["prompt_ids"] == [BEGIN, *tokenizer.encode("ab")]


def test_documents_begin_as_in_training(imported: Path, tmp_path: Path) -> None:
    (tmp_path / "text.jsonl").write_text('{"text": "ab"}\n{"text": "<|eot_id|>"}\n')
    tokenizer = Tokenizer.load(imported / "step-00000000" / "tokenizer")
    preprocess([tmp_path / "text.jsonl"], tokenizer.path.parent, tmp_path / "corpus")
    corpus = IndexedDataset(tmp_path / "corpus")
    assert corpus.document(0).tolist() == [BEGIN, *tokenizer.encode("ab"), END]
    assert EOT not in corpus.document(1), "special strings in a text are text"


def test_chat(imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask) -> None:
    tokenizer = Tokenizer.load(imported / "step-00000000" / "tokenizer")
    text = (
        "<|begin_of_text|><|start|>system\nbe brief<|eot_id|><|start|>user\nhi<|eot_id|><|start|>assistant\n"
    )
    wanted = tokenizer.encode(text, special=True)
    assert wanted[:2] == [BEGIN, START] and wanted.count(EOT) == 2
    alone = ask(*generate(imported, "--chat", "--prompt", " hi "))
    assert alone["prompt_ids"] == wanted
    assert command(*generate(imported, "--chat", "--prompt", "hi")) == 0
    assert capsys.readouterr().out == alone["text"] + "\n", "the answer alone"
    system = {"role": "system", "content": "be brief"}
    lines = [{"messages": [system, {"role": "user", "content": "hi"}]}, {"messages": [system]}]
    chats = write_lines(tmp_path / "chats.jsonl", lines)
    assert command(*generate(imported, "--chat", "--prompts", chats)) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == alone
    assert second["prompt_ids"] == tokenizer.encode(
        text.replace("<|start|>user\nhi<|eot_id|>", ""), special=True
    )


def test_generation_ends_where_the_published_config_says(
    folder: Path, imported: Path, tmp_path: Path, ask: Ask
) -> None:
    first = ask(*generate(imported, "--prompt", "x"))["new_ids"]
    assert len(first) == 3
    shutil.copytree(folder, tmp_path / "tokenizer")
    (tmp_path / "tokenizer" / "generation_config.json").write_text(json.dumps({"eos_token_id": first[0]}))
    again = ask(*generate(imported, "--prompt", "x", "--tokenizer", tmp_path / "tokenizer"))
    assert again["new_ids"] == first[:1]


def test_too_many_new_tokens_are_refused_before_the_prompt_is_printed(imported: Path, refuse: Refuse) -> None:
    said = refuse(*generate(imported, "--prompt", "a", "--max-new-tokens", 10**6))
    assert "error: 2 prompt tokens and 1000000 new ones exceed" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["evaluate", "--token-ids", 1, "--logits", ".", "--checkpoint"], "--logits: .: is a folder"),
        (["evaluate", "--data", "none", "--sequence-length", 0, "--checkpoint"], "wanted 1 to 4096, got 0"),
        (["export-hf", "--out", ".", "--dtype", "float32"], ".: already exists"),
        (["export-hf", "--out", "hf", "--shard-size", "inf"], "--shard-size: inf; wanted a number"),
    ],
)
def test_places_and_numbers_that_are_refused(
    imported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Refuse,
    words: list[object],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert message in refuse(*words, imported)


def test_logits_do_not_restart_at_the_end_of_a_document(imported: Path, tmp_path: Path) -> None:
    ids = [BEGIN, 5, 6, END, BEGIN, 7, 8, 9]
    words = ("--token-ids", ",".join(map(str, ids)), "--logits", tmp_path / "logits.safetensors")
    assert command("evaluate", "--checkpoint", imported, *words) == 0
    checkpoint = find_checkpoint(imported)
    model = Transformer(checkpoint.model)
    load_weights(checkpoint, model)
    with torch.no_grad():
        wanted = model.logits(model(torch.tensor([ids])))
    assert torch.equal(load_file(tmp_path / "logits.safetensors")["logits"], wanted)


@pytest.mark.parametrize(
    ("files", "words", "message"),
    [
        ({"chat_template.jinja": None}, ["--prompt", "x"], "no chat template"),
        ({"chat_template.jinja": "{{ ''.__class__.__mro__ }}"}, ["--prompt", "x"], "SecurityError"),
        ({"chat_template.jinja": "{{ messages.append(1) }}"}, ["--prompt", "x"], "SecurityError"),
        ({"chat_template.jinja": "{% for %}"}, ["--prompt", "x"], "TemplateSyntaxError"),
        ({"chat_template.jinja": "{{ raise_exception('no roles') }}"}, ["--prompt", "x"], "no roles"),
        ({"generation_config.json": '{"eos_token_id": "2"}'}, ["--prompt", "x"], "wanted token ids"),
        ({"generation_config.json": "[]"}, ["--prompt", "x"], "wanted a JSON object"),
        ({"tokenizer_config.json": "{"}, ["--prompt", "x"], "tokenizer_config.json: cannot be read"),
        ({}, ["--prompt-ids", "1"], "--chat needs --prompt"),
        ({"chats.jsonl": "{\n"}, ["--prompts", "chats.jsonl"], "is not JSON"),
        ({"chats.jsonl": '{"messages": [{"role": 1}]}'}, ["--prompts", "chats.jsonl"], "holds no messages"),
        (
            {"chats.jsonl": '\n{"messages": [{"role": "tool", "content": "x"}]}'},
            ["--prompts", "chats.jsonl"],
            "error: chats.jsonl:2: ",
        ),
        (
            {"chats.jsonl": '\n{"messages": [{"role": "user", "content": "\\ud800"}]}'},
            ["--prompts", "chats.jsonl"],
            "error: chats.jsonl:2: 't_id|>",
        ),
        (
            {
                "chat_template.jinja": "{{ '' }}",
                "chats.jsonl": '{"messages": [{"role": "user", "content": ""}]}',
            },
            ["--prompts", "chats.jsonl"],
            "chats.jsonl:1: the prompt is empty",
        ),
    ],
)
def test_chats_that_cannot_be_rendered(
    folder: Path,
    imported: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refuse: Refuse,
    files: dict[str, str | None],
    words: list[str],
    message: str,
) -> None:
    tokenizer = tmp_path / "tokenizer"
    shutil.copytree(folder, tokenizer, ignore=shutil.ignore_patterns("*.safetensors"))
    for name, content in files.items():
        path = tmp_path / name if name.endswith(".jsonl") else tokenizer / name
        path.unlink() if content is None else path.write_text(content)
    monkeypatch.chdir(tmp_path)
    assert message in refuse(*generate(imported, "--chat", "--tokenizer", tokenizer, *words))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 10**12}, "says 1000000000000 layers, the weights hold"),
        ({"rope_scaling": {"type": "longrope"}}, "type 'longrope' is not supported"),
        ({"hidden_size": 10**15}, "has shape"),
        ({"model_type": "qwen3", "head_dim": 16}, "q_norm.weight is missing"),
        ({"model_type": "qwen2"}, "q_proj.bias is missing"),
        ({"num_key_value_heads": 4}, "has shape [32, 64], wanted [64, 64]"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"rms_norm_eps": float("inf")}, "norm_epsilon"),
        ({"vocab_size": 128}, "260 pieces, but config.json says vocab_size 128"),
    ],
)
def test_folders_that_do_not_fit(
    folder: Path, tmp_path: Path, refuse: Refuse, changes: dict[str, Any], message: str
) -> None:
    shutil.copytree(folder, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text()) | changes
    (tmp_path / "hf" / "config.json").write_text(json.dumps(config))
    assert message in refuse("import-hf", tmp_path / "hf", "--out", tmp_path / "out")


def test_an_import_is_trained_by_the_lines_that_it_prints(
    folder: Path, imported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No word of the model in the run file: it is the checkpoint's."""
    assert command("import-hf", folder, "--out", tmp_path / "again") == 0
    lines = yaml.safe_load(capsys.readouterr().out.partition(":\n")[2].partition("next:")[0])
    (tmp_path / "text.jsonl").write_text('{"text": "one and two are three"}\n' * 40)
    tokens = ["--input", tmp_path / "text.jsonl", "--tokenizer", lines["data"]["tokenizer"]]
    assert command("preprocess", *tokens, "--out", tmp_path / "text") == 0
    lines["data"] |= {"train": [{"prefix": str(tmp_path / "text")}], "sequence_length": 16}
    run = {
        **lines,
        "train": {"steps": 1, "global_batch_size": 2, "precision": "fp32"},
        "optimizer": {"learning_rate": 1e-3},
        "checkpoint": {"directory": str(tmp_path / "trained")},
        "log": {"directory": None},
    }
    (tmp_path / "sft.yaml").write_text(yaml.safe_dump(run))
    assert command("train", "--config", tmp_path / "sft.yaml") == 0
    trained = find_checkpoint(tmp_path / "trained")
    assert trained.step == 1 and trained.model == find_checkpoint(imported).model
    changes = ["model.num_layers=3", f"checkpoint.directory={tmp_path / 'new'}"]
    assert command("train", "--config", tmp_path / "sft.yaml", *changes) == 2
    advice = "Leave model: out, and it is that of start.checkpoint; or start from another checkpoint"
    assert f"holds another model: num_layers 2 there, 3 here. {advice}" in capsys.readouterr().err
