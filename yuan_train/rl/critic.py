"""The critic of PPO: a second trainer on the policy's ranks, under its plan, whose head computes values.

Also the reference of the policy's divergence, which is the policy as it was.

N = answer tokens of the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from yuan_train.checkpoint.load import Checkpoint, LocalShard, find_checkpoints, load_tensors
from yuan_train.config.errors import CheckpointError, TrainingError
from yuan_train.config.model import is_trained
from yuan_train.config.rl import CriticConfig
from yuan_train.models.transformer import Transformer
from yuan_train.objectives.losses import value_loss
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import Device
from yuan_train.parallel.groups import as_training_error
from yuan_train.parallel.zero import STATES
from yuan_train.rl.experience import Rows
from yuan_train.rl.job import RLJob
from yuan_train.rl.passes import Lanes, RowFeed, places, token_values
from yuan_train.rl.roles import RemoteReference
from yuan_train.train.build import build, publish
from yuan_train.train.engine import StepRequest
from yuan_train.train.stage import Targets
from yuan_train.train.step import Trainer


class Reference:
    """A copy on the host of the weights as they are when it is made; the cards hold no second model."""

    def __init__(self, runtime: RankRuntime, device: Device) -> None:
        self._runtime, self._device = runtime, device
        self.renew()

    def renew(self) -> None:
        """Take the weights as they are now."""
        self._weights = self._copied()

    def _copied(self) -> list[torch.Tensor]:
        finish_weight_sync(self._runtime)
        now = [bucket.weights for bucket in self._runtime.buckets]
        return [self._device.host_empty(tuple(own.shape), own.dtype).copy_(own) for own in now]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the reference's weights; afterwards the policy's, bit for bit."""
        policy = self._copied()
        _put(self._runtime, self._weights)
        try:
            yield
        finally:
            _put(self._runtime, policy)


def finish_weight_sync(runtime: RankRuntime) -> None:
    """Wait for stepped weights that are on their way to this rank."""
    with as_training_error(runtime.coord):
        for state in runtime.states:
            state.finish_weight_sync()


def _put(runtime: RankRuntime, weights: list[torch.Tensor]) -> None:
    with torch.no_grad():
        for bucket, kept in zip(runtime.buckets, weights, strict=True):
            bucket.weights.copy_(kept)


REFERENCE = "reference."
"""Of the names of a renewed reference's tensors in a checkpoint, before those that a policy's have."""


class Renewal:
    """Makes the reference the policy as it is, every so many steps; checkpoints hold what it was made of.

    These are weights in the precision of the model, each on one rank: of masters that are set to them the
    model gets the same ones again, under any plan.
    """

    def __init__(
        self,
        every: int,
        trainer: Trainer,
        reference: Reference | RemoteReference,
        *,
        held: dict[str, LocalShard],
    ) -> None:
        """`every`: steps, 0 for never; `held`: see `load_reference`."""
        self._every, self._trainer, self.reference = every, trainer, reference
        self.tensors = dict(held)
        """What this rank writes of it into a checkpoint, by global name; nothing before the first time."""

    def after(self, step: int) -> None:
        """Renew it if this step is one of those; collective over all ranks."""
        if self._every and step % self._every == 0:
            finish_weight_sync(self._trainer.runtime)
            self.reference.renew()
            self.tensors = _kept(self._trainer)


def load_reference(checkpoint: Checkpoint, trainer: Trainer) -> dict[str, LocalShard]:
    """Fill the policy's weights with those of a checkpoint's reference, if it was renewed; collective.

    Returns what this rank is to write of it into further checkpoints. Raises CheckpointError.
    """
    held = checkpoint.entries
    wanted = {f"{REFERENCE}{name}": shard for name, shard in trainer.tensors("held", STATES[:1]).items()}
    found = {name: shard for name, shard in wanted.items() if name in held}
    if not any(name.startswith(REFERENCE) for name in held):
        return {}
    load_tensors(checkpoint, found)
    publish(trainer)
    return _kept(trainer)


def _kept(trainer: Trainer) -> dict[str, LocalShard]:
    """A copy on the host of what this rank writes of the weights that are trained, by global name."""
    model = trainer.runtime.grid.plan.model
    precisions = {bucket.weights.dtype for bucket in trainer.runtime.buckets}
    dtype = precisions.pop() if precisions else torch.float32
    return {
        f"{REFERENCE}{name}": LocalShard(
            shard.shape,
            tuple(replace(box, tensor=box.tensor.to("cpu", dtype, copy=True)) for box in shard.boxes),
        )
        for name, shard in trainer.tensors("written", STATES[:1]).items()
        if is_trained(model, name.partition(".")[2])
    }


