"""What each rank of a server does: it builds its part of the model, and does in rounds what rank 0 says.

Each pipeline of the plan is an engine of its own, which rank 0 leads: it sends the ranks an order before each
round, and learns the tokens of the round. Pipelines do not wait for each other. Tokens are drawn exactly as
`models.generate` samples them (`SeededSampler`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.checkpoint.hf import open_model, resets_of
from yuan_train.checkpoint.load import Checkpoint, check_same_model
from yuan_train.config.errors import ConfigError, PlanError, YuanError
from yuan_train.config.load import as_plain
from yuan_train.config.plan import Plan, one_stage_plan
from yuan_train.config.plan_constraints import plan_digest
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.generate import DocumentRules, Sampling, sample
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.board import meet
from yuan_train.parallel.device import Device
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.groups import (
    as_training_error,
    enter_world,
    gather_objects,
    make_tensor_groups,
    share_object,
)
from yuan_train.parallel.shard import box_views
from yuan_train.parallel.transport import blame_peers, wait_for_all
from yuan_train.parallel.zero import EngineOptions
from yuan_train.rl.experience import Ended, Ticket
from yuan_train.rl.generator import Draw, EngineShape, GenerationEngine, Token
from yuan_train.train.build import DTYPES, build_runtime, load_runtime, model_parts, own_weights
from yuan_train.train.ending import ending_together, explaining_memory
from yuan_train.train.job import Position, choose_device, choose_planned

STARTUP_SECONDS = 600.0
"""In which all ranks come to meet."""
TIMEOUT_SECONDS = 600.0
"""How long a rank waits for another one inside a round."""


@dataclass(frozen=True)
class Limits:
    """What a server holds at a time, and how long a request may take."""

    slots: int
    """Answers that are written at a time, over all pipelines."""
    queue: int
    """Answers that may wait for a slot."""
    max_length: int
    """Tokens of a prompt and its answer."""
    timeout_seconds: float


@dataclass(frozen=True)
class ServeJob:
    """What a rank needs; the ranks are not connected yet."""

    checkpoint: Checkpoint
    plan: Plan
    position: Position
    device: Device
    dtype: torch.dtype
    tokenizer: Tokenizer | None
    limits: Limits

    @property
    def documents(self) -> DocumentRules:
        """What the model was trained to reset at document ends, as `generate` does it."""
        eod_id = self.tokenizer.eod_id if self.tokenizer is not None else None
        return DocumentRules(eod_id=eod_id, **self.checkpoint.resets)


@dataclass(frozen=True)
class Order:
    """What the ranks of a pipeline do in a round."""

    join: tuple[Asked, ...] = ()
    leave: tuple[int | str, ...] = ()
    stop: bool = False
    read: str | None = None
    """A folder of weights to read beside those in use, in place of a round."""
    take: bool | None = None
    """In place of a round: use what was read from now on, or drop it."""


class WeightsRefused(YuanError):
    """Weights that a server is to take cannot be read, or are not its model's; it keeps those that it has."""


def prepare_serve(
    checkpoint: Checkpoint,
    plan: Plan | None,
    position: Position,
    *,
    tokenizer: str | None,
    precision: str,
    device: str,
    limits: Limits,
) -> ServeJob:
    """Check a server's files, and find this rank's device. Raises YuanError."""
    model = checkpoint.model
    check_served(checkpoint)
    if plan is None:
        plan, found = one_stage_plan(model, limits.max_length), choose_device(device, position)
    else:
        check_served_plan(plan, checkpoint)
        found = choose_planned(device, plan.ranks, position, plan.find_type)
    if plan.world_size != position.world_size:
        raise PlanError(
            f"the plan has {plan.world_size} ranks, but {position.world_size} were started; "
            "start one per rank, or leave that to `yuan-train serve` outside of a launcher"
        )
    if limits.max_length > model.max_sequence_length:
        raise ConfigError(
            f"--max-length: {limits.max_length}, but the model's max_sequence_length is "
            f"{model.max_sequence_length}; give at most that"
        )
    path = tokenizer or checkpoint.tokenizer
    loaded = Tokenizer.load(path) if path is not None else None
    return ServeJob(checkpoint, plan, position, found, DTYPES[precision], loaded, limits)


