"""A model with experts under pipelines: the same choices, losses, gradients and weights as one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import VARIANTS, tiny_model
from tests.support.project import difference, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases, saved_tensors
from yuan_train.config.model import sharding_of
from yuan_train.config.plan_constraints import validate_plan
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel.gradients import DeferredGrads, add_weight_grads

MODEL = {"hidden_size": 32, "num_layers": 4, "init_std": 0.2} | VARIANTS["yuan-m32"] | {"head_dim": 16}
KEYS = ("train.steps=2", "train.micro_batch_size=2", "validation.every=0", "optimizer.bucket_size=1")


def test_pipelines_compute_what_one_process_computes(tmp_path: Path) -> None:
    run_file = make_project(tmp_path, model=MODEL)
    run = run_config(run_file)
    plans = {
        "fp32": parse_plan(run, "2x4: 1.5@0 | 2.5@1"),
        "fp64": parse_plan(
            run, "2x2: 2@0 selective | 2@1 full / 2x2: 4@2", optimizer_sharding=True, schedule="zero_bubble"
        ),
    }
    assert not [problem for plan in plans.values() for problem in validate_plan(plan)]

    def case(name: str, precision: str, *, alone: bool = False, **more: Any) -> Case:
        saves = (f"checkpoint.directory={tmp_path / name / 'ck'}",) if precision == "fp64" else ()
        plan = None if alone else plans[precision]
        keys = (f"train.precision={precision}", *saves, *KEYS)
        return Case(run_file, tmp_path / name, **({"plan": plan, "overrides": keys} | more))

    cases = [case("cut fp32", "fp32"), case("cut", "fp64")]
    chosen = tmp_path / "chosen"
    narrow = run_alone(case("alone fp32", "fp32", alone=True, record=chosen))
    wide = run_alone(case("alone fp64", "fp64", alone=True))
    other = parse_plan(run, "4x1: 4@0 / 1x4: 1.5@1 | 2.5@2")
    replays = [
        case("replayed", "fp32", plan=other, replay=chosen),
        case("replayed otherwise", "fp32", plan=other, replay=change_a_choice(chosen)),
    ]
    run_cases([*cases, *replays, case("control", "fp64", without="sharded_grad_reduce")])
    # Another micro-batch size and data-parallel order, the same choices: fp32 rounds, no more.
    assert difference(read_metrics(tmp_path / "replayed"), narrow, "loss") < 1e-6
    assert difference(read_metrics(tmp_path / "replayed otherwise"), narrow, "loss") > 1e-5
    # Whole layers were placed elsewhere, no sum of a layer has another order: the same bits.
    assert read_metrics(cases[0].folder)[0]["loss"] == narrow[0]["loss"]
    # Two of five experts for each of 8 x 24 tokens in each layer, and the same ones.
    counted = read_metrics(cases[1].folder)[-1]["expert_tokens"]
    assert counted == wide[-1]["expert_tokens"] and {sum(layer) for layer in counted} == {2 * 2 * 8 * 24}
    for key in ("loss", "grad_norm"):
        assert difference(read_metrics(cases[1].folder), wide, key) < 1e-9
    ours = saved_tensors(tmp_path / "cut" / "ck")
    for key, wanted in saved_tensors(tmp_path / "alone fp64" / "ck").items():
        assert float((ours[key] - wanted).abs().max() / wanted.abs().max()) < 1e-9, key
    assert difference(read_metrics(tmp_path / "control"), wide, "grad_norm") > 1e-4


def change_a_choice(chosen: Path) -> Path:
    """A copy of recorded choices in which one sequence has other experts in the first layer."""
    known = torch.load(chosen)
    known[5, 0] = (known[5, 0] + 1) % 5
    torch.save(known, chosen.with_name("changed"))
    return chosen.with_name("changed")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_gradients_of_experts_go_into_the_buckets(split: bool, recompute: str) -> None:
    """As autograd has them; in a split backward only when they are flushed."""
    config = tiny_model("yuan-m32", init_std=0.2)
    tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(5))
    models = [Transformer(config, recompute=recompute, dtype=torch.float64) for _ in range(2)]
    for model in models:
        init_weights(model, seed=1)
    ours, plain = models
    plain.loss(plain(tokens), tokens.roll(-1, 1)).backward()
    deferred = DeferredGrads()
    names = add_weight_grads(ours, deferred, sharding_of(config)[0])
    mine = {name.split(".", 2)[2] for name in names if ".experts." in name or ".router." in name}
    assert mine == {"router.weight", "experts.up.weight", "experts.down.weight"}
    parameters = dict(ours.named_parameters())
    for name in names:
        parameters[name].main_gradient = torch.zeros_like(parameters[name])  # pyright: ignore
        parameters[name].on_main_gradient = lambda: None  # pyright: ignore
    with deferred.splitting(0, split):
        ours.loss(ours(tokens), tokens.roll(-1, 1)).backward()
    added = [n for n in names if bool(parameters[n].main_gradient.any())]  # pyright: ignore
    assert bool(added) is not split
    if split:
        deferred.flush(0)
    for name, parameter in plain.named_parameters():
        found = parameters[name].main_gradient if name in names else parameters[name].grad  # pyright: ignore
        torch.testing.assert_close(found, parameter.grad, rtol=1e-10, atol=1e-12, msg=name)


def expert_plan(run, text, experts, **keys):
    """A plan with these counts in each stage, or None where a stage is one rank wide."""
    plan = parse_plan(run, text, experts=experts, **keys)
    assert not [problem for problem in validate_plan(plan)], text
    return plan


CUTS = {
    "[5, 2, 1]": ("2x2: 2@0,1,2", [(5, 2, 1)], {}),
    "[8, 0]": ("2x2: 2@0,1", [(8, 0)], {}),
    "two stages": ("2x2: 0.5@0,1 | 1.5@2,3", [(7, 1), (1, 7)], {"schedule": "zero_bubble"}),
    "sharded": ("2x2: 2@0,1,2", [(5, 2, 1)], {"optimizer_sharding": True, "optimizer_share": [3]}),
    "recomputed": ("2x2: 1@0,1 selective | 1@2,3 full", [(7, 1), (0, 8)], {}),
}
# Pipelines add up the gradients of a tied embedding in another order.
SHARED = MODEL | {"num_layers": 2, "num_experts": 8, "tie_embeddings": False}


def test_shared_experts_are_equal_to_the_bit(tmp_path: Path) -> None:
    """One expert's rows are the same wherever it runs, and a token has two terms: no sum is another."""
    run_file = make_project(tmp_path, model=SHARED)
    keys = ("train.global_batch_size=4", "optimizer.clip_grad_norm=0", *KEYS)
    run = run_config(run_file, *keys)

    def case(precision: str, name: str, without: str = "") -> Case:
        folder, cut = tmp_path / precision / name, CUTS.get(name)
        plan = expert_plan(run, cut[0], cut[1], **cut[2]) if cut else None
        own = (f"train.precision={precision}", f"checkpoint.directory={folder / 'ck'}")
        return Case(run_file, folder, plan, (*keys, *own), without=without)

    cuts = {"fp64": list(CUTS), "fp32": ["[5, 2, 1]"], "bf16": ["[5, 2, 1]"]}
    control = replace(case("fp64", "[5, 2, 1]", "expert_all_reduce"), folder=tmp_path / "control")
    cases = [case(precision, name) for precision, names in cuts.items() for name in names]
    run_cases([*cases, replace(control, overrides=(*control.overrides[:-1], "train.steps=1"))])
    for precision, names in cuts.items():
        alone = run_alone(case(precision, "alone"))
        wanted = saved_tensors(tmp_path / precision / "alone" / "ck")
        for name in names:
            ours = read_metrics(tmp_path / precision / name)
            assert [line["loss"] for line in ours] == [line["loss"] for line in alone], (precision, name)
            assert ours[-1]["expert_tokens"] == alone[-1]["expert_tokens"], name
            for key, tensor in saved_tensors(tmp_path / precision / name / "ck").items():
                # AdamW on shares of a bucket rounds the ends of its vectors otherwise.
                same = torch.allclose if name == "sharded" else torch.equal
                assert same(tensor, wanted[key]), (precision, name, key)
    losses = [
        read_metrics(folder)[0]["loss"] for folder in (tmp_path / "control", tmp_path / "fp64" / "alone")
    ]
    assert losses[0] != losses[1]


