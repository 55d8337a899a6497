"""An engine: a pipeline of the plan that writes answers, many at a time.

A round is a forward-only lane of the executor over groups of slots: first, where slots have become free, one
that reads prompts, then one that adds a token to every answer under way. All ranks of the pipeline learn the
tokens of a round in one sum, and then decide alike what comes next: no rank leads. Prompts may come, and
answers be given up, between two rounds: of a batch (`generate`), or as a server is asked (`step`).

With an environment (`Talk`) an answer has several turns. Behind each it rests in its slot, and the others
go on, until what the environment says is read into the same slot.

G = groups of slots (the lane's micro-batches), B = slots of a group, R = prompts that a group reads at once,
S = tokens of a chunk, H = hidden size.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol, cast

import torch
import torch.distributed as dist
from torch import Tensor

from yuan_train.config.errors import TrainingError
from yuan_train.config.rl import RLConfig
from yuan_train.models.generate import (
    PREFILL_CHUNK,
    DocumentRules,
    Documents,
    Resets,
    SlotDocuments,
    documents_at,
    draw,
    draw_keys,
    fork,
    new_slots,
    padded_left,
    step_slots,
)
from yuan_train.models.layers import Keys
from yuan_train.models.transformer import Cache, Transformer
from yuan_train.parallel.apply import RankRuntime, make_forward_lane
from yuan_train.parallel.executor import Boundary, Executor, Stopwatch
from yuan_train.parallel.groups import as_training_error, make_tensor_groups
from yuan_train.parallel.transport import blame_peers
from yuan_train.rl.experience import Ended, Episode, Sample, Ticket
from yuan_train.train.build import DTYPES

CacheKind = Literal["prompts", "answers"]
GROUPS_PER_STAGE = 4
"""Groups of slots in flight for each stage: the pipeline then stands idle a fifth of a round, or less."""


REPLY_ROUNDS = 4
"""Rounds of the others before an answer of `generate` goes on with what its environment said: as many
whatever that took, so that a run is the same again."""


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


class Turn(NamedTuple):
    """A turn of the policy that has ended, and is for the environment to answer."""

    ticket: int | str
    number: int
    said: tuple[int, ...]
    """Its tokens without the one that ended it."""


class TurnReply(NamedTuple):
    """What an environment says to a turn."""

    ticket: int | str
    number: int
    ids: tuple[int, ...] | None
    """None: the answer is at its end."""
    reward: float | None
    fault: str | None = None
    """Why there is none: the ticket is given up."""


class Opened(NamedTuple):
    """Tickets with the prompts that environments gave, and why some have none."""

    tickets: Sequence[Ticket]
    faults: dict[int | str, str]


class Talk(Protocol):
    """Environments of a pipeline's answers; each method is called on all ranks of it."""

    @property
    def limits(self) -> TurnLimits:
        """How long an answer may be."""
        ...

    def open(self, tickets: Sequence[Ticket]) -> Opened:
        """Environments for all answers to tickets, and what is to be read first; waits for them."""
        ...

    def say(self, turns: Sequence[Turn]) -> None:
        """Have environments answer turns; does not wait."""
        ...

    def hear(self, turns: Sequence[Turn]) -> Sequence[TurnReply]:
        """The replies to these turns, in their order; waits for them."""
        ...


@dataclass(frozen=True)
class TurnLimits:
    """How long an answer of several turns may be."""

    turns: int
    tokens: int
    """Of the policy and the environment together."""


class Draw(NamedTuple):
    """A token to be drawn: number `position` of an answer. A tuple, as `Token`: there are some each round."""

    ticket: Ticket
    number: int
    """Of the answer, among those to its prompt."""
    position: int


