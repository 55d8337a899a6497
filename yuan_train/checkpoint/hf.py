"""Yuan 2.0 in its published Hugging Face form: into a checkpoint, and back; every tensor by name.

Both ways are streamed: one tensor is in memory at a time. Nothing is ignored silently, and no code that lies
beside the weights is run: safetensors hold none, PyTorch's `.bin` files are read by torch's restricted
unpickler, and Python files are not looked at.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from yuan_train.checkpoint.load import Checkpoint, Reader, load_tensors
from yuan_train.checkpoint.names import WEIGHTS
from yuan_train.checkpoint.stream import LazyTensor, save_streamed, shards_of, write_safetensors
from yuan_train.checkpoint.yuan_layout import (
    EMBEDDING,
    HEAD,
    Mapped,
    model_as_plain,
    model_of,
    published_config,
    published_layout,
    rotary_buffer,
)
from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import ModelConfig

BUFFERS = "buffers"
"""Beside `weights.` in a checkpoint: published buffers that are computed, kept for the way back."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float32"}
SHARD_BYTES = 5_000_000_000
TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")
MODEL_CODE = ("configuration_yuan.py", "modeling_yuan.py")
TOKENIZER_CODE = "tokenization_yuan.py"
LISTED = 5
CHECKED_ELEMENTS = 1 << 24


@dataclass(frozen=True)
class Imported:
    """What was read, and where the checkpoint is."""

    path: str
    parameters: int
    tensors: int
    dtype: str
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: str
    parameters: int
    tensors: int
    dtype: str
    files: tuple[str, ...]


# --- in --------------------------------------------------------------------------------------------------


def import_hf(folder: str | Path, out: str | Path) -> Imported:
    """Turn a folder in the published form into a checkpoint of step 0 under `out`.

    Weights keep their type, so that an export gives the same bits. There is no optimizer state: training that
    continues from here begins with that of step 0.

    Raises CheckpointError for anything but a whole dense Yuan 2.0 model: torn files, tensors that are
    missing, too many or of another shape, values that are not finite, embedding and head that differ though
    tied.
    """
    folder = Path(folder)
    config = _read_config(folder)
    model = model_of(config, name=folder.resolve().name, where=f"{folder}/config.json")
    stored = open_tensors(folder)
    layout = _check_names(folder, model, stored)
    notes: list[str] = []
    tensors = {f"{WEIGHTS}.{m.name}": _assembled(m, stored) for m in layout}
    tensors |= _buffers(model, stored, notes)
    if model.tie_embeddings:
        _check_tied(stored, notes)
    dtypes = {name: _name_of(t.dtype) for name, t in stored.items() if not name.endswith(".inv_freq")}
    common = Counter(dtypes.values()).most_common(1)[0][0]
    state = _state(model, config) | {
        "hf": {
            "config": config,
            "dtype": common,
            "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != common},
            "head": HEAD in stored,
        }
    }
    path = save_streamed(out, tensors=tensors, state=state, tokenizer=_tokenizer_in(folder))
    return Imported(str(path), model.parameters, len(stored), common, tuple(notes))


