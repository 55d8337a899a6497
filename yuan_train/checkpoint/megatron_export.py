"""Exports a checkpoint to Yuan 2.0's original per-rank files, of any tensor-parallel width and stages."""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from yuan_train.checkpoint.load import Checkpoint, WholeTensorReader
from yuan_train.checkpoint.megatron_import import FILE, TRACKER, Tensors, layer_names, shard_shape, take_shard
from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import ModelConfig
from yuan_train.models.yuan.hf import published_layout


def export_megatron(
    checkpoint: Checkpoint,
    out: str | Path,
    *,
    tensor: int = 1,
    stages: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Path:
    """Write a checkpoint's weights as `OUT/release/mp_rank_*`, for `tensor` ranks per stage.

    `stages` has the number of layers of each pipeline stage (None: one stage); `dtype` None keeps that of the
    checkpoint. One rank's shards are in memory at a time.

    Raises CheckpointError if the partition does not fit the model or `out` cannot be written.
    """
    out, model = Path(out), checkpoint.model
    counts = list(stages or [model.num_layers])
    if sum(counts) != model.num_layers or min(counts) < 0:
        raise CheckpointError(f"stages of {counts} layers; the model has {model.num_layers}")
    if out.exists():
        raise CheckpointError(f"{out}: already exists; give another --out")
    if model.router == "softmax":
        raise CheckpointError(
            f"{checkpoint.path}: router softmax; the original code has the attention router"
        )
    if model.num_attention_heads % tensor or not model.tie_embeddings or model.attention == "plain":
        raise CheckpointError(
            f"{checkpoint.path}: {model.num_attention_heads} heads over {tensor} ranks, tied embeddings: "
            f"{model.tie_embeddings}, attention: {model.attention}; the original code does not support this"
        )
    reader = WholeTensorReader(checkpoint)
    temporary = out.with_name(f".{out.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        for stage in range(len(counts)):
            for rank in range(tensor):
                name = f"mp_rank_{rank:02d}" + (f"_{stage:03d}" if len(counts) > 1 else "")
                rank_directory = temporary / "release" / name
                rank_directory.mkdir(parents=True)
                content = _rank_content(model, reader, counts, stage, rank, tensor, dtype)
                torch.save(content, rank_directory / FILE)
        (temporary / TRACKER).write_text("release\n", encoding="utf-8")
        temporary.rename(out)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{out}: cannot be written: {error}; give another --out") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _rank_content(
    model: ModelConfig,
    reader: WholeTensorReader,
    counts: list[int],
    stage: int,
    rank: int,
    width: int,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The content of the file of one stage and tensor rank."""
    mappings = {mapping.name: mapping for mapping in published_layout(model)}

    def shard_of(name: str, sharding: str) -> torch.Tensor:
        mapping = mappings[name]
        if shard_shape(mapping.shape, sharding, width) is None:
            raise CheckpointError(f"{name}: shape {list(mapping.shape)} does not divide over {width} ranks")
        full = reader.read(name, mapping.shape)
        shard = take_shard(full, sharding, rank, width).to(dtype or full.dtype)
        return shard.unsqueeze(-1).clone() if mapping.conv2d else shard.clone()

    encoder: Tensors = {}
    first = sum(counts[:stage])
    for local in range(counts[stage]):
        for ours, (original, sharding) in layer_names(model).items():
            encoder[f"layers.{local}.{original}"] = shard_of(f"layers.{first + local}.{ours}", sharding)
    language: dict[str, Any] = {"encoder": encoder}
    content: dict[str, Any] = {"language_model": language}
    last = stage == len(counts) - 1
    if last:
        encoder["final_layernorm.weight"] = shard_of("final_norm.weight", "whole")
    if stage == 0:
        language["embedding"] = {"word_embeddings": {"weight": shard_of("embedding.weight", "rows")}}
    elif last:
        content["word_embeddings_for_head"] = {"weight": shard_of("embedding.weight", "rows")}
    return {"checkpoint_version": 3.0, "iteration": 0, "args": _arguments(model), "model": content}


def _arguments(model: ModelConfig) -> argparse.Namespace:
    """The sizes, as the original code saves them."""
    experts = {}
    if model.num_experts:
        experts = {
            "num_experts": model.num_experts,
            "moe_router_topk": model.experts_per_token,
            "use_attention_router": True,
            # The router's heads must be as many as the tokens: else the original code mixes tokens.
            "num_attention_router_heads": model.max_sequence_length,
            "seq_length": model.max_sequence_length,
        }
    return argparse.Namespace(
        kv_channels=model.head_dim,
        rotary_percent=model.rotary_size / model.head_dim,
        rotary_base=model.rope_base,
        **experts,
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.expert_width if model.num_experts else model.ffn_hidden_size,
        padded_vocab_size=model.vocab_size,
        max_position_embeddings=model.max_sequence_length,
        tokenizer_type="YuanTokenizer",
    )
