"""Which card a rank has, and whether it is the card that its plan means."""

from __future__ import annotations

import os

import torch

from yuan_train.config.errors import ConfigError
from yuan_train.config.plan import Plan, RankPlan

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
"""Variables that choose among a machine's cards, and number those anew."""


def check_processor(plan: Plan, entry: RankPlan) -> None:
    """Raise ConfigError if a rank is meant to have a card, where this process has only a processor."""
    if not plan.needs_card(entry):
        return
    raise ConfigError(
        f"rank {entry.rank} ({entry.device}): the plan has a card of type {entry.type} there, but torch "
        f"finds none on this machine: {why_no_card()}. Start the rank where its card is, or set "
        "train.device=cpu, and it computes on the CPU"
    )


def why_no_card() -> str:
    """Why torch finds no card here, as far as can be told."""
    if torch.version.cuda is None and torch.version.hip is None:
        return f"torch {torch.__version__} is built without CUDA"
    hiding = next((name for name in VISIBLE if os.environ.get(name, "all").strip() in ("", "-1")), None)
    if hiding is not None:
        return f"{hiding}={os.environ[hiding]} hides all cards"
    return "torch.cuda finds no driver, or one that is too old for its CUDA (`yuan-train doctor` tells)"
