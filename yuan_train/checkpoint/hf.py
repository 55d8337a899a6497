"""Reads and writes models in their published Hugging Face formats, every tensor by name; the Hub by name.

Streamed: one tensor is in memory at a time. Nothing is ignored silently. No code in a folder is run:
safetensors hold none, PyTorch's `.bin` files are read by torch's restricted unpickler, and Python files are
not read.

`huggingface_hub` comes with `tokenizers`; it is imported, and asks the network, only when a name is given.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from yuan_train.checkpoint.load import (
    BUFFERS,
    STATE,
    WEIGHTS,
    Checkpoint,
    LazyTensor,
    WholeTensorReader,
    steps_in,
)
from yuan_train.checkpoint.save import copy_tokenizer, save_streamed, split_into_shards, write_safetensors
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import Document, build
from yuan_train.config.model import ModelConfig, hub_advice, validate_model
from yuan_train.models.decoder import (
    EMBEDDING,
    HEAD,
    PublishedFormat,
    Publishing,
    TensorMapping,
    format_for,
    format_of,
    rotary_buffer,
)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_FILES = ("tokenizer.model", "tokenizer.json")


def check_is_published(folder: Path) -> None:
    """Raise CheckpointError for a file of a published model, and for a checkpoint of ours."""
    if folder.is_file():
        raise CheckpointError(f"{folder}: is a file; give the folder that has it: {folder.parent}")
    if folder.is_dir() and ((folder / STATE).is_file() or steps_in(folder)):
        raise CheckpointError(f"{folder}: is a checkpoint already, and needs no import")


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file; wanted a Hugging Face model") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: holds {type(value).__name__}; wanted a JSON object")
    return value


def find_tokenizer_file(folder: Path) -> Path | None:
    """The tokenizer's file in a folder; None if there is none."""
    return next((folder / name for name in TOKENIZER_FILES if (folder / name).is_file()), None)


def open_tensors(folder: Path) -> dict[str, LazyTensor]:
    """Every tensor of a folder by its published name: safetensors, else PyTorch `.bin`; one file or shards.

    Raises CheckpointError for missing and truncated files, and if the index and the files differ in names.
    """
    for stem, suffix in (("model", "safetensors"), ("pytorch_model", "bin")):
        index, single_file = folder / f"{stem}.{suffix}.index.json", folder / f"{stem}.{suffix}"
        open_file = open_safetensors if suffix == "safetensors" else _open_pickled
        if index.exists():
            return _open_indexed(folder, index, open_file)
        if single_file.exists():
            return open_file(single_file)
    raise CheckpointError(
        f"{folder}: no weights: wanted model.safetensors or pytorch_model.bin, or the index of their shards"
    )


def _open_indexed(
    folder: Path, index: Path, open_file: Callable[[Path], dict[str, LazyTensor]]
) -> dict[str, LazyTensor]:
    """Every tensor of the shards that an index names."""
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: no weight_map; wanted the file of every tensor")
    found: dict[str, LazyTensor] = {}
    for name in dict.fromkeys(weight_map.values()):
        # A path to another folder is not a shard of this model.
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{index}: {name!r} is not the name of a file in this folder")
        if not (folder / name).is_file():
            raise CheckpointError(f"{folder / name}: the shard is missing; {index.name} names it")
        tensors = open_file(folder / name)
        indexed = {tensor for tensor, file in weight_map.items() if file == name}
        if unmatched := sorted(indexed ^ set(tensors)):
            where = "in the index only" if unmatched[0] in indexed else "in the file only"
            raise CheckpointError(f"{folder / name}: {unmatched[0]} is {where}; index and shard must agree")
        found |= tensors
    return found


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Every tensor of a safetensors file, by name. Raises CheckpointError."""
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a mapping
            headers = {name: (tuple(s.get_shape()), str(s.get_dtype())) for name, s in slices.items()}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{path}: torn, or no safetensors file: {error}") from None
    if other := next((name for name, (_, dtype) in headers.items() if dtype not in _SAFETENSORS), None):
        raise CheckpointError(f"{path}: {other} is of type {headers[other][1]}; wanted F32, BF16 or F16")
    return {
        name: LazyTensor(shape, _SAFETENSORS[dtype], partial(_read_safetensors, path, name))
        for name, (shape, dtype) in headers.items()
    }


_SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64}


def _read_safetensors(path: Path, name: str) -> torch.Tensor:
    """One tensor of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}") from None


