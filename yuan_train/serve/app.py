"""The web server of rank 0: routes, errors in OpenAI's form, and requests that end when nobody waits.

It stands alone because only it knows HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import socket
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from yuan_train.config.errors import TrainingError
from yuan_train.data.prompts import text_of
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.rl.generator import Token
from yuan_train.serve.protocol import ApiError, Call, Served, read_call, read_json, read_weights_body
from yuan_train.serve.ranks import NOT_FINITE, WeightsRefused
from yuan_train.serve.scheduler import QueueFull, Scheduler, Stopped

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for the first bytes of a character."""


@dataclass(frozen=True)
class TokenText:
    """A token as log-probabilities tell it."""

    text: str
    raw: bytes
    """Of a part of a character what its text does not say."""
    log_prob: float
    alternatives: tuple[TokenText, ...] = ()


class TokenTexts:
    """The text of single tokens, with the space that a piece begins with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The first piece of a text loses its space.
        self._before = tokenizer.encode("a")
        self.of = lru_cache(maxsize=1 << 15)(self._find)

    def _find(self, token: int) -> tuple[str, bytes]:
        if token >= self._tokenizer.vocab_size:
            return "", b""
        before = self._tokenizer.decode(self._before, special=True)
        text = self._tokenizer.decode([*self._before, token], special=True).removeprefix(before)
        raw = self._tokenizer.piece_bytes(token) if UNFINISHED in text else None
        return text, text.encode() if raw is None else raw


@dataclass
class Delta:
    """What came to an answer since the last one."""

    text: str
    tokens: list[TokenText]
    ids: list[int]


@dataclass
class Completion:
    """One answer of a request, as far as it is written."""

    index: int
    tokenizer: Tokenizer | None
    texts: TokenTexts | None
    stops: tuple[str, ...]
    is_streamed: bool
    ids: list[int] = field(default_factory=list[int])
    finish_reason: Literal["stop", "length"] | None = None
    _tokens: list[TokenText] = field(default_factory=list[TokenText])
    _taken: int = 0
    """Ids that deltas had."""
    _ready: str = ""
    """Text that no further token changes."""
    _shown: int = 0

    def add(self, token: Token, alternatives: int | None) -> None:
        """Add a token. Raises ApiError if the model's output was not finite."""
        drawn = token.drawn
        number = round(drawn[0])
        if number == NOT_FINITE:
            raise ApiError(
                "the model's logits are not finite: its weights are at fault", status=500, code="not_finite"
            )
        self.ids.append(number)
        if alternatives is not None:
            pairs = list(zip(map(round, drawn[::2]), drawn[1::2], strict=True))[: alternatives + 1]
            own, *others = [TokenText(*self._text(one), value) for one, value in pairs]
            self._tokens.append(replace(own, alternatives=tuple(others)))
        if token.sample is not None:
            self.finish_reason = "stop" if token.sample.ended == "stop" else "length"
        if self.stops or self.is_streamed or self.finish_reason is not None:
            self._read()

    def _text(self, token: int) -> tuple[str, bytes]:
        name = f"token_id:{token}"
        return self.texts.of(token) if self.texts is not None else (name, name.encode())

    def take(self) -> Delta | None:
        """What is new; None if nothing is that could be shown."""
        text = self._ready[self._shown :]
        if not text and self.finish_reason is None:
            return None
        delta = Delta(text, self._tokens, self.ids[self._taken :])
        self._shown, self._taken, self._tokens = len(self._ready), len(self.ids), []
        return delta

    def _read(self) -> None:
        """Find the text so far, where a stop string cuts it, and how much of it stays."""
        whole = "" if self.tokenizer is None else text_of(self.ids, self.tokenizer)
        if self.finish_reason is None:
            # So looks a character whose last bytes are to come, too.
            whole = whole[: len(whole.rstrip(UNFINISHED))]
        places = [place for stop in self.stops if (place := whole.find(stop)) >= 0]
        if places:
            whole = whole[: min(places)]
            self.finish_reason = "stop"
        if self.finish_reason is None:
            whole = whole[: len(whole) - _begun(whole, self.stops)]
            if not whole.startswith(self._ready):
                return
        self._ready = whole


