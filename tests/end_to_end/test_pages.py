"""The commands of the guides, as they stand on their pages, one after another."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.support.hf_decoders import write_llama
from tests.support.pages import blocks, commands, ours
from yuan_train.cli.main import main

ROOT = Path(__file__).parents[2]
STEPS = re.compile(r"train\.steps=\d+")


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
            # Two steps tell that a line is right; all else is as on the page.
            words = [STEPS.sub("train.steps=2", word) for word in words]
            assert main(words) == 0, f"{command}: {capsys.readouterr().err}"
    if name == "seven_steps.md":
        out = capsys.readouterr().out
        assert all(f"node-{letter}" in out for letter in "abc") and "torchrun" in out
        assert re.search(r"steps +2 of 2", out), "of the rehearsal"
    else:
        assert (tmp_path / "my-model/model.safetensors").is_file()
        answers = (tmp_path / "runs/grpo/samples.jsonl").read_text().splitlines()
        assert all("right" in json.loads(line)["rewards"] for line in answers) and answers
