"""The Yuan 2.0 paper's Table 1, at a size for a CPU: eight forms of attention on the same batches.

basic      queries and keys from the norm's output u (as in LLaMA)
ema        from a multi-dimensional damped moving average of u, 16 dims (MEGA, Ma et al. 2022)
conv1..7   from u + one causal convolution of k taps, H to H
two        from u + two convolutions of two taps, H to H/2 to H
lfa        as `two`, with a norm over the sum: Yuan 2.0's form
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.bench.harness import Row, case
from tools.bench.runs import bench_model
from yuan_train.config.model import ModelConfig
from yuan_train.config.run import OptimizerConfig
from yuan_train.data.loader import Blend, SampleSpec, open_corpora
from yuan_train.models.transformer import Transformer, init_weights
from yuan_train.train.run import learning_rate

EMA_DIMS = 16
PAPER = {
    # form: (parameters, ms per iteration, test loss), the paper's Table 1; parameters are exact for its shape
    "basic": (160_343_808, 577, 1.2510),
    "ema": (160_643_328, 745, 1.2309),
    "conv1": (163_887_360, 596, 1.2444),
    "conv2": (167_426_304, 602, 1.2194),
    "conv3": (170_965_248, 605, 1.2171),
    "conv7": (185_121_024, 621, 1.2093),
    "two": (167_428_608, 618, 1.2122),
    "lfa": (167_433_216, 631, 1.2069),
}
PAPER_SHAPE = bench_model(6, 768, vocab_size=135_040, attention="plain")


# --- the forms -------------------------------------------------------------------------------------------


class OneConvolution(nn.Module):
    """f = u + convolution of `taps` causal taps, dense over the channels, with bias."""

    def __init__(self, hidden: int, taps: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(hidden, hidden, taps)

    def forward(self, u_BSH: Tensor, document_start: Tensor | None = None, *_: object) -> Tensor:
        padded = F.pad(u_BSH.transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        return u_BSH + self.conv(padded).transpose(1, 2)


class TwoConvolutions(nn.Module):
    """f = u + conv2(conv1(u)), two taps each, H to H/2 to H; inputs before the first token are zero."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(hidden, hidden // 2, 2)
        self.conv2 = nn.Conv1d(hidden // 2, hidden, 2)

    def forward(self, u_BSH: Tensor, document_start: Tensor | None = None, *_: object) -> Tensor:
        c = self.conv1(F.pad(u_BSH.transpose(1, 2), (1, 0)))
        return u_BSH + self.conv2(F.pad(c, (1, 0))).transpose(1, 2)


class MovingAverage(nn.Module):
    """Each channel expanded to 16 damped moving averages, summed, plus the weighted channel; then silu.

    y_t = sum_j eta_j s_{t,j} / 4 + omega u_t,  s_{t,j} = alpha_j beta_j u_t + (1 - alpha_j delta_j) s_{t-1,j}
    with alpha and delta in (0, 1): 65 H parameters. Computed as one long convolution (MEGA, section 3.3).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        shape = (hidden, EMA_DIMS)
        self.alpha = nn.Parameter(torch.empty(shape).normal_(0, 0.2))
        self.delta = nn.Parameter(torch.empty(shape).normal_(0, 0.2))
        self.beta = nn.Parameter(torch.empty(shape).normal_(0, 0.02))
        self.eta = nn.Parameter(torch.empty(shape).normal_(0, 1.0))
        self.omega = nn.Parameter(torch.ones(hidden))
        with torch.no_grad():
            signs = torch.ones(EMA_DIMS)
            signs[1::2] = -1
            self.beta += signs

    def forward(self, u_BSH: Tensor, document_start: Tensor | None = None, *_: object) -> Tensor:
        length = u_BSH.shape[1]
        alpha, delta = self.alpha.sigmoid(), self.delta.sigmoid()
        times = torch.arange(length, device=u_BSH.device)
        decay_HJT = torch.exp(times * torch.log1p(-alpha * delta).unsqueeze(-1))
        weights = self.eta * alpha * self.beta / EMA_DIMS**0.5
        kernel_HT = torch.einsum("hj,hjt->ht", weights, decay_HJT)
        spectrum = torch.fft.rfft(u_BSH.transpose(1, 2), n=2 * length) * torch.fft.rfft(
            kernel_HT, n=2 * length
        )
        averaged = torch.fft.irfft(spectrum, n=2 * length)[..., :length].transpose(1, 2)
        return F.silu(averaged + self.omega * u_BSH)


def build(form: str, shape: ModelConfig, *, seed: int | None) -> Transformer:
    """Return the model with one form of attention; equal seeds give equal weights where forms share them.
    None: nothing is drawn."""
    kind = "localized_filter" if form == "lfa" else "plain"
    model = Transformer(replace(shape, attention=kind))
    if seed is not None:
        init_weights(model, seed=seed)
        torch.manual_seed(seed)
    for block in model.blocks.values():
        filter_ = _filter(form, shape.hidden_size)
        if filter_ is not None:
            block.filter = cast(Any, filter_)
    return model


def _filter(form: str, hidden: int) -> nn.Module | None:
    if form.startswith("conv"):
        return OneConvolution(hidden, int(form.removeprefix("conv")))
    if form == "two":
        return TwoConvolutions(hidden)
    if form == "ema":
        return MovingAverage(hidden)
    return None


def count_parameters(form: str, shape: ModelConfig) -> int:
    """Return the number of parameters of the model with this form, without allocating them."""
    with torch.device("meta"):
        model = build(form, shape, seed=None)
    return sum(parameter.numel() for parameter in model.parameters())


# --- training --------------------------------------------------------------------------------------------

TESTED = 512
"""Sequences of the test, at most."""


@case(
    "training/ablation",
    formats={"parameters": ",", "paper's parameters": ",", "test loss": ".4f", "paper's loss": ".4f"},
    data=("data/corpus",),
    forms=(tuple(PAPER),),
    seeds=((1, 2, 3),),
    steps=(300,),
    hidden=(128,),
    layers=(3,),
    vocabulary=(4096,),
    tokens=(128,),
    batch=(16,),
)
def ablation(
    data: str, forms: Sequence[str], seeds: Sequence[int], steps: int, tokens: int, batch: int, **shape: int
) -> Iterator[Row]:
    """Each form beside the paper's figures: test loss in nats per token, the mean (with standard deviation)
    over the seeds, and against `basic` seed by seed. `ms`: the median of a step."""
    heads = max(1, shape["hidden"] // 32)
    keys = {"num_attention_heads": heads, "vocab_size": shape["vocabulary"], "attention": "plain"}
    model = bench_model(shape["layers"], shape["hidden"], **keys)
    found: dict[str, list[tuple[float, float]]] = {form: [] for form in forms}
    for seed in seeds:
        # The seed determines the weights and the order of the data; the split depends only on the corpus.
        spec = SampleSpec(sequence_length=tokens, seed=0, vocab_size=model.vocab_size)
        source, split = [(data, 1.0)], (0.95, 0.05)
        train = open_corpora(source, replace(spec, seed=seed), split=split, part="train")
        test = open_corpora(source, spec, split=split, part="validation")
        for form, own in found.items():
            own.append(train_form(build(form, model, seed=seed), steps, batch, train, test))
    for form, own in found.items():
        losses, milliseconds = [loss for loss, _ in own], 1e3 * statistics.median(took for _, took in own)
        spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
        base = [loss for loss, _ in found.get("basic", own)]
        against = statistics.fmean(loss / other - 1 for loss, other in zip(losses, base, strict=True))
        parameters, _, loss = PAPER[form]
        row: Row = {"form": form, "parameters": count_parameters(form, model), "ms": f"{milliseconds:.0f}"}
        row |= {"test loss": statistics.fmean(losses), "sd": f"{spread:.4f}", "to basic": f"{against:+.2%}"}
        row |= {"paper's parameters": parameters, "paper's loss": loss}
        yield row | {"paper's to basic": f"{loss / PAPER['basic'][2] - 1:+.2%}"}


def train_form(model: Transformer, steps: int, batch: int, train: Blend, test: Blend) -> tuple[float, float]:
    """The test loss of a model after so many steps, and the median seconds of one."""
    config = OptimizerConfig(learning_rate=2e-3, minimum_learning_rate=2e-4, warmup_steps=max(1, steps // 20))
    matrices, others = ([p for p in model.parameters() if (p.ndim >= 2) == own] for own in (True, False))
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others}]
    keys = {"betas": (config.beta1, config.beta2), "eps": config.epsilon, "lr": 0.0, "weight_decay": 0.0}
    adamw = torch.optim.AdamW(groups, **keys)
    seconds: list[float] = []
    for step in range(steps):
        start = time.perf_counter()
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step, config, decay_steps=steps)
        loss = mean_loss(model, train, step * batch, batch)
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        adamw.step()
        seconds.append(time.perf_counter() - start)
    count = min(TESTED, test.corpora[0].samples_per_epoch)
    sizes = {first: min(batch, count - first) for first in range(0, count, batch)}
    with torch.no_grad():
        total = sum(float(mean_loss(model, test, first, size)) * size for first, size in sizes.items())
    return total / count, statistics.median(seconds)


def mean_loss(model: Transformer, blend: Blend, first: int, count: int) -> Tensor:
    """The mean loss per token of samples [first, first + count), in nats."""
    batch = blend.batch(first, count)
    hidden = model(torch.from_numpy(batch.inputs))
    return model.loss(hidden, torch.from_numpy(batch.targets)) / batch.targets.size
