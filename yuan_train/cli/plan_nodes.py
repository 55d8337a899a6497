"""The machines of a plan and their ranks; where these meet; the torchrun line of each machine."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

from yuan_train.config.errors import ConfigError, PlanError
from yuan_train.config.plan import Node, Plan, node_of
from yuan_train.config.rl_plan import RlPlan

DEFAULT_PORT = 29500


def nodes_of(plan: Plan | RlPlan) -> list[Node]:
    """The machines of a plan, in the order of ranks; one node `all` if all cards are simulated.

    Raises PlanError if the ranks of a node are not consecutive, which those of several roles need not be.
    """
    plans = plan.plans.values() if isinstance(plan, RlPlan) else (plan,)
    types = [own.device_type(entry.rank) for own in plans for entry in own.ranks]
    if all(device is not None and device.slowdown is not None for device in types):
        return [Node("all", tuple(range(plan.world_size)))]
    return named_nodes(plan)


def named_nodes(plan: Plan | RlPlan) -> list[Node]:
    """As `nodes_of`, by their names also if all cards are simulated."""
    nodes: dict[str, list[int]] = {}
    for entry in plan.ranks:
        nodes.setdefault(node_of(entry), []).append(entry.rank)
    for name, ranks in nodes.items():
        if not isinstance(plan, RlPlan) and not _follow_each_other(ranks):
            raise PlanError(f"ranks: node {name} has ranks {ranks}; ranks must be numbered node by node")
    return [Node(name, tuple(ranks)) for name, ranks in nodes.items()]


def torchrun_lines(nodes: Sequence[Node], command: Sequence[str], *, rendezvous: str | None) -> list[str]:
    """The torchrun command for each node; nodes may have different numbers of cards.

    `rendezvous` is HOST[:PORT]; None: the first node, or the loopback with one node. Raises PlanError if the
    ranks of a node are not consecutive, as torchrun numbers them.
    """
    for node in nodes:
        if not _follow_each_other(node.ranks):
            raise PlanError(
                f"torchrun numbers the ranks of a node one after the other, but node {node.name} has "
                f"{list(node.ranks)}: its roles' cards are apart; run this on each node without --print"
            )
    host, port = meeting_address(rendezvous or ("127.0.0.1" if len(nodes) == 1 else nodes[0].name))
    return [
        f"torchrun --nnodes={len(nodes)} --node-rank={i} --nproc-per-node={len(node.ranks)} "
        f"--master-addr={host} --master-port={port} -m yuan_train {shlex.join(command)}"
        + ("" if len(nodes) == 1 else f"    # on {node.name}")
        for i, node in enumerate(nodes)
    ]


def _follow_each_other(ranks: Sequence[int]) -> bool:
    return list(ranks) == list(range(ranks[0], ranks[0] + len(ranks)))


def meeting_address(rendezvous: str) -> tuple[str, int]:
    """Host and port of HOST[:PORT], where ranks meet. Raises ConfigError."""
    host, port = parse_address(rendezvous)
    return host, port or DEFAULT_PORT


def parse_address(address: str) -> tuple[str, int | None]:
    """Host and, if it is given, port of HOST[:PORT]; an IPv6 address in brackets. Raises ConfigError."""
    found = re.fullmatch(r"(?:\[(?P<six>[^\]]+)\]|(?P<host>[^:\[\]]+))(?::(?P<port>\d+))?", address)
    port = int(found["port"]) if found is not None and found["port"] else None
    if found is None or port is not None and not 0 < port < 1 << 16:
        raise ConfigError(f"--rendezvous: wanted HOST:PORT, with a port of 1 to 65535, got {address!r}")
    return found["six"] or found["host"], port
