"""Makes a batch: draws answers, has them scored, and replaces groups of which nothing can be learned.

With what reward functions get of answers, and the rewards that follow from their scores.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from yuan_train.config.errors import TrainingError, YuanError
from yuan_train.config.rl import LARGEST_REWARD, RewardConfig
from yuan_train.data.prompts import Prompt, text_of
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.parallel.groups import gather_objects, guard_world_collective, share_object, wait_for_world
from yuan_train.rl.experience import Group, Sample, Ticket, share_out
from yuan_train.rl.generator import GenerationEngine, SamplingParams, Talk
from yuan_train.rl.helpers import Scorers, Scores
from yuan_train.rl.job import RLJob
from yuan_train.rl.passes import ReadingModel, score_error
from yuan_train.rl.roles import RemoteReadingModel
from yuan_train.train.agreement import raise_together
from yuan_train.train.step import Trainer


@dataclass(frozen=True)
class Collected:
    """The groups of a batch, in the order of their tickets; the same on all ranks."""

    groups: tuple[Group, ...]
    next_ticket: int
    zero_variance: int
    """Of the groups that were scored, those of equal rewards."""
    filtered: int
    """Of these, those that were replaced."""
    failed: int
    rounds: int
    """Of generation, the most of any pipeline; 0 where other cards generate, as the next."""
    slots_filled: float
    """Share of the slots that got a token, over all rounds."""
    generation_seconds: float
    scoring_seconds: float


class Collector:
    """Draws and scores; every rank calls the same, at the same time."""

    def __init__(
        self,
        job: RLJob,
        trainer: Trainer,
        engine: GenerationEngine | None,
        scorers: Scorers | None,
        reward_model: ReadingModel | RemoteReadingModel | None,
        talk: Talk | None = None,
    ) -> None:
        """`engine`: None where other cards generate; `scorers`: on rank 0; `talk`: with environments."""
        self._job, self._trainer, self._engine, self._scorers = job, trainer, engine, scorers
        run = job.run
        self._reward_model, self._talk = reward_model, talk
        self._faults: dict[int | str, str] = {}
        """By ticket, of what is being scored: why an environment gave no answers."""
        self._rounds = self._filled = self._room = 0
        """Of the batch that is collected: the most of any pipeline, and slots with a token, of how many."""
        self._params = SamplingParams(
            seed=run.train.seed,
            max_new_tokens=run.generation.max_new_tokens,
            stop_ids=job.stop_ids,
            temperature=run.generation.temperature,
        )

    def collect(self, first_ticket: int) -> Collected:
        """The next batch: prompts_per_step groups, of tickets from `first_ticket` on.

        Groups that failed, and with `filter: zero_variance` those of equal rewards, are replaced by those of
        further tickets. Raises TrainingError if `max_refill` batches of prompts do not give one, and, with
        `on_error: stop`, for a group that failed.
        """
        run = self._job.run
        wanted, kept = run.train.prompts_per_step, list[Group]()
        ticket, last = first_ticket, first_ticket + run.algorithm.max_refill * wanted
        zero_variance = filtered = failed = 0
        seconds = [0.0, 0.0]
        error: str | None = None
        self._rounds = self._filled = self._room = 0
        while len(kept) < wanted:
            count = min(wanted - len(kept), last - ticket)
            if not count:
                scored_by = "the reward functions" if run.turns is None else "the environment, or what scores"
                advice = "give prompts that are neither too easy nor too hard, or set algorithm.filter: none"
                raise TrainingError(
                    f"{len(kept)} of {wanted} groups after {ticket - first_ticket} prompts "
                    f"(algorithm.max_refill: {run.algorithm.max_refill}): {filtered} had equal rewards, "
                    f"{failed} failed{f', the last because {error}' if error else ''}; "
                    + (advice if filtered >= failed else f"correct {scored_by}")
                )
            for group, why in self._groups(range(ticket, ticket + count), seconds):
                if group is None:
                    failed += 1
                    error = why
                    continue
                zero_variance += group.is_level
                if group.is_level and run.algorithm.filter == "zero_variance":
                    filtered += 1
                    continue
                kept.append(group)
            ticket += count
        return Collected(
            tuple(kept),
            ticket,
            zero_variance,
            filtered,
            failed,
            self._rounds,
            self._filled / max(self._room, 1),
            generation_seconds=seconds[0],
            scoring_seconds=seconds[1],
        )

    def evaluate(self) -> dict[str, float]:
        """`pass_1`, `pass_k` and `mean_reward` on the prompts of data.evaluation.

        An answer passes if the first reward function, without one the environment, gives it 1 or more; a
        group that failed does not.
        """
        job, config = self._job, self._job.run.evaluation
        params = SamplingParams(
            seed=job.run.train.seed,
            max_new_tokens=job.run.generation.max_new_tokens,
            stop_ids=job.stop_ids,
            temperature=config.temperature or 1.0,
            greedy=not config.temperature,
        )
        tickets = [
            Ticket(f"evaluation-{i}", prompt.ids, config.samples, prompt)
            for i, prompt in enumerate(job.evaluation)
        ]
        samples = self._generate(tickets, params)
        scored = self._score(list(zip(tickets, samples, strict=True)))
        shares: list[float] = []
        rewards: list[float] = []
        for answers, scores in zip(samples, scored, strict=True):
            shares.append(sum(_passed(scores.of_answers, answers)) / config.samples)
            own = self._rewards(scores, answers)
            rewards += [] if _too_large(own) else own
        count = len(tickets)
        return {
            "pass_1": sum(shares) / count,
            "pass_k": sum(share > 0 for share in shares) / count,
            "mean_reward": sum(rewards) / max(len(rewards), 1),
        }

    def _groups(self, numbers: Sequence[int], seconds: list[float]) -> list[tuple[Group | None, str | None]]:
        """The groups of some tickets, or why there is none; adds to the seconds of drawing and scoring."""
        job = self._job
        tickets = [self._ticket(number) for number in numbers]
        start = time.perf_counter()
        samples = self._generate(tickets, self._params)
        drawn = time.perf_counter()
        scored = self._score(list(zip(tickets, samples, strict=True)))
        seconds[0] += drawn - start
        seconds[1] += time.perf_counter() - drawn
        found: list[tuple[Group | None, str | None]] = []
        for number, answers, scores in zip(numbers, samples, scored, strict=True):
            rewards = tuple(self._rewards(scores, answers))
            fault = scores.error or _too_large(rewards)
            if fault is not None:
                why = f"ticket {number}: {fault}"
                if job.run.reward.on_error == "stop":
                    raise TrainingError(f"{why}; correct it, or set reward.on_error: drop")
                found.append((None, why))
                continue
            prompt = prompt_read(job.prompts[number], answers)
            found.append((Group(number, prompt, tuple(answers), scores.of_answers, rewards), None))
            if job.run.data.skip_solved and all(_passed(scores.of_answers, answers)):
                job.prompts.rest(number, job.run.data.skip_solved)
        return found

    def _ticket(self, number: int) -> Ticket:
        prompt = self._job.prompts[number]
        return Ticket(number, prompt.ids, self._job.run.algorithm.group, prompt)

    def _rewards(self, scores: Scores, answers: Sequence[Sample]) -> list[float]:
        config, limit = self._job.run.reward, self._job.run.generation.max_new_tokens
        return [
            reward_of(of_answer, answer, config, max_new_tokens=limit)
            for of_answer, answer in zip(scores.of_answers, answers, strict=False)
        ]

    def _generate(self, tickets: Sequence[Ticket], params: SamplingParams) -> list[list[Sample]]:
        """The answers to each ticket, on all ranks; each pipeline writes its share."""
        shares, coord = self._job.shares, self._trainer.runtime.coord
        assert self._engine is not None
        mine = self._engine.generate(share_out(tickets, shares)[coord.pipeline], params, self._talk)
        clock = self._engine.clock
        clocks = [(clock.rounds, clock.filled, clock.rounds * self._engine.num_slots)]
        self._faults = dict(self._engine.faults)
        if len(shares) > 1:
            wait_for_world(coord, "the other pipelines' answers")
            grid = self._trainer.runtime.grid
            is_first = coord.rank == min(r for replica in grid.replicas(coord.pipeline) for r in replica)
            own = (mine, self._faults, clocks[0])
            with guard_world_collective(coord, "the gathering of answers"):
                told = [one for one in gather_objects(own if is_first else None) if one is not None]
            mine = [sample for samples, _, _ in told for sample in samples]
            for _, faults, _ in told:
                self._faults |= faults
            clocks = [own for _, _, own in told]
        self._rounds += max(rounds for rounds, _, _ in clocks)
        self._filled += sum(filled for _, filled, _ in clocks)
        self._room += sum(room for _, _, room in clocks)
        found: dict[int | str, list[Sample]] = {ticket.number: [] for ticket in tickets}
        for sample in mine:
            found[sample.ticket].append(sample)
        return [found[ticket.number] for ticket in tickets]

    def _score(self, groups: Sequence[tuple[Ticket, Sequence[Sample]]]) -> list[Scores]:
        """The functions' scores, to which all ranks add the reward model's."""
        answered = [group for group in groups if group[0].number not in self._faults]
        found = iter(self._score_by_functions(answered))
        scored = [
            Scores(error=self._faults[ticket.number]) if ticket.number in self._faults else next(found)
            for ticket, _ in groups
        ]
        if self._reward_model is None:
            return scored
        return self._with_model(self._reward_model, groups, scored)

    def _score_by_functions(self, groups: Sequence[tuple[Ticket, Sequence[Sample]]]) -> list[Scores]:
        """Rank 0 has the functions score, all get it."""
        scores: list[Scores] = []
        fault: YuanError | None = None
        if self._scorers is not None:
            try:
                tokenizer = self._job.policy.tokenizer
                scores = self._scorers.score([answer_fields(*group, tokenizer) for group in groups])
            except OSError as error:
                fault = TrainingError(f"the reward functions' processes cannot be used: {error}")
        wait_for_world(self._trainer.runtime.coord, "rank 0's scores")
        with guard_world_collective(self._trainer.runtime.coord, "the agreement on scores"):
            raise_together(fault)
        with guard_world_collective(self._trainer.runtime.coord, "the broadcast of scores"):
            return share_object(scores)

    def _with_model(
        self,
        model: ReadingModel | RemoteReadingModel,
        groups: Sequence[tuple[Ticket, Sequence[Sample]]],
        scored: Sequence[Scores],
    ) -> list[Scores]:
        """Scores with those of the reward model behind them; groups that failed are left as they are."""
        read = [(n, *group) for n, group in enumerate(groups) if scored[n].error is None]
        sequences = [
            (*prompt_read(ticket.prompt, samples).ids, *sample.ids)
            for _, ticket, samples in read
            for sample in samples
            if ticket.prompt is not None
        ]
        values = iter(model.score(sequences))
        found = list(scored)
        for n, _, samples in read:
            own = [next(values) for _ in samples]
            pairs = zip(scored[n].of_answers, own, strict=True)
            error = score_error(own)
            found[n] = Scores(error=error) if error else Scores(tuple((*row, value) for row, value in pairs))
        return found


def prompt_read(prompt: Prompt, samples: Sequence[Sample]) -> Prompt:
    """What was read before answers: the prompt, or what their environments gave in its place."""
    episode = samples[0].episode if samples else None
    return prompt if episode is None else replace(prompt, ids=episode.prompt_ids)


def _passed(scores: Sequence[Sequence[float | None]], answers: Sequence[Sample]) -> list[bool]:
    """Whether each answer got 1 or more of the first function, without one of the environment."""
    return [
        (next(iter(of_answer), answer.given) or 0.0) >= 1
        for of_answer, answer in zip(scores, answers, strict=False)
    ]


def _too_large(rewards: Sequence[float]) -> str | None:
    """What is wrong with the rewards of a group, if one is too large to compare with others."""
    # Not finite ones too: two scores may overflow, each to its side, and their sum is no number.
    found = [reward for reward in rewards if not abs(reward) <= LARGEST_REWARD]
    if not found:
        return None
    return f"an answer's reward is {found[0]:g}; wanted one within {LARGEST_REWARD:g}, or give reward.clip"


def reward_of(
    scores: Sequence[float | None], sample: Sample, config: RewardConfig, *, max_new_tokens: int
) -> float:
    """The reward of an answer: the weighted sum and what an environment gave, clipped; less the penalty of
    its length.

    Linear from 0 at `max_new_tokens - buffer` to `penalty` at `max_new_tokens`: DAPO, Yu et al. 2025
    (arXiv 2503.14476, eq. 13). With `truncated`, that is the reward of an answer that reached the limit.
    """
    if config.truncated is not None and sample.ended == "limit":
        return config.truncated
    pairs = zip(config.weights, scores, strict=True)
    total = sum(weight * score for weight, score in pairs if score is not None) + (sample.given or 0.0)
    if config.clip is not None:
        total = min(max(total, config.clip[0]), config.clip[1])
    buffer = config.overlong.buffer
    over = len(sample.ids) - (max_new_tokens - buffer)
    return total - (config.overlong.penalty * over / buffer if buffer and over > 0 else 0.0)


def answer_fields(
    ticket: Ticket, samples: Sequence[Sample], tokenizer: Tokenizer | None
) -> list[Mapping[str, Any]]:
    """What reward functions get of each answer."""
    prompt = ticket.prompt
    assert prompt is not None
    return [
        {
            **prompt.columns,
            "prompt": prompt.text,
            "completion": text_of(sample.said, tokenizer),
            "answer": prompt.answer,
            "prompt_ids": prompt.ids,
            "completion_ids": sample.ids,
            "ended": sample.ended,
            "ticket": sample.ticket,
            "sample": sample.number,
            "turns": turns_of(sample, tokenizer),
        }
        for sample in samples
    ]


def turns_of(sample: Sample, tokenizer: Tokenizer | None) -> list[str]:
    """The texts of an answer, the policy's and the environment's by turns, without what ends a turn."""
    drawn = set(sample.drawn)
    texts: list[str] = []
    for is_drawn, group in itertools.groupby(range(len(sample.ids)), key=drawn.__contains__):
        places = list(group)
        is_whole = places[-1] + 1 < len(sample.ids) or sample.ended == "stop"
        last = places[-1] if is_drawn and is_whole else places[-1] + 1
        texts.append(text_of(sample.ids[places[0] : last], tokenizer))
    return texts
