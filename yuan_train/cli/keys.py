"""Prints the keys of a kind of file: run, cluster, model, rl, plan or rl_plan. A prefix prints those that
begin with it, or have a part that does: `yuan-train keys run optimizer`, `yuan-train keys learning_rate`.

--schema prints a JSON schema. Editors complete and explain the keys of a file whose first line names it:
# yaml-language-server: $schema=run.schema.json
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import functools
import importlib
import inspect
import json
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from yuan_train.config.errors import ConfigError


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "what",
        nargs="*",
        metavar="KIND PREFIX",
        help="run, cluster, model, rl, plan or rl_plan, and the beginning of a key; without a kind, of all",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    output.add_argument("--schema", action="store_true", help="print the JSON schema of a kind of file")


def run(arguments: argparse.Namespace) -> int:
    """Print. Raises ConfigError if no key begins so."""
    what: list[str] = arguments.what
    kind = what[0] if what and what[0] in KINDS else None
    rest = what if kind is None else what[1:]
    if len(rest) > 1:
        raise ConfigError(f"{' '.join(what)}: wanted a kind ({', '.join(KINDS)}) and the beginning of a key")
    prefix = rest[0] if rest else ""
    if arguments.schema:
        if kind is None or prefix:
            raise ConfigError(f"--schema: wanted one kind of file and no key (has: {', '.join(KINDS)})")
        print(schema_text(kind), end="")
        return 0
    if kind is None and prefix:
        found = _anywhere(prefix)
    else:
        found = {name: file_keys(name, prefix) for name in ([kind] if kind else KINDS)}
    if arguments.json:
        values = {name: [dataclasses.asdict(key) for key in keys] for name, keys in found.items()}
        print(json.dumps(values, ensure_ascii=False))
        return 0
    width = min(shutil.get_terminal_size().columns, 110)
    print("\n\n".join("\n".join(_lines(name, keys, width)) for name, keys in found.items()))
    return 0


def _anywhere(prefix: str) -> dict[str, tuple[Key, ...]]:
    """The kinds of files that have such keys, with them. Raises ConfigError if none has."""
    found: dict[str, tuple[Key, ...]] = {}
    errors: list[ConfigError] = []
    for kind in KINDS:
        try:
            found[kind] = file_keys(kind, prefix)
        except ConfigError as error:
            errors.append(error)
    if not found:
        hinted = [error for error in errors if "did you mean" in str(error)]
        raise (hinted or errors)[0]
    return found


def _lines(kind: str, keys: tuple[Key, ...], width: int) -> list[str]:
    lines = [f"Keys of {KINDS[kind][2]}:"]
    for key in keys:
        lines.append(f" {key.path}: {key_words(key)}")
        lines += textwrap.wrap(
            key.meaning, width, initial_indent="     ", subsequent_indent="     ", break_on_hyphens=False
        )
    return lines


def key_words(key: Key) -> str:
    """What may stand at a key, and what does without it: `quantity above 0 (seconds); 1 min`."""
    unit = f" ({key.unit})" if key.unit else ""
    if key.default is None:
        return f"{key.type}{unit}; required"
    return f"{key.type}{unit}" + (f"; default {key.default}" if key.default else "")


KINDS = {
    "run": ("yuan_train.config.run", "RunConfig", "run files of pre-training, fine-tuning and preferences"),
    "cluster": ("yuan_train.config.cluster", "Cluster", "cluster files"),
    "model": ("yuan_train.config.model", "ModelConfig", "model files"),
    "rl": ("yuan_train.config.rl", "RLConfig", "run files of reinforcement learning"),
    "plan": ("yuan_train.config.plan", "Plan", "plans"),
    "rl_plan": ("yuan_train.config.rl_plan", "RlPlan", "plans of reinforcement learning"),
}
"""By the name that `yuan-train keys` takes: module and class of a file's keys, and what the files are."""

_WORDS: dict[Any, str] = {
    int: "integer",
    float: "number",
    str: "text",
    bool: "true or false",
    Any: "anything",
}


@dataclass(frozen=True)
class Key:
    """One key: its path (`nodes[].link.bandwidth`), and what may stand there, in words."""

    path: str
    type: str
    unit: str | None
    default: str | None
    """As YAML; None: there is none, the key must be given."""
    meaning: str


