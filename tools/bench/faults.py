"""A campaign of faults against a supervised run on this machine: what each costs, and what is left of it.

Three nodes of one to two ranks each train a small model over loopback. At random moments, by a seed, a rank
or a node is killed, stopped or told to go; a node that has gone comes back after some seconds. After each
fault the run has to take another step within `LIMIT` seconds, and the journal to name the node. At the end
all checkpoints are whole, and the losses are those of one process.

A hundred more are made of nodes that have networks of their own, whose links are pulled too, on up to six
ranks, at moments that may be those of a start, a save or a meeting.

And nodes alone, killed with all that they have in memory, of a run that has no checkpoint on disk; and what a
change of plan costs where no node is lost.
"""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from tests.support.networks import Host, hosts_on_a_bridge
from tests.support.project import difference, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone
from tests.support.spawn import free_port
from tests.support.supervised import (
    entries,
    group_of,
    lose_node,
    make_supervised,
    ranks_of,
    slowed,
    steps_done,
    supervised,
    words,
)
from tools.bench.harness import MISSED, Row, case
from yuan_train.checkpoint.load import faults_of, step_name, steps_in
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan, plans_in, save_plan
from yuan_train.parallel.environment import NEXT_PLAN
from yuan_train.parallel.transfer import plan_holdings

LOST = "a node is lost"

CARDS = {"a": 2, "b": 1, "c": 1}
SHAPES = ({"a": 1, "b": 1}, {"a": 2, "b": 1}, {"a": 2, "b": 1, "c": 1}, {"a": 2, "b": 2, "c": 1})
SHAPES = (*SHAPES, {"a": 2, "b": 2, "c": 2})
A_RUN = 20
"""Faults of one run of the hundred."""
LIMIT = 90.0
"""Seconds until the next new step, at most."""
SHORT = ("train.timeout=4 s", "train.startup_timeout=20 s")
CAME = r"[\w, ]+ came(: a step of .*; the move takes about [\w. ]+)?"
"""What the journal says where nothing has happened but that nodes came."""
PASSES, GOES_ON = 10.0, 20.0
"""Seconds after which a fault that has passed is not noticed any more; and in which a run goes on without a
node that is cut off."""
EVERY = 10
"""Steps between two checkpoints."""
SELDOM = 40
"""And where there is a fault each minute: a save takes 0.2 s, a step 0.1 s, and as seldom as this saves cost
as much as the steps that faults have made again (Young 1974: a save in the root of 2 * 0.2 s * 60 s)."""
QUIET = 12
"""Steps between the end of one fault and the next, at least."""
MINUTE = 60.0
WARM, MEASURED = 10, 40
"""Steps that are not measured, and that are."""
TOLERANCE, MOST_COMPARED = 1e-5, 1000
"""Of losses: by how much they may differ, relative, and how many are compared."""


