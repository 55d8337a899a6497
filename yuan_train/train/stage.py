"""Runs one stage's part of the model on micro-batches, which a thread has read ahead of need.

A rank reads the micro-batches of its own replica, and only what its stages use: tokens in the first stage and
where something is reset at document ends, targets in the last. All ranks of a tensor-parallel group read the
same: from the second on out of the page cache, which is cheaper than a broadcast in the middle of a step. The
thread reads the rest of the current pass (a training step, or a batch of the validation data), then the next
one: at most two passes of a rank are in memory, 24 bytes a token.

The last stage's `Objective` makes of its hidden state a run's loss, or scores of rows for a reference.
B = rows of a micro-batch; of preference pairs rows 2i and 2i + 1 are the chosen and the rejected answer.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import torch
from torch import Tensor

from yuan_train.config.run import DataConfig, ObjectiveConfig
from yuan_train.data.loader import Samples
from yuan_train.models.attention import DocumentResets, find_resets
from yuan_train.models.layers import DropoutSeed
from yuan_train.models.transformer import IGNORE_INDEX, Transformer
from yuan_train.objectives.losses import log_ratio_margin, preference_loss, reward_loss
from yuan_train.parallel.copies import ActivationTiers, ParameterPages, StagePages
from yuan_train.parallel.device import Device
from yuan_train.parallel.gradients import DeferredGrads
from yuan_train.schedule.step import PAGING, Kind, Step


@dataclass(frozen=True)
class MicroBatch:
    """What a rank uses of a micro-batch, on the host; int64 [B, S], pinned if a card reads them."""

    tokens_BS: Tensor | None
    targets_BS: Tensor | None
    resets: DocumentResets
    trained_tokens: int
    """Targets with a loss; 0 if the rank uses no targets."""
    places_B: Tensor | None = None
    """Of preference pairs; see `Batch.places`."""
    experts_BSLK: Tensor | None = None
    """int16: the experts that all layers take for each token; None: those that they choose."""


class MicroBatchSource(Protocol):
    """Where a stage gets its micro-batches from."""

    def take(self, micro_batch: int) -> MicroBatch:
        """A micro-batch of the current pass; each stage that uses it takes it once."""
        ...


Key = tuple[Samples, int]
"""A pass over one global batch: the data, and its first sample."""


class Passes(ABC):
    """A source of the micro-batches of one global batch after another; a context manager."""

    def __init__(self) -> None:
        self.batch_tokens: dict[Key, int] = {}
        """Trained tokens of whole global batches, as the ranks have agreed on them."""

    @abstractmethod
    def take(self, micro_batch: int) -> MicroBatch:
        """See `MicroBatchSource`."""

    def begin(self, blend: Samples, first_sample: int, *, then: int | None = None) -> None:
        """Start a pass over the global batch from `first_sample` on; the one from `then` on is next."""
        return

    def count_trained(self, blend: Samples, first_sample: int) -> int:
        """Targets with a loss that this rank reads in a pass that was begun or announced."""
        return 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is taken any more."""
        return


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which samples a rank reads, and what it uses of them."""

    first_sequence: int
    """Offset of its pipeline's share in a global batch."""
    micro_batch_size: int
    takers: Mapping[int, int]
    """How many of its stages take each micro-batch that it runs, in the order of their forwards; those that
    none takes are not read."""
    with_tokens: bool
    with_targets: frozenset[int]
    """The micro-batches of which it runs the last stage."""
    resets: Mapping[str, Any]
    """See `resets_after`."""
    device: Device

    def read(self, blend: Samples, first_sample: int, micro_batch: int) -> MicroBatch:
        """Read a micro-batch of the global batch that begins at `first_sample`. Raises DataError."""
        first = first_sample + self.first_sequence + micro_batch * self.micro_batch_size
        batch = blend.batch(first, self.micro_batch_size)
        found = make_micro_batch(
            torch.from_numpy(batch.inputs),
            torch.from_numpy(batch.targets) if micro_batch in self.with_targets else None,
            resets=self.resets,
            keep_tokens=self.with_tokens,
            trained_tokens=batch.num_trained if micro_batch in self.with_targets else 0,
            device=self.device,
        )
        if batch.places is None or found.targets_BS is None:
            return found
        return replace(found, places_B=torch.from_numpy(batch.places))


