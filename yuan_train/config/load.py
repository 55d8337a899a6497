"""YAML files to frozen values, with every violation of a file in one pass; and frozen values to YAML.

A file, or one that comes with the package by its name, is read into a `Document` of plain values, each with
the place where it was written. Overrides (`a.b=v`) change the document, and `build` turns it into a
dataclass. PyYAML reads YAML 1.1, where `3e-4` is a string, `no` a boolean and the last of two equal keys wins
silently; so the scalars are resolved here, and duplicate keys are refused. Files are written atomically.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import gc
import itertools
import json
import keyword
import math
import os
import re
import types
import typing
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, Union, cast, get_args, get_origin, get_type_hints

import yaml

from yuan_train.config.errors import ConfigError, Violation, YuanError, why_unread
from yuan_train.config.units import FACTORS, Kind, Unit, parse_quantity


@contextmanager
def without_garbage_collector() -> Generator[None]:
    """Disable the collector inside: it starts whenever there are more objects, and scans them all again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


Keys = tuple[str | int, ...]

_INTEGER = re.compile(r"[-+]?(0|[1-9][0-9]*)")

_FLOAT = re.compile(r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?")

_BRACKET = re.compile(r"[\[\]{}]")
_INDENT = re.compile(r"^[ \t?:-]*", re.MULTILINE)
MAX_DEPTH = 100
"""Levels of lists and mappings inside each other; no file of ours needs ten."""
_PLAIN_TAGS = {
    yaml.ScalarNode: "tag:yaml.org,2002:str",
    yaml.SequenceNode: "tag:yaml.org,2002:seq",
    yaml.MappingNode: "tag:yaml.org,2002:map",
}

_BaseLoader: Any = getattr(yaml, "CBaseLoader", yaml.BaseLoader)


def _look_up_nothing(*_: Any) -> None:
    """In place of PyYAML's search for rules by path."""


class _Loader(_BaseLoader):
    """libyaml where PyYAML has it; gives each node without a tag that of its kind, whatever it says.

    So does PyYAML's own resolver, after looking for rules that are not there: a quarter of the time.
    """

    descend_resolver = ascend_resolver = _look_up_nothing

    def resolve(self, kind: Any, value: Any, implicit: Any) -> str:
        return _PLAIN_TAGS[kind]


@dataclass(frozen=True)
class Document:
    """Plain values of a file, and the source of each path: `run.yaml:12`, or the override."""

    name: str
    value: Any
    sources: Mapping[Keys, str]

    def source(self, keys: Keys) -> str:
        """Where the value at `keys` was written; if unknown, where the nearest value around it was."""
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
    """Whether a plain value is a mapping."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether a plain value is a list."""
    return isinstance(value, list)


FILES = {
    "Cluster": ("nodes", "a cluster file (yuan-train discover or init cluster writes one)"),
    "Plan": ("pipelines", "a plan (yuan-train plan writes one)"),
    "Profile": ("entries", "a profile (yuan-train profile writes one)"),
    "RLConfig": ("algorithm", "a run file of reinforcement learning (yuan-train init grpo writes one)"),
    "RunConfig": ("train", "a run file (yuan-train init pretrain writes one)"),
}
"""Of each kind of file a key that it has, and what it is. The first that is there says what a file is."""


def read_document(path: str | Path, kind: str | None = None) -> Document:
    """Read a YAML (or JSON) file, wanted to be of a `kind` of FILES. Raises ConfigError if it is missing, not
    YAML, or has a duplicate key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        wanted = f"; wanted {FILES[kind][1]}" if kind else ""
        raise ConfigError(f"{path}: no such file{wanted}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {why_unread(error)}") from None
    return parse_document(text, name=str(path))


def parse_document(text: str, *, name: str, numbered: bool = True) -> Document:
    """Read YAML text. Raises ConfigError with `name`, and with the line number if lines are `numbered`."""

    def source_of(line: int) -> str:
        return f"{name}:{line + 1}" if numbered else name

    def locate() -> tuple[Any, dict[Keys, str]]:
        node, sources = _compose(text), dict[Keys, str]()
        return {} if node is None else _construct(node, (), source_of, sources, ()), sources

    sources: Mapping[Keys, str] = _Sources(lambda: locate()[1])
    try:
        _check_depth(text, name)
        try:
            # Without it, two thirds of the time of a large file would be the collector's.
            with without_garbage_collector():
                node = _compose(text)
                value: Any = {} if node is None else _values(node, {})
                del node
        except (_Refused, RecursionError):
            value, sources = locate()
    except RecursionError:
        raise ConfigError(f"{name}: nested too deeply to be read") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = source_of(mark.line) if mark else name
        raise ConfigError(f"{where}: not YAML: {getattr(error, 'problem', None) or error}") from None
    return Document(name, value, sources)


class _Sources(Mapping[Keys, str]):
    """Where each path was written: found when it is asked for, which only messages and overrides do.

    Of the plan of thousands of ranks there are a quarter of a million paths.
    """

    def __init__(self, find: Callable[[], Mapping[Keys, str]]) -> None:
        self._find = find

    @cached_property
    def _found(self) -> Mapping[Keys, str]:
        return self._find()

    def __getitem__(self, keys: Keys) -> str:
        return self._found[keys]

    def __iter__(self) -> Iterator[Keys]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)


def _compose(text: str) -> Any:
    return cast("Any", yaml.compose(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]


def _check_depth(text: str, name: str) -> None:
    """Raise ConfigError for text that is nested deeper than MAX_DEPTH.

    The composer recurses in C, where too deep a nesting ends the process; the parser does not.
    """
    brackets = itertools.accumulate(1 if bracket in "[{" else -1 for bracket in _BRACKET.findall(text))
    # Brackets and indentation show that most texts are not nested deeply, without parsing them twice.
    if max(brackets, default=0) < MAX_DEPTH and max(map(len, _INDENT.findall(text)), default=0) < MAX_DEPTH:
        return
    depth = 0
    parsed = cast("Any", yaml.parse(text, Loader=_Loader))  # pyright: ignore[reportUnknownMemberType]
    for event in cast("Iterable[Any]", parsed):
        if isinstance(event, yaml.CollectionStartEvent):
            depth += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            depth -= 1
        if depth > MAX_DEPTH:
            raise ConfigError(f"{name}: nested too deeply to be read (more than {MAX_DEPTH} levels)")


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


class _Refused(Exception):
    """A node is not allowed; `_construct` says which, and why."""


def _values(node: Any, known: dict[str, Any]) -> Any:
    """A node as a plain value, as `_construct` makes it; raises _Refused where that raises ConfigError.

    `known` are the values of scalars without quotes, of which large files have few. An alias that contains
    itself raises RecursionError.
    """
    kind = cast("Any", type(node))
    if node.tag != _PLAIN_TAGS[kind] and node.tag != "!":
        raise _Refused
    if kind is yaml.ScalarNode:
        text = node.value
        if node.style:
            return text
        if text not in known:
            known[text] = parse_scalar(text)
        return known[text]
    if kind is yaml.SequenceNode:
        return [_values(child, known) for child in node.value]
    result: dict[str, Any] = {}
    for key_node, child in node.value:
        if type(key_node) is not yaml.ScalarNode:
            raise _Refused
        result[key_node.value] = _values(child, known)
    if len(result) < len(node.value):
        raise _Refused
    return result


def _construct(
    node: Any,
    keys: Keys,
    source_of: Callable[[int], str],
    sources: dict[Keys, str],
    enclosing: tuple[int, ...],
) -> Any:
    """A node as a plain value. Records in `sources` where each path was written."""
    where = source_of(node.start_mark.line)
    sources.setdefault(keys, where)
    if id(node) in enclosing:
        raise ConfigError(_message(where, keys, "an alias that contains itself"))
    enclosing = (*enclosing, id(node))
    plain_tag = {"scalar": "str", "sequence": "seq", "mapping": "map"}[node.id]
    if node.tag not in ("!", f"tag:yaml.org,2002:{plain_tag}"):
        raise ConfigError(_message(where, keys, f"tags such as {node.tag!r} are not allowed"))
    if node.id == "scalar":
        return parse_scalar(node.value) if not node.style else node.value
    if node.id == "sequence":
        return [
            _construct(child, (*keys, i), source_of, sources, enclosing) for i, child in enumerate(node.value)
        ]
    result: dict[str, Any] = {}
    for key_node, child in node.value:
        line = source_of(key_node.start_mark.line)
        if key_node.id != "scalar":
            raise ConfigError(_message(line, keys, "a key must be a word"))
        key = key_node.value
        if key in result:
            duplicate = f"given twice (first at {sources[(*keys, key)]}); keep one"
            raise ConfigError(_message(line, (*keys, key), duplicate))
        sources[(*keys, key)] = line
        result[key] = _construct(child, (*keys, key), source_of, sources, enclosing)
    return result


def graft(document: Document, keys: Keys, other: Document) -> Document:
    """Put the value of `other` at `keys`, with its sources."""
    value = _replace(document.value, keys, other.value)
    kept = {path: where for path, where in document.sources.items() if path[: len(keys)] != keys}
    return Document(document.name, value, kept | {(*keys, *path): w for path, w in other.sources.items()})


def override(document: Document, assignment: str) -> Document:
    """Apply `a.b=v`; v is YAML, so `search.tensor=[1,2]` works. Raises ConfigError if it is malformed."""
    path, equals, text = assignment.partition("=")
    if not equals or not path or not all(path.split(".")):
        raise ConfigError(f"command line {assignment!r}: wanted key.path=value")
    where = f"command line {assignment!r}"
    keys: Keys = tuple(int(part) if part.isdigit() else part for part in path.split("."))
    given = parse_document(text, name=where, numbered=False)
    value = None if text.strip() == "" else given.value
    try:
        return graft(document, keys, Document(where, value, {(): where}))
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{where}: {path!r} cannot be set in {document.name}") from None


def _replace(value: Any, keys: Keys, new: Any) -> Any:
    if not keys:
        return new
    if isinstance(keys[0], int):
        if not is_list(value):
            raise TypeError
        items = list(value)
        items[keys[0]] = _replace(items[keys[0]], keys[1:], new)
        return items
    mapping: Any = {} if value is None else value
    if not is_mapping(mapping):
        raise TypeError
    return {**mapping, keys[0]: _replace(mapping.get(keys[0]), keys[1:], new)}


def describe(document: Document, violation: Violation) -> str:
    """`file:line: path: message`."""
    return _message(document.source(violation.path), violation.path, violation.message)


def _message(where: str, keys: Keys, message: str) -> str:
    return f"{where}: {format_keys(keys)}: {message}" if keys else f"{where}: {message}"


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
    if path.exists():
        return path
    known = names("cluster")
    if found := known.get(str(name).lower()):
        return found
    close = difflib.get_close_matches(str(name).lower(), known, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ConfigError(
        f"{name}: no such file; {hint}wanted {FILES['Cluster'][1]}, or a name of configs/cluster (has: "
        f"{', '.join(known)})"
    )


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
    message = message.replace("Input should be", "wanted").replace("String should have", "wanted")
    message = message.replace("a valid integer", "an integer").replace("a valid array", "a list")
    message = message.replace("a valid", "a")
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
    path = Path(os.path.realpath(path))  # A link stays one.
    temporary = path.parent / f".{path.name}.{os.getpid()}.tmp"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(f"{path}: cannot be written: {error}") from None
