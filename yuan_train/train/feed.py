"""Feeds a rank's stages with micro-batches that a thread has read ahead of need.

A rank reads the micro-batches of its own replica, and only what its stages use: tokens in the first stage and
where something is reset at document ends, targets in the last. All ranks of a tensor-parallel group read the
same: from the second on out of the page cache, which is cheaper than a broadcast in the middle of a step.

The thread reads the rest of the current pass (a training step, or a batch of the validation data), then the
next one: at most two passes of a rank are in memory, 24 bytes a token.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch

from yuan_train.config.run import DataConfig
from yuan_train.data.loader import Samples
from yuan_train.models.attention import DocumentResets, find_resets
from yuan_train.parallel.device import Device


@dataclass(frozen=True)
class MicroBatch:
    """What a rank uses of a micro-batch, on the host; int64 [B, S], pinned if a card reads them."""

    tokens_BS: torch.Tensor | None
    targets_BS: torch.Tensor | None
    resets: DocumentResets
    trained_tokens: int
    """Targets with a loss; 0 if the rank uses no targets."""
    places_B: torch.Tensor | None = None
    """Of preference pairs; see `Batch.places`."""
    experts_BSLK: torch.Tensor | None = None
    """int16: the experts that all layers take for each token; None: those that they choose."""


class MicroBatchSource(Protocol):
    """Where a stage gets its micro-batches from."""

    def take(self, micro_batch: int) -> MicroBatch:
        """A micro-batch of the current pass; each stage that uses it takes it once."""
        ...


Key = tuple[Samples, int]
"""A pass over one global batch: the data, and its first sample."""


class Passes(ABC):
    """A source of the micro-batches of one global batch after another; a context manager."""

    def __init__(self) -> None:
        self.batch_tokens: dict[Key, int] = {}
        """Trained tokens of whole global batches, as the ranks have agreed on them."""

    @abstractmethod
    def take(self, micro_batch: int) -> MicroBatch:
        """See `MicroBatchSource`."""

    def begin(self, blend: Samples, first_sample: int, *, then: int | None = None) -> None:
        """Start a pass over the global batch from `first_sample` on; the one from `then` on is next."""
        return

    def count_trained(self, blend: Samples, first_sample: int) -> int:
        """Targets with a loss that this rank reads in a pass that was begun or announced."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is taken any more."""
        return


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which samples a rank reads, and what it uses of them."""

    first_sequence: int
    """Offset of its pipeline's share in a global batch."""
    micro_batch_size: int
    takers: Mapping[int, int]
    """How many of its stages take each micro-batch that it runs, in the order of their forwards; those that
    none takes are not read."""
    with_tokens: bool
    with_targets: frozenset[int]
    """The micro-batches of which it runs the last stage."""
    resets: Mapping[str, Any]
    """See `resets_after`."""
    device: Device

    def read(self, blend: Samples, first_sample: int, micro_batch: int) -> MicroBatch:
        """Read a micro-batch of the global batch that begins at `first_sample`. Raises DataError."""
        first = first_sample + self.first_sequence + micro_batch * self.micro_batch_size
        batch = blend.batch(first, self.micro_batch_size)
        found = make_micro_batch(
            torch.from_numpy(batch.inputs),
            torch.from_numpy(batch.targets) if micro_batch in self.with_targets else None,
            resets=self.resets,
            keep_tokens=self.with_tokens,
            trained_tokens=batch.num_trained if micro_batch in self.with_targets else 0,
            device=self.device,
        )
        if batch.places is None or found.targets_BS is None:
            return found
        return replace(found, places_B=torch.from_numpy(batch.places))


def resets_after(data: DataConfig, eod_id: int | None) -> dict[str, Any]:
    """The keyword arguments of `find_resets`, which resets nothing if the token is None."""
    flags = "reset_position_ids", "reset_attention", "reset_filter"
    return {"eod_id": eod_id, **{flag: getattr(data, flag) for flag in flags}}


def make_micro_batch(
    tokens_BS: torch.Tensor,
    targets_BS: torch.Tensor | None,
    *,
    resets: Mapping[str, Any],
    keep_tokens: bool = True,
    trained_tokens: int = 0,
    device: Device,
) -> MicroBatch:
    """A micro-batch of tokens and targets [B, S] on the host, with what the model resets in it."""
    found = find_resets(tokens_BS, **resets)
    return MicroBatch(
        device.on_host(tokens_BS) if keep_tokens else None,
        device.on_host(targets_BS) if targets_BS is not None else None,
        found.placed(device.on_host),
        trained_tokens,
    )


