"""Small tasks that a model learns from random weights by reinforcement learning alone.

    python tools/rl_tasks.py make --task sum --out data/rl/sum.jsonl
    python tools/rl_tasks.py learn --task sum --seeds 3 --out runs/rl-learn

`make` writes the prompts of a task: `sum`, `a b =` with the answer (a + b) mod 10; `copy`, `a =` with the
answer a; `successor`, the same, to which an environment says `b =` with the next number b, to be answered
too; `calculator`, `a + b ?`, of which a calculator is to be asked `a + b`, and then its word to be given; or
`story`, first sentences of the quick start's stories. `learn` trains configs/run/rl-tiny.yaml on one of all
but the last, once for each seed, and prints the mean reward of the first step and of the last 20, of at most
1.20, or 2.40 of `successor` and 2.00 of `calculator`. `right` and `ends` are the rewards of that run;
`of_a_fox` is that of configs/run/rl-story.yaml; `varied` and `slowly_varied` those of `python -m
tools.bench`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from yuan_train.rl.worker import Calculator

CONFIG = Path(__file__).resolve().parents[1] / "configs/run/rl-tiny.yaml"
EQUALS, END, PLUS, ASKS = 10, 11, 12, 13
SIGNS = "0123456789=#+?"
REWARDS = {"right": 1.0, "ends": 0.2}
STEPS = {"sum": 150, "copy": 40, "successor": 100, "calculator": 200}
MOST = {"sum": 1.2, "copy": 1.2, "successor": 2.4, "calculator": 2.0}
"""What the rewards of an answer can be together."""
TWO_TURNS = (f"environment={__file__}:Successor", "generation.max_new_tokens=6")
CALCULATED = (
    *(f"environment={__file__}:Sum", "data.max_prompt_tokens=4", "generation.max_new_tokens=12"),
    *("model.vocab_size=14", "model.max_sequence_length=16", "optimizer.learning_rate=1e-3"),
    # Else an answer of one token weighs as much as a long one, and that a turn ends is unlearned at first.
    "algorithm.normalise=token",
    # Near the random weights of the start signs are still tried that no answer so far was right with.
    "algorithm.kl.coefficient=0.05",
)
TURNS: dict[str, tuple[tuple[str, ...], dict[str, float]]] = {
    "successor": (TWO_TURNS, {}),
    "calculator": (CALCULATED, {"so_far": 1.0}),
}
"""Tasks of two turns: what their runs have of their own, and their rewards beside the environment's."""


def right(completion_ids: list[int], answer: str) -> float:
    """1 if the first token is the answer."""
    return float(completion_ids[0] == int(answer))


def ends(completion_ids: list[int], ended: str) -> float:
    """1 if the answer ends behind its first token."""
    return float(ended == "stop" and len(completion_ids) == 2)


class Successor:
    """An environment of two turns: it says what comes after the number of the first one, to be repeated in
    the second. A turn gets 1 if its first token is right, and 0.2 if it ends behind that."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """The prompt is the row's."""
        self._wanted, self._is_second = int(row["answer"]), False

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """The reward of a turn, and the next number."""
        said = text.split()
        reward = float(said[:1] == [str(self._wanted)]) + 0.2 * (len(said) == 1)
        if self._is_second:
            return None, reward, True
        self._wanted, self._is_second = (self._wanted + 1) % 10, True
        return f"{self._wanted} {EQUALS}", reward, False


class Sum:
    """An environment of two turns: of the first one it says what the calculator has found, and the second one
    gets 1 if that is the answer."""

    def reset(self, row: Mapping[str, Any]) -> None:
        """The prompt is the row's."""
        self._calculator, self._is_second = Calculator(), False
        self._calculator.reset(row)

    def step(self, text: str) -> tuple[str | None, float, bool]:
        """The reward of a turn, and what the calculator says."""
        said = "".join(SIGNS[int(word)] for word in text.split())
        found, right, _ = self._calculator.step(said if self._is_second else f"{said}=")
        number = (found or "").strip()
        if self._is_second or not number.isdigit() or len(number) > 3:
            return None, right or 0.0, True
        self._is_second = True
        return " ".join(str(SIGNS.index(sign)) for sign in f"{number}?"), 0.0, False


def so_far(completion_ids: list[int], asked: str, answer: str) -> float:
    """The share of the policy's signs that are right up to the first wrong one, in both turns."""
    wanted = [SIGNS.index(sign) for sign in f"{asked}#{answer}?{answer}#"]
    own = [*range(len(asked) + 1), *range(len(wanted) - len(answer) - 1, len(wanted))]
    pairs = enumerate(zip(completion_ids, wanted, strict=False))
    wrong = next((place for place, (found, one) in pairs if found != one), len(completion_ids))
    return sum(place < wrong for place in own) / len(own)


