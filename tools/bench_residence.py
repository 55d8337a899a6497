"""python tools/bench_residence.py: resident memory of real processes against the forecast, over plans.

Each rank is a process of this machine. What counts as its card's is anonymous memory (RssAnon), what the host
holds is shared memory (RssShmem); both are sampled each millisecond. A process first trains a model of narrow
layers under the same plan, so that interpreter, libraries and communicators have what they take. What is
taken beyond that is the model's, and so is the forecast of `yuan-train simulate` without `reserved`. Exits
with 1 if a process takes more or less than the forecast by MOST_OFF of it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from yuan_train.config.cluster import load_cluster
from yuan_train.config.plan import PipelinePlan, Plan, RankPlan, StagePlan
from yuan_train.config.plan_constraints import load_plan, save_plan
from yuan_train.config.run import RunConfig, load_run
from yuan_train.planner.costs.host import host_bytes
from yuan_train.planner.costs.plan_problem import PlanProblem, make_costs
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.evaluate.stage_cost import StageCost

LAYERS, VOCABULARY, STEPS = 8, 2048, 2
NARROW = 64
"""The hidden size of the model that is trained first."""
MOST_OFF, MOST_ON_HOST_OFF = 0.10, 0.01
"""Of the forecast; the second one of 16 bytes by offloaded parameter."""
FIELDS: tuple[str, ...] = ("RssAnon", "RssShmem")


@dataclass(frozen=True)
class Case:
    """A plan: pipelines of (micro-batches, stages), a stage of (layers, ranks of its one replica, keys)."""

    name: str
    pipelines: tuple[tuple[int, tuple[tuple[int, tuple[int, ...], dict[str, Any]], ...]], ...]
    keys: dict[str, Any]

    @property
    def num_ranks(self) -> int:
        return 1 + max(r for _, stages in self.pipelines for _, ranks, _ in stages for r in ranks)


def cases() -> Iterator[Case]:
    """Plans over the tiers, and over what divides a model."""
    whole, half = (LAYERS, (0,)), LAYERS // 2

    def alone(name: str, stage_keys: dict[str, Any], **keys: Any) -> Case:
        return Case(name, ((4, ((*whole, stage_keys),)),), keys)

    away = {"activation_offload": LAYERS, "resident_parts": 6}
    pages = {"recompute": "full", "parameter_offload": LAYERS, "page_slots": 3}
    yield alone("resident", {})
    yield alone("optimizer 0.5", {"optimizer_offload": 0.5})
    yield alone("optimizer 1", {"optimizer_offload": 1.0})
    yield alone("resident, gpipe", {}, schedule="gpipe")
    yield alone("activations, gpipe", away, schedule="gpipe")
    yield alone("activations and optimizer 1, gpipe", {**away, "optimizer_offload": 1.0}, schedule="gpipe")
    yield alone("pages", pages, page_group=4)
    yield alone("pages and optimizer 1", {**pages, "optimizer_offload": 1.0}, page_group=2)
    yield Case("TP 2, optimizer 0.5", ((4, ((LAYERS, (0, 1), {"optimizer_offload": 0.5}),)),), {})
    shares = ({"optimizer_share": 3.0}, {"optimizer_share": 1.0, "optimizer_offload": 0.6})
    yield Case(
        "ZeRO-1, shares 3 to 1, optimizer 0 and 0.6",
        tuple((2, ((LAYERS, (r,), shares[r]),)) for r in range(2)),
        {"optimizer_sharding": True},
    )
    stages = ((half + 1, (0,), {"recompute": "full"}), (half - 1, (1,), {"optimizer_offload": 0.5}))
    yield Case(
        "unlike pipelines, optimizer 0.5 and 1",
        ((3, stages), (1, ((LAYERS, (2,), {"optimizer_offload": 1.0}),))),
        {},
    )


def main() -> int:
    """Run every case, or those whose names have a word; print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden-size", type=int, default=384)
    parser.add_argument("--sequence-length", type=int, default=256)
    parser.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--only", default="", metavar="WORD", help="cases whose names have it")
    options = parser.parse_args()
    print("| plan | rank | card MiB | forecast MiB | off by | host MiB | forecast MiB | bytes a parameter |")
    print("|---|--:|--:|--:|--:|--:|--:|--:|")
    is_off = False
    for case in cases():
        if options.only in case.name:
            with tempfile.TemporaryDirectory() as folder:
                is_off |= _run(case, Path(folder), options)
    return int(is_off)


