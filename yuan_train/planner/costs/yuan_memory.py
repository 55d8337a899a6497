"""Peak bytes of reinforcement learning in our own engine, the whole model on one card.

The same weights generate and train; a reference stays on the host. Samples are trained one after the other,
a row of prompt and answer each, so that the group matters to generation alone. Training is what the planner
forecasts for a stage that holds all units (`stage_memory`).
"""

from __future__ import annotations

from yuan_train.config.devices import DeviceType, Precision
from yuan_train.config.model import ModelConfig
from yuan_train.config.run import Recompute
from yuan_train.planner.costs.memory import stage_memory
from yuan_train.planner.costs.phases import PhaseBytes, Samples
from yuan_train.planner.costs.unit_costs import card_costs
from yuan_train.planner.costs.workload import ELEMENT_BYTES, model_work

PREFILL_CHUNK = 512
"""Prompt tokens that generation reads at once."""
DRAWN_ELEMENTS = 1 << 22
"""Logits whose noise is in memory at once: `NOISE_ELEMENTS` of yuan_train/models/sampling.py."""


def yuan_memory(
    model: ModelConfig,
    samples: Samples,
    device: DeviceType,
    *,
    precision: Precision,
    recompute: Recompute = "none",
    optimizer_offload: float = 0.0,
) -> PhaseBytes:
    """Bytes on a card of this type; `optimizer_offload` is the share of the optimizer state that is kept on
    the host. The card must have a peak in `precision`."""
    costs = card_costs(
        model,
        sequence_length=samples.length,
        micro_batch_size=1,
        precision=precision,
        recompute=recompute,
        type_name="card",
        device=device,
        profile=None,
    )
    memory = stage_memory(
        costs.units,
        has_embedding=True,
        has_head=True,
        head_holds_embedding=model.tie_embeddings,
        in_flight=1,
        boundary_bytes=costs.boundary_bytes,
        reserved_bytes=float(device.reserved),
        optimizer_share=1.0 - optimizer_offload,
    )
    return PhaseBytes(
        states={
            "weights": memory.parameters,
            "reference": 0.0,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
        },
        phases={
            "training": {
                "activations": memory.activations,
                "logits": memory.logits,
                "buffers": memory.buffers,
            },
            "generation": _generation(model, samples, precision),
        },
        reserved=memory.reserved,
    )


def _generation(model: ModelConfig, samples: Samples, precision: Precision) -> dict[str, float]:
    """All answers of a group at once: keys and values of every token, the localized filter's state of u (H)
    and of its first convolution (H/2). The prompt is read once, into a cache of its own from which it is
    copied to every answer; each cache has a place for padding. Beside them the largest of

    - a chunk of the prompt: at most what a layer would keep of it for a backward,
    - a layer's keys and values, repeated for each query head, where heads share them (a masked attention),
    - a draw: logits in fp64, and of DRAWN_ELEMENTS of them a copy and three more while their noise is made.
    """
    e, group = ELEMENT_BYTES[precision], samples.group
    state = 1.5 * model.hidden_size if model.attention == "localized_filter" else 0.0
    places = group * (samples.length + 1) + samples.prompt + 1
    per_layer = e * (2 * places * model.key_value_size + (group + 1) * state)
    chunk = model_work(
        model,
        sequence_length=min(samples.prompt, PREFILL_CHUNK),
        micro_batch_size=1,
        precision=precision,
        logit_rows=1,
    )
    shared = model.key_value_size < model.projection_size
    repeated = 2.0 * e * group * samples.length * model.projection_size if shared else 0.0
    words = group * model.vocab_size
    drawing = 8.0 * words + 32.0 * min(words, max(DRAWN_ELEMENTS, model.vocab_size))
    return {
        "cache": model.num_layers * per_layer,
        "logits or layer": max(chunk.layer.activation_bytes, repeated, drawing),
    }
