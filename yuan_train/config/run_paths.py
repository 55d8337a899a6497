"""The files that a run file names, which every machine of a run must have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from yuan_train.config.document import CONFIGS, Document, Keys, is_list, is_mapping, override, read_document
from yuan_train.config.model import STATE, locate_model

OUTPUTS = (
    ("checkpoint",),
    ("log",),
    ("memory",),
)
"""Sections whose paths the run writes; `checkpoint.resume` names one that it reads."""
ANYWHERE = ("prefix", "file", "pairs", "tokenizer", "evaluation")
"""Keys of paths that must be there on the machines, though perhaps not on this one."""
SUFFIXES = (".bin", ".idx", ".answers.bin", ".answers.idx")
"""Of the token files of one prefix; the last two only of chats."""


def files_of_run(path: str, overrides: Sequence[str], *, data: bool = True) -> list[str]:
    """The run file and the files and folders that it names, as it names them; none that the package brings.

    A key's string counts if it is a file here, or if such a key always names one; without `data` only what
    tells the model. Raises ConfigError.
    """
    document = read_document(path)
    for assignment in overrides:
        if not assignment.startswith("model."):
            document = override(document, assignment)
    found = [path, *_model(document), *(_paths(document.value, ()) if data else ())]
    return list(dict.fromkeys(found))


def _model(document: Document) -> Iterator[str]:
    """The file of the model, by its name or by that of the checkpoint to start from."""
    run = document.value if is_mapping(document.value) else {}
    name, start = run.get("model"), run.get("start")
    if isinstance(name, str):
        on_line = document.source(("model",)).startswith("command line")
        yield from files_of_model(name, [Path()] if on_line else [Path(document.name).parent, Path()])
    elif name is None and is_mapping(start) and isinstance(start.get("checkpoint"), str):
        yield from files_of_model(start["checkpoint"], [Path()])


def files_of_model(name: str, folders: Sequence[Path] = (Path(),)) -> Iterator[str]:
    """What tells a model that is named: of a folder of Hugging Face's its config, of a checkpoint its state.

    Nothing for a model that the package brings. Raises ConfigError if there is none.
    """
    found = locate_model(name, folders)
    if found.is_dir() and (found / "config.json").is_file():
        yield str(found / "config.json")
    elif found.is_dir():
        yield from (str(step) if step.name == "latest" else str(step / STATE) for step in _newest(found))
    elif not is_ours(found):
        yield str(found)


def is_ours(path: Path) -> bool:
    """Whether a file comes with the package, so that every machine has it."""
    return path.resolve().is_relative_to(CONFIGS.resolve())


def _paths(value: Any, keys: Keys) -> Iterator[str]:
    if is_mapping(value):
        for key, item in value.items():
            if keys or key != "model":
                yield from _paths(item, (*keys, key))
    elif is_list(value):
        for item in value:
            yield from _paths(item, keys)
    elif isinstance(value, str) and value:
        yield from _named(value, keys)


def _named(text: str, keys: Keys) -> Iterator[str]:
    key = keys[-1] if keys else ""
    if key == "prefix":
        plain = text.removesuffix(".bin").removesuffix(".idx")
        yield from (f"{plain}{suffix}" for suffix in SUFFIXES[:2])
        yield from (f"{plain}{suffix}" for suffix in SUFFIXES[2:] if Path(f"{plain}{suffix}").is_file())
    elif key in ("checkpoint", "resume") and text not in ("auto", "never"):
        yield from map(str, _newest(Path(text)))
    elif keys[:1] in OUTPUTS:
        return
    elif ".py:" in text:
        yield text.rpartition(":")[0]
    elif key in ANYWHERE or ("/" in text or "." in text) and Path(text).is_file():
        yield text


def _newest(path: Path) -> Iterator[Path]:
    """The folder of a checkpoint; of a folder of several that of the newest, and what says so."""
    latest = path / "latest"
    if (path / STATE).is_file() or not latest.is_file():
        yield path
        return
    yield latest
    yield path / latest.read_text(encoding="utf-8").strip()