@dataclass(frozen=True)
class Fault:
    """One that was made, and what came of it."""

    kind: str
    node: str
    seconds: float
    """Until the next new step; infinite if there was none."""
    lost: int
    """Steps that had to be made again."""
    is_named: bool
    torn: Sequence[int]
    """Steps of checkpoints that are torn after it, or were whole before it and are not gone back to."""
    said: str
    """The entries of the journal after it; none if nobody has noticed it."""


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A supervised run of which faults are made."""

    folder: Path
    cards: Mapping[str, int]
    quiet: int = QUIET
    """Steps between the end of one fault and the next, at least."""
    seconds: float = 2.0
    """And at most so many seconds more, by chance."""
    network: Mapping[str, Host] | None = None
    """Hosts of the nodes, and of the command under "", if their links are their own."""


MakeFault = Callable[[Scene, str, random.Random], None]
"""Makes a fault of a node, and takes it back where it passes."""


FORMATS = {"median s": ".1f", "most s": ".1f", "goodput": ".0%", "one a minute": ".0%", "loss differs": ".0e"}


@case("faults/campaign", formats=FORMATS, faults=(20,), seed=(0,))
def campaign(faults: int, seed: int) -> Iterator[Row]:
    """By kind of fault: how many, seconds to the next new step, steps made again, and ends without a name."""
    yield from _campaign(KINDS, faults, random.Random(seed), f"checkpoint.every={EVERY}")


@case("faults/hundred", formats=FORMATS, faults=(100,), seed=(0,))
def hundred(faults: int, seed: int) -> Iterator[Row]:
    """The same on nodes with networks of their own, in several runs of two to six ranks, at any moment."""
    chance, found, whole = random.Random(seed), list[Fault](), list[Row]()
    shapes = chance.sample(SHAPES, len(SHAPES))
    for number, first in enumerate(range(0, faults, A_RUN)):
        cards = shapes[number % len(shapes)]
        with hosts_on_a_bridge(len(cards)) as hosts:
            network = dict(zip((*cards, ""), hosts, strict=True))
            place = partial(Scene, cards=cards, quiet=0, seconds=6.0, network=network)
            count = min(A_RUN, faults - first)
            own, row = _run_faults(place, ANYWHERE, count, chance, f"checkpoint.every={EVERY}", *SHORT)
        found += own
        whole.append(row | {"fault": f"all, {_shape(cards)}: {row['fault'].removeprefix('all, ')}"})
    yield from _rows(found)
    yield from whole


@case("faults/a_minute", formats=FORMATS, faults=(8,), seed=(0,))
def a_minute(faults: int, seed: int) -> Iterator[Row]:
    """The same with a fault every minute: which part of the time is left for new steps."""
    changes = (f"checkpoint.every={SELDOM}", "train.timeout=3 s", "checkpoint.asynchronous=true")
    yield from _campaign(KINDS, faults, random.Random(seed), *changes, apart=MINUTE)


@case("faults/in_memory", formats=FORMATS, faults=(8,), seed=(0,), steps=(4,))
def in_memory(faults: int, seed: int, steps: int) -> Iterator[Row]:
    """Lost nodes of a run that keeps every so many steps in memory: what is made again is at most as many."""
    kinds = {LOST: partial(_end_node, lose_node)}
    for row in _campaign(kinds, faults, random.Random(seed), f"checkpoint.in_memory={steps}"):
        if row.get("steps again", 0) > steps:
            row[MISSED] = f"{row['steps again']} steps were made again"
        yield row


MOVES = {"parameters": ",", **dict.fromkeys(("move s", "without a step s", "sent MiB", "bound MiB"), ".2f")}


@case("faults/live", formats=MOVES, hidden=(64, 256))
def live(hidden: int) -> Iterator[Row]:
    """Two ranks move from one cut of a model to another: in place, and by saving and starting again."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = {"hidden_size": hidden, "ffn_hidden_size": 4 * hidden, "num_attention_heads": 8}
        run_file = make_project(folder, model=model)
        run = run_config(run_file)
        plans = [parse_plan(run, text) for text in ("1x8: 4@0 | 2@1", "1x8: 2@0 | 4@1")]
        for number, plan in enumerate(plans):
            save_plan(folder / f"plan-{number}.yaml", plan)
        for how in ("in place", "by a restart"):
            row = {"hidden": hidden, "parameters": run.model.parameters, "how": how}
            yield row | _move(folder, run_file, plans, in_place=how == "in place")


@case(
    "faults/slowed", formats={"step s": ".3f", "of planned for": ".0%", "noticed after": ","}, factor=(3.0,)
)
def slowed_down(factor: float) -> Iterator[Row]:
    """A node of two runs a third of the time from some step on: a step before, under the old plan, after the
    live move, and of a run that was planned for it from the start."""
    with tempfile.TemporaryDirectory() as name:
        told, known = Path(name) / "told", Path(name) / "known"
        rows = [*_slowed_run(told, 1.0, is_slow=False), *_slowed_run(known, factor, is_slow=True)]
        for row in rows:
            yield {"factor": factor, **row, "of planned for": rows[-1]["step s"] / row["step s"]}


