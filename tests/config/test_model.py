"""Sizes of models against the published counts, and constraints on models."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.models import tiny_model
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import ModelConfig, load_model, validate_model


def toy(**changes: Any) -> ModelConfig:
    sizes = {"num_layers": 6, "hidden_size": 768, "num_attention_heads": 12, "ffn_hidden_size": 3072}
    return tiny_model("yuan", **({**sizes, "vocab_size": 135040} | changes))


def test_the_papers_ablation() -> None:
    # Yuan 2.0, Table 1: L 6, H 768, F 3072, V 135,040 tied; 160.3 M plain, 167.4 M with two convolutions.
    assert toy(attention="plain").parameters == 160_343_808
    assert toy().parameters == 167_433_216


@pytest.mark.parametrize(
    ("name", "per_layer", "total"),
    [
        ("yuan2-2b", 75_506_688, 2_088_724_480),
        ("yuan2-51b", 1_207_996_416, 51_842_105_344),
        ("yuan2-102b", 1_207_996_416, 102_577_954_816),
    ],
)
def test_published_shapes(name: str, per_layer: int, total: int) -> None:
    model = load_model(Path("configs/model") / f"{name}.yaml")
    hidden, length = model.hidden_size, model.max_sequence_length
    assert model.name == name
    assert (model.layer_parameters, model.parameters) == (per_layer, total)
    assert model.layer_parameters == 18 * hidden**2 + 9 * hidden // 2
    assert model.layer_forward_flops(length) == 36 * hidden**2 + 2 * length * hidden
    assert model.training_flops(length) == 3 * (
        model.num_layers * model.layer_forward_flops(length) + 2 * model.vocab_size * hidden
    )


PUBLISHED = {
    "llama3.2-1b": 1_235_814_400, "llama3.2-3b": 3_212_749_824, "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496, "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688, "qwen2.5-7b": 7_615_616_512, "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352, "qwen2.5-72b": 72_706_203_648, "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096, "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264, "qwen3-30b-a3b": 30_532_122_624,
    "mixtral-8x7b": 46_702_792_704,
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_llama_and_qwen(name: str) -> None:
    model = load_model(Path("configs/model") / f"{name}.yaml")
    hidden, queries, keys = model.hidden_size, model.projection_size, model.key_value_size
    expert, count = 3 * hidden * model.expert_width, max(model.num_experts, 1)
    router = model.num_experts * hidden
    layer = 2 * hidden + 2 * hidden * (queries + keys) + router + count * expert
    layer += (queries + 2 * keys) * model.qkv_bias + 2 * model.head_dim * model.query_key_norm
    matrices = 1 if model.tie_embeddings else 2
    assert model.name == name and (name.startswith(model.architecture) or name.startswith("mixtral"))
    assert model.parameters == PUBLISHED[name]
    assert model.parameters == matrices * model.vocab_size * hidden + hidden + model.num_layers * layer


@pytest.mark.parametrize(
    ("changes", "messages"),
    [
        (
            {"num_attention_heads": 7},
            ["7 heads do not divide hidden_size 768; give head_dim, or heads that divide"],
        ),
        ({"num_attention_heads": 7, "head_dim": 64}, []),
        ({"head_dim": 63}, ["head_dim 63 is odd; rotary embedding needs an even one"]),
        (
            {"hidden_size": 765, "head_dim": 64},
            ["765 is odd; the localized filter has hidden_size / 2 channels"],
        ),
        ({"hidden_size": 765, "head_dim": 64, "attention": "plain"}, []),
    ],
)
def test_constraints(changes: dict[str, object], messages: list[str]) -> None:
    assert [violation.message for violation in validate_model(toy(**changes))] == messages


def test_overrides() -> None:
    assert load_model("configs/model/yuan2-2b.yaml", ("num_layers=2",)).num_layers == 2
    with pytest.raises(
        ConfigError, match="command line 'num_attention_heads=7': num_attention_heads: 7 heads"
    ):
        load_model("configs/model/yuan2-2b.yaml", ("num_attention_heads=7", "head_dim=0"))
