"""What a layer is made of: its modules, what of them is saved for the backward, and hidden dropout.

B = sequences, S = tokens of a sequence, H = hidden size, F = feed-forward width, V = vocabulary.

Parameters are created empty; `transformer.init_weights` or a checkpoint fills them. A tensor-parallel shard
of a layer has the same modules with fewer rows or columns, so the code here takes widths from the weights'
shapes, not from the config.

Autograd saves the inputs of each op for that op's backward. In a layer, the saved outputs of the norms and of
the SwiGLU product are about three tenths of all saved bytes. Selective recompute does not save them: one pass
over memory recomputes them from tensors that are saved anyway. The outputs of matrix products, of the filter
and of attention are expensive to recompute, and are saved.

The masks of hidden dropout do not depend on the partition of the model: they are hashed, not drawn. Whether
an element is kept is a function of the seed, the position of its sample in the run's data (which follows
from step and index in the batch), the layer, the site, and the element's index in the sample. Only integer
arithmetic is used, so that CPUs and GPUs agree. The backward hashes the masks again: none is saved.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from yuan_kernels import ops

from yuan_train.config.model import ModelConfig


class Parts(Protocol):
    """Follows a part of the model through one forward and its backward. Autograd's hooks keep through it what
    the layers save for the backward."""

    def share(self, *tensors: Tensor | None) -> None:
        """These are used by several parts, or kept by the caller: they stay where they are."""
        ...

    def enter(self, hidden: Tensor) -> None:
        """The next part begins; all that it computes depends on `hidden`, which nothing before it uses."""
        ...

    def pack(self, tensor: Tensor) -> Any:
        """What autograd keeps instead of a tensor that the running part saves."""
        ...

    def unpack(self, packed: Any) -> Tensor:
        """The tensor, for the backward."""
        ...


T = TypeVar("T")


class RecomputePolicy:
    """Decides which tensors of a layer are saved for the backward. This base saves all, as autograd does.

    A layer passes its cheap tensors through the policy, which may recompute them in the backward.
    """

    def mark_recomputable(self, output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        """Return `output`, which is function(*inputs): cheap, and its inputs are saved anyway, or marked."""
        return output

    def decide(self, decision: Callable[[], T]) -> T:
        """Return `decision()`, or what it returned when the layer was run before. Once per layer."""
        return decision()

    def enter_half(self, hidden: Tensor) -> None:
        """The layer's second half begins, with `hidden` of the first."""


SAVE_ALL = RecomputePolicy()


class SaveInParts(RecomputePolicy):
    """Saves all, through `parts` if given."""

    def __init__(self, parts: Parts | None = None) -> None:
        self._parts = parts

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context of the layer's forward: inside it, tensors are saved as the policy says."""
        with saved_tensors_hooks(self._pack, self._unpack):
            yield

    def enter_half(self, hidden: Tensor) -> None:
        if self._parts is not None:
            self._parts.enter(hidden)

    def _pack(self, tensor: Tensor) -> Any:
        return tensor if self._parts is None else self._parts.pack(tensor)

    def _unpack(self, packed: Any) -> Tensor:
        return packed if self._parts is None else self._parts.unpack(packed)


class KeptDecision(RecomputePolicy):
    """For a layer that is run again in the backward: keeps what it decided, as an expert of a token."""

    def __init__(self) -> None:
        self._decided: Any = None

    def decide(self, decision: Callable[[], T]) -> T:
        if self._decided is None:
            self._decided = decision()
        return self._decided


