"""Adapters in PEFT's format: what we write, PEFT loads; what it writes, we load; both as the merged model."""

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.support.commands import Ask, Refuse, command
from tests.support.hf_decoders import write_llama
from yuan_train.checkpoint.load import find_checkpoint

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
IDS = "5,9,100,17,33,80,41,7"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny Llama; its checkpoint is beside it."""
    folder = write_llama(tmp_path_factory.mktemp("llama"))
    assert command("import-hf", folder, "--out", folder.parent / "base") == 0
    return folder


def logits(checkpoint: Path, out: Path) -> torch.Tensor:
    assert command("evaluate", "--checkpoint", checkpoint, "--token-ids", IDS, "--logits", out) == 0
    return load_file(out)["logits"].squeeze(0)


def with_peft(base: Path, adapter: Path) -> Any:
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(model, str(adapter)).eval()


def adapters_of_peft(base: Path, out: Path, **more: Any) -> Any:
    """Adapters that PEFT has made, with both factors drawn, and their model."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(
        **({"r": 3, "lora_alpha": 12, "target_modules": TARGETS, "task_type": "CAUSAL_LM"} | more)
    )
    adapted = peft.get_peft_model(model, config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    adapted.save_pretrained(out)
    return adapted.eval()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("more", "rank"),
    [
        ({}, 6),  # gate and up have unlike A: twice the rank
        ({"target_modules": ["q_proj", "v_proj"], "use_rslora": True}, 3),
        ({"target_modules": ["up_proj"], "layers_to_transform": [1]}, 3),
    ],
    ids=["all", "two", "half"],
)
def test_what_peft_writes_is_read(base: Path, tmp_path: Path, more: dict[str, Any], rank: int) -> None:
    model = adapters_of_peft(base, tmp_path / "adapter", **more)
    words = ("import-hf", tmp_path / "adapter", "--base", base.parent / "base", "--out", tmp_path / "ours")
    assert command(*words) == 0
    lora = find_checkpoint(tmp_path / "ours").model.lora
    assert lora is not None and lora.rank == rank
    assert lora.scale == pytest.approx(12 / (math.sqrt(3) if "use_rslora" in more else 3))
    ids = torch.tensor([[int(number) for number in IDS.split(",")]])
    wanted = model(ids).logits[0].detach()
    found = logits(tmp_path / "ours", tmp_path / "logits.safetensors")
    assert (wanted - logits(base.parent / "base", tmp_path / "base.safetensors")).abs().max() > 0.01
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
def test_peft_loads_what_is_written(base: Path, tmp_path: Path) -> None:
    """And it is read again as it was, with as small a rank as before."""
    adapters_of_peft(base, tmp_path / "theirs")
    words = ("import-hf", tmp_path / "theirs", "--base", base.parent / "base", "--out", tmp_path / "ours")
    assert command(*words) == 0
    assert command("export-hf", tmp_path / "ours", "--out", tmp_path / "adapter", "--adapter") == 0
    assert sorted(path.name for path in (tmp_path / "adapter").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    model = with_peft(base, tmp_path / "adapter")
    ids = torch.tensor([[int(number) for number in IDS.split(",")]])
    wanted = logits(tmp_path / "ours", tmp_path / "logits.safetensors").float()
    torch.testing.assert_close(model(ids).logits[0].detach(), wanted, rtol=1e-4, atol=1e-4)
    words = ("import-hf", tmp_path / "adapter", "--base", base.parent / "base", "--out", tmp_path / "again")
    assert command(*words) == 0
    lora = find_checkpoint(tmp_path / "again").model.lora
    assert lora is not None and lora.rank == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3'; wanted LORA"),
        ({"use_dora": True}, "use_dora: True is not read; wanted plain LoRA"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights: 'pissa_niter_4' is not read"),
        ({"alora_invocation_tokens": [1]}, r"alora_invocation_tokens: \[1\] is not read"),
        ({"r": 0}, "r 0 and lora_alpha 4; wanted numbers above 0"),
        ({"r": 3}, r"have shapes \[2, 64\] and \[64, 2\]; wanted \[3, 64\]"),
    ],
)
def test_other_adapters_are_refused(
    base: Path, tmp_path: Path, change: dict[str, Any], message: str, refuse: Refuse
) -> None:
    name = "base_model.model.model.layers.0.self_attn.q_proj"
    width = json.loads((base / "config.json").read_text())["hidden_size"]
    tensors = {f"{name}.lora_A.weight": torch.ones(2, width), f"{name}.lora_B.weight": torch.ones(width, 2)}
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | change
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    words = ("import-hf", tmp_path, "--base", base.parent / "base", "--out", tmp_path / "ours")
    assert re.search(message.replace("64", str(width)), refuse(*words))


def test_inspect_tells_models_from_adapters_and_tokenizers(base: Path, tmp_path: Path, ask: Ask) -> None:
    adapters_of_peft(base, tmp_path / "adapters")
    found = ask("inspect", base)
    assert (found["kind"], found["architecture"], found["tokenizer"]) == (
        "hugging_face",
        "llama",
        "tokenizer.json",
    )
    assert found["tokenizer"] == "tokenizer.json"
    assert found["parameters"] * 2 == found["bytes"] and found["dtypes"] == ["bfloat16"]
    found = ask("inspect", tmp_path / "adapters")
    assert (found["kind"], found["r"], found["tensors"]) == ("adapters", 3, 2 * 2 * len(TARGETS))
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn/config.json").write_bytes((base / "config.json").read_bytes())
    (tmp_path / "torn/model.safetensors").write_bytes((base / "model.safetensors").read_bytes()[:-1])
    assert command("inspect", tmp_path / "torn") == 2


def test_adapters_want_their_base(base: Path, tmp_path: Path, refuse: Refuse) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    said = refuse("import-hf", tmp_path, "--out", tmp_path / "ours")
    assert "name the checkpoint of their base: --base CKPT" in said
    said = refuse("import-hf", base, "--base", base.parent / "base", "--out", tmp_path / "ours")
    assert "holds no adapter_config.json" in said
    said = refuse("export-hf", base.parent / "base", "--out", tmp_path / "out", "--adapter")
    assert "has no adapters (lora)" in said
