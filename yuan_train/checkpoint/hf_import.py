"""Imports a model in its published Hugging Face format into a checkpoint, every tensor by name.

Streamed: one tensor is in memory at a time. Nothing is ignored silently. No code in the folder is run:
safetensors hold none, PyTorch's `.bin` files are read by torch's restricted unpickler, and Python files are
not read.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from yuan_train.checkpoint.hf_files import DTYPES, find_tokenizer_file, open_tensors, read_json_object
from yuan_train.checkpoint.names import BUFFERS, WEIGHTS
from yuan_train.checkpoint.stream import LazyTensor, save_streamed
from yuan_train.config.document import Document
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.load import build
from yuan_train.config.model import ModelConfig, hub_advice, validate_model
from yuan_train.models.published import EMBEDDING, HEAD, TensorMapping, format_for, format_of, rotary_buffer

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
    stored = open_tensors(folder)
    layout = _check_names(folder, model, stored)
    notes = [] if model.router != "attention" or rope_base is not None else _rotary_notes(config, model)
    tensors = {f"{WEIGHTS}.{mapping.name}": _assemble(mapping, stored) for mapping in layout}
    tensors |= _buffers(model, stored, notes)
    if model.tie_embeddings:
        _check_tied(stored, notes)
    dtypes = {name: _dtype_name(t.dtype) for name, t in stored.items() if not name.endswith(".inv_freq")}
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
    config = read_json_object(folder / "config.json")
    return config


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


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
