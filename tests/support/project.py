"""A small project in a folder: text, tokenizer, token files and a run file. And plans in short form."""

import itertools
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from yuan_train.config.plan import (
    Forecast,
    MemoryForecast,
    PipelinePlan,
    Plan,
    RankPlan,
    StageForecast,
    StagePlan,
)
from yuan_train.config.run import RunConfig, load_run
from yuan_train.data.indexed import preprocess
from yuan_train.data.tokenizer import train_tokenizer

MODEL = {
    "name": "test",
    "num_layers": 6,
    "hidden_size": 32,
    "num_attention_heads": 2,
    "ffn_hidden_size": 64,
    "vocab_size": 512,
    "max_sequence_length": 64,
}
WORDS = "the quick brown fox jumps over a lazy dog while seven wizards box quietly near two jugs".split()


def make_project(folder: Path, *, model: dict[str, Any] | None = None) -> Path:
    """Write everything that a run of 20 fp32 steps on the CPU needs, and return the path of the run file."""
    generator = random.Random(0)
    texts = [" ".join(generator.choices(WORDS, k=generator.randint(5, 60))) + "\n" for _ in range(300)]
    corpus = write_lines(folder / "corpus.jsonl", ({"text": text} for text in texts))
    train_tokenizer([corpus], 400, folder / "tokenizer")
    preprocess([corpus], folder / "tokenizer", folder / "corpus")
    run = {
        "model": MODEL | (model or {}),
        "data": {
            "train": [{"prefix": str(folder / "corpus")}],
            "split": [0.9, 0.1],
            "tokenizer": str(folder / "tokenizer"),
            "sequence_length": 24,
        },
        "train": {"steps": 20, "global_batch_size": 8, "precision": "fp32", "device": "cpu"},
        "optimizer": {"learning_rate": 3e-3, "minimum_learning_rate": 3e-4, "warmup_steps": 3},
        "validation": {"every": 10, "batches": 1},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(run, sort_keys=False))
    return path


def make_plan(run: RunConfig, cuts: Sequence[Sequence[int]], *, recompute: str = "none") -> Plan:
    """A plan with a pipeline for each list of layers per stage, equal shares of the batch, a rank a stage."""
    ranks = itertools.count()
    number = run.train.global_batch_size // len(cuts)
    stages = (" | ".join(f"{layers}@{next(ranks)}" for layers in cut) for cut in cuts)
    return parse_plan(run, " / ".join(f"1x{number}: {own}" for own in stages), recompute=recompute)


def with_forecast(
    plan: Plan,
    *,
    seconds: Sequence[tuple[float, float]] = ((1.0, 1.0),),
    memory: Mapping[str, float] = {},
    host_bytes: float = 0.0,
    **whole: Any,
) -> Plan:
    """The plan with a forecast that nothing has computed: of its stages in turn (seconds of a forward, of a
    backward), bytes by category (0 where not named) and on the host; `whole` are other keys of `Forecast`."""
    names = [name for name in MemoryForecast.__dataclass_fields__ if name != "critic"]
    bytes_ = MemoryForecast(**dict.fromkeys(names, 0.0) | dict(memory))
    times = itertools.cycle(seconds)
    stages = tuple(
        StageForecast(
            pipeline=p,
            stage=s,
            forward_seconds=own[0],
            backward_seconds=own[1],
            peak_memory_bytes=bytes_.total,
            memory=bytes_,
            host_memory_bytes=host_bytes,
        )
        for p, pipeline in enumerate(plan.pipelines)
        for s, own in zip(range(len(pipeline.stages)), times)  # noqa: B905
    )
    keys = {"step_seconds": 1.0, "tokens_per_second": 1.0, "bubble_fraction": 0.0, "lower_bound_seconds": 0.0}
    return replace(plan, forecast=Forecast(**{**keys, "source": "estimated", **whole}, stages=stages))


def with_stages(plan: Plan, *stages: StagePlan) -> Plan:
    """A plan of one pipeline with other stages."""
    (pipeline,) = plan.pipelines
    return replace(plan, pipelines=(replace(pipeline, stages=stages),))


