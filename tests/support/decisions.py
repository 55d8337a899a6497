"""Records which experts a run chooses for each token, and makes a run under another plan choose the same.

A sum in another order changes scores by a rounding, and a choice is a step function of them: only with the
same choices are the losses of two plans comparable in fp32. A choice is filed under the number of its
sequence in the run, which all plans share, and its layer.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from yuan_train.models.experts import Router
from yuan_train.train.stage import StageRunner

Chosen = dict[tuple[int, int], torch.Tensor]
"""By sequence and layer, the experts [S, K]."""


@contextmanager
def decisions(*, record: Path | None = None, replay: Path | None = None) -> Iterator[None]:
    """Inside: training writes its choices to `record` (one process), or makes those of `replay`."""
    if record is None and replay is None:
        yield
        return
    known: Chosen = {} if replay is None else torch.load(replay)
    best, forward = Router.best, StageRunner.forward
    now: dict[str, Any] = {}

    def run_stage(self: Any, micro_batch: int, hidden: torch.Tensor | None) -> torch.Tensor:
        size = self._settings.micro_batch_size
        now["first"], now["size"] = self._first_sample + micro_batch * size, size
        now["layers"] = {id(b.router): i for i, b in self._model.blocks.items() if b.has_experts}
        return forward(self, micro_batch, hidden)

    def choose(self: Router, products: torch.Tensor) -> torch.Tensor:
        if not torch.is_grad_enabled():
            return best(self, products)
        keys = [(now["first"] + i, now["layers"][id(self)]) for i in range(now["size"])]
        if replay is not None:
            return torch.cat([known[key] for key in keys]).to(products.device)
        chosen = best(self, products)
        known.update(zip(keys, chosen.cpu().chunk(len(keys)), strict=True))
        return chosen

    def run_chunk(self: Any, micro_batches: Any, module: Any) -> Any:
        number, size = next(micro_batches), self.world.grid.pipeline(self.world.coord).micro_batch_size
        now["first"], now["size"] = self._pass.first_sample + number * size, size
        now["layers"] = {id(router): i for i, router in megatron.model.routers_of(self.chunks)}
        return forward_chunk(self, iter([number]), module)

    # Only where it was imported: that takes seconds.
    megatron: Any = sys.modules.get("yuan_train.megatron")
    with pytest.MonkeyPatch.context() as patch:
        if megatron is not None:
            forward_chunk = megatron.engine.MegatronEngine._forward
            patch.setattr(megatron.engine.MegatronEngine, "_forward", run_chunk)
        patch.setattr(Router, "best", choose)
        patch.setattr(StageRunner, "forward", run_stage)
        yield
    if record is not None:
        torch.save(known, record)
