"""Agents that are known to be gone, in the store where the others meet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from torch.distributed import TCPStore

from yuan_train.parallel.environment import free_port
from yuan_train.supervise import room as rooms
from yuan_train.supervise.room import Agent, Done, Room, Round, note_end, open_store

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


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> Iterator[Met]:
    """Without a word of it, an agent would be taken to be gone after hours only."""
    monkeypatch.setattr(rooms, "BEATS_MISSED", 10_000)
    port = free_port(HOST)
    store = open_store(HOST, port)
    found = [Room((HOST, port), name, nodes=2, grace=0.1) for name in "ab"]
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


def test_who_is_expected_is_waited_for_and_nobody_else() -> None:
    """Three of four meet long before their grace is over: it is known that the fourth does not come."""
    port = free_port(HOST)
    store = open_store(HOST, port)
    found = {name: Room((HOST, port), name, nodes=4, grace=100_000.0) for name in "abc"}
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


def test_the_loss_of_the_store_is_one_error_whoever_asks() -> None:
    """On it the agent has its ranks save: its lead may just have asked who waits."""
    port = free_port(HOST)
    store = open_store(HOST, port)
    room = Room((HOST, port), "a", nodes=2, grace=0.1)
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
