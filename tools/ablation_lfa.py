"""python tools/ablation_lfa.py --out runs/ablation: the Yuan 2.0 paper's Table 1, at a size for a CPU.

Trains the same small model with eight forms of attention on the same batches, several seeds each, and
tabulates test loss (mean and standard deviation), parameters and time per step next to the paper's columns.
Results are stored in OUT/results.jsonl, and a second call runs only what is missing there. The table is
OUT/table.md.

    basic      queries and keys from the norm's output u (as in LLaMA)
    ema        from a multi-dimensional damped moving average of u, 16 dims (MEGA, Ma et al. 2022)
    conv1..7   from u + one causal convolution of k taps, H to H
    two        from u + two convolutions of two taps, H to H/2 to H
    lfa        as `two`, with a norm over the sum: Yuan 2.0's form
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from yuan_train.config.errors import YuanError
from yuan_train.config.model import ModelConfig
from yuan_train.config.run import OptimizerConfig
from yuan_train.data.loader import Blend, open_corpora
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
PAPER_SHAPE = ModelConfig(
    name="table-1",
    num_layers=6,
    hidden_size=768,
    num_attention_heads=12,
    ffn_hidden_size=3072,
    vocab_size=135_040,
    attention="plain",
)


# --- the forms -------------------------------------------------------------------------------------------


class OneConvolution(nn.Module):
    """f = u + convolution of `taps` causal taps, dense over the channels, with bias."""

    def __init__(self, hidden: int, taps: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.conv = nn.Conv1d(hidden, hidden, taps, device=device)

    def forward(self, u_BSH: Tensor, document_start: Tensor | None = None, *_: object) -> Tensor:
        padded = F.pad(u_BSH.transpose(1, 2), (self.conv.kernel_size[0] - 1, 0))
        return u_BSH + self.conv(padded).transpose(1, 2)


class TwoConvolutions(nn.Module):
    """f = u + conv2(conv1(u)), two taps each, H to H/2 to H; inputs before the first token are zero."""

    def __init__(self, hidden: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(hidden, hidden // 2, 2, device=device)
        self.conv2 = nn.Conv1d(hidden // 2, hidden, 2, device=device)

    def forward(self, u_BSH: Tensor, document_start: Tensor | None = None, *_: object) -> Tensor:
        c = self.conv1(F.pad(u_BSH.transpose(1, 2), (1, 0)))
        return u_BSH + self.conv2(F.pad(c, (1, 0))).transpose(1, 2)


class MovingAverage(nn.Module):
    """Each channel expanded to 16 damped moving averages, summed, plus the weighted channel; then silu.

    y_t = sum_j eta_j s_{t,j} / 4 + omega u_t,  s_{t,j} = alpha_j beta_j u_t + (1 - alpha_j delta_j) s_{t-1,j}
    with alpha and delta in (0, 1): 65 H parameters. Computed as one long convolution (MEGA, section 3.3).
    """

    def __init__(self, hidden: int, *, device: torch.device | str = "cpu") -> None:
        super().__init__()
        shape = (hidden, EMA_DIMS)
        self.alpha = nn.Parameter(torch.empty(shape, device=device).normal_(0, 0.2))
        self.delta = nn.Parameter(torch.empty(shape, device=device).normal_(0, 0.2))
        self.beta = nn.Parameter(torch.empty(shape, device=device).normal_(0, 0.02))
        self.eta = nn.Parameter(torch.empty(shape, device=device).normal_(0, 1.0))
        self.omega = nn.Parameter(torch.ones(hidden, device=device))
        with torch.no_grad():
            signs = torch.ones(EMA_DIMS, device=device)
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


def build(form: str, shape: ModelConfig, *, seed: int, device: str = "cpu") -> Transformer:
    """Return the model with one form of attention; equal seeds give equal weights where forms share them."""
    kind = "localized_filter" if form == "lfa" else "plain"
    model = Transformer(replace(shape, attention=kind), device=device)
    if device != "meta":
        init_weights(model, seed=seed)
        torch.manual_seed(seed)
    for block in model.blocks.values():
        filter_ = _filter(form, shape.hidden_size, device)
        if filter_ is not None:
            block.filter = cast(Any, filter_)
    return model


def _filter(form: str, hidden: int, device: str) -> nn.Module | None:
    if form.startswith("conv"):
        return OneConvolution(hidden, int(form.removeprefix("conv")), device=device)
    if form == "two":
        return TwoConvolutions(hidden, device=device)
    if form == "ema":
        return MovingAverage(hidden, device=device)
    return None


def count_parameters(form: str, shape: ModelConfig) -> int:
    """Return the number of parameters of the model with this form, without allocating them."""
    return sum(parameter.numel() for parameter in build(form, shape, seed=0, device="meta").parameters())


# --- training --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """Sizes and training settings of the comparison: equal for all forms."""

    shape: ModelConfig
    optimizer: OptimizerConfig
    sequence_length: int
    batch_size: int
    steps: int
    test_sequences: int


@dataclass(frozen=True)
class Result:
    """One run; losses in nats per token. `seconds` is the median time of a step."""

    form: str
    seed: int
    parameters: int
    test_loss: float
    train_loss: float
    seconds: float
    settings: dict[str, Any]


def run(form: str, seed: int, settings: Settings, train: Blend, test: Blend) -> Result:
    """Train and test one form with one seed."""
    model = build(form, settings.shape, seed=seed)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    config = settings.optimizer
    adamw = torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": config.weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        lr=0.0,
    )
    losses, seconds = [], []
    for step in range(settings.steps):
        start = time.perf_counter()
        for group in adamw.param_groups:
            group["lr"] = learning_rate(step, config, decay_steps=settings.steps)
        loss = mean_loss(model, train, step * settings.batch_size, settings.batch_size)
        adamw.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), config.clip_grad_norm)
        adamw.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - start)
    with torch.no_grad():
        count = min(settings.test_sequences, test.corpora[0].samples_per_epoch)
        batches = range(0, count, settings.batch_size)
        tested = [mean_loss(model, test, first, min(settings.batch_size, count - first)) for first in batches]
        sizes = [min(settings.batch_size, count - first) for first in batches]
        test_loss = sum(float(a) * b for a, b in zip(tested, sizes, strict=True)) / count
    return Result(
        form=form,
        seed=seed,
        parameters=sum(p.numel() for p in model.parameters()),
        test_loss=test_loss,
        train_loss=statistics.fmean(losses[-20:]),
        seconds=statistics.median(seconds),
        settings=as_json(settings),
    )


def mean_loss(model: Transformer, blend: Blend, first: int, count: int) -> Tensor:
    """Return the mean loss per token of samples [first, first + count), in nats."""
    batch = blend.batch(first, count)
    hidden = model(torch.from_numpy(batch.inputs))
    return model.loss(hidden, torch.from_numpy(batch.targets)) / batch.targets.size


def as_json(settings: Settings) -> dict[str, Any]:
    """Return the settings as JSON values: results of different settings must not be mixed."""
    return json.loads(json.dumps(asdict(settings)))


# --- the table -------------------------------------------------------------------------------------------


def table(results: Iterable[Result]) -> str:
    """Return the comparison as Markdown, with the paper's columns. Forms without results are omitted."""
    by_form = {form: [r for r in results if r.form == form] for form in PAPER}
    base = by_form.get("basic", [])
    base_loss = statistics.fmean(r.test_loss for r in base) if base else None
    lines = [
        "| attention | parameters | ms/step | test loss (mean ± sd over seeds) | against basic | seeds | "
        "paper: parameters | paper: ms | paper: test loss | paper: against basic |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for form, found in by_form.items():
        if not found:
            continue
        losses = [r.test_loss for r in found]
        mean = statistics.fmean(losses)
        spread = statistics.stdev(losses) if len(losses) > 1 else float("nan")
        against = f"{100 * (mean / base_loss - 1):+.2f} %" if base_loss else ""
        parameters, milliseconds, loss = PAPER[form]
        seconds = statistics.median(r.seconds for r in found)
        lines.append(
            f"| {form} | {found[0].parameters:,} | {1000 * seconds:.0f} | "
            f"{mean:.4f} ± {spread:.4f} | {against} | {len(found)} | {parameters:,} | {milliseconds} | "
            f"{loss:.4f} | {100 * (loss / PAPER['basic'][2] - 1):+.2f} % |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Run the missing results, then print and write the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--data", default="data/corpus", metavar="PREFIX", help="token files")
    parser.add_argument("--forms", nargs="+", choices=list(PAPER), default=list(PAPER))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--vocab-size", type=int, default=4096)
    parser.add_argument("--sequence-length", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    settings = Settings(
        shape=ModelConfig(
            name="ablation",
            num_layers=options.layers,
            hidden_size=options.hidden,
            num_attention_heads=max(1, options.hidden // 32),
            ffn_hidden_size=4 * options.hidden,
            vocab_size=options.vocab_size,
            attention="plain",
        ),
        optimizer=OptimizerConfig(
            learning_rate=options.learning_rate,
            minimum_learning_rate=options.learning_rate / 10,
            warmup_steps=max(1, options.steps // 20),
        ),
        sequence_length=options.sequence_length,
        batch_size=options.batch_size,
        steps=options.steps,
        test_sequences=512,
    )
    try:
        results = _run_missing(options, settings)
    except YuanError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    text = table(results)
    (options.out / "table.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


def _run_missing(options: argparse.Namespace, settings: Settings) -> list[Result]:
    options.out.mkdir(parents=True, exist_ok=True)
    stored = options.out / "results.jsonl"
    lines = stored.read_text(encoding="utf-8").splitlines() if stored.exists() else []
    results = [Result(**json.loads(line)) for line in lines]
    results = [result for result in results if result.settings == as_json(settings)]
    done = {(result.form, result.seed) for result in results}
    for seed in options.seeds:
        # The seed determines the weights and the order of the data; the split depends only on the corpus.
        train, test = (
            open_corpora(
                [(options.data, 1.0)],
                sequence_length=settings.sequence_length,
                seed=seed if part == "train" else 0,
                vocab_size=settings.shape.vocab_size,
                split=(0.95, 0.05),
                part=part,
            )
            for part in ("train", "validation")
        )
        for form in options.forms:
            if (form, seed) in done:
                continue
            result = run(form, seed, settings, train, test)
            results.append(result)
            with stored.open("a", encoding="utf-8") as file:
                file.write(json.dumps(asdict(result)) + "\n")
            print(f"{form} seed {seed}: test loss {result.test_loss:.4f}", file=sys.stderr, flush=True)
    return results


if __name__ == "__main__":
    sys.exit(main())