def file_keys(kind: str, prefix: str = "") -> tuple[Key, ...]:
    """The keys of a kind of file, those that begin with `prefix` or have a part that does; with the keys
    below them.

    Raises ConfigError if there is none, with the nearest.
    """
    keys = tuple(_keys_of(_class_of(kind), ()))
    found = tuple(key for key in keys if matches(key.path, prefix))
    if not found:
        parts = {part for key in keys for part in plain(key.path).split(".")}
        names = [*(plain(key.path) for key in keys), *sorted(parts)]
        close = difflib.get_close_matches(prefix, names, n=1, cutoff=0.5)
        others = [
            name for name in KINDS if any(matches(k.path, prefix) for k in _keys_of(_class_of(name), ()))
        ]
        # Who asks of a plan may mean another one.
        others.sort(key=lambda name: kind not in name)
        hint = f"; did you mean {close[0]!r}?" if close else f"; `yuan-train keys {kind}` lists them"
        hint = f"; `yuan-train keys {others[0]} {prefix}` has some" if others else hint
        raise ConfigError(f"{prefix}: no key of {KINDS[kind][2]} begins so{hint}")
    return found


def matches(path: str, prefix: str) -> bool:
    """Whether a path begins with `prefix`, or one of its parts and what follows does."""
    parts, wanted = plain(path).split("."), plain(prefix)
    return any(".".join(parts[i:]).startswith(wanted) for i in range(len(parts)))


def plain(path: str) -> str:
    """`nodes[].link` as `nodes.link`, as it is typed to look for it."""
    return path.replace("[]", "").replace(".NAME", "")


def file_schema(kind: str) -> dict[str, Any]:
    """The JSON schema of a kind of file, for editors: with it they complete keys and explain them."""
    from yuan_train.config.load import adapter, dataclasses_in, field_hints, key_of
    from yuan_train.config.model import WANTED

    found = _class_of(kind)
    schema: dict[str, Any] = adapter(found).json_schema()
    described = {item.__name__: item for item in dataclasses_in(found)}
    for name, part in [*schema.pop("$defs").items(), (found.__name__, schema)]:
        properties: dict[str, Any] = {}
        hints, docs = field_hints(described[name]), field_docs(described[name])
        for field, value in part["properties"].items():
            if field in hints:
                properties[key_of(field)] = _without_titles(value) | {"description": docs[field]}
        part["properties"] = properties
        part["required"] = [key_of(field) for field in part.get("required", []) if field in hints]
        part.pop("title", None)
        part["description"] = " ".join(part.get("description", "").split())
        if part is not schema:
            schema.setdefault("$defs", {})[name] = part
    if kind in ("run", "rl"):
        # It may also be a text, which stands for the keys below it; a run may leave it out.
        own = schema["properties"]["model"]
        own["anyOf"] = [{"type": "string", "description": WANTED}, {"$ref": own.pop("$ref")}]
        schema["required"].remove("model")
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": KINDS[kind][2], **schema}


def schema_text(kind: str) -> str:
    """`file_schema` as it is printed and kept."""
    return json.dumps(file_schema(kind), indent=1, ensure_ascii=False) + "\n"


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The meaning of each field of a dataclass, on one line; "" if nothing tells it. None is YAML's null."""
    from yuan_train.config.load import dataclasses_in, field_hints

    found: dict[str, str] = {}
    for base in reversed(kind.__mro__):
        if dataclasses.is_dataclass(base):
            found |= _own_docs(base)
    for name, hint in field_hints(kind).items():
        below = next((item for item in dataclasses_in(hint)), None)
        own = found.get(name, "")
        if below is not None and (not own or own.startswith("None:")):
            own = " ".join(f"{inspect.getdoc(below)} {own}".split())
        found[name] = re.sub(r"\bNone\b", "null", own)
    return found


