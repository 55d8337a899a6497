"""Other models and precisions than those of `test_plans`, under plans that divide each of their parts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import difference, make_plan, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases

MODELS: dict[str, dict[str, Any]] = {
    "yuan": {"attention": "plain", "tie_embeddings": False},
    "qwen2": {"architecture": "qwen", "num_key_value_heads": 2, "qkv_bias": True},
    "qwen3": {"architecture": "qwen", "num_key_value_heads": 2, "query_key_norm": True, "head_dim": 12},
}
"""Of Qwen 3 are all parts that a Llama has."""
PLANS: dict[str, dict[str, Any]] = {
    "unlike widths": {
        "text": "1x4: 2@0,1 selective | 4@2 full / 1x4: 3@3 | 3@4,5",
        "optimizer_sharding": True,
        "optimizer_share": [1, 3, 7, 1],
    },
    "zero bubble in a wide V": {"text": "1x8: 1@0,1 | 2@2 | 2@2 | 1@0,1", "schedule": "zero_bubble"},
    "tokens divided": {"text": "1x8: 3@0,1 selective | 3@2,3", "sequence_parallel": True},
}
STEPS = 2
OVERRIDES = ("train.precision=fp64", f"train.steps={STEPS}", "optimizer.bucket_size=1")
RESETS = ("data.reset_attention=true", "data.reset_filter=true")


@pytest.mark.parametrize("name", MODELS)
def test_a_plan_computes_what_one_process_computes(tmp_path: Path, name: str) -> None:
    run_file = make_project(tmp_path, model={"num_attention_heads": 4} | MODELS[name])
    overrides = OVERRIDES + (RESETS if name == "yuan" else ())
    run = run_config(run_file, *overrides)
    alone = run_alone(Case(run_file, tmp_path / "alone", None, overrides))
    # Qwen 3 has all that Qwen 2 has but biases.
    plans = list(PLANS) if name == "qwen3" else ["unlike widths"]
    cases = [Case(run_file, tmp_path / plan, parse_plan(run, **PLANS[plan]), overrides) for plan in plans]
    wide = parse_plan(run, **PLANS["unlike widths"])
    control = "head_norm_reduce" if name == "qwen3" else "tensor_all_reduce"
    broken = Case(run_file, tmp_path / "control", wide, overrides, without=control)
    run_cases([*cases, broken])
    for case in cases:
        curve = read_metrics(case.folder)
        assert difference(curve, alone, "loss") < 1e-12, case.folder.name
        assert difference(curve, alone, "grad_norm") < 1e-11, case.folder.name
    curve = read_metrics(broken.folder)
    assert max(difference(curve, alone, key) for key in ("loss", "grad_norm")) > 1e-6


def test_bf16_keeps_fp32_masters_under_any_partition(run_file: Path, tmp_path: Path) -> None:
    # The partition does not change bf16 rounding, because each micro-batch is computed the same way.
    overrides = ("train.precision=bf16", "train.steps=3", "optimizer.decay_steps=20")
    case = Case(run_file, tmp_path / "cut", make_plan(run_config(run_file), [[2, 3, 1]]), overrides)
    run_cases([case])
    reference = run_alone(replace(case, folder=tmp_path / "alone", plan=None))
    wide = (*overrides, "train.precision=fp32")
    exact = run_alone(replace(case, folder=tmp_path / "fp32", plan=None, overrides=wide))
    assert difference(read_metrics(case.folder), reference) < 2e-3
    assert 1e-6 < difference(reference, exact) < 2e-2
