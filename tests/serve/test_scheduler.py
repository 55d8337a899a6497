"""The queue between the web server and the pipelines, and text from tokens, without either of them."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from tests.support.hf_decoders import write_tokenizer
from yuan_train.config.errors import LostRank
from yuan_train.data.tokenizer import Tokenizer, train_tokenizer
from yuan_train.models.generate import Sampling
from yuan_train.rl.experience import Sample
from yuan_train.rl.generator import Token
from yuan_train.serve.app import UNFINISHED, Completion, TokenTexts
from yuan_train.serve.ranks import Asked, Order
from yuan_train.serve.scheduler import QueueFull, Scheduler, Stopped


def asked(number: int, tokens: int = 1) -> Asked:
    return Asked(
        number=number,
        prompt_ids=(1,),
        count=1,
        sampling=Sampling(),
        seed=0,
        max_new_tokens=tokens,
        stop_ids=frozenset(),
    )


def token_of(ticket: int | str, drawn: float = 0.0, *, last: bool = False) -> Token:
    sample = Sample(ticket, 0, (0,), (0.0,), "limit") if last else None
    return Token(ticket, 0, (drawn, 0.0), sample)


class Pipeline:
    """Gives each answer under way a token a round; waits for a permit before each."""

    def __init__(self) -> None:
        self.orders: list[Order] = []
        self.permits = threading.Semaphore(0)
        self.has_begun = threading.Event()
        self._under_way: dict[int | str, int] = {}
        self.most = 0

    def __call__(self, order: Order) -> list[Token]:
        self.orders.append(order)
        if order.stop:
            return []
        for number in order.leave:
            self._under_way.pop(number, None)
        self._under_way |= {one.number: one.max_new_tokens for one in order.join}
        self.most = max(self.most, len(self._under_way))
        self.has_begun.set()
        self.permits.acquire()
        found: list[Token] = []
        for number in list(self._under_way):
            self._under_way[number] -= 1
            found.append(token_of(number, last=not self._under_way[number]))
            if not self._under_way[number]:
                del self._under_way[number]
        return found


class Running:
    """A scheduler at work in a thread."""

    def __init__(
        self, slots: Sequence[int], asks: Sequence[Callable[[Order], list[Token]]], queue: int
    ) -> None:
        self.scheduler = Scheduler(slots, queue=queue)
        self.stop = [False]
        self.error: Exception | None = None

        def run() -> None:
            try:
                self.scheduler.run(asks, 0, self.stop)
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=run)
        self._thread.start()

    def end(self) -> None:
        self.stop[0] = True
        self._thread.join(20)
        assert not self._thread.is_alive()


class Client:
    """Collects what is delivered."""

    def __init__(self) -> None:
        self.told: list[Token] = []
        self.error: Exception | None = None
        self.changed = threading.Event()

    def __call__(self, told: Sequence[Token] | Exception) -> None:
        if isinstance(told, Exception):
            self.error = told
        else:
            self.told += told
        if self.error is not None or self.told[-1].sample is not None:
            self.changed.set()


def test_slots_are_never_more_than_filled_and_none_is_lost() -> None:
    pipelines = [Pipeline(), Pipeline()]
    running = Running([3, 1], pipelines, queue=100)
    clients = [Client() for _ in range(60)]
    for number, client in enumerate(clients):
        running.scheduler.submit([asked(number, 1 + number % 5)], client)
    # Both have begun before either may end an answer.
    for pipeline in pipelines:
        assert pipeline.has_begun.wait(20)
    for pipeline in pipelines:
        pipeline.permits.release(1000)
    for number, client in enumerate(clients):
        assert client.changed.wait(20)
        assert len(client.told) == 1 + number % 5
    running.end()
    assert pipelines[0].most <= 3 and pipelines[1].most <= 1
    assert pipelines[1].most == 1, "both pipelines answer"
    joined = [one.number for pipeline in pipelines for order in pipeline.orders for one in order.join]
    assert sorted(joined, key=str) == sorted(range(60), key=str)
    assert [pipeline.orders[-1].stop for pipeline in pipelines] == [True, True]
    assert running.scheduler.load() == {"slots": 4, "running": 0, "waiting": 0}


def test_a_full_queue_takes_all_of_a_request_or_none() -> None:
    scheduler = Scheduler([2], queue=1)
    scheduler.submit([asked(0), asked(1)], Client())
    with pytest.raises(QueueFull, match="2 answers are written or wait, of at most 3; 2 more"):
        scheduler.submit([asked(2), asked(3)], Client())
    scheduler.submit([asked(4)], Client())
    scheduler.cancel([0, 4, 99])
    assert scheduler.load() == {"slots": 2, "running": 0, "waiting": 1}


def test_a_lost_pipeline_ends_all() -> None:
    was_asked = threading.Event()

    def lost(order: Order) -> list[Token]:
        was_asked.set()
        raise LostRank("rank 1 is gone")

    pipeline, client = Pipeline(), Client()
    running = Running([1, 1], [pipeline, lost], queue=5)
    running.scheduler.submit([asked(0, 900), asked(1, 900)], client)
    # Before that the first one ends no answer, and cannot take both.
    assert was_asked.wait(20)
    pipeline.permits.release(1000)
    # The other pipeline's words may come first.
    while client.error is None:
        assert client.changed.wait(20)
        client.changed.clear()
    running.end()
    assert isinstance(running.error, LostRank)
    assert str(client.error) == "rank 1 is gone"
    with pytest.raises(Stopped, match="rank 1 is gone"):
        running.scheduler.submit([asked(2)], client)


# --- text ------------------------------------------------------------------------------------------------


def written(
    content: bytes, stops: tuple[str, ...] = (), *, last: bool = True
) -> tuple[list[str], str | None]:
    """The pieces of an answer whose tokens are bytes."""
    decode: Any = lambda ids, special=False: bytes(ids).decode("utf-8", "replace")  # noqa: E731
    tokenizer = cast(Tokenizer, SimpleNamespace(decode=decode, vocab_size=256))
    answer = Completion(0, tokenizer, None, stops, is_streamed=True)
    pieces: list[str] = []
    for place, byte in enumerate(content):
        answer.add(token_of(0, byte, last=last and place == len(content) - 1), None)
        if (piece := answer.take()) is not None:
            pieces.append(piece.text)
        if answer.finish_reason is not None:
            break
    return pieces, answer.finish_reason


def test_a_character_is_shown_once_it_is_whole() -> None:
    assert written("aé世".encode()) == (["a", "é", "世"], "length")
    assert written("a世".encode()[:-1])[0] == ["a", UNFINISHED]
    assert written(b"\xc3\xa9\xff\xe4\xb8\x96", (UNFINISHED,)) == (["é", ""], "stop")
    assert written("é世".encode(), (UNFINISHED,)) == (["é", "世"], "length"), "whole in the end"


def test_the_bytes_of_a_part_of_a_character_are_its_own(tmp_path: Path) -> None:
    """Of both kinds of pieces; what is no part of one is told as its text."""
    write_tokenizer(tmp_path)
    train_tokenizer([Path(__file__)], 400, tmp_path / "pieces")
    text = "\u00f1\u6e90 \U0001f98a a"
    for folder in (tmp_path, tmp_path / "pieces"):
        tokenizer = Tokenizer.load(folder)
        texts, ids = TokenTexts(tokenizer), tokenizer.encode(text)
        assert any(texts.of(token)[0] == UNFINISHED for token in ids)
        assert b"".join(texts.of(token)[1] for token in ids).decode().strip() == text
        ((name, number), *_) = tokenizer.specials.items()
        assert texts.of(number) == (name, name.encode())


def test_what_may_begin_a_stop_string_is_held_back() -> None:
    assert written(b"one END two", ("END",)) == (["o", "n", "e", " ", ""], "stop")
    assert written(b"an EN", ("END",)) == (["a", "n", " ", "EN"], "length")
    assert written(b"aab!", ("ab",)) == (["a", ""], "stop")
    pieces, why = written(b"xyxyz.", ("xyz", "."))
    assert ("".join(pieces), why) == ("xy", "stop")
    # Of several, the one that begins first.
    assert "".join(written(b"abcd", ("d", "bc"))[0]) == "a"
