"""python -m yuan_train.machine.receive FOLDER: writes the files of a tar stream, each whole or not at all."""

from __future__ import annotations

import os
import shutil
import sys
import tarfile
from pathlib import Path
from typing import IO


def receive(stream: IO[bytes], folder: Path) -> int:
    """Write the files of the stream; names are relative to the folder, or absolute. Returns their number."""
    count = 0
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        for member in archive:
            source = archive.extractfile(member)
            assert source is not None, "the sender packs files alone"
            target = folder / member.name
            target.parent.mkdir(parents=True, exist_ok=True)
            draft = target.with_name(f".{target.name}.{os.getpid()}")
            try:
                with draft.open("wb") as file:
                    shutil.copyfileobj(source, file, 1 << 20)
                draft.chmod(member.mode)
                os.utime(draft, (member.mtime, member.mtime))
                draft.replace(target)
            finally:
                draft.unlink(missing_ok=True)
            count += 1
    return count


if __name__ == "__main__":
    print(receive(sys.stdin.buffer, Path(sys.argv[1])))
