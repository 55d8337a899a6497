"""The files that come with the package: models, clusters, runs, first files and schemas, by name."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path

from yuan_train.config.errors import ConfigError

_INSTALLED = Path(__file__).parents[1] / "configs"
CONFIGS = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parents[2] / "configs"
"""The folder `configs` of a checkout, or of an installed package."""


def names(kind: str) -> dict[str, Path]:
    """The files of `configs/KIND`, by name in lower case."""
    return {path.stem.lower(): path for path in sorted((CONFIGS / kind).glob("*.yaml"))}


def locate_cluster(name: str | Path) -> Path:
    """The cluster file that a path or a name of `configs/cluster` means.

    Raises ConfigError if there is neither, with the nearest name.
    """
    path = Path(name)
    if path.exists() or path.suffix:
        return path
    known = names("cluster")
    if found := known.get(str(name).lower()):
        return found
    raise ConfigError(f"{name}: no such file; {_wanted(str(name), list(known))}")


def _wanted(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name.lower(), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    return f"{hint}wanted a cluster file, or a name of configs/cluster (has: {', '.join(known)})"
