"""Reads token files and prints the mean loss and the perplexity. With --pairs, prints how often a reward
model scores the chosen answer higher. With --token-ids, writes the logits of those tokens instead."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from yuan_train.cli.main import file_to_write
from yuan_train.config.errors import ConfigError, DataError

if TYPE_CHECKING:
    from yuan_train.train.evaluate import TrainedModel


def register(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    add = parser.add_argument
    add("--checkpoint", required=True, metavar="DIR", help="a checkpoint, or a folder of them")
    add("--data", metavar="PREFIX", help="token files, without .bin or .idx")
    add("--pairs", metavar="FILE", help=".jsonl of preference pairs, for a reward model")
    add("--sequence-length", type=int, metavar="N", help="default: that of the training run")
    add("--max-sequences", type=int, default=0, metavar="N", help="stop after N, a pair is two; 0: read all")
    add("--token-ids", metavar="1,2,3", help="tokens to compute logits of")
    add("--logits", type=file_to_write, metavar="FILE", help="file to write (safetensors: input_ids, logits)")
    add("--json", action="store_true", help="print one JSON object on stdout")


def run(arguments: argparse.Namespace) -> int:
    """Evaluate on a corpus, or write logits."""
    given = [name for name in ("data", "pairs", "token_ids") if getattr(arguments, name) is not None]
    if len(given) != 1:
        raise ConfigError("give either --data, --pairs or --token-ids")
    if arguments.max_sequences < 0:
        raise ConfigError(f"--max-sequences: wanted 0 (all of them) or more, got {arguments.max_sequences}")
    if (arguments.token_ids is None) != (arguments.logits is None):
        raise ConfigError("--token-ids and --logits go together")
    from yuan_train.checkpoint.load import find_checkpoint
    from yuan_train.train.evaluate import check_has_vocabulary, evaluate, evaluate_pairs, load_trained

    checkpoint = find_checkpoint(arguments.checkpoint)
    for note in checkpoint.notes:
        print(f"note: {note}", file=sys.stderr)
    trained = load_trained(checkpoint)
    if arguments.token_ids is not None:
        check_has_vocabulary(checkpoint.model)
        shape = _write_logits(trained, arguments.token_ids, Path(arguments.logits))
        _report({"logits": arguments.logits, "shape": shape}, arguments.json)
        return 0
    data = checkpoint.state.get("run", {}).get("data", {})
    length, most = arguments.sequence_length, arguments.max_sequences
    if length is None:
        length = data.get("sequence_length", checkpoint.model.max_sequence_length)
    if arguments.pairs is not None:
        found = evaluate_pairs(trained, arguments.pairs, sequence_length=length, max_pairs=(most + 1) // 2)
    else:
        found = evaluate(trained, arguments.data, sequence_length=length, max_sequences=most)
    _report({"step": checkpoint.step, **asdict(found)}, arguments.json)
    return 0


def parse_ids(text: str, *, option: str, vocab_size: int) -> list[int]:
    """Token ids such as `1,2,3`. Raises ConfigError for other text, DataError beyond the vocabulary."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise ConfigError(f"{option}: wanted numbers such as 1,2,3; got {text!r}")
    ids = [int(word) for word in words]
    if max(ids) >= vocab_size:
        raise DataError(f"{option}: token id {max(ids)} is beyond the model's vocabulary of {vocab_size}")
    return ids


def _write_logits(trained: TrainedModel, text: str, path: Path) -> list[int]:
    import torch
    from safetensors.torch import save_file

    from yuan_train.train.evaluate import hidden_states

    ids = parse_ids(text, option="--token-ids", vocab_size=trained.model.config.vocab_size)
    if len(ids) > trained.model.config.max_sequence_length:
        raise ConfigError(
            f"--token-ids: {len(ids)} tokens; the model allows {trained.model.config.max_sequence_length}"
        )
    tokens_BS = torch.tensor([ids])
    with torch.no_grad():
        logits_BSV = trained.model.logits(hidden_states(trained, tokens_BS))
    temporary = path.parent / f".{path.name}.tmp"
    try:
        save_file({"input_ids": tokens_BS, "logits": logits_BSV.contiguous()}, temporary)
        temporary.replace(path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        raise ConfigError(f"--logits: {path} cannot be written: {error}") from None
    return list(logits_BSV.shape)


def _report(facts: dict[str, object], as_json: bool) -> None:
    if as_json:
        print(json.dumps(facts))
    else:
        for name, value in facts.items():
            print(f"{name:<12} {value:.4f}" if isinstance(value, float) else f"{name:<12} {value}")
