"""python tools/bench_memory.py: peak memory of each rank with 8 and with 64 micro-batches.

Under 1F1B a stage keeps as many micro-batches in flight as there are stages from it to the end, so its memory
must not grow with the number of micro-batches. One pipeline of three ranks over gloo, or with `--device cuda`
on three cards.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import socket
import sys
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch

from yuan_train.config.architecture import sharding_of
from yuan_train.config.document import Document
from yuan_train.config.load import build
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan
from yuan_train.config.run import RunConfig
from yuan_train.models.initial import initial_rows
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.apply import ModelParts, parallelize
from yuan_train.parallel.device import Device
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.groups import init_distributed, shutdown
from yuan_train.profile.units import machine_name
from yuan_train.train.job import Position, choose_device

NUM_STAGES = 3


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=512)
    parser.add_argument("--sequence-length", type=int, default=1024)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    growth = {n: measure(options.hidden_size, options.sequence_length, n, options.device) for n in (8, 64)}
    print(f"Machine: {machine_name()}")
    boundary = options.hidden_size * options.sequence_length * 4 / 2**20
    print(
        f"1F1B, {NUM_STAGES} stages of 2 layers, messages of {boundary:.0f} MiB; "
        "growth of peak memory over a step, MiB\n"
    )
    print("| micro-batches | " + " | ".join(f"stage {s}" for s in range(NUM_STAGES)) + " |")
    print("|--:" * (NUM_STAGES + 1) + "|")
    for number, ranks in growth.items():
        print(f"| {number} | " + " | ".join(f"{mib:.0f}" for mib in ranks) + " |")
    return 0


def measure(hidden_size: int, sequence_length: int, num_micro_batches: int, kind: str) -> list[float]:
    """The growth of each rank's peak memory in one step, in MiB."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    shape = (hidden_size, sequence_length, num_micro_batches)
    ranks = [
        context.Process(target=run_rank, args=(rank, port, shape, kind, results))
        for rank in range(NUM_STAGES)
    ]
    for process in ranks:
        process.start()
    found = dict(results.get(timeout=600) for _ in ranks)
    for process in ranks:
        process.join()
    return [found[rank] for rank in range(NUM_STAGES)]


def run_rank(rank: int, port: int, shape: tuple[int, int, int], kind: str, results) -> None:  # pyright: ignore
    """Run one step of one stage, and put (rank, growth of peak memory in MiB) into `results`."""
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(NUM_STAGES),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    device = choose_device(kind, Position(rank, NUM_STAGES, rank, NUM_STAGES))
    init_distributed(device=device, timeout_seconds=300)
    plan = make_plan(*shape)
    sharding, row_blocks = sharding_of(plan.model)
    parts = ModelParts(
        build=lambda stage: Transformer(
            plan.model, layers=stage.layers, embedding=stage.embedding, head=stage.head, device="meta"
        ),
        initial=partial(initial_rows, plan.model, seed=0),
        sharding=sharding,
        row_blocks=row_blocks,
    )
    runtime = parallelize(plan, rank, parts, device=device, dtype=torch.float32)
    works = {s: Stage(cast(Transformer, part), shape[1], device) for s, part in runtime.parts.items()}
    executor = Executor(works, runtime.bridge, Stopwatch(device))
    before = peak_mib(device)
    executor.run(runtime.program)
    device.finish()
    results.put((rank, peak_mib(device) - before))
    shutdown()


def peak_mib(device: Device) -> float:
    """The most memory that tensors have taken of a card, or this process of its host."""
    card = device.memory()
    if card is not None:
        return card.most_allocated / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class Stage:
    """Runs one stage's part of the model on random tokens."""

    def __init__(self, model: Transformer, sequence_length: int, device: Device) -> None:
        self.model = model
        self.tokens_BS = torch.randint(model.config.vocab_size, (1, sequence_length), device=device.torch)

    def load(self, micro_batch: int) -> None:
        """The tokens are always the same."""

    def forward(self, micro_batch: int, hidden_BSH: torch.Tensor | None) -> torch.Tensor:
        output = self.model(self.tokens_BS if hidden_BSH is None else hidden_BSH)
        return self.model.loss(output, self.tokens_BS) if self.model.has_head else output

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[None]:
        assert not split, "1F1B does not split backwards"
        return nullcontext()

    def backward_weight(self, micro_batch: int) -> None:
        raise AssertionError("no backward is split")


def make_plan(hidden_size: int, sequence_length: int, num_micro_batches: int) -> Plan:
    """A 1F1B plan of NUM_STAGES stages of two layers, a rank each."""
    values = {
        "model": {
            "name": "bench",
            "num_layers": 2 * NUM_STAGES,
            "hidden_size": hidden_size,
            "num_attention_heads": 8,
            "ffn_hidden_size": 4 * hidden_size,
            "vocab_size": 1024,
            "max_sequence_length": sequence_length,
        },
        "data": {
            "train": [{"prefix": "none"}],
            "sequence_length": sequence_length,
            "reset_position_ids": False,
        },
        "train": {"steps": 1, "global_batch_size": num_micro_batches},
        "optimizer": {"learning_rate": 1e-3},
    }
    run = build(Document("bench", json.loads(json.dumps(values)), {}), RunConfig)
    stages = tuple(
        StagePlan(replicas=((s,),), layers=(2 * s, 2 * s + 2), embedding=s == 0, head=s == NUM_STAGES - 1)
        for s in range(NUM_STAGES)
    )
    return Plan(
        model=run.model,
        sequence_length=sequence_length,
        global_batch_size=num_micro_batches,
        ranks=tuple(RankPlan(rank=s, device=f"cpu/{s}", type="cpu") for s in range(NUM_STAGES)),
        pipelines=(PipelinePlan(micro_batch_size=1, num_micro_batches=num_micro_batches, stages=stages),),
    )


if __name__ == "__main__":
    sys.exit(main())
