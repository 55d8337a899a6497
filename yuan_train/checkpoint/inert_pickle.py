"""Reads pickles that may name code without running any: only tensors and plain values are created.

Objects of known other classes become `Inert`; anything else is refused.
"""

from __future__ import annotations

import pickle
import types
import warnings
import zipfile
from pathlib import Path
from typing import Any

import torch

from yuan_train.config.errors import CheckpointError


class Inert:
    """In place of an object whose class we do not import: keeps its state and does nothing."""

    state: Any = None
    """What the pickle sets as the object's state."""

    def __new__(cls, *_: Any, **__: Any) -> Inert:
        return super().__new__(cls)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        self.state = state


_TENSORS = {
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch._utils", "_rebuild_tensor"),
    ("torch._utils", "_rebuild_parameter"),
    ("torch.serialization", "_get_layout"),
    ("collections", "OrderedDict"),
}

_INERT = ("argparse.Namespace", "megatron.", "numpy.", "_codecs.encode")
"""Prefixes of what the original code saves besides tensors: arguments, enumerations, generator states."""


class _InertUnpickler(pickle.Unpickler):
    """Creates tensors, and an `Inert` for known other classes; refuses all else. Imports nothing."""

    def find_class(self, module: str, name: str, /) -> Any:
        if (module, name) in _TENSORS:
            return super().find_class(module, name)
        if module == "torch":
            value = getattr(torch, name, None)
            if value in (torch.Size, torch.device) or isinstance(value, torch.dtype):
                return value
        if f"{module}.{name}".startswith(_INERT):
            return Inert
        if module in ("builtins", "__builtin__") and name == "getattr":
            # Newer Pythons pickle a member of an enumeration as a call of getattr.
            return _inert_member
        raise pickle.UnpicklingError(f"{module}.{name} does not belong in a checkpoint")


def _inert_member(owner: object, name: str) -> Inert:
    """In place of `getattr(owner, name)` of an inert class. Raises UnpicklingError for any other owner."""
    if owner is not Inert:
        raise pickle.UnpicklingError(f"builtins.getattr of {owner!r} does not belong in a checkpoint")
    return Inert()


def load_inert(path: Path) -> Any:
    """The content of a rank's file, with memory-mapped tensors.

    Raises CheckpointError if the file is truncated or hostile.
    """
    restricted = types.SimpleNamespace(__name__="narrow", Unpickler=_InertUnpickler, load=_unpickle)
    try:
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as content:
                if any(name.endswith("constants.pkl") for name in content.namelist()):
                    raise pickle.UnpicklingError("a TorchScript program, not a checkpoint")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            mapped = zipfile.is_zipfile(path)
            return torch.load(
                path, map_location="cpu", pickle_module=restricted, weights_only=False, mmap=mapped or None
            )
    except Exception as error:
        # Hostile bytes can raise anything, but no code of theirs was called.
        cause = str(error).split("\n")[0][:200]
        raise CheckpointError(
            f"{path}: torn, or holds more than it should (nothing in it was run): {cause}"
        ) from None


def _unpickle(file: Any, **_: Any) -> Any:
    return _InertUnpickler(file).load()
