"""Stalls of activations that leave the card: forecast against measured, with parts that sleep and slow links.

    python tools/bench_tiers.py [--seconds 0.02]

Each line is one optimizer step of one worker. The copies are real, between anonymous memory (the "card") and
the host's slab, over links that take as long as their rate says; the compute of a part is a sleep, so that a
machine with other work on it measures the same. `yuan_train/planner/evaluate/copies.py` forecasts the step.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from yuan_train.parallel.tiers.activations import ActivationTiers
from yuan_train.parallel.tiers.host_state import HostLinks
from yuan_train.parallel.tiers.link import make_link
from yuan_train.planner.evaluate.copies import PartTimes
from yuan_train.planner.evaluate.simulator import Simulation, StageTimes, simulate_schedule
from yuan_train.schedule.copies import Offload, Offloads, group_copies, with_copies
from yuan_train.schedule.schedules import make_schedule
from yuan_train.schedule.step import RankProgram

PARTS, MICRO_BATCHES, IN_FLIGHT = 8, 12, 4
PART_BYTES = 1 << 20
CPU = torch.device("cpu")


def main() -> None:
    """Print a line for each ratio of copy to compute, and number of parts that may stay."""
    parser = argparse.ArgumentParser(description="Stalls of activations that leave the card.")
    parser.add_argument("--seconds", type=float, default=0.02, help="of a part's forward (0.02)")
    seconds = parser.parse_args().seconds
    torch.set_num_threads(1)
    program = make_schedule("1f1b", num_micro_batches=MICRO_BATCHES, num_stages=1, in_flight=(IN_FLIGHT,))[0]
    print(f"1F1B, {IN_FLIGHT} of {MICRO_BATCHES} micro-batches in flight, {PARTS} parts, {seconds} s each")
    print("copy / compute | may stay | step forecast, measured | stalls forecast, measured | most kept")
    for ratio in (0.3, 0.6, 0.9, 1.2, 2.0):
        for resident in (10, 20):
            offloads = {0: Offload(num_parts=PARTS, num_leaving=PARTS, resident=resident, ahead=4)}
            copies = with_copies(program, offloads)
            # Of a part: a copy one way against a forward and a backward.
            rate = PART_BYTES / (ratio * 3 * seconds)
            found = forecast(copies, seconds, PART_BYTES / rate)
            took, stalled, kept = measure(program, copies, offloads, seconds, rate)
            print(
                f"{ratio:14.1f} | {resident:8} | {found.step_seconds:.3f} s, {took:.3f} s "
                f"({found.step_seconds / took - 1:+.1%}) | {found.stall_seconds[0]:.3f} s, {stalled:.3f} s | "
                f"{kept / PART_BYTES:.0f} of {IN_FLIGHT * PARTS} parts"
            )


def forecast(copies: RankProgram, seconds: float, copy_seconds: float) -> Simulation:
    """The step in virtual time."""
    times = StageTimes(
        forward_seconds=(PARTS * seconds,),
        backward_seconds=(2 * PARTS * seconds,),
        send_activation_seconds=(),
        send_gradient_seconds=(),
        parts=(
            PartTimes(
                forward_seconds=(seconds,) * PARTS,
                backward_seconds=(2 * seconds,) * PARTS,
                copy_seconds=(copy_seconds,) * PARTS,
            ),
        ),
    )
    return simulate_schedule(
        "1f1b",
        times,
        num_micro_batches=MICRO_BATCHES,
        in_flight=(IN_FLIGHT,),
        copies={0: group_copies(copies)},
    )


def measure(
    program: RankProgram, copies: RankProgram, offloads: Offloads, seconds: float, rate: float
) -> tuple[float, float, int]:
    """(seconds of a step, of that waits for copies, most bytes on the card) of the engine's own copies."""
    stalled, due = 0.0, 0.0

    def compute(seconds: float) -> None:
        # To a time, not for a time: what a loaded machine oversleeps must not add up.
        nonlocal due
        due += seconds
        time.sleep(max(0.0, due - time.perf_counter()))

    @contextmanager
    def pause() -> Iterator[None]:
        nonlocal stalled, due
        yield
        # A copy that ended while the part before was still due is no stall.
        late = max(0.0, time.perf_counter() - due)
        stalled, due = stalled + late, due + late

    links = HostLinks(down=make_link(CPU, bytes_per_second=rate), up=make_link(CPU, bytes_per_second=rate))
    tiers = ActivationTiers(copies, offloads, [], links, device=CPU, pause=pause)
    hidden = torch.zeros(1, requires_grad=True)
    began = due = time.perf_counter()
    for step in program:
        if step.kind == "forward":
            with tiers.forward(0, step.micro_batch) as parts:
                assert parts is not None
                for _ in range(PARTS):
                    parts.enter(hidden)
                    parts.pack(torch.ones(PART_BYTES, dtype=torch.uint8))
                    compute(seconds)
        else:
            with tiers.backward(0, step.micro_batch, split=False):
                for part in reversed(range(PARTS)):
                    compute(2 * seconds)
                    if part:
                        tiers.part_has_ended(0, step.micro_batch, part)
    return time.perf_counter() - began, stalled, tiers.most_bytes_here


if __name__ == "__main__":
    main()
