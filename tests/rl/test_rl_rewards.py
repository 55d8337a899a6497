"""Scores of answers in processes of their own: right, wrong, and all that a function may do."""

import dataclasses
import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import Quiet, answering
from yuan_train.config.errors import ConfigError
from yuan_train.config.rl import OverlongConfig, RewardConfig, RewardFunction
from yuan_train.parallel.transport import LostPeer
from yuan_train.rl.collect import reward_of
from yuan_train.rl.experience import Sample, Ticket, share_out
from yuan_train.rl.helpers import Scorers, Scores, ScoringThread
from yuan_train.rl.worker import Unusable, load_function, score_group

FUNCTIONS = """\
import os
import time

import numpy


def any_of_these(prompt, completion="", **more):
    print("megabytes" * 500_000)
    os.write(2, b"also here")
    if prompt == "raises":
        raise KeyError("no")
    if prompt == "hangs":
        time.sleep(60)
    if prompt == "ends":
        os._exit(3)
    odd = {"text": "1.0", "nan": float("nan"), "array": numpy.ones(2)}
    return odd.get(prompt, len(more["completion_ids"]) / 2)


def strange(colour):
    return 1


not_a_function = 1
"""


def fields(**changes: Any) -> dict[str, Any]:
    plain = {"prompt": "", "completion": "7", "answer": "7", "prompt_ids": [1], "completion_ids": [7]}
    return plain | {"ended": "stop", "ticket": 0, "sample": 0} | changes


@pytest.mark.parametrize(
    ("function", "completion", "answer", "score"),
    [
        ({"name": "exact"}, " 7\n", 7, 1),
        ({"name": "exact"}, "7.", "7", 0),
        ({"name": "number"}, "so 3 + 4 makes 1,007.0.", "1007", 1),
        ({"name": "number"}, "seven", 7, 0),
        ({"name": "number"}, "7 or 8", 7, 0),
        ({"name": "regex", "pattern": r"#### (.*)"}, "#### 6\n#### 7 ", "7", 1),
        ({"name": "regex", "pattern": r"#### (.*)"}, "7", "7", 0),
        ({"name": "format", "pattern": r"<a>.*</a>"}, "<a>\n</a> ", None, 1),
        ({"name": "format", "pattern": r"<a>.*</a>"}, "so <a></a>", None, 0),
    ],
)
def test_functions_that_are_built_in(
    function: dict[str, str], completion: str, answer: Any, score: float
) -> None:
    found = score_group([load_function(function)], ["f"], [fields(completion=completion, answer=answer)])
    assert found == {"scores": [[score]]}


STUB = """\
from threading import current_thread, main_thread


def parse(text, *, parsing_timeout):
    assert parsing_timeout is None, "an alarm is for the main thread alone"
    return [text.rpartition("{")[2].rstrip("}$").lstrip("$")] if "?" not in text else []


def verify(gold, found, *, timeout_seconds):
    assert timeout_seconds is None and current_thread() is not main_thread()
    return gold == found
"""


