"""The collectives that a sharded layer really makes, against those that the planner prices."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from yuan_kernels import ops

from tests.support.models import VARIANTS, tiny_model
from tests.support.spawn import as_rank, free_port, spawn
from yuan_train.config.devices import CATALOGUE
from yuan_train.config.model import ModelConfig, sharding_of
from yuan_train.models.layers import SAVE_ALL
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.parallel import tensor
from yuan_train.parallel.gradients import DeferredGrads, add_weight_grads
from yuan_train.parallel.shard import sharding_style
from yuan_train.parallel.tensor import ShardSpec, apply_tensor_parallel
from yuan_train.planner.costs.unit_costs import UnitCost, card_costs
from yuan_train.planner.costs.workload import TensorGroup, TokenRows


def layer_cost(model: ModelConfig, recompute: Any, group: TensorGroup = TensorGroup()) -> UnitCost:  # noqa: B008
    costs = card_costs(
        model,
        TokenRows(1, 8, "fp32"),
        recompute=recompute,
        type_name="A100-80G",
        device=CATALOGUE["A100-80G"],
        profile=None,
        group=group,
    )
    return costs.units[1]


class Reduced:
    """Counts all-reduces instead of making them."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, part: torch.Tensor, *_: Any) -> torch.Tensor:
        self.count += 1
        return part.clone()

    def take(self) -> int:
        count, self.count = self.count, 0
        return count


SHARED = [
    variant
    for variant in VARIANTS
    if all(n % 2 == 0 for n in tiny_model(variant).spec.tensor_sizes(tiny_model(variant)).values())
]
"""Models that a group of two can share: those without experts."""


def two_layers(model: ModelConfig, recompute: Any = "none") -> Transformer:
    part = Transformer(model, layers=(0, 2), embedding=False, head=False, recompute=recompute)
    init_weights(part, seed=0)
    return part


@pytest.mark.parametrize("variant", SHARED)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_makes_the_all_reduces_that_the_planner_prices(
    variant: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Reduced()
    monkeypatch.setattr(tensor, "_all_reduce", counter)
    model = tiny_model(variant)
    part, alone = two_layers(model, recompute), two_layers(model)
    apply_tensor_parallel(part, ShardSpec(*sharding_of(model)), group=None)  # pyright: ignore[reportArgumentType]
    layer = layer_cost(model, recompute)
    inputs = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0))
    for _ in range(2):
        hidden = inputs.clone().requires_grad_()
        output = part(hidden)
        assert counter.take() == 2 * layer.forward_collectives
        output.square().sum().backward()
        assert counter.take() == 2 * layer.backward_collectives
        # A group of one rank: the gradient is that of the model alone.
        hidden_alone = inputs.clone().requires_grad_()
        alone(hidden_alone).square().sum().backward()
        assert hidden.grad is not None and hidden_alone.grad is not None
        torch.testing.assert_close(hidden.grad, hidden_alone.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("variant", SHARED)
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_a_layer_of_divided_tokens_makes_the_collectives_that_the_planner_prices(
    variant: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Counter[str]()

    def copy(name: str) -> Any:
        def run(into: torch.Tensor, source: torch.Tensor, **_: Any) -> None:
            counts[name] += 1
            into.copy_(source)

        return run

    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0])
    monkeypatch.setattr(tensor, "_ALL_GATHER", copy("gather"))
    monkeypatch.setattr(tensor, "_REDUCE_SCATTER", copy("scatter"))
    model = tiny_model(variant)
    part, alone = two_layers(model, recompute), two_layers(model)
    spec = ShardSpec(*sharding_of(model), splits_tokens=True)
    apply_tensor_parallel(part, spec, group=None)  # pyright: ignore[reportArgumentType]
    layer = layer_cost(model, recompute, TensorGroup(2, divides_tokens=True))
    hidden, hidden_alone = (torch.ones(1, 8, 64).cumsum(-1).requires_grad_() for _ in range(2))
    output = part(hidden)
    # One more gathers what the part gives, and in the backward the gradient of what it was given.
    assert counts == {"scatter": 2 * layer.forward_collectives, "gather": 2 * layer.forward_collectives + 1}
    counts.clear()
    output.square().sum().backward()
    gathered = layer.backward_collectives + layer.gathered_again
    assert counts == {"scatter": 2 * layer.backward_collectives, "gather": 2 * gathered + 1}
    alone(hidden_alone).square().sum().backward()
    assert hidden.grad is not None and hidden_alone.grad is not None
    torch.testing.assert_close(hidden.grad, hidden_alone.grad, rtol=1e-5, atol=1e-5)


