"""Steps of reinforcement learning on simulated cards: what asynchrony gains, and forecasts from a profile.

Ranks are processes of this machine that sleep after their computations, until these have taken as long as
their cards say, so that two cores are enough to see three cards at work at once.
"""

from __future__ import annotations

import json
import math
import re
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.support.hf_decoders import save_model
from tests.support.project import parse_plan, read_metrics
from tools.bench.harness import MISSED, Row, case
from tools.bench.runs import bench_model, yuan_train
from tools.rl_tasks import CONFIG, STEPS, TURNS, run_words
from yuan_train.config.devices import DeviceType
from yuan_train.config.plan import Plan, RankPlan, single_card_plan
from yuan_train.config.rl import load_rl, policy_run
from yuan_train.config.rl_plan import GenerationPlan, ReferencePlan, RlPlan, RolePlan, RolePlans, save_rl_plan
from yuan_train.models.transformer import Transformer
from yuan_train.schedule.flow import FlowTimes, Play, play

NEARNESS = 0.15
"""The largest error of a forecast of a step, and of an idle share."""


def run_roles(
    folder: Path, plan: RlPlan, task: str, changes: Sequence[str], rewards: Mapping[str, float], steps: int
) -> list[dict[str, Any]]:
    """Run a task of tools/rl_tasks.py under a plan; the metrics of its steps."""
    save_rl_plan(folder / "plan.yaml", plan)
    return launch(folder, run_words(folder, task, changes, rewards), steps)


def launch(folder: Path, words: Sequence[str], steps: int) -> list[dict[str, Any]]:
    """Run the plan of a folder; the metrics of its steps."""
    plan, log = folder / "plan.yaml", folder / "log"
    (log / "metrics.jsonl").unlink(missing_ok=True)
    more = (f"log.directory={log}", f"train.steps={steps}")
    said = yuan_train("launch", "--plan", plan, "--this-node", "all", *words, *more).stderr
    (log / "said.txt").write_text(said)
    return read_metrics(log)


def mean(lines: Sequence[dict[str, Any]], key: str) -> float:
    """Of a figure of the steps: asynchronous ones are short and long in turn."""
    return statistics.fmean(line[key] for line in lines)


def middle(lines: Sequence[dict[str, Any]], key: str) -> float:
    """The mean of the middle half: a step in which the whole machine stood still is none of the cards'."""
    cut = len(lines) // 4
    return statistics.fmean(sorted(line[key] for line in lines)[cut : len(lines) - cut])


# --- what asynchrony gains ---------------------------------------------------------------------------------

CHANGES = (
    *("train.prompts_per_step=16", "generation.max_new_tokens=12", "generation.stop_ids=[]"),
    # Little work, in eight pieces each way a step, so that a busy machine has time for it too.
    *("algorithm.group=4", "train.micro_batch_size=8"),
)
WARM_UP = 4
TRIAL_PIECE = 0.05
"""Seconds of a piece of work of all cards, where pieces are counted."""
REPEATS = 0.02
"""By which the gains of two runs may differ."""
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
    over: float
    """By which pieces of work took longer than their pace, over all steps and cards."""

    @property
    def gain(self) -> float:
        """How many times as long a step would take if the parts took turns."""
        return (self.generate + self.train) / self.step

    @property
    def most(self) -> float:
        """What that can be."""
        return (self.generate + self.train) / max(self.generate, self.train)


