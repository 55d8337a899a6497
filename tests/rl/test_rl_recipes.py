"""What a run does with its prompts: as the file has them, and without those that are solved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.rl.test_apart import roles_of, run_cases
from tests.support.project import parse_plan
from tests.support.rl import RLCase, assert_same_run, read_lines, run_rl, run_rl_cases, write_rl
from tests.support.spawn import free_port, spawn
from yuan_train.cli.main import main
from yuan_train.config.errors import ConfigError
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.planner.roles.plan import _modes  # pyright: ignore[reportPrivateUsage]
from yuan_train.rl.job import check_supported

EASY = """\
def easy(answer):
    return float(answer % 2 == 0)
"""


def write_easy(folder: Path) -> tuple[Path, tuple[str, ...]]:
    """A run of ten prompts, of which every second is solved by any answer, and its overrides."""
    path = write_rl(folder)
    (folder / "easy.py").write_text(EASY)
    functions = f"[{{python: '{folder / 'easy.py'}:easy'}}, {{python: '{folder / 'rewards.py'}:evenness'}}]"
    return path, (f"reward.functions={functions}", "data.order=file", "data.skip_solved=1", "train.steps=9")


def asked(folder: Path) -> list[int]:
    return [line["answer"] for line in read_lines(folder, "samples.jsonl")]


def test_solved_prompts_are_left_out_of_an_epoch_under_any_plan_and_after_a_resume(tmp_path: Path) -> None:
    path, overrides = write_easy(tmp_path)

    def case(name: str, *more: str) -> RLCase:
        save = (f"checkpoint.directory={tmp_path / name / 'c'}", "checkpoint.every=3")
        return RLCase(path, tmp_path / name, None, (*overrides, *save, *more))

    whole = case("whole")
    run_rl(whole)
    wanted = [*range(10), 1, 3, 5, 7, 9, 0, 1, 2]
    assert asked(whole.folder) == wanted
    for steps in (3, 6, 9):
        run_rl(case("resumed", f"train.steps={steps}"))
    assert_same_run(tmp_path / "resumed", whole.folder, "c/step-00000009")
    # A run that has not looked for them begins to, with what it draws from then on.
    run_rl(case("later", "train.steps=3", "data.skip_solved=0"))
    run_rl(case("later"))
    assert asked(tmp_path / "later") == [*range(10), 0, 1, 2, 3, 4, 5, 7, 9]
    run = policy_run(load_rl(path, overrides), sequence_length=11)
    uneven = RLCase(path, tmp_path / "uneven", parse_plan(run, "2x4: 1@0 | 3@1"), overrides)
    run_rl_cases([uneven])
    roles = roles_of(path, staleness=0, policy="2x4: 4@0", engines="8x1: 4@0")
    apart = tmp_path / "apart"
    spawn(run_cases, 2, [(path, (*overrides, f"log.directory={apart}"), roles, free_port())])
    for folder in (uneven.folder, apart):
        assert read_lines(folder, "samples.jsonl") == read_lines(whole.folder, "samples.jsonl")
        for found, expected in zip(read_lines(folder), read_lines(whole.folder), strict=True):
            assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-9, abs=1e-12)


def test_solved_groups_that_the_filter_replaces_rest_as_well(tmp_path: Path) -> None:
    """All answers to a prompt that is solved have one reward; its place in the order is taken by the next."""
    path, overrides = write_easy(tmp_path)
    (tmp_path / "mixed.py").write_text(
        "def mixed(answer, sample):\n    return float(answer % 2 == 0 or sample % 2)\n"
    )
    mixed = f"reward.functions=[{{python: '{tmp_path / 'mixed.py'}:mixed'}}]"
    more = ("algorithm.filter=zero_variance", "train.steps=5", mixed)
    lines = run_rl(RLCase(path, tmp_path / "log", None, (*overrides, *more)))
    assert sum(line["groups_filtered"] for line in lines) == 5, "each once; the odd ones came twice"
    assert asked(tmp_path / "log") == [1, 3, 5, 7, 9, 1, 3, 5, 7, 9]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("schedule.mode=async",), "data.skip_solved: 1, but in async mode prompts are drawn before"),
        (("generation.weights=in_flight",), "data.skip_solved: 1, but in async mode"),
        (
            ("reward={functions: [], model: {checkpoint: r}}",),
            "data.skip_solved: 1, but no reward function says",
        ),
        (("data.order=random",), "data.order: .*random"),
    ],
)
def test_what_does_not_go_with_solved_prompts(
    tmp_path: Path, overrides: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_rl(tmp_path)
    assert main(["rl", "--config", str(path), "data.skip_solved=1", *overrides]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_a_plan_of_a_run_that_skips_solved_prompts_takes_turns(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    run = load_rl(path, ("data.skip_solved=1",))
    assert _modes(run) == ("sync",)
    with pytest.raises(ConfigError, match=r"with data.skip_solved it is sync"):
        _modes(load_rl(path, ("data.skip_solved=1", "search.modes=[async]")))
    with pytest.raises(ConfigError, match=r"data.skip_solved: 1, but in async mode .* plan again"):
        check_supported(run, None, roles_of(path, staleness=1))
