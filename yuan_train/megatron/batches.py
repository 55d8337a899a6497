"""The micro-batches of a pass, under the number that megatron-core carries through its schedule.

megatron-core hands a layer one tensor besides the hidden state, the attention mask, also when it computes the
layer again in the backward. Ours is the number of a micro-batch, on the host: positions, documents and the
seed of dropout are found by it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from yuan_train.models.documents import DocumentRanges
from yuan_train.models.dropout import DropoutSeed
from yuan_train.models.rotary import RotaryTables


@dataclass(frozen=True, kw_only=True)
class LayerInputs:
    """What the layers need of a micro-batch besides the hidden state."""

    rotary: RotaryTables
    document_start: Tensor | None
    document_ranges: DocumentRanges | None
    dropout: DropoutSeed | None
    """None: no dropout."""


@dataclass(eq=False)
class Batches:
    """The micro-batches of a pass that were begun, and the one whose layer is computed now."""

    inputs: dict[int, LayerInputs] = field(default_factory=dict[int, LayerInputs])
    current: LayerInputs | None = None

    @staticmethod
    def mask(micro_batch: int) -> Tensor:
        """What to give the model as its attention mask."""
        return torch.tensor(micro_batch, device="cpu")

    def enter(self, mask: Tensor) -> LayerInputs:
        """The micro-batch of an attention mask; it is `current` until a layer of another one begins."""
        self.current = self.inputs[int(mask)]
        return self.current

    def clear(self) -> None:
        """Forget all: a pass begins."""
        self.inputs.clear()
        self.current = None
