"""Wrong requests get 4xx with the reason; nothing crashes or hangs, and good ones are answered afterwards."""

import json
import random
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.serving import NAME, Server, make_checkpoint, serving

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
LONGEST = 512
GOOD: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"model": NAME, "prompt": [65, 66], "max_tokens": 4, "temperature": 0},
    CHAT: {"model": NAME, "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "temperature": 0},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("hostile")
    checkpoint = make_checkpoint(folder / "ck")
    with serving(checkpoint, folder, "--max-length", str(LONGEST), "--slots", "4") as found:
        yield found
        assert "Traceback" not in found.ranks[0].stderr.read_text()


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[Any]:
    with httpx.Client(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=32)) as client:
        yield client


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


VALUES: list[Callable[[random.Random], Any]] = [
    lambda r: None,
    lambda r: r.choice([True, False]),
    lambda r: r.choice([-1, 0, 1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**300]),
    lambda r: r.choice([-1.0, -0.0, 0.5, 1e-300, 5e-324, 1e300, 2.0000001]),
    lambda r: r.choice(
        ["", "a", "\x00", "\ud800", "\udfff\ud800", "é" * 50, "世界" * 999, "<|eot_id|>", "../../etc"]
    ),
    lambda r: [],
    lambda r: [r.choice([-1, 0, 259, 260, 2**40, True, 1.5, None, "a"]) for _ in range(r.randint(1, 5))],
    lambda r: [[], [1]],
    lambda r: [[[1]]],
    lambda r: {},
    lambda r: {"a": {"b": [1]}},
    lambda r: {"type": r.choice(["text", "json_object", "image_url", 3])},
    lambda r: [{"role": r.choice(["user", "tool", 3, None]), "content": r.choice(["", 1, None, [], ["a"]])}],
    lambda r: list(range(r.choice([10, LONGEST, 3000]))),
    lambda r: "x" * r.choice([LONGEST - 1, LONGEST, 100_000]),
]
KEYS = [
    *"model prompt messages max_tokens max_completion_tokens temperature top_p top_k n seed stop".split(),
    *"stream stream_options logprobs top_logprobs echo best_of suffix presence_penalty".split(),
    *"frequency_penalty logit_bias tools tool_choice response_format stop_token_ids ignore_eos".split(),
    *"logprobs_mode user metadata store return_token_ids nonsense __class__".split(),
    *("\ud800", "a" * 1000, ""),
]