def _open_pickled(path: Path) -> dict[str, LazyTensor]:
    loaded = load_pickled(path)
    if not isinstance(loaded, dict):
        raise CheckpointError(f"{path}: holds {type(loaded).__name__}; wanted tensors by name")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor) or tensor.is_sparse:
            raise CheckpointError(f"{path}: {name!r} is {type(tensor).__name__}; wanted tensors by name")
    # The file is memory-mapped: each tensor is read from disk when it is used.
    return {name: LazyTensor(tuple(t.shape), t.dtype, t.detach) for name, t in loaded.items()}


def load_pickled(path: Path) -> Any:
    """The content of a `torch.save` file, read by torch's restricted unpickler: tensors and plain values.

    Raises CheckpointError for a file that is truncated, or whose pickle needs anything else to be called.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
            except RuntimeError as error:
                if "mmap" not in str(error):
                    raise
                # The format from before PyTorch 1.6 cannot be memory-mapped.
                return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        # Hostile bytes can raise anything, but no code of theirs was called.
        cause = str(error).split("\n")[0][:200]
        raise CheckpointError(
            f"{path}: torn, or holds more than tensors (nothing in it was run): {cause}"
        ) from None


CHECKED_ELEMENTS = 1 << 24
"""Elements (or bytes) of a piece."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether no value is NaN or infinite."""
    return all(bool(torch.isfinite(piece).all()) for piece in tensor.reshape(-1).split(CHECKED_ELEMENTS))


def digest(tensor: LazyTensor) -> tuple[str, str]:
    """Dtype and SHA-256 of the values: to compare two large tensors with only one in memory at a time."""
    checksum = hashlib.sha256()
    for piece in tensor.read().contiguous().view(-1).view(torch.uint8).split(CHECKED_ELEMENTS):
        checksum.update(piece.numpy().data)
    return str(tensor.dtype), checksum.hexdigest()


MAX_LISTED = 5
"""Differences that a message lists."""


@dataclass(frozen=True)
class Imported:
    """What was read, and the path of the checkpoint."""

    path: str
    parameters: int
    tensors: int
    dtype: str
    notes: tuple[str, ...]


def import_hf(
    folder: str | Path,
    out: str | Path,
    *,
    name: str | None = None,
    rope_base: float | None = None,
    rotary_form: str | None = None,
) -> Imported:
    """Turn a folder in the published format into a checkpoint of step 0 under `out`.

    The model is called `name`, or as its folder. Weights keep their dtype, so that an export gives the same
    bits. There is no optimizer state: training from this checkpoint starts with a new one. `rope_base` and
    `rotary_form` are fields of the model that
    published configs may not have; None: what the config says, or the default.

    Raises CheckpointError for anything but a complete model of a known architecture: truncated files,
    tensors that are missing, unknown or of another shape, values that are not finite, a tied head that
    differs from the embedding.
    """
    folder = Path(folder)
    config = _read_config(folder)
    where = f"{folder}/config.json"
    published = format_for(config, where=where)
    model = published.model_from_config(config, name=name or folder.resolve().name, where=where)
    given = {"rope_base": rope_base, "rotary_form": rotary_form}
    model = _with_fields(model, {key: value for key, value in given.items() if value is not None})
    if rope_base is not None:
        config = config | {"rope_theta": rope_base}  # An export writes it as the publisher's own word.
    stored = open_tensors(folder)
    layout = _check_names(folder, model, stored)
    notes = [] if model.router != "attention" or rope_base is not None else _rotary_notes(config, model)
    tensors = {f"{WEIGHTS}.{mapping.name}": _assemble(mapping, stored) for mapping in layout}
    tensors |= _buffers(model, stored, notes)
    if model.tie_embeddings:
        _check_tied(stored, notes)
    named = ((name, str(t.dtype).removeprefix("torch.")) for name, t in stored.items())
    dtypes = {name: dtype for name, dtype in named if not name.endswith(".inv_freq")}
    common = Counter(dtypes.values()).most_common(1)[0][0]
    state = weights_state(model, published.resets_of(config)) | {
        "hf": {
            "config": config,
            "dtype": common,
            "dtypes": {name: dtype for name, dtype in dtypes.items() if dtype != common},
            "head": HEAD in stored,
        }
    }
    path = save_streamed(out, tensors=tensors, state=state, tokenizer=find_tokenizer_file(folder))
    return Imported(str(path), model.parameters, len(stored), common, tuple(notes))