def test_mathematics_is_compared_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in threads. An answer without marks is a formula; one that has none in it fails the group."""
    (tmp_path / "math_verify.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    config = RewardConfig(functions=(RewardFunction(name="math"),), concurrency=2, timeout=60.0)
    says = "so \\boxed{7}"
    groups = [[fields(completion=says, answer=answer) for answer in (7, "$7$", "8")], [fields(answer="?")]]
    with Scorers(config) as scorers:
        right, odd = scorers.score(groups)
    assert right.of_answers == ((1.0,), (1.0,), (0.0,))
    assert odd.error == "math raised ValueError: math-verify reads no expression in the answer '?'"


def test_mathematics_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(Unusable, match=r"math needs the package math-verify .*pip install -e '.\[math\]'"):
        load_function({"name": "math"})


def test_mathematics_as_the_package_reads_it() -> None:
    pytest.importorskip("math_verify")
    score = load_function({"name": "math"})
    cases = [
        (r"\sqrt{8}", r"It is $2\sqrt{2}$.", 1),
        ("1/2", "so the answer is 0.5", 1),
        (r"$x^2 + 1$", r"\[1 + x^2\]", 1),
        ("{1, 2}", r"\boxed{\{2, 1\}}", 1),
        (7, "7 and then 8", 0),
        (7, "none", 0),
    ]
    for answer, completion, wanted in cases:
        found = score_group([score], ["math"], [fields(completion=completion, answer=answer)])
        assert found == {"scores": [[wanted]]}, answer


def test_what_a_function_may_do(tmp_path: Path) -> None:
    """Groups of two processes, in their order, whatever happened to those before."""
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    functions = (RewardFunction(name="exact"), RewardFunction(python=f"{file}:any_of_these"))
    cases = {
        "fine": None,
        "raises": "any_of_these raised KeyError: 'no'",
        "hangs": "took longer than reward.timeout (4 s)",
        "ends": "ended its process (exit code 3)",
        "text": "any_of_these returned '1.0' (str); wanted a number",
        "nan": "any_of_these returned nan; wanted a finite number",
        "array": "any_of_these returned array([1., 1.]) (ndarray); wanted a number",
        "fine again": None,
    }
    with Scorers(RewardConfig(functions=functions, timeout=4.0)) as scorers:
        found = scorers.score([[fields(), fields(prompt=prompt)] for prompt in cases])
    for (prompt, message), scores in zip(cases.items(), found, strict=True):
        if message is None:
            assert scores.of_answers == ((1.0, 0.5), (1.0, 0.5)), prompt
        else:
            assert scores.error is not None and message in scores.error


class _Scoring(Quiet):
    """Scores an answer by its length; of some prompts it says something else."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["query"] == [p + c for p, c in zip(asked["prompts"], asked["completion"], strict=True)]
        told: Any = {"rewards": [len(text) for text in asked["completion"]]}
        told = {"few": {"rewards": [1]}, "other": [1, 2]}.get(asked["prompt"][0], told)
        self.send_response(500 if asked["prompt"][0] == "fails" else 200)
        self.end_headers()
        self.wfile.write(json.dumps(told).encode())


def test_a_server_scores() -> None:
    cases = {
        "fine": None,
        "few": "score returned [1]; wanted a list of 2 numbers",
        "other": 'answered [1, 2]; wanted {"rewards": [...]}',
        "fails": "score raised HTTPError: HTTP Error 500",
    }
    with answering(_Scoring) as url:
        config = RewardConfig(functions=(RewardFunction(url=f"{url}/score"),), timeout=30.0)
        with Scorers(config) as scorers:
            found = scorers.score([[fields(prompt=p), fields(prompt=p, completion="")] for p in cases])
    assert found[0].of_answers == ((1.0,), (0.0,))
    for message, scores in list(zip(cases.values(), found, strict=True))[1:]:
        assert scores.error is not None and message is not None and message in scores.error


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("strange", "takes colour; wanted some of prompt, completion"),
        ("not_a_function", "has no function"),
        ("missing", "has no function 'missing'"),
    ],
)
def test_functions_that_cannot_be_used(tmp_path: Path, name: str, message: str) -> None:
    file = tmp_path / "functions.py"
    file.write_text(FUNCTIONS)
    with pytest.raises(Unusable, match=message):
        load_function({"python": f"{file}:{name}"})


def test_a_file_that_cannot_be_loaded_is_told_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nowhere_at_all\n")
    config = RewardConfig(functions=(RewardFunction(python=f"{tmp_path / 'broken.py'}:f"),))
    with (
        pytest.raises(ConfigError, match=r"reward.functions: .*No module named 'nowhere_at_all'"),
        Scorers(config),
    ):
        pass


