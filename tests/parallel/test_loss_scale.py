"""fp16 with a loss scale under several plans against one process: curve, scales, skipped steps, resume.

And steps that are skipped because nothing of their batch is trained."""

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.project import make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases, same_saved, saved_tensors
from yuan_train.checkpoint.load import MANIFEST, STATE, step_name
from yuan_train.config.errors import TrainingError
from yuan_train.config.plan import Plan
from yuan_train.config.run import LossScaleConfig
from yuan_train.data.indexed import IndexedDataset, IndexedWriter
from yuan_train.report.run_log import read_run
from yuan_train.train.engine import LossScaler

PLANS: dict[str, dict] = {
    "mixed pipelines": {"text": "1x5: 4@0 | 2@1 / 1x3: 6@2"},
    "sharded state of different widths": {"text": "1x5: 4@0,1 | 2@2 / 1x3: 6@3", "optimizer_sharding": True},
    "recomputed, zero bubble": {
        "text": "1x8: 1@0 | 2@1 | 2@1 | 1@0",
        "schedule": "zero_bubble",
        "recompute": "full",
    },
}
STEPS = 6
# The first steps overflow and halve the scale, then it stays, then it grows.
HIGH = "train.loss_scale={initial: 4194304, growth_interval: 2}"


def overrides(precision: str, *more: str, folder: Path | None = None) -> tuple[str, ...]:
    saves = (f"checkpoint.directory={folder}",) if folder else ()
    steps = (f"train.steps={STEPS}", "optimizer.decay_steps=20", "validation.every=0")
    return (f"train.precision={precision}", *steps, *more, *saves)


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with an untied head. A card with both uses of a tied embedding adds their gradients in fp16; the
    sum overflows before either does, so the scale of a tied model may halve once more under some plans."""
    return make_project(tmp_path_factory.mktemp("untied"), model={"tie_embeddings": False})


def column(lines: list[dict], key: str) -> list:
    return [line[key] for line in lines]


def difference(curve: list[dict], reference: list[dict], key: str = "loss") -> float:
    assert len(curve) == len(reference) > 0
    pairs = zip(column(curve, key), column(reference, key), strict=True)
    return max(abs(a - b) / abs(b) for a, b in pairs if b is not None)


def test_the_scale_halves_stays_and_grows() -> None:
    config = LossScaleConfig(initial=1024.0, growth_interval=2, minimum=256.0)
    scaler = LossScaler(1024.0)
    seen = []
    for skipped in (True, False, True, True, False, False, False, False):
        scaler = scaler.after(config, skipped=skipped)
        seen.append(scaler.scale)
    assert seen == [512, 512, 256, 256, 256, 512, 512, 1024]
    constant = LossScaleConfig(initial=8.0, growth_interval=0, minimum=1.0)
    scaler = LossScaler(8.0)
    for _ in range(5):
        scaler = scaler.after(constant, skipped=False)
    assert scaler.scale == 8.0


def test_fp16_under_several_plans(untied: Path, tmp_path: Path) -> None:
    """The same steps are skipped at the same scales, and the losses differ by fp16's rounding alone."""
    given = overrides("fp16", HIGH)
    run = run_config(untied, *given)
    cases = {
        name: Case(untied, tmp_path / name, parse_plan(run, **plan), given) for name, plan in PLANS.items()
    }
    curve = run_alone(Case(untied, tmp_path / "alone", None, given))
    scales, skipped = column(curve, "loss_scale"), column(curve, "skipped_steps")
    changes = {after / before for before, after in zip(scales, scales[1:], strict=False)}
    assert changes == {0.5, 1, 2} and skipped[-1] >= 1
    assert column(curve, "grad_norm")[0] is None and column(curve, "grad_norm")[2] > 0
    run_cases(list(cases.values()))
    for name, case in cases.items():
        ours = read_metrics(case.folder)
        assert column(ours, "loss_scale") == scales, name
        assert column(ours, "skipped_steps") == skipped, name
        assert difference(ours, curve) < 2e-3, name
        assert difference(ours, curve, "grad_norm") < 2e-2, name


