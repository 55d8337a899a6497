"""Whether plans of small random problems keep what was asked.

Problems (1 to 8 cards in 1 to 3 nodes, models with and without experts, adapters and tied embeddings, little
memory, any search keys) are planned with little effort. The plan is checked as it is read back from its file:
every constraint of plans, every search key, its schedule step by step, the forecast, and the memory of cards,
counted here anew.
"""

from __future__ import annotations

import math
import random
import tempfile
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.bench.harness import MISSED, Row, case, cost
from tools.bench.problems import node
from tools.bench.runs import bench_model
from yuan_train.config.cluster import Cluster, Disk, Host, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.errors import ConfigError, NoPlanFits
from yuan_train.config.model import LoraConfig, ModelConfig, validate_model
from yuan_train.config.plan import PipelinePlan, Plan
from yuan_train.config.plan_constraints import load_plan, save_plan, validate_plan
from yuan_train.config.run import SearchConfig
from yuan_train.planner.costs.unit_costs import logit_rows, make_costs
from yuan_train.planner.costs.workload import (
    STATE_BYTES,
    PlanProblem,
    TensorGroup,
    TokenRows,
    has_flash,
    model_work,
)
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.search.search import search_plan
from yuan_train.schedule.check import check_schedule
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import RankProgram, Schedule

TIME_LIMIT = 0.25
"""Of each search, which tries less for it; by a clock that stands still, so that none is ended by it."""
KEYS: dict[str, tuple[Any, ...]] = {
    "tensor": ((1,), (2,), (1, 2), (4,)),
    "pipelines": ((1,), (2,), (1, 2)),
    "num_micro_batches": ((4,), (2, 4, 8)),
    "micro_batch_size": ((1,), (2,), (1, 2), (3,)),
    "replicas": ((1,), (2,), (1, 2)),
    "optimizer_sharding": ((True,), (False,)),
    "recompute": (("none",), ("full",), ("selective",), ("none", "full")),
    "schedule": (("1f1b",), ("gpipe",), ("zero_bubble",), ("interleaved_1f1b",), ("1f1b", "zero_bubble")),
    "device_order": ("fixed",),
    "use_all_devices": (True,),
    "offload": ((), ("optimizer",), ("activations",), ("optimizer", "disk"), ("parameters",)),
    "memory_fraction": (0.5, 1.0),
    "half_layers": (True,),
    "divide_experts": (False,),
    "overlap": (False,),
    "simplicity": (0.0, 0.05),
}


@case("planner/random", problems=(1000,), seed=(0,))
def random_problems(problems: int, seed: int) -> Row:
    """How many problems had a plan, had none, or were refused; and the faults of plans, with their seeds."""
    counts, told, row = Counter[str](), list[str](), Row(problems=problems, seed=seed)
    with cost(row):
        for number in range(seed, seed + problems):
            answer, faults = check_problem(number)
            counts[answer] += 1
            counts["with faults"] += bool(faults)
            told += [f"seed {number}: {fault}" for fault in faults]
    names = ("plan", "no plan", "refused", "error", "with faults")
    return row | {name: counts[name] for name in names} | {MISSED: "\n".join(told)}


def check_problem(seed: int) -> tuple[str, list[str]]:
    """(`plan`, `no plan`, `refused` or `error`, the faults) of a random problem."""
    problem, search = random_problem(seed)
    try:
        found = search_plan(problem, search, micro_batch_size=1, thorough=False, clock=lambda: 0.0)
    except NoPlanFits:
        return "no plan", []
    except ConfigError:
        return "refused", []
    except Exception:
        return "error", [traceback.format_exc()]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "plan.yaml"
        save_plan(path, found.best.plan)
        plan = load_plan(path)
    faults = [*faults_of(problem, search, plan)]
    if plan != found.best.plan:
        faults.append("the plan differs from the one in its file")
    even = validate_plan(found.even_split.plan) if found.even_split else ()
    faults += [f"even split: {violation}" for violation in even]
    return "plan", faults


# --- problems --------------------------------------------------------------------------------------------


def random_problem(seed: int) -> tuple[PlanProblem, SearchConfig]:
    """A problem, and search keys for it; the same for the same seed."""
    chance = random.Random(seed)
    model = _random_model(chance)
    cluster = _random_cluster(chance, sum(model.unit_parameters))
    keys = {name: chance.choice(values) for name, values in KEYS.items() if chance.random() < 0.15}
    search = SearchConfig(time_limit=TIME_LIMIT, effort="quick", **keys)
    problem = PlanProblem(
        cluster=cluster,
        model=model,
        sequence_length=chance.choice((64, 256, 512)),
        global_batch_size=chance.choice((1, 3, 4, 8, 12, 30)),
        precision=chance.choice(("bf16", "bf16", "fp16", "fp32")),
        sends=search.send_mode,
        reduce_dtype=chance.choice(("fp32", "fp32", "bf16")),
        bucket_size=chance.choice((10**5, 4 * 10**7)),
        memory_fraction=search.memory_fraction,
        host_reserved=0,
        critic=model.lora is None and chance.random() < 0.1,
    )
    return problem, search