class SelectiveRecompute(SaveInParts):
    """Saves the expensive tensors of one layer's forward, and recomputes the marked ones in the backward.

    Autograd's hooks see every tensor that an op saves. A marked tensor, or a view of it, is not saved: when
    the backward needs it, the same function recomputes it from the same inputs, bit for bit. So it does not
    matter which op reads the tensor: a linear map, sharded or with a split backward, or the filter.

    What is saved after all is saved through `parts`, if given.
    """

    def __init__(self, parts: Parts | None = None) -> None:
        super().__init__(parts)
        self._marked: dict[int, tuple[Tensor, _RecomputeFn]] = {}
        """By address of the storage. Holding the tensor here keeps that address from being reused."""

    @contextmanager
    def saving(self) -> Iterator[None]:
        with super().saving():
            yield
        self._marked.clear()

    def mark_recomputable(self, output: Tensor, function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
        if output.numel() == 0:
            # All empty storages have the same address.
            return output
        # An input that is marked itself is recomputed first.
        inputs_packed = tuple(self._pack(x.detach()) for x in inputs)
        recompute = _RecomputeFn(function, inputs_packed, self._unpack)
        self._marked[output.untyped_storage().data_ptr()] = (output, recompute)
        return output

    def _pack(self, tensor: Tensor) -> Any:
        marked = self._marked.get(tensor.untyped_storage().data_ptr())
        if marked is None:
            return super()._pack(tensor)
        recompute = marked[1]
        recompute.uses += 1
        return _View(recompute, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, _View):
            return packed.made.recompute().as_strided(packed.size, packed.stride, packed.storage_offset)
        return super()._unpack(packed)


class _RecomputeFn:
    """Recomputes a tensor at the first of its uses in the backward, and holds it until the last."""

    def __init__(
        self, function: Callable[..., Tensor], inputs: tuple[Any, ...], unpack: Callable[[Any], Tensor]
    ) -> None:
        self._function, self._unpack, self._inputs = function, unpack, inputs
        self._output: Tensor | None = None
        self.uses = 0

    def recompute(self) -> Tensor:
        output = self._output
        if output is None:
            with torch.no_grad():
                output = self._function(*map(self._unpack, self._inputs))
        self.uses -= 1
        self._output = output if self.uses > 0 else None
        return output


class _View(NamedTuple):
    """One saved use of a recomputable tensor: the tensor itself or a view of it, by size and strides."""

    made: _RecomputeFn
    size: tuple[int, ...]
    stride: tuple[int, ...]
    storage_offset: int


# --- modules ------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    """x weight^T + bias; weight is [out, in], bias [out] or none. For adapters see `add_adapters`."""

    def __init__(self, in_size: int, out_size: int, *, bias: bool = False, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype)) if bias else None
        self.lora_a: nn.Parameter | None = None
        self.lora_b: nn.Parameter | None = None
        self.lora_scale = 0.0

    def add_adapters(self, rank: int, scale: float) -> None:
        """Add scale (x lora_a^T) lora_b^T to the result; lora_a is [rank, in], lora_b [out, rank]."""
        (rows, columns), new = self.weight.shape, self.weight.new_empty
        self.lora_a = nn.Parameter(new(rank, columns))
        self.lora_b = nn.Parameter(new(rows, rank))
        self.lora_scale = scale

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] of x [..., in]."""
        y = ops.linear(x, self.weight, self.bias)
        if self.lora_a is None or self.lora_b is None:
            return y
        return y + ops.linear(self.lora_scale * ops.linear(x, self.lora_a), self.lora_b)


class Score(nn.Module):
    """One number a token: the product with weight [H]."""

    def __init__(self, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return [...] of x [..., H], in fp32 (fp64 for fp64)."""
        wide = torch.promote_types(x.dtype, torch.float32)
        return x.to(wide) @ self.weight.to(wide)