def resets_after(data: DataConfig, eod_id: int | None) -> dict[str, Any]:
    """The keyword arguments of `find_resets`, which resets nothing if the token is None."""
    flags = "reset_position_ids", "reset_attention", "reset_filter"
    return {"eod_id": eod_id, **{flag: getattr(data, flag) for flag in flags}}


def make_micro_batch(
    tokens_BS: Tensor,
    targets_BS: Tensor | None,
    *,
    resets: Mapping[str, Any],
    keep_tokens: bool = True,
    trained_tokens: int = 0,
    device: Device,
) -> MicroBatch:
    """A micro-batch of tokens and targets [B, S] on the host, with what the model resets in it."""
    found = find_resets(tokens_BS, **resets)
    return MicroBatch(
        device.on_host(tokens_BS) if keep_tokens else None,
        device.on_host(targets_BS) if targets_BS is not None else None,
        found.placed(device.on_host),
        trained_tokens,
    )


@dataclass(eq=False)
class _Pass:
    """What is read of a pass so far."""

    key: Key
    ready: dict[int, MicroBatch] = field(default_factory=dict[int, MicroBatch])
    takes: dict[int, int] = field(default_factory=dict[int, int])
    num_read: int = 0
    trained_tokens: int = 0
    error: BaseException | None = None


class Feed(Passes):
    """Reads the micro-batches of one rank in a thread, in the order in which they are taken.

    Use as a context manager, or `close` it: the thread ends with it. An error of the thread is raised where
    the micro-batch that it could not read is taken.
    """

    def __init__(self, share: Share) -> None:
        super().__init__()
        self._share = share
        self._order = tuple(share.takers)
        self._passes: list[_Pass] = []
        """The current one and those to read ahead, in the order of reading."""
        self._current: _Pass | None = None
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def begin(self, blend: Samples, first_sample: int, *, then: int | None = None) -> None:
        """Start a pass over the global batch from `first_sample` on; the one from `then` on is read next."""
        with self._changed:
            if self._current is not None:
                self._passes.remove(self._current)
            self._current = self._find(blend, first_sample) or self._add((blend, first_sample), at=0)
            if then is not None and self._find(blend, then) is None:
                self._add((blend, then), at=len(self._passes))
            self._changed.notify_all()
        if self._thread is None and self._order:
            # A daemon: a process that ends by an error elsewhere must not wait for a slow disk.
            self._thread = threading.Thread(target=self._run, name="feed", daemon=True)
            self._thread.start()

    def take(self, micro_batch: int) -> MicroBatch:
        """A micro-batch of the current pass; waits until it is read. Raises what reading it has raised."""
        current = self._current
        assert current is not None and self._thread is not None
        with self._changed:
            while micro_batch not in current.ready:
                if current.error is not None:
                    raise current.error
                self._changed.wait()
            current.takes[micro_batch] = current.takes.get(micro_batch, 0) + 1
            if current.takes[micro_batch] < self._share.takers[micro_batch]:
                return current.ready[micro_batch]
            return current.ready.pop(micro_batch)

    def count_trained(self, blend: Samples, first_sample: int) -> int:
        """Targets with a loss that this rank reads in a pass that was begun or announced; waits for it.

        0 if it uses no targets. If they cannot be read, the number is wrong: `take` raises in that pass.
        """
        if not self._share.with_targets:
            return 0
        with self._changed:
            found = self._find(blend, first_sample)
            assert found is not None, "the pass was begun or announced"
            self._changed.wait_for(lambda: self._is_finished(found))
            return found.trained_tokens

    def close(self) -> None:
        """End the thread; waits for the micro-batch that it is reading."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _find(self, blend: Samples, first_sample: int) -> _Pass | None:
        return next((found for found in self._passes if found.key == (blend, first_sample)), None)

    def _add(self, key: Key, *, at: int) -> _Pass:
        added = _Pass(key)
        self._passes.insert(at, added)
        return added

    def _is_finished(self, reading: _Pass) -> bool:
        return reading.error is not None or reading.num_read == len(self._order)

    def _run(self) -> None:
        # It pins what it reads.
        self._share.device.use()
        while (reading := self._next()) is not None:
            blend, first_sample = reading.key
            micro_batch = self._order[reading.num_read]
            batch, failure = None, None
            try:
                batch = self._share.read(blend, first_sample, micro_batch)
            except BaseException as error:  # Raised by `take`, in the thread that trains.
                failure = error
            with self._changed:
                reading.error = failure
                if batch is not None:
                    reading.ready[micro_batch] = batch
                    reading.trained_tokens += batch.trained_tokens
                    reading.num_read += 1
                self._changed.notify_all()

    def _next(self) -> _Pass | None:
        """The first pass that is not finished; waits for one. None: the feed is closed."""
        with self._changed:
            found: list[_Pass] = []

            def has_work() -> bool:
                found[:] = [reading for reading in self._passes if not self._is_finished(reading)][:1]
                return self._closed or bool(found)

            self._changed.wait_for(has_work)
            return None if self._closed else found[0]


@dataclass(frozen=True)
class Targets:
    """What the last stage needs of a micro-batch, on the device."""

    targets_BS: Tensor
    places_B: Tensor | None = None
    """See `Batch.places`; on the host."""


class Objective(Protocol):
    """The loss of a micro-batch, as a sum over the terms of the batch's mean."""

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """The sum, a scalar; the backward will pass `gradient_scale` to it."""
        ...


