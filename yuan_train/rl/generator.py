"""An engine: a pipeline of the plan that writes answers, many at a time.

A round is a forward-only lane of the executor over groups of slots: first, where slots have become free, one
that reads prompts, then one that adds a token to every answer under way. All ranks of the pipeline learn the
tokens of a round in one sum, and then decide alike what comes next: no rank leads.

G = groups of slots (the lane's micro-batches), B = slots of a group, R = prompts that a group reads at once,
S = tokens of a chunk, H = hidden size.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.config.errors import TrainingError
from yuan_train.models.sampling import draw, draw_keys
from yuan_train.models.slots import fork, new_slots, step_slots
from yuan_train.models.transformer import Cache, Transformer
from yuan_train.parallel.apply import RankRuntime, make_forward_lane
from yuan_train.parallel.bridge import Boundary
from yuan_train.parallel.executor import Executor, Stopwatch
from yuan_train.parallel.groups import as_training_error
from yuan_train.parallel.transport import blame_peers
from yuan_train.rl.tickets import Sample, Ticket

CacheKind = Literal["prompts", "answers"]
GROUPS_PER_STAGE = 4
"""Groups of slots in flight for each stage: the pipeline then stands idle a fifth of a round, or less."""


class NotFiniteDraw(TrainingError):
    """A log-probability of a draw is not finite: the weights are at fault. Every rank of the engine knows."""


def num_groups(num_stages: int, *, slots: int, group: int) -> int:
    """Groups of slots of a pipeline without a plan of its own for them: GROUPS_PER_STAGE for each stage, but
    none smaller than the answers to a prompt, which stay where it was read; alike in whole prompts."""
    if num_stages == 1:
        return 1
    prompts = max(slots // group, 1)
    each = -(-prompts // min(GROUPS_PER_STAGE * num_stages, prompts))
    return -(-prompts // each)


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """How tokens are drawn; the same for all answers of a call."""

    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 1.0
    greedy: bool = False


@dataclass
class _Answer:
    """An answer under way."""

    ticket: Ticket
    number: int
    ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])

    @property
    def place(self) -> int:
        """Of its newest token in the sequence, which is fed next."""
        return len(self.ticket.prompt_ids) + len(self.ids) - 1


@dataclass
class _Group:
    """One group of slots, as every rank of the pipeline knows it."""

    slots: list[_Answer | None]
    prompts: list[Ticket] = field(default_factory=list[Ticket])
    """Read last: rows of the group's second cache."""
    waiting: deque[tuple[int, _Answer]] = field(default_factory=deque[tuple[int, _Answer]])
    """Answers to them that wait for a slot, with the prompt's row; they have their first token."""

    @property
    def free(self) -> int:
        return self.slots.count(None)


@dataclass(frozen=True)
class _Work:
    """What a lane does with one group, on the device; all stages know it."""

    cache: CacheKind
    tokens_BS: Tensor
    positions_BS: Tensor
    last: int
    """The greatest position."""
    rows: tuple[int, ...] = ()
    """Rows of which the head draws, and the keys of each draw; none before the last chunk of prompts."""
    keys: tuple[tuple[int, int, int], ...] = ()