@case(
    "rl/asynchronous",
    formats={
        **dict.fromkeys(("tg s", "tt s", "step s", "gain", "again"), ".3f"),
        **{"of most": ".1%", "over": ".2%"},
    },
    ratio=("1/1", "2/1", "1/2"),
    seconds=(1.0,),
    steps=(12,),
)
def asynchronous(ratio: str, seconds: float, steps: int) -> Iterator[Row]:
    """One card trains, two generate: sync, staleness 1 and 2. Of each run: seconds of generation (tg),
    training (tt) and a step, the gain (tg + tt) / step, that of another run, its share of the most that it
    can be, which is (tg + tt) / max(tg, tt), and a forecast, the flow of its parts in virtual time.

    `ratio`: tg / tt, of which 1 is `seconds`. `over`: by how much work took longer than its card says, of a
    step.
    """
    generate, train = map(float, ratio.split("/"))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        trial = _measure(folder, (TRIAL_PIECE, TRIAL_PIECE), staleness=0, steps=4)
        wanted = seconds * train / trial.train, seconds * generate / trial.generate
        pieces = TRIAL_PIECE * wanted[0], TRIAL_PIECE * wanted[1]
        for staleness in (0, 1, 2):
            run, again = (_measure(folder, pieces, staleness=staleness, steps=steps) for _ in range(2))
            flow = _forecast(run, staleness)
            error = flow.step_seconds / run.step - 1
            row: Row = {"ratio": ratio, "staleness": staleness}
            row |= {"tg s": run.generate, "tt s": run.train, "step s": run.step}
            row |= {"forecast": f"{flow.step_seconds:.3f} ({error:+.1%})"}
            row |= {"gain": run.gain, "again": again.gain}
            row |= {"of most": run.gain / run.most, "over": run.over / run.step}
            for role, actor in ROLES.items():
                row[f"{actor.split()[0]} idle"] = f"{run.idle[role]:.0%}, {flow.idle(actor):.0%}"
            if abs(error) > NEARNESS:
                row[MISSED] = f"staleness {staleness}: forecast off by {error:+.0%}"
            elif staleness and (run.gain < GAIN * run.most or run.oldest > staleness or run.unused):
                share = f"{run.gain / run.most:.0%} of the gain"
                row[MISSED] = f"staleness {staleness}: {share}, {run.unused} thrown away"
            elif abs(again.gain / run.gain - 1) > REPEATS:
                row[MISSED] = f"staleness {staleness}: a gain of {run.gain:.3f}, then of {again.gain:.3f}"
            yield row


def _measure(folder: Path, pieces: tuple[float, float], *, staleness: int, steps: int) -> Measured:
    """Of so many steps behind the first ones. `pieces`: seconds of each piece of work of the card that trains
    and of those that generate, of which one has more slots."""
    policy, engine = (card(piece_seconds=seconds) for seconds in pieces)
    plan = roles_plan(policy, alike(engine, engine, CHANGES), staleness=staleness, changes=CHANGES)
    lines = run_roles(folder, plan, "sum", CHANGES, {"right": 1.0}, WARM_UP + steps)
    later = lines[WARM_UP:]
    used = 16 * len(lines) + sum(line["groups_filtered"] + line["groups_failed"] for line in lines)
    said = (folder / "log/said.txt").read_text()
    return Measured(
        step=middle(later, "step_seconds"),
        generate=middle(later, "generation_seconds"),
        train=middle(later, "training_seconds"),
        score=middle(later, "scoring_seconds"),
        publish=middle(later, "sync_seconds"),
        idle={role: middle(later, f"idle_{role}") for role in ROLES},
        oldest=max(line["staleness_max"] for line in lines),
        unused=lines[-1]["next_ticket"] - used,
        over=sum(map(float, re.findall(r"longer than its pace, by ([\d.]+) s", said))) / len(lines),
    )


@dataclass(frozen=True)
class EngineCard:
    """A simulated card that generates."""

    card: DeviceType
    slots: int
    share: float
    """Of the prompts, where these are dealt."""


def card(slowdown: float = 1.0, *, piece_seconds: float | None = None) -> DeviceType:
    """A simulated card."""
    core = DeviceType(memory=2**32, fp32=80e9, bf16=80e9, memory_bandwidth=10e9)
    return replace(core, slowdown=max(slowdown, 1.0), piece_seconds=piece_seconds)


def alike(fast: DeviceType, slow: DeviceType, changes: tuple[str, ...]) -> tuple[EngineCard, ...]:
    """Two engines with a slot for each of their answers, of which the first has FASTER_ENGINE times as
    many."""
    config = load_rl(CONFIG, changes)
    group, samples = config.algorithm.group, config.samples_per_step
    first = round(samples * FASTER_ENGINE / (1 + FASTER_ENGINE) / group) * group
    parts = ((fast, first), (slow, samples - first))
    return tuple(EngineCard(kind, slots, slots / samples) for kind, slots in parts)


def roles_plan(
    policy: DeviceType, engines: Sequence[EngineCard], *, staleness: int, changes: tuple[str, ...]
) -> RlPlan:
    """One card that trains, and others that generate."""
    config = load_rl(CONFIG, changes)
    run = policy_run(config, sequence_length=config.sequence_length)
    plan = _with_cards(single_card_plan(run), [policy], "trains")
    cuts = (f"{engine.slots}x1: {run.model.num_layers}@{rank}" for rank, engine in enumerate(engines))
    generation = _with_cards(
        parse_plan(run, " / ".join(cuts)), [engine.card for engine in engines], "generates"
    )
    generation = replace(generation, global_batch_size=sum(engine.slots for engine in engines))
    shares = tuple(engine.share for engine in engines)
    roles = RolePlans(
        policy=RolePlan(plan=plan),
        generation=GenerationPlan(plan=generation, shares=shares),
        reference=ReferencePlan(where="host") if config.needs_reference else None,
    )
    return RlPlan(mode="async" if staleness else "sync", staleness=staleness, roles=roles)


