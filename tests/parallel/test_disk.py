"""Optimizer state on the host and on a disk."""

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from tests.train.test_optimizer import config, flat_bucket
from yuan_train.config import units as disk_sizes
from yuan_train.config.errors import DiskError, TrainingError
from yuan_train.parallel import optimizer_state as optimizer_tiers
from yuan_train.parallel.device import CPU, HostSlab, make_links
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.optimizer_state import (
    Away,
    DiskFile,
    DiskStore,
    HostPlace,
    away_bytes,
    chunk_elements,
)
from yuan_train.parallel.zero import STATES, OwnedState
from yuan_train.train.step import Optimizer


def model_of(dtype: torch.dtype) -> FlatBucket:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(100, 66), torch.nn.LayerNorm(66), torch.nn.Linear(66, 40))
    return flat_bucket(model.to(dtype))


def state_of(
    bucket: FlatBucket,
    shares: tuple[float, ...] | None,
    away: Away,
    directory: Path,
    *,
    timeout_seconds: float = 60.0,
) -> OwnedState:
    of_host, of_disk = away_bytes(bucket, shares, away)
    store = None
    if of_disk:
        elements = of_disk // (3 * bucket.gradient.itemsize)
        store = DiskStore(
            DiskFile(directory, of_disk),
            dtype=bucket.gradient.dtype,
            chunk=chunk_elements(elements),
            device=CPU,
            timeout_seconds=timeout_seconds,
        )
    host = HostPlace(HostSlab(of_host, device=CPU, what="a test"), make_links(CPU), store)
    return OwnedState(bucket, Groups({}, {}), shares, away=away, host=host)


def reduce(bucket: FlatBucket, state: OwnedState, *, early: bool = True) -> None:
    bucket.gradient.normal_()
    state.start_grad_reduce()
    if early:
        state.take_if_reduced()
    state.finish_grad_reduce()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shares", [None, (1.0,)])
@pytest.mark.parametrize("direct", [True, False])
def test_state_elsewhere_changes_no_bit_and_takes_what_it_needs(
    dtype: torch.dtype,
    shares: tuple[float, ...] | None,
    direct: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(disk_sizes, "DISK_CHUNK", 1024)
    monkeypatch.setattr(optimizer_tiers, "CHUNK", 1024)
    if not direct:
        monkeypatch.delattr(os, "O_DIRECT")

    def trained(away: Away) -> tuple[OwnedState, FlatBucket]:
        bucket = model_of(dtype)
        state = state_of(bucket, shares, away, tmp_path)
        optimizer = Optimizer([state], config(weight_decay=0.1))
        for step in range(5):
            reduce(bucket, state, early=bool(step % 2))
            if step == 2:
                # Skipped: not finite.
                continue
            optimizer.step(0.1, factor=0.5)
            state.finish_weight_sync()
        optimizer.settle()
        return state, bucket

    here, resident = trained(Away())
    for away in (Away(0.3), Away(1.0), Away(1.0, 1.0), Away(0.5, 0.5), Away(0.01, 1.0)):
        state, bucket = trained(away)
        assert torch.equal(bucket.weights, resident.weights)
        for kind in STATES:
            ours = torch.cat([getattr(shard, kind) for shard in state.shards])
            assert torch.equal(ours, torch.cat([getattr(shard, kind) for shard in here.shards]))
        stepped = sum(shard.master.numel() for shard in state.shards if shard.on_host)
        assert stepped == pytest.approx(away.share * bucket.weights.numel(), abs=64)
        if not away.on_disk:
            chunks = list(state.host_chunks)
            assert len(chunks) > 2 and {chunk.decays for chunk in chunks} == {True, False}
            # Master, gradient and two moments, each rounded up to a cache line, and nothing beside them.
            needed = 4 * bucket.gradient.itemsize * stepped
            assert needed <= away_bytes(bucket, shares, away)[0] <= needed + 4 * 64
    assert not list(tmp_path.iterdir())


def test_a_full_disk_and_one_that_cannot_be_used_are_told_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DiskError, match="memory.disk_directory: .*file: "):
        DiskFile(tmp_path / "file", 4096)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DiskError, match=r"this rank needs 12.0 KiB of the disk, and .* are free \(No space"):
        DiskFile(tmp_path, 3 * 4096)
    assert DiskError.exit_code == 2 and [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("fault", ["short read", "short write", "stalls"])
def test_a_disk_that_fails_ends_the_step(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk_sizes, "DISK_CHUNK", 1024)
    bucket = model_of(torch.float32)
    state = state_of(bucket, None, Away(1.0, 1.0), tmp_path, timeout_seconds=0.05)
    optimizer = Optimizer([state], config())
    reduce(bucket, state)
    ended = threading.Event()
    call = "pwritev" if fault == "short write" else "preadv"
    monkeypatch.setattr(os, call, lambda *_: ended.wait(60) if fault == "stalls" else 512)
    wanted = {
        "short read": "a read failed: 512 of 4096 bytes were read",
        "short write": "a write failed: 512 of 4096 bytes were written",
        "stalls": r"has not answered a read in 50 ms \(train.timeout\)",
    }[fault]
    with pytest.raises(TrainingError, match=wanted):
        for _ in range(2):
            optimizer.step(0.1)
            optimizer.settle()
            reduce(bucket, state)
    ended.set()
