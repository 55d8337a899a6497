"""Helper of the launch scripts: hosts of a plan's nodes, a heterogeneous Slurm job, steps of an epoch."""

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from yuan_train.cli.launch import Node, nodes_of
from yuan_train.config.errors import ConfigError, YuanError
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.run import load_run
from yuan_train.data.indexed import IndexedDataset


def main(arguments: list[str] | None = None) -> int:
    """Print the answer. Returns the exit code: 2, with the reason on stderr, if the input is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    subparsers = parser.add_subparsers(dest="question", required=True)
    hosts = subparsers.add_parser("hosts")
    hosts.add_argument("plan")
    hosts.add_argument("hostfile")
    slurm = subparsers.add_parser("slurm")
    slurm.add_argument("plan")
    slurm.add_argument("--name", required=True)
    slurm.add_argument("--options", default="")
    slurm.add_argument("--port", type=int, required=True)
    slurm.add_argument("command", nargs="+")
    steps = subparsers.add_parser("steps")
    steps.add_argument("config")
    steps.add_argument("prefix")
    steps.add_argument("epochs", type=float)
    steps.add_argument("overrides", nargs="*")
    options = parser.parse_args(arguments)
    try:
        if options.question == "hosts":
            for host, node in hosts_of(load_plan(options.plan), Path(options.hostfile)):
                print(host, node)
        elif options.question == "slurm":
            plan = load_plan(options.plan)
            print(slurm_job(plan, options.command, options.name, options.options, options.port), end="")
        else:
            print(steps_of(options.config, options.prefix, options.epochs, tuple(options.overrides)))
    except YuanError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def hosts_of(plan: Plan, hostfile: Path) -> list[tuple[str, str]]:
    """(host, node) for each node in the plan's order. Raises ConfigError unless every node has one host."""
    lines = [line.partition("#")[0].split() for line in hostfile.read_text(encoding="utf-8").splitlines()]
    rows = [line for line in lines if line]
    nodes = [node.name for node in nodes_of(plan)]
    if any(len(row) > 2 for row in rows):
        raise ConfigError(f"{hostfile}: wanted HOST or HOST NODE on every line")
    if all(len(row) == 1 for row in rows) and len(rows) == len(nodes):
        return [(row[0], node) for row, node in zip(rows, nodes, strict=True)]
    by_node = {row[-1]: row[0] for row in rows}
    missing = [node for node in nodes if node not in by_node]
    if missing or len(by_node) != len(nodes):
        raise ConfigError(
            f"{hostfile}: names {len(rows)} hosts; the plan has the nodes {', '.join(nodes)}: "
            "one line for each, HOST in the plan's order, or HOST NODE"
        )
    return [(by_node[node], node) for node in nodes]


@dataclass(frozen=True)
class Component:
    """Adjacent nodes of the plan with the same cards: one component of a heterogeneous job."""

    card: str
    cards: int
    nodes: tuple[str, ...]


def components_of(plan: Plan) -> list[Component]:
    """The plan's nodes, grouped into runs with the same card and number of cards."""
    types = {entry.rank: entry.type for entry in plan.ranks}
    found: list[Component] = []
    for node in nodes_of(plan):
        card, cards = _card_of(node, types), len(node.ranks)
        if found and (found[-1].card, found[-1].cards) == (card, cards):
            found[-1] = Component(card, cards, (*found[-1].nodes, node.name))
        else:
            found.append(Component(card, cards, (node.name,)))
    return found


def _card_of(node: Node, types: dict[int, str]) -> str:
    return "+".join(dict.fromkeys(types[rank] for rank in node.ranks))


def slurm_job(plan: Plan, command: list[str], name: str, options: str, port: int) -> str:
    """A batch script: a component per kind of node, one task per node, which gets the name of its node."""
    components = components_of(plan)
    lines = ["#!/usr/bin/env bash", f"#SBATCH --job-name={name}"]
    for number, component in enumerate(components):
        if number:
            lines.append("#SBATCH hetjob")
        lines.append(f"# {component.card}: {', '.join(component.nodes)}")
        lines.append(
            f"#SBATCH --nodes={len(component.nodes)} --ntasks-per-node=1 "
            f"--gpus-per-node={component.cards}{' ' + options if options else ''}"
        )
    first = "SLURM_JOB_NODELIST_HET_GROUP_0" if len(components) > 1 else "SLURM_JOB_NODELIST"
    lines += [
        "set -euo pipefail",
        'cd "$SLURM_SUBMIT_DIR"',
        # No pipe into `head`: it would end scontrol by a signal, and with it the job.
        f'hosts=$(scontrol show hostnames "${first}")',
        f"rendezvous=${{hosts%%$'\\n'*}}:{port}",
        "trap 'kill $(jobs -p) 2>/dev/null || true' TERM EXIT",
        "pids=()",
    ]
    for number, component in enumerate(components):
        group = f"--het-group={number} " if len(components) > 1 else ""
        names = " ".join(map(shlex.quote, component.nodes))
        start = f"{shlex.join(command)} --this-node \"${{nodes[SLURM_NODEID]}}\" --rendezvous '$rendezvous'"
        body = f"nodes=({names}); exec {start}"
        # The job knows the rendezvous address only when it runs, and inserts it into the nodes' command.
        lines.append(f"body={shlex.quote(body)}")
        lines.append(
            f'srun {group}--kill-on-bad-exit=1 bash -c "${{body//\\$rendezvous/$rendezvous}}" & pids+=($!)'
        )
    # The other components notice a failure, say so, and end; who does not in time is killed by the trap.
    lines.append('for _ in "${pids[@]}"; do wait -n || { code=$?; sleep 10; exit "$code"; }; done')
    lines.append("trap - EXIT")
    return "\n".join(lines) + "\n"


def steps_of(config: str, prefix: str, epochs: float, overrides: tuple[str, ...]) -> int:
    """Optimizer steps that read a corpus `epochs` times, at least one."""
    run = load_run(config, overrides)
    tokens = IndexedDataset(prefix).num_tokens
    per_step = run.train.global_batch_size * run.data.sequence_length
    return max(1, round(tokens * epochs / per_step))


if __name__ == "__main__":
    sys.exit(main())
