"""Documents to frozen values, with every violation of a file in one pass; and frozen values to YAML.

Files are written atomically.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import keyword
import os
import types
import typing
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

import yaml

from yuan_train.config.document import FILES, Document, Keys, describe, is_list, is_mapping, parse_scalar
from yuan_train.config.errors import ConfigError, Violation, YuanError
from yuan_train.config.units import FACTORS, Kind, Unit, parse_quantity


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


T = typing.TypeVar("T")


def build(
    document: Document,
    kind: type[T],
    *,
    validate: Callable[[T], Iterable[Violation]] = lambda value: (),
    error: type[YuanError] = ConfigError,
) -> T:
    """Turn a document into a `kind`, or raise `error` with every violation, one per line.

    `validate` yields the violated constraints between fields. It also runs on a document whose only faults
    are unknown keys, so that one pass reports both. Earlier names of keys are accepted with a warning.
    """
    if fault := _other_file(document.value, kind):
        raise error(f"{document.name}: {fault}")
    value, violations = _validate(document.value, kind)
    if value is None and violations and all(violation.unknown for violation in violations):
        pruned = document.value
        for violation in violations:
            pruned = _without(pruned, violation.path)
        value, _ = _validate(pruned, kind)
    if value is not None:
        violations = [*violations, *validate(value)]
    if violations:
        raise error("\n".join(describe(document, violation) for violation in violations))
    assert value is not None
    return value


_OTHERS = {
    "lr": "learning_rate",
    "batch_size": "global_batch_size",
    "max_steps": "steps",
    "train_iters": "steps",
    "seq_length": "sequence_length",
    "seq_len": "sequence_length",
    "dtype": "precision",
    "gpus": "devices",
    "warmup": "warmup_steps",
    "r": "rank",
}
"""Names that other tools have for keys of ours."""


def _other_file(value: Any, kind: type[Any]) -> str | None:
    """What a file with the keys of another kind is, and what was wanted; None if it may be of this kind."""
    own, wanted = FILES.get(kind.__name__, ("", ""))
    if not own or not isinstance(value, dict) or own in value:
        return None
    known = field_names(kind, ())
    found = [what for key, what in FILES.values() if key in value and key not in known]
    return f"{found[0].partition(' (')[0]}; wanted {wanted}" if found else None


@dataclass(frozen=True)
class _SchemaViolation(Violation):
    unknown: bool = False


@functools.cache
def adapter(kind: Any) -> Any:
    """The pydantic validator of a dataclass; it refuses unknown keys."""
    from pydantic import TypeAdapter

    for dataclass_type in dataclasses_in(kind):
        if "__pydantic_config__" not in vars(dataclass_type):
            dataclass_type.__pydantic_config__ = {"extra": "forbid"}
    return TypeAdapter(kind)


def _validate(value: Any, kind: type[T]) -> tuple[T | None, list[_SchemaViolation]]:
    """Check in pydantic's strict JSON mode: `"4"` and `true` are not numbers, lists become tuples."""
    from pydantic import ValidationError

    if not isinstance(value, dict):
        return None, [_SchemaViolation((), f"wanted keys and values, got {_show(value)}")]
    try:
        return adapter(kind).validate_json(json.dumps(_keywords_safe(value)), strict=True), []
    except ValidationError as error:
        items = [_in_document(item, value) for item in error.errors(include_url=False)]
        items = [item for item in items if not _of_other_form(item)]
        paths = [tuple(item["loc"]) for item in items]
        return None, [_schema_violation(i, kind) for i in items if not _only_shortened(i, paths)]


def _in_document(item: Any, value: Any) -> Any:
    """pydantic's error with the keys that the document has: where a value may have one of several forms, its
    path also names the form that was tried."""
    keys: list[str | int] = []
    absent = item["type"].startswith("missing")
    for part in item["loc"]:
        if isinstance(part, str) and not (is_mapping(value) and (absent or key_of(part) in value)):
            continue
        keys.append(part)
        if is_mapping(value):
            value = value.get(key_of(str(part)))
        elif is_list(value) and isinstance(part, int) and part < len(value):
            value = value[part]
    return item | {"loc": tuple(keys), "forms": len(keys) < len(item["loc"])}


def _of_other_form(item: Any) -> bool:
    """Whether a list was tried as a number, or a number as a list."""
    as_number = item["type"].startswith("int") and is_list(item["input"])
    return item["forms"] and (as_number or item["type"] == "tuple_type")