def _with_cards(plan: Plan, cards: Sequence[DeviceType], node: str) -> Plan:
    """The plan on simulated cards, one a rank."""
    types = {f"{node}-{i}": kind for i, kind in enumerate(cards)}
    ranks = tuple(RankPlan(rank=i, device=f"{node}/{i}", type=name) for i, name in enumerate(types))
    return replace(plan, ranks=ranks, device_types=types)


def _forecast(run: Measured, staleness: int) -> Play:
    """The flow in virtual time; the busier engine stands for both."""
    times = FlowTimes(generate=(run.generate,), score=run.score, train=run.train, publish=run.publish)
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
    changes = _changes(seed, mode, rate)
    engines = alike(card(), card(FASTER_ENGINE), changes)
    lines = _learn("copy", mode, engines, {"right": 1.0, "ends": 0.2}, steps, changes)
    row: Row = {"seed": seed, "mode": mode, "reward": mean(lines[-LAST:], "reward")}
    return row | {"oldest": max(line["staleness_max"] for line in lines)}


@case("rl/turns", formats={"reward": ".3f"}, task=tuple(TURNS), seed=(0, 1, 2), mode=tuple(MODES))
def turns(task: str, seed: int, mode: str) -> Row:
    """The same of answers of two turns: what the second one is to say the environment alone knows. A reward
    of at most 2.40 of `successor`, 2.00 of `calculator`."""
    own, rewards = TURNS[task]
    changes, steps = (*_changes(seed, mode, 2e-3), *own), STEPS[task]
    engines = alike(card(), card(FASTER_ENGINE), changes)
    lines = _learn(task, mode, engines, rewards, steps, changes)
    row: Row = {"task": task, "seed": seed, "mode": mode, "first": f"{lines[0]['reward']:.2f}"}
    row |= {"reward": mean(lines[-LAST:], "reward"), "oldest": max(line["staleness_max"] for line in lines)}
    return row | {"thrown away": lines[-1]["next_ticket"] - 32 * steps}


@case(
    "rl/unlike_reward",
    formats={"reward": ".3f", "tokens": ".1f"},
    seed=(0, 1, 2),
    mode=("sync", "in_flight"),
    steps=(60,),
    rate=(2e-3,),
)
def unlike_reward(seed: int, mode: str, steps: int, rate: float) -> Row:
    """The same of answers of up to 48 tokens, of which the first gets 1 if it is the digit: with random
    weights one of 12 ends an answer. Three unlike engines have 36 slots for 128 answers."""
    changes = _changes(seed, mode, rate)
    changes += ("model.max_sequence_length=64", "generation.max_new_tokens=48", "algorithm.group=4")
    changes += ("train.micro_batch_size=32",)
    lines = _learn("copy", mode, unlike_engines(0.0, parts=2), {"right": 1.0}, steps, changes)
    row: Row = {"seed": seed, "mode": mode, "reward": mean(lines[-LAST:], "reward")}
    row["tokens"] = statistics.fmean(line["answer_tokens"]["mean"] for line in lines)
    row |= {"oldest": max(line["staleness_max"] for line in lines)}
    return row | {"thrown away": lines[-1]["next_ticket"] - 32 * steps}


def _changes(seed: int, mode: str, rate: float) -> tuple[str, ...]:
    weights = (f"generation.weights={mode}",) if MODES[mode] else ()
    return (f"train.seed={seed}", f"optimizer.learning_rate={rate}", *weights)


def _learn(
    task: str,
    mode: str,
    engines: Sequence[EngineCard],
    rewards: dict[str, float],
    steps: int,
    changes: tuple[str, ...],
) -> list[dict[str, Any]]:
    """The metrics of a task that is learned."""
    with tempfile.TemporaryDirectory() as name:
        plan = roles_plan(card(), engines, staleness=MODES[mode], changes=changes)
        return run_roles(Path(name), plan, task, changes, rewards, steps)


# --- answers of unlike length ------------------------------------------------------------------------------