def _random_model(chance: random.Random) -> ModelConfig:
    """1 to 10 layers of hidden size 64 to 512, of any architecture."""
    heads = chance.choice((2, 4, 8))
    hidden = heads * chance.choice((32, 64))
    layers, given = chance.randint(1, 10), dict[str, Any](num_attention_heads=heads, max_sequence_length=512)
    given |= {"ffn_hidden_size": hidden * chance.choice((2, 4)), "vocab_size": chance.choice((512, 8192))}
    given |= {"tie_embeddings": chance.random() < 0.5}
    kind = chance.choice(("yuan", "llama", "qwen", "experts", "lora"))
    if kind in ("llama", "qwen"):
        given |= {"architecture": kind, "num_key_value_heads": chance.choice((1, 2))}
        given |= {"qkv_bias": True} if kind == "qwen" else {}
    elif kind == "experts":
        given |= {"expert_ffn_hidden_size": chance.choice((64, 256)), "experts_per_token": 2}
        given |= {"num_experts": chance.choice((4, 8))}
    elif kind == "lora":
        given |= {"lora": LoraConfig(rank=chance.choice((2, 8)))}
    model = bench_model(layers, hidden, name="small", **given)
    assert not list(validate_model(model)), list(validate_model(model))
    return model


def _random_cluster(chance: random.Random, parameters: int) -> Cluster:
    """1 to 8 cards of 1 to 3 nodes; together they hold 4 to 160 bytes of each parameter."""
    counts = [chance.choice((1, 1, 2, 2, 3, 4)) for _ in range(chance.randint(1, 3))]
    while sum(counts) > 8:
        counts.pop()
    each = parameters * chance.choice((4, 12, 16, 20, 30, 60, 160)) / sum(counts)
    types: dict[str, DeviceType] = {}
    nodes: list[NodeGroup] = []
    for i, count in enumerate(counts):
        rate = chance.choice((1e12, 1e13, 3e13))
        types[f"Card{i}"] = DeviceType(
            memory=int(each * chance.uniform(0.5, 1.5)) + 2 ** chance.choice((22, 25, 26, 27)),
            reserved=chance.choice((0, 2**20)),
            fp32=rate / 2,
            bf16=rate if chance.random() < 0.9 else None,
            fp16=rate,
            memory_bandwidth=rate / 20,
        )
        host = Host(memory=int(each * chance.choice((0.2, 1, 8)))) if chance.random() < 0.5 else None
        disk = Disk(read=1e9, write=5e8, capacity=int(8 * each)) if chance.random() < 0.5 else None
        near, far = (chance.choice((5e9, 5e10)), 1e-5), (chance.choice((1e8, 2e9, 1e10)), 3e-5)
        name = f"Card{chance.randrange(i + 1)}"
        nodes.append(node(f"n{i}", name, count, near=near, far=far, host=host, disk=disk))
    return Cluster(name="small", nodes=tuple(nodes), device_types=types)


# --- checks ----------------------------------------------------------------------------------------------


def faults_of(problem: PlanProblem, search: SearchConfig, plan: Plan) -> Iterator[str]:
    """What a plan breaks of its own constraints, of the search keys, and of memory."""
    violations = [str(violation) for violation in validate_plan(plan)]
    yield from violations
    if violations:
        return
    yield from _key_faults(problem, search, plan)
    for pipeline in plan.pipelines:
        try:
            check_schedule(_schedule_of(plan, pipeline), pipeline.workers)
        except ValueError as error:
            yield f"schedule: {error}"
    cost = cost_plan(make_costs(problem), plan)
    if not cost.fits:
        yield "the forecast does not fit its cards, hosts or disks"
    if plan.forecast is None or abs(plan.forecast.step_seconds / cost.step_seconds - 1) > 1e-9:
        yield f"forecast {plan.forecast and plan.forecast.step_seconds} s, priced {cost.step_seconds} s"
    for rank, needed in enumerate(least_bytes(problem, plan)):
        room = problem.usable_bytes(plan.ranks[rank].type)
        if needed > room:
            yield f"rank {rank} needs {needed:.0f} bytes at least, and may fill {room:.0f}"


