"""What a person may not have meant, said at the start of a run."""

from __future__ import annotations

from yuan_train.config.load import as_plain
from yuan_train.data.loader import Blend
from yuan_train.train.agreement import flatten
from yuan_train.train.job import Job

MANY_EPOCHS = 20
"""A corpus that is read so often is told: mostly a step takes more tokens than was thought."""
_FREE = "train.trace"
"""A key that changes no weight."""


def changes(job: Job) -> list[str]:
    """What of training is another than in the run that saved the checkpoint, as `KEY OLD -> NEW`."""
    if job.checkpoint is None:
        return []
    saved, now = job.checkpoint.state.get("run", {}), as_plain(job.run)
    found: list[str] = []
    for part in ("train", "optimizer", "objective"):
        before, after = flatten(saved.get(part, {}), part), flatten(now.get(part, {}), part)
        found += [
            f"{key} {before[key]} -> {value}"
            for key, value in after.items()
            if key in before and before[key] != value and not key.startswith(_FREE)
        ]
    return found


def many_epochs(job: Job) -> list[str]:
    """Of each corpus that the run reads many times over, how often."""
    if not isinstance(job.train, Blend):
        return []
    found: list[str] = []
    samples = job.run.train.steps * job.run.train.global_batch_size
    for corpus, weight in zip(job.train.corpora, job.train.weights, strict=True):
        epochs = weight * samples / corpus.samples_per_epoch
        if epochs >= MANY_EPOCHS:
            found.append(
                f"the run reads {corpus.prefix} {epochs:,.0f} times over: it has "
                f"{corpus.samples_per_epoch:,} samples, a step takes {job.run.train.global_batch_size:,}"
            )
    return found
