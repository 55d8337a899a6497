"""`estimate`: named models, configs and model files, the article's table, and what is refused."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.estimate.test_shape import TINY
from tests.support.cases import table
from tests.support.commands import Ask, Refuse
from yuan_train.cli.main import main
from yuan_train.config.devices import CATALOGUE


@pytest.fixture
def estimate(ask: Ask) -> Ask:
    return partial(ask, "estimate")


def test_a_named_model(estimate: Any) -> None:
    found = estimate("--model", "qwen2.5-7b", "--method", "full", "--largest", "new")
    assert (found["model"], found["parameters"], found["engine"]) == ("Qwen2.5-7B", 7_615_616_512, "trl-0.14")
    assert (found["group"], found["prompt"], found["new"], found["card"]) == (4, 256, 786, "H100-80G")
    assert found["capacity_bytes"] == CATALOGUE["H100-80G"].memory
    phase = found["phases"][found["peak_phase"]]
    assert phase["bytes"] == max(p["bytes"] for p in found["phases"].values())
    held = sum(found["states"].values()) + sum(phase["categories"].values()) + found["reserved"]
    assert held == pytest.approx(found["bytes"])
    assert not found["fits"] and found["remedies"]
    assert (
        found["largest"]["value"] == 0 and found["largest"]["bytes_with_one_more"] > found["capacity_bytes"]
    )


def test_a_config_and_its_folder_and_a_model_file(estimate: Any, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(TINY))
    options = ("--method", "lora", "--group", "8", "--new", "100", "--prompt", "50")
    found = estimate("--model", str(folder), *options)
    assert (found["model"], found["parameters"], found["new"]) == ("tiny", 623_488, 100)
    assert found == estimate("--model", str(folder / "config.json"), *options)
    ours = estimate("--model", str(folder), "--engine", "yuan", "--largest", "group")
    assert ours["engine"] == "yuan" and ours["parameters"] == 623_488
    assert ours["largest"]["bytes"] <= ours["usable_bytes"] < ours["largest"]["bytes_with_one_more"]
    by_file = estimate("--model", "configs/model/llama3.1-8b.yaml", "--method", "adam8")
    assert (
        by_file["bytes"]
        == estimate("--model", "meta-llama/Llama-3.1-8B-Instruct", "--method", "adam8")["bytes"]
    )


def test_a_model_that_only_our_engine_trains(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["estimate", "--model", "configs/model/yuan2-2b.yaml"]) == 0
    printed = capsys.readouterr()
    assert "full, yuan: group 4" in printed.out and "a localized filter" in printed.err
    published = tmp_path / "config.json"
    published.write_text(Path("tests/golden/yuan_hf_tiny_a/config.json").read_text())
    assert main(["estimate", "--model", str(published), "--engine", "yuan"]) == 0
    assert "yuan: group 4" in capsys.readouterr().out
    mixture = {"model_type": "mixtral", "num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 8}
    published.write_text(json.dumps(mixture | {"intermediate_size": 96, "vocab_size": 512}))
    assert main(["estimate", "--model", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert "full, yuan: group 4" in printed.out and "a mixture of experts" in printed.err


def test_a_critic_and_a_reward_model(estimate: Any) -> None:
    """A critic has the policy's bytes but for the head: states always, activations in turn with its."""
    plain = estimate("--model", "Qwen2.5-7B", "--engine", "yuan")
    found = estimate("--model", "Qwen2.5-7B", "--algorithm", "ppo", "--reward-model", "Qwen2.5-1.5B")
    assert (plain["algorithm"], found["algorithm"], found["engine"]) == ("grpo", "ppo", "yuan")
    head = 3584 * 152064
    assert sum(plain["states"].values()) - found["states"].pop("critic") == 18 * (head - 3584)
    assert found["states"] == plain["states"]
    phases = found["phases"]
    assert phases["training"]["categories"] == plain["phases"]["training"]["categories"]
    assert phases["critic"]["bytes"] < phases["training"]["bytes"]
    # Of 1.5B the head is the embedding: a value's has 1536 parameters beside it.
    assert phases["scoring"]["categories"]["reward model"] == 2 * (1_543_714_304 + 1536)
    changes = [{remedy["change"] for remedy in case["remedies"]} for case in (plain, found)]
    assert "optimizer_offload" in changes[0] and "optimizer_offload" not in changes[1]


def test_all_methods_of_a_model(estimate: Any) -> None:
    found = estimate("--model", "Llama-3.2-1B", "--card", "RTX-4090")
    wanted = [("full", False), ("adam8", True), ("adam8+recompute", True), ("lora", True)]
    assert [(cell["method"], cell["fits"]) for cell in found["cells"]] == wanted


def test_text_says_what_would_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["estimate", "--model", "Qwen2.5-7B", "--method", "full", "--largest", "group"]) == 0
    text = capsys.readouterr().out
    for words in (
        "<- peak",
        "107.8 GB of 80.7 GB (95% of an H100-80G): does not fit",
        "would fit: method lora",
    ):
        assert words in text
    assert main(["estimate", "--model", "Llama-3.1-405B", "--method", "lora"]) == 0
    assert "no one change makes it fit" in capsys.readouterr().out


@table(r"""
arguments | message
--model Qwen2.5-9B --method full | no such file or model; did you mean 'Qwen2.5-
--model Qwen2.5-7B --method fulll | invalid choice: 'fulll'
--model Qwen2.5-7B --group 0 | '0': wanted a whole number from 1
--model Qwen2.5-7B --new -3 | wanted a whole number|expected one argument
--model Qwen2.5-7B --prompt 99999999999999999999 | wanted a whole number from 1
--model Qwen2.5-7B --card H100 | no such card; did you mean H100-80G, H100-PCIe or H100-NVL
--model Qwen2.5-7B --largest new | without --method; add one of full
--model Qwen2.5-7B --engine yuan --method adam8 | has no 8-bit Adam; wanted full or lora
--model configs/model/yuan2-m32.yaml --method lora | a model with experts has no adapters yet
--model configs/model/yuan2-2b.yaml --engine trl-0.14 | a localized filter.*--engine yuan
--model configs/model/yuan2-m32.yaml --engine trl-0.14 | a mixture of experts
--model configs/cluster/laptop.yaml | laptop.yaml: a cluster file; wanted a model file, a name
--model Qwen/Qwen9-1B | no such file or model.* yuan-train import-hf Qwen/Qwen9-1B --out runs/Qwen9-1B
--model Qwen2.5-7B --engine trl-0.14 --algorithm ppo | without a critic or a reward model
""")
def test_refused(arguments: str, message: str, refuse: Refuse) -> None:
    said = refuse("estimate", *arguments.split())
    (error,) = (line for line in said.splitlines() if line.startswith("error: "))
    assert re.search(message, error), error


def test_no_model_is_refused(refuse: Refuse) -> None:
    assert "error: no --model; wanted a name" in refuse("estimate")
