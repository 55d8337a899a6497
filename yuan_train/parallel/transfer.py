"""Weights from one plan to another: which rank sends which slice of which parameter, in what buckets.

Every element of a part that a target holds comes once, from one of the ranks that hold it, so that the bytes
are those of the targets' parts exactly: nothing is gathered, and no more than a slice is sent. The table
follows from the two plans alone, and is made once.

A link joins ranks of several roles of a job, each of which has a process group world of its own (`RankLink`).
It is a gloo group beside these worlds, over ranks of the job: for messages of the controller, and for weights
to an engine. The loss of a rank is seen by whoever waits for it; the other roles' worlds go on.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.config.model import ModelConfig, ParameterSpec, ends, half_of, layer_table
from yuan_train.config.plan import Plan, StagePlan, expert_ranges
from yuan_train.parallel.board import RolePosition
from yuan_train.parallel.shard import Shard, find_shard
from yuan_train.parallel.transport import PATIENCE, LostPeer, is_lost_connection, without_frames

MAX_BYTES = 64 * 2**20
"""The most bytes of one message: enough to fill a link, and what is held beside the weights for a pair."""

Holdings = Mapping[int, Mapping[str, Shard]]
"""By rank: the shard that it holds of each parameter, by global name."""


class Move(NamedTuple):
    """A box of a global tensor on its way between two ranks."""

    name: str
    source: int
    target: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the box."""
        return math.prod(self.sizes)


# --- who holds what --------------------------------------------------------------------------------------


def plan_holdings(plan: Plan, first_rank: int = 0) -> dict[int, dict[str, Shard]]:
    """The shards of every rank of a plan, whose rank 0 is `first_rank`; as `parallelize` builds them.

    Parts without elements are left out, as those of a rank that holds none of a layer's experts.
    """
    found: dict[int, dict[str, Shard]] = defaultdict(dict)
    for stage in plan.stages:
        experts = expert_ranges(plan.model, stage)
        for replica in stage.replicas:
            for index, rank in enumerate(replica):
                own = None
                if plan.divides_experts:
                    own = (0, plan.model.num_experts) if experts is None else experts[index]
                held = found[first_rank + rank]
                for name, shard in _stage_shards(plan.model, stage, index, len(replica), own):
                    if math.prod(shard.local_shape):
                        held[name] = shard
    return dict(found)


def _stage_shards(
    model: ModelConfig, stage: StagePlan, index: int, count: int, experts: tuple[int, int] | None
) -> Iterator[tuple[str, Shard]]:
    outside, inside = _shards(model, index, count, experts)
    if stage.embedding:
        yield "embedding.weight", outside["embedding.weight"]
    first, last = stage.layers
    for layer in range(math.floor(first), math.ceil(last)):
        for name, shard in inside.items():
            begin = layer + (0.5 if half_of(name) == "feed_forward" else 0.0)
            if first <= begin < last:
                yield f"layers.{layer}.{name}", shard
    if stage.head:
        for name, shard in outside.items():
            # A tied embedding is the head's matrix too.
            if name != "embedding.weight" or model.tie_embeddings:
                yield name, shard


@functools.lru_cache(maxsize=256)
def _shards(
    model: ModelConfig, index: int, count: int, experts: tuple[int, int] | None
) -> tuple[dict[str, Shard], dict[str, Shard]]:
    """The shards of a rank of the parameters outside the layers, and of those of any layer."""

    def shards(parameters: Sequence[ParameterSpec]) -> dict[str, Shard]:
        return {
            p.name: find_shard(
                p.name,
                p.shape,
                {p.name.rpartition(".")[0]: p.sharding},
                {p.name.rpartition(".")[0]: p.blocks},
                index=index,
                count=count,
                experts=experts,
            )
            for p in parameters
        }

    return shards(ends(model)), shards(layer_table(model))


class _Span(NamedTuple):
    """A range of a shard along the dim in which its tensor is divided: global [start, end), and where it
    begins in the part."""

    start: int
    end: int
    local: int


