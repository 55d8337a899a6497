"""import-hf, export-hf, and commands on an imported checkpoint: exit codes, logits, greedy tokens."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.commands import Ask, Refuse, command
from tests.support.yuan_hf import GOLDEN, Evil, copy_of, read_published, same_bits
from yuan_train.checkpoint.load import find_checkpoint, load_weights
from yuan_train.data.tokenizer import train_tokenizer
from yuan_train.models.transformer import Transformer

EXPECTED = load_file(GOLDEN / "expected.safetensors")
GREEDY = EXPECTED["greedy"].tolist()


def joined(ids: torch.Tensor) -> str:
    return ",".join(map(str, ids.tolist()))


@pytest.fixture(scope="module")
def imported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("imported")
    assert command("import-hf", GOLDEN, "--out", folder) == 0
    return folder


def test_logits(imported: Path, tmp_path: Path) -> None:
    for row in range(2):
        out = tmp_path / f"{row}.safetensors"
        ids = joined(EXPECTED["input_ids"][row])
        assert command("evaluate", "--checkpoint", imported, "--token-ids", ids, "--logits", out) == 0
        torch.testing.assert_close(load_file(out)["logits"][0], EXPECTED["logits"][row], rtol=0, atol=2e-5)


def test_a_command_that_comes_next_is_quoted(tmp_path: Path, ask: Ask) -> None:
    folder = copy_of(tmp_path / "my model")
    assert ask("inspect", folder)["more"] == f"yuan-train import-hf '{folder}' --out CKPT"


def test_greedy_tokens(imported: Path, ask: Ask) -> None:
    words = ["--prompt-ids", joined(EXPECTED["prompt"][0]), "--max-new-tokens", len(GREEDY)]
    assert ask("generate", "--checkpoint", imported, *words, "--temperature", 0)["new_ids"] == GREEDY


def test_uneven_stages_give_the_same_logits(imported: Path) -> None:
    """Stages of 2, 0 and 1 layers, each loaded from the checkpoint on its own."""
    checkpoint = find_checkpoint(imported)
    cuts = [((0, 2), True, False), ((2, 2), False, False), ((2, 3), False, True)]
    stages = []
    for layers, embedding, head in cuts:
        stage = Transformer(checkpoint.model, layers=layers, embedding=embedding, head=head)
        load_weights(checkpoint, stage)
        stages.append(stage)

    def logits(ids: torch.Tensor) -> torch.Tensor:
        x = ids
        for stage in stages:
            x = stage(x)
        return stages[-1].logits(x)

    with torch.no_grad():
        torch.testing.assert_close(logits(EXPECTED["input_ids"]), EXPECTED["logits"], rtol=0, atol=2e-5)
        ids = EXPECTED["prompt"]
        for _ in GREEDY:
            ids = torch.cat((ids, logits(ids)[:, -1:].argmax(-1)), dim=1)
    assert ids[0, EXPECTED["prompt"].shape[1] :].tolist() == GREEDY


def test_so_do_the_definitions_of_the_ops(imported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    test_uneven_stages_give_the_same_logits(imported)


def test_export_after_import_is_identical(imported: Path, tmp_path: Path, ask: Ask) -> None:
    report = ask("export-hf", imported, "--out", tmp_path / "hf", "--shard-size", 1e-4)
    assert (report["parameters"], report["tensors"], report["dtype"]) == (154_528, 48, "float32")
    assert same_bits(read_published(tmp_path / "hf"), read_published(GOLDEN))
    assert sum(name.endswith(".safetensors") for name in report["files"]) > 1
    assert command("inspect", imported) == 0


def test_the_tokenizer_is_imported_and_exported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask
) -> None:
    text = Path(json.__file__).parent / "decoder.py"
    folder = copy_of(tmp_path / "hf")
    train_tokenizer([text], 380, folder)
    assert command("import-hf", folder, "--out", tmp_path / "out") == 2  # 380 pieces, 96 rows
    folder = copy_of(tmp_path / "wide", config={"vocab_size": 384}, change=_widen)
    train_tokenizer([text], 380, folder)
    assert command("import-hf", folder, "--out", tmp_path / "out") == 0
    assert command("export-hf", tmp_path / "out", "--out", tmp_path / "again") == 0
    assert (tmp_path / "again/tokenizer.model").read_bytes() == (folder / "tokenizer.model").read_bytes()
    words = ["--checkpoint", tmp_path / "out", "--max-new-tokens", 3, "--temperature", 0]
    capsys.readouterr()
    prompts = ["if", "def f<sep>", "return\u2028value"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts) + "\n", encoding="utf-8-sig")
    assert command("generate", *words, "--special", "--prompts", tmp_path / "prompts.txt") == 0
    batched = capsys.readouterr().out.splitlines()
    assert len(batched) == 3
    for prompt, line in zip(prompts, batched, strict=True):
        assert ask("generate", *words, "--special", "--prompt", prompt) == json.loads(line)
    # Ids from 380 on fill up the vocabulary: they have no text.
    assert command("generate", *words, "--prompt-ids", "383") == 0
    hot = ask("generate", *words[:2], "--temperature", 1e6, "--seed", 1, "--prompt-ids", "7,383")
    assert max(hot["new_ids"]) >= 380 and hot["text"]
    assert command("generate", *words, "--prompts", tmp_path / "nowhere") == 2
    assert command("generate", *words, "--prompt", "x", "--prompt-ids", "1") == 2


def _widen(tensors: dict[str, torch.Tensor]) -> None:
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.cat([tensors[name]] * 4)


def test_hostile_folders_are_user_errors(tmp_path: Path, refuse: Refuse) -> None:
    torn = copy_of(tmp_path / "torn")
    path = torn / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    evil = copy_of(tmp_path / "evil", pickled=True)
    torch.save({"x": Evil(tmp_path / "ran")}, evil / "pytorch_model.bin")
    nan = copy_of(tmp_path / "nan", change=lambda t: t["model.norm.weight"].fill_(float("nan")))
    other = copy_of(tmp_path / "other", config={"vocab_size": 135_040})
    (tmp_path / "out").mkdir()
    for folder, message in [
        (torn, "torn, or no safetensors file"),
        (evil, "nothing in it was run"),
        (nan, "not finite"),
        (other, "wanted [135040, 64]"),
        (tmp_path / "nowhere", "no such directory"),
    ]:
        assert message in refuse("import-hf", folder, "--out", tmp_path / "out")
    assert not (tmp_path / "ran").exists()
    assert command("export-hf", tmp_path / "nowhere", "--out", tmp_path / "x") == 2
    assert command("export-hf", tmp_path, "--out", tmp_path / "x", "--shard-size", 0) == 2
