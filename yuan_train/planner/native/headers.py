"""What the headers of the compiled core declare, for ctypes: it is written once, in C."""

from __future__ import annotations

import ctypes
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from yuan_train.planner.native.library import sources

INTEGERS = ("int16", "int32", "int64", "uint8", "uint64")
pointer_to: Any = ctypes.POINTER
"""As ctypes has it, for classes that a type checker does not know."""
S = TypeVar("S", bound=ctypes.Structure)
_known: dict[str, Any] = {f"{name}_t": getattr(ctypes, f"c_{name}") for name in INTEGERS}
_known["double"] = ctypes.c_double
"""Types by their names in C: numbers, and the structures that were declared."""


@functools.cache
def _text() -> str:
    """All headers, without comments."""
    texts = (path.read_text() for path in sources() if path.suffix == ".h")
    return re.sub(r"/\*.*?\*/", "", "\n".join(texts), flags=re.S)


def constant(name: str) -> int:
    """The value of a constant of an enumeration."""
    found = re.search(rf"\b{name} = (\d+)", _text())
    assert found is not None, name
    return int(found[1])


def declared(name: str) -> Callable[[type[S]], type[S]]:
    """Give a class the fields of `struct name`; a pointer to a structure not yet declared is an address."""

    def with_fields(own: type[S]) -> type[S]:
        own._fields_ = list(_fields(name))
        _known[name] = own
        return own

    return with_fields


def structure(name: str) -> Any:
    return declared(name)(type(name, (ctypes.Structure,), {}))


def _fields(name: str) -> Iterator[tuple[str, Any]]:
    body = re.search(rf"^struct {name} \{{(.*?)^\}};", _text(), flags=re.S | re.M)
    assert body is not None, name
    for kind, names in re.findall(r"(?:const )?(?:struct )?(\w+) ([^;]+);", body[1]):
        for star, field, length in re.findall(r"(\*?)(\w+)(?:\[(\w+)\])?", names):
            own: Any = _known.get(kind)
            if length:
                own = own * (int(length) if length.isdecimal() else constant(length))
            address: Any = pointer_to(own) if own else ctypes.c_void_p
            yield field, address if star else own


def with_types(core: ctypes.CDLL, *functions: tuple[str, Any, list[Any]]) -> ctypes.CDLL:
    """The core with the results and arguments of some functions."""
    for name, result, arguments in functions:
        function: Any = getattr(core, name)
        function.restype, function.argtypes = result, arguments
    return core
