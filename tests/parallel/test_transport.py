"""Transports between two processes over gloo, and sums through a tree; pinned memory and nccl need a card."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist

from tests.support.fake_card import FakeCard
from tests.support.project import make_project, parse_plan, run_config
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.errors import LostRank
from yuan_train.parallel import board, groups
from yuan_train.parallel.device import CPU, CudaDevice
from yuan_train.parallel.executor import Boundary, Bridge
from yuan_train.parallel.grid import Edge, Grid
from yuan_train.parallel.groups import (
    Groups,
    gather_on_first,
    init_distributed,
    make_groups,
    make_pair,
    shutdown,
    sum_over_world,
)
from yuan_train.parallel.transport import (
    HostStagedTransport,
    LostPeer,
    NcclTransport,
    PendingReceive,
    Ranges,
    Transport,
    _host_copy,
    is_lost_connection,
    without_frames,
)
from yuan_train.schedule.step import Step


def _body(rank: int, port: int) -> None:
    as_rank(rank, 2, port)
    init_distributed(device=CPU, timeout_seconds=30)
    direct = make_pair((0, 1), device=CPU, via_host=False, timeout_seconds=30)
    staged = make_pair((0, 1), device=CPU, via_host=True, timeout_seconds=2)
    assert isinstance(staged, HostStagedTransport)
    values = torch.arange(4.0) + 10 * rank
    for transport in (direct, staged):
        posted = transport.post((2, 2), torch.float32, 1 - rank)
        sent = transport.send(values.view(2, 2), 1 - rank)
        assert posted.take().flatten().tolist() == [10.0 * (1 - rank) + i for i in range(4)]
        # gloo tells of a message only when it has been waited for.
        assert not sent.is_done()
        sent.wait()
        assert sent.is_done()
    total = [10.0 + 2 * i for i in range(4)]
    summed = values.clone()
    pending = direct.all_reduce(summed, "an all-reduce")
    pending.finish(30)
    assert pending.is_done() and summed.tolist() == total
    copied = values.clone()
    direct.broadcast(copied, 1, "a broadcast").wait()
    assert copied.tolist() == [10.0, 11.0, 12.0, 13.0]
    # One all-reduce, and a broadcast for each range that is not empty; then, as on nccl, an operation for
    # each, or one for all equal ones.
    on_nccl = NcclTransport(direct._group, (0, 1), device=CPU)  # pyright: ignore
    on_nccl._polls = False  # pyright: ignore
    for transport, sizes in ((direct, (3, 1)), (direct, (0, 4)), (on_nccl, (3, 1)), (on_nccl, (2, 2))):
        ranges = Ranges(sizes)
        own = slice(*ranges.of(rank))
        summed = values.clone()
        transport.reduce_ranges(summed, ranges, "a reduction").wait()
        assert summed[own].tolist() == total[own]
        gathered = torch.zeros(4)
        gathered[own] = summed[own]
        transport.gather_ranges(gathered, ranges, "a gather").wait()
        assert gathered.tolist() == total
    direct.close()
    dist.barrier()
    if rank == 0:
        with pytest.raises(LostPeer, match="the message from rank 1 failed; rank 1 is gone or stuck"):
            staged.post((1,), torch.float32, 1).take()
    dist.barrier()
    shutdown()


def test_messages_and_collectives_between_two_processes() -> None:
    spawn(_body, 2, free_port())


@pytest.mark.gpu
def test_a_message_leaves_a_card_through_pinned_memory() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    sent = torch.randn(3, 5, 7, dtype=torch.bfloat16, device="cuda")
    copied = _host_copy(sent, CudaDevice(0))
    assert copied.device.type == "cpu" and copied.is_pinned()
    assert torch.equal(copied.to("cuda", copy=True), sent)


class FullCard:
    """A transport whose operations fail with an error of the test."""

    open_receives_hold_up_nothing = False

    def __init__(self, error: RuntimeError) -> None:
        self._error = error

    def post(self, *_: object) -> PendingReceive:
        raise self._error

    send = post


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), torch.OutOfMemoryError),
        (torch.AcceleratorError("CUDA error: an illegal memory access"), torch.AcceleratorError),
        (RuntimeError("Connection closed by peer"), LostRank),
    ],
)
def test_a_full_card_is_no_lost_neighbour(
    error: RuntimeError, raised: type[Exception], tmp_path: Path
) -> None:
    grid = Grid(parse_plan(run_config(make_project(tmp_path)), "1x8: 3@0 | 3@1"))
    step = Step("receive_activation", 1, 3)
    edge, transport = Edge(0, 0, True, 0, 1), cast("Transport", FullCard(error))
    boundary = Boundary((1, 2, 3), torch.float32, CPU.torch)
    bridge = Bridge(grid, grid.coords[1], Groups({edge: transport}, {}), boundary, proofs={}, window=2)
    with pytest.raises(raised) as found:
        bridge.post(step)
    assert ("rank 0 is gone" in str(found.value)) == (raised is LostRank)


GLOO = "[/third_party/gloo/gloo/transport/tcp/pair.cc:553] "


@pytest.mark.parametrize(
    ("error", "is_lost"),
    [
        (RuntimeError(GLOO + "Connection closed by peer [127.0.0.1]:18649."), True),
        (RuntimeError(GLOO + "Timed out waiting 3000ms for recv operation to complete"), True),
        (RuntimeError("Application timeout caused pair closure"), True),
        (RuntimeError("Broken pipe"), True),
        (LostPeer("a sum failed; rank 5 is gone or stuck"), True),
        (dist.DistBackendError("NCCL error: ncclRemoteError: remote process exited"), True),
        (dist.DistNetworkError("The client socket has timed out after 60000ms"), True),
        (dist.DistStoreError("wait timeout after 2000ms, keys: /default_pg/0//2//cpu//0/1"), True),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), False),
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), False),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory"),
            False,
        ),
        (dist.DistBackendError("NCCL error: unhandled cuda error. Last error: Cuda failure 2"), False),
        (dist.DistBackendError("Call to CUDA function failed: 'out of memory'"), False),
        (RuntimeError("ProcessGroupGloo::send takes a single tensor"), False),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x3 and 4x3)"), False),
        (NotImplementedError("a timeout is not implemented"), False),
        (ValueError("connection"), False),
    ],
    ids=lambda value: str(value)[:50],
)
def test_only_a_lost_connection_blames_a_peer(error: Exception, is_lost: bool) -> None:
    assert is_lost_connection(error) == is_lost


def test_what_is_said_of_a_lost_store_has_no_frames() -> None:
    said = "failed to recv, got 0 bytes. Connection was likely closed. Did the remote server shutdown?"
    frames = (
        "\nException raised from recvBytes at Utils.hpp:696 (most recent call first):\nframe #0: c10::Error"
    )
    assert without_frames(dist.DistNetworkError(said + frames)) == said
    assert without_frames(dist.DistBackendError("NCCL error\nLast error:\nno socket")).endswith("no socket")


def test_messages_have_communicators_of_their_own_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few thread blocks, so that the compute keeps its own, on a stream that goes before it; not so sums."""
    card = FakeCard()
    card.library = "nccl"
    made: dict[tuple[int, ...], set[object]] = {}

    def new_group(ranks: list[int], *, timeout: object, backend: str, pg_options: object) -> None:
        made.setdefault(tuple(ranks), set()).add((backend, pg_options))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(groups, "_warm_up", lambda *_: None)
    run = run_config(make_project(tmp_path))
    make_groups(Grid(parse_plan(run, "1x4: 3@0 | 3@1 / 1x4: 3@2 | 3@3")), device=card, timeout_seconds=1)
    messages = {("nccl", "for messages")}
    assert {ranks for ranks, kinds in made.items() if kinds == messages} == {(0, 1), (1, 0), (2, 3), (3, 2)}
    assert {(0, 2), (1, 3)} < {ranks for ranks, kinds in made.items() if kinds == {("nccl", None)}}
    made.clear()
    make_pair((0, 1), device=card, via_host=False, timeout_seconds=1)
    make_pair((0, 2), device=card, via_host=True, timeout_seconds=1)
    assert made == {(0, 1): messages, (0, 2): {("gloo", None)}}