class _Stage:
    """One stage's part of the model in generation: the executor's `StageWork`."""

    def __init__(self, model: Transformer, engine: Engine) -> None:
        self._model = model
        self._engine = engine
        self.caches: dict[tuple[int, CacheKind], Cache] = {}
        """By group and kind, of the groups that this rank runs."""

    def load(self, micro_batch: int) -> None:
        """Nothing is read: every rank knows the tokens."""

    def forward(self, micro_batch: int, hidden_BSH: Tensor | None) -> Tensor:
        """The hidden state of a group's next tokens; on the last stage draws, and returns a scalar."""
        engine, work = self._engine, self._engine.works[micro_batch]
        if work is None:
            return engine.nothing(self._model)
        key = (micro_batch, work.cache)
        if key not in self.caches or (work.cache == "prompts" and engine.is_first_chunk):
            self.new_cache(micro_batch, work.cache, work.tokens_BS.shape[0])
        x = work.tokens_BS if hidden_BSH is None else hidden_BSH
        output = step_slots(self._model, x, self.caches[key], work.positions_BS, last=work.last)
        if not self._model.has_head:
            return output
        if work.rows:
            drawing = engine.drawing
            engine.drawn[micro_batch] = draw(
                self._model,
                output[:, -1],
                work.rows,
                work.keys,
                temperature=drawing.temperature,
                greedy=drawing.greedy,
            )
        return output.new_zeros(())

    def new_cache(self, group: int, kind: CacheKind, slots: int) -> Cache:
        """An empty cache of a group, in place of the one that it had."""
        made = new_slots(self._model, slots=slots, max_length=self._engine.room(kind))
        self.caches[group, kind] = made
        return made

    def splitting(self, micro_batch: int, split: bool) -> AbstractContextManager[None]:
        """Never: generation has no backward."""
        return contextlib.nullcontext()

    def backward_weight(self, micro_batch: int) -> None:
        """Never: generation has no backward."""


@dataclass
class EngineClock:
    """What a call took; the tokens of each pass come to the host, so that a card has then done its work."""

    reading_seconds: float = 0.0
    """Of reading prompts, first tokens drawn, and giving them slots."""
    round_seconds: list[float] = field(default_factory=list[float])
    """Of each round behind it; 0 of the last, if prompts' first tokens were all that was left."""
    rounds: int = 0
    """In which slots got a token each."""


