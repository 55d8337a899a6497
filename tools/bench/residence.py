"""Resident memory of real processes against the forecast.

Each rank is a process of this machine. What counts as its card's is anonymous memory (RssAnon), what the host
holds is shared memory (RssShmem); both are sampled each millisecond. A process first trains a small model, so
that interpreter, libraries and communicators have what they take. What is taken beyond that is the model's,
and so is the forecast of `yuan-train simulate` without `reserved`.
"""

from __future__ import annotations

import os
import re
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.project import parse_plan, read_metrics
from tests.support.spawn import free_port
from tools.bench.harness import MISSED, Row, case
from tools.bench.runs import RETURN_FREED, bench_model, make_run, run_ranks, write_run, yuan_train
from yuan_train.cli.plan import problem_of
from yuan_train.config.cluster import Cluster, Host, Link, NodeGroup
from yuan_train.config.devices import DeviceType
from yuan_train.config.load import dump, write_text
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import load_plan, save_plan
from yuan_train.config.run import LogConfig, MemoryConfig, RunConfig, SearchConfig, load_run
from yuan_train.planner.costs.unit_costs import make_costs
from yuan_train.planner.costs.workload import host_bytes
from yuan_train.planner.evaluate.plan_cost import cost_plan
from yuan_train.planner.evaluate.stage_cost import StageCost

LAYERS, VOCABULARY = 8, 2048
TRAINED: dict[str, Any] = {"steps": 2, "optimizer": {"learning_rate": 1e-3, "bucket_size": 4_000_000}}
NARROW = 64
"""The hidden size of the model that is trained first."""
MOST_OFF, MOST_ON_HOST_OFF = 0.10, 0.01
"""Of the forecast; the second one of 16 bytes by offloaded parameter."""
FIELDS: tuple[str, ...] = ("RssAnon", "RssShmem")


AWAY = {"activation_offload": [LAYERS], "resident_parts": [6], "schedule": "gpipe"}
PAGES = {"parameter_offload": [LAYERS], "page_slots": [3]}
PLANS: dict[str, tuple[str, dict[str, Any]]] = {
    "resident": ("1x4: 8@0", {}),
    "optimizer 0.5": ("1x4: 8@0", {"optimizer_offload": [0.5]}),
    "optimizer 1": ("1x4: 8@0", {"optimizer_offload": [1.0]}),
    "resident, gpipe": ("1x4: 8@0", {"schedule": "gpipe"}),
    "activations, gpipe": ("1x4: 8@0", AWAY),
    "activations and optimizer 1, gpipe": ("1x4: 8@0", {**AWAY, "optimizer_offload": [1.0]}),
    "pages": ("1x4: 8@0 full", {**PAGES, "page_group": 4}),
    "pages and optimizer 1": ("1x4: 8@0 full", {**PAGES, "page_group": 2, "optimizer_offload": [1.0]}),
    "TP 2, optimizer 0.5": ("1x4: 8@0,1", {"optimizer_offload": [0.5]}),
    "ZeRO-1, shares 3 to 1, optimizer 0 and 0.6": (
        "1x2: 8@0 / 1x2: 8@1",
        {"optimizer_sharding": True, "optimizer_share": [3.0, 1.0], "optimizer_offload": [0.0, 0.6]},
    ),
    "unlike pipelines, optimizer 0.5 and 1": (
        "1x3: 5@0 full | 3@1 / 1x1: 8@2",
        {"optimizer_offload": [0.0, 0.5, 1.0]},
    ),
}
"""Over the tiers, and over what divides a model: in the short form of `parse_plan`, and its keys."""


@case(
    "memory/residence",
    formats={"off by": "+.1%", "bytes a parameter": ".2f"},
    plan=tuple(PLANS),
    hidden=(384,),
    tokens=(256,),
    precision=("bf16",),
)
def residence(plan: str, hidden: int, tokens: int, precision: str) -> Iterator[Row]:
    """What each rank of a plan takes, on its card and on its host, beside the forecast."""
    text, keys = PLANS[plan]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for name, size in (("first", NARROW), ("own", hidden)):
            sizes = {"num_attention_heads": 4, "vocab_size": VOCABULARY, "max_sequence_length": tokens}
            model = bench_model(LAYERS, size, **sizes)
            run = _write(work, name, make_run(model, batch=4, precision=precision, **TRAINED))
            save_plan(work / f"{name}.plan.yaml", parse_plan(run, text, **keys))
        made = load_plan(work / "own.plan.yaml")
        cluster = _cluster(_card(16 << 30), devices=made.world_size)
        cost = cost_plan(make_costs(problem_of(run, cluster, None)), made)
        for rank, measured in enumerate(_train_all(made.world_size, work)):
            ranks = [made.pipelines[own.pipeline].stages[own.stage].ranks for own in cost.stages]
            stage = next(own for own, here in zip(cost.stages, ranks, strict=True) if rank in here)
            yield _beside(plan, rank, measured, stage, made, host_bytes(run.train.precision))


