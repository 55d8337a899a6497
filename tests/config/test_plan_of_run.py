"""A plan together with a run: whether it was made for it; the plan of a run without planning."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.test_plan import load, model
from yuan_train.config.errors import PlanError
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import single_card_plan
from yuan_train.config.plan_constraints import check_compile, check_plan_of_run, validate_plan
from yuan_train.config.run import DataConfig, OptimizerConfig, RunConfig, Source, TrainConfig


def run(
    *, sequence_length: int = 4096, global_batch_size: int = 40, of: ModelConfig | None = None
) -> RunConfig:
    return RunConfig(
        model=of or model(),
        data=DataConfig(train=(Source(prefix="c"),), sequence_length=sequence_length, tokenizer="t"),
        train=TrainConfig(steps=10, global_batch_size=global_batch_size, micro_batch_size=2),
        optimizer=OptimizerConfig(learning_rate=1e-3),
    )


def test_a_plan_belongs_to_its_run(tmp_path: Path) -> None:
    plan = load(tmp_path)
    check_plan_of_run(plan, run())
    check_plan_of_run(plan, run(of=model(name="another name")))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            run(sequence_length=2048),
            "sequence_length: the plan was made for 4096, the run has 2048; plan again",
        ),
        (run(global_batch_size=20), "global_batch_size: the plan was made for 40, the run has 20"),
        (run(of=model(num_layers=12)), "model.num_layers: the plan was made for 24, the run has 12"),
        (
            run(of=model(attention="plain")),
            "model.attention: the plan was made for 'localized_filter', the run has 'plain'",
        ),
    ],
)
def test_a_plan_of_another_run(tmp_path: Path, other: RunConfig, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_plan_of_run(load(tmp_path), other)


def test_all_differences_in_one_pass(tmp_path: Path) -> None:
    with pytest.raises(PlanError) as error:
        check_plan_of_run(
            load(tmp_path), run(sequence_length=8, global_batch_size=2, of=model(rope_base=5.0))
        )
    assert len(str(error.value).splitlines()) == 3


def test_what_compiled_layers_cannot_do(tmp_path: Path) -> None:
    """Stage 0 of the example has a replica of two ranks."""
    plan = replace(load(tmp_path), schedule="zero_bubble")
    check_compile(plan, run())
    plain = run()
    compiled = replace(plain, train=replace(plain.train, compile=True))
    with pytest.raises(PlanError) as error:
        check_compile(plan, compiled)
    schedule, stage = str(error.value).splitlines()
    assert schedule == (
        "schedule: zero_bubble splits backwards, and the backward of a compiled layer is one piece "
        "(train.compile is true); plan again with this run, or set train.compile: false"
    )
    assert stage.startswith("pipelines[0].stages[0].replicas: a replica of 2 ranks shares each layer, and")
    check_compile(single_card_plan(compiled), compiled)


def test_the_plan_of_one_process_is_valid() -> None:
    plan = single_card_plan(run())
    assert not list(validate_plan(plan))
    check_plan_of_run(plan, run())
    assert plan.pipelines[0].num_micro_batches == 20
    assert plan.device_type(0) is None
