"""The forms of ops are chosen at build, and are the same where ranks must round alike."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from yuan_kernels import attention, dispatch, ops, self_test

from tests.parallel.test_grid import run_of
from tests.support.project import make_project, parse_plan, run_config
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.errors import ConfigError
from yuan_train.config.model import load_model
from yuan_train.models.attention import find_resets
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel.device import CPU
from yuan_train.parallel.grid import Grid
from yuan_train.train.agreement import RankForms, alike_groups, settle_forms, unlike
from yuan_train.train.build import build
from yuan_train.train.engine import StepRequest
from yuan_train.train.job import Position, prepare


@pytest.fixture(autouse=True)
def fresh_choices():
    dispatch.choose.cache_clear()
    yield
    dispatch.choose.cache_clear()
    dispatch.forget_fallbacks()


# --- a choice inside of a forward --------------------------------------------------------------------------


@pytest.fixture
def varlen_on_a_cpu(monkeypatch):
    """Documents as on a card of compute capability 8.0, with the loop in place of the CUDA call."""
    monkeypatch.setattr(attention, "attend_in_one_call", attention.attend_in_turn)
    tested = lambda *_: dispatch._fault(lambda: self_test.varlen_is_correct(CPU.torch, torch.float32))  # noqa: E731
    monkeypatch.setattr(dispatch, "varlen_fault", tested)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_choice_in_a_recomputed_forward(recompute: str, varlen_on_a_cpu) -> None:
    """The test of the first choice has a backward of its own, of which a checkpoint's hooks hear nothing."""
    config = replace(load_model("configs/model/tiny.yaml"), num_layers=3)
    model = Transformer(config, recompute=recompute)
    init_weights(model, seed=1)
    tokens = torch.randint(5, 100, (1, 64), generator=torch.Generator().manual_seed(0))
    tokens[0, 20] = 0
    resets = find_resets(tokens, eod_id=0, reset_attention=True).arguments()
    gradients = []
    for _ in ("first forward of the process", "second"):
        model.zero_grad()
        model.loss(model(tokens, **resets), tokens).backward()
        gradients.append([p.grad for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
    assert (
        dispatch.choose("document_attention", CPU.torch, torch.float32, "regular").implementation == "varlen"
    )


# --- all choices at build ----------------------------------------------------------------------------------

EXPERTS = {"num_experts": 4, "experts_per_token": 2, "expert_ffn_hidden_size": 16}
QWEN = {"architecture": "qwen", "num_key_value_heads": 2, "query_key_norm": True, "attention": "plain"}


@pytest.mark.parametrize("model", [{}, EXPERTS, QWEN], ids=["yuan", "experts", "qwen"])
def test_a_step_chooses_nothing(model: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_file = make_project(tmp_path, model=model)
    monkeypatch.chdir(tmp_path)
    resets = "data.reset_attention=true", "data.reset_filter=" + str(not model).lower()
    run = run_config(run_file, "train.steps=1", "train.precision=bf16", *resets)
    job = prepare(run, None, Position())
    trainer, _ = build(job)
    chosen = dispatch.choose.cache_info().misses
    assert chosen
    assert job.train is not None
    with trainer.reading():
        trainer.step(StepRequest(job.train, first_sample=0, lr=1e-3, clip=1.0))
    assert dispatch.choose.cache_info().misses == chosen


# --- the same in each group --------------------------------------------------------------------------------


def choice(op: str, implementation: str, reason: str = "tested") -> ops.Choice:
    return ops.Choice(op, "cuda:0", torch.bfloat16, "regular", implementation, reason)


def test_who_must_round_alike() -> None:
    plan = parse_plan(run_of(6, 8), "1x4: 3@0,1 | 3@2 / 1x4: 3@3 | 3@4,5")
    grid = Grid(replace(plan, model=replace(plan.model, tie_embeddings=False)))
    # Owners of the first layers are 0, 1 and 3, of the last ones 2 and 4, 5.
    assert alike_groups(grid, ["A100"] * 6) == [(0, 1, 3), (2, 4, 5)]
    unlike_cards = ["A100", "A100", "A100", "V100", "V100", "V100"]
    assert alike_groups(grid, unlike_cards) == [(0, 1), (2,), (3,), (4, 5)]


def test_the_odd_rank_of_a_group() -> None:
    tested = (choice("rms_norm", "triton"), choice("document_attention", "varlen"))
    failed = (choice("rms_norm", "torch", "no ptxas"), choice("document_attention", "varlen"))
    told = [RankForms("A100", tested), RankForms("A100", failed), RankForms("A100", tested)]
    assert list(unlike((0, 1, 2), told)) == [(0, 1)]
    assert list(unlike((0, 2), told)) == []
    defined = tuple(choice(c.op, "reference") for c in tested)
    told[2] = RankForms("A100", defined)
    with pytest.raises(ConfigError, match="YUAN_KERNELS=reference is set on rank 2 and not on rank 0"):
        list(unlike((0, 1, 2), told))
    assert list(unlike((2,), told)) == []


def test_one_rank_whose_kernels_fail(tmp_path: Path) -> None:
    """Both ranks of a tensor-parallel group then use what every card has."""
    spawn(_settle, 2, free_port(), tmp_path)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["torch", "torch"]
    reasons = (tmp_path / "reason").read_text()
    assert reasons == "as on rank 1, which has torch: its results differ"


def _settle(rank: int, port: int, folder: Path) -> None:
    as_rank(rank, 2, port)
    dist.init_process_group("gloo")
    if rank == 1:
        choose = dispatch.choose
        dispatch.choose = lambda *of: replace(
            choose(*of), implementation="torch", reason="its results differ"
        )
    grid = Grid(parse_plan(run_of(6, 8), "1x8: 6@0,1"))
    settle_forms(grid, rank, device=CPU, dtype=torch.float32)
    found = dispatch.find("rms_norm", CPU.torch, torch.float32, "regular")
    (folder / str(rank)).write_text(found.implementation)
    if rank == 0:
        (folder / "reason").write_text(found.reason)
    dist.destroy_process_group()


@pytest.mark.parametrize(("dtype", "narrow"), [(torch.float16, False), (torch.bfloat16, True)])
def test_sums_of_fp16_products_are_wide(
    dtype: torch.dtype, narrow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    matmul = torch.backends.cuda.matmul
    monkeypatch.setattr(matmul, "allow_fp16_reduced_precision_reduction", True)
    monkeypatch.setattr(matmul, "allow_bf16_reduced_precision_reduction", True)
    settle_forms(Grid(parse_plan(run_of(6, 8), "1x8: 6@0")), 0, device=CPU, dtype=dtype)
    assert matmul.allow_fp16_reduced_precision_reduction is narrow
    assert matmul.allow_bf16_reduced_precision_reduction
