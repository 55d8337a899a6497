"""Trains the largest model that `plan --largest` names for a small simulated card, and measures its memory.

    python tools/check_largest.py [MIB]

The card has MIB (64) MiB, 8 of them `reserved`, and is a process of this machine, whose memory is its host's.
What counts as the card's is anonymous memory, sampled each millisecond: what the host holds is shared memory.
The process first trains a model of one layer, so that libraries have what they take once; what is taken
beyond that is the model's. Exits with 1 if that is more than the card has.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench_residence import FIELDS, Peak, resident, write_corpus

HIDDEN, VOCABULARY, LENGTH, STEPS = 256, 1024, 128, 10


def main(mebibytes: int) -> int:
    """Plan, train and compare; 1 if the model takes more than its card has."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "cluster.yaml").write_text(json.dumps(_cluster(mebibytes)))
        (work / "run.yaml").write_text(json.dumps(_run(work)))
        write_corpus(work)
        for name, largest in (("small", []), ("large", ["--largest"])):
            layers = [] if largest else ["model.num_layers=1"]
            found = _yuan("plan", "--cluster", "cluster.yaml", "--config", "run.yaml", "--out",
                          f"{name}.yaml", *largest, *layers, cwd=work)  # fmt: skip
            if largest:
                print(found.stderr.strip(), flush=True)
        environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
        child = [sys.executable, str(Path(__file__).resolve()), "--train", str(work)]
        done = subprocess.run(child, env=environment, cwd=work, stdout=subprocess.PIPE, check=True, text=True)
        measured = json.loads(done.stdout.splitlines()[-1])
    card, forecast = mebibytes * 2**20, measured["forecast"]
    loss = f"loss {measured['first']:.3f} to {measured['last']:.3f}"
    print(
        f"{measured['layers']} layers, {STEPS} steps, {loss}: "
        f"{measured['peak'] / 2**20:.1f} MiB of {mebibytes} on the card (forecast {forecast / 2**20:.1f}), "
        f"{measured['host'] / 2**20:.1f} MiB on the host (forecast {measured['host_forecast'] / 2**20:.1f})"
    )
    return int(measured["peak"] > card)


def _cluster(mebibytes: int) -> dict[str, object]:
    card = {
        "memory": f"{mebibytes} MiB",
        "reserved": "8 MiB",
        "bf16": "0.02 TFLOP/s",
        "fp32": "0.02 TFLOP/s",
        "memory_bandwidth": "5 GB/s",
        "backend": "gloo",
        "slowdown": 1.0,
    }
    nodes = [{"name": "one", "device": "Small", "devices": 1}]
    return {"name": "small", "nodes": nodes, "device_types": {"Small": card}}


def _run(work: Path) -> dict[str, object]:
    model = {
        "name": "shape", "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 4,
        "ffn_hidden_size": 4 * HIDDEN, "vocab_size": VOCABULARY, "max_sequence_length": LENGTH,
    }  # fmt: skip
    return {
        "model": model,
        "data": {
            "train": [{"prefix": str(work / "corpus")}],
            "sequence_length": LENGTH,
            "reset_position_ids": False,
        },
        "train": {"steps": STEPS, "global_batch_size": 2, "precision": "bf16", "device": "cpu"},
        "optimizer": {"learning_rate": 1e-3, "bucket_size": 1000000},
        "search": {"offload": ["optimizer"]},
    }


def _yuan(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "yuan_train", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, check=True, text=True)


def train_both(work: Path) -> None:
    """Train the small model, then the large one; print what the large one took, as JSON."""
    # Recompute imports it, which the small model does without.
    import torch._dynamo

    from yuan_train.config.plan_constraints import load_plan
    from yuan_train.config.run import load_run
    from yuan_train.train import run as run_module
    from yuan_train.train.job import Position, prepare

    torch.set_num_threads(1)
    # Freed memory must leave the process at once, to be told from what is in use.
    run_module.keep_freed_memory = lambda device: None  # pyright: ignore[reportAttributeAccessIssue]
    before: dict[str, int] = {}
    for name in ("small", "large"):
        plan = load_plan(work / f"{name}.yaml")
        run = load_run(
            work / "run.yaml",
            (f"model.num_layers={plan.model.num_layers}", f"log.directory={work / name}"),
        )
        before = {field: resident(field) for field in FIELDS}
        peak = Peak()
        run_module.train(prepare(run, plan, Position()))
        most = peak.end()
    assert plan.forecast is not None
    (stage,) = plan.forecast.stages
    lines = [json.loads(line) for line in (work / "large" / "metrics.jsonl").read_text().splitlines()]
    print(
        json.dumps(
            {
                "layers": plan.model.num_layers,
                "first": lines[0]["loss"],
                "last": lines[-1]["loss"],
                "peak": most["RssAnon"] - before["RssAnon"],
                "forecast": stage.peak_memory_bytes,
                "host": most["RssShmem"] - before["RssShmem"],
                "host_forecast": stage.host_memory_bytes,
            }
        )
    )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train_both(Path(sys.argv[2]))
    else:
        sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 64))
