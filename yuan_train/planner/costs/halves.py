"""What attention and feed-forward take of a layer."""

from __future__ import annotations

from dataclasses import dataclass

from yuan_train.config.run import Recompute
from yuan_train.planner.costs.workload import ModelWork, UnitWork


@dataclass(frozen=True, kw_only=True)
class HalfShare:
    """What half a layer takes of a layer's costs; 1 for all of it."""

    seconds: float
    parameters: float
    """That are trained; `weights` are all."""
    weights: float
    activations: float
    """Under full recompute, both halves keep their input."""
    transient: float
    forward_collectives: int
    backward_collectives: int


def half_shares(work: ModelWork, recompute: Recompute) -> tuple[HalfShare, HalfShare]:
    """What attention and feed-forward take of a layer."""

    def share(half: UnitWork) -> HalfShare:
        whole = work.layer
        return HalfShare(
            seconds=half.forward_flops / whole.forward_flops,
            parameters=half.trained / whole.trained,
            weights=half.parameters / whole.parameters,
            activations=half.kept_bytes(recompute) / whole.kept_bytes(recompute),
            transient=half.transient_bytes / whole.transient_bytes,
            forward_collectives=half.forward_collectives,
            backward_collectives=half.backward_collectives,
        )

    return share(work.halves[0]), share(work.halves[1])
