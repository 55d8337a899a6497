"""python tools/bench_compile.py: a forward and backward with compiled layers against one with plain layers.

Both run as the engine runs them, weight gradients and buckets included, in one process, in turns. Seconds are
the median of the turns: the CPU time of one thread, which other processes hardly affect, or with `--device
cuda` those of the card. The vocabulary is small: layers are nearly all of the work. Bytes are what autograd
saves, in hidden states per layer.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch

from yuan_train.config.architecture import sharding_of
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import single_card_plan
from yuan_train.config.run import DataConfig, OptimizerConfig, RunConfig, Source, TrainConfig
from yuan_train.models.compiled import compile_blocks
from yuan_train.models.dropout import DropoutSeed
from yuan_train.models.initial import initial_rows
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.apply import ModelParts, parallelize
from yuan_train.profile.units import machine_name
from yuan_train.train.build import DTYPES
from yuan_train.train.job import Position, choose_device


@dataclass(frozen=True)
class Case:
    """A precision and what the layers do besides their products."""

    precision: str
    recompute: str
    hidden_dropout: float


CASES = [
    *(
        Case(precision, recompute, 0.0)
        for precision in ("fp32", "bf16")
        for recompute in ("none", "selective")
    ),
    Case("fp32", "full", 0.0),
    Case("fp32", "none", 0.1),
]


def main() -> int:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-length", type=int, default=512)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    card = choose_device(options.device, Position()).facts()
    machine = f"{machine_name()}, one thread" if card is None else card.name
    print(f"Machine: {machine}; torch {torch.__version__}")
    print(
        f"{options.layers} layers of hidden {options.hidden_size}, one sequence of {options.sequence_length}"
    )
    print("\n| precision | recompute | dropout | plain ms | compiled ms | ratio | saved | saved | first s |")
    print("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    for case in CASES:
        measure(case, options)
    return 0


def measure(case: Case, options: argparse.Namespace) -> None:
    """Measure a case and print its line."""
    plain, compiled = (Stage(case, options, compile=compile) for compile in (False, True))
    torch.compiler.reset()
    plain.step()
    start = time.perf_counter()
    compiled.step()
    first = time.perf_counter() - start
    turns = [(plain.step(), compiled.step()) for _ in range(options.turns)]
    seconds = [statistics.median(times) for times in zip(*turns, strict=True)]
    saved = [stage.saved_hidden_states() / options.layers for stage in (plain, compiled)]
    print(
        f"| {case.precision} | {case.recompute} | {case.hidden_dropout:g} | {1e3 * seconds[0]:.1f} "
        f"| {1e3 * seconds[1]:.1f} | {seconds[1] / seconds[0]:.2f} | {saved[0]:.1f} | {saved[1]:.1f} "
        f"| {first:.1f} |",
        flush=True,
    )


class Stage:
    """A whole model with its buckets, and one micro-batch."""

    def __init__(self, case: Case, options: argparse.Namespace, *, compile: bool) -> None:
        run = make_run(case, options)
        sharding, row_blocks = sharding_of(run.model)
        parts = ModelParts(
            build=lambda stage: Transformer(
                run.model, recompute=case.recompute, device="meta", dtype=DTYPES[case.precision]
            ),
            initial=partial(initial_rows, run.model, seed=0),
            sharding=sharding,
            row_blocks=row_blocks,
            compile=(lambda part: compile_blocks(cast(Transformer, part))) if compile else None,
        )
        self.device = choose_device(options.device, Position())
        self.runtime = parallelize(
            single_card_plan(run), 0, parts, device=self.device, dtype=DTYPES[case.precision]
        )
        self.model = cast(Transformer, self.runtime.parts[0])
        shape = (1, options.sequence_length)
        self.tokens_BS = torch.randint(run.model.vocab_size, shape, device=self.device.torch)

    def forward(self) -> torch.Tensor:
        """The loss."""
        hidden_BSH = self.model(self.tokens_BS, dropout_seed=DropoutSeed(0, 0))
        return self.model.loss(hidden_BSH, self.tokens_BS, gradient_scale=1.0)

    def step(self) -> float:
        """Seconds of a forward and its backward: of a card, or of this process."""
        clock = time.perf_counter if self.device.is_card else time.process_time
        self.device.finish()
        start = clock()
        self.forward().backward()
        self.device.finish()
        return clock() - start

    def saved_hidden_states(self) -> float:
        """Bytes that autograd saves besides weights, each storage once, over those of a hidden state."""
        weights = {parameter.untyped_storage().data_ptr() for parameter in self.model.parameters()}
        saved: dict[int, int] = {}

        def record(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                saved[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
            self.forward()
        dtype = next(self.model.parameters()).dtype
        return sum(saved.values()) / (self.tokens_BS.numel() * self.model.config.hidden_size * dtype.itemsize)


def make_run(case: Case, options: argparse.Namespace) -> RunConfig:
    """A run of one micro-batch of one sequence."""
    return RunConfig(
        model=ModelConfig(
            name="bench",
            num_layers=options.layers,
            hidden_size=options.hidden_size,
            num_attention_heads=options.hidden_size // 64,
            ffn_hidden_size=4 * options.hidden_size,
            vocab_size=512,
            max_sequence_length=options.sequence_length,
            hidden_dropout=case.hidden_dropout,
        ),
        data=DataConfig(
            train=(Source(prefix="none"),),
            sequence_length=options.sequence_length,
            reset_position_ids=False,
        ),
        train=TrainConfig(steps=1, global_batch_size=1),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


if __name__ == "__main__":
    raise SystemExit(main())
