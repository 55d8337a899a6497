"""A card without a card: streams that are late on purpose, memory that is finite, a clock that is virtual.

A `FakeCard` is a `Device` whose tensors are in host memory, so that the whole engine runs on it. Compute is
eager. What goes beside it is put off until something waits for it:

- A copy on a stream of its own reads its source when somebody waits for it, in the order of the stream.
  Until then its target is poison (every byte 255, which is NaN in each float type): who reads it without a
  wait computes NaN, and who writes the source too early copies what was written.
- `Mark.wait` brings what the card may read; what a copy has brought to the host is poisoned there until the
  host has waited too (`finish`). What the host writes between the two where the card copies from is a fault.
- A copy holds the host's memory but not the card's, as on CUDA, where freed memory of one stream is used
  again at once: a source that has gone is copied as poison.
- A message or a sum of a `FakeNcclTransport` is poison until `wait`, which never blocks the host on a card.

`faults` are what a real card would not forgive, or would pay for: threads that have not chosen their card
(each makes a context on the first one), copies from pageable memory, host memory that changed under a copy.

Time is virtual: `compute` lasts what it is told, a copy its bytes over `bytes_per_second`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from yuan_train.config.errors import HostMemoryError
from yuan_train.parallel.device import CardFacts, CardMemory, Device, Mark, Stream
from yuan_train.parallel.transport import Ranges, Transport

POISON = 255
SEGMENT = 2 << 20
"""Bytes by which the allocator takes memory of the card."""


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor, without its version: on CUDA a late copy raises none either."""
    flat = tensor.data.reshape(-1)
    assert flat.data_ptr() == tensor.data_ptr(), "copies between a card and its host are of contiguous memory"
    return flat.view(torch.uint8)


def poison(tensor: torch.Tensor) -> None:
    """Make each float NaN."""
    if tensor.numel():
        _bytes_of(tensor).fill_(POISON)


def _storage_of(weak: StorageWeakRef) -> torch.UntypedStorage:
    """That of a reference which has not expired."""
    return torch.UntypedStorage._new_with_weak_ptr(weak.cdata)  # pyright: ignore


class _Range:
    """Bytes of memory, of the card's without a hold on them."""

    def __init__(self, tensor: torch.Tensor, *, holds: bool) -> None:
        self.start = tensor.data_ptr()
        self.end = self.start + tensor.numel() * tensor.itemsize
        self.holds = holds
        self._tensor = _bytes_of(tensor) if holds else None
        self._storage = StorageWeakRef(tensor.untyped_storage())
        self._offset = self.start - tensor.untyped_storage().data_ptr()

    def bytes(self) -> torch.Tensor | None:
        """None if the memory has gone."""
        if self._tensor is not None:
            return self._tensor
        if self._storage.expired():
            return None
        storage = _storage_of(self._storage)
        empty = torch.empty(0, dtype=torch.uint8)
        return empty.set_(storage, self._offset, (self.end - self.start,), (1,))

    def overlaps(self, other: _Range) -> bool:
        return self.start < other.end and other.start < self.end


@dataclass(eq=False)
class _Copy:
    """A copy of a stream."""

    target: _Range
    source: _Range
    end_seconds: float
    taken: torch.Tensor | None = None
    """What the source was when it was read."""
    has_run: bool = False
    is_checked: bool = False
    """Whether the host has left the source alone as long as it must."""

    def take(self) -> None:
        """Read the source."""
        if self.taken is None:
            with _disable_current_modes():
                found = self.source.bytes()
                size = self.source.end - self.source.start
                self.taken = (
                    torch.full((size,), POISON, dtype=torch.uint8) if found is None else found.clone()
                )

    def land(self) -> None:
        """Write the target."""
        assert self.taken is not None
        target = self.target.bytes()
        if target is not None:
            target.copy_(self.taken)


