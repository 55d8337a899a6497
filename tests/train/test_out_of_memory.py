"""What is said when memory has run out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.fake_card import FakeCard
from tests.support.project import make_project, parse_plan, run_config, with_forecast, with_stages
from yuan_train.config.errors import TrainingError
from yuan_train.config.plan import Plan
from yuan_train.parallel.activity import Activity, during
from yuan_train.parallel.device import CPU
from yuan_train.schedule.step import Step
from yuan_train.train.ending import explaining_memory

GIB = 2**30
FULL = torch.OutOfMemoryError(
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has 23.5 GiB, of which ..."
)


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    made = parse_plan(run_config(make_project(tmp_path)), "2x4: 3@0 | 3@1")
    memory = {"parameters": GIB, "gradients": 2 * GIB, "optimizer": 4 * GIB, "activations": 8 * GIB}
    return with_forecast(made, memory={**memory, "reserved": GIB})


def explained(error: BaseException, plan: Plan, card: FakeCard | None) -> str:
    with (
        pytest.raises(TrainingError) as found,
        explaining_memory(plan, 1, card or CPU),
        during(Activity("training_step", number=3)),
        during(Activity("compute", Step("backward", 1, 2))),
    ):
        raise error
    assert found.value.exit_code == 1
    return str(found.value)


def test_it_says_where_what_was_forecast_what_is_taken_and_what_would_help(plan: Plan) -> None:
    card = FakeCard(memory=24 * GIB, outside=GIB)
    card.allocated, card.reserved = 20 * GIB, 22 * GIB
    where, forecast, taken, help_ = explained(FULL, plan, card).splitlines()
    assert where.startswith("rank 1 (pipeline 0, stage 1), card ")
    assert "out of memory in the backward of micro-batch 2 on stage 1" in where
    assert "Tried to allocate 2.00 GiB" in where
    parts = "parameters 1.0 GiB, gradients 2.0 GiB, optimizer 4.0 GiB, activations 8.0 GiB, reserved 1.0 GiB"
    assert forecast == f"forecast: 16.0 GiB: {parts}"
    assert "allocated 20.0 GiB" in taken and "reserved 22.0 GiB, 1.0 GiB outside of torch" in taken
    assert "free 1.0 GiB of 24.0 GiB; largest free block 2.0 GiB" in taken
    for key in ("search.memory_fraction", "micro_batch_size below 2", "recompute", "optimizer_offload"):
        assert key in help_
    assert "others hold" not in help_


def test_others_on_the_card_are_named_first(plan: Plan) -> None:
    card = FakeCard(memory=24 * GIB, outside=9 * GIB)
    card.allocated = card.reserved = 15 * GIB
    text = explained(FULL, plan, card)
    assert "what would help: others hold 9.0 GiB of the card, 1.0 GiB were expected" in text


def test_what_a_stage_does_already_is_not_advised(plan: Plan) -> None:
    keys: dict[str, Any] = {"recompute": "full", "optimizer_offload": 1.0, "activation_offload": 3}
    plan = with_stages(plan, *(replace(stage, **keys) for stage in plan.pipelines[0].stages))
    help_ = explained(FULL, plan, FakeCard()).splitlines()[-1]
    assert not any(key in help_ for key in ("recompute", "optimizer_offload", "activation_offload"))


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(
            "[enforce fail at alloc_cpu.cpp:124] DefaultCPUAllocator: can't allocate memory: you tried"
        ),
        MemoryError(),
        torch.distributed.DistBackendError(
            "NCCL error: unhandled cuda error. Cuda failure 2 'out of memory'"
        ),
    ],
)
def test_it_has_many_names(error: Exception, plan: Plan) -> None:
    text = explained(error, plan, None)
    assert "out of memory in the backward of micro-batch 2" in text and "taken" not in text


def test_another_error_stays_what_it_is(plan: Plan) -> None:
    error = RuntimeError("mat1 and mat2 shapes cannot be multiplied")
    with pytest.raises(RuntimeError) as found, explaining_memory(plan, 0, FakeCard()):
        raise error
    assert found.value is error