MEAN_TOKENS, CAP = 32, 4
"""Of an answer, and its limit as a multiple of that."""
PIECE = 0.06
"""Seconds of a round of the fastest engine; the policy's pieces of work last PIECE / 2."""
UNLIKE = ((1.0, 32), (1.5, 24), (2.0, 16))
"""The engines: how many times as long a round lasts, and slots."""
POLICY_PIECE = 0.9
"""Seconds of a piece of a policy that needs longer than the engines, of which a round takes PIECE / 3."""
IDLE = 0.1
"""The largest part of a step in which that policy waits."""
FILLED, FASTER = 0.85, 1.5
"""Least share of the slots that have a token in flight, and how many times as many tokens a second as between
batches."""
END = CAP * MEAN_TOKENS + 1
"""The token that ends an answer; those below count its tokens. Token 0 is the prompt."""
UNLIKE_CHANGES = (
    *("model=", "train.prompts_per_step=32", "train.micro_batch_size=32", "algorithm.group=8"),
    *("data.max_prompt_tokens=1", f"generation={{max_new_tokens: {CAP * MEAN_TOKENS}, stop_ids: [{END}]}}"),
    # Too small to learn: lengths stay what they are.
    "optimizer.learning_rate=1e-8",
)


def hazards(lengths: str) -> list[float]:
    """Of each token of an answer, the probability that it is the last if those before were not: by the
    distribution `exponential`, or `lognormal` with a sigma of 1, of a mean of MEAN_TOKENS."""

    def beyond(tokens: float) -> float:
        if lengths == "exponential":
            return math.exp(-tokens / MEAN_TOKENS)
        return 0.5 * math.erfc((math.log(max(tokens, 1e-9) / MEAN_TOKENS) + 0.5) / math.sqrt(2))

    return [1 - beyond(t) / beyond(t - 1) for t in range(1, CAP * MEAN_TOKENS + 1)]


