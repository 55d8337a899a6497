"""Frozen values converted to plain values and to YAML; files written atomically."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast, get_args

import yaml

from yuan_train.config.document import is_list, is_mapping, parse_scalar
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import field_hints, key_of
from yuan_train.config.units import Unit, format_quantity


def as_plain(value: Any, hint: Any = None) -> Any:
    """A frozen value as dictionaries, lists and quantities with units; fields that are None are left out."""
    return _plain(value, _unit_of(hint))


def _plain(value: Any, unit: Unit | None) -> Any:
    if value is None or type(value) in _SCALARS:
        return value if unit is None or value is None else format_quantity(cast("float", value), unit.kind)
    if isinstance(value, tuple) or is_list(value):
        items = cast("Iterable[Any]", value)
        return [item if type(item) in _SCALARS else _plain(item, None) for item in items]
    if is_mapping(value):
        return {str(key): _plain(item, None) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = ((key, getattr(value, name), unit) for name, key, unit in _fields_of(type(value)))
        return {key: _plain(item, unit) for key, item, unit in fields if item is not None}
    return value if unit is None else format_quantity(cast("float", value), unit.kind)


_SCALARS = (str, int, float, bool)
WIDTH = 160
"""Columns from which on YAML is continued on another line."""


@functools.cache
def _fields_of(kind: type) -> tuple[tuple[str, str, Unit | None], ...]:
    """Name, key and unit of each field: found once, for a plan has thousands of values of a kind."""
    return tuple((name, key_of(name), _unit_of(hint)) for name, hint in field_hints(kind).items())


def _unit_of(hint: Any) -> Unit | None:
    inside = (*get_args(hint), *(item for argument in get_args(hint) for item in get_args(argument)))
    return next((item for item in inside if isinstance(item, Unit)), None)


# Writes what `parse_document` reads back: strings that look like other scalars get quotes. In C where PyYAML
# has it: the same bytes in a third of the time, which counts for a plan of thousands of ranks.
_Dumper: Any = type("_Dumper", (getattr(yaml, "CSafeDumper", yaml.SafeDumper),), {})


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
    return dump_plain(as_plain(value))


def dump_plain(plain: Any) -> str:
    """Plain values as PyYAML writes them."""
    return yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=WIDTH
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
