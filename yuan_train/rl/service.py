"""The one loop of a rank that works for the policy: it does what the controller asks until that says stop.

Engines and the roles that score rows differ in what they do for a request; how their ranks come together,
hear the controller and end is here. The first rank of an engine, or of a role, leads: it alone talks to the
controller, and tells the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from yuan_train.config.plan import Plan
from yuan_train.config.rl import RLConfig
from yuan_train.config.rl_plan import RlPlan
from yuan_train.parallel.device import Device
from yuan_train.parallel.grid import RankCoord
from yuan_train.parallel.groups import as_training_error
from yuan_train.parallel.links import RolePosition, enter_role, join_role
from yuan_train.parallel.transport import blame_peers, wait_for_all
from yuan_train.rl.engines import Channel, fates_of, job_ranks
from yuan_train.train.ending import ending_together, stop_on_sigterm
from yuan_train.train.out_of_memory import explaining_memory


@contextmanager
def joining(run: RLConfig, roles: RlPlan, plan: Plan, device: Device) -> Iterator[RolePosition]:
    """Around the work of a rank of a role with this plan: it meets all others, and ends with them.

    The policy ends the run, also on SIGTERM; the other roles then hear of it. Raises TrainingError if another
    rank is lost.
    """
    position = join_role(
        job_ranks(roles),
        fates=fates_of(roles, run.generation.on_lost_engine),
        startup_seconds=run.train.startup_timeout,
    )
    explaining = explaining_memory(plan, position.rank, device)
    with stop_on_sigterm(), ending_together(position.board, device), position.naming_role(), explaining:
        enter_role(position, device=device, timeout_seconds=run.train.timeout)
        yield position


class Requests:
    """The controller's messages, on all ranks of an engine or a role; its leader answers them."""

    def __init__(
        self, coord: RankCoord, channel: Channel | None, leader: int, group: dist.ProcessGroup | None
    ) -> None:
        """`channel`: on the leader, which is rank `leader` of the role; `group`: its ranks, None for one."""
        self._coord = coord
        self.channel = channel
        self._leader = leader
        self._group = group

    def __iter__(self) -> Iterator[Sequence[Any]]:
        """The requests, as long as there are some."""
        while (request := self.tell(self.channel.receive() if self.channel is not None else None))[
            0
        ] != "stop":
            yield request

    def tell(self, value: Any) -> Any:
        """The leader's value, on all ranks; they wait for it, however long that takes."""
        told: list[Any] = [value]
        if self._group is not None:
            what, ranks = "the controller's message", dist.get_process_group_ranks(self._group)
            with as_training_error(self._coord):
                wait_for_all(ranks, what, self._group)
                with blame_peers(what, ranks):
                    dist.broadcast_object_list(told, src=self._leader, group=self._group)
        return told[0]

    def answer(self, value: Any) -> None:
        """On the leader, start to send the controller a value; on the others nothing."""
        if self.channel is not None:
            self.channel.send(value)

    def end(self) -> None:
        """The last word: the controller listens no longer."""
        if self.channel is not None:
            self.channel.send(None)
            self.channel.flush()
