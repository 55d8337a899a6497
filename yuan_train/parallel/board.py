"""The board: what the ranks of a job tell each other beside their process groups: who has come, who failed.

It lies in torch.distributed's store, at the address that the launcher gave. Every rank looks at it from time
to time, from a thread of its own (`train/ending.py`): so that all ranks end within seconds and know why, also
those that stand in an operation of NCCL or gloo that nothing will end. Keys, below the number of the attempt:

- `size`: how many ranks meet here, as the first of them says;
- `came`, `counted/R`, `joined`: how many ranks are there and in the ring, and that R is one of them;
- `came/R`: where rank R runs; also of one that only tells what it has found wrong;
- `asked/R`, `alive/R`: whether rank R is there, which the rank before it could not reach, and its answer;
- `beside`: how many ranks torchrun's agent runs that holds the store; they are the first ones;
- `failed`: the fault that ends the run. The first writer wins;
- `taken/R`: which process is rank R, so that there is one;
- `line/R`: where rank R listens for the rank before it, whose connection ends when R does;
- `lost`, `here/R`: a rank has lost another one and calls the roll. Who does not answer is gone; who does,
  says for how long it stood still or was cut off just before;
- `stopped`: which launcher has ended, so that the run stops, and ends well;
- `heard`, `left`, `left/R`: how many know of the fault, or have ended well. The store's host leaves last.

The roles of one job meet at one board, and each has a process group world of its own: its ranks find each
other under a prefix of the store, so that everything that asks for the rank and the size of the world
(groups, executor, optimizer) gets those of the role. `transfer.py` joins ranks of several.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from typing import Literal

import torch.distributed as dist

from yuan_train.config.errors import CAUSE, ConfigError, LostRank, PlanError, TrainingError, YuanError
from yuan_train.parallel.environment import tell_launcher, unknown_host

POLL_SECONDS = 0.2
"""Between two looks at something that other ranks write."""
ROLL_CALL_SECONDS = 2.0
"""In which a rank that lives answers. A rank with a fault of its own tells it before that, and wins."""
PAUSE_SECONDS, RECENT_SECONDS = 2.0, 10.0
"""From how many on it is a pause in which a rank has not looked at the board; and how long that is told."""
HEARD_SECONDS = 3.0
"""How long a rank that ends waits until all others have heard why."""
LEFT_SECONDS = 10.0
"""How long rank 0, which holds the store, waits for the others to leave at the end of a run."""
ANSWER_SECONDS = 5.0
"""In which the store answers."""
MAX_NAMED = 4
"""Ranks that a message names."""
LAZY_FROM = 64
"""Ranks from which on those of the world connect when they first exchange a message, not all with all."""


@dataclass(frozen=True)
class Fault:
    """What ends a run, and the rank that found it."""

    rank: int
    where: str
    """The rank, for people: `rank 5 (b/1 on host-b)`."""
    text: str
    exit_code: int = 1
    silent: int = 0
    """How many ranks are gone and hear of nothing."""

    def __str__(self) -> str:
        return f"{self.where}: {self.text}"

    def as_error(self) -> YuanError:
        """The error that a rank raises which ends because of it, with the same exit code."""
        error = YuanError(str(self)) if self.exit_code == YuanError.exit_code else TrainingError(str(self))
        error.exit_code = self.exit_code
        return error


@dataclass(frozen=True)
class Meeting:
    """Where the ranks that a launcher started meet, and which of them this process is."""

    host: str
    port: int
    rank: int
    world_size: int
    """0: it is not known, to one who only tells a fault."""
    attempt: str
    """torchrun's number of the restart; its store still holds what failed attempts have written."""
    is_agents: bool
    """Whether torchrun's agent holds the store, and not rank 0."""

    @classmethod
    def of_launcher(cls) -> Meeting:
        """As the launcher's environment variables say. Raises YuanError if one is missing or wrong."""
        names = ("MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE")
        missing = [name for name in names if not os.environ.get(name)]
        if missing:
            raise ConfigError(
                f"environment variable {missing[0]} is not set: start the ranks with `yuan-train launch` or "
                "torchrun, or set MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE of each"
            )
        host, port, rank, world_size = (os.environ[name] for name in names)
        if not port.isdecimal() or not 0 < int(port) < 65536:
            raise ConfigError(f"environment variable MASTER_PORT: wanted 1 to 65535, got {port!r}")
        return cls(
            host,
            int(port),
            int(rank),
            int(world_size),
            os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"),
            os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        )

    @property
    def holds_store(self) -> bool:
        """Whether this rank is the one that holds it."""
        return self.rank == 0 and not self.is_agents

    @property
    def holder(self) -> str:
        """Who holds the store, for people."""
        return f"torchrun's agent on {self.host}" if self.is_agents else "rank 0"

    @property
    def address(self) -> str:
        """Host and port, for people."""
        return f"{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}"

    def open_store(self, seconds: float) -> dist.TCPStore:
        """The store, which rank 0 holds. Raises TrainingError if it is not there within `seconds`,
        ConfigError if something else is."""
        if not self.holds_store:
            self.connect(seconds).close()
            return self.join_store(seconds)
        try:
            # By the loopback: of a host that is not reached torch prints stack dumps; `connect` tells it.
            return dist.TCPStore(
                "127.0.0.1",
                self.port,
                self.world_size or None,
                True,
                timeout=timedelta(seconds=seconds),
                wait_for_workers=False,
                multi_tenant=True,
            )
        except (RuntimeError, ValueError) as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(f"the ranks cannot meet at {self.address}: {reason}") from error

    def join_store(self, seconds: float) -> dist.TCPStore:
        """A connection to the store, where somebody listens. Raises ConfigError if that is another program.

        Torch greets it, and waits for ever for the answer of a program that says nothing. A store that is
        just being opened, on a busy machine, may refuse a greeting or answer late: it is greeted again.
        """
        joined: list[dist.TCPStore] = []
        end = time.monotonic() + 2 * ANSWER_SECONDS

        def join() -> None:
            while time.monotonic() < end:
                # What is there but no store is told below, once.
                with suppress(RuntimeError, ValueError):
                    joined.append(
                        dist.TCPStore(
                            self.host,
                            self.port,
                            self.world_size or None,
                            False,
                            timeout=timedelta(seconds=max(seconds, ANSWER_SECONDS)),
                            wait_for_workers=False,
                        )
                    )
                    return
                _sleep(end - 2 * ANSWER_SECONDS)

        thread = threading.Thread(target=join, name="greeting", daemon=True)
        thread.start()
        thread.join(2 * ANSWER_SECONDS)
        if joined:
            return joined[0]
        raise ConfigError(
            f"what answers at {self.address} is not {self.holder}, which the ranks meet there: the port is "
            "another program's; give a free one to every node, --rendezvous HOST:PORT (of torchrun: "
            "--master-port)"
        )

    def connect(self, seconds: float) -> socket.socket:
        """A connection to the store on which nothing is said: it ends when the store's holder does.

        Torch's own client prints stack dumps while nobody is there. Raises ConfigError if there is no such
        host, LostRank if nobody comes.
        """
        end = time.monotonic() + seconds
        while True:
            try:
                line = socket.create_connection((self.host, self.port), timeout=ANSWER_SECONDS)
                line.setblocking(False)
                return line
            except socket.gaierror as error:
                raise ConfigError(unknown_host(self.host)) from error
            except OSError as error:
                if time.monotonic() > end:
                    asked = "is its node started, and no firewall between?"
                    if self.holds_store:
                        asked = "this is rank 0; wanted an address of this machine"
                    late = f"{self.holder} did not come to {self.address} within {seconds:g} s ({error})"
                    raise LostRank(f"{late}: {asked}") from error
            _sleep(end - seconds)


