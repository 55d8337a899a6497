"""Import and export of the published format: bitwise round trips; for what is refused: test_hf_refused.py."""

import json
import os
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_decoders import save_model
from tests.support.models import tiny_model
from tests.support.project import MODEL
from tests.support.yuan_hf import GOLDEN, copy_of, read_published, same_bits
from yuan_train.checkpoint.hf import export_hf, import_hf, weights_state
from yuan_train.checkpoint.load import LazyTensor, find_checkpoint, load_weights
from yuan_train.checkpoint.save import save_checkpoint, save_streamed, split_into_shards
from yuan_train.config.load import Document, build
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.models.architectures.yuan import published_config, published_layout
from yuan_train.models.decoder import Publishing, format_of
from yuan_train.models.transformer import Transformer, init_weights

ROOT = Path(__file__).parents[2]
K = "model.layers.0.self_attn.k_proj.weight"


def round_trip(folder: Path, out: Path, **options: Any) -> Path:
    """Import a folder and export it again; the export's folder."""
    import_hf(folder, out / "checkpoint")
    return Path(export_hf(find_checkpoint(out / "checkpoint"), out / "export", **options).path)


# --- round trips -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", [{}, {"shards": 3}, {"pickled": True}, {"pickled": True, "shards": 2}])
def test_a_round_trip_gives_the_same_bits(tmp_path: Path, dtype: torch.dtype, form: dict[str, Any]) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors.update({name: tensor.to(dtype) for name, tensor in tensors.items()})

    folder = copy_of(tmp_path / "hf", change=change, **form)
    wanted = read_published(copy_of(tmp_path / "plain", change=change))
    export = round_trip(folder, tmp_path, shard_bytes=100_000)
    assert same_bits(read_published(export), wanted)
    index = json.loads((export / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(wanted)
    sizes = [path.stat().st_size for path in export.glob("*.safetensors")]
    assert len(sizes) == len(set(index["weight_map"].values())) > 1
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in wanted.values())


def mixed_without_head_and_buffers(tensors: dict[str, torch.Tensor]) -> None:
    for name in list(tensors):
        if "norm" not in name:
            tensors[name] = tensors[name].bfloat16()
        if name == "lm_head.weight" or name.endswith("inv_freq"):
            del tensors[name]
    tensors[K] = tensors[K].float()


def with_signed_zeros_and_denormal_numbers(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][:3] = torch.tensor([-0.0, 1e-45, -1e-40])


@pytest.mark.parametrize("change", [mixed_without_head_and_buffers, with_signed_zeros_and_denormal_numbers])
def test_unusual_tensors_are_kept(tmp_path: Path, change: Any) -> None:
    folder = copy_of(tmp_path / "hf", change=change)
    assert same_bits(read_published(round_trip(folder, tmp_path)), read_published(folder))


def test_an_untied_head(tmp_path: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1

    folder = copy_of(tmp_path / "hf", change=change, config={"tie_word_embeddings": False})
    assert same_bits(read_published(round_trip(folder, tmp_path)), read_published(folder))
    assert not find_checkpoint(tmp_path / "checkpoint").model.tie_embeddings


def test_heads_wider_than_the_model_and_plain_attention(tmp_path: Path) -> None:
    plain = MODEL | {"head_dim": 24, "attention": "plain", "tie_embeddings": False}
    model = Transformer(build(Document("test", plain, {}), ModelConfig))
    init_weights(model, seed=1)
    made = find_checkpoint(save_model(tmp_path / "a", model))
    export = Path(export_hf(made, tmp_path / "hf").path)
    import_hf(export, tmp_path / "b")
    again = Transformer(find_checkpoint(tmp_path / "b").model)
    load_weights(find_checkpoint(tmp_path / "b"), again)
    assert all(torch.equal(w, dict(again.named_parameters())[n]) for n, w in model.named_parameters())


def test_a_trained_model_is_exported_in_the_precision_of_its_run(tmp_path: Path) -> None:
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


@pytest.mark.parametrize(("name", "words"), [("yuan", ""), ("qwen3", "no word for reset_position_ids, r")])
def test_what_the_format_has_no_word_for_is_told(tmp_path: Path, name: str, words: str) -> None:
    model = Transformer(tiny_model(name))
    init_weights(model, seed=1)
    tensors = {f"weights.{name}": weight.detach() for name, weight in model.named_parameters()}
    state = weights_state(model.config, {"reset_attention": True})
    save_checkpoint(tmp_path / "a", step=0, tensors=tensors, state=state)
    notes = export_hf(find_checkpoint(tmp_path / "a"), tmp_path / "hf").notes
    assert words in "".join(notes) and len(notes) == bool(words)


def test_python_files_in_the_folder_are_not_run(tmp_path: Path) -> None:
    folder = copy_of(tmp_path / "hf", config={"auto_map": {"AutoConfig": "evil.Config"}})
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    export = round_trip(folder, tmp_path)
    assert not (tmp_path / "ran").exists()
    assert not (export / "evil.py").exists()
    assert "evil" not in (export / "config.json").read_text()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("yuan", {"rotary_dim": 8}),
        ("yuan", {"rotary_form": "bf16_frequencies"}),
        ("yuan-m32", {"rotary_dim": 0}),
        ("yuan-m32", {"rotary_form": "bf16"}),
    ],
)
def test_an_exported_config_is_read_as_the_same_model(name: str, changes: dict[str, Any]) -> None:
    model = tiny_model(name, **changes)
    published = format_of(model.architecture)
    config = published.published_config(model, Publishing(dtype="float32"))
    again = published.model_from_config(config, name=model.name, where="config.json")
    assert (again.rotary_size, again.rotary_form) == (model.rotary_size, model.rotary_form)


