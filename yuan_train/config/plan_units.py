"""The units of a plan: embedding, layers (in halves where a pipeline divides them) and head."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from yuan_train.config.architecture import HALVES, half_of, is_trained, layer_table
from yuan_train.config.devices import DeviceType
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import PROCESSOR, Plan, StagePlan


def layer_units(plan: Plan) -> Iterator[tuple[str, float, float]]:
    """Yield the units between embedding and head as (name, first, end), in the model's order.

    A layer that some pipeline divides is two units in all of them: attention and feed-forward.
    """
    for layer in range(plan.model.num_layers):
        if layer in plan.divided_layers:
            yield f"{layer}.attention", layer, layer + 0.5
            yield f"{layer}.feed_forward", layer + 0.5, layer + 1
        else:
            yield str(layer), layer, layer + 1


def whole_layers(plan: Plan) -> frozenset[int]:
    """The numbers, among all units of a plan, of layers that no pipeline divides and that are no page of a
    host."""
    pages = {
        int(stage.layers[0]) + layer
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for layer in range(stage.parameter_offload)
    }
    units = enumerate(layer_units(plan), start=1)
    return frozenset(u for u, (_, first, end) in units if end - first == 1 and first not in pages)


def plan_unit_parameters(plan: Plan) -> tuple[int, ...]:
    """Trained parameters of each unit of a plan; of the head its norm alone if the embedding is tied."""
    model = plan.model
    if not plan.divided_layers:
        return model.trained_unit_parameters
    embedding, *whole, head = model.trained_unit_parameters
    trained = [p for p in layer_table(model) if is_trained(model, p.name)]
    halves = [sum(p.size for p in trained if half_of(p.name) == half) for half in HALVES]
    layers: list[int] = []
    for layer, size in enumerate(whole):
        layers += halves if layer in plan.divided_layers else [size]
    return (embedding, *layers, head)


def expert_ranges(model: ModelConfig, stage: StagePlan) -> tuple[tuple[int, int], ...] | None:
    """The experts [first, last) of each rank of a stage's replicas; None if a rank holds all there are."""
    width = len(stage.replicas[0])
    if not model.num_experts or width == 1:
        return None
    size, rest = divmod(model.num_experts, width)
    counts = stage.experts or tuple(size + (rank < rest) for rank in range(width))
    borders = (0, *itertools.accumulate(counts))
    return tuple(itertools.pairwise(borders))


def expert_cuts(divisions: Iterable[tuple[tuple[int, int], ...]]) -> tuple[tuple[int, int], ...]:
    """The ranges of experts, none empty, between all the borders of these divisions of a layer."""
    borders = {border for division in divisions for part in division for border in part}
    return tuple(itertools.pairwise(sorted(borders)))


def divides_experts(plan: Plan) -> bool:
    """Whether the ranks of some replica share the experts of their layers."""
    stages = (stage for pipeline in plan.pipelines for stage in pipeline.stages)
    return bool(plan.model.num_experts) and any(len(stage.replicas[0]) > 1 for stage in stages)


def expert_parameters(model: ModelConfig) -> int:
    """Parameters of the experts of one layer."""
    return sum(parameter.size for parameter in model.spec.layer(model) if parameter.sharding == "expert")


def num_units(plan: Plan) -> int:
    """Number of units of a plan."""
    return plan.model.num_layers + len(plan.divided_layers) + 2


def stage_unit_range(plan: Plan, stage: StagePlan) -> range:
    """The numbers of a stage's units among all units of the plan."""
    if not plan.divided_layers:
        first, end = map(int, stage.layers)
        return range(0 if stage.embedding else first + 1, num_units(plan) if stage.head else end + 1)
    borders = [0.0] + [first for _, first, _ in layer_units(plan)] + [float(plan.model.num_layers)]
    first, end = borders.index(stage.layers[0], 1), borders.index(stage.layers[1], 1)
    return range(0 if stage.embedding else first, len(borders) if stage.head else end)


def unlike_owners(plan: Plan) -> tuple[int, int] | None:
    """Two ranks that each step the same weights by unlike arithmetic, so that they drift apart; None if there
    are none.

    They have cards of different types, or not the same part of the state on their hosts; simulated cards are
    all processors. With a sharded optimizer each element has one owner, but what is whole on the ranks of a
    tensor-parallel group.
    """
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    kinds = {name: _arithmetic(plan.find_type(name)) or name for name in {e.type for e in plan.ranks}}
    types = {entry.rank: kinds[entry.type] for entry in plan.ranks}
    for replica in (replica for stage in stages for replica in stage.replicas):
        for rank in replica:
            if types[rank] != types[replica[0]]:
                return replica[0], rank
    if plan.optimizer_sharding:
        return None
    holders: dict[int, tuple[int, object]] = {}
    last = num_units(plan) - 1
    for stage in stages:
        units = set(stage_unit_range(plan, stage))
        if plan.model.tie_embeddings and last in units:
            units.add(0)
        away = (stage.optimizer_offload, stage.optimizer_disk, len(stage.replicas[0]))
        for replica in stage.replicas:
            kind = types[replica[0]], away if stage.optimizer_offload else None
            for unit in units:
                rank, other = holders.setdefault(unit, (replica[0], kind))
                if other != kind:
                    return rank, replica[0]
    return None


def _arithmetic(card: DeviceType | None) -> str | None:
    """What computes in place of a simulated card."""
    return PROCESSOR if card is not None and card.slowdown is not None else None
