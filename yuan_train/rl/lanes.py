"""Passes of a trainer over rows of answers: a lane is as long as the rows need, under any plan."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from yuan_train.config.errors import PlanError
from yuan_train.parallel.apply import make_lane
from yuan_train.parallel.executor import Executor
from yuan_train.parallel.groups import sum_over_world
from yuan_train.rl.experience import Answers, RowFeed, Rows
from yuan_train.rl.losses import Numbers, TokenRecorder
from yuan_train.train.engine import StepRequest, StepResult
from yuan_train.train.step import Trainer, forward_pass, recording, train_step


class Lanes:
    """A trainer's lanes of as many micro-batches as a batch of rows needs."""

    def __init__(self, trainer: Trainer, feed: RowFeed) -> None:
        self.trainer = trainer
        """Of the plan's own lane."""
        self._feed = feed
        self._answers = Answers([])
        self._lanes: dict[tuple[int, ...], tuple[Trainer, tuple[int, ...]]] = {}

    def train(self, rows: Rows, request: StepRequest) -> StepResult:
        """One optimizer step on rows, as a request says but for its samples; see `train_step`."""
        trainer = self._use(rows)
        trainer.runtime.reducer.follow(trainer.runtime.program)
        return train_step(trainer, replace(request, samples=self._answers, first_sample=0, stop=False))

    def record(self, rows: Rows, count: int, numbers: Numbers, what: str) -> Tensor:
        """The numbers of `count` tokens, or answers, under the weights as they are: fp64 [N] on the host.

        Collective over all ranks.
        """
        trainer = self._use(rows)
        runtime, recorder = (
            trainer.runtime,
            TokenRecorder(rows.place.to(trainer.device.torch), count, numbers),
        )
        with recording(trainer, recorder):
            forward_pass(trainer, self._answers, first_sample=0, then=None)
        # Each rank of a tensor-parallel group has recorded the same.
        scores = recorder.scores * (runtime.coord.tensor_rank == 0)
        sum_over_world(runtime.groups, runtime.coord, scores, f"the sum of {what}")
        return scores

    def _use(self, rows: Rows) -> Trainer:
        """The trainer of a lane as long as rows need; the feed has them."""
        grid = self.trainer.runtime.grid
        pipelines = grid.plan.pipelines
        room = sum(pipeline.num_sequences for pipeline in pipelines)
        # Every replica of a stage has a micro-batch, if one of padding: a rank without any step ends none.
        least = [max(map(len, grid.workers(p))) for p in range(len(pipelines))]
        counts = tuple(
            max(own, -(-pipeline.num_micro_batches * rows.count // room))
            for own, pipeline in zip(least, pipelines, strict=True)
        )
        if counts not in self._lanes:
            self._lanes[counts] = self._make_lane(counts)
        trainer, counts = self._lanes[counts]
        before = range(self.trainer.runtime.coord.pipeline)
        self._feed.use(rows, first=sum(pipelines[p].micro_batch_size * counts[p] for p in before))
        return trainer

    def _make_lane(self, counts: tuple[int, ...]) -> tuple[Trainer, tuple[int, ...]]:
        """The trainer of a lane of so many micro-batches of each pipeline, or of the plan's own lane."""
        whole = self.trainer
        planned = tuple(pipeline.num_micro_batches for pipeline in whole.runtime.grid.plan.pipelines)
        if counts == planned:
            return whole, planned
        try:
            runtime = make_lane(whole.runtime, counts)
        except PlanError:
            # Some schedules take some numbers only: the rows that are not needed are padding.
            return whole, planned
        executor = Executor(whole.runners, runtime.bridge, whole.stopwatch)
        return replace(whole, runtime=runtime, executor=executor), counts