def _slowed_run(folder: Path, factor: float, *, is_slow: bool) -> Iterator[Row]:
    """Rows of a run whose node b is slowed, from the first steps if it `is_slow`; `factor` is planned for."""
    project, out = _supervised_project(folder, {"a": 1, "b": 1})
    cluster = yaml.safe_load((project / "cluster.yaml").read_text())
    types = cluster["device_types"]
    types["slow"] = types["core"] | {key: f"{80 / factor} GFLOP/s" for key in ("fp32", "bf16")}
    types["slow"] |= {"memory_bandwidth": f"{10 / factor} GB/s"}
    cluster["nodes"][1]["device"] = "slow"
    (project / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    watched = "supervise.slow=1.5" if not is_slow else "supervise.slow=1000"

    def median(first: int, last: int) -> float:
        return statistics.median(line["step_seconds"] for line in read_metrics(out / "log")[first:last])

    def measured(which: str, first: int, noticed: int | None = None) -> Row:
        first, last = first + WARM, first + WARM + MEASURED
        _await(lambda: steps_done(out) >= last or None, LIMIT)
        plan = load_plan(plans_in(out / "log")[-1])
        return {"run": which, "plan": _cut(plan), "step s": median(first, last), "noticed after": noticed}

    longer = ("train.global_batch_size=64", "checkpoint.every=50", watched)
    with supervised(project, out, *longer, *words(1_000_000)) as process:
        _await(lambda: steps_done(out) or None, LIMIT)
        if not is_slow:
            yield measured("as planned", 0)
        with slowed("b", out):
            if is_slow:
                yield measured("slow, planned for", 0)
            else:
                began = steps_done(out)
                _await(lambda: entries(out)[1:] or None, LIMIT)
                moved = next(line["step"] for line in read_metrics(out / "log") if "moved" in line)
                yield {"run": "slow, the old plan", "step s": median(began + 2, moved - 1)}
                yield measured("slow, moved live", moved, moved - began)
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=LIMIT)


def _supervised_project(folder: Path, cards: Mapping[str, int]) -> tuple[Path, Path]:
    """Folders of a project on nodes with so many cards, and of its run."""
    project, run = folder / "project", folder / "run"
    for path in (project, run):
        path.mkdir(parents=True)
    make_supervised(project, cards)
    return project, run


def _cut(plan: Plan) -> str:
    """Micro-batches of each pipeline and layers of its stages: `8x1: 4 | 2`."""
    return " / ".join(
        f"{own.num_micro_batches}x{own.micro_batch_size}: "
        + " | ".join(f"{stage.num_layers:g}" for stage in own.stages)
        for own in plan.pipelines
    )


def _move(folder: Path, run_file: Path, plans: Sequence[Plan], *, in_place: bool) -> Row:
    """Move a run of its own from the first plan to the second: seconds from the call to the end of the first
    step, with what that step takes, and what is sent."""
    log, plan = folder / f"log-{in_place}", folder / "plan-0.yaml"
    words = ["--config", str(run_file), "train.steps=100000", "validation.every=0", f"log.directory={log}"]
    words += [f"checkpoint.directory={log / 'ck'}"]

    def start(plan: Path) -> subprocess.Popen[bytes]:
        meeting = ("--this-node", "all", "--rendezvous", f"127.0.0.1:{free_port()}")
        line = [sys.executable, "-m", "yuan_train", "launch", "--plan", str(plan), *meeting, *words]
        environment = {**os.environ, NEXT_PLAN: str(folder / "plan-1.yaml")}
        return subprocess.Popen(line, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    lines = partial(read_metrics, log)
    process = start(plan)
    try:
        _await(lambda: lines()[QUIET], 3 * LIMIT)
        began = time.monotonic()
        if in_place:
            process.send_signal(signal.SIGUSR1)
            line = _await(lambda: next((line for line in lines() if "moved" in line), None), LIMIT)
        else:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=3 * LIMIT)
            done = lines()[-1]["step"]
            process = start(folder / "plan-1.yaml")
            line = _await(lambda: lines()[done], 3 * LIMIT)
        seconds = time.monotonic() - began
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=LIMIT)
    finally:
        process.kill()
        process.wait()
    row: Row = {"without a step s": seconds, MISSED: f"exit code {code}" if code else ""}
    if in_place:
        before, after = map(plan_holdings, plans)
        new = (held[name] for rank, held in after.items() for name in held.keys() - before[rank].keys())
        bound = sum(12 * math.prod(shard.shape) for shard in new)
        sent = line["moved"]["bytes"]
        row |= {"move s": line["moved"]["seconds"], "sent MiB": sent / 2**20, "bound MiB": bound / 2**20}
        row[MISSED] += "more was sent than had to be" * (sent != bound)
    return row


