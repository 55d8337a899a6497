"""Trains a model by reinforcement learning: draws answers to prompts, scores them, and makes those more
probable that scored better. Without a plan, one process does everything. With one, start all ranks with
torchrun. SIGTERM saves a checkpoint and exits with 0."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from yuan_train.cli.launch import check_driver_of_rank
from yuan_train.cli.train import run_rank
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.rl import RLConfig, load_rl
from yuan_train.config.rl_plan import RlForecast, RlPlan, check_rl_plan_of_run, load_rl_plan, names_rl_plan
from yuan_train.parallel.environment import set_rank_defaults

if TYPE_CHECKING:
    from yuan_train.cli.train import PrepareRank
    from yuan_train.train.job import Position


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--config", required=True, metavar="FILE", help="the run file, with `algorithm`")
    add("--plan", metavar="FILE", help="the policy's plan, under which it also generates; or an RL plan")
    add("overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50")


def run(arguments: argparse.Namespace) -> int:
    """Check the files, then train."""
    set_rank_defaults()
    return run_rank(lambda: _read(arguments))


def _read(arguments: argparse.Namespace) -> PrepareRank:
    """Check the files; returns what prepares the run, or a role of it, of them."""
    config = load_rl(arguments.config, tuple(arguments.overrides))
    plan, roles, forecast = None, None, None
    if arguments.plan:
        plan, config, roles, forecast = _load_plan(arguments.plan, config)
        if config.train.device != "cpu":
            check_driver_of_rank(roles or plan)
    if roles is not None:
        return partial(_prepare_role, config, roles)

    def prepare_rank(position: Position) -> Callable[[], object]:
        from yuan_train.rl.job import prepare_rl
        from yuan_train.rl.loop import train_rl

        return partial(train_rl, prepare_rl(config, plan, position, forecast=forecast))

    return prepare_rank


def _load_plan(path: str, config: RLConfig) -> tuple[Plan, RLConfig, RlPlan | None, RlForecast | None]:
    """The policy's plan, the run with an RL plan's slots, that plan if some role is apart, its forecast."""
    if not names_rl_plan(path):
        return load_plan(path), config, None, None
    roles = load_rl_plan(path)
    check_rl_plan_of_run(roles, config)
    if "critic" in roles.plans:
        raise PlanError(
            f"{path}: roles.critic: cards of its own do not run yet; leave it out, and the policy's cards "
            "train the critic too"
        )
    generation = roles.roles.generation
    if generation.is_shared:
        config = replace(config, generation=replace(config.generation, slots=generation.slots))
    return roles.roles.policy.plan, config, roles if len(roles.plans) > 1 else None, roles.forecast


def _prepare_role(config: RLConfig, roles: RlPlan, position: Position) -> Callable[[], object]:
    """What one rank does of a job whose roles are apart."""
    from yuan_train.rl.apart import prepare_engine, serve
    from yuan_train.rl.job import check_supported, prepare_rl
    from yuan_train.rl.loop import train_rl
    from yuan_train.rl.roles import prepare_scoring, serve_scores
    from yuan_train.train.job import types_here

    if position.world_size != roles.world_size:
        raise PlanError(
            f"the plan has {roles.world_size} ranks, but {position.world_size} were started; start one per "
            "rank (yuan-train launch)"
        )
    position = replace(position, types=types_here(roles.ranks, position))
    role, ranks = next((name, own) for name, own in roles.role_ranks.items() if position.rank in own)
    own = replace(position, rank=position.rank - ranks.start, world_size=len(ranks))
    if role == "generation":
        return partial(serve, prepare_engine(config, roles, own))
    if role in ("reference", "reward"):
        check_supported(config, None, roles)
        return partial(serve_scores, prepare_scoring(config, roles, role, own))
    policy = roles.roles.policy.plan
    return partial(train_rl, prepare_rl(config, policy, own, roles=roles, forecast=roles.forecast))