def _beside(
    name: str, rank: int, measured: dict[str, int], stage: StageCost, plan: Plan, by_parameter: float
) -> Row:
    card, host = measured["RssAnon"], measured["RssShmem"]
    forecast = stage.memory.total - stage.memory.reserved
    away = _stepped_by_host(plan, stage)
    each = host / away if away else 0.0
    row: Row = {"plan": name, "rank": rank, "card MiB": card >> 20, "forecast MiB": round(forecast / 2**20)}
    row |= {"off by": forecast / card - 1, "host MiB": host >> 20}
    row |= {"host forecast MiB": int(stage.host_bytes) >> 20}
    row |= {"bytes a parameter": each} if each else {}
    is_off = abs(card - forecast) > MOST_OFF * forecast
    is_off |= abs(host - stage.host_bytes) > MOST_OFF * stage.host_bytes + 2**20
    is_off |= each > (1 + MOST_ON_HOST_OFF) * by_parameter
    return row | ({MISSED: f"{name}, rank {rank}: off by more than {MOST_OFF:.0%}"} if is_off else {})


def _stepped_by_host(plan: Plan, stage: StageCost) -> float:
    """Parameters whose optimizer state a card of a stage has on its host; 0 if it has more there."""
    own = plan.pipelines[stage.pipeline].stages[stage.stage]
    if own.activation_offload or own.parameter_offload:
        return 0.0
    # A tied matrix is there once.
    units = stage.units[1:] if own.embedding and own.head and plan.model.tie_embeddings else stage.units
    return sum(unit.parameters for unit in units) * stage.shares.optimizer * own.optimizer_offload


def _card(memory: int, **keys: Any) -> DeviceType:
    return DeviceType(memory=memory, bf16=2e10, fp32=2e10, memory_bandwidth=5e9, **{"reserved": 0, **keys})


def _cluster(card: DeviceType, **keys: Any) -> Cluster:
    """One node of this card, named as the cards of `parse_plan`."""
    link = Link(bandwidth=5e9, latency=1e-5)
    nodes = (NodeGroup(name="card", device="card", link=link, **keys),)
    return Cluster(name="cards", nodes=nodes, device_types={"card": card})


def _write(work: Path, name: str, run: RunConfig) -> RunConfig:
    return write_run(work / f"{name}.yaml", replace(run, log=LogConfig(directory=str(work / name))))


def _train_all(count: int, work: Path) -> list[dict[str, int]]:
    """What each rank has measured, in processes that return what they free at once."""
    return run_ranks(_train_both, count, count, work, free_port(), environment=RETURN_FREED)


def _train_both(rank: int, count: int, work: Path, port: int) -> dict[str, int]:
    """Train the first model, then the own one; what that took here besides."""
    # Recompute imports it, which the first model may do without.

    from yuan_train.train import run as run_module
    from yuan_train.train.job import Position, prepare

    # Freed memory must leave the process at once, to be told from what is in use.
    run_module.keep_freed_memory = lambda device: None  # pyright: ignore[reportAttributeAccessIssue]
    before: dict[str, int] = {}
    most: dict[str, int] = {}
    for name, address in (("first", os.environ["MASTER_PORT"]), ("own", str(port))):
        os.environ["MASTER_PORT"] = address
        plan, run = load_plan(work / f"{name}.plan.yaml"), load_run(work / f"{name}.yaml")
        before = {field: resident(field) for field in FIELDS}
        peak = Peak()
        run_module.train(prepare(run, plan, Position(rank, count, rank, count)))
        most = peak.end()
    return {field: most[field] - before[field] for field in FIELDS}


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


# --- the largest model ------------------------------------------------------------------------------------


@case("memory/largest", mebibytes=(64,), steps=(10,))
def largest(mebibytes: int, steps: int) -> Row:
    """What `plan --largest` names for a small simulated card, 8 MiB of it reserved, trained."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        card = _card(mebibytes << 20, reserved=8 << 20, backend="gloo", slowdown=1.0)
        write_text(work / "cluster.yaml", dump(_cluster(card, host=Host(memory=1 << 30))))
        optimizer = {"learning_rate": 1e-3, "bucket_size": 1_000_000}
        for name, words in (("first", ["model.num_layers=1"]), ("own", ["--largest"])):
            model = bench_model(1, 256, max_sequence_length=128)
            run = make_run(model, batch=2, steps=steps, optimizer=optimizer)
            search, memory = SearchConfig(offload=("optimizer",)), MemoryConfig(host_reserved=0)
            run = _write(work, name, replace(run, search=search, memory=memory))
            out, run_file = work / f"{name}.plan.yaml", work / f"{name}.yaml"
            files = ("--cluster", work / "cluster.yaml", "--config", run_file, "--out", out)
            yuan_train("plan", *files, *words)
            write_text(run_file, dump(replace(run, model=load_plan(out).model)))
        (measured,) = _train_all(1, work)
        plan = load_plan(work / "own.plan.yaml")
        lines = read_metrics(work / "own")
    assert plan.forecast is not None
    (stage,) = plan.forecast.stages
    row: Row = {"mebibytes": mebibytes, "layers": plan.model.num_layers}
    row["loss"] = f"{lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}"
    row |= {"card MiB": measured["RssAnon"] >> 20, "forecast MiB": round(stage.peak_memory_bytes / 2**20)}
    row["host MiB"] = measured["RssShmem"] >> 20
    row["host forecast MiB"] = round(stage.host_memory_bytes / 2**20)
    is_over = measured["RssAnon"] > mebibytes << 20
    return row | ({MISSED: f"{row['card MiB']} MiB on a card of {mebibytes}"} if is_over else {})
