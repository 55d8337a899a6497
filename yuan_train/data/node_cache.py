"""Arrays that the processes of a node share: computed by one of them, memory-mapped by all.

What a large corpus needs beside its files (document orders, splits, what a check of its index has found) is
a function of the corpus and the seed. So it is kept in a folder under a name made of all that it depends on:
beside the corpus or, if nothing can be written there, in the system's folder of temporary files. A folder
gets its name when it is complete; nothing is ever changed, and nothing is removed: delete what no run uses.
"""

import contextlib
import fcntl
import json
import logging
import os
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from yuan_train.config.errors import DataError

logger = logging.getLogger(__name__)

T = TypeVar("T")

SHARED_FROM = 1 << 16
"""Documents from which on a corpus is worth files: below, its arrays take a process 2 MiB at most."""

Shapes = Mapping[str, tuple[int, np.dtype]]
"""Length and dtype of each array of an entry."""


class NodeCache:
    """Arrays and facts by name, in the first of some folders that can be written.

    `folders` are created when needed. Raises DataError if none can be written.
    """

    def __init__(self, folders: tuple[Path, ...]) -> None:
        self._folders = folders

    def arrays(
        self, name: str, shapes: Shapes, fill: Callable[[Mapping[str, np.ndarray]], None]
    ) -> dict[str, np.ndarray]:
        """The arrays of an entry, memory-mapped and read-only.

        `fill` writes into arrays of these shapes, if no process of the node has done so before.
        """

        def write(folder: Path) -> None:
            made = {
                key: np.lib.format.open_memmap(_file(folder, key), mode="w+", dtype=dtype, shape=(length,))
                for key, (length, dtype) in shapes.items()
            }
            fill(made)
            for array in made.values():
                array.flush()

        def read(folder: Path) -> dict[str, np.ndarray]:
            found = {key: np.load(_file(folder, key), mmap_mode="r") for key in shapes}
            for key, (length, dtype) in shapes.items():
                if found[key].shape != (length,) or found[key].dtype != dtype:
                    raise ValueError(f"{key} has shape {found[key].shape}, wanted {length}")
            return found

        return self._entry(name, write, read)

    def facts(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Plain JSON values, made by the first process that asks for them."""
        return self._entry(
            name,
            lambda folder: (folder / "facts.json").write_text(json.dumps(make()), encoding="utf-8"),
            lambda folder: json.loads((folder / "facts.json").read_text(encoding="utf-8")),
        )

    def _entry(self, name: str, write: Callable[[Path], object], read: Callable[[Path], T]) -> T:
        """What `read` makes of the entry's folder, which `write` fills if it is missing or damaged."""
        faults: list[str] = []
        for folder in filter(_is_trusted, self._folders):
            with contextlib.suppress(OSError, ValueError):
                return read(folder / name)
        for folder in self._folders:
            try:
                _make_writable(folder)
                with _locked(folder / f".{name}.lock"):
                    with contextlib.suppress(OSError, ValueError):
                        return read(folder / name)  # Another process has written it in the meantime.
                    _write_entry(folder / name, write)
                return read(folder / name)
            except (OSError, ValueError) as error:
                faults.append(f"{folder}: {getattr(error, 'strerror', None) or error}")
        raise DataError(
            f"the document order of a corpus cannot be written: {'; '.join(faults)}; "
            "free some space there, or make one of them writable"
        )


def shared_or_own(
    cache: NodeCache | None,
    name: str,
    shapes: Shapes,
    fill: Callable[[Mapping[str, np.ndarray]], None],
) -> dict[str, np.ndarray]:
    """Arrays that the node shares or, without a cache, arrays of this process."""
    if cache is not None:
        return cache.arrays(name, shapes, fill)
    made = {key: np.empty(length, dtype=dtype) for key, (length, dtype) in shapes.items()}
    fill(made)
    return made


def cache_of(prefix: str) -> NodeCache:
    """The cache of a corpus: `PREFIX.cache/`, else a folder of this user among the temporary files."""
    temporary = Path(tempfile.gettempdir()) / f"yuan-train-{os.getuid()}"
    return NodeCache((Path(f"{prefix}.cache"), temporary))


def _file(folder: Path, key: str) -> Path:
    return folder / f"{key}.npy"


def _make_writable(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if not _is_trusted(folder) or not os.access(folder, os.W_OK):
        raise PermissionError(13, "cannot be written")


def _is_trusted(folder: Path) -> bool:
    """Whether nobody else can have put an entry here: among temporary files anybody can make a folder."""
    if folder.parent != Path(tempfile.gettempdir()):
        return True
    return folder.is_dir() and folder.stat().st_uid == os.getuid()


def _write_entry(final: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder of another name and rename it; processes of other nodes may do the same."""
    temporary = final.with_name(f".{final.name}.{uuid.uuid4().hex}.tmp")
    logger.info("writing %s, once for all processes of this node", final)
    try:
        temporary.mkdir()
        write(temporary)
        if final.exists():
            shutil.rmtree(final, ignore_errors=True)  # Damaged: it could not be read.
        temporary.rename(final)
    except FileExistsError:
        pass
    except OSError:
        if not final.exists():
            raise
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock while an entry is written. Without it (some network file systems) two nodes may write."""
    with path.open("w") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
