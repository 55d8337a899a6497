"""The load of the experts is evened alike under every plan, and a bias goes with the checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.models import tiny_model
from tests.support.project import difference, make_project, parse_plan, read_metrics, run_config
from tests.support.ranks import Case, run_alone, run_cases
from yuan_train.checkpoint.hf import export_hf
from yuan_train.checkpoint.load import check_same_model, find_checkpoint, load_weights
from yuan_train.config.errors import CheckpointError
from yuan_train.config.model import validate_model
from yuan_train.models.experts import Router
from yuan_train.models.transformer import Transformer

MODEL = {"architecture": "llama", "num_layers": 2, "num_experts": 8, "experts_per_token": 2, "init_std": 0.3}
LR = ("optimizer.learning_rate=0.01", "train.micro_batch_size=4")
PLANS = {"bias": "1x4: 2@0,1 / 2x2: 2@2", "sequence": "1x4: 1@0 | 1@1 / 2x2: 2@2"}
BALANCES = {"bias": 0.02, "sequence": 0.9}


def unevenness(lines: list[dict[str, Any]]) -> float:
    """The variance of the experts' loads over the mean load, of all layers and steps."""
    loads = torch.tensor([line["expert_tokens"] for line in lines], dtype=torch.float64)
    return float((loads / loads.mean(dim=-1, keepdim=True)).var(dim=-1).mean())


def test_every_plan_balances_alike(tmp_path: Path) -> None:
    run_file = make_project(tmp_path, model=MODEL)
    keys = ("train.precision=fp64", "validation.every=0", "log.every=1", "optimizer.decay_steps=8", *LR)

    def case(name: str, steps: int, balance: str = "", folder: str = "", plan: str = "") -> Case:
        found = [*keys, f"train.steps={steps}"]
        if balance:
            found += [f"model.balance={balance}", f"model.balance_rate={BALANCES[balance]}"]
        if folder:
            found += [f"checkpoint.directory={tmp_path / folder}"]
        case = Case(run_file, tmp_path / name, None, tuple(found))
        return replace(case, plan=parse_plan(run_config(run_file, *found), plan)) if plan else case

    cut = {kind: case(f"cut {kind}", 3, kind, f"ck {kind}", PLANS[kind]) for kind in BALANCES}
    run_cases(list(cut.values()))
    free = run_alone(case("free", 6))
    for kind in BALANCES:
        alone = run_alone(case(f"alone {kind}", 6, kind))
        # Another number of pipelines, and of sequences in a micro-batch; then on from the checkpoint.
        rest = run_alone(case(f"rest {kind}", 6, kind, f"ck {kind}"))
        lines = read_metrics(cut[kind].folder) + rest
        assert [line["expert_tokens"] for line in lines] == [line["expert_tokens"] for line in alone]
        assert difference(lines, alone) < 1e-10
        assert alone[0]["loss"] == free[0]["loss"] and alone[-1]["loss"] != free[-1]["loss"]
        assert unevenness(alone[3:]) < 0.75 * unevenness(free[3:]), kind
    check_stored_bias(tmp_path / "ck bias", tmp_path)


def check_stored_bias(checkpoints: Path, folder: Path) -> None:
    """The bias is there for whoever reads the weights; formats without a place for it are refused."""
    checkpoint = find_checkpoint(checkpoints)
    model = Transformer(checkpoint.model, dtype=torch.float64)
    load_weights(checkpoint, model)
    for block in model.blocks.values():
        assert block.router.bias is not None
        moved = (block.router.bias / BALANCES["bias"]).round().abs()
        assert 0 < moved.max() <= 8 and torch.allclose(block.router.bias.abs(), moved * BALANCES["bias"])
    with pytest.raises(CheckpointError, match="balance bias"):
        export_hf(checkpoint, folder / "hf")
    with pytest.raises(CheckpointError, match="balance 'bias' there, None here"):
        check_same_model(checkpoint, replace(checkpoint.model, balance=None, balance_rate=0.0))


def test_a_bias_changes_the_choice_alone() -> None:
    config = tiny_model("mixtral", balance="bias", balance_rate=0.1)
    router = Router(config, dtype=torch.float64)
    torch.nn.init.normal_(router.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    assert router.bias is not None
    router.bias[3] = 5.0
    u = torch.randn(9, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    choice, weights = router(u)
    assert (choice.chosen_TK[:, 0] == 3).all()
    torch.testing.assert_close(weights, (u @ router.weight.T).gather(1, choice.chosen_TK).softmax(1))


@pytest.mark.parametrize("sums_to_one", [True, False])
def test_the_loss_of_a_sequence(sums_to_one: bool) -> None:
    """The gradient of the formula written out, for three sequences of a micro-batch or one by one."""
    config = tiny_model("mixtral", balance="sequence", balance_rate=0.1, norm_topk_prob=sums_to_one)
    router = Router(config, dtype=torch.float64)
    torch.nn.init.normal_(router.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    u_BSH = torch.randn(3, 7, 64, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def gradient(parts: list[torch.Tensor], scale: float) -> torch.Tensor:
        router.weight.grad, router.loss_scale = None, scale
        for part in parts:
            router(part.flatten(0, 1), num_sequences=len(part))[1].square().sum().backward()
        assert router.weight.grad is not None
        return router.weight.grad

    plain = gradient([u_BSH], 0.0)
    wanted = torch.zeros_like(plain)
    for u_SH in u_BSH:
        weight = router.weight.detach().requires_grad_()
        shares_SN = (u_SH @ weight.T).softmax(-1)
        chosen = shares_SN.topk(2).indices.flatten()
        f_N = chosen.bincount(minlength=4) * 4 / (2 * 7)
        (0.1 * (f_N * shares_SN.mean(0)).sum() * 0.25).backward()
        assert weight.grad is not None
        wanted += weight.grad
    torch.testing.assert_close(gradient([u_BSH], 0.25) - plain, wanted)
    torch.testing.assert_close(gradient(list(u_BSH.split(1)), 0.25) - plain, wanted)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"balance": "bias"}, "0 with balance bias"),
        ({"balance_rate": 0.1}, "0.1 with balance None"),
        ({"balance": "sequence", "balance_rate": 0.1, "router": "attention"}, "sequence is a loss of"),
        ({"num_experts": 0, "experts_per_token": 0, "balance": "bias"}, "'bias', but num_experts is 0"),
    ],
)
def test_fields_that_do_not_fit(fields: dict[str, Any], message: str) -> None:
    assert any(message in problem.message for problem in validate_model(tiny_model("mixtral", **fields)))
