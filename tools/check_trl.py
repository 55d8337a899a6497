"""Our losses against TRL's own: the same model as a Hugging Face Llama, the same samples.

`tools/check_trl.sh` runs it where TRL is installed. TRL's `GRPOTrainer._compute_loss`,
`DPOTrainer._compute_loss` and `RewardTrainer.compute_loss` are called on a stand-in for the trainer, which
has what they read of it. Prints a line a case; exits with 1 if a loss or a gradient of any parameter is off
by more than 1e-5. With `--golden FILE` it also writes what TRL makes of given log-probabilities: losses and
their gradients, for tests without TRL.
"""

from __future__ import annotations

import argparse
import collections
import json
import sys
import types
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification
from trl.trainer.dpo_trainer import DPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.grpo_trainer import GRPOTrainer  # pyright: ignore[reportMissingImports]
from trl.trainer.reward_trainer import RewardTrainer  # pyright: ignore[reportMissingImports]

from tests.support.models import tiny_model
from yuan_train.config.model import ModelConfig
from yuan_train.models.architectures import llama
from yuan_train.models.decoder import Publishing
from yuan_train.models.transformer import IGNORE_INDEX, Transformer, init_weights
from yuan_train.objectives.losses import (
    BatchTotals,
    aggregate,
    aipo_loss,
    clipped_loss,
    log_ratio_margin,
    loss_penalty,
    preference_loss,
    reward_loss,
    sample_lengths,
)
from yuan_train.rl.updates import dr_grpo, grpo

TOLERANCE = 1e-5
RATE = 0.01
"""Of the step between two epochs: ratios then are beyond the clip for some tokens."""
PROMPTS, GROUP, PROMPT, ANSWER, VOCABULARY = 3, 4, 7, 9, 96


@dataclass(frozen=True)
class PolicyCase:
    """One loss of GRPO's family."""

    trl: str
    """TRL's `loss_type`."""
    beta: float = 0.0
    clip: tuple[float, float] = (0.2, 0.2)
    dual_clip: float | None = None


POLICY = (
    PolicyCase("grpo"),
    PolicyCase("grpo", beta=0.04, clip=(0.2, 0.28)),
    PolicyCase("grpo", dual_clip=1.5),
    PolicyCase("dr_grpo", beta=0.04),
    PolicyCase("dapo", beta=0.1, clip=(0.2, 0.28)),
    PolicyCase("cispo", clip=(0.2, 2.0)),
    PolicyCase("cispo", clip=(0.2, 1.05)),
)
NORMALISE = {"grpo": "sequence", "dr_grpo": "constant", "dapo": "token", "cispo": "token"}

PREFERENCE = (
    {"loss": "sigmoid", "beta": 0.1, "smoothing": 0.0},
    {"loss": "sigmoid", "beta": 0.5, "smoothing": 0.1},
    {"loss": "ipo", "beta": 0.1, "smoothing": 0.0},
)


@dataclass(frozen=True)
class Samples:
    """Prompts padded on the left and answers on the right, as TRL has them; B = PROMPTS * GROUP."""

    ids_BS: torch.Tensor
    prompt_mask: torch.Tensor
    answer_mask: torch.Tensor
    rewards_QG: torch.Tensor


def draw_samples(*, equal_answers: bool = False) -> Samples:
    """Random prompts of unlike lengths, each with a group of random answers."""
    generator = torch.Generator().manual_seed(0)
    batch = PROMPTS * GROUP
    prompt_lengths = torch.randint(3, PROMPT + 1, (PROMPTS,), generator=generator).repeat_interleave(GROUP)
    answer_lengths = torch.randint(2, ANSWER + 1, (batch,), generator=generator)
    if equal_answers:
        answer_lengths.fill_(ANSWER)
    ids = torch.randint(1, VOCABULARY, (batch, PROMPT + ANSWER), generator=generator)
    ids[:, :PROMPT] = ids[::GROUP, :PROMPT].repeat_interleave(GROUP, 0)
    prompt_mask = (torch.arange(PROMPT) >= (PROMPT - prompt_lengths)[:, None]).long()
    answer_mask = (torch.arange(ANSWER) < answer_lengths[:, None]).long()
    rewards = torch.rand(PROMPTS, GROUP, generator=generator, dtype=torch.float64)
    return Samples(ids * torch.cat([prompt_mask, answer_mask], 1), prompt_mask, answer_mask, rewards)