class Board:
    """The board of a rank; safe to be used by several threads. `members` are the ranks that end together."""

    def __init__(self, meeting: Meeting, place: str | None, *, seconds: float) -> None:
        """Join the others' board, or, as the holder of the store, open it.

        `place` is where this rank runs, for people. Raises TrainingError if it is not there within `seconds`,
        ConfigError if it is of another run, and PlanError, on all ranks, if this one is of more or fewer.
        """
        self.meeting = meeting
        fault = None
        try:
            self.store = meeting.open_store(seconds)
            """For the process groups; the board has a connection of its own, which none of theirs holds."""
        except TrainingError as error:
            if not meeting.holds_store:
                raise
            # Another node's launcher may hold it, to tell what is wrong there.
            fault, self.store = error, meeting.join_store(seconds)
        self._line = meeting.connect(seconds)
        client = meeting.join_store(seconds)
        client.set_timeout(timedelta(seconds=ANSWER_SECONDS))
        self._all = self._own = dist.PrefixStore(f"board-{meeting.attempt}", client)
        self.members: Sequence[int] = range(meeting.world_size)
        self._place = f"{place} on {socket.gethostname()}" if place else socket.gethostname()
        self._lock = threading.Lock()
        self._heard: Fault | None = None
        """What ends the run, once this rank knows of it; the store may be gone by the next look."""
        self._holder = meeting.holder
        self._pauses: dict[str, tuple[float, float]] = {}
        """How long this rank has last stood still, and was last cut off from the store; and until when."""
        try:
            if not self._all.check(["failed"]):
                if fault is not None:
                    raise fault
                self._enter()
        except YuanError:
            self._line.close()
            raise
        self._all.set(f"came/{meeting.rank}", self._place)
        if meeting.is_agents and meeting.rank == 0:
            self._all.set("beside", os.environ.get("LOCAL_WORLD_SIZE", "1"))
        # By the address that reaches the store, others on its network reach this rank.
        self._listener = socket.create_server(("", 0))
        self._all.set(
            f"line/{meeting.rank}", f"{self._line.getsockname()[0]} {self._listener.getsockname()[1]}"
        )
        self._next: tuple[int, socket.socket] | None = None
        self._may_be_asked = False
        """Whether the rank before this one may not have reached it yet."""

    def _enter(self) -> None:
        """Raise ConfigError unless these are the ranks of this one's run, as far as their number tells."""
        meeting = self.meeting
        if meeting.world_size:
            size = int(self._all.compare_set("size", "", str(meeting.world_size)))
        else:
            # Where nobody has said it yet, whoever comes shall hear, until time is up.
            size = int(self._all.get("size")) if self._all.check(["size"]) else 1 << 30
            self.members = range(size)
        if self._all.add("came", 0) >= size:
            # They hear nothing of this, for it is none of their run's.
            raise ConfigError(
                f"rank {meeting.rank}: all {size} ranks of a run at {meeting.address} have met already: "
                "another one has that port; give a free one to every node, --rendezvous HOST:PORT (of "
                "torchrun: --master-port)"
            )
        if meeting.world_size not in (0, size):
            self.members = range(size)
            error = PlanError(
                f"started as rank {meeting.rank} of {meeting.world_size}, but at {meeting.address} {size} "
                "ranks meet: give every node the same plan, and each run a port of its own (--rendezvous "
                "HOST:PORT)"
            )
            told = self.report(str(error), error.exit_code)
            if told is not None:
                self.wait_until_heard(told)
            raise error

    def narrow(self, members: Sequence[int]) -> None:
        """Once all have come: end with these ranks alone, this one among them."""
        self._own, self.members = dist.PrefixStore(f"fate-{members[0]}", self._all), members

    def wait_for_all(self, seconds: float) -> None:
        """Wait until all ranks have come. Raises LostRank if some do not, or what a rank has found wrong."""
        end, world_size = time.monotonic() + seconds, self.meeting.world_size
        self._take_part()
        self._all.add("came", 1)
        # Counted first: whoever is not there when time is up has no name in the message for being late alone.
        self._all.set(f"counted/{self.meeting.rank}", "")
        while self._count_come() < world_size:
            self._raise_fault()
            if time.monotonic() > end:
                missing = [r for r in range(world_size) if not self._all.check([f"counted/{r}"])]
                who = _joined([f"rank {rank}" for rank in missing])
                raise LostRank(
                    f"{self.name(self.meeting.rank)}: {who} did not come to {self.meeting.address} "
                    f"within {seconds:g} s (train.startup_timeout); are they started?"
                )
            _sleep(end - seconds)
        self._raise_fault()

    def _count_come(self) -> int:
        """How many ranks have come; 0 if the store does not answer: `look` says whether it is gone."""
        with suppress(RuntimeError):
            return self._all.add("came", 0)
        return 0

    def _take_part(self) -> None:
        """Raise ConfigError, on all ranks, if another process is this rank already."""
        rank, mine = self.meeting.rank, f"{self._place} {uuid.uuid4().hex}"
        taken = self._all.compare_set(f"taken/{rank}", "", mine).decode()
        if taken == mine:
            return
        place = taken.rpartition(" ")[0]
        error = ConfigError(
            f"rank {rank} has come to {self.meeting.address} twice, from {place} and from {self._place}: "
            "start each node once, and give each run a port of its own (--rendezvous HOST:PORT)"
        )
        told = self.report(str(error), error.exit_code)
        if told is not None:
            self.wait_until_heard(told)
        raise error

    def _raise_fault(self) -> None:
        fault = self.look()
        if fault is not None:
            # Nobody else need be told what this rank has heard.
            tell_launcher(self.meeting.rank, "tells")
            self.wait_until_heard(fault)
            raise replace(fault, where=f"{CAUSE}{fault.where}").as_error()

    def learn_holder(self) -> None:
        """Learn which ranks run under the agent that holds the store, if one does: it ends when one of them
        fails, and the store with it, before it can be read there. Once all ranks have come."""
        if not self.meeting.is_agents:
            return
        with suppress(RuntimeError, ValueError):
            ranks = range(int(self._all.get("beside")))
            names = [self.name(rank) for rank in ranks[:MAX_NAMED]] + [f"rank {r}" for r in ranks[MAX_NAMED:]]
            self._holder = f"{self.meeting.holder} with {_joined(names)}"

    def join_ring(self) -> None:
        """Hold a connection to the next rank, to notice its end where no library does, and wait for the other
        members to do so: the end of each is noticed from then on. Once all ranks have come.

        A rank that cannot be reached is asked over the store: one that lives may be behind a firewall, and
        then there is no connection to it. Raises what ends the run, if it does not answer.
        """
        following = self.members[(list(self.members).index(self.meeting.rank) + 1) % len(self.members)]
        self._may_be_asked = True
        # If the store fails, its holder has ended, or it may answer again.
        with suppress(RuntimeError):
            if following != self.meeting.rank:
                self._reach(following)
            end = time.monotonic() + ANSWER_SECONDS
            self._own.add("joined", 1)
            while not self._have_all_joined() and time.monotonic() < end:
                self._raise_fault()
                time.sleep(POLL_SECONDS / 4)
        self._raise_fault()
        tell_launcher(self.meeting.rank, "tells")

    def _reach(self, following: int) -> None:
        host, port = self._all.get(f"line/{following}").decode().split()
        try:
            line = socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS)
        except OSError as error:
            if not self._does_answer(following):
                self.accuse(f"the connection to rank {following} was not made ({error})")
            self._raise_fault()
        else:
            line.setblocking(False)
            self._next = following, line

    def _does_answer(self, rank: int) -> bool:
        """Ask a rank whether it is there, and wait for its answer as long as for one to a roll call."""
        self._own.set(f"asked/{rank}", "")
        end = time.monotonic() + ROLL_CALL_SECONDS
        while time.monotonic() < end:
            self._raise_fault()
            if self._own.check([f"alive/{rank}"]):
                return True
            time.sleep(POLL_SECONDS / 4)
        return False

    def _have_all_joined(self) -> bool:
        """Whether all members have reached the next one, or know that it lives: then nobody is asked."""
        if self._may_be_asked:
            self._may_be_asked = self._own.add("joined", 0) < len(self.members)
        return not self._may_be_asked

    def look_around(self) -> Fault | None:
        """As `look`; and calls the roll if the next rank has ended without a word."""
        fault = self.look()
        if fault is not None or self._next is None or not _is_closed(self._next[1]):
            return fault
        following, line = self._next
        line.close()
        self._next = None
        with suppress(RuntimeError):
            if self._own.check([f"left/{following}"]):
                return None
        return self.accuse(f"the connection to rank {following} has ended", ended=following)

    def note_pause(self, kind: Literal["still", "cut"], seconds: float) -> None:
        """Note that this rank stood still, or was cut off from the store, for so many seconds until now."""
        if seconds >= PAUSE_SECONDS:
            self._pauses[kind] = (seconds, time.monotonic())

    def look(self) -> Fault | None:
        """What ends the run, if anything does. Answers a roll call on the way."""
        if self._heard is not None:
            return self._heard
        if self._is_gone():
            return self._without_store()
        # A store that does not answer, but is there, may do so again.
        with suppress(RuntimeError):
            if self._own.check(["failed"]):
                return self._hear()
            if self._own.check(["lost"]):
                since = time.monotonic() - RECENT_SECONDS
                recent = {kind: seconds for kind, (seconds, end) in self._pauses.items() if end > since}
                self._own.set(f"here/{self.meeting.rank}", json.dumps(recent))
            if not self._have_all_joined() and self._own.check([f"asked/{self.meeting.rank}"]):
                self._own.set(f"alive/{self.meeting.rank}", "")
        return None

    def report(self, text: str, exit_code: int, *, where: str | None = None, silent: int = 0) -> Fault | None:
        """Tell all ranks a fault of this one, or of `where`. Returns the fault that ends the run: another
        rank's, if it was told first; None if the store does not answer."""
        mine = self.name(self.meeting.rank) if where is None else where
        return self._write(Fault(self.meeting.rank, mine, text, exit_code, silent))

    def accuse(self, text: str, *, ended: int | None = None) -> Fault | None:
        """Tell that this rank has lost another one, wait for the roll call, and return what ends the run.

        The ranks that do not answer are the culprits, whatever rank this one waited for: that one may have
        waited for another. If all do, those that stood still or were cut off for a while are. A rank that
        tells a fault of its own meanwhile wins. Of `ended` the process is known to have ended: once all
        others have answered, there is nothing to wait for.
        """
        mine, is_first = self.name(self.meeting.rank), True
        if not self._is_gone():
            with suppress(RuntimeError):
                is_first = self._own.compare_set("lost", "", mine) == mine.encode()
        # If the first one is ended meanwhile, another one counts.
        end = time.monotonic() + ROLL_CALL_SECONDS * (1 if is_first else 1.5)
        silent: list[int] = []
        while time.monotonic() < end and silent != [ended]:
            fault = self.look()
            if fault is not None:
                return fault
            time.sleep(POLL_SECONDS)
            silent = self._silent()
        if not silent:
            return self._write(self._find_pause(f"({mine}: {text})") or Fault(self.meeting.rank, mine, text))
        who = _joined([self.name(rank) for rank in silent])
        lost = f"{'does' if len(silent) == 1 else 'do'} not answer: killed, crashed, stopped or cut off"
        return self._write(Fault(silent[0], who, f"{lost} ({mine}: {text})", silent=len(silent)))

    def _silent(self) -> list[int]:
        """The ranks that have not answered the roll call; none are known if the store does not answer."""
        with suppress(RuntimeError):
            return [rank for rank in self.members if not self._own.check([f"here/{rank}"])]
        return []

    def _find_pause(self, why: str) -> Fault | None:
        """The fault of ranks that have answered the roll call, but were away before; None: nobody was."""
        answers: dict[int, dict[str, float]] = {}
        with suppress(RuntimeError, ValueError):
            answers = {rank: json.loads(self._own.get(f"here/{rank}")) for rank in self.members}
        still = {rank: found["still"] for rank, found in answers.items() if "still" in found}
        cut = {rank: found["cut"] for rank, found in answers.items() if "cut" in found}
        if still:
            who = _joined([self.name(rank) for rank in still])
            text = f"stood still for {max(still.values()):.1f} s: stopped by a signal, or with its machine"
            return Fault(min(still), who, f"{text} {why}")
        if cut:
            # Of a link that fails, the store's holder is at one end, as it seems to all who are at the other.
            others = [rank for rank in self.members if rank not in cut]
            ends = [_joined([self.name(rank) for rank in part]) for part in (list(cut), others)]
            ends = ends if len(cut) <= len(others) else ends[::-1]
            text = f"cut off from {ends[1] or self._holder} for {max(cut.values()):.1f} s {why}"
            return Fault(min(cut), ends[0], text)
        return None

    def tell_stop(self, why: str) -> None:
        """Tell why the run stops, although nothing has failed; the first one who does is believed."""
        if not self._is_gone():
            with suppress(RuntimeError):
                self._own.compare_set("stopped", "", f"{self.name(self.meeting.rank)}: {why}")

    def why_stopped(self) -> str | None:
        """What has stopped a run that went well: what a rank has told, or the end of torchrun's agent."""
        if self._is_gone():
            return str(self._without_store()) if self.meeting.is_agents else None
        with suppress(RuntimeError):
            if self._own.check(["stopped"]):
                return self._own.get("stopped").decode()
        return None

    def wait_until_heard(self, fault: Fault, seconds: float = HEARD_SECONDS) -> None:
        """Wait until all ranks know of a fault, but not for long: the store may end with this rank."""
        self._wait_for("heard", len(self.members) - fault.silent, seconds)

    def leave(self) -> None:
        """At the end of a run that went well. The first rank leaves last, for the store may end with it."""
        if not self._is_gone():
            with suppress(RuntimeError):
                self._own.set(f"left/{self.meeting.rank}", "")
                self._own.add("left", 1)
        if self.meeting.rank == 0:
            self._wait_for("left", len(self.members), LEFT_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the connections; look no more."""
        for line in (self._listener, self._line, *([self._next[1]] if self._next is not None else [])):
            line.close()

    def name(self, rank: int) -> str:
        """A rank, for people, with where it runs if it has come."""
        place = self._place if rank == self.meeting.rank else ""
        if not place and not self._is_gone():
            with suppress(RuntimeError):
                if self._all.check([f"came/{rank}"]):
                    place = self._all.get(f"came/{rank}").decode()
        return f"rank {rank} ({place})" if place else f"rank {rank}"

    def _write(self, fault: Fault) -> Fault | None:
        """Write a fault, unless one is written; the one that is."""
        if self._heard is not None:
            return self._heard
        if self._is_gone():
            return self._without_store()
        with suppress(RuntimeError):
            self._own.compare_set("failed", "", json.dumps(asdict(fault)))
            return self._hear()
        return None

    def _hear(self) -> Fault:
        """The fault that is written; tell that this rank knows of it."""
        fault = Fault(**json.loads(self._own.get("failed")))
        with self._lock:
            is_news, self._heard = self._heard is None, fault
        if is_news:
            self._own.add("heard", 1)
        return fault

    def _wait_for(self, key: str, count: int, seconds: float) -> None:
        """Wait until a counter has come so far, as long as there is a store."""
        end = time.monotonic() + seconds
        with suppress(RuntimeError):
            while time.monotonic() < end and not self._is_gone() and self._own.add(key, 0) < count:
                _sleep(end - seconds)

    def _is_gone(self) -> bool:
        """Whether the store's holder has ended. Asked first: torch prints a stack dump for what is gone."""
        return _is_closed(self._line)

    def unanswered(self) -> Fault:
        """What a rank knows to which the store has not answered in time."""
        meeting = self.meeting
        text = f"does not answer at the ranks' meeting point {meeting.address}: stopped or cut off"
        return Fault(0, meeting.holder, text)

    def _without_store(self) -> Fault:
        meeting = self.meeting
        text = f"is gone, and with it the ranks' meeting point {meeting.address}: killed or crashed"
        why = ", or ended by the end of a rank there" if meeting.is_agents else ""
        return Fault(0, self._holder, text + why)


def meet(startup_seconds: float, *, place: str = "") -> Board:
    """Wait for all ranks that the launcher started; their board.

    `place` is where this rank runs, for people. Raises TrainingError if some do not come within
    `startup_seconds`, and what a rank has found wrong with its files.
    """
    meeting = Meeting.of_launcher()
    if meeting.world_size >= LAZY_FROM:
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    board = Board(meeting, place, seconds=startup_seconds)
    board.wait_for_all(startup_seconds)
    board.join_ring()
    return board


@dataclass(frozen=True)
class RolePosition:
    """Where a rank of the job stands: its role, its rank there, and whose ranks the others are."""

    role: str
    rank: int
    """In the role's world."""
    job_rank: int
    role_ranks: Mapping[str, range]
    """The ranks of the job of each role."""
    store: dist.Store
    board: Board
    """Of the ranks that end together."""

    def label(self, job_rank: int) -> str:
        """A rank of the job, for people: `generation rank 1 (rank 3 of the job)`."""
        for role, ranks in self.role_ranks.items():
            if job_rank in ranks:
                return f"{role} rank {job_rank - ranks.start} (rank {job_rank} of the job)"
        return f"rank {job_rank} of the job"

    @contextmanager
    def naming_role(self) -> Iterator[None]:
        """Around what counts ranks as the role does: a TrainingError says whose ranks they are."""
        try:
            yield
        except TrainingError as error:
            first = self.role_ranks[self.role].start
            raise type(error)(f"{self.role} (its rank 0 is rank {first} of the job): {error}") from error


def join_role(
    role_ranks: Mapping[str, range], *, fates: Sequence[Sequence[int]] | None = None, startup_seconds: float
) -> RolePosition:
    """Meet the ranks of all roles, with the variables that the launcher set; collective over the job.

    `fates` are the ranks of the job that end together; None: all. Raises TrainingError if some do not come
    within `startup_seconds`, and what a rank has found wrong with its files.
    """
    meeting = Meeting.of_launcher()
    job_rank, wanted = meeting.rank, sum(map(len, role_ranks.values()))
    if meeting.world_size != wanted:
        raise TrainingError(f"the plan has {wanted} ranks, but {meeting.world_size} were started")
    role = next(name for name, ranks in role_ranks.items() if job_rank in ranks)
    board = Board(meeting, f"{role} rank {job_rank - role_ranks[role].start}", seconds=startup_seconds)
    board.wait_for_all(startup_seconds)
    if fates is not None and len(fates) > 1:
        board.narrow(next(ranks for ranks in fates if job_rank in ranks))
    board.join_ring()
    store = dist.PrefixStore(f"attempt-{meeting.attempt}", board.store)
    return RolePosition(role, job_rank - role_ranks[role].start, job_rank, dict(role_ranks), store, board)


def _is_closed(line: socket.socket) -> bool:
    """Whether the process at the other end has ended; nobody says anything on this connection."""
    try:
        return line.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError as error:
        # Else the network has failed, which may pass: training goes on as long as its own links do.
        return error.errno in (errno.ECONNRESET, errno.EPIPE)


def _sleep(since: float) -> None:
    """Wait before one looks again: briefly at first, for most of what is waited for comes soon."""
    time.sleep(min(POLL_SECONDS, 0.01 + (time.monotonic() - since) / 4))


def _joined(names: Sequence[str]) -> str:
    """Some names for people; not all of very many."""
    more = [f"{len(names) - MAX_NAMED} more"] if len(names) > MAX_NAMED else []
    return ", ".join([*names[:MAX_NAMED], *more])
