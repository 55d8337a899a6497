"""Starts several ranks on this machine, over gloo and the loopback interface."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

TIMEOUT_SECONDS = 600


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def spawn(body: Callable[..., None], num_ranks: int, *arguments: Any) -> None:
    """Run `body(rank, *arguments)` in `num_ranks` processes; raise the traceback of a rank that fails.

    `body` must be importable (a function of a module). It calls `as_rank` before it initialises
    torch.distributed. Fails after TIMEOUT_SECONDS, and kills what still runs.
    """
    context = mp.spawn(body, args=arguments, nprocs=num_ranks, join=False)
    assert context is not None
    deadline = time.monotonic() + TIMEOUT_SECONDS
    try:
        while not context.join(timeout=1):
            assert time.monotonic() < deadline, f"{num_ranks} ranks did not end within {TIMEOUT_SECONDS} s"
    finally:
        for process in context.processes:
            assert process is not None
            if process.is_alive():
                process.kill()
            process.join()


def as_rank(rank: int, num_ranks: int, port: int) -> None:
    """Set the environment variables that a launcher would set, and one thread for torch."""
    import torch

    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
