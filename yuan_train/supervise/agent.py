"""The agent of one node: meets the others, starts its ranks under the lead's plan, and begins again.

Reads top to bottom: a life of rounds; a round; what the lead does besides. It stands alone because each node
has one, whoever has started it.
"""

from __future__ import annotations

import logging
import math
import os
import re
import signal
import statistics
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from yuan_train.checkpoint.in_memory import remove_copies
from yuan_train.checkpoint.load import faults_of, step_name, steps_in
from yuan_train.config.errors import CAUSE, NOT_IN_PLACE, ConfigError, NoPlanFits, hearing
from yuan_train.config.load import dump, is_mapping, write_text
from yuan_train.config.plan import Plan, node_of
from yuan_train.config.plan_constraints import load_plan, plan_digest, restart_reason
from yuan_train.config.run import RunConfig, SuperviseConfig
from yuan_train.config.units import show_bytes, show_seconds
from yuan_train.parallel.environment import NEXT_PLAN, free_port
from yuan_train.report.lines import Event, Journal, Line, checked, is_timed, parse_line
from yuan_train.report.run_log import WARM_UP_STEPS, measured_pace
from yuan_train.supervise.launched import Nursery
from yuan_train.supervise.room import (
    CUT_SECONDS,
    LEASE_SECONDS,
    POLL_SECONDS,
    Agent,
    Directive,
    Done,
    Ended,
    Room,
    Round,
    Verdict,
    lost_store,
)
from yuan_train.train.agreement import compare_facts, run_facts


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A change of plan, and whether it is worth it."""

    is_worth_it: bool
    reason: str


def weigh_move(
    before: float,
    after: float,
    *,
    measured: float | None,
    steps_left: int,
    move_seconds: float,
    settings: SuperviseConfig,
) -> Weighed:
    """Whether to go from a plan whose step is forecast as `before` seconds to one of `after`.

    `measured`: seconds that a step really takes; None: not known, taken as forecast. `move_seconds`: what is
    lost while ranks save, end and begin again. What is gained counts within `horizon`, and no further than
    the run's last step.
    """
    gain = 1 - after / before
    running = min(steps_left * (measured or before), settings.horizon)
    saved = running * gain
    words = f"a step of {show_seconds(after)} in place of {show_seconds(before)} ({gain:.1%} less)"
    if gain < settings.gain:
        return Weighed(is_worth_it=False, reason=f"{words}: below supervise.gain, {settings.gain:.1%}")
    costs = f"would save {show_seconds(saved)} of the next {show_seconds(running)}; the move takes about"
    return Weighed(is_worth_it=saved > move_seconds, reason=f"{words} {costs} {show_seconds(move_seconds)}")


@dataclass(frozen=True)
class Start:
    """One start of the ranks that has ended in a fault though no node was lost."""

    fault: str
    step: int
    """The last one that was finished."""


def repeats(starts: Sequence[Start], attempts: int) -> bool:
    """Whether the last `attempts` starts ended in the same fault, and none got further than the first."""
    last = starts[-attempts:]
    if len(last) < attempts or max(start.step for start in last) > last[0].step:
        return False
    return len({signature(start.fault) for start in last}) == 1


def signature(fault: str) -> str:
    """A fault without its numbers and its teller: ports, seconds, addresses and steps differ where the cause
    does not, and of ranks that all say the same those of any node may be heard first."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", _TOLD_ON.sub("", fault))


LINES_KEPT = 400
_TOLD_ON = re.compile(r" \(on [^()]*\)$")
"""The node whose ranks have told a fault, behind the fault."""
_BY_OTHERS = re.compile(r" \(rank \d+ \(.*$")
"""How another rank has noticed a fault, behind the fault."""
_BY_SIGNAL = re.compile(r"rank \d+ was killed by (SIGTERM|SIGKILL)|exit code -(15|9)")
"""What is said of ranks, or their launcher, that have ended as they were told."""


