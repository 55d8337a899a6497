"""Per-rank checkpoints of the original code: import and export of any partition, and what is refused."""

import argparse
import enum
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.hf_decoders import save_model
from tests.support.models import tiny_model
from tests.support.yuan_hf import GOLDEN, Evil
from yuan_train.checkpoint.hf import import_hf, weights_state
from yuan_train.checkpoint.load import Checkpoint, find_checkpoint, load_weights
from yuan_train.checkpoint.megatron import FILE, export_megatron, import_megatron
from yuan_train.checkpoint.save import save_checkpoint
from yuan_train.cli.main import main
from yuan_train.config.errors import CheckpointError
from yuan_train.models.transformer import Transformer, init_weights


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = tmp_path_factory.mktemp("tiny")
    import_hf(GOLDEN, folder)
    return find_checkpoint(folder)


def weights_of(checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    model = Transformer(checkpoint.model)
    load_weights(checkpoint, model)
    return model.state_dict()


def rewrite(path: Path, change: Any) -> None:
    """Change the content of a rank's file, which this test wrote and so may unpickle in full."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


PARTITIONS = [(1, [3]), (2, [3]), (1, [1, 2]), (2, [2, 0, 1]), (4, [1, 1, 1])]
"""Tensor-parallel width, layers of each stage."""


@pytest.mark.parametrize(("tensor", "stages"), PARTITIONS)
def test_a_round_trip_through_any_partition(
    tiny: Checkpoint, tmp_path: Path, tensor: int, stages: list[int]
) -> None:
    out = export_megatron(tiny, tmp_path / "ranks", tensor=tensor, stages=stages)
    ranks = {path.name for path in (out / "release").iterdir()}
    assert len(ranks) == tensor * len(stages)
    assert ("mp_rank_00_001" in ranks) == (len(stages) > 1)
    imported = import_megatron(out, tmp_path / "back")
    assert imported.parameters == tiny.model.parameters
    again = find_checkpoint(tmp_path / "back")
    assert again.model.num_layers == 3 and again.model.max_sequence_length == 256
    wanted, found = weights_of(tiny), weights_of(again)
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_the_shards_of_a_rank(tiny: Checkpoint, tmp_path: Path) -> None:
    """Complete heads of queries and keys, and both halves of the feed-forward, as in the published layout."""
    weights = weights_of(tiny)
    out = export_megatron(tiny, tmp_path / "ranks", tensor=2, stages=[1, 2])
    path = out / "release" / "mp_rank_01_001" / FILE
    encoder = torch.load(path, weights_only=False)["model"]["language_model"]["encoder"]
    head_dim, width = 16, 128
    query_key = encoder["layers.1.self_attention.get_query_key.weight"]
    assert torch.equal(query_key, weights["layers.2.attention.query_key.weight"][2 * 2 * head_dim :])
    up = weights["layers.2.feed_forward.up.weight"]
    wanted = torch.cat([up[width // 2 : width], up[width + width // 2 :]])
    assert torch.equal(encoder["layers.1.mlp.dense_h_to_4h.weight"], wanted)
    assert encoder["layers.1.self_attention.lf_gate.conv1.weight"].shape == (32, 64, 2, 1)


def test_sizes_are_those_of_before(tmp_path: Path) -> None:
    """Also where rotary_percent of head_dim is a bit less than a whole number: 26 / 46 * 46 < 26."""
    changes = {"head_dim": 46, "rotary_dim": 26, "rotary_form": "bf16_frequencies", "norm_epsilon": 1e-5}
    model = Transformer(tiny_model("yuan", **changes))
    init_weights(model, seed=1)
    out = export_megatron(find_checkpoint(save_model(tmp_path / "a", model)), tmp_path / "ranks")
    import_megatron(out, tmp_path / "back")
    again = find_checkpoint(tmp_path / "back").model
    assert {key: getattr(again, key) for key in changes} == changes


KEYS: tuple[str, ...] = ("reset_position_ids", "reset_attention", "reset_filter", "mask_loss_after_eod")


@pytest.mark.parametrize("told", [(False,) * 4, (True, False, True, True), (True, True, False, False)])
def test_what_is_done_at_document_ends(
    told: tuple[bool, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What the original code has no word for, or does not always do, is said."""
    model, data = Transformer(tiny_model("yuan")), dict(zip(KEYS, told, strict=True))
    tensors = {f"weights.{name}": torch.zeros(weight.shape) for name, weight in model.named_parameters()}
    save_checkpoint(tmp_path / "a", step=1, tensors=tensors, state=weights_state(model.config, data))
    ranks = tmp_path / "ranks"
    assert main(["export-megatron", str(tmp_path / "a"), "--out", str(ranks)]) == 0
    said = capsys.readouterr().err
    notes = "ignores its reset_attention_mask", "no word for reset_filter"
    assert tuple(note in said for note in notes) == told[1:3]
    import_megatron(ranks, tmp_path / "back")
    assert find_checkpoint(tmp_path / "back").state["run"]["data"] == data
    file = ranks / "release" / "mp_rank_00" / FILE
    rewrite(file, lambda c: c["args"].__dict__.update(use_flash_attn=True))
    done = import_megatron(ranks, tmp_path / "flash")
    assert not find_checkpoint(tmp_path / "flash").resets["reset_attention"]
    assert ("reset_attention_mask is left out" in done.notes[-1]) == told[1]
    rewrite(file, lambda c: c["args"].__dict__.pop("reset_position_ids"))
    assert "do not say what was reset" in import_megatron(ranks, tmp_path / "silent").notes[-1]
    assert find_checkpoint(tmp_path / "silent").resets["reset_position_ids"]


M32 = Path(GOLDEN).parent / "yuan_m32_hf_tiny_a"


def test_experts_through_rank_files(tmp_path: Path) -> None:
    """Read as tools/convert_hf_moe.py of the original code does: by views of the memory, not of the names."""
    import_hf(M32, tmp_path / "tiny", rope_base=40890)
    tiny = find_checkpoint(tmp_path / "tiny")
    weights, experts, hidden, width = weights_of(tiny), 8, 64, 48
    fields = ("num_experts", "experts_per_token", "expert_width", "head_dim", "rotary_size", "rope_base")
    for tensor, stages in ((1, [3]), (4, [1, 2])):
        folder = export_megatron(tiny, tmp_path / f"ranks {tensor}", tensor=tensor, stages=stages)
        import_megatron(folder, tmp_path / f"back {tensor}")
        again = find_checkpoint(tmp_path / f"back {tensor}")
        found = weights_of(again)
        assert all(torch.equal(weights[name], found[name]) for name in weights)
        assert [getattr(again.model, f) for f in fields] == [getattr(tiny.model, f) for f in fields]
        parts = []
        for rank in range(tensor):
            name = f"mp_rank_{rank:02d}" + ("_000" if len(stages) > 1 else "")
            parts.append(encoder_of(torch.load(folder / "release" / name / FILE, weights_only=False)))
        part = width // tensor
        for rank, encoder in enumerate(parts):
            first, second = encoder["layers.0.mlp.experts.weight1"], encoder["layers.0.mlp.experts.weight2"]
            assert first.shape == (hidden, experts * 2 * part) and second.shape == (experts * part, hidden)
            rows = slice(rank * part, (rank + 1) * part)
            for expert in range(experts):
                w1, w2 = (weights[f"layers.0.experts.{name}.weight"][expert] for name in ("up", "down"))
                halves = torch.cat([half[rows] for half in w1.chunk(2)])
                assert torch.equal(first.view(experts, hidden, 2 * part)[expert].T, halves)
                assert torch.equal(second.view(experts, part, hidden)[expert].T, w2[:, rows])
        routers = [part["layers.0.mlp.router.attention_router.query_key_value.weight"] for part in parts]
        assert torch.equal(torch.cat(routers), weights["layers.0.router.weight"])

    def mix(content: dict[str, Any]) -> None:
        content["args"].num_attention_router_heads = 7

    rewrite(tmp_path / "ranks 1" / "release" / "mp_rank_00" / FILE, mix)
    with pytest.raises(CheckpointError, match="mixes the tokens"):
        import_megatron(tmp_path / "ranks 1", tmp_path / "no")


def test_other_content_is_ignored(tiny: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enumerations of a package that is not installed, generator states, an optimizer."""
    module = types.ModuleType("megatron.core.enums")
    model_type = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    module.ModelType = model_type  # type: ignore[attr-defined]
    for name, value in (
        ("megatron", types.ModuleType("megatron")),
        ("megatron.core", types.ModuleType("megatron.core")),
        ("megatron.core.enums", module),
    ):
        monkeypatch.setitem(sys.modules, name, value)

    def change(content: dict[str, Any]) -> None:
        content["args"].model_type = model_type.encoder_or_decoder
        content["args"].params_dtype = torch.bfloat16
        content["rng_state"] = [{"np_rng_state": np.random.get_state(), "torch": torch.get_rng_state()}]
        content["optimizer"] = {"step": 5, "exp_avg": torch.ones(3)}
        buffer = {"layers.0.self_attention.rotary_pos_emb.inv_freq": torch.ones(8)}
        content["model"]["language_model"]["encoder"].update(buffer)

    out = export_megatron(tiny, tmp_path / "ranks")
    rewrite(out / "release" / "mp_rank_00" / FILE, change)
    for name in ("megatron.core.enums", "megatron.core", "megatron"):
        monkeypatch.delitem(sys.modules, name)
    import_megatron(out / "release", tmp_path / "back")
    assert "megatron" not in sys.modules
    found = weights_of(find_checkpoint(tmp_path / "back"))
    assert all(torch.equal(tensor, found[name]) for name, tensor in weights_of(tiny).items())


def encoder_of(content: dict[str, Any]) -> dict[str, Any]:
    return content["model"]["language_model"]["encoder"]


NORM, DENSE = "layers.0.input_layernorm.weight", "layers.0.self_attention.dense.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: encoder_of(c).pop(NORM), "input_layernorm.weight is missing"),
        (lambda c: encoder_of(c).update(extra=torch.ones(1)), "extra is not used"),
        (lambda c: encoder_of(c).update({DENSE: torch.ones(3, 3)}), "shards of shapes"),
        (lambda c: encoder_of(c).update({NORM: torch.ones(64)}), "differs between tensor ranks"),
        (lambda c: encoder_of(c)[DENSE].fill_(float("nan")), "not finite"),
        (lambda c: c["args"].__dict__.pop("hidden_size"), "have no hidden_size; give the sizes with --model"),
        (lambda c: c.pop("model"), "holds no `model`"),
        (lambda c: c["model"].pop("language_model"), "interleaved stages"),
    ],
)
def test_files_that_do_not_fit_the_model(tiny: Checkpoint, tmp_path: Path, change: Any, message: str) -> None:
    out = export_megatron(tiny, tmp_path / "ranks", tensor=2, stages=[1, 2])
    rewrite(out / "release" / "mp_rank_00_000" / FILE, change)
    with pytest.raises(CheckpointError, match=message):
        import_megatron(out, tmp_path / "back")
    assert not list((tmp_path / "back").glob("*"))


def test_an_output_matrix_that_is_not_the_embedding(tiny: Checkpoint, tmp_path: Path) -> None:
    out = export_megatron(tiny, tmp_path / "ranks", stages=[1, 2])
    last = out / "release" / "mp_rank_00_001" / FILE
    rewrite(last, lambda c: c["model"]["word_embeddings_for_head"]["weight"].add_(1))
    with pytest.raises(CheckpointError, match="differs from the embedding, though tied"):
        import_megatron(out, tmp_path / "back")


@pytest.mark.parametrize("where", ["args", "model", "top level"])
def test_code_is_not_run(tiny: Checkpoint, tmp_path: Path, where: str) -> None:
    def change(content: dict[str, Any]) -> None:
        evil = Evil(tmp_path / "ran")
        if where == "args":
            content["args"] = argparse.Namespace(x=evil)
        else:
            (encoder_of(content) if where == "model" else content)["x"] = evil

    out = export_megatron(tiny, tmp_path / "ranks")
    rewrite(out / "release" / "mp_rank_00" / FILE, change)
    assert main(["import-megatron", str(out), "--out", str(tmp_path / "back")]) == 2
    assert not (tmp_path / "ran").exists()


def test_missing_and_truncated_files(tiny: Checkpoint, tmp_path: Path) -> None:
    out = export_megatron(tiny, tmp_path / "ranks", tensor=2, stages=[1, 2])
    path = out / "release" / "mp_rank_01_000" / FILE
    content = path.read_bytes()
    for damaged in (b"", content[:1000], b"\x80\x04."):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match="torn, or holds more than it should"):
            import_megatron(out, tmp_path / "back")
    path.unlink()
    path.parent.rmdir()
    with pytest.raises(CheckpointError, match="stage 0, tensor rank 1 is missing"):
        import_megatron(out, tmp_path / "back")
    for folder, message in ((tmp_path / "nowhere", "no such directory"), (tmp_path, "neither mp_rank")):
        with pytest.raises(CheckpointError, match=message):
            import_megatron(folder, tmp_path / "back")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    with pytest.raises(CheckpointError, match="no such iteration"):
        import_megatron(tmp_path, tmp_path / "back")


def test_partitions_that_do_not_fit(tiny: Checkpoint, tmp_path: Path) -> None:
    for options, message in (
        ({"stages": [1, 1]}, "the model has 3"),
        ({"tensor": 3}, "4 heads over 3 ranks"),
    ):
        with pytest.raises(CheckpointError, match=message):
            export_megatron(tiny, tmp_path / "ranks", **options)  # pyright: ignore[reportArgumentType]
    words = ["export-megatron", str(tiny.path), "--out", str(tmp_path / "ranks")]
    assert main([*words, "--stages", "1,x"]) == 2
    assert main([*words, "--tensor", "2", "--stages", "1,2", "--dtype", "bfloat16", "--json"]) == 0
    assert main([*words]) == 2  # already exists
