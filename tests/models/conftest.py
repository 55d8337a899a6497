"""Small models with all features of the large ones."""

import pytest
import torch

from tests.support.models import tiny_model
from yuan_train.config.model import ModelConfig
from yuan_train.models.transformer import Transformer, init_weights

PARTS = ("layers", "embedding", "head", "recompute", "recompute_layers")


@pytest.fixture
def make_config():
    def make(**changes) -> ModelConfig:
        sizes = {"num_layers": 3, "hidden_size": 24, "num_attention_heads": 3, "ffn_hidden_size": 40}
        # Weights far from 0, so that every term matters.
        sizes |= {"vocab_size": 50, "init_std": 0.3, "max_sequence_length": 64}
        return tiny_model("yuan", **(sizes | changes))

    return make


@pytest.fixture
def make_model(make_config):
    def make(*, seed=7, dtype=torch.float64, **changes):
        part = {key: changes.pop(key) for key in PARTS if key in changes}
        model = Transformer(make_config(**changes), dtype=dtype, **part)
        init_weights(model, seed=seed)
        return model

    return make


@pytest.fixture
def tokens_BS():
    """Two sequences of 12 tokens; 9 ends a document: inside, at the end, twice in a row."""
    tokens = torch.randint(10, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    tokens[0, 4] = 9
    tokens[1, [0, 6, 7, 11]] = 9
    return tokens
