"""A process in which environments live: requests come as lines of JSON, replies go as such. Knows no torch.

    python -m yuan_train.rl.environment_worker ORDER

ORDER is JSON: an `EnvironmentConfig`'s name, python and folder. A request is {"id": [ticket, number, call]}
with `reset`, a prompt's line, or `step`, what the policy said; or {"forget": ticket}. Each answer to a prompt
has an environment of its own. Those that wait for something do not keep the others waiting: a call has a
thread. What they print goes nowhere.
"""

from __future__ import annotations

import ast
import functools
import json
import math
import operator
import platform
import re
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from yuan_train.rl.reward_worker import Unusable, as_float, import_file, last_number, speaking_json
from yuan_train.rl.sandbox import filter_program, run_program

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
        except (ArithmeticError, SyntaxError, ValueError) as error:
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
    """The value of numbers with + - * / // % and brackets. Raises ArithmeticError, SyntaxError or
    ValueError."""

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
        except (Exception, SystemExit) as error:
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


def main() -> None:
    """Load the environment, say so, and answer until the input ends."""
    with speaking_json() as (requests, say):
        try:
            make = load_environment(json.loads(sys.argv[1]))
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
    main()
