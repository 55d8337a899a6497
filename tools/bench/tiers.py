"""Stalls of what leaves the card: forecast against measured, with parts that sleep and slow links.

A row of the stalls is one optimizer step of one worker. The copies are real, between anonymous memory (the
"card") and the host's slab, over links that take as long as their rate says; the compute of a part is a
sleep, so that a machine with other work on it measures the same. On a card it would not: its copies keep its
compute waiting, and not the host, which sleeps here. `yuan_train/planner/evaluate/simulator.py` forecasts the
step.

Three policies for memory on four simulated cards: the largest model, and the seconds of a step.

- **rule**, ZeRO-Offload's: all optimizer state on the host, all else on the card, with the cheapest
  recompute that fits; gradients go down, the host steps and weights come up one after the other.
- **save_on_cpu**: optimizer state as by the rule, and what every layer keeps for its backward is copied to
  the host and back while the card waits, instead of recompute.
- **planned**: what `yuan-train plan` finds; the largest model with parameters in pages too.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from tests.support.project import with_stages
from tools.bench.harness import Row, case
from tools.bench.problems import hand_plan, make_problem, node
from tools.bench.runs import bench_model
from yuan_train.config.cluster import Cluster, Host
from yuan_train.config.devices import GIB
from yuan_train.config.model import ModelConfig, load_model
from yuan_train.config.plan import Plan
from yuan_train.config.run import Recompute, SearchConfig
from yuan_train.parallel.copies import ActivationTiers, ParameterPages
from yuan_train.parallel.device import CPU, HostLinks, HostSlab, begin_copy, make_link, make_links
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.optimizer_state import HostChunk
from yuan_train.parallel.shard import Shard
from yuan_train.planner.costs.unit_costs import Costs, make_costs
from yuan_train.planner.costs.workload import STATE_BYTES, PlanProblem
from yuan_train.planner.evaluate.plan_cost import PlanCost, cost_plan
from yuan_train.planner.evaluate.simulator import (
    PageTimes,
    PartTimes,
    Simulation,
    StageTimes,
    simulate_schedule,
)
from yuan_train.planner.search.search import search_plan
from yuan_train.planner.search.what_if import find_largest
from yuan_train.schedule.copies import (
    Offload,
    Offloads,
    PagedGroups,
    Paging,
    by_group,
    group_copies,
    with_copies,
    with_pages,
)
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
    own, twice, copied = ((took,) * PARTS for took in (seconds, 2 * seconds, copy_seconds))
    parts = PartTimes(forward_seconds=own, backward_seconds=twice, copy_seconds=copied)
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
    workers = one_worker_each(1)
    program = make_schedule("1f1b", num_micro_batches=MICRO_BATCHES, workers=workers, group=group)[0]
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
    shards, size = {"weight": Shard((PART_BYTES // 4,))}, PART_BYTES // 4
    weights = [{"weight": torch.nn.Parameter(torch.zeros(size))} for _ in range(PARTS)]
    buckets = [
        FlatBucket(Bucket((f"layers.{i}",), ((0,),)), weight, shards, rank=0, slab=slab)
        for i, weight in enumerate(weights)
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


# --- three policies ------------------------------------------------------------------------------------

CARDS = {"RTX-3080": (64, 2048), "RTX-3090": (128, 4096), "V100-16G": (96, 4096), "A100-40G": (256, 8192)}
"""By type, GiB of its host's memory, and the hidden size of the largest models."""
LENGTH, LARGEST_BATCH = 4096, 16
TIERS = ("optimizer", "activations", "parameters")
REPEATS = 2
CHUNKS = 64
"""Of the host's state, where a step is measured."""


def _shape(hidden: int, layers: int) -> ModelConfig:
    heads = hidden // (64 if hidden < 4096 else 128)
    keys = {"num_attention_heads": heads, "vocab_size": 135040, "max_sequence_length": LENGTH}
    return bench_model(layers, hidden, name=f"h{hidden}", **keys)


SMALLER = {"RTX-3080": _shape(2048, 7), "V100-16G": _shape(4096, 3)}


def problem_of(name: str, model: ModelConfig, batch: int) -> PlanProblem:
    """One card and its host."""
    host = Host(memory=CARDS[name][0] * GIB)
    cluster = Cluster(name="one", nodes=(node("node", name, near=(20e9, 0.0), far=(3e9, 0.0), host=host),))
    return make_problem(cluster, model, batch, sequence_length=LENGTH, host_reserved=8 * GIB)


# --- sizes -----------------------------------------------------------------------------------------------