class TokenLoss:
    """The cross-entropy of the next token, of all tokens with a target."""

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """The sum over tokens."""
        return model.loss(hidden_BSH, targets.targets_BS, gradient_scale=gradient_scale)


class PairLoss:
    """The loss of preference pairs: DPO's against a reference, or a reward model's.

    `measures` fp64 [2] adds up, over the pairs since it was reset, whether the chosen answer comes out ahead,
    and by how much: of DPO in implicit rewards beta (l - f), of a reward model in scores.
    """

    def __init__(self, config: ObjectiveConfig, *, device: torch.device) -> None:
        self._config = config
        self.reference: Tensor | None = None
        """Of DPO, fp64 [2 * pairs]: log-probabilities of answers under the reference, by place."""
        self.measures = torch.zeros(2, dtype=torch.float64, device=device)

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """The sum over pairs."""
        config = self._config
        chosen_P, rejected_P = (
            row_scores(model, hidden_BSH, targets.targets_BS).unflatten(0, (-1, 2)).unbind(1)
        )
        if config.kind == "reward":
            assert config.margin is not None
            losses_P = reward_loss(chosen_P, rejected_P, margin=config.margin)
            ahead_P = chosen_P - rejected_P
        else:
            assert self.reference is not None and targets.places_B is not None
            assert config.beta is not None and config.smoothing is not None and config.loss is not None
            known_P2 = self.reference[targets.places_B].to(chosen_P).unflatten(0, (-1, 2))
            margin_P = log_ratio_margin(chosen_P, rejected_P, *known_P2.unbind(1))
            losses_P = preference_loss(
                margin_P, beta=config.beta, smoothing=config.smoothing, loss=config.loss
            )
            ahead_P = config.beta * margin_P
        ahead_P = ahead_P.detach().double()
        self.measures += torch.stack([(ahead_P > 0).double().sum(), ahead_P.sum()])
        return losses_P.sum()


class RowScores:
    """Records the log-probabilities of rows, for a forward pass over all pairs; its loss is 0.

    `scores` and `counts` are fp64 [2 * pairs] on the host: a sum, and of how many passes over a row.
    """

    def __init__(self, num_pairs: int) -> None:
        self.scores = torch.zeros(2 * num_pairs, dtype=torch.float64)
        self.counts = torch.zeros(2 * num_pairs, dtype=torch.float64)

    def total(
        self, model: Transformer, hidden_BSH: Tensor, targets: Targets, *, gradient_scale: float
    ) -> Tensor:
        """Record; returns 0."""
        assert targets.places_B is not None
        found_B = row_scores(model, hidden_BSH, targets.targets_BS).detach().double().cpu()
        self.scores.index_add_(0, targets.places_B, found_B)
        self.counts.index_add_(0, targets.places_B, torch.ones_like(found_B))
        return found_B.new_zeros(()).to(hidden_BSH.device)


def row_scores(model: Transformer, hidden_BSH: Tensor, targets_BS: Tensor) -> Tensor:
    """A number a row [B]: the log-probability of its targets, or of a value model the sum of scores there."""
    if model.config.output == "vocabulary":
        return -model.loss(hidden_BSH, targets_BS, reduction="none").sum(1)
    return model.scores(hidden_BSH).where(targets_BS != IGNORE_INDEX, 0).sum(1)


