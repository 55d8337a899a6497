"""Selective recompute: what is cheap to make again is not kept from the forward to the backward.

Autograd keeps the inputs of each op for that op's backward. In a layer those that come out of a norm or of
the SwiGLU product, about two fifths of all bytes, can be made again by one pass over memory from tensors that
are kept anyway; what comes out of a product of matrices, of the filter or of attention is dear, and is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


class Keeping:
    """How a layer keeps its tensors for the backward: as autograd does, all that is needed."""

    def note(self, made: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `made`, which is function(*inputs): cheap, from inputs that are kept anyway."""
        return made

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return function(*inputs), all of whose parts are cheap."""
        return function(*inputs)


KEEP_ALL = Keeping()


class KeepingDear(Keeping):
    """Keeps what is dear, and of what is cheap how to make it again.

    Autograd's hooks see every tensor that an op saves; one that was noted, or a view of it, is let go and
    made again when the backward asks for it, by the same function from the same inputs: not a bit differs. So
    it does not matter what reads the tensor: a linear map, cut over cards or with its backward split, or the
    filter.
    """

    def __init__(self) -> None:
        self._noted: dict[int, tuple[Tensor, _Recipe]] = {}
        """By address of the storage, which stays taken as long as the tensor stands here."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Around a layer's forward."""
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield
        self._noted.clear()

    def note(self, made: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        recipe = _Recipe(function, tuple(x.detach() for x in inputs))
        self._noted[made.untyped_storage().data_ptr()] = (made, recipe)
        return made

    def run(self, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        # The hooks above would keep what the parts of `function` hand each other. Nothing in it is random.
        made = checkpoint(function, *inputs, use_reentrant=False, preserve_rng_state=False)
        return self.note(cast(Tensor, made), function, *inputs)

    def _pack(self, tensor: Tensor) -> Tensor | _View:
        noted = self._noted.get(tensor.untyped_storage().data_ptr())
        if noted is None:
            return tensor
        recipe = noted[1]
        recipe.uses += 1
        return _View(recipe, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _unpack(packed: Tensor | _View) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed.take()


class _Recipe:
    """Makes a tensor again; holds it from the first of its uses to the last."""

    def __init__(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> None:
        self._function = function
        self._inputs = inputs
        self._made: Tensor | None = None
        self.uses = 0

    def make(self) -> Tensor:
        made = self._made
        if made is None:
            with torch.no_grad():
                made = self._function(*self._inputs)
        self.uses -= 1
        self._made = made if self.uses > 0 else None
        return made


class _View:
    """One use of a recipe's tensor: as it is, or as flat rows."""

    def __init__(
        self, recipe: _Recipe, size: tuple[int, ...], stride: tuple[int, ...], storage_offset: int
    ) -> None:
        self._recipe = recipe
        self._size, self._stride, self._storage_offset = size, stride, storage_offset

    def take(self) -> Tensor:
        return self._recipe.make().as_strided(self._size, self._stride, self._storage_offset)
