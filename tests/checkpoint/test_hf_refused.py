"""Import and export of the published format: what is refused, and what fuzzed files give."""

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.yuan_hf import GOLDEN, Evil, copy_of
from yuan_train.checkpoint import hf
from yuan_train.checkpoint.hf import export_hf, import_hf
from yuan_train.checkpoint.load import find_checkpoint
from yuan_train.config.errors import CheckpointError
from yuan_train.models.architectures.yuan import model_from_config

Q = "model.layers.0.self_attn.q_proj.weight"
INV_FREQ = "model.layers.1.self_attn.rotary_emb.inv_freq"


def refused(message: str, folder: Path, out: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        import_hf(folder, out)


def rename(old: str, new: str) -> Any:
    return lambda tensors: tensors.__setitem__(new, tensors.pop(old))


def swap(name: str, value: Any) -> Any:
    return lambda tensors: tensors.__setitem__(name, value(tensors[name]))


def spoil(value: float) -> Any:
    return lambda tensors: tensors["model.layers.2.mlp.up_proj.weight"].view(-1).__setitem__(5, value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(Q), r"q_proj\.weight is missing"),
        (rename(Q, Q + "x"), r"q_proj\.weight is missing; .*q_proj\.weightx is not a tensor of this model"),
        (lambda t: t.update(extra=torch.ones(2)), "extra is not a tensor of this model"),
        (swap(Q, lambda w: w[:-1].clone()), r"has shape \[63, 64\], wanted \[64, 64\]"),
        (swap(Q, lambda w: w.to(torch.int32)), r"is of type (I32; wanted F32, BF16 or F16|torch\.int32)"),
        (swap(Q, lambda w: w.to(torch.float8_e4m3fn)), "is of type (F8_E4M3;|torch.float8_e4m3fn)"),
        (swap(Q, lambda w: w.double()), "is of type torch.float64"),
        (spoil(float("nan")), r"layers\.2\.mlp\.up_proj\.weight: holds values that are not finite"),
        (spoil(float("inf")), "not finite"),
        (swap("lm_head.weight", lambda w: w + 1), "lm_head.weight differs from model.embed_tokens.weight"),
        (swap(INV_FREQ, lambda w: w / 2), "not those of rope_theta 10000"),
    ],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_tensors_that_do_not_fit(tmp_path: Path, change: Any, message: str, pickled: bool) -> None:
    folder = copy_of(tmp_path / "hf", change=change, pickled=pickled)
    refused(message, folder, tmp_path / "new" / "out")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 128}, r"has shape \[96, 64\], wanted \[128, 64\]"),
        ({"num_hidden_layers": 4}, "layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 10**12}, "says 1000000000000 layers, the weights hold 48 tensors"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"hidden_size": "64"}, "describes no model"),
        ({"num_attention_heads": 5, "attention_projection_size": None}, "5 heads do not divide"),
        ({"model_type": "mamba"}, "model_type 'mamba'; wanted one of"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"rope_scaling": {"type": "yarn"}}, "rope_scaling"),
        ({"use_shareqk": True}, "use_shareqk"),
        ({"num_experts": 32}, "mixture of experts"),
        ({"num_key_value_heads": 1}, "grouped queries"),
        ({"quantization_config": {"bits": 4}}, "unquantized"),
        ({"rms_norm_eps": -1}, "describes no model"),
    ],
)
def test_configs_that_do_not_fit(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    refused(message, copy_of(tmp_path / "hf", config=config), tmp_path / "out")


def test_missing_files(tmp_path: Path) -> None:
    refused("no such directory", tmp_path / "nowhere", tmp_path / "out")
    refused(r"config\.json: no such file", tmp_path, tmp_path / "out")
    folder = copy_of(tmp_path / "hf", shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "moved")
    refused("00002-of-00003.safetensors: the shard is missing", folder, tmp_path / "out")
    for path in folder.glob("model*"):
        path.unlink()
    refused("no weights: wanted model.safetensors", folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "no weight_map"),
        ({"a": "../model.safetensors"}, "not the name of a file in this folder"),
        ({"a": "/etc/passwd"}, "not the name of a file in this folder"),
        ({"a": 3}, "not the name of a file in this folder"),
        ({"model.norm.weight": "model.safetensors"}, "is in the file only"),
    ],
)
def test_indexes_that_do_not_fit(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    folder = copy_of(tmp_path / "hf")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(message, folder, tmp_path / "out")


def wrong_length(content: bytes) -> bytes:
    return struct.pack("<Q", 1 << 60) + content[8:]


def overlapping(content: bytes) -> bytes:
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header["model.norm.weight"]["data_offsets"] = [0, 256]
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + content[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:5],
        lambda content: content[:200],
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: b"\x00" * 64,
        wrong_length,
        overlapping,
    ],
)
def test_truncated_and_corrupt_safetensors(tmp_path: Path, damage: Any) -> None:
    folder = copy_of(tmp_path / "hf")
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    refused("torn, or no safetensors file", folder, tmp_path / "out")


