"""The agents of all nodes, kept running by the machine on which a supervised run was started.

It stands alone because no agent knows of it: each may be started by hand.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from torch.distributed import TCPStore

from yuan_train.config.errors import INTERRUPTED, ConfigError
from yuan_train.config.signals import hearing
from yuan_train.supervise.room import halt, note_end, read_end

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.5
RETRY_SECONDS = 5.0
"""Between two starts of an agent on a node that does not answer."""
REFUSALS = 3
"""Agents of a node that may find its files wrong before no other one is started."""
END_SECONDS = 60.0
"""In which all agents have ended once the run has."""


@dataclass(frozen=True)
class _Agent:
    """The process of an agent, here or at the end of an ssh connection."""

    node: str
    process: subprocess.Popen[bytes] | None
    ended_at: float = 0.0
    refusals: int = 0
    """How often one has ended in a row because it found its input wrong."""


def keep_agents(lines: Mapping[str, Sequence[str]], store: TCPStore) -> int:
    """Keep the agent of each node running, by its command, until the run ends; returns the exit code.

    SIGTERM and Ctrl-C have all save and end. Raises ConfigError where a command cannot be started.
    """
    agents = [_Agent(node, _spawn(line)) for node, line in lines.items()]
    with _stopping() as asked:
        try:
            while (ended := read_end(store)) is None:
                if asked[0]:
                    halt(store)
                before = agents
                agents = [_kept_alive(agent, lines[agent.node], may_start=not asked[0]) for agent in agents]
                for agent, old in zip(agents, before, strict=True):
                    if (agent.process is None) != (old.process is None):
                        note_end(store, agent.node, is_gone=agent.process is None)
                if all(agent.process is None for agent in agents):
                    if asked[0]:
                        return INTERRUPTED if asked[0] == signal.SIGINT else 0
                    if all(agent.refusals >= REFUSALS for agent in agents):
                        return ConfigError.exit_code
                time.sleep(POLL_SECONDS)
        finally:
            _end(agents)
    if ended.code:
        print(f"error: {ended.reason}", file=sys.stderr)
    return ended.code


def _spawn(line: Sequence[str]) -> subprocess.Popen[bytes] | None:
    try:
        return subprocess.Popen(line, stdin=subprocess.DEVNULL, start_new_session=True)
    except OSError as error:
        raise ConfigError(f"{line[0]}: cannot be started: {error}; --ssh names the command") from None


def _kept_alive(agent: _Agent, line: Sequence[str], *, may_start: bool) -> _Agent:
    """The agent, or another one some seconds after it has ended: its node may be back."""
    if agent.process is not None:
        code = agent.process.poll()
        if code is None:
            return agent
        logger.warning("supervise: the agent of %s has ended (exit code %d)", agent.node, code)
        refusals = agent.refusals + 1 if code == ConfigError.exit_code else 0
        if refusals == REFUSALS:
            logger.warning(
                "supervise: %s is started no more: what it says above has to be mended", agent.node
            )
        return replace(agent, process=None, ended_at=time.monotonic(), refusals=refusals)
    too_early = time.monotonic() < agent.ended_at + RETRY_SECONDS
    if too_early or not may_start or agent.refusals >= REFUSALS:
        return agent
    return replace(agent, process=_spawn(line))


@contextmanager
def _stopping() -> Iterator[list[int]]:
    """Inside, SIGTERM and Ctrl-C only set element 0 of the yielded list, to their number."""
    asked = [0]

    def ask(signum: int, frame: object) -> None:
        asked[0] = signum

    with hearing({signal.SIGTERM: ask, signal.SIGINT: ask}):
        yield asked


def _end(agents: Sequence[_Agent]) -> None:
    """Wait for the agents, which know that the run has ended; then have those end that do not."""
    end = time.monotonic() + END_SECONDS
    for agent in agents:
        if agent.process is None:
            continue
        try:
            agent.process.wait(timeout=max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            agent.process.terminate()
            agent.process.wait(timeout=END_SECONDS)