def _campaign(
    kinds: Mapping[str, MakeFault], faults: int, chance: random.Random, *more: str, apart: float = 0.0
) -> Iterator[Row]:
    """Rows of faults of some kinds, made of one run on this machine's own network."""
    found, whole = _run_faults(
        partial(Scene, cards=CARDS), kinds, faults, chance, "train.timeout=10 s", *more, apart=apart
    )
    yield from _rows(found)
    yield whole


def _run_faults(
    place: Callable[..., Scene],
    kinds: Mapping[str, MakeFault],
    faults: int,
    chance: random.Random,
    *more: str,
    apart: float = 0.0,
) -> tuple[list[Fault], Row]:
    """Make faults of a run, one after another, `apart` seconds from each other at least; `more` changes it.
    Returns them and a row of the run; the folder of one that has missed is kept."""
    kept = Path(tempfile.mkdtemp())
    scene, found = place(folder=kept / "run"), list[Fault]()
    project, _ = _supervised_project(kept, scene.cards)
    with supervised(project, scene.folder, *more, *words(1_000_000), network=scene.network) as process:
        _await(lambda: steps_done(scene.folder) or None, 2 * LIMIT)
        first = time.monotonic()
        while len(found) < faults and (not found or found[-1].seconds < LIMIT):
            found.append(make_fault(scene, chance, kinds))
            print(found[-1], file=sys.stderr, flush=True)
            time.sleep(max(0.0, first + apart * len(found) - time.monotonic()))
        seconds = time.monotonic() - first
        process.send_signal(signal.SIGTERM)
        code = process.wait(timeout=2 * LIMIT)
    row = _whole_row(project, scene, found, code=code, seconds=seconds)
    if any(other[MISSED] for other in (row, *_rows(found))):
        print(f"kept: {kept}", file=sys.stderr, flush=True)
    else:
        shutil.rmtree(kept)
    return found, row


def make_fault(scene: Scene, chance: random.Random, kinds: Mapping[str, MakeFault]) -> Fault:
    """Wait until the run has made some steps, make a fault, and wait until it has made a new one."""
    folder, done = scene.folder, steps_done(scene.folder)
    _await(lambda: steps_done(folder) >= done + scene.quiet or None, 2 * LIMIT)
    time.sleep(chance.uniform(0.0, scene.seconds))
    kind = chance.choice(list(kinds))
    before, began = _Before.of(folder), time.monotonic()
    node = _make(scene, kinds[kind], chance, is_of_ranks=kind.startswith("a rank"))
    if _await(lambda: before.told() or None, PASSES) is None:
        # It may have hit what nobody waits for, such as a rank that was about to end, and then is never told.
        step = _last_step(folder)
        _await(lambda: before.told() or _last_step(folder) > step or None, LIMIT)
    # Whatever was under way has come to its end by then: a rank's line, or the launchers' ten seconds.
    step = _last_step(folder)
    goes_on = _await(lambda: _last_step(folder) > step or None, LIMIT)
    told = before.told()
    said = [*told, *re.findall(r"^error: .*", _said(folder)[before.said :], re.MULTILINE)]
    return Fault(
        kind,
        node,
        seconds=time.monotonic() - began if goes_on else float("inf"),
        lost=_made_again(folder, before.starts) if told else 0,
        # A node that was stopped for a moment has kept nobody.
        is_named=not told or any(word in text for text in said for word in _names_of(scene, node)),
        torn=before.torn(),
        said="; ".join(told),
    )


@dataclass(frozen=True)
class _Before:
    """What a run had said and saved before a fault."""

    folder: Path
    entries: int
    starts: int
    said: int
    saved: int
    """Step of the newest whole checkpoint."""

    @classmethod
    def of(cls, folder: Path) -> _Before:
        return cls(folder, len(entries(folder)), len(_starts(folder)), len(_said(folder)), _saved(folder))

    def told(self) -> list[str]:
        """What the journal has said since, but that a node came which a fault before had sent away."""
        reasons = [entry.reason for entry in entries(self.folder)[self.entries :]]
        return [reason for reason in reasons if not re.fullmatch(CAME, reason)]

    def torn(self) -> list[int]:
        """Steps whose checkpoints are torn now, or lost: nobody has gone on from the newest one."""
        resumed = [int(found[1]) for found in _starts(self.folder)[self.starts :]]
        is_lost = _saved(self.folder) < self.saved or any(step < self.saved for step in resumed)
        return _torn(self.folder) + [self.saved] * is_lost


