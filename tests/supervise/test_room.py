"""Agents that are known to be gone, in the store where the others meet."""

import pickle
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from torch.distributed import TCPStore

from yuan_train.parallel.environment import free_port
from yuan_train.supervise import room as rooms
from yuan_train.supervise.room import Agent, Done, Ended, Room, Round, Verdict, note_end, open_store

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Met:
    """Two agents that have met: the one that leads, and the other's name and round."""

    store: TCPStore
    room: Room
    round: Round
    lead: str
    other: str
    others: Round


OpenRoom = Callable[[int, str, int, float], Room]


@pytest.fixture
def open_room() -> Iterator[OpenRoom]:
    """Makes rooms of (port, name, nodes, grace), whose heartbeats end with the test.

    A future and its exception hold each other, and a room: collected by a heartbeat, that waits for itself.
    """
    opened: list[Room] = []

    def make(port: int, name: str, nodes: int, grace: float) -> Room:
        opened.append(Room((HOST, port), name, nodes=nodes, grace=grace))
        return opened[-1]

    yield make
    for room in opened:
        room._handler._stop_heartbeats()


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch, open_room: OpenRoom) -> Iterator[Met]:
    """Without a word of it, an agent would be taken to be gone after hours only."""
    monkeypatch.setattr(rooms, "BEATS_MISSED", 10_000)
    port = free_port(HOST)
    store = open_store(HOST, port)
    found = [open_room(port, name, 2, 0.1) for name in "ab"]
    with ThreadPoolExecutor() as threads:
        rounds = list(threads.map(_enter, found, "ab"))
        assert [set(members) for members in threads.map(Round.members, rounds) if members] == [{"a", "b"}] * 2
    first = 0 if rounds[0].leads else 1
    yield Met(store, found[first], rounds[first], "ab"[first], "ba"[first], rounds[1 - first])


def _enter(room: Room, name: str) -> Round:
    found = room.enter(Agent(name, name, HOST, 1))
    assert found is not None
    return found


def test_who_is_forgotten_is_not_waited_for(met: Met) -> None:
    met.room.forget([met.other])
    assert list(_enter(met.room, met.lead).members() or ()) == [met.lead]


def test_a_round_is_past_once_the_others_have_gone_on(met: Met) -> None:
    """Who was cut off learns it, and waits for nobody of that round any more."""
    assert not met.round.is_past() and not met.others.is_past() and not met.others.is_abandoned()
    met.room.forget([met.other])
    again = _enter(met.room, met.lead)
    assert met.others.is_past() and met.others.is_abandoned() and met.round.is_past()
    assert not again.is_past()
    assert met.others.order() is None and met.others.verdict() is None


def test_an_agent_whose_end_was_seen_needs_no_long_silence(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "GONE_SECONDS", -1.0)
    assert met.round.lost() == ()
    note_end(met.store, met.other, is_gone=True)
    assert met.round.lost() == (met.other,)
    note_end(met.store, met.other, is_gone=False)
    assert met.round.lost() == ()


def test_who_is_expected_is_waited_for_and_nobody_else(open_room: OpenRoom) -> None:
    """Three of four meet long before their grace is over: it is known that the fourth does not come."""
    port = free_port(HOST)
    store = open_store(HOST, port)
    found = {name: open_room(port, name, 4, 100_000.0) for name in "abc"}
    found["a"].expect(["a", "b"])
    with ThreadPoolExecutor() as threads:
        waits = threads.submit(_enter, found["a"], "a")
        # One that nobody expects, and that asks to be let in, is let in.
        also = threads.submit(_enter, found["c"], "c")
        time.sleep(1.0)
        assert not waits.done() and not also.done()
        last = threads.submit(_enter, found["b"], "b")
        members = list(threads.map(lambda entered: entered.result().members(), (waits, also, last)))
    assert [set(names or ()) for names in members] == [{"a", "b", "c"}] * 3
    del store


def test_who_remains_is_expected(met: Met) -> None:
    assert met.round.remaining({0: Done(0), 1: Done(0)}) == (met.lead, met.other)
    assert met.round.remaining({0: Done(0), 1: Done(0, leaves=True)}) == (met.lead,)


def test_who_stays_needs_no_other_meeting(met: Met) -> None:
    """The next round has them, in their order, with what they say anew; all others meet."""
    ports = {met.lead: 2, met.other: 3}
    stays: list[tuple[str, ...]] = [(met.lead, met.other), (met.other,), ()]
    for stay in stays:
        met.round.judge(Verdict(again=True, stay=stay))
        assert met.round.verdict() == met.others.verdict()
        rounds = {
            name: own.next(Agent(name, name, HOST, ports[name]))
            for name, own in ((met.lead, met.round), (met.other, met.others))
        }
        assert {name for name, found in rounds.items() if found is not None} == set(stay)
        for found in filter(None, rounds.values()):
            agents = found.members() or {}
            assert list(agents) == list(stay) and all(agents[name].port == ports[name] for name in stay)
            assert found.leads == (found is rounds[stay[0]]) and not found.has_verdict()


def test_who_waits_gets_a_seat_beside_those_who_stay(open_room: OpenRoom) -> None:
    """Without another meeting: it waits in torch's, and comes out of it into the round that is next."""
    port = free_port(HOST)
    store = open_store(HOST, port)
    rooms_of = {name: open_room(port, name, 3, 0.1) for name in "abc"}
    with ThreadPoolExecutor() as threads:
        first = _enter(rooms_of["a"], "a")
        waits = threads.submit(_enter, rooms_of["b"], "b")
        while rooms_of["a"].waiting("abc", "a") != ("b",):
            assert not waits.done()
        assert list(first.members() or ()) == ["a"]
        first.judge(Verdict(again=True, stay=("a", *rooms_of["a"].tokens("b"))))
        rooms_of["a"].seat(["b"])
        assert first.verdict() is not None
        second = first.next(Agent("a", "a", HOST, 1))
        assert second is not None and second.leads and not waits.result().leads
        assert list(second.members() or ()) == list(waits.result().members() or ()) == ["a", "b"]
        # It is one of them for torch, too: others wait, and it does not.
        third = threads.submit(_enter, rooms_of["c"], "c")
        while rooms_of["b"].waiting("abc", "ab") != ("c",):
            assert not third.done()
        rooms_of["b"].end(Ended(0, "all is done"))
        with pytest.raises(AssertionError):
            third.result()
    del store


def test_another_agent_of_a_node_learns_of_the_end(met: Met, open_room: OpenRoom) -> None:
    """It waits behind as many as the cluster has, for which torch has a list of its own."""
    with ThreadPoolExecutor() as threads:
        late = threads.submit(open_room(met.store.port, "c", 2, 0.1).enter, Agent("b", "c", HOST, 1))
        while not (found := met.room._backend.get_state()) or not pickle.loads(found[0]).redundancy_list:
            assert not late.done()
        met.room.end(Ended(0, "all is done"))
        assert late.result() is None


def test_the_loss_of_the_store_is_one_error_whoever_asks(open_room: OpenRoom) -> None:
    """On it the agent has its ranks save: its lead may just have asked who waits."""
    port = free_port(HOST)
    store = open_store(HOST, port)
    room = open_room(port, "a", 2, 0.1)
    current = _enter(room, "a")
    assert room.waiting(["a", "b"], ["a"]) == ()
    del store
    for ask in (current.is_past, current.stop_reason):
        with pytest.raises(RuntimeError):
            ask()
    with pytest.raises(RuntimeError):
        # Torch remembers for a second what it was told.
        while True:
            room.waiting(["a", "b"], ["a"])
            time.sleep(0.1)