def wrong_body(r: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """A good request with one to three keys of other values."""
    path = r.choice([COMPLETIONS, CHAT])
    body = dict(GOOD[path])
    for key in r.sample(KEYS, r.randint(1, 3)):
        body[key] = r.choice(VALUES)(r)
    if r.random() < 0.2:
        del body[r.choice(sorted(body, key=repr))]
    return "POST", path, json.dumps(body).encode(), {"content-type": "application/json"}


def bad_json(r: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    text = json.dumps(GOOD[COMPLETIONS]).encode()
    content = r.choice(
        [
            b"",
            b"{",
            text[: r.randrange(len(text))],
            text + b"}",
            nested(r.choice([10, 999, 1001, 100_000])).encode(),
            b'{"prompt": ' + nested(r.choice([100, 900])).encode() + b"}",
            b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
            b'{"prompt": [1], "temperature": NaN}',
            b'{"prompt": [1], "temperature": 1e999}',
            b'{"prompt": [1], "max_tokens": ' + b"9" * r.choice([30, 5000]) + b"}",
            b'{"prompt": [' + b"1" * 400 + b"]}",
            bytes(r.randrange(256) for _ in range(200)),
            text.decode().encode("utf-16"),
            b"null",
            b'"text"',
            b'{"prompt": "a", "prompt": {}}',
            b" " * (5 << 20),
        ]
    )
    return "POST", r.choice([COMPLETIONS, CHAT]), content, {"content-type": "application/json"}


def wrong_way(r: random.Random) -> tuple[str, str, bytes, dict[str, str]]:
    """Another method, path, kind of content, or headers that nobody sends."""
    method = r.choice(["GET", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "HEAD", "BREW", "POST"])
    path = r.choice(
        [
            *(COMPLETIONS, CHAT, "/", "/v1", "/v1/models/", f"/v1/models/{'a' * 3000}", "/health", "//"),
            *("/update_weights_from_disk", "/%00"),
            *("/page.html", "/../page.html", "/%2e%2e/%2e%2e/etc/passwd", "/v1/models/../../../etc/passwd"),
            *("/v1/models/%2e%2e%2fsetup.py", "/v1/completions/", "/?a=" + "b" * 2000, "/static/../app.py"),
        ]
    )
    kind = r.choice(
        ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""]
    )
    more = r.choice([{}, {"x-long": "y" * 20_000}, {"cookie": "a=" + "\\" * 500}, {"expect": "nothing"}])
    return method, path, json.dumps(GOOD[COMPLETIONS]).encode(), {"content-type": kind} | more


def test_a_thousand_wrong_requests(http: Any) -> None:
    """Seeded, so that a failure comes again; sixteen at a time."""

    def ask(number: int) -> tuple[int, int, bytes, str]:
        r = random.Random(number)
        method, path, content, headers = r.choice([wrong_body, wrong_body, bad_json, wrong_way])(r)
        reply = http.request(method, path, content=content, headers=headers)
        return number, reply.status_code, reply.content, method

    with ThreadPoolExecutor(16) as pool:
        found = list(pool.map(ask, range(1000)))
    statuses = Counter(status for _, status, _, _ in found)
    assert set(statuses) <= {200, 400, 404, 405, 413}, [f[:2] for f in found if f[1] >= 500 or f[1] == 422]
    assert statuses[400] > 300
    for number, status, content, method in found:
        if status >= 400 and method != "HEAD":
            error = json.loads(content)["error"]
            assert set(error) == {"message", "type", "param", "code"}, number
            assert error["message"] and error["type"] == "invalid_request_error", number
            assert b"/tmp" not in content and b"Traceback" not in content
    assert_well(http)


def assert_well(http: Any) -> None:
    """Good requests are answered, and no slot is held."""
    for path, body in GOOD.items():
        reply = http.post(path, json=body)
        assert reply.status_code == 200, reply.text
        assert reply.json()["usage"]["completion_tokens"] == 4
    told = http.get("/health").json()
    assert (told["status"], told["running"], told["waiting"]) == ("ok", 0, 0)


RAW = {
    "no HTTP": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),
    "endless header": b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 300_000,
    "many headers": b"GET / HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(20_000)) + b"\r\n",
    "length no number": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: many\r\n\r\n",
    "length below 0": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n"
    b"Content-Length: 6\r\n\r\n{}",
    "body that ends early": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Content-Length: 1000\r\n\r\n{",
    "chunk no number": b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "path beyond": b"GET /../../../../etc/passwd HTTP/1.1\r\nHost: a\r\n\r\n",
}


@pytest.mark.parametrize("content", RAW.values(), ids=RAW)
def test_what_is_hardly_http(server: Server, http: Any, content: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as raw:
        try:
            raw.sendall(content)
            raw.shutdown(socket.SHUT_WR)
            reply = raw.recv(1 << 16)
        except OSError:  # closed by the server already: shutdown finds no connection
            reply = b""
    assert not reply or b" 4" in reply.partition(b"\r\n")[0], reply[:200]
    assert b"root:" not in reply
    assert_well(http)


WRONG: dict[str, tuple[str, dict[str, Any], str, str | None]] = {
    "negative token": (COMPLETIONS, {"prompt": [1, -5]}, "token 1 is -5; wanted 0 to 259", "prompt"),
    "token beyond": (COMPLETIONS, {"prompt": [[1], [260]]}, "token 0 is 260; wanted 0 to 259", "prompt[1]"),
    "empty": (COMPLETIONS, {"prompt": ""}, "is empty; give at least one token", "prompt"),
    "no prompt": (COMPLETIONS, {"prompt": None}, "prompt: is missing", "prompt"),
    "type": (COMPLETIONS, {"temperature": "hot"}, "should be a valid number, got 'hot'", "temperature"),
    "range": (CHAT, {"temperature": 3}, "less than or equal to 2, got 3", "temperature"),
    "tiny": (CHAT, {"temperature": 1e-9}, "wanted 0 (greedy), or 0.001 to 2, got 1e-09", "temperature"),
    "top_p": (CHAT, {"top_p": 0}, "greater than 0, got 0", "top_p"),
    "unknown": (COMPLETIONS, {"max_token": 3}, "max_token: is not known", "max_token"),
    "not served": (CHAT, {"tools": [{"type": "function"}]}, "tools: is not served; leave it out", "tools"),
    "penalty": (CHAT, {"presence_penalty": 0.5}, "is not served", "presence_penalty"),
    "too long": (COMPLETIONS, {"max_tokens": 511}, "ask for at most 510 new tokens", "max_tokens"),
    "too many": (COMPLETIONS, {"n": 10**6}, "this server takes at most 260", "n"),
    "role": (
        CHAT,
        {"messages": [{"role": "wizard", "content": "a"}]},
        "'developer', 'user'",
        "messages[0].role",
    ),
    "image": (
        CHAT,
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "only text is read",
        "messages[0].content",
    ),
    "answered": (
        CHAT,
        {"messages": [{"role": "assistant", "content": "a"}]},
        "nothing to answer",
        "messages",
    ),
    "surrogate": (COMPLETIONS, {"prompt": "a\ud800"}, "character 1 is half of a surrogate pair", "prompt"),
    "top_logprobs": (CHAT, {"top_logprobs": 2}, "wanted logprobs: true", "top_logprobs"),
    "stop": (CHAT, {"stop": ["a", ""]}, "strings of 1 to 1000 characters", "stop"),
}


@pytest.mark.parametrize("case", WRONG.values(), ids=WRONG)
def test_the_reason_is_told(http: Any, case: tuple[str, dict[str, Any], str, str | None]) -> None:
    """Where, what came and what was wanted, in OpenAI's form."""
    path, changes, message, param = case
    content = json.dumps(GOOD[path] | changes)
    reply = http.post(path, content=content, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert message in error["message"]
    assert error["param"] == param


@pytest.mark.parametrize(
    ("path", "changes"),
    [
        (
            COMPLETIONS,
            {"stop_token_ids": None, "logit_bias": None, "suffix": "", "top_k": -1, "best_of": None},
        ),
        (CHAT, {"top_logprobs": 0, "logprobs": False, "modalities": ["text"], "prediction": None}),
        (
            CHAT,
            {"top_logprobs": 0, "service_tier": "auto", "prompt_cache_key": "a", "safety_identifier": "b"},
        ),
    ],
)
def test_a_key_that_asks_nothing_is_taken(http: Any, path: str, changes: dict[str, Any]) -> None:
    plain, reply = (http.post(path, json=GOOD[path] | more) for more in ({}, changes))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == plain.json()["choices"]


def test_without_a_template_a_chat_is_refused(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "ck")
    (checkpoint / "step-00000001/tokenizer/chat_template.jinja").unlink()
    with serving(checkpoint, tmp_path) as server:
        reply = httpx.post(f"{server.url}v1/chat/completions", json=GOOD[CHAT])
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "no_chat_template")
        assert str(tmp_path) not in reply.text
