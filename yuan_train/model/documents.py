"""Where documents begin in packed sequences, and what the model resets there.

A document ends with its end-of-document token; the token after it begins the next one, and so does the
first token of every sequence. B = sequences, S = tokens of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DocumentRanges = tuple[tuple[int, int], ...]
"""Half-open token ranges over the B * S tokens of a micro-batch, sequence after sequence, without gaps."""


@dataclass(frozen=True, kw_only=True)
class DocumentResets:
    """What `Transformer.forward` is told of a micro-batch; each field is its argument of the same name.

    Made once per micro-batch; None where documents make no difference.
    """

    positions: Tensor | None = None
    """int64 [B, S]: the place of each token in its document, for the rotary embedding."""
    document_start: Tensor | None = None
    """bool [B, S]: where the localized filter forgets."""
    document_ranges: DocumentRanges | None = None
    """Tokens that attend to each other only."""

    def on(self, device: torch.device) -> dict[str, Any]:
        """The arguments of `Transformer.forward`, tensors on a device."""
        return {
            "positions": None if self.positions is None else self.positions.to(device),
            "document_start": None if self.document_start is None else self.document_start.to(device),
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

    `eod_id` None: nothing marks a document's end, nothing is reset. For `reset_attention` the tokens are
    best still on the host: the ranges are read from them.
    """
    if eod_id is None:
        return DocumentResets()
    document_start = find_document_starts(tokens_BS, eod_id)
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
    places = torch.arange(document_start.shape[1], device=document_start.device).expand(document_start.shape)
    firsts = torch.where(document_start, places, 0)
    return places - firsts.cummax(dim=1).values


def _ranges(document_start: Tensor) -> DocumentRanges:
    firsts: list[int] = document_start.flatten().nonzero().flatten().tolist()
    return tuple(zip(firsts, [*firsts[1:], document_start.numel()], strict=True)) if firsts else ()
