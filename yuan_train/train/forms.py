"""Which implementation of each op the ranks of a run use: chosen at build, alike where they must round alike.

A choice tests kernels and compiles them. In a forward it would be inside of what torch's checkpoint runs
again, and ranks would wait for each other's compilers in the first step. So all ranks choose before it, and
compare.

The ranks of a tensor-parallel group compute norms and routers each by itself, from equal inputs: with unlike
forms their gradients would round unlike, and the weights would drift apart. Owners of the same weights on
like cards should differ in nothing either. Where a kernel has failed its test on one of them, all use the
form that every card has. Owners on unlike cards keep what is best on each: before they step, their gradients
are added up.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from yuan_kernels import ops

from yuan_train.config.errors import ConfigError
from yuan_train.models.transformer import choose_ops
from yuan_train.parallel.device import Device
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import gather_objects

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RankForms:
    """What a rank tells the others."""

    card: str
    """Its type, for what is expected to be alike."""
    choices: tuple[ops.Choice, ...]
    """In the order of the ops, the same on all ranks that do not compute with the definitions."""

    @property
    def is_reference(self) -> bool:
        """Whether the rank computes with the definitions (`YUAN_KERNELS=reference`)."""
        return all(choice.implementation == "reference" for choice in self.choices)


def settle_forms(grid: Grid, rank: int, *, device: Device, dtype: torch.dtype) -> None:
    """Choose the implementation of each op of a plan's model, alike in each group; collective over all ranks.

    Raises ConfigError, on all ranks, if some of a group compute with the definitions and others do not.
    """
    ops.forget_fallbacks()
    if dtype == torch.float16:
        keep_wide_sums()
    mine = RankForms(_card(device), tuple(choose_ops(grid.plan.model, device.torch, dtype)))
    if not dist.is_initialized():
        return
    told = gather_objects(mine)
    for group in alike_groups(grid, [forms.card for forms in told]):
        for number, odd in unlike(group, told):
            if rank not in group:
                continue
            choice, fault = mine.choices[number], told[odd].choices[number]
            ops.fall_back(choice, f"as on rank {odd}, which has {fault.implementation}: {fault.reason}")
            if rank == group[0]:
                logger.warning(
                    "%s: rank %d has %s (%s), so ranks %s use what every card has",
                    choice.op,
                    odd,
                    fault.implementation,
                    fault.reason,
                    ", ".join(map(str, group)),
                )


def keep_wide_sums() -> None:
    """Let CUDA add up the parts of a product of fp16 in fp32 alone: what is beyond 65504 overflows in fp16.

    That is torch's setting of a process. In bf16, whose range is that of fp32, parts are rounded at most, and
    torch's default stays.
    """
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False


def alike_groups(grid: Grid, cards: Sequence[str]) -> list[tuple[int, ...]]:
    """The ranks that must round alike, in groups: those of tensor parallelism, owners on like cards, and who
    is connected through others."""
    groups = {rank: {rank} for rank in range(len(cards))}

    def join(ranks: Sequence[int]) -> None:
        joined = set[int]().union(*(groups[rank] for rank in ranks))
        groups.update(dict.fromkeys(joined, joined))

    for p in range(len(grid.plan.pipelines)):
        for replica in grid.replicas(p):
            join(replica)
    for owners in {bucket.owners for bucket in grid.buckets}:
        ranks = [rank for owner in owners for rank in owner]
        for card in {cards[rank] for rank in ranks}:
            join([rank for rank in ranks if cards[rank] == card])
    return sorted({tuple(sorted(group)) for group in groups.values()})


def unlike(group: Sequence[int], told: Sequence[RankForms]) -> Iterator[tuple[int, int]]:
    """Yield the numbers of the choices in which ranks of a group differ, each with the first odd rank.

    Raises ConfigError if some of them compute with the definitions and others do not.
    """
    defined = [rank for rank in group if told[rank].is_reference]
    if defined and len(defined) < len(group):
        others = next(rank for rank in group if rank not in defined)
        raise ConfigError(
            f"YUAN_KERNELS=reference is set on rank {defined[0]} and not on rank {others}, which must round "
            "alike; set it on all nodes, or on none"
        )
    for number in range(len(told[group[0]].choices)):
        names = {rank: told[rank].choices[number].implementation for rank in group}
        common = Counter(names.values()).most_common(1)[0][0]
        odd = next((rank for rank, name in names.items() if name != common), None)
        if odd is not None:
            yield number, odd


def _card(device: Device) -> str:
    """What kind of device it is, by the name that its driver has for it."""
    card = device.facts()
    return device.torch.type if card is None else card.name
