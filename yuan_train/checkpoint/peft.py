"""Adapters in PEFT's format (adapter_config.json, adapter_model.safetensors), in and out.

Published matrices have adapters of their own; one of ours that is several of them row by row has one. Out:
each part gets the common A and its rows of B. In: parts with the same A are one adapter; of unlike ones, as
PEFT trains them, the A stand below each other and the B on a diagonal: the same sum, at more rank.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from yuan_train.checkpoint.hf import (
    DTYPES,
    Exported,
    Imported,
    check_is_free,
    find_tokenizer_file,
    is_finite,
    new_folder,
    open_safetensors,
    read_json_object,
    weights_state,
)
from yuan_train.checkpoint.load import WEIGHTS, Checkpoint, LazyTensor, WholeTensorReader
from yuan_train.checkpoint.save import save_streamed, write_safetensors
from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import LoraConfig, ModelConfig, adapted
from yuan_train.models.decoder import TensorMapping, format_of

CONFIG, WEIGHTS_FILE = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_REFUSED: dict[str, tuple[object, ...]] = {
    "use_dora": (None, False),
    "bias": (None, "none"),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "fan_in_fan_out": (None, False),
    "lora_bias": (None, False),
    "trainable_token_indices": (None,),
    # Others (pissa, olora, corda, loftq, lora_ga) take what they begin with out of the base's weights.
    "init_lora_weights": (None, True, False, "gaussian", "eva", "orthogonal", "mica"),
    "kasa_config": (None,),
    # Adapters that only some tokens or parts of a matrix have, or that are mixed anew for each token.
    "alora_invocation_tokens": (None,),
    "use_bdlora": (None, False),
    "arrow_config": (None,),
    "monteclora_config": (None,),
}
"""Keys of PEFT's config, and the values that mean nothing beside plain adapters."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds adapters in PEFT's format."""
    return (folder / CONFIG).is_file()


def export_adapter(checkpoint: Checkpoint, out: Path, *, dtype: str | None = None) -> Exported:
    """Write a checkpoint's adapters to the folder `out`; their config names no base model.

    Raises CheckpointError if it has none, or `out` is there or cannot be written.
    """
    model = checkpoint.model
    if model.lora is None:
        raise CheckpointError(
            f"{checkpoint.path}: has no adapters (lora); leave out --adapter for the whole model"
        )
    check_is_free(out)
    common = dtype or "float32"
    reader = WholeTensorReader(checkpoint)
    tensors: dict[str, LazyTensor] = {}
    modules: dict[str, None] = {}
    for mapping in _adapted(model):
        for number, part in enumerate(mapping.parts):
            name = part.removesuffix(".weight")
            modules[name.rpartition(".")[2]] = None
            a, b = _parts_of(reader, mapping, number, model.lora.rank, DTYPES[common])
            tensors |= {f"{_PREFIX}{name}.lora_A.weight": a, f"{_PREFIX}{name}.lora_B.weight": b}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None,
        "r": model.lora.rank,
        "lora_alpha": model.lora.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
        "inference_mode": True,
    }
    with new_folder(out) as temporary:
        write_safetensors(temporary / WEIGHTS_FILE, tensors)
        (temporary / CONFIG).write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    parameters = sum(math.prod(tensor.shape) for tensor in tensors.values())
    return Exported(str(out), parameters, len(tensors), common, (CONFIG, WEIGHTS_FILE))


def import_adapter(folder: Path, base: Checkpoint, out: str | Path) -> Imported:
    """Write a checkpoint of step 0 under `out`: the weights of `base`, and adapters from a folder of PEFT's.

    Raises CheckpointError for another kind of adapters, for tensors that are missing, unknown or of another
    shape, and for values that are not finite.
    """
    config = read_json_object(folder / CONFIG)
    rank, scale = _read_config(folder, config)
    if base.model.lora is not None:
        raise CheckpointError(f"{base.path}: has adapters already; wanted the checkpoint of their base")
    stored = open_safetensors(folder / WEIGHTS_FILE)
    adapters = _read_adapters(folder, base.model, stored, rank)
    widest = max(a.shape[0] for a, _ in adapters.values())
    targets = tuple(dict.fromkeys(name.rpartition(".")[2] for name in adapters))
    model = replace(base.model, lora=LoraConfig(rank=widest, alpha=scale * widest, targets=targets))
    reader = WholeTensorReader(base)
    tensors = dict(reader.stored())
    for mapping in _adapted(model):
        name = mapping.name.removesuffix(".weight")
        a, b = adapters.get(name, (torch.zeros(0, mapping.shape[1]), torch.zeros(mapping.shape[0], 0)))
        # Zeros where a layer has no adapter, or one of a smaller rank.
        a = torch.cat([a, a.new_zeros(widest - len(a), a.shape[1])])
        b = torch.cat([b, b.new_zeros(b.shape[0], widest - b.shape[1])], dim=1)
        for kind, tensor in (("lora_a", a), ("lora_b", b)):
            tensors[f"{WEIGHTS}.{name}.{kind}"] = _held(tensor.float())
    run = base.state["run"]
    state = weights_state(model, run.get("data")) | {
        key: base.state[key] for key in ("hf",) if key in base.state
    }
    tokenizer = find_tokenizer_file(base.tokenizer) if base.tokenizer is not None else None
    path = save_streamed(out, tensors=tensors, state=state, tokenizer=tokenizer)
    return Imported(str(path), model.parameters, len(stored), "float32", ())


def _read_config(folder: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    """Rank and scale. Raises CheckpointError for what is not plain LoRA."""
    where = folder / CONFIG
    if config.get("peft_type") != "LORA":
        raise CheckpointError(f"{where}: peft_type {config.get('peft_type')!r}; wanted LORA")
    for key, allowed in _REFUSED.items():
        if config.get(key) not in allowed:
            raise CheckpointError(
                f"{where}: {key}: {config[key]!r} is not read; wanted plain LoRA (merge it there)"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float) or not alpha > 0:
        raise CheckpointError(f"{where}: r {rank!r} and lora_alpha {alpha!r}; wanted numbers above 0")
    return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


def _adapted(model: ModelConfig) -> Iterator[TensorMapping]:
    """The matrices that have adapters."""
    words = adapted(model)
    for mapping in format_of(model.architecture).published_layout(model):
        layer, _, inner = mapping.name.partition("layers.")[2].partition(".")
        if layer.isdecimal() and inner.removesuffix(".weight") in words and inner.endswith(".weight"):
            yield mapping


def _parts_of(
    reader: WholeTensorReader, mapping: TensorMapping, number: int, rank: int, dtype: torch.dtype
) -> tuple[LazyTensor, LazyTensor]:
    """A and B of a published part: the common A, and the part's rows of B."""
    name, (rows, columns) = mapping.name.removesuffix(".weight"), mapping.shape
    own = rows // len(mapping.parts)

    def read_b() -> torch.Tensor:
        return reader.read(f"{name}.lora_b", (rows, rank)).chunk(len(mapping.parts))[number].to(dtype)

    return (
        LazyTensor((rank, columns), dtype, lambda: reader.read(f"{name}.lora_a", (rank, columns)).to(dtype)),
        LazyTensor((own, rank), dtype, read_b),
    )


