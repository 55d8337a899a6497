"""Whether forecasts are true, and how fast a step, a token and a save are."""

from __future__ import annotations

import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from tests.support.project import difference, read_metrics
from tests.support.ranks import disabled
from tests.support.rl import RLCase, run_rl, write_rl
from tools.gpu_checks import runs
from tools.gpu_checks.bench import Bench, Verdict, megabytes
from yuan_train.config.model import load_model
from yuan_train.config.plan_constraints import load_plan
from yuan_train.models.generate import Sampling, generate_batch
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel.activity import Activity, observed_by
from yuan_train.schedule.trace import trace_path

STEP_TOLERANCE, MEMORY_TOLERANCE = 0.15, 0.15
"""How far forecasts may be off on a card, relative. A CPU that others use too proves nothing of them."""
WARM_UP = 3
"""Steps that are left out."""

KINDS = (
    ("copies", re.compile(r"memcpy|memset", re.IGNORECASE)),
    ("attention", re.compile(r"flash|fmha|attention|sdpa", re.IGNORECASE)),
    ("products", re.compile(r"gemm|nvjet|cutlass|cublas|xmma|::(add)?mm|matmul", re.IGNORECASE)),
)
"""What a kernel does, by its name; all others are passes over memory."""


def profile(bench: Bench) -> Verdict:
    """Measure a model for micro-batches of one and two and each recompute, and plan it for this card."""
    run_file, cluster = runs.large_project(bench), runs.cluster_of_one(bench)
    files = ("--config", run_file, "--cluster", cluster)
    shape = ("search.micro_batch_size=[1,2]", "search.tensor=[1]", "search.time_limit=20 s")
    seconds = bench.pick("0.7", "0.01")
    runs.yuan_train("profile", *files, "--seconds", seconds, "--out", bench.folder / "profile.json", *shape)
    found = json.loads((bench.folder / "profile.json").read_text())
    out = ("--profile", bench.folder / "profile.json", "--out", bench.folder / "plan.yaml")
    runs.yuan_train("plan", *files, *out, *shape)
    plan = load_plan(bench.folder / "plan.yaml")
    assert plan.forecast is not None
    entries, step = found["entries"], plan.forecast.step_seconds
    types = [entry["device_type"] for entry in entries]
    bench.note(
        entries=len(entries), reserved=entries[0].get("reserved_bytes"), step_seconds=step, types=types
    )
    sizes = sorted({entry["micro_batch_size"] for entry in entries})
    holds = {*types} == {runs.card_type(bench)} and sizes == [1, 2]
    return holds, f"{len(entries)} entries; step {step:.3g} s"


def forecast(bench: Bench) -> Verdict:
    """Train the plan of `profile`: seconds and bytes beside the forecast, part by part."""
    path = bench.folder.parent / "profile/plan.yaml"
    if not path.exists():
        return None, "needs the plan of the check `profile`"
    run_file, plan = runs.large_project(bench), load_plan(path)
    lines = _train(bench, run_file, "log", "train.steps=12", plan=path)
    assert plan.forecast is not None
    wanted, found = plan.forecast.step_seconds, _step_seconds(lines)
    memory, peak = plan.forecast.stages[0].memory, lines[-1]["peak_memory_bytes"][0]
    bench.note(step={"forecast": wanted, "measured": found, "mfu": lines[-1]["mfu"]})
    bench.note(tokens_per_second=lines[-1]["tokens_per_second"])
    bench.note(memory={"forecast": memory.categories, "forecast total": memory.total, "measured": peak})
    if bench.on_card:
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()
        bench.note(allocated=torch.cuda.max_memory_allocated(), reserved=torch.cuda.max_memory_reserved())
        bench.note(outside_of_torch=outside)
    off = wanted / found - 1, memory.total / peak - 1
    true = abs(off[0]) < STEP_TOLERANCE and abs(off[1]) < MEMORY_TOLERANCE
    figure = f"step {found:.3g} s, forecast {off[0]:+.1%}; {megabytes(peak)}, forecast {off[1]:+.1%}"
    return (true if bench.on_card else all(map(math.isfinite, off))), figure


def _train(
    bench: Bench, run_file: Path, name: str, *words: str, plan: Path | None = None
) -> list[dict[str, Any]]:
    """Train in this process; the metrics of its steps."""
    log = bench.folder / name
    plans = () if plan is None else ("--plan", plan)
    own = (f"log.directory={log}", "validation.every=0")
    runs.yuan_train("train", "--config", run_file, *plans, *own, *words)
    return read_metrics(log)


def _step_seconds(lines: Sequence[dict[str, Any]]) -> float:
    return statistics.median(line["step_seconds"] for line in lines[WARM_UP:] or lines)


def kernel_times(bench: Bench) -> Verdict:
    """One traced step: where its seconds go, by kind of kernel, and the 20 kernels that take most."""
    run_file = runs.large_project(bench, num_layers=8)
    words = ("train.steps=7", "train.trace={first_step: 7, steps: 1, kernels: true}")
    lines = _train(bench, run_file, "log", *words)
    events = json.loads(trace_path(bench.folder / "log", 0).read_text())["traceEvents"]
    categories = bench.pick(("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op",))
    timed = [event for event in events if event.get("cat") in categories and "dur" in event]
    if not timed:
        return False, "the trace has no kernels"
    by_name: Counter[str] = Counter()
    for event in timed:
        by_name[event["name"]] += event["dur"] / 1e6
    bench.note(kernels={name[:120]: seconds for name, seconds in by_name.most_common(20)})
    by_kind: Counter[str] = Counter()
    for name, seconds in by_name.items():
        by_kind[next((kind for kind, pattern in KINDS if pattern.search(name)), "passes")] += seconds
    busy = _union((event["ts"] / 1e6, event["dur"] / 1e6) for event in timed)
    # Of steps without the tracer, which takes as long as the host's own work.
    step = _step_seconds(lines[:-1])
    bench.note(step_seconds=step, busy_seconds=busy, kinds=by_kind, traced=lines[-1]["step_seconds"])
    if not bench.on_card:
        return busy > 0, f"{len(timed)} operators; kernels need a card"
    shares = ", ".join(f"{kind} {seconds / busy:.0%}" for kind, seconds in by_kind.most_common())
    return busy > 0, f"{shares} of kernels; the card idles {max(0.0, 1 - busy / step):.0%} of {step:.3g} s"


