"""The parts of a forward, and who follows them: halves of layers, embedding and head with the outer ones."""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class Parts(Protocol):
    """Follows a part of the model through one forward and its backward. Autograd's hooks keep through it what
    the layers save for the backward."""

    def share(self, *tensors: Tensor | None) -> None:
        """These are used by several parts, or kept by the caller: they stay where they are."""
        ...

    def enter(self, hidden: Tensor) -> None:
        """The next part begins; all that it computes depends on `hidden`, which nothing before it uses."""
        ...

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of a tensor that the running part saves."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, for the backward."""
        ...
