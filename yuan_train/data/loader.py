"""Batches of packed samples from a blend of corpora: random access by sample number, no state to save.

The batch of step t with G sequences is samples [t G, (t + 1) G) of the global order. A pipeline reads its
sub-range of that, a micro-batch its sub-range of the pipeline's: the loader never needs a rank.

Arrays that the processes of a node share: computed by one of them, memory-mapped by all.

What a large corpus needs beside its files (document orders, splits, what a check of its index has found) is
a function of the corpus and the seed. So it is kept in a folder under a name made of all that it depends on:
beside the corpus or, if nothing can be written there, in the system's folder of temporary files. A folder
gets its name when it is complete; nothing is ever changed, and nothing is removed: delete what no run uses.

Samples may be transformed (`SampleRules`): fill-in-the-middle, and masks of the loss. Both depend only on the
sample and its key, and on no state of a random generator, so a run that is resumed, or partitioned
differently over cards, reads the same samples.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import logging
import math
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import numpy as np

from yuan_train.config.errors import DataError
from yuan_train.config.run import DataConfig
from yuan_train.data.indexed import (
    CHUNK_ENTRIES,
    HEADER,
    IndexedDataset,
    answers_prefix,
    bin_path,
    idx_path,
    strip_suffix,
)
from yuan_train.data.sampler import (
    GOLDEN,
    MASK,
    BlendOrder,
    EpochOrder,
    blend_order,
    fill_epoch_order,
    hash_key,
    mix,
    number_dtype,
    sample_position,
    samples_in,
    split_documents,
    split_size,
)
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


T = TypeVar("T")

SHARED_FROM = 1 << 16
"""Documents from which on a corpus is worth files: below, its arrays take a process 2 MiB at most."""

Shapes = Mapping[str, tuple[int, np.dtype]]
"""Length and dtype of each array of an entry."""


class NodeCache:
    """Arrays and facts by name, in the first of some folders that can be written.

    `folders` are created when needed. Raises DataError if none can be written.
    """

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self._folders = folders

    def arrays(
        self, name: str, shapes: Shapes, fill: Callable[[Mapping[str, np.ndarray]], None]
    ) -> dict[str, np.ndarray]:
        """The arrays of an entry, memory-mapped and read-only.

        `fill` writes into arrays of these shapes, if no process of the node has done so before.
        """

        def write(folder: Path) -> None:
            made = {
                key: np.lib.format.open_memmap(_file(folder, key), mode="w+", dtype=dtype, shape=(length,))
                for key, (length, dtype) in shapes.items()
            }
            fill(made)
            for array in made.values():
                array.flush()

        def read(folder: Path) -> dict[str, np.ndarray]:
            found = {key: np.load(_file(folder, key), mmap_mode="r") for key in shapes}
            for key, (length, dtype) in shapes.items():
                if found[key].shape != (length,) or found[key].dtype != dtype:
                    raise ValueError(f"{key} has shape {found[key].shape}, wanted {length}")
            return found

        return self._entry(name, write, read)

    def facts(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Plain JSON values, made by the first process that asks for them."""
        return self._entry(
            name,
            lambda folder: (folder / "facts.json").write_text(json.dumps(make()), encoding="utf-8"),
            lambda folder: json.loads((folder / "facts.json").read_text(encoding="utf-8")),
        )

    def _entry(self, name: str, write: Callable[[Path], object], read: Callable[[Path], T]) -> T:
        """What `read` makes of the entry's folder, which `write` fills if it is missing or damaged."""
        faults: list[str] = []
        for folder in filter(_is_trusted, self._folders):
            with contextlib.suppress(OSError, ValueError):
                return read(folder / name)
        for folder in self._folders:
            try:
                _make_writable(folder)
                with _locked(folder / f".{name}.lock"):
                    with contextlib.suppress(OSError, ValueError):
                        return read(folder / name)  # Another process has written it in the meantime.
                    _write_entry(folder / name, write)
                return read(folder / name)
            except (OSError, ValueError) as error:
                faults.append(f"{folder}: {getattr(error, 'strerror', None) or error}")
        raise DataError(
            f"the document order of a corpus cannot be written: {'; '.join(faults)}; "
            "free some space there, or make one of them writable"
        )


