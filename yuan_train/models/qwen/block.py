"""Qwen's layer: Llama's, with the biases or head norms that the model asks for."""

from yuan_train.models.llama.block import build_block

__all__ = ["build_block"]