class Ranks:
    """The process that runs a node's ranks; what they print goes through, and its end is kept."""

    def __init__(
        self, nursery: Nursery, words: Sequence[str], next_plan: Path, unanswered: Callable[[], float]
    ) -> None:
        """`words` are what follows `yuan-train`; `next_plan` is the file that `go_on_with` has them read;
        `unanswered` gives the seconds for which their node is cut off from the others."""
        self._next_plan = next_plan
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        read_end, write_end = os.pipe()
        self._reader = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        self._reader.start()
        try:
            self._process = nursery.fork(words, {**os.environ, NEXT_PLAN: str(next_plan)}, write_end)
        finally:
            os.close(write_end)
        self._asked, self._deadline = False, math.inf
        self.cut = 0.0
        """Seconds for which the node was cut off when they were ended for that; 0: they were not."""
        threading.Thread(target=self._watch_lease, args=(unanswered,), name="lease", daemon=True).start()

    def poll(self) -> int | None:
        """The exit code; None while they run."""
        return self._process.poll()

    def ask_to_end(self, within: float = math.inf) -> None:
        """Have them save and end; once. They are killed if they have not after `within` seconds."""
        self._deadline = min(self._deadline, time.monotonic() + within)
        if not self._asked and self.poll() is None:
            self._asked = True
            self._process.send_signal(signal.SIGTERM)

    def go_on_with(self, plan: str) -> None:
        """Have them move to another plan, as the processes that they are."""
        write_text(self._next_plan, plan)
        self._process.send_signal(signal.SIGUSR1)

    def obstacle(self) -> str:
        """Why they have ended in place of a move, if they have said so."""
        self._reader.join(timeout=2)
        said = [line.removeprefix(NOT_IN_PLACE) for line in self._lines if line.startswith(NOT_IN_PLACE)]
        return said[-1].partition(";")[0] if said else ""

    def kill(self) -> None:
        """End them as they are; `launch` takes its ranks with it."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def _watch_lease(self, unanswered: Callable[[], float]) -> None:
        """End them while their node is cut off, from a thread of its own: who asks a store that does not
        answer waits for it."""
        while self.poll() is None:
            seconds = unanswered()
            if seconds > CUT_SECONDS:
                self.cut = max(self.cut, seconds)
                self.ask_to_end()
            if seconds > LEASE_SECONDS or time.monotonic() > self._deadline:
                self._process.send_signal(signal.SIGKILL)
            time.sleep(POLL_SECONDS)

    def follow(self) -> bool:
        """Whether they have ended because of another node's rank, as they say."""
        self._reader.join(timeout=2)
        return any(line.startswith(f"error: {CAUSE}") for line in self._lines)

    def fault(self, node: str) -> str:
        """What they have said of their fault: whose it was, without how others saw it. `node` is this one's
        name, for what no other rank has told. Empty: they have ended as they were asked to, before they could
        do that by themselves."""
        self._reader.join(timeout=2)
        said = [line.removeprefix("error: ") for line in self._lines if line.startswith("error: ")]
        causes = [line.removeprefix(CAUSE) for line in said if line.startswith(CAUSE)]
        cut = f"cut off from the meeting point, or stopped, for {self.cut:.0f} s"
        first = _BY_OTHERS.sub("", (causes or said or [cut if self.cut else f"exit code {self.poll()}"])[0])
        ended = _BY_SIGNAL.fullmatch(first) if self._asked and not causes else None
        is_late = time.monotonic() > self._deadline
        if ended is not None and (is_late or (ended[1] or ended[2]) in ("SIGTERM", "15")):
            return f"{cut} (on {node})" if self.cut else ""
        return first if causes else f"{first} (on {node})"

    def _read(self, stderr: int) -> None:
        with os.fdopen(stderr, errors="replace") as lines:
            for line in lines:
                self._lines.append(line.rstrip("\n"))
                sys.stderr.write(line)
                sys.stderr.flush()


logger = logging.getLogger(__name__)

HOPELESS_SECONDS = 5.0
"""In which ranks end, by themselves or by force, that wait for those of a node that is gone."""
SAVE_SECONDS = 60.0
"""In which ranks save and end once the store is gone."""
LOOK_SECONDS = 0.5
"""Between two looks at the log, and at who waits."""
TAIL_BYTES, TAIL_LINES = 1 << 16, 200
"""Of the log: what is read of its end first, and how many lines are wanted; those of many ranks are long."""
MOST_NAMED = 4
"""Cards in one sentence."""
LINES_READ = 10
"""Of the log, for the seconds of a step."""
MOVE_SECONDS = 60.0
"""What a change of plan is taken to cost until a start has been measured."""
SPOILT = (2, 3)
"""Exit codes of wrong input, which another try does not mend."""

