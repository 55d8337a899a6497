"""python tools/bench_async.py: what asynchronous generation gains on unlike cards, and its forecast.

Three processes of this machine are simulated cards: each sleeps after its computations until they have taken
`slowdown` times as long, so that two cores are enough to see three cards work at the same time. One trains,
two unlike ones generate. A first run finds the slowdowns with which generating and training a batch take what
`--ratios` says (of `--seconds` for the faster one). Then each ratio runs in sync mode, which measures the
parts of a step (tg: generating, tt: training), and asynchronously with staleness 1 and 2.

Prints the speed-up beside the most there can be, (tg + tt) / max(tg, tt), and the largest staleness; and the
seconds and idle shares that the planner's flow in virtual time has for the measured parts. Exits with 1 if a
speed-up is below 80 % of that, an answer too old or thrown away, or a forecast off by more than 15 %.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import rl_tasks

from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import Plan, RankPlan, StagePlan, single_card_plan
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.config.rl_plan import GenerationPlan, RlPlan, RolePlan, RolePlans, save_rl_plan
from yuan_train.planner.roles.play import FlowTimes, Play, play

CONFIG = "configs/run/rl-tiny.yaml"
CHANGES = ("train.prompts_per_step=16", "generation.max_new_tokens=12", "generation.stop_ids=[]")
WARM_UP = 4
FASTER_ENGINE = 2.0
"""The first engine's speed, in that of the second; it takes that many times as many prompts."""
RATIOS = {"1:1": (1.0, 1.0), "2:1": (2.0, 1.0), "1:2": (1.0, 2.0)}
GAIN, FORECAST = 0.8, 0.15
"""The least share of the speed-up that there can be, and the largest error of a forecast."""


@dataclass(frozen=True)
class Measured:
    """Medians over the steps of a run, in seconds."""

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


