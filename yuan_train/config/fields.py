"""Fields of the configuration dataclasses, and the keys of files that they are read from."""

from __future__ import annotations

import dataclasses
import functools
import keyword
import types
import typing
from collections.abc import Iterator
from typing import Any, Union, get_args, get_origin, get_type_hints

from yuan_train.config.document import Keys


def key_of(name: str) -> str:
    """The key in the file of the field `name`: `from` for `from_`."""
    return name[:-1] if name.endswith("_") and is_keyword(name) else name


@functools.cache
def is_keyword(name: str) -> bool:
    """Whether a name, without underscores at its end, is a Python keyword."""
    return keyword.iskeyword(name.rstrip("_"))


@functools.cache
def field_hints(kind: Any) -> dict[str, Any]:
    """Type hints of a dataclass's init fields, with `Annotated` metadata, by name."""
    found = get_type_hints(kind, include_extras=True)
    return {field.name: found[field.name] for field in dataclasses.fields(kind) if field.init}


def dataclasses_in(kind: Any) -> Iterator[Any]:
    """Every dataclass that a type consists of, itself first."""
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        for hint in field_hints(kind).values():
            yield from dataclasses_in(hint)
    for argument in get_args(kind):
        yield from dataclasses_in(argument)


def field_names(kind: Any, keys: Keys) -> list[str]:
    """Names of the fields of the dataclass at path `keys` inside the type `kind`; empty if there is none."""
    if not keys:
        found = next((item for item in dataclasses_in(kind)), None)
        return list(field_hints(found)) if found else []
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return field_names(field_hints(kind).get(str(keys[0]), Any), keys[1:])
    arguments = [a for a in get_args(kind) if a is not type(None)]
    if get_origin(kind) is typing.Annotated:
        return field_names(arguments[0], keys)
    if get_origin(kind) in (Union, types.UnionType):
        # Of a number or a list, the list has keys.
        return max([field_names(own, keys) for own in arguments], key=len)
    if not arguments:
        return []
    return field_names(arguments[-1] if get_origin(kind) is dict else arguments[0], keys[1:])
