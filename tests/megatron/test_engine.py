"""megatron-core gives our engine's losses, takes its checkpoints and gives them back; traps and patches.

Importing megatron-core takes seconds, so each test imports it once, in a process that it then forks.
"""

import importlib.util
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch

from tests.support.project import parse_plan, read_metrics, run_config
from tests.support.ranks import Case, fork_cases, run_alone, run_forked_cases
from tests.support.spawn import spawn
from yuan_train.data.loader import IGNORED, Batch
from yuan_train.models.attention import DocumentResets, find_resets
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.train.job import Job, Position, prepare

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="megatron-core is not installed (extra [megatron])"
)

COMMON = ("model.init_std=0.3", "model.num_layers=4", "optimizer.decay_steps=20", "data.sequence_length=16")
MEGATRON = "engine=megatron"
SEEN = 1e-2
"""What a fault must change, for a test of it to be one."""
BAR = 1e-5


def case(run_file: Path, folder: Path, plan: str | None, *words: str, steps: int = 2, **options: Any) -> Case:
    overrides = (*COMMON, f"train.steps={steps}", *words)
    made = parse_plan(run_config(run_file, *overrides), plan, **options) if plan else None
    return Case(run_file, folder, made, overrides)


def worst(found: Path, wanted: Path, key: str = "loss") -> float:
    """The greatest relative difference of the steps that both have run."""
    by_step = {line["step"]: line for line in read_metrics(wanted)}
    lines = read_metrics(found)
    assert lines
    return max(abs(line[key] / by_step[line["step"]][key] - 1) for line in lines)


# --- losses, and a change of engine ----------------------------------------------------------------------


def test_the_losses_are_ours_also_after_a_change_of_engine(run_file: Path, tmp_path: Path) -> None:
    """Two steps each of megatron-core, ours and megatron-core, under three plans, with optimizer state."""
    words = ("validation.every=2", f"checkpoint.directory={tmp_path / 'ck'}")
    other = ("data.reset_attention=true", "data.reset_filter=true", "model.hidden_dropout=0.1")
    llama = (
        "model.architecture=qwen",
        "model.num_key_value_heads=2",
        "model.query_key_norm=true",
        "model.tie_embeddings=false",
    )
    experts = ("model.num_experts=4", "model.experts_per_token=2")
    sharded = {"optimizer_sharding": True}
    cases = [
        # Ranks in another order, a cut that is not even, one stage recomputed.
        case(run_file, tmp_path / "run", "2x4: 3@1 full:2 | 1@0", *words, MEGATRON),
        case(run_file, tmp_path / "run", "4x1: 4@0 / 4x1: 4@1", *words, steps=4, **sharded),
        case(run_file, tmp_path / "run", "4x1: 4@0 / 4x1: 4@1", *words, MEGATRON, steps=6, **sharded),
        case(run_file, tmp_path / "resets", "4x2: 4@0,1 full:1", *other, MEGATRON),
        case(run_file, tmp_path / "qwen", "4x2: 4@0,1", *llama, MEGATRON),
        case(
            run_file,
            tmp_path / "virtual",
            "4x2: 1@0 | 1@1 | 1@0 | 1@1",
            *experts,
            MEGATRON,
            schedule=INTERLEAVED,
        ),
    ]
    run_forked_cases(cases)
    alone = ("validation.every=2",)
    for folder, further, steps in (
        ("run", alone, 6),
        ("resets", other, 2),
        ("qwen", llama, 2),
        ("virtual", experts, 2),
    ):
        ours = tmp_path / f"{folder}-ours"
        run_alone(case(run_file, ours, None, "train.micro_batch_size=4", *further, steps=steps))
        assert worst(tmp_path / folder, ours) < BAR
        assert worst(tmp_path / folder, ours, "grad_norm") < 1e-4
    lines, wanted = read_metrics(tmp_path / "run"), read_metrics(tmp_path / "run-ours")
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert [a["validation_loss"] is None for a in lines] == [True, False] * 3
    assert lines[5]["validation_loss"] == pytest.approx(wanted[5]["validation_loss"], rel=BAR)
    assert all(len(line["stage_seconds"]) == 2 for line in lines)
    counted, expected = (read_metrics(tmp_path / name) for name in ("virtual", "virtual-ours"))
    # Only a logged line has them: here the last, of two steps.
    assert counted[-1]["expert_tokens"] == expected[-1]["expert_tokens"]
    assert {sum(layer) for layer in counted[-1]["expert_tokens"]} == {2 * 2 * 8 * 16}


INTERLEAVED = "interleaved_1f1b"


def test_each_cure_and_each_patch_is_needed(run_file: Path, tmp_path: Path) -> None:
    spawn(_without_cures, 1, run_file, tmp_path)


def _without_cures(_: int, run_file: Path, folder: Path) -> None:
    """What runs here would find the patches of a model that was built here before."""
    if not torch.cuda.is_available():
        check_patches(run_file, folder)
    check_traps(run_file, folder)
    from yuan_train.megatron.engine import build

    words = ("validation.every=1", "validation.batches=2")
    job = prepare(run_config(run_file, *COMMON, MEGATRON, *words), None, Position())
    engine = build(job)[1]
    check_logits(job, engine)
    check_validation(job, engine)


