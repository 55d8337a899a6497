"""Where the agents of a supervised run meet: torch's elastic rendezvous, and what they tell each other there.

torch's `DynamicRendezvousHandler` says who takes part in a round, notices who is gone (its heartbeats stop),
and who waits to come in. Beside it lie, in the same c10d store,

- `waits/NODE`: that an agent has come and asks to be let in;
- `gone/NODE`: that whoever started the node's agent has seen it end;
- `halt`: that whoever started the agents wants all to save and end;
- `ended`: how the whole run has ended, for agents and for the command that started them;

and of each round `node/RANK` (who an agent is), `beat/RANK` (that it lives), `order` (what the lead wants
done), `move` (the plan with which the ranks are to go on as they are), `stop` (why they are to end),
`done/RANK` (how an agent's ranks have ended), and `verdict` (what comes of it).
"""

from __future__ import annotations

import itertools
import json
import math
import os
import pickle
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousGracefulExitError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousTimeout,
)

from yuan_train.config.errors import LostRank
from yuan_train.parallel.environment import NAME_LOOKUPS

POLL_SECONDS = 0.2
"""Between two looks at what others write."""
BEAT_SECONDS = 2
PULSE_SECONDS = 0.25
"""Between two that an agent writes: whoever has its end seen waits for a few."""
PULSES_WATCHED = 4
"""Between two looks at those of others: by the first agent at all of them, by these at its own."""
BEATS_MISSED = 4
"""Heartbeats after which an agent is taken to be gone; clocks of nodes may differ by less than these."""
CUT_SECONDS, LEASE_SECONDS = BEAT_SECONDS * (BEATS_MISSED - 1), BEAT_SECONDS * BEATS_MISSED
"""Without an answer of the store, after which a node's ranks are to save and end, and must have: the others
take its agent to be gone then, and go on from the newest checkpoint."""
GONE_SECONDS = 1.0
"""Without a heartbeat, in which an agent whose end was seen is taken to be gone: an ssh connection may break
while what it has started lives."""
DOUBTED_SECONDS = 3.0
"""The same once ranks have failed: a node that is stopped or cut off took its agent with it."""
TRIES = 20
"""To change torch's state of the rendezvous, which others change too."""
FOREVER = timedelta(days=3650)
STORE_SECONDS = 20.0
"""In which the store answers."""
RUN = "supervise"


@dataclass(frozen=True)
class Agent:
    """One agent in a round, as the others know it."""

    node: str
    token: str
    """Tells it from another agent of the same node."""
    address: str
    """Where the others reach it."""
    port: int
    """One that is free there."""


@dataclass(frozen=True)
class Directive:
    """What the lead wants done in a round."""

    plan: str | None
    """The plan, as a file has it; None: there is none for these nodes, and all wait for others."""
    meeting: str = ""
    """HOST:PORT at which the ranks meet."""
    number: int = 0
    """Of the plan, since the run began."""
    nodes: Sequence[str] = ()
    """Those that have ranks of the plan."""


@dataclass(frozen=True)
class Done:
    """How an agent's ranks have ended."""

    code: int
    fault: str = ""
    """What they have said; empty if they ended well."""
    leaves: bool = False
    """Whether the agent was told to go: its node takes part no more."""
    obstacle: str = ""
    """Why they did not go on under the plan of `Round.move`, if they have said so."""


@dataclass(frozen=True)
class Seat:
    """An agent's place in a round."""

    rank: int
    size: int
    """How many agents there are."""
    number: int = 0
    """Of the round, among those of one meeting."""


@dataclass(frozen=True)
class Verdict:
    """What comes after a round, as the lead says."""

    again: bool
    """Whether there is another one."""
    stay: Sequence[str] = ()
    """The tokens of agents that begin it without another meeting, by rank; none: all meet anew."""


@dataclass(frozen=True)
class Ended:
    """How the run has ended."""

    code: int
    reason: str


