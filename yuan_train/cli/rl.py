"""yuan-train rl --config F [--plan F]: reinforcement learning, as a single process or as one rank."""

from __future__ import annotations

import argparse
from dataclasses import replace
from functools import partial

from yuan_train.cli.launch import check_driver_of_rank
from yuan_train.cli.train import ending_in_time, say_without_torch, set_log_levels
from yuan_train.config.errors import PlanError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.rl import RLConfig, load_rl
from yuan_train.config.rl_plan import RlForecast, RlPlan, check_rl_plan_of_run, load_rl_plan, names_rl_plan
from yuan_train.parallel.environment import set_rank_defaults


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "rl",
        help="train a model by reinforcement learning",
        description="Trains a model by reinforcement learning: draws answers to prompts, scores them, and "
        "makes those more probable that scored better. Without a plan, one process does everything. With "
        "one, start all ranks with torchrun. SIGTERM saves a checkpoint and exits with 0.",
    )
    parser.add_argument("--config", required=True, metavar="FILE", help="the run file, with `algorithm`")
    parser.add_argument(
        "--plan", metavar="FILE", help="the policy's plan, under which it also generates; or an RL plan"
    )
    parser.add_argument(
        "overrides", nargs="*", metavar="key=value", help="changes to the run, such as train.steps=50"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Check the files, then train. What one rank finds wrong ends all, and is printed once per machine."""
    set_rank_defaults()
    config, plan, roles, forecast = None, None, None, None
    fault: Exception | KeyboardInterrupt | None = None
    try:
        config = load_rl(arguments.config, tuple(arguments.overrides))
        if arguments.plan:
            plan, config, roles, forecast = _load_plan(arguments.plan, config)
            if config.train.device != "cpu":
                check_driver_of_rank(roles or plan)
    except Exception as error:
        say_without_torch(error)
        config, fault = None, error
    if config is not None and roles is not None:
        return _run_role(config, roles)
    with ending_in_time(fault):
        from yuan_train.rl.job import prepare_rl
        from yuan_train.rl.loop import train_rl
        from yuan_train.train.ending import fail_together, telling_interrupts
        from yuan_train.train.job import find_position

        position = find_position()
        set_log_levels(position.rank)
        if config is not None:
            try:
                job = prepare_rl(config, plan, position, forecast=forecast)
            except (Exception, KeyboardInterrupt) as error:
                fault = error
            else:
                with telling_interrupts(position):
                    train_rl(job)
                return 0
        assert fault is not None
        fail_together(fault, position)


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


def _run_role(config: RLConfig, roles: RlPlan) -> int:
    """One rank of a job whose roles are apart."""
    from yuan_train.rl.apart import prepare_engine, serve
    from yuan_train.rl.job import check_supported, prepare_rl
    from yuan_train.rl.loop import train_rl
    from yuan_train.rl.scoring import prepare_scoring, serve_scores
    from yuan_train.train.ending import fail_together, telling_interrupts
    from yuan_train.train.job import find_position, types_here

    position = find_position()
    if position.world_size != roles.world_size:
        raise PlanError(
            f"the plan has {roles.world_size} ranks, but {position.world_size} were started; start one per "
            "rank (yuan-train launch)"
        )
    position = replace(position, types=types_here(roles.ranks, position))
    role, ranks = next((name, own) for name, own in roles.role_ranks.items() if position.rank in own)
    own = replace(position, rank=position.rank - ranks.start, world_size=len(ranks))
    set_log_levels(position.rank)
    try:
        if role == "generation":
            start = partial(serve, prepare_engine(config, roles, own))
        elif role in ("reference", "reward"):
            check_supported(config, None, roles)
            start = partial(serve_scores, prepare_scoring(config, roles, role, own))
        else:
            policy = roles.roles.policy.plan
            start = partial(train_rl, prepare_rl(config, policy, own, roles=roles, forecast=roles.forecast))
    except (Exception, KeyboardInterrupt) as error:
        fail_together(error, position)
    with telling_interrupts(position):
        start()
    return 0