def weights_state(model: ModelConfig, data: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """`state.json` of a checkpoint of step 0 that holds weights only.

    `data` is what the model was trained to reset at document ends.
    """
    return {
        "version": 1,
        "step": 0,
        "sequences": 0,
        "tokens": 0,
        "weights_only": True,
        "run": {"model": asdict(model), "data": dict(data or {})},
    }


def _read_config(folder: Path) -> dict[str, Any]:
    if not folder.is_dir():
        advice = hub_advice(folder) or "give a folder with config.json and the weights"
        raise CheckpointError(f"{folder}: no such directory; {advice}")
    return read_json_object(folder / "config.json")


def _check_names(folder: Path, model: ModelConfig, stored: Mapping[str, LazyTensor]) -> list[TensorMapping]:
    """The model's layout, if every stored name, shape and dtype fits it. Raises CheckpointError."""
    # Checked before the layout is made: a hostile config may claim any number of layers.
    if model.num_layers > len(stored):
        raise CheckpointError(
            f"{folder}: config.json says {model.num_layers} layers, the weights hold {len(stored)} tensors"
        )
    layout = list(format_of(model.architecture).published_layout(model))
    wanted = {part: mapping.part_shape for mapping in layout for part in mapping.parts}
    optional: dict[str, tuple[int, ...]] = {
        rotary_buffer(i): (model.rotary_size // 2,) for i in range(model.num_layers)
    }
    if model.tie_embeddings:
        optional[HEAD] = (model.vocab_size, model.hidden_size)
    known = wanted | optional
    wrong = [f"{name} is missing" for name in wanted if name not in stored]
    wrong += [f"{name} is not a tensor of this model" for name in stored if name not in known]
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
        more = f"; and {len(wrong) - MAX_LISTED} more" if len(wrong) > MAX_LISTED else ""
        raise CheckpointError(f"{folder} does not fit its config.json: {'; '.join(wrong[:MAX_LISTED])}{more}")
    return layout


def _assemble(mapping: TensorMapping, stored: Mapping[str, LazyTensor]) -> LazyTensor:
    """One of our tensors from its published parts, in the dtype that holds all of theirs."""
    parts = [stored[part] for part in mapping.parts]
    dtype = parts[0].dtype
    for part in parts[1:]:
        dtype = torch.promote_types(dtype, part.dtype)

    def read() -> torch.Tensor:
        tensors = []
        for name, part in zip(mapping.parts, parts, strict=True):
            tensor = part.read()
            if not is_finite(tensor):
                raise CheckpointError(f"{name}: holds values that are not finite (NaN or infinite)")
            tensors.append(tensor.flatten().to(dtype))
        return (tensors[0] if len(tensors) == 1 else torch.cat(tensors)).view(mapping.shape)

    return LazyTensor(mapping.shape, dtype, read)


def _buffers(model: ModelConfig, stored: Mapping[str, LazyTensor], notes: list[str]) -> dict[str, LazyTensor]:
    """The stored rotary frequencies, to keep for an export; they must be those that the model computes.

    Raises CheckpointError if they differ.
    """
    found = {name: t for name, t in stored.items() if name.endswith(".rotary_emb.inv_freq")}
    if not found:
        return {}
    exponents = torch.arange(0, model.rotary_size, 2, dtype=torch.float64) / model.rotary_size
    wanted = model.rope_base**-exponents
    for name, tensor in found.items():
        tolerance = 1e-5 if tensor.dtype == torch.float32 else 1e-2
        if not torch.allclose(tensor.read().double(), wanted, rtol=tolerance, atol=1e-7):
            raise CheckpointError(
                f"{name}: these frequencies are not those of rope_theta {model.rope_base:g}; "
                "give the right rope_theta in config.json"
            )
    notes.append(
        f"{len(found)} rotary_emb.inv_freq buffers equal what the model computes; kept for an export"
    )
    return {f"{BUFFERS}.{name}": tensor for name, tensor in found.items()}


def _with_fields(model: ModelConfig, fields: Mapping[str, Any]) -> ModelConfig:
    """The model with other fields. Raises CheckpointError if it does not have them, or not such values."""
    try:
        return build(
            Document("import", asdict(model) | dict(fields), {}), ModelConfig, validate=validate_model
        )
    except ConfigError as error:
        raise CheckpointError(str(error)) from None


def _rotary_notes(config: Mapping[str, Any], model: ModelConfig) -> list[str]:
    """What the published configs of Yuan 2.0-M32 do not say: the base that the weights were trained with."""
    if any(config.get(key) for key in ("rope_theta", "rotary_base", "rope_parameters")):
        return []
    return [
        f"config.json names no rotary base: taken as {model.rope_base:g}, that of pre-training and of the "
        "published class. The released model of 16,384 tokens was tuned and evaluated with 40890: for that, "
        "import again with --rope-base 40890"
    ]


def _check_tied(stored: Mapping[str, LazyTensor], notes: list[str]) -> None:
    """Raise CheckpointError if a tied output head is stored and differs from the embedding."""
    if HEAD not in stored:
        notes.append(f"{HEAD} is not stored; it is tied to {EMBEDDING}")
        return
    if digest(stored[HEAD]) != digest(stored[EMBEDDING]):
        raise CheckpointError(
            f"{HEAD} differs from {EMBEDDING}, but config.json ties them (tie_word_embeddings: true)"
        )


PRECISIONS = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp64": "float32"}
"""Exported dtype by the precision of the run."""

SHARD_BYTES = 5_000_000_000

TOKENIZER_CODE = "tokenization_yuan.py"


@dataclass(frozen=True)
class Exported:
    """What was written."""

    path: str
    parameters: int
    tensors: int
    dtype: str
    files: tuple[str, ...]
    notes: tuple[str, ...] = ()
    """What of the model the format has no word for."""


def export_hf(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    dtype: str | None = None,
    tokenizer: Path | None = None,
    token_ids: Mapping[str, int] | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> Exported:
    """Write a checkpoint's model to `out` in the published format, with code where transformers has none.
    Adapters are merged into their matrices.

    Args:
        checkpoint: of any plan.
        out: a folder that does not exist or is empty; written under a temporary name, and then renamed.
        dtype: `float32`, `bfloat16` or `float16`; None: as imported, or the precision of the run.
        tokenizer: tokenizer file to copy; None: the checkpoint's own.
        token_ids: `eod`, `eos`, `bos`, `sep`, `pad`, `mask` for config.json; None: the published ones.
        shard_bytes: maximum size of a weights file; a larger tensor gets its own file.

    Raises:
        CheckpointError: the checkpoint cannot be read, or `out` cannot be written.
    """
    out = Path(out)
    check_is_free(out)
    if checkpoint.model.output == "value":
        raise CheckpointError(
            f"{checkpoint.path}: a reward model (output: value), for which no published format is written yet"
        )
    hf = checkpoint.state.get("hf") or {}
    data = checkpoint.state["run"].get("data") or {}
    precision = checkpoint.state["run"].get("train", {}).get("precision", "fp32")
    common = dtype or hf.get("dtype") or PRECISIONS.get(precision, "float32")
    if common not in DTYPES:
        raise CheckpointError(f"--dtype: {common!r}; wanted one of {', '.join(DTYPES)}")
    published = format_of(checkpoint.model.architecture)
    head = hf.get("head", published.STORES_TIED_HEAD)
    reader, dtypes = WholeTensorReader(checkpoint), {} if dtype else hf.get("dtypes", {})
    tensors = dict(_published(checkpoint.model, reader, common, dtypes, head)) | dict(reader.buffers())
    how = Publishing(dtype=common, original=hf.get("config") or {}, resets=data, token_ids=token_ids or {})
    config = published.published_config(checkpoint.model, how)
    with new_folder(out) as temporary:
        _write_weights(temporary, tensors, shard_bytes)
        _write_configs(temporary, config)
        own = checkpoint.tokenizer and find_tokenizer_file(checkpoint.tokenizer)
        _write_code(temporary, published, tokenizer or own)
    files = tuple(sorted(path.name for path in out.iterdir()))
    parameters = replace(checkpoint.model, lora=None).parameters
    lost = [key for key, told in published.resets_of(config).items() if checkpoint.resets[key] and not told]
    notes = (_RESETS_LOST.format(format=config["model_type"], keys=", ".join(lost)),) if lost else ()
    return Exported(str(out), parameters, len(tensors), common, files, notes)


_RESETS_LOST = (
    "the {format} format has no word for {keys}: transformers resets nothing at the end of a document, as "
    "training did; give the model one document at a time"
)


def check_is_free(out: Path) -> None:
    """Raise CheckpointError if there is something where a folder is to be written."""
    if not out.name or (out.exists() and (not out.is_dir() or any(out.iterdir()))):
        raise CheckpointError(f"{out}: already exists; give another --out")


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder under a temporary name, which has that of `out` once all is written.

    Raises CheckpointError if it cannot be.
    """
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if out.exists():
            out.rmdir()
        temporary.rename(out)
    except (OSError, RuntimeError) as error:  # The latter is torch.save's.
        raise CheckpointError(f"{out}: cannot be written: {error}; give another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


class WeightReader(Protocol):
    """Gives whole weights; asked for one several times in a row, it may keep it."""

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The weights of global name `name` and global shape `shape`, adapters merged."""
        ...


def published_weights(model: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """The global names and shapes of what `write_model` reads, in its order."""
    layout = format_of(model.architecture).published_layout(model)
    return [(mapping.name, mapping.shape) for mapping in layout]


def write_model(
    model: ModelConfig, reader: WeightReader, out: Path, *, dtype: str, resets: Mapping[str, Any]
) -> int:
    """Write weights and config.json of a model to `out`, in place of what is there; returns their bytes.

    It is written under a temporary name, and then renamed. `dtype`: as of `export_hf`; `resets`: what the
    model was trained to reset at document ends. Raises OSError.
    """
    published = format_of(model.architecture)
    tensors = dict(_published(model, reader, dtype, {}, published.STORES_TIED_HEAD))
    config = published.published_config(model, Publishing(dtype=dtype, resets=resets))
    temporary = out.with_name(f".{out.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    _write_weights(temporary, tensors, SHARD_BYTES)
    _write_configs(temporary, config)
    shutil.rmtree(out, ignore_errors=True)
    temporary.rename(out)
    return sum(tensor.num_bytes for tensor in tensors.values())


def open_model(folder: Path, model: ModelConfig) -> dict[str, LazyTensor]:
    """The weights of a folder in the published format, by our global names, of this very model.

    Raises CheckpointError if a name, shape or dtype does not fit; a read does for values that are not finite.
    """
    _read_config(folder)
    stored = open_tensors(folder)
    return {mapping.name: _assemble(mapping, stored) for mapping in _check_names(folder, model, stored)}


def resets_of(folder: Path, model: ModelConfig) -> dict[str, bool]:
    """What the model of a folder in the published format resets at document ends: keys of a run's `data`.
    Raises CheckpointError."""
    return format_of(model.architecture).resets_of(_read_config(folder))


def _published(
    model: ModelConfig, reader: WeightReader, common: str, dtypes: Mapping[str, str], head: bool
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the published tensors in order; parts of the same tensor of ours follow each other."""

    def dtype_of(name: str) -> torch.dtype:
        return DTYPES[dtypes.get(name, common)]

    for mapping in format_of(model.architecture).published_layout(model):
        for number, part in enumerate(mapping.parts):
            yield part, _part(reader, mapping, number, dtype_of(part))
        if mapping.parts == (EMBEDDING,) and head and model.tie_embeddings:
            # A copy: published checkpoints have both, and a safetensors file has no shared storage.
            yield HEAD, _part(reader, mapping, 0, dtype_of(HEAD))


def _part(reader: WeightReader, mapping: TensorMapping, number: int, dtype: torch.dtype) -> LazyTensor:
    """Published part `number` of one of our tensors."""

    def read() -> torch.Tensor:
        rows = reader.read(mapping.name, mapping.shape).flatten().chunk(len(mapping.parts))[number]
        return rows.reshape(mapping.part_shape).to(dtype)

    return LazyTensor(mapping.part_shape, dtype, read)


def _write_weights(temporary: Path, tensors: Mapping[str, LazyTensor], shard_bytes: int) -> None:
    """Write safetensors: one file, or shards and their index."""
    shards = split_into_shards(tensors.items(), shard_bytes)
    if len(shards) == 1:
        write_safetensors(temporary / "model.safetensors", shards[0])
        return
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(temporary / name, shard)
        weight_map |= dict.fromkeys(shard, name)
    total = sum(tensor.num_bytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (temporary / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")


def _write_configs(temporary: Path, config: Mapping[str, Any]) -> None:
    keys = ("bos_token_id", "eos_token_id", "pad_token_id")
    generation = {key: config[key] for key in keys if config.get(key) is not None}
    for name, value in (("config.json", config), ("generation_config.json", generation)):
        (temporary / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _write_code(temporary: Path, published: PublishedFormat, tokenizer: Path | None) -> None:
    """Write the model code and the tokenizer.

    A sentencepiece tokenizer of ours gets code and a config; another one brings its own config along, and so
    does a tokenizer.json.
    """
    code = resources.files("yuan_train") / "hf_export"
    for name in published.MODEL_CODE:
        (temporary / name).write_text((code / name).read_text(encoding="utf-8"), encoding="utf-8")
    if tokenizer is None:
        return
    ours = tokenizer.suffix != ".json" and (
        bool(published.MODEL_CODE) or not tokenizer.with_name("tokenizer_config.json").is_file()
    )
    copy_tokenizer(tokenizer, temporary, companions=not ours)
    if not ours:
        return
    (temporary / TOKENIZER_CODE).write_text(
        (code / TOKENIZER_CODE).read_text(encoding="utf-8"), encoding="utf-8"
    )
    tokenizer_config = {
        "tokenizer_class": "YuanTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_yuan.YuanTokenizer", None]},
        "add_bos_token": False,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 1 << 30,
    }
    (temporary / "tokenizer_config.json").write_text(
        json.dumps(tokenizer_config, indent=1) + "\n", encoding="utf-8"
    )


_NO_CONNECTION = {"ConnectionError", "ConnectError", "Timeout", "TimeoutException"}
"""Errors of requests, httpx and Python that say no server was met; their texts are of objects and ids."""
_TEXT = ("*.json", "*.jinja", "*.txt", "tokenizer.model")
"""What is fetched beside the weights; no code."""


def fetch_model(name: str) -> Path:
    """The folder of a model of the Hub, fetched if it is not in huggingface_hub's cache yet.

    Weights are safetensors where there are any, else PyTorch's. Raises CheckpointError if it cannot be had.
    """
    hub = _hub()
    try:
        found = hub.HfApi().model_info(name)
        files = [entry.rfilename for entry in found.siblings or ()]
        weights = "*.safetensors" if any(file.endswith(".safetensors") for file in files) else "*.bin"
        return Path(hub.snapshot_download(name, revision=found.sha, allow_patterns=[*_TEXT, weights]))
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        folder = name.rpartition("/")[2]
        raise CheckpointError(
            f"{name}: no such folder here, and the Hub does not give it: {_first_line(error)}. Check the "
            "name; a model behind a licence wants `hf auth login`; without a network, where there is one: "
            f"hf download {name} --local-dir {folder}; then give {folder}"
        ) from None


def push_model(folder: Path, name: str) -> str:
    """Put a folder on the Hub as the private model ORG/NAME, made if it is not there; return its address.

    Raises CheckpointError if the Hub refuses it.
    """
    hub = _hub()
    try:
        api = hub.HfApi()
        address = api.create_repo(name, private=True, exist_ok=True)
        api.upload_folder(repo_id=name, folder_path=str(folder), commit_message="Export by yuan_train")
    except (OSError, ValueError, hub.errors.HfHubHTTPError) as error:
        raise CheckpointError(
            f"--push: {name}: {_first_line(error)}. {folder} is written; log in with `hf auth login`, then "
            f"hf upload {name} {folder}"
        ) from None
    return str(address)


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise CheckpointError("names of the Hub need the package huggingface_hub: pip install it") from None
    return huggingface_hub


def _first_line(error: Exception) -> str:
    if _NO_CONNECTION & {kind.__name__ for kind in type(error).__mro__}:
        return f"{_hub().constants.ENDPOINT} is not reached from here ({type(error).__name__})"
    return str(error).strip().partition("\n")[0].rstrip(". ") or type(error).__name__
