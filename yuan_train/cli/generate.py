"""Continues a prompt with a checkpoint's model, using the key-value and filter caches."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from yuan_train.cli.evaluate import parse_ids
from yuan_train.config.errors import ConfigError, DataError, YuanError, why_unread

if TYPE_CHECKING:
    from yuan_train.data.tokenizer import Tokenizer


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a folder of them")
    add("--prompt", metavar="TEXT", help="text to continue")
    add("--prompt-ids", metavar="1,2,3", help="token ids to continue, in place of --prompt")
    add("--prompts", metavar="FILE", help="one prompt per line, continued together; prints JSON lines")
    add("--special", action="store_true", help="recognise strings such as <sep> in prompts, and print them")
    add(
        "--chat",
        action="store_true",
        help="each prompt is a user's message to a chat model; a --prompts file that ends in .jsonl has "
        '{"messages": [{"role": ..., "content": ...}, ...]} per line',
    )
    add("--tokenizer", metavar="DIR", help="in place of the one in the checkpoint")
    add("--max-new-tokens", type=int, default=64, metavar="N", help="default 64")
    add("--temperature", type=float, default=1.0, metavar="T", help="0 is greedy; default 1")
    add("--top-k", type=int, default=0, metavar="K", help="sample from the K most likely; 0: from all")
    add("--top-p", type=float, default=1.0, metavar="P", help="sample from the most likely that sum to P")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Read the checkpoint, continue the prompt, print tokens as they are generated."""
    given = [arguments.prompt, arguments.prompt_ids, arguments.prompts]
    if sum(option is not None for option in given) != 1:
        raise ConfigError("give either --prompt, --prompt-ids or --prompts")
    from yuan_train.checkpoint.load import find_checkpoint
    from yuan_train.data.prompts import text_of
    from yuan_train.models.generate import DocumentRules, Sampling, generate_batch
    from yuan_train.train.evaluate import load_trained

    checkpoint = find_checkpoint(arguments.checkpoint)
    for note in checkpoint.notes:
        print(f"note: {note}", file=sys.stderr)
    trained = load_trained(checkpoint, tokenizer=arguments.tokenizer)
    tokenizer = trained.tokenizer
    prompts = _prompts(arguments, tokenizer, checkpoint.model.vocab_size)
    new_ids: list[list[int]] = [[] for _ in prompts]
    shown = not arguments.json and arguments.prompts is None
    decode = partial(text_of, tokenizer=tokenizer, special=arguments.special)
    drawn = generate_batch(
        trained.model,
        prompts,
        max_new_tokens=arguments.max_new_tokens,
        sampling=Sampling(temperature=arguments.temperature, top_k=arguments.top_k, top_p=arguments.top_p),
        seed=arguments.seed,
        documents=DocumentRules(eod_id=trained.eod_id, **trained.resets),
        stop_ids=trained.stop_ids,
    )
    # Behind the checks of what is asked for: the stream prints the prompt at once.
    before = prompts[0] if shown and not arguments.chat else []
    stream = _TextStream(decode, before) if shown and tokenizer is not None else None
    for tokens in drawn:
        for row, token in zip(new_ids, tokens, strict=True):
            row += [] if token is None else [token]
        if stream is not None:
            stream.show(new_ids[0])
    if not shown:
        for prompt_ids, row in zip(prompts, new_ids, strict=True):
            text = decode(row) if tokenizer is not None else None
            print(json.dumps({"prompt_ids": prompt_ids, "new_ids": row, "text": text}, ensure_ascii=False))
    else:
        print(stream.rest if stream is not None else ",".join(map(str, new_ids[0])))
    return 0


def _prompts(arguments: argparse.Namespace, tokenizer: Tokenizer | None, vocab_size: int) -> list[list[int]]:
    if arguments.prompt_ids is not None:
        if arguments.chat:
            raise ConfigError("--chat needs --prompt or --prompts; --prompt-ids are read as they are")
        return [parse_ids(arguments.prompt_ids, option="--prompt-ids", vocab_size=vocab_size)]
    if tokenizer is None:
        raise DataError("the checkpoint holds no tokenizer; give --tokenizer DIR, or --prompt-ids")
    if arguments.prompts is None:
        texts = [("", arguments.prompt)]
    else:
        try:
            lines = Path(arguments.prompts).read_text(encoding="utf-8-sig").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"--prompts: {arguments.prompts}: cannot be read: {why_unread(error)}") from None
        texts = [(f"{arguments.prompts}:{n}: ", line) for n, line in enumerate(lines, 1) if line.strip()]
    rows = []
    for where, text in texts:
        try:
            rows.append(_encode(tokenizer, text, arguments, vocab_size))
        except YuanError as error:
            raise type(error)(f"{where}{error}") from None
    return rows


def _encode(tokenizer: Tokenizer, text: str, arguments: argparse.Namespace, vocab_size: int) -> list[int]:
    """Token ids of a prompt; with --chat the template adds all that goes around a user's message, or around
    a line with messages. Raises ConfigError or DataError."""
    if arguments.chat:
        from yuan_train.data.tokenizer import render_chat

        is_json = arguments.prompts is not None and arguments.prompts.endswith(".jsonl")
        messages = _parse_messages(text) if is_json else [{"role": "user", "content": text}]
        ids = tokenizer.encode(render_chat(tokenizer, messages), special=True)
    else:
        ids = tokenizer.encode(text, special=arguments.special)
        ids = [*tokenizer.prefix_ids, *ids] if ids else []
    if not ids:
        raise ConfigError("the prompt is empty; give at least one token")
    if max(ids) >= vocab_size:
        raise DataError(f"token id {max(ids)} is beyond the model's vocabulary of {vocab_size}")
    return ids


def _parse_messages(line: str) -> list[dict[str, str]]:
    """The messages of a line of JSON. Raises DataError."""
    from yuan_train.data.tokenizer import are_messages

    wanted = 'wanted {"messages": [{"role": "user", "content": "..."}]}'
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{line[:60]!r} is not JSON: {error}; {wanted}") from None
    messages = value.get("messages") if isinstance(value, dict) else None
    if not are_messages(messages):
        raise DataError(f"{line[:60]!r} holds no messages; {wanted}")
    return messages


class _TextStream:
    """Prints text as its tokens arrive; a character is printed once all its bytes have arrived."""

    def __init__(self, decode: Callable[[list[int]], str], prompt_ids: list[int]) -> None:
        self._decode, self._prompt_ids = decode, prompt_ids
        self._shown = 0
        self.rest = ""
        """What is not printed yet: it ends with a part of a character."""
        self.show([])

    def show(self, new_ids: list[int]) -> None:
        """Print what `new_ids`, all tokens so far, add to the printed text."""
        text = self._decode([*self._prompt_ids, *new_ids])
        self.rest = text[self._shown :]
        if not text.endswith("\N{REPLACEMENT CHARACTER}"):
            print(self.rest, end="", flush=True)
            self._shown, self.rest = len(text), ""
