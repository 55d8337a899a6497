"""What happens to a packed sample before it is trained: fill-in-the-middle, and tokens without a loss.

Both are functions of the sample and its key alone. Nothing is drawn from a stream that must be saved, so a
run that is resumed, or cut otherwise over cards, reads the same samples.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from yuan_train.config.errors import DataError
from yuan_train.config.run import DataConfig
from yuan_train.data.sampler import GOLDEN, MASK, mix
from yuan_train.data.tokenizer import Tokenizer

IGNORED = -100
"""Target of a token that is not trained; the model's IGNORE_INDEX."""

SENTINELS = ("<FIM_PREFIX>", "<FIM_SUFFIX>", "<FIM_MIDDLE>")
SEPARATOR = "<sep>"


@dataclass(frozen=True)
class FillInTheMiddle:
    """Rates, and the tokenizer that the samples were made with (Bavarian et al. 2022; Yuan 2.0)."""

    tokenizer: Tokenizer
    rate: float
    spm_rate: float
    prefix_id: int
    suffix_id: int
    middle_id: int


@dataclass(frozen=True)
class SampleRules:
    """What is done to every sample of a corpus."""

    eod_id: int
    fim: FillInTheMiddle | None = None
    separator_id: int | None = None
    """Train only from the first of these on, in documents that have one."""
    mask_after_eod: bool = False

    @property
    def masks(self) -> bool:
        """Whether some tokens are not trained."""
        return self.separator_id is not None or self.mask_after_eod

    def without_fim(self) -> SampleRules:
        """For validation: the text as it is."""
        return replace(self, fim=None)

    def rearrange(self, tokens: np.ndarray, key: int) -> np.ndarray:
        """Tokens int64 [S + 1] with some documents turned into fill-in-the-middle; the same length."""
        return tokens if self.fim is None else _fill_in_the_middle(tokens, self.fim, self.eod_id, key)

    def targets(self, tokens: np.ndarray) -> np.ndarray:
        """The targets int64 [S] of a sample [S + 1]: the next tokens, IGNORED where none is trained."""
        targets = tokens[1:].copy()
        if self.separator_id is not None:
            targets[~_after_separator(tokens[1:], self.eod_id, self.separator_id)] = IGNORED
        if self.mask_after_eod:
            targets[tokens[:-1] == self.eod_id] = IGNORED
        return targets


def sample_rules(data: DataConfig, tokenizer: Tokenizer | None) -> SampleRules | None:
    """The rules that a run asks for; None if samples are trained as they are.

    Raises DataError when the tokenizer lacks a special token that they need.
    """
    if not data.fim_rate and not data.masks:
        return None
    assert tokenizer is not None, "run_laws"
    fim = None
    if data.fim_rate:
        prefix, suffix, middle = (_need(tokenizer, word, "data.fim_rate") for word in SENTINELS)
        fim = FillInTheMiddle(tokenizer, data.fim_rate, data.fim_spm_rate, prefix, suffix, middle)
    separator = None
    if data.loss_after_separator:
        separator = _need(tokenizer, SEPARATOR, "data.loss_after_separator")
    return SampleRules(tokenizer.eod_id, fim, separator, data.mask_loss_after_eod)


def _need(tokenizer: Tokenizer, word: str, why: str) -> int:
    number = tokenizer.piece_id(word)
    if number is None:
        raise DataError(f"{tokenizer.path}: has no {word}, which {why} needs; use a tokenizer that has it")
    return number


# --- tokens without a loss -------------------------------------------------------------------------------


def _after_separator(labels: np.ndarray, eod_id: int, separator_id: int) -> np.ndarray:
    """bool [S], True where a label is trained: from the first separator of its document, that one included,
    through the end; everything in a document without one.

    Every document is treated alike, those cut by the sample's ends too (the published code leaves the last
    one unmasked, and all of them where the sample ends no document).
    """
    trained = np.ones(len(labels), dtype=bool)
    first = 0
    for last in (*(np.flatnonzero(labels == eod_id) + 1), len(labels)):
        separators = np.flatnonzero(labels[first:last] == separator_id)
        if len(separators):
            trained[first : first + separators[0]] = False
        first = last
    return trained


# --- fill-in-the-middle ----------------------------------------------------------------------------------


class _Draws:
    """Random numbers of one sample, by their number alone."""

    def __init__(self, key: int) -> None:
        self._key = key

    def whole(self, place: int, below: int) -> int:
        """An integer in [0, below)."""
        return mix(self._key + (place + 1) * GOLDEN & MASK) % below

    def share(self, place: int) -> float:
        """A number in [0, 1)."""
        return self.whole(place, 1 << 53) / (1 << 53)


DRAWS_PER_DOCUMENT = 4


def _fill_in_the_middle(tokens: np.ndarray, fim: FillInTheMiddle, eod_id: int, key: int) -> np.ndarray:
    draws = _Draws(key)
    parts: list[np.ndarray] = []
    first = 0
    for number, last in enumerate((*np.flatnonzero(tokens == eod_id), len(tokens))):
        document = tokens[first:last]
        place = number * DRAWS_PER_DOCUMENT
        if len(document) and draws.share(place) < fim.rate:
            document = _rearranged(document, fim, draws, place)
        parts += [document, tokens[last : last + 1]]
        first = last + 1
    return np.concatenate(parts)[: len(tokens)]


def _rearranged(document: np.ndarray, fim: FillInTheMiddle, draws: _Draws, place: int) -> np.ndarray:
    """One document in another order, cut between characters; as it was where that cannot be done well.

    Never shorter than it was, so that a sample needs no padding: cutting words and adding three sentinels
    makes it longer, and the rare other case stays as it is. So do documents that hold special tokens (a cut
    might go through them) or half a character (the sample's ends may cut one).
    """
    if np.isin(document, list(fim.tokenizer.specials.values())).any():
        return document
    text = fim.tokenizer.decode(document.tolist())
    if "\N{REPLACEMENT CHARACTER}" in text:
        return document
    low, high = sorted(draws.whole(place + i, len(text) + 1) for i in (1, 2))
    prefix, middle, suffix = map(fim.tokenizer.encode, (text[:low], text[low:high], text[high:]))
    if draws.share(place + 3) < fim.spm_rate:
        order = [fim.prefix_id, fim.suffix_id, *suffix, fim.middle_id, *prefix, *middle]
    else:
        order = [fim.prefix_id, *prefix, fim.suffix_id, *suffix, fim.middle_id, *middle]
    return np.array(order, dtype=document.dtype) if len(order) >= len(document) else document
