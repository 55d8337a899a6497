"""Model files (`configs/model/*.yaml`), and the parameters and FLOP that follow from the sizes in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Lt

from yuan_train.config.document import override, read_document
from yuan_train.config.errors import Violation
from yuan_train.config.load import build

AttentionKind = Literal["localized_filter", "plain"]
Count = Annotated[int, Gt(0)]
Rate = Annotated[float, Ge(0), Lt(1)]

ONLY_IN_TRAINING = ("hidden_dropout", "attention_dropout")
"""Fields that affect neither the names and shapes of weights nor the output of a trained model."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of a decoder-only transformer of the Yuan 2.0 family (paper, sections 3.1 and 4.1)."""

    name: str
    num_layers: Count
    hidden_size: Count
    num_attention_heads: Count
    ffn_hidden_size: Count
    """Width of the SwiGLU feed-forward; Yuan 2.0 uses 4 * hidden_size."""
    vocab_size: Count
    """Rows of the embedding matrix, padding included."""
    head_dim: Annotated[int, Ge(0)] = 0
    """Width of one attention head; 0 means hidden_size / num_attention_heads."""
    attention: AttentionKind = "localized_filter"
    """Input of queries and keys: the two-convolution filter (`localized_filter`), or the norm (`plain`)."""
    rope_base: Annotated[float, Gt(0)] = 10000.0
    norm_epsilon: Annotated[float, Gt(0)] = 1e-6
    tie_embeddings: bool = True
    """The output head shares the embedding matrix."""
    init_std: Annotated[float, Gt(0)] = 0.02
    max_sequence_length: Count = 4096
    hidden_dropout: Rate = 0.0
    """Fraction of elements dropped after attention and after the feed-forward, before the residual."""
    attention_dropout: Rate = 0.0
    """Dropout of attention probabilities; only 0 is supported."""

    def __post_init__(self) -> None:
        if self.head_dim == 0 and self.hidden_size % self.num_attention_heads == 0:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    @property
    def projection_size(self) -> int:
        """Width of all queries, or of all values: heads times head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def filter_parameters(self) -> int:
        """Parameters of one localized filter: 2H^2 + 2.5H, its norm included; 0 for plain attention."""
        if self.attention == "plain":
            return 0
        hidden, half = self.hidden_size, self.hidden_size // 2
        return 2 * (half * hidden) + half + 2 * (half * hidden) + hidden + hidden

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer: 18H^2 + 4.5H for the published shapes."""
        hidden = self.hidden_size
        attention = 4 * hidden * self.projection_size
        feed_forward = 3 * hidden * self.ffn_hidden_size
        return attention + feed_forward + self.filter_parameters + 2 * hidden

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the token embedding."""
        return self.vocab_size * self.hidden_size

    @property
    def head_parameters(self) -> int:
        """Parameters of the final norm and of the output matrix (which may be the embedding's)."""
        return self.hidden_size + self.vocab_size * self.hidden_size

    @property
    def unit_parameters(self) -> tuple[int, ...]:
        """Parameters of each unit: embedding, layers, head (its norm alone if the embedding is tied)."""
        head = self.hidden_size if self.tie_embeddings else self.head_parameters
        return (self.embedding_parameters, *[self.layer_parameters] * self.num_layers, head)

    @property
    def parameters(self) -> int:
        """All parameters, a tied embedding counted once."""
        return sum(self.unit_parameters)

    def layer_forward_flops(self, sequence_length: int) -> int:
        """Forward FLOP of one layer per token: 36H^2 + 2SH for the published shapes, causal attention.

        Each weight of a matrix product costs two FLOP; the convolutions are matrix products over all tokens.
        Attention scores, and their weighted sum of values, cover S/2 earlier tokens on average.
        """
        hidden = self.hidden_size
        filter_weights = 2 * hidden * hidden if self.attention == "localized_filter" else 0
        weights = 4 * hidden * self.projection_size + 3 * hidden * self.ffn_hidden_size + filter_weights
        return 2 * weights + 2 * sequence_length * self.projection_size

    @property
    def head_forward_flops(self) -> int:
        """Forward FLOP of the output head per token: 2VH."""
        return 2 * self.vocab_size * self.hidden_size

    def training_flops(self, sequence_length: int) -> int:
        """FLOP per trained token, forward and backward without recompute: three times the forward."""
        layers = self.num_layers * self.layer_forward_flops(sequence_length)
        return 3 * (layers + self.head_forward_flops)


def validate_model(model: ModelConfig) -> Iterator[Violation]:
    """Yield the violated constraints between the fields of a model."""
    if model.head_dim == 0:
        yield Violation(
            ("num_attention_heads",),
            f"{model.num_attention_heads} heads do not divide hidden_size {model.hidden_size}; "
            "give head_dim, or heads that divide",
        )
    if model.head_dim % 2:
        yield Violation(
            ("head_dim",), f"head_dim {model.head_dim} is odd; rotary embedding needs an even one"
        )
    if model.attention_dropout:
        yield Violation(
            ("attention_dropout",),
            f"wanted 0, got {model.attention_dropout:g}: fused attention draws its own masks, which would "
            "depend on the partition of the model, and takes an outside mask only with all S x S scores; "
            "use hidden_dropout",
        )
    if model.attention == "localized_filter" and model.hidden_size % 2:
        yield Violation(
            ("hidden_size",), f"{model.hidden_size} is odd; the localized filter has hidden_size / 2 channels"
        )


def load_model(path: str | Path, overrides: tuple[str, ...] = ()) -> ModelConfig:
    """Read a model file. Raises ConfigError with every violation."""
    document = read_document(path)
    for assignment in overrides:
        document = override(document, assignment)
    return build(document, ModelConfig, validate=validate_model)
