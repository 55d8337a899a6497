"""What clients may ask: the bodies of OpenAI's API as far as it is served, read into tickets.

What is known and not served is refused with the reason, as is what is not known: nothing is ignored that
would change an answer.
"""

from __future__ import annotations

import json
import reprlib
import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from yuan_train.config.errors import DataError
from yuan_train.config.rl import LEAST_TEMPERATURE
from yuan_train.data.tokenizer import Tokenizer, render_chat
from yuan_train.models.generate import Sampling
from yuan_train.serve.ranks import MOST_ALTERNATIVES, Asked

MOST_STOPS, LONGEST_STOP = 16, 1000
MOST_STOP_IDS = 1000
SEEDS = 1 << 62
DEFAULT_NEW_TOKENS = 16
"""Of a completion; an answer in a chat is as long as there is room."""
SHOWN = 80
"""Characters of a wrong value that a message repeats."""


class ApiError(Exception):
    """What a client is told instead of an answer; `status` is HTTP's."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    def body(self) -> dict[str, Any]:
        """In OpenAI's form."""
        kinds = {403: "permission_error", 408: "timeout_error", 429: "rate_limit_error"}
        kind = kinds.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclass(frozen=True)
class Served:
    """The model, as requests need it."""

    name: str
    created: int
    """Seconds of the Unix epoch."""
    tokenizer: Tokenizer | None
    vocab_size: int
    max_length: int
    """Tokens of a prompt and its answer."""
    most_answers: int
    """That may be asked for at once."""
    takes_weights: bool = False
    """Whether a request may give it other weights."""

    @property
    def stop_ids(self) -> frozenset[int]:
        """Tokens that end an answer, as `generate` has them."""
        return self.tokenizer.stop_ids if self.tokenizer is not None else frozenset()


@dataclass(frozen=True)
class Call:
    """A request that was read: a ticket for each answer, those to a prompt after each other."""

    asked: tuple[Asked, ...]
    is_chat: bool
    stops: tuple[str, ...]
    stream: bool
    include_usage: bool
    with_ids: bool
    """Whether the token ids of answers and prompts are told."""
    prompt_tokens: int
    echoes: tuple[str, ...]
    """The text that each answer begins with; empty if it does with none."""


# --- the forms of bodies ---------------------------------------------------------------------------------


def _check_stops(value: Any) -> list[str]:
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise ValueError("wanted a string, or a list of strings")
    if len(found) > MOST_STOPS or not all(0 < len(one) <= LONGEST_STOP for one in found):
        raise ValueError(f"wanted at most {MOST_STOPS} strings of 1 to {LONGEST_STOP} characters")
    return found


def _check_temperature(value: Any) -> Any:
    if isinstance(value, int | float) and 0 < value < LEAST_TEMPERATURE:
        raise ValueError(f"wanted 0 (greedy), or {LEAST_TEMPERATURE} to 2")
    return value


def _check_prompts(value: Any) -> list[str] | list[list[int]]:
    wanted = "wanted a string, a list of strings, a list of token ids, or a list of such lists"
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise ValueError(wanted)
    if all(isinstance(one, str) for one in value):
        return value
    lists = value if isinstance(value[0], list) else [value]
    if not all(isinstance(ids, list) and ids and all(type(one) is int for one in ids) for ids in lists):
        raise ValueError(wanted)
    return lists


def _check_content(value: Any) -> Any:
    """The text of a message's content: a string, or parts of type text."""
    if not isinstance(value, list):
        return value
    parts = [
        one.get("text") if isinstance(one, dict) and one.get("type") == "text" else None for one in value
    ]
    if not all(isinstance(part, str) for part in parts):
        raise ValueError('wanted a string, or parts {"type": "text", "text": "..."}: only text is read')
    return "".join(map(str, parts))


def _refuse(value: Any) -> None:
    if value not in (0, False, "", [], {}):
        raise ValueError("is not served; leave it out")


Refused = Annotated[Any, BeforeValidator(_refuse)]
"""A key of OpenAI's that would change the answer, and is not served: accepted only where it asks nothing."""


class _Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)


class StreamOptions(_Form):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False


class Body(_Form):
    """What both kinds of requests have."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2), BeforeValidator(_check_temperature)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """-1, as 0: from all."""
    n: Annotated[int, Field(ge=1)] | None = None
    seed: Annotated[int, Field(gt=-SEEDS, lt=SEEDS)] | None = None
    stop: Annotated[list[str], BeforeValidator(_check_stops)] = []
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0)]], Field(max_length=MOST_STOP_IDS)] = []
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    presence_penalty: Refused = None
    frequency_penalty: Refused = None
    logit_bias: Refused = None


class CompletionBody(Body):
    prompt: Annotated[list[str] | list[list[int]], BeforeValidator(_check_prompts)]
    logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs"] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1)] | None = None
    suffix: Refused = None


class MessageBody(BaseModel):
    """A message; one of the assistant's may be given back as it came, with keys that hold nothing."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_check_content)]
    name: str | None = None


