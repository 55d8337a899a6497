"""What a node's launcher tells the other nodes: what its ranks have not come to tell them by themselves.

Before its ranks have met the others, nobody notices that one is missing: a typo in a node's run file, or a
rank that is killed while it imports torch, would leave the others waiting for `train.startup_timeout`.
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from yuan_train.config.errors import YuanError, say
from yuan_train.parallel.environment import is_host_name, is_this_machine, running_seconds, set_rank_defaults

FIND_SECONDS = 5.0
"""In which one who does not know whether it is the first node finds the store of another."""
TELL_SECONDS = 4.0
"""For which it waits for the others, who were started with it, and have as much to import."""
IMPORTS, MOST_SECONDS = 3.0, 30.0
"""And as often as this the time since this process has started, at most so long: most of it goes into the
import of torch, and as slow may that be there."""


@dataclass(frozen=True)
class NodeFaults:
    """The ranks of a run, as the launcher of one of its nodes knows them."""

    name: str | None
    """This node, by the plan; None: it is not known."""
    ranks: tuple[int, ...]
    """Those of this node; none: they are not known."""
    world_size: int
    """0: it is not known."""
    address: tuple[str, int]
    """Where the ranks meet."""

    def tell(self, text: str, exit_code: int, *, rank: int | None = None) -> None:
        """Tell the ranks of other nodes a fault of this one, or of a rank of it, if they come in time."""
        if len(self.ranks) == self.world_size > 0 or not is_host_name(self.address[0]):
            return
        # Torch holds the store, and speaks its language; where it cannot be imported, nobody can be told.
        set_rank_defaults()
        with suppress(ImportError, OSError):
            from yuan_train.parallel.board import Fault, Meeting
            from yuan_train.train.ending import tell_for_node

            slow = min(IMPORTS * running_seconds(), MOST_SECONDS)
            node = f"{self.name} on {socket.gethostname()}" if self.name else socket.gethostname()
            where = f"launch of {node}" if rank is None else f"rank {rank} ({node})"
            # Its ranks hear of nothing: they are not started, or are ended with it. This process does.
            silent = max(len(self.ranks) - 1, 0)
            for own in self.ranks[:1] or ((0,) if is_this_machine(self.address[0]) else (-1, 0)):
                meeting = Meeting(*self.address, own, self.world_size, "0", is_agents=False)
                fault = Fault(own if rank is None else rank, where, text, exit_code, silent)
                seconds = slow + (FIND_SECONDS if own < 0 else TELL_SECONDS)
                print(f"telling the other nodes, for at most {seconds:.0f} s", file=sys.stderr)
                if tell_for_node(meeting, fault, seconds):
                    return


@contextmanager
def telling_other_nodes(known: Callable[[], NodeFaults | None]) -> Iterator[None]:
    """Around what a launcher does before its ranks run: what it finds wrong is said, and told to the other
    nodes, which would wait for it. `known` says what is known of them then; None: there are none."""
    try:
        yield
    except YuanError as error:
        say(error)
        faults = known()
        if faults is not None:
            faults.tell(str(error), error.exit_code)
        raise