def import_or_refuse(folder: Path, out: Path) -> None:
    """Import; any bytes must give either a checkpoint, or a CheckpointError and no files."""
    try:
        import_hf(folder, out)
    except CheckpointError:
        assert not list(out.glob("*"))
    finally:
        shutil.rmtree(out, ignore_errors=True)


@settings(derandomize=True, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), pickled=st.booleans())
def test_fuzzed_files(tmp_path: Path, data: st.DataObject, pickled: bool) -> None:
    folder = copy_of(tmp_path / f"hf{pickled}", pickled=pickled)
    path = folder / ("pytorch_model.bin" if pickled else "model.safetensors")
    content = bytearray(path.read_bytes())
    # The first and the last bytes do the most harm: header, names, zip directory.
    offsets = st.integers(0, len(content) - 1) | st.integers(0, 6000) | st.integers(-6000, -1)
    for offset in data.draw(st.lists(offsets, min_size=1, max_size=8)):
        content[offset] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content) - 1)) :]
    path.write_bytes(content)
    import_or_refuse(folder, tmp_path / "out")


VALUES = st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=5)


@settings(derandomize=True, max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    changes=st.dictionaries(
        st.sampled_from(
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act "
            "head_dim max_position_embeddings model_max_length rms_norm_eps tie_word_embeddings rope_theta "
            "rope_parameters attention_projection_size initializer_range localized_filter model_type "
            "reset_position_ids".split()
        ),
        VALUES | st.lists(VALUES, max_size=2) | st.dictionaries(st.text(max_size=3), VALUES, max_size=2),
        min_size=1,
        max_size=3,
    )
)
def test_fuzzed_configs(tmp_path: Path, changes: dict[str, Any]) -> None:
    import_or_refuse(copy_of(tmp_path / "hf", config=changes), tmp_path / "out")


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, legacy: bool) -> None:
    folder = copy_of(tmp_path / "hf", pickled=True)
    path = folder / "pytorch_model.bin"
    content = torch.load(path, weights_only=True) | {"extra": Evil(tmp_path / "ran")}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    refused("nothing in it was run", folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 torn", b"\x80\x04.", b"cos\nsystem\n(S'touch ran'\ntR."], ids=range(4)
)
def test_truncated_and_corrupt_pickles(
    tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_of(tmp_path / "hf", pickled=True)
    (folder / "pytorch_model.bin").write_bytes(content)
    refused("torn, or holds more than tensors", folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_a_legacy_pickle_is_read(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "hf", pickled=True)
    path = folder / "pytorch_model.bin"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert import_hf(folder, tmp_path / "out").tensors == 48


def test_a_pickle_with_more_than_tensors_is_refused(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "hf", pickled=True)
    for content, message in (([1], "holds list"), ({"a": 1}, "'a' is int")):
        torch.save(content, folder / "pytorch_model.bin")
        refused(message, folder, tmp_path / "out")


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    import_hf(GOLDEN, tmp_path / "out")
    refused("holds checkpoints already", GOLDEN, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    checkpoint = find_checkpoint(tmp_path / "out")
    with pytest.raises(CheckpointError, match="already exists"):
        export_hf(checkpoint, tmp_path / "full")
    with pytest.raises(CheckpointError, match="wanted one of float32"):
        export_hf(checkpoint, tmp_path / "new", dtype="int8")
    assert not (tmp_path / "new").exists()


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import_hf(GOLDEN, tmp_path / "a")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(hf, "write_safetensors", full)
    with pytest.raises(CheckpointError, match="No space left"):
        export_hf(find_checkpoint(tmp_path / "a"), tmp_path / "export")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_config_without_a_length() -> None:
    config = json.loads((GOLDEN / "config.json").read_text())
    del config["max_position_embeddings"]
    assert model_from_config(config, name="x", where="x").max_sequence_length == 256
    del config["model_max_length"]
    with pytest.raises(CheckpointError, match="no max_position_embeddings"):
        model_from_config(config, name="x", where="x")
