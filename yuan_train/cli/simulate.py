"""Runs a plan's schedule in virtual time: the same schedule that training runs on cards. Without --cluster,
stage times are those of the plan's forecast, and nothing else counts, such as messages or the optimizer step;
with it, times are looked up again (from --profile, else estimated) and messages go over the cluster's links.
Of an RL plan it plays the flow of the roles; --cluster then needs the run, by --config.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from yuan_train.cli.main import file_to_write
from yuan_train.config.errors import ConfigError, PlanError

if TYPE_CHECKING:
    from yuan_train.config.cluster import Card, Cluster, Sends
    from yuan_train.config.model import ModelConfig
    from yuan_train.config.plan import PipelinePlan, Plan
    from yuan_train.config.rl_plan import RlPlan
    from yuan_train.planner.costs.workload import PlanProblem
    from yuan_train.planner.evaluate.plan_cost import PlanCost
    from yuan_train.planner.evaluate.simulator import Simulation, StageTimes
    from yuan_train.schedule.flow import Play


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--plan", metavar="F", help="plan file; or give a hand-made cut, by --layout or --blocks")
    add(
        "--layout", metavar="L", help="cut in Megatron-LM's notation, such as 'Ettt|tt|ttL'; one card a stage"
    )
    add("--blocks", metavar="N,N", help="cut in Yuan 2.0's notation: layers of each stage; one card a stage")
    add("--model", metavar="F", help="model file, with a hand-made cut")
    add("--config", metavar="F", help="run file, with a hand-made cut")
    add("--trace", type=file_to_write, metavar="F.json", help="write a trace for ui.perfetto.dev")
    add("--cluster", metavar="F", help="cluster file: links, and times of a plan without forecast")
    add("--profile", metavar="F", help="measured times, with --cluster")
    add("--precision", choices=("bf16", "fp16", "fp32", "fp64"), help="with --cluster; bf16 if not given")
    add(
        "--reduce-dtype",
        choices=("fp32", "bf16"),
        help="of gradients on their way between owners, with --cluster; fp32 if not given",
    )
    add(
        "--bucket-size",
        type=int,
        metavar="N",
        help="the most parameters reduced in one operation, with --cluster; 40000000 if not given",
    )
    add(
        "--sends",
        choices=("overlapped", "blocking"),
        help="who waits for a message between stages: nobody, or its sender; if not given, "
        "as the cluster's library has it",
    )
    add("--blocking", action="store_const", const="blocking", dest="sends", help="--sends blocking")
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("overrides", nargs="*", metavar="key=value", help="changes to the run file")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, print, write the trace. Raises PlanError if the stage times are not known."""
    from yuan_train.config.rl_plan import names_rl_plan

    if arguments.plan and names_rl_plan(arguments.plan):
        return simulate_roles(arguments)
    plan = _read_plan(arguments)
    if arguments.profile and not arguments.cluster:
        raise ConfigError("--profile: needs --cluster F too, for the cards' types and links")
    for option in ("reduce_dtype", "bucket_size"):
        if getattr(arguments, option) is not None and not arguments.cluster:
            name = option.replace("_", "-")
            raise ConfigError(f"--{name}: needs --cluster F too, for the links that gradients go over")
    if arguments.bucket_size is not None and arguments.bucket_size < 1:
        raise ConfigError(f"--bucket-size: wanted at least 1 parameter, got {arguments.bucket_size}")
    cost = _cost(arguments, plan) if arguments.cluster else None
    if cost is not None:
        simulations = list(cost.simulations)
    else:
        rest = "messages, reductions of gradients, waits for copies, optimizer step and weight sync"
        print(f"not counted: {rest}; give --cluster F to count them", file=sys.stderr)
        simulations = simulate_forecast(plan, sends=arguments.sends or "overlapped")
    document = _document(plan, simulations, cost)
    if arguments.trace:
        _write_trace(arguments.trace, plan, simulations)
    if arguments.json:
        print(json.dumps(document))
    else:
        _print(plan, document)
    if arguments.trace:
        print(f"written: {arguments.trace} (open it at ui.perfetto.dev)", file=sys.stderr)
    return 0