Pace = Mapping[str, float]
"""By card, how many times as long as its type it computes; 1 where it is not named."""
FindPlan = Callable[[Sequence[str], Pace], Plan]
"""The fastest plan for some of the cluster's nodes. Raises NoPlanFits."""
PricePlan = Callable[[Plan, Sequence[str], Pace], float]
"""Seconds of a plan's step on some of the nodes."""


@dataclass(frozen=True, kw_only=True)
class Supervised:
    """A run, and what its agents need to start it."""

    run: RunConfig
    """With log.directory and checkpoint.directory, which all nodes see."""
    nodes: Sequence[str]
    """All that the cluster file has."""
    find_plan: FindPlan
    price_plan: PricePlan
    nursery: Nursery
    """Where this node's launchers are forked."""

    @property
    def folder(self) -> Path:
        """The log directory."""
        assert self.run.log.directory is not None
        return Path(self.run.log.directory)


class _Leaving(Exception):
    """This agent was told to go (SIGTERM, or Ctrl-C) while it waited for the others."""


@dataclass
class _Signals:
    leaves: bool = False
    waits: bool = False
    """Whether the agent waits for the others, and may go at once."""


def run_agent(job: Supervised, node: str, address: tuple[str, int]) -> int:
    """Take part in a supervised run as one of its nodes until it ends; returns the exit code.

    `address` is that of the store. SIGTERM: the node's ranks save and end, and the others go on without it.
    Raises LostRank if the store is gone.
    """
    # Torch orders participants by it: the cluster's first node that is here leads.
    token = f"{job.nodes.index(node):06d} {uuid.uuid4().hex}"
    room = Room(address, token, nodes=len(job.nodes), grace=job.run.supervise.grace)
    _check_run(job, room, node)
    current: Round | None = None
    with _hearing_signals() as signals:
        try:
            while True:
                signals.waits = True
                agent = Agent(node, token, room.address, free_port(room.address))
                current = (current and current.next(agent)) or room.enter(agent)
                signals.waits = False
                ended = room.ended() if current is None else _take_part(job, room, current, agent, signals)
                if ended is not None:
                    if not ended.code:
                        # All is saved; of a node that the last plan has left out, this is the last process.
                        remove_copies(job.run.checkpoint.directory or "", node)
                    return ended.code
                if signals.leaves:
                    room.forget([token])
                    if saved_step(job.run) >= last_step(job.run):
                        remove_copies(job.run.checkpoint.directory or "", node)
                    return 0
        except _Leaving:
            room.forget([token])
            return 0
        except RuntimeError as error:
            raise lost_store(error) from error


def _check_run(job: Supervised, room: Room, node: str) -> None:
    """Raise ConfigError if those that train have another run file, release or list of nodes: it would end all
    their ranks to find that, or they would never let this one in."""
    found = compare_facts(_facts(job), room.recall("run") or _facts(job))
    if found:
        raise ConfigError(
            f"{node} has another run than the nodes that train: {found}; give every node the same run file, "
            "overrides, nodes and release. If one was edited, end the run and start it again on all nodes"
        )


def _facts(job: Supervised) -> dict[str, Any]:
    """What all agents must have alike."""
    return run_facts(job.run) | {"nodes": list(job.nodes)}


@contextmanager
def _hearing_signals() -> Iterator[_Signals]:
    """Inside, SIGTERM and Ctrl-C make the agent go: at once while it waits, or when its ranks have saved."""
    signals = _Signals()

    def leave(signum: int, frame: object) -> None:
        signals.leaves = True
        if signals.waits:
            raise _Leaving

    # Its children are born deaf to what moves ranks, until they can hear it.
    with hearing({signal.SIGTERM: leave, signal.SIGINT: leave, signal.SIGUSR1: signal.SIG_IGN}):
        yield signals


