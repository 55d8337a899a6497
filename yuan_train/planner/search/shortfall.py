"""Why there is no plan: which stage lacks how much memory and what would help, or which keys exclude all."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from yuan_train.config.cluster import Card
from yuan_train.config.run import Recompute
from yuan_train.config.units import show_bytes
from yuan_train.planner.costs.plan_problem import Costs, PlanProblem, Replica
from yuan_train.planner.search.instances import make_instance
from yuan_train.planner.search.paged import pages_fit
from yuan_train.planner.search.shapes import Options, Shape
from yuan_train.planner.solver.cost_tables import CostTables
from yuan_train.planner.solver.instance import Shortfall
from yuan_train.planner.solver.solve import nearest_miss

MAX_MISSES = 24
"""Shapes among which the nearest miss is searched."""


def describe_shortfall(costs: Costs, shapes: Sequence[Shape], cards: Sequence[Card], options: Options) -> str:
    """The nearest miss over the shapes with most memory: which stage needs how much, and what would help."""
    on_host = replace(options, host_seconds=math.inf)
    if options.offload:
        options = on_host
    shape, miss = _nearest(costs, shapes, options)
    slot = miss.order[miss.stage]
    replica = shape.slots[slot][0][0]
    card = replica[0]
    name = card.name + (f" and {len(replica) - 1} more" if len(replica) > 1 else "")
    device = costs.problem.cluster.device_type(card.type)
    first, end = miss.bounds[miss.stage], miss.bounds[miss.stage + 1]
    text = (
        f"no plan fits. Nearest: {len(miss.order)} stage{'s' * (len(miss.order) > 1)}; stage {miss.stage} "
        f"({name}, {card.type}, {_unit_words(costs, first, end)}) needs "
        f"{show_bytes(miss.needed_bytes + device.reserved)} of {_memory_words(costs, card)}"
    )
    if options.offload:
        text += " with its optimizer state on the host"
        text += _host_words(costs, replica)
    advice = ". Give more cards or memory, a smaller micro_batch_size, a shorter sequence_length"
    if not options.offload:
        _, on_hosts = _nearest(costs, shapes, on_host)
        if on_hosts.needed_bytes <= on_hosts.capacity_bytes:
            free = "search.engine: [yuan] and " if options.expressible else ""
            advice += f", or allow {free}search.offload: [optimizer], with which a plan fits"
        elif not options.expressible:
            advice += _page_words(costs, cards, options)
    else:
        advice += _page_words(costs, cards, options)
    if options.recompute[miss.choice] == "full":
        return f"{text} with recompute: full{advice}"
    kinds: tuple[Recompute, ...] = ("selective", "full")
    needs = {kind: _with_recompute(costs, shape, options, miss, kind) for kind in kinds}
    helping = {kind: needed for kind, needed in needs.items() if needed < miss.needed_bytes + device.reserved}
    if helping:
        words = (f"recompute: {kind} it needs {show_bytes(needed)}" for kind, needed in helping.items())
        text += "; with " + ", with ".join(words)
        if not set(helping) <= set(options.recompute):
            advice += f", or allow search.recompute: [{', '.join(['none', *helping])}]"
    return text + advice


def _nearest(costs: Costs, shapes: Sequence[Shape], options: Options) -> tuple[Shape, Shortfall]:
    """The nearest miss, and its shape."""
    misses: list[tuple[float, int, Shortfall]] = []
    roomiest = _roomiest(costs, shapes)
    for i, shape in enumerate(roomiest):
        _, miss = nearest_miss(make_instance(costs, shape, options))
        misses.append((miss.needed_bytes / max(miss.capacity_bytes, 1.0), i, miss))
    _, i, miss = min(misses, key=lambda item: item[:2])
    return roomiest[i], miss


def _host_words(costs: Costs, replica: Replica) -> str:
    """Whether it is the host's memory that ends there, as text."""
    share = min(costs.host_of(card).memory_bytes for card in replica)
    text = f", of whose memory a card has {show_bytes(share)}"
    node, cluster = replica[0].node, costs.problem.cluster
    if cluster.groups[node].host is None:
        text += f" (assumed: as much as the cards have together; state {cluster.host_key(node)})"
    return text


def _memory_words(costs: Costs, card: Card) -> str:
    """A card's memory, and what of it a plan may fill, as text."""
    problem = costs.problem
    whole = show_bytes(problem.cluster.device_type(card.type).memory)
    if problem.memory_fraction == 1.0:
        return whole
    usable = show_bytes(problem.usable_bytes(card.type))
    return f"{usable} ({problem.memory_fraction:.0%} of {whole}, search.memory_fraction)"


def _page_words(costs: Costs, cards: Sequence[Card], options: Options) -> str:
    """That a plan fits with parameters in pages, as text; nothing if none does, or was sought already."""
    if options.offload_parameters or not pages_fit(costs, cards, options):
        return ""
    return ", or allow search.offload: [optimizer, parameters], with which a plan fits"


def _roomiest(costs: Costs, shapes: Sequence[Shape]) -> list[Shape]:
    """The MAX_MISSES shapes with the most memory per pipeline, which should come closest to fitting."""

    def memory(shape: Shape) -> float:
        rooms = [costs.problem.usable_bytes(slot[0][0][0].type) for slot in shape.slots]
        return sum(room * len(slot[0][0]) for room, slot in zip(rooms, shape.slots, strict=True))

    ranked = sorted(range(len(shapes)), key=lambda i: (-memory(shapes[i]), i))
    return [shapes[i] for i in ranked[:MAX_MISSES]]


def _with_recompute(costs: Costs, shape: Shape, options: Options, miss: Shortfall, kind: Recompute) -> float:
    """Bytes that the stage would need with this recompute, including the reserve."""
    tables = CostTables(make_instance(costs, shape, replace(options, recompute=(kind,))))
    slot = miss.order[miss.stage]
    needed = tables.needed_bytes(slot, tables.in_flights(miss.order)[miss.stage])
    device = costs.problem.cluster.device_type(shape.slots[slot][0][0][0].type)
    return float(needed[0, miss.bounds[miss.stage], miss.bounds[miss.stage + 1]]) + device.reserved


def _unit_words(costs: Costs, first: int, end: int) -> str:
    """A stage's units [first, end) as text, such as `embedding and layers 0 to 3`."""
    num_layers = costs.problem.model.num_layers
    low, high = max(first - 1, 0), min(end - 1, num_layers)
    words = ["embedding"] * (first == 0)
    if high > low:
        words.append(f"layer {low}" if high == low + 1 else f"layers {low} to {high - 1}")
    return " and ".join(words + ["head"] * (end == num_layers + 2))


def describe_no_shape(problem: PlanProblem, options: Options, cards: Sequence[Card]) -> str:
    """Why no pipelines can be made of the cards for this batch size, and which search keys to loosen."""
    wanted = ", ".join(
        f"{name} {'any' if values is None else list(values)}"
        for name, values in (
            ("pipelines", options.pipelines),
            ("micro_batch_size", options.micro_batch_sizes),
            ("num_micro_batches", options.num_micro_batches),
        )
    )
    return (
        f"no pipelines can be made: {len(cards)} cards, global_batch_size {problem.global_batch_size} = "
        f"pipelines * micro_batch_size * num_micro_batches with {wanted} has no solution"
        + (" that uses every card" if options.use_all_devices else "")
        + "; loosen these search keys, or change train.global_batch_size"
    )