def check_served(checkpoint: Checkpoint) -> None:
    """Raise ConfigError for a model that cannot be served."""
    model = checkpoint.model
    if model.output == "value":
        raise ConfigError(f"model {model.name} scores (output: value); only a language model is served")
    if model.rope_scaling is not None and model.rope_scaling.rope_type == "dynamic":
        raise ConfigError(
            f"model {model.name}: rope_scaling: dynamic changes with each sequence's length, and answers of "
            "several lengths are written at once; `yuan-train generate` writes one alone"
        )


def check_served_plan(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raise YuanError for a plan of another model, or one that cannot generate."""
    check_same_model(checkpoint, plan.model)
    for p, s, stage in plan.numbered_stages:
        where = f"pipelines[{p}].stages[{s}]"
        if any(edge % 1 for edge in stage.layers):
            raise PlanError(
                f"{where}.layers: {list(stage.layers)}: half a layer does not generate; plan again with "
                "search.half_layers: false"
            )
        if stage.parameter_offload:
            raise PlanError(
                f"{where}.parameter_offload: {stage.parameter_offload}: weights that stay on the host do "
                "not generate; plan again with search.offload: [optimizer, activations]"
            )


def slots_of(plan: Plan, slots: int) -> list[int]:
    """The slots of each pipeline: by its share of the batch, which is that of its speed; at least one."""
    return [max(1, round(slots * p.num_sequences / plan.global_batch_size)) for p in plan.pipelines]


Ask = Callable[[Order], list[Token]]
"""Has a pipeline do an order; on rank 0."""


class Lane:
    """This rank's engine, and on rank 0 the ends of the others."""

    def __init__(self, job: ServeJob, runtime: RankRuntime) -> None:
        self._runtime = runtime
        coord, grid = runtime.coord, runtime.grid
        self.pipeline = coord.pipeline
        self._own = [grid.ranks_of(p) for p in range(len(grid.plan.pipelines))]
        # Rank 0 leads each pipeline.
        self._led = [tuple(sorted({0, *ranks})) for ranks in self._own]
        wide = [ranks for ranks in dict.fromkeys([*self._own, *self._led]) if len(ranks) > 1]
        self._groups = (
            make_tensor_groups(wide, timeout_seconds=TIMEOUT_SECONDS) if dist.is_initialized() else {}
        )
        self._sampler = SeededSampler()
        self._engine = GenerationEngine(
            runtime,
            EngineShape(
                slots=slots_of(grid.plan, job.limits.slots)[coord.pipeline],
                group=1,
                max_length=job.limits.max_length,
            ),
            device=job.device.torch,
            dtype=job.dtype,
            stopwatch=Stopwatch(job.device, simulated=grid.simulated(coord.rank)),
            ranks=self._groups.get(self._own[coord.pipeline]),
            documents=job.documents,
        )
        self._engine.begin(self._sampler)
        self._read: dict[str, torch.Tensor] = {}
        """This rank's parts of weights that are to be taken, on the host."""
        self._documents = job.documents
        """What is reset with these: a policy resets nothing, whatever the first weights were trained with."""

    def asks(self) -> list[Ask]:
        """On rank 0: what has each pipeline do an order; each in a thread of its own."""
        return [partial(self._ask, pipeline) for pipeline in range(len(self._own))]

    def num_slots(self, slots: int) -> list[int]:
        """The slots of each pipeline, of so many that a server was given."""
        found = slots_of(self._runtime.grid.plan, slots)
        found[self.pipeline] = self._engine.num_slots
        return found

    def follow(self) -> None:
        """On the other ranks: do what rank 0 says, until it says stop. Raises TrainingError."""
        while True:
            order = self._tell(self.pipeline, None)
            if order.stop:
                return
            if order.read is not None or order.take is not None:
                self._change(self.pipeline, order)
                continue
            tokens = self._do(order)
            own = self._own[self.pipeline]
            if 0 not in own and self._runtime.coord.rank == own[0]:
                with self._naming(self.pipeline, "the tokens of a round"):
                    dist.send_object_list([tokens], dst=0, group=self._groups[self._led[self.pipeline]])

    def _ask(self, pipeline: int, order: Order) -> list[Token]:
        self._tell(pipeline, order)
        if order.stop:
            return []
        if order.read is not None or order.take is not None:
            if faults := self._change(pipeline, order):
                raise WeightsRefused("; ".join(faults))
            return []
        if pipeline == self.pipeline:
            return self._do(order)
        told: list[Any] = [None]
        with self._naming(pipeline, "the tokens of a round"):
            leader = self._own[pipeline][0]
            dist.recv_object_list(told, src=leader, group=self._groups[self._led[pipeline]])
        return told[0]

    def _do(self, order: Order) -> list[Token]:
        """A round; the tokens of it are the same on all ranks of the pipeline."""
        self._engine.leave(order.leave)
        for number in order.leave:
            self._sampler.forget(number)
        self._engine.join(order.join)
        with as_training_error(self._runtime.coord):
            tokens = [] if self._engine.is_idle else self._engine.step()
        for token in tokens:
            if token.sample is not None:
                self._sampler.forget(token.ticket, token.number)
        return tokens

    def _change(self, pipeline: int, order: Order) -> list[str]:
        """Read weights, or take those that were read, on all ranks of a pipeline, which have no answer under
        way; what is wrong with them, on rank 0 too."""
        is_own, fault = pipeline == self.pipeline, None
        if is_own and order.read is not None:
            try:
                folder, model = Path(order.read), self._runtime.grid.plan.model
                self._read = self._read_parts(folder)
                self._documents = replace(self._documents, **resets_of(folder, model))
            except YuanError as error:
                fault = str(error)
        elif is_own:
            weights = own_weights(self._runtime)
            for name, part in self._read.items() if order.take else ():
                weights[name].copy_(part)
            if order.take:
                self._engine.documents = self._documents
            self._read = {}
        told, ranks = [fault], self._led[pipeline]
        if len(ranks) > 1:
            with self._naming(pipeline, "weights"):
                wait_for_all(ranks, "weights", self._groups[ranks])
                told = gather_objects(fault, self._groups[ranks])
        return list(dict.fromkeys(one for one in told if one is not None))

    def _read_parts(self, folder: Path) -> dict[str, torch.Tensor]:
        """This rank's parts of a folder's weights, in the precision in use. Raises CheckpointError."""
        held = open_model(folder, self._runtime.grid.plan.model)
        found: dict[str, torch.Tensor] = {}
        for name, weight in own_weights(self._runtime).items():
            whole, shard = held[name].read(), self._runtime.shards[name]
            part = torch.empty(weight.numel(), dtype=weight.dtype)
            for box in box_views(shard, part):
                here = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                box.tensor.copy_(whole[here])
            found[name] = part.view(weight.shape)
        return found

    def _tell(self, pipeline: int, order: Order | None) -> Order:
        """The next order of rank 0, on all ranks of a pipeline; they wait as long as nothing is asked."""
        ranks = self._led[pipeline]
        if len(ranks) > 1:
            with self._naming(pipeline, "an order"):
                wait_for_all(ranks, "an order", self._groups[ranks])
                order = share_object(order, group=self._groups[ranks])
        assert order is not None
        return order

    @contextmanager
    def _naming(self, pipeline: int, what: str) -> Iterator[None]:
        with as_training_error(self._runtime.coord), blame_peers(what, self._led[pipeline]):
            yield


@contextmanager
def opened_lane(job: ServeJob) -> Iterator[Lane]:
    """This rank's lane, with its weights; collective over all ranks, which end together.

    Raises TrainingError if the ranks do not connect, ConfigError if they were given unlike files.
    """
    board = None
    if job.position.world_size > 1:
        board = meet(STARTUP_SECONDS, place=job.plan.ranks[job.position.rank].device)
    explaining = explaining_memory(job.plan, job.position.rank, job.device)
    with ending_together(board, job.device), explaining:
        if board is not None:
            enter_world(board, device=job.device, timeout_seconds=TIMEOUT_SECONDS)
            _check_same(job)
        yield Lane(job, _build(job))


def _build(job: ServeJob) -> RankRuntime:
    """This rank's parts of the model, with the checkpoint's weights."""
    plan, model = job.plan, job.checkpoint.model
    options = EngineOptions(
        job.dtype, timeout_seconds=TIMEOUT_SECONDS, startup_timeout_seconds=STARTUP_SECONDS, trained=False
    )
    plan = replace(plan, sequence_length=min(plan.sequence_length, job.limits.max_length))
    runtime = build_runtime(plan, job.position.rank, model_parts(model, job.dtype), job.device, options)
    load_runtime(job.checkpoint, runtime)
    for part in runtime.parts.values():
        part.eval()
    return runtime


def _check_same(job: ServeJob) -> None:
    """Raise ConfigError, on all ranks, unless all have the same plan, checkpoint, tokenizer and limits."""
    own = {
        "plan": plan_digest(job.plan),
        "checkpoint": [job.checkpoint.step, as_plain(job.checkpoint.model)],
        "tokenizer": job.tokenizer.digest if job.tokenizer is not None else None,
        "options": [as_plain(job.limits), str(job.dtype)],
    }
    told = gather_objects(own)
    for rank, other in enumerate(told):
        for what, value in other.items():
            if value != told[0][what]:
                raise ConfigError(
                    f"rank {rank} ({job.plan.ranks[rank].device}) has another {what} than rank 0; give all "
                    f"ranks the same {what}"
                )


MOST_ALTERNATIVES = 20
"""Tokens beside the drawn one whose log-probabilities are told."""
NOT_FINITE = -1
"""In place of a token where the logits are not finite: the answer ends, and the request fails."""


@dataclass(frozen=True, kw_only=True)
class Asked(Ticket):
    """A prompt to be answered `count` times, with settings of its own."""

    sampling: Sampling
    seed: int
    """Answer number i has a generator with this seed + i."""
    max_new_tokens: int
    stop_ids: frozenset[int]
    alternatives: int | None = None
    """Most probable tokens to tell with each; None: not even the token's own log-probability is told."""
    at_temperature: bool = False
    """Whether log-probabilities are those of softmax(logits / temperature), of which tokens are drawn."""


class SeededSampler:
    """Draws with a generator for each answer; `Sampler` of an engine whose tickets are all `Asked`."""

    width = 2 + 2 * MOST_ALTERNATIVES
    """Token, log-probability, and the same of alternatives; of those that are not asked for -1 and 0."""

    def __init__(self) -> None:
        self._generators: dict[int | str, dict[int, torch.Generator]] = {}
        """By ticket and answer."""

    def draw(
        self, model: Transformer, hidden_RH: Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> Tensor:
        """See `Sampler.draw`: fp64 [N, width]."""
        logits_RV = model.logits(hidden_RH)
        found = torch.zeros(len(rows), self.width, dtype=torch.float64)
        part = model.vocabulary_part
        if part is not None:
            logits_RV = part.gather(logits_RV.contiguous()).transpose(0, 1).flatten(1)
            if part.first:
                return found
        logits_RV = logits_RV.to("cpu", torch.float32)
        for row, one, told in zip(rows, draws, found, strict=True):
            assert isinstance(one.ticket, Asked)
            self._draw_one(logits_RV[row], one, one.ticket, told)
        return found

    def _draw_one(self, logits_V: Tensor, one: Draw, asked: Asked, told: Tensor) -> None:
        """Fill the numbers [width] of a draw."""
        told[2::2] = -1.0
        if not bool(logits_V.isfinite().all()):
            told[0] = NOT_FINITE
            return
        token = sample(logits_V, asked.sampling, self._generator(asked, one.number))
        told[0] = token
        if asked.alternatives is None:
            return
        heat = asked.sampling.temperature if asked.at_temperature and asked.sampling.temperature else 1.0
        log_probs_V = (logits_V.double() / heat if heat != 1 else logits_V).log_softmax(0)
        told[1] = log_probs_V[token]
        if count := min(asked.alternatives, len(log_probs_V)):
            values, tokens = log_probs_V.topk(count)
            told[2 : 2 + 2 * count : 2] = tokens.double()
            told[3 : 3 + 2 * count : 2] = values.double()

    def _generator(self, asked: Asked, number: int) -> torch.Generator:
        of_ticket = self._generators.setdefault(asked.number, {})
        if number not in of_ticket:
            of_ticket[number] = torch.Generator("cpu")
            of_ticket[number].manual_seed(asked.seed + number)
        return of_ticket[number]

    def why_ended(self, ticket: Ticket, ids: Sequence[int]) -> Ended | None:
        """See `Sampler.why_ended`."""
        assert isinstance(ticket, Asked)
        if ids[-1] == NOT_FINITE or ids[-1] in ticket.stop_ids:
            return "stop"
        return "limit" if len(ids) >= ticket.max_new_tokens else None

    def forget(self, ticket: int | str, number: int | None = None) -> None:
        """Drop the generator of an answer that has ended, or of all answers to a ticket."""
        if number is not None:
            self._generators.get(ticket, {}).pop(number, None)
        if number is None or not self._generators.get(ticket):
            self._generators.pop(ticket, None)
