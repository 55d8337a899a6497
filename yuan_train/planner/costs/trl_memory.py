"""Peak bytes of GRPO in TRL 0.14 on one card: weights in bf16 under bf16 autocast, flash attention.

Counted in the code, no number fitted: trl v0.14.0 (`GRPOTrainer.compute_loss`), transformers' Llama and
Qwen 2, peft's LoRA layer, bitsandbytes' 8-bit Adam. What autograd keeps of a layer equals a count with
`saved_tensors_hooks` (docs/estimate.md).

h = hidden size, L = layers, f = feed-forward width, q = width of queries, k = width of keys, V = vocabulary,
N = parameters, E = those of the embedding, G = group, P = prompt, C = new tokens, T = G (P + C),
e = G C V elements of logits.
"""

from __future__ import annotations

from typing import Literal

from yuan_train.planner.costs.phases import PhaseBytes, Samples
from yuan_train.planner.costs.shape import ModelShape

Method = Literal["full", "adam8", "adam8+recompute", "lora"]

CONTEXT_BYTES = 5e8
"""CUDA's context and kernels."""
LORA_RANK = 16
"""Of adapters on the projections q, k, o, up and down, with dropout."""


def trl_memory(shape: ModelShape, method: Method, samples: Samples) -> PhaseBytes:
    """Bytes of one card that holds the policy and its reference, and trains all samples at once."""
    layers, tokens = shape.num_layers, samples.tokens
    logits = samples.group * samples.new * shape.vocab_size
    generation = {
        "cache": 4.0 * shape.key_value_size * layers * tokens,
        "logits": 8.0 * samples.group * shape.vocab_size,
    }
    return PhaseBytes(
        states=_states(shape, method),
        phases={
            "training": _training(shape, method, tokens, logits),
            "generation": generation,
            # torch's AdamW over many tensors holds a copy of the weights' size.
            "optimizer_step": {"temporaries": 2.0 * shape.parameters if method == "full" else 0.0},
        },
        reserved=CONTEXT_BYTES,
    )


def _states(shape: ModelShape, method: Method) -> dict[str, float]:
    """Weights and reference in bf16, gradients in bf16, Adam's moments in bf16 as torch keeps them.

    8-bit Adam has a byte for each moment, but the Trainer keeps those of the embedding in fp32. Under LoRA
    the adapters alone are trained, in fp32, and the reference is the policy without them.
    """
    n = float(shape.parameters)
    if method == "lora":
        adapters = float(lora_parameters(shape))
        return {
            "weights": 2 * n + 4 * adapters,
            "reference": 0.0,
            "gradients": 4 * adapters,
            "optimizer": 8 * adapters,
        }
    embedding = shape.embedding_parameters
    optimizer = 4 * n if method == "full" else 2 * (n - embedding) + 8 * embedding
    return {"weights": 2 * n, "reference": 2 * n, "gradients": 2 * n, "optimizer": optimizer}


def lora_parameters(shape: ModelShape) -> int:
    """Parameters of the adapters: rank times the inputs and outputs of five projections, in each layer."""
    h, q, k, f = shape.hidden_size, shape.query_size, shape.key_value_size, shape.ffn_hidden_size
    return shape.num_layers * LORA_RANK * ((h + q) + (h + k) + (q + h) + 2 * (h + f))


def kept_per_token(shape: ModelShape, *, lora: bool) -> int:
    """Bytes of a token that autograd keeps of a layer.

    A norm keeps its input in fp32 (4h), what it normed (2h) and its output (2h); attention q, its output, k
    and v in bf16; SwiGLU gate, silu, up and their product (8f). Head norms keep what the others keep, less
    the output, which the rotary embedding replaces. With the base frozen, a norm keeps its input alone, and
    SwiGLU 6f; an adapter keeps its input again, behind dropout (2 bytes, and 1 of the mask).
    """
    h, q, k, f = shape.hidden_size, shape.query_size, shape.key_value_size, shape.ffn_hidden_size
    attention = 4 * q + 4 * k
    heads = (q + k) * shape.query_key_norm
    if lora:
        return 8 * h + attention + 4 * heads + 6 * f + 3 * (3 * h + q) + 3 * f
    return 16 * h + attention + 6 * heads + 8 * f


def _training(shape: ModelShape, method: Method, tokens: int, logits: int) -> dict[str, float]:
    """Activations of the policy's forward, and what is largest beside them.

    The policy's log-softmax in fp32 (4) stands while the reference's logits are made, in bf16 (2) and then in
    fp32, to which accelerate widens outputs (4): 10 bytes an element; its backward needs 8. The reference's
    own layer holds gate, up and product.
    """
    h, layers = shape.hidden_size, shape.num_layers
    kept = float(kept_per_token(shape, lora=method == "lora") * tokens)
    last_hidden = 2.0 * h * tokens
    if method == "adam8+recompute":
        # While a layer is computed again, the logits' are gone.
        layer = kept + 2 * last_hidden
        return {"activations": last_hidden * layers, "logits_or_layer": max(10.0 * logits, layer)}
    reference_layer = 6.0 * shape.ffn_hidden_size * tokens
    return {
        "activations": kept * layers + last_hidden,
        "logits_or_layer": max(10.0 * logits, reference_layer),
    }
