"""The megatron engine against ours, plan by plan, of a tiny model in fp32 on the CPU; needs megatron-core."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.project import difference, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_forked_cases
from tools.bench.harness import MISSED, Row, case
from yuan_train.config.express import express

BAR = 1e-5
"""The greatest difference of a loss, in nats, that is accepted in fp32."""


@dataclass(frozen=True)
class Given:
    """A plan in the short form of the tests' `parse_plan`, and what else is special."""

    plan: str
    options: tuple[tuple[str, Any], ...] = ()
    overrides: tuple[str, ...] = ()
    bar: float = BAR
    same_experts: bool = False
    """megatron-core is made to choose the experts that our engine, in one process, has chosen."""


LLAMA = ("model.architecture=llama", "model.attention=plain", "model.num_key_value_heads=2")
QWEN3 = (*LLAMA[1:], "model.architecture=qwen", "model.query_key_norm=true")
M32 = ("model.num_experts=4", "model.experts_per_token=2")
SHARDED = (("optimizer_sharding", True),)
PLANS = {
    "one process": Given("1x8: 6@0"),
    "uneven, 4+2": Given("1x8: 4@0 | 2@1"),
    "an empty stage, 2+0+4": Given("1x8: 2@0 | 0@1 | 4@2"),
    "ranks in another order": Given("1x8: 4@1 | 2@0"),
    "tensor 2": Given("1x8: 6@0,1"),
    "tensor 2, pipeline 2": Given("1x8: 4@0,1 | 2@2,3"),
    "two pipelines": Given("1x4: 6@0 / 1x4: 6@1"),
    "two pipelines, sharded": Given("1x4: 6@0 / 1x4: 6@1", SHARDED),
    "pipeline 2, two pipelines, sharded": Given("1x4: 4@0 | 2@1 / 1x4: 4@2 | 2@3", SHARDED),
    "interleaved, 2+1+1+2": Given("1x8: 2@0 | 1@1 | 1@0 | 2@1", (("schedule", "interleaved_1f1b"),)),
    "recompute of one stage": Given("1x8: 4@0 full:2 | 2@1"),
    "untied embedding": Given("1x8: 4@0 | 2@1", (), ("model.tie_embeddings=false",)),
    "all resets": Given("2x4: 4@0 full | 2@1", (), ("data.reset_attention=true", "data.reset_filter=true")),
    "hidden dropout": Given("1x8: 4@0,1 full:2 | 2@2,3", (), ("model.hidden_dropout=0.1",)),
    "Llama, tensor 2": Given("1x8: 6@0,1", (), LLAMA),
    "Qwen 3, tensor 2": Given("1x8: 4@0,1 | 2@2,3", (), QWEN3),
    # A rounding changes a token's choice of experts, and after it the losses are of two runs.
    "M32's experts": Given("1x8: 4@0 | 2@1", (), M32, bar=1e-2),
    "M32's experts, the same chosen": Given("1x8: 4@0 | 2@1", (), M32, bar=1e-4, same_experts=True),
}
NORM = "gradient norm, relative"
COMMON = ("model.init_std=0.3", "validation.every=0", "data.split=null", "log.every=1000")


@case("megatron/plans", formats={"loss": ".1e", NORM: ".1e"}, plan=tuple(PLANS), steps=(20,))
def plans(plan: str, steps: int) -> Row:
    """The greatest difference of losses and gradient norms of both engines under a plan."""
    given = PLANS[plan]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_file, words = make_project(folder), (*COMMON, f"train.steps={steps}", *given.overrides)
        made = parse_plan(run_config(run_file, *words), given.plan, **dict(given.options))
        cases = [
            Case(run_file, folder / engine, made, (*words, f"engine={engine}"))
            for engine in ("yuan", "megatron")
        ]
        if given.same_experts:
            chosen, alone = folder / "chosen.pt", parse_plan(run_config(run_file, *words), "1x8: 6@0")
            cases = [replace(cases[0], plan=alone, record=chosen), replace(cases[1], replay=chosen)]
        # Choices are read when a rank begins, so they must have been written.
        for together in [cases[:1], cases[1:]] if given.same_experts else [cases]:
            run_forked_cases(together)
        ours, theirs = (read_metrics(one.folder) for one in cases)
    assert len(ours) == len(theirs) == steps
    loss = max(abs(a["loss"] - b["loss"]) for a, b in zip(ours, theirs, strict=True))
    row: Row = {"plan": plan, "processes": made.world_size, "layout": f"`{express(made).layout}`"}
    row |= {"loss": loss, NORM: difference(ours, theirs, "grad_norm")}
    return row | {MISSED: f"{plan}: losses {loss:.1e} apart" if loss > given.bar else ""}