@dataclass(eq=False)
class _Pass:
    """What is read of a pass so far."""

    key: Key
    ready: dict[int, MicroBatch] = field(default_factory=dict[int, MicroBatch])
    takes: dict[int, int] = field(default_factory=dict[int, int])
    num_read: int = 0
    trained_tokens: int = 0
    error: BaseException | None = None


class Feed(Passes):
    """Reads the micro-batches of one rank in a thread, in the order in which they are taken.

    Use as a context manager, or `close` it: the thread ends with it. An error of the thread is raised where
    the micro-batch that it could not read is taken.
    """

    def __init__(self, share: Share) -> None:
        super().__init__()
        self._share = share
        self._order = tuple(share.takers)
        self._passes: list[_Pass] = []
        """The current one and those to read ahead, in the order of reading."""
        self._current: _Pass | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, blend: Samples, first_sample: int, *, then: int | None = None) -> None:
        """Start a pass over the global batch from `first_sample` on; the one from `then` on is read next."""
        with self._changed:
            if self._current is not None:
                self._passes.remove(self._current)
            self._current = self._find(blend, first_sample) or self._add((blend, first_sample), at=0)
            if then is not None and self._find(blend, then) is None:
                self._add((blend, then), at=len(self._passes))
            self._changed.notify_all()
        if self._thread is None and self._order:
            # A daemon: a process that ends by an error elsewhere must not wait for a slow disk.
            self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
            self._thread.start()

    def take(self, micro_batch: int) -> MicroBatch:
        """A micro-batch of the current pass; waits until it is read. Raises what reading it has raised."""
        current = self._current
        assert current is not None and self._thread is not None
        with self._changed:
            while micro_batch not in current.ready:
                if current.error is not None:
                    raise current.error
                self._changed.wait()
            current.takes[micro_batch] = current.takes.get(micro_batch, 0) + 1
            if current.takes[micro_batch] < self._share.takers[micro_batch]:
                return current.ready[micro_batch]
            return current.ready.pop(micro_batch)

    def count_trained(self, blend: Samples, first_sample: int) -> int:
        """Targets with a loss that this rank reads in a pass that was begun or announced; waits for it.

        0 if it uses no targets. If they cannot be read, the number is wrong: `take` raises in that pass.
        """
        if not self._share.with_targets:
            return 0
        with self._changed:
            found = self._find(blend, first_sample)
            assert found is not None, "the pass was begun or announced"
            self._changed.wait_for(lambda: self._is_finished(found))
            return found.trained_tokens

    def close(self) -> None:
        """End the thread; waits for the micro-batch that it is reading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _find(self, blend: Samples, first_sample: int) -> _Pass | None:
        return next((found for found in self._passes if found.key == (blend, first_sample)), None)

    def _add(self, key: Key, *, at: int) -> _Pass:
        added = _Pass(key)
        self._passes.insert(at, added)
        return added

    def _is_finished(self, reading: _Pass) -> bool:
        return reading.error is not None or reading.num_read == len(self._order)

    def _run(self) -> None:
        # It pins what it reads.
        self._share.device.use()
        while (reading := self._next()) is not None:
            blend, first_sample = reading.key
            micro_batch = self._order[reading.num_read]
            batch, failure = None, None
            try:
                batch = self._share.read(blend, first_sample, micro_batch)
            except BaseException as error:  # Raised by `take`, in the thread that trains.
                failure = error
            with self._changed:
                reading.error = failure
                if batch is not None:
                    reading.ready[micro_batch] = batch
                    reading.trained_tokens += batch.trained_tokens
                    reading.num_read += 1
                self._changed.notify_all()

    def _next(self) -> _Pass | None:
        """The first pass that is not finished; waits for one. None: the feed is closed."""
        with self._changed:
            found: list[_Pass] = []

            def has_work() -> bool:
                found[:] = [reading for reading in self._passes if not self._is_finished(reading)][:1]
                return self._closed or bool(found)

            self._changed.wait_for(has_work)
            return None if self._closed else found[0]
