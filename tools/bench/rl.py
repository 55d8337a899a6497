"""Steps of reinforcement learning on simulated cards: what asynchrony gains, and forecasts from a profile.

Ranks are processes of this machine that sleep after their computations, until these have taken `slowdown`
times as long, so that two cores are enough to see three cards at work at once.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.bench.harness import MISSED, Row, case
from tools.rl_tasks import CONFIG, run_words
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import Plan, RankPlan, StagePlan, single_card_plan
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.config.rl_plan import GenerationPlan, RlPlan, RolePlan, RolePlans, save_rl_plan
from yuan_train.planner.roles.play import FlowTimes, Play, play

NEARNESS = 0.15
"""The largest error of a forecast of a step, and of an idle share."""


def call(*words: str | Path) -> str:
    """What a command of ours prints. Raises SystemExit with what it says if it fails."""
    command = [sys.executable, "-m", "yuan_train", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def launch(plan: Path, log: Path, words: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Run a plan; the metrics of its steps."""
    (log / "metrics.jsonl").unlink(missing_ok=True)
    more = (f"log.directory={log}", f"train.steps={steps}")
    call("launch", "--plan", plan, "--this-node", "all", *words, *more)
    return [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]


def median(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Of a figure of the steps."""
    return statistics.median(line[key] for line in lines)


def mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Of a figure of the steps: asynchronous ones are short and long in turn."""
    return statistics.fmean(line[key] for line in lines)


# --- what asynchrony gains ---------------------------------------------------------------------------------

CHANGES = ("train.prompts_per_step=16", "generation.max_new_tokens=12", "generation.stop_ids=[]")
WARM_UP = 4
FASTER_ENGINE = 2.0
"""The first engine's speed, in that of the second; it takes that many times as many prompts."""
GAIN = 0.8
"""The least share of the speed-up that there can be."""
ROLES = {"policy": "policy", "generation": "engine 0"}
"""Of the metrics, and who that is in the flow."""


@dataclass(frozen=True)
class Measured:
    """Of a run's steps, in seconds."""

    step: float
    generate: float
    train: float
    score: float
    publish: float
    idle: dict[str, float]
    """Share of a step, by role."""
    oldest: int
    """The largest staleness."""
    unused: int
    """Tickets of the trained batches that no batch was made of."""


@case("rl/asynchronous", ratio=("1/1", "2/1", "1/2"), seconds=(0.8,), steps=(16,))
def asynchronous(ratio: str, seconds: float, steps: int) -> Iterator[Row]:
    """One card trains, two unlike ones generate: sync, staleness 1 and 2, beside (tg + tt) / max(tg, tt).

    `ratio`: tg / tt, of which 1 is `seconds`. Forecasts are the flow in virtual time of the parts that sync
    mode has measured.
    """
    generate, train = map(float, ratio.split("/"))
    with tempfile.TemporaryDirectory() as name:
        folder, first = Path(name), (8.0, 8.0)
        trial = _measure(folder, first, staleness=0, steps=WARM_UP + 4)
        cards = first[0] * train * seconds / trial.train, first[1] * generate * seconds / trial.generate
        sync = _measure(folder, cards, staleness=0, steps=steps)
        most = (sync.generate + sync.train) / max(sync.generate, sync.train)
        for staleness in (0, 1, 2):
            run = _measure(folder, cards, staleness=staleness, steps=steps) if staleness else sync
            flow, gain = _forecast(sync, staleness), sync.step / run.step
            error = flow.step_seconds / run.step - 1
            row: Row = {"ratio": ratio, "staleness": staleness, "step s": f"{run.step:.2f}"}
            row |= {
                "forecast": f"{flow.step_seconds:.2f} ({error:+.0%})",
                "gain": f"{gain:.2f} of {most:.2f}",
            }
            for role, actor in ROLES.items():
                row[f"idle {role}, forecast"] = f"{run.idle[role]:.0%}, {flow.idle(actor):.0%}"
            if abs(error) > NEARNESS:
                row[MISSED] = f"staleness {staleness}: forecast off by {error:+.0%}"
            elif staleness and (gain < GAIN * most or run.oldest > staleness or run.unused):
                row[MISSED] = (
                    f"staleness {staleness}: {gain / most:.0%} of the gain, {run.unused} thrown away"
                )
            yield row


def _measure(folder: Path, cards: tuple[float, float], *, staleness: int, steps: int) -> Measured:
    save_rl_plan(folder / "plan.yaml", roles_plan(cards, staleness=staleness, changes=CHANGES))
    words = run_words(folder, "sum", CHANGES, {"right": 1.0})
    lines = launch(folder / "plan.yaml", folder / "log", words, steps)
    later = lines[WARM_UP:]
    used = 16 * len(lines) + sum(line["groups_filtered"] + line["groups_failed"] for line in lines)
    return Measured(
        step=mean(later, "step_seconds"),
        generate=median(later, "generation_seconds"),
        train=median(later, "training_seconds"),
        score=median(later, "scoring_seconds"),
        publish=median(later, "sync_seconds"),
        idle={role: mean(later, f"idle_{role}") for role in ROLES},
        oldest=max(line["staleness_max"] for line in lines),
        unused=lines[-1]["next_ticket"] - used,
    )


def roles_plan(cards: tuple[float, float], *, staleness: int, changes: tuple[str, ...]) -> RlPlan:
    """One card that trains, and two that generate; `cards`: slowdowns of the policy and the first engine."""
    config = load_rl(CONFIG, changes)
    run = policy_run(config, sequence_length=config.sequence_length)
    group, samples = config.algorithm.group, config.samples_per_step
    plan = _with_cards(single_card_plan(run), (cards[0],), "trains")
    whole = plan.pipelines[0]
    first = round(samples * FASTER_ENGINE / (1 + FASTER_ENGINE) / group) * group
    engines = tuple(
        replace(
            whole,
            micro_batch_size=slots,
            num_micro_batches=1,
            stages=(
                StagePlan(replicas=((rank,),), layers=whole.stages[0].layers, embedding=True, head=True),
            ),
        )
        for rank, slots in enumerate((first, samples - first))
    )
    ranks = (RankPlan(rank=0, device="", type=""), RankPlan(rank=1, device="", type=""))
    generation = replace(plan, pipelines=engines, ranks=ranks)
    generation = _with_cards(generation, (cards[1], cards[1] * FASTER_ENGINE), "generates")
    roles = RolePlans(policy=RolePlan(plan=plan), generation=GenerationPlan(plan=generation))
    return RlPlan(mode="async" if staleness else "sync", staleness=staleness, roles=roles)


def _with_cards(plan: Plan, slowdowns: tuple[float, ...], node: str) -> Plan:
    """The plan on simulated cards, one a rank."""
    card = DeviceType(memory=2**32, fp32=80e9, bf16=80e9, memory_bandwidth=10e9)
    types = {f"{node}-{i}": replace(card, slowdown=max(slow, 1.0)) for i, slow in enumerate(slowdowns)}
    ranks = tuple(RankPlan(rank=i, device=f"{node}/{i}", type=name) for i, name in enumerate(types))
    return replace(plan, ranks=ranks, device_types=types)


def _forecast(sync: Measured, staleness: int) -> Play:
    """The flow in virtual time; the busier engine stands for both."""
    times = FlowTimes(generate=(sync.generate,), score=sync.score, train=sync.train, publish=sync.publish)
    return play(times, staleness=staleness, shared=False, scores_apart=False)


# --- what it learns ----------------------------------------------------------------------------------------

MODES = {"sync": 0, "between_batches": 1, "in_flight": 1}
"""Staleness, by when the engines take new weights."""
LAST = 20
"""Steps whose reward is what was learned."""


@case("rl/reward", formats={"reward": ".3f"}, seed=(0, 1, 2), mode=tuple(MODES), steps=(60,), rate=(2e-3,))
def reward(seed: int, mode: str, steps: int, rate: float) -> Row:
    """The mean reward of the last 20 steps, of at most 1.20, of digits to be copied: one card trains, two
    generate."""
    changes = (f"train.seed={seed}", f"optimizer.learning_rate={rate}")
    if MODES[mode]:
        changes += (f"generation.weights={mode}",)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plan = roles_plan((1.0, 1.0), staleness=MODES[mode], changes=changes)
        save_rl_plan(folder / "plan.yaml", plan)
        words = run_words(folder, "copy", changes)
        lines = launch(folder / "plan.yaml", folder / "log", words, steps)
    row: Row = {"seed": seed, "mode": mode, "reward": mean(lines[-LAST:], "reward")}
    return row | {"oldest": max(line["staleness_max"] for line in lines)}


# --- forecasts from a profile ------------------------------------------------------------------------------

LARGER = (
    *("model.hidden_size=192", "model.ffn_hidden_size=512", "model.num_layers=4"),
    *("model.max_sequence_length=32", "generation.max_new_tokens=16", "generation.stop_ids=[]"),
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
PARTS = ("generation", "scoring", "training", "sync")


@case("rl/forecast", fast=(3.0,), slow=(4.0,), steps=(10,), warm_up=(3,))
def forecast(fast: float, slow: float, steps: int, warm_up: int) -> Iterator[Row]:
    """Two unlike cards profiled, planned in three ways, launched: steps, parts, idle shares; forecasts."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        words = run_words(folder, "sum", LARGER, {"varied": 1.0})
        for name, nodes in (("fast", ("fast",)), ("slow", ("slow",)), ("both", ("fast", "slow"))):
            text = CLUSTER.format(fast=fast, slow=slow) + "".join(NODE.format(name=node) for node in nodes)
            (folder / f"{name}.yaml").write_text(text)
            out = folder / f"profile-{name}.json"
            call("profile", "--cluster", folder / f"{name}.yaml", "--out", out, *words)
        for way, keys in WAYS.items():
            names = ("fast", "slow", "both") if way == ALONE else ("both",)
            profiles = ",".join(str(folder / f"profile-{name}.json") for name in names)
            own = ("--cluster", folder / "both.yaml", "--profile", profiles, "--out", folder / "plan.yaml")
            wanted = json.loads(call("plan", *own, "--json", *words, *keys))["forecast"]
            lines = launch(folder / "plan.yaml", folder / "log", [*words, *keys], steps)[warm_up:]
            yield _beside(way, wanted, lines)


def _beside(way: str, wanted: dict[str, Any], lines: Sequence[dict[str, Any]]) -> Row:
    """A way's figures, each with its forecast."""
    step = mean(lines, "step_seconds")
    error = wanted["step_seconds"] / step - 1
    row: Row = {"way": way, "step": f"{step:.3f}, {wanted['step_seconds']:.3f} s ({error:+.1%})"}
    for part in PARTS:
        seconds = wanted[f"{part}_seconds"] + (wanted["tail_seconds"] if part == "generation" else 0.0)
        row[part] = f"{median(lines, f'{part}_seconds'):.3f}, {seconds:.3f} s"
    off = 0.0
    for role, share in wanted["idle"].items() if way != "shared" else ():
        measured = mean(lines, f"idle_{role}")
        row[f"idle {role}"] = f"{measured:.0%}, {share:.0%}"
        off = max(off, abs(share - measured))
    if abs(error) > NEARNESS or off > NEARNESS:
        row[MISSED] = f"{way}: step off by {error:+.1%}, an idle share by {off:.0%}"
    return row