def make_counter(folder: Path, lengths: str) -> Path:
    """A checkpoint of a Llama whose answers have lengths of a distribution: each token is one more than the
    one before, or END. Its layers add nothing, so that the head sees the token alone."""
    hidden, vocabulary = 4 * -(-(END + 1) // 8) * 2, END + 1
    head = torch.full((vocabulary, hidden), -30.0)
    for place, hazard in enumerate(hazards(lengths)):
        head[END, place] = math.log(max(hazard, 1e-12))
        if place + 1 < END:
            head[place + 1, place] = math.log(max(1 - hazard, 1e-12))
    sizes = {"num_attention_heads": 4, "vocab_size": vocabulary, "max_sequence_length": END + 1}
    keys = {"ffn_hidden_size": 32, "norm_epsilon": 1e-12, "tie_embeddings": False}
    model = Transformer(bench_model(1, hidden, architecture="llama", **sizes, **keys))
    for name, parameter in model.named_parameters():
        parameter.data.fill_(1.0 if "norm" in name else 0.0)
    model.embedding.weight.data.copy_(torch.eye(vocabulary, hidden))
    # RMSNorm makes of a one the root of the width.
    model.head.weight.data.copy_(head / math.sqrt(hidden))
    return save_model(folder / "counter", model)


def unlike_engines(piece: float, *, parts: int = 1) -> list[EngineCard]:
    """UNLIKE, of which a round of the fastest lasts `piece` seconds; 0: as long as it takes. `parts`: with so
    many times fewer slots."""
    rates = [slots / rounds for rounds, slots in UNLIKE]
    return [
        EngineCard(card(rounds, piece_seconds=piece * rounds or None), slots // parts, rate / sum(rates))
        for (rounds, slots), rate in zip(UNLIKE, rates, strict=True)
    ]


def run_unlike(
    folder: Path, policy: DeviceType, piece: float, steps: int, reward: str, *changes: str
) -> list[dict[str, Any]]:
    """The metrics of steps with answers of unlike length, whose checkpoint `changes` name, at staleness 1."""
    changes = (*UNLIKE_CHANGES, *changes)
    plan = roles_plan(policy, unlike_engines(piece), staleness=1, changes=changes)
    return run_roles(folder, plan, "count", changes, {reward: 1.0}, steps)


@case(
    "rl/unlike_lengths",
    formats={"filled": ".1%", "tokens/s": ".0f", "of most": ".0%", "policy trains": ".0%", "gain": ".2f"},
    lengths=("exponential", "lognormal"),
    steps=(16,),
)
def unlike_lengths(lengths: str, steps: int) -> Iterator[Row]:
    """Answers of unlike length by three unlike engines, staleness 1: slots filled and tokens/s, between
    batches and in flight. `of most`: of the tokens that the engines' slots could have drawn."""
    most = sum(slots / rounds for rounds, slots in UNLIKE) / PIECE
    before = 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        checkpoint = f"start.checkpoint={make_counter(folder, lengths)}"
        for weights in ("between_batches", "in_flight"):
            policy, flight = card(piece_seconds=PIECE / 2), f"generation.weights={weights}"
            lines = run_unlike(folder, policy, PIECE, steps, "varied", checkpoint, flight)
            later = lines[WARM_UP:]
            seconds = sum(line["step_seconds"] for line in later)
            drawn = [line["answer_tokens"]["mean"] * 256 for line in later]
            slots = sum(own / line["slots_filled"] for own, line in zip(drawn, later, strict=True))
            tokens, filled = sum(drawn) / seconds, sum(drawn) / slots
            unused = lines[-1]["next_ticket"] - 32 * steps
            oldest = max(line["staleness_max"] for line in lines)
            row: Row = {"lengths": lengths, "weights": weights, "filled": filled}
            row |= {"tokens/s": tokens, "of most": tokens / most}
            row["policy trains"] = sum(line["training_seconds"] for line in later) / seconds
            row |= {"gain": tokens / before if before else None, "oldest": oldest, "thrown away": unused}
            if before and (row["filled"] < FILLED or row["gain"] < FASTER or oldest > 1 or unused):
                row[MISSED] = f"{lengths}: {row['filled']:.0%} filled, {row['gain']:.2f} times as fast"
            before = tokens
            yield row


@case(
    "rl/slow_rewards",
    formats={"step s": ".2f", "policy idle": ".1%"},
    reward=("varied", "slowly_varied"),
    concurrency=(8,),
    steps=(14,),
)
def slow_rewards(reward: str, concurrency: int, steps: int) -> Row:
    """The same engines beside a policy that needs longer than they do, with rewards that take 10 ms an answer
    (`slowly_varied`) and with such as take none: what part of a step the policy waits."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        changes = (f"start.checkpoint={make_counter(folder, 'exponential')}", "train.micro_batch_size=16")
        changes += ("generation.weights=in_flight", f"reward.concurrency={concurrency}")
        policy = card(piece_seconds=POLICY_PIECE)
        later = run_unlike(folder, policy, PIECE / 3, steps, reward, *changes)[WARM_UP:]
    row: Row = {"reward": reward, "step s": mean(later, "step_seconds")}
    row |= {"training s": f"{mean(later, 'training_seconds'):.2f}"}
    row |= {"scoring s": f"{mean(later, 'scoring_seconds'):.2f}", "policy idle": mean(later, "idle_policy")}
    if row["policy idle"] > IDLE:
        row[MISSED] = f"{reward}: the policy was idle for {row['policy idle']:.0%}"
    return row


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
            yuan_train("profile", "--cluster", folder / f"{name}.yaml", "--out", out, *words)
        for way, keys in WAYS.items():
            names = ("fast", "slow", "both") if way == ALONE else ("both",)
            profiles = ",".join(str(folder / f"profile-{name}.json") for name in names)
            own = ("--cluster", folder / "both.yaml", "--profile", profiles, "--out", folder / "plan.yaml")
            wanted = json.loads(yuan_train("plan", *own, "--json", *words, *keys).stdout)["forecast"]
            lines = launch(folder, [*words, *keys], steps)[warm_up:]
            yield _beside(way, wanted, lines)


def _beside(way: str, wanted: dict[str, Any], lines: Sequence[dict[str, Any]]) -> Row:
    """A way's figures, each with its forecast."""
    step = mean(lines, "step_seconds")
    error = wanted["step_seconds"] / step - 1
    row: Row = {"way": way, "step": f"{step:.3f}, {wanted['step_seconds']:.3f} s ({error:+.1%})"}
    for part in PARTS:
        seconds = wanted[f"{part}_seconds"] + (wanted["tail_seconds"] if part == "generation" else 0.0)
        row[part] = f"{statistics.median(line[f'{part}_seconds'] for line in lines):.3f}, {seconds:.3f} s"
    off = 0.0
    for role, share in wanted["idle"].items() if way != "shared" else ():
        measured = mean(lines, f"idle_{role}")
        row[f"idle {role}"] = f"{measured:.0%}, {share:.0%}"
        off = max(off, abs(share - measured))
    if abs(error) > NEARNESS or off > NEARNESS:
        row[MISSED] = f"{way}: step off by {error:+.1%}, an idle share by {off:.0%}"
    return row
