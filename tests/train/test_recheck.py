"""A bit that flips in a weight, a gradient or a message: found by the check, and not without it.

Ranks that hold the same weights compare their bits; one that differs is named.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from tests.support.project import parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_cases
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.errors import TrainingError
from yuan_train.config.plan import Plan
from yuan_train.config.run import RunConfig
from yuan_train.parallel import transport
from yuan_train.parallel.gradients import DeferredGrads
from yuan_train.train.job import Position, prepare
from yuan_train.train.run import train
from yuan_train.train.step import Trainer

MATRIX, NORM = "layers.0.feed_forward.up.weight", "layers.2.attention_norm.weight"
BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Flip:
    """The lowest bit of an element that flips in the second step, on one rank."""

    name: str
    what: str
    rank: int
    text: str
    said: str
    precision: str = "fp32"
    weight: str = MATRIX
    sharded: bool = False
    more: tuple[str, ...] = ()
    port: int = field(default_factory=free_port)


ROW, WIDE, ALIKE = "1x8: 3@0 | 3@1", "1x8: 3@0 | 3@1,2", "1x4: 6@0 / 1x4: 6@1"
THREE, UNLIKE = "1x3: 6@0 / 1x3: 6@1 / 1x2: 6@2", "1x4: 6@0,1 / 1x4: 6@2"
MESSAGE = "the message of its receive {} of micro-batch 0 on stage {} has other bits than rank {} sent"
TWICE = f"micro-batch 0 on stage 0, computed twice, has other bits in the gradient of {MATRIX}"
FLIPS = [
    Flip("forward", "message", 1, ROW, "stage 1) on card/1: " + MESSAGE.format("activation", 1, 0)),
    Flip("back", "message", 0, ROW, "stage 0) on card/0: " + MESSAGE.format("gradient", 0, 1), "bf16"),
    Flip("to a group", "message", 1, WIDE, "stage 1) on card/2: " + MESSAGE.format("activation", 1, 0)),
    Flip("gradient", "gradient", 0, ROW, f"rank 0 (pipeline 0, stage 0) on card/0: {TWICE}"),
    Flip("an owner's", "gradient", 1, ALIKE, f"rank 1 (pipeline 1, stage 0) on card/1: {TWICE}", "bf16"),
    Flip("of two both", "weight", 1, ALIKE, f"ranks 0, 1 have unlike weights: {NORM}", weight=NORM),
    Flip("the odd one of three", "weight", 1, THREE, "rank 1 (pipeline 1, stage 0) on ", "bf16"),
    Flip(
        *("sharded", "weight", 2, UNLIKE, f"ranks 0, 2 have unlike weights: {MATRIX}", "bf16"), sharded=True
    ),
    Flip(
        *("in a group", "weight", 1, "1x8: 6@0,1", f"ranks 0, 1 have unlike weights: {NORM}", "bf16"),
        weight=NORM,
    ),
    Flip("frozen", "weight", 2, THREE, "rank 2 (pipeline 2", "bf16", more=("model.lora={rank: 4}",)),
]


def flip_lowest_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(BITS[tensor.element_size()]).view(-1)[5] ^= 1


@contextmanager
def flipping(what: str, weight: str) -> Iterator[None]:
    """Inside, the second step meets a flipped bit, once; a weight has it after the step."""
    number, is_due = iter(range(1, 100)), [False]
    step, take, splitting = Trainer.step, transport.PendingReceive.take, DeferredGrads.splitting  # pyright: ignore
    trainers: list[Trainer] = []

    def stepping(self: Trainer, *arguments: Any) -> Any:
        trainers[:] = [self]
        is_second = next(number) == 2
        is_due[0] = is_second and what != "weight"
        result = step(self, *arguments)
        if is_second and what == "weight":
            self.finish()
            flip_lowest_bit(dict(self.runtime.parts[0].named_parameters())[weight])
        return result

    def taking(self: Any) -> torch.Tensor:
        message = take(self)
        if is_due[0] and what == "message":
            is_due[0] = False
            flip_lowest_bit(message)
        return message

    @contextmanager
    def split(self: Any, *arguments: Any) -> Iterator[None]:
        with splitting(self, *arguments):
            yield
        if is_due[0] and what == "gradient":
            is_due[0] = False
            flip_lowest_bit(dict(trainers[0].runtime.parts[0].named_parameters())[weight].main_gradient)  # pyright: ignore

    with (
        patch.object(Trainer, "step", stepping),
        patch.object(transport.PendingReceive, "take", taking),  # pyright: ignore[reportPrivateUsage]
        patch.object(DeferredGrads, "splitting", split),
    ):
        yield


def run_of(run_file: Path, flip: Flip, every: int) -> RunConfig:
    words = "train.steps=3", "validation.every=0", f"train.check_every={every}"
    return run_config(run_file, *words, f"train.precision={flip.precision}", *flip.more)


def _run_all(
    rank: int, run_file: Path, folder: Path, flips: list[Flip], plans: list[Plan], every: int
) -> None:
    for flip, plan in zip(flips, plans, strict=True):
        if rank < plan.world_size:
            run = run_of(run_file, flip, every)
            with flipping(flip.what if rank == flip.rank else "", flip.weight):
                train_and_tell(rank, plan, run, folder / flip.name / str(rank), flip.port + every)


def train_and_tell(rank: int, plan: Plan, run: RunConfig, target: Path, port: int) -> None:
    """Train as a rank, and write down why it has ended early, or nothing."""
    as_rank(rank, plan.world_size, port)
    target.parent.mkdir(exist_ok=True)
    try:
        train(prepare(run, plan, Position(rank, plan.world_size, rank, plan.world_size)))
        target.write_text("")
    except TrainingError as error:
        target.write_text(str(error))


@pytest.mark.parametrize("every", [2, 0])
def test_a_flipped_bit_is_found_where_it_is_looked_for(run_file: Path, tmp_path: Path, every: int) -> None:
    flips = FLIPS if every else [FLIPS[i] for i in (0, 3, 5)]
    runs = [run_of(run_file, flip, every) for flip in flips]
    plans = [
        parse_plan(run, flip.text, optimizer_sharding=flip.sharded)
        for run, flip in zip(runs, flips, strict=True)
    ]
    spawn(_run_all, 3, run_file, tmp_path, flips, plans, every)
    for flip, plan in zip(flips, plans, strict=True):
        texts = [(tmp_path / flip.name / str(rank)).read_text() for rank in range(plan.world_size)]
        if not every:
            assert not any(texts), (flip.name, texts)
            continue
        for text in texts:
            assert text.startswith("after step 2: ") and flip.said in text, (flip.name, text)
            assert "(last after the start); no checkpoint is saved yet" in text
            other = {MATRIX: NORM, NORM: MATRIX}[flip.weight]
            assert other not in text, "no other parameter is blamed"
            assert "ranks 0, 2" in text or flip.name != "the odd one of three"


QUIET = {
    "wide": (WIDE, {}, ("train.precision=bf16",)),
    "gpipe": (ROW, {"schedule": "gpipe"}, ()),
    "zero bubble": (ROW, {"schedule": "zero_bubble"}, ()),
    "sharded": (UNLIKE, {"optimizer_sharding": True}, ("train.precision=bf16",)),
    "no parameters": ("1x8: 3@0 | 0@1 | 3@2", {}, ()),
    "one micro-batch": ("4x1: 6@0 / 4x1: 6@1", {}, ()),
    # Balanced by what each expert was given, which must not be counted twice.
    "experts": (
        ROW,
        {},
        ("model.num_experts=4", "model.experts_per_token=2", "model.balance=bias", "model.balance_rate=0.01"),
    ),
    "recompute": (ROW, {"recompute": "full"}, ("train.precision=bf16", "model.hidden_dropout=0.1")),
}


def test_a_sound_run_raises_no_alarm_and_has_the_same_losses(run_file: Path, tmp_path: Path) -> None:
    cases = {
        (name, every): Case(
            run_file,
            tmp_path / f"{name}-{every}",
            parse_plan(run_config(run_file, *more), text, **keys),
            ("train.steps=2", "validation.every=0", f"train.check_every={every}", *more),
        )
        for name, (text, keys, more) in QUIET.items()
        for every in (0, 1)
    }
    run_cases(list(cases.values()))
    found = {
        key: [(line["loss"], line["grad_norm"]) for line in read_metrics(case.folder)]
        for key, case in cases.items()
    }
    for name in QUIET:
        assert found[name, 0] == found[name, 1] and len(found[name, 0]) == 2, name