def test_what_nccl_is_told_of_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    class Options:
        def __init__(self, *, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self.config = SimpleNamespace(max_ctas=32)

    monkeypatch.setattr(dist, "ProcessGroupNCCL", SimpleNamespace(Options=Options), raising=False)
    options = CudaDevice(0).message_options(timedelta(seconds=7))
    assert options.is_high_priority_stream and options.config.max_ctas == 4
    # Torch warns of another timeout than the group's, and a warning is an error.
    assert options._timeout == timedelta(seconds=7)
    assert CPU.message_options(timedelta(seconds=7)) is None


# --- a tree of groups ------------------------------------------------------------------------------------


NUM_RANKS = 5
"""In groups of two: a tree of three levels, whose last groups have one rank only."""


def _sum(rank: int, port: int) -> None:
    as_rank(rank, NUM_RANKS, port)
    # As on many ranks: those of the world connect when they first exchange something.
    board.LAZY_FROM = groups.RING_UP_TO = 1
    groups.TREE_WIDTH = 2
    init_distributed(device=CPU, timeout_seconds=60)
    coord = cast(Any, SimpleNamespace(rank=rank))
    tree = Groups({}, {}, tree=groups._make_tree(timeout_seconds=60))
    assert len(tree.tree) == {0: 3, 1: 1, 2: 2, 3: 1, 4: 1}[rank]
    own = torch.tensor([1.0, rank, 2.0**-60 * 3**rank], dtype=torch.float64)
    for held in (tree, Groups({}, {})):
        total = own.clone()
        sum_over_world(held, coord, total, "the sum")
        assert total.tolist() == [5, 10, 2.0**-60 * (1 + 3 + 9 + 27 + 81)]
        found = gather_on_first(held, coord, own, "the gather")
        assert found == ([[1.0, r, 2.0**-60 * 3**r] for r in range(NUM_RANKS)] if rank == 0 else None)
    total = own / 3
    sum_over_world(tree, coord, total, "the sum")
    same = [torch.empty_like(total) for _ in range(NUM_RANKS)]
    dist.all_gather(same, total)
    assert all(torch.equal(other, total) for other in same)
    shutdown()


def test_a_tree_sums_and_gathers_as_a_ring_does() -> None:
    spawn(_sum, NUM_RANKS, free_port())
