"""The ranks of one node, as a process of `yuan-train launch`: started, asked to end, heard."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence

from yuan_train.config.errors import CAUSE
from yuan_train.parallel.environment import end_with_parent

LINES_KEPT = 400
_BY_OTHERS = re.compile(r" \(rank \d+ \(.*$")
"""How another rank has noticed a fault, behind the fault."""


class Ranks:
    """The process that runs a node's ranks; what they print goes through, and its end is kept."""

    def __init__(self, words: Sequence[str]) -> None:
        """`words` are what follows `yuan-train`."""
        self._lines: deque[str] = deque(maxlen=LINES_KEPT)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "yuan_train", *words],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            preexec_fn=end_with_parent,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._asked = False

    def poll(self) -> int | None:
        """The exit code; None while they run."""
        return self._process.poll()

    def ask_to_end(self) -> None:
        """Have them save and end; once."""
        if not self._asked and self.poll() is None:
            self._asked = True
            self._process.terminate()

    def kill(self) -> None:
        """End them as they are; `launch` takes its ranks with it."""
        if self.poll() is None:
            self._process.kill()
        self._process.wait()

    def fault(self) -> str:
        """What they have said of their fault: whose it was, without how others saw it."""
        self._reader.join(timeout=2)
        said = [line.removeprefix("error: ") for line in self._lines if line.startswith("error: ")]
        causes = [line.removeprefix(CAUSE) for line in said if line.startswith(CAUSE)]
        first = (causes or said or [f"exit code {self.poll()}"])[0]
        return _BY_OTHERS.sub("", first)

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line.rstrip("\n"))
            sys.stderr.write(line)
            sys.stderr.flush()
