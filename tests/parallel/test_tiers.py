"""Memory of the host, and the links to it."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from yuan_train.config.errors import HostMemoryError
from yuan_train.parallel import device as slab_module
from yuan_train.parallel.copies import HostPool
from yuan_train.parallel.device import (
    CPU,
    CudaDevice,
    HostLinks,
    HostSlab,
    available_bytes,
    make_link,
    piece_bytes,
)
from yuan_train.parallel.optimizer_state import HostChunk


def test_pieces_of_a_slab_are_apart_and_begin_at_a_cache_line() -> None:
    slab = HostSlab(3 * 64, device=CPU, what="a test")
    first, second = slab.take(5, torch.float32), slab.take(16, torch.float64)
    assert piece_bytes(5, torch.float32) == 64 and second.data_ptr() - first.data_ptr() == 64
    assert not first.any() and not second.any()
    first.fill_(1.0)
    assert not second.any()
    with pytest.raises(AssertionError, match="too small"):
        slab.take(1, torch.float32)


def test_a_pool_holds_no_more_than_is_ever_taken_at_once() -> None:
    pool, mebibyte = HostPool(CPU), 1 << 20
    for _ in range(3):
        taken = [pool.take(size * mebibyte) for size in (3, 5, 3, 5, 3)]
        for one in taken[::-1]:
            pool.give(one)
    assert pool.num_bytes == 19 * mebibyte
    # What is small shares a block.
    small = [pool.take(mebibyte // 4) for _ in range(8)]
    assert len({one.block for one in small}) == 1 and pool.num_bytes == 19 * mebibyte


def test_a_host_keeps_a_fifth_of_what_is_available(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slab_module, "available_bytes", lambda: 1000.0)
    assert HostSlab(800, device=CPU, what="a test").num_bytes == 800
    with pytest.raises(HostMemoryError, match=r"optimizer_offload: needs 801 B .* at most 80% are taken"):
        HostSlab(801, device=CPU, what="optimizer_offload")
    assert HostMemoryError.exit_code == 2


def test_memory_that_may_not_be_pinned_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Runtime:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with pytest.raises(HostMemoryError, match=r"CUDA cannot pin 4.0 KiB .*\(error 2\); raise .*`ulimit -l"):
        HostSlab(4096, device=CudaDevice(0), what="optimizer_offload")


def test_what_is_available_is_the_least_of_kernel_and_control_group(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    assert available_bytes(meminfo, tmp_path) == math.inf
    meminfo.write_text("MemTotal:  9 kB\nMemAvailable:    4 kB\nHugePages_Total:   0\n")
    assert available_bytes(meminfo, tmp_path) == 4096
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("1000\n")
    assert available_bytes(meminfo, tmp_path) == 4096
    (tmp_path / "memory.max").write_text("3000\n")
    assert available_bytes(meminfo, tmp_path) == 2000


def test_a_simulated_link_copies_in_order_and_tells_faults() -> None:
    link = make_link(CPU, bytes_per_second=1e9)
    seen: list[int] = []
    transfers = [link.begin(lambda i=i: seen.append(i), 1000) for i in range(5)]

    def fail() -> None:
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        link.begin(fail, 0).wait()
    transfers[-1].finish()
    assert seen == [0, 1, 2, 3, 4]


class Stream:
    """A card's: what begins on a link begins after what the stream has waited for; the host goes on."""

    def __init__(self) -> None:
        self.waited: list[StreamTransfer] = []

    def begin(self, copy: Callable[[], None], num_bytes: int) -> StreamTransfer:
        return StreamTransfer(self, copy)


class StreamTransfer:
    """A copy that is as late as it may be: made when the host waits for it, or for what is after it."""

    def __init__(self, stream: Stream, copy: Callable[[], None]) -> None:
        self.stream, self.before, self.copies = stream, list(stream.waited), [copy]

    def wait(self) -> None:
        self.stream.waited.append(self)

    def finish(self) -> None:
        for transfer in self.before:
            transfer.finish()
        while self.copies:
            self.copies.pop()()


def test_the_host_steps_nothing_that_is_on_its_way_up() -> None:
    """Weights that no forward has waited for, on a card whose waits do not hold back the host."""
    stream = Stream()
    master, gradient, first, second = (torch.zeros(4) for _ in range(4))
    links = HostLinks(down=stream, up=stream)
    chunk = HostChunk(0, 0, master, gradient, first, second, decays=True, links=links)
    for weights, reduces in ((torch.zeros(4), True), (torch.zeros(4, dtype=torch.bfloat16), False)):
        master.fill_(1.0)
        chunk.start_weights(weights)
        if reduces:
            chunk.start_gradient(torch.full((4,), 5.0))
        chunk.finish_gradient()
        assert not reduces or gradient.tolist() == [5.0] * 4
        master.fill_(2.0)
        gradient.fill_(0.0)
        assert weights.tolist() == [1.0] * 4, "the copy read what the host wrote later"
