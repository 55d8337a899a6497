"""Stalls of what leaves the card: forecast against measured, with parts that sleep and slow links.

Each row is one optimizer step of one worker. The copies are real, between anonymous memory (the "card") and
the host's slab, over links that take as long as their rate says; the compute of a part is a sleep, so that a
machine with other work on it measures the same. On a card it would not: its copies keep its compute waiting,
and not the host, which sleeps here. `yuan_train/planner/evaluate/simulator.py` forecasts the step.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from tools.bench.harness import Row, case
from yuan_train.parallel.device import CPU, make_links
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.tiers.activations import ActivationTiers
from yuan_train.parallel.tiers.parameters import ParameterPages
from yuan_train.parallel.tiers.slab import HostSlab
from yuan_train.planner.evaluate.simulator import (
    PageTimes,
    PartTimes,
    Simulation,
    StageTimes,
    simulate_schedule,
)
from yuan_train.schedule.copies import Offload, Offloads, group_copies, with_copies
from yuan_train.schedule.pages import PagedGroups, Paging, by_group, with_pages
from yuan_train.schedule.schedules import ProgramShape, make_schedule
from yuan_train.schedule.step import PAGING, RankProgram, one_worker_each

PARTS, MICRO_BATCHES, IN_FLIGHT = 8, 12, 4
PART_BYTES = 1 << 20
NO_WAIT = 2e-4
"""Seconds: what it takes to see that there is nothing to wait for."""


FORMATS = {
    **{"forecast s": ".3f", "measured s": ".3f", "off by": "+.1%"},
    **{"stalls forecast s": ".3f", "stalls measured s": ".3f"},
}


def _row(found: Simulation, took: float, stalled: float, most: str) -> Row:
    return {
        "forecast s": found.step_seconds,
        "measured s": took,
        "off by": found.step_seconds / took - 1,
        "stalls forecast s": found.stall_seconds[0],
        "stalls measured s": stalled,
        "most kept": most,
    }


@case(
    "tiers/activations", formats=FORMATS, ratio=(0.3, 0.6, 0.9, 1.2, 2.0), resident=(10, 20), seconds=(0.02,)
)
def activations(ratio: float, resident: int, seconds: float) -> Row:
    """Halves of layers whose activations leave: 1F1B, 4 of 12 micro-batches in flight, 8 parts.

    By the ratio of copies to compute, and the parts that may stay.
    """
    torch.set_num_threads(1)
    program = make_schedule(
        "1f1b", num_micro_batches=MICRO_BATCHES, workers=one_worker_each(1), in_flight=(IN_FLIGHT,)
    )[0]
    offloads = {0: Offload(num_parts=PARTS, num_leaving=PARTS, resident=resident, ahead=4)}
    copies = with_copies(program, offloads)
    # Of a part: a copy one way against a forward and a backward.
    rate = PART_BYTES / (ratio * 3 * seconds)
    found = forecast(copies, seconds, PART_BYTES / rate)
    took, stalled, kept = measure(program, copies, offloads, seconds, rate)
    most = f"{kept / PART_BYTES:.0f} of {IN_FLIGHT * PARTS} parts"
    return {"copy / compute": ratio, "may stay": resident} | _row(found, took, stalled, most)


def forecast(copies: RankProgram, seconds: float, copy_seconds: float) -> Simulation:
    """The step in virtual time."""
    parts = PartTimes(
        forward_seconds=(seconds,) * PARTS,
        backward_seconds=(2 * seconds,) * PARTS,
        copy_seconds=(copy_seconds,) * PARTS,
    )
    times = replace(_times(seconds), parts=(parts,))
    shape = ProgramShape("1f1b", one_worker_each(1), MICRO_BATCHES, (IN_FLIGHT,))
    return simulate_schedule(shape, times, copies={0: group_copies(copies)})


def _times(seconds: float) -> StageTimes:
    """Of a worker alone, whose parts take so long, and twice as long backward."""
    return StageTimes(
        forward_seconds=(PARTS * seconds,),
        backward_seconds=(2 * PARTS * seconds,),
        send_activation_seconds=(),
        send_gradient_seconds=(),
    )


def measure(
    program: RankProgram, copies: RankProgram, offloads: Offloads, seconds: float, rate: float
) -> tuple[float, float, int]:
    """(seconds of a step, of that waits for copies, most bytes on the card) of the engine's own copies."""
    clock = SleepClock()
    links = make_links(CPU, bytes_per_second=rate, pause=clock.pause)
    tiers = ActivationTiers(copies, offloads, [], links, device=CPU)
    hidden = torch.zeros(1, requires_grad=True)
    began = clock.start()
    for step in program:
        if step.kind == "forward":
            with tiers.forward(0, step.micro_batch) as parts:
                assert parts is not None
                for _ in range(PARTS):
                    parts.enter(hidden)
                    parts.pack(torch.ones(PART_BYTES, dtype=torch.uint8))
                    clock.compute(seconds)
        else:
            with tiers.backward(0, step.micro_batch, split=False):
                for part in reversed(range(PARTS)):
                    clock.compute(2 * seconds)
                    if part:
                        tiers.part_has_ended(0, step.micro_batch, part)
    return time.perf_counter() - began, clock.stalled, tiers.most_bytes_here


