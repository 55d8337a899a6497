"""Adapters: any plan computes what one process computes; the base stays; checkpoints, merged exports."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.commands import Ask, Refuse, command
from tests.support.project import difference, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases
from tests.support.rl import write_rl
from yuan_train.checkpoint.hf import export_hf, import_hf
from yuan_train.checkpoint.load import find_checkpoint, load_weights
from yuan_train.checkpoint.megatron import export_megatron, import_megatron
from yuan_train.config.errors import CheckpointError, ConfigError
from yuan_train.config.model import ADAPTERS, LoraConfig, ModelConfig, is_trained
from yuan_train.config.plan_constraints import load_plan
from yuan_train.config.rl import load_rl
from yuan_train.config.run import load_run
from yuan_train.models import transformer
from yuan_train.models.transformer import Transformer, init_weights

MODELS: dict[str, dict[str, Any]] = {
    "yuan": {"num_attention_heads": 4},
    "qwen2": {
        "architecture": "qwen",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "qkv_bias": True,
        "tie_embeddings": False,
    },
}
PLANS: dict[str, dict[str, Any]] = {
    "unlike widths": {
        "text": "1x4: 2@0,1 selective | 4@2 full / 1x4: 3@3 | 3@4,5",
        "optimizer_sharding": True,
        "optimizer_share": [1, 3, 7, 1],
    },
    "zero bubble in a wide V": {
        "text": "1x8: 1@0,1 | 2@2 | 2@2 selective | 1@0,1 selective",
        "schedule": "zero_bubble",
        "sequence_parallel": True,
    },
    "ends alone": {"text": "1x4: 0@0 | 6@1,2 full | 0@3 / 1x4: 3.5@4 | 2.5@5", "optimizer_sharding": True},
}
STEPS = 3
SHORT = ("train.precision=fp64", f"train.steps={STEPS}", "optimizer.bucket_size=1")
LORA = ("lora={rank: 3, alpha: 6}", *SHORT)
TWO_STEPS = (*LORA, "train.steps=2")
SOME_TWO_STEPS = (*TWO_STEPS, "lora.targets=[out, up, value]")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "qwen2")) for name in MODELS]
)
def test_a_plan_computes_what_one_process_computes(tmp_path: Path, name: str) -> None:
    run_file = make_project(tmp_path, model=MODELS[name])
    run = run_config(run_file, *TWO_STEPS)
    alone = run_alone(Case(run_file, tmp_path / "alone", None, TWO_STEPS))
    plans = {key: parse_plan(run, **plan) for key, plan in PLANS.items()}
    cases = [Case(run_file, tmp_path / key, plan, TWO_STEPS) for key, plan in plans.items()]
    some = run_config(run_file, *SOME_TWO_STEPS)
    subset = Case(run_file, tmp_path / "some", parse_plan(some, **PLANS["unlike widths"]), SOME_TWO_STEPS)
    wide = plans["unlike widths"]
    controls = [
        Case(run_file, tmp_path / key, wide, TWO_STEPS, without=key)
        for key in ("head_norm_reduce", "sharded_grad_reduce")
    ]
    run_cases([*cases, subset, *controls])
    for case in cases:
        curve = read_metrics(case.folder)
        assert difference(curve, alone, "loss") < 1e-12, case.folder.name
        assert difference(curve, alone, "grad_norm") < 1e-11, case.folder.name
    alone_some = run_alone(Case(run_file, tmp_path / "some alone", None, SOME_TWO_STEPS))
    assert difference(read_metrics(subset.folder), alone_some, "loss") < 1e-12
    assert difference(read_metrics(subset.folder), alone_some, "grad_norm") < 1e-11
    for broken in controls:
        curve = read_metrics(broken.folder)
        assert max(difference(curve, alone, key) for key in ("loss", "grad_norm")) > 1e-6
    base = run_alone(Case(run_file, tmp_path / "base", None, (*SHORT, "train.steps=2")))
    # B is zero at first, so step 1 computes what the base computes; then the base would go on otherwise.
    assert alone[0]["loss"] == alone_some[0]["loss"] == base[0]["loss"]
    other = run_alone(Case(run_file, tmp_path / "alpha", None, (*TWO_STEPS, "lora.alpha=7")))
    for curve in (base, other, alone_some):
        assert difference(curve, alone, "loss") > 1e-6


# See tests/models/test_compiled.py.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_compiled_layers_have_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "BACKEND", "aot_eager")
    torch.compiler.reset()
    run_file = make_project(tmp_path, model=MODELS["yuan"])
    plan = parse_plan(run_config(run_file, *TWO_STEPS), "1x8: 6@0 selective")
    curve = run_alone(Case(run_file, tmp_path / "plan", plan, (*TWO_STEPS, "train.compile=true")))
    alone = run_alone(Case(run_file, tmp_path / "alone", None, TWO_STEPS))
    for key in ("loss", "grad_norm"):
        assert difference(curve, alone, key) < 1e-12


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """All weights of the newest checkpoint of a folder, by global name."""
    checkpoint = find_checkpoint(folder)
    model = Transformer(checkpoint.model, dtype=torch.float64)
    load_weights(checkpoint, model)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_a_run_is_resumed_under_another_plan_and_the_base_stays(tmp_path: Path) -> None:
    run_file = make_project(tmp_path, model=MODELS["yuan"])
    plans = [parse_plan(run_config(run_file, *LORA), **plan) for plan in PLANS.values()]
    whole = run_alone(Case(run_file, tmp_path / "whole", None, (*LORA, f"checkpoint.directory={tmp_path}/w")))
    save = (*LORA, f"checkpoint.directory={tmp_path}/ck")
    first = Case(run_file, tmp_path / "first", plans[0], (*save, "train.steps=2", "optimizer.decay_steps=4"))
    again = (*save, "optimizer.decay_steps=4")
    # Step 3 twice: under another plan, and in the plan of the first steps.
    other = Case(
        run_file, tmp_path / "other", plans[2], (*again, "checkpoint.directory=null", resume(tmp_path))
    )
    same = Case(run_file, tmp_path / "same", plans[0], again)
    straight = Case(
        run_file, tmp_path / "straight", plans[0], (*again, f"checkpoint.directory={tmp_path}/straight-ck")
    )
    run_cases([first, other, same, straight])
    expected = read_metrics(straight.folder)
    assert read_metrics(same.folder)[0]["loss"] == expected[2]["loss"]
    assert read_metrics(other.folder)[0]["loss"] == pytest.approx(expected[2]["loss"], rel=1e-12)
    resumed, uncut = weights_of(tmp_path / "ck"), weights_of(tmp_path / "straight-ck")
    assert all(torch.equal(resumed[name], uncut[name]) for name in uncut)
    model = find_checkpoint(tmp_path / "w").model
    drawn = Transformer(model, dtype=torch.float64)
    init_weights(drawn, seed=1234)
    trained = weights_of(tmp_path / "w")
    for name, parameter in drawn.named_parameters():
        assert torch.equal(parameter, trained[name]) != is_trained(model, name), name
    # Of what is frozen there are no moments.
    names = find_checkpoint(tmp_path / "ck").entries
    moments = {name.partition(".")[2] for name in names if name.startswith("exp_avg.")}
    assert moments == {name for name in uncut if name.endswith(ADAPTERS)}
    assert len(whole) == STEPS


def resume(folder: Path) -> str:
    return f"checkpoint.resume={folder / 'ck' / 'step-00000002'}"


def test_an_imported_base_is_adapted_and_exported_merged(tmp_path: Path) -> None:
    """In bf16: masters that no weight shows are merged in fp32."""
    run_file = make_project(tmp_path, model=MODELS["qwen2"])
    base = (*SHORT, f"checkpoint.directory={tmp_path}/base")
    run_alone(Case(run_file, tmp_path / "pretrained", None, base))
    export_hf(find_checkpoint(tmp_path / "base"), tmp_path / "base-hf", dtype="float32")
    import_hf(tmp_path / "base-hf", tmp_path / "imported")
    start = (f"start.checkpoint={tmp_path}/imported", "train.precision=bf16", "train.steps=6")
    options = (*LORA, *start, "optimizer.learning_rate=0.02")
    tuned = Case(run_file, tmp_path / "tuned", None, (*options, f"checkpoint.directory={tmp_path}/lora"))
    full = run_alone(Case(run_file, tmp_path / "full", None, (*SHORT, *start)))
    assert run_alone(tuned)[0]["loss"] == full[0]["loss"]
    found = find_checkpoint(tmp_path / "lora")
    out = export_hf(found, tmp_path / "merged", dtype="float32")
    assert out.parameters == replace(found.model, lora=None).parameters
    import_hf(tmp_path / "merged", tmp_path / "again")
    adapted, merged = (logits(find_checkpoint(tmp_path / name)) for name in ("lora", "again"))
    before = logits(find_checkpoint(tmp_path / "imported"))
    assert torch.allclose(adapted, merged, rtol=0, atol=2e-6)
    assert (adapted - before).abs().max() > 1e-2
    # Adapters belong to a run's model: neither dropped without a word, nor taken for others.
    for wrong in (SHORT, ("lora={rank: 4, alpha: 6}", *SHORT)):
        case = Case(run_file, tmp_path / "wrong", None, (*wrong, f"start.checkpoint={tmp_path}/lora"))
        with pytest.raises(CheckpointError, match="another model: lora "):
            run_alone(case)


def logits(checkpoint: Any) -> torch.Tensor:
    """Of a few tokens, in fp32."""
    model = Transformer(checkpoint.model)
    load_weights(checkpoint, model)
    with torch.no_grad():
        return model.logits(model(torch.arange(40).view(2, 20)))


@pytest.mark.parametrize("kind", ["dpo", "reward"])
def test_other_objectives_train_adapters(tmp_path: Path, kind: str) -> None:
    run_file = make_project(tmp_path, model=MODELS["qwen2"])
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text('{"prompt": "the quick", "chosen": " fox", "rejected": " dog jumps"}\n' * 8)
    options = (
        *(*LORA, f"objective={{kind: {kind}}}", f"data.pairs={pairs}", "data.train=[]", "data.split=null"),
        *("validation.every=0", "train.micro_batch_size=2"),
    )
    run = run_config(run_file, *options)
    plan = parse_plan(run, "2x2: 2@0,1 | 4@2 full / 2x2: 6@3", optimizer_sharding=True)
    case = Case(run_file, tmp_path / "plan", plan, (*options, f"checkpoint.directory={tmp_path}/ck"))
    run_cases([case])
    alone = run_alone(Case(run_file, tmp_path / "alone", None, options))
    assert difference(read_metrics(case.folder), alone, "loss") < 1e-12
    assert difference(read_metrics(case.folder), alone, "grad_norm") < 1e-11
    drawn = Transformer(run.model, dtype=torch.float64)
    init_weights(drawn, seed=1234)
    trained = weights_of(tmp_path / "ck")
    moved = {name for name, p in drawn.named_parameters() if not torch.equal(p, trained[name])}
    assert moved == {name for name in trained if name.endswith(ADAPTERS) or name == "score.weight"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("lora={rank: 0}",), "lora.rank: .*greater than 0"),
        (("lora={rank: 100000000000000000000}",), "lora.rank: .*less than or equal to 65536"),
        (
            ("lora={rank: 2, targets: [out, gate]}",),
            r"'gate' is no matrix of a layer \(has: value, query_key",
        ),
        (("lora={rank: 2}", "engine=megatron"), "engine: megatron trains no adapters"),
        (("lora={rank: 2}", "search.offload=[optimizer]"), "search.offload: optimizer keeps something"),
        (
            ("lora={rank: 2}", "model.num_experts=4", "model.experts_per_token=2"),
            "a model with experts has no adapters yet; wanted a dense model",
        ),
    ],
)
def test_what_does_not_go_with_adapters_is_refused(
    run_file: Path, options: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(run_file, *options)


def test_a_plan_of_adapters_keeps_nothing_on_hosts(run_file: Path) -> None:
    from yuan_train.config.plan_constraints import validate_plan

    plan = parse_plan(run_config(run_file, *LORA), "1x8: 6@0", optimizer_offload=[0.5])
    assert [str(v.message) for v in validate_plan(plan)] == [
        "0.5: optimizer_offload keeps something on hosts, and a model with adapters keeps nothing there yet "
        "(lora); leave this out"
    ]


def test_names_and_sizes_of_adapters() -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 8, "ffn_hidden_size": 16, "vocab_size": 32}
    base = ModelConfig(name="test", architecture="llama", num_attention_heads=2, **sizes)
    model = replace(base, lora=LoraConfig(rank=2, targets=("query", "down")))
    built = dict(Transformer(model).named_parameters())
    assert {name for name in built if name.endswith(ADAPTERS)} == {
        f"layers.{i}.{name}.{kind}"
        for i in range(2)
        for name in ("attention.query", "feed_forward.down")
        for kind in ADAPTERS
    }
    assert built["layers.1.feed_forward.down.lora_a"].shape == (2, 16)
    assert built["layers.1.feed_forward.down.lora_b"].shape == (8, 2)
    # 2 (8 + 8) + 2 (16 + 8) a layer.
    assert model.trained_unit_parameters == (0, 80, 80, 0)
    assert model.parameters == base.parameters + 160
    assert model.lora is not None and model.lora.scale == 1.0
    # Forward 2 FLOP a weight, backward 2 of a frozen one and 4 of an adapter's.
    products = 2 * sum(half.products for half in model.spec.sublayers(model)) + 8 * 32
    scores = base.training_flops(16) - 6 * products
    assert model.training_flops(16) == 4 * products + scores + 6 * 160


def test_reinforcement_learning_refuses_what_training_does(tmp_path: Path) -> None:
    path = write_rl(tmp_path)
    options = ("lora={rank: 2}", "search.policy.offload=[optimizer]", "search.policy.half_layers=true")
    with pytest.raises(
        ConfigError, match=r"search.policy.half_layers: true cuts layers(.|\n)*policy.offload: o"
    ):
        load_rl(path, options)
    assert load_rl(path, options[:1]).model.lora == LoraConfig(rank=2)


def test_commands_read_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], ask: Ask, refuse: Refuse
) -> None:
    """`generate` with the adapters in place gives what it gives of the merged model."""
    run_file = make_project(tmp_path, model=MODELS["yuan"] | {"vocab_size": 400})
    save = f"checkpoint.directory={tmp_path}/lora"
    options = (*LORA, "train.steps=6", "optimizer.learning_rate=0.02", "train.precision=fp32")
    curve = run_alone(Case(run_file, tmp_path / "log", None, (*options, save)))
    found = find_checkpoint(tmp_path / "lora")
    export_megatron(found, tmp_path / "ranks", tensor=2)
    import_megatron(tmp_path / "ranks", tmp_path / "merged", model=replace(found.model, lora=None))
    adapted, merged = (logits(find_checkpoint(tmp_path / name)) for name in ("lora", "merged"))
    assert torch.allclose(adapted, merged, rtol=0, atol=2e-6)
    capsys.readouterr()
    texts = []
    for name in ("lora", "merged"):
        words = ("--prompt-ids", 5, "--max-new-tokens", 8, "--temperature", 0, "--tokenizer")
        assert command("generate", "--checkpoint", tmp_path / name, *words, tmp_path / "tokenizer") == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] and texts[0].strip()
    assert ask("inspect", tmp_path / "lora")["parameters"] == found.model.parameters
    assert len(curve) == 6
    refuse("train", "--config", run_file, "lora={rank: 2, targets: [gate]}", "train.steps=1")


def test_files_hold_adapters(run_file: Path, tmp_path: Path) -> None:
    """The resolved run and the plan in the log directory read as what they were."""
    options = ("lora={rank: 3, targets: [out, up]}", "train.steps=1")
    run_alone(Case(run_file, tmp_path / "log", None, options))
    run = load_run(tmp_path / "log" / "config.yaml")
    assert run.model.lora == run.lora == LoraConfig(rank=3, alpha=3.0, targets=("out", "up"))
    assert load_plan(tmp_path / "log" / "plan.yaml").model == run.model
