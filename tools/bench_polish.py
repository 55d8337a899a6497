"""python tools/bench_polish.py [NAMES ...]: how far the planner's plans are from better ones.

On each of eleven named clusters, or of --random N random ones (from --seed on), plans at --effort, and then
looks for a faster plan in two ways. `--against thorough` plans again with that effort. For --seconds CPU
seconds (0 leaves it out) the plan is changed at random: layers, warm-up depth, recompute, micro-batches,
shares of the batch, widths, replicas, order, stages merged and split, schedule, optimizer shares; one to
three changes together. What is valid, fits, and is not slower in the planner's own simulator is kept; this
has no code in common with the planner's own search. Prints the gains, and the sum of gains by kind of change.
"""

from __future__ import annotations

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from yuan_train.config.cluster import Cluster, Link, NodeGroup
from yuan_train.config.errors import NoPlanFits, PlanError
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan, uncatalogued_types
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import Effort, SearchConfig
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.search import search_plan

MODELS = Path(__file__).parents[1] / "configs" / "model"
NAMED = {
    "h100-a10-4090": ("2x8 H100-80G, 5 A10, 6 RTX-4090", "qwen2.5-7b", 64, 12.5),
    "4090-h200": ("2x8 RTX-4090, 8 H200", "qwen2.5-32b", 256, 1.25),
    "a100-h200-h100-4090": ("2x5 A100-80G, 3x4 H200, 6 H100-80G, 2x3 RTX-4090", "qwen2.5-32b", 128, 12.5),
    "l40s-a100-a10-2080ti": ("2 L40S, 1 A100-80G, 3 A10, 2x4 RTX-2080Ti", "qwen2.5-7b", 32, 3.1),
    "l20-3090-a40": ("2x4 L20, 2x6 RTX-3090, 4 A40", "qwen2.5-7b", 32, 12.5),
    "h100-3080-4090-p100": ("2x4 H100-80G, 7 RTX-3080, 2x4 RTX-4090, 8 P100", "qwen2.5-1.5b", 64, 12.5),
    "l20-v100-h100": ("3x4 L20, 4 V100-32G, 2x7 H100-80G", "qwen2.5-7b", 64, 12.5),
    "p100-h100-a100": ("2x3 P100, 6 H100-80G, 2x5 A100-80G", "qwen2.5-14b", 64, 3.1),
    "a40-v100-3080": ("3x6 A40, 5 V100-16G, 3x6 RTX-3080", "qwen2.5-3b", 32, 12.5),
    "l40s-h100": ("3x2 L40S, 2x8 H100-80G", "qwen2.5-14b", 64, 12.5),
    "a100-40g": ("2x7 A100-40G", "qwen2.5-7b", 64, 12.5),
}
"""Cluster, model, sequences per step, GB/s of the network."""
FAST_LINKS = ("H100-80G", "H200", "A100-80G", "A100-40G", "V100-16G", "V100-32G")
RANDOM_TYPES = (*FAST_LINKS, "A10", "A40", "L20", "L40S", "RTX-3080", "RTX-3090", "RTX-4090", "T4", "P100")
RANDOM_MODELS = ("qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b")
BYTES_PER_PARAMETER = 24
"""Of memory of all cards together; a random model takes no more."""


