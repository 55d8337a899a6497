"""The learning-rate schedule, and AdamW on flat buckets against torch's on the parameters themselves."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from tests.support.models import tiny_model
from yuan_train.config.run import OptimizerConfig
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel.gradients import FlatBucket
from yuan_train.parallel.grid import Bucket
from yuan_train.parallel.groups import Groups
from yuan_train.parallel.shard import Shard
from yuan_train.parallel.zero import OwnedState
from yuan_train.train.run import learning_rate
from yuan_train.train.step import Optimizer


def config(**changes) -> OptimizerConfig:
    values = {"learning_rate": 1.0, "minimum_learning_rate": 0.1, "warmup_steps": 4} | changes
    return OptimizerConfig(**values)


def test_cosine_warms_up_decays_to_the_minimum_and_stays() -> None:
    curve = [learning_rate(step, config(), decay_steps=10) for step in range(12)]
    assert curve[:4] == [0.25, 0.5, 0.75, 1.0]
    assert curve[6] == pytest.approx(0.55)  # half way from step 4 to step 10
    assert curve[9:] == pytest.approx([0.1, 0.1, 0.1])
    assert all(a >= b for a, b in zip(curve[3:], curve[4:], strict=False))


def test_linear_and_constant_schedules() -> None:
    linear = [learning_rate(s, config(schedule="linear", warmup_steps=0), decay_steps=3) for s in range(3)]
    assert linear == pytest.approx([0.7, 0.4, 0.1])
    assert learning_rate(50, config(schedule="constant"), decay_steps=10) == 1.0


STATES = {"replicated": partial(OwnedState, shares=None), "sharded": partial(OwnedState, shares=(1.0,))}


def flat_bucket(model: torch.nn.Module) -> FlatBucket:
    parameters = dict(model.named_parameters())
    shards = {name: Shard(tuple(parameter.shape)) for name, parameter in parameters.items()}
    return FlatBucket(Bucket(("unit",), ((0,),)), parameters, shards, rank=0)


def module() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.LayerNorm(3))


@pytest.mark.parametrize("kind", STATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_flat_buckets_match_plain_adamw(dtype: torch.dtype, kind: str) -> None:
    flat, plain = module().to(dtype), module().to(dtype)
    bucket = flat_bucket(flat)
    state = STATES[kind](bucket, Groups({}, {}))
    optimizer = Optimizer([state], config(weight_decay=0.1))
    groups = [
        {"params": [p for p in plain.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in plain.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    inputs = torch.randn(4, 5, dtype=dtype)
    for step in range(5):
        for group in reference.param_groups:
            group["lr"] = 0.1 * (step + 1)
        bucket.gradient.zero_()
        reference.zero_grad()
        for model in (flat, plain):
            model(inputs).square().sum().backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        state.start_grad_reduce()
        ours = float(state.finish_grad_reduce().sqrt())
        assert ours == pytest.approx(float(norm), rel=1e-4)
        optimizer.step(0.1 * (step + 1))
        reference.step()
        for ours, theirs in zip(flat.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs)


def test_a_wait_for_stepped_weights_is_no_compute() -> None:
    state = OwnedState(flat_bucket(module()), Groups({}, {}), None)
    seen: list[str] = []

    class OnItsWay:
        def wait(self) -> None:
            seen.append("wait")

    @contextmanager
    def pause() -> Iterator[None]:
        seen.append("pause")
        yield
        seen.append("go on")

    state.pause = pause
    state.finish_weight_sync()
    assert not seen, "nothing is on its way"
    state._syncing.append(OnItsWay())  # pyright: ignore
    state.finish_weight_sync()
    state.finish_weight_sync()
    assert seen == ["pause", "wait", "go on"]


def test_small_steps_are_not_lost_in_bf16() -> None:
    model = module().to(torch.bfloat16)
    bucket = flat_bucket(model)
    state = OwnedState(bucket, Groups({}, {}), None)
    optimizer = Optimizer([state], config(weight_decay=0.0))
    before = state.shards[0].master.clone()
    weight = model[0].weight.detach().clone()  # pyright: ignore
    for _ in range(40):
        bucket.gradient.fill_(1.0)
        optimizer.step(1e-4)
    # 40 steps of 1e-4 add up in the master; each is less than half a bf16 ulp of most weights.
    torch.testing.assert_close(state.shards[0].master, before - 40e-4, rtol=0, atol=1e-5)
    assert not torch.equal(model[0].weight, weight)  # pyright: ignore
    assert model[0].weight.dtype == torch.bfloat16  # pyright: ignore


def test_gradients_of_micro_batches_add_up_in_fp32_under_bf16() -> None:
    model = module().to(torch.bfloat16)
    bucket = flat_bucket(model)
    for _ in range(1000):
        (model[0].bias.sum() * 1.0).backward()  # pyright: ignore
    # In bf16 the sum would not grow beyond 256.
    assert bucket.view(bucket.gradient, "0.bias").tolist() == [1000.0] * 3


def test_the_heads_weight_gradient_is_accumulated_in_the_forward_and_not_rounded() -> None:
    """Autograd would round it to bf16. Without a `gradient_scale` there is none in the forward."""
    size = tiny_model(
        "yuan", hidden_size=16, num_attention_heads=2, num_layers=1, vocab_size=40, tie_embeddings=False
    )
    hidden = torch.randn(1, 12, 16, generator=torch.Generator().manual_seed(0))
    targets = torch.arange(12).unsqueeze(0)
    found = {}
    for dtype, gradient_scale in ((torch.float64, 0.5), (torch.bfloat16, 0.5), (torch.bfloat16, None)):
        model = Transformer(size, layers=(1, 1), embedding=False, head=True, dtype=dtype)
        init_weights(model, seed=0)
        if dtype == torch.float64:
            # The same weights as in bf16.
            model.load_state_dict({n: t.bfloat16().double() for n, t in model.state_dict().items()})
        bucket = flat_bucket(model)
        gradient = bucket.view(
            bucket.gradient, next(n for n, _ in model.named_parameters() if "norm" not in n)
        )
        x = hidden.bfloat16().to(dtype).requires_grad_()
        with torch.no_grad():
            model.loss(x, targets, gradient_scale=gradient_scale)
        assert gradient.count_nonzero() == 0
        loss = model.loss(x, targets, gradient_scale=gradient_scale)
        assert (gradient.count_nonzero() > 0) == (gradient_scale is not None)
        after_forward = gradient.clone()
        (loss * 0.5).backward()
        assert torch.equal(gradient, after_forward) == (gradient_scale is not None)
        found[dtype, gradient_scale] = gradient.double()
    truth, ours, rounded = found.values()
    assert (ours - truth).norm() < 0.9 * (rounded - truth).norm() < 1e-2 * truth.norm()


def test_a_bucket_of_vectors_only_and_no_bucket_at_all() -> None:
    norm = torch.nn.LayerNorm(3)
    bucket = flat_bucket(norm)
    optimizer = Optimizer([OwnedState(bucket, Groups({}, {}), None)], config())
    bucket.gradient.fill_(1.0)
    optimizer.step(0.1)
    assert float(norm.weight[0].detach()) == pytest.approx(0.9)
    Optimizer([], config()).step(0.1)