def _take_part(job: Supervised, room: Room, current: Round, agent: Agent, signals: _Signals) -> Ended | None:
    """One round, from its members to its verdict. Returns how the run has ended; None: there is another."""
    beating = current.start_beating()
    try:
        members = current.members()
        if members is None:
            return None
        if members[agent.node].token != agent.token:
            return Ended(2, f"another agent serves the node {agent.node}")
        lead = Lead(job, room, current, members) if current.leads else None
        if lead is not None:
            room.let_in(tuple(members))
            lead.give_order()
        order = current.order()
        if order is None:
            return None
        done = _run_ranks(job, room, current, agent, order, lead, signals)
        if current.is_past():
            return None
        current.tell(done)
        if lead is not None:
            lead.judge()
        verdict = current.verdict()
        if current.is_past():
            return None
        if verdict is None:
            # The lead is gone, who would have kept both.
            room.expect(current.remaining({}))
            if done.fault:
                room.remember("why", done.fault)
        room.forget(current.lost())
        if verdict is not None and verdict.again and done.code in SPOILT and agent.token not in verdict.stay:
            room.forget([agent.token])
            return Ended(done.code, done.fault)
        return None if verdict is None or verdict.again else room.ended()
    finally:
        beating.set()


def _run_ranks(
    job: Supervised,
    room: Room,
    current: Round,
    agent: Agent,
    order: Directive,
    lead: Lead | None,
    signals: _Signals,
) -> Done:
    """Run this node's ranks of the order's plan until they end; a node without ranks waits for the others."""
    ranks, number = _start(job, agent, order, current), order.number
    try:
        # A node that was cut off ends what it has left, if the others have gone on from a checkpoint.
        while not current.is_past() and (ranks is None or ranks.poll() is None):
            if room.is_halted():
                # Only ever set: a signal may come while the store is asked.
                signals.leaves = True
            # Without a lead nobody would say that ranks wait for those of a node that is gone.
            is_hopeless = current.is_abandoned() or current.is_hopeless()
            if signals.leaves and (ranks or lead) and current.stop_reason() is None:
                # In a start the others would wait for these, and no rank can tell them yet.
                current.stop(f"{agent.node} had to go")
            if signals.leaves or current.stop_reason() is not None or is_hopeless:
                if ranks is None:
                    return Done(0, leaves=signals.leaves)
                ranks.ask_to_end(HOPELESS_SECONDS if is_hopeless else math.inf)
            elif ranks is None and (current.any_done() or current.has_verdict()):
                return Done(0)
            elif lead is not None:
                lead.look_around()
            move = current.moved_order()
            if move is not None and move.plan is not None and move.number != number:
                number = move.number
                if ranks is not None:
                    ranks.go_on_with(move.plan)
            time.sleep(POLL_SECONDS)
    except RuntimeError:
        # The store is gone; the ranks have links of their own, and may still save.
        if ranks is not None:
            ranks.ask_to_end()
            end = time.monotonic() + SAVE_SECONDS
            while ranks.poll() is None and time.monotonic() < end:
                time.sleep(POLL_SECONDS)
        raise
    finally:
        if ranks is not None:
            ranks.kill()
    if ranks is None:
        return Done(0)
    code = ranks.poll() or 0
    if code in SPOILT and ranks.follow():
        # Whose input is wrong says so itself. To others a rank that was stopped looks like another program.
        code = 1
    fault = ranks.fault(agent.node) if code or ranks.cut else ""
    return Done(code if fault else 0, fault, leaves=signals.leaves, obstacle=ranks.obstacle())


def _start(job: Supervised, agent: Agent, order: Directive, current: Round) -> Ranks | None:
    """Start the node's ranks; None if the plan has none here."""
    if order.plan is None or agent.node not in order.nodes:
        return None
    path = plan_path(job, order.number)
    write_text(path, order.plan)
    # As it was when the run began: whoever edits the run file means another one.
    config = path.with_name(f"run-{agent.node}.yaml")
    write_text(config, dump(job.run))
    meeting = ("--this-node", agent.node, "--rendezvous", order.meeting)
    words = ["launch", "--plan", str(path), "--config", str(config), *meeting]
    return Ranks(job.nursery, words, path.with_name("next.yaml"), current.unanswered_seconds)


def plan_path(job: Supervised, number: int) -> Path:
    """The file of a run's plan; each node writes it, whether or not the others see its disk."""
    return job.folder / "plans" / f"plan-{number}.yaml"


@dataclass(frozen=True, kw_only=True)
class MoveAsked:
    """A move that the ranks were asked for, in the processes that they are."""

    plan: Plan
    number: int
    reason: str
    before: float
    """Forecast seconds of a step as it is."""


