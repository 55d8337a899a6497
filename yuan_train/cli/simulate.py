"""`yuan-train simulate`: runs a plan's schedule table in virtual time; writes a Chrome or Perfetto trace."""

from __future__ import annotations

import argparse
import json
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from yuan_train.config.plan import Plan
    from yuan_train.planner.cost import PlanCost
    from yuan_train.planner.simulator import Simulation, StageTimes

_DESCRIPTION = """\
Runs a plan's schedule table in virtual time: the same table that training runs on cards. Without --cluster
the stage times are those of the plan's own forecast and messages are free, for a plan holds no link; with it,
times are looked up again (from --profile, else estimated) and messages go over the cluster's links.
"""


def register(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command to the program's subparsers."""
    parser = subparsers.add_parser(
        "simulate",
        help="run a plan's schedule in virtual time",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--plan", required=True, metavar="F", help="plan file")
    parser.add_argument("--trace", metavar="F.json", help="write a trace for ui.perfetto.dev")
    parser.add_argument(
        "--cluster", metavar="F", help="cluster file: links, and times of a plan without forecast"
    )
    parser.add_argument("--profile", metavar="F", help="measured times, with --cluster")
    parser.add_argument(
        "--precision", choices=("bf16", "fp16", "fp32"), default="bf16", help="with --cluster"
    )
    parser.add_argument("--blocking", action="store_true", help="the sender waits for its messages")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print, write the trace. Raises PlanError if there are no times to go by."""
    from yuan_train.config.errors import ConfigError
    from yuan_train.config.plan import load_plan

    plan = load_plan(arguments.plan)
    _check_runs(plan)
    if arguments.profile and not arguments.cluster:
        raise ConfigError("--profile: needs --cluster F too, for the cards' types and links")
    cost: PlanCost | None = None
    if arguments.cluster:
        cost = _cost(arguments, plan)
        simulations = list(cost.simulations)
    else:
        simulations = _from_forecast(arguments, plan)
    document = _document(plan, simulations, cost)
    if arguments.trace:
        _write_trace(arguments.trace, plan, simulations)
    if arguments.json:
        print(json.dumps(document))
    else:
        _print(plan, simulations, document)
    if arguments.trace:
        print(f"written: {arguments.trace} (open it at ui.perfetto.dev)", file=sys.stderr)
    return 0


def _check_runs(plan: Plan) -> None:
    from yuan_train.config.errors import PlanError
    from yuan_train.schedule.tables import SCHEDULES

    if plan.schedule not in SCHEDULES:
        raise PlanError(f"schedule: {plan.schedule} has no table yet; use one of {', '.join(SCHEDULES)}")


def _cost(arguments: argparse.Namespace, plan: Plan) -> PlanCost:
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.profile import load_profile
    from yuan_train.planner.cost import Setting, cost_plan, make_costs

    setting = Setting(
        cluster=load_cluster(arguments.cluster),
        model=plan.model,
        sequence_length=plan.sequence_length,
        global_batch_size=plan.global_batch_size,
        precision=arguments.precision,
        profile=load_profile(arguments.profile) if arguments.profile else None,
        overlap=not arguments.blocking,
    )
    return cost_plan(make_costs(setting), plan)


def _from_forecast(arguments: argparse.Namespace, plan: Plan) -> list[Simulation]:
    """Each pipeline by the stage times of the plan's forecast; messages are free."""
    from yuan_train.planner.simulator import simulate_schedule

    print("messages are free: a plan holds no links; give --cluster F to count them", file=sys.stderr)
    return [
        simulate_schedule(
            plan.schedule,
            _forecast_times(plan, p),
            num_micro_batches=pipeline.num_micro_batches,
            overlap=not arguments.blocking,
        )
        for p, pipeline in enumerate(plan.pipelines)
    ]


def _forecast_times(plan: Plan, pipeline: int) -> StageTimes:
    from yuan_train.config.errors import PlanError
    from yuan_train.planner.simulator import StageTimes

    known = {(s.pipeline, s.stage): s for s in plan.forecast.stages} if plan.forecast else {}
    num_stages = len(plan.pipelines[pipeline].stages)
    missing = [s for s in range(num_stages) if (pipeline, s) not in known]
    if missing:
        raise PlanError(
            f"forecast: no times for pipeline {pipeline}, stage {missing[0]}; give --cluster F to "
            "estimate them, or write forecast.stages"
        )
    own = [known[pipeline, s] for s in range(num_stages)]
    free = (0.0,) * (num_stages - 1)
    return StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in own),
        backward_seconds=tuple(stage.backward_seconds for stage in own),
        send_activation_seconds=free,
        send_gradient_seconds=free,
    )


