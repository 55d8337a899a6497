"""Bytes of answers under way: caches of a stage's slots, and what a lane of the engine holds beside them.

A prompt is read once, into a cache of its own from which it is copied to each of its answers' slots; every
cache has a place for padding. A group of slots reads as many prompts at once as it has answers for.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from yuan_train.config.devices import Precision
from yuan_train.config.model import ModelConfig
from yuan_train.planner.costs.workload import ELEMENT_BYTES, TensorGroup, TokenRows, model_work

PREFILL_CHUNK = 512
"""Prompt tokens that generation reads at once."""
DRAWN_ELEMENTS = 1 << 22
"""Logits whose noise is in memory at once: `NOISE_ELEMENTS` of yuan_train/models/generate.py."""


@dataclass(frozen=True, kw_only=True)
class Writing:
    """What is written on a stage of so many layers, which `width` cards share: samples of `length` tokens,
    `prompt` of them read, `group` to a prompt."""

    model: ModelConfig
    num_layers: float
    head: bool
    width: int
    group: int
    prompt: int
    length: int
    precision: Precision

    @cached_property
    def group_cache_bytes(self) -> float:
        """Of the slots for the answers to a prompt, and of the prompt, on each card: keys and values of every
        token, and the localized filter's state of u (H) and of its first convolution (H/2)."""
        e, model = ELEMENT_BYTES[self.precision], self.model
        state = 1.5 * model.hidden_size if model.attention == "localized_filter" else 0.0
        places = self.group * (self.length + 1) + self.prompt + 1
        per_layer = e * (2 * places * model.key_value_size / self.width + (self.group + 1) * state)
        return self.num_layers * per_layer

    def lane_bytes(self, slots: int) -> float:
        """Beside the caches, while a group of so many slots is run, on each card the largest of

        - a chunk of its prompts: at most what a layer would keep of it for a backward,
        - a layer's keys and values, repeated for each query head, where heads share them (a masked
          attention),
        - a draw (`drawing_bytes`).
        """
        model = self.model
        shared = model.key_value_size < model.projection_size
        repeated = 2.0 * ELEMENT_BYTES[self.precision] * slots * self.length * model.projection_size
        return max(
            -(-slots // self.group) * self.chunk_bytes if self.num_layers else 0.0,
            repeated / self.width if shared and self.num_layers else 0.0,
            drawing_bytes(slots, model.vocab_size / self.width) if self.head else 0.0,
        )

    @cached_property
    def chunk_bytes(self) -> float:
        """Of a chunk of one prompt in one layer."""
        rows = TokenRows(1, min(self.prompt, PREFILL_CHUNK), self.precision)
        group = TensorGroup(1 if self.model.num_experts else self.width)
        return model_work(self.model, rows, logit_rows=1, group=group).layer.activation_bytes


def drawing_bytes(draws: int, words: float) -> float:
    """Most bytes at once while so many tokens are drawn, each of `words` logits. The logits are in fp64, and
    beside them the larger of their exponentials (logsumexp) and, of DRAWN_ELEMENTS of them at a time (on a
    CPU fewer), in whole rows, a copy and two more while their noise is made."""
    rows = min(max(int(DRAWN_ELEMENTS // words), 1), draws)
    return 8.0 * words * (draws + max(draws, 3 * rows))