def main() -> int:
    """Measure and print; 1 if something is beyond its bar."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ratios", nargs="*", choices=sorted(RATIOS), default=sorted(RATIOS), metavar="G:T")
    parser.add_argument("--seconds", type=float, default=0.8, help="of the faster of generating and training")
    parser.add_argument("--steps", type=int, default=16, help=f"of each run, {WARM_UP} of them warm-up")
    options = parser.parse_args()
    if options.steps <= WARM_UP or options.seconds <= 0:
        parser.error(f"wanted more than {WARM_UP} steps, and --seconds above 0")
    missed = False
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rl_tasks.make("sum", folder / "sum.jsonl")
        first = (8.0, 8.0)
        trial = measure(folder, first, staleness=0, steps=WARM_UP + 4)
        for label in options.ratios:
            generate, train = (part * options.seconds for part in RATIOS[label])
            cards = (first[0] * train / trial.train, first[1] * generate / trial.generate)
            sync = measure(folder, cards, staleness=0, steps=options.steps)
            most = (sync.generate + sync.train) / max(sync.generate, sync.train)
            print(f"{label}: tg {sync.generate:.2f} s, tt {sync.train:.2f} s; sync {sync.step:.2f} s a step")
            missed |= not report(sync, forecast(sync, 0), None)
            for staleness in (1, 2):
                run = measure(folder, cards, staleness=staleness, steps=options.steps)
                gain = sync.step / run.step
                print(
                    f"  staleness {staleness}: {run.step:.2f} s, {gain:.2f} x of at most {most:.2f} "
                    f"({gain / most:.0%}); oldest {run.oldest}, {run.unused} thrown away"
                )
                missed |= gain < GAIN * most or run.oldest > staleness or run.unused > 0
                missed |= not report(run, forecast(sync, staleness), staleness)
    return int(missed)


def roles_plan(cards: tuple[float, float], *, staleness: int) -> RlPlan:
    """One card that trains, and two that generate; `cards`: slowdowns of the policy and the first engine."""
    config = load_rl(CONFIG, CHANGES)
    run = policy_run(config, sequence_length=config.sequence_length)
    group, samples = config.algorithm.group, config.samples_per_step
    plan = with_cards(single_card_plan(run), (cards[0],), "trains")
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
    generation = replace(
        plan,
        pipelines=engines,
        ranks=(RankPlan(rank=0, device="", type=""), RankPlan(rank=1, device="", type="")),
    )
    generation = with_cards(generation, (cards[1], cards[1] * FASTER_ENGINE), "generates")
    roles = RolePlans(policy=RolePlan(plan=plan), generation=GenerationPlan(plan=generation))
    return RlPlan(mode="async" if staleness else "sync", staleness=staleness, roles=roles)


def with_cards(plan: Plan, slowdowns: tuple[float, ...], node: str) -> Plan:
    """The plan on simulated cards, one a rank."""
    card = DeviceType(memory=2**32, fp32=80e9, bf16=80e9, memory_bandwidth=10e9)
    types = {f"{node}-{i}": replace(card, slowdown=max(slow, 1.0)) for i, slow in enumerate(slowdowns)}
    ranks = tuple(RankPlan(rank=i, device=f"{node}/{i}", type=name) for i, name in enumerate(types))
    return replace(plan, ranks=ranks, device_types=types)


def measure(folder: Path, cards: tuple[float, float], *, staleness: int, steps: int) -> Measured:
    """Run some steps. Raises CalledProcessError if the run fails."""
    plan, log = folder / "plan.yaml", folder / "log"
    save_rl_plan(plan, roles_plan(cards, staleness=staleness))
    (log / "metrics.jsonl").unlink(missing_ok=True)
    rewards = f"{Path(rl_tasks.__file__).resolve()}:right"
    words = [
        *("launch", "--config", CONFIG, "--plan", str(plan), "--this-node", "all"),
        *CHANGES,
        f"data.prompts=[{{file: '{folder / 'sum.jsonl'}'}}]",
        f"reward.functions=[{{python: '{rewards}'}}]",
        *("data.evaluation=", "evaluation.every=0", "checkpoint.directory=", "train.device=cpu"),
        *(f"log.directory={log}", f"train.steps={steps}"),
    ]
    command = [sys.executable, "-m", "yuan_train", *words]
    done = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    lines = [json.loads(line) for line in (log / "metrics.jsonl").read_text().splitlines()]
    measured = lines[WARM_UP:]

    def median(key: str) -> float:
        return statistics.median(line[key] for line in measured)

    used = 16 * len(lines) + sum(line["groups_filtered"] + line["groups_failed"] for line in lines)
    return Measured(
        # The mean: with staleness 2 short steps follow long ones.
        step=statistics.fmean(line["step_seconds"] for line in measured),
        generate=median("generation_seconds"),
        train=median("training_seconds"),
        score=median("scoring_seconds"),
        publish=median("sync_seconds"),
        idle={role: statistics.fmean(line[f"idle_{role}"] for line in measured) for role in ROLES},
        oldest=max(line["staleness_max"] for line in lines),
        unused=lines[-1]["next_ticket"] - used,
    )


ROLES = {"policy": "policy", "generation": "engine 0"}
"""Of the metrics, and who that is in the flow."""


def forecast(sync: Measured, staleness: int) -> Play:
    """The flow in virtual time, of the parts that the sync run has measured; the busier engine for both."""
    times = FlowTimes(generate=(sync.generate,), score=sync.score, train=sync.train, publish=sync.publish)
    return play(times, staleness=staleness, shared=False, scores_apart=False)


def report(run: Measured, flow: Play, staleness: int | None) -> bool:
    """Print a forecast beside what was measured; whether it is near enough."""
    error = flow.step_seconds / run.step - 1
    idle = ", ".join(f"{role} {flow.idle(actor):.0%} ({run.idle[role]:.0%})" for role, actor in ROLES.items())
    print(
        f"    forecast {flow.step_seconds:.2f} s ({error:+.0%}); idle, forecast (measured): {idle}",
        flush=True,
    )
    return abs(error) <= FORECAST


if __name__ == "__main__":
    sys.exit(main())