def check_logits(job: Job, engine: Any) -> None:
    """They are ours, and what a stray change of them would do is seen: the third trap is megatron-core's
    rotary embedding, which knows no positions that begin anew with each document."""
    model = engine.chunks[0].model
    ours = Transformer(job.run.model)
    init_weights(ours, seed=job.run.train.seed)
    assert job.tokenizer is not None
    tokens = torch.from_numpy(job.train.batch(0, 8).inputs)
    resets = find_resets(tokens, eod_id=job.tokenizer.eod_id)
    assert resets.positions is not None and (resets.positions[:, 1:] == 0).any()

    def logits(found: DocumentResets) -> torch.Tensor:
        engine.batches.inputs[0] = engine.layer_inputs(0, found)
        return model(tokens, None, engine.batches.mask(0))

    def away(found: torch.Tensor) -> float:
        return float((found - wanted).abs().max())

    with torch.no_grad():
        wanted = ours.logits(ours(tokens, positions=resets.positions))
        assert away(logits(resets)) < 2e-5
        assert away(logits(DocumentResets())) > SEEN
        model.decoder.layers[0].self_attention.filter.conv1.bias.add_(0.01)
        assert away(logits(resets)) > SEEN


def check_validation(job: Job, engine: Any) -> None:
    """A batch without a trained token is left out."""
    validation = job.validation
    assert validation is not None

    def loss(*untrained: int) -> float:
        def batch(first: int, count: int) -> Batch:
            found = validation.batch(first, count)
            if first // 8 in untrained:
                found.targets.fill(IGNORED)
            return found

        samples = Mock(wraps=validation, masks=True, batch=batch)
        return engine.evaluate(replace(job, validation=samples), 1)

    with engine.reading():
        assert loss() == pytest.approx((loss(0) + loss(1)) / 2)
        assert math.isnan(loss(0, 1))


# --- traps: faults of which megatron-core says nothing -----------------------------------------------------


def check_traps(run_file: Path, folder: Path) -> None:
    """Each is seen without its cure."""
    from yuan_train.megatron import engine, model

    def losses(name: str, plan: str, *words: str, **options: Any) -> Path:
        fork_cases([case(run_file, folder / name, plan, *words, MEGATRON, **options)])
        return folder / name

    # 1. Weights that are cut but not marked: the norm counts them on one rank alone.
    ours = folder / "ours"
    run_alone(case(run_file, ours, None, "train.micro_batch_size=4"))
    with patch.object(model, "mark_cut_weights", lambda *a: None):
        assert worst(losses("unmarked", "4x2: 4@0,1"), ours, "grad_norm") > SEEN
    # 2. Interleaving with the default way of sending.
    virtual = {"schedule": INTERLEAVED}
    with patch.object(model, "point_to_point", lambda interleaved: {}):
        found = losses("batched", "1x8: 1@0 | 1@1 | 1@0 | 1@1", **virtual)
        assert worst(found, ours, "grad_norm") > SEEN
    # 5. Ranks in the plan's order, not megatron-core's: it refuses here only because the embedding is tied.
    with (
        patch.object(engine, "express", _in_plan_order(engine.express)),
        pytest.raises(torch.multiprocessing.ProcessRaisedException, match="AssertionError"),
    ):
        losses("order", "4x2: 3@1 | 1@0")
    # 6. Norms over heads, whose gradients each rank has of its own heads alone.
    qwen = ("model.architecture=qwen", "model.query_key_norm=true", "model.num_key_value_heads=2")
    run_alone(case(run_file, folder / "qwen", None, "train.micro_batch_size=4", *qwen))
    with patch.object(engine, "sum_head_norms", lambda chunks: None):
        assert worst(losses("heads", "4x2: 4@0,1", *qwen), folder / "qwen", "grad_norm") > 1e-4
    # 4. Masters made of bf16 weights after a checkpoint.
    bf16 = ("train.precision=bf16",)
    checkpoint = f"checkpoint.directory={folder / 'ck'}"
    whole = losses("whole", "4x2: 4@0", *bf16, steps=6)
    losses("first", "4x2: 4@0", *bf16, checkpoint)
    resume = (*bf16, f"checkpoint.resume={folder / 'ck'}")
    assert worst(losses("resumed", "4x2: 4@0", *resume, steps=6), whole) == 0
    with patch.object(engine, "publish", _from_weights(engine.publish)):
        assert worst(losses("rounded", "4x2: 4@0", *resume, steps=6), whole, "loss") > 0


def _in_plan_order(express: Callable[..., Any]) -> Callable[..., Any]:
    return lambda plan: replace(express(plan), rank_of=tuple(range(plan.world_size)))


def _from_weights(publish: Callable[[Any], None]) -> Callable[[Any], None]:
    def published(optimizer: Any) -> None:
        publish(optimizer)
        optimizer.reload_model_params()

    return published


# --- the patches that a CPU needs --------------------------------------------------------------------------


def check_patches(run_file: Path, folder: Path) -> None:
    """Each is needed; a card needs none."""
    from yuan_train.megatron import core

    install = core.install
    for name in core.PATCHES:
        plan = "4x2: 3@0 | 1@1" if name == "synchronize" else "4x2: 4@0"
        with (
            patch.object(core, "install", lambda left_out=name: install(without=(left_out,))),
            pytest.raises(
                torch.multiprocessing.ProcessRaisedException,
                match="compiled with CUDA|initialize CUDA|NVIDIA driver|Wrapped parameters must be one of",
            ),
        ):
            fork_cases([case(run_file, folder / name, plan, MEGATRON, steps=1, **_precision(name))])


def _precision(patch: str) -> dict[str, Any]:
    return {"optimizer_sharding": True} if patch == "type_string" else {}
