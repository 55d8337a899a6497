"""Configuration of Yuan 2.0 for transformers; part of a model exported by yuan_train. Apache-2.0."""

from typing import Any

from transformers import PretrainedConfig


class YuanConfig(PretrainedConfig):
    """Sizes, special tokens, and what the model was trained to reset where a document ends.

    Arguments that other models do not have:
        localized_filter: queries and keys come from the filtered input; False for plain attention.
        moe_config: sizes of Yuan 2.0-M32's experts; None for a dense model.
        rotary_dim: the first dims of each head, which are rotated; None: all.
        rotary_form: rounding of the rotary tables: `exact`, `bf16_frequencies` as M32 was trained, or `bf16`.
        attention_projection_size: heads times head_dim; hidden_size for the published models.
        eod_token: id that ends a document; the next three take effect after it.
        reset_position_ids: rotary positions count from the document's start.
        reset_attention_mask: tokens attend only within their document.
        reset_filter: the localized filter sees only tokens of its document.
        labels_are_shifted: `labels` already hold the *next* tokens, as in the published class; False if the
            model shall shift them, as most classes of transformers do.
    """

    model_type = "yuan"
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self,
        vocab_size: int = 135040,
        hidden_size: int = 2048,
        intermediate_size: int = 8192,
        num_hidden_layers: int = 24,
        num_attention_heads: int = 32,
        head_dim: int | None = None,
        hidden_act: str = "silu",
        max_position_embeddings: int = 8192,
        model_max_length: int = 8192,
        initializer_range: float = 0.02,
        rms_norm_eps: float = 1e-6,
        rope_theta: float = 10000.0,
        use_cache: bool = True,
        pad_token_id: int = 77185,
        bos_token_id: int = 77185,
        eos_token_id: int = 77185,
        tie_word_embeddings: bool = True,
        localized_filter: bool = True,
        causal_mask: bool = True,
        use_flash_attention: bool = False,
        eod_token: int = 77185,
        sep_token: int = 77187,
        mask_token: int = 134953,
        reset_position_ids: bool = True,
        reset_attention_mask: bool = False,
        reset_filter: bool = False,
        use_loss_mask: bool = False,
        labels_are_shifted: bool = True,
        dropout: float = 0.0,
        moe_config: dict[str, Any] | None = None,
        rotary_dim: int | None = None,
        rotary_form: str = "exact",
        **others: Any,
    ) -> None:
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self.intermediate_size = intermediate_size
        self.num_hidden_layers = num_hidden_layers
        self.num_attention_heads = num_attention_heads
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.attention_projection_size = self.head_dim * num_attention_heads
        others.pop("attention_projection_size", None)
        self.moe_config = moe_config
        self.rotary_dim = rotary_dim or self.head_dim
        self.rotary_form = rotary_form
        self.hidden_act = hidden_act
        self.max_position_embeddings = max_position_embeddings
        self.model_max_length = model_max_length
        self.initializer_range = initializer_range
        self.rms_norm_eps = rms_norm_eps
        self.rope_theta = rope_theta
        self.use_cache = use_cache
        self.localized_filter = localized_filter
        self.causal_mask = causal_mask
        self.use_flash_attention = use_flash_attention
        self.eod_token = eod_token
        self.sep_token = sep_token
        self.mask_token = mask_token
        self.reset_position_ids = reset_position_ids
        self.reset_attention_mask = reset_attention_mask
        self.reset_filter = reset_filter
        self.use_loss_mask = use_loss_mask
        self.labels_are_shifted = labels_are_shifted
        self.dropout = dropout
        super().__init__(
            pad_token_id=pad_token_id,
            bos_token_id=bos_token_id,
            eos_token_id=eos_token_id,
            tie_word_embeddings=tie_word_embeddings,
            **others,
        )
