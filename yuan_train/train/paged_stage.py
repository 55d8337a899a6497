"""Runs a stage whose first layers are pages of the host, group by group of micro-batches (`GroupWork`)."""

from __future__ import annotations

from typing import Any

import torch

from yuan_train.models.dropout import DropoutSeed
from yuan_train.parallel.paging import StagePages
from yuan_train.parallel.tiers.parameters import ParameterPages
from yuan_train.schedule.pages import PagedGroup
from yuan_train.schedule.step import PAGING, Kind, Step
from yuan_train.train.stage import Loaded, StageRunner


class PagedRunner(StageRunner):
    """A stage runner that takes a group of micro-batches layer by layer.

    Of a layer in a page only its inputs are kept, and it is run again in the backward: nothing else that
    autograd keeps would hold on to weights that leave. The rest of the stage is run as elsewhere, after the
    last page. Gradients are added micro-batch by micro-batch, in the order of a stage without pages.
    """

    def __init__(self, *arguments: Any, pages: ParameterPages, steps: StagePages, **keys: Any) -> None:
        """As StageRunner; `pages` has the copies, and `steps` says when they are."""
        super().__init__(*arguments, **keys)
        self._pages = pages
        self._steps = steps
        self._batches: dict[int, Loaded] = {}
        self._hidden: dict[int, torch.Tensor] = {}
        """By micro-batch, what its next part takes: a hidden state, or tokens."""
        self._gradients: dict[int, torch.Tensor | None] = {}
        """By micro-batch, what the next part of its backward takes."""
        self._inputs: dict[tuple[int, int], torch.Tensor] = {}
        """By micro-batch and page."""
        self._rest: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By micro-batch, input and output of what follows the pages."""

    def load(self, micro_batch: int) -> None:
        """As elsewhere; what is read stays until the backward, or the forward of an evaluation."""
        super().load(micro_batch)
        self._batches[micro_batch], self._loaded = self._loaded, Loaded()

    def hold(self, kind: Kind, micro_batch: int, tensor: torch.Tensor | None) -> None:
        """Keep the hidden state or the gradient of a member until its group is complete."""
        if kind == "backward":
            self._gradients[micro_batch] = tensor
            return
        tokens = self._batches[micro_batch].tokens_BS
        hidden = tokens if tensor is None else tensor
        assert hidden is not None
        self._hidden[micro_batch] = hidden

    def ends_group(self, kind: Kind, micro_batch: int, *, training: bool) -> bool:
        """Whether a micro-batch is the last of its group."""
        return (kind, micro_batch) in self._groups(training)

    def run_group(self, kind: Kind, micro_batch: int, *, training: bool) -> dict[int, torch.Tensor | None]:
        """Take all steps of the group that a micro-batch ends; by member the hidden state [B, S, H] or the
        loss of a forward, the gradient of the stage's input (None on the first stage) of a backward."""
        groups = self._groups(training)
        group = groups[kind, micro_batch]
        for step in group.steps:
            if step.kind in PAGING:
                self._pages.take(step)
            elif step.part < self._steps.paging.num_pages:
                if step.micro_batch == group.micro_batches[0]:
                    self._pages.need(step)
                self._run_page(step, training=training)
            elif kind == "forward":
                self._forward_rest(step.micro_batch, training=training)
            else:
                self._backward_rest(step.micro_batch)
        if group is list(groups.values())[-1]:
            self._pages.finish()
        return self._results(kind, group, training=training)

    def _groups(self, training: bool) -> Any:
        return self._steps.training if training else self._steps.evaluation

    def _results(self, kind: Kind, group: PagedGroup, *, training: bool) -> dict[int, torch.Tensor | None]:
        if kind == "backward":
            for m in group.micro_batches:
                del self._batches[m]
            return {m: self._gradients.pop(m) for m in group.micro_batches}
        if not training:
            for m in group.micro_batches:
                del self._batches[m]
        return {m: self._hidden.pop(m) for m in group.micro_batches}

    def _arguments(self, micro_batch: int, *, training: bool) -> dict[str, Any]:
        sample = self._first_sample + micro_batch * self._micro_batch_size
        seed = DropoutSeed(self._seed, sample) if training else None
        return {"dropout_seed": seed, **self._batches[micro_batch].resets}

    def _run_page(self, step: Step, *, training: bool) -> None:
        m, page = step.micro_batch, step.part
        arguments = self._arguments(m, training=training)
        if step.kind == "forward":
            hidden = self._hidden[m]
            with torch.no_grad():
                self._hidden[m] = self._model.forward_layer(page, hidden, **arguments)
            if training:
                self._inputs[m, page] = hidden
            return
        given = self._inputs.pop((m, page)).detach()
        if given.is_floating_point():
            given.requires_grad_()
        with torch.enable_grad():
            output = self._model.forward_layer(page, given, **arguments)
        torch.autograd.backward(output, self._gradients[m])
        self._gradients[m] = given.grad

    def _forward_rest(self, micro_batch: int, *, training: bool) -> None:
        given = self._hidden[micro_batch].detach()
        batch, arguments = self._batches[micro_batch], self._arguments(micro_batch, training=training)
        with torch.set_grad_enabled(training):
            if training:
                given.requires_grad_()
            output = self._model(given, first=self._steps.paging.num_pages, **arguments)
            if self._model.has_head:
                assert batch.targets is not None
                output = self._mean_loss(output, batch.targets)
            self.finite &= torch.isfinite(output.detach()).all()
            output = output * self._scale if self._model.has_head else output
        if training:
            self._rest[micro_batch] = given, output
        self._hidden[micro_batch] = output.detach()

    def _backward_rest(self, micro_batch: int) -> None:
        given, output = self._rest.pop(micro_batch)
        torch.autograd.backward(output, self._gradients[micro_batch])
        self._gradients[micro_batch] = given.grad