class Engine:
    """Writes answers on the pipeline of this rank; every rank of it calls the same.

    `slots` answers are under way at a time, in groups. The runtime's weights may change between two calls:
    nothing is kept from one to the next.
    """

    def __init__(
        self,
        runtime: RankRuntime,
        *,
        slots: int,
        groups: int | None = None,
        group: int,
        max_prompt_tokens: int,
        max_new_tokens: int,
        prefill_chunk: int,
        device: torch.device,
        dtype: torch.dtype,
        stopwatch: Stopwatch,
        ranks: dist.ProcessGroup | None,
    ) -> None:
        """`groups`: of the slots, as a plan has them; None: see `num_groups`. `group`: answers to a prompt.
        `ranks`: the process group of the pipeline's ranks; None for one rank."""
        self._runtime = runtime
        self._group_size = group
        self._max_prompt_tokens = max_prompt_tokens
        self._max_length = max_prompt_tokens + max_new_tokens
        self._chunk = prefill_chunk
        self._device = device
        self._dtype = dtype
        self._ranks = ranks
        grid, coord = runtime.grid, runtime.coord
        workers = grid.workers(coord.pipeline)
        # Each replica of a stage takes every so many-th group.
        self._num_groups = max(
            groups or num_groups(len(workers), slots=slots, group=group), *map(len, workers)
        )
        self._slots = -(-slots // self._num_groups)
        hidden = grid.plan.model.hidden_size
        self._hidden = hidden
        self._program, self._bridge = make_forward_lane(
            runtime, self._num_groups, Boundary((self._slots, 1, hidden), dtype, device)
        )
        self._stages = {s: _Stage(cast(Transformer, part), self) for s, part in runtime.parts.items()}
        self._executor = Executor(self._stages, self._bridge, stopwatch)
        self.works: list[_Work | None] = []
        self.drawn: dict[int, Tensor] = {}
        self.drawing = Drawing(seed=0, max_new_tokens=max_new_tokens, stop_ids=frozenset())
        self.is_first_chunk = False
        self._shape = (0, 0)
        self.clock = EngineClock()
        """Of the last call."""

    def room(self, cache: CacheKind) -> int:
        """The longest sequence of a cache."""
        return self._max_prompt_tokens if cache == "prompts" else self._max_length

    def nothing(self, model: Transformer) -> Tensor:
        """The output for a group without work: a message that the next stage does not look at."""
        if model.has_head:
            return torch.zeros((), dtype=self._dtype, device=self._device)
        return torch.zeros((*self._shape, self._hidden), dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def generate(self, tickets: Sequence[Ticket], drawing: Drawing) -> list[Sample]:
        """Answer every ticket `count` times; collective over the pipeline's ranks, which all get the answers.

        They come in the order of tickets and numbers. Raises TrainingError if a peer is lost, and
        NotFiniteDraw, naming the ticket, if a log-probability is not finite.
        """
        self.drawing = drawing
        queue = deque(ticket for ticket in tickets if ticket.count)
        groups = [_Group([None] * self._slots) for _ in range(self._num_groups)]
        found: list[Sample] = []
        for stage in self._stages.values():
            stage.caches.clear()
        self.clock = EngineClock()
        while queue or any(group.waiting or group.free < self._slots for group in groups):
            start = time.perf_counter()
            self._read_prompts(groups, queue, found)
            for number, group in enumerate(groups):
                self._fill(number, group)
            read = time.perf_counter()
            self._add_tokens(groups, found)
            self.clock.reading_seconds += read - start
            self.clock.round_seconds.append(time.perf_counter() - read)
        for stage in self._stages.values():
            stage.caches.clear()
        order = {ticket.number: place for place, ticket in enumerate(tickets)}
        return sorted(found, key=lambda sample: (order[sample.ticket], sample.number))

    def _read_prompts(self, groups: list[_Group], queue: deque[Ticket], found: list[Sample]) -> None:
        """Where slots are free and no answer waits for one, read the next prompts and draw first tokens."""
        readers: list[int] = []
        rows = -(-self._slots // self._group_size)
        for number, group in enumerate(groups):
            if group.waiting or not group.free or not queue:
                continue
            group.prompts = []
            expected = 0
            while queue and expected < group.free and len(group.prompts) < rows:
                expected += queue[0].count
                group.prompts.append(queue.popleft())
            readers.append(number)
        if not readers:
            return
        # A pipeline's messages have one shape; alone, rows and columns are those that are needed.
        rows = rows if self._bridge is not None else max(len(groups[n].prompts) for n in readers)
        longest = max(len(ticket.prompt_ids) for n in readers for ticket in groups[n].prompts)
        chunks = -(-longest // self._chunk)
        width = -(-longest // chunks)
        for chunk in range(chunks):
            self.is_first_chunk = chunk == 0
            works: list[_Work | None] = [None] * len(groups)
            for number in readers:
                works[number] = self._chunk_of(groups[number].prompts, rows, chunk, chunks, width)
            self._run(works, (rows, width))
        drawn = self._exchange({n: sum(ticket.count for ticket in groups[n].prompts) for n in readers})
        for number in readers:
            group, place = groups[number], 0
            for row, ticket in enumerate(group.prompts):
                for sample in range(ticket.count):
                    answer = _Answer(ticket, sample)
                    if not self._append(answer, drawn[number][place], found):
                        group.waiting.append((row, answer))
                    place += 1

    def _chunk_of(self, prompts: list[Ticket], rows: int, chunk: int, chunks: int, width: int) -> _Work:
        """A chunk of `width` columns, of prompts that are padded on the left to so many chunks."""
        first, total, is_last = chunk * width, chunks * width, chunk == chunks - 1
        tokens: list[list[int]] = []
        positions: list[list[int]] = []
        for row in range(rows):
            ids = prompts[row].prompt_ids if row < len(prompts) else ()
            padding = total - len(ids)
            columns = range(first, first + width)
            tokens.append([ids[c - padding] if c >= padding else 0 for c in columns])
            positions.append([c - padding if c >= padding else -1 for c in columns])
        draws = [
            (row, draw_keys(self.drawing.seed, ticket.number, sample, 0))
            for row, ticket in enumerate(prompts)
            for sample in range(ticket.count)
        ]
        return _Work(
            "prompts",
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            last=max(0, *(p[-1] for p in positions)),
            rows=tuple(row for row, _ in draws) if is_last else (),
            keys=tuple(keys for _, keys in draws) if is_last else (),
        )

    def _fill(self, number: int, group: _Group) -> None:
        """Give free slots to answers that wait; their prompt is copied in."""
        rows: list[int] = []
        slots: list[int] = []
        length = 1
        for slot, held in enumerate(group.slots):
            if held is None and group.waiting:
                row, answer = group.waiting.popleft()
                group.slots[slot] = answer
                rows.append(row)
                slots.append(slot)
                length = max(length, len(answer.ticket.prompt_ids))
        if not rows:
            return
        for stage in self._stages.values():
            source = stage.caches.get((number, "prompts"))
            if source is None:
                continue
            target = stage.caches.get((number, "answers"))
            if target is None:
                target = stage.new_cache(number, "answers", self._slots)
            fork(
                source,
                torch.tensor(rows, device=self._device),
                target,
                torch.tensor(slots, device=self._device),
                length=length,
            )

    def _add_tokens(self, groups: list[_Group], found: list[Sample]) -> None:
        """One round: the next token of every answer under way."""
        works: list[_Work | None] = [None] * len(groups)
        counts: dict[int, int] = {}
        for number, group in enumerate(groups):
            held = [(slot, answer) for slot, answer in enumerate(group.slots) if answer is not None]
            if not held:
                continue
            tokens, positions = [[0]] * self._slots, [[-1]] * self._slots
            for slot, answer in held:
                tokens[slot], positions[slot] = [answer.ids[-1]], [answer.place]
            works[number] = _Work(
                "answers",
                torch.tensor(tokens, device=self._device),
                torch.tensor(positions, device=self._device),
                last=max(answer.place for _, answer in held),
                rows=tuple(slot for slot, _ in held),
                keys=tuple(
                    draw_keys(self.drawing.seed, answer.ticket.number, answer.number, len(answer.ids))
                    for _, answer in held
                ),
            )
            counts[number] = len(held)
        if not counts:
            return
        self.clock.rounds += 1
        self._run(works, (self._slots, 1))
        drawn = self._exchange(counts)
        for number in counts:
            group, place = groups[number], 0
            for slot, answer in enumerate(group.slots):
                if answer is not None:
                    if self._append(answer, drawn[number][place], found):
                        group.slots[slot] = None
                    place += 1

    def _append(self, answer: _Answer, drawn: tuple[float, float], found: list[Sample]) -> bool:
        """Add a token to an answer; whether that ended it."""
        if not all(map(math.isfinite, drawn)):
            raise NotFiniteDraw(
                f"ticket {answer.ticket.number}, answer {answer.number}: the log-probability of token "
                f"{len(answer.ids)} is {drawn[1]}"
            )
        token, log_prob = round(drawn[0]), drawn[1]
        answer.ids.append(token)
        answer.log_probs.append(log_prob)
        stopped = token in self.drawing.stop_ids
        if not stopped and len(answer.ids) < self.drawing.max_new_tokens:
            return False
        found.append(
            Sample(
                answer.ticket.number,
                answer.number,
                tuple(answer.ids),
                tuple(answer.log_probs),
                "stop" if stopped else "limit",
            )
        )
        return True

    def _run(self, works: list[_Work | None], shape: tuple[int, int]) -> None:
        self.works, self._shape = works, shape
        self.drawn.clear()
        if self._bridge is not None:
            self._bridge.resize((*shape, self._hidden))
        with as_training_error(self._runtime.coord):
            self._executor.run(self._program)

    def _exchange(self, counts: dict[int, int]) -> dict[int, list[tuple[float, float]]]:
        """What was drawn of each group, by group, on all ranks: only one adds what is not zero."""
        flat = torch.zeros(sum(counts.values()), 2, dtype=torch.float64)
        parts = dict(zip(counts, flat.split(list(counts.values())), strict=True))
        for number, drawn in self.drawn.items():
            if self._ranks is None or self._runtime.coord.tensor_rank == 0:
                parts[number].copy_(drawn)
        if self._ranks is not None:
            what = "the sum of the drawn tokens"
            with (
                as_training_error(self._runtime.coord),
                blame_peers(what, dist.get_process_group_ranks(self._ranks)),
            ):
                dist.all_reduce(flat, group=self._ranks)
        return {n: [(token, log_prob) for token, log_prob in part.tolist()] for n, part in parts.items()}