def _own_docs(kind: type) -> dict[str, str]:
    """The strings that follow the fields in the body of a class."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for item, after in zip(definition.body, definition.body[1:], strict=False):
        if not (isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[item.target.id] = " ".join(str(after.value.value).split())
    return found


def _class_of(kind: str) -> Any:
    module, name, _ = KINDS[kind]
    return getattr(importlib.import_module(module), name)


def _keys_of(kind: Any, path: Sequence[str]) -> Iterator[Key]:
    from yuan_train.config.load import field_hints, key_of
    from yuan_train.config.model import WANTED

    fields, docs = {field.name: field for field in dataclasses.fields(kind)}, field_docs(kind)
    for name, hint in field_hints(kind).items():
        own = (*path, key_of(name))
        below, mark = _below(hint)
        words, default = _words(hint), _default(fields[name], hint)
        # The keys of a run's model are those of model files, and a plan's is written by the planner.
        named = own == ("model",)
        if named and kind.__name__ in ("RunConfig", "RLConfig"):
            words, default = f"{WANTED}, or its keys", ""
        whole_plan = below is not None and below.__name__ == "Plan"
        if whole_plan:
            words = f"keys of {KINDS['plan'][2]}"
        yield Key(".".join(own), words, _unit(hint), default, docs[name])
        if below is not None and not named and not whole_plan:
            yield from _keys_of(below, (*own[:-1], own[-1] + mark) if mark != ".NAME" else (*own, "NAME"))


def _below(hint: Any) -> tuple[Any, str]:
    """The dataclass whose keys stand below a field, and how its path goes on: `[]` in lists."""
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return hint, ""
    origin, arguments = get_origin(hint), get_args(hint)
    for argument in arguments[:1] if origin is Annotated else arguments:
        found, mark = _below(argument)
        if found is not None:
            return found, ("[]" if origin is tuple else ".NAME" if origin is dict else "") + mark
    return None, ""


def _words(hint: Any) -> str:
    """What may stand at a key: `integer above 0`, `list of text`, `"cosine" or "linear"`."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        if _unit(hint) is not None:
            return "quantity" + _limits(arguments[1:])
        return _words(arguments[0]) + _limits(arguments[1:])
    if origin is Literal:
        return " | ".join(map(str, arguments))
    if origin in (Union, types.UnionType):
        return " or ".join(_words(item) for item in arguments if item is not type(None))
    if origin is tuple and len(arguments) == 2 and arguments[1] is not Ellipsis:
        return f"pair of {_words(arguments[0])}"
    if origin is tuple:
        return f"list of {_words(arguments[0])}"
    if origin is dict:
        return f"{_words(arguments[1])} by name"
    return _WORDS.get(hint, "keys")


def _limits(marks: Sequence[Any]) -> str:
    import annotated_types

    words: list[str] = []
    for mark in marks:
        if isinstance(mark, annotated_types.Gt):
            words.append(f"above {mark.gt}")
        elif isinstance(mark, annotated_types.Ge):
            words.append(f"from {mark.ge}")
        elif isinstance(mark, annotated_types.Lt) and mark.lt != float("inf"):
            words.append(f"below {mark.lt}")
        elif isinstance(mark, annotated_types.Le):
            words.append(f"to {mark.le}")
    return "".join(f" {word}" for word in words)


def _unit(hint: Any) -> str | None:
    """The unit of a quantity, wherever in a type it stands."""
    from yuan_train.config.units import Unit

    if get_origin(hint) is Annotated:
        found = next((mark.kind for mark in get_args(hint)[1:] if isinstance(mark, Unit)), None)
        return found or _unit(get_args(hint)[0])
    if get_origin(hint) in (Union, types.UnionType):
        return next((found for item in get_args(hint) if (found := _unit(item)) is not None), None)
    return None


def _default(field: dataclasses.Field[Any], hint: Any) -> str | None:
    """The default as YAML; that of a section is "": its keys have their own."""
    from yuan_train.config.load import as_plain, format_quantity

    if field.default is MISSING and field.default_factory is MISSING:
        return None
    value = field.default if field.default is not MISSING else typing.cast(Any, field.default_factory)()
    if dataclasses.is_dataclass(value):
        return ""
    unit = typing.cast(Any, _unit(hint))
    if unit is not None and value is not None:
        return format_quantity(value, unit)
    return json.dumps(as_plain(value), ensure_ascii=False)


def _without_titles(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_titles(item) for key, item in value.items() if key != "title"}
    return [_without_titles(item) for item in value] if isinstance(value, list) else value