UNLIKE: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "unlike": ("1x2: 2@0,1 / 1x2: 2@2,3", [(5, 3), (1, 7)], {}),
    "unlike, sharded": (
        "1x2: 2@0,1 / 1x2: 1@2 | 1@3",
        [(2, 6), None, None],
        {"optimizer_sharding": True, "optimizer_share": [1, 2, 3]},
    ),
    "unlike, split": ("1x2: 2@0,1 / 1x2: 2@2,3", [(8, 0), (3, 5)], {"schedule": "zero_bubble"}),
}


QWEN = (
    "model.architecture=qwen",
    "model.query_key_norm=true",
    "model.rotary_dim=0",
    "model.experts_per_token=3",
)
"""Each rank of a replica has all heads, and a norm of them. And a token has three terms."""


def test_pipelines_may_divide_experts_differently(tmp_path: Path) -> None:
    """Buckets end at all their borders. Two micro-batches on each pipeline: sums of another order than alone.

    And a checkpoint of one division is loaded under another.
    """
    run_file = make_project(tmp_path, model=SHARED)
    keys = ("train.precision=fp64", "train.global_batch_size=4", "optimizer.decay_steps=9", *KEYS)
    run = run_config(run_file, *keys)

    def case(name: str, steps: int, folder: str, cut: str = "", without: str = "") -> Case:
        text, experts, more = (CUTS | UNLIKE)[cut] if cut else ("", [], {})
        plan = expert_plan(run, text, experts, **more) if cut else None
        own = (f"train.steps={steps}", f"checkpoint.directory={tmp_path / folder}")
        return Case(run_file, tmp_path / name, plan, (*keys, *own), without=without)

    loaded = [
        case("first", 1, "ck", "[5, 2, 1]"),
        case("second", 2, "ck", "unlike, sharded"),
        case("third", 3, "ck", "[8, 0]"),
    ]
    unlike = [case(cut, 3, f"ck {cut}", cut) for cut in UNLIKE]
    qwen_plan = expert_plan(
        run_config(run_file, *keys, *QWEN), "1x2: 1@0,1 | 1@2 / 1x2: 2@3", [(7, 1), None, None]
    )
    qwen = Case(run_file, tmp_path / "qwen", qwen_plan, (*keys, *QWEN, "train.steps=2"))
    run_cases([*loaded, *unlike, case("control", 2, "ck control", "unlike", "grad_all_reduce"), qwen])
    qwen_alone = run_alone(replace(qwen, plan=None, folder=tmp_path / "qwen alone"))
    assert difference(read_metrics(qwen.folder), qwen_alone, "grad_norm") < 1e-12
    alone = run_alone(case("alone", 3, "ck alone"))
    resumed = [line for part in loaded for line in read_metrics(part.folder)]
    wanted = saved_tensors(tmp_path / "ck alone")
    for lines in (resumed, *(read_metrics(c.folder) for c in unlike)):
        for key in ("loss", "grad_norm"):
            assert difference(lines, alone, key) < 1e-12
    for folder in ("ck", *(f"ck {cut}" for cut in UNLIKE)):
        for key, tensor in saved_tensors(tmp_path / folder).items():
            torch.testing.assert_close(tensor, wanted[key], rtol=1e-9, atol=1e-12, msg=f"{folder}: {key}")
    assert read_metrics(tmp_path / "control")[1]["loss"] != pytest.approx(alone[1]["loss"], rel=1e-6)


def test_faulty_divisions_of_experts(tmp_path: Path) -> None:
    run = run_config(make_project(tmp_path, model=MODEL))

    def messages(text: str, experts: list) -> list[str]:
        return [problem.message for problem in validate_plan(parse_plan(run, text, experts=experts))]

    assert "2 counts for replicas of 3 ranks" in messages("1x8: 4@0,1,2", [(3, 2)])[0]
    assert "[3, 3] are 6 experts, but each layer has 5" in messages("1x8: 4@0,1", [(3, 3)])[0]