def main() -> int:
    """Print one line per cluster, then mean and largest gains, and the gains by kind of change."""
    options = _read_options()
    seeds = range(options.seed, options.seed + options.random)
    problems = (
        {f"seed {seed}": random_problem(seed) for seed in seeds}
        if options.random
        else {name: named_problem(name) for name in options.names or NAMED}
    )
    searched: list[float] = []
    changed: list[float] = []
    kinds: Counter[str] = Counter()
    print("| cluster | cards | CPU s | step s | CPU s against | step s | gain | after changes | gain |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|--:|")
    for name, problem in problems.items():
        cards = len(problem.cluster.cards)
        if not options.min_cards <= cards <= options.max_cards:
            continue
        plan, seconds, step = _planned(problem, options.effort)
        row = [name, str(cards), f"{seconds:.1f}", f"{step:.5g}", "", "", "", "", ""]
        if plan is not None and options.against:
            _, seconds, other = _planned(problem, options.against)
            searched.append(1.0 - other / step)
            row[4:7] = f"{seconds:.1f}", f"{other:.5g}", f"{searched[-1]:.2%}"
        if plan is not None and options.seconds:
            before, after, _ = improve(problem, plan, kinds, seconds=options.seconds)
            changed.append(1.0 - after / before)
            row[7:] = f"{after:.5g}", f"{changed[-1]:.2%}"
        print("| " + " | ".join(row) + " |", flush=True)
    for what, gains in ((options.against, searched), ("changes", changed)):
        if gains:
            print(f"\nGain by {what}: {sum(gains) / len(gains):.2%} in the mean, {max(gains):.2%} at most.")
    for kind, gain in kinds.most_common():
        print(f"{kind}: {gain / 1e6 / len(changed):.2%}")
    return 0


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="named clusters; none: all of them")
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random clusters, instead")
    parser.add_argument("--seed", type=int, default=0, help="of the first random cluster")
    parser.add_argument("--min-cards", type=int, default=2, help="leave smaller clusters out")
    parser.add_argument("--max-cards", type=int, default=54, help="leave larger clusters out")
    parser.add_argument("--seconds", type=float, default=300.0, help="CPU seconds of changes to each plan")
    efforts = ("quick", "normal", "thorough")
    parser.add_argument("--effort", default="normal", choices=efforts, help="of the plan")
    parser.add_argument("--against", choices=efforts, help="the effort of another plan")
    return parser.parse_args()


def _planned(problem: PlanProblem, effort: Effort) -> tuple[Plan | None, float, float]:
    """(the plan, CPU seconds, its step in seconds), infinite and None where no plan fits."""
    started = time.process_time()
    config = SearchConfig(time_limit=3600.0, simplicity=0.0, effort=effort)
    try:
        best = search_plan(problem, config, micro_batch_size=1).best
    except NoPlanFits:
        return None, time.process_time() - started, math.inf
    return best.plan, time.process_time() - started, best.step_seconds


# --- problems --------------------------------------------------------------------------------------------


def named_problem(name: str) -> PlanProblem:
    """The problem of a named cluster."""
    words, model, batch, network = NAMED[name]
    nodes: list[tuple[int, int, str]] = []
    for part in words.split(", "):
        numbers, kind = part.split()
        count, _, each = numbers.rpartition("x")
        nodes.append((int(count or 1), int(each), kind))
    return make_problem(name, nodes, load_model(MODELS / f"{model}.yaml"), batch, network)


def random_problem(seed: int) -> PlanProblem:
    """2 to 54 cards of 1 to 4 types in nodes of 1 to 8, and a model that should fit them."""
    chance = random.Random(seed)
    kinds = chance.sample(RANDOM_TYPES, chance.randint(1, 4))
    nodes: list[tuple[int, int, str]] = []
    for kind in kinds:
        nodes.append((chance.randint(1, 3), chance.randint(1, 8), kind))
    while not 2 <= sum(count * each for count, each, _ in nodes) <= 54:
        i = chance.randrange(len(nodes))
        nodes[i] = (chance.randint(1, 3), chance.randint(1, 8), nodes[i][2])
    network = chance.choice([1.25, 3.1, 12.5, 25.0])
    batch = chance.choice([7, 16, 32, 64, 128])
    bare = make_problem(
        f"random-{seed}", nodes, load_model(MODELS / f"{RANDOM_MODELS[0]}.yaml"), batch, network
    )
    memory = sum(bare.cluster.device_type(card.type).memory for card in bare.cluster.cards)
    models = [load_model(MODELS / f"{name}.yaml") for name in RANDOM_MODELS]
    fitting = [m for m in models if sum(m.unit_parameters) * BYTES_PER_PARAMETER < memory] or models[:1]
    return replace(bare, model=chance.choice(fitting[-3:]))


