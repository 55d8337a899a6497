"""Llama and Qwen against transformers: weights in and out, logits, gradients and greedy tokens.

transformers makes each tiny model, all of its weights random, and saves it; what we import, compute and
export is compared with what it computes. It runs no code of ours.
"""

import importlib
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_decoders import save_model, write_llama
from tests.support.models import tiny_model
from tests.support.yuan_hf import read_published, same_bits
from yuan_train.checkpoint.hf import export_hf, import_hf
from yuan_train.checkpoint.load import Checkpoint, find_checkpoint, load_weights
from yuan_train.config.model import RopeScaling
from yuan_train.data.tokenizer import Tokenizer, render_chat
from yuan_train.models.decoder import format_of
from yuan_train.models.generate import Sampling, generate
from yuan_train.models.transformer import Transformer, init_weights

pytestmark = pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")

SIZES = {
    "vocab_size": 96, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 500.0,
    "rms_norm_eps": 1e-5, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 8.0}
MOE = {"head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_scaling": LLAMA3}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True, "num_key_value_heads": 1, "head_dim": 8}),
    "linear": ("Llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    # 40 tokens are beyond the original 16, as they are with yarn.
    "dynamic": ("Llama", {"rope_scaling": {"type": "dynamic", "factor": 4.0}, "max_position_embeddings": 16}),
    "yarn": ("Llama", {"rope_scaling": YARN, "max_position_embeddings": 16}),
    "yarn-factor": ("Qwen2", {"rope_scaling": YARN | {"attention_factor": 0.8, "beta_slow": 0.5}}),
    "qwen2": ("Qwen2", {"sliding_window": 8, "use_sliding_window": False}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    "qwen3": ("Qwen3", {"head_dim": 24, "tie_word_embeddings": True}),
    "qwen3-untied": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 4}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    # 40 tokens of at most 64: the window holds them.
    "mistral-window": ("Mistral", {"sliding_window": 64}),
    "mixtral": ("Mixtral", {"num_local_experts": 5, "num_experts_per_tok": 3, "head_dim": 12}),
    "qwen3-moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True, "tie_word_embeddings": True}),
    "qwen3-moe-shares": ("Qwen3Moe", MOE | {"norm_topk_prob": False}),
}
TOKENS = torch.randint(0, 96, (2, 40), generator=torch.Generator().manual_seed(1))


@dataclass(frozen=True)
class Pair:
    """The same model in transformers and here."""

    theirs: Any
    ours: Transformer
    checkpoint: Checkpoint
    folder: Path
    """As transformers saved it."""


@pytest.fixture(scope="module")
def transformers() -> Iterator[Any]:
    """The library, imported only where a test needs it: that takes seconds."""
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module("transformers")


@pytest.fixture(scope="module", params=list(CASES))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, transformers: Any) -> Pair:
    family, changes = CASES[request.param]
    if family in ("Mixtral", "Qwen3Moe") and not transformers.__version__.startswith("4."):
        pytest.skip("release 5 stacks the experts in its models: not compared")
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | changes))
    theirs = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, weight in theirs.named_parameters():
            weight.normal_(1.0 if "norm" in name else 0.0, 0.15)
    theirs.save_pretrained(folder / "hf")
    import_hf(folder / "hf", folder / "checkpoint")
    checkpoint = find_checkpoint(folder / "checkpoint")
    ours = Transformer(checkpoint.model)
    load_weights(checkpoint, ours)
    return Pair(theirs, ours, checkpoint, folder / "hf")


@torch.no_grad()
def logits_of(model: Any) -> torch.Tensor:
    return model.logits(model(TOKENS)) if isinstance(model, Transformer) else model(TOKENS).logits


def close(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5)


def test_logits(pair: Pair) -> None:
    wanted = logits_of(pair.theirs)
    assert wanted.std() > 0.3, "the logits are too even to compare"
    close(logits_of(pair.ours), wanted)


def test_gradients(pair: Pair) -> None:
    # All tests have sequences of one length: `dynamic` in transformers keeps the frequencies of the longest.
    inputs, targets = TOKENS, TOKENS.roll(-1, dims=1)
    pair.ours.zero_grad()
    pair.ours.loss(pair.ours(inputs), targets).backward()
    pair.theirs.zero_grad()
    logits = pair.theirs(inputs).logits
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
    theirs = dict(pair.theirs.named_parameters())
    ours = dict(pair.ours.named_parameters())
    layout = list(format_of(pair.ours.config.architecture).published_layout(pair.ours.config))
    assert {mapping.name for mapping in layout} == set(ours)
    for mapping in layout:
        wanted = torch.cat([theirs[part].grad for part in mapping.parts]).view(mapping.shape)
        found = ours[mapping.name].grad
        assert found is not None
        error = (found - wanted).norm() / wanted.norm()
        assert error < 1e-5, f"{mapping.name}: {error}"