PREFIX = "critic."
"""Of the names of its tensors in a checkpoint, before those that a policy's have."""


class ValueLoss:
    """The mean clipped loss of the values of a batch's tokens."""

    def __init__(self, clip: float | None) -> None:
        self._clip = clip
        self._batch: tuple[Tensor, Tensor, Tensor] | None = None

    def begin(self, place_RS: Tensor, old_N: Tensor, returns_N: Tensor) -> None:
        """The next update is of these tokens, all on the device; see `Rows.place`."""
        self._batch = (place_RS, old_N, returns_N)

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """This micro-batch's share of the batch's loss, a scalar."""
        assert self._batch is not None
        place_RS, old_N, returns_N = self._batch
        place_BS, mask_BS = places(place_RS, targets)
        values = model.scores(hidden_BSH)
        old, returns = (of_N[place_BS].to(values) for of_N in (old_N, returns_N))
        losses = value_loss(values, old, returns, clip=self._clip).where(mask_BS, 0)
        return losses.sum() / len(returns_N)


class Critic:
    """Values of answers' tokens, and the steps that fit them to returns; every rank calls the same."""

    def __init__(self, job: RLJob, feed: RowFeed) -> None:
        """Build it, with the checkpoint's state if the run is resumed. Raises CheckpointError."""
        run, policy = job.run, job.policy
        assert run.critic is not None
        self.config: CriticConfig = run.critic
        self._clip_norm = run.optimizer.clip_grad_norm
        # It follows the policy's schedule.
        self._rate = (run.critic.learning_rate or run.optimizer.learning_rate) / run.optimizer.learning_rate
        self._loss = ValueLoss(run.critic.value_clip)
        model = replace(run.model, output="value")
        start = job.critic_start
        if start is None:
            start = policy.start
            if policy.checkpoint is not None:
                start = find_checkpoints(policy.run, anew=True)[1]
        own = replace(
            policy,
            run=replace(policy.run, model=model),
            plan=replace(policy.plan, model=model),
            checkpoint=None,
            start=start,
        )
        trainer, _ = build(own, feed=feed, objective=self._loss)
        self._lanes = Lanes(trainer, feed)
        self.steps = 0
        """Optimizer steps since the start of the run."""
        if policy.checkpoint is not None:
            self._restore(policy.checkpoint)

    def values(self, rows: Rows, count: int) -> Tensor:
        """The value of the state before each token of some rows: fp64 [N] on the host."""
        return self._lanes.record(rows, count, token_values, "values")

    def train(self, rows: Rows, old_N: Tensor, returns_N: Tensor, request: StepRequest) -> float:
        """One optimizer step on some rows, beside the policy's that was requested; returns the loss.

        Raises TrainingError, as `train_step` does.
        """
        trainer = self._lanes.trainer
        device = trainer.device.torch
        self._loss.begin(rows.place.to(device), old_N.to(device), returns_N.to(device))
        try:
            own = replace(
                request, lr=request.lr * self._rate, clip=self._clip_norm, scale=1.0, may_skip=False
            )
            result = self._lanes.train(rows, own)
        except TrainingError as error:
            raise type(error)(f"the critic: {error}") from error
        trainer.stopwatch.read()
        finish_weight_sync(trainer.runtime)
        self.steps += 1
        return result.loss

    def checkpoint_tensors(self) -> dict[str, LocalShard]:
        """What this rank writes of it into a checkpoint, by global name."""
        found = self._lanes.trainer.tensors()
        return {f"{PREFIX}{name}": shard for name, shard in found.items()}

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Fill weights and optimizer state; collective over all ranks."""
        trainer = self._lanes.trainer
        if not any(name.startswith(PREFIX) for name in checkpoint.entries):
            raise CheckpointError(
                f"{checkpoint.path}: it holds no critic, so the run before was not of name: ppo; begin with "
                "its weights (start.checkpoint), in another checkpoint.directory"
            )
        wanted = trainer.tensors("held")
        load_tensors(checkpoint, {f"{PREFIX}{name}": shard for name, shard in wanted.items()})
        publish(trainer)
        self.steps = int(checkpoint.state["rl"]["progress"]["critic_steps"])
        trainer.optimizer.set_step(self.steps)