def make_problem(
    name: str, nodes: list[tuple[int, int, str]], model: ModelConfig, batch: int, network: float
) -> PlanProblem:
    """A problem of nodes (count, cards, type) on a network of so many GB/s; fp16 where a card lacks bf16."""
    groups = tuple(
        NodeGroup(
            name=f"{kind.lower()}{i}",
            count=count,
            device=kind,
            devices=each,
            link=Link(bandwidth=300e9 if kind in FAST_LINKS else 20e9, latency=5e-6),
            network=Link(bandwidth=network * 1e9, latency=1e-5),
        )
        for i, (count, each, kind) in enumerate(nodes)
    )
    cluster = Cluster(name=name, nodes=groups)
    has_bf16 = all(cluster.device_type(kind).bf16 is not None for _, _, kind in nodes)
    return PlanProblem(
        cluster=cluster,
        model=model,
        sequence_length=4096,
        global_batch_size=batch,
        precision="bf16" if has_bf16 else "fp16",
    )


# --- local search ----------------------------------------------------------------------------------------


def improve(
    problem: PlanProblem, plan: Plan, kinds: Counter[str], *, seconds: float
) -> tuple[float, float, int]:
    """(step before, step after, plans tried) of a random local search; adds each kind of change's part of
    the gain, in millionths of the first step, to `kinds`."""
    costs = make_costs(problem)
    before = best = cost_plan(costs, plan).step_seconds
    chance = random.Random(0)
    changes: list[Callable[[Costs, Plan, random.Random], Plan | None]] = [
        deepen, deepen, move_layers, move_layers, recompute, recompute, size, shares, widths, swap, merge,
        split, schedule, sharding, weigh, replicate,
    ]  # fmt: skip
    tried = 0
    started = time.process_time()
    while time.process_time() - started < seconds:
        chosen = [chance.choice(changes) for _ in range(chance.choice((1, 1, 2, 2, 3)))]
        other: Plan | None = plan
        for change in chosen:
            other = change(costs, other, chance) if other is not None else None
        if other is None or other == plan or list(validate_plan(other)):
            continue
        try:
            cost = cost_plan(costs, other)
        except PlanError:  # such as deeper warm-ups than what is kept of offloaded activations allows
            continue
        tried += 1
        if cost.fits and cost.step_seconds <= best:
            if cost.step_seconds < best * (1 - 1e-9):
                gain = (best - cost.step_seconds) / before
                kinds[" + ".join(sorted({change.__name__ for change in chosen}))] += round(gain * 1e6)
            plan, best = other, cost.step_seconds
    return before, best, tried


def with_stages(
    plan: Plan, chance: random.Random, change: Callable[[list[StagePlan]], list[StagePlan] | None]
) -> Plan | None:
    """The plan with the stages of one pipeline changed, or of all pipelines that are cut like it."""
    chosen = chance.choice(plan.pipelines)

    def look(pipeline: PipelinePlan) -> object:
        types = [[plan.ranks[r].type for r in s.ranks] for s in pipeline.stages]
        plain = [replace(s, replicas=((0,),)) for s in pipeline.stages]
        return (pipeline.micro_batch_size, pipeline.num_micro_batches, types, plain)

    alone = chance.random() < 0.2
    state = chance.getstate()
    pipelines: list[PipelinePlan] = []
    for pipeline in plan.pipelines:
        if pipeline is chosen or (not alone and look(pipeline) == look(chosen)):
            chance.setstate(state)
            stages = change(list(pipeline.stages))
            if not stages:
                return None
            pipeline = replace(pipeline, stages=tuple(stages))
        pipelines.append(pipeline)
    return with_pipelines(plan, pipelines)