# --- the two models ---------------------------------------------------------------------------------------


def build_models(output: str) -> tuple[Transformer, Any]:
    """Our model and Hugging Face's, in fp64, with the same weights."""
    sizes = {"num_layers": 2, "vocab_size": VOCABULARY, "max_sequence_length": 64}
    config = tiny_model("llama", **sizes, rope_scaling=None, init_std=0.1, output=output)
    ours = Transformer(config, dtype=torch.float64)
    init_weights(ours, seed=3)
    theirs_config = published_config(config, pad_token_id=0, num_labels=1)
    kind: Any = LlamaForCausalLM if output == "vocabulary" else LlamaForSequenceClassification
    theirs = kind(theirs_config).to(torch.float64)
    theirs.load_state_dict(published(config, {k: v.detach().clone() for k, v in ours.named_parameters()}))
    return ours, theirs.train()


def published_config(config: ModelConfig, **more: Any) -> LlamaConfig:
    """Hugging Face's configuration of a Llama of ours."""
    found = llama.published_config(config, Publishing(dtype="float32"))
    return LlamaConfig(**found | more)


def published(config: ModelConfig, named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Our tensors under Hugging Face's names of a Llama."""
    found = {"score.weight": named["score.weight"].unsqueeze(0)} if "score.weight" in named else {}
    for one in llama.published_layout(config):
        if one.name in named:
            found |= zip(one.parts, named[one.name].chunk(len(one.parts)), strict=True)
    return found


def our_log_probs(model: Transformer, samples: Samples) -> torch.Tensor:
    """Log-probabilities [B, ANSWER] of the answers' tokens, 0 where there is none."""
    batch, length = samples.ids_BS.shape
    rows = torch.zeros(batch, length, dtype=torch.long)
    targets = torch.full((batch, length), IGNORE_INDEX)
    answers = samples.answer_mask.sum(1).tolist()
    prompts = samples.prompt_mask.sum(1).tolist()
    for b in range(batch):
        answer = samples.ids_BS[b, PROMPT : PROMPT + answers[b]]
        row = torch.cat([samples.ids_BS[b, PROMPT - prompts[b] : PROMPT], answer])
        rows[b, : len(row)] = row
        targets[b, prompts[b] - 1 : len(row) - 1] = answer
    losses_BS = model.loss(model(rows), targets, reduction="none")
    places = torch.tensor(prompts)[:, None] - 1 + torch.arange(ANSWER)
    found = -losses_BS.gather(1, places.clamp(max=length - 1))
    return found.where(samples.answer_mask.bool(), 0)


def their_log_probs(
    model: Any, input_ids: Any, attention_mask: Any, logits_to_keep: int, **_: Any
) -> tuple[torch.Tensor, torch.Tensor, None]:
    """Stands in for `_get_per_token_logps_and_entropies`, of which TRL 1.16 has only a fused form."""
    positions = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    logits = model(input_ids=input_ids, attention_mask=attention_mask, position_ids=positions).logits
    log_probs = logits[:, -logits_to_keep - 1 : -1].log_softmax(-1)
    found = log_probs.gather(-1, input_ids[:, -logits_to_keep:, None]).squeeze(-1)
    return found, -(log_probs.exp() * log_probs).sum(-1).detach(), None


# --- TRL's losses on a stand-in ---------------------------------------------------------------------------


class _Accelerator:
    """One process."""

    num_processes = 1
    device = torch.device("cpu")

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(1) if x.dim() == 0 else x

    def gather_for_metrics(self, x: torch.Tensor) -> torch.Tensor:
        return self.gather(x)

    def reduce(self, x: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
        return x


def _trainer(args: dict[str, Any], **keys: Any) -> Any:
    """What stands in for a trainer in training, with these arguments; `keys` are what else is read of it."""
    return types.SimpleNamespace(
        model=types.SimpleNamespace(training=True),
        accelerator=_Accelerator(),
        args=types.SimpleNamespace(**args),
        aux_loss_enabled=False,
        _metrics={"train": collections.defaultdict(list), "eval": collections.defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        **keys,
    )


def trl_policy_loss(
    case: PolicyCase, log_probs_of: Any, model: Any, samples: Samples, old: Any, reference: Any
) -> torch.Tensor:
    """`GRPOTrainer._compute_loss`; `log_probs_of` gives the answers' log-probabilities."""
    trainer = _trainer(
        {"use_bias_correction_kl": False, "delta": case.dual_clip, "steps_per_generation": 1},
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level="token",
        beta=case.beta,
        loss_type=case.trl,
        epsilon_low=case.clip[0],
        epsilon_high=case.clip[1],
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=ANSWER,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        temperature=1.0,
        _get_per_token_logps_and_entropies=log_probs_of,
    )
    inputs = {
        "prompt_ids": samples.ids_BS[:, :PROMPT],
        "prompt_mask": samples.prompt_mask,
        "completion_ids": samples.ids_BS[:, PROMPT:],
        "completion_mask": samples.answer_mask,
        "advantages": advantages_of(case, samples).flatten(),
        "old_per_token_logps": old,
        "ref_per_token_logps": reference,
        "num_items_in_batch": samples.answer_mask.sum(),
    }
    return GRPOTrainer._compute_loss(trainer, model, inputs)


def trl_preference_loss(
    case: dict[str, Any], log_probs_of: Any, samples: Samples, reference: torch.Tensor
) -> torch.Tensor:
    """`DPOTrainer._compute_loss`; rows are the chosen answers, then the rejected ones.

    cDPO is its `aot` on one pair at a time, where nothing is sorted. Its `ipo` divides log-probabilities by
    the answer's tokens n, ours does not: with answers of one length, beta n and a loss n^2 times as large.
    """
    pairs = len(samples.ids_BS) // 2
    tokens = int(samples.answer_mask[0].sum())
    loss_type = "ipo" if case["loss"] == "ipo" else "aot" if case["smoothing"] else "sigmoid"
    trainer = _trainer(
        {"use_liger_kernel": False},
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        beta=case["beta"] * (tokens if loss_type == "ipo" else 1),
        label_smoothing=case["smoothing"],
        use_weighting=False,
    )
    parts = [[i] for i in range(pairs)] if loss_type == "aot" else [list(range(pairs))]
    total = torch.zeros((), dtype=torch.float64)
    log_probs = log_probs_of()
    for part in parts:
        rows = [*part, *(pairs + i for i in part)]
        nothing = torch.zeros_like(log_probs[rows]).detach()
        output = types.SimpleNamespace(
            log_probs=log_probs[rows], entropy=nothing, mean_logits=nothing, is_top1=nothing.bool()
        )
        mask = torch.cat([torch.zeros(len(rows), 1, dtype=torch.long), samples.answer_mask[rows]], 1)
        inputs = {
            "input_ids": torch.zeros_like(mask),
            "attention_mask": torch.ones_like(mask),
            "completion_mask": mask,
            "ref_chosen_logps": reference[rows].sum(1)[: len(part)],
            "ref_rejected_logps": reference[rows].sum(1)[len(part) :],
        }
        loss = DPOTrainer._compute_loss(trainer, lambda output=output, **_: output, inputs, False)
        total = total + loss * len(part) / pairs
    return total * (tokens**2 if loss_type == "ipo" else 1)


def trl_reward_loss(model: Any, inputs: dict[str, Any]) -> torch.Tensor:
    """`RewardTrainer.compute_loss`; rows are the chosen answers, then the rejected ones."""
    return RewardTrainer.compute_loss(_trainer({"center_rewards_coefficient": None}), model, inputs)


# --- ours -------------------------------------------------------------------------------------------------


def advantages_of(case: PolicyCase, samples: Samples) -> torch.Tensor:
    """[Q, G]."""
    return grpo(samples.rewards_QG) if case.trl in ("grpo", "dapo") else dr_grpo(samples.rewards_QG)


def our_policy_loss(
    case: PolicyCase, model: Transformer, samples: Samples, old: torch.Tensor, reference: torch.Tensor
) -> torch.Tensor:
    """The same by our functions."""
    log_probs = our_log_probs(model, samples)
    advantages = advantages_of(case, samples).reshape(-1, 1)
    mask = samples.answer_mask.bool()
    if case.trl == "cispo":
        losses = aipo_loss(log_probs, old, advantages, rho=case.clip[1])
    else:
        losses = clipped_loss(log_probs, old, advantages, clip=case.clip, dual_clip=case.dual_clip)
    if case.beta:
        losses = losses + loss_penalty(log_probs, reference, "k3", coefficient=case.beta)
    totals = BatchTotals(samples=len(mask), tokens=int(mask.sum()), max_new_tokens=ANSWER)
    return aggregate(losses, mask, sample_lengths(mask), NORMALISE[case.trl], totals)  # pyright: ignore


def our_preference_loss(
    case: dict[str, Any], model: Transformer, samples: Samples, reference: torch.Tensor
) -> torch.Tensor:
    """The same by our functions."""
    chosen, rejected = our_log_probs(model, samples).sum(1).chunk(2)
    margin = log_ratio_margin(chosen, rejected, *reference.sum(1).chunk(2))
    return preference_loss(margin, **case).mean()


def our_reward_loss(model: Transformer, rows: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
    """The same by our functions: rows padded on the right."""
    scores = model.scores(model(rows)).gather(1, lengths[:, None] - 1).squeeze(1)
    chosen, rejected = scores.chunk(2)
    return reward_loss(chosen, rejected).mean()


# --- the comparison ---------------------------------------------------------------------------------------


def compare(name: str, ours: Transformer, theirs: Any, our_loss: Any, their_loss: Any) -> float:
    """Largest difference of loss and gradients; prints it."""
    ours.zero_grad()
    theirs.zero_grad()
    here, there = our_loss(), their_loss()
    here.backward()
    there.backward()
    expected = {k: p.grad for k, p in theirs.named_parameters() if p.grad is not None}
    found = published(ours.config, {k: p.grad for k, p in ours.named_parameters() if p.grad is not None})
    assert set(found) == set(expected)
    gradient = max(float((found[k] - expected[k]).abs().max()) for k in found)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    loss = abs(here.item() - there.item())
    print(
        f"{name:52s} loss {there.item(): .8f}  difference {loss:.1e}, "
        f"of gradients {gradient:.1e} (largest {largest:.1e})"
    )
    return max(loss, gradient)


def _their_answers(model: Any, samples: Samples) -> torch.Tensor:
    mask = torch.cat([samples.prompt_mask, samples.answer_mask], 1)
    return their_log_probs(model, samples.ids_BS, mask, ANSWER)[0] * samples.answer_mask


def compare_epochs(samples: Samples) -> float:
    """GRPO with `algorithm.epochs: 2` beside TRL's `num_iterations: 2`: the second pass of a batch, after a
    step of the first, has the log-probabilities and the advantages from before both."""
    ours, theirs = build_models("vocabulary")
    case, worst = PolicyCase("grpo", beta=0.04), 0.0
    with torch.no_grad():
        old, reference = our_log_probs(ours, samples), our_log_probs(ours, samples)
        their_old = _their_answers(theirs, samples)
    for epoch in (1, 2):
        here = partial(our_policy_loss, case, ours, samples, old, reference)
        there = partial(trl_policy_loss, case, their_log_probs, theirs, samples, their_old, their_old)
        worst = max(worst, compare(f"grpo, epoch {epoch} of 2", ours, theirs, here, there))
        for parameter in (*ours.parameters(), *theirs.parameters()):
            assert parameter.grad is not None
            parameter.data -= RATE * parameter.grad
    with torch.no_grad():
        ratio = (our_log_probs(ours, samples) - old).exp()[samples.answer_mask.bool()]
    clipped = float(((ratio - 1).abs() > case.clip[0]).double().mean())
    print(f"{'':52s} ratios after both {ratio.min():.2f} to {ratio.max():.2f}, {clipped:.0%} beyond the clip")
    return worst


def compare_all(noise: torch.Generator) -> float:
    """The largest difference of all cases."""
    ours, theirs = build_models("vocabulary")
    samples = draw_samples()
    even = draw_samples(equal_answers=True)
    shape = samples.answer_mask.shape
    with torch.no_grad():
        base = {False: our_log_probs(ours, samples), True: our_log_probs(ours, even)}
    old = base[False] + 0.5 * torch.randn(shape, generator=noise, dtype=torch.float64)
    drift = 0.3 * torch.randn(shape, generator=noise, dtype=torch.float64)
    worst = 0.0
    for case in POLICY:
        given = (samples, old, base[False] + drift)
        name = f"{case.trl}, kl {case.beta}, clip {case.clip}, dual {case.dual_clip}"
        here = partial(our_policy_loss, case, ours, *given)
        there = partial(trl_policy_loss, case, their_log_probs, theirs, *given)
        worst = max(worst, compare(name, ours, theirs, here, there))
    worst = max(worst, compare_epochs(samples))
    for case in PREFERENCE:
        drawn = even if case["loss"] == "ipo" else samples
        reference = (base[drawn is even] + drift) * drawn.answer_mask
        name = f"{case['loss']}, beta {case['beta']}, smoothing {case['smoothing']}"
        here = partial(our_preference_loss, case, ours, drawn, reference)
        there = partial(trl_preference_loss, case, partial(_their_answers, theirs, drawn), drawn, reference)
        worst = max(worst, compare(name, ours, theirs, here, there))
    ours, theirs = build_models("value")
    rows = samples.ids_BS[:, PROMPT:]
    here = partial(our_reward_loss, ours, rows, samples.answer_mask.sum(1))
    there = partial(trl_reward_loss, theirs, {"input_ids": rows, "attention_mask": samples.answer_mask})
    return max(worst, compare("reward model", ours, theirs, here, there))


# --- golden data ------------------------------------------------------------------------------------------


def golden(noise: torch.Generator) -> dict[str, Any]:
    """TRL's losses of given log-probabilities, and their gradients by these."""
    samples = draw_samples()
    even = draw_samples(equal_answers=True)
    shape = samples.answer_mask.shape

    def draw(scale: float) -> torch.Tensor:
        return (scale * torch.randn(shape, generator=noise, dtype=torch.float64)).round(decimals=4)

    base = -3 + draw(1.0)
    old, reference = base + draw(0.5), base + draw(0.3)
    policy: list[dict[str, Any]] = []
    for case in POLICY:
        leaf = base.clone().requires_grad_()
        given = (leaf, torch.zeros_like(leaf), None)
        loss = trl_policy_loss(case, lambda *a, given=given, **k: given, None, samples, old, reference)
        loss.backward()
        policy.append(
            {"trl": case.trl, "beta": case.beta, "clip": list(case.clip), "dual_clip": case.dual_clip}
            | {"normalise": NORMALISE[case.trl], "loss": loss.item(), "gradient": _rounded(leaf.grad)}
        )
    preference: list[dict[str, Any]] = []
    for case in PREFERENCE:
        drawn = even if case["loss"] == "ipo" else samples
        leaf = base.clone().requires_grad_()
        own = drawn.answer_mask
        loss = trl_preference_loss(case, lambda leaf=leaf, own=own: leaf * own, drawn, reference * own)
        loss.backward()
        preference.append({**case, "value": loss.item(), "gradient": _rounded(leaf.grad)})
    tables = {"mask": samples.answer_mask, "rewards": samples.rewards_QG, "log_probs": base}
    tables |= {"old": old, "reference": reference}
    named = {name: table.tolist() for name, table in tables.items()}
    return {"max_new_tokens": ANSWER, **named, "policy": policy, "preference": preference}


def _rounded(values: torch.Tensor | None) -> list[list[float]]:
    assert values is not None
    return [[float(f"{value:.9g}") for value in row] for row in values.tolist()]


def main() -> int:
    """Compare, and write golden data if asked."""
    import transformers
    import trl  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--golden", type=Path, metavar="FILE", help="where to write golden data")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(f"trl {trl.__version__}, transformers {transformers.__version__}, torch {torch.__version__}")
    worst = compare_all(torch.Generator().manual_seed(1))
    if arguments.golden is not None:
        found = {"trl": trl.__version__, **golden(torch.Generator().manual_seed(2))}
        # One row of a table a line.
        text = json.dumps(found).replace("]], ", "]],\n").replace("], [", "],\n [")
        arguments.golden.write_text(text + "\n", encoding="utf-8")
    if worst > TOLERANCE:
        print(f"error: a difference of {worst:.1e}; at most {TOLERANCE:g} is allowed", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
