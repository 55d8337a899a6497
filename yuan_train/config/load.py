"""YAML files and `a.b=v` overrides to frozen values: strict, every error of a file in one pass.

A file is read into a `Document` (plain values, and where each came from), overrides change the document,
and `build` turns it into a dataclass. PyYAML reads YAML 1.1, where `3e-4` is a string, `no` a boolean and
the last of two equal keys wins in silence; so the scalars are resolved here, duplicate keys are refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import json
import keyword
import math
import os
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard, Union, cast, get_args, get_origin, get_type_hints

import yaml

from yuan_train.config.errors import ConfigError, Problem, YuanError
from yuan_train.config.units import Unit, format_quantity

Keys = tuple[str | int, ...]
_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_Loader = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


@dataclass(frozen=True)
class Document:
    """Plain values of a file, and for each path where it was written (`run.yaml:12`, or an override)."""

    name: str
    value: Any
    sources: Mapping[Keys, str]

    def source(self, keys: Keys) -> str:
        """Where the value at `keys` was written, or the nearest thing around it."""
        while keys and keys not in self.sources:
            keys = keys[:-1]
        return self.sources.get(keys, self.name)


def format_keys(keys: Keys) -> str:
    """`("nodes", 0, "link")` as `nodes[0].link`."""
    text = ""
    for key in keys:
        text += f"[{key}]" if isinstance(key, int) else f".{key}"
    return text.lstrip(".")


def is_mapping(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether a plain value is keys and values."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether a plain value is a list."""
    return isinstance(value, list)


# --- reading ---------------------------------------------------------------------------------------------