class Lead:
    """What the first agent of a round does besides: it plans, looks around, judges, and writes the journal.

    What a later lead must know is kept in the room: the plan in use, and the starts that have failed.
    """

    def __init__(self, job: Supervised, room: Room, current: Round, members: Mapping[str, Agent]) -> None:
        self._job, self._room, self._round, self._members = job, room, current, members
        self._journal = Journal(job.folder)
        self._plan: Plan | None = None
        self._began = self._looked = time.monotonic()
        self._first_step = last_step(job.run)
        """The last one that was done when the round began; less once the log shows that it goes on before."""
        self._new: tuple[str, ...] = ()
        """Nodes that have come to others, which have run before."""
        self._has_stepped = self._has_lost = False
        """Whether a step was made, and whether an agent with ranks was lost."""
        self._failed_at = math.inf
        """When a node's ranks were seen to have failed."""
        self._considered: tuple[str, ...] = ()
        """Nodes that wait, of which it is decided whether they are let in."""
        self._weighed: Pace = self._pace
        """Of which it is decided whether it is planned for."""
        self._asked: MoveAsked | None = None
        """What the ranks have not answered yet."""

    @property
    def _nodes(self) -> tuple[str, ...]:
        """Those that take part, in the cluster's order."""
        return tuple(node for node in self._job.nodes if node in self._members)

    @property
    def _pace(self) -> dict[str, float]:
        """What is planned for."""
        return self._room.recall("pace") or {}

    def give_order(self) -> None:
        """Plan for the nodes that are here, and say what all start."""
        kept = self._room.recall("plan") or {"number": 0, "nodes": [], "forecast": None, "text": None}
        before, nodes = kept["forecast"], list(self._nodes)
        is_same = nodes == kept["nodes"] and not kept.get("is_stale")
        number = kept["number"] + (not is_same)
        path = plan_path(self._job, number)
        try:
            plan = self._plan = self._plan_again(path, kept["text"] if is_same else None)
        except NoPlanFits as error:
            self._note("waits", f"no plan fits {_listed(nodes)}: {error}", None, before, None)
            self._round.give(Directive(None))
            return
        if self._round.is_past():
            return
        forecast, text = _forecast(plan), dump(plan)
        # Who was to be let in may have gone before.
        before_it: list[str] = [*kept["nodes"], *(self._room.recall("coming") or [])]
        came = tuple(node for node in nodes if node not in kept["nodes"])
        self._new = came if len(came) < len(nodes) else ()
        why = _change(list(dict.fromkeys(before_it)), nodes, self._room.recall("why"))
        self._room.remember("coming", None)
        is_other = kept["nodes"] and number != kept["number"]
        self._note("moved" if is_other else "started", why, path, before, forecast)
        self._room.remember("plan", {"number": number, "nodes": nodes, "forecast": forecast, "text": text})
        self._room.remember("why", None)
        self._room.remember("run", _facts(self._job))
        first = self._members[node_of(plan.ranks[0])]
        own = tuple(dict.fromkeys(map(node_of, plan.ranks)))
        self._round.give(Directive(text, _join(first.address, first.port), number, own))

    def look_around(self) -> None:
        """Let in nodes that wait if that repays the move; all of them where there is no plan without."""
        if time.monotonic() < self._looked + LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        if self._stop_without_lost():
            return
        self._end_start()
        if self._plan is not None and not self._has_stepped:
            # A run that has not made a step yet is not moved: that could go on for ever.
            step = last_step(self._job.run)
            self._has_stepped = step > self._first_step
            # The ranks strike out of the log what they make again.
            self._first_step = min(self._first_step, step)
            if not self._has_stepped:
                return
            self._room.remember("move_seconds", time.monotonic() - self._began)
        waiting = self._room.waiting(self._job.nodes, self._nodes)
        if waiting and waiting != self._considered:
            self._considered = waiting
            self._consider(waiting)
        elif self._asked is not None:
            self._look_for_move(self._asked)
        elif self._plan is not None:
            self._weigh_pace(self._plan)

    def _stop_without_lost(self) -> bool:
        """End the ranks if the agent of some of them is lost; whether one is.

        They would wait for those of its node, in a start or a save for long, and nothing tells them where it
        is cut off or has no power.
        """
        lost = self._round.lost()
        used = {node_of(rank) for rank in self._plan.ranks} if self._plan is not None else set[str]()
        gone = [node for node, agent in self._members.items() if agent.token in lost and node in used]
        if gone and not self._round.is_hopeless():
            self._has_lost = True
            self._room.remember("why", f"no word of the agent of {_listed(gone)}")
            self._round.give_up()
        return bool(gone)

    def _end_start(self) -> None:
        """End the ranks of a start some of whose ranks have failed: until they have met, nothing tells the
        others, which wait for train.startup_timeout."""
        now = time.monotonic()
        if self._has_stepped or not any(entry.code for entry in self._round.done().values()):
            return
        self._failed_at = min(self._failed_at, now)
        if now > self._failed_at + HOPELESS_SECONDS and not self._round.is_hopeless():
            self._has_stepped = last_step(self._job.run) > self._first_step
            if not self._has_stepped:
                self._round.give_up()

    def judge(self) -> None:
        """When this agent's ranks have ended: say what comes next."""
        done = self._round.all_done(self._end_start)
        if self._round.is_past():
            return
        ended, remaining = self._outcome(done), self._round.remaining(done)
        if self._is_spoilt_by_new(done):
            spoilt = [self._members[node].token for node in self._new]
            remaining = tuple(token for token in remaining if token not in spoilt)
        self._room.expect(remaining)
        if ended is not None:
            event = "gave_up" if ended.code else "finished" if ended.reason.startswith("all") else "stopped"
            self._note(event, ended.reason, None, None, None)
            self._room.end(ended)
        waiting = () if ended is not None else self._room.waiting(self._job.nodes, self._nodes)
        came = self._room.tokens(waiting)
        self._round.judge(Verdict(again=ended is None, stay=(*remaining, *came)))
        self._room.seat(came)

    def _plan_again(self, path: Path, text: str | None) -> Plan:
        """The plan of these nodes: the one that they had, or the fastest."""
        if text is None:
            return self._job.find_plan(self._nodes, self._pace)
        write_text(path, text)
        return load_plan(path)

    def _consider(self, waiting: Sequence[str]) -> None:
        """Let in nodes that wait, or write down why not."""
        names = _listed(waiting)
        if self._plan is None:
            self._let_in(waiting, "")
            return
        before = _forecast(self._plan)
        nodes = tuple(node for node in self._job.nodes if node in (*self._members, *waiting))
        try:
            after = _forecast(self._job.find_plan(nodes, self._pace))
        except NoPlanFits:
            return
        move = self._weigh(before, after)
        if move.is_worth_it:
            self._let_in(waiting, f": {move.reason}")
        else:
            self._note("stays", f"{names} waits: {move.reason}", None, before, after)

    def _let_in(self, waiting: Sequence[str], why: str) -> None:
        self._room.remember("coming", list(waiting))
        self._stop(f"{_listed(waiting)} came{why}")

    def _weigh_pace(self, plan: Plan) -> None:
        """Plan anew for cards that compute slower, or again faster, than planned, if that repays the move."""
        run, slow = self._job.run, self._job.run.supervise.slow
        first = self._first_step + WARM_UP_STEPS
        found = measured_pace(plan, [line for line in _last_lines(run) if line["step"] > first])
        old = self._pace
        cards = {plan.ranks[rank].device: factor for rank, factor in found.items()}
        # A card that the plan leaves out keeps its pace.
        pace = old | _beside_each_other({card: f * old.get(card, 1.0) for card, f in cards.items()})
        if _is_near(pace, old, slow) or _is_near(pace, self._weighed, slow):
            return
        self._weighed = pace
        try:
            before = self._job.price_plan(plan, self._nodes, pace)
            found = self._job.find_plan(self._nodes, pace)
        except NoPlanFits:
            return
        after, obstacle = _forecast(found), restart_reason(plan, found, run)
        move, words = self._weigh(before, after, live=obstacle is None), _pace_words(pace, old, slow)
        if not move.is_worth_it:
            self._note("stays", f"{words}: {move.reason}", None, before, after)
            return
        # Whatever comes of it: the next start is under the new plan too.
        kept, reason = self._room.recall("plan"), f"{words}: {move.reason}"
        self._room.remember("pace", pace)
        self._room.remember("plan", {**kept, "forecast": before, "is_stale": True})
        if obstacle is not None:
            self._stop(f"{reason}; by a restart, for {obstacle}")
            return
        self._room.remember("why", reason)
        number = kept["number"] + 1
        path, text = plan_path(self._job, number), dump(found)
        write_text(path, text)
        # As the ranks read it.
        self._asked = MoveAsked(plan=load_plan(path), number=number, reason=reason, before=before)
        self._round.move(Directive(text, number=number))

    def _look_for_move(self, asked: MoveAsked) -> None:
        """If the ranks go on under the plan that they were asked for, write that down, and do as they."""
        digest = plan_digest(asked.plan)
        lines = [line for line in _last_lines(self._job.run) if is_mapping(line.get("moved"))]
        line = next((line for line in reversed(lines) if line["moved"].get("plan") == digest), None)
        if line is None:
            return
        seconds, size = float(line["moved"]["seconds"]), int(line["moved"]["bytes"])
        self._asked, self._plan, self._first_step = None, asked.plan, line["step"] - 1
        self._room.remember("live_seconds", seconds)
        self._room.remember("why", None)
        forecast, path = _forecast(asked.plan), plan_path(self._job, asked.number)
        kept = {"number": asked.number, "nodes": list(self._nodes), "forecast": forecast}
        self._room.remember("plan", kept | {"text": dump(asked.plan)})
        how = f"moved live in {show_seconds(seconds)}, {show_bytes(size)} sent between ranks"
        live = {"live_seconds": seconds, "live_bytes": size}
        self._note("moved", f"{asked.reason}; {how}", path, asked.before, forecast, **live)

    def _weigh(self, before: float, after: float, *, live: bool = False) -> Weighed:
        """Whether a move is worth it; `live`: in the processes that there are, of which none is slower than a
        restart."""
        run, move_seconds = self._job.run, self._room.recall("move_seconds") or MOVE_SECONDS
        return weigh_move(
            before,
            after,
            measured=_measured(run),
            steps_left=run.train.steps - last_step(run),
            move_seconds=(live and self._room.recall("live_seconds")) or move_seconds,
            settings=run.supervise,
        )

    def _outcome(self, done: Mapping[int, Done]) -> Ended | None:
        """How the run has ended; None: it goes on."""
        run, step = self._job.run, last_step(self._job.run)
        faults = [entry for entry in done.values() if entry.code]
        is_whole = len(done) == len(self._members)
        if not faults and saved_step(run) >= run.train.steps:
            return Ended(0, f"all {run.train.steps} steps are done")
        if self._room.is_halted():
            return Ended(0, f"stopped after step {step}")
        worst = min(faults, key=lambda entry: entry.code not in SPOILT) if faults else None
        leaving = [node for rank, node in enumerate(self._members) if rank in done and done[rank].leaves]
        if leaving:
            self._room.remember("why", f"{_listed(leaving)} had to go (SIGTERM)")
        if len(leaving) == len(self._members) and not faults:
            # It goes on if somebody brings a node back.
            self._note("stopped", f"stopped after step {step}: {self._room.recall('why')}", None, None, None)
        if leaving or self._round.stop_reason() is not None or self._has_lost:
            if worst is not None:
                # Something failed while they saved.
                self._room.remember("why", f"{self._room.recall('why')}; {worst.fault}")
            return None
        if self._asked is not None and is_whole and not faults:
            told = next(filter(None, (entry.obstacle for entry in done.values())), "the ranks were ended")
            self._room.remember("why", f"{self._asked.reason}; by a restart, for {told}")
            return None
        is_by_new = self._is_spoilt_by_new(done)
        if worst is not None and worst.code in SPOILT and not is_by_new:
            return Ended(worst.code, worst.fault)
        if not is_whole or is_by_new:
            # A node is gone, and with it the fault.
            self._room.remember("why", worst.fault if worst else None)
            return None
        told = worst.fault if worst else next(filter(None, (entry.fault for entry in done.values())), "")
        fault = told or "the ranks were ended from outside (SIGTERM)"
        return self._again(Start(fault, step))

    def _is_spoilt_by_new(self, done: Mapping[int, Done]) -> bool:
        """Whether input is wrong since nodes have come: the others have shown that theirs is not."""
        is_spoilt = any(entry.code in SPOILT for entry in done.values())
        return is_spoilt and bool(self._new) and last_step(self._job.run) <= self._first_step

    def _again(self, start: Start) -> Ended | None:
        """Another start after a fault, unless it does not help."""
        attempts = self._job.run.supervise.attempts
        kept = [Start(**one) for one in self._room.recall("starts") or []]
        starts = [*kept, start][-attempts:]
        self._room.remember("starts", [asdict(one) for one in starts])
        if repeats(starts, attempts):
            return Ended(1, f"the same fault {attempts} times without a step in between: {start.fault}")
        self._room.remember("why", start.fault)
        self._note("fault", start.fault, None, None, None)
        return None

    def _stop(self, reason: str) -> None:
        self._room.remember("why", reason)
        self._round.stop(reason)

    def _note(
        self,
        event: Event,
        reason: str,
        plan: Path | None,
        before: float | None,
        after: float | None,
        **more: Any,
    ) -> None:
        """Write an entry of the journal, and say it."""
        self._journal.write(
            event,
            reason,
            plan=None if plan is None else str(plan),
            forecast_before=before,
            forecast_after=after,
            nodes=self._nodes,
            waiting=self._considered,
            step=last_step(self._job.run),
            **more,
        )
        words = f" ({plan}, {show_seconds(after or 0.0)} a step)" if plan is not None else ""
        logger.warning("supervise: %s: %s%s", event, reason, words)


