"""Reads and writes Yuan 2.0's original per-rank checkpoints, of any tensor-parallel width and stages."""

from __future__ import annotations

import argparse
import math
import pickle
import re
import types
import warnings
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from yuan_train.checkpoint.hf import Imported, is_finite, new_folder, weights_state
from yuan_train.checkpoint.load import WEIGHTS, Checkpoint, LazyTensor, WholeTensorReader
from yuan_train.checkpoint.save import save_streamed
from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import ModelConfig
from yuan_train.models.architectures.yuan import published_layout
from yuan_train.models.decoder import described

FILE = "model_optim_rng.pt"

TRACKER = "latest_checkpointed_iteration.txt"
"""File that names the newest iteration."""

COMMON_NAMES = {
    # Our name, after `layers.N.`: the original name, and how tensor parallelism shards it.
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
}

DENSE_NAMES = COMMON_NAMES | {
    "feed_forward.up.weight": ("mlp.dense_h_to_4h.weight", "halves"),
    "feed_forward.down.weight": ("mlp.dense_4h_to_h.weight", "columns"),
}

EXPERT_NAMES = COMMON_NAMES | {
    # The router's rows are Q, K, V; a rank has the next 3N/t of them, whatever they are.
    "router.weight": ("mlp.router.attention_router.query_key_value.weight", "rows"),
    # For t ranks `weight1` is named [H, N 2F/t], and its memory is [N, H, 2F/t]: reading it as N blocks of
    # columns mixes the experts. On the last dim a rank has its part of the silu half, then of the other.
    "experts.up.weight": ("mlp.experts.weight1", "expert up"),
    # `weight2` is named [N F/t, H]; its memory is [N, F/t, H].
    "experts.down.weight": ("mlp.experts.weight2", "expert down"),
}


def layer_names(model: ModelConfig) -> dict[str, tuple[str, str]]:
    """By our name, after `layers.N.`: the original name of a layer's tensor, and how it is sharded."""
    return EXPERT_NAMES if model.num_experts else DENSE_NAMES


BUFFER = "rotary_pos_emb.inv_freq"
"""Suffix of buffers that are computed, and not converted."""

Tensors = dict[str, torch.Tensor]


CUTS = {"rows": (0, 1), "columns": (1, 1), "halves": (0, 2), "expert up": (1, 2), "expert down": (2, 1)}
"""By sharding: the dim of our tensor that is cut, and its parts, of each of which every rank has a piece."""