def read_document(path: str | Path) -> Document:
    """Read a YAML (or JSON) file. Raises ConfigError if it is missing, torn, or has a key twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    return parse_document(text, name=str(path))


def parse_document(text: str, *, name: str, numbered: bool = True) -> Document:
    """Read YAML text; `name` stands in errors, with the number of the line if lines are `numbered`."""

    def place(line: int) -> str:
        return f"{name}:{line + 1}" if numbered else name

    sources: dict[Keys, str] = {}
    try:
        node = cast("Any", yaml.compose(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
        value: Any = {} if node is None else _construct(node, (), place, sources, ())
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be read") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = place(mark.line) if mark else name
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    return Document(name, value, sources)


def parse_scalar(text: str) -> Any:
    """A plain scalar as null, boolean, integer, float, or else the text itself."""
    if text in ("", "~", "null", "Null", "NULL"):
        return None
    if text in ("true", "True", "TRUE"):
        return True
    if text in ("false", "False", "FALSE"):
        return False
    if _INTEGER.fullmatch(text) and len(text) < 1000:
        return int(text)
    if _FLOAT.fullmatch(text) and math.isfinite(float(text)):
        return float(text)
    return text


def _construct(
    node: Any,
    keys: Keys,
    place: Callable[[int], str],
    sources: dict[Keys, str],
    open_nodes: tuple[int, ...],
) -> Any:
    """A node as a plain value; notes in `sources` where each path was written."""
    where = place(node.start_mark.line)
    sources.setdefault(keys, where)
    if id(node) in open_nodes:
        raise ConfigError(_message(where, keys, "an alias that holds itself"))
    inside = (*open_nodes, id(node))
    plain_tag = {"scalar": "str", "sequence": "seq", "mapping": "map"}[node.id]
    if node.tag not in ("!", f"tag:yaml.org,2002:{plain_tag}"):
        raise ConfigError(_message(where, keys, f"tags such as {node.tag!r} are not allowed"))
    if node.id == "scalar":
        return parse_scalar(node.value) if not node.style else node.value
    if node.id == "sequence":
        return [_construct(child, (*keys, i), place, sources, inside) for i, child in enumerate(node.value)]
    result: dict[str, Any] = {}
    for key_node, child in node.value:
        line = place(key_node.start_mark.line)
        if key_node.id != "scalar":
            raise ConfigError(_message(line, keys, "a key must be a word"))
        key = key_node.value
        if key in result:
            twice = f"given twice (first at {sources[(*keys, key)]}); keep one"
            raise ConfigError(_message(line, (*keys, key), twice))
        sources[(*keys, key)] = line
        result[key] = _construct(child, (*keys, key), place, sources, inside)
    return result


# --- changing --------------------------------------------------------------------------------------------


def graft(document: Document, keys: Keys, other: Document) -> Document:
    """Put the whole of `other` at `keys`, its sources with it."""
    value = _replace(document.value, keys, other.value)
    kept = {path: where for path, where in document.sources.items() if path[: len(keys)] != keys}
    return Document(document.name, value, kept | {(*keys, *path): w for path, w in other.sources.items()})


def override(document: Document, assignment: str) -> Document:
    """Apply `a.b=v`; v is YAML, so `search.tensor=[1,2]` works. Raises ConfigError if it cannot."""
    path, equals, text = assignment.partition("=")
    if not equals or not path or not all(path.split(".")):
        raise ConfigError(f"command line {assignment!r}: wanted key.path=value")
    where = f"command line {assignment!r}"
    keys: Keys = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    given = parse_document(text, name=where, numbered=False)
    value = None if text.strip() == "" else given.value
    try:
        value = _replace(document.value, keys, value)
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{where}: there is no place for {path!r} in {document.name}") from None
    kept = {source: w for source, w in document.sources.items() if source[: len(keys)] != keys}
    return Document(document.name, value, kept | {keys: where})


def _replace(value: Any, keys: Keys, new: Any) -> Any:
    if not keys:
        return new
    if isinstance(keys[0], int):
        if not is_list(value):
            raise TypeError
        items = list(value)
        items[keys[0]] = _replace(items[keys[0]], keys[1:], new)
        return items
    held: Any = {} if value is None else value
    if not is_mapping(held):
        raise TypeError
    return {**held, keys[0]: _replace(held.get(keys[0]), keys[1:], new)}


# --- building --------------------------------------------------------------------------------------------

T = typing.TypeVar("T")


def build(
    document: Document,
    kind: type[T],
    *,
    laws: Callable[[T], Iterable[Problem]] = lambda value: (),
    error: type[YuanError] = ConfigError,
) -> T:
    """Turn a document into a `kind`, or raise `error` with every problem, one per line.

    Laws are rules between fields. They also run on a document whose only fault is unknown keys, so that one
    pass shows both.
    """
    value, problems = _validate(document.value, kind)
    if value is None and problems and all(problem.unknown for problem in problems):
        pruned = document.value
        for problem in problems:
            pruned = _without(pruned, problem.path)
        value, _ = _validate(pruned, kind)
    if value is not None:
        problems = [*problems, *laws(value)]
    if problems:
        raise error("\n".join(describe(document, problem) for problem in problems))
    assert value is not None
    return value


def describe(document: Document, problem: Problem) -> str:
    """`file:line: path: message`."""
    return _message(document.source(problem.path), problem.path, problem.message)


def _message(where: str, keys: Keys, message: str) -> str:
    return f"{where}: {format_keys(keys)}: {message}" if keys else f"{where}: {message}"


@dataclass(frozen=True)
class _SchemaProblem(Problem):
    unknown: bool = False


@functools.cache
def _adapter(kind: Any) -> Any:
    """A validator of one dataclass that refuses keys which no field has."""
    from pydantic import TypeAdapter

    for noun in _dataclasses_in(kind):
        if "__pydantic_config__" not in vars(noun):
            noun.__pydantic_config__ = {"extra": "forbid"}
    return TypeAdapter(kind)


def _validate(value: Any, kind: type[T]) -> tuple[T | None, list[_SchemaProblem]]:
    """Check in pydantic's strict JSON mode: `"4"` and `true` are not numbers, lists become tuples."""
    from pydantic import ValidationError

    if not isinstance(value, dict):
        return None, [_SchemaProblem((), f"wanted keys and values, got {_show(value)}")]
    try:
        return _adapter(kind).validate_json(json.dumps(_keywords_safe(value)), strict=True), []
    except ValidationError as error:
        items = error.errors(include_url=False)
        places = [tuple(item["loc"]) for item in items]
        return None, [_schema_problem(i, kind) for i in items if not _only_shortened(i, places)]


def _only_shortened(item: Any, places: list[Keys]) -> bool:
    """Whether a tuple is called too short only because its items were wrong themselves."""
    keys = tuple(item["loc"])
    return item["type"] == "too_short" and any(p[: len(keys)] == keys and p != keys for p in places)


