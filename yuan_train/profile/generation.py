"""Measures what a run of reinforcement learning does beside the policy's training, for a profile.

Rounds and readings are those of the real engine, at two depths: their difference is a layer's, and the rest
of the deeper one is the ends' and what the engine does beside the model. It stands alone because only here is
the engine that generates needed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import cast

import numpy as np
import torch

from yuan_train.config.devices import Simulated
from yuan_train.config.plan import one_stage_plan
from yuan_train.config.profile import BatchProfile, GenerationProfile
from yuan_train.config.rl import RLConfig
from yuan_train.data.prompts import Prompt
from yuan_train.data.tokenizer import Tokenizer
from yuan_train.models.generate import draw, draw_keys
from yuan_train.models.transformer import Transformer
from yuan_train.parallel.apply import RankRuntime
from yuan_train.parallel.device import release_free_memory
from yuan_train.parallel.executor import Stopwatch
from yuan_train.parallel.gradients import GradReducer
from yuan_train.parallel.grid import Grid
from yuan_train.parallel.groups import Groups
from yuan_train.profile.units import ProfileCase, all_agree, make_part, num_layers_in_a_row, trimmed_mean
from yuan_train.rl.collect import answer_fields
from yuan_train.rl.experience import Group, Sample, Ticket, make_rows
from yuan_train.rl.generator import EngineShape, GenerationEngine, SamplingParams
from yuan_train.rl.helpers import Scorers
from yuan_train.rl.updates import token_advantages
from yuan_train.schedule.schedules import forward_only

ROUNDS = 8
"""Of a call that is measured."""
MIN_CALLS = 2
SHARE_OF_SECONDS = 0.25
"""Of `seconds_per_unit`, for each number of slots and context."""
MOST_SLOTS, MOST_CACHE_BYTES = 256, 1 << 30
"""The most slots that are measured, and the most bytes of the keys and values of all."""
BATCHES = 3
"""Scored and packed."""


@dataclass(frozen=True)
class _Pass:
    """Seconds of a pass of the deeper model."""

    whole: float
    layer: float

    def engine(self, layers: int, head_seconds: float) -> float:
        """What neither layers nor head take."""
        return max(self.whole - layers * self.layer - head_seconds, 0.0)


def measure_generation(case: ProfileCase, run: RLConfig, *, device_type: str) -> GenerationProfile:
    """Measure rounds and readings of a run's engine; collective over the tensor-parallel group."""
    group, prompt = run.algorithm.group, run.data.max_prompt_tokens
    layers = max(num_layers_in_a_row(case), 2)
    lengths = (prompt, prompt + max(run.generation.max_new_tokens - ROUNDS, 2 * ROUNDS))
    slots = _numbers_of_slots(case, run, layers, lengths[-1] + ROUNDS)
    prompts = tuple(sorted({1, slots[-1] // group}))
    release_free_memory(case.device)
    depths = [_make_depth(case, count) for count in (1, layers)]

    def measure(make: Callable[[RankRuntime], Callable[[], list[float]]]) -> _Pass:
        one, whole = _mean_seconds(case, [make(depth) for depth in depths])
        return _Pass(whole, min(max(whole - one, 0.0) / (layers - 1), whole / layers))

    rounds = [[measure(partial(_round, case, slots=b, length=n)) for n in lengths] for b in slots]
    readings = [measure(partial(_reading, case, run=run, count=count)) for count in prompts]
    model = cast(Transformer, depths[-1].parts[0])
    heads = {b: _head_seconds(case, model, b) for b in {*slots, *(group * n for n in prompts)}}
    return GenerationProfile(
        device_type=device_type,
        tensor_parallel=case.width,
        group=group,
        prompt_tokens=prompt,
        slots=slots,
        contexts=tuple(length + (ROUNDS + 1) / 2 for length in lengths),
        layer_seconds=tuple(tuple(one.layer for one in row) for row in rounds),
        engine_seconds=tuple(
            statistics.fmean(one.engine(layers, heads[b]) for one in row)
            for b, row in zip(slots, rounds, strict=True)
        ),
        head_seconds=tuple(heads[b] for b in slots),
        prompts=prompts,
        prompt_layer_seconds=tuple(one.layer for one in readings),
        prompt_engine_seconds=tuple(
            one.engine(layers, heads[group * n]) for n, one in zip(prompts, readings, strict=True)
        ),
    )


def _numbers_of_slots(case: ProfileCase, run: RLConfig, layers: int, length: int) -> tuple[int, ...]:
    """A group, all samples of a step as far as they fit, and a number between them."""
    group = run.algorithm.group
    each = 2 * layers * length * case.model.key_value_size * case.dtype.itemsize / case.width
    most = min(run.generation.slots or run.samples_per_step, run.samples_per_step, MOST_SLOTS)
    groups = max(min(most, int(MOST_CACHE_BYTES / each)) // group, 1)
    return tuple(sorted({group, group * max(groups // 2, 1), group * groups}))


def _make_depth(case: ProfileCase, layers: int) -> RankRuntime:
    """A model of some layers, whole on this rank's tensor-parallel group."""
    model = replace(case.model, num_layers=layers)
    plan = one_stage_plan(model, case.sequence_length, width=case.width)
    part, shards = make_part(case, model)
    grid = Grid(plan)
    program = forward_only(workers=grid.workers(0), num_micro_batches=1)[0]
    return RankRuntime(
        grid=grid,
        coord=grid.coords[case.position],
        program=program,
        evaluation_program=program,
        parts={0: part},
        deferred={},
        shards=shards,
        states=(),
        buckets=(),
        frozen=(),
        reducer=GradReducer(program, {}, {}, start=lambda number: None),
        groups=Groups({}, {}),
        bridge=None,
        offloads={},
        copies=None,
        pages={},
    )


def _engine(case: ProfileCase, runtime: RankRuntime, shape: EngineShape) -> GenerationEngine:
    return GenerationEngine(
        runtime,
        shape,
        device=case.device.torch,
        dtype=case.dtype,
        stopwatch=Stopwatch(case.device, simulated=Simulated(case.slowdown)),
        ranks=case.group,
    )


def _tickets(case: ProfileCase, count: int, length: int, answers: int) -> list[Ticket]:
    ids = np.random.default_rng(0).integers(case.model.vocab_size, size=(count, length)).tolist()
    return [Ticket(number, tuple(prompt), answers) for number, prompt in enumerate(ids)]


def _round(case: ProfileCase, runtime: RankRuntime, *, slots: int, length: int) -> Callable[[], list[float]]:
    """Seconds of rounds of so many answers to one prompt of `length` tokens."""
    shape = EngineShape(slots=slots, group=slots, max_length=length + ROUNDS + 1, prefill_chunk=length)
    engine = _engine(case, runtime, shape)
    tickets = _tickets(case, 1, length, slots)

    def call() -> list[float]:
        engine.generate(tickets, _params(ROUNDS + 1))
        return engine.clock.round_seconds

    return call


def _reading(
    case: ProfileCase, runtime: RankRuntime, *, run: RLConfig, count: int
) -> Callable[[], list[float]]:
    """Seconds of a reading of so many prompts, whose answers then get slots."""
    group, length = run.algorithm.group, run.data.max_prompt_tokens
    chunk = run.generation.prefill_chunk
    shape = EngineShape(slots=group * count, group=group, max_length=length + 2, prefill_chunk=chunk)
    engine = _engine(case, runtime, shape)
    tickets = _tickets(case, count, length, group)

    def call() -> list[float]:
        engine.generate(tickets, _params(2))
        return [engine.clock.reading_seconds]

    return call


def _params(new_tokens: int) -> SamplingParams:
    return SamplingParams(seed=0, max_new_tokens=new_tokens, stop_ids=frozenset())


def _head_seconds(case: ProfileCase, model: Transformer, slots: int) -> float:
    """Of the last norm, the logits and the draw of so many tokens."""
    stopwatch = Stopwatch(case.device, simulated=Simulated(case.slowdown))
    hidden_RH = torch.randn(slots, case.model.hidden_size, device=case.device.torch).to(case.dtype)
    rows = tuple(range(slots))
    keys = tuple(draw_keys(0, 0, row, 0) for row in rows)

    @torch.no_grad()
    def call() -> list[float]:
        start = time.perf_counter()
        with stopwatch.running():
            draw(model, model.final_norm(hidden_RH), rows, keys, temperature=1.0)
        return [time.perf_counter() - start]

    return _mean_seconds(case, [call])[0]


def _mean_seconds(case: ProfileCase, calls: Sequence[Callable[[], list[float]]]) -> list[float]:
    """Trimmed mean of what each call measures, in turns, as often as there is time for; the first of each
    warms up."""
    for call in calls:
        call()
    end = time.perf_counter() + SHARE_OF_SECONDS * case.seconds_per_unit
    found: list[list[float]] = [[] for _ in calls]
    turns = 0
    while turns < MIN_CALLS or not all_agree(time.perf_counter() > end, case):
        for call, own in zip(calls, found, strict=True):
            own += call()
        turns += 1
    return [trimmed_mean(own) for own in found]


# --- beside the model ------------------------------------------------------------------------------------


def measure_batch(run: RLConfig, prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> BatchProfile:
    """Measure how long a batch is scored and packed, its answers of random tokens.

    Raises ConfigError if a reward function cannot be loaded.
    """
    length = run.expected_new_tokens
    drawn = np.random.default_rng(0)
    groups = [
        (
            prompts[number % len(prompts)],
            [
                Sample(
                    number,
                    i,
                    tuple(drawn.integers(run.model.vocab_size, size=length).tolist()),
                    (-1.0,) * length,
                    "limit",
                )
                for i in range(run.algorithm.group)
            ],
        )
        for number in range(run.train.prompts_per_step)
    ]
    scoring: list[float] = []
    packing: list[float] = []
    with Scorers(run.reward) as scorers:
        for _ in range(1 + BATCHES):
            start = time.perf_counter()
            fields = [
                answer_fields(Ticket(0, prompt.ids, len(samples), prompt), samples, tokenizer)
                for prompt, samples in groups
            ]
            scorers.score(fields)
            scored = time.perf_counter()
            rewards = tuple(float(i) for i in range(run.algorithm.group))
            whole = [
                Group(number, prompt, tuple(samples), ((0.0,),) * len(samples), rewards)
                for number, (prompt, samples) in enumerate(groups)
            ]
            make_rows(whole, length=run.sequence_length, packed=run.train.pack)
            token_advantages(whole, run.algorithm)
            scoring.append(scored - start)
            packing.append(time.perf_counter() - scored)
    return BatchProfile(
        samples=run.samples_per_step,
        # The first starts the processes.
        scoring_seconds=statistics.fmean(scoring[1:]),
        packing_seconds=statistics.fmean(packing[1:]),
    )
