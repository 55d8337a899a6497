"""What run files of all kinds have in common: a model by path, and the key that tells their kind."""

from __future__ import annotations

from pathlib import Path

from yuan_train.config.document import Document, graft, is_mapping, read_document
from yuan_train.config.errors import ConfigError


def is_rl_document(document: Document) -> bool:
    """Whether a run file is one of reinforcement learning: it has the key `algorithm`."""
    return is_mapping(document.value) and "algorithm" in document.value


def with_model(document: Document) -> Document:
    """Replace the path of the model by the model.

    The path is relative to the run file, or on the command line to the working directory.
    """
    name = document.value.get("model") if is_mapping(document.value) else None
    if not isinstance(name, str):
        return document
    where = document.source(("model",))
    folder = Path() if where.startswith("command line") else Path(document.name).parent
    try:
        model = read_document(folder / name)
    except ConfigError as error:
        raise ConfigError(f"{where}: model: {error}") from None
    return graft(document, ("model",), model)
