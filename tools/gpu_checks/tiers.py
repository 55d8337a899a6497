"""What leaves the card and comes back: the same bits, however late the copies are."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.fake_card import FakeCard
from tests.support.project import with_stages
from tools.gpu_checks import runs
from tools.gpu_checks.bench import Bench, Verdict
from yuan_train.config.plan import Plan
from yuan_train.parallel.device import CudaDevice, Device, Mark, Stream

LATE_SECONDS = 0.02
CYCLES_PER_SECOND = 1.5e9
"""About a card's clock."""
EVERYWHERE = 1e-5
"""Relative, of losses and norms where the CPU steps what the card would: their AdamW rounds differently."""
OVERRIDES = ("optimizer.bucket_size=1", "optimizer.schedule=constant", "optimizer.warmup_steps=1")
"""A page is a bucket: with larger ones the norm is another sum."""

FEW = ("train.steps=2", "data.sequence_length=48")
"""Of the small model, whose shorter activations are too small to leave."""


def tiers_of(num_layers: int) -> dict[str, dict[str, Any]]:
    """By name, the keys of a stage of so many layers that has something elsewhere."""
    return {
        "optimizer on the host": {"optimizer_offload": 0.6},
        "optimizer on disk": {"optimizer_offload": 1.0, "optimizer_disk": 0.5},
        "activations on the host": {"activation_offload": num_layers - 2, "resident_parts": 4},
        "parameters on the host": {"parameter_offload": num_layers - 2, "page_slots": 2, "recompute": "full"},
    }


def tiers(bench: Bench) -> Verdict:
    """Each tier against the run without: losses and norms to the bit, in fp32 and bf16; seconds in 2B."""
    small = runs.project(bench)
    differ: list[str] = []
    for precision in bench.pick(("fp32", "bf16"), ("fp32",)):
        differ += _differing(bench, small, 6, f"train.precision={precision}", *FEW)
    if bench.on_card:
        large = runs.large_project(bench, num_layers=6)
        differ += _differing(bench, large, 6, "train.steps=4", "train.global_batch_size=4")
    return not differ, f"differ: {', '.join(differ)}" if differ else "the losses and norms of the run without"


def late_copies(bench: Bench) -> Verdict:
    """As `tiers`, with copies that begin late: who reads before the copy's end reads something else.

    On a CPU the card is `tests/support/fake_card.py`, whose copies come when they are waited for.
    """
    devices: list[Device] = []

    def next_card() -> Device:
        devices.append(LateCard(0) if bench.on_card else FakeCard())
        return devices[-1]

    differ = _differing(bench, runs.project(bench), 6, "train.precision=bf16", *FEW, device=next_card)
    faults = Counter(fault for card in devices if isinstance(card, FakeCard) for fault in card.faults)
    bench.note(faults_of_the_fake_card=faults)
    wrong = [f"{what} differ" for what in differ] + [f"{fault}: {times}" for fault, times in faults.items()]
    return not wrong, "; ".join(wrong) or "the losses and norms of the run without"


def late_uncached(bench: Bench) -> Verdict:
    """As `late_copies`, with memory that goes back to the driver at once: what is freed too early is gone."""
    # Read when the allocator is first used, which it has not been in this process.
    os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    return late_copies(bench)


def _differing(
    bench: Bench, run_file: Path, num_layers: int, *words: str, device: Callable[[], Device] | None = None
) -> list[str]:
    """The tiers whose run differs from the one without."""
    words = (*words, *OVERRIDES, f"memory.disk_directory={runs.new_folder(bench)}")
    plain: dict[str, tuple[runs.Curve, float]] = {}
    """By recompute, the curve without a tier, and how far it is from itself: a card may add in any order."""
    differ: list[str] = []

    def curve(plan: Plan, device: Device | None = None) -> runs.Curve:
        return runs.curve(bench, run_file, bench.device.type, *words, plan=plan, device=device)

    for name, keys in tiers_of(num_layers).items():
        recompute = keys.get("recompute", "none")
        plan = runs.one_stage(run_file, *words, recompute=recompute)
        if recompute not in plain:
            first = curve(plan)
            plain[recompute] = first, max(runs.apart(curve(plan), first)) if bench.on_card else 0.0
        wanted, noise = plain[recompute]
        start = time.monotonic()
        (stage,) = plan.stages
        away = with_stages(plan, replace(stage, **keys))
        off = runs.apart(curve(away, device() if device else None), wanted)
        bench.note(**{f"{name}, {' '.join(words[:2])}": [*off, noise, round(time.monotonic() - start, 2)]})
        rounds_alike = not bench.on_card or "optimizer" not in name
        if max(off) > max(4 * noise, 0.0 if rounds_alike else EVERYWHERE):
            differ.append(f"{name}, {words[0]}: losses {off[0]:.1e}, norms {off[1]:.1e}")
    return differ


class _LateStream(Stream):
    """A stream whose work begins late."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def run(self, work: Callable[[], None]) -> Mark:
        def late() -> None:
            torch.cuda._sleep(int(LATE_SECONDS * CYCLES_PER_SECOND))  # pyright: ignore[reportPrivateUsage]
            work()

        return self._stream.run(late)


class LateCard(CudaDevice):
    """The card, with copies that begin late."""

    def make_stream(self) -> Stream:
        return _LateStream(super().make_stream())
