"""Why there is no plan: which stage lacks how much memory and what would help, or which keys exclude all."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from yuan_train.config.cluster import Card
from yuan_train.config.plan import Plan, StagePlan
from yuan_train.config.run import Recompute
from yuan_train.config.units import show_bytes
from yuan_train.planner.costs.unit_costs import Costs, without_critic
from yuan_train.planner.costs.workload import PlanProblem, Replica, disk_bytes, host_bytes, slot_bytes
from yuan_train.planner.evaluate.plan_cost import cost_stages
from yuan_train.planner.evaluate.stage_cost import StageCost, change_stage
from yuan_train.planner.search.candidate import Candidate, Space, judge, rank
from yuan_train.planner.search.paged import pages_fit
from yuan_train.planner.search.shapes import Options, PipelineCut, assemble_plan, groups_of

_Miss = tuple[float, Plan, StageCost]
"""What a stage needs in parts of what a plan may fill of its card, the plan, and the stage: it lacks most."""


def state_of(costs: Costs, cards: Sequence[Card]) -> tuple[float, float, float]:
    """Bytes of parameters with their gradients, which each copy of the model has; of optimizer state; and of
    the memory of all cards. A tied matrix counts once, and no critic's state, part of which may be shared."""
    units = [without_critic(unit) for unit in costs.of(cards[0].type, 1, "none").units[costs.ties :]]
    own = sum(unit.parameter_bytes + unit.gradient_bytes for unit in units)
    room = sum(max(costs.problem.room_bytes(card.type), 0.0) for card in cards)
    return own, sum(unit.optimizer_bytes for unit in units), room


def most_copies(costs: Costs, cards: Sequence[Card], options: Options) -> int:
    """Of the model, for which there may be room, with optimizer state on hosts as far as that may be."""
    own, optimizer, room = state_of(costs, cards)
    hosts = sum(costs.host_of(card).memory_bytes for card in cards)
    beside = math.inf if options.offload_disk else hosts if options.offload else 0.0
    once, each = (optimizer, own) if True in options.sharded else (0.0, own + optimizer)
    # A profile may know of no state.
    return max(0, int(min((room + beside - once) / max(each, 1.0), room / max(own, 1.0))))


def nearest_plans(space: Space) -> list[Candidate]:
    """The nearest misses that are none, fastest first: where memory is short, a search may meet no plan."""
    misses = _misses(space.costs, space.cards, space.options, on_hosts=space.options.offload)
    found = [judge(space, plan) for ratio, plan, _ in misses if ratio <= 1.0]
    least = len(space.cards) * space.options.use_all_devices
    return rank([one for one in found if one is not None and len(one.plan.ranks) >= least])


def describe_shortfall(costs: Costs, cards: Sequence[Card], options: Options) -> str:
    """The nearest miss: which stage of which plan needs how much, and what would help."""
    misses = _misses(costs, cards, options, on_hosts=options.offload)
    miss = min(misses, key=lambda miss: miss[0], default=None)
    advice = ". Give more cards or memory, a smaller micro_batch_size, a shorter sequence_length"
    if miss is None:
        return f"no plan fits: no cards make groups of search.tensor: {list(options.tensor)}{advice}"
    _, plan, stage = miss
    replica, count = stage.replicas[0], len(plan.pipelines[0].stages)
    name = stage.card.name + (f" and {len(replica) - 1} more" if len(replica) > 1 else "")
    text = (
        f"no plan fits{_state_words(costs, cards, options)}. Nearest: {count} stage{'s' * (count > 1)}; "
        f"stage {stage.stage} ({name}, {stage.card.type}, {_unit_words(stage)}) needs "
        f"{show_bytes(stage.memory.total)} of {_memory_words(costs, stage.card)}"
    )
    if options.offload:
        text += f" with its optimizer state on the host{_host_words(costs, replica)}"
    if not options.offload and any(own[0] <= 1 for own in _misses(costs, cards, options, on_hosts=True)):
        free = "search.engine: [yuan] and " if options.expressible else ""
        advice += f", or allow {free}search.offload: [optimizer], with which a plan fits"
    elif options.offload or not options.expressible:
        # Pages may have been sought already.
        pages = not options.offload_parameters and pages_fit(costs, cards, options)
        advice += ", or allow search.offload: [optimizer, parameters], with which a plan fits" * pages
    if stage.recompute == "full":
        return f"{text} with recompute: full{advice}"
    kinds: tuple[Recompute, ...] = ("selective", "full")
    needs = {kind: _with_recompute(costs, plan, stage, kind) for kind in kinds}
    helping = {kind: needed for kind, needed in needs.items() if needed < stage.memory.total}
    if helping:
        words = (f"recompute: {kind} it needs {show_bytes(needed)}" for kind, needed in helping.items())
        text += "; with " + ", with ".join(words)
        if not set(helping) <= set(options.recompute):
            advice += f", or allow search.recompute: [{', '.join(['none', *helping])}]"
    return text + advice