@case("tiers/largest", formats=dict.fromkeys(("rule B", "two-byte B", "planned B"), ".2f"), card=tuple(CARDS))
def largest(card: str) -> Row:
    """The largest models of a hidden size: by the rule, with gradients of two bytes too, and planned."""
    host, hidden = CARDS[card]
    given = problem_of(card, _shape(hidden, 1), LARGEST_BATCH)
    of_rule = _largest_by_rule(given)
    of_small = _largest_by_rule(given, gradient_bytes=2)
    search = SearchConfig(offload=TIERS, micro_batch_size=(1,), schedule=("1f1b",), recompute=("full",))
    planned = find_largest(given, search, micro_batch_size=1).problem.model.parameters
    row: Row = {"card": card, "host GiB": host, "hidden": hidden, "rule B": of_rule / 1e9}
    row |= {"two-byte B": of_small / 1e9, "planned B": planned / 1e9}
    return row | {"over": f"{planned / max(of_rule, 1):.2f}, {planned / max(of_small, 1):.2f}"}


def _largest_by_rule(given: PlanProblem, *, gradient_bytes: int | None = None) -> int:
    """Parameters of the largest model that fits with all optimizer state on the host and full recompute; with
    `gradient_bytes`, as if a gradient took so many on the card."""
    found = 0
    for layers in itertools.count(1):
        own = replace(given, model=replace(given.model, num_layers=layers))
        _, cost = _by_rule(make_costs(own), "full")
        (stage,) = cost.stages
        memory, parameters = stage.memory, own.model.parameters
        saved = 0.0
        if gradient_bytes is not None:
            saved = memory.gradients - gradient_bytes * parameters
        if memory.total - saved > stage.capacity_bytes or stage.host_bytes > stage.host_capacity_bytes:
            return found
        found = parameters
    return found


def _by_rule(costs: Costs, recompute: Recompute) -> tuple[Plan, PlanCost]:
    plan = hand_plan(costs, [[(0, costs.problem.model.num_layers)]], recompute=recompute)
    (stage,) = plan.stages
    plan = with_stages(plan, replace(stage, optimizer_offload=1.0))
    return plan, cost_plan(costs, plan)


# --- steps -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a step of one card does, in seconds."""

    name: str
    forward: float
    """Of a micro-batch; so the next two."""
    backward: float
    copy: float
    """Of activations, one way, waited for; 0 if they stay or leave beside the compute."""
    num_micro_batches: int
    card_step: float
    """Of the optimizer, on the card."""
    down: float
    """Of gradients; then of the host's step, and of weights."""
    host_step: float
    up: float
    beside: bool
    """Whether these go side by side, chunk by chunk."""
    words: str = ""

    @property
    def seconds(self) -> float:
        """Of the step."""
        parts = self.down, self.host_step, self.up
        update = max(parts) if self.beside else sum(parts)
        compute = self.num_micro_batches * (self.forward + self.backward + 2 * self.copy)
        return compute + max(self.card_step, update)


@case(
    "tiers/policies",
    formats={"forecast s": ".2f", "measured s": ".2f", "over rule": ".3f"},
    card=tuple(CARDS),
    sequences=(4, 8, 16, 64),
    seconds=(0.0,),
)
def policies(card: str, sequences: int, seconds: float) -> Iterator[Row]:
    """A step of each policy with Yuan2-2B, or with a model that the rule can train on a small card.

    By catalogue rates; with `seconds` also run in about so long: compute and host steps sleep, copies go
    through the engine's own links and chunks of host state, at rates to scale.
    """
    model = SMALLER[card] if card in SMALLER else load_model("configs/model/yuan2-2b.yaml")
    given = problem_of(card, model, sequences)
    costs = make_costs(given)
    works = [work for work in (_rule(costs), _save_on_cpu(costs), _planned(given, costs)) if work is not None]
    rule = next((work.seconds for work in works if work.name == "rule"), None)
    slowest = max(work.seconds for work in works)
    for work in works:
        row: Row = {"card": card, "sequences": sequences, "policy": f"{work.name} {work.words}"}
        row["forecast s"] = work.seconds
        if seconds:
            # The least: a loaded machine oversleeps.
            took = min(measure_step(work, seconds / slowest) for _ in range(REPEATS)) * slowest / seconds
            row["measured s"] = took
        yield row | ({} if rule is None else {"over rule": rule / work.seconds})


def _rule(costs: Costs) -> Work | None:
    kinds: tuple[Recompute, ...] = ("none", "selective", "full")
    found = [(cost, kind) for kind in kinds if (cost := _by_rule(costs, kind)[1]).fits]
    if not found:
        return None
    cost, kind = min(found, key=lambda one: one[0].step_seconds)
    return _work(costs, cost, "rule", 1.0, beside=False, words=f"(recompute {kind})")


