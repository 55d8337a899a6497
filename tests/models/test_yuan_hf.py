"""A small model written by the published Hugging Face class: our logits and greedy tokens equal its own."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from yuan_train.config.model import ModelConfig
from yuan_train.models.generate import generate
from yuan_train.models.transformer import Transformer

GOLDEN = Path(__file__).parents[1] / "golden" / "yuan_hf_tiny_a"


def read_config() -> ModelConfig:
    hf = json.loads((GOLDEN / "config.json").read_text())
    return ModelConfig(
        name="tiny_a",
        num_layers=hf["num_hidden_layers"],
        hidden_size=hf["hidden_size"],
        num_attention_heads=hf["num_attention_heads"],
        ffn_hidden_size=hf["intermediate_size"],
        vocab_size=hf["vocab_size"],
        norm_epsilon=hf["rms_norm_eps"],
        tie_embeddings=hf["tie_word_embeddings"],
        max_sequence_length=hf["max_position_embeddings"],
    )


def read_weights(num_layers: int) -> dict[str, torch.Tensor]:
    """The published weights under our names.

    q_proj and k_proj are the halves of one query-key matrix whose rows are interleaved per head, not
    queries and keys; silu is applied to up_proj, not gate_proj.
    """
    hf = load_file(GOLDEN / "model.safetensors")
    weights = {
        "embedding.weight": hf["model.embed_tokens.weight"],
        "final_norm.weight": hf["model.norm.weight"],
    }
    for i in range(num_layers):
        layer, attention, mlp = (f"model.layers.{i}{part}" for part in ("", ".self_attn", ".mlp"))
        ours = {
            "attention_norm.weight": hf[f"{layer}.input_layernorm.weight"],
            "feed_forward_norm.weight": hf[f"{layer}.post_attention_layernorm.weight"],
            "attention.value.weight": hf[f"{attention}.v_proj.weight"],
            "attention.query_key.weight": torch.cat(
                [hf[f"{attention}.q_proj.weight"], hf[f"{attention}.k_proj.weight"]]
            ),
            "attention.out.weight": hf[f"{attention}.o_proj.weight"],
            "filter.conv1.weight": hf[f"{attention}.lf_gate.conv1.weight"].squeeze(-1),
            "filter.conv1.bias": hf[f"{attention}.lf_gate.conv1.bias"],
            "filter.conv2.weight": hf[f"{attention}.lf_gate.conv2.weight"].squeeze(-1),
            "filter.conv2.bias": hf[f"{attention}.lf_gate.conv2.bias"],
            "filter.norm.weight": hf[f"{attention}.lf_gate.output_layernorm.weight"],
            "feed_forward.up.weight": torch.cat([hf[f"{mlp}.up_proj.weight"], hf[f"{mlp}.gate_proj.weight"]]),
            "feed_forward.down.weight": hf[f"{mlp}.down_proj.weight"],
        }
        weights.update({f"layers.{i}.{name}": weight for name, weight in ours.items()})
    return weights


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = read_config()
    model = Transformer(config)
    model.load_state_dict(read_weights(config.num_layers), strict=True)
    return model


@pytest.fixture(scope="module")
def expected() -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / "expected.safetensors")


def test_logits(model, expected):
    with torch.no_grad():
        logits = model.logits(model(expected["input_ids"]))
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=2e-5)


def test_logits_by_the_reference_definitions(model, expected, monkeypatch):
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    test_logits(model, expected)


def test_greedy_tokens_with_the_cache(model, expected):
    wanted = expected["greedy"].tolist()
    prompt = expected["prompt"][0].tolist()
    assert list(generate(model, prompt, max_new_tokens=len(wanted), temperature=0)) == wanted


def test_greedy_tokens_with_full_forwards(model, expected):
    ids = expected["prompt"]
    for wanted in expected["greedy"].tolist():
        with torch.no_grad():
            token = model.logits(model(ids)[:, -1]).argmax(-1)
        assert token.item() == wanted
        ids = torch.cat((ids, token[None]), dim=1)