class Room:
    """The store of a supervised run, and torch's rendezvous in it. Raises LostRank where it is gone."""

    def __init__(self, address: tuple[str, int], token: str, *, nodes: int, grace: float) -> None:
        """`address` is the store's; `token` this agent's; `nodes` the most that take part; `grace` how long
        others are waited for.

        Raises LostRank if nobody holds a store there.
        """
        try:
            self._store = dist.TCPStore(*address, is_master=False, timeout=timedelta(seconds=STORE_SECONDS))
            self.address = _address_towards(*address)
            """This machine's, on the network of the store."""
        except (RuntimeError, OSError) as error:
            raise LostRank(f"{address[0]}:{address[1]}: no supervisor is there ({error})") from error
        # Each agent says itself where it is reached; torch need not open a second store on the first of them.
        os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self._backend = C10dRendezvousBackend(self._store, RUN)
        self._handler = DynamicRendezvousHandler.from_backend(
            RUN,
            self._store,
            self._backend,
            min_nodes=1,
            max_nodes=nodes,
            timeout=RendezvousTimeout(join=FOREVER, last_call=timedelta(seconds=grace)),
            keep_alive_interval=BEAT_SECONDS,
            keep_alive_max_attempt=BEATS_MISSED,
            # The name of a participant, and no address: it is found again by it.
            local_addr=token,
        )
        # Its timer joins itself, an error, if a heartbeat is the last to hold the handler: end that before.
        weakref.finalize(self, self._handler._stop_heartbeats).atexit = False

    def enter(self, agent: Agent) -> Round | None:
        """Ask to take part, and wait for the next round; None: the run has ended meanwhile."""
        self._store.set(f"waits/{agent.node}", agent.token)
        expected, met = self.recall("expected") or [""], threading.Event()
        if expected[0] == agent.token:
            threading.Thread(target=self._begin_early, args=(set(expected), met), daemon=True).start()
        try:
            info = self._handler.next_rendezvous()
        except (RendezvousClosedError, RendezvousGracefulExitError):
            # The other one: while as many as the cluster has take part, as another agent of a node's sees.
            return None
        except (RuntimeError, RendezvousConnectionError) as error:
            raise lost_store(error) from error
        finally:
            met.set()
        number, found = self._number(), _read(info.store, f"seat/{agent.token}")
        seat = Seat(info.rank, info.world_size) if found is None else Seat(**found)
        return Round(self._store, info.store, seat, agent, lambda: self._number() > number)

    def _number(self) -> int:
        """Torch's number of the meeting that is: a higher one comes once all agents have left this one or are
        taken to be gone. Raises RuntimeError where the store is gone."""
        with _lost_as_runtime_error():
            found = self._backend.get_state()
        return 0 if found is None else pickle.loads(found[0]).round

    def expect(self, tokens: Sequence[str]) -> None:
        """Have the next round begin as soon as these agents are there, and whoever waits beside them."""
        self.remember("expected", tokens)

    def _begin_early(self, expected: set[str], met: threading.Event) -> None:
        """Once all are there who are expected, have torch wait for no others; until they have met."""

        def end_wait(state: Any) -> bool:
            here = {entry.addr for entry in state.participants}
            is_over = state.complete or state.deadline is None or state.wait_list or not expected <= here
            state.deadline = state.deadline if is_over else datetime.now(UTC)
            return not is_over

        with suppress(RendezvousConnectionError):
            while not met.wait(POLL_SECONDS) and not self._change_state(end_wait):
                pass

    def waiting(self, nodes: Sequence[str], members: Sequence[str]) -> tuple[str, ...]:
        """Of the cluster's nodes those that wait to be let in, beside a round's members. Raises RuntimeError
        where the store is gone."""
        with _lost_as_runtime_error():
            if not self._handler.num_nodes_waiting():
                return ()
        asking = [node for node in nodes if node not in members]
        return tuple(node for node in asking if self._store.check([f"waits/{node}"]))

    def tokens(self, waiting: Sequence[str]) -> tuple[str, ...]:
        """Those of the agents that wait as these nodes."""
        return tuple(self._store.get(f"waits/{node}").decode() for node in waiting)

    def seat(self, tokens: Sequence[str]) -> None:
        """Have torch count agents that wait, and that a round has seats for, among those that have met."""

        def join(state: Any) -> bool:
            joining = [entry for entry in state.wait_list if state.complete and entry.addr in tokens]
            for entry in joining:
                state.wait_list.remove(entry)
                state.participants[entry] = max(state.participants.values(), default=-1) + 1
            return bool(joining)

        self._persist(join, tokens)

    def let_in(self, members: Sequence[str]) -> None:
        """Note that these wait no more."""
        for node in members:
            self._store.delete_key(f"waits/{node}")

    def forget(self, tokens: Sequence[str]) -> None:
        """Take agents that are gone out of the rendezvous, which else begins no other round while it waits
        for heartbeats of theirs. Torch takes out whose last one is long ago."""

        def end_beats(state: Any) -> bool:
            gone = [entry for entry in state.last_heartbeats if entry.addr in tokens]
            state.last_heartbeats.update(dict.fromkeys(gone, datetime.min.replace(tzinfo=UTC)))
            return bool(gone)

        self._persist(end_beats, tokens)

    def _persist(self, change: Callable[[Any], bool], tokens: Sequence[str]) -> None:
        """Change torch's state as far as it is about agents, until that holds."""
        with suppress(RendezvousConnectionError):
            for _ in range(TRIES if tokens else 0):
                if self._change_state(change) is not False:
                    return

    def _change_state(self, change: Callable[[Any], bool]) -> bool | None:
        """Change torch's state of the rendezvous as `change` does in place, which says if it has; whether
        that holds: others change it too. None: nothing was to be changed."""
        found = self._backend.get_state()
        state = None if found is None else pickle.loads(found[0])
        if found is None or not change(state):
            return None
        changed = self._backend.set_state(pickle.dumps(state), found[1])
        return changed is None or changed[2]

    def remember(self, key: str, value: Any) -> None:
        """Keep a value for later rounds, whoever leads them."""
        self._store.set(f"kept/{key}", json.dumps(value))

    def recall(self, key: str) -> Any:
        """What was remembered; None if nothing was."""
        return _read(self._store, f"kept/{key}")

    def is_halted(self) -> bool:
        """Whether all are to save and end."""
        return self._store.check(["halt"])

    def end(self, ended: Ended) -> None:
        """Tell all that the run has ended; nobody is let in any more."""
        self._store.set("ended", json.dumps(asdict(ended)))
        with suppress(RuntimeError):
            self._handler.set_closed()

    def ended(self) -> Ended | None:
        """How the run has ended; None: it has not."""
        return read_end(self._store)


