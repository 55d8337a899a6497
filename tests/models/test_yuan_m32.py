"""Yuan 2.0-M32: golden data of the published class, import and export, and what experts promise."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import tiny_model
from tests.support.yuan_hf import read_published, same_bits
from yuan_train.checkpoint.hf import Imported, export_hf, import_hf
from yuan_train.checkpoint.load import Checkpoint, find_checkpoint, load_weights
from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import ModelConfig, find_parameter, load_model, validate_model
from yuan_train.models import experts as moe
from yuan_train.models.architectures.yuan import published_layout
from yuan_train.models.generate import Sampling, generate
from yuan_train.models.layers import SelectiveRecompute
from yuan_train.models.transformer import Transformer, init_weights, initial_rows, initial_weight

GOLDEN = Path(__file__).parents[1] / "golden" / "yuan_m32_hf_tiny_a"
M32 = Path(__file__).parents[2] / "configs/model/yuan2-m32.yaml"
FORMS = {
    "exact": "expected",
    "bf16_frequencies": "expected_rotary_training",
    "bf16": "expected_rotary_published",
}


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> tuple[Checkpoint, Imported]:
    out = tmp_path_factory.mktemp("m32")
    return find_checkpoint(str((done := import_hf(GOLDEN, out)).path)), done


def model_of(checkpoint: Checkpoint, form: str) -> Transformer:
    model = Transformer(replace(checkpoint.model, rotary_form=form))
    load_weights(checkpoint, model)
    return model


def record_choices(model: Transformer) -> list[torch.Tensor]:
    """A list that the next forward fills with the chosen experts [T, K] of each layer."""
    chosen: list[torch.Tensor] = []
    for block in model.blocks.values():
        block.router.register_forward_hook(lambda *call: chosen.append(call[2][0].chosen_TK))
    return chosen


# --- against the published class ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_logits_experts_and_gradients_equal_the_published_class(imported, form):
    expected = load_file(GOLDEN / f"{FORMS[form]}.safetensors")
    upstream = load_file(GOLDEN / "expected.safetensors")["gradient_of_logits"]
    checkpoint, _ = imported
    model = model_of(checkpoint, form)
    chosen = record_choices(model)
    logits = model.logits(model(expected["input_ids"]))
    torch.testing.assert_close(logits, expected["logits"], rtol=0, atol=1e-4)
    for layer, ours in enumerate(chosen):
        theirs = expected[f"experts.{layer}"].flatten(0, 1)
        assert torch.equal(ours.sort(dim=1).values, theirs.sort(dim=1).values), layer
    (logits * upstream).sum().backward()
    found = dict(model.named_parameters())
    for mapping in published_layout(checkpoint.model):
        gradient = found[mapping.name].grad
        assert gradient is not None
        for part, name in zip(gradient.chunk(len(mapping.parts)), mapping.parts, strict=True):
            wanted = expected[f"grad_norm.{name}"].item()
            assert part.norm().item() == pytest.approx(wanted, rel=1e-4, abs=1e-7), name
    with torch.no_grad():
        last = model.logits(model(expected["long_input_ids"])[:, -8:])
    torch.testing.assert_close(last, expected["long_logits_last"], rtol=0, atol=1e-4)


@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_with_and_without_the_cache(imported, form):
    expected = load_file(GOLDEN / f"{FORMS[form]}.safetensors")
    model = model_of(imported[0], form)
    prompt, wanted = expected["prompt"][0].tolist(), expected["greedy"].tolist()
    greedy = Sampling(temperature=0)
    assert list(generate(model, prompt, max_new_tokens=len(wanted), sampling=greedy)) == wanted
    ids = expected["prompt"]
    for token in wanted:
        with torch.no_grad():
            assert model.logits(model(ids)[:, -1]).argmax().item() == token
        ids = torch.cat((ids, torch.tensor([[token]])), dim=1)


def test_the_definitions_agree(imported, monkeypatch):
    monkeypatch.setenv("YUAN_KERNELS", "reference")
    test_logits_experts_and_gradients_equal_the_published_class(imported, "exact")


# --- import and export -------------------------------------------------------------------------------------


def test_an_export_of_the_import_has_the_same_bits(imported, tmp_path):
    checkpoint, done = imported
    export = Path(export_hf(checkpoint, tmp_path / "hf").path)
    assert same_bits(read_published(export), read_published(GOLDEN))
    assert done.parameters == 382_368 and any("40890" in note for note in done.notes)
    config = json.loads((export / "config.json").read_text())
    # The export names the base, so importing it asks nothing; and its model is the same.
    again = import_hf(export, tmp_path / "again")
    assert not any("40890" in note for note in again.notes) and config["rope_theta"] == 10000
    assert replace(find_checkpoint(again.path).model, name="") == replace(checkpoint.model, name="")


def with_config(folder: Path, config: dict) -> Path:
    """A folder with the golden weights and another config.json."""
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(GOLDEN / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norm_topk_prob": False}, "norm_topk_prob false"),
        ({"gated_linear_unit": False}, "gated_linear_unit false"),
        ({"moe_num_experts": 1}, "moe_num_experts 1; wanted 2 or more"),
        ({"moe_top_k": 1}, "moe_top_k 1; wanted 2 or more"),
        ({"moe_top_k": 9}, "9 of 8 experts"),
        ({"ffn_hidden_size": None}, "ffn_hidden_size None; wanted the width"),
        ({"ffn_hidden_size": 47}, "does not fit its config.json"),
    ],
)
def test_configs_that_are_refused(tmp_path, change, message):
    config = json.loads((GOLDEN / "config.json").read_text())
    config["moe_config"] |= change
    with pytest.raises(CheckpointError, match=message):
        import_hf(with_config(tmp_path / "hf", config), tmp_path / "out")


def test_the_base_and_the_form_may_be_given(tmp_path):
    done = import_hf(GOLDEN, tmp_path / "out", rope_base=40890, rotary_form="bf16_frequencies")
    checkpoint = find_checkpoint(done.path)
    assert (checkpoint.model.rope_base, checkpoint.model.rotary_form) == (40890, "bf16_frequencies")
    assert not any("40890" in note for note in done.notes)
    exported = Path(export_hf(checkpoint, tmp_path / "hf").path)
    config = json.loads((exported / "config.json").read_text())
    assert (config["rope_theta"], config["rotary_form"]) == (40890, "bf16_frequencies")
    with pytest.raises(CheckpointError, match="rope_base"):
        import_hf(GOLDEN, tmp_path / "no", rope_base=-1)


def test_the_width_is_not_intermediate_size(tmp_path):
    config = json.loads((GOLDEN / "config.json").read_text()) | {"intermediate_size": 200}
    done = import_hf(with_config(tmp_path / "hf", config), tmp_path / "out")
    model = find_checkpoint(done.path).model
    assert (model.ffn_hidden_size, model.expert_width) == (200, 48)


# --- sizes and fields --------------------------------------------------------------------------------------


def test_the_published_sizes():
    model = load_model(M32)
    assert model.parameters == 39_942_842_368
    assert model.active_parameters == 3_704_055_808
    # Of section 5: 319,160,320 FLOP a layer and 553,123,840 for the head, with causal scores at 4096.
    assert model.layer_forward_flops(4096) == 319_160_320
    with torch.device("meta"):
        whole = Transformer(model)
    assert sum(p.numel() for p in whole.parameters()) == model.parameters
    assert find_parameter(model, "layers.3.experts.up.weight").shape == (32, 16384, 2048)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_experts": 1}, "nothing to choose"),
        ({"experts_per_token": 1}, "1 of 5 experts; wanted 2 or more"),
        ({"experts_per_token": 6}, "6 of 5 experts"),
        ({"num_experts": 0}, "2, but num_experts is 0"),
        ({"rotary_dim": 7}, "7 must be even"),
        ({"rotary_dim": 26}, "at most head_dim 24"),
        ({"norm_topk_prob": False}, "router attention has no shares"),
        ({"router": "softmax", "norm_topk_prob": False, "experts_per_token": 0}, "wanted 1 or more, and at"),
        ({"num_experts": 0, "experts_per_token": 0, "norm_topk_prob": False}, "False, but num_experts is 0"),
    ],
)
def test_fields_that_do_not_fit(fields, message):
    assert any(message in problem.message for problem in validate_model(tiny_model("yuan-m32", **fields)))


def test_a_dense_model_has_no_router():
    assert tiny_model("yuan").router is None and tiny_model("yuan-m32").router == "attention"
    assert tiny_model("llama").router is None and tiny_model("mixtral").router == "softmax"
    assert not list(validate_model(tiny_model("yuan-m32", router="softmax")))


# --- what experts promise ----------------------------------------------------------------------------------


def layer_of(config: ModelConfig, dtype: torch.dtype) -> tuple[moe.Router, moe.Experts]:
    router = moe.Router(config, dtype=dtype)
    experts = moe.Experts(config, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in (*router.parameters(), *experts.parameters()):
        parameter.data = torch.randn(parameter.shape, generator=generator).to(dtype) / 8
    return router, experts


@pytest.mark.parametrize("router_kind", ["attention", "softmax", "shares"])
def test_a_layer_written_out(router_kind):
    """Token by token and expert by expert, in fp64."""
    kind = "attention" if router_kind == "attention" else "softmax"
    sums_to_one = router_kind != "shares"
    config = tiny_model("yuan-m32", router=kind, norm_topk_prob=sums_to_one, experts_per_token=3)
    router, experts = layer_of(config, torch.float64)
    u = torch.randn(7, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    choice, weights = router(u)
    found = experts(u, choice, weights)
    assert sum(choice.counts) == 21
    for t in range(7):
        scores = router.weight @ u[t]
        if router_kind == "attention":
            q, k, v = scores.view(3, 5)
            scores = torch.stack([((q[i] * k).softmax(0) * v).sum() for i in range(5)])
        best = sorted(range(5), key=lambda e, s=scores: (-s[e].item(), e))[:3]
        assert choice.chosen_TK[t].tolist() == best
        # Mixtral's rule is the same: softmax over all, the chosen ones divided by their sum.
        shares = scores.softmax(0)[best] / (scores.softmax(0)[best].sum() if sums_to_one else 1)
        outputs = []
        for e in best:
            z0, z1 = (experts.up.weight[e] @ u[t]).chunk(2)
            outputs.append(experts.down.weight[e] @ (torch.nn.functional.silu(z0) * z1))
        torch.testing.assert_close(found[t], sum(s * y for s, y in zip(shares, outputs, strict=True)))


def test_equal_scores_take_the_lower_number():
    router, _ = layer_of(tiny_model("yuan-m32"), torch.float32)
    with torch.no_grad():
        router.weight[:5] = router.weight[0]  # equal queries: equal scores of all experts
    choice, weights = router(torch.randn(6, 64, generator=torch.Generator().manual_seed(2)))
    assert choice.chosen_TK.tolist() == [[0, 1]] * 6 and choice.counts == (6, 6, 0, 0, 0)
    assert (weights == 0.5).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("owners", [(0, 3, 5), (0, 3, 5, 5), (0, 1, 2, 5)])
@pytest.mark.parametrize("alike", [False, True])
def test_ranges_of_experts_add_up_to_the_whole_bit_by_bit(dtype, owners, alike):
    """Each owner has a contiguous range, some of them empty; the sums are what a group reduces.

    Where all tokens are `alike`, they choose the same two experts, and the others have none.
    """
    router, experts = layer_of(tiny_model("yuan-m32"), dtype)
    generator = torch.Generator().manual_seed(3)
    u, dy = (torch.randn(40, 64, generator=generator).to(dtype) for _ in range(2))
    if alike:
        u = u[:1].repeat(40, 1)

    def run(first: int, last: int) -> tuple[torch.Tensor, ...]:
        """Output, gradients of u and of the weights, gradients of the matrices; under selective recompute."""
        part = layer_of(tiny_model("yuan-m32"), dtype)[1]
        part.first_expert = first
        for linear in (part.up, part.down):
            linear.weight = torch.nn.Parameter(linear.weight[first:last].detach())
        leaves = [u.clone().requires_grad_(), weights.detach().requires_grad_()]
        policy = SelectiveRecompute()
        with policy.saving():
            y = part(leaves[0], choice, leaves[1], policy)
        weights_of = [part.up.weight, part.down.weight]
        return y.detach(), *torch.autograd.grad(y, leaves + weights_of, dy)

    choice, weights = router(u)
    assert (sorted(choice.counts) == [0, 0, 0, 40, 40]) is alike
    whole, parts = run(0, 5), [run(a, b) for a, b in zip(owners, owners[1:], strict=False)]
    for index in range(3):
        assert torch.equal(sum(part[index] for part in parts[1:]) + parts[0][index], whole[index])
    for index in (3, 4):
        assert torch.equal(torch.cat([part[index] for part in parts]), whole[index])


def test_a_token_depends_on_itself_alone():
    """All tokens to one expert, none to another: no capacity, no dropping."""
    router, experts = layer_of(tiny_model("yuan-m32"), torch.float64)
    u = torch.randn(30, 64, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    together = experts(u, *router(u))
    alone = torch.cat([experts(row, *router(row)) for row in u.split(1)])
    torch.testing.assert_close(together, alone, rtol=1e-12, atol=1e-12)
    same = u[:1].expand(30, -1)
    choice, weights = router(same)
    assert sorted(choice.counts) == [0, 0, 0, 30, 30]
    torch.testing.assert_close(experts(same, choice, weights), together[:1].expand(30, -1))


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_nothing_is_decided_twice(recompute, monkeypatch):
    """Recomputed, a layer keeps its choice, and its gradients keep their bits."""
    decisions = []
    scores = moe.ops.attention_scores
    monkeypatch.setattr(moe.ops, "attention_scores", lambda x: decisions.append(1) or scores(x))
    gradients = []
    for kind in ("none", recompute):
        model = Transformer(tiny_model("yuan-m32", init_std=0.2), recompute=kind, dtype=torch.bfloat16)
        init_weights(model, seed=1)
        tokens = torch.randint(0, 256, (2, 16), generator=torch.Generator().manual_seed(5))
        model.loss(model(tokens), tokens.roll(-1, 1)).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert len(decisions) == 2 * 4
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_an_owner_draws_its_experts_only(monkeypatch):
    config, name = tiny_model("yuan-m32"), "layers.1.experts.down.weight"
    shape = find_parameter(config, name).shape
    whole = initial_weight(config, name, shape, seed=5)
    assert not torch.equal(whole[0], whole[1])
    drawn = []
    normal = torch.Tensor.normal_
    monkeypatch.setattr(
        torch.Tensor, "normal_", lambda x, *a, **k: drawn.append(x.shape) or normal(x, *a, **k)
    )
    rows = dict(initial_rows(config, name, shape, seed=5, wanted=lambda first, last: 1 <= first < 3))
    assert list(rows) == [1, 2] and len(drawn) == 2
    assert all(torch.equal(rows[e][0], whole[e]) for e in rows)
