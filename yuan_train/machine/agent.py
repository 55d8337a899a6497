"""python -m yuan_train.machine.agent COMMAND...: on a machine, runs a command that another machine started.

Its standard input is the rope to the starter: words on it are what to do, and its end is the end of the
starter or of the way to it, so that nothing is left running where nobody sees it.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence

from yuan_train.config.signals import end_with_parent

HELLO, INTERRUPT, TERMINATE, END = b"hello\n", b"interrupt\n", b"terminate\n", b"end\n"
"""What the starter writes: first HELLO; then as a Ctrl-C, as a SIGTERM, and to end within END_SECONDS."""
END_SECONDS = 1.5
SAVE_SECONDS = 120.0
"""What a command has to save and exit, once the starter is gone."""


class _Agent:
    def __init__(self, command: Sequence[str]) -> None:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self.child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            env=environment,
            start_new_session=True,
            preexec_fn=end_with_parent,
        )
        self.deadline: float | None = None
        self.has_starter = False

    def end(self, seconds: float) -> None:
        """Ask the command to end, and kill it when `seconds` are over."""
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGTERM)
        self.deadline = min(self.deadline or float("inf"), time.monotonic() + seconds)

    def hear(self, words: bytes) -> None:
        """Do what stands on the input; nothing there: it has ended."""
        if not words and self.has_starter:
            self.end(SAVE_SECONDS)
        for word in words.splitlines(keepends=True):
            if word == HELLO:
                self.has_starter = True
            elif word == END:
                self.end(END_SECONDS)
            elif self.child.poll() is None and word in (INTERRUPT, TERMINATE):
                self.child.send_signal(signal.SIGINT if word == INTERRUPT else signal.SIGTERM)

    def wait(self) -> int:
        """Listen until the command has ended; returns its exit code, 128 + N after signal N."""
        with selectors.DefaultSelector() as selector:
            selector.register(0, selectors.EVENT_READ)
            while self.child.poll() is None:
                for _ in selector.select(0.1) if selector.get_map() else ():
                    words = os.read(0, 4096)
                    self.hear(words)
                    if not words:
                        selector.unregister(0)
                if not selector.get_map():
                    time.sleep(0.05)
                if self.deadline is not None and time.monotonic() > self.deadline:
                    self.kill()
        self.kill()
        code = self.child.wait()
        return code if code >= 0 else 128 - code

    def kill(self) -> None:
        """Kill the command and all that it has started."""
        try:
            os.killpg(self.child.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass


def main(command: Sequence[str]) -> int:
    """Run a command until it ends, or the starter has it ended. Returns its exit code."""
    agent = _Agent(command)
    signal.signal(signal.SIGINT, lambda *_: agent.hear(INTERRUPT))
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: agent.end(SAVE_SECONDS))
    return agent.wait()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
