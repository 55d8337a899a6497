"""Generation and training under plans, against one process: the same tokens, the same loss and gradient."""

from pathlib import Path

import pytest

from tests.support.project import parse_plan
from tests.support.rl import RLCase, assert_close, read_lines, run_rl, run_rl_cases, write_rl
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.planner.roles import engines
from yuan_train.rl.generator import num_groups

PLANS = {
    "uneven": ("2x4: 1@0 | 3@1,2", "1f1b", False),
    "pipelines": ("2x3: 1@0 | 3@1,2 / 2x1: 4@3", "zero_bubble", True),
    "replicas": ("2x4: 2@0;1 | 2@2", "gpipe", True),
    "wide": ("4x2: 4@0,1,2,3", "1f1b", False),
}
MORE_PLANS = {
    "virtual": ("2x4: 1@0 | 1@1 | 1@0 | 1@1", "interleaved_1f1b", False),
    "pairs": ("1x4: 4@0,1 / 1x4: 2@2 | 2@3", "1f1b", True),
    "alike": ("2x2: 4@0 / 2x2: 4@1", "1f1b", False),
    "unpacked": ("2x4: 3@0 | 1@1", "1f1b", False),
}
KL = ("algorithm.kl={coefficient: 0.1}", "algorithm.updates=2", "generation.temperature=0.7")
OVERRIDES = {"pipelines": KL, "unpacked": ("train.steps=1", "train.pack=false")}
"""Of a plan's run, and of the run of one process that it is held against."""


def test_the_plan_changes_nothing(tmp_path: Path) -> None:
    cases = cases_of(tmp_path, PLANS, OVERRIDES)
    once = (*KL, "train.steps=1")
    plan = cases["pipelines"].plan
    broken = RLCase(tmp_path / "run.yaml", tmp_path / "broken", plan, once, without="sharded_grad_reduce")
    run_rl_cases([*cases.values(), broken])
    check(tmp_path, cases)
    norms = [read_lines(tmp_path / name)[0]["grad_norm"] for name in ("broken", "pipelines")]
    assert norms[0] != pytest.approx(norms[1], rel=1e-6)


@pytest.mark.slow
def test_nor_do_other_plans(tmp_path: Path) -> None:
    cases = cases_of(tmp_path, MORE_PLANS, OVERRIDES)
    run_rl_cases([*cases.values()])
    check(tmp_path, cases)


def cases_of(
    folder: Path, plans: dict[str, tuple[str, str, bool]], changes: dict[str, tuple[str, ...]]
) -> dict[str, RLCase]:
    """By plan, with the changes for it, or of one step where there are none."""
    path = write_rl(folder)
    cases: dict[str, RLCase] = {}
    for name, (text, schedule, sharding) in plans.items():
        overrides = changes.get(name, ("train.steps=1",))
        run = policy_run(load_rl(path, overrides), sequence_length=16)
        plan = parse_plan(run, text, schedule=schedule, optimizer_sharding=sharding)
        cases[name] = RLCase(path, folder / name, plan, overrides)
    return cases


def check(folder: Path, cases: dict[str, RLCase]) -> None:
    """Every answer's tokens as in one process, and losses and gradients up to rounding."""
    alone = {
        overrides: folder / f"alone-{len(overrides)}" for overrides in {c.overrides for c in cases.values()}
    }
    for overrides, log in alone.items():
        run_rl(RLCase(folder / "run.yaml", log, None, overrides))
    for name, case in cases.items():
        expected = alone[case.overrides]
        assert read_lines(case.folder, "samples.jsonl") == read_lines(expected, "samples.jsonl"), name
        keys = ("loss", "grad_norm", "reward", "entropy_estimate", "ratio_max", "kl")
        assert_close(case.folder, expected, *keys)
        for line, wanted in zip(read_lines(case.folder), read_lines(expected), strict=True):
            assert line["log_prob_gap"]["max"] < 1e-12
            # No slot is in a group that its prompt's answers do not fill: all are written at once, as alone.
            assert line["rounds"] == wanted["rounds"] > 0, name


@pytest.mark.parametrize(
    ("stages", "slots", "group", "groups"),
    [(1, 128, 8, 1), (2, 128, 8, 8), (2, 128, 32, 4), (2, 128, 64, 2), (3, 128, 8, 8), (2, 2, 4, 1)],
)
def test_a_group_of_slots_holds_the_answers_to_whole_prompts(
    stages: int, slots: int, group: int, groups: int
) -> None:
    """16 prompts in 12 groups would be two waves; in 8 they are one. The planner counts as many groups of the
    slots that it gives."""
    assert num_groups(stages, slots=slots, group=group) == groups
    for given in range(1, 40):
        planned = engines.num_groups(stages, given)
        each = given // planned
        assert num_groups(stages, slots=planned * each * group, group=group) == planned
