"""A model that reads the policy's answers: a reward model, or a teacher. It is whole on every rank of the
policy, and the ranks share the answers.

Its weights lie on the host, and on the card while it reads. Rows are made in the same way under every plan
and each is scored by one rank, so that the plan changes no bit of a score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.checkpoint.load import Checkpoint, find_checkpoint, load_weights
from yuan_train.config.errors import CheckpointError
from yuan_train.config.rl import RLConfig
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.transformer import Transformer, choose_ops
from yuan_train.parallel.device import CPU
from yuan_train.parallel.groups import sum_over_world
from yuan_train.rl.experience import Rows, make_score_rows
from yuan_train.rl.passes import Numbers, RowFeed, TokenRecorder, last_values, log_probs_at
from yuan_train.train.agreement import agreeing
from yuan_train.train.build import DTYPES
from yuan_train.train.stage import Targets
from yuan_train.train.step import Trainer


def find_reading_model(run: RLConfig, tokenizer: Tokenizer | None) -> Checkpoint | None:
    """The checkpoint of `reward.model` or `reward.teacher`, or None. Raises CheckpointError if it cannot read
    the answers."""
    if run.reward.reader is None:
        return None
    teaches = run.reward.teacher is not None
    found = find_checkpoint(run.reward.reader.checkpoint)
    model = found.model
    where = f"reward.{'teacher' if teaches else 'model'}.checkpoint: {found.path}"
    if model.output != run.reward.wanted_output:
        raise CheckpointError(
            f"{where} holds a reward model, which knows no probability of a token; wanted a language model, "
            "or reward.model for it"
            if teaches
            else f"{where} holds a language model, which has no score; wanted one that `yuan-train train` "
            "made with objective.kind: reward, or reward.teacher for it"
        )
    if model.vocab_size != run.model.vocab_size:
        raise CheckpointError(
            f"{where} has a vocabulary of {model.vocab_size}, the policy one of {run.model.vocab_size}; it "
            "reads the policy's tokens, so wanted one of the policy's tokenizer"
        )
    if found.tokenizer is not None and tokenizer is not None:
        own = Tokenizer.load(found.tokenizer)
        if own.digest != tokenizer.digest:
            raise CheckpointError(
                f"{where} was trained with another tokenizer than data.tokenizer {tokenizer.path}; it reads "
                "the policy's tokens, so wanted one of the policy's tokenizer"
            )
    if model.max_sequence_length < run.sequence_length:
        raise CheckpointError(
            f"{where} reads {model.max_sequence_length} tokens (model.max_sequence_length), but a prompt and "
            f"an answer may have {run.sequence_length}; shorten generation.max_new_tokens, or take another"
        )
    return found


class ReadingModel:
    """Reads answers; every rank calls the same, at the same time."""

    def __init__(self, checkpoint: Checkpoint, run: RLConfig, trainer: Trainer) -> None:
        """Read the weights. Raises CheckpointError, on all ranks, if they cannot be read."""
        self._trainer = trainer
        self._length = run.sequence_length
        self._rows = run.train.micro_batch_size
        self._packed = run.train.pack
        self._temperature = run.generation.temperature
        choose_ops(checkpoint.model, trainer.device.torch, DTYPES[run.train.precision])
        self._model = Transformer(checkpoint.model, device="cpu", dtype=DTYPES[run.train.precision]).eval()
        with agreeing():
            load_weights(checkpoint, self._model)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[float]:
        """The value at the last token of each sequence, a prompt and its answer.

        Where rows are packed, no sequence sees another. A value may be not finite.
        """
        if not sequences:
            return []
        rows = make_score_rows(sequences, length=self._length, packed=self._packed)
        return self._read(rows, len(sequences), last_values).tolist()

    def log_probs(self, batches: Sequence[Rows], counts: Sequence[int]) -> Tensor:
        """Of a teacher, the log-probability of each token of some batches of rows, of so many each: fp64 [N]
        on the host."""
        numbers = log_probs_at(self._temperature)
        pairs = zip(batches, counts, strict=True)
        return torch.cat([self._read(rows, count, numbers) for rows, count in pairs])

    def _read(self, rows: Rows, count: int, numbers: Numbers) -> Tensor:
        """What is recorded of rows, each read by one rank; on all of them."""
        feed = RowFeed(micro_batch_size=self._rows, device=CPU)
        feed.use(rows, first=0)
        rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        device = self._trainer.device.torch
        recorder = TokenRecorder(rows.place.to(device), count, numbers)
        self._model.to(device)
        with torch.no_grad():
            for number in range(rank, -(-rows.count // self._rows), num_ranks):
                batch = feed.take(number)
                assert batch.tokens_BS is not None and batch.targets_BS is not None
                hidden_BSH = self._model(batch.tokens_BS.to(device), **batch.resets.on(device))
                targets = Targets(batch.targets_BS.to(device), batch.places_B)
                recorder.total(self._model, hidden_BSH, targets, gradient_scale=1.0)
        self._model.to("cpu")
        runtime = self._trainer.runtime
        sum_over_world(runtime.groups, runtime.coord, recorder.scores, "the sum of a reading model's scores")
        return recorder.scores


def score_error(scores: Sequence[float]) -> str | None:
    """What is wrong with the scores of a group, if anything."""
    odd = next((score for score in scores if not math.isfinite(score)), None)
    return None if odd is None else f"the reward model: gave {odd}, no finite number"
