"""The web server of rank 0: routes, errors in OpenAI's form, and requests that end when nobody waits."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from yuan_train.config.errors import TrainingError
from yuan_train.rl.generator import Token
from yuan_train.serve.protocol import ApiError, Call, Served, read_call, read_json
from yuan_train.serve.replies import Reply, TokenTexts, event
from yuan_train.serve.scheduler import QueueFull, Scheduler, Stopped

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
        self._served = served
        self._scheduler = scheduler
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