def _only_shortened(item: Any, paths: list[Keys]) -> bool:
    """Whether pydantic calls a tuple too short only because some of its items are invalid."""
    keys = tuple(item["loc"])
    return item["type"] == "too_short" and any(p[: len(keys)] == keys and p != keys for p in paths)


def _schema_violation(item: Any, kind: Any) -> _SchemaViolation:
    keys: Keys = tuple(key_of(part) if isinstance(part, str) else part for part in item["loc"])
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = [key_of(name) for name in field_names(kind, tuple(item["loc"])[:-1])]
        close = difflib.get_close_matches(str(keys[-1]), known, n=1, cutoff=0.5)
        meant = _OTHERS.get(str(keys[-1]), "")
        close = [meant] if meant in known else close
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        return _SchemaViolation(
            keys, f"unknown key {keys[-1]!r}{hint} (has: {', '.join(known)})", unknown=True
        )
    if item["type"] in ("missing", "missing_argument"):
        if keys == ("model",):
            return _SchemaViolation(keys, "missing; name a model (or start.checkpoint, whose model it is)")
        held = _held_by(kind, keys)
        return _SchemaViolation(keys, f"missing; wanted what holds {held}" if held else "missing")
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return _SchemaViolation(keys, message)
    if item["type"] == "too_short":
        return _SchemaViolation(keys, "wanted at least one, got none")
    message = message.replace("Input should be", "wanted")
    message = message.replace("a valid integer", "an integer").replace("a valid", "a")
    if item["type"].startswith("dataclass"):
        held = _held_by(kind, keys)
        message = "wanted keys and values" + (f" ({held})" if held else "")
    return _SchemaViolation(keys, f"{message}, got {_show(item['input'])}")


def _held_by(kind: Any, keys: Keys) -> str:
    """The first keys of what is wanted at a path; empty if it has none."""
    known = field_names(kind, keys)
    return ", ".join([*map(key_of, known[:8]), *(["..."] if len(known) > 8 else [])])


def _show(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def _without(value: Any, keys: Keys) -> Any:
    key, rest = keys[0], keys[1:]
    if is_list(value):
        return [_without(item, rest) if i == key else item for i, item in enumerate(value)]
    if not rest:
        return {name: item for name, item in value.items() if name != key}
    return {name: _without(item, rest) if name == key else item for name, item in value.items()}


def _keywords_safe(value: Any) -> Any:
    """Rename keys that are Python keywords to their fields: `from` to `from_`; `from_` becomes unknown."""
    if is_mapping(value):
        return {
            f"{k}_" if is_keyword(k) else k: _keywords_safe(v) if isinstance(v, (dict, list)) else v
            for k, v in value.items()
        }
    if is_list(value):
        return [_keywords_safe(item) if isinstance(item, (dict, list)) else item for item in value]
    return value


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
_OUTPUT_UNITS: dict[Kind, tuple[str, ...]] = {
    "bytes": ("TiB", "GiB", "MiB", "KiB"),
    "bytes/s": ("TB/s", "GB/s", "MB/s", "kB/s"),
    "seconds": ("s", "ms", "us", "ns"),
    "FLOP/s": ("PFLOP/s", "TFLOP/s", "GFLOP/s"),
}
WIDTH = 160
"""Columns from which on YAML is continued on another line."""


@functools.cache
def _fields_of(kind: type) -> tuple[tuple[str, str, Unit | None], ...]:
    """Name, key and unit of each field: found once, for a plan has thousands of values of a kind."""
    return tuple((name, key_of(name), _unit_of(hint)) for name, hint in field_hints(kind).items())


def _unit_of(hint: Any) -> Unit | None:
    inside = (*get_args(hint), *(item for argument in get_args(hint) for item in get_args(argument)))
    return next((item for item in inside if isinstance(item, Unit)), None)


def format_quantity(value: float, kind: Kind) -> str:
    """Write `value` (SI) so that `parse_quantity` returns it exactly."""
    for unit in _OUTPUT_UNITS[kind]:
        number = value / FACTORS[kind][unit]
        if abs(number) >= 1:
            for text in (f"{number:.6g} {unit}", f"{number!r} {unit}"):
                if parse_quantity(text, kind) == value:
                    return text
    base = {"bytes": "B", "bytes/s": "B/s", "seconds": "s", "FLOP/s": "FLOP/s"}[kind]
    return f"{value!r} {base}" if kind != "bytes" else f"{int(value)} {base}"


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
