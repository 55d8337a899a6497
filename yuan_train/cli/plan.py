"""Cuts the model unevenly over the cards of a cluster: simulates the step of many plans, keeps the fastest
one that fits the memory of every card, prints it as a table and writes it. Needs neither a card nor torch.

With a run of reinforcement learning (`algorithm:`), it splits the cards over policy, generation and reward
model, and writes an RL plan.

key=value changes the run file, or the defaults without one: search.pipelines=[2], search.recompute=[none],
search.device_order=fixed, search.use_all_devices=true, "search.time_limit=10 s", train.global_batch_size=128
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from yuan_train.cli.main import file_to_write
from yuan_train.config.errors import ConfigError

if TYPE_CHECKING:
    from yuan_train.config.cluster import Cluster
    from yuan_train.config.load import Document
    from yuan_train.config.model import ModelConfig
    from yuan_train.config.profile import Profile
    from yuan_train.config.rl import RLConfig
    from yuan_train.config.run import RunConfig
    from yuan_train.planner.costs.workload import PlanProblem
    from yuan_train.planner.report.plan import Answer
    from yuan_train.planner.search.search import SearchResult
    from yuan_train.planner.search.what_if import Largest, Rent

DEFAULT_GLOBAL_BATCH_SIZE = 64
"""Sequences per step without a run file."""


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--cluster", required=True, metavar="F", help="cluster file, or a name of configs/cluster")
    add(
        "--model",
        metavar="F",
        help="a model file, a name of configs/model, a config.json or its folder, or a "
        "checkpoint; needed without --config",
    )
    add("--config", metavar="F", help="run file: lengths, batch, precision, search keys")
    add(
        "--profile",
        metavar="F[,F]",
        help="measured times, from one or several files; without them times are estimated",
    )
    add("--out", type=file_to_write, metavar="F", help="file to write the plan to; without it, only print")
    add(
        "--report",
        type=_report,
        metavar="F.html",
        help="also write a page with timeline and memory bars; F.svg: a picture",
    )
    add(
        "--emit",
        choices=("megatron", "yuan"),
        help="print only the cut: Megatron-LM's --pipeline-model-parallel-layout, or Yuan 2.0's -blocks",
    )
    add(
        "--largest",
        action="store_true",
        help="as many layers as fit the cluster, instead of the model's number",
    )
    add(
        "--explain",
        action="store_true",
        help="plan again with one card more or less, more memory, faster links, a larger batch, and say what "
        "would gain; with prices, also which nodes are worth their rent",
    )
    add(
        "--verbose",
        action="store_true",
        help="also print bounds, runners-up, the cut in other tools' notations, and sources of times",
    )
    add("--json", action="store_true", help="print one JSON object on stdout")
    add("overrides", nargs="*", metavar="key=value", help="changes to the run file")


def run(arguments: argparse.Namespace) -> int:
    """Search, write, print. Raises ConfigError for wrong input, NoPlanFits (it names the nearest plan) if no
    plan fits."""
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.load import write_text
    from yuan_train.config.plan_constraints import save_plan
    from yuan_train.config.profile import read_profiles
    from yuan_train.config.rl import is_rl_run

    if arguments.config and is_rl_run(arguments.config):
        return plan_roles(arguments)
    run_config = read_run_config(arguments.config, arguments.model, tuple(arguments.overrides))
    cluster = load_cluster(arguments.cluster)
    profile = read_profiles(arguments.profile, cluster)

    from yuan_train.cli.main import working
    from yuan_train.planner.report import plan as words
    from yuan_train.planner.report.plan import plan_html, plan_json, plan_picture
    from yuan_train.planner.search.what_if import explain_plan

    problem = problem_of(run_config, cluster, profile)
    search, size = run_config.feasible_search, run_config.train.micro_batch_size
    with working("planning"):
        problem, result, rent = _find_plan(problem, arguments, run_config)
    part = rent.chosen.problem if rent else problem
    price = _engine_price(part, run_config, result)
    changes = None
    if arguments.explain:
        step, copies = result.best.step_seconds, run_config.host_copies
        changes = explain_plan(part, search, micro_batch_size=size, step_seconds=step, copies=copies)
    reasons = {
        **({"The engine": [price_words(**price)]} if price else {}),
        **({"Rent": words.rent_lines(rent)} if rent else {}),
        **({"What limits this plan": words.change_lines(changes)} if changes else {}),
    }
    answer = _find_answer(result, part, run_config, arguments)
    if arguments.report:
        page = (
            plan_picture(result, problem)
            if arguments.report.lower().endswith(".svg")
            else plan_html(result, problem, reasons=reasons, answer=_answer_lines(answer, arguments))
        )
        write_text(arguments.report, page)
    if arguments.out:
        save_plan(arguments.out, result.best.plan)
    if arguments.json:
        values = {
            "engine_price": price or None,
            "rent": words.rent_values(rent) if rent else None,
            "explanation": words.change_values(changes) if changes else None,
        }
        found = plan_json(result, path=arguments.out) | {"answer": words.answer_values(answer)}
        print(json.dumps(found | {key: value for key, value in values.items() if value is not None}))
        return 0
    _print_plan(result, problem, answer, arguments, reasons)
    for path in filter(None, (arguments.out, arguments.report)):
        print(f"written: {path}", file=sys.stderr)
    return 0


def _report(path: str) -> str:
    if not path.lower().endswith((".html", ".htm", ".svg")):
        raise argparse.ArgumentTypeError(
            f"{path}; wanted a name that ends in .html (a page) or .svg (a picture)"
        )
    return file_to_write(path)


def _print_plan(
    result: SearchResult,
    problem: PlanProblem,
    answer: Answer,
    arguments: argparse.Namespace,
    reasons: Mapping[str, Sequence[str]],
) -> None:
    """The plan as text; with `--emit` its cut alone."""
    from yuan_train.config.express import to_blocks, to_layout
    from yuan_train.planner.report.plan import plan_table

    if arguments.emit:
        for pipeline in result.best.plan.pipelines:
            print(to_layout(pipeline) if arguments.emit == "megatron" else to_blocks(pipeline))
        return
    print(plan_table(result, problem, answer=_answer_lines(answer, arguments), verbose=arguments.verbose))
    for name, words in reasons.items():
        print("\n".join([f"{name}:", *(f" {line}" for line in words)]))


def _find_answer(
    result: SearchResult, problem: PlanProblem, run_config: RunConfig, arguments: argparse.Namespace
) -> Answer:
    """The figures that a person asks for; where cards lack bf16, plans in the other precision as well."""
    from yuan_train.planner.report.plan import find_answer
    from yuan_train.planner.search.what_if import other_precision

    other = None
    if not arguments.emit and not arguments.largest:
        size = run_config.train.micro_batch_size
        other = other_precision(problem, run_config.feasible_search, micro_batch_size=size)
    steps = run_config.train.steps if arguments.config else None
    return find_answer(result, problem, num_steps=steps, other=other)


def _answer_lines(answer: Answer, arguments: argparse.Namespace) -> list[str]:
    """The answer in words, with the commands that measure and that come next."""
    from yuan_train.planner.report.plan import answer_lines

    names = {"--model": arguments.model, "--config": arguments.config, "--cluster": arguments.cluster}
    given = shlex.join([*(word for pair in names.items() if pair[1] for word in pair), *arguments.overrides])
    measure = f"yuan-train profile {given} --out profile.json (on each node; then plan with --profile)"
    if not arguments.config:
        what = "yuan-train init pretrain --out run.yaml (or sft, dpo, grpo), then plan with --config run.yaml"
    elif not arguments.out:
        what = f"yuan-train plan {given} --out plan.yaml"
    else:
        given = shlex.join(["--config", arguments.config, "--plan", arguments.out, *arguments.overrides])
        what = f"yuan-train launch {given} (with --print: the command of each node)"
    return answer_lines(answer, measure=measure, next_command=what)


def _engine_price(problem: PlanProblem, run_config: RunConfig, result: SearchResult) -> dict[str, float]:
    """What `search.engine` costs, if it leaves ours out; else nothing."""
    from yuan_train.planner.search.search import search_plan

    search, size = run_config.feasible_search, run_config.train.micro_batch_size
    if search.engine is None or "yuan" in search.engine:
        return {}
    free = search_plan(problem, replace(search, engine=("yuan",)), micro_batch_size=size)
    own = result.best.step_seconds
    return {"step_seconds": own, "free_step_seconds": min(free.best.step_seconds, own)}


def _find_plan(
    problem: PlanProblem, arguments: argparse.Namespace, run_config: RunConfig
) -> tuple[PlanProblem, SearchResult, Rent | None]:
    """The best plan, its problem, which `--largest` changes, and what parts of the cluster cost, if asked."""
    from yuan_train.planner.search.what_if import find_largest, rent_plan, search_beside_saves, with_saves

    copies = run_config.host_copies
    search, size = run_config.feasible_search, run_config.train.micro_batch_size
    has_prices = problem.cluster.nodes_price(problem.cluster.groups) is not None
    if search.objective != "step_time" or (arguments.explain and has_prices):
        if arguments.largest:
            raise ConfigError(
                f"--largest: search.objective: {search.objective} and --explain choose among parts of the "
                "cluster, --largest among models; leave one of them out"
            )
        num_steps = run_config.train.steps
        rent = rent_plan(problem, search, micro_batch_size=size, num_steps=num_steps, copies=copies)
        return problem, rent.chosen.result, rent
    if arguments.largest:
        largest = find_largest(problem, search, micro_batch_size=size)
        print(_largest_words(largest), file=sys.stderr)
        # Commands that come next are of this model.
        arguments.overrides.append(f"model.num_layers={largest.problem.model.num_layers}")
        return largest.problem, with_saves(largest.result, largest.problem, copies), None
    return problem, search_beside_saves(problem, search, micro_batch_size=size, copies=copies), None


def problem_of(run_config: RunConfig, cluster: Cluster, profile: Profile | None) -> PlanProblem:
    from yuan_train.planner.costs.workload import PlanProblem

    return PlanProblem(
        cluster=cluster,
        model=run_config.model,
        sequence_length=run_config.data.sequence_length,
        global_batch_size=run_config.train.global_batch_size,
        precision=run_config.train.precision,
        profile=profile,
        sends=run_config.search.send_mode,
        reduce_dtype=run_config.optimizer.reduce_dtype,
        bucket_size=run_config.optimizer.bucket_size,
        memory_fraction=run_config.search.memory_fraction,
        host_reserved=run_config.memory.host_reserved,
        compile=run_config.train.compile,
    )


def price_words(step_seconds: float, free_step_seconds: float) -> str:
    """What it costs to plan for megatron-core alone: the forecast steps of its best plan and of ours."""
    from yuan_train.config.units import show_seconds

    more = step_seconds / free_step_seconds - 1
    free = show_seconds(free_step_seconds)
    cost = "nothing" if more < 5e-4 else f"{more:.1%} of the step ({free} without it)"
    return f"search.engine=[megatron] costs {cost}; both forecasts are of our engine"


def _largest_words(largest: Largest) -> str:
    model = largest.problem.model
    words = (
        f"largest model: {model.num_layers} layers, {model.parameters:,} parameters; train it with "
        f"model.num_layers={model.num_layers}"
    )
    return words + (f". With {model.num_layers + 1}: {largest.refusal}" if largest.refusal else "")


def read_run_config(config: str | None, model: str | None, overrides: tuple[str, ...]) -> RunConfig:
    """The run file with its overrides, or defaults around the model file.

    Raises ConfigError if neither file is given, or if both are and name different models.
    """
    from yuan_train.config.model import load_model
    from yuan_train.config.run import load_run

    if config is None:
        if model is None:
            raise ConfigError("give --model F, or --config F (a run file, which names its model)")
        return _default_run(model, overrides)
    run_config = load_run(config, overrides)
    if model is not None:
        model_overrides = tuple(o.removeprefix("model.") for o in overrides if o.startswith("model."))
        given = load_model(model, model_overrides)
        if run_config.objective.kind == "reward":
            # The objective decides on the head, whatever file names the model.
            given = replace(given, output="value")
        differences = _differences(given, run_config.model)
        if differences:
            raise ConfigError(
                f"--model {model} and --config {config} name different models ({differences}); "
                "leave --model out, or change model: in the run file"
            )
    return run_config


def _default_run(model_path: str, overrides: tuple[str, ...]) -> RunConfig:
    from yuan_train.config.load import Document, build, graft, override
    from yuan_train.config.model import locate_model, read_model_document
    from yuan_train.config.run import LONGEST_DEFAULT_SEQUENCE, RunConfig, validate_run

    model = read_model_document(locate_model(model_path))
    document = graft(Document("defaults", _default_values(model), {}), ("model",), model)
    for assignment in overrides:
        document = override(document, assignment)
    allowed = ""
    if "sequence_length" not in document.value["data"]:
        longest = document.value["model"].get("max_sequence_length", 4096)
        length = min(longest, LONGEST_DEFAULT_SEQUENCE)
        document = override(document, f"data.sequence_length={length}")
        if length < longest:
            allowed = f" (the model allows {longest}: data.sequence_length=N)"
    run_config = build(document, RunConfig, validate=validate_run)
    data, train = run_config.data, run_config.train
    print(
        f"no --config: sequence_length {data.sequence_length}{allowed}, "
        f"global_batch_size {train.global_batch_size}, "
        f"micro_batch_size {train.micro_batch_size}, precision {train.precision}",
        file=sys.stderr,
    )
    return run_config


def _default_values(model: Document) -> dict[str, object]:
    """A run without data; position resets are off: they need a tokenizer and add nothing to a plan's cost."""
    if not isinstance(model.value, dict):
        raise ConfigError(f"{model.name}: wanted keys and values")
    return {
        "data": {"train": [{"prefix": "none"}], "reset_position_ids": False},
        "train": {"steps": 1, "global_batch_size": DEFAULT_GLOBAL_BATCH_SIZE},
        "optimizer": {"learning_rate": 1e-4},
    }