def on_devices(plan: Plan, *devices: str) -> Plan:
    """The plan with its ranks on these cards."""
    ranks = zip(plan.ranks, devices, strict=True)
    return replace(plan, ranks=tuple(replace(rank, device=device) for rank, device in ranks))


def write_lines(path: Path, records: Iterable[object]) -> Path:
    """A file with a line of JSON for each."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_metrics(folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def difference(curve: list[dict[str, Any]], reference: list[dict[str, Any]], key: str = "loss") -> float:
    """The most by which a figure of two runs of as many steps differs, relative to the second one's."""
    assert len(curve) == len(reference) > 0
    return max(abs(a[key] - b[key]) / abs(b[key]) for a, b in zip(curve, reference, strict=True))


def run_config(path: Path, *overrides: str) -> RunConfig:
    """The run of a run file, with overrides such as `train.steps=3`."""
    return load_run(path, overrides)


def parse_plan(
    run: RunConfig,
    text: str,
    *,
    schedule: str = "1f1b",
    optimizer_sharding: bool = False,
    sequence_parallel: bool = False,
    recompute: str = "none",
    page_group: int = 1,
    **stage_keys: Sequence[Any],
) -> Plan:
    """A plan in short form: pipelines separated by `/`, each `sequences x micro-batches : stages`.

    `sequences` is the micro-batch size. Stages are separated by `|`, each `layers @ replicas`; replicas by
    `;`, their ranks by `,`. So `1x4: 2@0,1 | 4@2 / 2x2: 6@3` has a pipeline of two stages, the first two
    ranks wide, and a pipeline on a single card. A stage may end with its own recompute: `4@2 full` or, for
    its first three layers only, `4@2 full:3`. `stage_keys` are further keys of `StagePlan`, with a value for
    each stage in the order of the text.
    """
    pipelines: list[PipelinePlan] = []
    further = zip(*stage_keys.values(), strict=True) if stage_keys else itertools.repeat(())
    for part in text.split("/"):
        shape, _, stages = part.partition(":")
        size, _, number = shape.partition("x")
        cut = [stage.split("@") for stage in stages.split("|")]
        layers = [float(stage[0]) for stage in cut]
        words = [stage[1].split() for stage in cut]
        pipelines.append(
            PipelinePlan(
                micro_batch_size=int(size),
                num_micro_batches=int(number),
                page_group=page_group,
                stages=tuple(
                    StagePlan(
                        replicas=tuple(
                            tuple(int(rank) for rank in replica.split(",")) for replica in own[0].split(";")
                        ),
                        layers=(sum(layers[:s]), sum(layers[: s + 1])),
                        embedding=s == 0,
                        head=s == len(cut) - 1,
                        **_recompute(own[1:] or [recompute]),
                        **dict(zip(stage_keys, next(further), strict=True)),
                    )
                    for s, own in enumerate(words)
                ),
            )
        )
    world_size = 1 + max(rank for p in pipelines for stage in p.stages for rank in stage.ranks)
    return Plan(
        model=run.model,
        sequence_length=run.data.sequence_length,
        global_batch_size=run.train.global_batch_size,
        schedule=schedule,  # pyright: ignore[reportArgumentType]
        optimizer_sharding=optimizer_sharding,
        sequence_parallel=sequence_parallel,
        ranks=tuple(RankPlan(rank=i, device=f"card/{i}", type="card") for i in range(world_size)),
        pipelines=tuple(pipelines),
    )


def stage_text(layers: float, first: int, width: int, count: int) -> str:
    """A stage in that form: so many replicas of `width` ranks, which are numbered from `first` on."""
    groups = (range(first + width * i, first + width * (i + 1)) for i in range(count))
    return f"{layers}@" + ";".join(",".join(map(str, group)) for group in groups)


def _recompute(words: Sequence[str]) -> dict[str, Any]:
    kind, _, count = words[0].partition(":")
    return {"recompute": kind, "recompute_layers": int(count) if count else None}