class Round:
    """Agents that have met, one plan, one start of its ranks."""

    def __init__(
        self, room: dist.Store, meeting: dist.Store, seat: Seat, agent: Agent, is_past: Callable[[], bool]
    ) -> None:
        """`room` is the store of all rounds, `meeting` that of the rounds of one meeting."""
        self._room, self._meeting, self._rank, self._size = room, meeting, seat.rank, seat.size
        self._number, self._verdict = seat.number, Verdict(again=True)
        store = self._store = dist.PrefixStore(f"round-{seat.number}", meeting)
        self.is_past = is_past
        """Whether the others have met again, and have taken this agent to be gone: it was cut off or stopped,
        and what it knows of its own round is no more so."""
        self._answered = time.monotonic()
        self._agents: list[Agent] = []
        """By rank, once they have said who they are."""
        self._beats = {rank: (0, time.monotonic()) for rank in range(seat.size)}
        """Of each agent the last beat that was new, and since when it is known."""
        self._done: dict[int, Done] = {}
        self._patience = BEAT_SECONDS * float(BEATS_MISSED)
        """Without a beat, in which an agent is taken to be gone whose end nobody has seen."""
        store.set(f"node/{seat.rank}", json.dumps(asdict(agent)))

    @property
    def leads(self) -> bool:
        """Whether this agent decides."""
        return self._rank == 0

    def members(self) -> dict[str, Agent] | None:
        """All agents of the round by node; None: some of them have gone before they said who they are."""
        keys = [f"node/{rank}" for rank in range(self._size)]
        if not self._await(keys, BEAT_SECONDS * BEATS_MISSED):
            return None
        self._agents = [Agent(**_read(self._store, key)) for key in keys]
        return {agent.node: agent for agent in self._agents}

    def give(self, order: Directive) -> None:
        """As the lead: say what all do."""
        self._store.set("order", json.dumps(asdict(order)))

    def order(self) -> Directive | None:
        """Wait for what the lead says; None: it is gone."""
        found = self._hear("order")
        return None if found is None else Directive(**found)

    def _hear(self, key: str) -> Any:
        """Wait for what the lead says; None: it is gone."""
        while not self._store.check([key]):
            if self.is_abandoned():
                return None
            time.sleep(POLL_SECONDS)
        return _read(self._store, key)

    def move(self, order: Directive) -> None:
        """As the lead: have the ranks go on under another plan, as the processes that they are."""
        self._store.set("move", json.dumps(asdict(order)))

    def moved_order(self) -> Directive | None:
        """The newest plan with which the ranks are to go on as they are; None: that of the order."""
        found = _read(self._store, "move")
        return None if found is None else Directive(**found)

    def start_beating(self) -> threading.Event:
        """Let the others see that this agent lives, and note who of them does, until the event is set."""
        stop = threading.Event()

        def beat() -> None:
            watched = range(self._size) if self.leads else range(1)
            for count in itertools.count():
                try:
                    self._store.add(f"beat/{self._rank}", 1)
                    self._answered = time.monotonic()
                    if count % PULSES_WATCHED == 0:
                        for rank in watched:
                            self._lives(rank)
                except RuntimeError:
                    # Nobody can go on without the store.
                    self._answered = math.inf
                    return
                if stop.wait(PULSE_SECONDS):
                    return

        threading.Thread(target=beat, name="beat", daemon=True).start()
        return stop

    def unanswered_seconds(self) -> float:
        """Since when the store has not answered a heartbeat: this node may be cut off, or was stopped."""
        return time.monotonic() - self._answered

    def is_abandoned(self) -> bool:
        """Whether the lead has not been seen alive for some heartbeats, or the round is past; to be asked
        again and again."""
        return self.is_past() or (not self.leads and not self._lives(0))

    def _lives(self, rank: int) -> bool:
        count, now = self._store.add(f"beat/{rank}", 0), time.monotonic()
        if count != self._beats[rank][0]:
            self._beats[rank] = (count, now)
        is_gone = bool(self._agents) and self._room.check([f"gone/{self._agents[rank].node}"])
        return now - self._beats[rank][1] <= (GONE_SECONDS if is_gone else self._patience)

    def lost(self) -> tuple[str, ...]:
        """The tokens of agents that this one has found gone: as the lead of all, else of the lead."""
        ranks = range(self._size) if self.leads else range(1)
        return tuple(self._agents[rank].token for rank in ranks if self._agents and not self._lives(rank))

    def remaining(self, done: Mapping[int, Done]) -> tuple[str, ...]:
        """The tokens of agents that come to another round, as far as this one knows; `done` as of
        `all_done`."""
        lost = self.lost()
        left = [agent for rank, agent in enumerate(self._agents) if rank not in done or not done[rank].leaves]
        return tuple(agent.token for agent in left if agent.token not in lost)

    def stop(self, reason: str) -> None:
        """Have all ranks save and end, or those of a start just end."""
        self._store.set("stop", json.dumps(reason))

    def give_up(self) -> None:
        """As the lead: have all ranks end, which wait for some that are gone."""
        self._store.set("hopeless", "1")

    def is_hopeless(self) -> bool:
        """Whether ranks wait for some that are gone."""
        return self._store.check(["hopeless"])

    def stop_reason(self) -> str | None:
        """Why the ranks are to end; None: they go on."""
        return _read(self._store, "stop")

    def tell(self, done: Done) -> None:
        """Say how this agent's ranks have ended."""
        self._store.set(f"done/{self._rank}", json.dumps(asdict(done)))
        if done.fault:
            self._patience = DOUBTED_SECONDS

    def any_done(self) -> bool:
        """Whether the ranks of some agent have ended."""
        return any(self._store.check([f"done/{rank}"]) for rank in range(self._size))

    def done(self) -> dict[int, Done]:
        """How the ranks of the agents have ended, as far as they have; the first ones first."""
        for rank in range(self._size):
            if rank not in self._done and (values := _read(self._store, f"done/{rank}")) is not None:
                self._done[rank] = Done(**values)
        return self._done

    def all_done(self, look: Callable[[], None]) -> dict[int, Done]:
        """How the ranks of the agents have ended; waits for those that live, which may be saving, and calls
        `look` all the while."""
        while True:
            done = self.done()
            look()
            if any(entry.fault for entry in done.values()):
                self._patience = DOUBTED_SECONDS
            if not any(self._lives(rank) for rank in range(self._size) if rank not in done):
                return done
            time.sleep(POLL_SECONDS)

    def judge(self, verdict: Verdict) -> None:
        """As the lead: say what comes after this round, with a seat for each who has not been in it."""
        for rank, token in enumerate(verdict.stay):
            if all(token != agent.token for agent in self._agents):
                seat = Seat(rank, len(verdict.stay), self._number + 1)
                self._meeting.set(f"seat/{token}", json.dumps(asdict(seat)))
        self._store.set("verdict", json.dumps(asdict(verdict)))

    def verdict(self) -> Verdict | None:
        """What the lead says, once it has; None: it is gone."""
        if (found := self._hear("verdict")) is None:
            return None
        self._verdict = Verdict(**found)
        return self._verdict

    def next(self, agent: Agent) -> Round | None:
        """The next round of those who need no other meeting; None: this agent does."""
        stay = list(self._verdict.stay)
        if agent.token not in stay or self.is_past():
            return None
        seat = Seat(stay.index(agent.token), len(stay), self._number + 1)
        return Round(self._room, self._meeting, seat, agent, self.is_past)

    def has_verdict(self) -> bool:
        """Whether the round is over."""
        return self._store.check(["verdict"])

    def _await(self, keys: list[str], seconds: float) -> bool:
        """Wait for keys; whether they came in time."""
        end = time.monotonic() + seconds
        while not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True