def slow_file(folder: Path, *, fails: bool = False) -> RewardFunction:
    """A function whose file waits a minute for `slow.py.go` and takes 4 s more to import, or cannot be
    imported, except the first time; on 0 it hangs, on -1 it ends its process."""
    file = folder / "slow.py"
    slowly = (
        "end = time.monotonic() + 60\n"
        "    while not os.path.exists(__file__ + '.go') and time.monotonic() < end:\n"
        "        time.sleep(0.1)\n    time.sleep(4)"
    )
    again = "raise ImportError('changed')" if fails else slowly
    file.write_text(
        f"import os, time\n"
        f"marker = __file__ + '.loaded'\n"
        f"if os.path.exists(marker):\n    {again}\n"
        f"open(marker, 'w').close()\n"
        f"def f(ticket):\n"
        f"    if ticket == 0:\n        time.sleep(60)\n"
        f"    if ticket < 0:\n        os._exit(0)\n"
        f"    return ticket\n"
    )
    return RewardFunction(python=f"{file}:f")


def test_a_file_that_takes_longer_to_import_than_the_timeout_loses_no_group(tmp_path: Path) -> None:
    """Neither at the start, where the first process scores while the second one imports, nor behind a group
    that was given up: the one that hangs is the only one that is lost."""
    config = RewardConfig(functions=(slow_file(tmp_path),), timeout=2.0, workers=2)
    with Scorers(config) as scorers:
        began = time.monotonic()
        found = scorers.score([[fields(ticket=n)] for n in range(1, 7)])
        assert time.monotonic() - began < 60, "nobody waits for the second process"
        (tmp_path / "slow.py.go").touch()
        assert [scores.of_answers for scores in found] == [((float(n),),) for n in range(1, 7)]
        lost, *others = scorers.score([[fields(ticket=n)] for n in (0, 1, 2, 3)])
        assert lost.error is not None and "took longer than reward.timeout (2 s)" in lost.error
        assert [scores.of_answers for scores in others] == [((1.0,),), ((2.0,),), ((3.0,),)]


def test_functions_that_cannot_be_loaded_again_end_the_run_with_the_last_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = RewardConfig(functions=(slow_file(tmp_path, fails=True),), workers=2)
    with Scorers(config) as scorers:
        deadline = time.monotonic() + 60
        while not caplog.records:
            assert time.monotonic() < deadline
            found = scorers.score([[fields(ticket=n)] for n in range(1, 4)])
            assert [scores.of_answers for scores in found] == [((float(n),),) for n in range(1, 4)]
        assert "ImportError: changed" in caplog.text
        with pytest.raises(OSError, match="ImportError: changed"):
            scorers.score([[fields(ticket=n)] for n in (-1, 1)])


def test_a_process_that_ended_between_two_batches_loses_no_group() -> None:
    with Scorers(RewardConfig(workers=1)) as scorers:
        (process,) = [worker.process for worker in scorers._workers]  # pyright: ignore[reportPrivateUsage]
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert scorers.score([[fields()]])[0].of_answers == ((1.0,),)


def test_rewards() -> None:
    functions = (RewardFunction(name="exact"), RewardFunction(name="number", weight=0.5))
    config = RewardConfig(functions=functions, overlong=OverlongConfig(buffer=4, penalty=2.0))

    def reward(length: int, *scores: float, **changes: Any) -> float:
        ended = "limit" if length == 10 else "stop"
        sample = Sample(0, 0, (1,) * length, (0.0,) * length, ended)
        return reward_of(scores, sample, dataclasses.replace(config, **changes), max_new_tokens=10)

    assert reward(6, 1, 1) == 1.5
    assert reward(7, 1, 1) == 1.0  # one token of the buffer's four
    assert reward(10, 1, 1) == -0.5
    assert reward(10, 1, 1, truncated=-1.0) == -1.0
    assert reward(6, 1, 1, clip=(0.0, 1.2)) == 1.2


