"""`estimate --engine yuan` beside the measured peak memory of one process."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.support.project import make_plan, read_metrics
from tools.bench.harness import MISSED, Row, case
from tools.bench.runs import RETURN_FREED, make_run, run_ranks, write_run
from yuan_train.cli import main as cli
from yuan_train.config.devices import DeviceType, Precision
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan_constraints import save_plan
from yuan_train.config.run import Recompute
from yuan_train.estimate.memory import GroupShape, MemoryCase, PhaseBytes, yuan_memory
from yuan_train.models.generate import draw, draw_keys, fork, new_slots, step_slots
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.device import Device, held_bytes, peak_memory_bytes, reset_peak_memory
from yuan_train.planner.roles.engines import PREFILL_CHUNK
from yuan_train.train import run as run_module

CPU = DeviceType(memory=2**35, reserved=0, fp32=1e11, bf16=1e11, memory_bandwidth=1e10, slowdown=1.0)


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model, and what is done with it."""

    name: str
    sizes: Mapping[str, object]
    samples: GroupShape
    precision: Precision = "fp32"
    recompute: Recompute = "none"
    generate: bool = False

    @property
    def model(self) -> ModelConfig:
        """The sizes as a model."""
        return ModelConfig(**{"name": self.name, "max_sequence_length": 4096, **self.sizes})

    @property
    def forecast(self) -> PhaseBytes:
        """The estimate, nothing reserved."""
        case = MemoryCase(
            model=self.model, method="full", samples=self.samples, card="CPU", recompute=self.recompute
        )
        return yuan_memory(case, self.model, CPU, self.precision)


def _sizes(layers: int, hidden: int, heads: int, ffn: int, vocabulary: int) -> dict[str, Any]:
    named = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}
    return named | {"ffn_hidden_size": ffn, "vocab_size": vocabulary}


NOTHING = _sizes(1, 16, 1, 16, 64)
SHORT = GroupShape(group=1, prompt=64, new=192)
LONG = GroupShape(group=1, prompt=256, new=1792)
DEEP = _sizes(8, 512, 8, 1536, 8192) | {"architecture": "llama", "num_key_value_heads": 2}
FLAT = DEEP | _sizes(4, 256, 8, 768, 4096)
YUAN = _sizes(4, 256, 8, 1024, 4096)
WIDE_CACHE = FLAT | {"num_key_value_heads": 8, "ffn_hidden_size": 256, "vocab_size": 64}
MANY_WORDS = FLAT | {"vocab_size": 65536}
QWEN = DEEP | {"architecture": "qwen", "qkv_bias": True, "num_layers": 2, "vocab_size": 32768}
JOBS = (
    Job(name="Llama", sizes=DEEP, samples=SHORT),
    Job(name="Llama", sizes=FLAT, samples=LONG),
    Job(name="Llama", sizes=FLAT, samples=LONG, precision="bf16"),
    Job(name="Yuan", sizes=YUAN, samples=LONG),
    Job(name="Yuan", sizes=YUAN, samples=LONG, recompute="selective"),
    Job(name="Qwen", sizes=QWEN, samples=SHORT, recompute="full"),
    Job(name="Llama", sizes=FLAT, samples=GroupShape(group=64, prompt=256, new=16), generate=True),
    Job(name="Llama", sizes=WIDE_CACHE, samples=GroupShape(group=128, prompt=16, new=240), generate=True),
    Job(name="Llama", sizes=MANY_WORDS, samples=GroupShape(group=64, prompt=64, new=4), generate=True),
)


