"""Exports a checkpoint to its architecture's published Hugging Face format.

Streamed: one of our tensors is in memory at a time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from yuan_train.checkpoint.hf_files import DTYPES, find_tokenizer_file
from yuan_train.checkpoint.load import Checkpoint, WholeTensorReader
from yuan_train.checkpoint.save import copy_tokenizer
from yuan_train.checkpoint.stream import LazyTensor, split_into_shards, write_safetensors
from yuan_train.config.errors import CheckpointError
from yuan_train.models.published import EMBEDDING, HEAD, PublishedFormat, TensorMapping, format_of

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
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: already exists; give another --out")
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
    tensors = dict(_published(checkpoint, common, {} if dtype else hf.get("dtypes", {}), head))
    config = published.published_config(
        checkpoint.model, dtype=common, original=hf.get("config"), resets=data, token_ids=token_ids
    )
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        _write_weights(temporary, tensors, shard_bytes)
        _write_configs(temporary, config)
        _write_code(temporary, published, tokenizer or _tokenizer_of(checkpoint))
        if out.exists():
            out.rmdir()
        files = tuple(sorted(path.name for path in temporary.iterdir()))
        temporary.rename(out)
    except OSError as error:
        raise CheckpointError(f"{out}: cannot be written: {error}; give another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    parameters = replace(checkpoint.model, lora=None).parameters
    return Exported(str(out), parameters, len(tensors), common, files)


def _published(
    checkpoint: Checkpoint, common: str, dtypes: Mapping[str, str], head: bool
) -> Iterator[tuple[str, LazyTensor]]:
    """Yield the published tensors in order; parts of the same tensor of ours follow each other."""
    reader = WholeTensorReader(checkpoint)
    model = checkpoint.model

    def dtype_of(name: str) -> torch.dtype:
        return DTYPES[dtypes.get(name, common)]

    for mapping in format_of(model.architecture).published_layout(model):
        for number, part in enumerate(mapping.parts):
            yield part, _part(reader, mapping, number, dtype_of(part))
        if mapping.parts == (EMBEDDING,) and head and model.tie_embeddings:
            # A copy: published checkpoints have both, and a safetensors file has no shared storage.
            yield HEAD, _part(reader, mapping, 0, dtype_of(HEAD))
    yield from reader.buffers()


def _part(reader: WholeTensorReader, mapping: TensorMapping, number: int, dtype: torch.dtype) -> LazyTensor:
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


def _tokenizer_of(checkpoint: Checkpoint) -> Path | None:
    return find_tokenizer_file(checkpoint.tokenizer) if checkpoint.tokenizer is not None else None
