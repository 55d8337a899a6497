"""The order of documents and samples: pure functions of (seed, sample number), with no state to save.

Random orders come from integer hashes, not from a generator: numpy does not guarantee the same stream in
another version, and all ranks of a cluster need the same order.
"""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from yuan_train.config.errors import DataError

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
FEISTEL_ROUNDS = 6
MAX_BLEND_PERIOD = 1 << 16
BUCKET_BITS = 18
CHUNK = 1 << 18
"""Numbers that a pass over all documents takes at a time."""


def hash_key(*parts: object) -> int:
    """A 64-bit key from values with a stable text form; other parts give an unrelated key."""
    digest = hashlib.sha256("\0".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little")


def mix(value: int) -> int:
    """The finaliser of splitmix64: a bijection of 64-bit integers that looks random."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK
    return value ^ (value >> 31)


def mix_array(values: np.ndarray) -> np.ndarray:
    """`mix` of each element of a uint64 array."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def number_dtype(size: int) -> np.dtype:
    """The dtype of numbers in [0, size): uint32, or int64 from 2**32 on."""
    return np.dtype(np.uint32 if size < 1 << 32 else np.int64)


def permutation(size: int, key: int, out: np.ndarray | None = None) -> np.ndarray:
    """All of [0, size) in the random order of `key`: sorted by their hashes, which are all different.

    Written into `out` of `number_dtype`, if given. Sorted bucket by bucket, it needs 20 MiB beside the
    result, however large that is.
    """
    order = np.empty(size, dtype=number_dtype(size)) if out is None else out
    bits = min((size >> BUCKET_BITS).bit_length(), 16)
    if not bits:
        order[:] = np.argsort(_hashes(0, size, key))
        return order
    counts = np.zeros(1 << bits, dtype=np.int64)
    for first, last in _chunks(size):
        counts += np.bincount(_top_bits(_hashes(first, last, key), bits), minlength=1 << bits)
    ends = np.cumsum(counts)
    free = ends - counts
    for first, last in _chunks(size):
        buckets = _top_bits(_hashes(first, last, key), bits)
        by_bucket = np.argsort(buckets, kind="stable")
        found = np.bincount(buckets, minlength=1 << bits)
        start = free - (np.cumsum(found) - found)
        order[np.arange(last - first) + start[buckets[by_bucket]]] = first + by_bucket
        free += found
    for first, last in itertools.pairwise((0, *ends.tolist())):
        numbers = np.array(order[first:last])
        order[first:last] = numbers[np.argsort(_hashes_of(numbers.astype(np.uint64), key))]
    return order


def _chunks(size: int) -> Iterator[tuple[int, int]]:
    """[0, size) in pieces, to bound the memory of a pass over it."""
    for first in range(0, size, CHUNK):
        yield first, min(first + CHUNK, size)


def _hashes(first: int, last: int, key: int) -> np.ndarray:
    """uint64 hashes of the numbers [first, last): a bijection, so all are different."""
    return _hashes_of(np.arange(first, last, dtype=np.uint64), key)


def _hashes_of(numbers: np.ndarray, key: int) -> np.ndarray:
    return mix_array(numbers * np.uint64(GOLDEN) + np.uint64(key))


def _top_bits(hashes: np.ndarray, bits: int) -> np.ndarray:
    """uint16, which numpy sorts by radix."""
    return (hashes >> np.uint64(64 - bits)).astype(np.uint16)


def permuted(index: int, size: int, key: int) -> int:
    """Element `index` of a random order of [0, size), without making the order.

    A Feistel network over the next even number of bits, applied until the result is below `size` (cycle
    walking): at most four times on average.
    """
    assert 0 <= index < size
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for round_number in range(FEISTEL_ROUNDS):
            scrambled = mix((right + (round_number + 1) * GOLDEN + key) & MASK)
            left, right = right, left ^ (scrambled & mask)
        index = left << half_bits | right
        if index < size:
            return index


def split_size(num_documents: int, split: tuple[float, float], *, where: str) -> int:
    """Number of documents of the validation share of `split`, which is (train, validation).

    Raises DataError when the shares are not fractions that sum to one, or when a share gets no document.
    """
    if len(split) != 2 or not all(0 < share < 1 for share in split) or abs(sum(split) - 1) > 1e-6:
        raise DataError(
            f"data.split: {list(split)}; wanted two shares above 0 that sum to 1, such as [0.98, 0.02]"
        )
    num_validation = round(num_documents * split[1])
    if not 0 < num_validation < num_documents:
        empty = "validation" if num_validation == 0 else "train"
        raise DataError(
            f"{where}: split {list(split)} of {num_documents} documents leaves none for {empty}; "
            "choose other shares, or give more documents"
        )
    return num_validation


def split_documents(num_documents: int, key: int, train: np.ndarray, validation: np.ndarray) -> None:
    """Fill in the document numbers of both parts, each sorted; together they are all documents.

    The validation part are the first of `permutation(num_documents, key)`.
    """
    assert len(train) + len(validation) == num_documents
    limit = _hash_at(len(validation), num_documents, key)
    held = kept = 0
    for first, last in _chunks(num_documents):
        is_held = _hashes(first, last, key) < limit
        for part, found, start in ((validation, is_held, held), (train, ~is_held, kept)):
            numbers = first + np.flatnonzero(found)
            part[start : start + len(numbers)] = numbers
        held += np.count_nonzero(is_held)
        kept = last - held


def _hash_at(index: int, size: int, key: int) -> np.uint64:
    """The hash of element `index` of `permutation(size, key)`, without making that."""
    bits = 16
    counts = np.zeros(1 << bits, dtype=np.int64)
    for first, last in _chunks(size):
        counts += np.bincount(_top_bits(_hashes(first, last, key), bits), minlength=1 << bits)
    ends = np.cumsum(counts)
    bucket = int(np.searchsorted(ends, index, side="right"))
    inside: list[np.ndarray] = []
    for first, last in _chunks(size):
        hashes = _hashes(first, last, key)
        inside.append(hashes[_top_bits(hashes, bits) == bucket])
    return np.uint64(np.sort(np.concatenate(inside))[index - int(ends[bucket] - counts[bucket])])


@dataclass(frozen=True, eq=False)
class EpochOrder:
    """The documents of one epoch in reading order, concatenated to a stream of tokens."""

    documents: np.ndarray  # [D] document numbers
    stream_starts: np.ndarray  # int64 [D + 1], first token of each in the stream, then the stream's length

    def pieces(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Tokens [first, last) of the stream as (document, first, last) inside each document, in order."""
        assert 0 <= first < last <= self.stream_starts[-1]
        position = int(np.searchsorted(self.stream_starts, first, side="right")) - 1
        found = []
        while first < last:
            start, end = int(self.stream_starts[position]), int(self.stream_starts[position + 1])
            stop = min(end, last)
            if stop > first:
                found.append((int(self.documents[position]), first - start, stop - start))
                first = stop
            position += 1
        return found


def fill_epoch_order(
    order: EpochOrder, lengths: Callable[[np.ndarray], np.ndarray], key: int, part: np.ndarray | None
) -> None:
    """Fill in the order of the epoch of `key`, of the documents `part` (None: all).

    `lengths` gives the token counts of documents, by number.
    """
    permutation(len(order.documents), key, out=order.documents)
    order.stream_starts[0] = 0
    for first, last in _chunks(len(order.documents)):
        documents = np.asarray(order.documents[first:last])
        if part is not None:
            order.documents[first:last] = documents = part[documents]
        ends = np.cumsum(lengths(documents)) + order.stream_starts[first]
        order.stream_starts[first + 1 : last + 1] = ends


@dataclass(frozen=True)
class SamplePosition:
    """Where sample `index` of a corpus lies: tokens [first, first + S + 1) of the stream of `epoch`."""

    epoch: int
    first: int


def samples_in(num_tokens: int, sequence_length: int) -> int:
    """Samples of S+1 tokens in a stream; the last label of one is the first input of the next."""
    return max(0, (num_tokens - 1) // sequence_length)


def sample_position(
    index: int, *, num_tokens: int, sequence_length: int, seed: int, identity: str
) -> SamplePosition:
    """Position of sample `index`, which continues over epochs.

    Every epoch reads each of its samples once, in an order of its own. An epoch leaves out the tokens after
    its last full sample; the next leaves out other tokens, because its documents are in another order.
    """
    epoch, number = divmod(index, samples_in(num_tokens, sequence_length))
    key = hash_key("samples", seed, identity, epoch)
    slot = permuted(number, samples_in(num_tokens, sequence_length), key)
    return SamplePosition(epoch=epoch, first=slot * sequence_length)


@dataclass(frozen=True, eq=False)
class BlendOrder:
    """One period of a blend: which corpus each of its samples comes from. Periods repeat.

    `units[c]` of every `sum(units)` samples come from corpus c, and in any prefix the number of samples of c
    is within one of its share.
    """

    units: tuple[int, ...]
    corpora: np.ndarray  # int32 [P], corpus of each sample of the period
    ranks: np.ndarray  # int32 [P], how many samples of that corpus came before it in the period

    def locate(self, index: int) -> tuple[int, int]:
        """(corpus, number within that corpus) of global sample `index`."""
        period, offset = divmod(index, len(self.corpora))
        corpus = int(self.corpora[offset])
        return corpus, period * self.units[corpus] + int(self.ranks[offset])


@functools.lru_cache(maxsize=16)
def blend_order(weights: tuple[float, ...]) -> BlendOrder:
    """The blend of corpora with these weights, which need not sum to one.

    Weights whose shares have a common denominator up to 65,536 (0.7 and 0.3; 1, 2 and 5) are kept exactly.
    Others are rounded to that many parts, at least one each; `units` are the shares in use.
    """
    units = _whole_units(weights)
    corpora = np.array(_chairman_sequence(units), dtype=np.int32)
    ranks = np.zeros(len(corpora), dtype=np.int32)
    for corpus in range(len(units)):
        mine = corpora == corpus
        ranks[mine] = np.arange(np.count_nonzero(mine))
    return BlendOrder(units=units, corpora=corpora, ranks=ranks)


def _whole_units(weights: Sequence[float]) -> tuple[int, ...]:
    # The text form is what the user wrote: 0.1 is a tenth here, not its nearest binary fraction.
    exact = [Fraction(repr(float(weight))) for weight in weights]
    denominator = math.lcm(*(weight.denominator for weight in exact))
    whole = [int(weight * denominator) for weight in exact]
    common = math.gcd(*whole)
    units = [number // common for number in whole]
    total = sum(units)
    if total <= MAX_BLEND_PERIOD:
        return tuple(units)
    return tuple(max(1, round(Fraction(unit * MAX_BLEND_PERIOD, total))) for unit in units)


def _chairman_sequence(units: Sequence[int]) -> list[int]:
    """One period of Tijdeman's chairman assignment (Discrete Math. 32, 1980).

    For k corpora, deviations from the shares stay below 1 - 1/(2k - 2). At each sample, among the corpora
    that are far enough behind their share, take the one that would be overdue first. All terms are scaled by
    P(2k - 2), P the period, to be integers: no rounding, the same order everywhere.
    """
    period, scale = sum(units), max(2 * len(units) - 2, 1)
    if len(units) == 1:
        return [0] * period
    counts = [0] * len(units)
    sequence = []
    for number in range(1, period + 1):
        chosen, best = -1, (0, 1)
        for corpus, unit in enumerate(units):
            behind = scale * (unit * number - period * counts[corpus])
            if behind < period:
                continue
            overdue_in = (scale - 1) * period - behind, unit
            if chosen < 0 or overdue_in[0] * best[1] < best[0] * overdue_in[1]:
                chosen, best = corpus, overdue_in
        assert chosen >= 0, "Tijdeman: some corpus is always far enough behind"
        counts[chosen] += 1
        sequence.append(chosen)
    return sequence