@functools.lru_cache(maxsize=65536)
def _spans(shard: Shard, dim: int) -> tuple[_Span, ...]:
    if shard.rows is not None:
        return (_Span(*shard.rows, 0),)
    if shard.dim is None:
        return (_Span(0, shard.shape[dim], 0),)
    block = shard.shape[dim] // shard.blocks
    size = block // shard.count
    starts = (b * block + shard.index * size for b in range(shard.blocks))
    return tuple(_Span(start, start + size, b * size) for b, start in enumerate(starts))


def _dim_of(shards: Sequence[Shard]) -> int:
    """The dim in which some of a parameter's shards divide it; 0 if none does."""
    dims = {0 if shard.rows is not None else shard.dim for shard in shards} - {None}
    assert len(dims) <= 1, "a parameter is divided in one dim"
    return next(iter(dims), 0) or 0


# --- the table -------------------------------------------------------------------------------------------


def transfer_table(
    sources: Holdings, targets: Holdings, *, node_of: Callable[[int], str] = str
) -> tuple[Move, ...]:
    """The moves that fill every target's part once; ranks are those of the job.

    Of the ranks that hold an element, one on the target's node sends it if there is one, else the one that
    has sent least so far. Raises KeyError for a parameter that no source holds.
    """
    owners: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
    for rank, held in sorted(sources.items()):
        for name, shard in held.items():
            owners[name].append((rank, shard))
    wanted: dict[str, list[tuple[int, Shard]]] = defaultdict(list)
    for rank, held in sorted(targets.items()):
        for name, shard in held.items():
            wanted[name].append((rank, shard))
    nodes = {rank: node_of(rank) for rank in (*sources, *targets)}
    load = dict.fromkeys(sources, 0)
    table: list[Move] = []
    for name, takers in wanted.items():
        if name not in owners:
            raise KeyError(f"no rank of the sources holds {name}")
        dim = _dim_of([shard for _, shard in (*owners[name], *takers)])
        cells = _Cells(owners[name], dim)
        shape = takers[0][1].shape
        for target, shard in takers:
            for span in _spans(shard, dim):
                for start, end, holders in cells.between(span.start, span.end):
                    near = [r for r in holders if nodes[r] == nodes[target]] or holders
                    source = min(near, key=lambda rank: (load[rank], rank))
                    offsets = tuple(start if d == dim else 0 for d in range(len(shape)))
                    sizes = tuple(end - start if d == dim else n for d, n in enumerate(shape))
                    move = Move(name, source, target, offsets, sizes)
                    load[source] += move.num_elements
                    table.append(move)
    return tuple(table)


class _Cells:
    """The ranges of a parameter between all borders of its owners' shards, and who holds each."""

    def __init__(self, owners: Sequence[tuple[int, Shard]], dim: int) -> None:
        spans = [(span, rank) for rank, shard in owners for span in _spans(shard, dim)]
        self._borders = sorted({border for span, _ in spans for border in span[:2]})
        place = {border: i for i, border in enumerate(self._borders)}
        self._holders: list[list[int]] = [[] for _ in self._borders]
        for span, rank in spans:
            for cell in range(place[span.start], place[span.end]):
                self._holders[cell].append(rank)

    def between(self, start: int, end: int) -> Iterator[tuple[int, int, list[int]]]:
        """The parts of [start, end): global range, and the ranks that hold it."""
        cell = bisect.bisect_right(self._borders, start) - 1
        while start < end:
            last = min(end, self._borders[cell + 1])
            yield start, last, self._holders[cell]
            start, cell = last, cell + 1