def test_greedy_tokens(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("yuan_train.models.generate.PREFILL_CHUNK", 8)
    prompt = TOKENS[:1, :20]  # in three chunks; `dynamic` stretches from 16 on
    pair.theirs(TOKENS[:1, :2])  # a short sequence makes transformers forget the longest one
    options = {"do_sample": False, "max_new_tokens": 12, "attention_mask": torch.ones_like(prompt)}
    wanted = pair.theirs.generate(prompt, **options)[0, prompt.shape[1] :].tolist()
    greedy = Sampling(temperature=0)
    assert list(generate(pair.ours, prompt[0].tolist(), max_new_tokens=12, sampling=greedy)) == wanted


def test_export(pair: Pair, tmp_path: Path, transformers: Any) -> None:
    done = export_hf(pair.checkpoint, tmp_path / "hf", shard_bytes=50_000)
    assert same_bits(read_published(tmp_path / "hf"), read_published(pair.folder))
    assert sum(name.endswith(".safetensors") for name in done.files) > 1
    assert not any(name.endswith(".py") for name in done.files)
    assert "auto_map" not in json.loads((tmp_path / "hf" / "config.json").read_text())
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    assert torch.equal(logits_of(again), logits_of(pair.theirs))


def test_another_config_is_seen(pair: Pair) -> None:
    """The comparisons above would notice a wrong scaling, or an epsilon of another size."""
    model = pair.checkpoint.model
    wrong: list[dict[str, Any]] = [
        {"norm_epsilon": 1e-2},
        {"rope_scaling": RopeScaling(rope_type="linear", factor=1.1)},
    ]
    if model.rope_scaling is not None:
        wrong += [{"rope_scaling": None}, {"rope_scaling": replace(model.rope_scaling, factor=3.0)}]
    wanted = logits_of(pair.theirs)
    for changes in wrong:
        other = Transformer(replace(model, **changes))
        other.load_state_dict(pair.ours.state_dict())
        assert (logits_of(other) - wanted).abs().max() > 1e-3, changes


def test_tokenizers_and_chats(tmp_path: Path, transformers: Any) -> None:
    """Ids, what stands before a text, and rendered chats; once more after import and export."""
    published = write_llama(tmp_path)
    config = json.loads((published / "tokenizer_config.json").read_text())
    del config["auto_map"]  # it names code that is not there
    (published / "tokenizer_config.json").write_text(json.dumps(config))
    import_hf(published, tmp_path / "checkpoints")
    export_hf(find_checkpoint(tmp_path / "checkpoints"), tmp_path / "again")
    ours = Tokenizer.load(tmp_path / "checkpoints" / "step-00000000" / "tokenizer")
    chats = [
        [{"role": "user", "content": " 2 < 3? \n"}],
        [{"role": "system", "content": "é"}, {"role": "user", "content": "a<|eot_id|>"}],
    ]
    for folder in (published, tmp_path / "again"):
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert theirs.bos_token_id == ours.role_id("bos_token")
        for text in ("", "two words", "naïve \N{GRINNING FACE}\n\t"):
            assert theirs(text)["input_ids"] == [*ours.prefix_ids, *ours.encode(text)]
        for chat in chats:
            text = theirs.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
            assert render_chat(ours, chat) == text
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ours.encode(text, special=True) == ids
        ends = transformers.GenerationConfig.from_pretrained(folder).eos_token_id
        assert set(ends) == ours.stop_ids


MINE: dict[str, dict[str, Any]] = {
    "llama": {"architecture": "llama", "rope_scaling": RopeScaling(rope_type="yarn", factor=2.0)},
    "llama-dynamic": {
        "architecture": "llama",
        "tie_embeddings": False,
        "rope_scaling": RopeScaling(rope_type="dynamic", factor=2.0, original_max_position_embeddings=20),
    },
    "qwen2": {"architecture": "qwen", "qkv_bias": True, "tie_embeddings": False},
    "qwen3": {"architecture": "qwen", "query_key_norm": True, "head_dim": 20},
}


@pytest.mark.parametrize("name", list(MINE))
def test_a_model_of_ours_runs_in_transformers(name: str, tmp_path: Path, transformers: Any) -> None:
    sizes = {"num_layers": 2, "hidden_size": 48, "num_key_value_heads": 2, "ffn_hidden_size": 80}
    sizes |= {"vocab_size": 96, "init_std": 0.15, "max_sequence_length": 40, "name": name}
    config = tiny_model("yuan", **sizes, **MINE[name])
    ours = Transformer(config)
    init_weights(ours, seed=3)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=generator))  # norms and biases too
    export_hf(find_checkpoint(save_model(tmp_path / "a", ours)), tmp_path / "hf")
    assert ("lm_head.weight" in read_published(tmp_path / "hf")) == (not config.tie_embeddings)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    close(logits_of(ours), logits_of(theirs))
    import_hf(tmp_path / "hf", tmp_path / "b")
    again = replace(find_checkpoint(tmp_path / "b").model, name=name)
    if config.rope_scaling is not None:  # the original length is written out
        length = config.rope_scaling.original_max_position_embeddings or config.max_sequence_length
        scaling = replace(config.rope_scaling, original_max_position_embeddings=length)
        config = replace(config, rope_scaling=scaling, max_sequence_length=again.max_sequence_length)
    assert again == config
