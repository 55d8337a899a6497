"""How optimizer state lies on a disk: what both the trainer and its forecast need to know."""

from __future__ import annotations

from yuan_train.config.units import show_bytes

DISK_CHUNK = 1 << 20
"""Elements of a chunk: requests of 4 MiB, with which a few threads keep an NVMe disk busy."""
DISK_SLOTS = 4
"""Chunks of a rank in host memory at a time: two that are read, one that is stepped, one that is written."""
DISK_STATES = 3
"""What the disk holds of an element: its master and AdamW's two moments."""

DAY_SECONDS = 86400.0


def written_words(bytes_of_step: float, step_seconds: float | None) -> str:
    """`12.0 GiB written a step, 33.4 TiB a day`: a drive lasts for so many bytes. `step_seconds`: None if not
    known."""
    words = f"{show_bytes(bytes_of_step)} written a step"
    if not step_seconds:
        return words
    return f"{words}, {show_bytes(bytes_of_step * DAY_SECONDS / step_seconds)} a day"
