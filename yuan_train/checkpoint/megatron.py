"""Yuan 2.0 in its original form, one file per rank (`mp_rank_TT_PPP/model_optim_rng.pt`): in, out, recut.

TT is the tensor-parallel rank, PPP the pipeline stage (absent with one stage). A stage numbers its layers
from 0 and may hold any number of them. What each rank holds of a tensor:

    rows      v_proj and query-key (whole heads each), the embedding: rows, rank after rank
    columns   the outputs of attention and feed-forward: columns, rank after rank
    halves    dense_h_to_4h: the rank's rows of the silu half, then its rows of the other
    whole     norms and the filter: equal on every rank

(IEIT-Yuan/Yuan-2.0:megatron/model/transformer.py; its tools/merge_tp_partitions.py:202-211 halves the wrong
dim.) Optimizer states are left: they belong to the cut they were made for.
"""

from __future__ import annotations

import argparse
import pickle
import re
import shutil
import types
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from yuan_train.checkpoint.hf import Imported, _WholeReader, is_finite, weights_state
from yuan_train.checkpoint.load import Checkpoint
from yuan_train.checkpoint.names import WEIGHTS
from yuan_train.checkpoint.stream import LazyTensor, save_streamed
from yuan_train.checkpoint.yuan_layout import published_layout
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import Document, build
from yuan_train.config.model import ModelConfig, model_laws

FILE = "model_optim_rng.pt"
TRACKER = "latest_checkpointed_iteration.txt"
_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)")

LAYER_NAMES = {
    # ours, after `layers.N.`: theirs, and how tensor parallelism cuts it
    "attention_norm.weight": ("input_layernorm.weight", "whole"),
    "filter.conv1.weight": ("self_attention.lf_gate.conv1.weight", "whole"),
    "filter.conv1.bias": ("self_attention.lf_gate.conv1.bias", "whole"),
    "filter.conv2.weight": ("self_attention.lf_gate.conv2.weight", "whole"),
    "filter.conv2.bias": ("self_attention.lf_gate.conv2.bias", "whole"),
    "filter.norm.weight": ("self_attention.lf_gate.output_layernorm.weight", "whole"),
    "attention.value.weight": ("self_attention.get_value.weight", "rows"),
    "attention.query_key.weight": ("self_attention.get_query_key.weight", "rows"),
    "attention.out.weight": ("self_attention.dense.weight", "columns"),
    "feed_forward_norm.weight": ("post_attention_layernorm.weight", "whole"),
    "feed_forward.up.weight": ("mlp.dense_h_to_4h.weight", "halves"),
    "feed_forward.down.weight": ("mlp.dense_4h_to_h.weight", "columns"),
}
BUFFER = "rotary_pos_emb.inv_freq"
LISTED = 5

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Part:
    """What one rank's file holds: `layers.N...` (N local), `final_layernorm.weight`, `embedding`, `head`."""

    path: Path
    tensors: Tensors
    arguments: Mapping[str, Any]
    num_layers: int


# --- in --------------------------------------------------------------------------------------------------


def import_megatron(folder: str | Path, out: str | Path, *, model: ModelConfig | None = None) -> Imported:
    """Turn a per-rank checkpoint into one of ours, of step 0, whatever its tensor and pipeline cut.

    `folder` holds `mp_rank_*`, or iterations of which the newest is taken. Sizes come from `model`, else from
    the arguments that the files keep. No code of the files is run. Files are mapped, not read whole.

    Raises CheckpointError for files that are missing, torn or hold anything unknown, tensors that do not fit
    the sizes, and ranks that differ where they must be equal.
    """
    folder = _newest(Path(folder))
    stages = _open_ranks(folder)
    widths = {len(stage) for stage in stages}
    if len(widths) > 1:
        raise CheckpointError(f"{folder}: stages of {sorted(widths)} tensor ranks; wanted as many in each")
    model = model or _model_of(stages, folder)
    notes = [f"{len(stages)} stages of {[stage[0].num_layers for stage in stages]} layers, {widths} wide"]
    tensors = _assemble(model, stages, folder, notes)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    state = weights_state(model, {"reset_position_ids": True})
    state["hf"] = {"dtype": dtype}
    path = save_streamed(out, tensors=tensors, state=state)
    count = sum(len(part.tensors) for stage in stages for part in stage)
    return Imported(str(path), model.parameters, count, dtype, tuple(notes))