def shared_or_own(
    cache: NodeCache | None, name: str, shapes: Shapes, fill: Callable[[Mapping[str, np.ndarray]], None]
) -> dict[str, np.ndarray]:
    """Arrays that the node shares or, without a cache, arrays of this process."""
    if cache is not None:
        return cache.arrays(name, shapes, fill)
    made = {key: np.empty(length, dtype=dtype) for key, (length, dtype) in shapes.items()}
    fill(made)
    return made


def cache_of(prefix: str) -> NodeCache:
    """The cache of a corpus: `PREFIX.cache/`, else a folder of this user among the temporary files."""
    temporary = Path(tempfile.gettempdir()) / f"yuan-train-{os.getuid()}"
    return NodeCache((Path(f"{prefix}.cache"), temporary))


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.npy"


def _make_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not _is_trusted(folder) or not os.access(folder, os.W_OK):
        raise PermissionError(13, "cannot be written")


def _is_trusted(folder: Path) -> bool:
    """Whether nobody else can have put an entry here: among temporary files anybody can make a folder."""
    if folder.parent != Path(tempfile.gettempdir()):
        return True
    return folder.is_dir() and folder.stat().st_uid == os.getuid()


def _write_entry(final: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder of another name and rename it; processes of other nodes may do the same."""
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    logger.info("writing %s, once for all processes of this node", final)
    try:
        temporary.mkdir()
        write(temporary)
        if final.exists():
            shutil.rmtree(final, ignore_errors=True)  # Damaged: it could not be read.
        temporary.rename(final)
    except FileExistsError:
        pass
    except OSError:
        if not final.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock while an entry is written. Without it (some network file systems) two nodes may write."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


logger = logging.getLogger(__name__)

FINGERPRINT_TOKENS = 1 << 16
"""Tokens at either end of a file that are compared between ranks."""

CACHED_EPOCHS = 2  # a batch may span two epochs


@dataclass(frozen=True, eq=False)
class Batch:
    """Packed sequences, int64 [B, S]: `targets` is `inputs` shifted by one token, or IGNORED."""

    inputs: np.ndarray
    targets: np.ndarray
    places: np.ndarray | None = None
    """Of preference pairs, int64 [B]: 2 * pair for its chosen row, and one more for its rejected one."""

    @property
    def num_trained(self) -> int:
        """Tokens with a loss."""
        return int((self.targets != IGNORED).sum())


class Samples(Protocol):
    """An endless sequence of samples, read by number."""

    @property
    def masks(self) -> bool:
        """Whether only who reads a batch knows how many terms its mean loss has."""
        ...

    @property
    def fingerprints(self) -> list[str]:
        """What ranks compare of the files, wherever these lie."""
        ...

    def known_terms(self, num_samples: int) -> int:
        """Terms of the mean loss of so many samples; the most there can be if it `masks`."""
        ...

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples [first_sample, first_sample + count). Raises DataError."""
        ...


@dataclass(frozen=True, eq=False)
class Part:
    """The documents of a corpus that are read, and their tokens."""

    num_documents: int
    num_tokens: int
    documents: np.ndarray | None = None
    """Their numbers, sorted; None: all documents of the file."""


@dataclass(frozen=True, kw_only=True)
class SampleSpec:
    """What samples are like, and the seed of their order, whatever corpora they are of."""

    sequence_length: int
    seed: int
    vocab_size: int | None
    """Ids from here on are refused; None: none is."""
    rules: SampleRules | None = None
    """Of each sample; validation data is not rearranged."""
    loss_on_answers: bool = False
    """Whether only tokens have a loss that preprocessing marked."""


class Corpus:
    """Samples of S+1 tokens from some documents of a token file, in a new random order each epoch.

    The seed and `identity` determine the order; `identity` comes from the file's contents, so that a corpus
    keeps its order when it is moved. An epoch's order takes 12 bytes a document: in the files of `cache`,
    which all processes of a node map, or without one in this process.

    Raises DataError if the corpus is shorter than one sample.
    """

    def __init__(
        self, dataset: IndexedDataset, spec: SampleSpec, part: Part, identity: str, cache: NodeCache | None
    ) -> None:
        """Raises DataError as well if answers are asked for and are not marked."""
        assert spec.sequence_length >= 1
        self._answers = open_answers(dataset) if spec.loss_on_answers else None
        self._rules = spec.rules
        self.dataset = dataset
        self.prefix = dataset.prefix
        self.sequence_length = sequence_length = spec.sequence_length
        self._part, self._cache = part, cache
        self._seed = spec.seed
        self._identity = identity
        self._vocab_size = spec.vocab_size
        self._epochs: dict[int, EpochOrder] = {}
        self.num_tokens = part.num_tokens
        self.samples_per_epoch = samples_in(self.num_tokens, sequence_length)
        if not self.samples_per_epoch:
            raise DataError(
                f"{self.prefix}: {self.num_tokens} tokens in {self.num_documents} documents, but "
                f"one sample needs sequence_length + 1 = {sequence_length + 1}; give more text or a shorter "
                "sequence_length"
            )

    @cached_property
    def fingerprint(self) -> str:
        """What ranks compare of a corpus, wherever its files lie: lengths, and the tokens at both ends."""
        total = self.dataset.num_tokens
        ends = ((0, min(total, FINGERPRINT_TOKENS)), (max(total - FINGERPRINT_TOKENS, 0), total))
        digest = hashlib.sha256()
        for first, last in ends:
            digest.update(self.dataset.tokens(first, last).tobytes())
            if self._answers is not None:
                digest.update(self._answers.tokens(first, last).tobytes())
        size = f"{self.num_documents} documents, {self.num_tokens} tokens"
        return f"{size}, lengths {self._identity}, content {digest.hexdigest()[:16]}"

    @property
    def num_documents(self) -> int:
        """Documents of the corpus that are read."""
        return self._part.num_documents

    def sample(self, index: int) -> np.ndarray:
        """Token ids int64 [S + 1] of sample `index`, which continues over epochs; rearranged by the rules.

        Raises DataError when an id is beyond the vocabulary.
        """
        ranges = self._ranges(index)
        stored = np.concatenate([self.dataset.tokens(first, last) for first, last in ranges])
        tokens = stored.astype(np.int64)
        largest, smallest = int(tokens.max()), int(tokens.min())
        if smallest < 0:
            raise DataError(
                f"{self.prefix}: token id {smallest}; wanted ids from 0 on; preprocess the text again"
            )
        if self._vocab_size is not None and largest >= self._vocab_size:
            raise DataError(
                f"{self.prefix}: token id {largest} is beyond the model's vocabulary of {self._vocab_size}; "
                "preprocess with the tokenizer of this model, or raise vocab_size in the model file"
            )
        if self._rules is None:
            return tokens
        return self._rules.rearrange(tokens, hash_key("fim", self._seed, self._identity, index))

    def targets(self, tokens: np.ndarray, index: int) -> np.ndarray:
        """Targets int64 [S] of sample `index` [S + 1]; IGNORED where rules or answers mask the loss."""
        targets = tokens[1:] if self._rules is None else self._rules.targets(tokens)
        if self._answers is None:
            return targets
        ranges = self._ranges(index)
        is_answer = np.concatenate([self._answers.tokens(first, last) for first, last in ranges])
        return np.where(is_answer[1:] != 0, targets, IGNORED)

    def _ranges(self, index: int) -> list[tuple[int, int]]:
        """The tokens of the file, [first, last) each, that a sample consists of."""
        position = sample_position(
            index,
            num_tokens=self.num_tokens,
            sequence_length=self.sequence_length,
            seed=self._seed,
            identity=self._identity,
        )
        order = self._epoch(position.epoch)
        pieces = order.pieces(position.first, position.first + self.sequence_length + 1)
        starts = self.dataset.document_starts(np.array([document for document, _, _ in pieces]))
        return [
            (int(start) + first, int(start) + last)
            for start, (_, first, last) in zip(starts, pieces, strict=True)
        ]

    @property
    def masks(self) -> bool:
        """Whether some tokens have no loss."""
        return self._answers is not None or (self._rules is not None and self._rules.masks)

    def _epoch(self, epoch: int) -> EpochOrder:
        if epoch not in self._epochs:
            while len(self._epochs) >= CACHED_EPOCHS:
                del self._epochs[next(iter(self._epochs))]
            self._epochs[epoch] = self._make_epoch(epoch)
        return self._epochs[epoch]

    def _make_epoch(self, epoch: int) -> EpochOrder:
        key = hash_key("documents", self._seed, self._identity, epoch)
        size = self.num_documents
        shapes = {
            "documents": (size, number_dtype(self.dataset.num_documents)),
            "stream_starts": (size + 1, np.dtype(np.int64)),
        }

        def fill(arrays: Mapping[str, np.ndarray]) -> None:
            fill_epoch_order(EpochOrder(**arrays), self.dataset.document_lengths, key, self._part.documents)

        # The key knows the lengths of all sequences; the part's size knows the split.
        return EpochOrder(**shared_or_own(self._cache, f"order-{key:016x}-{size}", shapes, fill))


class Blend:
    """Several corpora read in proportion to their weights, as one endless sequence of samples."""

    def __init__(self, corpora: Sequence[Corpus], weights: Sequence[float]) -> None:
        assert len(corpora) == len(weights) >= 1
        self.corpora = tuple(corpora)
        self.order: BlendOrder = blend_order(tuple(weights))

    @property
    def weights(self) -> tuple[float, ...]:
        """Share of each corpus; they sum to one."""
        total = sum(self.order.units)
        return tuple(unit / total for unit in self.order.units)

    @property
    def masks(self) -> bool:
        """Whether some tokens have no loss, so that only who reads a batch knows how many have one."""
        return any(corpus.masks for corpus in self.corpora)

    @property
    def fingerprints(self) -> list[str]:
        """What ranks compare of each corpus."""
        return [corpus.fingerprint for corpus in self.corpora]

    def known_terms(self, num_samples: int) -> int:
        """Tokens of so many samples."""
        return num_samples * self.corpora[0].sequence_length

    def locate(self, sample: int) -> tuple[int, int]:
        """(corpus, sample number within it) of a sample of the global order."""
        return self.order.locate(sample)

    def batch(self, first_sample: int, count: int) -> Batch:
        """Samples [first_sample, first_sample + count) of the global order.

        Raises DataError when a token id is beyond the vocabulary.
        """
        assert first_sample >= 0 and count >= 1
        located = [self.locate(number) for number in range(first_sample, first_sample + count)]
        samples = [
            (self.corpora[corpus], index, self.corpora[corpus].sample(index)) for corpus, index in located
        ]
        # Copies, so that neither holds the other's memory and both are contiguous.
        return Batch(
            inputs=np.stack([tokens[:-1] for _, _, tokens in samples]),
            targets=np.stack([corpus.targets(tokens, index) for corpus, index, tokens in samples]),
        )


def open_corpora(
    sources: Sequence[tuple[str, float]],
    spec: SampleSpec,
    *,
    split: tuple[float, float] | None = None,
    part: Literal["train", "validation"] = "train",
) -> Blend:
    """Opens (prefix, weight) pairs as one blend; weights need not sum to one.

    With `split`, each corpus is divided by document into (train, validation) shares and `part` is read;
    without it `part` only gives the order another seed. The division depends on the corpus alone, not on the
    seed: a document held out once stays held out in a later run.

    Raises DataError for missing or incomplete files, weights that are not above zero, a share without
    documents, and a corpus shorter than one sample.
    """
    _check_sources(sources)
    if spec.rules is not None and part == "validation":
        spec = replace(spec, rules=replace(spec.rules, fim=None))
    corpora = []
    identities: dict[str, int] = {}
    for prefix, _ in sources:
        dataset, content, cache = _open(prefix)
        # A corpus listed twice must not be read twice in the same order.
        copy = identities[content] = identities.get(content, -1) + 1
        documents = _part_of(dataset, split, part, content, cache)
        corpora.append(Corpus(dataset, spec, documents, f"{content}/{copy}/{part}", cache))
    blend = Blend(corpora, [weight for _, weight in sources])
    for corpus, weight in zip(corpora, blend.weights, strict=True):
        logger.info(
            "%s (%s): %d documents, %d tokens, %d samples per epoch%s",
            corpus.prefix,
            part,
            corpus.num_documents,
            corpus.num_tokens,
            corpus.samples_per_epoch,
            "" if len(corpora) == 1 else f", {weight:.4%} of the samples",
        )
    return blend


MARKS = 1 << 20
"""Read at a time to find one that is set."""


def open_answers(dataset: IndexedDataset) -> IndexedDataset:
    """Which tokens of a corpus are part of an answer: 1 or 0 for each, in files beside it.

    Raises DataError if they are missing, or of another corpus.
    """
    prefix = answers_prefix(dataset.prefix)
    if not idx_path(prefix).exists():
        raise DataError(
            f"{prefix}.idx: missing, but data.loss_on_answers needs it; make the corpus from chats with "
            "yuan-train preprocess --messages-key KEY"
        )
    answers = IndexedDataset(prefix)
    if not np.array_equal(answers.sequence_lengths(), dataset.sequence_lengths()):
        raise DataError(f"{prefix}: belongs to another corpus than {dataset.prefix}; preprocess again")
    pieces = range(0, answers.num_tokens, MARKS)
    if not any(answers.tokens(first, min(first + MARKS, answers.num_tokens)).any() for first in pieces):
        raise DataError(f"{prefix}: marks no token as part of an answer; wanted chats that have answers")
    return answers


def _check_sources(sources: Sequence[tuple[str, float]]) -> None:
    if not sources:
        raise DataError("data: no corpora; name at least one {prefix: PATH, weight: 1.0}")
    for prefix, weight in sources:
        if not math.isfinite(weight) or weight <= 0:
            raise DataError(
                f"{prefix}: weight {weight}; wanted a number above 0; remove the corpus to skip it"
            )


def _open(prefix: str) -> tuple[IndexedDataset, str, NodeCache | None]:
    """A corpus, the identity of its contents, and the cache of one that is large.

    Of a large one, only one process of a node reads all of the index, to check it.
    """
    stem = strip_suffix(prefix)
    try:
        index, tokens = idx_path(stem).stat(), bin_path(stem).stat()
    except OSError:
        index = tokens = None
    if index is None or tokens is None or index.st_size < HEADER.size + 12 * SHARED_FROM:
        dataset = IndexedDataset(stem)
        return dataset, _content_identity(dataset), None
    cache = cache_of(stem)

    def check() -> dict[str, Any]:
        dataset = IndexedDataset(stem)
        return {"num_tokens": dataset.num_tokens, "content": _content_identity(dataset)}

    version = hash_key(Path(stem).name, index.st_size, index.st_mtime_ns, tokens.st_size, tokens.st_mtime_ns)
    found = cache.facts(f"checked-{version:016x}", check)
    return IndexedDataset(stem, num_tokens=found["num_tokens"]), found["content"], cache


def _part_of(
    dataset: IndexedDataset,
    split: tuple[float, float] | None,
    part: Literal["train", "validation"],
    content: str,
    cache: NodeCache | None,
) -> Part:
    if split is None:
        return Part(dataset.num_documents, dataset.num_tokens)
    size = split_size(dataset.num_documents, split, where=dataset.prefix)
    sizes = {"train": dataset.num_documents - size, "validation": size}
    key = hash_key("split", content)
    dtype = number_dtype(dataset.num_documents)

    def fill(arrays: Mapping[str, np.ndarray]) -> None:
        split_documents(dataset.num_documents, key, arrays["train"], arrays["validation"])
        for number, name in enumerate(sizes):
            arrays["num_tokens"][number] = _count_tokens(dataset, arrays[name])

    shapes = {name: (length, dtype) for name, length in sizes.items()} | {
        "num_tokens": (2, np.dtype(np.int64))
    }
    arrays = shared_or_own(cache, f"split-{key:016x}-{size}", shapes, fill)
    return Part(sizes[part], int(arrays["num_tokens"][list(sizes).index(part)]), arrays[part])


def _count_tokens(dataset: IndexedDataset, documents: np.ndarray) -> int:
    starts = range(0, len(documents), CHUNK_ENTRIES)
    return sum(int(dataset.document_lengths(documents[i : i + CHUNK_ENTRIES]).sum()) for i in starts)


def _content_identity(dataset: IndexedDataset) -> str:
    """Hash of the corpus's sequence lengths: cheap, and the same wherever the files are."""
    digest = hashlib.sha256(f"{dataset.num_documents} {dataset.num_tokens}".encode())
    lengths = dataset.sequence_lengths()
    for first in range(0, len(lengths), CHUNK_ENTRIES):
        digest.update(lengths[first : first + CHUNK_ENTRIES].tobytes())
    return digest.hexdigest()[:16]
