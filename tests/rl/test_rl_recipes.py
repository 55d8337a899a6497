"""Prompts as a file has them and without those that are solved, and a reference that is renewed."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from tests.rl.test_rl_scoring import plan_of
from tests.support.commands import Refuse
from tests.support.project import parse_plan
from tests.support.rl import (
    RLCase,
    assert_close,
    assert_same_run,
    facts,
    read_lines,
    roles_of,
    run_rl,
    run_rl_cases,
    write_rl,
)
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.config.rl_plan import GenerationPlan, ReferencePlan, RlPlan, RolePlan, RolePlans
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
    plans = {
        "uneven": parse_plan(run, "2x4: 1@0 | 3@1"),
        "apart": roles_of(path, staleness=0, policy="2x4: 4@0", engines="8x1: 4@0"),
    }
    few = (*overrides, "train.steps=6")
    run_rl_cases([RLCase(path, tmp_path / name, plan, few) for name, plan in plans.items()])
    for name in plans:
        assert asked(tmp_path / name) == wanted[:12]
        assert_close(tmp_path / name, read_lines(whole.folder)[:6], "grad_norm")


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
        (("algorithm.kl.renew=2",), "algorithm.kl.renew: 2, but there is no reference without a coefficient"),
        (("schedule.mode=async",), "data.skip_solved: 1, but in async mode prompts are drawn before"),
        (("generation.weights=in_flight",), "data.skip_solved: 1, but in async mode"),
        (
            ("reward={functions: [], model: {checkpoint: r}}",),
            "data.skip_solved: 1, but no reward function says",
        ),
        (("data.order=random",), "data.order: .*random"),
    ],
)
def test_what_is_refused(tmp_path: Path, overrides: tuple[str, ...], message: str, refuse: Refuse) -> None:
    path = write_rl(tmp_path)
    skip = [] if "renew" in overrides[0] else ["data.skip_solved=1"]
    assert re.search(message, refuse("rl", "--config", path, *skip, *overrides))


def test_a_plan_of_a_run_that_skips_solved_prompts_takes_turns(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    run = load_rl(path, ("data.skip_solved=1",))
    assert _modes(run) == ("sync",)
    with pytest.raises(ConfigError, match=r"with data.skip_solved it is sync"):
        _modes(load_rl(path, ("data.skip_solved=1", "search.modes=[async]")))
    with pytest.raises(ConfigError, match=r"data.skip_solved: 1, but in async mode .* plan again"):
        check_supported(run, None, roles_of(path, staleness=1))


RENEWED = ("algorithm.kl={coefficient: 0.1, renew: 2}", "train.steps=5", "algorithm.updates=2")
LORA = "lora={rank: 4, alpha: 8}"


def saved(path: Path, folder: Path, *more: str) -> RLCase:
    save = (f"checkpoint.directory={folder / 'c'}", "checkpoint.every=1", "checkpoint.keep=9")
    return RLCase(path, folder, None, (*RENEWED, *save, *more))


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), marks=pytest.mark.slow),
        pytest.param(("train.precision=bf16",), marks=pytest.mark.slow),
        (LORA, "train.precision=bf16"),
    ],
)
def test_a_renewed_reference_is_the_same_after_a_resume(tmp_path: Path, more: tuple[str, ...]) -> None:
    """Before the first renewal, at one, and between two; in bf16 the reference is not the masters."""
    path = write_rl(tmp_path)
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    lines = run_rl(saved(path, whole, *more))
    for steps in (1, 2, 3, 5):
        run_rl(saved(path, parts, f"train.steps={steps}", *more))
    assert_same_run(parts, whole, "c/step-00000005")
    fixed = run_rl(RLCase(path, tmp_path / "fixed", None, (*RENEWED, "algorithm.kl.renew=0", *more)))
    assert [line["kl"] for line in lines[:2]] == [line["kl"] for line in fixed[:2]]
    assert all(line["kl"] != other["kl"] for line, other in zip(lines[2:], fixed[2:], strict=True))
    # A reference that was renewed stays what it was, where it is not renewed any more.
    shutil.copytree(whole / "c/step-00000003", tmp_path / "stays/c/step-00000003")
    run_rl(saved(path, tmp_path / "stays", "train.steps=4", "algorithm.kl.renew=0", *more))
    assert facts(tmp_path / "stays") == facts(whole)[3:4]


def test_a_resumed_run_keeps_the_reference_that_it_began_with(tmp_path: Path) -> None:
    """Where the directory that it began with has a newer checkpoint by now, or has lost that one."""
    path, first = write_rl(tmp_path), tmp_path / "first"
    begins = saved(path, first, "train.steps=1", "checkpoint.directory=" + str(first))
    run_rl(begins)
    words = (f"start.checkpoint={first}", "algorithm.kl.renew=0")
    run_rl(saved(path, tmp_path / "whole", *words, "train.steps=2"))
    run_rl(saved(path, tmp_path / "parts", *words, "train.steps=1"))
    run_rl(replace(begins, overrides=(*begins.overrides, "train.steps=2")))
    run_rl(saved(path, tmp_path / "parts", *words, "train.steps=2"))
    assert_same_run(tmp_path / "parts", tmp_path / "whole", "c/step-00000002")
    shutil.rmtree(first / "step-00000001")
    for other, named in ((words[0], first), ("start.checkpoint=null", "none")):
        with pytest.raises(CheckpointError, match=f"{named}: the reference of .* step-00000001"):
            run_rl(saved(path, tmp_path / "parts", *words, "train.steps=3", other))


def test_the_divergence_is_zero_behind_a_renewal(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    lines = run_rl(RLCase(path, tmp_path / "log", None, (*RENEWED, "algorithm.updates=1")))
    assert [line["kl"] < 1e-20 for line in lines] == [True, False, True, False, True]
    assert lines[1]["kl"] > 1e-8 and lines[3]["kl"] > 1e-8


def with_reference(path: Path) -> RlPlan:
    """The policy's card draws and trains; the reference has two of its own."""
    roles = RolePlans(
        policy=RolePlan(plan=plan_of(path, "2x4: 4@0", "p")),
        generation=GenerationPlan(with_="policy", slots=8),
        reference=ReferencePlan(plan=plan_of(path, "2x4: 1@0 | 3@1", "f")),
    )
    return RlPlan(mode="sync", roles=roles)