def _key_faults(problem: PlanProblem, search: SearchConfig, plan: Plan) -> Iterator[str]:
    """Values that a search key excludes."""
    counts = [pipeline.num_micro_batches for pipeline in plan.pipelines]
    sizes = [pipeline.micro_batch_size for pipeline in plan.pipelines]
    found: dict[str, set[Any]] = {
        "tensor": {len(replica) for stage in plan.stages for replica in stage.replicas},
        "pipelines": {len(plan.pipelines)},
        "num_micro_batches": set(counts),
        "micro_batch_size": set(sizes),
        "replicas": {len(stage.replicas) for stage in plan.stages},
        "optimizer_sharding": {plan.optimizer_sharding},
        "recompute": {stage.recompute for stage in plan.stages if stage.num_blocks},
        "schedule": {plan.schedule},
    }
    for name, values in found.items():
        allowed = getattr(search, name)
        if allowed is not None and not values <= set(allowed):
            yield f"search.{name}: {sorted(allowed)}, and the plan has {sorted(values)}"
    cards = [card.name for card in problem.cluster.cards]
    used = {entry.device for entry in plan.ranks}
    if search.use_all_devices and used != set(cards):
        yield f"search.use_all_devices: {sorted(set(cards) - used)} are idle"
    if search.device_order == "fixed":
        for pipeline in plan.pipelines:
            firsts = [cards.index(plan.ranks[stage.ranks[0]].device) for stage in pipeline.stages]
            if len(set(firsts)) == len(firsts) and firsts != sorted(firsts):
                yield f"search.device_order: fixed, and stages are on cards {firsts}"
    if not search.half_layers and plan.divided_layers:
        yield f"search.half_layers: false, and layers {sorted(plan.divided_layers)} are divided"
    tiers = {
        # What is not in pages is beside them.
        "optimizer": any(stage.optimizer_offload for stage in plan.stages)
        and not any(stage.parameter_offload for stage in plan.stages),
        "activations": any(stage.activation_offload for stage in plan.stages),
        "parameters": any(stage.parameter_offload for stage in plan.stages),
        "disk": any(stage.optimizer_disk for stage in plan.stages),
    }
    away = {name for name, is_used in tiers.items() if is_used}
    if not away <= set(search.tiers):
        yield f"search.offload: {search.tiers}, and the plan uses {sorted(away)}"


def least_bytes(problem: PlanProblem, plan: Plan) -> list[float]:
    """By rank, bytes that a card needs at least: reserved, weights, gradients and its part of the optimizer
    state, and what its micro-batches in flight keep. Not counted: work space, buffers, messages, pages,
    experts of groups that divide them, activations of layers that leave the card."""
    owned: defaultdict[int, float] = defaultdict(float)
    for stage in plan.stages:
        for layer in range(math.floor(stage.layers[0]), math.ceil(stage.layers[1])):
            owned[layer] += stage.optimizer_share * len(stage.replicas)
    needed = [float(problem.cluster.device_type(entry.type).reserved) for entry in plan.ranks]
    for pipeline in plan.pipelines:
        for worker, program in enumerate(_schedule_of(plan, pipeline)):
            held = [s for s, workers in enumerate(pipeline.workers) if worker in workers]
            for rank in pipeline.worker_replicas[worker]:
                bytes_of = {s: _stage_bytes(problem, plan, pipeline, s, rank, owned) for s in held}
                needed[rank] += sum(states for states, _ in bytes_of.values())
                needed[rank] += _peak(program, {s: kept for s, (_, kept) in bytes_of.items()})
    return needed


def _peak(program: RankProgram, kept: dict[int, float]) -> float:
    """The most that a worker's micro-batches in flight keep, of so many bytes each in each stage."""
    ends = "backward_weight" if any(step.kind == "backward_weight" for step in program) else "backward"
    held = most = 0.0
    for step in program:
        if step.kind == "forward":
            held += kept[step.stage]
            most = max(most, held)
        elif step.kind == ends:
            held -= kept[step.stage]
    return most


def _stage_bytes(
    problem: PlanProblem, plan: Plan, pipeline: PipelinePlan, s: int, rank: int, owned: dict[int, float]
) -> tuple[float, float]:
    """(states, what a micro-batch keeps) of a stage on one of its cards, of whole layers alone."""
    stage = pipeline.stages[s]
    device, width = problem.cluster.device_type(plan.ranks[rank].type), len(stage.replicas[0])
    if stage.parameter_offload or (plan.model.num_experts and width > 1):
        return 0.0, 0.0
    work = model_work(
        plan.model,
        TokenRows(pipeline.micro_batch_size, plan.sequence_length, problem.precision),
        logit_rows=logit_rows(device),
        group=TensorGroup(width),
        flash=has_flash(device),
    )
    state, layer = STATE_BYTES[problem.precision], work.layer
    layers = range(math.ceil(stage.layers[0]), math.floor(stage.layers[1]))
    copies = 2 if problem.critic else 1
    states = (state.parameters * layer.parameters + state.gradients * layer.trained) * len(layers)
    for number in layers:
        share = stage.optimizer_share / owned[number] if plan.optimizer_sharding else 1.0
        states += (1 - stage.optimizer_offload) * share * state.optimizer * layer.trained
    if stage.activation_offload:
        return copies * states, 0.0
    recomputed = min(stage.num_recomputed, len(layers))
    kept = recomputed * layer.kept_bytes(stage.recompute)
    return copies * states, kept + (len(layers) - recomputed) * layer.activation_bytes


def _schedule_of(plan: Plan, pipeline: PipelinePlan) -> Schedule:
    return make_schedule(
        plan.schedule,
        num_micro_batches=pipeline.num_micro_batches,
        workers=pipeline.workers,
        in_flight=pipeline.depths(plan.schedule),
        group=pipeline.page_group,
    )