def _differences(given: ModelConfig, named: ModelConfig) -> str:
    """The keys that differ, with both values; empty if none does."""
    keys = [key for key in type(given).__dataclass_fields__ if key != "name"]
    return ", ".join(
        f"{key} {getattr(given, key)} and {getattr(named, key)}"
        for key in keys
        if getattr(given, key) != getattr(named, key)
    )


def plan_roles(arguments: argparse.Namespace) -> int:
    """Search, write, print. Raises ConfigError for wrong input, NoPlanFits if no placement fits."""
    from yuan_train.config.cluster import load_cluster
    from yuan_train.config.load import write_text
    from yuan_train.config.profile import read_profiles
    from yuan_train.config.rl import load_rl
    from yuan_train.config.rl_plan import save_rl_plan
    from yuan_train.planner.report.roles import roles_answer, roles_html, roles_json, roles_table
    from yuan_train.planner.roles.plan import make_rl_plan, roles_problem
    from yuan_train.planner.roles.search import search_roles

    for option in ("model", "emit", "largest"):
        if getattr(arguments, option):
            raise ConfigError(f"--{option}: not with a run of reinforcement learning; leave it out")
    if (arguments.report or "").lower().endswith(".svg"):
        raise ConfigError("--report: a picture, which a run of reinforcement learning has not; wanted F.html")
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
    for path in filter(None, (arguments.out, arguments.report)):
        print(f"written: {path}", file=sys.stderr)
    return 0


def read_reward_model(run: RLConfig) -> ModelConfig | None:
    """The reward model or teacher that reads a run's answers; None without one. Raises CheckpointError."""
    if run.reward.reader is None:
        return None
    from yuan_train.checkpoint.load import find_checkpoint

    return find_checkpoint(run.reward.reader.checkpoint).model
