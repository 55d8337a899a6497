"""Bytes that a forward leaves behind for its backward, whoever keeps them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Witness(TorchDispatchMode):
    """Sees the storage of every op's result."""

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
    """Bytes that `forward` made and that still stand when it is done, its result among them; `beside` (such
    as weights, of which an op may have made a view) does not count."""
    with _Witness() as witness:
        result = forward()
    for tensor in beside:
        witness.seen.pop(tensor.untyped_storage()._cdata, None)
    kept = sum(size for storage, size in witness.seen.values() if not storage.expired())
    del result
    return kept