def _union(intervals: Iterable[tuple[float, float]]) -> float:
    """Seconds in which at least one of (start, length) runs."""
    total, end = 0.0, -math.inf
    for start, length in sorted(intervals):
        total += max(0.0, start + length - max(start, end))
        end = max(end, start + length)
    return total


def compiled(bench: Bench) -> Verdict:
    """A step with compiled layers and one in fp16 beside bf16; and of a narrow model, for the host's time."""
    run_file = runs.large_project(bench, num_layers=8)
    few = f"train.steps={bench.pick(9, 2)}"
    plain = _train(bench, run_file, "plain", few, "train.precision=bf16")
    half = _train(bench, run_file, "fp16", few, "train.precision=fp16")
    # A CPU's machine code takes minutes of a compiler; the graphs are the same without it.
    with disabled(bench.pick("", "inductor")):
        fused = _train(bench, run_file, "compiled", few, "train.precision=bf16", "train.compile=true")
    widths = {"hidden_size": 1024, "num_attention_heads": 16, "ffn_hidden_size": 4096}
    narrow = runs.large_project(bench, num_layers=8, **widths)
    thin = _train(bench, narrow, "narrow", few, "train.precision=bf16")
    found = {"bf16": plain, "fp16": half, "compiled": fused, "H 1024": thin}
    seconds = {name: _step_seconds(lines) for name, lines in found.items()}
    bench.note(step_seconds=seconds, first_compiled_step=fused[0]["step_seconds"])
    off = max(difference(lines, plain) for lines in (half, fused))
    shares = ", ".join(f"{name} {took / seconds['bf16']:.2f}" for name, took in seconds.items())
    return off < 2e-2, f"of bf16's {seconds['bf16']:.3g} s: {shares}; losses {off:.1e} apart"


def generation(bench: Bench) -> Verdict:
    """Tokens a second of Yuan2-2B for several batches, and a step of reinforcement learning."""
    name, dtype = bench.pick(("yuan2-2b", torch.bfloat16), ("tiny", torch.float32))
    with bench.device:
        model = Transformer(load_model(runs.ROOT / f"configs/model/{name}.yaml"), dtype=dtype)
    init_weights(model, seed=0)
    rates: dict[int, float] = {}
    for batch in bench.pick((1, 16, 64), (1, 2)):
        prompts, tokens = [[5, 6, 7, 8 + i] for i in range(batch)], bench.pick(64, 4)
        for new in (2, tokens):
            start = time.perf_counter()
            greedy = Sampling(temperature=0)
            found = list(generate_batch(model, prompts, max_new_tokens=new, sampling=greedy, seed=0))
        bench.synchronize()
        rates[batch] = tokens * batch / (time.perf_counter() - start)
        assert len(found) == tokens and all(token is not None for step in found for token in step)
    bench.note(tokens_per_second=rates)
    words = (f"train.device={bench.device.type}", "train.precision=fp32")
    lines = run_rl(RLCase(write_rl(runs.new_folder(bench)), runs.new_folder(bench), overrides=words))
    bench.note(rl=lines[-1])
    figure = ", ".join(f"{rate:,.0f} tokens/s at batch {batch}" for batch, rate in rates.items())
    return len(lines) == 2 and all(math.isfinite(line["grad_norm"]) for line in lines), figure


class _Gaps:
    """Observes when training steps begin and end."""

    def __init__(self) -> None:
        self.times: list[tuple[float, float]] = []
        self._began = 0.0

    def begin(self, activity: Activity) -> None:
        if activity.kind == "training_step":
            self._began = time.perf_counter()

    def end(self, activity: Activity) -> None:
        if activity.kind == "training_step":
            self.times.append((self._began, time.perf_counter()))


def saves(bench: Bench) -> Verdict:
    """What asynchronous saves hold up, the first of which pins memory; and a run that changes its device."""
    run_file = runs.large_project(bench, num_layers=2)
    gaps = _Gaps()
    words = ("train.steps=8", "checkpoint.every=3", "checkpoint.asynchronous=true")
    with observed_by(gaps):
        _train(bench, run_file, "log", *words, f"checkpoint.directory={bench.scratch / 'saved'}")
    between = [later[0] - earlier[1] for earlier, later in zip(gaps.times, gaps.times[1:], strict=False)]
    first, later = (max(0.0, between[step - 1] - statistics.median(between)) for step in (3, 6))
    bench.note(seconds_between_steps=between)
    small = runs.project(bench)
    here = bench.device.type
    wanted = runs.curve(bench, small, here, "train.steps=6", "optimizer.decay_steps=20")
    kept = f"checkpoint.directory={bench.scratch / 'moved'}"
    found: runs.Curve = []
    for steps, device in ((2, here), (4, "cpu"), (6, here)):
        found += runs.curve(bench, small, device, f"train.steps={steps}", "optimizer.decay_steps=20", kept)
    off = runs.apart(found, wanted)
    bench.note(apart=off)
    holds = max(off) <= bench.pick(1e-3, 0.0)
    return holds, f"stalls {first:.2f} s, {later:.2f} s; moved twice: losses {off[0]:.1e} apart"
