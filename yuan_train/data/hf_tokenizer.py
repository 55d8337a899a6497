"""Tokenizers in Hugging Face's format: `tokenizer.json`, and what the files beside it say of its use."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from yuan_train.config.errors import DataError

END_OF_DOCUMENT = "<eod>"
ENDS = (END_OF_DOCUMENT, "<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")
"""Pieces that end documents in pre-training, in the order in which they are looked for."""

TOKENIZER_CONFIG = "tokenizer_config.json"
GENERATION_CONFIG = "generation_config.json"
CHAT_TEMPLATE = "chat_template.jinja"


@dataclass(frozen=True, kw_only=True)
class TokenizerSettings:
    """What `tokenizer_config.json`, `generation_config.json` and `chat_template.jinja` say of a tokenizer."""

    special_tokens: Mapping[str, str] = field(default_factory=dict[str, str])
    """By role: `bos_token`, `eos_token`, `pad_token`, ..."""
    stop_ids: frozenset[int] = frozenset()
    """Tokens that end a generated text."""
    add_bos_token: bool = False
    """A sentencepiece model puts `bos_token` before a text; a tokenizer.json says that itself."""
    chat_template: str | None = None


def read_settings(folder: Path) -> TokenizerSettings:
    """The settings in a tokenizer's folder; files may be absent. Raises DataError for malformed ones."""
    config = _read_object(folder / TOKENIZER_CONFIG)
    generation = _read_object(folder / GENERATION_CONFIG)
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if wrong := [end for end in ends if not isinstance(end, int) or isinstance(end, bool) or end < 0]:
        raise DataError(f"{folder / GENERATION_CONFIG}: eos_token_id {wrong[0]!r}; wanted token ids")
    return TokenizerSettings(
        special_tokens={
            role: text for role in sorted(config) if role.endswith("_token") and (text := _text(config[role]))
        },
        stop_ids=frozenset(ends),
        add_bos_token=config.get("add_bos_token") is True,
        chat_template=_chat_template(folder, config),
    )


def _text(token: Any) -> str | None:
    """A special token: a string, or an object with its `content`."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None


def _chat_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    """The template in its own file, else in the config: a string, or a list of which one is `default`."""
    file = folder / CHAT_TEMPLATE
    if file.is_file():
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise DataError(f"{file}: cannot be read: {error}") from None
    found = config.get("chat_template")
    if isinstance(found, list):
        named = {item.get("name"): item.get("template") for item in found if isinstance(item, dict)}
        found = named.get("default")
    return found if isinstance(found, str) else None


def _read_object(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise DataError(f"{file}: holds {type(value).__name__}; wanted a JSON object")
    return value


class HuggingFaceBackend:
    """A `tokenizer.json`, read by the package `tokenizers`."""

    has_settings = True

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self.specials: Mapping[str, int] = {
            token.content: number for number, token in added.items() if token.special
        }
        self.vocab_size = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values())
        self.eod_id = next((self.piece_id(piece) for piece in ENDS if self.piece_id(piece) is not None), None)

    @classmethod
    def open(cls, file: Path, content: bytes, advice: str) -> "HuggingFaceBackend":
        """Parse the file. Raises DataError for content in another format."""
        import tokenizers

        try:
            return cls(tokenizers.Tokenizer.from_str(content.decode("utf-8")))
        except Exception as error:  # tokenizers raises bare Exceptions for what it cannot read
            raise DataError(f"{file}: not a tokenizer.json, or a torn one: {error}; {advice}") from None

    def prefix_ids(self, settings: TokenizerSettings) -> list[int]:
        """What the file's post-processor puts before a text, such as Llama's <|begin_of_text|>."""
        plain = self._tokenizer.encode("a", add_special_tokens=False).ids
        whole = self._tokenizer.encode("a", add_special_tokens=True).ids
        starts = (i for i in range(len(whole)) if whole[i : i + len(plain)] == plain)
        return whole[: next(starts, 0)]

    def piece_id(self, piece: str) -> int | None:
        return self._tokenizer.token_to_id(piece)

    def encode(self, text: str, special: bool | frozenset[str]) -> list[int]:
        self._tokenizer.encode_special_tokens = not special
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: list[int], special: bool) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=not special)
