"""Benchmarks of whole trainings on this machine, started by `yuan-train`: forecasts against measurement."""

from __future__ import annotations

import itertools
import math
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.project import make_plan, with_stages
from tools.bench.harness import MISSED, Row, case
from tools.bench.problems import endless, hand_plan
from tools.bench.runs import bench_model, make_run, train, write_run, yuan_train
from yuan_train.cli.plan import problem_of
from yuan_train.config.cluster import Cluster, Link, NodeGroup, load_cluster
from yuan_train.config.devices import DeviceType
from yuan_train.config.load import dump, write_text
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.profile import load_profile
from yuan_train.config.run import RunConfig, SearchConfig, load_run
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.search.expert_groups import expert_plans
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.shapes import read_options

WARM_UP_STEPS = 3
LAPTOP, TINY = "configs/cluster/laptop.yaml", "configs/run/tiny.yaml"
"""Three simulated cards, and the quick start's run, whose data must be there."""
SMALL = ("num_layers=6", "hidden_size=256", "num_attention_heads=4", "head_dim=64", "ffn_hidden_size=1024")
CUTS = ("4,1,1", "3,2,1", "2,3,1")
"""Layers of each stage, fast card first."""
SLOWER = 4 / 3
"""Of the simulated cards, so that their processes do not wait for each other's cores."""


@case(
    "training/planned",
    formats={"forecast s": ".3f", "measured s": ".3f", "off by": "+.1%", "over planned": ".2f"},
    costs={"measured s": 0.15},
    cluster=(LAPTOP,),
    config=(TINY,),
    steps=(12,),
    rounds=(3,),
)
def planned(cluster: str, config: str, steps: int, rounds: int) -> Iterator[Row]:
    """The planned uneven cut against the even split of simulated cards, forecast and measured, in turns."""
    run = load_run(config)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        profile = folder / "profile.json"
        yuan_train("profile", "--config", config, "--cluster", cluster, "--out", profile)
        problem = problem_of(run, load_cluster(cluster), load_profile(profile))
        found = search_plan(problem, run.search, micro_batch_size=run.train.micro_batch_size)
        if found.even_split is None:
            raise SystemExit("there is no even split of this model over these cards")
        plans = {"planned": found.best, "even": found.even_split}
        seconds: dict[str, list[float]] = {cut: [] for cut in plans}
        for _ in range(rounds):
            for cut, candidate in plans.items():
                lines = train(config, candidate.plan, folder, f"train.steps={steps}")
                seconds[cut] += [line["step_seconds"] for line in lines[WARM_UP_STEPS:]]
    medians = {cut: statistics.median(own) for cut, own in seconds.items()}
    for cut, candidate in plans.items():
        types = {entry.rank: entry.type for entry in candidate.plan.ranks}
        stages = candidate.plan.pipelines[0].stages
        yield {
            "cut": cut,
            "cards and layers": ", ".join(f"{types[s.ranks[0]]} {s.num_layers}" for s in stages),
            "forecast s": candidate.step_seconds,
            "measured s": medians[cut],
            "min to max": f"{min(seconds[cut]):.3f} to {max(seconds[cut]):.3f}",
            "off by": candidate.step_seconds / medians[cut] - 1,
            "over planned": medians[cut] / medians["planned"],
        }