def read_end(store: dist.Store) -> Ended | None:
    """How the run of a store has ended; None: it has not."""
    found = _read(store, "ended")
    return None if found is None else Ended(**found)


def halt(store: dist.Store) -> None:
    """Have all agents save and end."""
    store.set("halt", "1")


def note_end(store: dist.Store, node: str, *, is_gone: bool) -> None:
    """Tell the agents of other nodes whether that of `node` has ended, as who has started it sees."""
    if is_gone:
        store.set(f"gone/{node}", "1")
    else:
        store.delete_key(f"gone/{node}")


def open_store(host: str, port: int) -> dist.TCPStore:
    """Hold the store of a supervised run. Raises LostRank if the port is taken."""
    os.environ.setdefault(*NAME_LOOKUPS)
    try:
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
    except RuntimeError as error:
        raise LostRank(
            f"--meet {host}:{port}: cannot be opened: {str(error).partition(chr(10))[0]}"
        ) from error


def open_store_if_here(host: str, port: int) -> dist.TCPStore | None:
    """Hold the store of a supervised run if its address is this machine's, and nobody holds it yet."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(found[0]) as probe:
            probe.bind(found[4])
        return open_store(host, port)
    except (OSError, LostRank):
        return None


def lost_store(error: Exception) -> LostRank:
    """The error where the store does not answer."""
    return LostRank(f"the supervisor, which holds the store, is gone ({str(error).partition(chr(10))[0]})")


@contextmanager
def _lost_as_runtime_error() -> Iterator[None]:
    """Around what torch's rendezvous asks the store: its loss is the error that the store itself raises."""
    try:
        yield
    except RendezvousConnectionError as error:
        raise RuntimeError(str(error)) from error


def _read(store: dist.Store, key: str) -> Any:
    return json.loads(store.get(key)) if store.check([key]) else None


def _address_towards(host: str, port: int) -> str:
    with socket.create_connection((host, port), timeout=STORE_SECONDS) as line:
        return line.getsockname()[0]
