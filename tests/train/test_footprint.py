"""Whether a process keeps freed memory, measured by the page faults of allocating again."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from yuan_train.parallel.device import CPU
from yuan_train.train.memory import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory(CPU)

def micro_batch():
    held = [torch.ones(1 << 18) for _ in range(32)]

for _ in range(3):
    micro_batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    micro_batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def page_faults(mode: str) -> int:
    """Page faults of five micro-batches that allocate and free; with mode `keep`, freed memory is kept."""
    # With a low threshold glibc maps, and so returns, large blocks whatever else is on the heap.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", CODE, mode]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_freed_memory_is_reused():
    pages = 5 * 32 * (1 << 20) // 4096
    assert page_faults("keep") < pages / 100
    assert page_faults("return") > pages / 2, "negative control: by default it is returned to the system"