@case(
    "tiers/pages",
    formats=FORMATS,
    group=(1, 4, 12),
    kind=("0.1, 3 slots", "0.1, 2 slots", "0.4, 3 slots", "0.4, 2 slots"),
    seconds=(0.01,),
)
def pages(group: int, kind: str, seconds: float) -> Row:
    """Layers whose parameters are in pages; of each micro-batch a page takes `seconds` and twice that.

    By micro-batches in a group, ratio of copies to compute, and slots of the card.
    """
    torch.set_num_threads(1)
    ratio, slots = float(kind.split(",")[0]), int(kind.split()[1])
    paging = Paging(num_pages=PARTS, slots=slots, group=group)
    program = make_schedule("1f1b", num_micro_batches=MICRO_BATCHES, workers=one_worker_each(1), group=group)[
        0
    ]
    groups = by_group(with_pages(program, paging))
    # Of a page: its weights, one way, against the forwards of all micro-batches.
    rate = PART_BYTES / (ratio * MICRO_BATCHES * seconds)
    found = forecast_pages(groups, seconds, PART_BYTES / rate, group)
    took, stalled, most = measure_pages(groups, paging, seconds, rate)
    return {"group": group, "copy / compute, slots": kind} | _row(found, took, stalled, f"{most} of {PARTS}")


def forecast_pages(groups: PagedGroups, seconds: float, copy_seconds: float, group: int) -> Simulation:
    """The step in virtual time."""
    own = PageTimes(
        forward_seconds=(seconds,) * PARTS + (0.0,),
        backward_seconds=(2 * seconds,) * PARTS + (0.0,),
        weight_seconds=(copy_seconds,) * PARTS,
        gradient_seconds=(copy_seconds,) * PARTS,
    )
    times = replace(_times(seconds), pages=(own,))
    shape = ProgramShape("1f1b", one_worker_each(1), MICRO_BATCHES, group=group)
    return simulate_schedule(shape, times, pages={0: groups})


def measure_pages(
    groups: PagedGroups, paging: Paging, seconds: float, rate: float
) -> tuple[float, float, int]:
    """(seconds of a step, of that waits for copies, most pages on the card) of the engine's own copies."""
    clock = SleepClock()
    links = make_links(CPU, bytes_per_second=rate, pause=clock.pause)
    slab = HostSlab(2 * PARTS * PART_BYTES, device=CPU, what="bench")
    buckets = [
        FlatBucket(
            Bucket((f"layers.{i}",), ((0,),)),
            {"weight": torch.nn.Parameter(torch.zeros(PART_BYTES // 4))},
            {"weight": Shard((PART_BYTES // 4,))},
            rank=0,
            slab=slab,
        )
        for i in range(PARTS)
    ]
    own = ParameterPages(buckets, paging.slots, links, device=CPU)
    began = clock.start()
    for group in groups.values():
        for step in group.steps:
            if step.kind in PAGING:
                own.take(step)
            elif step.part < PARTS:
                own.need(step)
                clock.compute(seconds if step.kind == "forward" else 2 * seconds)
    took = time.perf_counter() - began
    own.finish()
    return took, clock.stalled, own.most_pages_here


class SleepClock:
    """Compute that sleeps, and how long copies keep it waiting."""

    def __init__(self) -> None:
        self.stalled = self._due = 0.0

    def start(self) -> float:
        """Begin now."""
        self._due = time.perf_counter()
        return self._due

    def compute(self, seconds: float) -> None:
        # To a time, not for a time: what a loaded machine oversleeps must not add up.
        self._due += seconds
        time.sleep(max(0.0, self._due - time.perf_counter()))

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Around a wait for a copy."""
        began = time.perf_counter()
        yield
        ended = time.perf_counter()
        # A copy that had ended, or did so while the part before was still due, is no stall; a part that slept
        # too long is none either, and the next one makes up for it.
        if ended - began > NO_WAIT and ended > self._due:
            self.stalled, self._due = self.stalled + ended - self._due, ended
