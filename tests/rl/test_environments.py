"""Answers of several turns: what an environment says is read and not trained, under any plan the same."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.hf_decoders import write_tokenizer
from tests.support.project import parse_plan
from tests.support.rl import (
    RLCase,
    assert_close,
    assert_same_run,
    read_lines,
    roles_of,
    run_rl,
    run_rl_cases,
    write_rl,
)
from tools import rl_tasks
from yuan_train.config.errors import ConfigError, TrainingError
from yuan_train.config.rl import EnvironmentConfig, load_rl, policy_run
from yuan_train.data.prompts import Prompt
from yuan_train.data.tokenizer import Tokenizer, continue_chat
from yuan_train.models.transformer import IGNORE_INDEX
from yuan_train.rl import generator
from yuan_train.rl.experience import Episode, Group, Sample, make_rows
from yuan_train.rl.helpers import Environments
from yuan_train.rl.sandbox import run_program
from yuan_train.rl.worker import Calculator, PythonPrograms, TextSearch, calculate, is_right

ECHO = """\
import os, time


class Echo:
    def reset(self, row):
        self.turns, self.ticket = 0, row["answer"]
        return None if row["answer"] % 2 else " ".join(map(str, row["prompt_ids"][:-1])) + " 9"

    def step(self, text):
        self.turns += 1
        said = [int(word) for word in text.split()]
        if self.turns == 3:
            return None, float(len(said)), True
        time.sleep(0.01 * (len(said) % 3))
        return "20 21" + " 22" * (len(said) % 3), 0.25 if said else None, False


class Bad(Echo):
    def step(self, text):
        if self.ticket % 4 == 1:
            raise KeyError("no")
        if self.ticket % 4 == 3:
            return "1", float("nan"), False
        return super().step(text)


class Hangs(Echo):
    def reset(self, row):
        if row["answer"] == 7:
            time.sleep(60)
        return super().reset(row)


class Differs(Echo):
    def reset(self, row):
        return str(9 + id(self) % 40)


class NoStep:
    def reset(self, row):
        return None


def told(turns, completion, ended):
    assert turns[-1] == completion and (ended == "limit" or len(turns) % 2)
    return len(turns) / 8