def weights_state(model: ModelConfig, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`state.json` of a checkpoint that holds weights alone, at step 0."""
    return {
        "version": 1,
        "step": 0,
        "sequences": 0,
        "tokens": 0,
        "weights_only": True,
        "run": {"model": model_as_plain(model), "data": dict(data or {})},
    }


def _state(model: ModelConfig, config: Mapping[str, Any]) -> dict[str, Any]:
    resets = {
        "reset_position_ids": bool(config.get("reset_position_ids", True)),
        "reset_attention": bool(config.get("reset_attention_mask", False)),
        "reset_filter": bool(config.get("reset_filter", False)),
    }
    return weights_state(model, resets)


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such directory; give a folder with config.json and the weights")
    config = _read_object(folder / "config.json")
    return config


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; wanted a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}; wanted a JSON object")
    return value


def _tokenizer_in(folder: Path) -> Path | None:
    return next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def _check_names(folder: Path, model: ModelConfig, stored: Mapping[str, LazyTensor]) -> list[Mapped]:
    """The layout, after comparing every name and shape with it."""
    # Before the layout is made: a hostile config may promise any number of layers.
    if model.num_layers > len(stored):
        raise CheckpointError(
            f"{folder}: config.json says {model.num_layers} layers, the weights hold {len(stored)} tensors"
        )
    layout = list(published_layout(model))
    wanted = {part: m.part_shape for m in layout for part in m.parts}
    optional: dict[str, tuple[int, ...]] = {
        rotary_buffer(i): (model.head_dim // 2,) for i in range(model.num_layers)
    }
    if model.tie_embeddings:
        optional[HEAD] = (model.vocab_size, model.hidden_size)
    known = wanted | optional
    wrong = [f"{name} is missing" for name in wanted if name not in stored]
    wrong += [f"{name} is no tensor of this model" for name in stored if name not in known]
    wrong += [
        f"{name} has shape {list(tensor.shape)}, wanted {list(known[name])}"
        for name, tensor in stored.items()
        if name in known and tensor.shape != known[name]
    ]
    wrong += [
        f"{name} is of type {tensor.dtype}"
        for name, tensor in stored.items()
        if tensor.dtype not in DTYPES.values()
    ]
    if wrong:
        more = f"; and {len(wrong) - LISTED} more" if len(wrong) > LISTED else ""
        raise CheckpointError(f"{folder} does not fit its config.json: {'; '.join(wrong[:LISTED])}{more}")
    return layout


def _assembled(mapped: Mapped, stored: Mapping[str, LazyTensor]) -> LazyTensor:
    parts = [stored[part] for part in mapped.parts]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)

    def read() -> torch.Tensor:
        tensors = []
        for name, part in zip(mapped.parts, parts, strict=True):
            tensor = part.read()
            if not is_finite(tensor):
                raise CheckpointError(f"{name}: holds values that are not finite (NaN or infinite)")
            tensors.append(tensor.reshape(-1, *mapped.shape[1:]).to(dtype))
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    return LazyTensor(mapped.shape, dtype, read)


def _buffers(model: ModelConfig, stored: Mapping[str, LazyTensor], notes: list[str]) -> dict[str, LazyTensor]:
    """The stored rotary frequencies, after comparing them with the ones that we compute."""
    found = {name: t for name, t in stored.items() if name.endswith(".rotary_emb.inv_freq")}
    if not found:
        return {}
    exponents = torch.arange(0, model.head_dim, 2, dtype=torch.float64) / model.head_dim
    wanted = model.rope_base**-exponents
    for name, tensor in found.items():
        tolerance = 1e-5 if tensor.dtype == torch.float32 else 1e-2
        if not torch.allclose(tensor.read().double(), wanted, rtol=tolerance, atol=1e-7):
            raise CheckpointError(
                f"{name}: these frequencies are not those of rope_theta {model.rope_base:g}; "
                "give the right rope_theta in config.json"
            )
    notes.append(
        f"{len(found)} rotary_emb.inv_freq buffers hold what the model computes anyway; kept for export"
    )
    return {f"{BUFFERS}.{name}": tensor for name, tensor in found.items()}


def _check_tied(stored: Mapping[str, LazyTensor], notes: list[str]) -> None:
    if HEAD not in stored:
        notes.append(f"{HEAD} is not stored: it is {EMBEDDING}")
        return
    if _digest(stored[HEAD]) != _digest(stored[EMBEDDING]):
        raise CheckpointError(
            f"{HEAD} differs from {EMBEDDING}, but config.json ties them (tie_word_embeddings: true)"
        )


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are numbers; looked at in pieces, for the check itself takes memory."""
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.reshape(-1).split(CHECKED_ELEMENTS))


def _digest(tensor: LazyTensor) -> tuple[str, str]:
    """Type and checksum of the values, so that two large tensors are compared one after the other."""
    digest = hashlib.sha256()
    for piece in tensor.read().contiguous().view(-1).view(torch.uint8).split(CHECKED_ELEMENTS):
        digest.update(piece.numpy().data)
    return str(tensor.dtype), digest.hexdigest()


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# --- the files -------------------------------------------------------------------------------------------


