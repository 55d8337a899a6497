"""Agents that are known to be gone, in the store where the others meet."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
from torch.distributed import TCPStore

from yuan_train.parallel.environment import free_port
from yuan_train.supervise import room as rooms
from yuan_train.supervise.room import Agent, Room, Round, note_end, open_store

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Met:
    """Two agents that have met: the one that leads, and the other's name."""

    store: TCPStore
    room: Room
    round: Round
    lead: str
    other: str


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
    yield Met(store, found[first], rounds[first], "ab"[first], "ba"[first])


def _enter(room: Room, name: str) -> Round:
    found = room.enter(Agent(name, name, HOST, 1))
    assert found is not None
    return found


def test_who_is_forgotten_is_not_waited_for(met: Met) -> None:
    met.room.forget([met.other])
    assert list(_enter(met.room, met.lead).members() or ()) == [met.lead]


def test_an_agent_whose_end_was_seen_needs_no_long_silence(met: Met, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rooms, "GONE_SECONDS", -1.0)
    assert met.round.lost() == ()
    note_end(met.store, met.other, is_gone=True)
    assert met.round.lost() == (met.other,)
    note_end(met.store, met.other, is_gone=False)
    assert met.round.lost() == ()
