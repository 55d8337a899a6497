"""`yuan-train simulate` with an RL plan: plays the flow of its roles in virtual time."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yuan_train.config.rl_plan import RlPlan
    from yuan_train.planner.roles.play import Play


def simulate_roles(arguments: argparse.Namespace) -> int:
    """Play, print, write the trace. Raises PlanError if the plan has no forecast and no cluster is given."""
    from yuan_train.config.errors import ConfigError
    from yuan_train.config.rl_plan import load_rl_plan

    plan = load_rl_plan(arguments.plan)
    if arguments.cluster and not arguments.config:
        raise ConfigError("--cluster: needs --config F too, for the lengths and groups of the run")
    if arguments.config and not arguments.cluster:
        raise ConfigError("--config: needs --cluster F too; without both, seconds are those of the forecast")
    played = _priced(arguments, plan) if arguments.cluster else _of_forecast(plan)
    document = _document(plan, played)
    if arguments.trace:
        _write_trace(arguments.trace, played)
    if arguments.json:
        print(json.dumps(document))
    else:
        _print(plan, played)
    if arguments.trace:
        print(f"written: {arguments.trace} (open it at ui.perfetto.dev)", file=sys.stderr)
    return 0


def _priced(arguments: argparse.Namespace, plan: RlPlan) -> Play:
    from yuan_train.cli.plan_rl import read_reward_model
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.profile import read_profiles
    from yuan_train.config.rl import load_rl
    from yuan_train.config.rl_plan import check_rl_plan_of_run
    from yuan_train.planner.roles.plan import placement_of, roles_problem

    run = load_rl(arguments.config, tuple(arguments.overrides))
    check_rl_plan_of_run(plan, run)
    cluster = load_cluster(arguments.cluster)
    profile = read_profiles(arguments.profile, cluster)
    problem = roles_problem(run, cluster, profile, reward_model=read_reward_model(run))
    return placement_of(problem, plan).play


def _of_forecast(plan: RlPlan) -> Play:
    """The flow with the seconds of the plan's forecast."""
    from yuan_train.config.errors import PlanError
    from yuan_train.planner.roles.play import FlowTimes, play

    forecast, shared = plan.forecast, plan.roles.generation.is_shared
    if forecast is None:
        raise PlanError("forecast: missing; give --cluster F and --config F to price the plan")
    count = 1 if shared else len(plan.engine_shares)
    busy = forecast.generation_seconds + forecast.tail_seconds
    if plan.staleness:
        busy += forecast.sync_seconds
    times = FlowTimes(
        generate=(busy,) * count,
        score=forecast.scoring_seconds,
        train=forecast.training_seconds,
        publish=0.0 if shared else forecast.sync_seconds,
    )
    apart = plan.roles.reward is not None
    return play(times, staleness=plan.staleness, shared=shared, scores_apart=apart)


def _document(plan: RlPlan, played: Play) -> dict[str, object]:
    return {
        "kind": "rl",
        "mode": plan.mode,
        "staleness": plan.staleness,
        "step_seconds": played.step_seconds,
        "forecast_step_seconds": plan.forecast.step_seconds if plan.forecast else None,
        "idle": {actor: played.idle(actor) for actor in played.busy_seconds},
        "busy_seconds": dict(played.busy_seconds),
    }


def _print(plan: RlPlan, played: Play) -> None:
    from yuan_train.config.units import show_seconds

    for actor, busy in played.busy_seconds.items():
        share = 1.0 - played.idle(actor)
        print(f" {actor:<10} busy {show_seconds(busy):>8} {'#' * round(20 * share):<20} {share:4.0%}")
    forecast = f" | forecast {show_seconds(plan.forecast.step_seconds)}" if plan.forecast else ""
    print(f" step {show_seconds(played.step_seconds)} | {plan.mode}, staleness {plan.staleness}{forecast}")


def _write_trace(path: str, played: Play) -> None:
    from yuan_train.config.errors import ConfigError
    from yuan_train.schedule.trace import Span, TraceThread, trace_events, write_trace

    threads = [
        TraceThread(
            pid=i,
            tid=i,
            process=actor,
            name="steps",
            spans=[
                Span(
                    name=str(span.step),
                    category=span.step.kind,
                    start_seconds=span.start,
                    end_seconds=span.end,
                )
                for span in played.spans
                if span.actor == actor
            ],
        )
        for i, actor in enumerate(played.busy_seconds)
    ]
    try:
        write_trace(path, trace_events(threads))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