@case(
    "training/forecast",
    formats={"forecast s": ".3f", "measured s": ".3f", "off by": "+.1%"},
    cluster=(LAPTOP,),
    config=(TINY,),
    steps=(10,),
    rounds=(3,),
    device=("cpu",),
)
def forecast(cluster: str, config: str, steps: int, rounds: int, device: str) -> Iterator[Row]:
    """Step time and peak memory of three hand-made cuts beside the forecast; each round profiles anew."""
    changes = [*(f"model.{word}" for word in SMALL), f"train.device={device}"]
    cards, run = _slowed(load_cluster(cluster)), load_run(config, tuple(changes))
    pairs: dict[str, list[tuple[PlanCost, float, list[int]]]] = {cut: [] for cut in CUTS}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_text(folder / "cluster.yaml", dump(cards))
        files = ("--config", config, "--cluster", folder / "cluster.yaml")
        for _ in range(rounds):
            yuan_train("profile", *files, "--out", folder / "profile.json", *changes)
            costs = make_costs(problem_of(run, cards, load_profile(folder / "profile.json")))
            for cut, done in pairs.items():
                stages = list(enumerate(map(int, cut.split(","))))
                plan = hand_plan(costs, [stages], micro_batch_size=run.train.micro_batch_size)
                lines = train(config, plan, folder, *changes, f"train.steps={steps}")
                took = statistics.median(line["step_seconds"] for line in lines[WARM_UP_STEPS:])
                done.append((cost_plan(costs, plan), took, lines[-1]["peak_memory_bytes"]))
    for cut, done in pairs.items():
        errors = [one.step_seconds / took - 1 for one, took, _ in done]
        wanted = _by_rank([[stage.memory.total for stage in one.stages] for one, _, _ in done])
        found = _by_rank([peaks for _, _, peaks in done])
        yield {
            "layers": cut,
            "forecast s": statistics.median(one.step_seconds for one, _, _ in done),
            "measured s": statistics.median(took for _, took, _ in done),
            "off by": statistics.median(errors),
            "each": ", ".join(f"{error:+.1%}" for error in errors),
            "peak forecast, MiB": ", ".join(f"{peak / 2**20:.0f}" for peak in wanted),
            "peak measured, MiB": ", ".join(f"{peak / 2**20:.0f}" for peak in found),
            "memory off by": ", ".join(f"{a / b - 1:+.1%}" for a, b in zip(wanted, found, strict=True)),
        }


def _slowed(cluster: Cluster) -> Cluster:
    types = {
        name: replace(device, slowdown=SLOWER * device.slowdown) if device.slowdown else device
        for name, device in cluster.device_types.items()
    }
    return replace(cluster, device_types=types)


def _by_rank(rounds: Sequence[Sequence[float]]) -> list[float]:
    """Each rank's median over the rounds."""
    return [statistics.median(values) for values in zip(*rounds, strict=True)]


