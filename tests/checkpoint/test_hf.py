"""The published form in and out: round trips bit for bit, and everything that is refused."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.project import MODEL
from tests.support.yuan_hf import GOLDEN, copy_of, read_published, same_bits
from yuan_train.checkpoint import hf
from yuan_train.checkpoint.hf import export_hf, import_hf, weights_state
from yuan_train.checkpoint.load import find_checkpoint, load_weights
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.checkpoint.stream import LazyTensor, save_streamed, shards_of
from yuan_train.checkpoint.yuan_layout import model_of, published_config, published_layout
from yuan_train.config.errors import CheckpointError
from yuan_train.config.load import Document, build
from yuan_train.config.model import ModelConfig
from yuan_train.model.transformer import Transformer, init_weights

ROOT = Path(__file__).parents[2]
Q, K = (f"model.layers.0.self_attn.{part}_proj.weight" for part in "qk")


def there_and_back(folder: Path, place: Path, **options: Any) -> Path:
    import_hf(folder, place / "checkpoint")
    return Path(export_hf(find_checkpoint(place / "checkpoint"), place / "export", **options).path)


# --- there and back --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [{}, {"shards": 3}, {"pickled": True}, {"pickled": True, "shards": 2}])
def test_the_way_back_gives_the_same_bits(tmp_path: Path, dtype: torch.dtype, form: dict[str, Any]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    folder = copy_of(tmp_path / "hf", change=change, **form)
    wanted = read_published(copy_of(tmp_path / "plain", change=change))
    export = there_and_back(folder, tmp_path, shard_bytes=100_000)
    assert same_bits(read_published(export), wanted)
    index = json.loads((export / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted)
    sizes = [path.stat().st_size for path in export.glob("*.safetensors")]
    assert len(sizes) == len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())


def test_types_may_be_mixed_and_head_and_buffers_absent(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            if "norm" not in name:
                tensors[name] = tensors[name].bfloat16()
            if name == "lm_head.weight" or name.endswith("inv_freq"):
                del tensors[name]
        tensors[K] = tensors[K].float()

    folder = copy_of(tmp_path / "hf", change=change)
    assert same_bits(read_published(there_and_back(folder, tmp_path)), read_published(folder))


def test_signed_zeros_and_the_smallest_numbers_survive(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"][:3] = torch.tensor([-0.0, 1e-45, -1e-40])

    folder = copy_of(tmp_path / "hf", change=change)
    assert same_bits(read_published(there_and_back(folder, tmp_path)), read_published(folder))


def test_an_untied_head(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1

    folder = copy_of(tmp_path / "hf", change=change, config={"tie_word_embeddings": False})
    assert same_bits(read_published(there_and_back(folder, tmp_path)), read_published(folder))
    assert not find_checkpoint(tmp_path / "checkpoint").model.tie_embeddings


def test_heads_wider_than_the_model_and_plain_attention(tmp_path: Path) -> None:
    plain = MODEL | {"head_dim": 24, "attention": "plain", "tie_embeddings": False}
    model = Transformer(build(Document("test", plain, {}), ModelConfig))
    init_weights(model, seed=1)
    tensors = {f"weights.{name}": weight.detach() for name, weight in model.named_parameters()}
    save_checkpoint(tmp_path / "a", step=7, tensors=tensors, state=weights_state(model.config) | {"step": 7})
    export = Path(export_hf(find_checkpoint(tmp_path / "a"), tmp_path / "hf").path)
    import_hf(export, tmp_path / "b")
    again = Transformer(find_checkpoint(tmp_path / "b").model)
    load_weights(find_checkpoint(tmp_path / "b"), again)
    assert all(torch.equal(w, dict(again.named_parameters())[n]) for n, w in model.named_parameters())


def test_what_was_trained_is_exported_in_the_precision_of_its_run(tmp_path: Path) -> None:
    model = Transformer(build(Document("test", MODEL, {}), ModelConfig))
    init_weights(model, seed=1)
    tensors = {f"weights.{name}": weight.detach() for name, weight in model.named_parameters()}
    state = weights_state(model.config, {"reset_attention": True})
    state["run"]["train"] = {"precision": "bf16"}
    save_checkpoint(tmp_path / "a", step=7, tensors=tensors, state=state | {"step": 7})
    done = export_hf(find_checkpoint(tmp_path / "a"), tmp_path / "hf")
    published = read_published(tmp_path / "hf")
    assert done.dtype == "bfloat16" and {t.dtype for t in published.values()} == {torch.bfloat16}
    assert torch.equal(published["lm_head.weight"], published["model.embed_tokens.weight"])
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert config["reset_attention_mask"] and config["eod_token"] == 77185
    wide = export_hf(find_checkpoint(tmp_path / "a"), tmp_path / "wide", dtype="float32")
    up = read_published(tmp_path / "wide")["model.layers.0.mlp.up_proj.weight"]
    assert wide.dtype == "float32"
    assert torch.equal(up, model.state_dict()["layers.0.feed_forward.up.weight"][: up.shape[0]])


def test_every_key_that_the_published_class_reads_is_written(tmp_path: Path) -> None:
    config = json.loads((there_and_back(GOLDEN, tmp_path) / "config.json").read_text())
    original = json.loads((GOLDEN / "config.json").read_text())
    changed = {"architectures", "torch_dtype"}
    assert {key: config[key] for key in original if key not in changed} == {
        key: value for key, value in original.items() if key not in changed
    }
    wanted = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads hidden_act "
        "model_max_length rms_norm_eps pad_token_id bos_token_id eos_token_id tie_word_embeddings "
        "max_position_embeddings causal_mask use_flash_attention eod_token sep_token reset_attention_mask "
        "reset_position_ids use_loss_mask auto_map"
    )
    assert set(wanted.split()) <= set(
        published_config(find_checkpoint(tmp_path / "checkpoint").model, dtype="")
    )


def test_the_layout_counts_as_published() -> None:
    sizes = {
        "name": "2b",
        "num_layers": 24,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "ffn_hidden_size": 8192,
        "vocab_size": 135_040,
    }
    layout = list(published_layout(build(Document("test", sizes, {}), ModelConfig)))
    assert sum(len(mapped.parts) for mapped in layout) + 1 == 14 * 24 + 3  # with lm_head
    assert sum(torch.Size(mapped.shape).numel() for mapped in layout) == 2_088_724_480


def test_only_one_tensor_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = most = 0

    def tensor(number: int) -> LazyTensor:
        def read() -> torch.Tensor:
            nonlocal held, most
            held += 1
            most = max(most, held)
            array = torch.full((1000,), float(number))
            weakref.finalize(array, _let_go)
            return array

        return LazyTensor((1000,), torch.float32, read)

    def _let_go() -> None:
        nonlocal held
        held -= 1

    state = weights_state(build(Document("test", MODEL, {}), ModelConfig))
    save_streamed(tmp_path, tensors={f"weights.{i}": tensor(i) for i in range(20)}, state=state)
    assert most <= 3  # the one being written, its detached copy, the one before


def test_shards() -> None:
    tensors = [
        (name, LazyTensor((size,), torch.float32, torch.Tensor))
        for name, size in zip("abcd", [2, 2, 9, 1], strict=True)
    ]
    assert [list(shard) for shard in shards_of(tensors, 16)] == [["a", "b"], ["c"], ["d"]]


# --- what is refused -------------------------------------------------------------------------------------


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
        (rename(Q, Q + "x"), r"q_proj\.weight is missing; .*q_proj\.weightx is no tensor of this model"),
        (lambda t: t.update(extra=torch.ones(2)), "extra is no tensor of this model"),
        (swap(Q, lambda w: w[:-1].clone()), r"has shape \[63, 64\], wanted \[64, 64\]"),
        (swap(Q, lambda w: w.to(torch.int32)), "is of type"),
        (swap(Q, lambda w: w.double()), "is of type torch.float64"),
        (spoil(float("nan")), r"layers\.2\.mlp\.up_proj\.weight: holds values that are not finite"),
        (spoil(float("inf")), "not finite"),
        (swap("lm_head.weight", lambda w: w + 1), "lm_head.weight differs from model.embed_tokens.weight"),
        (
            swap("model.layers.1.self_attn.rotary_emb.inv_freq", lambda w: w / 2),
            "not those of rope_theta 10000",
        ),
    ],
)
@pytest.mark.parametrize("pickled", [False, True])
def test_tensors_that_do_not_fit(tmp_path: Path, change: Any, message: str, pickled: bool) -> None:
    folder = copy_of(tmp_path / "hf", change=change, pickled=pickled)
    with pytest.raises(CheckpointError, match=message):
        import_hf(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists() or not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"vocab_size": 128}, r"has shape \[96, 64\], wanted \[128, 64\]"),
        ({"num_hidden_layers": 4}, "layers.3.input_layernorm.weight is missing"),
        ({"num_hidden_layers": 10**12}, "says 1000000000000 layers, the weights hold 48 tensors"),
        ({"num_hidden_layers": None}, "no num_hidden_layers"),
        ({"hidden_size": "64"}, "describes no model"),
        ({"num_attention_heads": 5, "attention_projection_size": None}, "5 heads do not divide"),
        ({"model_type": "llama"}, "model_type 'llama'; wanted 'yuan'"),
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
    with pytest.raises(CheckpointError, match=message):
        import_hf(copy_of(tmp_path / "hf", config=config), tmp_path / "out")


def test_missing_files(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        import_hf(tmp_path / "nowhere", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"config\.json: no such file"):
        import_hf(tmp_path, tmp_path / "out")
    folder = copy_of(tmp_path / "hf", shards=3)
    shard = folder / "model-00002-of-00003.safetensors"
    shard.rename(tmp_path / "aside")
    with pytest.raises(CheckpointError, match="00002-of-00003.safetensors: the shard is missing"):
        import_hf(folder, tmp_path / "out")
    for path in folder.glob("model*"):
        path.unlink()
    with pytest.raises(CheckpointError, match="no weights: wanted model.safetensors"):
        import_hf(folder, tmp_path / "out")


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "no weight_map"),
        ({"a": "../model.safetensors"}, "no name of a file beside it"),
        ({"a": "/etc/passwd"}, "no name of a file beside it"),
        ({"a": 3}, "no name of a file beside it"),
        ({"model.norm.weight": "model.safetensors"}, "is in the file only"),
    ],
)
def test_indexes_that_do_not_fit(tmp_path: Path, weight_map: dict[str, Any], message: str) -> None:
    folder = copy_of(tmp_path / "hf")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        import_hf(folder, tmp_path / "out")


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
def test_torn_safetensors(tmp_path: Path, damage: Any) -> None:
    folder = copy_of(tmp_path / "hf")
    path = folder / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="torn, or no safetensors file"):
        import_hf(folder, tmp_path / "out")


def import_or_refuse(folder: Path, out: Path) -> None:
    """Whatever the bytes say: a checkpoint, or the user's error; nothing else."""
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
    # Most of the harm is in the first bytes and the last: header, names, zip directory.
    places = st.integers(0, len(content) - 1) | st.integers(0, 6000) | st.integers(-6000, -1)
    for place in data.draw(st.lists(places, min_size=1, max_size=8)):
        content[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(1, len(content) - 1)) :]
    path.write_bytes(content)
    import_or_refuse(folder, tmp_path / "out")