@dataclass(eq=False)
class _FakeStream(Stream):
    card: FakeCard
    copies: list[_Copy] = field(default_factory=list["_Copy"])
    num_run: int = 0
    """How many of the copies have been run for the card; `num_seen`, for the host."""
    num_seen: int = 0
    seconds: float = 0.0
    """When all that is enqueued will have ended."""

    def run(self, work: Callable[[], None]) -> Mark:
        self.card.check_thread("a stream")
        self.seconds = max(self.seconds, self.card.compute_seconds, self.card.host_seconds)
        with self.card.lock, _Intercept(self):
            work()
        return _StreamMark(self, len(self.copies), self.seconds)

    def enqueue(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """A copy; its target is poison from now on."""
        card = self.card
        assert target.dtype == source.dtype and target.numel() == source.numel(), "a copy converts nothing"
        to_host, from_host = card.is_pinned(target), card.is_pinned(source)
        if to_host == from_host:
            card.faults.append("a copy of a stream that is not between the card and pinned memory")
        self.seconds += target.numel() * target.itemsize / card.bytes_per_second
        copy = _Copy(_Range(target, holds=to_host), _Range(source, holds=from_host), self.seconds)
        for other in self.copies[self.num_run :]:
            if other.source.overlaps(copy.target):
                other.take()
        for other in card.pending(unseen=True):
            if other.has_run and other.source.overlaps(copy.target):
                card.check_source(other)
        self.copies.append(copy)
        poison(target)

    def run_until(self, count: int) -> None:
        """Run the first copies for the card: what they bring to the host stays poison there."""
        for copy in self.copies[self.num_run : count]:
            self.card.show_host(copy.source)
            copy.take()
            copy.has_run = True
            if not copy.target.holds:
                copy.land()
        self.num_run = max(self.num_run, count)

    def see_until(self, count: int) -> None:
        """The host has waited for the first copies."""
        self.run_until(count)
        for copy in self.copies[self.num_seen : count]:
            if copy.target.holds:
                copy.land()
            else:
                self.card.check_source(copy)
        self.num_seen = max(self.num_seen, count)


class _StreamMark(Mark):
    """The end of some copies of a stream."""

    def __init__(self, stream: _FakeStream, count: int, seconds: float) -> None:
        self.stream, self.count, self.seconds = stream, count, seconds

    def query(self) -> bool:
        self.stream.card.check_thread("a query")
        return self.stream.num_seen >= self.count

    def wait(self) -> None:
        card = self.stream.card
        card.check_thread("a wait")
        with card.lock:
            card.compute_seconds = max(card.compute_seconds, card.host_seconds, self.seconds)
            card.awaited[self.stream] = max(card.awaited.get(self.stream, 0), self.count)
            self.stream.run_until(self.count)

    def finish(self) -> None:
        card = self.stream.card
        card.check_thread("a synchronisation")
        with card.lock:
            card.host_seconds = max(card.host_seconds, self.seconds)
            self.stream.see_until(self.count)

    def seconds_since(self, earlier: Any) -> float:
        raise AssertionError("the mark is not timed")


class _ComputeMark(Mark):
    """A point of the compute."""

    def __init__(self, card: FakeCard, *, timed: bool) -> None:
        self.card, self.timed = card, timed
        self.seconds = card.compute_seconds = max(card.compute_seconds, card.host_seconds)
        self.number = card.num_computed
        self.awaited = dict(card.awaited)
        self.downloads = len(card.downloads)

    def query(self) -> bool:
        self.card.check_thread("a query")
        return self.card.num_finished >= self.number

    def wait(self) -> None:
        """The compute stands behind its own marks anyway."""
        self.card.check_thread("a wait")

    def finish(self) -> None:
        self.card.check_thread("a synchronisation")
        self.card.num_syncs += 1
        with self.card.lock:
            self.card.host_seconds = max(self.card.host_seconds, self.seconds)
            self.card.num_finished = max(self.card.num_finished, self.number)
            for stream, count in self.awaited.items():
                stream.see_until(count)
            for host, value in self.card.downloads[self.card.num_downloaded : self.downloads]:
                host.copy_(value)
            self.card.num_downloaded = max(self.card.num_downloaded, self.downloads)

    def seconds_since(self, earlier: _ComputeMark) -> float:
        assert self.timed and earlier.timed, "the marks are not timed"
        assert self.card.num_finished >= self.number, "the host has not waited for the mark"
        return self.seconds - earlier.seconds


class _Intercept(TorchDispatchMode):
    """Puts off the copies that are called inside; whatever else a stream is given is refused."""

    VIEWS = ("view", "slice", "detach", "alias", "reshape", "as_strided", "select", "split", "_reshape_alias")

    def __init__(self, stream: _FakeStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.partition(".")[0]
        if name == "copy_":
            assert (kwargs or {}).get("non_blocking") or args[2:3] == (True,), (
                "the host would wait for a copy"
            )
            self._stream.enqueue(args[0], args[1])
            return args[0]
        assert name in self.VIEWS, f"{func} on a stream of copies"
        return func(*args, **(kwargs or {}))


class FakeCard(Device):
    """See the module, and `yuan_train.parallel.device.Device`."""

    torch = torch.device("cpu")
    is_card = True
    library: Literal["gloo", "nccl"] = "gloo"

    def __init__(
        self,
        *,
        name: str = "NVIDIA A100-SXM4-80GB",
        memory: int = 80 << 30,
        capability: tuple[int, int] = (8, 0),
        architectures: Sequence[str] = ("sm_70", "sm_80", "sm_90"),
        driver: str = "12.8",
        pci_address: str | None = None,
        outside: int = 0,
        bytes_per_second: float = 1e9,
        tick: float = 1e-3,
        pinnable: float = float("inf"),
    ) -> None:
        """`outside`: bytes that others than the allocator hold. Each look at the host's clock takes `tick`
        seconds. `pinnable`: bytes of the host that may be registered."""
        self.total, self.outside, self.bytes_per_second, self.tick = memory, outside, bytes_per_second, tick
        self._facts = CardFacts(
            name=name,
            memory=memory,
            capability=capability,
            has_bf16=capability >= (8, 0),
            architectures=tuple(architectures),
            cuda="12.8",
            driver=driver,
            pci_address=pci_address,
        )
        self.lock = threading.RLock()
        self.faults: list[str] = []
        self.num_syncs = 0
        """How often the host has waited for the compute."""
        self.num_pageable = 0
        """Copies from or to memory that is not pinned, at which the host waits too."""
        self._chosen = threading.local()
        self._chosen.yes = True
        self.host_seconds = self.compute_seconds = 0.0
        self.num_computed = self.num_finished = 0
        self.awaited: dict[_FakeStream, int] = {}
        """By stream, the copies that the compute has waited for."""
        self.downloads: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Copies of the compute to the host, of which the host has waited for `num_downloaded`."""
        self.num_downloaded = 0
        self._streams: list[_FakeStream] = []
        self._pages: list[tuple[int, int]] = []
        self._pinned: dict[int, StorageWeakRef] = {}
        self._pinnable = pinnable
        self.allocated = self.reserved = self.most_allocated = self.most_reserved = 0
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}

    # --- streams and time ---------------------------------------------------------------------------------

    def message_options(self, timeout: timedelta) -> Any:
        return "for messages" if self.library == "nccl" else None

    def use(self) -> None:
        self._chosen.yes = True

    def check_thread(self, what: str) -> None:
        """A thread that has not chosen its card makes a context on the first one."""
        if not getattr(self._chosen, "yes", False):
            self.faults.append(f"{what} in thread {threading.current_thread().name}: a context on card 0")
            self._chosen.yes = True

    def compute(self, seconds: float) -> None:
        """Enqueue compute that lasts so long."""
        self.compute_seconds = max(self.compute_seconds, self.host_seconds) + seconds

    def mark(self, *, timed: bool = False) -> Mark:
        self.check_thread("a mark")
        self.num_computed += 1
        return _ComputeMark(self, timed=timed)

    def make_stream(self) -> Stream:
        self.check_thread("a stream")
        self._streams.append(_FakeStream(self))
        return self._streams[-1]

    def finish_compute(self) -> None:
        self.mark().finish()

    def finish(self) -> None:
        self.finish_compute()
        for stream in self._streams:
            self.host_seconds = max(self.host_seconds, stream.seconds)
            stream.see_until(len(stream.copies))

    def now(self) -> float:
        self.host_seconds += self.tick
        return self.host_seconds

    def pending(self, *, unseen: bool = False) -> Iterator[_Copy]:
        """The copies that have not run, or that the host has not waited for."""
        for stream in self._streams:
            yield from stream.copies[stream.num_seen if unseen else stream.num_run :]

    def show_host(self, memory: _Range) -> None:
        """A copy reads host memory: it sees what the copies before it have brought there."""
        for copy in self.pending(unseen=True):
            if copy.has_run and copy.target.holds and copy.target.overlaps(memory):
                copy.land()

    def check_source(self, copy: _Copy) -> None:
        """The host may write from now on where a copy read, or another copy does."""
        if copy.source.holds and not copy.is_checked:
            source = copy.source.bytes()
            assert source is not None and copy.taken is not None
            if not torch.equal(source, copy.taken):
                self.faults.append("the host wrote what the card was copying")
        copy.is_checked = True

    # --- the host's memory --------------------------------------------------------------------------------

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Whether the card copies from and to it by itself."""
        address = tensor.data_ptr()
        storage = self._pinned.get(tensor.untyped_storage().data_ptr())
        alive = storage is not None and not storage.expired()
        return alive or any(start <= address < end for start, end in self._pages)

    def host_empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        self.check_thread("pinned memory")
        found = torch.empty(shape, dtype=dtype)
        self._pinned[found.untyped_storage().data_ptr()] = StorageWeakRef(found.untyped_storage())
        return found

    def on_host(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.is_pinned(tensor):
            return tensor
        return self.host_empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def upload(self, tensor: torch.Tensor) -> torch.Tensor:
        self.check_thread("a copy")
        self._count_pageable(tensor)
        return tensor.clone()

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        self.finish_compute()
        with _disable_current_modes():
            return self.host_empty(tuple(tensor.shape), tensor.dtype).copy_(tensor)

    def start_to_host(self, tensor: torch.Tensor, host: torch.Tensor) -> None:
        self._count_pageable(host)
        self.num_computed += 1
        with self.lock:
            poison(host)
            with _disable_current_modes():
                # The fake's own, and no memory of the card.
                self.downloads.append((host, tensor.clone()))

    def register(self, pages: torch.Tensor, what: str) -> None:
        taken = sum(end - start for start, end in self._pages)
        if taken + pages.numel() > self._pinnable:
            raise HostMemoryError(f"{what}: the fake card cannot pin {pages.numel()} B of host memory")
        self._pages.append((pages.data_ptr(), pages.data_ptr() + pages.numel()))

    def _count_pageable(self, tensor: torch.Tensor) -> None:
        if not self.is_pinned(tensor):
            self.num_pageable += 1

    # --- the card's memory --------------------------------------------------------------------------------

    def memory(self) -> CardMemory | None:
        self.check_thread("a look at the memory")
        self._free()
        return CardMemory(
            total=self.total,
            free=self.total - self.outside - self.reserved,
            allocated=self.allocated,
            reserved=self.reserved,
            most_allocated=self.most_allocated,
            most_reserved=self.most_reserved,
        )

    def largest_free_block(self) -> int:
        return self.reserved - self.allocated

    def reset_peak_memory(self) -> None:
        self.most_allocated, self.most_reserved = self.allocated, self.reserved

    def empty_cache(self) -> None:
        self._free()
        self.reserved = -(-self.allocated // SEGMENT) * SEGMENT

    def facts(self) -> CardFacts | None:
        return self._facts

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Inside, tensors take the card's memory; raises torch.OutOfMemoryError, as CUDA does."""
        with _Count(self):
            yield

    def hold(self, tensor: torch.Tensor) -> None:
        """A new tensor takes memory of the card, if it is not of the host."""
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if not size or self.is_pinned(tensor) or (key in self._held and not self._held[key][0].expired()):
            return
        self._free()
        if self.allocated + size > self.reserved:
            wanted = -(-(self.allocated + size) // SEGMENT) * SEGMENT
            if wanted > self.total - self.outside:
                raise torch.OutOfMemoryError(
                    f"CUDA out of memory. Tried to allocate {size / 2**20:.2f} MiB. GPU 0 has a total "
                    f"capacity of {self.total / 2**30:.2f} GiB of which "
                    f"{(self.total - self.outside - self.reserved) / 2**20:.2f} MiB is free."
                )
            self.reserved = wanted
        self._held[key] = StorageWeakRef(storage), size
        self.allocated += size
        self.most_allocated = max(self.most_allocated, self.allocated)
        self.most_reserved = max(self.most_reserved, self.reserved)

    def _free(self) -> None:
        for key, (storage, size) in list(self._held.items()):
            # One that somebody has emptied takes nothing, whoever refers to it.
            if storage.expired() or not _storage_of(storage).nbytes():
                del self._held[key]
                self.allocated -= size


class _Count(TorchDispatchMode):
    """Counts what ops make on a card."""

    def __init__(self, card: FakeCard) -> None:
        super().__init__()
        self._card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu":
                self._card.hold(leaf)
        return found


# --- messages and sums ------------------------------------------------------------------------------------


class FakeNcclTransport(Transport):
    """nccl's waits over gloo: what arrives is poison until `wait`. With `waits` False, after it too."""

    library = "gloo"
    open_receives_hold_up_nothing = False
    _polls = False
    _coalesces = False
    waits = True

    def post(self, shape: tuple[int, ...], dtype: torch.dtype, sender: int) -> Any:
        buffer = torch.empty(shape, dtype=dtype)
        poison(buffer)
        arriving = torch.empty_like(buffer)
        return _LateReceive(self._receive(arriving, sender), [(buffer, arriving)], waits=self.waits)

    def all_reduce(self, tensor: torch.Tensor, what: str) -> Any:
        return self._late(tensor, lambda own: super(FakeNcclTransport, self).all_reduce(own, what))

    def broadcast(self, tensor: torch.Tensor, root: int, what: str) -> Any:
        return self._late(tensor, lambda own: super(FakeNcclTransport, self).broadcast(own, root, what))

    def reduce_ranges(self, tensor: torch.Tensor, ranges: Ranges, what: str) -> Any:
        return self._late(tensor, lambda own: super(FakeNcclTransport, self).reduce_ranges(own, ranges, what))

    def gather_ranges(self, tensor: torch.Tensor, ranges: Ranges, what: str) -> Any:
        return self._late(tensor, lambda own: super(FakeNcclTransport, self).gather_ranges(own, ranges, what))

    def _late(self, tensor: torch.Tensor, start: Callable[[torch.Tensor], Any]) -> Any:
        own = tensor.clone()
        pending = start(own)
        poison(tensor)
        return _LatePending(pending, [(tensor, own)], waits=self.waits)


class _LatePending:
    def __init__(self, pending: Any, moved: list[tuple[torch.Tensor, torch.Tensor]], *, waits: bool) -> None:
        self.pending, self.moved, self.waits = pending, moved, waits

    def wait(self) -> None:
        self.pending.wait()
        self._land()

    def is_done(self) -> bool:
        done = self.pending.is_done()
        if done:
            self._land()
        return done

    def finish(self, seconds: float) -> None:
        self.pending.finish(seconds)
        self._land()

    def _land(self) -> None:
        for target, source in self.moved:
            if self.waits:
                target.data.copy_(source)
        self.moved = []


class _LateReceive(_LatePending):
    def take(self) -> torch.Tensor:
        ((buffer, _),) = self.moved
        self.wait()
        return buffer