def _begun(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of a text with which a stop string may begin."""
    longest = max((len(stop) - 1 for stop in stops), default=0)
    for length in range(min(longest, len(text)), 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class Reply:
    """The bodies of one request's answers."""

    def __init__(self, call: Call, served: Served, texts: TokenTexts | None) -> None:
        self._call = call
        self._head = {
            "id": f"{'chatcmpl' if call.is_chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": served.name,
        }
        self.answers = {
            asked.number: Completion(index, served.tokenizer, texts, call.stops, call.stream)
            for index, asked in enumerate(call.asked)
        }
        self._offsets = [len(echo) for echo in call.echoes]

    def add(self, token: Token) -> Completion | None:
        """Add a token to its answer, and return that; None if it has ended before. Raises ApiError."""
        answer = self.answers[token.ticket]
        if answer.finish_reason is not None:
            return None
        answer.add(token, self._call.asked[answer.index].alternatives)
        return answer

    @property
    def is_done(self) -> bool:
        """Whether all answers have ended."""
        return all(answer.finish_reason is not None for answer in self.answers.values())

    def whole(self) -> dict[str, Any]:
        """The body of a request that is not streamed, once it is done."""
        choices: list[dict[str, Any]] = []
        for answer in self.answers.values():
            delta = answer.take()
            assert delta is not None
            if self._call.is_chat:
                message = {"role": "assistant", "content": delta.text, "refusal": None}
                choice = self._choice(answer, delta) | {"message": message}
            else:
                choice = self._choice(answer, delta) | {"text": self._call.echoes[answer.index] + delta.text}
            choices.append(choice)
        kind = "chat.completion" if self._call.is_chat else "text_completion"
        return self._head | {"object": kind, "choices": choices, "usage": self._usage()}

    def first_chunks(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        if self._call.is_chat:
            return [
                self._chunk({"index": answer.index, "delta": {"role": "assistant", "content": ""}})
                for answer in self.answers.values()
            ]
        return [
            self._chunk({"index": answer.index, "text": echo})
            for answer, echo in zip(self.answers.values(), self._call.echoes, strict=True)
            if echo
        ]

    def chunk(self, answer: Completion) -> dict[str, Any] | None:
        """What is new of a streamed answer; None if nothing is."""
        delta = answer.take()
        if delta is None:
            return None
        text = {"delta": {"content": delta.text}} if self._call.is_chat else {"text": delta.text}
        return self._chunk(self._choice(answer, delta) | text)

    def last_chunks(self) -> list[dict[str, Any]]:
        """What a stream ends with."""
        if not self._call.include_usage:
            return []
        return [self._chunk() | {"usage": self._usage()}]

    def _chunk(self, *choices: dict[str, Any]) -> dict[str, Any]:
        kind = "chat.completion.chunk" if self._call.is_chat else "text_completion"
        blank = {"finish_reason": None, "logprobs": None}
        return self._head | {"object": kind, "choices": [blank | choice for choice in choices]}

    def _choice(self, answer: Completion, delta: Delta) -> dict[str, Any]:
        asked = self._call.asked[answer.index]
        found: dict[str, Any] = {
            "index": answer.index,
            "finish_reason": answer.finish_reason,
            "logprobs": None,
        }
        if asked.alternatives is not None:
            found["logprobs"] = (
                _chat_log_probs(delta.tokens) if self._call.is_chat else self._log_probs(answer, delta.tokens)
            )
        if self._call.with_ids:
            found["token_ids"] = delta.ids
            found["prompt_token_ids"] = list(asked.prompt_ids)
        return found

    def _log_probs(self, answer: Completion, tokens: Sequence[TokenText]) -> dict[str, Any]:
        offsets: list[int] = []
        for token in tokens:
            offsets.append(self._offsets[answer.index])
            self._offsets[answer.index] += len(token.text)
        return {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.log_prob for token in tokens],
            # Of tokens with the same text the most probable one, which is told last here.
            "top_logprobs": [
                {one.text: one.log_prob for one in reversed(token.alternatives)} for token in tokens
            ],
            "text_offset": offsets,
        }

    def _usage(self) -> dict[str, int]:
        written = sum(len(answer.ids) for answer in self.answers.values())
        return {
            "prompt_tokens": self._call.prompt_tokens,
            "completion_tokens": written,
            "total_tokens": self._call.prompt_tokens + written,
        }


def _chat_log_probs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    def entry(token: TokenText) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.log_prob, "bytes": list(token.raw)}

    return {
        "content": [
            entry(token) | {"top_logprobs": [entry(other) for other in token.alternatives]}
            for token in tokens
        ],
        "refusal": None,
    }


