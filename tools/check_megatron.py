"""python tools/check_megatron.py [ROW ...]: the megatron engine against ours, plan by plan, on the CPU.

Trains a tiny model with both engines in fp32 and prints, for each plan, the greatest difference of the losses
and of the gradient norms, as a table for docs/megatron.md. ROW is a part of a row's name; without any, all
rows run: some minutes on two cores. Needs megatron-core.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.support.project import make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_forked_cases
from yuan_train.config.express import express

BAR = 1e-5
"""The greatest difference of a loss, in nats, that is accepted in fp32."""


@dataclass(frozen=True)
class Row:
    """A plan in the short form of the tests' `parse_plan`, and what else is special."""

    name: str
    plan: str
    options: tuple[tuple[str, Any], ...] = ()
    overrides: tuple[str, ...] = ()
    bar: float = BAR
    same_experts: bool = False
    """megatron-core is made to choose the experts that our engine, in one process, has chosen."""


LLAMA = ("model.architecture=llama", "model.attention=plain", "model.num_key_value_heads=2")
QWEN3 = (*LLAMA[1:], "model.architecture=qwen", "model.query_key_norm=true")
M32 = ("model.num_experts=4", "model.experts_per_token=2")
ROWS = (
    Row("one process", "1x8: 6@0"),
    Row("uneven, 4+2", "1x8: 4@0 | 2@1"),
    Row("an empty stage, 2+0+4", "1x8: 2@0 | 0@1 | 4@2"),
    Row("ranks in another order", "1x8: 4@1 | 2@0"),
    Row("tensor 2", "1x8: 6@0,1"),
    Row("tensor 2, pipeline 2", "1x8: 4@0,1 | 2@2,3"),
    Row("two pipelines", "1x4: 6@0 / 1x4: 6@1"),
    Row("two pipelines, sharded", "1x4: 6@0 / 1x4: 6@1", (("optimizer_sharding", True),)),
    Row(
        "pipeline 2, two pipelines, sharded",
        "1x4: 4@0 | 2@1 / 1x4: 4@2 | 2@3",
        (("optimizer_sharding", True),),
    ),
    Row("interleaved, 2+1+1+2", "1x8: 2@0 | 1@1 | 1@0 | 2@1", (("schedule", "interleaved_1f1b"),)),
    Row("recompute of one stage", "1x8: 4@0 full:2 | 2@1"),
    Row("untied embedding", "1x8: 4@0 | 2@1", (), ("model.tie_embeddings=false",)),
    Row("all resets", "2x4: 4@0 full | 2@1", (), ("data.reset_attention=true", "data.reset_filter=true")),
    Row("hidden dropout", "1x8: 4@0,1 full:2 | 2@2,3", (), ("model.hidden_dropout=0.1",)),
    Row("Llama, tensor 2", "1x8: 6@0,1", (), LLAMA),
    Row("Qwen 3, tensor 2", "1x8: 4@0,1 | 2@2,3", (), QWEN3),
    # A rounding changes a token's choice of experts, and after it the losses are of two runs.
    Row("M32's experts", "1x8: 4@0 | 2@1", (), M32, bar=1e-2),
    Row("M32's experts, the same chosen", "1x8: 4@0 | 2@1", (), M32, bar=1e-4, same_experts=True),
)
COMMON = ("model.init_std=0.3", "validation.every=0", "data.split=null", "log.every=1000")


def main() -> int:
    """Run the rows, print the table; 1 if a row is beyond the bar."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("rows", nargs="*", metavar="ROW")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    chosen = [row for row in ROWS if not arguments.rows or any(word in row.name for word in arguments.rows)]
    with tempfile.TemporaryDirectory() as folder:
        found = list(compare(chosen, Path(folder), arguments.steps))
    print("| plan | processes | layout | loss | gradient norm, relative |\n|---|--:|---|--:|--:|")
    for row, processes, layout, loss, norm in found:
        cut = layout.replace("|", "\\|")
        print(f"| {row.name} | {processes} | `{cut}` | {loss:.1e} | {norm:.1e} |")
    return int(any(loss > row.bar for row, *_, loss, _ in found))


def compare(rows: Sequence[Row], folder: Path, steps: int) -> Any:
    """(row, processes, layout, greatest difference of loss, of the norm) of each row."""
    run_file = make_project(folder)
    for row in rows:
        words = (*COMMON, f"train.steps={steps}", *row.overrides)
        plan = parse_plan(run_config(run_file, *words), row.plan, **dict(row.options))
        start = time.perf_counter()
        cases = [
            Case(run_file, folder / row.name / engine, plan, (*words, f"engine={engine}"))
            for engine in ("yuan", "megatron")
        ]
        if row.same_experts:
            chosen, alone = folder / f"{row.name}.pt", parse_plan(run_config(run_file, *words), "1x8: 6@0")
            cases = [replace(cases[0], plan=alone, record=chosen), replace(cases[1], replay=chosen)]
        # Choices are read when a rank begins, so they must have been written.
        for together in [cases[:1], cases[1:]] if row.same_experts else [cases]:
            run_forked_cases(together)
        ours, theirs = (read_metrics(case.folder) for case in cases)
        assert len(ours) == len(theirs) == steps
        pairs = list(zip(ours, theirs, strict=True))
        loss = max(abs(a["loss"] - b["loss"]) for a, b in pairs)
        norm = max(abs(a["grad_norm"] / b["grad_norm"] - 1) for a, b in pairs)
        print(f"{row.name}: {loss:.1e}, {norm:.1e} ({time.perf_counter() - start:.0f} s)", file=sys.stderr)
        yield row, plan.world_size, express(plan).layout, loss, norm


if __name__ == "__main__":
    sys.exit(main())
