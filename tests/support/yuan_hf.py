"""The small Hugging Face checkpoint `yuan_hf_tiny_a`, and modified copies of it."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

GOLDEN = Path(__file__).parents[1] / "golden" / "yuan_hf_tiny_a"

Tensors = dict[str, torch.Tensor]


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def copy_of(
    folder: Path,
    *,
    change: Callable[[Tensors], Any] | None = None,
    config: dict[str, Any] | None = None,
    shards: int = 1,
    pickled: bool = False,
) -> Path:
    """Write a copy of tiny_a to `folder`, and return the folder.

    `change` edits the tensors in place, `config` overrides keys of config.json, `shards` is the number of
    weight files, and `pickled` writes .bin instead of .safetensors.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = load_file(GOLDEN / "model.safetensors")
    if change is not None:
        change(tensors)
    shutil.copyfile(GOLDEN / "config.json", folder / "config.json")
    values = json.loads((GOLDEN / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(values))
    stem, suffix = ("pytorch_model", "bin") if pickled else ("model", "safetensors")
    write = (lambda part, path: torch.save(part, path)) if pickled else save_file
    if shards == 1:
        write(tensors, folder / f"{stem}.{suffix}")
        return folder
    weight_map = {}
    names = sorted(tensors)
    for number in range(shards):
        part = {name: tensors[name] for name in names[number::shards]}
        file = f"{stem}-{number + 1:05d}-of-{shards:05d}.{suffix}"
        write(part, folder / file)
        weight_map |= dict.fromkeys(part, file)
    (folder / f"{stem}.{suffix}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def read_published(folder: Path) -> Tensors:
    """All tensors of the safetensors files in a folder, by name."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("model*.safetensors")):
        tensors |= load_file(path)
    return tensors


def same_bits(a: Tensors, b: Tensors) -> bool:
    """Whether names, dtypes, shapes and bytes are equal."""
    return a.keys() == b.keys() and all(
        a[name].dtype == b[name].dtype
        and a[name].shape == b[name].shape
        and torch.equal(*(one[name].contiguous().flatten().view(torch.uint8) for one in (a, b)))
        for name in a
    )
