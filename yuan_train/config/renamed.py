"""Earlier names of keys, accepted for one more release with a warning.

A dataclass lists its renamed keys in a class variable `RENAMED`: earlier key -> `Renamed`.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Union, get_args, get_origin

from yuan_train.config.document import Document, Keys, format_keys, is_list, is_mapping
from yuan_train.config.fields import dataclasses_in, field_hints

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Renamed:
    """The current name of a key, and the current names of those of its values that were renamed."""

    key: str
    values: Mapping[str, str] = field(default_factory=dict[str, str])


def accept_earlier_keys(document: Document, kind: Any) -> Document:
    """Return the document with the earlier keys of `kind` replaced, after a warning for each.

    Where a section has both names, the earlier one stays and is later refused as unknown.
    """
    earlier = list(_earlier_keys(document.value, kind, ()))
    if not earlier:
        return document
    value, sources = document.value, dict(document.sources)
    for keys, renamed in earlier:
        current = (*keys[:-1], renamed.key)
        logger.warning(
            "%s: %s is now called %r; the earlier name is accepted until the next release",
            document.source(keys),
            format_keys(keys),
            renamed.key,
        )
        value = _rename(value, keys, renamed)
        if keys in sources:
            sources[current] = sources.pop(keys)
    return Document(document.name, value, sources)


def _earlier_keys(value: Any, kind: Any, keys: Keys) -> Iterator[tuple[Keys, Renamed]]:
    """Every path in `value` that ends in an earlier key."""
    if not _has_earlier_keys(kind):
        return
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        if is_mapping(value):
            earlier: Mapping[str, Renamed] = getattr(kind, "RENAMED", {})
            for key, renamed in earlier.items():
                if key in value and renamed.key not in value:
                    yield (*keys, key), renamed
            for name, hint in field_hints(kind).items():
                if name in value:
                    yield from _earlier_keys(value[name], hint, (*keys, name))
        return
    arguments = [argument for argument in get_args(kind) if argument is not type(None)]
    if get_origin(kind) in (Union, types.UnionType, Annotated):
        yield from _earlier_keys(value, arguments[0], keys)
    elif get_origin(kind) is dict and is_mapping(value):
        for key, item in value.items():
            yield from _earlier_keys(item, arguments[1], (*keys, key))
    elif get_origin(kind) is tuple and is_list(value):
        for i, item in enumerate(value):
            yield from _earlier_keys(item, arguments[0], (*keys, i))


@functools.cache
def _has_earlier_keys(kind: Any) -> bool:
    """Whether a kind or one inside it has earlier keys: the entries of thousands of ranks have none."""
    return any(hasattr(dataclass_type, "RENAMED") for dataclass_type in dataclasses_in(kind))


def _rename(value: Any, keys: Keys, renamed: Renamed) -> Any:
    """A copy of `value` in which the key at the end of `keys`, and its value, have their current names."""
    key, rest = keys[0], keys[1:]
    if is_list(value):
        return [_rename(item, rest, renamed) if i == key else item for i, item in enumerate(value)]
    if rest:
        return {name: _rename(item, rest, renamed) if name == key else item for name, item in value.items()}
    return {
        renamed.key if name == key else name: renamed.values.get(item, item)
        if name == key and isinstance(item, str)
        else item
        for name, item in value.items()
    }