def _run(case: Case, work: Path, options: argparse.Namespace) -> bool:
    """Train, print a line for each rank; whether one of them is off."""
    (work / "cluster.yaml").write_text(json.dumps(_cluster(case.num_ranks)))
    write_corpus(work)
    for name, hidden in (("narrow", NARROW), ("wide", options.hidden_size)):
        (work / f"{name}.yaml").write_text(json.dumps(_run_file(work, name, hidden, options)))
        save_plan(work / f"{name}.plan.yaml", _plan(load_run(work / f"{name}.yaml"), case))
    run, plan = load_run(work / "wide.yaml"), load_plan(work / "wide.plan.yaml")
    cost = _forecast(work, run, plan)
    is_off = False
    for rank, measured in enumerate(_train_all(case.num_ranks, work)):
        stage = next(
            own for own in cost.stages if rank in plan.pipelines[own.pipeline].stages[own.stage].ranks
        )
        card, forecast = measured["RssAnon"], stage.memory.total - stage.memory.reserved
        away = _stepped_by_host(plan, stage)
        each = measured["RssShmem"] / away if away else 0.0
        print(
            f"| {case.name} | {rank} | {card / 2**20:.0f} | {forecast / 2**20:.0f} | "
            f"{forecast / card - 1:+.1%} | {measured['RssShmem'] / 2**20:.0f} | "
            f"{stage.host_bytes / 2**20:.0f} | {f'{each:.2f}' if each else ''} |",
            flush=True,
        )
        is_off |= abs(card - forecast) > MOST_OFF * forecast
        is_off |= abs(measured["RssShmem"] - stage.host_bytes) > MOST_OFF * stage.host_bytes + 2**20
        is_off |= each > (1 + MOST_ON_HOST_OFF) * host_bytes(run.train.precision)
    return is_off


def _stepped_by_host(plan: Plan, stage: StageCost) -> float:
    """Parameters whose optimizer state a card of a stage has on its host; 0 if it has more there."""
    own = plan.pipelines[stage.pipeline].stages[stage.stage]
    if own.activation_offload or own.parameter_offload:
        return 0.0
    # A tied matrix is there once.
    units = stage.units[1:] if own.embedding and own.head and plan.model.tie_embeddings else stage.units
    return sum(unit.parameters for unit in units) * stage.shares.optimizer * own.optimizer_offload


def _forecast(work: Path, run: RunConfig, plan: Plan) -> PlanCost:
    """As `yuan-train simulate --cluster` has it."""
    problem = PlanProblem(
        cluster=load_cluster(work / "cluster.yaml"),
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        precision=run.train.precision,
        bucket_size=run.optimizer.bucket_size,
        profile=None,
    )
    return cost_plan(make_costs(problem), plan)


def _plan(run: RunConfig, case: Case) -> Plan:
    keys = dict(case.keys)
    group = keys.pop("page_group", 1)
    pipelines: list[PipelinePlan] = []
    for count, own in case.pipelines:
        stages: list[StagePlan] = []
        first = 0
        for s, (layers, ranks, stage_keys) in enumerate(own):
            stages.append(
                StagePlan(
                    replicas=(ranks,),
                    layers=(first, first + layers),
                    embedding=s == 0,
                    head=s == len(own) - 1,
                    **stage_keys,
                )
            )
            first += layers
        pipelines.append(
            PipelinePlan(micro_batch_size=1, num_micro_batches=count, stages=tuple(stages), page_group=group)
        )
    cluster = load_cluster(Path(run.log.directory or ".").parent / "cluster.yaml")
    return Plan(
        cluster=cluster.name,
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        ranks=tuple(RankPlan(rank=r, device=c.name, type=c.type) for r, c in enumerate(cluster.cards)),
        pipelines=tuple(pipelines),
        **keys,
    )


