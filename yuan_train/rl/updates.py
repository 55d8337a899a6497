"""One batch of answers trained: log-probabilities that the loss needs, advantages, optimizer steps.

With PPO the critic takes steps too: a second trainer on the policy's ranks, under its plan, whose head
computes values. The reference of the policy's divergence, which is the policy as it was, is here as well.

Advantages say how much better an answer, or a token of it, was than expected. Q = prompts, G = answers to
each (a group), B = answers, S = tokens of a row, N = answer tokens of the batch. Rewards are one number an
answer. The functions return a number an answer, [Q, G], or, where they whiten over tokens, a number a token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.checkpoint.load import Checkpoint, LocalShard, find_checkpoints, load_tensors
from yuan_train.config.errors import CheckpointError, TrainingError
from yuan_train.config.model import is_trained
from yuan_train.config.rl import AlgorithmConfig, CriticConfig, RLConfig
from yuan_train.models.transformer import Transformer
from yuan_train.objectives.losses import BatchTotals, explained_variance, reward_penalty, value_loss
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import Device
from yuan_train.parallel.groups import as_training_error, guard_world_collective, sum_over_world
from yuan_train.parallel.zero import STATES
from yuan_train.rl.experience import Group, Rows, make_rows
from yuan_train.rl.job import RLJob
from yuan_train.rl.passes import (
    SUMS,
    Lanes,
    PolicyBatch,
    PolicyLoss,
    ReadingModel,
    RowFeed,
    log_probs_at,
    places,
    token_values,
)
from yuan_train.rl.roles import RemoteReadingModel, RemoteReference
from yuan_train.train.build import build, publish
from yuan_train.train.engine import StepRequest
from yuan_train.train.stage import Targets
from yuan_train.train.step import Trainer

# --- the reference ------------------------------------------------------------------------------------------


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


# --- the critic ---------------------------------------------------------------------------------------------

CRITIC = "critic."
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
        return {f"{CRITIC}{name}": shard for name, shard in found.items()}

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Fill weights and optimizer state; collective over all ranks."""
        trainer = self._lanes.trainer
        if not any(name.startswith(CRITIC) for name in checkpoint.entries):
            raise CheckpointError(
                f"{checkpoint.path}: it holds no critic, so the run before was not of name: ppo; begin with "
                "its weights (start.checkpoint), in another checkpoint.directory"
            )
        wanted = trainer.tensors("held")
        load_tensors(checkpoint, {f"{CRITIC}{name}": shard for name, shard in wanted.items()})
        publish(trainer)
        self.steps = int(checkpoint.state["rl"]["progress"]["critic_steps"])
        trainer.optimizer.set_step(self.steps)


# --- the update ---------------------------------------------------------------------------------------------


def lengths_of(groups: Sequence[Group]) -> list[int]:
    """Tokens of each answer that the policy drew."""
    return [sample.num_drawn for group in groups for sample in group.samples]


def _drawn(groups: Sequence[Group]) -> Tensor:
    """The log-probability of each token when it was drawn: fp64 [N] on the host."""
    return torch.tensor(
        [p for group in groups for sample in group.samples for p in sample.log_probs], dtype=torch.float64
    )


def token_advantages(
    groups: Sequence[Group], algorithm: AlgorithmConfig, *, penalty_N: Tensor | None = None
) -> Tensor:
    """Advantages fp64 [N], by answer. `penalty_N`: what each token loses of the reward.

    What compares the answers of a group takes the penalties of an answer's tokens from its reward; `return`
    takes each from that token on.
    """
    mask_BT, penalty_BT = _by_answer(groups, penalty_N)
    rewards_QG = torch.tensor([group.rewards for group in groups], dtype=torch.float64)
    if algorithm.advantage == "return":
        found_BT = returns(rewards_QG.flatten(), penalty_BT, mask_BT)
    else:
        rewards_QG = rewards_QG - penalty_BT.sum(1).view_as(rewards_QG)
        found_BT = _of_answers(rewards_QG, algorithm).reshape(-1, 1).expand(mask_BT.shape)
    if algorithm.scale == "batch":
        found_BT = whiten(found_BT, mask_BT)
    return found_BT[mask_BT]


