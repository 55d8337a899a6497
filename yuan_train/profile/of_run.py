"""A profile of what a run has measured of its cards while it trained.

A run measures how long each rank computes in a step, not each unit. So the catalogue's estimate of every unit
on a type of card is multiplied by one number: what the ranks of that type took, over what their units were
estimated to take. For the plan that ran, the forecast of their computing is then what was measured. It stands
alone because it measures nothing: a run did.
"""

from __future__ import annotations

from collections.abc import Mapping

from yuan_train.config.devices import DeviceType, Precision
from yuan_train.config.errors import ConfigError
from yuan_train.config.plan import PipelinePlan, Plan, StagePlan
from yuan_train.config.profile import Profile, ProfileEntry, UnitProfile
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.unit_costs import CardCosts, UnitCost, card_costs
from yuan_train.planner.costs.workload import TensorGroup, TokenRows

RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")


def profile_of_run(plan: Plan, seconds: Mapping[int, float], *, precision: Precision) -> Profile:
    """The profile of a run's cards, by type and tensor-parallel width, for each of its micro-batch sizes.

    `seconds` are those of each rank's computing in a step. Raises ConfigError for a plan or cards of which no
    profile can be made, and where nothing was measured.
    """
    if plan.divides_experts:
        raise ConfigError(
            "the run's cards share experts: of those no profile is made; measure with `profile`"
        )
    if plan.model.lora is not None:
        raise ConfigError("the run trains adapters (lora), and profiles are of whole models; measure without")
    measured: dict[tuple[str, int], float] = {}
    estimated: dict[tuple[str, int], float] = {}
    sizes: dict[tuple[str, int], set[int]] = {}
    key_of: dict[int, tuple[str, int]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            for number, replica in enumerate(stage.replicas):
                count = pipeline.micro_batches_of(stage, number)
                for rank in replica:
                    key = key_of[rank] = plan.ranks[rank].type, len(replica)
                    own = count * _stage_seconds(plan, pipeline, stage, key, precision)
                    estimated[key] = estimated.get(key, 0.0) + own
                    sizes.setdefault(key, set()).add(pipeline.micro_batch_size)
    for rank, own in seconds.items():
        measured[key_of[rank]] = measured.get(key_of[rank], 0.0) + own
    factors = {key: own / estimated[key] for key, own in measured.items() if own and estimated[key]}
    if not factors:
        raise ConfigError("the run has not measured its ranks yet; look again after some steps")
    entries = tuple(
        _entry(plan, key, size, recompute, factor, precision)
        for key, factor in factors.items()
        for size in sorted(sizes[key])
        for recompute in RECOMPUTES
    )
    return Profile(
        source="a run",
        sequence_length=plan.sequence_length,
        model=plan.model.name,
        precision=precision,
        entries=entries,
    )


def _costs(
    plan: Plan, key: tuple[str, int], size: int, recompute: Recompute, precision: Precision
) -> CardCosts:
    name, width = key
    return card_costs(
        plan.model,
        TokenRows(size, plan.sequence_length, precision),
        recompute=recompute,
        type_name=name,
        device=_device(plan, name, precision),
        profile=None,
        group=TensorGroup(width),
    )


def _device(plan: Plan, name: str, precision: Precision) -> DeviceType:
    device = plan.find_type(name)
    if device is None or device.peak(precision) is None:
        raise ConfigError(f"{name}: neither the catalogue nor the plan has its rates in {precision}")
    return device


def _stage_seconds(
    plan: Plan, pipeline: PipelinePlan, stage: StagePlan, key: tuple[str, int], precision: Precision
) -> float:
    """What a micro-batch is estimated to take in a stage."""
    part, plain = (
        _costs(plan, key, pipeline.micro_batch_size, kind, precision) for kind in (stage.recompute, "none")
    )
    recomputed = min(float(stage.num_recomputed), stage.num_layers)
    layers = recomputed * part.layer.seconds + (stage.num_layers - recomputed) * plain.layer.seconds
    ends = stage.embedding * part.units[0].seconds + stage.head * part.units[-1].seconds
    return layers + ends


def _entry(
    plan: Plan, key: tuple[str, int], size: int, recompute: Recompute, factor: float, precision: Precision
) -> ProfileEntry:
    costs = _costs(plan, key, size, recompute, precision)

    def unit(cost: UnitCost) -> UnitProfile:
        return UnitProfile(
            forward_seconds=cost.forward_seconds * factor,
            backward_seconds=cost.backward_seconds * factor,
            state_bytes=cost.state_bytes,
            activation_bytes=cost.activation_bytes,
            output_bytes=cost.output_bytes,
            transient_bytes=cost.transient_bytes,
        )

    return ProfileEntry(
        device_type=key[0],
        tensor_parallel=key[1],
        micro_batch_size=size,
        recompute=recompute,
        embedding=unit(costs.units[0]),
        layers=(unit(costs.layer),),
        head=unit(costs.units[-1]),
    )
