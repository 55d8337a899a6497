"""Loss and perplexity of a trained model on token files, on one device."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import torch

from yuan_train.checkpoint.load import Checkpoint, load_weights
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import ModelConfig
from yuan_train.data.loader import SampleSpec, open_corpora
from yuan_train.data.prompts import read_pairs
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.attention import find_resets
from yuan_train.models.transformer import Transformer, choose_ops
from yuan_train.objectives.losses import reward_loss
from yuan_train.train.agreement import keep_wide_sums
from yuan_train.train.stage import row_scores

BATCH_SIZE = 8


@dataclass(frozen=True)
class Evaluation:
    """Mean loss in nats per token, its perplexity exp(loss), and the tokens and sequences it is over."""

    loss: float
    perplexity: float
    tokens: int
    sequences: int


@dataclass(frozen=True)
class TrainedModel:
    """A complete model with the weights of a checkpoint, on one device."""

    model: Transformer
    tokenizer: Tokenizer | None
    resets: dict[str, bool]
    """What the model was trained to reset at document ends: keyword arguments of `find_resets`."""

    @property
    def eod_id(self) -> int | None:
        """The tokenizer's end-of-document id; None without a tokenizer."""
        return self.tokenizer.eod_id if self.tokenizer is not None else None

    @property
    def stop_ids(self) -> frozenset[int]:
        """The tokens that end a generated text; none without a tokenizer."""
        return self.tokenizer.stop_ids if self.tokenizer is not None else frozenset()


def load_trained(
    checkpoint: Checkpoint, *, tokenizer: str | Path | None = None, dtype: torch.dtype = torch.float32
) -> TrainedModel:
    """The model of a checkpoint, and its tokenizer unless another is given. Raises YuanError."""
    tokenizer_path = tokenizer or checkpoint.tokenizer
    if dtype == torch.float16:
        keep_wide_sums()
    choose_ops(checkpoint.model, "cpu", dtype)
    model = Transformer(checkpoint.model, dtype=dtype)
    load_weights(checkpoint, model)
    return TrainedModel(
        model=model.eval(),
        tokenizer=Tokenizer.load(tokenizer_path) if tokenizer_path is not None else None,
        resets=checkpoint.resets,
    )


def check_has_vocabulary(model: ModelConfig) -> None:
    """Raise ConfigError for a reward model, which predicts no token."""
    if model.output == "value":
        raise ConfigError(
            f"model {model.name}: output is value, so it predicts no token; "
            "`yuan-train evaluate --pairs` measures a reward model"
        )


@torch.no_grad()
def evaluate(
    trained: TrainedModel, prefix: str, *, sequence_length: int, max_sequences: int = 0
) -> Evaluation:
    """Mean loss over one corpus, in sequences of `sequence_length` tokens.

    `max_sequences` limits it to the first so many sequences (0: all of them). Raises DataError for invalid
    token files, ConfigError for a sequence length beyond the model's.
    """
    model = trained.model
    check_has_vocabulary(model.config)
    if not 0 < sequence_length <= model.config.max_sequence_length:
        raise ConfigError(
            f"sequence_length: wanted 1 to {model.config.max_sequence_length}, got {sequence_length}"
        )
    spec = SampleSpec(sequence_length=sequence_length, seed=0, vocab_size=model.config.vocab_size)
    blend = open_corpora([(prefix, 1.0)], spec)
    sequences = blend.corpora[0].samples_per_epoch
    if max_sequences:
        sequences = min(sequences, max_sequences)
    total = 0.0
    for first in range(0, sequences, BATCH_SIZE):
        batch = blend.batch(first, min(BATCH_SIZE, sequences - first))
        hidden_BSH = hidden_states(trained, torch.from_numpy(batch.inputs))
        total += float(model.loss(hidden_BSH, torch.from_numpy(batch.targets).to(hidden_BSH.device)))
    tokens = sequences * sequence_length
    loss = total / tokens
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Evaluation(loss=loss, perplexity=perplexity, tokens=tokens, sequences=sequences)


@dataclass(frozen=True)
class PairEvaluation:
    """How a reward model judges pairs: the share in which the chosen answer's score is the greater one, the
    mean loss -log sigmoid(s_c - s_r) and the mean margin s_c - s_r."""

    accuracy: float
    loss: float
    margin: float
    pairs: int


@torch.no_grad()
def evaluate_pairs(
    trained: TrainedModel, path: str, *, sequence_length: int, max_pairs: int = 0
) -> PairEvaluation:
    """Judge the pairs of a .jsonl file (`max_pairs`: the first so many; 0: all).

    Raises ConfigError if the model is no reward model, DataError for a line of another form.
    """
    model = trained.model
    if model.config.output != "value":
        raise ConfigError(
            f"model {model.config.name}: its head is of a vocabulary; --pairs needs a reward model "
            "(objective.kind: reward)"
        )
    length = model.config.max_sequence_length
    pairs = read_pairs(
        path,
        trained.tokenizer,
        sequence_length=min(sequence_length, length),
        seed=0,
        vocab_size=model.config.vocab_size,
        trained="end",
    )
    count = min(len(pairs), max_pairs) if max_pairs else len(pairs)
    margins: list[torch.Tensor] = []
    for first in range(0, 2 * count, BATCH_SIZE):
        batch = pairs.in_file_order(first, min(BATCH_SIZE, 2 * count - first))
        hidden_BSH = model(torch.from_numpy(batch.inputs).to(model.score.weight.device))
        targets_BS = torch.from_numpy(batch.targets).to(hidden_BSH.device)
        scores_P2 = row_scores(model, hidden_BSH, targets_BS).unflatten(0, (-1, 2))
        margins.append((scores_P2[:, 0] - scores_P2[:, 1]).double().cpu())
    margin_P = torch.cat(margins)
    zero_P = torch.zeros_like(margin_P)
    return PairEvaluation(
        accuracy=float((margin_P > 0).double().mean()),
        loss=float(reward_loss(margin_P, zero_P).mean()),
        margin=float(margin_P.mean()),
        pairs=count,
    )


@torch.no_grad()
def hidden_states(trained: TrainedModel, tokens_BS: torch.Tensor) -> torch.Tensor:
    """Final hidden states [B, S, H] of tokens [B, S], with the resets that the model was trained with."""
    model = trained.model
    device = model.output_weight.device
    resets = find_resets(tokens_BS, eod_id=trained.eod_id, **trained.resets)
    return model(tokens_BS.to(device), **resets.on(device))