def _newest(folder: Path) -> Path:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; give a folder with mp_rank_* inside")
    if any(_RANK.fullmatch(child.name) for child in folder.iterdir()):
        return folder
    tracker = folder / TRACKER
    try:
        told = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(f"{folder}: neither mp_rank_* nor {TRACKER} inside") from None
    name = told if told == "release" else f"iter_{int(told):07d}" if told.isdecimal() else None
    if name is None or not (folder / name).is_dir():
        raise CheckpointError(f"{tracker}: says {told[:40]!r}, but there is no such iteration")
    return folder / name


def _open_ranks(folder: Path) -> list[list[Part]]:
    """Parts by stage and tensor rank."""
    found: dict[tuple[int, int], Path] = {}
    for child in folder.iterdir():
        if match := _RANK.fullmatch(child.name):
            found[int(match[2] or 0), int(match[1])] = child / FILE
    if not found:
        raise CheckpointError(f"{folder}: no mp_rank_* inside")
    stages, width = 1 + max(stage for stage, _ in found), 1 + max(rank for _, rank in found)
    for place in ((stage, rank) for stage in range(stages) for rank in range(width)):
        if place not in found:
            raise CheckpointError(
                f"{folder}: the file of stage {place[0]}, tensor rank {place[1]} is missing"
            )
    return [[_open_part(found[stage, rank]) for rank in range(width)] for stage in range(stages)]


def _open_part(path: Path) -> Part:
    loaded = load_inert(path)
    if not isinstance(loaded, dict) or not isinstance(loaded.get("model"), dict):
        raise CheckpointError(f"{path}: holds no `model`; wanted a checkpoint of the original training code")
    language = loaded["model"].get("language_model")
    if not isinstance(language, dict):
        raise CheckpointError(f"{path}: its model has no `language_model` (interleaved stages are not read)")
    tensors: Tensors = {}
    embedding = _nested(language, "embedding", "word_embeddings", "weight")
    head = _nested(loaded["model"], "word_embeddings_for_head", "weight")
    for name, tensor in (("embedding", embedding), ("head", head)):
        if isinstance(tensor, torch.Tensor):
            tensors[name] = tensor
    encoder = language.get("encoder")
    for name, tensor in encoder.items() if isinstance(encoder, dict) else ():
        if isinstance(tensor, torch.Tensor) and not str(name).endswith(BUFFER):
            tensors[str(name)] = tensor
    numbers = {int(match[1]) for name in tensors if (match := _LAYER.fullmatch(name))}
    if numbers != set(range(len(numbers))):
        raise CheckpointError(f"{path}: layers {sorted(numbers)}; wanted local numbers from 0 on")
    arguments = loaded.get("args")
    told = arguments.state if isinstance(arguments, Inert) and isinstance(arguments.state, dict) else {}
    return Part(path, tensors, told, len(numbers))


