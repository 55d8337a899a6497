"""Transports between two processes over gloo; pinned memory and nccl need CUDA devices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.parallel.groups import init_distributed, make_pair, shutdown
from yuan_train.parallel.ranges import Ranges
from yuan_train.parallel.transport import HostStagedTransport, LostPeer, NcclTransport, _host_copy

CPU = torch.device("cpu")


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
    direct.free()
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
    copied = _host_copy(sent)
    assert copied.device.type == "cpu" and copied.is_pinned()
    assert torch.equal(copied.to("cuda", copy=True), sent)
