"""`yuan-train plan` with a run of reinforcement learning: which cards train, and which generate."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yuan_train.config.model import ModelConfig
    from yuan_train.config.rl import RLConfig


def plan_roles(arguments: argparse.Namespace) -> int:
    """Search, write, print. Raises ConfigError for wrong input, NoPlanFits if no placement fits."""
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.errors import ConfigError
    from yuan_train.config.load import write_text
    from yuan_train.config.profile import read_profiles
    from yuan_train.config.rl import load_rl
    from yuan_train.config.rl_plan import save_rl_plan
    from yuan_train.planner.report.roles_page import roles_html
    from yuan_train.planner.report.roles_text import roles_answer, roles_json, roles_table
    from yuan_train.planner.roles.plan import make_rl_plan, roles_problem
    from yuan_train.planner.roles.search import search_roles

    for option in ("model", "emit", "largest"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option}: not with a run of reinforcement learning; leave it out")
    run = load_rl(arguments.config, tuple(arguments.overrides))
    cluster = load_cluster(arguments.cluster)
    profile = read_profiles(arguments.profile, cluster)
    problem = roles_problem(run, cluster, profile, reward_model=read_reward_model(run))
    result = search_roles(problem)
    plan = make_rl_plan(problem, result)
    if arguments.report:
        write_text(arguments.report, roles_html(result, problem, plan))
    if arguments.out:
        save_rl_plan(arguments.out, plan)
    if arguments.json:
        print(json.dumps(roles_json(result, plan, path=arguments.out)))
        return 0
    config = shlex.join(["--config", arguments.config, *arguments.overrides])
    given = f"{config} --cluster {shlex.quote(arguments.cluster)}"
    following = f"yuan-train launch {config} --plan {shlex.quote(arguments.out)}" if arguments.out else None
    answer = roles_answer(
        result,
        problem,
        plan,
        num_steps=run.train.steps,
        measure=f"yuan-train profile {given} --out profile.json (on each node; then plan with --profile)",
        next_command=following or f"yuan-train plan {given} --out plan.yaml",
    )
    print(roles_table(result, problem, plan, answer=answer))
    for path in (arguments.out, arguments.report):
        if path:
            print(f"written: {path}", file=sys.stderr)
    return 0


def read_reward_model(run: RLConfig) -> ModelConfig | None:
    """The reward model that a run scores with; None if functions score. Raises CheckpointError."""
    if run.reward.model is None:
        return None
    from yuan_train.checkpoint.load import find_checkpoint

    return find_checkpoint(run.reward.model.checkpoint).model
