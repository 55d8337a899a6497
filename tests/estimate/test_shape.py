"""Published sizes against published counts, and any `config.json` of Llama's kind."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.config.test_model import PUBLISHED
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import parse_document
from yuan_train.config.model import load_model
from yuan_train.estimate.shape import PUBLISHED_SHAPES, ModelShape, shape_from_config, shape_of, to_model

COUNTS = PUBLISHED | {"llama3.1-405b": 405_853_388_800}
TINY: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 320,
    "vocab_size": 64,
    "tie_word_embeddings": True,
}


def shape(**changes: Any) -> ModelShape:
    values = {key: value for key, value in (TINY | changes).items() if value != "absent"}
    return shape_from_config(parse_document(json.dumps(values, indent=1), name="config.json"), name="tiny")


def test_the_catalogue_has_the_published_counts_and_the_sizes_of_the_model_files() -> None:
    files = {path.stem: path for path in Path("configs/model").glob("*.yaml")}
    assert len(PUBLISHED_SHAPES) == 11
    for shown, known in PUBLISHED_SHAPES.items():
        name = shown.lower().replace("llama-", "llama")
        assert to_model(known).parameters == known.parameters == COUNTS[name]
        if name in files:
            assert shape_of(load_model(files[name])) == replace(known, name=name)


@pytest.mark.parametrize(
    ("changes", "parameters"),
    [
        # Each equals what transformers 4.57.3 builds from this config.
        ({}, 623_488),
        ({"model_type": "absent"}, 623_488),
        ({"tie_word_embeddings": "absent"}, 631_680),
        ({"attention_bias": True, "mlp_bias": True}, 627_328),
        ({"num_key_value_heads": 8, "head_dim": 16}, 574_336),
        ({"num_key_value_heads": None, "head_dim": None}, 574_336),
        ({"model_type": "mistral", "sliding_window": 4096}, 623_488),
        ({"model_type": "qwen2"}, 624_640),
        ({"model_type": "qwen3"}, 623_680),
        ({"model_type": "qwen3", "attention_bias": True}, 625_216),
    ],
)
def test_counts_of_a_config(changes: dict[str, Any], parameters: int) -> None:
    assert shape(**changes).parameters == parameters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "config.json:2: model_type 'gpt2'; wanted one with Llama's layer: llama"),
        ({"model_type": "gpt2"}, "If its layer is Llama's, write model_type: llama in a copy"),
        (
            {"model_type": "olmoe", "num_experts": 64},
            "model_type 'olmoe'; .* qwen3. a mixture of experts is not counted; wanted a dense model$",
        ),
        ({"model_type": "phi3"}, "model_type 'phi3'; .* qwen3. Its rotary embedding, window and .* its own$"),
        ({"hidden_size": "absent"}, "config.json: no hidden_size; wanted the sizes"),
        ({"vocab_size": "64"}, "config.json:9: vocab_size '64'; wanted a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers True; wanted a whole"),
        ({"intermediate_size": 0}, "intermediate_size 0; wanted a whole"),
        ({"hidden_size": 10**30}, "hidden_size 10+; wanted a whole"),
        (
            {"num_key_value_heads": 3},
            "num_key_value_heads 3 does not divide 8 heads; wanted one of 1, 2, 4, 8",
        ),
        ({"head_dim": None, "hidden_size": 100}, "8 heads do not divide hidden_size 100; give head_dim"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings 'yes'; wanted true or false"),
        ({"num_local_experts": 8}, "num_local_experts: a mixture of experts is not counted"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: quantized weights are not counted"),
    ],
)
def test_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape(**changes)


def test_biases_that_our_engine_lacks() -> None:
    with pytest.raises(ConfigError, match="attention_bias or mlp_bias.*--engine trl-0.14"):
        to_model(shape(attention_bias=True))