def _document(plan: Plan, simulations: list[Simulation], cost: PlanCost | None) -> dict[str, object]:
    compute = max(simulation.step_seconds for simulation in simulations)
    busy = sum(sum(simulation.busy_seconds) for simulation in simulations)
    step = cost.step_seconds if cost else compute
    num_stages = sum(len(simulation.busy_seconds) for simulation in simulations)
    return {
        "step_seconds": step,
        "compute_seconds": compute,
        "gradient_sum_seconds": cost.sync_seconds + cost.tied_seconds if cost else None,
        "update_seconds": cost.update_seconds if cost else None,
        "tokens_per_second": plan.global_batch_size * plan.sequence_length / step if step else None,
        "bubble_fraction": 1.0 - busy / (step * num_stages) if step else 0.0,
        "messages": "cluster" if cost else "free",
        "source": cost.source if cost else (plan.forecast.source if plan.forecast else None),
        "forecast_step_seconds": plan.forecast.step_seconds if plan.forecast else None,
        "fits": cost.fits if cost else None,
        "stages": [
            {"pipeline": p, "stage": s, "busy_seconds": busy_seconds, "end_seconds": end}
            for p, simulation in enumerate(simulations)
            for s, (busy_seconds, end) in enumerate(
                zip(simulation.busy_seconds, simulation.stage_end_seconds, strict=True)
            )
        ],
    }


def _print(plan: Plan, simulations: list[Simulation], document: dict[str, object]) -> None:
    from yuan_train.config.units import show_seconds

    compute = document["compute_seconds"]
    assert isinstance(compute, float)
    for p, simulation in enumerate(simulations):
        for s, (busy, end) in enumerate(
            zip(simulation.busy_seconds, simulation.stage_end_seconds, strict=True)
        ):
            stage = plan.pipelines[p].stages[s]
            share = busy / compute if compute else 0.0
            bar = "#" * round(20 * share)
            print(
                f" pipeline {p} stage {s}  layers {stage.layers[0]}-{stage.layers[1]}  "
                f"busy {show_seconds(busy):>8} "
                f"{bar:<20} {share:4.0%}  done at {show_seconds(end)}"
            )
    step, bubble = document["step_seconds"], document["bubble_fraction"]
    assert isinstance(step, float) and isinstance(bubble, float)
    forecast = f" | forecast {show_seconds(plan.forecast.step_seconds)}" if plan.forecast else ""
    print(f" step {show_seconds(step)} | bubble {bubble:.0%}{forecast}")


def _write_trace(path: str, plan: Plan, simulations: list[Simulation]) -> None:
    from yuan_train.config.errors import ConfigError
    from yuan_train.schedule.trace import TraceLane, write_trace

    lanes: list[TraceLane] = []
    for p, simulation in enumerate(simulations):
        for s, steps in enumerate(simulation.lanes):
            stage = plan.pipelines[p].stages[s]
            entry = plan.ranks[stage.ranks[0]]
            words = [
                f"layers {stage.layers[0]}-{stage.layers[1]}",
                "embedding" * stage.embedding,
                "head" * stage.head,
            ]
            lanes.append(
                TraceLane(
                    process=f"{entry.device} ({entry.type})",
                    pipeline=p,
                    stage=s,
                    steps=steps,
                    label=" ".join(word for word in words if word),
                )
            )
    try:
        write_trace(path, lanes)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error}") from None