@case("training/llama", layers=(4,), vocabulary=(16384,), tokens=(128,), steps=(3,))
def llama(layers: int, vocabulary: int, tokens: int, steps: int) -> Iterator[Row]:
    """A slice of Llama-3.2-1B in bf16, alone and cut over two processes: losses, seconds, memory.

    Its widths, random tokens, two sequences a step. Four of the 16 layers take about 5 GB of state.
    """
    keys = {"architecture": "llama", "num_key_value_heads": 8, "rope_base": 500000.0, "norm_epsilon": 1e-5}
    model = bench_model(layers, 2048, vocab_size=vocabulary, **keys)
    card = DeviceType(memory=24 << 30, bf16=1e12, fp16=1e12, fp32=1e12, memory_bandwidth=1e10, backend="gloo")
    first: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = write_run(folder / "run.yaml", make_run(model, tokens=tokens, batch=2, steps=steps))
        last = max(layers // 3, 1)
        for cut in ([layers], [layers - last, last]):
            plan = replace(make_plan(run, [cut]), device_types={"card": card})
            lines = train(folder / "run.yaml", plan, folder)
            losses = [line["loss"] for line in lines]
            worst = max((abs(a / b - 1) for a, b in zip(losses, first, strict=False)), default=0.0)
            first = first or losses
            yield {
                "layers": " + ".join(map(str, cut)),
                "parameters": f"{run.model.parameters:,}",
                "losses": ", ".join(f"{loss:.6f}" for loss in losses),
                "seconds": ", ".join(f"{line['step_seconds']:.1f}" for line in lines),
                "peak GB": ", ".join(f"{peak / 1e9:.2f}" for peak in lines[-1]["peak_memory_bytes"]),
                MISSED: f"the losses are {worst:.1e} apart" if not worst <= 1e-3 or math.isnan(worst) else "",
            }


# --- experts divided over unlike cards ----------------------------------------------------------------------

SPEEDS = {"Full": 1.0, "Half": 0.5, "Quarter": 0.25}
EXPERTS_WARM_UP = 2
THIN = 8
"""Width of experts that take about no time."""
LOOPBACK = Link(bandwidth=2e9, latency=100e-6)


@case(
    "training/experts",
    formats={
        **{"forecast s": ".3f", "measured s": ".3f", "off by": "+.1%"},
        **{"no experts s": ".3f", "expert part s": ".3f"},
    },
    steps=(6,),
    slower=(3.0,),
    num_experts=(16,),
    width=(4096,),
    tokens=(128,),
    round=(1,),
)
def experts(
    steps: int, slower: float, num_experts: int, width: int, tokens: int, round: int
) -> Iterator[Row]:
    """Three cards of speeds 1, 1/2 and 1/4 share the experts of a small mixture in one stage.

    The expert part of a step is what it takes more than the same plan with experts of width 8. The cards are
    `slower`, so that no process waits for another's core. `round=[1,2]` profiles anew in each.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, cluster = Path(name), simulated_cards(slower)
        write_text(folder / "cluster.yaml", dump(cluster))
        keys = {"tokens": tokens, "batch": 2, "precision": "fp32", "optimizer": {"learning_rate": 1e-6}}
        run, thin = (
            write_run(folder / f"{name}.yaml", make_run(mixture(num_experts, own), **keys))
            for name, own in (("run", width), ("thin", THIN))
        )
        files = ("--config", folder / "run.yaml", "--cluster", folder / "cluster.yaml")
        yuan_train(
            "profile", *files, "--out", folder / "profile.json", "--seconds", "2", "search.recompute=[none]"
        )
        costs = make_costs(problem_of(run, cluster, load_profile(folder / "profile.json")))
        planned = plan_group(costs, run)
        (stage,) = planned.stages
        even = tuple(num_experts // len(SPEEDS) + (c < num_experts % len(SPEEDS)) for c in range(len(SPEEDS)))
        plans = {"planned": planned, "even": with_stages(planned, replace(stage, experts=even))}
        for kind, plan in plans.items():
            few = f"train.steps={steps}"
            lines = train(folder / "run.yaml", plan, folder, few)
            thin_lines = train(folder / "thin.yaml", replace(plan, model=thin.model), folder, few)
            seconds, without = (
                statistics.median(line["step_seconds"] for line in own[EXPERTS_WARM_UP:])
                for own in (lines, thin_lines)
            )
            counts = plan.pipelines[0].stages[0].experts or ()
            shares = shares_of(counts, tokens_of(lines, num_experts))
            forecast = cost_plan(costs, plan).step_seconds
            yield {
                "round": round,
                "counts": kind,
                "on speeds 1, 1/2, 1/4": ", ".join(map(str, counts)),
                "tokens": ", ".join(f"{share:.0%}" for share in shares),
                "forecast s": forecast,
                "measured s": seconds,
                "off by": forecast / seconds - 1,
                "no experts s": without,
                "expert part s": seconds - without,
            }


def simulated_cards(slower: float) -> Cluster:
    """A node for each card; rates are rough values of a core, which the profile replaces."""
    core = DeviceType(memory=4 << 30, reserved=300 << 20, fp32=6e10, memory_bandwidth=1e10)
    types = {name: replace(core, slowdown=slower / speed) for name, speed in SPEEDS.items()}
    nodes = tuple(NodeGroup(name=name.lower(), device=name, network=LOOPBACK) for name in types)
    return Cluster(name="three", nodes=nodes, device_types=types)


def mixture(num_experts: int, width: int) -> ModelConfig:
    """A small mixture of experts."""
    sizes = {"num_attention_heads": 4, "vocab_size": 512, "init_std": 0.1, "tie_embeddings": False}
    sizes |= {"num_experts": num_experts, "experts_per_token": 2, "expert_ffn_hidden_size": width}
    # At the start, an attention router prefers some experts; this one spreads random tokens evenly.
    return bench_model(2, 128, router="softmax", **sizes)


def plan_group(costs: Costs, run: RunConfig) -> Plan:
    """The planner's best plan of one stage over all three cards."""
    search = SearchConfig(tensor=(1, len(SPEEDS)), recompute=("none",))
    options = read_options(search, micro_batch_size=1, model=run.model)
    found = expert_plans(endless(costs, options), [])
    return min(found, key=lambda candidate: candidate.step_seconds).plan


def tokens_of(lines: list[dict[str, Any]], num_experts: int) -> list[int]:
    """The tokens of each expert, over all layers and steps."""
    found = [sum(layer) for line in lines for layer in zip(*line["expert_tokens"], strict=True)]
    return [sum(found[e::num_experts]) for e in range(num_experts)]


def shares_of(counts: tuple[int, ...], tokens: list[int]) -> list[float]:
    """Part of the tokens that each card's experts were given."""
    ends = itertools.pairwise(itertools.accumulate(counts, initial=0))
    return [sum(tokens[first:last]) / sum(tokens) for first, last in ends]
