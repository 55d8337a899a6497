"""`yuan-train doctor --nodes a,b,c`: the doctor of every machine, over ssh, and where the machines differ."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from yuan_train.machine.hosts import ssh_words
from yuan_train.machine.reach import ask_json

Facts = dict[str, Any]

TIMEOUT_SECONDS = 120.0
"""In which a machine answers; its ops are tested meanwhile."""
RDMA = "RDMA"
MUST_AGREE = {
    "yuan-train": "install the same release everywhere",
    "torch": "install the same wheel everywhere",
    "CUDA of torch": "install the same wheel everywhere",
    "NCCL": "install the same torch, which brings its NCCL",
    RDMA: "all pairs of cards must use one kind: NCCL_IB_DISABLE=1 everywhere, or choose with NCCL_IB_HCA",
}
"""What the machines of a job must have in common, and what to do where they have not."""


def ask_nodes(nodes: Sequence[str], ssh: str, *, hidden: int) -> dict[str, Facts | str]:
    """What the doctor of each machine finds, or why it was not asked.

    `ssh` is a command, called as `SSH HOST COMMAND...`; the command is this interpreter's, at the same path.
    """
    words = [sys.executable, "-m", "yuan_train", "doctor", "--json", "--hidden-size", str(hidden)]
    with ThreadPoolExecutor(len(nodes)) as pool:
        found = pool.map(lambda node: _ask([*ssh_words(ssh), node, *map(shlex.quote, words)]), nodes)
        return dict(zip(nodes, found, strict=True))


def _ask(command: Sequence[str]) -> Facts | str:
    found = ask_json(command, TIMEOUT_SECONDS)
    if not isinstance(found, str) and "summary" not in found:
        return f"its yuan-train is another release ({found.get('versions', {}).get('yuan-train')})"
    return found


def differences(found: Mapping[str, Facts]) -> dict[str, dict[str, list[str]]]:
    """By what differs, the machines of each value."""
    values: dict[str, dict[str, list[str]]] = {}
    for node, facts in found.items():
        for name, value in _compared(facts):
            values.setdefault(name, {}).setdefault(value, []).append(node)
    return {name: by_value for name, by_value in values.items() if len(by_value) > 1}


def _compared(facts: Facts) -> Iterator[tuple[str, str]]:
    for name, version in facts["versions"].items():
        yield name, str(version)
    yield "CUDA of torch", str(facts["cuda"])
    yield "NCCL", str(facts["nccl"])
    yield "NVIDIA driver", str(facts["driver"])
    kinds = {port["link"] for port in facts["surroundings"]["infiniband"]}
    yield RDMA, " and ".join(sorted(map(str, kinds))) or "none"


def obstacles(found: Mapping[str, Facts | str]) -> list[str]:
    """Why the machines cannot run one job together; empty if they can."""
    reached = {node: facts for node, facts in found.items() if not isinstance(facts, str)}
    told = [f"{node} is not reached: {why}" for node, why in found.items() if isinstance(why, str)]
    unlike = differences(reached)
    told += [f"{name} differs" for name in MUST_AGREE if name in unlike]
    if len(found) > 1:
        told += [
            f"{node}: {finding['words']}"
            for node, facts in reached.items()
            for finding in facts["findings"]
            if "several nodes" in finding["hinders"]
        ]
    return told


def node_lines(found: Mapping[str, Facts | str]) -> Iterator[str]:
    """First what the machines are ready for together, then each by itself, then where they differ."""
    names, why = ", ".join(found), obstacles(found)
    yield (
        f"not for: a job over {names}, because {'; '.join(why)}" if why else f"ready for: a job over {names}"
    )
    for node, facts in found.items():
        yield f"{node}: {f'not reached: {facts}' if isinstance(facts, str) else facts['summary']}"
    reached = {node: facts for node, facts in found.items() if not isinstance(facts, str)}
    for name, by_value in differences(reached).items():
        yield difference_words(name, by_value) + (f" ({MUST_AGREE[name]})" if name in MUST_AGREE else "")


def difference_words(name: str, by_value: Mapping[str, Sequence[str]]) -> str:
    """What differs, with the machines of each value."""
    return f"{name} differs: " + "; ".join(f"{value} on {', '.join(on)}" for value, on in by_value.items())