class ResponseFormat(_Form):
    type: Literal["text"]


class ChatBody(Body):
    messages: Annotated[list[MessageBody], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_ALTERNATIVES)] | None = None
    response_format: ResponseFormat | None = None
    tools: Refused = None
    tool_choice: Literal["none", "auto"] | None = None
    functions: Refused = None
    modalities: list[Literal["text"]] | None = None
    audio: Refused = None
    reasoning_effort: Refused = None


# --- reading ---------------------------------------------------------------------------------------------


class WeightsBody(_Form):
    """What has a server take other weights, as SGLang names it."""

    model_path: Annotated[str, Field(min_length=1)]


def read_weights_body(content: bytes) -> str:
    """The folder of weights that a request names. Raises ApiError."""
    try:
        folder = WeightsBody.model_validate(read_json(content)).model_path
    except ValidationError as error:
        raise _as_api_error(error) from None
    if not folder.startswith("/") or "\x00" in folder or not folder.isprintable():
        raise ApiError(f"model_path: wanted an absolute path, got {_short(repr(folder))}", param="model_path")
    return folder


def read_json(content: bytes) -> dict[str, Any]:
    """The object in a body. Raises ApiError."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    try:
        value = json.loads(content.decode("utf-8"), parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {_short(str(error))}", code="bad_json") from None
    if not isinstance(value, dict):
        raise ApiError(f"the body holds {type(value).__name__}; wanted a JSON object", code="bad_json")
    return value


def read_call(value: dict[str, Any], served: Served, number: Callable[[], int], *, is_chat: bool) -> Call:
    """Read and check a request; `number` gives each ticket its own. Raises ApiError."""
    # As OpenAI's API has it, a key with null is as one that is left out.
    given = {key: one for key, one in value.items() if one is not None}
    try:
        body = (ChatBody if is_chat else CompletionBody).model_validate(given)
    except ValidationError as error:
        raise _as_api_error(error) from None
    except RecursionError:
        raise ApiError("the body is nested too deeply", code="bad_json") from None
    if body.model not in (None, served.name):
        raise ApiError(
            f"the model {_short(repr(body.model))} is not here; this server has {served.name!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    if isinstance(body, ChatBody):
        prompts, alternatives, echoes = [_chat_ids(body, served)], _alternatives(body), [""]
    else:
        prompts, echoes = _prompts(body, served)
        alternatives = body.logprobs
        if body.best_of not in (None, body.n or 1):
            raise ApiError("best_of: wanted none, or that of n", param="best_of")
        if body.echo and alternatives is not None:
            raise ApiError("echo: the log-probabilities of a prompt are not told", param="echo")
        cuts = (body.top_k or 0) > 0 or body.top_p not in (None, 1.0)
        if body.logprobs_mode == "processed_logprobs" and cuts:
            raise ApiError(
                "logprobs_mode: processed_logprobs is served without top_k and top_p alone; leave them out",
                param="logprobs_mode",
            )
    return _make_call(body, served, number, prompts, alternatives, echoes)


def _make_call(
    body: Body,
    served: Served,
    number: Callable[[], int],
    prompts: Sequence[list[int]],
    alternatives: int | None,
    echoes: Sequence[str],
) -> Call:
    """The tickets of a request: as `generate` would answer its prompts, with a seed each."""
    count = body.n or 1
    if count * len(prompts) > served.most_answers:
        raise ApiError(
            f"{count * len(prompts)} answers at once; this server takes at most {served.most_answers}",
            param="n",
        )
    limit = body.max_tokens
    if isinstance(body, ChatBody):
        limit = body.max_completion_tokens or limit
    seed = secrets.randbelow(SEEDS) if body.seed is None else body.seed
    sampling = Sampling(
        temperature=1.0 if body.temperature is None else float(body.temperature),
        top_k=max(body.top_k or 0, 0),
        top_p=1.0 if body.top_p is None else float(body.top_p),
    )
    asked = [
        Asked(
            number=number(),
            prompt_ids=tuple(ids),
            count=1,
            sampling=sampling,
            seed=seed + place * count + choice,
            max_new_tokens=_new_tokens(ids, limit, served, isinstance(body, ChatBody)),
            stop_ids=frozenset(body.stop_token_ids) | (frozenset() if body.ignore_eos else served.stop_ids),
            alternatives=alternatives,
            at_temperature=isinstance(body, CompletionBody) and body.logprobs_mode == "processed_logprobs",
        )
        for place, ids in enumerate(prompts)
        for choice in range(count)
    ]
    options = body.stream_options
    return Call(
        asked=tuple(asked),
        is_chat=isinstance(body, ChatBody),
        stops=tuple(body.stop),
        stream=bool(body.stream),
        include_usage=bool(options is not None and options.include_usage),
        with_ids=bool(body.return_token_ids),
        prompt_tokens=sum(map(len, prompts)),
        echoes=tuple(echo for echo in echoes for _ in range(count)),
    )


def _new_tokens(ids: Sequence[int], limit: int | None, served: Served, is_chat: bool) -> int:
    """How many tokens an answer to these may have. Raises ApiError if there is no room."""
    room = served.max_length - len(ids)
    wanted = (
        limit if limit is not None else max(room, 1) if is_chat else min(DEFAULT_NEW_TOKENS, max(room, 1))
    )
    if wanted > room:
        raise ApiError(
            f"{len(ids)} prompt tokens and {_short(str(wanted))} new ones exceed the {served.max_length} "
            f"that this server holds; ask for at most {max(room, 0)} new tokens",
            param="max_tokens",
            code="context_length_exceeded",
        )
    return wanted


def _alternatives(body: ChatBody) -> int | None:
    if body.top_logprobs and not body.logprobs:
        raise ApiError("top_logprobs: wanted logprobs: true with it", param="top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _prompts(body: CompletionBody, served: Served) -> tuple[list[list[int]], list[str]]:
    """The token ids of each prompt, and the text that its answers begin with."""
    prompts: list[list[int]] = []
    echoes: list[str] = []
    for place, prompt in enumerate(body.prompt):
        where = "prompt" if len(body.prompt) == 1 else f"prompt[{place}]"
        if isinstance(prompt, str):
            tokenizer = _tokenizer(served, where)
            ids = tokenizer.encode(_checked_text(prompt, where))
            prompts.append(_checked_ids([*tokenizer.prefix_ids, *ids] if ids else [], served, where))
            echoes.append(prompt if body.echo else "")
        else:
            prompts.append(_checked_ids(prompt, served, where))
            known = served.tokenizer
            echoes.append(known.decode(prompt) if body.echo and known is not None else "")
    return prompts, echoes


def _chat_ids(body: ChatBody, served: Served) -> list[int]:
    """The token ids of a chat, up to where the model answers."""
    tokenizer = _tokenizer(served, "messages")
    if tokenizer.settings.chat_template is None:
        raise ApiError(
            "messages: this model has no chat template; use /v1/completions with a prompt as it knows them",
            param="messages",
            code="no_chat_template",
        )
    if body.messages[-1].role == "assistant":
        raise ApiError(
            "messages: the last one is the assistant's: there is nothing to answer", param="messages"
        )
    messages: list[dict[str, str]] = []
    for place, message in enumerate(body.messages):
        where = f"messages[{place}]"
        if more := [key for key, value in (message.model_extra or {}).items() if value not in (None, [], {})]:
            raise ApiError(f"{where}.{_short(more[0])}: is not served; leave it out", param=where)
        role = "system" if message.role == "developer" else message.role
        messages.append({"role": role, "content": _checked_text(message.content, f"{where}.content")})
    try:
        text = render_chat(tokenizer, messages)
    except DataError as error:
        # Its folder is nobody's business.
        reason = str(error).removeprefix(f"{tokenizer.path.parent}: ")
        raise ApiError(f"messages: {_short(reason, 300)}", param="messages") from None
    return _checked_ids(tokenizer.encode(_checked_text(text, "messages"), special=True), served, "messages")


def _tokenizer(served: Served, where: str) -> Tokenizer:
    if served.tokenizer is None:
        raise ApiError(f"{where}: this model has no tokenizer here; give a list of token ids", param=where)
    return served.tokenizer


def _checked_text(text: str, where: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ApiError(f"{where}: character {error.start} is half of a surrogate pair", param=where) from None
    return text


def _checked_ids(ids: list[int], served: Served, where: str) -> list[int]:
    if not ids:
        raise ApiError(f"{where}: is empty; give at least one token", param=where)
    for place, one in enumerate(ids):
        if not 0 <= one < served.vocab_size:
            raise ApiError(
                f"{where}: token {place} is {_short(str(one))}; wanted 0 to {served.vocab_size - 1}",
                param=where,
            )
    if len(ids) >= served.max_length:
        raise ApiError(
            f"{where}: {len(ids)} tokens, but a prompt and its answer may have {served.max_length}",
            param=where,
            code="context_length_exceeded",
        )
    return ids


def _as_api_error(error: ValidationError) -> ApiError:
    """The first fault that was found."""
    fault = error.errors(include_url=False)[0]
    path = ""
    for part in fault["loc"]:
        path += (
            f"[{part}]" if isinstance(part, int) else f".{_short(str(part))}" if path else _short(str(part))
        )
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "extra_forbidden":
        return ApiError(f"{path}: is not known; leave it out", param=path, code="unknown_parameter")
    if fault["type"] == "missing":
        return ApiError(f"{path}: is missing", param=path, code="missing_parameter")
    return ApiError(f"{path}: {message}, got {_short(reprlib.repr(fault['input']))}", param=path)


def _short(text: str, most: int = SHOWN) -> str:
    """A text of a client's as a message may repeat it."""
    safe = text.encode("utf-8", "backslashreplace").decode()
    return safe if len(safe) <= most else f"{safe[:most]}..."
