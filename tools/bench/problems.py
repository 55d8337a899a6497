"""Problems that benchmarks and tests of the planner share."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config.cluster import Cluster, Host, Link, NodeGroup, load_cluster
from yuan_train.config.devices import GIB, DeviceType
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.planner.costs.plan_problem import PlanProblem

TYPES = ("A100-80G", "A100-40G", "RTX-4090", "H100-80G")
SIZES = {64: (3, 48, 256), 256: (4, 84, 1024), 1024: (4, 126, 1024)}
"""By number of cards: types of card, layers, sequences per step."""


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
    groups = tuple(
        NodeGroup(
            name=f"{name}-x{size}".lower(),
            device=name,
            count=count,
            devices=size,
            link=Link(bandwidth=300e9, latency=3e-6),
            network=Link(bandwidth=25e9, latency=1e-5),
        )
        for (name, size), count in (sorted(nodes.items()) if irregular else nodes.items())
    )
    model = ModelConfig(
        name="bench",
        num_layers=num_layers,
        hidden_size=8192,
        num_attention_heads=64,
        ffn_hidden_size=32768,
        vocab_size=135_040,
    )
    return PlanProblem(
        cluster=Cluster(name="bench", nodes=groups),
        model=model,
        sequence_length=4096,
        global_batch_size=batch,
        precision="bf16",
    )


def small_problem(seed: int) -> PlanProblem:
    """2 to 12 cards of 1 to 3 types with little memory, and a model of 4 to 8 layers."""
    chance = random.Random(seed)
    model = ModelConfig(
        name="small",
        num_layers=chance.randint(4, 8),
        hidden_size=512,
        num_attention_heads=8,
        ffn_hidden_size=2048,
        vocab_size=8192,
        max_sequence_length=512,
        tie_embeddings=chance.random() < 0.5,
    )
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
        near = Link(bandwidth=chance.choice((5e9, 5e10)), latency=1e-5)
        far = Link(bandwidth=chance.choice((5e8, 2e9, 1e10)), latency=3e-5)
        nodes.append(NodeGroup(name=name.lower(), device=name, devices=count, link=near, network=far))
    return PlanProblem(
        cluster=Cluster(name=f"small-{seed}", nodes=tuple(nodes), device_types=types),
        model=model,
        sequence_length=512,
        global_batch_size=chance.choice((6, 8, 12)),
        precision="bf16",
    )


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
        if self.cluster:
            cluster = load_cluster(self.cluster)
        else:
            nodes = tuple(
                NodeGroup(
                    name=f"n{i}",
                    device=device,
                    devices=count,
                    link=Link(bandwidth=20e9, latency=10e-6),
                    network=Link(bandwidth=3e9, latency=20e-6),
                    host=Host(memory=int(hosts[i])) if hosts else None,
                )
                for i, (device, count) in enumerate(self.nodes)
            )
            cluster = Cluster(name="case", nodes=nodes)
        return PlanProblem(
            cluster=cluster,
            model=load_model(f"configs/model/{self.model}.yaml"),
            sequence_length=4096,
            global_batch_size=self.sequences,
            precision="bf16",
            host_reserved=self.reserved,
        )


TIER_CASES = {
    "2B, one A100-80G": TierCase("yuan2-2b", 64, (("A100-80G", 1),), fits_without=True),
    "2B, one A100-40G": TierCase("yuan2-2b", 64, (("A100-40G", 1),)),
    "2B, one RTX-3090": TierCase("yuan2-2b", 64, (("RTX-3090", 1),)),
    "2B, RTX-4090 and RTX-3080": TierCase("yuan2-2b", 64, (("RTX-4090", 1), ("RTX-3080", 1))),
    "2B, 4 RTX-3080": TierCase("yuan2-2b", 64, (("RTX-3080", 4),)),
    "51B, a800-a100": TierCase("yuan2-51b", 256, cluster="configs/cluster/a800-a100.yaml"),
}
