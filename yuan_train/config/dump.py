"""Frozen values converted to plain values and to YAML; files written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from yuan_train.config.document import is_list, is_mapping, parse_scalar
from yuan_train.config.errors import ConfigError
from yuan_train.config.fields import field_hints, key_of
from yuan_train.config.units import Unit, format_quantity


def as_plain(value: Any, hint: Any = None) -> Any:
    """A frozen value as dictionaries, lists and quantities with units; fields that are None are left out."""
    unit = next((item for item in get_args(hint) if isinstance(item, Unit)), None)
    if unit is None:
        unit = next((i for a in get_args(hint) for i in get_args(a) if isinstance(i, Unit)), None)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {k: as_plain(getattr(value, k), h) for k, h in field_hints(type(value)).items()}
        return {key_of(k): item for k, item in plain.items() if item is not None}
    if is_mapping(value):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple) or is_list(value):
        items = cast("Iterable[Any]", value)
        return [as_plain(item) for item in items]
    if unit is not None and value is not None:
        return format_quantity(cast("float", value), unit.kind)
    return value


class _Dumper(yaml.SafeDumper):
    """Writes what `parse_document` reads back: strings that look like other scalars get quotes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(parse_scalar(text), str) else "'"
    if not text.isprintable():
        style = '"'  # PyYAML keeps every line break only in double quotes
    return dumper.represent_scalar(  # pyright: ignore[reportUnknownMemberType]  PyYAML has no types here
        "tag:yaml.org,2002:str", text, style=style
    )


_Dumper.add_representer(str, _represent_text)


def dump(value: Any) -> str:
    """A frozen value (or plain values) as YAML that `parse_document` reads back unchanged."""
    plain = as_plain(value)
    return yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=160
    )


def write_text(path: str | Path, text: str) -> None:
    """Write a file under a temporary name and rename it when complete. Raises ConfigError if it fails."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error}") from None