@dataclass(frozen=True)
class Loaded:
    """What a forward needs of its samples, on the device; int64 [B, S]."""

    tokens_BS: Tensor | None = None
    targets: Targets | None = None
    resets: dict[str, Any] = field(default_factory=dict)
    """The model's arguments for what the run resets at document ends."""
    experts_BSLK: Tensor | None = None
    """See `MicroBatch`."""


class Repeat:
    """A micro-batch that is computed once more when its backward has ended; what that needs of the first
    time, and what it has to give again."""

    def __init__(self, micro_batch: int, compare: Callable[[Repeat], None]) -> None:
        self.micro_batch = micro_batch
        self.compare = compare
        """What is called then."""
        self.loaded = Loaded()
        self.hidden_BSH: Tensor | None = None
        self.output = torch.empty(0)
        self.gradient: Tensor | None = None
        """Of the output."""

    def keep(self, loaded: Loaded, hidden_BSH: Tensor | None, output: Tensor) -> None:
        """The forward has ended."""
        self.loaded, self.hidden_BSH, self.output = loaded, hidden_BSH, output.detach()
        output.register_hook(self._keep_gradient)

    def _keep_gradient(self, gradient: Tensor) -> None:
        self.gradient = gradient

    @property
    def input_gradient(self) -> Tensor | None:
        """That of the hidden state from the stage before; None on the first stage."""
        return None if self.hidden_BSH is None else self.hidden_BSH.grad


@dataclass(frozen=True, kw_only=True)
class StageSettings:
    """What the runner of a stage has of the run and the plan."""

    number: int = 0
    """Of the stage, where stages offload activations."""
    micro_batch_size: int
    seed: int
    """Of dropout."""
    resets: bool
    """Whether the run resets something at document ends."""