def _make(scene: Scene, fault: MakeFault, chance: random.Random, *, is_of_ranks: bool) -> str:
    """Make a fault of a node that there is: one that has ranks, or else an agent. Returns its name."""

    def found() -> list[str] | None:
        here = [node for node in scene.cards if _has(ranks_of, node, scene.folder)]
        if not is_of_ranks and not (here and scene.quiet):
            here = [node for node in scene.cards if _has(group_of, node, scene.folder)]
        return here or None

    while True:
        node = chance.choice(_await(found, LIMIT))
        # What was there may have ended meanwhile.
        with suppress(ProcessLookupError, AssertionError):
            fault(scene, node, chance)
            (scene.folder / f"down-{node}").unlink(missing_ok=True)
            return node


def _saved(folder: Path) -> int:
    return next((step for step in steps_in(folder / "checkpoints") if not _is_torn(folder, step)), 0)


def _torn(folder: Path) -> list[int]:
    """Steps whose checkpoints are torn, and stay so: one that is written again may be under way."""
    found = [step for step in steps_in(folder / "checkpoints") if _is_torn(folder, step)]
    time.sleep(bool(found))
    return [step for step in found if _is_torn(folder, step)]


def _is_torn(folder: Path, step: int) -> bool:
    return any(faults_of(folder / "checkpoints" / step_name(step)))


def _has(find: Callable[[str, Path], object], node: str, folder: Path) -> bool:
    """Whether a node has ranks, or an agent: it may wait to be let in, or for its agent."""
    try:
        return bool(find(node, folder))
    except AssertionError:
        return False


def _names_of(scene: Scene, node: str) -> tuple[str, ...]:
    """How the journal may call what is on a node: itself, its cards, and the first of all ranks."""
    first = ("rank 0:",) if node == next(iter(scene.cards)) else ()
    agents = (f"{node} went", f"{node} had to go", f"the agent of {node}")
    return (*agents, f"({node}/", f"(on {node})", *first)


def _starts(folder: Path) -> list[re.Match[str]]:
    """Where the run says from which steps it has gone on."""
    return list(re.finditer(r"^resumed from \S+ after step (\d+)", _said(folder), re.MULTILINE))


def _made_again(folder: Path, starts: int) -> int:
    """The steps that were made before the start of that number, and again after it."""
    text, found = _said(folder), _starts(folder)
    # Without a line of its own, a start is from the first step.
    end, step = (found[starts].start(), int(found[starts][1])) if len(found) > starts else (len(text), 0)
    made = re.findall(r"^step +(\d+)/", text[:end], re.MULTILINE)
    return max(int(made[-1]) - step, 0) if made else 0


def _said(folder: Path) -> str:
    return (folder / "out").read_text(errors="replace")


def _last_step(folder: Path) -> int:
    return read_metrics(folder / "log")[-1]["step"]


def _signal_rank(number: int, scene: Scene, node: str, chance: random.Random) -> None:
    os.kill(chance.choice(ranks_of(node, scene.folder)), number)


def _signal_node(number: int, scene: Scene, node: str, chance: random.Random) -> None:
    _end_node(lambda node, folder: os.killpg(group_of(node, folder), number), scene, node, chance)


def _end_node(end: Callable[[str, Path], None], scene: Scene, node: str, chance: random.Random) -> None:
    """It does not come back for some seconds."""
    (scene.folder / f"down-{node}").touch()
    end(node, scene.folder)
    time.sleep(chance.uniform(0.0, 8.0))


def _stop_node(scene: Scene, node: str, chance: random.Random) -> None:
    _stop_a_while(partial(os.killpg, group_of(node, scene.folder)), chance.uniform(0.0, 15.0))


def _stop_rank_a_while(scene: Scene, node: str, chance: random.Random) -> None:
    _stop_a_while(partial(os.kill, chance.choice(ranks_of(node, scene.folder))), chance.uniform(0.0, 10.0))


