"""The load of the experts: tokens of each, over all ranks, and the biases that even it.

With balance `bias` (Wang et al. 2024, arXiv 2408.15664; DeepSeek-V3, arXiv 2412.19437, section 2.1.2), each
step moves the bias of every expert against its load in that step:

    b_i <- b_i + balance_rate sign(mean load - load of i)

Loads are integers summed over all ranks, so that every plan moves the biases alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch

from yuan_train.config.model import ModelConfig
from yuan_train.models.experts import Router
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.train.engine import World


class ExpertLoad:
    """Counts the tokens of each layer's experts over all ranks, and moves the biases of a model with some."""

    def __init__(self, model: ModelConfig, world: World, routers: Iterable[tuple[int, Router]]) -> None:
        """`routers`: this rank's, with their layers."""
        self._model = model
        self._world = world
        self._routers = list(routers)
        self._counted = self._zeros()

    def biases(self) -> dict[str, torch.Tensor]:
        """This rank's biases [N] by global name; empty without balance `bias`."""
        return {f"layers.{i}.router.bias": r.bias for i, r in self._routers if r.bias is not None}

    @torch.no_grad()
    def balance(self) -> None:
        """Move the biases by the load of the step that has ended; collective over all ranks."""
        if self._model.balance != "bias":
            return
        load_LN = self._sum()
        self._counted += load_LN
        # The total against N times the load: both are whole numbers.
        move_LN = (load_LN.sum(dim=1, keepdim=True) - load_LN * self._model.num_experts).sign()
        for layer, router in self._routers:
            assert router.bias is not None
            router.bias += self._model.balance_rate * move_LN[layer].to(router.bias)

    def take(self) -> list[list[int]]:
        """Tokens of each layer's experts in training since the last call; collective over all ranks."""
        if self._model.balance != "bias":
            self._counted += self._sum()
        taken, self._counted = self._counted, self._zeros()
        return taken.long().tolist()

    def _sum(self) -> torch.Tensor:
        """Tokens [layers, N] since the last sum, fp64: whole numbers, exact in any order."""
        load_LN = self._zeros()
        for layer, router in self._routers:
            load = torch.tensor(router.take_load(), dtype=torch.float64)
            # The ranks of a replica decide alike.
            if self._world.coord.tensor_rank == 0:
                load_LN[layer] += load
        groups, coord = self._world.groups, self._world.coord
        sum_over_world(groups, coord, load_LN.view(-1), "the sum of the experts' tokens")
        return load_LN

    def _zeros(self) -> torch.Tensor:
        return torch.zeros(self._model.num_layers, self._model.num_experts, dtype=torch.float64)


def routers_of(runtime: RankRuntime) -> list[tuple[int, Router]]:
    """The routers of our engine's parts of the model on a rank, with their layers."""
    return [
        (layer, block.router)
        for part in runtime.parts.values()
        for layer, block in cast(Transformer, part).blocks.items()
        if block.has_experts
    ]
