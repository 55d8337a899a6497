"""What `up` is to train: the model and data that two words name, and the run file that suits the cards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yuan_train.config.cluster import Cluster
from yuan_train.config.errors import ConfigError
from yuan_train.config.load import dump_plain
from yuan_train.config.model import STATE, load_model, locate_model
from yuan_train.config.plan import PROCESSOR, is_real_card
from yuan_train.data.indexed import IndexedDataset, idx_path, strip_suffix
from yuan_train.data.text import LINE_SUFFIXES, PARQUET_SUFFIX

TEXTS = (*LINE_SUFFIXES, PARQUET_SUFFIX, ".txt", ".md")
WEIGHTS = ("*.safetensors", "pytorch_model*.bin")
TOKENIZERS = ("tokenizer.model", "tokenizer.json")
LARGEST_VOCABULARY = 50_000
"""Of a tokenizer that is trained here: larger ones come with their models."""
LEAST_DOCUMENTS = 100
"""Of a corpus of which a share is kept for validation."""


@dataclass(frozen=True, kw_only=True)
class Aim:
    """What is trained, and on what."""

    model: str | None
    """As the run file names it; None: that of `start`."""
    start: str | None
    """A checkpoint to train on."""
    weights: str | None
    """A folder of Hugging Face's that is imported before, to `start`."""
    longest: int
    """Tokens of the longest sequence of the model."""
    prefix: str
    """Of the token files."""
    texts: tuple[str, ...]
    """What they are made of; empty: they are there."""
    are_chats: bool
    tokenizer: str | None
    vocabulary: int | None
    """Words of a tokenizer that is trained before; None: it is there, or none is needed."""


def find_aim(model: str, data: str, tokenizer: str | None, out: Path) -> Aim:
    """What --model, --data and --tokenizer mean. Raises ConfigError."""
    found = locate_model(model)
    config = load_model(model)
    is_published = found.is_dir() and (found / "config.json").is_file()
    weights = is_published and any(any(found.glob(pattern)) for pattern in WEIGHTS)
    is_checkpoint = found.is_dir() and not is_published
    start = str(out / "model") if weights else model if is_checkpoint else None
    texts = _texts(data)
    own = tokenizer or _tokenizer_of(found)
    vocabulary = None
    if texts and own is None:
        if config.vocab_size > LARGEST_VOCABULARY:
            raise ConfigError(
                f"--model {model}: a vocabulary of {config.vocab_size} and no tokenizer beside it; wanted "
                "--tokenizer DIR with the model's own, or --data with the prefix of token files"
            )
        own, vocabulary = str(out / "tokenizer"), config.vocab_size
    return Aim(
        model=None if start else model,
        start=start,
        weights=str(found) if weights else None,
        longest=config.max_sequence_length,
        prefix=str(out / "data") if texts else str(strip_suffix(data)),
        texts=texts,
        are_chats=bool(texts) and _are_chats(texts[0]),
        tokenizer=own,
        vocabulary=vocabulary,
    )


def _tokenizer_of(model: Path) -> str | None:
    """The folder of the tokenizer that comes with a model or a checkpoint."""
    if not model.is_dir():
        return None
    steps = [model] if (model / STATE).is_file() else sorted(model.glob("step-*"), reverse=True)
    for folder in (model, *(step / "tokenizer" for step in steps)):
        if any((folder / name).is_file() for name in TOKENIZERS):
            return str(folder)
    return None


def _texts(data: str) -> tuple[str, ...]:
    """The files of text; none if the data are token files. Raises ConfigError if nothing is there."""
    if idx_path(strip_suffix(data)).exists():
        return ()
    path = Path(data)
    if path.is_file():
        return (data,)
    if not path.is_dir():
        raise ConfigError(
            f"--data {data}: no such file or folder, and no {data}.idx; wanted text, .jsonl or .parquet, a "
            "folder of such files, or the prefix of token files"
        )
    files = sorted(one for one in path.rglob("*") if one.is_file() and one.suffix in TEXTS)
    if not files:
        raise ConfigError(f"--data {data}: no file in this folder ends in {', '.join(TEXTS)}; wanted some")
    return tuple(map(str, files))


def _are_chats(path: str) -> bool:
    """Whether the first line is a chat: messages, and no text."""
    if Path(path).suffix not in LINE_SUFFIXES:
        return False
    try:
        with open(path, encoding="utf-8") as file:
            first: Any = json.loads(file.readline())
    except (OSError, ValueError):
        return False
    return isinstance(first, dict) and "messages" in first and "text" not in first


def run_text(aim: Aim, cluster: Cluster, *, out: Path, steps: int | None, saves: str | None) -> str:
    """The run file: precision, length and batch by the cards; by default one pass over the data.

    `saves` is the directory of checkpoints; None: none are written.
    """
    types = {card.type for card in cluster.cards}
    known = [cluster.device_type(name) for name in types]
    on_cards = any(is_real_card(name, cluster.device_type(name)) for name in types)
    precision = "fp32" if not on_cards else "bf16" if all(card.bf16 for card in known) else "fp16"
    length = min(aim.longest, 2048 if on_cards else 256)
    batch = 64 if on_cards else 16
    corpus = IndexedDataset(aim.prefix)
    count = steps or max(10, corpus.num_tokens // (length * batch))
    rate = 3e-4 if aim.start is None else 2e-5
    validates = corpus.num_documents >= LEAST_DOCUMENTS
    data: dict[str, Any] = {"train": [{"prefix": aim.prefix}], "sequence_length": length}
    if validates:
        data["split"] = [0.98, 0.02]
    data |= {"tokenizer": aim.tokenizer} if aim.tokenizer else {"reset_position_ids": False}
    if aim.are_chats:
        data["loss_on_answers"] = True
    run: dict[str, Any] = {
        **({"model": aim.model} if aim.model else {"start": {"checkpoint": aim.start}}),
        "data": data,
        "train": {"steps": count, "global_batch_size": batch, "precision": precision},
        "optimizer": {
            "learning_rate": rate,
            "minimum_learning_rate": rate / 10,
            "warmup_steps": min(100, count // 10),
        },
        **({"validation": {"every": max(1, count // 10), "batches": 2}} if validates else {}),
        **({"checkpoint": {"directory": saves, "every": max(1, count // 5), "keep": 2}} if saves else {}),
        "log": {"directory": str(out / "log"), "every": 1 if count <= 100 else 10},
    }
    kinds = "processors" if types and all(name.startswith(PROCESSOR) for name in types) else "cards"
    head = (
        f"# Written by `yuan-train up` for these {kinds}: {', '.join(sorted(types))}. Changes by hand stay;\n"
        "# `yuan-train keys run` has every key.\n"
    )
    return head + dump_plain(run)