def test_prompts_are_shared_out_by_weight() -> None:
    tickets = [Ticket(n, (1,), 1) for n in range(8)]
    shared = share_out(tickets, [0.25, 0.75])
    assert [len(part) for part in shared] == [2, 6]
    assert sorted(t.number for part in shared for t in part) == list(range(8))  # type: ignore[type-var]
    assert share_out(tickets[:4], [0.25, 0.75]) == [part[: len(part) // 2] for part in shared]


GROUPS = """\
import threading

together = threading.Barrier(2, timeout=30)


def ranks(completion, difficulty):
    # Of all answers to a prompt.
    best = max(map(len, completion))
    return [float(len(text) == best) * hard for text, hard in zip(completion, difficulty)]


def short(completion):
    return [1.0]


def mine(answer, completion):
    return None if answer == "other" else float(completion == answer)


def both(sample):
    together.wait()
    return float(sample)
"""


def test_functions_of_a_group_with_columns_of_the_prompts_and_of_some_answers(tmp_path: Path) -> None:
    file = tmp_path / "groups.py"
    file.write_text(GROUPS)
    ranks = load_function({"python": f"{file}:ranks", "batch": True}, ["difficulty"])
    mine = load_function({"python": f"{file}:mine"})
    group = [fields(completion="77", difficulty=3), fields(difficulty=3)]
    assert score_group([ranks, mine], ["r", "m"], group) == {"scores": [[3.0, 0.0], [0.0, 1.0]]}
    others = [fields(answer="other", difficulty=1)]
    assert score_group([ranks, mine], ["r", "m"], others) == {"scores": [[1.0, None]]}
    assert "all returned None" in score_group([mine], ["m"], others)["error"]
    short = load_function({"python": f"{file}:short", "batch": True})
    assert "short returned [1.0]; wanted a list of 2" in score_group([short], ["short"], group)["error"]
    with pytest.raises(Unusable, match=r"ranks takes difficulty; wanted some of .* each line"):
        load_function({"python": f"{file}:ranks", "batch": True})


def test_a_process_scores_several_answers_at_once(tmp_path: Path) -> None:
    """Each of two waits until the other is scored too."""
    file = tmp_path / "groups.py"
    file.write_text(GROUPS)
    config = RewardConfig(functions=(RewardFunction(python=f"{file}:both"),), workers=1, concurrency=2)
    found: list[list[Scores] | str] = []
    with Scorers(config) as scorers:
        group = [fields(sample=0), fields(sample=1)]
        assert scorers.score([group]) == [Scores(((0.0,), (1.0,)))]
        done = threading.Event()
        with ScoringThread(scorers, 2) as beside:
            beside.score([group, group], found.append)

            def last(scores: list[Scores] | str) -> None:
                found.append(scores)
                done.set()

            beside.score([group], last)
            assert done.wait(30)
    assert [len(scores) for scores in found] == [2, 1] and found[1] == [Scores(((0.0,), (1.0,)))]


def test_a_thread_that_scores_ends_without_a_word_with_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who listens to a lost controller says so; and processes end under a thread that waits for them."""
    (tmp_path / "rewards.py").write_text(FUNCTIONS)
    said: list[object] = []
    monkeypatch.setattr(threading, "excepthook", said.append)
    config = RewardConfig(
        functions=(RewardFunction(python=f"{tmp_path / 'rewards.py'}:any_of_these"),), workers=1
    )

    def is_lost(_: list[Scores] | str) -> None:
        raise LostPeer("the controller is gone")

    with Scorers(config) as scorers, ScoringThread(scorers, 1) as beside:
        beside.score([[fields()]], is_lost)
    with pytest.raises(KeyError), Scorers(config) as scorers, ScoringThread(scorers, 1) as beside:
        # It may still be told of a worker that has ended, or of nothing.
        beside.score([[fields(prompt="hangs")]], lambda _: None)
        while scorers._workers[0].is_idle:
            time.sleep(0.01)
        raise KeyError
    beside._thread.join(20)
    assert not said and not beside._thread.is_alive()
