"""A trained reward model in the loop: whole on every rank of the policy, which share the answers.

Its weights lie on the host, and on the card while it scores. Rows are made in the same way under every plan
and each is scored by one rank, so that the plan changes no bit of a score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from yuan_train.checkpoint.load import Checkpoint, find_checkpoint, load_weights
from yuan_train.config.errors import CheckpointError, YuanError
from yuan_train.config.rl import RLConfig
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.documents import DocumentResets, resets_at
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.world_sum import sum_over_world
from yuan_train.rl.experience import fit_rows
from yuan_train.train.agreement import raise_together
from yuan_train.train.build import DTYPES
from yuan_train.train.step import Trainer


def find_reward_model(run: RLConfig, tokenizer: Tokenizer | None) -> Checkpoint | None:
    """The checkpoint of `reward.model`, or None. Raises CheckpointError if it cannot score the answers."""
    if run.reward.model is None:
        return None
    found = find_checkpoint(run.reward.model.checkpoint)
    model = found.model
    where = f"reward.model.checkpoint: {found.path}"
    if model.output != "value":
        raise CheckpointError(
            f"{where} holds a language model, which has no score; wanted one that `yuan-train train` made "
            "with objective.kind: reward"
        )
    if model.vocab_size != run.model.vocab_size:
        raise CheckpointError(
            f"{where} has a vocabulary of {model.vocab_size}, the policy one of {run.model.vocab_size}; it "
            "reads the policy's tokens, so train it with the policy's tokenizer"
        )
    if found.tokenizer is not None and tokenizer is not None:
        own = Tokenizer.load(found.tokenizer)
        if own.digest != tokenizer.digest:
            raise CheckpointError(
                f"{where} was trained with another tokenizer than data.tokenizer {tokenizer.path}; it reads "
                "the policy's tokens, so train it with the policy's tokenizer"
            )
    if model.max_sequence_length < run.sequence_length:
        raise CheckpointError(
            f"{where} reads {model.max_sequence_length} tokens (model.max_sequence_length), but a prompt and "
            f"an answer may have {run.sequence_length}; shorten generation.max_new_tokens, or train another"
        )
    return found


class RewardModel:
    """Scores answers; every rank calls the same, at the same time."""

    def __init__(self, checkpoint: Checkpoint, run: RLConfig, trainer: Trainer) -> None:
        """Read the weights. Raises CheckpointError, on all ranks, if they cannot be read."""
        self._trainer = trainer
        self._length = run.sequence_length
        self._rows = run.train.micro_batch_size
        self._packed = run.train.pack
        self._model = Transformer(checkpoint.model, device="cpu", dtype=DTYPES[run.train.precision]).eval()
        fault: YuanError | None = None
        try:
            load_weights(checkpoint, self._model)
        except YuanError as error:
            fault = error
        raise_together(fault)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The value at the last token of each sequence, a prompt and its answer.

        Where rows are packed, no sequence sees another. A value may be not finite.
        """
        sizes = [len(sequence) for sequence in sequences]
        bins = fit_rows(sizes, self._length) if self._packed else [[i] for i in range(len(sizes))]
        batches = [bins[first : first + self._rows] for first in range(0, len(bins), self._rows)]
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        scores = torch.zeros(len(sequences), dtype=torch.float64)
        self._model.to(self._trainer.device)
        for batch in batches[rank::num_ranks]:
            members = [i for row in batch for i in row]
            scores[members] = self._score_rows(sequences, batch)
        self._model.to("cpu")
        runtime = self._trainer.runtime
        sum_over_world(runtime.groups, runtime.coord, scores, "the sum of the reward model's scores")
        return scores.tolist()

    @torch.no_grad()
    def _score_rows(self, sequences: Sequence[Sequence[int]], rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Scores of the sequences of some rows, in their order: fp64 on the host."""
        tokens_BS = torch.zeros((len(rows), self._length), dtype=torch.int64)
        starts_BS = torch.zeros(tokens_BS.shape, dtype=torch.bool)
        ends: list[tuple[int, int]] = []
        for row, members in enumerate(rows):
            at = 0
            for i in members:
                starts_BS[row, at] = True
                end = at + len(sequences[i])
                tokens_BS[row, at:end] = torch.tensor(sequences[i])
                ends.append((row, end - 1))
                at = end
            if at < self._length:
                starts_BS[row, at] = True
        device = self._trainer.device
        shared = any(len(members) > 1 for members in rows)
        resets = resets_at(starts_BS) if shared else DocumentResets()
        hidden_BSH = self._model(tokens_BS.to(device), **resets.on(device))
        at_row, at_token = zip(*ends, strict=True)
        return self._model.scores(hidden_BSH[list(at_row), list(at_token)]).double().cpu()


def score_error(scores: Sequence[float]) -> str | None:
    """What is wrong with the scores of a group, if anything."""
    odd = next((score for score in scores if not math.isfinite(score)), None)
    return None if odd is None else f"the reward model: gave {odd}, no finite number"
