"""Where documents begin in packed sequences, and what the model resets there.

A document ends with its end-of-document token; the token after it begins the next one, and so does the
first token of every sequence. B = sequences, S = tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from yuan_kernels.ops import DocumentRanges


@dataclass(frozen=True, kw_only=True)
class DocumentResets:
    """Document arguments of `Transformer.forward`; each field is the argument of the same name.

    Computed once per micro-batch. A field is None if its reset is off.
    """

    positions: Tensor | None = None
    """int64 [B, S]: the position of each token in its document, for the rotary embedding."""
    document_start: Tensor | None = None
    """bool [B, S]: True where the localized filter's state is reset."""
    document_ranges: DocumentRanges | None = None
    """Tokens attend only within their range."""

    def on(self, device: torch.device) -> dict[str, Any]:
        """The keyword arguments of `Transformer.forward`, with the tensors on `device`.

        The host does not wait for copies out of pinned memory.
        """
        return self.placed(lambda tensor: tensor.to(device, non_blocking=True)).arguments()

    def placed(self, place: Callable[[Tensor], Tensor]) -> DocumentResets:
        """These resets, with each tensor where `place` puts it."""
        positions, starts = self.positions, self.document_start
        return DocumentResets(
            positions=None if positions is None else place(positions),
            document_start=None if starts is None else place(starts),
            document_ranges=self.document_ranges,
        )

    def arguments(self) -> dict[str, Any]:
        """The keyword arguments of `Transformer.forward`."""
        return {
            "positions": self.positions,
            "document_start": self.document_start,
            "document_ranges": self.document_ranges,
        }


def find_resets(
    tokens_BS: Tensor,
    *,
    eod_id: int | None,
    reset_position_ids: bool = True,
    reset_attention: bool = False,
    reset_filter: bool = False,
) -> DocumentResets:
    """Return what to reset for tokens int64 [B, S]; by default, as published, rotary positions only.

    With `eod_id` None nothing is reset. With `reset_attention` the tokens should be on the host: the ranges
    are Python integers, and reading them from a GPU would synchronize with it.
    """
    if eod_id is None:
        return DocumentResets()
    return resets_at(
        find_document_starts(tokens_BS, eod_id),
        reset_position_ids=reset_position_ids,
        reset_attention=reset_attention,
        reset_filter=reset_filter,
    )


def resets_at(
    document_start: Tensor,
    *,
    reset_position_ids: bool = True,
    reset_attention: bool = True,
    reset_filter: bool = True,
) -> DocumentResets:
    """Return what to reset where documents begin, bool [B, S] on the host; by default all."""
    return DocumentResets(
        positions=_positions(document_start) if reset_position_ids else None,
        document_start=document_start if reset_filter else None,
        document_ranges=_ranges(document_start) if reset_attention else None,
    )


def find_document_starts(tokens_BS: Tensor, eod_id: int) -> Tensor:
    """Return bool [B, S], True at the first token of each document."""
    document_start = torch.ones_like(tokens_BS, dtype=torch.bool)
    document_start[:, 1:] = tokens_BS[:, :-1] == eod_id
    return document_start


def _positions(document_start: Tensor) -> Tensor:
    indices = torch.arange(document_start.shape[1], device=document_start.device).expand(document_start.shape)
    firsts = torch.where(document_start, indices, 0)
    return indices - firsts.cummax(dim=1).values


def _ranges(document_start: Tensor) -> DocumentRanges:
    firsts: list[int] = document_start.flatten().nonzero().flatten().tolist()
    return tuple(zip(firsts, [*firsts[1:], document_start.numel()], strict=True)) if firsts else ()