def with_pipelines(plan: Plan, pipelines: list[PipelinePlan], cards: list[RankPlan] | None = None) -> Plan:
    """The plan with these pipelines; ranks that none uses are dropped."""
    cards = cards or list(plan.ranks)
    used = sorted({r for p in pipelines for s in p.stages for r in s.ranks})
    number = {old: new for new, old in enumerate(used)}
    renumbered = tuple(
        replace(
            p,
            stages=tuple(
                replace(
                    s,
                    replicas=tuple(tuple(number[r] for r in group) for group in s.replicas),
                    embedding=i == 0,
                    head=i == len(p.stages) - 1,
                    recompute_layers=None
                    if s.recompute_layers is not None and s.recompute_layers >= s.num_blocks
                    else s.recompute_layers,
                    in_flight=s.in_flight if plan.schedule == "1f1b" else None,
                )
                for i, s in enumerate(p.stages)
            ),
        )
        for p in pipelines
    )
    ranks = tuple(replace(cards[old], rank=new) for old, new in number.items())
    return replace(plan, ranks=ranks, pipelines=renumbered, forecast=None)


def deepen(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """More or fewer micro-batches in flight, in one stage or in all up to it."""
    if plan.schedule != "1f1b":
        return None

    def change(stages: list[StagePlan]) -> list[StagePlan]:
        last, by = chance.randrange(len(stages)), chance.choice((1, 1, 2, 3, -1))
        first = 0 if chance.random() < 0.6 else last
        held = 0
        result: list[StagePlan] = []
        rest = sum(len(s.replicas) for s in stages)
        for i, stage in enumerate(stages):
            held = (stage.in_flight or rest) + (by if first <= i <= last else 0)
            result.append(replace(stage, in_flight=max(held, 1)))
            rest -= len(stage.replicas)
        return result

    return with_stages(plan, chance, change)


def move_layers(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """A few layers from one stage to another."""

    def change(stages: list[StagePlan]) -> list[StagePlan] | None:
        if len(stages) < 2:
            return None
        a, b = chance.sample(range(len(stages)), 2)
        if chance.random() < 0.5:
            b = a + chance.choice((-1, 1))
        if not 0 <= b < len(stages):
            return None
        counts = [int(s.num_layers) for s in stages]
        by = min(chance.choice((1, 1, 1, 2, 3)), counts[a])
        counts[a] -= by
        counts[b] += by
        return with_counts(stages, counts)

    return with_stages(plan, chance, change)


def with_counts(stages: list[StagePlan], counts: list[int]) -> list[StagePlan]:
    """The stages with so many layers each."""
    result: list[StagePlan] = []
    first = 0
    for stage, count in zip(stages, counts, strict=True):
        kept = min(stage.recompute_layers or count, count) or None
        kind = stage.recompute if count else "none"
        result.append(
            replace(
                stage,
                layers=(first, first + count),
                recompute=kind,
                recompute_layers=kept if stage.recompute_layers is not None and kind != "none" else None,
            )
        )
        first += count
    return result


def recompute(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """Another kind, or another number of recomputed layers."""

    def change(stages: list[StagePlan]) -> list[StagePlan] | None:
        i = chance.randrange(len(stages))
        stage = stages[i]
        if not stage.num_layers:
            return None
        kind = chance.choice(("none", "selective", "full", stage.recompute))
        count = max(1, min(stage.num_blocks, stage.num_recomputed + chance.choice((-2, -1, 1, 2))))
        if chance.random() < 0.3:
            count = chance.randint(1, stage.num_blocks)
        whole = kind == "none" or count >= stage.num_blocks
        stages[i] = replace(stage, recompute=kind, recompute_layers=None if whole else count)
        return stages

    return with_stages(plan, chance, change)


def size(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """Another micro-batch size, in all pipelines."""
    factor = chance.choice((0.5, 2, 2, 3))
    pipelines: list[PipelinePlan] = []
    for p in plan.pipelines:
        new = int(p.micro_batch_size * factor)
        if not new or p.num_sequences % new:
            return None
        pipelines.append(replace(p, micro_batch_size=new, num_micro_batches=p.num_sequences // new))
    return with_pipelines(plan, pipelines)


def shares(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """Some sequences from one pipeline to another, or another size in one pipeline."""
    pipelines = list(plan.pipelines)
    a = chance.randrange(len(pipelines))
    if chance.random() < 0.4 or len(pipelines) < 2:
        new = chance.choice((1, 2, 3, 4))
        if pipelines[a].num_sequences % new:
            return None
        count = pipelines[a].num_sequences // new
        pipelines[a] = replace(pipelines[a], micro_batch_size=new, num_micro_batches=count)
        return with_pipelines(plan, pipelines)
    b = chance.choice([i for i in range(len(pipelines)) if i != a])
    moved = pipelines[a].micro_batch_size * chance.choice((1, 1, 2, 3))
    left, right = pipelines[a].num_sequences - moved, pipelines[b].num_sequences + moved
    if left < 1 or right % pipelines[b].micro_batch_size:
        return None
    pipelines[a] = replace(pipelines[a], num_micro_batches=left // pipelines[a].micro_batch_size)
    pipelines[b] = replace(pipelines[b], num_micro_batches=right // pipelines[b].micro_batch_size)
    return with_pipelines(plan, pipelines)


def widths(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """A stage of two replicas as one of twice the width, or one wide stage as two of half of it."""

    def change(stages: list[StagePlan]) -> list[StagePlan] | None:
        i = chance.randrange(len(stages))
        ranks = stages[i].ranks
        width = chance.choice([w for w in (1, 2, 4, 8) if len(ranks) % w == 0])
        groups = tuple(ranks[j : j + width] for j in range(0, len(ranks), width))
        if not divides(plan, width):
            return None
        stages[i] = replace(stages[i], replicas=groups, in_flight=None)
        return stages

    made = with_stages(plan, chance, change)
    return made if made is not None and in_nodes(costs, made) else None


replicate = widths


def divides(plan: Plan, width: int) -> bool:
    """Whether groups of this width can share the model."""
    return all(count % width == 0 for count in plan.model.spec.tensor_sizes(plan.model).values())


def in_nodes(costs: Costs, plan: Plan) -> bool:
    """Whether all tensor-parallel groups are of one type of card and inside a node."""
    cards = [costs.cards[entry.device] for entry in plan.ranks]
    groups = [g for p in plan.pipelines for s in p.stages for g in s.replicas]
    return all(len({(cards[r].node, cards[r].type) for r in group}) == 1 for group in groups)


def swap(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """The cards of two stages change places."""

    def change(stages: list[StagePlan]) -> list[StagePlan] | None:
        if len(stages) < 2:
            return None
        a, b = chance.sample(range(len(stages)), 2)
        first, second = stages[a].replicas, stages[b].replicas
        if chance.random() < 0.5:
            stages[a] = replace(stages[a], replicas=second)
            stages[b] = replace(stages[b], replicas=first)
            return stages
        stages.insert(b, stages.pop(a))
        return with_counts(stages, [int(s.num_layers) for s in stages])

    return with_stages(plan, chance, change)


def merge(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """One stage less: its cards are left out, or join the neighbour as replicas or as a wider group."""

    def change(stages: list[StagePlan]) -> list[StagePlan] | None:
        if len(stages) < 2:
            return None
        i = chance.randrange(len(stages))
        j = i + 1 if i + 1 < len(stages) else i - 1
        counts = [int(s.num_layers) for s in stages]
        counts[j] += counts[i]
        ranks = (*stages[j].ranks, *stages[i].ranks)
        how = chance.choice(("leave", "replicas", "wider"))
        if how == "wider":
            stages[j] = replace(stages[j], replicas=(ranks,), in_flight=None)
        elif how == "replicas":
            if len(stages[i].replicas[0]) != len(stages[j].replicas[0]):
                return None
            groups = (*stages[j].replicas, *stages[i].replicas)
            stages[j] = replace(stages[j], replicas=groups, in_flight=None)
        del stages[i], counts[i]
        return with_counts(stages, counts)

    made = with_stages(plan, chance, change)
    return made if made is not None and in_nodes(costs, made) and all(
        divides(made, len(s.replicas[0])) for p in made.pipelines for s in p.stages
    ) else None  # fmt: skip


def split(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """One stage more: half of a stage's cards, or cards that the plan leaves out."""
    used = {entry.device for entry in plan.ranks}
    spare = [card for card in costs.cards.values() if card.name not in used]
    spare = [c for c in spare if costs.problem.cluster.device_type(c.type).peak(costs.problem.precision)]
    if spare and chance.random() < 0.5:
        card = chance.choice(spare)
        entry = RankPlan(rank=plan.world_size, device=card.name, type=card.type)
        entries = [*plan.ranks, entry]
        order = {name: i for i, name in enumerate(costs.cards)}
        p = chance.randrange(len(plan.pipelines))
        stages = list(plan.pipelines[p].stages)
        i = chance.randint(0, len(stages))
        new = StagePlan(replicas=((entry.rank,),), layers=(0, 0))
        counts = [int(s.num_layers) for s in stages]
        j = min(i, len(stages) - 1)
        taken = counts[j] // 2
        counts[j] -= taken
        stages.insert(i, new)
        counts.insert(i, taken)
        pipelines = list(plan.pipelines)
        pipelines[p] = replace(pipelines[p], stages=tuple(with_counts(stages, counts)))
        types = uncatalogued_types(costs.problem.cluster, {e.type for e in entries})
        made = with_pipelines(replace(plan, device_types=types), pipelines, entries)
        return sorted_ranks(made, order)

    def change(stages: list[StagePlan]) -> list[StagePlan] | None:
        i = chance.randrange(len(stages))
        ranks = stages[i].ranks
        if len(ranks) < 2:
            return None
        half = len(ranks) // 2
        counts = [int(s.num_layers) for s in stages]
        taken = counts[i] // 2
        counts[i] -= taken
        counts.insert(i + 1, taken)
        stages.insert(i + 1, replace(stages[i], replicas=(ranks[half:],), in_flight=None))
        stages[i] = replace(stages[i], replicas=(ranks[:half],), in_flight=None)
        return with_counts(stages, counts)

    made = with_stages(plan, chance, change)
    return made if made is not None and in_nodes(costs, made) and all(
        divides(made, len(s.replicas[0])) for p in made.pipelines for s in p.stages
    ) else None  # fmt: skip


def sorted_ranks(plan: Plan, order: dict[str, int]) -> Plan:
    """The plan with its ranks in the cluster's order."""
    ranked = sorted(plan.ranks, key=lambda entry: order[entry.device])
    number = {entry.rank: i for i, entry in enumerate(ranked)}
    pipelines = tuple(
        replace(
            p,
            stages=tuple(
                replace(s, replicas=tuple(tuple(number[r] for r in g) for g in s.replicas)) for s in p.stages
            ),
        )
        for p in plan.pipelines
    )
    ranks = tuple(replace(entry, rank=i) for i, entry in enumerate(ranked))
    return replace(plan, ranks=ranks, pipelines=pipelines)


def schedule(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """1F1B or zero bubble."""
    name = chance.choice(("1f1b", "zero_bubble"))
    return with_pipelines(replace(plan, schedule=name), list(plan.pipelines))


def sharding(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """The optimizer state sharded, or not."""
    return with_pipelines(
        replace(plan, optimizer_sharding=not plan.optimizer_sharding),
        [replace(p, stages=tuple(replace(s, optimizer_share=1.0) for s in p.stages)) for p in plan.pipelines],
    )


def weigh(costs: Costs, plan: Plan, chance: random.Random) -> Plan | None:
    """Another optimizer share of one stage."""
    if not plan.optimizer_sharding:
        return None

    def change(stages: list[StagePlan]) -> list[StagePlan]:
        i = chance.randrange(len(stages))
        share = stages[i].optimizer_share * chance.choice((0.5, 0.8, 1.25, 2))
        stages[i] = replace(stages[i], optimizer_share=share)
        return stages

    return with_stages(plan, chance, change)


if __name__ == "__main__":
    raise SystemExit(main())
