"""Selective recompute: tensors that are cheap to recompute are not saved for the backward.

Autograd saves the inputs of each op for that op's backward. In a layer, the saved outputs of the norms and of
the SwiGLU product are about three tenths of all saved bytes. One pass over memory recomputes them from
tensors that are saved anyway. The outputs of matrix products, of the filter and of attention are expensive to
recompute, and are saved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


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


T = TypeVar("T")


class RecomputePolicy:
    """Decides which tensors of a layer are saved for the backward. This base saves all, as autograd does.

    A layer passes its cheap tensors through the policy, which may recompute them in the backward.
    """

    def mark_recomputable(self, output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `output`, which is function(*inputs): cheap, and its inputs are saved anyway, or marked."""
        return output

    def decide(self, decision: Callable[[], T]) -> T:
        """Return `decision()`, or what it returned when the layer was run before. Once per layer."""
        return decision()

    def enter_half(self, hidden: Tensor) -> None:
        """The layer's second half begins, with `hidden` of the first."""


SAVE_ALL = RecomputePolicy()


class SaveInParts(RecomputePolicy):
    """Saves all, through `parts` if given."""

    def __init__(self, parts: Parts | None = None) -> None:
        self._parts = parts

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of the layer's forward: inside it, tensors are saved as the policy says."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def enter_half(self, hidden: Tensor) -> None:
        if self._parts is not None:
            self._parts.enter(hidden)

    def _pack(self, tensor: Tensor) -> Any:
        return tensor if self._parts is None else self._parts.pack(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        return packed if self._parts is None else self._parts.unpack(packed)


class KeptDecision(RecomputePolicy):
    """For a layer that is run again in the backward: keeps what it decided, as an expert of a token."""

    def __init__(self) -> None:
        self._decided: Any = None

    def decide(self, decision: Callable[[], T]) -> T:
        if self._decided is None:
            self._decided = decision()
        return self._decided


class SelectiveRecompute(SaveInParts):
    """Saves the expensive tensors of one layer's forward, and recomputes the marked ones in the backward.

    Autograd's hooks see every tensor that an op saves. A marked tensor, or a view of it, is not saved: when
    the backward needs it, the same function recomputes it from the same inputs, bit for bit. So it does not
    matter which op reads the tensor: a linear map, sharded or with a split backward, or the filter.

    What is saved after all is saved through `parts`, if given.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        super().__init__(parts)
        self._marked: dict[int, tuple[Tensor, _RecomputeFn]] = {}
        """By address of the storage. Holding the tensor here keeps that address from being reused."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        with super().saving():
            yield
        self._marked.clear()

    def mark_recomputable(self, output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if output.numel() == 0:
            # All empty storages have the same address.
            return output
        # An input that is marked itself is recomputed first.
        inputs_packed = tuple(self._pack(x.detach()) for x in inputs)
        recompute = _RecomputeFn(function, inputs_packed, self._unpack)
        self._marked[output.untyped_storage().data_ptr()] = (output, recompute)
        return output

    def _pack(self, tensor: Tensor) -> Any:
        marked = self._marked.get(tensor.untyped_storage().data_ptr())
        if marked is None:
            return super()._pack(tensor)
        recompute = marked[1]
        recompute.uses += 1
        return _View(recompute, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _View):
            return packed.made.recompute().as_strided(packed.size, packed.stride, packed.storage_offset)
        return super()._unpack(packed)


class _RecomputeFn:
    """Recomputes a tensor at the first of its uses in the backward, and holds it until the last."""

    def __init__(
        self, function: Callable[..., Tensor], inputs: tuple[Any, ...], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._function, self._unpack, self._inputs = function, unpack, inputs
        self._output: Tensor | None = None
        self.uses = 0

    def recompute(self) -> Tensor:
        output = self._output
        if output is None:
            with torch.no_grad():
                output = self._function(*map(self._unpack, self._inputs))
        self.uses -= 1
        self._output = output if self.uses > 0 else None
        return output


class _View(NamedTuple):
    """One saved use of a recomputable tensor: the tensor itself or a view of it, by size and strides."""

    made: _RecomputeFn
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int
