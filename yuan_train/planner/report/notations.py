"""A pipeline's cut in other programs' notations: Megatron-LM's layout string, Yuan 2.0's list of blocks.

--pipeline-model-parallel-layout  Ettt|tt|ttL      E embedding, t layer, L loss; t*3 for ttt
--pipeline-model-parallel-blocks  3,2,2            layers of each stage, embedding and head at the ends
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from yuan_train.config.errors import PlanError
from yuan_train.config.plan import PipelinePlan

_PART = re.compile(r"([EtL])(?:\*(\d+))?")


def to_blocks(pipeline: PipelinePlan) -> str:
    """The cut as Yuan 2.0's --pipeline-model-parallel-blocks."""
    return ",".join(str(stage.num_layers) for stage in pipeline.stages)


def read_layout(text: str, *, num_layers: int) -> tuple[int, ...]:
    """Layers of each stage of a Megatron-LM layout. Raises PlanError if it is no layout, or does not have
    `num_layers` layers."""
    stages = [_expand(part, text) for part in text.replace(" ", "").split("|")]
    joined = "".join(stages)
    if not re.fullmatch(r"Et*L", joined):
        raise PlanError(
            f"layout {text!r}: wanted one E (embedding) at the beginning and one L (loss) at the end, with "
            "layers t between, such as 'Ettt|tt|ttL'"
        )
    return _checked([stage.count("t") for stage in stages], f"layout {text!r}", num_layers)


def read_blocks(text: str, *, num_layers: int) -> tuple[int, ...]:
    """Layers of each stage of a Yuan 2.0 list. Raises PlanError if it is no list of numbers, or does
    not have `num_layers` layers."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() for word in words):
        raise PlanError(f"blocks {text!r}: wanted numbers with commas, such as 2,3,1")
    return _checked([int(word) for word in words], f"blocks {text!r}", num_layers)


def _expand(part: str, text: str) -> str:
    """`E,t*3` as `Ettt`."""
    compact = part.replace(",", "")
    if _PART.sub("", compact):
        raise PlanError(f"layout {text!r}: {part!r} is not made of E, t, t*N and L, with | between stages")
    return "".join(kind * int(number or 1) for kind, number in _PART.findall(compact))


def _checked(counts: Sequence[int], what: str, num_layers: int) -> tuple[int, ...]:
    if sum(counts) != num_layers:
        raise PlanError(
            f"{what}: {sum(counts)} layers, but the model has {num_layers}; assign every layer once"
        )
    return tuple(counts)
