"""What the ranks of any engine find out together: the terms of the mean loss, and who had the first fault."""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist

from yuan_train.data.loader import Samples
from yuan_train.parallel.grid import Grid, RankCoord
from yuan_train.parallel.groups import Groups, guard_world_collective
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.train.feed import Passes


class World(Protocol):
    """Where a rank stands among all."""

    @property
    def grid(self) -> Grid: ...

    @property
    def coord(self) -> RankCoord: ...

    @property
    def groups(self) -> Groups:
        """For the sums and gathers over all ranks."""
        ...


def num_terms(feed: Passes, world: World, blend: Samples, first_sample: int) -> int:
    """Tokens with a loss in a whole global batch, or pairs: every rank divides by the same number.

    With a mask only the last stages know, each of its own share. Their sum over the ranks is known since the
    step before, in whose all-reduce it was; if there was none, collective over all ranks.
    """
    if not blend.masks:
        return blend.known_terms(world.grid.plan.global_batch_size)
    known = feed.batch_tokens
    if (blend, first_sample) not in known:
        total = count_trained(feed, world, blend, first_sample)
        sum_over_world(world.groups, world.coord, total, "the all-reduce of the tokens with a loss")
        known[blend, first_sample] = round(total.item())
    return known[blend, first_sample]


def count_trained(feed: Passes, world: World, blend: Samples, first_sample: int) -> torch.Tensor:
    """This rank's term of the tokens with a loss in a batch that is begun or announced: fp64 [1], exact."""
    counts = world.coord.tensor_rank == 0
    number = feed.count_trained(blend, first_sample) if counts else 0
    return torch.tensor([number], dtype=torch.float64)


def blame(world: World, finite_output: bool, finite_gradient: bool) -> str:
    """A message that names the first rank, in the model's order, whose output or gradient was not finite.

    Collective over all ranks; the arguments are this rank's.
    """
    local = torch.tensor([float(finite_output), float(finite_gradient)])
    flags = [local]
    if dist.is_initialized():
        flags = [torch.empty_like(local) for _ in range(dist.get_world_size())]
        with guard_world_collective(world.coord, "the search for the first value that is not finite"):
            dist.all_gather(flags, local)
    order = sorted(world.grid.coords, key=lambda coord: (coord.stages, coord.pipeline))
    for what, index in (("output", 0), ("gradient", 1)):
        for coord in order:
            if not flags[coord.rank][index]:
                return f"the first {what} that is not finite came from {coord}"
    return "every rank's outputs and gradients were finite; their sum was not"
