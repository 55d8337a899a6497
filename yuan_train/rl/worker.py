"""A process that runs what users give, beside the policy: it scores answers, or environments live in it.

    python -m yuan_train.rl.worker scores ORDER
    python -m yuan_train.rl.worker environments ORDER

It reads a group of answers, or a request, as a line of JSON, and answers with a line. What it runs prints
nowhere. A process of its own, so that one that hangs can be ended. Knows no torch.

To score, ORDER is JSON: `functions`, a list of `RewardFunction`s; `columns`, the names of what prompts have
beside FIELDS; `concurrency`, how many answers are scored at once.

Of environments, ORDER is an `EnvironmentConfig`'s name, python and folder. A request is
{"id": [ticket, number, call]} with `reset`, a prompt's line, or `step`, what the policy said; or
{"forget": ticket}. Each answer to a prompt has an environment of its own. Those that wait for something do
not keep the others waiting: a call has a thread.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import importlib
import importlib.util
import inspect
import json
import math
import operator
import os
import platform
import re
import signal
import sys
import threading
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from yuan_train.config.errors import end_with_parent
from yuan_train.rl.sandbox import filter_program, run_program

# --- scores -------------------------------------------------------------------------------------------------

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


# --- environments -------------------------------------------------------------------------------------------

CALLS_AT_ONCE = 64
"""Calls of a process that may wait at a time."""
PROGRAM_SECONDS, PROGRAM_MEMORY, PROGRAM_OUTPUT = 5.0, 1 << 30, 4000
"""What a program of the policy may take: seconds, bytes of memory, characters of output."""
PASSAGES = 3
"""That a search finds, at most."""

Step = tuple[str | None, float | None, bool]
"""What an environment says (None: nothing), its reward (None: none), and whether the answer is at its end."""


def is_right(said: str, answer: Any) -> bool:
    """Whether what was said last is the answer: its last number, if the answer is one; else its words."""
    wanted = last_number(str(answer))
    if wanted is not None and str(answer).strip().replace(",", "").lstrip("+-").replace(".", "").isdigit():
        found = last_number(said)
        return found is not None and math.isclose(found, wanted, rel_tol=1e-9)
    tagged = re.findall(r"<answer>(.*?)</answer>", said, re.DOTALL)
    return _words(tagged[-1] if tagged else said) == _words(str(answer))


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


class Calculator:
    """A turn that ends with `=` is calculated, from where its expression begins; another one is the answer,
    and gets 1 if it is right."""

    _EXPRESSION = re.compile(r"([-+*/%(). \d]+)=\s*$")

    def reset(self, row: Mapping[str, Any]) -> None:
        """The prompt is the row's."""
        self._answer = row.get("answer")

    def step(self, text: str) -> Step:
        asked = self._EXPRESSION.search(text)
        if asked is None:
            return None, float(is_right(text, self._answer)), True
        try:
            return f" {calculate(asked.group(1)):.12g}", None, False
        except (ArithmeticError, RecursionError, SyntaxError, ValueError) as error:
            return f" error: {error}", None, False