def _nested(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _model_of(stages: list[list[Part]], folder: Path) -> ModelConfig:
    told = stages[0][0].arguments
    num_layers = sum(stage[0].num_layers for stage in stages)
    wanted = ("hidden_size", "num_attention_heads", "ffn_hidden_size", "padded_vocab_size")
    if missing := [key for key in wanted if not isinstance(told.get(key), int)]:
        raise CheckpointError(
            f"{folder}: its arguments do not tell {', '.join(missing)}; give the sizes with --model FILE"
        )
    sizes = {
        "name": "yuan2",
        "num_layers": num_layers,
        "hidden_size": told["hidden_size"],
        "num_attention_heads": told["num_attention_heads"],
        "ffn_hidden_size": told["ffn_hidden_size"],
        "vocab_size": told["padded_vocab_size"],
        "max_sequence_length": told.get("max_position_embeddings") or 4096,
    }
    try:
        return build(Document(f"{folder}", sizes, {}), ModelConfig, laws=model_laws)
    except ConfigError as error:
        raise CheckpointError(f"{folder}: describes no model: {error}") from None


def _assemble(
    model: ModelConfig, stages: list[list[Part]], folder: Path, notes: list[str]
) -> dict[str, LazyTensor]:
    """Our tensors over theirs, after every name has found its use."""
    unused = {
        (stage, rank): set(part.tensors)
        for stage, parts in enumerate(stages)
        for rank, part in enumerate(parts)
    }
    places = _places(model, stages, folder)
    wrong: list[str] = []
    tensors: dict[str, LazyTensor] = {}
    for mapped in published_layout(model):
        stage, theirs, cut = places[mapped.name]
        pieces = []
        for rank, part in enumerate(stages[stage]):
            if theirs not in part.tensors:
                wrong.append(f"{part.path.parent.name}: {theirs} is missing")
                continue
            unused[stage, rank].discard(theirs)
            pieces.append(part.tensors[theirs])
        if len(pieces) == len(stages[stage]):
            lazy = _joined(mapped.name, mapped.shape, cut, pieces, wrong)
            if lazy is not None:
                tensors[f"{WEIGHTS}.{mapped.name}"] = lazy
    if len(stages) > 1 and model.tie_embeddings:
        for rank, part in enumerate(stages[-1]):
            _check_head(part, stages[0][rank], unused[len(stages) - 1, rank], wrong)
    for (stage, rank), names in unused.items():
        wrong += [f"{stages[stage][rank].path.parent.name}: {name} has no use" for name in sorted(names)]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise CheckpointError(f"{folder} does not fit the model: {'; '.join(wrong[:LISTED])}{more}")
    return tensors


def _places(model: ModelConfig, stages: list[list[Part]], folder: Path) -> dict[str, tuple[int, str, str]]:
    """Of each of our names: its stage, the name there, and how it is cut."""
    counts = [stage[0].num_layers for stage in stages]
    if sum(counts) != model.num_layers:
        raise CheckpointError(f"{folder}: stages of {counts} layers; the model has {model.num_layers}")
    places = {
        "embedding.weight": (0, "embedding", "rows"),
        "final_norm.weight": (len(stages) - 1, "final_layernorm.weight", "whole"),
        "head.weight": (len(stages) - 1, "head", "rows"),
    }
    number = 0
    for stage, count in enumerate(counts):
        for local in range(count):
            for ours, (theirs, cut) in LAYER_NAMES.items():
                places[f"layers.{number}.{ours}"] = (stage, f"layers.{local}.{theirs}", cut)
            number += 1
    return places


def _joined(
    name: str, shape: tuple[int, ...], cut: str, pieces: list[torch.Tensor], wrong: list[str]
) -> LazyTensor | None:
    """One tensor of ours from the ranks' pieces; None, and why, if they do not fit."""
    wanted = _piece_shape(shape, cut, len(pieces))
    found = [tuple(piece.shape[: len(shape)]) for piece in pieces]
    if wanted is None or any(piece != wanted for piece in found):
        wrong.append(f"{name}: pieces of shapes {found}, wanted {wanted}")
        return None
    if any(piece.dtype != pieces[0].dtype or not piece.is_floating_point() for piece in pieces):
        wrong.append(f"{name}: pieces of types {[str(piece.dtype) for piece in pieces]}")
        return None

    def read() -> torch.Tensor:
        if not all(map(is_finite, pieces)):
            raise CheckpointError(f"{name}: holds values that are not finite (NaN or infinite)")
        if cut == "whole":
            if not all(torch.equal(piece, pieces[0]) for piece in pieces):
                raise CheckpointError(f"{name}: differs between tensor ranks, which hold copies of it")
            return pieces[0].detach().reshape(shape)
        return join_pieces([piece.detach() for piece in pieces], cut)

    return LazyTensor(shape, pieces[0].dtype, read)


def join_pieces(pieces: Sequence[torch.Tensor], cut: str) -> torch.Tensor:
    """The whole of what `cut_piece` cut."""
    if cut == "whole":
        return pieces[0]
    if cut == "columns":
        return torch.cat(list(pieces), dim=1)
    if cut == "halves":
        halves = [piece.chunk(2) for piece in pieces]
        return torch.cat([half[i] for i in range(2) for half in halves])
    return torch.cat(list(pieces))


def cut_piece(tensor: torch.Tensor, cut: str, rank: int, width: int) -> torch.Tensor:
    """What tensor rank `rank` of `width` holds of a tensor."""
    if cut == "whole":
        return tensor
    if cut == "columns":
        return tensor.chunk(width, dim=1)[rank]
    if cut == "halves":
        return torch.cat([half.chunk(width)[rank] for half in tensor.chunk(2)])
    return tensor.chunk(width)[rank]


def _piece_shape(shape: tuple[int, ...], cut: str, width: int) -> tuple[int, ...] | None:
    if cut == "whole":
        return shape
    dim = 1 if cut == "columns" else 0
    parts = 2 * width if cut == "halves" else width
    if shape[dim] % parts:
        return None
    return tuple(size // width if i == dim else size for i, size in enumerate(shape))


def _check_head(part: Part, first: Part, unused: set[str], wrong: list[str]) -> None:
    """The last stage has a copy of the tied embedding, under one of two names."""
    name = "head" if "head" in part.tensors else "embedding"
    unused.discard(name)
    copy, embedding = part.tensors.get(name), first.tensors.get("embedding")
    if copy is not None and embedding is not None and not torch.equal(copy, embedding):
        wrong.append(f"{part.path.parent.name}: its output matrix differs from the embedding, though tied")


# --- files that may hold code ----------------------------------------------------------------------------


class Inert:
    """Stands for an object of a class that we do not import: keeps its state, does nothing."""

    state: Any = None

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}
_INERT = ("argparse.Namespace", "megatron.", "numpy.", "_codecs.encode")
"""What the original code keeps beside tensors: arguments, enumerations, states of generators."""


class _InertUnpickler(pickle.Unpickler):
    """Makes tensors; of known other things an `Inert`; refuses all else. Imports nothing."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _TENSORS:
            return super().find_class(module, name)
        if module == "torch":
            value = getattr(torch, name, None)
            if value in (torch.Size, torch.device) or isinstance(value, torch.dtype):
                return value
        if f"{module}.{name}".startswith(_INERT):
            return Inert
        if module in ("builtins", "__builtin__") and name == "getattr":
            # How newer Pythons write a member of an enumeration.
            return _inert_member
        raise pickle.UnpicklingError(f"{module}.{name} does not belong into a checkpoint")


def _inert_member(owner: object, name: str) -> Inert:
    """What `getattr` gives of a class that we do not import; nothing of any other."""
    if owner is not Inert:
        raise pickle.UnpicklingError(f"builtins.getattr of {owner!r} does not belong into a checkpoint")
    return Inert()


def load_inert(path: Path) -> Any:
    """The content of a rank's file, its tensors mapped. Raises CheckpointError if it is torn or hostile."""
    narrow = types.SimpleNamespace(__name__="narrow", Unpickler=_InertUnpickler, load=_load_inert)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as content:
                if any(name.endswith("constants.pkl") for name in content.namelist()):
                    raise pickle.UnpicklingError("a TorchScript program, no checkpoint")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapped = zipfile.is_zipfile(path)
            return torch.load(
                path, map_location="cpu", pickle_module=narrow, weights_only=False, mmap=mapped or None
            )
    except Exception as error:
        # Hostile bytes provoke anything; whatever it is, nothing of theirs was called.
        told = str(error).split("\n")[0][:200]
        raise CheckpointError(
            f"{path}: torn, or holds more than it should (nothing in it was run): {told}"
        ) from None


def _load_inert(file: Any, **_: Any) -> Any:
    return _InertUnpickler(file).load()


# --- out -------------------------------------------------------------------------------------------------


def export_megatron(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    tensor: int = 1,
    stages: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a checkpoint's weights as `OUT/release/mp_rank_*`, cut over tensor ranks and stages.

    `stages` are layers per stage, as many as there are stages (None: one stage); `dtype` None keeps that of
    the checkpoint. One rank's part is in memory at a time.

    Raises CheckpointError if the cut does not fit the model or `out` cannot be written.
    """
    out, model = Path(out), checkpoint.model
    counts = list(stages or [model.num_layers])
    if sum(counts) != model.num_layers or min(counts) < 0:
        raise CheckpointError(f"stages of {counts} layers; the model has {model.num_layers}")
    if out.exists():
        raise CheckpointError(f"{out}: is there already; give an --out of its own")
    if model.num_attention_heads % tensor or not model.tie_embeddings or model.attention == "plain":
        raise CheckpointError(
            f"{checkpoint.path}: {model.num_attention_heads} heads over {tensor} ranks, tied embeddings: "
            f"{model.tie_embeddings}, {model.attention}: not a cut or a model that the original code has"
        )
    reader = _WholeReader(checkpoint)
    aside = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        for stage in range(len(counts)):
            for rank in range(tensor):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(counts) > 1 else "")
                place = aside / "release" / name
                place.mkdir(parents=True)
                content = _rank_content(model, reader, counts, stage, rank, tensor, dtype)
                torch.save(content, place / FILE)
        (aside / TRACKER).write_text("release\n", encoding="utf-8")
        aside.rename(out)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{out}: cannot be written: {error}; give another --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return out


def _rank_content(
    model: ModelConfig,
    reader: _WholeReader,
    counts: list[int],
    stage: int,
    rank: int,
    width: int,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    shapes = {mapped.name: mapped for mapped in published_layout(model)}

    def piece(name: str, cut: str) -> torch.Tensor:
        mapped = shapes[name]
        if _piece_shape(mapped.shape, cut, width) is None:
            raise CheckpointError(f"{name}: shape {list(mapped.shape)} does not divide over {width} ranks")
        whole = reader.read(name, mapped.shape)
        cut_out = cut_piece(whole, cut, rank, width).to(dtype or whole.dtype)
        return cut_out.unsqueeze(-1).clone() if mapped.conv2d else cut_out.clone()

    encoder: Tensors = {}
    first = sum(counts[:stage])
    for local in range(counts[stage]):
        for ours, (theirs, cut) in LAYER_NAMES.items():
            encoder[f"layers.{local}.{theirs}"] = piece(f"layers.{first + local}.{ours}", cut)
    language: dict[str, Any] = {"encoder": encoder}
    told: dict[str, Any] = {"language_model": language}
    last = stage == len(counts) - 1
    if last:
        encoder["final_layernorm.weight"] = piece("final_norm.weight", "whole")
    if stage == 0:
        language["embedding"] = {"word_embeddings": {"weight": piece("embedding.weight", "rows")}}
    elif last:
        told["word_embeddings_for_head"] = {"weight": piece("embedding.weight", "rows")}
    return {"checkpoint_version": 3.0, "iteration": 0, "args": _arguments(model), "model": told}


def _arguments(model: ModelConfig) -> argparse.Namespace:
    """The sizes as the original code keeps them."""
    return argparse.Namespace(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden_size,
        padded_vocab_size=model.vocab_size,
        max_position_embeddings=model.max_sequence_length,
        tokenizer_type="YuanTokenizer",
    )
