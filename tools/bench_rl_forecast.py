"""python tools/bench_rl_forecast.py: steps of reinforcement learning beside their forecast from a profile.

Two processes of this machine are simulated cards, one faster: each sleeps after its computations until they
have taken `slowdown` times as long. `yuan-train profile` measures both, with the rounds of generation and the
reward functions; `plan` searches with that profile, once for each way below; `launch` runs each plan. Where
the cards take turns, the plan has the profile of each alone: on one machine two at once slow each other down.

Prints the forecast's seconds of a step and of its parts beside the medians of metrics.jsonl, behind
`--warm-up` steps. Exits with 1 if the median error of the steps is beyond 15 %, or an idle share off by more
than 15 points.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import rl_tasks

CONFIG = "configs/run/rl-tiny.yaml"
NEW_TOKENS = 16
MODEL = ("model.hidden_size=192", "model.ffn_hidden_size=512", "model.num_layers=4")
CHANGES = (
    *MODEL,
    *("model.max_sequence_length=32", f"generation.max_new_tokens={NEW_TOKENS}", "generation.stop_ids=[]"),
    *("generation.slots=", "train.prompts_per_step=4", "train.micro_batch_size=16"),
    # Too small to learn: answers and their rewards stay unlike.
    "optimizer.learning_rate=1e-7",
    "search.policy={schedule: [1f1b], tensor: [1], recompute: [none], replicas: [1], micro_batch_size: [16]}",
    "search.generation.tensor=[1]",
)
CLUSTER = """\
name: two
device_types:
  fast: {{memory: 4 GiB, fp32: 0.08 TFLOP/s, bf16: 0.08 TFLOP/s, memory_bandwidth: 10 GB/s, slowdown: {fast}}}
  slow: {{memory: 4 GiB, fp32: 0.08 TFLOP/s, bf16: 0.08 TFLOP/s, memory_bandwidth: 10 GB/s, slowdown: {slow}}}
nodes:
"""
NODE = "  - {{name: {name}, device: {name}, network: {{bandwidth: 1 GB/s}}}}\n"
WAYS = {
    "shared": ("search.placement=[shared]", "search.modes=[sync]"),
    "apart, sync": ("search.placement=[apart]", "search.modes=[sync]"),
    "apart, async": ("search.placement=[apart]", "search.modes=[async]"),
}
ALONE = "apart, sync"
"""Whose cards take turns: what each takes alone. Two at work at once slow each other down on one machine."""
PARTS = ("generation_seconds", "scoring_seconds", "training_seconds", "sync_seconds")
NEARNESS = 0.15


def main() -> int:
    """Profile, plan, run, print; 1 if a forecast is beyond its bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="*", choices=sorted(WAYS), default=list(WAYS))
    parser.add_argument("--slowdowns", nargs=2, type=float, default=(3.0, 4.0), metavar=("FAST", "SLOW"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warm-up", type=int, default=3)
    parser.add_argument("--out", metavar="DIR", help="where profile, plans and logs are kept")
    options = parser.parse_args()
    if options.steps <= options.warm_up:
        parser.error("wanted more steps than --warm-up")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(options.out or name).resolve()
        rl_tasks.make("sum", folder / "sum.jsonl")
        fast, slow = options.slowdowns
        words = changes(folder)
        for name, nodes in (("fast", ("fast",)), ("slow", ("slow",)), ("both", ("fast", "slow"))):
            text = CLUSTER.format(fast=fast, slow=slow) + "".join(NODE.format(name=node) for node in nodes)
            (folder / f"{name}.yaml").write_text(text)
            call("profile", "--cluster", str(folder / f"{name}.yaml"), "--out", profile(folder, name), *words)
        errors: list[float] = []
        idle_off: list[float] = []
        for way in options.ways:
            forecast, lines = run_way(folder, way, words, options.steps)
            error, off = report(way, forecast, lines[options.warm_up :])
            errors.append(abs(error))
            idle_off.append(off)
    worst = max(idle_off)
    print(f"median error of a step {statistics.median(errors):.1%}; idle shares off by {worst:.0%} at most")
    return int(statistics.median(errors) > NEARNESS or worst > NEARNESS)


def changes(folder: Path) -> list[str]:
    """The run, as all commands get it."""
    rewards = f"{Path(rl_tasks.__file__).resolve()}:varied"
    return [
        *("--config", CONFIG, *CHANGES),
        f"data.prompts=[{{file: '{folder / 'sum.jsonl'}'}}]",
        f"reward.functions=[{{python: '{rewards}'}}]",
        *("data.evaluation=", "evaluation.every=0", "checkpoint.directory=", "train.device=cpu"),
    ]


def profile(folder: Path, name: str) -> str:
    """The file of a profile."""
    return str(folder / f"profile-{name}.json")


def call(*words: str) -> None:
    """Run a command of ours. Raises SystemExit with what it says if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", "yuan_train", *words], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(done.stderr)


def run_way(
    folder: Path, way: str, words: list[str], steps: int
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Plan and run; the forecast, and the run's metrics."""
    stem = way.replace(", ", "-")
    plan, log = folder / f"{stem}.yaml", folder / stem
    names = ("fast", "slow", "both") if way == ALONE else ("both",)
    profiles = ",".join(profile(folder, name) for name in names)
    cluster = ("--cluster", str(folder / "both.yaml"), "--profile", profiles)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "yuan_train",
            "plan",
            *cluster,
            "--out",
            str(plan),
            "--json",
            *words,
            *WAYS[way],
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    (log / "metrics.jsonl").unlink(missing_ok=True)
    more = (f"log.directory={log}", f"train.steps={steps}", *WAYS[way])
    call("launch", "--plan", str(plan), "--this-node", "all", *words, *more)
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    return json.loads(done.stdout)["forecast"], lines


def report(way: str, forecast: dict[str, Any], lines: list[dict[str, Any]]) -> tuple[float, float]:
    """Print a way; the error of its step, and by how much an idle share is off."""
    # The mean: asynchronous steps are short and long in turn.
    step = statistics.fmean(line["step_seconds"] for line in lines)
    error = forecast["step_seconds"] / step - 1
    words = f"forecast {forecast['step_seconds']:.3f} s ({error:+.1%}), {forecast['source']}"
    print(f"{way}: step {step:.3f} s, {words}")
    for part in PARTS:
        measured = statistics.median(line[part] for line in lines)
        of_forecast = forecast[part]
        if part == "generation_seconds":
            of_forecast += forecast["tail_seconds"]
        print(f"    {part.removesuffix('_seconds'):<10} {measured:7.3f} s, forecast {of_forecast:7.3f} s")
    off = 0.0
    for role, share in forecast["idle"].items():
        measured = statistics.fmean(line[f"idle_{role}"] for line in lines)
        print(f"    idle {role:<10} {measured:4.0%}, forecast {share:4.0%}", flush=True)
        off = max(off, abs(share - measured) if way != "shared" else 0.0)
    return error, off


if __name__ == "__main__":
    sys.exit(main())