def _schema_problem(item: Any, kind: Any) -> _SchemaProblem:
    keys: Keys = tuple(_key_of(part) if isinstance(part, str) else part for part in item["loc"])
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = [_key_of(name) for name in _field_names(kind, tuple(item["loc"])[:-1])]
        close = difflib.get_close_matches(str(keys[-1]), known, n=1, cutoff=0.5)
        hint = f"; did you mean {close[0]!r}?" if close else ";"
        return _SchemaProblem(keys, f"unknown key {keys[-1]!r}{hint} (has: {', '.join(known)})", unknown=True)
    if item["type"] in ("missing", "missing_argument"):
        return _SchemaProblem(keys, "missing")
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "value_error":
        return _SchemaProblem(keys, message)
    if item["type"] == "too_short":
        return _SchemaProblem(keys, "wanted at least one, got none")
    message = message.replace("Input should be", "wanted")
    message = message.replace("a valid integer", "an integer").replace("a valid", "a")
    if item["type"].startswith("dataclass"):
        message = "wanted keys and values"
    return _SchemaProblem(keys, f"{message}, got {_show(item['input'])}")


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
    """`from` is a word of Python's, so the field is called `from_`; a key `from_` moves aside, unknown."""
    if is_mapping(value):
        return {f"{k}_" if _is_keyword(k) else k: _keywords_safe(v) for k, v in value.items()}
    if is_list(value):
        return [_keywords_safe(item) for item in value]
    return value


def _key_of(name: str) -> str:
    """The key in the file of a field called `name`."""
    return name[:-1] if name.endswith("_") and _is_keyword(name) else name


def _is_keyword(name: str) -> bool:
    return keyword.iskeyword(name.rstrip("_"))


# --- types -----------------------------------------------------------------------------------------------


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _dataclasses_in(kind: Any) -> Iterator[Any]:
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        yield kind
        for hint in _hints(kind).values():
            yield from _dataclasses_in(hint)
    for argument in get_args(kind):
        yield from _dataclasses_in(argument)


def _field_names(kind: Any, keys: Keys) -> list[str]:
    """Names of the fields of the dataclass that stands at `keys` below `kind`."""
    if not keys:
        found = next((noun for noun in _dataclasses_in(kind)), None)
        return list(_hints(found)) if found else []
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _field_names(_hints(kind).get(str(keys[0]), Any), keys[1:])
    arguments = [a for a in get_args(kind) if a is not type(None)]
    if get_origin(kind) in (Union, types.UnionType, typing.Annotated):
        return _field_names(arguments[0], keys)
    if not arguments:
        return []
    return _field_names(arguments[-1] if get_origin(kind) is dict else arguments[0], keys[1:])


# --- writing ---------------------------------------------------------------------------------------------


def as_plain(value: Any, hint: Any = None) -> Any:
    """A frozen value as dictionaries, lists and words with units; what is None is left out."""
    unit = next((item for item in get_args(hint) if isinstance(item, Unit)), None)
    if unit is None:
        unit = next((i for a in get_args(hint) for i in get_args(a) if isinstance(i, Unit)), None)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {k: as_plain(getattr(value, k), h) for k, h in _hints(type(value)).items()}
        return {_key_of(k): item for k, item in plain.items() if item is not None}
    if is_mapping(value):
        return {str(key): as_plain(item) for key, item in value.items()}
    if isinstance(value, tuple) or is_list(value):
        items = cast("Iterable[Any]", value)
        return [as_plain(item) for item in items]
    if unit is not None and value is not None:
        return format_quantity(cast("float", value), unit.kind)
    return value


class _Dumper(yaml.SafeDumper):
    """Writes what `parse_document` reads back: strings that look like numbers get quotes."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = None if isinstance(parse_scalar(text), str) else "'"
    if not text.isprintable():
        style = '"'  # only there does PyYAML keep every line break as it is
    return dumper.represent_scalar(  # pyright: ignore[reportUnknownMemberType]  PyYAML has no types there
        "tag:yaml.org,2002:str", text, style=style
    )


_Dumper.add_representer(str, _represent_text)


def dump(value: Any) -> str:
    """A frozen value (or plain values) as YAML that `parse_document` reads back the same."""
    plain = as_plain(value)
    return yaml.dump(
        plain, Dumper=_Dumper, sort_keys=False, default_flow_style=None, allow_unicode=True, width=160
    )


def write_text(path: str | Path, text: str) -> None:
    """Write a file whole or not at all: aside, then renamed. Raises ConfigError if it cannot."""
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error}") from None