class StageRunner:
    """Takes the micro-batches of one pipeline and runs one stage's part of the model on them.

    `loss` accumulates the stage's share of the batch's mean loss: the objective's sum over tokens (or pairs)
    divided by the *global* number of these, so that pipelines with different shares of the batch need no
    weights. The backward runs on `scale` times that. `finite` stays true while every output is finite.
    """

    def __init__(
        self,
        model: Transformer,
        source: MicroBatchSource,
        settings: StageSettings,
        *,
        device: Device,
        deferred: DeferredGrads,
        objective: Objective | None = None,
        tiers: ActivationTiers | None = None,
    ) -> None:
        """`objective`: None is `TokenLoss`. `tiers`: None if no stage of this rank offloads activations."""
        self._settings, self._tiers, self._model = settings, tiers, model
        self._source, self._deferred = source, deferred
        self._upload = device.upload
        self._first_sample = 0
        self._num_terms = 1
        self.objective: Objective = objective or TokenLoss()
        self._scale = 1.0
        self._takes = any(stage_needs(model, resets=settings.resets))
        self._loaded = Loaded()
        self.repeat: Repeat | None = None
        """Set while a step is checked."""
        self.loss = torch.zeros((), dtype=torch.float64, device=device.torch)
        self.finite = torch.ones((), dtype=torch.bool, device=device.torch)

    def begin(self, *, first_sample: int, num_terms: int, num_sequences: int, scale: float) -> None:
        """Start on this pipeline's samples, from `first_sample` on, and reset `loss` and `finite`.

        `num_terms` is the number of trained tokens, or of pairs, of the global batch; `num_sequences` that of
        its rows.
        """
        for block in self._model.blocks.values():
            if block.has_experts:
                block.router.loss_scale = scale / num_sequences
        self._first_sample, self._num_terms, self._scale = first_sample, num_terms, scale
        self.loss.zero_()
        self.finite.fill_(True)

    def load(self, micro_batch: int) -> None:
        """Wait until the samples of a micro-batch are read, and start to copy them to the device.

        Not part of the forward: these are not seconds of compute.
        """
        if self._takes:
            batch = self._source.take(micro_batch)
            self._loaded = Loaded(
                None if batch.tokens_BS is None else self._upload(batch.tokens_BS),
                None if batch.targets_BS is None else Targets(self._upload(batch.targets_BS), batch.places_B),
                batch.resets.placed(self._upload).arguments(),
                None if batch.experts_BSLK is None else self._upload(batch.experts_BSLK),
            )

    def forward(self, micro_batch: int, hidden_BSH: Tensor | None) -> Tensor:
        """Hidden state [B, S, H]; on the last stage the micro-batch's share of the mean loss, times `scale`.

        `hidden_BSH` is the output of the stage before; None on the first stage. `load` must have been called.
        """
        batch, self._loaded = self._loaded, Loaded()
        given_BSH = hidden_BSH
        if hidden_BSH is None:
            assert batch.tokens_BS is not None
            hidden_BSH = batch.tokens_BS
        # Validation runs without gradients and without dropout, and keeps nothing.
        training = torch.is_grad_enabled()
        following = nullcontext()
        if training and self._tiers is not None:
            following = self._tiers.forward(self._settings.number, micro_batch)
        with following as parts, self._choosing(batch.experts_BSLK):
            arguments = self._arguments(micro_batch, batch, training=training)
            result = self._result(self._model(hidden_BSH, parts=parts, **arguments), batch)
        if training and self.repeat is not None and self.repeat.micro_batch == micro_batch:
            self.repeat.keep(batch, given_BSH, result)
        return result

    def _arguments(self, micro_batch: int, batch: Loaded, *, training: bool) -> dict[str, Any]:
        """Those of the model, besides the hidden state."""
        settings = self._settings
        sample = self._first_sample + micro_batch * settings.micro_batch_size
        return {"dropout_seed": DropoutSeed(settings.seed, sample) if training else None, **batch.resets}

    def _result(self, output: Tensor, batch: Loaded) -> Tensor:
        """What `forward` returns, of the model's output."""
        if self._model.has_head:
            assert batch.targets is not None
            # A micro-batch's share of the batch's mean loss, which is counted.
            gradient_scale = self._scale / self._num_terms
            total = self.objective.total(self._model, output, batch.targets, gradient_scale=gradient_scale)
            output = total / self._num_terms
            self.loss += output.detach()
        self.finite &= torch.isfinite(output.detach()).all()
        if torch.is_grad_enabled() and not output.requires_grad:
            # Nothing before it is trained, in a run of adapters: the backward ends here.
            output.requires_grad_()
        return output * self._scale if self._model.has_head else output

    def compute_again(self, first: Repeat) -> tuple[Tensor, Tensor | None]:
        """Forward and backward of a micro-batch once more: its output, and the gradient of its input (None on
        the first stage). Gradients of weights accumulate; nothing else counts it."""
        loss, finite = self.loss.clone(), self.finite.clone()
        routers = [block.router for block in self._model.blocks.values() if block.has_experts]
        loads = [router.take_load() for router in routers]
        given = None if first.hidden_BSH is None else first.hidden_BSH.detach().requires_grad_()
        self.repeat, self._loaded = None, first.loaded
        with torch.enable_grad():
            output = self.forward(first.micro_batch, given)
            with self._deferred.splitting(first.micro_batch, False):
                torch.autograd.backward(output, first.gradient)
        self.loss.copy_(loss)
        self.finite.copy_(finite)
        for router, load in zip(routers, loads, strict=True):
            router.put_load(load)
        return output, None if given is None else given.grad

    @contextmanager
    def _choosing(self, experts_BSLK: Tensor | None) -> Iterator[None]:
        """Inside, layers take these experts for a micro-batch's tokens."""
        routers = {i: block.router for i, block in self._model.blocks.items() if block.has_experts}
        if experts_BSLK is not None:
            for layer, router in routers.items():
                router.given = experts_BSLK[:, :, layer].flatten(0, 1).long()
        try:
            yield
        finally:
            for router in routers.values():
                router.given = None

    @contextmanager
    def splitting(self, micro_batch: int, split: bool) -> Iterator[None]:
        """Around a backward: if `split`, weight gradients are deferred until `backward_weight`."""
        following = nullcontext()
        if self._tiers is not None:
            following = self._tiers.backward(self._settings.number, micro_batch, split=split)
        with self._deferred.splitting(micro_batch, split), following:
            yield
        if self.repeat is not None and self.repeat.micro_batch == micro_batch:
            self.repeat.compare(self.repeat)

    def backward_weight(self, micro_batch: int) -> None:
        """Compute the deferred weight gradients of a micro-batch whose backward was split."""
        following = nullcontext()
        if self._tiers is not None:
            following = self._tiers.backward_weight(self._settings.number, micro_batch)
        with following:
            self._deferred.flush(micro_batch)