def test_every_key_that_the_published_class_reads_is_written(tmp_path: Path) -> None:
    config = json.loads((round_trip(GOLDEN, tmp_path) / "config.json").read_text())
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
        published_config(find_checkpoint(tmp_path / "checkpoint").model, Publishing(dtype=""))
    )


def test_the_layout_has_the_published_number_of_tensors_and_parameters() -> None:
    layout = list(published_layout(load_model("yuan2-2b")))
    assert sum(len(mapping.parts) for mapping in layout) + 1 == 14 * 24 + 3  # with lm_head
    assert sum(torch.Size(mapping.shape).numel() for mapping in layout) == 2_088_724_480


def test_only_one_tensor_is_in_memory_at_a_time(tmp_path: Path) -> None:
    held = most = 0

    def tensor(number: int) -> LazyTensor:
        def read() -> torch.Tensor:
            nonlocal held, most
            held += 1
            most = max(most, held)
            array = torch.full((1000,), float(number))
            weakref.finalize(array, count_freed)
            return array

        return LazyTensor((1000,), torch.float32, read)

    def count_freed() -> None:
        nonlocal held
        held -= 1

    state = weights_state(build(Document("test", MODEL, {}), ModelConfig))
    save_streamed(tmp_path, tensors={f"weights.{i}": tensor(i) for i in range(20)}, state=state)
    assert most <= 3  # the tensor being written, its detached copy, the one before


def test_shards() -> None:
    tensors = [
        (name, LazyTensor((size,), torch.float32, torch.Tensor))
        for name, size in zip("abcd", [2, 2, 9, 1], strict=True)
    ]
    assert [list(shard) for shard in split_into_shards(tensors, 16)] == [["a", "b"], ["c"], ["d"]]


# --- with the transformers library -----------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.parametrize(("name", "tolerance"), [("yuan_hf_tiny_a", 2e-5), ("yuan_m32_hf_tiny_a", 1e-4)])
def test_the_export_runs_in_transformers(tmp_path: Path, name: str, tolerance: float) -> None:
    golden = GOLDEN.parent / name
    export = round_trip(golden, tmp_path)
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    tool, wanted = ROOT / "tools" / "check_export.py", golden / "expected.safetensors"
    words = [sys.executable, tool, export, wanted, f"--tolerance={tolerance}"]
    ran = subprocess.run(words, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stdout + ran.stderr
