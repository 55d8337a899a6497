"""Peak bytes of reinforcement learning in our own engine, the whole model on one card.

The same weights generate and train; a reference stays on the host. Samples are trained one after the other,
a row of prompt and answer each, so that the group matters to generation alone. Training is what the planner
forecasts for a stage that holds all units (`stage_memory`). PPO's critic is trained in turn with the
policy; a reward model is on the card while it scores, and on the host else.
"""

from __future__ import annotations

from yuan_train.config.devices import DeviceType, Precision
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import MemoryForecast
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.critic import value_model
from yuan_train.planner.costs.generation_memory import Writing
from yuan_train.planner.costs.memory import scoring_bytes, stage_memory
from yuan_train.planner.costs.phases import PhaseBytes, Samples
from yuan_train.planner.costs.unit_costs import CardCosts, card_costs


def yuan_memory(
    model: ModelConfig,
    samples: Samples,
    device: DeviceType,
    *,
    precision: Precision,
    recompute: Recompute = "none",
    optimizer_offload: float = 0.0,
    critic: bool = False,
    reward_model: ModelConfig | None = None,
) -> PhaseBytes:
    """Bytes on a card of this type; `optimizer_offload` is the share of the optimizer state that is kept on
    the host, `critic` adds PPO's, `reward_model` is on the card while it scores. The card must have a peak in
    `precision`."""

    def costs_of(model: ModelConfig, recompute: Recompute) -> CardCosts:
        return card_costs(
            model,
            sequence_length=samples.length,
            micro_batch_size=1,
            precision=precision,
            recompute=recompute,
            type_name="card",
            device=device,
            profile=None,
        )

    def memory_of(model: ModelConfig, costs: CardCosts) -> MemoryForecast:
        return stage_memory(
            costs.units,
            has_embedding=True,
            has_head=True,
            head_holds_embedding=model.tie_embeddings,
            in_flight=1,
            boundary_bytes=costs.boundary_bytes,
            reserved_bytes=float(device.reserved),
            optimizer_share=1.0 - optimizer_offload,
        )

    memory = memory_of(model, costs_of(model, recompute))
    states = {
        "weights": memory.parameters,
        "reference": 0.0,
        "gradients": memory.gradients,
        "optimizer": memory.optimizer,
    }
    phases = {"training": _of_backward(memory), "generation": _generation(model, samples, precision)}
    if critic:
        values = value_model(model)
        own = memory_of(values, costs_of(values, recompute))
        states["critic"] = own.parameters + own.gradients + own.optimizer
        phases["critic"] = _of_backward(own)
    if reward_model is not None:
        scoring = scoring_bytes(reward_model, costs_of(reward_model, "none"), precision)
        phases["scoring"] = {"reward model": scoring["weights"], "layer": scoring["activations"]}
    return PhaseBytes(states=states, phases=phases, reserved=memory.reserved)


def _of_backward(memory: MemoryForecast) -> dict[str, float]:
    return {"activations": memory.activations, "logits": memory.logits, "buffers": memory.buffers}


def _generation(model: ModelConfig, samples: Samples, precision: Precision) -> dict[str, float]:
    """All answers of a group at once."""
    writing = Writing(
        model=model,
        num_layers=model.num_layers,
        head=True,
        width=1,
        group=samples.group,
        prompt=samples.prompt,
        length=samples.length,
        precision=precision,
    )
    return {"cache": writing.group_cache_bytes, "logits or layer": writing.lane_bytes(samples.group)}
