"""Python's cyclic garbage collector, kept from scanning many small values of which none is garbage."""

from __future__ import annotations

import gc
from collections.abc import Generator
from contextlib import contextmanager


@contextmanager
def without_garbage_collector() -> Generator[None]:
    """Disable the collector inside: it starts whenever there are more objects, and scans them all again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