def open_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of a folder by its published name: safetensors, else PyTorch `.bin`; one file or several.

    Raises CheckpointError for missing and torn files, and where index and files tell different names.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, alone = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        opened = _open_safetensors if suffix == "safetensors" else _open_pickled
        if index.exists():
            return _open_indexed(folder, index, opened)
        if alone.exists():
            return opened(alone)
    raise CheckpointError(
        f"{folder}: no weights: wanted model.safetensors or pytorch_model.bin, or the index of their shards"
    )


def _open_indexed(
    folder: Path, index: Path, opened: Callable[[Path], dict[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    places = _read_object(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise CheckpointError(f"{index}: no weight_map; wanted the place of every tensor")
    found: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(places.values()):
        # A path that leaves the folder is no shard of this model.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is no name of a file beside it")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: the shard is missing; {index.name} names it")
        tensors = opened(folder / name)
        told = {tensor for tensor, place in places.items() if place == name}
        if odd := sorted(told ^ set(tensors)):
            where = "in the index only" if odd[0] in told else "in the file only"
            raise CheckpointError(f"{folder / name}: {odd[0]} is {where}; index and shard must agree")
        found |= tensors
    return found


def _open_safetensors(path: Path) -> dict[str, LazyTensor]:
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            facts = {name: (tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: torn, or no safetensors file: {error}") from None
    return {
        name: LazyTensor(shape, _SAFETENSORS.get(dtype, torch.uint8), _safetensors_reader(path, name))
        for name, (shape, dtype) in facts.items()
    }


_SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def _safetensors_reader(path: Path, name: str) -> Callable[[], torch.Tensor]:
    def read() -> torch.Tensor:
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None

    return read


def _open_pickled(path: Path) -> dict[str, LazyTensor]:
    loaded = load_pickled(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds {type(loaded).__name__}; wanted tensors by name")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.is_sparse:
            raise CheckpointError(f"{path}: {name!r} is {type(tensor).__name__}; wanted tensors by name")

    def reader(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        return lambda: tensor.detach()

    # Mapped, not read: each tensor comes from the disk when it is used.
    return {name: LazyTensor(tuple(t.shape), t.dtype, reader(t)) for name, t in loaded.items()}


def load_pickled(path: Path) -> Any:
    """The content of a file of `torch.save`, by torch's restricted unpickler: tensors and plain values.

    Raises CheckpointError for a file that is torn or asks for anything else to be called.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # The form before PyTorch 1.6 cannot be mapped.
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Hostile bytes provoke anything; whatever it is, nothing of theirs was called.
        told = str(error).split("\n")[0][:200]
        raise CheckpointError(
            f"{path}: torn, or holds more than tensors (nothing in it was run): {told}"
        ) from None


# --- out -------------------------------------------------------------------------------------------------


def export_hf(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    token_ids: Mapping[str, int] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write a checkpoint's model to `out` in the published form, with model code that reads it.

    Args:
        checkpoint: of any plan.
        out: a folder that is not there yet, or is empty; written aside and renamed.
        dtype: `float32`, `bfloat16` or `float16`; None: as imported, or the precision of the run.
        tokenizer: file to put beside the weights; None: the checkpoint's own.
        token_ids: `eod`, `sep`, `pad`, `mask` for config.json; the published ones without it.
        shard_bytes: size of a file at most, a larger tensor excepted.

    Raises:
        CheckpointError: the checkpoint cannot be read, or `out` not written.
    """
    out = Path(out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: is there already; give an --out of its own")
    hf = checkpoint.state.get("hf") or {}
    data = checkpoint.state["run"].get("data") or {}
    precision = checkpoint.state["run"].get("train", {}).get("precision", "fp32")
    common = dtype or hf.get("dtype") or PRECISIONS.get(precision, "float32")
    if common not in DTYPES:
        raise CheckpointError(f"--dtype: {common!r}; wanted one of {', '.join(DTYPES)}")
    tensors = dict(
        _published(checkpoint, common, {} if dtype else hf.get("dtypes", {}), hf.get("head", True))
    )
    config = published_config(
        checkpoint.model, dtype=common, original=hf.get("config"), resets=data, token_ids=token_ids
    )
    aside = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        _write_weights(aside, tensors, shard_bytes)
        _write_configs(aside, config)
        _write_code(aside, tokenizer or _tokenizer_of(checkpoint))
        if out.exists():
            out.rmdir()
        files = tuple(sorted(path.name for path in aside.iterdir()))
        aside.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error}; give another --out") from error
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return Exported(str(out), checkpoint.model.parameters, len(tensors), common, files)


def _published(
    checkpoint: Checkpoint, common: str, dtypes: Mapping[str, str], head: bool
) -> Iterator[tuple[str, LazyTensor]]:
    """Published tensors in order; the parts of one of ours stand together, and are read one after another."""
    reader = _WholeReader(checkpoint)
    model = checkpoint.model

    def typed(name: str) -> torch.dtype:
        return DTYPES[dtypes.get(name, common)]

    for mapped in published_layout(model):
        for number, part in enumerate(mapped.parts):
            yield part, _part(reader, mapped, number, typed(part))
        if mapped.parts == (EMBEDDING,) and head and model.tie_embeddings:
            # A copy beside it: published checkpoints have both, and a file holds no shared storage.
            yield HEAD, _part(reader, mapped, 0, typed(HEAD))
    yield from reader.buffers()


def _part(reader: _WholeReader, mapped: Mapped, number: int, dtype: torch.dtype) -> LazyTensor:
    def read() -> torch.Tensor:
        rows = reader.read(mapped.name, mapped.shape).chunk(len(mapped.parts))[number]
        return rows.reshape(mapped.part_shape).to(dtype)

    return LazyTensor(mapped.part_shape, dtype, read)


class _WholeReader:
    """Reads whole tensors of a checkpoint, and keeps the last one: its parts are asked for in turn."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._held = {
            name: entry
            for name, entry in Reader(checkpoint.path).read_metadata().state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self._last: tuple[str, torch.Tensor] | None = None

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if self._last is None or self._last[0] != name:
            self._last = None  # before the next one is made, not after
            self._last = (name, self._load(f"{WEIGHTS}.{name}", shape))
        return self._last[1]

    def buffers(self) -> Iterator[tuple[str, LazyTensor]]:
        """What an import kept beside the weights."""
        for key, entry in self._held.items():
            if key.startswith(f"{BUFFERS}."):
                shape, dtype = tuple(entry.size), entry.properties.dtype
                read = _bind(self._load, key, shape)
                yield key.removeprefix(f"{BUFFERS}."), LazyTensor(shape, dtype, read)

    def _load(self, key: str, shape: tuple[int, ...]) -> torch.Tensor:
        if key not in self._held:
            raise CheckpointError(f"{self._checkpoint.path}: {key} is missing")
        tensor = torch.empty(shape, dtype=self._held[key].properties.dtype)
        load_tensors(self._checkpoint, {key: tensor}, alone=True)
        return tensor


def _bind(
    load: Callable[[str, tuple[int, ...]], torch.Tensor], key: str, shape: tuple[int, ...]
) -> Callable[[], torch.Tensor]:
    return lambda: load(key, shape)


def _write_weights(aside: Path, tensors: Mapping[str, LazyTensor], shard_bytes: int) -> None:
    shards = shards_of(tensors.items(), shard_bytes)
    if len(shards) == 1:
        write_safetensors(aside / "model.safetensors", shards[0])
        return
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(aside / name, shard)
        places |= dict.fromkeys(shard, name)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": places}
    (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_configs(aside: Path, config: Mapping[str, Any]) -> None:
    generation = {
        "bos_token_id": config["bos_token_id"],
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (aside / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_code(aside: Path, tokenizer: Path | None) -> None:
    code = resources.files("yuan_train") / "hf_export"
    for name in MODEL_CODE:
        (aside / name).write_text((code / name).read_text(encoding="utf-8"), encoding="utf-8")
    if tokenizer is None:
        return
    name = "tokenizer.json" if tokenizer.suffix == ".json" else "tokenizer.model"
    shutil.copyfile(tokenizer, aside / name)
    if name != "tokenizer.model":
        return
    (aside / TOKENIZER_CODE).write_text((code / TOKENIZER_CODE).read_text(encoding="utf-8"), encoding="utf-8")
    told = {
        "tokenizer_class": "YuanTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_yuan.YuanTokenizer", None]},
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    (aside / "tokenizer_config.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


def _tokenizer_of(checkpoint: Checkpoint) -> Path | None:
    return _tokenizer_in(checkpoint.tokenizer) if checkpoint.tokenizer is not None else None
