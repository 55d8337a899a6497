"""The commands of the guides, as they stand on their pages, one after another."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.hf_decoders import write_llama
from tests.support.pages import blocks, commands, ours
from yuan_train.cli.main import main

ROOT = Path(__file__).parents[2]
SMALLER = {
    "finetune.md": [
        "train.steps=2",
        "train.global_batch_size=4",
        "train.precision=fp32",
        "data.sequence_length=256",
    ],
}
"""What is added to the commands that plan and train on a page, so that they end within seconds."""


@pytest.mark.parametrize("name", ["seven_steps.md", "finetune.md"])
def test_the_commands_of_a_page_run_as_they_stand(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny model in the place of the published one, which is there as a folder of its name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=":")
    folder = tmp_path / ("Qwen/Qwen2.5-0.5B" if name == "seven_steps.md" else "Qwen/Qwen2.5-0.5B-Instruct")
    folder.parent.mkdir()
    shutil.move(write_llama(tmp_path / "made"), folder)
    (tmp_path / "corpus.jsonl").write_text(json.dumps({"text": "to be or not to be, " * 300}) + "\n")
    for block, is_run in blocks((ROOT / "docs" / name).read_text()):
        for command in commands(block) if is_run else ():
            words = ours(command)
            if words is None:
                subprocess.run(["bash", "-c", command], check=True)
                continue
            if words[0] in ("plan", "launch"):
                words = [word for word in words if not word.startswith("train.")] + SMALLER.get(name, [])
            assert main(words) == 0, f"{command}: {capsys.readouterr().err}"
    if name == "seven_steps.md":
        out = capsys.readouterr().out
        assert all(f"node-{letter}" in out for letter in "abc") and "torchrun" in out
    else:
        assert (tmp_path / "my-model/model.safetensors").is_file()
