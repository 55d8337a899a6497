"""Chat templates: the Jinja text beside a tokenizer that turns messages into a prompt.

Rendered as transformers renders them: in Jinja's immutable sandbox, which lets a template neither reach
Python's attributes nor change what it is given. A template is not trusted, but it is not bounded either: it
can loop for long.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from yuan_train.config.errors import DataError
from yuan_train.data.tokenizer import Tokenizer

Message = Mapping[str, str]
"""`role` (system, user, assistant) and `content`."""


def render_chat(tokenizer: Tokenizer, messages: Sequence[Message]) -> str:
    """The prompt of a chat, up to where the model answers; special tokens are written out in it.

    Raises DataError without a template or without the package `jinja2`, and for a template that cannot be
    rendered.
    """
    template = tokenizer.settings.chat_template
    if template is None:
        raise DataError(
            f"{tokenizer.path.parent}: no chat template: wanted chat_template.jinja, or chat_template in "
            "tokenizer_config.json; give the prompt as the model knows it, with --special"
        )
    try:
        import jinja2
        from jinja2.ext import loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise DataError(
            "chat templates need the package jinja2: pip install 'yuan-train[tokenizers]'"
        ) from None

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(template).render(
            messages=[dict(message) for message in messages],
            add_generation_prompt=True,
            tools=None,
            documents=None,
            **tokenizer.settings.special_tokens,
        )
    except Exception as error:  # a template can raise anything: TypeError, RecursionError, ...
        raise DataError(
            f"{tokenizer.path.parent}: the chat template cannot be rendered: {type(error).__name__}: {error}"
        ) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """As the filter of transformers; Jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