@pytest.mark.slow
def test_a_renewed_reference_under_plans_and_on_cards_of_its_own(tmp_path: Path) -> None:
    """As in one process, also resumed between two renewals, or there under another plan."""
    path = write_rl(tmp_path)
    run = policy_run(load_rl(path, RENEWED), sequence_length=16)
    plan = parse_plan(run, "2x3: 1@0 | 3@1,2 / 2x1: 4@3", schedule="zero_bubble", optimizer_sharding=True)
    uneven = [
        replace(saved(path, tmp_path / name, f"train.steps={steps}"), plan=plan)
        for name, steps in (("uneven", 3), ("uneven", 5), ("moved", 3))
    ]
    fp32 = "train.precision=fp32"
    apart = [
        replace(saved(path, tmp_path / "apart", fp32, f"train.steps={steps}"), plan=with_reference(path))
        for steps in (3, 5)
    ]
    run_rl_cases([*uneven, *apart])
    run_rl(saved(path, tmp_path / "moved"))
    wanted = run_rl(saved(path, tmp_path / "alone"))
    for name in ("uneven", "moved"):
        assert_close(tmp_path / name, wanted, "loss", "grad_norm", "reward", "kl")
    run_rl(saved(path, tmp_path / "alone32", fp32))
    assert_same_run(tmp_path / "apart", tmp_path / "alone32", "c/step-00000005")