def local_slices(shard: Shard, move: Move) -> tuple[slice, ...]:
    """Where a move's box lies in the local tensor of a shard. Raises ValueError if it does not."""
    dim = _dim_of((shard,))
    start = move.offsets[dim]
    for span in _spans(shard, dim):
        if span.start <= start and start + move.sizes[dim] <= span.end:
            place = span.local + start - span.start
            return tuple(
                slice(place, place + n) if d == dim else slice(o, o + n)
                for d, (o, n) in enumerate(zip(move.offsets, move.sizes, strict=True))
            )
    raise ValueError(f"{move} is not inside {shard}")


# --- buckets ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MoveBucket:
    """What one message between two ranks carries: boxes, one after the other."""

    source: int
    target: int
    moves: tuple[Move, ...]

    @property
    def num_elements(self) -> int:
        """Elements of the message."""
        return sum(move.num_elements for move in self.moves)


def make_buckets(table: Sequence[Move], *, itemsize: int, limit: int = MAX_BYTES) -> tuple[MoveBucket, ...]:
    """The moves of each pair of ranks in messages of at most `limit` bytes, in the table's order.

    A box that is larger is cut by rows, and a row that is larger is a message of its own.
    """
    most = max(limit // itemsize, 1)
    pairs: dict[tuple[int, int], list[Move]] = defaultdict(list)
    for move in table:
        pairs[move.source, move.target] += _cut(move, most)
    buckets: list[MoveBucket] = []
    for (source, target), moves in pairs.items():
        own: list[Move] = []
        size = 0
        for move in moves:
            if own and size + move.num_elements > most:
                buckets.append(MoveBucket(source, target, tuple(own)))
                own, size = [], 0
            own.append(move)
            size += move.num_elements
        buckets.append(MoveBucket(source, target, tuple(own)))
    return tuple(buckets)


def _cut(move: Move, most: int) -> Iterator[Move]:
    """A box in pieces of at most `most` elements, whole rows each."""
    row = move.num_elements // move.sizes[0]
    rows = max(most // row, 1)
    for first in range(0, move.sizes[0], rows):
        offsets = (move.offsets[0] + first, *move.offsets[1:])
        yield move._replace(offsets=offsets, sizes=(min(rows, move.sizes[0] - first), *move.sizes[1:]))


View = Callable[[Move], torch.Tensor]
"""Where a rank holds what a move carries."""


def view_of(tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]) -> View:
    """That of a rank's parts, by name."""
    return lambda move: tensors[move.name][local_slices(shards[move.name], move)]


def rounds_of(buckets: Sequence[MoveBucket]) -> list[list[MoveBucket]]:
    """The first bucket of each pair of ranks, then the second of each, and so on."""
    rounds: list[list[MoveBucket]] = []
    counts: dict[tuple[int, int], int] = {}
    for bucket in buckets:
        number = counts.get((bucket.source, bucket.target), 0)
        counts[bucket.source, bucket.target] = number + 1
        if number == len(rounds):
            rounds.append([])
        rounds[number].append(bucket)
    return rounds


@torch.no_grad()
def pack(bucket: MoveBucket, view: View, *, dtype: torch.dtype) -> torch.Tensor:
    """The boxes of a bucket, flat [n], rounded to `dtype`; `view` is the source's."""
    flat = torch.empty(bucket.num_elements, dtype=dtype, device=view(bucket.moves[0]).device)
    for move, part in _parts(bucket, flat):
        part.copy_(view(move))
    return flat


@torch.no_grad()
def unpack(bucket: MoveBucket, flat: torch.Tensor, view: View) -> None:
    """Copy the boxes of a bucket, as `pack` laid them out, to where the target holds them."""
    for move, part in _parts(bucket, flat):
        view(move).copy_(part)


# --- what has changed since --------------------------------------------------------------------------------

WHOLE = -1
"""In place of a number of elements: all of them, one after the other."""
BLOCK = 1 << 16
"""Elements of a bucket in which 16 bits say where one is."""
_BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def encode(flat: torch.Tensor, sent: torch.Tensor | None) -> tuple[int, torch.Tensor]:
    """A message of bytes that makes flat [n] of what was `sent` before, and of how many elements it has the
    new bits: WHOLE if nothing was sent, or where all of flat takes no more bytes."""
    if sent is not None:
        changed = _bits(flat) != _bits(sent)
        count = int(changed.count_nonzero())
        if sum(message_sizes(count, flat)) < flat.nbytes:
            index = changed.nonzero().flatten()
            counts = torch.bincount(index // BLOCK, minlength=_num_blocks(flat)).int()
            offsets = (index % BLOCK - BLOCK // 2).to(torch.int16)
            return count, torch.cat([x.view(torch.uint8) for x in (counts, offsets, _bits(flat)[index])])
    return WHOLE, flat.view(torch.uint8)


def decode(count: int, flat: torch.Tensor, message: torch.Tensor) -> None:
    """Make of flat [n], which is what was sent before, what `encode` was given, of `count` new elements."""
    # A view of wider elements begins where those of a tensor of its own would.
    counts, offsets, values = (part.clone() for part in message.split(message_sizes(count, flat)))
    blocks = torch.arange(_num_blocks(flat)).repeat_interleave(counts.view(torch.int32).long())
    index = blocks * BLOCK + offsets.view(torch.int16).long() + BLOCK // 2
    _bits(flat)[index] = values.view(_BITS[flat.itemsize])


def _bits(flat: torch.Tensor) -> torch.Tensor:
    return flat.view(_BITS[flat.itemsize])


def _num_blocks(flat: torch.Tensor) -> int:
    return -(-flat.numel() // BLOCK)


def message_sizes(count: int, flat: torch.Tensor) -> list[int]:
    """Bytes of a message of so many new elements: of their numbers in all blocks, places, and bits."""
    return [4 * _num_blocks(flat), 2 * count, flat.itemsize * count]


def _parts(bucket: MoveBucket, flat: torch.Tensor) -> Iterator[tuple[Move, torch.Tensor]]:
    start = 0
    for move in bucket.moves:
        end = start + move.num_elements
        yield move, flat[start:end].view(move.sizes)
        start = end


BUCKETS_AHEAD = 2
"""Messages of a pair of ranks that are under way at once: one is packed while another is sent."""


class RankLink:
    """A gloo group over some ranks of the job, whatever their roles; tensors are in host memory.

    Messages from one rank to another arrive in the order in which they were sent. Whoever waits for one does
    so with PATIENCE: the other end may be at work of its own.
    """

    def __init__(
        self, name: str, ranks: Sequence[int], position: RolePosition, *, timeout_seconds: float
    ) -> None:
        """`timeout_seconds`: in which all its ranks come to make it. Raises LostPeer."""
        self._name, self._position = name, position
        self.job_rank = position.job_rank
        self._index = {rank: index for index, rank in enumerate(ranks)}
        with self._naming(None, "the start"):
            gloo = dist.ProcessGroupGloo(
                dist.PrefixStore(f"link {name}", position.store),
                self._index[self.job_rank],
                len(ranks),
                timedelta(seconds=timeout_seconds),
            )
        # Torch's types do not say that it is one.
        self._group = cast(dist.ProcessGroup, gloo)

    def send(self, tensor: torch.Tensor, receiver: int) -> Callable[[], None]:
        """Start to send a contiguous tensor to a rank of the job; what is returned waits until it is gone.

        It raises LostPeer if the receiver is lost.
        """
        with self._naming(receiver, "a message"):
            work = self._group.send([tensor], self._index[receiver], 0)
        return self._wait(work, tensor, receiver)

    def receive(self, tensor: torch.Tensor, sender: int) -> Callable[[], None]:
        """Start to receive into a tensor; what is returned waits until it has arrived."""
        with self._naming(sender, "a message"):
            work = self._group.recv([tensor], self._index[sender], 0)
        return self._wait(work, tensor, sender)

    def _wait(self, work: dist.Work, tensor: torch.Tensor, peer: int) -> Callable[[], None]:
        def wait(held: torch.Tensor = tensor) -> None:
            with self._naming(peer, "a message"):
                work.wait(PATIENCE)

        return wait

    @contextmanager
    def _naming(self, peer: int | None, what: str) -> Iterator[None]:
        """Raise a lost connection as a LostPeer that names the link, and the other rank by role."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            others = [rank for rank in self._index if rank != self.job_rank]
            who = " or ".join(map(self._position.label, others if peer is None else [peer]))
            raise LostPeer(
                f"{what} of link {self._name!r} failed; {who} is gone or stuck ({without_frames(error)})"
            ) from error


class Outlet:
    """What this rank sends of its weights to some ranks, again and again, each time as they are then."""

    def __init__(
        self, buckets: Sequence[MoveBucket], *, link: RankLink, dtype: torch.dtype, by_difference: bool
    ) -> None:
        """Of `buckets` those that this rank is the source of, in `dtype`. `by_difference`: keep on the host
        what was sent, and send the elements whose bits have changed since."""
        self._rounds = rounds_of([bucket for bucket in buckets if bucket.source == link.job_rank])
        self._link, self._dtype, self._by_difference = link, dtype, by_difference
        self._sent: dict[tuple[int, int], torch.Tensor] = {}
        """By round and target."""

    def post(
        self, tensors: Mapping[str, torch.Tensor], shards: Mapping[str, Shard]
    ) -> tuple[int, list[Callable[[], None]]]:
        """Start to send all, from copies on the host; `tensors` are this rank's parts by global name.

        Returns the bytes, and what waits until they are taken, by `take_weights` on the targets: the tensors
        may change meanwhile. Raises LostPeer.
        """
        total, waits, view = 0, list[Callable[[], None]](), view_of(tensors, shards)
        for number, messages in enumerate(self._rounds):
            for bucket in messages:
                flat = pack(bucket, view, dtype=self._dtype).cpu()
                count, message = encode(flat, self._sent.get((number, bucket.target)))
                if self._by_difference:
                    self._sent[number, bucket.target] = flat
                waits += [self._link.send(x, bucket.target) for x in (torch.tensor([count]), message)]
                total += message.nbytes
        return total, waits


def take_weights(
    buckets: Sequence[MoveBucket],
    tensors: Mapping[str, torch.Tensor],
    shards: Mapping[str, Shard],
    *,
    link: RankLink,
    dtype: torch.dtype,
) -> None:
    """Fill this rank's parts with what the sources of those buckets that it is the target of have posted, of
    the same buckets in the same order. A few messages a source are under way at once. Raises LostPeer."""
    arriving: deque[Callable[[], None]] = deque()
    view = view_of(tensors, shards)

    def fill(bucket: MoveBucket, count: int, flat: Tensor, message: Tensor, wait: Callable[[], None]) -> None:
        wait()
        if count != WHOLE:
            decode(count, flat, message)
        unpack(bucket, flat, view)

    for messages in rounds_of([bucket for bucket in buckets if bucket.target == link.job_rank]):
        counts = [torch.empty(1, dtype=torch.int64) for _ in messages]
        announced = [link.receive(n, bucket.source) for n, bucket in zip(counts, messages, strict=True)]
        for bucket, number, wait in zip(messages, counts, announced, strict=True):
            wait()
            count = int(number)
            if count == WHOLE:
                flat = torch.empty(bucket.num_elements, dtype=dtype)
                message = flat.view(torch.uint8)
            else:
                # What was sent before is what is here: nobody else writes these parts.
                flat = pack(bucket, view, dtype=dtype).cpu()
                message = torch.empty(sum(message_sizes(count, flat)), dtype=torch.uint8)
            came = link.receive(message, bucket.source)
            arriving.append(functools.partial(fill, bucket, count, flat, message, came))
        while len(arriving) > (BUCKETS_AHEAD - 1) * len(messages):
            arriving.popleft()()
    while arriving:
        arriving.popleft()()
