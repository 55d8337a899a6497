"""A process that scores answers: reads a group as a line of JSON, answers with a line. Knows no torch.

    python -m yuan_train.rl.reward_worker ORDER

ORDER is JSON: `functions`, a list of `RewardFunction`s; `columns`, the names of what prompts have beside
FIELDS; `concurrency`, how many answers are scored at once. What functions print goes nowhere. A process of
its own, so that one that hangs can be ended.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import os
import re
import signal
import sys
import urllib.request
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from yuan_train.config.errors import end_with_parent

Score = Callable[[dict[str, Any]], Any]
"""The score of an answer, of its fields: those of FIELDS, and its prompt's columns."""


@dataclass(frozen=True)
class GroupScore:
    """The scores of all answers to a prompt, of a list of each field."""

    of: Score


FIELDS = (
    "prompt",
    "completion",
    "answer",
    "prompt_ids",
    "completion_ids",
    "ended",
    "ticket",
    "sample",
    "turns",
)
_NUMBER = re.compile(r"[-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_MARKED = re.compile(r"\$|\\boxed|\\\(|\\\[")
"""Whether a text says where its formulas are."""


class Unusable(Exception):
    """A function cannot be loaded."""


def exact(fields: dict[str, Any]) -> float:
    """1 if the completion is the answer, without the space around both."""
    return float(fields["completion"].strip() == str(fields["answer"]).strip())


def number(fields: dict[str, Any]) -> float:
    """1 if the last number of the completion is that of the answer."""
    found, wanted = (last_number(str(fields[name])) for name in ("completion", "answer"))
    return float(found is not None and wanted is not None and math.isclose(found, wanted, rel_tol=1e-9))


def last_number(text: str) -> float | None:
    """The last number of a text, if it has one."""
    found = _NUMBER.findall(text)
    return float(found[-1].replace(",", "")) if found else None


def _load_math() -> Score:
    """1 if the last formula of the completion is the answer. Raises Unusable without the package."""
    try:
        library: Any = importlib.import_module("math_verify")
    except ImportError as error:
        raise Unusable(
            f"math needs the package math-verify ({error}): pip install -e '.[math]' in the checkout"
        ) from None

    def score(fields: dict[str, Any]) -> float:
        answer = str(fields["answer"])
        # Its limits of time are alarms of the process, which no thread may set: reward.timeout is the limit.
        gold = library.parse(
            answer if _MARKED.search(answer) else f"\\boxed{{{answer}}}", parsing_timeout=None
        )
        if not gold:
            raise ValueError(f"math-verify reads no expression in the answer {answer[:100]!r}")
        found = library.parse(fields["completion"], parsing_timeout=None)
        return float(library.verify(gold, found, timeout_seconds=None))

    return score


def load_function(function: dict[str, Any], columns: Collection[str] = ()) -> Score | GroupScore:
    """The score of one `RewardFunction`, which may take columns of the prompts. Raises Unusable."""
    name, pattern = function.get("name"), function.get("pattern")
    if name in ("exact", "number"):
        return exact if name == "exact" else number
    if name == "math":
        return _load_math()
    if name is not None:
        if name == "format":
            compiled = re.compile(str(pattern), re.DOTALL)
            return lambda fields: float(compiled.fullmatch(fields["completion"].strip()) is not None)
        searched = re.compile(str(pattern))
        return lambda fields: float(
            _last_group(searched, fields["completion"]) == str(fields["answer"]).strip()
        )
    if function.get("url") is not None:
        return GroupScore(functools.partial(_ask, str(function["url"])))
    file, _, attribute = str(function["python"]).rpartition(":")
    found = _of_python(file, attribute, columns)
    return GroupScore(found) if function.get("batch") else found


def _ask(url: str, fields: dict[str, Any]) -> Any:
    """The scores of a server for the answers to a prompt, of a list of each field. `query`, `prompts` and
    `labels` are what OpenRLHF's remote reward models read."""
    both = zip(fields["prompt"], fields["completion"], strict=True)
    names = {"query": [f"{prompt}{said}" for prompt, said in both]}
    names |= {"prompts": fields["prompt"], "labels": fields["answer"]}
    body = json.dumps(names | fields).encode()
    request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        told = json.load(response)
    if not isinstance(told, dict) or "rewards" not in told:
        raise ValueError(f'{url} answered {repr(told)[:200]}; wanted {{"rewards": [...]}}')
    return told["rewards"]


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    found = [match.group(1) for match in pattern.finditer(text)]
    return found[-1].strip() if found and found[-1] is not None else None


def import_file(file: str) -> ModuleType:
    """The module of a Python file, which may import its neighbours. Raises Unusable."""
    spec = importlib.util.spec_from_file_location("given_by_user", file)
    if spec is None or spec.loader is None or not os.path.isfile(file):
        raise Unusable(
            f"{file}: no such file, seen from {os.getcwd()}; wanted a Python file, by its path from there"
        )
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, os.path.dirname(os.path.abspath(file)))
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        raise Unusable(f"{file}: {type(error).__name__}: {error}") from error
    return module


def _of_python(file: str, attribute: str, columns: Collection[str]) -> Score:
    found = getattr(import_file(file), attribute, None)
    if not callable(found):
        raise Unusable(f"{file} has no function {attribute!r}")
    parameters = inspect.signature(found).parameters.values()
    takes_all = any(p.kind is p.VAR_KEYWORD for p in parameters)
    names = [p.name for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    known = (*FIELDS, *columns)
    strange = [p.name for p in parameters if p.name in names and p.name not in known and p.default is p.empty]
    if strange or any(p.kind is p.POSITIONAL_ONLY for p in parameters):
        wanted = ", ".join(FIELDS) + ", or a key that each line of the prompts' files has"
        raise Unusable(
            f"{file}:{attribute} takes {', '.join(strange) or 'positions'}; wanted some of {wanted}"
        )

    def score(fields: dict[str, Any]) -> Any:
        return found(**(fields if takes_all else {name: fields[name] for name in names if name in fields}))

    return score


def score_group(
    functions: Sequence[Score | GroupScore],
    labels: Sequence[str],
    group: list[dict[str, Any]],
    *,
    each: Callable[[Score, list[dict[str, Any]]], Iterable[Any]] = map,
) -> dict[str, Any]:
    """{"scores": [[a number, or None, per function] per answer]}, or {"error": ...}.

    `each` applies a function to all answers. None is "not mine": another function is to score the answer.
    """
    columns: list[list[float | None]] = []
    for label, function in zip(labels, functions, strict=True):
        try:
            if isinstance(function, GroupScore):
                values = function.of({name: [one.get(name) for one in group] for name in _names(group)})
            else:
                values = list(each(function, group))
        except (Exception, SystemExit) as error:
            return {"error": f"{label} raised {type(error).__name__}: {str(error)[:500]}"}
        if not isinstance(values, (list, tuple)) or len(values) != len(group):
            shown = repr(values)[:100]
            return {"error": f"{label} returned {shown}; wanted a list of {len(group)} numbers"}
        scores: list[float | None] = []
        for value in values:
            score = None if value is None else as_float(value)
            if score is None and value is not None:
                shown = repr(value)[:100]
                return {
                    "error": f"{label} returned {shown} ({type(value).__name__}); wanted a number, or None"
                }
            if score is not None and not math.isfinite(score):
                return {"error": f"{label} returned {score}; wanted a finite number"}
            scores.append(score)
        columns.append(scores)
    rows = [list(row) for row in zip(*columns, strict=True)] if columns else [[] for _ in group]
    if columns and any(all(score is None for score in row) for row in rows):
        return {"error": "no function scored an answer: all returned None"}
    return {"scores": rows}


def _names(group: list[dict[str, Any]]) -> list[str]:
    """Of the fields that some answer has."""
    return list(dict.fromkeys(name for fields in group for name in fields))


def as_float(value: Any) -> float | None:
    """A number, or an array of one, as a float; None for what is neither: a text that reads as one, too."""
    if not hasattr(value, "__float__"):
        return None
    try:
        return float(value)
    except Exception:
        # Of an array of two, and what a class of the file's own may raise.
        return None


@contextlib.contextmanager
def speaking_json() -> Iterator[tuple[Iterable[str], Callable[[Any], None]]]:
    """The lines that a process reads, and what writes a value as a line. Whatever its code prints goes
    nowhere, what it reads is empty, and it ends with the process that started it."""
    with contextlib.suppress(OSError, AttributeError):
        end_with_parent(signal.SIGKILL)
    # Ctrl-C is for the trainer, which finishes its step.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        os.dup2(nowhere, descriptor)
    lines = os.fdopen(os.dup(0), encoding="utf-8")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def say(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    yield lines, say


def main() -> None:
    """Load the functions, say so, and score groups until the input ends."""
    with speaking_json() as (groups, say):
        order: dict[str, Any] = json.loads(sys.argv[1])
        given: list[dict[str, Any]] = order["functions"]
        functions: list[Score | GroupScore] = []
        for function in given:
            try:
                functions.append(load_function(function, order["columns"]))
            except Unusable as error:
                say({"error": str(error)})
                return
        say({"ready": len(functions)})
        labels = [str(function["label"]) for function in given]
        count = int(order["concurrency"])
        each = ThreadPoolExecutor(count).map if count > 1 else map
        for line in groups:
            say(score_group(functions, labels, json.loads(line), each=each))


if __name__ == "__main__":
    main()
