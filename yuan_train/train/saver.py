"""The saves of a run, one at a time: on the spot, or in a thread while training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from yuan_train.parallel.grid import Place
from yuan_train.parallel.groups import watching

logger = logging.getLogger(__name__)


class Saver:
    """Every rank begins the same saves and waits for them at the same places.

    A save fails on all ranks together, but each comes to know of it in its own time. So a failure only asks
    for a stop (`failed`), which the ranks agree on in a step, and is raised where all of them wait.
    """

    def __init__(
        self,
        place: Place,
        *,
        saved: int | None,
        say: Callable[[str], None],
        device: torch.device | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """`device` is this rank's card if saves go to the background, and `group` is then theirs alone."""
        self.begun = self.saved = saved
        """Step of the newest save that was begun, and of the newest that is whole."""
        self.group = group
        self._place = place
        self._say = say
        self._thread = None if device is None else ThreadPoolExecutor(1, "save", _use_card, (device,))
        self._under_way: Future[Path] | None = None

    @property
    def in_background(self) -> bool:
        return self._thread is not None

    def begin(self, step: int, save: Callable[[], Path]) -> None:
        """Save, or have it done; the save before must be over. Raises CheckpointError."""
        assert self._under_way is None
        self.begun = step
        if self._thread is not None:
            self._under_way = self._thread.submit(save)
        else:
            self._end(save())

    def failed(self) -> bool:
        """Whether the save under way has failed; tells of one that has ended well. Does not wait."""
        if self._under_way is None or not self._under_way.done():
            return False
        if self._under_way.exception() is not None:
            return True
        self.wait()
        return False

    def wait(self) -> None:
        """Wait for the save under way, if any. Raises CheckpointError if it failed."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            with watching(self._place, "the save in the background"):
                place = under_way.result()
            self._end(place)

    def _end(self, place: Path) -> None:
        self.saved = self.begun
        self._say(f"saved {place}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Wait. Where the run ends with an error of its own, a failure to save is told beside it."""
        try:
            self.wait()
        except Exception as failure:
            if error is None:
                raise
            logger.error("error: %s", failure)
        finally:
            if self._thread is not None:
                self._thread.shutdown()


def _use_card(device: torch.device) -> None:
    """A new thread begins on the machine's first card, where it would open a context of its own."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