def saved_step(run: RunConfig) -> int:
    """The step of the newest whole checkpoint; 0: there is none."""
    folder = Path(run.checkpoint.directory or "")
    whole = (step for step in steps_in(folder) if not any(faults_of(folder / step_name(step))))
    return next(whole, 0)


def last_step(run: RunConfig) -> int:
    """The last step that the log or a checkpoint has."""
    lines = _last_lines(run)
    return max(saved_step(run), lines[-1]["step"] if lines else 0)


def _measured(run: RunConfig) -> float | None:
    """Seconds of a step as measured in the last ones; None: not yet."""
    lines = _last_lines(run)[-LINES_READ:]
    return statistics.median(line["step_seconds"] for line in lines) if lines else None


def _last_lines(run: RunConfig) -> list[Line]:
    """The last whole lines of metrics.jsonl; what is damaged of them is left out."""
    try:
        with (Path(run.log.directory or "") / "metrics.jsonl").open("rb") as file:
            size, length, lines = file.seek(0, 2), TAIL_BYTES, list[bytes]()
            while len(lines) <= TAIL_LINES and length < 4 * size + TAIL_BYTES:
                file.seek(max(0, size - length))
                lines, length = file.read().split(b"\n"), 4 * length
    except OSError:
        return []
    found = map(parse_line, lines[-TAIL_LINES - 1 :])
    return [checked(line) for line in found if line is not None and is_timed(line)]


