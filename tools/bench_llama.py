"""python -m tools.bench_llama: a slice of Llama-3.2-1B in bf16, alone and cut over two processes.

Trains some steps of a Llama with the widths of Llama-3.2-1B (hidden 2048, 32 heads, 8 key-value heads, feed-
forward 8192) on random tokens twice: in one process, and in two of which the first holds more layers. Prints
a table of losses, seconds and memory. Four of its 16 layers take about 5 GB of state.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml

from tools.testbed.run import with_random_data
from yuan_train.config.load import dump, write_text
from yuan_train.config.run import load_run
from yuan_train.profile.units import machine_name

TIMEOUT_SECONDS = 3000


def main() -> int:
    """Train under both plans and print the table; the exit code is 1 if the losses differ by 1e-3."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--tokens", type=int, default=128, help="of a sequence")
    parser.add_argument("--steps", type=int, default=3)
    options = parser.parse_args()
    print(f"Machine: {machine_name()}\n")
    print("| plan | parameters | loss of each step | seconds of each step | peak memory of each rank, GB |")
    print("|---|--:|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole = [[0, options.layers]]
        first = options.layers - max(options.layers // 3, 1)
        cut = [[0, first], [first, options.layers]]
        losses = [_train(folder, options, cuts) for cuts in (whole, cut)]
    worst = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    print(f"\nLargest relative difference of the losses: {worst:.1e}.")
    return int(worst > 1e-3)


def _train(folder: Path, options: argparse.Namespace, cuts: list[list[int]]) -> list[float]:
    """Train under the plan with these stages, print its row, and return the losses."""
    label = " + ".join(str(end - first) for first, end in cuts)
    log = folder / f"log-{len(cuts)}"
    run_file, plan_file = folder / "run.yaml", folder / "plan.yaml"
    run = load_run(_run_file(folder, options))
    run = with_random_data(run, folder)
    write_text(run_file, dump(run))
    plan = {
        "version": 1,
        "model": yaml.safe_load(dump(run.model)),
        "sequence_length": options.tokens,
        "global_batch_size": 2,
        "ranks": [{"rank": rank, "device": f"n/{rank}", "type": "CPU"} for rank in range(len(cuts))],
        "device_types": {"CPU": _cpu()},
        "pipelines": [{"micro_batch_size": 1, "num_micro_batches": 2, "stages": _stages(cuts)}],
    }
    plan_file.write_text(yaml.safe_dump(plan))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={len(cuts)}"]
    command += ["-m", "yuan_train", "train", "--config", str(run_file), "--plan", str(plan_file)]
    command += [f"log.directory={log}"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
    )
    if ran.returncode:
        raise SystemExit(ran.stderr[-2000:])
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines]
    seconds = ", ".join(f"{line['step_seconds']:.1f}" for line in lines)
    peaks = ", ".join(f"{peak / 1e9:.2f}" for peak in lines[-1]["peak_memory_bytes"])
    shown = ", ".join(f"{loss:.6f}" for loss in losses)
    print(f"| {label} layers | {run.model.parameters:,} | {shown} | {seconds} | {peaks} |", flush=True)
    return losses


def _run_file(folder: Path, options: argparse.Namespace) -> Path:
    path = folder / "given.yaml"
    model = {
        "name": "llama-slice",
        "architecture": "llama",
        "num_layers": options.layers,
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "ffn_hidden_size": 8192,
        "vocab_size": options.vocabulary,
        "rope_base": 500000.0,
        "norm_epsilon": 1e-5,
    }
    run = {
        "model": model,
        "data": {
            "train": [{"prefix": "given below"}],
            "sequence_length": options.tokens,
            "reset_position_ids": False,
        },
        "train": {"steps": options.steps, "global_batch_size": 2, "precision": "bf16", "device": "cpu"},
        "optimizer": {"learning_rate": 1e-4},
        "log": {"every": 1},
    }
    path.write_text(yaml.safe_dump(run))
    return path


def _stages(cuts: list[list[int]]) -> list[dict[str, object]]:
    last = len(cuts) - 1
    return [
        {"replicas": [[s]], "layers": layers, "embedding": s == 0, "head": s == last}
        for s, layers in enumerate(cuts)
    ]


def _cpu() -> dict[str, object]:
    return {
        "memory": "24 GiB",
        "bf16": "1 TFLOP/s",
        "fp16": "1 TFLOP/s",
        "fp32": "1 TFLOP/s",
        "memory_bandwidth": "10 GB/s",
        "host_link": "10 GB/s",
        "backend": "gloo",
    }


if __name__ == "__main__":
    sys.exit(main())