def _cluster(num_cards: int) -> dict[str, object]:
    card = {
        "memory": "16 GiB",
        "reserved": "0 MiB",
        "bf16": "0.02 TFLOP/s",
        "fp32": "0.02 TFLOP/s",
        "memory_bandwidth": "5 GB/s",
    }
    link = {"bandwidth": "5 GB/s", "latency": "10 us"}
    nodes = [{"name": "one", "device": "Card", "devices": num_cards, "link": link}]
    return {"name": "cards", "nodes": nodes, "device_types": {"Card": card}}


def _run_file(work: Path, name: str, hidden_size: int, options: argparse.Namespace) -> dict[str, object]:
    model = {
        "name": name, "num_layers": LAYERS, "hidden_size": hidden_size, "num_attention_heads": 4,
        "ffn_hidden_size": 4 * hidden_size, "vocab_size": VOCABULARY,
        "max_sequence_length": options.sequence_length,
    }  # fmt: skip
    return {
        "model": model,
        "data": {
            "train": [{"prefix": str(work / "corpus")}],
            "sequence_length": options.sequence_length,
            "reset_position_ids": False,
        },
        "train": {"steps": STEPS, "global_batch_size": 4, "precision": options.precision, "device": "cpu"},
        "optimizer": {"learning_rate": 1e-3, "bucket_size": 4000000},
        "log": {"directory": str(work / name)},
    }


def write_corpus(work: Path) -> None:
    """Write documents of random tokens as `corpus` in a folder."""
    import numpy as np

    from yuan_train.data.indexed import IndexedWriter

    generator = np.random.default_rng(0)
    with IndexedWriter(work / "corpus", dtype=np.dtype(np.uint16)) as writer:
        for _ in range(64):
            writer.add(generator.integers(0, 50, 1000))


def _train_all(num_ranks: int, work: Path) -> list[dict[str, int]]:
    """What each rank has measured, in processes that return what they free at once."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    common |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(Path(__file__).resolve()), "--train", str(work), str(port)]
    ranks = [
        subprocess.Popen(
            command,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_ranks)
    ]
    found: list[dict[str, int]] = []
    for process in ranks:
        out, errors = process.communicate()
        if process.returncode:
            raise RuntimeError(f"a rank ended with exit code {process.returncode}:\n{errors}")
        found.append(json.loads(out.splitlines()[-1]))
    return found


def train_both(work: Path, port: int) -> None:
    """Train the narrow model, then the wide one; print what the second one took here, as JSON."""
    import torch

    from yuan_train.train import run as run_module
    from yuan_train.train.job import Position, prepare

    torch.set_num_threads(1)
    # Freed memory must leave the process at once, to be told from what is in use.
    run_module.keep_freed_memory = lambda device: None  # pyright: ignore[reportAttributeAccessIssue]
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before: dict[str, int] = {}
    most: dict[str, int] = {}
    for i, name in enumerate(("narrow", "wide")):
        os.environ["MASTER_PORT"] = str(port + i)
        plan, run = load_plan(work / f"{name}.plan.yaml"), load_run(work / f"{name}.yaml")
        before = {field: resident(field) for field in FIELDS}
        peak = Peak()
        run_module.train(prepare(run, plan, Position(rank, count, rank, count)))
        most = peak.end()
    print(json.dumps({field: most[field] - before[field] for field in FIELDS}))


class Peak:
    """The most that the process holds, sampled each millisecond."""

    def __init__(self) -> None:
        self._most = dict.fromkeys(FIELDS, 0)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(0.001):
            for field, most in self._most.items():
                self._most[field] = max(most, resident(field))

    def end(self) -> dict[str, int]:
        """Stop sampling; bytes by field."""
        self._ended.set()
        self._thread.join()
        return self._most


def resident(field: str) -> int:
    """Bytes that this process holds by a field of its status."""
    found = re.search(rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) * 1024


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        train_both(Path(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(main())