def _save_on_cpu(costs: Costs) -> Work | None:
    _, cost = _by_rule(costs, "none")
    (stage,) = cost.stages
    kept = sum(unit.activation_bytes for unit in stage.units)
    largest_unit = max(unit.activation_bytes for unit in stage.units)
    if stage.memory.total - kept + largest_unit > stage.capacity_bytes:
        return None
    link = costs.host_of(stage.card).link_bytes_per_second
    return _work(costs, cost, "save_on_cpu", 1.0, beside=False, copy=kept / link)


def _planned(given: PlanProblem, costs: Costs) -> Work | None:
    search = SearchConfig(micro_batch_size=(1,), schedule=("1f1b",))
    best = search_plan(given, search, micro_batch_size=1).best
    (stage,) = best.plan.pipelines[0].stages
    words = f"(x {stage.optimizer_offload:g}, recompute {stage.recompute}"
    words += f", {stage.num_recomputed} layers)" if stage.num_recomputed else ")"
    work = _work(costs, best.cost, "planned", stage.optimizer_offload, beside=True, words=words)
    if not stage.activation_offload:
        return work
    # `tiers/activations` measures these copies; here the compute sleeps as long as is forecast with them.
    words = f"{words[:-1]}, activations of {stage.activation_offload} layers)"
    forward = best.cost.compute_seconds / work.num_micro_batches - work.backward
    return replace(work, forward=forward, words=words)


def _work(
    costs: Costs, cost: PlanCost, name: str, x: float, *, beside: bool, copy: float = 0.0, words: str = ""
) -> Work:
    (stage,) = cost.stages
    host, state = costs.host_of(stage.card), STATE_BYTES[costs.problem.precision]
    parameters = costs.problem.model.parameters
    device = costs.of(stage.card.type, 1, "none").update_bytes_per_second
    return Work(
        name=name,
        forward=stage.forward_seconds,
        backward=stage.backward_seconds,
        copy=copy,
        num_micro_batches=costs.problem.global_batch_size,
        card_step=(1 - x) * parameters * state.update_traffic / device,
        down=x * parameters * state.gradients / host.link_bytes_per_second,
        host_step=x * parameters * state.update_traffic / host.memory_bytes_per_second,
        up=x * parameters * state.parameters / host.link_bytes_per_second,
        beside=beside,
        words=words,
    )


def measure_step(work: Work, scale: float) -> float:
    """Seconds of the step with everything `scale` times as fast, through the engine's links and chunks."""
    elements = 1024
    num_bytes = 4 * elements * CHUNKS
    down = make_link(CPU, bytes_per_second=_rate(num_bytes, work.down * scale))
    up = make_link(CPU, bytes_per_second=_rate(num_bytes // 2, work.up * scale))
    kept = torch.zeros(num_bytes, dtype=torch.uint8)
    saving = make_link(CPU, bytes_per_second=_rate(num_bytes, work.copy * scale))
    clock = SleepClock()

    def save() -> None:
        if work.copy:
            target = torch.empty_like(kept)
            with clock.pause():
                begin_copy(saving, kept, target).finish()

    links = HostLinks(down=down, up=up)
    chunks = [_chunk(i, elements, links) for i in range(CHUNKS)] if work.host_step else []
    reduced, weights = torch.zeros(CHUNKS * elements), torch.zeros(CHUNKS * elements, dtype=torch.bfloat16)
    began = clock.start()
    for _ in range(work.num_micro_batches):
        clock.compute(work.forward * scale)
        save()
        save()
        clock.compute(work.backward * scale)
    _update(work, scale, clock, chunks, reduced, weights)
    return time.perf_counter() - began


def _update(
    work: Work,
    scale: float,
    clock: SleepClock,
    chunks: list[HostChunk],
    reduced: torch.Tensor,
    weights: torch.Tensor,
) -> None:
    """Beside each other as `train/step.py` does it: the card's part has been enqueued, and the host goes
    on chunk by chunk. Else gradients, steps and weights in turn."""
    card_ends = time.perf_counter() + work.card_step * scale
    for chunk in chunks:
        chunk.start_gradient(reduced)
    for group in [[chunk] for chunk in chunks] if work.beside else [chunks]:
        with clock.pause():
            for chunk in group:
                chunk.finish_gradient()
        clock.compute(work.host_step * scale * len(group) / CHUNKS)
        for chunk in group:
            chunk.start_weights(weights)
    with clock.pause():
        for chunk in chunks:
            chunk.finish_weights()
        time.sleep(max(0.0, card_ends - time.perf_counter()))


def _rate(num_bytes: int, seconds: float) -> float:
    return num_bytes / max(seconds, 1e-9)


def _chunk(number: int, elements: int, links: HostLinks) -> HostChunk:
    master, gradient, first, second = (torch.zeros(elements) for _ in range(4))
    return HostChunk(0, number * elements, master, gradient, first, second, True, links)