def varied(completion_ids: list[int]) -> float:
    """A number of 0 to 1 that differs from answer to answer, whatever a policy has learned to say."""
    return sum(place * token for place, token in enumerate(completion_ids, 1)) % 7 / 6


def slowly_varied(completion_ids: list[int]) -> float:
    """The same, after 10 ms."""
    time.sleep(0.01)
    return varied(completion_ids)


def of_a_fox(completion: str) -> float:
    """1 if the story is of a fox."""
    return float("fox" in completion)


def prompts_of(task: str) -> list[dict[str, object]]:
    """Every prompt of a task once."""
    if task == "story":
        ways = [(name, place) for name in ("Anna", "Ben", "Clara", "David") for place in ("forest", "lake")]
        return [{"prompt": f"One day {name} walked to the {place}."} for name, place in ways]
    if task == "count":
        return [{"prompt_ids": [0]}]
    if task in ("copy", "successor"):
        return [{"prompt_ids": [a, EQUALS], "answer": str(a)} for a in range(10)]
    pairs = [(a, b) for a in range(10) for b in range(10)]
    if task == "calculator":
        asked = [(a, b, {"answer": str(a + b), "asked": f"{a}+{b}"}) for a, b in pairs]
        return [{"prompt_ids": [a, PLUS, b, ASKS], **words} for a, b, words in asked]
    return [{"prompt_ids": [a, b, EQUALS], "answer": str((a + b) % 10)} for a, b in pairs]


def make(task: str, path: Path) -> None:
    """Write the prompts of a task."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts_of(task)), encoding="utf-8")


def run_words(
    folder: Path, task: str, changes: Sequence[str], rewards: Mapping[str, float] = REWARDS
) -> list[str]:
    """The run of a task with weighted rewards, both of this file, as all commands get it."""
    make(task, folder / "prompts.jsonl")
    functions = ", ".join(f"{{python: '{__file__}:{name}', weight: {w}}}" for name, w in rewards.items())
    return [
        *("--config", str(CONFIG), f"data.prompts=[{{file: '{folder / 'prompts.jsonl'}'}}]"),
        f"reward.functions=[{functions}]",
        *("data.evaluation=", "evaluation.every=0", "checkpoint.directory=", "train.device=cpu", *changes),
    ]


def rewards(folder: Path) -> list[float]:
    """The mean reward of each step of a run whose log is there."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["reward"] for line in lines]


def learn(task: str, seed: int, folder: Path, overrides: list[str]) -> tuple[float, float]:
    """Train on a task; the mean reward of the first step, and of the last 20 steps. Raises SystemExit."""
    from yuan_train.cli.main import main as yuan_train

    own = [f"train.seed={seed}", f"train.steps={STEPS[task]}", f"log.directory={folder}", "log.every=50"]
    own.append("train.device=auto")
    changes, functions = TURNS.get(task, ((), REWARDS))
    words = run_words(folder, task, [*own, *changes, *overrides], functions)
    if code := yuan_train(["rl", *words]):
        raise SystemExit(code)
    found = rewards(folder)
    return found[0], statistics.fmean(found[-20:])


def main(arguments: list[str] | None = None) -> int:
    """Make a task, or learn it. Returns the exit code: 1 if a seed ends below 0.75."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["make", "learn"])
    parser.add_argument("--task", choices=[*STEPS, "story"], default="sum")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="learn: seeds 0 to N - 1")
    parser.add_argument("--out", type=Path, required=True, metavar="PATH", help="file, or folder for learn")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="learn: changes to the run")
    given = parser.parse_intermixed_args(arguments)
    if given.what == "make":
        make(given.task, given.out)
        return 0
    if given.task not in STEPS:
        parser.error(f"{given.task} is not learned from random weights; wanted one of {', '.join(STEPS)}")
    least = 1.2
    for seed in range(given.seeds):
        start = time.process_time()
        first, last = learn(given.task, seed, given.out / f"seed-{seed}", given.overrides)
        least = min(least, last)
        seconds = time.process_time() - start
        reached = f"{first:.2f} -> {last:.2f} of {MOST[given.task]:.2f}"
        print(f"seed {seed}: {reached}, {seconds:.0f} CPU s", flush=True)
    return int(least < 0.75)


if __name__ == "__main__":
    sys.exit(main())