VALUES = st.none() | st.booleans() | st.integers(-5, 200) | st.floats() | st.text(max_size=5)


@settings(derandomize=True, max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


class Evil:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("legacy", [False, True])
def test_code_in_a_pickle_is_not_run(tmp_path: Path, legacy: bool) -> None:
    folder = copy_of(tmp_path / "hf", pickled=True)
    path = folder / "pytorch_model.bin"
    content = torch.load(path, weights_only=True) | {"extra": Evil(tmp_path / "ran")}
    torch.save(content, path, _use_new_zipfile_serialization=not legacy)
    with pytest.raises(CheckpointError, match="nothing in it was run"):
        import_hf(folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04 torn", b"\x80\x04.", b"cos\nsystem\n(S'touch ran'\ntR."], ids=range(4)
)
def test_torn_pickles(tmp_path: Path, content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_of(tmp_path / "hf", pickled=True)
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(CheckpointError, match="torn, or holds more than tensors"):
        import_hf(folder, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_a_legacy_pickle_is_read(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "hf", pickled=True)
    path = folder / "pytorch_model.bin"
    torch.save(torch.load(path, weights_only=True), path, _use_new_zipfile_serialization=False)
    assert import_hf(folder, tmp_path / "out").tensors == 48


def test_what_a_pickle_holds_beside_tensors(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "hf", pickled=True)
    for content, message in (([1], "holds list"), ({"a": 1}, "'a' is int")):
        torch.save(content, folder / "pytorch_model.bin")
        with pytest.raises(CheckpointError, match=message):
            import_hf(folder, tmp_path / "out")


def test_python_beside_the_weights_is_not_run(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "hf", config={"auto_map": {"AutoConfig": "evil.Config"}})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    export = there_and_back(folder, tmp_path)
    assert not (tmp_path / "ran").exists()
    assert not (export / "evil.py").exists()
    assert "evil" not in (export / "config.json").read_text()


def test_nothing_is_written_over(tmp_path: Path) -> None:
    import_hf(GOLDEN, tmp_path / "out")
    with pytest.raises(CheckpointError, match="holds checkpoints already"):
        import_hf(GOLDEN, tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    checkpoint = find_checkpoint(tmp_path / "out")
    with pytest.raises(CheckpointError, match="is there already"):
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
    assert model_of(config, name="x", where="x").max_sequence_length == 256
    del config["model_max_length"]
    with pytest.raises(CheckpointError, match="no max_position_embeddings"):
        model_of(config, name="x", where="x")


# --- in the real transformers ----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
def test_the_export_runs_in_transformers(tmp_path: Path) -> None:
    export = there_and_back(GOLDEN, tmp_path)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    ran = subprocess.run(
        [sys.executable, ROOT / "tools" / "check_export.py", export, GOLDEN / "expected.safetensors"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
