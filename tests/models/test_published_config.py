"""config.json of Llama and Qwen: what is read from it, what is refused, and what an export writes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import ModelConfig, RopeScaling
from yuan_train.models.attention import rotary_frequencies
from yuan_train.models.decoder import Publishing, format_for, format_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 2048,
    "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 64, "hidden_act": "silu", "attention_bias": False, "attention_dropout": 0.0,
    "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_theta": 500000.0,
    "rope_scaling": {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "max_position_embeddings": 131072, "tie_word_embeddings": True, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}  # fmt: skip
QWEN2: dict[str, Any] = {
    "model_type": "qwen2", "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2, "hidden_act": "silu",
    "max_position_embeddings": 32768, "max_window_layers": 24, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False, "use_mrope": False,
    "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 128, "attention_bias": False, "layer_types": None}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def read(config: dict[str, Any]) -> ModelConfig:
    return format_for(config, where="c.json").model_from_config(config, name="m", where="c.json")


def written(config: dict[str, Any]) -> dict[str, Any]:
    model = read(config)
    return format_of(model.architecture).published_config(
        model, Publishing(dtype="bfloat16", original=config)
    )


MISTRAL = {k: v for k, v in LLAMA.items() if k not in ("rope_scaling", "head_dim")} | {
    "model_type": "mistral"
}


@pytest.mark.parametrize("window", [None, 131072, 200000])
def test_a_mistral_whose_window_holds_the_longest_sequence_is_a_llama(window: int | None) -> None:
    model = read(MISTRAL | {"sliding_window": window})
    assert model == read({**MISTRAL, "model_type": "llama"})
    exported = written(MISTRAL | {"sliding_window": window})
    assert (exported["model_type"], exported["architectures"]) == ("llama", ["LlamaForCausalLM"])
    # What is absent is what it is in transformers.
    bare = {k: v for k, v in MISTRAL.items() if k not in ("num_key_value_heads", "max_position_embeddings")}
    assert read(bare | {"sliding_window": None}).num_key_value_heads == 8
    assert read(bare | {"sliding_window": 131072}).max_sequence_length == 131072


@pytest.mark.parametrize("window", [{"sliding_window": 4096}, {}, {"sliding_window": "4096"}])
def test_a_mistral_with_a_window_in_use_is_refused(window: dict[str, Any]) -> None:
    message = r"c.json: sliding_window '?4096'?: a token sees the last 4096 alone, of up to 131072"
    with pytest.raises(CheckpointError, match=message):
        read(MISTRAL | window)
    if window.get("sliding_window", 4096) == 4096:
        # As the message advises.
        assert read(MISTRAL | window | {"max_position_embeddings": 4096}).max_sequence_length == 4096


MIXTRAL = LLAMA | {"model_type": "mixtral", "rope_scaling": None, "num_local_experts": 8}
QWEN3_MOE = QWEN3 | {"model_type": "qwen3_moe", "num_experts": 128, "norm_topk_prob": True}


def test_mixtures() -> None:
    mixtral, qwen = read(MIXTRAL), read(QWEN3_MOE)
    assert (mixtral.num_experts, mixtral.experts_per_token, mixtral.router) == (8, 2, "softmax")
    assert (qwen.num_experts, qwen.experts_per_token, qwen.expert_width) == (128, 8, 768)
    # As in transformers: the weights are divided by their sum only if the config says so.
    del (silent := dict(QWEN3_MOE))["norm_topk_prob"]
    assert qwen.norm_topk_prob and not read(silent).norm_topk_prob
    assert written(MIXTRAL)["num_local_experts"] == 8 and written(QWEN3_MOE)["norm_topk_prob"]


@pytest.mark.parametrize(
    ("config", "changes", "message"),
    [
        (MIXTRAL, {"router": "attention"}, "router 'attention'"),
        (MIXTRAL, {"norm_topk_prob": False}, "norm_topk_prob false"),
        (MIXTRAL, {"rope_scaling": RopeScaling(rope_type="linear", factor=2.0)}, "rope_scaling"),
        (QWEN3_MOE, {"query_key_norm": False, "qkv_bias": True}, "with query_key_norm"),
    ],
)
def test_mixtures_without_a_published_format(
    config: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    model = replace(read(config), **changes)
    with pytest.raises(CheckpointError, match=message):
        list(format_of(model.architecture).published_layout(model))
        format_of(model.architecture).published_config(model, Publishing(dtype="float32"))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA | {"hidden_act": "gelu"}, "hidden_act 'gelu'; wanted 'silu'"),
        (LLAMA | {"attention_bias": True}, "attention_bias: biases"),
        (QWEN3 | {"attention_bias": True}, "attention_bias: biases"),
        (LLAMA | {"mlp_bias": True}, "mlp_bias: biases"),
        (LLAMA | {"quantization_config": {"bits": 4}}, "quantization_config"),
        (LLAMA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        (LLAMA | {"attention_dropout": 0.1}, "attention_dropout: wanted 0, got 0.1"),
        (LLAMA | {"num_local_experts": 8}, "num_local_experts: a mixture of experts"),
        (QWEN2 | {"num_experts": 60}, "num_experts: a mixture of experts"),
        (QWEN2 | {"model_type": "qwen2_moe"}, "model_type 'qwen2_moe'; wanted one of"),
        (QWEN2 | {"use_sliding_window": True}, "sliding-window attention"),
        (MIXTRAL | {"sliding_window": 4096}, "sliding_window 4096: a mixture with this"),
        (MIXTRAL | {"router_jitter_noise": 0.01}, "router_jitter_noise 0.01"),
        (MIXTRAL | {"num_local_experts": 1}, "num_experts: 1: nothing to choose"),
        (MIXTRAL | {"num_experts_per_tok": 1}, "1 of 8 experts; wanted 2 or more"),
        (QWEN3_MOE | {"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]: a mixture with this"),
        (QWEN3_MOE | {"decoder_sparse_step": 2}, "decoder_sparse_step 2; only 1"),
        (QWEN3_MOE | {"shared_expert_intermediate_size": 64}, "shared_expert_intermediate_size 64"),
        (QWEN3_MOE | {"use_sliding_window": True}, "sliding-window attention"),
        (QWEN3_MOE | {"num_experts_per_tok": 129}, "129 of 128 experts"),
        (QWEN3 | {"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window attention"),
        (QWEN3 | {"layer_types": "sliding_attention"}, "sliding-window attention"),
        (QWEN2 | {"use_mrope": True}, "use_mrope"),
        (LLAMA | {"num_hidden_layers": None}, "no num_hidden_layers"),
        (LLAMA | {"num_hidden_layers": 0}, "num_layers"),
        (LLAMA | {"hidden_size": -2048}, "hidden_size"),
        (LLAMA | {"hidden_size": 2048.5}, "hidden_size"),
        (LLAMA | {"vocab_size": "128256"}, "vocab_size"),
        (LLAMA | {"vocab_size": True}, "vocab_size"),
        (LLAMA | {"num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": None}, "7 heads do not"),
        (LLAMA | {"num_key_value_heads": 5}, "5 key-value heads do not divide 32 heads"),
        (LLAMA | {"num_key_value_heads": 0}, "num_key_value_heads 0; wanted a number above 0"),
        (LLAMA | {"head_dim": 0}, "head_dim 0; wanted a number above 0"),
        (LLAMA | {"head_dim": 63}, "head_dim 63 is odd"),
        (LLAMA | {"max_position_embeddings": 10**30}, "max_sequence_length"),
        (LLAMA | {"max_position_embeddings": None, "rope_scaling": None}, "max_sequence_length"),
        (LLAMA | {"rms_norm_eps": float("nan")}, "norm_epsilon"),
        (LLAMA | {"rms_norm_eps": float("inf")}, "norm_epsilon"),
        (LLAMA | {"rope_theta": float("inf")}, "rope_base"),
        (LLAMA | {"rope_theta": 0}, "rope_base"),
        (LLAMA | {"tie_word_embeddings": 1}, "tie_embeddings"),
        (LLAMA | {"rope_scaling": "llama3"}, "wanted an object"),
        (LLAMA | {"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "type 'longrope' is not"),
        (LLAMA | {"rope_scaling": {"type": "mrope", "mrope_section": [16]}}, "type 'mrope' is not"),
        (LLAMA | {"rope_scaling": {"mrope_section": [16]}}, "mrope_section is not supported"),
        (LLAMA | {"rope_scaling": {"rope_type": ["linear"]}}, r"type \['linear'\] is not"),
        (
            LLAMA | {"rope_scaling": {"type": "linear", "rope_type": "dynamic", "factor": 2.0}},
            "type 'linear'",
        ),
        (LLAMA | {"rope_scaling": YARN | {"mscale": 1.0}}, "rope_scaling.mscale is not supported"),
        (LLAMA | {"rope_scaling": YARN | {"truncate": False}}, "rope_scaling.truncate is not supported"),
        (LLAMA | {"rope_scaling": YARN | {"attention_factor": 0}}, "attention_factor 0"),
        (LLAMA | {"rope_scaling": YARN | {"beta_slow": 40.0}}, "must be less than beta_fast"),
        (LLAMA | {"rope_scaling": YARN | {"factor": float("nan")}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": YARN | {"factor": 1e300}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "linear"}}, "rope_scaling"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"type": "linear", "factor": 0.5}}, "rope_scaling.factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "no low_freq_factor"),
        (
            LLAMA
            | {"rope_scaling": {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 9}},
            "is not max_position_embeddings 131072",
        ),
        (LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 1.0}}, "dynamic scaling begins"),
        (LLAMA | {"rope_parameters": {"rope_type": "default"}}, "rope_parameters and rope_scaling differ"),
    ],
)
def test_configs_that_do_not_fit(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"^c\.json.*{message}"):
        read(config)


def test_the_published_configs_are_read() -> None:
    llama = read(LLAMA)
    assert llama.parameters == 1_235_814_400 and llama.rope_scaling is not None
    assert (llama.rope_scaling.factor, llama.max_sequence_length) == (32.0, 131072)
    assert (read(QWEN2).parameters, read(QWEN2).qkv_bias) == (494_032_768, True)
    assert (read(QWEN3).projection_size, read(QWEN3).query_key_norm) == (14 * 128, True)


def test_absent_keys_mean_what_they_mean_in_transformers() -> None:
    sizes = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    llama = read({key: LLAMA[key] for key in (*sizes, "num_attention_heads")})
    assert (llama.key_value_heads, llama.head_dim, llama.max_sequence_length) == (32, 64, 2048)
    assert (llama.rope_base, llama.norm_epsilon, llama.tie_embeddings) == (10000.0, 1e-6, False)
    qwen = read({key: QWEN3[key] for key in sizes} | {"num_attention_heads": 64})
    assert (qwen.key_value_heads, qwen.head_dim, qwen.max_sequence_length) == (32, 128, 32768)


def test_both_forms_of_a_scaling_are_read() -> None:
    older = QWEN2 | {"rope_scaling": YARN}
    newer = {key: value for key, value in QWEN2.items() if key != "rope_theta"} | {
        "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "yarn"}
        | {key: value for key, value in YARN.items() if key != "type"}
    }
    assert read(older) == read(newer)
    assert read(older).max_sequence_length == 4 * 32768
    default = QWEN2 | {"rope_parameters": {"rope_theta": 5e6, "rope_type": "default", "factor": None}}
    assert (read(default).rope_base, read(default).rope_scaling) == (5e6, None)


@pytest.mark.parametrize(
    "config",
    [
        LLAMA,
        QWEN2,
        QWEN3,
        QWEN2 | {"rope_scaling": YARN},
        QWEN2 | {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
        LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    ],
)
def test_a_written_config_is_read_again(config: dict[str, Any]) -> None:
    again = written(config)
    assert read(again) == read(config)
    assert again["architectures"] == [f"{config['model_type'].capitalize()}ForCausalLM"]
    assert again["torch_dtype"] == "bfloat16" and "auto_map" not in again
    assert again.get("eos_token_id") == config.get("eos_token_id")


def test_code_and_the_newer_form_are_not_kept() -> None:
    parameters = {"rope_theta": 500000.0, **LLAMA["rope_scaling"]}
    newer = LLAMA | {"rope_scaling": None, "rope_parameters": parameters, "auto_map": {"AutoModel": "evil.M"}}
    again = written(newer)
    assert "rope_parameters" not in again and "evil" not in str(again)
    assert again["rope_scaling"] == LLAMA["rope_scaling"]


NUMBERS = st.integers(-2, 300) | st.floats() | st.integers() | st.booleans() | st.none()
SCALINGS = st.fixed_dictionaries(
    {"rope_type": st.sampled_from(["linear", "dynamic", "llama3", "yarn", "default"])},
    optional={
        key: st.floats(0.5, 100) | NUMBERS
        for key in (
            *("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
            *("attention_factor", "beta_fast", "beta_slow", "mscale"),
        )
    },
)
KEYS = st.sampled_from([*LLAMA, "rope_parameters", "partial_rotary_factor", "layer_types", "num_experts"])
VALUES = NUMBERS | st.text(max_size=4) | st.lists(NUMBERS, max_size=2) | SCALINGS


@settings(derandomize=True, max_examples=60)
@given(changes=st.dictionaries(KEYS, VALUES, max_size=3), scaling=SCALINGS | st.none())
def test_fuzzed_configs(changes: dict[str, Any], scaling: dict[str, Any] | None) -> None:
    """Any values give either a model whose rotary frequencies can be computed, or a CheckpointError."""
    try:
        model = read(LLAMA | {"rope_scaling": scaling, "max_position_embeddings": 64} | changes)
    except CheckpointError:
        return
    if model.head_dim > 1000:
        return  # no weights have this shape
    frequencies, factor = rotary_frequencies(
        model, length=model.max_sequence_length, device=torch.device("cpu"), dtype=torch.float64
    )
    assert not frequencies.isnan().any() and factor > 0