class Embedding(nn.Module):
    """Token embedding: the rows of weight [V, H]. Training replaces `op`, to add the rows of the gradient to
    its own buffer."""

    def __init__(self, vocab_size: int, hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(vocab_size, hidden_size, dtype=dtype))
        self.op = F.embedding

    def forward(self, tokens_BS: Tensor) -> Tensor:
        """Return [B, S, H] of int64 tokens [B, S]."""
        return self.op(tokens_BS, self.weight)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dim, statistics in fp32 (fp64 for fp64)."""

    def __init__(self, hidden_size: int, epsilon: float, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(hidden_size, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., H] in x's dtype."""
        return ops.rms_norm(x, self.weight, epsilon=self.epsilon)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(s), s) of s = x + residual [..., H], in one fused op."""
        return ops.add_rms_norm(x, residual, self.weight, epsilon=self.epsilon)


class FeedForward(nn.Module):
    """SwiGLU feed-forward: down(silu(z0) * z1), where (z0, z1) = up(x)."""

    def __init__(self, hidden_size: int, ffn_hidden_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = Linear(hidden_size, 2 * ffn_hidden_size, dtype=dtype)
        self.down = Linear(ffn_hidden_size, hidden_size, dtype=dtype)

    def forward(self, x: Tensor, policy: RecomputePolicy = SAVE_ALL) -> Tensor:
        """Return [B, S, H] of x [B, S, H]."""
        up = self.up(x)
        return self.down(policy.mark_recomputable(ops.swiglu(up), ops.swiglu, up))


class TwoTapConvolution(nn.Module):
    """Weight [out, in, 2] (last index 0: the older token) and bias [out] of one causal convolution."""

    def __init__(self, in_size: int, out_size: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_size, in_size, 2, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_size, dtype=dtype))


class LocalizedFilter(nn.Module):
    """f = RMSNorm(filter(u) + u) over the tokens t-2, t-1, t of a sequence.

    Tensor parallelism shards the H/2 channels and gives `reduce`, which adds up the partial results so that
    they lie as a residual does; residual and norm stay as they are. Training replaces `op` alone, to add the
    weights' gradients to its own buffers.
    """

    def __init__(self, config: ModelConfig, *, dtype: torch.dtype) -> None:
        super().__init__()
        hidden, channels = config.hidden_size, config.hidden_size // 2
        self.conv1 = TwoTapConvolution(hidden, channels, dtype=dtype)
        self.conv2 = TwoTapConvolution(channels, hidden, dtype=dtype)
        self.norm = RMSNorm(hidden, config.norm_epsilon, dtype=dtype)
        self.op = ops.localized_filter
        self.reduce: Callable[[Tensor, Tensor], Tensor] | None = None

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Weight and bias of either convolution; no bias if it is added to the sum of partial results."""
        last = self.conv2.bias if self.reduce is None else None
        return self.conv1.weight, self.conv1.bias, self.conv2.weight, last

    def forward(
        self,
        u_BSH: Tensor,
        document_start: Tensor | None = None,
        policy: RecomputePolicy = SAVE_ALL,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Return f, which lies as `residual` does, by default as u [B, S, H]; `document_start` bool [B, S]
        or None."""
        residual = u_BSH if residual is None else residual
        filtered = self._reduced(self.op(u_BSH, *self.weights, document_start=document_start), residual)
        f, total = self.norm.add(filtered, residual)
        return policy.mark_recomputable(f, self.norm, total)

    def step(
        self, u_BSH: Tensor, state: ops.FilterState, document_start: Tensor | None = None
    ) -> tuple[Tensor, ops.FilterState]:
        """Return f [B, S, H] of the next tokens, and the state after them."""
        part_BSH, state = ops.localized_filter_step(
            u_BSH, state, *self.weights, document_start=document_start
        )
        return self.norm.add(self._reduced(part_BSH, u_BSH), u_BSH)[0], state

    def _reduced(self, part_BSH: Tensor, residual: Tensor) -> Tensor:
        return part_BSH if self.reduce is None else self.reduce(part_BSH, residual) + self.conv2.bias


# --- dropout ------------------------------------------------------------------------------------------------

_ROUNDS = ((17, 0xED5AD4BB), (11, 0xAC4C1B51), (15, 0x31848BAB))
"""(shift, factor) of skeeto/hash-prospector's triple32, which mixes 32 bits without a measurable bias."""

_LAST_SHIFT = 14
_LOW = 0xFFFFFFFF

Keys = tuple[int, int, int]
"""32-bit keys of the hash, one per round."""

SITES = ("attention", "feed_forward")
"""The sites of a layer: its two branches."""

Tokens = tuple[int, int]
"""Which tokens of a micro-batch a hidden state is: its first one, counted through all samples, and how many a
sample has."""


@dataclass(frozen=True)
class DropoutSeed:
    """Seed of the masks of one micro-batch; layer and site complete it."""

    seed: int
    first_sample: int
    """Position of the micro-batch's first sample in the run's data."""

    def keys(self, sample: int, layer: int, site: str) -> Keys:
        """Return the hash keys of one layer and site for the micro-batch's sample number `sample`."""
        return hash_keys(f"{self.seed}:{self.first_sample + sample}:{layer}:{site}")


def hash_keys(text: str) -> Keys:
    """The keys of `hashes` that follow from a text."""
    digest = hashlib.sha256(text.encode()).digest()
    return (
        int.from_bytes(digest[:4], "little"),
        int.from_bytes(digest[4:8], "little"),
        int.from_bytes(digest[8:12], "little"),
    )


@dataclass(frozen=True)
class LayerDropout:
    """The dropout of one layer in one micro-batch."""

    rate: float
    dropout_seed: DropoutSeed
    layer: int
    """Global number of the layer."""

    def __call__(self, x: Tensor, site: str, tokens: Tokens) -> Tensor:
        """`hidden_dropout` of this layer."""
        rate, seed = self.rate, self.dropout_seed
        return hidden_dropout(x, site, rate=rate, dropout_seed=seed, layer=self.layer, tokens=tokens)

    def key_tensors(self, x_BSH: Tensor) -> dict[str, Tensor]:
        """By site, the hash keys of x's samples: int64 [rounds, B, 1] on x's device."""
        samples = range(x_BSH.shape[0])
        keys = [[self.dropout_seed.keys(i, self.layer, site) for i in samples] for site in SITES]
        # One copy to the device for both sites.
        keys_3B1 = torch.tensor(keys).permute(0, 2, 1).unsqueeze(-1).to(x_BSH.device, non_blocking=True)
        return dict(zip(SITES, keys_3B1, strict=True))


def hidden_dropout(
    x: Tensor, site: str, *, rate: float, dropout_seed: DropoutSeed, layer: int, tokens: Tokens
) -> Tensor:
    """Return x [..., H] with a fraction `rate` of its elements zeroed, and the others divided by 1 - rate.

    `layer` is the global number of the layer, `site` a name that is unique within it.
    """
    first, length = tokens
    samples = range(first // length, -(-(first + x.shape[:-1].numel()) // length))
    keys = {sample: dropout_seed.keys(sample, layer, site) for sample in samples}
    return _Dropout.apply(x, rate, keys, tokens)  # pyright: ignore[reportReturnType]


def traceable_dropout(x_BSH: Tensor, rate: float, keys_3B1: Tensor) -> Tensor:
    """`hidden_dropout` for torch.compile, with the keys of `LayerDropout.key_tensors`.

    Python numbers that change with the sample would be compiled anew; whole tensors cost nothing, because the
    compiler fuses all passes and, for the backward too, keeps no hash.
    """
    hashes_BN = hashes(x_BSH[0].numel(), keys_3B1, device=x_BSH.device)
    kept_BSH = (hashes_BN >= _threshold(rate)).view_as(x_BSH)
    return x_BSH * kept_BSH * (1 / (1 - rate))


def hashes(count: int, keys: Keys | Tensor, *, first: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Return int64 [count]: hashes of first .. first + count - 1 under `keys`, uniform over [0, 2^32).

    Of `keys` int64 [rounds, B, 1] it returns those of B samples, [B, count].
    """
    assert first + count <= 1 << 32, "the hash takes 32-bit element indices"
    x = torch.arange(first, first + count, device=device)
    for (shift, factor), key in zip(_ROUNDS, keys, strict=True):
        x = x ^ key if isinstance(key, Tensor) and x.dim() == 1 else x.bitwise_xor_(key)
        x.bitwise_xor_(x >> shift)
        # The factor as a signed 32-bit number: the product has the same low bits, and fits 64 bits.
        x.mul_(factor - (1 << 32) if factor >> 31 else factor).bitwise_and_(_LOW)
    return x.bitwise_xor_(x >> _LAST_SHIFT)


def _drop(x: Tensor, rate: float, keys: Mapping[int, Keys], tokens: Tokens) -> Tensor:
    """Apply the masks sample by sample: the hashes, 8 bytes per element, exist for one sample at a time."""
    dropped = torch.empty_like(x, memory_format=torch.contiguous_format)
    rows_TH, out_TH, hidden = x.flatten(0, -2), dropped.view(-1, x.shape[-1]), x.shape[-1]
    first, length = tokens
    for sample, key in keys.items():
        start = sample * length - first
        own = slice(max(start, 0), start + length)
        rows, skipped = rows_TH[own], max(-start, 0) * hidden
        kept = hashes(rows.numel(), key, first=skipped, device=x.device) >= _threshold(rate)
        torch.mul(rows, kept.view_as(rows), out=out_TH[own])
    return dropped.mul_(1 / (1 - rate))


def _threshold(rate: float) -> int:
    """The smallest hash whose element is kept."""
    return round(rate * (1 << 32))


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rate: float, keys: Mapping[int, Keys], tokens: Tokens) -> Tensor:
        ctx.arguments = rate, keys, tokens
        return _drop(x, *ctx.arguments)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _drop(gradients[0], *ctx.arguments), None, None, None
