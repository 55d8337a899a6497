"""The policy's end of a role that scores rows on cards of its own: the reference, or the reward model.

The controller, rank 0 of the policy, sends rows to the role's leader and takes a number of each token, or of
each sequence, back; all ranks of the policy get them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.config.rl import RLConfig
from yuan_train.config.rl_plan import RlPlan, ScoringRole
from yuan_train.parallel.groups import as_training_error, guard_world_collective, wait_for_world
from yuan_train.parallel.links import Link, RolePosition, post_weights
from yuan_train.rl.engines import Channel, connect_seconds, role_buckets
from yuan_train.rl.experience import Rows, make_score_rows
from yuan_train.train.build import DTYPES, own_weights
from yuan_train.train.step import Trainer


def role_message_link(
    roles: RlPlan, role: ScoringRole, position: RolePosition, timeout_seconds: float
) -> Link:
    """The link of the controller and the first rank of a role, on either of them."""
    ranks = [roles.role_ranks["policy"].start, roles.role_ranks[role].start]
    return Link(f"messages of the {role}", ranks, position, timeout_seconds=timeout_seconds)


def role_weight_link(
    roles: RlPlan, role: ScoringRole, position: RolePosition, timeout_seconds: float
) -> Link:
    """The link of the policy's ranks and a role's, on any of them."""
    ranks = [*roles.role_ranks["policy"], *roles.role_ranks[role]]
    return Link(f"weights of the {role}", ranks, position, timeout_seconds=timeout_seconds)


class RemoteScores:
    """Scores rows on other cards; every rank of the policy calls the same."""

    def __init__(
        self,
        roles: RlPlan,
        role: ScoringRole,
        trainer: Trainer,
        position: RolePosition,
        *,
        timeout_seconds: float,
    ) -> None:
        """Make the link, once the role's ranks are there. Raises TrainingError."""
        self._trainer = trainer
        self._what = f"the broadcast of the {role}'s scores"
        self._channel: Channel | None = None
        self._counts: list[int] = []
        if position.rank == 0:
            with as_training_error(trainer.runtime.coord):
                link = role_message_link(roles, role, position, timeout_seconds)
            self._channel = Channel(link, roles.role_ranks[role].start)

    def begin(self, rows: Sequence[Rows], counts: Sequence[int]) -> None:
        """Ask for the scores of some batches of rows, of so many numbers each; does not wait."""
        self._counts = list(counts)
        if self._channel is not None:
            with as_training_error(self._trainer.runtime.coord):
                for batch, count in zip(rows, counts, strict=True):
                    self._channel.send(("score", batch, count))

    def finish(self) -> Tensor:
        """The numbers of all that `begin` asked for: fp64 [N] on the host."""
        coord = self._trainer.runtime.coord
        scores = torch.zeros(sum(self._counts), dtype=torch.float64)
        if self._channel is not None:
            with as_training_error(coord):
                scores = torch.cat([self._channel.receive() for _ in self._counts])
        wait_for_world(coord, "the scores of another role")
        if dist.is_initialized():
            with guard_world_collective(coord, self._what):
                dist.broadcast(scores, 0)
        return scores

    def stop(self) -> None:
        """Tell the role's ranks to end."""
        if self._channel is not None:
            with as_training_error(self._trainer.runtime.coord):
                self._channel.send(("stop",))
                self._channel.flush()


class RemoteReference(RemoteScores):
    """The log-probabilities of the policy's weights as they are when it is made, on other cards."""

    def __init__(self, roles: RlPlan, trainer: Trainer, position: RolePosition, run: RLConfig) -> None:
        """Send the weights. Raises TrainingError."""
        runtime, dtype, timeout = trainer.runtime, DTYPES[run.train.precision], connect_seconds(run.train)
        with as_training_error(runtime.coord):
            link = role_weight_link(roles, "reference", position, timeout)
            _, sends = post_weights(
                role_buckets(roles, "reference", dtype.itemsize),
                own_weights(runtime),
                runtime.shards,
                link=link,
                job_rank=position.job_rank,
                dtype=dtype,
            )
            for wait in sends:
                wait()
        super().__init__(roles, "reference", trainer, position, timeout_seconds=timeout)


class RemoteRewardModel(RemoteScores):
    """The scores of a reward model on other cards."""

    def __init__(self, roles: RlPlan, trainer: Trainer, position: RolePosition, run: RLConfig) -> None:
        """Make the link. Raises TrainingError."""
        super().__init__(roles, "reward", trainer, position, timeout_seconds=connect_seconds(run.train))
        self._length = roles.plans["reward"].sequence_length
        self._packed = run.train.pack

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The value at the last token of each sequence, as `RewardModel.score`."""
        if not sequences:
            return []
        rows = make_score_rows(sequences, length=self._length, packed=self._packed)
        self.begin([rows], [len(sequences)])
        return self.finish().tolist()
