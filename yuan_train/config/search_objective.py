"""What a plan is chosen for: the shortest step, or the least rent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from yuan_train.config.cluster import Cluster
from yuan_train.config.errors import ConfigError, Violation

SearchObjective = Literal["step_time", "tokens_per_price", "price_under_deadline"]


def deadline_constraints(objective: SearchObjective, deadline: float | None) -> Iterator[Violation]:
    """Yield a violation unless there is a deadline where the objective has one, and only there."""
    path = ("search", "deadline")
    if objective == "price_under_deadline" and deadline is None:
        yield Violation(path, "missing; price_under_deadline needs it: give the run's time, such as 72 h")
    if objective != "price_under_deadline" and deadline is not None:
        yield Violation(
            path, f"{objective} has none; leave it out, or set search.objective: price_under_deadline"
        )


def check_prices(cluster: Cluster, objective: SearchObjective) -> None:
    """Raise ConfigError if an objective needs prices and a card has none."""
    if objective == "step_time":
        return
    faults = [
        f"cluster {cluster.name!r}: nodes[{i}] ({group.name}): {name} has no price, and "
        f"search.objective: {objective} needs one for every card; add price: (for a card and hour) to the "
        f"node or to device_types.{name}, or set search.objective: step_time"
        for i, group in enumerate(cluster.nodes)
        for name in dict.fromkeys(group.types)
        if cluster.price(group, name) is None
    ]
    if faults:
        raise ConfigError("\n".join(faults))
