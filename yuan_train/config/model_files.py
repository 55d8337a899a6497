"""A model by what names it: a model file, a name of `configs/model`, a Hugging Face folder or its
`config.json`, or a checkpoint. Run files and `--model` of all commands are read here.
"""

from __future__ import annotations

import contextlib
import difflib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from yuan_train.config.architecture import find_format
from yuan_train.config.catalogue import names
from yuan_train.config.document import Document, graft, is_mapping, override, read_document
from yuan_train.config.dump import as_plain
from yuan_train.config.errors import ConfigError, YuanError

STATE = "state.json"
"""Of a step's checkpoint: what it holds beside the tensors, the model too."""
WANTED = "a model file, a name of configs/model, a Hugging Face folder or its config.json, or a checkpoint"

_PUBLISHED_KEYS = ("model_type", "num_hidden_layers", "architectures")
"""Of a `config.json`; no model file of ours has them."""
_OTHER_KINDS = {
    "nodes": "a cluster file",
    "pipelines": "a plan",
    "roles": "an RL plan",
    "entries": "a profile",
    "train": "a run file",
    "weight_map": "an index of weights",
    "tokenizer_class": "a tokenizer's config",
    "base_model_name_or_path": "a config of adapters; wanted the model that they belong to",
}
"""By a key that no model has: what the file is."""
_HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
"""ORG/NAME, as models are called on the Hugging Face Hub."""


def locate_model(name: str | Path, folders: Sequence[Path] = (Path(),)) -> Path:
    """The file or folder that a name means: in one of `folders`, else of `configs/model`, in any case.

    Raises ConfigError if there is none, with what to do.
    """
    for folder in folders:
        if (folder / name).exists():
            return folder / name
    known = names("model")
    plain = str(name).lower()
    if plain in known:
        return known[plain]
    first = folders[0] / name
    if re.search(r"\.(ya?ml|json)$", plain):
        raise ConfigError(f"{first}: no such file")
    if advice := hub_advice(name):
        raise ConfigError(f"{first}: no such folder; {advice}")
    close = difflib.get_close_matches(plain, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    raise ConfigError(f"{first}: no such file or folder{hint}; wanted {WANTED}")


def hub_advice(name: str | Path) -> str:
    """How to get a model of the Hub, for a path that is not there but reads like its name; else nothing."""
    if not _HUB_NAME.fullmatch(str(name)):
        return ""
    folder = str(name).rpartition("/")[2]
    return f"a model of the Hub is fetched by: hf download {name} --local-dir {folder}; then give {folder}"


def read_model_document(path: str | Path) -> Document:
    """The model in a file or folder, by our keys. Raises ConfigError for what holds none."""
    path = Path(path)
    if path.is_dir():
        if (path / "config.json").is_file():
            return _published(read_document(path / "config.json"))
        if (found := _checkpoint_model(path)) is not None:
            return found
        raise ConfigError(
            f"{path}: a folder with neither a config.json (Hugging Face) nor a checkpoint; wanted {WANTED}"
        )
    document = read_document(path)
    value = document.value
    if is_published(document):
        return _published(document)
    if is_mapping(value) and is_mapping(value.get("run")) and (found := _model_of_state(path)) is not None:
        return found
    if is_mapping(value) and "num_layers" not in value:
        if kinds := [kind for key, kind in _OTHER_KINDS.items() if key in value]:
            raise ConfigError(f"{path}: {kinds[0]}; wanted {WANTED}")
    return document


def is_published(document: Document) -> bool:
    """Whether it is a `config.json` of Hugging Face's."""
    return is_mapping(document.value) and any(key in document.value for key in _PUBLISHED_KEYS)


def published_name(path: Path) -> str:
    """What the model of a `config.json` is called: as its folder."""
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def model_of_checkpoint(path: str | Path) -> Document:
    """The model of a checkpoint, or of the newest one of a directory of them. Raises ConfigError."""
    found = _checkpoint_model(Path(path))
    if found is None:
        what = "there is no checkpoint here" if Path(path).is_dir() else "no such directory"
        raise ConfigError(
            f"{path}: {what}, so its model is not known; name a checkpoint, or the model (model:)"
        )
    return found


def _checkpoint_model(path: Path) -> Document | None:
    """None if no checkpoint is there. The names are those of `checkpoint/names.py`, a floor above."""
    steps = [path] if (path / STATE).is_file() else _newest_first(path)
    return next((found for step in steps if (found := _model_of_state(step / STATE)) is not None), None)


def _newest_first(path: Path) -> list[Path]:
    steps = [step for step in path.glob("step-*") if step.name[5:].isdecimal()]
    return sorted(steps, key=lambda step: int(step.name[5:]), reverse=True)


def _model_of_state(path: Path) -> Document | None:
    """The model in a checkpoint's state; None if it is torn or not there."""
    try:
        model: Any = json.loads(path.read_text(encoding="utf-8"))["run"]["model"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Document(str(path), model, {(): str(path)}) if is_mapping(model) else None


def _published(document: Document) -> Document:
    """The model that a `config.json` describes. Raises ConfigError if it is of no known kind, or torn."""
    path, config = Path(document.name), document.value
    if not is_mapping(config):
        raise ConfigError(f"{path}: wanted keys and values, got {type(config).__name__}")
    try:
        published = find_format(config, where=str(path))
        model = published.model_from_config(config, name=published_name(path), where=str(path))
    except YuanError as error:
        raise ConfigError(str(error)) from None
    return Document(str(path), as_plain(model), {(): str(path)})


def is_rl_document(document: Document) -> bool:
    """Whether a run file is one of reinforcement learning: it has the key `algorithm`."""
    return is_mapping(document.value) and "algorithm" in document.value


def with_overrides(document: Document, overrides: Sequence[str]) -> Document:
    """The document with its overrides and its model.

    Overrides of the model's own keys come last, when it is known whose keys they are. Raises ConfigError.
    """
    of_model = [assignment for assignment in overrides if assignment.startswith("model.")]
    for assignment in overrides:
        if assignment not in of_model:
            document = override(document, assignment)
    document = _with_model(document)
    for assignment in of_model:
        document = override(document, assignment)
    return document


def _with_model(document: Document) -> Document:
    """Replace the name of the model by the model; without one, take that of the checkpoint to start from.

    A path is relative to the run file, or else to the working directory, as data and checkpoints are; on the
    command line to that alone.
    """
    if not is_mapping(document.value):
        return document
    name, start = document.value.get("model"), document.value.get("start")
    keys: tuple[str, ...] = ("model",)
    if name is None and is_mapping(start) and isinstance(start.get("checkpoint"), str):
        keys, name = ("start", "checkpoint"), start["checkpoint"]
    if not isinstance(name, str):
        return document
    where = document.source(keys)
    folders = [Path()] if where.startswith("command line") else [Path(document.name).parent, Path()]
    try:
        if keys == ("model",):
            model = read_model_document(locate_model(name, folders))
        else:
            model = _model_to_start_from(document, name)
    except ConfigError as error:
        raise ConfigError(f"{where}: {'.'.join(keys)}: {error}") from None
    return graft(document, ("model",), model)


def _model_to_start_from(document: Document, checkpoint: str) -> Document:
    """The model of a checkpoint; if that is gone, of the run's own checkpoints, with which it goes on."""
    try:
        return model_of_checkpoint(checkpoint)
    except ConfigError:
        own = document.value.get("checkpoint")
        directory = own.get("directory") if is_mapping(own) else None
        if not isinstance(directory, str):
            raise
        with contextlib.suppress(ConfigError):
            return model_of_checkpoint(directory)
        raise
