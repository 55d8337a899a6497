"""What run files of all kinds have in common: their model, and the key that tells their kind."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from yuan_train.config.document import Document, graft, is_mapping, override
from yuan_train.config.errors import ConfigError
from yuan_train.config.model_files import locate_model, model_of_checkpoint, read_model_document


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
