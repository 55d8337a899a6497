"""What a supervised run decides: whether another plan repays the move, and whether a fault will not end.

Pure arithmetic on figures that the agents have; `agent.py` acts on it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from yuan_train.config.run import SuperviseConfig
from yuan_train.config.units import show_seconds


@dataclass(frozen=True, kw_only=True)
class Weighed:
    """A change of plan, and whether it is worth it."""

    is_worth_it: bool
    reason: str


def weigh_move(
    before: float,
    after: float,
    *,
    measured: float | None,
    steps_left: int,
    move_seconds: float,
    settings: SuperviseConfig,
) -> Weighed:
    """Whether to go from a plan whose step is forecast as `before` seconds to one of `after`.

    `measured`: seconds that a step really takes; None: not known, taken as forecast. `move_seconds`: what is
    lost while ranks save, end and begin again. What is gained counts within `horizon`, and no further than
    the run's last step.
    """
    gain = 1 - after / before
    running = min(steps_left * (measured or before), settings.horizon)
    saved = running * gain
    words = f"a step of {show_seconds(after)} in place of {show_seconds(before)} ({gain:.1%} less)"
    if gain < settings.gain:
        return Weighed(is_worth_it=False, reason=f"{words}: below supervise.gain, {settings.gain:.1%}")
    costs = f"would save {show_seconds(saved)} of the next {show_seconds(running)}; the move takes about"
    return Weighed(is_worth_it=saved > move_seconds, reason=f"{words} {costs} {show_seconds(move_seconds)}")


@dataclass(frozen=True)
class Start:
    """One start of the ranks that has ended in a fault though no node was lost."""

    fault: str
    step: int
    """The last one that was finished."""


def repeats(starts: Sequence[Start], attempts: int) -> bool:
    """Whether the last `attempts` starts ended in the same fault, and none got further than the first."""
    last = starts[-attempts:]
    if len(last) < attempts or max(start.step for start in last) > last[0].step:
        return False
    return len({signature(start.fault) for start in last}) == 1


def signature(fault: str) -> str:
    """A fault without its numbers: ports, seconds, addresses and steps differ where the cause does not."""
    return re.sub(r"0x[0-9a-f]+|\d+", "#", fault)