def event(value: dict[str, Any] | str) -> bytes:
    """A server-sent event with an object, or a word."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return f"data: {text}\n\n".encode("utf-8", "replace")


logger = logging.getLogger(__name__)

MOST_BODY_BYTES = 4 << 20
BODY_SECONDS = 30.0
"""In which the body of a request arrives."""
GRACE_SECONDS = 3
"""How long connections may take to end with the server."""
START_SECONDS = 30.0
PAGE = Path(__file__).with_name("page.html")


class Exchange:
    """What the scheduler writes for one request, in the thread of the web server."""

    def __init__(self, scheduler: Scheduler, call: Call) -> None:
        """Raises ApiError if the queue is full, or the server ends."""
        self._scheduler = scheduler
        self._numbers = [asked.number for asked in call.asked]
        self._loop = asyncio.get_running_loop()
        self._told: asyncio.Queue[Sequence[Token] | Exception] = asyncio.Queue()
        try:
            scheduler.submit(call.asked, self._deliver)
        except QueueFull as error:
            raise ApiError(str(error), status=429, code="queue_full") from None
        except Stopped as error:
            raise ApiError(str(error), status=503, code="stopped") from None

    def _deliver(self, told: Sequence[Token] | Exception) -> None:
        try:
            self._loop.call_soon_threadsafe(self._told.put_nowait, told)
        except RuntimeError:
            logger.debug("the web server has ended before an answer did")

    async def next(self) -> Sequence[Token]:
        """The tokens of the next round. Raises ApiError if there will be none."""
        told = await self._told.get()
        if isinstance(told, Exception):
            raise ApiError(f"the server has stopped: {told}", status=503, code="stopped")
        return told

    def give_up(self, number: int | str) -> None:
        """Have one answer end."""
        self._scheduler.cancel([number])

    def close(self) -> None:
        """Give up what has not ended."""
        self._scheduler.cancel(self._numbers)


class _EventStream(StreamingResponse):
    """A stream whose exchange is closed however it ends, also if it never began."""

    def __init__(self, events: AsyncIterator[bytes], exchange: Exchange) -> None:
        super().__init__(
            events,
            media_type="text/event-stream",
            headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
        )
        self._exchange = exchange

    async def __call__(self, *arguments: Any) -> None:
        try:
            await super().__call__(*arguments)
        finally:
            self._exchange.close()


class Api:
    """The routes, over a scheduler."""

    def __init__(self, served: Served, scheduler: Scheduler, *, timeout_seconds: float) -> None:
        self._served, self._scheduler = served, scheduler
        self._timeout = timeout_seconds
        self._texts = TokenTexts(served.tokenizer) if served.tokenizer is not None else None
        self._numbers = itertools.count()
        # One thread: a tokenizer has settings that a call changes. The web server answers others meanwhile.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reads requests")

    async def models(self) -> dict[str, Any]:
        """`GET /v1/models`."""
        return {"object": "list", "data": [self._model()]}

    async def model(self, name: str) -> dict[str, Any]:
        """`GET /v1/models/NAME`."""
        if name != self._served.name:
            raise ApiError(f"the model {name[:80]!r} is not here", status=404, code="model_not_found")
        return self._model()

    def _model(self) -> dict[str, Any]:
        return {
            "id": self._served.name,
            "object": "model",
            "created": self._served.created,
            "owned_by": "yuan_train",
            "max_model_len": self._served.max_length,
            "takes_weights": self._served.takes_weights,
        }

    async def health(self) -> Response:
        """`GET /health`: 503 once nothing is answered any more."""
        failure = self._scheduler.failure
        state = {"status": "ok"} if failure is None else {"status": "stopped", "reason": str(failure)}
        return JSONResponse(state | self._scheduler.load(), status_code=200 if failure is None else 503)

    async def page(self) -> Response:
        """`GET /`: a page to try the model."""
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"
        )
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": policy})

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await self._answer(request, is_chat=False)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await self._answer(request, is_chat=True)

    async def update_weights(self, request: Request) -> Response:
        """`POST /update_weights_from_disk`: answered once all pipelines have the weights of a folder."""
        if not self._served.takes_weights:
            raise ApiError(
                "this server takes no weights: nothing has changed; start it with --allow-weights",
                status=403,
                code="weights_not_allowed",
            )
        folder = read_weights_body(await _read_body(request))
        try:
            await asyncio.to_thread(self._scheduler.change_weights, folder)
        except WeightsRefused as error:
            raise ApiError(f"{error}; nothing has changed", param="model_path", code="bad_weights") from None
        except Stopped as error:
            raise ApiError(str(error), status=503, code="stopped") from None
        return JSONResponse({"success": True, "message": f"the weights are those of {folder}"})

    async def _answer(self, request: Request, *, is_chat: bool) -> Response:
        content = await _read_body(request)
        call = await asyncio.get_running_loop().run_in_executor(
            self._reader, lambda: self._read(content, is_chat=is_chat)
        )
        reply = Reply(call, self._served, self._texts)
        exchange = Exchange(self._scheduler, call)
        if call.stream:
            return _EventStream(self._events(exchange, reply), exchange)
        try:
            return await self._whole(request, exchange, reply)
        finally:
            exchange.close()

    def _read(self, content: bytes, *, is_chat: bool) -> Call:
        return read_call(read_json(content), self._served, self._numbers.__next__, is_chat=is_chat)

    async def _whole(self, request: Request, exchange: Exchange, reply: Reply) -> Response:
        """All answers at once, unless the client leaves before."""
        written = asyncio.ensure_future(self._write(exchange, reply))
        left = asyncio.ensure_future(_has_left(request))
        try:
            await asyncio.wait({written, left}, return_when=asyncio.FIRST_COMPLETED)
            if not written.done():
                return Response(status_code=499)
            return JSONResponse(written.result())
        finally:
            for task in (written, left):
                task.cancel()
            await asyncio.gather(written, left, return_exceptions=True)

    async def _write(self, exchange: Exchange, reply: Reply) -> dict[str, Any]:
        async for _ in self._rounds(exchange, reply):
            pass
        return reply.whole()

    async def _events(self, exchange: Exchange, reply: Reply) -> AsyncIterator[bytes]:
        """The events of a stream; an error is the last one."""
        try:
            for chunk in reply.first_chunks():
                yield event(chunk)
            async for chunk in self._rounds(exchange, reply):
                yield event(chunk)
            for chunk in reply.last_chunks():
                yield event(chunk)
            yield event("[DONE]")
        except ApiError as error:
            yield event(error.body())

    async def _rounds(self, exchange: Exchange, reply: Reply) -> AsyncIterator[dict[str, Any]]:
        """What each round adds to streamed answers, until all have ended. Raises ApiError."""
        end = asyncio.get_running_loop().time() + self._timeout
        while not reply.is_done:
            try:
                async with asyncio.timeout_at(end):
                    tokens = await exchange.next()
            except TimeoutError:
                raise ApiError(
                    f"no whole answer within {self._timeout:g} s (--timeout)", status=408, code="timeout"
                ) from None
            for token in tokens:
                answer = reply.add(token)
                if answer is None:
                    continue
                if answer.finish_reason is not None and token.sample is None:
                    # A stop string has ended it; the engine does not know those.
                    exchange.give_up(token.ticket)
                if answer.is_streamed and (chunk := reply.chunk(answer)) is not None:
                    yield chunk


async def _read_body(request: Request) -> bytes:
    """The body of a request of JSON. Raises ApiError if it is too long, too slow, or says that it is not."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(f"content-type: wanted application/json, got {kind[:80]!r}", code="bad_content_type")
    content = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for part in request.stream():
                content += part
                if len(content) > MOST_BODY_BYTES:
                    raise ApiError(f"the body has more than {MOST_BODY_BYTES} bytes", status=413)
    except ClientDisconnect:
        raise ApiError("the body ends before its length") from None
    except TimeoutError:
        raise ApiError(f"the body did not arrive within {BODY_SECONDS:g} s", status=408) from None
    return bytes(content)


