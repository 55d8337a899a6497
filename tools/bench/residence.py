"""Resident memory of real processes against the forecast.

Each rank is a process of this machine. What counts as its card's is anonymous memory (RssAnon), what the host
holds is shared memory (RssShmem); both are sampled each millisecond. A process first trains a small model, so
that interpreter, libraries and communicators have what they take. What is taken beyond that is the model's,
and so is the forecast of `yuan-train simulate` without `reserved`.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.spawn import free_port
from tools.bench.harness import MISSED, Row, case
from yuan_train.config.cluster import load_cluster
from yuan_train.config.load import dump, write_text
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
class Pipelines:
    """A plan: pipelines of (micro-batches, stages), a stage of (layers, ranks of its one replica, keys)."""

    name: str
    pipelines: tuple[tuple[int, tuple[tuple[int, tuple[int, ...], dict[str, Any]], ...]], ...]
    keys: dict[str, Any]

    @property
    def num_ranks(self) -> int:
        return 1 + max(r for _, stages in self.pipelines for _, ranks, _ in stages for r in ranks)


def _plans() -> Iterator[Pipelines]:
    """Plans over the tiers, and over what divides a model."""
    whole, half = (LAYERS, (0,)), LAYERS // 2

    def alone(name: str, stage_keys: dict[str, Any], **keys: Any) -> Pipelines:
        return Pipelines(name, ((4, ((*whole, stage_keys),)),), keys)

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
    yield Pipelines("TP 2, optimizer 0.5", ((4, ((LAYERS, (0, 1), {"optimizer_offload": 0.5}),)),), {})
    shares = ({"optimizer_share": 3.0}, {"optimizer_share": 1.0, "optimizer_offload": 0.6})
    yield Pipelines(
        "ZeRO-1, shares 3 to 1, optimizer 0 and 0.6",
        tuple((2, ((LAYERS, (r,), shares[r]),)) for r in range(2)),
        {"optimizer_sharding": True},
    )
    stages = ((half + 1, (0,), {"recompute": "full"}), (half - 1, (1,), {"optimizer_offload": 0.5}))
    yield Pipelines(
        "unlike pipelines, optimizer 0.5 and 1",
        ((3, stages), (1, ((LAYERS, (2,), {"optimizer_offload": 1.0}),))),
        {},
    )


PLANS = {plan.name: plan for plan in _plans()}


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
    given = PLANS[plan]
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        (work / "cluster.yaml").write_text(json.dumps(_cluster(given.num_ranks)))
        write_corpus(work)
        for name, size in (("first", NARROW), ("own", hidden)):
            (work / f"{name}.yaml").write_text(json.dumps(_run_file(work, name, size, tokens, precision)))
            save_plan(work / f"{name}.plan.yaml", _plan(load_run(work / f"{name}.yaml"), given))
        run, made = load_run(work / "own.yaml"), load_plan(work / "own.plan.yaml")
        cost = _forecast(work, run, made)
        for rank, measured in enumerate(_train_all(given.num_ranks, work)):
            stage = next(
                own for own in cost.stages if rank in made.pipelines[own.pipeline].stages[own.stage].ranks
            )
            yield _beside(plan, rank, measured, stage, made, host_bytes(run.train.precision))


def _beside(
    name: str, rank: int, measured: dict[str, int], stage: StageCost, plan: Plan, by_parameter: float
) -> Row:
    card, host = measured["RssAnon"], measured["RssShmem"]
    forecast = stage.memory.total - stage.memory.reserved
    away = _stepped_by_host(plan, stage)
    each = host / away if away else 0.0
    row: Row = {"plan": name, "rank": rank, "card MiB": card >> 20, "forecast MiB": round(forecast / 2**20)}
    row |= {
        "off by": forecast / card - 1,
        "host MiB": host >> 20,
        "host forecast MiB": int(stage.host_bytes) >> 20,
    }
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


def _plan(run: RunConfig, given: Pipelines) -> Plan:
    keys = dict(given.keys)
    group = keys.pop("page_group", 1)
    pipelines: list[PipelinePlan] = []
    for count, own in given.pipelines:
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


def _card(memory: str, reserved: str) -> dict[str, object]:
    rates = {"bf16": "0.02 TFLOP/s", "fp32": "0.02 TFLOP/s", "memory_bandwidth": "5 GB/s"}
    return {"memory": memory, "reserved": reserved, **rates}


def _cluster(num_cards: int) -> dict[str, object]:
    link = {"bandwidth": "5 GB/s", "latency": "10 us"}
    nodes = [{"name": "one", "device": "Card", "devices": num_cards, "link": link}]
    return {"name": "cards", "nodes": nodes, "device_types": {"Card": _card("16 GiB", "0 MiB")}}


def _run_file(
    work: Path,
    name: str,
    hidden: int,
    tokens: int,
    precision: str,
    *,
    layers: int = LAYERS,
    words: int = VOCABULARY,
) -> dict[str, Any]:
    model = {
        "name": name, "num_layers": layers, "hidden_size": hidden, "num_attention_heads": 4,
        "ffn_hidden_size": 4 * hidden, "vocab_size": words,
        "max_sequence_length": tokens,
    }  # fmt: skip
    return {
        "model": model,
        "data": {
            "train": [{"prefix": str(work / "corpus")}],
            "sequence_length": tokens,
            "reset_position_ids": False,
        },
        "train": {"steps": STEPS, "global_batch_size": 4, "precision": precision, "device": "cpu"},
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
    common = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    common |= {"MASTER_ADDR": "127.0.0.1", "WORLD_SIZE": str(num_ranks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tools.bench.residence", str(work), str(free_port()), str(free_port())]
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


def train_both(work: Path, ports: Sequence[str]) -> None:
    """Train the first model, then the own one; print what that took here besides, as JSON."""
    # Recompute imports it, which the first model may do without.
    import torch._dynamo

    from yuan_train.train import run as run_module
    from yuan_train.train.job import Position, prepare

    torch.set_num_threads(1)
    # Freed memory must leave the process at once, to be told from what is in use.
    run_module.keep_freed_memory = lambda device: None  # pyright: ignore[reportAttributeAccessIssue]
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    before: dict[str, int] = {}
    most: dict[str, int] = {}
    for name, port in zip(("first", "own"), ports, strict=True):
        os.environ["MASTER_PORT"] = port
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


# --- the largest model ------------------------------------------------------------------------------------


@case("memory/largest", mebibytes=(64,), steps=(10,))
def largest(mebibytes: int, steps: int) -> Row:
    """What `plan --largest` names for a small simulated card, 8 MiB of it reserved, trained."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        card = _card(f"{mebibytes} MiB", "8 MiB") | {"backend": "gloo", "slowdown": 1.0}
        nodes = [{"name": "one", "device": "Card", "devices": 1, "host": {"memory": "1 GiB"}}]
        cluster = {"name": "small", "nodes": nodes, "device_types": {"Card": card}}
        (work / "cluster.yaml").write_text(json.dumps(cluster))
        write_corpus(work)
        for name, words in (("first", ["model.num_layers=1"]), ("own", ["--largest"])):
            run = _run_file(work, name, 256, 128, "bf16", layers=1, words=1024)
            run["train"] = {"steps": steps, "global_batch_size": 2, "precision": "bf16", "device": "cpu"}
            run["optimizer"] = {"learning_rate": 1e-3, "bucket_size": 1000000}
            run |= {"search": {"offload": ["optimizer"]}, "memory": {"host_reserved": "0 GiB"}}
            (work / f"{name}.yaml").write_text(json.dumps(run))
            files = ["--cluster", work / "cluster.yaml", "--config", work / f"{name}.yaml"]
            out = work / f"{name}.plan.yaml"
            command = [sys.executable, "-m", "yuan_train", "plan", *files, "--out", out, *words]
            subprocess.run(command, check=True, capture_output=True)
            layers = load_plan(out).model.num_layers
            made = load_run(work / f"{name}.yaml", (f"model.num_layers={layers}",))
            write_text(work / f"{name}.yaml", dump(made))
        (measured,) = _train_all(1, work)
        plan = load_plan(work / "own.plan.yaml")
        lines = [json.loads(line) for line in (work / "own/metrics.jsonl").read_text().splitlines()]
    assert plan.forecast is not None
    (stage,) = plan.forecast.stages
    row: Row = {"mebibytes": mebibytes, "layers": plan.model.num_layers}
    row["loss"] = f"{lines[0]['loss']:.3f} to {lines[-1]['loss']:.3f}"
    row |= {"card MiB": measured["RssAnon"] >> 20, "forecast MiB": round(stage.peak_memory_bytes / 2**20)}
    row |= {
        "host MiB": measured["RssShmem"] >> 20,
        "host forecast MiB": round(stage.host_memory_bytes / 2**20),
    }
    is_over = measured["RssAnon"] > mebibytes << 20
    return row | ({MISSED: f"{row['card MiB']} MiB on a card of {mebibytes}"} if is_over else {})


if __name__ == "__main__":
    train_both(Path(sys.argv[1]), sys.argv[2:])