def test_fp16_follows_fp32(run_file: Path, tmp_path: Path) -> None:
    few = "train.steps=3"
    half = run_alone(Case(run_file, tmp_path / "half", None, overrides("fp16", few)))
    assert half[-1]["skipped_steps"] == 0 and half[-1]["loss_scale"] == 65536
    full = run_alone(Case(run_file, tmp_path / "full", None, overrides("fp32", few)))
    assert "loss_scale" not in full[0]
    assert 1e-6 < difference(half, full) < 5e-3
    assert difference(half, full, "grad_norm") < 2e-2
    # Micro-batches of another size, and a tied embedding on two cards.
    plan = parse_plan(run_config(run_file, *overrides("fp16")), "1x4: 4@0 | 2@1 / 2x2: 6@2")
    cut = Case(run_file, tmp_path / "cut", plan, overrides("fp16", few))
    run_cases([cut])
    assert difference(read_metrics(cut.folder), half) < 2e-3


def test_a_scale_changes_no_bit(run_file: Path, tmp_path: Path) -> None:
    """Powers of two are exact: fp64 with a scale equals fp64 without one, bit for bit, moments included."""
    kinds = {"plain": (), "scaled": ("train.loss_scale={initial: 1024, growth_interval: 1}",)}
    folders = [tmp_path / kind for kind in kinds]
    run = run_config(run_file, *overrides("fp64"))
    plans: dict[str, Plan | None] = {"alone": None}
    plans |= {name: parse_plan(run, **PLANS[name]) for name in list(PLANS)[1:]}

    def case(kind: str, name: str) -> Case:
        folder = tmp_path / kind
        given = overrides("fp64", "train.steps=2", *kinds[kind], folder=folder / f"{name} ck")
        return Case(run_file, folder / name, plans[name], given)

    for kind in kinds:
        run_alone(case(kind, "alone"))
    run_cases([case(kind, name) for name, plan in plans.items() if plan for kind in kinds])
    for name in plans:
        without, with_scale = (read_metrics(folder / name) for folder in folders)
        assert column(with_scale, "loss_scale") == [1024, 2048]
        for key in ("loss", "grad_norm"):
            assert column(with_scale, key) == column(without, key), (name, key)
        assert same_saved(*(folder / f"{name} ck" for folder in folders)), name


def test_a_skipped_step_changes_no_rank(run_file: Path, tmp_path: Path) -> None:
    """After three steps that all overflow, the weights are the initial ones and the moments are zero."""
    few = ("train.steps=3", "train.loss_scale={initial: 1099511627776}")
    plan = PLANS["sharded state of different widths"]
    run = run_config(run_file, *overrides("fp16", *few))
    case = Case(
        run_file, tmp_path / "cut", parse_plan(run, **plan), overrides("fp16", *few, folder=tmp_path / "ck")
    )
    start = Case(
        run_file,
        tmp_path / "start",
        None,
        overrides("fp16", "train.steps=1", few[1], folder=tmp_path / "one"),
    )
    run_cases([case])
    run_alone(start)
    assert read_metrics(case.folder)[-1]["skipped_steps"] == 3
    assert same_saved(tmp_path / "ck", tmp_path / "one")
    saved = saved_tensors(tmp_path / "ck")
    assert all(not tensor.any() for name, tensor in saved.items() if name.startswith("exp_avg"))
    state = json.loads((tmp_path / "ck" / step_name(3) / STATE).read_text())
    assert state["skipped"] == 3 and state["scaler"] == {"scale": 2.0**37, "good_steps": 0}


def test_without_the_norm_all_reduce_ranks_diverge(run_file: Path, tmp_path: Path) -> None:
    given = overrides("fp16", HIGH)
    plan = parse_plan(run_config(run_file, *given), **PLANS["mixed pipelines"])
    case = Case(run_file, tmp_path / "off", plan, given, without="norm_all_reduce")
    with pytest.raises(Exception, match="the first output that is not finite"):
        run_cases([case])


def test_a_resumed_run_has_the_scale_it_was_saved_with(run_file: Path, tmp_path: Path) -> None:
    """Bit for bit; without the scaler's state in the checkpoint, the scales differ."""
    falling = "train.loss_scale={initial: 4194304, growth_interval: 5}"
    plan = parse_plan(run_config(run_file, *overrides("fp16", falling)), **PLANS["mixed pipelines"])

    checkpoint = tmp_path / "uninterrupted ck" / step_name(4)

    def case(name: str, *more: str) -> Case:
        given = overrides("fp16", falling, *more, folder=tmp_path / f"{name} ck")
        return Case(run_file, tmp_path / name, plan, given)

    resume = f"checkpoint.resume={checkpoint}"
    run_cases([case("uninterrupted", "checkpoint.every=4"), case("resumed", resume)])
    uninterrupted, resumed = (read_metrics(tmp_path / name) for name in ("uninterrupted", "resumed"))
    assert 0 < uninterrupted[3]["skipped_steps"] < 4
    for key in ("loss", "grad_norm", "loss_scale", "skipped_steps"):
        assert column(resumed, key) == column(uninterrupted, key)[4:], key
    assert same_saved(tmp_path / "resumed ck", tmp_path / "uninterrupted ck")

    state = json.loads((checkpoint / STATE).read_text())
    assert state["scaler"]["scale"] < 4194304
    state["scaler"] = None
    (checkpoint / STATE).write_text(json.dumps(state))
    manifest = json.loads((checkpoint / MANIFEST).read_text())
    manifest["files"][STATE] = (checkpoint / STATE).stat().st_size
    (checkpoint / MANIFEST).write_text(json.dumps(manifest))
    without_scaler = case("without scaler", resume)
    run_cases([without_scaler])
    assert (
        column(read_metrics(without_scaler.folder), "loss_scale") != column(uninterrupted, "loss_scale")[4:]
    )


