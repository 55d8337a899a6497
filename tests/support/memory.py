"""Measures the bytes that a forward keeps for its backward, and the most that a call holds at once."""

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.autograd.profiler import profile
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _StorageRecorder(TorchDispatchMode):
    """Records the storage of every op's result, by weak reference."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                self.seen[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return result


def kept_bytes(forward: Callable[[], torch.Tensor], *, beside: Iterable[torch.Tensor] = ()) -> int:
    """Bytes that `forward` allocated and that are alive when it returns, its result included.

    The storage of the tensors in `beside` (such as weights, of which an op may return a view) does not count.
    """
    with _StorageRecorder() as recorder:
        result = forward()
    for tensor in beside:
        recorder.seen.pop(tensor.untyped_storage()._cdata, None)
    kept = sum(size for storage, size in recorder.seen.values() if not storage.expired())
    del result
    return kept


def most_bytes(run: Callable[[], Any]) -> int:
    """Most bytes that `run` had allocated at once on the CPU, of those that it allocated itself."""
    profiler: Any = profile(profile_memory=True)
    with profiler:
        run()
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns()))
    return max(held, default=0)