def _beside_each_other(pace: Pace) -> dict[str, float]:
    """The pace of cards, of which the one in the middle has 1."""
    common = statistics.median_low(pace.values()) if pace else 1.0
    return {card: round(factor / common, 3) for card, factor in pace.items()}


def _is_near(pace: Pace, other: Pace, factor: float) -> bool:
    """Whether no card of `pace` has another one that differs by that factor."""
    return all(1 / factor < own / other.get(card, 1.0) < factor for card, own in pace.items())


def _pace_words(pace: Pace, old: Pace, slow: float) -> str:
    """`b/0 computes 3.0 times as long as its type is forecast to (1.0 was planned for)`."""
    other = [card for card in pace if not _is_near({card: pace[card]}, old, slow)]
    words = [
        f"{card} computes {pace[card]:.1f} times as long as its type is forecast to "
        f"({old.get(card, 1.0):.1f} was planned for)"
        for card in other[:MOST_NAMED]
    ]
    more = [f"{len(other) - MOST_NAMED} more cards too"] if len(other) > MOST_NAMED else []
    return ", ".join([*words, *more])


def _forecast(plan: Plan) -> float:
    assert plan.forecast is not None
    return plan.forecast.step_seconds


def _change(before: Sequence[str], nodes: Sequence[str], why: str | None) -> str:
    """Why there is another start: who has gone, who has come, and what was said."""
    if not before:
        return f"{_listed(nodes)} {'is' if len(nodes) == 1 else 'are'} here"
    gone = [node for node in before if node not in nodes]
    came = [node for node in nodes if node not in before]
    words = [f"{_listed(gone)} went"] if gone else []
    words += [f"{_listed(came)} came"] if came and not (why or "").startswith(_listed(came)) else []
    return "; ".join([*words, *([why] if why else [])]) or "another start"


def _listed(nodes: Sequence[str]) -> str:
    return ", ".join(nodes)


def _join(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