def _stop_a_while(send: Callable[[int], None], seconds: float) -> None:
    send(signal.SIGSTOP)
    time.sleep(seconds)
    with suppress(ProcessLookupError):
        send(signal.SIGCONT)


def _pull_link(scene: Scene, node: str, chance: random.Random) -> None:
    """At either end, for some seconds, or until the run has gone on without the node."""
    assert scene.network is not None
    host, before = scene.network[node], _Before.of(scene.folder)
    end, seconds = chance.choice(list(host.ends)), chance.choice((chance.uniform(0.0, 15.0), GOES_ON))
    (scene.folder / f"down-{node}").touch()
    host.pull(end)
    try:
        if seconds < GOES_ON:
            time.sleep(seconds)
        elif _await(lambda: before.told() or None, seconds):
            step = _last_step(scene.folder)
            _await(lambda: _last_step(scene.folder) > step or None, seconds)
    finally:
        host.plug(end)


KINDS: dict[str, MakeFault] = {
    "a rank is killed": partial(_signal_rank, signal.SIGKILL),
    "a rank is stopped": partial(_signal_rank, signal.SIGSTOP),
    "a node is killed": partial(_signal_node, signal.SIGKILL),
    "a node is stopped": _stop_node,
    "a node is told to go": partial(_signal_node, signal.SIGTERM),
}
ANYWHERE: dict[str, MakeFault] = {
    **{name: KINDS[name] for name in ("a rank is killed", "a rank is stopped")},
    "a rank is stopped a while": _stop_rank_a_while,
    **{name: KINDS[name] for name in ("a node is killed", "a node is stopped")},
    "a link is pulled": _pull_link,
}
"""Kinds of the hundred."""


def _shape(cards: Mapping[str, int]) -> str:
    return " + ".join(map(str, cards.values()))


def _rows(found: Sequence[Fault]) -> Iterator[Row]:
    for kind in sorted({fault.kind for fault in found}, key=[*KINDS, *ANYWHERE, LOST].index):
        own = [fault for fault in found if fault.kind == kind]
        missed = {
            "the run did not go on": any(fault.seconds >= LIMIT for fault in own),
            "a checkpoint was torn or lost": any(fault.torn for fault in own),
            "the culprit was not named": any(not fault.is_named for fault in own),
        }
        yield {
            "fault": kind,
            "times": len(own),
            "median s": statistics.median(fault.seconds for fault in own),
            "most s": max(fault.seconds for fault in own),
            "steps again": max(fault.lost for fault in own),
            "unnoticed": sum(not fault.said for fault in own),
            "unnamed": sum(not fault.is_named for fault in own),
            "torn": sum(bool(fault.torn) for fault in own),
            MISSED: "; ".join(f"{kind}: {words}" for words, is_so in missed.items() if is_so),
        }


def _whole_row(project: Path, scene: Scene, found: Sequence[Fault], *, code: int, seconds: float) -> Row:
    """The run as a whole: its checkpoints, its losses, and which part of its time was useful."""
    folder, lines = scene.folder, read_metrics(scene.folder / "log")
    compared = lines[:MOST_COMPARED]
    alone = run_alone(Case(project / "run.yaml", project / "alone", overrides=words(len(compared))))
    differs = difference(compared, alone)
    torn = _torn(folder)
    useful = len(lines) * statistics.median(line["step_seconds"] for line in lines)
    lost = seconds - useful
    faults = [f"exit code {code}"] * (code != 0) + [f"torn checkpoints {torn}"] * bool(torn)
    faults += [f"losses differ by {differs:.1e}"] * (differs > TOLERANCE)
    faults += ["steps are missing"] * ([line["step"] for line in lines] != list(range(1, len(lines) + 1)))
    return {
        "fault": f"all, {seconds:.0f} s, {len(lines)} steps",
        "times": len(found),
        "goodput": useful / seconds,
        # By what a fault has cost in the mean, with the start of what comes back.
        "one a minute": 1 - lost / len(found) / MINUTE,
        "loss differs": differs,
        MISSED: "; ".join(faults),
    }


def _await(found: Any, seconds: float) -> Any:
    """What `found` gives once it gives something, or None after so long."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with suppress(IndexError, ValueError, OSError):
            if (value := found()) is not None:
                return value
        time.sleep(0.05)
    return None