class Sampler(Protocol):
    """How tokens are drawn, and when an answer ends; the same on all ranks of an engine."""

    @property
    def width(self) -> int:
        """Numbers of a draw: token, log-probability, and what else is told of it."""
        ...

    def draw(
        self, model: Transformer, hidden_RH: Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> Tensor:
        """On the last stage: fp64 [N, width] on the host; draw n is of row `rows[n]`. Under tensor
        parallelism collective over its ranks, of which the first one's numbers count."""
        ...

    def why_ended(self, ticket: Ticket, ids: Sequence[int]) -> Ended | None:
        """Why an answer ends with the last of its tokens; None if it goes on."""
        ...


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Draws that follow from a seed and a place; the same for all answers of a call."""

    seed: int
    max_new_tokens: int
    stop_ids: frozenset[int]
    temperature: float = 1.0
    greedy: bool = False

    @property
    def width(self) -> int:
        return 2

    def draw(
        self, model: Transformer, hidden_RH: Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> Tensor:
        keys: list[Keys] = []
        if not self.greedy:
            keys = [draw_keys(self.seed, one.ticket.number, one.number, one.position) for one in draws]
        return draw(model, hidden_RH, rows, keys, temperature=self.temperature, greedy=self.greedy)

    def why_ended(self, ticket: Ticket, ids: Sequence[int]) -> Ended | None:
        if ids[-1] in self.stop_ids:
            return "stop"
        return "limit" if len(ids) >= self.max_new_tokens else None


class SamplerByTicket:
    """Draws of tickets each of which has a `SamplingParams` of its own."""

    width = 2

    def __init__(self) -> None:
        self.params: dict[int | str, SamplingParams] = {}

    def draw(
        self, model: Transformer, hidden_RH: Tensor, rows: Sequence[int], draws: Sequence[Draw]
    ) -> Tensor:
        places: dict[SamplingParams, list[int]] = {}
        for place, one in enumerate(draws):
            places.setdefault(self.params[one.ticket.number], []).append(place)
        found_N2 = torch.empty(len(draws), self.width, dtype=torch.float64)
        for params, own in places.items():
            found_N2[own] = params.draw(model, hidden_RH, [rows[n] for n in own], [draws[n] for n in own])
        return found_N2

    def why_ended(self, ticket: Ticket, ids: Sequence[int]) -> Ended | None:
        return self.params[ticket.number].why_ended(ticket, ids)


class Token(NamedTuple):
    """A token that was added to an answer."""

    ticket: int | str
    number: int
    drawn: tuple[float, ...]
    """As `Sampler.draw` gives it."""
    sample: Sample | None
    """The whole answer, if this token ended it."""


@dataclass
class AnswerUnderWay:
    """An answer that is not at its end."""

    ticket: Ticket
    number: int
    documents: SlotDocuments | None = None
    ids: list[int] = field(default_factory=list[int])
    log_probs: list[float] = field(default_factory=list[float])
    rests: bool = False
    """Whether it waits for what an environment says."""
    unread: list[int] = field(default_factory=list[int])
    """Of its tokens those before the newest that no stage has read: of what an environment said."""
    drawn: list[int] = field(default_factory=list[int])
    """Places of the tokens that were drawn, in `ids`; of several turns."""
    turns: int = 0
    """That have ended."""
    last_turn: int = 0
    """Where the turn under way begins."""
    reward: float | None = None
    experts: list[Tensor] = field(default_factory=list[Tensor])
    """Of the tokens read so far, the prompt's first: int16 [tokens, L, K] each."""

    @property
    def place(self) -> int:
        """Of its newest token in the sequence, which is fed next."""
        return len(self.ticket.prompt_ids) + len(self.ids) - 1

    def hear(self, reply: TurnReply, limits: TurnLimits) -> Ended | None:
        """Go on behind the last turn with what the environment said; or why the answer is at its end: it says
        so, or the answer may not be longer."""
        self.rests = False
        if reply.reward is not None:
            self.reward = reply.reward + (self.reward or 0.0)
        if reply.ids is None:
            return "stop"
        if self.turns >= limits.turns or len(self.ids) + len(reply.ids) >= limits.tokens:
            return "limit"
        if reply.ids:
            self.unread += [self.ids[-1], *reply.ids[:-1]]
            self.ids += reply.ids
        self.last_turn = len(self.ids)
        return None

    def sample(self, ended: Ended, *, has_turns: bool) -> Sample:
        """The whole answer."""
        episode = None
        if has_turns:
            prompt, drawn = self.ticket.prompt_ids, tuple(self.drawn)
            episode = Episode(prompt, drawn, self.last_turn, self.turns, self.reward)
        log_probs = tuple(self.log_probs)
        found = Sample(self.ticket.number, self.number, tuple(self.ids), log_probs, ended, episode)
        if not self.experts:
            return found
        experts_TLK = torch.cat(self.experts)
        _, layers, slots = experts_TLK.shape
        return replace(found, experts=experts_TLK.numpy().tobytes(), expert_shape=(layers, slots))


@dataclass
class _Group:
    """One group of slots, as every rank of the pipeline knows it."""

    slots: list[AnswerUnderWay | None]
    prompts: list[Ticket] = field(default_factory=list[Ticket])
    """Read last: rows of the group's second cache."""
    documents: list[SlotDocuments] = field(default_factory=list[SlotDocuments])
    """Of these prompts, if something is reset at their ends; else none."""
    resets: list[Resets] = field(default_factory=list[Resets])
    """Of these prompts' tokens, likewise."""
    experts: list[list[Tensor]] = field(default_factory=list[list[Tensor]])
    """Of each of these prompts, as far as it is read: int16 [tokens, L, K]; none for a model without."""
    waiting: deque[tuple[int, AnswerUnderWay]] = field(default_factory=deque[tuple[int, AnswerUnderWay]])
    """Answers to them that wait for a slot, with the prompt's row; they have their first token."""

    @property
    def free(self) -> int:
        return self.slots.count(None)

    @property
    def under_way(self) -> list[tuple[int, AnswerUnderWay]]:
        """The slots whose answers go on, and these."""
        return [(slot, one) for slot, one in enumerate(self.slots) if one is not None and not one.rests]


@dataclass(frozen=True)
class _Work:
    """What a lane does with one group, on the device; all stages know it."""

    cache: CacheKind
    tokens_BS: Tensor
    positions_BS: Tensor
    last: int
    """The greatest position."""
    rows: tuple[int, ...] = ()
    """Rows of which the head draws, and each draw; none before the last chunk of prompts."""
    draws: tuple[Draw, ...] = ()
    documents: Documents | None = None


class _Stage:
    """One stage's part of the model in generation: the executor's `StageWork`."""

    def __init__(self, model: Transformer, engine: GenerationEngine) -> None:
        self._model, self._engine = model, engine
        self.caches: dict[tuple[int, CacheKind], Cache] = {}
        """By group and kind, of the groups that this rank runs."""

    def load(self, micro_batch: int) -> None:
        """Nothing is read: every rank knows the tokens."""

    def forward(self, micro_batch: int, hidden_BSH: Tensor | None) -> Tensor:
        """The hidden state of a group's next tokens; on the last stage draws, and returns a scalar."""
        engine, work = self._engine, self._engine.works[micro_batch]
        if work is None:
            engine.stopwatch.is_of("nothing")
            return engine.nothing(self._model)
        # What a round reads of the cache grows with the answers.
        engine.stopwatch.is_of(work.cache, work.tokens_BS.shape, work.last.bit_length())
        key = (micro_batch, work.cache)
        if key not in self.caches or (work.cache == "prompts" and engine.is_first_chunk):
            self.new_cache(micro_batch, work.cache, work.tokens_BS.shape[0])
        x = work.tokens_BS if hidden_BSH is None else hidden_BSH
        output = step_slots(
            self._model,
            x,
            self.caches[key],
            work.positions_BS,
            last=work.last,
            documents=work.documents,
            rests=work.cache == "answers" and engine.has_turns,
        )
        if engine.has_experts:
            found = {i: block.router.last for i, block in self._model.blocks.items() if block.has_experts}
            engine.chosen.setdefault(micro_batch, {}).update(found)
        if not self._model.has_head:
            return output
        if work.rows:
            engine.drawn[micro_batch] = engine.sampler.draw(self._model, output[:, -1], work.rows, work.draws)
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
    filled: int = 0
    """Slots that did, over all rounds."""


@dataclass(frozen=True, kw_only=True)
class EngineShape:
    """How many answers an engine writes at a time, and how long they get."""

    slots: int
    groups: int | None = None
    """Of the slots, as a plan has them; None: see `num_groups`."""
    group: int
    """Answers to a prompt."""
    max_length: int
    """Tokens of a prompt and its answer."""
    prefill_chunk: int = PREFILL_CHUNK
    """Tokens of prompts that are read at a time."""


class GenerationEngine:
    """Writes answers on the pipeline of this rank; every rank of it calls the same.

    As many as it has slots are under way at a time, in groups. The runtime's weights may change between two
    calls of `generate`: nothing is kept from one to the next.
    """

    def __init__(
        self,
        runtime: RankRuntime,
        shape: EngineShape,
        *,
        device: torch.device,
        dtype: torch.dtype,
        stopwatch: Stopwatch,
        ranks: dist.ProcessGroup | None,
        documents: DocumentRules | None = None,
    ) -> None:
        """`ranks`: the process group of the pipeline's ranks; None for one rank. `documents`: what is reset
        in an answer and its prompt; None: nothing, each is one document."""
        self._runtime = runtime
        self._group_size, self._chunk = shape.group, shape.prefill_chunk
        self._max_length = shape.max_length
        self._device, self._dtype = device, dtype
        self._ranks, self.documents = ranks, documents
        workers = runtime.grid.workers(runtime.coord.pipeline)
        groups = shape.groups or num_groups(len(workers), slots=shape.slots, group=shape.group)
        # Each replica of a stage takes every so many-th group.
        self._num_groups = max(groups, *map(len, workers))
        self._slots = -(-shape.slots // self._num_groups)
        self._hidden = hidden = runtime.grid.plan.model.hidden_size
        self.chosen: dict[int, dict[int, Tensor | None]] = {}
        """By group and layer, the experts of the tokens that this rank has just read."""
        self._program, self._bridge = make_forward_lane(
            runtime, self._num_groups, Boundary((self._slots, 1, hidden), dtype, device)
        )
        self._stages = {s: _Stage(cast(Transformer, part), self) for s, part in runtime.parts.items()}
        self._executor = Executor(self._stages, self._bridge, stopwatch)
        self.stopwatch = stopwatch
        self.works: list[_Work | None] = []
        self.drawn: dict[int, Tensor] = {}
        self.sampler: Sampler = SamplingParams(seed=0, max_new_tokens=0, stop_ids=frozenset())
        self._queue: deque[Ticket] = deque()
        self._groups: list[_Group] = []
        self._told: list[Token] = []  # of the step under way
        self.is_first_chunk = False
        self._shape = (0, 0)
        self._longest = 0
        """Tokens of the longest prompt that is read."""
        self.clock = EngineClock()
        """Of the last call."""
        self._limits: TurnLimits | None = None
        self._turns: list[Turn] = []  # that have ended, and nobody has taken yet
        self.faults: dict[int | str, str] = {}
        """By ticket of the last call of `generate`: why its environment gave none, or no answer."""
        self._news = False
        self.has_news = False
        """Whether a rank of the pipeline had news in the last step, as all of them know."""

    @property
    def has_experts(self) -> bool:
        """Whether the model has some."""
        return self._runtime.grid.plan.model.num_experts > 0

    def room(self, cache: CacheKind) -> int:
        """The longest sequence of a cache."""
        return self._longest if cache == "prompts" else self._max_length

    def nothing(self, model: Transformer) -> Tensor:
        """The output for a group without work: a message that the next stage does not look at."""
        if model.has_head:
            return torch.zeros((), dtype=self._dtype, device=self._device)
        return torch.zeros((*self._shape, self._hidden), dtype=self._dtype, device=self._device)

    @torch.no_grad()
    def generate(
        self, tickets: Sequence[Ticket], params: SamplingParams, talk: Talk | None = None
    ) -> list[Sample]:
        """Answer every ticket `count` times; collective over the pipeline's ranks, which all get the answers.

        They come in the order of tickets and numbers; of a ticket whose environment is at fault none, and
        `faults` says why. Raises TrainingError if a peer is lost, and NotFiniteDraw, naming the ticket, if a
        log-probability is not finite.
        """
        self.faults = {}
        order = {ticket.number: place for place, ticket in enumerate(tickets)}
        if talk is not None:
            tickets, self.faults = talk.open(tickets)
        self.begin(params, talk.limits if talk is not None else None)
        self.join(tickets)
        found: list[Sample] = []
        waiting: deque[tuple[int, Turn]] = deque()
        steps = 0
        while not self.is_idle:
            found += [token.sample for token in self.step() if token.sample is not None]
            if talk is None:
                continue
            steps += 1
            turns = self.take_turns()
            talk.say(turns)
            waiting.extend((steps + REPLY_ROUNDS, turn) for turn in turns)
            if waiting and self.is_resting:
                steps = max(steps, waiting[0][0])
            due: list[Turn] = []
            while waiting and waiting[0][0] <= steps:
                due.append(waiting.popleft()[1])
            due = [turn for turn in due if turn.ticket not in self.faults]
            found += self._follow(talk.hear(due) if due else ())
        for stage in self._stages.values():
            stage.caches.clear()
        found = [sample for sample in found if sample.ticket not in self.faults]
        return sorted(found, key=lambda sample: (order[sample.ticket], sample.number))

    def _follow(self, replies: Sequence[TurnReply]) -> list[Sample]:
        """The answers that replies end."""
        for reply in replies:
            if reply.fault is not None:
                self.faults.setdefault(reply.ticket, reply.fault)
        self.leave(self.faults)
        ended = [self.reply(one) for one in replies if one.ticket not in self.faults]
        return [sample for sample in ended if sample is not None]

    def begin(self, sampler: Sampler, limits: TurnLimits | None = None) -> None:
        """Forget all prompts and answers; those to come are drawn so. `limits`: of answers of several turns,
        which rest behind each until `reply`; None: of one."""
        self.sampler, self._limits = sampler, limits
        self._turns.clear()
        self._queue.clear()
        self._groups = [_Group([None] * self._slots) for _ in range(self._num_groups)]
        for stage in self._stages.values():
            stage.caches.clear()
        self.clock = EngineClock()

    def join(self, tickets: Sequence[Ticket]) -> None:
        """Have further tickets answered, after those that wait; their numbers are not those of any other."""
        self._queue.extend(ticket for ticket in tickets if ticket.count)

    def leave(self, numbers: Collection[int | str]) -> None:
        """Give up all answers to tickets of these numbers; their slots are free for others."""
        self._queue = deque(ticket for ticket in self._queue if ticket.number not in numbers)
        for group in self._groups:
            group.waiting = deque(one for one in group.waiting if one[1].ticket.number not in numbers)
            for slot, answer in enumerate(group.slots):
                if answer is not None and answer.ticket.number in numbers:
                    group.slots[slot] = None
        self._turns = [turn for turn in self._turns if turn.ticket not in numbers]

    @property
    def has_turns(self) -> bool:
        """Whether answers have several turns."""
        return self._limits is not None

    def take_turns(self) -> list[Turn]:
        """The turns that have ended since it was asked last, in their order."""
        found, self._turns = self._turns, []
        return found

    def reply(self, reply: TurnReply) -> Sample | None:
        """Let an answer go on behind its turn with what the environment said, from the next round on; the
        answer, if it is at its end."""
        assert self._limits is not None
        group, answer = self._find(reply.ticket, reply.number)
        if (ended := answer.hear(reply, self._limits)) is None:
            return None
        group.slots = [None if held is answer else held for held in group.slots]
        group.waiting = deque(one for one in group.waiting if one[1] is not answer)
        return answer.sample(ended, has_turns=True)

    def _find(self, ticket: int | str, number: int) -> tuple[_Group, AnswerUnderWay]:
        return next(
            (group, one)
            for group in self._groups
            for one in (*group.slots, *(waiting for _, waiting in group.waiting))
            if one is not None and (one.ticket.number, one.number) == (ticket, number)
        )

    @property
    def num_slots(self) -> int:
        """Answers that are under way at a time, at most."""
        return self._num_groups * self._slots

    @property
    def is_idle(self) -> bool:
        """Whether no prompt waits and no answer is under way."""
        return not self._queue and all(
            not group.waiting and group.free == self._slots for group in self._groups
        )

    @property
    def is_resting(self) -> bool:
        """Whether nothing goes on before an environment has replied."""
        return not self.is_idle and not any(
            group.under_way or (group.free and (group.waiting or self._queue)) for group in self._groups
        )

    @property
    def num_free(self) -> int:
        """Slots for which no answer waits; below 0 if more wait than there are."""
        waiting = sum(len(group.waiting) for group in self._groups)
        return sum(g.free for g in self._groups) - waiting - sum(ticket.count for ticket in self._queue)

    @torch.no_grad()
    def step(self, *, news: bool = False) -> list[Token]:
        """Read prompts for the slots that are free, and then add a token to every answer under way.

        Collective over the pipeline's ranks, which learn whether one of them has `news` by the sum that tells
        them the tokens. Returns the tokens in the order in which they were drawn; raises as `generate` does.
        """
        self._told = []
        self._news, self.has_news = news, news
        start = time.perf_counter()
        self._read_prompts()
        for number, group in enumerate(self._groups):
            self._fill(number, group)
        self._read_replies()
        read = time.perf_counter()
        self._add_tokens()
        self.clock.reading_seconds += read - start
        self.clock.round_seconds.append(time.perf_counter() - read)
        return self._told

    def _read_prompts(self) -> None:
        """Where slots are free and no answer waits for one, read the next prompts and draw first tokens."""
        groups, queue = self._groups, self._queue
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
            self._read_documents(group)
            group.experts = [[] for _ in group.prompts]
            readers.append(number)
        if not readers:
            return
        # A pipeline's messages have one shape; alone, rows and columns are those that are needed.
        rows = rows if self._bridge is not None else max(len(groups[n].prompts) for n in readers)
        longest = max(len(ticket.prompt_ids) for n in readers for ticket in groups[n].prompts)
        self._longest = longest
        chunks = -(-longest // self._chunk)
        width = -(-longest // chunks)
        for chunk in range(chunks):
            self.is_first_chunk = chunk == 0
            works: list[_Work | None] = [None] * len(groups)
            for number in readers:
                works[number] = self._chunk_of(groups[number], rows, chunk, chunks, width)
            self._run(works, (rows, width))
            for number, experts_RSLK in self._gather_experts(works).items():
                group, columns = groups[number], chunk * width
                for row, ticket in enumerate(group.prompts):
                    padding = chunks * width - len(ticket.prompt_ids)
                    group.experts[row].append(experts_RSLK[row, max(0, padding - columns) :])
        drawn = self._exchange({n: sum(ticket.count for ticket in groups[n].prompts) for n in readers})
        for number in readers:
            group, place = groups[number], 0
            for row, ticket in enumerate(group.prompts):
                for sample in range(ticket.count):
                    documents = group.documents[row].fork() if group.documents else None
                    answer = AnswerUnderWay(ticket, sample, documents, experts=list(group.experts[row]))
                    if not self._append(answer, drawn[number][place]):
                        group.waiting.append((row, answer))
                    place += 1

    def _read_documents(self, group: _Group) -> None:
        """Find the documents of the prompts that a group reads."""
        rules = self.documents
        if rules is not None:
            group.documents = [SlotDocuments(rules) for _ in group.prompts]
            prompts = zip(group.documents, group.prompts, strict=True)
            group.resets = [found.advance(list(ticket.prompt_ids), 0) for found, ticket in prompts]

    def _chunk_of(self, group: _Group, rows: int, chunk: int, chunks: int, width: int) -> _Work:
        """A chunk of `width` columns, of prompts that are padded on the left to so many chunks."""
        prompts = group.prompts
        first, total, is_last = chunk * width, chunks * width, chunk == chunks - 1
        ids = [ticket.prompt_ids for ticket in prompts] + [()] * (rows - len(prompts))
        tokens, positions = padded_left(ids, range(first, first + width), total)
        resets = [*group.resets, *[None] * (rows - len(group.resets))]
        draws = [
            (row, Draw(ticket, sample, 0))
            for row, ticket in enumerate(prompts)
            for sample in range(ticket.count)
        ]
        return _Work(
            "prompts",
            torch.tensor(tokens, device=self._device),
            torch.tensor(positions, device=self._device),
            last=max(0, *(p[-1] for p in positions)),
            rows=tuple(row for row, _ in draws) if is_last else (),
            draws=tuple(one for _, one in draws) if is_last else (),
            documents=self._documents_of(resets, positions),
        )

    def _documents_of(self, resets: list[Resets | None], places: list[list[int]]) -> Documents | None:
        """The resets of tokens at these places of their own."""
        return None if self.documents is None else documents_at(resets, places, self._device)

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

    def _read_replies(self) -> None:
        """Read what environments said, but the last token of each, which the round reads.

        Each pass reads as many tokens of every slot that it reads any of: behind padding a filter would go on
        from other tokens. It is no wider than prompts that fill a group.
        """
        most = max(1, self._chunk // self._group_size)
        while True:
            unread = [
                (number, slot, answer)
                for number, group in enumerate(self._groups)
                for slot, answer in group.under_way
                if answer.unread
            ]
            if not unread:
                return
            width = min(most, *(len(answer.unread) for _, _, answer in unread))
            works: list[_Work | None] = [None] * len(self._groups)
            for number in dict.fromkeys(number for number, _, _ in unread):
                tokens = [[0] * width for _ in range(self._slots)]
                positions = [[-1] * width for _ in range(self._slots)]
                for _, slot, answer in (one for one in unread if one[0] == number):
                    first = answer.place - len(answer.unread)
                    tokens[slot] = answer.unread[:width]
                    positions[slot] = list(range(first, first + width))
                    answer.unread = answer.unread[width:]
                works[number] = _Work(
                    "answers",
                    torch.tensor(tokens, device=self._device),
                    torch.tensor(positions, device=self._device),
                    last=max(row[-1] for row in positions),
                )
            self._run(works, (self._slots, width))
            experts = self._gather_experts(works)
            for number, slot, answer in unread if experts else ():
                answer.experts.append(experts[number][slot])

    def _add_tokens(self) -> None:
        """One round: the next token of every answer under way."""
        groups = self._groups
        works: list[_Work | None] = [None] * len(groups)
        counts: dict[int, int] = {}
        for number, group in enumerate(groups):
            held = group.under_way
            if not held:
                continue
            tokens, positions = [0] * self._slots, [-1] * self._slots
            resets: list[Resets | None] = [None] * self._slots
            for slot, answer in held:
                tokens[slot], positions[slot] = answer.ids[-1], answer.place
                if answer.documents is not None:
                    resets[slot] = answer.documents.advance([tokens[slot]], answer.place)
            # What was found of each slot is of its one token.
            firsts = [[min(place, 0)] for place in positions] if self.documents is not None else []
            works[number] = _Work(
                "answers",
                torch.tensor(tokens, device=self._device).unsqueeze(1),
                torch.tensor(positions, device=self._device).unsqueeze(1),
                last=max(positions),
                rows=tuple(slot for slot, _ in held),
                draws=tuple(Draw(answer.ticket, answer.number, len(answer.ids)) for _, answer in held),
                documents=self._documents_of(resets, firsts),
            )
            counts[number] = len(held)
        if not counts:
            return
        self.clock.rounds += 1
        self.clock.filled += sum(counts.values())
        self._run(works, (self._slots, 1))
        for number, experts_BSLK in self._gather_experts(works).items():
            for slot, answer in groups[number].under_way:
                answer.experts.append(experts_BSLK[slot])
        drawn = self._exchange(counts)
        for number in counts:
            group = groups[number]
            for (slot, answer), one in zip(group.under_way, drawn[number], strict=True):
                if self._append(answer, one):
                    group.slots[slot] = None

    def _append(self, answer: AnswerUnderWay, drawn: tuple[float, ...]) -> bool:
        """Add a token to an answer; whether that ended it."""
        ticket, number = answer.ticket, answer.number
        if not math.isfinite(sum(drawn)):
            raise NotFiniteDraw(
                f"ticket {ticket.number}, answer {number}: the log-probability of token "
                f"{len(answer.ids)} is {drawn[1]}"
            )
        if self.has_turns:
            answer.drawn.append(len(answer.ids))
        answer.ids.append(round(drawn[0]))
        answer.log_probs.append(drawn[1])
        ended = self.sampler.why_ended(ticket, answer.ids)
        answer.turns += ended is not None
        if self.has_turns and ended == "stop":
            answer.rests = True
            self._turns.append(Turn(ticket.number, number, tuple(answer.ids[answer.last_turn : -1])))
            ended = None
        sample = None
        if ended is not None:
            sample = answer.sample(ended, has_turns=self.has_turns)
        self._told.append(Token(ticket.number, number, drawn, sample))
        return ended is not None

    def _run(self, works: list[_Work | None], shape: tuple[int, int]) -> None:
        self.works, self._shape = works, shape
        self.drawn.clear()
        self.chosen.clear()
        if self._bridge is not None:
            self._bridge.resize((*shape, self._hidden))
        with as_training_error(self._runtime.coord):
            self._executor.run(self._program)

    def _gather_experts(self, works: Sequence[_Work | None]) -> dict[int, Tensor]:
        """int16 [rows, S, L, K] by group, on all ranks: the experts of the tokens that were just read. Empty
        for a model without."""
        if not self.has_experts:
            return {}
        model = self._runtime.grid.plan.model
        each = (model.num_layers, model.experts_per_token)
        shapes = {n: work.tokens_BS.shape for n, work in enumerate(works) if work is not None}
        counts = [rows * width * math.prod(each) for rows, width in shapes.values()]
        flat = torch.zeros(sum(counts), dtype=torch.int32)
        found: dict[int, Tensor] = {}
        for (number, shape), part in zip(shapes.items(), flat.split(counts), strict=True):
            found[number] = part.view(*shape, *each)
            for layer, chosen_TK in self.chosen.get(number, {}).items():
                if chosen_TK is not None and self._runtime.coord.tensor_rank == 0:
                    found[number][:, :, layer] = chosen_TK.view(*shape, -1).cpu()
        if self._ranks is not None:
            self._add_up(flat, "the sum of the experts that were chosen", self._ranks)
        return {number: experts.short() for number, experts in found.items()}

    def _add_up(self, flat: Tensor, what: str, ranks: dist.ProcessGroup) -> None:
        """Make numbers on the host their sum over the pipeline's ranks."""
        with as_training_error(self._runtime.coord), blame_peers(what, dist.get_process_group_ranks(ranks)):
            dist.all_reduce(flat, group=ranks)

    def _exchange(self, counts: dict[int, int]) -> dict[int, list[tuple[float, ...]]]:
        """What was drawn of each group, by group, on all ranks: only one adds what is not zero."""
        if self._ranks is None:
            return {n: [tuple(one) for one in self.drawn[n].tolist()] for n in counts}
        # A row more, for the news.
        flat = torch.zeros(sum(counts.values()) + 1, self.sampler.width, dtype=torch.float64)
        flat[-1] = float(self._news)
        parts = dict(zip(counts, flat[:-1].split(list(counts.values())), strict=True))
        for number, drawn in self.drawn.items():
            if self._runtime.coord.tensor_rank == 0:
                parts[number].copy_(drawn)
        self._add_up(flat, "the sum of the drawn tokens", self._ranks)
        self.has_news |= bool(flat[-1, 0] > 0)
        return {n: [tuple(one) for one in part.tolist()] for n, part in parts.items()}


def pipeline_group(runtime: RankRuntime, *, timeout_seconds: float) -> dist.ProcessGroup | None:
    """The group of all ranks of this rank's pipeline; None if it has one. Collective over all ranks."""
    grid = runtime.grid
    pipelines = [grid.ranks_of(p) for p in range(len(grid.plan.pipelines))]
    wide = [ranks for ranks in pipelines if len(ranks) > 1]
    groups = make_tensor_groups(wide, timeout_seconds=timeout_seconds) if dist.is_initialized() else {}
    return groups.get(pipelines[runtime.coord.pipeline])


def make_engine(
    runtime: RankRuntime,
    run: RLConfig,
    *,
    slots: int,
    groups: int | None = None,
    stopwatch: Stopwatch,
    device: torch.device,
    ranks: dist.ProcessGroup | None,
) -> GenerationEngine:
    """The engine that writes a run's answers on this rank's pipeline, whose `pipeline_group` is `ranks`."""
    shape = EngineShape(
        slots=slots,
        groups=groups,
        group=run.algorithm.group,
        max_length=run.data.max_prompt_tokens + run.generation.max_new_tokens,
        prefill_chunk=run.generation.prefill_chunk,
    )
    dtype = DTYPES[run.train.precision]
    return GenerationEngine(runtime, shape, device=device, dtype=dtype, stopwatch=stopwatch, ranks=ranks)
