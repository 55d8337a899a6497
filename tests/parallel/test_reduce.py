"""Gradient reductions in bf16, and in one operation for all owners: against fp32, an operation per owner."""

from __future__ import annotations

from pathlib import Path

from tests.support.project import difference, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_cases


def test_reductions_in_bf16_and_in_one_operation(tmp_path: Path) -> None:
    (tmp_path / "project").mkdir()
    run_file = make_project(tmp_path / "project")
    common = ("train.precision=fp32", "train.steps=2", "optimizer.bucket_size=1")
    run = run_config(run_file, *common)
    text = "1x4: 6@0 / 1x4: 6@1"
    plans = {sharded: parse_plan(run, text, optimizer_sharding=sharded) for sharded in (False, True)}
    kinds = {"fp32": (), "bf16": ("optimizer.reduce_dtype=bf16",)}
    cases = {
        (sharded, kind): Case(run_file, tmp_path / f"{sharded} {kind}", plan, (*common, *words))
        for sharded, plan in plans.items()
        for kind, words in kinds.items()
    }
    cases[True, "coalesced"] = Case(
        run_file, tmp_path / "coalesced", plans[True], common, without="operation_per_owner"
    )
    # Three owners, by which not every bucket divides: the last one's rest is an operation of its own.
    three = parse_plan(run, "1x3: 6@0 / 1x3: 6@1 / 1x2: 6@2", optimizer_sharding=True)
    for name, without in (("three", "operation_per_owner"), ("three, each", "")):
        cases[True, name] = Case(run_file, tmp_path / name, three, common, without=without)
    run_cases(list(cases.values()))
    curves = {key: read_metrics(case.folder) for key, case in cases.items()}
    for sharded in (False, True):
        pairs = zip(curves[sharded, "fp32"], curves[sharded, "bf16"], strict=True)
        errors = [abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs]
        # 8 bits: half a unit in the last place is 2^-9 of a gradient, and a norm averages over them.
        assert 1e-7 < max(errors) < 2**-9, "rounded to bf16, and no more"
    # Two owners: their sum has one order, whoever makes it.
    for key in ("loss", "grad_norm"):
        one, each = ([line[key] for line in curves[key_]] for key_ in ((True, "coalesced"), (True, "fp32")))
        assert one == each
    for key in ("loss", "grad_norm"):
        assert difference(curves[True, "three"], curves[True, "three, each"], key) < 1e-5
