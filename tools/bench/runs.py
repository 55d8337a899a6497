"""Small runs of the benchmarks: their configs, plans and files, and the commands that train them."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.project import parse_plan, read_metrics
from tests.support.spawn import as_rank, free_port
from tools.testbed.run import with_random_data
from yuan_train.config.load import dump, write_text
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.run import DataConfig, OptimizerConfig, RunConfig, Source, TrainConfig

TIMEOUT_SECONDS = 3600
"""Of a command."""
RETURN_FREED = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""The environment of a process that returns what it frees at once, to be told from what is in use."""


def bench_model(layers: int, hidden: int, **keys: Any) -> ModelConfig:
    """Heads of 64 and a feed-forward four times as wide as the model, unless `keys` say otherwise."""
    widths = {"num_attention_heads": hidden // 64, "ffn_hidden_size": 4 * hidden}
    return ModelConfig(
        **{"name": "bench", "num_layers": layers, "hidden_size": hidden, "vocab_size": 1024, **widths, **keys}
    )


def make_run(
    model: ModelConfig, *, tokens: int = 0, batch: int = 1, optimizer: Mapping[str, Any] = {}, **train: Any
) -> RunConfig:
    """A run on the CPU, of sequences of so many tokens (0: the model's longest), without data."""
    data = DataConfig(
        train=(Source(prefix="none"),),
        sequence_length=tokens or model.max_sequence_length,
        reset_position_ids=False,
    )
    settings = TrainConfig(**{"steps": 1, "global_batch_size": batch, "device": "cpu", **train})
    steps = OptimizerConfig(**{"learning_rate": 1e-4, **optimizer})
    return RunConfig(model=model, data=data, train=settings, optimizer=steps)


def write_run(path: Path, run: RunConfig) -> RunConfig:
    """The run on random tokens, which are written beside its file."""
    made = with_random_data(run, path.parent)
    write_text(path, dump(made))
    return made


def wide_plan(run: RunConfig, pipelines: Sequence[Sequence[tuple[int, int]]], **keys: Any) -> Plan:
    """A plan of pipelines of equal shares, of (layers, tensor-parallel width) for each stage."""
    ranks = itertools.count()
    number = run.train.global_batch_size // len(pipelines)
    cuts = (
        " | ".join(f"{layers}@{','.join(str(next(ranks)) for _ in range(width))}" for layers, width in own)
        for own in pipelines
    )
    return parse_plan(run, " / ".join(f"1x{number}: {own}" for own in cuts), **keys)


def yuan_train(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a `yuan-train` command. Raises SystemExit with what it said if it fails, and TimeoutExpired
    after TIMEOUT_SECONDS."""
    command = [sys.executable, "-m", "yuan_train", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS)
    if done.returncode:
        raise SystemExit(done.stderr[-4000:])
    return done


def run_ranks(
    body: Callable[..., Any], num_ranks: int, *arguments: Any, environment: Mapping[str, str] = {}
) -> list[Any]:
    """What `body(rank, *arguments)` returns in each of so many new processes, which are as a launcher's."""
    import torch.multiprocessing as mp

    results = mp.get_context("spawn").SimpleQueue()
    with patch.dict(os.environ, environment):
        mp.spawn(_run_rank, (num_ranks, free_port(), results, body, arguments), num_ranks)
    found = dict(results.get() for _ in range(num_ranks))
    return [found[rank] for rank in range(num_ranks)]


def _run_rank(
    rank: int, num_ranks: int, port: int, results: Any, body: Callable[..., Any], arguments: Any
) -> None:
    as_rank(rank, num_ranks, port)
    results.put((rank, body(rank, *arguments)))


def train(run_file: str | Path, plan: Plan, folder: Path, *changes: str) -> list[dict[str, Any]]:
    """The metrics of each step of a run under a plan, in as many processes as it has ranks."""
    save_plan(folder / "plan.yaml", plan)
    log = folder / "log"
    (log / "metrics.jsonl").unlink(missing_ok=True)
    own = (f"log.directory={log}", "log.every=1", "checkpoint.directory=", "validation.every=0")
    yuan_train("launch", "--config", run_file, "--plan", folder / "plan.yaml", *own, *changes)
    return read_metrics(log)
