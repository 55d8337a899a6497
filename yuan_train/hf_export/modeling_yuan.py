"""Yuan 2.0 for transformers, with cached decoding; part of a model exported by yuan_train. Apache-2.0.

    layer:      u = norm(x);  x += attention(u, filter(u));  x += feed_forward(norm(x))
    filter:     c_t = A0 u_{t-1} + A1 u_t + a;  d_t = B0 c_{t-1} + B1 c_t + b;  f = norm(d + u)
    attention:  queries and keys from f, values from u
    experts:    of Yuan 2.0-M32, instead of the feed-forward: each token goes to the two that a router chooses

Cache of each layer: keys and values [B, N, P, D], and the filter's u [B, H] and c [B, H/2] of the last token.
B = sequences, S = new tokens, P = past tokens, N = heads, D = size of a head, H = hidden size.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel, modeling_outputs
from transformers.generation import GenerationMixin

from .configuration_yuan import YuanConfig

IGNORED_LABEL = -100
# The type annotations of these differ between releases.
BaseOutput: Any = modeling_outputs.BaseModelOutputWithPast
CausalOutput: Any = modeling_outputs.CausalLMOutputWithPast


class YuanRMSNorm(nn.Module):
    """x / rms(x) * weight, statistics in fp32."""

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.epsilon = epsilon

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.epsilon)
        return self.weight * scaled.to(x.dtype)


class YuanFilter(nn.Module):
    """Two causal convolutions of two taps, then a norm of their output plus the input.

    The weights have the shape of 2-D convolutions, [out, in, 2, 1]; index 0 of dim 2 is the older token.
    """

    def __init__(self, size: int, epsilon: float) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(size, size // 2, (2, 1))
        self.conv2 = nn.Conv2d(size // 2, size, (2, 1))
        self.output_layernorm = YuanRMSNorm(size, epsilon)

    def forward(self, u: Tensor, past: "Past", real: Tensor | None, start: Tensor | None) -> "FilterResult":
        """Return f [B, S, H], and u and c of the last token. `real` and `start` are bool [B, S, 1] or None.

        Where `real` is False there is padding, which does not affect later tokens. Where `start` is True a
        document begins, which the token before does not affect.
        """
        last_u, last_c = past if past is not None else (u.new_zeros(()), u.new_zeros(()))
        if real is not None:
            u = u * real
        c = _two_taps(self.conv1, u, last_u, start)
        if real is not None:
            c = c * real
        d = _two_taps(self.conv2, c, last_c, start)
        return self.output_layernorm(d + u), (u[:, -1], c[:, -1])


Past = tuple[Tensor, Tensor] | None
FilterResult = tuple[Tensor, tuple[Tensor, Tensor]]


def _two_taps(conv: nn.Conv2d, x: Tensor, last: Tensor, start: Tensor | None) -> Tensor:
    """weight0 x_{t-1} + weight1 x_t + bias; `last` [B, in] (or 0) is x_{t-1} of the first token."""
    first = last.expand(x.shape[0], x.shape[2]).unsqueeze(1)
    older = torch.cat((first, x[:, :-1]), dim=1)
    if start is not None:
        older = older * ~start
    weight = conv.weight.squeeze(-1)
    return F.linear(older, weight[..., 0]) + F.linear(x, weight[..., 1], conv.bias)


class YuanAttention(nn.Module):
    """Causal attention; `q_proj` and `k_proj` are the halves of one matrix that is interleaved per head.

    Of the 2 N D outputs of both together, head j's query is [2jD, 2jD + D), and its key the next D.
    """

    def __init__(self, config: YuanConfig) -> None:
        super().__init__()
        hidden, projection = config.hidden_size, config.attention_projection_size
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, projection, bias=False)
        self.k_proj = nn.Linear(hidden, projection, bias=False)
        self.v_proj = nn.Linear(hidden, projection, bias=False)
        self.o_proj = nn.Linear(projection, hidden, bias=False)
        if config.localized_filter:
            self.lf_gate = YuanFilter(hidden, config.rms_norm_eps)

    def forward(self, u: Tensor, past: tuple[Tensor, ...] | None, context: "Context") -> Any:
        """Return the output [B, S, H] and this layer's cache."""
        filtered, state = u, ()
        if hasattr(self, "lf_gate"):
            last = (past[2], past[3]) if past is not None else None
            filtered, state = self.lf_gate(u, last, context.real, context.start)
        query_key = torch.cat((self.q_proj(filtered), self.k_proj(filtered)), dim=-1)
        query, key = query_key.unflatten(-1, (-1, 2 * self.head_dim)).transpose(1, 2).chunk(2, dim=-1)
        value = self.v_proj(u).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key = _rotate(query, context), _rotate(key, context)
        if past is not None:
            key, value = torch.cat((past[0], key), dim=2), torch.cat((past[1], value), dim=2)
        heads = F.scaled_dot_product_attention(query, key, value, attn_mask=context.visible)
        return self.o_proj(heads.transpose(1, 2).flatten(2)), (key, value, *state)


