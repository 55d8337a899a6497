"""YAML files and `a.b=v` overrides as plain values, each with the place where it was written; and the files
that come with the package, by name.

A file is read into a `Document`, overrides change the document, and `load.build` turns it into a dataclass.
PyYAML reads YAML 1.1, where `3e-4` is a string, `no` a boolean and the last of two equal keys wins silently;
so the scalars are resolved here, and duplicate keys are refused.
"""

from __future__ import annotations

import difflib
import gc
import itertools
import math
import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeGuard, cast

import yaml

from yuan_train.config.errors import ConfigError, Violation, why_unread


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
        value = _replace(document.value, keys, value)
    except (KeyError, IndexError, TypeError):
        raise ConfigError(f"{where}: {path!r} cannot be set in {document.name}") from None
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
