"""Several ranks, NCCL with one, lost ranks, a full card, megatron-core, and layers of a large model."""

from __future__ import annotations

import importlib.util
import os
import re
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from unittest.mock import patch

import torch
import torch.distributed as dist

from tests.support.project import difference, make_plan, run_config
from tests.support.ranks import Case, run_alone
from tests.support.spawn import Around, Command, as_rank, free_port, patience, start_ranks, wait_for_step
from tools.gpu_checks import runs
from tools.gpu_checks.bench import Bench, Verdict, megabytes
from tools.gpu_checks.machine import run_pytest
from yuan_train.config.devices import CATALOGUE, DeviceType, Precision
from yuan_train.config.model import load_model
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import save_plan
from yuan_train.parallel.groups import init_distributed, make_tensor_groups, shutdown
from yuan_train.parallel.transport import Ranges, transport_of
from yuan_train.planner.costs.unit_costs import card_costs
from yuan_train.planner.costs.workload import TokenRows
from yuan_train.profile.units import ProfileCase, measure_case

SUITES = (
    *("equality", "plans", "zero", "tensor", "loss_scale", "activation_offload"),
    *("parameter_offload", "experts", "checksums"),
)
"""Of tests/parallel: losses and weights under every kind of plan against one process. In order of value."""
SUITE_SECONDS = 160
MOST_RANKS = 4
"""Of a test."""
END_SECONDS = 10
"""In which all ranks end when one is lost."""
FULL = {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.0005"}
"""The environment of a rank that is to run out of memory: of a card, what it may take."""
CPU_TYPE = DeviceType(memory=2**32, fp32=1e11, memory_bandwidth=1e10, backend="gloo")
MODEL_WORK_TOLERANCE = 0.2
"""How far the bytes that a layer keeps may be from `model_work`, relative."""


def several_ranks(bench: Bench) -> Verdict:
    """The tests of several ranks, all on this card: over gloo, through pinned memory."""
    files = [f"tests/parallel/test_{name}.py" for name in SUITES]
    words = [*files, "-vv", "-m", "not slow", "--maxfail=10", *_side_by_side()]
    return run_pytest(words, seconds=SUITE_SECONDS, YUAN_TEST_DEVICE=bench.device.type)


def _side_by_side() -> list[str]:
    """The words of pytest that run several tests at a time, where the machine has cores for it."""
    if importlib.util.find_spec("xdist") is None or (os.cpu_count() or 1) < 2 * MOST_RANKS:
        return []
    return ["-n", str((os.cpu_count() or 1) // MOST_RANKS), "--dist", "worksteal"]


def nccl(bench: Bench) -> Verdict:
    """The operations of a group of one rank, and the bytes of a communicator; on a CPU over gloo."""
    as_rank(0, 1, free_port())
    device = runs.device_of(bench)
    init_distributed(device=device, timeout_seconds=60)
    try:
        before = _free_bytes(bench)
        group = make_tensor_groups(((0,),), timeout_seconds=60)[0,]
        transport = transport_of(group, (0,), device=device, via_host=False)
        tensor = torch.ones(64, device=bench.device)
        whole = Ranges((64,))
        for name, call in {
            "all_reduce": lambda: transport.all_reduce(tensor, "a check"),
            "broadcast": lambda: transport.broadcast(tensor, 0, "a check"),
            "reduce_ranges": lambda: transport.reduce_ranges(tensor, whole, "a check"),
            "gather_ranges": lambda: transport.gather_ranges(tensor, whole, "a check"),
        }.items():
            call().finish(60)
            bench.note(**{name: bool((tensor == 1).all())})
            assert bool((tensor == 1).all()), name
        dist.barrier()
        taken = None if before is None else before - (_free_bytes(bench) or 0)
        bench.note(communicator_bytes=taken)
    finally:
        start = time.monotonic()
        shutdown()
    ended = time.monotonic() - start
    return ended < patience(END_SECONDS), f"destroyed in {ended:.1f} s; of a communicator: {megabytes(taken)}"


def _free_bytes(bench: Bench) -> int | None:
    """Of the card, without what torch's allocator holds."""
    if not bench.on_card:
        return None
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def lost_rank(bench: Bench) -> Verdict:
    """Kill one of four ranks after two steps: when the others end, and whom they name."""
    with _four_ranks(bench) as ranks:
        wait_for_step(bench.scratch / "log", 2, lambda: all(rank.process.is_alive() for rank in ranks))
        ranks[1].kill()
        return _ending(bench, ranks, words=r"rank 1\b", asked=(0, 2, 3))


def full_card(bench: Bench) -> Verdict:
    """Let one of four ranks run out of memory: when all end, and whether the others name it."""
    with _four_ranks(bench, {1: _full}, hidden_size=2048, num_attention_heads=16) as ranks:
        return _ending(bench, ranks, words=r"rank 1\b", asked=(0, 1, 2, 3), late=60)


def _ending(
    bench: Bench, ranks: list[Command], *, words: str, asked: tuple[int, ...], late: float = 0.0
) -> Verdict:
    """Whether all end in time (`late` seconds are for the start), and the logs of those `asked` have these
    words."""
    start, codes = time.monotonic(), []
    for rank in ranks:
        rank.process.join(max(0.1, start + patience(late + 3 * END_SECONDS) - time.monotonic()))
        codes.append(rank.process.exitcode)
    took = time.monotonic() - start
    logs = [rank.stderr.read_text() for rank in ranks]
    bench.note(codes=codes, seconds=took, logs=[log[-4000:] for log in logs])
    silent = [i for i in asked if not re.search(words, logs[i])]
    holds = None not in codes and took < patience(late + END_SECONDS) and not silent
    named = f"not named by {silent}" if silent else "named"
    return holds, f"codes {codes} after {took:.1f} s, {named}"


def _full() -> AbstractContextManager[object]:
    return patch.dict(os.environ, FULL)


def _four_ranks(
    bench: Bench, around: Mapping[int, Around] | None = None, **model: int
) -> AbstractContextManager[list[Command]]:
    """Four ranks of an endless run, each as if on a node of its own; killed at the end. `around`: what is
    around the command of some."""
    run_file = runs.project(bench, {"num_layers": 4, **model})
    plan = _over_gloo(bench, make_plan(run_config(run_file), [[1, 1, 1, 1]]))
    save_plan(bench.scratch / "plan.yaml", plan)
    words = ["train", "--config", run_file, "--plan", bench.scratch / "plan.yaml", "train.steps=1000000"]
    words += ["validation.every=0", "train.timeout=60 s", f"log.directory={bench.scratch / 'log'}"]
    words += [f"train.device={bench.device.type}"]
    return start_ranks(words, bench.scratch, 4, around=around)


def _over_gloo(bench: Bench, plan: Plan) -> Plan:
    """The plan for ranks that share this card, which NCCL refuses: its type has no backend but gloo."""
    name = runs.card_type(bench)
    device_type = replace(CATALOGUE.get(name, CPU_TYPE), backend="gloo")
    ranks = tuple(replace(entry, type=name) for entry in plan.ranks)
    return replace(plan, ranks=ranks, device_types={name: device_type})


def megatron(bench: Bench) -> Verdict:
    """Losses and seconds of megatron-core's engine beside ours."""
    import megatron.core  # pyright: ignore[reportUnusedImport]  # noqa: F401 (its absence is told)

    run_file = runs.large_project(bench, num_layers=8)
    words = (f"train.device={bench.device.type}", f"train.steps={bench.pick(8, 2)}", "validation.every=0")
    found = {
        engine: run_alone(Case(run_file, runs.new_folder(bench), None, (*words, f"engine={engine}")))
        for engine in ("yuan", "megatron")
    }
    seconds = {engine: lines[-1]["step_seconds"] for engine, lines in found.items()}
    bench.note(step_seconds=seconds)
    bench.note(losses={engine: [line["loss"] for line in lines] for engine, lines in found.items()})
    off = difference(found["megatron"], found["yuan"])
    ratio = seconds["megatron"] / seconds["yuan"]
    return off < bench.pick(2e-2, 1e-5), f"losses {off:.1e} apart; megatron-core's step {ratio:.2f} of ours"


def large_layers(bench: Bench) -> Verdict:
    """Seconds and kept bytes of layers of Llama-3.1-8B beside what the planner has without a profile."""
    name, lengths = bench.pick(("llama3.1-8b", (8192, 32768)), ("tiny", (64,)))
    model = load_model(runs.ROOT / f"configs/model/{name}.yaml")
    model = replace(model, num_layers=min(4, model.num_layers), max_sequence_length=max(lengths))
    device_type = CATALOGUE.get(runs.card_type(bench), CPU_TYPE)
    precision: Precision = bench.pick("bf16", "fp32")
    offs, words = [], []
    for length in lengths:
        case = ProfileCase(
            model=model,
            sequence_length=length,
            micro_batch_size=1,
            recompute="none",
            dtype=bench.pick(torch.bfloat16, torch.float32),
            device=runs.device_of(bench),
            seconds_per_unit=bench.pick(1.0, 0.01),
        )
        (layer,) = measure_case(case, device_type="here").entry.layers
        rows, card = TokenRows(1, length, precision), {"type_name": "here", "device": device_type}
        wanted = card_costs(model, rows, recompute="none", profile=None, **card).units[1]
        seconds = layer.forward_seconds + layer.backward_seconds
        estimate = wanted.forward_seconds + wanted.backward_seconds
        kept, forecast = layer.activation_bytes + layer.output_bytes, wanted.activation_bytes
        bench.note(**{f"S = {length}": {"seconds": [seconds, estimate], "kept bytes": [kept, forecast]}})
        offs.append(abs(kept / forecast - 1))
        words.append(
            f"S = {length}: {seconds / estimate:.2f} of the estimated seconds, {kept / forecast:.2f} of bytes"
        )
    return max(offs) < MODEL_WORK_TOLERANCE, "; ".join(words)
