"""Problems that benchmarks and tests of the planner share."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tools.bench.runs import bench_model
from yuan_train.config.cluster import Cluster, Host, Link, NodeGroup, load_cluster
from yuan_train.config.devices import GIB, DeviceType
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import Plan, ScheduleName
from yuan_train.config.profile import Profile, ProfileEntry, UnitProfile
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.unit_costs import Costs, UnitCost, make_costs
from yuan_train.planner.costs.workload import PlanProblem
from yuan_train.planner.search.candidate import Space, TimeLimit
from yuan_train.planner.search.shapes import Options, PipelineCut, assemble_plan

TYPES = ("A100-80G", "A100-40G", "RTX-4090", "H100-80G")
SIZES = {64: (3, 48, 256), 256: (4, 84, 1024), 1024: (4, 126, 1024)}
"""By number of cards: types of card, layers, sequences per step."""


def node(
    name: str,
    device: str,
    devices: int = 1,
    *,
    near: tuple[float, float],
    far: tuple[float, float],
    **keys: Any,
) -> NodeGroup:
    """Equal nodes. Links within and between them: bytes a second, and seconds of latency."""
    link, network = (Link(bandwidth=rate, latency=latency) for rate, latency in (near, far))
    return NodeGroup(name=name, device=device, devices=devices, link=link, network=network, **keys)


def hand_plan(
    costs: Costs,
    pipelines: Sequence[Sequence[tuple[int, int]]],
    *,
    micro_batch_size: int = 1,
    recompute: Recompute = "none",
    schedule: ScheduleName = "1f1b",
    sharded: bool = False,
) -> Plan:
    """A plan of pipelines of equal shares, of (card, layers) for each stage; cards by their number in the
    cluster."""
    cards, sequences = costs.problem.cluster.cards, costs.problem.global_batch_size
    cuts: list[PipelineCut] = []
    for stages in pipelines:
        # Units are the embedding, the layers and the head.
        ends = list(itertools.accumulate((layers for _, layers in stages), initial=1))
        cuts.append(
            PipelineCut(
                micro_batch_size=micro_batch_size,
                num_micro_batches=sequences // micro_batch_size // len(pipelines),
                stage_groups=tuple(((cards[card],),) for card, _ in stages),
                bounds=(0, *ends[1:-1], ends[-1] + 1),
                recompute=(recompute,) * len(stages),
            )
        )
    return assemble_plan(costs, cuts, schedule=schedule, sharded=sharded)


def endless(costs: Costs, options: Options) -> Space:
    """All cards of a problem, searched without a limit of time."""
    return Space(costs, costs.problem.cluster.cards, options, TimeLimit(lambda: 0.0, 0.0, math.inf))


def large_problem(num_cards: int, *, irregular: bool) -> PlanProblem:
    """Nodes of 8 equal cards, the first type has what does not divide; irregular: of 8, 4 and 2 with types in
    unequal shares, drawn with a fixed seed. InfiniBand, and a model of Yuan 2.0's shape."""
    num_types, num_layers, batch = SIZES[num_cards]
    names, nodes = TYPES[:num_types], Counter[tuple[str, int]]()
    if irregular:
        rng, left = random.Random(num_cards), num_cards
        while left:
            size = min(rng.choice((8, 8, 4, 4, 2)), left)
            nodes[rng.choices(names, weights=range(1, num_types + 1))[0], size] += 1
            left -= size
    else:
        nodes.update({(name, 8): num_cards // 8 // num_types for name in names})
        nodes[names[0], 8] += num_cards // 8 - sum(nodes.values())
    groups = (
        node(f"{name}-x{size}".lower(), name, size, near=(300e9, 3e-6), far=(25e9, 1e-5), count=count)
        for (name, size), count in (sorted(nodes.items()) if irregular else nodes.items())
    )
    model = bench_model(num_layers, 8192, num_attention_heads=64, vocab_size=135_040)
    return make_problem(Cluster(name="bench", nodes=tuple(groups)), model, batch)


def make_problem(cluster: Cluster, model: ModelConfig, batch: int, **keys: Any) -> PlanProblem:
    """Sequences of 4,096 tokens, in fp16 where a card lacks bf16; `keys` say otherwise."""
    has_bf16 = all(cluster.device_type(card.type).bf16 for card in cluster.cards)
    given = {"sequence_length": 4096, "precision": "bf16" if has_bf16 else "fp16", **keys}
    return PlanProblem(cluster=cluster, model=model, global_batch_size=batch, **given)


def small_problem(seed: int) -> PlanProblem:
    """2 to 12 cards of 1 to 3 types with little memory, and a model of 4 to 8 layers."""
    chance = random.Random(seed)
    layers, is_tied = chance.randint(4, 8), chance.random() < 0.5
    model = bench_model(layers, 512, vocab_size=8192, max_sequence_length=512, tie_embeddings=is_tied)
    state = 16 * sum(model.unit_parameters)
    counts = [chance.randint(1, 4) for _ in range(chance.randint(1, 3))]
    counts[0] += sum(counts) < 2
    types: dict[str, DeviceType] = {}
    nodes: list[NodeGroup] = []
    for i, count in enumerate(counts):
        name, rate = f"Card{i}", chance.choice((5e12, 1e13, 3e13))
        memory = state * chance.choice((0.4, 0.8, 2.0, 8.0)) + 0.1 * GIB
        types[name] = DeviceType(
            memory=int(memory), reserved=0, fp32=rate / 2, bf16=rate, fp16=rate, memory_bandwidth=rate / 20
        )
        near, far = (chance.choice((5e9, 5e10)), 1e-5), (chance.choice((5e8, 2e9, 1e10)), 3e-5)
        nodes.append(node(name.lower(), name, count, near=near, far=far))
    return PlanProblem(
        cluster=Cluster(name=f"small-{seed}", nodes=tuple(nodes), device_types=types),
        model=model,
        sequence_length=512,
        global_batch_size=chance.choice((6, 8, 12)),
        precision="bf16",
    )


def with_external_profile(problem: PlanProblem, seed: int) -> PlanProblem:
    """The same with the times that another program measured of its cards, at some widths and sizes, and
    without or with full recompute: near the estimates, and none like another."""
    chance, costs = random.Random(f"profile-{seed}"), make_costs(problem)
    kinds: tuple[Recompute, ...] = chance.choice((("none",), ("none", "full")))
    widths = chance.choice(((1,), (1, 2), (1, 2, 4)))
    entries: list[ProfileEntry] = []

    def measured(unit: UnitCost, pace: float) -> UnitProfile:
        backward = unit.backward_seconds * pace * chance.uniform(0.9, 1.1)
        own = {name: getattr(unit, name) for name in ("state_bytes", "activation_bytes", "output_bytes")}
        return UnitProfile(forward_seconds=unit.forward_seconds * pace, backward_seconds=backward, **own)

    for name in problem.cluster.device_types:
        speed, lost, sizes = chance.uniform(0.6, 1.5), chance.random() / 4, chance.choice(((1,), (1, 2, 4)))
        for width, size, kind in itertools.product(widths, sizes, kinds):
            units, pace = costs.of(name, size, kind, width).units, speed * width**lost
            first, *layers, last = (measured(unit, pace * chance.uniform(0.95, 1.05)) for unit in units)
            own = ProfileEntry(device_type=name, embedding=first, layers=tuple(layers), head=last)
            entries.append(replace(own, tensor_parallel=width, micro_batch_size=size, recompute=kind))
    profile = Profile(sequence_length=problem.sequence_length, precision="bf16", entries=tuple(entries))
    return replace(problem, profile=profile)


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


def mixed_problem(cluster: str | int) -> PlanProblem:
    """Of a named cluster, or of the random one of a seed."""
    if isinstance(cluster, int):
        return _random_problem(cluster)
    words, model, batch, network = NAMED[cluster]
    nodes: list[tuple[int, int, str]] = []
    for part in words.split(", "):
        numbers, kind = part.split()
        count, _, each = numbers.rpartition("x")
        nodes.append((int(count or 1), int(each), kind))
    return _problem_of(nodes, _model(model), batch, network)


def _random_problem(seed: int) -> PlanProblem:
    """2 to 54 cards of 1 to 4 types in nodes of 1 to 8, and a model that should fit them."""
    chance = random.Random(seed)
    kinds = chance.sample(RANDOM_TYPES, chance.randint(1, 4))
    nodes = [(chance.randint(1, 3), chance.randint(1, 8), kind) for kind in kinds]
    while not 2 <= sum(count * each for count, each, _ in nodes) <= 54:
        i = chance.randrange(len(nodes))
        nodes[i] = (chance.randint(1, 3), chance.randint(1, 8), nodes[i][2])
    network, batch = chance.choice([1.25, 3.1, 12.5, 25.0]), chance.choice([7, 16, 32, 64, 128])
    models = [_model(name) for name in RANDOM_MODELS]
    bare = _problem_of(nodes, models[0], batch, network)
    memory = sum(bare.cluster.device_type(card.type).memory for card in bare.cluster.cards)
    fitting = [m for m in models if sum(m.unit_parameters) * BYTES_PER_PARAMETER < memory] or models[:1]
    return replace(bare, model=chance.choice(fitting[-3:]))


def _model(name: str) -> ModelConfig:
    return load_model(f"configs/model/{name}.yaml")


def _problem_of(
    nodes: Sequence[tuple[int, int, str]], model: ModelConfig, batch: int, network: float
) -> PlanProblem:
    """Nodes (count, cards, type) on a network of so many GB/s; fp16 where a card lacks bf16."""
    far = network * 1e9, 1e-5
    groups = (
        node(f"{kind.lower()}{i}", kind, each, near=(near, 5e-6), far=far, count=count)
        for i, (count, each, kind) in enumerate(nodes)
        for near in [300e9 if kind in FAST_LINKS else 20e9]
    )
    return make_problem(Cluster(name="mixed", nodes=tuple(groups)), model, batch)


@dataclass(frozen=True)
class TierCase:
    """A model on cards of these types, of each node a type and a count; catalogue rates, 4,096 tokens, bf16,
    20 GB/s within a node and 3 GB/s between nodes."""

    model: str
    sequences: int
    nodes: tuple[tuple[str, int], ...] = ()
    cluster: str = ""
    """A file, instead of nodes."""
    fits_without: bool = False
    reserved: int = 8 * GIB
    """Of each host."""

    def problem(self, hosts: Sequence[float] = ()) -> PlanProblem:
        """What to plan; `hosts`: bytes of each node's, if that is to be checked."""
        memory = [Host(memory=int(own)) for own in hosts] or [None] * len(self.nodes)
        nodes = (
            node(f"n{i}", device, count, near=(20e9, 10e-6), far=(3e9, 20e-6), host=memory[i])
            for i, (device, count) in enumerate(self.nodes)
        )
        cluster = load_cluster(self.cluster) if self.cluster else Cluster(name="case", nodes=tuple(nodes))
        return make_problem(cluster, _model(self.model), self.sequences, host_reserved=self.reserved)


TIER_CASES = {
    "2B, one A100-80G": TierCase("yuan2-2b", 64, (("A100-80G", 1),), fits_without=True),
    "2B, one A100-40G": TierCase("yuan2-2b", 64, (("A100-40G", 1),)),
    "2B, one RTX-3090": TierCase("yuan2-2b", 64, (("RTX-3090", 1),)),
    "2B, RTX-4090 and RTX-3080": TierCase("yuan2-2b", 64, (("RTX-4090", 1), ("RTX-3080", 1))),
    "2B, 4 RTX-3080": TierCase("yuan2-2b", 64, (("RTX-3080", 4),)),
    "51B, a800-a100": TierCase("yuan2-51b", 256, cluster="configs/cluster/a800-a100.yaml"),
}
