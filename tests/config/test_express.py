"""A plan in megatron-core's words, or every reason why it has none for it."""

from dataclasses import replace

import pytest

from tests.support.project import MODEL, parse_plan
from yuan_train.config.errors import PlanError
from yuan_train.config.express import check_engine, express, is_expressible, plan_reasons, renumber
from yuan_train.config.model import ModelConfig
from yuan_train.config.plan import Plan
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.config.run import (
    DataConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    TraceConfig,
    TrainConfig,
)


def run(**model: object) -> RunConfig:
    values = MODEL | model
    return RunConfig(
        model=ModelConfig(**values),  # pyright: ignore[reportArgumentType]
        data=DataConfig(sequence_length=24, reset_position_ids=False),
        train=TrainConfig(steps=1, global_batch_size=8, precision="fp32"),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        engine="megatron",
    )


def plan(text: str, **options: object) -> Plan:
    made = parse_plan(run(), text, **options)  # pyright: ignore[reportArgumentType]
    assert not list(validate_plan(made))
    return made


def test_widths_layout_and_order_of_ranks() -> None:
    # Tensor ranks are neighbours, then come the pipelines, then the stages.
    found = express(plan("1x4: 4@2,3 | 2@0,1 / 1x4: 4@4,5 | 2@6,7"))
    assert (found.tensor, found.data, found.pipeline, found.virtual) == (2, 2, 2, 1)
    assert found.layout == "E,t*4|t*2,L"
    assert found.rank_of == (4, 5, 0, 1, 2, 3, 6, 7)
    virtual = express(plan("1x8: 2@0 | 1@1 | 1@0 | 2@1", schedule="interleaved_1f1b"))
    assert (virtual.pipeline, virtual.virtual, virtual.layout) == (2, 2, "E,t*2|t|t|t*2,L")


def test_a_renumbered_plan_is_the_same_plan() -> None:
    before = plan("1x8: 4@1 | 2@0")
    after = renumber(before, express(before).rank_of)
    assert not list(validate_plan(after))
    assert [stage.replicas for stage in after.pipelines[0].stages] == [((0,),), ((1,),)]
    assert [entry.device for entry in after.ranks] == ["card/1", "card/0"]
    assert express(after).rank_of == (0, 1)


@pytest.mark.parametrize(
    ("text", "options", "reason"),
    [
        ("1x8: 4@0,1 | 2@2", {}, "groups of 1 and 2 ranks; megatron-core has one width"),
        ("1x8: 4@0 | 2@1;2", {}, "a stage of several replicas"),
        ("1x8: 3.5@0 | 2.5@1", {}, "in the middle of a layer"),
        ("1x4: 4@0 | 2@1 / 1x4: 3@2 | 3@3", {}, "cut unlike each other"),
        ("1x6: 6@0 / 1x2: 6@1", {}, "unequal shares of the batch"),
        ("1x8: 4@0 | 2@1", {"schedule": "zero_bubble"}, "schedule zero_bubble; megatron-core has 1f1b"),
        ("1x8: 4@0 | 2@1", {"schedule": "gpipe"}, "schedule gpipe"),
        ("1x8: 4@0,1 | 2@2,3", {"sequence_parallel": True}, "sequence_parallel; megatron-core's norms"),
        ("1x8: 4@0 | 2@1", {"in_flight": [4, 1]}, "in_flight; megatron-core's schedule decides"),
        ("1x8: 4@0 | 2@1", {"optimizer_offload": [0.5, 0]}, "optimizer_offload; not written"),
        (
            "1x8: 4@0 | 2@1",
            {"activation_offload": [1, 0], "resident_parts": [2, None]},
            "activation_offload; what sends activations to the host is our engine's",
        ),
        ("1x8: 4@0 selective | 2@1", {}, "recompute: selective"),
        (
            "1x4: 6@0 / 1x4: 6@1",
            {"optimizer_sharding": True, "optimizer_share": [1.0, 3.0]},
            "optimizer_share; megatron-core shards",
        ),
        (
            "1x8: 2@0 | 1@1 | 1@1 | 2@0",
            {"schedule": "interleaved_1f1b"},
            "do not go round the workers in turn",
        ),
        (
            "1x7: 2@0 | 1@1 | 1@0 | 2@1 / 1x1: 6@2",
            {"schedule": "interleaved_1f1b"},
            "pipelines on unequal numbers of workers",
        ),
        ("1x8: 4@0 | 2@0", {"schedule": "interleaved_1f1b"}, "virtual stages of a single worker"),
    ],
)
def test_what_it_has_no_words_for(text: str, options: dict[str, object], reason: str) -> None:
    found = plan(text, **options)
    assert not is_expressible(found)
    with pytest.raises(PlanError, match=reason) as raised:
        express(found)
    assert "use engine: yuan" in str(raised.value)


def test_micro_batches_of_virtual_stages() -> None:
    found = replace(plan("1x8: 2@0 | 1@1 | 1@0 | 2@1", schedule="interleaved_1f1b"), global_batch_size=7)
    odd = replace(found, pipelines=(replace(found.pipelines[0], num_micro_batches=7),))
    assert list(plan_reasons(odd)) == [
        "7 micro-batches of virtual stages on 2 workers; megatron-core needs a multiple"
    ]


def test_experts() -> None:
    model = run(num_experts=4, experts_per_token=2)
    assert is_expressible(parse_plan(model, "1x8: 4@0 | 2@1"))
    assert list(plan_reasons(parse_plan(model, "1x8: 4@0,1 full | 2@2,3"))) == [
        "ranks that divide a layer's experts; not written for megatron-core",
        "recompute of layers with experts; megatron-core would choose a token's experts again",
    ]
    balanced = run(num_experts=4, experts_per_token=2, balance="bias", balance_rate=0.001)
    assert list(plan_reasons(parse_plan(balanced, "1x8: 6@0"))) == [
        "balance: bias; the experts' load is evened by our engine alone"
    ]


def test_cards_of_unlike_backends() -> None:
    found = plan("1x8: 4@0 | 2@1")
    ranks = tuple(
        replace(entry, type=kind) for entry, kind in zip(found.ranks, ("A100-80G", "MI300X"), strict=True)
    )
    assert any("backends nccl and rccl" in reason for reason in plan_reasons(replace(found, ranks=ranks)))


def test_all_reasons_of_plan_and_run_at_once() -> None:
    asked = run()
    train = replace(asked.train, precision="fp64", compile=True, trace=TraceConfig())
    asked = replace(
        asked,
        train=train,
        optimizer=replace(asked.optimizer, reduce_dtype="bf16"),
        objective=ObjectiveConfig(kind="dpo"),
    )
    with pytest.raises(PlanError) as raised:
        check_engine(plan("1x8: 4@0 selective | 2@1"), asked)
    text = str(raised.value)
    words = ("selective", "fp64", "train.compile", "train.trace", "objective.kind: dpo", "reduce_dtype: bf16")
    assert all(word in text for word in words)
    assert len(text.splitlines()) == len(words) + 1
    check_engine(plan("1x8: 4@0 selective | 2@1"), replace(asked, engine="yuan"))
