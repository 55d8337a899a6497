"""Yuan's tokenizer for transformers; part of a model exported by yuan_train. Apache-2.0.

It wraps a sentencepiece model. Text is split at the special tokens, and each part between them is encoded on
its own. No token is added at the ends. Decoding is the exact inverse.
"""

import os
import shutil
from typing import Any

import sentencepiece
from transformers import AddedToken, PreTrainedTokenizer

VOCAB_FILE = "tokenizer.model"
SPECIALS = (
    "<eod>",
    "<sep>",
    "<pad>",
    "<mask>",
    "<predict>",
    "<FIM_SUFFIX>",
    "<FIM_PREFIX>",
    "<FIM_MIDDLE>",
    "<commit_before>",
    "<commit_msg>",
    "<commit_after>",
    "<jupyter_start>",
    "<jupyter_text>",
    "<jupyter_code>",
    "<jupyter_output>",
    "<empty_output>",
)


class YuanTokenizer(PreTrainedTokenizer):
    """The pieces of `tokenizer.model`; special tokens without a piece get the ids after the last piece."""

    vocab_files_names = {"vocab_file": VOCAB_FILE}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, **options: Any) -> None:
        self.vocab_file = vocab_file
        self.pieces = sentencepiece.SentencePieceProcessor()
        self.pieces.Load(vocab_file)
        known = {
            piece for piece in SPECIALS if self.pieces.id_to_piece(self.pieces.piece_to_id(piece)) == piece
        }
        is_yuan = bool(known) and not self.pieces.is_control(self.pieces.piece_to_id("<eod>"))
        end = "<eod>" if "<eod>" in known else "</s>"
        for key, token in (("bos_token", "<s>"), ("unk_token", "<unk>"), ("eos_token", end)):
            options.setdefault(key, token)
        options.setdefault("pad_token", "<pad>" if "<pad>" in known else end)
        options.setdefault("padding_side", "left")
        options["clean_up_tokenization_spaces"] = False
        super().__init__(**options)
        specials = [piece for piece in SPECIALS if is_yuan or piece in known]
        self.add_tokens(
            [AddedToken(s, normalized=False, special=True) for s in specials], special_tokens=True
        )

    @property
    def vocab_size(self) -> int:
        return self.pieces.get_piece_size()

    def get_vocab(self) -> dict[str, int]:
        vocab = {self.pieces.id_to_piece(number): number for number in range(self.vocab_size)}
        return {**vocab, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        return self.pieces.encode(text, out_type=str)  # type: ignore[call-arg]

    def _convert_token_to_id(self, token: str) -> int:
        return self.pieces.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.pieces.id_to_piece(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self.pieces.decode([self.pieces.piece_to_id(token) for token in tokens])

    def _decode(self, token_ids: Any = None, skip_special_tokens: bool = False, **_: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else [int(number) for number in token_ids]
        parts, first = [], 0
        for index, number in enumerate(ids):
            added = self.added_tokens_decoder.get(number)
            if added is not None:
                parts.append(self.pieces.decode(ids[first:index]))
                parts.append("" if skip_special_tokens else added.content)
                first = index + 1
        return "".join([*parts, self.pieces.decode(ids[first:])])

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        name = f"{filename_prefix}-{VOCAB_FILE}" if filename_prefix else VOCAB_FILE
        path = os.path.join(save_directory, name)
        if os.path.abspath(path) != os.path.abspath(self.vocab_file):
            shutil.copyfile(self.vocab_file, path)
        return (path,)