def test_an_overflow_at_the_smallest_scale_ends_the_run(run_file: Path, tmp_path: Path) -> None:
    given = overrides("fp16", "train.loss_scale={initial: 1.6777216e+7, minimum: 8388608}")
    with pytest.raises(
        TrainingError, match=r"step 2: .* the first gradient that is not finite came from rank 0"
    ):
        run_alone(Case(run_file, tmp_path / "end", None, given))


def test_a_skipped_step_moves_no_bias_of_experts(tmp_path: Path) -> None:
    """Nor does its load the next one's: a run that is resumed in between would not know of it."""
    experts = {"num_experts": 4, "experts_per_token": 2, "balance": "bias", "balance_rate": 0.01}
    run_file = make_project(tmp_path, model={"tie_embeddings": False} | experts)

    def run(name: str, steps: int) -> list[dict]:
        given = overrides("fp16", HIGH, f"train.steps={steps}", folder=tmp_path / f"{name} ck")
        return run_alone(Case(run_file, tmp_path / name, overrides=given))

    assert column(run("whole", 3), "grad_norm")[0] is None
    run("resumed", 1)
    biases = [
        tensor for name, tensor in saved_tensors(tmp_path / "resumed ck").items() if "router.bias" in name
    ]
    assert biases and not any(bias.any() for bias in biases)
    run("resumed", 3)
    assert same_saved(tmp_path / "resumed ck", tmp_path / "whole ck")


def test_a_batch_without_a_trained_token_leaves_the_weights(run_file: Path, tmp_path: Path) -> None:
    """Momentum and decay alone would move them. So it is under a plan, and resumed."""
    corpus = IndexedDataset(run_file.with_name("corpus"))
    with (
        IndexedWriter(tmp_path / "chats", dtype=corpus.dtype) as texts,
        IndexedWriter(tmp_path / "chats.answers", dtype=np.dtype(np.uint8)) as marks,
    ):
        for number, length in enumerate(map(int, corpus.sequence_lengths())):
            texts.add_many(corpus.document(number), [length])
            marks.add_many(np.full(length, number % 6 == 0, dtype=np.uint8), [length])
    data = ("data.loss_on_answers=true", f"data.train=[{{prefix: {tmp_path / 'chats'}}}]", "data.split=null")
    given = (*data, "train.global_batch_size=2", "validation.every=0", "optimizer.decay_steps=20")

    def case(name: str, steps: int, plan: Plan | None = None) -> Case:
        words = (*given, f"train.steps={steps}", f"checkpoint.directory={tmp_path / name} ck")
        return Case(run_file, tmp_path / name, plan, words)

    losses = column(run_alone(case("whole", 12)), "loss")
    assert losses[:2] == [None, None] and 3 < losses.count(None) < 10
    run_alone(case("resumed", 7))
    assert column(run_alone(case("resumed", 12)), "loss") == losses
    assert same_saved(tmp_path / "resumed ck", tmp_path / "whole ck")
    # The first two batches train nothing.
    run_alone(case("one", 1))
    run_alone(case("two", 2))
    assert same_saved(tmp_path / "one ck", tmp_path / "two ck")
    planned = case("planned", 12, parse_plan(run_config(run_file, *given), "1x2: 2@0 | 4@1"))
    run_cases([planned])
    found = column(read_metrics(planned.folder), "loss")
    assert [loss is None for loss in found] == [loss is None for loss in losses]
    assert [loss for loss in found if loss] == pytest.approx([loss for loss in losses if loss], rel=1e-5)
    assert read_run(planned.folder).steps.last["step"] == 12
