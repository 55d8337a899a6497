"""The ablation: the paper's parameter counts, causality of every form, and a run from end to end."""

from pathlib import Path

import pytest
import torch

from tests.support.models import tiny_model
from tools.bench import ablation as tool
from tools.bench.harness import combinations, measure_here


def test_counts_equal_the_papers() -> None:
    counts = {form: tool.count_parameters(form, tool.PAPER_SHAPE) for form in tool.PAPER}
    assert counts == {form: row[0] for form, row in tool.PAPER.items()}


SHAPE = tiny_model("yuan-plain", num_layers=2, hidden_size=16, num_attention_heads=2, vocab_size=50)


@pytest.mark.parametrize("form", ["basic", "ema", "conv1", "conv2", "conv3", "conv7", "two", "lfa"])
def test_no_form_sees_later_tokens(form: str) -> None:
    model = tool.build(form, SHAPE, seed=1)
    tokens = torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[:, 12:] = 7
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    torch.testing.assert_close(before[:, :12], after[:, :12], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[:, 12:], after[:, 12:])


def test_the_moving_average_is_the_recurrence() -> None:
    torch.manual_seed(0)
    average = tool.MovingAverage(3)
    u = torch.randn(1, 9, 3)
    state = torch.zeros(3, tool.EMA_DIMS)
    alpha, delta = average.alpha.sigmoid(), average.delta.sigmoid()
    expected = []
    for t in range(9):
        state = alpha * average.beta * u[0, t, :, None] + (1 - alpha * delta) * state
        summed = (average.eta * state).sum(1) / tool.EMA_DIMS**0.5
        expected.append(torch.nn.functional.silu(summed + average.omega * u[0, t]))
    torch.testing.assert_close(average(u)[0], torch.stack(expected), rtol=1e-4, atol=1e-5)


def test_shared_weights_are_equal() -> None:
    models = [dict(tool.build(form, SHAPE, seed=3).named_parameters()) for form in ("basic", "conv2", "lfa")]
    for name, weight in models[0].items():
        assert all(torch.equal(weight, model[name]) for model in models)


def test_from_end_to_end(run_file: Path) -> None:
    words = [
        *(f"data={run_file.parent / 'corpus'}", "forms=[[basic, lfa]]", "seeds=[[1, 2]]", "steps=3"),
        *("layers=1", "hidden=32", "vocabulary=512", "tokens=16", "batch=2"),
    ]
    (given,) = combinations("training/ablation", words)
    rows = measure_here("training/ablation", given)
    assert [row["form"] for row in rows] == ["basic", "lfa"]
    assert rows[0]["to basic"] == "+0.00%" and rows[1]["paper's parameters"] == 167_433_216
    assert all(5 < row["test loss"] < 7 for row in rows)