def stage_needs(model: Transformer, *, resets: bool) -> tuple[bool, bool]:
    """Whether a stage's part of the model needs the tokens of a micro-batch, and its targets."""
    return model.has_embedding or resets, model.has_head


class PagedRunner(StageRunner):
    """A stage runner that takes a group of micro-batches layer by layer.

    Of a layer in a page only its inputs are kept, and it is run again in the backward: nothing else that
    autograd keeps would hold on to weights that leave. The rest of the stage is run as elsewhere, after the
    last page. Gradients are added micro-batch by micro-batch, in the order of a stage without pages.
    """

    def __init__(self, *arguments: Any, pages: ParameterPages, steps: StagePages, **keys: Any) -> None:
        """As StageRunner; `pages` has the copies, and `steps` says when they are."""
        super().__init__(*arguments, **keys)
        self._pages, self._steps = pages, steps
        self._batches: dict[int, Loaded] = {}
        self._hidden: dict[int, Tensor] = {}
        """By micro-batch, what its next part takes: a hidden state, or tokens."""
        self._gradients: dict[int, Tensor | None] = {}
        """By micro-batch, what the next part of its backward takes."""
        self._kept: dict[tuple[int, int], tuple[Tensor, Tensor | None]] = {}
        """By micro-batch and part, its input and, of the rest of the stage, its output."""

    def load(self, micro_batch: int) -> None:
        """As elsewhere; what is read stays until the backward, or the forward of an evaluation."""
        super().load(micro_batch)
        self._batches[micro_batch], self._loaded = self._loaded, Loaded()

    def hold(self, kind: Kind, micro_batch: int, tensor: Tensor | None, *, training: bool) -> bool:
        """Keep the hidden state or the gradient of a member; whether its group is complete."""
        if kind == "backward":
            self._gradients[micro_batch] = tensor
        else:
            hidden = self._batches[micro_batch].tokens_BS if tensor is None else tensor
            assert hidden is not None
            self._hidden[micro_batch] = hidden
        return (kind, micro_batch) in self._groups(training)

    def run_group(self, kind: Kind, micro_batch: int, *, training: bool) -> dict[int, Tensor | None]:
        """Take all steps of the group that a micro-batch ends; by member the hidden state [B, S, H] or the
        loss of a forward, the gradient of the stage's input (None on the first stage) of a backward."""
        groups = self._groups(training)
        group = groups[kind, micro_batch]
        for step in group.steps:
            if step.kind in PAGING:
                self._pages.take(step)
                continue
            if step.part < self._steps.paging.num_pages and step.micro_batch == group.micro_batches[0]:
                self._pages.need(step)
            if kind == "forward":
                self._forward_part(step, training=training)
            else:
                self._backward_part(step)
        if group is list(groups.values())[-1]:
            self._pages.finish()
        if kind == "backward" or not training:
            for m in group.micro_batches:
                del self._batches[m]
        results = self._hidden if kind == "forward" else self._gradients
        return {m: results.pop(m) for m in group.micro_batches}

    def _groups(self, training: bool) -> Any:
        return self._steps.training if training else self._steps.evaluation

    def _forward_part(self, step: Step, *, training: bool) -> None:
        m, stays = step.micro_batch, step.part == self._steps.paging.num_pages
        given, output = self._run(step, self._hidden[m], training=training, keeps=training and stays)
        if training:
            self._kept[m, step.part] = given, output if stays else None
        self._hidden[m] = output.detach()

    def _backward_part(self, step: Step) -> None:
        m = step.micro_batch
        given, output = self._kept.pop((m, step.part))
        if output is None:
            given, output = self._run(step, given, training=True, keeps=True)
        torch.autograd.backward(output, self._gradients[m])
        self._gradients[m] = given.grad

    def _run(self, step: Step, given: Tensor, *, training: bool, keeps: bool) -> tuple[Tensor, Tensor]:
        """Input and output of a part, which `keeps` what its backward needs or nothing."""
        m, part = step.micro_batch, step.part
        given = given.detach()
        if keeps and given.is_floating_point():
            given.requires_grad_()
        batch = self._batches[m]
        arguments = self._arguments(m, batch, training=training)
        with torch.set_grad_enabled(keeps):
            if part < self._steps.paging.num_pages:
                return given, self._model(given, layers=(part, part + 1), **arguments)
            return given, self._result(self._model(given, layers=(part, None), **arguments), batch)
