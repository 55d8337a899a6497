"""The planner's compiled core: built from the C files beside this one, loaded once, and what it declares.

setup.py builds it where the package is installed. In a checkout whose C files have changed since, or that
was never installed, it is built when it is first asked for. The name of the built file says what it was built
from, so a stale one is never loaded. It stands alone because setup.py runs it so: it imports nothing of ours
at its top.

All machines must round alike, for equal input gives equal plans: no fused multiply-add, no sums rearranged.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

FOLDER = Path(__file__).parent
FLAGS = ("-std=c11", "-O3", "-ffp-contract=off", "-fPIC", "-shared", "-Wall", "-Wextra")
ZIG = (sys.executable, "-m", "ziglang", "cc")
"""The C compiler of the package ziglang, for machines that have none of their own."""
BUILD_SECONDS = 300


def find_compiler() -> tuple[str, ...] | None:
    """The command of this machine's C compiler: $CC, cc, gcc, clang, or the package ziglang's."""
    for name in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        if name and shutil.which(name.split()[0]):
            return tuple(name.split())
    # Zig checks for undefined behaviour unless asked otherwise.
    return (*ZIG, "-fno-sanitize=all") if importlib.util.find_spec("ziglang") else None


def sources() -> list[Path]:
    """The C files and their headers."""
    return sorted([*FOLDER.glob("*.c"), *FOLDER.glob("*.h")])


def library_name() -> str:
    """The file name of the library that these sources and flags make on this kind of machine."""
    digest = hashlib.sha256(repr((FLAGS, sys.platform, platform.machine())).encode())
    for path in sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return f"core-{digest.hexdigest()[:16]}.so"


def build(folder: Path, *, flags: Sequence[str] = ()) -> Path:
    """Compile the sources into a library in `folder`, with `flags` besides FLAGS; the file appears when it is
    whole. Raises RuntimeError without a compiler, with what to do, and if the compiler fails, with its
    words."""
    compiler = find_compiler()
    if compiler is None:
        raise RuntimeError(
            "the planner's core is C, and this machine has no compiler ($CC, cc, gcc, clang, or the package "
            "ziglang); install one (Debian and Ubuntu: apt-get install gcc; anywhere: pip install ziglang)"
        )
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / library_name()
    with tempfile.TemporaryDirectory(dir=folder, prefix=".build-") as scratch:
        made = Path(scratch) / target.name
        files = [str(path) for path in sources() if path.suffix == ".c"]
        environment = {"ZIG_GLOBAL_CACHE_DIR": scratch, **os.environ}
        ran = subprocess.run(
            [*compiler, *FLAGS, *flags, "-o", str(made), *files, "-lm"],
            capture_output=True,
            text=True,
            timeout=BUILD_SECONDS,
            env=environment,
        )
        if ran.returncode:
            raise RuntimeError(
                f"{compiler[0]} could not compile the planner's core: {ran.stderr.strip()[-2000:]}"
            )
        made.replace(target)
    if folder == FOLDER:
        for stale in set(folder.glob("core-*.so")) - {target}:
            stale.unlink(missing_ok=True)
    return target


def _find_or_build() -> Path:
    name, cache = library_name(), Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    for folder in (FOLDER, cache / "yuan_train"):
        if (folder / name).exists():
            return folder / name
    return build(FOLDER if os.access(FOLDER, os.W_OK) else cache / "yuan_train")


@functools.cache
def load_library() -> ctypes.CDLL:
    """The core, built if need be. Raises ConfigError if it is not there and cannot be built."""
    from yuan_train.config.errors import ConfigError

    try:
        return ctypes.CDLL(str(_find_or_build()))
    except (RuntimeError, OSError, subprocess.SubprocessError) as error:
        raise ConfigError(f"yuan_train/planner/native: {error}") from error


# --- what the headers declare, which is written once, in C --------------------------------------------------


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
