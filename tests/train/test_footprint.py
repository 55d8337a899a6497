"""Whether a process keeps freed memory, measured by the page faults of allocating again."""

import os
import platform
import subprocess
import sys

import pytest

CODE = '''
import resource, torch
from yuan_train.parallel.device import CPU
from yuan_train.parallel.device import keep_freed_memory

def micro_batch():
    held = [torch.ones(1 << 18) for _ in range(32)]

def page_faults():
    """Of five micro-batches that allocate and free."""
    for _ in range(3):
        micro_batch()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        micro_batch()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

print(page_faults())
keep_freed_memory(CPU)
print(page_faults())
'''


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc has these options")
def test_freed_memory_is_reused():
    # With a low threshold glibc maps, and so returns, large blocks whatever else is on the heap.
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    command = [sys.executable, "-c", CODE]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    returned, kept = map(int, done.stdout.split())
    pages = 5 * 32 * (1 << 20) // 4096
    assert returned > pages / 2, "negative control: by default it is returned to the system"
    assert kept < pages / 100
