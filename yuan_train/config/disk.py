"""How optimizer state lies on a disk: what both the trainer and its forecast need to know."""

from __future__ import annotations

DISK_CHUNK = 1 << 20
"""Elements of a chunk: requests of 4 MiB, with which a few threads keep an NVMe disk busy."""
DISK_SLOTS = 4
"""Chunks of a rank in host memory at a time: two that are read, one that is stepped, one that is written."""
DISK_STATES = 3
"""What the disk holds of an element: its master and AdamW's two moments."""