def _misses(costs: Costs, cards: Sequence[Card], options: Options, *, on_hosts: bool) -> Iterator[_Miss]:
    """Plans that come near: few pipelines, layers dealt by memory; `on_hosts`: with what hosts take."""
    for width in options.tensor:
        for order in _orders(list(groups_of(cards, width)), costs, options):
            for recompute in options.recompute:
                plan = _plan(costs, order, options, recompute)
                if on_hosts:
                    plan = _with_hosts(costs, plan, options)
                stages = cost_stages(costs, plan)
                found = [(s.memory.total / max(s.capacity_bytes, 1.0), plan, s) for s in stages]
                yield max(found, key=lambda miss: miss[0])


def _orders(groups: Sequence[Replica], costs: Costs, options: Options) -> Iterator[list[Replica]]:
    """The groups of a pipeline: of more than it can have stages, those with most memory."""
    count = min(options.pipelines or (1,))
    roomiest = sorted(groups, key=lambda group: -costs.problem.room_bytes(group[0].type))
    chosen = set(roomiest[: min(len(groups) // count, costs.problem.model.num_layers)])
    order = [group for group in groups if group in chosen]
    if order:
        yield order
        if not options.fixed_order:
            # The ends hold embedding and head besides.
            first, *rest = [group for group in roomiest if group in chosen]
            yield [first, *rest[1:], *rest[:1]]


def _plan(costs: Costs, order: Sequence[Replica], options: Options, recompute: Recompute) -> Plan:
    """A pipeline of these groups, layers where least is needed for what there is; it stands for all alike."""
    problem, last = costs.problem, len(order) - 1
    size = min(options.micro_batch_sizes)
    count = max(problem.global_batch_size // (min(options.pipelines or (1,)) * size), 1)
    parts = [costs.of_replica(replica, size, recompute) for replica in order]
    each = [
        part.layer.state_bytes + min(last + 1 - s, count) * part.layer.activation_bytes
        for s, part in enumerate(parts)
    ]
    held, layers = [0.0] * (last + 1), [0] * (last + 1)
    held[0] += parts[0].units[0].state_bytes
    held[last] += parts[last].units[-1].state_bytes + parts[last].units[-1].transient_bytes
    rooms = [problem.room_bytes(replica[0].type) for replica in order]
    for _ in range(problem.model.num_layers):
        s = min(range(last + 1), key=lambda s: ((held[s] + each[s]) / max(rooms[s], 1.0), s))
        held[s] += each[s]
        layers[s] += 1

    cut = PipelineCut(
        micro_batch_size=size,
        num_micro_batches=count,
        stage_groups=tuple((replica,) for replica in order),
        bounds=(0, *(1 + sum(layers[:s]) for s in range(1, last + 1)), problem.model.num_layers + 2),
        recompute=tuple(recompute if own else "none" for own in layers),
    )
    return assemble_plan(costs, [cut], schedule="1f1b", sharded=True in options.sharded)


def _with_hosts(costs: Costs, plan: Plan, options: Options) -> Plan:
    """The plan with as much optimizer state on hosts as they take."""
    (pipeline,) = plan.pipelines
    stages: list[StagePlan] = []
    for stage, cost in zip(pipeline.stages, cost_stages(costs, plan), strict=True):
        most = min(_most_away(costs, card, on_disk=options.offload_disk) for card in cost.cards)
        parameters = sum(unit.parameters for unit in cost.units)
        stages.append(replace(stage, optimizer_offload=min(most / parameters, 1.0) if parameters else 0.0))
    return replace(plan, pipelines=(replace(pipeline, stages=tuple(stages)),))


def _most_away(costs: Costs, card: Card, *, on_disk: bool) -> float:
    """Parameters whose state a card's share of its host has room for; `on_disk`: and that of the node's disk
    for what remains, if the cluster file gives it one."""
    precision, host = costs.problem.precision, costs.host_of(card)
    on_host = host.memory_bytes / host_bytes(precision)
    if not on_disk or not costs.has_disk(card):
        return on_host
    beside = (host.memory_bytes - slot_bytes(precision, math.inf)) / host_bytes(precision)
    return on_host if beside < 0.0 else max(on_host, beside + host.disk_bytes / disk_bytes(precision))


def _state_words(costs: Costs, cards: Sequence[Card], options: Options) -> str:
    """What the model takes, where no cut of it and no hosts could make room, as text."""
    if options.offload_parameters or most_copies(costs, cards, options):
        return ""
    own, optimizer, room = map(show_bytes, state_of(costs, cards))
    return f": {own} of parameters and gradients, {optimizer} of optimizer state, {room} on all cards"


def _host_words(costs: Costs, replica: Replica) -> str:
    """Whether it is the host's memory that ends there, as text."""
    share = min(costs.host_of(card).memory_bytes for card in replica)
    node, cluster = replica[0].node, costs.problem.cluster
    assumed = f" (assumed: as much as the cards have together; state {cluster.host_key(node)})"
    assumed = assumed if cluster.groups[node].host is None else ""
    return f", of whose memory a card has {show_bytes(share)}{assumed}"


def _memory_words(costs: Costs, card: Card) -> str:
    """A card's memory, and what of it a plan may fill, as text."""
    problem = costs.problem
    whole = show_bytes(problem.cluster.device_type(card.type).memory)
    if problem.memory_fraction == 1.0:
        return whole
    usable = show_bytes(problem.usable_bytes(card.type))
    return f"{usable} ({problem.memory_fraction:.0%} of {whole}, search.memory_fraction)"


def _with_recompute(costs: Costs, plan: Plan, old: StageCost, kind: Recompute) -> float:
    """Bytes that the stage would need with this recompute."""
    stage = replace(plan.pipelines[0].stages[old.stage], recompute=kind)
    return change_stage(costs, plan, old, stage).memory.total if stage.num_layers else math.inf


def _unit_words(stage: StageCost) -> str:
    """What a stage holds as text, such as `embedding and layers 0 to 3`."""
    first, end = map(int, stage.layers)
    words = ["embedding"] * stage.embedding
    if end > first:
        words.append(f"layer {first}" if end == first + 1 else f"layers {first} to {end - 1}")
    return " and ".join(words + ["head"] * stage.head) or "no layer"


def describe_no_shape(problem: PlanProblem, options: Options, cards: Sequence[Card]) -> str:
    """Why no pipelines can be made of the cards for this batch size, and which search keys to loosen."""
    keys = {
        "pipelines": options.pipelines,
        "micro_batch_size": options.micro_batch_sizes,
        "num_micro_batches": options.num_micro_batches,
    }
    wanted = ", ".join(f"{key} {'any' if own is None else list(own)}" for key, own in keys.items())
    fewest = 1 if options.any_replicas else min(options.replicas)
    if fewest > 1:
        wanted += f", of which replicas {list(options.replicas)} need at least {fewest},"
    return (
        f"no pipelines can be made: {len(cards)} cards, global_batch_size {problem.global_batch_size} = "
        f"pipelines * micro_batch_size * num_micro_batches with {wanted} has no solution"
        + (
            f" that uses every card, with at most {problem.model.num_layers + 2} stages for the parts of the "
            "model (embedding, layers, head); set use_all_devices: false, or"
            if options.use_all_devices
            else ";"
        )
        + " loosen these search keys, or change train.global_batch_size"
    )
