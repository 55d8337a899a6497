"""Memory that a process keeps, counted by the pages that the system has to clear for it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

CODE = """
import resource, sys, torch
from yuan_train.train.footprint import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory(torch.device("cpu"))

def micro_batch():
    held = [torch.ones(1 << 18) for _ in range(32)]

for _ in range(3):
    micro_batch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    micro_batch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def cleared_pages(how: str) -> int:
    # Without it, it depends on what else lies on the heap whether glibc gives anything back.
    giving = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", CODE, how]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=giving)
    return int(done.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has the switch")
def test_what_is_freed_is_used_again():
    pages = 5 * 32 * (1 << 20) // 4096
    assert cleared_pages("keep") < pages / 100
    assert cleared_pages("return") > pages / 2, "the control: without the switch it is given back"
