"""`launch --slurm --print`: a batch script that asks Slurm for the machines of a plan, and launches there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from yuan_train.config.plan import Node, Plan
from yuan_train.config.rl_plan import RlPlan


@dataclass(frozen=True)
class Component:
    """Adjacent nodes of the plan with the same cards: one component of a heterogeneous job."""

    cards: tuple[str, ...]
    """The type of each."""
    nodes: tuple[str, ...]


def batch_script(
    plan: Plan | RlPlan, nodes: Sequence[Node], words: Sequence[str], *, name: str, options: str
) -> str:
    """A script for sbatch: a component for each kind of node, and `yuan-train WORDS` in the first of them.

    `options` are those of sbatch for every component.
    """
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name={name}"]
    for number, component in enumerate(components(plan, nodes)):
        if number:
            lines.append("#SBATCH hetjob")
        kinds = " + ".join(dict.fromkeys(component.cards))
        lines.append(f"# {kinds}: {', '.join(component.nodes)}")
        cards = f" --gpus-per-node={len(component.cards)}" if not kinds.startswith("CPU") else ""
        lines.append(
            f"#SBATCH --nodes={len(component.nodes)} --ntasks-per-node=1{cards}"
            f"{' ' + options if options else ''}"
        )
    lines += ["set -euo pipefail", 'cd "$SLURM_SUBMIT_DIR"', f"exec {shlex.join(['yuan-train', *words])}"]
    return "\n".join(lines) + "\n"


def components(plan: Plan | RlPlan, nodes: Sequence[Node]) -> Iterator[Component]:
    """The plan's nodes, grouped into runs with the same cards."""
    types = {entry.rank: entry.type for entry in plan.ranks}
    last: Component | None = None
    for node in nodes:
        cards = tuple(types[rank] for rank in node.ranks)
        if last is not None and last.cards == cards:
            last = Component(cards, (*last.nodes, node.name))
            continue
        if last is not None:
            yield last
        last = Component(cards, (node.name,))
    if last is not None:
        yield last