"""


def changes(folder: Path, kind: str = "Echo", **more: Any) -> tuple[str, ...]:
    """A run in which half of the vocabulary ends a turn."""
    (folder / "echo.py").write_text(ECHO)
    stops = list(range(32))
    return (
        f"environment={{python: '{folder / 'echo.py'}:{kind}', timeout: 600 s}}",
        f"reward={{functions: [{{python: '{folder / 'echo.py'}:told'}}], workers: 1}}",
        "generation.max_new_tokens=24",
        f"generation.stop_ids={stops}",
        *(f"{key.replace('__', '.')}={value}" for key, value in more.items()),
    )


def test_turns_are_the_same_under_any_plan(tmp_path: Path) -> None:
    """Of one process, two unlike pipelines, and engines apart; log-probabilities of training are those of the
    draws although what was said was read in pieces of other lengths. In flight nothing is too old."""
    path, overrides = write_rl(tmp_path), changes(tmp_path)
    run = policy_run(load_rl(path, overrides), sequence_length=32)
    plan = parse_plan(run, "2x3: 1@0 | 3@1,2 / 2x1: 4@3", schedule="zero_bubble", optimizer_sharding=True)
    alone = run_rl(RLCase(path, tmp_path / "alone", overrides=overrides))
    apart = {"sync": (0, ()), "flight": (1, ("generation.weights=in_flight", "train.steps=3"))}
    run_rl_cases(
        [
            RLCase(path, tmp_path / "plan", plan, overrides),
            *(
                RLCase(path, tmp_path / name, with_length(roles_of(path, staleness=age), 32), overrides + own)
                for name, (age, own) in apart.items()
            ),
        ]
    )
    for name in ("plan", "sync"):
        assert read_lines(tmp_path / name, "samples.jsonl") == read_lines(tmp_path / "alone", "samples.jsonl")
        keys = ("loss", "grad_norm", "reward", "entropy_estimate", "environment_tokens", "turns")
        assert_close(tmp_path / name, alone, *keys)
        assert all(line["log_prob_gap"]["max"] < 1e-12 for line in read_lines(tmp_path / name))
    assert all(line["turns"] > 1.5 and line["environment_tokens"] > 20 for line in alone)
    assert all(set(line["rewards"]) == {"told", "environment"} for line in alone)
    flight = read_lines(tmp_path / "flight")
    assert len(flight) == 3 and max(line["staleness_max"] for line in flight) <= 1
    assert all(line["turns"] > 1.5 and line["groups_failed"] == 0 for line in flight)
    assert [line["next_ticket"] for line in flight] == [2, 4, 6]


def with_length(roles: Any, length: int) -> Any:
    """An RL plan of longer sequences."""
    own = roles.roles
    policy = replace(own.policy, plan=replace(own.policy.plan, sequence_length=length))
    engines = replace(own.generation, plan=replace(own.generation.plan, sequence_length=length))
    return replace(roles, roles=replace(own, policy=policy, generation=engines))


def test_what_an_environment_says_is_not_trained() -> None:
    """It stands in the rows, and is neither a target nor counted."""
    episode = Episode(prompt_ids=(5,), drawn=(0, 1, 4), last_turn=4, turns=2, reward=1.0)
    several = Sample(0, 0, (7, 1, 30, 31, 8), (-1.0, -2.0, -3.0), "stop", episode)
    single = Sample(0, 1, (9, 1), (-1.0, -1.0), "stop")
    group = Group(0, Prompt((5,), "", None), (several, single), ((), ()), (1.0, 0.0))
    rows = make_rows([group], length=8, packed=False)
    assert rows.tokens[0, :5].tolist() == [5, 7, 1, 30, 31]
    free = IGNORE_INDEX
    assert rows.targets[0].tolist() == [7, 1, free, free, 8, free, free, free]
    assert rows.place[0].tolist() == [0, 1, -1, -1, 2, -1, -1, -1]
    assert rows.place[1].tolist()[:2] == [3, 4]


def test_killed_and_resumed_turns_are_the_same(tmp_path: Path) -> None:
    """In sync mode to the bit, however long environments take: replies join after as many rounds."""
    path, (_, *others) = write_rl(tmp_path), changes(tmp_path)
    others += [f"environment.python={tmp_path / 'echo.py'}:Echo", "evaluation.every=0"]
    for name, parts in {"whole": (4,), "parts": (1, 3, 4)}.items():
        save = (f"checkpoint.directory={tmp_path / name / 'c'}", "checkpoint.every=1")
        for steps in parts:
            own = (*others, *save, f"train.steps={steps}", f"environment.workers={len(parts)}")
            run_rl(RLCase(path, tmp_path / name, overrides=own))
    assert_same_run(tmp_path / "parts", tmp_path / "whole", "c/step-00000004")


def test_environments_at_fault_cost_their_groups(tmp_path: Path) -> None:
    """What raises, gives no number or is of two minds loses its group, and no other; or it ends the run."""
    path = write_rl(tmp_path)
    lines = run_rl(RLCase(path, tmp_path / "bad", overrides=changes(tmp_path, "Bad", train__steps=1)))
    assert lines[0]["groups_failed"] > 0
    kept = read_lines(tmp_path / "bad", "samples.jsonl")
    assert all(line["answer"] % 2 == 0 for line in kept)
    with pytest.raises(TrainingError, match=r"ticket \d+: the environment: (raised KeyError|step gave)"):
        run_rl(RLCase(path, tmp_path / "stop", overrides=(*changes(tmp_path, "Bad"), "reward.on_error=stop")))
    with pytest.raises(TrainingError, match="reset said something else for another answer"):
        run_rl(RLCase(path, tmp_path / "differs", overrides=changes(tmp_path, "Differs")))
    with pytest.raises(ConfigError, match="has no step; wanted reset"):
        run_rl(RLCase(path, tmp_path / "none", overrides=changes(tmp_path, "NoStep")))


def test_one_that_hangs_is_ended_with_its_process(tmp_path: Path) -> None:
    """Another process takes its place, and is asked as before."""
    (tmp_path / "echo.py").write_text(ECHO)
    config = EnvironmentConfig(python=f"{tmp_path / 'echo.py'}:Hangs", timeout=3.0, workers=1)
    with Environments(config) as environments:
        began = time.monotonic()
        for ticket in (7, 8):
            environments.call((ticket, 0), {"reset": {"answer": ticket, "prompt_ids": [4, 5]}})
        told = {said.key: said.told for said in (environments.take(), environments.take())}
        assert told[8, 0] == {"said": "4 9"} and "took longer than environment.timeout" in told[7, 0]["error"]
        assert time.monotonic() - began < 60
        environments.call((8, 0), {"step": "1"})
        assert "ended with its process" in environments.take().told["error"]
        environments.call((9, 0), {"reset": {"answer": 9}})
        assert environments.take().told == {"said": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("environment=nowhere", 'environment: wanted "file.py:Class" or one of calculator, python, search'),
        ("environment={name: search}", "environment.folder: wanted for search"),
        ("environment={name: python, folder: x}", "environment.folder: of search alone"),
        ("environment={turns: 2}", "environment: wanted either name"),
        ("environment={name: dice}", "environment.name"),
    ],
)
def test_keys_of_environments(tmp_path: Path, given: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_rl(write_rl(tmp_path), (given,))
    assert message in str(caught.value)


def test_an_environment_is_the_reward_unless_functions_are_given(tmp_path: Path) -> None:
    path = write_rl(tmp_path, reward={})
    assert [f.name for f in load_rl(path).reward.functions] == ["exact"]
    assert load_rl(path, ("environment=calculator",)).reward.functions == ()
    given = ("environment=calculator", "reward.functions=[{name: exact}]")
    assert [f.name for f in load_rl(path, given).reward.functions] == ["exact"]


def test_environments_that_are_built_in(tmp_path: Path) -> None:
    row = {"answer": "1,024"}
    calculator = Calculator()
    calculator.reset(row)
    assert calculator.step("so it is 4 * (250 + 6) =") == (" 1024", None, False)
    assert calculator.step("so 4 / 0 =") == (" error: float division by zero", None, False)
    assert calculator.step("-" * 998 + "1 =")[0] == " error: maximum recursion depth exceeded"
    assert calculator.step("It is 1024.") == (None, 1.0, True)
    with pytest.raises(ValueError, match="wanted numbers"):
        calculate("2 ** 9999999")
    programs = PythonPrograms()
    programs.reset(row)
    assert programs.step("Well\n```python\nprint(4 * 256)\n```") == ("\n```output\n1024\n```\n", None, False)
    said, _, done = programs.step("```python\nimport os\nos.fork()\n```")
    assert said is not None and "ended: it opened a socket or started a process" in said and not done
    assert programs.step("1023") == (None, 0.0, True)
    (tmp_path / "a.md").write_text("The capital of France is Paris.\n\nThe capital of Peru is Lima.\n\nElse.")
    search = TextSearch(str(tmp_path))
    search.reset({"answer": "Lima"})
    said, _, _ = search.step("<search>Peru's capital</search>")
    assert said is not None and said.index("Lima") < said.index("Paris") and "Else" not in said
    assert search.step("<answer>lima</answer>") == (None, 1.0, True)
    assert is_right("it is 12.0", 12) and not is_right("it is 13", 12) and not is_right("", "Lima")


PROGRAMS = {
    "import os\nos.fork()": "started a process",
    "import subprocess\nsubprocess.run(['true'])": None,
    "import os\nos.system('true')": "started a process",
    "import ctypes\nctypes.CDLL(None).fork()": "started a process",
    "import time\ntime.sleep(60)": "took longer",
    "while True: pass": "took longer",
    "import os\nos.close(1); os.close(2)\nwhile True: pass": "took longer",
    "while True: print('a' * 1000)": "printed more than",
    "import socket\nsocket.socket()": "opened a socket",
    "open('{folder}/new', 'w').write('a' * (5 << 30))": None,
    "a = b'a' * (5 << 30)": None,
    "import os\nos.remove('{folder}/old')": None,
    "import os\nos.kill({parent}, 9)": None,
    "import os\nos.truncate('{folder}/old', 0)": None,
    "import os\nos.open('{folder}/old', os.O_RDWR)": None,
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_harms_nothing(program: str, tmp_path: Path) -> None:
    """It is ended where it must be, and says what was refused to it elsewhere."""
    (tmp_path / "old").write_text("kept")
    text = program.replace("{folder}", str(tmp_path)).replace("{parent}", str(os.getpid()))
    ran = run_program(f"{text}\nprint('un' + 'harmed')", seconds=2, memory=1 << 29, most_output=3000)
    wanted = PROGRAMS[program]
    assert ran.ended is None if wanted is None else ran.ended is not None and wanted in ran.ended
    assert "unharmed" not in ran.output and ("Error" in ran.output or wanted is not None)
    assert [path.name for path in tmp_path.iterdir()] == ["old"] and (tmp_path / "old").read_text() == "kept"


def test_programs_that_do_no_harm_run() -> None:
    code = "import threading, math\nt = threading.Thread(target=lambda: print(math.pi))\nt.start()\nt.join()"
    assert run_program(code, seconds=5, memory=1 << 30, most_output=99).output == "3.141592653589793\n"
    error = run_program("1 / 0", seconds=5, memory=1 << 30, most_output=999).output
    assert error.endswith("ZeroDivisionError: division by zero\n") and "sandbox" not in error


def test_replies_in_a_chat_are_written_by_its_template(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    tokenizer = Tokenizer.load(tmp_path)
    text = continue_chat(tokenizer, [{"role": "user", "content": "and now?"}])
    assert "and now?" in text and "a question" not in text


def test_replies_join_later_than_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While environments work, the slots of other answers do not stand still."""
    path, overrides = write_rl(tmp_path), changes(tmp_path)
    rounds = {}
    for wait in (1, 4):
        monkeypatch.setattr(generator, "REPLY_ROUNDS", wait)
        own = (*overrides, "generation.slots=4", "train.steps=1")
        rounds[wait] = run_rl(RLCase(path, tmp_path / str(wait), overrides=own))[0]
    assert rounds[4]["rounds"] >= rounds[1]["rounds"]
    assert torch.isfinite(torch.tensor(rounds[4]["loss"]))
    assert rounds[4]["turns"] == rounds[1]["turns"], "what is said does not depend on when it is read"


@pytest.mark.slow
def test_two_turns_are_learned_from_random_weights(tmp_path: Path) -> None:
    """Each turn has a reward of 1.2, and what the second one wants the environment alone knows."""
    first, last = rl_tasks.learn("successor", 0, tmp_path, [])
    assert first < 0.3 and last > 2.0