def join_shards(shards: Sequence[torch.Tensor], sharding: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The full tensor [shape] from the shards of all tensor ranks, in order; the inverse of `take_shard`."""
    if sharding == "whole":
        return shards[0]
    dim, parts = CUTS[sharding]
    if sharding in ("expert up", "expert down"):
        num_experts, *cut = (size // len(shards) if i == dim else size for i, size in enumerate(shape))
        shards = [shard.reshape(num_experts, *reversed(cut)).transpose(1, 2) for shard in shards]
    pieces = [shard.chunk(parts, dim) for shard in shards]
    return torch.cat([own[part] for part in range(parts) for own in pieces], dim)


def take_shard(tensor: torch.Tensor, sharding: str, rank: int, width: int) -> torch.Tensor:
    """The shard of a full tensor on tensor rank `rank` of `width`."""
    if sharding == "whole":
        return tensor
    dim, parts = CUTS[sharding]
    shard = torch.cat([part.chunk(width, dim)[rank] for part in tensor.chunk(parts, dim)], dim)
    if sharding == "expert up":
        return shard.transpose(1, 2).reshape(tensor.shape[2], -1)
    if sharding == "expert down":
        return shard.transpose(1, 2).reshape(-1, tensor.shape[1])
    return shard


class Inert:
    """In place of an object whose class we do not import: keeps its state and does nothing."""

    state: Any = None
    """What the pickle sets as the object's state."""

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
"""Prefixes of what the original code saves besides tensors: arguments, enumerations, generator states."""


class _InertUnpickler(pickle.Unpickler):
    """Creates tensors, and an `Inert` for known other classes; refuses all else. Imports nothing."""

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
            # Newer Pythons pickle a member of an enumeration as a call of getattr.
            return _inert_member
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


def _inert_member(owner: object, name: str) -> Inert:
    """In place of `getattr(owner, name)` of an inert class. Raises UnpicklingError for any other owner."""
    if owner is not Inert:
        raise pickle.UnpicklingError(f"builtins.getattr of {owner!r} does not belong in a checkpoint")
    return Inert()


def load_inert(path: Path) -> Any:
    """The content of a rank's file, with memory-mapped tensors.

    Raises CheckpointError if the file is truncated or hostile.
    """
    restricted = types.SimpleNamespace(__name__="narrow", Unpickler=_InertUnpickler)
    restricted.load = lambda file, **_: _InertUnpickler(file).load()
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as content:
                if any(name.endswith("constants.pkl") for name in content.namelist()):
                    raise pickle.UnpicklingError("a TorchScript program, not a checkpoint")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapped = zipfile.is_zipfile(path)
            return torch.load(
                path, map_location="cpu", pickle_module=restricted, weights_only=False, mmap=mapped or None
            )
    except Exception as error:
        # Hostile bytes can raise anything, but no code of theirs was called.
        cause = str(error).split("\n")[0][:200]
        raise CheckpointError(
            f"{path}: torn, or holds more than it should (nothing in it was run): {cause}"
        ) from None


_RANK = re.compile(r"mp_rank_(\d{2})(?:_(\d{3}))?")

_LAYER = re.compile(r"layers\.(\d+)\.(.+)")

MAX_LISTED = 5
"""Differences that a message lists."""
OWN = "yuan_train"
"""Argument of ours, with what the original code has fixed."""
AT_DOCUMENT_ENDS = {
    "reset_position_ids": "reset_position_ids",
    "reset_attention": "reset_attention_mask",
    "mask_loss_after_eod": "eod_mask_loss",
    "reset_filter": "reset_filter",
}
"""By our key of a run's `data`: the original argument; of the last one there is none, so it is ours."""


@dataclass(frozen=True)
class RankFile:
    """The content of one rank's file, its tensors memory-mapped."""

    path: Path
    tensors: Tensors
    """`layers.N...` (N local to the stage), `final_layernorm.weight`, `embedding`, `head`."""
    arguments: Mapping[str, Any]
    """The arguments of the run that wrote it; empty if the file has none."""
    num_layers: int


def import_megatron(folder: str | Path, out: str | Path, *, model: ModelConfig | None = None) -> Imported:
    """Turn a per-rank checkpoint of any tensor and pipeline parallelism into one of ours, of step 0.

    `folder` holds `mp_rank_*`, or iterations, of which the newest is taken. Sizes come from `model`, else
    from the arguments in the files. No code in the files is run. Files are memory-mapped, not read at once.

    Raises CheckpointError for files that are missing, truncated or hold anything unknown, tensors that do not
    fit the sizes, and replicated tensors that differ between ranks.
    """
    folder = _newest(Path(folder))
    stages = _open_ranks(folder)
    widths = {len(stage) for stage in stages}
    if len(widths) > 1:
        raise CheckpointError(
            f"{folder}: stages of {sorted(widths)} tensor ranks; wanted the same number in each"
        )
    model = model or _model_from_arguments(stages, folder)
    notes = [f"{len(stages)} stages of {[stage[0].num_layers for stage in stages]} layers, {widths} wide"]
    tensors = _assemble(model, stages, folder)
    dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
    state = weights_state(model, _data_of(stages[0][0].arguments, notes))
    state["hf"] = {"dtype": dtype}
    path = save_streamed(out, tensors=tensors, state=state)
    count = sum(len(file.tensors) for stage in stages for file in stage)
    return Imported(str(path), model.parameters, count, dtype, tuple(notes))


def _newest(folder: Path) -> Path:
    """The folder that has `mp_rank_*`: `folder` itself, or the iteration that its tracker names."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; give a folder with mp_rank_* inside")
    if any(_RANK.fullmatch(child.name) for child in folder.iterdir()):
        return folder
    tracker = folder / TRACKER
    try:
        content = tracker.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        raise CheckpointError(f"{folder}: neither mp_rank_* nor {TRACKER} inside") from None
    name = content if content == "release" else f"iter_{int(content):07d}" if content.isdecimal() else None
    if name is None or not (folder / name).is_dir():
        raise CheckpointError(f"{tracker}: says {content[:40]!r}, but there is no such iteration")
    return folder / name


def _open_ranks(folder: Path) -> list[list[RankFile]]:
    """The rank files, by stage and tensor rank."""
    found: dict[tuple[int, int], Path] = {}
    for child in folder.iterdir():
        if match := _RANK.fullmatch(child.name):
            found[int(match[2] or 0), int(match[1])] = child / FILE
    if not found:
        raise CheckpointError(f"{folder}: no mp_rank_* inside")
    stages, width = 1 + max(stage for stage, _ in found), 1 + max(rank for _, rank in found)
    for key in ((stage, rank) for stage in range(stages) for rank in range(width)):
        if key not in found:
            raise CheckpointError(f"{folder}: the file of stage {key[0]}, tensor rank {key[1]} is missing")
    return [[_open_rank(found[stage, rank]) for rank in range(width)] for stage in range(stages)]


def _open_rank(path: Path) -> RankFile:
    """One rank's file. Raises CheckpointError."""
    loaded = load_inert(path)
    if not isinstance(loaded, dict) or not isinstance(loaded.get("model"), dict):
        raise CheckpointError(f"{path}: holds no `model`; wanted a checkpoint of the original training code")
    language = loaded["model"].get("language_model")
    if not isinstance(language, dict):
        raise CheckpointError(
            f"{path}: its model has no `language_model` (interleaved stages are not supported)"
        )
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
    local_layers = {int(match[1]) for name in tensors if (match := _LAYER.fullmatch(name))}
    if local_layers != set(range(len(local_layers))):
        raise CheckpointError(f"{path}: layers {sorted(local_layers)}; wanted local numbers from 0 on")
    arguments = loaded.get("args")
    known = arguments.state if isinstance(arguments, Inert) and isinstance(arguments.state, dict) else {}
    return RankFile(path, tensors, known, len(local_layers))


def _nested(value: Any, *keys: str) -> Any:
    """`value[key][key]...`, or None if a key is missing."""
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _model_from_arguments(stages: list[list[RankFile]], folder: Path) -> ModelConfig:
    """The model that the arguments of the first file describe. Raises CheckpointError."""
    arguments = stages[0][0].arguments
    num_layers = sum(stage[0].num_layers for stage in stages)
    wanted = ("hidden_size", "num_attention_heads", "ffn_hidden_size", "padded_vocab_size")
    if missing := [key for key in wanted if not isinstance(arguments.get(key), int)]:
        raise CheckpointError(
            f"{folder}: its arguments have no {', '.join(missing)}; give the sizes with --model FILE"
        )
    sizes = {
        "name": "yuan2",
        "num_layers": num_layers,
        "hidden_size": arguments["hidden_size"],
        "num_attention_heads": arguments["num_attention_heads"],
        "ffn_hidden_size": arguments["ffn_hidden_size"],
        "vocab_size": arguments["padded_vocab_size"],
        "max_sequence_length": arguments.get("max_position_embeddings") or 4096,
        **_heads_and_experts(arguments, folder),
    }
    return described(f"{folder}", sizes)


def _heads_and_experts(arguments: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The arguments that only Yuan 2.0-M32 sets. Raises CheckpointError for a router that mixes tokens."""
    found: dict[str, Any] = {}
    if isinstance(arguments.get("kv_channels"), int):
        found["head_dim"] = arguments["kv_channels"]
        percent = arguments.get("rotary_percent")
        if isinstance(percent, float) and percent < 1:
            found["rotary_dim"] = int(percent * arguments["kv_channels"])
    if isinstance(own := arguments.get(OWN), dict):
        found |= own
    if isinstance(arguments.get("rotary_base"), int | float):
        found["rope_base"] = arguments["rotary_base"]
    if arguments.get("num_experts"):
        found |= {
            "num_experts": arguments["num_experts"],
            "experts_per_token": arguments.get("moe_router_topk"),
            "router": "attention",
        }
        heads, length = arguments.get("num_attention_router_heads"), arguments.get("seq_length")
        if None not in (heads, length) and heads != length:
            raise CheckpointError(
                f"{folder}: its arguments have num_attention_router_heads {heads} and seq_length {length}; "
                "unless they are equal, the original router mixes the tokens of a sequence"
            )
    return found


def _data_of(arguments: Mapping[str, Any], notes: list[str]) -> dict[str, bool]:
    """What a run with these arguments did at document ends: keys of a run's `data`."""
    if "reset_position_ids" not in arguments:
        notes.append("the files do not say what was reset at document ends; taken: positions alone")
        return {"reset_position_ids": True}
    found = {key: arguments.get(original) is True for key, original in AT_DOCUMENT_ENDS.items()}
    if found["reset_attention"] and arguments.get("use_flash_attn"):
        notes.append("reset_attention_mask is left out: with use_flash_attn the original code ignores it")
        found["reset_attention"] = False
    return found


def _assemble(model: ModelConfig, stages: list[list[RankFile]], folder: Path) -> dict[str, LazyTensor]:
    """Our tensors, each joined from the ranks' shards. Raises CheckpointError unless every tensor is used."""
    unused = {
        (stage, rank): set(file.tensors)
        for stage, files in enumerate(stages)
        for rank, file in enumerate(files)
    }
    sources = _sources(model, stages, folder)
    wrong: list[str] = []
    tensors: dict[str, LazyTensor] = {}
    for mapping in published_layout(model):
        stage, original, sharding = sources[mapping.name]
        shards = []
        for rank, file in enumerate(stages[stage]):
            if original not in file.tensors:
                wrong.append(f"{file.path.parent.name}: {original} is missing")
                continue
            unused[stage, rank].discard(original)
            shards.append(file.tensors[original])
        if len(shards) == len(stages[stage]):
            lazy = _join(mapping.name, mapping.shape, sharding, shards, wrong)
            if lazy is not None:
                tensors[f"{WEIGHTS}.{mapping.name}"] = lazy
    if len(stages) > 1 and model.tie_embeddings:
        for rank, file in enumerate(stages[-1]):
            _check_head(file, stages[0][rank], unused[len(stages) - 1, rank], wrong)
    for (stage, rank), names in unused.items():
        wrong += [f"{stages[stage][rank].path.parent.name}: {name} is not used" for name in sorted(names)]
    if wrong:
        more = f"; and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
        raise CheckpointError(f"{folder} does not fit the model: {'; '.join(wrong[:MAX_LISTED])}{more}")
    return tensors


def _sources(
    model: ModelConfig, stages: list[list[RankFile]], folder: Path
) -> dict[str, tuple[int, str, str]]:
    """By our tensor names: the stage that holds it, its original name there, and how it is sharded."""
    counts = [stage[0].num_layers for stage in stages]
    if sum(counts) != model.num_layers:
        raise CheckpointError(f"{folder}: stages of {counts} layers; the model has {model.num_layers}")
    sources = {
        "embedding.weight": (0, "embedding", "rows"),
        "final_norm.weight": (len(stages) - 1, "final_layernorm.weight", "whole"),
        "head.weight": (len(stages) - 1, "head", "rows"),
    }
    number = 0
    for stage, count in enumerate(counts):
        for local in range(count):
            for ours, (original, sharding) in layer_names(model).items():
                sources[f"layers.{number}.{ours}"] = (stage, f"layers.{local}.{original}", sharding)
            number += 1
    return sources


def _join(
    name: str, shape: tuple[int, ...], sharding: str, shards: list[torch.Tensor], wrong: list[str]
) -> LazyTensor | None:
    """One of our tensors from all ranks' shards; None, with the reason in `wrong`, if they do not fit."""
    wanted = shard_shape(shape, sharding, len(shards))
    found = [tuple(shard.shape[: len(shape)]) for shard in shards]
    if wanted is None or any(shard != wanted for shard in found):
        wrong.append(f"{name}: shards of shapes {found}, wanted {wanted}")
        return None
    if any(shard.dtype != shards[0].dtype or not shard.is_floating_point() for shard in shards):
        wrong.append(f"{name}: shards of types {[str(shard.dtype) for shard in shards]}")
        return None

    def read() -> torch.Tensor:
        if not all(map(is_finite, shards)):
            raise CheckpointError(f"{name}: holds values that are not finite (NaN or infinite)")
        if sharding == "whole":
            if not all(torch.equal(shard, shards[0]) for shard in shards):
                raise CheckpointError(f"{name}: differs between tensor ranks, which hold copies of it")
            return shards[0].detach().reshape(shape)
        return join_shards([shard.detach() for shard in shards], sharding, shape)

    return LazyTensor(shape, shards[0].dtype, read)


def shard_shape(shape: tuple[int, ...], sharding: str, width: int) -> tuple[int, ...] | None:
    """Shape of the shard of one of `width` tensor ranks; None if the tensor does not divide evenly."""
    if sharding == "whole":
        return shape
    dim, parts = CUTS[sharding]
    if shape[dim] % (parts * width):
        return None
    cut = tuple(size // width if i == dim else size for i, size in enumerate(shape))
    if sharding == "expert up":
        return cut[2], cut[0] * cut[1]
    return (cut[0] * cut[2], cut[1]) if sharding == "expert down" else cut


def _check_head(last: RankFile, first: RankFile, unused: set[str], wrong: list[str]) -> None:
    """Check the last stage's copy of the tied embedding, which it has under one of two names."""
    name = "head" if "head" in last.tensors else "embedding"
    unused.discard(name)
    copy, embedding = last.tensors.get(name), first.tensors.get("embedding")
    if copy is not None and embedding is not None and not torch.equal(copy, embedding):
        wrong.append(f"{last.path.parent.name}: its output matrix differs from the embedding, though tied")


def export_megatron(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    tensor: int = 1,
    stages: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a checkpoint's weights as `OUT/release/mp_rank_*`, for `tensor` ranks per stage.

    `stages` has the number of layers of each pipeline stage (None: one stage); `dtype` None keeps that of the
    checkpoint. One rank's shards are in memory at a time.

    Raises CheckpointError if the partition does not fit the model or `out` cannot be written.
    """
    out, model = Path(out), checkpoint.model
    counts = list(stages or [model.num_layers])
    if sum(counts) != model.num_layers or min(counts) < 0:
        raise CheckpointError(f"stages of {counts} layers; the model has {model.num_layers}")
    if out.exists():
        raise CheckpointError(f"{out}: already exists; give another --out")
    if model.router == "softmax":
        raise CheckpointError(
            f"{checkpoint.path}: router softmax; the original code has the attention router"
        )
    if model.num_attention_heads % tensor or not model.tie_embeddings or model.attention == "plain":
        raise CheckpointError(
            f"{checkpoint.path}: {model.num_attention_heads} heads over {tensor} ranks, tied embeddings: "
            f"{model.tie_embeddings}, attention: {model.attention}; the original code does not support this"
        )
    reader, arguments = WholeTensorReader(checkpoint), _arguments(checkpoint)
    with new_folder(out) as temporary:
        for stage in range(len(counts)):
            for rank in range(tensor):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(counts) > 1 else "")
                rank_directory = temporary / "release" / name
                rank_directory.mkdir(parents=True)
                content = _rank_content(model, reader, counts, stage, rank, tensor, dtype)
                torch.save(content | {"args": arguments}, rank_directory / FILE)
        (temporary / TRACKER).write_text("release\n", encoding="utf-8")
    return out


def _rank_content(
    model: ModelConfig,
    reader: WholeTensorReader,
    counts: list[int],
    stage: int,
    rank: int,
    width: int,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The content of the file of one stage and tensor rank, without the arguments."""
    mappings = {mapping.name: mapping for mapping in published_layout(model)}

    def shard_of(name: str, sharding: str) -> torch.Tensor:
        mapping = mappings[name]
        if shard_shape(mapping.shape, sharding, width) is None:
            raise CheckpointError(f"{name}: shape {list(mapping.shape)} does not divide over {width} ranks")
        full = reader.read(name, mapping.shape)
        shard = take_shard(full, sharding, rank, width).to(dtype or full.dtype)
        return shard.unsqueeze(-1).clone() if mapping.conv2d else shard.clone()

    encoder: Tensors = {}
    first = sum(counts[:stage])
    for local in range(counts[stage]):
        for ours, (original, sharding) in layer_names(model).items():
            encoder[f"layers.{local}.{original}"] = shard_of(f"layers.{first + local}.{ours}", sharding)
    language: dict[str, Any] = {"encoder": encoder}
    content: dict[str, Any] = {"language_model": language}
    last = stage == len(counts) - 1
    if last:
        encoder["final_layernorm.weight"] = shard_of("final_norm.weight", "whole")
    if stage == 0:
        language["embedding"] = {"word_embeddings": {"weight": shard_of("embedding.weight", "rows")}}
    elif last:
        content["word_embeddings_for_head"] = {"weight": shard_of("embedding.weight", "rows")}
    return {"checkpoint_version": 3.0, "iteration": 0, "model": content}


def _arguments(checkpoint: Checkpoint) -> argparse.Namespace:
    """The sizes, and what is done at document ends, as the original code saves them."""
    model, experts = checkpoint.model, {}
    data = checkpoint.state["run"].get("data", {}) | checkpoint.resets
    if model.num_experts:
        experts = {
            "num_experts": model.num_experts,
            "moe_router_topk": model.experts_per_token,
            "use_attention_router": True,
            # The router's heads must be as many as the tokens: else the original code mixes tokens.
            "num_attention_router_heads": model.max_sequence_length,
            "seq_length": model.max_sequence_length,
        }
    return argparse.Namespace(
        kv_channels=model.head_dim,
        # The original code cuts the product with the width, which may be a bit less than a whole number.
        rotary_percent=min(1.0, math.nextafter(model.rotary_size / model.head_dim, 2.0)),
        **{OWN: {"norm_epsilon": model.norm_epsilon, "rotary_form": model.rotary_form}},
        **{original: data.get(key, False) for key, original in AT_DOCUMENT_ENDS.items()},
        rotary_base=model.rope_base,
        **experts,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.expert_width if model.num_experts else model.ffn_hidden_size,
        padded_vocab_size=model.vocab_size,
        max_position_embeddings=model.max_sequence_length,
        tokenizer_type="YuanTokenizer",
    )
