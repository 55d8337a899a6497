"""Transformations of packed samples before training: fill-in-the-middle, and masks of the loss.

Both depend only on the sample and its key, and on no state of a random generator, so a run that is resumed,
or partitioned differently over cards, reads the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from yuan_train.config.errors import DataError
from yuan_train.config.run import DataConfig
from yuan_train.data.sampler import GOLDEN, MASK, mix
from yuan_train.data.tokenizer import Tokenizer

IGNORED = -100
"""Target of a token without a loss; the model's IGNORE_INDEX."""

SENTINELS = ("<FIM_PREFIX>", "<FIM_SUFFIX>", "<FIM_MIDDLE>")
SEPARATOR = "<sep>"


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rates, sentinels and the tokenizer of the samples (Bavarian et al. 2022; Yuan 2.0)."""

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix_id: int
    suffix_id: int
    middle_id: int


@dataclass(frozen=True)
class SampleRules:
    """Transformations of every sample of a corpus."""

    eod_id: int
    fim: FillInTheMiddle | None = None
    separator_id: int | None = None
    """In documents that contain it, only the tokens from the first one on have a loss."""
    mask_after_eod: bool = False

    @property
    def masks(self) -> bool:
        """Whether some tokens have no loss."""
        return self.separator_id is not None or self.mask_after_eod

    def without_fim(self) -> SampleRules:
        """These rules without fill-in-the-middle, for validation."""
        return replace(self, fim=None)

    def rearrange(self, tokens: np.ndarray, key: int) -> np.ndarray:
        """Tokens [S + 1] with some documents rearranged to fill-in-the-middle, int64 of the same length.

        `key` seeds the choice of documents and of their parts.
        """
        return tokens if self.fim is None else _fill_in_the_middle(tokens, self.fim, self.eod_id, key)

    def targets(self, tokens: np.ndarray) -> np.ndarray:
        """The targets int64 [S] of a sample [S + 1]: the next tokens, IGNORED where they have no loss."""
        targets = tokens[1:].copy()
        if self.separator_id is not None:
            targets[~_after_separator(tokens[1:], self.eod_id, self.separator_id)] = IGNORED
        if self.mask_after_eod:
            targets[tokens[:-1] == self.eod_id] = IGNORED
        return targets


def sample_rules(data: DataConfig, tokenizer: Tokenizer | None) -> SampleRules | None:
    """The rules of a run; None if samples are trained as stored.

    Raises DataError when the tokenizer lacks a special token that the rules need.
    """
    if not data.fim_rate and not data.masks:
        return None
    assert tokenizer is not None, "validate_run"
    fim = None
    if data.fim_rate:
        prefix, suffix, middle = (_special_id(tokenizer, word, "data.fim_rate") for word in SENTINELS)
        fim = FillInTheMiddle(tokenizer, data.fim_rate, data.fim_spm_rate, prefix, suffix, middle)
    separator = None
    if data.loss_after_separator:
        separator = _special_id(tokenizer, SEPARATOR, "data.loss_after_separator")
    return SampleRules(tokenizer.eod_id, fim, separator, data.mask_loss_after_eod)


def _special_id(tokenizer: Tokenizer, word: str, option: str) -> int:
    number = tokenizer.piece_id(word)
    if number is None:
        raise DataError(f"{tokenizer.path}: has no {word}, which {option} needs; use a tokenizer that has it")
    return number


# --- tokens without a loss -------------------------------------------------------------------------------


def _after_separator(labels: np.ndarray, eod_id: int, separator_id: int) -> np.ndarray:
    """bool [S], True where a label has a loss: from the first separator of its document, that one included,
    through the end; everywhere in a document without one.

    This holds for documents cut by the sample's ends too (the published code leaves the last one unmasked,
    and all of them if no document ends inside the sample).
    """
    has_loss = np.ones(len(labels), dtype=bool)
    first = 0
    for last in (*(np.flatnonzero(labels == eod_id) + 1), len(labels)):
        separators = np.flatnonzero(labels[first:last] == separator_id)
        if len(separators):
            has_loss[first : first + separators[0]] = False
        first = last
    return has_loss


# --- fill-in-the-middle ----------------------------------------------------------------------------------


class _SampleRandom:
    """Random numbers of one sample, each a function of the sample's key and of its index."""

    def __init__(self, key: int) -> None:
        self._key = key

    def integer(self, index: int, below: int) -> int:
        """An integer in [0, below)."""
        return mix(self._key + (index + 1) * GOLDEN & MASK) % below

    def uniform(self, index: int) -> float:
        """A number in [0, 1)."""
        return self.integer(index, 1 << 53) / (1 << 53)


DRAWS_PER_DOCUMENT = 4


def _fill_in_the_middle(tokens: np.ndarray, fim: FillInTheMiddle, eod_id: int, key: int) -> np.ndarray:
    random = _SampleRandom(key)
    parts: list[np.ndarray] = []
    first = 0
    for number, last in enumerate((*np.flatnonzero(tokens == eod_id), len(tokens))):
        document = tokens[first:last]
        index = number * DRAWS_PER_DOCUMENT
        if len(document) and random.uniform(index) < fim.rate:
            document = _rearranged(document, fim, random, index)
        parts += [document, tokens[last : last + 1]]
        first = last + 1
    return np.concatenate(parts)[: len(tokens)]


def _rearranged(document: np.ndarray, fim: FillInTheMiddle, random: _SampleRandom, index: int) -> np.ndarray:
    """One document rearranged to fill-in-the-middle, split between characters; unchanged if that is not safe.

    Never shorter than before, so that a sample needs no padding: splitting words and adding three sentinels
    makes it longer, and in the rare other case it stays unchanged. So do documents that contain special
    tokens (a split might fall inside one) or part of a character (the sample's ends may cut one).
    """
    if np.isin(document, list(fim.tokenizer.specials.values())).any():
        return document
    text = fim.tokenizer.decode(document.tolist())
    if "\N{REPLACEMENT CHARACTER}" in text:
        return document
    low, high = sorted(random.integer(index + i, len(text) + 1) for i in (1, 2))
    prefix, middle, suffix = map(fim.tokenizer.encode, (text[:low], text[low:high], text[high:]))
    if random.uniform(index + 3) < fim.spm_rate:
        order = [fim.prefix_id, fim.suffix_id, *suffix, fim.middle_id, *prefix, *middle]
    else:
        order = [fim.prefix_id, *prefix, fim.suffix_id, *suffix, fim.middle_id, *middle]
    return np.array(order, dtype=document.dtype) if len(order) >= len(document) else document