def _divide_odd_tokens(rank: int, port: int) -> None:
    as_rank(rank, 3, port)
    dist.init_process_group("gloo")
    group = cast(dist.ProcessGroup, dist.group.WORLD)
    layout = tensor._SplitLayout(group, None, index=rank, count=3)  # pyright: ignore[reportPrivateUsage]
    x_BSH = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    own = layout.split(x_BSH)
    assert own.shape == (4, 4) and layout.tokens(own, 5) == (4 * rank, 5)
    u_BSH = layout.gather(own, 5, SAVE_ALL)
    assert torch.equal(u_BSH, x_BSH)
    summed = layout.reduce((1 + rank) * u_BSH, own)
    whole = layout.join(summed, x_BSH.shape)
    assert torch.allclose(whole, 6 * x_BSH)
    (whole * x_BSH.detach()).sum().backward()
    assert x_BSH.grad is not None and torch.allclose(x_BSH.grad, 6 * x_BSH)
    dist.destroy_process_group()


def test_tokens_that_do_not_divide_are_padded() -> None:
    """Ten of them on three ranks."""
    spawn(_divide_odd_tokens, 3, free_port())


class Reductions:
    """Says when an all-reduce starts and is waited for; adds nothing."""

    def __init__(self) -> None:
        self.seen = ""

    def all_reduce(self, total: torch.Tensor, *, group: Any, async_op: bool = False) -> Reductions | None:
        self.seen += "s"
        return self if async_op else None

    def wait(self) -> None:
        self.seen += "w"


@pytest.mark.parametrize("variant", ["yuan", "llama", "qwen2"])
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_products_of_columns_run_beside_the_all_reduce_of_their_input(
    variant: str, recompute: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its start and the wait, to the same bits as before its start, where the control has them."""
    model = tiny_model(variant)
    sharding, blocks = sharding_of(model)
    reductions = Reductions()
    monkeypatch.setattr(dist, "all_reduce", reductions.all_reduce)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    add = ops.add_product_

    def add_product_(total: torch.Tensor, *factors: torch.Tensor) -> None:
        reductions.seen += "p"
        add(total, *factors)

    monkeypatch.setattr(ops, "add_product_", add_product_)

    def gradients(overlaps: bool) -> tuple[str, dict[str, torch.Tensor]]:
        deferred = DeferredGrads(reduces_inputs=overlaps)
        part = Transformer(model, embedding=False, head=False, recompute=recompute)
        init_weights(part, seed=0)
        meanwhile = deferred.run_queued if overlaps else None
        apply_tensor_parallel(part, ShardSpec(sharding, blocks), None, meanwhile=meanwhile)  # pyright: ignore
        names = add_weight_grads(part, deferred, sharding)
        arrived: list[str] = []
        parameters = {name: p for name, p in part.named_parameters() if name in names}
        for name, parameter in parameters.items():
            parameter.main_gradient = torch.zeros_like(parameter)  # pyright: ignore
            parameter.on_main_gradient = partial(arrived.append, name)  # pyright: ignore
        generator = torch.Generator().manual_seed(2)
        hidden_BSH = torch.randn(1, 16, model.hidden_size, generator=generator).requires_grad_()
        output = part(hidden_BSH)
        reductions.seen = ""
        with deferred.splitting(0, False):
            output.backward(torch.randn(output.shape, generator=generator))
        assert not overlaps or sorted(arrived) == sorted(names)
        found = {name: p.main_gradient for name, p in parameters.items()}  # pyright: ignore
        return reductions.seen, found | {"input": hidden_BSH.grad}  # pyright: ignore

    plain, wanted = gradients(overlaps=False)
    beside, found = gradients(overlaps=True)
    for name, gradient in found.items():
        assert torch.equal(wanted[name], gradient) and bool(gradient.any()), name
    # Of each layer the products of query, key and value, and of the two that begin the feed-forward.
    with torch.device("meta"):
        paths = [path for path, _ in Transformer(model).named_modules()]
    columns = sum(sharding_style(path, sharding) == "column" for path in paths)
    assert sum(map(len, re.findall("s(p+)w", beside))) == columns > 0
    assert "w" not in plain and plain.count("p") == beside.count("p")


def test_what_is_reduced_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row module's output, and the gradient of a column module's input, are nobody else's."""
    reduced: list[int] = []
    monkeypatch.setattr(dist, "all_reduce", lambda total, **_: reduced.append(total.data_ptr()))
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1])
    x_BSH = torch.randn(1, 8, 16, requires_grad=True)
    products: list[torch.Tensor] = []

    def column(copied: torch.Tensor) -> torch.Tensor:
        copied.register_hook(products.append)
        return copied * 2

    partial_BSH = column(tensor.copy_to_tp(x_BSH, None))  # pyright: ignore[reportArgumentType]
    products.append(partial_BSH)
    tensor.reduce_from_tp(partial_BSH, None).square().sum().backward()  # pyright: ignore[reportArgumentType]
    assert reduced == [product.data_ptr() for product in products]
    assert len(reduced) == 2