@case("estimate/memory", formats={"off by": "+.1%"}, number=tuple(range(len(JOBS))))
def memory(number: int) -> Row:
    """A step, or a group of answers, of a small model in a process of its own, beside its estimate.

    What the interpreter and its libraries hold, measured with a model of next to nothing, is taken off; so is
    what the estimate reserves. Freed memory leaves the processes at once, to be told from what is in use;
    `heap kept MB` is of processes that keep it, holes and all, as users run them.
    """
    job = JOBS[number]
    nothing = replace(smallest(job), recompute="none")
    phase = "generation" if job.generate else "training"
    if job.generate:
        measured, kept = (generation_bytes(job, keep=keep) for keep in (False, True))
        estimate = job.forecast.states["weights"] + sum(job.forecast.phases[phase].values())
    else:
        measured, kept = (
            training_bytes(job, keep=keep) - training_bytes(nothing, keep=keep) for keep in (False, True)
        )
        estimate = job.forecast.of_phase(phase) - nothing.forecast.of_phase(phase)
    tokens = job.samples.tokens if job.generate else job.samples.length
    row: Row = {"model": job.name, "parameters": job.model.parameters, "phase": phase}
    row |= {"precision": job.precision, "recompute": job.recompute, "tokens": tokens}
    row |= {"estimate MB": round(estimate / 1e6), "in use MB": round(measured / 1e6)}
    row |= {"off by": estimate / measured - 1, "heap kept MB": round(kept / 1e6)}
    missed = {MISSED: f"{job.name}, {phase}: {row['off by']:+.1%}"} if abs(row["off by"]) > 0.1 else {}
    return row | missed


def smallest(job: Job) -> Job:
    """The case with a model of next to nothing."""
    heads = {"num_key_value_heads": 1} if "num_key_value_heads" in job.sizes else {}
    return replace(job, sizes={**job.sizes, **NOTHING, **heads})


def training_bytes(job: Job, *, keep: bool) -> int:
    """Peak resident bytes of a process that trains one step; `keep`: it keeps freed memory."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file, plan_file = folder / "run.yaml", folder / "plan.yaml"
        samples = job.samples
        run = make_run(job.model, tokens=samples.length, batch=samples.group, precision=job.precision)
        plan = make_plan(write_run(run_file, run), [[job.model.num_layers]], recompute=job.recompute)
        save_plan(plan_file, replace(plan, device_types={"card": CPU}))
        words = ["train", "--config", str(run_file), "--plan", str(plan_file), f"log.directory={folder}"]
        run_ranks(_train, 1, words, keep, environment={} if keep else RETURN_FREED)
        return read_metrics(folder)[-1]["peak_memory_bytes"][0]


def _train(_: int, words: list[str], keep: bool) -> None:
    if not keep:
        run_module.keep_freed_memory = lambda device: None  # pyright: ignore[reportAttributeAccessIssue]
    assert cli.main(words) == 0


def generation_bytes(job: Job, *, keep: bool) -> int:
    """Growth of resident bytes of a process that makes a model and generates a group of answers."""
    return run_ranks(_generate_alone, 1, job, environment={} if keep else RETURN_FREED)[0]


def _generate_alone(_: int, job: Job) -> int:
    """The growth of resident bytes; a first, tiny generation loads what is needed."""
    device = Device()
    _generate(smallest(job).model, GroupShape(group=2, prompt=8, new=4))
    before = held_bytes(device)
    reset_peak_memory(device)
    _generate(job.model, job.samples)
    return peak_memory_bytes(device) - before


def _generate(model: ModelConfig, samples: GroupShape) -> None:
    """As `yuan_train.rl.generator` does it on one card: the prompt is read once, by chunks, and copied to the
    slots of all answers; then a token is added to each, round by round."""
    transformer, group = Transformer(model), samples.group
    with torch.no_grad():
        for parameter in transformer.parameters():
            parameter.normal_(std=0.02)
    read = new_slots(transformer, slots=1, max_length=samples.prompt)
    hidden_BSH = torch.empty(0)
    for first in range(0, samples.prompt, PREFILL_CHUNK):
        places = torch.arange(first, min(first + PREFILL_CHUNK, samples.prompt)).unsqueeze(0)
        last = int(places[0, -1])
        hidden_BSH = step_slots(transformer, places % model.vocab_size, read, places, last=last)
    slots = new_slots(transformer, slots=group, max_length=samples.length)
    sources = torch.zeros(group, dtype=torch.int64)
    fork(read, sources, slots, torch.arange(group), length=samples.prompt)
    rows = [0] * group
    for token in range(samples.new):
        keys = [draw_keys(0, 0, sample, token) for sample in range(group)]
        drawn = draw(transformer, hidden_BSH[:, -1], rows, keys, temperature=1.0, greedy=False)
        rows = list(range(group))
        if token + 1 < samples.new:
            place = samples.prompt + token
            tokens = drawn[:, 0].to(torch.int64).unsqueeze(1)
            hidden_BSH = step_slots(transformer, tokens, slots, torch.full((group, 1), place), last=place)
