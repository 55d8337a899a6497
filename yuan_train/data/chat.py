"""Chat templates: the Jinja text beside a tokenizer that turns messages into a prompt, or into training data.

Rendered as transformers renders them: in Jinja's immutable sandbox, which lets a template neither reach
Python's attributes nor change what it is given. A template is not trusted, but it is not bounded either: it
can loop for long.
"""

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any, TypeGuard

from yuan_train.config.errors import DataError
from yuan_train.data.tokenizer import Tokenizer

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


def render_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], *, add_generation_prompt: bool = True
) -> str:
    """The text of a chat; special tokens are written out in it. By default up to where the model answers.

    Raises DataError without a template, and for a template that cannot be rendered.
    """
    template = tokenizer.settings.chat_template
    if template is None:
        raise DataError(
            f"{tokenizer.path.parent}: no chat template: wanted chat_template.jinja, or chat_template in "
            "tokenizer_config.json; give the prompt as the model knows it, with --special"
        )
    try:
        return _compiled(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=add_generation_prompt,
            tools=None,
            documents=None,
            **tokenizer.settings.special_tokens,
        )
    except Exception as error:  # a template can raise anything: TypeError, RecursionError, ...
        raise DataError(
            f"{tokenizer.path.parent}: the chat template cannot be rendered: {type(error).__name__}: {error}"
        ) from None


def continue_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """What a template writes behind an answer's text up to where the next one begins: the end of the answer,
    the messages, and what opens an answer. Raises DataError, as `render_chat` does."""
    mark = "an answer that is nowhere else"
    before = [{"role": "user", "content": "a question"}, {"role": "assistant", "content": mark}]
    _, found, behind = render_chat(tokenizer, [*before, *messages]).rpartition(mark)
    if not found:
        raise DataError(
            f"{tokenizer.path.parent}: the chat template leaves answers out that have others behind them, so "
            "an environment's messages cannot be added to one"
        )
    return behind


@functools.lru_cache(maxsize=4)
def _compiled(template: str) -> Any:
    import jinja2
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment.from_string(template)


def check_messages(value: Any, where: str) -> None:
    """Raise DataError unless `value` is a list of messages with an answer in it."""
    wanted = 'wanted [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]'
    _check_form(value, where, wanted)
    if not any(message["role"] == "assistant" for message in value):
        raise DataError(f"{where}: no message of the assistant, so nothing to learn; {wanted}")


def check_question(value: Any, where: str) -> None:
    """Raise DataError unless `value` is a list of messages that a model is to answer."""
    wanted = 'wanted [..., {"role": "user", "content": "..."}]'
    _check_form(value, where, wanted)
    if not value or value[-1]["role"] == "assistant":
        last = "the last message is the assistant's" if value else "no messages"
        raise DataError(f"{where}: {last}, so there is nothing to answer; {wanted}")


def _check_form(value: Any, where: str, wanted: str) -> None:
    if not are_messages(value):
        raise DataError(f"{where}: not a list of messages; {wanted}")


def are_messages(value: Any) -> TypeGuard[list[dict[str, str]]]:
    """Whether it is a list of messages, each with a role and its content."""
    return isinstance(value, list) and all(
        isinstance(one, dict) and all(isinstance(one.get(key), str) for key in ("role", "content"))
        for one in value
    )


def encode_chat(
    tokenizer: Tokenizer, messages: Sequence[Message], where: str
) -> tuple[list[int], list[bool]]:
    """Tokens of a chat, and for each whether it is part of an answer: what the assistant would generate.

    Each answer is encoded by itself, after the tokens of its prompt: the tokens that generation meets. It
    ends with the first token that ends a generated text, that one included; if the template writes none, with
    the end-of-document token after the chat. Raises DataError, naming `where`, if the template writes an
    answer otherwise than the prompt and its continuation, or another end of a document inside the chat.
    """
    tokens: list[int] = []
    is_answer: list[bool] = []
    for text, answered in _segments(tokenizer, messages, where):
        ids = tokenizer.encode(text, special=True)
        stops = (i + 1 for i, token in enumerate(ids) if token in tokenizer.stop_ids)
        end = next(stops, len(ids)) if answered else 0
        tokens += ids
        is_answer += [i < end for i in range(len(ids))]
    if not tokens or tokens[-1] != tokenizer.eod_id:
        is_open = bool(tokens) and is_answer[-1] and tokens[-1] not in tokenizer.stop_ids
        tokens.append(tokenizer.eod_id)
        is_answer.append(is_open)
    if tokenizer.eod_id in tokens[:-1]:
        raise DataError(
            f"{where}: the chat gives the end-of-document id {tokenizer.eod_id} before its end; train on "
            "chats of one answer, or with a template whose turns end in another token"
        )
    return tokens, is_answer


def _segments(tokenizer: Tokenizer, messages: Sequence[Message], where: str) -> Iterator[tuple[str, bool]]:
    """The text of a chat in pieces, and whether each is an answer."""
    done = ""
    for number, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render_chat(tokenizer, messages[:number])
        whole = render_chat(tokenizer, messages[: number + 1], add_generation_prompt=False)
        if not prompt.startswith(done) or not whole.startswith(prompt):
            raise DataError(
                f"{where}: with message {number + 1} the chat template writes what came before it otherwise, "
                "so the answers' tokens cannot be told; give each answer a line of its own"
            )
        yield prompt[len(done) :], False
        yield whole[len(prompt) :], True
        done = whole
    whole = render_chat(tokenizer, messages, add_generation_prompt=False)
    if whole.startswith(done):
        yield whole[len(done) :], False


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As the filter of transformers; Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