def critic_advantages(
    groups: Sequence[Group], values_N: Tensor, critic: CriticConfig, *, penalty_N: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, whitened, and the returns to fit values to: fp64 [N] each, by answer.

    `values_N` are the critic's, of the state before each token; `penalty_N`: see `token_advantages`.
    """
    rewards_B = torch.tensor([r for group in groups for r in group.rewards], dtype=torch.float64)
    mask_BT, penalty_BT = _by_answer(groups, penalty_N)
    values_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    values_BT[mask_BT] = values_N.double()
    advantages_BT, returns_BT = gae(
        rewards_B, penalty_BT, values_BT, mask_BT, gamma=critic.gamma, lam=critic.lam
    )
    return advantages_BT[mask_BT], returns_BT[mask_BT]


def _by_answer(groups: Sequence[Group], penalty_N: Tensor | None) -> tuple[Tensor, Tensor]:
    """Where answers have tokens, and what each token loses of the reward: [B, T] both."""
    lengths = torch.tensor(lengths_of(groups))
    mask_BT = torch.arange(int(lengths.max())) < lengths.unsqueeze(1)
    penalty_BT = torch.zeros(mask_BT.shape, dtype=torch.float64)
    if penalty_N is not None:
        penalty_BT[mask_BT] = penalty_N.double()
    return mask_BT, penalty_BT


def _of_answers(rewards_QG: Tensor, algorithm: AlgorithmConfig) -> Tensor:
    found_QG = (rloo if algorithm.advantage == "leave_one_out" else dr_grpo)(rewards_QG)
    if algorithm.scale == "group":
        found_QG = found_QG / (rewards_QG.std(1, keepdim=True) + STD_EPSILON)
    return found_QG


@dataclass(frozen=True)
class CriticResult:
    """What came of a batch for the critic; the same on all ranks."""

    loss: float
    """Mean over the updates."""
    explained_variance: float | None
    """Of the returns, by the values at the batch's start; None if all returns are equal."""


@dataclass(frozen=True)
class UpdateResult:
    """What came of a batch; the same on all ranks."""

    loss: float
    """Mean over the updates."""
    grad_norm: float
    steps: int
    """Optimizer steps; fewer than updates where there was nothing to learn, or gradients overflowed."""
    overflowed: bool
    tokens: int
    """Read in all."""
    measures: dict[str, float | None]
    """Means over the tokens of all updates that were made, of the first one alone `gap`; and `ratio_max` and
    `gap_max`. Empty if none was made."""
    critic: CriticResult | None = None
    teacher_kl: float | None = None
    """The mean over tokens of log policy - log teacher; None without a teacher."""


@dataclass(frozen=True)
class _Part:
    """The groups of one update."""

    groups: Sequence[Group]
    rows: Rows
    first: int
    """Of its tokens among those of the batch."""
    count: int
    """Its tokens."""
    trained: Rows
    """Of the loss: `rows`, or without the answers that reached the limit."""

    def of(self, values_N: Tensor | None) -> Tensor | None:
        """Its share of values of the whole batch."""
        return None if values_N is None else values_N[self.first : self.first + self.count]


class Updater:
    """Trains batches of answers with the engine of `train/`, under whatever plan."""

    def __init__(
        self,
        run: RLConfig,
        trainer: Trainer,
        feed: RowFeed,
        loss: PolicyLoss,
        *,
        reference: Reference | RemoteReference | None,
        critic: Critic | None = None,
        teacher: ReadingModel | RemoteReadingModel | None = None,
    ) -> None:
        self._run, self._trainer, self._loss = run, trainer, loss
        self._length = trainer.runtime.grid.plan.sequence_length
        self._reference = reference
        self._needs_old = run.algorithm.updates > 1 or run.algorithm.epochs > 1 or loss.needs_old
        self._critic, self._teacher = critic, teacher
        self._lanes = Lanes(trainer, feed)

    def train(self, groups: Sequence[Group], request: StepRequest) -> UpdateResult:
        """The optimizer steps of one batch, each as a request says; collective over all ranks.

        An update whose advantages are all 0, without a divergence in the loss, is left out, and one without
        answers to train: it would only decay the weights. Raises TrainingError, as `train_step` does.
        """
        parts = self._parts(groups)
        remote = self._reference if isinstance(self._reference, RemoteReference) else None
        if remote is not None:
            # Other cards score meanwhile.
            remote.begin([part.rows.anew for part in parts], [part.count for part in parts])
        old = self._score(parts) if self._needs_old else None
        reference = remote.finish() if remote is not None else None
        if isinstance(self._reference, Reference):
            with self._reference.in_place():
                reference = self._score([replace(part, rows=part.rows.anew) for part in parts])
        advantages, fit = self._advantages(groups, parts, self._penalty(groups, old, reference))
        lesson = self._lesson(groups, parts, old)
        if lesson is not None:
            advantages = advantages + lesson
        losses: list[float] = []
        norms: list[float] = []
        steps, overflowed, is_first = 0, False, True
        for part in parts * self._run.algorithm.epochs:
            batch = self._batch(part, advantages, old, reference)
            if not self._learns(batch):
                losses.append(0.0)
                norms.append(0.0)
                continue
            self._loss.begin(batch, is_first=is_first)
            is_first = False
            result = self._lanes.train(part.trained, request)
            losses.append(result.loss)
            norms.append(result.grad_norm)
            steps += not result.skipped
            overflowed |= result.skipped
        critic = None
        if fit is not None:
            critic = self._fit_critic(parts, *fit, request)
        return UpdateResult(
            loss=math.fsum(losses) / len(losses),
            grad_norm=max(norms) if all(map(math.isfinite, norms)) else math.inf,
            steps=steps,
            overflowed=overflowed,
            tokens=sum(part.rows.used for part in parts) * self._run.algorithm.epochs,
            measures={} if is_first else self._measures(),
            critic=critic,
            teacher_kl=self._teacher_kl(lesson),
        )

    def _advantages(
        self, groups: Sequence[Group], parts: Sequence[_Part], penalty_N: Tensor | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Advantages of rewards, and with a critic its values and what they are fitted to: fp64 [N]."""
        if self._critic is None:
            return token_advantages(groups, self._run.algorithm, penalty_N=penalty_N), None
        values = torch.cat([self._critic.values(part.rows, part.count) for part in parts])
        advantages, returns = critic_advantages(groups, values, self._critic.config, penalty_N=penalty_N)
        return advantages, (values, returns)

    def _lesson(self, groups: Sequence[Group], parts: Sequence[_Part], old: Tensor | None) -> Tensor | None:
        """What a teacher adds to advantages: fp64 [N]; None without one.

        The gradient of KL(policy || teacher) at a state, from the token drawn there (arXiv 2306.13649, eq. 4,
        with all of the data the student's own): how later tokens are drawn is taken as given.
        """
        if self._teacher is None or self._run.reward.teacher is None:
            return None
        said = self._teacher.log_probs([part.rows.anew for part in parts], [part.count for part in parts])
        return self._run.reward.teacher.weight * (said - (_drawn(groups) if old is None else old))

    def _teacher_kl(self, lesson: Tensor | None) -> float | None:
        """The mean over tokens of log policy - log teacher."""
        teacher = self._run.reward.teacher
        return None if lesson is None or teacher is None else -float(lesson.mean()) / teacher.weight

    def _fit_critic(
        self, parts: Sequence[_Part], values_N: Tensor, returns_N: Tensor, request: StepRequest
    ) -> CriticResult:
        """The critic's step of each update."""
        assert self._critic is not None
        # Two models' messages are not under way at once.
        finish_weight_sync(self._trainer.runtime)
        losses: list[float] = []
        for part in list(parts) * self._run.algorithm.epochs:
            here = slice(part.first, part.first + part.count)
            losses.append(self._critic.train(part.rows, values_N[here], returns_N[here], request))
        return CriticResult(math.fsum(losses) / len(losses), explained_variance(values_N, returns_N))

    def _parts(self, groups: Sequence[Group]) -> list[_Part]:
        size = len(groups) // self._run.algorithm.updates
        parts: list[_Part] = []
        first = 0
        for start in range(0, len(groups), size):
            members = groups[start : start + size]
            count = sum(lengths_of(members))
            rows = trained = make_rows(members, length=self._length, packed=self._run.train.pack)
            if self._run.algorithm.mask_truncated:
                trained = make_rows(
                    members, length=self._length, packed=self._run.train.pack, without_truncated=True
                )
            parts.append(_Part(members, rows, first, count, trained))
            first += count
        return parts

    def _batch(
        self, part: _Part, advantages: Tensor, old: Tensor | None, reference: Tensor | None
    ) -> PolicyBatch:
        device = self._trainer.device.torch
        lengths = lengths_of(part.groups)
        lengths_N = torch.tensor(lengths, device=device)
        # All of the answers that the loss is a mean over.
        trained = lengths
        if self._run.algorithm.mask_truncated:
            samples = [sample for group in part.groups for sample in group.samples]
            trained = [sample.num_drawn for sample in samples if sample.ended != "limit"]

        def put(values: Tensor | None) -> Tensor | None:
            found = part.of(values)
            return None if found is None else found.to(device)

        return PolicyBatch(
            place_RS=part.trained.place.to(device),
            sampled=_drawn(part.groups).to(device),
            advantages=advantages[part.first : part.first + part.count].to(device),
            lengths=lengths_N.repeat_interleave(lengths_N),
            totals=BatchTotals(
                samples=len(trained), tokens=sum(trained), max_new_tokens=self._run.generation.max_new_tokens
            ),
            old=put(old),
            reference=put(reference),
        )

    def _learns(self, batch: PolicyBatch) -> bool:
        kl = self._run.algorithm.kl
        if not batch.totals.samples:
            return False
        place_RS = batch.place_RS
        return bool(batch.advantages[place_RS[place_RS >= 0]].any()) or (
            kl.coefficient > 0 and kl.where == "loss"
        )

    def _penalty(
        self, groups: Sequence[Group], old: Tensor | None, reference: Tensor | None
    ) -> Tensor | None:
        """What the divergence from the reference takes from each token's reward: fp64 [N]."""
        kl = self._run.algorithm.kl
        if reference is None or kl.where != "reward":
            return None
        old = _drawn(groups) if old is None else old
        return reward_penalty(old, reference, kl.estimator, coefficient=kl.coefficient)

    def _score(self, parts: Sequence[_Part]) -> Tensor:
        """Log-probabilities of all tokens under the weights as they are; collective over all ranks."""
        numbers = log_probs_at(self._run.generation.temperature)
        found = [self._lanes.record(part.rows, part.count, numbers, "log-probabilities") for part in parts]
        return torch.cat(found)

    def _measures(self) -> dict[str, float | None]:
        """What the loss has measured in the updates of a batch, of all ranks."""
        runtime = self._trainer.runtime
        sums = self._loss.sums.cpu() * (runtime.coord.tensor_rank == 0)
        sum_over_world(runtime.groups, runtime.coord, sums, "the sum of the loss's measures")
        maxima = self._loss.maxima.cpu()
        if dist.is_initialized():
            with guard_world_collective(runtime.coord, "the maxima of the loss's measures"):
                dist.all_reduce(maxima, dist.ReduceOp.MAX)
        totals = dict(zip(SUMS, sums.tolist(), strict=True))
        tokens, first_tokens = totals.pop("tokens"), totals.pop("first_tokens")
        means: dict[str, float | None] = {name: total / tokens for name, total in totals.items()}
        means["gap"] = totals["gap"] / first_tokens
        if self._reference is None:
            means["kl"] = None
        return means | {"ratio_max": float(maxima[0]), "gap_max": float(maxima[1])}


# --- advantages ---------------------------------------------------------------------------------------------

STD_EPSILON = 1e-4
"""Added to a group's standard deviation, as in TRL; OpenRLHF adds 1e-9, verl 1e-6."""
VARIANCE_EPSILON = 1e-8


def grpo(rewards_QG: Tensor) -> Tensor:
    """(r - mean r) / (std r + 1e-4) in each group, std unbiased; [Q, G].

    Shao et al. 2024 (arXiv 2402.03300, section 4.1.2). Exactly 0 in a group of equal rewards.
    """
    return dr_grpo(rewards_QG) / (rewards_QG.std(1, keepdim=True) + STD_EPSILON)


def dr_grpo(rewards_QG: Tensor) -> Tensor:
    """r - mean r of the group; [Q, G]. Liu et al. 2025 (arXiv 2503.20783)."""
    if rewards_QG.dim() != 2 or rewards_QG.shape[1] < 2:
        raise ValueError(
            f"rewards {list(rewards_QG.shape)}: wanted [prompts, group] with a group of 2 or more answers, "
            "whose mean is what is expected"
        )
    # In exact arithmetic the same as r - mean r, and exactly 0 where all rewards are equal.
    shifted_QG = rewards_QG - rewards_QG[:, :1]
    return shifted_QG - shifted_QG.mean(1, keepdim=True)


def rloo(rewards_QG: Tensor) -> Tensor:
    """r - mean of the group's other rewards; [Q, G]. Ahmadian et al. 2024 (arXiv 2402.14740, eq. 8)."""
    group = rewards_QG.shape[1]
    return dr_grpo(rewards_QG) * (group / (group - 1))


def reinforce_baseline(rewards_QG: Tensor, mask_BS: Tensor) -> Tensor:
    """r - mean r of the group, whitened over the batch's tokens; [B, S], B = Q * G group by group.

    REINFORCE++-baseline, Hu et al. 2025 (arXiv 2501.03262).
    """
    return whiten(dr_grpo(rewards_QG).reshape(-1, 1).expand(mask_BS.shape), mask_BS)


def reinforce_plus_plus(rewards_B: Tensor, penalty_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Returns, whitened over the batch's tokens; [B, S]. Hu et al. 2025 (arXiv 2501.03262)."""
    return whiten(returns(rewards_B, penalty_BS, mask_BS), mask_BS)


def gae(
    rewards_B: Tensor,
    penalty_BS: Tensor,
    values_BS: Tensor,
    mask_BS: Tensor,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Generalised advantages, whitened over the batch's tokens, and the returns to fit values to; [B, S].

    d_t = r_t + gamma V_{t+1} - V_t; A_t = d_t + gamma lam A_{t+1}; return A_t + V_t (before whitening).
    Schulman et al. 2016 (arXiv 1506.02438, eq. 11 to 16). `values_BS` are the critic's, of the state before
    each token.
    """
    rewards_BS = token_rewards(rewards_B, penalty_BS, mask_BS)
    values_BS = values_BS.where(mask_BS, 0)
    advantages_BS = torch.zeros_like(rewards_BS)
    later_B = next_value_B = torch.zeros_like(rewards_B)
    for t in reversed(range(mask_BS.shape[1])):
        inside_B = mask_BS[:, t]
        delta_B = rewards_BS[:, t] + gamma * next_value_B - values_BS[:, t]
        # A token that is not trained (of a tool, say) is passed over: its successor follows its predecessor.
        later_B = torch.where(inside_B, delta_B + gamma * lam * later_B, later_B)
        next_value_B = torch.where(inside_B, values_BS[:, t], next_value_B)
        advantages_BS[:, t] = later_B.where(inside_B, 0)
    return whiten(advantages_BS, mask_BS), advantages_BS + values_BS


def returns(rewards_B: Tensor, penalty_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """R_t = sum over s >= t of the rewards of tokens, without discount; [B, S], 0 outside the mask."""
    rewards_BS = token_rewards(rewards_B, penalty_BS, mask_BS)
    return rewards_BS.flip(1).cumsum(1).flip(1).where(mask_BS, 0)


def token_rewards(rewards_B: Tensor, penalty_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """Rewards of tokens [B, S]: the answer's at its last trained token, less the penalty of each token."""
    positions_S = torch.arange(mask_BS.shape[1], device=mask_BS.device)
    last_B = torch.where(mask_BS, positions_S, -1).amax(1, keepdim=True)
    at_end_BS = mask_BS & (positions_S == last_B)
    return (rewards_B.unsqueeze(1) * at_end_BS - penalty_BS).where(mask_BS, 0)


def whiten(advantages_BS: Tensor, mask_BS: Tensor) -> Tensor:
    """(A - mean) / sqrt(var + 1e-8) over the trained tokens of the batch, 0 elsewhere; var is biased."""
    inside_N = advantages_BS[mask_BS]
    if not inside_N.numel():
        return torch.zeros_like(advantages_BS)
    # In exact arithmetic the same without the shift, and exactly 0 where all are equal.
    shifted_BS, shifted_N = advantages_BS - inside_N[0], inside_N - inside_N[0]
    mean = shifted_N.mean()
    variance = (shifted_N - mean).square().mean()
    return ((shifted_BS - mean) * torch.rsqrt(variance + VARIANCE_EPSILON)).where(mask_BS, 0)