_OPERATIONS: Mapping[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> float:
    """The value of numbers with + - * / // % and brackets. Raises ArithmeticError, RecursionError,
    SyntaxError or ValueError."""

    def value_of(node: ast.expr) -> float:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            return float(node.value)
        if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value_of(node.left), value_of(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATIONS:
            return _OPERATIONS[type(node.op)](value_of(node.operand))
        raise ValueError("wanted numbers and + - * / // %")

    if len(expression) > 1000:
        raise ValueError("too long")
    return value_of(ast.parse(expression.strip(), mode="eval").body)


class PythonPrograms:
    """The last block ```python of a turn is run (see `sandbox`), and what it prints is said; a turn without
    one is the answer, and gets 1 if it is right."""

    _BLOCK = re.compile(r"```(?:python|py)\s*\n(.*?)(?:```|$)", re.DOTALL)

    def __init__(self) -> None:
        """Raises OSError where no program can be confined."""
        filter_program(platform.machine())

    def reset(self, row: Mapping[str, Any]) -> None:
        """The prompt is the row's."""
        self._answer = row.get("answer")

    def step(self, text: str) -> Step:
        blocks = self._BLOCK.findall(text)
        if not blocks:
            return None, float(is_right(text, self._answer)), True
        ran = run_program(
            blocks[-1], seconds=PROGRAM_SECONDS, memory=PROGRAM_MEMORY, most_output=PROGRAM_OUTPUT
        )
        ended = f"[ended: {ran.ended}]\n" if ran.ended is not None else ""
        printed = ran.output if not ran.output or ran.output.endswith("\n") else ran.output + "\n"
        return f"\n```output\n{printed}{ended}```\n", None, False


class TextSearch:
    """`<search>words</search>` in a turn is looked up in a folder of texts (Okapi BM25, Robertson and
    Zaragoza 2009, k1 = 1.2, b = 0.75); a turn without it is the answer, and gets 1 if it is right."""

    _ASKED = re.compile(r"<search>(.*?)</search>", re.DOTALL)

    def __init__(self, folder: str) -> None:
        """Raises Unusable for a folder without texts."""
        self._index = _index(folder)

    def reset(self, row: Mapping[str, Any]) -> None:
        """The prompt is the row's."""
        self._answer = row.get("answer")

    def step(self, text: str) -> Step:
        asked = self._ASKED.findall(text)
        if not asked:
            return None, float(is_right(text, self._answer)), True
        found = "\n".join(self._index.find(asked[-1])) or "nothing found"
        return f"\n<found>\n{found}\n</found>\n", None, False


class _Index:
    def __init__(self, passages: list[str]) -> None:
        self._passages = passages
        self._counts = [Counter(_words(passage)) for passage in passages]
        self._sizes = [sum(counts.values()) for counts in self._counts]
        self._mean = sum(self._sizes) / max(len(passages), 1)
        self._holders = Counter(word for counts in self._counts for word in counts)

    def find(self, query: str) -> list[str]:
        """The passages that match best; of equals the first."""
        words = [word for word in dict.fromkeys(_words(query)) if word in self._holders]
        total = len(self._passages)
        scores: list[tuple[float, int]] = []
        for number, (counts, size) in enumerate(zip(self._counts, self._sizes, strict=True)):
            score = 0.0
            for word in words:
                rare = math.log(1 + (total - self._holders[word] + 0.5) / (self._holders[word] + 0.5))
                often = counts[word]
                score += rare * often * 2.2 / (often + 1.2 * (0.25 + 0.75 * size / self._mean))
            if score:
                scores.append((-score, number))
        return [self._passages[number] for _, number in sorted(scores)[:PASSAGES]]


@functools.cache
def _index(folder: str) -> _Index:
    try:
        files = sorted(path for path in Path(folder).rglob("*") if path.suffix in (".txt", ".md"))
        texts = [path.read_text(encoding="utf-8", errors="replace") for path in files]
    except OSError as error:
        raise Unusable(f"{folder}: {error}") from None
    passages = [part.strip() for text in texts for part in re.split(r"\n\s*\n", text) if part.strip()]
    if not passages:
        raise Unusable(f"{folder}: no text in .txt or .md files to search")
    return _Index(passages)


def load_environment(order: Mapping[str, Any]) -> Callable[[], Any]:
    """What makes an environment, tried once. Raises Unusable."""
    if order["name"] is not None:
        folder = str(order["folder"])
        shipped: dict[str, Callable[[], Any]] = {
            "calculator": Calculator,
            "python": PythonPrograms,
            "search": functools.partial(TextSearch, folder),
        }
        make = shipped[str(order["name"])]
    else:
        file, _, attribute = str(order["python"]).rpartition(":")
        make = getattr(import_file(file), attribute, None)
        if not callable(make):
            raise Unusable(f"{file} has no class {attribute!r}")
    try:
        made = make()
    except Unusable:
        raise
    except BaseException as error:
        what = order["name"] or order["python"]
        raise Unusable(f"{what} cannot be made: {type(error).__name__}: {error}") from error
    for name in ("reset", "step"):
        if not callable(getattr(made, name, None)):
            raise Unusable(f"{order['python']} has no {name}; wanted reset(row) and step(text)")
    return make


class Instances:
    """The environments of a process."""

    def __init__(self, make: Callable[[], Any], say: Callable[[Any], None]) -> None:
        self._make, self._say = make, say
        self._lock = threading.Lock()
        self._held: dict[tuple[int | str, int], Any] = {}

    def answer(self, request: Mapping[str, Any]) -> None:
        """Make a call, and say what came of it."""
        ticket, number, call = request["id"]
        try:
            told = self._reply(request, (ticket, number))
        except BaseException as error:
            told = {"error": f"raised {type(error).__name__}: {str(error)[:500]}"}
        with self._lock:
            self._say({"id": [ticket, number, call], **told})

    def _reply(self, request: Mapping[str, Any], key: tuple[int | str, int]) -> dict[str, Any]:
        if "reset" in request:
            held = self._held[key] = self._make()
            told = held.reset(request["reset"])
            return {"said": told} if _is_said(told) else {"error": f"reset returned {_show(told)}; {_RESET}"}
        if key not in self._held:
            return {"error": "ended with its process, in which another one did not answer in time"}
        told = self._held[key].step(request["step"])
        if not isinstance(told, tuple | list) or len(told) != 3 or not _is_said(told[0]):
            return {"error": f"step returned {_show(told)}; wanted (text or None, reward or None, done)"}
        said, given, done = told
        reward = None if given is None else as_float(given)
        if given is not None and (reward is None or not math.isfinite(reward)):
            return {"error": f"step gave the reward {_show(given)}; wanted a finite number, or None"}
        return {"said": said, "reward": reward, "done": bool(done) or said is None}

    def forget(self, ticket: int | str) -> None:
        """Let go of the environments of a ticket."""
        for key in [key for key in list(self._held) if key[0] == ticket]:
            self._held.pop(key, None)


_RESET = "wanted text, messages of a chat, or None"


def _is_said(told: Any) -> bool:
    if told is None or isinstance(told, str):
        return True
    keys = ("role", "content")
    return (
        isinstance(told, list)
        and len(told) > 0
        and all(isinstance(one, dict) and all(isinstance(one.get(k), str) for k in keys) for one in told)
    )


def _show(value: Any) -> str:
    return repr(value)[:100]


# --- the process --------------------------------------------------------------------------------------------


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


def _serve_scores(order: dict[str, Any]) -> None:
    """Load the functions, say so, and score groups until the input ends."""
    with speaking_json() as (groups, say):
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


def _serve_environments(order: dict[str, Any]) -> None:
    """Load the environment, say so, and answer until the input ends."""
    with speaking_json() as (requests, say):
        try:
            make = load_environment(order)
        except Unusable as error:
            say({"error": str(error)})
            return
        say({"ready": True})
        instances = Instances(make, say)
        calls = ThreadPoolExecutor(CALLS_AT_ONCE)
        for line in requests:
            request = json.loads(line)
            if "forget" in request:
                instances.forget(request["forget"])
            else:
                calls.submit(instances.answer, request)


if __name__ == "__main__":
    serve = {"scores": _serve_scores, "environments": _serve_environments}[sys.argv[1]]
    serve(json.loads(sys.argv[2]))