def _read_adapters(
    folder: Path, model: ModelConfig, stored: dict[str, LazyTensor], rank: int
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Our adapters by our names: A [r, in] and B [out, r]. Raises CheckpointError."""
    found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    unknown = set(stored)
    for mapping in _adapted(replace(model, lora=LoraConfig(rank=rank))):
        shape = (mapping.shape[0] // len(mapping.parts), mapping.shape[1])
        pairs: list[tuple[torch.Tensor, torch.Tensor] | None] = []
        for part in mapping.parts:
            keys = [f"{_PREFIX}{part.removesuffix('.weight')}.lora_{letter}.weight" for letter in "AB"]
            if not unknown.intersection(keys):
                pairs.append(None)
                continue
            a, b = (_read(folder, stored, key) for key in keys)
            unknown.difference_update(keys)
            if a.shape != (rank, shape[1]) or b.shape != (shape[0], rank):
                raise CheckpointError(
                    f"{folder / WEIGHTS_FILE}: {keys[0]} and its B have shapes {list(a.shape)} and "
                    f"{list(b.shape)}; wanted {[rank, shape[1]]} and {[shape[0], rank]}, of this base and r"
                )
            pairs.append((a, b))
        if any(pair is not None for pair in pairs):
            found[mapping.name.removesuffix(".weight")] = _join(pairs, shape, rank)
    if unknown or not found:
        named = sorted(unknown)[0] if unknown else "no adapter of a matrix"
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: {named}: fits no matrix of the layers of {model.name}"
        )
    return found


def _join(
    pairs: list[tuple[torch.Tensor, torch.Tensor] | None], shape: tuple[int, int], rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """One adapter of several parts; None is a part without one. `shape` is that of a part."""
    given = [pair for pair in pairs if pair is not None]
    if all(torch.equal(pair[0], given[0][0]) for pair in given):
        rows = [pair[1] if pair else given[0][1].new_zeros(shape[0], rank) for pair in pairs]
        return given[0][0], torch.cat(rows)
    zeros = (given[0][0].new_zeros(0, shape[1]), given[0][1].new_zeros(shape[0], 0))
    return (
        torch.cat([(pair or zeros)[0] for pair in pairs]),
        torch.block_diag(*[(pair or zeros)[1] for pair in pairs]),
    )


def _read(folder: Path, stored: Mapping[str, LazyTensor], key: str) -> torch.Tensor:
    if key not in stored:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: {key} is missing; wanted A and B of each matrix")
    tensor = stored[key].read().float()
    if not is_finite(tensor):
        raise CheckpointError(
            f"{folder / WEIGHTS_FILE}: {key} holds values that are not finite (NaN or infinite)"
        )
    return tensor


def _held(tensor: torch.Tensor) -> LazyTensor:
    return LazyTensor(tuple(tensor.shape), tensor.dtype, lambda: tensor)