async def _has_left(request: Request) -> None:
    """Wait until the client closes its connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def make_app(api: Api) -> FastAPI:
    """The application: routes and errors."""
    app = FastAPI(
        title="yuan-train serve", docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False
    )
    app.add_api_route("/", api.page, methods=["GET"])
    app.add_api_route("/health", api.health, methods=["GET"])
    app.add_api_route("/v1/models", api.models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", api.model, methods=["GET"])
    app.add_api_route("/v1/completions", api.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", api.chat_completions, methods=["POST"])
    app.add_api_route("/update_weights_from_disk", api.update_weights, methods=["POST"])
    app.add_exception_handler(ApiError, _told)
    app.add_exception_handler(HTTPException, _refused)
    app.add_exception_handler(Exception, _failed)
    return app


async def _told(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    headers = {"Retry-After": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), status_code=error.status, headers=headers)


async def _refused(request: Request, error: Exception) -> Response:
    """A path that there is not, or a method that it has not."""
    assert isinstance(error, HTTPException)
    text = {404: "there is nothing at this path", 405: "this path is not asked with this method"}
    told = ApiError(text.get(error.status_code, str(error.detail)), status=error.status_code)
    return JSONResponse(told.body(), status_code=error.status_code, headers=error.headers)


async def _failed(request: Request, error: Exception) -> Response:
    """A fault of ours: its traceback is in the log."""
    told = ApiError(f"the server has a fault: {type(error).__name__}", status=500)
    return JSONResponse(told.body(), status_code=500)


@contextmanager
def web_server(app: FastAPI, listening: socket.socket) -> Iterator[None]:
    """Inside, a thread serves an application on a socket. Raises TrainingError if it does not start."""
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(
        target=server.run, kwargs={"sockets": [listening]}, name="web server", daemon=True
    )
    thread.start()
    try:
        end = time.monotonic() + START_SECONDS
        while not server.started:
            if not thread.is_alive() or time.monotonic() > end:
                raise TrainingError("the web server did not start; what it says is above")
            time.sleep(0.01)
        yield
    finally:
        server.should_exit = True
        thread.join(2.0 * GRACE_SECONDS)