def _rotate(x: Tensor, context: "Context") -> Tensor:
    """Rotary embedding of the first R dims of x [B, N, S, D] in fp32; pairs are (x[i], x[i + R/2])."""
    cos, sin = context.cos, context.sin
    half = cos.shape[-1]
    low, high = x[..., : 2 * half].float().chunk(2, dim=-1)
    rotated = torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)
    return torch.cat((rotated, x[..., 2 * half :]), dim=-1)


class YuanMLP(nn.Module):
    """down(gate(x) * silu(up(x))): unlike in LLaMA, silu is applied to `up_proj`."""

    def __init__(self, config: YuanConfig) -> None:
        super().__init__()
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.up_proj(x)) * self.gate_proj(x))


class YuanRouter(nn.Module):
    """Attention between the experts (arXiv 2405.17976): p_i = sum_j softmax_j(q_i k_j) v_j, all in fp32."""

    def __init__(self, config: YuanConfig, num_experts: int) -> None:
        super().__init__()
        self.query = nn.Linear(config.hidden_size, num_experts, bias=False)
        self.key = nn.Linear(config.hidden_size, num_experts, bias=False)
        self.value = nn.Linear(config.hidden_size, num_experts, bias=False)

    def forward(self, x: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Return the chosen experts [T, count] of x [T, H], the lower number where they tie, and weights."""
        query, key, value = (
            F.linear(x.float(), linear.weight.float()) for linear in (self.query, self.key, self.value)
        )
        softmax = (query.unsqueeze(-1) * key.unsqueeze(-2)).softmax(dim=-1)
        scores = (softmax * value.unsqueeze(-2)).sum(dim=-1)
        best = scores.sort(dim=-1, descending=True, stable=True)
        return best.indices[:, :count], best.values[:, :count].softmax(dim=-1)


class YuanExpert(nn.Module):
    """w2(silu(z0) * z1), (z0, z1) = w1(x)."""

    def __init__(self, hidden: int, width: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(hidden, 2 * width, bias=False)
        self.w2 = nn.Linear(width, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.w1(x).chunk(2, dim=-1)
        return self.w2(F.silu(gate) * value)


class YuanMoE(nn.Module):
    """The experts of a layer. A token's outputs are added in the order of its choice."""

    def __init__(self, config: YuanConfig, moe: dict[str, Any]) -> None:
        super().__init__()
        count, width = moe["moe_num_experts"], moe["ffn_hidden_size"]
        self.experts_per_token = moe["moe_top_k"]
        self.gate = YuanRouter(config, count)
        self.experts = nn.ModuleList([YuanExpert(config.hidden_size, width) for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        flat = x.flatten(0, 1)
        chosen, weights = self.gate(flat, self.experts_per_token)
        outputs = flat.new_zeros(*chosen.shape, flat.shape[1])
        for number, expert in enumerate(self.experts):
            token, slot = torch.where(chosen == number)
            if token.numel():
                outputs[token, slot] = expert(flat[token]) * weights[token, slot, None].to(x.dtype)
        total = outputs[:, 0]
        for slot in range(1, self.experts_per_token):
            total = total + outputs[:, slot]
        return total.view_as(x)


class YuanDecoderLayer(nn.Module):
    """One layer."""

    def __init__(self, config: YuanConfig) -> None:
        super().__init__()
        self.self_attn = YuanAttention(config)
        self.mlp = YuanMoE(config, config.moe_config) if config.moe_config else YuanMLP(config)
        self.input_layernorm = YuanRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = YuanRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, past: tuple[Tensor, ...] | None, context: "Context") -> Any:
        attended, cache = self.self_attn(self.input_layernorm(x), past, context)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), cache


class Context:
    """Rotary tables, masks and document starts of a forward over S new tokens after P past ones.

    Computed once for all layers, from all tokens [B, P + S] and the padding mask. Positions count from the
    first token that is not padding (or from the document's start).
    """

    def __init__(
        self,
        config: YuanConfig,
        tokens: Tensor,
        mask: Tensor | None,
        positions: Tensor | None,
        num_new: int,
        dtype: torch.dtype,
    ) -> None:
        total = tokens.shape[1]
        device = tokens.device
        real = torch.ones_like(tokens, dtype=torch.bool) if mask is None else mask.to(device).bool()
        begins = torch.zeros_like(real)
        begins[:, 1:] = tokens[:, :-1] == config.eod_token
        # Padding may use the token that ends documents.
        begins[:, 1:] &= real[:, :-1]
        document = begins.cumsum(1)
        if positions is None:
            positions = _positions(real, begins if config.reset_position_ids else None)
        self.cos, self.sin = _rotary_tables(config, positions[:, -num_new:])
        padded = not bool(real.all())
        self.real = real[:, -num_new:, None] if padded else None
        self.start = begins[:, -num_new:, None] if config.reset_filter else None
        keys = torch.arange(total, device=device)
        visible = keys <= keys[total - num_new :, None]
        visible = visible & real[:, None, :]
        if config.reset_attention_mask:
            visible = visible & (document[:, None, :] == document[:, -num_new:, None])
        # A padding query would attend to no key. Attending to itself keeps its unused softmax finite.
        visible = visible | (keys == keys[total - num_new :, None])
        self.visible = torch.zeros(visible.shape, device=device, dtype=dtype)
        self.visible = self.visible.masked_fill(~visible, torch.finfo(dtype).min).unsqueeze(1)


def _positions(real: Tensor, begins: Tensor | None) -> Tensor:
    """int64 [B, T]: the number of real tokens before each one, in its document if `begins` is given."""
    count = real.long().cumsum(1) - 1
    count = count.clamp(min=0)
    if begins is None:
        return count
    return count - torch.where(begins, count, torch.zeros_like(count)).cummax(dim=1).values


def _rotary_tables(config: YuanConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [B, 1, S, R/2]; `rotary_form` says what of them is rounded to bf16."""
    exponents = torch.arange(0, config.rotary_dim, 2, device=positions.device, dtype=torch.float32)
    frequencies = 1.0 / config.rope_theta ** (exponents / config.rotary_dim)
    if config.rotary_form != "exact":
        frequencies = frequencies.bfloat16()
    dtype = torch.bfloat16 if config.rotary_form == "bf16" else torch.float32
    angles = positions[:, None, :, None].to(dtype) * frequencies.to(dtype)
    return angles.cos().float(), angles.sin().float()


class YuanPreTrainedModel(PreTrainedModel):
    """Class attributes that transformers reads."""

    config: YuanConfig  # pyright: ignore[reportIncompatibleVariableOverride]
    config_class = YuanConfig
    base_model_prefix = "model"
    _no_split_modules = ["YuanDecoderLayer"]  # noqa: RUF012
    _skip_keys_device_placement = "past_key_values"
    _keys_to_ignore_on_load_unexpected = [r"rotary_emb\.inv_freq"]  # noqa: RUF012
    _supports_sdpa = True
    _supports_cache_class = False

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, YuanRMSNorm):
            nn.init.ones_(module.weight)


class YuanModel(YuanPreTrainedModel):
    """Embedding, layers and final norm."""

    def __init__(self, config: YuanConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([YuanDecoderLayer(config) for _ in range(config.num_hidden_layers)])
        self.norm = YuanRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **_: Any,
    ) -> Any:
        if input_ids is None:
            raise ValueError("give input_ids: document ends and the length of the cache come from the tokens")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        past = past_key_values if _holds_tokens(past_key_values) else None
        tokens = input_ids if past is None else torch.cat((past[-1][0], input_ids), dim=1)
        context = Context(self.config, tokens, attention_mask, position_ids, input_ids.shape[1], x.dtype)
        caches, states = [], [x]
        for number, layer in enumerate(self.layers):
            x, cache = layer(x, None if past is None else past[number], context)
            caches.append(cache)
            states.append(x)
        x = states[-1] = self.norm(x)
        return_cache = self.config.use_cache if use_cache is None else use_cache
        return BaseOutput(
            last_hidden_state=x,
            past_key_values=(*caches, (tokens,)) if return_cache else None,
            hidden_states=tuple(states) if output_hidden_states else None,
        )


def _holds_tokens(past: Any) -> bool:
    """Whether this is a cache of ours; in some releases `generate` passes an empty cache of its own."""
    return isinstance(past, tuple) and len(past) > 1


class YuanForCausalLM(YuanPreTrainedModel, GenerationMixin):
    """The model with its output head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: YuanConfig) -> None:
        super().__init__(config)
        self.model = YuanModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False  # the cache holds more than keys and values

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embed_tokens

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embed_tokens = value

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def set_output_embeddings(self, new_embeddings: nn.Linear) -> None:
        self.lm_head = new_embeddings

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **others: Any,
    ) -> Any:
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            output_hidden_states=output_hidden_states,
        )
        logits = self.lm_head(outputs.last_hidden_state).float()
        loss = None if labels is None else self._loss(logits, labels)
        if return_dict is False:
            values = (loss, logits, outputs.past_key_values, outputs.hidden_states)
            return tuple(value for value in values if value is not None)
        return CausalOutput(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
        )

    def _loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if not self.config.labels_are_shifted:
            logits, labels = logits[:, :-1], labels[:, 1:]
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten().to(logits.device), ignore_index=IGNORED_LABEL
        )

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        use_cache: bool | None = True,
        **_: Any,
    ) -> Any:
        """Return `forward`'s arguments, with only the tokens that are not in the cache yet."""
        past = past_key_values if _holds_tokens(past_key_values) else None
        if past is not None:
            input_ids = input_ids[:, past[-1][0].shape[1] :]
        return {
            "input_ids": input_ids,
            "past_key_values": past,
            "attention_mask": attention_mask,
            "use_cache": use_cache,
        }

    @staticmethod
    def _reorder_cache(past: Any, beam_idx: Tensor) -> Any:
        """Reorder the whole cache by beam: keys, values, the filter's state and the tokens."""
        return tuple(tuple(x.index_select(0, beam_idx.to(x.device)) for x in layer) for layer in past)