def _read_plan(arguments: argparse.Namespace) -> Plan:
    """The plan file, or the plan of a hand-made cut over the cluster's cards in their order."""
    from yuan_train.config.plan_constraints import load_plan

    given = [name for name in ("plan", "layout", "blocks") if getattr(arguments, name)]
    if len(given) != 1:
        raise ConfigError("give one of --plan F, --layout 'Ett|tL' and --blocks 2,1")
    if arguments.plan:
        if arguments.overrides or arguments.config or arguments.model:
            raise ConfigError("--model, --config and key=value go with --layout or --blocks, not with --plan")
        return load_plan(arguments.plan)
    return _plan_of_cut(arguments)


def _plan_of_cut(arguments: argparse.Namespace) -> Plan:
    """The plan of --layout or --blocks: one pipeline, stage s on the cluster's card s.

    Sets `precision`, `reduce_dtype`, `bucket_size`, `sends` and `memory_fraction` of the arguments to the
    run's if they are not given.
    """
    from yuan_train.cli.plan import read_run_config
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.express import read_blocks, read_layout
    from yuan_train.config.plan import PipelinePlan, StagePlan
    from yuan_train.config.plan_constraints import validate_plan
    from yuan_train.planner.costs.workload import plan_on_cards

    if not arguments.cluster:
        raise ConfigError("a hand-made cut needs --cluster F: its cards, in their order, take the stages")
    run_config = read_run_config(arguments.config, arguments.model, tuple(arguments.overrides))
    arguments.precision = arguments.precision or run_config.train.precision
    arguments.reduce_dtype = arguments.reduce_dtype or run_config.optimizer.reduce_dtype
    arguments.bucket_size = arguments.bucket_size or run_config.optimizer.bucket_size
    arguments.sends = arguments.sends or run_config.search.send_mode
    arguments.memory_fraction = run_config.search.memory_fraction
    cluster = load_cluster(arguments.cluster)
    num_layers = run_config.model.num_layers
    read, words = (read_layout, arguments.layout) if arguments.layout else (read_blocks, arguments.blocks)
    counts = read(words, num_layers=num_layers)
    cards = cluster.cards[: len(counts)]
    if len(cards) < len(counts):
        raise PlanError(f"{len(counts)} stages, but cluster {cluster.name!r} has {len(cards)} cards")
    size, batch = run_config.train.micro_batch_size, run_config.train.global_batch_size
    ends = list(itertools.accumulate(counts))

    def pipelines(rank_of: Mapping[Card, int]) -> list[PipelinePlan]:
        stages = tuple(
            StagePlan(
                replicas=((rank_of[card],),),
                layers=(end - count, end),
                embedding=s == 0,
                head=s == len(counts) - 1,
            )
            for s, (card, count, end) in enumerate(zip(cards, counts, ends, strict=True))
        )
        return [PipelinePlan(micro_batch_size=size, num_micro_batches=batch // size, stages=stages)]

    problem = _problem(arguments, cluster, run_config.model, run_config.data.sequence_length, batch)
    schedule = (run_config.search.schedule or ("1f1b",))[0]
    plan = plan_on_cards(problem, set(cards), pipelines, schedule=schedule, sharded=False)
    if violations := [violation.message for violation in validate_plan(plan)]:
        raise PlanError("\n".join(violations))
    return plan


def _cost(arguments: argparse.Namespace, plan: Plan) -> PlanCost:
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.profile import read_profiles
    from yuan_train.planner.costs.unit_costs import make_costs
    from yuan_train.planner.evaluate.plan_cost import cost_plan

    cluster = load_cluster(arguments.cluster)
    profile = read_profiles(arguments.profile, cluster)
    problem = _problem(arguments, cluster, plan.model, plan.sequence_length, plan.global_batch_size)
    # A plan does not say whether its run compiles the layers.
    compiled = profile is not None and profile.compile
    return cost_plan(make_costs(replace(problem, profile=profile, compile=compiled)), plan)


def _problem(
    arguments: argparse.Namespace, cluster: Cluster, model: ModelConfig, length: int, batch: int
) -> PlanProblem:
    """What the arguments say; without a profile."""
    from yuan_train.config.run import BUCKET_SIZE
    from yuan_train.planner.costs.workload import PlanProblem

    return PlanProblem(
        cluster=cluster,
        model=model,
        sequence_length=length,
        global_batch_size=batch,
        precision=arguments.precision or "bf16",
        sends=arguments.sends,
        reduce_dtype=arguments.reduce_dtype or "fp32",
        bucket_size=arguments.bucket_size or BUCKET_SIZE,
        memory_fraction=getattr(arguments, "memory_fraction", 1.0),
    )


def simulate_forecast(plan: Plan, *, sends: Sends = "overlapped") -> list[Simulation]:
    """Each pipeline with the stage times of the plan's forecast, and nothing besides.

    Raises PlanError if the forecast lacks a stage's times.
    """
    from yuan_train.planner.evaluate.simulator import program_shape, simulate_schedule

    numbers = range(len(plan.pipelines))
    return [simulate_schedule(program_shape(plan, p), _forecast_times(plan, p), sends=sends) for p in numbers]


def _forecast_times(plan: Plan, pipeline: int) -> StageTimes:
    from yuan_train.planner.evaluate.simulator import StageTimes

    known = {(s.pipeline, s.stage): s for s in plan.forecast.stages} if plan.forecast else {}
    num_stages = len(plan.pipelines[pipeline].stages)
    missing = [s for s in range(num_stages) if (pipeline, s) not in known]
    if missing:
        raise PlanError(
            f"forecast: no times for pipeline {pipeline}, stage {missing[0]}; give --cluster F to "
            "estimate them, or write forecast.stages"
        )
    stages, free = [known[pipeline, s] for s in range(num_stages)], (0.0,) * (num_stages - 1)
    weight_seconds = tuple(stage.weight_seconds for stage in stages if stage.weight_seconds is not None)
    return StageTimes(
        forward_seconds=tuple(stage.forward_seconds for stage in stages),
        backward_seconds=tuple(stage.backward_seconds for stage in stages),
        # Half of each backward for a plan that does not say, such as one written by hand.
        weight_seconds=weight_seconds if len(weight_seconds) == num_stages else (),
        send_activation_seconds=free,
        send_gradient_seconds=free,
    )


def _document(plan: Plan, simulations: list[Simulation], cost: PlanCost | None) -> dict[str, Any]:
    compute = max(simulation.step_seconds for simulation in simulations)
    busy = sum(sum(simulation.busy_seconds) for simulation in simulations)
    step = cost.step_seconds if cost else compute
    num_workers = sum(len(simulation.busy_seconds) for simulation in simulations)
    return {
        "step_seconds": step,
        "compute_seconds": compute,
        "grad_reduce_seconds": cost.grad_reduce_seconds + cost.tied_embedding_seconds if cost else None,
        "update_seconds": cost.update_seconds if cost else None,
        # Written to all disks in a step, and read.
        "disk_bytes": cost.disk_bytes if cost else None,
        "weight_sync_seconds": cost.weight_sync_seconds if cost else None,
        # Of waits for copies of activations; it is part of the compute above.
        "stall_seconds": cost.stall_seconds if cost else None,
        "tokens_per_second": plan.global_batch_size * plan.sequence_length / step if step else None,
        "bubble_fraction": 1.0 - busy / (step * num_workers) if step else 0.0,
        "messages": "cluster" if cost else "free",
        "source": cost.source if cost else (plan.forecast.source if plan.forecast else None),
        "forecast_step_seconds": plan.forecast.step_seconds if plan.forecast else None,
        "fits": cost.fits if cost else None,
        "stages": [
            {"pipeline": p, "stage": s, "busy_seconds": busy_seconds, "end_seconds": end}
            for p, simulation in enumerate(simulations)
            for s, (busy_seconds, end) in enumerate(
                zip(_stage_busy(simulation), simulation.stage_end_seconds, strict=True)
            )
        ],
    }


def _stage_busy(simulation: Simulation) -> list[float]:
    """Compute seconds of each stage, over all its workers."""
    busy = [0.0] * len(simulation.stage_end_seconds)
    for operation, (start, end) in zip(simulation.operations, simulation.spans, strict=True):
        if operation.peer < 0:
            busy[operation.stage] += end - start
    return busy


def _print(plan: Plan, document: dict[str, Any]) -> None:
    from yuan_train.config.units import show_seconds, written_words
    from yuan_train.planner.report.plan import layer_words

    compute, step, stall = (document[f"{name}_seconds"] for name in ("compute", "step", "stall"))
    for own in document["stages"]:
        p, s, busy = own["pipeline"], own["stage"], own["busy_seconds"]
        stage = plan.pipelines[p].stages[s]
        share = busy / (compute * len(stage.replicas)) if compute else 0.0
        print(
            f" pipeline {p} stage {s}  layers {layer_words(stage)}  busy {show_seconds(busy):>8} "
            f"{'#' * round(20 * share):<20} {share:4.0%}  done at {show_seconds(own['end_seconds'])}"
        )
    forecast = f" | forecast {show_seconds(plan.forecast.step_seconds)}" if plan.forecast else ""
    if document["disk_bytes"]:
        print(f" disks: {written_words(document['disk_bytes'], step)}")
    copies = f" | waits for copies {show_seconds(stall)}" if stall else ""
    misses = " | does not fit the memory" * (document["fits"] is False)
    words = f"{show_seconds(step)} | bubble {document['bubble_fraction']:.0%}{copies}{forecast}{misses}"
    print(f" {'stages alone' if document['fits'] is None else 'step'} {words}")


def _write_trace(path: str, plan: Plan, simulations: list[Simulation]) -> None:
    from yuan_train.config.load import write_text
    from yuan_train.planner.report.plan import layer_words
    from yuan_train.schedule.trace import TraceTrack, trace_events, trace_text, track_threads, whole_arrows

    tracks: list[TraceTrack] = []
    for p, simulation in enumerate(simulations):
        workers = plan.pipelines[p].workers
        for s, stage in enumerate(plan.pipelines[p].stages):
            for replica, worker in zip(stage.replicas, workers[s], strict=True):
                entry = plan.ranks[replica[0]]
                tracks.append(
                    TraceTrack(
                        process=f"{entry.device} ({entry.type})",
                        pipeline=p,
                        stage=s,
                        steps=[timed for timed in simulation.timed_steps[worker] if timed.step.stage == s],
                        label=f"layers {layer_words(stage)}",
                    )
                )
    write_text(path, trace_text(whole_arrows(trace_events(track_threads(tracks)))))


def simulate_roles(arguments: argparse.Namespace) -> int:
    """Play, print, write the trace. Raises PlanError if the plan has no forecast and no cluster is given."""
    from yuan_train.config.rl_plan import load_rl_plan

    plan = load_rl_plan(arguments.plan)
    if arguments.cluster and not arguments.config:
        raise ConfigError("--cluster: needs --config F too, for the lengths and groups of the run")
    if arguments.config and not arguments.cluster:
        raise ConfigError("--config: needs --cluster F too; without both, seconds are those of the forecast")
    played = _priced(arguments, plan) if arguments.cluster else _of_forecast(plan)
    if arguments.trace:
        _write_roles_trace(arguments.trace, played)
    if arguments.json:
        found = {
            "kind": "rl",
            "mode": plan.mode,
            "staleness": plan.staleness,
            "step_seconds": played.step_seconds,
            "forecast_step_seconds": plan.forecast.step_seconds if plan.forecast else None,
            "idle": {actor: played.idle(actor) for actor in played.busy_seconds},
            "busy_seconds": dict(played.busy_seconds),
        }
        print(json.dumps(found))
    else:
        _print_roles(plan, played)
    if arguments.trace:
        print(f"written: {arguments.trace} (open it at ui.perfetto.dev)", file=sys.stderr)
    return 0


def _priced(arguments: argparse.Namespace, plan: RlPlan) -> Play:
    from yuan_train.cli.plan import read_reward_model
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
    from yuan_train.schedule.flow import FlowTimes, play

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
    return play(times, staleness=plan.staleness, shared=shared, scores_apart=plan.roles.reward is not None)


def _print_roles(plan: RlPlan, played: Play) -> None:
    from yuan_train.config.units import show_seconds

    for actor, busy in played.busy_seconds.items():
        share = 1.0 - played.idle(actor)
        print(f" {actor:<10} busy {show_seconds(busy):>8} {'#' * round(20 * share):<20} {share:4.0%}")
    forecast = f" | forecast {show_seconds(plan.forecast.step_seconds)}" if plan.forecast else ""
    print(f" step {show_seconds(played.step_seconds)} | {plan.mode}, staleness {plan.staleness}{forecast}")


def _write_roles_trace(path: str, played: Play) -> None:
    from yuan_train.config.load import write_text
    from yuan_train.schedule.trace import Span, TraceThread, trace_events, trace_text

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
    write_text(path, trace_text(trace_events(threads)))
